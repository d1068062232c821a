// What the convolution and its gradients share (math.md 7.6): rows of tokens and of states, weights, and
//   y_t = bias + sum_j w_j xx_(t+j),  j = 0 .. W-1                        xx = state ++ x
// Channels are the vector dimension. The last W - 1 rows are kept in f32. Every y comes from conv_at(), in one order
// for all callers.
#if defined(KDA_CPU_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_CONV_INL_H_
#undef KDA_CPU_CONV_INL_H_
#else
#define KDA_CPU_CONV_INL_H_
#endif

#include "contract/conv.h"
#include "cpu/conv_tiles.h"
#include "cpu/simd-inl.h"

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
inline void to_columns(int64_t K, const float (*rows)[kPitch], int64_t first, int64_t n, float* columns) {
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
  const kda_tensor& x = c.rows_of(c0);
  float* of_slot[kMaxConvWidth - 1] = {};
  for (int64_t j = 0; j < keep; ++j) {
    const int64_t row = rows.at[kMaxConvWidth - keep + j];
    if (row >= keep) load_row(x.dtype, token_row(x, s, row - keep, c0), n, past[j]);
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
inline int64_t sequence_of(const Conv& c, int64_t token) {
  return present(c.cu_seqlens) ? c.packed_sequence_of(token) : token / c.x.shape[1];
}

inline void zero_tokens(const kda_tensor& y, const Sequence& s, int64_t a, int64_t b, int64_t c0, int64_t n) {
  for (int64_t t = a; t < b; ++t) std::memset(token_row(y, s, t, c0), 0, n * dtype_size(y.dtype));
}

inline void zero_block(const kda_tensor& y, int64_t first, int64_t end, int64_t c0, int64_t n) {
  zero_tokens(y, {0, 0, 0, y.shape[1], 0, true, false}, first, end, c0, n);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
