// Indices of either width. Past the checks, all implementations see i32: an i64 index is read as its lower half, an i32
// of twice the stride. So kernels have one form, and no call pays for a width that it does not use.
#pragma once
#include <bit>
#include <initializer_list>

#include "problem.h"

namespace kda {

static_assert(std::endian::native == std::endian::little, "the lower half of an i64 comes first");

inline void narrow(std::initializer_list<kda_tensor*> indices) {
  for (kda_tensor* t : indices) {
    if (!present(*t) || t->dtype != KDA_I64) continue;
    t->dtype = KDA_I32;
    for (int i = 0; i < t->ndim; ++i) t->stride[i] *= 2;
  }
}

template <class P>
void narrow_indices(P&) {}
inline void narrow_indices(ForwardProblem& p) {
  kda_forward_args& a = p.args;
  narrow({&a.states.state_indices, &a.out_state_indices, &a.checkpoint_slots, &a.checkpoint_offset});
}
inline void narrow_indices(DecodeProblem& p) {
  kda_decode_args& a = p.args;
  narrow({&a.states.state_indices, &a.out_state_indices, &a.conv.indices, &a.snapshot_slots, &a.accepted});
}
inline void narrow_indices(VerifyProblem& p) {
  kda_verify_args& a = p.args;
  narrow({&a.states.state_indices, &a.conv.indices, &a.records.indices, &a.parents});
}
inline void narrow_indices(FlushProblem& p) {
  kda_flush_args& a = p.args;
  narrow({&a.state_indices, &a.records.indices, &a.accept_len, &a.parents, &a.conv_indices});
}
inline void narrow_indices(FlushVerifyProblem& p) {
  kda_flush_verify_args& a = p.args;
  narrow({&a.states.state_indices, &a.conv.indices, &a.last.indices, &a.records.indices, &a.accept_len, &a.parents,
          &a.last_parents});
}
inline void narrow_indices(ConvProblem& p) {
  kda_conv_args& a = p.args;
  narrow({&a.state_indices, &a.out_state_indices, &a.checkpoint_slots, &a.checkpoint_offset});
}

}  // namespace kda
