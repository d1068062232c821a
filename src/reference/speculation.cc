// Speculative decoding in float64: verify is the token recurrence on copies of the state, one per draft; flush applies
// S <- Diag(alpha) S + k u^T, one recorded token after the other.
#include "contract/drafts.h"

#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

// Applies `entries` of slot `slot` of the records to S. The list has the newest entry first.
void apply(Vector& S, const Dims& d, const kda_records& r, int64_t slot, const std::vector<int64_t>& entries,
           int64_t hv) {
  for (auto e = entries.rbegin(); e != entries.rend(); ++e)
    for (int64_t k = 0; k < d.K; ++k)
      for (int64_t v = 0; v < d.V; ++v)
        S[k * d.V + v] = get(r.alpha, slot, *e, hv, k) * S[k * d.V + v] +
                         get(r.k, slot, *e, hv / d.group(), k) * get(r.u, slot, *e, hv, v);
}

// Entries from w back to the oldest one.
std::vector<int64_t> path(const Window& window, int64_t w) {
  std::vector<int64_t> entries;
  for (; w >= 0; w = window.before(w)) entries.push_back(window.entry(w));
  return entries;
}

void verify_head(const Dims& d, const kda_inputs& in, const Sequence& s, int64_t hv, const Window& window, Vector S,
                 const kda_records& r, const kda_tensor& o) {
  const bool recording = present(r.u);
  const int64_t slot = recording ? slot_of(r.indices, s.n) : -1;
  const Head x(d, in, s, hv);
  if (recording && slot >= 0) apply(S, d, r, slot, path(window, window.committed - 1), hv);
  std::vector<Vector> after(s.length);
  Vector u(d.V), out(d.V);
  for (int64_t t = 0; t < s.length; ++t) {
    const int64_t parent = window.parent(t);
    after[t] = parent < 0 ? S : after[parent];
    x.step(t, after[t].data(), u.data(), out.data());
    for (int64_t v = 0; v < d.V; ++v) set(o, out[v], s.b, s.t0 + t, hv, v);
    if (!recording || slot < 0) continue;
    const int64_t e = window.entry(window.token(t));
    for (int64_t v = 0; v < d.V; ++v) set(r.u, u[v], slot, e, hv, v);
    for (int64_t k = 0; k < d.K; ++k) {
      set(r.alpha, std::exp(x.g[t * d.K + k]), slot, e, hv, k);
      if (hv % d.group() == 0) set(r.k, x.k[t * d.K + k], slot, e, hv / d.group(), k);
    }
  }
}

}  // namespace

void verify(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  const Convolved in(a.in, a.conv, a.parents);
  int64_t end = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, a.in, a.states, n);
    end = s.t0 + s.length;
    if (!s.live) zero_rows(a.o, s.b, s.t0, s.length);
    const Window window = window_of(a.records, slot_of(a.records.indices, n), a.parents, n, s.length);
    for (int64_t hv = 0; s.live && hv < p.HV; ++hv)
      verify_head(p, in.inputs, s, hv, window, load_state(p, a.states.h0, a.in.state_layout, s.slot, hv, s.initial),
                  a.records, a.o);
  }
  if (p.varlen) zero_rows(a.o, 0, end, p.T - end);
}

void flush(const FlushProblem& p) {
  for (int64_t layer = 0; layer < p.layers; ++layer) {
    kda_flush_args a = p.args;
    if (a.state.ndim == 5)
      for (kda_tensor* t : {&a.state, &a.records.u, &a.records.k, &a.records.alpha, &a.conv_x, &a.conv_state})
        if (present(*t)) *t = layer_of(*t, layer);
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t slot = slot_of(a.state_indices, n), records = slot_of(a.records.indices, n);
      if ((present(a.state_indices) && slot < a.first_valid_slot) || records < 0) continue;
      const Window window = window_of(a.records, records, a.parents, n, 0);
      const int64_t accepted = within(index_at(a.accept_len, n), 0, std::min(p.T, p.R - window.committed));
      const auto entries = path(window, accepted ? window.token(accepted - 1) : window.committed - 1);
      for (int64_t hv = 0; !entries.empty() && hv < p.HV; ++hv) {
        Vector S = load_state(p, a.state, a.state_layout, slot, hv, true);
        apply(S, p, a.records, records, entries, hv);
        store_state(p, S, a.state, a.state_layout, slot, hv);
      }
      conv_roll(a.conv_x, a.conv_state, slot_of(a.conv_indices, n), n, {n, n, 0, accepted, n, true, true}, a.parents,
                accepted);
    }
  }
}

void flush_verify(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  const bool ring = present(a.records.ring_count);
  const kda_records& last = ring ? a.records : a.last;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, a.in, a.states, n), rows{n, n, 0, p.T, n, true, true};
    if (s.live)
      conv_roll(a.last_conv_x, a.conv.state, slot_of(a.conv.indices, n), n, rows, a.last_parents,
                commit_of(p, n, s.length).accepted);
  }
  const Convolved in(a.in, a.conv, a.parents);
  int64_t end = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, a.in, a.states, n);
    end = s.t0 + s.length;
    if (!s.live) {
      zero_rows(a.o, s.b, s.t0, s.length);
      continue;
    }
    const Commit c = commit_of(p, n, s.length);
    const int64_t slot = slot_of(last.indices, n),
                  w = c.accepted ? c.window.token(c.accepted - 1) : c.window.committed - 1;
    const auto entries = c.apply && slot >= 0 ? path(c.window, w) : std::vector<int64_t>{};
    for (int64_t hv = 0; hv < p.HV; ++hv) {
      Vector S = load_state(p, a.states.h0, a.in.state_layout, s.slot, hv, true);
      if (!entries.empty()) {
        apply(S, p, last, slot, entries, hv);
        store_state(p, S, a.states.hT, a.in.state_layout, s.slot, hv);
        S = load_state(p, a.states.h0, a.in.state_layout, s.slot, hv, true);  // rounded as it is stored
      }
      verify_head(p, in.inputs, s, hv, c.next, S, a.records, a.o);
    }
    if (ring) store_cursors(a.records, slot, c.next);
  }
  if (p.varlen) zero_rows(a.o, 0, end, p.T - end);
}

}  // namespace kda::reference
