// Backward by chunks on tensor cores (math.md 5), for sm_80 and newer: K and V of 64 or 128, any gate.
//
//   forward again   the two kernels of cuda_prefill_chunk, without o: the state before every 64 tokens, and v_new, in
//                   bf16; left out where the caller saved them so
//   convert         q, k, d_o, and h and v_new of the caller, where rows are not of bf16 at multiples of 16 bytes
//   prepare         images of chunks of 32, mirrored (chunk_image.h)
//   reverse         chunks from the last to the first: dv, dh0, the gradient of the state after every 64 tokens (bf16)
//   wide            everything else, chunks of 64 in any order (wide_kernel.h)
//   small beta      dbeta of tokens whose beta is about 0 (beta.h)
//   sums            of dA_log and d_dt_bias over chunks, in their order
#include "cuda/backward/beta.h"
#include "cuda/backward/chunk_reverse.h"
#include "cuda/backward/declarations.h"
#include "cuda/backward/plan.h"
#include "cuda/backward/wide_kernel.h"
#include "cuda/call/state_rows.h"

namespace kda::cuda {
namespace {

template <int kK>
void launch_reverse_of(const BackwardProblem& problem, const BackwardPlan& all) {
  const kda_backward_args& a = problem.args;
  const ForwardProblem& p = all.forward;
  const Plan plan(p, kMostImages);
  char* images = static_cast<char*>(a.exec.workspace) + all.images;
  const Tokens tokens(p, a.in, {});
  ReversePlaces places{};
  places.d_o = view_of(a.d_o), places.dv[0] = view_of(a.dv), places.dv[1] = view_of(all.dv);
  places.dhT = view_of(a.dhT), places.dh0 = view_of(a.dh0), places.dh = view_of(all.dh);
  places.between = between_passes(p, images + plan.image_bytes);
  places.dh_rows = all.wide ? all.rows.rows : 0;
  places.v_first = a.in.state_layout == KDA_STATE_V_FIRST;
  places.wide = wide_rows(p, a.in.state_layout, {&a.dhT, &a.dh0}), places.aligned = rows_at(8, {&a.d_o, &a.dv});
  each_pass(p, plan, true, [&](const Pass& pass) {
    launch_prepare(p, plan, pass, tokens, true, images);
    const int64_t columns = scan_columns(p, pass), tiles = p.V / columns;
    Dims part = p;
    part.HV = pass.heads, part.H = 1;
    launch<reverse_kernel<kK>>(a.exec, Blocks::grid(part, tiles, 1), static_cast<int>(columns / kWarpColumns * 32),
                               kStages * Image<kK>::bytes, p, places, pass, Blocks(part, tiles),
                               static_cast<const char*>(images));
  });
}

template <int kK, bool kBounded>
void launch_wide(const BackwardProblem& p, const BackwardPlan& plan, bool unusual) {
  const int64_t items = int64_t{plan.rows.rows} * plan.rows.heads, blocks = wide_blocks(kK, plan.SMs);
  launch<wide_kernel<kK, kBounded>>(p.args.exec, dim3(static_cast<unsigned>(std::min(items, blocks))),
                                    WideMemory<kK>::kThreads, WideMemory<kK>::bytes, plan.forward, wide_tokens(p, plan),
                                    wide_places(p, plan), plan.rows, unusual);
}
template <int kK>
void launch_usual(const BackwardProblem& p, const BackwardPlan& plan) {
  const kda_inputs& in = p.args.in;
  if (!is_bounded(form_of(in))) launch_wide<kK, false>(p, plan, false);
  else if (in.lower_bound >= kLeastBound) launch_wide<kK, true>(p, plan, false);
}

void launch_small_betas(const BackwardProblem& p, const BackwardPlan& plan) {
  const auto blocks = static_cast<unsigned>((p.HV + kBetaHeads - 1) / kBetaHeads);
  launch<small_beta_kernel>(p.args.exec, dim3(plan.rows.rows * blocks), kBetaThreads, 0, plan.forward,
                            Tokens(p, p.args.in, {}), wide_places(p, plan), plan.rows, Divisor(blocks),
                            Divisor(p.group()));
}

// x as bf16 holds it: what would round to infinity and is finite becomes the largest number.
__device__ float within_bf16(float x) {
  constexpr float kMost = 0x1.fep127f;
  return fabsf(x) < INFINITY ? fminf(fmaxf(x, -kMost), kMost) : x;
}

// `from` or `to` is bf16.
__global__ void __launch_bounds__(256)
    convert_kernel(const __grid_constant__ TypedView from, const __grid_constant__ TypedView to, unsigned rows,
                   unsigned heads, unsigned width) {
  wait_for_stream();
  const unsigned row = blockIdx.x, b = row / rows, t = row % rows;
  for (unsigned i = threadIdx.x; i < heads * width; i += blockDim.x) {
    const char* place = from.at(b, t, i / width) + i % width * size_of(from.dtype);
    store_element(to.at(b, t, i / width) + i % width * size_of(to.dtype), to.dtype,
                  within_bf16(value_of(from.dtype, load_raw<false>(place, from.dtype))));
  }
}

}  // namespace

WidePlaces wide_places(const BackwardProblem& p, const BackwardPlan& plan) {
  const kda_backward_args& a = p.args;
  char* workspace = static_cast<char*>(a.exec.workspace);
  WidePlaces places{};
  places.d_o = view_of(plan.d_o), places.v_new = view_of(plan.v_new), places.dv = view_of(plan.plain_dv(a));
  places.h = view_of(plan.h), places.dh = view_of(plan.dh);
  places.dq = view_of(a.dq), places.dk = view_of(a.dk), places.dg = view_of(a.dg), places.dbeta = view_of(a.dbeta);
  places.g_wide = rows_at(16, {&a.in.g});
  places.fours = rows_aligned(a.dq, 4) && rows_aligned(a.dk, 4) && rows_aligned(a.dg, 4);
  places.gate = plan.sums || present(a.dg);
  places.each = static_cast<uint32_t>(p.K + p.K / 16);
  places.sums = plan.sums ? reinterpret_cast<float*>(workspace + plan.partial) : nullptr;
  places.scratch = reinterpret_cast<float*>(workspace + plan.scratch);
  return places;
}

Tokens wide_tokens(const BackwardProblem& p, const BackwardPlan& plan) {
  Tokens tokens(p, p.args.in, {});
  tokens.q = view_of(plan.q), tokens.k = view_of(plan.k), tokens.qkv_dtype = KDA_BF16;
  return tokens;
}

bool may_be_unusual(const kda_inputs& in) {
  return !is_given(form_of(in)) && (present(in.A_log) || !has_usual_bound(form_of(in), in.lower_bound));
}
void launch_unusual(const BackwardProblem& p, const BackwardPlan& plan) {
  p.K == 64 ? launch_wide<64, false>(p, plan, true) : launch_wide<128, false>(p, plan, true);
}

void convert(const kda_exec& exec, const kda_tensor& from, const kda_tensor& to) {
  if (from.data == to.data || from.shape[0] * from.shape[1] == 0) return;
  launch<convert_kernel>(exec, dim3(static_cast<unsigned>(from.shape[0] * from.shape[1])), 256, 0, view_of(from),
                         view_of(to), static_cast<unsigned>(from.shape[1]), static_cast<unsigned>(from.shape[2]),
                         static_cast<unsigned>(from.shape[3]));
}

void launch_reverse(const BackwardProblem& p, const BackwardPlan& plan) {
  p.K == 64 ? launch_reverse_of<64>(p, plan) : launch_reverse_of<128>(p, plan);
}

void run_backward(const BackwardProblem& p, const BackwardPlan& plan, const BackwardSteps& steps) {
  const kda_backward_args& a = p.args;
  if (plan.wide && !plan.saved) steps.again(p, plan);
  convert(a.exec, a.in.q, plan.q), convert(a.exec, a.in.k, plan.k), convert(a.exec, a.d_o, plan.d_o);
  steps.reverse(p, plan);
  if (!plan.wide) return;
  if (plan.rows.rows) {
    if (plan.saved) convert(a.exec, a.h, plan.h), convert(a.exec, a.v_new, plan.v_new);
    steps.wide(p, plan);
    if (may_be_unusual(a.in)) launch_unusual(p, plan);
    if (present(a.dbeta)) launch_small_betas(p, plan);
  }
  if (p.varlen) launch_zero_tails(plan.forward, {view_of(a.dq), view_of(a.dk), {}, view_of(a.dg), view_of(a.dbeta)});
  if (plan.sums)
    launch_gate_sums(p, reinterpret_cast<const float*>(static_cast<char*>(a.exec.workspace) + plan.partial),
                     plan.rows.rows, static_cast<int>(p.K / 16));
}

const char* backward_chunk_why_not(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) return "takes K and V of 64 or 128";
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(a.in, {})) return reason;
  if (const char* reason =
          view_why_not({&a.h0, &a.h, &a.v_new, &a.d_o, &a.dhT, &a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta, &a.dh0}))
    return reason;
  if ((p.T / kRows + p.N) * p.HV > INT32_MAX) return "takes at most 2^31 chunks";
  return grid_why_not(p, p.V / kWarpColumns, 1);
}

const char* backward_chunk_too_rough(const BackwardProblem& p) {
  return p.args.in.q.dtype == KDA_F32 ? "multiplies operands of 16 bits, where q, k and v have 32" : nullptr;
}

static BackwardPlan plan_of(const BackwardProblem& p) {
  return {p, false, [](const BackwardPlan& plan) { return forward_again_memory(plan.forward, kMostImages); }};
}

uint64_t backward_chunk_workspace(const BackwardProblem& p) { return plan_of(p).bytes; }

void backward_chunk(const BackwardProblem& p) {
  if (p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  if (p.N + p.varlen == 0) return launch_gate_sums(p, nullptr, 0, 0);
  const auto again = [](const BackwardProblem& problem, const BackwardPlan& of) {
    forward_again(of.forward, kMostImages, static_cast<char*>(problem.args.exec.workspace) + of.images);
  };
  run_backward(p, plan_of(p), {again, launch_reverse, p.K == 64 ? launch_usual<64> : launch_usual<128>});
}

}  // namespace kda::cuda
