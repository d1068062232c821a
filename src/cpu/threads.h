// A team of threads for one piece of work: OpenMP's pool, or threads made for it. Nothing else here starts any.
#pragma once
#include <cstdint>

#include "kda/kda.h"

namespace kda::cpu {

// How many threads a call gets: what it asks for, or what OpenMP would use, but no more than there are tasks, and of
// more than 64 not more than there are processors.
int wanted_threads(const kda_exec& exec, int64_t tasks);

// body(context, thread) with thread = 0 .. threads-1 at once; returns when all are done. Where the machine starts fewer
// threads, the last of these numbers are left out: whoever comes takes what work is left.
using TeamBody = void (*)(void* context, int thread);
void run_team(int threads, TeamBody body, void* context);

}  // namespace kda::cpu
