// Cases of the causal convolution, their tensors, and the args structs that point at them.
#pragma once
#include <cmath>
#include <limits>
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
  double scale = 1;                 // of x
  std::vector<int64_t> parts = {};  // channels of x, x1 and x2, if there are more than x
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
  add({.name = "parts", .B = 2, .D = 20, .parts = {5, 3, 12}});
  add({.name = "parts_apart", .B = 2, .D = 20, .layout = Layout::kPadded, .parts = {8, 4, 8}});
  add({.name = "parts_two", .D = 20, .W = 3, .lengths = {30, 0, 1, 9}, .tail = 3, .parts = {1, 19}});
  add({.name = "parts_tiles", .D = 1700, .lengths = {3, 130, 2}, .parts = {513, 512, 675}});  // tiles end with parts
  add({.name = "parts_token", .B = 3, .T = 1, .D = 40, .parts = {12, 8, 20}});
  add({.name = "parts_bf16",
       .B = 2,
       .D = 48,
       .dtype = KDA_BF16,
       .weight_dtype = KDA_BF16,
       .state_dtype = KDA_BF16,
       .parts = {16, 8, 24}});
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
  std::vector<Tensor> parts;  // of x, each in memory of its own; or none

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
    int64_t first = 0;
    for (const int64_t D : c.parts) {
      Tensor part(c.dtype, {B, T, D}, c.layout);
      for (int64_t i = 0; i < part.size(); ++i) part.set(i, x.get(i / D * c.D + first + i % D));
      parts.push_back(std::move(part)), first += D;
    }
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

template <class Args>
void use_parts(const ConvInputs& in, Args& a) {
  if (in.parts.empty()) return;
  a.x = in.parts[0], a.x1 = in.parts[1];
  if (in.parts.size() > 2) a.x2 = in.parts[2];
}
inline kda_conv_args conv_args(const ConvInputs& in, const ConvOutputs& out) {
  kda_conv_args a = KDA_CONV_ARGS_INIT;
  a.x = in.x, a.weight = in.weight, a.bias = in.bias, a.cu_seqlens = in.cu_seqlens, a.initial_state = in.state;
  a.y = out.y, a.final_state = out.final_state;
  a.silu = in.c.silu;
  use_parts(in, a);
  return a;
}
inline kda_conv_backward_args conv_backward_args(const ConvInputs& in, const ConvGradientOutputs& out) {
  kda_conv_backward_args a = KDA_CONV_BACKWARD_ARGS_INIT;
  a.x = in.x, a.weight = in.weight, a.bias = in.bias, a.cu_seqlens = in.cu_seqlens, a.initial_state = in.state;
  a.dy = in.dy, a.d_final_state = in.d_final;
  a.dx = out.dx, a.dweight = out.dweight, a.dbias = out.dbias, a.d_initial_state = out.d_initial;
  a.silu = in.c.silu;
  use_parts(in, a);
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

// Tokens of a request along a path, as a request of its own.
inline ConvInputs along(const ConvInputs& in, int64_t n, const std::vector<int64_t>& path) {
  ConvCase c = in.c;
  c.B = 1, c.T = static_cast<int64_t>(path.size());
  ConvInputs one(c);
  one.weight = in.weight.clone(), one.bias = in.bias.clone();
  const int64_t slot = c.D * (c.W - 1);
  for (int64_t i = 0; i < slot; ++i) one.state.set(i, in.state.get(n * slot + i));
  for (int64_t i = 0; i < one.x.size(); ++i)
    one.x.set(i, in.x.get((n * in.T + path[static_cast<size_t>(i / c.D)]) * c.D + i % c.D));
  return one;
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

// ---- the same on every device: call(args) runs there ----

template <class Call>
void run_conv(const ConvInputs& in, const ConvOutputs& out, const ConvGradientOutputs& gradients, const Call& call) {
  call(conv_args(in, out));
  call(conv_backward_args(in, gradients));
}

// Packed sequences have the bits that each has alone.
template <class Call>
void expect_neighbours_do_not_matter(const ConvCase& packed, const Call& call) {
  const ConvInputs in(packed);
  const ConvOutputs all(in);
  const ConvGradientOutputs all_gradients(in);
  run_conv(in, all, all_gradients, call);
  for (int64_t n = 0; n < in.N; ++n) {
    ConvCase c = packed;
    c.lengths.clear(), c.tail = 0, c.T = in.length(n);
    ConvInputs one(c);
    one.weight = in.weight.clone(), one.bias = in.bias.clone();
    for (const auto& [to, from] : {std::pair{&one.x, &in.x}, {&one.dy, &in.dy}})
      for (int64_t i = 0; i < to->size(); ++i) to->set(i, from->get(in.begin(n) * c.D + i));
    for (const auto& [to, from] : {std::pair{&one.state, &in.state}, {&one.d_final, &in.d_final}})
      for (int64_t i = 0; i < to->size(); ++i) to->set(i, from->get(n * to->size() + i));
    const ConvOutputs alone(one);
    const ConvGradientOutputs gradients(one);
    run_conv(one, alone, gradients, call);
    EXPECT_EQ(alone.y.bits(), all.y.bits(1, in.begin(n), c.T)) << c << " " << n;
    EXPECT_EQ(alone.final_state.bits(), all.final_state.bits(0, n, 1)) << c << " " << n;
    EXPECT_EQ(gradients.dx.bits(), all_gradients.dx.bits(1, in.begin(n), c.T)) << c << " " << n;
    EXPECT_EQ(gradients.d_initial.bits(), all_gradients.d_initial.bits(0, n, 1)) << c << " " << n;
  }
}

// One call, or two in place with the state carried between: the same bits.
template <class Call>
void expect_splits_do_not_matter(int64_t D, const std::vector<int64_t>& splits, const Call& call) {
  for (const int64_t W : {2, 3, 4})
    for (const int64_t split : splits) {
      const ConvInputs in({.name = "split", .T = 140, .D = D, .W = W});
      const ConvOutputs whole(in), parts(in);
      call(conv_args(in, whole));
      const Tensor state = in.state.clone();
      kda_conv_args a = conv_args(in, parts);
      a.initial_state = a.final_state = state;  // in place
      a.x.shape[1] = a.y.shape[1] = split;
      call(a);
      const int64_t offset = split * in.c.D * static_cast<int64_t>(sizeof(float));
      a.x.data = static_cast<char*>(a.x.data) + offset, a.y.data = static_cast<char*>(a.y.data) + offset;
      a.x.shape[1] = a.y.shape[1] = in.T - split;
      call(a);
      EXPECT_EQ(parts.y.bits(), whole.y.bits()) << W << " " << split;
      EXPECT_EQ(state.bits(), whole.final_state.bits()) << W << " " << split;
    }
}

// NaN or infinity reaches the W outputs of its channel that read it.
template <class Call>
void expect_bad_numbers_stay_in_their_window(const Call& call) {
  for (const double bad :
       {std::nan(""), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()})
    for (const int64_t W : {2, 3, 4})
      for (const int64_t t : {-1, 0, 1, 13, 27}) {  // -1: the newest row of the state
        ConvInputs in({.name = "nan", .D = 20, .W = W, .lengths = {30, 9}});
        const int64_t d = 13;
        if (t < 0) in.state.set(d * (W - 1) + W - 2, bad);
        else in.x.set(t * in.c.D + d, bad);
        const ConvOutputs out(in), reference(in, true);
        const ConvGradientOutputs gradients(in);
        run_conv(in, out, gradients, call);
        run(conv_args(in, reference), {.impl = "reference"});
        for (int64_t i = 0; i < in.c.D; ++i) EXPECT_TRUE(i == d || std::isfinite(gradients.dbias.get(i))) << i;
        for (int64_t i = 0; i < gradients.dx.size(); ++i) {  // of a token whose outputs are all well
          const int64_t token = i / in.c.D, last = token < 30 ? std::min<int64_t>(token + W, 30) : token + 1;
          const bool read = i % in.c.D == d && token < t + W && last > t;
          EXPECT_TRUE(read || std::isfinite(gradients.dx.get(i))) << W << ": " << token << " " << i % in.c.D;
        }
        for (int64_t i = 0; i < out.y.size(); ++i) {
          const int64_t token = i / in.c.D, channel = i % in.c.D;
          const bool read = channel == d && token >= t && token < std::min<int64_t>(t + W, 30);
          EXPECT_TRUE(read || std::isfinite(out.y.get(i))) << W << ": " << token << " " << channel;
          EXPECT_EQ(std::isnan(out.y.get(i)), std::isnan(reference.y.get(i)))
              << W << " " << bad << ": " << token << " " << channel;
        }
      }
}

template <class Call>
void expect_nothing_to_do(const Call& call) {
  for (const ConvCase& c :
       {ConvCase{.name = "no_tokens", .B = 2, .T = 0}, ConvCase{.name = "no_rows", .B = 0},
        ConvCase{.name = "all_empty", .lengths = {0, 0}, .tail = 3}, ConvCase{.name = "no_sequences", .tail = 5}}) {
    const ConvInputs in(c);
    const ConvOutputs out(in);
    const ConvGradientOutputs gradients(in);
    run_conv(in, out, gradients, call);
    EXPECT_EQ(out.final_state.bits(), in.state.bits()) << c;
    EXPECT_EQ(gradients.d_initial.bits(), in.d_final.bits()) << c;
    for (const Tensor* zero : {&out.y, &gradients.dx, &gradients.dweight, &gradients.dbias})
      for (int64_t i = 0; i < zero->size(); ++i) EXPECT_EQ(zero->get(i), 0) << c;
  }
}

}  // namespace kda::test
