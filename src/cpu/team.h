// Heads that would take one thread too long: a single long prompt, or one that outweighs the rest of a batch. All
// threads work on them, one head after the other. Any thread prepares chunks (inputs, scores, decays: none of these
// depends on the state), a group ahead of the recurrence over chunks. The recurrence runs on tiles of columns of the
// state, which are independent. So nothing is computed twice, and every number is computed in the order in which one
// thread would.
//
// The alternative is to run segments of the head at once and join them by their maps S_out = M S_in + b
// (math.md 6.2). It costs 1.9 times the arithmetic (maps, then the segments again), which two threads cannot win
// back, and its bits would depend on the number of segments.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "contract/problem.h"
#include "cpu/parallel.h"

namespace kda::cpu {

// Chunks are prepared in groups. One group is being prepared, one waits, one is being scanned, so memory holds three.
// At K = V = 128 a chunk takes 150 KB and some 0.1 ms.
constexpr int64_t kTeamGroups = 3;
constexpr int64_t kMaxTiles = 16;
inline int64_t team_group(int threads, int64_t max_chunks) {
  return std::clamp<int64_t>(max_chunks, 1, std::max(2, threads));
}

// Returns the number of chunks above which a head is for the team; INT64_MAX means none is. Such a head would take
// more than a quarter longer than a thread's fair share of what is left when still longer heads are done. Sequence n
// has chunks_of(n) chunks and `heads` heads.
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

// The most chunks that all heads can have together: more threads than that have nothing to do.
inline int64_t most_chunks(const Dims& d, int64_t heads) {
  return heads * (d.varlen ? d.T / kChunk + d.N : d.N * std::max<int64_t>(1, d.max_chunks()));
}

// Can any head be a long one, as far as sizes alone tell? Packed sequences may have any lengths.
inline bool may_be_long(int64_t sequences, int64_t heads, int threads, bool varlen) {
  return threads > 1 && sequences > 0 && (varlen || 4 * threads > 5 * sequences * heads);
}

// Waits for another thread of the team. The wait is short, because what it waits for is being done already.
template <class F>
void wait_until(const F& done) {
  for (int spins = 0; !done(); ++spins)
    if (spins > 1000) std::this_thread::yield();  // more threads than cores
}

// Calls prepare(chunk, thread) for every chunk, and scan(first, end, tile, thread) for every group of chunks on every
// tile of columns. Slot i % (kTeamGroups group) holds chunk i.
//
// Threads take tickets, and no barrier stops them all. Phase p of the tickets scans group p - 2 and prepares group p.
// A ticket waits only for work of earlier tickets, which some thread is already doing, so there is always a thread
// that does not wait.
template <class Prepare, class Scan>
void run_as_team(int64_t chunks, int64_t group, int64_t tiles, int threads, const Prepare& prepare, const Scan& scan) {
  const int64_t groups = (chunks + group - 1) / group, tickets = tiles + group;
  std::atomic<int64_t> next{0};
  // prepared[i]: chunks prepared so far in the slots of groups g with g % kTeamGroups = i. scanned[tile]: groups
  // scanned so far.
  std::atomic<int64_t> prepared[kTeamGroups] = {}, scanned[kMaxTiles] = {};
  const auto scan_group = [&](int64_t g, int64_t tile, int thread) {
    const int64_t end = std::min((g + 1) * group, chunks), wanted = g / kTeamGroups * group + end - g * group;
    wait_until([&] { return prepared[g % kTeamGroups].load(std::memory_order_acquire) >= wanted; });
    wait_until([&] { return scanned[tile].load(std::memory_order_acquire) >= g; });
    scan(g * group, end, tile, thread);
    scanned[tile].store(g + 1, std::memory_order_release);
  };
  const auto prepare_chunk = [&](int64_t g, int64_t chunk, int thread) {
    for (int64_t tile = 0; tile < tiles; ++tile)  // until all reads of what is in the slot are done
      wait_until([&] { return scanned[tile].load(std::memory_order_acquire) > g - kTeamGroups; });
    prepare(chunk, thread);
    prepared[g % kTeamGroups].fetch_add(1, std::memory_order_release);
  };
  on_all_threads(threads, [&](int thread) {
    for (int64_t ticket; (ticket = next.fetch_add(1, std::memory_order_relaxed)) < (groups + 2) * tickets;) {
      const int64_t phase = ticket / tickets, i = ticket % tickets;
      if (i < tiles && phase >= 2) scan_group(phase - 2, i, thread);
      else if (i >= tiles && phase * group + i - tiles < chunks)
        prepare_chunk(phase, phase * group + i - tiles, thread);
    }
  });
}

// Tiles of at least 32 columns (two of the widest vectors: narrower products run at half the speed), one for each
// thread.
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
