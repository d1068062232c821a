// The scan: a warpgroup carries 64 value columns of a head's state from chunk to chunk, in registers.
//
// It works on transposes: S^T is 64 columns x 128 channels, and so every left operand is in registers, the right ones
// in a stage. The accumulators of 16 columns, rounded and packed in pairs, are the left operand of the next product.
//   [R^T | O^T] = S^T [kG; qG]^T     R^T = V^T - R^T
//   U^T = R^T (T diag(beta))^T       S^T = S^T diag(ell) + U^T kg       O^T += U^T Aqk^T
//
// Operands are fp16, which has 11 bits where bf16 has 8, but whose numbers end at 65504 and thin out below 2^-14. All
// is linear in a column of (v, S), so a column is worked on in units of a power of 2^16, from 2^-112 to 2^112, that
// keeps the larger of |S| and |v| between 2^-9 and 2^7 where it is chosen: every 64 tokens, by these numbers alone (so
// that a call may be split there), and in between when a v is too large. With |k| <= 1 and beta <= 2, |S| and |U| stay
// below 2^7 (sqrt(128) + 64 * 2) 2 < 2^16 until the next choice. Precision is that of fp16 down to 2^-5 of the largest
// |S|.
#pragma once
#include "cuda/sm90/tiles.h"

namespace kda::cuda::sm90 {

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
// Largest magnitudes of pairs, of lower and upper halves. kNaN: NaN if one is.
template <class T, bool kNaN, unsigned kCount>
__device__ Pair<T> largest(const unsigned (&x)[kCount]) {
  unsigned even = x[0], odd = x[1];
#pragma unroll
  for (unsigned i = 2; i < kCount; i += 2)
    even = ptx::larger<T, kNaN>(even, x[i]), odd = ptx::larger<T, kNaN>(odd, x[i + 1]);
  return pair_of<T>(ptx::larger<T, kNaN>(even, odd) & 0x7fff7fff);
}

// Of 64 columns: the pair's other block has the others. kValues: else v is 0, whatever is in the stage. kWarpsOfEach:
// for how many warps each one releases chunks of scan(). kTraining: states before chunks, or U, may be kept. (That code
// stands in the inner loop, so others have kernels without it.)
template <class T, bool kTraining, bool kValues = true, unsigned kWarpsOfEach = 1>
class Scan {
 public:
  __device__ Scan(const Call& call, unsigned memory)
      : call_(call),
        ring_{memory},
        warp_(uniform(threadIdx.x / 32 % kWarps) + ptx::rank() * kWarps),
        lane_(threadIdx.x % 32) {
    set_bad(0);
  }

  // Outputs of tokens of nobody's state.
  __device__ void zero_outputs(const Item& item, const Sequence& s, int64_t first, int64_t end) const {
    const View& o = call_.x.o;
    const unsigned v = first_column() + lane_ % 16;
    for (int64_t t = s.t0 + first + lane_ / 16; t < s.t0 + end; t += 2)
      store_element(o.at(static_cast<unsigned>(s.b), static_cast<unsigned>(t), item.hv) + v * sizeof(T),
                    call_.x.o_dtype, 0);
  }

 protected:
  static constexpr unsigned kWarps = 4;
  static constexpr unsigned kBarrier = kScannerBarrier + !kValues;
  // A state is stored while the first products run; in pairs in front of them, as ptxas makes products there wait for
  // each other (C7518).
  static constexpr bool kStoresUnderProducts = kTraining && kWarpsOfEach > 1;

  // Where the item's outputs and U of its first token, column 0, go: in shared memory for those who want it.
  struct Place {
    unsigned b, t0, hv;
  };

  struct Nothing {};
  // Tokens first .. end - 1 of an item, in chunks `number` and on of the ring. begun(): once, while the first products
  // run.
  __device__ __forceinline__ void scan(const Item& item, unsigned first, unsigned end, unsigned& number) {
    scan(item, first, end, number, Nothing{});
  }
  template <class Begun>
  __device__ __forceinline__ void scan(const Item& item, unsigned first, unsigned end, unsigned& number,
                                       const Begun& begun) {
    // What training's forward leaves behind is stored within the inner loop; other states are rare.
    const bool eights = kTraining && corrections_in_eights() && befores_in_eights();
    const bool keeps = call_.states.kept[kCheckpoint].data || (kTraining && call_.states.kept[kBefore].data && !eights);
    unsigned out[2][4];  // of the chunk before
    const unsigned begin =
        first - number * kRows;  // where chunk 0 would be: what follows from a chunk's number is uniform
    // What is rare stays out of the inner loop: instructions have a cache, too.
    for (unsigned t = first; t < end;) {
      const bool again = prepared();
      unsigned stop = end / kRows * kRows;
      if (t == stop) ring_.wait_full(number), clear_values(ring_.stage(number), end - t), stop = end;
      if (keeps && t % kChunk == 0 && !again) keep_within(item, t, eights);
      if (keeps) stop = min(stop, (t / unsigned{kChunk} + 1) * unsigned{kChunk});
      if (again) stop = min(stop, t + kRows);
      const Place at = place();
      const Place to{uniform(at.b), uniform(at.t0 + begin - kRows), uniform(at.hv)};
      bool went, full = false;
      do {
        lane_ = opaque(lane_);  // addresses are computed again: there is no room for them
        const unsigned n = uniform(number), stage = ring_.stage(n);
        const bool stores_state = kTraining && eights && t % kChunk == 0 && !again;
        if (!kStoresUnderProducts && stores_state) store_before(t);
        if (!full) ring_.wait_full(number);
        went = chunk<true>(
            stage, t % kChunk == 0, again, out,
            [&] {
              if constexpr (!std::is_same_v<Begun, Nothing>) {
                if (t == first && !again) [[unlikely]]
                  begun();
              }
              if (kStoresUnderProducts && stores_state) store_before(t);
              // Outputs that have been stored are read: after the vote all know it.
              if (stores()) ptx::wait_for_bulk_reads<0>();
            },
            [&] {
              if (t > first) stage_outputs(out);
            },
            [&](const float(&U)[kRows / 2]) {
              if (kTraining && !eights && call_.v_new.data) store_corrections(t, end, U);
            },
            [&](const unsigned(&U)[2][4]) {
              if (kTraining && eights) store_corrections(t, end, U);
            },
            [&] {
              if (t > first) store_outputs(to, n * kRows);
              full = ring_.is_full(number + 1);
            },
            [&] {
              __syncwarp();  // all lanes have read the stage
              if (lane_ == 0) ring_.release(number, kWarpsOfEach);
            });
        if (!went) break;
        t += kRows, ++number;
      } while (t < stop);
      lane_ = opaque(lane_);
      if (!went) prepare(opaque(ring_.stage(number)), t % kChunk == 0);
      else if (again) spoil(out);
    }
    if (end <= first) return;
    const unsigned last = (end - first - 1) / kRows * kRows + first;
    ptx::wait_for_bulk_reads<0>();
    ptx::sync_threads(kBarrier, kGroup);  // those of the chunk before are read
    stage_outputs(out);
    if (end - last == kRows) store_outputs(place(), last);
    else store_rows(last, end - last);
  }
  // The first chunks of the ring, all of 32 tokens: for the state alone. The last kHeld are not released.
  template <unsigned kHeld>
  __device__ __forceinline__ void scan_state(unsigned chunks) {
    for (unsigned number = 0; number < chunks;) {
      const bool again = prepared();
      unsigned none[2][4];
      bool went, full = false;
      do {
        lane_ = opaque(lane_);
        const unsigned stage = uniform(ring_.stage(number));
        if (!full) ring_.wait_full(number);
        went = chunk<false>(
            stage, number * kRows % kChunk == 0, again, none, [] {}, [] {}, [](const float(&)[kRows / 2]) {},
            [](const unsigned(&)[2][4]) {}, [&] { full = ring_.is_full(number + 1); },
            [&] {
              __syncwarp();  // all lanes have read the stage
              if (lane_ == 0 && number + kHeld < chunks) ring_.release(number);
            });
        if (!went) break;
        ++number;
      } while (!again && number < chunks);
      lane_ = opaque(lane_);
      if (!went) prepare(opaque(ring_.stage(number)), number * kRows % kChunk == 0);
      else if (again) spoil(none);
    }
  }
  // Before the block ends, or others use its memory.
  __device__ void finish_outputs() const { ptx::wait_for_bulk_reads<0>(); }

  // The warp's first column; where its columns' v is in a stage.
  __device__ unsigned first_column() const { return warp_ * 16; }
  __device__ static unsigned values(unsigned stage) { return stage + Stage::v; }
  // Where outputs of eight of the warp's columns wait.
  __device__ unsigned staged(unsigned token, unsigned piece) const {
    return ring_.memory + Shared::out + token * kRowBytes + ((warp_ % kWarps * 2 + piece ^ token % 8) << 4);
  }
  // Is the warp the one that stores those of all?
  __device__ bool stores() const { return warp_ % kWarps == 0; }
  // Of a chunk that prepare() was needed for, else 0: its first tokens that were not finite, a byte each, and a bit.
  __device__ unsigned bad() const { return ptx::load_shared16(ring_.memory + Shared::bad_values + ptx::thread() * 2); }
  __device__ void set_bad(unsigned x) const {
    ptx::store_shared16(ring_.memory + Shared::bad_values + ptx::thread() * 2, static_cast<unsigned short>(x));
  }
  __device__ bool prepared() const { return bad(); }

  // Of the thread: columns first_column() + lane_ / 4 and 8 more, i = 0 and 1; channels 8 j + 2 (lane_ % 4) and one
  // more of each.
  __device__ unsigned column(int i) const { return first_column() + lane_ / 4 + 8 * i; }
  __device__ unsigned channel(int j) const { return 8 * j + lane_ % 4 * 2; }

  // ---- states ----

  struct Address {  // of a state's element, by column and channel
    char* first;
    uint32_t column, channel;
    __device__ Address(const TypedView& t, int32_t layout, unsigned row, unsigned hv) : first(t.at(row, hv, 0)) {
      const bool v_first = layout == KDA_STATE_V_FIRST;
      column = v_first ? t.stride2 : size_of(t.dtype), channel = v_first ? size_of(t.dtype) : t.stride2;
    }
    __device__ char* at(unsigned v, unsigned k) const {
      return first + static_cast<uint64_t>(v) * column + static_cast<uint64_t>(k) * channel;
    }
  };

  // f(register, address) for all of the thread's elements of a state.
  template <class Element, class F>
  __device__ void elements(const TypedView& t, unsigned row, unsigned hv, const F& f) const {
    const Address at(t, call_.p.args.in.state_layout, row, hv);
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(4 * j + i, reinterpret_cast<Element*>(at.at(column(i / 2), channel(j) + i % 2)));
  }
  // Do so many channels lie side by side, at multiples of as many?
  __device__ bool in_groups(const TypedView& t, unsigned channels) const {
    const auto address =
        reinterpret_cast<uintptr_t>(t.data) | static_cast<uintptr_t>(t.stride0) | t.stride1 | t.stride2;
    return call_.p.args.in.state_layout == KDA_STATE_V_FIRST && address % (channels * size_of(t.dtype)) == 0;
  }
  // Likewise two channels of f32 at a time.
  template <class F>
  __device__ void pairs(const TypedView& t, unsigned row, unsigned hv, const F& f) const {
    char* const first = t.at(row, hv, 0) + channel(0) * 4;
    char* const columns[2] = {first + column(0) * uint64_t{t.stride2}, first + column(1) * uint64_t{t.stride2}};
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) f(4 * j + 2 * i, reinterpret_cast<float2*>(columns[i] + 32 * j));
  }
  // A first state: the thread's elements of it.
  __device__ void fetch(const Sequence& s, unsigned hv, float (&state)[64]) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0;
    if (!s.initial) return;
    const TypedView& h0 = call_.states.h0;
    const auto row = static_cast<unsigned>(s.slot);
    if (h0.dtype == KDA_F32 && in_groups(h0, 2))
      pairs(h0, row, hv, [&](int i, const float2* x) {
        const float2 two = *x;
        state[i] = two.x, state[i + 1] = two.y;
      });
    else if (h0.dtype == KDA_F32) elements<float>(h0, row, hv, [&](int i, const float* x) { state[i] = *x; });
    else elements<__nv_bfloat16>(h0, row, hv, [&](int i, const __nv_bfloat16* x) { state[i] = __bfloat162float(*x); });
  }
  __device__ void load(const float (&state)[64]) {
    unit_[0] = unit_[1] = 1;
#pragma unroll
    for (int i = 0; i < 64; ++i) S_[i] = state[i];
  }
  __device__ void load(const Sequence& s, unsigned hv) {
    float state[64];
    fetch(s, hv, state), load(state);
  }
  // The state after t tokens goes where it is wanted.
  __device__ void keep(const Sequence& s, unsigned hv, unsigned t) {
#pragma unroll 1
    for (int kind = kFinal; kind <= kCheckpoint; ++kind) {
      const TypedView& to = call_.states.kept[kind];
      const int64_t row = to.data ? row_of(static_cast<Kept>(kind), call_.p, s, t, 0) : -1;
      if (row >= 0) store_state(to, static_cast<unsigned>(row), hv);
    }
  }
  // Likewise, in front of a chunk. (The sequence is looked up again, and here alone: registers are scarce in between.)
  __device__ void keep_within(const Item& item, unsigned t, bool but_before) {
#pragma unroll 1
    for (int kind = kCheckpoint; kind <= (kTraining ? kBefore : kCheckpoint); ++kind) {
      const TypedView& to = call_.states.kept[kind];
      if (!to.data || (kind == kBefore && but_before)) continue;
      const auto sequence = [&] { return sequence_at(call_.p, call_.p.args.in, call_.p.args.states, opaque(item.n)); };
      const int64_t row = kind == kBefore ? row_before(t) : row_of(kCheckpoint, call_.p, sequence(), t, 0);
      if (row >= 0) store_state(to, static_cast<unsigned>(row), item.hv);
    }
  }
  // As row_of() tells, for a token that is not behind the last one.
  __device__ int64_t row_before(unsigned t) const {
    const kda_forward_args& a = call_.p.args;
    const unsigned chunk = t / unsigned{kChunk}, every = static_cast<unsigned>(a.h_every);
    if (every != 1 && chunk % every != 0) return -1;
    const unsigned row = ptx::load_shared(place_at() + 12) + (every == 1 ? chunk : chunk / every);
    return row < a.h.shape[0] ? row : -1;
  }
  __device__ bool befores_in_eights() const {
    const TypedView& to = call_.states.kept[kBefore];
    return to.data && to.dtype == KDA_BF16 && in_groups(to, 8);
  }
  __device__ void store_before(unsigned t) const {
    const int64_t row = row_before(t);
    if (row >= 0)
      store_eights(call_.states.kept[kBefore], static_cast<unsigned>(row), ptx::load_shared(place_at() + 8));
  }
  __device__ void store_state(const TypedView& to, unsigned row, unsigned hv) const {
    const auto value = [&](int i) { return S_[i] * unit_[i / 2 % 2]; };
    if (to.dtype == KDA_BF16 && in_groups(to, 8)) store_eights(to, row, hv);
    else if (to.dtype == KDA_BF16)
      elements<__nv_bfloat16>(to, row, hv, [&](int i, __nv_bfloat16* x) { *x = __float2bfloat16_rn(value(i)); });
    else if (in_groups(to, 2)) pairs(to, row, hv, [&](int i, float2* x) { *x = make_float2(value(i), value(i + 1)); });
    else elements<float>(to, row, hv, [&](int i, float* x) { *x = value(i); });
  }
  // Of four lanes, lane q: the q-th of each one's four.
  __device__ uint4 exchanged(unsigned (&x)[4]) const {
    const auto exchange = [&](unsigned& lower, unsigned& upper, unsigned lanes) {
      const bool is_upper = lane_ & lanes;
      const unsigned other = __shfl_xor_sync(kAll, is_upper ? lower : upper, lanes);
      (is_upper ? lower : upper) = other;
    };
    exchange(x[0], x[1], 1), exchange(x[2], x[3], 1), exchange(x[0], x[2], 2), exchange(x[1], x[3], 2);
    return make_uint4(x[0], x[1], x[2], x[3]);
  }
  // In bf16, eight channels an access. The four lanes of a column have two channels each of every eight: they exchange
  // them, so that lane q has all of the q-th of four eights. (Stores of four bytes take as long as half of the scan.)
  __device__ void store_eights(const TypedView& to, unsigned row, unsigned hv) const {
    const unsigned q = lane_ % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* const own = to.at(row, hv, column(i)) + q * 16;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        unsigned x[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float* two = S_ + 4 * (j + m) + 2 * i;
          x[m] = ptx::pack<__nv_bfloat16>(two[0] * unit_[i], two[1] * unit_[i]);
        }
        *reinterpret_cast<uint4*>(own + 16 * j) = exchanged(x);
      }
    }
  }

  // ---- units ----

  // 1 / unit of a power of two.
  __device__ static float inverse(float unit) { return __uint_as_float(0x7f000000u - __float_as_uint(unit)); }
  static constexpr int kMostUnit = 112;  // of exponents
  __device__ static float power(int exponent) { return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23); }
  __device__ void choose_units(const unsigned (&v)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Pair<T> values = values_of(v, i);
      float most = inverse(unit_[i]) * fmaxf(__low2float(values), __high2float(values));
#pragma unroll
      for (int j = 0; j < 32; ++j) most = fmaxf(most, fabsf(S_[j / 2 * 4 + 2 * i + j % 2]));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1)), most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      unsigned bits = __float_as_uint(most);
      bits += 0xfff + (bits >> 13 & 1);  // rounded to fp16, as the operands are
      const int exponent = static_cast<int>(bits >> 23) - 127;
      if (exponent == 128) continue;  // no number
      const int before = static_cast<int>(__float_as_uint(unit_[i]) >> 23) - 127;
      int unit = most == 0 ? -kMostUnit : (exponent + before + 9 + 256) / 16 * 16 - 256;  // rounded down
      unit = max(min(unit, kMostUnit), -kMostUnit);
      unit_[i] = power(unit);
      const int half = (before - unit) / 2;  // one factor may be out of range
      const float back[2] = {power(half), power(before - unit - half)};
#pragma unroll
      for (int j = 0; j < 32; ++j) S_[j / 2 * 4 + 2 * i + j % 2] *= back[0], S_[j / 2 * 4 + 2 * i + j % 2] *= back[1];
    }
  }

  // S_ as operands.
  __device__ void pack(unsigned (&packed)[8][4]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) packed[i / 4][i % 4] = ptx::pack<__half>(S_[2 * i], S_[2 * i + 1]);
  }

  // No v of the warp's columns from a token on: what comes along is another sequence's.
  __device__ void clear_values(unsigned stage, unsigned from) const {
    const unsigned piece = first_column() % 64 / 8 + lane_ % 2;
#pragma unroll 1
    for (unsigned token = from + lane_ / 2; token < kRows; token += 16)
      ptx::store_shared4(values(stage) + token * kRowBytes + ((piece ^ token % 8) << 4), make_uint4(0, 0, 0, 0));
    ptx::fence_shared_for_async();  // copies will overwrite them
    __syncwarp();                   // zeros are there
  }
  // A chunk's v, transposed: the thread's columns, as operands.
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
  // Magnitudes in the thread's column i; NaN if there is one.
  __device__ static Pair<T> values_of(const unsigned (&v)[2][4], int i) {
    return largest<T, true>({v[0][i], v[0][i + 2], v[1][i], v[1][i + 2]});
  }
  // Are they below so many units? (Zeros are.)
  __device__ bool are_below(const Pair<T>& values, int i, float units) const {
    if constexpr (!kValues) return true;
    float limit = units * unit_[i];
    if constexpr (std::is_same_v<T, __half>) limit = fmaxf(limit, 0x1p-24f);  // the least there is
    const unsigned two = ptx::pack<T>(limit, limit);
    return __hblt2(values, pair_of<T>(two));
  }
  // Do units fit S_, packed, and v, and is no v infinite or NaN? first: at a multiple of 64 tokens.
  __device__ bool fits(const unsigned (&packed)[8][4], const unsigned (&v)[2][4], bool first) const {
    const Pair<T> values[2] = {values_of(v, 0), values_of(v, 1)};
    bool fits = are_below(values[0], 0, 0x1p7f) & are_below(values[1], 1, 0x1p7f);
    if (!first) return fits;
    const __half2 most = __float2half2_rn(0x1p7f), least = __float2half2_rn(0x1p-9f);
    const auto largest_of = [&](int i) {
      unsigned S[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) S[j] = packed[j / 2][j % 2 * 2 + i];
      return largest<__half, false>(S);
    };
    const __half2 both[2] = {largest_of(0), largest_of(1)};  // chains that wait for themselves, not for votes
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // A column's four lanes together reach 2^-9, or there are no smaller units.
      unsigned reached = __ballot_sync(
          kAll, !(__hbltu2(both[i], least) & are_below(values[i], i, 0x1p-9f)) | (unit_[i] <= power(-kMostUnit)));
      reached |= reached >> 1, reached |= reached >> 2;
      fits = fits & __hbltu2(both[i], most) & (reached & 0x11111111) == 0x11111111;
    }
    return fits;
  }

  // For a chunk that did not fit. 0 times what is not finite is not 0: it would show in all tokens of the column, those
  // before it included. So there are zeros instead, and spoil() comes after the chunk.
  __device__ void prepare(unsigned stage, bool first) {
    unsigned v[2][4], first_bad[2] = {kRows, kRows};
    load_values(stage, v);
#pragma unroll
    for (unsigned j = 0; kValues && j < 16; ++j) {
      const Pair<T> two = pair_of<T>(v[j / 8][j / 2 % 4]);
      const float y = j % 2 ? __high2float(two) : __low2float(two);
      if (y - y == 0) continue;
      const unsigned i = j / 2 % 2, token = j / 4 * 8 + lane_ % 4 * 2 + j % 2, piece = column(i) % 64 / 8;
      first_bad[i] = min(first_bad[i], token);
      ptx::store_shared16(values(stage) + token * kRowBytes + ((piece ^ token % 8) << 4) + column(i) % 8 * 2, 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      first_bad[i] = min(first_bad[i], __shfl_xor_sync(kAll, first_bad[i], 1)),
      first_bad[i] = min(first_bad[i], __shfl_xor_sync(kAll, first_bad[i], 2));
    ptx::fence_shared_for_async();  // copies will overwrite them
    __syncwarp();                   // zeros are there
    load_values(stage, v);
    unsigned packed[8][4];
    pack(packed);
    if (!__all_sync(kAll, fits(packed, v, first))) choose_units(v);
    set_bad(1u << 15 | first_bad[1] << 8 | first_bad[0]);
  }
  // From the first token that was not finite on, outputs and the state are not, either.
  __device__ void spoil(unsigned (&out)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned from = bad() >> 8 * i & 0x7f;
#pragma unroll
      for (unsigned j = i; j < 8; j += 2) {
        const unsigned token = j / 2 * 8 + lane_ % 4 * 2;
        if (token >= from) out[j / 4][j % 4] = 0x7fff7fff;
        else if (token + 1 >= from) out[j / 4][j % 4] |= 0x7fff0000;
      }
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (from < kRows) S_[j / 2 * 4 + 2 * i + j % 2] = __int_as_float(0x7fffffff);
    }
    set_bad(0);
  }

  // ---- a chunk ----

  // meanwhile(), voted(), behind(): work for the time of the first, second and last products; corrections(): what sees
  // U, and what sees it in units and fp16, for the time of the last products; read(): when nobody needs the stage any
  // more. Returns false, and has done nothing, if units do not fit. again: they do.
  template <bool kOutputs, class Meanwhile, class Voted, class Corrections, class Packed, class Behind, class Read>
  __device__ __forceinline__ bool chunk(unsigned stage, bool first, bool again, unsigned (&out)[2][4],
                                        const Meanwhile& meanwhile, const Voted& voted, const Corrections& corrections,
                                        const Packed& packed_corrections, const Behind& behind, const Read& read) {
    unsigned v[2][4];
    load_values(stage, v);
    unsigned left[8][4];
    pack(left);
    const uint64_t kG = ptx::matrix_at(stage + Stage::k, 16, 1024, ptx::Swizzle::k128);
    float both[kOutputs ? kRows : kRows / 2];  // S^T kG^T, then S^T qG^T
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      ptx::wgmma<__half, false>(both, left[k], ptx::further(kG, k / 4 * kHalf + k % 4 * 32), k > 0);
    ptx::commit_products();
    meanwhile();
    // All warps of the group make each product together, so that all know whether one of them has to go back.
    const bool fine = ptx::all_threads(kBarrier, kGroup, again || fits(left, v, first));
    ptx::wait_for_products<0>();
    if (!fine) return false;

    float2 ell[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) ell[j] = ptx::load_shared_f32x2(stage + Stage::ell + channel(j) * 4);
    unsigned R[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = floats_of<T>(v[j / 4][j % 4]);
      const float scale = inverse(unit_[j % 2]);
      R[j / 4][j % 4] = kValues
                            ? ptx::pack<__half>(fmaf(two.x, scale, -both[2 * j]), fmaf(two.y, scale, -both[2 * j + 1]))
                            : ptx::pack<__half>(both[2 * j], both[2 * j + 1]) ^ 0x80008000;  // both signs
    }
    float U[kRows / 2];
    const uint64_t T_beta = ptx::matrix_at(stage + Stage::T, 16, 512, ptx::Swizzle::k64);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::wgmma<__half, false>(U, R[k], ptx::further(T_beta, 32 * k), k > 0);
    ptx::commit_products();
#pragma unroll
    for (int j = 0; j < 16; ++j)
      asm volatile("" : "+f"(ell[j].x), "+f"(ell[j].y));  // S waits until they are on their way
#pragma unroll
    for (int j = 0; j < 16; ++j)
      S_[4 * j] *= ell[j].x, S_[4 * j + 1] *= ell[j].y, S_[4 * j + 2] *= ell[j].x, S_[4 * j + 3] *= ell[j].y;
    voted();
    ptx::wait_for_products<0>();
    corrections(U);

#pragma unroll
    for (int j = 0; j < 8; ++j) R[j / 4][j % 4] = ptx::pack<__half>(U[2 * j], U[2 * j + 1]);
    float O[kRows / 2];
    const uint64_t kg = ptx::matrix_at(stage + Stage::kg, kHalf, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::wgmma<__half, true>(S_, R[k], ptx::further(kg, k * 16 * kRowBytes), true);
    if constexpr (kOutputs)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        ptx::wgmma<__half, false>(O, R[k], ptx::further(T_beta, Stage::Aqk - Stage::T + 32 * k), k > 0);
    ptx::commit_products();
    packed_corrections(R);
    behind();
    ptx::wait_for_products<0>();
    read();
    if constexpr (kOutputs) {
      const float scale[2] = {call_.x.scale * unit_[0], call_.x.scale * unit_[1]};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        out[j / 4][j % 4] = ptx::pack<T>((O[2 * j] + both[16 + 2 * j]) * scale[j % 2],
                                         (O[2 * j + 1] + both[16 + 2 * j + 1]) * scale[j % 2]);
    }
    return true;
  }

  // ---- outputs ----

  // By all warps, when those of the chunk before have been read.
  __device__ void stage_outputs(const unsigned (&out)[2][4]) const {
    const unsigned to = staged(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::store_transposed(to + j * 16 * kRowBytes, out[j]);
    ptx::fence_shared_for_async();
    if (!stores()) ptx::arrive_threads(kOutputBarrier, kGroup);
  }
  // Of a chunk from token t of the item on, and all warps.
  __device__ void store_outputs(const Place& at, unsigned t) const {
    if (!stores()) return;
    ptx::sync_threads(kOutputBarrier, kGroup);  // outputs of all warps are there
    const unsigned row = at.t0 + t;
    if (!ptx::elect()) return;
    ptx::store_tile(call_.tiles->maps[Tiles::kOutput], first_column(), at.hv, row, at.b, staged(0, 0));
    ptx::commit_bulk();
  }
  // Of the first `count` rows, by each warp.
  __device__ void store_rows(unsigned t, unsigned count) const {
    if (stores()) ptx::sync_threads(kOutputBarrier, kGroup);  // the others have arrived
    __syncwarp();                                             // outputs are there
    const Place at = place();
    const unsigned piece = lane_ % 2;
#pragma unroll 1
    for (unsigned row = lane_ / 2; row < count; row += 16)
      *reinterpret_cast<uint4*>(call_.x.o.at(at.b, at.t0 + t + row, at.hv) + first_column() * sizeof(T) + piece * 16) =
          ptx::load_shared4(staged(row, piece));
    __syncwarp();  // nobody reads them any more
  }

  __device__ unsigned place_at() const { return ring_.memory + Shared::places + warp_ % kWarps * 16; }
  __device__ Place place() const {
    const uint4 x = ptx::load_shared4(place_at());
    return {x.x, x.y, x.z};
  }
  __device__ unsigned corrections() const { return ring_.memory + Shared::corrections + warp_ % kWarps * 8; }
  __device__ void remember(const Sequence& s, unsigned hv) const {
    __syncwarp();  // nobody reads that of the item before
    const unsigned first_h =
        kTraining && call_.states.kept[kBefore].data ? first_h_row(call_.p, static_cast<unsigned>(s.n)) : 0;
    ptx::store_shared4(place_at(), make_uint4(static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0), hv, first_h));
    if (kTraining && call_.v_new.data) {
      const char* to = call_.v_new.at(static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0), hv);
      ptx::store_shared2(corrections(), reinterpret_cast<const uint2&>(to));
    }
    __syncwarp();  // it is there
  }
  // Eight columns an access: rows of bf16 at multiples of 16 bytes.
  __device__ bool corrections_in_eights() const {
    const TypedView& to = call_.v_new;
    const auto address =
        reinterpret_cast<uintptr_t>(to.data) | static_cast<uintptr_t>(to.stride0) | to.stride1 | to.stride2;
    return to.dtype == KDA_BF16 && address % 16 == 0;
  }
  // Transposed, a lane has four bytes of each eighth token, and exchanged, 16 of one.
  __device__ void store_corrections(unsigned t, unsigned length, const unsigned (&U)[2][4]) const {
    const uint2 first = ptx::load_shared2(corrections());
    const unsigned token = t + lane_ % 4 * 8 + lane_ / 4;
    char* const to =
        reinterpret_cast<char* const&>(first) + token * static_cast<uint64_t>(call_.v_new.stride1) + first_column() * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned x[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 two = floats_of<__half>(U[m / 2][m % 2 * 2 + i]);
        x[m] = ptx::transposed(ptx::pack<__nv_bfloat16>(two.x * unit_[i], two.y * unit_[i]));
      }
      const uint4 eight = exchanged(x);
      if (token < length) *reinterpret_cast<uint4*>(to + i * 16) = eight;
    }
  }
  __device__ void store_corrections(unsigned t, unsigned length, const float (&U)[kRows / 2]) const {
    const uint2 first = ptx::load_shared2(corrections());
    const unsigned row = t + lane_ % 4 * 2;
    const unsigned size = size_of(call_.v_new.dtype);
    char* to =
        reinterpret_cast<char* const&>(first) + row * static_cast<uint64_t>(call_.v_new.stride1) + column(0) * size;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const unsigned i = j / 4 * 8 + j % 2, c = j / 2 % 2;
      char* place = to + i * static_cast<uint64_t>(call_.v_new.stride1) + c * 8 * size;
      if (row + i < length) store_element(place, call_.v_new.dtype, U[j] * unit_[c]);
    }
  }

  const Call& call_;
  const Ring ring_;
  const unsigned warp_;
  unsigned lane_;
  float S_[64];    // S^T / unit_: accumulators
  float unit_[2];  // of the thread's two columns
};

}  // namespace kda::cuda::sm90
