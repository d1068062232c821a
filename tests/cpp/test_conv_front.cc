// The convolution as decode, verify and flush call it (cpu.h): the bits of kda_conv, along a chain or tree, and
// rolled states.
#include "conv_calls.h"
#include "cpu/cpu.h"

namespace kda::test {
namespace {

kda_conv_inputs front_inputs(const ConvInputs& in) {
  kda_conv_inputs c{};
  c.x = in.x, c.weight = in.weight, c.bias = in.bias, c.state = in.state;
  return c;
}

Tensor convolved(const kda_conv_inputs& c, const ConvInputs& in, const kda_tensor& parents = {}, int threads = 0) {
  Tensor z(in.c.dtype, {in.B, in.T, in.c.D});
  const kda_tensor view = cpu::conv_front_output(c, z.view().data);
  EXPECT_EQ(view.stride[1], in.c.D);
  EXPECT_GE(cpu::conv_front_bytes(c), static_cast<uint64_t>(z.size() * (in.c.dtype == KDA_F32 ? 4 : 2)));
  kda_exec exec{};
  exec.num_threads = threads;
  cpu::conv_front(c, in.cu_seqlens, parents, view, exec);
  EXPECT_TRUE(z.margins_intact());
  return z;
}

TEST(ConvFront, ChainsHaveTheBitsOfTheOperator) {
  for (ConvCase c : conv_cases()) {
    c.silu = true;
    const ConvInputs in(c);
    const ConvOutputs out(in);
    run(conv_args(in, out), {.impl = "cpu_conv"});
    for (const int threads : {1, 2}) EXPECT_EQ(convolved(front_inputs(in), in, {}, threads).bits(), out.y.bits()) << c;
  }
}

TEST(ConvFront, RequestsWithoutASlotStartFromZeros) {
  ConvInputs in({.name = "slots", .B = 4, .T = 5});
  const Tensor indices(KDA_I32, {4}, {-1, 2, 4, -2147483648.0});
  kda_conv_inputs c = front_inputs(in);
  c.indices = indices;
  const Tensor got = convolved(c, in);
  const int64_t slot = in.c.D * 3;
  std::vector<double> old = in.state.values();
  for (int64_t i = 0; i < in.state.size(); ++i) in.state.set(i, i / slot == 1 ? old[slot + i] : 0);
  EXPECT_EQ(got.bits(), convolved(front_inputs(in), in).bits());
}

// Every node of a tree gives what the last token of the chain that leads to it gives; so do the states rolled on to
// it.
TEST(ConvFront, TreesAreTheirChains) {
  for (const int64_t W : {2, 3, 4}) {
    const ConvInputs in({.name = "tree", .B = 2, .T = 8, .D = 530, .W = W});
    // A value that is no ancestor means the token before; any negative value means the committed text.
    const Tensor parents(KDA_I32, {2, 8}, {-1, 0, 0, 2, 1, -7, 4, 5, -1, 0, 9, 2, 0, 4, 2147483647.0, 3});
    const Tensor z = convolved(front_inputs(in), in, parents);
    for (int64_t n = 0; n < in.B; ++n)
      for (int64_t t = 0; t < in.T; ++t) {
        const ConvInputs one = along(in, n, path_to(parents, n, t));
        const ConvOutputs out(one);
        run(conv_args(one, out), {.impl = "cpu_conv"});
        const Tensor row(KDA_F32, {1, 8, in.c.D}, [&] {
          const std::vector<double> all = z.values();
          return std::vector<double>(all.begin() + n * 8 * in.c.D, all.begin() + (n + 1) * 8 * in.c.D);
        }());
        EXPECT_EQ(row.bits(1, t, 1), out.y.bits(1, one.T - 1, 1)) << W << " " << n << " " << t;

        const Tensor state = in.state.clone();
        cpu::conv_roll(state, n, in.x, parents, n, n, 0, t + 1);
        EXPECT_EQ(state.bits(0, n, 1), out.final_state.bits()) << W << " " << n << " " << t;
        EXPECT_EQ(state.bits(0, 1 - n, 1), in.state.bits(0, 1 - n, 1));
      }
  }
}

TEST(ConvFront, RollsByTheAcceptedTokens) {
  for (const ConvCase& base : {find_conv_case("packed_W4"), find_conv_case("bf16"), find_conv_case("state_by_rows")}) {
    const ConvInputs in(base);
    for (int64_t n = 0; n < in.N; ++n)
      for (const int64_t m : {-1, 0, 1, 2, 3, 4, 5}) {
        if (m > in.length(n)) continue;
        ConvInputs cut(base);
        if (in.cu_seqlens) cut.cu_seqlens = Tensor(KDA_I32, {2}, {0, static_cast<double>(std::max<int64_t>(0, m))});
        ConvOutputs out(cut);
        kda_conv_args a = conv_args(cut, out);
        const kda_tensor x = a.x;
        if (in.cu_seqlens) {
          a.x.data = static_cast<char*>(x.data) + in.begin(n) * x.stride[1] * (in.c.dtype == KDA_F32 ? 4 : 2);
          a.x.shape[1] = a.y.shape[1] = in.length(n);
        } else {
          a.x.data = static_cast<char*>(x.data) + n * x.stride[0] * (in.c.dtype == KDA_F32 ? 4 : 2);
          a.x.shape[0] = a.y.shape[0] = 1, a.x.shape[1] = a.y.shape[1] = std::max<int64_t>(0, m);
        }
        a.initial_state.shape[0] = a.final_state.shape[0] = 1;
        a.initial_state.data = static_cast<char*>(a.initial_state.data) +
                               n * a.initial_state.stride[0] * (in.c.state_dtype == KDA_F32 ? 4 : 2);
        run(a, {.impl = "cpu_conv"});
        const Tensor state = in.state.clone();
        cpu::conv_roll(state, n, in.x, {}, n, in.cu_seqlens ? 0 : n, in.begin(n), m);
        EXPECT_EQ(state.bits(0, n, 1), out.final_state.bits(0, 0, 1)) << base << " " << n << " " << m;
        for (const int64_t slot : {int64_t{-1}, in.N}) cpu::conv_roll(state, slot, in.x, {}, n, 0, 0, m);
        EXPECT_TRUE(state.margins_intact());
      }
  }
}

}  // namespace
}  // namespace kda::test
