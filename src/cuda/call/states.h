// What kernels of kda_forward share: where states come from, and which of them are kept.
#pragma once
#include "contract/openings.h"
#include "cuda/call/view.h"
#include "cuda/call/warp.h"

namespace kda::cuda {

// Where states come from, and where they go.
enum Kept { kFinal, kCheckpoint, kBefore };  // after the last token, after chosen ones, before chosen chunks
struct States {
  TypedView h0, kept[3];
  explicit States(const kda_forward_args& a)
      : h0(view_of(a.states.h0)), kept{view_of(a.states.hT), view_of(a.checkpoints), view_of(a.h)} {}
};

// Why kernels that work in chunks of 64 tokens, or of a part of 64, do not keep a call's states; or nullptr.
inline const char* checkpoints_why_not(const kda_forward_args& a) {
  if (keeps_within_chunks(a)) return "keeps checkpoints 64 tokens apart, or a multiple of that";
  if (has_openings(a) && (present(a.h) || present(a.v_new))) return "saves no h and no v_new with checkpoint_offset";
  return nullptr;
}

// Row of h where sequence n begins: the same in all threads.
__device__ inline unsigned first_h_row(const ForwardProblem& p, unsigned n) {
  const int64_t every = p.args.h_every;
  if (!p.varlen) return n * static_cast<unsigned>(h_rows(p.T, every));
  unsigned rows = 0;
  for (unsigned m = threadIdx.x % 32; m < n; m += 32)
    rows += static_cast<unsigned>(h_rows(packed_at(p.args.in.cu_seqlens, p.T, m).length, every));
  return __reduce_add_sync(kAll, rows);
}

// Row of `checkpoints` for the state after t tokens of sequence n, as in checkpoint_row(), by 32 bits; -1: nowhere.
__device__ inline int64_t checkpoint_row_of(const kda_forward_args& a, unsigned n, unsigned t) {
  const auto every = static_cast<unsigned>(a.checkpoint_every);
  const Index offset = index_of(a.checkpoint_offset);
  const unsigned before = offset.data ? static_cast<unsigned>(max(offset[n], 0)) % every : 0;
  const unsigned number = (before + t) / every;
  if (number == 0 || before + t != number * every || number > a.checkpoint_slots.shape[1]) return -1;
  const int64_t slot = index_at(a.checkpoint_slots, n, number - 1);
  return slot >= a.states.first_valid_slot && slot < a.checkpoints.shape[0] ? slot : -1;
}

// Row of `to` where the state after t tokens of a sequence goes; -1: nowhere.
__device__ inline int64_t row_of(Kept to, const ForwardProblem& p, const Sequence& s, unsigned t, unsigned first_h) {
  const kda_forward_args& a = p.args;
  const bool last = t == s.length;
  if (to == kFinal) return last ? final_row(a.out_state_indices, a.states, s) : -1;
  if (to == kBefore) {
    const auto every = static_cast<unsigned>(a.h_every < INT32_MAX ? a.h_every : INT32_MAX);
    const unsigned chunk = t / unsigned{kChunk};
    if (last || t % unsigned{kChunk} != 0 || (every != 1 && chunk % every != 0)) return -1;
    const int64_t row = int64_t{first_h} + (every == 1 ? chunk : chunk / every);
    return row < a.h.shape[0] ? row : -1;
  }
  return checkpoint_row_of(a, static_cast<unsigned>(s.n), t);
}

}  // namespace kda::cuda
