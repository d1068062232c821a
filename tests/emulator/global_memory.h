// Global memory of the emulated GPU. Far beside an allocation no other memory lies, so an index that is wrong by
// thousands of rows is an access to nothing, whatever the process has allocated before.
#pragma once
#include <cstddef>

namespace kda::emulator {

void* allocate(size_t bytes);  // nullptr: there is not so much
void release(void* memory);    // of allocate, or nullptr

}  // namespace kda::emulator
