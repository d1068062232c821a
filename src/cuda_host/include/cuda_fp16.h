// f16 as kernels use it.
#pragma once
#include "contract/dtype.h"
#include "cuda_runtime.h"

struct alignas(2) __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(kda::float_to_f16(x)) {}
  operator float() const { return kda::f16_to_float(bits); }
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return std::bit_cast<__half>(bits); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
// A product of two f16 is exact in f32: it is rounded once.
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {__half(float{a.x} * float{b.x}), __half(float{a.y} * float{b.y})};
}
inline float __low2float(__half2 x) { return x.x; }
inline float __high2float(__half2 x) { return x.y; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
// Whether the comparison holds for both; u: also where the numbers cannot be compared.
inline bool __hblt2(__half2 a, __half2 b) { return float{a.x} < float{b.x} && float{a.y} < float{b.y}; }
inline bool __hbltu2(__half2 a, __half2 b) { return !(float{a.x} >= float{b.x}) && !(float{a.y} >= float{b.y}); }
