// Forward for few heads and long sequences on Hopper: sequences are cut into segments, which CTA pairs scan at once
// (math.md 6): segments_kernel.h.
#include "cuda/engine/consumer.h"
#include "cuda/engine/declarations.h"
#include "cuda/engine/dispatch.h"
#include "cuda/engine/segments_kernel.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class T, class Scores, bool kWideGate, bool kTraining>
__global__ void __cluster_dims__(2) __launch_bounds__(kSegmentThreads, 1)
    segments_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                    const __grid_constant__ States states, const __grid_constant__ TypedView v_new,
                    const __grid_constant__ Segments segments, const __grid_constant__ Tiles tiles,
                    const __grid_constant__ SavedTiles saved) {
  run_segments<Producer<T, Scores, kWideGate, TaskSource<false, kTraining>>, Consumer<T, kTraining, true, 2>,
               Consumer<T, false, false, 2>>({p, x, states, v_new, &tiles, &saved}, segments);
}

// ---- how long segments are ----

// About how many cycles a call takes. Sequences count as equally long, because lengths of packed ones are not known
// here.
struct Cost {
  static constexpr int64_t kMap = 2900, kScan = 2220;  // for a chunk of a map, for a chunk with outputs; by a pair
  static constexpr int64_t kBegin = 13000;             // until a first segment is where maps are
  static constexpr int64_t kPass = 2300;               // to apply a map, in front of outputs
  static constexpr int64_t kTurn = 12000;              // from the last chunk of a map to the first with outputs
  static constexpr int64_t kMost = 64;                 // segments of a sequence: each applies the maps of all before it
  int64_t pairs, heads, chunks, most_chunks;           // the latter two of a sequence: on average, at most

  explicit Cost(const ForwardProblem& p)
      : pairs(std::max(multiprocessors(p.args.exec.device_id) / 2, 1)),
        heads(p.N * p.HV),
        chunks(divide_up(p.B * p.T, kRows * p.N) + has_openings(p.args) * (kChunk / kRows)),
        most_chunks(divide_up(p.T, kRows) + has_openings(p.args) * (kChunk / kRows)) {}
  // Cycles of a call whose sequences are not cut.
  int64_t whole() const { return std::max(chunks, divide_up(heads * chunks, pairs)) * kScan; }
  // Chunks of the first segment, which takes no longer than the map of another.
  static int64_t lead(int64_t each) { return std::max(each, (each * kMap - kBegin + kScan) / (2 * kScan) * 2); }
  int64_t pieces(int64_t each) const { return 1 + divide_up(std::max<int64_t>(chunks - lead(each), 0), each); }
  // Cycles of a call whose sequences are cut into segments of so many chunks.
  int64_t cut(int64_t each) const {
    const int64_t count = pieces(each);
    return divide_up(heads * (count - 1), pairs) * (each * (kMap + kScan) + kTurn + (count - 2) * kPass);
  }
};

// The best length of segments, if there are to be several.
struct Choice {
  static constexpr int64_t kLeast = kStages;  // chunks, so that those of a map fill all stages of the ring
  int64_t chunks, cycles = INT64_MAX;         // of a segment; of the call
  explicit Choice(const Cost& cost) : chunks(std::max(2 * divide_up(cost.most_chunks, 2 * Cost::kMost), kLeast)) {
    for (int64_t count = 3, least = chunks; count <= Cost::kMost; ++count) {
      const int64_t share = 2 * ((count - 1) * Cost::kScan + Cost::kMap);
      const int64_t each = std::max(2 * divide_up(cost.chunks * Cost::kScan + Cost::kBegin, share), least);
      if (cost.pieces(each) < 3) continue;
      if (const int64_t c = cost.cut(each); c < cycles) chunks = each, cycles = c;
    }
  }
};

}  // namespace

Cut engine::cut_of(const ForwardProblem& p, bool reversed) {
  const Cost cost(p);
  const int64_t each = Choice(cost).chunks;
  int64_t lead = Cost::lead(each);
  // The last segment is better two chunks shorter than others, but not more, because its pair applies one map more.
  // (Numbers of segments of packed sequences need a first one that is as long as others.)
  if (!p.varlen) lead = std::clamp<int64_t>(cost.chunks - (cost.pieces(each) - 1) * each + 2, 2, lead) / 2 * 2;
  else if (reversed || has_openings(p.args)) lead += kChunk / kRows;  // see Cut
  return Cut(p, static_cast<unsigned>(lead) * kRows, static_cast<unsigned>(each) * kRows, reversed);
}

Segments engine::segments_of(const ForwardProblem& p, bool reversed) {
  const kda_exec& exec = p.args.exec;
  const Segments segments(p, cut_of(p, reversed), exec.workspace);
  if (segments.pairs(p) > 0)
    KDA_CUDA(cudaMemsetAsync(segments.flags, 0, Segments::flag_bytes(p, segments.cut), stream_of(exec)));
  return segments;
}

const char* engine::segments_why_not(const ForwardProblem& p) {
  if (p.N == 0) return "needs a sequence to cut";
  if (p.args.exec.flags & KDA_BATCH_INVARIANT)
    return "is not batch invariant: results depend on where sequences are split";
  if ((p.B * p.T / kRows + p.N + 1) * p.HV > INT32_MAX) return "takes at most 2^31 chunks";
  return nullptr;
}

const char* hopper_prefill_segments_why_not(const ForwardProblem& p) {
  if (const char* reason = hopper_prefill_pairs_why_not(p)) return reason;
  return segments_why_not(p);
}

const char* hopper_prefill_segments_unsuited(const ForwardProblem& p) {
  const Cost cost(p);
  return Choice(cost).cycles < cost.whole() / 10 * 9 ? nullptr : "sequences in one piece are as fast";
}

uint64_t hopper_prefill_segments_workspace(const ForwardProblem& p) { return Segments::bytes(p, cut_of(p, false)); }

void hopper_prefill_segments(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const Segments segments = segments_of(p, false);
  const unsigned pairs = segments.pairs(p);
  if (pairs == 0) return;
  with_preparation(p, [&]<class T, class Scores, bool kWideGate, bool kTraining>() {
    launch<segments_kernel<T, Scores, kWideGate, kTraining>>(
        a.exec, dim3(2 * pairs), static_cast<int>(kSegmentThreads), static_cast<int>(Shared::bytes), p,
        Tokens(p, a.in, a.o), States(a), view_of(a.v_new), segments, Tiles(p), SavedTiles(a.v_new));
  });
}

}  // namespace kda::cuda
