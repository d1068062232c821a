// Fibers: stacks of their own. One thread of the host switches between them by itself (x86-64).
#pragma once
#include <cstddef>

namespace kda::emulator {

// A place to continue at: a fiber, or the thread itself.
struct Context {
  void* stack_pointer = nullptr;
  const void* stack = nullptr;  // its lowest byte
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// Stacks for fibers, each with an inaccessible page in front. A program has one object of these: it keeps its memory.
class Stacks {
 public:
  ~Stacks();
  // Prepares at least `count` stacks, none of which is in use.
  void prepare(size_t count);
  bool holds(const void* at) const;
  // Makes a fiber that begins with entry(), which must not return.
  Context begin(size_t index, void (*entry)()) const;

 private:
  void release();
  char* memory_ = nullptr;
  size_t count_ = 0;
};

// The context of the running thread, to come back to.
Context thread_context();

// Continues in `to`, until a switch back to `from`. ends: there will be none.
void switch_fiber(Context& from, Context& to, bool ends = false);
// Every fiber calls this first.
void fiber_has_begun();

}  // namespace kda::emulator
