// The reverse scan on Hopper: the forward's kernels of CTA pairs and of segments, mirrored. Chunks of a head come from
// the last to the first, and the consumer carries dS (reverse_consumer.h). All else is the forward's own: producers,
// ring, schedule, maps, states.
#include "cuda/engine/declarations.h"
#include "cuda/engine/dispatch.h"
#include "cuda/engine/maps.h"
#include "cuda/engine/pair_kernel.h"
#include "cuda/engine/reverse.h"
#include "cuda/engine/reverse_consumer.h"
#include "cuda/engine/segments_kernel.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class Scores>
__global__ void __cluster_dims__(2) __launch_bounds__(kPairThreads, 1)
    reverse_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                   const __grid_constant__ States states, const __grid_constant__ Schedule given,
                   const __grid_constant__ Tiles tiles, const __grid_constant__ StateTiles state_tiles,
                   const __grid_constant__ SavedTiles saved) {
  run_pair<Producer<__nv_bfloat16, Scores, false, PairSource<true, true>>, ReverseConsumer<__nv_bfloat16>>(
      {p, x, states, {}, &tiles, &saved, &state_tiles}, given);
}

template <class Scores>
__global__ void __cluster_dims__(2) __launch_bounds__(kSegmentThreads, 1)
    reverse_segments_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                            const __grid_constant__ States states, const __grid_constant__ Segments segments,
                            const __grid_constant__ Tiles tiles, const __grid_constant__ SavedTiles saved) {
  using T = __nv_bfloat16;
  run_segments<Producer<T, Scores, false, TaskSource<true, true>>, ReverseConsumer<T, true, 2>,
               ReverseConsumer<T, false, 2>>({p, x, states, {}, &tiles, &saved}, segments);
}

template <class Scores>
__global__ void __cluster_dims__(2) __launch_bounds__(kSegmentThreads, 1)
    reverse_maps_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                        const __grid_constant__ States states, const __grid_constant__ TypedView M,
                        const __grid_constant__ Tiles tiles, const __grid_constant__ SavedTiles saved) {
  using T = __nv_bfloat16;
  run_maps<Producer<T, Scores, false, MapSource<true>>, ReverseConsumer<T, true>, ReverseConsumer<T, false>>(
      {p, x, states, {}, &tiles, &saved}, M);
}

// The scan as the problem of a forward: v is dO and o is dv, the first state is dhT and the last dh0, h is dh.
ForwardProblem mirrored(const BackwardProblem& p, const BackwardPlan& plan) {
  const kda_backward_args& a = p.args;
  ForwardProblem x = plan.forward;
  x.args.in.q = plan.q, x.args.in.k = plan.k, x.args.in.v = plan.d_o, x.args.o = plan.plain_dv(a);
  x.args.states = {};
  x.args.states.h0 = a.dhT, x.args.states.hT = a.dh0;
  x.args.h = plan.dh, x.args.v_new = {};
  x.args.exec.workspace = static_cast<char*>(a.exec.workspace) + plan.images;
  return x;
}

template <class Scores>
void launch_pairs(const ForwardProblem& x) {
  const kda_forward_args& a = x.args;
  const Schedule schedule = schedule_of(x);
  if (schedule.pairs == 0) return;
  launch<reverse_kernel<Scores>>(a.exec, dim3(2 * schedule.pairs), static_cast<int>(kPairThreads),
                                 static_cast<int>(Shared::bytes), x, Tokens(x, a.in, a.o), States(a), schedule,
                                 Tiles(x), StateTiles(), SavedTiles());
}

template <class Scores>
void launch_segments(const ForwardProblem& x) {
  const kda_forward_args& a = x.args;
  const Segments segments = segments_of(x, true);
  const unsigned pairs = segments.pairs(x);
  if (pairs == 0) return;
  launch<reverse_segments_kernel<Scores>>(a.exec, dim3(2 * pairs), static_cast<int>(kSegmentThreads),
                                          static_cast<int>(Shared::bytes), x, Tokens(x, a.in, a.o), States(a), segments,
                                          Tiles(x), SavedTiles());
}

template <class Scores>
void launch_maps(const ForwardProblem& x, const kda_tensor& M) {
  const kda_forward_args& a = x.args;
  const auto pairs = static_cast<unsigned>(x.N * x.HV);
  if (pairs == 0) return;
  launch<reverse_maps_kernel<Scores>>(a.exec, dim3(2 * pairs), static_cast<int>(kSegmentThreads),
                                      static_cast<int>(Shared::bytes), x, Tokens(x, a.in, a.o), States(a), view_of(M),
                                      Tiles(x), SavedTiles());
}

}  // namespace

bool engine::takes_reverse(const BackwardProblem& p) {
  const kda_inputs& in = p.args.in;
  // Units of (s dO, dS) are right for |q| <= 1, which the norm grants.
  return in.q.dtype == KDA_BF16 && in.qk_l2norm && (p.B * p.T / kChunk + p.N + 1) * p.HV <= INT32_MAX / 2;
}

uint64_t engine::reverse_workspace(const BackwardProblem& p, const BackwardPlan& plan) {
  const ForwardProblem x = mirrored(p, plan);
  return forward_by_segments(x) ? Segments::bytes(x, cut_of(x, true))
                                : Schedule(x, multiprocessors(p.args.exec.device_id)).bytes();
}

void engine::run_reverse(const BackwardProblem& p, const BackwardPlan& plan) {
  const ForwardProblem x = mirrored(p, plan);
  with_scores(x,
              [&]<class Scores>() { forward_by_segments(x) ? launch_segments<Scores>(x) : launch_pairs<Scores>(x); });
  if (plan.own_dv && present(p.args.dv)) convert(p.args.exec, plan.dv, p.args.dv);
}

void engine::run_reverse_maps(const BackwardProblem& p, const BackwardPlan& plan, const kda_tensor& M_transposed) {
  const ForwardProblem x = mirrored(p, plan);
  with_scores(x, [&]<class Scores>() { launch_maps<Scores>(x, M_transposed); });
}

}  // namespace kda::cuda
