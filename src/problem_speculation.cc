#include <cstddef>

#include "problem.h"
#include "speculation.h"
#include "validate.h"

namespace kda {
namespace {

// u, k, alpha: [slots,R,..], with a leading dimension of layers if `layers` >= 0. Returns R, 0 without records.
int64_t check_records(const kda_records& r, const char* name, const Dims& d, int64_t layers, Tensors& tensors,
                      bool output, bool cursors_out = false) {
  static constexpr const char* kNames[2][6] = {
      {"records.u", "records.k", "records.alpha", "records.indices", "records.ring_first", "records.ring_count"},
      {"last.u", "last.k", "last.alpha", "last.indices", "last.ring_first", "last.ring_count"}};
  const auto& names = kNames[std::string_view(name) == "last"];
  const kda_tensor* const all[] = {&r.u, &r.k, &r.alpha, &r.indices, &r.ring_first, &r.ring_count};
  for (int i = 0; i < 6; ++i) check_absent_is_empty(names[i], *all[i]);
  const int given = present(r.u) + present(r.k) + present(r.alpha);
  for (int i = 0; i < 3; ++i)
    if (given && !present(*all[i])) invalid(names[i], ": expected together with the others of u, k, alpha, got none");
  if (!given) {
    for (int i = 3; i < 6; ++i)
      if (present(*all[i])) invalid(names[i], ": expected records with it, got none");
    return 0;
  }
  const int lead = layers >= 0, ndim = 4 + lead;
  if (r.u.ndim != ndim)
    invalid(names[0], ": expected ", ndim, " dimensions ", lead ? "[layers,slots,R,HV,V]" : "[slots,R,HV,V]", ", got ",
            r.u.ndim);
  const int64_t slots = r.u.shape[lead], R = r.u.shape[lead + 1];
  if (R < 1 || R > kMaxRecordEntries)
    invalid(names[0], ": expected 1 to 2^30 entries a slot, got ", shape_text(r.u.shape, ndim));
  const auto shape = [&](int64_t heads, int64_t size) {
    return lead ? Shape{layers, slots, R, heads, size} : Shape{slots, R, heads, size};
  };
  tensors.check(names[0], r.u, shape(d.HV, d.V), ndim, kSingles, output, " ([slots,R,HV,V])");
  tensors.check(names[1], r.k, shape(d.H, d.K), ndim, kSingles, output, " ([slots,R,H,K])");
  tensors.check(names[2], r.alpha, shape(d.HV, d.K), ndim, kSingles, output, " ([slots,R,HV,K])");
  if (present(r.indices)) tensors.check_any_stride(names[3], r.indices, {d.N}, 1, kIndices, false, " ([N])");
  else if (slots < d.N) invalid(names[0], ": expected at least N = ", d.N, " slots without indices, got ", slots);
  if (present(r.ring_first) != present(r.ring_count))
    invalid(names[5], ": expected together with ring_first, got ", present(r.ring_first) ? "ring_first" : "ring_count",
            " alone");
  if (present(r.ring_first)) {
    tensors.check_any_stride(names[4], r.ring_first, {slots}, 1, bit(KDA_I32), cursors_out, " ([slots])");
    tensors.check_any_stride(names[5], r.ring_count, {slots}, 1, bit(KDA_I32), cursors_out, " ([slots])");
  }
  return R;
}

// [N,T']; T' may be more than the tokens of the call.
void check_parents(const char* name, const kda_tensor& parents, const Dims& d, int64_t tokens, Tensors& tensors) {
  check_absent_is_empty(name, parents);
  if (!present(parents)) return;
  if (parents.ndim != 2 || parents.shape[0] != d.N || parents.shape[1] < tokens)
    invalid(name, ": expected shape [N,T] with N = ", d.N, " and T at least ", tokens, ", got ",
            shape_text(parents.shape, parents.ndim));
  tensors.check_storage(name, parents, kIndices, false);
}

int64_t dense_tokens(const Dims& d) { return d.varlen ? 0 : d.T; }

void check_drafts(const Dims& d, int64_t R) {
  if (dense_tokens(d) > kMaxDrafts) invalid("q: expected at most ", kMaxDrafts, " tokens a request, got T = ", d.T);
  if (R && dense_tokens(d) > R) invalid("records.u: expected at least T = ", d.T, " entries a slot, got ", R);
}

void check_accept_len(const kda_tensor& t, int64_t N, Tensors& tensors) {
  check_absent_is_empty("accept_len", t);
  tensors.check_any_stride("accept_len", t, {N}, 1, kIndices, false, " ([N])");
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
  check_exec(a.exec);
  Tensors tensors;
  Dims d = check_inputs(a.in, a.conv, a.o, false, tensors);
  check_states(a.states, d, a.in, tensors);
  if (!present(a.states.h0)) invalid("h0: expected the states to verify from, got none");
  if (present(a.states.hT)) invalid("hT: expected none, verify writes no state, got one");
  check_absent_is_empty("o", a.o);
  tensors.check("o", a.o, {d.B, d.T, d.HV, d.V}, 4, kFloats, true, " like v");
  const int64_t R = check_records(a.records, "records", d, -1, tensors, true);
  check_drafts(d, R);
  check_parents("parents", a.parents, d, dense_tokens(d), tensors);
  check_norm(a.norm, a.o, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<VerifyProblem>(d, a);
}

FlushProblem validate(const kda_flush_args* raw) {
  FlushProblem p{};
  kda_flush_args& a = p.args = copy_args(raw, sizeof(kda_flush_args));
  check_exec(a.exec);
  Tensors tensors;
  check_absent_is_empty("state", a.state), check_absent_is_empty("records.k", a.records.k);
  const bool layered = a.state.ndim == 5;
  const int lead = layered;
  if (a.state.ndim != 4 && !layered)
    invalid("state: expected 4 dimensions [slots,HV,V,K], or 5 with layers in front, got ", a.state.ndim);
  check_range("state_layout", a.state_layout, KDA_STATE_V_FIRST, KDA_STATE_K_FIRST);
  if (a.first_valid_slot < 0) invalid("first_valid_slot: expected >= 0, got ", a.first_valid_slot);
  check_absent_is_empty("accept_len", a.accept_len);
  if (a.accept_len.ndim != 1) invalid("accept_len: expected 1 dimension [N], got ", a.accept_len.ndim);
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
  tensors.check_storage("state", a.state, kStates, true);
  check_accept_len(a.accept_len, p.N, tensors);
  check_absent_is_empty("state_indices", a.state_indices);
  if (present(a.state_indices))
    tensors.check_any_stride("state_indices", a.state_indices, {p.N}, 1, kIndices, false, " ([N])");
  else if (a.state.shape[lead] < p.N)
    invalid("state: expected at least N = ", p.N, " slots without state_indices, got ", a.state.shape[lead]);
  p.R = check_records(a.records, "records", p, layered ? p.layers : -1, tensors, false);
  check_parents("parents", a.parents, p, 0, tensors);
  p.T = present(a.parents) ? std::min(a.parents.shape[1], p.R) : p.R;
  for (const auto& [name, t] :
       {std::pair{"conv_x", &a.conv_x}, {"conv_state", &a.conv_state}, {"conv_indices", &a.conv_indices}})
    check_absent_is_empty(name, *t);
  if (present(a.conv_x) != present(a.conv_state))
    invalid("conv_state: expected together with conv_x, got ", present(a.conv_x) ? "conv_x" : "conv_state", " alone");
  if (present(a.conv_indices) && !present(a.conv_x)) invalid("conv_indices: expected conv_x with it, got none");
  if (present(a.conv_x)) {
    const kda_tensor &x = a.conv_x, &s = a.conv_state;
    const int ndim = 3 + lead;
    if (x.ndim != ndim) invalid("conv_x: expected ", ndim, " dimensions, got ", x.ndim);
    if (s.ndim != ndim) invalid("conv_state: expected ", ndim, " dimensions, got ", s.ndim);
    const int64_t T = x.shape[lead + 1], D = x.shape[lead + 2], slots = s.shape[lead], keep = s.shape[lead + 2];
    tensors.check("conv_x", x, lead ? Shape{p.layers, p.N, T, D} : Shape{p.N, T, D}, ndim, kFloats, false,
                  " ([N,T,D])");
    tensors.check_any_stride("conv_state", s, lead ? Shape{p.layers, slots, D, keep} : Shape{slots, D, keep}, ndim,
                             kFloats, true, " ([slots,D,W-1], D like conv_x)");
    if (keep < 1 || keep >= kMaxConvWidth)
      invalid("conv_state: expected W-1 in 1..", kMaxConvWidth - 1, ", got ", keep);
    if (present(a.conv_indices))
      tensors.check_any_stride("conv_indices", a.conv_indices, {p.N}, 1, kIndices, false, " ([N])");
    else if (slots < p.N)
      invalid("conv_state: expected at least N = ", p.N, " slots without conv_indices, got ", slots);
    p.T = std::min(p.T, T);
  }
  check_memory(tensors, a.exec, p, p.layers);
  return p;
}

FlushVerifyProblem validate(const kda_flush_verify_args* raw) {
  kda_flush_verify_args a = copy_args(raw, offsetof(kda_flush_verify_args, norm));
  check_exec(a.exec);
  Tensors tensors;
  Dims d = check_inputs(a.in, a.conv, a.o, true, tensors);
  check_states(a.states, d, a.in, tensors);
  if (!present(a.states.h0) || !present(a.states.hT)) invalid("hT: expected h0 and hT, the same pool, got one of them");
  if (a.states.h0.data != a.states.hT.data) invalid("hT: expected the pool h0 itself, got another tensor");
  if (present(a.states.has_initial_state)) invalid("has_initial_state: expected none, got one");
  check_absent_is_empty("o", a.o);
  tensors.check("o", a.o, {d.B, d.T, d.HV, d.V}, 4, kFloats, true, " like v");
  check_accept_len(a.accept_len, d.N, tensors);
  const bool ring = present(a.records.ring_count);
  const int64_t R = check_records(a.records, "records", d, -1, tensors, true, true);
  if (!R) invalid("records.u: expected records, got none");
  check_drafts(d, R);
  const int64_t last = check_records(a.last, "last", d, -1, tensors, false);
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
  if (a.reserved) invalid("args.reserved: expected 0, got ", a.reserved);
  check_absent_is_empty("last_conv_x", a.last_conv_x);
  if (present(a.conv.x) != present(a.last_conv_x))
    invalid("last_conv_x: expected together with conv.x, got ", present(a.conv.x) ? "conv.x" : "last_conv_x", " alone");
  if (present(a.last_conv_x)) {
    const int64_t T = a.last_conv_x.ndim == 3 ? a.last_conv_x.shape[1] : 0;
    tensors.check("last_conv_x", a.last_conv_x, {d.N, T, a.conv.x.shape[2]}, 3, bit(a.conv.x.dtype), false,
                  " ([N,T,D], D like conv.x)");
  }
  if (ring && present(a.last_parents)) invalid("last_parents: expected none with a ring, got some");
  check_parents("last_parents", a.last_parents, d, 0, tensors);
  check_parents("parents", a.parents, d, dense_tokens(d), tensors);
  if (ring && present(a.parents)) invalid("parents: expected none with a ring: its entries are a chain, got some");
  check_norm(a.norm, a.o, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<FlushVerifyProblem>(d, a);
}

bool has_f64(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  return any_f64(a.in) || any_f64(a.conv) || any_f64(a.norm) ||
         any_f64({&a.states.h0, &a.o, &a.records.u, &a.records.k, &a.records.alpha});
}
bool has_f64(const FlushProblem& p) {
  const kda_flush_args& a = p.args;
  return any_f64({&a.state, &a.records.u, &a.records.k, &a.records.alpha, &a.conv_x, &a.conv_state});
}
bool has_f64(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  return any_f64(a.in) || any_f64(a.conv) || any_f64(a.norm) ||
         any_f64(
             {&a.states.h0, &a.o, &a.records.u, &a.records.k, &a.records.alpha, &a.last.u, &a.last.k, &a.last.alpha});
}

void validate_data(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  check_states_data(p, a.in, a.states);
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
  check_states_data(p, a.in, a.states);
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
