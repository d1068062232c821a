// Hands out scratch memory by bumping a pointer. Without memory an arena only measures, so the constructor that hands
// out the buffers also tells their size.
#pragma once
#include <cstdint>

namespace kda::cpu {

class Arena {
 public:
  explicit Arena(char* base = nullptr) : base_(base) {}
  float* floats(int64_t count) { return reinterpret_cast<float*>(take(count * 4)); }
  uint64_t bytes() const { return used_; }

 private:
  // Leaves a few cache lines between buffers. The size of 64 rows is a multiple of 4096 bytes, and without the gap
  // the same row of ten such buffers would fall into one 8-way set of L1 (backward's pairs ran 2x slower).
  static constexpr uint64_t kGap = 5 * 64;
  char* take(int64_t bytes) {
    char* p = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<uint64_t>(bytes) + 63) / 64 * 64 + kGap;
    return p;
  }
  char* base_;
  uint64_t used_ = 0;
};

}  // namespace kda::cpu
