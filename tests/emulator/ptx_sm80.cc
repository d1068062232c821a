// What instructions of whole warps do (src/cuda_host/include/cuda/ptx/sm80.h). Fragments are those of the PTX manual,
// "Matrix fragments for mma.m16n8k16" and ".m16n8k8".
#include "cuda/ptx/sm80.h"

#include <array>
#include <cstring>
#include <vector>

#include "f16_values.h"

namespace kda::emulator {

const std::vector<float>& f16_values() {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 16);
    for (unsigned i = 0; i < all.size(); ++i) all[i] = f16_to_float(static_cast<uint16_t>(i));
    return all;
  }();
  return values;
}

}  // namespace kda::emulator

namespace kda::cuda::ptx {
namespace {

// ---- 8x8 matrices ----

struct Rows {
  unsigned from;    // address of a row
  uint16_t row[8];  // what is there
  unsigned got[4];  // registers
};

// Every lane reads the row that it names; then the rows become registers.
template <bool kTransposed>
void load_rows(unsigned (&x)[4], unsigned from, Where where) {
  Rows own{.from = from, .row = {}, .got = {}};
  emulator::load(own.row, from, sizeof own.row, where, false);
  const auto exchange = [](void* const* all) {
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned i = 0; i < 4; ++i) {
        const auto element = [&](unsigned e) -> unsigned {  // of the lane's pair
          const unsigned row = kTransposed ? l % 4 * 2 + e : l / 4, column = kTransposed ? l / 4 : l % 4 * 2 + e;
          return emulator::of<Rows>(all, 8 * i + row).row[column];
        };
        emulator::of<Rows>(all, l).got[i] = element(0) | element(1) << 16;
      }
  };
  emulator::together(kTransposed ? "ldmatrix.trans" : "ldmatrix", own, exchange, where);
  for (unsigned i = 0; i < 4; ++i) x[i] = own.got[i];
}

// ---- products ----

struct Fragments {
  unsigned a[4], b[2];
  float d[4];
};

// d [16,8] += a [16,kDepth] b [kDepth,8], with kPairs elements a register. value(x, e): element e of those that
// register x holds. Sums are rounded once; the hardware's are somewhat less exact.
template <unsigned kDepth, unsigned kPairs, class Value>
void multiply(void* const* all, const Value& value) {
  constexpr unsigned kSteps = kDepth / 4 / kPairs;  // registers of a row of a
  float a[16][kDepth], b[8][kDepth];
  for (unsigned l = 0; l < 32; ++l) {
    const Fragments& own = emulator::of<Fragments>(all, l);
    const unsigned i = l / 4, j = l % 4 * kPairs;
    for (unsigned e = 0; e < kPairs; ++e) {
      for (unsigned r = 0; r < 2 * kSteps; ++r) a[i + r % 2 * 8][j + e + r / 2 * 4 * kPairs] = value(own.a[r], e);
      for (unsigned r = 0; r < kSteps; ++r) b[i][j + e + r * 4 * kPairs] = value(own.b[r], e);
    }
  }
  for (unsigned l = 0; l < 32; ++l)
    for (unsigned e = 0; e < 4; ++e) {
      const float *x = a[l / 4 + e / 2 * 8], *y = b[l % 4 * 2 + e % 2];
      double sum = 0;
      for (unsigned k = 0; k < kDepth; ++k) sum += double{x[k]} * y[k];
      float& d = emulator::of<Fragments>(all, l).d[e];
      d = static_cast<float>(d + sum);
    }
}
void multiply_f16(void* const* all) {
  const float* values = emulator::f16_values().data();
  multiply<16, 2>(all, [values](unsigned x, unsigned e) { return values[e ? x >> 16 : x & 0xffff]; });
}
template <unsigned kDepth>
void multiply_bf16(void* const* all) {
  multiply<kDepth, 2>(all, [](unsigned x, unsigned e) { return __uint_as_float(e ? x & 0xffff0000u : x << 16); });
}
void multiply_tf32(void* const* all) {
  multiply<8, 1>(all, [](unsigned x, unsigned) { return __uint_as_float(x & ~0x1fffu); });
}

void by_warp(const char* what, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
             void (*compute)(void* const*)) {
  Fragments own;
  std::memcpy(own.a, a, sizeof a), std::memcpy(own.d, d, sizeof d);
  own.b[0] = b0, own.b[1] = b1;
  emulator::together(what, own, compute, Where::current());
  std::memcpy(d, own.d, sizeof d);
}

}  // namespace

void load_matrices(unsigned (&x)[4], unsigned from, Where where) { load_rows<false>(x, from, where); }
void load_transposed(unsigned (&x)[4], unsigned from, Where where) { load_rows<true>(x, from, where); }

unsigned transposed(unsigned x) {
  struct Own {
    unsigned given, got;
  } own{x, 0};
  const auto exchange = [](void* const* all) {
    for (unsigned l = 0; l < 32; ++l) {
      const auto element = [&](unsigned row, unsigned column) {
        return emulator::of<Own>(all, row * 4 + column / 2).given >> column % 2 * 16 & 0xffff;
      };
      emulator::of<Own>(all, l).got = element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16;
    }
  };
  emulator::together("movmatrix", own, exchange, Where::current());
  return own.got;
}

void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  by_warp("mma of f16", d, a, b0, b1, multiply_f16);
}
void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  by_warp("mma of bf16", d, a, b0, b1, multiply_bf16<16>);
}
void mma8(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  by_warp("mma of bf16, 8 deep", d, {a[0], a[1], 0, 0}, b, 0, multiply_bf16<8>);
}
void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  by_warp("mma of tf32", d, a, b0, b1, multiply_tf32);
}

}  // namespace kda::cuda::ptx
