// The CPU room: what the registry sees.
#pragma once
#include <cstdint>

#include "problem.h"

namespace kda::cpu {

void chunk_forward(const ForwardProblem& p);
uint64_t chunk_forward_workspace(const ForwardProblem& p);

void chunk_backward(const BackwardProblem& p);
uint64_t chunk_backward_workspace(const BackwardProblem& p);

uint64_t recurrent_forward_workspace(const ForwardProblem& p);
void recurrent_forward(const ForwardProblem& p);
const char* recurrent_forward_why_not(const ForwardProblem& p);
void decode(const DecodeProblem& p);

void verify(const VerifyProblem& p);
uint64_t verify_workspace(const VerifyProblem& p);
void flush(const FlushProblem& p);
uint64_t flush_workspace(const FlushProblem& p);
void flush_verify(const FlushVerifyProblem& p);
uint64_t flush_verify_workspace(const FlushVerifyProblem& p);

void gate(const GateProblem& p);
void gate_backward(const GateBackwardProblem& p);
uint64_t gate_backward_workspace(const GateBackwardProblem& p);

const char* isa_name();   // the instruction set in use, e.g. "avx512"
const char* isa_names();  // those compiled in

}  // namespace kda::cpu
