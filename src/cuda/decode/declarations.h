// What the registry and other folders see of decode.
#pragma once
#include <cstdint>
#include <string>

#include "contract/problem.h"

namespace kda::cuda {

const char* decode_sweep_why_not(const DecodeProblem& p);
const char* decode_sweep_unsuited(const DecodeProblem& p);
void decode_sweep(const DecodeProblem& p);
const char* decode_why_not(const DecodeProblem& p);
std::string decode_form(const DecodeProblem& p);
uint64_t decode_workspace(const DecodeProblem& p);
void decode(const DecodeProblem& p);

}  // namespace kda::cuda
