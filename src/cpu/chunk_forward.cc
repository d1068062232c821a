// Chunked forward on the CPU (math.md 4.7, direct form). One task = one sequence, value head and tile of V; its chunks
// run one after the other with the state in scratch. Everything in between is f32 in the thread's share of the
// workspace.
//
// Per chunk of L tokens, 2 FLOP a multiply-add:
//   scores  Aqk, Akk        2 L^2 K           v_new  kG S, solve     2 L K V + L^2 V
//   o       qG S, Aqk v_new 2 L K V + L^2 V   S      kg^T v_new      2 L K V
// K = V = 128: 9.0 MFLOP a chunk. What is not multiply-adds (loads, exp, decays, transposition) is about a fifth of the
// time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/chunk_forward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/chunk-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

struct ForwardScratch {
  Chunk chunk;
  Matrix S;  // [K][V]
  Matrix o;  // [C][V]

  ForwardScratch(Arena arena, int64_t K, int64_t V, uint64_t* bytes) : chunk(arena, K, V) {
    S = take(arena, padded(K), V);
    o = take(arena, kChunk, V);
    if (bytes) *bytes = arena.bytes();
  }
};

uint64_t forward_scratch_bytes(int64_t K, int64_t V) {
  uint64_t bytes;
  ForwardScratch(Arena(), K, V, &bytes);
  return bytes;
}

// Outputs of one chunk, and what it leaves behind for backward.
inline void store_chunk(const kda_forward_args& a, const ForwardScratch& s, int64_t b, int64_t t0, int64_t hv,
                        int64_t v0) {
  const Chunk& c = s.chunk;
  for (int64_t i = 0; i < c.L; ++i) {
    store_row(a.o.dtype, s.o.row(i), c.V, at(a.o, b, t0 + i, hv) + v0 * dtype_size(a.o.dtype));
    if (present(a.v_new)) store_row(KDA_F32, c.v.row(i), c.V, at(a.v_new, b, t0 + i, hv) + v0 * sizeof(float));
    if (v0) continue;  // scores do not depend on V: the first tile writes them
    if (present(a.Aqk)) store_row(KDA_F32, c.Aqk.row(i), kChunk, at(a.Aqk, b, t0 + i, hv));
    if (present(a.Akk)) store_row(KDA_F32, c.Akk.row(i), kChunk, at(a.Akk, b, t0 + i, hv));
  }
}

// Columns v0 .. v0+V-1 of value head hv of one sequence.
void forward_task(const ForwardProblem& p, const Sequence& seq, int64_t hv, int64_t v0, int64_t V, int64_t first_h,
                  char* memory) {
  const kda_forward_args& a = p.args;
  const kda_inputs& in = a.in;
  if (!seq.live) {
    if (v0 == 0) zero_rows(a.o, seq.b, seq.t0, seq.length, hv);
    return;
  }
  ForwardScratch s(Arena(memory), p.K, V, nullptr);
  Chunk& c = s.chunk;
  const Gate gate = head_gate(in.gate_form, in.lower_bound, in.A_log, in.dt_bias, hv, p.K, c.dt_bias);
  zero(s.S.data, padded(p.K) * s.S.pitch);
  if (seq.initial) load_state(c, a.states.h0, in.state_layout, seq.slot, hv, v0, s.S);

  const int64_t h_tokens = kChunk * a.h_every;
  for (int64_t t = 0; t < seq.length; t += kChunk) {
    const int64_t t0 = seq.t0 + t, L = std::min(kChunk, seq.length - t);
    if (present(a.h) && t % h_tokens == 0) store_state(c, a.h, in.state_layout, first_h + t / h_tokens, hv, v0, s.S);
    load_chunk(c, in, gate, seq.b, t0, L, hv / p.group(), hv, v0);
    scores(c);
    decayed_operands(c);
    corrections(c, s.S);
    gemm<Acc::kSet>(L, V, p.K, c.qG.rows(), s.S, s.o);
    add_triangle<Triangle::kLower>(L, V, c.Aqk.rows(), c.v, s.o);
    store_chunk(a, s, seq.b, t0, hv, v0);
    advance_state(c, s.S, s.S);

    if (present(a.checkpoints) && (t + L) % a.checkpoint_every == 0) {
      const int64_t m = (t + L) / a.checkpoint_every - 1;
      const int64_t slot = m < a.checkpoint_slots.shape[1] ? int_at(a.checkpoint_slots, seq.n, m) : -1;
      if (slot >= a.states.first_valid_slot) store_state(c, a.checkpoints, in.state_layout, slot, hv, v0, s.S);
    }
  }
  if (present(a.states.hT)) store_state(c, a.states.hT, in.state_layout, seq.slot, hv, v0, s.S);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

Workspace plan(const ForwardProblem& p) {
  // Shared: where each sequence's rows of h begin. A thread's share is sized for all of V, whatever the tiling.
  const uint64_t offsets = present(p.args.h) ? p.N * sizeof(int64_t) : 0;
  return {offsets, KDA_ISA_CALL(forward_scratch_bytes)(p.K, p.V)};
}

}  // namespace

uint64_t chunk_forward_workspace(const ForwardProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, INT64_MAX));
}

void chunk_forward(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(a.exec, INT64_MAX);
  auto* first_h = static_cast<int64_t*>(a.exec.workspace);
  if (present(a.h)) first_h_rows(p, a.in, a.h_every, first_h);

  // Fewer heads than threads: cut V into tiles. Each tile repeats the scores, so no finer than 32 columns.
  const int64_t heads = std::max<int64_t>(1, p.N * p.HV);
  const int64_t wanted_tiles = std::clamp<int64_t>(threads / heads, 1, (p.V + 31) / 32);
  const int64_t tile = (p.V / wanted_tiles + 15) / 16 * 16, tiles = (p.V + tile - 1) / tile;
  const auto task_fn = KDA_ISA_CALL(forward_task);
  parallel_for(p.N * p.HV * tiles, threads, [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * tile, hv = task / tiles % p.HV, n = task / tiles / p.HV;
    task_fn(p, sequence_at(p, a.in, a.states, n), hv, v0, std::min(tile, p.V - v0), present(a.h) ? first_h[n] : 0,
            workspace.of_thread(a.exec, thread));
  });
  if (p.varlen) {
    const int64_t end = int_at(a.in.cu_seqlens, p.N);
    KDA_ISA_CALL(zero_tail)(a.o, end, p.T - end);
  }
}

}  // namespace kda::cpu
#endif
