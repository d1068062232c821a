// The instructions of Hopper that src/cuda/ptx names, against plain arithmetic on the host (see test_ptx.cc), and the
// places in shared memory that they agree on.
#include <cmath>
#include <set>

#include "error.h"
#include "ptx_kernels.h"
#include "ptx_support.h"

namespace kda::test {
namespace {

// ---- places ----

// The place of a column in a row of 16-bit numbers, in swizzled rows of 128 or 64 bytes.
unsigned place(unsigned row, unsigned column, unsigned row_bytes) {
  const unsigned pieces = row_bytes / 16, twist = row / (8 / pieces) % pieces;
  return row * row_bytes + (column / 8 ^ twist) * 16 + column % 8 * 2;
}

// Needs no device.
TEST(PtxPlaces, AreOwnAndFreeOfBankConflicts) {
  constexpr unsigned kRows = 32;
  for (const unsigned bytes : {128u, 64u}) {
    std::set<unsigned> places;
    for (unsigned row = 0; row < kRows; ++row)
      for (unsigned column = 0; column < bytes / 2; ++column) {
        const unsigned plain = row * bytes + column * 2, at = place(row, column, bytes);
        EXPECT_EQ(at, plain ^ (plain >> 7 & (bytes / 16 - 1)) << 4) << "what the hardware does";
        EXPECT_LT(at, kRows * bytes);
        places.insert(at);
      }
    EXPECT_EQ(places.size(), kRows * bytes / 2);
    for (unsigned row = 0; row < kRows; row += 8)
      for (unsigned column = 0; column < bytes / 2; column += 8) {
        std::set<unsigned> banks;  // four at a time
        for (unsigned i = 0; i < 8; ++i) banks.insert(place(row + i, column, bytes) / 16 % 8);
        EXPECT_EQ(banks.size(), 8u) << bytes << " " << row << " " << column;
      }
  }
}

// ---- instructions ----

class PtxOnHopper : public OnCuda {
 protected:
  void SetUp() override {
    OnCuda::SetUp();
    if (IsSkipped()) return;
    int major = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    if (major != 9) GTEST_SKIP() << "the device is no Hopper";
  }
};

TEST_F(PtxOnHopper, PhasesOfABarrier) {
  const OnDevice from(32, uint8_t{1});
  const OnDevice seen(kSights, char{2});
  watch_barrier(from, seen);
  std::string text;
  for (const char x : seen.back()) text += static_cast<char>('0' + x);
  EXPECT_EQ(text,
            "03"     // new
            "03"     // one of three arrivals
            "30"     // all of them
            "30"     // all again, but 32 bytes are expected
            "103"    // they come
            "03"     // one arrival, and 16 bytes are expected
            "03"     // all arrivals
            "130");  // bytes come
}

TEST_F(PtxOnHopper, WaysMeet) {
  const OnDevice seen(32, char{0});
  meet_by_two_ways(seen);
  expect_same(std::vector<char>(32, 7), seen.back());
  const OnDevice also(32, char{0});
  meet_by_arrival(also);
  expect_same(std::vector<char>(32, 7), also.back());
}

TEST_F(PtxOnHopper, OneLaneIsElected) {
  const OnDevice elected(2 * 64, char{2});
  elect_twice(elected);
  const std::vector<char> all = elected.back();
  for (const size_t warp : {0, 1}) {
    const auto first = all.begin() + static_cast<ptrdiff_t>(warp * 32), then = first + 64;
    EXPECT_EQ(std::count(first, first + 32, 1), 1);
    EXPECT_EQ(std::count(first, first + 32, 0), 31);
    expect_same(std::vector<char>(first, first + 32), std::vector<char>(then, then + 32));
  }
}

TEST_F(PtxOnHopper, VotesOfSomeWarps) {
  std::vector<char> x, expected;
  for (const int against : {-1, 0, 37, 64, 127, 128}) {  // 128: all threads
    for (int i = 0; i < 128; ++i) x.push_back(against < 128 && i != against);
    for (int i = 0; i < 128; ++i) expected.push_back(against < 0 || (against < 128 && i / 64 != against / 64));
  }
  const OnDevice all(x.size(), char{2});
  vote(static_cast<int>(x.size() / 128), OnDevice(x), all);
  expect_same(expected, all.back());
}

TEST_F(PtxOnHopper, BulkCopies) {
  const size_t count = 100;
  const std::vector<unsigned> from = counted<unsigned>(128 * 4);
  std::vector<unsigned> there(128 * 4, ~0u), back(128 * 4, 7);
  std::copy_n(from.begin(), count * 4, there.begin());
  for (size_t i = 0; i < count * 4; ++i) back[i] = ~there[i + 4];
  const OnDevice seen(128 * 4, 7u), to(128 * 4, 7u);
  copy_bulk(count, OnDevice(from), seen, to);
  expect_same(there, seen.back());
  expect_same(back, to.back());
}

constexpr unsigned kB = 2, kT = 40, kHeads = 3, kTile = 32;

// The number of an element of [B,T,heads,128].
size_t element(const Corner& at, unsigned row, unsigned column) {
  return ((at.b * kT + at.token + row) * kHeads + at.head) * size_t{128} + at.channel + column;
}
kda_tensor view(uint16_t* data) {
  kda_tensor t = Tensor(KDA_BF16, {kB, kT, kHeads, 128});
  t.data = data;
  return t;
}
// Places of a tile's first token: all, some or none of its rows are the tensor's.
const unsigned kTokens[] = {0, 3, 8, 20, 39, 40, 100};

TEST_F(PtxOnHopper, TilesAreLoaded) {
  const std::vector<uint16_t> x = counted<uint16_t>(kB * kT * kHeads * 128);
  const OnDevice from(x);
  for (const unsigned token : kTokens) {
    const Corner at{64, 1, token, token == 8 ? 1u : 0u};
    SCOPED_TRACE(token);
    std::vector<uint16_t> expected(kTile * 64, 0);
    for (unsigned row = 0; row < kTile && token + row < kT; ++row)
      for (unsigned column = 0; column < 64; ++column)
        expected[place(row, column, 128) / 2] = x[element(at, row, column)];
    const OnDevice seen(kTile * 64, uint16_t{0xffff});
    load_tile(view(from), at, seen);
    expect_same(expected, seen.back());
  }
}

TEST_F(PtxOnHopper, BlocksCopyToEachOther) {
  const std::vector<uint16_t> x = counted<uint16_t>(kB * kT * kHeads * 128), bytes = counted<uint16_t>(512);
  const OnDevice tensor(x);
  const Corner at{64, 1, 3, 1};
  std::vector<uint16_t> expected(2 * 3072, 0xffff);
  std::copy(bytes.begin(), bytes.end(), expected.begin() + 2048);
  for (unsigned row = 0; row < kTile; ++row)
    for (unsigned column = 0; column < 64; ++column)
      expected[3072 + place(row, column, 128) / 2] = x[element(at, row, column)];
  std::copy(bytes.begin(), bytes.end(), expected.begin() + 3072 + 2048 + 512);
  const OnDevice seen(expected.size(), uint16_t{7});
  const OnDevice notes(10, 9u);
  copy_between_blocks(OnDevice(bytes), view(tensor), at, seen, notes);
  expect_same(expected, seen.back());
  expect_same(std::vector<unsigned>{0, 1, 0, 0, 7, 1, 0, 1, 1, 5}, notes.back());
}

TEST_F(PtxOnHopper, TilesAreStored) {
  const std::vector<uint16_t> x = counted<uint16_t>(kTile * 64);
  std::vector<uint16_t> tile(x.size());
  for (unsigned i = 0; i < x.size(); ++i) tile[place(i / 64, i % 64, 128) / 2] = x[i];
  for (const unsigned token : kTokens) {
    const Corner at{64, 2, token, token == 8 ? 1u : 0u};
    SCOPED_TRACE(token);
    std::vector<uint16_t> expected(kB * kT * kHeads * 128, 0xffff);
    for (unsigned i = 0; i < x.size(); ++i)
      if (token + i / 64 < kT) expected[element(at, i / 64, i % 64)] = x[i];
    const OnDevice to(expected.size(), uint16_t{0xffff});
    store_tile(view(to), at, OnDevice(tile));
    expect_same(expected, to.back());
  }
}

// States with gaps behind rows, heads and slots; a slot that does not exist gives zeros.
TEST_F(PtxOnHopper, StatesComeAndLeave) {
  constexpr unsigned kSlots = 3, kHV = 2, kRow = 132, kHead = 128 * kRow + 4, kSlot = kHV * kHead + 8;
  const auto states = [](float* data) {
    kda_tensor t = Tensor(KDA_F32, {kSlots, kHV, 128, 128});
    t.data = data, t.stride[0] = kSlot, t.stride[1] = kHead, t.stride[2] = kRow;
    return t;
  };
  const std::vector<float> x = counted<float>(kSlots * kSlot);
  const OnDevice from(x);
  for (const Columns& at : {Columns{0, 0, 0, 2}, Columns{3, 1, 2, 0}, Columns{6, 1, 1, 1}, Columns{4, 0, ~0u, 1}}) {
    SCOPED_TRACE(at.first);
    std::vector<float> expected(2 * 2048), there(x.size(), -1);
    for (unsigned column = 0; column < 32; ++column)
      for (unsigned channel = 0; channel < 128; ++channel) {
        const unsigned c = column % 16, row = c % 8 * 2 + c / 8;
        const unsigned in_head = at.hv * kHead + (16 * at.first + column) * kRow + channel;
        const float value = at.slot < kSlots ? x[at.slot * kSlot + in_head] : 0;
        expected[column / 16 * 2048 + channel / 32 * 512 + place(row, channel % 32 * 2, 128) / 4] = value;
        there[at.to * kSlot + in_head] = value;
      }
    const OnDevice seen(expected.size(), 7.0f), to(there.size(), -1.0f);
    exchange_states(states(from), states(to), at, seen);
    expect_same(expected, seen.back());
    expect_same(there, to.back());
  }
}

TEST_F(PtxOnHopper, MatricesAreStoredTransposed) {
  const std::vector<uint16_t> matrices = counted<uint16_t>(4 * 64);
  const OnDevice to(4 * 64, uint16_t{0});
  store_matrices(OnDevice(registers(matrices, true)), to);
  expect_same(matrices, to.back());
}

TEST_F(PtxOnHopper, LargerMagnitudes) {
  const float values[] = {0, -0.0f, 1, -2, kInf, -kInf, kNaN, -kNaN, 65504, -1e-7f, 1e-39f};
  for (const int32_t dtype : {KDA_F16, KDA_BF16}) {
    std::vector<unsigned> x, y;
    for (const float one : values)
      for (const float other : values) {
        const unsigned a = bits_of(dtype, one), b = bits_of(dtype, other);
        x.push_back(a | b << 16), y.push_back(b | a << 16);
      }
    const size_t n = x.size();
    const OnDevice z(2 * n, 0u);
    compute_larger(dtype, static_cast<int>(n), OnDevice(x), OnDevice(y), z);
    const std::vector<unsigned> got = z.back();
    for (size_t i = 0; i < 4 * n; ++i) {
      const bool upper = i % 2, nan = i / 2 >= n;
      const auto magnitude = [&](unsigned pair) { return std::fabs(number_of(dtype, upper ? pair >> 16 : pair)); };
      const float a = magnitude(x[i / 2 % n]), b = magnitude(y[i / 2 % n]), g = magnitude(got[i / 2]);
      const float e = nan && (std::isnan(a) || std::isnan(b)) ? kNaN : std::fmax(a, b);
      EXPECT_TRUE(std::isnan(e) ? std::isnan(g) : g == e)
          << dtype_name(dtype) << ": of " << a << " and " << b << " it is " << g << ", not " << e;
    }
  }
}

// x [rows,columns] as it lies in shared memory: as many columns as rows of `row_bytes` hold, then the next columns of
// all rows.
std::vector<uint16_t> image(int32_t dtype, const std::vector<float>& x, size_t columns, unsigned row_bytes) {
  std::vector<uint16_t> bits(x.size());
  const size_t rows = x.size() / columns, wide = row_bytes / 2;
  for (size_t i = 0; i < x.size(); ++i) {
    const auto row = static_cast<unsigned>(i / columns), column = static_cast<unsigned>(i % columns);
    bits[column / wide * rows * wide + place(row, column % wide, row_bytes) / 2] = bits_of(dtype, x[i]);
  }
  return bits;
}

TEST_F(PtxOnHopper, ProductsOfAWarpgroup) {
  const Product products[] = {{32, false, 128}, {32, false, 64},  {64, false, 128},       {128, false, 128},
                              {64, true, 128},  {128, true, 128}, {32, false, 128, true}, {32, false, 64, true}};
  for (const Product& p : products)
    for (const int32_t dtype : {KDA_F16, KDA_BF16}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", N = ", p.N, p.transposed ? ", transposed" : "", ", rows of ", p.row_bytes,
                       p.shared ? ", a in shared memory" : ""));
      const std::vector<float> a = whole(64 * p.depth(), 1), b = whole(p.N * p.depth(), 2), c = whole(64 * p.N, 3);
      std::vector<float> turned(b.size());
      for (size_t i = 0; i < b.size(); ++i) turned[i % p.depth() * p.N + i / p.depth()] = b[i];
      const OnDevice left(p.shared ? image(dtype, a, p.depth(), p.row_bytes) : bits_of(dtype, a));
      const OnDevice right(p.transposed ? image(dtype, turned, p.N, p.row_bytes)
                                        : image(dtype, b, p.depth(), p.row_bytes));
      const OnDevice fresh(c.size(), kNaN), summed(c);
      multiply_by_warpgroup(dtype, p, left, right, false, fresh);
      multiply_by_warpgroup(dtype, p, left, right, true, summed);
      expect_same(product(a, b, std::vector<float>(c.size(), 0), p.N), fresh.back());
      expect_same(product(a, b, c, p.N), summed.back());
    }
}

TEST_F(PtxOnHopper, PlacesOfTheForward) {
  std::vector<unsigned> squares, owns;
  for (unsigned i = 0; i < 32 * 32; ++i) squares.push_back(place(i / 32, i % 32, 64));
  for (unsigned i = 0; i < 8; ++i)
    for (unsigned thread = 0; thread < 128; ++thread) {
      const unsigned lane = thread % 32;
      owns.push_back(place(thread / 32 * 8 + i, lane % 16 * 4, 128)), owns.push_back(lane / 16);
    }
  const OnDevice square(squares.size(), ~0u), own(owns.size(), ~0u);
  find_places(square, own);
  expect_same(squares, square.back());
  expect_same(owns, own.back());
}

}  // namespace
}  // namespace kda::test
