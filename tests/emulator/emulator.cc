#include "emulator.h"

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"
#include "error.h"
#include "wave.h"

namespace kda::emulator {
namespace {

// A kernel's destructor that meets a Failure ends the program. Whoever reads the output is told what was found, in the
// words of a failed expectation.
[[noreturn]] void report_failure() {
  const std::exception_ptr error = std::current_exception();
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Failure& failure) {
    std::printf("\nemulator: Failure\n%s\n", failure.what.c_str());
  } catch (...) {
  }
  std::fflush(stdout);
  std::abort();
}
[[maybe_unused]] const std::terminate_handler usual = std::set_terminate(report_failure);

uint64_t setting(const char* name, uint64_t usual) {
  const char* given = std::getenv(name);
  return given ? std::strtoull(given, nullptr, 10) : usual;
}
uint64_t& seed() {
  static uint64_t own = setting("KDA_EMULATOR_SEED", 1);
  return own;
}

// Each block has a few megabytes. Given back to the system and asked for again, they would be cleared page by page: a
// fifth of the time.
bool keep_memory() {
  const bool large = mallopt(M_MMAP_THRESHOLD, 1 << 30);
  return mallopt(M_TRIM_THRESHOLD, 1 << 30) && large;
}

}  // namespace

const Gpu& gpu() {
  static const Gpu own = [] {
    const int architecture = static_cast<int>(setting("KDA_EMULATOR_ARCH", 90));
    return Gpu{.major = architecture / 10,
               .minor = architecture % 10,
               .multiprocessors = static_cast<int>(setting("KDA_EMULATOR_SMS", 4)),
               .shared_memory_of_block = (architecture == 86 || architecture == 89 || architecture >= 120 ? 99
                                          : architecture >= 90                                            ? 227
                                                                                                          : 163)
                                         << 10,
               .ptx = architecture >= 90 && architecture < 110 ? 90 : 80,
               .devices = static_cast<int>(setting("KDA_EMULATOR_DEVICES", 1))};
  }();
  return own;
}

void set_seed(uint64_t x) { seed() = x; }

std::string run(const Launch& launch, const std::function<void()>& thread) {
  [[maybe_unused]] static const bool kept = keep_memory();
  static std::mutex one_at_a_time;
  static Stacks stacks;
  const std::lock_guard lock(one_at_a_time);
  Random random(seed());
  blockDim = launch.block, gridDim = launch.grid;
  std::vector<uint3> blocks;
  for (unsigned z = 0; z < launch.grid.z; ++z)
    for (unsigned y = 0; y < launch.grid.y; ++y)
      for (unsigned x = 0; x < launch.grid.x; ++x) blocks.push_back({x, y, z});
  std::vector<uint3> shuffled = blocks;
  random.shuffle(shuffled);
  if (launch.cluster < 2) {
    Wave alone(launch, 1, std::move(shuffled), thread, random, stacks);
    const std::string failure = alone.run();
    if (!alone.needs_clusters()) return failure;
  }
  const unsigned cluster = std::max(launch.cluster, 2u);
  if (launch.grid.x % cluster) return str("a grid of ", launch.grid.x, " blocks in clusters of ", cluster);
  return Wave(launch, cluster, std::move(blocks), thread, random, stacks).run();
}

void fail(const std::string& what, Where where) { wave->fail(what, where); }
bool meet(unsigned barrier, unsigned count, Where where, bool x) { return wave->meet(barrier, count, true, x, where); }
void arrive_at_meeting(unsigned barrier, unsigned count, Where where) {
  wave->meet(barrier, count, false, true, where);
}
void together(const char* what, void* operands, void (*compute)(void* const*), Where where, unsigned mask) {
  wave->together(what, operands, compute, where, mask);
}
void together_in_group(const char* what, void* operands, void (*compute)(void* const*), Where where) {
  wave->together_in_group(what, operands, compute, where);
}
void sync_warp(Where where, unsigned mask) {
  together(
      "__syncwarp()", mask, [](void* const* all) { wave->order_lanes(first_of<unsigned>(all)); }, where, mask);
}

void wait_for_kernel_in_front() { wave->fiber().waits_in_front = false; }
void expect_waited(const char* what, Where where) {
  if (wave->fiber().waits_in_front) fail(str(what, " before it waits for the kernel in front"), where);
}

unsigned elected_lane() { return wave->elected(); }

unsigned own_lane() { return wave->thread() % kLanes; }

// ---- shared memory ----

unsigned shared_address(const void* pointer) { return wave->block().memory.address_of(pointer) | rank_bits(); }

void load(void* to, unsigned from, unsigned bytes, Where where, bool wants) {
  SharedMemory& memory = wave->block_of(from).memory;
  const char* at = memory.at(from, bytes, where);
  memory.read(from, bytes, wave->thread(), wants, where);
  std::memcpy(to, at, bytes);
}
void store(unsigned to, const void* from, unsigned bytes, Where where) {
  SharedMemory& memory = wave->block_of(to).memory;
  char* at = memory.at(to, bytes, where);
  memory.write(to, bytes, wave->thread(), std::memcmp(at, from, bytes) == 0, where);
  std::memcpy(at, from, bytes);
}

void copy(unsigned to, const void* from, unsigned size, unsigned bytes, Where where) {
  if (bytes > size) fail(str("a copy of ", bytes, " bytes to ", size), where);
  expect_waited("copies", where);
  if (bytes && reinterpret_cast<uintptr_t>(from) % size) fail(str("a copy from no multiple of ", size), where);
  wave->block().memory.expect(to, size, wave->thread(), where);
  Copy c{.to = to, .size = size, .bytes = {}};
  std::memcpy(c.bytes, from, bytes);
  wave->fiber().copies.add(c);
}
void commit_copies() { wave->fiber().copies.commit(); }
// Copies arrive now and no sooner: an earlier read sees poison, and fails.
void wait_for_copies(unsigned groups) {
  SharedMemory& memory = wave->block().memory;
  wave->fiber().copies.wait(groups, [&](const Copy& c) {
    std::memcpy(memory.at(c.to, c.size, {}), c.bytes, c.size);
    memory.receive(c.to, c.size);
  });
}

}  // namespace kda::emulator

void __syncwarp(unsigned mask, kda::emulator::Where where) { kda::emulator::sync_warp(where, mask); }

unsigned __ballot_sync(unsigned mask, int predicate, kda::emulator::Where where) {
  using kda::emulator::of;
  struct Own {
    bool yes;
    unsigned all;
  } own{predicate != 0, 0};
  const auto count = [](void* const* all) {
    unsigned votes = 0;
    for (unsigned l = 0; l < 32; ++l) votes |= unsigned{all[l] && of<Own>(all, l).yes} << l;
    for (unsigned l = 0; l < 32; ++l)
      if (all[l]) of<Own>(all, l).all = votes;
  };
  kda::emulator::together("a vote", own, count, where, mask);
  return own.all;
}

namespace {

// Joins what all lanes give, two by two.
unsigned reduce(const char* what, unsigned mask, unsigned x, unsigned (*join)(unsigned, unsigned),
                kda::emulator::Where where) {
  using kda::emulator::of;
  struct Own {
    unsigned given, got;
    unsigned (*join)(unsigned, unsigned);
  } own{x, 0, join};
  const auto join_all = [](void* const* all) {
    const auto join = kda::emulator::first_of<Own>(all).join;
    unsigned joined = 0;
    bool any = false;
    for (unsigned l = 0; l < 32; ++l)
      if (all[l]) joined = any ? join(joined, of<Own>(all, l).given) : of<Own>(all, l).given, any = true;
    for (unsigned l = 0; l < 32; ++l)
      if (all[l]) of<Own>(all, l).got = joined;
  };
  kda::emulator::together(what, own, join_all, where, mask);
  return own.got;
}

}  // namespace

#define KDA_REDUCE(name, joined)                                                           \
  unsigned name(unsigned mask, unsigned x, kda::emulator::Where where) {                   \
    return reduce(                                                                         \
        #name, mask, x, [](unsigned a, unsigned b) -> unsigned { return joined; }, where); \
  }
KDA_REDUCE(__reduce_add_sync, a + b)
KDA_REDUCE(__reduce_max_sync, max(a, b))
KDA_REDUCE(__reduce_min_sync, min(a, b))
KDA_REDUCE(__reduce_or_sync, a | b)
