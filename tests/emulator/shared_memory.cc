#include "shared_memory.h"

#include <algorithm>
#include <cstring>

#include "cuda_runtime.h"
#include "error.h"

namespace kda::emulator {
namespace {

// Addresses of dynamic memory begin here, so that 0 is none; those of other variables, from where they are.
constexpr unsigned kFirst = 1024, kOthers = 1u << 31;
constexpr int kPoison = 0xff;  // NaN in every format

}  // namespace

std::string text_of(Where where) {
  const std::string file = where.file_name();
  return str(file.substr(file.rfind('/') + 1), ":", where.line());
}

void SharedMemory::begin_launch(unsigned threads, size_t bytes) {
  memory_ = shared_variables().front()(), bytes_ = bytes, warps_ = (threads + 31) / 32, block_ = 0;
  const size_t grains = (bytes + kGrain - 1) / kGrain;
  grains_.assign(grains, {}), reads_.assign(grains * warps_, {});
  close_shared_variables_behind(bytes);
}

void SharedMemory::begin_block() {
  for (const auto& variable : shared_variables()) std::memset(variable(), kPoison, bytes_);
  ++block_;
  clocks_.assign(warps_, 1);
  seen_.assign(warps_, std::vector<uint32_t>(warps_, 0));
}

unsigned SharedMemory::address_of(const void* pointer) {
  const auto distance = [&](const char* from) { return static_cast<const char*>(pointer) - from; };
  for (const auto& variable : shared_variables())
    if (const auto offset = distance(variable()); offset >= 0 && offset < static_cast<ptrdiff_t>(kMostShared)) {
      memory_ = variable();  // of all of them, the kernel has this one
      return static_cast<unsigned>(offset) + kFirst;
    }
  return static_cast<unsigned>(distance(memory_) + kOthers);
}

char* SharedMemory::at(unsigned address, unsigned bytes, Where where) const {
  if (address % bytes) fail(str("address ", address, " is no multiple of ", bytes), where);
  if (address >= kOthers / 2) return memory_ + static_cast<ptrdiff_t>(address) - static_cast<ptrdiff_t>(kOthers);
  const unsigned offset = address - kFirst;  // a huge one below kFirst
  if (offset >= bytes_ || bytes > bytes_ - offset)
    fail(str(bytes, " bytes at ", static_cast<int64_t>(address) - kFirst, " of shared memory, which has ", bytes_),
         where);
  return memory_ + offset;
}

SharedMemory::Grain& SharedMemory::grain(unsigned index) {
  Grain& g = grains_[index];
  if (g.block != block_) {
    g = Grain{}, g.block = block_;
    std::fill_n(reads_.begin() + static_cast<ptrdiff_t>(index) * warps_, warps_, Access{});
  }
  return g;
}

// Does what `lane` of `thread`'s warp does now come after an access of a warp?
bool SharedMemory::ordered(unsigned warp, const Access& access, unsigned thread, unsigned lane) const {
  const unsigned own = thread / 32;
  return warp == own ? access.lane == lane || access.clock < clocks_[own] : access.clock < seen_[own][warp];
}

void SharedMemory::check_expected(const Grain& g, const char* what, unsigned address, Where where) const {
  if (g.expected)
    fail(str(what, " byte ", address - kFirst, " of shared memory, where a copy from ", text_of(g.write.where),
             " is on its way that thread ", g.writer, " has not waited for"),
         where);
}

void SharedMemory::check_writer(const Grain& g, const char* what, unsigned address, unsigned thread, unsigned lane,
                                Where where) const {
  check_expected(g, what, address, where);
  if (g.written && !ordered(g.writer / 32, g.write, thread, lane))
    fail(str(what, " byte ", address - kFirst, " of shared memory, which thread ", g.writer, " wrote at ",
             text_of(g.write.where), " without a barrier in between"),
         where);
}

// Only what goes through addresses is recorded: where bytes have changed, somebody else wrote them.
bool SharedMemory::is_poison(unsigned address, unsigned bytes) const {
  const char* from = memory_ + (address - kFirst);
  return std::all_of(from, from + bytes, [](char c) { return c == static_cast<char>(kPoison); });
}

void SharedMemory::read(unsigned address, unsigned bytes, unsigned thread, bool by_warp, Where where) {
  if (address >= kOthers / 2) return;
  const unsigned lane = by_warp ? kSeveral : thread % 32;
  const unsigned width = std::min(bytes, 4u);  // half of an f32 may well be what poison is
  for (unsigned i = 0; i < bytes; i += kGrain) {
    const unsigned index = (address - kFirst + i) / kGrain;
    const Grain& g = grain(index);
    check_writer(g, "reads", address + i, thread, lane, where);
    if (!g.written && is_poison(address + i / width * width, width))
      fail(str("reads byte ", address + i - kFirst, " of shared memory, which nobody wrote"), where);
    Access& known = read_of(index, thread / 32);
    const uint32_t clock = clocks_[thread / 32];
    const bool several = known.clock == clock && known.lane != lane;
    known = {clock, static_cast<uint8_t>(several ? kSeveral : lane), where};
  }
}

void SharedMemory::take(unsigned address, unsigned bytes, unsigned thread, bool expected, const char* what,
                        Where where) {
  const unsigned lane = thread % 32;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    const unsigned index = (address - kFirst + i) / kGrain;
    Grain& g = grain(index);
    check_writer(g, what, address + i, thread, lane, where);
    for (unsigned warp = 0; warp < warps_; ++warp)
      if (const Access& known = read_of(index, warp); known.clock && !ordered(warp, known, thread, lane))
        fail(str(what, " byte ", address + i - kFirst, " of shared memory, which warp ", warp, " read at ",
                 text_of(known.where), " without a barrier in between"),
             where);
    g.writer = static_cast<uint16_t>(thread), g.written = !expected, g.expected = expected;
    g.write = {clocks_[thread / 32], static_cast<uint8_t>(lane), where};
  }
}
void SharedMemory::write(unsigned address, unsigned bytes, unsigned thread, Where where) {
  if (address < kOthers / 2) take(address, bytes, thread, false, "writes", where);
}

void SharedMemory::expect(unsigned address, unsigned bytes, unsigned thread, Where where) {
  std::memset(at(address, bytes, where), kPoison, bytes);
  if (address < kOthers / 2) take(address, bytes, thread, true, "copies to", where);
}

void SharedMemory::receive(unsigned address, unsigned bytes, unsigned thread) {
  if (address >= kOthers / 2) return;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    Grain& g = grain((address - kFirst + i) / kGrain);
    g.expected = false, g.written = true, g.write.clock = clocks_[thread / 32];
  }
}

void SharedMemory::sync_warps(const std::vector<unsigned>& warps) {
  std::vector<uint32_t> together(warps_, 0);
  for (const unsigned w : warps) {
    for (unsigned other = 0; other < warps_; ++other) together[other] = std::max(together[other], seen_[w][other]);
  }
  for (const unsigned w : warps) together[w] = ++clocks_[w];
  for (const unsigned w : warps) seen_[w] = together;
}

}  // namespace kda::emulator
