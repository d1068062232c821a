// Runs CUDA kernels on a CPU: each thread is a fiber, and one block runs after another. The headers of this folder are
// made of what is here; kernels and tests see those headers. tests/emulator defines the functions. A library without
// CUDA compiles the same headers, and calls none of the functions.
//
// A kernel that does what no GPU promises to be harmless fails, and its launch says why and where. README.md there
// lists what is looked for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

#include "vector_types.h"

namespace kda::emulator {

// In the kernel.
#if __cpp_lib_source_location
using Where = std::source_location;
#else  // clang 14, which does not compile the emulator
struct Where {
  static constexpr Where current() { return {}; }
};
#endif

// The GPU that the CUDA runtime reports. It has few SMs, so that kernels that spread over them run in blocks of the
// usual size, or as many as KDA_EMULATOR_SMS says. Its architecture is sm_90, or sm_80 with KDA_EMULATOR_ARCH=80. From
// sm_110 on the library has no code of its own, and kernels are made from the PTX of compute_80. A block has at most 99
// KiB of shared memory with 86, 89 and 120.
struct Gpu {
  int major, minor, multiprocessors;
  int shared_memory_of_block;
  int ptx;  // that kernels are made from
  int devices;
};
const Gpu& gpu();
// Has this thread of the host done anything with CUDA? The driver's own functions refuse others.
bool thread_has_context();

// Sets the seed for the order of blocks, warps and lanes. At first it is KDA_EMULATOR_SEED.
void set_seed(uint64_t seed);

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  unsigned cluster = 0;  // blocks of a cluster; 0: as the kernel says, by asking for its rank: then they are two
  bool early = false;    // the kernel in front of it may still run
};
// Runs thread() in every thread of every block. Returns what went wrong, or "".
std::string run(const Launch& launch, const std::function<void()>& thread);

// Defines what kernels declare as `extern __shared__ float4 dynamic[]`, once for each namespace of kernels; for one
// without a name, in each of its units.
#define KDA_EMULATED_SHARED_MEMORY                                                        \
  alignas(1024) thread_local float4 dynamic[kda::emulator::kMostShared / sizeof(float4)]; \
  const kda::emulator::SharedVariable shared_variable([] { return reinterpret_cast<char*>(dynamic); });
constexpr size_t kMostShared = 227 << 10;
struct SharedVariable {
  explicit SharedVariable(char* (*of_thread)());
};

// ---- for threads of a kernel ----

// Ends the launch.
[[noreturn]] void fail(const std::string& what, Where where);

// Meets `count` threads of the block; 0: all that have not ended. Returns whether every `x` was true.
bool meet(unsigned barrier, unsigned count, Where where, bool x = true);
// Only arrives, at a barrier where others wait.
void arrive_at_meeting(unsigned barrier, unsigned count, Where where);

// The lanes of a warp that a mask names meet, each with operands of its own; the last one to arrive computes what all
// of them get. Lanes that are not named have nullptr.
constexpr unsigned kAllOfWarp = ~0u;
void together(const char* what, void* operands, void (*compute)(void* const* all), Where where,
              unsigned mask = kAllOfWarp);
template <class Operands>
void together(const char* what, Operands& own, void (*compute)(void* const* all), Where where,
              unsigned mask = kAllOfWarp) {
  together(what, static_cast<void*>(&own), compute, where, mask);
}
// The same for the four warps of a warpgroup.
void together_in_group(const char* what, void* operands, void (*compute)(void* const* all), Where where);
// What lane l gave, or gets.
template <class Operands>
Operands& of(void* const* all, unsigned lane) {
  return *static_cast<Operands*>(all[lane]);
}
// What the first lane gave that the mask names.
template <class Operands>
Operands& first_of(void* const* all) {
  while (!*all) ++all;
  return *static_cast<Operands*>(*all);
}
// Accesses of these lanes of a warp to shared memory are ordered from here on.
void sync_warp(Where where, unsigned mask = kAllOfWarp);

// Waits for the kernel in front. A kernel that was launched early must not copy, change flags or take tensor memory
// before: expect_waited() fails then. (`what` it does.)
void wait_for_kernel_in_front();
// The lane that elect.sync picks: the same one each time, but any, drawn for each warp.
unsigned elected_lane();
void expect_waited(const char* what, Where where);

// ---- shared memory ----

// The 32-bit address of a place in shared memory.
unsigned shared_address(const void* pointer);
// Bytes of the __shared__ variables that a kernel declares; dynamic memory is not among them. Functions that it calls
// must declare none: misplaced_variables() names such functions.
size_t static_bytes_of(const void* kernel);
std::string misplaced_variables();
// Checked accesses, as wide as the hardware's: alignment, bounds, races, bytes that were never written or are on
// their way. wants: all bytes are needed. (Products may have rows without a use, where bytes that were never written
// are NaN.)
void load(void* to, unsigned from, unsigned bytes, Where where, bool wants = true);
void store(unsigned to, const void* from, unsigned bytes, Where where);

// Asynchronous copies: `bytes` bytes arrive, the rest of `size` becomes zeros, and nothing arrives before it is
// waited for.
void copy(unsigned to, const void* from, unsigned size, unsigned bytes, Where where);
void commit_copies();
void wait_for_copies(unsigned groups);

// ---- of Hopper: mbarriers, and what the async proxy does ----

void init_mbarrier(unsigned barrier, unsigned arrivals, Where where);
// Lets the thread's arrivals at the cluster's barrier, relaxed ones as well, tell of the mbarriers that it has made.
void fence_mbarriers();
// Arrives `times` times, after `bytes` more have been promised.
void arrive(unsigned barrier, unsigned times, unsigned bytes, Where where);
bool is_phase_over(unsigned barrier, unsigned parity, Where where);
void wait_for_phase(unsigned barrier, unsigned parity, Where where);
// For a loop that polls: lets another thread go on. Returns false.
bool let_others_go_on();

// The copy engine brings some bytes of a copy; the mbarrier counts all bytes of the copy once they are there.
void bring(unsigned to, const void* from, unsigned bytes, unsigned barrier, Where where);
void count_bytes(unsigned barrier, unsigned bytes, Where where);
// The copy engine reads what it brings to another place, until it is there.
void look_async(void* to, unsigned from, unsigned bytes, unsigned barrier, Where where);
// The copy engine reads from here on, until the thread waits; a product reads until the warp waits.
void take_away(void* to, unsigned from, unsigned bytes, Where where);
void read_for_product(void* to, unsigned from, unsigned bytes, Where where);
void commit_bulk();
void wait_for_bulk(unsigned groups);
void commit_products(Where where);
void wait_for_products(unsigned groups, Where where);
// Shows the async proxy what the thread knows of.
void fence_for_async();

// Blocks of a cluster: without Launch::cluster every kernel that asks has clusters of two. They are there at the same
// time.
unsigned rank(Where where);
unsigned rank_bits();  // of addresses
unsigned address_in(unsigned address, unsigned rank);
// A relaxed arrival tells others of nothing but mbarriers.
void arrive_at_cluster(bool relaxed, Where where);
void wait_for_cluster(Where where);
// Flags in global memory that threads poll: looks acquire, changes release.
unsigned look_at(const unsigned* flag, Where where);
void change(unsigned* flag, unsigned x, Where where = Where::current());
// atomicAdd: tells nothing and orders nothing. Returns what was there.
unsigned add_atomically(unsigned* to, unsigned x, Where where);

}  // namespace kda::emulator
