// Element types: sizes, names, and scalar conversions (round to nearest even). Kernels convert vectors themselves.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kda/kda.h"

namespace kda {

constexpr int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case KDA_F64:
    case KDA_I64: return 8;
    case KDA_F32:
    case KDA_I32: return 4;
    case KDA_BF16:
    case KDA_F16: return 2;
    case KDA_BOOL: return 1;
    default: return 0;
  }
}

constexpr const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case KDA_F32: return "float32";
    case KDA_BF16: return "bfloat16";
    case KDA_F16: return "float16";
    case KDA_F64: return "float64";
    case KDA_I32: return "int32";
    case KDA_I64: return "int64";
    case KDA_BOOL: return "bool";
    default: return "an unknown dtype";
  }
}

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline uint16_t float_to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);  // stay NaN: rounding could carry into infinity
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t x) {
  const uint32_t sign = uint32_t{x} >> 15 << 31, exponent = (x >> 10) & 31, mantissa = x & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 31 << 15);
  const float magnitude = std::fabs(x);
  if (x != x) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;  // 65504 + half a step rounds to infinity
  if (magnitude < 0x1p-14f)                         // subnormal: adding 0.5 makes the hardware round at 2^-24
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(magnitude + 0.5f) - 0x3f000000u);
  const uint32_t m = std::bit_cast<uint32_t>(magnitude);
  return sign | static_cast<uint16_t>((m - (112u << 23) + 0xfff + ((m >> 13) & 1)) >> 13);
}

// Returns a float that rounds to the same 16 bits as x: x rounded toward 0, and made odd where it is not x. With two
// roundings to nearest, a number close to the middle between two 16-bit numbers could end at the wrong one.
inline float rounded_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (x != x || nearest == x) return nearest;
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  return std::bit_cast<float>((bits - (std::fabs(static_cast<double>(nearest)) > std::fabs(x))) | 1);
}

}  // namespace kda
