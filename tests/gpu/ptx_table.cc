// Every wrapper of src/cuda/ptx with random inputs, on a GPU or in the emulator: the program is built for both.
//   ptx_table FILE [SEED]        writes what each instruction gives, a line of JSON each
// python -m bench record runs both on a GPU and compares them (bench/record/instructions.py). Inputs need no layouts
// here: they are the same on both sides, and test_ptx*.cc hold both to plain arithmetic.
#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "error.h"
#include "ptx_kernels.h"
#include "ptx_support.h"

namespace kda::test {
namespace {

// How near both sides have to be: to the bit; to a part of each number; or to a part of the largest sum, since the
// order of sums is the hardware's.
enum class Kind { kExact, kRelative, kSum };

class Table {
 public:
  Table(std::FILE* file, unsigned seed, int capability) : file_(file), seed_(seed), capability_(capability) {}

  // needs: the least compute capability, times ten; an exact one for kernels of one architecture.
  void row(const char* name, Kind kind, double limit, int needs, const std::function<std::vector<unsigned>()>& run) {
    const bool has = needs < 90 ? capability_ >= needs : capability_ == needs;
    std::fprintf(file_, "{\"instruction\": \"%s\", \"kind\": \"%s\", \"limit\": %.9g, \"needs\": %d", name,
                 kind == Kind::kExact      ? "exact"
                 : kind == Kind::kRelative ? "relative"
                                           : "sum",
                 limit, needs);
    if (has) {
      random_.seed(seed_ + static_cast<unsigned>(++rows_));
      const std::vector<unsigned> bits = run();
      std::fprintf(file_, ", \"bits\": [");
      for (size_t i = 0; i < bits.size(); ++i) std::fprintf(file_, i ? ", %u" : "%u", bits[i]);
      std::fprintf(file_, "]");
    }
    std::fprintf(file_, "}\n");
  }

  // ---- inputs ----

  template <class T>
  std::vector<T> any(size_t size) {
    std::vector<T> x(size);
    for (T& one : x) one = static_cast<T>(random_());
    return x;
  }
  // In [-1, 1], of all 24 bits.
  float one() { return static_cast<float>(random_() % (1u << 25)) * 0x1p-24f - 1; }
  std::vector<float> numbers(size_t size) {
    std::vector<float> x(size);
    for (float& each : x) each = one();
    return x;
  }
  // The same as bytes of operands.
  std::vector<uint8_t> operands(int32_t dtype, size_t bytes) {
    std::vector<uint8_t> x(bytes);
    const size_t size = dtype == KDA_F32 ? 4 : 2;
    for (size_t i = 0; i < bytes; i += size) {
      const float value = one();
      const uint16_t half = dtype == KDA_F32 ? 0 : bits_of(dtype, value);
      std::memcpy(&x[i], dtype == KDA_F32 ? static_cast<const void*>(&value) : &half, size);
    }
    return x;
  }
  unsigned below(unsigned n) { return static_cast<unsigned>(random_()) % n; }

 private:
  std::FILE* file_;
  unsigned seed_;
  int capability_, rows_ = 0;
  std::mt19937 random_;
};

template <class T>
std::vector<unsigned> bits_of_all(const std::vector<T>& x) {
  std::vector<unsigned> bits;
  for (const T& one : x) {
    if constexpr (sizeof(T) == 4) bits.push_back(std::bit_cast<unsigned>(one));
    else bits.push_back(static_cast<unsigned>(one) & 0xffff);
  }
  return bits;
}
template <class T>
std::vector<unsigned> bits_of_all(const OnDevice<T>& x) {
  return bits_of_all(x.back());
}

// ---- sm_80 ----

constexpr double kApproximate = 0x1p-21;

void add_numbers(Table& t) {
  constexpr size_t kCount = 4096;
  const char* const names[] = {"ex2.approx.ftz", "rcp.approx.ftz", "rsqrt.approx.ftz", "min.NaN", "mul.ftz"};
  for (size_t which = 0; which < 7; ++which) {
    const bool packs = which >= 5, exact = which >= 3;
    const char* const name = packs ? (which == 5 ? "cvt.rn.f16x2" : "cvt.rn.bf16x2") : names[which];
    t.row(name, exact ? Kind::kExact : Kind::kRelative, exact ? 0 : kApproximate, 80, [&t, which, packs] {
      std::vector<float> x = t.numbers(kCount), y = t.numbers(kCount);
      for (float& one : x) one *= which < 3 ? 100 : 1;
      if (which == 1 || which == 2)
        for (float& one : x) one = std::abs(one) + 1e-3f;
      const OnDevice z(5 * kCount, 1.0f);
      const OnDevice packed(2 * kCount, 1u);
      compute(kCount, OnDevice(x), OnDevice(y), z, packed);
      std::vector<unsigned> all = packs ? packed.back() : bits_of_all(z);
      const size_t first = (packs ? which - 5 : which) * kCount;
      return std::vector<unsigned>(all.begin() + static_cast<ptrdiff_t>(first),
                                   all.begin() + static_cast<ptrdiff_t>(first + kCount));
    });
  }
}

void add_warps(Table& t) {
  t.row("cp.async", Kind::kExact, 0, 80, [&] {
    const OnDevice to(32 * 16, uint8_t{1});
    copy_asynchronously(OnDevice(t.any<uint8_t>(32 * 16)), to);
    return bits_of_all(to);
  });
  t.row("ldmatrix, ldmatrix.trans, movmatrix", Kind::kExact, 0, 80, [&] {
    const OnDevice x(3 * 4 * 32, 0u);
    load_matrices(OnDevice(t.any<uint16_t>(4 * 64)), x);
    return bits_of_all(x);
  });
  for (const int32_t dtype : {KDA_F16, KDA_BF16, KDA_F32}) {
    const unsigned depth = dtype == KDA_F32 ? 8 : 16;
    const char* const name = dtype == KDA_F16    ? "mma.m16n8k16.f16"
                             : dtype == KDA_BF16 ? "mma.m16n8k16.bf16"
                                                 : "mma.m16n8k8.tf32";
    t.row(name, Kind::kSum, depth * 0x1p-22, 80, [&t, dtype, depth] {
      const size_t size = dtype == KDA_F32 ? 4 : 2;
      const OnDevice d(t.numbers(16 * 8));
      multiply_by_warp(dtype, OnDevice(t.operands(dtype, 16 * depth * size)),
                       OnDevice(t.operands(dtype, 8 * depth * size)), d);
      return bits_of_all(d);
    });
  }
}

// ---- Hopper ----

void add_meetings(Table& t) {
  t.row("mbarrier", Kind::kExact, 0, 90, [&] {
    const OnDevice seen(kSights, char{2});
    watch_barrier(OnDevice(t.any<uint8_t>(32)), seen);
    return bits_of_all(seen);
  });
  t.row("bar.sync, bar.arrive", Kind::kExact, 0, 90, [] {
    const OnDevice ways(32, char{0}), arrival(32, char{0});
    meet_by_two_ways(ways), meet_by_arrival(arrival);
    std::vector<unsigned> all = bits_of_all(ways);
    for (const unsigned x : bits_of_all(arrival)) all.push_back(x);
    return all;
  });
  t.row("elect.sync", Kind::kExact, 0, 90, [] {
    const OnDevice elected(2 * 2 * 32, char{7});
    elect_twice(elected);
    // Which lane it is, is the hardware's choice. Of each warp: how many are elected, and how many both times.
    const std::vector<char> all = elected.back();
    std::vector<unsigned> counts(2 * 3, 0);
    for (size_t i = 0; i < 64; ++i) {
      const char first = all[i], then = all[i + 64];
      counts[i / 32 * 3] += first, counts[i / 32 * 3 + 1] += then, counts[i / 32 * 3 + 2] += first & then;
    }
    return counts;
  });
  t.row("barrier.red.and", Kind::kExact, 0, 90, [&] {
    constexpr int kCases = 16;
    std::vector<char> x(kCases * 128, 1);
    for (int i = 0; i < kCases; ++i)
      if (t.below(2)) x[static_cast<size_t>(i) * 128 + t.below(128)] = 0;
    const OnDevice all(x.size(), char{7});
    vote(kCases, OnDevice(x), all);
    return bits_of_all(all);
  });
}

void add_copies(Table& t) {
  t.row("cp.async.bulk", Kind::kExact, 0, 90, [&] {
    const unsigned count = 1 + t.below(120);
    const OnDevice seen(2048, uint8_t{0}), to(4096, uint8_t{0});
    copy_bulk(count, OnDevice(t.any<uint8_t>(2048)), seen, to);
    std::vector<unsigned> all = bits_of_all(seen);
    for (const unsigned x : bits_of_all(to)) all.push_back(x);
    return all;
  });
  constexpr int64_t kB = 2, kT = 70, kHeads = 3, kChannels = 128;
  const auto tensor = [=](void* data) {
    kda_tensor x{};
    x.data = data, x.dtype = KDA_BF16, x.ndim = 4;
    const int64_t shape[] = {kB, kT, kHeads, kChannels};
    for (int64_t stride = 1, i = 3; i >= 0; stride *= shape[i--]) x.shape[i] = shape[i], x.stride[i] = stride;
    return x;
  };
  const auto corner = [&t] { return Corner{64 * t.below(2), t.below(kHeads), t.below(kT), t.below(kB)}; };
  t.row("cp.async.bulk.tensor, to shared memory", Kind::kExact, 0, 90, [&] {
    const OnDevice from(t.any<uint16_t>(kB * kT * kHeads * kChannels)), seen(2048, uint16_t{0});
    load_tile(tensor(from), corner(), seen);
    return bits_of_all(seen);
  });
  t.row("cp.async.bulk.tensor, to global memory", Kind::kExact, 0, 90, [&] {
    const OnDevice to(kB * kT * kHeads * kChannels, uint16_t{1});
    store_tile(tensor(to), corner(), OnDevice(t.any<uint16_t>(2048)));
    return bits_of_all(to);
  });
  t.row("copies between blocks, multicast, st.async", Kind::kExact, 0, 90, [&] {
    const OnDevice tile(t.any<uint16_t>(kB * kT * kHeads * kChannels)), seen(2 * 3072, uint16_t{0});
    const OnDevice notes(10, 7u);
    copy_between_blocks(OnDevice(t.any<uint8_t>(1024)), tensor(tile), corner(), seen, notes);
    std::vector<unsigned> all = bits_of_all(seen);
    for (const unsigned x : notes.back()) all.push_back(x);
    return all;
  });
  t.row("stmatrix.trans", Kind::kExact, 0, 90, [&] {
    const OnDevice to(4 * 64, uint16_t{0});
    store_matrices(OnDevice(t.any<unsigned>(4 * 32)), to);
    return bits_of_all(to);
  });
}

std::vector<unsigned> pairs(Table& t, int32_t dtype, size_t count) {
  const std::vector<uint8_t> bytes = t.operands(dtype, 4 * count);
  std::vector<unsigned> x(count);
  std::memcpy(x.data(), bytes.data(), bytes.size());
  return x;
}

void add_warpgroups(Table& t) {
  for (const int32_t dtype : {KDA_F16, KDA_BF16}) {
    t.row(dtype == KDA_F16 ? "max.f16x2, max.NaN.f16x2" : "max.bf16x2, max.NaN.bf16x2", Kind::kExact, 0, 90, [&] {
      constexpr size_t kCount = 1024;
      const OnDevice z(2 * kCount, 0u);
      const OnDevice x(pairs(t, dtype, kCount)), y(pairs(t, dtype, kCount));
      compute_larger(dtype, kCount, x, y, z);
      return bits_of_all(z);
    });
    const Product products[] = {{32, false, 128}, {32, false, 64},  {64, false, 128},       {128, false, 128},
                                {64, true, 128},  {128, true, 128}, {32, false, 128, true}, {32, false, 64, true}};
    for (const Product& p : products) {
      const std::string name =
          str("wgmma.m64n", p.N, dtype == KDA_F16 ? ".f16" : ".bf16", p.transposed ? ", B transposed" : "",
              ", rows of ", p.row_bytes, p.shared ? ", A in shared memory" : "");
      t.row(name.c_str(), Kind::kSum, p.depth() * 0x1p-22, 90, [&t, p, dtype] {
        const OnDevice a(t.operands(dtype, 64 * p.depth() * 2)), b(t.operands(dtype, p.N * p.depth() * 2));
        const OnDevice d(t.numbers(64 * p.N));
        multiply_by_warpgroup(dtype, p, a, b, true, d);
        return bits_of_all(d);
      });
    }
  }
}

// ---- Blackwell ----

void add_tensor_memory(Table& t) {
  t.row("tcgen05.st.32x32b, tcgen05.ld.32x32b", Kind::kExact, 0, 100, [&] {
    const OnDevice seen(128 * 64, 0u);
    keep_by_columns(64, 8, OnDevice(t.any<unsigned>(128 * 64)), seen);
    return bits_of_all(seen);
  });
  t.row("tcgen05.st.16x256b, tcgen05.ld.16x256b", Kind::kExact, 0, 100, [&] {
    const OnDevice seen(128 * 64, 0u);
    keep_by_fragments(64, 16, OnDevice(t.any<unsigned>(128 * 64)), seen);
    return bits_of_all(seen);
  });
  t.row("tcgen05.st.16x128b, tcgen05.ld.32x32b", Kind::kExact, 0, 100, [&] {
    const OnDevice seen(128 * 64, 0u);
    keep_by_operands(64, 16, OnDevice(t.any<unsigned>(128 * 64)), seen);
    return bits_of_all(seen);
  });
  // Operands without a swizzle: parts of eight rows of 16 bytes, first along K.
  const auto operand = [](unsigned rows, unsigned steps) {
    UmmaOperand o{.leading = rows * 16, .stride = 128, .bytes = rows * 32 * steps, .swizzling = 0, .offsets = {}};
    for (unsigned i = 0; i < steps; ++i) o.offsets[i] = i * rows * 32;
    return o;
  };
  t.row("tcgen05.cp.128x256b", Kind::kExact, 0, 100, [&] {
    constexpr unsigned kSteps = 2;
    const OnDevice seen(128 * 8 * kSteps, 0u);
    copy_to_tensor(kSteps, operand(128, kSteps), OnDevice(t.any<uint8_t>(128 * 32 * kSteps)), seen);
    return bits_of_all(seen);
  });
  for (const int32_t dtype : {KDA_F16, KDA_BF16, KDA_F32})
    for (const unsigned blocks : {1u, 2u}) {
      constexpr unsigned kSteps = 4, kN = 64;
      const unsigned M = 128 * blocks, depth = kSteps * 32 / (dtype == KDA_F32 ? 4 : 2);
      const std::string name = str("tcgen05.mma.cta_group::", blocks, ".kind::", dtype == KDA_F32 ? "tf32" : "f16",
                                   dtype == KDA_BF16 ? ", bf16" : "");
      t.row(name.c_str(), Kind::kSum, depth * 0x1p-22, 100, [&t, &operand, dtype, blocks, M] {
        UmmaCase p{};
        p.dtype = dtype, p.blocks = blocks, p.M = M, p.N = kN, p.steps = kSteps;
        p.a = operand(M / blocks, kSteps), p.b = operand(kN / blocks, kSteps);
        const OnDevice a(t.operands(dtype, blocks * p.a.bytes)), b(t.operands(dtype, blocks * p.b.bytes));
        const OnDevice d(t.numbers(M * kN));
        multiply_by_blocks(p, a, b, true, d);
        return bits_of_all(d);
      });
    }
}

int main_(int argc, char** argv) {
  if (argc < 2) return std::puts("usage: ptx_table FILE [SEED]"), 2;
  int major = 0, minor = 0;
  const bool found = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess;
  if (!found) return std::puts("there is no CUDA device"), 1;
  std::FILE* const file = std::fopen(argv[1], "w");
  if (!file) return std::perror(argv[1]), 1;
  Table table(file, argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1, 10 * major + minor);
  for (const auto& add : {add_numbers, add_warps, add_meetings, add_copies, add_warpgroups, add_tensor_memory})
    add(table);
  const bool written = !std::fclose(file);
  return written && cudaGetLastError() == cudaSuccess && !testing::Test::HasFailure() ? 0 : 1;
}

}  // namespace
}  // namespace kda::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return kda::test::main_(argc, argv);
}
