// The stages' part of the contract. Almost all of it follows from contract/tables_stages.h.
#pragma once
#include "contract/problem.h"

namespace kda {

template <class Args>
concept StageArgs = requires(Args a) {
  a.at.cu_seqlens;
};

template <StageArgs Args>
struct StageProblem : Dims {
  kda_inputs in;  // only what `at` says: cu_seqlens, scale, state_layout
  Args args;
};

template <StageArgs Args>
StageProblem<Args> validate(const Args* args);
template <StageArgs Args>
void validate_data(const StageProblem<Args>& p);
template <StageArgs Args>
bool has_f64(const StageProblem<Args>& p);

}  // namespace kda
