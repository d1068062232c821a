// The instructions that src/cuda/ptx names, one or two at a time, against plain arithmetic on the host: what they
// compute, where their operands lie, and what they leave alone. Here those of sm_80 and newer, which tests/emulator has
// as well.
#include <bit>
#include <cmath>

#include "error.h"
#include "ptx_kernels.h"
#include "ptx_support.h"

namespace kda::test {
namespace {

using PtxOnCuda = OnCuda;

// Subnormal numbers become zeros.
float flushed(double x) { return static_cast<float>(std::fabs(x) < 0x1p-126 ? std::copysign(0.0, x) : x); }

TEST_F(PtxOnCuda, Numbers) {
  const float values[] = {0,        -0.0f,    1,        -1,       3,        0.7f,      130,        -130,
                          kInf,     -kInf,    kNaN,     1e-40f,   -1e-40f,  0x1p-126f, 0x1p127f,   -1e-30f,
                          0x1p-63f, 65519.9f, 65520.0f, 0x1p-24f, 0x1p-25f, 0x3p-25f,  0x1.004p0f, 0x1.fffffep127f};
  std::vector<float> x, y;
  for (const float one : values)
    for (const float other : values) x.push_back(one), y.push_back(other);
  const size_t n = x.size();
  const OnDevice z(5 * n, 1.0f);
  const OnDevice packed(2 * n, 1u);
  compute(static_cast<int>(n), OnDevice(x), OnDevice(y), z, packed);
  const std::vector<float> got = z.back();
  const std::vector<unsigned> pairs = packed.back();
  const char* names[] = {"exp2", "reciprocal", "inverse_root", "least", "multiply_flushed"};
  for (size_t i = 0; i < n; ++i) {
    const double a = flushed(x[i]), b = flushed(y[i]);
    const bool no_number = std::isnan(x[i]) || std::isnan(y[i]);
    const float expected[] = {flushed(std::exp2(a)), flushed(1 / a), flushed(1 / std::sqrt(a)),
                              no_number ? kNaN : std::min(x[i], y[i]), flushed(a * b)};
    for (size_t f = 0; f < 5; ++f) {
      const float e = expected[f], g = got[f * n + i];
      const double error = f < 3 ? std::fabs(e) * 0x1p-21 : 0;
      // The sign of a zero counts, except for least.
      const bool same = std::isnan(e)             ? std::isnan(g)
                        : std::isinf(e) || e == 0 ? g == e && (f == 3 || std::signbit(g) == std::signbit(e))
                                                  : std::fabs(double{g} - e) <= error;
      EXPECT_TRUE(same) << names[f] << "(" << x[i] << ", " << y[i] << ") is " << g << ", not " << e;
    }
    for (const int32_t dtype : {KDA_F16, KDA_BF16})
      for (const bool upper : {false, true}) {
        const float e = upper ? y[i] : x[i];
        const unsigned bits = pairs[(dtype == KDA_F16 ? 0 : n) + i] >> (upper ? 16 : 0) & 0xffff;
        if (std::isnan(e)) EXPECT_TRUE(std::isnan(number_of(dtype, bits))) << bits;
        else EXPECT_EQ(bits, bits_of(dtype, e)) << dtype_name(dtype) << " of " << e;
      }
  }
}

TEST_F(PtxOnCuda, CopiesEndWithZeros) {
  std::vector<uint8_t> from = counted<uint8_t>(32 * 16), expected;
  for (size_t i = 0; i < 32; ++i) {
    const size_t width = i < 18 ? 16 : i < 28 ? 8 : 0, bytes = i < 17 ? i : i < 18 ? 16 : i < 27 ? i - 18 : 8;
    for (size_t j = 0; j < 16; ++j) expected.push_back(j >= width ? 0xff : j < bytes ? from[i * 16 + j] : 0);
  }
  const OnDevice to(32 * 16, uint8_t{1});
  copy_asynchronously(OnDevice(from), to);
  expect_same(expected, to.back());
}

TEST_F(PtxOnCuda, MatricesAreLoadedAndTransposed) {
  const std::vector<uint16_t> matrices = counted<uint16_t>(4 * 64);
  std::vector<unsigned> expected = registers(matrices, false);
  for (int i = 0; i < 2; ++i)
    for (const unsigned x : registers(matrices, true)) expected.push_back(x);
  const OnDevice x(3 * 4 * 32, 0u);
  load_matrices(OnDevice(matrices), x);
  expect_same(expected, x.back());
}

TEST_F(PtxOnCuda, ProductsOfAWarp) {
  const std::vector<float> c = whole(16 * 8, 3);
  for (const int32_t dtype : {KDA_F16, KDA_BF16, KDA_F32}) {
    SCOPED_TRACE(dtype_name(dtype));
    const size_t depth = dtype == KDA_F32 ? 8 : 16;
    const std::vector<float> a = whole(16 * depth, 1), b = whole(8 * depth, 2);
    const OnDevice d(c);
    if (dtype == KDA_F32) {
      // Sets the bits that do not count.
      const auto spoiled = [](std::vector<float> x) {
        for (float& one : x) one = std::bit_cast<float>(std::bit_cast<unsigned>(one) | 0x1fff);
        return x;
      };
      multiply_by_warp(dtype, OnDevice(spoiled(a)), OnDevice(spoiled(b)), d);
    } else {
      multiply_by_warp(dtype, OnDevice(bits_of(dtype, a)), OnDevice(bits_of(dtype, b)), d);
    }
    expect_same(product(a, b, c, 8), d.back());
  }
}

}  // namespace
}  // namespace kda::test
