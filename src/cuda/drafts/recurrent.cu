// Few drafts from a state in registers: which calls they take, and how they are launched.
#include "cuda/drafts/recurrent_kernel.h"

namespace kda::cuda {
namespace {

using recurrent::Memory;

template <class P>
DraftPlan plan_of(const P& p, const Parts<P>& x) {
  DraftCall call{p.N * p.HV * p.V, p.V, p.T, kFlushes<P>, fast_path_of(x)};
  if (call.T > 4 && x.state_dtype == KDA_BF16) call.fast = FastPath::kNone;
  return draft_plan(call, multiprocessors(p.args.exec.device_id));
}

template <class P>
const char* why_not(const P& p) {
  if (const char* reason = wide_why_not(p)) return reason;
  if (p.varlen || present(p.args.parents)) return "takes chains of the same number of drafts";
  // With more drafts tensor cores are faster, except for entries that a ring holds committed.
  const bool ring = kFlushes<P> && present(p.args.records.ring_count);
  if (p.T > (ring ? 8 : 4)) return ring ? "takes at most 8 drafts" : "takes at most 4 drafts";
  if (present(p.args.records.u) && p.args.records.u.shape[1] < p.T) return "needs records for all drafts";
  const Memory most(p.V % 128 ? 64 : 128, p.T > 4 ? 8 : 4, Sizes(p), present(p.args.records.ring_count));
  if (most.end * static_cast<int>(sizeof(float)) > shared_memory_of_block(p.args.exec.device_id))
    return "needs more shared memory than a block of this GPU may have";
  return nullptr;
}

template <class P>
void launch_recurrent(const P& p) {
  if (p.N * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts<P> x(p);
  recurrent::launch(p, x, plan_of(p, x));
}

}  // namespace

const char* drafts_recurrent_why_not(const VerifyProblem& p) { return why_not(p); }
const char* drafts_recurrent_why_not(const FlushVerifyProblem& p) { return why_not(p); }

std::string drafts_recurrent_form(const VerifyProblem& p) { return text(plan_of(p, Parts<VerifyProblem>(p))); }
std::string drafts_recurrent_form(const FlushVerifyProblem& p) {
  return text(plan_of(p, Parts<FlushVerifyProblem>(p)));
}

void drafts_recurrent(const VerifyProblem& p) { launch_recurrent(p); }
void drafts_recurrent(const FlushVerifyProblem& p) {
  roll_convolution(p);
  launch_recurrent(p);
  store_cursors(p);
}

}  // namespace kda::cuda
