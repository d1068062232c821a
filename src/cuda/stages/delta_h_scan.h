// The scan of delta_h, which writes h and v_new: its steps are in delta_h_kernel.h.
#pragma once
#include "cuda/stages/delta_h_state.h"

namespace kda::cuda::stages {

template <class E, int kTiles, int kColumns, int kSize>
class Scan : public ScanState<E, kTiles, kColumns, kSize, false> {
  using Base = ScanState<E, kTiles, kColumns, kSize, false>;
  using Base::chunk_at, Base::row_of, Base::load_S, Base::load_v, Base::put_S, Base::state_at;
  using Base::g_, Base::own0_, Base::count_, Base::chunk_, Base::S_;
  using Base::kTwice, Base::kBlock, Base::kFull, Base::kOwn, Base::kMost;
  using Base::p_, Base::m_, Base::shared_, Base::s_, Base::hv_, Base::K, Base::v0_, Base::columns, Base::warp_;
  using typename Base::M;
  static constexpr int kSlice = slice_of<E>;
  // How much is on its way at once: a lone block of eight warps has registers for it.
  static constexpr int kAhead = by_lines<E> && !kTwice ? 2 : 1, kSteps = kTwice ? 2 : by_lines<E> ? 4 : 1;
  // 16 x 16 of w S that a warp has (of 16 columns: four warps)
  static constexpr int kParts = kColumns / 32 + kColumns % 32 / 16;

 public:
  __device__ __forceinline__ Scan(const ScanCall& call, const Memory& memory, const Place& at, unsigned char* shared)
      : Base(call, memory, at, shared),
        first_tile_(at.tile == 0),
        twin_(warp_ / kWarps),
        i0_(warp_ % 4 * 16),
        column0_(warp_ / 4 % 2 * kParts * 16) {}

  __device__ __forceinline__ void run() {
    if (!s_.live) {
      if (first_tile_) Base::zero_values();
      return;
    }
    Base::take_state();
    if (count_ > 0) Base::load_ell(0);
    const int64_t first_row = p_.h.data ? p_.chunks.first_row(s_.n) : 0;
#pragma unroll 1
    for (int i = 0, asked = 0; i < count_; ++i) {
      while (asked < min(i + (m_.room == kTwo ? 2 : 1), count_)) ask(asked++);
      if (i == 0 || m_.room != kTwo) {
        if (asked == i + 2) ptx::wait_for_copies<1>();
        else ptx::wait_for_copies<0>();
        __syncthreads();  // w, u, kg and the copy of S are there
      }
      chunk_at(i);
      const int64_t row = first_row + i;
      if (p_.h.data && row < p_.h_rows) store_h(state_at(p_.h, row));
      unsigned char* v_new = buffer(m_.u, i);
      make_values(buffer(m_.w, i), v_new);
      __syncthreads();  // v_new is there, S and w are read
      if (kSize == 0 && m_.room == kHalf) {
        ask_keys(p_.kg, m_.kg, m_.kg_stride, i);
        arrived();
      }
      if (!by_lines<E> && p_.v_new.data) store_values(v_new);
      update(buffer(m_.kg, i), v_new);
      if (i + 1 < count_) Base::load_ell(i + 1);
      put_S();
      if (m_.room != kTwo) {
        __syncthreads();  // v_new and kg are read
      } else if (i + 1 < count_) {
        ptx::wait_for_copies<0>();
        __syncthreads();  // v_new and kg are read; the next w, u, kg and the copy of S are there
      }
    }
    Base::keep_state();
  }

 private:
  // ---- copies of the parts of a chunk ----

  __device__ unsigned char* buffer(int offset, int i) const {
    return shared_ + offset + (m_.room == kTwo && i % 2 ? m_.step : 0);
  }
  __device__ __forceinline__ void ask_keys(const Rows& x, int offset, int stride, int i) {
    chunk_at(i);
    for (int c = 0; c < K(); c += kSlice)
      stage<E, kRows, kSlice, kBlock>(tokens_of(x, chunk_, hv_, c, K()), buffer(offset, i) + c * sizeof(E), stride);
  }
  __device__ __forceinline__ void ask(int i) {
#pragma unroll kSize ? 2 : 1
    for (int part = 0; part < (m_.room == kHalf ? 1 : 2); ++part)
      ask_keys(part ? p_.kg : p_.w, part ? m_.kg : m_.w, part ? m_.kg_stride : m_.w_stride, i);
    stage<E, kRows, kColumns, kBlock>(tokens_of(p_.u, chunk_, hv_, v0_, v0_ + columns()), buffer(m_.u, i), m_.u_stride);
    ptx::commit_copies();
  }

  // ---- h: from the copy of S, or in f32 from the registers ----

  __device__ __forceinline__ void store_h(char* to) {
    if constexpr (by_lines<E>) {
      store_S(to);
    } else if (p_.v_first) {
#pragma unroll 1
      for (int c = 0; c < K(); c += kSlice)
        unstage<E, kColumns, kSlice>(shared_ + c * sizeof(E), m_.S_stride, p_.h, columns(), K() - c,
                                     [&](int l) { return to + l * p_.h.token + c * p_.h.size(); });
    } else {
      unstage<E, kMost, kColumns>(shared_, m_.S_stride, p_.h, K(), columns(),
                                  [&](int l) { return to + l * p_.h.token; });
    }
  }
  __device__ __forceinline__ void store_S(char* to) {
    if (p_.v_first) {
      Base::for_each([&](int k, int v, float y) {
        if (k < K() && v < columns()) store_element(to + v * p_.h.token + k * p_.h.size(), p_.h.dtype, y);
      });
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kOwn; ++n)
          for_each_pair(S_[tile][n], [&](int k, int v, float x, float y) {
            const int line = row_of(tile) + k;
            if (line < K()) store_pair(p_.h, to + line * p_.h.token, own0_ + n * 16 + v, columns(), x, y);
          });
    }
  }

  // ---- v_new = u - w S, in place of u ----

  __device__ bool has_part() const { return kColumns >= 32 || column0_ < kColumns; }

  __device__ __forceinline__ void make_values(const unsigned char* w, unsigned char* v_new) {
    Chains wS[kParts];
    const auto multiply = [&](int c, int odd) {
      const auto a = M::load_a(w, m_.w_stride, i0_, c);
#pragma unroll
      for (int n = 0; n < kParts; ++n) M::add(wS[n], a, load_S(c, column0_ + n * 16), odd);
    };
    if constexpr (kTwice) {
#pragma unroll kSize ? kSize / 32 : 1
      for (int c = 0; c < K(); c += 32)
        if (kSize || c + twin_ * 16 < K()) multiply(c + twin_ * 16, 0);
    } else {
#pragma unroll kAhead
      for (int c = 0; c < K() && has_part(); c += 32)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
          if (c + 16 * odd < K()) multiply(c + 16 * odd, odd);
    }
    if constexpr (kTwice) {
      share_parts(wS[0].sum(), v_new);
    } else if (has_part()) {
#pragma unroll
      for (int n = 0; n < kParts; ++n)
        for_each_pair(wS[n].sum(),
                      [&](int r, int c, float x, float y) { put_values(v_new, i0_ + r, column0_ + n * 16 + c, x, y); });
    }
  }
  // A warp finishes eight columns, and gives its part of the others to its twin.
  __device__ __forceinline__ void share_parts(const Sum& part, unsigned char* v_new) {
    const auto pick = [&](int j, int e) { return j ? part.x[1][e] : part.x[0][e]; };
    auto* parts = reinterpret_cast<float4*>(shared_ + m_.parts) + warp_ % kWarps * 64 + threadIdx.x % 32;
    parts[(1 - twin_) * 32] = {pick(1 - twin_, 0), pick(1 - twin_, 1), pick(1 - twin_, 2), pick(1 - twin_, 3)};
    ptx::sync_some(1 + warp_ % kWarps, 64);  // both parts are there
    const float4 other = parts[twin_ * 32];
    const int column = column0_ + 8 * twin_ + static_cast<int>(threadIdx.x % 4) * 2;
    put_values(v_new, i0_ + g_, column, pick(twin_, 0) + other.x, pick(twin_, 1) + other.y);
    put_values(v_new, i0_ + g_ + 8, column, pick(twin_, 2) + other.z, pick(twin_, 3) + other.w);
  }
  // Takes two numbers of w S from u.
  __device__ __forceinline__ void put_values(unsigned char* v_new, int line, int column, float x, float y) {
    const float2 u = M::load_two(v_new, m_.u_stride, line, column);
    x = u.x - x, y = u.y - y;
    if constexpr (kTwice) M::store_two_split(v_new, v_rest(v_new), m_.u_stride, line, column, x, y);
    else M::store_two(v_new, m_.u_stride, line, column, x, y);
    if constexpr (by_lines<E>)
      if (p_.v_new.data && line < chunk_.rows)
        store_pair(p_.v_new, p_.v_new.at(chunk_.b, chunk_.t0 + line, hv_) + v0_ * p_.v_new.size(), column, columns(), x,
                   y);
  }
  // Where the rests of v_new are, from v_new on.
  __device__ int v_rest(const unsigned char* v_new) const { return m_.v_rest - static_cast<int>(v_new - shared_); }
  __device__ __forceinline__ void store_values(const unsigned char* v_new) {
    char* to = p_.v_new.at(chunk_.b, chunk_.t0, hv_) + v0_ * p_.v_new.size();
    unstage<E, kRows, kColumns, kBlock>(v_new, m_.u_stride, p_.v_new, chunk_.rows, columns(),
                                        [&](int l) { return to + l * p_.v_new.token; });
  }

  // ---- S <- Diag(ell) S + kg^T v_new ----

  __device__ __forceinline__ void update(const unsigned char* kg, const unsigned char* v_new) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (!kFull && row_of(tile) >= K()) break;
      Base::decay(tile);
      [[maybe_unused]] Sum of_rests[kOwn];
#pragma unroll kSteps
      for (int t = 0; t < kRows; t += 16) {
        const auto a = M::load_a_transposed(kg, m_.kg_stride, t, row_of(tile));
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          const auto b = load_v(v_new, v_rest(v_new), t, own0_ + n * 16);
          if constexpr (by_lines<E>) M::add(S_[tile][n], of_rests[n], a, b);
          else M::add(S_[tile][n], a, b);
        }
      }
      if constexpr (by_lines<E>)
#pragma unroll
        for (int n = 0; n < kOwn; ++n) S_[tile][n] = sum_of(S_[tile][n], of_rests[n]);
    }
  }

  const bool first_tile_;
  const int twin_;          // which of two warps
  const int i0_, column0_;  // of v_new
};

}  // namespace kda::cuda::stages
