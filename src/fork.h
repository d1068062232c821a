// A forked process has one thread, whatever its parent had: pools of threads and CUDA's context are not there any more,
// though what remembers them in memory is.
#pragma once

namespace kda {

// Was this process, or one it descends from, forked after this library was loaded?
bool forked();

}  // namespace kda
