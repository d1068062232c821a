// The gate activation alone (math.md 2.1), forward and backward, for sm_80 and newer.
//   softplus     g = -a softplus(z)        dx = -a sigmoid(z) dg          dA_log += dg g
//   lower bound  g = lb sigmoid(a z)       dx = a lb s (1 - s) dg         dA_log += dx z         z = x + dt_bias
//
// Bytes: forward reads x and writes g, backward reads x, dg and writes dx; everything else is small. Both are bound by
// memory: one thread owns one channel k of a head and walks down rows, so a warp reads 32 neighbouring channels.
//
// Grid: (block of rows, head). Backward sums in two levels without atomics: each block writes its sums of dA_log and
// d_dt_bias to the workspace, then one block per head adds them in order. The number of rows of a block is a function of
// M alone, so the bits are too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/cuda.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int64_t kMinRows = 64;         // rows of a block: enough to pay for its share of the sums
constexpr int64_t kMaxRowBlocks = 1024;  // what the second level adds one after the other

struct Operand {
  void* data;
  int64_t stride_m, stride_h;  // elements
  int32_t dtype;
};

struct Params {
  Operand x, g;  // g: output of forward, dg in backward
  Operand dx;
  const float *A_log, *dt_bias;  // may be null
  int64_t A_stride, bias_stride;
  float* sums;  // [row blocks][HV][1 + K] dA_log, then d_dt_bias
  float *dA_log, *d_dt_bias;
  int64_t dA_stride, d_bias_stride;
  int64_t M, rows;  // rows of a block
  int HV, K;
  int32_t form;
  float lower_bound;
};

__device__ float load(const Operand& t, int64_t m, int64_t h, int k) {
  const int64_t at = m * t.stride_m + h * t.stride_h + k;
  switch (t.dtype) {
    case KDA_F32: return static_cast<const float*>(t.data)[at];
    case KDA_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[at]);
    default: return __half2float(static_cast<const __half*>(t.data)[at]);
  }
}

__device__ void store(const Operand& t, float value, int64_t m, int64_t h, int k) {
  const int64_t at = m * t.stride_m + h * t.stride_h + k;
  switch (t.dtype) {
    case KDA_F32: static_cast<float*>(t.data)[at] = value; break;
    case KDA_BF16: static_cast<__nv_bfloat16*>(t.data)[at] = __float2bfloat16_rn(value); break;
    default: static_cast<__half*>(t.data)[at] = __float2half_rn(value); break;
  }
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// log1p keeps the relative accuracy for very negative x, where models start.
__device__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ float gate(const Params& p, float a, float z) {
  return p.form == KDA_GATE_SOFTPLUS ? -a * softplus(z) : p.lower_bound * sigmoid(a * z);
}

__global__ void forward_kernel(const __grid_constant__ Params p) {
  const int k = threadIdx.x;
  const int64_t h = blockIdx.y, first = blockIdx.x * p.rows, last = min(first + p.rows, p.M);
  if (k >= p.K) return;
  const float a = p.A_log ? expf(p.A_log[h * p.A_stride]) : 1.0f;
  const float bias = p.dt_bias ? p.dt_bias[h * p.bias_stride + k] : 0.0f;
  for (int64_t m = first; m < last; ++m) store(p.g, gate(p, a, load(p.x, m, h, k) + bias), m, h, k);
}

// Sum over the block in a fixed tree; the result is valid in thread 0. blockDim.x is a multiple of 32, at most 256.
__device__ float block_sum(float value) {
  __shared__ float warp_sums[8];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();  // warp_sums is complete
  float sum = 0;
  for (int w = 0; threadIdx.x == 0 && w < blockDim.x / 32; ++w) sum += warp_sums[w];
  return sum;
}

__global__ void backward_kernel(const __grid_constant__ Params p) {
  const int k = threadIdx.x;
  const int64_t h = blockIdx.y, first = blockIdx.x * p.rows, last = min(first + p.rows, p.M);
  const bool active = k < p.K;
  const float a = p.A_log ? expf(p.A_log[h * p.A_stride]) : 1.0f;
  const float bias = active && p.dt_bias ? p.dt_bias[h * p.bias_stride + k] : 0.0f;
  float A_sum = 0, bias_sum = 0;
  for (int64_t m = first; active && m < last; ++m) {
    const float z = load(p.x, m, h, k) + bias, dg = load(p.g, m, h, k);
    float dx;
    if (p.form == KDA_GATE_SOFTPLUS) {
      dx = -a * sigmoid(z) * dg;
      A_sum += dg * gate(p, a, z);
    } else {
      const float s = sigmoid(a * z);
      dx = a * p.lower_bound * s * (1.0f - s) * dg;
      A_sum += dx * z;
    }
    bias_sum += dx;
    store(p.dx, dx, m, h, k);
  }
  float* sums = p.sums + (blockIdx.x * static_cast<int64_t>(p.HV) + h) * (1 + p.K);
  if (active) sums[1 + k] = bias_sum;
  A_sum = block_sum(A_sum);
  if (k == 0) sums[0] = A_sum;
}

// One block per head: adds the row blocks in order.
__global__ void sum_kernel(const __grid_constant__ Params p, int64_t row_blocks) {
  const int64_t h = blockIdx.x;
  for (int i = threadIdx.x; i < 1 + p.K; i += blockDim.x) {
    float sum = 0;
    for (int64_t b = 0; b < row_blocks; ++b) sum += p.sums[(b * p.HV + h) * (1 + p.K) + i];
    if (i == 0 && p.dA_log) p.dA_log[h * p.dA_stride] = sum;
    if (i > 0 && p.d_dt_bias) p.d_dt_bias[h * p.d_bias_stride + i - 1] = sum;
  }
}

Operand operand(const kda_tensor& t) { return {t.data, t.stride[0], t.stride[1], t.dtype}; }

template <class Args>
Params common_params(const Args& a) {
  Params p{};
  p.x = operand(a.x);
  p.A_log = static_cast<const float*>(a.A_log.data);
  p.A_stride = a.A_log.stride[0];
  p.dt_bias = static_cast<const float*>(a.dt_bias.data);
  p.bias_stride = a.dt_bias.stride[0];
  p.M = a.x.shape[0];
  p.HV = static_cast<int>(a.x.shape[1]);
  p.K = static_cast<int>(a.x.shape[2]);
  p.form = a.gate_form;
  p.lower_bound = a.lower_bound;
  p.rows = max(kMinRows, (p.M + kMaxRowBlocks - 1) / kMaxRowBlocks);
  return p;
}

dim3 grid_of(const Params& p) {
  return dim3(static_cast<unsigned>((p.M + p.rows - 1) / p.rows), static_cast<unsigned>(p.HV));
}
unsigned threads_of(const Params& p) { return static_cast<unsigned>((p.K + 31) / 32 * 32); }

template <class P>
const char* why_not(const P& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  return p.args.x.shape[1] <= 65535 ? nullptr : "takes at most 65535 heads";
}

}  // namespace

const char* gate_why_not(const GateProblem& p) { return why_not(p); }
const char* gate_why_not(const GateBackwardProblem& p) { return why_not(p); }

void gate(const GateProblem& problem) {
  const kda_gate_args& a = problem.args;
  Params p = common_params(a);
  p.g = operand(a.g);
  if (p.M == 0) return;
  const DeviceGuard device(a.exec.device_id);
  forward_kernel<<<grid_of(p), threads_of(p), 0, stream_of(a.exec)>>>(p);
  KDA_CUDA(cudaGetLastError());
}

uint64_t gate_backward_workspace(const GateBackwardProblem& problem) {
  const Params p = common_params(problem.args);
  return sizeof(float) * grid_of(p).x * static_cast<uint64_t>(p.HV) * (1 + p.K);
}

void gate_backward(const GateBackwardProblem& problem) {
  const kda_gate_backward_args& a = problem.args;
  const uint64_t needed = gate_backward_workspace(problem);
  if (a.exec.workspace_bytes < needed)
    invalid("exec.workspace_bytes: expected at least ", needed, ", got ", a.exec.workspace_bytes);
  Params p = common_params(a);
  p.g = operand(a.dg);
  p.dx = operand(a.dx);
  p.sums = static_cast<float*>(a.exec.workspace);
  p.dA_log = static_cast<float*>(a.dA_log.data);
  p.dA_stride = a.dA_log.stride[0];
  p.d_dt_bias = static_cast<float*>(a.d_dt_bias.data);
  p.d_bias_stride = a.d_dt_bias.stride[0];
  const DeviceGuard device(a.exec.device_id);
  if (p.M > 0) backward_kernel<<<grid_of(p), threads_of(p), 0, stream_of(a.exec)>>>(p);
  KDA_CUDA(cudaGetLastError());
  sum_kernel<<<p.HV, 256, 0, stream_of(a.exec)>>>(p, grid_of(p).x);
  KDA_CUDA(cudaGetLastError());
}

}  // namespace kda::cuda
