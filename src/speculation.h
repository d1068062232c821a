// Speculative decoding: which record entries belong to what. Shared by all implementations, on
// the host and in kernels.
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

  KDA_BOTH int64_t entry(int64_t w) const { return first + w - (first + w >= R ? R : 0); }  // first < R, w < R
  KDA_BOTH int64_t token(int64_t t) const { return committed + t; }
  // The token before draft t, negative for the committed text.
  KDA_BOTH int64_t parent(int64_t t) const {
    if (!parents) return t - 1;
    const int64_t p = int_at(*parents, n, t);
    return p >= t ? t - 1 : std::max<int64_t>(p, -1);
  }
  // The entry before w, or -1.
  KDA_BOTH int64_t before(int64_t w) const {
    if (w < committed) return w - 1;
    const int64_t p = parent(w - committed);
    return p < 0 ? committed - 1 : committed + p;
  }
};

// Of request n with its records in `slot` (negative: none), where `reserved` entries are wanted for drafts.
KDA_BOTH inline Window window_of(const kda_records& r, int64_t slot, const kda_tensor& parents, int64_t n,
                                 int64_t reserved) {
  Window w;
  w.parents = present(parents) ? &parents : nullptr, w.n = n;
  if (!present(r.u)) return w;
  w.R = r.u.shape[r.u.ndim - 3];
  if (!present(r.ring_count) || slot < 0) return w;
  w.first = (int_at(r.ring_first, slot) % w.R + w.R) % w.R;
  w.committed = std::clamp<int64_t>(int_at(r.ring_count, slot), 0, std::max<int64_t>(w.R - reserved, 0));
  return w;
}

// The slot of request n's records, or -1.
KDA_BOTH inline int64_t record_slot(const kda_records& r, int64_t n) {
  if (!present(r.u)) return -1;
  const int64_t slot = slot_of(r.indices, n);
  return slot < r.u.shape[r.u.ndim - 4] ? slot : -1;
}

// Accepted drafts, within what the window and the call can hold.
KDA_BOTH inline int64_t accepted_of(const kda_tensor& accept_len, int64_t n, int64_t drafts) {
  return std::clamp<int64_t>(int_at(accept_len, n), 0, drafts);
}

// Is it padding? Rows are never.
KDA_BOTH inline bool padded_slot(const kda_tensor& indices, int64_t slot, int64_t first_valid) {
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
KDA_BOTH inline Commit commit_of(const FlushVerifyProblem& p, int64_t n, int64_t drafts) {
  const kda_flush_verify_args& a = p.args;
  const bool ring = present(a.records.ring_count);
  const kda_records& last = ring ? a.records : a.last;
  const int64_t R = last.u.shape[1];
  const int64_t slot = record_slot(last, n);
  Commit c;
  c.window = window_of(last, slot, a.last_parents, n, drafts);
  const int64_t room =
      ring ? R - drafts - c.window.committed : std::min(R, present(a.last_parents) ? a.last_parents.shape[1] : R);
  const int64_t raw = present(a.last_conv_x) ? a.last_conv_x.shape[1] : room;
  c.accepted = slot < 0 ? 0 : accepted_of(a.accept_len, n, std::max<int64_t>(std::min(room, raw), 0));
  const int64_t entries = c.window.committed + c.accepted;
  c.apply = !ring || entries > R - 2 * (a.max_tokens ? a.max_tokens : drafts);
  c.next = window_of(a.records, -1, a.parents, n, drafts);
  if (ring) {
    c.next.first = c.apply ? (c.window.first + entries) % R : c.window.first;
    c.next.committed = c.apply ? 0 : entries;
  }
  return c;
}

KDA_BOTH inline void store_cursors(const kda_records& ring, int64_t slot, const Window& next) {
  const auto set = [slot](const kda_tensor& t, int64_t x) {
    static_cast<int32_t*>(t.data)[slot * t.stride[0]] = static_cast<int32_t>(x);
  };
  if (slot < 0) return;
  set(ring.ring_first, next.first), set(ring.ring_count, next.committed);
}

// What is to be done for one request of a call.
struct Request {
  Sequence s{};
  Window flush{};          // of the entries to apply,
  int64_t newest = -1;     // from here back; -1: none
  int64_t last_slot = -1;  // of their records
  Window verify{};
  int64_t slot = -1;  // of this round's records
};

KDA_BOTH inline Request request_of(const VerifyProblem& p, int64_t n) {
  const kda_verify_args& a = p.args;
  Request r{.s = sequence_at(p, a.in, a.states, n)};
  r.slot = record_slot(a.records, n);
  r.verify = window_of(a.records, r.slot, a.parents, n, r.s.length);
  return r;
}

KDA_BOTH inline Request request_of(const FlushProblem& p, int64_t n) {
  const kda_flush_args& a = p.args;
  Request r;
  r.s.n = n, r.s.slot = slot_of(a.state_indices, n), r.s.initial = true;
  r.last_slot = record_slot(a.records, n);
  r.flush = window_of(a.records, r.last_slot, a.parents, n, 0);
  const int64_t accepted = accepted_of(a.accept_len, n, std::min(p.T, p.R - r.flush.committed));
  r.newest = accepted ? r.flush.token(accepted - 1) : r.flush.committed - 1;
  r.s.live = !padded_slot(a.state_indices, r.s.slot, a.first_valid_slot) &&
             r.s.slot < a.state.shape[a.state.ndim - 4] && r.last_slot >= 0 && r.newest >= 0;
  return r;
}

KDA_BOTH inline Request request_of(const FlushVerifyProblem& p, int64_t n) {
  const kda_flush_verify_args& a = p.args;
  Request r{.s = sequence_at(p, a.in, a.states, n)};
  const Commit commit = commit_of(p, n, r.s.length);
  r.last_slot = record_slot(present(a.records.ring_count) ? a.records : a.last, n);
  r.slot = record_slot(a.records, n);
  r.flush = commit.window, r.verify = commit.next;
  if (commit.apply && r.last_slot >= 0)
    r.newest = commit.accepted ? commit.window.token(commit.accepted - 1) : commit.window.committed - 1;
  return r;
}

}  // namespace kda
