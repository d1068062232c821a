// Scores for gates with a lower bound of -5 or more, from one anchor a chunk.
#pragma once
#include "cuda/engine/operands.h"

namespace kda::cuda::engine {

// With gates of a lower bound of -5 or more, 16 tokens decay by 2^-115.4 at most. So one anchor, the end of row 15,
// is enough for all scores: k^ = k 2^(G - G_15), kc = k 2^(G_15 - G), and all factors are normal numbers (of f32 and
// bf16).
class BoundedScores {
 public:
  static constexpr bool kTakesDiagonal = false;  // its own products make the diagonal
  static constexpr bool kSkipsQueries = true;    // for chunks that need none
  using Gate = BoundedGate;

  __device__ BoundedScores(const Scratch& at, unsigned stage) : at_(at), stage_(stage) {}

  // Adds the decays of a row, for the warp's rows in order. x: what the gate makes. Behind the last row, where `real`
  // is false, nothing decays.
  __device__ void decay(const Gate& gate, const float (&x)[4], bool real, unsigned own) {
    const float bound = real ? gate.bound : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) G_[e] += bound * x[e];
    at_.store_wide(own, G_);
  }
  // Are the lane's channels free of NaN?
  __device__ bool is_fine() const {
    const float sum = (G_[0] + G_[1]) + (G_[2] + G_[3]);
    return sum == sum;
  }
  __device__ void share_totals() const {
    ptx::store_shared_f32x4(at_.address + Scratch::totals + (at_.warp * kSize + at_.lane * 4) * 4,
                            make_float4(G_[0], G_[1], G_[2], G_[3]));
  }

  // Makes operands of the consumer and of scores, from the raw rows in scratch memory.
  template <class T, Order kOrder, bool kQueries = true>
  __device__ void tiles() const {
    const unsigned lane = at_.lane;
    float total[4][4], first[4], to_anchor[4],
        from_anchor[4];  // decays from the chunk's start to the anchor, and on to its end
#pragma unroll
    for (int w = 0; w < 4; ++w) load_four(at_.address + Scratch::totals + (w * kSize + lane * 4) * 4, total[w]);
    const float before[3] = {at_.warp < 1 ? -1.0f : 0, at_.warp < 2 ? -1.0f : 0, at_.warp == 3 ? 1.0f : 0};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to_anchor[e] = ptx::exp2(total[0][e] + total[1][e]), from_anchor[e] = ptx::exp2(total[2][e] + total[3][e]);
      // G before the warp's rows, counted from the anchor.
      first[e] = fmaf(before[2], total[2][e], fmaf(before[0], total[0][e], before[1] * total[1][e]));
    }
    if (at_.stores_ell())
      at_.store_ell<kOrder>(stage_ + Stage::ell, {to_anchor[0] * from_anchor[0], to_anchor[1] * from_anchor[1],
                                                  to_anchor[2] * from_anchor[2], to_anchor[3] * from_anchor[3]});
    store_operands<T, kOrder, kQueries>(at_, stage_, first, to_anchor, from_anchor);
  }

  // Makes the product [k^; q^] kc^T: warps 0 and 1 have Akk, 2 and 3 have Aqk.
  __device__ void run() const {
    float scores[16];
    const uint64_t rows = ptx::matrix_at(at_.address, 16, 1024, ptx::Swizzle::k128),
                   columns = ptx::matrix_at(at_.address + Scratch::columns, 16, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned piece = j / 4 * kHalf + j % 4 * 32;
      ptx::wgmma_shared<__nv_bfloat16>(scores, ptx::further(rows, piece), ptx::further(columns, piece), j > 0);
    }
    ptx::commit_products();
    const unsigned lane = at_.lane, row = at_.warp % 2 * 16 + lane / 4;  // and eight more
    const float beta[2] = {at_.factor(Scratch::kBeta, row), at_.factor(Scratch::kBeta, row + 8)};
    ptx::wait_for_products<0>();
    // What is not below the diagonal of Akk is not read.
    const unsigned first = lane % 4 * 2;
    if (at_.warp < 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        ptx::store_shared_f32x2(at_.address + Scratch::A + ((row + j % 2 * 8) * kStrideA + j / 2 * 8 + first) * 4,
                                make_float2(-scores[2 * j] * beta[j % 2], -scores[2 * j + 1] * beta[j % 2]));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned i = row + j % 2 * 8, c = j / 2 * 8 + first;
        ptx::store_shared(stage_ + Stage::Aqk + Scratch::square(i, c),
                          ptx::pack<__half>(c <= i ? scores[2 * j] : 0, c < i ? scores[2 * j + 1] : 0));
      }
    }
  }

 private:
  const Scratch& at_;
  const unsigned stage_;
  float G_[4] = {};  // from the warp's first row on
};

}  // namespace kda::cuda::engine
