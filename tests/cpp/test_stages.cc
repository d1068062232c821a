// The stages one by one against their oracle, and put together against kda_forward's and kda_backward's.
#include <algorithm>
#include <limits>

#include "stage_calls.h"

namespace kda::test {
namespace {

std::string case_name(const testing::TestParamInfo<Case>& info) { return info.param.name; }

// ---- one stage ----

// Gives the implementation and the oracle the same operands; the oracle's outputs are float64.
template <class Args>
void expect_stage(const StageTensors& t, Args a, double budget, const std::string& what) {
  Args r = a;
  std::vector<std::pair<std::string, Tensor>> reference, out;
  std::vector<Field> ours = fields(a), theirs = fields(r);
  for (size_t i = 0; i < ours.size(); ++i) {
    if (!ours[i].output || !ours[i].t->ndim) continue;
    const Tensor& like = t[ours[i].name];
    out.emplace_back(ours[i].name, like.clone());
    // Akk_inv as it is stored: w and u follow from that.
    const int32_t wide = out.back().first == "Akk_inv" ? like.dtype() : KDA_F64;
    reference.emplace_back(ours[i].name, Tensor(wide, like.shape(), like.values()));
    *ours[i].t = out.back().second, *theirs[i].t = reference.back().second;
  }
  run(a, {.impl = "cpu_chunk"});
  run(r, {.impl = "reference"});
  for (size_t i = 0; i < out.size(); ++i) {
    const Tensor& x = out[i].second;
    const bool rounded = x.dtype() != KDA_F32;
    EXPECT_TRUE(close(reference[i].second, x, rounded ? std::max(budget, 0.004) : budget))
        << out[i].first << " of " << what;
    EXPECT_TRUE(x.margins_intact()) << out[i].first << " of " << what;
    EXPECT_EQ(x.unwritten(), 0) << out[i].first << " of " << what;
  }
}

class Stages : public testing::TestWithParam<Case> {
 protected:
  Stages() : c(GetParam()), in(c) {}
  const Case c;
  const Inputs in;
};

// Every stage on what the oracle's earlier stages left, stored as f32 and as bf16.
TEST_P(Stages, EachAgainstItsOracle) {
  for (const int32_t stored : {KDA_F32, KDA_BF16}) {
    const StageTensors t(in, stored, KDA_F32);
    const auto check = [&](const auto& a) {
      // Where G is in the thousands, sums over it lose digits; the pairs of dG cancel.
      expect_stage(t, a, 5e-5, c.name + (stored == KDA_F32 ? ", f32" : ", bf16"));
      run(a, {.impl = "reference"});
    };
    for_each_forward_stage(t, check);
    for_each_backward_stage(t, check);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Stages, testing::ValuesIn(cases()), case_name);

// ---- all of them ----

struct Whole {
  std::string impl;
  int32_t stored, wide, inverse;
};

// With bf16 in between: math.md 8. With f32: the budgets of kda_forward and kda_backward, but a cumulative gate in
// the thousands keeps fewer digits than single gates.
double budget(const std::string& output, const Whole& how, const Case& c) {
  if (how.wide == KDA_F64) return 1e-11;
  if (how.stored == KDA_F32) {
    const bool sums = output == "dA_log" || output == "d_dt_bias";
    return c.gates == Gates::kWild ? 5e-4 : output == "dg" ? 1e-4 : sums ? 3e-4 : 2e-5;
  }
  if (c.keys == Keys::kIdentical) return 0.05;  // badly conditioned
  static const std::map<std::string, double> rounded = {
      {"o", 0.005},   {"hT", 0.005}, {"dq", 0.006},    {"dk", 0.006},     {"dv", 0.008},
      {"dh0", 0.008}, {"dg", 0.010}, {"dbeta", 0.010}, {"dA_log", 0.008}, {"d_dt_bias", 0.008}};
  return rounded.at(output);
}

class WholeOfStages : public testing::TestWithParam<Case> {
 protected:
  WholeOfStages() : c(GetParam()), in(c) {}

  void check(const Whole& how) {
    const StageTensors t(in, how.stored, how.wide, how.inverse);
    const auto step = [&](const auto& a) { run(a, {.impl = how.impl.c_str()}); };
    for_each_forward_stage(t, step);
    ForwardOutputs forward(in, false, true);
    run(forward_args(in, forward), {.impl = "reference"});
    // With bf16 in between an element may be off by a few roundings of its own size, whatever the others are, and sums
    // of few terms have longer tails.
    const auto near = [&](const Tensor& reference, const Tensor& x, const char* name) {
      const Error e = compare(reference.values(), x.values(), how.stored == KDA_BF16 ? 0x1p-5 : 0);
      const double allowed = budget(name, how, c);
      EXPECT_TRUE(e.finite_alike) << name;
      EXPECT_LE(e.relative_rmse, allowed) << name;
      EXPECT_LE(e.max, (how.stored == KDA_BF16 ? 16 : 8) * allowed * (e.rms_ref + 1e-8))
          << name << " at element " << e.worst;
    };
    near(forward.o, t["o"], "o");
    near(forward.hT, t["hT"], "hT");

    for_each_backward_stage(t, step);
    BackwardOutputs reference(in, true), got = finished(t);
    run(backward_args(in, reference), {.impl = "reference"});
    const std::vector<Named> expected = reference.tensors(), ours = got.tensors();
    for (size_t i = 0; i < ours.size(); ++i)
      if (*ours[i].tensor) near(*expected[i].tensor, *ours[i].tensor, ours[i].name);
  }
  const Case c;
  const Inputs in;
};

// The formulas themselves: the oracle's stages are the token recurrence and its reverse mode.
TEST_P(WholeOfStages, OracleInFloat64) { check({"reference", KDA_F64, KDA_F64, KDA_F64}); }
TEST_P(WholeOfStages, StoredAsF32) { check({"cpu_chunk", KDA_F32, KDA_F32, KDA_F32}); }
// With one key over and over and beta near 2, bf16 leaves nothing of Akk_inv (hT off by 120 %; 1.6 % with f32).
TEST_P(WholeOfStages, StoredAsBf16) {
  check({"cpu_chunk", KDA_BF16, KDA_F32, c.keys == Keys::kIdentical ? KDA_F32 : KDA_BF16});
}

INSTANTIATE_TEST_SUITE_P(All, WholeOfStages, testing::ValuesIn(cases()), case_name);

// ---- details ----

TEST(StageDetails, RecomputedBitsAreTheSame) {
  const auto call = [](const auto& a) { run(a); };
  for (const char* name : {"gva_4_bf16", "packed"})
    for (const int32_t stored : {KDA_F32, KDA_BF16, KDA_F16}) {
      const Inputs in(find_case(name));
      const StageTensors t(in, stored, KDA_F32), few(in, stored, KDA_F32);
      for_each_forward_stage(t, call);
      expect_fewer_outputs_change_no_bit(t, few, call);
    }
}

TEST(StageDetails, TheStateInPlace) {
  const auto call = [](const auto& a) { run(a); };
  const Inputs in(find_case("packed"));
  const StageTensors t(in, KDA_F32, KDA_F32);
  for_each_forward_stage(t, call);
  expect_the_state_in_place(t, call);
}

// What lies above the diagonals is never read.
TEST(StageDetails, UpperTrianglesMayHoldAnything) {
  const Inputs in(find_case("packed"));
  const StageTensors t(in, KDA_F32, KDA_F32), spoilt(in, KDA_F32, KDA_F32);
  const auto spoil = [&] {
    for (const char* name : {"Aqk", "Akk_inv", "dAqk", "dAkk"}) {
      Tensor& A = const_cast<Tensor&>(spoilt[name]);
      for (int64_t n = 0; n < in.N; ++n)
        for (int64_t i = 0; i < in.length(n); ++i)
          for (int64_t row = 0; row < in.c.HV; ++row)
            for (int64_t j = i % 64 + (name[0] != 'A' && name[2] == 'k'); j < 64; ++j)
              if (j > i % 64 || name == std::string("dAkk"))
                A.set(((in.begin(n) + i) * in.c.HV + row) * 64 + j, std::numeric_limits<double>::quiet_NaN());
    }
  };
  const auto step = [&](const auto& a) { run(a); };
  const auto spoiling = [&](const auto& a) { run(a), spoil(); };
  for_each_forward_stage(t, step);
  for_each_backward_stage(t, step);
  for_each_forward_stage(spoilt, spoiling);
  for_each_backward_stage(spoilt, spoiling);
  for (const char* name : {"o", "hT", "dq", "dk", "dv", "dg", "dbeta", "dh0"})
    EXPECT_EQ(spoilt[name].bits(), t[name].bits()) << name;
}

TEST(StageDetails, MinusInfinityIsClamped) {
  expect_minus_infinity_is_clamped([](const auto& a) { run(a); });
}

}  // namespace
}  // namespace kda::test
