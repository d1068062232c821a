// Small f32 matrix products on scratch: rows of C stay in registers while the inner dimension runs.
// Every element of C is summed in one accumulator in ascending order of the inner index, whatever tile it falls into,
// so neither tile sizes nor the splitting of columns over threads changes a bit.
#if defined(KDA_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_GEMM_INL_H_
#undef KDA_CPU_GEMM_INL_H_
#else
#define KDA_CPU_GEMM_INL_H_
#endif

#include "cpu/simd-inl.h"

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Tile sizes. FMA latency (4) times issue rate (2 for 256 bits, 1..2 for 512) asks for 8 accumulators; more of them
// also reuse each load of B more often. 16 registers: 4x2 + 2 of B + 1 of A. 32 registers: 8x2.
#if HWY_TARGET == HWY_AVX3
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kCols = 2;  // vectors

enum class Acc {
  kSet,    // C  = A B
  kAdd,    // C += A B
  kSub,    // C -= A B
  kDecay,  // C  = Diag(decay) from + A B; from may be C
};

template <int R, int N>
struct Tile {
  Vec c[R][N];

  HWY_INLINE void zero() {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < N; ++j) c[i][j] = hn::Zero(kF32);
  }
  HWY_INLINE void load_from(Matrix m) {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < N; ++j) c[i][j] = load(m.row(i) + j * lanes());
  }
  HWY_INLINE void store_to(Matrix m) const {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < N; ++j) store(c[i][j], m.row(i) + j * lanes());
  }
  HWY_INLINE void scale_rows(const float* d) {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < N; ++j) c[i][j] = hn::Mul(c[i][j], splat(d[i]));
  }
  // c (+|-)= A[:, 0:K] B[0:K, :]
  template <bool kNegate>
  HWY_INLINE void multiply(int64_t K, Scalars A, Matrix B) {
    const float *a = A.a, *b = B.data;
    for (int64_t k = 0; k < K; ++k, a += A.col, b += B.pitch) {
      Vec bk[N];
      for (int j = 0; j < N; ++j) bk[j] = load(b + j * lanes());
      for (int i = 0; i < R; ++i) {
        const Vec ai = splat(a[i * A.row]);
        for (int j = 0; j < N; ++j)
          c[i][j] = kNegate ? hn::NegMulAdd(ai, bk[j], c[i][j]) : hn::MulAdd(ai, bk[j], c[i][j]);
      }
    }
  }
};

// Operands of Acc::kDecay: C = Diag(factor) from + A B. `from` may be C itself.
struct Decay {
  const float* factor = nullptr;
  Matrix from{};
};

template <Acc kAcc, int R, int N>
HWY_INLINE void gemm_tile(int64_t m, int64_t n, int64_t K, Scalars A, Matrix B, Matrix C, Decay decay) {
  Tile<R, N> t;
  if constexpr (kAcc == Acc::kSet) {
    t.zero();
  } else if constexpr (kAcc == Acc::kDecay) {
    t.load_from(decay.from.from(m, n));
    t.scale_rows(decay.factor + m);
  } else {
    t.load_from(C.from(m, n));
  }
  t.template multiply<kAcc == Acc::kSub>(K, A.from(m, 0), B.from(0, n));
  t.store_to(C.from(m, n));
}

// Prefetches rows of A. Another thread may have written them, and its cache is far.
HWY_INLINE void prefetch_scalars(int64_t rows, int64_t K, Scalars A) {
  if (A.col == 1) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < K; k += 16) __builtin_prefetch(A(i, k));
  } else {
    for (int64_t k = 0; k < K; ++k) __builtin_prefetch(A(0, k));
  }
}

template <Acc kAcc, int N>
HWY_INLINE void gemm_columns(int64_t n, int64_t M, int64_t K, Scalars A, Matrix B, Matrix C, Decay decay) {
  int64_t m = 0;
  for (; m + kRows <= M; m += kRows) {
    if (n == 0 && m + 2 * kRows <= M) prefetch_scalars(kRows, K, A.from(m + kRows, 0));
    gemm_tile<kAcc, kRows, N>(m, n, K, A, B, C, decay);
  }
  for (; m < M; ++m) gemm_tile<kAcc, 1, N>(m, n, K, A, B, C, decay);
}

// Computes C[M][N] from A(M, K) and B[K][N]. N is rounded up to whole vectors (scratch rows are padded). One strip of
// B columns stays in L1 while all rows of A pass.
template <Acc kAcc>
HWY_NOINLINE void gemm(int64_t M, int64_t N, int64_t K, Scalars A, Matrix B, Matrix C, Decay decay = {}) {
  int64_t n = 0;
  for (; n + kCols * lanes() <= padded(N); n += kCols * lanes()) gemm_columns<kAcc, kCols>(n, M, K, A, B, C, decay);
  for (; n < padded(N); n += lanes()) gemm_columns<kAcc, 1>(n, M, K, A, B, C, decay);
}

// Triangular products. A(i, j) counts only for j <= i (kLower) or j >= i (kUpper); the rest is never read, so a NaN in
// a later token cannot reach an earlier one.
enum class Triangle { kLower, kUpper };

template <Triangle kTriangle, bool kSolve, int R, int N>
HWY_INLINE void triangle_tile(int64_t i0, int64_t n, int64_t L, Scalars A, Matrix B, Matrix C) {
  constexpr bool kIsLower = kTriangle == Triangle::kLower;
  Tile<R, N> t;
  t.load_from(C.from(i0, n));
  const int64_t k0 = kIsLower ? 0 : i0 + R, k1 = kIsLower ? i0 : L;
  t.template multiply<kSolve>(k1 - k0, A.from(i0, k0), B.from(k0, n));
  for (int s = 0; s < R; ++s) {
    // A solve eliminates with rows of C that are already final: ascending for lower, descending for upper.
    const int k = kSolve && !kIsLower ? R - 1 - s : s;
    Vec bk[N];
    for (int j = 0; j < N; ++j) bk[j] = kSolve ? t.c[k][j] : load(B.row(i0 + k) + n + j * lanes());
    for (int i = 0; i < R; ++i) {
      const bool counts = kIsLower ? (kSolve ? i > k : i >= k) : (kSolve ? i < k : i <= k);
      if (!counts) continue;
      const Vec ai = splat(*A(i0 + i, i0 + k));
      for (int j = 0; j < N; ++j)
        t.c[i][j] = kSolve ? hn::NegMulAdd(ai, bk[j], t.c[i][j]) : hn::MulAdd(ai, bk[j], t.c[i][j]);
    }
  }
  t.store_to(C.from(i0, n));
}

template <Triangle kTriangle, bool kSolve, int N>
HWY_INLINE void triangle_columns(int64_t n, int64_t L, Scalars A, Matrix B, Matrix C) {
  const int64_t whole = L / kRows * kRows;
  if constexpr (kSolve && kTriangle == Triangle::kUpper) {  // last row first
    for (int64_t i = L - 1; i >= whole; --i) triangle_tile<kTriangle, kSolve, 1, N>(i, n, L, A, B, C);
    for (int64_t i = whole - kRows; i >= 0; i -= kRows) triangle_tile<kTriangle, kSolve, kRows, N>(i, n, L, A, B, C);
  } else {
    for (int64_t i = 0; i < whole; i += kRows) triangle_tile<kTriangle, kSolve, kRows, N>(i, n, L, A, B, C);
    for (int64_t i = whole; i < L; ++i) triangle_tile<kTriangle, kSolve, 1, N>(i, n, L, A, B, C);
  }
}

template <Triangle kTriangle, bool kSolve>
HWY_INLINE void triangle_all(int64_t L, int64_t N, Scalars A, Matrix B, Matrix C) {
  int64_t n = 0;
  for (; n + kCols * lanes() <= padded(N); n += kCols * lanes())
    triangle_columns<kTriangle, kSolve, kCols>(n, L, A, B, C);
  for (; n < padded(N); n += lanes()) triangle_columns<kTriangle, kSolve, 1>(n, L, A, B, C);
}

// C[L][N] += tri(A) B[L][N], the diagonal of A included.
template <Triangle kTriangle>
HWY_NOINLINE void add_triangle(int64_t L, int64_t N, Scalars A, Matrix B, Matrix C) {
  triangle_all<kTriangle, false>(L, N, A, B, C);
}

// C <- (I + strict_tri(A))^-1 C in place: forward (kLower) or backward (kUpper) substitution in f32.
template <Triangle kTriangle>
HWY_NOINLINE void solve_triangle(int64_t L, int64_t N, Scalars A, Matrix C) {
  triangle_all<kTriangle, true>(L, N, A, C, C);
}

// C[i][j] = sum_k A(i, k) B[k][j] for j <= i (whole tiles of 16 columns that touch the triangle; the rest stays).
inline void gemm_lower(int64_t L, int64_t K, Scalars A, Matrix B, Matrix C) {
  for (int64_t i = 0; i < L; i += kPad) {
    const int64_t rows = std::min(kPad, L - i);
    gemm<Acc::kSet>(rows, i + rows, K, A.from(i, 0), B, C.from(i, 0));
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
