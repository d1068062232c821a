// Legal calls without what only some implementations save or take, for tests of all of them.
#pragma once
#include "contract.h"

namespace kda::test {

inline void spare(kda_forward_args& a) {
  a.Aqk = a.Akk = a.checkpoints = a.checkpoint_slots = {}, a.checkpoint_every = 0;
}
inline void spare(kda_backward_args& a) { a.h = a.v_new = a.Aqk = a.Akk = {}, a.h_every = 0; }
template <class Args>
void spare(Args&) {}

}  // namespace kda::test
