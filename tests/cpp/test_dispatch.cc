// Which implementation runs: forced by exec.impl, forced by KDA_IMPL, or the first that takes the call. kda_*_explain
// says so, and the oracle's bits (float64 rounded once) tell it from the others.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "environment_variable.h"
#include "norm_calls.h"
#include "speculation_calls.h"

namespace kda::test {
namespace {

struct Dispatch : testing::Test {
  Dispatch()
      : in(find_case("softplus")),
        forward(in, false),
        backward(in),
        pool(in, KDA_F32),
        o(KDA_F32, {in.B, in.T, in.c.HV, in.c.V}),
        segment(in),
        merge(2, 1, 4, 4, KDA_STATE_V_FIRST),
        gate(in, KDA_F32),
        norm(find_norm_case("V_7")),
        norm_out(norm),
        drafts(find_speculation_case("softplus")),
        records(drafts),
        last(drafts),
        drafts_o(drafts.output()) {}

  template <class F>
  void each(F f) {
    f("forward", forward_args(in, forward));
    f("backward", backward_args(in, backward));
    f("decode", decode_args(in, pool, pool, o));
    f("segment_map", segment_map_args(in, segment));
    f("segment_merge", segment_merge_args(merge));
    f("verify", verify_args(drafts, records, drafts_o));
    f("flush", flush_args(drafts, drafts.pool.h, records));
    f("flush_verify", flush_verify_args(drafts, drafts, drafts.pool.h, last, records, drafts_o));
    f("gate", gate_args(in, gate));
    f("gate_backward", gate_backward_args(in, gate));
    f("norm_gate", norm_gate_args(norm, norm_out));
    f("norm_gate_backward", norm_gate_backward_args(norm, norm_out));
  }
  Bits forward_bits(const char* impl) {
    run(forward_args(in, forward), {.impl = impl});
    return forward.o.bits();
  }

  Inputs in;
  ForwardOutputs forward;
  BackwardOutputs backward;
  Pool pool;
  Tensor o;
  SegmentOutputs segment;
  MergeTensors merge;
  GateTensors gate;
  NormInputs norm;
  NormOutputs norm_out;
  Drafts drafts;
  Records records, last;
  Tensor drafts_o;
};

// What other tests rely on when they force a name.
TEST_F(Dispatch, check_implementation) {
  each([](const char* op, auto args) {
    for (int32_t i = 0; const char* name = kda_implementation(op, i); ++i) {
      const bool on_cpu = std::string(name).starts_with("cpu_") || std::string(name) == "reference";
      if (!on_cpu) continue;  // its memory is elsewhere
      args.exec.impl = name;
      const std::string text = explanation(args);
      EXPECT_EQ(chosen(text), name) << text;
      EXPECT_EQ(text.find("\n* "), text.find(std::string("\n* ") + name)) << text;
      for (int32_t j = 0; const char* other = kda_implementation(op, j); ++j)
        EXPECT_EQ(text.find(std::string("- ") + other + ": ") != std::string::npos, j != i) << text;
    }
  });
}

TEST_F(Dispatch, ForcedOneRuns) {
  const Bits reference = forward_bits("reference");
  EXPECT_NE(forward_bits("cpu_chunk"), reference);
  EXPECT_NE(forward_bits("cpu_recurrent"), reference);
  EXPECT_NE(forward_bits("cpu_chunk"), forward_bits("cpu_recurrent"));
}

TEST_F(Dispatch, FirstThatCanWithoutAName) {
  each([](const char* op, const auto& args) {
    const std::string text = explanation(args);
    const std::string first = cpu_implementations(op).front();
    EXPECT_EQ(chosen(text), first) << text;
    EXPECT_NE(text.find("- reference: supported, but an earlier one was chosen [src/reference/"), std::string::npos)
        << text;
  });
}

TEST_F(Dispatch, EnvironmentForces) {
  const Bits free = forward_bits(nullptr), reference = forward_bits("reference");
  const EnvironmentVariable variable("KDA_IMPL", "reference");
  each([](const char*, const auto& args) { EXPECT_EQ(chosen(explanation(args)), "reference"); });
  EXPECT_EQ(forward_bits(nullptr), reference);
  EXPECT_NE(forward_bits(nullptr), free);
}

// Reading it in every call would race with a thread that sets a variable.
TEST_F(Dispatch, EnvironmentIsReadOnce) {
  const EnvironmentVariable variable("KDA_IMPL", "reference");
  setenv("KDA_IMPL", "cpu_recurrent", 1);
  EXPECT_EQ(chosen(explanation(forward_args(in, forward))), "reference");
  EXPECT_EQ(kda_read_environment(), KDA_OK);
  EXPECT_EQ(chosen(explanation(forward_args(in, forward))), "cpu_recurrent");
}

TEST_F(Dispatch, EnvironmentTakesAList) {
  const EnvironmentVariable variable("KDA_IMPL", "cpu_recurrent,reference");
  EXPECT_EQ(chosen(explanation(forward_args(in, forward))), "cpu_recurrent");
  EXPECT_EQ(chosen(explanation(decode_args(in, pool, pool, o))), "cpu_recurrent");
  EXPECT_EQ(chosen(explanation(backward_args(in, backward))), "reference");
  EXPECT_EQ(chosen(explanation(gate_args(in, gate))), "reference");
  const Bits bits = forward_bits(nullptr);
  EXPECT_EQ(bits, forward_bits("cpu_recurrent"));
}

TEST_F(Dispatch, EnvironmentLeavesOtherOperatorsAlone) {
  const EnvironmentVariable variable("KDA_IMPL", "cpu_gate");
  EXPECT_EQ(chosen(explanation(gate_args(in, gate))), "cpu_gate");
  EXPECT_EQ(chosen(explanation(forward_args(in, forward))), cpu_implementations("forward").front());
}

TEST_F(Dispatch, ArgumentBeatsEnvironment) {
  const EnvironmentVariable variable("KDA_IMPL", "reference");
  kda_forward_args args = forward_args(in, forward);
  args.exec.impl = "cpu_recurrent";
  EXPECT_EQ(chosen(explanation(args)), "cpu_recurrent");
}

TEST_F(Dispatch, EmptyNamesForceNothing) {
  const EnvironmentVariable variable("KDA_IMPL", "");
  kda_forward_args args = forward_args(in, forward);
  args.exec.impl = "";
  EXPECT_EQ(chosen(explanation(args)), cpu_implementations("forward").front());
}

TEST_F(Dispatch, EnvironmentWithAnUnknownName) {
  for (const char* value : {"cpu_chunky", "reference,cpu_chunky", "cpu_chunky,reference", "cpu_chunk reference"}) {
    const EnvironmentVariable variable("KDA_IMPL", value);
    each([&](const char*, const auto& args) {
      EXPECT_EQ(call(args), KDA_INVALID_ARGUMENT) << value;
      const std::string error = kda_last_error();
      EXPECT_NE(error.find("KDA_IMPL: expected names of implementations, got cpu_chunk"), std::string::npos) << error;
    });
  }
  for (const auto& [name, t] : forward.tensors()) EXPECT_TRUE(!*t || t->untouched()) << name;
}

TEST_F(Dispatch, UnknownOrForeignNameInTheArgument) {
  each([](const char* op, auto args) {
    args.exec.impl = std::string(op).starts_with("gate") ? "cpu_chunk" : "cpu_gate";  // of another operator
    EXPECT_EQ(call(args), KDA_INVALID_ARGUMENT);
    const std::string error = kda_last_error();
    EXPECT_EQ(error.rfind("exec.impl: expected one of ", 0), 0u) << error;
    EXPECT_NE(error.find(cpu_implementations(op).front()), std::string::npos) << error;
    EXPECT_NE(error.find(std::string(", got ") + args.exec.impl), std::string::npos) << error;
  });
}

// In a process of its own: the name is read once.
TEST(Isa, GuardedTensorsEndAtAClosedPage) {
  if (!Memory::guarded()) GTEST_SKIP() << "KDA_TEST_GUARD is not set";
  const Tensor t(KDA_BF16, {3, 7}, Layout::kPadded);
  const volatile char* behind = static_cast<const char*>(t.view().data) + 2 * (2 * t.view().stride[0] + 7);
  EXPECT_EQ(behind[-1], '\xff');
  EXPECT_EXIT(std::exit(*behind), testing::KilledBySignal(SIGSEGV), "");
}

TEST(Isa, GarbageIsRefused) {
  const char* name = std::getenv("KDA_CPU_ISA");
  if (!name || std::strcmp(name, "garbage")) GTEST_SKIP() << "KDA_CPU_ISA is not garbage";
  const char* sentence = "KDA_CPU_ISA: expected one of avx512, avx2, sse4, baseline, got garbage";
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(kda_info(), nullptr);
    EXPECT_STREQ(kda_last_error(), sentence);
    const Inputs in(find_case("gva_2"));
    ForwardOutputs out(in, false);
    kda_forward_args args = forward_args(in, out);
    for (const char* impl : {static_cast<const char*>(nullptr), "reference"}) {
      args.exec.impl = impl;
      EXPECT_EQ(call(args), KDA_INVALID_ARGUMENT);
      EXPECT_STREQ(kda_last_error(), sentence);
    }
  }
}

// The instruction set asked for is the one in use, unless the machine has only lesser ones: otherwise the reruns
// under KDA_CPU_ISA would test nothing.
TEST(Isa, IsTheOneAskedFor) {
  const char* wanted = std::getenv("KDA_CPU_ISA");
  const std::string info = kda_info(), line = info.substr(info.find("cpu: ") + 5);
  const std::string used = line.substr(0, line.find(' '));
  const std::vector<std::string> order = {"baseline", "sse4", "avx2", "avx512"};
  const auto rank = [&](const std::string& name) {
    return std::find(order.begin(), order.end(), name) - order.begin();
  };
  ASSERT_LT(rank(used), 4) << info;
  if (!wanted) GTEST_SKIP() << "KDA_CPU_ISA is not set; in use: " << used;
  ASSERT_LT(rank(wanted), 4) << wanted;
  ASSERT_LE(rank(used), rank(wanted)) << info;
  if (used != wanted) GTEST_SKIP() << "this machine has no " << wanted << ", only " << used;
}

}  // namespace
}  // namespace kda::test
