// Results that are small differences of large terms, and how large the rounding errors of those are:
//   dg of a token is what remains of q dq and k dk of all tokens after it, and their errors are no smaller where the
//   decay is strong
//   dq and dk behind a norm are what their gradients have that is not along the row
//   a state is what later tokens have not erased, but all tokens of a chunk are added up at once
#pragma once
#include <map>
#include <tuple>

#include "fuzz_edges.h"

namespace kda::test {

using Noise = std::map<std::string, std::vector<double>>;  // by the name of the output, for each element
constexpr double kCancelled = 8 * kNudge;

// The rounding of a term: by float32, or by operands of tensor cores.
template <class Args>
double rounding_of_terms(const Args& a) {
  const bool in_f32 = a.exec.impl && std::strstr(a.exec.impl, "recurrent");
  return a.exec.device == KDA_CUDA && !in_f32 ? 0x1p-9 : kCancelled;
}

inline double activated_beta(int32_t form, double b) {
  return form == KDA_BETA_ACTIVATED ? std::abs(b) : form == KDA_BETA_2SIGMOID ? 2 : 1;
}

// The same inputs with rows of q and k that are normalised already, in float64.
inline kda_inputs with_unit_rows(kda_inputs in, Arena& room) {
  Random dense(0);
  for (kda_tensor* t : {&in.q, &in.k, &in.v}) {
    const kda_tensor given = *t;
    *t = room.take(KDA_F64, {given.shape, given.shape + 4}, dense);
    const int64_t K = given.shape[3], size = tensor_size(given);
    for (int64_t row = 0; row < size; row += K) {
      double squares = 1e-6;
      for (int64_t i = row; i < row + K; ++i) squares += get(given, i) * get(given, i);
      const double r = in.qk_l2norm && t != &in.v ? 1 / std::sqrt(squares) : 1;
      for (int64_t i = row; i < row + K; ++i) set(*t, i, r * get(given, i));
    }
  }
  in.qk_l2norm = 0;
  return in;
}

// log alpha of every token, in float64.
inline kda_tensor log_decays(const kda_inputs& in, Arena& room) {
  Random dense(0);
  const int64_t rows = in.g.shape[0] * in.g.shape[1];
  kda_gate_args gate = KDA_GATE_ARGS_INIT;
  for (kda_tensor* t : {&gate.x, &gate.g}) *t = room.take(KDA_F64, {rows, in.g.shape[2], in.g.shape[3]}, dense);
  for (int64_t i = 0; i < tensor_size(gate.x); ++i) set(gate.x, i, get(in.g, i));
  gate.exec.impl = "reference", gate.A_log = in.A_log, gate.dt_bias = in.dt_bias;
  gate.gate_form = in.gate_form, gate.lower_bound = in.lower_bound;
  if (in.gate_form == KDA_GATE_LOG) return gate.x;
  if (call(gate) != KDA_OK) fail(str("the oracle refuses a gate: ", kda_last_error()));
  return gate.g;
}

// The noise of a state and of what is read of it: that of all terms k u, as if none of them erased another one, and
// with the largest finite u of a token for all columns.
inline Noise cancelled(const kda_forward_args& a, const std::vector<Field>&, const std::vector<kda_tensor>&,
                       Arena& room) {
  if (tensor_size(a.in.v) == 0 || (a.exec.impl && std::strstr(a.exec.impl, "recurrent"))) return {};
  room.clear();
  Random dense(0);
  const std::vector<int64_t> shape{a.in.v.shape, a.in.v.shape + 4};
  const int64_t T = shape[1], HV = shape[2], V = shape[3], K = a.in.g.shape[3], group = HV / a.in.q.shape[2];
  kda_forward_args b = KDA_FORWARD_ARGS_INIT;
  b.exec.impl = "reference", b.in = with_unit_rows(a.in, room), b.states = a.states;
  b.out_state_indices = a.out_state_indices;
  if (const kda_tensor& hT = a.states.hT; hT.ndim) b.states.hT = room.take(KDA_F64, {hT.shape, hT.shape + 4}, dense);
  b.o = room.take(KDA_F64, shape, dense), b.v_new = room.take(KDA_F64, shape, dense);
  const kda_tensor log_decay = log_decays(a.in, room);
  if (call(b) != KDA_OK) fail(str("the oracle refuses a call in float64: ", kda_last_error()));

  const bool packed = a.in.cu_seqlens.ndim != 0;
  const double scale = a.in.scale != 0 ? std::abs(a.in.scale) : 1, h0 = largest(a.states.h0);
  std::vector<double> of_o(tensor_size(a.o)), of_head(HV);
  const auto finite = [](double x) { return std::isfinite(x) ? x : 0; };
  for (int64_t n = 0; n < (packed ? a.in.cu_seqlens.shape[0] - 1 : shape[0]); ++n)
    for (int64_t hv = 0; hv < HV; ++hv) {
      std::vector<double> S(K, h0);
      const auto first = packed ? static_cast<int64_t>(get_integer(a.in.cu_seqlens, n)) : n * T;
      const auto end = packed ? static_cast<int64_t>(get_integer(a.in.cu_seqlens, n + 1)) : first + T;
      for (int64_t t = first; t < end; ++t) {
        const int64_t at = t * HV + hv, key = (t * (HV / group) + hv / group) * K;
        double u = 0, read = 0;
        for (int64_t v = 0; v < V; ++v) u = std::max(u, finite(std::abs(get(b.v_new, at * V + v))));
        for (int64_t k = 0; k < K; ++k) {
          S[k] = finite(std::exp(get(log_decay, at * K + k)) * S[k] + std::abs(get(b.in.k, key + k)) * u);
          read += finite(S[k] * std::abs(get(b.in.q, key + k)) * scale);
        }
        for (int64_t v = 0; v < V; ++v) of_o[at * V + v] = kNudge * read;
      }
      for (const double x : S) of_head[hv] = std::max(of_head[hv], kNudge * x);
    }
  Noise noise{{"o", of_o}};
  if (a.states.hT.ndim) noise["hT"].resize(tensor_size(a.states.hT));
  for (size_t i = 0; i < noise["hT"].size(); ++i) noise["hT"][i] = of_head[i / (K * V) % HV];
  return noise;
}

// The largest product of a state and a state's gradient.
inline double largest_product(const kda_backward_args& a) {
  const double q = a.in.qk_l2norm ? 1 : largest(a.in.q), k = a.in.qk_l2norm ? 1 : largest(a.in.k);
  const double scale = a.in.scale != 0 ? std::abs(a.in.scale) : 1;
  const double S = largest(a.h0) + activated_beta(a.in.beta_form, largest(a.in.beta)) * k * largest(a.in.v);
  const double dS = largest(a.dhT) + scale * q * largest(a.d_o);
  return S * dS;
}

// The noise of dq and dk: with y = r x, dx = r (dy - y (y . dy)).
inline void add_noise_of_norms(const kda_backward_args& a, Arena& room, Noise& noise) {
  room.clear();
  Random dense(0);
  kda_backward_args b = a;
  const double part = rounding_of_terms(a);
  b.exec = {}, b.exec.impl = "reference", b.in = with_unit_rows(a.in, room);
  for (const Field& f : fields(b))
    if (f.output) *f.t = {};
  for (const auto& [name, x, y, dy] : {std::tuple{"dq", &a.in.q, &b.in.q, &b.dq}, {"dk", &a.in.k, &b.in.k, &b.dk}}) {
    *dy = room.take(KDA_F64, {x->shape, x->shape + 4}, dense);
    if (call(b) != KDA_OK) fail(str("the oracle refuses a call in float64: ", kda_last_error()));
    const int64_t K = x->shape[3], size = tensor_size(*x);
    std::vector<double>& of_rows = noise[name];
    of_rows.assign(size, 0);
    for (int64_t row = 0; row < size; row += K) {
      double squares = 1e-6, dot = 0;
      for (int64_t i = row; i < row + K; ++i)
        squares += get(*x, i) * get(*x, i), dot += std::abs(get(*y, i) * get(*dy, i));
      for (int64_t i = row; i < row + K; ++i) {
        const double noise_of = part / std::sqrt(squares) * (std::abs(get(*dy, i)) + std::abs(get(*y, i)) * dot);
        of_rows[i] = std::isfinite(noise_of) ? noise_of : 0;
      }
    }
    *dy = {};
  }
}

// The noise of dg before the gate, and what becomes of it behind the gate.
inline Noise cancelled(const kda_backward_args& a, const std::vector<Field>&, const std::vector<kda_tensor>&,
                       Arena& room) {
  const double least = rounding_of_terms(a) * largest_product(a);
  const int64_t size = tensor_size(a.in.g), HV = a.in.g.shape[2], K = a.in.g.shape[3];
  Noise noise;
  if (a.in.qk_l2norm && size > 0) add_noise_of_norms(a, room, noise);
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

// u of a chunk is T beta v: an element of T, the inverse of a triangle with a diagonal of 1, is rounded as 1 is.
inline Noise cancelled(const kda_stage_chunk_intra_args& a, const std::vector<Field>&, const std::vector<kda_tensor>&,
                       Arena&) {
  if (!a.u.ndim) return {};
  return {{"u", std::vector<double>(tensor_size(a.u), rounding_of_terms(a) * largest(a.beta) * largest(a.v))}};
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
