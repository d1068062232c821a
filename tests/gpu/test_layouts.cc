// The layout of states changes no bit on the GPU: K-first calls run the kernels of V-first ones, forward and backward.
#include <cstring>

#include "calls.h"
#include "chunk_cases.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

// The same call in both layouts: first V-first, then K-first.
struct Both {
  Inputs v_first, k_first;
  explicit Both(const Case& c) : v_first(c), k_first(turned(c)) {
    k_first.h0 = in_other_layout(v_first.h0), k_first.dhT = in_other_layout(v_first.dhT);
  }
  static Case turned(Case c) {
    c.state_layout = KDA_STATE_K_FIRST;
    return c;
  }
};

Case call_of(int64_t K, int64_t V, int32_t state_dtype) {
  return {.name = "layouts",
          .HV = 2,
          .K = K,
          .V = V,
          .lengths = {70, 0, 3},
          .tail = 2,
          .dtype = KDA_BF16,
          .g_dtype = KDA_BF16,
          .state_dtype = state_dtype,
          .qk_l2norm = true};
}

class LayoutsOnCuda : public OnCuda, public testing::WithParamInterface<int32_t> {
 protected:
  const int32_t state_dtype = GetParam();
};

// o, hT, and h in either layout, which has a dtype of its own.
TEST_P(LayoutsOnCuda, ForwardAndWhatItSaves) {
  const Both in(call_of(64, 64, state_dtype));
  for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
    ForwardOutputs expected(in.v_first, false), same(in.k_first, false), other(in.k_first, false);
    for (ForwardOutputs* out : {&expected, &other}) out->save_v_first(in.v_first, dtype);
    same.save_states(in.k_first, 1), same.h = Tensor(dtype, same.h.shape());
    for (const char* impl : takers("forward", forward_args(in.v_first, expected))) {
      SCOPED_TRACE(impl);
      run_on_cuda(forward_args(in.v_first, expected), impl);
      for (const ForwardOutputs* got : {&same, &other}) {
        run_on_cuda(forward_args(in.k_first, *got), impl);
        if (HasFatalFailure()) return;
        EXPECT_EQ(got->o.bits(), expected.o.bits());
        EXPECT_EQ(in_other_layout(got->hT).bits(), expected.hT.bits());
      }
      EXPECT_EQ(in_other_layout(same.h).bits(), expected.h.bits());
      EXPECT_EQ(other.h.bits(), expected.h.bits());
    }
  }
}

// All gradients, with what the forward saved and without. The workspace tells whether something is made again.
TEST_P(LayoutsOnCuda, Backward) {
  const Both in(call_of(64, 128, state_dtype));
  for (const char* impl : {"cuda_hopper_backward_chunk", "cuda_backward_chunk", "cuda_backward_recurrent"})
    for (const bool saves : {false, true}) {
      SCOPED_TRACE(testing::Message() << impl << (saves ? ", saved" : ""));
      BackwardOutputs expected(in.v_first), got(in.k_first);
      uint64_t bytes[2] = {};
      for (const bool k_first : {false, true}) {
        const Inputs& inputs = k_first ? in.k_first : in.v_first;
        ForwardOutputs saved(inputs, false);
        saved.save_v_first(inputs, KDA_BF16),
            saved.v_new = Tensor(KDA_BF16, {inputs.B, inputs.T, inputs.c.HV, inputs.c.V});
        kda_backward_args args = backward_args(inputs, k_first ? got : expected, saves ? &saved : nullptr);
        const std::vector<const char*> all = takers("backward", args);
        if (std::none_of(all.begin(), all.end(), [&](const char* name) { return !std::strcmp(name, impl); })) break;
        if (saves) run_on_cuda(forward_args(inputs, saved), nullptr);
        run_on_cuda(args, impl);
        if (HasFatalFailure()) return;
        args = on_device(args), args.exec.impl = impl;
        ASSERT_EQ(query(args, &bytes[k_first]), KDA_OK) << kda_last_error();
      }
      EXPECT_EQ(bytes[1], bytes[0]);
      if (!bytes[1]) continue;  // declined, as the one of Hopper elsewhere
      got.dh0 = in_other_layout(got.dh0);
      for (size_t i = 0; i < got.tensors().size(); ++i) {
        const auto [name, t] = got.tensors()[i];
        EXPECT_TRUE(!*t || t->bits() == expected.tensors()[i].tensor->bits()) << name;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(All, LayoutsOnCuda, testing::Values(KDA_F32, KDA_BF16),
                         [](const auto& info) { return info.param == KDA_F32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace kda::test
