// Forward for few heads and long sequences on Blackwell (sm_100a): sequences are cut into segments, which CTA pairs
// scan at once (math.md 6). It has been emulated, and has never run on a GPU.
//
// All is as in the forward for Hopper (hopper_prefill_segments.cu, segments_kernel.h), except for what consumers do:
// their products are those of tcgen05 (blackwell_consumer.h, blackwell_products.h). Producers are Hopper's, with scores
// that are exact for any gate.
#include "cuda/cuda.h"
#include "cuda/engine/blackwell_consumer.h"
#include "cuda/engine/declarations.h"
#include "cuda/engine/dispatch.h"
#include "cuda/engine/segments_kernel.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class T, bool kWideGate>
__global__ void __cluster_dims__(2) __launch_bounds__(kSegmentThreads, 1)
    blackwell_segments_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                              const __grid_constant__ States states, const __grid_constant__ TypedView v_new,
                              const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles,
                              const __grid_constant__ SavedTiles saved) {
  run_segments<Producer<T, AnyGateScores, kWideGate, TaskSource<false, true>>, sm100::Consumer<T, true, 2>,
               sm100::Consumer<T, false, 2>, sm100::Tensors<2>>({p, x, states, v_new, &tiles, &saved}, segments);
}

}  // namespace

const char* blackwell_prefill_segments_why_not(const ForwardProblem& p) {
  if (const char* reason = blackwell_prefill_why_not(p)) return reason;
  return segments_why_not(p);
}

const char* blackwell_prefill_segments_unsuited(const ForwardProblem& p) {
  if (const char* reason = blackwell_unsuited()) return reason;
  return hopper_prefill_segments_unsuited(p);
}

uint64_t blackwell_prefill_segments_workspace(const ForwardProblem& p) { return Segments::bytes(p, cut_of(p, false)); }

void blackwell_prefill_segments(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const Segments segments = segments_of(p, false);
  const unsigned pairs = segments.pairs(p);
  if (pairs == 0) return;
  with_types(p, [&]<class T, bool kWideGate>() {
    launch<blackwell_segments_kernel<T, kWideGate>>(a.exec, dim3(2 * pairs), static_cast<int>(kSegmentThreads),
                                                    static_cast<int>(Shared::bytes), p, Tokens(p, a.in, a.o), States(a),
                                                    view_of(a.v_new), segments, Tiles(p), SavedTiles(a.v_new));
  });
}

}  // namespace kda::cuda
