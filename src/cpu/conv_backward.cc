// Gradients of the causal convolution (math.md 7.6):
//   dy_t <- dz_t silu'(y_t),  dxx_i = sum_j w_j dy_(i-j),  dw_j = sum_t dy_t xx_(t+j),  dbias = sum_t dy_t
// Sums over tokens have two levels as in gate.cc: blocks depend on shapes only, and are added in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/conv_backward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/conv-inl.h"
// clang-format on

#ifndef KDA_CPU_CONV_GRADIENTS
#define KDA_CPU_CONV_GRADIENTS
namespace kda::cpu {
constexpr int64_t kSumsBytes = (kMaxConvWidth + 1) * (kConvTile + 16) * sizeof(float);  // a task's dweight and dbias

struct ConvGradients {
  Conv conv;
  kda_tensor dy, d_final, dx, d_initial;
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Sums over the tokens of a block: dw_j, then dbias.
using Sums = float[kMaxConvWidth + 1][kPitch];

// For G tokens: computes dy_t silu'(y_t) from rows x and dy, adds their shares to the sums if there are any, and
// writes dxx_t of each to `out` if that is not null. in_past and dy_past, the rows before the tokens, move on.
template <int W, int kDtype, int kOut, int G>
void backward_step(const Taps& taps, bool with_silu, int64_t n, const char* const (&x)[G], const char* const (&dy)[G],
                   char* const (&out)[G], Past& in_past, Past& dy_past, Sums* sums) {
  constexpr int64_t kSize = dtype_size(kDtype), kOutSize = dtype_size(kOut);
  for_vectors(n, [&](int64_t i, auto whole, int64_t count) {
    Vec xx[W - 1 + G], d[W - 1 + G];
    for (int j = 0; j < W - 1; ++j) xx[j] = load(in_past[j] + i), d[j] = load(dy_past[j] + i);
    for (int g = 0; g < G; ++g) {
      xx[W - 1 + g] = load_some<kDtype>(whole, x[g] + i * kSize, count);
      d[W - 1 + g] = load_some<kDtype>(whole, dy[g] + i * kSize, count);
      if (with_silu) d[W - 1 + g] = hn::Mul(d[W - 1 + g], silu_slope(conv_at<W>(taps, xx + g, i)));
    }
    for (int j = 0; j < W - 1; ++j) store(xx[G + j], in_past[j] + i), store(d[G + j], dy_past[j] + i);
    for (int j = 0; sums && j < W; ++j) {
      Vec sum = load((*sums)[j] + i);
      for (int g = 0; g < G; ++g) sum = hn::MulAdd(d[W - 1 + g], xx[g + j], sum);
      store(sum, (*sums)[j] + i);
    }
    if (sums) {
      Vec sum = load((*sums)[W] + i);
      for (int g = 0; g < G; ++g) sum = hn::Add(d[W - 1 + g], sum);
      store(sum, (*sums)[W] + i);
    }
    for (int g = 0; out[0] && g < G; ++g) {
      Vec dxx = hn::Zero(kF32);
      for (int j = 0; j < W; ++j) dxx = hn::MulAdd(load(taps.w[j] + i), d[W - 1 + g - j], dxx);
      store_some<kOut>(whole, dxx, out[g] + i * kOutSize, count);
    }
  });
}

// Gradients of tokens a .. b-1 of a sequence. dxx_i needs dy up to i, so dx of the last tokens needs dy of W-1 more.
// The block with a sequence's first token also computes its d_initial: rows 0 .. W-2 of dxx.
template <int W, int kDtype>
void backward_tokens(const ConvGradients& g, const Taps& taps, const Sequence& s, int64_t a, int64_t b, int64_t c0,
                     int64_t n, Sums* sums) {
  const Conv& c = g.conv;
  const kda_tensor& rows = c.rows_of(c0);
  alignas(64) static constexpr char kZeros[kConvTile * sizeof(float)] = {};
  alignas(64) Past in_past, dy_past = {};
  alignas(64) float dxx[kPitch];
  load_past(c, s, a + W - 2, c0, n, in_past);

  // Computes row t of dxx at the edges. The row is a part of d_initial, or d_final is added to it, or it is another
  // block's.
  const auto edge = [&](int64_t t) {
    const bool inside = t < s.length, state = t < W - 1;
    const bool wanted = state ? a == 0 && present(g.d_initial) : t >= a + W - 1 && present(g.dx);
    const char* x[1] = {inside ? token_row(rows, s, t, c0) : kZeros};
    const char* dy[1] = {inside ? token_row(g.dy, s, t, c0) : kZeros};
    char* const out[1] = {wanted ? reinterpret_cast<char*>(dxx) : nullptr};
    backward_step<W, kDtype, KDA_F32, 1>(taps, c.silu, n, x, dy, out, in_past, dy_past, t < b ? sums : nullptr);
    if (!wanted) return;
    if (!inside && present(g.d_final)) {
      for_pieces(n, [&](int64_t i, int64_t count) {  // in pieces, for the stack of small threads
        alignas(64) float piece[kPiece];
        load_entry(g.d_final, s.n, c0 + i, count, t - s.length, piece);
        for (int64_t j = 0; j < count; j += lanes()) store(hn::Add(load(dxx + i + j), load(piece + j)), dxx + i + j);
      });
    }
    if (state) store_entry(g.d_initial, dxx, s.n, c0, n, t);
    else store_row(kDtype, dxx, n, token_row(g.dx, s, t - (W - 1), c0));
  };

  int64_t t = a;
  for (; t < std::min(b, a + W - 1); ++t) edge(t);
  for (; t + kGroup <= b; t += kGroup) {
    const char *x[kGroup], *dy[kGroup];
    char* out[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) {
      prefetch_token(rows, s, t + kGroup + i, c0, n);
      prefetch_token(g.dy, s, t + kGroup + i, c0, n);
      x[i] = token_row(rows, s, t + i, c0), dy[i] = token_row(g.dy, s, t + i, c0);
      out[i] = present(g.dx) ? token_row(g.dx, s, t + i - (W - 1), c0) : nullptr;
    }
    backward_step<W, kDtype, kDtype, kGroup>(taps, c.silu, n, x, dy, out, in_past, dy_past, sums);
  }
  for (; t < b; ++t) edge(t);
  if (present(g.dx) || present(g.d_initial))
    for (; t < b + W - 1; ++t) edge(t);
}

// `sums` is null or receives W + 1 rows of n, for which `memory` has kSumsBytes.
void conv_backward_block(const ConvGradients& g, int64_t first, int64_t end, int64_t c0, int64_t n, float* sums,
                         int64_t sums_pitch, void* memory) {
  static_assert(sizeof(Sums) == kSumsBytes);
  Taps taps;
  taps.load(g.conv, c0, n);
  auto* const block = sums ? static_cast<Sums*>(memory) : nullptr;
  if (sums) std::memset(block, 0, sizeof(Sums));
  with_types(g.conv, [&](auto W, auto dtype) {
    for (ConvPieces i(g.conv, first, end, sequence_of(g.conv, first)); i.next();)
      backward_tokens<W, dtype>(g, taps, i.s, i.a, i.b, c0, n, block);
  });
  for (int64_t j = 0; sums && j <= g.conv.width(); ++j)
    std::memcpy(sums + j * sums_pitch, (*block)[j], n * sizeof(float));
}

// Passes the gradient of the state through, for a sequence without tokens.
void conv_backward_empty(const ConvGradients& g, int64_t n, int64_t c0, int64_t channels) {
  alignas(64) float row[kConvTile];
  for (int64_t i = 0; i < g.conv.width() - 1; ++i) {
    zero(row, padded(channels));
    if (present(g.d_final)) load_entry(g.d_final, n, c0, channels, i, row);
    store_entry(g.d_initial, row, n, c0, channels, i);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"

namespace kda::cpu {
namespace {

constexpr int64_t kMaxBlocks = 256;  // of sums

// The tokens of a block of sums: a function of the shapes alone.
int64_t block_tokens(const ConvDims& d) { return divide_up(divide_up(d.B * d.T, kMaxBlocks), kConvBlock) * kConvBlock; }
bool wants_sums(const kda_conv_backward_args& a) { return present(a.dweight) || present(a.dbias); }
int64_t blocks_of(const ConvDims& d) { return d.B * d.T > 0 ? divide_up(d.B * d.T, block_tokens(d)) : 0; }

// Shared: the sums of all blocks. Per thread: those of the block at hand.
Workspace plan(const ConvBackwardProblem& p) {
  if (!wants_sums(p.args)) return {0, 0};
  return {blocks_of(p) * (p.W + 1) * p.D * sizeof(float), kSumsBytes};
}
int64_t tasks_of(const ConvBackwardProblem& p) {
  const Conv c = conv_of(p);
  return std::min(blocks_of(p) * tiles_of(c), 2 * c.tokens() * c.channels() / 16384 + 1);
}

}  // namespace

uint64_t conv_backward_workspace(const ConvBackwardProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p)));
}

void conv_backward(const ConvBackwardProblem& p) {
  const kda_conv_backward_args& a = p.args;
  const ConvGradients g{conv_of(p), a.dy, a.d_final_state, a.dx, a.d_initial_state};
  const Conv& c = g.conv;
  const int64_t tokens = c.tokens(), end = c.end(), blocks = blocks_of(p), each = block_tokens(p);
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(a.exec, tasks_of(p));
  float* sums = wants_sums(a) ? static_cast<float*>(a.exec.workspace) : nullptr;
  const auto block_fn = KDA_ISA_CALL(conv_backward_block);
  const auto zero_fn = KDA_ISA_CALL(zero_block);
  const auto empty_fn = KDA_ISA_CALL(conv_backward_empty);
  for_tiles(c, blocks, threads, [&](int64_t i, int64_t c0, int64_t n, int thread) {
    const int64_t first = i * each, stop = std::min(tokens, first + each);
    block_fn(g, first, std::min(stop, std::max(first, end)), c0, n, sums ? sums + i * (p.W + 1) * p.D + c0 : nullptr,
             p.D, workspace.of_thread(a.exec, thread));
    if (stop > end && present(a.dx)) zero_fn(a.dx, std::max(first, end), stop, c0, n);
  });
  if (present(a.d_initial_state))
    for_tiles(c, p.N, 1, [&](int64_t i, int64_t c0, int64_t n) {
      if (c.sequence(i).length == 0) empty_fn(g, i, c0, n);
    });
  if (!wants_sums(a)) return;
  for_tiles(c, p.W + 1, std::min<int64_t>(threads, blocks), [&](int64_t j, int64_t c0, int64_t n) {
    const kda_tensor& out = j < p.W ? a.dweight : a.dbias;
    if (!present(out)) return;
    float* total = blocks ? sums + j * p.D + c0 : nullptr;  // block 0's
    for (int64_t i = 1; i < blocks; ++i)
      for (int64_t k = 0; k < n; ++k) total[k] += total[i * (p.W + 1) * p.D + k];
    for (int64_t k = 0; k < n; ++k)
      static_cast<float*>(out.data)[(c0 + k) * out.stride[0] + (j < p.W ? j : 0)] = blocks ? total[k] : 0;
  });
}

}  // namespace kda::cpu
#endif
