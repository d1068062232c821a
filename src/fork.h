// A forked process has one thread, however many its parent had. Thread pools and CUDA's context are gone, although the
// memory that describes them is still there.
#pragma once

namespace kda {

// Was this process, or one it descends from, forked after this library was loaded?
bool forked();

}  // namespace kda
