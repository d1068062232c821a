// Pieces of sequences: long sequences are mapped in pieces of `tokens` tokens each, all at once, whose maps are then
// merged from the first to the last. Pieces count from where their sequence begins, so no bit depends on the
// rest of the call.
//
// Pieces of all sequences are rows of one tensor, numbered so that those of the sequences before need not be counted:
// with cu_seqlens, those of sequence n, which begins at token t0, have numbers from t0 / tokens + n on. Some numbers
// have no piece, or an empty one.
#pragma once
#include "contract/problem.h"

namespace kda::cuda {

struct Pieces {
  static constexpr unsigned kTokens = 2048;  // of a piece, for few heads
  Lengths cu_seqlens;
  unsigned N, T, tokens;
  bool varlen;

  explicit Pieces(const Dims& d, const kda_inputs& in, unsigned tokens = kTokens)
      : cu_seqlens(lengths_of(in.cu_seqlens)),
        N(static_cast<unsigned>(d.N)),
        T(static_cast<unsigned>(d.T)),
        tokens(tokens),
        varlen(d.varlen) {}
  // Numbers of pieces: of a row of tokens where there are no cu_seqlens.
  static int64_t numbers(const Dims& d, unsigned tokens) {
    return d.varlen ? d.T / tokens + d.N : divide_up(d.T, tokens);
  }

  // Where sequence n begins or, for n = N, the last one ends.
  KDA_BOTH unsigned start(unsigned n) const { return static_cast<unsigned>(within(int_at(cu_seqlens, n), 0, T)); }
  KDA_BOTH unsigned first(unsigned n) const { return varlen ? start(n) / tokens + n : 0; }
  KDA_BOTH unsigned count(unsigned n) const {  // at least 1: a piece without tokens
    const auto length = static_cast<unsigned>(varlen ? packed_at(cu_seqlens, T, n).length : T);
    return length > tokens ? (length + tokens - 1) / tokens : 1;
  }
  // The token where piece `number` begins, and the one before ends.
  KDA_BOTH unsigned token(unsigned number) const {
    if (!varlen) return static_cast<unsigned>(within(int64_t{number} * tokens, 0, T));
    unsigned n = 0;
    for (unsigned count = N; count > 1;) {  // the last sequence whose first number is `number` or less
      const unsigned half = count / 2;
      if (first(n + half) <= number) n += half, count -= half;
      else count = half;
    }
    const Sequence s = packed_at(cu_seqlens, T, n);
    const int64_t before = number > first(n) ? number - first(n) : 0;
    return static_cast<unsigned>(within(s.t0 + before * tokens, s.t0, s.t0 + s.length));
  }
};

// Merges the maps of pieces, M [numbers,HV,K,K] and b [numbers,HV,..], to those of sequences, `to` [N,HV,..]: the b of
// sequences, or in reverse their d; without b their M, whose layout is K-first. Takes dims.K, .V, .HV and .N from p.
struct Fold {
  kda_tensor M, b, to;
  int32_t state_layout;
  bool reverse;     // from the last to the first
  bool transposed;  // M^T maps
};
void merge_pieces(const SegmentMapProblem& p, const Pieces& pieces, const Fold& fold);

}  // namespace kda::cuda
