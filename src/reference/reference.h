// The oracle: float64 token recurrence and its reverse mode, written as in math.md 2 and 3. Slow, plain, allocates.
#pragma once
#include "contract/prefill_f32.h"
#include "contract/problem.h"

namespace kda::reference {

void forward(const ForwardProblem& p);
void backward(const BackwardProblem& p);
void decode(const DecodeProblem& p);
void verify(const VerifyProblem& p);
void flush(const FlushProblem& p);
void flush_verify(const FlushVerifyProblem& p);
void segment_map(const SegmentMapProblem& p);
void segment_merge(const SegmentMergeProblem& p);
void gate(const GateProblem& p);
void gate_backward(const GateBackwardProblem& p);
void norm_gate(const NormGateProblem& p);
void norm_gate_backward(const NormGateBackwardProblem& p);
void conv(const ConvProblem& p);
void conv_backward(const ConvBackwardProblem& p);
void prefill_f32(const PrefillF32Problem& p);

}  // namespace kda::reference
