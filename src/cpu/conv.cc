// The causal convolution (math.md 7.6), forward and backward:
//   y_t = bias + sum_j w_j xx_(t+j),  j = 0 .. W-1,  then z_t = y_t sigmoid(y_t)        xx = state ++ x
//   dy_t <- dz_t silu'(y_t),  dxx_i = sum_j w_j dy_(i-j),  dw_j = sum_t dy_t xx_(t+j),  dbias = sum_t dy_t
// Channels are the vector dimension. A task is a block of tokens (of all sequences, one after the other) and a tile
// of channels. The last W - 1 rows are kept in f32. Every y comes from conv_at(), in one order for all callers. Sums
// over tokens have two levels as in gate.cc: blocks depend on shapes only, and are added in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/conv.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/simd-inl.h"
// clang-format on
#include "convolution.h"

#ifndef KDA_CPU_CONV_GRADIENTS
#define KDA_CPU_CONV_GRADIENTS
namespace kda::cpu {
constexpr int64_t kConvTile = 512;  // channels of a task: its rows and weights stay in L1
constexpr int64_t kSumsBytes = (kMaxConvWidth + 1) * (kConvTile + 16) * sizeof(float);  // a task's dweight and dbias

struct ConvGradients {
  Conv conv;
  kda_tensor dy, d_final, dx, d_initial;
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

constexpr int kGroup = 4;                     // tokens taken together
constexpr int64_t kPitch = pitch(kConvTile);  // between rows of scratch

// Move n elements that lie `stride` apart to and from f32.
template <class T, class F>
HWY_INLINE void gather(const T* p, int64_t stride, int64_t n, float* row, F to_float) {
  for (int64_t i = 0; i < n; ++i) row[i] = to_float(p[i * stride]);
}
template <class T, class F>
HWY_INLINE void scatter(const float* row, int64_t n, T* p, int64_t stride, F from_float) {
  for (int64_t i = 0; i < n; ++i) p[i * stride] = from_float(row[i]);
}

// Load and store channels c0 .. c0+n-1 of entry i of a slot of [slots,D,W-1], whatever its strides.
inline void load_entry(const kda_tensor& state, int64_t slot, int64_t c0, int64_t n, int64_t i, float* row) {
  const void* p = at(state, slot, c0, i);
  const int64_t stride = state.stride[1];
  if (stride == 1) return load_row(state.dtype, p, n, row);
  zero(row + n, padded(n) - n);
  switch (state.dtype) {
    case KDA_F32: return gather(static_cast<const float*>(p), stride, n, row, [](float x) { return x; });
    case KDA_BF16: return gather(static_cast<const uint16_t*>(p), stride, n, row, bf16_to_float);
    default: return gather(static_cast<const uint16_t*>(p), stride, n, row, f16_to_float);
  }
}
inline void store_entry(const kda_tensor& state, const float* row, int64_t slot, int64_t c0, int64_t n, int64_t i) {
  void* p = at(state, slot, c0, i);
  const int64_t stride = state.stride[1];
  if (stride == 1) return store_row(state.dtype, row, n, p);
  switch (state.dtype) {
    case KDA_F32: return scatter(row, n, static_cast<float*>(p), stride, [](float x) { return x; });
    case KDA_BF16: return scatter(row, n, static_cast<uint16_t*>(p), stride, float_to_bf16);
    default: return scatter(row, n, static_cast<uint16_t*>(p), stride, float_to_f16);
  }
}

HWY_INLINE char* token_row(const kda_tensor& t, const Sequence& s, int64_t token, int64_t c0) {
  return at(t, s.b, s.t0 + token) + c0 * dtype_size(t.dtype);
}
HWY_INLINE void prefetch_token(const kda_tensor& t, const Sequence& s, int64_t token, int64_t c0, int64_t n) {
  if (token >= s.length) return;
  const char* row = token_row(t, s, token, c0);
  for (int64_t i = 0; i < n * dtype_size(t.dtype); i += 64) __builtin_prefetch(row + i);
}

// columns[i][k], k < K <-> rows[k][i], i < n. Both sides have room for padded(n).
template <int K, int64_t kRow>
void to_rows(const float* columns, int64_t n, float (*rows)[kRow]) {
  for (int64_t i = 0; i < n; i += lanes()) {
    Vec v[4];
    if constexpr (K == 1) v[0] = load(columns + i);
    if constexpr (K == 2) hn::LoadInterleaved2(kF32, columns + i * K, v[0], v[1]);
    if constexpr (K == 3) hn::LoadInterleaved3(kF32, columns + i * K, v[0], v[1], v[2]);
    if constexpr (K == 4) hn::LoadInterleaved4(kF32, columns + i * K, v[0], v[1], v[2], v[3]);
    for (int k = 0; k < K; ++k) store(v[k], rows[k] + i);
  }
}
template <int64_t kRow>
void to_rows(int64_t K, float* columns, int64_t n, float (*rows)[kRow]) {
  zero(columns + n * K, (padded(n) - n) * K);
  switch (K) {
    case 1: return to_rows<1>(columns, n, rows);
    case 2: return to_rows<2>(columns, n, rows);
    case 3: return to_rows<3>(columns, n, rows);
    default: return to_rows<4>(columns, n, rows);
  }
}
void to_columns(int64_t K, const float (*rows)[kPitch], int64_t first, int64_t n, float* columns) {
  for (int64_t i = 0; i < n; i += lanes()) {
    const auto row = [&](int64_t k) { return load(rows[k] + first + i); };
    if (K == 1) store(row(0), columns + i);
    else if (K == 2) hn::StoreInterleaved2(row(0), row(1), kF32, columns + i * 2);
    else hn::StoreInterleaved3(row(0), row(1), row(2), kF32, columns + i * 3);
  }
}

// Calls f(first, channels) for pieces of a tile, so that what is transposed between rows and columns stays small on
// the stack.
constexpr int64_t kPiece = 64;
template <class F>
HWY_INLINE void for_pieces(int64_t n, const F& f) {
  for (int64_t i = 0; i < n; i += kPiece) f(i, std::min(kPiece, n - i));
}

// Move a slot of [slots,D,W-1] to and from rows, one row for each entry. Entries without a row are left out.
inline void load_slot(const kda_tensor& state, int64_t slot, int64_t c0, int64_t n,
                      float* const (&rows)[kMaxConvWidth - 1]) {
  const int64_t keep = state.shape[2];
  if (state.stride[1] != keep || state.stride[2] != 1) {
    for (int64_t i = 0; i < keep; ++i)
      if (rows[i]) load_entry(state, slot, c0, n, i, rows[i]);
    return;
  }
  for_pieces(n, [&](int64_t first, int64_t count) {
    alignas(64) float columns[kMaxConvWidth * kPiece], piece[kMaxConvWidth - 1][kPiece];
    load_row(state.dtype, at(state, slot, c0 + first), count * keep, columns);
    to_rows(keep, columns, count, piece);
    for (int64_t i = 0; i < keep; ++i)
      if (rows[i]) std::memcpy(rows[i] + first, piece[i], padded(count) * sizeof(float));
  });
}
inline void store_slot(const kda_tensor& state, const float (*rows)[kPitch], int64_t slot, int64_t c0, int64_t n) {
  const int64_t keep = state.shape[2];
  if (state.stride[1] != keep || state.stride[2] != 1) {
    for (int64_t i = 0; i < keep; ++i) store_entry(state, rows[i], slot, c0, n, i);
    return;
  }
  for_pieces(n, [&](int64_t first, int64_t count) {
    alignas(64) float columns[kMaxConvWidth * kPiece];
    to_columns(keep, rows, first, count, columns);
    store_row(state.dtype, columns, count * keep, at(state, slot, c0 + first));
  });
}

// The W - 1 rows before a token, in f32, oldest first.
using Past = float[kMaxConvWidth - 1][kPitch];

// Loads the W - 1 rows of xx that end with row `last`.
inline void load_past(const Conv& c, const Sequence& s, int64_t last, int64_t c0, int64_t n, Past& past) {
  const int64_t keep = c.width() - 1;
  const ConvRows rows = rows_until(c.parents, keep, s.n, last, keep);
  float* of_slot[kMaxConvWidth - 1] = {};
  for (int64_t j = 0; j < keep; ++j) {
    const int64_t row = rows.at[kMaxConvWidth - keep + j];
    if (row >= keep) load_row(c.x.dtype, token_row(c.x, s, row - keep, c0), n, past[j]);
    else if (s.initial) of_slot[row] = past[j];
    else zero(past[j], padded(n));
  }
  if (std::any_of(of_slot, of_slot + keep, [](const float* row) { return row != nullptr; }))
    load_slot(c.state, s.slot, c0, n, of_slot);
}

// The weights and bias of a tile, with one row of weights for each tap.
struct Taps {
  alignas(64) float w[kMaxConvWidth][kPitch], bias[kPitch];

  void load(const Conv& c, int64_t c0, int64_t n) {
    const int64_t W = c.width();
    for_pieces(n, [&](int64_t first, int64_t count) {
      alignas(64) float columns[kMaxConvWidth * kPiece], piece[kMaxConvWidth][kPiece];
      if (c.weight.stride[0] == W) {
        load_row(c.weight.dtype, at(c.weight, c0 + first), count * W, columns);
      } else {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t j = 0; j < W; ++j)
            columns[i * W + j] = load_scalar(c.weight.dtype, at(c.weight, c0 + first + i, j));
      }
      to_rows(W, columns, count, piece);
      for (int64_t j = 0; j < W; ++j) std::memcpy(w[j] + first, piece[j], padded(count) * sizeof(float));
    });
    if (present(c.bias)) cpu::HWY_NAMESPACE::load_row(c.bias.dtype, at(c.bias, c0), n, bias);
    else zero(bias, padded(n));
  }
};

// Calls f(first channel, whole?, channels) for the vectors of a row of n; the last may be a part of a vector.
template <class F>
HWY_INLINE void for_vectors(int64_t n, const F& f) {
  const int64_t N = lanes(), body = n / N * N;
  for (int64_t i = 0; i < body; i += N) f(i, std::true_type(), N);
  if (body < n) f(body, std::false_type(), n - body);
}
template <int kDtype, class Whole>
HWY_INLINE Vec load_some(Whole, const char* p, int64_t count) {
  if constexpr (Whole::value) return load_as<kDtype>(p);
  alignas(64) char part[64] = {};
  std::memcpy(part, p, count * dtype_size(kDtype));
  return load_as<kDtype>(part);
}
template <int kDtype, class Whole>
HWY_INLINE void store_some(Whole, Vec v, char* p, int64_t count) {
  if constexpr (Whole::value) return store_as<kDtype>(v, p);
  alignas(64) char part[64];
  store_as<kDtype>(v, part);
  std::memcpy(p, part, count * dtype_size(kDtype));
}

// sum_j w_j xx_j + bias.
template <int W>
HWY_INLINE Vec conv_at(const Taps& taps, const Vec* xx, int64_t i) {
  Vec y = load(taps.bias + i);
  for (int j = 0; j < W; ++j) y = hn::MulAdd(load(taps.w[j] + i), xx[j], y);
  return y;
}

// Convolves G tokens after `past`, which moves on by them. One token at a time would be bound by loads, of its taps
// and their inputs.
template <int W, int kDtype, int G>
void conv_step(const Conv& c, const Taps& taps, const Sequence& s, int64_t t, int64_t c0, int64_t n, Past& past) {
  constexpr int64_t kSize = dtype_size(kDtype);
  const char* x[G];
  char* y[G];
  for (int g = 0; g < G; ++g) x[g] = token_row(c.x, s, t + g, c0), y[g] = token_row(c.y, s, t + g, c0);
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
    for (int64_t g = 0; g < kGroup; ++g) prefetch_token(c.x, s, t + kGroup + g, c0, n);
    conv_step<W, kDtype, kGroup>(c, taps, s, t, c0, n, past);
  }
  for (; t < b; ++t) conv_step<W, kDtype, 1>(c, taps, s, t, c0, n, past);
}

// Calls f(W, dtype of x and y), with both as types.
template <class F>
void with_types(const Conv& c, const F& f) {
  const auto with_width = [&](auto W) {
    switch (c.x.dtype) {
      case KDA_F32: return f(W, std::integral_constant<int, KDA_F32>());
      case KDA_BF16: return f(W, std::integral_constant<int, KDA_BF16>());
      default: return f(W, std::integral_constant<int, KDA_F16>());
    }
  };
  switch (c.width()) {
    case 2: return with_width(std::integral_constant<int, 2>());
    case 3: return with_width(std::integral_constant<int, 3>());
    default: return with_width(std::integral_constant<int, 4>());
  }
}

// The sequence of a token, which is numbered among the tokens of all sequences.
int64_t sequence_of(const Conv& c, int64_t token) {
  return present(c.cu_seqlens) ? c.packed_sequence_of(token) : token / c.x.shape[1];
}

void zero_tokens(const kda_tensor& y, const Sequence& s, int64_t a, int64_t b, int64_t c0, int64_t n) {
  for (int64_t t = a; t < b; ++t) std::memset(token_row(y, s, t, c0), 0, n * dtype_size(y.dtype));
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

// ---- backward ----

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
  alignas(64) static constexpr char kZeros[kConvTile * sizeof(float)] = {};
  alignas(64) Past in_past, dy_past = {};
  alignas(64) float dxx[kPitch], d_state[kPitch];
  load_past(c, s, a + W - 2, c0, n, in_past);

  // Computes row t of dxx at the edges. The row is a part of d_initial, or d_final is added to it, or it is another
  // block's.
  const auto edge = [&](int64_t t) {
    const bool inside = t < s.length, state = t < W - 1;
    const bool wanted = state ? a == 0 && present(g.d_initial) : t >= a + W - 1 && present(g.dx);
    const char* x[1] = {inside ? token_row(c.x, s, t, c0) : kZeros};
    const char* dy[1] = {inside ? token_row(g.dy, s, t, c0) : kZeros};
    char* const out[1] = {wanted ? reinterpret_cast<char*>(dxx) : nullptr};
    backward_step<W, kDtype, KDA_F32, 1>(taps, c.silu, n, x, dy, out, in_past, dy_past, t < b ? sums : nullptr);
    if (!wanted) return;
    if (!inside && present(g.d_final)) {
      load_entry(g.d_final, s.n, c0, n, t - s.length, d_state);
      for (int64_t i = 0; i < n; i += lanes()) store(hn::Add(load(dxx + i), load(d_state + i)), dxx + i);
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
      prefetch_token(c.x, s, t + kGroup + i, c0, n);
      prefetch_token(g.dy, s, t + kGroup + i, c0, n);
      x[i] = token_row(c.x, s, t + i, c0), dy[i] = token_row(g.dy, s, t + i, c0);
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

void zero_block(const kda_tensor& y, int64_t first, int64_t end, int64_t c0, int64_t n) {
  zero_tokens(y, {0, 0, 0, y.shape[1], 0, true, false}, first, end, c0, n);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {

namespace {

constexpr int64_t kBlockTokens = 128;
constexpr int64_t kMaxBlocks = 256;  // of sums

int64_t tiles_of(const Conv& c) { return divide_up(c.channels(), kConvTile); }

// Small calls stay on one thread: starting a team costs more than the work on 16384 elements.
int wanted(const Conv& c, const kda_exec& exec, int64_t tasks, int64_t rows) {
  return wanted_threads(exec, std::min(tasks, rows * c.channels() / 16384 + 1));
}

// Calls f(n, first channel, channels) for every sequence and tile, with the thread as fourth argument if f takes it.
template <class F>
void for_tiles(const Conv& c, int64_t N, int threads, const F& f) {
  const int64_t tiles = tiles_of(c);
  parallel_for(N * tiles, threads, [&](int64_t task, int thread) {
    const int64_t c0 = task % tiles * kConvTile, n = std::min(kConvTile, c.channels() - c0);
    if constexpr (requires { f(task, c0, n, thread); }) f(task / tiles, c0, n, thread);
    else f(task / tiles, c0, n);
  });
}

// Computes y of all tokens. Rows of y that belong to no sequence are zeroed.
void run(const Conv& c, const kda_exec& exec) {
  const int64_t blocks = divide_up(c.tokens(), kBlockTokens), end = c.end();
  const auto block_fn = KDA_ISA_CALL(conv_block);
  const auto zero_fn = KDA_ISA_CALL(zero_block);
  for_tiles(c, blocks, wanted(c, exec, blocks * tiles_of(c), c.tokens()), [&](int64_t i, int64_t c0, int64_t n) {
    const int64_t first = i * kBlockTokens, stop = std::min(c.tokens(), first + kBlockTokens);
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
    for_tiles(c, p.N, wanted(c, a.exec, p.N * tiles_of(c), p.N * p.W), [&](int64_t i, int64_t c0, int64_t n) {
      const Sequence s = c.sequence(i);
      const CheckpointPlaces places = checkpoint_places(a.checkpoint_offset, a.checkpoint_every, i);
      for (int64_t m = 0; s.live && m < a.checkpoint_slots.shape[1] && places.place(m) <= s.length; ++m) {
        const int64_t row = checkpoint_row(a.checkpoint_slots, a.first_valid_slot, a.checkpoints.shape[0], i, m);
        if (row >= 0) roll(c, s, places.place(m) + p.W - 2, a.checkpoints, row, c0, n);
      }
    });
  if (!present(a.final_state)) return;
  // After all outputs, because final_state may be the initial state that they read.
  for_tiles(c, p.N, wanted(c, a.exec, p.N * tiles_of(c), p.N * p.W), [&](int64_t i, int64_t c0, int64_t n) {
    const Sequence s = c.sequence(i);
    const int64_t slot =
        final_row(index_of(a.out_state_indices), a.first_valid_slot, a.final_state.shape[0], s.n, s.slot);
    if (s.live && slot >= 0) roll(c, s, s.length + p.W - 2, a.final_state, slot, c0, n);
  });
}

namespace {

// The tokens of a block of sums: a function of the shapes alone.
int64_t block_tokens(const ConvDims& d) {
  return divide_up(divide_up(d.B * d.T, kMaxBlocks), kBlockTokens) * kBlockTokens;
}
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
  c.weight.ndim = 2, c.weight.shape[1] = state.shape[2] + 1;
  const Sequence s{n, b, t0, m, slot, true, true};
  const auto roll = KDA_ISA_CALL(conv_roll_tile);
  for (int64_t c0 = 0; c0 < c.channels(); c0 += kConvTile)
    roll(c, s, m - 1 + state.shape[2], state, slot, c0, std::min(kConvTile, c.channels() - c0));
}

}  // namespace kda::cpu
#endif
