// Exact scores for any gate. With G the sum of log2 alpha, row i one of the eight rows of warp w, and column j one of
// those of warp o,
//   G_i - G_j = (G_i - R_w) + (R_w - B_w) + (B_w - R_o) + (R_o - G_j)
// B_w is G before the rows of w. R_w, their anchor, is G after the fourth of them. Both are rounded to whole numbers.
// The two outer terms are in operands, as in BoundedScores. The two inner ones make powers of two, which are exact in
// bf16 and multiply operands in registers. Where w = o there are only the outer terms.
//
// For this, a token's decay is limited to 2^-25. Entries with a smaller step in between become too large, but by less
// than the f32 rounding of other entries. kG, qG and kg, in fp16, are 0 as they should be, and ell has decays as
// given. So exponents are bounded:
//   G_i - R_w: -100.5 .. 75.5    R_o - G_j: -75.5 .. 100.5    R_w - B_w: -101 .. 1
//   B_w - R_o: -101 .. 1 and what the rows in between add; it counts as 0 below -126, where the entry is below 2^-25
// -inf is a decay to 0, and nothing is divided. What is above the diagonal, where numbers are large, is not used.
#pragma once
#include "cuda/engine/operands.h"

namespace kda::cuda::engine {

// The scores of a chunk, with an anchor every eight rows.
class AnyGateScores {
 public:
  static constexpr bool kTakesDiagonal = true;  // with fast decays it is most of an output, and bf16 is too coarse
  static constexpr bool kSkipsQueries = false;

  using Gate = AnyGate;

  __device__ AnyGateScores(const Scratch& at, unsigned stage) : at_(at), stage_(stage) {}

  // Adds the decays of a row, for the warp's rows in order. x: what the gate makes. Behind the last row, where `real`
  // is false, nothing decays.
  __device__ void decay(const Gate& gate, const float (&x)[4], bool real, unsigned own) {
    const float rate = real ? gate.rate : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      total_[e] = fmaf(-rate, x[e], total_[e]);
      G_[e] = fmaf(-rate, ptx::least(x[e], gate.most), G_[e]);
    }
    at_.store_wide(own, G_);
  }
  // Are the lane's channels free of NaN?
  __device__ bool is_fine() const {
    const float sum = (G_[0] + G_[1]) + (G_[2] + G_[3]);
    return sum == sum;
  }
  __device__ void share_totals() const {
    const unsigned place = (at_.warp * kSize + at_.lane * 4) * 4;
    ptx::store_shared_f32x4(at_.address + Scratch::totals + place, make_float4(G_[0], G_[1], G_[2], G_[3]));
    ptx::store_shared_f32x4(at_.address + Scratch::given + place,
                            make_float4(total_[0], total_[1], total_[2], total_[3]));
  }

  // Makes operands of the consumer and of scores, from the raw rows in scratch memory.
  template <class T, Order kOrder>
  __device__ void tiles() {
    const unsigned lane = at_.lane;
    float total[4][4], G[4] = {}, anchor[4], first[4], decay[4];
#pragma unroll
    for (unsigned w = 0; w < 4; ++w) {
      load_four(at_.address + Scratch::totals + (w * kSize + lane * 4) * 4, total[w]);
      if (w < 3 && w < at_.warp) add(G, total[w]);
    }
    // Here G is that before the warp's rows; `first` is the same, counted from the anchor.
    at_.load_wide(at_.own(3), anchor);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      anchor[e] = rintf(G[e] + anchor[e]);
      decay[e] = ptx::exp2(anchor[e] - rintf(G[e]));
      first[e] = G[e] - anchor[e];
    }
    to_start_[0] = ptx::pack<__nv_bfloat16>(decay[0], decay[1]);
    to_start_[1] = ptx::pack<__nv_bfloat16>(decay[2], decay[3]);
    // Then G before the rows of each later warp, and at the end.
#pragma unroll
    for (unsigned w = 1; w < 4; ++w) {
      if (w <= at_.warp) continue;
      add(G, total[w - 1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) decay[e] = ptx::exp2(rintf(G[e]) - anchor[e]);
      ptx::store_shared2(decays(w, at_.warp) + lane * 8, pack_four<__nv_bfloat16>(decay));
    }
    add(G, total[3]);
    float to_anchor[4], from_anchor[4];  // decays from the chunk's start to the anchor, and on to its end
#pragma unroll
    for (int e = 0; e < 4; ++e) to_anchor[e] = ptx::exp2(anchor[e]), from_anchor[e] = ptx::exp2(G[e] - anchor[e]);
    store_operands<T, kOrder, true>(at_, stage_, first, to_anchor, from_anchor);
    if (at_.stores_ell()) store_ell<kOrder>();
  }

  // Multiplies [q; k] of the warp's rows by k of the same rows, and of the rows of each warp before.
  __device__ void run() const {
    // Aqk is zero where no product comes.
    ptx::store_shared4(stage_ + Stage::Aqk + at_.warp * 512 + at_.lane * 16, make_uint4(0, 0, 0, 0));
    const unsigned mine = at_.address + Scratch::totals + at_.warp * kSize * 4;  // all reads of totals are done
    ptx::store_shared2(mine + at_.lane * 8, make_uint2(to_start_[0], to_start_[1]));
    const unsigned r = at_.lane % 8, m = at_.lane / 8;
    const unsigned from =
        at_.address + (m % 2 ? Stage::k : Stage::q) + (8 * at_.warp + r) * kRowBytes + ((m / 2 ^ r) << 4);
    unsigned rows[8][4], k[4][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) ptx::load_matrices(rows[j], (from ^ j % 4 << 5) + j / 4 * kHalf);
    load_keys(k, at_.warp);
    const unsigned i = at_.lane / 4, c = at_.lane % 4 * 2;
    const float beta = at_.factor(Scratch::kBeta, 8 * at_.warp + i);
    const float diagonal = at_.factor(Scratch::kDiagonal, 8 * at_.warp + i);
    __syncwarp();  // zeros and decays are there
    float d[4];
    multiply(d, rows, k);
    d[0] = c < i ? d[0] : c == i ? diagonal : 0, d[1] = c + 1 < i ? d[1] : c + 1 == i ? diagonal : 0;
    store(d, at_.warp, beta);
    if (at_.warp == 0) return;
    unsigned decay[4][4];
    load_decays(decay, mine);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scale(rows[j][e], decay[j / 2][j % 2 * 2 + e / 2]);
#pragma unroll 1
    for (unsigned other = 0; other < at_.warp; ++other) {
      load_keys(k, other), load_decays(decay, decays(at_.warp, other));
#pragma unroll
      for (int e = 0; e < 16; ++e) scale(k[e / 4][e % 4], decay[e / 4][e % 4]);
      multiply(d, rows, k);
      store(d, other, beta);
    }
  }

 private:
  // Where powers of two from the anchor of warp o to the rows of warp w are.
  __device__ unsigned decays(unsigned w, unsigned o) const {
    return at_.address + Scratch::decays + (w * (w - 1) / 2 + o) * kSize * 2;
  }

  __device__ static void add(float (&x)[4], const float (&y)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += y[e];
  }
  template <Order kOrder>
  __device__ void store_ell() const {
    float ell[4] = {}, total[4];
#pragma unroll
    for (unsigned w = 0; w < 4; ++w)
      load_four(at_.address + Scratch::given + (w * kSize + at_.lane * 4) * 4, total), add(ell, total);
#pragma unroll
    for (int e = 0; e < 4; ++e) ell[e] = ptx::exp2(ell[e]);
    at_.store_ell<kOrder>(stage_ + Stage::ell, ell);
  }

  // Load right operands: keys of a warp's rows; powers of two of the same channels.
  __device__ void load_keys(unsigned (&k)[4][4], unsigned warp) const {
    const unsigned r = at_.lane % 8, m = at_.lane / 8;
    const unsigned from = at_.address + Scratch::columns + (8 * warp + r) * kRowBytes + ((m ^ r) << 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::load_matrices(k[j], (from ^ j % 2 << 6) + j / 2 * kHalf);
  }
  __device__ void load_decays(unsigned (&x)[4][4], unsigned from) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::load_matrices(x[j], from + at_.lane / 8 * 16 + j * 64);
  }
  __device__ static void scale(unsigned& x, unsigned by) {
    const __nv_bfloat162 product =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(by));
    x = reinterpret_cast<const unsigned&>(product);
  }

  // d = [q; k] k^T of eight rows each, as two sums that do not wait for each other.
  __device__ static void multiply(float (&d)[4], const unsigned (&rows)[8][4], const unsigned (&k)[4][4]) {
    float other[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] = other[e] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::mma<__nv_bfloat16>(d, rows[2 * j], k[j][0], k[j][1]);
      ptx::mma<__nv_bfloat16>(other, rows[2 * j + 1], k[j][2], k[j][3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] += other[e];
  }
  // Stores entries of Aqk and Akk in columns of warp `other`. What is not below the diagonal of Akk is not read.
  __device__ void store(const float (&d)[4], unsigned other, float beta) const {
    const unsigned i = 8 * at_.warp + at_.lane / 4, j = at_.lane % 4;
    ptx::store_shared(stage_ + Stage::Aqk + Scratch::square(i, 8 * other) + j * 4, ptx::pack<__half>(d[0], d[1]));
    ptx::store_shared_f32x2(at_.address + Scratch::A + (i * kStrideA + 8 * other + 2 * j) * 4,
                            make_float2(-d[2] * beta, -d[3] * beta));
  }

  const Scratch& at_;
  const unsigned stage_;
  float G_[4] = {}, total_[4] = {};  // from the warp's first row on
  unsigned to_start_[2];             // powers of two from the start of the warp's rows to their anchor
};

}  // namespace kda::cuda::engine
