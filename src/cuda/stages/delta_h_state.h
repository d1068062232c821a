// The state of a block of delta_h (delta_h_kernel.h): in registers, in f32, and its copy in shared memory.
#pragma once
#include "cuda/stages/delta_h_memory.h"
#include "cuda/stages/products.h"
#include "cuda/stages/stages.h"

namespace kda::cuda::stages {

template <class E, int kSize, bool kOutputs>
__device__ auto known(const ScanCall& call) -> std::conditional_t<kSize != 0, ScanCall, const ScanCall&> {
  if constexpr (kSize != 0) {
    ScanCall p = call;
    p.dims.K = p.dims.V = kSize, p.chunks.varlen = false;
    set_known<E>(p.kg, p.w, p.u, p.v_new, p.h);
    if constexpr (kOutputs) set_known<E>(p.qG, p.Aqk), p.v_new = p.h = {}, p.o.dtype = KDA_F32;
    return p;
  } else {
    return call;
  }
}

template <class E, int kTiles, int kColumns, int kSize, bool kOutputs>
class ScanState {
 protected:
  using M = Math<E>;
  using Seen = std::conditional_t<kSize != 0, ScanCall, const ScanCall&>;
  static constexpr bool kTwice = splits<E, kTiles> && !kOutputs;
  static constexpr int kBlock = kOutputs ? kThreads : block_of<E, kTiles>;
  static constexpr int kRowWarps = kOutputs ? row_warps(kColumns) : kWarps;
  static constexpr bool kFull = kOutputs || kSize == 128;                 // no warp has rows beyond K
  static constexpr int kOwn = kColumns / 16 * kRowWarps / (kBlock / 32);  // 16 columns of S each, from own0_ on
  static constexpr int kMost = kOutputs ? kSize : kTiles * 128, kPad = 4;

  __device__ __forceinline__ ScanState(const ScanCall& call, const Memory& memory, const Place& at,
                                       unsigned char* shared)
      : p_(known<E, kSize, kOutputs>(call)),
        m_(kOutputs ? Memory::with_outputs(kSize, kColumns)
           : kSize  ? Memory::of<E, kTiles>(kTwo, kSize, kColumns, false)
                    : memory),
        shared_(shared),
        s_(p_.chunks.sequence(at.n)),
        hv_(at.hv),
        v0_(static_cast<int>(at.tile) * kColumns),
        warp_(static_cast<int>(threadIdx.x) / 32),
        g_(static_cast<int>(threadIdx.x % 32) / 4),
        own0_(warp_ / kRowWarps * kOwn * 16),
        count_(static_cast<int>((s_.length + kRows - 1) / kRows)),
        chunk_{.n = s_.n, .b = s_.b, .t0 = s_.t0, .rows = 0} {}

  // Known sizes are constants, by which loops are unrolled.
  __device__ int K() const { return kSize ? kSize : static_cast<int>(p_.dims.K); }
  __device__ int V() const { return kSize ? kSize : static_cast<int>(p_.dims.V); }
  __device__ int columns() const { return kSize ? kColumns : min(V() - v0_, kColumns); }  // of the block

  // Sequences without a state: v_new of their rows is 0.
  __device__ __forceinline__ void zero_values() {
    for (int64_t t = 0; t < s_.length; t += kRows) {
      chunk_.t0 = s_.t0 + t, chunk_.rows = static_cast<int>(min(s_.length - t, int64_t{kRows}));
      zero_rows(p_.v_new, chunk_, hv_, V());
    }
  }

  // ---- in registers ----

  __device__ int row_of(int tile) const { return (warp_ % kRowWarps + kRowWarps * tile) * 16; }  // of S
  // Calls f(k, v, number) for all of S that this thread has.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < kOwn; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          f(row_of(tile) + g_ + i % 4 / 2 * 8, own0_ + n * 16 + i / 4 * 8 + 2 * t + i % 2, S_[tile][n].x[i / 4][i % 4]);
  }
  __device__ __forceinline__ void load_ell(int i) {
    chunk_at(i);
    const char* G = kOutputs ? p_.ends.at(chunk_.b, i, hv_) : p_.G.at(chunk_.b, chunk_.t0 + chunk_.rows - 1, hv_);
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) {
      const int k = row_of(e / 2) + g_ + e % 2 * 8;
      ell_[e / 2][e % 2] = kFull || k < K() ? *reinterpret_cast<const float*>(G + k * 4) : 0.0f;
    }
  }
  __device__ __forceinline__ void decay(int tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float factor = ptx::exp2(ell_[tile][e]);
#pragma unroll
      for (int n = 0; n < kOwn; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          S_[tile][n].x[half][2 * e] *= factor, S_[tile][n].x[half][2 * e + 1] *= factor;
    }
  }

  // ---- the copy in shared memory ----

  // What lies beyond K or V is 0.
  __device__ __forceinline__ void put_S() {
    const int limit = (K() + 15) / 16 * 16;
    if constexpr (kTwice) {
      for_each([&](int k, int v, float y) {
        if (kFull || k < limit) M::store_split(shared_, m_.S_rest, m_.S_stride, v, k, y);
      });
    } else if (by_lines<E> || p_.v_first) {
      E* to = reinterpret_cast<E*>(shared_);
      for_each([&](int k, int v, float y) {
        if (kFull || k < limit) to[v * m_.S_stride + k] = static_cast<E>(y);
      });
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kOwn; ++n)
          for_each_pair(S_[tile][n], [&](int k, int v, float x, float y) {
            if (row_of(tile) < limit) M::store_two(shared_, m_.S_stride, row_of(tile) + k, own0_ + n * 16 + v, x, y);
          });
    }
  }
  // Operands.
  __device__ __forceinline__ auto load_S(int k, int v) const {
    if constexpr (kTwice) return M::load_b_transposed_split(shared_, m_.S_rest, m_.S_stride, v, k);
    else if (by_lines<E> || p_.v_first) return M::load_b_transposed(shared_, m_.S_stride, v, k);
    else return M::load_b(shared_, m_.S_stride, k, v);
  }
  __device__ __forceinline__ auto load_v(const void* v_new, int rest, int t, int v) const {
    if constexpr (kTwice) return M::load_b_split(v_new, rest, m_.u_stride, t, v);
    else return M::load_b(v_new, m_.u_stride, t, v);
  }

  // ---- in memory ----

  __device__ char* state_at(const Rows& x, int64_t row) const {
    return p_.v_first ? x.at(row, v0_, hv_) : x.at(row, 0, hv_) + v0_ * x.size();
  }
  // The state in f32, as it lies in memory, on its way to or from registers: where w, kg and u will be or were.
  __device__ float* whole() const { return reinterpret_cast<float*>(shared_ + m_.w); }
  __device__ float& whole_at(int k, int v) const {
    return whole()[p_.v_first ? v * (kMost + kPad) + k : k * (kColumns + kPad) + v];
  }
  __device__ __forceinline__ void take_state() {
    if (p_.h0.data) {
      const Rows& h0 = p_.h0;
      const char* from = state_at(h0, s_.n);
      if (p_.v_first)
        stage<float, kColumns, kMost, kBlock>({from, h0.token, columns(), K(), h0.dtype, h0.wide}, whole(),
                                              kMost + kPad);
      else
        stage<float, kMost, kColumns, kBlock>({from, h0.token, K(), columns(), h0.dtype, h0.wide}, whole(),
                                              kColumns + kPad);
      arrived();
      for_each([&](int k, int v, float& y) { y = whole_at(k, v); });
      __syncthreads();  // h0 is read
    }
    put_S();
  }
  __device__ __forceinline__ void keep_state() {
    if (!p_.hT.data) return;
    __syncthreads();  // the last w, kg and v_new are read
    for_each([&](int k, int v, float y) { whole_at(k, v) = y; });
    __syncthreads();  // S is there
    char* to = state_at(p_.hT, s_.n);
    const auto line = [&](int l) { return to + l * p_.hT.token; };
    if (p_.v_first) unstage<float, kColumns, kMost, kBlock>(whole(), kMost + kPad, p_.hT, columns(), K(), line);
    else unstage<float, kMost, kColumns, kBlock>(whole(), kColumns + kPad, p_.hT, K(), columns(), line);
  }

  __device__ __forceinline__ void chunk_at(int i) {
    chunk_.t0 = s_.t0 + int64_t{i} * kRows;
    chunk_.rows = kSize ? kRows : static_cast<int>(min(s_.length - int64_t{i} * kRows, int64_t{kRows}));
  }

  const Seen p_;  // a reference, or where sizes are known a copy
  const Memory m_;
  unsigned char* const shared_;
  const Sequence s_;
  const int64_t hv_;
  const int v0_;  // the first column of the block
  const int warp_, g_, own0_, count_;
  ChunkAt chunk_;
  Sum S_[kTiles][kOwn];
  float ell_[kTiles][2];  // of rows g_ and g_ + 8
};

}  // namespace kda::cuda::stages
