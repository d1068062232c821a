// An operator that the library does not have, made as HACKING.md says: y = scale x + bias. The numbers are those of its
// five places. The fifth, Python's function, has no counterpart here.
#pragma once
#include "contract/problem.h"
#include "contract/tables.h"

// ---- 1. the args struct, in kda.h with the declarations of its entry points ----

extern "C" {
typedef struct kda_new_args {
  uint64_t struct_size;
  kda_exec exec;
  kda_tensor x;    /* [B,T,HV,V] */
  kda_tensor bias; /* [V], optional: f32 */
  kda_tensor y;    /* [B,T,HV,V] out: like x; may be x */
  float scale;
  int32_t reserved;
} kda_new_args;
kda_status kda_new(const kda_new_args* args);
kda_status kda_new_workspace(const kda_new_args* args, uint64_t* bytes);
kda_status kda_new_explain(const kda_new_args* args, const char** text);
}

namespace kda {

// ---- 2. the table of its operands, in contract/tables.h, and its name in contract/operators.h ----

template <>
struct Table<kda_new_args> {
  using A = kda_new_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(x, "[B,T,HV,V]", kFloats),
      KDA_T(bias, "[V]", kSingles).maybe().from(" ([V] of x)"),
      KDA_T(y, "[B,T,HV,V]", kFloats).out().like_dtype("x").from(" like x").be("x"),
      KDA_FLOAT(scale),
      KDA_RESERVED("args.reserved"),
  });
};

// ---- 3. the problem, in contract/problem.h, and validate(), beside it ----

struct NewProblem : NormDims {
  kda_new_args args;
};
NewProblem validate(const kda_new_args* args);
inline void validate_data(const NewProblem&) {}

}  // namespace kda
