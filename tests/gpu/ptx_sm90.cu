#include "cuda/engine/scratch.h"
#include "cuda/engine/tiles.h"
#include "ptx_kernels.h"
#include "ptx_launch.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;
using cuda::engine::shared_memory;

// Polls until the phase ends, or gives up. A poll may sleep for a while by itself.
__device__ bool waited(unsigned barrier, unsigned parity) {
  for (int polls = 0; polls < 1 << 12; ++polls)
    if (ptx::has_phase_ended(barrier, parity)) return true;
  return false;
}

// ---- mbarriers and votes ----

__global__ void watch_kernel(const void* from, char* seen) {
  __shared__ uint64_t memory;
  __shared__ uint4 copied[2];
  const unsigned barrier = ptx::shared_address(&memory), to = ptx::shared_address(copied);
  const auto look = [&] {
    for (unsigned parity = 0; parity < 2; ++parity)
      *seen++ = static_cast<char>(ptx::has_phase_ended(barrier, parity) + 2 * ptx::is_phase_over(barrier, parity));
  };
  ptx::init_barrier(barrier, 3), ptx::fence_barriers(), look();
  ptx::arrive(barrier), look();
  ptx::arrive(barrier, 2), look();
  ptx::arrive_expecting(barrier, 32), ptx::arrive(barrier, 2), look();
  ptx::copy_bulk_to_shared(to, from, 32, barrier), *seen++ = waited(barrier, 1), look();
  ptx::arrive_expecting(barrier, 16), look();
  ptx::arrive(barrier, 2), look();
  ptx::copy_bulk_to_shared(to, from, 16, barrier), *seen++ = waited(barrier, 0), look();
}

__global__ void ways_kernel(char* seen) {
  __shared__ volatile char there;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) there = 7;
    ptx::sync_ways(1, 64);
  } else {
    ptx::sync_ways(1, 64);
    seen[threadIdx.x - 32] = there;
  }
}

__global__ void arrival_kernel(char* seen) {
  __shared__ volatile char there;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) there = 7;
    ptx::arrive_threads(1, 64);
  } else {
    ptx::sync_threads(1, 64);
    seen[threadIdx.x - 32] = there;
  }
}

__global__ void elect_kernel(char* elected) {
  for (unsigned i = threadIdx.x; i < 2 * 64; i += 64) elected[i] = ptx::elect();
}

__global__ void vote_kernel(int cases, const char* x, char* all) {
  for (int i = 0; i < cases; ++i, x += 128, all += 128)
    all[threadIdx.x] = ptx::all_threads(1 + threadIdx.x / 64, 64, x[threadIdx.x]);
}

// ---- copies ----

__global__ void bulk_kernel(unsigned count, const uint4* from, uint4* seen, uint4* to) {
  __shared__ uint64_t memory;
  __shared__ uint4 copied[128];
  const unsigned i = threadIdx.x, barrier = ptx::shared_address(&memory), place = ptx::shared_address(copied);
  copied[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (i == 0) ptx::init_barrier(barrier, 1), ptx::fence_barriers();
  ptx::fence_shared_for_async();
  __syncthreads();
  if (i == 0) ptx::arrive_expecting(barrier, count * 16), ptx::copy_bulk_to_shared(place, from, count * 16, barrier);
  waited(barrier, 0);
  const uint4 x = seen[i] = copied[i];
  copied[i] = make_uint4(~x.x, ~x.y, ~x.z, ~x.w);
  ptx::fence_shared_for_async();
  __syncthreads();
  if (i == 0) ptx::copy_bulk_to_global(to, place + 16, count * 16), ptx::commit_bulk(), ptx::wait_for_bulk<0>();
}

using cuda::engine::kTileBytes;

__global__ void load_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Corner at, uint4* seen) {
  auto* tile = reinterpret_cast<uint4*>(shared_memory());
  const unsigned i = threadIdx.x, place = ptx::shared_address(tile), barrier = place + kTileBytes;
  tile[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (i == 0) ptx::init_barrier(barrier, 1), ptx::fence_barriers();
  ptx::fence_shared_for_async();
  __syncthreads();
  if (i == 0)
    ptx::arrive_expecting(barrier, kTileBytes),
        ptx::copy_tile(place, map, at.channel, at.head, at.token, at.b, barrier);
  waited(barrier, 0);
  seen[i] = tile[i];
}

constexpr unsigned kMemory = 6144, kCopied = 1024;  // bytes

__global__ void __cluster_dims__(2) cluster_kernel(const uint4* from, const __grid_constant__ CUtensorMap map,
                                                   const __grid_constant__ Corner at, uint4* seen, unsigned* notes) {
  unsigned char* memory = shared_memory();
  const unsigned rank = ptx::rank(), other = rank ^ 1, place = ptx::shared_address(memory), barrier = place + kMemory;
  for (unsigned i = threadIdx.x; i < kMemory / 16; i += blockDim.x) {
    const unsigned j = i - kTileBytes / 16;
    reinterpret_cast<uint4*>(memory)[i] = rank == 0 && j < kCopied / 16 ? from[j] : make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  if (threadIdx.x == 0) {
    ptx::init_barrier(barrier, 3), ptx::fence_barriers();
    ptx::store_shared(barrier + 8, rank), ptx::store_shared(barrier + 12, 7);
  }
  ptx::fence_shared_for_async();
  ptx::sync_cluster();
  if (threadIdx.x == 0 && rank == 0) {
    const unsigned there = ptx::address_in(barrier, other), bytes = place + kTileBytes;
    ptx::arrive_expecting_at(there, kTileBytes + kCopied + 4);
    ptx::copy_bulk_between(ptx::address_in(bytes + kCopied, other), bytes, kCopied, there);
    ptx::copy_tile_to(1 << other, place, map, at.channel, at.head, at.token, at.b, barrier);
    ptx::send(ptx::address_in(barrier + 12, other), 5, there);
    ptx::arrive_at(there);
  } else if (threadIdx.x == 0) {
    ptx::arrive(barrier);
  }
  if (rank == 1) waited(barrier, 0);
  ptx::sync_cluster();
  for (unsigned i = threadIdx.x; i < kMemory / 16; i += blockDim.x)
    seen[rank * kMemory / 16 + i] = reinterpret_cast<uint4*>(memory)[i];
  if (threadIdx.x == 0) {
    const unsigned found[] = {rank, ptx::load_shared_at(ptx::address_in(barrier + 8, other)),
                              ptx::has_phase_ended(barrier, 0), ptx::is_phase_over(barrier, 0),
                              ptx::load_shared(barrier + 12)};
    for (unsigned i = 0; i < 5; ++i) notes[rank * 5 + i] = found[i];
  }
  ptx::arrive_at_cluster();
  ptx::wait_for_cluster();  // the memory of a block must not be read after its end
}

__global__ void store_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Corner at,
                             const uint4* from) {
  auto* tile = reinterpret_cast<uint4*>(shared_memory());
  tile[threadIdx.x] = from[threadIdx.x];
  ptx::fence_shared_for_async();
  __syncthreads();
  if (threadIdx.x > 0) return;
  ptx::store_tile(map, at.channel, at.head, at.token, at.b, ptx::shared_address(tile));
  ptx::commit_bulk();
  ptx::wait_for_bulk<0>();
}

__global__ void __cluster_dims__(2)
    states_kernel(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                  const __grid_constant__ Columns at, float* seen) {
  using cuda::engine::StateTiles;
  const auto* memory = reinterpret_cast<const float*>(shared_memory());
  const unsigned rank = ptx::rank(), other = rank ^ 1, place = ptx::shared_address(memory),
                 barrier = place + StateTiles::kWarpBytes;
  if (threadIdx.x == 0) {
    ptx::init_barrier(barrier, 1), ptx::fence_barriers();
    ptx::arrive_expecting(barrier, StateTiles::kWarpBytes);
  }
  ptx::sync_cluster();
  const auto each_box = [&](const auto& f) {
    for (unsigned box = 0; box < StateTiles::kBoxes; ++box)
      f(box * StateTiles::kChannels, place + box * StateTiles::kBoxBytes);
  };
  if (threadIdx.x == 0 && rank == 0)
    each_box([&](unsigned channel, unsigned box) {
      ptx::copy_box(box, from, channel, 2 * at.first, 0, at.hv, at.slot, barrier);
      ptx::copy_box_to(1 << other, box, from, channel, 2 * at.first + 2, 0, at.hv, at.slot, barrier);
    });
  waited(barrier, 0);
  for (unsigned i = threadIdx.x; i < StateTiles::kWarpBytes / 4; i += blockDim.x)
    seen[rank * (StateTiles::kWarpBytes / 4) + i] = memory[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    each_box([&](unsigned channel, unsigned box) {
      ptx::store_box(to, channel, 2 * (at.first + rank), 0, at.hv, at.to, box);
    });
    ptx::commit_bulk(), ptx::wait_for_bulk<0>();
  }
  ptx::sync_cluster();  // nothing may be copied to a block that has ended
}

__global__ void store_matrices_kernel(const unsigned* x, uint4* rows) {
  __shared__ uint4 memory[32];
  const unsigned lane = threadIdx.x, place = lane ^ 5;  // in any order
  ptx::store_transposed(ptx::shared_address(memory + place), {x[lane], x[32 + lane], x[64 + lane], x[96 + lane]});
  __syncthreads();
  rows[lane] = memory[place];
}

// ---- numbers ----

template <class T>
__global__ void larger_kernel(int n, const unsigned* x, const unsigned* y, unsigned* z) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) z[i] = ptx::larger<T, false>(x[i], y[i]), z[n + i] = ptx::larger<T, true>(x[i], y[i]);
}

// ---- products ----

__device__ void store_image(unsigned char* to, const uint4* from, unsigned bytes) {
  for (unsigned i = threadIdx.x; i < bytes / 16; i += 128) reinterpret_cast<uint4*>(to)[i] = from[i];
}

// A matrix of kRows rows in shared memory.
template <unsigned kRows, unsigned kRowBytes, bool kTransposed = false>
struct Matrix {
  static constexpr unsigned kPart = kRows * kRowBytes, kSteps = kRowBytes / 32;
  uint64_t whole;
  __device__ explicit Matrix(const unsigned char* at)
      : whole(ptx::matrix_at(ptx::shared_address(at), kTransposed ? kPart : 16, 8 * kRowBytes,
                             kRowBytes == 128 ? ptx::Swizzle::k128 : ptx::Swizzle::k64)) {}
  // Sixteen channels of the contraction.
  __device__ uint64_t step(unsigned k) const {
    return ptx::further(whole, kTransposed ? k * 16 * kRowBytes : k / kSteps * kPart + k % kSteps * 32);
  }
};

// Calls f(register, element) for all of the thread's elements of d.
template <unsigned N, class F>
__device__ void elements(const F& f) {
  const unsigned row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (unsigned i = 0; i < N / 2; ++i) f(i, (row + i / 2 % 2 * 8) * N + i / 4 * 8 + column + i % 2);
}

template <class T, unsigned N, bool kTransposed, unsigned kRowBytes>
__global__ void __launch_bounds__(128) product_kernel(const void* a, const uint4* b, bool accumulate, float* d) {
  constexpr unsigned kDepth = Product::depth(kTransposed, kRowBytes);
  const unsigned row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  store_image(shared_memory(), b, N * kDepth * 2);
  ptx::fence_shared_for_async();
  __syncthreads();
  unsigned left[kDepth / 16][4];
#pragma unroll
  for (unsigned i = 0; i < kDepth / 4; ++i)
    left[i / 4][i % 4] =
        static_cast<const unsigned*>(a)[((row + i % 2 * 8) * kDepth + i / 4 * 16 + i % 4 / 2 * 8 + column) / 2];
  float x[N / 2];
  elements<N>([&](unsigned i, unsigned e) { x[i] = d[e]; });
  const Matrix<kTransposed ? kDepth : N, kRowBytes, kTransposed> right(shared_memory());
  ptx::fence_products();
#pragma unroll
  for (unsigned k = 0; k < kDepth / 16; ++k) ptx::wgmma<T, kTransposed>(x, left[k], right.step(k), accumulate || k > 0);
  ptx::commit_products();
  ptx::wait_for_products<0>();
  elements<N>([&](unsigned i, unsigned e) { d[e] = x[i]; });
}

template <class T, unsigned kRowBytes>
__global__ void __launch_bounds__(128) shared_product_kernel(const void* a, const uint4* b, bool accumulate, float* d) {
  constexpr unsigned N = 32, kDepth = Product::depth(false, kRowBytes);
  unsigned char* behind = shared_memory() + 64 * kDepth * 2;
  store_image(shared_memory(), static_cast<const uint4*>(a), 64 * kDepth * 2), store_image(behind, b, N * kDepth * 2);
  ptx::fence_shared_for_async();
  __syncthreads();
  float x[N / 2];
  elements<N>([&](unsigned i, unsigned e) { x[i] = d[e]; });
  const Matrix<64, kRowBytes> left(shared_memory());
  const Matrix<N, kRowBytes> right(behind);
  ptx::fence_products();
#pragma unroll
  for (unsigned k = 0; k < kDepth / 16; ++k) ptx::wgmma_shared<T>(x, left.step(k), right.step(k), accumulate || k > 0);
  ptx::commit_products();
  ptx::wait_for_products<0>();
  elements<N>([&](unsigned i, unsigned e) { d[e] = x[i]; });
}

template <class T>
auto kernel_of(const Product& p) {
  if (p.shared) return p.row_bytes == 64 ? shared_product_kernel<T, 64> : shared_product_kernel<T, 128>;
  if (p.transposed) return p.N == 64 ? product_kernel<T, 64, true, 128> : product_kernel<T, 128, true, 128>;
  if (p.N == 32) return p.row_bytes == 64 ? product_kernel<T, 32, false, 64> : product_kernel<T, 32, false, 128>;
  return p.N == 64 ? product_kernel<T, 64, false, 128> : product_kernel<T, 128, false, 128>;
}

// ---- places ----

__global__ void places_kernel(unsigned* square, unsigned* own) {
  using cuda::engine::Scratch, cuda::engine::kHalf;
  const Scratch at(0, 0);
  const unsigned thread = threadIdx.x;
  for (unsigned i = thread; i < 32 * 32; i += 128) square[i] = Scratch::square(i / 32, i % 32);
  for (unsigned i = 0; i < 8; ++i)
    own[(i * 128 + thread) * 2] = at.own(i) % kHalf, own[(i * 128 + thread) * 2 + 1] = at.own(i) / kHalf;
}

}  // namespace

void watch_barrier(const void* from, char* seen) { launch({1, 1}, watch_kernel, from, seen); }
void meet_by_two_ways(char* seen) { launch({1, 64}, ways_kernel, seen); }
void meet_by_arrival(char* seen) { launch({1, 64}, arrival_kernel, seen); }
void elect_twice(char* elected) { launch({1, 64}, elect_kernel, elected); }
void vote(int cases, const char* x, char* all) { launch({1, 128}, vote_kernel, cases, x, all); }
void copy_bulk(unsigned count, const void* from, void* seen, void* to) {
  launch({1, 128}, bulk_kernel, count, static_cast<const uint4*>(from), static_cast<uint4*>(seen),
         static_cast<uint4*>(to));
}
void load_tile(const kda_tensor& from, const Corner& at, void* seen) {
  launch({1, kTileBytes / 16, kTileBytes + 8}, load_kernel, cuda::engine::Tiles::map(from), at,
         static_cast<uint4*>(seen));
}
void copy_between_blocks(const void* from, const kda_tensor& tile, const Corner& at, void* seen, unsigned* notes) {
  launch({2, 128, kMemory + 16}, cluster_kernel, static_cast<const uint4*>(from), cuda::engine::Tiles::map(tile), at,
         static_cast<uint4*>(seen), notes);
}
void store_tile(const kda_tensor& to, const Corner& at, const void* tile) {
  launch({1, kTileBytes / 16, kTileBytes}, store_kernel, cuda::engine::Tiles::map(to), at,
         static_cast<const uint4*>(tile));
}
void exchange_states(const kda_tensor& from, const kda_tensor& to, const Columns& at, float* seen) {
  using cuda::engine::StateTiles;
  launch({2, 128, StateTiles::kWarpBytes + 8}, states_kernel, StateTiles::map(from), StateTiles::map(to), at, seen);
}
void store_matrices(const unsigned* x, void* matrices) {
  launch({1, 32}, store_matrices_kernel, x, static_cast<uint4*>(matrices));
}
void compute_larger(int32_t dtype, int n, const unsigned* x, const unsigned* y, unsigned* z) {
  const auto kernel = dtype == KDA_F16 ? larger_kernel<__half> : larger_kernel<__nv_bfloat16>;
  launch({(n + 127) / 128, 128}, kernel, n, x, y, z);
}
void multiply_by_warpgroup(int32_t dtype, const Product& p, const void* a, const void* b, bool accumulate, float* d) {
  const auto kernel = dtype == KDA_F16 ? kernel_of<__half>(p) : kernel_of<__nv_bfloat16>(p);
  launch({1, 128, 32 * 1024}, kernel, a, static_cast<const uint4*>(b), accumulate, d);
}
void find_places(unsigned* square, unsigned* own) { launch({1, 128}, places_kernel, square, own); }

}  // namespace kda::test
