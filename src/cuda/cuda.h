// The CUDA room: what the registry sees. No CUDA type leaves it.
#pragma once
#include <cstdint>
#include <string>

#include "problem_prefill_f32.h"
#include "problem_stages.h"

namespace kda::cuda {

const char* gate_why_not(const GateProblem& p);
const char* gate_why_not(const GateBackwardProblem& p);
void gate(const GateProblem& p);
void gate_backward(const GateBackwardProblem& p);
uint64_t gate_backward_workspace(const GateBackwardProblem& p);

const char* forward_chunk_why_not(const ForwardProblem& p);
const char* forward_chunk_too_rough(const ForwardProblem& p);
uint64_t forward_chunk_workspace(const ForwardProblem& p);
void forward_chunk(const ForwardProblem& p);
const char* backward_chunk_why_not(const BackwardProblem& p);
const char* backward_chunk_too_rough(const BackwardProblem& p);
uint64_t backward_chunk_workspace(const BackwardProblem& p);
void backward_chunk(const BackwardProblem& p);
const char* backward_chunk_sm90_why_not(const BackwardProblem& p);
uint64_t backward_chunk_sm90_workspace(const BackwardProblem& p);
void backward_chunk_sm90(const BackwardProblem& p);
const char* backward_recurrent_why_not(const BackwardProblem& p);
uint64_t backward_recurrent_workspace(const BackwardProblem& p);
void backward_recurrent(const BackwardProblem& p);
const char* forward_recurrent_why_not(const ForwardProblem& p);
void forward_recurrent(const ForwardProblem& p);
const char* forward_chunk_sm90_why_not(const ForwardProblem& p);
void forward_chunk_sm90(const ForwardProblem& p);
uint64_t forward_chunk_sm90_workspace(const ForwardProblem& p);
std::string forward_sm90_form(const ForwardProblem& p);
const char* forward_segments_sm90_why_not(const ForwardProblem& p);
const char* forward_segments_sm90_unsuited(const ForwardProblem& p);
void forward_segments_sm90(const ForwardProblem& p);
uint64_t forward_segments_sm90_workspace(const ForwardProblem& p);
inline bool forward_by_segments(const ForwardProblem& p) {  // whether they take the call and are faster
  return !forward_segments_sm90_why_not(p) && !forward_segments_sm90_unsuited(p);
}

const char* decode_why_not(const DecodeProblem& p);
std::string decode_form(const DecodeProblem& p);
void decode(const DecodeProblem& p);
const char* decode_sweep_why_not(const DecodeProblem& p);
const char* decode_sweep_unsuited(const DecodeProblem& p);
void decode_sweep(const DecodeProblem& p);

const char* speculation_why_not(const VerifyProblem& p);
const char* speculation_why_not(const FlushProblem& p);
const char* speculation_why_not(const FlushVerifyProblem& p);
void verify(const VerifyProblem& p);
void flush(const FlushProblem& p);
void flush_verify(const FlushVerifyProblem& p);
const char* speculation_mma_why_not(const VerifyProblem& p);
const char* flush_registers_why_not(const FlushProblem& p);
const char* speculation_mma_why_not(const FlushVerifyProblem& p);
const char* speculation_recurrent_why_not(const VerifyProblem& p);
const char* speculation_recurrent_why_not(const FlushVerifyProblem& p);
std::string mma_form(const VerifyProblem& p);
std::string mma_form(const FlushVerifyProblem& p);
std::string recurrent_form(const VerifyProblem& p);
std::string recurrent_form(const FlushProblem& p);
std::string recurrent_form(const FlushVerifyProblem& p);
void verify_mma(const VerifyProblem& p);
void flush_verify_mma(const FlushVerifyProblem& p);
void verify_recurrent(const VerifyProblem& p);
void flush_registers(const FlushProblem& p);
void flush_verify_recurrent(const FlushVerifyProblem& p);

const char* conv_why_not(const ConvProblem& p);
const char* conv_why_not(const ConvBackwardProblem& p);
void conv(const ConvProblem& p);
void conv_backward(const ConvBackwardProblem& p);
uint64_t conv_backward_workspace(const ConvBackwardProblem& p);

const char* stage_why_not(const StageProblem<kda_stage_cumsum_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_chunk_intra_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_recompute_w_u_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_delta_h_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_fwd_o_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_bwd_local_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_bwd_delta_h_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_bwd_intra_args>& p);
const char* stage_why_not(const StageProblem<kda_stage_cumsum_backward_args>& p);
void stage(const StageProblem<kda_stage_cumsum_args>& p);
void stage(const StageProblem<kda_stage_chunk_intra_args>& p);
void stage(const StageProblem<kda_stage_recompute_w_u_args>& p);
void stage(const StageProblem<kda_stage_delta_h_args>& p);
void stage(const StageProblem<kda_stage_fwd_o_args>& p);
void stage(const StageProblem<kda_stage_bwd_local_args>& p);
void stage(const StageProblem<kda_stage_bwd_delta_h_args>& p);
void stage(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
void stage(const StageProblem<kda_stage_bwd_intra_args>& p);
void stage(const StageProblem<kda_stage_cumsum_backward_args>& p);

const char* prefill_f32_why_not(const PrefillF32Problem& p);
void prefill_f32(const PrefillF32Problem& p);
uint64_t prefill_f32_workspace(const PrefillF32Problem& p);

// For explain and workspace of this thread: see kda_assume_gpu.
void assume_gpu(int capability, int multiprocessors);
bool gpu_is_assumed();

std::string info();  // toolkit, architectures, driver, devices

}  // namespace kda::cuda
