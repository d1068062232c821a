// The contract of kda_segment_map and kda_segment_merge.
#include "contract/rules.h"

namespace kda {

SegmentMapProblem validate(const kda_segment_map_args* raw) {
  const kda_segment_map_args a = copy_args(raw);
  Tensors tensors(a);
  Dims d = check_inputs(a.in, tensors);
  tensors.check_all(a.d_o, a.M, a.b, a.d);
  check_memory(tensors, a.exec, d);
  return with_dims<SegmentMapProblem>(d, a);
}

SegmentMergeProblem validate(const kda_segment_merge_args* raw) {
  kda_segment_merge_args a = copy_args(raw);
  Tensors tensors(a);
  tensors.check_form(a.M, a.b, a.h0, a.states);
  tensors.check(a.state_layout, a.reverse);
  tensors.k_first = a.state_layout == KDA_STATE_K_FIRST;
  tensors.bind(a.M);
  if (a.b.ndim != 4) invalid("b: expected 4 dimensions [P,HV,", tensors.k_first ? "K,V" : "V,K", "], got ", a.b.ndim);
  const int64_t P = a.M.shape[0], HV = a.M.shape[1], K = a.M.shape[2], V = a.b.shape[tensors.k_first ? 3 : 2];
  if (HV < 1) invalid("M: expected HV >= 1, got ", HV);
  if (K < 1 || K > kMaxSize) invalid("M: expected K in 1..", kMaxSize, ", got ", K);
  if (V < 1 || V > kMaxSize) invalid("b: expected V in 1..", kMaxSize, ", got ", V);
  Dims d{.B = 1, .T = 0, .N = P, .H = HV, .HV = HV, .K = K, .V = V, .varlen = false, .idle = false};
  check_sizes("M", d);
  tensors[Size::V] = V;
  tensors.check(a.M, a.b, a.h0, a.states);
  check_memory(tensors, a.exec, d);
  if (present(a.h0)) {
    std::copy_backward(a.h0.shape, a.h0.shape + 3, a.h0.shape + 4);
    std::copy_backward(a.h0.stride, a.h0.stride + 3, a.h0.stride + 4);
    a.h0.ndim = 4, a.h0.shape[0] = 1, a.h0.stride[0] = 0;
  }
  return {d, a};
}

void validate_data(const SegmentMapProblem& p) { check_cu_seqlens(p, p.args.in); }

}  // namespace kda
