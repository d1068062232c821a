#include "tensor_memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "error.h"
#include "shared_memory.h"

namespace kda::emulator {
namespace {

constexpr unsigned kLeastColumns = 32;
constexpr uint32_t kAllLanes = ~0u;

const char* name_of(TensorMemory::Kind kind) {
  constexpr std::array kNames = {"a load", "a store", "a copy", "a product"};
  return kNames[static_cast<size_t>(kind)];
}
// Of a thread, done by the tensor cores, and not of a warp.
bool is_of_core(TensorMemory::Kind kind) {
  return kind == TensorMemory::Kind::kCopy || kind == TensorMemory::Kind::kProduct;
}

}  // namespace

// ---- columns ----

bool TensorMemory::is_free(unsigned at, unsigned columns) const {
  return std::none_of(allocations_.begin(), allocations_.end(),
                      [&](const auto& a) { return a.first < at + columns && at < a.first + a.second; });
}

// At multiples of their size, sizes that never grow leave no gaps that are too small.
unsigned TensorMemory::allocate(unsigned columns, unsigned drawn, Where where) {
  if (columns < kLeastColumns || columns > kTensorColumns || !std::has_single_bit(columns))
    fail(str("allocates ", columns, " columns of tensor memory: 32, 64, 128, 256 or 512 can be had"), where);
  if (columns > last_columns_)
    fail(str("allocates ", columns, " columns of tensor memory, more than the ", last_columns_, " of last time"),
         where);
  if (relinquished_) fail("allocates tensor memory, which the block has given up to do", where);
  const unsigned places = kTensorColumns / columns;
  for (unsigned i = 0; i < places; ++i)
    if (const unsigned at = (drawn + i) % places * columns; is_free(at, columns)) {
      allocations_[at] = last_columns_ = columns;
      return at;
    }
  return kTensorColumns;
}

bool TensorMemory::is_over(const Operation& o, unsigned warp) const {
  const unsigned thread = warp * kLanes;
  if (is_of_core(o.kind)) return order_.after(thread, o.core / kLanes, 1u << o.core % kLanes, o.time);
  return o.done && (o.by == warp || order_.after(thread, o.by, kAllLanes, o.time));
}

void TensorMemory::free(unsigned at, unsigned columns, unsigned warp, Where where) {
  const auto found = allocations_.find(at);
  if (found == allocations_.end() || found->second != columns)
    fail(str("frees ", columns, " columns of tensor memory at ", at, ", which were not allocated so"), where);
  const auto check = [&](unsigned operation) {
    const Operation& o = operations_[operation];
    if (operation && !is_over(o, warp))
      fail(str("frees tensor memory, of which the end of ", name_of(o.kind), " from ", text_of(o.where),
               " is not ordered before"),
           where);
  };
  for (unsigned lane = 0; lane < kTensorLanes; ++lane)
    for (unsigned column = at; column < at + columns; ++column) {
      Cell& c = cell(lane, column);
      check(c.write);
      for (uint32_t r = c.reads; r; r = reads_[r].next) check(reads_[r].operation);
      c = {};
    }
  allocations_.erase(found);
}

void TensorMemory::check_columns(unsigned at, unsigned count, Where where) const {
  const auto next = allocations_.upper_bound(at);
  if (next != allocations_.begin()) {
    const auto& [first, columns] = *std::prev(next);
    if (at < first + columns && count <= first + columns - at) return;
  }
  fail(str("uses columns ", at, " to ", at + count - 1, " of tensor memory, which are not all of one allocation"),
       where);
}

// ---- operations and their order ----

unsigned TensorMemory::begin(const Operation& operation) {
  operations_.push_back(operation);
  return static_cast<unsigned>(operations_.size() - 1);
}
void TensorMemory::end(const std::vector<unsigned>& operations, Order::Time now) {
  for (const unsigned i : operations) operations_[i].done = true, operations_[i].time = now;
}

// What has to be between these operations, and is not; or nullptr.
const char* TensorMemory::lacks(const Operation& earlier, const Operation& later) const {
  if (is_of_core(earlier.kind)) return lacks_of_core(earlier, later);
  if (!earlier.done) return earlier.kind == Kind::kLoad ? "tcgen05.wait::ld" : "tcgen05.wait::st";
  const bool of_core = is_of_core(later.kind);
  const unsigned first = of_core ? later.by : later.by * kLanes, count = of_core ? 1 : kLanes;
  if (first / kLanes == earlier.by) return nullptr;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const Order::Time fence = order_.fence_of(earlier.by * kLanes + lane, earlier.time);
    if (!fence) return "tcgen05.fence::before_thread_sync";
    for (unsigned t = first; t < first + count; ++t) {
      if (!order_.after(t, earlier.by, 1u << lane, fence)) return "a barrier behind the fence";
      if (!order_.after_at_fence(t, earlier.by, 1u << lane, fence)) return "tcgen05.fence::after_thread_sync";
    }
  }
  return nullptr;
}
const char* TensorMemory::lacks_of_core(const Operation& a, const Operation& b) const {
  const bool of_core = is_of_core(b.kind), same = a.d == b.d && a.shape == b.shape && a.tf32 == b.tf32;
  if (b.kind == Kind::kProduct && a.pair == b.pair && (a.kind == Kind::kCopy || same)) {
    if (a.by == b.by) return nullptr;
    const Order::Time fence = order_.fence_of(a.by, a.time);
    if (fence && order_.after_at_fence(b.by, a.by / kLanes, 1u << a.by % kLanes, fence)) return nullptr;
  }
  const unsigned core = a.core / kLanes, lane = 1u << a.core % kLanes, first = of_core ? b.by : b.by * kLanes;
  for (unsigned t = first; t < first + (of_core ? 1 : kLanes); ++t) {
    if (!order_.after(t, core, lane, a.time)) return "a wait for an mbarrier of its commit";
    if (!order_.after_at_fence(t, core, lane, a.time)) return "tcgen05.fence::after_thread_sync";
  }
  return nullptr;
}

void TensorMemory::expect_after(unsigned earlier, unsigned later, const char* what, const char* which, unsigned lane,
                                unsigned column) {
  if (!earlier || (earlier == earlier_ && later == later_)) return;
  const Operation &a = operations_[earlier], &b = operations_[later];
  if (const char* missing = lacks(a, b))
    fail(str(what, " lane ", lane, ", column ", column, " of tensor memory, which ", name_of(a.kind), " from ",
             text_of(a.where), " ", which, ", without ", missing, " in between"),
         b.where);
  earlier_ = earlier, later_ = later;
}

// ---- accesses ----

uint32_t TensorMemory::read(unsigned operation, unsigned lane, unsigned column, bool wants) {
  Cell& c = cell(lane, column);
  const Operation& own = operations_[operation];
  if (wants && !c.write)
    fail(str("reads lane ", lane, ", column ", column, " of tensor memory, which nobody wrote"), own.where);
  expect_after(c.write, operation, "reads", "writes", lane, column);
  // The same warp's, or thread's, last read stands for those before it: what waits for it waits for all.
  for (uint32_t r = c.reads; r; r = reads_[r].next)
    if (const Operation& other = operations_[reads_[r].operation]; other.kind == own.kind && other.by == own.by) {
      reads_[r].operation = operation;
      return c.value;
    }
  if (!unused_) reads_.push_back({}), unused_ = static_cast<uint32_t>(reads_.size() - 1);
  const uint32_t own_read = std::exchange(unused_, reads_[unused_].next);
  reads_[own_read] = {operation, std::exchange(c.reads, own_read)};
  return c.value;
}

void TensorMemory::write(unsigned operation, unsigned lane, unsigned column, uint32_t x, bool accumulates) {
  Cell& c = cell(lane, column);
  if (accumulates && !c.write)
    fail(str("adds to lane ", lane, ", column ", column, " of tensor memory, which nobody wrote"),
         operations_[operation].where);
  expect_after(c.write, operation, "writes", "writes", lane, column);
  for (uint32_t r = c.reads; r; r = reads_[r].next)
    if (reads_[r].operation != operation) expect_after(reads_[r].operation, operation, "writes", "reads", lane, column);
  c.value = x, c.write = operation, c.reads = 0;
}

}  // namespace kda::emulator
