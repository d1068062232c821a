// What the registry and other folders see of the portable forward.
#pragma once
#include <cstdint>

#include "contract/problem.h"

namespace kda::cuda {

const char* prefill_chunk_why_not(const ForwardProblem& p);
const char* prefill_chunk_too_rough(const ForwardProblem& p);
uint64_t prefill_chunk_workspace(const ForwardProblem& p);
void prefill_chunk(const ForwardProblem& p);
const char* prefill_recurrent_why_not(const ForwardProblem& p);
void prefill_recurrent(const ForwardProblem& p);

}  // namespace kda::cuda
