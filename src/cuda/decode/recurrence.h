// The token recurrence with a state in registers, eight lanes a value column. With the decay folded into the vectors,
// one pass over the old state gives both products:
//   read = S^T (alpha k)    out = S^T (alpha q)    u = beta (v - read)    o = out + (k . q) u    S <- alpha S + k u^T
// Decode and forward share it, and with it the order of every sum: T tokens have the same bits in both.
#pragma once
#include "cuda/call/state_rows.h"
#include "cuda/call/warp.h"

namespace kda::cuda {

constexpr int kTokenThreads = 128;  // these activate a token together: their number decides the order of its sums
template <int kRows>
constexpr int kTile = kTokenThreads / kRowLanes* kRows;  // value columns of a block

// A token in shared memory.
template <int kElements>
struct alignas(16) Prepared {
  float alpha[kElements * 8], k[kElements * 8], alpha_k[kElements * 8], alpha_q[kElements * 8];

  template <class Keys, int kPerThread>
  __device__ void store(const Keys& keys) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = keys.channel(i);
      if (c >= kElements * 8) continue;
      alpha[c] = keys.alpha[i], k[c] = keys.k[i];
      alpha_k[c] = keys.alpha[i] * keys.k[i], alpha_q[c] = keys.alpha[i] * keys.q[i];
    }
  }
};

// Applies one token to kRows columns of a thread. u and o are in all lanes of a column.
template <int kElements, int kRows>
__device__ void apply_token(const Prepared<kElements>& x, float beta, float qk, const float (&v)[kRows],
                            float (&S)[kRows][kElements], float (&u)[kRows], float (&o)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float read = sum_over<kRowLanes>(dot(S[row], x.alpha_k)), out = sum_over<kRowLanes>(dot(S[row], x.alpha_q));
    u[row] = beta * (v[row] - read);
    o[row] = fmaf(qk, u[row], out);
  }
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
    const float4 alpha = *reinterpret_cast<const float4*>(x.alpha + channel(e));
    const float4 k = *reinterpret_cast<const float4*>(x.k + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float* four = S[row] + e;
      four[0] = fmaf(u[row], k.x, four[0] * alpha.x), four[1] = fmaf(u[row], k.y, four[1] * alpha.y);
      four[2] = fmaf(u[row], k.z, four[2] * alpha.z), four[3] = fmaf(u[row], k.w, four[3] * alpha.w);
    }
  }
}

}  // namespace kda::cuda
