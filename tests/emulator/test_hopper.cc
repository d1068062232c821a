// What the emulator finds in kernels for Hopper that are wrong in one way each, and does not find in the same kernels
// put right.
#include <cstring>
#include <vector>

#include "cuda/ptx/sm90.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr char kRace[] = " of shared memory, which ", kProxy[] = "without a fence for the async proxy",
               kReads[] = "which a copy or a product still reads";

// Shared memory of these kernels: data, then mbarriers.
constexpr unsigned kData = 8192, kBytes = kData + 64;
unsigned barrier(unsigned i = 0) { return shared() + kData + 8 * i; }
// Thread 0 makes two mbarriers, for so many arrivals each.
void make_barriers(unsigned first, unsigned second = 1) {
  if (threadIdx.x == 0) ptx::init_barrier(barrier(0), first), ptx::init_barrier(barrier(1), second);
  ptx::fence_barriers();
  __syncthreads();
}

// ---- mbarriers ----

// Warp 0 writes, warp 1 reads.
__global__ void hand_over(int how) {
  make_barriers(how == 1 ? 32 : 1);
  if (threadIdx.x < 32) {
    if (how == 2 && threadIdx.x == 0) ptx::arrive(barrier());
    ptx::store_shared(shared() + threadIdx.x * 4, 1);
    if (how == 0) __syncwarp();
    if (how == 1 || (how != 2 && threadIdx.x == 0)) ptx::arrive(barrier());
  } else {
    if (how != 4) ptx::wait_barrier(barrier(), 0);
    ptx::load_shared(shared() + threadIdx.x % 32 * 4);
  }
}

TEST(EmulatorOfHopper, OrdersByMbarriers) {
  const auto often = [](int how) { return run_often(64, kBytes, hand_over, how); };
  EXPECT_EQ(often(0), kFine);
  EXPECT_EQ(often(1), kFine) << "every lane arrives";
  EXPECT_TRUE(says(often(2), kRace)) << "the arrival comes first";
  EXPECT_TRUE(says(often(3), kRace)) << "lanes other than 0 have told nothing";
  EXPECT_TRUE(says(often(4), kRace)) << "nothing waits";
}

__global__ void use_barrier(int how) {
  if (how == 0) {
    if (threadIdx.x == 0) ptx::arrive(barrier());
    return;
  }
  if (threadIdx.x == 0) ptx::init_barrier(barrier(), 2);
  if (how == 1) {  // the other warp cannot know of it
    if (threadIdx.x == 32) ptx::is_phase_over(barrier(), 0);
    if (threadIdx.x < 32) __syncwarp();
    return;
  }
  __syncthreads();
  if (how == 2 && threadIdx.x == 0) ptx::arrive(barrier(), 3);
  if (how == 3 && threadIdx.x < 2) ptx::arrive_expecting(barrier(), 16), ptx::wait_barrier(barrier(), 0);
}

TEST(EmulatorOfHopper, FindsMbarriersUsedWrongly) {
  EXPECT_NE(run(32, kBytes, use_barrier, 0).find("there is no mbarrier at "), std::string::npos);
  for (const std::string& one : run_often(64, kBytes, use_barrier, 1))
    EXPECT_TRUE(one.find("there is no mbarrier at ") != std::string::npos ||
                one.find("whose init is not ordered before") != std::string::npos)
        << one;
  EXPECT_NE(run(32, kBytes, use_barrier, 2).find(", which waits for 2"), std::string::npos);
  EXPECT_NE(run(32, kBytes, use_barrier, 3).find("deadlock: threads 0 to 1 wait at the mbarrier at "),
            std::string::npos)
      << "bytes that never come";
}

// ---- copies of the engine ----

alignas(16) unsigned char source[256], destination[256];

__global__ void bring_in(int how, unsigned* out) {
  make_barriers(1);
  if (how == 1) {  // other threads may still read
    ptx::store_shared(shared() + threadIdx.x * 4, 0);
    ptx::fence_shared_for_async();
    __syncthreads();
    if (threadIdx.x >= 32) ptx::load_shared(shared() + threadIdx.x * 4);
  }
  if (how == 2) {  // the engine does not see what was written before it
    ptx::store_shared(shared() + threadIdx.x * 4, 0);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < 2; ++i) {
      ptx::arrive_expecting(barrier(i), 128);
      ptx::copy_bulk_to_shared(shared() + 128 * i, source + 128 * i, 128, barrier(i));
    }
  }
  if (how != 3) ptx::wait_barrier(barrier(0), 0);
  if (how != 4) ptx::wait_barrier(barrier(1), 0);
  if (threadIdx.x > 0 || how == 0) out[threadIdx.x] = ptx::load_shared(shared() + threadIdx.x * 4);
}

TEST(EmulatorOfHopper, CopiesAreThereWhenTheirMbarrierSaysSo) {
  for (unsigned i = 0; i < 256; ++i) source[i] = static_cast<unsigned char>(i / 4);
  std::vector<unsigned> out(64);
  const auto often = [&](int how) { return run_often(64, kBytes, bring_in, how, out.data()); };
  EXPECT_EQ(often(0), kFine);
  for (unsigned i = 0; i < 64; ++i) EXPECT_EQ(out[i], i * 0x01010101u);
  EXPECT_TRUE(says(often(1), "without a barrier in between"));
  EXPECT_TRUE(says(often(2), kProxy));
  for (const int how : {3, 4})
    EXPECT_TRUE(says(often(how), "which the copy engine wrote"))
        << "of two mbarriers, one says nothing of the other's copy";
}

__global__ void take_out(int how) {
  ptx::store_shared(shared() + threadIdx.x * 4, threadIdx.x);
  if (how != 1) ptx::fence_shared_for_async();
  __syncthreads();
  if (how == 1) ptx::fence_shared_for_async();  // a fence of thread 0 behind the barrier is as good
  if (how == 2) {
    ptx::store_shared(shared() + threadIdx.x * 4, 1);  // but not a fence before the write
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    ptx::copy_bulk_to_global(destination, shared(), 256);
    ptx::commit_bulk();
    if (how == 3) ptx::store_shared(shared() + 128, 0);
    if (how != 5) ptx::wait_for_bulk_reads<0>();
  }
  if (how != 4) __syncthreads();
  if (how != 3) ptx::store_shared(shared() + threadIdx.x * 4, 1000);
}

TEST(EmulatorOfHopper, CopiesReadUntilTheyAreWaitedFor) {
  const auto often = [](int how) { return run_often(64, kBytes, take_out, how); };
  for (const int how : {0, 1}) {
    std::memset(destination, 0, sizeof destination);
    EXPECT_EQ(often(how), kFine);
    for (unsigned i = 0; i < 64; ++i) EXPECT_EQ(destination[4 * i], i);
  }
  EXPECT_TRUE(says(often(2), kProxy));
  EXPECT_TRUE(says(often(3), kReads));
  EXPECT_FALSE(often(4).count("")) << "other threads do not know that it has read";
  EXPECT_FALSE(often(5).count("")) << "nothing waits";
}

// ---- products ----

__global__ void __launch_bounds__(128) multiply(int how) {
  for (unsigned i = threadIdx.x; i < 64 * 32; i += 128) ptx::store_shared(shared() + i * 4, 0);
  if (how != 1) ptx::fence_shared_for_async();
  __syncthreads();
  float d[32] = {};
  const uint64_t matrix = ptx::matrix_at(shared(), 16, 1024, ptx::Swizzle::k128);
  ptx::fence_products();
  ptx::wgmma_shared<false>(d, matrix, matrix, false);
  ptx::commit_products();
  if (how == 2) ptx::store_shared(shared() + threadIdx.x * 128, 1);
  ptx::wait_for_products<0>();
  if (how == 3 && threadIdx.x < 32) ptx::store_shared(shared() + threadIdx.x * 128, 1);  // other warps may still read
  if (how == 4) __syncthreads();
  if (how == 4) ptx::store_shared(shared() + threadIdx.x % 64 * 128, threadIdx.x / 64);
}

TEST(EmulatorOfHopper, ProductsReadUntilTheyAreWaitedFor) {
  const auto often = [](int how) { return run_often(128, 64 * 128, multiply, how); };
  EXPECT_EQ(often(0), kFine);
  EXPECT_TRUE(says(often(1), kProxy));
  EXPECT_FALSE(often(2).count(""));
  EXPECT_FALSE(often(3).count(""));
}

// ---- other meetings ----

__global__ void arrive_only(int how) {
  if (threadIdx.x < 32) {
    if (how == 1) ptx::arrive_threads(1, 64);
    ptx::store_shared(shared() + threadIdx.x * 4, 1);
    if (how == 0) ptx::arrive_threads(1, 64);
  } else {
    ptx::sync_threads(1, 64);
    ptx::load_shared(shared() + threadIdx.x % 32 * 4);
  }
}

TEST(EmulatorOfHopper, ArrivalsTellWhatCameBefore) {
  EXPECT_EQ(run_often(64, kBytes, arrive_only, 0), kFine);
  EXPECT_TRUE(says(run_often(64, kBytes, arrive_only, 1), kRace));
}

// Block 0 of a cluster sends a number to block 1.
__global__ void send_over(int how) {
  if (threadIdx.x == 0) ptx::init_barrier(barrier(), 1);
  ptx::fence_barriers();
  const unsigned rank = ptx::rank();
  if (how != 1) ptx::sync_cluster();
  if (threadIdx.x == 0 && rank == 0) ptx::send(ptx::address_in(shared(), 1), 5, ptx::address_in(barrier(), 1));
  if (threadIdx.x == 0 && rank == 1) ptx::arrive_expecting(barrier(), 4);
  if (rank == 1 && how != 2) ptx::wait_barrier(barrier(), 0);
  if (rank == 1 && how != 1 && ptx::load_shared(shared()) != 5)
    emulator::fail("something else came", ptx::Where::current());
  ptx::sync_cluster();
}

TEST(EmulatorOfHopper, BlocksOfAClusterMeet) {
  EXPECT_EQ(run_often(32, kBytes, send_over, 0), kFine);
  EXPECT_FALSE(run_often(32, kBytes, send_over, 1).count("")) << "the other block's mbarrier may not be there";
  EXPECT_FALSE(run_often(32, kBytes, send_over, 2).count("")) << "nothing waits";
}

// Blocks wait for a flag of the block before them.
__global__ void wait_for_flags(unsigned* flags, bool sets) {
  ptx::rank();
  if (blockIdx.x > 0)
    while (!ptx::load_acquire(flags + blockIdx.x - 1)) {
    }
  if (sets && threadIdx.x == 0) ptx::store_release(flags + blockIdx.x, 1);
}

TEST(EmulatorOfHopper, FlagsAreWaitedFor) {
  for (const bool sets : {true, false}) {
    std::vector<unsigned> flags(2);
    const std::string failure = run(32, kBytes, wait_for_flags, flags.data(), sets);
    if (sets) EXPECT_EQ(failure, "");
    else
      EXPECT_NE(failure.find("block 1: threads 0 to 31 wait at a flag in test_hopper.cc:"), std::string::npos)
          << failure;
  }
}

}  // namespace
}  // namespace kda::test
