// Sums over the lanes of a warp, and when a register gets its value.
#pragma once

namespace kda::cuda {

constexpr unsigned kAll = 0xffffffffu;

// The sum over kLanes lanes, in every lane and always in the same order.
template <int kLanes>
__device__ float sum_over(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(kAll, x, i);
  return x;
}

// Sums kCount numbers over the L lanes that differ in bits kStep and below (32 or eight of them): lane l gets the sum
// of number l kCount / L. Each exchange halves the numbers; the order is that of sum_over.
template <int kCount, int kStep = 16>
__device__ float spread_sums(const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    return sum_over<2 * kStep>(x[0]);
  } else {
    const bool upper = threadIdx.x & kStep;
    float half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float keep = upper ? x[i + kCount / 2] : x[i], give = upper ? x[i] : x[i + kCount / 2];
      half[i] = keep + __shfl_xor_sync(kAll, give, kStep);
    }
    return spread_sums<kCount / 2, kStep / 2>(half);
  }
}

// Pins the place where x is loaded or computed; it is used only later. Otherwise the compiler turns what is loaded
// under a condition into a value at once, which waits for the load. It also loads or computes where the value is
// first used, again and again under conditions.
__device__ inline void pin(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ inline void pin(int32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void pin(float& x) {
  unsigned bits = __float_as_uint(x);
  pin(bits);
  x = __uint_as_float(bits);
}
__device__ inline void pin(const char*& x) {
  asm volatile("" : "+l"(x));
  __builtin_assume(__isGlobal(x));  // as the compiler knew before
}

}  // namespace kda::cuda
