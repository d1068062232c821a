// Indices of either width. Past the checks, all implementations see i32: an i64 index is read as its lower half, an i32
// of twice the stride. So kernels have one form, and no call pays for a width that it does not use.
#pragma once
#include <bit>

#include "contract/tables_stages.h"

namespace kda {

static_assert(std::endian::native == std::endian::little, "the lower half of an i64 comes first");

template <class Args>
void narrow_indices(Args& args) {
  for (const uint16_t place : kPlaces<Args, is_index>) {
    kda_tensor& t = *reinterpret_cast<kda_tensor*>(reinterpret_cast<char*>(&args) + place);
    if (t.ndim == 0 || t.dtype != KDA_I64) continue;
    t.dtype = KDA_I32;
    for (int i = 0; i < t.ndim; ++i) t.stride[i] *= 2;
  }
}

}  // namespace kda
