// The shared memory of a block, and who accessed which of its bytes: so that an access that is not ordered with another one,
// of what nobody wrote, or of what is on its way, is found wherever it happens to fall.
//
// Order is that of barriers and of __syncwarp(). A warp's clock ticks at each of them; seen[w] is the clock of warp w that
// the accesses of this warp come after. Shuffles and products order nothing, as the PTX manual has it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "emulator.h"

namespace kda::emulator {

class SharedMemory {
 public:
  // For blocks of so many threads, with so many bytes of dynamic memory.
  void begin_launch(unsigned threads, size_t bytes);
  void begin_block();

  unsigned address_of(const void* pointer);
  // Where an address is, after its alignment and bounds are checked.
  char* at(unsigned address, unsigned bytes, Where where) const;

  // Of a thread; throws nothing, fails the launch instead.
  void read(unsigned address, unsigned bytes, unsigned thread, bool by_warp, Where where);
  void write(unsigned address, unsigned bytes, unsigned thread, Where where);
  // A copy is on its way there, and has come.
  void expect(unsigned address, unsigned bytes, unsigned thread, Where where);
  void receive(unsigned address, unsigned bytes, unsigned thread);

  void sync_warp(unsigned warp) { ++clocks_[warp]; }
  void sync_warps(const std::vector<unsigned>& warps);

 private:
  static constexpr unsigned kGrain = 2;  // bytes: the smallest access of kernels
  static constexpr unsigned kSeveral = 32;
  struct Access {
    uint32_t clock = 0;
    uint8_t lane = 0;
    Where where{};
  };
  struct Grain {
    uint32_t block = 0;  // what is known is of this one
    uint16_t writer = 0;
    bool written = false, expected = false;
    Access write;
  };

  Grain& grain(unsigned index);
  Access& read_of(unsigned index, unsigned warp) { return reads_[index * warps_ + warp]; }
  bool ordered(unsigned warp, const Access& access, unsigned thread, unsigned lane) const;
  void check_expected(const Grain& g, const char* what, unsigned address, Where where) const;
  void check_writer(const Grain& g, const char* what, unsigned address, unsigned thread, unsigned lane,
                    Where where) const;
  void take(unsigned address, unsigned bytes, unsigned thread, bool expected, const char* what, Where where);
  bool is_poison(unsigned address, unsigned bytes) const;

  char* memory_ = nullptr;
  size_t bytes_ = 0;
  unsigned warps_ = 0;
  uint32_t block_ = 0;
  std::vector<Grain> grains_;
  std::vector<Access> reads_;  // [grain][warp]; clock 0: none
  std::vector<uint32_t> clocks_;
  std::vector<std::vector<uint32_t>> seen_;
};

std::string text_of(Where where);  // file:line

// Where the running thread of the host has each variable of KDA_EMULATED_SHARED_MEMORY.
const std::vector<char* (*)()>& shared_variables();
// AddressSanitizer lets nobody behind the first bytes of any of them.
void close_shared_variables_behind(size_t bytes);

}  // namespace kda::emulator
