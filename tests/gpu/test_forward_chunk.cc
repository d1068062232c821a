// kda_forward in chunks on the GPU: K and V as tensor cores take them, every gate, against the float64 oracle at
// math.md's gates, and what is promised to the bit. Every implementation that takes a case runs it.
#include <cmath>

#include "calls.h"
#include "chunk_cases.h"
#include "environment_variable.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

// Implementations in chunks that take the call.
std::vector<const char*> chunked(const kda_forward_args& args) {
  std::vector<const char*> all = takers("forward", args);
  std::erase_if(all, [](const char* name) { return std::string(name) == "cuda_prefill_recurrent"; });
  return all;
}

// Those of these implementations whose bits depend on the sequence alone.
std::vector<const char*> invariant(kda_forward_args args) {
  args.exec.flags = KDA_BATCH_INVARIANT;
  return chunked(args);
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
  for (const int32_t kept : {-1, int32_t{KDA_F32}, int32_t{KDA_BF16}}) {
    ForwardOutputs got(in, false);
    if (kept >= 0) {
      got.save_states(in, 1), got.v_new = Tensor(kept, {in.B, in.T, c.HV, c.V}, c.layout);
      got.h = Tensor(kept, in.state_shape(in.h_rows(1)), c.layout);
    }
    const std::vector<const char*> impls = chunked(forward_args(in, got));
    EXPECT_FALSE(impls.empty());
    for (const char* impl : impls) {
      SCOPED_TRACE(impl);
      run_on_cuda(forward_args(in, got), impl);
      if (HasFatalFailure()) return;
      for (size_t i = 0; i < got.tensors().size(); ++i)
        if (const Tensor& t = *got.tensors()[i].tensor)
          expect_close(*exact.tensors()[i].tensor, t, got.tensors()[i].name, kGate);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardChunkOnCuda, testing::ValuesIn(chunk_cases()),
                         [](const auto& info) { return info.param.name; });

// ---- promises ----

// Tokens t0 .. t1 - 1 of the only row.
kda_forward_args slice(const Inputs& in, int64_t t0, int64_t t1, const Tensor& h0, const Tensor& hT, const Tensor& o) {
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = in.view(), a.states.h0 = h0, a.states.hT = hT, a.o = o;
  for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.o}) {
    t->data = static_cast<char*>(t->data) + t0 * t->stride[1] * dtype_size(t->dtype);
    t->shape[1] = t1 - t0;
  }
  return a;
}

class ForwardChunkPromise : public OnCuda, public testing::WithParamInterface<const char*> {
 protected:
  static Case named(const char* name) {
    for (const Case& c : chunk_cases())
      if (c.name == name) return c;
    ADD_FAILURE() << name;
    return {};
  }
};

// Splits at multiples of 64, with the f32 state carried, change no bit; large and small numbers included.
TEST_P(ForwardChunkPromise, SplitsChangeNoBit) {
  for (const double size : {1.0, 1e-6, 1e6}) {
    Case c = named(GetParam());
    c.B = 1, c.T = 200, c.lengths = {}, c.tail = 0, c.state_dtype = KDA_F32;
    Inputs in(c);
    for (Tensor* t : {&in.v, &in.h0})
      for (int64_t i = 0; i < t->size(); ++i) t->set(i, t->get(i) * size);
    const auto states = [&] { return Tensor(KDA_F32, in.state_shape(1)); };
    const Tensor exact_o(KDA_F64, {1, 200, c.HV, c.V}), exact_h(KDA_F64, in.state_shape(1));
    run(slice(in, 0, 200, in.h0, exact_h, exact_o), {.impl = "reference"});
    const Tensor whole_o(c.dtype, {1, 200, c.HV, c.V}), whole_h = states();
    for (const char* impl : invariant(slice(in, 0, 200, in.h0, whole_h, whole_o))) {
      SCOPED_TRACE(std::string(impl) + " times " + std::to_string(size));
      run_on_cuda(slice(in, 0, 200, in.h0, whole_h, whole_o), impl);
      if (size == 1 || c.dtype != KDA_F16) expect_close(exact_o, whole_o, "o", kGate);
      expect_close(exact_h, whole_h, "hT", kGate);
      for (const int64_t split : {64, 128, 192}) {
        const Tensor o(c.dtype, {1, 200, c.HV, c.V}), middle = states(), end = states();
        run_on_cuda(slice(in, 0, split, in.h0, middle, o), impl);
        run_on_cuda(slice(in, split, 200, middle, end, o), impl);
        EXPECT_EQ(o.bits(), whole_o.bits()) << "split at " << split;
        EXPECT_EQ(end.bits(), whole_h.bits()) << "split at " << split;
      }
    }
  }
}

// Where v is zero for long, states decay below all numbers; what comes afterwards is as exact as ever.
TEST_P(ForwardChunkPromise, VanishedStates) {
  Case c = named(GetParam());
  c.B = 1, c.T = 460, c.lengths = {}, c.tail = 0, c.state_dtype = KDA_F32;
  const int64_t zeros = 330;
  Inputs in(c);
  for (int64_t i = 0; i < zeros * c.HV * c.V; ++i) in.v.set(i, 0);
  const auto states = [&] { return Tensor(KDA_F32, in.state_shape(1)); };
  const Tensor exact_o(KDA_F64, {1, c.T, c.HV, c.V}), exact_h(KDA_F64, in.state_shape(1));
  run(slice(in, 0, c.T, in.h0, exact_h, exact_o), {.impl = "reference"});
  const Tensor whole_o(c.dtype, {1, c.T, c.HV, c.V}), whole_h = states();
  for (const char* impl : chunked(slice(in, 0, c.T, in.h0, whole_h, whole_o))) {
    SCOPED_TRACE(impl);
    run_on_cuda(slice(in, 0, c.T, in.h0, whole_h, whole_o), impl);
    expect_close(exact_o, whole_o, "o", kGate);
    expect_close(exact_h, whole_h, "hT", kGate);
  }
  for (const char* impl : invariant(slice(in, 0, c.T, in.h0, whole_h, whole_o))) {
    SCOPED_TRACE(impl);
    run_on_cuda(slice(in, 0, c.T, in.h0, whole_h, whole_o), impl);
    for (const int64_t split : {256, 320, 384}) {
      const Tensor o(c.dtype, {1, c.T, c.HV, c.V}), middle = states(), end = states();
      run_on_cuda(slice(in, 0, split, in.h0, middle, o), impl);
      run_on_cuda(slice(in, split, c.T, middle, end, o), impl);
      EXPECT_EQ(o.bits(), whole_o.bits()) << "split at " << split;
      EXPECT_EQ(end.bits(), whole_h.bits()) << "split at " << split;
    }
  }
}

// Behind tokens whose columns are zero, the state too, values may be of any size.
TEST_P(ForwardChunkPromise, HugeValuesBehindZeros) {
  Case c = named(GetParam());
  c.B = 1, c.T = 150, c.lengths = {}, c.tail = 0, c.state_dtype = KDA_F32;
  Inputs in(c);
  const double factor = c.dtype == KDA_F16 ? 1e4 : 1e7;
  for (int64_t i = 0; i < in.v.size(); ++i) in.v.set(i, i < 64 * c.HV * c.V ? 0 : in.v.get(i) * factor);
  for (int64_t i = 0; i < in.h0.size(); ++i) in.h0.set(i, 0);
  const Tensor exact_o(KDA_F64, {1, c.T, c.HV, c.V}), exact_h(KDA_F64, in.state_shape(1));
  run(slice(in, 0, c.T, in.h0, exact_h, exact_o), {.impl = "reference"});
  const Tensor o(c.dtype, {1, c.T, c.HV, c.V}), h(KDA_F32, in.state_shape(1));
  for (const char* impl : chunked(slice(in, 0, c.T, in.h0, h, o))) {
    SCOPED_TRACE(impl);
    run_on_cuda(slice(in, 0, c.T, in.h0, h, o), impl);
    expect_close(exact_o, o, "o", kGate);
    expect_close(exact_h, h, "hT", kGate);
  }
}

// A sequence of a packed row alone has the bits it has among others.
TEST_P(ForwardChunkPromise, CompanyChangesNoBit) {
  Case c = named(GetParam());
  c.B = 1, c.lengths = {1, 64, 0, 33, 130, 65}, c.tail = 5, c.state_dtype = KDA_F32;
  const Inputs in(c);
  const ForwardOutputs all(in, false);
  for (const char* impl : invariant(forward_args(in, all))) {
    SCOPED_TRACE(impl);
    run_on_cuda(forward_args(in, all), impl);
    for (int64_t n = 0; n < in.N; ++n) {
      const int64_t begin = in.begin(n), length = in.length(n);
      const Tensor o(c.dtype, {1, in.T, c.HV, c.V}), hT(KDA_F32, in.state_shape(1));
      kda_forward_args a = slice(in, begin, begin + length, {}, hT, o);
      a.in.cu_seqlens = {};
      a.states.h0 = in.h0;
      a.states.h0.data = static_cast<float*>(a.states.h0.data) + n * a.states.h0.stride[0], a.states.h0.shape[0] = 1;
      run_on_cuda(a, impl);
      EXPECT_EQ(o.bits(1, begin, length), all.o.bits(1, begin, length)) << n;
      EXPECT_EQ(hT.bits(), all.hT.bits(0, n, 1)) << n;
    }
  }
}

// Large and small numbers against the oracle; two runs have the same bits.
TEST_P(ForwardChunkPromise, SizesAndRuns) {
  for (const double size : {1e-6, 1e6}) {
    Case c = named(GetParam());
    if (c.dtype == KDA_F16) continue;
    c.B = 1, c.T = 270, c.lengths = {}, c.tail = 0, c.state_dtype = KDA_F32;
    Inputs in(c);
    for (Tensor* t : {&in.v, &in.h0})
      for (int64_t i = 0; i < t->size(); ++i) t->set(i, t->get(i) * size);
    const ForwardOutputs exact(in, false, true), first(in, false), second(in, false);
    run(forward_args(in, exact), {.impl = "reference"});
    for (const char* impl : chunked(forward_args(in, first))) {
      SCOPED_TRACE(std::string(impl) + " times " + std::to_string(size));
      run_on_cuda(forward_args(in, first), impl);
      run_on_cuda(forward_args(in, second), impl);
      EXPECT_EQ(first.o.bits(), second.o.bits());
      EXPECT_EQ(first.hT.bits(), second.hT.bits());
      expect_close(exact.o, first.o, "o", kGate);
      expect_close(exact.hT, first.hT, "hT", kGate);
    }
  }
}

// Pairs of blocks that share heads change no bit either. They share heads where there are more heads than pairs, and
// none where there is one head.
TEST_P(ForwardChunkPromise, SharedHeadsChangeNoBit) {
  int blocks = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  const int64_t heads = blocks / 12;
  const std::vector<int64_t> packed = {700, 33, 0, 1024, 65};
  for (const bool varlen : {false, true}) {
    SCOPED_TRACE(varlen ? "packed" : "batch");
    Case c = named(GetParam());
    c.H = c.HV = varlen ? heads : 1, c.layout = Layout::kDense, c.state_dtype = KDA_F32, c.tail = varlen ? 3 : 0;
    c.B = varlen ? 1 : blocks / 2 + 1, c.T = 310, c.lengths = varlen ? packed : std::vector<int64_t>{};
    const Inputs in(c);
    const ForwardOutputs all(in, false);
    for (const char* impl : invariant(forward_args(in, all))) {
      SCOPED_TRACE(impl);
      run_on_cuda(forward_args(in, all), impl);
      // The sequences at the borders of shares are somewhere among these.
      for (int64_t n = 0; n < in.N; n += varlen || n < 8 ? 1 : 13) {
        const int64_t begin = varlen ? in.begin(n) : 0, length = varlen ? in.length(n) : in.T, row = varlen ? 0 : n;
        const Tensor o(c.dtype, {1, in.T, c.HV, c.V}), hT(KDA_F32, in.state_shape(1));
        kda_forward_args a = slice(in, begin, begin + length, {}, hT, o);
        for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta})
          t->data = static_cast<char*>(t->data) + row * t->stride[0] * dtype_size(t->dtype), t->shape[0] = 1;
        a.in.cu_seqlens = {};
        a.states.h0 = in.h0;
        a.states.h0.data = static_cast<float*>(a.states.h0.data) + n * a.states.h0.stride[0], a.states.h0.shape[0] = 1;
        run_on_cuda(a, impl);
        if (varlen) {
          EXPECT_EQ(o.bits(1, begin, length), all.o.bits(1, begin, length)) << n;
        } else {
          EXPECT_EQ(o.bits(), all.o.bits(0, n, 1)) << n;
        }
        EXPECT_EQ(hT.bits(), all.hT.bits(0, n, 1)) << n;
      }
    }
  }
}

// Nor does it matter what loads and stores states: threads do where states on the way are wanted, the copy engine
// where they are not.
TEST_P(ForwardChunkPromise, StatesOnTheWayChangeNoBit) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{1, 63, 64, 65, 0, 200, 33, 96, 5, 128, 31, 2},
                                              std::vector<int64_t>(30, 20), std::vector<int64_t>(20, 90)}) {
    SCOPED_TRACE(lengths[0]);
    Case c = named(GetParam());
    c.B = 1, c.H = 2, c.HV = 16, c.lengths = lengths, c.tail = 5, c.state_dtype = KDA_F32;
    const Inputs in(c);
    const ForwardOutputs plain(in, false);
    ForwardOutputs all(in, false);
    all.save_states(in, 1);
    for (const char* impl : invariant(forward_args(in, all))) {
      SCOPED_TRACE(impl);
      run_on_cuda(forward_args(in, plain), impl);
      run_on_cuda(forward_args(in, all), impl);
      EXPECT_EQ(plain.o.bits(), all.o.bits());
      EXPECT_EQ(plain.hT.bits(), all.hT.bits());
    }
  }
}

// Offsets that fall, of more sequences than a warp has lanes: pairs that wait for others still end.
TEST_F(OnCuda, FallingLengthsEnd) {
  Case c = wide({.name = "falling", .HV = 2, .dtype = KDA_BF16});
  c.lengths.assign(40, 100);
  Random random(7);
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(round);
    Inputs in(c);
    for (int64_t n = 0; n <= in.N; ++n)
      in.cu_seqlens.set(n, static_cast<double>(round    ? random.below(2 * in.T) - in.T / 2
                                               : n == 4 ? 1000
                                               : n < 6  ? 200
                                                        : 2000));
    const ForwardOutputs all(in, false);
    for (const char* impl : takers("forward", forward_args(in, all))) {
      SCOPED_TRACE(impl);
      run_on_cuda(forward_args(in, all), impl);
      EXPECT_TRUE(all.o.margins_intact() && all.hT.margins_intact());
    }
  }
}

// A NaN stays away from tokens before it, and from other heads, but not from tokens behind it.
TEST_P(ForwardChunkPromise, NaNReachesNoEarlierToken) {
  Case c = named(GetParam());
  c.B = 1, c.H = c.HV = 2, c.T = 400, c.lengths = {}, c.layout = Layout::kDense, c.state_dtype = KDA_F32;
  const Inputs clean(c);
  const ForwardOutputs expected(clean, false);
  for (const char* impl : chunked(forward_args(clean, expected))) {
    run_on_cuda(forward_args(clean, expected), impl);
    for (const char* victim : {"q", "k", "v", "g", "beta"})
      for (const int64_t t : {0, 5, 15, 31, 32, 50, 69, 150, 199, 270, 399}) {
        SCOPED_TRACE(std::string(impl) + ", " + victim + " of token " + std::to_string(t));
        Inputs in(c);
        for (const auto& [name, tensor] : in.tensors())
          if (name == std::string(victim)) tensor->set(t * (tensor->size() / in.T), std::nan(""));  // of head 0
        const ForwardOutputs got(in, false);
        run_on_cuda(forward_args(in, got), impl);
        const int64_t row = c.HV * c.V;
        int64_t wrong = 0, nan = 0;
        for (int64_t i = 0; i < in.T * row; ++i) {
          const bool head = i % row < c.V, past = i / row < t;
          const double x = expected.o.get(i), y = got.o.get(i);
          if (!head) wrong += x != y;
          else if (past) wrong += !(std::abs(x - y) <= 0.02 * std::max(1.0, std::abs(x)));
          else if (i / row == t) nan += std::isnan(y);
        }
        EXPECT_EQ(wrong, 0);
        EXPECT_GT(nan, 0);
        EXPECT_TRUE(victim == std::string("q") || std::isnan(got.o.get((in.T - 1) * row)));
      }
  }
}

// In place on a pool, some of its sequences padding, with checkpoints.
TEST_P(ForwardChunkPromise, PoolsAndCheckpoints) {
  Case c = named(GetParam());
  c.B = 1, c.lengths = {130, 64, 0, 256, 63}, c.tail = 3;
  const Inputs in(c);
  const Tensor slots(KDA_I32, {5, 3}, {5, -1, 0, 3, 6, 13, 7, 8, 9, 10, 11, 12, 1, 2, 4});
  const auto args = [&](const Pool& pool, const Tensor& o, const Tensor& checkpoints) {
    const kda_decode_args decode = decode_args(in, pool, pool, o);
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = decode.in, a.states = decode.states, a.o = o;
    a.states.first_valid_slot = static_cast<int32_t>(pool.slots[1]) + 1;
    a.checkpoints = checkpoints, a.checkpoint_slots = slots, a.checkpoint_every = 64;
    return a;
  };
  const Pool exact(in, KDA_F64);
  const Tensor exact_o(KDA_F64, {1, in.T, c.HV, c.V}), exact_checkpoints(KDA_F64, in.state_shape(15));
  run(args(exact, exact_o, exact_checkpoints), {.impl = "reference"});
  const Tensor probe(c.dtype, {1, in.T, c.HV, c.V}), probe_checkpoints(KDA_F32, in.state_shape(15));
  for (const char* impl : chunked(args(Pool(in, c.state_dtype), probe, probe_checkpoints))) {
    SCOPED_TRACE(impl);
    const Pool got(in, c.state_dtype);
    const Tensor o(c.dtype, {1, in.T, c.HV, c.V}), checkpoints(KDA_F32, in.state_shape(15));
    run_on_cuda(args(got, o, checkpoints), impl);
    expect_close(exact_o, o, "o", kGate);
    expect_close(exact.h, got.h, "pool", kGate);
    expect_close(exact_checkpoints, checkpoints, "checkpoints", kGate);
  }
}

// Every implementation that needs a workspace checks it: segments need one for their maps, pairs for the states of
// heads they share, cuda_prefill_chunk for its images.
TEST_F(OnCuda, ForwardChecksItsWorkspace) {
  Case c = wide({.name = "workspace", .T = 700, .H = 3, .HV = 3, .dtype = KDA_BF16});
  const Inputs in(c);
  const ForwardOutputs out(in, false);
  int checked = 0;
  for (const char* impl : chunked(forward_args(in, out))) {
    SCOPED_TRACE(impl);
    kda_forward_args args = on_device(forward_args(in, out));
    uint64_t bytes = 0;
    args.exec.impl = impl;
    ASSERT_EQ(query(args, &bytes), KDA_OK) << kda_last_error();
    if (bytes) expect_workspace_is_checked(forward_args(in, out), impl), ++checked;
  }
  EXPECT_GT(checked, 0);
}

// On Blackwell its own kernel, which nobody has run on a GPU, has to be asked for.
TEST_F(OnCuda, BlackwellIsAskedFor) {
  cudaDeviceProp device;
  ASSERT_EQ(cudaGetDeviceProperties(&device, 0), cudaSuccess);
  if (device.major != 10 || device.minor != 0) GTEST_SKIP() << "the device is no Blackwell";
  const Inputs in(wide({.name = "asked", .T = 70, .dtype = KDA_BF16}));
  const Inputs few(wide({.name = "few", .T = 8192, .dtype = KDA_BF16}));  // heads
  const Inputs half(wide({.name = "half", .T = 70, .dtype = KDA_F16, .g_dtype = KDA_F16}));
  const auto told = [](const Inputs& inputs, uint32_t flags) {
    const ForwardOutputs out(inputs, false);
    kda_forward_args args = on_device(forward_args(inputs, out));
    args.exec.flags = flags;
    const char* text = "";
    EXPECT_EQ(explain(args, &text), KDA_OK) << kda_last_error();
    return std::string(text);
  };
  for (const char* wanted : {"", "0", "1"}) {
    const EnvironmentVariable variable("KDA_BLACKWELL", wanted);
    const auto expect_told = [&](const std::string& all, const char* name) {
      EXPECT_EQ(all.find(std::string("* ") + name + ": ") != std::string::npos, std::string(wanted) == "1") << all;
      EXPECT_NE(all.find("emulated, never run on a GPU"), std::string::npos) << all;
    };
    expect_told(told(in, 0), "cuda_blackwell_prefill");
    expect_told(told(few, 0), "cuda_blackwell_prefill_segments");
    expect_told(told(few, KDA_BATCH_INVARIANT), "cuda_blackwell_prefill");
    EXPECT_NE(told(half, 0).find("* cuda_prefill_chunk: "), std::string::npos);  // scores are too rough for f16
  }
}

class ForwardChunkChoice : public OnCuda {
 protected:
  void SetUp() override {
    OnCuda::SetUp();
    cudaDeviceProp device;
    if (IsSkipped()) return;
    ASSERT_EQ(cudaGetDeviceProperties(&device, 0), cudaSuccess);
    if (device.major != 9 || device.multiProcessorCount < 64) GTEST_SKIP() << "the device is no Hopper";
  }
  // The implementation that would run, as kda_forward_explain says.
  static std::string chosen(const Case& c, uint32_t flags = 0) {
    const Inputs in(wide(c));
    const ForwardOutputs out(in, false);
    kda_forward_args args = on_device(forward_args(in, out));
    args.exec.flags = flags;
    const char* text = "";
    EXPECT_EQ(explain(args, &text), KDA_OK) << kda_last_error();
    const std::string all = text, from = all.substr(all.find("* ") + 2);
    return from.substr(0, from.find('\n'));
  }
  static std::string chosen_name(const Case& c, uint32_t flags = 0) {
    const std::string line = chosen(c, flags);
    return line.substr(0, line.find(':'));
  }
};

// Few long heads are cut into segments, but not where bits may depend on nothing but the sequence.
TEST_F(ForwardChunkChoice, Segments) {
  const auto name = [](int64_t T, uint32_t flags) {
    return chosen_name({.T = T, .H = 2, .HV = 2, .dtype = KDA_BF16}, flags);
  };
  EXPECT_EQ(name(4096, 0), "cuda_hopper_prefill_segments");
  EXPECT_EQ(name(4096, KDA_BATCH_INVARIANT), "cuda_hopper_prefill_pairs");
  EXPECT_EQ(name(100, 0), "cuda_hopper_prefill_pairs");
}

// Scores of CTA pairs have factors in bf16, which is too rough for f16.
TEST_F(ForwardChunkChoice, Float16) {
  for (const int64_t T : {100, 4096})
    EXPECT_EQ(chosen_name({.T = T, .H = 2, .HV = 2, .dtype = KDA_F16, .g_dtype = KDA_F16}), "cuda_prefill_chunk");
}

TEST_F(ForwardChunkChoice, ExplainSaysWhichScores) {
  for (const int64_t T : {100, 4096}) {
    Case c{.T = T, .H = 2, .HV = 2, .dtype = KDA_BF16, .g_dtype = KDA_BF16};
    EXPECT_NE(chosen(c).find("exact for any gate"), std::string::npos) << chosen(c);
    c.gate_form = KDA_GATE_LOWER_BOUND, c.gates = Gates::kRaw, c.A_log = true;
    for (const float bound : {-5.0f, -6.0f}) {
      c.lower_bound = bound;
      EXPECT_EQ(chosen(c).find("one anchor") != std::string::npos, bound == -5) << chosen(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardChunkPromise,
                         testing::Values("bound_heads", "softplus_heads", "bound_f16", "wild", "log_slow",
                                         "K64_V64_bound_heads", "K64_V64_softplus_heads", "K64_V64_wild"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace kda::test
