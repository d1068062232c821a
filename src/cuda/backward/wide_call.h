// What a call passes to the wide kernels: the places of its tensors, which chunks there are, and which heads a kernel
// takes.
#pragma once
#include "cuda/backward/sums.h"
#include "cuda/backward/wide.h"
#include "cuda/call/states.h"
#include "cuda/gate/gate.h"
#include "cuda/prefill/chunk_prepare.h"

namespace kda::cuda {

// Where inputs come from and outputs go to. Views without data are absent. q, k and the first five have rows of bf16
// at multiples of 16 bytes.
struct WidePlaces {
  TypedView d_o, v_new, dv, h, dh;  // h, dh: [rows][HV][V][K]
  TypedView dq, dk, dg, dbeta;
  Unknown unknown;
  bool g_wide;     // rows of g at multiples of 16 bytes
  bool fours;      // rows of dq, dk, dg at multiples of four elements
  bool gate;       // dg, dA_log or d_dt_bias is wanted
  uint32_t each;   // K + K / 16
  float* sums;     // [chunk][HV][each] of d_dt_bias, then dA_log of each warp
  float* scratch;  // [block][2][64 / 2][threads][..]: dq and dk of earlier value heads
};
// Which chunk a row is. Every sequence has the same number of rows or, packed, all have T / 64 + N together.
struct WideRows {
  unsigned rows, heads;  // heads of q and k
  unsigned h_rows = 0;   // of h and dh
  Divisor by_heads, by_chunks;
  WideRows(const Dims& d)
      : rows(static_cast<unsigned>(d.varlen ? d.T / kChunk + d.N : d.N * d.max_chunks())),
        heads(static_cast<unsigned>(d.H)),
        by_heads(d.H),
        by_chunks(std::max<int64_t>(d.max_chunks(), 1)) {}
};

// Returns the chunk of a row. Every sequence has max_chunks() rows or, packed, its rows begin at t0 / 64 + n.
__device__ inline ChunkPlace wide_chunk_at(const ForwardProblem& p, const WideRows& rows, unsigned row,
                                           unsigned& h_row) {
  const auto first_row = [&](const Sequence& s) {
    return static_cast<unsigned>(s.t0) / kChunk + static_cast<unsigned>(s.n);
  };
  const unsigned n = p.varlen ? packed_sequence(p, row, first_row) : rows.by_chunks.quotient(row);
  const Sequence s = sequence_at(p, p.args.in, n);
  const unsigned first = p.varlen ? first_row(s) : n * rows.by_chunks.divisor;
  const unsigned chunk = row - first, t = chunk * kChunk, length = static_cast<unsigned>(s.length);
  if (row < first || t >= length) return {};
  h_row = row;
  if (p.varlen) {  // only there may be rows without tokens
    unsigned before = 0;
    for (unsigned m = threadIdx.x % 32; m < n; m += 32)
      before += (static_cast<unsigned>(packed_at(p.args.in.cu_seqlens, p.T, m).length) + kChunk - 1) / kChunk;
    h_row = __reduce_add_sync(kAll, before) + chunk;
  }
  h_row = min(h_row, rows.h_rows - 1);  // garbage in cu_seqlens must not lead outside of h
  return {static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0) + t, min(length - t, unsigned{kChunk})};
}

}  // namespace kda::cuda
