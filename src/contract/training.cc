#include "contract/problem.h"

#include <algorithm>
#include <cstddef>

#include "contract/rules.h"

namespace kda {
namespace {

[[noreturn]] void too_few_h_rows(int64_t expected, int64_t h_every, int64_t got) {
  invalid("h: expected at least ", expected, " rows, one every ", h_every * kChunk, " tokens, got ", got);
}

// Checks h and h_every, which becomes at least 1. How many rows packed sequences have depends on their lengths: see
// validate_data.
template <class Args>
void check_h(Args& a, const Dims& d, Tensors& tensors) {
  const kda_tensor& h = a.h;
  int32_t& h_every = a.h_every;
  if (h_every < 0) invalid("h_every: expected >= 0, got ", h_every);
  if (h_every && !present(h)) invalid("h_every: expected 0 without h, got ", h_every);
  h_every = std::max(h_every, 1);
  if (!present(h)) return;
  tensors.check_rank(h);
  const int64_t rows = h.shape[0], expected = d.N * h_rows(d.T, h_every);
  if (!d.varlen && rows < expected) too_few_h_rows(expected, h_every, rows);
  const bool k_first = tensors.k_first;
  tensors.k_first = h_layout(a) == KDA_STATE_K_FIRST;
  tensors.check(h);
  tensors.k_first = k_first;
}

// Checks x [M,HV,K] and the gate, which both operators take alike.
template <class Args>
void check_gate_inputs(const Args& a, Tensors& tensors) {
  const kda_tensor& x = a.x;
  tensors.check_form(x, a.A_log, a.dt_bias);
  tensors.bind(x);
  if (x.shape[1] < 1) invalid("x: expected HV >= 1, got ", x.shape[1]);
  if (x.shape[2] < 1 || x.shape[2] > kMaxSize) invalid("x: expected K in 1..", kMaxSize, ", got ", x.shape[2]);
  if (!product_within(kMaxPairs, {x.shape[0], x.shape[1]}))
    invalid("x: expected M HV of at most 2^40, got shape ", shape_text(x.shape, x.ndim));
  tensors.check(x);
  check_gate(a, tensors);
}

}  // namespace

ForwardProblem validate(const kda_forward_args* raw) {
  kda_forward_args a = copy_args(raw, offsetof(kda_forward_args, out_state_indices));
  Tensors tensors(a);
  Dims d = check_inputs(a.in, tensors);
  check_states(a.states, &a.out_state_indices, tensors);
  tensors.check_form(a.o, a.checkpoints, a.checkpoint_slots, a.h, a.v_new, a.Aqk, a.Akk);
  tensors.check(a.o);
  check_checkpoints(a, tensors);
  check_h(a, d, tensors);
  tensors.check(a.v_new, a.Aqk, a.Akk, a.reserved);
  check_norm(a.norm, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<ForwardProblem>(d, a);
}

BackwardProblem validate(const kda_backward_args* raw) {
  kda_backward_args a = copy_args(raw);
  Tensors tensors(a);
  Dims d = check_inputs(a.in, tensors);
  tensors.check_form(a.h0, a.d_o, a.dhT, a.h, a.v_new, a.Aqk, a.Akk);
  tensors.check_form(a.dq, a.dk, a.dv, a.dg, a.dbeta, a.dA_log, a.d_dt_bias, a.dh0);
  tensors.check(a.h0, a.d_o, a.dhT);
  check_h(a, d, tensors);
  const int scores = present(a.Aqk) + present(a.Akk);
  if (present(a.v_new) || scores)
    if (!present(a.v_new) || scores == 1 || !present(a.h) || a.h_every != 1)
      invalid("v_new, Aqk, Akk: expected all three, or v_new alone, with h of every chunk, or none, got ",
              present(a.v_new) + scores,
              !present(a.h)    ? " without h"
              : a.h_every != 1 ? str(" with h_every ", a.h_every)
                               : "");
  tensors.check(a.v_new, a.Aqk, a.Akk);
  tensors.check(a.dq, a.dk, a.dv, a.dg, a.dbeta, a.dA_log, a.d_dt_bias, a.dh0);
  check_memory(tensors, a.exec, d);
  return with_dims<BackwardProblem>(d, a);
}

GateProblem validate(const kda_gate_args* raw) {
  const kda_gate_args a = copy_args(raw);
  Tensors tensors(a);
  check_gate_inputs(a, tensors);
  tensors.check_all(a.g);
  tensors.check_aliasing(a.exec);
  return {a, !tensors.write()};
}

GateBackwardProblem validate(const kda_gate_backward_args* raw) {
  const kda_gate_backward_args a = copy_args(raw);
  Tensors tensors(a);
  check_gate_inputs(a, tensors);
  tensors.check_all(a.dg, a.dx, a.dA_log, a.d_dt_bias);
  tensors.check_aliasing(a.exec);
  return {a, !tensors.write()};
}

#define KDA_HAS_F64(Problem) \
  bool has_f64(const Problem& p) { return any_f64(p.args); }
KDA_HAS_F64(ForwardProblem)
KDA_HAS_F64(BackwardProblem)
KDA_HAS_F64(DecodeProblem)
KDA_HAS_F64(VerifyProblem)
KDA_HAS_F64(FlushProblem)
KDA_HAS_F64(FlushVerifyProblem)
KDA_HAS_F64(SegmentMapProblem)
KDA_HAS_F64(SegmentMergeProblem)
KDA_HAS_F64(GateProblem)
KDA_HAS_F64(GateBackwardProblem)
KDA_HAS_F64(NormGateProblem)
KDA_HAS_F64(NormGateBackwardProblem)
KDA_HAS_F64(ConvProblem)
KDA_HAS_F64(ConvBackwardProblem)

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
  const StatePair states = states_of(a.states, &a.out_state_indices);
  check_cu_seqlens(p, a.in);
  check_states_data(states, p.N);
  check_h_rows(p, a.in, a.h, a.h_every);
  check_checkpoints_data(a, states, p.N);
}
void validate_data(const BackwardProblem& p) {
  check_cu_seqlens(p, p.args.in);
  check_h_rows(p, p.args.in, p.args.h, p.args.h_every);
}

}  // namespace kda
