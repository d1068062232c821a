// What the warpgroups of the Hopper forward share: the operands of a chunk in shared memory, and who works on what.
#pragma once
#include "cuda/forward.h"
#include "cuda/ptx/sm90.h"

namespace kda::cuda::sm90 {

constexpr unsigned kRows = 32;   // tokens of a chunk here: two make a chunk of the contract
constexpr unsigned kSize = 128;  // K and V
static_assert(kChunk % kRows == 0, "states are kept between chunks");

constexpr unsigned kGroup = 128;                               // threads of a warpgroup
constexpr unsigned kThreads = 3 * kGroup;                      // of a block that scans
constexpr unsigned kPreparerBarrier = 1, kScannerBarrier = 3;  // named barriers: of the first warpgroups

// Rows of 128 channels lie as two halves, of 64 channels in 128 bytes each, kHalf bytes apart; 16-byte pieces of a row are
// swizzled as wgmma wants it (Swizzle::k128). Eight rows begin at multiples of 1024 bytes, so that a piece's place within
// its row is its number ^ row % 8.
constexpr unsigned kHalf = 8192, kRowBytes = 128, kTileBytes = kRows * kRowBytes;  // the latter: of a half of a chunk

// The operands of a chunk.
struct Stage {
  static constexpr unsigned k = 0, q = kTileBytes;          // kG; qG: fp16
  static constexpr unsigned kg = 2 * kHalf;                 // fp16; between its halves:
  static constexpr unsigned T = kg + kTileBytes;            // T diag(beta): fp16, rows of 64 bytes, Swizzle::k64
  static constexpr unsigned Aqk = T + kRows * 64;           // likewise
  static constexpr unsigned ell = kg + kHalf + kTileBytes;  // decay of each channel: f32
  static constexpr unsigned end = ell + kSize * 4;          // of what is prepared
  static constexpr unsigned v =
      (end + 1023) / 1024 * 1024;  // as given: 64 columns, and the others where a block has them
};
static_assert(Stage::Aqk + kRows * 64 == Stage::kg + kHalf);
// Of a ring. Where nobody scans there is one for each preparer.
template <unsigned kColumns>
constexpr unsigned kStages = kColumns > 0 ? 4 : 3;
constexpr unsigned kMostStages = 4;

constexpr unsigned kStrideA = 36;

// What each preparing warpgroup has for itself: all at constant distances from one address.
struct BenchLayout {
  static constexpr unsigned columns = 2 * kHalf;  // behind 64 rows of scores, 32 columns; between their halves:
  static constexpr unsigned totals = columns + kTileBytes;     // of 8 rows each, per channel: f32
  static constexpr unsigned factors = totals + 4 * kSize * 4;  // of rows, two chunks
  static constexpr unsigned kFactorBytes = 4 * kRows * 4;
  static constexpr unsigned plans = factors + 2 * kFactorBytes;
  static constexpr unsigned kPlanBytes = 256;
  static constexpr unsigned bad = plans + kPlanBytes;  // rows, of each warp
  static constexpr unsigned raw = bad + 16;            // mbarrier: raw rows are there
  static_assert(raw + 8 <= columns + kHalf);
  static constexpr unsigned wide = columns + kHalf + kTileBytes;  // with `columns`, f32 numbers; between their halves:
  static constexpr unsigned given = wide + kTileBytes;            // for exact scores: totals as given
  static constexpr unsigned decays = given + 4 * kSize * 4;       // and decays between rows of warps
  static constexpr unsigned A = wide + kHalf + kTileBytes;        // -Akk: f32, kStrideA apart
  static_assert(decays + 6 * kSize * 2 <= wide + kHalf);
  static constexpr unsigned end = A + kRows * kStrideA * 4;  // the first bench has room behind it, for 16 x 32 bytes
  static constexpr unsigned bytes = (end + 1023) / 1024 * 1024;  // benches follow each other
};

// A block's shared memory, in bytes. kColumns: how many columns of a state it scans; kBenches: warpgroups that prepare.
struct Shared {
  static constexpr unsigned full = 0, empty = full + 8 * kMostStages;  // mbarriers, of stages
  static constexpr unsigned places = empty + 8 * kMostStages;          // of each scanning warp: where outputs go
  static constexpr unsigned corrections = places + 8 * 16;             // likewise: an address
  static constexpr unsigned bad_values = corrections + 8 * 8;          // of each scanning thread
  static constexpr unsigned pair = bad_values + 2 * kGroup * 2;        // its number; mbarrier: heads have been planned
  static constexpr unsigned tasks = places;                            // and their mbarriers, where nobody scans
  static constexpr unsigned stages = 1024;
  static constexpr unsigned kOutBytes = kRows * 32;  // of a scanning warp's 16 columns: see staged()

  template <unsigned kColumns>
  static constexpr unsigned kStageBytes = Stage::v + kColumns / 64 * kTileBytes;
  template <unsigned kColumns>
  static constexpr unsigned out = stages + kStages<kColumns>* kStageBytes<kColumns>;
  template <unsigned kColumns>
  static constexpr unsigned benches = out<kColumns> + kColumns / 16 * kOutBytes;
  template <unsigned kColumns, unsigned kBenches>
  static constexpr unsigned bytes = benches<kColumns> + kBenches* BenchLayout::bytes;
};

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// x, of which the compiler knows nothing: what is computed from it is computed again in every round of a loop, instead of
// waiting in registers that are not there.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// x, which is the same in all lanes of a warp: so that the compiler knows it.
__device__ inline unsigned uniform(unsigned x) { return __reduce_or_sync(kAll, x); }

// What a call works on.
struct Tiles;
struct Call {
  const ForwardProblem& p;
  const Tokens& x;
  const States& states;
  const View& v_new;
  const Tiles* tiles;
};

// A ring of stages: chunks are counted over all that a block scans, or prepares.
template <unsigned kColumns>
struct Ring {
  // Two blocks scan 64 columns each, and have every second chunk prepared by the other: see pair.h.
  static constexpr bool kPaired = kColumns == 64;
  static constexpr unsigned kStages = sm90::kStages<kColumns>;
  unsigned memory;  // address of shared memory
  __device__ unsigned stage(unsigned chunk) const {
    return memory + Shared::stages + chunk % kStages * Shared::kStageBytes<kColumns>;
  }
  __device__ unsigned full(unsigned chunk) const { return memory + Shared::full + chunk % kStages * 8; }
  // (With pairs, that of the block that prepares the chunk counts.)
  __device__ unsigned empty(unsigned chunk) const { return memory + Shared::empty + chunk % kStages * 8; }
  __device__ void wait_full(unsigned chunk) const { ptx::wait_barrier(full(chunk), chunk / kStages % 2); }
  __device__ bool is_full(unsigned chunk) const { return ptx::is_phase_over(full(chunk), chunk / kStages % 2); }
  // Until the chunk that had the stage before has been read.
  __device__ void wait_empty(unsigned chunk) const {
    if (chunk >= kStages) ptx::wait_barrier(empty(chunk), (chunk / kStages + 1) % 2);
  }
  // By one thread of each warp that has read the chunk.
  __device__ void release(unsigned chunk) const {
    if constexpr (kPaired) ptx::arrive_at(ptx::address_in(empty(chunk), chunk % 2));
    else ptx::arrive(empty(chunk));
  }
  // By one thread, before fence_barriers(). arrivals: that fill a stage. With pairs there is one more, with which the other
  // block's comes alone.
  __device__ void start(unsigned arrivals) const {
    for (unsigned i = 0; i < kStages; ++i) {
      const bool here = !kPaired || i % 2 == ptx::rank();
      ptx::init_barrier(full(i), kPaired + (here ? arrivals : 0)), ptx::init_barrier(empty(i), 8);
    }
  }
};

// A value head of a sequence.
struct Item {
  unsigned n, hv;
};

}  // namespace kda::cuda::sm90
