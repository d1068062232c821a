// The copying and the multiplying warp of stage B3 on Blackwell (wy_memory.h).
#pragma once
#include "cuda/blackwell_stages/wy_memory.h"

namespace kda::cuda::sm100 {

// The warp that copies.
template <bool kVFirst>
class WyCopier {
 public:
  __device__ WyCopier(const WyCall& call, const WyMaps& maps, unsigned base) : c_(call), maps_(maps), base_(base) {}

  // Fills tiles in the order in which they are used, each when the chunk before has been read there.
  __device__ void fill(const WyItem& item) const {
    if (ptx::elect()) {
      wait_for_last({WyAt::right_side_full, WyAt::inverse_there, WyAt::x_made}, item);
      expect(WyAt::right_side_full, kRightSideBytes);
      values(WyAt::dv_new, kWideHalf, maps_.dv_new, item, WyAt::right_side_full);
      wait_for_last({WyAt::states_full, WyAt::all_made}, item);
      fill_states(item);
      wait_for_last({WyAt::rows_read}, item);
      fill_rows(item);
    }
    __syncwarp();
  }

 private:
  // Waits until a tile of the chunk before has been read. A commit tells of products alone: hence the barriers of those
  // that have written to the tile.
  template <unsigned kCount>
  __device__ void wait_for_last(const unsigned (&barriers)[kCount], const WyItem& item) const {
#pragma unroll
    for (unsigned i = 0; i < kCount && item.n > 0; ++i) wait_phase(base_ + barriers[i], item.n - 1);
  }
  __device__ void expect(unsigned barrier, unsigned bytes) const { ptx::arrive_expecting(base_ + barrier, bytes); }
  __device__ void fill_states(const WyItem& item) const {
    const unsigned full = WyAt::states_full;
    expect(full, kStatesWithValuesBytes);
    values(WyAt::d_o, kWideHalf, maps_.d_o, item, full);
    state(WyAt::S, maps_.h, item), state(WyAt::dS, maps_.dh, item);
    values(WyAt::values_0_v_new, sizeof(WyShared::Values), maps_.v_new, item, full);
    values(WyAt::values_0_v, sizeof(WyShared::Values), maps_.v, item, full);
  }
  __device__ void fill_rows(const WyItem& item) const {
    const unsigned h = item.hv / c_.group, full = WyAt::rows_full;
    expect(full, kRowsBytes);
    for (unsigned i = 0; i < 2; ++i) {
      tile(WyAt::q + i * kWideHalf, maps_.q, 64 * i, h, item, full);
      tile(WyAt::k + i * kWideHalf, maps_.k, 64 * i, h, item, full);
    }
    for (unsigned i = 0; i < kSize / 32; ++i) tile(WyAt::G + i * kWideHalf, maps_.G, 32 * i, item.hv, item, full);
  }
  // Both halves of the columns. `part`: bytes from one to the other.
  __device__ void values(unsigned to, unsigned part, const CUtensorMap& map, const WyItem& item, unsigned full) const {
    for (unsigned i = 0; i < 2; ++i) tile(to + i * part, map, 64 * i, item.hv, item, full);
  }
  __device__ void tile(unsigned to, const CUtensorMap& map, unsigned first, unsigned head, const WyItem& item,
                       unsigned full) const {
    ptx::copy_tile(base_ + to, map, first, head, static_cast<unsigned>(item.at.t0), static_cast<unsigned>(item.at.b),
                   base_ + full);
  }
  __device__ void state(unsigned to, const CUtensorMap& map, const WyItem& item) const {
    for (unsigned i = 0; i < 2; ++i)
      ptx::copy_tile(base_ + to + i * kStateHalf, map, 64 * i, 0, item.hv, static_cast<unsigned>(item.state),
                     base_ + WyAt::states_full);
  }

  const WyCall& c_;
  const WyMaps& maps_;
  const unsigned base_;
};

// The warp that begins products.
template <bool kVFirst>
class WyIssuer {
 public:
  __device__ WyIssuer(unsigned base, unsigned tensors) : base_(base), tensors_(tensors) {}

  __device__ void multiply(const WyItem& item) const {
    wait(WyAt::inverse_there, item), wait(WyAt::right_side_full, item);
    if (ptx::elect()) start_solution();
    wait(WyAt::states_full, item);
    if (ptx::elect()) start_state_products();
    wait(WyAt::x_there, item);
    if (ptx::elect()) start_products_with_x();
    __syncwarp();
  }

 private:
  static constexpr unsigned kSteps = kSize / kStepSize, kChunkSteps = kChunk / kStepSize;

  __device__ void wait(unsigned barrier, const WyItem& item) const {
    wait_phase(base_ + barrier, item.n);
    ptx::fence_tmem_after_sync();
  }
  // x^T = dv_new^T J, first with what J's rounding to bf16 left.
  __device__ void start_solution() const {
    const Operand dv_new = Operand::of_lines(base_ + WyAt::dv_new, kWideHalf);
    product<kSize, kChunk, kChunkSteps, true, true>(WyTensors::x, dv_new, lines(WyAt::x_1), false);
    product<kSize, kChunk, kChunkSteps, true, true>(WyTensors::x, dv_new, lines(WyAt::x_0), true);
    ptx::commit_umma(base_ + WyAt::x_made);
  }
  // What needs no x: S d_o^T, dS v_new^T and S dS^T.
  __device__ void start_state_products() const {
    const Operand d_o = Operand::of_rows(base_ + WyAt::d_o, kWideHalf), S = state(WyAt::S), dS = state(WyAt::dS);
    product<kSize, kChunk, kSteps, kVFirst, false>(WyTensors::of_q, S, d_o, false);
    product<kSize, kChunk, kSteps, kVFirst, false>(WyTensors::of_k, dS, values(), false);
    product<kSize, kSize, kSteps, kVFirst, kVFirst>(WyTensors::of_states, S, dS, false);
  }
  // S x^T, and x [v_new; v]^T.
  __device__ void start_products_with_x() const {
    const Operand x = lines(WyAt::x);
    product<kSize, kChunk, kSteps, kVFirst, true>(WyTensors::y, state(WyAt::S), x, false);
    product<kChunk, 2 * kChunk, kSteps, true, false>(WyTensors::scores, x, values(), false);
    ptx::commit_umma(base_ + WyAt::all_made);
  }

  __device__ Operand lines(unsigned at) const { return Operand::of_lines(base_ + at, kWideHalf); }
  __device__ Operand values() const { return Operand::of_rows(base_ + WyAt::values, sizeof(WyShared::Values)); }
  __device__ Operand state(unsigned at) const {
    return kVFirst ? Operand::of_lines(base_ + at, kStateHalf) : Operand::of_rows(base_ + at, kStateHalf);
  }
  // d (M x N) += or = a b^T
  template <unsigned kM, unsigned kN, unsigned kCount, bool kTransposedA, bool kTransposedB>
  __device__ void product(unsigned d, const Operand& a, const Operand& b, bool accumulate) const {
    constexpr unsigned kShape =
        ptx::umma_of<bf16>({.M = kM, .N = kN, .transposed_a = kTransposedA, .transposed_b = kTransposedB});
#pragma unroll
    for (unsigned k = 0; k < kCount; ++k) ptx::umma_f16(tensors_ + d, a.at(k), b.at(k), kShape, accumulate || k > 0);
  }

  const unsigned base_, tensors_;
};

}  // namespace kda::cuda::sm100
