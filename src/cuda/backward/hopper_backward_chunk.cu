// Backward by chunks on Hopper: the steps of cuda_backward_chunk (backward/chunk.cu), with Hopper's forward for h and
// v_new, Hopper's reverse scan (reverse.cu), and a wide kernel that copies tiles by TMA and makes its large products by
// wgmma.
//
// A block of three warpgroups stays on an SM and goes through its share of items, each of which is a chunk of a value
// head. Two warpgroups multiply (hopper_multiplier.h), the warps of the third help (hopper_helpers.h).
#include "cuda/backward/declarations.h"
#include "cuda/backward/hopper_helpers.h"
#include "cuda/backward/hopper_multiplier.h"
#include "cuda/backward/plan.h"
#include "cuda/engine/declarations.h"
#include "cuda/engine/reverse.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class Gate>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                const __grid_constant__ WidePlaces places, const __grid_constant__ WideRows rows,
                const __grid_constant__ WideMaps maps) {
  const WidePlace at{ptx::shared_address(shared_memory())};
  if (threadIdx.x == 0) at.start_barriers();
  __syncthreads();  // barriers are there
  wait_for_stream();
  const WideCall call{p, x, places, rows, maps};
  const unsigned warp = __shfl_sync(kAll, threadIdx.x / 32, 0);
  if (warp < kWideWarps) {
    ptx::take_registers<kMultiplierRegisters>();
    WideMultiplier<Gate>(call, at).run();
    return;
  }
  ptx::give_registers<kHelperRegisters>();
  if (warp == kWideWarps) WideProducer(call, at).run();
  else if (warp < kWideWarps + 3) WideNorms(call, at, warp - kWideWarps - 1).run();
  else WideFactors(call, at).run();
}

WideMaps maps_of(const BackwardProblem& p, const BackwardPlan& plan) {
  const kda_backward_args& a = p.args;
  WideMaps maps(p.K);
  if (p.B * p.T == 0) return maps;  // nothing will be copied
  maps.q = WideMaps::tokens(plan.q), maps.k = WideMaps::tokens(plan.k), maps.g = WideMaps::tokens(a.in.g);
  maps.d_o = WideMaps::tokens(plan.d_o), maps.v_new = WideMaps::tokens(plan.v_new);
  maps.dv = WideMaps::tokens(plan.plain_dv(a));
  maps.h = WideMaps::states(plan.h), maps.dh = WideMaps::states(plan.dh);
  if (present(a.dq)) maps.dq = WideMaps::tokens(a.dq);
  if (present(a.dk)) maps.dk = WideMaps::tokens(a.dk);
  if (present(a.dg)) maps.dg = WideMaps::tokens(a.dg);
  return maps;
}
template <class Gate>
void launch_wide(const BackwardProblem& p, const BackwardPlan& plan) {
  const kda_backward_args& a = p.args;
  const int64_t items = int64_t{plan.rows.rows} * plan.rows.heads;
  launch<wide_kernel<Gate>>(a.exec, dim3(static_cast<unsigned>(std::min<int64_t>(items, plan.SMs))),
                            static_cast<int>(kWideThreads), static_cast<int>(sizeof(WideShared)), plan.forward,
                            wide_tokens(p, plan), wide_places(p, plan), plan.rows, maps_of(p, plan));
}
void launch_usual(const BackwardProblem& p, const BackwardPlan& plan) {
  for_usual_gate(form_of(p.args.in), [&]<class Gate>() { launch_wide<Gate>(p, plan); });
}

// ---- forward again: its outputs are not needed and go where dv will be ----

ForwardProblem again_problem(const BackwardProblem& p, const BackwardPlan& plan) {
  ForwardProblem again = plan.forward;
  again.args.o = plan.plain_dv(p.args), again.args.o.dtype = p.args.in.q.dtype;
  again.args.exec.impl = nullptr;
  return again;
}
bool on_hopper(const ForwardProblem& p) { return !hopper_prefill_pairs_why_not(p); }
uint64_t again_workspace(const BackwardProblem& p, const BackwardPlan& plan) {
  const ForwardProblem again = again_problem(p, plan);
  if (!on_hopper(again)) return forward_again_memory(plan.forward, kMostImages);
  return forward_by_segments(again) ? hopper_prefill_segments_workspace(again) : hopper_prefill_pairs_workspace(again);
}
void run_again(const BackwardProblem& p, const BackwardPlan& plan) {
  ForwardProblem again = again_problem(p, plan);
  char* workspace = static_cast<char*>(p.args.exec.workspace) + plan.images;
  if (!on_hopper(again)) return forward_again(plan.forward, kMostImages, workspace);
  again.args.exec.workspace = workspace;
  forward_by_segments(again) ? hopper_prefill_segments(again) : hopper_prefill_pairs(again);
}

void scan_reversed(const BackwardProblem& p, const BackwardPlan& plan) {
  takes_reverse(p) ? run_reverse(p, plan) : launch_reverse(p, plan);
}

BackwardPlan plan_of(const BackwardProblem& p) {
  return {p, takes_reverse(p), [&](const BackwardPlan& plan) {
            const uint64_t reverse =
                takes_reverse(p) ? reverse_workspace(p, plan) : forward_again_memory(plan.forward, kMostImages);
            return plan.wide && !plan.saved ? std::max(again_workspace(p, plan), reverse) : reverse;
          }};
}

bool fits_copies(const kda_tensor& t) { return !present(t) || is_plain(t); }

}  // namespace

const char* hopper_backward_chunk_why_not(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  if (const char* reason = backward_chunk_why_not(p)) return reason;
  if (const char* reason = hopper_why_not(a.exec.device_id)) return reason;
  if (!has_usual_bound(form_of(a.in), a.in.lower_bound)) return "takes bounds of -5 or more";
  if (!fits_copies(a.in.g)) return "takes g in bf16, with rows at multiples of 16 bytes";
  if (!fits_copies(a.dq) || !fits_copies(a.dk) || !fits_copies(a.dg))
    return "writes dq, dk and dg in bf16, to rows at multiples of 16 bytes";
  return nullptr;
}

uint64_t hopper_backward_chunk_workspace(const BackwardProblem& p) { return plan_of(p).bytes; }

void hopper_backward_chunk(const BackwardProblem& p) {
  if (p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  if (p.N + p.varlen == 0) return launch_gate_sums(p, nullptr, 0, 0);
  run_backward(p, plan_of(p), {run_again, scan_reversed, launch_usual});
}

bool hopper_backward_takes_maps(const BackwardProblem& p) { return takes_reverse(p); }

void hopper_backward_maps(const BackwardProblem& p, const kda_tensor& M_transposed) {
  const kda_backward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const BackwardPlan plan = plan_of(p);
  convert(a.exec, a.in.q, plan.q), convert(a.exec, a.in.k, plan.k), convert(a.exec, a.d_o, plan.d_o);
  run_reverse_maps(p, plan, M_transposed);
}

}  // namespace kda::cuda
