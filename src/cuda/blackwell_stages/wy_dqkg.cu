// Stage B3 of the backward (bwd_wy_dqkg, math.md 5.1) on Blackwell (sm_100a), in bf16: its kernel and its launch. It
// has been emulated, and has never run on a GPU. What is where is in wy_memory.h.
#include "contract/stages.h"
#include "cuda/blackwell_stages/declarations.h"
#include "cuda/blackwell_stages/wy_products.h"
#include "cuda/blackwell_stages/wy_worker.h"
#include "cuda/stages/boxes.h"
#include "cuda/stages/declarations.h"

namespace kda::cuda {
namespace {

using namespace sm100;

// Makes the CTA's mbarriers, by one thread.
__device__ void start_barriers(unsigned base) {
  for (const unsigned of_one :
       {WyAt::right_side_full, WyAt::states_full, WyAt::rows_full, WyAt::x_made, WyAt::all_made})
    ptx::init_barrier(base + of_one, 1);
  for (const unsigned of_warps : {WyAt::inverse_there, WyAt::x_there, WyAt::rows_read})
    ptx::init_barrier(base + of_warps, kWyWorkers / 32);
  ptx::fence_barriers();
}

template <bool kVFirst>
__global__ void __launch_bounds__(kWyThreads, 1)
    wy_kernel(const __grid_constant__ WyCall call, const __grid_constant__ WyMaps maps) {
  const unsigned base = ptx::shared_address(shared_memory()), warp = __shfl_sync(kAll, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) start_barriers(base);
  wait_for_stream();  // without tensor memory, which the kernel in front may still ask for
  if (warp == kWyIssuer) ptx::tmem_alloc(base + WyAt::tensors, WyTensors::columns), ptx::tmem_relinquish();
  __syncthreads();  // mbarriers and tensor memory are there
  const unsigned tensors = ptx::load_shared(base + WyAt::tensors);
  const auto nothing = [](const WyItem&) {};
  if (warp == kWyCopier) {
    const WyCopier<kVFirst> copier(call, maps, base);
    for_each_item(
        call, [&](const WyItem& item) { copier.fill(item); }, nothing);
  } else if (warp == kWyIssuer) {
    const WyIssuer<kVFirst> issuer(base, tensors);
    for_each_item(
        call, [&](const WyItem& item) { issuer.multiply(item); }, nothing);
  } else {
    WyWorker worker(call, base, tensors);
    for_each_item(
        call, [&](const WyItem& item) { worker.work(item); }, [&](const WyItem& item) { worker.zero(item); });
  }
  ptx::fence_tmem_before_sync();
  __syncthreads();  // all have read what they need
  ptx::fence_tmem_after_sync();
  if (warp == kWyIssuer) ptx::tmem_dealloc(tensors, WyTensors::columns);
}

using Problem = StageProblem<kda_stage_bwd_wy_dqkg_args>;

WyCall call_of(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  WyCall c{.chunks = Chunks(p, p.in.cu_seqlens)};
  const auto rows = [](const kda_tensor& t) { return stages::rows_of(t); };
  c.beta = rows(a.beta), c.J = rows(a.Akk_inv);
  c.dq = rows(a.dq), c.dk = rows(a.dk), c.dv = rows(a.dv), c.dG = rows(a.dG), c.dAkk = rows(a.dAkk);
  c.dbeta = rows(a.dbeta);
  c.h_rows = std::min(a.h.shape[0], a.dh.shape[0]);
  c.items = static_cast<unsigned>(c.chunks.count * p.HV);
  c.HV = static_cast<unsigned>(p.HV), c.group = static_cast<unsigned>(p.group());
  c.K = static_cast<unsigned>(p.K), c.V = static_cast<unsigned>(p.V);
  c.scale = p.in.scale;
  return c;
}
// Where K or V is 64, what lies outside of tensors becomes zeros.
WyMaps maps_of(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  return {.q = stages::boxes_of_tokens(a.q),
          .k = stages::boxes_of_tokens(a.k),
          .G = stages::boxes_of_tokens(a.G),
          .d_o = stages::boxes_of_tokens(a.d_o),
          .v_new = stages::boxes_of_tokens(a.v_new),
          .v = stages::boxes_of_tokens(a.v),
          .dv_new = stages::boxes_of_tokens(a.dv_new),
          .h = stages::boxes_of_states(a.h, engine::kSize),
          .dh = stages::boxes_of_states(a.dh, engine::kSize)};
}

}  // namespace

const char* blackwell_stages_wy_dqkg_why_not(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  if (const char* reason = stage_why_not(p)) return reason;
  if (const char* reason = blackwell_why_not(a.exec.device_id)) return reason;
  if (!is_stage_size(p.K) || !is_stage_size(p.V)) return "takes K and V of 64 or 128";
  const auto inputs = {&a.q, &a.k, &a.v, &a.v_new, &a.d_o, &a.dv_new, &a.h, &a.dh};
  for (const kda_tensor* t : inputs)
    if (t->dtype != KDA_BF16) return "takes q, k, v, v_new, d_o, dv_new, h and dh in bf16";
  if (a.Akk_inv.dtype == KDA_F16 || a.dv.dtype == KDA_F16) return "takes Akk_inv and dv in f32 or bf16";
  if (p.B * p.T * p.HV == 0) return nullptr;
  for (const kda_tensor* t : inputs)
    if (!stages::takes_boxes(*t)) return "takes inputs with rows at multiples of 16 bytes";
  if (!stages::takes_boxes(a.G)) return "takes inputs with rows at multiples of 16 bytes";
  if (!stages::rows_of(a.dAkk).wide) return "takes dAkk with rows at multiples of 16 bytes";
  return Chunks(p, p.in.cu_seqlens).count * p.HV < int64_t{1} << 31 ? nullptr : "takes at most 2^31 chunks of heads";
}

void blackwell_stages_wy_dqkg(const Problem& p) {
  const kda_stage_bwd_wy_dqkg_args& a = p.args;
  const WyCall call = call_of(p);
  if (p.B * p.T * p.HV == 0) return;
  const DeviceGuard device(a.exec.device_id);
  const dim3 grid(std::min(call.items, static_cast<unsigned>(multiprocessors(a.exec.device_id))));
  const auto run = [&]<bool kVFirst>() {
    launch<wy_kernel<kVFirst>>(a.exec, grid, kWyThreads, sizeof(WyShared), call, maps_of(p));
  };
  if (p.in.state_layout == KDA_STATE_V_FIRST) run.template operator()<true>();
  else run.template operator()<false>();
}

}  // namespace kda::cuda
