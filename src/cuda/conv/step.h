// One token of every sequence (decode), where W = 4 and x, weights, bias and states have one 16-bit dtype T: four
// channels of one sequence a thread. A state only moves: its numbers are never converted. Compared with conv_kernel a
// thread has half the registers and a third of the instructions, which is what bounds calls of many sequences.
#pragma once
#include "cuda/conv/call.h"
#include "cuda/conv/conv.h"

namespace kda::cuda {

// What the kernel needs of tensors: it waits for every 64 bytes of its parameters that it reads.
template <class T>
struct StepRows {
  T* data;         // nullptr: absent
  int64_t stride;  // from one sequence, or channel of weights, to the next
  __device__ T* at(int64_t row, unsigned d = 0) const { return data + row * stride + d; }
};
template <class T>
StepRows<T> step_rows(const kda_tensor& t) {
  return {static_cast<T*>(t.data), t.stride[0]};
}

template <class T>
using Four = Channels<T, 4>;

// A pool of states. In memory the three rows of four channels are rows, or channels of three entries.
template <class T>
struct StepPool {
  StepRows<T> slots;
  int64_t step;  // from one load of four to the next
  bool by_entry;

  explicit StepPool(const kda_tensor& t)
      : slots(step_rows<T>(t)), step(entry_step(t)), by_entry(present(t) && t.stride[1] == 1) {}
  __device__ T* at(int64_t slot, unsigned d) const { return slots.at(slot, by_entry ? d : kPast * d); }
  __device__ void load(int64_t slot, unsigned d, T (&rows)[kPast][4]) const {
    const T* from = at(slot, d);
    T x[kPast * 4];
    Four<T> raw[kPast];
#pragma unroll
    for (int j = 0; j < kPast; ++j) raw[j] = *reinterpret_cast<const Four<T>*>(from + j * step);
#pragma unroll
    for (int j = 0; j < kPast * 4; ++j) x[j] = raw[j / 4].x[j % 4];
    to_rows(by_entry, x, rows);
  }
  __device__ void put(int64_t slot, unsigned d, const T (&rows)[kPast][4]) const {
    T* to = at(slot, d);
    T x[kPast * 4];
    from_rows(by_entry, rows, x);
#pragma unroll
    for (int j = 0; j < kPast; ++j)
      store(reinterpret_cast<Four<T>*>(to + j * step), {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]});
  }
};

template <class T>
struct Step {
  unsigned channels, x_end, x1_end;  // as in Conv
  bool silu;
  StepRows<const T> x, weight;
  const T* bias;
  StepRows<T> y;
  ConvSlots slots;
  StepPool<T> initial, last;
  FinalSlots final_slots;
  StepRows<const T> x1, x2;

  explicit Step(const ConvCall& call)
      : channels(static_cast<unsigned>(call.conv.channels())),
        x_end(end_of(call.conv.x_end)),
        x1_end(end_of(call.conv.x1_end)),
        silu(call.conv.silu),
        x(step_rows<const T>(call.conv.x)),
        weight(step_rows<const T>(call.conv.weight)),
        bias(static_cast<const T*>(call.conv.bias.data)),
        y(step_rows<T>(call.conv.y)),
        slots(call.conv.slots()),
        initial(call.conv.state),
        last(call.final_states.states),
        final_slots(call.final_states.slots),
        x1(step_rows<const T>(call.conv.x1)),
        x2(step_rows<const T>(call.conv.x2)) {}
  __device__ const StepRows<const T>& rows_of(unsigned d) const { return d < x_end ? x : d < x1_end ? x1 : x2; }

 private:
  static unsigned end_of(int64_t channel) { return static_cast<unsigned>(std::min<int64_t>(channel, UINT32_MAX)); }
};
constexpr int kStepThreads = 128;

template <class T>
struct StepWeights {
  Four<T> taps[4], bias{};  // taps of each channel

  __device__ StepWeights(const Step<T>& p, unsigned d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) taps[i] = *reinterpret_cast<const Four<T>*>(p.weight.at(d + i));
    if (p.bias) bias = *reinterpret_cast<const Four<T>*>(p.bias + d);
  }
  __device__ Four<T> outputs(const T (&past)[kPast][4], const Four<T>& row, bool silu) const {
    Four<T> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* w = taps[i].x;
      const float wide[kTaps] = {static_cast<float>(w[0]), static_cast<float>(w[1]), static_cast<float>(w[2]),
                                 static_cast<float>(w[3])};
      const float xx[kTaps] = {static_cast<float>(past[0][i]), static_cast<float>(past[1][i]),
                               static_cast<float>(past[2][i]), static_cast<float>(row.x[i])};
      y.x[i] = static_cast<T>(convolve(wide, static_cast<float>(bias.x[i]), xx, 0, silu));
    }
    return y;
  }
};

template <class T>
__global__ void __launch_bounds__(kStepThreads, 12) step_kernel(const __grid_constant__ Step<T> p) {
  const unsigned d = (blockIdx.x * kStepThreads + threadIdx.x) * 4, n = blockIdx.y;
  if (d >= p.channels) return;
  wait_for_stream();
  const StepWeights<T> weights(p, d);
  const Four<T> row = *reinterpret_cast<const Four<T>*>(p.rows_of(d).at(n, d));
  Sequence s{.n = n, .length = 1};
  p.slots.place(s);
  T past[kPast][4] = {};
  if (s.initial) p.initial.load(s.slot, d, past);
  // After the loads of the state, which are waited for first.
  const auto slot = static_cast<int>(p.final_slots.slot(s));
  let_next_start();
  auto* to = reinterpret_cast<Four<T>*>(p.y.at(n, d));
  if (!s.live) return store(to, {});
  store(to, weights.outputs(past, row, p.silu));
  if (slot < 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) past[0][i] = past[1][i], past[1][i] = past[2][i], past[2][i] = row.x[i];
  p.last.put(slot, d, past);
}

// Does the call fit, if four_wide_rows(), four_wide_weights() and four_wide_state() hold?
template <class T>
bool is_step(const ConvCall& call) {
  const Conv& c = call.conv;
  const auto alike = [&](const kda_tensor& t) { return !present(t) || t.dtype == c.x.dtype; };
  return sizeof(T) == 2 && c.x.shape[1] == 1 && !present(c.cu_seqlens) && c.sequences() <= 65535 &&
         c.channels() < int64_t{1} << 30 && alike(c.weight) && alike(c.bias) && alike(c.state) &&
         alike(call.final_states.states);
}
template <class T>
void launch_step(const ConvCall& call) {
  if constexpr (sizeof(T) == 2) {
    const Conv& c = call.conv;
    const dim3 grid(static_cast<unsigned>(divide_up(c.channels(), 4 * kStepThreads)),
                    static_cast<unsigned>(c.sequences()));
    if (grid.y) launch<step_kernel<T>>(call.exec, grid, kStepThreads, 0, Step<T>(call));
  }
}

}  // namespace kda::cuda
