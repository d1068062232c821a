// A warp's 16 value columns in the scan of chunks (chunk_scan.h) and in its reverse: values on their way in and out,
// products with images of triangles, and the state.
//
// Range of f16: each column has a power of two 2^x, and its registers hold V, S, R, U and O times 2^-x. x is a
// multiple of 16. It is chosen anew in each chunk, so that the largest number of the column, of S before the chunk
// and of V in it, is within [2^-9, 2^7). So x seldom changes, and when it does, S is rescaled exactly. Then |R| and
// |U| stay below 2^15 with |k| <= 1.
#pragma once
#include "cuda/call/state_rows.h"
#include "cuda/prefill/chunk_image.h"
#include "cuda/ptx/sm80.h"

namespace kda::cuda {

constexpr int kWarpColumns = 16;
constexpr int kExponentStep = 16, kMostSteps = 7;
constexpr float kMostFloat = 3.4028235e38f;

// Lane 4 i + j has the warp's columns row_column() and row_column() + 2, which are rows i and i + 8 of S^T. So
// columns 4 j .. 4 j + 3 of a token are in one lane when V is transposed on its way in, and O on its way out.
__device__ inline unsigned row_column() { return threadIdx.x % 32 / 8 * 4 + threadIdx.x / 4 % 2; }

// 2^e.
__device__ inline float power_of_two(int e) { return __int_as_float((127 + e) << 23); }

// ptx::transposed() for pairs of f32: their halves one after the other.
__device__ inline float2 transposed(float x, float y) {
  const unsigned a = __float_as_uint(x), b = __float_as_uint(y);
  const unsigned low = ptx::transposed(__byte_perm(a, b, 0x5410)), high = ptx::transposed(__byte_perm(a, b, 0x7632));
  return {__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632))};
}

// Eight tokens of the warp's columns: in memory, where a lane has four columns of its token, and as tiles of
// accumulators. `aligned`: at multiples of 8 bytes.
__device__ inline uint4 load_values(const char* from, bool f32, bool aligned) {
  uint4 x{};
  if (aligned) {
    const uint2 first = *reinterpret_cast<const uint2*>(from);
    x.x = first.x, x.y = first.y;
    if (f32) {
      const uint2 second = *reinterpret_cast<const uint2*>(from + 8);
      x.z = second.x, x.w = second.y;
    }
  } else if (f32) {
    const auto* all = reinterpret_cast<const unsigned*>(from);
    x = make_uint4(all[0], all[1], all[2], all[3]);
  } else {
    const auto* all = reinterpret_cast<const uint16_t*>(from);
    x.x = all[0] | static_cast<unsigned>(all[1]) << 16, x.y = all[2] | static_cast<unsigned>(all[3]) << 16;
  }
  return x;
}
__device__ inline void take_values(float (&tile)[4], const uint4& raw, int32_t dtype) {
  if (dtype == KDA_F32) {
    const float2 first = transposed(__uint_as_float(raw.x), __uint_as_float(raw.y));
    const float2 second = transposed(__uint_as_float(raw.z), __uint_as_float(raw.w));
    tile[0] = first.x, tile[1] = first.y, tile[2] = second.x, tile[3] = second.y;
    return;
  }
  const unsigned first = ptx::transposed(raw.x), second = ptx::transposed(raw.y);
  if (dtype == KDA_BF16) {
    tile[0] = __uint_as_float(first << 16), tile[1] = __uint_as_float(first & 0xffff0000u);
    tile[2] = __uint_as_float(second << 16), tile[3] = __uint_as_float(second & 0xffff0000u);
  } else {
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(first));
    const float2 y = __half22float2(reinterpret_cast<const __half2&>(second));
    tile[0] = x.x, tile[1] = x.y, tile[2] = y.x, tile[3] = y.y;
  }
}
// `real`: the lane's token exists.
__device__ inline void store_values(char* to, const float (&tile)[4], int32_t dtype, bool real, bool aligned) {
  if (dtype == KDA_F32) {
    const float2 first = transposed(tile[0], tile[1]), second = transposed(tile[2], tile[3]);
    if (!real) return;
    if (aligned) {
      reinterpret_cast<float2*>(to)[0] = first, reinterpret_cast<float2*>(to)[1] = second;
    } else {
      auto* all = reinterpret_cast<float*>(to);
      all[0] = first.x, all[1] = first.y, all[2] = second.x, all[3] = second.y;
    }
    return;
  }
  const auto pack = [&]<class T>() {
    const unsigned first = ptx::pack<T>(tile[0], tile[1]), second = ptx::pack<T>(tile[2], tile[3]);
    return make_uint2(ptx::transposed(first), ptx::transposed(second));
  };
  const uint2 x = dtype == KDA_BF16 ? pack.template operator()<__nv_bfloat16>() : pack.template operator()<__half>();
  if (!real) return;
  if (aligned) {
    *reinterpret_cast<uint2*>(to) = x;
  } else {
    auto* all = reinterpret_cast<uint16_t*>(to);
    all[0] = static_cast<uint16_t>(x.x), all[1] = static_cast<uint16_t>(x.x >> 16);
    all[2] = static_cast<uint16_t>(x.y), all[3] = static_cast<uint16_t>(x.y >> 16);
  }
}

// Where a state's columns are in memory, from the lane's first on.
struct ColumnPlace {
  char* first;
  uint64_t column, channel;  // bytes from one to the next
  int32_t dtype;
  bool wide;  // channels side by side, four an access

  __device__ ColumnPlace(const TypedView& t, bool v_first, bool wide, int64_t row, unsigned hv, unsigned v)
      : column(v_first ? t.stride2 : size_of(t.dtype)),
        channel(v_first ? size_of(t.dtype) : t.stride2),
        dtype(t.dtype),
        wide(wide) {
    first = t.at(static_cast<unsigned>(row), hv, 0) + (v + row_column()) * column + threadIdx.x % 4 * 4 * channel;
  }
};

// Two neighbouring tiles of an accumulator as an operand.
__device__ inline void pack_tiles(unsigned (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = ptx::pack<__half>(first[0], first[1]), a[1] = ptx::pack<__half>(first[2], first[3]);
  a[2] = ptx::pack<__half>(second[0], second[1]), a[3] = ptx::pack<__half>(second[2], second[3]);
}

// to += from A^T, over tokens; A is triangular.
__device__ inline void add_triangle(float (&to)[4][4], const float (&from)[4][4], unsigned A) {
  unsigned first[4], second[4];
  pack_tiles(first, from[0], from[1]), pack_tiles(second, from[2], from[3]);
  uint4 x[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) x[b] = ptx::load_shared4(A + b * 512);
#pragma unroll
  for (int b = 0; b < 4; ++b) ptx::mma<__half>(to[b], first, x[b].x, x[b].y);
#pragma unroll
  for (int b = 2; b < 4; ++b) ptx::mma<__half>(to[b], second, x[b].z, x[b].w);
}

// The same where `from` has numbers that f16 cannot represent: they affect only their own token and those after it.
// (In a product 0 times NaN would reach those before.)
constexpr float kMostValue = 65504;
template <bool kFresh>  // `to` was 0
__device__ void mend(float (&to)[4][4], const float (&from)[4][4], unsigned A) {
  float rest[4][4];
  int first[2] = {kRows, kRows};  // the first such token in the lane's columns
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool fits = fabsf(from[t][e]) <= kMostValue;
      rest[t][e] = fits ? from[t][e] : 0.0f;
      if (!fits) first[e / 2] = min(first[e / 2], t * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2);
      if (kFresh) to[t][e] = 0;
    }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    for (int lane = 1; lane < 4; lane *= 2) first[r] = min(first[r], __shfl_xor_sync(kAll, first[r], lane));
  add_triangle(to, rest, A);
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (t * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2 >= first[e / 2]) to[t][e] = __int_as_float(0x7fc00000);
}

// S^T of a warp: tiles 2 s and 2 s + 1 hold channels 16 s + 4 j and + 1, and + 2 and + 3.
template <int kK>
struct ColumnState {
  static constexpr int kSteps = kK / 16;
  float S[kK / 8][4] = {};
  int x[2] = {};  // of the lane's columns: the registers hold S 2^-x

  template <class T>
  __device__ void load_as(const ColumnPlace& at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const char* from = at.first + r * 2 * at.column + s * 16 * (at.wide ? sizeof(T) : at.channel);
        float four[4];
        if (at.wide) {
          const float4 whole = load_four(reinterpret_cast<const T*>(from));
          four[0] = whole.x, four[1] = whole.y, four[2] = whole.z, four[3] = whole.w;
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) four[e] = static_cast<float>(*reinterpret_cast<const T*>(from + e * at.channel));
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) S[2 * s + e / 2][2 * r + e % 2] = four[e];
      }
  }
  template <class T>
  __device__ void store_as(const ColumnPlace& at) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        char* to = at.first + r * 2 * at.column + s * 16 * (at.wide ? sizeof(T) : at.channel);
        const float back = power_of_two(x[r]);
        const float(&a)[4] = S[2 * s], (&b)[4] = S[2 * s + 1];
        const float four[4] = {a[2 * r] * back, a[2 * r + 1] * back, b[2 * r] * back, b[2 * r + 1] * back};
        if (at.wide) {
          store_four(reinterpret_cast<T*>(to), make_float4(four[0], four[1], four[2], four[3]));
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) *reinterpret_cast<T*>(to + e * at.channel) = static_cast<T>(four[e]);
        }
      }
  }
  __device__ void load(const ColumnPlace& at) {
    if (at.dtype == KDA_F32) load_as<float>(at);
    else load_as<__nv_bfloat16>(at);
  }
  __device__ void store(const ColumnPlace& at) const {
    if (at.dtype == KDA_F32) store_as<float>(at);
    else store_as<__nv_bfloat16>(at);
  }

  // Chooses x for a chunk with these values.
  __device__ void choose_exponents(const float (&V)[4][4]) {
    int change[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float of_S = 0, of_V = 0;
#pragma unroll
      for (int t = 0; t < kK / 8; ++t) of_S = fmaxf(of_S, fmaxf(fabsf(S[t][2 * r]), fabsf(S[t][2 * r + 1])));
#pragma unroll
      for (int t = 0; t < 4; ++t) of_V = fmaxf(of_V, fmaxf(fabsf(V[t][2 * r]), fabsf(V[t][2 * r + 1])));
      if (of_V > kMostFloat) {  // an infinity affects only its own token and those after it
        of_V = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float one = fabsf(V[e / 2][2 * r + e % 2]);
          of_V = one <= kMostFloat ? fmaxf(of_V, one) : of_V;
        }
      }
      int e = max(exponent_of(of_S) + x[r], exponent_of(of_V));
      e = max(e, __shfl_xor_sync(kAll, e, 1)), e = max(e, __shfl_xor_sync(kAll, e, 2));
      // Floored: 2^e is within [2^-9, 2^7) of 2^x.
      const int steps =
          e < kZero / 2 ? 0 : min(max((e + 9 + 1024) / kExponentStep - 1024 / kExponentStep, -kMostSteps), kMostSteps);
      change[r] = steps * kExponentStep - x[r], x[r] += change[r];
    }
    if (!__any_sync(kAll, change[0] | change[1])) return;
    const float half[2] = {power_of_two(-change[0] / 2), power_of_two(-change[1] / 2)};
    multiply(half[0], half[1]), multiply(half[0], half[1]);
  }

  // S <- Diag(ell) S. A number that becomes so small beside the largest of its column that it could be subnormal in
  // memory becomes 0. So a call that goes on from there has the same bits as one that never stopped.
  __device__ void decay(const unsigned ell) {
    const bool small = __any_sync(kAll, x[0] < 0 || x[1] < 0);
    const int e[2] = {min(x[0], 0), min(x[1], 0)};
    if (small) multiply(power_of_two(e[0]), power_of_two(e[1]));
    only_decay(ell);
    if (small) multiply(power_of_two(-e[0]), power_of_two(-e[1]));
  }
  // The same, however small numbers become.
  __device__ void only_decay(const unsigned ell) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float4 four = ptx::load_shared_f32x4(ell + (s * 16 + threadIdx.x % 4 * 4) * 4);
      const float decays[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& one = S[2 * s + e % 4 / 2][e / 4 * 2 + e % 2];
        one = ptx::multiply_flushed(one, decays[e % 4]);
      }
    }
  }

  // Tiles 2 s and 2 s + 1 as an operand.
  __device__ void operand(unsigned (&a)[4], int s) const { pack_tiles(a, S[2 * s], S[2 * s + 1]); }

  // Multiplies the lane's two columns.
  __device__ void multiply(float first, float second) {
#pragma unroll
    for (int t = 0; t < kK / 8; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[t][e] = ptx::multiply_flushed(S[t][e], e < 2 ? first : second);
  }

 private:
  static constexpr int kZero = -1000;
  __device__ static int exponent_of(float x) { return x > 0 ? (__float_as_int(x) >> 23) - 127 : kZero; }
};

}  // namespace kda::cuda
