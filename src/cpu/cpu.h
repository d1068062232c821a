// The implementations on the CPU, as the registry sees them.
#pragma once
#include <cstdint>

#include "contract/prefill_f32.h"
#include "contract/problem.h"

namespace kda::cpu {

void chunk_forward(const ForwardProblem& p);
const char* chunk_forward_why_not(const ForwardProblem& p);
uint64_t chunk_forward_workspace(const ForwardProblem& p);

void chunk_backward(const BackwardProblem& p);
uint64_t chunk_backward_workspace(const BackwardProblem& p);

uint64_t recurrent_forward_workspace(const ForwardProblem& p);
void recurrent_forward(const ForwardProblem& p);
const char* recurrent_forward_why_not(const ForwardProblem& p);
uint64_t decode_workspace(const DecodeProblem& p);
void decode(const DecodeProblem& p);

void verify(const VerifyProblem& p);
uint64_t verify_workspace(const VerifyProblem& p);
void flush(const FlushProblem& p);
uint64_t flush_workspace(const FlushProblem& p);
void flush_verify(const FlushVerifyProblem& p);
uint64_t flush_verify_workspace(const FlushVerifyProblem& p);
void segment_map(const SegmentMapProblem& p);
uint64_t segment_map_workspace(const SegmentMapProblem& p);
void segment_merge(const SegmentMergeProblem& p);
uint64_t segment_merge_workspace(const SegmentMergeProblem& p);

void gate(const GateProblem& p);
void gate_backward(const GateBackwardProblem& p);
uint64_t gate_backward_workspace(const GateBackwardProblem& p);

void norm_gate(const NormGateProblem& p);
void norm_gate_backward(const NormGateBackwardProblem& p);
uint64_t norm_gate_backward_workspace(const NormGateBackwardProblem& p);

void conv(const ConvProblem& p);
void conv_backward(const ConvBackwardProblem& p);
uint64_t conv_backward_workspace(const ConvBackwardProblem& p);

// The convolution in front of decode and verify, with the bits of kda_conv. `z` ([B,T,D], dtype of x, dense) lies in
// memory of conv_front_bytes(). Without cu_seqlens there are B requests of T tokens; without parents each request is
// a chain. A request without a slot in the pool starts from zeros. Rows that belong to no request are zeroed.
uint64_t conv_front_bytes(const kda_conv_inputs& in);
kda_tensor conv_front_output(const kda_conv_inputs& in, void* memory);
void conv_front(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& parents, const kda_tensor& z,
                const kda_exec& exec);
// Rolls slot `slot` of state [slots,D,W-1] on by the first m tokens of request n, which begin at token t0 of row b of
// x; with `parents`, by the path that ends in token m - 1. Nothing happens for m <= 0 or a slot outside the pool.
void conv_roll(const kda_tensor& state, int64_t slot, const kda_tensor& x, const kda_tensor& parents, int64_t n,
               int64_t b, int64_t t0, int64_t m);
void prefill_f32(const PrefillF32Problem& p);
uint64_t prefill_f32_workspace(const PrefillF32Problem& p);

// The stages: cpu/stages.h.

const char* isa_name();   // the instruction set in use, e.g. "avx512"
const char* isa_names();  // those compiled in

}  // namespace kda::cpu
