// What the warpgroups of the Hopper forward share: the operands of a chunk in shared memory, and who works on what.
#pragma once
#include "cuda/forward.h"
#include "cuda/ptx/sm90.h"

namespace kda::cuda::sm90 {

constexpr unsigned kRows = 32;   // tokens of a chunk here: two make a chunk of the contract
constexpr unsigned kSize = 128;  // K and V
static_assert(kChunk % kRows == 0, "states are kept between chunks");

constexpr unsigned kScanners = 2, kPreparers = 2, kGroup = 128;  // warpgroups, and their threads
constexpr unsigned kThreads = (kScanners + kPreparers) * kGroup;
constexpr unsigned kPreparerBarrier = 1,
                   kScannerBarrier = kPreparerBarrier + kPreparers;  // named barriers: of the first groups

// Rows of 128 channels lie as two halves, of 64 channels in 128 bytes each, kHalf bytes apart; 16-byte pieces of a row are
// swizzled as wgmma wants it (Swizzle::k128). Eight rows begin at multiples of 1024 bytes, so that a piece's place within
// its row is its number ^ row % 8.
constexpr unsigned kHalf = 8192, kRowBytes = 128, kTileBytes = kRows * kRowBytes;  // the latter: of a half of a chunk

// The operands of a chunk.
struct Stage {
  static constexpr unsigned k = 0, q = kRows * kRowBytes;  // kG; qG: fp16
  static constexpr unsigned kg = 2 * kHalf;                // fp16
  static constexpr unsigned v = kg + kRows * kRowBytes;    // as given
  static constexpr unsigned T = 4 * kHalf;                 // T diag(beta): fp16, rows of 64 bytes, Swizzle::k64
  static constexpr unsigned Aqk = T + kRows * 64;          // likewise
  static constexpr unsigned ell = Aqk + kRows * 64;        // decay of each channel: f32
  static constexpr unsigned end = ell + kSize * 4;
  static constexpr unsigned bytes = (end + 1023) / 1024 * 1024;  // stages follow each other
};
constexpr unsigned kStages = 4, kQueue = 7;  // and tasks that helpers have found
constexpr unsigned kQueueBytes = (kQueue * 16 + 8 + 15) / 16 * 16;

constexpr unsigned kStrideA = 36;

// What each preparing warpgroup has for itself: all at constant distances from one address.
struct BenchLayout {
  static constexpr unsigned rows = 0;                              // 64 rows of scores
  static constexpr unsigned columns = 2 * kHalf;                   // 32 columns; between their halves what follows:
  static constexpr unsigned totals = columns + kRows * kRowBytes;  // of 8 rows each, per channel: f32
  static constexpr unsigned factors = totals + 4 * kSize * 4;      // of rows, two chunks
  static constexpr unsigned kFactorBytes = 4 * kRows * 4;
  static constexpr unsigned gate = factors + 2 * kFactorBytes;  // bias per channel; rate
  static constexpr unsigned plans = gate + (kSize + 4) * 4;
  static constexpr unsigned kPlanBytes = 160;
  static constexpr unsigned bad = plans + kPlanBytes;  // rows, of each warp
  static constexpr unsigned raw = bad + 16;            // mbarrier: raw rows are there
  static_assert(raw + 8 <= columns + kHalf);
  static constexpr unsigned A = columns + kHalf + kRows * kRowBytes;  // Akk: f32, kStrideA apart
  static constexpr unsigned end = A + kRows * kStrideA * 4;
  static constexpr unsigned bytes = (end + 1023) / 1024 * 1024;  // benches follow each other
};

// All of a block's shared memory, in bytes.
struct Shared {
  static constexpr unsigned stages = 0;
  static constexpr unsigned benches = stages + kStages * Stage::bytes;
  static constexpr unsigned out =
      benches + (kPreparers - 1) * BenchLayout::bytes + BenchLayout::end;  // of each scanning warp
  static constexpr unsigned kOutBytes = kRows * 32;                        // of 16 columns: see staged()
  static constexpr unsigned places = out + kScanners * 4 * kOutBytes;      // of each scanning warp: where outputs go
  static constexpr unsigned queue = places + kScanners * 4 * 16;           // of helpers' tasks
  static constexpr unsigned tasks = queue + kQueueBytes;                   // mbarriers: of tasks, of stages
  static constexpr unsigned full = tasks + 2 * 8 * kQueue;
  static constexpr unsigned empty = full + 8 * kStages;
  static constexpr unsigned bad_values = empty + 8 * kStages;                   // of each scanning thread
  static constexpr unsigned corrections = bad_values + kScanners * kGroup * 4;  // of each scanning warp: an address
  static constexpr unsigned bytes = corrections + kScanners * 4 * 8;
};
static_assert(Shared::out % 256 == 0);
static_assert(Shared::bytes <= 227 * 1024, "what a block of Hopper may have");

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
struct Help;
struct Tiles;
struct Call {
  const ForwardProblem& p;
  const Tokens& x;
  const States& states;
  const View& v_new;
  const Help& help;
  const Tiles* tiles;
  unsigned first = blockIdx.x;  // item of the block
};

// A stage of the ring by the number of its chunk, counted over all chunks of a block.
struct Ring {
  unsigned memory;  // address of shared memory
  __device__ unsigned stage(unsigned chunk) const { return memory + Shared::stages + chunk % kStages * Stage::bytes; }
  __device__ unsigned full(unsigned chunk) const { return memory + Shared::full + chunk % kStages * 8; }
  __device__ unsigned empty(unsigned chunk) const { return memory + Shared::empty + chunk % kStages * 8; }
  __device__ void wait_full(unsigned chunk) const { ptx::wait_barrier(full(chunk), chunk / kStages % 2); }
  // Until the chunk that had the stage before has been read.
  __device__ void wait_empty(unsigned chunk) const {
    while (!is_empty(chunk)) {
    }
  }
  __device__ bool is_empty(unsigned chunk) const {
    return chunk < kStages || ptx::has_phase_ended(empty(chunk), (chunk / kStages + 1) % 2);
  }
};

// By one thread, before fence_barriers(). arrivals: that fill a stage.
__device__ inline void start_ring(const Ring& ring, unsigned arrivals) {
  for (unsigned i = 0; i < kStages; ++i)
    ptx::init_barrier(ring.full(i), arrivals), ptx::init_barrier(ring.empty(i), kScanners * 4);
}

// A value head of a sequence, or the rows behind the last sequence. A block has numbers blockIdx.x, + gridDim.x, ..
struct Item {
  unsigned n, hv;
  __device__ Item(const ForwardProblem& p, unsigned number)
      : n(number / static_cast<unsigned>(p.HV)), hv(number - n * static_cast<unsigned>(p.HV)) {}
  __device__ bool exists(const ForwardProblem& p) const { return n < p.N + p.varlen; }
  __device__ bool is_tail(const ForwardProblem& p) const { return n == p.N; }
};

}  // namespace kda::cuda::sm90
