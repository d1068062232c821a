// Flushing subnormal numbers to zero, or keeping them.
#pragma once
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace kda::cpu {

class Subnormals {
 public:
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;
#if defined(__SSE__)
  ~Subnormals() {
    if (changed_) _mm_setcsr(saved_);
  }

 protected:
  static constexpr unsigned kFlush = 0x8040;  // operands and results
  Subnormals(bool changed, unsigned flush) : changed_(changed) {
    if (!changed) return;
    saved_ = _mm_getcsr();
    _mm_setcsr((saved_ & ~kFlush) | flush);
  }

 private:
  bool changed_;
  unsigned saved_ = 0;
#else

 protected:
  static constexpr unsigned kFlush = 0;
  Subnormals(bool /*changed*/, unsigned /*flush*/) {}
#endif
};

// Subnormals are flushed to zero inside kernels: products of decays pass through them on their way to 0, and each such
// operation costs up to 150 cycles on some machines. Below 1e-38 nothing is lost that f32 could hold anyway.
class FlushSubnormals : Subnormals {
 public:
  FlushSubnormals() : Subnormals(true, kFlush) {}
};

// Subnormals are kept where they are multiplied by a rate beyond f32.
class KeepSubnormals : Subnormals {
 public:
  explicit KeepSubnormals(bool wanted) : Subnormals(wanted, 0) {}
};

}  // namespace kda::cpu
