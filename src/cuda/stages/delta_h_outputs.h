// The scan with outputs, for prefill_f32: o = scale qG S + Aqk v_new is made here as well, and neither h nor v_new
// leaves the block. A chunk:
//   1 ask for Aqk, and for the next qG and u; w S and qG S, operands of S serve both; v_new in place of u
//                                                             barrier: v_new, kg, Aqk are there; S, w, qG are read
//   2 ask for the next kg and the w after the next; S in registers and Aqk v_new, operands of v_new serve both; its
//     copy; o
//                                                             barrier: v_new, kg, Aqk are read; S, w, u, qG are there
// Tiles w, qG, kg, w, .. go round five places, so that each copy but that of Aqk has a phase or more to arrive. Their
// rows begin at multiples of 128 bytes, which suits copies; so pieces of rows change places, and there are no gaps
// between rows. Eight warps have larger products and more registers than 16. Every sum has the terms and the order
// that it has in delta_h and fwd_o, and so the same bits.
//
// Shared memory at K = 128: S 17, v_new and u 20, Aqk 16, five tiles 160 KiB.
#pragma once
#include "cuda/stages/delta_h_state.h"

namespace kda::cuda::stages {

template <class E, int kTiles, int kColumns, int kSize>
class ScanWithOutputs : public ScanState<E, kTiles, kColumns, kSize, true> {
  using Base = ScanState<E, kTiles, kColumns, kSize, true>;
  using Base::chunk_, Base::S_, Base::chunk_at, Base::row_of, Base::load_S, Base::load_v, Base::put_S;
  using Base::p_, Base::m_, Base::shared_, Base::s_, Base::hv_, Base::v0_, Base::warp_, Base::own0_, Base::count_;
  using typename Base::M;
  static constexpr bool kBoth = kColumns == 32;  // a warp makes v_new and o

 public:
  __device__ __forceinline__ ScanWithOutputs(const ScanCall& call, const Memory& memory, const Place& at,
                                             unsigned char* shared)
      : Base(call, memory, at, shared),
        second_(warp_ >= kWarps / 2),
        i0_((kBoth && second_ ? 3 - warp_ % 4 : warp_ % 4) * 16),
        makes_v_(kBoth || !second_),
        makes_o_(kBoth || second_) {}

  __device__ __forceinline__ void run() {
    if (!s_.live) return;
    Base::take_state();
    if (count_ > 0) Base::load_ell(0), ask_first();
#pragma unroll 1
    for (int i = 0; i < count_; ++i) {
      if (i == 0) {
        ptx::wait_for_copies<2>();
        __syncthreads();  // w, u, qG and the copy of S are there
      }
      Sum o;
      multiply_state(i, o);
      ptx::wait_for_copies<1>();
      __syncthreads();  // v_new, kg and Aqk are there; S, w and qG are read
      update(i, o);
      put_S();
      if (makes_o_) write_outputs(i, o);
      if (i + 1 < count_) {
        Base::load_ell(i + 1);
        ptx::wait_for_copies<2>();
        __syncthreads();  // v_new, kg and Aqk are read; the next w, u, qG and the copy of S are there
      }
    }
    ptx::wait_for_copies<0>();
    Base::keep_state();
  }

 private:
  // ---- copies: tiles w, qG, kg, w, .. have numbers 3 i .. ----

  __device__ unsigned char* place(unsigned number) const { return shared_ + m_.w + number % kPlaces * m_.step; }
  __device__ unsigned char* u_at(int i) const { return shared_ + m_.u + i % 2 * m_.u_step; }
  __device__ __forceinline__ Pieces<kSize> keys(const Rows& x, unsigned number, int i) {
    chunk_at(i);
    return Pieces<kSize>(x, chunk_, hv_, 0, place(number), kSize, M::twist);
  }
  __device__ __forceinline__ Pieces<kSize> keys_across(const Rows& x, unsigned number, int i) {
    chunk_at(i);
    return Pieces<kSize>(x, chunk_, hv_, 0, place(number), kSize, M::twist_across);
  }
  __device__ __forceinline__ Pieces<kColumns> values(int i, int buffer) {
    chunk_at(i);
    return Pieces<kColumns>(p_.u, chunk_, hv_, v0_, u_at(buffer), m_.u_stride, [](int) { return 0; });
  }
  __device__ __forceinline__ Pieces<kRows> scores(int i) {
    chunk_at(i);
    return Pieces<kRows>(p_.Aqk, chunk_, hv_, 0, shared_ + m_.Aqk, kRows, M::twist);
  }
  __device__ __forceinline__ void ask_first() {
    ask_all(keys(p_.w, 0, 0)), ask_all(keys(p_.qG, 1, 0)), ask_all(values(0, 0));
    ptx::commit_copies();
    ask_all(keys_across(p_.kg, 2, 0));
    ptx::commit_copies();
    ask_all(keys(p_.w, 3, min(1, count_ - 1)));
    ptx::commit_copies();
  }

  // ---- a chunk ----

  // Copies start between the products, so that neither waits for all of the others. Behind the last chunk that chunk is
  // copied again, and not read.
  __device__ int next(int i) const { return min(i + 1, count_ - 1); }

  // w S and qG S, and v_new in place of u.
  __device__ __forceinline__ void multiply_state(int i, Sum& o) {
    const unsigned number = 3 * i;
    Chains wS[2];  // of even and of odd steps
    const unsigned char *w = place(number), *qG = place(number + 1);
    const auto Aqk_pieces = scores(i);
    const auto qG_pieces = keys(p_.qG, number + 4, next(i));
    const auto u_pieces = values(next(i), i + 1);
    const auto multiply = [&]<bool kOfV, bool kOfO>() {
#pragma unroll
      for (int c = 0; c < kSize; c += 16) {
        const auto b = load_S(c, own0_);
        if constexpr (kOfV) M::add(wS[c / 16 % 2], M::load_a_twisted(w, kSize, i0_, c), b);
        if constexpr (kOfO) M::add(o, M::load_a_twisted(qG, kSize, i0_, c), b);
        ask_some(c / 16, kSize / 16, Aqk_pieces, qG_pieces, u_pieces);
      }
    };
    if constexpr (kBoth) multiply.template operator()<true, true>();
    else if (makes_v_) multiply.template operator()<true, false>();
    else multiply.template operator()<false, true>();
    unsigned char* v_new = u_at(i);
    if (makes_v_)
      for_each_pair(sum_of(wS[0].sum(), wS[1].sum()), [&](int r, int c, float x, float y) {
        const float2 u = M::load_two(v_new, m_.u_stride, i0_ + r, own0_ + c);
        M::store_two(v_new, m_.u_stride, i0_ + r, own0_ + c, u.x - x, u.y - y);
      });
  }
  // S behind the chunk, and Aqk v_new.
  __device__ __forceinline__ void update(int i, Sum& o) {
    const unsigned number = 3 * i;
    const unsigned char *kg = place(number + 2), *v_new = u_at(i);
    const auto kg_pieces = keys_across(p_.kg, number + 5, next(i));
    const auto w_pieces = keys(p_.w, number + 6, min(i + 2, count_ - 1));
    Sum of_rests[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) Base::decay(tile);
    o.scale(p_.scale);
#pragma unroll
    for (int t = 0; t < kRows; t += 16) {
      const auto b = load_v(v_new, 0, t, own0_);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        M::add(S_[tile][0], of_rests[tile], M::load_a_transposed_twisted(kg, kSize, t, row_of(tile)), b);
      ask_some(t / 16, kRows / 16, kg_pieces, w_pieces);
      if (makes_o_ && t <= i0_) M::add(o, M::load_a_twisted(shared_ + m_.Aqk, kRows, i0_, t), b);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) S_[tile][0] = sum_of(S_[tile][0], of_rests[tile]);
  }
  __device__ __forceinline__ void write_outputs(int i, const Sum& o) {
    chunk_at(i);
    char* to = p_.o.at(chunk_.b, chunk_.t0 + i0_, hv_) + (v0_ + own0_) * 4;
    for_each_pair(o, [&](int r, int c, float x, float y) { store_pair(p_.o, to + r * p_.o.token, c, 16, x, y); });
  }

  const bool second_;
  // Rows of v_new and o. Later rows have more terms of Aqk v_new: each scheduler has two warps with five steps
  // together.
  const int i0_;
  const bool makes_v_, makes_o_;
};

}  // namespace kda::cuda::stages
