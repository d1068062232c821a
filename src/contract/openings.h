// Where the chunks of a request are that resumes, and which calls have chunks that end early.
//
// Chunks of a call with checkpoint_offset end at multiples of kChunk tokens of the request, not of the call, so
// checkpoints fall between them. Where a request resumes within a chunk, its first tokens are what is left of that: the
// opening. It is computed as a call of so many tokens would be, and what is behind it as another call.
#pragma once
#include "contract/problem.h"

namespace kda {

// Returns how many tokens of the chunk in which sequence n begins came before the call. 0: there is no opening.
KDA_BOTH inline int64_t begun_tokens(const Index& offset, int64_t n) {
  return offset.data ? within(offset[n], 0, INT32_MAX) % kChunk : 0;
}
// May sequences have openings?
inline bool has_openings(const kda_forward_args& a) { return present(a.checkpoint_offset); }

// May there be checkpoints within chunks?
inline bool keeps_within_chunks(const kda_forward_args& a) {
  return present(a.checkpoints) && a.checkpoint_every % kChunk != 0;
}
// Or other states within chunks? Rows of h are at multiples of kChunk tokens of the call.
inline bool cuts_chunks(const kda_forward_args& a) {
  return keeps_within_chunks(a) || (has_openings(a) && present(a.h));
}

}  // namespace kda
