// One chunk of the chunked form (math.md 4), in f32, for one sequence and head. Shared by forward and backward.
//
// Decays only ever appear as ordered products of alpha = exp(g) in [0, 1], never as quotients or exponents of sums:
// exact for every gate, -inf included. Scores are built dyadically (math.md 4.4 c): pairs inside a 16-token block
// directly with a running product; the blocks below the diagonal at levels 32 and 64 as matrix products around an
// anchor token.
#if defined(KDA_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_CHUNK_INL_H_
#undef KDA_CPU_CHUNK_INL_H_
#else
#define KDA_CPU_CHUNK_INL_H_
#endif

#include "cpu/arena.h"
#include "cpu/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

constexpr int64_t kBlock = 16;                     // pairs closer than this are scored directly
constexpr int64_t kScorePitch = pitch(kChunk);     // of Aqk, Akk
constexpr int64_t kTilePitch = pitch(kChunk / 2);  // of a transposed column tile

// Buffers of one chunk. Rows are tokens 0 .. L-1 of the chunk unless said otherwise.
struct Chunk {
  int64_t K, V;    // V: columns of this task's tile of the state
  int64_t kp, vp;  // row pitches
  int64_t L = 0;
  float *q, *k;                   // [C][K]  normalised; q carries scale
  float* alpha;                   // [C][K]
  float *qG, *kG, *kg;            // [C][K]  q E, k E, k F: decayed from the chunk's start, and to its end
  float* ell;                     // [K]     decay of the whole chunk
  float* v;                       // [C][V]
  float *beta, *q_norm, *k_norm;  // [C]
  float *Aqk, *Akk;               // [C][C]
  float *row_q, *row_k, *col_k;   // [C/2][K] decayed operands of one off-diagonal block
  float* col_kT;                  // [K][C/2]
  float* bias;                    // [K] dt_bias of the head

  Chunk(Arena& arena, int64_t K, int64_t V) : K(K), V(V), kp(pitch(K)), vp(pitch(V)) {
    for (float** p : {&q, &k, &alpha, &qG, &kG, &kg}) *p = arena.floats(kChunk * kp);
    v = arena.floats(kChunk * vp);
    for (float** p : {&ell, &bias}) *p = arena.floats(kp);
    for (float** p : {&beta, &q_norm, &k_norm}) *p = arena.floats(kChunk);
    for (float** p : {&Aqk, &Akk}) *p = arena.floats(kChunk * kScorePitch);
    for (float** p : {&row_q, &row_k, &col_k}) *p = arena.floats(kChunk / 2 * kp);
    col_kT = arena.floats(padded(K) * kTilePitch);
  }
};

// Inputs of tokens t0 .. t0+L-1 of row b: activations, norms, alpha.
inline void load_chunk(Chunk& c, const kda_inputs& in, const Gate& gate, int64_t b, int64_t t0, int64_t L, int64_t h,
                       int64_t hv, int64_t v0) {
  c.L = L;
  for (int64_t i = 0; i < L; ++i) {
    float *q = c.q + i * c.kp, *k = c.k + i * c.kp, *alpha = c.alpha + i * c.kp;
    load_row(in.q.dtype, at(in.q, b, t0 + i, h), c.K, q);
    load_row(in.k.dtype, at(in.k, b, t0 + i, h), c.K, k);
    c.q_norm[i] = normalise_row(q, c.K, in.qk_l2norm, in.scale);
    c.k_norm[i] = normalise_row(k, c.K, in.qk_l2norm, 1);
    load_row(in.g.dtype, at(in.g, b, t0 + i, hv), c.K, alpha);
    decay_row(gate, alpha, c.K);
    load_row(in.v.dtype, at(in.v, b, t0 + i, hv) + v0 * dtype_size(in.v.dtype), c.V, c.v + i * c.vp);
    c.beta[i] = activate_beta(in.beta_form, load_scalar(in.beta.dtype, at(in.beta, b, t0 + i, hv)));
  }
}

// Rows first .. first+n-1: out_i = factor_i x_i prod alpha_t over t in (first, i], or [first, i] with kFromStart.
// Two operands share the products; `factor` (per row, of the second) may be null. ell, if not null, gets the last
// product.
template <bool kFromStart>
HWY_NOINLINE void decay_rows(const Chunk& c, int64_t first, int64_t n, const float* x, float* x_out, const float* y,
                             float* y_out, const float* factor, float* ell) {
  for (int64_t d = 0; d < padded(c.K); d += lanes()) {
    Vec product = splat(1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (first + i) * c.kp + d;
      if (kFromStart || i > 0) product = hn::Mul(product, load(c.alpha + at));
      store(hn::Mul(load(x + at), product), x_out + i * c.kp + d);
      const Vec yi = factor ? hn::Mul(load(y + at), splat(factor[first + i])) : load(y + at);
      store(hn::Mul(yi, product), y_out + i * c.kp + d);
    }
    if (ell) store(product, ell + d);
  }
}

// Rows first .. first+n-1: out_j = x_j prod alpha_t over t in (j, first+n] (an anchor row follows), or (j, first+n-1].
template <bool kToAnchor>
HWY_NOINLINE void decay_columns(const Chunk& c, int64_t first, int64_t n, const float* x, float* out) {
  for (int64_t d = 0; d < padded(c.K); d += lanes()) {
    Vec product = kToAnchor ? load(c.alpha + (first + n) * c.kp + d) : splat(1);
    for (int64_t j = n - 1; j >= 0; --j) {
      const int64_t at = (first + j) * c.kp + d;
      store(hn::Mul(load(x + at), product), out + j * c.kp + d);
      product = hn::Mul(product, load(c.alpha + at));
    }
  }
}

// Scores of the pairs inside block b .. b+15, one by one.
HWY_NOINLINE inline void block_scores(const Chunk& c, int64_t b) {
  const int64_t n = std::min(kBlock, c.L - b), Kp = padded(c.K);
  alignas(64) float w[kMaxSize];  // k_j decayed up to token i
  for (int64_t j = 0; j < n; ++j) {
    const float* kj = c.k + (b + j) * c.kp;
    std::memcpy(w, kj, Kp * sizeof(float));
    c.Aqk[(b + j) * kScorePitch + b + j] = dot(c.q + (b + j) * c.kp, kj, Kp);
    for (int64_t i = j + 1; i < n; ++i) {
      const float *q = c.q + (b + i) * c.kp, *k = c.k + (b + i) * c.kp, *alpha = c.alpha + (b + i) * c.kp;
      Vec qk = hn::Zero(kF32), kk = hn::Zero(kF32);
      for (int64_t d = 0; d < Kp; d += lanes()) {
        const Vec wd = hn::Mul(load(w + d), load(alpha + d));
        store(wd, w + d);
        qk = hn::MulAdd(load(q + d), wd, qk);
        kk = hn::MulAdd(load(k + d), wd, kk);
      }
      c.Aqk[(b + i) * kScorePitch + b + j] = sum_lanes(qk);
      c.Akk[(b + i) * kScorePitch + b + j] = c.beta[b + i] * sum_lanes(kk);
    }
  }
}

// Scores of rows a .. a+half-1 with columns a-half .. a-1, both decayed to the anchor token a.
HWY_NOINLINE inline void cross_scores(const Chunk& c, int64_t a, int64_t half) {
  const int64_t n = std::min(half, c.L - a), first = a - half;
  decay_rows<false>(c, a, n, c.q, c.row_q, c.k, c.row_k, c.beta, nullptr);
  decay_columns<true>(c, first, half, c.k, c.col_k);
  transpose(c.col_k, c.kp, half, padded(c.K), c.col_kT, kTilePitch);
  gemm<Acc::kSet>(n, half, c.K, rows_of(c.row_q, c.kp), c.col_kT, kTilePitch, c.Aqk + a * kScorePitch + first,
                  kScorePitch);
  gemm<Acc::kSet>(n, half, c.K, rows_of(c.row_k, c.kp), c.col_kT, kTilePitch, c.Akk + a * kScorePitch + first,
                  kScorePitch);
}

// Aqk (scale inside) and Akk (beta inside); zero above their triangles.
inline void scores(const Chunk& c) {
  zero(c.Aqk, c.L * kScorePitch);
  zero(c.Akk, c.L * kScorePitch);
  for (int64_t b = 0; b < c.L; b += kBlock) block_scores(c, b);
  for (int64_t half = kBlock; half < kChunk; half *= 2)
    for (int64_t a = half; a < c.L; a += 2 * half) cross_scores(c, a, half);
}

// qG, kG, kg and ell.
inline void decayed_operands(const Chunk& c) {
  decay_rows<true>(c, 0, c.L, c.q, c.qG, c.k, c.kG, nullptr, c.ell);
  decay_columns<false>(c, 0, c.L, c.k, c.kg);
}

// v <- v_new = (I + Akk)^-1 diag(beta) (v - kG S).
inline void corrections(const Chunk& c, const float* S) {
  gemm<Acc::kSub>(c.L, c.V, c.K, rows_of(c.kG, c.kp), S, c.vp, c.v, c.vp);
  for (int64_t i = 0; i < c.L; ++i)
    for (int64_t j = 0; j < c.V; j += lanes())
      store(hn::Mul(load(c.v + i * c.vp + j), splat(c.beta[i])), c.v + i * c.vp + j);
  solve_triangle<Triangle::kLower>(c.L, c.V, rows_of(c.Akk, kScorePitch), c.v, c.vp);
}

// S <- Diag(ell) S + kg^T v_new.
inline void advance_state(const Chunk& c, float* S) {
  gemm<Acc::kDecay>(c.K, c.V, c.L, columns_of(c.kg, c.kp), c.v, c.vp, S, c.vp, c.ell);
}

// ---- states
// ---------------------------------------------------------------------------------------------------------- In scratch
// a state is [K][V] with pitch vp and zeros in the padding; outside V-first or K-first, f32 or bf16. Columns v0 ..
// v0+V-1 of the head's state are read or written; `row` is scratch of [16][pitch(K)].

inline void load_state(const kda_tensor& t, int32_t layout, int64_t slot, int64_t hv, int64_t v0, int64_t K, int64_t V,
                       float* S, int64_t vp, float* row) {
  if (layout == KDA_STATE_K_FIRST) {
    for (int64_t k = 0; k < K; ++k) load_row(t.dtype, at(t, slot, hv, k) + v0 * dtype_size(t.dtype), V, S + k * vp);
    return;
  }
  if (V < padded(V)) zero(S, K * vp);
  for (int64_t v = 0; v < V; v += kPad) {
    const int64_t n = std::min(kPad, V - v);
    for (int64_t i = 0; i < n; ++i) load_row(t.dtype, at(t, slot, hv, v0 + v + i), K, row + i * pitch(K));
    transpose(row, pitch(K), n, K, S + v, vp);
  }
}

inline void store_state(const kda_tensor& t, int32_t layout, int64_t slot, int64_t hv, int64_t v0, int64_t K, int64_t V,
                        const float* S, int64_t vp, float* row) {
  if (layout == KDA_STATE_K_FIRST) {
    for (int64_t k = 0; k < K; ++k) store_row(t.dtype, S + k * vp, V, at(t, slot, hv, k) + v0 * dtype_size(t.dtype));
    return;
  }
  for (int64_t v = 0; v < V; v += kPad) {
    const int64_t n = std::min(kPad, V - v);
    transpose(S + v, vp, K, n, row, pitch(K));
    for (int64_t i = 0; i < n; ++i) store_row(t.dtype, row + i * pitch(K), K, at(t, slot, hv, v0 + v + i));
  }
}

// Zeroes rows t0 .. t0+count-1 of one head of a [B,T,heads,..] output.
inline void zero_rows(const kda_tensor& t, int64_t b, int64_t t0, int64_t count, int64_t head) {
  const int64_t bytes = (t.ndim > 3 ? t.shape[3] : 1) * dtype_size(t.dtype);
  for (int64_t i = 0; i < count; ++i) std::memset(at(t, b, t0 + i, head), 0, bytes);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
