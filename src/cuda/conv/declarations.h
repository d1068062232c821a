// What the registry and other folders see of the causal convolution.
#pragma once
#include <cstdint>

#include "contract/problem.h"

namespace kda::cuda {

const char* conv_why_not(const ConvProblem& p);
const char* conv_backward_why_not(const ConvBackwardProblem& p);
void conv(const ConvProblem& p);
void conv_backward(const ConvBackwardProblem& p);
uint64_t conv_backward_workspace(const ConvBackwardProblem& p);

}  // namespace kda::cuda
