// Cases of the causal convolution, their tensors, and the args structs that point at them.
#pragma once
#include <numeric>

#include "calls.h"

namespace kda::test {

struct ConvCase {
  std::string name;
  int64_t B = 1, T = 40, D = 20, W = 4;
  std::vector<int64_t> lengths = {};  // packed sequences in one row, then `tail` tokens of no sequence
  int64_t tail = 0;
  int32_t cu_dtype = KDA_I32;
  int32_t dtype = KDA_F32, weight_dtype = KDA_F32, state_dtype = KDA_F32;
  Layout layout = Layout::kDense, state_layout = Layout::kDense;  // kHeadsFirst: states stored [N,W-1,D]
  bool bias = true, silu = true, state = true;
  double scale = 1;  // of x
};
inline std::ostream& operator<<(std::ostream& out, const ConvCase& c) { return out << c.name; }

inline std::vector<ConvCase> conv_cases() {
  std::vector<ConvCase> all;
  const auto add = [&](const ConvCase& c) { all.push_back(c); };
  for (const int64_t W : {2, 3, 4}) {
    const std::string w = "_W" + std::to_string(W);
    for (const int64_t T : {1, 2, 3, 4, 127, 128, 129, 131})  // around the width and the block of 128 tokens
      add({.name = "tokens_" + std::to_string(T) + w, .B = 2, .T = T, .W = W});
    add({.name = "packed" + w, .W = W, .lengths = {1, 0, 2, 3, 0, 4, 120, 1, 5, 130}, .tail = 7});
    add({.name = "stateless" + w, .B = 2, .T = 9, .W = W, .state = false});
  }
  for (const int64_t D : {1, 15, 16, 17, 511, 512, 513, 1100})  // around the vector and the tile of 512 channels
    add({.name = "channels_" + std::to_string(D), .B = 2, .T = 10, .D = D});
  add({.name = "blocks_start_inside",
       .D = 5,
       .lengths = {127, 2, 126, 3, 260}});  // blocks of 128 tokens, near sequence starts
  add({.name = "short_sequences", .lengths = std::vector<int64_t>(150, 1), .cu_dtype = KDA_I64});
  add({.name = "rows_apart", .B = 3, .T = 20, .layout = Layout::kPadded});
  add({.name = "state_by_rows", .B = 3, .T = 2, .state_layout = Layout::kHeadsFirst});
  add({.name = "state_padded", .lengths = {1, 0, 9}, .state_layout = Layout::kPadded});
  add({.name = "no_bias", .bias = false});
  add({.name = "no_silu", .silu = false});
  add({.name = "no_bias_no_silu", .lengths = {30, 9}, .bias = false, .silu = false, .state = false});
  add({.name = "large", .scale = 300});  // sigmoids of 0 and 1
  add({.name = "bf16",
       .B = 2,
       .D = 530,
       .dtype = KDA_BF16,
       .weight_dtype = KDA_BF16,
       .state_dtype = KDA_BF16,
       .layout = Layout::kPadded});
  add({.name = "f16", .B = 2, .D = 37, .dtype = KDA_F16, .weight_dtype = KDA_F16, .state_dtype = KDA_F16});
  add({.name = "mixed", .lengths = {30, 2, 9}, .dtype = KDA_BF16, .state_dtype = KDA_F16});
  add({.name = "mixed_weight", .lengths = {30, 2, 9}, .weight_dtype = KDA_BF16, .layout = Layout::kPadded});
  return all;
}

inline const ConvCase& find_conv_case(const std::string& name) {
  static const std::vector<ConvCase> all = conv_cases();
  for (const ConvCase& c : all)
    if (c.name == name) return c;
  ADD_FAILURE() << "no case is called " << name;
  return all.front();
}

struct ConvInputs {
  ConvCase c;
  int64_t B, T, N;
  Tensor x, weight, bias, cu_seqlens, state, dy, d_final;

  explicit ConvInputs(const ConvCase& c, uint64_t seed = 0) : c(c), B(c.B), T(c.T), N(c.B) {
    if (!c.lengths.empty() || c.tail) {
      B = 1, N = static_cast<int64_t>(c.lengths.size());
      T = std::accumulate(c.lengths.begin(), c.lengths.end(), int64_t{0}) + c.tail;
      cu_seqlens = Tensor(c.cu_dtype, {N + 1});
      cu_seqlens.set(0, 0);
      for (int64_t n = 0; n < N; ++n) cu_seqlens.set(n + 1, cu_seqlens.get(n) + static_cast<double>(c.lengths[n]));
    }
    Random random(seed);
    const auto filled = [&](int32_t dtype, std::vector<int64_t> shape, Layout layout, double scale) {
      Tensor t(dtype, std::move(shape), layout);
      for (int64_t i = 0; i < t.size(); ++i) t.set(i, scale * random.normal());
      return t;
    };
    x = filled(c.dtype, {B, T, c.D}, c.layout, c.scale);
    dy = filled(c.dtype, {B, T, c.D}, c.layout, 1);
    weight = filled(c.weight_dtype, {c.D, c.W}, c.layout, 0.5);
    if (c.bias) bias = filled(c.weight_dtype, {c.D}, Layout::kDense, 0.5);
    if (c.state) state = filled(c.state_dtype, {N, c.D, c.W - 1}, c.state_layout, c.scale);
    if (c.state) d_final = filled(c.state_dtype, {N, c.D, c.W - 1}, c.state_layout, 1);
  }
  int64_t begin(int64_t n) const { return cu_seqlens ? static_cast<int64_t>(cu_seqlens.get(n)) : 0; }
  int64_t length(int64_t n) const { return cu_seqlens ? c.lengths[n] : T; }
  std::vector<Named> tensors() {
    return {{"x", &x},         {"weight", &weight}, {"bias", &bias},      {"cu_seqlens", &cu_seqlens},
            {"state", &state}, {"dy", &dy},         {"d_final", &d_final}};
  }
};

struct ConvOutputs {
  Tensor y, final_state;
  explicit ConvOutputs(const ConvInputs& in, bool f64 = false)
      : y(f64 ? KDA_F64 : in.c.dtype, {in.B, in.T, in.c.D}, in.c.layout),
        final_state(f64 ? KDA_F64 : in.c.state_dtype, {in.N, in.c.D, in.c.W - 1}, in.c.state_layout) {}
  std::vector<Named> tensors() { return {{"y", &y}, {"final_state", &final_state}}; }
};

struct ConvGradientOutputs {
  Tensor dx, dweight, dbias, d_initial;
  explicit ConvGradientOutputs(const ConvInputs& in, bool f64 = false)
      : dx(f64 ? KDA_F64 : in.c.dtype, {in.B, in.T, in.c.D}, in.c.layout),
        dweight(f64 ? KDA_F64 : KDA_F32, {in.c.D, in.c.W}, in.c.layout),
        d_initial(f64 ? KDA_F64 : in.c.state_dtype, {in.N, in.c.D, in.c.W - 1}, in.c.state_layout) {
    if (in.c.bias) dbias = Tensor(f64 ? KDA_F64 : KDA_F32, {in.c.D});
  }
  std::vector<Named> tensors() {
    return {{"dx", &dx}, {"dweight", &dweight}, {"dbias", &dbias}, {"d_initial", &d_initial}};
  }
};

inline kda_conv_args conv_args(const ConvInputs& in, const ConvOutputs& out) {
  kda_conv_args a = KDA_CONV_ARGS_INIT;
  a.x = in.x, a.weight = in.weight, a.bias = in.bias, a.cu_seqlens = in.cu_seqlens, a.initial_state = in.state;
  a.y = out.y, a.final_state = out.final_state;
  a.silu = in.c.silu;
  return a;
}
inline kda_conv_backward_args conv_backward_args(const ConvInputs& in, const ConvGradientOutputs& out) {
  kda_conv_backward_args a = KDA_CONV_BACKWARD_ARGS_INIT;
  a.x = in.x, a.weight = in.weight, a.bias = in.bias, a.cu_seqlens = in.cu_seqlens, a.initial_state = in.state;
  a.dy = in.dy, a.d_final_state = in.d_final;
  a.dx = out.dx, a.dweight = out.dweight, a.dbias = out.dbias, a.d_initial_state = out.d_initial;
  a.silu = in.c.silu;
  return a;
}

// The tokens from the root of a tree to token t of request n, which is the last of them.
inline std::vector<int64_t> path_to(const Tensor& parents, int64_t n, int64_t t) {
  std::vector<int64_t> path;
  for (const int64_t T = parents.shape()[1]; t >= 0;) {
    path.insert(path.begin(), t);
    const int64_t parent = static_cast<int64_t>(parents.get(n * T + t));
    t = parent >= t ? t - 1 : parent;
  }
  return path;
}

inline double conv_budget(const ConvCase& c, int32_t dtype) {
  return dtype == KDA_F32 ? (c.scale > 1 ? 1e-5 : 1e-6) : 0.003;
}
constexpr double kConvSumBudget = 1e-5;  // dweight, dbias: up to 300 terms of either sign

inline void expect_conv_close(const ConvCase& c, const std::vector<Named>& reference, const std::vector<Named>& got) {
  for (size_t i = 0; i < got.size(); ++i) {
    const Tensor& t = *got[i].tensor;
    if (!t) continue;
    const bool sum = std::string(got[i].name) == "dweight" || std::string(got[i].name) == "dbias";
    EXPECT_TRUE(close(*reference[i].tensor, t, sum ? kConvSumBudget : conv_budget(c, t.dtype()))) << got[i].name;
    EXPECT_EQ(t.unwritten(), 0) << got[i].name;
    EXPECT_TRUE(t.margins_intact()) << got[i].name;
  }
}

}  // namespace kda::test
