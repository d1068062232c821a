// dbeta where beta is about 0. Elsewhere it is dv . v_new / beta^2 (wide_chunk.h), which is 0 / 0 here. So what
// beta multiplies is computed again, token by token, for the rows that need it:
//   e_i = v_i - S^T kG_i - sum over j < i of (k_i D(j,i) k_j) v_new_j                      v_new_i = beta_i e_i
//   x_i = sum over j >= i of (s q_j D(i,j) k_i) dO_j + dS^T kg_i - sum over j > i of (k_j D(i,j) k_i) dv_j
//   dv_i = beta_i x_i
//   dbeta_i = x_i . e_i
// D(j,i) is the decay of the tokens behind j through i. This is slow, but seldom needed: a block goes through its
// chunk for each such token.
#pragma once
#include "cuda/backward/wide_kernel.h"

namespace kda::cuda {

constexpr float kLeastBeta = 0x1p-30f;
constexpr int kBetaThreads = 128;  // one for each channel, and for each value column

// A row of a chunk, as a thread sees it: channel c of keys, column c of values.
class BetaRow {
  using Keys = TokenKeys<1, kBetaThreads>;

 public:
  __device__ BetaRow(const Tokens& x, const WidePlaces& places, const ChunkPlace& at, unsigned h, unsigned hv, int V,
                     Products* sums, float* keys)
      : x_(x), places_(places), at_(at), h_(h), hv_(hv), V_(V), sums_(sums), keys_(keys) {}

  __device__ float dbeta(unsigned i, unsigned h_row) {
    const Keys own = token(i);
    const float e = value(x_.v, x_.qkv_dtype, i) - before(own, i, h_row), x = behind(own, i, h_row);
    return sum({x * e, 0, 0}).qq;
  }

 private:
  __device__ static unsigned c() { return threadIdx.x; }
  __device__ Products sum(const Products& mine) const {
    __syncthreads();  // all reads of the sums before, and of the keys, are done
    const Products all[1] = {mine};
    return block_sums<kBetaThreads>(all, sums_);
  }
  __device__ Keys token(unsigned j) const {
    Keys keys;
    keys.locate(x_, at_.b, at_.t0 + j, hv_, h_);
    keys.fetch<false>(x_);
    keys.activate(x_, [this](const Products(&mine)[1], bool) { return sum(mine[0]); });
    return keys;
  }
  __device__ float value(const View& t, int32_t dtype, unsigned j) const {
    if (c() >= static_cast<unsigned>(V_)) return 0;
    return value_of(dtype, load_raw<false>(t.at(at_.b, at_.t0 + j, hv_) + c() * size_of(dtype), dtype));
  }
  // The column's product of a state with a key.
  __device__ float of_state(const TypedView& states, unsigned h_row, float key) const {
    __syncthreads();  // all reads of the keys before are done
    keys_[c()] = key;
    __syncthreads();  // the keys are there
    float sum = 0;
    if (c() < static_cast<unsigned>(V_)) {
      const char* row = states.at(h_row, hv_, c());
      for (int k = 0; k < x_.K; ++k)
        sum =
            fmaf(value_of(states.dtype, load_raw<false>(row + k * size_of(states.dtype), states.dtype)), keys_[k], sum);
    }
    return sum;
  }
  // What the tokens before row i and the state before the chunk hold at its key.
  __device__ float before(const Keys& own, unsigned i, unsigned h_row) const {
    float k = own.k[0] * own.alpha[0], all = 0;
    for (unsigned j = i; j-- > 0;) {
      const Keys other = token(j);
      all = fmaf(sum({k * other.k[0], 0, 0}).qq, value(places_.v_new, places_.v_new.dtype, j), all);
      k *= other.alpha[0];
    }
    return all + of_state(places_.h, h_row, k);
  }
  // The gradient of what row i wrote, from its own output on.
  __device__ float behind(const Keys& own, unsigned i, unsigned h_row) const {
    float k = own.k[0], all = own.qk * value(places_.d_o, places_.d_o.dtype, i);
    for (unsigned j = i + 1; j < at_.rows; ++j) {
      const Keys other = token(j);
      k *= other.alpha[0];
      const Products of = sum({k * other.q[0], k * other.k[0], 0});
      all = fmaf(of.qq, value(places_.d_o, places_.d_o.dtype, j), all);
      all = fmaf(-of.kk, value(places_.dv, KDA_BF16, j), all);
    }
    return all + of_state(places_.dh, h_row, k);
  }

  const Tokens& x_;
  const WidePlaces& places_;
  const ChunkPlace at_;
  const unsigned h_, hv_;
  const int V_;
  Products* sums_;
  float* keys_;
};

constexpr unsigned kBetaHeads = 16;  // that a block looks at

// Which of the heads from `first` on have a small beta in the chunk. A warp looks at every fourth head. All loads come
// first: one after the other they took 8 us.
__device__ inline void find_small_betas(const Tokens& x, const ChunkPlace& at, unsigned first, unsigned HV,
                                        bool (&found)[kBetaHeads]) {
  constexpr unsigned kWarps = kBetaThreads / 32, kEach = kBetaHeads / kWarps;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, last = at.rows - 1;
  unsigned raw[kEach][2];
#pragma unroll
  for (unsigned j = 0; j < kEach; ++j)
#pragma unroll
    for (unsigned half = 0; half < 2; ++half)
      raw[j][half] = load_raw<false>(
          x.beta.at(at.b, at.t0 + min(lane + 32 * half, last), min(first + warp + kWarps * j, HV - 1)), x.beta_dtype);
#pragma unroll
  for (unsigned j = 0; j < kEach; ++j) {
    const auto is_small = [&](unsigned half) {
      return fabsf(activated_beta(x.beta_form, value_of(x.beta_dtype, raw[j][half]))) < kLeastBeta;
    };
    const bool any = __any_sync(kAll, is_small(0) || is_small(1));
    if (lane == 0) found[warp + kWarps * j] = any && first + warp + kWarps * j < HV;
  }
}

// A block looks at a chunk of several value heads, a warp at one at a time. (With a block for each head, those that
// find nothing took 14 us at 64 heads and 8,192 tokens, on an H200.)
__global__ void __launch_bounds__(kBetaThreads, 5)
    small_beta_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                      const __grid_constant__ WidePlaces places, const __grid_constant__ WideRows rows,
                      const Divisor by_blocks, const Divisor by_group) {
  __shared__ Products sums[kBetaThreads / 32];
  __shared__ float keys[kBetaThreads];
  __shared__ bool found[kBetaHeads];
  wait_for_stream();
  const unsigned row = by_blocks.quotient(blockIdx.x), HV = static_cast<unsigned>(p.HV);
  const unsigned first = (blockIdx.x - row * by_blocks.divisor) * kBetaHeads;
  unsigned h_row = 0;
  const ChunkPlace at = wide_chunk_at(p, rows, row, h_row);
  const auto beta_input = [&](unsigned i, unsigned hv) {
    return value_of(x.beta_dtype, load_raw<false>(x.beta.at(at.b, at.t0 + i, hv), x.beta_dtype));
  };
  const auto is_small = [&](unsigned i, unsigned hv) {
    return fabsf(activated_beta(x.beta_form, beta_input(i, hv))) < kLeastBeta;
  };
  if (at.rows == 0) return;
  find_small_betas(x, at, first, HV, found);
  __syncthreads();  // what all warps have found is there
  for (unsigned head = 0; head < kBetaHeads; ++head) {
    if (!found[head]) continue;
    const unsigned hv = first + head;
    BetaRow of(x, places, at, by_group.quotient(hv), hv, static_cast<int>(p.V), sums, keys);
    for (unsigned i = 0; i < at.rows; ++i) {
      if (!is_small(i, hv)) continue;
      const float dbeta = of.dbeta(i, h_row) * beta_slope(x.beta_form, beta_input(i, hv));
      if (threadIdx.x == 0) store_element(places.dbeta.at(at.b, at.t0 + i, hv), places.dbeta.dtype, dbeta);
    }
  }
}

}  // namespace kda::cuda
