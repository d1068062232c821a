// The contract of kda_prefill_f32.
#pragma once
#include "contract/problem.h"

namespace kda {

struct PrefillF32Problem : Dims {
  kda_inputs in;              // the same memory, tokens before heads: [B,T,H,K], as kernels of kda_forward read it
  kda_tensor o;               // likewise [B,T,HV,V]
  kda_prefill_f32_args args;  // chunk is 32 or 64
};

PrefillF32Problem validate(const kda_prefill_f32_args* args);
inline void validate_data(const PrefillF32Problem&) {}
bool has_f64(const PrefillF32Problem& p);

// w or u of one row and value head: [chunks,chunk,size].
inline kda_tensor chunk_buffer(const kda_tensor& t, int64_t b, int64_t hv) {
  kda_tensor one = t;
  one.data = static_cast<char*>(t.data) + (b * t.stride[0] + hv * t.stride[1]) * (t.dtype == KDA_F64 ? 8 : 4);
  one.ndim = 3;
  for (int i = 0; i < 3; ++i) one.shape[i] = t.shape[i + 2], one.stride[i] = t.stride[i + 2];
  return one;
}

}  // namespace kda
