// The contract of the causal convolution.
#include <cstddef>
#include <utility>

#include "contract/rules.h"

namespace kda {
namespace {

// Checks x1 and x2. Returns how many channels they have.
template <class Args>
int64_t check_more_channels(const Args& a, Tensors& tensors) {
  tensors.check_form(a.x1, a.x2);
  tensors.check_company(a.x2);
  int64_t channels = 0;
  for (const auto& [name, t] : {std::pair{"x1", &a.x1}, {"x2", &a.x2}}) {
    if (!present(*t)) continue;
    if (t->ndim != 3) invalid(name, ": expected 3 dimensions [B,T,D], got ", t->ndim);
    if (t->shape[2] < 1 || t->shape[2] > kMaxChannels) invalid(name, ": expected D in 1..2^48, got ", t->shape[2]);
    tensors.check(*t);
    channels += t->shape[2];
  }
  return channels;
}

// Checks x, weight and cu_seqlens, which both operators take alike. Returns the sizes from them.
template <class Args>
ConvDims check_conv_inputs(const Args& a, Tensors& tensors) {
  const kda_tensor &x = a.x, &weight = a.weight;
  tensors.check_form(x, weight, a.bias, a.cu_seqlens);
  tensors.bind(x), tensors.bind(weight);
  ConvDims d{x.shape[0], x.shape[1], 0, x.shape[2], weight.shape[1], false};
  if (d.D < 1) invalid("x: expected D >= 1, got ", d.D);
  if (d.W < 2 || d.W > kMaxConvWidth) invalid("weight: expected W in 2..", kMaxConvWidth, ", got ", d.W);
  tensors.check(x);
  if (const int64_t more = check_more_channels(a, tensors)) {
    if (d.D > kMaxChannels) invalid("x: expected D in 1..2^48, got ", d.D);
    d.D += more;
  }
  tensors[Size::D] = d.D, tensors.in_parts = present(a.x1);
  tensors.check(weight, a.bias);
  d.N = check_packing(a.cu_seqlens, tensors).N;
  if (!product_within(kMaxChannels, {d.B, d.T, d.D}) || !product_within(kMaxChannels, {d.N, d.D}))
    invalid("x: expected B T D and N D of at most 2^48, got shape ", shape_text(x.shape, x.ndim), ", N = ", d.N,
            " and D = ", d.D);
  return d;
}

}  // namespace

ConvProblem validate(const kda_conv_args* raw) {
  const kda_conv_args a = copy_args(raw, offsetof(kda_conv_args, out_state_indices));
  Tensors tensors(a);
  ConvDims d = check_conv_inputs(a, tensors);
  tensors.check_form(a.initial_state, a.final_state, a.state_indices, a.has_initial_state, a.out_state_indices,
                     a.checkpoints, a.y);
  check_state_pair(states_of(a), tensors);
  check_checkpoints(a, tensors);
  tensors.check(a.reserved, a.y);
  check_memory(tensors, a.exec, d);
  return {d, a};
}

ConvBackwardProblem validate(const kda_conv_backward_args* raw) {
  const kda_conv_backward_args a = copy_args(raw, offsetof(kda_conv_backward_args, x1));
  Tensors tensors(a);
  ConvDims d = check_conv_inputs(a, tensors);
  tensors.check_all(a.initial_state, a.dy, a.d_final_state, a.dx, a.dweight, a.dbias, a.d_initial_state);
  tensors.check(a.reserved);
  check_memory(tensors, a.exec, d);
  return {d, a};
}

void validate_data(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  check_cu_seqlens(a.cu_seqlens, p.T);
  check_states_data(states_of(a), p.N);
  check_checkpoints_data(a, states_of(a), p.N);
}
void validate_data(const ConvBackwardProblem& p) { check_cu_seqlens(p.args.cu_seqlens, p.T); }

}  // namespace kda
