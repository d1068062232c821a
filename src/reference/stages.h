// The stages of the oracle.
#pragma once
#include "contract/stages.h"

namespace kda::reference {

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

}  // namespace kda::reference
