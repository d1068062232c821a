// What the emulator finds in kernels for Blackwell that are wrong in one way each, and does not find in the same
// kernels put right.
#include <functional>
#include <vector>

#include "cuda/ptx/sm100.h"
#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;
using ptx::Swizzling;

constexpr char kRace[] = " of shared memory, which ", kProxy[] = "without a fence for the async proxy",
               kNobody[] = "which nobody wrote", kWaitLoad[] = "without tcgen05.wait::ld in between",
               kWaitStore[] = "without tcgen05.wait::st in between",
               kBefore[] = "without tcgen05.fence::before_thread_sync in between",
               kAfter[] = "without tcgen05.fence::after_thread_sync in between",
               kCommit[] = "without a wait for an mbarrier of its commit in between";

// Shared memory of these kernels: operands, then mbarriers, then the address of tensor memory.
constexpr unsigned kA = 0, kB = 16384, kBarriers = 32768, kPlace = kBarriers + 32, kBytes = kPlace + 32;
unsigned barrier(unsigned i = 0) { return shared() + kBarriers + 8 * i; }
unsigned place(unsigned i = 0) { return shared() + kPlace + 4 * i; }
bool is_first_warp() { return threadIdx.x < 32; }

// Allocates for the block and makes an mbarrier for one arrival.
unsigned begin(unsigned columns = 256) {
  if (threadIdx.x == 0)
    for (unsigned i = 0; i < 2; ++i) ptx::init_barrier(barrier(i), 1);
  if (is_first_warp()) ptx::tmem_alloc(place(), columns);
  __syncthreads();
  return ptx::load_shared(place());
}
void end(unsigned tensor, unsigned columns = 256) {
  __syncthreads();
  if (is_first_warp()) ptx::tmem_dealloc(tensor, columns);
}
// The lanes of the thread's warp.
unsigned own(unsigned tensor, unsigned column = 0) { return ptx::tmem_at(tensor, threadIdx.x / 32 % 4 * 32, column); }

const auto often = [](unsigned threads, const auto& kernel, auto... args) {
  return run_often(threads, kBytes, kernel, args...);
};

// ---- columns ----

__global__ void allocate(int how) {
  const bool first = is_first_warp();
  if (how == 1 && first) ptx::tmem_alloc(place(), 48);
  if (how == 2 && first) ptx::tmem_alloc(place(), 1024);
  if (how == 3 && threadIdx.x < 16) ptx::tmem_alloc(place(), 128);
  if (how == 4 && first) ptx::tmem_alloc(place(), threadIdx.x ? 32 : 64);
  if (how == 11 && first && threadIdx.x >= 16) return;
  if (first) ptx::tmem_alloc(place(), 128);
  if (how == 5 && first) ptx::tmem_alloc(place(1), 256);
  if (how == 6 && first) ptx::tmem_relinquish();
  if (first) ptx::tmem_alloc(place(1), 64);
  if (how != 7) __syncthreads();
  const unsigned tensor[2] = {ptx::load_shared(place()), ptx::load_shared(place(1))};
  __syncthreads();
  if (how != 8 && first) ptx::tmem_dealloc(tensor[0], 128);
  if (how == 9 && first) ptx::tmem_dealloc(tensor[0], 128);
  if (how == 10 && first) ptx::tmem_dealloc(tensor[1], 32);
  if (first) ptx::tmem_dealloc(tensor[1], 64);
}

TEST(EmulatorOfBlackwell, AllocatesColumns) {
  const auto with = [](int how) { return often(64, allocate, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), "allocates 48 columns of tensor memory: 32, 64, 128, 256 or 512 can be had"));
  EXPECT_TRUE(says(with(2), "allocates 1024 columns"));
  EXPECT_TRUE(says(with(3), "lanes of a warp are not at the same tcgen05")) << "half of a warp";
  EXPECT_TRUE(says(with(4), "lanes of a warp do not give the same operands"));
  EXPECT_TRUE(says(with(5), "allocates 256 columns of tensor memory, more than the 128 of last time"));
  EXPECT_TRUE(says(with(6), "which the block has given up to do"));
  EXPECT_FALSE(with(7).count("")) << "the address may not be there";
  EXPECT_TRUE(says(with(8), "has not freed all tensor memory"));
  EXPECT_TRUE(says(with(9), "which were not allocated so"));
  EXPECT_TRUE(says(with(10), "frees 32 columns of tensor memory at "));
  EXPECT_TRUE(says(with(11), "threads 0 to 15 wait at tcgen05.alloc in test_blackwell.cc:")) << "half has ended";
}

// Two warps want all columns, one after the other.
__global__ void allocate_all(bool frees) {
  const unsigned warp = threadIdx.x / 32;
  ptx::tmem_alloc(place(warp), 512);
  __syncwarp();
  const unsigned tensor = ptx::load_shared(place(warp));
  if (frees) ptx::tmem_dealloc(tensor, 512);
}

TEST(EmulatorOfBlackwell, WaitsForColumns) {
  EXPECT_EQ(often(64, allocate_all, true), kFine);
  EXPECT_TRUE(says(often(64, allocate_all, false), "tcgen05.alloc, for columns: 512 in test_blackwell.cc:"));
}

// ---- loads and stores ----

__global__ void move(int how) {
  if (how == 1) return ptx::store_tmem(own(0), {1u, 2u});
  const unsigned tensor = begin(64);
  unsigned x[4] = {1, 2, 3, 4}, y[1] = {};
  if (how != 2) ptx::store_tmem(own(tensor), x);
  if (how != 3) ptx::wait_for_tmem_stores();
  unsigned from = own(tensor);
  if (how == 4) from = ptx::tmem_at(tensor, 32, 0);
  if (how == 5) from = own(tensor, 62);
  if (how == 6) from = own(tensor, threadIdx.x % 2);
  if (how == 7) from = own(tensor, 64);
  if (how == 8) from = ptx::tmem_at(own(tensor), 16, 0);
  if (how == 9) ptx::load_tmem(y, own(tensor, 4));
  else ptx::load_tmem(x, from);
  if (how != 10) ptx::wait_for_tmem_loads();
  ptx::store_tmem(own(tensor), x);
  if (how == 11) ptx::store_tmem(own(tensor), x);
  ptx::wait_for_tmem_stores();
  end(tensor, 64);
}

TEST(EmulatorOfBlackwell, OrdersLoadsAndStoresOfAWarp) {
  const auto with = [](int how) { return often(128, move, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), "uses tensor memory, of which the block has none"));
  EXPECT_TRUE(says(with(2), kNobody));
  EXPECT_TRUE(says(with(3), kWaitStore));
  EXPECT_TRUE(says(with(4), "reaches for lane 32 of tensor memory: the warp has lanes ")) << "lanes of another warp";
  EXPECT_TRUE(says(with(5), "which are not all of one allocation"));
  EXPECT_TRUE(says(with(6), "lanes of a warp do not give the same operands"));
  EXPECT_TRUE(says(with(7), "which are not all of one allocation"));
  EXPECT_TRUE(says(with(8), "reaches for lane ")) << "32 lanes from lane 16 on";
  EXPECT_TRUE(says(with(9), kNobody));
  EXPECT_TRUE(says(with(10), kWaitLoad)) << "a load may still read what is written";
  EXPECT_TRUE(says(with(11), kWaitStore)) << "one of two stores, whichever is later";
}

// Of a load of 32 lanes, half may be of no use. But not parts of a half.
__global__ void load_half(int how) {
  const unsigned tensor = begin(32);
  unsigned x[8] = {};
  ptx::store_tmem_fragments(ptx::tmem_at(own(tensor), how == 1 ? 16 : 0, 0), {1u, 2u, 3u, 4u});
  ptx::wait_for_tmem_stores();
  if (how == 2) {
    unsigned wide[16];
    ptx::load_tmem(wide, own(tensor));
  } else {
    ptx::load_tmem(x, own(tensor));
  }
  ptx::wait_for_tmem_loads();
  end(tensor, 32);
}

TEST(EmulatorOfBlackwell, LoadsHalfOfTheLanes) {
  EXPECT_EQ(often(128, load_half, 0), kFine);
  EXPECT_EQ(often(128, load_half, 1), kFine);
  EXPECT_TRUE(says(often(128, load_half, 2), kNobody));
}

// A warpgroup stores, another one loads.
__global__ void hand_over(int how) {
  const unsigned tensor = begin(32);
  unsigned x[1] = {7};
  if (threadIdx.x < 128) {
    ptx::store_tmem(own(tensor), x);
    if (how != 1) ptx::wait_for_tmem_stores();
    if (how != 2 && !(how == 3 && threadIdx.x % 32)) ptx::fence_tmem_before_sync();
  }
  if (how != 4) __syncthreads();
  if (how == 5 && threadIdx.x < 128) ptx::fence_tmem_before_sync(), ptx::wait_for_tmem_stores();
  if (threadIdx.x >= 128) {
    if (how != 6) ptx::fence_tmem_after_sync();
    ptx::load_tmem(x, own(tensor));
    ptx::wait_for_tmem_loads();
  }
  end(tensor, 32);
}

TEST(EmulatorOfBlackwell, OrdersWarpsByFences) {
  const auto with = [](int how) { return often(256, hand_over, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), kWaitStore));
  EXPECT_TRUE(says(with(2), kBefore));
  EXPECT_TRUE(says(with(3), kBefore)) << "a lane fences no other lane's";
  EXPECT_FALSE(with(4).count("")) << "nothing waits";
  EXPECT_EQ(with(5), kFine) << "what comes behind the barrier does no harm";
  EXPECT_TRUE(says(with(6), kAfter));
}

// ---- products ----

constexpr unsigned kShape = ptx::umma_of<__half>({.M = 128, .N = 32});
uint64_t operand(unsigned at) { return ptx::operand_at(shared() + at, 0, 1024, Swizzling::k128); }
void fill_operands() {
  for (unsigned i = threadIdx.x; i < kBarriers / 16; i += blockDim.x) ptx::store_shared4(shared() + i * 16, uint4{});
}

__global__ void multiply(int how) {
  const unsigned tensor = begin();
  fill_operands();
  if (how != 1) ptx::fence_shared_for_async();
  if (how != 2) __syncthreads();
  if (threadIdx.x == 0) {
    if (how == 3) ptx::commit_umma(barrier());
    ptx::umma_f16(tensor, operand(kA), operand(kB), kShape, how == 4);
    ptx::umma_f16(tensor, ptx::further(operand(kA), 32), ptx::further(operand(kB), 32), kShape, true);
    if (how != 3 && how != 11) ptx::commit_umma(barrier(how == 5));
    if (how == 6) ptx::store_shared(shared() + kA, 1);
  }
  if (how == 5 && threadIdx.x == 32) ptx::arrive(barrier());
  if (how == 11 && threadIdx.x == 32) ptx::commit_umma(barrier());
  if (how != 7) ptx::wait_barrier(barrier(), 0);
  if (how != 8) ptx::fence_tmem_after_sync();
  float x[32];
  if (how != 9) ptx::load_tmem(x, own(tensor));
  if (how != 9) ptx::wait_for_tmem_loads();
  if (how == 10) ptx::store_shared(shared() + kB + threadIdx.x * 4, 1);
  end(tensor);
}

TEST(EmulatorOfBlackwell, ProductsAreDoneWhenTheirCommitSaysSo) {
  const auto with = [](int how) { return often(128, multiply, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), kProxy));
  EXPECT_FALSE(with(2).count("")) << "operands of other threads may not be there";
  EXPECT_TRUE(says(with(3), kCommit)) << "the commit comes first";
  EXPECT_TRUE(says(with(4), kNobody)) << "adds to nothing";
  EXPECT_FALSE(with(5).count("")) << "another mbarrier says nothing of it";
  EXPECT_TRUE(says(with(6), "which a product or a copy read at test_blackwell.cc:"));
  EXPECT_FALSE(with(7).count("")) << "nothing waits";
  EXPECT_TRUE(says(with(8), kAfter));
  EXPECT_EQ(with(9), kFine);
  EXPECT_EQ(with(10), kFine) << "the operands are free";
  EXPECT_FALSE(with(11).count("")) << "another thread's commit says nothing of it";
}

// One thread waits and tells the others by a barrier.
__global__ void pass_on(int how) {
  const unsigned tensor = begin();
  fill_operands();
  ptx::fence_shared_for_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::umma_f16(tensor, operand(kA), operand(kB), kShape, false);
    ptx::commit_umma(barrier());
    if (how != 1) ptx::wait_barrier(barrier(), 0);
    ptx::fence_tmem_after_sync();
  }
  if (how == 2) ptx::fence_tmem_after_sync();
  ptx::fence_tmem_before_sync();
  __syncthreads();
  if (how != 2) ptx::fence_tmem_after_sync();
  float x[1];
  if (how != 3) ptx::load_tmem(x, own(tensor));
  if (how != 3) ptx::wait_for_tmem_loads();
  if (how == 4) ptx::store_shared(shared() + kA + threadIdx.x * 4, 1);
  end(tensor);
}

TEST(EmulatorOfBlackwell, WaitsArePassedOn) {
  const auto with = [](int how) { return often(128, pass_on, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), kCommit));
  EXPECT_TRUE(says(with(2), kAfter)) << "the fence stands in front of the barrier";
  EXPECT_EQ(with(3), kFine);
  EXPECT_EQ(with(4), kFine);
}

// Tensor memory is freed while a product may still write to it.
__global__ void free_early(bool waits) {
  const unsigned tensor = begin();
  fill_operands();
  ptx::fence_shared_for_async();
  __syncthreads();
  if (threadIdx.x == 0) ptx::umma_f16(tensor, operand(kA), operand(kB), kShape, false), ptx::commit_umma(barrier());
  if (waits) ptx::wait_barrier(barrier(), 0);
  end(tensor);
}

TEST(EmulatorOfBlackwell, ColumnsAreFreeWhenNothingUsesThem) {
  EXPECT_EQ(often(128, free_early, true), kFine);
  EXPECT_TRUE(says(often(128, free_early, false), "of which the end of a product from test_blackwell.cc:"));
}

// Products one after another.
__global__ void multiply_more(int how) {
  const unsigned tensor = begin();
  fill_operands();
  ptx::fence_shared_for_async();
  __syncthreads();
  const auto begin_product = [&](unsigned d, unsigned shape, bool tf32, bool adds) {
    if (tf32) ptx::umma_tf32(d, operand(kA), operand(kB), shape, adds);
    else ptx::umma_f16(d, operand(kA), operand(kB), shape, adds);
  };
  constexpr unsigned kWide = ptx::umma_of<__half>({.M = 128, .N = 64}),
                     kTf32 = ptx::umma_of<float>({.M = 128, .N = 32}),
                     kMinus = ptx::umma_of<__nv_bfloat16>({.M = 128, .N = 32, .negated_a = true});
  if (threadIdx.x == 0) {
    begin_product(tensor, kShape, false, false);
    if (how >= 4 && how != 6) ptx::commit_umma(barrier());
    if (how >= 4 && how != 6) ptx::wait_barrier(barrier(), 0);
    if (how >= 5 && how != 6) ptx::fence_tmem_after_sync();
    if (how == 0) begin_product(tensor + 64, kWide, false, false);  // elsewhere
    if (how == 1 || how == 4 || how == 5) begin_product(tensor, kWide, false, false);
    if (how == 2) begin_product(tensor, kTf32, true, true);
    if (how == 3) begin_product(tensor + 16, kShape, false, false);
    if (how == 6) begin_product(tensor, kMinus, false, true);
    ptx::commit_umma(barrier(1));
  }
  if (how == 7 && threadIdx.x == 32) begin_product(tensor, kShape, false, true);
  ptx::wait_barrier(barrier(1), 0);
  end(tensor);
}

TEST(EmulatorOfBlackwell, ProductsFollowEachOtherIfTheyAreOfOneKind) {
  const auto with = [](int how) { return often(128, multiply_more, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), kCommit)) << "another shape";
  EXPECT_TRUE(says(with(2), kCommit)) << "another kind";
  EXPECT_TRUE(says(with(3), kCommit)) << "an overlapping place";
  EXPECT_TRUE(says(with(4), kAfter)) << "waited for, and not fenced";
  EXPECT_EQ(with(5), kFine);
  EXPECT_EQ(with(6), kFine) << "signs and formats are of no account";
  EXPECT_FALSE(with(7).count("")) << "of another thread";
}

// A in tensor memory, which four warps store and one thread uses.
__global__ void multiply_stored(int how) {
  const unsigned tensor = begin(), left = tensor + 128;
  fill_operands();
  ptx::fence_shared_for_async();
  unsigned a[8] = {};
  if (how != 1) ptx::store_tmem(own(left), a);
  if (how != 2) ptx::wait_for_tmem_stores();
  if (how != 3) ptx::fence_tmem_before_sync();
  __syncthreads();
  if (how != 4) ptx::fence_tmem_after_sync();
  if (threadIdx.x == 0) {
    ptx::umma_f16_tmem(tensor, how == 5 ? left + 4 : left, operand(kB), kShape, false);
    if (how != 6) ptx::commit_umma(barrier());
  }
  if (how == 7) ptx::store_tmem(own(left), a), ptx::wait_for_tmem_stores();
  if (how != 6) ptx::wait_barrier(barrier(), 0);
  ptx::fence_tmem_after_sync();
  ptx::store_tmem(own(left), a);
  ptx::wait_for_tmem_stores();
  end(tensor);
}

TEST(EmulatorOfBlackwell, ProductsReadTensorMemory) {
  const auto with = [](int how) { return often(128, multiply_stored, how); };
  EXPECT_EQ(with(0), kFine);
  EXPECT_TRUE(says(with(1), kNobody));
  EXPECT_TRUE(says(with(2), kWaitStore));
  EXPECT_TRUE(says(with(3), kBefore));
  EXPECT_TRUE(says(with(4), kAfter));
  EXPECT_TRUE(says(with(5), kNobody)) << "columns beside it";
  EXPECT_FALSE(with(6).count("")) << "it is still read";
  EXPECT_FALSE(with(7).count("")) << "it is still read";
}

// The copy engine brings the next operand to where one is used.
alignas(16) unsigned char next_operand[128];
__global__ void refill(bool waits) {
  const unsigned tensor = begin();
  fill_operands();
  ptx::fence_shared_for_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::umma_f16(tensor, operand(kA), operand(kB), kShape, false);
    ptx::commit_umma(barrier());
    if (waits) ptx::wait_barrier(barrier(), 0);
    ptx::arrive_expecting(barrier(1), 128);
    ptx::copy_bulk_to_shared(shared() + kA, next_operand, 128, barrier(1));
  }
  ptx::wait_barrier(barrier(), 0), ptx::wait_barrier(barrier(1), 0);
  end(tensor);
}

TEST(EmulatorOfBlackwell, CopiesWaitForProducts) {
  EXPECT_EQ(often(128, refill, true), kFine);
  EXPECT_TRUE(says(often(128, refill, false), "which a product or a copy read at test_blackwell.cc:"));
}

// ---- descriptors ----

struct Described {
  uint64_t a, b;
  unsigned shape, d = 0;
  bool tf32 = false, in_tensor = false;
};
// Operands are given as if shared memory began at 0.
__global__ void describe(Described x) {
  const unsigned tensor = begin();
  fill_operands();
  unsigned zero[8] = {};
  ptx::store_tmem(own(tensor, 128), zero);
  ptx::wait_for_tmem_stores();
  ptx::fence_tmem_before_sync();
  ptx::fence_shared_for_async();
  __syncthreads();
  ptx::fence_tmem_after_sync();
  if (threadIdx.x == 0) {
    const uint64_t a = ptx::further(x.a, shared()), b = ptx::further(x.b, shared());
    const unsigned d = tensor + x.d, left = tensor + 128;
    if (x.tf32 && x.in_tensor) ptx::umma_tf32_tmem(d, left, b, x.shape, false);
    else if (x.tf32) ptx::umma_tf32(d, a, b, x.shape, false);
    else if (x.in_tensor) ptx::umma_f16_tmem(d, left, b, x.shape, false);
    else ptx::umma_f16(d, a, b, x.shape, false);
    ptx::commit_umma(barrier());
  }
  ptx::wait_barrier(barrier(), 0);
  end(tensor);
}

std::string described(const Described& x) { return run(128, kBytes, describe, x); }
testing::AssertionResult refuses(const Described& x, const std::string& why) {
  const std::string said = described(x);
  if (said.find(why) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << said << "\" does not say \"" << why << "\"";
}

const uint64_t kPlain = ptx::operand_at(0, 0, 1024, Swizzling::k128);
const Described kGood{.a = kPlain, .b = kPlain, .shape = kShape};

TEST(EmulatorOfBlackwell, ReadsDescriptorsOfOperands) {
  EXPECT_EQ(described(kGood), "");
  const auto refused = [](uint64_t b, const char* why) {
    Described x = kGood;
    x.b = b;
    return refuses(x, why);
  };
  EXPECT_TRUE(refused(kPlain & ~(uint64_t{7} << 46), "bits 46 to 48 are not those of Blackwell")) << "one of Hopper";
  for (const unsigned bit : {14u, 15u, 30u, 31u, 49u, 51u, 52u, 53u, 60u})
    EXPECT_TRUE(refused(kPlain | uint64_t{1} << bit, "bits that have to be 0")) << bit;
  for (const uint64_t swizzle : {3, 5, 7})
    EXPECT_TRUE(refused((kPlain & ~(uint64_t{7} << 61)) | swizzle << 61, "there is no swizzle ")) << swizzle;
  EXPECT_TRUE(refused(ptx::operand_at(0, 0, 512, Swizzling::k128), "its stride of 512 is no multiple of 1024"));
  EXPECT_TRUE(refused(ptx::operand_at(128, 0, 1024, Swizzling::k128), "does not begin in the first row of a pattern"));
  EXPECT_TRUE(refused(ptx::operand_at(112, 0, 1024, Swizzling::k128), "with 32 bytes of it left"));
  EXPECT_TRUE(refused(ptx::operand_at(48, 0, 512, Swizzling::k64), "with 32 bytes of it left"));
  EXPECT_TRUE(refused(ptx::operand_at(0, 0, 512, Swizzling::k128By32), "swizzled by 32 bytes"));
  EXPECT_TRUE(refused(ptx::operand_at(kBytes - 32, 16, 128, Swizzling::kNone), "of shared memory, which has"));

  Described turned = kGood;
  turned.shape = ptx::umma_of<__half>({.M = 128, .N = 32, .transposed_b = true});
  turned.b = ptx::operand_at(0, 2048, 1024, Swizzling::k128);
  EXPECT_EQ(described(turned), "");
  turned.b = ptx::operand_at(32, 2048, 1024, Swizzling::k128);
  EXPECT_TRUE(refuses(turned, "transposed, it begins at no multiple of 1024"));
  turned.b = ptx::operand_at(0, 64, 1024, Swizzling::k128);
  EXPECT_TRUE(refuses(turned, "its leading offset of 64 is no multiple of 1024"));
  turned.tf32 = true, turned.shape = ptx::umma_of<float>({.M = 128, .N = 32, .transposed_b = true});
  turned.b = ptx::operand_at(0, 2048, 1024, Swizzling::k128);
  EXPECT_TRUE(refuses(turned, "swizzled by 32 bytes is what transposed tf32 has to be"));
  turned.b = ptx::operand_at(0, 2048, 512, Swizzling::k128By32);
  EXPECT_EQ(described(turned), "");
}

TEST(EmulatorOfBlackwell, ReadsDescriptorsOfShapes) {
  const auto refused = [](unsigned shape, const char* why) {
    Described x = kGood;
    x.shape = shape;
    return refuses(x, why);
  };
  for (const unsigned bit : {0u, 1u, 2u, 3u, 6u, 23u, 29u, 30u, 31u})
    EXPECT_TRUE(refused(kShape | 1u << bit, "bits that have to be 0")) << bit;
  EXPECT_TRUE(refused(kShape & ~0x30u, "D is not f32"));
  EXPECT_TRUE(refused(kShape | 1u << 7, "elements 1 and 0 do not fit"));
  EXPECT_TRUE(refused(ptx::umma_of<float>({.M = 128, .N = 32}), "elements 2 and 2 do not fit"));
  EXPECT_TRUE(refused(ptx::umma_of<__half>({.M = 32, .N = 32}), "M = 32"));
  EXPECT_TRUE(refused(ptx::umma_of<__half>({.M = 256, .N = 32}), "M = 256"));
  EXPECT_TRUE(refused(ptx::umma_of<__half>({.M = 128, .N = 0}), "N = 0"));
  EXPECT_TRUE(refused(ptx::umma_of<__half>({.M = 128, .N = 24}), "N = 24 with M = 128"));
  EXPECT_TRUE(refused(ptx::umma_of<__half>({.M = 64, .N = 264}), "N = 264"));

  Described x = kGood;
  x.d = 16u << 16;
  EXPECT_TRUE(refuses(x, "D of a product begins at lane 16"));
  x.shape = ptx::umma_of<__half>({.M = 64, .N = 32});
  EXPECT_EQ(described(x), "");
  x.in_tensor = true;
  EXPECT_TRUE(refuses(x, "A and D of a product are at different lanes"));
  x.d = 0;
  EXPECT_EQ(described(x), "");
  x.d = 240;
  EXPECT_TRUE(refuses(x, "which are not all of one allocation"));
  x.d = 0, x.shape = ptx::umma_of<__half>({.M = 64, .N = 32, .transposed_a = true});
  EXPECT_TRUE(refuses(x, "A is transposed in tensor memory"));
  x.tf32 = true, x.shape = kShape;
  EXPECT_TRUE(refuses(x, "elements 0 and 0 do not fit"));
}

}  // namespace
}  // namespace kda::test
