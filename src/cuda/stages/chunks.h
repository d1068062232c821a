// What the kernels of the stages share (math.md 4): tensors and chunks.
//
// A tile has up to 64 rows of 256 bytes: `slice_of<E>` channels, 128 in bf16, 64 in f32. Larger sizes go slice by
// slice, smaller ones are padded with zeros. E says how products are computed: operands in bf16, or in f32 as the sums
// of two tf32 (three products, 22 bits). All sums are in f32.
#pragma once
#include "contract/problem.h"
#include "cuda/call/launch.h"
#include "cuda/call/token.h"

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

}  // namespace kda::cuda::stages
