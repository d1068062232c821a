// The reverse scan of cuda_backward_chunk: a warp takes 16 value columns of a head through all chunks of a sequence,
// from the last to the first, with dS, the gradient of the state, in its registers. With mirrored images
// (chunk_image.h), per chunk of 32 tokens:
//   dU = Aqk^T dO + kg dS    dv = T^T dU    dS <- Diag(ell) dS + qG^T dO - kG^T dv      T has beta inside, dO the scale
// dS, dO, dU and dv are treated as the scan (chunk_scan.h) treats S, V, R and U: registers, units of columns, stages.
// The maps are the scan's own, transposed, so the same bounds hold for f16.
//
// It leaves for the rest of backward: dv, and dS after every 64 tokens.
//
// Only one warp works on a chunk, so the time is that of its instructions: dO and dv in bf16 have code of their own.
#pragma once
#include "cuda/prefill/chunk_scan.h"

namespace kda::cuda {

// to += A^T from, over tokens; A is triangular and its image mirrored.
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

// dS. Units are chosen for two chunks at a time: S and V of the scan's bounds are below 2^7 before the two, and both
// |R| and |U| are below 2^16 in them.
template <int kK>
struct GradientState : ColumnState<kK> {
  using ColumnState<kK>::S;
  using ColumnState<kK>::x;

  // Gives dS the form that it has in memory. Numbers that would be subnormal there become 0, so that a pass or a call
  // that goes on from memory has the same bits as one that never stopped.
  __device__ void leave_units() {
    this->multiply(power_of_two(x[0]), power_of_two(x[1]));
    x[0] = x[1] = 0;
  }

  // Whether dO is in the range of the units: below 2^7, and with a number in each column of each lane that is not
  // subnormal in f16. If it is not, it is also unknown how small dS has become.
  __device__ bool suits(const float (&dO)[4][4]) const {
    bool suits = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = most_of(dO, r) * power_of_two(-x[r]);
      suits &= most >= 0x1p-14f && most < 0x1p7f;
    }
    return __all_sync(kAll, suits);
  }

  // Chooses units for dO, and for dS as it is in memory. A NaN does not count, nor does an infinity of dO.
  __device__ void choose_units(const float (&dO)[4][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = most_of(dO, r);
      if (most > kMostFloat) {
        most = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float one = fabsf(dO[e / 2][2 * r + e % 2]);
          most = one <= kMostFloat ? fmaxf(most, one) : most;
        }
      }
#pragma unroll
      for (int t = 0; t < kK / 8; ++t) most = fmaxf(most, fmaxf(fabsf(S[t][2 * r]), fabsf(S[t][2 * r + 1])));
#pragma unroll
      for (int lane = 1; lane < 4; lane *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, lane));
      // Floored: `most` is within [2^-9, 2^7) of 2^x.
      const int e = (__float_as_int(most) >> 23) - 127 + 9;
      x[r] = min(max(e & -kExponentStep, -kMostSteps * kExponentStep), kMostSteps * kExponentStep);
    }
    this->multiply(power_of_two(-x[0]), power_of_two(-x[1]));
  }

 private:
  // The largest of the lane's numbers in its column r.
  __device__ static float most_of(const float (&dO)[4][4], int r) {
    float most = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) most = fmaxf(most, fmaxf(fabsf(dO[t][2 * r]), fabsf(dO[t][2 * r + 1])));
    return most;
  }
};

// Applies one chunk: leaves dv, and dS before the chunk in `state`. Instructions that need no result of the chunk
// fill the time in which others wait for one.
template <int kK>
__device__ void apply_reversed(GradientState<kK>& state, unsigned image, const float (&dO)[4][4], float (&dv)[4][4]) {
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
  state.only_decay(image + In::ell);
  unsigned first[4], second[4];  // tokens 0 .. 15, and the others
  pack_tiles(first, dO[0], dO[1]), pack_tiles(second, dO[2], dO[3]);
  add_rows<kK>(state, first, second, own + In::qG);
  add_mirrored_triangle(dv, dU, own + In::T);
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

  // Whether there is one dv at most, and all is in bf16.
  __device__ bool plain() const {
    return aligned && d_o.dtype == KDA_BF16 && !(dv[0].data && dv[1].data) && (!dv[0].data || dv[0].dtype == KDA_BF16);
  }
};

// Chunks end - 1, end - 2, .. first of a sequence of `chunks`.
struct ReversedChunks {
  unsigned first, end, chunks;
};

// Takes dS through the chunks. kept: where dS of the sequence's first 64 tokens goes, in bf16; there are kept_rows
// such places.
template <int kK, bool kPlain>
__device__ void reverse_chunks(GradientState<kK>& state, const ReversedChunks& which, ImageStages<kK, true>& images,
                               ChunkRows<kPlain> d_o, ChunkRows<kPlain> (&dv_to)[2], int left, ColumnPlace kept,
                               int64_t kept_step, unsigned kept_rows) {
  const unsigned lane = threadIdx.x % 32;
  char* const kept_first = kept.first;
  uint4 raw[4];
  d_o.load(raw, left);
#pragma unroll 1
  for (unsigned c = which.end; c-- > which.first;) {
    float dO[4][4], dv[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) take_values(dO[t], raw[t], d_o.dtype);
    if (c > which.first) d_o.go_back(), d_o.load(raw, kRows);  // only a sequence's last chunk is short

    const unsigned image = images.take();
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float2 scale = ptx::load_shared_f32x2(image + Image<kK>::scale + (t * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) dO[t][e] *= e % 2 ? scale.y : scale.x;
    }
    if (c % 2 || c + 1 == which.end || !state.suits(dO)) {
      state.leave_units();
      if ((c % 2 || c + 1 == which.chunks) && c / 2 < kept_rows) {
        kept.first = kept_first + c / 2 * kept_step;
        state.template store_as<__nv_bfloat16>(kept);
      }
      state.choose_units(dO);
    }
    const float down[2] = {power_of_two(-state.x[0]), power_of_two(-state.x[1])};
    const float up[2] = {power_of_two(state.x[0]), power_of_two(state.x[1])};
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) dO[t][e] *= down[e / 2];
    apply_reversed(state, image, dO, dv);

#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) dv[t][e] *= up[e / 2];
#pragma unroll
    for (int i = 0; i < (kPlain ? 1 : 2); ++i)
      if (dv_to[i].first) dv_to[i].store(dv, left), dv_to[i].go_back();
    left = kRows;
  }
}

// Writes zeros for tokens of no sequence.
__device__ inline void clear_gradients(const ForwardProblem& p, const TypedView& dv, unsigned hv, unsigned v0,
                                       unsigned columns) {
  const int64_t end = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T);
  const unsigned v = v0 + threadIdx.x % columns;
  for (int64_t t = end + threadIdx.x / columns; t < p.T; t += 2)  // two threads for each column
    store_element(dv.at(0, static_cast<unsigned>(t), hv) + v * size_of(dv.dtype), dv.dtype, 0);
}

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
  if (at.n == p.N) {
    if (!pass.first && places.dv[0].data) clear_gradients(p, places.dv[0], hv, v0, columns);
    return;
  }
  const Sequence s = sequence_at(p, p.args.in, at.n);
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
  const unsigned end = pass.end_of(s);
  const ReversedChunks which{pass.first, end, (length + kRows - 1) / kRows};
  if (pass.first && pass.first >= end) return;  // its last chunk is before this pass, in one that runs later

  const unsigned v = v0 + threadIdx.x / 32 * kWarpColumns;
  const int64_t row = int64_t{pass.first_row(s)} - pass.first + end - 1;  // of its last image here
  ImageStages<kK, true> in(images + (row * pass.heads + at.hv) * int64_t{In::bytes}, pass.heads * int64_t{In::bytes},
                           end - pass.first, ptx::shared_address(dynamic));
  in.ask(), in.ask();

  GradientState<kK> state;
  const auto place = [&](const TypedView& t) { return ColumnPlace(t, places.v_first, places.wide, s.n, hv, v); };
  const auto own_place = [&](const TypedView& t, int64_t row) { return ColumnPlace(t, true, true, row, hv, v); };
  if (end < which.chunks) state.load(own_place(places.between, s.n));
  else if (places.dhT.data) state.load(place(places.dhT));
  if (end > pass.first) {
    const unsigned first_h = places.dh.data ? first_h_row(p, at.n) : 0, last = (end - 1) * kRows;
    const unsigned rows = max(places.dh_rows, first_h) - first_h;
    const int left = static_cast<int>(length - last) - static_cast<int>(threadIdx.x % 32 / 4);
    const auto scan = [&]<bool kPlain>() {
      const auto rows_of = [&](const TypedView& t) {
        return ChunkRows<kPlain>(t, t.dtype, places.aligned, b, t0 + last, hv, v);
      };
      ChunkRows<kPlain> dv[2] = {rows_of(kPlain && !places.dv[0].data ? places.dv[1] : places.dv[0]),
                                 rows_of(places.dv[1])};
      reverse_chunks<kK, kPlain>(state, which, in, rows_of(places.d_o), dv, left, own_place(places.dh, first_h),
                                 places.dh.stride0, rows);
    };
    if (places.plain()) scan.template operator()<true>();
    else scan.template operator()<false>();
  }
  state.leave_units();
  if (pass.first) state.store(own_place(places.between, s.n));
  else if (places.dh0.data) state.store(place(places.dh0));
}

}  // namespace kda::cuda
