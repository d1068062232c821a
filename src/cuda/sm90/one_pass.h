// Segments in one pass: outputs are affine in the state S before a piece, too, o = O_b + O_M S, and the scans of b and M make
// O_b and O_M as any scan makes outputs. When S is known, nothing is prepared or scanned again.
//
// O_b and O_M are bf16, like o. Of the product with S only what rounds O_M is left out: S is two bf16 (maps.h).
#pragma once
#include "cuda/sm90/maps.h"

namespace kda::cuda::sm90 {

template <class T, bool kValues = true>
class OnePassScan : public MapScan<T, true, kValues> {
  using Base = MapScan<T, true, kValues>;
  using Operands = typename Base::Operands;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::segments_, Base::call_, Base::first_column;
  static constexpr unsigned kEndBarrier = kOutputBarrier + 1, kThreads = (2 + kPreparers) * kGroup;

 public:
  __device__ OnePassScan(const Call& call, const Segments& segments, unsigned memory) : Base(call, segments, memory) {}

  // By one thread, before fence_barriers().
  __device__ static void start(unsigned memory) {
    for (unsigned i = 0; i < kSlots; ++i) ptx::init_barrier(memory + Shared::slots + i * 8, 1);
  }
  // b of a piece and O_b, or M and O_M where there are no values.
  __device__ __forceinline__ void map() {
    if (lane_ == 0) ring_.open();
    Base::begin_map();
    {
      const Task task = Task::here();
      const unsigned first = uniform(segments_.first_outputs(task.hv, task.n, task.number));
      this->template scan_piece<true, 0>(task.end - task.first, [&](unsigned chunk, const unsigned(&out)[2][4]) {
        char* to = segments_.outputs + uint64_t{first + chunk / 2} * kOutputsOfTwo + kValues * kOutputsOfMap +
                   (first_column() + lane_ / 4) * kRowBytes + (chunk % 2 * 4 + lane_ % 4 ^ lane_ / 4) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<uint4*>(to + i * 8 * kRowBytes) =
              make_uint4(out[0][i], out[0][i + 2], out[1][i], out[1][i + 2]);
      });
    }
    ptx::fence_global_for_async();                   // copies will read what has been stored
    ptx::sync_ways(Base::kReadBarrier, 2 * kGroup);  // nobody reads stages any more
    const Task task = Task::here();
    if (task.end < task.length || keeps(task)) Base::store_map(task);
    Base::share(task, 1);
    // M has been copied, so that maps may come to that stage, and preparers have ended, so that outputs may come to their benches.
    ptx::sync_ways(kEndBarrier, kThreads);
  }
  // By who prepares, in the end.
  __device__ static void leave() { ptx::arrive_threads(kEndBarrier, kThreads); }

  // The piece's outputs, when the state in front of it is known.
  __device__ __forceinline__ void outputs() {
    pass_all();
    const Operands S(S_);
    complete(S);
    if (!keeps(Task::shared())) return;
    const Task task = Task::here();
    Base::pass(S, segments_.offset(task.hv, task.n, task.number), task.index, task.index);
    Base::keep(task.sequence(), task.hv, task.end);
  }

 private:
  // Is the final state wanted, and behind the piece?
  __device__ bool keeps(const Task& task) const { return task.end == task.length && call_.states.kept[kFinal].data; }
  // The state in front of the piece. The piece's own map comes along where it is needed, and first outputs do.
  __device__ __forceinline__ void pass_all() {
    const Task task = Task::here();
    const unsigned first = task.number - task.index, last = task.index - !keeps(task);
    if (threadIdx.x < 32) {
      Base::wait_for_maps(task, last);
      if (ptx::elect())
        for (unsigned i = 0; i < min(kSlots, twos(task)); ++i) fetch_outputs(task, i);
    }
    ptx::sync_threads(kScannerBarrier, kGroup);  // all are there
    unit_[0] = unit_[1] = 1;
    Base::load(segments_.offset(task.hv, task.n, first), S_);
    for (unsigned i = 1; i < task.index; ++i) {
      Base::pass(Operands(S_), segments_.offset(task.hv, task.n, first + i), i, last);
      ptx::sync_threads(kScannerBarrier, kGroup);  // all have read the map
      if (threadIdx.x < 32 && i + 2 <= last && ptx::elect()) Base::fetch_map(task.item(), first, i + 2, last);
    }
  }

  // Outputs of two chunks come to a slot: of M, then the block's half of those of b. Behind the slots o waits, tokens in rows.
  static constexpr unsigned kSlots = 3, kSlotBytes = kOutputsOfMap + kOutputsOfMap / 2;
  static constexpr unsigned kStagedBytes = 2 * kRows * kRowBytes;
  static_assert(kSlots * kSlotBytes + kStagedBytes <= kPreparers * BenchLayout::bytes);
  __device__ static unsigned twos(const Task& task) { return (task.end - task.first + 2 * kRows - 1) / (2 * kRows); }
  __device__ unsigned slot(unsigned i) const { return ring_.memory + Shared::benches + i % kSlots * kSlotBytes; }
  __device__ unsigned slot_barrier(unsigned i) const { return ring_.memory + Shared::slots + i % kSlots * 8; }
  __device__ void fetch_outputs(const Task& task, unsigned i) const {
    const unsigned to = slot(i), barrier = slot_barrier(i);
    const char* from =
        segments_.outputs + uint64_t{segments_.first_outputs(task.hv, task.n, task.number) + i} * kOutputsOfTwo;
    ptx::arrive_expecting(barrier, kSlotBytes);
    ptx::copy_bulk_to_shared(to, from, kOutputsOfMap, barrier);
    ptx::copy_bulk_to_shared(to + kOutputsOfMap, from + kOutputsOfMap + ptx::rank() * (kOutputsOfMap / 2),
                             kOutputsOfMap / 2, barrier);
  }

  // O_M S of two chunks, on its way.
  __device__ void multiply(const Operands& S, unsigned i, float (&O)[2 * kRows / 2]) const {
    ptx::wait_barrier(slot_barrier(i), i / kSlots % 2);
    const uint64_t M = ptx::matrix_at(slot(i), 16, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      ptx::wgmma<__nv_bfloat16, true>(O, S.leading[k], ptx::further(M, k * 16 * kRowBytes), k > 0);
      ptx::wgmma<__nv_bfloat16, true>(O, S.rest[k], ptx::further(M, k * 16 * kRowBytes), true);
    }
    ptx::commit_products();
  }
  __device__ __forceinline__ void complete(const Operands& S) {
    const Task task = Task::here();
    const unsigned count = twos(task);
    unsigned out[4][4];
#pragma unroll 1
    for (unsigned i = 0; i < count; ++i) {
      lane_ = opaque(lane_);
      float O[2 * kRows / 2];
      multiply(S, i, O);
      if (i > 0) store_two(task, i - 1, out);
      // Numbers 8 j + 2 (lane_ % 4) and one more of a row are those of tokens 8 (lane_ % 4) + 2 (j % 4) and one more of chunk j / 4.
      const unsigned row = slot(i) + kOutputsOfMap + (first_column() % 64 + lane_ / 4) * kRowBytes + lane_ % 4 * 4;
#pragma unroll
      for (unsigned j = 0; j < 16; ++j)
        out[j / 4][j % 4] = ptx::load_shared(row + j % 2 * 8 * kRowBytes + (j / 2 ^ lane_ / 4) * 16);
      ptx::wait_for_products<0>();
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 two = floats_of<T>(out[j / 4][j % 4]);
        out[j / 4][j % 4] = ptx::pack<T>(O[2 * j] + two.x, O[2 * j + 1] + two.y);
      }
      if (Base::stores()) ptx::wait_for_bulk_reads<0>();
      ptx::sync_threads(kScannerBarrier, kGroup);  // all have read the slot; what waited to be stored is read
      if (threadIdx.x < 32 && i + kSlots < count && ptx::elect()) fetch_outputs(task, i + kSlots);
    }
    store_two(task, count - 1, out);
    Base::finish_outputs();
  }
  // Outputs of two chunks.
  __device__ void store_two(const Task& task, unsigned i, const unsigned (&out)[4][4]) const {
    const unsigned staged = slot(0) + kSlots * kSlotBytes;
#pragma unroll
    for (unsigned j = 0; j < 4; ++j) {
      const unsigned n = j % 2 * 2 + lane_ / 16, token = j / 2 * kRows + lane_ % 8 / 2 * 8 + n * 2 + lane_ % 2;
      ptx::store_transposed(Base::staged(staged, token, lane_ / 8 % 2), out[j]);
    }
    ptx::fence_shared_for_async();
    if (!Base::stores()) ptx::arrive_threads(kOutputBarrier, kGroup);
    else ptx::sync_threads(kOutputBarrier, kGroup);  // outputs of all warps are there
    const typename Base::Place at{task.b, task.t0, task.hv};
#pragma unroll
    for (unsigned chunk = 0; chunk < 2; ++chunk) {
      const unsigned t = task.first + (2 * i + chunk) * kRows, tile = staged + chunk * kRows * kRowBytes;
      if (t + kRows > task.end) {
        if (t < task.end) Base::store_rows(at, t, tile, task.end - t);
      } else if (Base::stores()) {
        Base::store_tile(at, t, tile);
      }
    }
  }
};

}  // namespace kda::cuda::sm90
