// The output's norm and gate, and its gradients (math.md 2.4): with n = x rho, rho = (mean of x^2 + eps)^(-1/2),
//   y = n w act(z)
//   dn = dy w act(z),  dx = rho (dn - n mean(dn n)),  dz = dy n w act'(z),  dw = sum over rows of dy n act(z)
//
// A row is cut into pieces of kPiece numbers. A row of one piece, as heads are, is read once; longer rows are read once
// for the mean and once for the result. So y may take the place of x or of the gate.
//
// dw has two levels as in gate.cc: blocks of rows depend on shapes only, and are added in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/norm_gate.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/simd-inl.h"
// clang-format on

#ifndef KDA_CPU_NORM_BLOCK
#define KDA_CPU_NORM_BLOCK
namespace kda::cpu {
constexpr int64_t kPiece = kMaxSize;
constexpr int64_t kNormRows = 64;      // rows of a block, at least
constexpr int64_t kNormBlocks = 1024;  // blocks, at most, that dw adds one after the other
constexpr int64_t rows_of_block(int64_t rows) { return std::max(kNormRows, divide_up(rows, kNormBlocks)); }
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Calls f(b, t, hv) for the rows of a block.
template <class F>
HWY_INLINE void for_rows(const kda_tensor& x, int64_t rows, int64_t block, const F& f) {
  const int64_t T = x.shape[1], HV = x.shape[2], first = block * rows_of_block(rows);
  int64_t b = first / HV / T, t = first / HV % T, hv = first % HV;
  for (int64_t left = std::min(rows - first, rows_of_block(rows)); left > 0; --left) {
    f(b, t, hv);
    if (++hv == HV) hv = 0, ++t;
    if (t == T) t = 0, ++b;
  }
}

// Calls f(first, numbers) for the pieces of a row.
template <class F>
HWY_INLINE void for_pieces(int64_t V, const F& f) {
  for (int64_t i = 0; i < V; i += kPiece) f(i, std::min(kPiece, V - i));
}
HWY_INLINE void load_piece(const kda_tensor& t, const char* row, int64_t first, int64_t n, float* piece) {
  load_row(t.dtype, row + first * dtype_size(t.dtype), n, piece);
}
// A row that a call may do without.
inline const char* row_of(const kda_tensor& t, int64_t b, int64_t i, int64_t hv) {
  return present(t) ? at(t, b, i, hv) : nullptr;
}

// ---- the norm ----

// n = (x scale) factor. Rows whose mean is beyond f32, or so small that squares were lost, are multiplied by a power of
// two before they are squared. Of all others the scale is 1, so they keep their bits. NaN stays NaN. What makes a large
// row smaller is divided among scale and factor, so that small numbers beside large ones are not lost.
struct RowNorm {
  float scale, factor;
  bool zeros = false;  // the row has no other numbers, but for such whose squares are 0, too
};
constexpr float kLeastMean = 0x1p-90f, kGrow = 0x1p80f, kHalfShrink = 0x1p-40f;

// Sums (scale x)^2 over a row. A row of one piece is then in `x`.
inline float squares(const kda_tensor& t, const char* row, int64_t V, float scale, float* x) {
  Vec sum = hn::Zero(kF32);
  for_pieces(V, [&](int64_t first, int64_t n) {
    load_piece(t, row, first, n, x);
    for (int64_t i = 0; i < n; i += lanes()) {
      const Vec scaled = hn::Mul(load(x + i), splat(scale));
      sum = hn::MulAdd(scaled, scaled, sum);
    }
  });
  return sum_lanes(sum);
}

inline RowNorm norm_of(const kda_tensor& t, const char* row, int64_t V, float eps, float* x) {
  const float size = static_cast<float>(V), sum = squares(t, row, V, 1, x), mean = sum / size + eps;
  const bool zeros = sum == 0;
  if (mean >= kLeastMean && mean < std::numeric_limits<float>::infinity()) return {1, 1 / std::sqrt(mean), zeros};
  const bool grows = mean < kLeastMean;
  const float scale = grows ? kGrow : kHalfShrink * kHalfShrink;
  const float factor = 1 / std::sqrt(squares(t, row, V, scale, x) / size + eps * scale * scale);
  return {grows ? scale : kHalfShrink, grows ? factor : factor * kHalfShrink, zeros};
}
HWY_INLINE Vec normalised(const RowNorm& norm, const float* x) {
  return hn::Mul(hn::Mul(load(x), splat(norm.scale)), splat(norm.factor));
}

// ---- the gate ----

template <int kActivation>
HWY_INLINE Vec activated(const float* z) {
  if constexpr (kActivation == KDA_NORM_NONE) return splat(1);
  if constexpr (kActivation == KDA_NORM_SIGMOID) return sigmoid(load(z));
  if constexpr (kActivation == KDA_NORM_SILU) return silu(load(z));
}
template <int kActivation>
HWY_INLINE Vec slope(const float* z) {
  if constexpr (kActivation == KDA_NORM_NONE) return splat(0);
  if constexpr (kActivation == KDA_NORM_SIGMOID) return sigmoid_slope(load(z));
  if constexpr (kActivation == KDA_NORM_SILU) return silu_slope(load(z));
}

// Calls f(activation), as a type.
template <class F>
HWY_INLINE void with_activation(int32_t activation, const F& f) {
  switch (activation) {
    case KDA_NORM_NONE: return f(std::integral_constant<int, KDA_NORM_NONE>());
    case KDA_NORM_SIGMOID: return f(std::integral_constant<int, KDA_NORM_SIGMOID>());
    default: return f(std::integral_constant<int, KDA_NORM_SILU>());
  }
}

// The weight in pieces; ones, if there is none. A weight of one piece is loaded once for all rows.
class Weight {
 public:
  Weight(const kda_tensor& weight, int64_t V) : weight_(weight), once_(V <= kPiece || !present(weight)) {
    if (!present(weight))
      for (float& w : piece_) w = 1;
    else if (once_) load_piece(weight_, at(weight_, 0), 0, V, piece_);
  }
  const float* piece(int64_t first, int64_t n) {
    if (!once_) load_piece(weight_, at(weight_, 0), first, n, piece_);
    return piece_;
  }

 private:
  const kda_tensor& weight_;
  const bool once_;
  alignas(64) float piece_[kPiece];
};

// ---- forward ----

// Where rows of zeros stay zeros: NaN of the gate, or of eps = 0, becomes 0. z is for the row's numbers.
inline void keep_zeros(const kda_tensor& t, const char* row, int64_t first, int64_t n, float* z, float* y) {
  load_piece(t, row, first, n, z);
  for (int64_t i = 0; i < n; ++i)
    if (z[i] == 0 && std::isnan(y[i])) y[i] = 0;
}

template <int kActivation>
void norm_rows(const NormGateProblem& p, int64_t block) {
  const kda_norm_gate_args& a = p.args;
  Weight weight(a.weight, p.V);
  alignas(64) float x[kPiece], z[kPiece];
  for_rows(a.x, p.rows, block, [&](int64_t b, int64_t t, int64_t hv) {
    const char *row = at(a.x, b, t, hv), *gate = row_of(a.gate, b, t, hv);
    char* y = at(a.y, b, t, hv);
    const RowNorm norm = norm_of(a.x, row, p.V, static_cast<float>(a.eps), x);
    for_pieces(p.V, [&](int64_t first, int64_t n) {
      const float* w = weight.piece(first, n);
      if (p.V > kPiece) load_piece(a.x, row, first, n, x);
      if (gate) load_piece(a.gate, gate, first, n, z);
      for (int64_t i = 0; i < n; i += lanes()) {
        const Vec weighted = hn::Mul(normalised(norm, x + i), load(w + i));
        store(hn::Mul(weighted, activated<kActivation>(z + i)), x + i);
      }
      if (p.keep_zeros && norm.zeros) keep_zeros(a.x, row, first, n, z, x);
      store_row(a.y.dtype, x, n, y + first * dtype_size(a.y.dtype));
    });
  });
}
void norm_gate_rows(const NormGateProblem& p, int64_t block) {
  with_activation(p.args.activation, [&](auto activation) { norm_rows<activation>(p, block); });
}

// ---- backward ----

// One piece of a row: n, dn, and what else dn needs.
struct Gradients {
  alignas(64) float n[kPiece], dn[kPiece], z[kPiece], dy[kPiece];
};
struct BackwardRow {
  const char *x, *gate, *dy;
  RowNorm norm;
};

// Makes n (from x in its place) and dn. Returns their product, summed.
template <int kActivation>
HWY_INLINE Vec dn_of_piece(const kda_norm_gate_backward_args& a, const BackwardRow& row, int64_t first, int64_t count,
                           const float* w, Gradients& g, Vec sum) {
  if (row.gate) load_piece(a.gate, row.gate, first, count, g.z);
  load_piece(a.dy, row.dy, first, count, g.dy);
  for (int64_t i = 0; i < count; i += lanes()) {
    const Vec n = normalised(row.norm, g.n + i);
    const Vec dn = hn::Mul(load(g.dy + i), hn::Mul(load(w + i), activated<kActivation>(g.z + i)));
    store(n, g.n + i), store(dn, g.dn + i);
    sum = hn::MulAdd(dn, n, sum);
  }
  return sum;
}

// Writes dz (in place of dn's gate) and adds to the sums of dw, if these are wanted.
template <int kActivation>
HWY_INLINE void gate_and_weight(const kda_norm_gate_backward_args& a, char* dgate, int64_t first, int64_t count,
                                const float* w, Gradients& g, float* sums) {
  if (sums)
    for (int64_t i = 0; i < count; i += lanes()) {
      const Vec dw = hn::Mul(hn::Mul(load(g.dy + i), load(g.n + i)), activated<kActivation>(g.z + i));
      store(hn::Add(load(sums + first + i), dw), sums + first + i);
    }
  if (!dgate) return;
  for (int64_t i = 0; i < count; i += lanes()) {
    const Vec weighted = hn::Mul(load(g.n + i), load(w + i));
    store(hn::Mul(hn::Mul(load(g.dy + i), weighted), slope<kActivation>(g.z + i)), g.z + i);
  }
  store_row(a.dgate.dtype, g.z, count, dgate + first * dtype_size(a.dgate.dtype));
}

template <int kActivation>
void backward_rows(const NormGateBackwardProblem& p, int64_t block, float* sums) {
  const kda_norm_gate_backward_args& a = p.args;
  Weight weight(a.weight, p.V);
  Gradients g;
  if (sums) zero(sums, padded(p.V));
  for_rows(a.x, p.rows, block, [&](int64_t b, int64_t t, int64_t hv) {
    BackwardRow row{at(a.x, b, t, hv), row_of(a.gate, b, t, hv), at(a.dy, b, t, hv), {}};
    char *dx = present(a.dx) ? at(a.dx, b, t, hv) : nullptr,
         *dgate = present(a.dgate) ? at(a.dgate, b, t, hv) : nullptr;
    row.norm = norm_of(a.x, row.x, p.V, static_cast<float>(a.eps), g.n);
    Vec sum = hn::Zero(kF32);
    for_pieces(p.V, [&](int64_t first, int64_t count) {
      const float* w = weight.piece(first, count);
      if (p.V > kPiece) load_piece(a.x, row.x, first, count, g.n);
      sum = dn_of_piece<kActivation>(a, row, first, count, w, g, sum);
      gate_and_weight<kActivation>(a, dgate, first, count, w, g, sums);
    });
    if (!dx) return;
    const Vec mean = splat(sum_lanes(sum) / static_cast<float>(p.V));
    for_pieces(p.V, [&](int64_t first, int64_t count) {
      if (p.V > kPiece) {
        load_piece(a.x, row.x, first, count, g.n);
        dn_of_piece<kActivation>(a, row, first, count, weight.piece(first, count), g, sum);
      }
      for (int64_t i = 0; i < count; i += lanes()) {
        const Vec d = hn::NegMulAdd(load(g.n + i), mean, load(g.dn + i));
        store(hn::Mul(hn::Mul(d, splat(row.norm.factor)), splat(row.norm.scale)), g.dn + i);
      }
      store_row(a.dx.dtype, g.dn, count, dx + first * dtype_size(a.dx.dtype));
    });
  });
}
void norm_gate_backward_rows(const NormGateBackwardProblem& p, int64_t block, float* sums) {
  with_activation(p.args.activation, [&](auto activation) { backward_rows<activation>(p, block, sums); });
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

int64_t blocks_of(const NormDims& d) { return divide_up(d.rows, rows_of_block(d.rows)); }
int64_t padded_size(int64_t V) { return divide_up(V, 16) * 16; }  // as padded(), which each instruction set has

Workspace plan(const NormGateBackwardProblem& p) {
  const bool sums = present(p.args.dweight);
  return {sums ? static_cast<uint64_t>(blocks_of(p) * padded_size(p.V)) * sizeof(float) : 0, 0};
}

// Small inputs stay on one thread, as in gate.cc.
int64_t worthwhile(const NormDims& d) { return d.rows * d.V / 4096 + 1; }

}  // namespace

void norm_gate(const NormGateProblem& p) {
  const auto rows = KDA_ISA_CALL(norm_gate_rows);
  parallel_for(blocks_of(p), wanted_threads(p.args.exec, std::min(blocks_of(p), worthwhile(p))),
               [&](int64_t block, int) { rows(p, block); });
}

uint64_t norm_gate_backward_workspace(const NormGateBackwardProblem& p) { return plan(p).bytes(1); }

void norm_gate_backward(const NormGateBackwardProblem& p) {
  const kda_norm_gate_backward_args& a = p.args;
  const int64_t blocks = blocks_of(p), pitch = padded_size(p.V);
  const int threads = plan(p).threads(a.exec, std::min(blocks, worthwhile(p)));
  float* sums = present(a.dweight) ? static_cast<float*>(a.exec.workspace) : nullptr;
  const auto rows = KDA_ISA_CALL(norm_gate_backward_rows);
  parallel_for(blocks, threads, [&](int64_t block, int) { rows(p, block, sums ? sums + block * pitch : nullptr); });
  if (!present(a.dweight)) return;
  auto* dweight = static_cast<float*>(a.dweight.data);
  for (int64_t i = 0; i < p.V; ++i) dweight[i] = 0;
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t i = 0; i < p.V; ++i) dweight[i] += sums[block * pitch + i];
}

}  // namespace kda::cpu
#endif
