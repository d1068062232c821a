#include "shared_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cuda_runtime.h"
#include "error.h"

namespace kda::emulator {
namespace {

constexpr uint16_t kPoison = 0xfff7;  // NaN in every format, and none that arithmetic makes
void poison(char* first, size_t bytes) {
  std::fill_n(reinterpret_cast<uint16_t*>(first), bytes / sizeof kPoison, kPoison);
}
constexpr uint32_t kAllLanes = ~0u;

}  // namespace

std::string text_of(Where where) {
  const std::string file = where.file_name();
  if (file.empty()) return "a pointer";
  return str(file.substr(file.rfind('/') + 1), ":", where.line());
}

SharedMemory::SharedMemory(const Order& order, unsigned first_thread, size_t bytes)
    : order_(order),
      first_thread_(first_thread),
      memory_(shared_variables().front()()),
      bytes_(bytes),
      kept_(bytes),
      grains_((bytes + kGrain - 1) / kGrain),
      reads_(1),
      several_(1) {
  poison(kept_.data(), bytes);
}

void SharedMemory::begin_variables() {
  for (const auto& variable : shared_variables()) poison(variable(), bytes_);
  has_variables_ = true;
}
void SharedMemory::take_variables() {
  std::memcpy(memory_, kept_.data(), bytes_);
  has_variables_ = true;
}
void SharedMemory::leave_variables() {
  std::memcpy(kept_.data(), memory_, bytes_);
  has_variables_ = false;
}

unsigned SharedMemory::address_of(const void* pointer) {
  const auto distance = [&](const char* from) { return static_cast<const char*>(pointer) - from; };
  for (const auto& variable : shared_variables())
    if (const auto offset = distance(variable()); offset >= 0 && offset < static_cast<ptrdiff_t>(kMostShared)) {
      memory_ = variable();  // of all variables, the kernel uses this one
      return static_cast<unsigned>(offset) + kFirst;
    }
  return static_cast<unsigned>(distance(memory_) + kOthers);
}

char* SharedMemory::at(unsigned address, unsigned bytes, Where where) const {
  if (address % bytes) fail(str("address ", address, " is no multiple of ", bytes), where);
  if (address >= kOthers / 2) return memory_ + static_cast<ptrdiff_t>(address) - static_cast<ptrdiff_t>(kOthers);
  const unsigned offset = (address & kOffset) - kFirst;  // wraps to a huge number below kFirst
  if (offset >= bytes_ || bytes > bytes_ - offset)
    fail(str(bytes, " bytes at ", static_cast<int64_t>(address & kOffset) - kFirst, " of shared memory, which has ",
             bytes_),
         where);
  return (has_variables_ ? memory_ : const_cast<char*>(kept_.data())) + offset;
}

std::string SharedMemory::name_of(unsigned thread) const {
  if (thread >= order_.tensor_cores()) return "a product or a copy";
  return order_.is_engine(thread) ? "the copy engine" : str("thread ", thread - first_thread_);
}
std::string SharedMemory::byte(unsigned address) const {
  return str(" byte ", (address & kOffset) - kFirst, " of shared memory, ");
}

bool SharedMemory::is_after(const Read& r, unsigned thread) const {
  if (!r.several) return order_.after(thread, r.warp, r.lanes, r.time);
  for (uint32_t lanes = r.lanes; lanes; lanes &= lanes - 1) {
    const auto lane = static_cast<unsigned>(std::countr_zero(lanes));
    if (!order_.after(thread, r.warp, 1u << lane, several_[r.several][lane])) return false;
  }
  return true;
}

void SharedMemory::check_writer(const Grain& g, const char* what, unsigned address, unsigned thread, bool async,
                                Where where) const {
  if (g.expected)
    fail(str(what, byte(address), "where a copy from ", text_of(g.write.where), " is on its way that ",
             name_of(g.write.thread), " has not waited for"),
         where);
  if (!g.written) return;
  const unsigned warp = g.write.thread / kLanes, lane = 1u << g.write.thread % kLanes;
  const auto says = [&](const char* lacks) {
    fail(str(what, byte(address), "which ", name_of(g.write.thread), " wrote at ", text_of(g.write.where), " without ",
             lacks, " in between"),
         where);
  };
  if (!order_.after(thread, warp, lane, g.write.time)) says("a barrier");
  if (async && !order_.is_engine(g.write.thread) && !order_.after(thread, warp, lane, g.write.time, true))
    says("a fence for the async proxy");
}

// Where bytes nearby have changed without a recorded write, or by one without a place, pointers wrote a struct there,
// and not all of its members need be set.
bool SharedMemory::is_poison(unsigned address) const {
  const char* from = has_variables_ ? memory_ : kept_.data();
  return std::memcmp(from + ((address & kOffset) - kFirst), &kPoison, sizeof kPoison) == 0;
}
void SharedMemory::check_written(const Grain& g, unsigned address, Where where) {
  if (g.written || !is_poison(address)) return;
  constexpr unsigned kNearby = 128;
  const unsigned first = (address & kOffset) / kNearby * kNearby;
  for (unsigned i = 0; i < kNearby; i += kGrain) {
    if (first + i - kFirst + kGrain > bytes_ || is_poison(first + i)) continue;
    if (const Grain& other = grain(first + i); !other.written || !other.write.where.line()) return;
  }
  fail(str("reads", byte(address), "which nobody wrote"), where);
}

// Adds a read to the reads of the same grain by lanes of that warp.
void SharedMemory::add_to(Read& r, unsigned thread, uint32_t lanes, Where where) {
  const Time now = order_.now();
  if (!r.several && (r.time == now || r.lanes == lanes || is_after(r, thread))) {
    r.lanes = r.time == now ? r.lanes | lanes : lanes;
    r.time = now, r.where = where;
    return;
  }
  if (!r.several) {
    r.several = static_cast<uint32_t>(several_.size());
    several_.emplace_back(kLanes, r.time);
  }
  r.lanes |= lanes, r.where = where;
  for (; lanes; lanes &= lanes - 1) several_[r.several][static_cast<unsigned>(std::countr_zero(lanes))] = now;
}
void SharedMemory::add_read(Grain& g, unsigned thread, uint32_t lanes, Where where) {
  const unsigned warp = thread / kLanes;
  for (uint32_t i = g.reads; i; i = reads_[i].next)
    if (reads_[i].warp == warp) return add_to(reads_[i], thread, lanes, where);
  reads_.push_back({.time = order_.now(), .lanes = lanes, .several = 0, .next = g.reads, .warp = warp, .where = where});
  g.reads = static_cast<uint32_t>(reads_.size() - 1);
}

void SharedMemory::read(unsigned address, unsigned bytes, unsigned thread, bool wants, Where where) {
  if (address >= kOthers / 2) return;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    Grain& g = grain(address + i);
    check_writer(g, "reads", address + i, thread, false, where);
    if (wants) check_written(g, address + i, where);
    add_read(g, thread, 1u << thread % kLanes, where);
  }
}

void SharedMemory::take(unsigned address, unsigned bytes, const Writer& by, const char* what, Where where) {
  const unsigned warp = by.thread / kLanes;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    Grain& g = grain(address + i);
    const bool same = by.again && g.written && !g.expected && g.write.thread / kLanes == warp;
    if (!same) check_writer(g, what, address + i, by.thread, by.engine, where);
    if (g.leaving) fail(str(what, byte(address + i), "which a copy or a product still reads"), where);
    for (uint32_t r = g.reads; r; r = reads_[r].next)
      if (!is_after(reads_[r], by.thread) && !(by.again && reads_[r].warp == warp))
        fail(str(what, byte(address + i), "which ",
                 order_.is_engine(reads_[r].warp * kLanes) ? name_of(reads_[r].warp * kLanes)
                                                           : str("warp ", reads_[r].warp - first_thread_ / kLanes),
                 " read at ", text_of(reads_[r].where), " without a barrier in between"),
             where);
    g.reads = 0;  // what comes after this write comes after them
    g.written = true, g.expected = false;
    g.write = {order_.now(), static_cast<uint16_t>(by.engine ? by.engine : by.thread), where};
  }
}
void SharedMemory::write(unsigned address, unsigned bytes, unsigned thread, bool again, Where where) {
  if (address < kOthers / 2) take(address, bytes, {thread, again}, "writes", where);
}
void SharedMemory::write_async(unsigned address, unsigned bytes, unsigned thread, unsigned engine, Where where) {
  if (address < kOthers / 2) take(address, bytes, {thread, false, engine}, "copies to", where);
}

bool SharedMemory::access_plainly(const void* pointer, unsigned bytes, unsigned thread, bool writes) {
  if (bytes < kGrain) return true;
  static thread_local const std::vector<char*> places = [] {
    std::vector<char*> all;
    for (const auto& variable : shared_variables()) all.push_back(variable());
    std::sort(all.begin(), all.end());
    return all;
  }();
  const char* const at = static_cast<const char*>(pointer);
  if (at < places.front() || at >= places.back() + kMostShared) return false;
  char* const variable = *std::prev(std::upper_bound(places.begin(), places.end(), at));
  const auto offset = static_cast<size_t>(at - variable);
  if (offset >= kMostShared) return false;
  if (offset >= bytes_) return true;
  memory_ = variable;
  const unsigned address = static_cast<unsigned>(offset) + kFirst;
  if (bytes > bytes_ - offset) fail(str(bytes, " bytes at ", offset, " of shared memory, which has ", bytes_), {});
  writes ? write(address, bytes, thread, true, {}) : read(address, bytes, thread, false, {});
  return true;
}

void SharedMemory::expect(unsigned address, unsigned bytes, unsigned thread, Where where) {
  poison(at(address, bytes, where), bytes);
  if (address >= kOthers / 2) return;
  take(address, bytes, {thread}, "copies to", where);
  for (unsigned i = 0; i < bytes; i += kGrain) grain(address + i).expected = true;
}
void SharedMemory::receive(unsigned address, unsigned bytes) {
  if (address >= kOthers / 2) return;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    Grain& g = grain(address + i);
    g.expected = false, g.write.time = order_.now();
  }
}

void SharedMemory::begin_async_read(unsigned address, unsigned bytes, unsigned thread, bool wants, Where where) {
  if (address >= kOthers / 2) return;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    Grain& g = grain(address + i);
    check_writer(g, "reads", address + i, thread, true, where);
    if (wants) check_written(g, address + i, where);
    ++g.leaving;
  }
}
void SharedMemory::end_async_read(unsigned address, unsigned bytes, unsigned thread, bool by_warp, Where where) {
  if (address >= kOthers / 2) return;
  for (unsigned i = 0; i < bytes; i += kGrain) {
    Grain& g = grain(address + i);
    --g.leaving;
    add_read(g, thread, by_warp ? kAllLanes : 1u << thread % kLanes, where);
  }
}

}  // namespace kda::emulator
