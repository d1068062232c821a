// The tensor memory of a block, 128 lanes x 512 columns of 32 bits, and for each of its cells which operation wrote and
// read it last. This finds an operation that is not ordered with another one, as section 9.7.16.6 of the PTX ISA 9.1
// has it:
//
// - Loads and stores are a warp's, and done when the warp has waited for them (tcgen05.wait). What the same warp does
//   then comes after them. What others do needs a fence before_thread_sync, a barrier, and a fence after_thread_sync.
// - Products and copies are done when an mbarrier of a later commit has been waited for. Everybody learns that with a
//   fence after_thread_sync. Without a wait, products come after copies, and after products that have the same D, shape
//   and kind.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "emulator.h"
#include "order.h"

namespace kda::emulator {

constexpr unsigned kTensorLanes = 128, kTensorColumns = 512;

class TensorMemory {
 public:
  explicit TensorMemory(const Order& order)
      : order_(order), cells_(kTensorLanes * kTensorColumns), reads_(1), operations_(1) {}

  // Returns the first column, one of those that fit (drawn), or kTensorColumns if there is no room.
  unsigned allocate(unsigned columns, unsigned drawn, Where where);
  void free(unsigned at, unsigned columns, unsigned warp, Where where);
  void relinquish() { relinquished_ = true; }
  bool is_empty() const { return allocations_.empty(); }
  // Fails unless the kernel has these columns.
  void check_columns(unsigned at, unsigned count, Where where) const;

  enum class Kind { kLoad, kStore, kCopy, kProduct };
  struct Operation {
    Kind kind;
    unsigned by;                // a warp, or the thread that began a copy or a product
    unsigned core = 0;          // the thread's lane of the tensor cores
    unsigned d = 0, shape = 0;  // of a product
    bool tf32 = false, pair = false;
    Where where{};
    Order::Time time = 0;  // when it began, if it is a product, or when it was waited for
    bool done = false;     // waited for
  };
  unsigned begin(const Operation& operation);
  // The warp has waited for these loads or stores.
  void end(const std::vector<unsigned>& operations, Order::Time now);

  // Accesses of an operation that has begun. wants: the cell must have been written.
  uint32_t read(unsigned operation, unsigned lane, unsigned column, bool wants = true);
  void write(unsigned operation, unsigned lane, unsigned column, uint32_t x, bool accumulates = false);
  bool is_written(unsigned lane, unsigned column) const { return cell(lane, column).write; }
  uint32_t value(unsigned lane, unsigned column) const { return cell(lane, column).value; }

 private:
  struct Cell {
    uint32_t value = 0xfff7fff7u;   // NaN in every format
    uint32_t write = 0, reads = 0;  // an operation, and the first of a list; or 0
  };
  struct Read {
    uint32_t operation, next;
  };

  Cell& cell(unsigned lane, unsigned column) { return cells_[lane * kTensorColumns + column]; }
  const Cell& cell(unsigned lane, unsigned column) const { return cells_[lane * kTensorColumns + column]; }
  bool is_free(unsigned at, unsigned columns) const;
  const char* lacks(const Operation& earlier, const Operation& later) const;
  const char* lacks_of_core(const Operation& earlier, const Operation& later) const;
  bool is_over(const Operation& operation, unsigned warp) const;
  void expect_after(unsigned earlier, unsigned later, const char* what, const char* which, unsigned lane,
                    unsigned column);

  const Order& order_;
  std::vector<Cell> cells_;
  std::vector<Read> reads_;
  uint32_t unused_ = 0;                       // the first of a list, or 0
  std::vector<Operation> operations_;         // the first is none
  std::map<unsigned, unsigned> allocations_;  // columns, by the first of them
  unsigned last_columns_ = kTensorColumns;
  bool relinquished_ = false;
  uint32_t earlier_ = 0, later_ = 0;  // operations that were found to be in order, the last time
};

}  // namespace kda::emulator
