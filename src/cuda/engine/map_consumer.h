// The consumers that make a map: b, the state of a scan that begins with zeros, and M, that of a scan that begins with
// the identity, with v = 0 (math.md 6).
#pragma once
#include "cuda/engine/outputs.h"

namespace kda::cuda::engine {

// What both kinds of maps have in common: those of segments (segments.h), those of whole sequences (maps.h). Makes b
// or, without kValues, M. Base: the consumer of chunks.
template <class Base>
class MapConsumer : public Base {
 protected:
  using Base::Base, Base::kValues, Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_;

  // Opens the ring and begins with zeros or, for M, with the identity. Returns whether the warpgroup has columns to
  // scan. kPlaces: columns of M have the order of places in a stage, else that of channels.
  template <bool kPlaces>
  __device__ __forceinline__ bool begin() {
    if (lane_ == 0) Base::open();
    // No column of M grows, and most shrink: in these units they stay large enough for long.
    unit_[0] = unit_[1] = kValues ? 1 : 0x1p-6f;
    const bool scans = kValues ? Base::has_columns() : half_of_map() < static_cast<unsigned>(call_.p.K) / kSizeHalf;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const unsigned row = (kPlaces ? Base::position(i / 4) : Base::channel(i / 4)) + i % 2;
      S_[i] = !kValues && scans && Base::column(i / 2 % 2) + columns_before() == row ? 0x1p6f : 0;
    }
    return scans;
  }
  // The half of M's columns that this CTA makes. V = 64 leaves the warps of b in CTA 1 without columns, so those of M
  // there make the first half, which is all of M if K is 64, too.
  __device__ unsigned half_of_map() const { return call_.p.V > kSizeHalf ? ptx::rank() : ptx::rank() ^ 1; }
  // What column() of M's leaves out.
  __device__ unsigned columns_before() const { return half_of_map() * kSizeHalf - ptx::rank() * kSizeHalf; }
  // Waits for the chunks of a map without scanning them, and releases all but the last ones, `held` of them.
  __device__ void leave_out(unsigned chunks, unsigned held) const {
#pragma unroll 1
    for (unsigned number = 0; number < chunks; ++number) {
      ring_.wait_full(number);
      __syncwarp();  // all lanes know that it is full
      if (lane_ == 0 && number + held < chunks) Base::release(number);
    }
  }
};

}  // namespace kda::cuda::engine
