// The stages' part of the contract: one table of operands for each args struct. Everything else follows from the
// tables.
#pragma once
#include <span>

#include "problem.h"

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

enum class Kind {
  kKeys,         // [B,T,H,K]
  kGates,        // [B,T,HV,K]
  kValues,       // [B,T,HV,V]
  kScores,       // [B,T,HV,C]
  kBetas,        // [B,T,HV], any strides
  kStates,       // [N,HV,V,K] or [N,HV,K,V]
  kChunkStates,  // [NT,HV,V,K] or [NT,HV,K,V]
};
enum class Role { kIn, kOptionalIn, kOut, kOptionalOut, kInOut };

template <StageArgs Args>
struct Operand {
  using Member = kda_tensor Args::*;
  const char* name;
  Member tensor;
  Kind kind;
  unsigned dtypes;
  Role role;

  bool optional() const { return role == Role::kOptionalIn || role == Role::kOptionalOut; }
  bool output() const { return role != Role::kIn && role != Role::kOptionalIn; }
  bool has_tokens() const { return kind != Kind::kStates && kind != Kind::kChunkStates; }
};

template <StageArgs Args>
std::span<const Operand<Args>> operands();

template <StageArgs Args>
StageProblem<Args> validate(const Args* args);
template <StageArgs Args>
void validate_data(const StageProblem<Args>& p);
template <StageArgs Args>
bool has_f64(const StageProblem<Args>& p);

// Calls zero(tensor) for every output that has a row a token, to zero the rows that no sequence owns.
template <StageArgs Args, class F>
void for_each_tail(const StageProblem<Args>& p, const F& zero) {
  if (!p.varlen) return;
  for (const Operand<Args>& o : operands<Args>())
    if (o.output() && o.has_tokens() && present(p.args.*o.tensor)) zero(p.args.*o.tensor);
}

}  // namespace kda
