// Accesses by pointers. g++ calls these functions for each access of a unit that is compiled with -fsanitize=thread;
// ThreadSanitizer itself is not there. Here they tell the memory, which knows about order (plain_memory.h), and check
// that a wide access is at a multiple of its size.
#include <atomic>
#include <cstdint>

#include "cuda_runtime.h"
#include "error.h"
#include "plain_memory.h"
#include "wave.h"

namespace kda::emulator {
namespace {

// These functions must not throw: the compiler expects none of them to.
template <class Check>
void checked(const Check& check) {
  try {
    check();
  } catch (const Failure& failure) {
    wave->end_launch(failure.what);
  }
}

void access(void* pointer, unsigned bytes, bool writes, bool aligned) {
  if (!wave) return;  // the host's
  checked([&] {
    if (aligned && reinterpret_cast<uintptr_t>(pointer) % bytes && !wave->is_stack(pointer))
      fail(str("an access of ", bytes, " bytes at no multiple of that"), {});
    access_by_pointer(pointer, bytes, writes ? PlainMemory::Kind::kWrite : PlainMemory::Kind::kRead);
  });
}

}  // namespace
}  // namespace kda::emulator

#define KDA_ACCESS(bytes)                                                                         \
  void __tsan_read##bytes(void* at) { kda::emulator::access(at, bytes, false, true); }            \
  void __tsan_write##bytes(void* at) { kda::emulator::access(at, bytes, true, true); }            \
  void __tsan_unaligned_read##bytes(void* at) { kda::emulator::access(at, bytes, false, false); } \
  void __tsan_unaligned_write##bytes(void* at) { kda::emulator::access(at, bytes, true, false); } \
  void __tsan_volatile_read##bytes(void* at) { kda::emulator::access(at, bytes, false, true); }   \
  void __tsan_volatile_write##bytes(void* at) { kda::emulator::access(at, bytes, true, true); }
// The host's, where a launch remembers what it has asked for.
#define KDA_ATOMIC(bits)                                                                                     \
  uint##bits##_t __tsan_atomic##bits##_load(const std::atomic<uint##bits##_t>* x, int) { return x->load(); } \
  void __tsan_atomic##bits##_store(std::atomic<uint##bits##_t>* x, uint##bits##_t y, int) { x->store(y); }   \
  uint##bits##_t __tsan_atomic##bits##_fetch_or(std::atomic<uint##bits##_t>* x, uint##bits##_t y, int) {     \
    return x->fetch_or(y);                                                                                   \
  }                                                                                                          \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(std::atomic<uint##bits##_t>* x, uint##bits##_t y, int) {    \
    return x->fetch_add(y);                                                                                  \
  }

extern "C" {

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
KDA_ACCESS(1)
KDA_ACCESS(2)
KDA_ACCESS(4)
KDA_ACCESS(8)
KDA_ACCESS(16)
void __tsan_read_range(void* at, unsigned long bytes) {
  kda::emulator::access(at, static_cast<unsigned>(bytes), false, false);
}
void __tsan_write_range(void* at, unsigned long bytes) {
  kda::emulator::access(at, static_cast<unsigned>(bytes), true, false);
}
KDA_ATOMIC(8)
KDA_ATOMIC(32)
KDA_ATOMIC(64)
}
