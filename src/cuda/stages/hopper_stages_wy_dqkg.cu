// Stage B3 of the backward (bwd_wy_dqkg, math.md 5.1) on Hopper, for K = V = 128 in bf16: its kernel and its launch.
// What a CTA does is in hopper_wy_chunk.h.
#include "contract/stages.h"
#include "cuda/stages/boxes.h"
#include "cuda/stages/declarations.h"
#include "cuda/stages/hopper_wy_chunk.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <bool kVFirst>
__global__ void __cluster_dims__(2) __launch_bounds__(kWyThreads, 2)
    wy_kernel(const __grid_constant__ WyCall call, const __grid_constant__ WyMaps maps) {
  wait_for_stream();
  ChunkAt at;
  const unsigned rank = ptx::rank();
  const unsigned block = blockIdx.x / 2, hv = block % call.HV;
  if (!call.chunks.find(block / call.HV, at)) return;
  if (!at.owned) {
    if (rank > 0) return;
    stages::zero_rows(call.dq, at, hv, kSize), stages::zero_rows(call.dk, at, hv, kSize);
    stages::zero_rows(call.dG, at, hv, kSize), stages::zero_rows(call.dv, at, hv, kSize);
    stages::zero_rows(call.dAkk, at, hv, kChunk), stages::zero_rows(call.dbeta, at, hv, 1);
    return;
  }
  const int64_t state = call.chunks.first_row(at.n) + at.index;
  if (state >= call.h_rows) return;  // cu_seqlens are not checked
  WyChunk<kVFirst> chunk(call, maps, at, hv, rank);
  if (threadIdx.x < 32) chunk.fetch(state);
  __syncthreads();  // the CTA's mbarriers are there
  ptx::arrive_at_cluster();
  ptx::wait_for_cluster();  // those of both CTAs are: tiles and sums may go from one to the other
  if (threadIdx.x < 32) chunk.fetch_shared();
  chunk.run();
}

using Problem = StageProblem<kda_stage_bwd_wy_dqkg_args>;

WyCall call_of(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  WyCall c{.chunks = Chunks(p, p.in.cu_seqlens)};
  const auto rows = [](const kda_tensor& t) { return stages::rows_of(t); };
  c.q = rows(a.q), c.k = rows(a.k), c.v = rows(a.v), c.G = rows(a.G), c.beta = rows(a.beta), c.J = rows(a.Akk_inv);
  c.dq = rows(a.dq), c.dk = rows(a.dk), c.dv = rows(a.dv), c.dG = rows(a.dG), c.dAkk = rows(a.dAkk);
  c.dbeta = rows(a.dbeta);
  c.h_rows = std::min(a.h.shape[0], a.dh.shape[0]);
  c.HV = static_cast<unsigned>(p.HV), c.group = static_cast<unsigned>(p.group());
  c.scale = p.in.scale, c.v_first = p.in.state_layout == KDA_STATE_V_FIRST;
  return c;
}

WyMaps maps_of(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  const cuuint32_t lines = p.in.state_layout == KDA_STATE_V_FIRST ? kSize : kWyChannels;
  return {stages::boxes_of_tokens(a.q),        stages::boxes_of_tokens(a.k),        stages::boxes_of_tokens(a.G),
          stages::boxes_of_tokens(a.d_o),      stages::boxes_of_tokens(a.v_new),    stages::boxes_of_tokens(a.dv_new),
          stages::boxes_of_states(a.h, lines), stages::boxes_of_states(a.dh, lines)};
}

}  // namespace

const char* hopper_stages_wy_dqkg_why_not(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  if (const char* reason = stage_why_not(p)) return reason;
  if (const char* reason = hopper_why_not(a.exec.device_id)) return reason;
  if (p.K != kSize || p.V != kSize) return "takes K = V = 128";
  for (const kda_tensor* t : {&a.q, &a.k, &a.v, &a.v_new, &a.d_o, &a.dv_new, &a.h, &a.dh})
    if (t->dtype != KDA_BF16) return "takes q, k, v, v_new, d_o, dv_new, h and dh in bf16";
  if (a.Akk_inv.dtype == KDA_F16 || a.dv.dtype == KDA_F16) return "takes Akk_inv and dv in f32 or bf16";
  if (p.B * p.T * p.HV == 0) return nullptr;
  for (const kda_tensor* t : {&a.q, &a.k, &a.G, &a.d_o, &a.v_new, &a.dv_new, &a.h, &a.dh})
    if (!stages::takes_boxes(*t)) return "takes inputs with rows at multiples of 16 bytes";
  for (const kda_tensor* t : {&a.v, &a.dq, &a.dk, &a.dv, &a.dG, &a.dAkk})
    if (!stages::rows_of(*t).wide) return "takes v and outputs with rows at multiples of 16 bytes";
  return 2 * Chunks(p, p.in.cu_seqlens).count * p.HV < int64_t{1} << 31 ? nullptr : "takes at most 2^31 blocks";
}

void hopper_stages_wy_dqkg(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  const WyCall call = call_of(p);
  if (p.B * p.T * p.HV == 0) return;
  const DeviceGuard device(a.exec.device_id);
  const dim3 grid(static_cast<unsigned>(2 * call.chunks.count * p.HV));
  if (call.v_first) launch<wy_kernel<true>>(a.exec, grid, kWyThreads, sizeof(WyShared), call, maps_of(p));
  else launch<wy_kernel<false>>(a.exec, grid, kWyThreads, sizeof(WyShared), call, maps_of(p));
}

}  // namespace kda::cuda
