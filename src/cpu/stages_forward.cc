// The stages of the forward, F1 to F5 of math.md 4.2. One task = one chunk and head (in the scan one sequence, head
// and tile of V). Each stage loads its operands to f32 scratch, does what the fused forward does with them, and
// stores the result.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/stages_forward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/stages-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

uint64_t stage_bytes(int64_t K, int64_t V) {
  uint64_t bytes;
  Stage(Arena(), K, V, &bytes);
  return bytes;
}

// ---- F1: G_i = sum_(j<=i) max(g_j log2(e), -160) ----

void stage_cumsum(const StageProblem<kda_stage_cumsum_args>& p, const ChunkAt& where, char* memory) {
  const Stage s(Arena(memory), p.K, p.V);
  const Chunk& c = s.c;
  load_rows(p.args.g, where, where.hv, p.K, c.alpha);
  for (int64_t d = 0; d < padded(p.K); d += lanes()) {
    Vec sum = hn::Zero(kF32);
    for (int64_t i = 0; i < where.L; ++i) {
      const Vec step = hn::Mul(load(c.alpha.row(i) + d), splat(1.44269504f));
      sum = hn::Add(sum, hn::IfThenElse(hn::Lt(step, splat(-160)), splat(-160), step));  // keeps NaN
      store(sum, c.alpha.row(i) + d);
    }
  }
  store_rows(p.args.G, where, c.alpha, p.K);
}

// ---- F2, F3 ----

// Stores qG, kg, w = T beta kG and u = T beta v. T, v, beta and the decayed operands are in place.
template <class Args>
void store_w_u(const Args& a, const Stage& s, const ChunkAt& where) {
  const Chunk& c = s.c;
  store_rows(a.qG, where, c.qG, c.K);
  store_rows(a.kg, where, c.kg, c.K);
  for (int64_t i = 0; i < c.L; ++i) {
    scale_row(c.kG.row(i), c.beta[i], c.K, c.kG.row(i));
    scale_row(c.v.row(i), c.beta[i], c.V, c.v.row(i));
  }
  zero(s.w.data, c.L * s.w.pitch);
  zero(s.u.data, c.L * s.u.pitch);
  if (present(a.w)) add_triangle<Triangle::kLower>(c.L, c.K, s.T.rows(), c.kG, s.w);
  if (present(a.u)) add_triangle<Triangle::kLower>(c.L, c.V, s.T.rows(), c.v, s.u);
  store_rows(a.w, where, s.w, c.K);
  store_rows(a.u, where, s.u, c.V);
}

void stage_chunk_intra(const StageProblem<kda_stage_chunk_intra_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_chunk_intra_args& a = p.args;
  Stage s(Arena(memory), p.K, p.V);
  Chunk& c = s.c;
  c.L = where.L;
  load_rows(a.q, where, where.hv / p.group(), p.K, c.q);
  load_rows(a.k, where, where.hv / p.group(), p.K, c.k);
  load_rows(a.v, where, where.hv, p.V, c.v);
  load_column(a.beta, where, c.beta);
  load_decays(c, a.G, where);
  scores(c);
  scale_rows(c.Aqk, c.L, kChunk, p.in.scale);
  store_scores(a.Aqk, where, c.Aqk);

  zero(s.T.data, c.L * s.T.pitch);
  for (int64_t i = 0; i < c.L; ++i) s.T.row(i)[i] = 1;
  solve_triangle<Triangle::kLower>(c.L, c.L, c.Akk.rows(), s.T);
  store_scores(a.Akk_inv, where, s.T);
  load_scores(a.Akk_inv, where, s.T);  // rounded: recompute_w_u starts from that, and gives the same bits
  decayed_operands(c);
  store_w_u(a, s, where);
}

void stage_recompute_w_u(const StageProblem<kda_stage_recompute_w_u_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_recompute_w_u_args& a = p.args;
  Stage s(Arena(memory), p.K, p.V);
  Chunk& c = s.c;
  c.L = where.L;
  if (present(a.q)) load_rows(a.q, where, where.hv / p.group(), p.K, c.q);
  else zero(c.q.data, c.L * c.q.pitch);
  load_rows(a.k, where, where.hv / p.group(), p.K, c.k);
  load_rows(a.v, where, where.hv, p.V, c.v);
  load_column(a.beta, where, c.beta);
  load_decays(c, a.G, where);
  load_scores(a.Akk_inv, where, s.T);
  decayed_operands(c);
  store_w_u(a, s, where);
}

// ---- F4: v_new = u - w S, S <- Diag(ell) S + kg^T v_new ----

void stage_delta_h(const StageProblem<kda_stage_delta_h_args>& p, const ScanAt& scan, char* memory) {
  const kda_stage_delta_h_args& a = p.args;
  Stage s(Arena(memory), p.K, scan.V);
  Chunk& c = s.c;
  const int32_t layout = p.in.state_layout;
  zero(s.S.data, padded(p.K) * s.S.pitch);
  if (present(a.h0)) load_state(c, a.h0, layout, scan.seq.n, scan.hv, scan.v0, s.S);
  for (int64_t i = 0; i < scan.chunks(); ++i) {
    const ChunkAt where = scan.chunk(i);
    c.L = where.L;
    if (present(a.h)) store_state(c, a.h, layout, where.row, scan.hv, scan.v0, s.S);
    load_rows(a.kg, where, scan.hv, p.K, c.kg);
    load_rows(a.w, where, scan.hv, p.K, s.w);
    load_rows(a.u, where, scan.hv, scan.V, c.v, scan.v0);
    load_chunk_decay(c, a.G, where);
    gemm<Acc::kSub>(c.L, c.V, c.K, s.w.rows(), s.S, c.v);
    store_rows(a.v_new, where, c.v, c.V, scan.v0);
    advance_state(c, s.S, s.S);
  }
  if (present(a.hT)) store_state(c, a.hT, layout, scan.seq.n, scan.hv, scan.v0, s.S);
}

// ---- F5: o = scale qG S + Aqk v_new ----

void stage_fwd_o(const StageProblem<kda_stage_fwd_o_args>& p, const ChunkAt& where, char* memory) {
  const kda_stage_fwd_o_args& a = p.args;
  Stage s(Arena(memory), p.K, p.V);
  Chunk& c = s.c;
  c.L = where.L;
  load_rows(a.q, where, where.hv / p.group(), p.K, c.q);
  load_rows(a.v_new, where, where.hv, p.V, c.v);
  load_decays(c, a.G, where);
  load_scores(a.Aqk, where, c.Aqk);
  load_state(c, a.h, p.in.state_layout, where.row, where.hv, 0, s.S);
  scale_rows(c.q, c.L, p.K, p.in.scale);
  decay_rows<true>(c, 0, c.L, c.q, c.qG, c.q, c.kG, nullptr, nullptr);
  gemm<Acc::kSet>(c.L, p.V, p.K, c.qG.rows(), s.S, s.u);
  add_triangle<Triangle::kLower>(c.L, p.V, c.Aqk.rows(), c.v, s.u);
  store_rows(a.o, where, s.u, p.V);
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

uint64_t stage_scratch_bytes(int64_t K, int64_t V) { return KDA_ISA_CALL(stage_bytes)(K, V); }

void stage(const StageProblem<kda_stage_cumsum_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_cumsum)); }
void stage(const StageProblem<kda_stage_chunk_intra_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_chunk_intra)); }
void stage(const StageProblem<kda_stage_recompute_w_u_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_recompute_w_u)); }
void stage(const StageProblem<kda_stage_fwd_o_args>& p) { run_chunks(p, KDA_ISA_CALL(stage_fwd_o)); }
void stage(const StageProblem<kda_stage_delta_h_args>& p) {
  for_each_scan(p, KDA_ISA_CALL(stage_delta_h));
  zero_tails(p, KDA_ISA_CALL(zero_tail));
}

}  // namespace kda::cpu
#endif
