// Details of the forward's stages on Blackwell, and of the scan of the backward. test_stages.cc holds them to the
// oracle, as it does all others.
#include <limits>

#include "environment_variable.h"
#include "on_cuda.h"
#include "stage_calls.h"

namespace kda::test {
namespace {

using StagesOnBlackwell = OnCuda;
using ScanArgs = kda_stage_delta_h_args;
using OutputArgs = kda_stage_fwd_o_args;
using ReverseArgs = kda_stage_bwd_delta_h_args;

constexpr char kScan[] = "cuda_blackwell_stages_delta_h", kOutput[] = "cuda_blackwell_stages_fwd_o";
constexpr char kReverse[] = "cuda_blackwell_stages_bwd_delta_h";
constexpr char kNone[] = "needs compute capability 10.0 (Blackwell)";
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// All that may be is in bf16: only G, Akk_inv, beta and the states of sequences are in f32.
StageTensors tensors_of(const Inputs& in) {
  StageTensors t(in, KDA_BF16, KDA_F32, KDA_F32);
  for (const char* name : {"q", "k", "v", "o", "d_o"}) {
    Tensor& x = t.all.at(name);
    x = name == std::string("o") ? Tensor(KDA_BF16, x.shape(), in.c.layout)
                                 : Tensor(KDA_BF16, x.shape(), x.values(), in.c.layout);
  }
  return t;
}

// By the kernels for Blackwell, and where there is none by the oracle.
const auto on_blackwell = [](const auto& a) {
  using Args = std::remove_cvref_t<decltype(a)>;
  if (std::is_same_v<Args, ScanArgs>) run_on_cuda(a, kScan);
  else if (std::is_same_v<Args, OutputArgs>) run_on_cuda(a, kOutput);
  else if (std::is_same_v<Args, ReverseArgs>) run_on_cuda(a, kReverse);
  else run(a, {.impl = "reference"});
};

bool has_blackwell() {
  const Inputs in({.name = "any", .T = 1, .K = 128, .V = 128});
  return why_not(on_device(tensors_of(in).args<OutputArgs>()), kOutput) != kNone;
}
#define KDA_ON_BLACKWELL \
  if (!has_blackwell()) GTEST_SKIP() << kNone

// The stages in front of those for Blackwell, by the oracle. dv_local needs no v_new.
void prepare(const StageTensors& t) {
  run(t.args<kda_stage_cumsum_args>(), {.impl = "reference"});
  run(t.args<kda_stage_chunk_intra_args>(), {.impl = "reference"});
  kda_stage_bwd_local_args local = t.args<kda_stage_bwd_local_args>();
  local.v_new = t["u"];
  run(local, {.impl = "reference"});
}
void run_all(const StageTensors& t) {
  on_blackwell(t.args<ScanArgs>()), on_blackwell(t.args<OutputArgs>()), on_blackwell(t.args<ReverseArgs>());
}

Case packed(int64_t K, int64_t V, int32_t layout) {
  return {.name = "packed",
          .H = 1,
          .HV = 2,
          .K = K,
          .V = V,
          .lengths = {64, 0, 1, 129, 63, 0},
          .tail = 5,
          .state_layout = layout};
}

// Which calls they take, and why they decline others.
TEST_F(StagesOnBlackwell, TakePlainCalls) {
  KDA_ON_BLACKWELL;
  const Inputs in({.name = "plain", .T = 70, .HV = 2, .K = 128, .V = 64});
  const auto scan = [](const StageTensors& t, const auto& change) {
    ScanArgs a = on_device(t.args<ScanArgs>());
    change(a);
    return why_not(a, kScan);
  };
  const auto output = [](const StageTensors& t, const auto& change) {
    OutputArgs a = on_device(t.args<OutputArgs>());
    change(a);
    return why_not(a, kOutput);
  };
  const auto reverse = [](const StageTensors& t, const auto& change) {
    ReverseArgs a = on_device(t.args<ReverseArgs>());
    change(a);
    return why_not(a, kReverse);
  };
  const auto nothing = [](auto&) {};
  const auto move = [](kda_tensor& t) { t.data = static_cast<char*>(t.data) + 8; };
  const StageTensors t = tensors_of(in), wide(in, KDA_F32, KDA_F32);
  EXPECT_EQ(scan(t, nothing), "");
  EXPECT_EQ(scan(t, [](ScanArgs& a) { a.h = a.v_new = a.h0 = {}; }), "");
  EXPECT_EQ(scan(wide, nothing), "takes kg, w, u, h and v_new in bf16");
  EXPECT_EQ(scan(t, [&](ScanArgs& a) { move(a.h); }), "takes kg, w, u, G and h with rows at multiples of 16 bytes");
  EXPECT_EQ(scan(t, [&](ScanArgs& a) { move(a.v_new); }), "takes v_new with rows at multiples of 16 bytes");
  EXPECT_EQ(output(t, nothing), "");
  EXPECT_EQ(output(wide, nothing), "takes q, v_new, Aqk, h and o in bf16");
  EXPECT_EQ(output(t, [&](OutputArgs& a) { move(a.G); }), "takes inputs with rows at multiples of 16 bytes");
  EXPECT_EQ(output(t, [&](OutputArgs& a) { move(a.o); }), "takes o with rows at multiples of 16 bytes");
  EXPECT_EQ(reverse(t, nothing), "");
  EXPECT_EQ(reverse(t, [](ReverseArgs& a) { a.dhT = a.dh0 = {}; }), "");
  EXPECT_EQ(reverse(wide, nothing), "takes qG, kg, w, d_o, dv_local, dh and dv_new in bf16");
  EXPECT_EQ(reverse(t, [&](ReverseArgs& a) { move(a.dh); }), "takes inputs and dh with rows at multiples of 16 bytes");
  EXPECT_EQ(reverse(t, [&](ReverseArgs& a) { move(a.dv_new); }), "takes dv_new with rows at multiples of 16 bytes");
  const Inputs odd({.name = "odd", .T = 70, .K = 96, .V = 128});
  EXPECT_EQ(scan(tensors_of(odd), nothing), "takes K and V of 64 and 128");
  EXPECT_EQ(output(tensors_of(odd), nothing), "takes K and V of 64 and 128");
  EXPECT_EQ(reverse(tensors_of(odd), nothing), "takes K and V of 64 and 128");
}

// Nobody has run them on a GPU, so they have to be asked for.
TEST_F(StagesOnBlackwell, AreAskedFor) {
  KDA_ON_BLACKWELL;
  const Inputs in({.name = "asked", .T = 70, .K = 128, .V = 128});
  const StageTensors t = tensors_of(in);
  for (const std::string wanted : {"", "0", "1"}) {
    const EnvironmentVariable variable("KDA_BLACKWELL", wanted.c_str());
    const auto expect = [&](const auto& a, const char* name) {
      const char* text = "";
      EXPECT_EQ(explain(on_device(a), &text), KDA_OK) << kda_last_error();
      const std::string all = text;
      EXPECT_EQ(all.find(std::string("* ") + name + ": ") == 0, wanted == "1") << all;
      EXPECT_NE(all.find("emulated, never run on a GPU"), std::string::npos) << all;
    };
    expect(t.args<ScanArgs>(), kScan);
    expect(t.args<OutputArgs>(), kOutput);
    expect(t.args<ReverseArgs>(), kReverse);
  }
}

// With the oracle's stages in front of them they are the forward, and what is optional changes no bit.
TEST_F(StagesOnBlackwell, AreTheForward) {
  KDA_ON_BLACKWELL;
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
    const Inputs in(packed(128, 128, layout));
    const ForwardOutputs exact(in, false, true);
    run(forward_args(in, exact), {.impl = "reference"});
    const StageTensors t = tensors_of(in), few = tensors_of(in);
    for_each_forward_stage(t, on_blackwell);
    for (const auto& [name, expected] : {std::pair{"o", &exact.o}, {"hT", &exact.hT}}) {
      const Error e = compare(expected->values(), t[name].values(), 0x1p-5);
      EXPECT_TRUE(e.finite_alike) << name;
      EXPECT_LE(e.relative_rmse, 0.008) << name;
      EXPECT_LE(e.max, 16 * 0.008 * (e.rms_ref + 1e-8)) << name << " at element " << e.worst;
    }
    expect_fewer_outputs_change_no_bit(t, few, on_blackwell);
    expect_the_state_in_place(t, on_blackwell);
  }
}

// Both scans, beside the oracle's on the same operands.
TEST_F(StagesOnBlackwell, ScansAreTheirOracles) {
  KDA_ON_BLACKWELL;
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
    const Inputs in(packed(64, 64, layout));
    const StageTensors t = tensors_of(in), exact = tensors_of(in);
    for (const StageTensors* each : {&t, &exact}) prepare(*each);
    on_blackwell(t.args<ScanArgs>()), on_blackwell(t.args<ReverseArgs>());
    run(exact.args<ScanArgs>(), {.impl = "reference"});
    run(exact.args<ReverseArgs>(), {.impl = "reference"});
    for (const char* name : {"h", "v_new", "hT", "dh", "dv_new", "dh0"}) {
      const Error e = compare(exact[name].values(), t[name].values(), 0x1p-6);
      EXPECT_TRUE(e.finite_alike) << name;
      EXPECT_LE(e.relative_rmse, 0.005) << name;
      EXPECT_LE(e.max, 16 * 0.005 * (e.rms_ref + 1e-8)) << name << " at element " << e.worst;
      EXPECT_EQ(t[name].unwritten(), exact[name].unwritten()) << name;
    }
  }
}

// What lies above the diagonal of Aqk is never read.
TEST_F(StagesOnBlackwell, ReadNoUpperTriangle) {
  KDA_ON_BLACKWELL;
  const Inputs in(packed(64, 128, KDA_STATE_V_FIRST));
  const StageTensors t = tensors_of(in), spoilt = tensors_of(in);
  for (const StageTensors* each : {&t, &spoilt}) prepare(*each);
  for (int64_t n = 0; n < in.N; ++n)
    for (int64_t i = 0; i < in.length(n); ++i)
      for (int64_t hv = 0; hv < in.c.HV; ++hv)
        for (int64_t j = i % 64 + 1; j < 64; ++j)
          const_cast<Tensor&>(spoilt["Aqk"]).set(((in.begin(n) + i) * in.c.HV + hv) * 64 + j, kNaN);
  for (const StageTensors* each : {&t, &spoilt}) run_all(*each);
  EXPECT_EQ(spoilt["o"].bits(), t["o"].bits());
}

// cu_seqlens are not checked on the device: whatever they hold, nothing but outputs is written.
TEST_F(StagesOnBlackwell, TakeGarbageInLengths) {
  KDA_ON_BLACKWELL;
  const Inputs in({.name = "garbage", .HV = 2, .K = 128, .V = 64, .lengths = {64, 70, 3, 0, 130}, .tail = 9});
  const auto huge = static_cast<double>(int64_t{1} << 40);
  for (const std::vector<double>& lengths : {std::vector<double>{0, 270, 3, -5, 64, 276},
                                             {-1e9, 1e9, -1e9, 1e9, 0, 1},
                                             {276, 276, 276, 276, 276, 276},
                                             {huge, 0, -huge, 7, huge, 90}}) {
    StageTensors t = tensors_of(in);
    prepare(t);
    t.all["cu_seqlens"] = Tensor(KDA_I64, {6}, lengths);
    run_all(t);
    for (const auto& [name, x] : t.all) EXPECT_TRUE(x.margins_intact()) << name;
  }
}

// Tiles of a chunk hold rows of the sequence behind it, too.
TEST_F(StagesOnBlackwell, KeepOthersNaNOut) {
  KDA_ON_BLACKWELL;
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
    const Inputs in({.name = "others", .K = 128, .V = 128, .lengths = {3, 64}, .state_layout = layout});
    const StageTensors t = tensors_of(in), spoilt = tensors_of(in);
    for (const StageTensors* each : {&t, &spoilt}) prepare(*each);
    for (const char* name : {"q", "w", "u", "kg", "G", "Aqk", "qG", "d_o", "dv_local"}) {
      Tensor& x = const_cast<Tensor&>(spoilt[name]);
      for (int64_t e = 3 * x.size() / in.T; e < x.size(); ++e) x.set(e, kNaN);
    }
    for (const StageTensors* each : {&t, &spoilt}) run_all(*each);
    for (const std::string name : {"v_new", "o", "h", "hT", "dv_new", "dh", "dh0"}) {
      const Tensor &x = spoilt[name], &expected = t[name];
      const bool state = name.find('h') != name.npos;
      const int64_t own = state ? x.size() / 2 : 3 * x.size() / in.T;  // of the first sequence
      for (int64_t e = 0; e < own; ++e) ASSERT_EQ(x.get(e), expected.get(e)) << name << " at " << e;
      EXPECT_TRUE(name == "h" || name == "dh" || std::isnan(x.get(x.size() - 2))) << name;
    }
  }
}

// The same call gives the same bits.
TEST_F(StagesOnBlackwell, RepeatTheirBits) {
  KDA_ON_BLACKWELL;
  const Inputs in({.name = "twice", .T = 130, .H = 1, .HV = 2, .K = 64, .V = 64});
  const StageTensors t = tensors_of(in);
  prepare(t);
  std::map<std::string, Bits> first;
  for (int i = 0; i < 3; ++i) {
    run_all(t);
    for (const char* name : {"h", "v_new", "hT", "o", "dh", "dv_new", "dh0"})
      if (i == 0) first[name] = t[name].bits();
      else EXPECT_EQ(t[name].bits(), first[name]) << name;
  }
}

// Without tokens the last state is the first one, and so is its gradient.
TEST_F(StagesOnBlackwell, HaveNothingToDo) {
  KDA_ON_BLACKWELL;
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {2, 0}}) {
    const Inputs in({.name = "nothing", .B = B, .T = T, .K = 64, .V = 64});
    const StageTensors t = tensors_of(in);
    for_each_forward_stage(t, on_blackwell);
    EXPECT_EQ(t["hT"].values(), in.h0.values());
    on_blackwell(t.args<ReverseArgs>());
    EXPECT_EQ(t["dh0"].values(), in.dhT.values());
  }
}

}  // namespace
}  // namespace kda::test
