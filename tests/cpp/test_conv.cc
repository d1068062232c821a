// The causal convolution: numbers against the float64 oracle, the oracle against its definition, and the promises.
#include <cmath>
#include <limits>

#include "contract.h"

namespace kda::test {
namespace {

// Everything is computed in f32; what is kept in 16 bits is rounded once (math.md 8, the gate's row).
// A `large` x loses as many digits again where products cancel.

auto on(const char* impl) {
  return [impl](const auto& a) { run(a, {.impl = impl}); };
}

class Conv : public testing::TestWithParam<ConvCase> {
 protected:
  Conv() : c(GetParam()), in(c) {}
  const ConvCase c;
  const ConvInputs in;
};

TEST_P(Conv, Forward) {
  ConvOutputs reference(in, true), out(in);
  run(conv_args(in, reference), {.impl = "reference"});
  run(conv_args(in, out), {.impl = "cpu_conv"});
  if (!HasFatalFailure()) expect_conv_close(c, reference.tensors(), out.tensors());
}

TEST_P(Conv, Backward) {
  ConvGradientOutputs reference(in, true), out(in);
  run(conv_backward_args(in, reference), {.impl = "reference"});
  run(conv_backward_args(in, out), {.impl = "cpu_conv"});
  if (!HasFatalFailure()) expect_conv_close(c, reference.tensors(), out.tensors());
}

TEST_P(Conv, OneGradientAtATime) {
  expect_each_alone([&] { return ConvGradientOutputs(in); },
                    [&](const auto& out) { run(conv_backward_args(in, out), {.impl = "cpu_conv"}); });
}

// The final state is the last rows of state ++ x, to the bit where the dtypes are the same.
TEST_P(Conv, FinalState) {
  if (c.dtype != c.state_dtype) GTEST_SKIP() << "the state is rounded";
  ConvOutputs out(in);
  run(conv_args(in, out), {.impl = "cpu_conv"});
  const int64_t keep = c.W - 1;
  for (int64_t n = 0; n < in.N; ++n)
    for (int64_t d = 0; d < c.D; ++d)
      for (int64_t i = 0; i < keep; ++i) {
        const int64_t t = in.length(n) + i - keep, row = in.cu_seqlens ? in.begin(n) : n * in.T;
        const double old = c.state && t < 0 ? in.state.get((n * c.D + d) * keep + keep + t) : 0;
        ASSERT_EQ(out.final_state.get((n * c.D + d) * keep + i), t < 0 ? old : in.x.get((row + t) * c.D + d))
            << n << " " << d << " " << i;
      }
}

std::string conv_name(const testing::TestParamInfo<ConvCase>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(All, Conv, testing::ValuesIn(conv_cases()), conv_name);

// ---- the oracle ----

TEST(ConvOracle, OneChannelByHand) {  // xx = 1 2 | 3 4,  y = 0.5 + (1, 10, 100) . (xx_t, xx_(t+1), xx_(t+2))
  const Tensor x(KDA_F64, {1, 2, 1}, {3, 4}), weight(KDA_F64, {1, 3}, {1, 10, 100}), bias(KDA_F64, {1}, {0.5});
  const Tensor state(KDA_F64, {1, 1, 2}, {1, 2}), y(KDA_F64, {1, 2, 1}), last(KDA_F64, {1, 1, 2});
  kda_conv_args a = KDA_CONV_ARGS_INIT;
  a.x = x, a.weight = weight, a.bias = bias, a.initial_state = state, a.final_state = last, a.y = y;
  run(a, {.impl = "reference"});
  EXPECT_EQ(y.values(), (std::vector<double>{321.5, 432.5}));
  EXPECT_EQ(last.values(), (std::vector<double>{3, 4}));
  a.silu = 1, a.x.shape[1] = a.y.shape[1] = 1;
  const_cast<Tensor&>(bias).set(0, -321 + 0.7);
  run(a, {.impl = "reference"});
  EXPECT_NEAR(y.get(0), 0.7 / (1 + std::exp(-0.7)), 1e-12);
  EXPECT_EQ(last.values(), (std::vector<double>{2, 3}));
}

// Gradients equal differences of the loss sum(dy y) + sum(d_final final).
TEST(ConvOracle, GradientsAreDifferences) {
  for (const char* name : {"packed_W2", "packed_W3", "packed_W4", "no_silu"}) {
    ConvCase c = find_conv_case(name);
    c.D = 2, c.dtype = c.weight_dtype = c.state_dtype = KDA_F64;
    ConvInputs in(c);
    const auto loss = [&] {
      ConvOutputs out(in, true);
      run(conv_args(in, out), {.impl = "reference"});
      const int64_t owned = (in.cu_seqlens ? in.T - c.tail : in.B * in.T) * c.D;
      double sum = 0;
      for (int64_t i = 0; i < owned; ++i) sum += in.dy.get(i) * out.y.get(i);
      for (int64_t i = 0; i < in.d_final.size(); ++i) sum += in.d_final.get(i) * out.final_state.get(i);
      return sum;
    };
    ConvGradientOutputs out(in, true);
    run(conv_backward_args(in, out), {.impl = "reference"});
    for (const auto& [input, gradient] :
         {std::pair{&in.x, &out.dx}, {&in.weight, &out.dweight}, {&in.bias, &out.dbias}, {&in.state, &out.d_initial}})
      for (int64_t i = 0; i < input->size(); i += std::max<int64_t>(1, input->size() / 60)) {
        const double x = input->get(i), h = 1e-5;
        input->set(i, x + h);
        const double above = loss();
        input->set(i, x - h);
        const double below = loss();
        input->set(i, x);
        EXPECT_NEAR(gradient->get(i), (above - below) / (2 * h), 1e-7) << name << " " << i;
      }
  }
}

// ---- promises ----

struct ConvResults {
  Bits y, final_state, dx, dweight, dbias, d_initial;
  bool operator==(const ConvResults&) const = default;
};

ConvResults results(const ConvInputs& in, const How& how = {}, double output_fill = std::nan("")) {
  ConvOutputs out(in);
  ConvGradientOutputs gradients(in);
  How with_impl = how;
  with_impl.impl = "cpu_conv";
  if (!std::isnan(output_fill)) {
    for (const auto& [name, t] : out.tensors()) t->fill(output_fill);
    for (const auto& [name, t] : gradients.tensors()) t->fill(output_fill);
  }
  run(conv_args(in, out), with_impl);
  run(conv_backward_args(in, gradients), with_impl);
  return {out.y.bits(),           out.final_state.bits(),    gradients.dx.bits(), gradients.dweight.bits(),
          gradients.dbias.bits(), gradients.d_initial.bits()};
}

TEST(ConvPromise, SameBitsWhateverTheConditions) {
  for (const char* name : {"packed_W4", "channels_1100", "blocks_start_inside", "bf16", "short_sequences"}) {
    const ConvInputs in(find_conv_case(name)), other(find_conv_case(name), 1);
    const ConvResults expected = results(in);
    EXPECT_FALSE(results(other) == expected) << name;  // and what it leaves behind does not matter below
    for (const int threads : {1, 2, 3, 4}) EXPECT_TRUE(results(in, {.threads = threads}) == expected) << name;
    for (const unsigned char fill : {0, 0x7f}) EXPECT_TRUE(results(in, {.workspace_fill = fill}) == expected) << name;
    EXPECT_TRUE(results(in, {}, 3) == expected) << name;
  }
}

TEST(ConvPromise, InputsStayAsTheyAre) {
  ConvInputs in(find_conv_case("rows_apart"));
  std::vector<Bits> before;
  for (const auto& [name, t] : in.tensors()) before.push_back(t->bits());
  results(in);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(in.tensors()[i].tensor->bits(), before[i]);
    EXPECT_TRUE(in.tensors()[i].tensor->margins_intact());
  }
}

TEST(ConvPromise, NeighboursDoNotMatter) {
  for (const char* name : {"packed_W2", "packed_W3", "packed_W4", "blocks_start_inside"})
    expect_neighbours_do_not_matter(find_conv_case(name), on("cpu_conv"));
}

TEST(ConvPromise, SplitAnywhere) { expect_splits_do_not_matter(530, {0, 1, 2, 3, 5, 128, 131, 140}, on("cpu_conv")); }

TEST(ConvPromise, NaNStaysInItsChannelAndWindow) { expect_bad_numbers_stay_in_their_window(on("cpu_conv")); }

TEST(ConvPromise, PoolsTouchOnlyTheirSlots) {
  Legal<kda_conv_args> x;
  x.initial_state.fill(std::nan(""));
  for (int64_t i = 0; i < 10; ++i) x.initial_state.set(6 * 10 + i, 1), x.initial_state.set(2 * 10 + i, 2);
  run(x.args, {.impl = "cpu_conv"});  // slot 4 holds NaN, but sequence 2 does not start from it
  for (int64_t i = 0; i < x.y.size(); ++i) EXPECT_TRUE(std::isfinite(x.y.get(i))) << i;
  for (const int64_t slot : {0, 1, 3, 5, 7}) EXPECT_TRUE(x.final_state.bits(0, slot, 1).all('\xff')) << slot;
  EXPECT_EQ(x.final_state.bits(0, 2, 1), x.initial_state.bits(0, 2, 1)) << "no tokens";
  for (const int64_t tail : {7, 8})
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(x.y.get(tail * 5 + i), 0);

  Legal<kda_conv_args> padded;
  padded.args.first_valid_slot = 5;  // slots 2 and 4 are padding now
  padded.args.final_state = padded.args.initial_state;
  const Bits before = padded.initial_state.bits(0, 0, 6);
  run(padded.args, {.impl = "cpu_conv"});
  EXPECT_EQ(padded.initial_state.bits(0, 0, 6), before);
  for (int64_t i = 0; i < padded.y.size(); ++i) EXPECT_EQ(padded.y.get(i) == 0, i >= 2 * 5) << i;
}

// x in parts: the bits of one x. The cases above compare the parts with the oracle, which takes them in its own way.
TEST(ConvPromise, PartsDoNotMatter) {
  for (const char* name : {"parts", "parts_apart", "parts_two", "parts_tiles", "parts_token", "parts_bf16"}) {
    const ConvInputs in(find_conv_case(name));
    ConvCase c = in.c;
    c.parts.clear();
    const ConvInputs whole(c);
    const ConvResults expected = results(whole);
    for (const int threads : {1, 3}) EXPECT_TRUE(results(in, {.threads = threads}) == expected) << name;
    ConvOutputs exact(whole, true), got(in, true);
    ConvGradientOutputs gradients(whole, true), got_gradients(in, true);
    run(conv_args(whole, exact), {.impl = "reference"}), run(conv_args(in, got), {.impl = "reference"});
    run(conv_backward_args(whole, gradients), {.impl = "reference"});
    run(conv_backward_args(in, got_gradients), {.impl = "reference"});
    EXPECT_EQ(got.y.bits(), exact.y.bits()) << name;
    EXPECT_EQ(got.final_state.bits(), exact.final_state.bits()) << name;
    EXPECT_EQ(got_gradients.dx.bits(), gradients.dx.bits()) << name;
    EXPECT_EQ(got_gradients.dweight.bits(), gradients.dweight.bits()) << name;
  }
}

// A pool in place, checkpoints and x in parts.
TEST(ConvPromise, PartsWithPoolsAndCheckpoints) {
  const ConvInputs in({.name = "pool", .D = 20, .lengths = {40, 0, 33}, .parts = {5, 3, 12}});
  const Tensor slots(KDA_I32, {3}, {4, 0, 2}), kept(KDA_I32, {3, 2}, {1, 3, -1, -1, 2, 0});
  const auto made = [&](bool in_parts, const char* impl) {
    const ConvOutputs out(in);
    Tensor pool(KDA_F32, {5, 20, 3}), checkpoints(KDA_F32, {4, 20, 3});
    Random random(3);
    for (int64_t i = 0; i < pool.size(); ++i) pool.set(i, random.normal());
    kda_conv_args a = conv_args(in, out);
    if (!in_parts) a.x = in.x, a.x1 = a.x2 = {};
    a.initial_state = a.final_state = pool, a.state_indices = slots;
    a.checkpoints = checkpoints, a.checkpoint_slots = kept, a.checkpoint_every = 16;
    run(a, {.impl = impl});
    return std::vector{out.y.bits(), pool.bits(), checkpoints.bits()};
  };
  for (const char* impl : {"cpu_conv", "reference"}) EXPECT_EQ(made(true, impl), made(false, impl)) << impl;
}

// ---- refusals beside those of every operator (test_contract.cc) ----

TEST(ConvRefuses, Sizes) {
  const auto both = [](const std::string& sentence, const auto& break_it) {
    refuses<kda_conv_args>(sentence, [&](auto& x) { break_it(x.args); });
    refuses<kda_conv_backward_args>(sentence, [&](auto& x) { break_it(x.args); });
  };
  both("x: expected 3 dimensions [B,T,D], got 2", [](auto& a) { a.x.ndim = 2; });
  both("x: expected D >= 1, got 0", [](auto& a) { a.x.shape[2] = 0; });
  both("weight: expected 2 dimensions [D,W], got 0", [](auto& a) { a.weight = {}; });
  both("weight: expected W in 2..4, got 1", [](auto& a) { a.weight.shape[1] = 1; });
  both("weight: expected W in 2..4, got 5", [](auto& a) { a.weight.shape[1] = 5; });
  both("cu_seqlens: expected one row of packed sequences (B = 1), got B = 2", [](auto& a) { a.x.shape[0] = 2; });
  both("x: expected float32 or bfloat16 or float16, got int32", [](auto& a) { a.x.dtype = KDA_I32; });
}

TEST(ConvRefuses, Parts) {
  static const Tensor more(KDA_F32, {1, 9, 2});
  const auto both = [](const std::string& sentence, const auto& break_it) {
    const auto with_parts = [&](auto& x) {
      x.args.x1 = more, x.args.x.shape[2] = 3;
      break_it(x.args);
    };
    refuses<kda_conv_args>(sentence, with_parts);
    refuses<kda_conv_backward_args>(sentence, with_parts);
  };
  both("x2: expected x1 with it, got none", [](auto& a) { a.x2 = a.x1, a.x1 = {}; });
  both("x1: expected 3 dimensions [B,T,D], got 2", [](auto& a) { a.x1.ndim = 2; });
  both("x1: expected shape [1,9,2] (B and T of x), got [1,8,2]", [](auto& a) { a.x1.shape[1] = 8; });
  both("x2: expected shape [1,9,2] (B and T of x), got [2,9,2]", [](auto& a) { a.x2 = a.x1, a.x2.shape[0] = 2; });
  both("x1: expected D in 1..2^48, got 0", [](auto& a) { a.x1.shape[2] = 0; });
  both("x2: expected D in 1..2^48, got 281474976710657", [](auto& a) { a.x2 = a.x1, a.x2.shape[2] = (1LL << 48) + 1; });
  both("x: expected D in 1..2^48, got 9223372036854775807",
       [](auto& a) { a.x.shape[1] = a.x1.shape[1] = 0, a.x.shape[2] = INT64_MAX; });
  both("x1: expected float32, got bfloat16", [](auto& a) { a.x1.dtype = KDA_BF16; });
  both("x1: expected a dense last dimension", [](auto& a) { a.x1.stride[2] = 2; });
  both("weight: expected shape [6,3] ([D,W], D of x, x1 and x2), got [5,3]", [](auto& a) { a.x.shape[2] = 4; });
  refuses<kda_conv_args>("y: expected shape [1,9,5] like x, x1 and x2, got [1,9,3]",
                         [](auto& x) { x.args.x1 = more, x.args.x.shape[2] = 3, x.args.y.shape[2] = 3; });
  refuses<kda_conv_args>("y: expected memory of its own, got memory that overlaps x1",
                         [](auto& x) { x.args.x1 = more, x.args.x.shape[2] = 3, x.args.x1.data = x.args.y.data; });
}

// What was compiled before there were parts passes a smaller struct, which ends before them.
TEST(ConvCalls, StructsWithoutParts) {
  Legal<kda_conv_args> x;
  Legal<kda_conv_backward_args> g;
  x.args.struct_size = offsetof(kda_conv_args, x1), g.args.struct_size = offsetof(kda_conv_backward_args, x1);
  x.args.x1.ndim = g.args.x1.ndim = 99;  // not theirs
  run(x.args, {.impl = "cpu_conv"}), run(g.args, {.impl = "cpu_conv"});
  EXPECT_EQ(x.y.unwritten(), 0);
  EXPECT_EQ(g.out.dx.unwritten(), 0);
}

TEST(ConvRefuses, Forward) {
  const auto forward = [](const std::string& sentence, const std::function<void(Legal<kda_conv_args>&)>& break_it) {
    refuses<kda_conv_args>(sentence, break_it);
  };
  forward("y: expected float32, got bfloat16", [](auto& x) { x.args.y.dtype = KDA_BF16; });
  forward("y: expected 3 dimensions [1,9,5] like x, got 0", [](auto& x) { x.args.y = {}; });
  forward("initial_state: expected shape [3,5,2] ([N,D,W-1]), got [8,5,2]", [](auto& x) { x.args.state_indices = {}; });
  forward("initial_state: expected 3 dimensions [slots,D,W-1], got 2", [](auto& x) { x.args.initial_state.ndim = 2; });
  forward("final_state: expected as many slots as initial_state, 8, got 7",
          [](auto& x) { x.args.final_state.shape[0] = 7; });
  forward("state_indices: expected a pool initial_state or final_state with it, got neither",
          [](auto& x) { x.args.initial_state = x.args.final_state = x.args.has_initial_state = {}; });
  forward("has_initial_state: expected initial_state with it, got none", [](auto& x) { x.args.initial_state = {}; });
  forward("first_valid_slot: expected >= 0, got -1", [](auto& x) { x.args.first_valid_slot = -1; });
  forward("state_indices: expected slots below 8, got 8", [](auto& x) { x.state_indices.set(1, 8); });
  forward("state_indices: expected every live slot once, got slot 6 twice", [](auto& x) { x.state_indices.set(1, 6); });
  forward("cu_seqlens[3]: expected at most T = 9, got 10", [](auto& x) { x.in.cu_seqlens.set(3, 10); });
  forward("final_state: expected memory of its own, got memory that overlaps initial_state without being the same view",
          [](auto& x) {
            x.args.final_state = x.args.initial_state;
            x.args.final_state.data = static_cast<float*>(x.args.final_state.data) + 10;
            x.args.final_state.shape[0] = x.args.initial_state.shape[0] = 7;
          });
}

TEST(ConvRefuses, Backward) {
  const auto backward = [](const std::string& sentence,
                           const std::function<void(Legal<kda_conv_backward_args>&)>& break_it) {
    refuses<kda_conv_backward_args>(sentence, break_it);
  };
  backward("dy: expected float32, got float16", [](auto& x) { x.args.dy.dtype = KDA_F16; });
  backward("dx: expected float32, got bfloat16", [](auto& x) { x.args.dx.dtype = KDA_BF16; });
  backward("dweight: expected float32, got bfloat16", [](auto& x) { x.args.dweight.dtype = KDA_BF16; });
  backward("dbias: expected bias with it, got none", [](auto& x) { x.args.bias = {}; });
  backward("d_initial_state: expected shape [3,5,2] ([N,D,W-1]), got [4,5,2]",
           [](auto& x) { x.args.d_initial_state.shape[0] = 4; });
  backward("args.reserved: expected 0, got 1", [](auto& x) { x.args.reserved = 1; });
  backward("cu_seqlens[0]: expected 0, got 1", [](auto& x) { x.in.cu_seqlens.set(0, 1); });
}

// ---- edges ----

TEST(ConvEdges, NothingToDo) {
  for (const char* impl : {"cpu_conv", "reference"}) expect_nothing_to_do(on(impl));
}

}  // namespace
}  // namespace kda::test
