// What the roles of the wide kernel on Hopper share: a block's shared memory, its barriers, and the items that it works
// on.
#pragma once
#include <cstddef>

#include "cuda/backward/wide_call.h"
#include "cuda/engine/tiles.h"

namespace kda::cuda::engine {

constexpr unsigned kWideWarps = 8;                                     // multipliers: 16 channels each
constexpr unsigned kWideThreads = 32 * kWideWarps + kGroup;            // and a warpgroup of helpers
constexpr unsigned kMultiplierRegisters = 240, kHelperRegisters = 24;  // all that the pool of 168 x 384 has
static_assert(kMultiplierRegisters * 2 + kHelperRegisters == 168 * 3);
constexpr unsigned kMultiplierBarrier = 1;  // named barrier of the multipliers

// Shared memory. Each tile is swizzled (Swizzle::k128): 64 channels or value columns in a row of 128 bytes.
struct WideHalf {
  unsigned char bytes[kChunk][kRowBytes];
};
struct WideTile {  // 64 tokens
  WideHalf halves[2];
};
struct WideState {  // a row for each value column
  unsigned char halves[2][kSize][kRowBytes];
};

// What a block works on: a chunk of a value head. The value heads of a q/k head follow one another.
struct WideItem {
  unsigned b, t0, rows, hv;  // rows 0: no more items
  unsigned h, h_row, row;    // of q and k; of states; of sums
  unsigned first, last;      // flags: first, last of the q/k head's value heads
};
struct WideItemAt {
  static constexpr unsigned rows = offsetof(WideItem, rows), h = offsetof(WideItem, h), hv = offsetof(WideItem, hv);
  static constexpr unsigned last = offsetof(WideItem, last), t0 = offsetof(WideItem, t0), b = offsetof(WideItem, b);
  static constexpr unsigned first = offsetof(WideItem, first);
};

struct alignas(1024) WideShared {
  struct Raw {
    WideTile q, k, g;
  };
  Raw raw[2];             // of two items; dq, dk, dg take their places
  WideHalf d_o_dv[2][2];  // d_o and dv of each half of the columns: together one operand of 128 rows
  WideTile v_new;
  WideState S, dS;
  WideHalf dA, B;           // [64][64]. Right of the diagonal's blocks: sums that warps pass to others
  float2 norms[2][kChunk];  // of two items: factors that make q and k as long as 1
  float4 factors[kChunk];   // r and -r (y . dy), of q and of k
  float bias[kSize];
  float diagonal[kChunk];  // of dv v_new^T
  WideItem items[2];
  // mbarriers. .._full: that part is there; big_read: d_o .. dS have been read; staged: dq, dk, dg are in place of q,
  // k, g.
  uint64_t raw_full[2], norms_full[2], values_full, states_full, big_read, scores_full, dots_full, factors_full, staged;
  unsigned unused;
};
static_assert(sizeof(WideShared) <= 227 * 1024, "what a block of Hopper may have");
struct WideAt {
  static constexpr unsigned raw = offsetof(WideShared, raw), norms = offsetof(WideShared, norms);
  static constexpr unsigned items = offsetof(WideShared, items), raw_full = offsetof(WideShared, raw_full);
  static constexpr unsigned norms_full = offsetof(WideShared, norms_full), B = offsetof(WideShared, B);
  static constexpr unsigned dA = offsetof(WideShared, dA), values_full = offsetof(WideShared, values_full);
  static constexpr unsigned states_full = offsetof(WideShared, states_full);
  static constexpr unsigned big_read = offsetof(WideShared, big_read);
  static constexpr unsigned scores_full = offsetof(WideShared, scores_full);
  static constexpr unsigned dots_full = offsetof(WideShared, dots_full);
  static constexpr unsigned factors_full = offsetof(WideShared, factors_full), staged = offsetof(WideShared, staged);
  static constexpr unsigned d_o_dv = offsetof(WideShared, d_o_dv), v_new = offsetof(WideShared, v_new);
  static constexpr unsigned S = offsetof(WideShared, S), dS = offsetof(WideShared, dS);
  static constexpr unsigned factors = offsetof(WideShared, factors), diagonal = offsetof(WideShared, diagonal);
  static constexpr unsigned bias = offsetof(WideShared, bias), unused = offsetof(WideShared, unused);
};

constexpr unsigned kWideHalf = sizeof(WideHalf), kStateHalf = kSize * kRowBytes;
constexpr unsigned kValuesBytes = 3 * sizeof(WideTile), kStatesBytes = 2 * sizeof(WideState);

// The offset of a piece (8 channels) of a row in a tile with halves of `half` bytes.
__device__ inline unsigned swizzled(unsigned row, unsigned piece, unsigned half) {
  return piece / 8 * half + row * kRowBytes + ((piece % 8 ^ row % 8) << 4);
}

// Addresses in shared memory, for the n-th item.
struct WidePlace {
  unsigned base;
  __device__ unsigned raw(unsigned n) const { return base + WideAt::raw + n % 2 * sizeof(WideShared::Raw); }
  __device__ unsigned norms(unsigned n) const { return base + WideAt::norms + n % 2 * kChunk * 8; }
  __device__ unsigned item(unsigned n) const { return base + WideAt::items + n % 2 * sizeof(WideItem); }
  __device__ unsigned raw_full(unsigned n) const { return base + WideAt::raw_full + n % 2 * 8; }
  __device__ unsigned norms_full(unsigned n) const { return base + WideAt::norms_full + n % 2 * 8; }
  __device__ void wait_raw(unsigned n) const { ptx::wait_barrier(raw_full(n), n / 2 % 2); }
  __device__ void wait_norms(unsigned n) const { ptx::wait_barrier(norms_full(n), n / 2 % 2); }
  __device__ void wait(unsigned barrier, unsigned n) const { ptx::wait_barrier(base + barrier, n % 2); }
  __device__ unsigned field(unsigned n, unsigned offset) const { return ptx::load_shared(item(n) + offset); }
  // y . dy of a pair of tokens, from warp w: of q and k of the first, of q and k of the second.
  __device__ unsigned dots(unsigned w, unsigned pair) const {
    return base + (w / 4 ? WideAt::B : WideAt::dA) + swizzled(pair, 4 + w % 4, 0);
  }
  // rowsum(S dS) of warp w's channel c.
  __device__ unsigned state_dots(unsigned w, unsigned c) const {
    return base + (w / 4 ? WideAt::B : WideAt::dA) + swizzled(w % 4 * 4 + c / 4, 2, 0) + c % 4 * 4;
  }

  __device__ void start_barriers() const {
    for (const unsigned n : {0u, 1u}) ptx::init_barrier(raw_full(n), 1), ptx::init_barrier(norms_full(n), 2);
    ptx::init_barrier(base + WideAt::values_full, 1), ptx::init_barrier(base + WideAt::states_full, 1);
    ptx::init_barrier(base + WideAt::big_read, kWideWarps);
    ptx::init_barrier(base + WideAt::scores_full, kWideWarps), ptx::init_barrier(base + WideAt::dots_full, kWideWarps);
    ptx::init_barrier(base + WideAt::factors_full, 1), ptx::init_barrier(base + WideAt::staged, kWideWarps);
    ptx::fence_barriers();
  }
};

// The TMA descriptors: boxes of 64 channels of 64 tokens, or of 128 columns of a state. Where K or V is 64, what lies
// outside of tensors becomes zeros.
struct WideMaps {
  CUtensorMap q{}, k{}, g{}, d_o{}, v_new{}, dv{}, h{}, dh{}, dq{}, dk{}, dg{};
  unsigned raw_bytes, states_bytes;  // of q, k and g, and of S and dS: halves without channels do not come

  explicit WideMaps(int64_t K)
      : raw_bytes(static_cast<unsigned>(sizeof(WideShared::Raw) * K / kSize)),
        states_bytes(static_cast<unsigned>(kStatesBytes * K / kSize)) {}
  static CUtensorMap tokens(const kda_tensor& t) {
    return make_map<4>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, t.data,
                       {.sizes = {size(t, 3), size(t, 2), size(t, 1), size(t, 0)},
                        .strides = {map_stride(t, 2), map_stride(t, 1), map_stride(t, 0)},
                        .box = {kRowBytes / 2, 1, kChunk, 1}},
                       CU_TENSOR_MAP_SWIZZLE_128B);
  }
  static CUtensorMap states(const kda_tensor& t) {  // [rows][HV][V][K]
    return make_map<4>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, t.data,
                       {.sizes = {size(t, 3), size(t, 2), size(t, 1), size(t, 0)},
                        .strides = {map_stride(t, 2), map_stride(t, 1), map_stride(t, 0)},
                        .box = {kRowBytes / 2, kSize, 1, 1}},
                       CU_TENSOR_MAP_SWIZZLE_128B);
  }

 private:
  static cuuint64_t size(const kda_tensor& t, int i) { return static_cast<cuuint64_t>(t.shape[i]); }
};

// All that a call gives the kernel.
struct WideCall {
  const ForwardProblem& p;
  const Tokens& x;
  const WidePlaces& places;
  const WideRows& rows;
  const WideMaps& maps;
  // K; whether both halves of tiles have channels; the multipliers that have some; the sums of an item: see WidePlaces.
  __device__ unsigned channels() const { return static_cast<unsigned>(x.K); }
  __device__ bool both_halves() const { return channels() > kSizeHalf; }
  __device__ unsigned warps() const { return channels() / 16; }
  __device__ unsigned sums() const { return places.each; }
};

}  // namespace kda::cuda::engine
