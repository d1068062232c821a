// cu_seqlens that fall, 0, T, 0, T, ..: half of the sequences are the whole row. Their lengths add up to far more than
// the tokens that there are, and docs/contract.md promises that nothing but values comes to harm.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "bare_calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

// In the emulator fewer sequences. On a GPU hundreds. Before they fall they are short, as rounds of drafts are.
constexpr bool kEmulated = CUDART_VERSION == 0;
constexpr int64_t kTokens = kEmulated ? 192 : 320, kSequences = kEmulated ? 10 : 300, kLength = kEmulated ? 15 : 1;

Case falling_case(int64_t size, int32_t dtype) {
  return {.name = "falling",
          .HV = 2,
          .K = size,
          .V = size,
          .lengths = std::vector<int64_t>(kSequences, kLength),
          .tail = kTokens - kSequences * kLength,
          .dtype = dtype,
          .g_dtype = dtype,
          .gate_divisor = 10,
          .qk_l2norm = true};
}
// As Legal leaves sizes of convolutions to themselves.
ConvCase falling_conv_case() {
  return {.name = "falling",
          .D = 70,
          .W = 4,
          .lengths = std::vector<int64_t>(kSequences, kLength),
          .tail = kTokens - kSequences * kLength};
}

template <class Args>
void run_everywhere(const Args& args) {
  for (const char* impl : takers(op_name<Args>(), args)) {
    SCOPED_TRACE(impl);
    run_on_cuda(args, impl);  // looks beside all tensors and the workspace
    if (testing::Test::HasFatalFailure()) return;
  }
}
// Makes the offsets of a call fall, once all else of it is made for those that do not. Returns whether it has some.
template <class Args>
bool let_fall(Args& args) {
  for (const Field& f : given(args)) {
    if (std::strcmp(f.name, "cu_seqlens")) continue;
    for (int64_t n = 0; n < f.t->shape[0]; ++n)
      static_cast<int32_t*>(f.t->data)[n * f.t->stride[0]] = n % 2 ? static_cast<int32_t>(kTokens) : 0;
    return true;
  }
  return false;
}

template <class Args>
class FallingOnCuda : public OnCuda {};
using Packed = testing::Types<kda_forward_args, kda_backward_args, kda_decode_args, kda_verify_args,
                              kda_flush_verify_args, kda_segment_map_args, kda_stage_cumsum_args,
                              kda_stage_chunk_intra_args, kda_stage_recompute_w_u_args, kda_stage_delta_h_args,
                              kda_stage_fwd_o_args, kda_stage_bwd_local_args, kda_stage_bwd_delta_h_args,
                              kda_stage_bwd_wy_dqkg_args, kda_stage_bwd_intra_args, kda_stage_cumsum_backward_args>;
TYPED_TEST_SUITE(FallingOnCuda, Packed, OperatorNames);

TYPED_TEST(FallingOnCuda, LengthsLeadNowhere) {
  for (const int64_t size : {17, 64})
    for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
      if (kEmulated && (size == 17) != (dtype == KDA_F32)) continue;
      SCOPED_TRACE(testing::Message() << size << (dtype == KDA_F32 ? " f32" : " bf16"));
      Legal<TypeParam> x(falling_case(size, dtype));
      ASSERT_TRUE(let_fall(x.args));
      if constexpr (std::is_same_v<TypeParam, kda_backward_args>) run_everywhere(x.args);  // with what was saved
      spare(x.args);
      run_everywhere(x.args);
      if (testing::Test::HasFailure()) return;
    }
}

// Token by token, backward keeps a state of every 64 tokens. What lies behind these in the workspace is little here: no
// gradients of q, k and g, small states for each block to work on. So a state in a wrong place is outside.
TEST_F(OnCuda, FallingLengthsOfKeptStates) {
  const int64_t N = kEmulated ? 32 : 600, T = kEmulated ? 256 : 2560;
  Inputs in({.name = "kept", .K = 4, .V = 4, .lengths = std::vector<int64_t>(N, 1), .tail = T - N});
  for (int64_t n = 0; n <= N; ++n) in.cu_seqlens.set(n, n % 2 ? static_cast<double>(T) : 0);
  const BackwardOutputs out(in);
  kda_backward_args a = backward_args(in, out);
  a.dq = a.dk = a.dg = a.dbeta = a.dA_log = a.d_dt_bias = {};
  run_on_cuda(a, "cuda_backward_recurrent");
}

TEST_F(OnCuda, FallingLengthsOfConvolutions) {
  ConvInputs in(falling_conv_case());
  const Tensor y(KDA_F32, {in.B, in.T, in.c.D}), tails(KDA_F32, {in.N, in.c.D, in.c.W - 1});
  kda_conv_args forward = KDA_CONV_ARGS_INIT;
  forward.x = in.x, forward.weight = in.weight, forward.bias = in.bias, forward.cu_seqlens = in.cu_seqlens;
  forward.final_state = tails, forward.y = y, forward.silu = 1;
  ASSERT_TRUE(let_fall(forward));
  run_everywhere(forward);
  const ConvGradientOutputs out(in);
  run_everywhere(conv_backward_args(in, out));
}

}  // namespace
}  // namespace kda::test
