#include <cuda_runtime.h>

#include "cuda/ptx/sm80.h"
#include "ptx_kernels.h"
#include "ptx_launch.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

__global__ void compute_kernel(int n, const float* x, const float* y, float* z, unsigned* packed) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  z[i] = ptx::exp2(x[i]), z[n + i] = ptx::reciprocal(x[i]), z[2 * n + i] = ptx::inverse_root(x[i]);
  z[3 * n + i] = ptx::least(x[i], y[i]), z[4 * n + i] = ptx::multiply_flushed(x[i], y[i]);
  packed[i] = ptx::pack<__half>(x[i], y[i]), packed[n + i] = ptx::pack<__nv_bfloat16>(x[i], y[i]);
}

__global__ void copy_kernel(const uint4* from, uint4* to) {
  __shared__ uint4 memory[32];
  const unsigned i = threadIdx.x, place = ptx::shared_address(memory + i);
  memory[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  __syncthreads();
  if (i <= 16) ptx::copy16(place, from + i, i);
  else if (i == 17) ptx::copy16(place, from + i);
  else if (i <= 26) ptx::copy8(place, from + i, i - 18);
  else if (i == 27) ptx::copy8(place, from + i);
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  __syncthreads();
  to[i] = memory[i];
}

__global__ void load_kernel(const uint4* rows, unsigned* x) {
  __shared__ uint4 memory[32];
  const unsigned lane = threadIdx.x, place = lane ^ 5;  // in any order
  memory[place] = rows[lane];
  __syncthreads();
  unsigned straight[4], transposed[4];
  ptx::load_matrices(straight, ptx::shared_address(memory + place));
  ptx::load_transposed(transposed, ptx::shared_address(memory + place));
  for (unsigned i = 0; i < 4; ++i) {
    x[i * 32 + lane] = straight[i], x[(4 + i) * 32 + lane] = transposed[i];
    x[(8 + i) * 32 + lane] = ptx::transposed(straight[i]);
  }
}

// For rows of eight registers, whatever a register holds.
template <class Multiply>
__device__ void multiply(const unsigned* a, const unsigned* b, float* d, const Multiply& multiply) {
  const unsigned i = threadIdx.x / 4, j = threadIdx.x % 4;
  const unsigned left[4] = {a[i * 8 + j], a[(i + 8) * 8 + j], a[i * 8 + j + 4], a[(i + 8) * 8 + j + 4]};
  float x[4];
  for (unsigned e = 0; e < 4; ++e) x[e] = d[(i + e / 2 * 8) * 8 + 2 * j + e % 2];
  multiply(x, left, b[i * 8 + j], b[i * 8 + j + 4]);
  for (unsigned e = 0; e < 4; ++e) d[(i + e / 2 * 8) * 8 + 2 * j + e % 2] = x[e];
}
template <class T>
__global__ void mma_kernel(const unsigned* a, const unsigned* b, float* d) {
  multiply(a, b, d, ptx::mma<T>);
}
__global__ void mma_tf32_kernel(const unsigned* a, const unsigned* b, float* d) { multiply(a, b, d, ptx::mma_tf32); }

}  // namespace

void compute(int n, const float* x, const float* y, float* z, unsigned* packed) {
  launch({(n + 127) / 128, 128}, compute_kernel, n, x, y, z, packed);
}
void copy_asynchronously(const void* from, void* to) {
  launch({1, 32}, copy_kernel, static_cast<const uint4*>(from), static_cast<uint4*>(to));
}
void load_matrices(const void* matrices, unsigned* x) {
  launch({1, 32}, load_kernel, static_cast<const uint4*>(matrices), x);
}
void multiply_by_warp(int32_t dtype, const void* a, const void* b, float* d) {
  const auto kernel = dtype == KDA_F16    ? mma_kernel<__half>
                      : dtype == KDA_BF16 ? mma_kernel<__nv_bfloat16>
                                          : mma_tf32_kernel;
  launch({1, 32}, kernel, static_cast<const unsigned*>(a), static_cast<const unsigned*>(b), d);
}

}  // namespace kda::test
