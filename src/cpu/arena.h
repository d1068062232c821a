// Scratch by bumping a pointer. The same constructor that hands out the buffers also measures them: give it no memory.
#pragma once
#include <cstdint>

namespace kda::cpu {

class Arena {
 public:
  explicit Arena(char* base = nullptr) : base_(base) {}
  float* floats(int64_t count) { return reinterpret_cast<float*>(take(count * 4)); }
  uint64_t bytes() const { return used_; }

 private:
  char* take(int64_t bytes) {
    char* p = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<uint64_t>(bytes) + 63) / 64 * 64;
    return p;
  }
  char* base_;
  uint64_t used_ = 0;
};

}  // namespace kda::cpu
