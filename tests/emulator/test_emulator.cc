// What the emulator must find in kernels that are wrong in one way each, and must not find in the same kernels put
// right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "cuda/ptx/sm80.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

// ---- barriers ----

// Each thread leaves a number to one of the next warp.
__global__ void pass_on(bool barrier, unsigned* out) {
  const unsigned next = (threadIdx.x + 32) % blockDim.x;
  ptx::store_shared(shared() + threadIdx.x * 4, threadIdx.x);
  if (barrier) __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = ptx::load_shared(shared() + next * 4);
}

TEST(Emulator, FindsWhatABarrierWouldOrder) {
  std::vector<unsigned> out(2 * 64);
  EXPECT_EQ(run_often(64, 256, pass_on, true, out.data()), kFine);
  for (unsigned i = 0; i < 128; ++i) EXPECT_EQ(out[i], (i + 32) % 64);
  EXPECT_TRUE(says(run_often(64, 256, pass_on, false, out.data()), " of shared memory, which "));
}

// The other way round: a thread writes again what others may still read.
__global__ void write_again(bool barrier) {
  ptx::store_shared(shared() + threadIdx.x * 4, 1);
  __syncthreads();
  ptx::load_shared(shared() + (threadIdx.x + 32) % blockDim.x * 4);
  if (barrier) __syncthreads();
  ptx::store_shared(shared() + threadIdx.x * 4, 2);
}

TEST(Emulator, FindsReadersThatAreNotWaitedFor) {
  EXPECT_EQ(run_often(64, 256, write_again, true), kFine);
  EXPECT_TRUE(says(run_often(64, 256, write_again, false), "without a barrier in between"));
}

// Lanes of a warp are ordered by __syncwarp() alone: neither by a shuffle nor because they run together on some GPUs.
__global__ void pass_on_in_warp(int how) {
  ptx::store_shared(shared() + threadIdx.x * 4, threadIdx.x);
  if (how == 1) __shfl_sync(~0u, 0, 0);
  if (how == 2) __syncwarp();
  ptx::load_shared(shared() + (threadIdx.x ^ 1) * 4);
}

TEST(Emulator, OrdersLanesBySyncwarp) {
  EXPECT_EQ(run_often(64, 256, pass_on_in_warp, 2), kFine);
  for (const int how : {0, 1}) EXPECT_TRUE(says(run_often(64, 256, pass_on_in_warp, how), "shared memory, which "));
}

// Warps 0 and 1 meet, then 1 and 2: what 0 wrote comes before what 2 reads. `skip`: warp 0 meets no other warp.
__global__ void meet_in_pairs(bool skip) {
  const unsigned warp = threadIdx.x / 32;
  if (warp == 0) ptx::store_shared(shared() + threadIdx.x * 4, 5);
  if (warp < 2 && !skip) ptx::sync_some(1, 64);
  if (warp > 0) ptx::sync_some(2, 64);
  if (warp == 2) ptx::load_shared(shared() + threadIdx.x % 32 * 4);
}

TEST(Emulator, OrdersByNamedBarriers) {
  EXPECT_EQ(run_often(96, 128, meet_in_pairs, false), kFine);
  EXPECT_TRUE(says(run_often(96, 128, meet_in_pairs, true), "of shared memory, which "));
}

// ---- threads that never come ----

__global__ void wait_for_nobody(int how) {
  if (how == 0 && threadIdx.x < 32) __syncthreads();           // fine: the others have ended
  if (how == 1) ptx::sync_some(threadIdx.x < 32 ? 1 : 2, 64);  // two barriers
  if (how == 2 && threadIdx.x % 32 < 31) __syncwarp();         // one lane is missing
  if (how == 3) threadIdx.x % 2 ? __syncwarp() : static_cast<void>(__any_sync(~0u, 1));
}

TEST(Emulator, FindsDeadlocks) {
  EXPECT_EQ(run_often(64, 0, wait_for_nobody, 0), kFine);
  const auto two = run_often(64, 0, wait_for_nobody, 1);
  EXPECT_TRUE(says(two, "deadlock: threads 0 to 31 wait at barrier 1 in test_emulator.cc:"));
  EXPECT_TRUE(says(two, ", threads 32 to 63 wait at barrier 2 in test_emulator.cc:"));
  const auto less = run_often(64, 0, wait_for_nobody, 2);
  EXPECT_TRUE(says(less, "deadlock: threads 0 to 30 wait at __syncwarp() in test_emulator.cc:"));
  EXPECT_TRUE(says(less, ", threads 31 to 31 have ended"));
  EXPECT_TRUE(says(run_often(64, 0, wait_for_nobody, 3), "other lanes of the warp are not at "));
}

// ---- copies ----

__global__ void copy_in(int how, const unsigned char* from, unsigned* out) {
  const unsigned to = shared() + threadIdx.x * 16;
  ptx::copy16(to, from + threadIdx.x * 16);
  if (how != 2) ptx::commit_copies();
  ptx::copy8(shared() + 1024 + threadIdx.x * 8, from);
  ptx::commit_copies();
  if (how == 1) ptx::wait_for_copies<2>();
  else if (how != 0) ptx::wait_for_copies<1>();
  if (how != 3) __syncthreads();
  out[threadIdx.x] = ptx::load_shared4(shared() + (threadIdx.x ^ (how == 4 ? 0 : 32)) * 16).w;
}

TEST(Emulator, CopiesComeWhenTheyAreWaitedFor) {
  alignas(16) unsigned char from[1024];
  for (unsigned i = 0; i < 1024; ++i) from[i] = static_cast<unsigned char>(i / 4);
  std::vector<unsigned> out(64);
  const auto often = [&](int how) { return run_often(64, 1536, copy_in, how, from, out.data()); };
  const char late[] = "is on its way that thread ";
  EXPECT_TRUE(says(often(0), late)) << "nobody waits";
  EXPECT_TRUE(says(often(1), late)) << "for too few";
  EXPECT_TRUE(says(often(2), late)) << "of another group";
  EXPECT_TRUE(says(often(3), " of shared memory, ")) << "no barrier";
  for (const int how : {4, 5}) {
    EXPECT_EQ(often(how), kFine);
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned byte = (i ^ (how == 4 ? 0 : 32)) * 4 + 3;
      EXPECT_EQ(out[i], byte * 0x01010101u);
    }
  }
}

__global__ void copy_by(unsigned to, const unsigned char* from) { ptx::copy16(shared() + to, from); }

TEST(Emulator, CopiesAreOfWholePieces) {
  alignas(16) const unsigned char from[32] = {};
  EXPECT_EQ(run(1, 64, copy_by, 16u, from), "");
  EXPECT_NE(run(1, 64, copy_by, 8u, from).find("is no multiple of 16"), std::string::npos);
  EXPECT_NE(run(1, 64, copy_by, 16u, from + 8).find("from no multiple of 16"), std::string::npos);
}

// ---- places ----

__global__ void load_from(int offset) { ptx::load_shared2(shared() + static_cast<unsigned>(offset)); }
__global__ void store_to(int offset) { ptx::store_shared4(shared() + static_cast<unsigned>(offset), {}); }
__global__ void load_rows(int offset) {
  for (unsigned i = threadIdx.x; i < 128; i += 32) ptx::store_shared(shared() + i * 4, i);
  __syncthreads();
  unsigned x[4];
  ptx::load_matrices(x, shared() + threadIdx.x * 16 + static_cast<unsigned>(offset));
}

TEST(Emulator, FindsAccessesBesideSharedMemory) {
  EXPECT_EQ(run(1, 64, store_to, 48), "");
  for (const int offset : {-16, 64, 1 << 20})
    EXPECT_NE(run(1, 64, store_to, offset).find("of shared memory, which has 64"), std::string::npos) << offset;
  EXPECT_NE(run(1, 72, store_to, 64).find("16 bytes at 64 of"), std::string::npos) << "half of it";
  EXPECT_NE(run(1, 64, store_to, 40).find("is no multiple of 16"), std::string::npos);
  EXPECT_NE(run(1, 64, load_from, 64).find("of shared memory, which has 64"), std::string::npos);
  EXPECT_EQ(run(32, 512, load_rows, 0), "");
  EXPECT_NE(run(32, 512, load_rows, 16).find("16 bytes at 512 of"), std::string::npos);
}

TEST(Emulator, FindsWhatNobodyWrote) {
  EXPECT_NE(run(1, 64, load_from, 8).find("reads byte 8 of shared memory, which nobody wrote"), std::string::npos);
}

// Accesses by pointers are for AddressSanitizer to find, which ends the process.
[[maybe_unused]] __global__ void write_at(unsigned offset) { reinterpret_cast<volatile char*>(memory())[offset] = 1; }
[[maybe_unused]] __global__ void write_global(volatile char* at) { *at = 1; }

TEST(EmulatorDeathTest, AddressSanitizerGuardsMemory) {
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_EQ(run(1, 1000, write_at, 999u), "");
  EXPECT_DEATH(run(1, 1000, write_at, 1000u), "use-after-poison");
  void* bytes = nullptr;
  ASSERT_EQ(cudaMalloc(&bytes, 100), cudaSuccess);
  EXPECT_EQ(run(1, 0, write_global, static_cast<char*>(bytes) + 99), "");
  EXPECT_DEATH(run(1, 0, write_global, static_cast<char*>(bytes) + 100), "heap-buffer-overflow");
  cudaFree(bytes);
#else
  GTEST_SKIP() << "built without AddressSanitizer";
#endif
}

TEST(EmulatorDeathTest, NoMemoryIsNearAnAllocation) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer guards memory";
#else
  void* bytes = nullptr;
  ASSERT_EQ(cudaMalloc(&bytes, 100), cudaSuccess);
  EXPECT_EQ(run(1, 0, write_global, static_cast<char*>(bytes) + 99), "");
  for (const int64_t away :
       {int64_t{1} << 12, int64_t{1} << 24, (int64_t{1} << 30) - 1, int64_t{-1}, -(int64_t{1} << 30)})
    EXPECT_DEATH(run(1, 0, write_global, static_cast<char*>(bytes) + away), "") << away;
  EXPECT_EQ(cudaFree(static_cast<char*>(bytes) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(bytes), cudaSuccess);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&bytes, SIZE_MAX - 100), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
#endif
}

// ---- launches ----

__global__ void nothing() {}

TEST(Emulator, RefusesWhatNoGpuTakes) {
  EXPECT_EQ(run(1024, 48 << 10, nothing), "");
  EXPECT_NE(run(1025, 0, nothing), "");
  EXPECT_NE(run(0, 0, nothing), "");
  EXPECT_NE(run(32, (48 << 10) + 1, nothing), "") << "it was not asked for";
  ASSERT_EQ(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 160 << 10), cudaSuccess);
  EXPECT_EQ(run(32, 160 << 10, nothing), "");
  EXPECT_EQ(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

__global__ void note_order(unsigned* next, unsigned* order) {
  if (threadIdx.x % 32 == 0) order[(*next)++] = blockIdx.x * 4 + threadIdx.x / 32;
}

// Without a seed that changes it, a run is always the same.
TEST(Emulator, ShufflesWarpsAndBlocks) {
  std::set<std::vector<unsigned>> orders;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    emulator::set_seed(seed);
    std::vector<unsigned> first, order(8);
    for (int again = 0; again < 2; ++again) {
      unsigned next = 0;
      ASSERT_EQ(run(128, 0, note_order, &next, order.data()), "");
      if (again) {
        EXPECT_EQ(order, first);
      }
      first = order;
    }
    orders.insert(order);
    std::sort(order.begin(), order.end());
    for (unsigned i = 0; i < 8; ++i) EXPECT_EQ(order[i], i);
  }
  emulator::set_seed(1);
  EXPECT_GT(orders.size(), 10u);
}

// ---- functions of the language ----

__global__ void compute_all(unsigned* out) {
  const unsigned l = threadIdx.x;
  const unsigned all[] = {__shfl_sync(~0u, l, 33),          __shfl_xor_sync(~0u, l, 5),
                          __shfl_up_sync(~0u, l, 4),        __ballot_sync(~0u, l % 3),
                          __reduce_add_sync(~0u, l),        unsigned(__any_sync(~0u, l == 7)),
                          unsigned(__all_sync(~0u, l < 31))};
  for (unsigned i = 0; i < 7; ++i) out[i * 32 + l] = all[i];
}

TEST(Emulator, LanesExchange) {
  std::vector<unsigned> out(7 * 32);
  ASSERT_EQ(run(32, 0, compute_all, out.data()), "");
  unsigned votes = 0;
  for (unsigned l = 0; l < 32; ++l) votes |= unsigned{l % 3 != 0} << l;
  for (unsigned l = 0; l < 32; ++l) {
    const unsigned expected[] = {1, l ^ 5, l < 4 ? l : l - 4, votes, 31 * 16, 1, 0};
    for (unsigned i = 0; i < 7; ++i) EXPECT_EQ(out[i * 32 + l], expected[i]) << i << " of lane " << l;
  }
}

TEST(Emulator, Bits) {
  EXPECT_EQ(__umulhi(0xffffffffu, 0xffffffffu), 0xfffffffeu);
  EXPECT_EQ(__clz(0), 32);
  EXPECT_EQ(__clz(1), 31);
  EXPECT_EQ(__ffs(0), 0);
  EXPECT_EQ(__ffs(8), 4);
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x5410), 0x55441100u);
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7632), 0x77663322u);
}

}  // namespace
}  // namespace kda::test
