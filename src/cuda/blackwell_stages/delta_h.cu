// F4 on Blackwell (sm_100a), for K and V of 128 and 64 in bf16: v_new = u - w S, then S <- Diag(ell) S + kg^T v_new,
// chunk after chunk. It has been emulated, and has never run on a GPU. A block has 64 value columns of a value head,
// and all chunks of a sequence: scan.h.
#include "contract/stages.h"
#include "cuda/blackwell_stages/declarations.h"
#include "cuda/blackwell_stages/scan.h"
#include "cuda/stages/declarations.h"

namespace kda::cuda {

namespace {
using Problem = StageProblem<kda_stage_delta_h_args>;
}  // namespace

const char* blackwell_stages_delta_h_why_not(const Problem& p) {
  const kda_stage_delta_h_args& a = p.args;
  if (const char* reason = stage_why_not(p)) return reason;
  if (const char* reason = blackwell_why_not(a.exec.device_id)) return reason;
  if (!sm100::is_stage_size(p.K) || !sm100::is_stage_size(p.V)) return "takes K and V of 64 and 128";
  for (const kda_tensor* t : {&a.kg, &a.w, &a.u, &a.h, &a.v_new})
    if (present(*t) && t->dtype != KDA_BF16) return "takes kg, w, u, h and v_new in bf16";
  if (p.B * p.T * p.HV == 0) return nullptr;
  for (const kda_tensor* t : {&a.kg, &a.w, &a.u, &a.G, &a.h})
    if (present(*t) && !stages::takes_boxes(*t)) return "takes kg, w, u, G and h with rows at multiples of 16 bytes";
  return !present(a.v_new) || stages::rows_of(a.v_new).wide ? nullptr
                                                            : "takes v_new with rows at multiples of 16 bytes";
}

void blackwell_stages_delta_h(const Problem& p) {
  const kda_stage_delta_h_args& a = p.args;
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(a.exec.device_id);
  sm100::ScanCall c{.chunks = stages::Chunks(p, p.in.cu_seqlens), .G = stages::rows_of(a.G)};
  c.v_new = stages::rows_of(a.v_new), c.first = stages::lines_of_states(a.h0), c.last = stages::lines_of_states(a.hT);
  c.h_rows = present(a.h) ? a.h.shape[0] : 0, c.V = static_cast<unsigned>(p.V);
  sm100::ScanMaps maps;
  if (p.B * p.T > 0) {  // else nothing is copied
    maps.left = stages::boxes_of_tokens(a.w), maps.right = stages::boxes_of_tokens(a.kg),
    maps.u = stages::boxes_of_tokens(a.u);
    if (present(a.h)) maps.h = sm100::scan_states(p, a.h);
  }
  sm100::start_scan<false>(p, c, maps);
}

}  // namespace kda::cuda
