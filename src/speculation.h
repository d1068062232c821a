// Speculative decoding: which record entries belong to what. Shared by all host implementations.
#pragma once
#include <algorithm>

#include "problem.h"

namespace kda {

constexpr int64_t kMaxDrafts = 16;  // tokens of a request that verify takes

// The tokens before a draft, as entries of one request's records: indices w = 0 .. committed-1 are the committed
// entries of its ring, oldest first, committed + t is draft token t. Whatever the device-side numbers hold, entries lie
// inside the slot and every walk ends.
struct Window {
  int64_t first = 0, committed = 0, R = 0;
  const kda_tensor* parents = nullptr;  // nullptr: a chain
  int64_t n = 0;

  int64_t entry(int64_t w) const { return (first + w) % R; }
  int64_t token(int64_t t) const { return committed + t; }
  // The token before draft t, negative for the committed text.
  int64_t parent(int64_t t) const {
    if (!parents) return t - 1;
    const int64_t p = int_at(*parents, n, t);
    return p >= t ? t - 1 : std::max<int64_t>(p, -1);
  }
  // The entry before w, or -1.
  int64_t before(int64_t w) const {
    if (w < committed) return w - 1;
    const int64_t p = parent(w - committed);
    return p < 0 ? committed - 1 : committed + p;
  }
};

// Of request n with its records in `slot` (negative: none), where `reserved` entries are wanted for drafts.
inline Window window_of(const kda_records& r, int64_t slot, const kda_tensor& parents, int64_t n, int64_t reserved) {
  Window w;
  w.parents = present(parents) ? &parents : nullptr, w.n = n;
  if (!present(r.u)) return w;
  w.R = r.u.shape[r.u.ndim - 3];
  if (!present(r.ring_count) || slot < 0) return w;
  w.first = (int_at(r.ring_first, slot) % w.R + w.R) % w.R;
  w.committed = std::clamp<int64_t>(int_at(r.ring_count, slot), 0, std::max<int64_t>(w.R - reserved, 0));
  return w;
}

// Accepted drafts, within what the window and the call can hold.
inline int64_t accepted_of(const kda_tensor& accept_len, int64_t n, int64_t drafts) {
  return std::clamp<int64_t>(int_at(accept_len, n), 0, drafts);
}

// Is it padding? Rows are never.
inline bool padded_slot(const kda_tensor& indices, int64_t slot, int64_t first_valid) {
  return present(indices) && slot < first_valid;
}

// What flush_verify does with request n's last round. With a ring, accepted drafts become committed entries until less
// than room for two more rounds is left; then, and always without a ring, they are applied to the state.
struct Commit {
  Window window;         // of the last round
  int64_t accepted = 0;  // of its drafts
  bool apply = true;
  Window next{};  // of this round
};
Commit commit_of(const FlushVerifyProblem& p, int64_t n, int64_t drafts);
void store_cursors(const kda_records& ring, int64_t slot, const Window& next);

}  // namespace kda
