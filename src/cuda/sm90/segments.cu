// Few heads and long sequences on Hopper: sequences are cut into segments, which are scanned at once (math.md 6).
//
//   prepare   every chunk once, by all SMs: its operands go to the workspace      two warpgroups that prepare
//   maps      [b | M] of each segment but the last of its sequence                two that scan, one warp that fetches
//   scan      each segment: its first state, through the maps of those before it, then chunk by chunk, with outputs
//
// The kernels follow each other in the stream. Lengths of packed sequences are known on the device alone: grids have room
// for any, and blocks that find no work end.
#include "cuda/cuda.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/segments.h"

namespace kda::cuda {
namespace {

using namespace sm90;

// ---- prepare ----

// Hands the block's share of all chunks to its preparers: by a warp. Those of one head after another's; the last ones first:
// what was stored last is in the L2 cache when maps begin.
__device__ void hand_out(const ForwardProblem& p, const Cut& cut) {
  unsigned q = 0;
  const auto hand_on = [&](const Task& task) {
    if (threadIdx.x % 32 == 0) Queue::hand_on(q, task);
    ++q;
  };
  const uint64_t all = static_cast<uint64_t>(p.HV) * cut.total, first = all * blockIdx.x / gridDim.x;
  for (uint64_t i = all * (blockIdx.x + 1) / gridDim.x; i > first;) {
    const auto hv = static_cast<unsigned>(--i / cut.total), number = static_cast<unsigned>(i % cut.total);
    const unsigned n = cut.sequence(p, number), chunk = number - cut.first(p, n);
    const Sequence s = sequence_at(p, p.args.in, p.args.states, n);
    if (s.live && static_cast<int64_t>(chunk) * kRows < s.length) hand_on({{n, hv}, chunk, number, true});
  }
  for (unsigned i = 0; i < TaskSource::kPreparers; ++i) hand_on({{}, 0, 0, false});
}

// Stores what the preparers have done: by one thread.
__device__ void store_images(const Segments& segments, const Ring<0>& ring) {
  for (unsigned q = 0;; ++q) {
    const Task task = Queue::take(q);
    if (!task.exists) break;
    ring.wait_full(q);
    ptx::copy_bulk_to_global(segments.image(task.item.hv, task.image), ring.stage(q), kImageBytes);
    ptx::commit_bulk();
    ptx::wait_for_bulk_reads<0>();
    ptx::arrive(ring.empty(q), 8);
    Queue::free(q);
  }
  ptx::wait_for_bulk<0>();
}

constexpr unsigned kPrepareThreads = (1 + TaskSource::kPreparers) * kGroup;
// Of 128 a thread.
constexpr int kPreparerRegisters = 152, kRestRegisters = 56;
static_assert(TaskSource::kPreparers * kPreparerRegisters + kRestRegisters <= 4 * 128);
constexpr unsigned kPrepareBytes = Shared::bytes<0, TaskSource::kPreparers>;
static_assert(kPrepareBytes <= 227 * 1024, "what a block of Hopper may have");

template <class T, class Scores, bool kWideGate>
__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                   const __grid_constant__ States states, const __grid_constant__ View v_new,
                   const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Call call{p, x, states, v_new, &tiles};
  using Preparation = Preparation<T, Scores, kWideGate, TaskSource>;
  const Ring<0> ring{memory};
  if (threadIdx.x == 0) {
    ring.start(kGroup);
    Preparation::start(memory);
    Queue::start();
    ptx::fence_barriers();
  }
  __syncthreads();  // barriers are there
  wait_for_stream();
  let_next_start();
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows it is one
  if (group > 0) {
    ptx::take_registers<kPreparerRegisters>();
    Preparation preparation(call, memory, group - 1);
    preparation.plan(TaskSource(group - 1));
    preparation.run();
    return;
  }
  ptx::give_registers<kRestRegisters>();
  if (threadIdx.x < 32) {
    hand_out(p, segments.chunks);
  } else if (threadIdx.x == 32) {
    store_images(segments, ring);
  }
}

// ---- maps, and the scan ----

constexpr unsigned kScanners = kSize / 64;  // warpgroups; one warp of another fetches
constexpr int kScanRegisters = 224, kOthersRegisters = 56;
static_assert((kScanners * kScanRegisters + kOthersRegisters) * kGroup <= 64 * 1024);

template <class T, bool kMaps>
__global__ void __launch_bounds__(kThreads, 1)
    segment_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                   const __grid_constant__ States states, const __grid_constant__ View v_new,
                   const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Call call{p, x, states, v_new, &tiles};
  const Ring<kSize> ring{memory};
  const unsigned number = blockIdx.x / static_cast<unsigned>(p.HV), hv = blockIdx.x % static_cast<unsigned>(p.HV);
  // b of the first segment, then b and M of each: nobody needs M of the first.
  const bool linear = kMaps && number > 0 && number % 2 == 0;
  if (threadIdx.x == 0) {
    ring.start(kFullArrivals);
    ptx::fence_barriers();
  }
  for (unsigned i = threadIdx.x * 16; linear && i < kStages<kSize> * kTileBytes; i += kThreads * 16)
    for (const unsigned half : {0u, kTileBytes})
      ptx::store_shared4(ring.stage(i / kTileBytes) + Stage::v + half + i % kTileBytes, make_uint4(0, 0, 0, 0));
  // Lengths and slots were there before prepare began: only what that and maps made is waited for.
  const Piece at(p, kMaps ? segments.mapped : segments.all, kMaps ? (number + 1) / 2 : number, hv);
  const bool tail = at.item.n == p.N;
  Sequence s{};
  if (tail) s.t0 = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T), s.length = p.T - s.t0;
  else if (at.exists) s = sequence_at(p, p.args.in, p.args.states, at.item.n);
  const unsigned first_map = kMaps ? 0 : segments.mapped.first(p, at.item.n);
  __syncthreads();  // barriers and zeros are there
  wait_for_stream();
  if (kMaps) let_next_start();
  if (!at.exists || (linear && at.index == 0)) return;
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows it is one
  if (group < kScanners) {
    ptx::take_registers<kScanRegisters>();
    SegmentScan<T> scan(call, segments, memory);
    if constexpr (kMaps) {
      if (s.live) scan.map(at, s, linear, (number + 1) / 2);
    } else if (s.live) {
      scan.run(at, s, first_map);
    } else {
      if (tail) scan.zero_outputs(at.item, s, 0, s.length);
      else scan.zero_outputs(at.item, s, at.first, at.end);
    }
  } else {
    ptx::give_registers<kOthersRegisters>();
    if (!s.live || threadIdx.x / 32 != kScanners * 4) return;
    ptx::fence_global_for_async();  // maps were stored by threads
    Producer producer(call, segments, ring);
    if constexpr (kMaps) {
      producer.chunks<true>(at, !linear);
    } else {
      if (at.index) producer.maps(hv, first_map + 1, first_map + at.index);
      producer.chunks<false>(at, true);
    }
  }
}

// ---- how long segments are ----

// What a call takes, in cycles of an SM, about. Sequences count as equally long: lengths of packed ones are not known here.
struct Cost {
  static constexpr int64_t kPrepare = 3500, kMap = 1500, kScan = 1640;  // of a chunk
  static constexpr int64_t kWhole = 2350;                               // likewise, of a pair of SMs
  static constexpr int64_t kScanBytes = 20;                             // of a chunk, for the memory
  static constexpr int64_t kPass = 2500;                                // of a map, in the scan
  static constexpr int64_t kLaunches = 15000;                           // of two more
  static constexpr int64_t kMost = 64;         // segments of a sequence: each passes through the maps of all before it
  int64_t blocks, heads, chunks, most_chunks;  // of a sequence: on average, at most

  explicit Cost(const ForwardProblem& p)
      : blocks(multiprocessors(p.args.exec.device_id)),
        heads(p.N * p.HV),
        chunks(divided(p.B * p.T, kRows * p.N)),
        most_chunks(divided(p.T, kRows)) {}
  static int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t prepared() const { return divided(heads * chunks, blocks) * kPrepare; }
  int64_t whole() const { return std::max(chunks, divided(heads * chunks, std::max<int64_t>(blocks / 2, 1))) * kWhole; }
  // In segments of so many chunks.
  int64_t cut(int64_t each) const {
    const int64_t count = divided(chunks, each);
    const int64_t maps = divided(heads * (2 * count - 3), blocks) * each * kMap;
    const int64_t scan = std::max(divided(heads * count, blocks) * each * kScan, heads * chunks * kScanBytes);
    return prepared() + kLaunches + maps + (count - 2) * kPass + scan;
  }
};

// The best length of segments, if there are to be several.
struct Choice {
  int64_t chunks, cycles = INT64_MAX;  // of a segment; of the call
  explicit Choice(const Cost& cost) : chunks(2 * Cost::divided(cost.most_chunks, 2 * Cost::kMost)) {
    chunks = std::max<int64_t>(chunks, 2);
    for (int64_t count = 2, least = chunks; count <= Cost::kMost; ++count) {
      const int64_t each = std::max(2 * Cost::divided(cost.chunks, 2 * count), least);
      if (each >= cost.chunks) continue;
      if (const int64_t c = cost.cut(each); c < cycles) chunks = each, cycles = c;
    }
  }
};

unsigned segment_tokens(const ForwardProblem& p) { return static_cast<unsigned>(Choice(Cost(p)).chunks) * kRows; }

}  // namespace

const char* forward_segments_sm90_why_not(const ForwardProblem& p) {
  if (const char* reason = forward_chunk_sm90_why_not(p)) return reason;
  if (p.N == 0) return "needs a sequence to cut";
  if (p.args.exec.flags & KDA_BATCH_INVARIANT) return "takes no KDA_BATCH_INVARIANT: bits tell where it cuts";
  if ((p.B * p.T / kRows + p.N + 1) * p.HV > INT32_MAX) return "takes at most 2^31 chunks";
  return nullptr;
}

const char* forward_segments_sm90_unsuited(const ForwardProblem& p) {
  const Cost cost(p);
  return Choice(cost).cycles < cost.whole() / 10 * 9 ? nullptr : "sequences in one piece are as fast";
}

uint64_t forward_segments_sm90_workspace(const ForwardProblem& p) { return Segments::bytes(p, segment_tokens(p)); }

void forward_segments_sm90(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const Segments segments(p, segment_tokens(p), a.exec.workspace);
  const Tokens tokens(p, a.in, a.o);
  const Tiles tiles(p);
  const auto run = [&]<auto kKernel>(int64_t blocks, unsigned threads, unsigned bytes) {
    if (blocks > 0)
      launch<kKernel>(a.exec, dim3(static_cast<unsigned>(blocks)), static_cast<int>(threads), static_cast<int>(bytes),
                      p, tokens, States(a), view_of(a.v_new), segments, tiles);
  };
  with_preparation(p, [&]<class T, class Scores, bool kWideGate>() {
    run.template operator()<prepare_kernel<T, Scores, kWideGate>>(
        std::min<int64_t>(segments.chunks.total * p.HV, multiprocessors(a.exec.device_id)), kPrepareThreads,
        kPrepareBytes);
  });
  constexpr unsigned kScanBytes = Shared::bytes<kSize, 0>;
  with_type(p, [&]<class T>() {
    run.template operator()<segment_kernel<T, true>>((2 * int64_t{segments.mapped.total} - 1) * p.HV, kThreads,
                                                     kScanBytes);
    run.template operator()<segment_kernel<T, false>>((int64_t{segments.all.total} + p.varlen) * p.HV, kThreads,
                                                      kScanBytes);
  });
}

}  // namespace kda::cuda
