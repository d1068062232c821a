// What the kernels of the stages share (math.md 4): tensors, chunks, tiles in shared memory and their products.
//
// A tile has up to 64 rows of 256 bytes: `slice_of<E>` channels, 128 in bf16, 64 in f32. Larger sizes go slice by
// slice, smaller ones are padded with zeros. E says how products are computed: operands in bf16, or in f32 as the sums
// of two tf32 (three products, 22 bits). All sums are in f32.
#pragma once
#include "cuda/call/launch.h"
#include "cuda/call/token.h"
#include "cuda/ptx/sm80.h"
#include "problem.h"

namespace kda::cuda::stages {

using bf16 = __nv_bfloat16;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = static_cast<int>(kChunk);
template <class E>
constexpr int slice_of = 256 / sizeof(E);  // channels of a tile
// Elements from one row to the next, so that what a warp reads at once lies in different banks: 16 bytes of eight
// rows, in f32 four numbers of eight rows, or, in tiles [k][m] and [k][n], eight numbers of four rows.
template <class E>
constexpr int kStride = slice_of<E> + 16 / sizeof(E);
template <class E>
constexpr int kStrideAcross = slice_of<E> + 8;
template <class E>
constexpr int kTileBytes = kRows* kStride<E> * sizeof(E);
template <class E>
constexpr int kTileBytesAcross = kRows* kStrideAcross<E> * sizeof(E);
template <class E>
constexpr int kPerLane = slice_of<E> / 32;  // channels of a lane: 8 bytes of a row
template <class E>
constexpr int32_t dtype_of = sizeof(E) == 4 ? KDA_F32 : KDA_BF16;

__host__ __device__ constexpr int slices(int n, int slice) { return (n + slice - 1) / slice; }

// ---- tensors ----

// [B,T,heads,n], or the states [rows,heads,lines,n]. Any strides, in bytes.
struct Rows {
  char* data = nullptr;  // nullptr: absent
  int64_t batch = 0, token = 0, head = 0;
  int32_t dtype = KDA_F32;
  bool wide = false;  // rows begin at multiples of 16 bytes and have a multiple of 16 bytes

  __device__ char* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * token + h * head; }
  __host__ __device__ int size() const { return dtype == KDA_F32 ? 4 : 2; }  // of an element
};

// batch, token, head: the dimensions' numbers.
inline Rows rows_of(const kda_tensor& t, int batch, int token, int head) {
  if (!present(t)) return {};
  const int64_t size = dtype_size(t.dtype);
  Rows x{.data = static_cast<char*>(t.data)};
  x.batch = t.stride[batch] * size, x.token = t.stride[token] * size, x.head = t.stride[head] * size;
  x.dtype = t.dtype;
  x.wide = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.shape[t.ndim - 1] * size % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) x.wide = x.wide && t.stride[i] * size % 16 == 0;
  return x;
}
inline Rows rows_of(const kda_tensor& t) { return rows_of(t, 0, 1, 2); }          // of tokens
inline Rows lines_of_states(const kda_tensor& t) { return rows_of(t, 0, 2, 1); }  // b: the row, t: the line

// Kernels made for wide rows of their usual dtype are half as long. Code for other rows, though a branch skips it,
// would come through the instruction cache all the same.
template <class E, class... R>
__device__ void set_known(R&... rows) {
  ((rows.wide = true, rows.dtype = dtype_of<E>), ...);
}
// Whether all of them that are present are wide rows of dtype_of<E>.
template <class E>
bool are_known(std::initializer_list<const Rows*> all) {
  for (const Rows* x : all)
    if (x->data && (!x->wide || x->dtype != dtype_of<E>)) return false;
  return true;
}
inline int size_if_known(int64_t K, int64_t V) { return K == V && (K == 64 || K == 128) ? static_cast<int>(K) : 0; }

inline const char* stage_why_not(const kda_exec& exec, bool f64, int64_t blocks) {
  if (const char* reason = device_why_not(exec)) return reason;
  if (f64) return "float64 runs on `reference` only";
  return blocks < int64_t{1} << 31 ? nullptr : "takes at most 2^31 blocks";
}

// Products are in f32 unless all of these are in bf16. They are tensors that every call has, so that no bit depends
// on which outputs are wanted.
inline bool is_exact(std::initializer_list<const kda_tensor*> tensors) {
  for (const kda_tensor* t : tensors)
    if (t->dtype != KDA_BF16) return true;
  return false;
}

// ---- chunks ----

// Tokens t0 .. t0 + rows - 1 of row b.
struct ChunkAt {
  int64_t n, b, t0, index;  // chunk `index` of sequence n
  int rows;
  bool owned;  // false: tokens of no sequence, whose outputs are zeroed
};

// The same chunk; addresses made from it are computed anew where they are needed, and take no registers until then.
__device__ inline ChunkAt anew(ChunkAt at) {
  asm volatile("" : "+l"(at.t0), "+l"(at.b));
  return at;
}

// All chunks of a call, one for each block. With cu_seqlens sequence n has numbers from cu[n] / 64 + n on: they rise
// with n and leave room for its chunks. Tokens of no sequence come last, as one sequence more.
struct Chunks {
  int64_t T, N, per_row, count;
  kda_tensor cu_seqlens;
  bool varlen;

  explicit Chunks(const Dims& d, const kda_tensor& cu_seqlens)
      : T(d.T),
        N(d.N),
        per_row(d.max_chunks()),
        count(d.varlen ? d.T / kChunk + d.N + 1 : d.B * d.max_chunks()),
        cu_seqlens(cu_seqlens),
        varlen(d.varlen) {}

  __device__ Sequence sequence(int64_t n) const {
    if (!varlen) return {n, n, 0, T, n, true, true};
    if (n < N) return packed_at(cu_seqlens, T, n);
    const int64_t end = within(int_at(cu_seqlens, N), 0, T);
    return {n, 0, end, T - end, n, false, false};
  }
  bool whole() const { return !varlen && T % kChunk == 0; }  // no chunk has fewer rows
  // Whether there is a chunk of that number, which is then described in `at`.
  __device__ bool find(int64_t number, ChunkAt& at) const {
    if (!varlen) at.n = number / per_row, at.index = number % per_row;
    else {
      const auto first = [&](int64_t n) { return within(int_at(cu_seqlens, n), 0, T) / kChunk + n; };
      int64_t low = 0, high = N;  // the last n with first(n) <= number
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (first(middle) <= number) low = middle;
        else high = middle - 1;
      }
      at.n = low, at.index = number - first(low);
    }
    const Sequence s = sequence(at.n);
    const int64_t t = at.index * kChunk;
    if (t < 0 || t >= s.length) return false;
    at.b = s.b, at.t0 = s.t0 + t, at.rows = static_cast<int>(min(s.length - t, kChunk)), at.owned = s.live;
    return true;
  }
  // The row of h of a sequence's first chunk: the same in all threads of a warp.
  __device__ int64_t first_row(int64_t n) const {
    if (!varlen) return n * per_row;
    unsigned rows = 0;
    for (int64_t m = threadIdx.x % 32; m < n; m += 32) rows += static_cast<unsigned>(h_rows(sequence(m).length, 1));
    return __reduce_add_sync(kAll, rows);
  }
};

// ---- between tensors and tiles ----

__device__ inline float load_element(const char* from, int32_t dtype) {
  return value_of(dtype, load_raw<false>(from, dtype));
}

// The 8 bytes that a lane has of a tile's row.
template <class E>
__device__ uint2 packed(const float (&x)[kPerLane<E>]) {
  if constexpr (sizeof(E) == 4) return {__float_as_uint(x[0]), __float_as_uint(x[1])};
  else return {ptx::pack<bf16>(x[0], x[1]), ptx::pack<bf16>(x[2], x[3])};
}
template <class E>
__device__ void unpack(uint2 from, float (&x)[kPerLane<E>]) {
  if constexpr (sizeof(E) == 4) x[0] = __uint_as_float(from.x), x[1] = __uint_as_float(from.y);
  else
    x[0] = __uint_as_float(from.x << 16), x[1] = __uint_as_float(from.x & 0xffff0000u),
    x[2] = __uint_as_float(from.y << 16), x[3] = __uint_as_float(from.y & 0xffff0000u);
}
// Loads channels from c on of a row of n; zeros beyond.
template <int kCount>
__device__ void load_values(const Rows& x, const char* row, int c, int n, float (&to)[kCount]) {
  if (x.wide && x.dtype == KDA_F32) {
    const auto* from = reinterpret_cast<const float*>(row) + c;
    if constexpr (kCount == 4) {
      const float4 four = c < n ? *reinterpret_cast<const float4*>(from) : float4{};
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
      const float2 two = c < n ? *reinterpret_cast<const float2*>(from) : float2{};
      to[0] = two.x, to[1] = two.y;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {  // not unrolled: it need not be fast, and there are many copies of it
      const float one = c + i < n ? load_element(row + (c + i) * x.size(), x.dtype) : 0.0f;
#pragma unroll
      for (int j = 0; j < kCount; ++j) to[j] = i == j ? one : i ? to[j] : 0.0f;
    }
  }
}
template <class E>
__device__ uint2 load_packed(const Rows& x, const char* row, int c, int n) {
  if (x.wide && x.dtype == dtype_of<E>)
    return c < n ? *reinterpret_cast<const uint2*>(row + c * static_cast<int>(sizeof(E))) : uint2{};
  float values[kPerLane<E>];
  load_values(x, row, c, n, values);
  return packed<E>(values);
}
template <class E>
__device__ void store_packed(const Rows& x, char* row, int c, int n, uint2 y) {
  if (x.wide && x.dtype == dtype_of<E>) {
    if (c < n) *reinterpret_cast<uint2*>(row + c * static_cast<int>(sizeof(E))) = y;
    return;
  }
  float values[kPerLane<E>];
  unpack<E>(y, values);
#pragma unroll
  for (int i = 0; i < kPerLane<E>; ++i)
    if (c + i < n) store_element(row + (c + i) * x.size(), x.dtype, values[i]);
}
// A matrix in memory: lines `step` bytes apart, `lines` of them, each with n elements from `from` on.
struct Matrix {
  const char* from;
  int64_t step;
  int lines, n, dtype;
  bool wide;
};
__device__ inline Matrix tokens_of(const Rows& x, const ChunkAt& at, int64_t h, int c0, int n) {
  return {x.at(at.b, at.t0, h) + c0 * x.size(), x.token, at.rows, n - c0, x.dtype, x.wide};
}

// Starts the copies of kLines x kColumns of the matrix, or stores them at once. They are there after
// wait_for_copies() and a barrier. Zeros beyond lines and n.
template <class E, int kLines, int kColumns, int kBlock = kThreads>
__device__ void stage(const Matrix& m, void* tile, int stride) {
  E* to = static_cast<E*>(tile);
  if (m.wide && m.dtype == dtype_of<E>) {
    constexpr int kPiece = 16 / sizeof(E), kPieces = kColumns / kPiece,
                  kStep = kBlock / kPieces;  // kStep: lines at once
    const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kPiece;
    const char* from = m.from + first * m.step + c * static_cast<int>(sizeof(E));
    __builtin_assume(first < kStep);  // as threadIdx.x < kBlock: saves the checks of lines that are known to exist
#pragma unroll(kLines == kRows ? 8 : 4)
    for (int line0 = 0; line0 < kLines; line0 += kStep, from += kStep * m.step) {
      const int line = first + line0;
      if (kLines % kStep != 0 && line >= kLines) break;
      const bool real = line < m.lines && c < m.n;
      ptx::copy16(ptx::shared_address(to + line * stride + c), real ? from : m.from, real ? 16 : 0);
    }
    return;
  }
  const int size = m.dtype == KDA_F32 ? 4 : 2;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kLines * kColumns; i += kBlock) {
    const int line = i / kColumns, c = i % kColumns;
    const bool real = line < m.lines && c < m.n;
    to[line * stride + c] = static_cast<E>(real ? load_element(m.from + line * m.step + c * size, m.dtype) : 0.0f);
  }
}
__device__ inline void arrived() {
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  __syncthreads();  // what came, and what was written, is there for all
}

// Stores kLines x kColumns of a tile to x, line i at to(i). Only `lines` lines and n columns are real.
template <class E, int kLines, int kColumns, int kBlock = kThreads, class F>
__device__ void unstage(const void* tile, int stride, const Rows& x, int lines, int n, const F& to) {
  const E* from = static_cast<const E*>(tile);
  if (x.wide && x.dtype == dtype_of<E>) {
    constexpr int kPiece = 16 / sizeof(E), kPieces = kColumns / kPiece, kStep = kBlock / kPieces;
    const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces * kPiece;
#pragma unroll 2
    for (int line0 = 0; line0 < kLines; line0 += kStep) {
      const int line = first + line0;
      if (kLines % kStep != 0 && line >= kLines) break;
      if (line < lines && c < n)
        *reinterpret_cast<uint4*>(to(line) + c * static_cast<int>(sizeof(E))) =
            *reinterpret_cast<const uint4*>(from + line * stride + c);
    }
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kLines * kColumns; i += kBlock) {
    const int line = i / kColumns, c = i % kColumns;
    if (line < lines && c < n)
      store_element(to(line) + c * x.size(), x.dtype, static_cast<float>(from[line * stride + c]));
  }
}

// Stores two neighbours of a row, columns c and c + 1 of n.
__device__ inline void store_pair(const Rows& x, char* row, int c, int n, float y, float z) {
  if (x.wide && x.dtype == KDA_F32) {
    if (c < n) *reinterpret_cast<float2*>(row + c * 4) = {y, z};
    return;
  }
  if (c < n) store_element(row + c * x.size(), x.dtype, y);
  if (c + 1 < n) store_element(row + (c + 1) * x.size(), x.dtype, z);
}

__device__ inline void zero_rows(const Rows& x, const ChunkAt& at, int64_t h, int n) {
  if (!x.data) return;
  for (int i = static_cast<int>(threadIdx.x); i < at.rows * n; i += static_cast<int>(blockDim.x))
    store_element(x.at(at.b, at.t0 + i / n, h) + i % n * x.size(), x.dtype, 0);
}

// ---- products: 16 x 16 += 16 x 16 times 16 x 16, by a warp ----

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
  // The first two channels of a lane are step 0, the others step 1.
  __device__ static A split_a(float4 upper, float4 lower) {
    A a;
    const float x[8] = {upper.x, lower.x, upper.y, lower.y, upper.z, lower.z, upper.w, lower.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) split(x[i], a.big[i], a.small[i]);
    return a;
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

// ---- what kernels are launched with ----

// F1.
struct CumsumCall {
  Chunks chunks;
  Rows g, G;
  int32_t HV, K;
};
void run(const kda_exec& exec, const CumsumCall& c);

// F2, F3.
struct IntraCall {
  Chunks chunks;
  Rows q, k, v, beta;
  Rows G;       // or g, natural logarithms, if `steps`
  Rows sums;    // out, optional: G
  Rows Aqk, T;  // T is read if Aqk is absent and not `solve`
  Rows w, u, qG, kg;
  Rows ends;  // out, optional: G of the last row of chunks [B,chunks,HV,K], all of which are whole
  int32_t HV, group, K, V;
  int32_t chunk;  // of T, w, u, qG, kg: 32 or 64
  // Bytes from one chunk of w or u to the next; all rows of a chunk are written then. 0: chunks follow by token.
  int64_t w_skip, u_skip;
  float scale;
  bool steps, solve;
};
void run(const kda_exec& exec, const IntraCall& c, bool exact);

// F4.
struct ScanCall {
  Dims dims;
  Chunks chunks;
  Rows kg, w, u, G, v_new;
  Rows h0, h, hT;  // lines
  int64_t h_rows;
  bool v_first;
  Rows qG, Aqk, ends, o;  // with outputs; ends: G of the last row of chunks [B,chunks,HV,K]
  float scale;
};
void run(const kda_exec& exec, const ScanCall& c, bool exact);
// F4 and F5 in one kernel, in f32, from qG and ends in place of q and G, without h and v_new.
bool makes_outputs(const kda_exec& exec, const Dims& d);
void run_with_outputs(const kda_exec& exec, const ScanCall& c);

// F5.
struct OutputCall {
  Chunks chunks;
  Rows q, v_new, G, Aqk, o;
  Rows h;  // lines
  int64_t h_rows;
  int32_t HV, group, K, V;
  float scale;
  bool v_first;
};
void run(const kda_exec& exec, const OutputCall& c, bool exact);

}  // namespace kda::cuda::stages
