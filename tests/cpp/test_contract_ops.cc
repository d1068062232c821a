// What single arguments must be: head sizes, gates, states and pools, checkpoints, what backward needs, values of
// cu_seqlens and slots; and the choice of an implementation where none takes the call.
#include <cmath>
#include <limits>

#include "contract.h"

namespace kda::test {
namespace {

using F = Legal<kda_forward_args>;
using B = Legal<kda_backward_args>;
using D = Legal<kda_decode_args>;
using G = Legal<kda_gate_args>;
using V = Legal<kda_verify_args>;
using FV = Legal<kda_flush_verify_args>;

// Expects all operators on sequences to refuse the same break of what they share.
template <class BreakIt>
void all_refuse(const std::string& sentence, BreakIt break_it) {
  refuses<kda_forward_args>(sentence, [&](F& x) { break_it(x.args.in, x.in); });
  refuses<kda_backward_args>(sentence, [&](B& x) { break_it(x.args.in, x.in); });
  refuses<kda_decode_args>(sentence, [&](D& x) { break_it(x.args.in, x.in); });
  refuses<kda_verify_args>(sentence, [&](V& x) { break_it(x.args.in, x.in); });
  refuses<kda_flush_verify_args>(sentence, [&](FV& x) { break_it(x.args.in, x.in); });
}
template <class BreakIt>
void pools_refuse(const std::string& sentence, BreakIt break_it) {
  refuses<kda_forward_args>(sentence, [&](F& x) { break_it(x.args.states, x); });
  refuses<kda_decode_args>(sentence, [&](D& x) { break_it(x.args.states, x); });
}

void set_last(kda_tensor& t, int64_t size) { t.shape[t.ndim - 1] = size; }

// ---- inputs ----

TEST(Inputs, HeadSizes) {
  for (const int64_t size : {0, 257}) {
    const std::string got = std::to_string(size);
    all_refuse("q: expected K in 1..256, got " + got, [&](kda_inputs& in, Inputs&) { set_last(in.q, size); });
    all_refuse("v: expected V in 1..256, got " + got, [&](kda_inputs& in, Inputs&) { set_last(in.v, size); });
  }
  all_refuse("q: expected H >= 1, got 0", [](kda_inputs& in, Inputs&) { in.q.shape[2] = 0; });
  all_refuse("v: expected HV a multiple of H = 1, got 0", [](kda_inputs& in, Inputs&) { in.v.shape[2] = 0; });
  all_refuse("v: expected HV a multiple of H = 3, got 2", [](kda_inputs& in, Inputs&) { in.q.shape[2] = 3; });
  all_refuse("q: expected 4 dimensions [B,T,H,K], got 0", [](kda_inputs& in, Inputs&) { in.q = {}; });
  all_refuse("v: expected 4 dimensions [B,T,HV,V], got 3", [](kda_inputs& in, Inputs&) { in.v.ndim = 3; });
  all_refuse("k: expected 4 dimensions [1,9,1,5] like q, got 0", [](kda_inputs& in, Inputs&) { in.k = {}; });
  all_refuse("k: expected shape [1,9,1,5] like q, got [1,8,1,5]", [](kda_inputs& in, Inputs&) { in.k.shape[1] = 8; });
  all_refuse("beta: expected 3 dimensions [1,9,2]", [](kda_inputs& in, Inputs&) { in.beta = {}; });
}

TEST(Inputs, Dtypes) {
  all_refuse("k: expected float32, got bfloat16", [](kda_inputs& in, Inputs&) { in.k.dtype = KDA_BF16; });
  all_refuse("v: expected float32, got float16", [](kda_inputs& in, Inputs&) { in.v.dtype = KDA_F16; });
  all_refuse("q: expected float32 or bfloat16 or float16, got int32",
             [](kda_inputs& in, Inputs&) { in.q.dtype = KDA_I32; });
  all_refuse("A_log: expected float32, got bfloat16", [](kda_inputs& in, Inputs&) { in.A_log.dtype = KDA_BF16; });
}

TEST(Inputs, Forms) {
  for (const int32_t form : {-1, 3}) {
    const std::string got = ", got " + std::to_string(form);
    all_refuse("gate_form: expected 0..2" + got, [&](kda_inputs& in, Inputs&) { in.gate_form = form; });
    all_refuse("beta_form: expected 0..2" + got, [&](kda_inputs& in, Inputs&) { in.beta_form = form; });
  }
  for (const int32_t layout : {-1, 2})
    all_refuse("state_layout: expected 0..1, got " + std::to_string(layout),
               [&](kda_inputs& in, Inputs&) { in.state_layout = layout; });
  for (const float scale : {std::numeric_limits<float>::infinity(), std::nanf("")})
    all_refuse("scale: expected a finite number, got ", [&](kda_inputs& in, Inputs&) { in.scale = scale; });
}

TEST(Inputs, Gates) {
  all_refuse("A_log: expected [HV] with the softplus gate, got none", [](kda_inputs& in, Inputs&) { in.A_log = {}; });
  all_refuse("A_log: expected none when g is already the decay, got one",
             [](kda_inputs& in, Inputs&) { in.gate_form = KDA_GATE_LOG; });
  all_refuse("dt_bias: expected none when g is already the decay, got one", [](kda_inputs& in, Inputs&) {
    in.gate_form = KDA_GATE_LOG;
    in.A_log = {};
  });
  for (const float bound : {0.0f, 1.0f, -std::numeric_limits<float>::infinity(), std::nanf("")})
    all_refuse("lower_bound: expected a finite number < 0, got ", [&](kda_inputs& in, Inputs&) {
      in.gate_form = KDA_GATE_LOWER_BOUND;
      in.lower_bound = bound;
    });
}

TEST(Inputs, CuSeqlens) {
  all_refuse("cu_seqlens: expected one row of packed sequences (B = 1), got B = 2", [](kda_inputs& in, Inputs&) {
    for (kda_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta}) t->shape[0] = 2;
  });
  all_refuse("cu_seqlens: expected shape [N+1], got [0]", [](kda_inputs& in, Inputs&) { in.cu_seqlens.shape[0] = 0; });
  all_refuse("cu_seqlens: expected int32 or int64, got float32",
             [](kda_inputs& in, Inputs&) { in.cu_seqlens.dtype = KDA_F32; });
  all_refuse("cu_seqlens[0]: expected 0, got 1", [](kda_inputs&, Inputs& mem) { mem.cu_seqlens.set(0, 1); });
  all_refuse("cu_seqlens[2]: expected at least 2 (never decreasing), got 1",
             [](kda_inputs&, Inputs& mem) { mem.cu_seqlens.set(2, 1); });
  all_refuse("cu_seqlens[1]: expected at least 0 (never decreasing), got -1",
             [](kda_inputs&, Inputs& mem) { mem.cu_seqlens.set(1, -1); });
  all_refuse("cu_seqlens[3]: expected at most T = 9, got 10",
             [](kda_inputs&, Inputs& mem) { mem.cu_seqlens.set(3, 10); });
}

TEST(Inputs, CuSeqlensI64BeyondI32) {  // cut to 32 bits, 2^32 + 7 would be a legal 7
  F x{[] {
    Case c = legal_case();
    c.cu_dtype = KDA_I64;
    return c;
  }()};
  const Workspace workspace = workspace_for(x.args);
  x.in.cu_seqlens.set(3, 4294967303.0);
  expect_refused(x, "cu_seqlens[3]: expected at most T = 9, got 4294967303");
}

// ---- states ----

TEST(States, Pools) {
  pools_refuse("state_indices: expected a pool h0 or hT with it, got neither",
               [](kda_states& s, auto&) { s.h0 = s.hT = s.has_initial_state = {}; });
  pools_refuse("hT: expected as many slots as h0, 8, got 7", [](kda_states& s, auto&) { s.hT.shape[0] = 7; });
  pools_refuse("has_initial_state: expected h0 with it, got none", [](kda_states& s, auto&) { s.h0 = {}; });
  pools_refuse("first_valid_slot: expected >= 0, got -1", [](kda_states& s, auto&) { s.first_valid_slot = -1; });
  pools_refuse("states.reserved: expected 0, got 1", [](kda_states& s, auto&) { s.reserved = 1; });
  pools_refuse("h0: expected 4 dimensions [slots,HV,V,K], got 3", [](kda_states& s, auto&) { s.h0.ndim = 3; });
  pools_refuse("h0: expected shape [8,2,3,5] ([..,HV,V,K], V-first), got [8,2,5,3]",
               [](kda_states& s, auto&) { std::swap(s.h0.shape[2], s.h0.shape[3]); });
  pools_refuse("h0: expected float32 or bfloat16, got float16", [](kda_states& s, auto&) { s.h0.dtype = KDA_F16; });
  pools_refuse("state_indices: expected shape [3] ([N]), got [4]",
               [](kda_states& s, auto&) { s.state_indices.shape[0] = 4; });
  pools_refuse("state_indices: expected int32 or int64, got bool",
               [](kda_states& s, auto&) { s.state_indices.dtype = KDA_BOOL; });
  pools_refuse("has_initial_state: expected bool, got int32",
               [](kda_states& s, auto&) { s.has_initial_state.dtype = KDA_I32; });
}

TEST(States, WithoutIndicesOneRowASequence) {
  pools_refuse("h0: expected shape [3,2,3,5] ([..,HV,V,K], V-first), got [8,2,3,5]",
               [](kda_states& s, auto&) { s.state_indices = {}; });
}

TEST(States, Slots) {
  pools_refuse("state_indices: expected slots below 8, got 8",
               [](kda_states&, auto& x) { x.h0.state_indices.set(1, 8); });
  pools_refuse("state_indices: expected every live slot once, got slot 5 twice",
               [](kda_states&, auto& x) { x.h0.state_indices.set(0, 5), x.h0.state_indices.set(2, 5); });
  pools_refuse("state_indices: expected every live slot once, got slot 7 twice", [](kda_states& s, auto& x) {
    s.first_valid_slot = 7;  // 0 twice would be padding twice
    for (const int n : {0, 1}) x.h0.state_indices.set(n, 7);
  });
}

TEST(States, DuplicatesAmongMany) {  // beyond 32 sequences they are found in another way
  Case c = legal_case();
  c.lengths.assign(40, 1), c.tail = 0;
  D x(c);
  x.h0.state_indices.set(3, 0), x.h0.state_indices.set(38, 0);
  expect_refused(x, "state_indices: expected every live slot once, got slot 0 twice");
  x.args.states.first_valid_slot = 1;  // now both are padding
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
}

// Slots to write, in the legal call's pool: sequences of slots 7, 6, .. read them and write others.
struct WrittenSlots {
  Tensor slots;
  explicit WrittenSlots(const std::vector<double>& values, int32_t dtype = KDA_I32)
      : slots(dtype, {static_cast<int64_t>(values.size())}) {
    for (size_t i = 0; i < values.size(); ++i) slots.set(static_cast<int64_t>(i), values[i]);
  }
};
template <class BreakIt>
void written_refuse(const std::string& sentence, const WrittenSlots& written, BreakIt break_it) {
  const auto both = [&](auto& x) {
    x.args.out_state_indices = written.slots;
    x.args.states.hT = x.args.states.h0;
    break_it(x.args, x);
  };
  refuses<kda_forward_args>(sentence, [&](F& x) { both(x); });
  refuses<kda_decode_args>(sentence, [&](D& x) { both(x); });
}

TEST(States, SlotsToWrite) {
  const auto nothing = [](auto&, auto&) {};
  written_refuse("out_state_indices: expected a pool hT with it, got none", WrittenSlots({0, 1, 2}),
                 [](auto& a, auto&) { a.states.hT = {}; });
  written_refuse("out_state_indices: expected shape [3] ([N]), got [2]", WrittenSlots({0, 1}), nothing);
  written_refuse("out_state_indices: expected int32 or int64, got float32", WrittenSlots({0, 1, 2}, KDA_F32), nothing);
  written_refuse("out_state_indices: expected memory, got NULL", WrittenSlots({0, 1, 2}),
                 [](auto& a, auto&) { a.out_state_indices.data = nullptr; });
  written_refuse("out_state_indices: expected slots below 8, got 8", WrittenSlots({0, 8, 2}), nothing);
  written_refuse("out_state_indices: expected every live slot once, got slot 0 twice", WrittenSlots({0, -1, 0}),
                 nothing);
  written_refuse("out_state_indices: expected integers of 32 bits, got 8589934592",
                 WrittenSlots({0, 8589934592.0, 2}, KDA_I64), nothing);
}

TEST(States, NoSlotIsReadAndWrittenByTwo) {
  for (const int many : {3, 40}) {
    Case c = legal_case();
    if (many > 3) c.lengths.assign(many, 1), c.tail = 0;
    D x(c);
    x.args.states.hT = x.args.states.h0;
    x.args.states.has_initial_state = {};
    const double first = x.h0.state_indices.get(0), last = x.h0.state_indices.get(many - 1);
    WrittenSlots written(std::vector<double>(many, -1));
    x.args.out_state_indices = written.slots;
    written.slots.set(0, first);  // its own
    EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
    written.slots.set(0, last);
    const std::string slot = std::to_string(static_cast<int64_t>(last));
    expect_refused(x, "out_state_indices: expected no slot that another sequence reads, got slot " + slot +
                          ", which sequence " + std::to_string(many - 1) + " reads");
  }
}

// ---- forward ----

void forward_refuses(const std::string& sentence, const std::function<void(F&)>& break_it) {
  refuses<kda_forward_args>(sentence, break_it);
}

TEST(ForwardRefuses, Checkpoints) {
  forward_refuses("checkpoint_slots: expected together with checkpoints, got checkpoints alone",
                  [](F& x) { x.args.checkpoint_slots = {}; });
  forward_refuses("checkpoint_slots: expected together with checkpoints, got checkpoint_slots alone",
                  [](F& x) { x.args.checkpoints = {}; });
  forward_refuses("checkpoint_slots: expected shape [N,M] with N = 3, got [2,1]",
                  [](F& x) { x.args.checkpoint_slots.shape[0] = 2; });
  for (const int32_t every : {0, -64, 1, 24, 56})
    forward_refuses("checkpoint_every: expected a positive multiple of 16, got " + std::to_string(every),
                    [&](F& x) { x.args.checkpoint_every = every; });
  forward_refuses("checkpoint_every: expected 0 without checkpoints, got 64",
                  [](F& x) { x.args.checkpoints = x.args.checkpoint_slots = {}; });
  Tensor offset(KDA_I32, {3}), wide(KDA_I64, {3});
  offset.set(0, 0), offset.set(1, 0), offset.set(2, -1);
  wide.set(0, 0), wide.set(1, 0), wide.set(2, 4294967296.0);
  forward_refuses("checkpoint_offset: expected numbers >= 0, got -1", [&](F& x) { x.args.checkpoint_offset = offset; });
  forward_refuses("checkpoint_offset: expected integers of 32 bits, got 4294967296",
                  [&](F& x) { x.args.checkpoint_offset = wide; });
  forward_refuses("checkpoint_offset: expected shape [3] ([N]), got [2]",
                  [&](F& x) { x.args.checkpoint_offset = offset, x.args.checkpoint_offset.shape[0] = 2; });
  forward_refuses("checkpoint_offset: expected none without checkpoints, got one", [&](F& x) {
    x.args.checkpoints = x.args.checkpoint_slots = {}, x.args.checkpoint_every = 0;
    x.args.checkpoint_offset = offset;
  });
  forward_refuses(
      "checkpoint_slots: expected slots that no sequence reads or writes, got slot 7, which sequence 0 reads",
      [](F& x) { x.args.checkpoints = x.args.states.h0, x.checkpoint_slots.set(0, 7); });
  forward_refuses("checkpoint_slots: expected slots below 4, got 4", [](F& x) { x.checkpoint_slots.set(1, 4); });
  forward_refuses("checkpoint_slots: expected every live slot once, got slot 2 twice",
                  [](F& x) { x.checkpoint_slots.set(0, 2), x.checkpoint_slots.set(2, 2); });
}

TEST(ForwardRefuses, Saved) {
  // Two chunks are needed: lengths 2, 0, 5. One row is too few even by T alone only when T needs more.
  forward_refuses("h: expected at least 2 rows, one every 64 tokens, got 1", [](F& x) { x.args.h.shape[0] = 1; });
  forward_refuses("h: expected at least 2 rows, one every 64 tokens, got 0", [](F& x) { x.args.h.shape[0] = 0; });
  forward_refuses("h: expected at least 2 rows, one every 192 tokens, got 1",
                  [](F& x) { x.args.h.shape[0] = 1, x.args.h_every = 3; });
  forward_refuses("h_every: expected >= 0, got -1", [](F& x) { x.args.h_every = -1; });
  forward_refuses("h_every: expected 0 without h, got 2", [](F& x) { x.args.h = {}, x.args.h_every = 2; });
  forward_refuses("h: expected float32 or bfloat16, got float16", [](F& x) { x.args.h.dtype = KDA_F16; });
  forward_refuses("v_new: expected float32 or bfloat16, got float16", [](F& x) { x.args.v_new.dtype = KDA_F16; });
  forward_refuses("Aqk: expected shape [1,9,2,64] ([B,T,HV,C]), got [1,9,2,63]",
                  [](F& x) { set_last(x.args.Aqk, 63); });
  forward_refuses("Akk: expected float32, got float16", [](F& x) { x.args.Akk.dtype = KDA_F16; });
  forward_refuses("o: expected 4 dimensions [1,9,2,3] like v, got 0", [](F& x) { x.args.o = {}; });
  forward_refuses("args.reserved: expected 0, got 1", [](F& x) { x.args.reserved = 1; });
}

// With h_v_first the other states are K-first, and h is not.
TEST(ForwardRefuses, SavedInAnotherLayout) {
  Case c = legal_case();
  c.state_layout = KDA_STATE_K_FIRST;
  F x(c);
  const Workspace workspace = workspace_for(x.args);
  x.args.h_v_first = 1;
  expect_refused(x, "h: expected shape [2,2,3,5] ([..,HV,V,K], V-first), got [2,2,5,3]");
  B y(c);
  const Workspace more = workspace_for(y.args);
  y.args.h_v_first = 1;
  expect_refused(y, "h: expected shape [2,2,3,5] ([..,HV,V,K], V-first), got [2,2,5,3]");
  for (kda_tensor* t : {&y.args.h, &y.args.dh0}) std::swap(t->shape[2], t->shape[3]), t->stride[2] = 5;
  expect_refused(y, "dh0: expected shape [3,2,5,3] ([..,HV,K,V], K-first), got [3,2,3,5]");
}

TEST(ForwardRefuses, SavedWithoutCuSeqlens) {  // then h needs ceil(T / 64) rows a sequence
  Case c = legal_case();
  c.lengths.clear(), c.tail = 0, c.B = 2, c.T = 65;
  F x(c);
  const Workspace workspace = workspace_for(x.args);
  x.args.h.shape[0] = 3;
  expect_refused(x, "h: expected at least 4 rows, one every 64 tokens, got 3");
  x.args.h.shape[0] = 1, x.args.h_every = 2;
  expect_refused(x, "h: expected at least 2 rows, one every 128 tokens, got 1");
}

TEST(ForwardUnsupported, ForcedImplementationSaysWhy) {
  refuses<kda_forward_args>(
      "cpu_recurrent was forced but keeps no checkpoints", [](F& x) { x.args.exec.impl = "cpu_recurrent"; },
      KDA_UNSUPPORTED);
  refuses<kda_forward_args>(
      "cpu_recurrent was forced but has no chunks to save v_new, Aqk or Akk from",
      [](F& x) {
        x.args.exec.impl = "cpu_recurrent";
        x.args.checkpoints = x.args.checkpoint_slots = {}, x.args.checkpoint_every = 0;
      },
      KDA_UNSUPPORTED);
  refuses<kda_forward_args>(
      "cpu_recurrent was forced but saves h in the layout of the other states alone",
      [](F& x) {
        x.args.exec.impl = "cpu_recurrent", x.args.in.state_layout = KDA_STATE_K_FIRST, x.args.h_v_first = 1;
        x.args.checkpoints = x.args.checkpoint_slots = x.args.states.h0 = x.args.states.hT = {};
        x.args.states.state_indices = x.args.states.has_initial_state = x.args.out_state_indices = {};
        x.args.v_new = x.args.Aqk = x.args.Akk = {}, x.args.checkpoint_every = 0;
      },
      KDA_UNSUPPORTED);
}

// ---- decode ----

TEST(DecodeRefuses, NoOutput) {
  refuses<kda_decode_args>("o: expected 4 dimensions [1,9,2,3] like v, got 0", [](D& x) { x.args.o = {}; });
}

// ---- backward ----

void backward_refuses(const std::string& sentence, const std::function<void(B&)>& break_it) {
  refuses<kda_backward_args>(sentence, break_it);
}

TEST(BackwardRefuses, Arguments) {
  backward_refuses("d_o: expected 4 dimensions [1,9,2,3] like v, got 0", [](B& x) { x.args.d_o = {}; });
  backward_refuses("h0: expected shape [3,2,3,5] ([..,HV,V,K], V-first), got [4,2,3,5]",
                   [](B& x) { x.args.h0.shape[0] = 4; });
  backward_refuses("dhT: expected shape [3,2,3,5]", [](B& x) { x.args.dhT.shape[1] = 1; });
  backward_refuses("dq: expected shape [1,9,1,5] like q, got [1,9,2,5]", [](B& x) { x.args.dq.shape[2] = 2; });
  backward_refuses("dA_log: expected A_log with it, got none", [](B& x) {
    x.args.in.A_log = {};
    x.args.in.gate_form = KDA_GATE_LOWER_BOUND, x.args.in.lower_bound = -1;
  });
  backward_refuses("d_dt_bias: expected dt_bias with it, got none", [](B& x) { x.args.in.dt_bias = {}; });
  backward_refuses("dA_log: expected float32, got bfloat16", [](B& x) { x.args.dA_log.dtype = KDA_BF16; });
}

TEST(BackwardRefuses, PartOfTheSaved) {
  const std::string expected =
      "v_new, Aqk, Akk: expected all three, or v_new alone, with h of every chunk, or none, got ";
  for (int missing = 0; missing < 3; ++missing)
    backward_refuses(expected + "2", [&](B& x) {
      kda_tensor* saved[] = {&x.args.v_new, &x.args.Aqk, &x.args.Akk};
      *saved[missing] = {};
    });
  backward_refuses(expected + "3 without h", [](B& x) { x.args.h = {}; });
  backward_refuses(expected + "3 with h_every 2", [](B& x) { x.args.h_every = 2; });
  backward_refuses("h_every: expected >= 0, got -2", [](B& x) { x.args.h_every = -2; });
  backward_refuses("h_every: expected 0 without h, got 1", [](B& x) { x.args.h = {}, x.args.h_every = 1; });
  backward_refuses("h: expected float32 or bfloat16, got float16", [](B& x) { x.args.h.dtype = KDA_F16; });
  backward_refuses("h: expected at least 2 rows, one every 64 tokens, got 1", [](B& x) { x.args.h.shape[0] = 1; });
}

// ---- gate ----

TEST(GateRefuses, Arguments) {
  const auto both = [](const std::string& sentence, const auto& break_it) {
    refuses<kda_gate_args>(sentence, [&](G& x) { break_it(x.args); });
    refuses<kda_gate_backward_args>(sentence, [&](Legal<kda_gate_backward_args>& x) { break_it(x.args); });
  };
  both("x: expected 3 dimensions [M,HV,K], got 2", [](auto& a) { a.x.ndim = 2; });
  both("x: expected 3 dimensions [M,HV,K], got 0", [](auto& a) { a.x = {}; });
  both("x: expected K in 1..256, got 0", [](auto& a) { a.x.shape[2] = 0; });
  both("x: expected K in 1..256, got 257", [](auto& a) { a.x.shape[2] = 257; });
  both("x: expected HV >= 1, got 0", [](auto& a) { a.x.shape[1] = 0; });
  for (const int32_t form : {-1, 0, 3})
    both("gate_form: expected 1..2, got " + std::to_string(form), [&](auto& a) { a.gate_form = form; });
  both("A_log: expected [HV] with the softplus gate, got none", [](auto& a) { a.A_log = {}; });
  both("lower_bound: expected a finite number < 0, got 0",
       [](auto& a) { a.gate_form = KDA_GATE_LOWER_BOUND, a.lower_bound = 0; });
  both("dt_bias: expected shape [2,5] ([HV,K] of x), got [1,5]", [](auto& a) { a.dt_bias.shape[0] = 1; });
  refuses<kda_gate_args>("g: expected 3 dimensions [9,2,5] like x, got 0", [](G& x) { x.args.g = {}; });
  refuses<kda_gate_backward_args>("dx: expected shape [9,2,5] like x, got [9,2,4]",
                                  [](auto& x) { set_last(x.args.dx, 4); });
  refuses<kda_gate_backward_args>("dA_log: expected A_log with it, got none", [](auto& x) {
    x.args.A_log = {}, x.args.gate_form = KDA_GATE_LOWER_BOUND, x.args.lower_bound = -1;
  });
  refuses<kda_gate_backward_args>("d_dt_bias: expected dt_bias with it, got none",
                                  [](auto& x) { x.args.dt_bias = {}; });
}

// ---- workspace queries ----

TEST(Workspace, DecodeNeedsNoneOnTheCpu) {
  std::vector<std::string> impls = cpu_implementations("decode");
  impls.push_back("reference");
  for (const std::string& impl : impls) {
    D x;
    uint64_t bytes = 1;
    x.args.exec.impl = impl.c_str();
    EXPECT_EQ(query(x.args, &bytes), KDA_OK) << kda_last_error();
    EXPECT_EQ(bytes, 0u) << impl;
  }
}

TEST(Workspace, ReadsNoData) {
  const auto with_fake_pointers = [](auto legal) {
    uint64_t real = 0, fake = 0;
    EXPECT_EQ(query(legal->args, &real), KDA_OK);
    uintptr_t address = uintptr_t{1} << 40;
    for (const Field& f : legal->fields()) f.t->data = reinterpret_cast<void*>(address += 1 << 20);
    EXPECT_EQ(query(legal->args, &fake), KDA_OK) << kda_last_error();
    EXPECT_EQ(fake, real);
    const char* text = "";
    EXPECT_EQ(explain(legal->args, &text), KDA_OK) << kda_last_error();
  };
  with_fake_pointers(std::make_unique<F>());
  with_fake_pointers(std::make_unique<B>());
  with_fake_pointers(std::make_unique<D>());
  with_fake_pointers(std::make_unique<Legal<kda_verify_args>>());
  with_fake_pointers(std::make_unique<Legal<kda_flush_args>>());
  with_fake_pointers(std::make_unique<G>());
  with_fake_pointers(std::make_unique<Legal<kda_gate_backward_args>>());
}

}  // namespace
}  // namespace kda::test
