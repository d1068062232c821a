// The shared memory of a block, and for each of its bytes which threads accessed it. This finds an access that is not
// ordered with another one (order.h), or that reads what was never written or is still on its way, whatever the order
// in which threads run.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "emulator.h"
#include "order.h"

namespace kda::emulator {

// Addresses of dynamic memory: an offset, and above it the rank of the block in its cluster.
constexpr unsigned kRankShift = 24, kOffset = (1u << kRankShift) - 1;

class SharedMemory {
 public:
  // The memory of the block that begins with this thread, with so many bytes of dynamic memory.
  SharedMemory(const Order& order, unsigned first_thread, size_t bytes);

  unsigned address_of(const void* pointer);
  // Where an address is, after its alignment and bounds are checked.
  char* at(unsigned address, unsigned bytes, Where where) const;

  // Accesses of a thread. What is wrong fails the launch. wants: all bytes are needed.
  void read(unsigned address, unsigned bytes, unsigned thread, bool wants, Where where);
  // again: the same bytes are there already. Lanes of a warp may all write the same, even what others of them read.
  void write(unsigned address, unsigned bytes, unsigned thread, bool again, Where where);
  // An access by a pointer. Returns false if it is not to dynamic memory. Single bytes are left out. Lanes of a warp
  // may write where others of them wrote or read: whether it is the same value is not known.
  bool access_plainly(const void* pointer, unsigned bytes, unsigned thread, bool writes);
  // A thread's own copy (cp.async) is on its way there (expect), and has arrived (receive).
  void expect(unsigned address, unsigned bytes, unsigned thread, Where where);
  void receive(unsigned address, unsigned bytes);
  // Lane `engine` of the copy engine writes what `thread` has asked for.
  void write_async(unsigned address, unsigned bytes, unsigned thread, unsigned engine, Where where);
  // The copy engine or a product begins to read, for `thread`, and ends. by_warp: for all lanes of its warp.
  void begin_async_read(unsigned address, unsigned bytes, unsigned thread, bool wants, Where where);
  void end_async_read(unsigned address, unsigned bytes, unsigned thread, bool by_warp, Where where);

  // The variables of CUDA's language hold the memory of one block at a time.
  void begin_variables();
  void take_variables();
  void leave_variables();

 private:
  static constexpr unsigned kGrain = 2;  // bytes: the smallest access of kernels
  using Time = Order::Time;
  struct Write {
    Time time = 0;
    uint16_t thread = 0;
    Where where{};
  };
  // A read by lanes of a warp, at that time or, if there are `several`, at times of their own. next: the grain's next
  // read.
  struct Read {
    Time time;
    uint32_t lanes, several, next;
    unsigned warp;
    Where where;
  };
  struct Grain {
    Write write;
    uint32_t reads = 0;    // the first one; 0: none
    uint16_t leaving = 0;  // reads of the async proxy that are not over
    bool written = false, expected = false;
  };

  Grain& grain(unsigned address) { return grains_[(address & kOffset) / kGrain - kFirst / kGrain]; }
  void add_read(Grain& g, unsigned thread, uint32_t lanes, Where where);
  void add_to(Read& r, unsigned thread, uint32_t lanes, Where where);
  bool is_after(const Read& r, unsigned thread) const;
  void check_writer(const Grain& g, const char* what, unsigned address, unsigned thread, bool async, Where where) const;
  void check_written(const Grain& g, unsigned address, Where where);
  struct Writer {
    unsigned thread;  // whose order counts
    bool again = false;
    unsigned engine = 0;  // or 0: the thread itself
  };
  void take(unsigned address, unsigned bytes, const Writer& by, const char* what, Where where);
  std::string name_of(unsigned thread) const;
  std::string byte(unsigned address) const;
  bool is_poison(unsigned address) const;

  // Addresses of dynamic memory begin at kFirst, so that 0 is none; in a cluster they have the block's rank above
  // kOffset. Addresses of other variables are distances from memory_, plus kOthers.
  static constexpr unsigned kFirst = 1024, kOthers = 1u << 31;

  const Order& order_;
  unsigned first_thread_;
  char* memory_ = nullptr;  // the variable that the kernel uses
  size_t bytes_;
  bool has_variables_ = false;
  std::vector<char> kept_;  // its bytes while another block has the variables
  std::vector<Grain> grains_;
  std::vector<Read> reads_;
  std::vector<std::vector<Time>> several_;
};

std::string text_of(Where where);  // file:line

// Where the running thread of the host has each variable of KDA_EMULATED_SHARED_MEMORY.
const std::vector<char* (*)()>& shared_variables();
// Makes AddressSanitizer report accesses behind the first bytes of any of them.
void close_shared_variables_behind(size_t bytes);

}  // namespace kda::emulator
