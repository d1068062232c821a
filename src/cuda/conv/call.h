// A convolution to launch: kda_conv, or the one in front of decode.
#pragma once
#include "contract/conv.h"
#include "cuda/runtime.h"

namespace kda::cuda {

// Which slots final states go to. In front of decode they take the place of the initial ones, and a request that is
// padding or has no tokens leaves its state alone: other requests may have the same slot.
struct FinalSlots {
  int64_t slots = 0;  // of the pool; 0: no final states are wanted
  Index out_state_indices{};
  int64_t first_valid = 0;
  bool some_stay = false;  // may there be such requests?
  StateSlots requests{};   // of decode
  IndexRows snapshot_slots{};

  // The slot for the state after the tokens of a sequence; -1: it is not stored.
  KDA_BOTH int64_t slot(const Sequence& s) const {
    if (slots == 0) return -1;
    const int64_t slot = final_row(out_state_indices, first_valid, slots, s.n, s.slot);
    return slot < slots && (!some_stay || (s.length > 0 && is_live(s.n))) ? slot : -1;
  }

 private:
  KDA_BOTH bool is_live(int64_t n) const {
    Sequence request{.n = n, .live = true};
    find_states(request, requests, {}, slot_of(requests.indices, n));
    find_padding(request, requests, snapshot_slots.row(n));
    return request.live;
  }
};
inline int64_t count_slots_of(const kda_tensor& states) { return present(states) ? states.shape[0] : 0; }

struct FinalStates {
  kda_tensor states;
  FinalSlots slots;
};

struct ConvCall {
  const kda_exec& exec;
  Conv conv;
  FinalStates final_states;
};

void launch_convolution(const ConvCall& call);
// Why a call of these sizes has more blocks than a grid holds, or nullptr.
const char* convolution_why_not(const ConvDims& d);

}  // namespace kda::cuda
