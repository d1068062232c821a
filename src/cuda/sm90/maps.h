// Maps of segments: [b | M] of a piece is stored, and a state goes through it.
//
// The state behind a piece is M S + b, S the state before it (math.md 6). Columns of the state are independent, so the
// ordinary scan makes both: b is the state from zeros, M the one from the identity where v is 0. The first piece of a sequence
// begins with the initial state: its b is the state behind it, and it needs no M.
#pragma once
#include "cuda/sm90/scan.h"
#include "cuda/sm90/segments.h"

namespace kda::cuda::sm90 {

// Where M is made, too, its warps release chunks as well: where not, those of b do so for them.
template <class T, bool kOnePass, bool kValues = true>
class MapScan : public Scan<T, kValues, 2, kOnePass> {
  using Base = Scan<T, kValues, 2, kOnePass>;

 protected:
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_, Base::first_column;
  static constexpr unsigned kReadBarrier = kScannerBarrier + 2;  // of both warpgroups

  __device__ MapScan(const Call& call, const Segments& segments, unsigned memory)
      : Base(call, memory), segments_(segments) {}

  // From where b and M begin. No column of M grows, most shrink: in these units they stay large enough for long.
  __device__ void begin_map() {
    unit_[0] = unit_[1] = kValues ? 1 : 0x1p-6f;
#pragma unroll
    for (int i = 0; i < 64; ++i)
      S_[i] = !kValues && Base::column(i / 2 % 2) == Base::channel(i / 4) + i % 2 ? 0x1p6f : 0;
  }
  __device__ void store_map(const Task& task) const {
    if constexpr (kValues) store(segments_.offset(task.hv, task.n, task.number));
    else store_M(segments_.map(task.hv, task.n, task.number));
  }
  // What the warpgroup has stored.
  __device__ void share(const Task& task, unsigned quarters) const {
    ptx::sync_threads(Base::kBarrier, kGroup);  // all of it
    if (threadIdx.x % kGroup == 0) ptx::add_release(segments_.flag(task.hv, task.number), quarters);
  }
  __device__ void store(float4* to) const {
#pragma unroll
    for (int i = 0; i < 16; ++i, to += 2 * kGroup)
      *to = make_float4(S_[4 * i] * unit_[0], S_[4 * i + 1] * unit_[0], S_[4 * i + 2] * unit_[1],
                        S_[4 * i + 3] * unit_[1]);
  }
  __device__ static void load(const float4* from, float (&x)[64]) {
#pragma unroll
    for (int i = 0; i < 16; ++i, from += 2 * kGroup) {
      const float4 four = *from;
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  }

  // Two numbers as two bf16 each, the leading one and the rest: 16 bits of them together, in the range of f32.
  struct Split {
    unsigned leading, rest;
    __device__ Split(float x, float y) : leading(ptx::pack<__nv_bfloat16>(x, y)) {
      rest = ptx::pack<__nv_bfloat16>(x - __uint_as_float(leading << 16), y - __uint_as_float(leading & 0xffff0000u));
    }
  };
  // S_ as operands.
  struct Operands {
    unsigned leading[8][4], rest[8][4];
    __device__ explicit Operands(const float (&S)[64]) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const Split x(S[2 * j], S[2 * j + 1]);
        leading[j / 4][j % 4] = x.leading, rest[j / 4][j % 4] = x.rest;
      }
    }
  };

  // Maps come into the ring's stages, two into each pair of them in turn: in two passes the last one to that of the second next
  // chunk.
  __device__ unsigned map_stage(unsigned before_last, unsigned half) const {
    return ring_.stage((kOnePass ? 0 : segments_.cut.tokens / kRows + 2) + before_last % 2 * 2 + half);
  }
  __device__ unsigned map_barrier(unsigned i) const { return ring_.memory + Shared::maps + i % 2 * 8; }
  // Map i of `last` of an item, from piece `first` on: by one thread.
  __device__ void fetch_map(const Item& item, unsigned first, unsigned i, unsigned last) const {
    const char* from = segments_.map(item.hv, item.n, first + i);
    ptx::arrive_expecting(map_barrier(i), kMapBytes);
    for (const unsigned half : {0u, 1u})
      ptx::copy_bulk_to_shared(map_stage(last - i, half), from + half * (kMapBytes / 2), kMapBytes / 2, map_barrier(i));
  }
  // Until the maps of a task's piece and of those before it are there; then asks for the first two of 1 .. last. By a warp.
  __device__ void wait_for_maps(const Task& task, unsigned last) const {
    const unsigned first = task.number - task.index;
    // They are made by pairs with lower numbers, at about the same time, without waiting. The last one is the pair's own: when
    // both blocks have made theirs, both have all chunks, and no copy between them reads the stages to which maps come.
    for (unsigned i = lane_; i <= task.index; i += 32)
      while (ptx::load_acquire(segments_.flag(task.hv, first + i)) < Segments::kWhole) {
      }
    __syncwarp();  // all are there
    ptx::fence_global_for_async();
    if (ptx::elect())
      for (unsigned i = 1; i <= min(last, 2u); ++i) fetch_map(task.item(), first, i, last);
  }
  // S <- M S + b. Of the product of two sums only that of both rests is left out: 2^-16 of it.
  __device__ void pass(const Operands& S, const float4* offset, unsigned i, unsigned last) {
    float b[64];
    load(offset, b);  // comes in the meantime
    ptx::wait_barrier(map_barrier(i), (i - 1) / 2 % 2);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint64_t M = ptx::further(ptx::matrix_at(map_stage(last - i, k / 4), kHalf, 1024, ptx::Swizzle::k128),
                                      k % 4 * 16 * kRowBytes);
      ptx::wgmma<__nv_bfloat16, true>(S_, S.leading[k], M, k > 0);
      ptx::wgmma<__nv_bfloat16, true>(S_, S.rest[k], M, true);
      ptx::wgmma<__nv_bfloat16, true>(S_, S.leading[k], ptx::further(M, kRestOfMap), true);
    }
    ptx::commit_products();
    ptx::wait_for_products<0>();
#pragma unroll
    for (int j = 0; j < 64; ++j) S_[j] += b[j];
  }

  const Segments& segments_;

 private:
  // By way of a stage that the other block fills: in two passes, of two where the last map will come to, the one with a chunk that
  // it has prepared. All of that has arrived, as warps have read it, and this block sends nothing from there. (From the other one,
  // its own, the chunk may still be on its way to the other block, whose warps alone know when it is there.) Behind kReadBarrier no
  // warp of b and M reads it any more, and nothing comes before those of b release it.
  __device__ void store_M(char* to) const {
    const unsigned stage = map_stage(0, ptx::rank() ^ 1);  // stages have chunks of one rank, as their number is even
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned row = first_column() % 64 + lane_ / 4 + i % 2 * 8, piece = i / 2;
      const Split x(S_[2 * i] * unit_[i % 2], S_[2 * i + 1] * unit_[i % 2]);
      const unsigned at = stage + piece / 8 * kHalf + row * kRowBytes + ((piece % 8 ^ row % 8) << 4) + lane_ % 4 * 4;
      ptx::store_shared(at, x.leading), ptx::store_shared(at + kRestOfMap, x.rest);
    }
    ptx::fence_shared_for_async();
    ptx::sync_threads(Base::kBarrier, kGroup);  // all of it is there
    if (threadIdx.x % kGroup > 0) return;
    ptx::copy_bulk_to_global(to + ptx::rank() * (kMapBytes / 2), stage, kMapBytes / 2);
    ptx::commit_bulk();
    ptx::wait_for_bulk<0>();
  }
};

}  // namespace kda::cuda::sm90
