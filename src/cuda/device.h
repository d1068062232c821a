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
__device__ inline unsigned load_raw(const kda_tensor& t, int64_t at) {
  return t.dtype == KDA_F32 ? static_cast<const unsigned*>(t.data)[at] : static_cast<const uint16_t*>(t.data)[at];
}
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

// Activated q (scale inside), k, alpha and beta of one token and value head, spread over a warp: lane l holds channels
// l, l + 32, .. in registers 0, 1, .. Zeros beyond K.
template <int kPerLane>
struct TokenKeys {
  float q[kPerLane], k[kPerLane], alpha[kPerLane];
  float beta, qk;

  // Asks for everything.
  __device__ void fetch(const Dims& d, const kda_inputs& in, int64_t b, int64_t token, int64_t hv) {
    const int64_t h = hv / d.group();
    const int64_t at_q = offset(in.q, b, token, h), at_k = offset(in.k, b, token, h), at_g = offset(in.g, b, token, hv);
    const bool bias = present(in.dt_bias);
    const float* from = static_cast<const float*>(in.dt_bias.data) + (bias ? hv * in.dt_bias.stride[0] : 0);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = static_cast<int>(threadIdx.x % 32) + 32 * i;
      const bool real = c < d.K;
      raw_q_[i] = real ? load_raw(in.q, at_q + c) : 0;
      raw_k_[i] = real ? load_raw(in.k, at_k + c) : 0;
      raw_g_[i] = real ? load_raw(in.g, at_g + c) : 0;
      bias_[i] = real && bias ? from[c] : 0.0f;
    }
    A_log_ = present(in.A_log) ? static_cast<const float*>(in.A_log.data)[hv * in.A_log.stride[0]] : 0.0f;
    raw_beta_ = load_raw(in.beta, offset(in.beta, b, token, hv));
  }

  __device__ void activate(const Dims& d, const kda_inputs& in) {
    const float rate = expf(A_log_);
    float qq = 0, kk = 0, product = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      q[i] = value_of(in.q.dtype, raw_q_[i]), k[i] = value_of(in.k.dtype, raw_k_[i]);
      qq = fmaf(q[i], q[i], qq), kk = fmaf(k[i], k[i], kk);
      float g = value_of(in.g.dtype, raw_g_[i]) + bias_[i];
      if (in.gate_form == KDA_GATE_SOFTPLUS) g = -rate * softplus(g);
      else if (in.gate_form == KDA_GATE_LOWER_BOUND) g = in.lower_bound * sigmoid(rate * g);
      alpha[i] = static_cast<int>(threadIdx.x % 32) + 32 * i < d.K ? expf(g) : 0.0f;
    }
    float q_factor = in.scale, k_factor = 1;
    if (in.qk_l2norm) {
      q_factor *= 1.0f / sqrtf(sum_over<32>(qq) + 1e-6f);
      k_factor = 1.0f / sqrtf(sum_over<32>(kk) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      q[i] *= q_factor, k[i] *= k_factor;
      product = fmaf(q[i], k[i], product);
    }
    qk = sum_over<32>(product);
    beta = activated_beta(in.beta_form, value_of(in.beta.dtype, raw_beta_));
  }

 private:
  unsigned raw_q_[kPerLane], raw_k_[kPerLane], raw_g_[kPerLane], raw_beta_;
  float bias_[kPerLane], A_log_;
};

// The same of one token over a whole block: a thread has channels threadIdx.x, + kThreads, .. in registers 0, 1, ..
template <int kPerThread, int kThreads>
struct BlockKeys {
  float q[kPerThread], k[kPerThread], alpha[kPerThread];
  float beta, qk;

  __device__ static int channel_of(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }

  // Asks for everything.
  __device__ void fetch(const Dims& d, const kda_inputs& in, int64_t b, int64_t token, int64_t hv) {
    const int64_t h = hv / d.group();
    const int64_t at_q = offset(in.q, b, token, h), at_k = offset(in.k, b, token, h), at_g = offset(in.g, b, token, hv);
    const bool bias = present(in.dt_bias);
    const float* from = static_cast<const float*>(in.dt_bias.data) + (bias ? hv * in.dt_bias.stride[0] : 0);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = channel_of(i);
      const bool real = c < d.K;
      raw_q_[i] = real ? load_raw(in.q, at_q + c) : 0;
      raw_k_[i] = real ? load_raw(in.k, at_k + c) : 0;
      raw_g_[i] = real ? load_raw(in.g, at_g + c) : 0;
      bias_[i] = real && bias ? from[c] : 0.0f;
    }
    A_log_ = present(in.A_log) ? static_cast<const float*>(in.A_log.data)[hv * in.A_log.stride[0]] : 0.0f;
    raw_beta_ = load_raw(in.beta, offset(in.beta, b, token, hv));
  }

  // `sums`: [kThreads / 32][3], that nobody reads any more.
  __device__ void activate(const Dims& d, const kda_inputs& in, float (*sums)[3]) {
    const float rate = expf(A_log_);
    float qq = 0, kk = 0, both = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      q[i] = value_of(in.q.dtype, raw_q_[i]), k[i] = value_of(in.k.dtype, raw_k_[i]);
      qq = fmaf(q[i], q[i], qq), kk = fmaf(k[i], k[i], kk), both = fmaf(q[i], k[i], both);
    }
    qq = sum_over<32>(qq), kk = sum_over<32>(kk), both = sum_over<32>(both);
    if (threadIdx.x % 32 == 0) {
      float* mine = sums[threadIdx.x / 32];
      mine[0] = qq, mine[1] = kk, mine[2] = both;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float g = value_of(in.g.dtype, raw_g_[i]) + bias_[i];
      if (in.gate_form == KDA_GATE_SOFTPLUS) g = -rate * softplus(g);
      else if (in.gate_form == KDA_GATE_LOWER_BOUND) g = in.lower_bound * sigmoid(rate * g);
      alpha[i] = channel_of(i) < d.K ? expf(g) : 0.0f;
    }
    beta = activated_beta(in.beta_form, value_of(in.beta.dtype, raw_beta_));
    __syncthreads();  // the sums of all warps are there
    qq = kk = both = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) qq += sums[w][0], kk += sums[w][1], both += sums[w][2];
    float q_factor = in.scale, k_factor = 1;
    if (in.qk_l2norm) q_factor *= 1.0f / sqrtf(qq + 1e-6f), k_factor = 1.0f / sqrtf(kk + 1e-6f);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) q[i] *= q_factor, k[i] *= k_factor;
    qk = both * q_factor * k_factor;
  }

 private:
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
      if (c >= K) continue;
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(to + c) = make_float4(S[i], S[i + 1], S[i + 2], S[i + 3]);
      } else {
        const __nv_bfloat162 lo = __floats2bfloat162_rn(S[i], S[i + 1]), hi = __floats2bfloat162_rn(S[i + 2], S[i + 3]);
        *reinterpret_cast<uint2*>(to + c) = {reinterpret_cast<const unsigned&>(lo),
                                             reinterpret_cast<const unsigned&>(hi)};
      }
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
