// What the registry and other folders see of Blackwell's stages.
#pragma once
#include "contract/stages.h"

namespace kda::cuda {

const char* blackwell_stages_bwd_delta_h_why_not(const StageProblem<kda_stage_bwd_delta_h_args>& p);
void blackwell_stages_bwd_delta_h(const StageProblem<kda_stage_bwd_delta_h_args>& p);
const char* blackwell_stages_delta_h_why_not(const StageProblem<kda_stage_delta_h_args>& p);
void blackwell_stages_delta_h(const StageProblem<kda_stage_delta_h_args>& p);
const char* blackwell_stages_fwd_o_why_not(const StageProblem<kda_stage_fwd_o_args>& p);
void blackwell_stages_fwd_o(const StageProblem<kda_stage_fwd_o_args>& p);
const char* blackwell_stages_wy_dqkg_why_not(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);
void blackwell_stages_wy_dqkg(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p);

}  // namespace kda::cuda
