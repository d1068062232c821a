// The stages of the backward, B1 to B5 of math.md 5.1 in its simplified form, made of the pieces of the fused
// backward. One task = one chunk and head (in the reverse scan one sequence, head and tile of V).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/stages_backward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/stages-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// ---- B1: dAqk = scale tril(D v_new^T), dv_local = Aqk^T D ----

void stage_bwd_local(const StageProblem<kda_stage_bwd_local_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_bwd_local_args& a = p.args;
  const Stage s(Arena(memory), p.K, p.V);
  const int64_t L = where.L;
  load_rows(a.d_o, where, where.hv, p.V, s.D);
  load_rows(a.v_new, where, where.hv, p.V, s.u);
  load_scores(a.Aqk, where, s.T);
  transpose(s.u, L, padded(p.V), s.v_newT);
  gemm_lower(L, p.V, s.D.rows(), s.v_newT, s.dAqk);
  scale_rows(s.dAqk, L, kChunk, p.in.scale);
  store_scores(a.dAqk, where, s.dAqk);
  zero(s.x.data, L * s.x.pitch);
  add_triangle<Triangle::kUpper>(L, p.V, s.T.columns(), s.D, s.x);
  store_rows(a.dv_local, where, s.x, p.V);
}

// ---- B2: dv_new = dv_local + kg dS, dS <- Diag(ell) dS + scale qG^T D - w^T dv_new ----

void stage_bwd_delta_h(const StageProblem<kda_stage_bwd_delta_h_args>& p, const ScanAt& scan, char* memory) {
  const kda_stage_bwd_delta_h_args& a = p.args;
  Stage s(Arena(memory), p.K, scan.V);
  Chunk& c = s.c;
  const int32_t layout = p.in.state_layout;
  zero(s.dS.data, padded(p.K) * s.dS.pitch);
  if (present(a.dhT)) load_state(c, a.dhT, layout, scan.seq.n, scan.hv, scan.v0, s.dS);
  for (int64_t i = scan.chunks() - 1; i >= 0; --i) {
    const ChunkAt where = scan.chunk(i);
    c.L = where.L;
    store_state(c, a.dh, layout, where.row, scan.hv, scan.v0, s.dS);
    load_rows(a.qG, where, scan.hv, p.K, c.qG);
    load_rows(a.kg, where, scan.hv, p.K, c.kg);
    load_rows(a.w, where, scan.hv, p.K, s.w);
    load_rows(a.d_o, where, scan.hv, c.V, s.D, scan.v0);
    load_rows(a.dv_local, where, scan.hv, c.V, s.x, scan.v0);
    load_chunk_decay(c, a.G, where);
    gemm<Acc::kAdd>(c.L, c.V, c.K, c.kg.rows(), s.dS, s.x);
    store_rows(a.dv_new, where, s.x, c.V, scan.v0);
    scale_rows(s.D, c.L, c.V, p.in.scale);
    gemm<Acc::kDecay>(c.K, c.V, c.L, c.qG.columns(), s.D, s.dS, {c.ell, s.dS});
    gemm<Acc::kSub>(c.K, c.V, c.L, s.w.columns(), s.x, s.dS);
  }
  if (present(a.dh0)) store_state(c, a.dh0, layout, scan.seq.n, scan.hv, scan.v0, s.dS);
}

// ---- B3: everything that meets a state ----

void stage_bwd_wy_dqkg(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  Stage s(Arena(memory), p.K, p.V);
  Chunk& c = s.c;
  const int64_t L = c.L = where.L, K = p.K, V = p.V;
  load_rows(a.q, where, where.hv / p.group(), K, c.q);
  load_rows(a.k, where, where.hv / p.group(), K, c.k);
  load_rows(a.v, where, where.hv, V, c.v);
  load_column(a.beta, where, c.beta);
  load_decays(c, a.G, where);
  decayed_operands(c);
  const kda_tensor* states[] = {&a.h, &a.dh};
  const Matrix transposed[] = {s.ST, s.dST};
  for (int i = 0; i < 2; ++i) {
    zero(s.S.data, padded(K) * s.S.pitch);  // the padding too: sums over the transposed states include it
    load_state(c, *states[i], p.in.state_layout, where.row, where.hv, 0, s.S);
    transpose(s.S, padded(K), padded(V), transposed[i]);
  }
  load_rows(a.v_new, where, where.hv, V, s.u);
  transpose(s.u, L, padded(V), s.v_newT);

  // x = T^T dv_new; scale goes into D, so that dq and dG come out with it.
  load_rows(a.dv_new, where, where.hv, V, s.D);
  load_scores(a.Akk_inv, where, s.T);
  zero(s.x.data, L * s.x.pitch);
  add_triangle<Triangle::kUpper>(L, V, s.T.columns(), s.D, s.x);
  load_rows(a.d_o, where, where.hv, V, s.D);
  scale_rows(s.D, L, V, p.in.scale);
  float dbeta[kChunk];
  GradientSteps{c, s}.wide_stage(s.u, dbeta);

  scale_rows(s.xv, L, kChunk, -1);
  store_scores(a.dAkk, where, s.xv, true);
  store_rows(a.dq, where, s.dq, K);
  store_rows(a.dk, where, s.dk, K);
  store_rows(a.dG, where, s.dG, K);
  store_rows(a.dv, where, s.x, V);
  store_column(a.dbeta, where, dbeta);
}

// ---- B4: the pairs inside the chunk ----

void stage_bwd_intra(const StageProblem<kda_stage_bwd_intra_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_bwd_intra_args& a = p.args;
  Stage s(Arena(memory), p.K, p.V);
  Chunk& c = s.c;
  c.L = where.L;
  load_rows(a.q, where, where.hv / p.group(), p.K, c.q);
  load_rows(a.k, where, where.hv / p.group(), p.K, c.k);
  load_column(a.beta, where, c.beta);
  load_decays(c, a.G, where);
  load_scores(a.dAqk, where, s.dAqk);
  load_scores(a.dAkk, where, s.xv);
  scale_rows(s.xv, c.L, kChunk, -1);
  load_rows(a.dq, where, where.hv, p.K, s.dq);
  load_rows(a.dk, where, where.hv, p.K, s.dk);
  load_rows(a.dG, where, where.hv, p.K, s.dG);
  float dbeta[kChunk];
  load_column(a.dbeta, where, dbeta);
  GradientSteps{c, s}.pairs(dbeta);
  store_rows(a.dq, where, s.dq, p.K);
  store_rows(a.dk, where, s.dk, p.K);
  store_rows(a.dG, where, s.dG, p.K);
  store_column(a.dbeta, where, dbeta);
}

// ---- B5: dg_t = sum of dG from t on, 0 where alpha_t is 0 ----

void stage_cumsum_backward(const StageProblem<kda_stage_cumsum_backward_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_cumsum_backward_args& a = p.args;
  const Stage s(Arena(memory), p.K, p.V);
  load_rows(a.dG, where, where.hv, p.K, s.dG);
  if (present(a.g)) load_rows(a.g, where, where.hv, p.K, s.dq);
  else zero(s.dq.data, where.L * s.dq.pitch);
  for (int64_t d = 0; d < padded(p.K); d += lanes()) {
    Vec sum = hn::Zero(kF32);
    for (int64_t i = where.L - 1; i >= 0; --i) {
      sum = hn::Add(sum, load(s.dG.row(i) + d));
      const auto gone = hn::Eq(exp(load(s.dq.row(i) + d)), splat(0));
      store(hn::IfThenZeroElse(gone, sum), s.dG.row(i) + d);
    }
  }
  store_rows(a.dg, where, s.dG, p.K);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"

namespace kda::cpu {
namespace {

template <class P, class F>
void run_chunks(const P& p, const F& fn) {
  for_each_chunk(p, fn);
  zero_tails(p, KDA_ISA_CALL(zero_tail));
}

}  // namespace

void stage(const StageProblem<kda_stage_bwd_local_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_bwd_local)); }
void stage(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_bwd_wy_dqkg)); }
void stage(const StageProblem<kda_stage_bwd_intra_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_bwd_intra)); }
void stage(const StageProblem<kda_stage_cumsum_backward_args>& p) {
  run_chunks(p, KDA_ISA_CALL(stage_cumsum_backward));
}
void stage(const StageProblem<kda_stage_bwd_delta_h_args>& p) {
  for_each_scan(p, KDA_ISA_CALL(stage_bwd_delta_h));
  zero_tails(p, KDA_ISA_CALL(zero_tail));
}

}  // namespace kda::cpu
#endif
