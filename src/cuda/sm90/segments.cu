// Few heads and long sequences on Hopper: sequences are cut into pieces, which are scanned at once (math.md 6).
//
// A pair of blocks (pair.h) has a piece of a head of a sequence. It makes the map of that, [b | M], and when those of all
// pieces before are there, too, it has the state in front of the next piece, and goes on with that, with outputs: two passes
// (two_passes.h). Who has the first piece needs no map and begins with outputs; who has the last one has nothing to do. Where pieces
// are long, outputs are made with the maps, but for what the state in front of the piece adds: one pass (one_pass.h).
//
// Nobody waits but for pairs with lower numbers, and numbers are given to running pairs, so that all need not be resident.
// Lengths of packed sequences are known on the device alone: grids have room for any, and pairs that find no work end.
#include "cuda/cuda.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/one_pass.h"
#include "cuda/sm90/two_passes.h"

namespace kda::cuda {
namespace {

using namespace sm90;

constexpr unsigned kThreads = (2 + kPreparers) * kGroup;
// Of 128 a thread. In two passes: of who makes b and M, of who prepares, and of outputs, when M has been made.
constexpr int kMapRegisters = 144, kPreparerRegisters = 256 - kMapRegisters;
constexpr int kScanRegisters = 216, kIdleRegisters = 40;
static_assert(kScanRegisters + kIdleRegisters <= 256);
// In one: of who makes b and M, with outputs, of who prepares, and in the end, when all others are idle.
constexpr int kOffsetRegisters = 160, kMatrixRegisters = 144, kFewRegisters = 104, kMostRegisters = 240;
static_assert(kOffsetRegisters + kMatrixRegisters + 2 * kFewRegisters <= 512);
static_assert(kMostRegisters + 3 * kIdleRegisters <= 512);

template <class T, class Scores, bool kWideGate, bool kOnePass>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    segments_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                    const __grid_constant__ States states, const __grid_constant__ View v_new,
                    const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Call call{p, x, states, v_new, &tiles};
  using Source = TaskSource<kOnePass>;
  using Preparation = Preparation<T, Scores, kWideGate, Source>;
  // What comes first is done by a warp each: barriers, hints, the pair's number.
  if (threadIdx.x == 0) {
    Ring{memory}.start(16);
    Preparation::start(memory);
    for (const unsigned i : {0u, 1u}) ptx::init_barrier(memory + Shared::maps + i * 8, 1);
    if (kOnePass) OnePassScan<T>::start(memory);
    expect_pair(memory);
    ptx::fence_barriers();
  }
  tiles.prefetch(threadIdx.x - 32);
  wait_for_stream();
  meet(memory, [&] { return segments.number(); });
  if (threadIdx.x < 32) {
    const Task task(segments.cut, known_pair(memory));
    if (threadIdx.x == 0) task.share();
  }
  __syncthreads();  // the task is here
  const unsigned kind = uniform(Task::shared().kind);
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows it is one
  const bool maps = kind == Task::kMaps;
  if (kind < Task::kBegins) {
    const Task& task = Task::shared();
    // (So that garbage in cu_seqlens lets nobody wait forever.)
    if (threadIdx.x == 0 && ptx::rank() == 0 && task.number < segments.cut.total)
      ptx::add_release(segments.flag(task.hv, task.number), Segments::kWhole);
    if (kind == Task::kZeros && group == 0)
      TwoPassScan<T>(call, segments, memory).zero_outputs(task.item(), task.sequence(), task.first, task.end);
  } else if (group == 0) {
    // (Ways do not meet in between: then ptxas makes products wait for each other, "insufficient register resources".)
    if (kOnePass && maps) {
      ptx::take_registers<kOffsetRegisters>();
      OnePassScan<T>(call, segments, memory).map();
      ptx::take_registers<kMostRegisters>();  // all others have left theirs
      OnePassScan<T>(call, segments, memory).outputs();
    } else if (kOnePass) {
      ptx::take_registers<kScanRegisters>();
      TwoPassScan<T>(call, segments, memory).first_outputs();
    } else {
      if (maps) {
        ptx::take_registers<kMapRegisters>();
        TwoPassScan<T>(call, segments, memory).map();
      }
      ptx::take_registers<kScanRegisters>();  // where there are maps, those of M leave theirs
      TwoPassScan<T>(call, segments, memory).outputs();
    }
  } else if (group == 1) {
    if (kOnePass && maps) {
      ptx::take_registers<kMatrixRegisters>();
      OnePassScan<T, false>(call, segments, memory).map();
    } else if (maps) {
      ptx::take_registers<kMapRegisters>();
      TwoPassScan<T, false>(call, segments, memory).map();
    }
    ptx::give_registers<kIdleRegisters>();
  } else {
    ptx::give_registers<kOnePass ? kFewRegisters : kPreparerRegisters>();
    Preparation preparation(call, memory, group - 2);
    preparation.plan(Source(group - 2));
    preparation.run();
    if (kOnePass && maps) {
      OnePassScan<T>::leave();
      ptx::give_registers<kIdleRegisters>();
    }
  }
  ptx::sync_cluster();  // nobody copies to a block that has ended, or arrives there
}

// ---- how long segments are ----

// May outputs be made with maps? Not where more is wanted of states within a piece, nor in f16, where O_b and O_M might end and o
// does not; and where gates have no bound preparation takes so long that it does not pay.
bool allows_one_pass(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  return a.in.q.dtype == KDA_BF16 && anchored(p) && !present(a.checkpoints) && !present(a.h) && !present(a.v_new);
}

// What a call takes, in cycles, about. Sequences count as equally long: lengths of packed ones are not known here.
struct Cost {
  static constexpr int64_t kScan = 2220;   // of a chunk, by a pair
  static constexpr int64_t kPass = 2300;   // of a map, in front of the scan
  static constexpr int64_t kTurn = 12000;  // from the last chunk of a map to the first with outputs
  static constexpr int64_t kMost = 64;     // pieces of a sequence: each passes through the maps of all before it
  bool one_pass;
  int64_t map, then;                          // of a chunk, by a pair: of a map, and then of its outputs
  int64_t begin;                              // until a first piece is where maps are
  int64_t pairs, heads, chunks, most_chunks;  // of a sequence: on average, at most

  Cost(const ForwardProblem& p, bool one_pass)
      : one_pass(one_pass),
        map(one_pass ? 3300 : 2900),
        then(one_pass ? 350 : kScan),
        begin(one_pass ? 0 : 13000),
        pairs(std::max(multiprocessors(p.args.exec.device_id) / 2, 1)),
        heads(p.N * p.HV),
        chunks(divide_up(p.B * p.T, kRows * p.N)),
        most_chunks(divide_up(p.T, kRows)) {}
  int64_t whole() const { return std::max(chunks, divide_up(heads * chunks, pairs)) * kScan; }
  // The first piece takes no longer than the map of another.
  int64_t lead(int64_t each) const { return std::max(each, (each * map - begin + kScan) / (2 * kScan) * 2); }
  int64_t pieces(int64_t each) const { return 1 + divide_up(std::max<int64_t>(chunks - lead(each), 0), each); }
  // Cut into pieces of so many chunks. (In two passes the pair of the last one has nothing to do.)
  int64_t cut(int64_t each) const {
    const int64_t count = pieces(each);
    return divide_up(heads * (count - !one_pass), pairs) * (each * (map + then) + kTurn + (count - 2) * kPass);
  }
};

// The best length of pieces, if there are to be several.
struct Choice {
  static constexpr int64_t kLeast = kStages;  // chunks: a map's stages are all those of the ring
  int64_t chunks, cycles = INT64_MAX;         // of a piece; of the call
  explicit Choice(const Cost& cost) : chunks(std::max(2 * divide_up(cost.most_chunks, 2 * Cost::kMost), kLeast)) {
    for (int64_t count = 3, least = chunks; count <= Cost::kMost; ++count) {
      const int64_t share = 2 * ((count - 1) * Cost::kScan + cost.map);
      const int64_t each = std::max(2 * divide_up(cost.chunks * Cost::kScan + cost.begin, share), least);
      if (cost.pieces(each) < 3) continue;
      if (const int64_t c = cost.cut(each); c < cycles) chunks = each, cycles = c;
    }
  }
};

// Measured, 12 heads: of pieces of 1,500 tokens one pass takes 1.03 of the time of two, of 12,000 .89.
constexpr int64_t kLong = 64;  // chunks of a piece

Cut cut_of(const ForwardProblem& p) {
  Cost cost(p, false);
  int64_t each = Choice(cost).chunks;
  if (each >= kLong && allows_one_pass(p)) cost = Cost(p, true), each = Choice(cost).chunks;
  int64_t lead = cost.lead(each);
  // The last piece had better be shorter than others, as its pair passes through one map more, but only by two chunks. (Numbers
  // of pieces of packed sequences need a first one that is as long as others.)
  if (!p.varlen) lead = std::clamp<int64_t>(cost.chunks - (cost.pieces(each) - 1) * each + 2, 2, lead) / 2 * 2;
  return Cut(p, static_cast<unsigned>(lead) * kRows, static_cast<unsigned>(each) * kRows, cost.one_pass);
}

}  // namespace

const char* forward_segments_sm90_why_not(const ForwardProblem& p) {
  if (const char* reason = forward_chunk_sm90_why_not(p)) return reason;
  if (p.N == 0) return "needs a sequence to cut";
  if (p.args.exec.flags & KDA_BATCH_INVARIANT) return "takes no KDA_BATCH_INVARIANT: bits tell where it cuts";
  if ((p.B * p.T / kRows + p.N + 1) * p.HV > INT32_MAX) return "takes at most 2^31 chunks";
  return nullptr;
}

const char* forward_segments_sm90_unsuited(const ForwardProblem& p) {
  const Cost cost(p, false);
  return Choice(cost).cycles < cost.whole() / 10 * 9 ? nullptr : "sequences in one piece are as fast";
}

uint64_t forward_segments_sm90_workspace(const ForwardProblem& p) { return Segments::bytes(p, cut_of(p)); }

void forward_segments_sm90(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const Segments segments(p, cut_of(p), a.exec.workspace);
  const int64_t pairs = (int64_t{segments.cut.total} + p.varlen) * p.HV;
  if (pairs == 0) return;
  KDA_CUDA(cudaMemsetAsync(segments.flags, 0, Segments::flag_bytes(p, segments.cut), stream_of(a.exec)));
  with_preparation(p, [&]<class T, class Scores, bool kWideGate>() {
    const auto start = [&]<bool kOnePass>() {
      launch<segments_kernel<T, Scores, kWideGate, kOnePass>>(
          a.exec, dim3(static_cast<unsigned>(2 * pairs)), static_cast<int>(kThreads), static_cast<int>(Shared::bytes),
          p, Tokens(p, a.in, a.o), States(a), view_of(a.v_new), segments, Tiles(p));
    };
    if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Scores, AnchoredScores>)
      if (segments.cut.one_pass) return start.template operator()<true>();
    start.template operator()<false>();
  });
}

}  // namespace kda::cuda
