// The reverse scan of the backward on Hopper, in CTA pairs (reverse.cu).
#pragma once
#include "cuda/backward/plan.h"

namespace kda::cuda::engine {

// Whether this scan takes a call that cuda_hopper_backward_chunk takes; cuda_backward_chunk's takes all. Which
// gradients are wanted does not matter, because each must have the same bits in any case.
bool takes_reverse(const BackwardProblem& p);
uint64_t reverse_workspace(const BackwardProblem& p, const BackwardPlan& plan);
// Leaves dv, dh0 and the gradients of states after every 64 tokens. q, k and d_o of the plan are there.
void run_reverse(const BackwardProblem& p, const BackwardPlan& plan);
// Leaves dh0 alone and, if it is wanted, M^T [N,HV,K,K] of sequences.
void run_reverse_maps(const BackwardProblem& p, const BackwardPlan& plan, const kda_tensor& M_transposed);

}  // namespace kda::cuda::engine
