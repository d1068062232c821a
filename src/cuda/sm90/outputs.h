// Outputs of a consumer: from registers to the output tile, and from there to global memory.
#pragma once
#include "cuda/sm90/column_scale.h"
#include "cuda/sm90/tiles.h"

namespace kda::cuda::sm90 {

// Stores outputs of chunks. See ColumnScale for the parameters.
template <class T, bool kTraining, bool kValues, bool kReversed = false>
class Outputs : public ColumnScale<T, kTraining, kValues, kReversed> {
  using Base = ColumnScale<T, kTraining, kValues, kReversed>;

 public:
  // Stores zeros as outputs of tokens that belong to no state.
  __device__ void zero_outputs(const Item& item, const Sequence& s, int64_t first, int64_t end) const {
    const View& o = call_.x.o;
    const unsigned v = first_column() + lane_ % 16;
    for (int64_t t = s.t0 + first + lane_ / 16; t < s.t0 + end; t += 2)
      store_element(o.at(static_cast<unsigned>(s.b), static_cast<unsigned>(t), item.hv) + v * sizeof(T),
                    call_.x.o_dtype, 0);
  }

 protected:
  using Base::Base;
  using Base::kBarrier, Base::first_column, Base::place, Base::place_at, Base::lane_, Base::warp_, Base::ring_,
      Base::call_, Base::kWarps;
  using typename Base::Place;

  // Waits until TMA has read all outputs: before the CTA ends, or uses the memory for something else.
  __device__ void finish_outputs() const { ptx::wait_for_bulk_reads<0>(); }

  // Where a token's outputs of eight of the warp's columns are in the output tile.
  __device__ unsigned staged(unsigned token, unsigned piece) const {
    return ring_.memory + Shared::out + token * kRowBytes + ((warp_ % kWarps * 2 + piece ^ token % 8) << 4);
  }
  // Is this the warp that stores the outputs of all warps?
  __device__ bool stores() const { return warp_ % kWarps == 0; }

  // Puts outputs into the output tile, by all warps, when TMA has read those of the chunk before.
  __device__ void stage_outputs(const unsigned (&out)[2][4]) const {
    const unsigned to = staged(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::store_transposed(to + j * 16 * kRowBytes, out[j]);
    ptx::fence_shared_for_async();
    if (!stores()) ptx::arrive_threads(NamedBarrier::kOutputsAreThere, kGroup);
  }
  // Stores the output tile by TMA: the whole chunk from token t on, the columns of all warps.
  __device__ void store_outputs(const Place& at, unsigned t) const {
    if (!stores()) return;
    ptx::sync_threads(NamedBarrier::kOutputsAreThere, kGroup);  // outputs of all warps are there
    const unsigned row = at.t0 + t;
    if (!ptx::elect()) return;
    ptx::store_tile(call_.tiles->maps[Tiles::kOutput], first_column(), at.hv, row, at.b, staged(0, 0));
    ptx::commit_bulk();
  }
  // Stores the first `count` rows of the output tile; each warp stores its own columns.
  __device__ void store_rows(unsigned t, unsigned count) const {
    if (stores()) ptx::sync_threads(NamedBarrier::kOutputsAreThere, kGroup);  // the others have arrived
    __syncwarp();                                                             // outputs are there
    const Place at = place();
    const unsigned piece = lane_ % 2;
#pragma unroll 1
    for (unsigned row = lane_ / 2; row < count; row += 16)
      *reinterpret_cast<uint4*>(call_.x.o.at(at.b, at.t0 + t + row, at.hv) + first_column() * sizeof(T) + piece * 16) =
          ptx::load_shared4(staged(row, piece));
    __syncwarp();  // all reads of the outputs are done
  }

  // Stores the last outputs of a scan, `count` rows from token t on.
  __device__ void store_last(const unsigned (&out)[2][4], unsigned t, unsigned count) const {
    ptx::wait_for_bulk_reads<0>();
    ptx::sync_threads(kBarrier, kGroup);  // TMA has read the outputs of the chunk before
    stage_outputs(out);
    if (count == kRows) store_outputs(place(), t);
    else store_rows(t, count);
  }

  // Where the address of U is in shared memory.
  __device__ unsigned corrections() const { return ring_.memory + Shared::corrections + warp_ % kWarps * 8; }
  // Stores the place() of a value head and the address of U of its first token, column 0.
  __device__ void remember(const Sequence& s, unsigned hv) const {
    __syncwarp();  // all reads of the last place are done
    const unsigned first_h =
        kTraining && call_.states.kept[kBefore].data ? first_h_row(call_.p, static_cast<unsigned>(s.n)) : 0;
    ptx::store_shared4(place_at(), make_uint4(static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0), hv, first_h));
    if (kTraining && call_.v_new.data) {
      const char* to = call_.v_new.at(static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0), hv);
      ptx::store_shared2(corrections(), reinterpret_cast<const uint2&>(to));
    }
    __syncwarp();  // the new place is there
  }
};

}  // namespace kda::cuda::sm90
