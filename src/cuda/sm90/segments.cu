// Few heads and long sequences on Hopper: sequences are cut into segments, which are scanned at once (math.md 6).
//
//   maps   each segment but the last of its sequence: [b | M]; the first one's outputs, too
//   scan   each other segment: its first state, through the maps of those before it, then chunk by chunk, with outputs
//
// Both by pairs of blocks (pair.h), a segment each, which prepare what they scan. The kernels follow each other in the
// stream. Lengths of packed sequences are known on the device alone: grids have room for any, and blocks that find no work
// end.
#include "cuda/cuda.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/segments.h"

namespace kda::cuda {
namespace {

using namespace sm90;

// Of a pair: blocks 2 i and 2 i + 1.
__device__ unsigned pair_number() { return blockIdx.x / 2; }
__device__ Piece piece_of(const ForwardProblem& p, const Cut& cut) {
  const auto HV = static_cast<unsigned>(p.HV);
  return Piece(p, cut, pair_number() / HV, pair_number() % HV);
}
__device__ OneStretch stretch_of(const Piece& at) {
  return OneStretch(
      {at.item, at.first / unsigned{kChunk}, (at.end + unsigned{kChunk} - 1) / unsigned{kChunk}, false, false});
}

// ---- maps: a warpgroup scans for b and one for M ----

constexpr unsigned kMapThreads = (2 + kPreparers) * kGroup;
// Of 128 a thread. Exact scores take more. A first segment has no M, but outputs.
template <class Scores>
constexpr int kMapRegisters = std::is_same_v<Scores, ExactScores> ? 144 : 152;
template <class Scores>
constexpr int kMapPreparerRegisters = 256 - kMapRegisters<Scores>;
constexpr int kIdleRegisters = 40;
static_assert(kScanRegisters + kIdleRegisters <= 2 * 144);

template <class T, class Scores, bool kWideGate>
__global__ void __cluster_dims__(2) __launch_bounds__(kMapThreads, 1)
    map_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
               const __grid_constant__ States states, const __grid_constant__ View v_new,
               const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Call call{p, x, states, v_new, &tiles};
  using Preparation = Preparation<T, Scores, kWideGate, PairSource<OneStretch>>;
  wait_for_stream();
  let_next_start();
  const Piece at = piece_of(p, segments.mapped);
  const Sequence s = at.exists ? sequence_at(p, p.args.in, p.args.states, at.item.n) : Sequence{};
  if (!s.live) return;  // both blocks
  const bool first = at.index == 0;
  const unsigned number = pair_number() / static_cast<unsigned>(p.HV);
  if (threadIdx.x == 0) {
    Ring{memory}.start(first ? 8 : 16);
    Preparation::start(memory);
    ptx::fence_barriers();
  }
  ptx::sync_cluster();                                                // barriers of both blocks are there
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows it is one
  if (group == 0) {
    if (first) {
      ptx::take_registers<kScanRegisters>();
      SegmentScan<T>(call, segments, memory).begin(at, s, number);
    } else {
      ptx::take_registers<kMapRegisters<Scores>>();
      SegmentScan<T>(call, segments, memory).map(at, number);
    }
  } else if (group == 1) {
    if (first) {
      ptx::give_registers<kIdleRegisters>();
    } else {
      ptx::take_registers<kMapRegisters<Scores>>();
      SegmentScan<T, false>(call, segments, memory).map(at, number);
    }
  } else {
    ptx::give_registers<kMapPreparerRegisters<Scores>>();
    Preparation preparation(call, memory, group - 2);
    preparation.plan({stretch_of(at), group - 2});
    preparation.run();
  }
  ptx::sync_cluster();  // nobody copies to a block that has ended, or arrives there
}

// ---- scan ----

template <class T, class Scores, bool kWideGate>
__global__ void __cluster_dims__(2) __launch_bounds__(kPairThreads, 1)
    scan_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                const __grid_constant__ States states, const __grid_constant__ View v_new,
                const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Call call{p, x, states, v_new, &tiles};
  using Preparation = Preparation<T, Scores, kWideGate, PairSource<OneStretch>>;
  // All but maps was there before they began to be made: only who needs them waits, if there are any.
  if (segments.mapped.total == 0) wait_for_stream();
  const Piece at = piece_of(p, segments.all);
  const bool tail = at.item.n == p.N;
  Sequence s{};
  if (tail) s.t0 = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T), s.length = p.T - s.t0;
  else if (at.exists) s = sequence_at(p, p.args.in, p.args.states, at.item.n);
  if (!s.live) {  // both blocks
    wait_for_stream();
    if (at.exists && threadIdx.x < kGroup)
      SegmentScan<T>(call, segments, memory).zero_outputs(at.item, s, tail ? 0 : at.first, tail ? s.length : at.end);
    return;
  }
  if (!at.exists || (at.index == 0 && at.end < s.length)) return;  // nobody's, or done with the maps
  if (threadIdx.x == 0) {
    Ring{memory}.start(8);
    Preparation::start(memory);
    for (const unsigned i : {0u, 1u}) ptx::init_barrier(memory + Shared::maps + i * 8, 1);
    ptx::fence_barriers();
  }
  ptx::sync_cluster();                                                // barriers of both blocks are there
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows it is one
  if (group == 0) {
    ptx::take_registers<kScanRegisters>();
    wait_for_stream();
    SegmentScan<T>(call, segments, memory).run(at, s, segments.mapped.first(p, at.item.n));
  } else {
    ptx::give_registers<kPreparerRegisters>();
    Preparation preparation(call, memory, group - 1);
    preparation.plan({stretch_of(at), group - 1});
    preparation.run();
  }
  ptx::sync_cluster();  // nobody copies to a block that has ended, or arrives there
}

// ---- how long segments are ----

// What a call takes, in cycles, about. Sequences count as equally long: lengths of packed ones are not known here.
struct Cost {
  static constexpr int64_t kMap = 3070, kScan = 2180;  // of a chunk, by a pair
  static constexpr int64_t kPass = 2300;               // of a map, in the scan
  static constexpr int64_t kLaunch = 36000;            // of one more kernel, and until its first chunk
  static constexpr int64_t kMost = 64;        // segments of a sequence: each passes through the maps of all before it
  int64_t pairs, heads, chunks, most_chunks;  // of a sequence: on average, at most

  explicit Cost(const ForwardProblem& p)
      : pairs(std::max(multiprocessors(p.args.exec.device_id) / 2, 1)),
        heads(p.N * p.HV),
        chunks(divide_up(p.B * p.T, kRows * p.N)),
        most_chunks(divide_up(p.T, kRows)) {}
  int64_t whole() const { return std::max(chunks, divide_up(heads * chunks, pairs)) * kScan; }
  // In segments of so many chunks. The first of each sequence is done when the others' maps are, the last has none.
  int64_t cut(int64_t each) const {
    const int64_t count = divide_up(chunks, each);
    return divide_up(heads * (count - 1), pairs) * each * (kMap + kScan) + kLaunch + (count - 2) * kPass;
  }
};

// The best length of segments, if there are to be several.
struct Choice {
  int64_t chunks, cycles = INT64_MAX;  // of a segment; of the call
  explicit Choice(const Cost& cost) : chunks(2 * divide_up(cost.most_chunks, 2 * Cost::kMost)) {
    chunks = std::max<int64_t>(chunks, 2);
    for (int64_t count = 2, least = chunks; count <= Cost::kMost; ++count) {
      const int64_t each = std::max(2 * divide_up(cost.chunks, 2 * count), least);
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
  const auto run = [&]<auto kKernel>(int64_t pairs, unsigned threads) {
    if (pairs > 0)
      launch<kKernel>(a.exec, dim3(static_cast<unsigned>(2 * pairs)), static_cast<int>(threads),
                      static_cast<int>(Shared::bytes), p, tokens, States(a), view_of(a.v_new), segments, tiles);
  };
  with_preparation(p, [&]<class T, class Scores, bool kWideGate>() {
    run.template operator()<map_kernel<T, Scores, kWideGate>>(segments.mapped.total * p.HV, kMapThreads);
    run.template operator()<scan_kernel<T, Scores, kWideGate>>((int64_t{segments.all.total} + p.varlen) * p.HV,
                                                               kPairThreads);
  });
}

}  // namespace kda::cuda
