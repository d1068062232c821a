// What the two kernels of cuda_prefill_chunk share: images of chunks in the workspace, and which chunks a pair of
// launches takes.
#pragma once
#include "contract/openings.h"
#include "cuda/call/token.h"

namespace kda::cuda {

constexpr int kRows = 32;  // tokens of a chunk here: half of one of the contract
static_assert(kChunk % kRows == 0, "states are kept between chunks");

// All that the scan needs of a chunk of one value head, in the order in which lanes load it as operands (B of
// m16n8k16): lane 4 i + j of a warp loads 16 bytes of each 512. These hold four 8x8 matrices, in f16:
//   kG, qG  [block of 8 tokens][32 channels][lane]: token i, channels 4 j .. 4 j + 3 of the first 16, then of the
//           others
//   kg      [block of 8 tokens][32 channels][lane]: tokens 2 j and 2 j + 1, channel 4 (i / 2) + i % 2 of the first 16,
//           that + 2, and the same of the others
//   T, Aqk  [block of 8 tokens][lane]: token i, earlier tokens 2 j and 2 j + 1 of blocks 0, 1, 2, 3
// kG is negated, and T has beta inside. Aqk and qG have no scale: they are computed from q made about as long as 1,
// and `scale` of each token has the rest.
//
// A mirrored image, for the reverse scan, has every 8x8 matrix of kG, qG, kg, T and Aqk transposed. kG and qG then
// have the layout of kg above, kg has that of kG and qG, and T and Aqk have
//   T, Aqk  [block of 8 tokens][lane]: token i, later tokens 2 j and 2 j + 1 of blocks 0, 1, 2, 3
template <int kK>
struct Image {
  static constexpr int kOperand = kRows * kK * 2, kScores = kRows * kRows * 2;
  static constexpr int kG = 0, qG = kG + kOperand, kg = qG + kOperand, T = kg + kOperand, Aqk = T + kScores,
                       ell = Aqk + kScores,  // f32 [K]: decay of the whole chunk
      scale = ell + kK * 4,                  // f32 [tokens]
      bytes = scale + kRows * 4;
  static_assert(bytes <= kRows * 1024 && bytes % 128 == 0);
};

// The chunks of a sequence: two for each of the contract. Where a request resumes within one of those, the opening
// (openings.h), which has less than 64 tokens, is cut by itself. It has chunks 0 and 1, or chunk 1 alone.
struct Cuts {
  static constexpr unsigned kBoth = kChunk / kRows;
  // Tokens; those of the contract's first chunk that came before the call, and those that are left of it; chunks are
  // those c < end.
  unsigned length, begun, opening, end;

  __device__ Cuts(const Sequence& s, unsigned begun) : length(static_cast<unsigned>(s.length)), begun(begun) {
    opening = begun ? min(length, unsigned{kChunk} - begun) : 0;
    end = opening < length ? count(length + begun) : first() + count(opening);
  }
  __device__ unsigned first() const { return begun / kRows; }
  // The first token of chunk c; behind the last one of all that is cut together with it.
  __device__ unsigned token(unsigned c) const { return c * kRows - (in_opening(c) ? first() * kRows : begun); }
  __device__ unsigned behind(unsigned c) const { return in_opening(c) ? opening : length; }
  __device__ bool in_opening(unsigned c) const { return begun > 0 && c < kBoth; }

 private:
  __device__ static unsigned count(unsigned tokens) { return (tokens + kRows - 1) / kRows; }
};

// What one launch of each kernel works on: chunks first .. first + span - 1 of every sequence, for some heads.
struct Pass {
  unsigned first_head, heads, first, span;
  bool packed;    // all chunks of sequences of any length
  unsigned more;  // rows of images that a sequence may need beyond those of its length
  Divisor by_heads, by_span, by_group;
  Index offset;  // checkpoint_offset

  Pass(const ForwardProblem& d, int64_t first_head, int64_t heads, int64_t first, int64_t span, bool packed)
      : first_head(static_cast<unsigned>(first_head)),
        heads(static_cast<unsigned>(heads)),
        first(static_cast<unsigned>(first)),
        span(static_cast<unsigned>(span)),
        packed(packed),
        more(static_cast<unsigned>(more_rows(d))),
        by_heads(heads),
        by_span(span),
        by_group(d.group()),
        offset(index_of(d.args.checkpoint_offset)) {}
  static int64_t more_rows(const ForwardProblem& p) { return 1 + has_openings(p.args) * kChunk / kRows; }

  // The row of images [rows][heads] where the chunks of a sequence begin. Packed, every sequence begins at a row of
  // its own, wherever it is cut, and rows are below T / 32 + N more.
  __device__ unsigned first_row(const Sequence& s) const {
    return packed ? static_cast<unsigned>(s.t0) / kRows + static_cast<unsigned>(s.n) * more
                  : static_cast<unsigned>(s.n) * span;
  }
  __device__ Cuts cuts_of(const Sequence& s) const { return {s, static_cast<unsigned>(begun_tokens(offset, s.n))}; }
  // The sequence's chunks are those c < end_of(cuts), from first on.
  __device__ unsigned end_of(const Cuts& cuts) const { return packed ? cuts.end : min(cuts.end, first + span); }
  __device__ unsigned end_of(const Sequence& s) const { return end_of(cuts_of(s)); }
};

}  // namespace kda::cuda
