#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "checks.h"
#include "validate.h"

namespace kda {
namespace {

[[noreturn]] void too_few_h_rows(int64_t expected, int64_t h_every, int64_t got) {
  invalid("h: expected at least ", expected, " rows, one every ", h_every * kChunk, " tokens, got ", got);
}

// Checks h and h_every, which becomes at least 1. How many rows packed sequences have depends on their lengths: see
// validate_data.
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

// Checks the inputs of the gate operators. Returns M, HV and K.
Shape check_gate_inputs(const kda_tensor& x, const kda_tensor& A_log, const kda_tensor& dt_bias, int32_t form,
                        float lower_bound, Tensors& tensors) {
  for (const auto& [name, t] : {std::pair{"x", &x}, {"A_log", &A_log}, {"dt_bias", &dt_bias}})
    check_absent_is_empty(name, *t);
  if (x.ndim != 3) invalid("x: expected 3 dimensions [M,HV,K], got ", x.ndim);
  const Shape shape{x.shape[0], x.shape[1], x.shape[2]};
  if (shape[1] < 1) invalid("x: expected HV >= 1, got ", shape[1]);
  if (shape[2] < 1 || shape[2] > kMaxSize) invalid("x: expected K in 1..", kMaxSize, ", got ", shape[2]);
  if (!product_within(kMaxPairs, {shape[0], shape[1]}))
    invalid("x: expected M HV of at most 2^40, got shape ", shape_text(x.shape, x.ndim));
  tensors.check_storage("x", x, kFloats, false);
  check_gate(form, lower_bound, present(A_log), present(dt_bias), KDA_GATE_SOFTPLUS);
  if (present(A_log)) tensors.check("A_log", A_log, {shape[1]}, 1, kSingles, false, " ([HV] of x)");
  if (present(dt_bias)) tensors.check("dt_bias", dt_bias, {shape[1], shape[2]}, 2, kSingles, false, " ([HV,K] of x)");
  return shape;
}

}  // namespace

ForwardProblem validate(const kda_forward_args* raw) {
  kda_forward_args a = copy_args(raw, offsetof(kda_forward_args, out_state_indices));
  check_exec(a.exec);
  Tensors tensors;
  Dims d = check_inputs(a.in, tensors);
  check_states(a.states, a.out_state_indices, d, a.in, tensors);
  for (const auto& [name, t] : {std::pair{"o", &a.o},
                                {"checkpoints", &a.checkpoints},
                                {"checkpoint_slots", &a.checkpoint_slots},
                                {"h", &a.h},
                                {"v_new", &a.v_new},
                                {"Aqk", &a.Aqk},
                                {"Akk", &a.Akk}})
    check_absent_is_empty(name, *t);
  tensors.check("o", a.o, {d.B, d.T, d.HV, d.V}, 4, kFloats, true, " like v");
  check_checkpoints(a.checkpoints, a.checkpoint_slots, a.checkpoint_offset, a.checkpoint_every, d.N, tensors);
  if (present(a.checkpoints))
    check_state("checkpoints", a.checkpoints, rows_of("checkpoints", a.checkpoints), d, a.in, tensors, true);
  check_h(a.h, a.h_every, d, a.in, tensors, true, kStates);
  if (present(a.v_new)) tensors.check("v_new", a.v_new, {d.B, d.T, d.HV, d.V}, 4, kStates, true, " like v");
  if (present(a.Aqk)) tensors.check("Aqk", a.Aqk, {d.B, d.T, d.HV, kChunk}, 4, kSingles, true, " ([B,T,HV,C])");
  if (present(a.Akk)) tensors.check("Akk", a.Akk, {d.B, d.T, d.HV, kChunk}, 4, kSingles, true, " ([B,T,HV,C])");
  check_norm(a.norm, a.o, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<ForwardProblem>(d, a);
}

BackwardProblem validate(const kda_backward_args* raw) {
  kda_backward_args a = copy_args(raw, sizeof(kda_backward_args));
  check_exec(a.exec);
  Tensors tensors;
  Dims d = check_inputs(a.in, tensors);
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
  check_h(a.h, a.h_every, d, a.in, tensors, false, kStates);
  const int scores = present(a.Aqk) + present(a.Akk);
  if (present(a.v_new) || scores) {
    if (!present(a.v_new) || scores == 1 || !present(a.h) || a.h_every != 1)
      invalid("v_new, Aqk, Akk: expected all three, or v_new alone, with h of every chunk, or none, got ",
              present(a.v_new) + scores,
              !present(a.h)    ? " without h"
              : a.h_every != 1 ? str(" with h_every ", a.h_every)
                               : "");
    tensors.check("v_new", a.v_new, v, 4, kStates, false, " like v");
  }
  if (scores) {
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
  check_memory(tensors, a.exec, d);
  return with_dims<BackwardProblem>(d, a);
}

GateProblem validate(const kda_gate_args* raw) {
  const kda_gate_args a = copy_args(raw, sizeof(kda_gate_args));
  check_exec(a.exec);
  Tensors tensors;
  const Shape shape = check_gate_inputs(a.x, a.A_log, a.dt_bias, a.gate_form, a.lower_bound, tensors);
  check_absent_is_empty("g", a.g);
  tensors.check("g", a.g, shape, 3, kFloats, true, " like x");
  tensors.check_aliasing(a.exec);
  return {a, !tensors.write()};
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
  tensors.check_aliasing(a.exec);
  return {a, !tensors.write()};
}

bool has_f64(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  return any_f64(a.in) || any_f64(a.norm) ||
         any_f64({&a.states.h0, &a.states.hT, &a.o, &a.checkpoints, &a.h, &a.v_new, &a.Aqk, &a.Akk});
}
bool has_f64(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  return any_f64(a.in) || any_f64({&a.h0, &a.d_o, &a.dhT, &a.h, &a.v_new, &a.Aqk, &a.Akk, &a.dq, &a.dk, &a.dv, &a.dg,
                                   &a.dbeta, &a.dA_log, &a.d_dt_bias, &a.dh0});
}
bool has_f64(const GateProblem& p) { return any_f64({&p.args.x, &p.args.A_log, &p.args.dt_bias, &p.args.g}); }
bool has_f64(const GateBackwardProblem& p) {
  const kda_gate_backward_args& a = p.args;
  return any_f64({&a.x, &a.A_log, &a.dt_bias, &a.dg, &a.dx, &a.dA_log, &a.d_dt_bias});
}

const int64_t* first_h_rows(const Dims& d, const kda_inputs& in, int64_t h_every, int64_t* rows) {
  for (int64_t n = 0, row = 0; n < d.N; ++n) {
    rows[n] = row;
    row += h_rows(sequence_at(d, in, n).length, h_every);
  }
  return rows;
}

namespace {

void check_h_rows(const Dims& d, const kda_inputs& in, const kda_tensor& h, int64_t h_every) {
  if (!present(h) || !d.varlen) return;
  int64_t rows = 0;
  for (int64_t n = 0; n < d.N; ++n) rows += h_rows(sequence_at(d, in, n).length, h_every);
  if (h.shape[0] < rows) too_few_h_rows(rows, h_every, h.shape[0]);
}

}  // namespace

void validate_data(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  check_states_data(p, a.in, a.states, a.out_state_indices);
  check_h_rows(p, a.in, a.h, a.h_every);
  const kda_states& states = a.states;
  const auto in_pool = [&](const kda_tensor& pool) { return present(pool) && a.checkpoints.data == pool.data; };
  check_checkpoints_data(
      a.checkpoints, a.checkpoint_slots, a.checkpoint_offset,
      {states.state_indices, a.out_state_indices, states.has_initial_state, p.N, states.first_valid_slot, 0, false},
      in_pool(states.h0), in_pool(states.hT));
}
void validate_data(const BackwardProblem& p) {
  check_cu_seqlens(p, p.args.in);
  check_h_rows(p, p.args.in, p.args.h, p.args.h_every);
}

}  // namespace kda
