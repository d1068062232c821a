// The reverse scan of cuda_chunk: a warp takes 16 value columns of a head through all chunks of a sequence, the last first, dS
// in its registers: the gradient of the state. With mirrored images (chunk.h), per chunk of 32 tokens:
//   dU = Aqk^T dO + kg dS    dv = T^T dU    dS <- Diag(ell) dS + qG^T dO - kG^T dv      T has beta inside, dO the scale
// What the scan (chunk_scan.h) has for S, V, R, U it has for dS, dO, dU, dv: registers, units of columns, stages. The maps
// are the scan's own, transposed, so the same bounds hold for f16.
//
// Left behind for the rest of backward: dv, and dS after every 64 tokens.
#pragma once
#include "cuda/sm80/chunk_scan.h"

namespace kda::cuda {

// to += A^T from, of tokens; A is triangular and its image mirrored.
__device__ inline void add_mirrored_triangle(float (&to)[4][4], const float (&from)[4][4], unsigned A) {
  unsigned first[4], second[4];
  pack_tiles(first, from[0], from[1]), pack_tiles(second, from[2], from[3]);
  uint4 x[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) x[b] = ptx::load_shared4(A + b * 512);
#pragma unroll
  for (int b = 0; b < 2; ++b) ptx::mma<__half>(to[b], first, x[b].x, x[b].y);
#pragma unroll
  for (int b = 0; b < 4; ++b) ptx::mma<__half>(to[b], second, x[b].z, x[b].w);
}

// One chunk: dv is left, and the state is dS before it.
template <int kK>
__device__ void apply_reversed(ColumnState<kK>& state, unsigned image, const float (&dO)[4][4], float (&dv)[4][4]) {
  using In = Image<kK>;
  constexpr int kPairs = kK / 32;
  const unsigned own = image + threadIdx.x % 32 * 16;
  float dU[4][4] = {};
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    unsigned first[4], second[4];
    state.operand(first, 2 * pair), state.operand(second, 2 * pair + 1);
    uint4 k[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) k[b] = ptx::load_shared4(own + In::kg + (b * kPairs + pair) * 512);
#pragma unroll
    for (int b = 0; b < 4; ++b) ptx::mma<__half>(dU[b], first, k[b].x, k[b].y);
#pragma unroll
    for (int b = 0; b < 4; ++b) ptx::mma<__half>(dU[b], second, k[b].z, k[b].w);
  }
  add_mirrored_triangle(dU, dO, own + In::Aqk);
  add_mirrored_triangle(dv, dU, own + In::T);
  unsigned first[4], second[4];  // tokens 0 .. 15, and the others
  state.decay(image + In::ell);
  pack_tiles(first, dO[0], dO[1]), pack_tiles(second, dO[2], dO[3]);
  add_rows<kK>(state, first, second, own + In::qG);
  pack_tiles(first, dv[0], dv[1]), pack_tiles(second, dv[2], dv[3]);
  add_rows<kK>(state, first, second, own + In::kG);
}

// Where the reverse scan finds and leaves gradients.
struct ReversePlaces {
  TypedView d_o;
  TypedView dv[2];        // of the caller, and in bf16 for the rest of backward; either may be absent
  TypedView dhT, dh0;     // of the caller, each may be absent
  TypedView dh, between;  // V-first: dS after every 64 tokens, bf16; dS between passes, f32
  unsigned dh_rows;
  bool v_first, wide;  // dhT, dh0: layout; four channels an access
  bool aligned;        // rows of d_o and dv lie at multiples of 8 bytes
};

template <int kK>
__global__ void __launch_bounds__(kMostWarps * 32)
    reverse_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ ReversePlaces places,
                   const __grid_constant__ Pass pass, const Blocks blocks, const char* images) {
  extern __shared__ float4 dynamic[];
  using In = Image<kK>;
  const Place at(blocks);
  const unsigned hv = pass.first_head + at.hv, columns = blockDim.x / 32 * kWarpColumns, v0 = at.tile * columns;
  wait_for_stream();
  if (at.n >= blocks.rows) return;  // the grid's last rows
  if (at.n == p.N) {                // tokens of no sequence
    const TypedView& dv = places.dv[0];
    if (pass.first || !dv.data) return;
    const int64_t end = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T);
    const unsigned v = v0 + threadIdx.x % columns;
    for (int64_t t = end + threadIdx.x / columns; t < p.T; t += 2)  // two threads a column
      store_element(dv.at(0, static_cast<unsigned>(t), hv) + v * size_of(dv.dtype), dv.dtype, 0);
    return;
  }
  const Sequence s = sequence_at(p, p.args.in, at.n);
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
  const unsigned end = pass.end_of(s), chunks = (length + kRows - 1) / kRows;
  if (pass.first && pass.first >= end) return;  // its last chunk is in a later pass, which was before this one

  const unsigned lane = threadIdx.x % 32, token = lane / 4;  // of each eight
  const unsigned v = v0 + threadIdx.x / 32 * kWarpColumns, own_v = v + lane % 4 * 4;
  const unsigned shared = ptx::shared_address(dynamic);
  const int64_t first_row = int64_t{pass.first_row(s)} - pass.first;  // of the sequence's first chunk, were it here
  // The i-th from the last.
  const auto ask = [&](unsigned i) {
    if (i < end - pass.first)
      ask_image<kK>(shared + i % kStages * In::bytes,
                    images + ((first_row + end - 1 - i) * pass.heads + at.hv) * int64_t{In::bytes});
    ptx::commit_copies();
  };
  uint4 raw[4];
  const auto fetch = [&](unsigned i) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const unsigned own = (end - 1 - i) * kRows + t * 8 + token;
      raw[t] = {};
      if (i < end - pass.first && own < length)
        raw[t] = load_values(places.d_o.at(b, t0 + own, hv) + own_v * size_of(places.d_o.dtype),
                             places.d_o.dtype == KDA_F32, places.aligned);
    }
  };
  ask(0), ask(1);
  fetch(0);

  ColumnState<kK> state;
  const auto place = [&](const TypedView& t) { return ColumnPlace(t, places.v_first, places.wide, s.n, hv, v); };
  const auto own_place = [&](const TypedView& t, int64_t row) { return ColumnPlace(t, true, true, row, hv, v); };
  if (end < chunks) state.load(own_place(places.between, s.n));
  else if (places.dhT.data) state.load(place(places.dhT));
  const unsigned first_h = places.dh.data ? first_h_row(p, at.n) : 0;

#pragma unroll 1
  for (unsigned i = 0; i < end - pass.first; ++i) {
    const unsigned c = end - 1 - i;
    if ((c % 2 || c + 1 == chunks) && first_h + c / 2 < places.dh_rows)
      state.store(own_place(places.dh, first_h + c / 2));
    float dO[4][4], dv[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) take_values(dO[t], raw[t], places.d_o.dtype);
    fetch(i + 1);

    ptx::wait_for_copies<1>();
    __syncthreads();  // the image is in shared memory, and nobody reads the one before
    ask(i + 2);
    const unsigned image = shared + i % kStages * In::bytes;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float2 scale = ptx::load_shared_f32x2(image + In::scale + (t * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) dO[t][e] *= e % 2 ? scale.y : scale.x;
    }
    state.choose_exponents(dO);
    const float down[2] = {power_of_two(-state.x[0]), power_of_two(-state.x[1])};
    const float up[2] = {power_of_two(state.x[0]), power_of_two(state.x[1])};
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) dO[t][e] *= down[e / 2];
    apply_reversed(state, image, dO, dv);

#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const unsigned own = c * kRows + t * 8 + token;
#pragma unroll
      for (int e = 0; e < 4; ++e) dv[t][e] *= up[e / 2];
#pragma unroll
      for (const TypedView& to : places.dv)
        if (to.data)
          store_values(to.at(b, t0 + own, hv) + own_v * size_of(to.dtype), dv[t], to.dtype, own < length,
                       places.aligned);
    }
  }
  if (pass.first) state.store(own_place(places.between, s.n));
  else if (places.dh0.data) state.store(place(places.dh0));
}

}  // namespace kda::cuda
