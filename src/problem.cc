#include "problem.h"

#include <algorithm>
#include <bitset>
#include <cmath>

#include "checks.h"

namespace kda {
namespace {

void check_exec(const kda_exec& e) {
  check_range("exec.device", e.device, KDA_CPU, KDA_CUDA);
  if (e.device == KDA_CPU && e.device_id != 0) invalid("exec.device_id: expected 0 on the CPU, got ", e.device_id);
  if (e.device_id < 0) invalid("exec.device_id: expected >= 0, got ", e.device_id);
  if (e.num_threads < 0) invalid("exec.num_threads: expected >= 0, got ", e.num_threads);
  if (e.flags & ~KDA_BATCH_INVARIANT) invalid("exec.flags: expected 0 or KDA_BATCH_INVARIANT, got ", e.flags);
  if (!e.workspace && e.workspace_bytes) invalid("exec.workspace: expected ", e.workspace_bytes, " bytes, got NULL");
  if (reinterpret_cast<uintptr_t>(e.workspace) % 256)
    invalid("exec.workspace: expected an address aligned to 256, got ", e.workspace);
}

void check_gate(int32_t form, float lower_bound, bool has_A_log, bool has_dt_bias, int32_t first_form) {
  check_range("gate_form", form, first_form, KDA_GATE_LOWER_BOUND);
  if (form == KDA_GATE_SOFTPLUS && !has_A_log) invalid("A_log: expected [HV] with the softplus gate, got none");
  if (form == KDA_GATE_LOG && has_A_log) invalid("A_log: expected none when g is already the decay, got one");
  if (form == KDA_GATE_LOG && has_dt_bias) invalid("dt_bias: expected none when g is already the decay, got one");
  if (form == KDA_GATE_LOWER_BOUND && !(std::isfinite(lower_bound) && lower_bound < 0))
    invalid("lower_bound: expected a finite number < 0, got ", lower_bound);
}

Dims check_inputs(const kda_inputs& in, Tensors& tensors) {
  const std::pair<const char*, const kda_tensor*> all[] = {{"q", &in.q},
                                                           {"k", &in.k},
                                                           {"v", &in.v},
                                                           {"g", &in.g},
                                                           {"beta", &in.beta},
                                                           {"A_log", &in.A_log},
                                                           {"dt_bias", &in.dt_bias},
                                                           {"cu_seqlens", &in.cu_seqlens}};
  for (const auto& [name, t] : all) check_absent_is_empty(name, *t);
  if (in.q.ndim != 4) invalid("q: expected 4 dimensions [B,T,H,K], got ", in.q.ndim);
  if (in.v.ndim != 4) invalid("v: expected 4 dimensions [B,T,HV,V], got ", in.v.ndim);
  Dims d{};
  d.B = in.q.shape[0], d.T = in.q.shape[1], d.H = in.q.shape[2], d.K = in.q.shape[3];
  d.HV = in.v.shape[2], d.V = in.v.shape[3];
  if (d.K < 1 || d.K > kMaxSize) invalid("q: expected K in 1..", kMaxSize, ", got ", d.K);
  if (d.V < 1 || d.V > kMaxSize) invalid("v: expected V in 1..", kMaxSize, ", got ", d.V);
  if (d.H < 1) invalid("q: expected H >= 1, got ", d.H);
  if (d.HV < 1 || d.HV % d.H) invalid("v: expected HV a multiple of H = ", d.H, ", got ", d.HV);
  d.varlen = present(in.cu_seqlens);

  tensors.check("q", in.q, {d.B, d.T, d.H, d.K}, 4, kFloats, false);
  tensors.check("k", in.k, {d.B, d.T, d.H, d.K}, 4, bit(in.q.dtype), false, " like q");
  tensors.check("v", in.v, {d.B, d.T, d.HV, d.V}, 4, bit(in.q.dtype), false, " ([B,T] like q)");
  tensors.check("g", in.g, {d.B, d.T, d.HV, d.K}, 4, kFloats, false, " ([B,T,HV,K] of q and v)");
  tensors.check_any_stride("beta", in.beta, {d.B, d.T, d.HV}, 3, kFloats, false, " ([B,T,HV] of q and v)");
  check_gate(in.gate_form, in.lower_bound, present(in.A_log), present(in.dt_bias), KDA_GATE_LOG);
  if (present(in.A_log)) tensors.check("A_log", in.A_log, {d.HV}, 1, kSingles, false, " ([HV] of v)");
  if (present(in.dt_bias))
    tensors.check("dt_bias", in.dt_bias, {d.HV, d.K}, 2, kSingles, false, " ([HV,K] of q and v)");
  if (d.varlen) {
    if (d.B != 1) invalid("cu_seqlens: expected one row of packed sequences (B = 1), got B = ", d.B);
    if (in.cu_seqlens.ndim != 1 || in.cu_seqlens.shape[0] < 1)
      invalid("cu_seqlens: expected shape [N+1], got ", shape_text(in.cu_seqlens.shape, in.cu_seqlens.ndim));
    tensors.check_storage("cu_seqlens", in.cu_seqlens, bit(KDA_I32) | bit(KDA_I64), false);
  }
  d.N = d.varlen ? in.cu_seqlens.shape[0] - 1 : d.B;
  check_range("beta_form", in.beta_form, KDA_BETA_ACTIVATED, KDA_BETA_2SIGMOID);
  check_range("state_layout", in.state_layout, KDA_STATE_V_FIRST, KDA_STATE_K_FIRST);
  if (!std::isfinite(in.scale)) invalid("scale: expected a finite number, got ", in.scale);
  return d;
}

// [rows,HV,V,K] or [rows,HV,K,V].
void check_state(const char* name, const kda_tensor& t, int64_t rows, const Dims& d, const kda_inputs& in,
                 Tensors& tensors, bool output, unsigned dtypes = kStates) {
  const bool v_first = in.state_layout == KDA_STATE_V_FIRST;
  tensors.check(name, t, {rows, d.HV, v_first ? d.V : d.K, v_first ? d.K : d.V}, 4, dtypes, output,
                v_first ? " ([..,HV,V,K], V-first)" : " ([..,HV,K,V], K-first)");
}

int64_t rows_of(const char* name, const kda_tensor& t) {
  check_absent_is_empty(name, t);
  if (t.ndim != 4) invalid(name, ": expected 4 dimensions [slots,HV,V,K], got ", t.ndim);
  return t.shape[0];
}

[[noreturn]] void too_few_h_rows(int64_t expected, int64_t h_every, int64_t got) {
  invalid("h: expected at least ", expected, " rows, one every ", h_every * kChunk, " tokens, got ", got);
}

// h and h_every, which becomes at least 1. How many rows packed sequences have, their lengths tell: validate_data.
void check_h(const kda_tensor& h, int32_t& h_every, const Dims& d, const kda_inputs& in, Tensors& tensors, bool output,
             unsigned dtypes) {
  if (h_every < 0) invalid("h_every: expected >= 0, got ", h_every);
  if (h_every && !present(h)) invalid("h_every: expected 0 without h, got ", h_every);
  h_every = std::max(h_every, 1);
  if (!present(h)) return;
  const int64_t rows = rows_of("h", h), expected = d.N * h_rows(d.T, h_every);
  if (!d.varlen && rows < expected) too_few_h_rows(expected, h_every, rows);
  check_state("h", h, rows, d, in, tensors, output, dtypes);
}

void check_states(const kda_states& s, const Dims& d, const kda_inputs& in, Tensors& tensors) {
  for (const auto& [name, t] : {std::pair{"h0", &s.h0},
                                {"hT", &s.hT},
                                {"state_indices", &s.state_indices},
                                {"has_initial_state", &s.has_initial_state}})
    check_absent_is_empty(name, *t);
  const bool pool = present(s.state_indices);
  if (pool && !present(s.h0) && !present(s.hT)) invalid("state_indices: expected a pool h0 or hT with it, got neither");
  if (present(s.h0)) check_state("h0", s.h0, pool ? rows_of("h0", s.h0) : d.N, d, in, tensors, false);
  if (present(s.hT)) check_state("hT", s.hT, pool ? rows_of("hT", s.hT) : d.N, d, in, tensors, true);
  if (pool && present(s.h0) && present(s.hT) && s.h0.shape[0] != s.hT.shape[0])
    invalid("hT: expected as many slots as h0, ", s.h0.shape[0], ", got ", s.hT.shape[0]);
  if (pool) tensors.check_any_stride("state_indices", s.state_indices, {d.N}, 1, bit(KDA_I32), false, " ([N])");
  if (present(s.has_initial_state)) {
    if (!present(s.h0)) invalid("has_initial_state: expected h0 with it, got none");
    tensors.check_any_stride("has_initial_state", s.has_initial_state, {d.N}, 1, bit(KDA_BOOL), false, " ([N])");
  }
  if (s.first_valid_slot < 0) invalid("first_valid_slot: expected >= 0, got ", s.first_valid_slot);
  if (s.reserved) invalid("states.reserved: expected 0, got ", s.reserved);
}

void set_default_scale(kda_inputs& in, const Dims& d) {
  if (in.scale == 0) in.scale = 1.0f / std::sqrt(static_cast<float>(d.K));
}

template <class P, class Args>
P with_dims(const Dims& d, const Args& args) {
  P p{};
  static_cast<Dims&>(p) = d;
  p.args = args;
  set_default_scale(p.args.in, d);
  return p;
}

// M, HV, K of the gate operators.
Shape check_gate_inputs(const kda_tensor& x, const kda_tensor& A_log, const kda_tensor& dt_bias, int32_t form,
                        float lower_bound, Tensors& tensors) {
  for (const auto& [name, t] : {std::pair{"x", &x}, {"A_log", &A_log}, {"dt_bias", &dt_bias}})
    check_absent_is_empty(name, *t);
  if (x.ndim != 3) invalid("x: expected 3 dimensions [M,HV,K], got ", x.ndim);
  const Shape shape{x.shape[0], x.shape[1], x.shape[2]};
  if (shape[1] < 1) invalid("x: expected HV >= 1, got ", shape[1]);
  if (shape[2] < 1 || shape[2] > kMaxSize) invalid("x: expected K in 1..", kMaxSize, ", got ", shape[2]);
  tensors.check_storage("x", x, kFloats, false);
  check_gate(form, lower_bound, present(A_log), present(dt_bias), KDA_GATE_SOFTPLUS);
  if (present(A_log)) tensors.check("A_log", A_log, {shape[1]}, 1, kSingles, false, " ([HV] of x)");
  if (present(dt_bias)) tensors.check("dt_bias", dt_bias, {shape[1], shape[2]}, 2, kSingles, false, " ([HV,K] of x)");
  return shape;
}

}  // namespace

ForwardProblem validate(const kda_forward_args* raw) {
  kda_forward_args a = copy_args(raw, sizeof(kda_forward_args));
  check_exec(a.exec);
  Tensors tensors;
  const Dims d = check_inputs(a.in, tensors);
  check_states(a.states, d, a.in, tensors);
  for (const auto& [name, t] : {std::pair{"o", &a.o},
                                {"checkpoints", &a.checkpoints},
                                {"checkpoint_slots", &a.checkpoint_slots},
                                {"h", &a.h},
                                {"v_new", &a.v_new},
                                {"Aqk", &a.Aqk},
                                {"Akk", &a.Akk}})
    check_absent_is_empty(name, *t);
  tensors.check("o", a.o, {d.B, d.T, d.HV, d.V}, 4, kFloats, true, " like v");
  if (present(a.checkpoints) != present(a.checkpoint_slots))
    invalid("checkpoint_slots: expected together with checkpoints, got ",
            present(a.checkpoints) ? "checkpoints" : "checkpoint_slots", " alone");
  if (present(a.checkpoints)) {
    check_state("checkpoints", a.checkpoints, rows_of("checkpoints", a.checkpoints), d, a.in, tensors, true);
    if (a.checkpoint_slots.ndim != 2 || a.checkpoint_slots.shape[0] != d.N)
      invalid("checkpoint_slots: expected shape [N,M] with N = ", d.N, ", got ",
              shape_text(a.checkpoint_slots.shape, a.checkpoint_slots.ndim));
    tensors.check_storage("checkpoint_slots", a.checkpoint_slots, bit(KDA_I32), false);
    if (a.checkpoint_every < 1 || a.checkpoint_every % kChunk)
      invalid("checkpoint_every: expected a positive multiple of ", kChunk, ", got ", a.checkpoint_every);
  } else if (a.checkpoint_every) {
    invalid("checkpoint_every: expected 0 without checkpoints, got ", a.checkpoint_every);
  }
  check_h(a.h, a.h_every, d, a.in, tensors, true, kStates);
  if (present(a.v_new)) tensors.check("v_new", a.v_new, {d.B, d.T, d.HV, d.V}, 4, kSingles, true, " like v");
  if (present(a.Aqk)) tensors.check("Aqk", a.Aqk, {d.B, d.T, d.HV, kChunk}, 4, kSingles, true, " ([B,T,HV,C])");
  if (present(a.Akk)) tensors.check("Akk", a.Akk, {d.B, d.T, d.HV, kChunk}, 4, kSingles, true, " ([B,T,HV,C])");
  tensors.check_aliasing();
  return with_dims<ForwardProblem>(d, a);
}

BackwardProblem validate(const kda_backward_args* raw) {
  kda_backward_args a = copy_args(raw, sizeof(kda_backward_args));
  check_exec(a.exec);
  Tensors tensors;
  const Dims d = check_inputs(a.in, tensors);
  const Shape qk{d.B, d.T, d.H, d.K}, v{d.B, d.T, d.HV, d.V}, A{d.B, d.T, d.HV, kChunk};
  for (const auto& [name, t] : {std::pair{"h0", &a.h0},
                                {"d_o", &a.d_o},
                                {"dhT", &a.dhT},
                                {"h", &a.h},
                                {"v_new", &a.v_new},
                                {"Aqk", &a.Aqk},
                                {"Akk", &a.Akk},
                                {"dq", &a.dq},
                                {"dk", &a.dk},
                                {"dv", &a.dv},
                                {"dg", &a.dg},
                                {"dbeta", &a.dbeta},
                                {"dA_log", &a.dA_log},
                                {"d_dt_bias", &a.d_dt_bias},
                                {"dh0", &a.dh0}})
    check_absent_is_empty(name, *t);
  if (present(a.h0)) check_state("h0", a.h0, d.N, d, a.in, tensors, false);
  tensors.check("d_o", a.d_o, v, 4, kFloats, false, " like v");
  if (present(a.dhT)) check_state("dhT", a.dhT, d.N, d, a.in, tensors, false);
  check_h(a.h, a.h_every, d, a.in, tensors, false, kSingles);
  const int saved = present(a.v_new) + present(a.Aqk) + present(a.Akk);
  if (saved) {
    if (saved != 3 || !present(a.h) || a.h_every != 1)
      invalid("v_new, Aqk, Akk: expected all three with h of every chunk, or none, got ", saved,
              !present(a.h)    ? " without h"
              : a.h_every != 1 ? str(" with h_every ", a.h_every)
                               : "");
    tensors.check("v_new", a.v_new, v, 4, kSingles, false, " like v");
    tensors.check("Aqk", a.Aqk, A, 4, kSingles, false, " ([B,T,HV,C])");
    tensors.check("Akk", a.Akk, A, 4, kSingles, false, " ([B,T,HV,C])");
  }
  if (present(a.dq)) tensors.check("dq", a.dq, qk, 4, kFloats, true, " like q");
  if (present(a.dk)) tensors.check("dk", a.dk, qk, 4, kFloats, true, " like k");
  if (present(a.dv)) tensors.check("dv", a.dv, v, 4, kFloats, true, " like v");
  if (present(a.dg)) tensors.check("dg", a.dg, {d.B, d.T, d.HV, d.K}, 4, kFloats, true, " like g");
  if (present(a.dbeta)) tensors.check_any_stride("dbeta", a.dbeta, {d.B, d.T, d.HV}, 3, kFloats, true, " like beta");
  if (present(a.dA_log)) {
    if (!present(a.in.A_log)) invalid("dA_log: expected A_log with it, got none");
    tensors.check("dA_log", a.dA_log, {d.HV}, 1, kSingles, true, " ([HV])");
  }
  if (present(a.d_dt_bias)) {
    if (!present(a.in.dt_bias)) invalid("d_dt_bias: expected dt_bias with it, got none");
    tensors.check("d_dt_bias", a.d_dt_bias, {d.HV, d.K}, 2, kSingles, true, " ([HV,K])");
  }
  if (present(a.dh0)) check_state("dh0", a.dh0, d.N, d, a.in, tensors, true);
  if (a.reserved) invalid("args.reserved: expected 0, got ", a.reserved);
  tensors.check_aliasing();
  return with_dims<BackwardProblem>(d, a);
}

DecodeProblem validate(const kda_decode_args* raw) {
  const kda_decode_args a = copy_args(raw, sizeof(kda_decode_args));
  check_exec(a.exec);
  Tensors tensors;
  const Dims d = check_inputs(a.in, tensors);
  check_states(a.states, d, a.in, tensors);
  check_absent_is_empty("o", a.o);
  tensors.check("o", a.o, {d.B, d.T, d.HV, d.V}, 4, kFloats, true, " like v");
  tensors.check_aliasing();
  return with_dims<DecodeProblem>(d, a);
}

GateProblem validate(const kda_gate_args* raw) {
  const kda_gate_args a = copy_args(raw, sizeof(kda_gate_args));
  check_exec(a.exec);
  Tensors tensors;
  const Shape shape = check_gate_inputs(a.x, a.A_log, a.dt_bias, a.gate_form, a.lower_bound, tensors);
  check_absent_is_empty("g", a.g);
  tensors.check("g", a.g, shape, 3, kFloats, true, " like x");
  tensors.check_aliasing();
  return {a};
}

GateBackwardProblem validate(const kda_gate_backward_args* raw) {
  const kda_gate_backward_args a = copy_args(raw, sizeof(kda_gate_backward_args));
  check_exec(a.exec);
  Tensors tensors;
  const Shape shape = check_gate_inputs(a.x, a.A_log, a.dt_bias, a.gate_form, a.lower_bound, tensors);
  for (const auto& [name, t] :
       {std::pair{"dg", &a.dg}, {"dx", &a.dx}, {"dA_log", &a.dA_log}, {"d_dt_bias", &a.d_dt_bias}})
    check_absent_is_empty(name, *t);
  tensors.check("dg", a.dg, shape, 3, kFloats, false, " like x");
  tensors.check("dx", a.dx, shape, 3, kFloats, true, " like x");
  if (present(a.dA_log)) {
    if (!present(a.A_log)) invalid("dA_log: expected A_log with it, got none");
    tensors.check("dA_log", a.dA_log, {shape[1]}, 1, kSingles, true, " ([HV])");
  }
  if (present(a.d_dt_bias)) {
    if (!present(a.dt_bias)) invalid("d_dt_bias: expected dt_bias with it, got none");
    tensors.check("d_dt_bias", a.d_dt_bias, {shape[1], shape[2]}, 2, kSingles, true, " ([HV,K])");
  }
  tensors.check_aliasing();
  return {a};
}

namespace {

bool any_f64(std::initializer_list<const kda_tensor*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const kda_tensor* t) { return present(*t) && t->dtype == KDA_F64; });
}
bool any_f64(const kda_inputs& in) {
  return any_f64({&in.q, &in.v, &in.g, &in.beta, &in.A_log, &in.dt_bias});
}  // k is like q

}  // namespace

bool has_f64(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  return any_f64(a.in) || any_f64({&a.states.h0, &a.states.hT, &a.o, &a.checkpoints, &a.h, &a.v_new, &a.Aqk, &a.Akk});
}
bool has_f64(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  return any_f64(a.in) || any_f64({&a.h0, &a.d_o, &a.dhT, &a.h, &a.v_new, &a.Aqk, &a.Akk, &a.dq, &a.dk, &a.dv, &a.dg,
                                   &a.dbeta, &a.dA_log, &a.d_dt_bias, &a.dh0});
}
bool has_f64(const DecodeProblem& p) {
  return any_f64(p.args.in) || any_f64({&p.args.states.h0, &p.args.states.hT, &p.args.o});
}
bool has_f64(const GateProblem& p) { return any_f64({&p.args.x, &p.args.A_log, &p.args.dt_bias, &p.args.g}); }
bool has_f64(const GateBackwardProblem& p) {
  const kda_gate_backward_args& a = p.args;
  return any_f64({&a.x, &a.A_log, &a.dt_bias, &a.dg, &a.dx, &a.dA_log, &a.d_dt_bias});
}

int64_t int_at(const kda_tensor& t, int64_t i, int64_t j) {
  const int64_t offset = i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0);
  switch (t.dtype) {
    case KDA_I64: return static_cast<const int64_t*>(t.data)[offset];
    case KDA_I32: return static_cast<const int32_t*>(t.data)[offset];
    default: return static_cast<const uint8_t*>(t.data)[offset];
  }
}

Sequence sequence_at(const Dims& d, const kda_inputs& in, int64_t n) {
  if (!d.varlen) return {n, n, 0, d.T, n, true, true};
  const int64_t t0 = int_at(in.cu_seqlens, n);
  return {n, 0, t0, int_at(in.cu_seqlens, n + 1) - t0, n, true, true};
}

Sequence sequence_at(const Dims& d, const kda_inputs& in, const kda_states& states, int64_t n) {
  Sequence s = sequence_at(d, in, n);
  if (present(states.state_indices)) s.slot = int_at(states.state_indices, n);
  s.live = !present(states.state_indices) || s.slot >= states.first_valid_slot;
  s.initial = present(states.h0) && (!present(states.has_initial_state) || int_at(states.has_initial_state, n));
  return s;
}

const int64_t* first_h_rows(const Dims& d, const kda_inputs& in, int64_t h_every, int64_t* rows) {
  for (int64_t n = 0, row = 0; n < d.N; ++n) {
    rows[n] = row;
    row += h_rows(sequence_at(d, in, n).length, h_every);
  }
  return rows;
}

namespace {

void check_cu_seqlens(const Dims& d, const kda_inputs& in) {
  if (!d.varlen) return;
  if (const int64_t first = int_at(in.cu_seqlens, 0)) invalid("cu_seqlens[0]: expected 0, got ", first);
  for (int64_t n = 0; n < d.N; ++n) {
    const int64_t begin = int_at(in.cu_seqlens, n), end = int_at(in.cu_seqlens, n + 1);
    if (end < begin) invalid("cu_seqlens[", n + 1, "]: expected at least ", begin, " (never decreasing), got ", end);
  }
  if (const int64_t last = int_at(in.cu_seqlens, d.N); last > d.T)
    invalid("cu_seqlens[", d.N, "]: expected at most T = ", d.T, ", got ", last);
}

// Live slots lie inside the pool and are all different.
void check_slots(const char* name, const kda_tensor& indices, int64_t first_valid, int64_t slots) {
  const int64_t rows = indices.shape[0], columns = indices.ndim > 1 ? indices.shape[1] : 1, count = rows * columns;
  auto at = [&](int64_t i) { return int_at(indices, i / columns, i % columns); };
  auto repeated = [&](int64_t slot) { invalid(name, ": expected every live slot once, got slot ", slot, " twice"); };
  for (int64_t i = 0; i < count; ++i)
    if (at(i) >= slots) invalid(name, ": expected slots below ", slots, ", got ", at(i));
  if (count <= 32) {  // the usual decode step
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < i; ++j)
        if (at(i) == at(j) && at(i) >= first_valid) repeated(at(i));
    return;
  }
  // A bit a slot, for a window of slots at a time: no allocation, whatever the size of the pool.
  constexpr int64_t kWindow = int64_t{1} << 18;
  std::bitset<kWindow> seen;
  for (int64_t begin = first_valid; begin < slots; begin += kWindow) {
    seen.reset();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = at(i) - begin;
      if (slot < 0 || slot >= kWindow) continue;
      if (seen.test(slot)) repeated(at(i));
      seen.set(slot);
    }
  }
}

void check_states_data(const Dims& d, const kda_inputs& in, const kda_states& s) {
  check_cu_seqlens(d, in);
  if (present(s.state_indices))
    check_slots("state_indices", s.state_indices, s.first_valid_slot, present(s.h0) ? s.h0.shape[0] : s.hT.shape[0]);
}

void check_h_rows(const Dims& d, const kda_inputs& in, const kda_tensor& h, int64_t h_every) {
  if (!present(h) || !d.varlen) return;
  int64_t rows = 0;
  for (int64_t n = 0; n < d.N; ++n) rows += h_rows(sequence_at(d, in, n).length, h_every);
  if (h.shape[0] < rows) too_few_h_rows(rows, h_every, h.shape[0]);
}

}  // namespace

void validate_data(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  check_states_data(p, a.in, a.states);
  check_h_rows(p, a.in, a.h, a.h_every);
  if (present(a.checkpoints))
    check_slots("checkpoint_slots", a.checkpoint_slots, a.states.first_valid_slot, a.checkpoints.shape[0]);
}
void validate_data(const BackwardProblem& p) {
  check_cu_seqlens(p, p.args.in);
  check_h_rows(p, p.args.in, p.args.h, p.args.h_every);
}
void validate_data(const DecodeProblem& p) { check_states_data(p, p.args.in, p.args.states); }

}  // namespace kda
