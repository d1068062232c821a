// Gradients of gates are small differences of large sums: dg of a token is what remains of q dq and k dk of all
// tokens after it, and their rounding errors are no smaller where the decay is strong. Here is how large those errors
// are.
#pragma once
#include <map>

#include "fuzz_edges.h"

namespace kda::test {

using Noise = std::map<std::string, std::vector<double>>;  // by the name of the output, for each element
constexpr double kCancelled = 8 * kNudge;

inline double activated_beta(int32_t form, double b) {
  return form == KDA_BETA_ACTIVATED ? std::abs(b) : form == KDA_BETA_2SIGMOID ? 2 : 1;
}

// The largest product of a state and a state's gradient.
inline double largest_product(const kda_backward_args& a) {
  const double q = a.in.qk_l2norm ? 1 : largest(a.in.q), k = a.in.qk_l2norm ? 1 : largest(a.in.k);
  const double scale = a.in.scale != 0 ? std::abs(a.in.scale) : 1;
  const double S = largest(a.h0) + activated_beta(a.in.beta_form, largest(a.in.beta)) * k * largest(a.in.v);
  const double dS = largest(a.dhT) + scale * q * largest(a.d_o);
  return S * dS;
}

// The noise of dg before the gate, and what becomes of it behind the gate.
inline Noise cancelled(const kda_backward_args& a, const std::vector<Field>&, const std::vector<kda_tensor>&,
                       Arena& room) {
  const double least = kCancelled * largest_product(a);
  const int64_t size = tensor_size(a.in.g), HV = a.in.g.shape[2], K = a.in.g.shape[3];
  Noise noise;
  noise["dg"].assign(size, least), noise["dA_log"].assign(HV, 0), noise["d_dt_bias"].assign(HV * K, 0);
  if (a.in.gate_form == KDA_GATE_LOG || size == 0) return noise;
  room.clear();
  Random dense(0);
  const int64_t rows = size / (HV * K);
  kda_gate_backward_args gate = KDA_GATE_BACKWARD_ARGS_INIT;
  gate.exec.impl = "reference";
  gate.x = room.take(KDA_F64, {rows, HV, K}, dense), gate.dg = room.take(KDA_F64, {rows, HV, K}, dense);
  gate.dx = room.take(KDA_F64, {rows, HV, K}, dense);
  gate.A_log = a.in.A_log, gate.dt_bias = a.in.dt_bias;
  gate.gate_form = a.in.gate_form, gate.lower_bound = a.in.lower_bound;
  for (int64_t i = 0; i < size; ++i) set(gate.x, i, get(a.in.g, i)), set(gate.dg, i, least);
  if (call(gate) != KDA_OK) fail(str("the oracle refuses a gate: ", kda_last_error()));
  for (int64_t i = 0; i < size; ++i) {
    const double dx = std::abs(get(gate.dx, i)), bias = a.in.dt_bias.ndim ? get(a.in.dt_bias, i % (HV * K)) : 0;
    // The gate's slope by A_log is its slope by z times z, or times 1 where softplus(z) is e^z.
    const double by_A_log = dx * std::max(1.0, std::abs(get(a.in.g, i) + bias));
    noise["dg"][i] = dx;
    noise["d_dt_bias"][i % (HV * K)] += dx, noise["dA_log"][i / K % HV] += by_A_log;
  }
  return noise;
}

// The sums of a gate's gradients have rounding errors as large as their terms, and are lost if a term or the gate is
// beyond float32. A gradient that underflows is multiplied by the gate.
inline Noise cancelled(const kda_gate_backward_args& a, const std::vector<Field>&,
                       const std::vector<kda_tensor>& expected, Arena&) {
  const int64_t HV = a.x.shape[1], K = a.x.shape[2];
  const kda_tensor& dx = expected[0];
  std::vector<double> of_A_log(HV), of_bias(HV * K), gates(HV);
  for (int64_t i = 0; i < tensor_size(dx); ++i) {
    const double size = std::abs(get(dx, i)), bias = a.dt_bias.ndim ? get(a.dt_bias, i % (HV * K)) : 0;
    const double z = std::abs(get(a.x, i) + bias), rate = a.A_log.ndim ? std::exp(get(a.A_log, i / K % HV)) : 1;
    const double gate = rate == 0 || z == 0 ? 0 : rate * z;  // 0 also if the other factor is infinite
    of_bias[i % (HV * K)] += size;
    of_A_log[i / K % HV] += gate > FLT_MAX ? kInf : size == 0 ? 0 : size * std::max(1.0, z);
    gates[i / K % HV] += gate;
  }
  for (std::vector<double>* sums : {&of_A_log, &of_bias})
    for (double& x : *sums) x = x > FLT_MAX ? kInf : x * kNudge;
  for (int64_t i = 0; i < HV; ++i) of_A_log[i] += gates[i] * FLT_MIN;
  return {{"dA_log", of_A_log}, {"d_dt_bias", of_bias}};
}

// dx of a norm is what a row's gradient has that is not along the row.
inline Noise cancelled(const kda_norm_gate_backward_args& a, const std::vector<Field>&, const std::vector<kda_tensor>&,
                       Arena&) {
  const int64_t V = a.x.shape[3], size = tensor_size(a.x);
  std::vector<double> noise(size), dn(V);
  for (int64_t row = 0; row < size; row += V) {
    double squares = 0, dot = 0;
    for (int64_t i = 0; i < V; ++i) squares += get(a.x, row + i) * get(a.x, row + i);
    const double rho = 1 / std::sqrt(squares / static_cast<double>(V) + a.eps);
    for (int64_t i = 0; i < V; ++i) {
      const double z = a.gate.ndim ? get(a.gate, row + i) : 0, s = 1 / (1 + std::exp(-z));
      const double act = a.activation == KDA_NORM_NONE ? 1 : a.activation == KDA_NORM_SILU ? z * s : s;
      dn[i] = std::abs(get(a.dy, row + i) * (a.weight.ndim ? get(a.weight, i) : 1) * act);
      dot += dn[i] * rho * std::abs(get(a.x, row + i)) / static_cast<double>(V);
    }
    for (int64_t i = 0; i < V; ++i) {
      const double of_element = kNudge * rho * (dn[i] + rho * std::abs(get(a.x, row + i)) * dot);
      noise[row + i] = std::isnan(of_element) ? 0 : of_element;
    }
  }
  return {{"dx", noise}};
}

// dG of stages, from its own terms.
template <class Args>
Noise cancelled(const Args& a, const std::vector<Field>& outputs, const std::vector<kda_tensor>& expected, Arena&) {
  Noise noise;
  if constexpr (requires { a.dG, a.dq, a.dk, a.q; }) {
    double dq = 0, dk = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!std::strcmp(outputs[i].name, "dq")) dq = largest(expected[i]);
      if (!std::strcmp(outputs[i].name, "dk")) dk = largest(expected[i]);
    }
    noise["dG"].assign(tensor_size(a.dG), kCancelled * (largest(a.q) * dq + largest(a.k) * dk));
  }
  return noise;
}

}  // namespace kda::test
