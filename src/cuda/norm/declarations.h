// What the registry and other folders see of the output's norm and gate.
#pragma once
#include <cstdint>
#include <string>

#include "contract/problem.h"

namespace kda::cuda {

const char* norm_gate_why_not(const NormGateProblem& p);
const char* norm_gate_why_not(const NormGateBackwardProblem& p);
std::string norm_gate_form(const NormGateProblem& p);
std::string norm_gate_form(const NormGateBackwardProblem& p);
void norm_gate(const NormGateProblem& p);
void norm_gate_backward(const NormGateBackwardProblem& p);
uint64_t norm_gate_backward_workspace(const NormGateBackwardProblem& p);

}  // namespace kda::cuda
