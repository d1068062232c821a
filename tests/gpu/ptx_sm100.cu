#include "cuda/engine/shared_memory.h"
#include "cuda/ptx/sm100.h"
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

// Synchronises the threads of the block, or of both blocks.
template <int kBlocks>
__device__ void sync() {
  if constexpr (kBlocks == 1) __syncthreads();
  else ptx::sync_cluster();
}

// Tensor memory for the block's threads, which the first warp frees at the end.
template <int kBlocks = 1>
struct Tensor {
  unsigned address;
  __device__ explicit Tensor(unsigned place) {
    if (threadIdx.x < 32) ptx::tmem_alloc<kBlocks>(place, 512), ptx::tmem_relinquish<kBlocks>();
    sync<kBlocks>();
    address = ptx::load_shared(place);
  }
  __device__ void free() const {
    ptx::fence_tmem_before_sync();
    sync<kBlocks>();
    if (threadIdx.x < 32) ptx::tmem_dealloc<kBlocks>(address, 512);
  }
  // The lanes of the thread's warp.
  __device__ unsigned own(unsigned column) const { return ptx::tmem_at(address, threadIdx.x / 32 * 32, column); }
};

// ---- tensor memory ----

template <int kColumns>
__global__ void __launch_bounds__(128) columns_kernel(unsigned columns, const unsigned* x, unsigned* seen) {
  const Tensor<> tensor(ptx::shared_address(shared_memory()));
  unsigned own[kColumns];
  for (unsigned first = 0; first < columns; first += kColumns) {
    for (unsigned i = 0; i < kColumns; ++i) own[i] = x[threadIdx.x * columns + first + i];
    ptx::store_tmem(tensor.own(first), own);
  }
  ptx::wait_for_tmem_stores();
  for (unsigned first = 0; first < columns; first += kColumns) {
    ptx::load_tmem(own, tensor.own(first));
    ptx::wait_for_tmem_loads();
    for (unsigned i = 0; i < kColumns; ++i) seen[threadIdx.x * columns + first + i] = own[i];
  }
  tensor.free();
}

// Calls f(register, row, column) for the registers of a thread, of 16 lanes from `half` on.
template <int kColumns, class F>
__device__ void fragments(unsigned half, const F& f) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned i = 0; i < kColumns / 2; ++i)
    f(i, threadIdx.x / 32 * 32 + half * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
}

template <int kColumns>
__global__ void __launch_bounds__(128) fragments_kernel(unsigned columns, const unsigned* x, unsigned* seen) {
  const Tensor<> tensor(ptx::shared_address(shared_memory()));
  unsigned own[kColumns / 2];
  for (unsigned first = 0; first < columns; first += kColumns)
    for (unsigned half = 0; half < 2; ++half) {
      fragments<kColumns>(half, [&](unsigned i, unsigned row, unsigned c) { own[i] = x[row * columns + first + c]; });
      ptx::store_tmem_fragments(ptx::tmem_at(tensor.own(first), 16 * half, 0), own);
    }
  ptx::wait_for_tmem_stores();
  for (unsigned first = 0; first < columns; first += kColumns)
    for (unsigned half = 0; half < 2; ++half) {
      ptx::load_tmem_fragments(own, ptx::tmem_at(tensor.own(first), 16 * half, 0));
      ptx::wait_for_tmem_loads();
      fragments<kColumns>(half,
                          [&](unsigned i, unsigned row, unsigned c) { seen[row * columns + first + c] = own[i]; });
    }
  tensor.free();
}

// Stores operands, in 16 lanes at a time, and loads them by columns.
template <int kColumns>
__global__ void __launch_bounds__(128) operands_kernel(unsigned columns, const unsigned* x, unsigned* seen) {
  const Tensor<> tensor(ptx::shared_address(shared_memory()));
  const unsigned lane = threadIdx.x % 32;
  for (unsigned first = 0; first < columns; first += kColumns)
    for (unsigned half = 0; half < 2; ++half) {
      unsigned own[kColumns / 2];
#pragma unroll
      for (unsigned i = 0; i < kColumns / 2; ++i) {
        const unsigned row = threadIdx.x / 32 * 32 + half * 16 + lane / 4 + i % 2 * 8;
        own[i] = x[row * columns + first + i / 2 * 4 + lane % 4];
      }
      ptx::store_tmem_operands(ptx::tmem_at(tensor.own(first), 16 * half, 0), own);
    }
  ptx::wait_for_tmem_stores();
  for (unsigned c = 0; c < columns; ++c) {
    unsigned own[1];
    ptx::load_tmem(own, tensor.own(c));
    ptx::wait_for_tmem_loads();
    seen[threadIdx.x * columns + c] = own[0];
  }
  tensor.free();
}

__global__ void __launch_bounds__(128) mix_kernel(unsigned columns, const unsigned* x, unsigned* seen) {
  const Tensor<> tensor(ptx::shared_address(shared_memory()));
  for (unsigned c = 0; c < columns; ++c) {
    const unsigned own[1] = {x[threadIdx.x * columns + c]};
    ptx::store_tmem(tensor.own(c), own);
  }
  ptx::wait_for_tmem_stores();
  for (unsigned first = 0; first < columns; first += 8)
    for (unsigned half = 0; half < 2; ++half) {
      unsigned own[4];
      ptx::load_tmem_fragments(own, ptx::tmem_at(tensor.own(first), 16 * half, 0));
      ptx::wait_for_tmem_loads();
      for (unsigned i = 0; i < 4; ++i) seen[((first / 8 * 2 + half) * 4 + i) * 128 + threadIdx.x] = own[i];
    }
  tensor.free();
}

// ---- products ----

__device__ void store_image(unsigned char* to, const uint4* from, unsigned bytes) {
  for (unsigned i = threadIdx.x; i < bytes / 16; i += 128) reinterpret_cast<uint4*>(to)[i] = from[i];
}

__device__ uint64_t step(const UmmaOperand& o, unsigned address, unsigned i) {
  return ptx::operand_at(address + o.offsets[i], o.leading, o.stride, static_cast<ptx::Swizzling>(o.swizzling));
}

__global__ void __launch_bounds__(128)
    copy_kernel(unsigned steps, const __grid_constant__ UmmaOperand from, const uint4* image, unsigned* seen) {
  unsigned char* memory = shared_memory();
  const unsigned place = ptx::shared_address(memory), barrier = place + from.bytes;
  if (threadIdx.x == 0) ptx::init_barrier(barrier, 1), ptx::fence_barriers();
  const Tensor<> tensor(barrier + 8);
  store_image(memory, image, from.bytes);
  ptx::fence_shared_for_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < steps; ++i) ptx::copy_to_tmem(tensor.address + 8 * i, step(from, place, i));
    ptx::commit_umma(barrier);
  }
  const bool done = waited(barrier, 0);
  ptx::fence_tmem_after_sync();
  for (unsigned i = 0; i < steps && done; ++i) {
    unsigned x[8];
    ptx::load_tmem(x, tensor.own(8 * i));
    ptx::wait_for_tmem_loads();
    for (unsigned c = 0; c < 8; ++c) seen[(threadIdx.x * steps + i) * 8 + c] = x[c];
  }
  tensor.free();
}

// What the thread's lane has of D: a row, or M: none; and columns.
struct Own {
  unsigned row, column, columns;
  __device__ Own(const UmmaCase& p, unsigned rank) : row(threadIdx.x), column(0), columns(p.N) {
    const unsigned lane = threadIdx.x % 32;
    if (p.blocks == 1 && p.M == 64) {
      row = lane / 16 == p.first_lane / 16 ? threadIdx.x / 32 * 16 + lane % 16 : p.M;
    } else if (p.blocks == 2 && p.M == 256) {
      row += rank * 128;
    } else if (p.blocks == 2) {
      row = rank * 64 + threadIdx.x % 64;
      columns /= 2, column = threadIdx.x / 64 * columns;
    }
  }
};

template <class T>
__device__ unsigned shape_of(const UmmaCase& p) {
  return ptx::umma_of<T>({.M = p.M,
                          .N = p.N,
                          .transposed_a = p.transposed_a,
                          .transposed_b = p.transposed_b,
                          .negated_a = p.negated_a,
                          .negated_b = p.negated_b});
}

constexpr unsigned kOperandBytes = 64 * 1024;  // for each of A and B
constexpr unsigned kFirstOfA = 256;            // column

// By one thread: all steps.
template <class T, int kBlocks>
__device__ void multiply(const UmmaCase& p, unsigned tensor, unsigned a, unsigned b, bool accumulate) {
  const unsigned d = ptx::tmem_at(tensor, p.first_lane, 0), shape = shape_of<T>(p);
  for (unsigned i = 0; i < p.steps; ++i) {
    const unsigned left = ptx::tmem_at(tensor, p.first_lane, kFirstOfA + 8 * i);
    const bool adds = accumulate || i > 0;
    if constexpr (std::is_same_v<T, float>) {
      if (p.in_tensor) ptx::umma_tf32_tmem<kBlocks>(d, left, step(p.b, b, i), shape, adds);
      else ptx::umma_tf32<kBlocks>(d, step(p.a, a, i), step(p.b, b, i), shape, adds);
    } else {
      if (p.in_tensor) ptx::umma_f16_tmem<kBlocks>(d, left, step(p.b, b, i), shape, adds);
      else ptx::umma_f16<kBlocks>(d, step(p.a, a, i), step(p.b, b, i), shape, adds);
    }
  }
}

// Stores D and A, where they belong to tensor memory.
template <int kBlocks>
__device__ void store_rows(const UmmaCase& p, const Own& own, const Tensor<kBlocks>& tensor, const unsigned* a,
                           const float* d) {
  for (unsigned n = 0; n < own.columns && d; n += 8) {
    float x[8];
    for (unsigned i = 0; i < 8; ++i) x[i] = own.row < p.M ? d[own.row * p.N + own.column + n + i] : 0;
    ptx::store_tmem(tensor.own(n), x);
  }
  for (unsigned step = 0; step < p.steps && a; ++step) {
    unsigned x[8];
    for (unsigned i = 0; i < 8; ++i) x[i] = own.row < p.M ? a[(own.row * p.steps + step) * 8 + i] : 0;
    ptx::store_tmem(tensor.own(kFirstOfA + 8 * step), x);
  }
  ptx::wait_for_tmem_stores();
}
template <int kBlocks>
__device__ void load_rows(const UmmaCase& p, const Own& own, const Tensor<kBlocks>& tensor, float* d) {
  for (unsigned n = 0; n < own.columns; n += 8) {
    float x[8];
    ptx::load_tmem(x, tensor.own(n));
    ptx::wait_for_tmem_loads();
    for (unsigned i = 0; i < 8 && own.row < p.M; ++i) d[own.row * p.N + own.column + n + i] = x[i];
  }
}

template <class T, int kBlocks>
__device__ void multiply_all(const UmmaCase& p, unsigned rank, const unsigned char* a, const unsigned char* b,
                             bool accumulate, float* d) {
  unsigned char* memory = shared_memory();
  const unsigned place = ptx::shared_address(memory), barrier = place + 2 * kOperandBytes;
  if (threadIdx.x == 0) ptx::init_barrier(barrier, 1), ptx::fence_barriers();
  const Tensor<kBlocks> tensor(barrier + 8);
  const Own own(p, rank);
  store_rows(p, own, tensor, p.in_tensor ? reinterpret_cast<const unsigned*>(a) : nullptr, accumulate ? d : nullptr);
  if (!p.in_tensor) store_image(memory, reinterpret_cast<const uint4*>(a + rank * p.a.bytes), p.a.bytes);
  store_image(memory + kOperandBytes, reinterpret_cast<const uint4*>(b + rank * p.b.bytes), p.b.bytes);
  ptx::fence_shared_for_async();
  ptx::fence_tmem_before_sync();
  sync<kBlocks>();
  ptx::fence_tmem_after_sync();
  if (threadIdx.x == 0 && rank == 0) {
    multiply<T, kBlocks>(p, tensor.address, place, place + kOperandBytes, accumulate);
    if constexpr (kBlocks == 1) ptx::commit_umma(barrier);
    else ptx::commit_umma_to<kBlocks>(3, barrier);
  }
  const bool done = waited(barrier, 0);
  ptx::fence_tmem_after_sync();
  if (done) load_rows(p, own, tensor, d);
  tensor.free();
}

template <class T>
__global__ void __launch_bounds__(128) umma_kernel(const __grid_constant__ UmmaCase p, const unsigned char* a,
                                                   const unsigned char* b, bool accumulate, float* d) {
  multiply_all<T, 1>(p, 0, a, b, accumulate, d);
}
template <class T>
__global__ void __launch_bounds__(128) __cluster_dims__(2)
    pair_kernel(const __grid_constant__ UmmaCase p, const unsigned char* a, const unsigned char* b, bool accumulate,
                float* d) {
  multiply_all<T, 2>(p, ptx::rank(), a, b, accumulate, d);
}
template <class T>
auto kernel_of(const UmmaCase& p) {
  return p.blocks == 2 ? pair_kernel<T> : umma_kernel<T>;
}

}  // namespace

void keep_by_columns(unsigned columns, unsigned at_a_time, const unsigned* x, unsigned* seen) {
  const auto run = [&](auto kernel) { launch({1, 128, 16}, kernel, columns, x, seen); };
  switch (at_a_time) {
    case 1: return run(columns_kernel<1>);
    case 2: return run(columns_kernel<2>);
    case 4: return run(columns_kernel<4>);
    case 8: return run(columns_kernel<8>);
    case 16: return run(columns_kernel<16>);
    case 32: return run(columns_kernel<32>);
    case 64: return run(columns_kernel<64>);
    case 128: return run(columns_kernel<128>);
  }
}
void keep_by_fragments(unsigned columns, unsigned at_a_time, const unsigned* x, unsigned* seen) {
  const auto run = [&](auto kernel) { launch({1, 128, 16}, kernel, columns, x, seen); };
  switch (at_a_time) {
    case 8: return run(fragments_kernel<8>);
    case 16: return run(fragments_kernel<16>);
    case 32: return run(fragments_kernel<32>);
    case 64: return run(fragments_kernel<64>);
    case 128: return run(fragments_kernel<128>);
    case 256: return run(fragments_kernel<256>);
  }
}
void keep_by_operands(unsigned columns, unsigned at_a_time, const unsigned* x, unsigned* seen) {
  const auto run = [&](auto kernel) { launch({1, 128, 16}, kernel, columns, x, seen); };
  switch (at_a_time) {
    case 8: return run(operands_kernel<8>);
    case 16: return run(operands_kernel<16>);
    case 32: return run(operands_kernel<32>);
    case 64: return run(operands_kernel<64>);
  }
}
void mix_shapes(unsigned columns, const unsigned* x, unsigned* seen) {
  launch({1, 128, 16}, mix_kernel, columns, x, seen);
}
void copy_to_tensor(unsigned steps, const UmmaOperand& from, const void* image, unsigned* seen) {
  const size_t bytes = from.bytes + 16;
  cudaFuncSetAttribute(copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  launch({1, 128, bytes}, copy_kernel, steps, from, static_cast<const uint4*>(image), seen);
}
void multiply_by_blocks(const UmmaCase& p, const void* a, const void* b, bool accumulate, float* d) {
  const auto kernel = p.dtype == KDA_F16    ? kernel_of<__half>(p)
                      : p.dtype == KDA_BF16 ? kernel_of<__nv_bfloat16>(p)
                                            : kernel_of<float>(p);
  constexpr size_t kBytes = 2 * kOperandBytes + 16;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  launch({static_cast<int>(p.blocks), 128, kBytes}, kernel, p, static_cast<const unsigned char*>(a),
         static_cast<const unsigned char*>(b), accumulate, d);
}

}  // namespace kda::test
