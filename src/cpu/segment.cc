// Maps of segments and their composition on the CPU (math.md 6).
//
// The state after a sequence is S' = M S + b. Both come from the forward's recurrence over chunks, run on the state
// X = [b | M] of V + K columns, from X = [0 | I], with values only in the first V of them:
//   v_new = (I + Akk)^-1 diag(beta) ([v | 0] - kG X)         X <- Diag(ell) X + kg^T v_new
// The gradient of the state before the sequence is dS = M^T dS' + d. d is the backward's recurrence from dS' = 0,
// last chunk to first. It needs no states, because with D = d_o
//   x = (I + Akk)^-T (Aqk^T D + kg dS)                       dS <- Diag(ell) dS + qG^T D - kG^T (beta x)
// One task = one pass (X, or d) over one value head of one sequence. All threads share a head that is too long for
// one of them (team.h).
//
// Work per chunk of L tokens, beside the scores, with 2 FLOP a multiply-add: (V + K) (4 L K + L^2) for X,
// V (6 L K + 2 L^2) for d.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/segment.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/chunk-inl.h"
// clang-format on

#ifndef KDA_CPU_SEGMENT_TYPES
#define KDA_CPU_SEGMENT_TYPES
namespace kda::cpu {
// One pass over one value head of one sequence.
struct SegmentPass {
  const SegmentMapProblem& p;
  Sequence seq;
  int64_t hv;
  bool reverse;  // d, not X

  int64_t chunks() const { return (seq.length + kChunk - 1) / kChunk; }
  int64_t token(int64_t i) const { return (reverse ? chunks() - 1 - i : i) * kChunk; }  // where the i-th chunk begins
  int64_t length(int64_t i) const { return std::min(kChunk, seq.length - token(i)); }
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// The columns of X: b, if wanted, and then M, if wanted, which begins at a multiple of 16.
inline int64_t first_column_of_M(const SegmentMapProblem& p) { return present(p.args.b) ? padded(p.V) : 0; }
int64_t segment_columns(const SegmentMapProblem& p, bool reverse) {
  return reverse ? p.V : first_column_of_M(p) + (present(p.args.M) ? p.K : 0);
}

struct SegmentScratch {
  Chunk chunk;
  Matrix S;  // [K][columns] X or dS
  Matrix x;  // [C][columns]

  SegmentScratch(Arena arena, int64_t K, int64_t columns, uint64_t* bytes) : chunk(arena, K, columns) {
    S = take(arena, padded(K), columns);
    x = take(arena, kChunk, columns);
    if (bytes) *bytes = arena.bytes();
  }
};

uint64_t segment_scratch_bytes(int64_t K, int64_t columns) {
  uint64_t bytes;
  SegmentScratch(Arena(), K, columns, &bytes);
  return bytes;
}

struct SegmentSteps : SegmentPass {
  int64_t columns() const { return segment_columns(p, reverse); }
  Gate gate(Chunk& c) const {
    const kda_inputs& in = p.args.in;
    return head_gate(form_of(in), in.lower_bound, in.A_log, in.dt_bias, hv, p.K, c.dt_bias);
  }

  // Sets X = [0 | I], or dS = 0.
  void begin(Matrix S) const {
    zero(S.data, padded(p.K) * S.pitch);
    for (int64_t k = 0; !reverse && present(p.args.M) && k < p.K; ++k) S.row(k)[first_column_of_M(p) + k] = 1;
  }

  // Prepares the i-th chunk, except for what depends on the state. c.v becomes [v | 0], or D.
  void prepare(Chunk& c, const Gate& gate, int64_t i) const {
    const int64_t t0 = seq.t0 + token(i), L = length(i);
    c.V = !reverse && present(p.args.b) ? p.V : 0;
    load_chunk(c, p.args.in, gate, seq.b, t0, L, hv / p.group(), hv, 0);
    for (int64_t row = 0; row < L; ++row)
      if (reverse) load_row(p.args.d_o.dtype, at(p.args.d_o, seq.b, t0 + row, hv), p.V, c.v.row(row));
      else zero(c.v.row(row) + padded(c.V), padded(columns()) - padded(c.V));
    c.V = columns();
    scores(c);
    decayed_operands(c);
  }

  // Takes X or dS over the chunk, on c.V of its columns.
  void scan(const Chunk& c, Matrix S, Matrix x) const {
    if (!reverse) {
      corrections(c, S);
      return advance_state(c, S, S);
    }
    gemm<Acc::kSet>(c.L, c.V, p.K, c.kg.rows(), S, x);
    add_triangle<Triangle::kUpper>(c.L, c.V, c.Aqk.columns(), c.v, x);
    solve_triangle<Triangle::kUpper>(c.L, c.V, c.Akk.columns(), x);
    for (int64_t i = 0; i < c.L; ++i) scale_row(x.row(i), c.beta[i], c.V, x.row(i));
    gemm<Acc::kDecay>(p.K, c.V, c.L, c.qG.columns(), c.v, S, {c.ell, S});
    gemm<Acc::kSub>(p.K, c.V, c.L, c.kG.columns(), x, S);
  }

  void end(Arena arena, Matrix S) const {
    const kda_segment_map_args& a = p.args;
    const StateTile tile(arena, p.K, p.V);
    if (reverse) return store_state(tile, a.d, a.in.state_layout, seq.n, hv, 0, S);
    if (present(a.b)) store_state(tile, a.b, a.in.state_layout, seq.n, hv, 0, S);
    for (int64_t k = 0; present(a.M) && k < p.K; ++k)
      store_row(KDA_F32, S.row(k) + first_column_of_M(p), p.K, at(a.M, seq.n, hv, k));
  }
};

// Runs a pass on one thread.
void segment_task(const SegmentPass& pass, char* memory) {
  const SegmentSteps steps{pass};
  SegmentScratch s(Arena(memory), pass.p.K, steps.columns(), nullptr);
  const Gate gate = steps.gate(s.chunk);
  steps.begin(s.S);
  for (int64_t i = 0; i < pass.chunks(); ++i) {
    steps.prepare(s.chunk, gate, i);
    steps.scan(s.chunk, s.S, s.x);
  }
  steps.end(Arena(memory), s.S);
}

// A pass on all threads: its beginning and end, the preparation of its i-th chunk, and the scan of chunks
// first .. end-1 on some columns.
uint64_t segment_team_bytes(int64_t K, int64_t columns, int64_t group) {
  return TeamScratch(nullptr, K, columns, columns, group).bytes;
}

void segment_begin(const SegmentPass& pass, char* team, int64_t group) {
  const SegmentSteps steps{pass};
  steps.begin(TeamScratch(team, pass.p.K, steps.columns(), steps.columns(), group).S);
}
void segment_end(const SegmentPass& pass, char* team, int64_t group, char* memory) {
  const SegmentSteps steps{pass};
  steps.end(Arena(memory), TeamScratch(team, pass.p.K, steps.columns(), steps.columns(), group).S);
}

void segment_prepare(const SegmentPass& pass, char* team, int64_t group, int64_t i, char* memory) {
  const SegmentSteps steps{pass};
  SegmentScratch s(Arena(memory), pass.p.K, steps.columns(), nullptr);
  TeamScratch(team, pass.p.K, steps.columns(), steps.columns(), group).lend(s.chunk, i, 0, steps.columns());
  steps.prepare(s.chunk, steps.gate(s.chunk), i);
}

void segment_scan(const SegmentPass& pass, char* team, int64_t group, int64_t first, int64_t end, int64_t column,
                  int64_t count, char* memory) {
  const SegmentSteps steps{pass};
  SegmentScratch s(Arena(memory), pass.p.K, steps.columns(), nullptr);
  const TeamScratch shared(team, pass.p.K, steps.columns(), steps.columns(), group);
  for (int64_t i = first; i < end; ++i) {
    shared.lend(s.chunk, i, column, count);
    s.chunk.L = pass.length(i);
    steps.scan(s.chunk, shared.S.from(0, column), s.x);
  }
}

// ---- merge ----

struct MergeScratch {
  StateTile tile;
  Matrix S, next;  // [K][V]

  MergeScratch(Arena arena, int64_t K, int64_t V, uint64_t* bytes) : tile(arena, K, V) {
    S = take(arena, padded(K), V), next = take(arena, padded(K), V);
    if (bytes) *bytes = arena.bytes();
  }
};

uint64_t merge_scratch_bytes(int64_t K, int64_t V) {
  uint64_t bytes;
  MergeScratch(Arena(), K, V, &bytes);
  return bytes;
}

// Takes columns v0 .. v0+V-1 of value head hv through all segments.
void merge_task(const SegmentMergeProblem& p, int64_t hv, int64_t v0, int64_t V, char* memory) {
  const kda_segment_merge_args& a = p.args;
  const int32_t layout = a.state_layout;
  MergeScratch s(Arena(memory), p.K, V, nullptr);
  zero(s.S.data, padded(p.K) * s.S.pitch);
  if (present(a.h0)) load_state(s.tile, a.h0, layout, 0, hv, v0, s.S);
  store_state(s.tile, a.states, layout, a.reverse ? p.N : 0, hv, v0, s.S);
  for (int64_t i = 0; i < p.N; ++i) {
    const int64_t n = a.reverse ? p.N - 1 - i : i, row = a.M.stride[2];
    const auto* M = reinterpret_cast<const float*>(at(a.M, n, hv));
    load_state(s.tile, a.b, layout, n, hv, v0, s.next);
    gemm<Acc::kAdd>(p.K, V, p.K, a.reverse ? Scalars{M, 1, row} : Scalars{M, row, 1}, s.S, s.next);
    std::swap(s.S, s.next);
    store_state(s.tile, a.states, layout, a.reverse ? n : n + 1, hv, v0, s.S);
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

// Passes over every head: [0] for M and b, [1] for d.
struct Passes {
  bool wanted[2];
  explicit Passes(const SegmentMapProblem& p) : wanted{present(p.args.M) || present(p.args.b), present(p.args.d)} {}
  int64_t count() const { return wanted[0] + wanted[1]; }
  bool reverse(int64_t i) const { return wanted[0] ? i : 1; }
};

int64_t tasks_of(const SegmentMapProblem& p) { return most_chunks(p, p.HV * Passes(p).count()); }

int64_t widest(const SegmentMapProblem& p) {
  const auto columns = KDA_ISA_CALL(segment_columns);
  return std::max(columns(p, false), columns(p, true));
}

Workspace plan(const SegmentMapProblem& p) {
  const int threads = wanted_threads(p.args.exec, tasks_of(p));
  const int64_t passes = Passes(p).count(), columns = widest(p);
  if (!passes) return {0, 0};
  const uint64_t team = may_be_long(p.N, p.HV * passes, threads, p.varlen)
                            ? KDA_ISA_CALL(segment_team_bytes)(p.K, columns, team_group(threads, p.max_chunks()))
                            : 0;
  return {0, KDA_ISA_CALL(segment_scratch_bytes)(p.K, columns), team};
}

void run_pass_as_team(const SegmentPass& pass, const Workspace& workspace, int threads) {
  const kda_exec& exec = pass.p.args.exec;
  char* team = workspace.of_team(exec, threads);
  const int64_t group = team_group(wanted_threads(exec, tasks_of(pass.p)), pass.p.max_chunks());
  const Tiles tiles(KDA_ISA_CALL(segment_columns)(pass.p, pass.reverse), threads);
  const auto prepare = KDA_ISA_CALL(segment_prepare);
  const auto scan = KDA_ISA_CALL(segment_scan);
  KDA_ISA_CALL(segment_begin)(pass, team, group);
  run_as_team(
      pass.chunks(), group, tiles.count(), threads,
      [&](int64_t i, int thread) { prepare(pass, team, group, i, workspace.of_thread(exec, thread)); },
      [&](int64_t first, int64_t end, int64_t tile, int thread) {
        scan(pass, team, group, first, end, tiles.first(tile), tiles.size(tile), workspace.of_thread(exec, thread));
      });
  KDA_ISA_CALL(segment_end)(pass, team, group, workspace.of_thread(exec, 0));
}

}  // namespace

uint64_t segment_map_workspace(const SegmentMapProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p)));
}

void segment_map(const SegmentMapProblem& p) {
  const kda_exec& exec = p.args.exec;
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(exec, tasks_of(p));
  const Passes passes(p);
  const int64_t heads = p.HV * passes.count();
  const auto pass_of = [&](int64_t n, int64_t head) {
    return SegmentPass{p, sequence_at(p, p.args.in, n), head % p.HV, passes.reverse(head / p.HV)};
  };
  const auto chunks_of = [&](int64_t n) { return pass_of(n, 0).chunks(); };
  const int64_t longest = workspace.of_team(exec, threads) ? long_head(p.N, heads, threads, chunks_of) : INT64_MAX;
  for (int64_t n = 0; longest < INT64_MAX && n < p.N; ++n)
    for (int64_t head = 0; chunks_of(n) > longest && head < heads; ++head)
      run_pass_as_team(pass_of(n, head), workspace, threads);
  const auto task_fn = KDA_ISA_CALL(segment_task);
  parallel_for(p.N * heads, threads, [&](int64_t task, int thread) {
    const int64_t n = task / heads;
    if (chunks_of(n) <= longest) task_fn(pass_of(n, task % heads), workspace.of_thread(exec, thread));
  });
}

namespace {

int64_t tasks_of(const SegmentMergeProblem& p) { return p.HV * divide_up(p.V, 32); }

Workspace plan(const SegmentMergeProblem& p) { return {0, KDA_ISA_CALL(merge_scratch_bytes)(p.K, p.V)}; }

}  // namespace

uint64_t segment_merge_workspace(const SegmentMergeProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p)));
}

void segment_merge(const SegmentMergeProblem& p) {
  const kda_exec& exec = p.args.exec;
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(exec, tasks_of(p));
  const Tiles tiles(p.V, static_cast<int>(std::max<int64_t>(1, threads / p.HV)));
  const auto task_fn = KDA_ISA_CALL(merge_task);
  parallel_for(p.HV * tiles.count(), threads, [&](int64_t task, int thread) {
    const int64_t tile = task % tiles.count();
    task_fn(p, task / tiles.count(), tiles.first(tile), tiles.size(tile), workspace.of_thread(exec, thread));
  });
}

}  // namespace kda::cpu
#endif
