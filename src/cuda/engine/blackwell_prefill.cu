// Chunked forward for Blackwell (sm_100a), in CTA pairs. It has been emulated, and has never run on a GPU.
//
// All is as in the forward for Hopper (hopper_prefill_pairs.cu), except for what consumers do: their products are those
// of tcgen05, with left operands and sums in tensor memory (blackwell_consumer.h, blackwell_products.h). Producers are
// Hopper's, with scores that are exact for any gate.
#include "cuda/engine/blackwell_consumer.h"
#include "cuda/engine/declarations.h"
#include "cuda/engine/dispatch.h"
#include "cuda/engine/pair_kernel.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class T, bool kWideGate>
__global__ void __cluster_dims__(2) __launch_bounds__(kPairThreads, 1)
    blackwell_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                     const __grid_constant__ States states, const __grid_constant__ TypedView v_new,
                     const __grid_constant__ Schedule given, const __grid_constant__ Tiles tiles,
                     const __grid_constant__ StateTiles state_tiles, const __grid_constant__ SavedTiles saved) {
  run_pair<Producer<T, AnyGateScores, kWideGate, PairSource<false, true>>, sm100::Consumer<T>, sm100::Tensors<1>>(
      {p, x, states, v_new, &tiles, &saved, &state_tiles}, given);
}

}  // namespace

const char* blackwell_prefill_why_not(const ForwardProblem& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (const char* reason = blackwell_why_not(p.args.exec.device_id)) return reason;
  return pairs_why_not(p);
}

uint64_t blackwell_prefill_workspace(const ForwardProblem& p) {
  return Schedule(p, multiprocessors(p.args.exec.device_id)).bytes();
}

void blackwell_prefill(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const Schedule schedule = schedule_of(p);
  if (schedule.pairs == 0) return;
  with_types(p, [&]<class T, bool kWideGate>() {
    launch<blackwell_kernel<T, kWideGate>>(a.exec, dim3(2 * schedule.pairs), static_cast<int>(kPairThreads),
                                           static_cast<int>(Shared::bytes), p, Tokens(p, a.in, a.o), States(a),
                                           view_of(a.v_new), schedule, Tiles(p), StateTiles(), SavedTiles(a.v_new));
  });
}

}  // namespace kda::cuda
