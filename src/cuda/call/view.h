// Tensors and their elements, of any dtype, as kernels address them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>

#include "contract/dtype.h"
#include "contract/problem.h"

namespace kda::cuda {

// Bytes of an element.
__host__ __device__ inline unsigned size_of(int32_t dtype) { return dtype == KDA_F32 ? 4 : 2; }

// A tensor [a,b,c,..] as kernels address it: strides in bytes, so that an address is a multiply-add for each index.
// (With 64-bit strides in elements, addresses were half of all instructions.)
struct View {
  char* data = nullptr;  // nullptr: absent
  int64_t stride0 = 0;
  uint32_t stride1 = 0, stride2 = 0;

  __device__ char* at(unsigned i, unsigned j, unsigned k) const {
    return data + i * stride0 + static_cast<uint64_t>(j) * stride1 + static_cast<uint64_t>(k) * stride2;
  }
};
// A View with its dtype, where the dtype is not known otherwise.
struct TypedView : View {
  int32_t dtype = KDA_F32;
};

// lead: 1 if the first dimension is that of layers. A missing third dimension counts as 1.
inline TypedView view_of(const kda_tensor& t, int lead = 0) {
  if (!present(t)) return {};
  const auto bytes = [&](int i) { return lead + i < t.ndim ? t.stride[lead + i] * dtype_size(t.dtype) : 0; };
  TypedView view;
  view.data = static_cast<char*>(t.data), view.stride0 = bytes(0);
  view.stride1 = static_cast<uint32_t>(bytes(1)), view.stride2 = static_cast<uint32_t>(bytes(2));
  view.dtype = t.dtype;
  return view;
}

// Why tensors have no view, or nullptr.
inline const char* view_why_not(std::initializer_list<const kda_tensor*> tensors, int lead = 0) {
  for (const kda_tensor* t : tensors)
    for (int i = lead + 1; i < t->ndim && i < lead + 3; ++i)
      if (t->shape[i] > 1 && (t->stride[i] < 0 || t->stride[i] * dtype_size(t->dtype) >= int64_t{1} << 32))
        return "takes no strides below 0 or from 4 GiB on, but for the first dimension";
  return nullptr;
}

__device__ inline void store_element(char* to, int32_t dtype, float x) {
  switch (dtype) {
    case KDA_F32: *reinterpret_cast<float*>(to) = x; break;
    case KDA_BF16: *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(x); break;
    default: *reinterpret_cast<__half*>(to) = __float2half_rn(x); break;
  }
}

// An element as it lies in memory, and its value. Loading does not branch and does not wait: consecutive loads are
// all in flight before the first value is needed. kNarrow: the element is known to have 16 bits. (If two loads go to
// one register, each under a condition, the second waits for the first.)
template <bool kNarrow>
__device__ unsigned load_raw(const char* from, int32_t dtype) {
  if (kNarrow) return *reinterpret_cast<const uint16_t*>(from);
  return dtype == KDA_F32 ? *reinterpret_cast<const unsigned*>(from) : *reinterpret_cast<const uint16_t*>(from);
}
__device__ inline float value_of(int32_t dtype, unsigned raw) {
  float x = __uint_as_float(raw << (dtype == KDA_F32 ? 0 : 16));
  if (dtype == KDA_F16) x = __half2float(__ushort_as_half(static_cast<uint16_t>(raw)));
  return x;
}

}  // namespace kda::cuda
