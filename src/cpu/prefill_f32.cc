// kda_prefill_f32 on the CPU: the chunked forward of chunk_forward.cc with heads before tokens, chunks of 32 or 64, and
//   w = (I + Akk)^-1 beta kG      u = (I + Akk)^-1 beta v
// stored if they are wanted. v_new is solved for directly, not taken as u - w S. So o and hT do not depend on what is
// wanted, and with chunks of 64 they have the bits of kda_forward. One task = one row, value head and tile of V.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/prefill_f32.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/chunk-inl.h"
#include "contract/prefill_f32.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

struct PrefillScratch {
  Chunk chunk;
  Matrix S;     // [K][V]
  Matrix o;     // [C][V]
  Matrix w, u;  // [C][K], [C][V]

  PrefillScratch(Arena arena, int64_t K, int64_t V, uint64_t* bytes = nullptr) : chunk(arena, K, V) {
    S = take(arena, padded(K), V);
    o = take(arena, kChunk, V);
    w = take(arena, kChunk, K), u = take(arena, kChunk, V);
    if (bytes) *bytes = arena.bytes();
  }
};

uint64_t prefill_scratch_bytes(int64_t K, int64_t V) {
  uint64_t bytes;
  PrefillScratch(Arena(), K, V, &bytes);
  return bytes;
}

// x <- (I + Akk)^-1 beta x, stored as the columns from v0 on of chunk n of a buffer whose chunks have `chunk` rows.
inline void store_solved(const Chunk& c, Matrix x, int64_t columns, const kda_tensor& buffer, int64_t n, int64_t chunk,
                         int64_t v0) {
  for (int64_t i = 0; i < c.L; ++i) scale_row(x.row(i), c.beta[i], columns, x.row(i));
  solve_triangle<Triangle::kLower>(c.L, columns, c.Akk.rows(), x);
  for (int64_t i = 0; i < chunk; ++i) {
    char* row = at(buffer, n, i) + v0 * sizeof(float);
    if (i < c.L) store_row(KDA_F32, x.row(i), columns, row);
    else std::memset(row, 0, columns * sizeof(float));
  }
}

void prefill_task(const PrefillF32Problem& p, int64_t b, int64_t hv, int64_t v0, int64_t V, char* memory) {
  const kda_prefill_f32_args& a = p.args;
  PrefillScratch s(Arena(memory), p.K, V);
  Chunk& c = s.chunk;
  const Gate gate{GateForm::kLog, 0, 1, nullptr};
  zero(s.S.data, padded(p.K) * s.S.pitch);
  if (present(a.h0)) load_state(c, a.h0, a.state_layout, b, hv, v0, s.S);
  for (int64_t t = 0, n = 0; t < p.T; t += a.chunk, ++n) {
    load_chunk(c, p.in, gate, b, t, std::min<int64_t>(a.chunk, p.T - t), hv / p.group(), hv, v0);
    scores(c);
    decayed_operands(c);
    if (present(a.w) && v0 == 0) {  // does not depend on V
      std::memcpy(s.w.data, c.kG.data, c.L * c.kG.pitch * sizeof(float));
      store_solved(c, s.w, p.K, chunk_buffer(a.w, b, hv), n, a.chunk, 0);
    }
    if (present(a.u)) {
      std::memcpy(s.u.data, c.v.data, c.L * c.v.pitch * sizeof(float));
      store_solved(c, s.u, V, chunk_buffer(a.u, b, hv), n, a.chunk, v0);
    }
    corrections(c, s.S);
    gemm<Acc::kSet>(c.L, V, p.K, c.qG.rows(), s.S, s.o);
    add_triangle<Triangle::kLower>(c.L, V, c.Aqk.rows(), c.v, s.o);
    for (int64_t i = 0; i < c.L; ++i)
      store_row(KDA_F32, s.o.row(i), V, at(p.o, b, t + i, hv) + v0 * static_cast<int64_t>(sizeof(float)));
    advance_state(c, s.S, s.S);
  }
  if (present(a.hT)) store_state(c, a.hT, a.state_layout, b, hv, v0, s.S);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

int64_t most_tasks(const PrefillF32Problem& p) { return p.B * p.HV * divide_up(p.V, 32); }

Workspace plan(const PrefillF32Problem& p) { return {0, KDA_ISA_CALL(prefill_scratch_bytes)(p.K, p.V)}; }

}  // namespace

uint64_t prefill_f32_workspace(const PrefillF32Problem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, most_tasks(p)));
}

void prefill_f32(const PrefillF32Problem& p) {
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(p.args.exec, most_tasks(p));
  // With fewer heads than threads V is cut into tiles, as in kda_forward.
  const int64_t heads = std::max<int64_t>(1, p.B * p.HV);
  const int64_t wanted_tiles = std::clamp<int64_t>(threads / heads, 1, (p.V + 31) / 32);
  const int64_t tile = (p.V / wanted_tiles + 15) / 16 * 16, tiles = (p.V + tile - 1) / tile;
  const auto task_fn = KDA_ISA_CALL(prefill_task);
  parallel_for(p.B * p.HV * tiles, threads, [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * tile, hv = task / tiles % p.HV, b = task / tiles / p.HV;
    task_fn(p, b, hv, v0, std::min(tile, p.V - v0), workspace.of_thread(p.args.exec, thread));
  });
}

}  // namespace kda::cpu
#endif
