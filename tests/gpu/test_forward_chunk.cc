// kda_forward in chunks on the GPU: K = V = 128 as tensor cores take it, every gate, against the float64 oracle at
// math.md's gates, and what is promised to the bit. Every implementation that takes a case runs it.
#include "calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

Case wide(Case c) {
  c.K = c.V = 128;
  return c;
}

std::vector<Case> chunk_cases() {
  std::vector<Case> all;
  const auto add = [&](Case c) {
    if (c.dtype == KDA_F32) c.dtype = KDA_BF16;
    all.push_back(wide(c));
  };
  const auto raw = [](Case c) {  // as Kimi's layers call: all activations inside
    c.gate_form = KDA_GATE_LOWER_BOUND, c.lower_bound = -5, c.gates = Gates::kRaw, c.A_log = c.dt_bias = true;
    c.beta_form = KDA_BETA_SIGMOID, c.qk_l2norm = true, c.g_dtype = c.beta_dtype = KDA_BF16;
    return c;
  };
  const auto softplus = [&](Case c) {
    c = raw(c), c.gate_form = KDA_GATE_SOFTPLUS, c.lower_bound = 0;
    return c;
  };
  for (const int64_t T : {1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100})
    add(raw({.name = "bound_" + std::to_string(T), .T = T})),
        add(softplus({.name = "softplus_" + std::to_string(T), .T = T}));
  add(raw({.name = "bound_heads", .B = 2, .T = 140, .H = 2, .HV = 4, .layout = Layout::kHeadsFirst}));
  add(softplus({.name = "softplus_heads", .B = 2, .T = 140, .H = 2, .HV = 4, .layout = Layout::kHeadsFirst}));
  add(raw({.name = "bound_packed", .HV = 2, .lengths = {1, 64, 0, 33, 130}, .tail = 9}));
  add(softplus({.name = "softplus_packed", .HV = 2, .lengths = {70, 0, 0, 2, 97}, .tail = 40, .cu_dtype = KDA_I64}));
  add(raw({.name = "bound_f16", .T = 70, .dtype = KDA_F16, .state_dtype = KDA_BF16}));
  all.back().g_dtype = KDA_F16;
  add(softplus({.name = "softplus_f16", .T = 70, .dtype = KDA_F16, .state_layout = KDA_STATE_K_FIRST}));
  all.back().g_dtype = KDA_F16;
  add({.name = "floor", .T = 96, .gate_form = KDA_GATE_LOWER_BOUND, .gates = Gates::kFloor, .lower_bound = -5});
  add({.name = "bound_wide_gate", .T = 130, .HV = 2, .gate_form = KDA_GATE_LOWER_BOUND, .gates = Gates::kRaw, .lower_bound = -3});
  add({.name = "deep_bound", .T = 96, .gate_form = KDA_GATE_LOWER_BOUND, .gates = Gates::kRaw, .lower_bound = -40});
  add({.name = "log", .T = 130, .HV = 2, .gates = Gates::kLogSigmoid});
  add({.name = "log_slow", .T = 130, .gates = Gates::kHalfZero, .gate_divisor = 10});
  add({.name = "log_none", .T = 100, .gates = Gates::kZero});
  add({.name = "wild", .T = 130, .gates = Gates::kWild});
  add({.name = "positive", .T = 130, .keys = Keys::kPositive});
  add({.name = "some_zero", .T = 70, .keys = Keys::kSomeZero});
  add({.name = "beta_zero", .T = 70, .betas = Betas::kZero});
  add({.name = "no_h0", .T = 70, .scale = 0.5f, .h0 = false});
  return all;
}

// Implementations in chunks that take the call, once its tensors are on the device: at addresses that fit any access.
std::vector<const char*> chunked(kda_forward_args args) {
  uintptr_t address = uintptr_t{1} << 46;
  for (const Field& f : tensors(args))
    if (f.t->ndim) f.t->data = reinterpret_cast<void*>(address += uintptr_t{1} << 32);
  std::vector<const char*> all = takers("forward", args);
  std::erase_if(all, [](const char* name) { return std::string(name) == "cuda_recurrent"; });
  return all;
}

constexpr double kGate = 0.005;  // of o and states (math.md 8)

class ForwardChunkOnCuda : public OnCuda, public testing::WithParamInterface<Case> {
 protected:
  ForwardChunkOnCuda() : c(GetParam()), in(c) {}
  const Case c;
  const Inputs in;
};

TEST_P(ForwardChunkOnCuda, IsTheOracle) {
  ForwardOutputs exact(in, false, true);
  exact.save_states(in, 1, true);
  exact.v_new = Tensor(KDA_F64, {in.B, in.T, c.HV, c.V}, c.layout);
  run(forward_args(in, exact), {.impl = "reference"});
  for (const bool all : {true, false}) {
    ForwardOutputs got(in, false);
    if (all) got.save_states(in, 1), got.v_new = Tensor(KDA_F32, {in.B, in.T, c.HV, c.V}, c.layout);
    const std::vector<const char*> impls = chunked(forward_args(in, got));
    EXPECT_FALSE(impls.empty());
    for (const char* impl : impls) {
      SCOPED_TRACE(impl);
      run_on_cuda(forward_args(in, got), impl);
      if (HasFatalFailure()) return;
      if (getenv("DBG") && all) for (int64_t t = 0; t < in.T; ++t) { double e = 0, r = 0; for (int v = 0; v < 128; ++v) { double a = exact.v_new.get(t * 128 + v), b = got.v_new.get(t * 128 + v); e += (a-b)*(a-b), r += a*a; } printf("%d %.3g\n", (int)t, sqrt(e / r)); }
      for (size_t i = 0; i < got.tensors().size(); ++i)
        if (const Tensor& t = *got.tensors()[i].tensor)
          expect_close(*exact.tensors()[i].tensor, t, got.tensors()[i].name, kGate);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardChunkOnCuda, testing::ValuesIn(chunk_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kda::test
