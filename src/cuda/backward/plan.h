// The plan of a backward by chunks: what a call does, and the layout of its workspace. Implementations share all
// launches except the forward that leaves h and v_new, and the wide kernel.
//
// Images in the workspace are of as many chunks at a time as fit kMostImages. All else is there once: 1,280 bytes per
// token and value head at K = V = 128, or 512 where h and v_new were saved; 256 more where the caller's dv is not
// plain (is_plain); and what converted tensors need.
#pragma once
#include "cuda/backward/wide_call.h"
#include "cuda/call/tma.h"
#include "cuda/call/workspace.h"
#include "cuda/prefill/chunk_launch.h"

namespace kda::cuda {

constexpr int64_t kMostImages = int64_t{64} << 20;

// Whether t has rows of bf16 at multiples of 16 bytes, each at a place of its own.
inline bool is_plain(const kda_tensor& t) { return t.dtype == KDA_BF16 && takes_tma(t); }

// Blocks of the portable wide kernel: two of K = 64 share an SM.
inline int64_t wide_blocks(int64_t K, int SMs) { return K == 64 ? 2 * SMs : SMs; }

// What a call does, and the layout of its workspace.
struct BackwardPlan {
  ForwardProblem forward{};  // of the same tokens, from the same states, with h and v_new of the workspace
  bool wide;                 // more is wanted than dv and dh0
  bool saved;                // h and v_new are the caller's
  bool sums, own_dv;
  kda_tensor h, v_new, dh, dv{};
  kda_tensor q, k, d_o;  // the caller's, or converted where the wide kernel does not take those
  uint64_t images = 0, partial = 0, scratch = 0, bytes = 0;  // where each begins; their end
  int SMs;
  WideRows rows;

  // plain_scan: the reverse scan takes plain tensors alone, as the wide kernel does. scans(plan) returns the bytes of
  // workspace of the scans: the forward that leaves h and v_new, and the reverse one.
  template <class Scans>
  BackwardPlan(const BackwardProblem& p, bool plain_scan, const Scans& scans)
      : SMs(multiprocessors(p.args.exec.device_id)), rows(p) {
    const kda_backward_args& a = p.args;
    static_cast<Dims&>(forward) = p;
    forward.args.exec = a.exec, forward.args.in = a.in, forward.args.states.h0 = a.h0;
    forward.args.h_every = 1, forward.args.h_v_first = 1;
    sums = present(a.dA_log) || present(a.d_dt_bias);
    wide = sums || present(a.dq) || present(a.dk) || present(a.dg) || present(a.dbeta);
    const bool plain = wide || plain_scan;
    own_dv = plain && (!present(a.dv) || !is_plain(a.dv));
    saved = present(a.v_new) && h_layout(a) == KDA_STATE_V_FIRST;
    const int64_t h_rows = rows.rows;
    const auto place = [&](int64_t size) {
      const uint64_t at = bytes;
      bytes += align_up(static_cast<uint64_t>(size));
      return at;
    };
    const auto tensor = [&](bool is_there, std::initializer_list<int64_t> shape) {
      int64_t size = 2;
      for (const int64_t n : shape) size *= n;
      return is_there ? dense(static_cast<char*>(a.exec.workspace) + place(size), KDA_BF16, shape) : kda_tensor{};
    };
    dh = tensor(wide, {h_rows, p.HV, p.V, p.K}), dv = tensor(own_dv, {p.B, p.T, p.HV, p.V});
    const auto converted = [&](const kda_tensor& t) {
      return !plain || is_plain(t) ? t : tensor(true, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]});
    };
    q = converted(a.in.q), k = converted(a.in.k), d_o = converted(a.d_o);
    h = saved ? converted(a.h) : tensor(wide, {h_rows, p.HV, p.V, p.K});
    v_new = saved ? converted(a.v_new) : tensor(wide, {p.B, p.T, p.HV, p.V});
    forward.args.h = h, forward.args.v_new = v_new;
    images = place(static_cast<int64_t>(scans(*this)));
    if (sums) partial = place(h_rows * p.HV * (p.K + p.K / 16) * 4);
    if (wide && p.group() > 1) scratch = place(wide_blocks(p.K, SMs) * 2 * kChunk * p.K * 4);
    rows.h_rows = static_cast<unsigned>(saved ? std::min<int64_t>(a.h.shape[0], h_rows) : h_rows);
  }

  // dv as the wide kernel takes it.
  const kda_tensor& plain_dv(const kda_backward_args& a) const { return own_dv ? dv : a.dv; }
};

// The places and tokens of a call, as the wide kernels take them.
WidePlaces wide_places(const BackwardProblem& p, const BackwardPlan& plan);
Tokens wide_tokens(const BackwardProblem& p, const BackwardPlan& plan);
// Whether there may be heads that UsualGate cannot compute, and the launch of the kernel that takes these. They need
// no other one.
bool may_be_unusual(const kda_inputs& in);
void launch_unusual(const BackwardProblem& p, const BackwardPlan& plan);

// Converts a tensor to the dtype of another one of the same shape, if they are not the same.
void convert(const kda_exec& exec, const kda_tensor& from, const kda_tensor& to);

// The reverse scan of cuda_backward_chunk.
void launch_reverse(const BackwardProblem& p, const BackwardPlan& plan);

// All launches of a call. again: the forward, for h and v_new; wide: the wide kernel of all heads.
struct BackwardSteps {
  void (*again)(const BackwardProblem& p, const BackwardPlan& plan);
  void (*reverse)(const BackwardProblem& p, const BackwardPlan& plan);
  void (*wide)(const BackwardProblem& p, const BackwardPlan& plan);
};
void run_backward(const BackwardProblem& p, const BackwardPlan& plan, const BackwardSteps& steps);

}  // namespace kda::cuda
