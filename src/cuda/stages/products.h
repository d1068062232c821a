// Products of tiles in shared memory: 16 x 16 += 16 x 16 times 16 x 16, by a warp.
#pragma once
#include "cuda/ptx/sm80.h"
#include "cuda/stages/chunks.h"

namespace kda::cuda::stages {

// Fragments of mma.m16n8k16, of two neighbours in n. Of a result, lane 4 g + t has rows g and g + 8, and columns 2 t
// and 2 t + 1 of each half: sum[half][0], [1] of the first row, [2], [3] of the second.
struct Sum {
  float x[2][4] = {};
  __device__ void scale(float by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] *= by;
  }
};

__device__ inline Sum sum_of(const Sum& x, const Sum& y) {
  Sum sum;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum.x[i / 4][i % 4] = x.x[i / 4][i % 4] + y.x[i / 4][i % 4];
  return sum;
}

// A sum as one chain, and as two that do not wait for each other.
struct Chain {
  Sum x;
  __device__ const Sum& sum() const { return x; }
};
struct Chains {
  Sum x[2];
  __device__ Sum sum() const { return sum_of(x[0], x[1]); }
};

template <class E>
struct Math;

template <>
struct Math<bf16> {
  using Accurate = Chain;
  struct A {
    unsigned x[4];
  };
  using B = A;
  struct Exact {  // of numbers in f32: rounded, and the rest
    A big, small;
  };

  // Loads rows from m0 on of a tile [m][k]; of a tile [k][m].
  __device__ static A load_a(const void* tile, int stride, int m0, int k0) {
    A a;
    const int lane = static_cast<int>(threadIdx.x % 32);
    ptx::load_matrices(a.x, at(tile, stride, m0 + lane % 16, k0 + lane / 16 * 8));
    return a;
  }
  __device__ static A load_a_transposed(const void* tile, int stride, int k0, int m0) {
    A a;
    const int lane = static_cast<int>(threadIdx.x % 32);
    ptx::load_transposed(a.x, at(tile, stride, k0 + lane % 8 + lane / 16 * 8, m0 + lane / 8 % 2 * 8));
    return a;
  }
  // Loads columns from n0 on of a tile [k][n]; of a tile [n][k].
  __device__ static B load_b(const void* tile, int stride, int k0, int n0) {
    B b;
    const int lane = static_cast<int>(threadIdx.x % 32);
    ptx::load_transposed(b.x, at(tile, stride, k0 + lane % 16, n0 + lane / 16 * 8));
    return b;
  }
  __device__ static B load_b_transposed(const void* tile, int stride, int n0, int k0) {
    B b;
    const int lane = static_cast<int>(threadIdx.x % 32);
    ptx::load_matrices(b.x, at(tile, stride, n0 + lane % 8 + lane / 16 * 8, k0 + lane / 8 % 2 * 8));
    return b;
  }
  // Loads from a tile of numbers in f32.
  __device__ static Exact load_exact(const float* tile, int stride, int m0, int k0) {
    Exact a;
    const float* from = tile + (m0 + static_cast<int>(threadIdx.x % 32) / 4) * stride + k0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(from + i % 2 * 8 * stride + i / 2 * 8);
      a.big.x[i] = ptx::pack<bf16>(x.x, x.y);
      a.small.x[i] =
          ptx::pack<bf16>(x.x - __uint_as_float(a.big.x[i] << 16), x.y - __uint_as_float(a.big.x[i] & 0xffff0000u));
    }
    return a;
  }
  // Clears what is above the diagonal, whatever it holds.
  __device__ static void keep_lower(A& a) {
    const int g = static_cast<int>(threadIdx.x % 32) / 4, t = static_cast<int>(threadIdx.x % 4);
    const unsigned mask = (2 * t <= g ? 0xffffu : 0) | (2 * t + 1 <= g ? 0xffff0000u : 0);
    a.x[0] &= mask, a.x[2] = 0, a.x[3] &= mask;
  }
  __device__ static void add(Sum& sum, const A& a, const B& b) {
    ptx::mma<bf16>(sum.x[0], a.x, b.x[0], b.x[1]);
    ptx::mma<bf16>(sum.x[1], a.x, b.x[2], b.x[3]);
  }
  __device__ static void add(Sum& sum, const Exact& a, const B& b) { add(sum, a.small, b), add(sum, a.big, b); }
  template <class AnyA>
  __device__ static void add(Chain& sum, const AnyA& a, const B& b) {
    add(sum.x, a, b);
  }
  // Two chains, of even and of odd steps.
  __device__ static void add(Chains& sums, const A& a, const B& b, int step) { add(sums.x[step % 2], a, b); }
  __device__ static void store_two(void* tile, int stride, int row, int column, float x, float y) {
    *reinterpret_cast<unsigned*>(static_cast<bf16*>(tile) + row * stride + column) = ptx::pack<bf16>(x, y);
  }
  __device__ static float2 load_two(const void* tile, int stride, int row, int column) {
    const unsigned x = *reinterpret_cast<const unsigned*>(static_cast<const bf16*>(tile) + row * stride + column);
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  }

 private:
  __device__ static unsigned at(const void* tile, int stride, int row, int column) {
    return ptx::shared_address(static_cast<const bf16*>(tile) + row * stride + column);
  }
};

// A product is two steps of mma.m16n8k8. Lane 4 g + t has channels t, t + 4, t + 8 and t + 12. So lanes read
// neighbours at once; any order of channels will do if a and b have the same. What many warps read is split once,
// into two tiles.
template <>
struct Math<float> {
  using Accurate = Chains;  // of the larger parts, and of the rests
  struct A {                // step s: elements 4 s ..
    unsigned big[8], small[8];
  };
  struct B {  // half h, step s: elements 4 h + 2 s ..
    unsigned big[8], small[8];
  };
  using Exact = A;

  __device__ static A load_a(const void* tile, int stride, int m0, int k0) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float* from = at(tile, stride, m0 + lane % 16, k0 + lane / 16 * 4);
    unsigned x[2][4];
    ptx::load_matrices(x[0], ptx::shared_address(from)), ptx::load_matrices(x[1], ptx::shared_address(from + 8));
    A a;
#pragma unroll
    for (int i = 0; i < 8; ++i) split(__uint_as_float(x[i / 4][i % 4]), a.big[i], a.small[i]);
    return a;
  }
  // Of the lane's four channels in rows g and g + 8. The first two channels are step 0, the others step 1.
  __device__ static A split_a(float4 upper, float4 lower) {
    A a;
    const float x[8] = {upper.x, lower.x, upper.y, lower.y, upper.z, lower.z, upper.w, lower.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) split(x[i], a.big[i], a.small[i]);
    return a;
  }
  __device__ static A load_a_transposed(const void* tile, int stride, int k0, int m0) {
    const float* from = at(tile, stride, k0 + own(), m0 + group());
    return split_a(four(from, 4 * stride), four(from + 8, 4 * stride));
  }
  // For tiles without gaps between rows, which begin at multiples of 128 bytes. Pieces of 16 bytes change places
  // within these: piece p of row i is at p ^ twist(i), or at p ^ twist_across(i) where the tile is read transposed.
  __device__ static int twist(int row) { return row & 7; }
  __device__ static int twist_across(int row) { return (row & 3) << 1; }
  __device__ static A load_a_twisted(const void* tile, int stride, int m0, int k0) {
    const int lane = static_cast<int>(threadIdx.x % 32), row = m0 + lane % 16;
    unsigned x[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int piece = (k0 / 4 % 8 + 2 * i + lane / 16) ^ twist(lane);
      ptx::load_matrices(x[i], ptx::shared_address(at(tile, stride, row, k0 / 32 * 32 + piece * 4)));
    }
    A a;
#pragma unroll
    for (int i = 0; i < 8; ++i) split(__uint_as_float(x[i / 4][i % 4]), a.big[i], a.small[i]);
    return a;
  }
  __device__ static A load_a_transposed_twisted(const void* tile, int stride, int k0, int m0) {
    const int across = twist_across(own()) * 4;
    return split_a(four(at(tile, stride, k0 + own(), (m0 + group()) ^ across), 4 * stride),
                   four(at(tile, stride, k0 + own(), (m0 + 8 + group()) ^ across), 4 * stride));
  }
  __device__ static B load_b(const void* tile, int stride, int k0, int n0) {
    const float* from = at(tile, stride, k0 + own(), n0 + group());
    return split_b(four(from, 4 * stride), four(from + 8, 4 * stride));
  }
  __device__ static B load_b_transposed(const void* tile, int stride, int n0, int k0) {
    unsigned x[8];
    load_columns(x, tile, stride, n0, k0);
    B b;
#pragma unroll
    for (int i = 0; i < 8; ++i) split(__uint_as_float(x[i]), b.big[i], b.small[i]);
    return b;
  }
  // Loads numbers that were split, whose rests are `apart` bytes behind them.
  __device__ static B load_b_split(const void* tiles, int apart, int stride, int k0, int n0) {
    const float *from = at(tiles, stride, k0 + own(), n0 + group()), *rest = from + apart / 4;
    return b_of(four(from, 4 * stride), four(from + 8, 4 * stride), four(rest, 4 * stride), four(rest + 8, 4 * stride));
  }
  __device__ static B load_b_transposed_split(const void* tiles, int apart, int stride, int n0, int k0) {
    B b;
    load_columns(b.big, tiles, stride, n0, k0);
    load_columns(b.small, static_cast<const char*>(tiles) + apart, stride, n0, k0);
    return b;
  }
  __device__ static void store_split(void* tiles, int apart, int stride, int row, int column, float x) {
    unsigned big, small;
    split(x, big, small);
    unsigned* to = static_cast<unsigned*>(tiles) + row * stride + column;
    to[0] = big, to[apart / 4] = small;
  }
  __device__ static void store_two_split(void* tiles, int apart, int stride, int row, int column, float x, float y) {
    uint2 big, small;
    split(x, big.x, small.x), split(y, big.y, small.y);
    unsigned* to = static_cast<unsigned*>(tiles) + row * stride + column;
    *reinterpret_cast<uint2*>(to) = big, *reinterpret_cast<uint2*>(to + apart / 4) = small;
  }
  __device__ static Exact load_exact(const float* tile, int stride, int m0, int k0) {
    return load_a(tile, stride, m0, k0);
  }
  __device__ static void keep_lower(A& a) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // a's rows g, g + 8 of channel t + 4 (i / 2)
      const int row = group() + i % 2 * 8, channel = own() + i / 2 * 4;
      if (channel > row) a.big[i] = a.small[i] = 0;
    }
  }
  // Tensor cores cut off what a sum has no room for. With fewer additions to the larger sum less is cut off, so the
  // rests have a sum of their own.
  __device__ static void add(Sum& sum, Sum& of_rests, const A& a, const B& b) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const unsigned big[4] = {a.big[4 * step], a.big[4 * step + 1], a.big[4 * step + 2], a.big[4 * step + 3]};
      const unsigned small[4] = {a.small[4 * step], a.small[4 * step + 1], a.small[4 * step + 2],
                                 a.small[4 * step + 3]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * half + 2 * step;
        ptx::mma_tf32(of_rests.x[half], big, b.small[i], b.small[i + 1]);
        ptx::mma_tf32(sum.x[half], big, b.big[i], b.big[i + 1]);
        ptx::mma_tf32(of_rests.x[half], small, b.big[i], b.big[i + 1]);
      }
    }
  }
  __device__ static void add(Sum& sum, const A& a, const B& b) { add(sum, sum, a, b); }
  __device__ static void add(Chains& sums, const A& a, const B& b, int = 0) { add(sums.x[0], sums.x[1], a, b); }
  __device__ static void store_two(void* tile, int stride, int row, int column, float x, float y) {
    *reinterpret_cast<float2*>(static_cast<float*>(tile) + row * stride + column) = {x, y};
  }
  __device__ static float2 load_two(const void* tile, int stride, int row, int column) {
    return *reinterpret_cast<const float2*>(static_cast<const float*>(tile) + row * stride + column);
  }

 private:
  __device__ static int group() { return static_cast<int>(threadIdx.x % 32) / 4; }
  __device__ static int own() { return static_cast<int>(threadIdx.x % 4); }
  __device__ static const float* at(const void* tile, int stride, int row, int column) {
    return static_cast<const float*>(tile) + row * stride + column;
  }
  // Eight by four numbers of 32 bits are loaded as eight by eight of 16 bits.
  __device__ static void load_columns(unsigned (&x)[8], const void* tile, int stride, int n0, int k0) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float* from = at(tile, stride, n0 + lane % 8, k0 + lane / 8 * 4);
    unsigned half[2][4];
    ptx::load_matrices(half[0], ptx::shared_address(from));
    ptx::load_matrices(half[1], ptx::shared_address(from + 8 * stride));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = half[i / 4][i % 4];
  }
  __device__ static float4 four(const float* from, int step) {
    return {from[0], from[step], from[2 * step], from[3 * step]};
  }
  // Splits x into what is rounded to 11 bits, and the rest, of which tensor cores cut off what is beyond 11 bits. The
  // rest has either sign, so that errors do not add up. A NaN is in the rest.
  __device__ static void split(float x, unsigned& big, unsigned& small) {
    big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
  }
  __device__ static B split_b(float4 left, float4 right) {
    B b;
    const float x[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) split(x[i], b.big[i], b.small[i]);
    return b;
  }
  __device__ static B b_of(float4 left, float4 right, float4 rest_left, float4 rest_right) {
    const float big[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
    const float small[8] = {rest_left.x,  rest_left.y,  rest_left.z,  rest_left.w,
                            rest_right.x, rest_right.y, rest_right.z, rest_right.w};
    B b;
#pragma unroll
    for (int i = 0; i < 8; ++i) b.big[i] = __float_as_uint(big[i]), b.small[i] = __float_as_uint(small[i]);
    return b;
  }
};

// Calls f(row, column, x, y) for every pair of a lane: columns `column` and `column` + 1 of 16 x 16.
template <class F>
__device__ void for_each_pair(const Sum& sum, const F& f) {
  const int g = static_cast<int>(threadIdx.x % 32) / 4, t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    f(g, 8 * half + 2 * t, sum.x[half][0], sum.x[half][1]);
    f(g + 8, 8 * half + 2 * t, sum.x[half][2], sum.x[half][3]);
  }
}

}  // namespace kda::cuda::stages
