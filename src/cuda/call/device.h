// What kernels share: elements of any dtype, sums over a warp, the inputs of a token.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/call/launch.h"
#include "cuda/gate/activations.h"
#include "dtype.h"
#include "problem.h"

namespace kda::cuda {

constexpr unsigned kAll = 0xffffffffu;

// Bytes of an element.
__host__ __device__ inline unsigned size_of(int32_t dtype) { return dtype == KDA_F32 ? 4 : 2; }

// A tensor [a,b,c,..] as kernels address it: strides in bytes, so that an address is a multiply-add for each index.
// (With 64-bit strides in elements, addresses were half of all instructions.)
struct View {
  char* data = nullptr;  // nullptr: absent
  int64_t stride0 = 0;
  uint32_t stride1 = 0, stride2 = 0;

  __device__ char* at(unsigned i, unsigned j, unsigned k) const {
    return data + i * stride0 + static_cast<uint64_t>(j) * stride1 + static_cast<uint64_t>(k) * stride2;
  }
};
// A View with its dtype, where the dtype is not known otherwise.
struct TypedView : View {
  int32_t dtype = KDA_F32;
};

// lead: 1 if the first dimension is that of layers. A missing third dimension counts as 1.
inline TypedView view_of(const kda_tensor& t, int lead = 0) {
  if (!present(t)) return {};
  const auto bytes = [&](int i) { return lead + i < t.ndim ? t.stride[lead + i] * dtype_size(t.dtype) : 0; };
  TypedView view;
  view.data = static_cast<char*>(t.data), view.stride0 = bytes(0);
  view.stride1 = static_cast<uint32_t>(bytes(1)), view.stride2 = static_cast<uint32_t>(bytes(2));
  view.dtype = t.dtype;
  return view;
}

// Why tensors have no view, or nullptr.
inline const char* view_why_not(std::initializer_list<const kda_tensor*> tensors, int lead = 0) {
  for (const kda_tensor* t : tensors)
    for (int i = lead + 1; i < t->ndim && i < lead + 3; ++i)
      if (t->shape[i] > 1 && (t->stride[i] < 0 || t->stride[i] * dtype_size(t->dtype) >= int64_t{1} << 32))
        return "takes no strides below 0 or from 4 GiB on, but for the first dimension";
  return nullptr;
}

__device__ inline void store_element(char* to, int32_t dtype, float x) {
  switch (dtype) {
    case KDA_F32: *reinterpret_cast<float*>(to) = x; break;
    case KDA_BF16: *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(x); break;
    default: *reinterpret_cast<__half*>(to) = __float2half_rn(x); break;
  }
}

// The sum over kLanes lanes, in every lane and always in the same order.
template <int kLanes>
__device__ float sum_over(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(kAll, x, i);
  return x;
}

// Sums kCount numbers over the L lanes that differ in bits kStep and below (32 or eight of them): lane l gets the sum
// of number l kCount / L. Each exchange halves the numbers; the order is that of sum_over.
template <int kCount, int kStep = 16>
__device__ float spread_sums(const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    return sum_over<2 * kStep>(x[0]);
  } else {
    const bool upper = threadIdx.x & kStep;
    float half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float keep = upper ? x[i + kCount / 2] : x[i], give = upper ? x[i] : x[i + kCount / 2];
      half[i] = keep + __shfl_xor_sync(kAll, give, kStep);
    }
    return spread_sums<kCount / 2, kStep / 2>(half);
  }
}

// Pins the place where x is loaded or computed; it is used only later. Otherwise the compiler turns what is loaded
// under a condition into a value at once, which waits for the load. It also loads or computes where the value is
// first used, again and again under conditions.
__device__ inline void pin(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ inline void pin(int32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void pin(float& x) {
  unsigned bits = __float_as_uint(x);
  pin(bits);
  x = __uint_as_float(bits);
}
__device__ inline void pin(const char*& x) {
  asm volatile("" : "+l"(x));
  __builtin_assume(__isGlobal(x));  // as the compiler knew before
}

// An element as it lies in memory, and its value. Loading does not branch and does not wait: consecutive loads are
// all in flight before the first value is needed. kNarrow: the element is known to have 16 bits. (If two loads go to
// one register, each under a condition, the second waits for the first.)
template <bool kNarrow>
__device__ unsigned load_raw(const char* from, int32_t dtype) {
  if (kNarrow) return *reinterpret_cast<const uint16_t*>(from);
  return dtype == KDA_F32 ? *reinterpret_cast<const unsigned*>(from) : *reinterpret_cast<const uint16_t*>(from);
}
__device__ inline float value_of(int32_t dtype, unsigned raw) {
  float x = __uint_as_float(raw << (dtype == KDA_F32 ? 0 : 16));
  if (dtype == KDA_F16) x = __half2float(__ushort_as_half(static_cast<uint16_t>(raw)));
  return x;
}

// The inputs of a call's tokens, and where their outputs go. What is read first comes first.
struct Tokens {
  View q, k, v, g, beta;
  const char *A_log, *bias;  // f32, optional
  int64_t bias_stride;       // bytes from one head to the next
  int32_t K;
  uint32_t qkv_dtype : 4, g_dtype : 4, beta_dtype : 4, o_dtype : 4;
  uint32_t gate_form : 4, beta_form : 4, qk_l2norm : 1;
  uint32_t narrow : 1;  // q, k, v, g and beta all have 16 bits
  View o;
  float lower_bound, scale;

  // With a convolution in front, q, k and v come from it, as numbers in f32.
  Tokens(const Dims& d, const kda_inputs& in, const kda_tensor& o)
      : q(view_of(in.q)),
        k(view_of(in.k)),
        v(view_of(in.v)),
        g(view_of(in.g)),
        beta(view_of(in.beta)),
        A_log(static_cast<const char*>(in.A_log.data)),
        bias(static_cast<const char*>(in.dt_bias.data)),
        bias_stride(in.dt_bias.stride[0] * 4),
        K(static_cast<int32_t>(d.K)),
        qkv_dtype(in.q.data ? in.q.dtype : KDA_F32),
        g_dtype(in.g.dtype),
        beta_dtype(in.beta.dtype),
        o_dtype(o.dtype),
        gate_form(in.gate_form),
        beta_form(in.beta_form),
        qk_l2norm(in.qk_l2norm != 0),
        narrow((!in.q.data || in.q.dtype != KDA_F32) && in.g.dtype != KDA_F32 && in.beta.dtype != KDA_F32),
        o(view_of(o)),
        lower_bound(in.lower_bound),
        scale(in.scale) {}
  static const char* why_not(const kda_inputs& in, const kda_tensor& o) {
    return view_why_not({&in.q, &in.k, &in.v, &in.g, &in.beta, &o});
  }

  // Is the call on the fast path, as far as its tokens are concerned? A kernel that knows so gives the same bits with
  // half of the instructions. front: q, k and v come from a convolution.
  bool on_fast_path(bool front = false) const {
    return (qkv_dtype == (front ? KDA_F32 : KDA_BF16)) & (g_dtype == KDA_BF16) & (beta_dtype == KDA_BF16) &
               (o_dtype == KDA_BF16) &&
           beta_form == KDA_BETA_SIGMOID && qk_l2norm;
  }
  // A copy for such a call, with constants that the compiler then knows.
  __device__ Tokens fast_copy(int32_t K, bool front = false) const {
    Tokens x = *this;
    x.K = K, x.qkv_dtype = front ? KDA_F32 : KDA_BF16, x.g_dtype = x.beta_dtype = x.o_dtype = KDA_BF16;
    x.beta_form = KDA_BETA_SIGMOID, x.qk_l2norm = x.narrow = 1;
    return x;
  }
};

__device__ inline float activated_beta(int32_t form, float x) {
  if (form == KDA_BETA_ACTIVATED) return x;
  return form == KDA_BETA_SIGMOID ? sigmoid(x) : 2.0f * sigmoid(x);
}

// With cu_seqlens: tokens from here on belong to no sequence.
template <class Lengths>
__device__ int64_t end_of_sequences(const Lengths& cu_seqlens, int64_t N, int64_t T) {
  return within(int_at(cu_seqlens, N), 0, T);
}

// Sums over the threads that share a token: a warp, or a block. A block needs `sums`, one for every 32 channels, and
// all earlier reads of them must be done. In a block with fewer threads than others, x are a thread's channels one by
// one, so that the order of the sum is that of blocks with more threads.
struct Products {
  float qq, kk, qk;
};
__device__ inline Products warp_sums(const Products& x) {
  return {sum_over<32>(x.qq), sum_over<32>(x.kk), sum_over<32>(x.qk)};
}
// Rows whose sum of squares overflows f32 are multiplied by this first: then the sum is from 2^-12 to 2^124.
constexpr float kShrink = 0x1p-70f;
__device__ inline bool is_huge(float squares) { return !(squares < INFINITY); }
// In a shrunk row, eps is too small to count.
__device__ inline float inverse_norm(float squares, bool shrunk) { return rsqrtf(shrunk ? squares : squares + 1e-6f); }

// Sums for TokenKeys::activate.
struct OverWarp {
  __device__ Products operator()(const Products (&x)[1], bool /*again*/) const { return warp_sums(x[0]); }
};
template <int kThreads, int kParts = 1>
__device__ Products block_sums(const Products (&x)[kParts], Products* sums) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const Products mine = warp_sums(x[i]);
    if (threadIdx.x % 32 == 0) sums[(i * kThreads + threadIdx.x) / 32] = mine;
  }
  __syncthreads();  // the sums of all warps are in shared memory
  Products all{};
#pragma unroll
  for (int w = 0; w < kParts * kThreads / 32; ++w) all.qq += sums[w].qq, all.kk += sums[w].kk, all.qk += sums[w].qk;
  return all;
}

// Activated q (scale inside), k, alpha and beta of one token and value head, spread over kThreads threads: thread
// number `first` holds channels first, first + kThreads, .. in registers 0, 1, .. Channels beyond K are zeros.
template <int kPerThread, int kThreads>
struct TokenKeys {
  float q[kPerThread], k[kPerThread], alpha[kPerThread];
  float beta, qk;

  __device__ explicit TokenKeys(int first = static_cast<int>(threadIdx.x) % kThreads) : first_(first) {}
  __device__ int channel(int i) const { return first_ + i * kThreads; }

  // Computes addresses only.
  __device__ void locate(const Tokens& x, unsigned b, unsigned token, unsigned hv, unsigned h) {
    const unsigned own = first_ * size_of(x.qkv_dtype);
    from_q_ = x.q.at(b, token, h) + own, from_k_ = x.k.at(b, token, h) + own;
    from_g_ = x.g.at(b, token, hv) + first_ * size_of(x.g_dtype), from_beta_ = x.beta.at(b, token, hv);
    from_bias_ = x.bias + hv * x.bias_stride + first_ * 4, from_A_ = x.A_log + hv * 4;
  }

  // Makes sure that the addresses are computed by here.
  __device__ void pin_addresses() {
    pin(from_q_), pin(from_k_), pin(from_g_), pin(from_beta_), pin(from_bias_), pin(from_A_);
  }

  // Gives hints for everything: thread i for the channels from 32 i on.
  __device__ void expect(const Tokens& x) const {
    if (first_ * 32 < x.K) {
      const int next = first_ * 31, of_qk = next * size_of(x.qkv_dtype);
      prefetch(from_q_ + of_qk), prefetch(from_k_ + of_qk), prefetch(from_g_ + next * size_of(x.g_dtype));
      if (x.bias) prefetch(from_bias_ + next * 4);
    }
    if (first_ == 0) {
      prefetch(from_beta_);
      if (x.A_log) prefetch(from_A_);
    }
  }

  // Issues the loads of everything. kNarrow: Tokens::narrow.
  template <bool kNarrow>
  __device__ void fetch(const Tokens& x) {
    fetch_keys<kNarrow>(x), fetch_gate<kNarrow>(x);
  }
  // kIf: loads only if `there`, each load with its own predicate. After a branch, one scoreboard serves all loads in
  // flight, so a wait for an index that was loaded before waits for all of them.
  template <bool kNarrow, bool kIf = false>
  __device__ void fetch_keys(const Tokens& x, bool there = true) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool real = channel(i) < x.K && there;
      raw_q_[i] = real ? element<kNarrow>(from_q_, i, x.qkv_dtype) : 0;
      if (kIf) pin(raw_q_[i]);
      raw_k_[i] = real ? element<kNarrow>(from_k_, i, x.qkv_dtype) : 0;
      if (kIf) pin(raw_k_[i]);
    }
  }
  template <bool kNarrow, bool kIf = false>
  __device__ void fetch_gate(const Tokens& x, bool there = true) {
    fetch_gate_input<kNarrow, kIf>(x, there), fetch_parameters(x, there);
  }
  template <bool kNarrow, bool kIf = false>
  __device__ void fetch_gate_input(const Tokens& x, bool there = true) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      raw_g_[i] = channel(i) < x.K && there ? element<kNarrow>(from_g_, i, x.g_dtype) : 0;
      if (kIf) pin(raw_g_[i]);
    }
    raw_beta_ = there ? element<kNarrow>(from_beta_, 0, x.beta_dtype) : 0;
    if (kIf) pin(raw_beta_);
  }
  // A_log and dt_bias, which all tokens of a head share.
  __device__ void fetch_parameters(const Tokens& x, bool there = true) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool real = channel(i) < x.K && x.bias && there;
      bias_[i] = real ? *reinterpret_cast<const float*>(from_bias_ + i * kThreads * 4) : 0.0f;
    }
    A_log_ = x.A_log ? *reinterpret_cast<const float*>(from_A_) : 0.0f;
  }
  __device__ void take_parameters(const TokenKeys& other) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) bias_[i] = other.bias_[i];
    A_log_ = other.A_log_;
  }
  // Takes q and k of register i from the convolution in front.
  __device__ void take(int i, float q, float k) { raw_q_[i] = __float_as_uint(q), raw_k_[i] = __float_as_uint(k); }

  // sum(parts, again) sums over the threads that share the token. again: it is a second sum for the same token, and
  // all threads have the first one.
  template <int kParts = 1, class Sum>
  __device__ void activate(const Tokens& x, const Sum& sum) {
    constexpr int kChannels = kPerThread / kParts;
    Products mine[kParts];
#pragma unroll
    for (int i = 0; i < kPerThread; i += kChannels) mine[i / kChannels] = products(x, i, i + kChannels);
    finish(x, sum(mine, false), [&](float by_q, float by_k) {
#pragma unroll
      for (int i = 0; i < kPerThread; i += kChannels) mine[i / kChannels] = shrunk(by_q, by_k, i, i + kChannels);
      return sum(mine, true);
    });
  }
  // The two halves of activate(): products() makes this thread's share of the products, of all its channels or of
  // some, and finish() does the rest.
  __device__ Products products(const Tokens& x, int from = 0, int to = kPerThread) {
#pragma unroll
    for (int i = from; i < to; ++i) {
      pin(raw_q_[i]), pin(raw_k_[i]);  // not used before the loads of the state are issued
      q[i] = value_of(x.qkv_dtype, raw_q_[i]), k[i] = value_of(x.qkv_dtype, raw_k_[i]);
    }
    return share_of_products(from, to);
  }
  // again(by_q, by_k) returns the sums of shrunk(by_q, by_k).
  template <class Again>
  __device__ void finish(const Tokens& x, Products all, const Again& again) {
    const float rate = expf(moderate(A_log_));  // not earlier: A_log is needed until here, so this saves a register
    float z[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) z[i] = value_of(x.g_dtype, raw_g_[i]) + bias_[i];
    if (!is_moderate(A_log_)) [[unlikely]]
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        z[i] = x.gate_form == KDA_GATE_SOFTPLUS ? softplus_input(A_log_, z[i]) : bounded_input(A_log_, z[i]);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float g = z[i];
      if (x.gate_form == KDA_GATE_SOFTPLUS) g = -rate * softplus(g);
      else if (x.gate_form == KDA_GATE_LOWER_BOUND) g = x.lower_bound * sigmoid(rate * g);
      alpha[i] = channel(i) < x.K ? expf(g) : 0.0f;
    }
    beta = activated_beta(x.beta_form, value_of(x.beta_dtype, raw_beta_));
    if (!x.qk_l2norm) return scale_rows(x.scale, 1, all.qk);
    if (is_huge(all.qq + all.kk)) [[unlikely]] {
      const bool huge_q = is_huge(all.qq), huge_k = is_huge(all.kk);
      all = again(huge_q ? kShrink : 1.0f, huge_k ? kShrink : 1.0f);
      return scale_rows(x.scale * inverse_norm(all.qq, huge_q), inverse_norm(all.kk, huge_k), all.qk);
    }
    scale_rows(x.scale * inverse_norm(all.qq, false), inverse_norm(all.kk, false), all.qk);
  }

  // Multiplies the rows, for good, and returns this thread's share of their products.
  __device__ Products shrunk(float by_q, float by_k, int from = 0, int to = kPerThread) {
#pragma unroll
    for (int i = from; i < to; ++i) q[i] *= by_q, k[i] *= by_k;
    return share_of_products(from, to);
  }

 private:
  __device__ void scale_rows(float q_factor, float k_factor, float product) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) q[i] *= q_factor, k[i] *= k_factor;
    qk = product * q_factor * k_factor;
  }
  __device__ Products share_of_products(int from, int to) const {
    Products mine{};
#pragma unroll
    for (int i = from; i < to; ++i) {
      mine.qq = fmaf(q[i], q[i], mine.qq), mine.kk = fmaf(k[i], k[i], mine.kk);
      mine.qk = fmaf(q[i], k[i], mine.qk);
    }
    return mine;
  }
  template <bool kNarrow>
  __device__ static unsigned element(const char* from, int i, int32_t dtype) {
    return load_raw<kNarrow>(from + i * kThreads * (kNarrow ? 2 : size_of(dtype)), dtype);
  }
  int first_;
  const char *from_q_, *from_k_, *from_g_, *from_beta_, *from_bias_, *from_A_;
  unsigned raw_q_[kPerThread], raw_k_[kPerThread], raw_g_[kPerThread], raw_beta_;
  float bias_[kPerThread], A_log_;
};

// The slot that a request is likely to have, for hints; -1: none.
__device__ inline int32_t likely_slot(const Index& indices, int32_t first, uint32_t end, unsigned n) {
  const int32_t slot = indices.data ? peek(indices.data + n * indices.stride) : static_cast<int32_t>(n);
  return slot >= first && static_cast<uint32_t>(slot) < end ? slot : -1;
}

// ---- rows of a state (its value columns), over eight lanes each ----

constexpr int kRowLanes = 8;

// Lane l of a row's eight holds channels 32 j + 4 l .. 32 j + 4 l + 3 in registers 4 j .. 4 j + 3.
__device__ inline int channel(int element) {
  return element / 4 * 32 + static_cast<int>(threadIdx.x % kRowLanes) * 4 + element % 4;
}

// The first of the kRows neighbouring rows that a thread has of a block's.
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

__device__ inline float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline float4 load_four(const __nv_bfloat16* from) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  const float2 lo = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.x));
  const float2 hi = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x.y));
  return make_float4(lo.x, lo.y, hi.x, hi.y);
}
__device__ inline void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ inline void store_four(__nv_bfloat16* to, float4 x) {
  const __nv_bfloat162 lo = __floats2bfloat162_rn(x.x, x.y), hi = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(to) = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
}

__device__ inline float4 rounded_to_bf16(float4 x) {
  const auto one = [](float x) { return __bfloat162float(__float2bfloat16_rn(x)); };
  return make_float4(one(x.x), one(x.y), one(x.z), one(x.w));
}

// Neighbouring rows of a head's state. kWide: V-first, with K and addresses that are multiples of four, so that an
// access takes four channels.
template <bool kWide>
struct Rows {
  char* first;
  uint32_t row, channel_step;  // bytes from one row, and from one channel, to the next

  Rows() = default;
  __device__ Rows(const View& t, unsigned slot, unsigned hv, unsigned v) requires kWide : first(t.at(slot, hv, v)),
                                                                                          row(t.stride2),
                                                                                          channel_step(0) {}
  __device__ Rows(const TypedView& t, int32_t layout, unsigned slot, unsigned hv, unsigned v) {
    const bool v_first = kWide || layout == KDA_STATE_V_FIRST;
    row = v_first ? t.stride2 : size_of(t.dtype), channel_step = v_first ? size_of(t.dtype) : t.stride2;
    first = t.at(slot, hv, 0) + static_cast<uint64_t>(v) * row;
  }

  template <class T, int kElements>
  __device__ void load(int i, int K, float (&S)[kElements]) const {
    const char* from = first + static_cast<uint64_t>(i) * row;
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const int c = channel(e);
      if constexpr (kWide) {
        float4 x{};
        if (c < K) x = load_four(reinterpret_cast<const T*>(from) + c);
        S[e] = x.x, S[e + 1] = x.y, S[e + 2] = x.z, S[e + 3] = x.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          S[e + j] =
              c + j < K ? static_cast<float>(*reinterpret_cast<const T*>(from + uint64_t(c + j) * channel_step)) : 0;
      }
    }
  }
  template <class T, int kElements>
  __device__ void store(int i, int K, const float (&S)[kElements]) const {
    char* to = first + static_cast<uint64_t>(i) * row;
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const int c = channel(e);
      if constexpr (kWide) {
        if (c < K) store_four(reinterpret_cast<T*>(to) + c, make_float4(S[e], S[e + 1], S[e + 2], S[e + 3]));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (c + j < K) *reinterpret_cast<T*>(to + uint64_t(c + j) * channel_step) = static_cast<T>(S[e + j]);
      }
    }
  }
};

// Load and store the first `count` rows, f32 or bf16.
template <bool kWide, int kRows, int kElements>
__device__ void load_rows(const Rows<kWide>& rows, int32_t dtype, int count, int K, float (&S)[kRows][kElements]) {
  const auto all = [&]<class T>() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i < count) rows.template load<T>(i, K, S[i]);
  };
  if (dtype == KDA_F32) all.template operator()<float>();
  else all.template operator()<__nv_bfloat16>();
}
template <bool kWide, int kRows, int kElements>
__device__ void store_rows(const Rows<kWide>& rows, int32_t dtype, int count, int K,
                           const float (&S)[kRows][kElements]) {
  const auto all = [&]<class T>() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i < count) rows.template store<T>(i, K, S[i]);
  };
  if (dtype == KDA_F32) all.template operator()<float>();
  else all.template operator()<__nv_bfloat16>();
}

// The same for rows of any kind. wide: they are such as Rows<true> are.
struct AnyRows : Rows<false> {
  bool wide;

  __device__ AnyRows(const TypedView& t, int32_t layout, unsigned slot, unsigned hv, unsigned v, bool wide)
      : Rows<false>(t, layout, slot, hv, v), wide(wide) {}
  __device__ const Rows<false>& narrow() const { return *this; }
  __device__ Rows<true> widened() const {
    Rows<true> rows;
    rows.first = first, rows.row = row, rows.channel_step = 0;
    return rows;
  }
};
template <int kRows, int kElements>
__device__ void load_rows(const AnyRows& rows, int32_t dtype, int count, int K, float (&S)[kRows][kElements]) {
  if (rows.wide) load_rows(rows.widened(), dtype, count, K, S);
  else load_rows(rows.narrow(), dtype, count, K, S);
}
template <int kRows, int kElements>
__device__ void store_rows(const AnyRows& rows, int32_t dtype, int count, int K, const float (&S)[kRows][kElements]) {
  if (rows.wide) store_rows(rows.widened(), dtype, count, K, S);
  else store_rows(rows.narrow(), dtype, count, K, S);
}

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T x[kCount];
};

// kRows neighbouring columns of a head's K-first state, in the same registers as in Rows. An access takes one channel
// of all these columns, and the four threads of a warp that have this channel read neighbouring memory. V and
// addresses are multiples of kRows.
template <int kRows>
struct Columns {
  char* first;
  uint32_t channel_step;  // bytes from one channel to the next

  __device__ Columns(const TypedView& t, int32_t /*layout*/, unsigned slot, unsigned hv, unsigned v)
      : first(t.at(slot, hv, 0) + v * size_of(t.dtype)), channel_step(t.stride2) {}

  template <class T>
  __device__ Neighbours<T, kRows>& at(int c) const {
    return *reinterpret_cast<Neighbours<T, kRows>*>(first + static_cast<unsigned>(c) * uint64_t{channel_step});
  }
  template <class T, int kElements>
  __device__ void load(int K, float (&S)[kRows][kElements]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (channel(e) >= K) continue;
      const Neighbours<T, kRows> all = at<T>(channel(e));
#pragma unroll
      for (int row = 0; row < kRows; ++row) S[row][e] = static_cast<float>(all.x[row]);
    }
  }
  template <class T, int kElements>
  __device__ void store(int K, const float (&S)[kRows][kElements]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (channel(e) >= K) continue;
      Neighbours<T, kRows> all;
#pragma unroll
      for (int row = 0; row < kRows; ++row) all.x[row] = static_cast<T>(S[row][e]);
      at<T>(channel(e)) = all;
    }
  }
};

// The same for Columns: all of them or none.
template <int kRows, int kElements>
__device__ void load_rows(const Columns<kRows>& columns, int32_t dtype, int count, int K,
                          float (&S)[kRows][kElements]) {
  if (count == 0) return;
  if (dtype == KDA_F32) columns.template load<float>(K, S);
  else columns.template load<__nv_bfloat16>(K, S);
}
template <int kRows, int kElements>
__device__ void store_rows(const Columns<kRows>& columns, int32_t dtype, int count, int K,
                           const float (&S)[kRows][kElements]) {
  if (count == 0) return;
  if (dtype == KDA_F32) columns.template store<float>(K, S);
  else columns.template store<__nv_bfloat16>(K, S);
}

// Does every row begin at a multiple of so many elements? (An absent tensor's do.)
inline bool rows_aligned(const kda_tensor& t, int64_t elements) {
  for (int i = 0; i + 1 < t.ndim; ++i)
    if (t.stride[i] % elements) return false;
  return !present(t) || reinterpret_cast<uintptr_t>(t.data) % (elements * dtype_size(t.dtype)) == 0;
}
// Whether four-wide accesses fit all of these states.
inline bool wide_rows(const Dims& d, int32_t layout, std::initializer_list<const kda_tensor*> states) {
  if (layout != KDA_STATE_V_FIRST || d.K % 4) return false;
  return std::all_of(states.begin(), states.end(), [](const kda_tensor* t) { return rows_aligned(*t, 4); });
}
// Whether Columns of up to four fit all of these states.
inline bool wide_columns(const Dims& d, int32_t layout, std::initializer_list<const kda_tensor*> states) {
  if (layout != KDA_STATE_K_FIRST || d.V % 4) return false;
  return std::all_of(states.begin(), states.end(), [](const kda_tensor* t) { return rows_aligned(*t, 4); });
}

}  // namespace kda::cuda
