// The seed and the memory of the fuzzers' calls, where every tensor of a call lies, and its elements.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "contract/dtype.h"
#include "error.h"
#include "support.h"

namespace kda::test {

constexpr int64_t kArena = 1 << 20, kWorkspace = 16 << 20;

struct Failure {
  std::string what;
};
[[noreturn]] inline void fail(const std::string& what) { throw Failure{what}; }

// A number, or `today`: the days since 1970, so that old seeds cannot hide a fault. It is printed, to be repeated.
inline int64_t seed_of(const char* argument) {
  if (std::strcmp(argument, "today")) return std::atoll(argument);
  const int64_t days = std::time(nullptr) / 86400;
  std::printf("today's seed is %lld\n", static_cast<long long>(days));
  return days;
}

inline int64_t tensor_size(const kda_tensor& t) {
  int64_t n = t.ndim > 0 && t.ndim <= KDA_MAX_NDIM ? 1 : 0;
  for (int i = 0; n && i < t.ndim; ++i) n *= std::max<int64_t>(0, t.shape[i]);
  return n;
}
inline char* element(const kda_tensor& t, int64_t i) {
  int64_t offset = 0;
  for (int dim = t.ndim - 1; dim >= 0; --dim) {
    offset += i % t.shape[dim] * t.stride[dim];
    i /= t.shape[dim];
  }
  return static_cast<char*>(t.data) + offset * dtype_size(t.dtype);
}
inline double get(const kda_tensor& t, int64_t i) {
  const void* p = element(t, i);
  switch (t.dtype) {
    case KDA_F64: return *static_cast<const double*>(p);
    case KDA_F32: return *static_cast<const float*>(p);
    case KDA_BF16: return bf16_to_float(*static_cast<const uint16_t*>(p));
    default: return f16_to_float(*static_cast<const uint16_t*>(p));
  }
}
inline double get_integer(const kda_tensor& t, int64_t i) {
  const void* p = element(t, i);
  return t.dtype == KDA_I32   ? *static_cast<const int32_t*>(p)
         : t.dtype == KDA_I64 ? static_cast<double>(*static_cast<const int64_t*>(p))
                              : *static_cast<const uint8_t*>(p);
}
inline void set(const kda_tensor& t, int64_t i, double x) {
  void* p = element(t, i);
  switch (t.dtype) {
    case KDA_F64: *static_cast<double*>(p) = x; break;
    case KDA_F32: *static_cast<float*>(p) = static_cast<float>(x); break;
    case KDA_BF16: *static_cast<uint16_t*>(p) = float_to_bf16(static_cast<float>(x)); break;
    case KDA_F16: *static_cast<uint16_t*>(p) = float_to_f16(static_cast<float>(x)); break;
    case KDA_I32: *static_cast<int32_t*>(p) = static_cast<int32_t>(x); break;
    case KDA_I64: *static_cast<int64_t*>(p) = static_cast<int64_t>(x); break;
    default: *static_cast<uint8_t*>(p) = static_cast<uint8_t>(x); break;
  }
}

// ---- memory ----

struct Arena {
  explicit Arena(int64_t size = kArena) : bytes(size), used(size) { clear(); }
  std::vector<char> bytes;
  int64_t used;
  int64_t alignment = 1;  // in bytes, of tensors taken from now on, if it exceeds an element's

  void clear() {
    std::memset(bytes.data(), 0xff, used);
    used = 0;
  }
  // Returns a poisoned tensor of random layout, aligned to its element and to no more unless `alignment` says so.
  kda_tensor take(int32_t dtype, const std::vector<int64_t>& shape, Random& random) {
    kda_tensor t{};
    t.dtype = dtype, t.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    const bool padded = random.chance(0.3);
    const int64_t size = dtype_size(dtype), aligned = std::max(size, alignment);
    for (int i = t.ndim - 1; i >= 0; --i) {
      if (padded && i + 1 < t.ndim) stride += random.below(4) * (aligned / size);
      t.shape[i] = shape[i], t.stride[i] = stride;
      stride *= std::max<int64_t>(1, shape[i]);
    }
    const int64_t first = (used + 64 + aligned - 1) / aligned * aligned, end = first + stride * size + 64;
    if (end > std::ssize(bytes)) fail("the arena is too small");  // and `used` stays: clear() writes so many bytes
    t.data = bytes.data() + first, used = end;
    return t;
  }
  bool holds(const kda_tensor& t) const {
    if (!t.data || tensor_size(t) == 0) return true;  // nothing is accessed
    int64_t lo = 0, hi = 0;
    for (int i = 0; i < t.ndim; ++i) (t.stride[i] < 0 ? lo : hi) += (t.shape[i] - 1) * t.stride[i];
    const int64_t size = std::max<int64_t>(1, dtype_size(t.dtype)), at = static_cast<char*>(t.data) - bytes.data();
    return at + lo * size >= 0 && at + (hi + 1) * size <= used;
  }
};

inline Arena arena;  // every tensor of the call at hand

}  // namespace kda::test
