// Speculative decoding: which record entries belong to what. Shared by all implementations, on the host and in kernels.
#pragma once
#include "problem.h"

namespace kda {

constexpr int64_t kMaxDrafts = 16;  // tokens of a request that verify takes

// The tokens before a draft, as entries of one request's records: indices w = 0 .. committed-1 are the committed
// entries of its ring, oldest first, committed + t is draft token t. Whatever the device-side numbers hold, entries lie
// inside the slot and every walk ends.
struct Window {
  int first = 0, committed = 0, R = 0;
  const kda_tensor* parents = nullptr;  // nullptr: a chain
  int64_t n = 0;

  KDA_BOTH int entry(int w) const { return first + w - (first + w >= R ? R : 0); }  // first < R, w <= R
  KDA_BOTH int token(int t) const { return committed + t; }
  // The token before draft t, negative for the committed text.
  KDA_BOTH int parent(int t) const {
    if (!parents) return t - 1;
    const int p = index_at(*parents, n, t);
    return p >= t ? t - 1 : p < 0 ? -1 : p;
  }
  // The entry before w, or -1.
  KDA_BOTH int before(int w) const {
    if (w < committed) return w - 1;
    const int p = parent(w - committed);
    return p < 0 ? committed - 1 : committed + p;
  }
};
constexpr int64_t kMaxRecordEntries = int64_t{1} << 30;  // of a slot: any two of them fit an int

// Of request n with its records in `slot` (negative: none), where `reserved` entries are wanted for drafts.
KDA_BOTH inline Window window_of(const kda_records& r, int64_t slot, const kda_tensor& parents, int64_t n,
                                 int64_t reserved) {
  Window w;
  w.parents = present(parents) ? &parents : nullptr, w.n = n;
  if (!present(r.u)) return w;
  w.R = static_cast<int>(r.u.shape[r.u.ndim - 3]);
  if (!present(r.ring_count) || slot < 0) return w;
  const int first = index_at(r.ring_first, slot) % w.R;
  w.first = first < 0 ? first + w.R : first;
  w.committed = static_cast<int>(within(index_at(r.ring_count, slot), 0, w.R > reserved ? w.R - reserved : 0));
  return w;
}

// The slot of a request's records, or -1; `slot`: as it was given.
KDA_BOTH inline int64_t record_slot(const kda_records& r, int64_t slot) {
  return present(r.u) && slot < r.u.shape[r.u.ndim - 4] ? slot : -1;
}

// Is it padding? Rows are never.
KDA_BOTH inline bool padded_slot(const kda_tensor& indices, int64_t slot, int64_t first_valid) {
  return present(indices) && slot < first_valid;
}

// What the index vectors of a call hold for a request, unchecked: kernels ask for all of it before they wait for any.
struct Indices {
  int32_t state = 0, records = 0, last = 0, accepted = 0;
};
KDA_BOTH inline int32_t given_index(const kda_tensor& indices, int64_t n) {
  return present(indices) ? static_cast<const int32_t*>(indices.data)[n * indices.stride[0]] : static_cast<int32_t>(n);
}
KDA_BOTH inline Indices indices_of(const VerifyProblem& p, int64_t n) {
  return {.state = given_index(p.args.states.state_indices, n), .records = given_index(p.args.records.indices, n)};
}
KDA_BOTH inline Indices indices_of(const FlushProblem& p, int64_t n) {
  return {.state = given_index(p.args.state_indices, n),
          .last = given_index(p.args.records.indices, n),
          .accepted = given_index(p.args.accept_len, n)};
}
KDA_BOTH inline Indices indices_of(const FlushVerifyProblem& p, int64_t n) {
  const kda_flush_verify_args& a = p.args;
  return {.state = given_index(a.states.state_indices, n),
          .records = given_index(a.records.indices, n),
          .last = given_index(a.last.indices, n),
          .accepted = given_index(a.accept_len, n)};
}

// What flush_verify does with request n's last round. With a ring, accepted drafts become committed entries until less
// than room for two more rounds is left; then, and always without a ring, they are applied to the state.
struct Commit {
  Window window;     // of the last round
  int accepted = 0;  // of its drafts
  bool apply = true;
  Window next{};  // of this round
};
KDA_BOTH inline Commit commit_of(const FlushVerifyProblem& p, int64_t n, int64_t drafts, const Indices& at) {
  const kda_flush_verify_args& a = p.args;
  const bool ring = present(a.records.ring_count);
  const kda_records& last = ring ? a.records : a.last;
  const int64_t R = last.u.shape[1];
  const int64_t slot = record_slot(last, ring ? at.records : at.last);
  Commit c;
  c.window = window_of(last, slot, a.last_parents, n, drafts);
  int64_t most = ring ? R - drafts - c.window.committed : R;
  if (!ring && present(a.last_parents)) most = within(a.last_parents.shape[1], 0, most);
  if (present(a.last_conv_x)) most = within(a.last_conv_x.shape[1], 0, most);
  c.accepted = slot < 0 || most <= 0 ? 0 : static_cast<int>(within(at.accepted, 0, most));
  const int entries = c.window.committed + c.accepted;
  c.apply = !ring || entries > R - 2 * (a.max_tokens ? a.max_tokens : drafts);
  c.next = window_of(a.records, -1, a.parents, n, drafts);
  if (ring) {
    c.next.first = c.apply ? c.window.entry(entries) : c.window.first;
    c.next.committed = c.apply ? 0 : entries;
  }
  return c;
}

KDA_BOTH inline Commit commit_of(const FlushVerifyProblem& p, int64_t n, int64_t drafts) {
  return commit_of(p, n, drafts, indices_of(p, n));
}

KDA_BOTH inline void store_cursors(const kda_records& ring, int64_t slot, const Window& next) {
  const auto set = [slot](const kda_tensor& t, int64_t x) {
    static_cast<int32_t*>(t.data)[slot * t.stride[0]] = static_cast<int32_t>(x);
  };
  if (record_slot(ring, slot) < 0) return;
  set(ring.ring_first, next.first), set(ring.ring_count, next.committed);
}

// One layer of a tensor that holds all.
KDA_BOTH inline kda_tensor layer_of(kda_tensor t, int64_t layer) {
  t.data = static_cast<char*>(t.data) + layer * t.stride[0] * dtype_size(t.dtype);
  --t.ndim;
  for (int i = 0; i < t.ndim; ++i) t.shape[i] = t.shape[i + 1], t.stride[i] = t.stride[i + 1];
  return t;
}

// What is to be done for one request of a call.
struct Request {
  Sequence s{};
  Window flush{};          // of the entries to apply,
  int newest = -1;         // from here back; -1: none
  int64_t last_slot = -1;  // of their records
  Window verify{};
  int64_t slot = -1;  // of this round's records
};

// s: from sequence_at, without states.
KDA_BOTH inline Request request_of(const VerifyProblem& p, Sequence s, const Indices& at) {
  const kda_verify_args& a = p.args;
  Request r;
  find_states(s, a.states, at.state);
  r.s = s, r.slot = record_slot(a.records, at.records);
  r.verify = window_of(a.records, r.slot, a.parents, s.n, s.length);
  return r;
}

KDA_BOTH inline Request request_of(const FlushProblem& p, Sequence s, const Indices& at) {
  const kda_flush_args& a = p.args;
  Request r;
  r.last_slot = record_slot(a.records, at.last);
  r.flush = window_of(a.records, r.last_slot, a.parents, s.n, 0);
  const auto accepted = static_cast<int>(within(at.accepted, 0, within(p.T, 0, p.R - r.flush.committed)));
  r.newest = accepted ? r.flush.token(accepted - 1) : r.flush.committed - 1;
  s.slot = at.state, s.initial = true;
  s.live = !padded_slot(a.state_indices, s.slot, a.first_valid_slot) && s.slot < a.state.shape[a.state.ndim - 4] &&
           r.last_slot >= 0 && r.newest >= 0;
  r.s = s;
  return r;
}

KDA_BOTH inline Request request_of(const FlushVerifyProblem& p, Sequence s, const Indices& at) {
  const kda_flush_verify_args& a = p.args;
  Request r;
  find_states(s, a.states, at.state);
  const Commit commit = commit_of(p, s.n, s.length, at);
  r.last_slot = present(a.records.ring_count) ? record_slot(a.records, at.records) : record_slot(a.last, at.last);
  r.s = s, r.slot = record_slot(a.records, at.records);
  r.flush = commit.window, r.verify = commit.next;
  if (commit.apply && r.last_slot >= 0)
    r.newest = commit.accepted ? commit.window.token(commit.accepted - 1) : commit.window.committed - 1;
  return r;
}

// Of tokens, if the call has any.
KDA_BOTH inline Sequence tokens_of(const FlushProblem&, int64_t n) { return {n, 0, 0, 0, 0, false, false}; }
template <class P>
KDA_BOTH Sequence tokens_of(const P& p, int64_t n) {
  return sequence_at(p, p.args.in, n);
}
template <class P>
KDA_BOTH Request request_of(const P& p, int64_t n) {
  return request_of(p, tokens_of(p, n), indices_of(p, n));
}

}  // namespace kda
