// The scales of columns, also called units: powers of two that keep columns of v and S in the range of fp16.
//
// Operands are fp16, which has 11 bits where bf16 has 8, but whose numbers end at 65504 and thin out below 2^-14. All
// is linear in a column of (v, S), so the consumer works on a column in units of a power of 2^16, from 2^-112 to
// 2^112. Where a unit is chosen, it keeps the larger of |S| and |v| between 2^-9 and 2^7. It is chosen every 64
// tokens, by these numbers alone (so that a call may be split there), and in between when a v is too large. With |k|
// <= 1 and beta <= 2, |S| and |U| stay below 2^7 (sqrt(128) + 64 * 2) 2 < 2^16 until the next choice. Precision is
// that of fp16 down to 2^-5 of the largest |S|.
#pragma once
#include "cuda/engine/state_io.h"

namespace kda::cuda::engine {

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
template <class T>
__device__ Pair<T> pair_of(unsigned x) {
  return reinterpret_cast<const Pair<T>&>(x);
}
template <class T>
__device__ float2 floats_of(unsigned x) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(pair_of<T>(x));
  else return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
// Returns the largest magnitudes: one of the lower numbers of all pairs, one of the upper ones. kNaN: NaN if there is
// one.
template <class T, bool kNaN, unsigned kCount>
__device__ Pair<T> largest(const unsigned (&x)[kCount]) {
  unsigned even = x[0], odd = x[1];
#pragma unroll
  for (unsigned i = 2; i < kCount; i += 2)
    even = ptx::larger<T, kNaN>(even, x[i]), odd = ptx::larger<T, kNaN>(odd, x[i + 1]);
  return pair_of<T>(ptx::larger<T, kNaN>(even, odd) & 0x7fff7fff);
}

// Chooses and checks the scales of a thread's columns. kValues: if false, v is 0, whatever is in the stage. kReversed:
// the state is dS, v is dO and counts times the call's scale, and chunks come from the last to the first.
template <class T, bool kTraining, bool kValues, bool kReversed>
class ColumnScale : public StateIo<kTraining, order_of(kTraining, kReversed)> {
  using Base = StateIo<kTraining, order_of(kTraining, kReversed)>;

 protected:
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_, Base::column, Base::first_column, Base::values;
  static constexpr unsigned kBarrier = NamedBarrier::kConsumer + !kValues;
  // What fits() looks at: v as given or, reversed, as the operand in units that it becomes.
  using Operand = std::conditional_t<kReversed, __half, T>;

  __device__ ColumnScale(const Call& call, unsigned memory) : Base(call, memory) { set_bad(0); }

  // 1 / unit, for a power of two.
  __device__ static float inverse(float unit) { return __uint_as_float(0x7f000000u - __float_as_uint(unit)); }
  static constexpr int kMostUnit = 112;  // the largest exponent
  __device__ static float power(int exponent) { return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23); }
  static constexpr int kNoExponent = -1000, kNotFinite = 128;
  // The exponent of x >= 0, rounded to fp16 as operands are; of 0 kNoExponent.
  __device__ static int exponent_of(float x) {
    unsigned bits = __float_as_uint(x);
    bits += 0xfff + (bits >> 13 & 1);
    return x == 0 ? kNoExponent : static_cast<int>(bits >> 23) - 127;
  }
  // Chooses the units of the thread's columns, and changes S_ accordingly. Exponents of v and of S_ meet as integers:
  // in units of 2^-112, which are those of a column of zeros, a v may be too large for f32.
  __device__ void choose_units(const unsigned (&v)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Pair<T> values = values_of<T>(v, i);
      float given = fmaxf(__low2float(values), __high2float(values)), most = 0;
      if constexpr (kReversed) given *= fabsf(call_.x.scale);
#pragma unroll
      for (int j = 0; j < 32; ++j) most = fmaxf(most, fabsf(S_[j / 2 * 4 + 2 * i + j % 2]));
      const int before = static_cast<int>(__float_as_uint(unit_[i]) >> 23) - 127;
      int exponent = max(exponent_of(most) + before, exponent_of(given));
      bool finite = exponent_of(most) < kNotFinite;
      for (const unsigned other : {1u, 2u}) {
        exponent = max(exponent, __shfl_xor_sync(kAll, exponent, other));
        finite = __shfl_xor_sync(kAll, unsigned{finite}, other) && finite;
      }
      if (!finite) continue;
      int unit = (exponent + 9 + 1024) / 16 * 16 - 1024;  // rounded down
      unit = max(min(unit, kMostUnit), -kMostUnit);
      unit_[i] = power(unit);
      const int half = (before - unit) / 2;  // a single factor may be out of range
      const float back[2] = {power(half), power(before - unit - half)};
#pragma unroll
      for (int j = 0; j < 32; ++j) S_[j / 2 * 4 + 2 * i + j % 2] *= back[0], S_[j / 2 * 4 + 2 * i + j % 2] *= back[1];
    }
  }

  // Packs S_ as operands.
  __device__ void pack(unsigned (&packed)[8][4]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) packed[i / 4][i % 4] = ptx::pack<__half>(S_[2 * i], S_[2 * i + 1]);
  }

  // Clears v of the warp's columns from a token on, as rows behind a sequence are of another one.
  __device__ void clear_values(unsigned stage, unsigned from) const {
    const unsigned piece = first_column() % 64 / 8 + lane_ % 2;
#pragma unroll 1
    for (unsigned token = from + lane_ / 2; token < kRows; token += 16)
      ptx::store_shared4(values(stage) + token * kRowBytes + ((piece ^ token % 8) << 4), make_uint4(0, 0, 0, 0));
    ptx::fence_shared_for_async();  // copies will overwrite them
    __syncwarp();                   // zeros are there
  }
  // Loads a chunk's v, transposed: the thread's columns, as operands.
  __device__ void load_values(unsigned stage, unsigned (&v)[2][4]) const {
    if constexpr (!kValues) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j / 4][j % 4] = 0;
      return;
    }
    const unsigned token = lane_ / 16 * 8 + lane_ % 8, piece = first_column() % 64 / 8 + lane_ / 8 % 2;
    const unsigned from = values(stage) + token * kRowBytes + ((piece ^ token % 8) << 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::load_transposed(v[j], from + j * 16 * kRowBytes);
  }
  // Makes dO times the scale, in units, of the dO of load_values().
  __device__ void scale_values(const unsigned (&v)[2][4], unsigned (&scaled)[2][4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = floats_of<T>(v[j / 4][j % 4]);
      const float scale = inverse(unit_[j % 2]) * call_.x.scale;
      scaled[j / 4][j % 4] = ptx::pack<__half>(two.x * scale, two.y * scale);
    }
  }
  // The largest magnitudes of v in the thread's column i; NaN if there is one.
  template <class Number>
  __device__ static Pair<Number> values_of(const unsigned (&v)[2][4], int i) {
    return largest<Number, true>({v[0][i], v[0][i + 2], v[1][i], v[1][i + 2]});
  }
  // Are these magnitudes below so many units? (Zeros are.)
  __device__ bool are_below(const Pair<Operand>& values, int i, float units) const {
    if constexpr (!kValues) return true;
    float limit = kReversed ? units : units * unit_[i];
    if constexpr (std::is_same_v<T, __half>) limit = fmaxf(limit, 0x1p-24f);  // the smallest number of fp16
    const unsigned two = ptx::pack<Operand>(limit, limit);
    return __hblt2(values, pair_of<Operand>(two));
  }
  // Do the units fit S_, packed, and v, and is no v infinite or NaN? v: as operands (Operand). first: at a multiple of
  // 64 tokens; elsewhere only v is checked.
  __device__ bool fits(const unsigned (&packed)[8][4], const unsigned (&v)[2][4], bool first) const {
    const Pair<Operand> values[2] = {values_of<Operand>(v, 0), values_of<Operand>(v, 1)};
    bool fits = are_below(values[0], 0, 0x1p7f) & are_below(values[1], 1, 0x1p7f);
    if (!first) return fits;
    const __half2 most = __float2half2_rn(0x1p7f), least = __float2half2_rn(0x1p-9f);
    const auto largest_of = [&](int i) {
      unsigned S[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) S[j] = packed[j / 2][j % 2 * 2 + i];
      return largest<__half, false>(S);
    };
    // Both come before the votes, so that neither chain waits for one.
    const __half2 both[2] = {largest_of(0), largest_of(1)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The four lanes of a column together must reach 2^-9, unless there are no smaller units.
      unsigned reached = __ballot_sync(
          kAll, !(__hbltu2(both[i], least) & are_below(values[i], i, 0x1p-9f)) | (unit_[i] <= power(-kMostUnit)));
      reached |= reached >> 1, reached |= reached >> 2;
      fits = fits & __hbltu2(both[i], most) & (reached & 0x11111111) == 0x11111111;
    }
    return fits;
  }

  // Do the units fit in all warps? They make each product together, so all must know whether one of them has to go
  // back. Then the state is what it was. again: they fit.
  __device__ __forceinline__ bool vote(const unsigned (&packed)[8][4], const unsigned (&v)[2][4], bool first,
                                       bool again) const {
    const bool fine = ptx::all_threads(kBarrier, kGroup, again || fits(packed, v, first));
    ptx::wait_for_products<0>();
    return fine;
  }

  // Prepares a chunk for which units did not fit: chooses others if they are needed, and puts zeros in place of v
  // that is not finite. 0 times such a v is not 0: it would show in all tokens of the column, also in those that the
  // scan reaches before it. spoil() comes after the chunk.
  __device__ void prepare(unsigned stage, bool first) {
    unsigned v[2][4], bad[2] = {kNoBad, kNoBad};  // for each column: the bad token that the scan reaches first
    load_values(stage, v);
    __syncwarp();  // all lanes have read what others overwrite
#pragma unroll
    for (unsigned j = 0; kValues && j < 16; ++j) {
      const Pair<T> two = pair_of<T>(v[j / 8][j / 2 % 4]);
      const float y = j % 2 ? __high2float(two) : __low2float(two);
      if (y - y == 0) continue;
      const unsigned i = j / 2 % 2, token = j / 4 * 8 + lane_ % 4 * 2 + j % 2, piece = column(i) % 64 / 8;
      bad[i] = earlier(bad[i], kReversed ? token + 1 : token);
      ptx::store_shared16(values(stage) + token * kRowBytes + ((piece ^ token % 8) << 4) + column(i) % 8 * 2, 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      bad[i] = earlier(bad[i], __shfl_xor_sync(kAll, bad[i], 1)),
      bad[i] = earlier(bad[i], __shfl_xor_sync(kAll, bad[i], 2));
    ptx::fence_shared_for_async();  // copies will overwrite them
    __syncwarp();                   // zeros are there
    load_values(stage, v);
    unsigned packed[8][4];
    pack(packed);
    unsigned scaled[2][4];
    if (kReversed) scale_values(v, scaled);
    if (!__all_sync(kAll, fits(packed, kReversed ? scaled : v, first))) choose_units(v);
    set_bad(1u << 15 | bad[1] << 8 | bad[0]);
  }
  // Makes outputs and the state NaN from the first token on whose v was not finite.
  __device__ void spoil(unsigned (&out)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned from = bad() >> 8 * i & 0x7f;
      const auto spoilt = [&](unsigned token) { return kReversed ? token < from : token >= from; };
#pragma unroll
      for (unsigned j = i; j < 8; j += 2) {
        const unsigned token = j / 2 * 8 + lane_ % 4 * 2;
        if (spoilt(kReversed ? token + 1 : token)) out[j / 4][j % 4] = 0x7fff7fff;
        else if (spoilt(kReversed ? token : token + 1)) out[j / 4][j % 4] |= kReversed ? 0x7fff : 0x7fff0000;
      }
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (from != kNoBad) S_[j / 2 * 4 + 2 * i + j % 2] = __int_as_float(0x7fffffff);
    }
    set_bad(0);
  }

  // For a chunk that needed prepare(): the first token that was not finite in each of the thread's columns or,
  // reversed, the token behind the last one, a byte each; and bit 15. Otherwise 0.
  __device__ unsigned bad() const { return ptx::load_shared16(ring_.memory + Shared::bad_values + ptx::thread() * 2); }
  __device__ void set_bad(unsigned x) const {
    ptx::store_shared16(ring_.memory + Shared::bad_values + ptx::thread() * 2, static_cast<unsigned short>(x));
  }
  __device__ bool prepared() const { return bad(); }
  static constexpr unsigned kNoBad = kReversed ? 0 : kRows;  // no such token
  __device__ static unsigned earlier(unsigned a, unsigned b) { return kReversed ? max(a, b) : min(a, b); }
};

}  // namespace kda::cuda::engine
