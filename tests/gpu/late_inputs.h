// A kernel that lets the next one in its stream start early and writes late, as those of FlashInfer, cuBLAS and Triton
// may. Whoever reads what it writes, and does not wait for it, reads what was there before.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::test {

struct LateWrite {
  void* to;
  const void* from;
  int64_t bytes;
};
struct LateWrites {
  static constexpr int kMost = 64;
  LateWrite all[kMost];
  int count = 0;
};

// Whether the device can launch kernels early. Under compute-sanitizer one kernel waits for the other, so there is
// nothing to be seen.
bool can_write_late();
// The stream of write_late() and of the kernels behind it.
cudaStream_t late_stream();
// Waits for some tenths of a millisecond on the device, then copies.
cudaError_t write_late(const LateWrites& writes);

// For tests of this itself. Copies `count` numbers in a kernel that is launched early and waits for nothing.
cudaError_t read_early(unsigned* to, const unsigned* from, int count);
// The PTX that the kernel of write_late() was made from: 90 or more, or it lets no other start early.
int ptx_of_late_writer();

}  // namespace kda::test
