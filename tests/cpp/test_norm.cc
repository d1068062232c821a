// The output's norm and gate: numbers against the float64 oracle, the oracle against its definition, what the contract
// says of them alone, and the promises.
#include <cfloat>
#include <cmath>
#include <limits>

#include "contract.h"

namespace kda::test {
namespace {

class Norm : public testing::TestWithParam<NormCase> {
 protected:
  Norm() : c(GetParam()), in(c) {}
  const NormCase c;
  const NormInputs in;
};

void run_both(const NormInputs& in, const NormOutputs& out, const How& how) {
  run_norm(in, out, [&](const auto& a) { run(a, how); });
}
auto on(const char* impl) {
  return [impl](const auto& a) { run(a, {.impl = impl}); };
}

TEST_P(Norm, IsTheOracle) {
  NormOutputs reference(in, true), out(in);
  run_both(in, reference, {.impl = "reference"});
  run_both(in, out, {.impl = "cpu_norm_gate"});
  if (HasFatalFailure()) return;
  const std::vector<Named> expected = reference.tensors(), got = out.tensors();
  for (size_t i = 0; i < got.size(); ++i) {
    if (!*got[i].tensor) continue;
    EXPECT_TRUE(close(*expected[i].tensor, *got[i].tensor, norm_budget(c, got[i]))) << got[i].name;
    EXPECT_EQ(got[i].tensor->unwritten(), 0) << got[i].name;
    EXPECT_TRUE(got[i].tensor->margins_intact()) << got[i].name;
  }
}

TEST_P(Norm, OneGradientAtATime) {
  expect_each_alone([&] { return NormOutputs(in); },
                    [&](const auto& out) { run(norm_gate_backward_args(in, out), {.impl = "cpu_norm_gate"}); }, 1);
}

INSTANTIATE_TEST_SUITE_P(All, Norm, testing::ValuesIn(norm_cases()), [](const auto& info) { return info.param.name; });

// ---- the oracle ----

TEST(NormOracle, OneRowByHand) {  // mean of squares 12.5 + 3.5 = 16
  const Tensor x(KDA_F64, {1, 1, 1, 2}, {3, 4}), z(KDA_F64, {1, 1, 1, 2}, {0.7, -2}), w(KDA_F64, {2}, {8, -2});
  const Tensor y(KDA_F64, {1, 1, 1, 2});
  kda_norm_gate_args a = KDA_NORM_GATE_ARGS_INIT;
  a.x = x, a.weight = w, a.y = y, a.eps = 3.5;
  run(a, {.impl = "reference"});
  EXPECT_EQ(y.values(), (std::vector<double>{6, -2}));
  a.gate = z, a.activation = KDA_NORM_SIGMOID;
  run(a, {.impl = "reference"});
  EXPECT_NEAR(y.get(0), 6 / (1 + std::exp(-0.7)), 1e-14);
  EXPECT_NEAR(y.get(1), -2 / (1 + std::exp(2.0)), 1e-14);
  a.activation = KDA_NORM_SILU;
  run(a, {.impl = "reference"});
  EXPECT_NEAR(y.get(0), 6 * 0.7 / (1 + std::exp(-0.7)), 1e-14);
  EXPECT_NEAR(y.get(1), 4 / (1 + std::exp(2.0)), 1e-14);
}

// Gradients equal differences of the loss sum(dy y).
TEST(NormOracle, GradientsAreDifferences) {
  for (const char* name : {"V_7", "V_1", "silu", "no_gate", "no_weight", "eps_0", "eps_large"}) {
    NormCase c = find_norm_case(name);
    c.B = 1, c.T = 2, c.V = std::min<int64_t>(c.V, 9), c.dtype = c.gate_dtype = c.weight_dtype = KDA_F64;
    NormInputs in(c);
    const auto loss = [&] {
      NormOutputs out(in, true);
      run(norm_gate_args(in, out), {.impl = "reference"});
      double sum = 0;
      for (int64_t i = 0; i < in.dy.size(); ++i) sum += in.dy.get(i) * out.y.get(i);
      return sum;
    };
    NormOutputs out(in, true);
    run(norm_gate_backward_args(in, out), {.impl = "reference"});
    for (const auto& [input, gradient] :
         {std::pair{&in.x, &out.dx}, {&in.gate, &out.dgate}, {&in.weight, &out.dweight}})
      for (int64_t i = 0; i < input->size(); ++i) {
        const double x = input->get(i), h = 1e-5;
        input->set(i, x + h);
        const double above = loss();
        input->set(i, x - h);
        const double below = loss();
        input->set(i, x);
        EXPECT_NEAR(gradient->get(i), (above - below) / (2 * h), 1e-7) << name << " " << i;
      }
  }
}

// Squares beyond float64, and below it.
TEST(NormOracle, RowsOfAnySize) {
  for (const double size : {1e-300, 1e-180, 1e180, 1e300})
    for (const double eps : {0.0, 1e-5}) {
      const Tensor x(KDA_F64, {1, 1, 1, 2}, {3 * size, 4 * size}), y(KDA_F64, {1, 1, 1, 2});
      kda_norm_gate_args a = KDA_NORM_GATE_ARGS_INIT;
      a.x = x, a.y = y, a.eps = eps;
      run(a, {.impl = "reference"});
      const double length = eps > 0 && size < 1 ? std::sqrt(eps) : size * std::sqrt(12.5);
      EXPECT_NEAR(y.get(1) / (4 * size / length), 1, 1e-12) << size << " " << eps;
    }
}

// ---- all of float32's range ----

// A row alone, of numbers of one size, and its gradients.
TEST(NormRange, RowsOfAnySize) {
  for (const double size : {1e-37, 1e-30, 1e-19, 1e-13, 1e-6, 1.0, 1e15, 1e18, 1e19, 1e25, 1e38})
    for (const double eps : {0.0, 1e-30, 1e-6, 1e30})
      for (const int64_t V : {128, 600}) {
        NormCase c{.name = "range", .B = 1, .T = 1, .HV = 1, .V = V, .eps = eps};
        NormInputs in(c);
        for (int64_t i = 0; i < V; ++i) in.x.set(i, size * (0.5 + 2.5 * std::abs(std::sin(static_cast<double>(i)))));
        NormOutputs reference(in, true), out(in);
        run_both(in, reference, {.impl = "reference"});
        run_both(in, out, {.impl = "cpu_norm_gate"});
        const std::vector<Named> expected = reference.tensors(), got = out.tensors();
        for (size_t i = 0; i < got.size(); ++i) {
          const Error e = compare(expected[i].tensor->values(), got[i].tensor->values());
          double largest = 0;  // a gradient below f32 is 0
          for (const double x : expected[i].tensor->values()) largest = std::max(largest, std::abs(x));
          if (largest < 1e3 * FLT_MIN || largest > FLT_MAX) continue;
          EXPECT_LT(e.relative_rmse * (e.rms_ref + 1e-8), 1e-5 * e.rms_ref + FLT_MIN)  // smaller ones are 0
              << got[i].name << ", size " << size << ", eps " << eps << ", V " << V;
        }
      }
}

// A row's largest number makes the mean overflow; small ones keep their digits.
TEST(NormRange, SmallNumbersBesideHugeOnes) {
  expect_small_beside_huge(on("cpu_norm_gate")), expect_small_beside_huge(on("reference"));
}

TEST(NormRange, ARowOfZeros) {
  for (const char* impl : {"cpu_norm_gate", "reference"})
    for (const double eps : {0.0, 1e-5}) {
      NormCase c{.name = "zeros", .B = 1, .T = 2, .HV = 1, .V = 24, .eps = eps};
      NormInputs in(c);
      for (int64_t i = 0; i < c.V; ++i) in.x.set(i, 0);
      NormOutputs out(in);
      run(norm_gate_args(in, out), {.impl = impl});
      for (int64_t i = 0; i < c.V; ++i) {
        if (eps == 0) EXPECT_TRUE(std::isnan(out.y.get(i)));
        else EXPECT_EQ(out.y.get(i), 0);
        EXPECT_TRUE(std::isfinite(out.y.get(c.V + i)));
      }
    }
}

// ---- promises ----

Bits all_bits(NormOutputs& out) {
  Bits all;
  for (const auto& [name, t] : out.tensors()) all.bytes += t->bits().bytes;
  return all;
}
Bits results(const NormInputs& in, How how = {}) {
  NormOutputs out(in);
  how.impl = "cpu_norm_gate";
  run_both(in, out, how);
  return all_bits(out);
}

TEST(NormPromise, SameBitsWithAnyNumberOfThreadsAndOldWorkspace) {
  for (const char* name : {"many_rows", "bf16", "V_1000", "rows_apart"}) {
    NormCase c = find_norm_case(name);
    c.T = 400;
    const NormInputs in(c);
    const Bits expected = results(in, {.threads = 1});
    for (const int threads : {0, 2, 3, 7}) EXPECT_EQ(results(in, {.threads = threads}), expected) << name << threads;
    EXPECT_EQ(results(in, {.workspace_fill = 0}), expected) << name;
  }
}

TEST(NormPromise, ARowAlone) {
  for (const char* name : {"V_128", "V_300", "bf16", "huge", "silu"})
    expect_rows_alone(find_norm_case(name), on("cpu_norm_gate"));
}

TEST(NormPromise, InPlace) {
  for (const char* impl : {"cpu_norm_gate", "reference"})
    for (const char* name : {"V_128", "V_300", "rows_apart", "silu", "huge_V_300"})
      expect_norm_in_place(find_norm_case(name), on(impl));
}

TEST(NormPromise, NotFiniteStaysInItsRow) {
  for (const char* impl : {"cpu_norm_gate", "reference"})
    for (const char* name : {"V_128", "V_300", "V_7"}) expect_not_finite_stays(find_norm_case(name), on(impl));
}

// ---- the contract ----

TEST(NormRefuses, Arguments) {
  const auto both = [](const std::string& sentence, const auto& break_it) {
    refuses<kda_norm_gate_args>(sentence, [&](auto& x) { break_it(x.args); });
    refuses<kda_norm_gate_backward_args>(sentence, [&](auto& x) { break_it(x.args); });
  };
  both("x: expected 4 dimensions [B,T,HV,V], got 3", [](auto& a) { a.x.ndim = 3; });
  both("x: expected V in 1..8192, got 0", [](auto& a) { a.x.shape[3] = 0; });
  both("x: expected V in 1..8192, got 8193", [](auto& a) { a.x.shape[3] = 8193; });
  both("gate: expected 4 dimensions [2,3,2,5] like x, got 0", [](auto& a) { a.gate = {}; });
  both("gate: expected shape [2,3,2,5] like x, got [2,3,1,5]", [](auto& a) { a.gate.shape[2] = 1; });
  both("gate: expected none without an activation, got one", [](auto& a) { a.activation = KDA_NORM_NONE; });
  both("weight: expected shape [5] ([V] of x), got [4]", [](auto& a) { a.weight.shape[0] = 4; });
  for (const int32_t activation : {-1, 3})
    both("activation: expected 0..2, got " + std::to_string(activation), [&](auto& a) { a.activation = activation; });
  both("eps: expected a number >= 0 in the range of f32, got -1", [](auto& a) { a.eps = -1; });
  for (const double eps : {std::nan(""), HUGE_VAL, 1e39})
    both("eps: expected a number >= 0 in the range of f32, got ", [&](auto& a) { a.eps = eps; });
  both("args.reserved: expected 0, got 1", [](auto& a) { a.reserved = 1; });
  refuses<kda_norm_gate_args>("y: expected 4 dimensions [2,3,2,5] like x, got 0", [](auto& x) { x.args.y = {}; });
  using Backward = kda_norm_gate_backward_args;
  refuses<Backward>("dy: expected 4 dimensions [2,3,2,5] like x, got 0", [](auto& x) { x.args.dy = {}; });
  refuses<Backward>("dgate: expected gate with it, got none",
                    [](auto& x) { x.args.gate = {}, x.args.activation = KDA_NORM_NONE; });
  refuses<Backward>("dweight: expected weight with it, got none", [](auto& x) { x.args.weight = {}; });
  refuses<Backward>("dweight: expected float32, got bfloat16", [](auto& x) { x.args.dweight.dtype = KDA_BF16; });
  refuses<Backward>("exec.workspace_bytes: expected at least ", [](auto& x) { x.args.exec.workspace_bytes -= 1; });
}

TEST(NormRefuses, YInPlaceButNotAsTheSameView) {
  for (const bool of_gate : {false, true}) {
    const std::string name = of_gate ? "gate" : "x";
    const auto as = [&](const auto& change) {
      refuses<kda_norm_gate_args>(
          "y: expected memory of its own, got memory that overlaps " + name + " without being the same view",
          [&](auto& x) {
            x.args.y = of_gate ? x.args.gate : x.args.x;
            change(x.args);
          });
    };
    as([](auto& a) { a.y.dtype = KDA_BF16; });
    as([](auto& a) { a.y.data = static_cast<char*>(a.y.data) + 4; });
    as([](auto& a) { std::swap(a.y.stride[1], a.y.stride[2]), a.y.stride[2] = 15; });
  }
}

// Rows that share memory may be read.
TEST(NormContract, InputsOfStride0) {
  NormCase c = find_norm_case("V_64");
  NormInputs in(c);
  for (int64_t i = 0; i < in.gate.size(); ++i) in.gate.set(i, in.gate.get(i % c.V));
  NormOutputs written_out(in), shared(in);
  run_both(in, written_out, {.impl = "cpu_norm_gate"});
  kda_norm_gate_args a = norm_gate_args(in, shared);
  a.gate.stride[0] = a.gate.stride[1] = a.gate.stride[2] = 0;
  run(a, {.impl = "cpu_norm_gate"});
  EXPECT_EQ(shared.y.bits(), written_out.y.bits());
}

TEST(NormContract, NoRows) {
  for (const char* impl : {"cpu_norm_gate", "reference"}) expect_no_rows_of_norm(on(impl));
}

TEST(NormContract, Float64RunsOnTheOracleAlone) {
  const NormInputs in(find_norm_case("V_64"));
  NormOutputs out(in, true);
  EXPECT_EQ(why_not(norm_gate_args(in, out), "cpu_norm_gate"), "float64 runs on `reference` only");
  EXPECT_EQ(why_not(norm_gate_backward_args(in, out), "cpu_norm_gate"), "float64 runs on `reference` only");
}

}  // namespace
}  // namespace kda::test
