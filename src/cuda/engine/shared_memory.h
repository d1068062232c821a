// The shared memory of a CTA of the Hopper forward, and its named barriers.
//
// Kernels use addresses in shared memory, not pointers, and add the offsets of members to them: Stage, ScratchLayout
// and Shared below.
#pragma once
#include <cstddef>

#include "cuda/call/states.h"
#include "cuda/ptx/sm90.h"

namespace kda::cuda::engine {

constexpr unsigned kRows = 32;  // tokens of a chunk in these kernels; two make a chunk of the interface
// Channels and value columns in these kernels. K and V are this or half of it. Behind a half are zeros: TMA fills them
// in where tensors end. Products with them change nothing, and nothing of them is loaded or stored otherwise.
constexpr unsigned kSize = 128;
constexpr unsigned kSizeHalf = kSize / 2;
static_assert(kChunk % kRows == 0, "states are kept between chunks");

constexpr unsigned kGroup = 128;    // threads of a warpgroup
constexpr unsigned kProducers = 2;  // warpgroups of a CTA that prepare chunks
constexpr unsigned kStages = 4;     // of the ring, each for one chunk

// The named barriers of a CTA. Each has 128 threads, kMapsAreRead has 256.
struct NamedBarrier {
  enum : unsigned {
    // The threads of the first producer, three times a chunk; the second producer has the next barrier. Protects
    // scratch memory between a producer's steps.
    kProducer = 1,
    // The threads of the consumer that has outputs, once a chunk (the vote on column scales) and once a head.
    // Protects the output tile until TMA has read it, states and b in global memory until they are stored, and maps
    // of segments until all warps have read them.
    kConsumer = 3,
    // The threads of the consumer that makes M of a segment's map: the vote on column scales. Protects M in its stage
    // and in global memory until it is complete.
    kMapConsumer = 4,
    // The threads of both consumers of a segment, twice. First all reads of the last stages are done, so M may be
    // written to one of them. Then M has been copied from there, so maps may come to these stages.
    kMapsAreRead = 5,
    // Three warps of the consumer arrive, and the one that stores outputs waits. Protects the output tile until it is
    // complete.
    kOutputsAreThere = 6,
    // On Blackwell, the threads of the consumer that has outputs, twice a chunk; the one that makes M has the next
    // barrier. Protects left operands in tensor memory until they are complete.
    kProducts = 7
  };
};

// A row of 128 channels lies as two halves, kHalf bytes apart, each with 64 channels in 128 bytes. The 16-byte pieces
// of a row are swizzled as wgmma wants it (Swizzle::k128). Groups of eight rows begin at multiples of 1024 bytes, so
// a piece's place within its row is its number ^ row % 8.
constexpr unsigned kHalf = 8192, kRowBytes = 128, kTileBytes = kRows * kRowBytes;
struct Tile {  // half of the channels of a chunk
  unsigned char bytes[kRows][kRowBytes];
};
struct Square {  // 32 x 32 scores in fp16: rows of 64 bytes, Swizzle::k64
  unsigned char bytes[kRows][64];
};
struct Half {  // half of the channels of k and of q
  Tile k, q;
};

// The order of channels in a stage. An accumulator of wgmma gives a lane two neighbouring places of every eight: lane q
// of four has places 8 j + 2 q and one more, for each j. The order is permuted so that each lane owns `run` adjacent
// channels and can store them with one access: in every block of 4 x run channels, run q belongs to lane q.
//   kAsGiven    places are channels
//   kRunsOfFour for the forward that keeps states: blocks of 16, which a step of wgmma adds up in whatever order, so
//               that results keep their bits
//   kRunsOfEight for the reverse scan, whose accesses are then of 16 bytes
struct Order {
  unsigned run;
  // The place of an even channel.
  KDA_BOTH constexpr unsigned place(unsigned channel) const {
    return channel / (4 * run) * (4 * run) + channel % run / 2 * 8 + channel % (4 * run) / run * 2;
  }
  // How many channels the one in place 8 j + 2 q is behind that in place 2 q.
  KDA_BOTH constexpr unsigned offset(unsigned j) const { return j / (run / 2) * (4 * run) + j % (run / 2) * 2; }
};
constexpr Order kAsGiven{2}, kRunsOfFour{4}, kRunsOfEight{8};
constexpr Order order_of(bool keeps, bool reversed) { return reversed ? kRunsOfEight : keeps ? kRunsOfFour : kAsGiven; }

// A stage of the ring: the operands of a chunk. In their place it may have a head's first state (StateTiles), or half
// of a segment's map.
struct alignas(1024) StageMemory {
  Half keys[2];   // kG and qG, fp16
  Tile kg_first;  // kg, fp16; between its halves:
  Square T, Aqk;  // (I + Akk)^-1 diag(beta); scores of queries
  Tile kg_second;
  float ell[kSize];      // decay of each channel over the chunk
  alignas(1024) Tile v;  // as given: the CTA's 64 columns
};
// Offsets within a stage, in bytes.
struct Stage {
  static constexpr unsigned k = offsetof(StageMemory, keys[0].k), q = offsetof(StageMemory, keys[0].q);
  static constexpr unsigned kg = offsetof(StageMemory, kg_first);
  static constexpr unsigned T = offsetof(StageMemory, T), Aqk = offsetof(StageMemory, Aqk);
  static constexpr unsigned ell = offsetof(StageMemory, ell),
                            end = ell + sizeof(StageMemory::ell);  // of what the producer makes
  static constexpr unsigned v = offsetof(StageMemory, v), bytes = sizeof(StageMemory);
};
static_assert(offsetof(StageMemory, keys[1].k) == Stage::k + kHalf);
static_assert(offsetof(StageMemory, kg_second) == Stage::kg + kHalf);

constexpr unsigned kStrideA = 36;  // floats from a row of A to the next

// The scratch memory of a producer.
struct alignas(1024) ScratchMemory {
  Half keys[2];                          // raw q and k, then rows of the score product
  Tile columns_first;                    // raw g of 16 bits, then columns of the score product; between its halves:
  float totals[4][kSize];                // sums of log2 decays of each warp's eight rows, per channel
  float factors[2][4][kRows];            // for each row of two chunks: norms of q and k, beta, the diagonal
  alignas(16) unsigned char plans[256];  // Producer::Plans: those of two chunks, and their source
  unsigned bad[4];                       // the first bad row that each warp knows of
  // mbarrier: raw rows are there. The thread that asks TMA for q, k and a 16-bit g arrives and expects their bytes;
  // all threads of the producer wait. Protects the raw rows until they are complete.
  uint64_t raw;
  unsigned char unused[744];
  Tile columns_second;
  Tile wide_first;                  // with the columns, decays in f32; between its halves, for AnyGateScores:
  float given[4][kSize];            // totals, with decays as given
  unsigned short decays[6][kSize];  // powers of two between the rows of two warps, bf16
  unsigned char unused_too[512];
  Tile wide_second;
  float A[kRows][kStrideA];  // -Akk
};
// Offsets within scratch memory, in bytes.
struct ScratchLayout {
  static constexpr unsigned columns = offsetof(ScratchMemory, columns_first);
  static constexpr unsigned totals = offsetof(ScratchMemory, totals), factors = offsetof(ScratchMemory, factors);
  static constexpr unsigned kFactorBytes = sizeof(ScratchMemory::factors) / 2;
  static constexpr unsigned plans = offsetof(ScratchMemory, plans), kPlanBytes = sizeof(ScratchMemory::plans);
  static constexpr unsigned bad = offsetof(ScratchMemory, bad), raw = offsetof(ScratchMemory, raw);
  static constexpr unsigned wide = offsetof(ScratchMemory, wide_first), given = offsetof(ScratchMemory, given);
  static constexpr unsigned decays = offsetof(ScratchMemory, decays), A = offsetof(ScratchMemory, A);
  static constexpr unsigned end = A + sizeof(ScratchMemory::A);  // the first producer's has PlannedItems behind it
  static constexpr unsigned bytes = sizeof(ScratchMemory);
};
static_assert(offsetof(ScratchMemory, keys[1].k) == kHalf);
static_assert(offsetof(ScratchMemory, columns_second) == ScratchLayout::columns + kHalf);
static_assert(offsetof(ScratchMemory, wide_second) == ScratchLayout::wide + kHalf);

// The whole shared memory of a CTA.
struct alignas(1024) SharedMemory {
  // mbarriers of the stages: they protect a stage while it is filled and while it is read.
  //
  // full: the stage is complete. Consumers wait for it. A chunk that this CTA prepares has 129 arrivals: 128 threads
  // of the producer, and the thread that asks for v and expects its bytes. A chunk that the other CTA prepares has
  // one arrival: the thread there that asks for v, and expects the bytes of v and of the operands. For a head's first
  // state, one thread of the producer makes all these arrivals.
  //
  // empty: all consumers have read the stage and its copy in the other CTA. A warp of the producer waits for it,
  // before the stage is filled. A lane of each consumer warp of both CTAs arrives: 8 arrivals, or 16 in the kernel
  // with segments. Only the barrier in the CTA that prepares the chunk is used.
  uint64_t full[kStages], empty[kStages];
  // values_empty: v of the stage, in whose place U leaves, is empty, too. Only calls that keep U by TMA use it. A lane
  // of the warp that stores outputs arrives in both CTAs: 2 arrivals. A warp of the producer waits for it before it
  // asks for v. Like that of `empty`, the barrier is that of the CTA that prepares the chunk.
  uint64_t values_empty[kStages];
  uint4 places[4];                        // for each consumer warp: where outputs go
  unsigned short bad_values[2 * kGroup];  // for each consumer thread: ColumnScale::bad()
  unsigned pair;                          // the CTA pair's number
  // mbarrier: `pair` is there. The CTA's first thread arrives and expects the 4 bytes, which CTA 0 of the pair sends.
  // Threads wait for it before they read `pair`.
  alignas(8) uint64_t known;
  // mbarrier: the consumer's first work items are planned. The first thread of producer 0 arrives, the consumer
  // waits. Protects the first PlannedItems.
  uint64_t planned;
  // mbarriers: a segment's map is there. The thread that asks for the map arrives and expects its 64 KiB, the
  // consumer waits. Each protects two stages with a map until it is complete.
  uint64_t maps[2];
  alignas(16) unsigned char task[96];  // Task of the pair, in the kernel with segments
  // On Blackwell. mbarriers, one for each consumer: its products are done. The commit behind them arrives, the consumer
  // waits. Each protects sums in tensor memory until they are complete, and operands until they are read. Then the
  // address of tensor memory.
  uint64_t products[2];
  unsigned tensors;
  StageMemory stages[kStages];
  Tile out;  // a chunk's outputs, swizzled like the stages
  ScratchMemory scratch[kProducers];
};
// Offsets within shared memory, in bytes.
struct Shared {
  static constexpr unsigned full = offsetof(SharedMemory, full), empty = offsetof(SharedMemory, empty);
  static constexpr unsigned places = offsetof(SharedMemory, places);
  static constexpr unsigned values_empty = offsetof(SharedMemory, values_empty);
  static constexpr unsigned bad_values = offsetof(SharedMemory, bad_values);
  static constexpr unsigned pair = offsetof(SharedMemory, pair), known = offsetof(SharedMemory, known);
  static constexpr unsigned planned = offsetof(SharedMemory, planned), maps = offsetof(SharedMemory, maps);
  static constexpr unsigned task = offsetof(SharedMemory, task), kTaskBytes = sizeof(SharedMemory::task);
  static constexpr unsigned products = offsetof(SharedMemory, products), tensors = offsetof(SharedMemory, tensors);
  static constexpr unsigned stages = offsetof(SharedMemory, stages), out = offsetof(SharedMemory, out);
  static constexpr unsigned scratch = offsetof(SharedMemory, scratch), bytes = sizeof(SharedMemory);
};
static_assert(Shared::bytes <= 227 * 1024, "what a CTA of Hopper may have");

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// Returns x, but the compiler does not know that. So what depends on the result is computed again in every round of a
// loop, instead of waiting in registers, of which there are too few.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Returns x, which is the same in all lanes of a warp, in such a way that the compiler knows it.
__device__ inline unsigned uniform(unsigned x) { return __reduce_or_sync(kAll, x); }

}  // namespace kda::cuda::engine
