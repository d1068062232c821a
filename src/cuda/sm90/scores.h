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
__device__ uint2 pack_four(const float (&x)[4]) {
  return make_uint2(ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]));
}
__device__ inline void load_four(unsigned from, float (&x)[4]) {
  const float4 four = ptx::load_shared_f32x4(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// What a preparing warpgroup has for itself in shared memory, and how its threads lie on a chunk.
struct Bench : BenchLayout {
  unsigned address;
  unsigned group, warp = __shfl_sync(kAll, threadIdx.x / 32 % 4, 0);  // so that the compiler knows it is one
  unsigned lane = threadIdx.x % 32;
  unsigned turn = 0;

  __device__ Bench(unsigned address, unsigned group) : address(address), group(group) {}

  // Which of the chores around a chunk is the warp's. (0 and 3 have no time: those warps invert this chunk, or the one
  // before.)
  __device__ unsigned chore(unsigned turn) const { return (warp - turn) % 4; }
  __device__ bool stores_ell() const { return chore(turn) == 1; }
  // Of all four warps.
  __device__ void sync() const { ptx::sync_threads(kPreparerBarrier + group, kGroup); }
  // Likewise; was `x` true for all threads?
  __device__ bool sync_all(bool x) const { return ptx::all_threads(kPreparerBarrier + group, kGroup, x); }

  // The lane's four channels of the warp's row i, in a tile of rows of 128 channels (bits 4 to 6: the piece).
  __device__ unsigned own(unsigned i) const {
    const unsigned first = lane / 16 * kHalf + 8 * warp * kRowBytes + lane % 16 / 2 * 16 + lane % 2 * 8;
    return (first ^ i << 4) + i * kRowBytes;
  }
  // Where column c of row i is in T and Aqk.
  __device__ static unsigned square(unsigned i, unsigned c) { return i * 64 + ((c / 8 ^ i / 2 % 4) << 4) + c % 8 * 2; }

  // f32 numbers of the lane's four channels of a row: two where columns of scores will be, two behind.
  __device__ void store_wide(unsigned own, const float (&x)[4]) const {
    ptx::store_shared_f32x2(address + own + columns, make_float2(x[0], x[1]));
    ptx::store_shared_f32x2(address + own + wide, make_float2(x[2], x[3]));
  }
  __device__ void load_wide(unsigned own, float (&x)[4]) const {
    const float2 a = ptx::load_shared_f32x2(address + own + columns), b = ptx::load_shared_f32x2(address + own + wide);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  }

  // Chunks take turns: others may be one ahead of the warp that inverts.
  enum Factor { kNorms, kBeta = 2, kDiagonal };  // of rows: 1 / norms of q and k, beta, q.k with both norms
  __device__ unsigned factor_at(Factor kind, unsigned row) const {
    return address + factors + turn % 2 * kFactorBytes + kind * kRows * 4 + row * (kind == kNorms ? 8 : 4);
  }
  __device__ void store_norms(unsigned row, float q, float k) const {
    ptx::store_shared_f32x2(factor_at(kNorms, row), make_float2(q, k));
  }
  __device__ float2 norms(unsigned row) const { return ptx::load_shared_f32x2(factor_at(kNorms, row)); }
  __device__ void store_factor(Factor kind, unsigned row, float x) const {
    ptx::store_shared_f32(factor_at(kind, row), x);
  }
  __device__ float factor(Factor kind, unsigned row) const { return ptx::load_shared_f32(factor_at(kind, row)); }
  __device__ void load_factors(Factor kind, unsigned row, float (&x)[4]) const { load_four(factor_at(kind, row), x); }
};

constexpr float kLog2e = 1.44269504f;

// What the gates of a head share: bias of the lane's four channels, A_log.
struct HeadGate {
  float bias[4] = {}, log = 0;
  __device__ void load(const Tokens& x, unsigned hv, unsigned lane) {
    if (x.A_log) log = *reinterpret_cast<const float*>(x.A_log + hv * 4);
    if (!x.bias) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) bias[e] = reinterpret_cast<const float*>(x.bias + hv * x.bias_stride)[lane * 4 + e];
  }
  __device__ float rate() const { return __expf(moderate(log)); }
  // Whether A_log has a rest, or a product with bias, which may cancel against one with x, is so large that its
  // rounding would count: then input() takes the place of x, and 0 that of bias. In one lane or more.
  __device__ bool is_wild(const Tokens& x) const {
    float most = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) most = fmaxf(most, fabsf(bias[e]));
    const float product = most * (x.gate_form == KDA_GATE_SOFTPLUS ? 1 : rate());
    return __any_sync(kAll, !(is_moderate(log) && product < 700));
  }
  // Not inf, which rows that are not there would multiply with 0.
  __device__ float input(float x, unsigned e, bool softplus) const {
    const float z = x + bias[e];
    return ptx::least(softplus ? softplus_input(log, z) : bounded_input(log, z), 2e38f);
  }
};

// work(i, own, next, after) for the warp's rows i, where the last three are the lane's places of rows i, i + 1 and i +
// 2 in a tile (behind the last row those of the first again: what comes from there is for nothing). What work() does is
// to be spread over rows, so that neither loads nor special functions are waited for. A loop, and what is known of a
// row waits in shared memory, not in registers: an SM's cache holds 32 KB of instructions, and where the ways of all
// warps through a chunk do not fit, each of them comes too slowly.
template <class Work>
__device__ __forceinline__ void for_rows(const Bench& at, const Work& work) {
  constexpr unsigned kOdd =
      16 | kRowBytes;  // bits by which an odd row's place differs from that of the even one before
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

// Of the warp's rows, from the raw ones on the bench: kG, qG and kg into the stage, and k^ = k 2^G, q^ = q 2^G and kc =
// k 2^-G over the raw rows and G, where G is from an anchor: `first` before the warp's rows, and what the bench has of
// each. Without kQueries, no qG and q^.
template <class T, bool kQueries>
__device__ void store_operands(const Bench& at, unsigned stage, const float (&first)[4], const float (&to_anchor)[4],
                               const float (&from_anchor)[4]) {
  uint2 raw_q{}, raw_k;
  float2 norms;
  float G[4], up[4], down[4];
  const unsigned norms_at = at.factor_at(Bench::kNorms, 8 * at.warp);
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
    ptx::store_shared2(at.address + BenchLayout::columns + own, pack_four<__nv_bfloat16>(column));
#pragma unroll
    for (int e = 0; e < 4; ++e) k[e] *= to_anchor[e], q[e] *= to_anchor[e], column[e] *= from_anchor[e];
    ptx::store_shared2(stage + own + Stage::k, pack_four<__half>(k));
    if (kQueries) ptx::store_shared2(stage + own + Stage::q, pack_four<__half>(q));
    ptx::store_shared2(stage + own + Stage::kg, pack_four<__half>(column));
  });
}

// Gates with a lower bound of -5 or more: 16 tokens decay by 2^-115.4 at most, so that one anchor, the end of row 15,
// does for all scores: k^ = k 2^(G - G_15), kc = k 2^(G_15 - G), and all factors are normal numbers (of f32 and bf16).
class AnchoredScores {
 public:
  static constexpr bool kTakesDiagonal = false;  // its own products have it
  static constexpr bool kSkipsQueries = true;    // where they are not wanted
  // gamma = log2 alpha = bound sigmoid(a (x + bias)) of the lane's channels.
  struct Gate {
    const HeadGate& head;
    float bound, rate, shift[4];
    __device__ Gate(const Tokens& x, const HeadGate& head) : head(head), bound(x.lower_bound * kLog2e) {
      rate = -kLog2e * head.rate();
#pragma unroll
      for (int e = 0; e < 4; ++e) shift[e] = head.bias[e] * rate;
    }
    // sigmoid in two steps, so that special functions of two rows can take turns.
    struct Part {
      float x[4];
    };
    template <bool kWild>
    __device__ void begin(const float (&x)[4], Part& y) const {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        y.x[e] = ptx::exp2(kWild ? rate * head.input(x[e], e, false) : fmaf(rate, x[e], shift[e]));
    }
    __device__ void end(const Part& y, float (&x)[4]) const {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = ptx::reciprocal(1 + y.x[e]);
    }
  };

  __device__ AnchoredScores(const Bench& at, unsigned stage) : at_(at), stage_(stage) {}

  // The warp's rows in order; x: of the gate. Behind the last row nothing decays.
  __device__ void decay(const Gate& gate, const float (&x)[4], bool real, unsigned own) {
    const float bound = real ? gate.bound : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) G_[e] += bound * x[e];
    at_.store_wide(own, G_);
  }
  // Of the lane's channels: no NaN?
  __device__ bool is_fine() const {
    const float sum = (G_[0] + G_[1]) + (G_[2] + G_[3]);
    return sum == sum;
  }
  __device__ void share_totals() const {
    ptx::store_shared_f32x4(at_.address + Bench::totals + (at_.warp * kSize + at_.lane * 4) * 4,
                            make_float4(G_[0], G_[1], G_[2], G_[3]));
  }

  // Operands of the scan and of scores, from the raw rows on the bench.
  template <class T, bool kQueries = true>
  __device__ void tiles() const {
    const unsigned lane = at_.lane;
    float total[4][4], first[4], to_anchor[4],
        from_anchor[4];  // decays from the chunk's start to the anchor, and on to its end
#pragma unroll
    for (int w = 0; w < 4; ++w) load_four(at_.address + Bench::totals + (w * kSize + lane * 4) * 4, total[w]);
    const float before[3] = {at_.warp < 1 ? -1.0f : 0, at_.warp < 2 ? -1.0f : 0, at_.warp == 3 ? 1.0f : 0};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to_anchor[e] = ptx::exp2(total[0][e] + total[1][e]), from_anchor[e] = ptx::exp2(total[2][e] + total[3][e]);
      // G before the warp's rows, from the anchor.
      first[e] = fmaf(before[2], total[2][e], fmaf(before[0], total[0][e], before[1] * total[1][e]));
    }
    if (at_.stores_ell())
      ptx::store_shared_f32x4(stage_ + Stage::ell + lane * 16,
                              make_float4(to_anchor[0] * from_anchor[0], to_anchor[1] * from_anchor[1],
                                          to_anchor[2] * from_anchor[2], to_anchor[3] * from_anchor[3]));
    store_operands<T, kQueries>(at_, stage_, first, to_anchor, from_anchor);
  }

  // [k^; q^] kc^T: warps 0 and 1 have Akk, 2 and 3 have Aqk.
  __device__ void run() const {
    float scores[16];
    const uint64_t rows = ptx::matrix_at(at_.address, 16, 1024, ptx::Swizzle::k128),
                   columns = ptx::matrix_at(at_.address + Bench::columns, 16, 1024, ptx::Swizzle::k128);
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
        ptx::store_shared_f32x2(at_.address + Bench::A + ((row + j % 2 * 8) * kStrideA + j / 2 * 8 + first) * 4,
                                make_float2(-scores[2 * j] * beta[j % 2], -scores[2 * j + 1] * beta[j % 2]));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned i = row + j % 2 * 8, c = j / 2 * 8 + first;
        ptx::store_shared(stage_ + Stage::Aqk + Bench::square(i, c),
                          ptx::pack<__half>(c <= i ? scores[2 * j] : 0, c < i ? scores[2 * j + 1] : 0));
      }
    }
  }

 private:
  const Bench& at_;
  const unsigned stage_;
  float G_[4] = {};  // from the warp's first row on
};

}  // namespace kda::cuda::sm90
