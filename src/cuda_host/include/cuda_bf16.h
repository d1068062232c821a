// bf16 as kernels use it.
#pragma once
#include "contract/dtype.h"
#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(kda::float_to_bf16(x)) {}
  operator float() const { return kda::bf16_to_float(bits); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline float __low2float(__nv_bfloat162 x) { return x.x; }
inline float __high2float(__nv_bfloat162 x) { return x.y; }
inline bool __hblt2(__nv_bfloat162 a, __nv_bfloat162 b) { return float{a.x} < float{b.x} && float{a.y} < float{b.y}; }
inline bool __hbltu2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return !(float{a.x} >= float{b.x}) && !(float{a.y} >= float{b.y});
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(float{a.x} * float{b.x}), __nv_bfloat16(float{a.y} * float{b.y})};
}
