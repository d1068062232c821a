// The gate activation alone, forward and backward (math.md 2.1).
// Backward sums in two levels: each task owns a block of kBlockRows rows and writes its sums of dA_log and d_dt_bias to
// the workspace; then the blocks are added in order. So the bits do not depend on the number of threads.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gate.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/simd-inl.h"
// clang-format on

#ifndef KDA_CPU_GATE_BLOCK
#define KDA_CPU_GATE_BLOCK
namespace kda::cpu {
constexpr int64_t kBlockRows = 64;
}
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

void gate_rows(const GateProblem& p, int64_t block) {
  const kda_gate_args& a = p.args;
  const int64_t HV = a.x.shape[1], K = a.x.shape[2], end = std::min(a.x.shape[0], (block + 1) * kBlockRows);
  alignas(64) float bias[kMaxSize], row[kMaxSize];
  for (int64_t hv = 0; hv < HV; ++hv) {
    const Gate gate = head_gate(form_of(a), a.lower_bound, a.A_log, a.dt_bias, hv, K, bias);
    const KeepSubnormals keep(gate.is_wide());
    for (int64_t m = block * kBlockRows; m < end; ++m) {
      load_row(a.x.dtype, at(a.x, m, hv), K, row);
      for (int64_t i = 0; i < padded(K); i += lanes()) store(gate(gate.z(row, i)), row + i);
      store_row(a.g.dtype, row, K, at(a.g, m, hv));
    }
  }
}

// sums: [HV][1 + K], dA_log then d_dt_bias.
void gate_backward_rows(const GateBackwardProblem& p, int64_t block, float* sums) {
  const kda_gate_backward_args& a = p.args;
  const int64_t HV = a.x.shape[1], K = a.x.shape[2], end = std::min(a.x.shape[0], (block + 1) * kBlockRows);
  alignas(64) float bias[kMaxSize], x[kMaxSize], dg[kMaxSize], bias_sum[kMaxSize];
  for (int64_t hv = 0; hv < HV; ++hv) {
    const Gate gate = head_gate(form_of(a), a.lower_bound, a.A_log, a.dt_bias, hv, K, bias);
    const KeepSubnormals keep(gate.is_wide());
    Vec A_sum = hn::Zero(kF32);
    zero(bias_sum, padded(K));
    for (int64_t m = block * kBlockRows; m < end; ++m) {
      load_row(a.x.dtype, at(a.x, m, hv), K, x);
      load_row(a.dg.dtype, at(a.dg, m, hv), K, dg);
      for (int64_t i = 0; i < padded(K); i += lanes()) {
        Vec dx, dA;
        gate.backward(gate.z(x, i), load(dg + i), dx, dA);
        A_sum = hn::Add(A_sum, dA);
        store(hn::Add(load(bias_sum + i), dx), bias_sum + i);
        store(dx, x + i);
      }
      store_row(a.dx.dtype, x, K, at(a.dx, m, hv));
    }
    sums[hv * (1 + K)] = sum_lanes(A_sum);
    std::memcpy(sums + hv * (1 + K) + 1, bias_sum, K * sizeof(float));
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

int64_t blocks_of(const kda_tensor& x) { return (x.shape[0] + kBlockRows - 1) / kBlockRows; }
int64_t sums_of(const kda_tensor& x) { return x.shape[1] * (1 + x.shape[2]); }

Workspace plan(const GateBackwardProblem& p) { return {blocks_of(p.args.x) * sums_of(p.args.x) * sizeof(float), 0}; }

// Small inputs stay on one thread: starting a team costs more than the work on 4096 elements.
int64_t worthwhile(const kda_tensor& x) { return x.shape[0] * x.shape[1] * x.shape[2] / 4096 + 1; }

}  // namespace

void gate(const GateProblem& p) {
  const auto rows = KDA_ISA_CALL(gate_rows);
  parallel_for(blocks_of(p.args.x), wanted_threads(p.args.exec, std::min(blocks_of(p.args.x), worthwhile(p.args.x))),
               [&](int64_t block, int) { rows(p, block); });
}

uint64_t gate_backward_workspace(const GateBackwardProblem& p) { return plan(p).bytes(1); }

void gate_backward(const GateBackwardProblem& p) {
  const kda_gate_backward_args& a = p.args;
  const int64_t blocks = blocks_of(a.x), count = sums_of(a.x), K = a.x.shape[2];
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(a.exec, std::min(blocks, worthwhile(a.x)));
  auto* sums = static_cast<float*>(a.exec.workspace);
  const auto rows = KDA_ISA_CALL(gate_backward_rows);
  parallel_for(blocks, threads, [&](int64_t block, int) { rows(p, block, sums + block * count); });
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += sums[block * count + i];
    const int64_t hv = i / (1 + K), k = i % (1 + K) - 1;
    if (k < 0 && present(a.dA_log)) static_cast<float*>(a.dA_log.data)[hv * a.dA_log.stride[0]] = sum;
    if (k >= 0 && present(a.d_dt_bias)) static_cast<float*>(a.d_dt_bias.data)[hv * a.d_dt_bias.stride[0] + k] = sum;
  }
}

}  // namespace kda::cpu
#endif
