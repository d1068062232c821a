// CUDA's language as g++ sees it: qualifiers, built-in variables and functions, and launches of kernels.
#pragma once
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "emulator.h"

#define __global__ inline  // so that a kernel that nothing calls makes no code
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__
// Clusters of two are those that the emulator sees by themselves. Others are told by an attribute of the launch; here
// they do not compile.
#define __cluster_dims__(x, ...) __attribute__((aligned((x) == 2 ? 16 : 3)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
// The only storage class that goes with `extern` and is static in a function by itself. All threads of a block are
// fibers of one thread of the host.
#define __shared__ thread_local
#define __builtin_assume(condition) static_cast<void>(0)

// ---- indices of a thread ----

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- numbers ----

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::isinf;
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>((uint64_t{x} * y) >> 32); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x ? std::countr_zero(static_cast<unsigned>(x)) + 1 : 0; }
// Each digit of the selector is the number of a byte of x, then y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = x | uint64_t{y} << 32;
  unsigned z = 0;
  for (unsigned i = 0; i < 4; ++i) z |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return z;
}

// ---- meetings ----

inline void __syncthreads(kda::emulator::Where where = kda::emulator::Where::current()) {
  kda::emulator::meet(0, 0, where);
}
void __syncwarp(unsigned mask = ~0u, kda::emulator::Where where = kda::emulator::Where::current());

namespace kda::emulator {

unsigned own_lane();

template <class T>
T shuffle(const char* what, unsigned mask, T x, unsigned source, Where where) {
  struct Own {
    T given, taken;
    unsigned source;
    Where where;
  } own{x, x, source, where};
  const auto exchange = [](void* const* all) {
    for (unsigned l = 0; l < 32; ++l) {
      if (!all[l]) continue;
      Own& lane = of<Own>(all, l);
      if (!all[lane.source]) fail("a shuffle reads a lane that its mask does not name", lane.where);
      lane.taken = of<Own>(all, lane.source).given;
    }
  };
  together(what, own, exchange, where, mask);
  return own.taken;
}

}  // namespace kda::emulator

// `width`: lanes of a group, a power of two; groups exchange nothing.
template <class T>
T __shfl_sync(unsigned mask, T x, unsigned source, unsigned width = 32,
              kda::emulator::Where where = kda::emulator::Where::current()) {
  const unsigned group = kda::emulator::own_lane() / width * width;
  return kda::emulator::shuffle("__shfl_sync", mask, x, group + source % width, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, unsigned bits, kda::emulator::Where where = kda::emulator::Where::current()) {
  return kda::emulator::shuffle("__shfl_xor_sync", mask, x, (kda::emulator::own_lane() ^ bits) % 32, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, unsigned width = 32,
                 kda::emulator::Where where = kda::emulator::Where::current()) {
  const unsigned lane = kda::emulator::own_lane();
  return kda::emulator::shuffle("__shfl_up_sync", mask, x, lane % width >= by ? lane - by : lane, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by, unsigned width = 32,
                   kda::emulator::Where where = kda::emulator::Where::current()) {
  const unsigned lane = kda::emulator::own_lane();
  return kda::emulator::shuffle("__shfl_down_sync", mask, x, lane % width + by < width ? lane + by : lane, where);
}
unsigned __ballot_sync(unsigned mask, int predicate, kda::emulator::Where where = kda::emulator::Where::current());
inline int __any_sync(unsigned mask, int predicate, kda::emulator::Where where = kda::emulator::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, kda::emulator::Where where = kda::emulator::Where::current()) {
  return __ballot_sync(mask, predicate, where) == mask;
}
unsigned __reduce_add_sync(unsigned mask, unsigned x, kda::emulator::Where where = kda::emulator::Where::current());
unsigned __reduce_max_sync(unsigned mask, unsigned x, kda::emulator::Where where = kda::emulator::Where::current());
unsigned __reduce_min_sync(unsigned mask, unsigned x, kda::emulator::Where where = kda::emulator::Where::current());
unsigned __reduce_or_sync(unsigned mask, unsigned x, kda::emulator::Where where = kda::emulator::Where::current());

inline unsigned atomicAdd(unsigned* to, unsigned x, kda::emulator::Where where = kda::emulator::Where::current()) {
  return kda::emulator::add_atomically(to, x, where);
}

// ---- kinds of memory ----

inline size_t __cvta_generic_to_shared(const void* pointer) { return kda::emulator::shared_address(pointer); }

// ---- launches ----

namespace kda::emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread);

}  // namespace kda::emulator

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  const std::tuple<Params...> own(static_cast<Args&&>(args)...);
  return kda::emulator::launch(*config, reinterpret_cast<const void*>(kernel), [&] { std::apply(kernel, own); });
}
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, bytes);
}
