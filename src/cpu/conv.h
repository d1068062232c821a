// The causal convolution as its kernel sees it, whoever asks for it: kda_conv, or decode, verify and flush with raw
// inputs (kda_conv_inputs).
#pragma once
#include <cstdint>

#include "problem.h"

namespace kda::cpu {

constexpr int64_t kConvTile = 512;  // channels of a task: its rows and weights stay in L1

// The inputs of a sequence are xx = state ++ x: W-1 rows of state, oldest first, then its tokens. Token t is row
// t + W - 1 of xx. In a tree the row before a token is that of its parent.
struct Conv {
  kda_tensor x, weight, bias, cu_seqlens;
  kda_tensor state, indices, has_state;  // slot indices[n] (or n) of state; outside of it: zeros
  kda_tensor parents;                    // [N,T] i32, absent: a chain
  kda_tensor y;
  bool silu;
  int64_t first_slot;  // lower ones are padding: y is zeroed

  int64_t tokens() const { return x.shape[0] * x.shape[1]; }
  int64_t channels() const { return x.shape[2]; }
  int64_t width() const { return weight.shape[1]; }
  int64_t sequences() const { return present(cu_seqlens) ? cu_seqlens.shape[0] - 1 : x.shape[0]; }

  Sequence sequence(int64_t n) const;
  int64_t sequence_of(int64_t token) const;  // of a token among all; sequences() if it belongs to none
  int64_t end() const;                       // of the tokens that belong to a sequence

  int64_t row_before(int64_t n, int64_t row) const {
    const int64_t keep = width() - 1, t = row - keep;
    if (t < 0 || !present(parents) || t >= parents.shape[1]) return row - 1;
    const int64_t parent = int_at(parents, n, t);
    return parent >= t ? row - 1 : (parent < 0 ? -1 : parent) + keep;
  }
};

}  // namespace kda::cpu
