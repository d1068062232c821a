// The instructions of Blackwell that src/cuda/ptx names, against plain arithmetic on the host (see test_ptx.cc).
#include <cmath>
#include <cstring>

#include "cuda/ptx/descriptors_sm100.h"
#include "error.h"
#include "ptx_kernels.h"
#include "ptx_support.h"

namespace kda::test {
namespace {

class PtxOnBlackwell : public OnCuda {
 protected:
  void SetUp() override {
    OnCuda::SetUp();
    if (IsSkipped()) return;
    int major = 0, minor = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    ASSERT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
    if (major != 10 || minor != 0) GTEST_SKIP() << "the device is no Blackwell with sm_100a";
  }
};

// ---- tensor memory ----

// Keeps 128 lanes of so many columns, from `fewest` columns at a time on to all of them at once.
void expect_kept(void (*keep)(unsigned, unsigned, const unsigned*, unsigned*), unsigned columns, unsigned fewest) {
  const std::vector<unsigned> x = counted<unsigned>(128 * columns);
  const OnDevice from(x);
  for (unsigned at_a_time = fewest; at_a_time <= columns; at_a_time *= 2) {
    SCOPED_TRACE(at_a_time);
    const OnDevice seen(x.size(), 0u);
    keep(columns, at_a_time, from, seen);
    expect_same(x, seen.back());
  }
}
TEST_F(PtxOnBlackwell, TensorMemoryKeepsColumns) { expect_kept(keep_by_columns, 128, 1); }
TEST_F(PtxOnBlackwell, TensorMemoryKeepsFragments) { expect_kept(keep_by_fragments, 256, 8); }
TEST_F(PtxOnBlackwell, TensorMemoryKeepsOperands) { expect_kept(keep_by_operands, 64, 8); }

TEST_F(PtxOnBlackwell, FragmentsAreThoseOfMma) {
  constexpr unsigned kColumns = 16;
  const std::vector<unsigned> x = counted<unsigned>(128 * kColumns);
  std::vector<unsigned> expected;
  for (unsigned first = 0; first < kColumns; first += 8)
    for (unsigned half = 0; half < 2; ++half)
      for (unsigned i = 0; i < 4; ++i)
        for (unsigned thread = 0; thread < 128; ++thread) {
          const unsigned lane = thread % 32;
          const unsigned row = thread / 32 * 32 + half * 16 + (i < 2 ? 0 : 8) + lane / 4;
          expected.push_back(x[row * kColumns + first + 2 * (lane % 4) + i % 2]);
        }
  const OnDevice from(x), seen(expected.size(), 0u);
  mix_shapes(kColumns, from, seen);
  expect_same(expected, seen.back());
}

// ---- products ----

constexpr uint64_t kNone = 0, k128By32 = 1, k128 = 2, k64 = 4, k32 = 6;

unsigned bytes_of_row(uint64_t swizzling) {
  return swizzling == kNone ? 16 : swizzling == k32 ? 32 : swizzling == k64 ? 64 : 128;
}
unsigned swizzled(unsigned at, uint64_t swizzling) {
  switch (swizzling) {
    case k32: return at ^ (at & 0x80) >> 3;
    case k64: return at ^ (at & 0x180) >> 3;
    case k128: return at ^ (at & 0x380) >> 3;
    case k128By32: return at ^ (at & 0x180) >> 2;
  }
  return at;
}

// An operand [rows,K] in shared memory, and where its elements are: the canonical layouts of the PTX ISA 9.1, section
// 9.7.16.3.3. gap: bytes behind each part that have no element. along_first: parts along K are neighbours, not parts
// down the rows.
struct Layout {
  unsigned rows, K, size;  // bytes of an element
  bool transposed;
  uint64_t swizzling;
  bool along_first = false;
  unsigned gap = 0;

  unsigned row() const { return bytes_of_row(swizzling); }
  unsigned wide() const { return row() / size; }  // elements
  unsigned lines() const { return swizzling == k128By32 ? 4 : 8; }
  // A part: eight rows of as many k as a row of bytes holds; transposed, as many rows and `lines` k.
  unsigned part() const { return lines() * row() + gap; }
  unsigned parts_down() const { return transposed ? (rows + wide() - 1) / wide() : rows / 8; }
  unsigned parts_along() const { return transposed ? K / lines() : (K + wide() - 1) / wide(); }
  // Bytes from a part to the next.
  unsigned along() const { return part() * (along_first ? 1 : parts_down()); }
  unsigned down() const { return part() * (along_first ? parts_along() : 1); }

  unsigned plain(unsigned r, unsigned k) const {
    return transposed ? r / wide() * down() + r % wide() * size + k / lines() * along() + k % lines() * row()
                      : r / 8 * down() + r % 8 * row() + k / wide() * along() + k % wide() * size;
  }
  unsigned bytes() const { return part() * parts_down() * parts_along(); }

  UmmaOperand operand(unsigned steps) const {
    // Of a transposed and swizzled operand, the leading dimension is down the rows, of all others along K.
    const bool leads_down = transposed && swizzling != kNone;
    UmmaOperand o{.leading = leads_down ? down() : along(),
                  .stride = leads_down ? along() : down(),
                  .bytes = bytes(),
                  .swizzling = swizzling,
                  .offsets = {}};
    if (!transposed && swizzling != kNone) o.leading = 16;  // unused
    for (unsigned i = 0; i < steps; ++i) o.offsets[i] = plain(0, i * K / steps);
    return o;
  }
};

using Bytes = std::vector<uint8_t>;

void put(Bytes& to, unsigned at, int32_t dtype, float x) {
  if (dtype == KDA_F32) return static_cast<void>(std::memcpy(&to[at], &x, sizeof x));
  const uint16_t bits = bits_of(dtype, x);
  std::memcpy(&to[at], &bits, sizeof bits);
}
// The images of so many blocks, one behind the other.
Bytes images(const Layout& layout, unsigned blocks, int32_t dtype, const std::vector<float>& x) {
  Bytes all(blocks * layout.bytes(), 0xff);  // NaN
  for (unsigned i = 0; i < blocks; ++i)
    for (unsigned r = 0; r < layout.rows; ++r)
      for (unsigned k = 0; k < layout.K; ++k)
        put(all, i * layout.bytes() + swizzled(layout.plain(r, k), layout.swizzling), dtype,
            x[(i * layout.rows + r) * layout.K + k]);
  return all;
}
Bytes rows_of(int32_t dtype, const std::vector<float>& x) {
  const unsigned size = dtype == KDA_F32 ? 4 : 2;
  Bytes all(x.size() * size);
  for (size_t i = 0; i < x.size(); ++i) put(all, static_cast<unsigned>(i) * size, dtype, x[i]);
  return all;
}

TEST_F(PtxOnBlackwell, CopiesRowsToTensorMemory) {
  constexpr unsigned kSteps = 4, kColumns = 8 * kSteps;
  const std::vector<float> x = counted<float>(128 * kColumns);
  std::vector<unsigned> expected(x.size());
  std::memcpy(expected.data(), x.data(), x.size() * sizeof(float));
  for (const uint64_t swizzling : {kNone, k32, k64, k128}) {
    SCOPED_TRACE(swizzling);
    const Layout layout{128, kColumns, 4, false, swizzling};
    const OnDevice image(images(layout, 1, KDA_F32, x));
    const OnDevice seen(x.size(), 0u);
    copy_to_tensor(kSteps, layout.operand(kSteps), image, seen);
    expect_same(expected, seen.back());
  }
}

struct Multiplication {
  int32_t dtype;
  unsigned M, N;
  uint64_t swizzling_a, swizzling_b;
  bool transposed_a = false, transposed_b = false, negated_a = false, negated_b = false, in_tensor = false;
  unsigned first_lane = 0, gap = 0;
  bool along_first = false;
  unsigned blocks = 1;
};

void expect_product(const Multiplication& m) {
  SCOPED_TRACE(str(dtype_name(m.dtype), ", blocks: ", m.blocks, ", M = ", m.M, ", N = ", m.N, ", swizzles ",
                   m.swizzling_a, " and ", m.swizzling_b, m.transposed_a ? ", A transposed" : "",
                   m.transposed_b ? ", B transposed" : "", m.in_tensor ? ", A in tensor memory" : "",
                   m.first_lane ? ", upper lanes" : ""));
  constexpr unsigned kSteps = 6;
  const unsigned size = m.dtype == KDA_F32 ? 4 : 2, K = kSteps * 32 / size;
  const std::vector<float> a = whole(m.M * K, 1), b = whole(m.N * K, 2), c = whole(m.M * m.N, 3);
  const Layout left{m.M / m.blocks, K, size, m.transposed_a, m.swizzling_a, m.along_first, m.gap},
      right{m.N / m.blocks, K, size, m.transposed_b, m.swizzling_b, m.along_first, m.gap};
  UmmaCase p{.dtype = m.dtype,
             .blocks = m.blocks,
             .M = m.M,
             .N = m.N,
             .steps = kSteps,
             .transposed_a = m.transposed_a,
             .transposed_b = m.transposed_b,
             .negated_a = m.negated_a,
             .negated_b = m.negated_b,
             .in_tensor = m.in_tensor,
             .first_lane = m.first_lane,
             .a = left.operand(kSteps),
             .b = right.operand(kSteps)};
  std::vector<float> signed_a = a;
  if (m.negated_a != m.negated_b)
    for (float& x : signed_a) x = -x;
  const OnDevice on_a(m.in_tensor ? rows_of(m.dtype, a) : images(left, m.blocks, m.dtype, a)),
      on_b(images(right, m.blocks, m.dtype, b));
  const OnDevice fresh(c.size(), kNaN), summed(c);
  multiply_by_blocks(p, on_a, on_b, false, fresh);
  multiply_by_blocks(p, on_a, on_b, true, summed);
  expect_same(product(signed_a, b, std::vector<float>(c.size(), 0), m.N), fresh.back());
  expect_same(product(signed_a, b, c, m.N), summed.back());
}

TEST_F(PtxOnBlackwell, ProductsOfAllSwizzles) {
  for (const uint64_t swizzling : {kNone, k32, k64, k128})
    for (const bool transposed_a : {false, true})
      for (const bool transposed_b : {false, true})
        for (const bool along_first : {false, true})
          expect_product({.dtype = KDA_BF16,
                          .M = 128,
                          .N = 48,
                          .swizzling_a = swizzling,
                          .swizzling_b = swizzling,
                          .transposed_a = transposed_a,
                          .transposed_b = transposed_b,
                          .along_first = along_first});
}

TEST_F(PtxOnBlackwell, ProductsOfAllSizes) {
  for (const unsigned N : {8u, 24u, 64u, 256u}) expect_product({KDA_F16, 64, N, k128, k128});
  for (const unsigned N : {16u, 64u, 256u}) expect_product({KDA_F16, 128, N, k128, k64, false, true});
  expect_product({.dtype = KDA_F16, .M = 64, .N = 32, .swizzling_a = k128, .swizzling_b = k128, .first_lane = 16});
}

TEST_F(PtxOnBlackwell, ProductsOfAInTensorMemory) {
  for (const int32_t dtype : {KDA_F16, KDA_BF16, KDA_F32})
    for (const unsigned M : {64u, 128u})
      for (const unsigned first_lane : {0u, 16u})
        if (M == 64 || first_lane == 0)
          expect_product({.dtype = dtype,
                          .M = M,
                          .N = 64,
                          .swizzling_a = kNone,
                          .swizzling_b = k128,
                          .in_tensor = true,
                          .first_lane = first_lane});
}

TEST_F(PtxOnBlackwell, ProductsOfTf32) {
  for (const uint64_t swizzling : {kNone, k32, k64, k128}) expect_product({KDA_F32, 128, 64, swizzling, swizzling});
  expect_product({KDA_F32, 64, 64, k128By32, k128, true, false});
  expect_product({KDA_F32, 128, 96, k128, k128By32, false, true});
}

TEST_F(PtxOnBlackwell, ProductsOfOtherSigns) {
  for (const bool a : {false, true})
    for (const bool b : {false, true})
      expect_product({.dtype = KDA_BF16,
                      .M = 64,
                      .N = 32,
                      .swizzling_a = k128,
                      .swizzling_b = k128,
                      .negated_a = a,
                      .negated_b = b});
}

TEST_F(PtxOnBlackwell, ProductsOfTwoBlocks) {
  Multiplication m{.dtype = KDA_BF16, .M = 256, .N = 96, .swizzling_a = k128, .swizzling_b = k64, .blocks = 2};
  for (const unsigned M : {128u, 256u})
    for (const int32_t dtype : {KDA_BF16, KDA_F32})
      for (const bool in_tensor : {false, true}) m.M = M, m.dtype = dtype, m.in_tensor = in_tensor, expect_product(m);
  m.in_tensor = false, m.dtype = KDA_F16, m.swizzling_b = k32, m.N = 32, m.transposed_b = true, expect_product(m);
  m.M = 128, m.transposed_a = true, m.negated_b = true, expect_product(m);
}

// Strides are those of the descriptor, and no others.
TEST_F(PtxOnBlackwell, ProductsOfOperandsInParts) {
  for (const bool transposed : {false, true}) {
    Multiplication m{KDA_F16, 64, 64, k128, k128, transposed, transposed};
    m.gap = 1024, expect_product(m);
    m.swizzling_a = m.swizzling_b = kNone, m.gap = 48, expect_product(m);
  }
}

// ---- without a device ----

// Bits that CUTLASS 4 makes of the same shapes and tiles.
TEST(PtxPlaces, DescriptorsOfBlackwell) {
  using cuda::ptx::operand_at, cuda::ptx::Swizzling, cuda::ptx::umma_of;
  EXPECT_EQ(umma_of<__nv_bfloat16>({.M = 128, .N = 256}), 0x08400490u);
  EXPECT_EQ(umma_of<__half>({.M = 64, .N = 8}), 0x04020010u);
  EXPECT_EQ(umma_of<__half>({.M = 64, .N = 8, .transposed_a = true}), 0x04028010u);
  EXPECT_EQ(umma_of<__half>({.M = 64, .N = 8, .transposed_b = true}), 0x04030010u);
  EXPECT_EQ(umma_of<__half>({.M = 64, .N = 8, .negated_a = true}), 0x04022010u);
  EXPECT_EQ(umma_of<__half>({.M = 64, .N = 8, .negated_b = true}), 0x04024010u);
  EXPECT_EQ(umma_of<float>({.M = 256, .N = 128}), 0x10200910u);
  EXPECT_EQ(operand_at(0, 16, 1024, Swizzling::k128), 0x4000404000010000u);
  EXPECT_EQ(operand_at(0x12340, 512, 2048, Swizzling::k64), 0x8000408000201234u);
  EXPECT_EQ(operand_at(0, 256, 2048, Swizzling::k32), 0xc000408000100000u);
  EXPECT_EQ(operand_at(0, 2048, 128, Swizzling::kNone), 0x0000400800800000u);
  EXPECT_EQ(operand_at(0, 512, 2048, Swizzling::k128By32), 0x2000408000200000u);
}

// The examples of the PTX ISA, whose layouts and strides are written out there.
TEST(PtxPlaces, LayoutsOfBlackwell) {
  const Layout k_tf32{16, 16, 4, false, kNone}, k32_tf32{16, 16, 4, false, k32}, mn_bf16{16, 16, 2, true, kNone},
      mn32_bf16{32, 16, 2, true, k32}, mn64_bf16{64, 16, 2, true, k64};
  const auto expect = [](const Layout& layout, unsigned leading, unsigned stride) {
    const auto o = layout.operand(1);
    if (leading) {
      EXPECT_EQ(o.leading, leading * layout.size);
    }
    EXPECT_EQ(o.stride, stride * layout.size);
  };
  expect(k_tf32, 64, 32);
  expect(k32_tf32, 0, 64);
  expect(mn_bf16, 128, 64);
  expect(mn32_bf16, 128, 256);
  expect(mn64_bf16, 256, 512);
}

}  // namespace
}  // namespace kda::test
