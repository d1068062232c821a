// Which tensors TMA copies, Hopper's and Blackwell's copy engine.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "contract/dtype.h"
#include "contract/problem.h"

namespace kda::cuda {

// Whether rows are at multiples of `bytes`. A dimension of size one has no stride, whatever the tensor says.
inline bool rows_at(int64_t bytes, std::initializer_list<const kda_tensor*> tensors) {
  for (const kda_tensor* t : tensors) {
    if (!present(*t)) continue;
    if (reinterpret_cast<uintptr_t>(t->data) % bytes) return false;
    for (int i = 0; i + 1 < t->ndim; ++i)
      if (t->shape[i] > 1 && t->stride[i] * dtype_size(t->dtype) % bytes) return false;
  }
  return true;
}
inline bool rows_fit_tma(const kda_tensor& t) { return rows_at(16, {&t}); }

// Whether strides and sizes are what a tensor map holds (cuTensorMapEncodeTiled): strides from `least` to below 2^40
// bytes, up to 2^32 elements in a dimension.
inline bool strides_fit_tma(const kda_tensor& t, int64_t least = 0) {
  bool fit = true;
  for (int i = 0; i < t.ndim; ++i) {
    const bool moves = i + 1 < t.ndim && t.shape[i] > 1;
    fit = fit && t.shape[i] <= int64_t{1} << 32 &&
          (!moves || (t.stride[i] >= least && t.stride[i] < (int64_t{1} << 40) / dtype_size(t.dtype)));
  }
  return fit;
}

// Does TMA take it, each row at a place of its own?
inline bool takes_tma(const kda_tensor& t) { return rows_fit_tma(t) && strides_fit_tma(t, 1); }

inline bool has_elements(const kda_tensor& t) {
  bool has = true;
  for (int i = 0; i < t.ndim; ++i) has = has && t.shape[i] > 0;
  return has;
}

}  // namespace kda::cuda
