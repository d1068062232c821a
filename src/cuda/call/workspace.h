// Where things lie in the workspace of a call.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "contract/problem.h"

namespace kda::cuda {

constexpr uint64_t align_up(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

// A dense tensor in the workspace.
inline kda_tensor dense(char* data, int32_t dtype, std::initializer_list<int64_t> shape) {
  kda_tensor t{};
  t.data = data, t.dtype = dtype, t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  for (int i = t.ndim - 1, step = 1; i >= 0; --i)
    t.stride[i] = i + 1 < t.ndim ? t.stride[i + 1] * t.shape[i + 1] : step;
  return t;
}

}  // namespace kda::cuda
