// The fast path on a ring: committed entries act as drafts before the first one, until the state is written.
#include "cuda/drafts/recurrent_kernel.h"

namespace kda::cuda::recurrent {
namespace {

template <Traits kCall>
void launch_many(const FlushVerifyProblem& p, const Parts<FlushVerifyProblem>& x, const DraftPlan& plan) {
  if (plan.shape.rows == 4) launch_shape<kCall, Shape{8, 4}>(p, x, plan);
  else if (plan.shape.rows == 2) launch_shape<kCall, Shape{8, 2}>(p, x, plan);
  else launch_shape<kCall, Shape{8, 1}>(p, x, plan);
}
constexpr Traits on_ring(int32_t state, int max_drafts) { return {true, state, max_drafts, true}; }

}  // namespace

void launch_on_ring(const FlushVerifyProblem& p, const Parts<FlushVerifyProblem>& x, const DraftPlan& plan) {
  if (p.T > 4) launch_many<on_ring(KDA_F32, 8)>(p, x, plan);
  else if (x.state_dtype == KDA_F32)
    p.T == 1 ? launch_up_to_four<on_ring(KDA_F32, 1)>(p, x, plan) : launch_up_to_four<on_ring(KDA_F32, 4)>(p, x, plan);
  else
    p.T == 1 ? launch_up_to_four<on_ring(KDA_BF16, 1)>(p, x, plan)
             : launch_up_to_four<on_ring(KDA_BF16, 4)>(p, x, plan);
}

}  // namespace kda::cuda::recurrent
