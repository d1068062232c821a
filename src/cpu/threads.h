// A team of threads for one piece of work: OpenMP's pool, or threads made for it. No other code here starts threads.
#pragma once
#include <cstdint>

#include "kda/kda.h"

namespace kda::cpu {

// Returns how many threads a call gets: as many as it asks for, or as OpenMP would use, but no more than there are
// tasks, and above 64 no more than there are processors.
int wanted_threads(const kda_exec& exec, int64_t tasks);

// Runs body(context, thread) for thread = 0 .. threads-1 at once; returns when all are done. Where the machine starts
// fewer threads, the last of these numbers are left out, and the other threads take what work is left.
using TeamBody = void (*)(void* context, int thread);
void run_team(int threads, TeamBody body, void* context);

}  // namespace kda::cpu
