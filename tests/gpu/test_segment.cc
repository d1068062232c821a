// kda_segment_map and kda_segment_merge on the GPU: against the float64 oracle, and what is promised to the bit.
#include <algorithm>
#include <cmath>

#include "calls.h"
#include "chunk_cases.h"
#include "on_cuda.h"
#include "promises.h"
#include "segment_promises.h"

namespace kda::test {
namespace {

constexpr char kHopper[] = "cuda_segment_hopper", kChunked[] = "cuda_segment_chunk",
               kRecurrent[] = "cuda_segment_recurrent";

struct On {
  const char* impl;
  Case c;
};
void PrintTo(const On& on, std::ostream* out) { *out << on.impl << ", " << on.c.name; }

// Hopper's reverse scan wants everything in bf16.
Case in_bf16(Case c) {
  c.dtype = c.g_dtype = KDA_BF16;
  return c;
}

// So long that sequences of few heads are mapped in pieces of 2,048 tokens. Without decay and with one key for all
// tokens, the maps of pieces keep most of a state.
std::vector<Case> long_cases() {
  Case packed{.name = "pieces_packed", .K = 64, .V = 64, .lengths = {70, 2050, 0, 2048, 3}, .tail = 9};
  packed.gates = Gates::kZero, packed.keys = Keys::kIdentical, packed.qk_l2norm = true;
  Case rows = packed, decaying = packed;
  rows.name = "pieces_rows", rows.lengths.clear(), rows.tail = 0, rows.B = 2, rows.T = 4100, rows.HV = 2;
  rows.state_layout = KDA_STATE_K_FIRST;
  decaying.name = "pieces_decaying", decaying.lengths = {6200}, decaying.gates = Gates::kHalfZero;
  decaying.gate_divisor = 10, decaying.keys = Keys::kNormal;
  return {packed, rows, decaying};
}
std::vector<On> everywhere() {
  std::vector<On> all;
  for (Case c : chunk_cases()) {
    if (c.HV > 4) c.H = c.HV = 2;  // the oracle's M takes seconds for sixteen heads
    all.push_back({kChunked, c}), all.push_back({kHopper, in_bf16(c)});
  }
  for (Case c : long_cases()) {
    all.push_back({kChunked, c}), all.push_back({kHopper, in_bf16(c)});
    c.K = 8, c.V = 12, all.push_back({kRecurrent, c});
  }
  for (Case c : cases()) {  // the cases of the CPU, also in sizes of tensor cores
    all.push_back({kRecurrent, c});
    c.K = c.K <= 64 ? 64 : 128, c.V = c.V <= 64 ? 64 : 128, c.name = "cpu_" + c.name;
    all.push_back({kChunked, c});
  }
  return all;
}

// The gates of math.md 8 for states and their gradients; token by token in f32 those of the CPU. Where keys are the
// same they are wider, as for forward and backward. With beta near 2, b is what is left of alternating sums, and
// without a first state nothing else is in it: an error of 0.096 was seen, that of a forward without h0.
double gate_of(const std::string& impl, const std::string& output, const Case& c) {
  if (impl == kRecurrent) return 1e-5;
  double conditioning = 1;
  if (c.keys == Keys::kIdentical) conditioning = c.betas != Betas::kNearTwo ? 2 : output == "b" ? 24 : 10;
  return conditioning * (output == "d" ? 0.008 : 0.005);
}

// Of an identity that has decayed almost to nothing, operands of 16 bits leave an absolute error: that of the smallest
// number in f16, beside the columns of length 1 that M began with.
testing::AssertionResult close_map(const Tensor& expected, const Tensor& got, double gate, bool exact) {
  double most = 0;
  for (int64_t i = 0; i < got.size(); ++i)
    most = std::fmax(most, std::isnan(got.get(i)) ? 1 : std::abs(got.get(i) - expected.get(i)));
  if (!exact && most <= 0x1p-24) return testing::AssertionSuccess();
  return close(expected, got, gate);
}

template <class Args>
bool takes(const char* impl, const char* op, const Args& args) {
  const std::vector<const char*> all = takers(op, args);
  return std::any_of(all.begin(), all.end(), [&](const char* name) { return std::string(name) == impl; });
}

class SegmentMapOnCuda : public OnCuda, public testing::WithParamInterface<On> {
 protected:
  SegmentMapOnCuda() : impl(GetParam().impl), c(GetParam().c), in(c) {}
  bool declines() const { return !takes(impl.c_str(), "segment_map", segment_map_args(in, SegmentOutputs(in))); }
  const std::string impl;
  const Case c;
  const Inputs in;
};

TEST_P(SegmentMapOnCuda, IsTheOracle) {
  if (declines()) GTEST_SKIP() << "declines";
  SegmentOutputs exact(in, true), got(in);
  run(segment_map_args(in, exact), {.impl = "reference"});
  run_on_cuda(segment_map_args(in, got), impl.c_str());
  if (HasFatalFailure()) return;
  for (size_t i = 0; i < 3; ++i) {
    const auto [name, t] = got.tensors()[i];
    const double gate = gate_of(impl, name, c);
    const Tensor& expected = *exact.tensors()[i].tensor;
    EXPECT_TRUE(i == 0 ? close_map(expected, *t, gate, impl == kRecurrent) : close(expected, *t, gate)) << name;
    EXPECT_EQ(t->unwritten(), 0) << name;
    EXPECT_TRUE(t->margins_intact()) << name;
  }
}

// Each of the three alone: the same bits. They are those of forward and backward, if no sequence is cut into pieces: b
// of the state after zeros and, but for Hopper, M of the states after the identity without values, d of the gradient of
// the first state.
TEST_P(SegmentMapOnCuda, IsForwardAndBackwardToTheBit) {
  if (declines()) GTEST_SKIP() << "declines";
  SegmentOutputs all(in);
  run_on_cuda(segment_map_args(in, all), impl.c_str());
  for (size_t i = 0; i < 3; ++i) {
    SegmentOutputs one(in);
    for (size_t j = 0; j < 3; ++j)
      if (j != i) *one.tensors()[j].tensor = Tensor();
    run_on_cuda(segment_map_args(in, one), impl.c_str());
    const auto [name, t] = one.tensors()[i];
    EXPECT_EQ(t->bits(), all.tensors()[i].tensor->bits()) << name;
  }
  if (c.name.starts_with("pieces")) return;
  const bool on_hopper = impl == kHopper;
  const std::string rest = impl.substr(std::string("cuda_segment_").size());
  const std::string forward_impl = "cuda_prefill_" + rest, backward_impl = "cuda_backward_" + rest;

  ForwardOutputs forward(in, false);
  forward.hT = Tensor(KDA_F32, in.state_shape(in.N));
  kda_forward_args f = forward_args(in, forward);
  f.states.h0 = {};
  run_on_cuda(f, on_hopper ? "cuda_hopper_prefill_pairs" : forward_impl.c_str());
  EXPECT_EQ(all.b.bits(), forward.hT.bits());
  if (on_hopper) return;  // own kernels make M and d, with units or orders of sums of their own

  BackwardOutputs backward(in);
  for (const auto& [name, t] : backward.tensors()) *t = Tensor();
  backward.dh0 = Tensor(KDA_F32, in.state_shape(in.N));
  kda_backward_args b = backward_args(in, backward);
  b.dhT = {}, b.exec.flags = KDA_BATCH_INVARIANT;
  run_on_cuda(b, backward_impl.c_str());
  EXPECT_EQ(all.d.bits(), backward.dh0.bits());

  const int64_t K = c.K;
  const Tensor zeros(c.dtype, {in.B, in.T, c.HV, K}, std::vector<double>(in.B * in.T * c.HV * K));
  const Tensor o(c.dtype, zeros.shape()), M(KDA_F32, {in.N, c.HV, K, K});
  Tensor unit(KDA_F32, {in.N, c.HV, K, K});
  for (int64_t i = 0; i < unit.size(); ++i) unit.set(i, i % (K * K) % (K + 1) == 0);
  f.in.v = zeros, f.o = o, f.states.h0 = unit, f.states.hT = M, f.in.state_layout = KDA_STATE_K_FIRST;
  run_on_cuda(f, forward_impl.c_str());
  EXPECT_EQ(all.M.bits(), M.bits());
}

INSTANTIATE_TEST_SUITE_P(All, SegmentMapOnCuda, testing::ValuesIn(everywhere()),
                         [](const auto& info) { return info.param.impl + ("_" + info.param.c.name); });

// ---- promises ----

class SegmentPromiseOnCuda : public OnCuda, public testing::WithParamInterface<const char*> {
 protected:
  const char* const impl = GetParam();
  Case sized(Case c) const {
    if (impl == std::string(kChunked)) c.K = c.V = 64;
    if (impl == std::string(kHopper)) c = wide(in_bf16(c)), c.qk_l2norm = true;
    return c;
  }
  Results results(const Inputs& in) const {
    SegmentOutputs out(in);
    run_on_cuda(segment_map_args(in, out), impl);
    Results all;
    for (const auto& [name, t] : out.tensors()) all[name] = std::move(*t);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(All, SegmentPromiseOnCuda, testing::Values(kHopper, kChunked, kRecurrent),
                         [](const auto& info) { return std::string(info.param); });

// A sequence of a packed row alone has the maps that it has among others, and each time.
TEST_P(SegmentPromiseOnCuda, CompanyChangesNoBit) {
  const Inputs in(
      sized({.name = "packing", .HV = 2, .K = 20, .V = 40, .lengths = {1, 64, 17, 0, 65, 130, 15}, .tail = 3}));
  const Results all = results(in);
  expect_same(results(in), all, "again");
  for (int64_t n = 0; n < in.N; ++n) expect_same(results(row_of(in, n)), part(all, in, n), "alone");
}
TEST_P(SegmentPromiseOnCuda, CompanyOfPiecesChangesNoBit) {
  Case c = sized({.name = "pieces", .K = 8, .V = 12, .lengths = {300, 2060, 0, 2048, 3}, .tail = 3});
  c.gates = Gates::kZero, c.keys = Keys::kIdentical;
  const Inputs in(c);
  const Results all = results(in);
  for (const int64_t n : {1, 3, 4}) expect_same(results(row_of(in, n)), part(all, in, n), "alone");
}

TEST_P(SegmentPromiseOnCuda, WithoutTokensNothingHappens) {
  const auto call = [&](const auto& a) { run_on_cuda(a, impl); };
  expect_no_tokens_no_change(sized({.name = "zero", .HV = 2, .K = 5, .V = 3, .lengths = {0, 0}, .tail = 3}), call);
  expect_no_tokens_no_change(sized({.name = "none", .B = 2, .T = 0, .HV = 2, .K = 5, .V = 3}), call);
}

TEST_P(SegmentPromiseOnCuda, NaNStaysInItsSequenceAndHead) {
  for (const char* victim : {"k", "v", "g", "beta", "d_o"}) {
    Inputs in(sized({.name = "nan", .HV = 2, .K = 20, .V = 40, .lengths = {65, 3, 70}}));
    const Results clean = results(in);
    spoil(in, victim, 1, std::nan(""));
    const Results spoilt = results(in);
    EXPECT_NE(part(spoilt, in, 1), part(clean, in, 1)) << victim;
    for (const int64_t n : {0, 2}) expect_same(part(spoilt, in, n), part(clean, in, n), victim);
    if (victim == std::string("v")) {
      EXPECT_EQ(spoilt.at("M").bits(), clean.at("M").bits());
      EXPECT_EQ(spoilt.at("d").bits(), clean.at("d").bits());
    }
  }
}

// Without a norm, queries are operands as they are: d is made of q dO.
TEST_P(SegmentPromiseOnCuda, QueriesOfAnySize) {
  for (const double size : {1e-10, 1e15, 1e25, 1e37}) {
    SCOPED_TRACE(size);
    Case c = sized({.name = "queries", .T = 40, .HV = 1, .K = 20, .V = 40});
    c.qk_l2norm = false;
    Inputs in(c);
    for (int64_t i = 0; i < in.q.size(); ++i) in.q.set(i, size * in.q.get(i));
    for (int64_t i = 0; i < in.d_o.size(); ++i) in.d_o.set(i, in.d_o.get(i) / size);
    SegmentOutputs exact(in, true), got(in);
    run(segment_map_args(in, exact), {.impl = "reference"});
    run_on_cuda(segment_map_args(in, got), impl);
    if (HasFatalFailure()) return;
    EXPECT_TRUE(close(exact.d, got.d, gate_of(impl, "d", c)));
  }
}

// Offsets of any value mean the part of them that lies within the row; nothing beside the maps is written.
TEST_P(SegmentPromiseOnCuda, AnyLengths) {
  Inputs in(sized({.name = "any", .HV = 2, .K = 20, .V = 40, .lengths = {1, 64, 17, 0, 65}, .tail = 3}));
  Random random(5);
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    std::vector<double> offsets;
    for (int64_t n = 0; n <= in.N; ++n) offsets.push_back(static_cast<double>(random.below(2 * in.T) - in.T / 2));
    const bool fall = round % 3 == 2;
    if (!fall) std::sort(offsets.begin(), offsets.end()), offsets.front() = round % 2 ? 0 : INT32_MIN;
    if (round % 4 == 0) offsets.back() = INT32_MAX;
    const auto set = [&](double least, double most) {
      for (int64_t n = 0; n <= in.N; ++n) in.cu_seqlens.set(n, std::min(std::max(offsets[n], least), most));
    };
    set(INT32_MIN, INT32_MAX);
    SegmentOutputs got(in), exact(in, true);
    run_on_cuda(segment_map_args(in, got), impl);
    if (HasFatalFailure()) return;
    for (const auto& [name, t] : got.tensors()) EXPECT_TRUE(t->margins_intact()) << name;
    if (fall) continue;
    set(0, static_cast<double>(in.T));
    run(segment_map_args(in, exact), {.impl = "reference"});
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(
          close(*exact.tensors()[i].tensor, *got.tensors()[i].tensor, gate_of(impl, got.tensors()[i].name, in.c)))
          << got.tensors()[i].name;
  }
}

TEST_P(SegmentPromiseOnCuda, WorkspaceIsChecked) {
  const Inputs in(sized(find_case("packed")));
  expect_workspace_is_checked(segment_map_args(in, SegmentOutputs(in)), impl);
}

// ---- merge ----

constexpr char kMerge[] = "cuda_segment_merge";

std::string name_of(const testing::TestParamInfo<MergeSizes>& info) {
  const MergeSizes& s = info.param;
  return "P" + std::to_string(s.P) + "_HV" + std::to_string(s.HV) + "_K" + std::to_string(s.K) + "_V" +
         std::to_string(s.V);
}
class SegmentMergeOnCuda : public OnCuda, public testing::WithParamInterface<MergeSizes> {};
INSTANTIATE_TEST_SUITE_P(All, SegmentMergeOnCuda,
                         testing::Values(MergeSizes{0, 1, 4, 4}, MergeSizes{1, 1, 1, 1}, MergeSizes{3, 2, 60, 100},
                                         MergeSizes{5, 3, 17, 200}, MergeSizes{2, 1, 128, 128},
                                         MergeSizes{2, 1, 256, 40}, MergeSizes{3, 1, 132, 33},
                                         MergeSizes{2, 3, 200, 256}, MergeSizes{2, 40, 64, 128},
                                         MergeSizes{20, 1, 64, 16}),
                         name_of);

TEST_P(SegmentMergeOnCuda, IsTheOracle) {
  expect_merge_is_the_oracle(GetParam(), [](const auto& a, bool padded) { run_on_cuda(a, kMerge, padded); });
}

// Errors do not pile up: 64 maps of norm 1, which keep the length of every column. Tensor cores cut off what the sum of
// their products has no room for, towards zero: half of a last bit a map, 2.1e-6 of 64 maps on an H200. The emulator
// does not.
TEST(SegmentMergeDetailsOnCuda, ManyRotations) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no CUDA device";
  const int64_t P = 64, K = 64;
  const MergeTensors t(P, 1, K, 32, KDA_STATE_V_FIRST);
  Random random(3);
  Tensor M(KDA_F32, {P, 1, K, K}), b(KDA_F32, t.b.shape(), std::vector<double>(t.b.size()));
  for (int64_t n = 0; n < P; ++n) {  // I - 2 x x^T, |x| = 1
    std::vector<double> x(K);
    double squares = 0;
    for (double& one : x) one = random.normal(), squares += one * one;
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < K; ++j) M.set((n * K + i) * K + j, (i == j) - 2 * x[i] * x[j] / squares);
  }
  const Tensor expected(KDA_F64, t.states.shape());
  for (const bool reverse : {false, true}) {
    kda_segment_merge_args a = segment_merge_args(t, reverse);
    a.M = M, a.b = b;
    kda_segment_merge_args r = a;
    r.states = expected;
    run(r, {.impl = "reference"});
    run_on_cuda(a, kMerge);
    EXPECT_TRUE(close(expected, t.states, 3e-6)) << reverse;
  }
}

// NaN in one head's map stays there. Columns have the same bits alone as among others, in blocks of any size.
TEST(SegmentMergeDetailsOnCuda, HeadsAndColumnsAreIndependent) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no CUDA device";
  expect_nan_stays_in_its_head_of_a_merge([](const auto& a) { run_on_cuda(a, kMerge); });
  const int64_t HV = 70;  // blocks of 32 columns, on GPUs of up to 279 SMs
  const MergeTensors many(2, HV, 40, 64, KDA_STATE_V_FIRST), one(2, 1, 40, 64, KDA_STATE_V_FIRST);
  run_on_cuda(segment_merge_args(many), kMerge);
  for (const int64_t hv : {int64_t{0}, HV - 1}) {
    kda_segment_merge_args of_head = segment_merge_args(one);
    const Tensor M_of = cut(many.M, 1, hv, 1), b_of = cut(many.b, 1, hv, 1), h0_of = cut(many.h0, 0, hv, 1);
    of_head.M = M_of, of_head.b = b_of, of_head.h0 = h0_of;
    run_on_cuda(of_head, kMerge);
    EXPECT_EQ(one.states.bits(), many.states.bits(1, hv, 1)) << hv;
  }
}

}  // namespace
}  // namespace kda::test
