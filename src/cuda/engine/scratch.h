// A producer's scratch memory, the roles of its warps, and the part of a chunk that each thread has.
#pragma once
#include "cuda/engine/pipeline.h"

namespace kda::cuda::engine {

template <class T>
__device__ void four_of(uint2 raw, float (&x)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    const float2 a = __half22float2(reinterpret_cast<const __half2&>(raw.x));
    const float2 b = __half22float2(reinterpret_cast<const __half2&>(raw.y));
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  } else {
    x[0] = __uint_as_float(raw.x << 16), x[1] = __uint_as_float(raw.x & 0xffff0000u);
    x[2] = __uint_as_float(raw.y << 16), x[3] = __uint_as_float(raw.y & 0xffff0000u);
  }
}
template <class T>
__device__ uint2 pack_four(const float (&x)[4]) {
  return make_uint2(ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]));
}
__device__ inline void load_four(unsigned from, float (&x)[4]) {
  const float4 four = ptx::load_shared_f32x4(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// The four warps of a producer take turns in four roles, one step a chunk.
enum class WarpRole : unsigned {
  kInvert,  // I + Akk, and sends T to the other CTA
  kCopy,    // asks TMA for the next raw rows and for v, and sends the other operands
  kPlan,    // activates beta, and plans the next chunk
  kFree     // may still invert the chunk before
};

// A producer's scratch memory as one of its threads sees it, and the thread's part of a chunk.
struct Scratch : ScratchLayout {
  unsigned address;
  unsigned group, warp = __shfl_sync(kAll, threadIdx.x / 32 % 4, 0);  // so that the compiler knows that it is uniform
  unsigned lane = threadIdx.x % 32;
  unsigned turn = 0;  // how many chunks and states came before

  __device__ Scratch(unsigned address, unsigned group) : address(address), group(group) {}

  __device__ WarpRole role(unsigned turn) const { return static_cast<WarpRole>((warp - turn) % 4); }
  __device__ bool stores_ell() const { return role(turn) == WarpRole::kCopy; }
  // Synchronises all four warps.
  __device__ void sync() const { ptx::sync_threads(NamedBarrier::kProducer + group, kGroup); }
  // Likewise, and returns whether `x` is true in all threads.
  __device__ bool sync_all(bool x) const { return ptx::all_threads(NamedBarrier::kProducer + group, kGroup, x); }

  // Where the lane's four channels of the warp's row i are, in a tile of rows of 128 channels (bits 4 to 6: the
  // piece).
  __device__ unsigned own(unsigned i) const {
    const unsigned first = lane / 16 * kHalf + 8 * warp * kRowBytes + lane % 16 / 2 * 16 + lane % 2 * 8;
    return (first ^ i << 4) + i * kRowBytes;
  }
  // Stores four numbers of 16 bits where the consumer expects the lane's channels: in place of own(i) in a tile of the
  // stage. If their order is not as given, they are two parts, 16 bytes apart. The upper lanes store these the other
  // way round, as their half of a row has the banks of the lower lanes' half.
  template <Order kOrder>
  __device__ void store_channels(unsigned own, uint2 four) const {
    if constexpr (kOrder.run == 2) return ptx::store_shared2(own, four);
    const bool upper = lane / 16;
    // Within a half of a row: bits 4 to 6 the piece, which row numbers change alike in both places.
    const unsigned given = lane % 16 * 8, placed = kOrder.place(lane % 16 * 4) * 2;
    const unsigned to = own ^ given ^ placed ^ upper << 4;
    ptx::store_shared(to, upper ? four.y : four.x), ptx::store_shared(to ^ 16, upper ? four.x : four.y);
  }
  // The same of ell, in f32.
  template <Order kOrder>
  __device__ void store_ell(unsigned to, const float (&ell)[4]) const {
    if constexpr (kOrder.run == 2)
      return ptx::store_shared_f32x4(to + lane * 16, make_float4(ell[0], ell[1], ell[2], ell[3]));
    const unsigned place = to + kOrder.place(lane * 4) * 4;
    ptx::store_shared_f32x2(place, make_float2(ell[0], ell[1]));
    ptx::store_shared_f32x2(place + 32, make_float2(ell[2], ell[3]));
  }
  // Where column c of row i is in T and Aqk.
  __device__ static unsigned square(unsigned i, unsigned c) { return i * 64 + ((c / 8 ^ i / 2 % 4) << 4) + c % 8 * 2; }

  // Store and load f32 numbers of the lane's four channels of a row: two where columns of the score product will be,
  // two in `wide`.
  __device__ void store_wide(unsigned own, const float (&x)[4]) const {
    ptx::store_shared_f32x2(address + own + columns, make_float2(x[0], x[1]));
    ptx::store_shared_f32x2(address + own + wide, make_float2(x[2], x[3]));
  }
  __device__ void load_wide(unsigned own, float (&x)[4]) const {
    const float2 a = ptx::load_shared_f32x2(address + own + columns), b = ptx::load_shared_f32x2(address + own + wide);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  }

  // There are factors of two chunks, as other warps may be one chunk ahead of the warp that inverts.
  enum Factor { kNorms, kBeta = 2, kDiagonal };  // of a row: 1 / norms of q and k, beta, q.k with both norms
  __device__ unsigned factor_at(Factor kind, unsigned row) const {
    return address + factors + turn % 2 * kFactorBytes + kind * kRows * 4 + row * (kind == kNorms ? 8 : 4);
  }
  __device__ void store_norms(unsigned row, float q, float k) const {
    ptx::store_shared_f32x2(factor_at(kNorms, row), make_float2(q, k));
  }
  __device__ float2 norms(unsigned row) const { return ptx::load_shared_f32x2(factor_at(kNorms, row)); }
  __device__ void store_factor(Factor kind, unsigned row, float x) const {
    ptx::store_shared_f32(factor_at(kind, row), x);
  }
  __device__ float factor(Factor kind, unsigned row) const { return ptx::load_shared_f32(factor_at(kind, row)); }
  __device__ void load_factors(Factor kind, unsigned row, float (&x)[4]) const { load_four(factor_at(kind, row), x); }
};

}  // namespace kda::cuda::engine
