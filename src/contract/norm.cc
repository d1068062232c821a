// The contract of the output's norm and gate.
#include <limits>

#include "contract/rules.h"

namespace kda {
namespace {

// Checks what calls of the operators and norms behind other operators have alike.
template <class Norm>
void check_options(const Norm& n, Tensors& tensors) {
  tensors.check(n.activation);
  if (n.activation != KDA_NORM_NONE) tensors.check_present(n.gate);
  else if (present(n.gate)) invalid(tensors.name(&n.gate), ": expected none without an activation, got one");
  tensors.check(n.weight);
  if (!(n.eps >= 0 && n.eps <= std::numeric_limits<float>::max()))
    invalid(tensors.name(&n.eps), ": expected a number >= 0 in the range of f32, got ", n.eps);
}

// Checks x, gate, weight and options, which both operators take alike. Returns the sizes.
template <class Args>
NormDims check_norm_inputs(const Args& a, Tensors& tensors) {
  const kda_tensor& x = a.x;
  tensors.check_form(x, a.gate, a.weight);
  tensors.bind(x);
  const int64_t B = x.shape[0], T = x.shape[1], HV = x.shape[2], V = x.shape[3];
  if (V < 1 || V > kMaxNormSize) invalid("x: expected V in 1..", kMaxNormSize, ", got ", V);
  if (!product_within(kMaxPairs, {B, T, HV}))
    invalid("x: expected B T HV of at most 2^40, got shape ", shape_text(x.shape, x.ndim));
  tensors.check(x);
  check_options(a, tensors);
  tensors.check(a.reserved);
  return {B * T * HV, V, false};
}

}  // namespace

NormGateProblem validate(const kda_norm_gate_args* raw) {
  const kda_norm_gate_args a = copy_args(raw);
  Tensors tensors(a);
  NormDims d = check_norm_inputs(a, tensors);
  tensors.check_all(a.y);
  tensors.check_aliasing(a.exec);
  d.idle = !tensors.write();
  return {d, a};
}

NormGateBackwardProblem validate(const kda_norm_gate_backward_args* raw) {
  const kda_norm_gate_backward_args a = copy_args(raw);
  Tensors tensors(a);
  NormDims d = check_norm_inputs(a, tensors);
  tensors.check_all(a.dy, a.dx, a.dgate, a.dweight);
  tensors.check_aliasing(a.exec);
  d.idle = !tensors.write();
  return {d, a};
}

void check_norm(const kda_norm_inputs& norm, Tensors& tensors) {
  for (const kda_tensor* t : {&norm.gate, &norm.weight}) {
    tensors.check_form(*t);
    if (present(*t) && !norm.apply) invalid(tensors.name(t), ": expected norm.apply with it, got 0");
  }
  if (norm.apply) check_options(norm, tensors);
}

NormGateProblem norm_behind(const kda_exec& exec, const kda_tensor& o, const kda_norm_inputs& norm) {
  NormGateProblem p{};
  p.args = {sizeof(kda_norm_gate_args), exec, o, norm.gate, norm.weight, o, norm.eps, norm.activation, 0};
  p.rows = o.shape[0] * o.shape[1] * o.shape[2], p.V = o.shape[3];
  p.idle = p.rows == 0, p.keep_zeros = true;
  return p;
}

}  // namespace kda
