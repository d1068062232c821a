// Tensor maps of the stages' tokens and states, for kernels that copy them by TMA.
#pragma once
#include "cuda/engine/tiles.h"
#include "cuda/stages/chunks.h"

namespace kda::cuda::stages {

// A map of boxes of 128 bytes, of so many lines and tokens: [B,T,heads,n] has one line, states [rows,heads,lines,n]
// have one token. Boxes are swizzled (Swizzle::k128).
inline CUtensorMap boxes_of(const kda_tensor& t, cuuint32_t tokens, cuuint32_t lines) {
  const auto size = [&](int i) { return static_cast<cuuint64_t>(t.shape[i]); };
  const bool wide = t.dtype == KDA_F32;
  return engine::make_map<4>(wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, t.data,
                             {.sizes = {size(3), size(2), size(1), size(0)},
                              .strides = {engine::map_stride(t, 2), engine::map_stride(t, 1), engine::map_stride(t, 0)},
                              .box = {engine::kRowBytes / (wide ? 4 : 2), lines, tokens, 1}},
                             CU_TENSOR_MAP_SWIZZLE_128B);
}
// A chunk's tokens, and the lines of a chunk's state.
inline CUtensorMap boxes_of_tokens(const kda_tensor& t) { return boxes_of(t, kChunk, 1); }
inline CUtensorMap boxes_of_states(const kda_tensor& t, int64_t lines) {
  return boxes_of(t, 1, static_cast<cuuint32_t>(lines));
}
// Can TMA copy boxes of it?
inline bool takes_boxes(const kda_tensor& t) { return has_elements(t) && takes_tma(t); }

}  // namespace kda::cuda::stages
