// The contract of the causal convolution.
#include <cstddef>
#include <utility>

#include "validate.h"

namespace kda {
namespace {

void check_all_absent_are_empty(std::initializer_list<std::pair<const char*, const kda_tensor*>> tensors) {
  for (const auto& [name, t] : tensors) check_absent_is_empty(name, *t);
}

// Checks x, weight and cu_seqlens, which both operators take alike. Returns the sizes from them.
ConvDims check_conv_inputs(const kda_tensor& x, const kda_tensor& weight, const kda_tensor& bias,
                           const kda_tensor& cu_seqlens, Tensors& tensors) {
  check_all_absent_are_empty({{"x", &x}, {"weight", &weight}, {"bias", &bias}, {"cu_seqlens", &cu_seqlens}});
  if (x.ndim != 3) invalid("x: expected 3 dimensions [B,T,D], got ", x.ndim);
  if (weight.ndim != 2) invalid("weight: expected 2 dimensions [D,W], got ", weight.ndim);
  ConvDims d{x.shape[0], x.shape[1], 0, x.shape[2], weight.shape[1], false};
  if (d.D < 1) invalid("x: expected D >= 1, got ", d.D);
  if (d.W < 2 || d.W > kMaxConvWidth) invalid("weight: expected W in 2..", kMaxConvWidth, ", got ", d.W);
  tensors.check_storage("x", x, kFloats, false);
  tensors.check("weight", weight, {d.D, d.W}, 2, kFloats, false, " ([D,W], D like x)");
  if (present(bias)) tensors.check("bias", bias, {d.D}, 1, kFloats, false, " ([D] of x)");
  Dims packing{};
  packing.B = d.B;
  check_packing(cu_seqlens, packing, tensors);
  d.N = packing.N;
  if (!product_within(kMaxChannels, {d.B, d.T, d.D}) || !product_within(kMaxChannels, {d.N, d.D}))
    invalid("x: expected B T D and N D of at most 2^48, got shape ", shape_text(x.shape, x.ndim), " and N = ", d.N);
  return d;
}

// y, dy and dx: like x, or float64 for the oracle.
void check_conv_rows(const char* name, const kda_tensor& t, const kda_tensor& x, Tensors& tensors, bool output) {
  const unsigned dtypes = x.dtype == KDA_F64 ? kFloats : bit(x.dtype) | bit(KDA_F64);
  tensors.check(name, t, {x.shape[0], x.shape[1], x.shape[2]}, 3, dtypes, output, " like x");
}

void check_conv_state(const char* name, const kda_tensor& t, int64_t rows, const ConvDims& d, Tensors& tensors,
                      bool output, const char* like) {
  tensors.check_any_stride(name, t, {rows, d.D, d.W - 1}, 3, kFloats, output, like);
}

int64_t slots_of(const char* name, const kda_tensor& t) {
  if (t.ndim != 3) invalid(name, ": expected 3 dimensions [slots,D,W-1], got ", t.ndim);
  return t.shape[0];
}

}  // namespace

ConvProblem validate(const kda_conv_args* raw) {
  const kda_conv_args a = copy_args(raw, offsetof(kda_conv_args, out_state_indices));
  check_exec(a.exec);
  Tensors tensors;
  ConvDims d = check_conv_inputs(a.x, a.weight, a.bias, a.cu_seqlens, tensors);
  check_all_absent_are_empty({{"initial_state", &a.initial_state},
                              {"final_state", &a.final_state},
                              {"state_indices", &a.state_indices},
                              {"has_initial_state", &a.has_initial_state},
                              {"out_state_indices", &a.out_state_indices},
                              {"checkpoints", &a.checkpoints},
                              {"y", &a.y}});
  const bool pool = present(a.state_indices), apart = present(a.out_state_indices);
  if (pool && !present(a.initial_state) && !present(a.final_state))
    invalid("state_indices: expected a pool initial_state or final_state with it, got neither");
  if (apart && !present(a.final_state)) invalid("out_state_indices: expected a pool final_state with it, got none");
  for (const auto& [name, t] : {std::pair{"initial_state", &a.initial_state}, {"final_state", &a.final_state}}) {
    const bool out = t == &a.final_state, slots = pool || (out && apart);
    if (!present(*t)) continue;
    check_conv_state(name, *t, slots ? slots_of(name, *t) : d.N, d, tensors, out,
                     slots ? " ([slots,D,W-1])" : " ([N,D,W-1])");
  }
  if (apart) tensors.check_any_stride("out_state_indices", a.out_state_indices, {d.N}, 1, kIndices, false, " ([N])");
  else if (pool && present(a.initial_state) && present(a.final_state) &&
           a.initial_state.shape[0] != a.final_state.shape[0])
    invalid("final_state: expected as many slots as initial_state, ", a.initial_state.shape[0], ", got ",
            a.final_state.shape[0]);
  if (pool) tensors.check_any_stride("state_indices", a.state_indices, {d.N}, 1, kIndices, false, " ([N])");
  if (present(a.has_initial_state)) {
    if (!present(a.initial_state)) invalid("has_initial_state: expected initial_state with it, got none");
    tensors.check_any_stride("has_initial_state", a.has_initial_state, {d.N}, 1, bit(KDA_BOOL), false, " ([N])");
  }
  if (a.first_valid_slot < 0) invalid("first_valid_slot: expected >= 0, got ", a.first_valid_slot);
  check_checkpoints(a.checkpoints, a.checkpoint_slots, a.checkpoint_offset, a.checkpoint_every, d.N, tensors);
  if (present(a.checkpoints))
    check_conv_state("checkpoints", a.checkpoints, slots_of("checkpoints", a.checkpoints), d, tensors, true,
                     " ([slots,D,W-1])");
  if (a.reserved) invalid("args.reserved: expected 0, got ", a.reserved);
  check_conv_rows("y", a.y, a.x, tensors, true);
  check_memory(tensors, a.exec, d);
  return {d, a};
}

ConvBackwardProblem validate(const kda_conv_backward_args* raw) {
  const kda_conv_backward_args a = copy_args(raw, sizeof(kda_conv_backward_args));
  check_exec(a.exec);
  Tensors tensors;
  ConvDims d = check_conv_inputs(a.x, a.weight, a.bias, a.cu_seqlens, tensors);
  check_all_absent_are_empty({{"initial_state", &a.initial_state},
                              {"dy", &a.dy},
                              {"d_final_state", &a.d_final_state},
                              {"dx", &a.dx},
                              {"dweight", &a.dweight},
                              {"dbias", &a.dbias},
                              {"d_initial_state", &a.d_initial_state}});
  const char* like = " ([N,D,W-1])";
  if (present(a.initial_state)) check_conv_state("initial_state", a.initial_state, d.N, d, tensors, false, like);
  check_conv_rows("dy", a.dy, a.x, tensors, false);
  if (present(a.d_final_state)) check_conv_state("d_final_state", a.d_final_state, d.N, d, tensors, false, like);
  if (present(a.dx)) check_conv_rows("dx", a.dx, a.x, tensors, true);
  if (present(a.dweight)) tensors.check("dweight", a.dweight, {d.D, d.W}, 2, kSingles, true, " like weight");
  if (present(a.dbias)) {
    if (!present(a.bias)) invalid("dbias: expected bias with it, got none");
    tensors.check("dbias", a.dbias, {d.D}, 1, kSingles, true, " like bias");
  }
  if (present(a.d_initial_state)) check_conv_state("d_initial_state", a.d_initial_state, d.N, d, tensors, true, like);
  if (a.reserved) invalid("args.reserved: expected 0, got ", a.reserved);
  check_memory(tensors, a.exec, d);
  return {d, a};
}

bool has_f64(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  return any_f64({&a.x, &a.weight, &a.bias, &a.initial_state, &a.final_state, &a.checkpoints, &a.y});
}
bool has_f64(const ConvBackwardProblem& p) {
  const kda_conv_backward_args& a = p.args;
  return any_f64({&a.x, &a.weight, &a.bias, &a.initial_state, &a.dy, &a.d_final_state, &a.dx, &a.dweight, &a.dbias,
                  &a.d_initial_state});
}

void validate_data(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  check_cu_seqlens(a.cu_seqlens, p.T);
  if (present(a.state_indices))
    check_slots("state_indices", a.state_indices, a.first_valid_slot,
                present(a.initial_state) ? a.initial_state.shape[0] : a.final_state.shape[0],
                present(a.final_state) && !present(a.out_state_indices));
  if (present(a.out_state_indices))
    check_written_slots({a.state_indices, a.out_state_indices, a.has_initial_state, p.N, a.first_valid_slot,
                         a.final_state.shape[0],
                         present(a.initial_state) && a.initial_state.data == a.final_state.data});
  const auto in_pool = [&](const kda_tensor& pool) { return present(pool) && a.checkpoints.data == pool.data; };
  check_checkpoints_data(a.checkpoints, a.checkpoint_slots, a.checkpoint_offset,
                         {a.state_indices, a.out_state_indices, a.has_initial_state, p.N, a.first_valid_slot, 0, false},
                         in_pool(a.initial_state), in_pool(a.final_state));
}
void validate_data(const ConvBackwardProblem& p) { check_cu_seqlens(p.args.cu_seqlens, p.T); }

}  // namespace kda
