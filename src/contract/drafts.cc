#include <cstddef>

#include "contract/drafts.h"
#include "contract/problem.h"
#include "contract/rules.h"

namespace kda {
namespace {

// u, k, alpha: [slots,R,..], with layers in front if the call has layers. Returns R, 0 without records.
int64_t check_records(const kda_records& r, Tensors& tensors) {
  tensors.check_form(r.u, r.k, r.alpha, r.indices, r.ring_first, r.ring_count);
  const int given = present(r.u) + present(r.k) + present(r.alpha);
  for (const kda_tensor* t : {&r.u, &r.k, &r.alpha})
    if (given && !present(*t)) invalid(tensors.name(t), ": expected together with the others of u, k, alpha, got none");
  if (!given) {
    for (const kda_tensor* t : {&r.indices, &r.ring_first, &r.ring_count})
      if (present(*t)) invalid(tensors.name(t), ": expected records with it, got none");
    return 0;
  }
  tensors.check_rank(r.u);
  const Operand& u = tensors.row(&r.u);
  const int lead = r.u.ndim - u.ndim;
  const int64_t slots = tensors[u.shape[0].size] = r.u.shape[lead], R = tensors[u.shape[1].size] = r.u.shape[lead + 1];
  if (R < 1 || R > kMaxRecordEntries)
    invalid(u.name, ": expected 1 to 2^30 entries a slot, got ", shape_text(r.u.shape, r.u.ndim));
  tensors.check(r.u, r.k, r.alpha, r.indices);
  if (const int64_t N = tensors[Size::N]; !present(r.indices) && slots < N)
    invalid(u.name, ": expected at least N = ", N, " slots without indices, got ", slots);
  if (present(r.ring_first) != present(r.ring_count))
    invalid(tensors.name(&r.ring_count), ": expected together with ring_first, got ",
            present(r.ring_first) ? "ring_first" : "ring_count", " alone");
  tensors.check(r.ring_first, r.ring_count);
  return R;
}

// [N,T']; T' may be more than the tokens of the call.
void check_parents(const kda_tensor& parents, const Dims& d, int64_t tokens, Tensors& tensors) {
  tensors.check_form(parents);
  if (present(parents) && (parents.ndim != 2 || parents.shape[0] != d.N || parents.shape[1] < tokens))
    invalid(tensors.name(&parents), ": expected shape [N,T] with N = ", d.N, " and T at least ", tokens, ", got ",
            shape_text(parents.shape, parents.ndim));
  tensors.check(parents);
}

int64_t dense_tokens(const Dims& d) { return d.varlen ? 0 : d.T; }

void check_drafts(const Dims& d, int64_t R) {
  if (dense_tokens(d) > kMaxDrafts) invalid("q: expected at most ", kMaxDrafts, " tokens a request, got T = ", d.T);
  if (R && dense_tokens(d) > R) invalid("records.u: expected at least T = ", d.T, " entries a slot, got ", R);
}

// ---- data ----

void check_draft_lengths(const Dims& d, const kda_inputs& in, int64_t R, const kda_tensor& parents) {
  check_cu_seqlens(d, in);
  for (int64_t n = 0; d.varlen && n < d.N; ++n) {
    const int64_t length = sequence_at(d, in, n).length;
    if (length > kMaxDrafts)
      invalid("cu_seqlens: expected at most ", kMaxDrafts, " tokens a request, got ", length, " for request ", n);
    if (R && length > R)
      invalid("records.u: expected entries for the ", length, " tokens of request ", n, ", got ", R, " a slot");
    if (present(parents) && length > parents.shape[1])
      invalid("parents: expected T at least ", length, ", the tokens of request ", n, ", got ", parents.shape[1]);
  }
}

void check_record_slots(const char* name, const kda_records& r, int lead) {
  if (present(r.indices)) check_slots(name, r.indices, 0, r.u.shape[lead]);
}

}  // namespace

VerifyProblem validate(const kda_verify_args* raw) {
  kda_verify_args a = copy_args(raw, offsetof(kda_verify_args, norm));
  Tensors tensors(a);
  Dims d = check_inputs(a.in, a.conv, a.o, tensors);
  check_states(a.states, nullptr, tensors);
  if (!present(a.states.h0)) invalid("h0: expected the states to verify from, got none");
  if (present(a.states.hT)) invalid("hT: expected none, verify writes no state, got one");
  tensors.check_all(a.o);
  const int64_t R = check_records(a.records, tensors);
  check_drafts(d, R);
  check_parents(a.parents, d, dense_tokens(d), tensors);
  check_norm(a.norm, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<VerifyProblem>(d, a);
}

FlushProblem validate(const kda_flush_args* raw) {
  FlushProblem p{};
  kda_flush_args& a = p.args = copy_args(raw);
  Tensors tensors(a);
  tensors.check_form(a.state, a.records.k);
  const bool layered = a.state.ndim == 5;
  const int lead = layered;
  if (a.state.ndim != 4 && !layered)
    invalid("state: expected 4 dimensions [slots,HV,V,K], or 5 with layers in front, got ", a.state.ndim);
  tensors.check(a.state_layout, a.first_valid_slot);
  tensors.check_form(a.accept_len);
  tensors.bind(a.accept_len);
  const bool v_first = a.state_layout == KDA_STATE_V_FIRST;
  p.layers = layered ? a.state.shape[0] : 1;
  p.N = p.B = a.accept_len.shape[0];
  p.HV = a.state.shape[lead + 1];
  p.V = a.state.shape[lead + (v_first ? 2 : 3)], p.K = a.state.shape[lead + (v_first ? 3 : 2)];
  if (p.K < 1 || p.K > kMaxSize || p.V < 1 || p.V > kMaxSize || p.HV < 1)
    invalid("state: expected HV >= 1 and K and V in 1..", kMaxSize, ", got ", shape_text(a.state.shape, a.state.ndim));
  if (a.records.k.ndim != 4 + lead) invalid("records.k: expected ", 4 + lead, " dimensions, got ", a.records.k.ndim);
  check_sizes("state", p, p.layers);
  p.H = a.records.k.shape[lead + 2];
  if (p.H < 1 || p.HV % p.H) invalid("records.k: expected H to divide HV = ", p.HV, ", got ", p.H);
  if (layered) tensors.layers = p.layers;
  tensors.k_first = !v_first;
  tensors[Size::H] = p.H, tensors[Size::HV] = p.HV, tensors[Size::K] = p.K, tensors[Size::V] = p.V;
  tensors.check(a.state, a.accept_len);
  tensors.check_all(a.state_indices);
  if (!present(a.state_indices) && a.state.shape[lead] < p.N)
    invalid("state: expected at least N = ", p.N, " slots without state_indices, got ", a.state.shape[lead]);
  p.R = check_records(a.records, tensors);
  check_parents(a.parents, p, 0, tensors);
  p.T = present(a.parents) ? std::min(a.parents.shape[1], p.R) : p.R;
  tensors.check_form(a.conv_x, a.conv_state, a.conv_indices);
  tensors.check_company(a.conv_state, a.conv_indices);
  if (present(a.conv_x)) {
    const kda_tensor &x = a.conv_x, &s = a.conv_state;
    const int ndim = 3 + lead;
    if (x.ndim != ndim) invalid("conv_x: expected ", ndim, " dimensions, got ", x.ndim);
    if (s.ndim != ndim) invalid("conv_state: expected ", ndim, " dimensions, got ", s.ndim);
    tensors[Size::D] = x.shape[lead + 2];
    tensors.check(x, s);
    const int64_t T = x.shape[lead + 1], slots = s.shape[lead], keep = s.shape[lead + 2];
    if (keep < 1 || keep >= kMaxConvWidth)
      invalid("conv_state: expected W-1 in 1..", kMaxConvWidth - 1, ", got ", keep);
    tensors.check(a.conv_indices);
    if (!present(a.conv_indices) && slots < p.N)
      invalid("conv_state: expected at least N = ", p.N, " slots without conv_indices, got ", slots);
    p.T = std::min(p.T, T);
  }
  check_memory(tensors, a.exec, p, p.layers);
  return p;
}

FlushVerifyProblem validate(const kda_flush_verify_args* raw) {
  kda_flush_verify_args a = copy_args(raw, offsetof(kda_flush_verify_args, norm));
  Tensors tensors(a);
  Dims d = check_inputs(a.in, a.conv, a.o, tensors);
  check_states(a.states, nullptr, tensors);
  if (!present(a.states.h0) || !present(a.states.hT)) invalid("hT: expected h0 and hT, the same pool, got one of them");
  if (a.states.h0.data != a.states.hT.data) invalid("hT: expected the pool h0 itself, got another tensor");
  if (present(a.states.has_initial_state)) invalid("has_initial_state: expected none, got one");
  tensors.check_all(a.o);
  tensors.check_all(a.accept_len);
  const bool ring = present(a.records.ring_count);
  const int64_t R = check_records(a.records, tensors);
  if (!R) invalid("records.u: expected records, got none");
  check_drafts(d, R);
  const int64_t last = check_records(a.last, tensors);
  if (present(a.last.ring_count)) invalid("last.ring_count: expected none: a ring is given as records, got one");
  if (ring && last) invalid("last.u: expected none with a ring, which holds the last round's records, got some");
  if (!ring && !last) invalid("last.u: expected the records of the last round (or a ring), got none");
  if (a.max_tokens < 0 || (a.max_tokens && !ring)) invalid("max_tokens: expected 0 without a ring, got ", a.max_tokens);
  if (a.max_tokens && a.max_tokens < dense_tokens(d))
    invalid("max_tokens: expected at least T = ", d.T, " (or 0), got ", a.max_tokens);
  if (ring && d.varlen && !a.max_tokens)
    invalid("max_tokens: expected the most tokens of any round, with a ring and cu_seqlens, got 0");
  const int64_t most = a.max_tokens ? a.max_tokens : dense_tokens(d);
  if (ring && R < 2 * most)
    invalid("records.u: expected a ring of at least 2 x ", most, " entries, for two rounds, got ", R);
  tensors.check(a.reserved);
  tensors.check_all(a.last_conv_x);
  if (ring && present(a.last_parents)) invalid("last_parents: expected none with a ring, got some");
  check_parents(a.last_parents, d, 0, tensors);
  check_parents(a.parents, d, dense_tokens(d), tensors);
  if (ring && present(a.parents)) invalid("parents: expected none with a ring: its entries are a chain, got some");
  check_norm(a.norm, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<FlushVerifyProblem>(d, a);
}

void validate_data(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  check_cu_seqlens(p, a.in);
  if (present(a.states.state_indices))
    check_slots("state_indices", a.states.state_indices, a.states.first_valid_slot, a.states.h0.shape[0]);
  check_conv_data(a.conv, a.states);
  check_draft_lengths(p, a.in, present(a.records.u) ? a.records.u.shape[1] : 0, a.parents);
  check_width("parents", a.parents);
  check_record_slots("records.indices", a.records, 0);
}
void validate_data(const FlushProblem& p) {
  const kda_flush_args& a = p.args;
  const int lead = a.state.ndim == 5;
  if (present(a.state_indices)) check_slots("state_indices", a.state_indices, a.first_valid_slot, a.state.shape[lead]);
  check_record_slots("records.indices", a.records, lead);
  if (present(a.conv_indices)) check_slots("conv_indices", a.conv_indices, 0, a.conv_state.shape[lead]);
  check_width("accept_len", a.accept_len), check_width("parents", a.parents);
}
void validate_data(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  check_cu_seqlens(p, a.in);
  check_states_data(states_of(a.states), p.N);
  check_conv_data(a.conv, a.states);
  check_draft_lengths(p, a.in, a.records.u.shape[1], a.parents);
  for (int64_t n = 0; p.varlen && a.max_tokens && n < p.N; ++n)
    if (const int64_t length = sequence_at(p, a.in, n).length; length > a.max_tokens)
      invalid("cu_seqlens: expected at most max_tokens = ", a.max_tokens, " tokens a request, got ", length,
              " for request ", n);
  check_record_slots("records.indices", a.records, 0);
  check_record_slots("last.indices", a.last, 0);
  check_width("accept_len", a.accept_len);
  check_width("parents", a.parents), check_width("last_parents", a.last_parents);
}

}  // namespace kda
