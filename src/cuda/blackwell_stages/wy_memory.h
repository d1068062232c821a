// What the roles of stage B3's kernel on Blackwell share (wy_dqkg.cu): a CTA's memory, its barriers, and the chunks
// that it works on.
//
// A CTA has all of a chunk of a value head, and goes from chunk to chunk. A warp copies, a thread of another one begins
// products, and eight warps, the workers, do the rest. Products are of transposes: a row is a channel or a column of V,
// of which there are 128, and a column is a token. So a worker has a channel and half of the tokens, and what a warp
// stores at once are 32 neighbours of a row in memory.
//
// Each tile has one place. It is filled again as soon as it has been read, while others of its chunk are still needed.
#pragma once
#include <cstddef>

#include "cuda/blackwell_stages/tiles.h"

namespace kda::cuda::sm100 {

constexpr unsigned kWyGroups = 2;                                           // of workers: each has half of the tokens
constexpr unsigned kWyWorkers = kWyGroups * kGroup;                         // threads
constexpr unsigned kWyCopier = kWyWorkers / 32, kWyIssuer = kWyCopier + 1;  // warps
constexpr unsigned kWyThreads = kWyWorkers + 2 * 32;
constexpr unsigned kWyTokens = kChunk / kWyGroups;  // of a worker
constexpr unsigned kWyWarps = kGroup / 32;          // of a group: each has 32 channels

// Sums over what several warps have.
struct WySums {
  float of_beta[kWyWarps][kChunk];  // kG . y over each 32 channels
  float dots[kChunk];               // x . v
  float written[kWyGroups][kSize];  // k (v_new dS^T) F over each half of the tokens
};
// Tiles are swizzled (Swizzling::k128): lines of 128 bytes.
struct alignas(1024) WyShared {
  WideTile dv_new, d_o;
  struct Values {
    WideHalf v_new, v;
  } values[2];      // of each half of the columns: together one operand of 128 rows
  WideState S, dS;  // V-first: a line of 64 channels for each column, K-first the reverse
  WideTile q, k;
  WideHalf G[kSize / 32];  // f32: 32 channels each
  // J as a sum of two numbers, a line of 64 columns for each of its rows. Then x: a line of 64 tokens for each column.
  WideHalf x[2];
  WySums sums;
  // mbarriers, a phase for each chunk. .._full: those tiles have come. inverse_there: J is, and x's columns, and all
  // that the workers have read of tensor memory may be overwritten. x_made, all_made: those products are done.
  // x_there: x is in place of J. rows_read: q, k and G have been.
  uint64_t right_side_full, states_full, rows_full, inverse_there, x_made, x_there, all_made, rows_read;
  unsigned tensors;  // the address of tensor memory
};
static_assert(sizeof(WyShared) <= 227 * 1024, "what a CTA may have");
struct WyAt {
  static constexpr unsigned right_side_full = offsetof(WyShared, right_side_full);
  static constexpr unsigned states_full = offsetof(WyShared, states_full), rows_full = offsetof(WyShared, rows_full);
  static constexpr unsigned x_made = offsetof(WyShared, x_made), all_made = offsetof(WyShared, all_made);
  static constexpr unsigned inverse_there = offsetof(WyShared, inverse_there), x_there = offsetof(WyShared, x_there);
  static constexpr unsigned rows_read = offsetof(WyShared, rows_read), tensors = offsetof(WyShared, tensors);
  static constexpr unsigned dv_new = offsetof(WyShared, dv_new), d_o = offsetof(WyShared, d_o);
  static constexpr unsigned S = offsetof(WyShared, S), dS = offsetof(WyShared, dS);
  static constexpr unsigned values_0_v_new = offsetof(WyShared, values[0].v_new);
  static constexpr unsigned values_0_v = offsetof(WyShared, values[0].v), q = offsetof(WyShared, q);
  static constexpr unsigned k = offsetof(WyShared, k), G = offsetof(WyShared, G), x_1 = offsetof(WyShared, x[1]);
  static constexpr unsigned x_0 = offsetof(WyShared, x[0]), x = offsetof(WyShared, x);
  static constexpr unsigned values = offsetof(WyShared, values), sums_dots = offsetof(WyShared, sums.dots);
  static constexpr unsigned sums_of_beta = offsetof(WyShared, sums.of_beta);
  static constexpr unsigned sums_written = offsetof(WyShared, sums.written);
};
constexpr unsigned kRightSideBytes = sizeof(WideTile), kRowsBytes = WyAt::x - WyAt::q;
constexpr unsigned kStatesWithValuesBytes = WyAt::q - WyAt::d_o;

// Columns of tensor memory, f32.
struct WyTensors {
  static constexpr unsigned x = 0;                        // x^T: 128 columns of V, 64 tokens
  static constexpr unsigned y = x + kChunk;               // S x^T: 128 channels, 64 tokens
  static constexpr unsigned of_q = y + kChunk;            // S d_o^T
  static constexpr unsigned of_k = of_q + kChunk;         // dS v_new^T
  static constexpr unsigned of_states = of_k + kChunk;    // S dS^T, whose diagonal is wanted
  static constexpr unsigned scores = of_states + kSize;   // x v_new^T: 64 tokens, 64 tokens
  static constexpr unsigned of_values = scores + kChunk;  // x v^T, whose diagonal is wanted
  static constexpr unsigned end = of_values + kChunk;
  static constexpr unsigned columns = 512;  // that are allocated
};
static_assert(WyTensors::end <= WyTensors::columns);

// The workers' named barrier, twice a chunk: x may take the place of J, which other threads have written, and the last
// chunk's sums are read; sums of all workers are there.
constexpr unsigned kWyBarrier = 1;

struct WyMaps {
  CUtensorMap q, k, G, d_o, v_new, v, dv_new, h, dh;
};
struct WyCall {
  Chunks chunks;
  Rows beta, J, dq, dk, dv, dG, dAkk, dbeta;
  int64_t h_rows;
  unsigned items, HV, group, K, V;  // items: chunks of value heads
  float scale;
};

// A chunk of a value head, the n-th one that this CTA works on.
struct WyItem {
  ChunkAt at;
  unsigned hv, n;
  int64_t state;  // its row in h and dh

  __device__ char* row_of(const Rows& x, unsigned i) const { return x.at(at.b, at.t0 + i, hv); }
  __device__ unsigned rows() const { return static_cast<unsigned>(at.rows); }
};

// Calls work(item) for the CTA's chunks, and zero(item) for tokens of no sequence. All roles see the same ones.
template <class Work, class Zero>
__device__ void for_each_item(const WyCall& c, const Work& work, const Zero& zero) {
  WyItem item{};
  for (unsigned i = blockIdx.x; i < c.items; i += gridDim.x) {
    item.hv = i % c.HV;
    if (!c.chunks.find(i / c.HV, item.at)) continue;
    if (!item.at.owned) {
      zero(item);
      continue;
    }
    item.state = c.chunks.first_row(item.at.n) + item.at.index;
    if (item.state >= c.h_rows) continue;  // cu_seqlens are not checked
    work(item);
    ++item.n;
  }
}

// Waits until an mbarrier has ended its phase of the item.
__device__ inline void wait_phase(unsigned barrier, unsigned n) { ptx::wait_barrier(barrier, n % 2); }

}  // namespace kda::cuda::sm100
