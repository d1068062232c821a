// The convolution in front of other kernels: with cuda/conv/conv.h they get the bits of kda_conv, along a chain or a
// tree, and the states that kda_conv leaves.
#include "conv_calls.h"
#include "conv_front.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

using ConvFrontOnCuda = OnCuda;

// Copies on the device of the tensors that a call sees.
class Copies {
 public:
  kda_tensor operator()(const Tensor& t) {
    kda_tensor view = t;
    if (!t) return view;
    const auto [copy, fresh] = copies_.try_emplace(view.data);
    if (fresh) copy->second.allocate(bytes_of(view)), copy->second.fill(view.data);
    view.data = copy->second.begin();
    return view;
  }
  void back() {
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const auto& [host, copy] : copies_) ASSERT_NO_FATAL_FAILURE(copy.back(host));
  }

 private:
  std::map<void*, DeviceMemory> copies_;
};

TEST_F(ConvFrontOnCuda, ChainsHaveTheBitsOfTheOperator) {
  for (ConvCase c : conv_cases()) {
    if (!c.state) continue;
    c.silu = true;
    const ConvInputs in(c);
    const ConvOutputs out(in);
    run_on_cuda(conv_args(in, out), "cuda_conv");
    Tensor indices(KDA_I32, {in.N});
    for (int64_t n = 0; n < in.N; ++n) indices.set(n, static_cast<double>(n));
    const ConvOutputs tokens(in), chains(in);
    const Tensor state = in.state.clone();
    Copies at;
    kda_conv_inputs a{at(in.x), at(in.weight), at(in.bias), at(state), at(indices)};
    const kda_tensor cu = at(in.cu_seqlens);
    convolve_tokens(a, cu, {}, at(tokens.y));
    convolve_and_roll(a, cu, at(chains.y));
    at.back();
    if (HasFatalFailure()) return;
    for (int64_t n = 0; n < in.N; ++n)
      for (const Tensor* y : {&tokens.y, &chains.y}) {
        const int64_t dim = in.cu_seqlens ? 1 : 0, first = in.cu_seqlens ? in.begin(n) : n;
        const int64_t count = in.cu_seqlens ? in.length(n) : 1;
        EXPECT_EQ(y->bits(dim, first, count), out.y.bits(dim, first, count)) << c << " " << n;
      }
    EXPECT_EQ(state.bits(), out.final_state.bits()) << c;
  }
}

TEST_F(ConvFrontOnCuda, RequestsWithoutASlotStartFromZeros) {
  const ConvInputs in({.name = "slots", .B = 4, .T = 5});
  const Tensor indices(KDA_I32, {4}, {-1, 2, 4, -2147483648.0});
  const ConvOutputs tokens(in), chains(in), expected(in);
  const Tensor start = in.state.clone(), state = in.state.clone();
  const int64_t slot = in.c.D * 3;
  Tensor rows = in.state.clone();
  for (int64_t i = 0; i < rows.size(); ++i) rows.set(i, i / slot == 1 ? in.state.get(slot + i) : 0);
  kda_conv_args a = conv_args(in, expected);
  a.initial_state = rows;
  run_on_cuda(a, "cuda_conv");
  Copies at;
  kda_conv_inputs front{at(in.x), at(in.weight), at(in.bias), at(state), at(indices)};
  convolve_tokens(front, {}, {}, at(tokens.y));
  convolve_and_roll(front, {}, at(chains.y));
  at.back();
  EXPECT_EQ(tokens.y.bits(), expected.y.bits());
  EXPECT_EQ(chains.y.bits(), expected.y.bits());
  for (const int64_t untouched : {0, 1, 3}) EXPECT_EQ(state.bits(0, untouched, 1), start.bits(0, untouched, 1));
  EXPECT_EQ(state.bits(0, 2, 1), expected.final_state.bits(0, 1, 1));
}

// Every node of a tree gives what the last token of the chain that leads to it gives; so do the states rolled on to
// it.
TEST_F(ConvFrontOnCuda, TreesAreTheirChains) {
  for (const int64_t W : {2, 3, 4}) {
    const ConvInputs in({.name = "tree", .B = 2, .T = 8, .D = 70, .W = W});
    const int64_t D = in.c.D;
    // A value that is no ancestor means the token before; any negative value means the committed text.
    const Tensor parents(KDA_I32, {2, 8}, {-1, 0, 0, 2, 1, -7, 4, 5, -1, 0, 9, 2, 0, 4, 2147483647.0, 3});
    const ConvOutputs tree(in);
    Copies at;
    convolve_tokens({at(in.x), at(in.weight), at(in.bias), at(in.state), {}}, {}, at(parents), at(tree.y));
    at.back();
    for (int64_t t = 0; t < in.T; ++t) {
      const Tensor state = in.state.clone();
      Copies rolling;
      roll_states(rolling(in.x), rolling(state), rolling(parents), t + 1);
      rolling.back();
      if (HasFatalFailure()) return;
      for (int64_t n = 0; n < in.B; ++n) {
        const ConvInputs one = along(in, n, path_to(parents, n, t));
        const ConvOutputs chain(one);
        run_on_cuda(conv_args(one, chain), "cuda_conv");
        for (int64_t d = 0; d < D; ++d)
          EXPECT_EQ(tree.y.get((n * in.T + t) * D + d), chain.y.get((one.T - 1) * D + d)) << W << " " << n << " " << t;
        EXPECT_EQ(state.bits(0, n, 1), chain.final_state.bits()) << W << " " << n << " " << t;
      }
    }
  }
}

}  // namespace
}  // namespace kda::test
