// What validate() and validate_data() of several operators share.
#pragma once
#include <cmath>

#include "contract/problem.h"
#include "contract/sizes.h"
#include "contract/tensors.h"

namespace kda {

// Checks gate_form, lower_bound, A_log and dt_bias, of kda_inputs or a gate operator.
template <class In>
void check_gate(const In& in, Tensors& tensors);

void check_scale(float scale);
// Checks the bounds of sizes.h, once B, T, N and HV are known. `name` is a tensor that has them.
void check_sizes(const char* name, const Dims& d, int64_t layers = 1);
// Checks the memory that tensors share, with each other or with the workspace. Sets d.idle.
void check_memory(const Tensors& tensors, const kda_exec& exec, Dims& d, int64_t layers = 1);
void check_memory(const Tensors& tensors, const kda_exec& exec, ConvDims& d);

// Checks cu_seqlens and sets N. Returns the sizes that are known. (Those of heads may be of no tensor of a stage.)
Dims check_packing(const kda_tensor& cu_seqlens, Tensors& tensors);

// Checks the inputs. Returns the sizes of the call, from q, v and cu_seqlens.
Dims check_inputs(const kda_inputs& in, Tensors& tensors);

// The same for operators that can convolve raw rows. Without conv.x it does as above. With conv.x it gives in.q, in.k
// and in.v the shapes and strides that slices of the convolved rows will have, but no data: see slice_convolved.
Dims check_inputs(kda_inputs& in, const kda_conv_inputs& conv, const kda_tensor& o, Tensors& tensors);

// States that a call reads and writes: those of kda_states, or of a convolution.
struct StatePair {
  const kda_tensor &read, &written, &indices, &has_initial;
  const kda_tensor* out;  // slots to write; nullptr: the operator has none
  const int32_t& first_valid;
};
inline StatePair states_of(const kda_states& s, const kda_tensor* out = nullptr) {
  return {s.h0, s.hT, s.state_indices, s.has_initial_state, out, s.first_valid_slot};
}
inline StatePair states_of(const kda_conv_args& a) {
  return {a.initial_state,     a.final_state,        a.state_indices,
          a.has_initial_state, &a.out_state_indices, a.first_valid_slot};
}
// A pool has any number of slots. States are a pool if there are indices, or if the operator has other ones (`pool`);
// those that are written are one of their own with slots to write.
void check_state_pair(const StatePair& s, Tensors& tensors, bool pool = false);
// The same, and states.reserved.
void check_states(const kda_states& s, const kda_tensor* out, Tensors& tensors, bool pool = false);

template <class P, class Args>
P with_dims(const Dims& d, const Args& args) {
  P p{};
  static_cast<Dims&>(p) = d;
  p.args = args;
  if (p.args.in.scale == 0) p.args.in.scale = 1.0f / std::sqrt(static_cast<float>(d.K));
  return p;
}

// checkpoints, checkpoint_slots [N,M], checkpoint_offset [N] and checkpoint_every.
template <class Args>
void check_checkpoints(const Args& a, Tensors& tensors);

// The norm of the output, which was checked before.
void check_norm(const kda_norm_inputs& norm, Tensors& tensors);

// ---- data, on the CPU ----

void check_cu_seqlens(const kda_tensor& cu_seqlens, int64_t T);
void check_cu_seqlens(const Dims& d, const kda_inputs& in);
// An i64 index fits in 32 bits, of which alone implementations read.
void check_width(const char* name, const kda_tensor& indices);
// Live slots lie inside the pool and, if `once`, are all different, but for those of padding: of rows n that are not
// live in `requests`.
void check_slots(const char* name, const kda_tensor& indices, int64_t first_valid, int64_t slots, bool once = true,
                 const kda_states* requests = nullptr);
// Live slots to read and to write are in their pools. No sequence writes a slot that another one writes or, in one
// pool, reads. `from_read`: sequences start from there, at their indices.
void check_states_data(const StatePair& s, int64_t N, bool from_read = true);
// What a call keeps in its checkpoints: in the pool of its states only in slots that no sequence reads or writes.
template <class Args>
void check_checkpoints_data(const Args& a, const StatePair& states, int64_t N);
void check_conv_data(const kda_conv_inputs& conv, const kda_states& states);

}  // namespace kda
