// Races as they happen in pipelines, planted one at a time, in kernels that are right without them. Those of single
// instructions are in test_emulator.cc and test_hopper.cc; README.md lists all kinds.
#include <cstring>
#include <vector>

#include "cuda/ptx/sm90.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr char kBetween[] = "without a barrier in between";

// Something was found in every order of warps and lanes.
testing::AssertionResult always_fails(const std::set<std::string>& all) {
  if (all.count("")) return testing::AssertionFailure() << "an order in which nothing was found";
  return testing::AssertionSuccess();
}

// ---- a ring of two stages: lane 0 fills them by copies, warp 1 reads them ----

constexpr unsigned kStage = 256, kBarriers = 1024, kBytes = kBarriers + 64;
unsigned full(unsigned i) { return shared() + kBarriers + 8 * (i % 2); }
unsigned empty(unsigned i) { return shared() + kBarriers + 16 + 8 * (i % 2); }

enum class Ring { kRight, kEarlyRelease, kWrongParity, kOverlap, kOverrun, kOneLaneTells };

alignas(16) const unsigned char source[kStage] = {1, 2, 3};

__device__ void fill(Ring how, unsigned stage_bytes) {
  for (unsigned i = 0; i < 4; ++i) {
    if (i >= 2 && how != Ring::kOverrun) ptx::wait_barrier(empty(i), i / 2 % 2 ^ 1);
    ptx::arrive_expecting(full(i), kStage);
    ptx::copy_bulk_to_shared(shared() + i % 2 * stage_bytes, source, kStage, full(i));
  }
}
__device__ void read(Ring how, unsigned stage_bytes) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    ptx::wait_barrier(full(i), i / 2 % 2 ^ unsigned{how == Ring::kWrongParity});
    if (how == Ring::kEarlyRelease && lane == 0) ptx::arrive(empty(i));
    ptx::load_shared2(shared() + i % 2 * stage_bytes + lane * 8);
    if (how != Ring::kOneLaneTells) __syncwarp();
    if (how != Ring::kEarlyRelease && lane == 0) ptx::arrive(empty(i));
  }
}
__global__ void run_ring(Ring how) {
  if (threadIdx.x == 0)
    for (unsigned i = 0; i < 2; ++i) ptx::init_barrier(full(i), 1), ptx::init_barrier(empty(i), 1);
  ptx::fence_barriers();
  __syncthreads();
  const unsigned stage_bytes = how == Ring::kOverlap ? kStage / 2 : kStage;
  if (threadIdx.x == 0) fill(how, stage_bytes);
  if (threadIdx.x >= 32) read(how, stage_bytes);
}
std::set<std::string> ring(Ring how) { return run_often(64, kBytes, run_ring, how); }

TEST(Races, ARingWithoutOne) { EXPECT_EQ(ring(Ring::kRight), kFine); }
TEST(Races, AStageIsReleasedBeforeItIsRead) { EXPECT_TRUE(says(ring(Ring::kEarlyRelease), kBetween)); }
TEST(Races, AWaitForTheWrongParity) { EXPECT_TRUE(always_fails(ring(Ring::kWrongParity))); }
TEST(Races, StagesOverlap) { EXPECT_TRUE(says(ring(Ring::kOverlap), kBetween)); }
TEST(Races, AFilledStageIsFilledAgain) { EXPECT_TRUE(says(ring(Ring::kOverrun), kBetween)); }
TEST(Races, OneLaneReleasesWhatOthersStillRead) { EXPECT_TRUE(says(ring(Ring::kOneLaneTells), kBetween)); }

// ---- an mbarrier goes on while a thread waits for it ----

__global__ void go_on_twice(bool waits) {
  if (threadIdx.x == 0) ptx::init_barrier(full(0), 1), ptx::init_barrier(empty(0), 1);
  ptx::fence_barriers();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::arrive(full(0));
    if (waits) ptx::wait_barrier(empty(0), 0);
    ptx::arrive(full(0));
  }
  if (threadIdx.x == 32) {
    ptx::wait_barrier(full(0), 0);
    ptx::arrive(empty(0));
  }
}

TEST(Races, AnMbarrierOverrunsAPhase) {
  EXPECT_EQ(run_often(64, kBytes, go_on_twice, true), kFine);
  const auto without = run_often(64, kBytes, go_on_twice, false);
  EXPECT_TRUE(always_fails(without));
  bool found = false;  // if the thread waits in time; else there is a deadlock
  for (const std::string& one : without) found |= one.find("is two phases ahead of") != std::string::npos;
  EXPECT_TRUE(found);
}

// ---- barriers of threads ----

// Warp 0 writes what warp 1 reads. They meet, or each of them only meets itself.
__global__ void meet_few(int count) {
  if (threadIdx.x < 32) ptx::store_shared(shared() + threadIdx.x * 4, 1);
  ptx::sync_some(1, count);
  if (threadIdx.x >= 32) ptx::load_shared(shared() + threadIdx.x % 32 * 4);
}

TEST(Races, ABarrierOfTooFewThreads) {
  EXPECT_EQ(run_often(64, kBytes, meet_few, 64), kFine);
  EXPECT_TRUE(always_fails(run_often(64, kBytes, meet_few, 32)));
}

// ---- memory of another block ----

// Block 0 writes, block 1 reads it. They meet, or block 0 sets a flag behind its write, or in front of it.
enum class Over { kCluster, kNothing, kFlag, kEarlyFlag };
__global__ void read_over(Over how, unsigned* flag) {
  const unsigned rank = ptx::rank(), lane = threadIdx.x;
  if (how == Over::kEarlyFlag && rank == 0 && lane == 0) ptx::store_release(flag, 1);
  if (rank == 0 && lane == 0) ptx::store_shared(shared(), 5);
  if (how == Over::kCluster) ptx::sync_cluster();
  if (how == Over::kFlag && rank == 0 && lane == 0) ptx::store_release(flag, 1);
  if ((how == Over::kFlag || how == Over::kEarlyFlag) && rank == 1)
    while (!ptx::load_acquire(flag)) {
    }
  if (rank == 1) ptx::load_shared_at(ptx::address_in(shared(), 0));
  ptx::sync_cluster();  // block 0 is there until it is read
}
std::set<std::string> over(Over how) {
  std::set<std::string> all;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    unsigned flag = 0;
    emulator::set_seed(seed);
    all.insert(run(32, kBytes, read_over, how, &flag));
  }
  emulator::set_seed(1);
  return all;
}

TEST(Races, AnotherBlocksMemoryWithoutABarrierOfTheCluster) {
  EXPECT_EQ(over(Over::kCluster), kFine);
  EXPECT_TRUE(always_fails(over(Over::kNothing)));
}
TEST(Races, AFlagIsSetBeforeTheWrite) {
  EXPECT_EQ(over(Over::kFlag), kFine);
  EXPECT_TRUE(always_fails(over(Over::kEarlyFlag)));
}

// ---- descriptors and boxes ----

__global__ void __launch_bounds__(128) multiply_at(unsigned offset, unsigned stride, unsigned swizzle) {
  for (unsigned i = threadIdx.x; i < 4096; i += 128) ptx::store_shared(shared() + i * 4, 0);
  ptx::fence_shared_for_async();
  __syncthreads();
  float d[32] = {};
  const uint64_t plain = ptx::matrix_at(shared() + offset, 16, stride, ptx::Swizzle{0});
  const uint64_t matrix = plain | uint64_t{swizzle} << 62;
  ptx::fence_products();
  ptx::wgmma_shared<false>(d, matrix, matrix, false);
  ptx::commit_products();
  ptx::wait_for_products<0>();
}

TEST(Races, DescriptorsOfProducts) {
  const auto fails = [](unsigned offset, unsigned stride, unsigned swizzle) {
    return run(128, 16384, multiply_at, offset, stride, swizzle);
  };
  EXPECT_EQ(fails(0, 1024, 1), "");
  EXPECT_EQ(fails(32, 1024, 1), "") << "the next channels";
  EXPECT_NE(fails(128, 1024, 1).find("begins within eight rows"), std::string::npos);
  EXPECT_NE(fails(0, 1024, 0).find("a swizzle that is not emulated"), std::string::npos);
  EXPECT_NE(fails(0, 528, 1).find("eight rows that are 528 bytes apart"), std::string::npos);
  EXPECT_NE(fails(8192 + 1024, 1024, 1).find("of shared memory, which has 16384"), std::string::npos);
}

alignas(64) float numbers[64 * 32];
CUtensorMap map_of(CUresult* result = nullptr, void* data = numbers, cuuint64_t stride = 128, cuuint32_t width = 32,
                   cuuint32_t rows = 8) {
  CUtensorMap map;
  const cuuint64_t sizes[] = {32, 64}, strides[] = {stride};
  const cuuint32_t box[] = {width, rows}, steps[] = {1, 1};
  const CUresult got = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, data, sizes, strides, box,
                                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result) *result = got;
  return map;
}
__global__ void load_box_at(CUtensorMap map, unsigned offset) {
  if (threadIdx.x) return;
  ptx::init_barrier(shared(), 1);
  ptx::arrive_expecting(shared(), 1024);
  ptx::copy_tile(shared() + offset, map, 0, 0, 0, 0, shared());
  ptx::wait_barrier(shared(), 0);
}

TEST(Races, BoxesOfTheCopyEngine) {
  const auto taken = [](void* data, cuuint64_t stride, cuuint32_t width, cuuint32_t rows) {
    CUresult result;
    map_of(&result, data, stride, width, rows);
    return result == CUDA_SUCCESS;
  };
  EXPECT_TRUE(taken(numbers, 128, 32, 8));
  EXPECT_FALSE(taken(numbers + 1, 128, 32, 8)) << "an address that is no multiple of 16";
  EXPECT_FALSE(taken(numbers, 132, 32, 8)) << "such a stride";
  EXPECT_FALSE(taken(numbers, 128, 33, 8)) << "rows of no multiple of 16 bytes";
  EXPECT_FALSE(taken(numbers, 256, 64, 8)) << "rows longer than the swizzle";
  EXPECT_FALSE(taken(numbers, 128, 32, 257)) << "too many rows";
  EXPECT_FALSE(taken(numbers, 128, 32, 0)) << "no rows";
  const CUtensorMap map = map_of();
  EXPECT_EQ(run(32, 2048, load_box_at, map, 1024u), "");
  EXPECT_NE(run(32, 2048, load_box_at, map, 960u).find("a box at no multiple of 128"), std::string::npos);
  EXPECT_NE(run(32, 2048, load_box_at, map, 1152u).find("of shared memory, which has 2048"), std::string::npos)
      << "it ends behind shared memory";
}

}  // namespace
}  // namespace kda::test
