// Fibers: stacks of their own, between which one thread of the host switches by itself (x86-64).
#pragma once
#include <cstddef>

namespace kda::emulator {

// Where somebody goes on: a fiber, or the thread itself.
struct Context {
  void* stack_pointer = nullptr;
  const void* stack = nullptr;  // its lowest byte
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// Stacks for fibers, each with a page in front that nobody may touch. A program has one of them: it keeps its memory.
class Stacks {
 public:
  ~Stacks();
  // At least so many, of which nobody is in use. Waste of fibers that never ended is cleared away.
  void prepare(size_t count);
  // A fiber that begins with entry(), which must not return.
  Context begin(size_t index, void (*entry)()) const;

 private:
  void release();
  char* memory_ = nullptr;
  size_t count_ = 0;
};

// The context of the running thread, to come back to.
Context thread_context();

// Goes on in `to`, until somebody switches back to `from`. ends: nobody will.
void switch_fiber(Context& from, Context& to, bool ends = false);
// Each fiber says first that it has begun.
void fiber_has_begun();

}  // namespace kda::emulator
