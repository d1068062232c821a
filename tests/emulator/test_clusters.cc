// Clusters of any size, as an attribute of the launch tells: ranks, memory of others, barriers, flags of the grid.
#include <vector>

#include "cuda/ptx/sm90.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

template <class... Params, class... Args>
std::string run_in_clusters(unsigned blocks, unsigned of, void (*kernel)(Params...), Args... args) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension, cluster.val.clusterDim = {of, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = 32, config.dynamicSmemBytes = 256;
  config.attrs = &cluster, config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  return error == cudaSuccess ? "" : cudaGetErrorString(error == cudaErrorLaunchFailure ? cudaGetLastError() : error);
}
template <class... Params, class... Args>
std::set<std::string> often_in_clusters(unsigned blocks, unsigned of, void (*kernel)(Params...), Args... args) {
  std::set<std::string> all;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    emulator::set_seed(seed);
    all.insert(run_in_clusters(blocks, of, kernel, args...));
  }
  emulator::set_seed(1);
  return all;
}

// Each block reads what the next one of its cluster has written; out [blocks].
enum class Ring { kRight, kNoBarrier, kLeavesEarly, kBeyond };
__global__ void read_the_next(unsigned of, Ring how, unsigned* out) {
  const unsigned rank = ptx::rank(), next = how == Ring::kBeyond ? of : (rank + 1) % of;
  if (threadIdx.x == 0) ptx::store_shared(shared(), 100 + blockIdx.x);
  if (how != Ring::kNoBarrier) ptx::sync_cluster();
  if (threadIdx.x == 0) out[blockIdx.x] = ptx::load_shared_at(ptx::address_in(shared(), next));
  if (how != Ring::kLeavesEarly) ptx::sync_cluster();
  else if (threadIdx.x == 0) ptx::store_shared(shared(), 0);
}

TEST(EmulatedClusters, OfAnySize) {
  for (const unsigned of : {1u, 2u, 3u, 4u, 8u}) {
    SCOPED_TRACE(of);
    const unsigned blocks = 3 * of;
    std::vector<unsigned> out(blocks);
    EXPECT_EQ(often_in_clusters(blocks, of, read_the_next, of, Ring::kRight, out.data()), kFine);
    for (unsigned b = 0; b < blocks; ++b) EXPECT_EQ(out[b], 100 + b / of * of + (b % of + 1) % of) << b;
  }
}
TEST(EmulatedClusters, RacesOfFour) {
  std::vector<unsigned> out(8);
  const auto often = [&](Ring how) { return often_in_clusters(8, 4, read_the_next, 4u, how, out.data()); };
  EXPECT_TRUE(says(often(Ring::kNoBarrier), "of shared memory, which "));
  EXPECT_TRUE(says(often(Ring::kBeyond), "an address of block 4 of a cluster of 4"));
  // The block that reads and the one that overwrites meet once, and not again.
  EXPECT_TRUE(says(often(Ring::kLeavesEarly), "without a barrier in between"));
}

// Warp 0 tells warp 1 and the other block of a word and of an mbarrier, at the cluster's barrier.
enum class Told { kReleased, kRelaxed, kMbarrier, kNotFenced };
__global__ void tell(Told how) {
  const unsigned rank = ptx::rank(), other = ptx::address_in(shared(), 1 - rank);
  const bool word = how == Told::kReleased || how == Told::kRelaxed;
  if (threadIdx.x == 0) {
    ptx::init_barrier(shared(), 1);
    if (how != Told::kNotFenced) ptx::fence_barriers();
    ptx::store_shared(shared() + 8, 7);
  }
  if (how == Told::kReleased) ptx::sync_cluster();
  else ptx::arrive_at_cluster(), ptx::wait_for_cluster();
  if (threadIdx.x == 32 && word) (void)ptx::load_shared(shared() + 8);
  if (threadIdx.x == 32 && !word) ptx::arrive_at(other);
  if (threadIdx.x == 33) ptx::wait_barrier(shared(), how == Told::kReleased || how == Told::kRelaxed);
  ptx::sync_cluster();
}
TEST(EmulatedClusters, RelaxedArrivalsTellOfMbarriersAlone) {
  const auto with = [](Told how) { return run_often(64, 256, tell, how); };
  EXPECT_EQ(with(Told::kReleased), kFine);
  EXPECT_TRUE(says(with(Told::kRelaxed), "of shared memory, which "));
  EXPECT_EQ(with(Told::kMbarrier), kFine);
  EXPECT_TRUE(says(with(Told::kNotFenced), ", whose init is not ordered before"));
}

// One block of four does not come to the cluster's barrier.
__global__ void leave_alone() {
  if (ptx::rank() == 2) {
    ptx::init_barrier(shared(), 1);
    ptx::wait_barrier(shared(), 0);
  }
  ptx::sync_cluster();
}
TEST(EmulatedClusters, ABlockDoesNotCome) {
  EXPECT_TRUE(says(often_in_clusters(4, 4, leave_alone), "wait at the cluster's barrier"));
}

TEST(EmulatedClusters, GridsThatAreNone) {
  std::vector<unsigned> out(8);
  EXPECT_NE(run_in_clusters(6, 4, read_the_next, 4u, Ring::kRight, out.data()), "");
  EXPECT_NE(run_in_clusters(9, 9, read_the_next, 9u, Ring::kRight, out.data()), "");
}
// Without an attribute a kernel that asks for its rank has clusters of two.
__global__ void ask_for_rank() { ptx::rank(); }
TEST(EmulatedClusters, OfTwoDoNotDivideThree) {
  cudaLaunchConfig_t config{};
  config.gridDim = 3, config.blockDim = 32;
  EXPECT_EQ(cudaLaunchKernelEx(&config, ask_for_rank), cudaErrorLaunchFailure);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaGetLastError())), "a grid of 3 blocks in clusters of 2");
}

}  // namespace
}  // namespace kda::test
