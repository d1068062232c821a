// The reverse scan on Hopper: the forward's kernel of CTA pairs, mirrored. Chunks of a head come from the last to the
// first, and the consumer carries dS (reverse_consumer.h). All else is the forward's own: producers, ring, schedule,
// states.
#include "cuda/cuda.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/pair_kernel.h"
#include "cuda/sm90/reverse.h"
#include "cuda/sm90/reverse_consumer.h"

namespace kda::cuda {
namespace {

using namespace sm90;

template <class Scores>
__global__ void __cluster_dims__(2) __launch_bounds__(kPairThreads, 1)
    reverse_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                   const __grid_constant__ States states, const __grid_constant__ Schedule given,
                   const __grid_constant__ Tiles tiles, const __grid_constant__ StateTiles state_tiles) {
  run_pair<Producer<__nv_bfloat16, Scores, false, PairSource<true>>, ReverseConsumer<__nv_bfloat16>>(
      {p, x, states, {}, &tiles, &state_tiles}, given);
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

}  // namespace

bool sm90::takes_reverse(const BackwardProblem& p) {
  return p.args.in.q.dtype == KDA_BF16 && (p.B * p.T / kChunk + p.N + 1) * p.HV <= INT32_MAX / 2;
}

uint64_t sm90::reverse_workspace(const BackwardProblem& p, const BackwardPlan& plan) {
  return Schedule(plan.forward, multiprocessors(p.args.exec.device_id)).bytes();
}

void sm90::run_reverse(const BackwardProblem& p, const BackwardPlan& plan) {
  const ForwardProblem x = mirrored(p, plan);
  const kda_forward_args& a = x.args;
  const Schedule schedule = schedule_of(x);
  if (schedule.pairs == 0) return;
  const auto start = [&]<class Scores>() {
    launch<reverse_kernel<Scores>>(a.exec, dim3(2 * schedule.pairs), static_cast<int>(kPairThreads),
                                   static_cast<int>(Shared::bytes), x, Tokens(x, a.in, a.o), States(a), schedule,
                                   Tiles(x), StateTiles(x));
  };
  if (anchored(x)) start.template operator()<BoundedScores>();
  else start.template operator()<AnyGateScores>();
  if (plan.own_dv && present(p.args.dv)) convert(a.exec, plan.dv, p.args.dv);
}

}  // namespace kda::cuda
