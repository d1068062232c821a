// The causal convolution (math.md 7.6), for sm_80 and newer:
//   y_t = bias + sum_j w_j xx_(t+j),  j = 0 .. W-1,  then y_t sigmoid(y_t)        xx = state ++ x
//
// Bytes: x is read and y written; a state, 2 (W-1) elements a channel and sequence, counts where sequences are short.
// A thread has kVector neighbouring channels: four where W = 4 and all strides and addresses allow it, else one. The
// window of the last W-1 rows is in registers. Blocks are of two kinds:
//
//   heads   one sequence each: its first W-1 tokens, the only ones that read the state, and its final state. One thread
//           reads and writes a channel of a slot, so states roll in place without a second launch. Calls of one token
//           (decode) have no other blocks: all loads of a thread are in flight together, those of the state after its
//           index.
//   bodies  all other tokens, `run` of them a warp, from any number of sequences, and the rows that belong to none. A
//           thread loads the next kGroup tokens before it computes the last ones.
//
// Checkpoints are stored by a kernel of their own, before the states that it reads roll on: a thread for each channel
// of each.
//
// Every y comes from convolve(), and no sum is split: bits depend neither on the kind of block, nor on kVector and
// `run`.
#include "cuda/conv/call.h"
#include "cuda/conv/conv.h"
#include "cuda/conv/declarations.h"
#include "cuda/conv/step.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 64, kWarps = kThreads / 32;  // small blocks: one token of one sequence needs many SMs
constexpr int kGroup = 8;                             // tokens that a thread loads at once
constexpr int kMaxGroups = 8;                         // of a warp's run: 3 of 64 rows are read twice
constexpr int kFullSm = 32;                           // warps of bodies an SM gets before their runs grow

struct Params {
  Conv conv;
  FinalStates final_states;
  unsigned heads, head_tiles;  // blocks for heads; how many of them a sequence has
  unsigned body_tiles;         // warps side by side: 32 kVector channels each
  unsigned run;                // tokens of a warp
};

// The rows before a token, and those channels' weights.
template <class T, int kVector>
struct Window {
  float w[kTaps][kVector], bias[kVector], past[kPast][kVector];
  int first;  // tap

  __device__ explicit Window(const Conv& c) : first(kVector == 1 ? kTaps - static_cast<int>(c.width()) : 0) {}

  // y of the token that has this row; the row becomes the last one of the past.
  template <class Silu>
  __device__ Channels<T, kVector> next(const Channels<T, kVector>& row, Silu silu) {
    Channels<T, kVector> y;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float taps[kTaps] = {w[0][i], w[1][i], w[2][i], w[3][i]};
      const float xx[kTaps] = {past[0][i], past[1][i], past[2][i], static_cast<float>(row.x[i])};
      y.x[i] = static_cast<T>(convolve(taps, bias[i], xx, first, silu));
    }
    move_on(row);
    return y;
  }
  __device__ void move_on(const Channels<T, kVector>& row) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      past[0][i] = past[1][i], past[1][i] = past[2][i], past[2][i] = static_cast<float>(row.x[i]);
    }
  }
};

template <class T, int kVector>
__device__ void head(const Params& p, unsigned block) {
  const Conv& c = p.conv;
  const int64_t n = block / p.head_tiles;
  const int64_t d = (block % p.head_tiles * kThreads + threadIdx.x) * static_cast<int64_t>(kVector);
  if (d >= c.channels()) return;
  const int keep = static_cast<int>(c.width()) - 1;

  wait_for_stream();
  // The loads of everything but the state are issued before the thread waits for the slot.
  Sequence s = c.span(n);
  const int tokens = static_cast<int>(min(s.length, static_cast<int64_t>(keep)));
  ConvWeights<kVector> weights;
  weights.fetch(c.weight, c.bias, d);
  const kda_tensor& rows = c.rows_of(d);
  const int64_t x_step = rows.stride[1] / kVector;
  const Channels<T, kVector>* from = channels_at<T, kVector>(rows, s, 0, d);
  Channels<T, kVector> x[kPast] = {}, last[kPast] = {};
#pragma unroll
  for (int t = 0; t < kPast; ++t)
    if (t < tokens) x[t] = from[t * x_step];
  const bool longer = s.length > keep;  // than the tokens of this block
  if (longer) {
    from = channels_at<T, kVector>(rows, s, s.length - kPast, d);
#pragma unroll
    for (int j = 0; j < kPast; ++j)
      if (j >= kPast - keep) last[j] = from[j * x_step];
  }

  c.place(s);
  Channels<T, kVector>* to = channels_at<T, kVector>(c.y, s, 0, d);
  const int64_t step = c.y.stride[1] / kVector;
  if (!s.live) {
    for (int t = 0; t < tokens; ++t) store(to + t * step, {});
    return;
  }
  ConvPast<kVector> state;
  if (s.initial) state.fetch(c.state, s.slot, d);
  let_next_start();
  Window<T, kVector> window(c);
  weights.values(c.weight, c.bias, window.w, window.bias);
  state.values(c.state, window.past);
  const auto outputs = [&](auto silu) {
#pragma unroll
    for (int t = 0; t < kPast; ++t)
      if (t < tokens) store(to + t * step, window.next(x[t], silu));
  };
  if (c.silu) outputs(std::true_type());
  else outputs(std::false_type());
  const int64_t slot = p.final_states.slots.slot(s);
  if (slot < 0) return;
#pragma unroll
  for (int j = 0; j < kPast; ++j)
    if (longer) window.move_on(last[j]);
  store_state<kVector>(p.final_states.states, slot, d, window.past);
}

// Convolves tokens a .. b-1 of a sequence, a >= W-1: none of their taps is in the state. The last group may have
// fewer than kGroup tokens.
template <class T, int kVector, class Silu>
__device__ void convolve_tokens(const Conv& c, const Sequence& s, int64_t a, int64_t b, int64_t d,
                                Window<T, kVector>& window, Silu silu) {
  const kda_tensor& x = c.rows_of(d);
  const int64_t x_step = x.stride[1] / kVector, y_step = c.y.stride[1] / kVector;
  const Channels<T, kVector>* from = channels_at<T, kVector>(x, s, a, d);
  using Row = Channels<T, kVector>;
  Row* to = channels_at<T, kVector>(c.y, s, a, d);
#pragma unroll
  for (int age = kPast; age > 0; --age)
    window.move_on(age < c.width() ? *(from - age * x_step) : Channels<T, kVector>{});
  // Loads `count` rows, and the last of them again up to kGroup.
  const auto load = [&](Row(&rows)[kGroup], int count, bool ends) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      rows[g] = *from;
      if (!ends || g + 1 < count) from += x_step;
    }
  };
  const auto finish = [&](const Row(&rows)[kGroup], int count) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const Row y = window.next(rows[g], silu);
      if (g < count) store(to, y);
      to += y_step;
    }
  };
  int left = static_cast<int>(b - a);
  Row rows[kGroup], later[kGroup];
  if (left >= kGroup) {
    load(rows, kGroup, false);
    for (; left >= 2 * kGroup; left -= kGroup) {
      load(later, kGroup, false);
      finish(rows, kGroup);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) rows[g] = later[g];
    }
    finish(rows, kGroup);
    left -= kGroup;
  }
  if (left == 0) return;
  load(rows, left, true);
  finish(rows, left);
}

template <class T, int kVector>
__device__ void body(const Params& p, unsigned block) {
  const Conv& c = p.conv;
  const unsigned warp = block * kWarps + threadIdx.x / 32, first = warp / p.body_tiles * p.run;
  const int64_t d = (warp % p.body_tiles * 32 + threadIdx.x % 32) * static_cast<int64_t>(kVector);
  const int64_t stop = min(static_cast<int64_t>(first) + p.run, c.tokens());
  if (d >= c.channels() || first >= stop) return;
  wait_for_stream();
  ConvWeights<kVector> weights;
  weights.fetch(c.weight, c.bias, d);
  const int64_t n = present(c.cu_seqlens) ? c.packed_sequence_of(first) : first / static_cast<unsigned>(c.x.shape[1]);
  Window<T, kVector> window(c);
  weights.values(c.weight, c.bias, window.w, window.bias);
  for (ConvPieces i(c, first, stop, n); i.next();) {
    const int64_t a = max(i.a, c.width() - 1);  // earlier ones belong to heads
    if (a >= i.b) continue;
    if (!i.s.live) zero_tokens<T, kVector>(c.y, i.s, a, i.b, d);
    else if (c.silu) convolve_tokens(c, i.s, a, i.b, d, window, std::true_type());
    else convolve_tokens(c, i.s, a, i.b, d, window, std::false_type());
  }
  if (present(c.cu_seqlens)) zero_tokens<T, kVector>(c.y, {}, max(static_cast<int64_t>(first), c.end()), stop, d);
}

// Leaves a thread enough registers for the loads of a group to be in flight while it computes the group before.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, sizeof(Channels<T, kVector>) == 16 ? 6 : 7)
    conv_kernel(const __grid_constant__ Params p) {
  if (blockIdx.x < p.heads) head<T, kVector>(p, blockIdx.x);
  else body<T, kVector>(p, blockIdx.x - p.heads);
}

// ---- checkpoints ----

struct Checkpoints {
  kda_tensor states, slots, offset;
  int64_t every;
  unsigned tiles, columns;  // blocks of a checkpoint; checkpoints of a sequence, at most
  explicit Checkpoints(const ConvProblem& p)
      : states(p.args.checkpoints),
        slots(p.args.checkpoint_slots),
        offset(p.args.checkpoint_offset),
        every(p.args.checkpoint_every),
        tiles(static_cast<unsigned>(divide_up(p.D, kThreads))),
        columns(static_cast<unsigned>(most(p))) {}
  // Those that the sizes allow.
  static int64_t most(const ConvProblem& p) {
    const kda_conv_args& a = p.args;
    if (!present(a.checkpoints)) return 0;
    return std::min(a.checkpoint_slots.shape[1], p.T / a.checkpoint_every + present(a.checkpoint_offset));
  }
};

__global__ void __launch_bounds__(kThreads)
    checkpoint_kernel(const __grid_constant__ Conv c, const __grid_constant__ Checkpoints x) {
  wait_for_stream();
  const int64_t d = int64_t{blockIdx.x % x.tiles} * kThreads + threadIdx.x;
  const unsigned i = blockIdx.x / x.tiles, n = i / x.columns, m = i % x.columns;
  const Sequence s = c.sequence(n);
  const int64_t t = checkpoint_places(x.offset, x.every, n).place(m);
  const int64_t row = s.live ? checkpoint_row(x.slots, c.first_slot, x.states.shape[0], n, m) : -1;
  if (d >= c.channels() || t > s.length || row < 0) return;
  const int64_t keep = c.width() - 1;
  ConvTaps taps;
  taps.fetch(c.rows_of(d), c.state, rows_until({}, keep, n, t - 1 + keep, keep), s, s.initial ? s.slot : -1, d);
  float xx[kTaps];
  taps.values(c.x, c.state, xx);
  store_state<1>(x.states, row, d, {{xx[1]}, {xx[2]}, {xx[3]}});
}

void launch_checkpoints(const ConvProblem& p) {
  const Checkpoints x(p);
  const unsigned blocks = static_cast<unsigned>(p.N) * x.columns * x.tiles;
  if (blocks == 0) return;
  launch<checkpoint_kernel>(p.args.exec, dim3(blocks), kThreads, 0, conv_of(p), x);
}

template <class T>
void launch_rows(const ConvCall& call) {
  Params q{call.conv, call.final_states, 0, 0, 0, 0};
  const Conv& c = q.conv;
  const bool wide = four_wide_rows(c.x) && four_wide_rows(c.x1) && four_wide_rows(c.x2) && four_wide_rows(c.y) &&
                    four_wide_weights(c.weight, c.bias) && four_wide_state(c.state) &&
                    four_wide_state(q.final_states.states);
  if (wide && is_step<T>(call)) return launch_step<T>(call);
  const int64_t vectors = wide ? c.channels() / 4 : c.channels();
  q.head_tiles = static_cast<unsigned>(divide_up(vectors, kThreads));
  q.heads = static_cast<unsigned>(c.sequences()) * q.head_tiles;
  q.body_tiles = static_cast<unsigned>(divide_up(vectors, 32));
  // Without cu_seqlens, heads may be all there is to do.
  const int64_t tokens = present(c.cu_seqlens) || c.x.shape[1] >= c.width() ? c.tokens() : 0;
  const int64_t full = int64_t{kFullSm} * multiprocessors(call.exec.device_id);
  q.run = kGroup * static_cast<unsigned>(std::clamp<int64_t>(tokens * q.body_tiles / (full * kGroup), 1, kMaxGroups));
  const unsigned blocks = q.heads + static_cast<unsigned>(divide_up(divide_up(tokens, q.run) * q.body_tiles, kWarps));
  if (blocks == 0) return;
  wide ? launch<conv_kernel<T, 4>>(call.exec, dim3(blocks), kThreads, 0, q)
       : launch<conv_kernel<T, 1>>(call.exec, dim3(blocks), kThreads, 0, q);
}

}  // namespace

const char* convolution_why_not(const ConvDims& d) {
  const int64_t heads = d.N * divide_up(d.D, kThreads), bodies = divide_up(d.B * d.T, kGroup) * divide_up(d.D, 32);
  return std::max(d.B * d.T, heads + bodies) < int64_t{1} << 31 ? nullptr : "takes at most 2^31 tokens, or warps";
}

const char* conv_why_not(const ConvProblem& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (p.N * Checkpoints::most(p) * divide_up(p.D, kThreads) > INT32_MAX) return "keeps at most 2^31 checkpoints";
  return convolution_why_not(p);
}

void launch_convolution(const ConvCall& call) {
  switch (call.conv.x.dtype) {
    case KDA_F32: return launch_rows<float>(call);
    case KDA_BF16: return launch_rows<__nv_bfloat16>(call);
    default: return launch_rows<__half>(call);
  }
}

void conv(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  launch_checkpoints(p);
  launch_convolution(
      {a.exec,
       conv_of(p),
       {a.final_state, {count_slots_of(a.final_state), index_of(a.out_state_indices), a.first_valid_slot}}});
}

}  // namespace kda::cuda
