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

const char* norm_gate_why_not(const NormGateProblem& p);
const char* norm_gate_why_not(const NormGateBackwardProblem& p);
std::string norm_gate_form(const NormGateProblem& p);
std::string norm_gate_form(const NormGateBackwardProblem& p);
void norm_gate(const NormGateProblem& p);
void norm_gate_backward(const NormGateBackwardProblem& p);
uint64_t norm_gate_backward_workspace(const NormGateBackwardProblem& p);

const char* hopper_prefill_segments_why_not(const ForwardProblem& p);
const char* hopper_prefill_segments_unsuited(const ForwardProblem& p);
uint64_t hopper_prefill_segments_workspace(const ForwardProblem& p);
void hopper_prefill_segments(const ForwardProblem& p);
inline bool forward_by_segments(const ForwardProblem& p) {  // whether they take the call and are faster
  return !hopper_prefill_segments_why_not(p) && !hopper_prefill_segments_unsuited(p);
}
// M [N,HV,K,K] of sequences, and b, where p says that final states go. Takes what pairs take.
void hopper_prefill_maps(const ForwardProblem& p, const kda_tensor& M);
const char* hopper_prefill_too_rough(const ForwardProblem& p);  // asked of Blackwell's kernels, too
const char* hopper_prefill_pairs_why_not(const ForwardProblem& p);
uint64_t hopper_prefill_pairs_workspace(const ForwardProblem& p);
void hopper_prefill_pairs(const ForwardProblem& p);
std::string hopper_prefill_form(const ForwardProblem& p);  // of both
const char* blackwell_prefill_why_not(const ForwardProblem& p);
uint64_t blackwell_prefill_workspace(const ForwardProblem& p);
void blackwell_prefill(const ForwardProblem& p);
const char* blackwell_prefill_segments_why_not(const ForwardProblem& p);
const char* blackwell_prefill_segments_unsuited(const ForwardProblem& p);
uint64_t blackwell_prefill_segments_workspace(const ForwardProblem& p);
void blackwell_prefill_segments(const ForwardProblem& p);
const char* prefill_chunk_why_not(const ForwardProblem& p);
const char* prefill_chunk_too_rough(const ForwardProblem& p);
uint64_t prefill_chunk_workspace(const ForwardProblem& p);
void prefill_chunk(const ForwardProblem& p);
const char* prefill_recurrent_why_not(const ForwardProblem& p);
void prefill_recurrent(const ForwardProblem& p);

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

const char* segment_hopper_why_not(const SegmentMapProblem& p);
uint64_t segment_hopper_workspace(const SegmentMapProblem& p);
void segment_hopper(const SegmentMapProblem& p);
std::string segment_hopper_form(const SegmentMapProblem& p);
const char* segment_chunk_why_not(const SegmentMapProblem& p);
const char* segment_chunk_too_rough(const SegmentMapProblem& p);
uint64_t segment_chunk_workspace(const SegmentMapProblem& p);
void segment_chunk(const SegmentMapProblem& p);
std::string segment_chunk_form(const SegmentMapProblem& p);
const char* segment_recurrent_why_not(const SegmentMapProblem& p);
uint64_t segment_recurrent_workspace(const SegmentMapProblem& p);
void segment_recurrent(const SegmentMapProblem& p);
std::string segment_recurrent_form(const SegmentMapProblem& p);
const char* segment_merge_why_not(const SegmentMergeProblem& p);
void segment_merge(const SegmentMergeProblem& p);

const char* decode_sweep_why_not(const DecodeProblem& p);
const char* decode_sweep_unsuited(const DecodeProblem& p);
void decode_sweep(const DecodeProblem& p);
const char* decode_why_not(const DecodeProblem& p);
std::string decode_form(const DecodeProblem& p);
uint64_t decode_workspace(const DecodeProblem& p);
void decode(const DecodeProblem& p);

const char* drafts_recurrent_why_not(const VerifyProblem& p);
const char* drafts_recurrent_why_not(const FlushVerifyProblem& p);
std::string drafts_recurrent_form(const VerifyProblem& p);
std::string drafts_recurrent_form(const FlushVerifyProblem& p);
void drafts_recurrent(const VerifyProblem& p);
void drafts_recurrent(const FlushVerifyProblem& p);
const char* drafts_flush_registers_why_not(const FlushProblem& p);
std::string drafts_flush_registers_form(const FlushProblem& p);
void drafts_flush_registers(const FlushProblem& p);
const char* drafts_mma_why_not(const VerifyProblem& p);
const char* drafts_mma_why_not(const FlushVerifyProblem& p);
std::string drafts_mma_form(const VerifyProblem& p);
std::string drafts_mma_form(const FlushVerifyProblem& p);
void drafts_mma(const VerifyProblem& p);
void drafts_mma(const FlushVerifyProblem& p);
const char* drafts_general_why_not(const VerifyProblem& p);
const char* drafts_general_why_not(const FlushProblem& p);
const char* drafts_general_why_not(const FlushVerifyProblem& p);
void drafts_general(const VerifyProblem& p);
void drafts_general(const FlushProblem& p);
void drafts_general(const FlushVerifyProblem& p);

const char* conv_why_not(const ConvProblem& p);
const char* conv_backward_why_not(const ConvBackwardProblem& p);
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
const char* hopper_stages_wy_dqkg_why_not(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
void hopper_stages_wy_dqkg(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
const char* blackwell_stages_bwd_delta_h_why_not(const StageProblem<kda_stage_bwd_delta_h_args>& p);
void blackwell_stages_bwd_delta_h(const StageProblem<kda_stage_bwd_delta_h_args>& p);
const char* blackwell_stages_delta_h_why_not(const StageProblem<kda_stage_delta_h_args>& p);
void blackwell_stages_delta_h(const StageProblem<kda_stage_delta_h_args>& p);
const char* blackwell_stages_fwd_o_why_not(const StageProblem<kda_stage_fwd_o_args>& p);
void blackwell_stages_fwd_o(const StageProblem<kda_stage_fwd_o_args>& p);
const char* blackwell_stages_wy_dqkg_why_not(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
void blackwell_stages_wy_dqkg(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);

const char* stages_prefill_f32_why_not(const PrefillF32Problem& p);
void stages_prefill_f32(const PrefillF32Problem& p);
uint64_t stages_prefill_f32_workspace(const PrefillF32Problem& p);

// Why kernels for Blackwell are not preferred, for which the environment can ask; or nullptr.
const char* blackwell_unsuited();
// Whether the library has kernels. Without CUDA it has all but those: it answers for an assumed GPU.
bool is_built();
// For explain and workspace of this thread: see kda_assume_gpu.
void assume_gpu(int capability, int multiprocessors);
bool gpu_is_assumed();

std::string info();  // toolkit, architectures, driver, devices

}  // namespace kda::cuda
