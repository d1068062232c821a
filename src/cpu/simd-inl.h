// Vector helpers compiled for every instruction set: rows in any dtype to and from f32, activations, transposition.
// Scratch rows are f32, padded to a multiple of kPad floats; what lies beyond the row's size is zero.
#if defined(KDA_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_INL_H_
#undef KDA_CPU_SIMD_INL_H_
#else
#define KDA_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "contract/dtype.h"
#include "contract/gate_form.h"
#include "contract/problem.h"
#include "cpu/subnormals.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using Vec = hn::Vec<F32>;
constexpr F32 kF32;
constexpr int64_t kPad = 16;  // floats; the widest vector
HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(kF32)); }
HWY_INLINE Vec load(const float* p) { return hn::LoadU(kF32, p); }
HWY_INLINE void store(Vec v, float* p) { hn::StoreU(v, kF32, p); }
HWY_INLINE Vec splat(float x) { return hn::Set(kF32, x); }

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }
// Row pitch of a scratch matrix with n columns: an odd number of cache lines, so that a column of tiles does not fall
// into a few cache sets (a pitch of 512 bytes would use 16 lines of a 32 KiB L1).
constexpr int64_t pitch(int64_t n) { return (padded(n) / kPad | 1) * kPad; }

// A matrix in scratch, and its elements as scalars to broadcast: A(m, k) = a[m * row + k * col].
struct Scalars {
  const float* a;
  int64_t row, col;
  HWY_INLINE const float* operator()(int64_t m, int64_t k) const { return a + m * row + k * col; }
  HWY_INLINE Scalars from(int64_t m, int64_t k) const { return {(*this)(m, k), row, col}; }
};
struct Matrix {
  float* data;
  int64_t pitch;
  HWY_INLINE float* row(int64_t i) const { return data + i * pitch; }
  HWY_INLINE Matrix from(int64_t i, int64_t j) const { return {data + i * pitch + j, pitch}; }
  HWY_INLINE Scalars rows() const { return {data, pitch, 1}; }     // A(m, k) = data[m][k]
  HWY_INLINE Scalars columns() const { return {data, 1, pitch}; }  // its transpose
};

// ---- rows ----

// Whether the hardware converts f16. Where it does not, Highway's own conversions lose infinities and NaN, and
// truncate.
constexpr bool kHasF16 = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;

template <int kDtype>
HWY_INLINE Vec load_as(const void* p) {
  if constexpr (kDtype == KDA_F32) return load(static_cast<const float*>(p));
  if constexpr (kDtype == KDA_BF16) {
    const hn::Rebind<uint16_t, F32> d16;
    const hn::RebindToUnsigned<F32> d32;
    return hn::BitCast(kF32, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, static_cast<const uint16_t*>(p)))));
  }
  if constexpr (kDtype == KDA_F16) {
    if constexpr (kHasF16) {
      const hn::Rebind<hwy::float16_t, F32> d16;
      return hn::PromoteTo(kF32, hn::LoadU(d16, static_cast<const hwy::float16_t*>(p)));
    }
    float values[kPad];
    for (int64_t i = 0; i < lanes(); ++i) values[i] = f16_to_float(static_cast<const uint16_t*>(p)[i]);
    return load(values);
  }
}

template <int kDtype>
HWY_INLINE void store_as(Vec v, void* p) {
  if constexpr (kDtype == KDA_F32) store(v, static_cast<float*>(p));
  if constexpr (kDtype == KDA_BF16) {  // round to nearest even; Highway's own demotion truncates
    const hn::Rebind<uint16_t, F32> d16;
    const hn::RebindToUnsigned<F32> du;
    const hn::RebindToSigned<F32> di;
    const auto bits = hn::BitCast(du, v);
    const auto even = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(even, hn::Set(du, 0x7fff))));
    const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::IfThenElse(is_nan, nan, rounded))), d16,
               static_cast<uint16_t*>(p));
  }
  if constexpr (kDtype == KDA_F16) {
    if constexpr (kHasF16) {
      const hn::Rebind<hwy::float16_t, F32> d16;
      hn::StoreU(hn::DemoteTo(d16, v), d16, static_cast<hwy::float16_t*>(p));
    } else {
      float values[kPad];
      store(v, values);
      for (int64_t i = 0; i < lanes(); ++i) static_cast<uint16_t*>(p)[i] = float_to_f16(values[i]);
    }
  }
}

template <int kDtype>
HWY_INLINE void load_row_as(const void* src, int64_t n, float* dst) {
  const auto* bytes = static_cast<const char*>(src);
  constexpr int64_t kSize = dtype_size(kDtype);
  const int64_t N = lanes(), body = n / N * N;
  for (int64_t i = 0; i < body; i += N) store(load_as<kDtype>(bytes + i * kSize), dst + i);
  if (body == n) return;
  alignas(64) char tail[64] = {};  // zero bytes are 0.0 in every dtype; reading past the row could fault
  std::memcpy(tail, bytes + body * kSize, (n - body) * kSize);
  store(load_as<kDtype>(tail), dst + body);
}

template <int kDtype>
HWY_INLINE void store_row_as(const float* src, int64_t n, void* dst) {
  auto* bytes = static_cast<char*>(dst);
  constexpr int64_t kSize = dtype_size(kDtype);
  const int64_t N = lanes(), body = n / N * N;
  for (int64_t i = 0; i < body; i += N) store_as<kDtype>(load(src + i), bytes + i * kSize);
  if (body == n) return;
  alignas(64) char tail[64];
  store_as<kDtype>(load(src + body), tail);
  std::memcpy(bytes + body * kSize, tail, (n - body) * kSize);
}

// Converts n elements to f32; dst is written up to padded(n), with zeros beyond n.
inline void load_row(int32_t dtype, const void* src, int64_t n, float* dst) {
  for (int64_t i = n; i < padded(n); ++i) dst[i] = 0;
  switch (dtype) {
    case KDA_F32: return load_row_as<KDA_F32>(src, n, dst);
    case KDA_BF16: return load_row_as<KDA_BF16>(src, n, dst);
    default: return load_row_as<KDA_F16>(src, n, dst);
  }
}

// Converts n elements from f32; src is readable up to padded(n).
inline void store_row(int32_t dtype, const float* src, int64_t n, void* dst) {
  switch (dtype) {
    case KDA_F32: return store_row_as<KDA_F32>(src, n, dst);
    case KDA_BF16: return store_row_as<KDA_BF16>(src, n, dst);
    default: return store_row_as<KDA_F16>(src, n, dst);
  }
}

// Address of element [i, j, k] (the row, if the tensor has a fourth dimension).
inline char* at(const kda_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  int64_t offset = i * t.stride[0];
  if (t.ndim > 1) offset += j * t.stride[1];
  if (t.ndim > 2) offset += k * t.stride[2];
  return static_cast<char*>(t.data) + offset * dtype_size(t.dtype);
}

inline float load_scalar(int32_t dtype, const void* p) {
  switch (dtype) {
    case KDA_F32: return *static_cast<const float*>(p);
    case KDA_BF16: return bf16_to_float(*static_cast<const uint16_t*>(p));
    default: return f16_to_float(*static_cast<const uint16_t*>(p));
  }
}
inline void store_scalar(int32_t dtype, float x, void* p) {
  switch (dtype) {
    case KDA_F32: *static_cast<float*>(p) = x; break;
    case KDA_BF16: *static_cast<uint16_t*>(p) = float_to_bf16(x); break;
    default: *static_cast<uint16_t*>(p) = float_to_f16(x); break;
  }
}

// y <- f x, over a padded row.
HWY_INLINE void scale_row(const float* x, float f, int64_t n, float* y) {
  for (int64_t i = 0; i < padded(n); i += lanes()) store(hn::Mul(load(x + i), splat(f)), y + i);
}

inline void zero(float* p, int64_t n) { std::memset(p, 0, n * sizeof(float)); }

// ---- sums and activations ----

HWY_INLINE float sum_lanes(Vec v) { return hn::GetLane(hn::SumOfLanes(kF32, v)); }

// out[i] = the sum of the lanes of x[i], for as many vectors as a vector has lanes: a tree, each level of which
// halves the number of vectors.
HWY_INLINE void sum_lanes_of_all(Vec* x, float* out) {
#if HWY_TARGET != HWY_SCALAR
  const hn::RepartitionToWide<F32> pairs;
  for (int64_t i = 0; i < lanes() / 2; ++i) {
    const Vec a = x[2 * i], b = x[2 * i + 1];
    x[i] = hn::Add(hn::InterleaveLower(kF32, a, b), hn::InterleaveUpper(kF32, a, b));
  }
  for (int64_t i = 0; i < lanes() / 4; ++i) {
    const auto a = hn::BitCast(pairs, x[2 * i]), b = hn::BitCast(pairs, x[2 * i + 1]);
    x[i] = hn::Add(hn::BitCast(kF32, hn::InterleaveLower(pairs, a, b)),
                   hn::BitCast(kF32, hn::InterleaveUpper(pairs, a, b)));
  }
#if HWY_TARGET == HWY_AVX3
  for (int64_t i = 0; i < 2; ++i) {
    const Vec a = x[2 * i], b = x[2 * i + 1];
    x[i] = hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a), hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a)));
  }
#endif
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  x[0] = hn::Add(hn::ConcatLowerLower(kF32, x[1], x[0]), hn::ConcatUpperUpper(kF32, x[1], x[0]));
#endif
#endif
  store(x[0], out);
}

// sum_i x_i y_i over padded rows.
inline float dot(const float* x, const float* y, int64_t n) {
  Vec sum = hn::Zero(kF32);
  for (int64_t i = 0; i < n; i += lanes()) sum = hn::MulAdd(load(x + i), load(y + i), sum);
  return sum_lanes(sum);
}

// e^x for -inf <= x <= 88, at most 1 ulp off: 2^n times a Taylor polynomial on [-ln 2 / 2, ln 2 / 2]. Results below
// 2^-126 are 0. NaN gives 0: callers that can meet one put it back.
HWY_INLINE Vec exp_number(Vec x) {
  const hn::RebindToSigned<F32> di;
  const Vec n = hn::Round(hn::Mul(x, splat(1.44269504f)));
  Vec r = hn::NegMulAdd(n, splat(0.693359375f), x);  // ln 2 in two parts; the first product is exact
  r = hn::NegMulAdd(n, splat(-2.12194440e-4f), r);
  Vec p = splat(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f})
    p = hn::MulAdd(p, r, splat(c));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenElseZero(hn::Ge(x, splat(-87.3365f)), hn::Mul(p, hn::BitCast(kF32, exponent)));
}

// e^x for any x: inf above 88, NaN stays NaN.
HWY_INLINE Vec exp(Vec x) {
  const Vec y = hn::IfThenElse(hn::Gt(x, splat(88)), splat(std::numeric_limits<float>::infinity()), exp_number(x));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

// 1 / (1 + e^-x) with an absolute error of 1e-7, for products with x, at half the instructions of sigmoid(). Adding
// 1.5 2^23 leaves n = round(-x / ln 2) in the low bits, from where a shift adds it to the exponent of the polynomial.
// Below -87.3 the result is subnormal, so 0 in kernels, and -inf times it is NaN, like -inf sigmoid(-inf). NaN gives
// a number.
HWY_INLINE Vec sigmoid_factor(Vec x) {
  const hn::RebindToSigned<F32> di;
  const Vec magic = splat(12582912.0f), y = hn::Min(hn::Max(x, splat(-88)), splat(87));
  const Vec shifted = hn::NegMulAdd(y, splat(1.44269504f), magic);
  const Vec n = hn::Sub(shifted, magic);
  const Vec r = hn::MulAdd(n, splat(-2.12194440e-4f), hn::MulAdd(n, splat(0.693359375f), y));  // -r of exp_number(-y)
  Vec p = splat(1.0f / 720);
  for (const float c : {-1.0f / 120, 1.0f / 24, -1.0f / 6, 1.0f / 2, -1.0f, 1.0f}) p = hn::MulAdd(p, r, splat(c));
  const Vec e = hn::BitCast(kF32, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
  return hn::Div(splat(1), hn::Add(splat(1), e));
}

HWY_INLINE Vec silu(Vec x) { return hn::Mul(x, sigmoid_factor(x)); }
// The derivative of silu(x), s + x s (1 - s) with s = sigmoid(x).
HWY_INLINE Vec silu_slope(Vec x) {
  const Vec s = sigmoid_factor(x);
  return hn::MulAdd(hn::Mul(x, s), hn::Sub(splat(1), s), s);
}

HWY_INLINE Vec sigmoid(Vec x) { return hn::Div(splat(1), hn::Add(splat(1), exp(hn::Neg(x)))); }
// The derivative of sigmoid(x), s (1 - s), from e = e^-|x|: 1 - s would lose all digits.
HWY_INLINE Vec sigmoid_slope(Vec x) {
  const Vec e = exp_number(hn::Neg(hn::Abs(x))), one_e = hn::Add(splat(1), e);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Div(e, hn::Mul(one_e, one_e)));
}

// log(1 + e) for 0 <= e <= 1, with full relative accuracy: 2 atanh(s), s = e / (2 + e) <= 1/3. The series is cut where
// the next term is below 2e-8.
HWY_INLINE Vec log1p(Vec e) {
  const Vec s = hn::Div(e, hn::Add(splat(2), e)), z = hn::Mul(s, s);
  Vec p = splat(2.0f / 13);
  for (const float c : {2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}) p = hn::MulAdd(p, z, splat(c));
  return hn::Mul(p, s);
}

// max(x, 0) + log(1 + e^-|x|): exact to the last bits for very negative x too, where models start.
HWY_INLINE Vec softplus(Vec x) {
  const Vec y = hn::Add(hn::Max(x, splat(0)), log1p(exp_number(hn::Neg(hn::Abs(x)))));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

// The gate of a head (math.md 2.1). A product with a = exp(A_log) may fit f32 where a does not, or where the other
// factor does not. So with an A_log above 16 or below -64, exponents are added before exp, and h = exp(exponent / 2)
// is multiplied in twice. Code that does so keeps subnormals (is_wide()).
struct Gate {
  GateForm form;
  float lower_bound;
  float a;               // exp(A_log)
  const float* dt_bias;  // padded row, or nullptr
  float A_log = 0;

  HWY_INLINE bool is_wide() const { return !(A_log >= -64 && A_log <= 16); }
  HWY_INLINE Vec z(const float* x, int64_t i) const {
    return dt_bias ? hn::Add(load(x + i), load(dt_bias + i)) : load(x + i);
  }
  HWY_INLINE Vec operator()(Vec z) const {
    switch (form) {
      case GateForm::kLog: return z;
      case GateForm::kSoftplus: return is_wide() ? wide(z) : hn::Mul(splat(-a), softplus(z));
      case GateForm::kLowerBound: break;
    }
    if (is_wide()) return wide(z);
    return hn::Mul(splat(lower_bound), sigmoid(hn::Mul(splat(a), z)));
  }
  // Turns the gradient dg of the gate into that of its input and this element's share of dA_log. A dg of 0 gives 0
  // for both, even where the gate is -inf. Where the gate is NaN, so are both.
  HWY_INLINE void backward(Vec z, Vec dg, Vec& dx, Vec& dA_log) const {
    is_wide() ? wide_backward(z, dg, dx, dA_log) : usual_backward(z, dg, dx, dA_log);
    const Vec g = is_wide() ? wide(z) : z;  // a usual gate is NaN where z is
    const auto none = hn::AndNot(hn::IsNaN(g), hn::Eq(dg, splat(0)));
    dx = hn::IfThenZeroElse(none, dx), dA_log = hn::IfThenZeroElse(none, dA_log);
    if (is_wide()) dx = hn::IfThenElse(hn::IsNaN(g), g, dx), dA_log = hn::IfThenElse(hn::IsNaN(g), g, dA_log);
  }

 private:
  HWY_INLINE void usual_backward(Vec z, Vec dg, Vec& dx, Vec& dA_log) const {
    switch (form) {
      case GateForm::kLog: dx = dg, dA_log = hn::Zero(kF32); return;
      case GateForm::kSoftplus: return softplus_backward(z, dg, dx, dA_log);
      case GateForm::kLowerBound: break;
    }
    Vec y = hn::Mul(splat(a), z);
    const Vec slope = hn::Mul(hn::Mul(splat(lower_bound), sigmoid_slope(y)), dg);
    dx = hn::Mul(splat(a), slope);
    dA_log = hn::Mul(at_most_1000(y), slope);
  }
  // -a sigmoid(z) dg and -a softplus(z) dg share e^-|z|.
  HWY_INLINE void softplus_backward(Vec z, Vec dg, Vec& dx, Vec& dA_log) const {
    const Vec e = exp_number(hn::Neg(hn::Abs(z)));
    const Vec s = hn::Div(hn::IfThenElse(hn::Lt(z, splat(0)), e, splat(1)), hn::Add(splat(1), e));
    const auto is_nan = hn::IsNaN(z);
    dx = hn::Mul(hn::Mul(splat(-a), hn::IfThenElse(is_nan, z, s)), dg);
    const Vec softplus = hn::Add(hn::Max(z, splat(0)), log1p(e));
    dA_log = hn::Mul(hn::Mul(splat(-a), hn::IfThenElse(is_nan, z, softplus)), dg);
  }

  // ---- for any A_log ----

  // exp(A_log) z. An A_log above 176 counts as 176, with which any z but 0 gives more than 1e30. One below -176 counts
  // as -176, with which an infinite z stays infinite; with -inf it is NaN.
  HWY_INLINE Vec wide_input(Vec z) const {
    const Vec h = splat(std::exp((A_log > 176 ? 176 : A_log < -176 && !std::isinf(A_log) ? -176 : A_log) / 2));
    return hn::Mul(hn::Mul(z, h), h);
  }
  // True where softplus(z) and sigmoid(z) are e^z to 6e-8: there z joins the exponent.
  static HWY_INLINE hn::Mask<F32> is_small(Vec z) { return hn::Lt(z, splat(-16)); }
  HWY_INLINE Vec exponent(Vec z) const { return hn::IfThenElse(is_small(z), hn::Add(splat(A_log), z), splat(A_log)); }
  // x e^exponent dg, multiplied in an order that overflows on the way only where the result does: h h dg with h < 1,
  // else dg h h or h dg h. h is 0 only of -inf, because x may be infinite.
  static HWY_INLINE Vec multiplied(Vec x, Vec exponent, Vec dg) {
    const auto low = hn::AndNot(hn::IsInf(exponent), hn::Lt(exponent, splat(-174)));
    const Vec least = hn::IfThenElse(low, splat(-174), exponent);
    const Vec h = exp(hn::Mul(least, splat(0.5f)));
    const auto down = hn::Lt(h, splat(1)), last = hn::AndNot(down, hn::Gt(x, splat(1)));
    const Vec first = hn::IfThenElse(last, dg, h), second = hn::IfThenElse(hn::Or(down, last), h, dg);
    return hn::Mul(hn::Mul(hn::Mul(x, first), second), hn::IfThenElse(down, dg, h));
  }
  // Bounds y, so that +-inf times a slope of 0 is 0.
  static HWY_INLINE Vec at_most_1000(Vec y) { return hn::Max(hn::Min(y, splat(1000)), splat(-1000)); }

  HWY_NOINLINE Vec wide(Vec z) const {
    switch (form) {
      case GateForm::kLog: return z;
      case GateForm::kLowerBound: return hn::Mul(splat(lower_bound), sigmoid(wide_input(z)));
      case GateForm::kSoftplus: break;
    }
    return multiplied(hn::IfThenElse(is_small(z), splat(1), softplus(z)), exponent(z), splat(-1));
  }
  HWY_NOINLINE void wide_backward(Vec z, Vec dg, Vec& dx, Vec& dA_log) const {
    switch (form) {
      case GateForm::kLog: dx = dg, dA_log = hn::Zero(kF32); return;
      case GateForm::kSoftplus:
        dx = multiplied(hn::IfThenElse(is_small(z), splat(1), sigmoid(z)), exponent(z), hn::Neg(dg));
        dA_log = multiplied(hn::IfThenElse(is_small(z), splat(1), softplus(z)), exponent(z), hn::Neg(dg));
        return;
      case GateForm::kLowerBound: break;
    }
    const Vec y = wide_input(z), size = hn::Abs(y), one_e = hn::Add(splat(1), exp(hn::Neg(size)));
    // An A_log above 1000 gives what 1000 gives.
    const Vec exponent = hn::Sub(splat(A_log > 1000 ? 1000 : A_log), size);
    dx = multiplied(hn::Div(splat(lower_bound), hn::Mul(one_e, one_e)), exponent, dg);
    dA_log = hn::Mul(hn::Mul(hn::Mul(splat(lower_bound), sigmoid_slope(y)), dg), at_most_1000(y));
  }
};

// Returns the head's gate, with exp(A_log) and with dt_bias padded into `row`.
inline Gate head_gate(GateForm form, float lower_bound, const kda_tensor& A_log, const kda_tensor& dt_bias, int64_t hv,
                      int64_t K, float* row) {
  if (present(dt_bias)) load_row(KDA_F32, at(dt_bias, hv), K, row);
  const float log = present(A_log) ? *reinterpret_cast<const float*>(at(A_log, hv)) : 0;
  return {form, lower_bound, std::exp(log), present(dt_bias) ? row : nullptr, log};
}

inline float activate_beta(int32_t form, float b) {
  if (form == KDA_BETA_ACTIVATED) return b;
  return (form == KDA_BETA_2SIGMOID ? 2.0f : 1.0f) / (1.0f + std::exp(-b));
}

// The derivative of activate_beta() by b.
inline float beta_slope(int32_t form, float b) {
  if (form == KDA_BETA_ACTIVATED) return 1;
  const float e = std::exp(-std::fabs(b));
  return (form == KDA_BETA_2SIGMOID ? 2.0f : 1.0f) * e / ((1 + e) * (1 + e));
}

// alpha_i = exp(gate(x_i)) for i < n, 1 in the padding.
inline void decay_row(const Gate& gate, float* row, int64_t n) {
  const KeepSubnormals keep(gate.is_wide());
  for (int64_t i = 0; i < padded(n); i += lanes()) store(exp(gate(gate.z(row, i))), row + i);
  for (int64_t i = n; i < padded(n); ++i) row[i] = 1;
}

// x <- scale * x / sqrt(sum x^2 + 1e-6), or just scale * x. Returns 1 / sqrt(..), or 1. A row whose sum of squares is
// beyond f32 is made smaller first; eps does not matter in it.
inline float normalise_row(float* x, int64_t n, bool l2norm, float scale) {
  const float squares = l2norm ? dot(x, x, n) : 1;
  if (!(squares < std::numeric_limits<float>::infinity())) {
    constexpr float kShrink = 0x1p-70f;
    scale_row(x, kShrink, n, x);
    const float r = 1 / std::sqrt(dot(x, x, n));
    scale_row(x, r * scale, n, x);
    return r * kShrink;
  }
  const float r = l2norm ? 1.0f / std::sqrt(squares + 1e-6f) : 1.0f;
  if (r * scale == 1.0f) return r;
  const Vec factor = splat(r * scale);
  for (int64_t i = 0; i < n; i += lanes()) store(hn::Mul(load(x + i), factor), x + i);
  return r;
}

// ---- transposition ----

#if HWY_TARGET != HWY_SCALAR
// Stores each 128-bit block of v four rows of dst further down.
template <class D>
HWY_INLINE void store_blocks(D d, hn::Vec<D> v, Matrix dst) {
  if constexpr (static_cast<int64_t>(hn::MaxLanes(D())) == 4) {
    hn::StoreU(v, d, dst.data);
  } else {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), dst);
    store_blocks(half, hn::UpperHalf(half, v), dst.from(static_cast<int64_t>(hn::MaxLanes(D())) / 2, 0));
  }
}

// Four rows of N columns become N rows of four: interleaving works within 128-bit blocks.
HWY_INLINE void transpose_strip(Matrix src, Matrix dst) {
  const Vec a = load(src.row(0)), b = load(src.row(1)), c = load(src.row(2)), d = load(src.row(3));
  const Vec ac0 = hn::InterleaveLower(kF32, a, c), ac1 = hn::InterleaveUpper(kF32, a, c);
  const Vec bd0 = hn::InterleaveLower(kF32, b, d), bd1 = hn::InterleaveUpper(kF32, b, d);
  store_blocks(kF32, hn::InterleaveLower(kF32, ac0, bd0), dst);
  store_blocks(kF32, hn::InterleaveUpper(kF32, ac0, bd0), dst.from(1, 0));
  store_blocks(kF32, hn::InterleaveLower(kF32, ac1, bd1), dst.from(2, 0));
  store_blocks(kF32, hn::InterleaveUpper(kF32, ac1, bd1), dst.from(3, 0));
}
#endif

// dst[j][i] = src[i][j], i < rows, j < columns.
inline void transpose(Matrix src, int64_t rows, int64_t columns, Matrix dst) {
  int64_t done_rows = 0, done_columns = 0;
#if HWY_TARGET != HWY_SCALAR
  done_rows = rows / 4 * 4, done_columns = columns / lanes() * lanes();
  for (int64_t i = 0; i < done_rows; i += 4)
    for (int64_t j = 0; j < done_columns; j += lanes()) transpose_strip(src.from(i, j), dst.from(j, i));
#endif
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < done_rows ? done_columns : 0; j < columns; ++j) dst.row(j)[i] = src.row(i)[j];
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
