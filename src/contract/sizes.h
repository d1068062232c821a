// Limits of the sizes of a call. Memory limits them only where a tensor has memory of its own: with strides of 0, or
// where another size is 0, shapes may hold any number. Past validate() every product of sizes that this library forms
// (counts of tasks, offsets, bytes of workspace) stays below 2^63, so none is checked again.
#pragma once
#include <cstdint>
#include <initializer_list>

namespace kda {

constexpr int64_t kMaxPairs = int64_t{1} << 40;  // tokens, or sequences, times value heads: with K = V = 256 and f32,
                                                 // and 2^8 threads, the largest workspace (backward's) is 2^62 bytes
constexpr int64_t kMaxChannels = int64_t{1} << 48;  // tokens, or sequences, times channels of a convolution
constexpr int64_t kMaxSequences = INT32_MAX;
constexpr int64_t kMaxTasks = int64_t{1} << 32;  // sequences times value heads, where anything is written

// Is the product at most `most`? A size of 0 counts as 1, so that products without that size are bounded, too.
constexpr bool product_within(int64_t most, std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size > most) return false;
    if (size > 1) most /= size;
  }
  return true;
}

}  // namespace kda
