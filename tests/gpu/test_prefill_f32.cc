// kda_prefill_f32 on the GPU: o, hT, w and u against the oracle on the CPU, and what is promised of them.
#include "on_cuda.h"
#include "prefill_f32_calls.h"

namespace kda::test {
namespace {

constexpr char kImpl[] = "cuda_stages_prefill_f32";

std::vector<Case> f32_cases() {
  std::vector<Case> all = plain_f32_cases();
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

const auto on_gpu = [](const auto& a) { run_on_cuda(a, kImpl); };

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
      PrefillF32Outputs got(in, chunk, KDA_F32, layout), exact(in, chunk, KDA_F64);
      run(prefill_f32_args(in, exact, chunk), {.impl = "reference"});
      run_on_cuda(prefill_f32_args(in, got, chunk), kImpl, layout == Layout::kPadded);
      if (HasFatalFailure()) return;
      for (size_t i = 0; i < got.all().size(); ++i)
        expect_close(*exact.all()[i].second, *got.all()[i].second, got.all()[i].first, least);
    }
}

TEST_P(PrefillF32OnCuda, WantedOrNotChangesNoBit) {
  for (const int32_t chunk : {32, 64}) {
    PrefillF32Outputs all(in, chunk, KDA_F32), dense(in, chunk, KDA_F32, Layout::kDense);
    run_on_cuda(prefill_f32_args(in, all, chunk), kImpl);
    run_on_cuda(prefill_f32_args(in, dense, chunk), kImpl);  // w and u of chunks of 64 may be where the scan reads them
    for (size_t i = 0; i < 4; ++i)
      EXPECT_EQ(dense.all()[i].second->bits(), all.all()[i].second->bits()) << dense.all()[i].first;
    expect_wanted_or_not_changes_no_bit(in, chunk, all, on_gpu);
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
  PrefillF32Outputs first(in, 64, KDA_F32);
  run_on_cuda(prefill_f32_args(in, first, 64), kImpl);
  for (const int32_t chunk : {32, 64}) {
    const PrefillF32Outputs whole(in, chunk, KDA_F32);
    run_on_cuda(prefill_f32_args(in, whole, chunk), kImpl);
    EXPECT_EQ(whole.o.bits(), first.o.bits());
    EXPECT_EQ(whole.hT.bits(), first.hT.bits());
    expect_to_continue_in_place(in, chunk, whole, on_gpu);
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
    PrefillF32Outputs all(in, 64, KDA_F32), one(in, 64, KDA_F32);
    run_on_cuda(prefill_f32_args(in, all, 64), kImpl);
    for (int64_t b = 0; b < in.B; ++b) {
      kda_prefill_f32_args a = prefill_f32_args(in, one, 64);
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
    expect_workspace_is_checked(prefill_f32_args(in, PrefillF32Outputs(in, 64, KDA_F32), 64), kImpl);
  }
}

TEST_F(OnCuda, PrefillF32OfNothing) {
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {2, 0}}) {
    for (const int64_t size : {32, 64, 128}) {
      const Inputs in({.name = "nothing", .B = B, .T = T, .K = size, .V = size});
      PrefillF32Outputs out(in, 64, KDA_F32);
      run_on_cuda(prefill_f32_args(in, out, 64), kImpl);
      EXPECT_EQ(out.hT.bits(), in.h0.bits());
    }
  }
}

}  // namespace
}  // namespace kda::test
