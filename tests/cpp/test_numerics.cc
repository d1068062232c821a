// Every implementation on every case against the float64 oracle, within the budgets of math.md 8.
// One case of one implementation: test_numerics --gtest_filter='*cpu_chunk_gates_wild'. Another instruction set:
// KDA_CPU_ISA=avx2 test_numerics.
#include <algorithm>
#include <set>

#include "calls.h"

namespace kda::test {
namespace {

struct Param {
  std::string impl, case_name;
};
std::string name_of(const testing::TestParamInfo<Param>& info) { return info.param.impl + "_" + info.param.case_name; }
void PrintTo(const Param& p, std::ostream* out) { *out << p.impl << " on " << p.case_name; }

std::vector<Param> params(const char* op, bool gates_only = false) {
  std::vector<Param> all;
  for (const std::string& impl : cpu_implementations(op))
    for (const Case& c : cases())
      if (!gates_only || c.gate_form != KDA_GATE_LOG) all.push_back({impl, c.name});
  return all;
}

// In f32 everything is computed and kept in f32: 1e-5, five times the worst that was seen. The gate's gradients are
// differences of larger sums (math.md 5.2), and dA_log and d_dt_bias sum those with either sign: the worst seen were
// 9e-6 and 8e-5, with fast softplus gates. Rounded to 16 bits: math.md 8.
double budget(const std::string& output, int32_t dtype) {
  if (dtype == KDA_F32) return output == "dg" ? 5e-5 : output == "dA_log" || output == "d_dt_bias" ? 3e-4 : 1e-5;
  static const std::map<std::string, double> rounded = {{"o", 0.005},  {"hT", 0.005},  {"dq", 0.006}, {"dk", 0.006},
                                                        {"dv", 0.008}, {"dh0", 0.008}, {"dg", 0.010}, {"dbeta", 0.010},
                                                        {"g", 0.003},  {"dx", 0.003}};
  return rounded.at(output);
}

// Compares all outputs: every element that the oracle writes is written, and nothing else.
void expect_close(const std::vector<Named>& reference, const std::vector<Named>& got, const Case& c) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (!*got[i].tensor) continue;
    EXPECT_TRUE(close(*reference[i].tensor, *got[i].tensor, budget(got[i].name, got[i].tensor->dtype())))
        << got[i].name << " of " << c.name;
    EXPECT_EQ(got[i].tensor->unwritten(), reference[i].tensor->unwritten()) << got[i].name;
    EXPECT_TRUE(got[i].tensor->margins_intact()) << got[i].name;
  }
}

// ---- forward ----

class Forward : public testing::TestWithParam<Param> {
 protected:
  void check(bool all, int32_t h_every = 0) {
    const Inputs in(find_case(GetParam().case_name));
    ForwardOutputs reference(in, all, true), out(in, all);
    if (h_every) reference.save_states(in, h_every, true), out.save_states(in, h_every);
    run(forward_args(in, reference), {.impl = "reference"});
    run(forward_args(in, out), {.impl = GetParam().impl.c_str()});
    if (HasFatalFailure()) return;
    expect_close(reference.tensors(), out.tensors(), in.c);
    EXPECT_EQ(out.o.unwritten(), 0);
    EXPECT_EQ(out.hT.unwritten(), 0);
  }
};
class ForwardSaved : public Forward {};

TEST_P(Forward, Output) { check(false); }
TEST_P(Forward, States) { check(false, 1); }
TEST_P(Forward, StatesEveryOtherChunk) { check(false, 2); }
TEST_P(ForwardSaved, All) { check(true); }

// h V-first beside states that are K-first. What the oracle saves so is what it saves in the layout of the states.
TEST_P(ForwardSaved, StatesInAnotherLayout) {
  Case c = find_case(GetParam().case_name);
  c.state_layout = KDA_STATE_K_FIRST;
  const Inputs in(c);
  ForwardOutputs reference(in, false, true), other(in, false, true), out(in, false);
  reference.save_states(in, 1, true), other.save_v_first(in, KDA_F64), out.save_v_first(in, KDA_F32);
  for (const ForwardOutputs* exact : {&reference, &other}) run(forward_args(in, *exact), {.impl = "reference"});
  run(forward_args(in, out), {.impl = GetParam().impl.c_str()});
  if (HasFatalFailure()) return;
  EXPECT_EQ(in_other_layout(other.h).bits(), reference.h.bits());
  expect_close(other.tensors(), out.tensors(), c);
}

// Those of `params` whose implementation keeps what backward wants.
std::vector<Param> params_that_save() {
  std::vector<Param> all = params("forward");
  const Inputs in(Case{.name = "any"});
  const ForwardOutputs out(in, true);
  std::erase_if(all, [&](const Param& p) { return !why_not(forward_args(in, out), p.impl.c_str()).empty(); });
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Forward, testing::ValuesIn(params("forward")), name_of);
INSTANTIATE_TEST_SUITE_P(All, ForwardSaved, testing::ValuesIn(params_that_save()), name_of);

// States after m * checkpoint_every tokens, for chosen m, in chosen slots; the other slots stay as they are.
class Checkpoints : public testing::TestWithParam<std::string> {};

TEST_P(Checkpoints, CompletedOnesInTheirSlots) {
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    for (const int32_t every : {64, 128}) {
      const Inputs in(
          {.name = "checkpoints", .HV = 2, .K = 20, .V = 36, .lengths = {130, 64, 0, 63, 256}, .state_layout = layout});
      const ForwardOutputs out(in, false), reference(in, false, true);
      // Room for three checkpoints a sequence, so that the fourth of the last sequence has none; -1 skips one.
      const Tensor slots(KDA_I32, {5, 3}, {5, -1, 0, 3, 6, 13, 7, 8, 9, 10, 11, 12, 1, 2, 4}, Layout::kPadded);
      const std::set<int64_t> written = every == 64 ? std::set<int64_t>{5, 3, 1, 2, 4} : std::set<int64_t>{5, 1, 2};
      const Tensor got(every == 64 ? KDA_F32 : KDA_BF16, in.state_shape(15), Layout::kPadded);
      const Tensor expected(KDA_F64, in.state_shape(15));
      kda_forward_args a = forward_args(in, out), r = forward_args(in, reference);
      a.checkpoint_every = r.checkpoint_every = every;
      a.checkpoint_slots = r.checkpoint_slots = slots;
      a.checkpoints = got, r.checkpoints = expected;
      run(a, {.impl = GetParam().c_str()});
      run(r, {.impl = "reference"});
      for (int64_t slot = 0; slot < 15; ++slot) {
        EXPECT_NE(got.bits(0, slot, 1).all('\xff'), written.contains(slot)) << "slot " << slot << ", every " << every;
      }
      EXPECT_TRUE(got.margins_intact());
      EXPECT_TRUE(close(expected, got, budget("hT", got.dtype()))) << "every " << every;  // unwritten: NaN in both
    }
}

// The checkpoint after 128 tokens is the state that a call with those 128 tokens ends with, to the bit.
TEST_P(Checkpoints, AreFinalStatesOfShorterCalls) {
  const Inputs whole({.name = "prefix", .T = 200});
  const ForwardOutputs out(whole, false);
  const Tensor slots(KDA_I32, {1, 3}, {0, 1, 2}), checkpoints(KDA_F32, whole.state_shape(3));
  kda_forward_args a = forward_args(whole, out);
  a.checkpoint_every = 64, a.checkpoint_slots = slots, a.checkpoints = checkpoints;
  run(a, {.impl = GetParam().c_str()});
  for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.o}) t->shape[1] = 128;
  a.checkpoint_every = 0, a.checkpoint_slots = a.checkpoints = {};
  run(a, {.impl = GetParam().c_str()});
  EXPECT_EQ(checkpoints.bits(0, 1, 1), out.hT.bits());
}

std::vector<std::string> checkpointing() {
  std::vector<std::string> names;
  for (const Param& p : params_that_save())
    if (names.empty() || names.back() != p.impl) names.push_back(p.impl);
  return names;
}
INSTANTIATE_TEST_SUITE_P(All, Checkpoints, testing::ValuesIn(checkpointing()),
                         [](const auto& info) { return info.param; });

// ---- backward ----

class Backward : public testing::TestWithParam<Param> {
 protected:
  Backward() : c(find_case(GetParam().case_name)), in(c) {}
  void check(const ForwardOutputs* saved) {
    BackwardOutputs reference(in, true), out(in);
    run(backward_args(in, reference), {.impl = "reference"});
    run(backward_args(in, out, saved), {.impl = GetParam().impl.c_str()});
    if (!HasFatalFailure()) expect_close(reference.tensors(), out.tensors(), c);
  }
  const Case c;
  const Inputs in;
};

TEST_P(Backward, Recomputed) { check(nullptr); }

TEST_P(Backward, FromSaved) {
  const ForwardOutputs saved(in, true);
  run(forward_args(in, saved));
  if (!HasFatalFailure()) check(&saved);
}

// Starting from states before every few chunks gives the gradients of recomputing everything, bit for bit.
TEST_P(Backward, FromStates) {
  const char* impl = GetParam().impl.c_str();
  BackwardOutputs expected(in);
  run(backward_args(in, expected), {.impl = impl});
  const std::vector<Named> tensors = expected.tensors();
  for (const int32_t every : {1, 2, 3, 1000}) {
    ForwardOutputs saved(in, false);
    saved.save_states(in, every);
    run(forward_args(in, saved));
    BackwardOutputs out(in);
    run(backward_args(in, out, &saved), {.impl = impl});
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_EQ(out.tensors()[i].tensor->bits(), tensors[i].tensor->bits()) << tensors[i].name << " every " << every;
  }
}

// So does h in either layout.
TEST_P(Backward, FromStatesInAnotherLayout) {
  const char* impl = GetParam().impl.c_str();
  Case k_first = c;
  k_first.state_layout = KDA_STATE_K_FIRST;
  const Inputs inputs(k_first);
  ForwardOutputs same(inputs, false), other(inputs, false);
  same.save_states(inputs, 1), other.save_v_first(inputs, KDA_F32);
  for (const ForwardOutputs* saved : {&same, &other}) run(forward_args(inputs, *saved), {.impl = "cpu_chunk"});
  BackwardOutputs expected(inputs), out(inputs);
  run(backward_args(inputs, expected, &same), {.impl = impl});
  run(backward_args(inputs, out, &other), {.impl = impl});
  for (size_t i = 0; i < out.tensors().size(); ++i) {
    const auto [name, t] = out.tensors()[i];
    EXPECT_EQ(t->bits(), expected.tensors()[i].tensor->bits()) << name;
  }
}

TEST_P(Backward, OneAtATime) {
  expect_each_alone([&] { return BackwardOutputs(in); },
                    [&](const auto& out) { run(backward_args(in, out), {.impl = GetParam().impl.c_str()}); });
}

INSTANTIATE_TEST_SUITE_P(All, Backward, testing::ValuesIn(params("backward")), name_of);

// ---- decode ----

class Decode : public testing::TestWithParam<Param> {
 protected:
  Decode() : c(find_case(GetParam().case_name)), in(c) {}
  const Case c;
  const Inputs in;
};

TEST_P(Decode, InPlace) {
  Tensor o(c.dtype, {in.B, in.T, c.HV, c.V}, c.layout), o_reference(KDA_F64, {in.B, in.T, c.HV, c.V});
  const Pool start(in, c.state_dtype), pool(in, c.state_dtype), end(in, KDA_F64);
  run(decode_args(in, start, end, o_reference), {.impl = "reference"});
  run(decode_args(in, pool, pool, o), {.impl = GetParam().impl.c_str()});
  Tensor expected = end.rows(in), got = pool.rows(in);
  expect_close({{"o", &o_reference}, {"hT", &expected}}, {{"o", &o}, {"hT", &got}}, c);
  EXPECT_TRUE(pool.h.margins_intact());
  EXPECT_EQ(pool.h.bits(0, 0, 3), start.h.bits(0, 0, 3)) << "slots of nobody";
}

TEST_P(Decode, FromOneStateToAnother) {  // no pool: row n is sequence n
  Tensor o(c.dtype, {in.B, in.T, c.HV, c.V}), o_reference(KDA_F64, {in.B, in.T, c.HV, c.V});
  Tensor hT(c.state_dtype, in.state_shape(in.N), c.layout), hT_reference(KDA_F64, in.state_shape(in.N));
  kda_decode_args a = KDA_DECODE_ARGS_INIT;
  a.in = in.view(), a.states.h0 = in.h0;
  kda_decode_args r = a;
  a.o = o, a.states.hT = hT, r.o = o_reference, r.states.hT = hT_reference;
  run(r, {.impl = "reference"});
  run(a, {.impl = GetParam().impl.c_str()});
  expect_close({{"o", &o_reference}, {"hT", &hT_reference}}, {{"o", &o}, {"hT", &hT}}, c);
}

INSTANTIATE_TEST_SUITE_P(All, Decode, testing::ValuesIn(params("decode")), name_of);

// ---- gate ----

class GateTest : public testing::TestWithParam<Param> {};

TEST_P(GateTest, ForwardAndBackward) {
  const Case& c = find_case(GetParam().case_name);
  const Inputs in(c);
  GateTensors reference(in, KDA_F64), out(in, c.g_dtype);
  run(gate_args(in, reference), {.impl = "reference"});
  run(gate_args(in, out), {.impl = GetParam().impl.c_str()});
  run(gate_backward_args(in, reference), {.impl = "reference"});
  run(gate_backward_args(in, out), {.impl = GetParam().impl.c_str()});
  expect_close(
      {{"g", &reference.g}, {"dx", &reference.dx}, {"dA_log", &reference.dA_log}, {"d_dt_bias", &reference.d_dt_bias}},
      {{"g", &out.g}, {"dx", &out.dx}, {"dA_log", &out.dA_log}, {"d_dt_bias", &out.d_dt_bias}}, c);
}

INSTANTIATE_TEST_SUITE_P(All, GateTest, testing::ValuesIn(params("gate", true)), name_of);

// Models start with gates near 0, and a gate that is a little off compounds over a long context: relative accuracy
// element by element, over the whole range of z.
TEST(GateAccuracy, EveryElementRelative) {
  for (const std::string& impl : cpu_implementations("gate"))
    for (const int32_t form : {KDA_GATE_SOFTPLUS, KDA_GATE_LOWER_BOUND}) {
      const int64_t M = 40, K = 250;
      Tensor x(KDA_F32, {M, 1, K}), g(KDA_F32, {M, 1, K}), reference(KDA_F64, {M, 1, K});
      for (int64_t i = 0; i < x.size(); ++i) x.set(i, -80 + 160.0 * static_cast<double>(i) / (M * K - 1));
      const Tensor A_log(KDA_F32, {1}, {0.25});
      kda_gate_args a = KDA_GATE_ARGS_INIT;
      a.x = x, a.g = g, a.gate_form = form;
      a.lower_bound = form == KDA_GATE_LOWER_BOUND ? -5 : 0;
      if (form == KDA_GATE_SOFTPLUS) a.A_log = A_log;
      kda_gate_args r = a;
      r.g = reference;
      run(a, {.impl = impl.c_str()});
      run(r, {.impl = "reference"});
      for (int64_t i = 0; i < x.size(); ++i)
        ASSERT_NEAR(g.get(i) / reference.get(i), 1, 1e-6) << impl << ", form " << form << " at " << x.get(i);
    }
}

}  // namespace
}  // namespace kda::test
