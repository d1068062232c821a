// Heads that one thread would take too long for: a single long prompt, or one that outweighs the rest of a batch. All
// threads work on them, one head after the other. Chunks are prepared (inputs, scores, decays: nothing of it depends on
// the state) by any thread, a group ahead of the recurrence over chunks, which runs on tiles of columns of the state:
// those are independent. So nothing is computed twice, and every number in the order in which one thread would.
//
// The alternative, running segments of the head at once and joining them by their maps S_out = M S_in + b (math.md 6.2),
// costs 1.9 times the arithmetic (maps, then the segments again), which two threads cannot win back; and its bits would
// depend on the number of segments.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/parallel.h"

namespace kda::cpu {

// Chunks prepared ahead, per group; memory holds two groups. At K = V = 128 a chunk takes 190 KB and some 0.1 ms, so that
// a group outweighs the wait for all threads at its end.
inline int64_t team_group(int threads, int64_t max_chunks) {
  return std::clamp<int64_t>(max_chunks, 1, std::max(8, threads));
}

// Heads of more chunks than this are for the team: those that would take a quarter longer than a fair share of what is
// left when they are done. `chunks_of(n)` are those of sequence n, which has `heads` heads; INT64_MAX means none.
template <class F>
int64_t long_head(int64_t sequences, int64_t heads, int threads, const F& chunks_of) {
  for (int64_t limit = INT64_MAX;;) {
    int64_t rest = 0, longest = 0;
    for (int64_t n = 0; n < sequences; ++n) {
      const int64_t chunks = chunks_of(n);
      if (chunks > limit) continue;
      rest += chunks * heads;
      longest = std::max(longest, chunks);
    }
    const int64_t share = 5 * rest / (4 * threads);
    if (threads == 1 || longest <= share) return limit;
    limit = share;
  }
}

// Can any head be a long one? What sizes alone tell; packed sequences may have any lengths.
inline bool may_be_long(int64_t sequences, int64_t heads, int threads, bool varlen) {
  return threads > 1 && sequences > 0 && (varlen || 4 * threads > 5 * sequences * heads);
}

// prepare(chunk, slot, thread) for every chunk, then scan(first, end, tile, thread) for its group on every tile of
// columns, group by group. Slot i % (2 group) holds chunk i.
template <class Prepare, class Scan>
void run_as_team(int64_t chunks, int64_t group, int64_t tiles, int threads, const Prepare& prepare, const Scan& scan) {
  for (int64_t done = 0, ready = 0; done < chunks;) {
    const int64_t next = std::min(ready + group, chunks), scans = ready > done ? tiles : 0;
    parallel_for(scans + next - ready, threads, [&](int64_t task, int thread) {
      if (task < scans) scan(done, ready, task, thread);
      else prepare(ready + task - scans, thread);
    });
    done = ready, ready = next;
  }
}

// Tiles of at least 32 columns (two of the widest vectors: narrower products run at half the speed), one a thread.
struct Tiles {
  int64_t columns, width;

  Tiles(int64_t columns, int threads) : columns(columns) {
    const int64_t wanted = std::clamp<int64_t>(threads, 1, (columns + 31) / 32);
    width = (columns + 16 * wanted - 1) / (16 * wanted) * 16;
  }
  int64_t count() const { return (columns + width - 1) / width; }
  int64_t first(int64_t i) const { return i * width; }
  int64_t size(int64_t i) const { return std::min(width, columns - i * width); }
};

}  // namespace kda::cpu
