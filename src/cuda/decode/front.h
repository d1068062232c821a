// Decode with a convolution in front: the kernel of kda_conv writes its rows to the workspace and rolls its state on in
// the same launch. Then decode reads q, k and v there, as if the call had no convolution.
#pragma once
#include "contract/problem.h"
#include "cuda/conv/call.h"

namespace kda::cuda {

inline uint64_t front_bytes(const DecodeProblem& p) {
  const kda_tensor& x = p.args.conv.x;
  return present(x) ? static_cast<uint64_t>(p.tokens()) * x.shape[2] * dtype_size(x.dtype) : 0;
}
// Calls act(problem) with the call that is left behind the convolution. Where there is no workspace yet, no one reads
// what its rows point to.
template <class Act>
auto behind_front(const DecodeProblem& p, const Act& act) {
  if (!present(p.args.conv.x)) return act(p);
  DecodeProblem left = p;
  void* workspace = p.args.exec.workspace;
  slice_convolved(left.args.in, workspace ? workspace : reinterpret_cast<void*>(uintptr_t{256}));
  left.args.conv = {};
  return act(left);
}
inline const char* front_why_not(const DecodeProblem& p) {
  const kda_tensor& x = p.args.conv.x;
  if (!present(x)) return nullptr;
  return convolution_why_not({p.B, p.T, p.N, x.shape[2], p.args.conv.weight.shape[1], false});
}
inline void launch_front(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (!present(a.conv.x)) return;
  kda_tensor y = a.conv.x;
  y.data = a.exec.workspace;
  y.stride[0] = y.shape[1] * y.shape[2], y.stride[1] = y.shape[2], y.stride[2] = 1;
  StateSlots requests = slots_of(a.states);
  requests.initial = Initial::kZeros;  // only which of them are live is asked
  const FinalSlots slots{.slots = a.conv.state.shape[0],
                         .some_stay = requests.indices.data || present(a.snapshot_slots) || p.varlen || p.T == 0,
                         .requests = requests,
                         .snapshot_slots = index_rows(a.snapshot_slots)};
  launch_convolution({a.exec, conv_of(a.conv, a.in.cu_seqlens, {}, y), {a.conv.state, slots}});
}

}  // namespace kda::cuda
