// Outputs of a consumer: from registers to the output tile, and from there to global memory.
#pragma once
#include "cuda/engine/column_scale.h"
#include "cuda/engine/tiles.h"

namespace kda::cuda::engine {

// Stores outputs of chunks. See ColumnScale for the parameters.
template <class T, bool kTraining, bool kValues, bool kReversed = false>
class Outputs : public ColumnScale<T, kTraining, kValues, kReversed> {
  using Base = ColumnScale<T, kTraining, kValues, kReversed>;

 public:
  // Stores zeros as outputs of tokens that belong to no state.
  __device__ void zero_outputs(const Item& item, const Sequence& s, int64_t first, int64_t end) const {
    if (!has_columns()) return;
    const View& o = call_.x.o;
    const unsigned v = first_column() + lane_ % 16;
    for (int64_t t = s.t0 + first + lane_ / 16; t < s.t0 + end; t += 2)
      store_element(o.at(static_cast<unsigned>(s.b), static_cast<unsigned>(t), item.hv) + v * sizeof(T),
                    call_.x.o_dtype, 0);
  }

 protected:
  using Base::Base;
  using Base::column, Base::kBarrier, Base::first_column, Base::has_columns, Base::place, Base::place_at, Base::lane_,
      Base::warp_, Base::ring_, Base::call_, Base::kWarps, Base::unit_, Base::values;
  static constexpr bool kKeepsU = kTraining && !kReversed;
  using typename Base::Place;

  // Waits until TMA has read all outputs: before the CTA ends, or uses the memory for something else.
  __device__ void finish_outputs() const { ptx::wait_for_bulk_reads<0>(); }

  // Where eight of the warp's columns of a token are in a tile: the output tile, or v of a stage.
  __device__ unsigned in_tile(unsigned tile, unsigned token, unsigned piece) const {
    return tile + token * kRowBytes + ((warp_ % kWarps * 2 + piece ^ token % 8) << 4);
  }
  __device__ unsigned output_tile() const { return ring_.memory + Shared::out; }
  // Puts the warp's columns of a chunk into a tile.
  __device__ void put(unsigned tile, const unsigned (&x)[2][4]) const {
    const unsigned to = in_tile(tile, lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::store_transposed(to + j * 16 * kRowBytes, x[j]);
  }
  // Is this the warp that stores the outputs of all warps?
  __device__ bool stores() const { return warp_ % kWarps == 0; }

  // Puts outputs into the output tile, by all warps, when TMA has read those of the chunk before.
  __device__ void stage_outputs(const unsigned (&out)[2][4]) const {
    put(output_tile(), out);
    ptx::fence_shared_for_async();
    if (!stores()) ptx::arrive_threads(NamedBarrier::kOutputsAreThere, kGroup);
  }
  // Does U of chunks leave by TMA?
  __device__ bool sends_U() const { return kKeepsU && call_.saved->used; }
  // Puts U, in bf16, in the place of the chunk's v, which no warp reads after the vote on scales.
  // plain: as is_plain() says.
  __device__ __forceinline__ void stage_U(unsigned stage, float (&U)[kRows / 2], bool plain) const {
    if (!plain) [[unlikely]] {
#pragma unroll
      for (int j = 0; j < 16; ++j) U[j] *= unit_[j / 2 % 2];
    }
    unsigned x[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j / 4][j % 4] = ptx::pack<__nv_bfloat16>(U[2 * j], U[2 * j + 1]);
    put(values(stage), x);
  }
  // Stores the output tile by TMA: the whole chunk from token t on, the columns of all warps. U leaves with it, from
  // `stage`.
  __device__ void store_outputs(const Place& at, unsigned t, unsigned stage) const {
    if (!stores()) return;
    ptx::sync_threads(NamedBarrier::kOutputsAreThere, kGroup);  // outputs of all warps are there
    const unsigned row = at.t0 + t;
    if (!ptx::elect()) return;
    ptx::store_tile(call_.tiles->maps[Tiles::kOutput], first_column(), at.hv, row, at.b, output_tile());
    if (sends_U()) ptx::store_tile(call_.saved->U, first_column(), at.hv, row, at.b, values(stage));
    ptx::commit_bulk();
  }
  // Stores the first `count` rows of the output tile, and of U in `stage`; each warp stores its own columns.
  __device__ void store_rows(unsigned t, unsigned count, unsigned stage) const {
    if (stores()) ptx::sync_threads(NamedBarrier::kOutputsAreThere, kGroup);  // the others have arrived
    __syncwarp();                                                             // outputs are there
    const Place at = place();
    const unsigned piece = lane_ % 2;
    if (!has_columns()) count = 0;
#pragma unroll 1
    for (unsigned row = lane_ / 2; row < count; row += 16) {
      const unsigned token = at.t0 + t + row, bytes = first_column() * sizeof(T) + piece * 16;
      *reinterpret_cast<uint4*>(call_.x.o.at(at.b, token, at.hv) + bytes) =
          ptx::load_shared4(in_tile(output_tile(), row, piece));
      if (sends_U())
        *reinterpret_cast<uint4*>(call_.v_new.at(at.b, token, at.hv) + bytes) =
            ptx::load_shared4(in_tile(values(stage), row, piece));
    }
    __syncwarp();                                              // all reads of the outputs are done
    if (sends_U()) ptx::sync_threads(Base::kBarrier, kGroup);  // those of U, too, of all warps
  }

  // Stores U element by element.
  __device__ void store_corrections(unsigned t, unsigned length, const float (&U)[kRows / 2]) const {
    if (!has_columns()) return;
    const Place at = place();
    const unsigned row = t + lane_ % 4 * 2, size = size_of(call_.v_new.dtype);
    char* const to = call_.v_new.at(at.b, at.t0 + row, at.hv) + column(0) * size;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const unsigned i = j / 4 * 8 + j % 2, c = j / 2 % 2;
      char* place = to + i * static_cast<uint64_t>(call_.v_new.stride1) + c * 8 * size;
      if (row + i < length) store_element(place, call_.v_new.dtype, U[j] * unit_[c]);
    }
  }
  // Releases v of a chunk whose U has left, by the warp that has waited for that.
  __device__ void release_values(unsigned number) const {
    if (stores() && lane_ == 0) ring_.release_values(number);
  }

  // Stores the last outputs of a scan, `count` rows from token t on; their chunk was in `stage`.
  __device__ void store_last(const unsigned (&out)[2][4], unsigned t, unsigned count, unsigned stage) const {
    ptx::wait_for_bulk_reads<0>();
    ptx::sync_threads(kBarrier, kGroup);  // TMA has read the outputs of the chunk before
    stage_outputs(out);
    if (count == kRows) store_outputs(place(), t, stage);
    else store_rows(t, count, stage);
  }

  // Opens the ring's stages, before the first chunks, and releases a chunk from which nothing leaves. One lane calls
  // them, and arrives for `warps` warps.
  __device__ void open(unsigned warps = 1) const { ring_.open(warps, sends_U() && stores()); }
  __device__ void release(unsigned number, unsigned warps = 1) const {
    ring_.release(number, warps);
    if (sends_U() && stores()) ring_.release_values(number);
  }

  // Stores the place() of a value head.
  __device__ void remember(const Sequence& s, unsigned hv) const {
    __syncwarp();  // all reads of the last place are done
    const unsigned first_h =
        kTraining && call_.states.kept[kBefore].data ? first_h_row(call_.p, static_cast<unsigned>(s.n)) : 0;
    ptx::store_shared4(place_at(), make_uint4(static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0), hv, first_h));
    __syncwarp();  // the new place is there
  }
};

}  // namespace kda::cuda::engine
