// A thread of the consumer: which elements of a state it has, and where outputs go.
#pragma once
#include "cuda/engine/pipeline.h"

namespace kda::cuda::engine {

// Half of a segment's map (segments.h) has the leading bf16 of its numbers, and so far behind them the rests.
constexpr unsigned kRestOfMap = 2 * kHalf;

// A thread of the warpgroup that carries 64 value columns of a state. The warpgroup works on transposes, so a column
// of the state is a row of an accumulator.
class ConsumerThread {
 protected:
  static constexpr unsigned kWarps = 4;
  static constexpr bool kInTensorMemory = false;  // are the products those of tcgen05?

  __device__ ConsumerThread(const Call& call, unsigned memory)
      : call_(call),
        ring_{memory},
        warp_(uniform(threadIdx.x / 32 % kWarps) + ptx::rank() * kWarps),
        lane_(threadIdx.x % 32) {}

  // The warp's first column; where v is in a stage.
  __device__ unsigned first_column() const { return warp_ * 16; }
  // Are the warpgroup's columns in the state? (V = 64 leaves all 64 of them out in one of the CTAs.) Are the channels
  // in position(j)? In each order of channels, those below 64 have the first eight positions.
  __device__ bool has_columns() const { return first_column() < static_cast<unsigned>(call_.p.V); }
  __device__ bool has_channels(int j) const { return j < 8 || call_.p.K > kSizeHalf; }
  __device__ static unsigned values(unsigned stage) { return stage + Stage::v; }
  // The thread has columns first_column() + lane_ / 4 (i = 0) and 8 more (i = 1), and in each of them the channels in
  // two places of a stage, position(j) and one more, for each j. (Which channels these are: StateIo::channel().)
  __device__ unsigned column(int i) const { return first_column() + lane_ / 4 + 8 * i; }
  __device__ unsigned position(int j) const { return 8 * j + lane_ % 4 * 2; }

  // Where the outputs of a work item go. This is in shared memory, where a warp looks it up when it needs it. A
  // fourth number is the row of h of the sequence's first state, if states before chunks are kept.
  struct Place {
    unsigned b, t0, hv;
  };
  __device__ unsigned place_at() const { return ring_.memory + Shared::places + warp_ % kWarps * 16; }
  __device__ Place place() const {
    const uint4 x = ptx::load_shared4(place_at());
    return {x.x, x.y, x.z};
  }

  // Loads decays of the thread's channels over a chunk, and applies them when the products in front are on their way.
  __device__ __forceinline__ void load_decays(unsigned stage, float2 (&ell)[16]) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) ell[j] = ptx::load_shared_f32x2(stage + Stage::ell + position(j) * 4);
  }
  __device__ __forceinline__ void decay(float2 (&ell)[16]) {
#pragma unroll
    for (int j = 0; j < 16; ++j)
      ptx::arrive_in_registers(ell[j].x, ell[j].y);  // S waits until the products are on their way
#pragma unroll
    for (int j = 0; j < 16; ++j)
      S_[4 * j] *= ell[j].x, S_[4 * j + 1] *= ell[j].y, S_[4 * j + 2] *= ell[j].x, S_[4 * j + 3] *= ell[j].y;
  }

  const Call& call_;
  const Ring ring_;
  const unsigned warp_;
  unsigned lane_;
  float S_[64];    // S^T / unit_: accumulators
  float unit_[2];  // of the thread's two columns: column_scale.h
};

}  // namespace kda::cuda::engine
