// Where things are in the shared memory of the wide kernel for sm_80 and newer (wide_kernel.h), and how they leave.
#pragma once
#include "cuda/backward/wide.h"

namespace kda::cuda {

constexpr int kPiece = 16, kPieces = 3;  // value columns of a piece; pieces in shared memory at a time

// Shared memory of a block, by address.
template <int kK>
struct WideMemory {
  static constexpr int kWarps = kK / 16, kThreads = kWarps * 32;
  static constexpr int kTokenStride = kK * 2 + 16;      // of q and k; eight rows are free of bank conflicts
  static constexpr int kPieceStride = kPiece * 2 + 16;  // of pieces of d_o, v_new, dv
  static constexpr int kScoreStride = kChunk * 2 + 16;  // of dA and B
  static constexpr int kStagedStride = kK * 4 + 16;  // of f32: tokens 2 apart and neighbouring channels differ in banks
  static constexpr int q = 0, k = q + kChunk * kTokenStride, pieces = k + kChunk * kTokenStride;
  // Offsets in a piece.
  static constexpr int d_o = 0, v_new = d_o + kChunk * kPieceStride, dv = v_new + kChunk * kPieceStride,
                       S = dv + kChunk * kPieceStride, dS = S + kPiece * kTokenStride,
                       piece_bytes = dS + kPiece * kTokenStride;
  static constexpr int end_of_pieces = pieces + kPieces * piece_bytes;
  // In place of the pieces, when the last one has been read.
  static constexpr int dA = pieces, B = dA + kChunk * kScoreStride;
  static constexpr int staged = B + kChunk * kScoreStride;  // f32 [64][K]: gates' inputs, gradients on their way out
  static constexpr int dots = pieces;                       // f32 [warp][64][2], in place of dA and B
  static_assert(staged + kChunk * kStagedStride <= end_of_pieces && dots + kWarps * kChunk * 8 <= staged);
  static constexpr int norms = end_of_pieces;         // f32 [64][2]: factors that make q and k as long as 1
  static constexpr int factors = norms + kChunk * 8;  // f32 [64][2]: y . dy of q, of k
  static constexpr int beta = factors + kChunk * 8;   // f32 [64][2]: beta, and its slope
  static constexpr int bytes = beta + kChunk * 8;
  static_assert(bytes <= 99 * 1024, "what a block of any GPU from sm_80 on may have");

  static constexpr bool kTakesSteps = false;

  unsigned shared;

  __device__ void own(unsigned (&x)[4], Key key, int pair) const {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = 16 * pair + lane / 16 * 8 + lane % 8;
    const unsigned tile = shared + (key == Key::kQuery ? q : k);
    ptx::load_transposed(x, tile + row * kTokenStride + (2 * warp + lane / 8 % 2) * 16);
  }
  __device__ float4 norms_of(int n) const {
    return ptx::load_shared_f32x4(shared + norms + (8 * n + threadIdx.x % 4 * 2) * 8);
  }
  __device__ unsigned scores(Scores matrix, unsigned row, unsigned piece) const {
    return shared + (matrix == Scores::kdA ? dA : B) + row * kScoreStride + piece * 16;
  }
};

// Writes four neighbouring elements. wide: at a multiple of four.
__device__ inline void write_four(char* to, int32_t dtype, const float4& x, bool wide) {
  if (!wide) {
    const unsigned size = size_of(dtype);
    store_element(to, dtype, x.x), store_element(to + size, dtype, x.y);
    store_element(to + 2 * size, dtype, x.z), store_element(to + 3 * size, dtype, x.w);
  } else if (dtype == KDA_F32) {
    *reinterpret_cast<float4*>(to) = x;
  } else if (dtype == KDA_BF16) {
    *reinterpret_cast<uint2*>(to) = {ptx::pack<__nv_bfloat16>(x.x, x.y), ptx::pack<__nv_bfloat16>(x.z, x.w)};
  } else {
    *reinterpret_cast<uint2*>(to) = {ptx::pack<__half>(x.x, x.y), ptx::pack<__half>(x.z, x.w)};
  }
}

}  // namespace kda::cuda
