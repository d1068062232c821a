#include "cuda/backward/sums.h"

#include "cuda/call/launch.h"

namespace kda::cuda {
namespace {

constexpr unsigned kColumns = 288;  // channels and parts: at most 256 + 8, or 128 + 8
constexpr unsigned kShares = 3;     // of the rows, which are added up at the same time
constexpr unsigned kAhead = 16;     // rows that are loaded at once: one at a time took 16 us for 128 rows

// Adds up rows first .. end - 1 of a column, in their order.
__device__ float sum_of(const float* column, unsigned stride, int64_t first, int64_t end) {
  float sum = 0;
  for (int64_t row = first; row < end; row += kAhead) {
    float x[kAhead];  // all loads come first, so none of them is in a branch
#pragma unroll
    for (unsigned i = 0; i < kAhead; ++i) x[i] = column[min(row + i, end - 1) * stride];
#pragma unroll
    for (unsigned i = 0; i < kAhead; ++i) sum += row + i < end ? x[i] : 0;
  }
  return sum;
}

// A block has a head, a thread a share of the rows of a channel or of a part of dA_log.
__global__ void __launch_bounds__(kShares* kColumns)
    sum_kernel(const float* sums, int64_t rows, unsigned HV, unsigned K, unsigned parts,
               const __grid_constant__ TypedView dA_log, const __grid_constant__ TypedView d_dt_bias) {
  __shared__ float of_shares[kShares][kColumns];
  wait_for_stream();
  const unsigned hv = blockIdx.x, columns = K + parts, i = threadIdx.x % kColumns, share = threadIdx.x / kColumns;
  if (i < columns)
    of_shares[share][i] =
        sum_of(sums + hv * columns + i, HV * columns, share * rows / kShares, (share + 1) * rows / kShares);
  __syncthreads();  // all shares are there
  if (share > 0) return;
  const auto whole = [&](unsigned column) {
    float sum = 0;
    for (unsigned j = 0; j < kShares; ++j) sum += of_shares[j][column];
    return sum;
  };
  if (i < K && d_dt_bias.data) *reinterpret_cast<float*>(d_dt_bias.at(hv, i, 0)) = whole(i);
  if (i || !dA_log.data) return;
  float sum = 0;
  for (unsigned part = 0; part < parts; ++part) sum += whole(K + part);
  *reinterpret_cast<float*>(dA_log.at(hv, 0, 0)) = sum;
}

// Blocks and threads share the work.
__device__ void zero_tail(const TypedView& t, const ForwardProblem& p, unsigned heads, unsigned width) {
  if (!t.data) return;
  for (int64_t token = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T) + blockIdx.x; token < p.T; token += gridDim.x)
    for (unsigned i = threadIdx.x; i < heads * width; i += blockDim.x)
      store_element(t.at(0, static_cast<unsigned>(token), i / width) + i % width * size_of(t.dtype), t.dtype, 0);
}
__global__ void __launch_bounds__(128)
    zero_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ TokenGradients of) {
  wait_for_stream();
  const auto H = static_cast<unsigned>(p.H), HV = static_cast<unsigned>(p.HV);
  const auto K = static_cast<unsigned>(p.K), V = static_cast<unsigned>(p.V);
  zero_tail(of.dq, p, H, K), zero_tail(of.dk, p, H, K), zero_tail(of.dv, p, HV, V);
  zero_tail(of.dg, p, HV, K), zero_tail(of.dbeta, p, HV, 1);
}

}  // namespace

void launch_zero_tails(const ForwardProblem& p, const TokenGradients& gradients) {
  launch<zero_kernel>(p.args.exec, dim3(256), 128, 0, p, gradients);
}

void launch_gate_sums(const BackwardProblem& p, const float* sums, int64_t rows, int parts) {
  if (!present(p.args.dA_log) && !present(p.args.d_dt_bias)) return;
  launch<sum_kernel>(p.args.exec, dim3(static_cast<unsigned>(p.HV)), static_cast<int>(kShares * kColumns), 0, sums,
                     rows, static_cast<unsigned>(p.HV), static_cast<unsigned>(p.K), static_cast<unsigned>(parts),
                     view_of(p.args.dA_log), view_of(p.args.d_dt_bias));
}

}  // namespace kda::cuda
