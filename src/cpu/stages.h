// How the stages are cut into tasks: by chunk and head, or, where the state is carried, by sequence, head and tile of
// V.
#pragma once
#include <algorithm>

#include "contract/stages.h"
#include "contract/tables_stages.h"
#include "cpu/team.h"

namespace kda::cpu {

// The stages, as the registry sees them.
void stage(const StageProblem<kda_stage_cumsum_args>& p);
void stage(const StageProblem<kda_stage_chunk_intra_args>& p);
void stage(const StageProblem<kda_stage_recompute_w_u_args>& p);
void stage(const StageProblem<kda_stage_delta_h_args>& p);
void stage(const StageProblem<kda_stage_fwd_o_args>& p);
void stage(const StageProblem<kda_stage_bwd_local_args>& p);
void stage(const StageProblem<kda_stage_bwd_delta_h_args>& p);
void stage(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
void stage(const StageProblem<kda_stage_bwd_intra_args>& p);
void stage(const StageProblem<kda_stage_cumsum_backward_args>& p);
template <StageArgs Args>
uint64_t stage_workspace(const StageProblem<Args>& p);

// ---- inside ----

// One chunk of one value head.
struct ChunkAt {
  int64_t b, hv;
  int64_t t0, L;  // tokens t0 .. t0+L-1 of row b
  int64_t row;    // its row of h and dh
};

// Columns v0 .. v0+V-1 of one sequence and value head.
struct ScanAt {
  Sequence seq;
  int64_t hv, v0, V;
  int64_t first_row;  // of h and dh

  int64_t chunks() const { return h_rows(seq.length, 1); }
  ChunkAt chunk(int64_t i) const {
    const int64_t t = i * kChunk;
    return {seq.b, hv, seq.t0 + t, std::min(kChunk, seq.length - t), first_row + i};
  }
};

uint64_t stage_scratch_bytes(int64_t K, int64_t V);

// Shared: where each sequence's rows of h begin. One scratch fits every stage.
template <class P>
Workspace stage_plan(const P& p) {
  return {p.N * sizeof(int64_t), stage_scratch_bytes(p.K, p.V)};
}

// The most tasks of a stage, whichever way it is cut.
template <class P>
int64_t stage_tasks(const P& p) {
  return most_chunks(p, p.HV) * divide_up(p.V, 32);
}

template <StageArgs Args>
uint64_t stage_workspace(const StageProblem<Args>& p) {
  return stage_plan(p).bytes(wanted_threads(p.args.exec, stage_tasks(p)));
}

template <class P>
int64_t* first_rows(const P& p) {
  auto* rows = static_cast<int64_t*>(p.args.exec.workspace);
  first_h_rows(p, p.in, 1, rows);
  return rows;
}

// Calls zero(tensor, first, count) for the rows of outputs that belong to no sequence.
template <class P, class F>
void zero_tails(const P& p, const F& zero) {
  const int64_t end = p.varlen ? int_at(p.in.cu_seqlens, p.N) : p.T;
  for_each_tail(p, [&](const kda_tensor& t) { zero(t, end, p.T - end); });
}

// Calls fn(p, chunk, memory) for every chunk and value head.
template <class P, class F>
void for_each_chunk(const P& p, const F& fn) {
  const Workspace workspace = stage_plan(p);
  const int threads = workspace.threads(p.args.exec, stage_tasks(p));
  const int64_t* rows = first_rows(p);
  const int64_t last = p.N - 1, chunks = p.N ? rows[last] + h_rows(sequence_at(p, p.in, last).length, 1) : 0;
  parallel_for(chunks * p.HV, threads, [&](int64_t task, int thread) {
    const int64_t row = task / p.HV, n = std::upper_bound(rows, rows + p.N, row) - rows - 1;
    const ScanAt scan{sequence_at(p, p.in, n), task % p.HV, 0, p.V, rows[n]};
    fn(p, scan.chunk(row - rows[n]), workspace.of_thread(p.args.exec, thread));
  });
}

// Calls fn(p, scan, memory) for every sequence and value head. If there are fewer of these than threads, V is cut
// into tiles, with a call for each.
template <class P, class F>
void for_each_scan(const P& p, const F& fn) {
  const Workspace workspace = stage_plan(p);
  const int threads = workspace.threads(p.args.exec, stage_tasks(p));
  const int64_t* rows = first_rows(p);
  const int64_t heads = std::max<int64_t>(1, p.N * p.HV);
  const int64_t wanted_tiles = std::clamp<int64_t>(threads / heads, 1, (p.V + 31) / 32);
  const int64_t tile = (p.V / wanted_tiles + 15) / 16 * 16, tiles = (p.V + tile - 1) / tile;
  parallel_for(p.N * p.HV * tiles, threads, [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * tile, hv = task / tiles % p.HV, n = task / tiles / p.HV;
    fn(p, ScanAt{sequence_at(p, p.in, n), hv, v0, std::min(tile, p.V - v0), rows[n]},
       workspace.of_thread(p.args.exec, thread));
  });
}

}  // namespace kda::cpu
