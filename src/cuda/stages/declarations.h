// What the registry and other folders see of the stages of prefill and training.
#pragma once
#include <cstdint>

#include "contract/prefill_f32.h"
#include "contract/stages.h"

namespace kda::cuda {

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
const char* stages_prefill_f32_why_not(const PrefillF32Problem& p);
void stages_prefill_f32(const PrefillF32Problem& p);
uint64_t stages_prefill_f32_workspace(const PrefillF32Problem& p);

}  // namespace kda::cuda
