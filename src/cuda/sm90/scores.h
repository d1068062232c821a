// Gates, decayed operands and scores of a chunk, by the kind of gate.
//
// Decays are products of alpha along rows. With G the sum of log2 alpha from the chunk's start and last its last row:
//   kG = k 2^G, qG = q 2^G, kg = k 2^(G_last - G), ell = 2^G_last      for the scan
//   Akk[i,j] = beta_i sum_d k_i k_j 2^(G_i - G_j), j < i; Aqk[i,j] = sum_d q_i k_j 2^(G_i - G_j), j <= i
// where q and k are normalised. The scale is left to the scan.
#pragma once
#include "cuda/sm90/chunk.h"

namespace kda::cuda::sm90 {

template <class T>
__device__ void four_of(uint2 raw, float (&x)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    const float2 a = __half22float2(reinterpret_cast<const __half2&>(raw.x));
    const float2 b = __half22float2(reinterpret_cast<const __half2&>(raw.y));
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  } else {
    x[0] = __uint_as_float(raw.x << 16), x[1] = __uint_as_float(raw.x & 0xffff0000u);
    x[2] = __uint_as_float(raw.y << 16), x[3] = __uint_as_float(raw.y & 0xffff0000u);
  }
}
template <class T>
__device__ void store_four(unsigned to, const float (&x)[4]) {
  ptx::store_shared2(to, make_uint2(ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3])));
}
__device__ inline void load_four(unsigned from, float (&x)[4]) {
  const float4 four = ptx::load_shared_f32x4(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// What a preparing warpgroup has for itself in shared memory, and how its threads lie on a chunk.
struct Bench {
  unsigned memory, group;
  unsigned warp = __shfl_sync(kAll, threadIdx.x / 32 % 4, 0);  // so that the compiler knows it is one
  unsigned lane = threadIdx.x % 32;
  unsigned factors = 0;  // see factors_of()

  // So that addresses are computed again from here on, instead of waiting in registers (see opaque()).
  __device__ void forget() { memory = opaque(memory), lane = ptx::thread() % 32; }

  // Addresses; see Shared.
  __device__ unsigned rows() const { return memory + Shared::rows + group * 2 * kHalf; }
  __device__ unsigned columns() const { return memory + Shared::columns + group * kRows * kRowBytes; }
  __device__ unsigned A() const { return memory + Shared::A + group * kRows * kStrideA * 4; }
  __device__ unsigned totals() const { return memory + Shared::totals + group * 4 * kSize * 4; }

  __device__ unsigned turns() const { return memory + Shared::turns + ptx::thread() / 32 * 8 - kScanners * 4 * 8; }
  __device__ unsigned bad() const { return memory + Shared::bad + group * 16; }
  __device__ unsigned raw() const { return memory + Shared::raw + group * 8; }
  __device__ unsigned gate() const { return memory + Shared::gate + group * (kSize + 4) * 4; }

  // Of all four warps.
  __device__ void sync() const { ptx::sync_threads(1 + group, kGroup); }

  // The chunk that the warp is at: which it is of the group's, and of the block's. In shared memory: registers are scarce, and
  // local memory is far.
  __device__ unsigned turn() const { return ptx::load_shared(turns()); }
  __device__ unsigned number() const { return ptx::load_shared(turns() + 4); }
  __device__ void set_number(unsigned x) const { ptx::store_shared(turns() + 4, x); }
  __device__ void set_turn(unsigned x) const {
    __syncwarp();  // all have read the one before
    ptx::store_shared(turns(), x);
    __syncwarp();  // it is there
  }

  // The lane's four channels of the warp's rows, in a tile of rows of 128 channels.
  struct Own {
    unsigned first;  // bits 4 to 6: the piece
    __device__ unsigned operator[](int i) const { return (first ^ i << 4) + i * kRowBytes; }
    __device__ Own further() const { return {operator[](4)}; }  // by four rows
  };
  __device__ Own own(unsigned tile) const {
    return {tile + lane / 16 * kHalf + 8 * warp * kRowBytes + lane % 16 / 2 * 16 + lane % 2 * 8};
  }
  // Where column c of row i is in T and Aqk.
  __device__ static unsigned square(unsigned i, unsigned c) { return i * 64 + ((c / 8 ^ i / 2 % 4) << 4) + c % 8 * 2; }

  // What the gates of a head share: exp(A_log) and bias, in shared memory because registers are scarce.
  __device__ void store_gate(const Tokens& x, unsigned hv) const {
    const unsigned i = threadIdx.x % kGroup;
    const float bias = x.bias ? reinterpret_cast<const float*>(x.bias + hv * x.bias_stride)[i] : 0;
    ptx::store_shared_f32(gate() + i * 4, bias);
    if (i) return;
    const float rate = x.A_log ? __expf(*reinterpret_cast<const float*>(x.A_log + hv * 4)) : 1;
    ptx::store_shared_f32(gate() + kSize * 4, rate);
  }
  __device__ float gate_rate() const { return ptx::load_shared_f32(gate() + kSize * 4); }
  __device__ void gate_bias(float (&x)[4]) const { load_four(gate() + lane * 16, x); }

  // Chunks take turns: others may be one ahead of the warp that inverts.
  __device__ unsigned factors_of(unsigned turn) const {
    return memory + Shared::factors + (group * 2 + turn % 2) * Shared::kFactorBytes;
  }
  enum Factor { kQuery, kKey, kBeta, kDiagonal };  // of rows: 1 / norms, beta, q.k with both norms
  __device__ void store_factor(Factor kind, unsigned row, float x) const {
    ptx::store_shared_f32(factors + (kind * kRows + row) * 4, x);
  }
  __device__ float factor(Factor kind, unsigned row) const {
    return ptx::load_shared_f32(factors + (kind * kRows + row) * 4);
  }
  __device__ void load_factors(Factor kind, unsigned row, float (&x)[4]) const {
    load_four(factors + (kind * kRows + row) * 4, x);
  }
};

constexpr float kLog2e = 1.44269504f;

// Loops over a warp's rows have four of eight in each round: half the instructions, for which there is too little cache. The
// other four come to the place of the first. (Were the compiler to know that they are the same, there would be no loop.)
__device__ inline void next_four(float (&G)[8][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) G[i][e] = __uint_as_float(opaque(__float_as_uint(G[i + 4][e])));
}

// Of the warp's rows, from the raw ones on the bench: kG, qG and kg into the stage, and k^ = k 2^G, q^ = q 2^G and
// kc = k 2^-G over the raw rows, where G is from an anchor.
template <class T>
__device__ void store_operands(const Bench& at, unsigned to, float (&G)[8][4], const float (&to_anchor)[4],
                               const float (&from_anchor)[4]) {
  Bench::Own stage = at.own(to), rows = at.own(at.rows()), columns = at.own(at.columns());
#pragma unroll 1
  for (unsigned first = 8 * at.warp; first < 8 * at.warp + 8; first += 4) {
    float norms_q[4], norms_k[4];
    at.load_factors(Bench::kQuery, first, norms_q), at.load_factors(Bench::kKey, first, norms_k);
    uint2 next_q = ptx::load_shared2(rows[0] + Stage::q), next_k = ptx::load_shared2(rows[0] + Stage::k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float q[4], k[4], column[4];
      four_of<T>(next_q, q), four_of<T>(next_k, k);
      if (i < 3)  // before this row's stores, which loads do not pass
        next_q = ptx::load_shared2(rows[i + 1] + Stage::q), next_k = ptx::load_shared2(rows[i + 1] + Stage::k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float up = ptx::exp2(G[i][e]), down = ptx::exp2(-G[i][e]);
        k[e] *= norms_k[i], q[e] *= norms_q[i];
        column[e] = k[e] * down, k[e] *= up, q[e] *= up;
      }
      store_four<__nv_bfloat16>(rows[i] + Stage::k, k);
      store_four<__nv_bfloat16>(rows[i] + Stage::q, q);
      store_four<__nv_bfloat16>(columns[i], column);
#pragma unroll
      for (int e = 0; e < 4; ++e) k[e] *= to_anchor[e], q[e] *= to_anchor[e], column[e] *= from_anchor[e];
      store_four<__half>(stage[i] + Stage::k, k);
      store_four<__half>(stage[i] + Stage::q, q);
      store_four<__half>(stage[i] + Stage::kg, column);
    }
    next_four(G);
    stage = stage.further(), rows = rows.further(), columns = columns.further();
  }
}

// Gates with a lower bound of -5 or more: 16 tokens decay by 2^-115.4 at most, so that one anchor, the end of row 15, does
// for all scores: k^ = k 2^(G - G_15), kc = k 2^(G_15 - G), and all factors are normal numbers (of f32 and bf16).
class AnchoredScores {
 public:
  static constexpr bool kTakesDiagonal = false;  // its own products have it
  // gamma = log2 alpha = bound sigmoid(a (x + bias)) of the lane's channels.
  struct Gate {
    float bound, rate, shift[4];
    __device__ Gate(const Tokens& x, const Bench& at) : bound(x.lower_bound * kLog2e) {
      rate = -kLog2e * at.gate_rate(), at.gate_bias(shift);
#pragma unroll
      for (int e = 0; e < 4; ++e) shift[e] *= rate;
    }
    __device__ float operator()(int e, float x, bool real) const {
      return (real ? bound : 0) * ptx::reciprocal(1 + ptx::exp2(fmaf(rate, x, shift[e])));
    }
  };

  __device__ AnchoredScores(Bench& at, unsigned stage) : at_(at), stage_(stage) {}

  // Rows of the warp, in order: four(), then row i of these. Behind the last row nothing decays.
  __device__ void four() { next_four(G_); }
  __device__ void decay(int i, const Gate& gate, const float (&x)[4], bool real) {
#pragma unroll
    for (int e = 0; e < 4; ++e) G_[i + 4][e] = G_[i + 3][e] + gate(e, x[e], real);
  }
  // Of the lane's channels, all rows up to the warp's row i: no NaN?
  __device__ bool is_fine(int i) const {
    const float sum = (G_[i][0] + G_[i][1]) + (G_[i][2] + G_[i][3]);
    return sum == sum;
  }
  __device__ void share_totals() const {
    ptx::store_shared_f32x4(at_.totals() + (at_.warp * kSize + at_.lane * 4) * 4,
                            make_float4(G_[7][0], G_[7][1], G_[7][2], G_[7][3]));
  }

  // Operands of the scan and of scores, from the raw rows on the bench.
  template <class T>
  __device__ void tiles() {
    const unsigned lane = at_.lane;
    float total[4][4], to_anchor[4], from_anchor[4];  // decays from the chunk's start to the anchor, and on to its end
#pragma unroll
    for (int w = 0; w < 4; ++w) load_four(at_.totals() + (w * kSize + lane * 4) * 4, total[w]);
    const float before[3] = {at_.warp < 1 ? -1.0f : 0, at_.warp < 2 ? -1.0f : 0, at_.warp == 3 ? 1.0f : 0};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to_anchor[e] = ptx::exp2(total[0][e] + total[1][e]), from_anchor[e] = ptx::exp2(total[2][e] + total[3][e]);
      // G before the warp's rows, from the anchor.
      const float first = fmaf(before[2], total[2][e], fmaf(before[0], total[0][e], before[1] * total[1][e]));
#pragma unroll
      for (int i = 0; i < 8; ++i) G_[i][e] += first;
    }
    if (at_.warp == 0)
      ptx::store_shared_f32x4(stage_ + Stage::ell + lane * 16,
                              make_float4(to_anchor[0] * from_anchor[0], to_anchor[1] * from_anchor[1],
                                          to_anchor[2] * from_anchor[2], to_anchor[3] * from_anchor[3]));
    store_operands<T>(at_, stage_, G_, to_anchor, from_anchor);
  }

  // [k^; q^] kc^T: warps 0 and 1 have Akk, 2 and 3 have Aqk.
  __device__ void run(unsigned stage) const {
    float scores[16];
    const uint64_t rows = ptx::matrix_at(at_.rows(), 16, 1024, ptx::Swizzle::k128),
                   columns = ptx::matrix_at(at_.columns(), 16, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned piece = j / 4 * kHalf + j % 4 * 32;
      ptx::wgmma_shared<__nv_bfloat16>(scores, ptx::further(rows, piece), ptx::further(columns, piece), j > 0);
    }
    ptx::commit_products();
    const unsigned lane = at_.lane, row = at_.warp % 2 * 16 + lane / 4;  // and eight more
    const float beta[2] = {at_.factor(Bench::kBeta, row), at_.factor(Bench::kBeta, row + 8)};
    ptx::wait_for_products<0>();
    // What is not below the diagonal of Akk is not read.
    const unsigned first = lane % 4 * 2;
    if (at_.warp < 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        ptx::store_shared_f32x2(at_.A() + ((row + j % 2 * 8) * kStrideA + j / 2 * 8 + first) * 4,
                                make_float2(scores[2 * j] * beta[j % 2], scores[2 * j + 1] * beta[j % 2]));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned i = row + j % 2 * 8, c = j / 2 * 8 + first;
        ptx::store_shared(stage + Stage::Aqk + Bench::square(i, c),
                          ptx::pack<__half>(c <= i ? scores[2 * j] : 0, c < i ? scores[2 * j + 1] : 0));
      }
    }
  }

 private:
  Bench& at_;
  const unsigned stage_;
  float G_[8][4] = {};  // of the warp's rows: from its first row, then from the anchor
};

}  // namespace kda::cuda::sm90
