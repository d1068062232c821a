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
  float* S;     // [K][V]
  float* o;     // [C][V]
  float* rows;  // [16][K] for transposing states

  ForwardScratch(Arena arena, int64_t K, int64_t V, uint64_t* bytes) : chunk(arena, K, V) {
    S = arena.floats(padded(K) * pitch(V));
    o = arena.floats(kChunk * pitch(V));
    rows = arena.floats(kPad * pitch(K));
    if (bytes) *bytes = arena.bytes();
  }
};

uint64_t forward_scratch_bytes(int64_t K, int64_t V) {
  uint64_t bytes;
  ForwardScratch(Arena(), K, V, &bytes);
  return bytes;
}

// What this chunk leaves behind for backward.
inline void store_saved(const kda_forward_args& a, const ForwardScratch& s, const Sequence& seq, int64_t t0, int64_t hv,
                        int64_t v0) {
  const Chunk& c = s.chunk;
  for (int64_t i = 0; i < c.L; ++i) {
    if (present(a.v_new)) store_row(KDA_F32, c.v + i * c.vp, c.V, at(a.v_new, seq.b, t0 + i, hv) + v0 * sizeof(float));
    if (v0) continue;  // scores do not depend on V: the first tile writes them
    if (present(a.Aqk)) store_row(KDA_F32, c.Aqk + i * kScorePitch, kChunk, at(a.Aqk, seq.b, t0 + i, hv));
    if (present(a.Akk)) store_row(KDA_F32, c.Akk + i * kScorePitch, kChunk, at(a.Akk, seq.b, t0 + i, hv));
  }
}

// Columns v0 .. v0+V-1 of value head hv of one sequence.
void forward_task(const ForwardProblem& p, const Sequence& seq, int64_t hv, int64_t v0, int64_t V, int64_t first_chunk,
                  char* memory) {
  const kda_forward_args& a = p.args;
  const kda_inputs& in = a.in;
  if (!seq.live) {
    if (v0 == 0) zero_rows(a.o, seq.b, seq.t0, seq.length, hv);
    return;
  }
  ForwardScratch s(Arena(memory), p.K, V, nullptr);
  Chunk& c = s.chunk;
  const Gate gate = head_gate(in.gate_form, in.lower_bound, in.A_log, in.dt_bias, hv, p.K, c.bias);
  zero(s.S, padded(p.K) * c.vp);
  if (seq.initial) load_state(a.states.h0, in.state_layout, seq.slot, hv, v0, p.K, V, s.S, c.vp, s.rows);

  for (int64_t t = 0; t < seq.length; t += kChunk) {
    if (present(a.h)) store_state(a.h, in.state_layout, first_chunk + t / kChunk, hv, v0, p.K, V, s.S, c.vp, s.rows);
    load_chunk(c, in, gate, seq.b, seq.t0 + t, std::min(kChunk, seq.length - t), hv / p.group(), hv, v0);
    scores(c);
    decayed_operands(c);
    corrections(c, s.S);
    gemm<Acc::kSet>(c.L, V, p.K, rows_of(c.qG, c.kp), s.S, c.vp, s.o, c.vp);
    add_triangle<Triangle::kLower>(c.L, V, rows_of(c.Aqk, kScorePitch), c.v, c.vp, s.o, c.vp);
    for (int64_t i = 0; i < c.L; ++i)
      store_row(a.o.dtype, s.o + i * c.vp, V, at(a.o, seq.b, seq.t0 + t + i, hv) + v0 * dtype_size(a.o.dtype));
    store_saved(a, s, seq, seq.t0 + t, hv, v0);
    advance_state(c, s.S);

    const int64_t done = t + c.L;
    if (present(a.checkpoints) && done % a.checkpoint_every == 0) {
      const int64_t m = done / a.checkpoint_every - 1;
      const int64_t slot = m < a.checkpoint_slots.shape[1] ? int_at(a.checkpoint_slots, seq.n, m) : -1;
      if (slot >= a.states.first_valid_slot)
        store_state(a.checkpoints, in.state_layout, slot, hv, v0, p.K, V, s.S, c.vp, s.rows);
    }
  }
  if (present(a.states.hT)) store_state(a.states.hT, in.state_layout, seq.slot, hv, v0, p.K, V, s.S, c.vp, s.rows);
}

void zero_tail(const kda_tensor& t, int64_t first, int64_t count) {
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
  auto* first_chunk = static_cast<int64_t*>(a.exec.workspace);
  for (int64_t n = 0, chunks = 0; present(a.h) && n < p.N; ++n) {
    first_chunk[n] = chunks;
    chunks += (sequence_at(p, a.in, n).length + kChunk - 1) / kChunk;
  }

  // Fewer heads than threads: cut V into tiles. Each tile repeats the scores, so no finer than 32 columns.
  const int64_t heads = std::max<int64_t>(1, p.N * p.HV);
  const int64_t wanted_tiles = std::clamp<int64_t>(threads / heads, 1, (p.V + 31) / 32);
  const int64_t tile = (p.V / wanted_tiles + 15) / 16 * 16, tiles = (p.V + tile - 1) / tile;
  const auto task_fn = KDA_ISA_CALL(forward_task);
  parallel_for(p.N * p.HV * tiles, threads, [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * tile, hv = task / tiles % p.HV, n = task / tiles / p.HV;
    task_fn(p, sequence_at(p, a.in, a.states, n), hv, v0, std::min(tile, p.V - v0), present(a.h) ? first_chunk[n] : 0,
            workspace.of_thread(a.exec, thread));
  });
  if (p.varlen) {
    const int64_t end = int_at(a.in.cu_seqlens, p.N);
    KDA_ISA_CALL(zero_tail)(a.o, end, p.T - end);
  }
}

}  // namespace kda::cpu
#endif
