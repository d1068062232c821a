#include "cuda/sm80/backward_sums.h"

#include "cuda/launch.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 288;  // channels and parts: at most 256 + 8, or 128 + 8

// A block has a head, a thread a channel or a part of dA_log.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const float* sums, int64_t rows, unsigned HV, unsigned K, unsigned parts,
               const __grid_constant__ TypedView dA_log, const __grid_constant__ TypedView d_dt_bias) {
  __shared__ float of_parts[32];
  wait_for_stream();
  const unsigned hv = blockIdx.x, columns = K + parts, i = threadIdx.x;
  float sum = 0;
  if (i < columns)
    for (int64_t row = 0; row < rows; ++row) sum += sums[(row * HV + hv) * columns + i];
  if (i < K && d_dt_bias.data) *reinterpret_cast<float*>(d_dt_bias.at(hv, i, 0)) = sum;
  if (i >= K && i < columns) of_parts[i - K] = sum;
  __syncthreads();  // all parts are there
  if (i || !dA_log.data) return;
  sum = 0;
  for (unsigned part = 0; part < parts; ++part) sum += of_parts[part];
  *reinterpret_cast<float*>(dA_log.at(hv, 0, 0)) = sum;
}

}  // namespace

void launch_gate_sums(const BackwardProblem& p, const float* sums, int64_t rows, int parts) {
  if (!present(p.args.dA_log) && !present(p.args.d_dt_bias)) return;
  launch<sum_kernel>(p.args.exec, dim3(static_cast<unsigned>(p.HV)), kThreads, 0, sums, rows,
                     static_cast<unsigned>(p.HV), static_cast<unsigned>(p.K), static_cast<unsigned>(parts),
                     view_of(p.args.dA_log), view_of(p.args.d_dt_bias));
}

}  // namespace kda::cuda
