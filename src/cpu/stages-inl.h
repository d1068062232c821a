// Moves the operands of one chunk between the stages' tensors and scratch.
#if defined(KDA_CPU_STAGES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_STAGES_INL_H_
#undef KDA_CPU_STAGES_INL_H_
#else
#define KDA_CPU_STAGES_INL_H_
#endif

#include "cpu/gradients-inl.h"
#include "cpu/stages.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

struct Stage : Gradients {
  Chunk c;
  Matrix T;      // [C][C]  (I + Akk)^-1
  Matrix w, u;   // [C][K], [C][V]
  Matrix S, dS;  // [K][V]

  Stage(Arena arena, int64_t K, int64_t V, uint64_t* bytes = nullptr) : c(arena, K, V) {
    T = take(arena, kChunk, kChunk);
    w = take(arena, kChunk, K), u = take(arena, kChunk, V);
    for (Matrix* m : {&S, &dS}) *m = take(arena, padded(K), V);
    take_from(arena, K, V);
    if (bytes) *bytes = arena.bytes();
  }
};

// Load and store n columns, from v0 on, of the chunk's rows of one head.
inline void load_rows(const kda_tensor& t, const ChunkAt& where, int64_t head, int64_t n, Matrix m, int64_t v0 = 0) {
  for (int64_t i = 0; i < where.L; ++i) {
    prefetch_row(t, where.b, where.t0 + i, head);
    load_row(t.dtype, at(t, where.b, where.t0 + i, head) + v0 * dtype_size(t.dtype), n, m.row(i));
  }
}
inline void store_rows(const kda_tensor& t, const ChunkAt& where, Matrix m, int64_t n, int64_t v0 = 0) {
  if (!present(t)) return;
  for (int64_t i = 0; i < where.L; ++i)
    store_row(t.dtype, m.row(i), n, at(t, where.b, where.t0 + i, where.hv) + v0 * dtype_size(t.dtype));
}

inline void load_column(const kda_tensor& t, const ChunkAt& where, float* x) {
  for (int64_t i = 0; i < where.L; ++i) x[i] = load_scalar(t.dtype, at(t, where.b, where.t0 + i, where.hv));
}
inline void store_column(const kda_tensor& t, const ChunkAt& where, const float* x) {
  for (int64_t i = 0; i < where.L; ++i) store_scalar(t.dtype, x[i], at(t, where.b, where.t0 + i, where.hv));
}

// Load and store a matrix of the chunk. What lies above its diagonal is not read, whatever it holds, and is written
// as 0.
inline void load_scores(const kda_tensor& t, const ChunkAt& where, Matrix m) {
  for (int64_t i = 0; i < where.L; ++i) {
    zero(m.row(i), kChunk);
    load_row(t.dtype, at(t, where.b, where.t0 + i, where.hv), i + 1, m.row(i));
  }
}
inline void store_scores(const kda_tensor& t, const ChunkAt& where, Matrix m, bool strict = false) {
  for (int64_t i = 0; i < where.L; ++i) {
    const int64_t first = i + !strict;
    zero(m.row(i) + first, kChunk - first);
  }
  store_rows(t, where, m, kChunk);
}
inline void scale_rows(Matrix m, int64_t rows, int64_t columns, float factor) {
  for (int64_t i = 0; i < rows; ++i) scale_row(m.row(i), factor, columns, m.row(i));
}

// Computes alpha_i = 2^(G_i - G_(i-1)). From here on decays are multiplied in order, as everywhere else.
inline void load_decays(const Chunk& c, const kda_tensor& G, const ChunkAt& where) {
  load_rows(G, where, where.hv, c.K, c.alpha);
  for (int64_t i = where.L - 1; i >= 0; --i)
    for (int64_t d = 0; d < padded(c.K); d += lanes()) {
      float* alpha = c.alpha.row(i) + d;
      const Vec step = i ? hn::Sub(load(alpha), load(c.alpha.row(i - 1) + d)) : load(alpha);
      store(exp(hn::Mul(step, splat(0.693147181f))), alpha);
    }
}

// ell = 2^G of the chunk's last token.
inline void load_chunk_decay(const Chunk& c, const kda_tensor& G, const ChunkAt& where) {
  load_row(G.dtype, at(G, where.b, where.t0 + where.L - 1, where.hv), c.K, c.ell);
  for (int64_t d = 0; d < padded(c.K); d += lanes())
    store(exp(hn::Mul(load(c.ell + d), splat(0.693147181f))), c.ell + d);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
