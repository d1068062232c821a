// kda_prefill_f32 on the GPU: o, hT, w and u against the oracle on the CPU, and what is promised of them.
#include <cstring>

#include "calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

constexpr char kImpl[] = "cuda_stages_prefill_f32";

// The f32 cases with rows of equal length and activated inputs.
std::vector<Case> f32_cases() {
  std::vector<Case> all;
  for (Case c : cases()) {
    const bool plain = c.gate_form == KDA_GATE_LOG && c.beta_form == KDA_BETA_ACTIVATED && !c.qk_l2norm;
    if (!plain || !c.lengths.empty() || c.tail) continue;
    c.dtype = c.g_dtype = c.beta_dtype = c.state_dtype = KDA_F32;
    all.push_back(c);
  }
  for (const int64_t T : {31, 32, 33, 96}) all.push_back({.name = "tokens_" + std::to_string(T) + "_more", .T = T});
  all.push_back({.name = "groups", .B = 2, .T = 70, .H = 2, .HV = 6, .K = 20, .V = 36});
  // Whole chunks, one value head for each key head and more: these run kernels that know their sizes.
  for (const int64_t size : {64, 128})
    for (const int32_t layout : {KDA_STATE_K_FIRST, KDA_STATE_V_FIRST})
      all.push_back({.name = "whole_" + std::to_string(size) + (layout == KDA_STATE_K_FIRST ? "_k_first" : "_v_first"),
                     .B = 2,
                     .T = 192,
                     .H = 1,
                     .HV = 2,
                     .K = size,
                     .V = size,
                     .state_layout = layout});
  const auto laid = [&](const std::string& name, int64_t T, int64_t size, Layout layout) {
    all.push_back({.name = name, .B = 2, .T = T, .HV = 2, .K = size, .V = size, .layout = layout});
  };
  for (const int64_t size : {64, 128}) {
    const std::string name = "whole_" + std::to_string(size);
    laid(name + "_padded", 320, size, Layout::kPadded), laid(name + "_heads_first", 320, size, Layout::kHeadsFirst);
  }
  // More blocks than SMs; without an initial state.
  all.push_back({.name = "whole_many", .B = 4, .T = 192, .H = 3, .HV = 6, .K = 128, .V = 128});
  all.push_back({.name = "whole_zeros", .B = 12, .T = 128, .HV = 2, .K = 128, .V = 128, .h0 = false});
  all.push_back({.name = "whole_wild", .T = 128, .K = 128, .V = 128, .gates = Gates::kWild});
  all.push_back({.name = "whole_identical",
                 .T = 128,
                 .K = 128,
                 .V = 128,
                 .gates = Gates::kZero,
                 .keys = Keys::kIdentical,
                 .betas = Betas::kNearTwo});
  for (const int64_t size : {64, 128, 256}) {
    const std::string name = "size_" + std::to_string(size);
    laid(name, 130, size, Layout::kDense), laid(name + "_heads_first", 130, size, Layout::kHeadsFirst);
  }
  return all;
}

kda_tensor heads_first(kda_tensor t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

struct Outputs {
  Tensor o, hT, w, u;
  Outputs(const Inputs& in, int64_t chunk, int32_t dtype, Layout layout = Layout::kPadded)
      : o(dtype, {in.B, in.c.HV, in.T, in.c.V}, layout),
        hT(dtype, in.state_shape(in.B), in.c.layout),
        w(dtype, {in.B, in.c.HV, (in.T + chunk - 1) / chunk, chunk, in.c.K}, layout),
        u(dtype, {in.B, in.c.HV, (in.T + chunk - 1) / chunk, chunk, in.c.V}, layout) {}
  std::vector<std::pair<const char*, Tensor*>> all() { return {{"o", &o}, {"hT", &hT}, {"w", &w}, {"u", &u}}; }
};

kda_prefill_f32_args args_of(const Inputs& in, const Outputs& out, int32_t chunk) {
  kda_prefill_f32_args a = KDA_PREFILL_F32_ARGS_INIT;
  a.q = heads_first(in.q), a.k = heads_first(in.k), a.v = heads_first(in.v), a.g = heads_first(in.g);
  a.beta = heads_first(in.beta), a.h0 = in.h0;
  a.o = out.o, a.hT = out.hT, a.w = out.w, a.u = out.u;
  a.chunk = chunk, a.scale = in.c.scale, a.state_layout = in.c.state_layout;
  return a;
}

class PrefillF32OnCuda : public OnCuda, public testing::WithParamInterface<Case> {
 protected:
  PrefillF32OnCuda() : in(GetParam()) {}
  const Inputs in;
};

TEST_P(PrefillF32OnCuda, IsTheOracle) {
  // One key over and over with beta near 2: u - w S loses what w and u have in common.
  const double least = GetParam().betas == Betas::kNearTwo ? 3e-5 : 0;
  for (const int32_t chunk : {32, 64})
    for (const Layout layout : {Layout::kDense, Layout::kPadded}) {
      Outputs got(in, chunk, KDA_F32, layout), exact(in, chunk, KDA_F64);
      run(args_of(in, exact, chunk), {.impl = "reference"});
      run_on_cuda(args_of(in, got, chunk), kImpl, layout == Layout::kPadded);
      if (HasFatalFailure()) return;
      for (size_t i = 0; i < got.all().size(); ++i)
        expect_close(*exact.all()[i].second, *got.all()[i].second, got.all()[i].first, least);
    }
}

TEST_P(PrefillF32OnCuda, WantedOrNotChangesNoBit) {
  for (const int32_t chunk : {32, 64}) {
    Outputs all(in, chunk, KDA_F32), dense(in, chunk, KDA_F32, Layout::kDense);
    run_on_cuda(args_of(in, all, chunk), kImpl);
    run_on_cuda(args_of(in, dense, chunk), kImpl);  // w and u of chunks of 64 may be where the scan reads them
    for (size_t i = 0; i < 4; ++i)
      EXPECT_EQ(dense.all()[i].second->bits(), all.all()[i].second->bits()) << dense.all()[i].first;
    for (const char* wanted : {"hT", "w", "u", ""}) {
      Outputs one(in, chunk, KDA_F32);
      kda_prefill_f32_args a = args_of(in, one, chunk);
      if (std::strcmp(wanted, "hT")) a.hT = {};
      if (std::strcmp(wanted, "w")) a.w = {};
      if (std::strcmp(wanted, "u")) a.u = {};
      run_on_cuda(a, kImpl);
      EXPECT_EQ(one.o.bits(), all.o.bits()) << wanted;
      for (size_t i = 1; i < 4; ++i)
        if (const auto [name, t] = one.all()[i]; !std::strcmp(name, wanted))
          EXPECT_EQ(t->bits(), all.all()[i].second->bits()) << name;
        else EXPECT_TRUE(t->untouched()) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PrefillF32OnCuda, testing::ValuesIn(f32_cases()),
                         [](const auto& info) { return info.param.name; });

// A call goes on in place from the state of the call before, at any multiple of 64 tokens; o and hT do not depend on
// the chunk.
void continues_in_place(int64_t K, int64_t V, int64_t T) {
  SCOPED_TRACE(K);
  SCOPED_TRACE(T);
  const Inputs in({.name = "continued", .B = 2, .T = T, .HV = 2, .K = K, .V = V, .layout = Layout::kHeadsFirst});
  Outputs first(in, 64, KDA_F32);
  run_on_cuda(args_of(in, first, 64), kImpl);
  for (const int32_t chunk : {32, 64}) {
    Outputs whole(in, chunk, KDA_F32), parts(in, chunk, KDA_F32);
    run_on_cuda(args_of(in, whole, chunk), kImpl);
    EXPECT_EQ(whole.o.bits(), first.o.bits());
    EXPECT_EQ(whole.hT.bits(), first.hT.bits());
    const Tensor state = in.h0.clone();
    for (const auto& [t0, t1] : {std::pair<int64_t, int64_t>{0, 64}, {64, T}}) {
      kda_prefill_f32_args a = args_of(in, parts, chunk);
      for (kda_tensor* t : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.o})
        t->data = static_cast<float*>(t->data) + t0 * t->stride[2], t->shape[2] = t1 - t0;
      for (kda_tensor* t : {&a.w, &a.u})
        t->data = static_cast<float*>(t->data) + t0 / chunk * t->stride[2], t->shape[2] = (t1 - t0 + chunk - 1) / chunk;
      a.h0 = a.hT = state;
      run_on_cuda(a, kImpl);
    }
    EXPECT_EQ(parts.o.bits(), whole.o.bits());
    EXPECT_EQ(parts.w.bits(), whole.w.bits());
    EXPECT_EQ(parts.u.bits(), whole.u.bits());
    EXPECT_EQ(state.bits(), whole.hT.bits());
  }
}

TEST_F(OnCuda, PrefillF32ContinuesInPlace) {
  // At 160 tokens the first part has whole chunks only, the second and both together have not.
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{20, 36}, {64, 64}, {128, 128}})
    for (const int64_t T : {160, 192}) continues_in_place(K, V, T);
}

// Rows one by one: few blocks, which may have fewer columns than those of many rows.
TEST_F(OnCuda, PrefillF32OfManyRowsIsThatOfEach) {
  for (const int64_t size : {64, 128}) {
    const Inputs in({.name = "rows", .B = 12, .T = 128, .HV = 2, .K = size, .V = size});
    Outputs all(in, 64, KDA_F32), one(in, 64, KDA_F32);
    run_on_cuda(args_of(in, all, 64), kImpl);
    for (int64_t b = 0; b < in.B; ++b) {
      kda_prefill_f32_args a = args_of(in, one, 64);
      for (kda_tensor* t : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.h0, &a.o, &a.hT, &a.w, &a.u})
        t->data = static_cast<float*>(t->data) + b * t->stride[0], t->shape[0] = 1;
      run_on_cuda(a, kImpl);
    }
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(one.all()[i].second->bits(), all.all()[i].second->bits()) << size;
  }
}

TEST_F(OnCuda, PrefillF32ChecksItsWorkspace) {
  for (const int64_t T : {70, 128}) {
    const Inputs in({.name = "workspace", .T = T, .K = 64, .V = 64});
    expect_workspace_is_checked(args_of(in, Outputs(in, 64, KDA_F32), 64), kImpl);
  }
}

TEST_F(OnCuda, PrefillF32OfNothing) {
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {2, 0}}) {
    for (const int64_t size : {32, 64, 128}) {
      const Inputs in({.name = "nothing", .B = B, .T = T, .K = size, .V = size});
      Outputs out(in, 64, KDA_F32);
      run_on_cuda(args_of(in, out, 64), kImpl);
      EXPECT_EQ(out.hT.bits(), in.h0.bits());
    }
  }
}

}  // namespace
}  // namespace kda::test
