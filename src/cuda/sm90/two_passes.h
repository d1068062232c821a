// Segments in two passes: a pair of blocks makes the map of a piece, and then scans the piece behind it for its outputs.
#pragma once
#include "cuda/sm90/maps.h"

namespace kda::cuda::sm90 {

template <class T, bool kValues = true>
class TwoPassScan : public MapScan<T, false, kValues> {
  using Base = MapScan<T, false, kValues>;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::segments_;

 public:
  __device__ TwoPassScan(const Call& call, const Segments& segments, unsigned memory) : Base(call, segments, memory) {}

  // b of a piece, or M where there are no values.
  __device__ __forceinline__ void map() {
    if (lane_ == 0) ring_.open();
    Base::begin_map();
    // The last stages stay as they are: maps will come there.
    this->template scan_piece<false, kValues ? kStages : 0>(chunks() * kRows, [](unsigned, const unsigned(&)[2][4]) {});
    ptx::sync_ways(Base::kReadBarrier, 2 * kGroup);  // nobody reads those stages any more
    const Task task = Task::here();
    Base::store_map(task);
    Base::share(task, 1);
    ptx::sync_ways(Base::kReadBarrier, 2 * kGroup);  // M has been copied: maps may come to that stage
  }
  // Outputs: of a sequence's first piece and the one behind it, or of the one behind a piece whose map has been made. (One way for
  // both: instructions that run for the first time are what a short call waits for.)
  __device__ __forceinline__ void outputs() {
    const Task task = Task::here();
    const Item item = task.item();
    unsigned chunk = 0, first = 0, end = task.end;
    if (task.index > 0) {
      pass_all(task);
      chunk = chunks(), first = end, end = task.then;
    } else {
      if (lane_ == 0) ring_.open(2);
      Base::Scan::load(task.sequence(), task.hv);
    }
    Base::remember(task.sequence(), task.hv);
    for (;;) {
      Base::scan(item, first, end, chunk);
      const bool last = end == task.then;
      if (!last) Base::store(segments_.offset(task.hv, task.n, task.number));
      if (first == 0) Base::share(task, Segments::kWhole / 2);
      if (last) break;
      first = end, end = task.then;
    }
    finish();
  }
  // Only those of a sequence's first piece, for pieces in one pass.
  __device__ __forceinline__ void first_outputs() {
    const Task task = Task::here();
    unsigned chunk = 0;
    if (lane_ == 0) ring_.open(2);
    Base::Scan::load(task.sequence(), task.hv);
    Base::remember(task.sequence(), task.hv);
    Base::Scan::template scan<false>(task.item(), 0, task.end, chunk, typename Base::Nothing{});
    if (task.end < task.length) {
      Base::store(segments_.offset(task.hv, task.n, task.number));
      Base::share(task, Segments::kWhole / 2);
    }
    finish();
  }

 private:
  __device__ __forceinline__ void finish() {
    const Task& task = Task::shared();  // in registers there is no room for it
    if (task.then == task.length) Base::keep(task.sequence(), task.hv, task.then);
    Base::finish_outputs();
  }
  __device__ unsigned chunks() const { return segments_.cut.tokens / kRows; }  // of a map
  // The last chunks of the map that are in two of the ring's stages: those of the next two chunks, or of the two behind them.
  __device__ void release_two(unsigned behind) const {
    for (unsigned i = 0; lane_ == 0 && i < 2; ++i) ring_.release(chunks() - kStages + 2 * behind + i);
  }
  // The state behind the task's piece.
  __device__ __forceinline__ void pass_all(const Task& task) {
    const unsigned first = task.number - task.index, last = task.index;
    if (last == 1) release_two(0);
    if (threadIdx.x < 32) Base::wait_for_maps(task, last);
    ptx::sync_threads(kScannerBarrier, kGroup);  // all are there
    unit_[0] = unit_[1] = 1;
    Base::load(segments_.offset(task.hv, task.n, first), S_);
    for (unsigned i = 1; i <= last; ++i) {
      Base::pass(typename Base::Operands(S_), segments_.offset(task.hv, task.n, first + i), i, last);
      ptx::sync_threads(kScannerBarrier, kGroup);  // all have read the map
      if (threadIdx.x < 32 && i + 2 <= last && ptx::elect()) Base::fetch_map(task.item(), first, i + 2, last);
      if (i + 1 == last) release_two(0);
    }
    release_two(1);
  }
};

}  // namespace kda::cuda::sm90
