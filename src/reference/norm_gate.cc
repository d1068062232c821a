// The output's norm and gate (math.md 2.4). With z = gate and n = x rho:
//   rho = (mean of x^2 + eps)^(-1/2),  y = n w act(z)
//   dn = dy w act(z),  dx = rho (dn - n mean(dn n)),  dz = dy n w act'(z),  dw = sum over rows of dy n act(z)
#include <algorithm>
#include <cmath>

#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

double activated(int32_t activation, double z) {
  if (activation == KDA_NORM_NONE) return 1;
  return activation == KDA_NORM_SIGMOID ? sigmoid(z) : z * sigmoid(z);
}
double slope(int32_t activation, double z) {
  if (activation == KDA_NORM_NONE) return 0;
  return activation == KDA_NORM_SIGMOID ? sigmoid_slope(z) : sigmoid(z) + z * sigmoid_slope(z);
}

// Row (b, t, h) of x, normalised.
struct Row {
  Vector n;
  double rho;
  bool zeros;  // there are no other numbers

  // Squares of numbers far from 1 would be beyond float64, so the row is then divided by a power of two near the
  // largest of them and the root of eps.
  Row(const kda_tensor& x, int64_t b, int64_t t, int64_t h, double eps) : n(x.shape[3]) {
    double largest = 0, squares = 0;
    for (int64_t i = 0; i < std::ssize(n); ++i) n[i] = get(x, b, t, h, i), largest = std::max(largest, std::abs(n[i]));
    zeros = largest == 0 && std::none_of(n.begin(), n.end(), [](double value) { return std::isnan(value); });
    const double size = std::max(largest, std::sqrt(eps));
    const bool ordinary = size == 0 || std::isinf(size) || std::abs(std::ilogb(size)) < 400;
    const double unit = ordinary ? 1 : std::ldexp(1.0, std::ilogb(size));
    for (double& value : n) value /= unit, squares += value * value;
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n.size()) + eps / unit / unit);
    for (double& value : n) value *= factor;
    rho = factor / unit;
  }
};

template <class F>
void for_rows(const kda_tensor& x, const F& f) {
  for (int64_t b = 0; b < x.shape[0]; ++b)
    for (int64_t t = 0; t < x.shape[1]; ++t)
      for (int64_t h = 0; h < x.shape[2]; ++h) f(b, t, h);
}

double get_or(const kda_tensor& t, double other, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return present(t) ? get(t, i, j, k, l) : other;
}

}  // namespace

void norm_gate(const NormGateProblem& p) {
  const kda_norm_gate_args& a = p.args;
  for_rows(a.x, [&](int64_t b, int64_t t, int64_t h) {
    const Row row(a.x, b, t, h, a.eps);
    for (int64_t i = 0; i < p.V; ++i) {
      const double y = row.n[i] * get_or(a.weight, 1, i) * activated(a.activation, get_or(a.gate, 0, b, t, h, i));
      set(a.y, p.keep_zeros && row.zeros && std::isnan(y) ? 0 : y, b, t, h, i);
    }
  });
}

void norm_gate_backward(const NormGateBackwardProblem& p) {
  const kda_norm_gate_backward_args& a = p.args;
  Vector dw(p.V);
  for_rows(a.x, [&](int64_t b, int64_t t, int64_t h) {
    const Row row(a.x, b, t, h, a.eps);
    Vector dn(p.V);
    double mean = 0;
    for (int64_t i = 0; i < p.V; ++i) {
      const double z = get_or(a.gate, 0, b, t, h, i), dy = get(a.dy, b, t, h, i), w = get_or(a.weight, 1, i);
      const double act = activated(a.activation, z);
      dn[i] = dy * w * act;
      mean += dn[i] * row.n[i] / static_cast<double>(p.V);
      dw[i] += dy * row.n[i] * act;
      if (present(a.dgate)) set(a.dgate, dy * row.n[i] * w * slope(a.activation, z), b, t, h, i);
    }
    for (int64_t i = 0; present(a.dx) && i < p.V; ++i) set(a.dx, row.rho * (dn[i] - row.n[i] * mean), b, t, h, i);
  });
  for (int64_t i = 0; present(a.dweight) && i < p.V; ++i) set(a.dweight, dw[i], i);
}

}  // namespace kda::reference
