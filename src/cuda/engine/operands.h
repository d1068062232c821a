// Gates and decayed operands of a chunk.
//
// Decays are products of alpha along rows. With G the sum of log2 alpha from the chunk's start, and `last` its last
// row:
//   kG = k 2^G, qG = q 2^G, kg = k 2^(G_last - G), ell = 2^G_last      for the consumer
//   Akk[i,j] = beta_i sum_d k_i k_j 2^(G_i - G_j), j < i; Aqk[i,j] = sum_d q_i k_j 2^(G_i - G_j), j <= i
// where q and k are normalised. The consumer multiplies by the scale.
#pragma once
#include "cuda/engine/scratch.h"
#include "cuda/gate/gate.h"

namespace kda::cuda::engine {

// Calls work(i, own, next, after) for the warp's rows i. The last three are the lane's places of rows i, i + 1 and i
// + 2 in a tile; behind the last row come those of the first ones again, and what is loaded from there is not used.
// work() spreads what it does over rows, so that it waits neither for loads nor for special functions.
//
// This stays a loop, and what is known of a row waits in shared memory, not in registers. An SM's cache holds 32 KB
// of instructions, and if the code of all warps for a chunk does not fit, instructions come too slowly.
template <class Work>
__device__ __forceinline__ void for_rows(const Scratch& at, const Work& work) {
  constexpr unsigned kOdd = 16 | kRowBytes;  // bits by which an odd row's place differs from that of the row before
  const unsigned first = at.own(0);
  unsigned own = first;
#pragma unroll 1
  for (unsigned pair = opaque(0); pair < 4; ++pair) {
    const unsigned i = 2 * pair, j = (i + 2) % 8, then = (first ^ j << 4) + j * kRowBytes;
    work(i, own, own ^ kOdd, then);
    work(i + 1, own ^ kOdd, then, then ^ kOdd);
    own = then;
  }
}

// Makes operands of the warp's rows from the raw rows in scratch memory. kG, qG and kg go to the stage. k^ = k 2^G,
// q^ = q 2^G and kc = k 2^-G take the place of the raw rows and G. In these three, G counts from an anchor: it is
// `first` before the warp's rows, plus what scratch memory has for each row. to_anchor and from_anchor are decays
// from the chunk's start to the anchor, and on to the chunk's end. Without kQueries there are no qG and q^. kOrder: of
// channels in the stage.
template <class T, Order kOrder, bool kQueries>
__device__ void store_operands(const Scratch& at, unsigned stage, const float (&first)[4], const float (&to_anchor)[4],
                               const float (&from_anchor)[4]) {
  uint2 raw_q{}, raw_k;
  float2 norms;
  float G[4], up[4], down[4];
  const unsigned norms_at = at.factor_at(Scratch::kNorms, 8 * at.warp);
  const auto load_row = [&](unsigned i, unsigned own) {
    if (kQueries) raw_q = ptx::load_shared2(at.address + own + Stage::q);
    raw_k = ptx::load_shared2(at.address + own + Stage::k);
    norms = ptx::load_shared_f32x2(norms_at + i * 8);
  };
  const auto find_decays = [&] {
#pragma unroll
    for (int e = 0; e < 4; ++e) G[e] += first[e], up[e] = ptx::exp2(G[e]), down[e] = ptx::exp2(-G[e]);
  };
  at.load_wide(at.own(0), G), find_decays(), at.load_wide(at.own(1), G);
  load_row(0, at.own(0));
  for_rows(at, [&](unsigned i, unsigned own, unsigned next, unsigned after) {
    float q[4], k[4], column[4];
    four_of<T>(raw_q, q), four_of<T>(raw_k, k);
#pragma unroll
    for (int e = 0; e < 4; ++e) q[e] *= norms.x, k[e] *= norms.y;
#pragma unroll
    for (int e = 0; e < 4; ++e) column[e] = k[e] * down[e], k[e] *= up[e], q[e] *= up[e];
    find_decays();                                        // of the next row
    load_row((i + 1) % 8, next), at.load_wide(after, G);  // before stores, which loads do not pass
    ptx::store_shared2(at.address + own + Stage::k, pack_four<__nv_bfloat16>(k));
    if (kQueries) ptx::store_shared2(at.address + own + Stage::q, pack_four<__nv_bfloat16>(q));
    ptx::store_shared2(at.address + ScratchLayout::columns + own, pack_four<__nv_bfloat16>(column));
#pragma unroll
    for (int e = 0; e < 4; ++e) k[e] *= to_anchor[e], q[e] *= to_anchor[e], column[e] *= from_anchor[e];
    at.store_channels<kOrder>(stage + own + Stage::k, pack_four<__half>(k));
    if (kQueries) at.store_channels<kOrder>(stage + own + Stage::q, pack_four<__half>(q));
    at.store_channels<kOrder>(stage + own + Stage::kg, pack_four<__half>(column));
  });
}

}  // namespace kda::cuda::engine
