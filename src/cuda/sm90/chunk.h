// What the warpgroups of the Hopper forward share: the operands of a chunk in shared memory, and who works on what.
#pragma once
#include "cuda/forward.h"
#include "cuda/ptx/sm90.h"

namespace kda::cuda::sm90 {

constexpr unsigned kRows = 32;   // tokens of a chunk here: two make a chunk of the contract
constexpr unsigned kSize = 128;  // K and V
static_assert(kChunk % kRows == 0, "states are kept between chunks");

constexpr unsigned kGroup = 128;    // threads of a warpgroup
constexpr unsigned kPreparers = 2;  // warpgroups of a block that prepare
// Named barriers: of the first warpgroups; when outputs are there.
constexpr unsigned kPreparerBarrier = 1, kScannerBarrier = 3, kOutputBarrier = 6;

// Rows of 128 channels lie as two halves, of 64 channels in 128 bytes each, kHalf bytes apart; 16-byte pieces of a row
// are swizzled as wgmma wants it (Swizzle::k128). Eight rows begin at multiples of 1024 bytes, so that a piece's place
// within its row is its number ^ row % 8.
constexpr unsigned kHalf = 8192, kRowBytes = 128, kTileBytes = kRows * kRowBytes;  // the latter: of a half of a chunk

// The operands of a chunk.
struct Stage {
  static constexpr unsigned k = 0, q = kTileBytes;           // kG; qG: fp16
  static constexpr unsigned kg = 2 * kHalf;                  // fp16; between its halves:
  static constexpr unsigned T = kg + kTileBytes;             // T diag(beta): fp16, rows of 64 bytes, Swizzle::k64
  static constexpr unsigned Aqk = T + kRows * 64;            // likewise
  static constexpr unsigned ell = kg + kHalf + kTileBytes;   // decay of each channel: f32
  static constexpr unsigned end = ell + kSize * 4;           // of what is prepared
  static constexpr unsigned v = (end + 1023) / 1024 * 1024;  // as given: the block's 64 columns
  static constexpr unsigned bytes = v + kTileBytes;
};
static_assert(Stage::Aqk + kRows * 64 == Stage::kg + kHalf);
constexpr unsigned kStages = 4;

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

// A block's shared memory, in bytes.
struct Shared {
  static constexpr unsigned full = 0, empty = full + 8 * kStages;  // mbarriers, of stages
  static constexpr unsigned places = empty + 8 * kStages;          // of each scanning warp: where outputs go
  static constexpr unsigned corrections = places + 4 * 16;         // likewise: an address
  static constexpr unsigned bad_values = corrections + 4 * 8;      // of each scanning thread
  static constexpr unsigned pair = bad_values + 2 * kGroup * 2;    // its number
  static constexpr unsigned known = pair + 8;                      // mbarrier: that is there
  static constexpr unsigned planned = known + 8;                   // mbarrier: heads have been planned
  static constexpr unsigned maps = planned + 8;                    // mbarriers: maps of segments are there
  static constexpr unsigned task = maps + 3 * 8;                   // the pair's, where there are segments
  static constexpr unsigned kTaskBytes = 96;
  static constexpr unsigned stages = 1024;
  static constexpr unsigned out = stages + kStages * Stage::bytes;  // a chunk's outputs, swizzled like the stages
  static constexpr unsigned benches = out + kTileBytes;
  static constexpr unsigned bytes = benches + kPreparers * BenchLayout::bytes;
};
static_assert(Shared::task % 16 == 0 && Shared::task + Shared::kTaskBytes <= Shared::stages);
static_assert(Shared::bytes <= 227 * 1024, "what a block of Hopper may have");

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// x, of which the compiler knows nothing: what is computed from it is computed again in every round of a loop, instead
// of waiting in registers that are not there.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// x, which is the same in all lanes of a warp: so that the compiler knows it.
__device__ inline unsigned uniform(unsigned x) { return __reduce_or_sync(kAll, x); }

// What a call works on.
struct Tiles;
struct StateTiles;
struct Call {
  const ForwardProblem& p;
  const Tokens& x;
  const States& states;
  const TypedView& v_new;
  const Tiles* tiles;
  const StateTiles* state_tiles = nullptr;  // of whole heads
};

// A ring of stages: chunks are counted over all that a pair of blocks scans (and with them the states that the copy
// engine brings in front of a head's chunks). Each block scans 64 columns, and has every second chunk prepared by the
// other: see pair.h.
struct Ring {
  unsigned memory;  // address of shared memory
  __device__ unsigned stage(unsigned chunk) const { return memory + Shared::stages + chunk % kStages * Stage::bytes; }
  __device__ unsigned full(unsigned chunk) const { return memory + Shared::full + chunk % kStages * 8; }
  // (That of the block that prepares the chunk counts.)
  __device__ unsigned empty(unsigned chunk) const { return memory + Shared::empty + chunk % kStages * 8; }
  __device__ void wait_full(unsigned chunk) const { ptx::wait_barrier(full(chunk), chunk / kStages % 2); }
  __device__ bool is_full(unsigned chunk) const { return ptx::is_phase_over(full(chunk), chunk / kStages % 2); }
  // Until nobody needs what the stage had before.
  __device__ void wait_empty(unsigned chunk) const { ptx::wait_barrier(empty(chunk), chunk / kStages % 2); }
  // By one thread of each scanning warp, when it has read the chunk, and before the first ones: for so many warps.
  __device__ void release(unsigned chunk, unsigned warps = 1) const {
    ptx::arrive_at(ptx::address_in(empty(chunk), chunk % 2), warps);
  }
  __device__ void open(unsigned warps = 1) const {
    for (unsigned i = 0; i < kStages; ++i) release(i, warps);
  }
  // By one thread, before fence_barriers(). readers: scanning warps of both blocks. kGroup threads fill a stage and one
  // asks for v; with that alone the other block's comes.
  __device__ void start(unsigned readers) const {
    for (unsigned i = 0; i < kStages; ++i)
      ptx::init_barrier(full(i), 1 + (i % 2 == ptx::rank() ? kGroup : 0)), ptx::init_barrier(empty(i), readers);
  }
};

// Which pair of a call a cluster is, by all threads of its blocks: number(), by one of them, tells it, and it comes
// while the blocks meet. Barriers of both are known then.
template <class Number>
__device__ void meet(unsigned memory, const Number& number) {
  const unsigned pair = memory + Shared::pair, known = memory + Shared::known;
  const bool tells = threadIdx.x == 64 && ptx::rank() == 0;
  unsigned x = 0;
  ptx::arrive_at_cluster();
  if (tells) x = number();
  ptx::wait_for_cluster();
  if (!tells) return;
  for (const unsigned i : {0u, 1u}) ptx::send(ptx::address_in(pair, i), x, ptx::address_in(known, i));
}
// By one thread, before fence_barriers(); and then, by who wants to know it.
__device__ inline void expect_pair(unsigned memory) {
  ptx::init_barrier(memory + Shared::known, 1);
  ptx::arrive_expecting(memory + Shared::known, sizeof(unsigned));
}
__device__ inline unsigned known_pair(unsigned memory) {
  ptx::wait_barrier(memory + Shared::known, 0);
  return uniform(ptx::load_shared(memory + Shared::pair));
}

// A value head of a sequence.
struct Item {
  unsigned n, hv;
};

}  // namespace kda::cuda::sm90
