// kda_prefill_f32: o and hT are kda_forward's, to the bit with chunks of 64; w and u against the oracle and against
// what makes them useful, v_new = u - w S.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "prefill_f32_calls.h"

namespace kda::test {
namespace {

// Some with heads stored before tokens.
std::vector<Case> f32_cases() {
  std::vector<Case> all = plain_f32_cases();
  for (const int64_t T : {31, 32, 33, 96}) all.push_back({.name = "prefill_tokens_" + std::to_string(T), .T = T});
  all.push_back({.name = "prefill_gva", .B = 2, .T = 70, .H = 2, .HV = 6, .K = 20, .V = 36});
  for (const int64_t size : {64, 128})  // sizes that fit tensor cores
    all.push_back({.name = "prefill_" + std::to_string(size),
                   .B = 2,
                   .T = 130,
                   .HV = 2,
                   .K = size,
                   .V = size,
                   .layout = Layout::kHeadsFirst});
  return all;
}

class PrefillF32 : public testing::TestWithParam<Case> {
 protected:
  PrefillF32() : in(GetParam()) {}
  const Inputs in;
};

TEST_P(PrefillF32, AgainstTheOracle) {
  for (const int32_t chunk : {0, 32, 64}) {
    const int32_t C = chunk ? chunk : 64;
    PrefillF32Outputs out(in, C, KDA_F32), reference(in, C, KDA_F64);
    run(prefill_f32_args(in, reference, chunk), {.impl = "reference"});
    run(prefill_f32_args(in, out, chunk), {.impl = "cpu_chunk"});
    for (size_t i = 0; i < out.all().size(); ++i) {
      const auto [name, t] = out.all()[i];
      EXPECT_TRUE(close(*reference.all()[i].second, *t, 1e-5)) << name << ", chunk " << chunk;
      EXPECT_EQ(t->unwritten(), 0) << name;
      EXPECT_TRUE(t->margins_intact()) << name;
    }
  }
}

// Therefore all promises of kda_forward hold here, too.
TEST_P(PrefillF32, ChunksOf64HaveTheBitsOfForward) {
  const ForwardOutputs forward(in, false);
  run(forward_args(in, forward), {.impl = "cpu_chunk"});
  for (const int threads : {1, 2, 3, 0})
    for (const unsigned char fill : {0, 0x7f, 0xff}) {
      PrefillF32Outputs out(in, 64, KDA_F32);
      run(prefill_f32_args(in, out, 64), {.impl = "cpu_chunk", .threads = threads, .workspace_fill = fill});
      EXPECT_EQ(out.hT.bits(), forward.hT.bits());
      kda_tensor o = heads_first(out.o);
      for (int64_t i = 0; i < forward.o.size(); ++i) {
        const int64_t v = i % in.c.V, hv = i / in.c.V % in.c.HV, t = i / in.c.V / in.c.HV % in.T,
                      b = i / in.c.V / in.c.HV / in.T;
        const float x = static_cast<const float*>(o.data)[b * o.stride[0] + t * o.stride[1] + hv * o.stride[2] + v];
        const float y = static_cast<float>(forward.o.get(i));
        ASSERT_EQ(std::memcmp(&x, &y, sizeof x), 0) << "element " << i;
      }
    }
}

TEST_P(PrefillF32, WantedOrNotChangesNoBit) {
  for (const int32_t chunk : {32, 64}) {
    PrefillF32Outputs all(in, chunk, KDA_F32);
    run(prefill_f32_args(in, all, chunk), {.threads = 3});
    expect_wanted_or_not_changes_no_bit(in, chunk, all, [](const auto& a) { run(a); });
  }
}

// u - w S is what forward calls v_new, chunk by chunk.
TEST_P(PrefillF32, CorrectionsFollowFromTheBuffers) {
  const ForwardOutputs forward(in, true, true);
  run(forward_args(in, forward), {.impl = "reference"});
  PrefillF32Outputs out(in, 64, KDA_F32);
  run(prefill_f32_args(in, out, 64));
  const int64_t K = in.c.K, V = in.c.V, HV = in.c.HV, NT = (in.T + 63) / 64;
  Tensor v_new(KDA_F32, {in.B, in.T, HV, V});
  for (int64_t b = 0; b < in.B; ++b)
    for (int64_t hv = 0; hv < HV; ++hv)
      for (int64_t t = 0; t < NT * 64; ++t) {
        const int64_t chunk = (b * HV + hv) * NT + t / 64, state = ((b * NT + t / 64) * HV + hv) * K * V;
        for (int64_t j = 0; j < V; ++j) {
          double x = out.u.get((chunk * 64 + t % 64) * V + j);
          for (int64_t d = 0; t < in.T && d < K; ++d) {
            const int64_t at = in.c.state_layout == KDA_STATE_V_FIRST ? j * K + d : d * V + j;
            x -= out.w.get((chunk * 64 + t % 64) * K + d) * forward.h.get(state + at);
          }
          if (t < in.T) v_new.set(((b * in.T + t) * HV + hv) * V + j, x);
          else ASSERT_EQ(x, 0) << "a row behind the last token";
        }
      }
  EXPECT_TRUE(close(forward.v_new, v_new, 2e-5));
}

INSTANTIATE_TEST_SUITE_P(All, PrefillF32, testing::ValuesIn(f32_cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

// A call goes on in place from the state of the call before, at any multiple of the chunk.
TEST(PrefillF32Details, ContinuesInPlace) {
  const Inputs in({.name = "continued", .B = 2, .T = 160, .HV = 2, .K = 20, .V = 36, .layout = Layout::kHeadsFirst});
  for (const int32_t chunk : {32, 64}) {
    const PrefillF32Outputs whole(in, chunk, KDA_F32);
    run(prefill_f32_args(in, whole, chunk));
    expect_to_continue_in_place(in, chunk, whole, [](const auto& a) { run(a); });
  }
}

TEST(PrefillF32Details, NoTokensAndNoRows) {
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {2, 0}}) {
    const Inputs in({.name = "nothing", .B = B, .T = T});
    PrefillF32Outputs out(in, 64, KDA_F32);
    run(prefill_f32_args(in, out, 64));
    EXPECT_EQ(out.hT.bits(), in.h0.bits());
  }
}

}  // namespace
}  // namespace kda::test
