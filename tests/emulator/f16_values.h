// Numbers by the 16 bits of an f16: converting those is by far the most frequent operation of the emulator.
#pragma once
#include <vector>

namespace kda::emulator {

const std::vector<float>& f16_values();

}  // namespace kda::emulator
