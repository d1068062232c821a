// What the registry and other folders see of the chunk scan in CTA pairs: the forward of Hopper and Blackwell.
#pragma once
#include <cstdint>
#include <string>

#include "contract/problem.h"

namespace kda::cuda {

const char* hopper_prefill_segments_why_not(const ForwardProblem& p);
const char* hopper_prefill_segments_unsuited(const ForwardProblem& p);
uint64_t hopper_prefill_segments_workspace(const ForwardProblem& p);
void hopper_prefill_segments(const ForwardProblem& p);
inline bool forward_by_segments(const ForwardProblem& p) {  // whether they take the call and are faster
  return !hopper_prefill_segments_why_not(p) && !hopper_prefill_segments_unsuited(p);
}
// M [N,HV,K,K] of sequences, and b, where p says that final states go. Takes what pairs take.
void hopper_prefill_maps(const ForwardProblem& p, const kda_tensor& M);
const char* hopper_prefill_too_rough(const ForwardProblem& p);  // asked of Blackwell's kernels, too
const char* hopper_prefill_pairs_why_not(const ForwardProblem& p);
uint64_t hopper_prefill_pairs_workspace(const ForwardProblem& p);
void hopper_prefill_pairs(const ForwardProblem& p);
std::string hopper_prefill_form(const ForwardProblem& p);  // of both
const char* blackwell_prefill_why_not(const ForwardProblem& p);
uint64_t blackwell_prefill_workspace(const ForwardProblem& p);
void blackwell_prefill(const ForwardProblem& p);
const char* blackwell_prefill_segments_why_not(const ForwardProblem& p);
const char* blackwell_prefill_segments_unsuited(const ForwardProblem& p);
uint64_t blackwell_prefill_segments_workspace(const ForwardProblem& p);
void blackwell_prefill_segments(const ForwardProblem& p);

}  // namespace kda::cuda
