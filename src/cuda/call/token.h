// The inputs of a token: loaded, activated, and spread over the threads of a warp or block.
#pragma once
#include "contract/gate_form.h"
#include "cuda/call/launch.h"
#include "cuda/call/view.h"
#include "cuda/call/warp.h"
#include "cuda/gate/activations.h"

namespace kda::cuda {

// Decode compares forms in place, as gate.h does, and not by a function of gate.h: of that ptxas makes other code.
static_assert(kGateForms == 3, "another form of the gate: TokenKeys::finish must compute it");

// The inputs of a call's tokens, and where their outputs go. What is read first comes first.
struct Tokens {
  View q, k, v, g, beta;
  const char *A_log, *bias;  // f32, optional
  int64_t bias_stride;       // bytes from one head to the next
  int32_t K;
  uint32_t qkv_dtype : 4, g_dtype : 4, beta_dtype : 4, o_dtype : 4;
  GateForm gate_form : 4;
  uint32_t beta_form : 4, qk_l2norm : 1;
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
        gate_form(form_of(in)),
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
    if (!is_moderate(A_log_)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        z[i] = x.gate_form == GateForm::kSoftplus ? softplus_input(A_log_, z[i]) : bounded_input(A_log_, z[i]);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float g = z[i];
      if (x.gate_form == GateForm::kSoftplus) g = -rate * softplus(g);
      else if (x.gate_form == GateForm::kLowerBound) g = x.lower_bound * sigmoid(rate * g);
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

}  // namespace kda::cuda
