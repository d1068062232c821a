// Legal calls with every optional tensor in them, for tests that break one thing at a time, and what a refusal must be.
#pragma once
#include <functional>
#include <vector>

#include "conv_calls.h"
#include "fields.h"
#include "norm_calls.h"
#include "speculation_calls.h"
#include "stage_calls.h"

namespace kda::test {

// An args struct with all its memory. Every output, state pools included, is poison until the call succeeds.
template <class Args>
struct Legal;

// What forward and decode share: packed sequences (an empty one, a tail), pools with spare slots.
struct LegalStates {
  explicit LegalStates(const Case& c) : in(c), h0(in, KDA_F32, 5), hT(KDA_F32, in.state_shape(in.N + 5), c.layout) {}
  void fill(kda_states& s) {
    s.h0 = h0.h, s.hT = hT;
    s.state_indices = h0.state_indices;
    s.has_initial_state = h0.has_initial_state;
  }
  Inputs in;
  Pool h0;
  Tensor hT;
};

inline Case legal_case() {
  return {.name = "legal",
          .H = 1,
          .HV = 2,
          .K = 5,
          .V = 3,
          .lengths = {2, 0, 5},
          .tail = 2,
          .gate_form = KDA_GATE_SOFTPLUS,
          .gates = Gates::kRaw,
          .A_log = true,
          .dt_bias = true};
}

template <>
struct Legal<kda_forward_args> : LegalStates {
  explicit Legal(const Case& c = legal_case())
      : LegalStates(c),
        out(in, true),
        checkpoints(KDA_F32, in.state_shape(4)),
        checkpoint_slots(KDA_I32, {in.N, 1}, std::vector<double>(in.N, -1)) {
    args = forward_args(in, out);
    fill(args.states);
    args.checkpoints = checkpoints;
    args.checkpoint_slots = checkpoint_slots;
    args.checkpoint_every = 64;
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() {
    return {&hT, &out.o, &out.hT, &out.h, &out.v_new, &out.Aqk, &out.Akk, &checkpoints};
  }
  ForwardOutputs out;
  Tensor checkpoints, checkpoint_slots;
  kda_forward_args args;
};

template <>
struct Legal<kda_decode_args> : LegalStates {
  explicit Legal(const Case& c = legal_case()) : LegalStates(c), o(c.dtype, {in.B, in.T, c.HV, c.V}) {
    args = KDA_DECODE_ARGS_INIT;
    args.in = in.view(), args.o = o;
    fill(args.states);
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&hT, &o}; }
  Tensor o;
  kda_decode_args args;
};

// Speculation: trees of drafts, records in slots of their own. The states stay as they are.
struct LegalDrafts {
  explicit LegalDrafts(const Case& c, bool ring = false)
      : drafts({.c = c, .R = 2 * Drafts({.c = c}).longest(), .ring = ring, .tree = true}),
        in(drafts.in),
        h0(drafts.pool),
        records(drafts),
        o(drafts.output()) {
    records.u.fill(0.5), records.k.fill(0.5), records.alpha.fill(0.5);
  }
  Drafts drafts;
  Inputs& in;
  Pool& h0;
  Records records;
  Tensor o;
};

template <>
struct Legal<kda_verify_args> : LegalDrafts {
  explicit Legal(const Case& c = legal_case()) : LegalDrafts(c, true), args(verify_args(drafts, records, o)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&o, &records.u, &records.k, &records.alpha}; }
  kda_verify_args args;
};

template <>
struct Legal<kda_flush_args> : LegalDrafts {
  explicit Legal(const Case& c = legal_case())
      : LegalDrafts(c, true),
        conv_x(KDA_F32, {in.N, drafts.longest(), 7}),
        conv_state(KDA_F32, {in.N + 2, 7, 3}),
        conv_indices(KDA_I32, {in.N}),
        args(flush_args(drafts, h0.h, records)) {
    conv_x.fill(0.5), conv_state.fill(0.25);
    for (int64_t n = 0; n < in.N; ++n) conv_indices.set(n, static_cast<double>(in.N + 1 - n));
    args.conv_x = conv_x, args.conv_state = conv_state, args.conv_indices = conv_indices;
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&h0.h, &conv_state}; }
  Tensor conv_x, conv_state, conv_indices;
  kda_flush_args args;
};

template <>
struct Legal<kda_flush_verify_args> : LegalDrafts {
  explicit Legal(const Case& c = legal_case())
      : LegalDrafts(c), last(drafts), args(flush_verify_args(drafts, drafts, h0.h, last, records, o)) {
    last.u.fill(0.5), last.k.fill(0.5), last.alpha.fill(0.5);
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&o, &h0.h, &records.u, &records.k, &records.alpha}; }
  Records last;
  kda_flush_verify_args args;
};

template <>
struct Legal<kda_backward_args> {
  explicit Legal(const Case& c = legal_case()) : in(c), saved(in, true), out(in) {
    for (Tensor* t : {&saved.h, &saved.v_new, &saved.Aqk, &saved.Akk}) t->fill(0.5);
    args = backward_args(in, out, &saved);
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() {
    std::vector<Tensor*> all;
    for (const Named& n : out.tensors()) all.push_back(n.tensor);
    return all;
  }
  Inputs in;
  ForwardOutputs saved;
  BackwardOutputs out;
  kda_backward_args args;
};

template <>
struct Legal<kda_segment_map_args> {
  explicit Legal(const Case& c = legal_case()) : in(c), out(in), args(segment_map_args(in, out)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&out.M, &out.b, &out.d}; }
  Inputs in;
  SegmentOutputs out;
  kda_segment_map_args args;
};

template <>
struct Legal<kda_segment_merge_args> {
  explicit Legal(const Case& c = legal_case()) : t(3, c.HV, c.K, c.V, KDA_STATE_V_FIRST), args(segment_merge_args(t)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&t.states}; }
  MergeTensors t;
  kda_segment_merge_args args;
};

// A stage: every tensor of the split holds what the stages before it left there.
template <class Args>
requires requires(Args a) { a.at.cu_seqlens; }
struct Legal<Args> {
  explicit Legal(const Case& c = legal_case()) : in(c), t(in, KDA_F32, KDA_F32) {
    const auto run_all = [](const auto& a) { run(a); };
    for_each_forward_stage(t, run_all);
    for_each_backward_stage(t, run_all);
    args = t.args<Args>();
    for (const Field& f : fields())
      if (f.output && !t.both_ways(f.name)) t.all.at(f.name).poison();
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() {
    std::vector<Tensor*> all;
    for (const Field& f : fields())
      if (f.output) all.push_back(&t.all.at(f.name));
    return all;
  }
  Inputs in;
  StageTensors t;
  Args args;
};

template <>
struct Legal<kda_prefill_f32_args> {
  explicit Legal(const Case& c = legal_case())
      : q(filled({1, c.H, 9, c.K})),
        k(filled({1, c.H, 9, c.K})),
        v(filled({1, c.HV, 9, c.V})),
        g(filled({1, c.HV, 9, c.K})),
        beta(filled({1, c.HV, 9})),
        h0(filled({1, c.HV, c.V, c.K})),
        o(KDA_F32, {1, c.HV, 9, c.V}),
        w(KDA_F32, {1, c.HV, 1, 64, c.K}),
        u(KDA_F32, {1, c.HV, 1, 64, c.V}),
        hT(KDA_F32, {1, c.HV, c.V, c.K}) {
    args = KDA_PREFILL_F32_ARGS_INIT;
    args.q = q, args.k = k, args.v = v, args.g = g, args.beta = beta, args.h0 = h0;
    args.o = o, args.w = w, args.u = u, args.hT = hT;
  }
  static Tensor filled(const std::vector<int64_t>& shape) {
    Tensor t(KDA_F32, shape);
    t.fill(-0.25);
    return t;
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&o, &w, &u, &hT}; }
  Tensor q, k, v, g, beta, h0, o, w, u, hT;
  kda_prefill_f32_args args;
};

template <>
struct Legal<kda_gate_args> {
  explicit Legal(const Case& c = legal_case()) : in(c), t(in, c.g_dtype), args(gate_args(in, t)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&t.g}; }
  Inputs in;
  GateTensors t;
  kda_gate_args args;
};

template <>
struct Legal<kda_gate_backward_args> {
  explicit Legal(const Case& c = legal_case()) : in(c), t(in, c.g_dtype), args(gate_backward_args(in, t)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&t.dx, &t.dA_log, &t.d_dt_bias}; }
  Inputs in;
  GateTensors t;
  kda_gate_backward_args args;
};

inline NormCase legal_norm_case() { return {.name = "legal", .B = 2, .T = 3, .HV = 2, .V = 5}; }

template <>
struct Legal<kda_norm_gate_args> {
  explicit Legal(const Case& = legal_case()) : in(legal_norm_case()), out(in), args(norm_gate_args(in, out)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&out.y}; }
  NormInputs in;
  NormOutputs out;
  kda_norm_gate_args args;
};

template <>
struct Legal<kda_norm_gate_backward_args> {
  explicit Legal(const Case& = legal_case()) : in(legal_norm_case()), out(in), args(norm_gate_backward_args(in, out)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&out.dx, &out.dgate, &out.dweight}; }
  NormInputs in;
  NormOutputs out;
  kda_norm_gate_backward_args args;
};

inline ConvCase legal_conv_case() { return {.name = "legal", .D = 5, .W = 3, .lengths = {2, 0, 5}, .tail = 2}; }

template <>
struct Legal<kda_conv_args> {
  explicit Legal(const Case& = legal_case())  // with pools whose slots are in another order
      : in(legal_conv_case()),
        y(KDA_F32, {in.B, in.T, in.c.D}),
        initial_state(KDA_F32, {in.N + 5, in.c.D, in.c.W - 1}),
        final_state(KDA_F32, initial_state.shape()),
        state_indices(KDA_I32, {in.N}, {6, 2, 4}),
        has_initial_state(KDA_BOOL, {in.N}, {1, 1, 0}),
        args(KDA_CONV_ARGS_INIT) {
    initial_state.fill(0.5);
    args.x = in.x, args.weight = in.weight, args.bias = in.bias, args.cu_seqlens = in.cu_seqlens;
    args.initial_state = initial_state, args.final_state = final_state;
    args.state_indices = state_indices, args.has_initial_state = has_initial_state;
    args.y = y, args.silu = 1;
  }
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&y, &final_state}; }
  ConvInputs in;
  Tensor y, initial_state, final_state, state_indices, has_initial_state;
  kda_conv_args args;
};

template <>
struct Legal<kda_conv_backward_args> {
  explicit Legal(const Case& = legal_case()) : in(legal_conv_case()), out(in), args(conv_backward_args(in, out)) {}
  std::vector<Field> fields() { return given(args); }
  std::vector<Tensor*> outputs() { return {&out.dx, &out.dweight, &out.dbias, &out.d_initial}; }
  ConvInputs in;
  ConvGradientOutputs out;
  kda_conv_backward_args args;
};

// Gives args the workspace they ask for while they are still legal.
template <class Args>
Workspace workspace_for(Args& args) {
  uint64_t bytes = 0;
  EXPECT_EQ(query(args, &bytes), KDA_OK) << kda_last_error();
  Workspace workspace(bytes);
  args.exec.workspace = bytes ? workspace.data() : nullptr;
  args.exec.workspace_bytes = bytes;
  return workspace;
}

// Expects that the call is refused with this status and a message that begins with exactly this sentence, which names
// the argument, what was expected and what was given; and that no output changed.
template <class Args>
void expect_refused(Legal<Args>& x, const std::string& sentence, kda_status status = KDA_INVALID_ARGUMENT) {
  std::vector<Bits> before;
  for (const Tensor* t : x.outputs()) before.push_back(t->bits());
  EXPECT_EQ(call(x.args), status) << "expected refusal: " << sentence;
  const std::string got = kda_last_error();
  EXPECT_EQ(got.substr(0, sentence.size()), sentence) << "the whole sentence: " << got;
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(x.outputs()[i]->bits(), before[i]) << "output " << i << " was written after: " << sentence;
    EXPECT_TRUE(x.outputs()[i]->margins_intact()) << "output " << i << " after: " << sentence;
  }
}

// Breaks a fresh legal call and expects the refusal.
template <class Args>
void refuses(const std::string& sentence, const std::function<void(Legal<Args>&)>& break_it,
             kda_status status = KDA_INVALID_ARGUMENT) {
  Legal<Args> x;
  const Workspace workspace = workspace_for(x.args);
  break_it(x);
  expect_refused(x, sentence, status);
}

// ---- every operator, for suites of tests that are typed by it ----

using AllArgs = testing::Types<kda_forward_args, kda_backward_args, kda_decode_args, kda_verify_args, kda_flush_args,
                               kda_flush_verify_args, kda_gate_args, kda_gate_backward_args, kda_segment_map_args,
                               kda_segment_merge_args, kda_stage_cumsum_args, kda_stage_chunk_intra_args,
                               kda_stage_recompute_w_u_args, kda_stage_delta_h_args, kda_stage_fwd_o_args,
                               kda_stage_bwd_local_args, kda_stage_bwd_delta_h_args, kda_stage_bwd_wy_dqkg_args,
                               kda_stage_bwd_intra_args, kda_stage_cumsum_backward_args, kda_prefill_f32_args,
                               kda_norm_gate_args, kda_norm_gate_backward_args, kda_conv_args, kda_conv_backward_args>;
struct OperatorNames {
  template <class Args>
  static std::string GetName(int) {
    return op_name<Args>();
  }
};

}  // namespace kda::test
