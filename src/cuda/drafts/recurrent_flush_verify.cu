// A flush, then up to four drafts: the fast path without a ring, and the general kernel, which has rings, too, and up
// to eight drafts.
#include "cuda/drafts/recurrent_kernel.h"

namespace kda::cuda::recurrent {
namespace {

template <Traits kCall>
void launch_fast(const FlushVerifyProblem& p, const Parts<FlushVerifyProblem>& x, const DraftPlan& plan) {
  if (plan.shape.crowded) launch_shape<kCall, Shape{4, 4, 1, true}>(p, x, plan);
  else launch_up_to_four<kCall>(p, x, plan);
}

}  // namespace

void launch(const FlushVerifyProblem& p, const Parts<FlushVerifyProblem>& x, const DraftPlan& plan) {
  if (plan.path == FastPath::kNone) launch_shape<general(8), kGeneralFlushVerify>(p, x, plan);
  else if (plan.path == FastPath::kRing) launch_on_ring(p, x, plan);
  else if (x.state_dtype == KDA_F32) launch_fast<Traits{true, KDA_F32, 4}>(p, x, plan);
  else launch_fast<Traits{true, KDA_BF16, 4}>(p, x, plan);
}

}  // namespace kda::cuda::recurrent
