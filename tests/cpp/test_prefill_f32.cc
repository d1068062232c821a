// kda_prefill_f32: o and hT are kda_forward's, to the bit with chunks of 64; w and u against the oracle and against
// what makes them useful, v_new = u - w S.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "calls.h"

namespace kda::test {
namespace {

// The f32 cases with rows of equal length and activated inputs; some with heads stored before tokens.
std::vector<Case> f32_cases() {
  std::vector<Case> all;
  for (Case c : cases()) {
    const bool plain = c.gate_form == KDA_GATE_LOG && c.beta_form == KDA_BETA_ACTIVATED && !c.qk_l2norm;
    if (!plain || !c.lengths.empty() || c.tail) continue;
    c.dtype = c.g_dtype = c.beta_dtype = c.state_dtype = KDA_F32;
    all.push_back(c);
  }
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

kda_tensor heads_first(kda_tensor t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

struct Outputs {
  Tensor o, hT, w, u;
  Outputs(const Inputs& in, int64_t chunk, int32_t dtype)
      : o(dtype, {in.B, in.c.HV, in.T, in.c.V}, Layout::kPadded),
        hT(dtype, in.state_shape(in.B), in.c.layout),
        w(dtype, {in.B, in.c.HV, (in.T + chunk - 1) / chunk, chunk, in.c.K}, Layout::kPadded),
        u(dtype, {in.B, in.c.HV, (in.T + chunk - 1) / chunk, chunk, in.c.V}, Layout::kPadded) {}
  std::vector<std::pair<const char*, Tensor*>> all() { return {{"o", &o}, {"hT", &hT}, {"w", &w}, {"u", &u}}; }
};

kda_prefill_f32_args prefill_args(const Inputs& in, const Outputs& out, int32_t chunk) {
  kda_prefill_f32_args a = KDA_PREFILL_F32_ARGS_INIT;
  a.q = heads_first(in.q), a.k = heads_first(in.k), a.v = heads_first(in.v), a.g = heads_first(in.g);
  a.beta = heads_first(in.beta), a.h0 = in.h0;
  a.o = out.o, a.hT = out.hT, a.w = out.w, a.u = out.u;
  a.chunk = chunk, a.scale = in.c.scale, a.state_layout = in.c.state_layout;
  return a;
}

class PrefillF32 : public testing::TestWithParam<Case> {
 protected:
  PrefillF32() : in(GetParam()) {}
  const Inputs in;
};

TEST_P(PrefillF32, AgainstTheOracle) {
  for (const int32_t chunk : {0, 32, 64}) {
    const int32_t C = chunk ? chunk : 64;
    Outputs out(in, C, KDA_F32), reference(in, C, KDA_F64);
    run(prefill_args(in, reference, chunk), {.impl = "reference"});
    run(prefill_args(in, out, chunk), {.impl = "cpu_chunk"});
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
      Outputs out(in, 64, KDA_F32);
      run(prefill_args(in, out, 64), {.impl = "cpu_chunk", .threads = threads, .workspace_fill = fill});
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
    Outputs all(in, chunk, KDA_F32);
    run(prefill_args(in, all, chunk), {.threads = 3});
    for (const char* wanted : {"hT", "w", "u", ""}) {
      Outputs one(in, chunk, KDA_F32);
      kda_prefill_f32_args a = prefill_args(in, one, chunk);
      if (std::string(wanted) != "hT") a.hT = {};
      if (std::string(wanted) != "w") a.w = {};
      if (std::string(wanted) != "u") a.u = {};
      run(a);
      EXPECT_EQ(one.o.bits(), all.o.bits()) << wanted;
      for (size_t i = 1; i < 4; ++i)
        if (const auto [name, t] = one.all()[i]; !std::strcmp(name, wanted))
          EXPECT_EQ(t->bits(), all.all()[i].second->bits()) << name;
        else EXPECT_TRUE(t->untouched()) << name;
    }
  }
}

// u - w S is what forward calls v_new, chunk by chunk.
TEST_P(PrefillF32, CorrectionsFollowFromTheBuffers) {
  const ForwardOutputs forward(in, true, true);
  run(forward_args(in, forward), {.impl = "reference"});
  Outputs out(in, 64, KDA_F32);
  run(prefill_args(in, out, 64));
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
    Outputs whole(in, chunk, KDA_F32), parts(in, chunk, KDA_F32);
    run(prefill_args(in, whole, chunk));
    const Tensor state = in.h0.clone();
    for (const auto& [t0, t1] : {std::pair<int64_t, int64_t>{0, 64}, {64, 160}}) {
      kda_prefill_f32_args a = prefill_args(in, parts, chunk);
      for (kda_tensor* t : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.o})
        t->data = static_cast<float*>(t->data) + t0 * t->stride[2], t->shape[2] = t1 - t0;
      for (kda_tensor* t : {&a.w, &a.u})
        t->data = static_cast<float*>(t->data) + t0 / chunk * t->stride[2], t->shape[2] = (t1 - t0 + chunk - 1) / chunk;
      a.h0 = a.hT = state;
      run(a);
    }
    EXPECT_EQ(parts.o.bits(), whole.o.bits());
    EXPECT_EQ(parts.w.bits(), whole.w.bits());
    EXPECT_EQ(parts.u.bits(), whole.u.bits());
    EXPECT_EQ(state.bits(), whole.hT.bits());
  }
}

TEST(PrefillF32Details, NoTokensAndNoRows) {
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {2, 0}}) {
    const Inputs in({.name = "nothing", .B = B, .T = T});
    Outputs out(in, 64, KDA_F32);
    run(prefill_args(in, out, 64));
    EXPECT_EQ(out.hT.bits(), in.h0.bits());
  }
}

}  // namespace
}  // namespace kda::test
