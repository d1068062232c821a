// One chunk of the chunked form (math.md 4), in f32, for one sequence and head. Shared by forward and backward.
//
// Decays only ever appear as ordered products of alpha = exp(g) in [0, 1], never as quotients or exponents of sums,
// so they are exact for every gate, -inf included. Scores are built dyadically (math.md 4.4 c): pairs inside a
// 16-token block one by one with a running product, and the blocks below the diagonal at levels 32 and 64 as matrix
// products around an anchor.
#if defined(KDA_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_CHUNK_INL_H_
#undef KDA_CPU_CHUNK_INL_H_
#else
#define KDA_CPU_CHUNK_INL_H_
#endif

#include "cpu/arena.h"
#include "cpu/gemm-inl.h"
#include "cpu/team.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

constexpr int64_t kBlock = 16;  // pairs closer than this are scored one by one
constexpr int64_t kHalf = kChunk / 2;

inline Matrix take(Arena& arena, int64_t rows, int64_t columns) {
  return {arena.floats(rows * pitch(columns)), pitch(columns)};
}

// Columns of a head's state that a task works on, with scratch to transpose them.
struct StateTile {
  int64_t K, V;
  Matrix rows{};  // [16][K]

  StateTile(int64_t K, int64_t V) : K(K), V(V) {}
  StateTile(Arena& arena, int64_t K, int64_t V) : K(K), V(V), rows(take(arena, kPad, K)) {}
};

// Buffers of one chunk. Rows are tokens 0 .. L-1 of the chunk unless said otherwise.
struct Chunk : StateTile {
  int64_t L = 0;
  Matrix q, k;                    // [C][K]    normalised; q carries scale
  Matrix alpha;                   // [C][K]
  Matrix qG, kG, kg;              // [C][K]    q E, k E, k F: decayed from the chunk's start, and to its end
  Matrix v;                       // [C][V]    becomes v_new
  Matrix Aqk, Akk;                // [C][C]    with scale in Aqk and beta in Akk
  Matrix row_q, row_k, col_k;     // [C/2][K]  decayed operands of one off-diagonal block
  Matrix col_kT;                  // [K][C/2]
  float* ell;                     // [K]       decay of the whole chunk
  float* dt_bias;                 // [K]       of the head
  float *beta, *q_norm, *k_norm;  // [C]

  Chunk(Arena& arena, int64_t K, int64_t V) : StateTile(K, V) {
    for (Matrix* m : {&q, &k, &alpha, &qG, &kG, &kg}) *m = take(arena, kChunk, K);
    v = take(arena, kChunk, V);
    for (Matrix* m : {&Aqk, &Akk}) *m = take(arena, kChunk, kChunk);
    for (Matrix* m : {&row_q, &row_k, &col_k}) *m = take(arena, kHalf, K);
    col_kT = take(arena, padded(K), kHalf);
    rows = take(arena, kPad, K);
    for (float** p : {&ell, &dt_bias}) *p = arena.floats(padded(K));
    for (float** p : {&beta, &q_norm, &k_norm}) *p = arena.floats(kChunk);
  }
};

// What is left of a chunk once its inputs are loaded, activated and scored: all that the recurrence over chunks reads.
// It has memory of its own, so one thread can prepare it while others still work on the chunks before it (team.h).
struct PreparedChunk {
  Matrix qG, kG, kg;  // [C][K]
  Matrix v;           // [C][V]
  Matrix Aqk, Akk;    // [C][C]
  float *ell, *beta;  // [K], [C]

  PreparedChunk(Arena& arena, int64_t K, int64_t V) {
    for (Matrix* m : {&qG, &kG, &kg}) *m = take(arena, kChunk, K);
    v = take(arena, kChunk, V);
    for (Matrix* m : {&Aqk, &Akk}) *m = take(arena, kChunk, kChunk);
    ell = arena.floats(padded(K)), beta = arena.floats(kChunk);
  }
  static uint64_t bytes(int64_t K, int64_t V) {
    Arena measure;
    PreparedChunk(measure, K, V);
    return measure.bytes();
  }
};

// The memory that the threads of a team share: the state of the head at hand, and kTeamGroups groups of its chunks.
struct TeamScratch {
  int64_t K, columns_of_v, group;
  Matrix S;  // [K][V]
  char* chunks;

  // columns_of_v: V where chunks are prepared with their values, 0 where the scan of a tile loads its own columns.
  TeamScratch(char* memory, int64_t K, int64_t V, int64_t columns_of_v, int64_t group)
      : K(K), columns_of_v(columns_of_v), group(group) {
    Arena arena(memory);
    S = take(arena, padded(K), V);
    chunks = memory ? memory + arena.bytes() : nullptr;
    bytes = arena.bytes() + kTeamGroups * group * PreparedChunk::bytes(K, columns_of_v);
  }
  uint64_t bytes;

  // Points c at columns v0 .. v0+columns-1 of the i-th chunk.
  void lend(Chunk& c, int64_t i, int64_t v0, int64_t columns) const {
    Arena arena(chunks + i % (kTeamGroups * group) * PreparedChunk::bytes(K, columns_of_v));
    const PreparedChunk p(arena, K, columns_of_v);
    c.qG = p.qG, c.kG = p.kG, c.kg = p.kg, c.Aqk = p.Aqk, c.Akk = p.Akk, c.ell = p.ell, c.beta = p.beta;
    if (columns_of_v) c.v = p.v.from(0, v0);
    c.V = columns;
  }
};

// Rows of a head lie H K or HV V elements apart, too far for the hardware to see the pattern, so they are prefetched
// this many tokens ahead. (Always inlined: g++ drops calls of functions that only prefetch, as if they had no effect.)
constexpr int64_t kPrefetchTokens = 8;
HWY_INLINE void prefetch_row(const kda_tensor& t, int64_t b, int64_t token, int64_t head) {
  const char* row = at(t, b, std::min(token + kPrefetchTokens, t.shape[1] - 1), head);
  for (int64_t i = 0; i < t.shape[3] * dtype_size(t.dtype); i += 64) __builtin_prefetch(row + i);
}

// Loads the inputs of tokens t0 .. t0+L-1 of row b and computes their activations, norms and alpha.
inline void load_chunk(Chunk& c, const kda_inputs& in, const Gate& gate, int64_t b, int64_t t0, int64_t L, int64_t h,
                       int64_t hv, int64_t v0) {
  c.L = L;
  for (int64_t i = 0; i < L; ++i) {
    for (const kda_tensor* t : {&in.q, &in.k}) prefetch_row(*t, b, t0 + i, h);
    for (const kda_tensor* t : {&in.v, &in.g}) prefetch_row(*t, b, t0 + i, hv);
    load_row(in.q.dtype, at(in.q, b, t0 + i, h), c.K, c.q.row(i));
    load_row(in.k.dtype, at(in.k, b, t0 + i, h), c.K, c.k.row(i));
    c.q_norm[i] = normalise_row(c.q.row(i), c.K, in.qk_l2norm, in.scale);
    c.k_norm[i] = normalise_row(c.k.row(i), c.K, in.qk_l2norm, 1);
    load_row(in.g.dtype, at(in.g, b, t0 + i, hv), c.K, c.alpha.row(i));
    decay_row(gate, c.alpha.row(i), c.K);
    load_row(in.v.dtype, at(in.v, b, t0 + i, hv) + v0 * dtype_size(in.v.dtype), c.V, c.v.row(i));
    c.beta[i] = activate_beta(in.beta_form, load_scalar(in.beta.dtype, at(in.beta, b, t0 + i, hv)));
  }
}

// Loads columns v0 .. v0+c.V-1 of the values, and nothing else.
inline void load_values(Chunk& c, const kda_tensor& v, int64_t b, int64_t t0, int64_t L, int64_t hv, int64_t v0) {
  for (int64_t i = 0; i < L; ++i) {
    prefetch_row(v, b, t0 + i, hv);
    load_row(v.dtype, at(v, b, t0 + i, hv) + v0 * dtype_size(v.dtype), c.V, c.v.row(i));
  }
}

// ---- decays ----

// For rows first .. first+n-1: x_out_i = x_i prod alpha_t over t in (first, i], or over [first, i] with kFromStart.
// y_out likewise, times factor_i if factor is given. ell, if given, receives the last product.
template <bool kFromStart>
HWY_NOINLINE void decay_rows(const Chunk& c, int64_t first, int64_t n, Matrix x, Matrix x_out, Matrix y, Matrix y_out,
                             const float* factor, float* ell) {
  for (int64_t d = 0; d < padded(c.K); d += lanes()) {
    const Matrix alpha = c.alpha.from(first, d), xd = x.from(first, d), yd = y.from(first, d);
    Vec product = splat(1);
    for (int64_t i = 0; i < n; ++i) {
      if (kFromStart || i > 0) product = hn::Mul(product, load(alpha.row(i)));
      const Vec yi = factor ? hn::Mul(load(yd.row(i)), splat(factor[first + i])) : load(yd.row(i));
      store(hn::Mul(load(xd.row(i)), product), x_out.row(i) + d);
      store(hn::Mul(yi, product), y_out.row(i) + d);
    }
    if (ell) store(product, ell + d);
  }
}

// For rows first .. first+n-1: out_j = x_j prod alpha_t over t in (j, first+n] with kToAnchor (the anchor row follows
// them), otherwise over (j, first+n-1].
template <bool kToAnchor>
HWY_NOINLINE void decay_columns(const Chunk& c, int64_t first, int64_t n, Matrix x, Matrix out) {
  for (int64_t d = 0; d < padded(c.K); d += lanes()) {
    const Matrix alpha = c.alpha.from(first, d), xd = x.from(first, d);
    Vec product = kToAnchor ? load(alpha.row(n)) : splat(1);
    for (int64_t j = n - 1; j >= 0; --j) {
      store(hn::Mul(load(xd.row(j)), product), out.row(j) + d);
      product = hn::Mul(product, load(alpha.row(j)));
    }
  }
}

// Computes qG, kG, kg and ell.
inline void decayed_operands(const Chunk& c) {
  decay_rows<true>(c, 0, c.L, c.q, c.qG, c.k, c.kG, nullptr, c.ell);
  decay_columns<false>(c, 0, c.L, c.k, c.kg);
}

// ---- scores ----

// Scores the pairs inside block b .. b+15 one by one; w is k_j decayed to the current row. Two columns at a time
// share the loads of a row.
HWY_NOINLINE inline void block_scores(const Chunk& c, int64_t b) {
  const int64_t n = std::min(kBlock, c.L - b), Kp = padded(c.K);
  const Matrix q = c.q.from(b, 0), k = c.k.from(b, 0), alpha = c.alpha.from(b, 0);
  const Matrix Aqk = c.Aqk.from(b, b), Akk = c.Akk.from(b, b);
  alignas(64) float w0[kMaxSize], w1[kMaxSize];
  for (int64_t j = 0; j < n; j += 2) {
    Aqk.row(j)[j] = dot(q.row(j), k.row(j), Kp);
    if (j + 1 == n) break;
    Vec qk0 = hn::Zero(kF32), kk0 = qk0, qk1 = qk0;
    for (int64_t d = 0; d < Kp; d += lanes()) {
      const Vec w = hn::Mul(load(k.row(j) + d), load(alpha.row(j + 1) + d)), k1 = load(k.row(j + 1) + d);
      const Vec q1 = load(q.row(j + 1) + d);
      store(w, w0 + d);
      store(k1, w1 + d);
      qk0 = hn::MulAdd(q1, w, qk0);
      kk0 = hn::MulAdd(k1, w, kk0);
      qk1 = hn::MulAdd(q1, k1, qk1);
    }
    Aqk.row(j + 1)[j] = sum_lanes(qk0);
    Aqk.row(j + 1)[j + 1] = sum_lanes(qk1);
    Akk.row(j + 1)[j] = c.beta[b + j + 1] * sum_lanes(kk0);
    for (int64_t i = j + 2; i < n; ++i) {
      const float *qi = q.row(i), *ki = k.row(i), *alpha_i = alpha.row(i);
      qk0 = kk0 = qk1 = hn::Zero(kF32);
      Vec kk1 = qk0;
      for (int64_t d = 0; d < Kp; d += lanes()) {
        const Vec a = load(alpha_i + d), x0 = hn::Mul(load(w0 + d), a), x1 = hn::Mul(load(w1 + d), a);
        store(x0, w0 + d);
        store(x1, w1 + d);
        qk0 = hn::MulAdd(load(qi + d), x0, qk0);
        kk0 = hn::MulAdd(load(ki + d), x0, kk0);
        qk1 = hn::MulAdd(load(qi + d), x1, qk1);
        kk1 = hn::MulAdd(load(ki + d), x1, kk1);
      }
      Aqk.row(i)[j] = sum_lanes(qk0);
      Aqk.row(i)[j + 1] = sum_lanes(qk1);
      Akk.row(i)[j] = c.beta[b + i] * sum_lanes(kk0);
      Akk.row(i)[j + 1] = c.beta[b + i] * sum_lanes(kk1);
    }
  }
}

// Scores rows a .. a+half-1 against columns a-half .. a-1, both decayed to the anchor token a.
HWY_NOINLINE inline void cross_scores(const Chunk& c, int64_t a, int64_t half) {
  const int64_t n = std::min(half, c.L - a), first = a - half;
  decay_rows<false>(c, a, n, c.q, c.row_q, c.k, c.row_k, c.beta, nullptr);
  decay_columns<true>(c, first, half, c.k, c.col_k);
  transpose(c.col_k, half, padded(c.K), c.col_kT);
  gemm<Acc::kSet>(n, half, c.K, c.row_q.rows(), c.col_kT, c.Aqk.from(a, first));
  gemm<Acc::kSet>(n, half, c.K, c.row_k.rows(), c.col_kT, c.Akk.from(a, first));
}

// Computes Aqk and Akk, with zeros outside their triangles.
inline void scores(const Chunk& c) {
  zero(c.Aqk.data, c.L * c.Aqk.pitch);
  zero(c.Akk.data, c.L * c.Akk.pitch);
  for (int64_t b = 0; b < c.L; b += kBlock) block_scores(c, b);
  for (int64_t half = kBlock; half < kChunk; half *= 2)
    for (int64_t a = half; a < c.L; a += 2 * half) cross_scores(c, a, half);
}

// ---- the recurrence over chunks ----

// v <- v_new = (I + Akk)^-1 diag(beta) (v - kG S).
inline void corrections(const Chunk& c, Matrix S) {
  gemm<Acc::kSub>(c.L, c.V, c.K, c.kG.rows(), S, c.v);
  for (int64_t i = 0; i < c.L; ++i) scale_row(c.v.row(i), c.beta[i], c.V, c.v.row(i));
  solve_triangle<Triangle::kLower>(c.L, c.V, c.Akk.rows(), c.v);
}

// next <- Diag(ell) S + kg^T v_new. next may be S.
inline void advance_state(const Chunk& c, Matrix S, Matrix next) {
  gemm<Acc::kDecay>(c.K, c.V, c.L, c.kg.columns(), c.v, next, {c.ell, S});
}

// ---- states ----

// In scratch a state is [K][V] with zeros in the padding. Outside it is V-first or K-first, in f32 or bf16. These
// functions move columns v0 .. v0+V-1 of the head's state.

inline void load_state(const StateTile& c, const kda_tensor& t, int32_t layout, int64_t slot, int64_t hv, int64_t v0,
                       Matrix S) {
  if (layout == KDA_STATE_K_FIRST) {
    for (int64_t k = 0; k < c.K; ++k) load_row(t.dtype, at(t, slot, hv, k) + v0 * dtype_size(t.dtype), c.V, S.row(k));
    return;
  }
  for (int64_t v = 0; v < c.V; v += kPad) {
    const int64_t n = std::min(kPad, c.V - v);
    for (int64_t i = 0; i < kPad; ++i)
      if (i < n) load_row(t.dtype, at(t, slot, hv, v0 + v + i), c.K, c.rows.row(i));
      else zero(c.rows.row(i), padded(c.K));
    transpose(c.rows, kPad, c.K, S.from(0, v));
  }
}

inline void store_state(const StateTile& c, const kda_tensor& t, int32_t layout, int64_t slot, int64_t hv, int64_t v0,
                        Matrix S) {
  if (layout == KDA_STATE_K_FIRST) {
    for (int64_t k = 0; k < c.K; ++k) store_row(t.dtype, S.row(k), c.V, at(t, slot, hv, k) + v0 * dtype_size(t.dtype));
    return;
  }
  for (int64_t v = 0; v < c.V; v += kPad) {
    const int64_t n = std::min(kPad, c.V - v);
    transpose(S.from(0, v), c.K, n, c.rows);
    for (int64_t i = 0; i < n; ++i) store_row(t.dtype, c.rows.row(i), c.K, at(t, slot, hv, v0 + v + i));
  }
}

// Zeroes rows t0 .. t0+count-1 of one head of a [B,T,heads,..] output.
inline void zero_rows(const kda_tensor& t, int64_t b, int64_t t0, int64_t count, int64_t head) {
  const int64_t bytes = (t.ndim > 3 ? t.shape[3] : 1) * dtype_size(t.dtype);
  for (int64_t i = 0; i < count; ++i) std::memset(at(t, b, t0 + i, head), 0, bytes);
}

inline void zero_tail(const kda_tensor& t, int64_t first, int64_t count) {
  for (int64_t j = 0; j < t.shape[2]; ++j) zero_rows(t, 0, first, count, j);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
