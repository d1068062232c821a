// Maps of sequences on Hopper, M and b in one pass (math.md 6): maps.h.
#include "cuda/engine/maps.h"

#include "cuda/engine/consumer.h"
#include "cuda/engine/declarations.h"
#include "cuda/engine/dispatch.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class T, class Scores, bool kWideGate>
__global__ void __cluster_dims__(2) __launch_bounds__(kSegmentThreads, 1)
    maps_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                const __grid_constant__ States states, const __grid_constant__ TypedView M,
                const __grid_constant__ Tiles tiles) {
  run_maps<Producer<T, Scores, kWideGate, MapSource<false>>, Consumer<T, false>, Consumer<T, false, false>>(
      {p, x, states, {}, &tiles, nullptr}, M);
}

}  // namespace

void hopper_prefill_maps(const ForwardProblem& p, const kda_tensor& M) {
  const kda_forward_args& a = p.args;
  const auto pairs = static_cast<unsigned>(p.N * p.HV);
  if (pairs == 0) return;
  const DeviceGuard device(a.exec.device_id);
  with_inputs(p, [&]<class T, class Scores, bool kWideGate>() {
    launch<maps_kernel<T, Scores, kWideGate>>(a.exec, dim3(2 * pairs), static_cast<int>(kSegmentThreads),
                                              static_cast<int>(Shared::bytes), p, Tokens(p, a.in, a.o), States(a),
                                              view_of(M), Tiles(p));
  });
}

}  // namespace kda::cuda
