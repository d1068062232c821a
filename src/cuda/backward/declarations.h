// What the registry and other folders see of the backward.
#pragma once
#include <cstdint>

#include "contract/problem.h"

namespace kda::cuda {

const char* hopper_backward_chunk_why_not(const BackwardProblem& p);
uint64_t hopper_backward_chunk_workspace(const BackwardProblem& p);
void hopper_backward_chunk(const BackwardProblem& p);
// M^T [N,HV,K,K] of sequences and, where p says that dh0 goes, d.
bool hopper_backward_takes_maps(const BackwardProblem& p);
void hopper_backward_maps(const BackwardProblem& p, const kda_tensor& M_transposed);
const char* backward_chunk_why_not(const BackwardProblem& p);
const char* backward_chunk_too_rough(const BackwardProblem& p);
uint64_t backward_chunk_workspace(const BackwardProblem& p);
void backward_chunk(const BackwardProblem& p);
const char* backward_recurrent_why_not(const BackwardProblem& p);
uint64_t backward_recurrent_workspace(const BackwardProblem& p);
void backward_recurrent(const BackwardProblem& p);

}  // namespace kda::cuda
