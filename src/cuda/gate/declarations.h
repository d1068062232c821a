// What the registry and other folders see of the gate.
#pragma once
#include <cstdint>

#include "contract/problem.h"

namespace kda::cuda {

const char* gate_why_not(const GateProblem& p);
const char* gate_why_not(const GateBackwardProblem& p);
void gate(const GateProblem& p);
void gate_backward(const GateBackwardProblem& p);
uint64_t gate_backward_workspace(const GateBackwardProblem& p);

}  // namespace kda::cuda
