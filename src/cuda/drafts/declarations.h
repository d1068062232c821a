// What the registry and other folders see of verify, flush and flush_verify.
#pragma once
#include <string>

#include "contract/problem.h"

namespace kda::cuda {

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

}  // namespace kda::cuda
