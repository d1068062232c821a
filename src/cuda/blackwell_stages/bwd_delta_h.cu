// B2 on Blackwell (sm_100a), for K and V of 128 and 64 in bf16: dv_new = dv_local + kg dS, then dS <- Diag(ell) dS +
// scale qG^T d_o - w^T dv_new, last chunk first. It has been emulated, and has never run on a GPU. A block has 64 value
// columns of a value head, and all chunks of a sequence: scan.h.
#include "contract/stages.h"
#include "cuda/blackwell_stages/declarations.h"
#include "cuda/blackwell_stages/scan.h"
#include "cuda/stages/declarations.h"

namespace kda::cuda {

namespace {
using Problem = StageProblem<kda_stage_bwd_delta_h_args>;
}  // namespace

const char* blackwell_stages_bwd_delta_h_why_not(const Problem& p) {
  const kda_stage_bwd_delta_h_args& a = p.args;
  if (const char* reason = stage_why_not(p)) return reason;
  if (const char* reason = blackwell_why_not(a.exec.device_id)) return reason;
  if (!sm100::is_stage_size(p.K) || !sm100::is_stage_size(p.V)) return "takes K and V of 64 and 128";
  for (const kda_tensor* t : {&a.qG, &a.kg, &a.w, &a.d_o, &a.dv_local, &a.dh, &a.dv_new})
    if (t->dtype != KDA_BF16) return "takes qG, kg, w, d_o, dv_local, dh and dv_new in bf16";
  if (p.B * p.T * p.HV == 0) return nullptr;
  for (const kda_tensor* t : {&a.qG, &a.kg, &a.w, &a.G, &a.d_o, &a.dv_local, &a.dh})
    if (!stages::takes_boxes(*t)) return "takes inputs and dh with rows at multiples of 16 bytes";
  return stages::rows_of(a.dv_new).wide ? nullptr : "takes dv_new with rows at multiples of 16 bytes";
}

void blackwell_stages_bwd_delta_h(const Problem& p) {
  const kda_stage_bwd_delta_h_args& a = p.args;
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(a.exec.device_id);
  sm100::ScanCall c{.chunks = stages::Chunks(p, p.in.cu_seqlens), .G = stages::rows_of(a.G)};
  c.v_new = stages::rows_of(a.dv_new), c.first = stages::lines_of_states(a.dhT);
  c.last = stages::lines_of_states(a.dh0), c.h_rows = a.dh.shape[0];
  c.V = static_cast<unsigned>(p.V), c.scale = p.in.scale;
  sm100::ScanMaps maps;
  if (p.B * p.T > 0) {  // else nothing is copied
    maps.left = stages::boxes_of_tokens(a.kg), maps.right = stages::boxes_of_tokens(a.w),
    maps.u = stages::boxes_of_tokens(a.dv_local);
    maps.qG = stages::boxes_of_tokens(a.qG), maps.d_o = stages::boxes_of_tokens(a.d_o),
    maps.h = sm100::scan_states(p, a.dh);
  }
  sm100::start_scan<true>(p, c, maps);
}

}  // namespace kda::cuda
