// What kernels share: elements of any dtype, sums over a warp, the inputs of a token.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/activations.h"
#include "dtype.h"
#include "problem.h"

namespace kda::cuda {

constexpr unsigned kAll = 0xffffffffu;

__device__ inline void store_element(const kda_tensor& t, int64_t at, float x) {
  switch (t.dtype) {
    case KDA_F32: static_cast<float*>(t.data)[at] = x; break;
    case KDA_BF16: static_cast<__nv_bfloat16*>(t.data)[at] = __float2bfloat16_rn(x); break;
    default: static_cast<__half*>(t.data)[at] = __float2half_rn(x); break;
  }
}

__device__ inline int64_t offset(const kda_tensor& t, int64_t i, int64_t j, int64_t k) {
  return i * t.stride[0] + j * t.stride[1] + k * t.stride[2];
}

// In every lane, always in the same order.
template <int kLanes>
__device__ float sum_over(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(kAll, x, i);
  return x;
}

// An element as it lies in memory, and its value. Loading does not branch and does not wait: loads that follow each other
// are all in flight before the first value is asked for.
__device__ inline unsigned load_raw(const void* from, int32_t dtype) {
  return dtype == KDA_F32 ? *static_cast<const unsigned*>(from) : *static_cast<const uint16_t*>(from);
}
__device__ inline const char* address_of(const kda_tensor& t, int64_t at) {  // of f32, bf16 and f16
  return static_cast<const char*>(t.data) + (at << (t.dtype == KDA_F32 ? 2 : 1));
}
__device__ inline unsigned load_raw(const kda_tensor& t, int64_t at) { return load_raw(address_of(t, at), t.dtype); }
__device__ inline float value_of(int32_t dtype, unsigned raw) {
  const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(raw)));
  return dtype == KDA_F32 ? __uint_as_float(raw) : dtype == KDA_BF16 ? __uint_as_float(raw << 16) : half;
}

__device__ inline float activated_beta(int32_t form, float x) {
  if (form == KDA_BETA_ACTIVATED) return x;
  return form == KDA_BETA_SIGMOID ? sigmoid(x) : 2.0f * sigmoid(x);
}

// With cu_seqlens: tokens from here on belong to nobody.
__device__ inline int64_t end_of_sequences(const Dims& d, const kda_inputs& in) {
  return min(max(int_at(in.cu_seqlens, d.N), int64_t{0}), d.T);
}

// Sums over the threads that share a token: a warp, or a block with `sums` [warps][3] that nobody reads any more.
struct Products {
  float qq, kk, qk;
};
__device__ inline Products warp_sums(const Products& x) {
  return {sum_over<32>(x.qq), sum_over<32>(x.kk), sum_over<32>(x.qk)};
}
template <int kThreads>
__device__ Products block_sums(const Products& x, Products* sums) {
  const Products mine = warp_sums(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();  // the sums of all warps are there
  Products all{};
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) all.qq += sums[w].qq, all.kk += sums[w].kk, all.qk += sums[w].qk;
  return all;
}

// Activated q (scale inside), k, alpha and beta of one token and value head, spread over kThreads threads: number
// `first` of them holds channels first, first + kThreads, .. in registers 0, 1, .. Zeros beyond K.
template <int kPerThread, int kThreads>
struct TokenKeys {
  float q[kPerThread], k[kPerThread], alpha[kPerThread];
  float beta, qk;

  __device__ explicit TokenKeys(int first) : first_(first) {}
  __device__ int channel(int i) const { return first_ + i * kThreads; }

  // Addresses only.
  __device__ void locate(const kda_inputs& in, int64_t b, int64_t token, int64_t hv, int64_t h) {
    from_q_ = address_of(in.q, offset(in.q, b, token, h) + first_);
    from_k_ = address_of(in.k, offset(in.k, b, token, h) + first_);
    from_g_ = address_of(in.g, offset(in.g, b, token, hv) + first_);
    from_beta_ = address_of(in.beta, offset(in.beta, b, token, hv));
    from_bias_ = static_cast<const float*>(in.dt_bias.data) + hv * in.dt_bias.stride[0] + first_;
    from_A_ = static_cast<const float*>(in.A_log.data) + hv * in.A_log.stride[0];
  }

  // Asks for everything.
  __device__ void fetch(const Dims& d, const kda_inputs& in) {
    const bool bias = present(in.dt_bias);
    const int size = in.q.dtype == KDA_F32 ? 4 : 2, size_g = in.g.dtype == KDA_F32 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool real = channel(i) < d.K;
      raw_q_[i] = real ? load_raw(from_q_ + i * kThreads * size, in.q.dtype) : 0;
      raw_k_[i] = real ? load_raw(from_k_ + i * kThreads * size, in.k.dtype) : 0;
      raw_g_[i] = real ? load_raw(from_g_ + i * kThreads * size_g, in.g.dtype) : 0;
      bias_[i] = real && bias ? from_bias_[i * kThreads] : 0.0f;
    }
    A_log_ = present(in.A_log) ? *from_A_ : 0.0f;
    raw_beta_ = load_raw(from_beta_, in.beta.dtype);
  }

  // sum: over the threads that share the token.
  template <class Sum>
  __device__ void activate(const Dims& d, const kda_inputs& in, const Sum& sum) {
    const float rate = expf(A_log_);
    Products products{};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      q[i] = value_of(in.q.dtype, raw_q_[i]), k[i] = value_of(in.k.dtype, raw_k_[i]);
      products.qq = fmaf(q[i], q[i], products.qq), products.kk = fmaf(k[i], k[i], products.kk);
      products.qk = fmaf(q[i], k[i], products.qk);
    }
    const Products all = sum(products);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float g = value_of(in.g.dtype, raw_g_[i]) + bias_[i];
      if (in.gate_form == KDA_GATE_SOFTPLUS) g = -rate * softplus(g);
      else if (in.gate_form == KDA_GATE_LOWER_BOUND) g = in.lower_bound * sigmoid(rate * g);
      alpha[i] = channel(i) < d.K ? expf(g) : 0.0f;
    }
    beta = activated_beta(in.beta_form, value_of(in.beta.dtype, raw_beta_));
    float q_factor = in.scale, k_factor = 1;
    if (in.qk_l2norm) q_factor *= 1.0f / sqrtf(all.qq + 1e-6f), k_factor = 1.0f / sqrtf(all.kk + 1e-6f);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) q[i] *= q_factor, k[i] *= k_factor;
    qk = all.qk * q_factor * k_factor;
  }

 private:
  int first_;
  const char *from_q_, *from_k_, *from_g_, *from_beta_;
  const float *from_bias_, *from_A_;
  unsigned raw_q_[kPerThread], raw_k_[kPerThread], raw_g_[kPerThread], raw_beta_;
  float bias_[kPerThread], A_log_;
};

// ---- rows of a state, value columns, over eight lanes each ----

constexpr int kRowLanes = 8;

// Lane l of a row's eight holds channels 32 j + 4 l .. 32 j + 4 l + 3 in registers 4 j .. 4 j + 3.
__device__ inline int channel(int element) {
  return element / 4 * 32 + static_cast<int>(threadIdx.x % kRowLanes) * 4 + element % 4;
}

// Of a block's rows a thread has kRows neighbours: those from here on.
template <int kRows>
__device__ int first_row() {
  return static_cast<int>(threadIdx.x / kRowLanes) * kRows;
}

// sum_e x[e] y[channel of e] over the row: in every lane, always in the same order.
template <int kElements>
__device__ float dot(const float (&x)[kElements], const float* y) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
    const float4 four = *reinterpret_cast<const float4*>(y + channel(e));
    sum = fmaf(x[e], four.x, sum), sum = fmaf(x[e + 1], four.y, sum);
    sum = fmaf(x[e + 2], four.z, sum), sum = fmaf(x[e + 3], four.w, sum);
  }
  return sum;
}

__device__ inline void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ inline void store_four(__nv_bfloat16* to, float4 x) {
  const __nv_bfloat162 lo = __floats2bfloat162_rn(x.x, x.y), hi = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(to) = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
}

__device__ inline float4 rounded(float4 x) {  // to bf16
  const auto one = [](float x) { return __bfloat162float(__float2bfloat16_rn(x)); };
  return make_float4(one(x.x), one(x.y), one(x.z), one(x.w));
}

// Where row v of a head's state is: strides along V and K depend on the layout.
struct Row {
  const kda_tensor& t;
  int64_t at, step;  // of channel 0, and from one channel to the next

  __device__ Row(const kda_tensor& t, int32_t layout, int64_t slot, int64_t hv, int64_t v)
      : t(t), step(layout == KDA_STATE_V_FIRST ? 1 : t.stride[2]) {
    at = slot * t.stride[0] + hv * t.stride[1] + v * (layout == KDA_STATE_V_FIRST ? t.stride[2] : 1);
  }
};

// kWide: V-first, K and addresses multiples of four: four channels an access.
template <class T, bool kWide, int kElements>
__device__ void load_row_of(const Row& row, int64_t K, float (&S)[kElements]) {
  const T* from = static_cast<const T*>(row.t.data) + row.at;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const int c = channel(i);
    if constexpr (kWide) {
      if (c >= K) {
        S[i] = S[i + 1] = S[i + 2] = S[i + 3] = 0;
      } else if constexpr (sizeof(T) == 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + c);
        S[i] = x.x, S[i + 1] = x.y, S[i + 2] = x.z, S[i + 3] = x.w;
      } else {
        const uint2 x = *reinterpret_cast<const uint2*>(from + c);
        const float2 lo = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.x));
        const float2 hi = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.y));
        S[i] = lo.x, S[i + 1] = lo.y, S[i + 2] = hi.x, S[i + 3] = hi.y;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) S[i + j] = c + j < K ? static_cast<float>(from[(c + j) * row.step]) : 0.0f;
    }
  }
}

template <class T, bool kWide, int kElements>
__device__ void store_row_of(const Row& row, int64_t K, const float (&S)[kElements]) {
  T* to = static_cast<T*>(row.t.data) + row.at;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const int c = channel(i);
    if constexpr (kWide) {
      if (c < K) store_four(to + c, make_float4(S[i], S[i + 1], S[i + 2], S[i + 3]));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (c + j < K) to[(c + j) * row.step] = static_cast<T>(S[i + j]);
    }
  }
}

// States are f32 or bf16.
template <bool kWide, int kElements>
__device__ void load_row(const Row& row, int64_t K, float (&S)[kElements]) {
  if (row.t.dtype == KDA_F32) load_row_of<float, kWide>(row, K, S);
  else load_row_of<__nv_bfloat16, kWide>(row, K, S);
}
template <bool kWide, int kElements>
__device__ void store_row(const Row& row, int64_t K, const float (&S)[kElements]) {
  if (row.t.dtype == KDA_F32) store_row_of<float, kWide>(row, K, S);
  else store_row_of<__nv_bfloat16, kWide>(row, K, S);
}

// Whether four-wide accesses fit all of these states (absent ones fit).
inline bool wide_rows(const Dims& d, int32_t layout, std::initializer_list<const kda_tensor*> states) {
  if (layout != KDA_STATE_V_FIRST || d.K % 4) return false;
  for (const kda_tensor* t : states) {
    if (!present(*t)) continue;
    for (int i = 0; i + 1 < t->ndim; ++i)
      if (t->stride[i] % 4) return false;
    if (reinterpret_cast<uintptr_t>(t->data) % (4 * dtype_size(t->dtype))) return false;
  }
  return true;
}

}  // namespace kda::cuda
