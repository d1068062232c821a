// The convolution in front of drafts (kda_conv_inputs), for kernels. In front of decode it is a kernel: decode/front.h.
#pragma once
#include "cuda/call/launch.h"
#include "cuda/conv/conv.h"

namespace kda::cuda {

// What kernels need to know of the convolution.
struct Front {
  int64_t H, K, V;
  kda_conv_inputs conv;
  kda_tensor parents;
};

// May a call with this convolution be on the fast path? Everything is in bf16, and an access takes four channels.
inline bool on_fast_path(const kda_conv_inputs& conv, bool by_four) {
  return by_four && conv.x.dtype == KDA_BF16 && conv.weight.dtype == KDA_BF16 && conv.state.dtype == KDA_BF16 &&
         (!present(conv.bias) || conv.bias.dtype == KDA_BF16);
}
// A copy for such a call, with dtypes that the compiler then knows.
__device__ inline kda_conv_inputs fast_copy(const kda_conv_inputs& given) {
  kda_conv_inputs conv = given;
  conv.x.dtype = conv.weight.dtype = conv.state.dtype = conv.bias.dtype = KDA_BF16;
  return conv;
}

// Channels of a packed row: q heads, k heads, v heads.
struct FrontChannels {
  int64_t q, k, v;  // the first of a head
  template <class Dims>
  __device__ FrontChannels(const Dims& d, unsigned h, unsigned hv)
      : q(h * d.K), k((d.H + h) * d.K), v(2 * d.H * d.K + hv * d.V) {}
};

// The value of one token and channel that kda_conv in front would have left.
__device__ inline float front_value(const kda_conv_inputs& conv, const kda_tensor& parents, const Sequence& s,
                                    int64_t slot, int64_t token, int64_t d) {
  const int64_t W = conv.weight.shape[1];
  ConvWeights<1> weights;
  ConvTaps taps;
  weights.fetch(conv.weight, conv.bias, d);
  taps.fetch(conv.x, conv.state, rows_until(parents, W - 1, s.n, token + W - 1, W), s, slot, d);
  return convolved(conv, weights, taps);
}

// The same for at most kMax tokens of a chain and four channels from d on. Rows and state have 16 bits, and
// four_wide_front() holds.
template <int kMax>
struct FrontFour {
  // With so many tokens a thread, the thread of the first tokens needs the state and no rows before it; all others
  // need only the rows before. `past` is one or the other.
  static constexpr bool kEither = kMax >= kPast;
  ConvWeights<4> weights;
  uint2 past[kPast], before[kEither ? 1 : kPast], rows[kMax];

  // Issues the loads of everything that tokens first .. first + tokens - 1 need.
  __device__ void fetch(const kda_conv_inputs& conv, const Sequence& s, int64_t slot, int first, int tokens,
                        int64_t d) {
    weights.fetch(conv.weight, conv.bias, d);
    const auto at_element = [](const kda_tensor& t, int64_t at) { return static_cast<const uint16_t*>(t.data) + at; };
    const auto load = [](const uint16_t* from) { return *reinterpret_cast<const uint2*>(from); };
    const bool stored = slot >= 0 && slot < conv.state.shape[0] && first < kPast;
    const uint16_t* state = at_element(conv.state, stored ? place_of(conv.state, slot, d, 0) : 0);
    const uint16_t* row = at_element(conv.x, place_of(conv.x, s.b, s.t0 + first, d));
    const int64_t step = entry_step(conv.state), next = conv.x.stride[1];
    if constexpr (kEither) {
      const uint16_t* from = first ? row - next : state;
#pragma unroll
      for (int j = 0; j < kPast; ++j) past[j] = first || stored ? load(from + j * (first ? -next : step)) : uint2{};
    } else {
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
        past[j] = stored ? load(state + j * step) : uint2{};
        if (j < first) before[j] = load(row - (j + 1) * next);
      }
    }
#pragma unroll
    for (int t = 0; t < kMax; ++t)
      if (t < tokens) rows[t] = load(row + t * next);
  }
  // z of token first + t goes to `to` + t step.
  __device__ void values(const kda_conv_inputs& conv, int first, int tokens, float* to, int step) const {
    float w[kTaps][4], bias[4], window[kPast][4];
    weights.values(conv.weight, conv.bias, w, bias);
    past_of(conv.state, past, window);
    const auto roll = [&](const uint2& row, auto&& each) {
      const float4 x = values_of(conv.x.dtype, row);
      const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        each(i, four[i]);
        window[0][i] = window[1][i], window[1][i] = window[2][i], window[2][i] = four[i];
      }
    };
#pragma unroll
    for (int j = kPast - 1; j >= 0; --j)
      if (j < first) roll(kEither ? past[j] : before[j], [](int, float) {});
#pragma unroll
    for (int t = 0; t < kMax; ++t, to += step) {
      if (t >= tokens) break;
      float z[4];
      roll(rows[t], [&](int i, float x) {
        const float taps[kTaps] = {w[0][i], w[1][i], w[2][i], w[3][i]};
        const float xx[kTaps] = {window[0][i], window[1][i], window[2][i], x};
        z[i] = rounded(conv.x.dtype, convolve(taps, bias[i], xx, 0, true));
      });
      *reinterpret_cast<float4*>(to) = {z[0], z[1], z[2], z[3]};
    }
  }
};
inline bool four_wide_front(const kda_conv_inputs& conv) {
  return present(conv.x) && conv.x.dtype != KDA_F32 && conv.state.dtype != KDA_F32 &&
         four_wide_weights(conv.weight, conv.bias) && four_wide_rows(conv.x) && four_wide_state(conv.state);
}

// Where the convolution in front leaves all drafts of a block in shared memory (in floats): q and k of draft t at
// keys + t stride, its values at v + t columns.
struct FrontMemory {
  bool given, by_four;
  int keys, stride, v, columns;
};
// A thread has some of the drafts, and four channels of them if accesses of four are possible.
// kK: K if it is known, else 0.
template <int kThreads, int kK, int kMaxDrafts>
class FrontDrafts {
  static constexpr int kGroups = (2 * 128 + 128) / 4;  // of channels, K and columns being at most 128
  static constexpr int kParts = kThreads / kGroups, kMost = (kMaxDrafts + kParts - 1) / kParts;

 public:
  __device__ FrontDrafts(const FrontMemory& m, int K) : m_(m), K_(K) {}
  // Issues the loads from memory.
  __device__ void fetch(const Front& front, const Place& at, const Sequence& s, int T, unsigned v0) {
    if (!m_.by_four || !has_some(T)) return;
    four_.fetch(front.conv, s, slot_of(front.conv.indices, s.n), first(), tokens(T),
                channel(front, at, K(), own(), v0));
  }
  __device__ void values(const Front& front, const Place& at, const Sequence& s, int T, unsigned v0,
                         float* shared) const {
    const auto place = [&](int t, int c) {
      return shared + (c < 2 * K() ? m_.keys + t * m_.stride + c : m_.v + t * m_.columns + (c - 2 * K()));
    };
    if (m_.by_four) {
      const int step = own() < 2 * K() ? m_.stride : m_.columns;
      if (has_some(T)) four_.values(front.conv, first(), tokens(T), place(first(), own()), step);
      return;
    }
    const int64_t slot = slot_of(front.conv.indices, s.n);
    for (int t = 0; t < T; ++t)
      for (int c = static_cast<int>(threadIdx.x); c < 2 * K() + m_.columns; c += kThreads)
        *place(t, c) = front_value(front.conv, front.parents, s, slot, t, channel(front, at, K(), c, v0));
  }

 private:
  __device__ int K() const { return kK ? kK : K_; }
  __device__ static int64_t channel(const Front& front, const Place& at, int K, int c, unsigned v0) {
    const FrontChannels first(front, at.h, at.hv);
    return c < K ? first.q + c : c < 2 * K ? first.k + (c - K) : first.v + v0 + (c - 2 * K);
  }
  __device__ static int own() { return static_cast<int>(threadIdx.x) % kGroups * 4; }
  __device__ static int first() { return static_cast<int>(threadIdx.x) / kGroups * kMost; }
  __device__ static int tokens(int T) { return min(T - first(), kMost); }
  __device__ bool has_some(int T) const { return own() < 2 * K() + m_.columns && first() < T; }

  const FrontMemory& m_;
  const int K_;
  FrontFour<kMost> four_;
};

// Rolls the state on by the accepted tokens. This is a launch of its own, so that no kernel reads the state while it
// moves. Nothing happens in calls without a convolution.
void roll_convolution(const FlushProblem& p);
void roll_convolution(const FlushVerifyProblem& p);

}  // namespace kda::cuda
