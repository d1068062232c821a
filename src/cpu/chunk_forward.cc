// Chunked forward on the CPU (math.md 4.7, direct form). One task = one sequence and value head; its chunks run one
// after the other with the state in scratch. Everything in between is f32 in the thread's share of the workspace. All
// threads share a head that is too long for one of them (team.h).
//
// Per chunk of L tokens, 2 FLOP a multiply-add:
//   scores  Aqk, Akk        2 L^2 K           v_new  kG S, solve     2 L K V + L^2 V
//   o       qG S, Aqk v_new 2 L K V + L^2 V   S      kg^T v_new      2 L K V
// At K = V = 128 that is 9.0 MFLOP a chunk. All that is not a multiply-add (loads, exp, decays, transposition) takes
// about a fifth of the time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/chunk_forward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/chunk-inl.h"
// clang-format on
#include "contract/openings.h"

#ifndef KDA_CPU_CHUNK_FORWARD_TYPES
#define KDA_CPU_CHUNK_FORWARD_TYPES
namespace kda::cpu {
// One value head of one sequence.
struct ForwardHead {
  const ForwardProblem& p;
  Sequence seq;
  int64_t hv, first_h;  // first_h: where the sequence's rows of h begin
  int64_t begun;        // as begun_tokens() says

  // Where chunk i begins, and how many there are, if no chunk ends early but the first.
  int64_t start(int64_t i) const { return std::max<int64_t>(i * kChunk - begun, 0); }
  int64_t chunks() const { return seq.length > 0 ? divide_up(seq.length + begun, kChunk) : 0; }
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

struct ForwardSteps : ForwardHead {
  Gate gate(Chunk& c) const {
    const kda_inputs& in = p.args.in;
    return head_gate(form_of(in), in.lower_bound, in.A_log, in.dt_bias, hv, p.K, c.dt_bias);
  }

  // Tokens of the chunk at t. It ends where a chunk of the request does or, if checkpoints are within chunks, where one
  // of them is; and where a row of h is.
  int64_t length_at(int64_t t) const {
    const kda_forward_args& a = p.args;
    int64_t length = kChunk - (begun + t) % kChunk;
    if (keeps_within_chunks(a))
      length = std::min(kChunk, checkpoint_places(a.checkpoint_offset, a.checkpoint_every, seq.n).next(t) - t);
    if (present(a.h)) length = std::min(length, kChunk - t % kChunk);
    return std::min(length, seq.length - t);
  }

  // Prepares the chunk at t, except for what depends on the state.
  void prepare(Chunk& c, const Gate& gate, int64_t t) const {
    load_chunk(c, p.args.in, gate, seq.b, seq.t0 + t, length_at(t), hv / p.group(), hv, 0);
    scores(c);
    decayed_operands(c);
  }

  // Does the rest of the chunk on columns v0 .. v0+c.V-1: o, and the S of the next chunk. S is loaded from h0 before
  // the first chunk and stored in hT after the last one.
  void scan(const Chunk& c, Matrix S, Matrix o, int64_t t, int64_t v0) const {
    const kda_forward_args& a = p.args;
    const int32_t layout = a.in.state_layout;
    const int64_t h_tokens = kChunk * a.h_every, L = c.L, end = t + L;
    if (t == 0) load_first_state(c, v0, S);
    if (present(a.h) && t % h_tokens == 0) store_state(c, a.h, h_layout(a), first_h + t / h_tokens, hv, v0, S);
    corrections(c, S);
    gemm<Acc::kSet>(L, c.V, p.K, c.qG.rows(), S, o);
    add_triangle<Triangle::kLower>(L, c.V, c.Aqk.rows(), c.v, o);
    store_chunk(c, o, t, v0);
    advance_state(c, S, S);
    const int64_t row = present(a.checkpoints) ? checkpoint_row(a, seq.n, end) : -1;
    if (row >= 0) store_state(c, a.checkpoints, layout, row, hv, v0, S);
    if (end == seq.length) store_last_state(c, v0, S);
  }

  void load_first_state(const StateTile& c, int64_t v0, Matrix S) const {
    for (int64_t k = 0; k < padded(p.K); ++k) zero(S.row(k), padded(c.V));
    if (seq.initial) load_state(c, p.args.states.h0, p.args.in.state_layout, seq.slot, hv, v0, S);
  }
  void store_last_state(const StateTile& c, int64_t v0, Matrix S) const {
    const kda_forward_args& a = p.args;
    const int64_t row = present(a.states.hT) ? final_row(a.out_state_indices, a.states, seq) : -1;
    if (row >= 0) store_state(c, a.states.hT, a.in.state_layout, row, hv, v0, S);
  }

  // Stores the outputs of one chunk, and what it leaves for backward.
  void store_chunk(const Chunk& c, Matrix o, int64_t t, int64_t v0) const {
    const kda_forward_args& a = p.args;
    for (int64_t i = 0; i < c.L; ++i) {
      const int64_t token = seq.t0 + t + i;
      store_row(a.o.dtype, o.row(i), c.V, at(a.o, seq.b, token, hv) + v0 * dtype_size(a.o.dtype));
      if (present(a.v_new))
        store_row(a.v_new.dtype, c.v.row(i), c.V, at(a.v_new, seq.b, token, hv) + v0 * dtype_size(a.v_new.dtype));
      if (v0) continue;  // scores do not depend on V: the first tile writes them
      if (present(a.Aqk)) store_row(KDA_F32, c.Aqk.row(i), kChunk, at(a.Aqk, seq.b, token, hv));
      if (present(a.Akk)) store_row(KDA_F32, c.Akk.row(i), kChunk, at(a.Akk, seq.b, token, hv));
    }
  }
};

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

// Runs a head on one thread.
void forward_task(const ForwardHead& head, char* memory) {
  const ForwardSteps steps{head};
  const Sequence& seq = head.seq;
  if (!seq.live) return zero_rows(head.p.args.o, seq.b, seq.t0, seq.length, head.hv);
  ForwardScratch s(Arena(memory), head.p.K, head.p.V, nullptr);
  const Gate gate = steps.gate(s.chunk);
  for (int64_t t = 0; t < seq.length; t += s.chunk.L) {
    steps.prepare(s.chunk, gate, t);
    steps.scan(s.chunk, s.S, s.o, t, 0);
  }
  if (seq.length > 0) return;
  steps.load_first_state(s.chunk, 0, s.S);
  steps.store_last_state(s.chunk, 0, s.S);
}

// A head on all threads: forward_prepare() does chunk i, forward_scan() chunks first .. end-1 on columns v0 .. v0+V-1.
uint64_t forward_team_bytes(int64_t K, int64_t V, int64_t group) { return TeamScratch(nullptr, K, V, 0, group).bytes; }

void forward_prepare(const ForwardHead& head, char* team, int64_t group, int64_t i, char* memory) {
  const ForwardSteps steps{head};
  ForwardScratch s(Arena(memory), head.p.K, head.p.V, nullptr);
  TeamScratch(team, head.p.K, head.p.V, 0, group).lend(s.chunk, i, 0, 0);
  steps.prepare(s.chunk, steps.gate(s.chunk), head.start(i));
}

void forward_scan(const ForwardHead& head, char* team, int64_t group, int64_t first, int64_t end, int64_t v0, int64_t V,
                  char* memory) {
  const ForwardSteps steps{head};
  ForwardScratch s(Arena(memory), head.p.K, head.p.V, nullptr);
  const TeamScratch shared(team, head.p.K, head.p.V, 0, group);
  for (int64_t i = first; i < end; ++i) {
    const int64_t t = head.start(i);
    shared.lend(s.chunk, i, v0, V);
    s.chunk.L = steps.length_at(t);
    load_values(s.chunk, head.p.args.in.v, head.seq.b, head.seq.t0 + t, s.chunk.L, head.hv, v0);
    steps.scan(s.chunk, shared.S.from(0, v0), s.o, t, v0);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/team.h"

namespace kda::cpu {
namespace {

int threads_of(const ForwardProblem& p) { return wanted_threads(p.args.exec, most_chunks(p, p.HV)); }

Workspace plan(const ForwardProblem& p) {
  // Shared: where each sequence's rows of h begin.
  const uint64_t offsets = present(p.args.h) ? p.N * sizeof(int64_t) : 0;
  const int threads = threads_of(p);
  // A head whose chunks end early runs on one thread.
  const uint64_t team = may_be_long(p.N, p.HV, threads, p.varlen) && !cuts_chunks(p.args)
                            ? KDA_ISA_CALL(forward_team_bytes)(p.K, p.V, team_group(threads, p.max_chunks()))
                            : 0;
  return {offsets, KDA_ISA_CALL(forward_scratch_bytes)(p.K, p.V), team};
}

}  // namespace

const char* chunk_forward_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  if (a.exec.device != KDA_CPU) return "runs on the CPU only";
  if (has_f64(p)) return "float64 runs on `reference` only";
  if ((present(a.Aqk) || present(a.Akk)) && (keeps_within_chunks(a) || has_openings(a)))
    return "ends chunks where checkpoints may be, but Aqk and Akk have chunks of 64 tokens";
  return nullptr;
}

uint64_t chunk_forward_workspace(const ForwardProblem& p) { return plan(p).bytes(threads_of(p)); }

void chunk_forward(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(a.exec, most_chunks(p, p.HV));
  auto* first_h = static_cast<int64_t*>(a.exec.workspace);
  if (present(a.h)) first_h_rows(p, a.in, a.h_every, first_h);
  const Index offset = index_of(a.checkpoint_offset);
  const auto head_of = [&](int64_t n, int64_t hv) {
    const Sequence seq = sequence_at(p, a.in, a.states, n);
    return ForwardHead{p, seq, hv, present(a.h) ? first_h[n] : 0, begun_tokens(offset, n)};
  };
  const auto chunks_of = [&](int64_t n) {
    const ForwardHead head = head_of(n, 0);
    return head.seq.live ? head.chunks() : 0;
  };

  char* team = workspace.of_team(a.exec, threads);
  const int64_t longest = team ? long_head(p.N, p.HV, threads, chunks_of) : INT64_MAX;
  if (longest < INT64_MAX) {
    const auto prepare = KDA_ISA_CALL(forward_prepare);
    const auto scan = KDA_ISA_CALL(forward_scan);
    const int64_t group = team_group(threads_of(p), p.max_chunks());
    const Tiles tiles(p.V, threads);
    for (int64_t n = 0; n < p.N; ++n)
      for (int64_t hv = 0; chunks_of(n) > longest && hv < p.HV; ++hv) {
        const ForwardHead head = head_of(n, hv);
        run_as_team(
            chunks_of(n), group, tiles.count(), threads,
            [&](int64_t i, int thread) { prepare(head, team, group, i, workspace.of_thread(a.exec, thread)); },
            [&](int64_t first, int64_t end, int64_t tile, int thread) {
              scan(head, team, group, first, end, tiles.first(tile), tiles.size(tile),
                   workspace.of_thread(a.exec, thread));
            });
      }
  }
  const auto task_fn = KDA_ISA_CALL(forward_task);
  parallel_for(p.N * p.HV, threads, [&](int64_t task, int thread) {
    const int64_t n = task / p.HV, hv = task % p.HV;
    if (chunks_of(n) <= longest) task_fn(head_of(n, hv), workspace.of_thread(a.exec, thread));
  });
  if (p.varlen) {
    const int64_t end = int_at(a.in.cu_seqlens, p.N);
    KDA_ISA_CALL(zero_tail)(a.o, end, p.T - end);
  }
}

}  // namespace kda::cpu
#endif
