// One token of every sequence (decode), where W = 4 and x, weights, bias and states have one 16-bit dtype T: four
// channels of one sequence a thread. A state only moves: its numbers are never converted. Compared with conv_kernel a
// thread has half the registers and a third of the instructions, which is what bounds calls of many sequences.
#pragma once
#include "cuda/conv/call.h"
#include "cuda/conv/conv.h"

namespace kda::cuda {

struct Step {
  Conv conv;
  FinalStates final_states;
};
constexpr int kStepThreads = 128;

template <class T>
using Four = Channels<T, 4>;

// The three rows of a state, of four channels. In memory they are rows, or channels of three entries.
template <class T>
struct StepState {
  Four<T> rows[kPast] = {};

  __device__ void load(const kda_tensor& state, int64_t slot, unsigned d) {
    const T* from = static_cast<const T*>(state.data) + place_of(state, slot, d, 0);
    const int64_t step = entry_step(state);
    Four<T> raw[kPast];
#pragma unroll
    for (int j = 0; j < kPast; ++j) raw[j] = *reinterpret_cast<const Four<T>*>(from + j * step);
    const bool by_row = state.stride[1] == 1;
#pragma unroll
    for (int j = 0; j < kPast; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[j].x[i] = by_row ? raw[j].x[i] : raw[(kPast * i + j) / 4].x[(kPast * i + j) % 4];
  }
  __device__ void store(const kda_tensor& state, int64_t slot, unsigned d) const {
    T* to = static_cast<T*>(state.data) + place_of(state, slot, d, 0);
    const int64_t step = entry_step(state);
    const bool by_row = state.stride[1] == 1;
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      Four<T> raw;
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.x[i] = by_row ? rows[j].x[i] : rows[(4 * j + i) % kPast].x[(4 * j + i) / kPast];
      kda::cuda::store(reinterpret_cast<Four<T>*>(to + j * step), raw);
    }
  }
};

template <class T>
struct StepWeights {
  Four<T> taps[4], bias{};  // taps of each channel

  __device__ StepWeights(const Conv& c, unsigned d) {
    const T* from = static_cast<const T*>(c.weight.data) + d * c.weight.stride[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) taps[i] = *reinterpret_cast<const Four<T>*>(from + i * c.weight.stride[0]);
    if (present(c.bias)) bias = *reinterpret_cast<const Four<T>*>(static_cast<const T*>(c.bias.data) + d);
  }
  __device__ Four<T> outputs(const StepState<T>& past, const Four<T>& row, bool silu) const {
    Four<T> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* w = taps[i].x;
      const float wide[kTaps] = {static_cast<float>(w[0]), static_cast<float>(w[1]), static_cast<float>(w[2]),
                                 static_cast<float>(w[3])};
      const float xx[kTaps] = {static_cast<float>(past.rows[0].x[i]), static_cast<float>(past.rows[1].x[i]),
                               static_cast<float>(past.rows[2].x[i]), static_cast<float>(row.x[i])};
      y.x[i] = static_cast<T>(convolve(wide, static_cast<float>(bias.x[i]), xx, 0, silu));
    }
    return y;
  }
};

template <class T>
__global__ void __launch_bounds__(kStepThreads, 12) step_kernel(const __grid_constant__ Step p) {
  const Conv& c = p.conv;
  const unsigned d = (blockIdx.x * kStepThreads + threadIdx.x) * 4;
  if (d >= c.channels()) return;
  wait_for_stream();
  Sequence s = c.span(blockIdx.y);
  const StepWeights<T> weights(c, d);
  const Four<T> row = *channels_at<T, 4>(c.x, s, 0, d);
  c.place(s);
  const int64_t slot = p.final_states.slot(s);
  StepState<T> state;
  if (s.initial) state.load(c.state, s.slot, d);
  let_next_start();
  Four<T>* to = channels_at<T, 4>(c.y, s, 0, d);
  if (!s.live) return store(to, {});
  store(to, weights.outputs(state, row, c.silu));
  if (slot < 0) return;
  state.rows[0] = state.rows[1], state.rows[1] = state.rows[2], state.rows[2] = row;
  state.store(p.final_states.states, slot, d);
}

// Does the call fit, if four_wide_rows(), four_wide_weights() and four_wide_state() hold?
template <class T>
bool is_step(const ConvCall& call) {
  const Conv& c = call.conv;
  const auto alike = [&](const kda_tensor& t) { return !present(t) || t.dtype == c.x.dtype; };
  return sizeof(T) == 2 && c.x.shape[1] == 1 && !present(c.cu_seqlens) && c.sequences() <= 65535 && alike(c.weight) &&
         alike(c.bias) && alike(c.state) && alike(call.final_states.states);
}
template <class T>
void launch_step(const ConvCall& call) {
  if constexpr (sizeof(T) == 2) {
    const Conv& c = call.conv;
    const dim3 grid(static_cast<unsigned>(divide_up(c.channels(), 4 * kStepThreads)),
                    static_cast<unsigned>(c.sequences()));
    if (grid.y) launch<step_kernel<T>>(call.exec, grid, kStepThreads, 0, Step{c, call.final_states});
  }
}

}  // namespace kda::cuda
