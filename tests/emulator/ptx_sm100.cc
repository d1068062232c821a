// What instructions of Blackwell do (src/cuda_host/include/cuda/ptx/sm100.h): tensor memory. umma.cc has products.
#include "ptx_sm100.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda_runtime.h"
#include "error.h"

namespace kda::cuda::ptx {
namespace {

unsigned own_warp() { return wave->thread() / kLanes; }

// ---- columns ----

struct Columns {
  unsigned place, columns;
  Where where;
};
// Lanes of a warp say the same.
template <class Operands>
const Operands& same_in_all(void* const* all, bool (*same)(const Operands&, const Operands&)) {
  const auto& first = emulator::of<Operands>(all, 0);
  for (unsigned l = 1; l < kLanes; ++l) {
    const auto& own = emulator::of<Operands>(all, l);
    if (own.where.line() != first.where.line())
      emulator::fail("lanes of a warp are not at the same tcgen05", own.where);
    if (!same(own, first)) emulator::fail("lanes of a warp do not give the same operands", own.where);
  }
  return first;
}
const Columns& checked_columns(void* const* all) {
  return same_in_all<Columns>(
      all, [](const Columns& a, const Columns& b) { return a.place == b.place && a.columns == b.columns; });
}
void meet_to_allocate(void* const* all) { checked_columns(all); }
void meet_to_free(void* const* all) {
  const Columns& own = checked_columns(all);
  if (lane_of(own.place)) emulator::fail("frees tensor memory at a lane other than 0", own.where);
  tensor(own.where);
}
void meet_to_relinquish(void* const* all) { tensor(checked_columns(all).where).relinquish(); }

// Acts for one block, or, if the other block has come as well, for both.
template <class Act>
void for_blocks(const char* what, const Columns& own, int blocks, const Act& act) {
  if (blocks == 1) return act(wave->block());
  emulator::Pair& pair = wave->pair();
  if (!pair.what) {
    pair.what = what, pair.place = own.place & emulator::kOffset, pair.columns = own.columns;
    pair.rank = wave->rank();
    return wave->wait(pair.waiting, what, 0, own.where);
  }
  if (pair.what != what || pair.place != (own.place & emulator::kOffset) || pair.columns != own.columns ||
      pair.rank == wave->rank())
    emulator::fail(str("meets another block that is at ", pair.what, ", for ", pair.columns, " columns"), own.where);
  for (unsigned rank = 0; rank < 2; ++rank) act(block_of_rank(rank));
  pair.what = nullptr;
  wave->wake(pair.waiting);
}

// The first column, once there is room.
unsigned find_columns(emulator::Block& block, unsigned columns, unsigned drawn, Where where) {
  if (!block.tensor) block.tensor = std::make_unique<TensorMemory>(wave->order());
  for (;;) {
    const unsigned at = block.tensor->allocate(columns, drawn, where);
    if (at < emulator::kTensorColumns) return at;
    wave->wait(block.allocating, "tcgen05.alloc, for columns:", columns, where);
  }
}

}  // namespace

// Lane 0 acts for its warp.
void allocate_columns(unsigned to, unsigned columns, int blocks, Where where) {
  check_blocks(blocks, where);
  emulator::expect_waited("allocates tensor memory", where);
  Columns own{to, columns, where};
  emulator::together("tcgen05.alloc", own, meet_to_allocate, where);
  if (emulator::own_lane() == 0) {
    const unsigned drawn = wave->draw(emulator::kTensorColumns);
    unsigned& at = wave->pair().at;  // blocks that act together have the same columns
    for_blocks("tcgen05.alloc", own, blocks,
               [&](emulator::Block& block) { at = find_columns(block, columns, drawn, where); });
    const unsigned tmem = at;
    emulator::store(to, &tmem, sizeof tmem, where);
  }
  emulator::together("tcgen05.alloc", own, meet_to_allocate, where);
}
void free_columns(unsigned tmem, unsigned columns, int blocks, Where where) {
  check_blocks(blocks, where);
  Columns own{tmem, columns, where};
  emulator::together("tcgen05.dealloc", own, meet_to_free, where);
  if (emulator::own_lane() == 0) {
    for_blocks("tcgen05.dealloc", own, blocks, [&](emulator::Block& block) {
      tensor_of(block, where).free(column_of(tmem), columns, own_warp(), where);
      wave->wake(block.allocating);
    });
  }
  emulator::together("tcgen05.dealloc", own, meet_to_free, where);
}
void relinquish_columns(int blocks, Where where) {
  check_blocks(blocks, where);
  Columns own{0, 0, where};
  emulator::together("tcgen05.relinquish_alloc_permit", own, meet_to_relinquish, where);
}

// ---- between tensor memory and registers ----

namespace {

struct Registers {
  uint32_t* x;
  const uint32_t* stored;
  unsigned count, tmem;
  Cells cells;
  Where where;
  bool by_lanes() const { return cells == Cells::kLanes; }
};

// Calls run(thread's lane, register, lane, column) for all cells of the access.
template <class Run>
void each_cell(const Registers& own, const Run& run) {
  for (unsigned t = 0; t < kLanes; ++t)
    for (unsigned i = 0; i < own.count; ++i) {
      const bool operands = own.cells == Cells::kOperands;
      const unsigned lane = own.by_lanes() ? t : t / 4 + (operands ? i : i / 2) % 2 * 8;
      const unsigned column = own.by_lanes() ? i : operands ? i / 2 * 4 + t % 4 : i / 4 * 8 + t % 4 * 2 + i % 2;
      run(t, i, lane_of(own.tmem) + lane, column_of(own.tmem) + column);
    }
}
unsigned columns_of(const Registers& own) { return own.by_lanes() ? own.count : own.count * 2; }

const Registers& checked(void* const* all) {
  const Registers& first = same_in_all<Registers>(all, [](const Registers& x, const Registers& y) {
    return x.tmem == y.tmem && x.count == y.count && x.cells == y.cells;
  });
  const unsigned lane = lane_of(first.tmem), part = wave->thread_of_block() / kLanes % 4 * kLanes;
  if (lane != part && (first.by_lanes() || lane != part + 16))
    emulator::fail(str("reaches for lane ", lane, " of tensor memory: the warp has lanes ", part, " to ", part + 31),
                   first.where);
  tensor(first.where).check_columns(column_of(first.tmem), columns_of(first), first.where);
  return first;
}

// With M = 64, products write half of a warp's lanes, and a load of all of them brings a half of no use.
bool half_is_written(const TensorMemory& tensor, const Registers& own, unsigned half) {
  for (unsigned lane = half * 16; lane < half * 16 + 16; ++lane)
    for (unsigned c = 0; c < columns_of(own); ++c)
      if (!tensor.is_written(lane_of(own.tmem) + lane, column_of(own.tmem) + c)) return false;
  return true;
}
bool half_is_untouched(const TensorMemory& tensor, const Registers& own, unsigned half) {
  for (unsigned lane = half * 16; lane < half * 16 + 16; ++lane)
    for (unsigned c = 0; c < columns_of(own); ++c)
      if (tensor.is_written(lane_of(own.tmem) + lane, column_of(own.tmem) + c)) return false;
  return true;
}

void load_all(void* const* all) {
  const Registers& first = checked(all);
  TensorMemory& from = tensor(first.where);
  unsigned useless = 2;  // half
  for (unsigned half = 0; half < 2 && first.by_lanes(); ++half)
    if (half_is_untouched(from, first, half) && half_is_written(from, first, 1 - half)) useless = half;
  const unsigned load = from.begin({.kind = Kind::kLoad, .by = own_warp(), .where = first.where});
  each_cell(first, [&](unsigned t, unsigned i, unsigned lane, unsigned column) {
    emulator::of<Registers>(all, t).x[i] = from.read(load, lane, column, lane % kLanes / 16 != useless);
  });
  wave->warp().tensor_loads.push_back(load);
}
void store_all(void* const* all) {
  const Registers& first = checked(all);
  TensorMemory& to = tensor(first.where);
  const unsigned store = to.begin({.kind = Kind::kStore, .by = own_warp(), .where = first.where});
  each_cell(first, [&](unsigned t, unsigned i, unsigned lane, unsigned column) {
    to.write(store, lane, column, emulator::of<Registers>(all, t).stored[i]);
  });
  wave->warp().tensor_stores.push_back(store);
}

// Of a load or a store. They are on the stack: nothing frees what a launch that fails has allocated.
constexpr unsigned kMostRegisters = 128;
constexpr uint32_t kOnItsWay = 0xfff7fff7u;  // in registers of a load until it is waited for: NaN in every format

void end_all(std::vector<unsigned>& operations, Where where) {
  if (!operations.empty()) tensor(where).end(operations, wave->order().tick());
  operations.clear();
}

}  // namespace

void load_columns(void* x, unsigned count, unsigned from, Cells cells, Where where) {
  uint32_t bits[kMostRegisters];
  Registers own{bits, nullptr, count, from, cells, where};
  emulator::together("tcgen05.ld", own, load_all, where);
  wave->fiber().tensor_loads.push_back({x, {bits, bits + count}, where});
  std::fill_n(bits, count, kOnItsWay);
  std::memcpy(x, bits, count * sizeof(uint32_t));
}
void store_columns(unsigned to, const void* x, unsigned count, Cells cells, Where where) {
  uint32_t bits[kMostRegisters];
  std::memcpy(bits, x, count * sizeof(uint32_t));
  Registers own{nullptr, bits, count, to, cells, where};
  emulator::together("tcgen05.st", own, store_all, where);
}
void wait_for_tmem_loads(Where where) {
  const auto wait = [](void* const* all) { end_all(wave->warp().tensor_loads, emulator::of<Where>(all, 0)); };
  emulator::together("tcgen05.wait::ld", where, wait, where);
  auto& loads = wave->fiber().tensor_loads;
  for (const emulator::TensorLoad& load : loads) {
    uint32_t before[kMostRegisters];
    const size_t count = load.bits.size(), bytes = count * sizeof(uint32_t);
    std::memcpy(before, load.to, bytes);
    if (!std::all_of(before, before + count, [](uint32_t x) { return x == kOnItsWay; }))
      emulator::fail(str("waits for a load from ", emulator::text_of(load.where),
                         ", whose registers have been written, or given up, in between"),
                     where);
    std::memcpy(load.to, load.bits.data(), bytes);
  }
  loads.clear();
}
void wait_for_tmem_stores(Where where) {
  const auto wait = [](void* const* all) { end_all(wave->warp().tensor_stores, emulator::of<Where>(all, 0)); };
  emulator::together("tcgen05.wait::st", where, wait, where);
}
void fence_tmem_before_sync() { wave->order().fence_before(wave->thread()); }
void fence_tmem_after_sync() { wave->order().fence_after(wave->thread()); }

}  // namespace kda::cuda::ptx
