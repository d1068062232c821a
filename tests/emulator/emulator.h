// Runs CUDA kernels on a CPU: a fiber a thread, one block after another. What is here is what the headers in include/ are
// made of; kernels and tests see those.
//
// A kernel that does what no GPU promises to be harmless fails, and the launch that ran it says why and where. See README.md
// for what is looked for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

#include "vector_types.h"

namespace kda::emulator {

using Where = std::source_location;  // in the kernel

// The GPU that the CUDA runtime tells of. It has few SMs, so that kernels that spread over them run in blocks of the usual
// size, or as many as KDA_EMULATOR_SMS says.
struct Gpu {
  int major = 8, minor = 0, multiprocessors = 4;
  int shared_memory_of_block = 163 << 10;
};
const Gpu& gpu();

// The order of blocks, warps and lanes. From KDA_EMULATOR_SEED at first.
void set_seed(uint64_t seed);

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
};
// Runs thread() in every thread of every block. Returns what went wrong, or "".
std::string run(const Launch& launch, const std::function<void()>& thread);

// What kernels declare as `extern __shared__ float4 dynamic[]` is defined by this, once for each namespace of kernels: of one
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

// Meets `count` threads of the block; 0: all that have not ended.
void meet(unsigned barrier, unsigned count, Where where);

// All lanes of a warp meet, each with operands of its own; the last one to come computes what all of them get.
void together(const char* what, void* operands, void (*compute)(void* const* all), Where where);
template <class Operands>
void together(const char* what, Operands& own, void (*compute)(void* const* all), Where where) {
  together(what, static_cast<void*>(&own), compute, where);
}
// What lane l gave, or gets.
template <class Operands>
Operands& of(void* const* all, unsigned lane) {
  return *static_cast<Operands*>(all[lane]);
}
// Accesses of a warp's lanes to shared memory are ordered from here on.
void sync_warp(Where where);

// ---- shared memory ----

// A 32-bit address of it, and back.
unsigned shared_address(const void* pointer);
// Checked accesses, of whole ones of the hardware: alignment, bounds, races, bytes that nobody wrote or that are on their
// way. by_warp: by any lane of the warp, in an instruction of all.
void load(void* to, unsigned from, unsigned bytes, Where where, bool by_warp = false);
void store(unsigned to, const void* from, unsigned bytes, Where where);

// Asynchronous copies: `bytes` come, what is left of `size` becomes zeros, and nothing does before it is waited for.
void copy(unsigned to, const void* from, unsigned size, unsigned bytes, Where where);
void commit_copies();
void wait_for_copies(unsigned groups);

}  // namespace kda::emulator
