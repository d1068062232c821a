// F4: v_new = u - w S, then S <- Diag(ell) S + kg^T v_new, chunk after chunk. Columns of a state are independent: a
// block has kColumns of those of a value head, and all chunks of a sequence. A warp has rows 16 w .. (and 128 +
// 16 w ..) of S in registers, in f32; a copy, rounded to E, is in shared memory for the products and for h.
//
// A chunk:
//   1 wait for w, u, kg; ask for the next chunk's, if there is room for two       barrier: all is there, and S
//   2 h from the copy of S; v_new = u - w S in place of u                          barrier: v_new is there, S is read
//   3 v_new to memory; S in registers; its copy                                    barrier: v_new and kg are read
//
// Shared memory at K = 128 in bf16: S 18, w 17, kg 17, u 9 KiB, the last three twice.
//
// With outputs, for prefill_f32, o = scale qG S + Aqk v_new is made here as well, and neither h nor v_new leaves the
// block:
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
#include "cuda/stages/delta_h_memory.h"
#include "cuda/stages/products.h"
#include "cuda/stages/stages.h"

namespace kda::cuda::stages {

template <class E, int kSize, bool kOutputs>
__device__ auto known(const ScanCall& call) -> std::conditional_t<kSize != 0, ScanCall, const ScanCall&> {
  if constexpr (kSize != 0) {
    ScanCall p = call;
    p.dims.K = p.dims.V = kSize, p.chunks.varlen = false;
    set_known<E>(p.kg, p.w, p.u, p.v_new, p.h);
    if constexpr (kOutputs) set_known<E>(p.qG, p.Aqk), p.v_new = p.h = {}, p.o.dtype = KDA_F32;
    return p;
  } else {
    return call;
  }
}

template <class E, int kTiles, int kColumns, int kSize, bool kOutputs>
__global__ void __launch_bounds__(kOutputs ? kThreads : block_of<E, kTiles>, sizeof(E) == 2 ? 2 : 1)
    scan_kernel(const __grid_constant__ ScanCall call, const Blocks blocks, const __grid_constant__ Memory memory) {
  const auto& p = known<E, kSize, kOutputs>(call);
  const Memory m = kOutputs ? Memory::with_outputs(kSize, kColumns)
                   : kSize  ? Memory::of<E, kTiles>(kTwo, kSize, kColumns, false)
                            : memory;
  extern __shared__ float4 dynamic[];
  unsigned char* const shared = reinterpret_cast<unsigned char*>(dynamic);
  using M = Math<E>;
  constexpr int kSlice = slice_of<E>;
  constexpr bool kTwice = splits<E, kTiles> && !kOutputs;
  constexpr int kBlock = kOutputs ? kThreads : block_of<E, kTiles>;
  constexpr int kRowWarps = kOutputs ? row_warps(kColumns) : kWarps;
  constexpr bool kFull = kOutputs || kSize == 128;  // no warp has rows beyond K
  // How much is on its way at once: a lone block of eight warps has registers for it.
  constexpr int kAhead = by_lines<E> && !kTwice ? 2 : 1, kSteps = kTwice ? 2 : by_lines<E> ? 4 : 1;
  constexpr int kParts =
      kColumns / 32 + kColumns % 32 / 16;  // 16 x 16 of w S that a warp has (of 16 columns: four warps)
  constexpr int kOwn = kColumns / 16 * kRowWarps / (kBlock / 32);  // 16 columns of S each, from own0 on
  wait_for_stream();
  const Place at(blocks);
  if (at.n >= blocks.rows) return;  // the grid's last rows
  const Sequence s = p.chunks.sequence(at.n);
  const int64_t hv = at.hv;
  const int K = static_cast<int>(p.dims.K), V = static_cast<int>(p.dims.V);
  const int v0 = static_cast<int>(at.tile) * kColumns, columns = kSize ? kColumns : min(V - v0, kColumns);
  ChunkAt chunk{.n = s.n, .b = s.b, .t0 = s.t0, .rows = 0};
  if (!s.live) {
    for (int64_t t = 0; at.tile == 0 && t < s.length; t += kRows) {
      chunk.t0 = s.t0 + t, chunk.rows = static_cast<int>(min(s.length - t, int64_t{kRows}));
      zero_rows(p.v_new, chunk, hv, V);
    }
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x % 32) / 4;
  const auto row_of = [&](int tile) { return (warp % kRowWarps + kRowWarps * tile) * 16; };  // of S
  const int own0 = warp / kRowWarps * kOwn * 16;

  // Calls f(k, v, number) for all of S that this thread has.
  Sum S[kTiles][kOwn];
  const auto for_each = [&](const auto& f) {
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < kOwn; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          f(row_of(tile) + g + i % 4 / 2 * 8, own0 + n * 16 + i / 4 * 8 + 2 * t + i % 2, S[tile][n].x[i / 4][i % 4]);
  };
  // What lies beyond K or V is 0.
  const auto put_S = [&] {
    const int limit = (K + 15) / 16 * 16;
    if constexpr (kTwice) {
      for_each([&](int k, int v, float y) {
        if (kFull || k < limit) M::store_split(shared, m.S_rest, m.S_stride, v, k, y);
      });
    } else if (by_lines<E> || p.v_first) {
      E* to = reinterpret_cast<E*>(shared);
      for_each([&](int k, int v, float y) {
        if (kFull || k < limit) to[v * m.S_stride + k] = static_cast<E>(y);
      });
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kOwn; ++n)
          for_each_pair(S[tile][n], [&](int k, int v, float x, float y) {
            if (row_of(tile) < limit) M::store_two(shared, m.S_stride, row_of(tile) + k, own0 + n * 16 + v, x, y);
          });
    }
  };
  const auto state_at = [&](const Rows& x, int64_t row) {
    return p.v_first ? x.at(row, v0, hv) : x.at(row, 0, hv) + v0 * x.size();
  };
  // Stores S to memory, from the registers.
  [[maybe_unused]] const auto store_S = [&](char* to) {
    if (p.v_first) {
      for_each([&](int k, int v, float y) {
        if (k < K && v < columns) store_element(to + v * p.h.token + k * p.h.size(), p.h.dtype, y);
      });
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kOwn; ++n)
          for_each_pair(S[tile][n], [&](int k, int v, float x, float y) {
            const int line = row_of(tile) + k;
            if (line < K) store_pair(p.h, to + line * p.h.token, own0 + n * 16 + v, columns, x, y);
          });
    }
  };
  // Operands.
  const auto load_S = [&](int k, int v) {
    if constexpr (kTwice) return M::load_b_transposed_split(shared, m.S_rest, m.S_stride, v, k);
    else if (by_lines<E> || p.v_first) return M::load_b_transposed(shared, m.S_stride, v, k);
    else return M::load_b(shared, m.S_stride, k, v);
  };
  const auto load_v = [&](const void* v_new, int rest, int t, int v) {
    if constexpr (kTwice) return M::load_b_split(v_new, rest, m.u_stride, t, v);
    else return M::load_b(v_new, m.u_stride, t, v);
  };
  // The state in f32, as it lies in memory, on its way to or from registers: where w, kg and u will be or were.
  constexpr int kMost = kOutputs ? kSize : kTiles * 128, kPad = 4;
  float* const whole = reinterpret_cast<float*>(shared + m.w);
  const auto whole_at = [&](int k, int v) -> float& {
    return whole[p.v_first ? v * (kMost + kPad) + k : k * (kColumns + kPad) + v];
  };
  if (p.h0.data) {
    const char* from = state_at(p.h0, s.n);
    if (p.v_first)
      stage<float, kColumns, kMost, kBlock>({from, p.h0.token, columns, K, p.h0.dtype, p.h0.wide}, whole, kMost + kPad);
    else
      stage<float, kMost, kColumns, kBlock>({from, p.h0.token, K, columns, p.h0.dtype, p.h0.wide}, whole,
                                            kColumns + kPad);
    arrived();
    for_each([&](int k, int v, float& y) { y = whole_at(k, v); });
    __syncthreads();  // h0 is read
  }
  put_S();

  // Starts the copies of the parts of a chunk.
  const int count = static_cast<int>((s.length + kRows - 1) / kRows);
  const auto chunk_at = [&](int i) {
    chunk.t0 = s.t0 + int64_t{i} * kRows;
    chunk.rows = kSize ? kRows : static_cast<int>(min(s.length - int64_t{i} * kRows, int64_t{kRows}));
  };
  const auto buffer = [&](int offset, int i) { return shared + offset + (m.room == kTwo && i % 2 ? m.step : 0); };
  const auto ask_keys = [&](const Rows& x, int offset, int stride, int i) {
    chunk_at(i);
    for (int c = 0; c < K; c += kSlice)
      stage<E, kRows, kSlice, kBlock>(tokens_of(x, chunk, hv, c, K), buffer(offset, i) + c * sizeof(E), stride);
  };
  const auto ask = [&](int i) {
#pragma unroll kSize ? 2 : 1
    for (int part = 0; part < (m.room == kHalf ? 1 : 2); ++part)
      ask_keys(part ? p.kg : p.w, part ? m.kg : m.w, part ? m.kg_stride : m.w_stride, i);
    stage<E, kRows, kColumns, kBlock>(tokens_of(p.u, chunk, hv, v0, v0 + columns), buffer(m.u, i), m.u_stride);
    ptx::commit_copies();
  };

  float ell[kTiles][2];  // of rows g and g + 8
  const auto load_ell = [&](int i) {
    chunk_at(i);
    const char* G = kOutputs ? p.ends.at(chunk.b, i, hv) : p.G.at(chunk.b, chunk.t0 + chunk.rows - 1, hv);
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) {
      const int k = row_of(e / 2) + g + e % 2 * 8;
      ell[e / 2][e % 2] = kFull || k < K ? *reinterpret_cast<const float*>(G + k * 4) : 0.0f;
    }
  };
  const auto decay = [&](int tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float factor = ptx::exp2(ell[tile][e]);
#pragma unroll
      for (int n = 0; n < kOwn; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          S[tile][n].x[half][2 * e] *= factor, S[tile][n].x[half][2 * e + 1] *= factor;
    }
  };

  if (count > 0) load_ell(0);
  if constexpr (kOutputs) {
    const auto place = [&](unsigned number) { return shared + m.w + number % kPlaces * m.step; };
    const auto u_at = [&](int i) { return shared + m.u + i % 2 * m.u_step; };
    const auto keys = [&](const Rows& x, unsigned number, int i) {
      chunk_at(i);
      return Pieces<kSize>(x, chunk, hv, 0, place(number), kSize, M::twist);
    };
    const auto keys_across = [&](const Rows& x, unsigned number, int i) {
      chunk_at(i);
      return Pieces<kSize>(x, chunk, hv, 0, place(number), kSize, M::twist_across);
    };
    const auto values = [&](int i, int buffer) {
      chunk_at(i);
      return Pieces<kColumns>(p.u, chunk, hv, v0, u_at(buffer), m.u_stride, [](int) { return 0; });
    };
    const auto scores = [&](int i) {
      chunk_at(i);
      return Pieces<kRows>(p.Aqk, chunk, hv, 0, shared + m.Aqk, kRows, M::twist);
    };

    // Rows of v_new and o. Later rows have more terms of Aqk v_new: each scheduler has two warps with five steps
    // together.
    constexpr bool kBoth = kColumns == 32;  // a warp makes v_new and o
    const bool second = warp >= kWarps / 2;
    const int i0 = (kBoth && second ? 3 - warp % 4 : warp % 4) * 16;
    const bool makes_v = kBoth || !second, makes_o = kBoth || second;
    if (count > 0) {
      ask_all(keys(p.w, 0, 0)), ask_all(keys(p.qG, 1, 0)), ask_all(values(0, 0));
      ptx::commit_copies();
      ask_all(keys_across(p.kg, 2, 0));
      ptx::commit_copies();
      ask_all(keys(p.w, 3, min(1, count - 1)));
      ptx::commit_copies();
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i == 0) {
        ptx::wait_for_copies<2>();
        __syncthreads();  // w, u, qG and the copy of S are there
      }
      // Copies start between the products, so that neither waits for all of the others. Behind the last chunk that
      // chunk is copied again, and not read.
      const int next = min(i + 1, count - 1), after = min(i + 2, count - 1);
      const unsigned number = 3 * i;
      Chains wS[2];  // of even and of odd steps
      Sum o;
      const unsigned char *w = place(number), *qG = place(number + 1);
      const auto Aqk_pieces = scores(i);
      const auto qG_pieces = keys(p.qG, number + 4, next);
      const auto u_pieces = values(next, i + 1);
      const auto multiply = [&]<bool kOfV, bool kOfO>() {
#pragma unroll
        for (int c = 0; c < kSize; c += 16) {
          const auto b = load_S(c, own0);
          if constexpr (kOfV) M::add(wS[c / 16 % 2], M::load_a_twisted(w, kSize, i0, c), b);
          if constexpr (kOfO) M::add(o, M::load_a_twisted(qG, kSize, i0, c), b);
          ask_some(c / 16, kSize / 16, Aqk_pieces, qG_pieces, u_pieces);
        }
      };
      if constexpr (kBoth) multiply.template operator()<true, true>();
      else if (makes_v) multiply.template operator()<true, false>();
      else multiply.template operator()<false, true>();
      unsigned char* v_new = u_at(i);
      if (makes_v)
        for_each_pair(sum_of(wS[0].sum(), wS[1].sum()), [&](int r, int c, float x, float y) {
          const float2 u = M::load_two(v_new, m.u_stride, i0 + r, own0 + c);
          M::store_two(v_new, m.u_stride, i0 + r, own0 + c, u.x - x, u.y - y);
        });
      ptx::wait_for_copies<1>();
      __syncthreads();  // v_new, kg and Aqk are there; S, w and qG are read

      const unsigned char* kg = place(number + 2);
      const auto kg_pieces = keys_across(p.kg, number + 5, next);
      const auto w_pieces = keys(p.w, number + 6, after);
      Sum of_rests[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) decay(tile);
      o.scale(p.scale);
#pragma unroll
      for (int t = 0; t < kRows; t += 16) {
        const auto b = load_v(v_new, 0, t, own0);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          M::add(S[tile][0], of_rests[tile], M::load_a_transposed_twisted(kg, kSize, t, row_of(tile)), b);
        ask_some(t / 16, kRows / 16, kg_pieces, w_pieces);
        if (makes_o && t <= i0) M::add(o, M::load_a_twisted(shared + m.Aqk, kRows, i0, t), b);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) S[tile][0] = sum_of(S[tile][0], of_rests[tile]);
      put_S();
      if (makes_o) {
        chunk_at(i);
        char* to = p.o.at(chunk.b, chunk.t0 + i0, hv) + (v0 + own0) * 4;
        for_each_pair(o, [&](int r, int c, float x, float y) { store_pair(p.o, to + r * p.o.token, c, 16, x, y); });
      }
      if (i + 1 < count) {
        load_ell(i + 1);
        ptx::wait_for_copies<2>();
        __syncthreads();  // v_new, kg and Aqk are read; the next w, u, qG and the copy of S are there
      }
    }
    ptx::wait_for_copies<0>();
  } else {
    const int64_t first_row = p.h.data ? p.chunks.first_row(s.n) : 0;
    const int twin = warp / kWarps;                                      // which of two warps
    const int i0 = warp % 4 * 16, column0 = warp / 4 % 2 * kParts * 16;  // of v_new
#pragma unroll 1
    for (int i = 0, asked = 0; i < count; ++i) {
      while (asked < min(i + (m.room == kTwo ? 2 : 1), count)) ask(asked++);
      if (i == 0 || m.room != kTwo) {
        if (asked == i + 2) ptx::wait_for_copies<1>();
        else ptx::wait_for_copies<0>();
        __syncthreads();  // w, u, kg and the copy of S are there
      }
      chunk_at(i);
      const int64_t row = first_row + i;
      if (p.h.data && row < p.h_rows) {
        char* to = state_at(p.h, row);
        if constexpr (by_lines<E>) {
          store_S(to);
        } else if (p.v_first) {
#pragma unroll 1
          for (int c = 0; c < K; c += kSlice)
            unstage<E, kColumns, kSlice>(shared + c * sizeof(E), m.S_stride, p.h, columns, K - c,
                                         [&](int l) { return to + l * p.h.token + c * p.h.size(); });
        } else {
          unstage<E, kMost, kColumns>(shared, m.S_stride, p.h, K, columns, [&](int l) { return to + l * p.h.token; });
        }
      }
      Chains wS[kParts];
      const bool has_part = kColumns >= 32 || column0 < kColumns;
      const unsigned char* w = buffer(m.w, i);
      const auto multiply = [&](int c, int odd) {
        const auto a = M::load_a(w, m.w_stride, i0, c);
#pragma unroll
        for (int n = 0; n < kParts; ++n) M::add(wS[n], a, load_S(c, column0 + n * 16), odd);
      };
      if constexpr (kTwice) {
#pragma unroll kSize ? kSize / 32 : 1
        for (int c = 0; c < K; c += 32)
          if (kSize || c + twin * 16 < K) multiply(c + twin * 16, 0);
      } else {
#pragma unroll kAhead
        for (int c = 0; c < K && has_part; c += 32)
#pragma unroll
          for (int odd = 0; odd < 2; ++odd)
            if (c + 16 * odd < K) multiply(c + 16 * odd, odd);
      }
      unsigned char* v_new = buffer(m.u, i);
      const int v_rest = m.v_rest - static_cast<int>(v_new - shared);  // from v_new on
      const auto put_v = [&](int line, int column, float x, float y) {
        const float2 u = M::load_two(v_new, m.u_stride, line, column);
        x = u.x - x, y = u.y - y;
        if constexpr (kTwice) M::store_two_split(v_new, v_rest, m.u_stride, line, column, x, y);
        else M::store_two(v_new, m.u_stride, line, column, x, y);
        if constexpr (by_lines<E>)
          if (p.v_new.data && line < chunk.rows)
            store_pair(p.v_new, p.v_new.at(chunk.b, chunk.t0 + line, hv) + v0 * p.v_new.size(), column, columns, x, y);
      };
      if constexpr (kTwice) {
        // A warp finishes eight columns, and gives its part of the others to its twin.
        const Sum part = wS[0].sum();
        const auto pick = [&](int j, int e) { return j ? part.x[1][e] : part.x[0][e]; };
        auto* parts = reinterpret_cast<float4*>(shared + m.parts) + warp % kWarps * 64 + threadIdx.x % 32;
        parts[(1 - twin) * 32] = {pick(1 - twin, 0), pick(1 - twin, 1), pick(1 - twin, 2), pick(1 - twin, 3)};
        ptx::sync_some(1 + warp % kWarps, 64);  // both parts are there
        const float4 other = parts[twin * 32];
        const int column = column0 + 8 * twin + static_cast<int>(threadIdx.x % 4) * 2;
        put_v(i0 + g, column, pick(twin, 0) + other.x, pick(twin, 1) + other.y);
        put_v(i0 + g + 8, column, pick(twin, 2) + other.z, pick(twin, 3) + other.w);
      } else if (has_part) {
#pragma unroll
        for (int n = 0; n < kParts; ++n)
          for_each_pair(wS[n].sum(),
                        [&](int r, int c, float x, float y) { put_v(i0 + r, column0 + n * 16 + c, x, y); });
      }
      __syncthreads();  // v_new is there, S and w are read
      if (kSize == 0 && m.room == kHalf) {
        ask_keys(p.kg, m.kg, m.kg_stride, i);
        arrived();
      }
      if (!by_lines<E> && p.v_new.data) {
        char* to = p.v_new.at(chunk.b, chunk.t0, hv) + v0 * p.v_new.size();
        unstage<E, kRows, kColumns, kBlock>(v_new, m.u_stride, p.v_new, chunk.rows, columns,
                                            [&](int l) { return to + l * p.v_new.token; });
      }
      const unsigned char* kg = buffer(m.kg, i);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (!kFull && row_of(tile) >= K) break;
        decay(tile);
        [[maybe_unused]] Sum of_rests[kOwn];
#pragma unroll kSteps
        for (int t = 0; t < kRows; t += 16) {
          const auto a = M::load_a_transposed(kg, m.kg_stride, t, row_of(tile));
#pragma unroll
          for (int n = 0; n < kOwn; ++n) {
            const auto b = load_v(v_new, v_rest, t, own0 + n * 16);
            if constexpr (by_lines<E>) M::add(S[tile][n], of_rests[n], a, b);
            else M::add(S[tile][n], a, b);
          }
        }
        if constexpr (by_lines<E>)
#pragma unroll
          for (int n = 0; n < kOwn; ++n) S[tile][n] = sum_of(S[tile][n], of_rests[n]);
      }
      if (i + 1 < count) load_ell(i + 1);
      put_S();
      if (m.room != kTwo) {
        __syncthreads();  // v_new and kg are read
      } else if (i + 1 < count) {
        ptx::wait_for_copies<0>();
        __syncthreads();  // v_new and kg are read; the next w, u, kg and the copy of S are there
      }
    }
  }
  if (!p.hT.data) return;
  __syncthreads();  // the last w, kg and v_new are read
  for_each([&](int k, int v, float y) { whole_at(k, v) = y; });
  __syncthreads();  // S is there
  char* to = state_at(p.hT, s.n);
  const auto line = [&](int l) { return to + l * p.hT.token; };
  if (p.v_first) unstage<float, kColumns, kMost, kBlock>(whole, kMost + kPad, p.hT, columns, K, line);
  else unstage<float, kMost, kColumns, kBlock>(whole, kColumns + kPad, p.hT, K, columns, line);
}

}  // namespace kda::cuda::stages
