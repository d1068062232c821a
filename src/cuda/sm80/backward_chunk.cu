// Backward by chunks on tensor cores (math.md 5), for sm_80 and newer: K and V of 64 or 128, any gate.
//
//   forward again   the two kernels of cuda_chunk, without o: the state before every 64 tokens, and v_new, in bf16; not
//                   where the caller saved them so
//   prepare         images of chunks of 32, mirrored (chunk.h)
//   reverse         chunks from the last to the first: dv, dh0, the gradient of the state after every 64 tokens (bf16)
//   wide            everything else, chunks of 64 in any order (backward_wide.h)
//   small beta      dbeta of tokens whose beta is about 0 (backward_beta.h)
//   sums            of dA_log and d_dt_bias over chunks, in their order
//
// Images are of as many chunks at a time as fit kMostImages; all else in the workspace is there once: per token and value
// head, at K = V = 128, 1,280 bytes, 512 of them where h and v_new were saved, and 256 more where dv of the caller is not
// bf16.
#include "cuda/cuda.h"
#include "cuda/sm80/backward_beta.h"
#include "cuda/sm80/backward_wide.h"
#include "cuda/sm80/chunk_launch.h"
#include "cuda/sm80/chunk_reverse.h"

namespace kda::cuda {
namespace {

constexpr int64_t kMostImages = int64_t{64} << 20;

// A dense tensor in the workspace.
kda_tensor dense(char* data, int32_t dtype, std::initializer_list<int64_t> shape) {
  kda_tensor t{};
  t.data = data, t.dtype = dtype, t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  for (int i = t.ndim - 1, step = 1; i >= 0; --i)
    t.stride[i] = i + 1 < t.ndim ? t.stride[i + 1] * t.shape[i + 1] : step;
  return t;
}

// What a call does, and where its workspace has what.
struct BackwardPlan {
  ForwardProblem forward{};  // of the same tokens, from the same states, with h and v_new of the workspace
  bool wide;                 // more is wanted than dv and dh0
  bool saved;                // h and v_new are the caller's
  bool sums, own_dv;
  kda_tensor h, v_new, dh, dv{};
  uint64_t images = 0, partial = 0, scratch = 0, bytes = 0;  // where each begins; their end
  WideRows rows;

  BackwardPlan(const BackwardProblem& p, int SMs) : rows(p) {
    const kda_backward_args& a = p.args;
    static_cast<Dims&>(forward) = p;
    forward.args.exec = a.exec, forward.args.in = a.in, forward.args.states.h0 = a.h0, forward.args.h_every = 1;
    sums = present(a.dA_log) || present(a.d_dt_bias);
    wide = sums || present(a.dq) || present(a.dk) || present(a.dg) || present(a.dbeta);
    own_dv = wide && (!present(a.dv) || a.dv.dtype != KDA_BF16);
    saved = present(a.v_new) && a.in.state_layout == KDA_STATE_V_FIRST;
    const int64_t h_rows = rows.rows;
    const auto place = [&](int64_t size) {
      const uint64_t at = bytes;
      bytes += static_cast<uint64_t>((size + 255) / 256 * 256);
      return at;
    };
    const auto tensor = [&](bool is_there, std::initializer_list<int64_t> shape) {
      int64_t size = 2;
      for (const int64_t n : shape) size *= n;
      return is_there ? dense(static_cast<char*>(a.exec.workspace) + place(size), KDA_BF16, shape) : kda_tensor{};
    };
    dh = tensor(wide, {h_rows, p.HV, p.V, p.K}), dv = tensor(own_dv, {p.B, p.T, p.HV, p.V});
    h = saved ? a.h : tensor(wide, {h_rows, p.HV, p.V, p.K});
    v_new = saved ? a.v_new : tensor(wide, {p.B, p.T, p.HV, p.V});
    images = place(static_cast<int64_t>(forward_again_memory(forward, kMostImages)));
    if (sums) partial = place(h_rows * p.HV * (p.K + p.K / 16) * 4);
    if (wide && p.group() > 1) scratch = place(int64_t{SMs} * 2 * kChunk * p.K * 4);
    forward.args.h = h, forward.args.v_new = v_new;
    rows.h_rows = static_cast<unsigned>(saved ? std::min<int64_t>(a.h.shape[0], h_rows) : h_rows);
  }
};

template <int kK>
void launch_reverse(const BackwardProblem& problem, const BackwardPlan& all) {
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
    launch_prepare<kK, true>(p, plan, pass, tokens, images);
    const int64_t columns = scan_columns(p, pass), tiles = p.V / columns;
    Dims part = p;
    part.HV = pass.heads, part.H = 1;
    launch<reverse_kernel<kK>>(a.exec, Blocks::grid(part, tiles, 1), static_cast<int>(columns / kWarpColumns * 32),
                               kStages * Image<kK>::bytes, p, places, pass, Blocks(part, tiles),
                               static_cast<const char*>(images));
  });
}

template <int kK>
void launch_wide(const BackwardProblem& problem, const BackwardPlan& all, int SMs) {
  const kda_backward_args& a = problem.args;
  if (all.rows.rows == 0) return;
  char* workspace = static_cast<char*>(a.exec.workspace);
  WidePlaces places{};
  places.d_o = view_of(a.d_o), places.v_new = view_of(all.v_new), places.dv = view_of(all.own_dv ? all.dv : a.dv);
  places.h = view_of(all.h), places.dh = view_of(all.dh);
  places.dq = view_of(a.dq), places.dk = view_of(a.dk), places.dg = view_of(a.dg), places.dbeta = view_of(a.dbeta);
  const auto wide = [](std::initializer_list<const kda_tensor*> tensors) {
    return (*tensors.begin())->dtype == KDA_BF16 && rows_at(16, tensors);
  };
  places.qk_wide = wide({&a.in.q, &a.in.k}), places.d_o_wide = wide({&a.d_o}), places.v_new_wide = wide({&all.v_new});
  places.dv_wide = all.own_dv || wide({&a.dv}), places.h_wide = wide({&all.h});
  places.pairs = rows_aligned(a.dq, 2) && rows_aligned(a.dk, 2) && rows_aligned(a.dg, 2);
  places.gate = all.sums || present(a.dg);
  places.sums = all.sums ? reinterpret_cast<float*>(workspace + all.partial) : nullptr;
  places.scratch = reinterpret_cast<float*>(workspace + all.scratch);
  const int64_t items = int64_t{all.rows.rows} * all.rows.heads;
  launch<wide_kernel<kK>>(a.exec, dim3(static_cast<unsigned>(std::min<int64_t>(items, SMs))), WideMemory<kK>::kThreads,
                          WideMemory<kK>::bytes, all.forward, Tokens(problem, a.in, {}), places, all.rows);
  if (places.dbeta.data)
    launch<small_beta_kernel<kK>>(a.exec, dim3(all.rows.rows * static_cast<unsigned>(problem.HV)), kBetaThreads, 0,
                                  all.forward, Tokens(problem, a.in, {}), places, all.rows, Divisor(problem.HV),
                                  Divisor(problem.group()));
}

// Tokens of no sequence: dq, dk, dg, dbeta.
__global__ void __launch_bounds__(128)
    zero_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ WidePlaces places) {
  wait_for_stream();
  const auto H = static_cast<unsigned>(p.H), HV = static_cast<unsigned>(p.HV), K = static_cast<unsigned>(p.K);
  zero_tail(places.dq, p, H, K), zero_tail(places.dk, p, H, K);
  zero_tail(places.dg, p, HV, K), zero_tail(places.dbeta, p, HV, 1);
}

template <int kK>
void run(const BackwardProblem& p, const BackwardPlan& plan, int SMs) {
  const kda_backward_args& a = p.args;
  char* workspace = static_cast<char*>(a.exec.workspace);
  if (plan.wide && !plan.saved) forward_again(plan.forward, kMostImages, workspace + plan.images);
  launch_reverse<kK>(p, plan);
  if (!plan.wide) return;
  launch_wide<kK>(p, plan, SMs);
  if (p.varlen) {
    WidePlaces places{};
    places.dq = view_of(a.dq), places.dk = view_of(a.dk), places.dg = view_of(a.dg), places.dbeta = view_of(a.dbeta);
    launch<zero_kernel>(a.exec, dim3(256), 128, 0, plan.forward, places);
  }
  if (plan.sums)
    launch_gate_sums(p, reinterpret_cast<const float*>(workspace + plan.partial), plan.rows.rows,
                     static_cast<int>(p.K / 16));
}

}  // namespace

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

uint64_t backward_chunk_workspace(const BackwardProblem& p) {
  return BackwardPlan(p, multiprocessors(p.args.exec.device_id)).bytes;
}

void backward_chunk(const BackwardProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const int SMs = multiprocessors(p.args.exec.device_id);
  const BackwardPlan plan(p, SMs);
  p.K == 64 ? run<64>(p, plan, SMs) : run<128>(p, plan, SMs);
}

}  // namespace kda::cuda
