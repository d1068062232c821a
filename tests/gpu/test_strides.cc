// Strides that kda.h allows and few calls have: a first dimension that goes backwards, and any stride where a dimension
// has size one. No bit depends on them, whatever kernel takes the call.
#include <algorithm>
#include <cstring>

#include "bare_calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

Case strided_case(int64_t B, int32_t dtype) {
  return {.name = "strides",
          .B = B,
          .T = 70,
          .H = 2,
          .HV = 2,
          .K = 64,
          .V = 64,
          .dtype = dtype,
          .g_dtype = dtype,
          .gate_form = KDA_GATE_LOWER_BOUND,
          .gates = Gates::kRaw,
          .lower_bound = -5,
          .qk_l2norm = true};
}

// Turns the rows of a dense tensor around in memory, and its first dimension.
void turn(kda_tensor& t) {
  const int64_t row = std::abs(t.stride[0]) * dtype_size(t.dtype);
  char* const begin = begin_of(t);
  for (int64_t i = 0, j = t.shape[0] - 1; i < j; ++i, --j)
    std::swap_ranges(begin + i * row, begin + (i + 1) * row, begin + j * row);
  t.data = begin + (t.data == begin ? (t.shape[0] - 1) * row : 0), t.stride[0] = -t.stride[0];
}

template <class Args>
class StridesOnCuda : public OnCuda {
 protected:
  using Change = void (*)(kda_tensor&);
  // Runs each implementation that takes the changed call, and compares with the usual one. `back` undoes the change.
  void expect_same_bits(const Case& c, bool outputs, Change change, Change back) {
    Legal<Args> probe(c);
    spare(probe.args);
    each(probe.args, outputs, change);
    for (const char* impl : takers(op_name<Args>(), probe.args)) {
      SCOPED_TRACE(testing::Message() << impl << (outputs ? ", outputs" : ", inputs"));
      Legal<Args> usual(c), other(c);
      spare(usual.args), spare(other.args);
      run_on_cuda(usual.args, impl);
      each(other.args, outputs, change);
      run_on_cuda(other.args, impl);
      each(other.args, outputs, back);
      if (testing::Test::HasFatalFailure()) return;
      for (size_t i = 0; i < usual.outputs().size(); ++i)
        EXPECT_EQ(other.outputs()[i]->bits(), usual.outputs()[i]->bits()) << i;
    }
  }

 private:
  // Tensors whose memory no other one has, inputs or outputs.
  static void each(Args& args, bool outputs, Change change) {
    const std::vector<Field> all = given(args);
    std::vector<kda_tensor*> chosen;
    for (const Field& f : all) {
      const auto shares = [&](const Field& x) { return x.t != f.t && begin_of(*x.t) == begin_of(*f.t); };
      if (f.output == outputs && f.t->ndim >= 3 && std::none_of(all.begin(), all.end(), shares)) chosen.push_back(f.t);
    }
    for (kda_tensor* t : chosen) change(*t);
  }
};
// No kernel for segment_merge takes a negative stride.
using Strided = testing::Types<kda_forward_args, kda_backward_args, kda_decode_args, kda_verify_args, kda_flush_args,
                               kda_flush_verify_args, kda_segment_map_args, kda_gate_args, kda_gate_backward_args,
                               kda_stage_chunk_intra_args, kda_stage_recompute_w_u_args, kda_stage_delta_h_args,
                               kda_stage_fwd_o_args, kda_stage_bwd_local_args, kda_stage_bwd_delta_h_args,
                               kda_stage_bwd_wy_dqkg_args, kda_stage_bwd_intra_args>;
TYPED_TEST_SUITE(StridesOnCuda, Strided, OperatorNames);

template <class Args>
Case short_if_drafts(Case c) {
  if constexpr (std::is_base_of_v<LegalDrafts, Legal<Args>>) c.T = 5;
  return c;
}

TYPED_TEST(StridesOnCuda, FirstDimensionsMayGoBackwards) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16})
    for (const bool outputs : {false, true}) {
      if (CUDART_VERSION == 0 && dtype == KDA_F32) continue;  // the emulator is slow
      const Case c = short_if_drafts<TypeParam>(strided_case(3, dtype));
      this->expect_same_bits(c, outputs, turn, turn);
    }
}

TYPED_TEST(StridesOnCuda, DimensionsOfSizeOneHaveNone) {
  const auto odd = [](kda_tensor& t) {
    for (int i = 0; i + 1 < t.ndim; ++i)
      if (t.shape[i] == 1) t.stride[i] = i % 2 ? -3 : (int64_t{1} << 41) + 1;
  };
  const auto nothing = [](kda_tensor&) {};
  for (const bool outputs : {false, true}) {
    Case c = short_if_drafts<TypeParam>(strided_case(1, KDA_BF16));
    c.H = c.HV = 1;
    this->expect_same_bits(c, outputs, odd, nothing);
  }
}

}  // namespace
}  // namespace kda::test
