// Chunked backward on the CPU (math.md 5, simplified wide stage). One task = one sequence and value head.
//
// Pass 1 (skipped when forward saved h, v_new, Aqk, Akk): the forward without its output, keeping per chunk
//   the state before it, v_new, Aqk and Akk in this thread's share of the workspace.
// Pass 2, last chunk to first, with D = d_o, S the state before the chunk, dS the gradient of the state after it:
//   dv_new = Aqk^T D + kg dS                 x = (I + Akk)^-T dv_new          dAqk = tril(D v_new^T)   dAkk = -strict(x
//   v_new^T) dq = (D S^T) E       dk = (v_new dS^T) F - beta (x S^T) E                 dv = beta x              dbeta =
//   x.v - kG.(x S^T) dS <- Diag(ell) dS + qG^T D - kG^T (beta x) then the pairs inside the chunk (math.md B4) on the
//   forward's blocks, the reverse sum of dG, and the activations.
// q carries scale throughout: with q' = scale q the formulas need no factor, and at the end dq = scale dq'.
//
// Every pair term of dG is added at row i and subtracted at row j as the same f32 number or product of the same tiles
// (math.md 5.2), so what must cancel in the reverse sum does.
//
// Memory beyond inputs and gradients: 2.4 KB per token of the longest sequence and thread at K = V = 128 (one state and
// one set of scores a chunk), and with HV > H another 8 K bytes per token and value head for dq and dk before their
// sum.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/chunk_backward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/chunk-inl.h"
// clang-format on

#ifndef KDA_CPU_CHUNK_BACKWARD_TYPES
#define KDA_CPU_CHUNK_BACKWARD_TYPES
namespace kda::cpu {
// Per (sequence, head) results that a second step adds up, and per value head dq, dk where HV > H. In the shared
// workspace.
struct BackwardPartials {
  float* dA_log;  // [N][HV], or nullptr if not wanted
  float* d_bias;  // [N][HV][K], or nullptr
  float* dq;      // [B][T][HV][K], or nullptr if HV == H
  float* dk;
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// What pass 1 keeps of a chunk.
struct SavedChunk {
  float *S, *v_new, *Aqk, *Akk;

  SavedChunk(Arena& arena, int64_t K, int64_t V) {
    S = arena.floats(padded(K) * pitch(V));
    v_new = arena.floats(kChunk * pitch(V));
    Aqk = arena.floats(kChunk * kScorePitch);
    Akk = arena.floats(kChunk * kScorePitch);
  }
  static uint64_t bytes(int64_t K, int64_t V) {
    Arena measure;
    SavedChunk(measure, K, V);
    return measure.bytes();
  }
};

struct BackwardScratch {
  Chunk chunk;
  float *S, *dS;            // [K][V]
  float *ST, *dST;          // [V][K]
  float *v_new, *D, *x;     // [C][V]; x: dv_new, then x, then beta x
  float* v_newT;            // [V][C]
  float *dAqk, *dAkk;       // [C][C]
  float *dq, *dk, *dG, *y;  // [C][K]; y: x S^T, later the read part r of dk
  float *p_q, *p_k;         // [C/2][K] products of one off-diagonal block
  float* raw;               // [K] a row of g
  float* d_bias;            // [K] running sum
  float* rows;              // [16][K] for transposing states
  char* saved;              // SavedChunk after SavedChunk

  BackwardScratch(Arena arena, int64_t K, int64_t V, char* memory, uint64_t* bytes) : chunk(arena, K, V) {
    for (float** m : {&S, &dS}) *m = arena.floats(padded(K) * pitch(V));
    for (float** m : {&ST, &dST}) *m = arena.floats(padded(V) * pitch(K));
    for (float** m : {&v_new, &D, &x}) *m = arena.floats(kChunk * pitch(V));
    v_newT = arena.floats(padded(V) * kScorePitch);
    for (float** m : {&dAqk, &dAkk}) *m = arena.floats(kChunk * kScorePitch);
    for (float** m : {&dq, &dk, &dG, &y}) *m = arena.floats(kChunk * pitch(K));
    for (float** m : {&p_q, &p_k}) *m = arena.floats(kChunk / 2 * pitch(K));
    for (float** m : {&raw, &d_bias}) *m = arena.floats(pitch(K));
    rows = arena.floats(kPad * pitch(K));
    saved = memory ? memory + arena.bytes() : nullptr;
    if (bytes) *bytes = arena.bytes();
  }
  SavedChunk saved_chunk(int64_t i) const {
    Arena arena(saved + i * SavedChunk::bytes(chunk.K, chunk.V));
    return SavedChunk(arena, chunk.K, chunk.V);
  }
};

uint64_t backward_scratch_bytes(const BackwardProblem& p) {
  uint64_t bytes;
  BackwardScratch(Arena(), p.K, p.V, nullptr, &bytes);
  return bytes + (present(p.args.h) ? 0 : p.max_chunks() * SavedChunk::bytes(p.K, p.V));
}

struct BackwardTask {
  const BackwardProblem& p;
  Sequence seq;
  int64_t hv, first_chunk;
  Gate gate;
  BackwardScratch& s;
  BackwardPartials partials;

  int64_t length_of(int64_t t) const { return std::min(kChunk, seq.length - t); }

  void load_inputs(int64_t t) {
    load_chunk(s.chunk, p.args.in, gate, seq.b, seq.t0 + t, length_of(t), hv / p.group(), hv, 0);
  }

  // ---- pass 1
  // --------------------------------------------------------------------------------------------------------
  void recompute() {
    Chunk& c = s.chunk;
    for (int64_t t = 0; t < seq.length; t += kChunk) {
      const SavedChunk keep = s.saved_chunk(t / kChunk);
      std::memcpy(keep.S, s.S, p.K * c.vp * sizeof(float));
      load_inputs(t);
      scores(c);
      decayed_operands(c);
      corrections(c, s.S);
      std::memcpy(keep.v_new, c.v, c.L * c.vp * sizeof(float));
      std::memcpy(keep.Aqk, c.Aqk, c.L * kScorePitch * sizeof(float));
      std::memcpy(keep.Akk, c.Akk, c.L * kScorePitch * sizeof(float));
      advance_state(c, s.S);
    }
  }

  // Inputs of the chunk at t again, and what pass 1 or the caller kept of it.
  void restore(int64_t t) {
    Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    load_inputs(t);
    decayed_operands(c);
    if (!present(a.h)) {
      const SavedChunk keep = s.saved_chunk(t / kChunk);
      std::memcpy(s.S, keep.S, p.K * c.vp * sizeof(float));
      std::memcpy(s.v_new, keep.v_new, c.L * c.vp * sizeof(float));
      std::memcpy(c.Aqk, keep.Aqk, c.L * kScorePitch * sizeof(float));
      std::memcpy(c.Akk, keep.Akk, c.L * kScorePitch * sizeof(float));
    } else {
      load_state(a.h, a.in.state_layout, first_chunk + t / kChunk, hv, 0, p.K, p.V, s.S, c.vp, s.rows);
      for (int64_t i = 0; i < c.L; ++i) {
        load_row(KDA_F32, at(a.v_new, seq.b, seq.t0 + t + i, hv), p.V, s.v_new + i * c.vp);
        load_row(KDA_F32, at(a.Aqk, seq.b, seq.t0 + t + i, hv), kChunk, c.Aqk + i * kScorePitch);
        load_row(KDA_F32, at(a.Akk, seq.b, seq.t0 + t + i, hv), kChunk, c.Akk + i * kScorePitch);
      }
    }
    for (int64_t i = 0; i < c.L; ++i) load_row(a.d_o.dtype, at(a.d_o, seq.b, seq.t0 + t + i, hv), p.V, s.D + i * c.vp);
  }

  // ---- pass 2: products with the states (math.md B1..B3)
  // -------------------------------------------------------------
  void wide_stage(float* dbeta) {
    Chunk& c = s.chunk;
    const int64_t L = c.L, K = c.K, V = c.V, Kp = padded(K), Vp = padded(V);
    transpose(s.S, c.vp, Kp, Vp, s.ST, c.kp);  // rows beyond K are zero
    transpose(s.dS, c.vp, Kp, Vp, s.dST, c.kp);
    transpose(s.v_new, c.vp, L, Vp, s.v_newT, kScorePitch);

    gemm<Acc::kSet>(L, V, K, rows_of(c.kg, c.kp), s.dS, c.vp, s.x, c.vp);
    add_triangle<Triangle::kUpper>(L, V, columns_of(c.Aqk, kScorePitch), s.D, c.vp, s.x, c.vp);
    solve_triangle<Triangle::kUpper>(L, V, columns_of(c.Akk, kScorePitch), s.x, c.vp);
    gemm_lower(L, V, rows_of(s.D, c.vp), s.v_newT, kScorePitch, s.dAqk, kScorePitch);
    gemm_lower(L, V, rows_of(s.x, c.vp), s.v_newT, kScorePitch, s.dAkk, kScorePitch);

    gemm<Acc::kSet>(L, K, V, rows_of(s.D, c.vp), s.ST, c.kp, s.dq, c.kp);
    gemm<Acc::kSet>(L, K, V, rows_of(s.x, c.vp), s.ST, c.kp, s.y, c.kp);
    gemm<Acc::kSet>(L, K, V, rows_of(s.v_new, c.vp), s.dST, c.kp, s.dk, c.kp);

    // x becomes beta x = dv: what dS and dv need.
    for (int64_t i = 0; i < L; ++i) {
      dbeta[i] = dot(s.x + i * c.vp, c.v + i * c.vp, Vp) - dot(c.kG + i * c.kp, s.y + i * c.kp, Kp);
      for (int64_t j = 0; j < Vp; j += lanes())
        store(hn::Mul(load(s.x + i * c.vp + j), splat(c.beta[i])), s.x + i * c.vp + j);
    }

    for (int64_t d = 0; d < Kp; d += lanes()) {
      Vec E = splat(1);
      for (int64_t i = 0; i < L; ++i) {
        const int64_t at = i * c.kp + d;
        E = hn::Mul(E, load(c.alpha + at));
        const Vec dq = hn::Mul(load(s.dq + at), E), by = hn::Mul(load(s.y + at), splat(c.beta[i]));
        store(dq, s.dq + at);
        store(hn::Sub(hn::Mul(load(c.q + at), dq), hn::Mul(by, load(c.kG + at))), s.dG + at);
        store(hn::Mul(by, E), s.y + at);
      }
      // The write part of dk: F runs backwards; its share of dG goes to the row and, summed, to the last row.
      Vec F = splat(1), last = hn::Zero(kF32);
      for (int64_t i = L - 1; i >= 0; --i) {
        const int64_t at = i * c.kp + d;
        const Vec dk = hn::Mul(load(s.dk + at), F), kdk = hn::Mul(load(c.k + at), dk);
        store(hn::Sub(dk, load(s.y + at)), s.dk + at);
        store(hn::Sub(load(s.dG + at), kdk), s.dG + at);
        last = hn::Add(last, kdk);
        F = hn::Mul(F, load(c.alpha + at));
      }
      Vec SdS = hn::Zero(kF32);  // sum over V of S dS
      for (int64_t v = 0; v < V; ++v) SdS = hn::MulAdd(load(s.ST + v * c.kp + d), load(s.dST + v * c.kp + d), SdS);
      float* dG_last = s.dG + (L - 1) * c.kp + d;
      store(hn::Add(load(dG_last), hn::MulAdd(load(c.ell + d), SdS, last)), dG_last);
    }

    gemm<Acc::kDecay>(K, V, L, columns_of(c.qG, c.kp), s.D, c.vp, s.dS, c.vp, c.ell);
    gemm<Acc::kSub>(K, V, L, columns_of(c.kG, c.kp), s.x, c.vp, s.dS, c.vp);
  }

  // ---- pass 2: pairs inside the chunk (math.md B4)
  // ------------------------------------------------------------------- With R the decay from j to i:  dq_i += dA_ij
  // k_j R;  r_i += B_ij k_j R;  dk_j += (dA_ij q_i + B_ij beta_i k_i) R. B = dAkk = -strict(x v_new^T), so s.dAkk
  // (which holds +x v_new^T) enters with a minus sign. r collects in s.y.
  void block_pairs(int64_t b) {
    const Chunk& c = s.chunk;
    const int64_t n = std::min(kBlock, c.L - b);
    for (int64_t d = 0; d < padded(c.K); d += lanes())
      for (int64_t j = 0; j < n; ++j) {
        const int64_t col = (b + j) * c.kp + d;
        const Vec kj = load(c.k + col), diagonal = splat(s.dAqk[(b + j) * kScorePitch + b + j]);
        store(hn::MulAdd(diagonal, kj, load(s.dq + col)), s.dq + col);
        Vec dkj = hn::MulAdd(diagonal, load(c.q + col), load(s.dk + col)), dGj = load(s.dG + col), R = splat(1);
        for (int64_t i = j + 1; i < n; ++i) {
          const int64_t row = (b + i) * c.kp + d;
          R = hn::Mul(R, load(c.alpha + row));
          const Vec kR = hn::Mul(kj, R);
          const Vec A = splat(s.dAqk[(b + i) * kScorePitch + b + j]), B = splat(-s.dAkk[(b + i) * kScorePitch + b + j]);
          const Vec m = hn::MulAdd(A, load(c.q + row), hn::Mul(hn::Mul(B, splat(c.beta[b + i])), load(c.k + row)));
          store(hn::MulAdd(A, kR, load(s.dq + row)), s.dq + row);
          store(hn::MulAdd(B, kR, load(s.y + row)), s.y + row);
          dkj = hn::MulAdd(m, R, dkj);
          const Vec term = hn::Mul(m, kR);
          store(hn::Add(load(s.dG + row), term), s.dG + row);
          dGj = hn::Sub(dGj, term);
        }
        store(dkj, s.dk + col);
        store(dGj, s.dG + col);
      }
  }

  // Rows a .. a+half-1 against columns a-half .. a-1.
  void cross_pairs(int64_t a, int64_t half) {
    const Chunk& c = s.chunk;
    const int64_t n = std::min(half, c.L - a), first = a - half, Kp = padded(c.K);
    const float *dA = s.dAqk + a * kScorePitch + first, *dB = s.dAkk + a * kScorePitch + first;
    decay_rows<false>(c, a, n, c.q, c.row_q, c.k, c.row_k, c.beta, nullptr);
    decay_columns<true>(c, first, half, c.k, c.col_k);

    gemm<Acc::kSet>(n, c.K, half, rows_of(dA, kScorePitch), c.col_k, c.kp, s.p_q, c.kp);
    gemm<Acc::kSet>(n, c.K, half, rows_of(dB, kScorePitch), c.col_k, c.kp, s.p_k, c.kp);
    for (int64_t d = 0; d < Kp; d += lanes()) {
      Vec R = splat(1);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = (a + i) * c.kp + d, tile = i * c.kp + d;
        if (i) R = hn::Mul(R, load(c.alpha + row));
        const Vec pq = load(s.p_q + tile), pk = load(s.p_k + tile);
        store(hn::MulAdd(pq, R, load(s.dq + row)), s.dq + row);
        store(hn::NegMulAdd(pk, R, load(s.y + row)), s.y + row);
        const Vec term = hn::Sub(hn::Mul(load(c.row_q + tile), pq), hn::Mul(load(c.row_k + tile), pk));
        store(hn::Add(load(s.dG + row), term), s.dG + row);
      }
    }

    gemm<Acc::kSet>(half, c.K, n, columns_of(dA, kScorePitch), c.row_q, c.kp, s.p_q, c.kp);
    gemm<Acc::kSub>(half, c.K, n, columns_of(dB, kScorePitch), c.row_k, c.kp, s.p_q, c.kp);
    for (int64_t d = 0; d < Kp; d += lanes()) {
      Vec R = load(c.alpha + a * c.kp + d);
      for (int64_t j = half - 1; j >= 0; --j) {
        const int64_t col = (first + j) * c.kp + d, tile = j * c.kp + d;
        const Vec pc = load(s.p_q + tile);
        store(hn::MulAdd(pc, R, load(s.dk + col)), s.dk + col);
        store(hn::NegMulAdd(pc, load(c.col_k + tile), load(s.dG + col)), s.dG + col);
        R = hn::Mul(R, load(c.alpha + col));
      }
    }
  }

  void pairs(float* dbeta) {
    const Chunk& c = s.chunk;
    zero(s.y, c.L * c.kp);
    for (int64_t b = 0; b < c.L; b += kBlock) block_pairs(b);
    for (int64_t half = kBlock; half < kChunk; half *= 2)
      for (int64_t a = half; a < c.L; a += 2 * half) cross_pairs(a, half);
    for (int64_t i = 0; i < c.L; ++i) {
      dbeta[i] += dot(c.k + i * c.kp, s.y + i * c.kp, padded(c.K));
      for (int64_t d = 0; d < padded(c.K); d += lanes()) {
        const int64_t at = i * c.kp + d;
        store(hn::MulAdd(splat(c.beta[i]), load(s.y + at), load(s.dk + at)), s.dk + at);
      }
    }
  }

  // ---- pass 2: activations (math.md B5..B7)
  // -------------------------------------------------------------------------- dg_t = sum of dG from t to the end of
  // the chunk, then the gate's backward.
  void store_gate(int64_t t) {
    const Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    Vec A_sum = hn::Zero(kF32);
    for (int64_t i = c.L - 2; i >= 0; --i)
      for (int64_t d = 0; d < padded(c.K); d += lanes()) {
        float* dG = s.dG + i * c.kp + d;
        store(hn::Add(load(dG), load(dG + c.kp)), dG);
      }
    for (int64_t i = 0; i < c.L; ++i) {
      load_row(a.in.g.dtype, at(a.in.g, seq.b, seq.t0 + t + i, hv), c.K, s.raw);
      float* dG = s.dG + i * c.kp;
      for (int64_t d = 0; d < padded(c.K); d += lanes()) {
        const Vec z = gate.z(s.raw, d), dg = load(dG + d), dx = gate.dx(z, dg);
        if (partials.dA_log) A_sum = hn::Add(A_sum, gate.dA_log(z, dg, dx));
        if (partials.d_bias) store(hn::Add(load(s.d_bias + d), dx), s.d_bias + d);
        store(dx, dG + d);
      }
      if (present(a.dg)) store_row(a.dg.dtype, dG, c.K, at(a.dg, seq.b, seq.t0 + t + i, hv));
    }
    if (partials.dA_log) partials.dA_log[seq.n * p.HV + hv] += sum_lanes(A_sum);
  }

  void store_beta(int64_t t, const float* dbeta) {
    const Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    if (!present(a.dbeta)) return;
    for (int64_t i = 0; i < c.L; ++i) {
      const float factor = a.in.beta_form == KDA_BETA_2SIGMOID ? 2.0f : 1.0f, sg = c.beta[i] / factor;
      const float chain = a.in.beta_form == KDA_BETA_ACTIVATED ? 1.0f : factor * sg * (1.0f - sg);
      store_scalar(a.dbeta.dtype, dbeta[i] * chain, at(a.dbeta, seq.b, seq.t0 + t + i, hv));
    }
  }

  void store_qkv(int64_t t) {
    const Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    for (int64_t i = 0; i < c.L; ++i) {
      const int64_t token = seq.t0 + t + i;
      if (present(a.dv)) store_row(a.dv.dtype, s.x + i * c.vp, c.V, at(a.dv, seq.b, token, hv));
      if (partials.dq) {
        const int64_t row = ((seq.b * p.T + token) * p.HV + hv) * c.K;
        std::memcpy(partials.dq + row, s.dq + i * c.kp, c.K * sizeof(float));
        std::memcpy(partials.dk + row, s.dk + i * c.kp, c.K * sizeof(float));
        continue;
      }
      store_qk(a.dq, s.dq + i * c.kp, c.q + i * c.kp, c.q_norm[i], a.in.scale, a.in.qk_l2norm, seq.b, token, hv, c.K);
      store_qk(a.dk, s.dk + i * c.kp, c.k + i * c.kp, c.k_norm[i], 1, a.in.qk_l2norm, seq.b, token, hv, c.K);
    }
  }

  // Gradient of the raw row x, given y = scale r x and dy, its gradient: r (scale dy - y (y . dy) / scale). Clobbers
  // dy.
  static void store_qk(const kda_tensor& out, float* dy, const float* y, float r, float scale, bool normalised,
                       int64_t b, int64_t token, int64_t h, int64_t K) {
    if (!present(out)) return;
    const Vec direct = splat(r * scale), along = splat(normalised ? -r * dot(y, dy, padded(K)) / scale : 0);
    for (int64_t d = 0; d < padded(K); d += lanes())
      store(hn::MulAdd(along, load(y + d), hn::Mul(direct, load(dy + d))), dy + d);
    store_row(out.dtype, dy, K, at(out, b, token, h));
  }

  void run() {
    const kda_backward_args& a = p.args;
    Chunk& c = s.chunk;
    const int32_t layout = a.in.state_layout;
    zero(s.S, padded(p.K) * c.vp);
    zero(s.dS, padded(p.K) * c.vp);
    zero(s.d_bias, padded(p.K));
    if (partials.dA_log) partials.dA_log[seq.n * p.HV + hv] = 0;
    if (present(a.dhT)) load_state(a.dhT, layout, seq.n, hv, 0, p.K, p.V, s.dS, c.vp, s.rows);
    if (!present(a.h)) {
      if (present(a.h0)) load_state(a.h0, layout, seq.n, hv, 0, p.K, p.V, s.S, c.vp, s.rows);
      recompute();
    }
    float dbeta[kChunk];
    for (int64_t t = (seq.length - 1) / kChunk * kChunk; t >= 0 && seq.length > 0; t -= kChunk) {
      restore(t);
      wide_stage(dbeta);
      pairs(dbeta);
      store_gate(t);
      store_beta(t, dbeta);
      store_qkv(t);
    }
    if (present(a.dh0)) store_state(a.dh0, layout, seq.n, hv, 0, p.K, p.V, s.dS, c.vp, s.rows);
    if (partials.d_bias) std::memcpy(partials.d_bias + (seq.n * p.HV + hv) * p.K, s.d_bias, p.K * sizeof(float));
  }
};

void backward_task(const BackwardProblem& p, const Sequence& seq, int64_t hv, int64_t first_chunk,
                   const BackwardPartials& partials, char* memory) {
  BackwardScratch s(Arena(memory), p.K, p.V, memory, nullptr);
  const kda_inputs& in = p.args.in;
  const Gate gate = head_gate(in.gate_form, in.lower_bound, in.A_log, in.dt_bias, hv, p.K, s.chunk.bias);
  BackwardTask{p, seq, hv, first_chunk, gate, s, partials}.run();
}

// dq, dk of query/key head h for tokens t0 .. of row b: the sum over its value heads in ascending order, then the norm.
void sum_value_heads(const BackwardProblem& p, int64_t b, int64_t t0, int64_t count, int64_t h,
                     const BackwardPartials& partials) {
  const kda_inputs& in = p.args.in;
  alignas(64) float sum[kMaxSize], y[kMaxSize];
  const struct {
    const kda_tensor &out, &x;
    const float* partial;
    float scale;
  } operands[] = {{p.args.dq, in.q, partials.dq, in.scale}, {p.args.dk, in.k, partials.dk, 1.0f}};
  for (const auto& operand : operands) {
    if (!present(operand.out)) continue;
    for (int64_t t = t0; t < t0 + count; ++t) {
      for (int64_t d = 0; d < padded(p.K); ++d) sum[d] = 0;
      for (int64_t g = 0; g < p.group(); ++g) {
        const float* part = operand.partial + ((b * p.T + t) * p.HV + h * p.group() + g) * p.K;
        for (int64_t d = 0; d < p.K; ++d) sum[d] += part[d];
      }
      load_row(operand.x.dtype, at(operand.x, b, t, h), p.K, y);
      const float r = normalise_row(y, p.K, in.qk_l2norm, operand.scale);
      BackwardTask::store_qk(operand.out, sum, y, r, operand.scale, in.qk_l2norm, b, t, h, p.K);
    }
  }
}

void zero_gradient_tail(const kda_tensor& t, int64_t first, int64_t count) {
  for (int64_t j = 0; j < t.shape[2]; ++j) zero_rows(t, 0, first, count, j);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

struct Shared {
  BackwardPartials partials{};
  int64_t* first_chunk;
  uint64_t bytes;

  Shared(const BackwardProblem& p, char* base) {
    const kda_backward_args& a = p.args;
    Arena arena(base);
    first_chunk = reinterpret_cast<int64_t*>(arena.floats(2 * p.N));
    if (present(a.dA_log)) partials.dA_log = arena.floats(p.N * p.HV);
    if (present(a.d_dt_bias)) partials.d_bias = arena.floats(p.N * p.HV * p.K);
    if (p.HV > p.H && (present(a.dq) || present(a.dk))) {
      partials.dq = arena.floats(p.tokens() * p.HV * p.K);
      partials.dk = arena.floats(p.tokens() * p.HV * p.K);
    }
    bytes = arena.bytes();
  }
};

Workspace plan(const BackwardProblem& p) { return {Shared(p, nullptr).bytes, KDA_ISA_CALL(backward_scratch_bytes)(p)}; }

}  // namespace

uint64_t chunk_backward_workspace(const BackwardProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, p.N * p.HV));
}

void chunk_backward(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(a.exec, p.N * p.HV);
  const Shared shared(p, static_cast<char*>(a.exec.workspace));
  for (int64_t n = 0, chunks = 0; n < p.N; ++n) {
    shared.first_chunk[n] = chunks;
    chunks += (sequence_at(p, a.in, n).length + kChunk - 1) / kChunk;
  }
  const auto task_fn = KDA_ISA_CALL(backward_task);
  parallel_for(p.N * p.HV, threads, [&](int64_t task, int thread) {
    const int64_t n = task / p.HV, hv = task % p.HV;
    task_fn(p, sequence_at(p, a.in, n), hv, shared.first_chunk[n], shared.partials,
            workspace.of_thread(a.exec, thread));
  });

  const int64_t end = p.varlen ? int_at(a.in.cu_seqlens, p.N) : p.T;
  if (shared.partials.dq) {
    const auto sum = KDA_ISA_CALL(sum_value_heads);
    const int64_t blocks = (end + kChunk - 1) / kChunk;
    parallel_for(p.B * p.H * blocks, threads, [&](int64_t task, int) {
      const int64_t t0 = task % blocks * kChunk, h = task / blocks % p.H, b = task / blocks / p.H;
      sum(p, b, t0, std::min(kChunk, end - t0), h, shared.partials);
    });
  }
  for (const kda_tensor* t : {&a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta})
    if (p.varlen && present(*t)) KDA_ISA_CALL(zero_gradient_tail)(*t, end, p.T - end);

  for (int64_t hv = 0; hv < p.HV; ++hv)
    for (int64_t i = 0; i <= p.K; ++i) {  // sequences in order; i = K stands for dA_log
      if (!(i < p.K ? present(a.d_dt_bias) : present(a.dA_log))) continue;
      float sum = 0;
      for (int64_t n = 0; n < p.N; ++n)
        sum += i < p.K ? shared.partials.d_bias[(n * p.HV + hv) * p.K + i] : shared.partials.dA_log[n * p.HV + hv];
      (i < p.K ? static_cast<float*>(a.d_dt_bias.data)[hv * a.d_dt_bias.stride[0] + i]
               : static_cast<float*>(a.dA_log.data)[hv * a.dA_log.stride[0]]) = sum;
    }
}

}  // namespace kda::cpu
#endif
