// Conversions, activations, transposition and small products: scalar ones against brute force, vector ones of every
// instruction set that this machine has against the scalar ones.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "test_simd.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/gemm-inl.h"
// clang-format on

#include <string_view>

#ifndef KDA_TEST_SIMD_TABLE
#define KDA_TEST_SIMD_TABLE
namespace kda::test {
// What one instruction set offers.
struct Simd {
  void (*load_row)(int32_t dtype, const void* src, int64_t n, float* dst);
  void (*store_row)(int32_t dtype, const float* src, int64_t n, void* dst);
  void (*map)(const char* function, const float* x, float* y, int64_t n);  // n: whole vectors of 16
  void (*transpose)(const float* src, int64_t rows, int64_t columns, float* dst);
  void (*sums)(const float* src, int64_t n, float* sums);  // of n rows, each as long as a vector
  int64_t (*lanes)();
  void (*product)(const char* kind, int64_t M, int64_t N, int64_t K, const float* A, const float* B, float* C);
};
constexpr int64_t kPitch = 80;  // of the matrices of transpose and product
}  // namespace kda::test
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

void map_all(const char* function, const float* x, float* y, int64_t n) {
  const std::string_view f = function;
  for (int64_t i = 0; i < n; i += lanes()) {
    const Vec v = load(x + i);
    store(f == "exp" ? exp(v) : f == "sigmoid" ? sigmoid(v) : f == "softplus" ? softplus(v) : log1p(v), y + i);
  }
}

void transpose_all(const float* src, int64_t rows, int64_t columns, float* dst) {
  transpose({const_cast<float*>(src), test::kPitch}, rows, columns, {dst, test::kPitch});
}

void product_all(const char* kind, int64_t M, int64_t N, int64_t K, const float* A, const float* B, float* C) {
  const std::string_view k = kind;
  const Matrix a{const_cast<float*>(A), test::kPitch}, b{const_cast<float*>(B), test::kPitch}, c{C, test::kPitch};
  if (k == "set") gemm<Acc::kSet>(M, N, K, a.rows(), b, c);
  if (k == "set transposed") gemm<Acc::kSet>(M, N, K, a.columns(), b, c);
  if (k == "add") gemm<Acc::kAdd>(M, N, K, a.rows(), b, c);
  if (k == "sub") gemm<Acc::kSub>(M, N, K, a.rows(), b, c);
  if (k == "decay") gemm<Acc::kDecay>(M, N, K, a.rows(), b, c, {B, c});  // the first row of B holds the factors
  if (k == "lower") add_triangle<Triangle::kLower>(M, N, a.rows(), b, c);
  if (k == "upper") add_triangle<Triangle::kUpper>(M, N, a.rows(), b, c);
  if (k == "solve lower") solve_triangle<Triangle::kLower>(M, N, a.rows(), c);
  if (k == "solve upper") solve_triangle<Triangle::kUpper>(M, N, a.rows(), c);
  if (k == "gemm lower") gemm_lower(M, K, a.rows(), b, c);
}

void sum_all(const float* src, int64_t n, float* sums) {
  Vec x[kPad];
  for (int64_t i = 0; i < n; ++i) x[i] = load(src + i * n);
  sum_lanes_of_all(x, sums);
}

test::Simd simd() { return {load_row, store_row, map_all, transpose_all, sum_all, lanes, product_all}; }

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "support.h"

namespace kda::cpu {
static test::Simd baseline_simd() { return HWY_STATIC_DISPATCH(simd)(); }
}  // namespace kda::cpu

namespace kda::test {
namespace {

struct Named {
  const char* name;
  Simd simd;
};
std::vector<Named> available() {
  std::vector<Named> all = {{"baseline", cpu::baseline_simd()}};
#if defined(__x86_64__)
  if (cpu::isa() >= cpu::Isa::kSse4) all.push_back({"sse4", cpu::N_SSE4::simd()});
  if (cpu::isa() >= cpu::Isa::kAvx2) all.push_back({"avx2", cpu::N_AVX2::simd()});
  if (cpu::isa() >= cpu::Isa::kAvx512) all.push_back({"avx512", cpu::N_AVX3::simd()});
#endif
  return all;
}

constexpr double kInf = std::numeric_limits<double>::infinity();

// ---- scalar conversions, straight from the formats' definitions ----

double decode(uint32_t bits, int mantissa_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, all_ones = (1 << exponent_bits) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & all_ones;
  const double mantissa = bits & ((1u << mantissa_bits) - 1), sign = bits >> (mantissa_bits + exponent_bits) ? -1 : 1;
  if (exponent == all_ones) return mantissa ? std::nan("") : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Nearest representable number, ties to even: |x| scaled so that one unit in the last place is 1.
double nearest(double x, int mantissa_bits, int exponent_bits) {
  if (!std::isfinite(x) || x == 0) return x;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = std::max(std::ilogb(x), 1 - bias);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, mantissa_bits - exponent)), exponent - mantissa_bits);
  return std::abs(rounded) >= std::ldexp(1.0, bias + 1) ? std::copysign(kInf, x) : rounded;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// Every 16-bit number, everything halfway to its neighbour and just beside that, and random bits.
std::vector<float> interesting_floats() {
  std::vector<float> all;
  for (uint32_t x = 0; x < 65536; ++x)
    for (const uint32_t low : {0u, 0x7fffu, 0x8000u, 0x8001u}) all.push_back(std::bit_cast<float>(x << 16 | low));
  for (uint32_t x = 0; x < 65536; ++x)
    if (const float h = static_cast<float>(decode(x, 10, 5)); std::isfinite(h)) {
      const uint32_t bits = std::bit_cast<uint32_t>(h);
      for (const uint32_t low : {0u, 0xfffu, 0x1000u, 0x1001u}) all.push_back(std::bit_cast<float>(bits + low));
      all.push_back(h + std::copysign(0x1p-25f, h));  // ties between subnormals
    }
  Random random(1);
  for (int i = 0; i < 200000; ++i) all.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.bits())));
  all.resize(all.size() / 16 * 16);
  return all;
}

TEST(Scalar, FromSixteenBits) {
  for (uint32_t x = 0; x < 65536; ++x) {
    ASSERT_TRUE(same(bf16_to_float(static_cast<uint16_t>(x)), decode(x, 7, 8))) << x;
    ASSERT_TRUE(same(f16_to_float(static_cast<uint16_t>(x)), decode(x, 10, 5))) << x;
  }
}

TEST(Scalar, ToSixteenBits) {
  for (const float x : interesting_floats()) {
    ASSERT_TRUE(same(decode(float_to_bf16(x), 7, 8), nearest(x, 7, 8))) << x;
    ASSERT_TRUE(same(decode(float_to_f16(x), 10, 5), nearest(x, 10, 5))) << x;
  }
}

// From float64 in one step, right also beside the middle between two float16 numbers, where a float in between would
// lead to the wrong one.
TEST(Scalar, RoundedToOddFirst) {
  for (const float x : interesting_floats())
    for (const double beside : {0.0, 0x1p-40, -0x1p-40}) {
      const double exact = static_cast<double>(x) * (1 + beside);
      ASSERT_TRUE(same(decode(float_to_bf16(rounded_to_odd(exact)), 7, 8), nearest(exact, 7, 8))) << exact;
      ASSERT_TRUE(same(decode(float_to_f16(rounded_to_odd(exact)), 10, 5), nearest(exact, 10, 5))) << exact;
    }
  EXPECT_EQ(float_to_f16(rounded_to_odd(1e300)), 0x7c00);
  EXPECT_EQ(float_to_bf16(rounded_to_odd(-1e-300)), 0x8000);
}

TEST(Scalar, SizesAndNames) {
  const std::pair<int32_t, int64_t> sizes[] = {{KDA_F32, 4}, {KDA_BF16, 2}, {KDA_F16, 2}, {KDA_F64, 8}, {KDA_I32, 4},
                                               {KDA_I64, 8}, {KDA_BOOL, 1}, {0, 0},       {8, 0}};
  for (const auto& [dtype, size] : sizes) EXPECT_EQ(dtype_size(dtype), size) << dtype_name(dtype);
}

// ---- vector conversions ----

// NaN may carry any payload; every other number has one right pattern. Kernels run with subnormals flushed, so the
// stores have to be right in that mode, too.
void expect_stores(const Named& isa, int32_t dtype) {
  const std::vector<float> x = interesting_floats();
  std::vector<uint16_t> got(x.size());
  {
    const cpu::FlushSubnormals flush;
    isa.simd.store_row(dtype, x.data(), static_cast<int64_t>(x.size()), got.data());
  }
  int64_t wrong = 0, first = -1;
  for (size_t i = 0; i < x.size(); ++i) {
    const uint16_t expected = dtype == KDA_BF16 ? float_to_bf16(x[i]) : float_to_f16(x[i]);
    const double value = dtype == KDA_BF16 ? bf16_to_float(got[i]) : f16_to_float(got[i]);
    if (std::isnan(x[i]) ? std::isnan(value) : got[i] == expected) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    ++wrong;
  }
  EXPECT_EQ(wrong, 0) << isa.name << ": of " << x.size() << " numbers; the first is " << x[std::max<int64_t>(0, first)];
}

void expect_loads(const Named& isa, int32_t dtype) {
  std::vector<uint16_t> x(65536);
  for (uint32_t i = 0; i < 65536; ++i) x[i] = static_cast<uint16_t>(i);
  std::vector<float> got(65536);
  {
    const cpu::FlushSubnormals flush;
    isa.simd.load_row(dtype, x.data(), 65536, got.data());
  }
  int64_t wrong = 0, first = -1;
  for (uint32_t i = 0; i < 65536; ++i) {
    const double expected = dtype == KDA_BF16 ? decode(i, 7, 8) : decode(i, 10, 5);
    if (same(got[i], expected)) continue;
    if (first < 0) first = i;
    ++wrong;
  }
  EXPECT_EQ(wrong, 0) << isa.name << ": of 65536 patterns; the first is " << first;
}

TEST(Vector, StoresBf16) {
  for (const Named& isa : available()) expect_stores(isa, KDA_BF16);
}
TEST(Vector, StoresF16) {
  for (const Named& isa : available()) expect_stores(isa, KDA_F16);
}
TEST(Vector, LoadsBf16) {
  for (const Named& isa : available()) expect_loads(isa, KDA_BF16);
}
TEST(Vector, LoadsF16) {
  for (const Named& isa : available()) expect_loads(isa, KDA_F16);
}

// Rows of any length: zeros up to the padding, nothing read or written beyond the row.
TEST(Vector, RowsOfAnyLength) {
  for (const Named& isa : available())
    for (const int32_t dtype : {KDA_F32, KDA_BF16, KDA_F16})
      for (int64_t n = 1; n <= 40; ++n) {
        Tensor row(dtype, {n}), out(dtype, {n});  // ASan guards their ends
        for (int64_t i = 0; i < n; ++i) row.set(i, static_cast<double>(i + 1) / 4);
        std::vector<float> x(64, -7);
        isa.simd.load_row(dtype, row.view().data, n, x.data());
        for (int64_t i = 0; i < 64; ++i)
          ASSERT_EQ(x[i], i < n                    ? static_cast<float>(i + 1) / 4
                          : i < (n + 15) / 16 * 16 ? 0
                                                   : -7)
              << isa.name << " " << n;
        std::fill(x.begin() + n, x.end(), 99.0f);
        isa.simd.store_row(dtype, x.data(), n, out.view().data);
        ASSERT_EQ(out.bits(), row.bits()) << isa.name << " " << n;
        ASSERT_TRUE(out.margins_intact()) << isa.name << " " << n;
      }
}

// ---- activations ----

TEST(Vector, Activations) {
  constexpr int64_t n = 1 << 16;
  Random random(3);
  std::vector<float> x(n), y(n);
  const auto check = [&](const char* function, double lo, double hi, double ulps, auto exact) {
    for (float& v : x) v = static_cast<float>(random.uniform(lo, hi));
    for (const Named& isa : available()) {
      isa.simd.map(function, x.data(), y.data(), n);
      double worst = 0;
      for (int64_t i = 0; i < n; ++i)
        if (const double e = exact(x[i]); e >= 0x1p-126) worst = std::max(worst, std::abs(y[i] - e) / e);
        else ASSERT_LE(std::abs(y[i]), 0x1p-125) << function << " of " << x[i] << " with " << isa.name;
      EXPECT_LE(worst, ulps * 0x1p-24) << function << " with " << isa.name;
    }
  };
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  const auto softplus = [](double v) { return std::max(v, 0.0) + std::log1p(std::exp(-std::abs(v))); };
  check("exp", -87.3, 88, 2, [](double v) { return std::exp(v); });
  check("exp", -1e-3, 1e-3, 2, [](double v) { return std::exp(v); });
  check("exp", -200, -87, 2, [](double v) { return std::exp(v); });
  check("log1p", 0, 1, 4, [](double v) { return std::log1p(v); });
  check("sigmoid", -80, 30, 5, sigmoid);
  check("softplus", -80, 30, 5, softplus);
  check("softplus", -2, 2, 5, softplus);
}

TEST(Vector, ActivationsAtTheEdges) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  std::vector<float> x = {0, -0.0f, inf, -inf, nan, -3000, 3000, 100, -100, 1, -1, 88, -87, 20, -20, -1e30f}, y(16);
  for (const Named& isa : available()) {
    const auto expect = [&](const char* function, auto exact) {
      isa.simd.map(function, x.data(), y.data(), 16);
      for (size_t i = 0; i < x.size(); ++i) {
        const float e = static_cast<float>(exact(static_cast<double>(x[i])));
        const bool right = std::isnan(e)   ? std::isnan(y[i])
                           : e < 0x1p-126f ? y[i] == 0
                           : std::isinf(e) ? y[i] == e
                                           : std::abs(y[i] / e - 1) < 1e-6;
        EXPECT_TRUE(right) << function << " of " << x[i] << " is " << y[i] << " with " << isa.name;
      }
    };
    // Above 88 exp gives up (inf), which does not matter where it is used: decays are <= 1.
    expect("exp", [](double v) { return v > 88 ? kInf : std::exp(v); });
    expect("sigmoid", [](double v) { return 1 / (1 + (v < -88 ? kInf : std::exp(-v))); });
    expect("softplus", [](double v) { return std::max(v, 0.0) + std::log1p(std::exp(-std::abs(v))); });
  }
}

// ---- matrices ----

TEST(Vector, Transposes) {
  for (const Named& isa : available())
    for (const int64_t rows : {1, 3, 4, 7, 16, 17, 64})
      for (const int64_t columns : {1, 4, 5, 16, 30, 64}) {
        std::vector<float> src(80 * kPitch), dst(80 * kPitch, -1);
        for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i);
        isa.simd.transpose(src.data(), rows, columns, dst.data());
        for (int64_t i = 0; i < 80; ++i)
          for (int64_t j = 0; j < kPitch; ++j)
            ASSERT_EQ(dst[i * kPitch + j], i < columns && j < rows ? src[j * kPitch + i] : -1)
                << isa.name << ", " << rows << " x " << columns;
      }
}

TEST(Vector, SumsOfAllLanes) {
  for (const Named& isa : available()) {
    const int64_t n = isa.simd.lanes();
    std::vector<float> src(n * n), sums(n);
    for (int64_t i = 0; i < n * n; ++i) src[i] = static_cast<float>(i * i % 101);  // exact sums
    isa.simd.sums(src.data(), n, sums.data());
    for (int64_t i = 0; i < n; ++i)
      EXPECT_EQ(sums[i], std::accumulate(&src[i * n], &src[i * n] + n, 0.0f)) << isa.name << ", vector " << i;
  }
}

// All products against their definition in float64. What a triangle leaves out is NaN and must not be read.
TEST(Vector, Products) {
  Random random(5);
  for (const Named& isa : available())
    for (const std::string kind :
         {"set", "set transposed", "add", "sub", "decay", "lower", "upper", "solve lower", "solve upper", "gemm lower"})
      for (const auto& [M, N, K] :
           {std::array<int64_t, 3>{1, 1, 1}, {5, 20, 7}, {64, 64, 64}, {17, 33, 40}, {8, 16, 3}}) {
        const bool triangle = kind.find("er") != std::string::npos && kind != "gemm lower",
                   lower = kind.ends_with("lower");
        const bool solve = kind.starts_with("solve");
        std::vector<float> A(80 * kPitch), B(80 * kPitch), C(80 * kPitch);
        for (std::vector<float>* m : {&A, &B, &C})
          for (float& x : *m) x = static_cast<float>(random.uniform(-0.2, 0.2));
        const int64_t inner = triangle ? M : K;
        for (int64_t i = 0; i < 80; ++i)
          for (int64_t j = 0; j < kPitch; ++j) {
            const bool left_out = lower ? (solve ? j >= i : j > i) : (solve ? j <= i : j < i);
            if (triangle && left_out) A[i * kPitch + j] = std::nanf("");
          }
        std::vector<float> got = C;
        isa.simd.product(kind.c_str(), M, N, K, A.data(), B.data(), got.data());
        const auto a = [&](int64_t i, int64_t k) {
          return double{kind == "set transposed" ? A[k * kPitch + i] : A[i * kPitch + k]};
        };
        std::vector<double> expected(C.begin(), C.end());
        for (int64_t step = 0; step < M; ++step) {
          const int64_t i = solve && !lower ? M - 1 - step : step;
          const int64_t columns = kind == "gemm lower" ? std::min(i + 1, M) : N;
          for (int64_t n = 0; n < columns; ++n) {
            double sum = 0;
            for (int64_t k = 0; k < inner; ++k)
              if (!triangle || !std::isnan(a(i, k)))
                sum += a(i, k) * (solve ? expected[k * kPitch + n] : B[k * kPitch + n]);
            double& c = expected[i * kPitch + n];
            if (kind.starts_with("set") || kind == "gemm lower") c = sum;
            else if (kind == "sub" || solve) c -= sum;
            else if (kind == "decay") c = c * B[i] + sum;
            else c += sum;
            ASSERT_NEAR(got[i * kPitch + n], c, 1e-5) << isa.name << ", " << kind << " " << M << "," << N << "," << K;
          }
        }
      }
}

}  // namespace
}  // namespace kda::test
#endif  // HWY_ONCE
