// Token recurrence on the CPU (math.md 3): decode over a state pool, and forward for any length.
//
// V-first: the rows of a state (one per value column, K dense) are independent. A row is read once, taken through up to
// kSteps tokens in registers or L1, and written once; traffic is the state itself, read + write.
//   row <- alpha row;  u = beta (v - row . k);  row <- row + u k;  o = row . q (q carries scale)
// K-first: the same for a strip of kStrip value columns at a time, kept in scratch between its two passes.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/recurrent.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/simd-inl.h"
// clang-format on

#ifndef KDA_CPU_RECURRENT_TYPES
#define KDA_CPU_RECURRENT_TYPES
namespace kda::cpu {
constexpr int64_t kSteps = 16;  // tokens a row is taken through while it is at hand
constexpr int64_t kStrip = 32;  // value columns of a task; also the unit of parallel work

// What forward and decode have in common here.
struct Recurrence {
  const Dims& d;
  const kda_inputs& in;
  const kda_states& states;
  const kda_tensor& o;
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Activated inputs of up to kSteps tokens of one head.
struct Tokens {
  alignas(64) float q[kSteps][kMaxSize];
  alignas(64) float k[kSteps][kMaxSize];
  alignas(64) float alpha[kSteps][kMaxSize];
  alignas(64) float v[kSteps][kStrip];
  alignas(64) float o[kSteps][kStrip];
  float beta[kSteps];
};

HWY_NOINLINE void load_tokens(Tokens& x, const Recurrence& r, const Gate& gate, const Sequence& s, int64_t t, int64_t n,
                              int64_t hv, int64_t v0, int64_t V) {
  const int64_t h = hv / r.d.group(), K = r.d.K;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = s.t0 + t + i;
    load_row(r.in.q.dtype, at(r.in.q, s.b, token, h), K, x.q[i]);
    load_row(r.in.k.dtype, at(r.in.k, s.b, token, h), K, x.k[i]);
    normalise_row(x.q[i], K, r.in.qk_l2norm, r.in.scale);
    normalise_row(x.k[i], K, r.in.qk_l2norm, 1);
    load_row(r.in.g.dtype, at(r.in.g, s.b, token, hv), K, x.alpha[i]);
    decay_row(gate, x.alpha[i], K);
    load_row(r.in.v.dtype, at(r.in.v, s.b, token, hv) + v0 * dtype_size(r.in.v.dtype), V, x.v[i]);
    x.beta[i] = activate_beta(r.in.beta_form, load_scalar(r.in.beta.dtype, at(r.in.beta, s.b, token, hv)));
  }
}

// One V-first row (padded to Kp) through n tokens.
HWY_INLINE void advance_row(Tokens& x, float* row, int64_t Kp, int64_t n, int64_t column) {
  for (int64_t i = 0; i < n; ++i) {
    const float *q = x.q[i], *k = x.k[i], *alpha = x.alpha[i];
    Vec read = hn::Zero(kF32);
    for (int64_t d = 0; d < Kp; d += lanes()) {
      const Vec s = hn::Mul(load(row + d), load(alpha + d));
      store(s, row + d);
      read = hn::MulAdd(s, load(k + d), read);
    }
    const Vec u = splat(x.beta[i] * (x.v[i][column] - sum_lanes(read)));
    Vec out = hn::Zero(kF32);
    for (int64_t d = 0; d < Kp; d += lanes()) {
      const Vec s = hn::MulAdd(u, load(k + d), load(row + d));
      store(s, row + d);
      out = hn::MulAdd(s, load(q + d), out);
    }
    x.o[i][column] = sum_lanes(out);
  }
}

// A [K][kStrip] strip of a K-first state through n tokens.
HWY_INLINE void advance_strip(Tokens& x, float* strip, int64_t K, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < kStrip; c += lanes()) {
      Vec u = load(x.v[i] + c);
      for (int64_t k = 0; k < K; ++k) {
        const Vec s = hn::Mul(load(strip + k * kStrip + c), splat(x.alpha[i][k]));
        store(s, strip + k * kStrip + c);
        u = hn::NegMulAdd(s, splat(x.k[i][k]), u);
      }
      u = hn::Mul(u, splat(x.beta[i]));
      Vec out = hn::Zero(kF32);
      for (int64_t k = 0; k < K; ++k) {
        const Vec s = hn::MulAdd(u, splat(x.k[i][k]), load(strip + k * kStrip + c));
        store(s, strip + k * kStrip + c);
        out = hn::MulAdd(s, splat(x.q[i][k]), out);
      }
      store(out, x.o[i] + c);
    }
}

// Value columns v0 .. v0+V-1 of one head of one sequence, all its tokens.
void recurrent_task(const Recurrence& r, const Sequence& s, int64_t hv, int64_t v0, int64_t V) {
  const int64_t K = r.d.K, size_o = dtype_size(r.o.dtype);
  const bool v_first = r.in.state_layout == KDA_STATE_V_FIRST;
  alignas(64) float bias[kMaxSize];
  alignas(64) float state[kStrip * kMaxSize];  // [V][padded K] or [K][kStrip]
  Tokens x;
  const int64_t width = v_first ? padded(K) : kStrip, rows = v_first ? V : K, columns = v_first ? K : V;
  const kda_tensor& h0 = r.states.h0;
  const kda_tensor& hT = r.states.hT;
  const int64_t row0 = v_first ? v0 : 0, column0 = v_first ? 0 : v0;
  const Gate gate = head_gate(r.in.gate_form, r.in.lower_bound, r.in.A_log, r.in.dt_bias, hv, K, bias);

  const auto load_rows = [&](int64_t i) HWY_ATTR {
    if (s.initial)
      load_row(h0.dtype, at(h0, s.slot, hv, row0 + i) + column0 * dtype_size(h0.dtype), columns, state + i * width);
    else zero(state + i * width, width);
  };
  const auto store_rows = [&](int64_t i) HWY_ATTR {
    if (present(hT))
      store_row(hT.dtype, state + i * width, columns, at(hT, s.slot, hv, row0 + i) + column0 * dtype_size(hT.dtype));
  };

  // A whole number of rows passes through L1 per block of tokens; with one block each row is read and written just
  // once.
  for (int64_t t = 0; t == 0 || t < s.length; t += kSteps) {
    const int64_t n = std::min(kSteps, s.length - t);
    const bool first = t == 0, last = t + kSteps >= s.length;
    load_tokens(x, r, gate, s, t, n, hv, v0, V);
    if (v_first) {
      for (int64_t i = 0; i < rows; ++i) {
        if (first) load_rows(i);
        advance_row(x, state + i * width, width, n, i);
        if (last) store_rows(i);
      }
    } else {
      if (first)
        for (int64_t i = 0; i < rows; ++i) load_rows(i);
      if (first && columns <= kStrip - kPad)  // load_row pads to 16; the strip is 32 wide
        for (int64_t i = 0; i < rows; ++i) zero(state + i * width + kPad, kPad);
      advance_strip(x, state, K, n);
      if (last)
        for (int64_t i = 0; i < rows; ++i) store_rows(i);
    }
    for (int64_t i = 0; i < n; ++i) store_row(r.o.dtype, x.o[i], V, at(r.o, s.b, s.t0 + t + i, hv) + v0 * size_o);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

void zero_head(const kda_tensor& o, int64_t b, int64_t t0, int64_t count, int64_t hv) {
  const int64_t size = dtype_size(o.dtype);
  for (int64_t i = t0; i < t0 + count; ++i)
    std::memset(static_cast<char*>(o.data) + (b * o.stride[0] + i * o.stride[1] + hv * o.stride[2]) * size, 0,
                o.shape[3] * size);
}

void run(const Recurrence& r, const kda_exec& exec) {
  const Dims& d = r.d;
  const int64_t strips = (d.V + kStrip - 1) / kStrip, tasks = d.N * d.HV * strips;
  // A strip of 32 x 128 takes about 1 us a token; starting a team costs several.
  const int64_t work = tasks * std::max<int64_t>(1, d.T * d.B / std::max<int64_t>(1, d.N));
  const auto task_fn = KDA_ISA_CALL(recurrent_task);
  parallel_for(tasks, wanted_threads(exec, work / 16 + 1), [&](int64_t task, int) {
    const int64_t v0 = task % strips * kStrip, hv = task / strips % d.HV, n = task / strips / d.HV;
    const Sequence s = sequence_at(d, r.in, r.states, n);
    if (s.live) task_fn(r, s, hv, v0, std::min(kStrip, d.V - v0));
    else if (v0 == 0) zero_head(r.o, s.b, s.t0, s.length, hv);
  });
  if (d.varlen) {
    const int64_t end = int_at(r.in.cu_seqlens, d.N);
    for (int64_t hv = 0; hv < d.HV; ++hv) zero_head(r.o, 0, end, d.T - end, hv);
  }
}

}  // namespace

void decode(const DecodeProblem& p) { run({p, p.args.in, p.args.states, p.args.o}, p.args.exec); }

const char* recurrent_forward_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  if (a.exec.device != KDA_CPU) return "runs on the CPU only";
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.checkpoints)) return "keeps no checkpoints";
  if (present(a.h) || present(a.v_new) || present(a.Aqk) || present(a.Akk))
    return "has no chunks to save h, v_new, Aqk or Akk from";
  return nullptr;
}

void recurrent_forward(const ForwardProblem& p) { run({p, p.args.in, p.args.states, p.args.o}, p.args.exec); }

}  // namespace kda::cpu
#endif
