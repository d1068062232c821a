// Which kernels of the Hopper forward a call's types and gates need.
#pragma once
#include "cuda/hopper_prefill/producer.h"
#include "cuda/hopper_prefill/scores_any_gate.h"
#include "cuda/hopper_prefill/scores_bounded.h"

namespace kda::cuda::sm90 {

// Is one anchor a chunk enough for the call's gates?
inline bool anchored(const ForwardProblem& p) {
  return p.args.in.gate_form == KDA_GATE_LOWER_BOUND && p.args.in.lower_bound >= -5;
}

// Calls run.operator()<T>() with the type of q, k and v.
template <class Run>
void with_type(const ForwardProblem& p, const Run& run) {
  if (p.args.in.q.dtype == KDA_F16) run.template operator()<__half>();
  else run.template operator()<__nv_bfloat16>();
}
// Calls run.operator()<Scores>() with the scores that the call's gates need.
template <class Run>
void with_scores(const ForwardProblem& p, const Run& run) {
  if (anchored(p)) run.template operator()<BoundedScores>();
  else run.template operator()<AnyGateScores>();
}
// Calls run.operator()<T, Scores, kWideGate, kTraining>(): see Producer and Consumer.
template <class Run>
void with_preparation(const ForwardProblem& p, const Run& run) {
  const auto by_use = [&]<class T, class Scores, bool kWideGate>() {
    if (present(p.args.h) || present(p.args.v_new)) run.template operator()<T, Scores, kWideGate, true>();
    else run.template operator()<T, Scores, kWideGate, false>();
  };
  const auto by_gate = [&]<class T, class Scores>() {
    if (p.args.in.g.dtype == KDA_F32) by_use.template operator()<T, Scores, true>();
    else by_use.template operator()<T, Scores, false>();
  };
  with_type(p, [&]<class T>() { with_scores(p, [&]<class Scores>() { by_gate.template operator()<T, Scores>(); }); });
}

}  // namespace kda::cuda::sm90
