// Calls whose sizes no memory bounds: strides of 0 and empty tensors. No size wraps, and no call runs for longer than
// it has something to do. Also, how many threads a call starts, whatever it asks for.
#include <chrono>
#include <cstdlib>
#include <locale>

#include "contract.h"
#include "environment_variable.h"

namespace kda::test {
namespace {

constexpr double kSeconds = 150;  // 46 were seen, sanitized on a busy machine: what these tests are about took years

// A tensor of any shape over the same few elements.
kda_tensor everywhere(int32_t dtype, std::initializer_list<int64_t> shape) {
  alignas(64) static char zeros[8192] = {};
  kda_tensor t{zeros, dtype, static_cast<int32_t>(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), t.shape);
  t.stride[t.ndim - 1] = 1;
  return t;
}

kda_inputs inputs(int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V) {
  kda_inputs in{};
  in.q = in.k = everywhere(KDA_F32, {B, T, H, K}), in.v = everywhere(KDA_F32, {B, T, HV, V});
  in.g = everywhere(KDA_F32, {B, T, HV, K}), in.beta = everywhere(KDA_F32, {B, T, HV});
  in.beta.stride[2] = 0;
  return in;
}

kda_backward_args backward_of(int64_t T, int64_t K) {
  kda_backward_args a = KDA_BACKWARD_ARGS_INIT;
  a.in = inputs(1, T, 1, 1, K, K);
  a.d_o = a.in.v;
  a.in.gate_form = KDA_GATE_SOFTPLUS;
  a.in.A_log = everywhere(KDA_F32, {1});
  return a;
}

template <class Args>
double seconds_of(const Args& args, kda_status expected = KDA_OK) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(call(&args), expected) << kda_last_error();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class Args>
void returns_at_once(Args args) {
  const char* text = "";
  ASSERT_EQ(explain(args, &text), KDA_OK) << kda_last_error();
  for (int i = 0; const char* impl = kda_implementation(op_name<Args>(), i); ++i) {
    if (!why_not(args, impl).empty()) continue;
    args.exec.impl = impl;
    uint64_t bytes = 0;
    ASSERT_EQ(query(args, &bytes), KDA_OK) << kda_last_error();
    const Workspace workspace(bytes);
    args.exec.workspace = bytes ? workspace.data() : nullptr, args.exec.workspace_bytes = bytes;
    const Args* given = &args;
    EXPECT_LT(seconds_of(*given), kSeconds) << op_name<Args>() << " by " << impl;
  }
}

// ---- sizes ----

TEST(Sizes, NoWorkspaceWraps) {
  float dA_log;
  uint64_t last = 0;
  for (int64_t T = 64; T <= int64_t{1} << 40; T *= 4) {
    kda_backward_args a = backward_of(T, 256);
    a.dA_log = {&dA_log, KDA_F32, 1, {1}, {1}};
    uint64_t bytes = 0;
    ASSERT_EQ(query(a, &bytes), KDA_OK) << kda_last_error();
    EXPECT_GT(bytes, last) << T;
    const double growth = static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(last, 1));
    EXPECT_NEAR(last > 1 << 30 ? growth : 4, 4, 0.1) << T;
    last = bytes;
  }
  EXPECT_LT(last, uint64_t{1} << 63);
}

template <class Args>
void refuses_size(const Args& args, const std::string& sentence) {
  uint64_t bytes = 0;
  EXPECT_EQ(query(args, &bytes), KDA_INVALID_ARGUMENT) << op_name<Args>() << ": " << bytes;
  const std::string got = kda_last_error();
  EXPECT_EQ(got.substr(0, sentence.size()), sentence) << op_name<Args>() << ": " << got;
}

TEST(Sizes, BeyondAllMemoryAreRefused) {
  constexpr int64_t kTokens = 10'000'000'000'000'000;  // 10^16
  const std::string sentence = "q: expected B T HV and N HV of at most 2^40, got B = 1, T = 10000000000000000";
  refuses_size(backward_of(kTokens, 128), sentence);
  kda_segment_map_args map = KDA_SEGMENT_MAP_ARGS_INIT;
  map.in = inputs(1, kTokens, 1, 1, 16, 16);
  refuses_size(map, sentence);
  kda_forward_args forward = KDA_FORWARD_ARGS_INIT;
  forward.in = inputs(INT64_MAX, INT64_MAX, 1, INT64_MAX, 16, 16);
  EXPECT_NE(kda_forward(&forward), KDA_OK);
  forward.in = inputs(0, INT64_MAX, 1, 2, 16, 16), forward.o = forward.in.v;
  refuses_size(forward, "q: expected B T HV and N HV of at most 2^40, got B = 0, T = 9223372036854775807");
  kda_gate_args gate = KDA_GATE_ARGS_INIT;
  gate.x = gate.g = everywhere(KDA_F32, {0, INT64_MAX, 16}), gate.gate_form = KDA_GATE_LOWER_BOUND;
  refuses_size(gate, "x: expected M HV of at most 2^40");
  kda_norm_gate_args norm = KDA_NORM_GATE_ARGS_INIT;
  norm.x = norm.y = everywhere(KDA_F32, {0, INT64_MAX, 2, 16});
  refuses_size(norm, "x: expected B T HV of at most 2^40");
  kda_conv_args conv = KDA_CONV_ARGS_INIT;
  conv.x = conv.y = everywhere(KDA_F32, {0, INT64_MAX, 16}), conv.weight = everywhere(KDA_F32, {16, 4});
  refuses_size(conv, "x: expected B T D and N D of at most 2^48");
  kda_prefill_f32_args prefill = KDA_PREFILL_F32_ARGS_INIT;
  prefill.q = prefill.k = prefill.v = prefill.g = everywhere(KDA_F32, {1, 1, kTokens, 16});
  prefill.beta = everywhere(KDA_F32, {1, 1, kTokens});
  refuses_size(prefill, sentence);
  kda_stage_cumsum_args cumsum = KDA_STAGE_CUMSUM_ARGS_INIT;
  cumsum.g = cumsum.G = everywhere(KDA_F32, {1, kTokens, 1, 16});
  refuses_size(cumsum, "g: expected B T HV and N HV of at most 2^40");
  kda_decode_args decode = KDA_DECODE_ARGS_INIT;
  decode.conv.x = everywhere(KDA_F32, {1, kTokens, INT64_MAX / 2});
  decode.in.g = everywhere(KDA_F32, {1, kTokens, INT64_MAX / 2, 16});
  decode.o = everywhere(KDA_F32, {1, kTokens, INT64_MAX / 2, 16});
  EXPECT_EQ(kda_decode(&decode), KDA_INVALID_ARGUMENT);
}

// Strides that must not be multiplied.
TEST(Sizes, StridesOfAnySize) {
  for (const int64_t stride : {INT64_MAX, INT64_MIN, INT64_MIN + 1, int64_t{1} << 61}) {
    Legal<kda_forward_args> x;
    x.args.in.q.stride[0] = stride;  // of the only row: without meaning
    const Workspace workspace = workspace_for(x.args);
    EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
    x.args.in.q.stride[1] = stride;
    EXPECT_EQ(call(x.args), KDA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(kda_last_error()).rfind("q: expected an extent below 2^61 bytes", 0), 0u) << kda_last_error();
  }
}

// ---- nothing to do ----

TEST(NothingToDo, ReturnsAtOnce) {
  constexpr int64_t kHeads = int64_t{1} << 40;
  for (const auto& [B, HV] :
       {std::pair{int64_t{1}, kHeads}, {kHeads, int64_t{1}}, {int64_t{1} << 20, int64_t{1} << 20}}) {
    kda_forward_args forward = KDA_FORWARD_ARGS_INIT;
    forward.in = inputs(B, 0, 1, HV, 16, 16), forward.o = forward.in.v;
    returns_at_once(forward);
    kda_decode_args decode = KDA_DECODE_ARGS_INIT;
    decode.in = forward.in, decode.o = forward.o;
    returns_at_once(decode);
    kda_backward_args backward = KDA_BACKWARD_ARGS_INIT;
    backward.in = forward.in, backward.d_o = forward.o;
    backward.dq = backward.dk = forward.in.q, backward.dv = forward.o, backward.dg = forward.in.g;
    returns_at_once(backward);
    kda_segment_map_args map = KDA_SEGMENT_MAP_ARGS_INIT;
    map.in = forward.in;
    returns_at_once(map);
    kda_stage_cumsum_args cumsum = KDA_STAGE_CUMSUM_ARGS_INIT;
    cumsum.g = cumsum.G = forward.in.g;
    returns_at_once(cumsum);
    kda_prefill_f32_args prefill = KDA_PREFILL_F32_ARGS_INIT;
    prefill.q = prefill.k = everywhere(KDA_F32, {B, 1, 0, 16});
    prefill.v = prefill.g = prefill.o = everywhere(KDA_F32, {B, HV, 0, 16});
    prefill.beta = everywhere(KDA_F32, {B, HV, 0});
    returns_at_once(prefill);
    kda_gate_args gate = KDA_GATE_ARGS_INIT;
    gate.x = gate.g = everywhere(KDA_F32, {0, HV, 16}), gate.gate_form = KDA_GATE_LOWER_BOUND, gate.lower_bound = -5;
    returns_at_once(gate);
    kda_gate_backward_args gate_backward = KDA_GATE_BACKWARD_ARGS_INIT;
    gate_backward.x = gate_backward.dg = gate_backward.dx = gate.x;
    gate_backward.gate_form = KDA_GATE_LOWER_BOUND, gate_backward.lower_bound = -5;
    returns_at_once(gate_backward);
    kda_norm_gate_args norm = KDA_NORM_GATE_ARGS_INIT;
    norm.x = norm.y = everywhere(KDA_F32, {B, 0, HV, 16});
    returns_at_once(norm);
    kda_norm_gate_backward_args norm_backward = KDA_NORM_GATE_BACKWARD_ARGS_INIT;
    norm_backward.x = norm_backward.dy = norm_backward.dx = norm.x;
    returns_at_once(norm_backward);
    kda_conv_args conv = KDA_CONV_ARGS_INIT;
    conv.x = conv.y = everywhere(KDA_F32, {B, 0, HV}), conv.weight = everywhere(KDA_F32, {HV, 4});
    returns_at_once(conv);
    kda_conv_backward_args conv_backward = KDA_CONV_BACKWARD_ARGS_INIT;
    conv_backward.x = conv_backward.dy = conv_backward.dx = conv.x, conv_backward.weight = conv.weight;
    returns_at_once(conv_backward);
  }
}

// Many sequences, all without tokens: the tokens belong to none of them, and their outputs are zeroed.
TEST(NothingToDo, EmptySequences) {
  Tensor o(KDA_F32, {1, 3, 1, 16}), cu_seqlens(KDA_I32, {1 << 20});
  cu_seqlens.fill(0);
  float dA_log;
  kda_forward_args forward = KDA_FORWARD_ARGS_INIT;
  forward.in = inputs(1, 3, 1, 1, 16, 16), forward.o = o;
  forward.in.cu_seqlens = cu_seqlens;
  returns_at_once(forward);
  for (int64_t i = 0; i < o.size(); ++i) EXPECT_EQ(o.get(i), 0);
  kda_backward_args backward = backward_of(3, 16);
  backward.in.cu_seqlens = forward.in.cu_seqlens;
  backward.dA_log = {&dA_log, KDA_F32, 1, {1}, {1}};
  returns_at_once(backward);
  EXPECT_EQ(dA_log, 0);
  forward.in.cu_seqlens.shape[0] = int64_t{1} << 40;
  EXPECT_EQ(kda_forward(&forward), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "cu_seqlens: expected at most 2^31 - 1 sequences, got 1099511627775");
}

// Indices into a pool of more slots than there is memory for, all different or not.
TEST(NothingToDo, PoolsOfAnySize) {
  for (const int64_t N : {3, 32, 33, 5000}) {
    Tensor o(KDA_F32, {N, 1, 1, 16}), indices(KDA_I32, {N});
    for (int64_t n = 0; n < N; ++n) indices.set(n, static_cast<double>((n * 400'009 + 17) % INT32_MAX));
    kda_verify_args a = KDA_VERIFY_ARGS_INIT;  // its slots all differ, though it writes none
    a.in = inputs(N, 1, 1, 1, 16, 16), a.o = o;
    a.states.h0 = everywhere(KDA_F32, {int64_t{1} << 45, 1, 16, 16}), a.states.state_indices = indices;
    returns_at_once(a);
    if (N < 2) continue;
    const double slot = indices.get(0);
    indices.set(N - 1, slot);
    EXPECT_LT(seconds_of(a, KDA_INVALID_ARGUMENT), kSeconds);
    EXPECT_STREQ(kda_last_error(), "state_indices: expected every live slot once, got slot 17 twice");
    a.states.first_valid_slot = 18;  // both are padding
    returns_at_once(a);
    a.states.state_indices.stride[0] = 0, a.states.first_valid_slot = 0;
    EXPECT_EQ(call(&static_cast<const kda_verify_args&>(a)), KDA_INVALID_ARGUMENT);
  }
}

// ---- threads ----

TEST(Threads, NoMoreThanThereIsWork) {
  Tensor o(KDA_F32, {1, 1, 1, 128});
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = inputs(1, 1, 1, 1, 128, 128), a.o = o;
  uint64_t one = 0;
  a.exec.num_threads = 1;
  ASSERT_EQ(query(a, &one), KDA_OK);
  for (const int32_t threads : {2, 1000, 40000, INT32_MAX}) {
    uint64_t bytes = 0;
    a.exec.num_threads = threads;
    ASSERT_EQ(query(a, &bytes), KDA_OK);
    EXPECT_EQ(bytes, one) << threads;
    returns_at_once(a);
  }
}

template <class Args>
struct Threads : testing::Test {};
using SomeArgs = testing::Types<kda_forward_args, kda_backward_args, kda_decode_args, kda_verify_args, kda_flush_args,
                                kda_flush_verify_args, kda_gate_args, kda_gate_backward_args, kda_segment_map_args,
                                kda_segment_merge_args, kda_stage_chunk_intra_args, kda_stage_delta_h_args,
                                kda_stage_bwd_wy_dqkg_args, kda_prefill_f32_args, kda_norm_gate_args,
                                kda_norm_gate_backward_args, kda_conv_args, kda_conv_backward_args>;
TYPED_TEST_SUITE(Threads, SomeArgs, OperatorNames);

// A call may ask for more threads than the machine could start, which would end the process.
TYPED_TEST(Threads, WhateverIsAsked) {
  Case c = legal_case();
  c.HV = 128, c.lengths = {2, 0, 5};
  uint64_t of_one = 0, of_many = 0;
  std::string expected;
  for (const int32_t threads : {1, 40000}) {
    Legal<TypeParam> x(c);
    x.args.exec.num_threads = threads;
    ASSERT_EQ(query(x.args, threads == 1 ? &of_one : &of_many), KDA_OK);
    const Workspace workspace = workspace_for(x.args);
    ASSERT_EQ(call(x.args), KDA_OK) << kda_last_error();
    std::string bits;
    for (const Tensor* t : x.outputs()) bits += t->bits().bytes;
    if (threads == 1) expected = bits;
    EXPECT_EQ(bits, expected);
  }
  EXPECT_LE(of_many, 70 * std::max<uint64_t>(of_one, 1));
}

// ---- sentences ----

TEST(Sentences, HaveNoDigitsGrouped) {
  struct Groups : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
    char do_decimal_point() const override { return ','; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new Groups));
  Legal<kda_forward_args> x;
  x.args.in.k.shape[1] = 1234567;
  EXPECT_EQ(call(x.args), KDA_INVALID_ARGUMENT);
  const std::string shape = kda_last_error();
  x.args.in.k.shape[1] = x.args.in.q.shape[1];
  x.args.in.gate_form = KDA_GATE_LOWER_BOUND, x.args.in.lower_bound = 12345.5f;
  EXPECT_EQ(call(x.args), KDA_INVALID_ARGUMENT);
  const std::string number = kda_last_error();
  std::locale::global(before);
  EXPECT_NE(shape.find("got [1,1234567,1,5]"), std::string::npos) << shape;
  EXPECT_EQ(number, "lower_bound: expected a finite number < 0, got 12345.5");
}

TEST(Sentences, OfNamesThatAreNoText) {
  Legal<kda_forward_args> x;
  x.args.exec.impl = "\xff\n\xc3\xa9z";
  EXPECT_EQ(call(x.args), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find(R"(, got \xff\x0a\xc3\xa9z)"), std::string::npos) << kda_last_error();
  x.args.exec.impl = nullptr;
  const EnvironmentVariable variable("KDA_IMPL", "\x80");
  EXPECT_EQ(call(x.args), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), R"(KDA_IMPL: expected names of implementations, got \x80)");
}

#if !defined(__SANITIZE_ADDRESS__)  // it ends the process itself
TEST(Sentences, OfMemoryThatIsNotThere) {
  float dA_log;
  kda_backward_args a = backward_of(int64_t{1} << 40, 256);  // more than there are addresses
  a.dA_log = {&dA_log, KDA_F32, 1, {1}, {1}};
  a.exec.impl = "reference";
  EXPECT_EQ(kda_backward(&a), KDA_OUT_OF_MEMORY);
  EXPECT_STREQ(
      kda_last_error(),
      "memory: expected enough for kda_backward by reference with B = 1, T = 1099511627776, N = 1, H = 1, HV = 1, "
      "K = 256, V = 256, got none");
}
#endif

}  // namespace
}  // namespace kda::test
