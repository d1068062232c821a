// Gradients of one chunk (math.md 5, simplified wide stage), in f32, for one sequence and head. Shared by backward
// and the stages.
#if defined(KDA_CPU_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_GRADIENTS_INL_H_
#undef KDA_CPU_GRADIENTS_INL_H_
#else
#define KDA_CPU_GRADIENTS_INL_H_
#endif

#include "cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

struct Gradients {
  Matrix ST, dST;     // [V][K]   the state before the chunk, the gradient of the state after it
  Matrix D, x;        // [C][V]   d_o; x: dv_new, then x, then beta x
  Matrix v_newT;      // [V][C]
  Matrix dAqk, xv;    // [C][C]   D v_new^T and x v_new^T = -dAkk, lower triangles
  Matrix dq, dk, dG;  // [C][K]
  Matrix y;           // [C][K]   x S^T, then beta x S^T E, later the sums r of math.md B4
  Matrix p_q, p_k;    // [C/2][K] products of one off-diagonal block

  void take_from(Arena& arena, int64_t K, int64_t V) {
    for (Matrix* m : {&ST, &dST}) *m = take(arena, padded(V), K);
    for (Matrix* m : {&D, &x}) *m = take(arena, kChunk, V);
    v_newT = take(arena, padded(V), kChunk);
    for (Matrix* m : {&dAqk, &xv}) *m = take(arena, kChunk, kChunk);
    for (Matrix* m : {&dq, &dk, &dG, &y}) *m = take(arena, kChunk, K);
    for (Matrix* m : {&p_q, &p_k}) *m = take(arena, kHalf, K);
  }
};

struct GradientSteps {
  const Chunk& c;
  const Gradients& s;

  // ---- products with the states (math.md B3) ----
  // Computes dq, dk, dG, xv and dbeta, without the pairs' share, from ST, dST, v_newT, D, x and the chunk's kG and v.
  // x becomes dv.
  void wide_stage(Matrix v_new, float* dbeta) {
    const int64_t L = c.L, K = c.K, V = c.V, Kp = padded(K), Vp = padded(V);
    gemm_lower(L, V, s.x.rows(), s.v_newT, s.xv);
    gemm<Acc::kSet>(L, K, V, s.D.rows(), s.ST, s.dq);
    gemm<Acc::kSet>(L, K, V, s.x.rows(), s.ST, s.y);
    gemm<Acc::kSet>(L, K, V, v_new.rows(), s.dST, s.dk);

    for (int64_t i = 0; i < L; ++i) {
      dbeta[i] = dot(s.x.row(i), c.v.row(i), Vp) - dot(c.kG.row(i), s.y.row(i), Kp);
      scale_row(s.x.row(i), c.beta[i], V, s.x.row(i));  // from here on x holds beta x = dv
    }
    for (int64_t d = 0; d < Kp; d += lanes()) wide_stage_channels(d);
  }

  // The elementwise part of B3 for one vector of channels.
  HWY_INLINE void wide_stage_channels(int64_t d) {
    const int64_t L = c.L;
    const Matrix alpha = c.alpha.from(0, d), q = c.q.from(0, d), k = c.k.from(0, d), kG = c.kG.from(0, d);
    const Matrix dq = s.dq.from(0, d), dk = s.dk.from(0, d), dG = s.dG.from(0, d), y = s.y.from(0, d);
    Vec E = splat(1);
    for (int64_t i = 0; i < L; ++i) {
      E = hn::Mul(E, load(alpha.row(i)));
      const Vec dqi = hn::Mul(load(dq.row(i)), E), by = hn::Mul(load(y.row(i)), splat(c.beta[i]));
      store(dqi, dq.row(i));
      store(hn::Sub(hn::Mul(load(q.row(i)), dqi), hn::Mul(by, load(kG.row(i)))), dG.row(i));
      store(hn::Mul(by, E), y.row(i));
    }
    // The write part of dk, with F running backwards. Its share of dG goes to the row and, summed, to the last row.
    // (For the last row itself the two cancel and are left out: beside a decay that is nearly 0, nothing but their
    // rounding errors would remain.)
    Vec F = splat(1), last = hn::Zero(kF32);
    for (int64_t i = L - 1; i >= 0; --i) {
      const Vec dki = hn::Mul(load(dk.row(i)), F), kdk = hn::Mul(load(k.row(i)), dki);
      store(hn::Sub(dki, load(y.row(i))), dk.row(i));
      if (i < L - 1) {
        store(hn::Sub(load(dG.row(i)), kdk), dG.row(i));
        last = hn::Add(last, kdk);
      }
      F = hn::Mul(F, load(alpha.row(i)));
    }
    Vec SdS = hn::Zero(kF32);  // sum over V of S dS
    for (int64_t v = 0; v < c.V; ++v) SdS = hn::MulAdd(load(s.ST.row(v) + d), load(s.dST.row(v) + d), SdS);
    store(hn::Add(load(dG.row(L - 1)), hn::MulAdd(load(c.ell + d), SdS, last)), dG.row(L - 1));
  }

  // ---- pairs inside the chunk (math.md B4) ----
  // With R the decay from j to i and B = dAkk = -xv:
  //   p_i = sum_j dAqk_ij k_j R      r_i = sum_j B_ij k_j R      c_j = sum_i (dAqk_ij q_i + B_ij beta_i k_i) R
  //   dq_i += p_i                    dG_i += q_i p_i + beta_i k_i r_i                dk_j += c_j      dG_j -= k_j c_j
  // and at the end dk_i += beta_i r_i, dbeta_i += k_i . r_i, with r collected in s.y.

  // One vector of channels of one block: the sums of its rows, and of the column at hand.
  struct BlockRows {
    Vec p[kBlock], r[kBlock], beta_k[kBlock];
  };
  struct Column {
    Vec k, c, R;  // k_j, the sum c_j, the decay from j to the current row
    HWY_INLINE void pair(Vec alpha, Vec q, Vec beta_k, Vec A, Vec X, Vec& p, Vec& r) {
      R = hn::Mul(R, alpha);
      const Vec kR = hn::Mul(k, R);
      p = hn::MulAdd(A, kR, p);
      r = hn::NegMulAdd(X, kR, r);
      c = hn::MulAdd(hn::NegMulAdd(X, beta_k, hn::Mul(A, q)), R, c);
    }
  };

  // Adds the pairs i > j of block b .. b+15, and the diagonal (whose two shares of dG cancel exactly and are left
  // out). Two columns at a time share the loads and stores of a row.
  void block_pairs(int64_t b) {
    const int64_t n = std::min(kBlock, c.L - b);
    const Matrix A = s.dAqk.from(b, b), X = s.xv.from(b, b);
    for (int64_t d = 0; d < padded(c.K); d += lanes()) {
      const Matrix q = c.q.from(b, d), k = c.k.from(b, d), alpha = c.alpha.from(b, d);
      BlockRows rows;
      for (int64_t i = 0; i < n; ++i) {
        rows.p[i] = rows.r[i] = hn::Zero(kF32);
        rows.beta_k[i] = hn::Mul(load(k.row(i)), splat(c.beta[b + i]));
      }
      for (int64_t j = 0; j < n; j += 2) {
        const bool two = j + 1 < n;
        Column first{load(k.row(j)), hn::Zero(kF32), splat(1)};
        Column second{two ? load(k.row(j + 1)) : hn::Zero(kF32), hn::Zero(kF32), splat(1)};
        if (two)
          first.pair(load(alpha.row(j + 1)), load(q.row(j + 1)), rows.beta_k[j + 1], splat(A.row(j + 1)[j]),
                     splat(X.row(j + 1)[j]), rows.p[j + 1], rows.r[j + 1]);
        for (int64_t i = j + 2; i < n; ++i) {
          const Vec alpha_i = load(alpha.row(i)), q_i = load(q.row(i)), beta_k = rows.beta_k[i];
          Vec p = rows.p[i], r = rows.r[i];
          first.pair(alpha_i, q_i, beta_k, splat(A.row(i)[j]), splat(X.row(i)[j]), p, r);
          second.pair(alpha_i, q_i, beta_k, splat(A.row(i)[j + 1]), splat(X.row(i)[j + 1]), p, r);
          rows.p[i] = p, rows.r[i] = r;
        }
        store_block_row(b, j, d, rows, first);
        if (two) store_block_row(b, j + 1, d, rows, second);
      }
    }
  }

  // Stores the results of token b + j of a block, whose row sums and column sum are complete by now.
  HWY_INLINE void store_block_row(int64_t b, int64_t j, int64_t d, const BlockRows& rows, const Column& column) {
    const Vec diagonal = splat(s.dAqk.row(b + j)[b + j]), q = load(c.q.row(b + j) + d);
    float *dq = s.dq.row(b + j) + d, *dk = s.dk.row(b + j) + d, *dG = s.dG.row(b + j) + d, *y = s.y.row(b + j) + d;
    store(hn::Add(load(dq), hn::MulAdd(diagonal, column.k, rows.p[j])), dq);
    store(hn::Add(load(dk), hn::MulAdd(diagonal, q, column.c)), dk);
    store(hn::Add(load(y), rows.r[j]), y);
    const Vec row_terms = hn::MulAdd(q, rows.p[j], hn::Mul(rows.beta_k[j], rows.r[j]));
    store(hn::Add(load(dG), hn::NegMulAdd(column.k, column.c, row_terms)), dG);
  }

  // Adds the pairs of rows a .. a+half-1 and columns a-half .. a-1, on the forward's tiles (math.md 5.2). dG takes
  // its row terms and its column terms from the same tiles as the products.
  void cross_pairs(int64_t a, int64_t half) {
    const int64_t n = std::min(half, c.L - a), first = a - half, Kp = padded(c.K);
    const Matrix A = s.dAqk.from(a, first), X = s.xv.from(a, first);
    decay_rows<false>(c, a, n, c.q, c.row_q, c.k, c.row_k, c.beta, nullptr);
    decay_columns<true>(c, first, half, c.k, c.col_k);

    gemm<Acc::kSet>(n, c.K, half, A.rows(), c.col_k, s.p_q);
    gemm<Acc::kSet>(n, c.K, half, X.rows(), c.col_k, s.p_k);
    for (int64_t d = 0; d < Kp; d += lanes()) {
      Vec R = splat(1);
      for (int64_t i = 0; i < n; ++i) {
        if (i) R = hn::Mul(R, load(c.alpha.row(a + i) + d));
        float *dq = s.dq.row(a + i) + d, *y = s.y.row(a + i) + d, *dG = s.dG.row(a + i) + d;
        const Vec pq = load(s.p_q.row(i) + d), pk = load(s.p_k.row(i) + d);
        store(hn::MulAdd(pq, R, load(dq)), dq);
        store(hn::NegMulAdd(pk, R, load(y)), y);
        const Vec q_term = hn::Mul(load(c.row_q.row(i) + d), pq);
        store(hn::Add(load(dG), hn::NegMulAdd(load(c.row_k.row(i) + d), pk, q_term)), dG);
      }
    }

    gemm<Acc::kSet>(half, c.K, n, A.columns(), c.row_q, s.p_q);
    gemm<Acc::kSub>(half, c.K, n, X.columns(), c.row_k, s.p_q);
    for (int64_t d = 0; d < Kp; d += lanes()) {
      Vec R = load(c.alpha.row(a) + d);
      for (int64_t j = half - 1; j >= 0; --j) {
        float *dk = s.dk.row(first + j) + d, *dG = s.dG.row(first + j) + d;
        const Vec pc = load(s.p_q.row(j) + d);
        store(hn::MulAdd(pc, R, load(dk)), dk);
        store(hn::NegMulAdd(pc, load(c.col_k.row(j) + d), load(dG)), dG);
        R = hn::Mul(R, load(c.alpha.row(first + j) + d));
      }
    }
  }

  void pairs(float* dbeta) {
    zero(s.y.data, c.L * s.y.pitch);
    for (int64_t b = 0; b < c.L; b += kBlock) block_pairs(b);
    for (int64_t half = kBlock; half < kChunk; half *= 2)
      for (int64_t a = half; a < c.L; a += 2 * half) cross_pairs(a, half);
    for (int64_t i = 0; i < c.L; ++i) {
      dbeta[i] += dot(c.k.row(i), s.y.row(i), padded(c.K));
      for (int64_t d = 0; d < padded(c.K); d += lanes())
        store(hn::MulAdd(splat(c.beta[i]), load(s.y.row(i) + d), load(s.dk.row(i) + d)), s.dk.row(i) + d);
    }
  }
};

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
