// The causal convolution (math.md 7.6), in front of decode, verify and flush, too:
//   y_t = bias + sum_j w_j xx_(t+j),  j = 0 .. W-1,  then z_t = y_t sigmoid(y_t)        xx = state ++ x
// A task is a block of tokens (of all sequences, one after the other) and a tile of channels.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/conv.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/conv-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Convolves G tokens after `past`, which moves on by them. One token at a time would be bound by loads, of its taps
// and their inputs.
template <int W, int kDtype, int G>
void conv_step(const Conv& c, const Taps& taps, const Sequence& s, int64_t t, int64_t c0, int64_t n, Past& past) {
  constexpr int64_t kSize = dtype_size(kDtype);
  const char* x[G];
  char* y[G];
  for (int g = 0; g < G; ++g) x[g] = token_row(c.rows_of(c0), s, t + g, c0), y[g] = token_row(c.y, s, t + g, c0);
  for_vectors(n, [&](int64_t i, auto whole, int64_t count) {
    Vec xx[W - 1 + G];
    for (int j = 0; j < W - 1; ++j) xx[j] = load(past[j] + i);
    for (int g = 0; g < G; ++g) xx[W - 1 + g] = load_some<kDtype>(whole, x[g] + i * kSize, count);
    for (int g = 0; g < G; ++g) {
      const Vec v = conv_at<W>(taps, xx + g, i);
      store_some<kDtype>(whole, c.silu ? silu(v) : v, y[g] + i * kSize, count);
    }
    for (int j = 0; j < W - 1; ++j) store(xx[G + j], past[j] + i);
  });
}

// Convolves tokens a .. b-1 of a sequence.
template <int W, int kDtype>
void conv_tokens(const Conv& c, const Taps& taps, const Sequence& s, int64_t a, int64_t b, int64_t c0, int64_t n) {
  alignas(64) Past past;
  if (present(c.parents)) {  // few tokens, so each loads its own ancestors
    for (int64_t t = a; t < b; ++t) {
      load_past(c, s, row_before(c.parents, W - 1, s.n, t + W - 1), c0, n, past);
      conv_step<W, kDtype, 1>(c, taps, s, t, c0, n, past);
    }
    return;
  }
  load_past(c, s, a + W - 2, c0, n, past);
  int64_t t = a;
  for (; t + kGroup <= b; t += kGroup) {
    for (int64_t g = 0; g < kGroup; ++g) prefetch_token(c.rows_of(c0), s, t + kGroup + g, c0, n);
    conv_step<W, kDtype, kGroup>(c, taps, s, t, c0, n, past);
  }
  for (; t < b; ++t) conv_step<W, kDtype, 1>(c, taps, s, t, c0, n, past);
}

// Convolves channels c0 .. c0+n-1 of tokens first .. end-1.
void conv_block(const Conv& c, int64_t first, int64_t end, int64_t c0, int64_t n) {
  Taps taps;
  taps.load(c, c0, n);
  with_types(c, [&](auto W, auto dtype) {
    for (ConvPieces i(c, first, end, sequence_of(c, first)); i.next();)
      if (i.s.live) conv_tokens<W, dtype>(c, taps, i.s, i.a, i.b, c0, n);
      else zero_tokens(c.y, i.s, i.a, i.b, c0, n);
  });
}

// Stores the rows of xx that end with row `last` in slot `slot` of `to`. That may be the slot that xx begins with.
void conv_roll_tile(const Conv& c, const Sequence& s, int64_t last, const kda_tensor& to, int64_t slot, int64_t c0,
                    int64_t n) {
  alignas(64) Past rows;
  load_past(c, s, last, c0, n, rows);
  store_slot(to, rows, slot, c0, n);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"

namespace kda::cpu {
namespace {

// Computes y of all tokens. Rows of y that belong to no sequence are zeroed.
void run(const Conv& c, const kda_exec& exec) {
  const int64_t blocks = divide_up(c.tokens(), kConvBlock), end = c.end();
  const auto block_fn = KDA_ISA_CALL(conv_block);
  const auto zero_fn = KDA_ISA_CALL(zero_block);
  for_tiles(c, blocks, threads_of(c, exec, blocks * tiles_of(c), c.tokens()), [&](int64_t i, int64_t c0, int64_t n) {
    const int64_t first = i * kConvBlock, stop = std::min(c.tokens(), first + kConvBlock);
    if (first < end) block_fn(c, first, std::min(stop, end), c0, n);
    if (stop > end) zero_fn(c.y, std::max(first, end), stop, c0, n);
  });
}

}  // namespace

void conv(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  const Conv c = conv_of(p);
  run(c, a.exec);
  const auto roll = KDA_ISA_CALL(conv_roll_tile);
  // Before the final states, which may take the place of the initial ones that checkpoints begin with.
  if (present(a.checkpoints))
    for_tiles(c, p.N, threads_of(c, a.exec, p.N * tiles_of(c), p.N * p.W), [&](int64_t i, int64_t c0, int64_t n) {
      const Sequence s = c.sequence(i);
      const CheckpointPlaces places = checkpoint_places(a.checkpoint_offset, a.checkpoint_every, i);
      for (int64_t m = 0; s.live && m < a.checkpoint_slots.shape[1] && places.place(m) <= s.length; ++m) {
        const int64_t row = checkpoint_row(a.checkpoint_slots, a.first_valid_slot, a.checkpoints.shape[0], i, m);
        if (row >= 0) roll(c, s, places.place(m) + p.W - 2, a.checkpoints, row, c0, n);
      }
    });
  if (!present(a.final_state)) return;
  // After all outputs, because final_state may be the initial state that they read.
  for_tiles(c, p.N, threads_of(c, a.exec, p.N * tiles_of(c), p.N * p.W), [&](int64_t i, int64_t c0, int64_t n) {
    const Sequence s = c.sequence(i);
    const int64_t slot =
        final_row(index_of(a.out_state_indices), a.first_valid_slot, a.final_state.shape[0], s.n, s.slot);
    if (s.live && slot >= 0) roll(c, s, s.length + p.W - 2, a.final_state, slot, c0, n);
  });
}

// ---- in front of decode, verify and flush ----

uint64_t conv_front_bytes(const kda_conv_inputs& in) {
  return align_up(in.x.shape[0] * in.x.shape[1] * in.x.shape[2] * dtype_size(in.x.dtype));
}

kda_tensor conv_front_output(const kda_conv_inputs& in, void* memory) {
  kda_tensor z = in.x;
  z.data = memory;
  z.stride[2] = 1, z.stride[1] = z.shape[2], z.stride[0] = z.shape[1] * z.shape[2];
  return z;
}

void conv_front(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& parents, const kda_tensor& z,
                const kda_exec& exec) {
  run(conv_of(in, cu_seqlens, parents, z), exec);
}

void conv_roll(const kda_tensor& state, int64_t slot, const kda_tensor& x, const kda_tensor& parents, int64_t n,
               int64_t b, int64_t t0, int64_t m) {
  m = std::min(m, x.shape[1] - t0);
  if (m <= 0 || slot < 0 || slot >= state.shape[0]) return;
  Conv c{};
  c.x = x, c.state = state, c.parents = parents;
  c.weight.ndim = 2, c.weight.shape[0] = x.shape[2], c.weight.shape[1] = state.shape[2] + 1;
  const Sequence s{n, b, t0, m, slot, true, true};
  const auto roll = KDA_ISA_CALL(conv_roll_tile);
  for (int64_t c0 = 0; c0 < c.channels(); c0 += kConvTile)
    roll(c, s, m - 1 + state.shape[2], state, slot, c0, std::min(kConvTile, c.channels() - c0));
}

}  // namespace kda::cpu
#endif
