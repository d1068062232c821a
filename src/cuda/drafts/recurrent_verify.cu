// Verify of up to four drafts: the fast path, with and without a convolution in front, and the general kernel.
#include "cuda/drafts/recurrent_kernel.h"

namespace kda::cuda::recurrent {
namespace {

template <int32_t kState>
void launch_fast(const VerifyProblem& p, const Parts<VerifyProblem>& x, const DraftPlan& plan) {
  if (plan.path == FastPath::kConv) launch_up_to_four<Traits{true, kState, 4, false, true}>(p, x, plan);
  else launch_up_to_four<Traits{true, kState, 4}>(p, x, plan);
}

}  // namespace

void launch(const VerifyProblem& p, const Parts<VerifyProblem>& x, const DraftPlan& plan) {
  if (plan.path == FastPath::kNone) launch_shape<general(4), kGeneralVerify>(p, x, plan);
  else if (x.state_dtype == KDA_F32) launch_fast<KDA_F32>(p, x, plan);
  else launch_fast<KDA_BF16>(p, x, plan);
}

}  // namespace kda::cuda::recurrent
