// The stages on the GPU, one by one against the float64 oracle on the CPU, and those of the forward put together
// against kda_forward's. Small shapes, every path through the kernels: compute-sanitizer runs them as well.
#include <algorithm>
#include <limits>

#include "on_cuda.h"
#include "stage_calls.h"

namespace kda::test {
namespace {

// The portable implementation of a stage.
template <class Args>
constexpr const char* kPortable = "cuda_stages_backward";
template <>
constexpr const char* kPortable<kda_stage_cumsum_args> = "cuda_stages_cumsum";
template <>
constexpr const char* kPortable<kda_stage_chunk_intra_args> = "cuda_stages_chunk_intra";
template <>
constexpr const char* kPortable<kda_stage_recompute_w_u_args> = "cuda_stages_chunk_intra";
template <>
constexpr const char* kPortable<kda_stage_delta_h_args> = "cuda_stages_delta_h";
template <>
constexpr const char* kPortable<kda_stage_fwd_o_args> = "cuda_stages_fwd_o";

template <class Args>
void run_portable(const Args& a) {
  run_on_cuda(a, kPortable<Args>);
}
constexpr char kHopper[] = "cuda_hopper_stages_wy_dqkg", kBlackwell[] = "cuda_blackwell_stages_wy_dqkg";

// Implementations for one GPU that take the stage, by TMA, in bf16.
template <class Args>
std::vector<const char*> specials(const Args& a) {
  std::vector<const char*> all;
  for (const char* name : takers(op_name<Args>(), a))
    if (!std::string(name).starts_with("cuda_stages_")) all.push_back(name);
  return all;
}

// The cases of the CPU, and sizes of a slice, one less, one more, and several slices.
std::vector<Case> cuda_cases() {
  std::vector<Case> all = cases();
  for (const int64_t K : {16, 64, 65, 128, 136, 256})
    for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
      const std::string name = "K" + std::to_string(K) + (layout == KDA_STATE_V_FIRST ? "" : "_K_first");
      all.push_back({.name = name, .B = 2, .T = 140, .HV = 2, .K = K, .V = 264 - K, .state_layout = layout});
    }
  all.push_back({.name = "K61_V37", .B = 2, .T = 70, .HV = 2, .K = 61, .V = 37, .layout = Layout::kPadded});
  all.push_back({.name = "large_packed", .HV = 2, .K = 128, .V = 128, .lengths = {64, 0, 1, 129, 63, 0}, .tail = 70});
  all.push_back({.name = "large_wild", .T = 150, .K = 128, .V = 128, .gates = Gates::kWild});
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    all.push_back({.name = layout == KDA_STATE_V_FIRST ? "whole" : "whole_K_first",
                   .B = 2,
                   .T = 128,
                   .H = 1,
                   .HV = 2,
                   .K = 128,
                   .V = 128,
                   .state_layout = layout});
  for (const Betas betas : {Betas::kNearOne, Betas::kNearTwo})
    all.push_back({.name = betas == Betas::kNearOne ? "large_identical_beta_1" : "large_identical_beta_2",
                   .T = 256,
                   .K = 128,
                   .V = 64,
                   .gates = Gates::kZero,
                   .keys = Keys::kIdentical,
                   .betas = betas});
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    for (const int64_t K : {64, 128})
      all.push_back({.name = std::string(layout == KDA_STATE_V_FIRST ? "halves" : "halves_K_first") + std::to_string(K),
                     .H = 1,
                     .HV = 2,
                     .K = K,
                     .V = layout == KDA_STATE_V_FIRST ? 192 - K : 64,
                     .lengths = {70, 0, 3, 64},
                     .tail = 5,
                     .state_layout = layout});
  // Without decay S.dS is as large as other terms of dG. large_packed, where it is as well, is V-first.
  all.push_back({.name = "whole_identical",
                 .T = 128,
                 .K = 128,
                 .V = 128,
                 .state_layout = KDA_STATE_K_FIRST,
                 .gates = Gates::kZero,
                 .keys = Keys::kIdentical,
                 .betas = Betas::kNearTwo});
  return all;
}

// Which tensors are in f32. kWide: all. kMixed: q, k, v and all that is not stored in 16 bits. kNarrow: only G,
// Akk_inv, beta and the states of sequences, so that kernels multiply in bf16.
enum class Store { kWide, kMixed, kNarrow };

StageTensors tensors_of(const Inputs& in, Store store) {
  StageTensors t(in, store == Store::kWide ? KDA_F32 : KDA_BF16, KDA_F32, KDA_F32);
  if (store == Store::kNarrow)
    for (const char* name : {"q", "k", "v", "o", "d_o"}) {
      Tensor& x = t.all.at(name);
      x = name == std::string("o") ? Tensor(KDA_BF16, x.shape(), in.c.layout)
                                   : Tensor(KDA_BF16, x.shape(), x.values(), in.c.layout);
    }
  return t;
}

template <class F>
void for_each_stage(const StageTensors& t, const F& fn) {
  for_each_forward_stage(t, fn);
  for_each_backward_stage(t, fn);
}

const auto on_gpu = [](const auto& a) { run_portable(a); };

class StagesOnCuda : public OnCuda, public testing::WithParamInterface<Case> {
 protected:
  StagesOnCuda() : c(GetParam()), in(c) {}
  bool conditioned_badly() const { return c.keys == Keys::kIdentical; }

  // Gives the kernel and the oracle the same operands; the oracle's outputs are float64.
  template <class Args>
  void expect_stage(const StageTensors& t, Args a, int64_t shift, const char* impl = kPortable<Args>) {
    Args r = a;
    std::vector<std::pair<std::string, Tensor>> reference, out;
    std::vector<Field> ours = fields(a), theirs = fields(r);
    for (size_t i = 0; i < ours.size(); ++i) {
      if (!ours[i].output || !ours[i].t->ndim) continue;
      const Tensor& like = t[ours[i].name];
      out.emplace_back(ours[i].name, Tensor(like.dtype(), like.shape(), c.layout));
      reference.emplace_back(ours[i].name, Tensor(KDA_F64, like.shape()));
      if (std::is_same_v<Args, kda_stage_bwd_intra_args>)  // it adds to them
        for (Tensor* x : {&out.back().second, &reference.back().second})
          for (int64_t e = 0; e < like.size(); ++e) x->set(e, like.get(e));
      *ours[i].t = out.back().second, *theirs[i].t = reference.back().second;
    }
    run_on_cuda(a, impl, shift);
    run(r, {.impl = "reference"});
    for (size_t i = 0; i < out.size(); ++i) {
      const auto& [name, x] = out[i];
      const auto bf16 = [&](const char* tensor) { return t[tensor].dtype() == KDA_BF16; };
      const bool scan = name == "h" || name == "v_new" || name == "hT";  // multiplies in bf16 if w is in that
      const bool in_bf16 = name == "G" ? false : scan ? bf16("w") : name == "o" ? bf16("o") : bf16("k") && bf16("v");
      const bool rounded = in_bf16 || x.dtype() != KDA_F32;
      const bool splits = impl == std::string(kHopper) || impl == std::string(kBlackwell);  // Akk_inv into two bf16
      const double budget = !rounded ? 5e-5 : conditioned_badly() && in_bf16 && !splits ? 0.04 : 0.005;
      // With operands in bf16 an element may be off by a few roundings of its own size, and there are long tails.
      const Error e = compare(reference[i].second.values(), x.values(), rounded ? 0x1p-6 : 0);
      EXPECT_TRUE(e.finite_alike) << name;
      EXPECT_LE(e.relative_rmse, budget) << name;
      EXPECT_LE(e.max, (rounded ? 16 : 8) * budget * (e.rms_ref + 1e-8)) << name << " at element " << e.worst;
      EXPECT_TRUE(x.margins_intact()) << name;
      EXPECT_EQ(x.unwritten(), reference[i].second.unwritten()) << name;
    }
  }
  const Case c;
  const Inputs in;
};

// Runs each stage on what the oracle's earlier stages left, also in memory that fits no wide access.
TEST_P(StagesOnCuda, EachIsItsOracle) {
  for (const Store store : {Store::kWide, Store::kMixed, Store::kNarrow}) {
    SCOPED_TRACE(static_cast<int>(store));
    const StageTensors t = tensors_of(in, store);
    for_each_stage(t, [&](const auto& a) {
      SCOPED_TRACE(fields(const_cast<std::remove_cvref_t<decltype(a)>&>(a)).back().name);
      for (const int64_t shift : {0, 1}) expect_stage(t, a, shift);
      for (const char* impl : specials(a)) expect_stage(t, a, 0, impl);
      run(a, {.impl = "reference"});
    });
  }
}

// Kernels for one GPU alone, also with Akk_inv and dv in 16 bits.
TEST_P(StagesOnCuda, SpecialsAreTheirOracle) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
    SCOPED_TRACE(dtype);
    StageTensors t = tensors_of(in, Store::kNarrow);
    for (const char* name : {"Akk_inv", "dv"}) t.all[name] = Tensor(dtype, t[name].shape(), c.layout);
    for_each_stage(t, [&](const auto& a) {
      for (const char* impl : specials(a)) expect_stage(t, a, 0, impl);
      run(a, {.impl = "reference"});
    });
  }
}

// All of them, against the oracle of the whole forward.
TEST_P(StagesOnCuda, TogetherAreForward) {
  const ForwardOutputs exact(in, false, true);
  run(forward_args(in, exact), {.impl = "reference"});
  for (const Store store : {Store::kWide, Store::kNarrow}) {
    SCOPED_TRACE(static_cast<int>(store));
    const StageTensors t = tensors_of(in, store);
    for_each_forward_stage(t, on_gpu);
    if (HasFatalFailure()) return;
    // q and k were rounded after the norm; the sums of wild gates keep fewer digits.
    const bool in_bf16 = t["v"].dtype() == KDA_BF16;
    const double wide = c.gates == Gates::kWild ? 5e-4 : 2e-5, narrow = conditioned_badly() ? 0.08 : 0.008;
    for (const auto& [name, expected] : {std::pair{"o", &exact.o}, {"hT", &exact.hT}}) {
      const Error e = compare(expected->values(), t[name].values(), in_bf16 ? 0x1p-5 : 0);
      const double budget = in_bf16 ? narrow : wide;
      EXPECT_TRUE(e.finite_alike) << name;
      EXPECT_LE(e.relative_rmse, budget) << name;
      EXPECT_LE(e.max, (in_bf16 ? 16 : 8) * budget * (e.rms_ref + 1e-8)) << name << " at element " << e.worst;
    }
  }
}

TEST_P(StagesOnCuda, RecomputedBitsAreTheSame) {
  for (const Store store : {Store::kWide, Store::kNarrow}) {
    const StageTensors t = tensors_of(in, store), few = tensors_of(in, store);
    for_each_forward_stage(t, on_gpu);
    if (HasFatalFailure()) return;
    expect_fewer_outputs_change_no_bit(t, few, on_gpu);
  }
}

INSTANTIATE_TEST_SUITE_P(All, StagesOnCuda, testing::ValuesIn(cuda_cases()),
                         [](const auto& info) { return info.param.name; });

// ---- details ----

using StageDetailsOnCuda = OnCuda;
using WyArgs = kda_stage_bwd_wy_dqkg_args;

TEST_F(StageDetailsOnCuda, TheStateInPlace) {
  const Inputs in(find_case("packed"));
  const StageTensors t = tensors_of(in, Store::kWide);
  for_each_forward_stage(t, on_gpu);
  expect_the_state_in_place(t, on_gpu);
}

// Why an implementation of B3 declines a call that is changed, or "".
std::string wy_reason(const char* impl, const Case& c, Store store, const std::function<void(WyArgs&)>& change = {}) {
  const Inputs in(c);
  const StageTensors t = tensors_of(in, store);
  WyArgs a = on_device(t.args<WyArgs>());
  if (change) change(a);
  return why_not(a, impl);
}
void move(kda_tensor& t) { t.data = static_cast<char*>(t.data) + 8; }

// Which calls the implementation for Hopper takes, and why it declines others.
TEST_F(StageDetailsOnCuda, HopperTakesPlainCalls) {
  const auto reason = [](const auto&... x) { return wy_reason(kHopper, x...); };
  const Case plain{.name = "plain", .T = 70, .HV = 2, .K = 128, .V = 128};
  Case others = plain;
  others.state_layout = KDA_STATE_K_FIRST, others.H = 1, others.lengths = {3, 0, 64}, others.T = 0;
  if (reason(plain, Store::kNarrow) == "needs compute capability 9.0 (Hopper)")
    GTEST_SKIP() << "the device is no Hopper";
  EXPECT_EQ(reason(plain, Store::kNarrow), "");
  EXPECT_EQ(reason(others, Store::kNarrow), "");
  EXPECT_EQ(reason(plain, Store::kWide), "takes q, k, v, v_new, d_o, dv_new, h and dh in bf16");
  others.K = 64;
  EXPECT_EQ(reason(others, Store::kNarrow), "takes K = V = 128");
  EXPECT_EQ(reason(plain, Store::kNarrow, [&](WyArgs& a) { move(a.dh); }),
            "takes inputs with rows at multiples of 16 bytes");
  EXPECT_EQ(reason(plain, Store::kNarrow, [&](WyArgs& a) { move(a.dG); }),
            "takes v and outputs with rows at multiples of 16 bytes");
}
// The same for Blackwell.
TEST_F(StageDetailsOnCuda, BlackwellTakesPlainCalls) {
  const auto reason = [](const auto&... x) { return wy_reason(kBlackwell, x...); };
  const Case plain{.name = "plain", .T = 70, .HV = 2, .K = 128, .V = 128};
  Case others = plain;
  others.state_layout = KDA_STATE_K_FIRST, others.H = 1, others.lengths = {3, 0, 64}, others.T = 0, others.K = 64;
  if (reason(plain, Store::kNarrow) == "needs compute capability 10.0 (Blackwell)")
    GTEST_SKIP() << "the device is no Blackwell";
  EXPECT_EQ(reason(plain, Store::kNarrow), "");
  EXPECT_EQ(reason(others, Store::kNarrow), "");
  EXPECT_EQ(reason(plain, Store::kMixed), "takes q, k, v, v_new, d_o, dv_new, h and dh in bf16");
  others.K = 72;
  EXPECT_EQ(reason(others, Store::kNarrow), "takes K and V of 64 or 128");
  for (kda_tensor WyArgs::*input : {&WyArgs::v, &WyArgs::G, &WyArgs::dh})
    EXPECT_EQ(reason(plain, Store::kNarrow, [&](WyArgs& a) { move(a.*input); }),
              "takes inputs with rows at multiples of 16 bytes");
  EXPECT_EQ(reason(plain, Store::kNarrow, [&](WyArgs& a) { move(a.dG); }), "");
  EXPECT_EQ(reason(plain, Store::kNarrow, [&](WyArgs& a) { move(a.dAkk); }),
            "takes dAkk with rows at multiples of 16 bytes");
}

// Runs all stages by the portable kernels or, with `wy`, B3 by that implementation and all others by the oracle.
// work(): after each stage.
template <class F>
void run_stages(const StageTensors& t, const char* wy, const F& work) {
  for_each_stage(t, [&](const auto& a) {
    if (!wy) run_portable(a);
    else if (std::is_same_v<std::remove_cvref_t<decltype(a)>, WyArgs>) run_on_cuda(a, wy);
    else run(a, {.impl = "reference"});
    work();
  });
}

// B3's implementation for this GPU alone, or nullptr. (HopperTakesPlainCalls says what else it asks for.)
const char* wy_here() {
  for (const char* impl : {kHopper, kBlackwell})
    if (wy_reason(impl, {.name = "any", .T = 1, .K = 128, .V = 128}, Store::kNarrow).empty()) return impl;
  return nullptr;
}
class WyOnCuda : public OnCuda {
 protected:
  void SetUp() override {
    OnCuda::SetUp();
    if (!IsSkipped() && !impl_) GTEST_SKIP() << "there is no kernel for this GPU alone";
  }
  const char* const impl_ = wy_here();
};

// What lies above the diagonals is never read.
void expect_triangles(const Case& c, Store store, const char* wy) {
  const Inputs in(c);
  const StageTensors t = tensors_of(in, store), spoilt = tensors_of(in, store);
  run_stages(t, wy, [] {});
  run_stages(spoilt, wy, [&] {
    for (const char* name : {"Aqk", "Akk_inv"})
      for (int64_t n = 0; n < in.N; ++n)
        for (int64_t i = 0; i < in.length(n); ++i)
          for (int64_t row = 0; row < in.c.HV; ++row)
            for (int64_t j = i % 64 + 1; j < 64; ++j)
              const_cast<Tensor&>(spoilt[name])
                  .set(((in.begin(n) + i) * in.c.HV + row) * 64 + j, std::numeric_limits<double>::quiet_NaN());
  });
  for (const char* name : {"o", "hT", "w", "u", "dq", "dk", "dv", "dbeta", "dg"})
    EXPECT_EQ(spoilt[name].bits(), t[name].bits()) << name;
}
TEST_F(StageDetailsOnCuda, UpperTrianglesMayHoldAnything) {
  for (const Store store : {Store::kWide, Store::kNarrow}) expect_triangles(find_case("packed"), store, nullptr);
}
TEST_F(WyOnCuda, ReadsNoUpperTriangle) {
  Case c = find_case("packed");
  c.K = c.V = 128;
  expect_triangles(c, Store::kNarrow, impl_);
}

TEST_F(StageDetailsOnCuda, MinusInfinityIsClamped) { expect_minus_infinity_is_clamped(on_gpu); }

// Lengths that are none. The call has 5 sequences and 276 tokens.
std::vector<std::vector<double>> garbage() {
  const auto huge = static_cast<double>(int64_t{1} << 40);
  return {{0, 270, 3, -5, 64, 276},
          {-1e9, 1e9, -1e9, 1e9, 0, 1},
          {276, 276, 276, 276, 276, 276},
          {huge, 0, -huge, 7, huge, 90}};
}
StageTensors tensors_with(const Inputs& in, Store store, const std::vector<double>& lengths) {
  StageTensors t = tensors_of(in, store);
  t.all["cu_seqlens"] = Tensor(KDA_I64, {6}, lengths);
  return t;
}

// cu_seqlens are not checked on the device: whatever they hold, nothing but outputs is written.
TEST_F(StageDetailsOnCuda, GarbageInLengthsDoesNoHarm) {
  const Inputs in({.name = "garbage", .HV = 2, .K = 20, .V = 36, .lengths = {64, 70, 3, 0, 130}, .tail = 9});
  for (const std::vector<double>& lengths : garbage())
    for (const Store store : {Store::kWide, Store::kNarrow}) {
      const StageTensors t = tensors_with(in, store, lengths);
      run_stages(t, nullptr, [] {});
      for (const auto& [name, x] : t.all) EXPECT_TRUE(x.margins_intact()) << name;
    }
}
TEST_F(WyOnCuda, TakesGarbageInLengths) {
  const Inputs in({.name = "garbage", .HV = 2, .K = 128, .V = 128, .lengths = {64, 70, 3, 0, 130}, .tail = 9});
  for (const std::vector<double>& lengths : garbage()) {
    const StageTensors t = tensors_with(in, Store::kNarrow, lengths);
    run_on_cuda(t.args<WyArgs>(), impl_);
    for (const auto& [name, x] : t.all) EXPECT_TRUE(x.margins_intact()) << name;
  }
}

// Tiles of a chunk hold rows of the sequence behind it, too.
TEST_F(WyOnCuda, KeepsOthersNaNOut) {
  const Inputs in({.name = "others", .K = 128, .V = 128, .lengths = {3, 64}});
  const StageTensors t = tensors_of(in, Store::kNarrow), spoilt = tensors_of(in, Store::kNarrow);
  for (const StageTensors* each : {&t, &spoilt}) run_stages(*each, impl_, [] {});
  for (const char* name : {"q", "k", "v", "v_new", "G", "beta", "Akk_inv", "d_o", "dv_new"}) {
    Tensor& x = const_cast<Tensor&>(spoilt[name]);
    for (int64_t e = 3 * x.size() / in.T; e < x.size(); ++e) x.set(e, std::numeric_limits<double>::quiet_NaN());
  }
  for (const StageTensors* each : {&t, &spoilt}) run_on_cuda(each->args<WyArgs>(), impl_);
  for (const char* name : {"dq", "dk", "dv", "dbeta", "dG", "dAkk"}) {
    const Tensor &x = spoilt[name], &expected = t[name];
    for (int64_t e = 0; e < 3 * x.size() / in.T; ++e) ASSERT_EQ(x.get(e), expected.get(e)) << name << " at " << e;
    EXPECT_TRUE(std::isnan(x.get(x.size() - 2))) << name;  // the last one of dAkk is on the diagonal
  }
}

// The same call gives the same bits.
TEST_F(WyOnCuda, RepeatsItsBits) {
  const Inputs in({.name = "twice", .T = 130, .H = 1, .HV = 2, .K = 128, .V = 128});
  const StageTensors t = tensors_of(in, Store::kNarrow);
  run_stages(t, impl_, [] {});
  std::map<std::string, Bits> first;
  for (int i = 0; i < 3; ++i) {
    run_on_cuda(t.args<WyArgs>(), impl_);
    for (const char* name : {"dq", "dk", "dv", "dbeta", "dG", "dAkk"})
      if (i == 0) first[name] = t[name].bits();
      else EXPECT_EQ(t[name].bits(), first[name]) << name;
  }
}

TEST_F(StageDetailsOnCuda, NothingToDo) {
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {2, 0}}) {
    const Inputs in({.name = "nothing", .B = B, .T = T});
    const StageTensors t = tensors_of(in, Store::kWide);
    for_each_stage(t, on_gpu);
    EXPECT_EQ(t["hT"].values(), in.h0.values());
  }
}

}  // namespace
}  // namespace kda::test
