// Work for threads, and the caller's workspace.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/subnormals.h"
#include "cpu/threads.h"
#include "error.h"
#include "kda/kda.h"

namespace kda::cpu {

constexpr uint64_t align_up(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

// `shared` bytes for the call, then one share of `per_thread` bytes for each thread. If there are several threads,
// then also `team` bytes for the work that they do together (team.h).
struct Workspace {
  uint64_t shared, per_thread, team = 0;

  uint64_t bytes(int threads) const {
    return align_up(shared) + threads * align_up(per_thread) + (threads > 1 ? align_up(team) : 0);
  }

  // Returns as many threads as the caller's memory has shares for.
  int threads(const kda_exec& exec, int64_t tasks) const {
    if (exec.workspace_bytes < bytes(1))
      invalid("exec.workspace_bytes: expected at least ", bytes(1), " (", bytes(wanted_threads(exec, tasks)),
              " for all threads), got ", exec.workspace_bytes);
    const uint64_t affordable =
        per_thread ? (exec.workspace_bytes - align_up(shared)) / align_up(per_thread) : UINT64_MAX;
    return static_cast<int>(std::min<uint64_t>(wanted_threads(exec, tasks), affordable));
  }

  char* of_thread(const kda_exec& exec, int thread) const {
    return static_cast<char*>(exec.workspace) + align_up(shared) + thread * align_up(per_thread);
  }

  // Returns nullptr if the caller's memory has no room for it; then threads do not work together.
  char* of_team(const kda_exec& exec, int threads) const {
    const bool room = threads > 1 && team && exec.workspace_bytes >= bytes(threads);
    return room ? of_thread(exec, threads) : nullptr;
  }
};

// For many short tasks over memory: how many neighbours a thread takes at a time, so that what a task prefetches
// beyond its end serves the next.
inline int64_t short_run(int64_t tasks, int threads) { return std::clamp<int64_t>(tasks / (8 * threads), 1, 8); }

// Calls fn(thread) on every thread of a team.
template <class F>
void on_all_threads(int threads, const F& fn) {
  const auto body = [](void* context, int thread) {
    const FlushSubnormals flush;
    (*static_cast<const F*>(context))(thread);
  };
  run_team(threads, body, const_cast<F*>(&fn));
}

// Calls fn(task, thread) for every task in 0 .. tasks-1. Tasks may run in any order on any thread, so results must
// not depend on that. Each thread takes `run` neighbours at a time.
template <class F>
void parallel_for(int64_t tasks, int threads, const F& fn, int64_t run = 1) {
  if (threads <= 1 || tasks <= 1) {
    const FlushSubnormals flush;
    for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  on_all_threads(static_cast<int>(std::min<int64_t>(threads, tasks)), [&](int thread) {
    for (int64_t first; (first = next.fetch_add(run, std::memory_order_relaxed)) < tasks;)
      for (int64_t task = first; task < std::min(first + run, tasks); ++task) fn(task, thread);
  });
}

}  // namespace kda::cpu
