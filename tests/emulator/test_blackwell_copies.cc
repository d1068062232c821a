// The same as test_blackwell.cc, of copies from shared to tensor memory.
#include "cuda/ptx/sm100.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr unsigned kBarrier = 32768, kPlace = kBarrier + 16, kBytes = kPlace + 16;
unsigned barrier() { return shared() + kBarrier; }
unsigned place() { return shared() + kPlace; }

constexpr unsigned kShape = ptx::umma_of<float>({.M = 128, .N = 8 * 2});

__global__ void copy(int how) {
  if (threadIdx.x == 0) ptx::init_barrier(barrier(), 1);
  if (threadIdx.x < 32) ptx::tmem_alloc(place(), 32);
  for (unsigned i = threadIdx.x; i < kBarrier / 16; i += 128) ptx::store_shared4(shared() + i * 16, uint4{});
  if (how != 1) ptx::fence_shared_for_async();
  __syncthreads();
  const unsigned tensor = ptx::load_shared(place());
  const unsigned own = ptx::tmem_at(tensor, threadIdx.x / 32 * 32, 0);
  const uint64_t rows = ptx::operand_at(shared(), 0, 1024, ptx::Swizzling::k128);
  if (threadIdx.x == 0) {
    if (how == 2) ptx::umma_tf32(tensor, rows, rows, kShape, false);
    ptx::copy_to_tmem(how == 3   ? ptx::tmem_at(tensor, 16, 0)
                      : how == 4 ? tensor + 28
                                 : tensor,
                      how == 5 ? rows & ~(uint64_t{1} << 46) : rows);
    ptx::copy_to_tmem(tensor + 8, rows);
    if (how == 6) ptx::copy_to_tmem(tensor, rows);
    if (how == 7) ptx::umma_tf32(tensor, rows, rows, kShape, true);               // adds to what is copied
    if (how == 8) ptx::umma_tf32_tmem(tensor + 16, tensor, rows, kShape, false);  // A is what is copied
    if (how == 9) ptx::store_shared(shared(), 1);
    ptx::commit_umma(barrier());
  }
  if (how != 10) ptx::wait_barrier(barrier(), 0);
  if (how != 11) ptx::fence_tmem_after_sync();
  float x[16];
  ptx::load_tmem(x, own);
  ptx::wait_for_tmem_loads();
  if (how == 12) ptx::store_shared(shared() + threadIdx.x * 4, 1);
  __syncthreads();
  if (threadIdx.x < 32) ptx::tmem_dealloc(tensor, 32);
}

TEST(EmulatorOfBlackwellCopies, AreDoneWhenTheirCommitSaysSo) {
  const auto with = [](int how) { return run_often(128, kBytes, copy, how); };
  constexpr char kCommit[] = "without a wait for an mbarrier of its commit in between";
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), "without a fence for the async proxy"));
  EXPECT_TRUE(says(with(2), kCommit)) << "a product still writes there";
  EXPECT_TRUE(says(with(3), "copies 128 rows to lane 16"));
  EXPECT_TRUE(says(with(4), "which are not all of one allocation"));
  EXPECT_TRUE(says(with(5), "bits 46 to 48 are not those of Blackwell"));
  EXPECT_TRUE(says(with(6), kCommit)) << "one of two copies, whichever is later";
  EXPECT_EQ(with(7), kFine) << "products come after copies";
  EXPECT_EQ(with(8), kFine) << "products come after copies";
  EXPECT_TRUE(says(with(9), "which a product or a copy read at test_blackwell_copies.cc:"));
  EXPECT_FALSE(with(10).count("")) << "nothing waits";
  EXPECT_TRUE(says(with(11), "without tcgen05.fence::after_thread_sync in between"));
  EXPECT_EQ(with(12), kFine) << "the rows are free";
}

}  // namespace
}  // namespace kda::test
