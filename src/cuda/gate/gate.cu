// The gate activation alone (math.md 2.1), forward and backward, for sm_80 and newer. Formulas, and what keeps them
// exact, are in gate.h.
//
// Bytes: forward reads x and writes g, backward reads x, dg and writes dx; everything else is small. Both are bound by
// memory, forward by about as much arithmetic (two MUFU and 25 FMA an element), hence the fast exp and division.
//
// A thread owns W neighbouring channels of a head (4 where K, strides and addresses allow, else 1) and every kLanes-th
// row of its block, of which it has kUnroll in flight: one load at a time would leave most of the bandwidth unused.
// Grid: (block of rows, head). Block: (K / W rounded up to whole warps, kLanes).
//
// Backward sums in two levels without atomics: each block adds up its lanes in order and writes its sums of dA_log and
// d_dt_bias to the workspace, then one block per head adds the blocks in order. The number of rows of a block is a
// function of M alone, so the bits are too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "contract/dtype.h"
#include "cuda/call/launch_kernel.h"
#include "cuda/gate/declarations.h"
#include "cuda/gate/gate.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int64_t kMinRows = 64;         // rows of a block: enough to pay for its share of the sums
constexpr int64_t kMaxRowBlocks = 1024;  // what the second level adds one after the other
template <int W>
constexpr int kLanes = W;  // rows a block works on at once: at most 256 threads in all
constexpr int kUnroll = 4;

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
  GateForm form;
  float lower_bound;
};

template <int W>
struct Vector {
  float v[W];
};

template <int W>
__device__ Vector<W> load(const Operand& t, int64_t m, int64_t h, int k) {
  const int64_t at = m * t.stride_m + h * t.stride_h + k;
  Vector<W> x;
  if constexpr (W == 4) {
    if (t.dtype == KDA_F32) {
      const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(t.data) + at);
      const float4 four = *from;
      x.v[0] = four.x, x.v[1] = four.y, x.v[2] = four.z, x.v[3] = four.w;
    } else {
      const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(t.data) + at);
      const bool bf16 = t.dtype == KDA_BF16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned half = i ? raw.y : raw.x;
        const float2 pair = bf16 ? __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(half))
                                 : __half22float2(reinterpret_cast<const __half2&>(half));
        x.v[2 * i] = pair.x, x.v[2 * i + 1] = pair.y;
      }
    }
  } else {
    switch (t.dtype) {
      case KDA_F32: x.v[0] = static_cast<const float*>(t.data)[at]; break;
      case KDA_BF16: x.v[0] = __bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[at]); break;
      default: x.v[0] = __half2float(static_cast<const __half*>(t.data)[at]); break;
    }
  }
  return x;
}

template <int W>
__device__ void store(const Operand& t, const Vector<W>& x, int64_t m, int64_t h, int k) {
  const int64_t at = m * t.stride_m + h * t.stride_h + k;
  if constexpr (W == 4) {
    if (t.dtype == KDA_F32) {
      *reinterpret_cast<float4*>(static_cast<float*>(t.data) + at) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    } else {
      uint2 raw;
      if (t.dtype == KDA_BF16) {
        const __nv_bfloat162 lo = __floats2bfloat162_rn(x.v[0], x.v[1]), hi = __floats2bfloat162_rn(x.v[2], x.v[3]);
        raw = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
      } else {
        const __half2 lo = __floats2half2_rn(x.v[0], x.v[1]), hi = __floats2half2_rn(x.v[2], x.v[3]);
        raw = {reinterpret_cast<const unsigned&>(lo), reinterpret_cast<const unsigned&>(hi)};
      }
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(t.data) + at) = raw;
    }
  } else {
    switch (t.dtype) {
      case KDA_F32: static_cast<float*>(t.data)[at] = x.v[0]; break;
      case KDA_BF16: static_cast<__nv_bfloat16*>(t.data)[at] = __float2bfloat16_rn(x.v[0]); break;
      default: static_cast<__half*>(t.data)[at] = __float2half_rn(x.v[0]); break;
    }
  }
}

// What a thread works on.
struct Place {
  int k;  // first channel
  int64_t h, first, last;
  float A_log;
  bool active;
};
// Calls work(gate) with the gate that suits the head.
template <class Work>
__device__ void with_gate(const Params& p, const Place& at, const Work& work) {
  if (Gate::does_for(at.A_log)) work(Gate{p.form, p.lower_bound, p.A_log ? expf(at.A_log) : 1.0f});
  else work(WideGate{p.form, p.lower_bound, at.A_log});
}
template <int W>
__device__ Place place(const Params& p) {
  const int64_t h = blockIdx.y, begin = blockIdx.x * p.rows, k = threadIdx.x * W;
  const float A_log = p.A_log ? p.A_log[h * p.A_stride] : 0.0f;
  return {static_cast<int>(k), h, begin + threadIdx.y, min(begin + p.rows, p.M), A_log, k < p.K};
}
template <int W>
__device__ Vector<W> bias_of(const Params& p, const Place& at) {
  Vector<W> bias;
#pragma unroll
  for (int i = 0; i < W; ++i) bias.v[i] = p.dt_bias && at.active ? p.dt_bias[at.h * p.bias_stride + at.k + i] : 0.0f;
  return bias;
}

template <int W, class AnyGate>
__device__ void forward_rows(const Params& p, const Place& at, const AnyGate& gate) {
  const Vector<W> bias = bias_of<W>(p, at);
  for (int64_t m = at.first; m < at.last; m += kLanes<W> * kUnroll) {
    Vector<W> x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j)
      if (m + j * kLanes<W> < at.last) x[j] = load<W>(p.x, m + j * kLanes<W>, at.h, at.k);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (m + j * kLanes<W> >= at.last) break;
#pragma unroll
      for (int i = 0; i < W; ++i) x[j].v[i] = gate(x[j].v[i] + bias.v[i]);
      store<W>(p.g, x[j], m + j * kLanes<W>, at.h, at.k);
    }
  }
}

template <int W>
__global__ void __launch_bounds__(256) forward_kernel(const __grid_constant__ Params p) {
  const Place at = place<W>(p);
  if (at.active) with_gate(p, at, [&](const auto& gate) { forward_rows<W>(p, at, gate); });
}

template <int W>
struct Sums {
  float A_log = 0;
  Vector<W> bias{};
};
template <int W, class AnyGate>
__device__ void backward_rows(const Params& p, const Place& at, const AnyGate& gate, Sums<W>& sums) {
  const Vector<W> bias = bias_of<W>(p, at);
  for (int64_t m = at.first; m < at.last; m += kLanes<W> * kUnroll) {
    Vector<W> x[kUnroll], dg[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j)
      if (m + j * kLanes<W> < at.last) {
        x[j] = load<W>(p.x, m + j * kLanes<W>, at.h, at.k);
        dg[j] = load<W>(p.g, m + j * kLanes<W>, at.h, at.k);
      }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (m + j * kLanes<W> >= at.last) break;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const Gradients d = gate.backward(x[j].v[i] + bias.v[i], dg[j].v[i]);
        sums.A_log += d.dA_log, sums.bias.v[i] += d.dx;
        x[j].v[i] = d.dx;
      }
      store<W>(p.dx, x[j], m + j * kLanes<W>, at.h, at.k);
    }
  }
}

template <int W>
__global__ void __launch_bounds__(256) backward_kernel(const __grid_constant__ Params p) {
  __shared__ float lane_sums[kLanes<W>][1 + 256];  // dA_log of a thread column's first channel; d_dt_bias
  __shared__ float A_sums[256];
  const Place at = place<W>(p);
  Sums<W> own;
  if (at.active) with_gate(p, at, [&](const auto& gate) { backward_rows<W>(p, at, gate, own); });

  A_sums[threadIdx.y * blockDim.x + threadIdx.x] = own.A_log;
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (at.active) lane_sums[threadIdx.y][1 + at.k + i] = own.bias.v[i];
  __syncthreads();  // every thread's sums are in shared memory
  float* sums = p.sums + (blockIdx.x * static_cast<int64_t>(p.HV) + at.h) * (1 + p.K);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * kLanes<W>;
  for (int k = thread; k < p.K; k += threads) {
    float sum = 0;
    for (int lane = 0; lane < kLanes<W>; ++lane) sum += lane_sums[lane][1 + k];
    sums[1 + k] = sum;
  }
  for (int half = 128; half > 0; half /= 2) {  // a fixed tree
    if (thread < half && thread + half < threads) A_sums[thread] += A_sums[thread + half];
    __syncthreads();  // this level is added before the next reads it
  }
  if (thread == 0) sums[0] = A_sums[0];
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
  p.form = form_of(a);
  p.lower_bound = a.lower_bound;
  p.rows = max(kMinRows, (p.M + kMaxRowBlocks - 1) / kMaxRowBlocks);
  return p;
}

dim3 grid_of(const Params& p) {
  return dim3(static_cast<unsigned>((p.M + p.rows - 1) / p.rows), static_cast<unsigned>(p.HV));
}
template <int W>
dim3 block_of(const Params& p) {
  return dim3(static_cast<unsigned>((p.K / W + 31) / 32 * 32), kLanes<W>);
}

// Rows that four-wide accesses may touch: whole groups of channels, at addresses that are multiples of four elements.
bool four_wide(const Operand& t, int64_t K) {
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  return K % 4 == 0 && t.stride_m % 4 == 0 && t.stride_h % 4 == 0 && address % (4 * dtype_size(t.dtype)) == 0;
}

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
  if (four_wide(p.x, p.K) && four_wide(p.g, p.K)) start<forward_kernel<4>>(a.exec, grid_of(p), block_of<4>(p), p);
  else start<forward_kernel<1>>(a.exec, grid_of(p), block_of<1>(p), p);
}

uint64_t gate_backward_workspace(const GateBackwardProblem& problem) {
  const Params p = common_params(problem.args);
  return sizeof(float) * grid_of(p).x * static_cast<uint64_t>(p.HV) * (1 + p.K);
}

void gate_backward(const GateBackwardProblem& problem) {
  const kda_gate_backward_args& a = problem.args;
  Params p = common_params(a);
  p.g = operand(a.dg);
  p.dx = operand(a.dx);
  p.sums = static_cast<float*>(a.exec.workspace);
  p.dA_log = static_cast<float*>(a.dA_log.data);
  p.dA_stride = a.dA_log.stride[0];
  p.d_dt_bias = static_cast<float*>(a.d_dt_bias.data);
  p.d_bias_stride = a.d_dt_bias.stride[0];
  const DeviceGuard device(a.exec.device_id);
  if (p.M > 0) {
    if (four_wide(p.x, p.K) && four_wide(p.g, p.K) && four_wide(p.dx, p.K))
      start<backward_kernel<4>>(a.exec, grid_of(p), block_of<4>(p), p);
    else start<backward_kernel<1>>(a.exec, grid_of(p), block_of<1>(p), p);
  }
  start<sum_kernel>(a.exec, dim3(static_cast<unsigned>(p.HV)), 256, p, static_cast<int64_t>(grid_of(p).x));
}

}  // namespace kda::cuda
