// Speculative decoding: which record entries belong to what. Shared by all implementations, on the host and in kernels.
#pragma once
#include "contract/problem.h"

namespace kda {

constexpr int64_t kMaxDrafts = 16;  // tokens of a request that verify takes

// The tokens before a draft, as entries of one request's records. Indices w = 0 .. committed-1 are the committed
// entries of its ring, oldest first, and committed + t is draft token t. Whatever the numbers on the device are,
// entries lie inside the slot and every walk ends.
struct Window {
  int first = 0, committed = 0, R = 0;
  Index parents{};  // absent: a chain

  KDA_BOTH int entry(int w) const { return first + w - (first + w >= R ? R : 0); }  // first < R, w <= R
  KDA_BOTH int token(int t) const { return committed + t; }
  // The token before draft t, negative for the committed text.
  KDA_BOTH int parent(int t) const {
    if (!parents.data) return t - 1;
    const int p = parents[t];
    return p >= t ? t - 1 : p < 0 ? -1 : p;
  }
  // The entry before w, or -1.
  KDA_BOTH int before(int w) const {
    if (w < committed) return w - 1;
    const int p = parent(w - committed);
    return p < 0 ? committed - 1 : committed + p;
  }
};
constexpr int64_t kMaxRecordEntries = int64_t{1} << 30;  // of a slot: the sum of any two fits an int

// Says where the records of requests are. Without records there are no slots, and no entries.
struct RecordSlots {
  Index indices;
  uint32_t slots = 0;
  uint32_t R : 31 = 0, ring : 1 = 0;  // ring: there are cursors
};
struct Cursors {
  Strided<int32_t> first, count;
};
KDA_BOTH inline RecordSlots slots_of(const kda_records& r) {
  RecordSlots s{.indices = index_of(r.indices)};
  if (!present(r.u)) return s;
  s.slots = count_slots(r.u.shape[r.u.ndim - 4]);
  s.R = static_cast<uint32_t>(r.u.shape[r.u.ndim - 3]), s.ring = present(r.ring_count);
  return s;
}
KDA_BOTH inline Cursors cursors_of(const kda_records& r) {
  return {strided<int32_t>(r.ring_first), strided<int32_t>(r.ring_count)};
}

// The window of a request with its records in `slot` (negative: none), where `reserved` entries are kept for drafts.
KDA_BOTH inline Window window_of(const RecordSlots& r, const Cursors& cursors, int64_t slot, const Index& parents,
                                 int64_t reserved) {
  Window w;
  w.parents = parents, w.R = static_cast<int>(r.R);
  if (!r.ring || slot < 0) return w;
  const int first = cursors.first[slot] % w.R;
  w.first = first < 0 ? first + w.R : first;
  w.committed = static_cast<int>(within(cursors.count[slot], 0, w.R > reserved ? w.R - reserved : 0));
  return w;
}
inline Window window_of(const kda_records& r, int64_t slot, const kda_tensor& parents, int64_t n, int64_t reserved) {
  return window_of(slots_of(r), cursors_of(r), slot, index_rows(parents).row(n), reserved);
}

// The slot of a request's records, or a negative number if it has none. `slot` is the index as given.
KDA_BOTH inline int64_t record_slot(const RecordSlots& r, int64_t slot) { return slot < int64_t{r.slots} ? slot : -1; }

// ---- the requests of a call: in each struct, what every request needs comes first ----

struct VerifyRequests {
  StateSlots states;
  RecordSlots records;
  bool tree;

  Flags has_initial;
  Cursors cursors;
  IndexRows parents;
};
struct FlushRequests {
  StateSlots states;
  RecordSlots last;
  Index accept_len;
  int32_t most;  // tokens to apply
  bool last_tree;

  Cursors cursors;
  IndexRows last_parents;
};
struct FlushVerifyRequests {
  StateSlots states;
  RecordSlots records, last;  // the same with a ring
  Index accept_len;
  int32_t most;  // accepted drafts
  bool tree, last_tree;

  int32_t max_tokens;
  Cursors cursors;
  IndexRows parents, last_parents;
};

KDA_BOTH inline VerifyRequests requests_of(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  return {slots_of(a.states),    slots_of(a.records),
          present(a.parents),    strided<const uint8_t>(a.states.has_initial_state),
          cursors_of(a.records), index_rows(a.parents)};
}
KDA_BOTH inline FlushRequests requests_of(const FlushProblem& p) {
  const kda_flush_args& a = p.args;
  return {
      {index_of(a.state_indices), count_slots(a.state.shape[a.state.ndim - 4]), a.first_valid_slot, Initial::kStates},
      slots_of(a.records),
      index_of(a.accept_len),
      static_cast<int32_t>(p.T),
      present(a.parents),
      cursors_of(a.records),
      index_rows(a.parents)};
}
KDA_BOTH inline FlushVerifyRequests requests_of(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  const bool ring = present(a.records.ring_count);
  int64_t most = (ring ? a.records : a.last).u.shape[1];
  if (present(a.last_parents)) most = within(a.last_parents.shape[1], 0, most);
  if (present(a.last_conv_x)) most = within(a.last_conv_x.shape[1], 0, most);
  return {slots_of(a.states),
          slots_of(a.records),
          slots_of(ring ? a.records : a.last),
          index_of(a.accept_len),
          static_cast<int32_t>(most),
          present(a.parents),
          present(a.last_parents),
          a.max_tokens,
          cursors_of(a.records),
          index_rows(a.parents),
          index_rows(a.last_parents)};
}

// Are all drafts chains that start from stored states, and do all records have a ring (`ring`) or none (not `ring`)?
template <class Requests>
bool are_chains(const Requests& r, bool ring) {
  bool are = r.states.initial == Initial::kStates;
  if constexpr (requires { r.records; }) are = are && r.records.ring == ring && !r.tree;
  if constexpr (requires { r.last; }) are = are && r.last.ring == ring && !r.last_tree;
  return are;
}
// The requests of such a call, with these facts as constants for the compiler.
template <class Requests>
KDA_BOTH Requests fast_chains(Requests r, bool ring) {
  r.states.initial = Initial::kStates;
  if constexpr (requires { r.records; }) r.records.ring = ring, r.tree = false;
  if constexpr (requires { r.last; }) r.last.ring = ring, r.last_tree = false;
  return r;
}

// What the index vectors of a call hold for a request, unchecked. Kernels load all of it before they wait for any.
struct Indices {
  int32_t state = 0, records = 0, last = 0, accepted = 0;
};
KDA_BOTH inline int32_t given_index(const Index& indices, int64_t n) {
  return static_cast<int32_t>(slot_of(indices, n));
}
KDA_BOTH inline Indices indices_of(const VerifyRequests& r, int64_t n) {
  return {.state = given_index(r.states.indices, n), .records = given_index(r.records.indices, n)};
}
KDA_BOTH inline Indices indices_of(const FlushRequests& r, int64_t n) {
  return {
      .state = given_index(r.states.indices, n), .last = given_index(r.last.indices, n), .accepted = r.accept_len[n]};
}
KDA_BOTH inline Indices indices_of(const FlushVerifyRequests& r, int64_t n) {
  return {.state = given_index(r.states.indices, n),
          .records = given_index(r.records.indices, n),
          .last = given_index(r.last.indices, n),
          .accepted = r.accept_len[n]};
}

// What flush_verify does with request n's last round. With a ring, accepted drafts become committed entries as long as
// there is room for two more rounds. Without that room, and always without a ring, they are applied to the state.
struct Commit {
  Window window;      // of the last round
  int64_t slot = -1;  // of the records of the last round
  int accepted = 0;   // drafts of the last round
  bool apply = true;
  Window next{};  // of this round
};
KDA_BOTH inline Commit commit_of(const FlushVerifyRequests& r, int64_t n, int64_t drafts, const Indices& at) {
  const bool ring = r.last.ring;
  Commit c;
  c.slot = record_slot(r.last, at.last);
  c.window = window_of(r.last, r.cursors, c.slot, r.last_tree ? r.last_parents.row(n) : Index{}, drafts);
  const int64_t most = ring ? within(r.most, 0, c.window.R - drafts - c.window.committed) : r.most;
  c.accepted = c.slot < 0 || most <= 0 ? 0 : static_cast<int>(within(at.accepted, 0, most));
  const int entries = c.window.committed + c.accepted;
  c.apply = !ring || entries > c.window.R - 2 * (r.max_tokens ? r.max_tokens : drafts);
  c.next = window_of(r.records, r.cursors, -1, r.tree ? r.parents.row(n) : Index{}, drafts);
  if (ring) {
    c.next.first = c.apply ? c.window.entry(entries) : c.window.first;
    c.next.committed = c.apply ? 0 : entries;
  }
  return c;
}
KDA_BOTH inline Commit commit_of(const FlushVerifyProblem& p, int64_t n, int64_t drafts) {
  const FlushVerifyRequests r = requests_of(p);
  return commit_of(r, n, drafts, indices_of(r, n));
}

KDA_BOTH inline void store_cursors(const RecordSlots& ring, const Cursors& cursors, int64_t slot, const Window& next) {
  if (record_slot(ring, slot) < 0) return;
  cursors.first[slot] = next.first, cursors.count[slot] = next.committed;
}
inline void store_cursors(const kda_records& ring, int64_t slot, const Window& next) {
  store_cursors(slots_of(ring), cursors_of(ring), slot, next);
}

// One layer of a tensor that holds all layers.
KDA_BOTH inline kda_tensor layer_of(kda_tensor t, int64_t layer) {
  t.data = static_cast<char*>(t.data) + layer * t.stride[0] * dtype_size(t.dtype);
  --t.ndim;
  for (int i = 0; i < t.ndim; ++i) t.shape[i] = t.shape[i + 1], t.stride[i] = t.stride[i + 1];
  return t;
}

// What is to be done for one request of a call.
struct Request {
  Sequence s{};
  Window flush{};          // of the entries to apply
  int newest = -1;         // the newest entry to apply; -1: none
  int64_t last_slot = -1;  // of the records of these entries
  Window verify{};
  int64_t slot = -1;  // of this round's records
};

// s comes from sequence_at, without states.
KDA_BOTH inline Request request_of(const VerifyRequests& requests, Sequence s, const Indices& at) {
  Request r;
  find_states(s, requests.states, requests.has_initial, at.state);
  r.s = s, r.slot = record_slot(requests.records, at.records);
  r.verify = window_of(requests.records, requests.cursors, r.slot, requests.tree ? requests.parents.row(s.n) : Index{},
                       s.length);
  return r;
}

KDA_BOTH inline Request request_of(const FlushRequests& requests, Sequence s, const Indices& at) {
  Request r;
  r.last_slot = record_slot(requests.last, at.last);
  r.flush = window_of(requests.last, requests.cursors, r.last_slot,
                      requests.last_tree ? requests.last_parents.row(s.n) : Index{}, 0);
  const auto accepted =
      static_cast<int>(within(at.accepted, 0, within(requests.most, 0, r.flush.R - r.flush.committed)));
  r.newest = accepted ? r.flush.token(accepted - 1) : r.flush.committed - 1;
  s.live = true;
  find_states(s, requests.states, {}, at.state);
  s.live = s.live && r.last_slot >= 0 && r.newest >= 0;
  r.s = s;
  return r;
}

KDA_BOTH inline Request request_of(const FlushVerifyRequests& requests, Sequence s, const Indices& at) {
  Request r;
  find_states(s, requests.states, {}, at.state);
  const Commit commit = commit_of(requests, s.n, s.length, at);
  r.s = s, r.slot = record_slot(requests.records, at.records), r.last_slot = commit.slot;
  r.flush = commit.window, r.verify = commit.next;
  if (commit.apply && r.last_slot >= 0)
    r.newest = commit.accepted ? commit.window.token(commit.accepted - 1) : commit.window.committed - 1;
  return r;
}

// The tokens of request n, if the call has any.
KDA_BOTH inline Sequence tokens_of(const FlushProblem&, int64_t n) { return {n, 0, 0, 0, 0, false, false}; }
template <class P>
KDA_BOTH Sequence tokens_of(const P& p, int64_t n) {
  return sequence_at(p, p.args.in, n);
}
template <class P>
KDA_BOTH Request request_of(const P& p, int64_t n) {
  const auto requests = requests_of(p);
  return request_of(requests, tokens_of(p, n), indices_of(requests, n));
}

}  // namespace kda
