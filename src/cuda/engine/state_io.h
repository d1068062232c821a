// Loads and stores of states between registers and global memory: first and final ones, those at checkpoints and
// those before chunks.
#pragma once
#include "cuda/engine/consumer_thread.h"

namespace kda::cuda::engine {

// A thread's part in loads and stores of states. kTraining: states before chunks may be kept. kOrder: of channels in a
// stage.
template <bool kTraining, Order kOrder>
class StateIo : public ConsumerThread {
 protected:
  using ConsumerThread::ConsumerThread;

  static constexpr int kRun = kOrder.run / 2;  // positions of a run of channels
  // The channel in position(j).
  __device__ unsigned channel(int j) const { return kOrder.run * (lane_ % 4) + kOrder.offset(j); }

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

  // Calls f(register, address) for all of the thread's elements of a state.
  template <class Element, class F>
  __device__ void elements(const TypedView& t, int32_t layout, unsigned row, unsigned hv, const F& f) const {
    const Address at(t, layout, row, hv);
#pragma unroll
    for (int j = 0; j < 16; ++j)
      if (has_channels(j))
#pragma unroll
        for (int i = 0; i < 4; ++i) f(4 * j + i, reinterpret_cast<Element*>(at.at(column(i / 2), channel(j) + i % 2)));
  }
  // Do groups of so many channels lie side by side, at multiples of the group's size?
  __device__ static bool in_groups(const TypedView& t, int32_t layout, unsigned channels) {
    const auto address =
        reinterpret_cast<uintptr_t>(t.data) | static_cast<uintptr_t>(t.stride0) | t.stride1 | t.stride2;
    return layout == KDA_STATE_V_FIRST && address % (channels * size_of(t.dtype)) == 0;
  }
  // Does the same as elements(), for two channels of f32 at a time.
  template <class F>
  __device__ void pairs(const TypedView& t, unsigned row, unsigned hv, const F& f) const {
    char* const first = t.at(row, hv, 0) + channel(0) * 4;
    char* const columns[2] = {first + column(0) * uint64_t{t.stride2}, first + column(1) * uint64_t{t.stride2}};
#pragma unroll
    for (int j = 0; j < 16; ++j)
      if (has_channels(j))
#pragma unroll
        for (int i = 0; i < 2; ++i) f(4 * j + 2 * i, reinterpret_cast<float2*>(columns[i] + kOrder.offset(j) * 4));
  }
  // Loads the thread's elements of a sequence's first state.
  __device__ void fetch(const Sequence& s, unsigned hv, float (&state)[64]) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0;
    if (!s.initial || !has_columns()) return;
    const TypedView& h0 = call_.states.h0;
    const int32_t layout = call_.p.args.in.state_layout;
    const auto row = static_cast<unsigned>(s.slot);
    if (h0.dtype == KDA_F32 && in_groups(h0, layout, 2))
      pairs(h0, row, hv, [&](int i, const float2* x) {
        const float2 two = *x;
        state[i] = two.x, state[i + 1] = two.y;
      });
    else if (h0.dtype == KDA_F32) elements<float>(h0, layout, row, hv, [&](int i, const float* x) { state[i] = *x; });
    else
      elements<__nv_bfloat16>(h0, layout, row, hv,
                              [&](int i, const __nv_bfloat16* x) { state[i] = __bfloat162float(*x); });
  }
  __device__ void load(const float (&state)[64]) {
    unit_[0] = unit_[1] = 1;
#pragma unroll
    for (int i = 0; i < 64; ++i) S_[i] = state[i];
  }
  // The inverse of load().
  __device__ void unload(float (&state)[64]) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = S_[i] * unit_[i / 2 % 2];
  }
  __device__ void load(const Sequence& s, unsigned hv) {
    float state[64];
    fetch(s, hv, state), load(state);
  }
  // Stores the state after t tokens where it is wanted. (s may be what is behind an opening.)
  __device__ void keep(const Sequence& s, unsigned hv, unsigned t) {
#pragma unroll 1
    for (int kind = kFinal; kind <= kCheckpoint; ++kind) {
      const TypedView& to = call_.states.kept[kind];
      if (!to.data) continue;
      const auto n = static_cast<unsigned>(s.n), t0 = static_cast<unsigned>(s.t0);
      const int64_t row = kind == kFinal ? row_of(kFinal, call_.p, s, t, 0) : checkpoint_after(n, t0, t);
      if (row >= 0) store_state(to, call_.p.args.in.state_layout, static_cast<unsigned>(row), hv);
    }
  }
  // Likewise, in front of a chunk; but_before: the state before the chunk is stored elsewhere. (The sequence is
  // looked up again, only here: registers are scarce in between.)
  __device__ void keep_within(const Item& item, unsigned t, bool but_before) {
#pragma unroll 1
    for (int kind = kCheckpoint; kind <= (kTraining ? kBefore : kCheckpoint); ++kind) {
      const TypedView& to = call_.states.kept[kind];
      if (!to.data || (kind == kBefore && but_before)) continue;
      const int64_t row = kind == kBefore ? row_before(t) : checkpoint_after(item.n, place().t0, t);
      const int32_t layout = kTraining && kind == kBefore ? h_layout(call_.p.args) : call_.p.args.in.state_layout;
      if (row >= 0) store_state(to, layout, static_cast<unsigned>(row), item.hv);
    }
  }
  // The row of `checkpoints` for the state after t tokens of sequence n, counted from token t0 of its row.
  __device__ int64_t checkpoint_after(unsigned n, unsigned t0, unsigned t) const {
    n = opaque(n);
    const auto begin = static_cast<unsigned>(sequence_at(call_.p, call_.p.args.in, n).t0);
    return checkpoint_row_of(call_.p.args, n, t0 + t - begin);
  }
  // The row of h for the state before token t, as in row_of(), where t is not behind the last token.
  __device__ int64_t row_before(unsigned t) const {
    const kda_forward_args& a = call_.p.args;
    const unsigned chunk = t / unsigned{kChunk}, every = static_cast<unsigned>(a.h_every);
    if (every != 1 && chunk % every != 0) return -1;
    const unsigned row = ptx::load_shared(place_at() + 12) + (every == 1 ? chunk : chunk / every);
    return row < a.h.shape[0] ? int64_t{row} : -1;
  }
  // Is there room for the states before tokens first .. end - 1? (With garbage in cu_seqlens there may be none.)
  __device__ bool befores_have_room(unsigned first, unsigned end) const {
    return call_.states.kept[kBefore].data && has_columns() && end > first && row_before(first) >= 0 &&
           row_before(end - 1) >= 0;
  }
  // Is that all of them, in dense bf16, V-first, so that the inner loop can store them?
  __device__ bool befores_in_eights() const {
    const TypedView& to = call_.states.kept[kBefore];
    return to.dtype == KDA_BF16 && in_groups(to, h_layout(call_.p.args), 8) && to.stride2 == column_bytes() &&
           call_.p.args.h_every == 1;
  }
  // Where the thread's part of the state before token t begins.
  __device__ char* before_at(unsigned t) const {
    const TypedView& to = call_.states.kept[kBefore];
    return to.at(static_cast<unsigned>(row_before(t)), ptx::load_shared(place_at() + 8), column(0)) + channel(0) * 2;
  }
  // Are the units of the warp's columns 1, as they mostly are?
  __device__ bool is_plain() const { return __all_sync(kAll, unit_[0] == 1 && unit_[1] == 1); }
  // Stores a state there. kUnits: false if is_plain(). Then it is done within the inner loop, whose code hardly fits
  // the instruction cache; the code for units stays out of it. (What else was tried:
  // docs/experiments/cuda_backward.md.)
  template <bool kUnits>
  __device__ __forceinline__ void store_before(char* to) const {
    store_runs<kUnits>(to, 8 * column_bytes());
  }
  // Stores a state in bf16, a run of channels an access. behind: bytes from the first of the thread's columns to the
  // other one.
  template <bool kUnits>
  __device__ __forceinline__ void store_runs(char* to, uint64_t behind) const {
    using Run = std::conditional_t<kRun == 4, uint4, uint2>;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 16; j += kRun) {
        if (!has_channels(j)) continue;
        alignas(sizeof(Run)) unsigned x[kRun];
#pragma unroll
        for (int m = 0; m < kRun; ++m) x[m] = pack_two<kUnits>(i, j + m);
        *reinterpret_cast<Run*>(to + i * behind + 16 * j) = reinterpret_cast<const Run&>(x);
      }
  }
  __device__ unsigned column_bytes() const { return static_cast<unsigned>(call_.p.K) * 2; }  // of a dense state in bf16
  // Packs what the thread has of its column i in position j, as bf16; kUnits: times the unit.
  template <bool kUnits = true>
  __device__ __forceinline__ unsigned pack_two(int i, int j) const {
    const float* two = S_ + 4 * j + 2 * i;
    const float unit = kUnits ? unit_[i] : 1;
    return ptx::pack<__nv_bfloat16>(two[0] * unit, two[1] * unit);
  }
  __device__ void store_state(const TypedView& to, int32_t layout, unsigned row, unsigned hv) const {
    if (!has_columns()) return;
    const auto value = [&](int i) { return S_[i] * unit_[i / 2 % 2]; };
    if (to.dtype == KDA_BF16 && in_groups(to, layout, 8)) store_eights(to, row, hv);
    else if (to.dtype == KDA_BF16)
      elements<__nv_bfloat16>(to, layout, row, hv,
                              [&](int i, __nv_bfloat16* x) { *x = __float2bfloat16_rn(value(i)); });
    else if (in_groups(to, layout, 2))
      pairs(to, row, hv, [&](int i, float2* x) { *x = make_float2(value(i), value(i + 1)); });
    else elements<float>(to, layout, row, hv, [&](int i, float* x) { *x = value(i); });
  }
  // Exchanges numbers among four lanes: lane q gets the q-th of each lane's four.
  __device__ uint4 exchanged(unsigned (&x)[4]) const {
    const auto exchange = [&](unsigned& lower, unsigned& upper, unsigned lanes) {
      const bool is_upper = lane_ & lanes;
      const unsigned other = __shfl_xor_sync(kAll, is_upper ? lower : upper, lanes);
      (is_upper ? lower : upper) = other;
    };
    exchange(x[0], x[1], 1), exchange(x[2], x[3], 1), exchange(x[0], x[2], 2), exchange(x[1], x[3], 2);
    return make_uint4(x[0], x[1], x[2], x[3]);
  }
  // Stores a state in bf16. Where places are channels, the four lanes of a column have two channels each of every
  // eight, and exchange them, so that lane q has all of the q-th of four eights. (Stores of four bytes take as long as
  // half of the scan.)
  __device__ __forceinline__ void store_eights(const TypedView& to, unsigned row, unsigned hv) const {
    if constexpr (kRun > 1)
      return store_runs<true>(to.at(row, hv, column(0)) + channel(0) * 2, 8 * uint64_t{to.stride2});
    const unsigned q = lane_ % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* const own = to.at(row, hv, column(i)) + q * 16;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        if (!has_channels(j)) continue;
        unsigned x[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) x[m] = pack_two(i, j + m);
        *reinterpret_cast<uint4*>(own + 16 * j) = exchanged(x);
      }
    }
  }
};

}  // namespace kda::cuda::engine
