#include "conv_front.h"

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace kda::test {
namespace {

using namespace kda::cuda;

constexpr int kThreads = 64;

__device__ int64_t channel_of_thread() { return blockIdx.y * static_cast<int64_t>(kThreads) + threadIdx.x; }

__global__ void tokens_kernel(const __grid_constant__ kda_conv_inputs in, const __grid_constant__ kda_tensor cu_seqlens,
                              const __grid_constant__ kda_tensor parents, const __grid_constant__ kda_tensor z) {
  const int64_t n = blockIdx.x, d = channel_of_thread(), W = in.weight.shape[1];
  if (d >= in.x.shape[2]) return;
  const Sequence s = span_of(cu_seqlens, in.x, n);
  ConvWeights<1> weights;
  weights.fetch(in.weight, in.bias, d);
  for (int64_t t = 0; t < s.length; ++t) {
    ConvTaps taps;
    taps.fetch(in.x, in.state, rows_until(parents, W - 1, n, t + W - 1, W), s, slot_of(in.indices, n), d);
    store_value(z, place_of(z, s.b, s.t0 + t, d), convolved(in, weights, taps));
  }
}

__global__ void chains_kernel(const __grid_constant__ kda_conv_inputs in, const __grid_constant__ kda_tensor cu_seqlens,
                              const __grid_constant__ kda_tensor z) {
  const int64_t n = blockIdx.x, d = channel_of_thread(), slot = slot_of(in.indices, n);
  if (d >= in.x.shape[2]) return;
  const Sequence s = span_of(cu_seqlens, in.x, n);
  const bool stored = slot >= 0 && slot < in.state.shape[0];
  ConvWeights<1> weights;
  ConvPast<1> state;
  weights.fetch(in.weight, in.bias, d);
  if (stored) state.fetch(in.state, slot, d);
  float w[kTaps][1], bias[1], past[kPast][1];
  weights.values(in.weight, in.bias, w, bias);
  state.values(in.state, past);
  for (int64_t t = 0; t < s.length; ++t) {
    const float x = value_at(in.x, place_of(in.x, s.b, s.t0 + t, d));
    const float taps[kTaps] = {w[0][0], w[1][0], w[2][0], w[3][0]}, xx[kTaps] = {past[0][0], past[1][0], past[2][0], x};
    store_value(z, place_of(z, s.b, s.t0 + t, d),
                rounded(in.x.dtype, convolve(taps, bias[0], xx, kTaps - static_cast<int>(in.weight.shape[1]), true)));
    past[0][0] = past[1][0], past[1][0] = past[2][0], past[2][0] = x;
  }
  if (stored) store_state<1>(in.state, slot, d, past);
}

__global__ void roll_kernel(const __grid_constant__ kda_tensor x, const __grid_constant__ kda_tensor state,
                            const __grid_constant__ kda_tensor parents, int64_t m) {
  const int64_t n = blockIdx.x, d = channel_of_thread(), keep = state.shape[2];
  if (d >= x.shape[2]) return;
  ConvTaps taps;
  taps.fetch(x, state, rows_until(parents, keep, n, m - 1 + keep, keep), span_of({}, x, n), n, d);
  float xx[kTaps];
  taps.values(x, state, xx);
  store_state<1>(state, n, d, {{xx[1]}, {xx[2]}, {xx[3]}});
}

dim3 grid_of(int64_t N, const kda_tensor& x) {
  return dim3(static_cast<unsigned>(N), static_cast<unsigned>((x.shape[2] + kThreads - 1) / kThreads));
}
int64_t sequences(const kda_tensor& x, const kda_tensor& cu_seqlens) {
  return present(cu_seqlens) ? cu_seqlens.shape[0] - 1 : x.shape[0];
}

}  // namespace

void convolve_tokens(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& parents,
                     const kda_tensor& z) {
  tokens_kernel<<<grid_of(sequences(in.x, cu_seqlens), in.x), kThreads>>>(in, cu_seqlens, parents, z);
}
void convolve_and_roll(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& z) {
  chains_kernel<<<grid_of(sequences(in.x, cu_seqlens), in.x), kThreads>>>(in, cu_seqlens, z);
}
void roll_states(const kda_tensor& x, const kda_tensor& state, const kda_tensor& parents, int64_t m) {
  roll_kernel<<<grid_of(x.shape[0], x), kThreads>>>(x, state, parents, m);
}

}  // namespace kda::test
