// kda_backward on the GPU: every implementation that takes a case, against the float64 oracle at math.md's gates, and
// what is promised to the bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "calls.h"
#include "chunk_cases.h"
#include "on_cuda.h"
#include "promises.h"

namespace kda::test {
namespace {

constexpr char kHopper[] = "cuda_hopper_backward_chunk", kChunked[] = "cuda_backward_chunk",
               kRecurrent[] = "cuda_backward_recurrent";

// The gates of math.md 8; token by token in f32 those of the CPU (tests/cpp/test_numerics.cc).
double gate_of(const std::string& output, const std::string& impl, const Tensor& t) {
  if (impl == kRecurrent && t.dtype() == KDA_F32)
    return output == "dg" ? 5e-5 : output == "dA_log" || output == "d_dt_bias" ? 3e-4 : 1e-5;
  static const std::map<std::string, double> all = {{"dq", 0.006},     {"dk", 0.006},       {"dv", 0.008},
                                                    {"dh0", 0.008},    {"dg", 0.010},       {"dbeta", 0.010},
                                                    {"dA_log", 0.008}, {"d_dt_bias", 0.008}};
  return all.at(output);
}

// The RMS error is within math.md's gate, and no element is off by more than `most` of what is usual: in all, in its
// row, in its column, or where both are large. (A few tokens behind a large state have gradients that are hundreds of
// times those of others; so have channels that decay slowly beside fast ones, and heads of a large A_log beside those
// of a small one.) Where the oracle is beyond f32, any number will do.
testing::AssertionResult close_by_rows(const Tensor& expected, const Tensor& got, double gate, double most) {
  const kda_tensor& view = got;
  const int64_t width = view.ndim > 1 ? view.shape[view.ndim - 1] : 1;
  const int64_t columns = view.ndim > 3 ? width * view.shape[2] : view.ndim > 2 ? width : 1;
  std::vector<double> of_row(got.size() / width), of_column(columns);
  double all = 0, wrong = 0;
  const auto beyond = [](double x) { return !(std::abs(x) <= std::numeric_limits<float>::max()); };
  for (int64_t i = 0; i < got.size(); ++i) {
    const double x = expected.get(i), d = got.get(i) - x;
    if (beyond(x)) continue;
    if (!std::isfinite(d))
      return testing::AssertionFailure() << "element " << i << ": expected " << x << ", got " << got.get(i);
    all += x * x, wrong += d * d, of_row[i / width] += x * x, of_column[i % columns] += x * x;
  }
  const double count = std::max<int64_t>(got.size(), 1);
  if (std::sqrt(wrong) > gate * std::sqrt(all) + 1e-8)
    return testing::AssertionFailure() << "relative RMS error " << std::sqrt(wrong / all) << ", gate " << gate;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double x = expected.get(i);
    const double mean = all / count, row = of_row[i / width] / width,
                 column = of_column[i % columns] / (count / columns);
    const double usual = std::sqrt(std::max({mean, row, column, row * column / (mean + 1e-300), x * x / 64}));
    if (!beyond(x) && std::abs(got.get(i) - x) > most * usual + 1e-6)
      return testing::AssertionFailure() << "element " << i << " (" << i / width << ", " << i % width << "): expected "
                                         << x << ", got " << got.get(i) << ", off by more than " << most * usual;
  }
  return testing::AssertionSuccess();
}

struct On {
  const char* impl;
  Case c;
};
void PrintTo(const On& on, std::ostream* out) { *out << on.impl << ", " << on.c.name; }

// The case as the kernels of Hopper take it, K and V aside. Its reverse scan wants the norm inside: three cases are
// left to the scan for every GPU.
Case hopper(Case c) {
  c.dtype = c.g_dtype = KDA_BF16;
  c.qk_l2norm |= c.name != "positive" && c.name != "some_zero" && c.name != "no_h0";
  return c;
}

// So few heads and so many tokens that with 132 SMs the scans go by segments, with gates so slow that an error lasts.
// 970 tokens end with less than half of 64, 1,000 with more.
std::vector<Case> long_cases() {
  Case slow{.name = "segments_970", .T = 970, .HV = 2, .gates = Gates::kHalfZero, .gate_divisor = 10};
  Case k_first = slow, packed = slow, bounded = slow;
  k_first.name = "segments_1000_k_first", k_first.T = 1000, k_first.H = 2, k_first.state_layout = KDA_STATE_K_FIRST;
  packed.name = "segments_packed", packed.HV = 1, packed.lengths = {1450, 3, 1500}, packed.tail = 9;
  bounded.name = "segments_bounded", bounded.T = 1024, bounded.HV = 1, bounded.gate_form = KDA_GATE_LOWER_BOUND;
  bounded.gates = Gates::kRaw, bounded.lower_bound = -0.05f, bounded.gate_divisor = 1, bounded.h0 = false;
  std::vector<Case> all;
  for (const Case& c : {slow, k_first, packed, bounded}) all.push_back(wide(c));
  for (Case c : {slow, packed, bounded}) c.name = "K64_V64_" + c.name, c.K = c.V = 64, all.push_back(c);
  return all;
}

// The cases of forward, with enough heads: sums over all channels, such as dbeta and dA_log, may cancel by chance.
// (In a dA_log of eight numbers an error of 8.7e-3 was seen, where dg was off by 4.1e-3.)
std::vector<On> everywhere() {
  std::vector<On> all;
  const auto add = [&](Case c, const char* prefix) {
    c.name = prefix + c.name;
    if (const int64_t times = (c.A_log ? 16 : 8) / c.HV; times > 1) c.H *= times, c.HV *= times;
    // The gradients of cases left out here are beyond f32, or sums of such.
    if (c.gates == Gates::kEdges && c.gate_form == KDA_GATE_LOWER_BOUND) return;
    all.push_back({kChunked, c}), all.push_back({kHopper, hopper(c)});
  };
  for (const Case& c : chunk_cases()) add(c, "");
  for (Case c : cases()) {  // the cases of the CPU in sizes of tensor cores
    c.K = c.K <= 64 ? 64 : 128, c.V = c.V <= 64 ? 64 : 128;
    add(c, "cpu_");
    if (c.K + c.V < 256) add(wide(c), "cpu_wide_");
  }
  for (const Case& c : cases()) all.push_back({kRecurrent, c});
  for (const Case& c : long_cases()) all.push_back({kHopper, hopper(c)});
  return all;
}

// How much worse a gradient may be because of the data. With one key for all tokens and beta near 2, dv is what is
// left of alternating sums over a chunk: with operands of 11 bits an error of 4e-2 was seen. Rates of all sizes leave
// one head of sixteen.
double conditioning(const Case& c, const std::string& output) {
  if (c.keys == Keys::kIdentical) return c.betas == Betas::kNearTwo ? 10 : output == "dbeta" ? 3 : 2;
  return c.gates == Gates::kEdges && output == "dA_log" ? 2 : 1;
}

// How many RMS gates a single element may be off: of a million elements the worst was off by 10 gates; in dg, whose
// terms cancel, by 44, and by 64 in a chunk of one token, with v_new rounded in one way or the other.
double most_of(const std::string& output) { return output == "dg" ? 72 : 16; }

void expect_gradients(BackwardOutputs& exact, BackwardOutputs& got, const Case& c, const char* impl) {
  for (size_t i = 0; i < got.tensors().size(); ++i)
    if (const Tensor& t = *got.tensors()[i].tensor) {
      const std::string name = got.tensors()[i].name;
      const double gate = gate_of(name, impl, t) * conditioning(c, name);
      EXPECT_TRUE(close_by_rows(*exact.tensors()[i].tensor, t, gate, most_of(name) * gate)) << name;
      EXPECT_EQ(t.unwritten(), exact.tensors()[i].tensor->unwritten()) << name;
      EXPECT_TRUE(t.margins_intact()) << name;
    }
}

template <class Args>
bool takes(const char* impl, const Args& args) {
  const std::vector<const char*> all = takers("backward", args);
  return std::any_of(all.begin(), all.end(), [&](const char* name) { return !std::strcmp(name, impl); });
}

class BackwardOnCuda : public OnCuda, public testing::WithParamInterface<On> {};

TEST_P(BackwardOnCuda, IsTheOracle) {
  const auto& [impl, c] = GetParam();
  const Inputs in(c);
  BackwardOutputs exact(in, true), got(in);
  if (!takes(impl, backward_args(in, got))) GTEST_SKIP() << "declines";
  run(backward_args(in, exact), {.impl = "reference"});
  run_on_cuda(backward_args(in, got), impl);
  if (HasFatalFailure()) return;
  expect_gradients(exact, got, c, impl);
}

// With h and v_new that forward kept in bf16 the bits are those of computing them again.
TEST_P(BackwardOnCuda, FromSaved) {
  const auto& [impl, c] = GetParam();
  if (impl == std::string(kRecurrent)) GTEST_SKIP() << "takes nothing that was saved";
  const Inputs in(c);
  ForwardOutputs saved(in, false);
  saved.save_v_first(in, KDA_BF16);
  saved.v_new = Tensor(KDA_BF16, {in.B, in.T, c.HV, c.V}, c.layout);
  BackwardOutputs expected(in), got(in);
  if (!takes(impl, backward_args(in, got))) GTEST_SKIP() << "declines";
  // Saved by the forward that backward would use to compute them again.
  const bool on_hopper = impl == std::string(kHopper);
  run_on_cuda(forward_args(in, saved), on_hopper ? nullptr : "cuda_prefill_chunk");
  run_on_cuda(backward_args(in, expected), impl);
  run_on_cuda(backward_args(in, got, &saved), impl);
  for (size_t i = 0; i < got.tensors().size(); ++i)
    if (const Tensor& t = *got.tensors()[i].tensor) {
      EXPECT_EQ(t.bits(), expected.tensors()[i].tensor->bits()) << got.tensors()[i].name;
    }
}

INSTANTIATE_TEST_SUITE_P(All, BackwardOnCuda, testing::ValuesIn(everywhere()),
                         [](const auto& info) { return info.param.impl + ("_" + info.param.c.name); });

// ---- promises ----

class BackwardPromiseOnCuda : public OnCuda, public testing::WithParamInterface<const char*> {
 protected:
  const char* const impl = GetParam();
  Case sized(Case c) const {
    if (impl == std::string(kChunked)) c.K = c.V = 64;
    if (impl == std::string(kHopper)) c = wide(hopper(c)), c.layout = Layout::kDense;
    return c;
  }
  Results results(const Inputs& in, uint32_t flags = 0) const {
    BackwardOutputs out(in);
    kda_backward_args args = backward_args(in, out);
    args.exec.flags |= flags;
    run_on_cuda(args, impl);
    Results all;
    for (const auto& [name, t] : out.tensors())
      if (*t) all[name] = std::move(*t);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(All, BackwardPromiseOnCuda, testing::Values(kHopper, kChunked, kRecurrent),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(BackwardPromiseOnCuda, AgainTheSameBits) {
  for (const char* name : {"gva_4_bf16", "softplus_bias", "packed"}) {
    const Inputs in(sized(find_case(name)));
    const Results first = results(in);
    for (int i = 0; i < 3; ++i) expect_same(results(in), first, name);
  }
}

// A sequence of a packed row alone has the bits it has among others.
TEST_P(BackwardPromiseOnCuda, CompanyChangesNoBit) {
  const Inputs in(
      sized({.name = "packing", .HV = 2, .K = 20, .V = 40, .lengths = {1, 64, 17, 0, 65, 130, 15}, .tail = 3}));
  const Results all = results(in);
  for (int64_t n = 0; n < in.N; ++n) expect_same(results(row_of(in, n)), part(all, in, n), "alone");
}

// Many long heads go in passes over time, of an odd number of chunks if that is what memory allows. A head alone has
// the same bits in one pass.
TEST_P(BackwardPromiseOnCuda, PassesChangeNoBit) {
  if (impl == std::string(kRecurrent)) GTEST_SKIP() << "has no passes";
  const Inputs in(sized({.name = "passes", .T = 4200, .H = 31, .HV = 31, .K = 128, .V = 128}));
  const Results all = results(in, KDA_BATCH_INVARIANT);
  for (const int64_t h : {0, 30}) {
    Case c = in.c;
    c.H = c.HV = 1;
    Inputs one(c);
    for (const auto& [to, from] : {std::pair{&one.q, &in.q},
                                   {&one.k, &in.k},
                                   {&one.v, &in.v},
                                   {&one.g, &in.g},
                                   {&one.beta, &in.beta},
                                   {&one.d_o, &in.d_o}})
      *to = cut(*from, 2, h, 1);
    one.h0 = cut(in.h0, 1, h, 1), one.dhT = cut(in.dhT, 1, h, 1);
    Results of_head;
    for (const auto& [name, t] : all) of_head[name] = cut(t, is_state(name) ? 1 : 2, h, 1);
    expect_same(results(one, KDA_BATCH_INVARIANT), of_head, "alone");
  }
}

// Each gradient computed alone has the bits that it has among all of them: skipping the others skips nothing that it
// needs.
TEST_P(BackwardPromiseOnCuda, OneAtATime) {
  for (const char* name : {"softplus_bias", "gva_2"}) {
    const Inputs in(sized(find_case(name)));
    const Results all = results(in);
    for (const auto& [wanted, expected] : all) {
      BackwardOutputs out(in);
      Tensor* got = nullptr;
      for (const auto& [output, t] : out.tensors())
        if (output == wanted) got = t;
        else *t = Tensor();
      run_on_cuda(backward_args(in, out), impl);
      EXPECT_EQ(got->bits(), expected.bits()) << wanted << " of " << name;
    }
  }
}

TEST_P(BackwardPromiseOnCuda, NaNInOneSequenceReachesNoOther) {
  for (const char* victim : {"q", "k", "v", "g", "beta", "h0", "d_o", "dhT"}) {
    Inputs in(sized({.name = "nan", .HV = 2, .K = 20, .V = 40, .lengths = {65, 3, 70}}));
    const Results clean = results(in);
    spoil(in, victim, 1, std::nan(""));
    const Results spoilt = results(in);
    EXPECT_NE(part(spoilt, in, 1), part(clean, in, 1)) << victim;
    for (const int64_t n : {0, 2}) expect_same(part(spoilt, in, n), part(clean, in, n), victim);
  }
}

TEST_P(BackwardPromiseOnCuda, NaNInOneHeadReachesNoOther) {
  for (const char* victim : {"v", "g", "beta", "h0", "d_o", "dhT"}) {
    Inputs in(sized({.name = "nan_head", .T = 70, .H = 2, .HV = 4, .K = 20, .V = 40}));
    const Results clean = results(in);
    spoil_head(in, victim, 2, std::nan(""));
    const Results spoilt = results(in);
    for (const int64_t hv : {0, 1, 3}) expect_same(head(spoilt, in, hv), head(clean, in, hv), victim);
  }
}

// dv and dh0, which the reverse scan leaves, have the same bits whatever else is wanted: in every layout, also where dv
// is converted, and where two blocks share a head (on the emulated GPU head 4 of the first sequence).
TEST_P(BackwardPromiseOnCuda, SharedHeads) {
  for (const bool usual : {true, false}) {
    SCOPED_TRACE(usual);
    Case c = sized({.name = "shared", .H = 5, .HV = 5, .K = 20, .V = 40, .lengths = {200, 0, 40}, .tail = 2});
    if (!usual)
      c.state_dtype = KDA_BF16, c.state_layout = KDA_STATE_K_FIRST, c.gate_form = KDA_GATE_SOFTPLUS,
      c.gates = Gates::kRaw, c.A_log = c.dt_bias = true;
    const Inputs in(c);
    BackwardOutputs exact(in, true), all(in), got(in);
    run(backward_args(in, exact), {.impl = "reference"});
    for (const auto& [name, t] : got.tensors())
      if (name != std::string("dv") && name != std::string("dh0")) *t = Tensor();
    if (!usual) all.dv = Tensor(KDA_F32, all.dv.shape()), got.dv = Tensor(KDA_F32, got.dv.shape());
    run_on_cuda(backward_args(in, got), impl);
    if (HasFatalFailure()) return;
    expect_gradients(exact, got, c, impl);
    run_on_cuda(backward_args(in, all), impl);
    EXPECT_EQ(got.dv.bits(), all.dv.bits());
    EXPECT_EQ(got.dh0.bits(), all.dh0.bits());
  }
}

// What is not a number in d_o reaches dv of its token and of those before it, but of no later one and in no other
// column; in q, k, g or beta all columns of its head, and later tokens only within 32 tokens.
TEST_P(BackwardPromiseOnCuda, NaNReachesNoLaterToken) {
  if (impl != std::string(kHopper)) GTEST_SKIP() << "is not asked for that";
  const Case c = sized({.name = "nan_later", .T = 102, .H = 4, .HV = 4, .gate_divisor = 10});
  const int64_t row = c.HV * c.V, column = 67;
  const auto wanted = [&](const Inputs& in) {
    BackwardOutputs out(in);
    for (const auto& [name, t] : out.tensors())
      if (name != std::string("dv") && name != std::string("dh0")) *t = Tensor();
    run_on_cuda(backward_args(in, out), impl);
    return out;
  };
  const BackwardOutputs clean = wanted(Inputs(c));
  struct Victim {
    const char* name;
    int64_t token;
    double x;
  };
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  for (const auto& [victim, token, x] : {Victim{"d_o", 5, kNaN},
                                         {"d_o", 40, -kInf},
                                         {"d_o", 77, kInf},
                                         {"d_o", 101, kNaN},
                                         {"q", 70, kNaN},
                                         {"k", 33, kNaN},
                                         {"beta", 100, kNaN}}) {
    SCOPED_TRACE(victim + (" of token " + std::to_string(token)));
    const bool one_column = victim == std::string("d_o");
    Inputs in(c);
    for (const auto& [name, tensor] : in.tensors())
      if (name == std::string(victim)) tensor->set(token * (tensor->size() / in.T) + (one_column ? column : 0), x);
    const BackwardOutputs got = wanted(in);
    int64_t wrong = 0, finite = 0;
    for (int64_t i = 0; i < in.T * row; ++i) {
      const double expected = clean.dv.get(i), y = got.dv.get(i);
      const bool reached = one_column ? i % row == column : i % row < c.V;
      if (!reached) wrong += y != expected;
      else if (i / row <= token) finite += !std::isnan(y);
      else if (one_column || i / row / 32 > token / 32)
        wrong += !(std::abs(y - expected) <= 0.02 * std::max(1.0, std::abs(expected)));
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(finite, 0);
    for (int64_t i = 0; i < got.dh0.size(); ++i) {
      const bool reached = one_column ? i / c.K == column : i < got.dh0.size() / c.HV;
      if (reached) finite += !std::isnan(got.dh0.get(i));
      else wrong += got.dh0.get(i) != clean.dh0.get(i);
    }
    EXPECT_EQ(wrong, 0) << "dh0";
    EXPECT_EQ(finite, 0) << "dh0";
  }
}

// Tests what the reverse scan itself returns.
void expect_scan(const Inputs& in, const char* impl) {
  BackwardOutputs exact(in, true), got(in);
  run(backward_args(in, exact), {.impl = "reference"});
  run_on_cuda(backward_args(in, got), impl);
  if (testing::Test::HasFatalFailure()) return;
  EXPECT_TRUE(close_by_rows(exact.dv, got.dv, 0.01, 0.4));
  EXPECT_TRUE(close_by_rows(exact.dh0, got.dh0, 0.01, 0.4));
}

// The reverse scan chooses units for dO times the scale, and multiplies by q. Neither a negative scale nor queries that
// are longer than 1, all of one direction, take its operands out of f16.
TEST_P(BackwardPromiseOnCuda, ScalesAndQueriesOfAnySize) {
  for (const bool negative : {true, false}) {
    SCOPED_TRACE(negative);
    Case c = sized({.name = "sizes", .T = 128, .H = 2, .HV = 2, .K = 20, .V = 40, .gate_divisor = 10, .dhT = false});
    if (negative) c.scale = -0.1f, c.qk_l2norm = true;
    else c.gates = Gates::kZero, c.qk_l2norm = false;
    Inputs in(c);
    for (int64_t i = 0; i < in.d_o.size(); ++i) in.d_o.set(i, negative ? in.d_o.get(i) * 1e6 : 1356);
    for (int64_t i = 0; !negative && i < in.q.size(); ++i) in.q.set(i, 1), in.k.set(i, 1 / 11.3);
    for (int64_t i = 0; !negative && i < in.beta.size(); ++i) in.beta.set(i, 0.001);
    expect_scan(in, impl);
    if (HasFatalFailure()) return;
  }
}

// In front of tokens without gradients of outputs, dO may be of any size.
TEST_P(BackwardPromiseOnCuda, HugeGradientsBeforeZeros) {
  Case c = sized({.name = "sizes", .T = 150, .H = 2, .HV = 2, .K = 20, .V = 40, .gate_divisor = 10, .dhT = false});
  c.qk_l2norm = true;
  Inputs in(c);
  const int64_t some = 86 * in.d_o.size() / 150;
  for (int64_t i = 0; i < in.d_o.size(); ++i) in.d_o.set(i, i < some ? in.d_o.get(i) * 1e7 : 0);
  expect_scan(in, impl);
}

// Tests the units of values, of their gradients and of states.
TEST_P(BackwardPromiseOnCuda, ValuesOfAnySize) {
  const auto multiply = [](Tensor& t, double factor) {
    for (int64_t i = 0; i < t.size(); ++i) t.set(i, t.get(i) * factor);
  };
  struct Scales {
    double v, d_o, dhT;
  };
  for (const Scales& s : {Scales{1e-18, 1e18, 1e18},
                          {1e18, 1e-18, 1e-18},
                          {1, 1e30, 1e30},
                          {1, 1e-30, 1e-30},
                          {1e-6, 1, 1e6},
                          {1, 1e6, 1}}) {
    SCOPED_TRACE(testing::Message() << "v times " << s.v << ", d_o times " << s.d_o << ", dhT times " << s.dhT);
    Inputs in(
        sized({.name = "sizes", .T = 80, .H = 8, .HV = 8, .K = 20, .V = 40, .dtype = KDA_BF16, .gate_divisor = 10}));
    multiply(in.v, s.v), multiply(in.h0, s.v), multiply(in.d_o, s.d_o), multiply(in.dhT, s.dhT);
    BackwardOutputs exact(in, true), got(in);
    run(backward_args(in, exact), {.impl = "reference"});
    run_on_cuda(backward_args(in, got), impl);
    for (size_t i = 0; i < got.tensors().size(); ++i)
      if (const Tensor& t = *got.tensors()[i].tensor) {
        const std::string name = got.tensors()[i].name;
        EXPECT_TRUE(close_by_rows(*exact.tensors()[i].tensor, t, gate_of(name, "", t), 40 * gate_of(name, "", t)))
            << name;
      }
  }
}

// Where beta is 0 or so small that v_new and dv are, too, dbeta comes from other formulas than elsewhere.
TEST_P(BackwardPromiseOnCuda, SomeBetasAreZero) {
  const Case c = sized({.name = "betas", .T = 70, .H = 2, .HV = 2, .K = 20, .V = 40, .gate_divisor = 10});
  Inputs in(c);
  for (int64_t i = 0; i < in.beta.size(); i += 9) in.beta.set(i, i % 2 ? 0 : 1e-20);
  BackwardOutputs exact(in, true), got(in);
  run(backward_args(in, exact), {.impl = "reference"});
  run_on_cuda(backward_args(in, got), impl);
  const double gate = gate_of("dbeta", impl, got.dbeta);
  EXPECT_TRUE(close_by_rows(exact.dbeta, got.dbeta, gate, 8 * gate));
}

// Tokens behind the end have no gate inputs, whatever bias would be added to them.
TEST_P(BackwardPromiseOnCuda, BiasesOfAnySize) {
  Case c = sized(find_case("lower_bound"));
  c.H = c.HV = 8, c.T = 70;
  Inputs in(c);
  for (int64_t i = 0; i < in.dt_bias.size(); i += 3) in.dt_bias.set(i, i % 2 ? 1e36 : -1e36);
  BackwardOutputs exact(in, true), got(in);
  run(backward_args(in, exact), {.impl = "reference"});
  run_on_cuda(backward_args(in, got), impl);
  for (const auto& [expected, t] : {std::pair{&exact.dk, &got.dk}, {&exact.dq, &got.dq}, {&exact.dg, &got.dg}})
    EXPECT_TRUE(close_by_rows(*expected, *t, 0.01, 0.64));
}

// Sums over no rows are 0.
TEST_P(BackwardPromiseOnCuda, NoRows) {
  Case c = sized(find_case("softplus_bias"));
  c.B = 0;
  const Inputs in(c);
  BackwardOutputs got(in);
  run_on_cuda(backward_args(in, got), impl);
  for (int64_t i = 0; i < got.dA_log.size(); ++i) EXPECT_EQ(got.dA_log.get(i), 0);
  for (int64_t i = 0; i < got.d_dt_bias.size(); ++i) EXPECT_EQ(got.d_dt_bias.get(i), 0);
}

// A rank without tokens trains, too: sums are 0, and the gradient of a state passes through.
TEST_P(BackwardPromiseOnCuda, SequencesWithoutTokens) {
  for (const bool packed : {false, true}) {
    Case c = sized(find_case("softplus_bias"));
    c.T = 0, c.state_layout = KDA_STATE_V_FIRST;
    if (packed) c.B = 1, c.lengths = {0, 0};
    const Inputs in(c);
    BackwardOutputs exact(in, true), got(in);
    run(backward_args(in, exact), {.impl = "reference"});
    run_on_cuda(backward_args(in, got), impl);
    for (int64_t i = 0; i < got.dA_log.size(); ++i) EXPECT_EQ(got.dA_log.get(i), 0);
    for (int64_t i = 0; i < got.d_dt_bias.size(); ++i) EXPECT_EQ(got.d_dt_bias.get(i), 0);
    for (int64_t i = 0; i < got.dh0.size(); ++i) EXPECT_EQ(got.dh0.get(i), exact.dh0.get(i));
  }
}

TEST_P(BackwardPromiseOnCuda, WorkspaceIsChecked) {
  const Inputs in(sized(find_case("packed")));
  const BackwardOutputs out(in);
  expect_workspace_is_checked(backward_args(in, out), impl);
}

}  // namespace
}  // namespace kda::test
