// The contract of the output's norm and gate.
#include <limits>
#include <utility>

#include "validate.h"

namespace kda {
namespace {

// What the arguments of a norm are called, and the tensor that it is of.
struct NormNames {
  const char *gate, *weight, *eps, *activation;
  const char *like_x, *of_x;
};
constexpr NormNames kOperator{"gate", "weight", "eps", "activation", " like x", " ([V] of x)"};
constexpr NormNames kInCall{"norm.gate", "norm.weight", "norm.eps", "norm.activation", " like o", " ([V] of o)"};

void check_norm(const NormNames& names, const kda_tensor& x, const kda_tensor& gate, const kda_tensor& weight,
                double eps, int32_t activation, Tensors& tensors) {
  check_range(names.activation, activation, KDA_NORM_NONE, KDA_NORM_SILU);
  if (activation == KDA_NORM_NONE) {
    if (present(gate)) invalid(names.gate, ": expected none without an activation, got one");
  } else {
    tensors.check(names.gate, gate, {x.shape[0], x.shape[1], x.shape[2], x.shape[3]}, 4, kFloats, false, names.like_x);
  }
  if (present(weight)) tensors.check(names.weight, weight, {x.shape[3]}, 1, kFloats, false, names.of_x);
  if (!(eps >= 0 && eps <= std::numeric_limits<float>::max()))
    invalid(names.eps, ": expected a number >= 0 in the range of f32, got ", eps);
}

// Checks x, gate, weight and options, which both operators take alike. Returns the sizes.
NormDims check_norm_inputs(const kda_tensor& x, const kda_tensor& gate, const kda_tensor& weight, double eps,
                           int32_t activation, int32_t reserved, Tensors& tensors) {
  for (const auto& [name, t] : {std::pair{"x", &x}, {"gate", &gate}, {"weight", &weight}})
    check_absent_is_empty(name, *t);
  if (x.ndim != 4) invalid("x: expected 4 dimensions [B,T,HV,V], got ", x.ndim);
  const int64_t B = x.shape[0], T = x.shape[1], HV = x.shape[2], V = x.shape[3];
  if (V < 1 || V > kMaxNormSize) invalid("x: expected V in 1..", kMaxNormSize, ", got ", V);
  if (!product_within(kMaxPairs, {B, T, HV}))
    invalid("x: expected B T HV of at most 2^40, got shape ", shape_text(x.shape, x.ndim));
  tensors.check_storage("x", x, kFloats, false);
  check_norm(kOperator, x, gate, weight, eps, activation, tensors);
  if (reserved) invalid("args.reserved: expected 0, got ", reserved);
  return {B * T * HV, V, false};
}

Shape shape_of(const kda_tensor& x) { return {x.shape[0], x.shape[1], x.shape[2], x.shape[3]}; }

}  // namespace

NormGateProblem validate(const kda_norm_gate_args* raw) {
  const kda_norm_gate_args a = copy_args(raw, sizeof(kda_norm_gate_args));
  check_exec(a.exec);
  Tensors tensors;
  NormDims d = check_norm_inputs(a.x, a.gate, a.weight, a.eps, a.activation, a.reserved, tensors);
  check_absent_is_empty("y", a.y);
  tensors.check("y", a.y, shape_of(a.x), 4, kFloats, true, " like x");
  tensors.check_aliasing(a.exec, true);
  d.idle = !tensors.write();
  return {d, a};
}

void check_norm(const kda_norm_inputs& norm, const kda_tensor& o, Tensors& tensors) {
  for (const auto& [name, t] : {std::pair{kInCall.gate, &norm.gate}, {kInCall.weight, &norm.weight}}) {
    check_absent_is_empty(name, *t);
    if (present(*t) && !norm.apply) invalid(name, ": expected norm.apply with it, got 0");
  }
  if (norm.apply) check_norm(kInCall, o, norm.gate, norm.weight, norm.eps, norm.activation, tensors);
}

NormGateProblem norm_behind(const kda_exec& exec, const kda_tensor& o, const kda_norm_inputs& norm) {
  NormGateProblem p{};
  p.args = {sizeof(kda_norm_gate_args), exec, o, norm.gate, norm.weight, o, norm.eps, norm.activation, 0};
  p.rows = o.shape[0] * o.shape[1] * o.shape[2], p.V = o.shape[3];
  p.idle = p.rows == 0, p.keep_zeros = true;
  return p;
}

NormGateBackwardProblem validate(const kda_norm_gate_backward_args* raw) {
  const kda_norm_gate_backward_args a = copy_args(raw, sizeof(kda_norm_gate_backward_args));
  check_exec(a.exec);
  Tensors tensors;
  NormDims d = check_norm_inputs(a.x, a.gate, a.weight, a.eps, a.activation, a.reserved, tensors);
  for (const auto& [name, t] : {std::pair{"dy", &a.dy}, {"dx", &a.dx}, {"dgate", &a.dgate}, {"dweight", &a.dweight}})
    check_absent_is_empty(name, *t);
  tensors.check("dy", a.dy, shape_of(a.x), 4, kFloats, false, " like x");
  if (present(a.dx)) tensors.check("dx", a.dx, shape_of(a.x), 4, kFloats, true, " like x");
  if (present(a.dgate)) {
    if (!present(a.gate)) invalid("dgate: expected gate with it, got none");
    tensors.check("dgate", a.dgate, shape_of(a.x), 4, kFloats, true, " like gate");
  }
  if (present(a.dweight)) {
    if (!present(a.weight)) invalid("dweight: expected weight with it, got none");
    tensors.check("dweight", a.dweight, {d.V}, 1, kSingles, true, " ([V] of x)");
  }
  tensors.check_aliasing(a.exec);
  d.idle = !tensors.write();
  return {d, a};
}

bool has_f64(const NormGateProblem& p) {
  const kda_norm_gate_args& a = p.args;
  return any_f64({&a.x, &a.gate, &a.weight, &a.y});
}
bool has_f64(const NormGateBackwardProblem& p) {
  const kda_norm_gate_backward_args& a = p.args;
  return any_f64({&a.x, &a.gate, &a.weight, &a.dy, &a.dx, &a.dgate, &a.dweight});
}

}  // namespace kda
