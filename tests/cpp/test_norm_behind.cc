// The norm and gate behind an operator, in the same call: the bits of kda_norm_gate on its output, for every
// implementation on the CPU; padding; the contract.
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include "contract.h"

namespace kda::test {
namespace {

template <class Args>
constexpr const char* kOp = nullptr;
template <>
constexpr const char* kOp<kda_forward_args> = "forward";
template <>
constexpr const char* kOp<kda_decode_args> = "decode";
template <>
constexpr const char* kOp<kda_verify_args> = "verify";
template <>
constexpr const char* kOp<kda_flush_verify_args> = "flush_verify";

// A legal call with a norm.
template <class Args>
struct Normed : Legal<Args> {
  using Legal<Args>::args;
  Tensor gate, weight;

  explicit Normed(const Case& c = legal_case(), int32_t dtype = KDA_F32, int32_t activation = KDA_NORM_SIGMOID)
      : Legal<Args>(c), gate(dtype, shape(args.o), Layout::kPadded), weight(dtype, {args.o.shape[3]}) {
    if constexpr (std::is_same_v<Args, kda_forward_args>)  // of which some implementations save nothing
      for (kda_tensor* t : {&args.h, &args.v_new, &args.Aqk, &args.Akk, &args.checkpoints, &args.checkpoint_slots})
        *t = {}, args.checkpoint_every = 0;
    Random random(5);
    for (int64_t i = 0; i < gate.size(); ++i) gate.set(i, 2 * random.normal());
    for (int64_t i = 0; i < weight.size(); ++i) weight.set(i, 1 + 0.3 * random.normal());
    args.norm = {gate, weight, 1e-5, activation, 1};
    if (activation == KDA_NORM_NONE) args.norm.gate = {};
  }
  static std::vector<int64_t> shape(const kda_tensor& t) { return {t.shape, t.shape + t.ndim}; }
  std::vector<Bits> bits() {
    std::vector<Bits> all;
    for (const Tensor* t : this->outputs()) all.push_back(t->bits());
    return all;
  }
  double o(int64_t b, int64_t t, int64_t hv, int64_t v) const {
    const kda_tensor& o = args.o;
    const int64_t at = b * o.stride[0] + t * o.stride[1] + hv * o.stride[2] + v;
    if (o.dtype == KDA_F32) return static_cast<const float*>(o.data)[at];
    return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(o.data)[at]) << 16);
  }
};

// Makes the call without its norm, and then the norm, in place.
template <class Args>
void run_apart(Normed<Args>& x, const char* impl) {
  Args a = x.args;
  a.norm = {};
  run(a, {.impl = impl});
  kda_norm_gate_args n = KDA_NORM_GATE_ARGS_INIT;
  const kda_norm_inputs& norm = x.args.norm;
  n.x = n.y = a.o, n.gate = norm.gate, n.weight = norm.weight, n.eps = norm.eps, n.activation = norm.activation;
  run(n, {.impl = std::string(impl) == "reference" ? "reference" : "cpu_norm_gate"});
}

template <class Args>
std::vector<const char*> takers(Args a) {
  std::vector<const char*> all;
  for (int i = 0; const char* name = kda_implementation(kOp<Args>, i); ++i) {
    uint64_t bytes;
    a.exec.impl = name;
    if (query(a, &bytes) == KDA_OK) all.push_back(name);
  }
  return all;
}

Case wide_case(int32_t dtype) {
  Case c = legal_case();
  c.name = "wide", c.K = 40, c.V = 72, c.HV = 4, c.H = 2, c.dtype = dtype, c.qk_l2norm = true;
  return c;
}

template <class Args>
class NormBehind : public testing::Test {};
using NormedArgs = testing::Types<kda_forward_args, kda_decode_args, kda_verify_args, kda_flush_verify_args>;
struct Names {
  template <class Args>
  static std::string GetName(int) {
    return kOp<Args>;
  }
};
TYPED_TEST_SUITE(NormBehind, NormedArgs, Names);

TYPED_TEST(NormBehind, HasTheBitsOfTheOperatorsApart) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16})
    for (const int32_t gate : {KDA_F32, KDA_BF16, KDA_F16})
      for (const int32_t activation : {KDA_NORM_NONE, KDA_NORM_SIGMOID, KDA_NORM_SILU}) {
        const std::vector<const char*> impls = takers(Normed<TypeParam>(wide_case(dtype)).args);
        EXPECT_GE(impls.size(), 2u);
        for (const char* impl : impls) {
          SCOPED_TRACE(impl);
          Normed<TypeParam> apart(wide_case(dtype), gate, activation), fused(wide_case(dtype), gate, activation);
          run_apart(apart, impl);
          run(fused.args, {.impl = impl});
          if (this->HasFatalFailure()) return;
          EXPECT_EQ(fused.bits(), apart.bits()) << dtype << gate << activation;
          for (const Tensor* t : fused.outputs()) EXPECT_TRUE(t->margins_intact());
        }
      }
}

TYPED_TEST(NormBehind, WithoutAWeight) {
  Normed<TypeParam> apart, fused;
  apart.args.norm.weight = fused.args.norm.weight = {};
  run_apart(apart, "reference");
  run(fused.args, {.impl = "reference"});
  EXPECT_EQ(fused.bits(), apart.bits());
}

TYPED_TEST(NormBehind, AnOlderStructHasNone) {
  Normed<TypeParam> x, plain;
  plain.args.norm = {};
  x.args.struct_size = offsetof(TypeParam, norm);
  run(plain.args, {.impl = "reference"});
  run(x.args, {.impl = "reference"});
  EXPECT_EQ(x.bits(), plain.bits());
}

// Rows of padding and behind the sequences are zeros, whatever their gates are, and without eps, too.
TYPED_TEST(NormBehind, PaddingStaysZero) {
  for (const char* impl : takers(Normed<TypeParam>().args))
    for (const double eps : {1e-5, 0.0})
      for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()})
        for (const int32_t activation : {KDA_NORM_SIGMOID, KDA_NORM_SILU}) {
          SCOPED_TRACE(impl);
          Normed<TypeParam> x(legal_case(), KDA_F32, activation);
          ASSERT_EQ(x.args.o.shape[1], 9);  // 2, 0 and 5 tokens, and two behind
          x.h0.state_indices.set(0, -3);
          x.args.norm.eps = eps;
          const int64_t row = x.args.o.shape[2] * x.args.o.shape[3];
          for (const int64_t t : {0, 1, 7, 8})
            for (int64_t i = 0; i < row; ++i) x.gate.set(t * row + i, bad);
          run(x.args, {.impl = impl});
          if (this->HasFatalFailure()) return;
          for (int64_t t = 0; t < 9; ++t)
            for (int64_t hv = 0; hv < 2; ++hv)
              for (int64_t v = 0; v < 3; ++v)
                if (t < 2 || t >= 7) EXPECT_EQ(x.o(0, t, hv, v), 0) << t;
                else EXPECT_TRUE(std::isfinite(x.o(0, t, hv, v))) << t;
        }
}

// NaN in a row that is none of zeros stays.
TYPED_TEST(NormBehind, NaNOfAGateIsKept) {
  for (const char* impl : takers(Normed<TypeParam>().args)) {
    Normed<TypeParam> x;
    x.gate.set(3 * 6 + 1, std::nan(""));
    run(x.args, {.impl = impl});
    EXPECT_TRUE(std::isnan(x.o(0, 3, 0, 1))) << impl;
    EXPECT_FALSE(std::isnan(x.o(0, 3, 0, 0))) << impl;
  }
}

TYPED_TEST(NormBehind, Float64IsTheOracles) {
  Normed<TypeParam> x;
  const Tensor gate(KDA_F64, Normed<TypeParam>::shape(x.args.o), std::vector<double>(x.gate.size(), 0.5));
  x.args.norm.gate = gate;
  const std::vector<const char*> all = takers(x.args);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_STREQ(all[0], "reference");
  run(x.args, {});
}

TYPED_TEST(NormBehind, Refusals) {
  const auto refused = [](const char* sentence, auto change) {
    Normed<TypeParam> x;
    change(x.args);
    expect_refused<TypeParam>(x, sentence);
  };
  refused("norm.gate: expected norm.apply with it, got 0", [](auto& a) { a.norm.apply = 0; });
  refused("norm.weight: expected norm.apply with it, got 0", [](auto& a) { a.norm.apply = 0, a.norm.gate = {}; });
  refused("norm.gate: expected none without an activation, got one", [](auto& a) { a.norm.activation = 0; });
  refused("norm.activation: expected 0..2, got 3", [](auto& a) { a.norm.activation = 3; });
  refused("norm.activation: expected 0..2, got -1", [](auto& a) { a.norm.activation = -1; });
  refused("norm.eps: expected a number >= 0 in the range of f32, got -1", [](auto& a) { a.norm.eps = -1; });
  refused("norm.eps: expected a number >= 0 in the range of f32, got nan", [](auto& a) { a.norm.eps = std::nan(""); });
  refused("norm.gate: expected 4 dimensions [1,9,2,3] like o, got 0", [](auto& a) { a.norm.gate = {}; });
  refused("norm.gate: expected shape [1,9,2,3] like o, got [1,9,2,2]", [](auto& a) { a.norm.gate.shape[3] = 2; });
  refused("norm.gate: expected ", [](auto& a) { a.norm.gate.dtype = KDA_I32; });
  refused("norm.weight: expected shape [3] ([V] of o), got [2]", [](auto& a) { a.norm.weight.shape[0] = 2; });
  refused("norm.weight: expected memory, got NULL", [](auto& a) { a.norm.weight.data = nullptr; });
  refused("norm.gate: expected a dense last dimension (stride 1), got stride 2",
          [](auto& a) { a.norm.gate.stride[3] = 2; });
  refused("o: expected memory of its own, got memory that overlaps norm.gate", [](auto& a) { a.norm.gate = a.o; });
}

}  // namespace
}  // namespace kda::test
