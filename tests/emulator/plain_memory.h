// Which threads accessed memory that kernels reach by pointers: global memory, for the whole launch, and __shared__
// variables of a fixed size, for a block. This finds two accesses of which one writes and that nothing orders: neither
// barriers nor, among blocks, flags (order.h).
#pragma once
#include <array>
#include <cstdint>
#include <unordered_map>

#include "emulator.h"
#include "order.h"

namespace kda::emulator {

class PlainMemory {
 public:
  enum class Kind { kRead, kWrite, kAtomic };
  // A thread of a block, which has a number of its own in the launch.
  struct Thread {
    unsigned thread, block;
    bool has_acquired;  // the block: some flag, or the order of its cluster
  };
  PlainMemory(const Order& order, const char* name) : order_(order), name_(name) {}

  // An access of a thread. Single bytes are left out. What is wrong fails the launch.
  void access(const void* at, unsigned bytes, const Thread& by, Kind kind, Where where);
  // What was there is no more: another block begins.
  void clear() { lines_.clear(); }

 private:
  static constexpr unsigned kGrain = 2, kLine = 64, kReads = 4;
  struct Access {
    Order::Time time = 0;  // 0: none
    uint16_t thread = 0;
    bool atomic = false;
    unsigned block = 0;
    Where where{};
  };
  // The last write, and the last reads, of which some may be forgotten.
  struct Grain {
    Access write;
    std::array<Access, kReads> reads;
    unsigned next = 0;
  };
  using Line = std::array<Grain, kLine / kGrain>;

  bool is_after(const Access& a, const Thread& by) const;
  [[noreturn]] void fail_at(const void* at, const char* what, const char* before, const Access& a, Where where) const;

  const Order& order_;
  const char* name_;
  std::unordered_map<uintptr_t, Line> lines_;
};

// Whether global memory has clocks: always with KDA_EMULATOR_POINTERS, else for flags and copies if the variable
// KDA_EMULATOR_GLOBAL is 1. Tests may set it.
bool& watches_global();
// Tells of an access to global memory, if it has clocks. Stacks and shared memory have none.
void access_global(const void* at, unsigned bytes, PlainMemory::Kind kind, Where where);
// An access by a pointer: to dynamic shared memory, to a variable of a fixed size, or to global memory.
void access_by_pointer(const void* at, unsigned bytes, PlainMemory::Kind kind);

}  // namespace kda::emulator
