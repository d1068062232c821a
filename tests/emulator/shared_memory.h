// The shared memory of a block, and for each of its bytes which threads accessed it. So an access is found that is not
// ordered with another one (order.h), or that reads what was never written or is still on its way, in whatever order
// threads run.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "emulator.h"
#include "order.h"

namespace kda::emulator {

class SharedMemory {
 public:
  // Of the block whose first thread has that number, with so many bytes of dynamic memory.
  SharedMemory(const Order& order, unsigned first_thread, size_t bytes);

  unsigned address_of(const void* pointer);
  // Where an address is, after its alignment and bounds are checked.
  char* at(unsigned address, unsigned bytes, Where where) const;

  // Of a thread. What is wrong fails the launch. wants: needs all of it.
  void read(unsigned address, unsigned bytes, unsigned thread, bool wants, Where where);
  // again: what is there already. Lanes of a warp may all write the same, and what others of them read.
  void write(unsigned address, unsigned bytes, unsigned thread, bool again, Where where);
  // A thread's own copy (cp.async) is on its way there, and has come.
  void expect(unsigned address, unsigned bytes, unsigned thread, Where where);
  void receive(unsigned address, unsigned bytes);
  // The copy engine, its lane, writes what `thread` has asked for.
  void write_async(unsigned address, unsigned bytes, unsigned thread, unsigned engine, Where where);
  // The copy engine or a product reads from now on, for `thread`; and has read. by_warp: for all of its lanes.
  void begin_async_read(unsigned address, unsigned bytes, unsigned thread, bool wants, Where where);
  void end_async_read(unsigned address, unsigned bytes, unsigned thread, bool by_warp, Where where);

  // The variables of CUDA's language are those of one block at a time.
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
  // By lanes of a warp, at that time, or, if there are `several`, at times of their own. The grain's next one follows.
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

  // Addresses of dynamic memory begin at kFirst, so that 0 is none, in blocks of a cluster with their rank above
  // kOffset; those of other variables, from where they are.
  static constexpr unsigned kFirst = 1024, kOthers = 1u << 31, kOffset = (1u << 24) - 1;

  const Order& order_;
  unsigned first_thread_;
  char* memory_ = nullptr;  // the variable that the kernel has
  size_t bytes_;
  bool has_variables_ = false;
  std::vector<char> kept_;  // while another block has the variables
  std::vector<Grain> grains_;
  std::vector<Read> reads_;
  std::vector<std::vector<Time>> several_;
};

std::string text_of(Where where);  // file:line

// Where the running thread of the host has each variable of KDA_EMULATED_SHARED_MEMORY.
const std::vector<char* (*)()>& shared_variables();
// AddressSanitizer reports accesses behind the first bytes of any of them.
void close_shared_variables_behind(size_t bytes);

}  // namespace kda::emulator
