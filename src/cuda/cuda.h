// The CUDA room: what the registry sees. No CUDA type leaves it.
#pragma once
#include <cstdint>
#include <string>

#include "problem.h"

namespace kda::cuda {

const char* gate_why_not(const GateProblem& p);
const char* gate_why_not(const GateBackwardProblem& p);
void gate(const GateProblem& p);
void gate_backward(const GateBackwardProblem& p);
uint64_t gate_backward_workspace(const GateBackwardProblem& p);

std::string info();  // toolkit, architectures, driver, devices

}  // namespace kda::cuda
