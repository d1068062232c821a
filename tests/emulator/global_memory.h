// Global memory of the emulated GPU. No other memory lies near an allocation, so an index that is wrong by thousands of
// rows ends the program, whatever else the process has allocated. A build with AddressSanitizer leaves that to it.
#pragma once
#include <cstddef>

namespace kda::emulator {

void* allocate(size_t bytes);  // nullptr: there is not so much
bool release(void* memory);    // of allocate, or nullptr; false: it is neither

}  // namespace kda::emulator
