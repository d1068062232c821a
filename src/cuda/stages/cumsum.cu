// F1: G_i = sum_(j<=i) max(g_j log2(e), -160), from each chunk's start. A block has a chunk of a value head, a thread
// a channel; 16 tokens are loaded at a time. Only bytes count here.
#include "contract/stages.h"
#include "cuda/gate/activations.h"
#include "cuda/stages/declarations.h"
#include "cuda/stages/stages.h"
#include "cuda/stages/tiles.h"

namespace kda::cuda {
namespace stages {
namespace {

constexpr int kAtOnce = 16;  // tokens

__global__ void __launch_bounds__(kThreads) cumsum_kernel(const __grid_constant__ CumsumCall p) {
  wait_for_stream();
  const unsigned hv = blockIdx.x % static_cast<unsigned>(p.HV);
  ChunkAt at;
  if (!p.chunks.find(blockIdx.x / static_cast<unsigned>(p.HV), at)) return;
  if (!at.owned) return zero_rows(p.G, at, hv, p.K);
  const int c = static_cast<int>(threadIdx.x);
  if (c >= p.K) return;
  const char* from = p.g.at(at.b, at.t0, hv) + c * p.g.size();
  char* to = p.G.at(at.b, at.t0, hv) + c * 4;
  float sum = 0;
#pragma unroll 1
  for (int first = 0; first < at.rows; first += kAtOnce) {
    unsigned raw[kAtOnce];
    const auto load = [&]<bool kNarrow>() {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        raw[i] = first + i < at.rows ? load_raw<kNarrow>(from, p.g.dtype) : 0;
        from += p.g.token;
      }
    };
    if (p.g.dtype == KDA_F32) load.template operator()<false>();
    else load.template operator()<true>();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float step = value_of(p.g.dtype, raw[i]) * kLog2e;
      sum += step < -160 ? -160 : step;  // keeps NaN
      if (first + i < at.rows) *reinterpret_cast<float*>(to) = sum;
      to += p.G.token;
    }
  }
}

}  // namespace

void run(const kda_exec& exec, const CumsumCall& c) {
  const dim3 grid(static_cast<unsigned>(c.chunks.count * c.HV));
  const int threads = (c.K + 31) / 32 * 32;
  if (grid.x == 0) return;
  launch<cumsum_kernel>(exec, grid, threads, 0, c);
}

}  // namespace stages

const char* stage_why_not(const StageProblem<kda_stage_cumsum_args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::Chunks(p, p.in.cu_seqlens).count * p.HV);
}

void stage(const StageProblem<kda_stage_cumsum_args>& p) {
  const kda_stage_cumsum_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  run(a.exec, stages::CumsumCall{.chunks = stages::Chunks(p, p.in.cu_seqlens),
                                 .g = stages::rows_of(a.g),
                                 .G = stages::rows_of(a.G),
                                 .HV = static_cast<int32_t>(p.HV),
                                 .K = static_cast<int32_t>(p.K)});
}

}  // namespace kda::cuda
