// The causal convolution: which rows belong to a sequence, which of them a token's taps read, and how far states
// advance. Shared by all implementations, on the host and in kernels.
#pragma once
#include <algorithm>
#include <cstdint>

#include "contract/drafts.h"

namespace kda {

// The inputs of a sequence are xx = state ++ x: keep = W-1 rows of state, oldest first, then its tokens. Token t is
// row t + keep. The row before a token is that of the token before it or, with parents ([N,T] i32), that of its
// parent. A step past the root of a tree leads into the state, newest row first.
KDA_BOTH inline int64_t row_before(const kda_tensor& parents, int64_t keep, int64_t n, int64_t row) {
  const int64_t t = row - keep;
  if (t < 0 || !present(parents) || t >= parents.shape[1]) return row - 1;
  const int64_t parent = int_at(parents, n, t);
  return parent >= t ? row - 1 : (parent < 0 ? -1 : parent) + keep;
}

// Where the tokens of sequence n are in x [B,T,D].
KDA_BOTH inline Sequence span_of(const kda_tensor& cu_seqlens, const kda_tensor& x, int64_t n) {
  if (present(cu_seqlens)) return packed_at(cu_seqlens, x.shape[1], n);
  return {n, n, 0, x.shape[1], n, true, true};
}

// Rows of xx, the oldest first.
struct ConvRows {
  int64_t keep;
  int64_t at[kMaxConvWidth];  // -1: none
};
// `count` rows along the path that ends with `row`. The W rows of token t's taps end with row t + keep, the W-1 rows of
// the state after m tokens with row m-1 + keep.
KDA_BOTH inline ConvRows rows_until(const kda_tensor& parents, int64_t keep, int64_t n, int64_t row, int64_t count) {
  ConvRows rows{keep, {}};
  for (int i = kMaxConvWidth - 1; i >= 0; --i) {
    const bool wanted = i >= kMaxConvWidth - count;
    rows.at[i] = wanted ? row : -1;
    if (wanted && i > 0) row = row_before(parents, keep, n, row);
  }
  return rows;
}

// Which slots sequences have. Kernels for few tokens are given this instead of tensors (problem.h).
struct ConvSlots {
  Index indices;
  Flags has_state;
  int64_t first, end;  // slots outside are padding
  int64_t stored;      // slots of the pool that is read; 0: none is

  // Fills in the slot of a sequence, whether it is padding, whether its state is read.
  KDA_BOTH void place(Sequence& s) const {
    s.slot = slot_of(indices, s.n);
    s.live = !indices.data || (s.slot >= first && s.slot < end);
    s.initial = s.slot >= 0 && s.slot < stored && (!has_state.data || has_state[s.n]);
  }
};

// A convolution of kda_conv, or of decode and verify with raw rows. Sequence n has slot indices[n] (or n) of state.
// Without a state there, or with has_state[n] = 0, it starts from zeros.
struct Conv : kda_conv_inputs {
  kda_tensor cu_seqlens, has_state;
  kda_tensor parents;  // absent: a chain
  kda_tensor y;
  bool silu;
  int64_t first_slot, end_slot;                   // slots outside are padding: y is zeroed
  int64_t x_end = INT64_MAX, x1_end = INT64_MAX;  // channels from there on are in x1, and in x2
  kda_tensor x1{}, x2{};                          // channel d of y is d here, too: see shifted()

  // The tensor that has channel d of x.
  KDA_BOTH const kda_tensor& rows_of(int64_t d) const { return d < x_end ? x : d < x1_end ? x1 : x2; }
  KDA_BOTH int64_t tokens() const { return x.shape[0] * x.shape[1]; }
  KDA_BOTH int64_t channels() const { return weight.shape[0]; }
  KDA_BOTH int64_t width() const { return weight.shape[1]; }
  KDA_BOTH int64_t sequences() const { return present(cu_seqlens) ? cu_seqlens.shape[0] - 1 : x.shape[0]; }

  // Where the tokens of sequence n are, and nothing else.
  KDA_BOTH Sequence span(int64_t n) const { return span_of(cu_seqlens, x, n); }
  KDA_BOTH ConvSlots slots() const {
    const int64_t stored = present(state) ? state.shape[0] : 0;
    return {index_of(indices), strided<const uint8_t>(has_state), first_slot, end_slot, stored};
  }
  KDA_BOTH void place(Sequence& s) const { slots().place(s); }
  KDA_BOTH Sequence sequence(int64_t n) const {
    Sequence s = span(n);
    place(s);
    return s;
  }
  // The packed sequence of a token; sequences() if it belongs to none.
  KDA_BOTH int64_t packed_sequence_of(int64_t token) const {
    int64_t lo = 0, hi = sequences();  // the first whose end lies beyond the token
    while (lo < hi) {
      const int64_t n = (lo + hi) / 2;
      if (int_at(cu_seqlens, n + 1) > token) hi = n;
      else lo = n + 1;
    }
    return lo;
  }
  // The end of the tokens that belong to a sequence.
  KDA_BOTH int64_t end() const {
    const int64_t T = x.shape[1];
    return present(cu_seqlens) ? std::clamp<int64_t>(int_at(cu_seqlens, sequences()), 0, T) : tokens();
  }
};

// The tensor as if its channels were numbered from `first` on.
inline kda_tensor shifted(kda_tensor t, int64_t first) {
  t.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) - first * dtype_size(t.dtype));
  return t;
}
inline Conv with_parts(Conv c, const kda_tensor& x1, const kda_tensor& x2) {
  if (!present(x1)) return c;
  c.x_end = c.x.shape[2], c.x1_end = c.x_end + x1.shape[2];
  c.x1 = shifted(x1, c.x_end);
  if (present(x2)) c.x2 = shifted(x2, c.x1_end);
  return c;
}

inline Conv conv_of(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  const kda_tensor& pool = present(a.initial_state) ? a.initial_state : a.final_state;
  const Conv c = {{a.x, a.weight, a.bias, a.initial_state, a.state_indices},
                  a.cu_seqlens,
                  a.has_initial_state,
                  {},
                  a.y,
                  a.silu != 0,
                  a.first_valid_slot,
                  pool.shape[0]};
  return with_parts(c, a.x1, a.x2);
}

inline Conv conv_of(const ConvBackwardProblem& p) {
  const kda_conv_backward_args& a = p.args;
  const Conv c = {{a.x, a.weight, a.bias, a.initial_state, {}}, a.cu_seqlens, {}, {}, {}, a.silu != 0, 0, 0};
  return with_parts(c, a.x1, a.x2);
}

// The convolution in front of decode and verify. No slot is padding.
inline Conv conv_of(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& parents,
                    const kda_tensor& y) {
  return {in, cu_seqlens, {}, parents, y, true, INT64_MIN, INT64_MAX};
}

// Tokens first .. end-1 of the call, cut into pieces of sequences. After each next() that returns true, the piece is
// tokens a .. b-1 of s.
struct ConvPieces {
  const Conv& c;
  int64_t token, end, n;
  Sequence s{};
  int64_t a = 0, b = 0;

  // Token `first` belongs to sequence n.
  KDA_BOTH ConvPieces(const Conv& c, int64_t first, int64_t end, int64_t n) : c(c), token(first), end(end), n(n) {}
  KDA_BOTH bool next() {
    while (n < c.sequences() && token < end) {
      s = c.sequence(n++);
      const int64_t begin = s.b * c.x.shape[1] + s.t0;  // of the sequence, among all tokens
      const int64_t from = std::max(token, begin), stop = std::min(end, begin + s.length);
      if (from >= stop) continue;
      a = from - begin, b = stop - begin, token = stop;
      return true;
    }
    return false;
  }
};

// ---- the state of a request, once its tokens are decoded or its drafts accepted ----

// The tokens by which the state of request n advances, in b, t0 and length, and the slot of that state. There is
// nothing to do without tokens, or if the slot is not in the pool.
KDA_BOTH inline Sequence roll_of(const DecodeProblem& p, int64_t n) {
  Sequence s = sequence_at(p, n);
  s.slot = slot_of(p.args.conv.indices, n);
  if (!s.live) s.length = 0;
  return s;
}
KDA_BOTH inline Sequence roll_of(const FlushProblem& p, int64_t n) {
  const Request r = request_of(p, n);
  const int64_t accepted = r.s.live ? r.newest + 1 - r.flush.committed : 0;
  return {n, n, 0, accepted, slot_of(p.args.conv_indices, n), r.s.live, true};
}
KDA_BOTH inline Sequence roll_of(const FlushVerifyProblem& p, int64_t n) {
  const Sequence s = sequence_at(p, p.args.in, p.args.states, n);
  const int64_t accepted = s.live ? commit_of(p, n, s.length).accepted : 0;
  return {n, n, 0, accepted, slot_of(p.args.conv.indices, n), s.live, true};
}

}  // namespace kda
