#include "cpu/threads.h"

#include <pthread.h>

#include <algorithm>

#include "fork.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kda::cpu {
namespace {

constexpr int kMostOwnThreads = 64;
// Kernels need 64 KiB (docs/contract.md); libraries keep their thread-local variables there, too.
constexpr size_t kStackBytes = size_t{1} << 20;

int usual_threads() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}
int processors() {
#if defined(_OPENMP)
  return omp_get_num_procs();
#else
  return 1;
#endif
}

struct Start {
  TeamBody body;
  void* context;
  int thread;
};
void* enter(void* start) {
  const auto& s = *static_cast<const Start*>(start);
  s.body(s.context, s.thread);
  return nullptr;
}

void run_on_own_threads(int threads, TeamBody body, void* context) {
  pthread_t ids[kMostOwnThreads];
  Start starts[kMostOwnThreads];
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes)) return body(context, 0);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int started = 1;
  for (; started < std::min(threads, kMostOwnThreads); ++started) {
    starts[started] = {body, context, started};
    if (pthread_create(&ids[started], &attributes, enter, &starts[started])) break;  // no more can be started
  }
  pthread_attr_destroy(&attributes);
  body(context, 0);
  for (int i = 1; i < started; ++i) pthread_join(ids[i], nullptr);
}

// OpenMP's pool does not survive a fork: a child would wait for threads it does not have. OpenMP also ends the process
// if it cannot start as many threads as it is told to, so it is asked for no more than it would use by itself.
bool has_pool(int threads) { return !forked() && (threads <= usual_threads() || threads <= processors()); }

}  // namespace

int wanted_threads(const kda_exec& exec, int64_t tasks) {
  int64_t threads = exec.num_threads > 0 ? exec.num_threads : usual_threads();
  if (threads > kMostOwnThreads) threads = std::min<int64_t>(threads, std::max(kMostOwnThreads, processors()));
  return static_cast<int>(std::clamp<int64_t>(tasks, 1, threads));
}

void run_team(int threads, TeamBody body, void* context) {
  if (threads <= 1) return body(context, 0);
#if defined(_OPENMP)
  if (has_pool(threads)) {
#pragma omp parallel num_threads(threads)
    body(context, omp_get_thread_num());
    return;
  }
#endif
  run_on_own_threads(threads, body, context);
}

}  // namespace kda::cpu
