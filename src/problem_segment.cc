// The contract of kda_segment_map and kda_segment_merge.
#include "validate.h"

namespace kda {

SegmentMapProblem validate(const kda_segment_map_args* raw) {
  const kda_segment_map_args a = copy_args(raw, sizeof(kda_segment_map_args));
  check_exec(a.exec);
  Tensors tensors;
  Dims d = check_inputs(a.in, tensors);
  for (const auto& [name, t] : {std::pair{"d_o", &a.d_o}, {"M", &a.M}, {"b", &a.b}, {"d", &a.d}})
    check_absent_is_empty(name, *t);
  if (present(a.d_o) != present(a.d))
    invalid("d_o: expected together with d, got ", present(a.d_o) ? "d_o" : "d", " alone");
  if (present(a.d_o)) tensors.check("d_o", a.d_o, {d.B, d.T, d.HV, d.V}, 4, kFloats, false, " like v");
  if (present(a.M)) tensors.check("M", a.M, {d.N, d.HV, d.K, d.K}, 4, kSingles, true, " ([N,HV,K,K])");
  if (present(a.b)) check_state("b", a.b, d.N, d, a.in, tensors, true, kSingles);
  if (present(a.d)) check_state("d", a.d, d.N, d, a.in, tensors, true, kSingles);
  check_memory(tensors, a.exec, d);
  return with_dims<SegmentMapProblem>(d, a);
}

SegmentMergeProblem validate(const kda_segment_merge_args* raw) {
  kda_segment_merge_args a = copy_args(raw, sizeof(kda_segment_merge_args));
  check_exec(a.exec);
  for (const auto& [name, t] : {std::pair{"M", &a.M}, {"b", &a.b}, {"h0", &a.h0}, {"states", &a.states}})
    check_absent_is_empty(name, *t);
  check_range("state_layout", a.state_layout, KDA_STATE_V_FIRST, KDA_STATE_K_FIRST);
  check_range("reverse", a.reverse, 0, 1);
  const bool v_first = a.state_layout == KDA_STATE_V_FIRST;
  if (a.M.ndim != 4) invalid("M: expected 4 dimensions [P,HV,K,K], got ", a.M.ndim);
  if (a.b.ndim != 4) invalid("b: expected 4 dimensions [P,HV,", v_first ? "V,K" : "K,V", "], got ", a.b.ndim);
  const int64_t P = a.M.shape[0], HV = a.M.shape[1], K = a.M.shape[2], V = a.b.shape[v_first ? 2 : 3];
  if (HV < 1) invalid("M: expected HV >= 1, got ", HV);
  if (K < 1 || K > kMaxSize) invalid("M: expected K in 1..", kMaxSize, ", got ", K);
  if (V < 1 || V > kMaxSize) invalid("b: expected V in 1..", kMaxSize, ", got ", V);
  Dims d{.B = 1, .T = 0, .N = P, .H = HV, .HV = HV, .K = K, .V = V, .varlen = false, .idle = false};
  check_sizes("M", d);
  const int64_t rows = v_first ? V : K, columns = v_first ? K : V;
  const char* like = v_first ? " ([..,HV,V,K], V-first)" : " ([..,HV,K,V], K-first)";
  Tensors tensors;
  tensors.check("M", a.M, {P, HV, K, K}, 4, kSingles, false, " ([P,HV,K,K])");
  tensors.check("b", a.b, {P, HV, rows, columns}, 4, kSingles, false, like);
  if (present(a.h0)) tensors.check("h0", a.h0, {HV, rows, columns}, 3, kStates, false, like);
  tensors.check("states", a.states, {P + 1, HV, rows, columns}, 4, kSingles, true, like);
  check_memory(tensors, a.exec, d);
  if (present(a.h0)) {
    std::copy_backward(a.h0.shape, a.h0.shape + 3, a.h0.shape + 4);
    std::copy_backward(a.h0.stride, a.h0.stride + 3, a.h0.stride + 4);
    a.h0.ndim = 4, a.h0.shape[0] = 1, a.h0.stride[0] = 0;
  }
  return {d, a};
}

void validate_data(const SegmentMapProblem& p) { check_cu_seqlens(p, p.args.in); }

bool has_f64(const SegmentMapProblem& p) {
  return any_f64(p.args.in) || any_f64({&p.args.d_o, &p.args.M, &p.args.b, &p.args.d});
}
bool has_f64(const SegmentMergeProblem& p) { return any_f64({&p.args.M, &p.args.b, &p.args.h0, &p.args.states}); }

}  // namespace kda
