// The functions of src/cuda/ptx/sm80.h on the emulated GPU: the same names and signatures, with what each instruction
// does to registers and shared memory written out. tests/gpu/test_ptx.cc holds both to the same arithmetic.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace kda::cuda::ptx {

using emulator::Where;

inline unsigned shared_address(const void* shared) { return emulator::shared_address(shared); }

// ---- asynchronous copies to shared memory; `bytes` bytes arrive, the rest of the access becomes zeros ----

inline void copy16(unsigned to, const void* from, unsigned bytes = 16, Where where = Where::current()) {
  emulator::copy(to, from, 16, bytes, where);
}
inline void copy8(unsigned to, const void* from, unsigned bytes = 8, Where where = Where::current()) {
  emulator::copy(to, from, 8, bytes, where);
}
inline void copy4(unsigned to, const void* from, Where where = Where::current()) {
  emulator::copy(to, from, 4, 4, where);
}
inline void commit_copies() { emulator::commit_copies(); }
template <int kGroups>
void wait_for_copies() {
  emulator::wait_for_copies(kGroups);
}
inline void wait_for_all_copies() { emulator::commit_copies(), emulator::wait_for_copies(0); }

inline void sync_some(int number, int count, Where where = Where::current()) {
  if (count <= 0) emulator::fail("a barrier of no threads", where);
  emulator::meet(static_cast<unsigned>(number), static_cast<unsigned>(count), where);
}

// ---- four 8x8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i ----

void load_matrices(unsigned (&x)[4], unsigned from, Where where = Where::current());
void load_transposed(unsigned (&x)[4], unsigned from, Where where = Where::current());
unsigned transposed(unsigned x);

// ---- products: d += a b, in f32 ----

void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <class T>
void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) mma_f16(d, a, b0, b1);
  else mma_bf16(d, a, b0, b1);
}
void mma8(float (&d)[4], const unsigned (&a)[2], unsigned b);
void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

// ---- numbers ----

template <class T>
unsigned pack(float lower, float upper) {
  return T(lower).bits | static_cast<unsigned>(T(upper).bits) << 16;
}

// .ftz: subnormal numbers, given or computed, are zeros of their sign.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2(float x) { return flushed(std::exp2(flushed(x))); }
inline float reciprocal(float x) { return flushed(1 / flushed(x)); }
inline float inverse_root(float x) { return flushed(1 / std::sqrt(flushed(x))); }
inline float least(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? __uint_as_float(0x7fffffffu) : std::fmin(x, y);
}
inline float multiply_flushed(float x, float y) { return flushed(flushed(x) * flushed(y)); }

inline float zero() { return 0; }
inline unsigned thread() { return threadIdx.x; }
inline unsigned block() { return blockIdx.x; }

inline void wait_for_kernel_in_front() { emulator::wait_for_kernel_in_front(); }

// ---- global memory ----

inline void store_global(void* to, const uint2& x) { *static_cast<uint2*>(to) = x; }
inline void store_global(void* to, const uint4& x) { *static_cast<uint4*>(to) = x; }

inline void prefetch(const void*) {}
inline int32_t peek(const int32_t* at) { return *at; }

// ---- shared memory by address ----

template <class T>
T load_as(unsigned from, Where where) {
  T x;
  emulator::load(&x, from, sizeof x, where);
  return x;
}
inline unsigned load_shared(unsigned from, Where where = Where::current()) { return load_as<unsigned>(from, where); }
inline unsigned load_shared16(unsigned from, Where where = Where::current()) {
  return load_as<unsigned short>(from, where);
}
inline uint2 load_shared2(unsigned from, Where where = Where::current()) { return load_as<uint2>(from, where); }
inline float load_shared_f32(unsigned from, Where where = Where::current()) { return load_as<float>(from, where); }
inline float2 load_shared_f32x2(unsigned from, Where where = Where::current()) { return load_as<float2>(from, where); }
inline float4 load_shared_f32x4(unsigned from, Where where = Where::current()) { return load_as<float4>(from, where); }
inline uint4 load_shared4(unsigned from, Where where = Where::current()) { return load_as<uint4>(from, where); }

inline void store_shared(unsigned to, unsigned x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}
inline void store_shared16(unsigned to, unsigned short x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}
inline void store_shared2(unsigned to, uint2 x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}
inline void store_shared4(unsigned to, uint4 x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}
inline void store_shared_f32(unsigned to, float x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}
inline void store_shared_f32x2(unsigned to, float2 x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}
inline void store_shared_f32x4(unsigned to, float4 x, Where where = Where::current()) {
  emulator::store(to, &x, sizeof x, where);
}

}  // namespace kda::cuda::ptx
