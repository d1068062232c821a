// The forms of the gate (math.md 2.1): their numbers in kda.h, and what each asks of a call.
//
// A new form is added here and where gates are computed: reference/math.h, cpu/simd-inl.h, cuda/gate/gate.h and
// cuda/call/token.h. What names all forms in a switch without a default does not compile without the new one
// (-Werror=switch). Where forms are compared, an assertion on kGateForms does the same.
#pragma once
#include "kda/kda.h"

namespace kda {

enum class GateForm : uint32_t {
  kLog = KDA_GATE_LOG,
  kSoftplus = KDA_GATE_SOFTPLUS,
  kLowerBound = KDA_GATE_LOWER_BOUND,
};
constexpr int32_t kLastGateForm = KDA_GATE_LOWER_BOUND, kGateForms = kLastGateForm + 1;

// Of operands that were checked: gate_form is in range.
template <class In>
constexpr GateForm form_of(const In& in) {
  return static_cast<GateForm>(in.gate_form);
}

// Is g the logarithm of the decay itself, without A_log and dt_bias?
constexpr bool is_given(GateForm form) {
  switch (form) {
    case GateForm::kLog: return true;
    case GateForm::kSoftplus:
    case GateForm::kLowerBound: break;
  }
  return false;
}
// Is lower_bound the least logarithm of a decay?
constexpr bool is_bounded(GateForm form) {
  switch (form) {
    case GateForm::kLowerBound: return true;
    case GateForm::kLog:
    case GateForm::kSoftplus: break;
  }
  return false;
}
// Must A_log be there?
constexpr bool needs_A_log(GateForm form) {
  switch (form) {
    case GateForm::kSoftplus: return true;
    case GateForm::kLog:
    case GateForm::kLowerBound: break;
  }
  return false;
}

}  // namespace kda
