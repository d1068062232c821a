// Which calls the Hopper forward takes, and which of its kernels their types and gates need.
#pragma once
#include "cuda/engine/producer.h"
#include "cuda/engine/scores_any_gate.h"
#include "cuda/engine/scores_bounded.h"

namespace kda::cuda::engine {

// Is one anchor a chunk enough for the call's gates?
inline bool anchored(const ForwardProblem& p) { return is_well_bounded(form_of(p.args.in), p.args.in.lower_bound); }

// Why CTA pairs do not take a call, on any GPU that has them; or nullptr.
inline const char* pairs_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const kda_inputs& in = a.in;
  if ((p.K != kSizeHalf && p.K != kSize) || (p.V != kSizeHalf && p.V != kSize)) return "takes K and V of 64 or 128";
  if (in.q.dtype == KDA_F32 || in.q.dtype == KDA_F64) return "takes bf16 and f16 for q, k and v";
  if (a.o.dtype != in.q.dtype) return "writes o in the dtype of q";
  if (in.g.dtype != in.q.dtype && in.g.dtype != KDA_F32) return "takes g in f32 or the dtype of q";
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.Aqk) || present(a.Akk)) return "saves no Aqk and Akk";
  for (const kda_tensor* t : {&in.q, &in.k, &in.v, &in.g, &a.o})
    if (!rows_fit_tma(*t)) return "needs rows at multiples of 16 bytes";
  for (const kda_tensor* t : {&in.q, &in.k, &in.v, &in.g, &a.o})
    if (!strides_fit_tma(*t)) return "copies tensors with strides from 0 to below 2^40 bytes";
  if (const char* reason = checkpoints_why_not(a)) return reason;
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT, &a.checkpoints, &a.h, &a.v_new})) return reason;
  if ((p.B * p.T / kChunk + (1 + has_openings(a)) * p.N + 1) * p.HV > INT32_MAX / 2)
    return "takes at most 2^30 spans of 64 tokens and a head";
  return nullptr;
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
// Calls run.operator()<T, kWideGate>(): with the type of gates, too.
template <class Run>
void with_types(const ForwardProblem& p, const Run& run) {
  with_type(p, [&]<class T>() {
    if (p.args.in.g.dtype == KDA_F32) run.template operator()<T, true>();
    else run.template operator()<T, false>();
  });
}
// Calls run.operator()<T, Scores, kWideGate>(): see Producer.
template <class Run>
void with_inputs(const ForwardProblem& p, const Run& run) {
  const auto by_gate = [&]<class T, class Scores>() {
    if (p.args.in.g.dtype == KDA_F32) run.template operator()<T, Scores, true>();
    else run.template operator()<T, Scores, false>();
  };
  with_type(p, [&]<class T>() { with_scores(p, [&]<class Scores>() { by_gate.template operator()<T, Scores>(); }); });
}
// Calls run.operator()<T, Scores, kWideGate, kTraining>(): see Producer and Consumer.
template <class Run>
void with_preparation(const ForwardProblem& p, const Run& run) {
  with_inputs(p, [&]<class T, class Scores, bool kWideGate>() {
    if (present(p.args.h) || present(p.args.v_new)) run.template operator()<T, Scores, kWideGate, true>();
    else run.template operator()<T, Scores, kWideGate, false>();
  });
}

}  // namespace kda::cuda::engine
