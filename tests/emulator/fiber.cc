#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Registers that a call keeps go to one stack and come from the other. (The signal mask that swapcontext() saves as
// well costs two system calls.)
extern "C" void kda_emulator_switch(void** from, void* to);
asm(R"(
  .text
  .globl kda_emulator_switch
  .hidden kda_emulator_switch
  .type kda_emulator_switch, @function
kda_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size kda_emulator_switch, . - kda_emulator_switch
)");

namespace kda::emulator {
namespace {

constexpr size_t kPage = 4096, kStack = 256 << 10, kStep = kStack + kPage;  // sanitized kernels need 32 to 64 KiB

}  // namespace

Stacks::~Stacks() { release(); }

void Stacks::release() {
  if (memory_) munmap(memory_, count_ * kStep);
  memory_ = nullptr, count_ = 0;
}

void Stacks::prepare(size_t count) {
  if (count > count_) {
    release();
    void* memory = mmap(nullptr, count * kStep, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory), count_ = count;
    for (size_t i = 0; i < count; ++i)
      if (mprotect(memory_ + i * kStep + kPage, kStack, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
  }
}

bool Stacks::holds(const void* at) const { return at >= memory_ && at < memory_ + count_ * kStep; }

Context Stacks::begin(size_t index, void (*entry)()) const {
  char* stack = memory_ + index * kStep + kPage;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, kStack);  // what the last fiber there has left
#endif
  // Six registers and the address to return to. Behind that the stack is as it is where a function begins.
  auto** top = reinterpret_cast<void**>(stack + kStack - 16);
  *top = reinterpret_cast<void*>(entry);
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  return {.stack_pointer = top - 6, .stack = stack, .stack_bytes = kStack};
}

Context thread_context() {
  thread_local const Context own = [] {
    Context c;
    pthread_attr_t attributes;
    void* stack = nullptr;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
      pthread_attr_getstack(&attributes, &stack, &c.stack_bytes);
      pthread_attr_destroy(&attributes);
    }
    c.stack = stack;
    return c;
  }();
  return own;
}

void switch_fiber(Context& from, Context& to, [[maybe_unused]] bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
  kda_emulator_switch(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void fiber_has_begun() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace kda::emulator
