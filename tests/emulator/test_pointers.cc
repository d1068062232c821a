// Races by pointers: this unit is compiled with calls of plain_accesses.cc, where the compiler has them.
#include <vector>

#include "cuda/ptx/sm90.h"
#include "plain_memory.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr char kBetween[] = "without a barrier in between";

// Global memory has clocks, or has none: then blocks may write the same results.
class WatchesGlobal {
 public:
  explicit WatchesGlobal(bool on = true) { emulator::watches_global() = on; }
  ~WatchesGlobal() { emulator::watches_global() = before_; }

 private:
  const bool before_ = emulator::watches_global();
};

float* numbers() { return reinterpret_cast<float*>(memory()); }

// Each thread reads what a thread of the next warp wrote, or of its own; and writes it again.
__global__ void pass_on(bool barrier, bool again, unsigned distance, float* out) {
  const unsigned t = threadIdx.x;
  numbers()[t] = static_cast<float>(t);
  if (barrier) __syncthreads();
  out[t] = numbers()[(t + distance) % blockDim.x];
  if (again) numbers()[t] = 0;
}
__global__ void pass_on_in_warp(bool sync, float* out) {
  numbers()[threadIdx.x] = 1;
  if (sync) __syncwarp();
  out[threadIdx.x] = numbers()[threadIdx.x ^ 1];
}
__global__ void copy_four(unsigned offset, float* out) {
  if (threadIdx.x == 0) *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(out + offset);
}

TEST(EmulatedPointers, RacesInSharedMemory) {
#ifndef __SANITIZE_THREAD__
  GTEST_SKIP() << "built without calls for accesses by pointers";
#endif
  const WatchesGlobal off(false);
  std::vector<float> out(64);
  const auto often = [&](bool barrier, bool again, unsigned distance) {
    return run_often(64, 256, pass_on, barrier, again, distance, out.data());
  };
  EXPECT_EQ(often(true, false, 32), kFine);
  EXPECT_EQ(often(false, true, 0), kFine) << "its own";
  EXPECT_TRUE(says(often(false, false, 32), kBetween));
  EXPECT_TRUE(says(often(true, true, 32), kBetween));
  EXPECT_EQ(run_often(64, 256, pass_on_in_warp, true, out.data()), kFine);
  EXPECT_TRUE(says(run_often(64, 256, pass_on_in_warp, false, out.data()), "a pointer"));
}

// ---- __shared__ variables of a fixed size ----

enum class Fixed { kRight, kNoBarrier, kNoBarrierAgain, kOtherVariable };
__global__ void pass_on_fixed(Fixed how, float* out) {
  __shared__ float first[64], second[64];
  const unsigned t = threadIdx.x, other = (t + 32) % 64;
  first[t] = 1, second[t] = 2;
  if (how != Fixed::kNoBarrier && how != Fixed::kOtherVariable) __syncthreads();
  out[t] = how == Fixed::kOtherVariable ? second[t] : first[other];
  if (how == Fixed::kNoBarrierAgain) first[t] = 3;
}

TEST(EmulatedPointers, RacesInVariablesOfAFixedSize) {
#ifndef __SANITIZE_THREAD__
  GTEST_SKIP() << "built without calls for accesses by pointers";
#endif
  const WatchesGlobal off(false);
  std::vector<float> out(64);
  const auto often = [&](Fixed how) { return run_often(64, 0, pass_on_fixed, how, out.data()); };
  EXPECT_EQ(often(Fixed::kRight), kFine);
  EXPECT_EQ(often(Fixed::kOtherVariable), kFine) << "its own";
  for (const Fixed how : {Fixed::kNoBarrier, Fixed::kNoBarrierAgain})
    EXPECT_TRUE(says(often(how), "s a __shared__ variable at "));
}

// ---- global memory ----

// Two blocks of a cluster: block 0 writes, block 1 reads. They meet, or a flag tells; atomics alone tell nothing.
enum class Over { kCluster, kFlag, kNothing, kEarlyFlag, kAtomic, kPlainFlag };
__global__ void pass_on_globally(Over how, float* at, unsigned* flag, float* out) {
  const unsigned rank = ptx::rank();
  if (rank == 0) {
    if (how == Over::kEarlyFlag && threadIdx.x == 0) ptx::store_release(flag, 1);
    at[threadIdx.x] = 1;
    __syncthreads();
    if (how == Over::kFlag && threadIdx.x == 0) ptx::store_release(flag, 1);
    if (how == Over::kAtomic && threadIdx.x == 0) atomicAdd(flag, 1);
    if (how == Over::kPlainFlag && threadIdx.x == 0) *flag = 1;
  }
  if (how == Over::kCluster) ptx::sync_cluster();
  if (rank == 1) {
    if (how != Over::kCluster && how != Over::kNothing && threadIdx.x == 0)
      while (!ptx::load_acquire(flag)) {
      }
    __syncthreads();
    out[threadIdx.x] = at[threadIdx.x];
  }
}

TEST(EmulatedPointers, RacesInGlobalMemory) {
#ifndef __SANITIZE_THREAD__
  GTEST_SKIP() << "built without calls for accesses by pointers";
#endif
  const WatchesGlobal watches;
  const auto over = [](Over how) {
    std::set<std::string> all;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      std::vector<float> at(32), out(32);
      unsigned flag = 0;
      emulator::set_seed(seed);
      all.insert(run(32, 0, pass_on_globally, how, at.data(), &flag, out.data()));
    }
    emulator::set_seed(1);
    return all;
  };
  EXPECT_EQ(over(Over::kCluster), kFine);
  EXPECT_EQ(over(Over::kFlag), kFine);
  for (const Over how : {Over::kNothing, Over::kEarlyFlag, Over::kAtomic})
    EXPECT_TRUE(says(over(how), "s global memory at "));
  EXPECT_TRUE(says(over(Over::kPlainFlag), "s global memory at ")) << "the flag itself";
}

// Blocks of a grid without clusters, which run one after another: each has its own element, or all have one.
__global__ void write_one(bool shared, bool atomic, unsigned* at) {
  if (threadIdx.x) return;
  unsigned* const own = at + (shared ? 0 : blockIdx.x);
  if (atomic) atomicAdd(own, 1);
  else *own += 1;
}

TEST(EmulatedPointers, RacesAmongBlocks) {
#ifndef __SANITIZE_THREAD__
  GTEST_SKIP() << "built without calls for accesses by pointers";
#endif
  const WatchesGlobal watches;
  unsigned at[2] = {};
  EXPECT_EQ(run_often(32, 0, write_one, false, false, +at), kFine);
  EXPECT_EQ(run_often(32, 0, write_one, true, true, +at), kFine);
  EXPECT_TRUE(says(run_often(32, 0, write_one, true, false, +at), "of the launch wrote at a pointer without an order"));
}

// Copies of the engine to global memory and from there, of two blocks.
__global__ void copy_over(bool meets, unsigned char* at) {
  const unsigned rank = ptx::rank(), barrier = shared() + 1024;
  if (threadIdx.x == 0) ptx::init_barrier(barrier, 1);
  if (rank == 0) ptx::store_shared4(shared() + threadIdx.x * 16, {});
  ptx::fence_shared_for_async();
  __syncthreads();
  if (rank == 0 && threadIdx.x == 0) {
    ptx::copy_bulk_to_global(at, shared(), 512);
    ptx::commit_bulk(), ptx::wait_for_bulk<0>();
  }
  if (meets) ptx::sync_cluster();
  if (rank == 1 && threadIdx.x == 0) {
    ptx::arrive_expecting(barrier, 512);
    ptx::copy_bulk_to_shared(shared(), at, 512, barrier);
    ptx::wait_barrier(barrier, 0);
  }
}

TEST(EmulatedGlobal, RacesOfCopies) {
  const WatchesGlobal watches;
  alignas(16) static unsigned char at[512];
  EXPECT_EQ(run_often(32, 1040, copy_over, true, +at), kFine);
  EXPECT_TRUE(says(run_often(32, 1040, copy_over, false, +at), "s global memory at "));
}

TEST(EmulatedPointers, WideAccessesAreAligned) {
#ifndef __SANITIZE_THREAD__
  GTEST_SKIP() << "built without calls for accesses by pointers";
#endif
  const WatchesGlobal off(false);
  alignas(16) float out[8] = {};
  EXPECT_EQ(run(32, 0, copy_four, 4u, +out), "");
  EXPECT_NE(run(32, 0, copy_four, 2u, +out).find("an access of 16 bytes at no multiple"), std::string::npos);
}

}  // namespace
}  // namespace kda::test
