// What validate() and validate_data() of several operators share.
#pragma once
#include <cmath>

#include "checks.h"
#include "problem.h"
#include "sizes.h"

namespace kda {

void check_exec(const kda_exec& e);
void check_gate(int32_t form, float lower_bound, bool has_A_log, bool has_dt_bias, int32_t first_form);

// Checks the bounds of sizes.h, once B, T, N and HV are known. `name` is a tensor that has them.
void check_sizes(const char* name, const Dims& d, int64_t layers = 1);
// Checks the memory that tensors share, with each other or with the workspace. Sets d.idle.
void check_memory(const Tensors& tensors, const kda_exec& exec, Dims& d, int64_t layers = 1);
void check_memory(const Tensors& tensors, const kda_exec& exec, ConvDims& d);

// Checks cu_seqlens, and sets d.varlen and d.N.
void check_packing(const kda_tensor& cu_seqlens, Dims& d, Tensors& tensors);

// Checks the inputs. Returns the sizes of the call, from q, v and cu_seqlens.
Dims check_inputs(const kda_inputs& in, Tensors& tensors);

// The same for operators that can convolve raw rows. Without conv.x it does as above. With conv.x it gives in.q, in.k
// and in.v the shapes and strides that slices of the convolved rows will have, but no data: see slice_convolved.
Dims check_inputs(kda_inputs& in, const kda_conv_inputs& conv, const kda_tensor& o, bool state_out, Tensors& tensors);

// [rows,HV,V,K] or [rows,HV,K,V].
void check_state(const char* name, const kda_tensor& t, int64_t rows, const Dims& d, const kda_inputs& in,
                 Tensors& tensors, bool output, unsigned dtypes = kStates);
int64_t rows_of(const char* name, const kda_tensor& t);
// A pool has any number of slots. States are a pool if there are state_indices, or if the operator has other indices
// (`pool`); hT is one of its own with out_state_indices.
void check_states(const kda_states& s, const kda_tensor& out_state_indices, const Dims& d, const kda_inputs& in,
                  Tensors& tensors, bool pool = false);
void check_states(const kda_states& s, const Dims& d, const kda_inputs& in, Tensors& tensors);

template <class P, class Args>
P with_dims(const Dims& d, const Args& args) {
  P p{};
  static_cast<Dims&>(p) = d;
  p.args = args;
  if (p.args.in.scale == 0) p.args.in.scale = 1.0f / std::sqrt(static_cast<float>(d.K));
  return p;
}

bool any_f64(std::initializer_list<const kda_tensor*> tensors);
bool any_f64(const kda_inputs& in);
bool any_f64(const kda_conv_inputs& conv);
bool any_f64(const kda_norm_inputs& norm);

// checkpoint_slots [N,M], checkpoint_offset [N] and checkpoint_every, which go with `checkpoints`.
void check_checkpoints(const kda_tensor& checkpoints, const kda_tensor& slots, const kda_tensor& offset, int32_t every,
                       int64_t N, Tensors& tensors);

// The norm of the output `o`, which was checked before.
void check_norm(const kda_norm_inputs& norm, const kda_tensor& o, Tensors& tensors);

// ---- data, on the CPU ----

void check_cu_seqlens(const kda_tensor& cu_seqlens, int64_t T);
void check_cu_seqlens(const Dims& d, const kda_inputs& in);
// An i64 index fits in 32 bits, of which alone implementations read.
void check_width(const char* name, const kda_tensor& indices);
// Live slots lie inside the pool and, if `once`, are all different, but for those of padding: of rows n that are not
// live in `requests`.
void check_slots(const char* name, const kda_tensor& indices, int64_t first_valid, int64_t slots, bool once = true,
                 const kda_states* requests = nullptr);
// Slots to read and slots to write. `read` and `written` have the same memory if `one_pool`.
struct SlotPairs {
  const kda_tensor &read, &written;  // [N]; the first may be absent: row n
  const kda_tensor& has_initial;     // [N], or absent
  int64_t N, first_valid, slots;     // slots: of the pool that is written
  bool one_pool;
};
// No live sequence writes a slot that another one writes or, in one pool, reads.
void check_written_slots(const SlotPairs& pairs);
// What a call keeps in `checkpoints`; in the pool of `pairs` if `one_pool`: then in slots that no sequence reads or
// writes.
void check_checkpoints_data(const kda_tensor& checkpoints, const kda_tensor& slots, const kda_tensor& offset,
                            const SlotPairs& pairs, bool reads_pool, bool writes_pool);
void check_states_data(const Dims& d, const kda_inputs& in, const kda_states& s);
// The same for operators with slots to write. `from_h0`: sequences start from h0, at state_indices.
void check_states_data(const Dims& d, const kda_inputs& in, const kda_states& s, const kda_tensor& out_state_indices,
                       bool from_h0 = true);
void check_conv_data(const kda_conv_inputs& conv, const kda_states& states);

}  // namespace kda
