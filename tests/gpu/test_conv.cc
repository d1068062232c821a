// kda_conv and kda_conv_backward on the GPU through the C ABI, against the float64 oracle on the CPU, and what is
// promised to the bit. Small shapes, every path through the kernels: compute-sanitizer runs them as well.
#include <cmath>
#include <limits>

#include "conv_calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

constexpr char kImpl[] = "cuda_conv";  // of the backward, the former name

// The cases of the CPU, rows that fit 4-wide accesses, and runs of as many tokens as a warp ever gets.
std::vector<ConvCase> cuda_cases() {
  std::vector<ConvCase> all = conv_cases();
  for (const int64_t D : {4, 124, 128, 132})
    all.push_back({.name = "wide_" + std::to_string(D), .B = 3, .T = 30, .D = D});
  for (const int32_t dtype : {KDA_F32, KDA_BF16, KDA_F16})
    for (const int64_t D : {9, 12})
      all.push_back({.name = "dtype_" + std::to_string(dtype) + "_" + std::to_string(D),
                     .D = D,
                     .lengths = {70, 3, 0, 1, 65},
                     .tail = 9,
                     .dtype = dtype,
                     .weight_dtype = dtype,
                     .state_dtype = KDA_F32});
  for (const int32_t dtype : {KDA_F32, KDA_BF16})
    all.push_back({.name = "state_by_rows_" + std::to_string(dtype),
                   .D = 140,
                   .lengths = {1, 0, 2, 30},
                   .dtype = KDA_BF16,
                   .state_dtype = dtype,
                   .state_layout = Layout::kHeadsFirst});
  all.push_back({.name = "many_rows", .B = 300, .T = 5, .D = 12});
  all.push_back({.name = "padded_channels", .B = 2, .T = 40, .D = 12, .layout = Layout::kPadded});
  for (const int64_t D : {3, 4})
    all.push_back({.name = "long_" + std::to_string(D), .T = 300000, .D = D, .dtype = KDA_BF16});
  return all;
}

class ConvOnCuda : public OnCuda, public testing::WithParamInterface<ConvCase> {
 protected:
  ConvOnCuda() : c(GetParam()), in(c) {}
  const ConvCase c;
  const ConvInputs in;
};

TEST_P(ConvOnCuda, Forward) {
  ConvOutputs reference(in, true), out(in);
  run(conv_args(in, reference), {.impl = "reference"});
  run_on_cuda(conv_args(in, out), kImpl);
  if (HasFatalFailure()) return;
  expect_conv_close(c, reference.tensors(), out.tensors());
}

// The final state is exact in the dtype of x.
TEST_P(ConvOnCuda, FinalState) {
  if (c.dtype != c.state_dtype) GTEST_SKIP();
  ConvOutputs exact(in), out(in);
  run(conv_args(in, exact), {.impl = "reference"});
  run_on_cuda(conv_args(in, out), kImpl);
  EXPECT_EQ(out.final_state.bits(), exact.final_state.bits());
}

TEST_P(ConvOnCuda, Backward) {
  ConvGradientOutputs reference(in, true), out(in), again(in);
  run(conv_backward_args(in, reference), {.impl = "reference"});
  run_on_cuda(conv_backward_args(in, out), kImpl);
  run_on_cuda(conv_backward_args(in, again), kImpl);
  if (HasFatalFailure()) return;
  expect_conv_close(c, reference.tensors(), out.tensors());
  for (size_t i = 0; i < 4; ++i) {
    const Tensor &first = *out.tensors()[i].tensor, &second = *again.tensors()[i].tensor;
    if (first) {
      EXPECT_EQ(first.bits(), second.bits()) << i;
    }
  }
}

TEST_P(ConvOnCuda, OneGradientAtATime) {
  expect_each_alone([&] { return ConvGradientOutputs(in); },
                    [&](const auto& out) { run_on_cuda(conv_backward_args(in, out), kImpl); });
}

INSTANTIATE_TEST_SUITE_P(All, ConvOnCuda, testing::ValuesIn(cuda_cases()),
                         [](const auto& info) { return info.param.name; });

// ---- promises ----

using ConvPromiseOnCuda = OnCuda;

// Packed sequences have the bits that each has alone.
TEST_F(ConvPromiseOnCuda, NeighboursDoNotMatter) {
  for (const char* name : {"packed_W2", "packed_W3", "packed_W4", "blocks_start_inside", "mixed"}) {
    const ConvInputs in(find_conv_case(name));
    const ConvOutputs all(in);
    const ConvGradientOutputs all_gradients(in);
    run_on_cuda(conv_args(in, all), kImpl);
    run_on_cuda(conv_backward_args(in, all_gradients), kImpl);
    for (int64_t n = 0; n < in.N; ++n) {
      ConvCase c = in.c;
      c.lengths.clear(), c.tail = 0, c.T = in.length(n);
      ConvInputs one(c);
      one.weight = in.weight.clone(), one.bias = in.bias.clone();
      for (const auto& [to, from] : {std::pair{&one.x, &in.x}, {&one.dy, &in.dy}})
        for (int64_t i = 0; i < to->size(); ++i) to->set(i, from->get(in.begin(n) * c.D + i));
      for (const auto& [to, from] : {std::pair{&one.state, &in.state}, {&one.d_final, &in.d_final}})
        for (int64_t i = 0; i < to->size(); ++i) to->set(i, from->get(n * to->size() + i));
      const ConvOutputs alone(one);
      const ConvGradientOutputs gradients(one);
      run_on_cuda(conv_args(one, alone), kImpl);
      run_on_cuda(conv_backward_args(one, gradients), kImpl);
      EXPECT_EQ(alone.y.bits(), all.y.bits(1, in.begin(n), c.T)) << name << " " << n;
      EXPECT_EQ(alone.final_state.bits(), all.final_state.bits(0, n, 1)) << name << " " << n;
      EXPECT_EQ(gradients.dx.bits(), all_gradients.dx.bits(1, in.begin(n), c.T)) << name << " " << n;
      EXPECT_EQ(gradients.d_initial.bits(), all_gradients.d_initial.bits(0, n, 1)) << name << " " << n;
    }
  }
}

// One call, or two in place with the state carried between: the same bits, whichever kind of block handles a token.
TEST_F(ConvPromiseOnCuda, SplitAnywhere) {
  for (const int64_t W : {2, 3, 4})
    for (const int64_t split : {0, 1, 2, 3, 4, 5, 11, 64, 137, 138, 139, 140}) {
      const ConvInputs in({.name = "split", .T = 140, .D = 132, .W = W});
      const ConvOutputs whole(in), parts(in);
      run_on_cuda(conv_args(in, whole), kImpl);
      const Tensor state = in.state.clone();
      kda_conv_args a = conv_args(in, parts);
      a.initial_state = a.final_state = state;  // in place
      a.x.shape[1] = a.y.shape[1] = split;
      run_on_cuda(a, kImpl);
      const int64_t offset = split * in.c.D * static_cast<int64_t>(sizeof(float));
      a.x.data = static_cast<char*>(a.x.data) + offset, a.y.data = static_cast<char*>(a.y.data) + offset;
      a.x.shape[1] = a.y.shape[1] = in.T - split;
      run_on_cuda(a, kImpl);
      EXPECT_EQ(parts.y.bits(), whole.y.bits()) << W << " " << split;
      EXPECT_EQ(state.bits(), whole.final_state.bits()) << W << " " << split;
    }
}

// One channel a thread, or four: the same bits.
TEST_F(ConvPromiseOnCuda, WidthOfAccessesDoesNotMatter) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16, KDA_F16}) {
    const ConvInputs in({.name = "wide", .B = 2, .T = 50, .D = 132, .dtype = dtype, .state_dtype = dtype});
    const ConvOutputs wide(in);
    run_on_cuda(conv_args(in, wide), kImpl);
    ConvCase c = in.c;
    c.D = 131;
    ConvInputs narrow(c);
    const auto copy = [&](Tensor& to, const Tensor& from, int64_t inner) {  // [.., D, inner] without the last channel
      for (int64_t i = 0; i < to.size(); ++i) to.set(i, from.get(i / (131 * inner) * 132 * inner + i % (131 * inner)));
    };
    copy(narrow.x, in.x, 1), copy(narrow.weight, in.weight, c.W), copy(narrow.bias, in.bias, 1);
    copy(narrow.state, in.state, c.W - 1);
    const ConvOutputs got(narrow);
    run_on_cuda(conv_args(narrow, got), kImpl);
    EXPECT_EQ(got.y.bits(), wide.y.bits(2, 0, 131)) << dtype;
    EXPECT_EQ(got.final_state.bits(), wide.final_state.bits(1, 0, 131)) << dtype;
  }
}

// Rows apart from one another, states as [N,D,W-1] and as [N,W-1,D], with and without gaps, and addresses that fit an
// element only: all that accesses of four channels do not fit.
TEST_F(ConvPromiseOnCuda, AnyStrides) {
  constexpr int64_t N = 2, T = 5;
  Random random(0);
  const auto filled = [&](std::vector<int64_t> shape) {
    Tensor t(KDA_BF16, std::move(shape));
    for (int64_t i = 0; i < t.size(); ++i) t.set(i, random.normal());
    return t;
  };
  // Views of the first elements of a dimension.
  const auto rows = [](const Tensor& t, int64_t D) {
    kda_tensor view = t;
    view.shape[view.ndim - 1] = D;
    return view;
  };
  const auto state_shape = [](int kind, int64_t D, int64_t keep) {
    const int64_t with_gap = D + kind % 2 * 3;
    return kind < 2 ? std::vector<int64_t>{N, with_gap, keep} : std::vector<int64_t>{N, keep, with_gap};
  };
  const auto state = [](const Tensor& t, int kind, int64_t D) {
    kda_tensor view = t;
    if (kind >= 2) std::swap(view.shape[1], view.shape[2]), std::swap(view.stride[1], view.stride[2]);
    view.shape[1] = D;
    return view;
  };
  for (const int64_t W : {3, 4})
    for (const int64_t D : {9, 12})
      for (const int64_t row : {12, 13, 16})
        for (const int64_t taps : {W, int64_t{4}, int64_t{5}})
          for (const int from : {0, 1, 2, 3})
            for (const int to : {from, (from + 1) % 4})
              for (const int64_t shift : {0, 1}) {
                const Tensor x = filled({N, T, row}), weight = filled({D, taps}), bias = filled({D});
                const Tensor initial = filled(state_shape(from, D, W - 1));
                const Tensor y(KDA_BF16, {N, T, row}), exact_y(KDA_F64, {N, T, D});
                const Tensor last(KDA_BF16, state_shape(to, D, W - 1)), exact_last(KDA_F64, {N, D, W - 1});
                kda_conv_args a = KDA_CONV_ARGS_INIT;
                a.x = rows(x, D), a.weight = rows(weight, W), a.bias = bias, a.silu = 1;
                a.initial_state = state(initial, from, D), a.final_state = exact_last, a.y = exact_y;
                run(a, {.impl = "reference"});
                a.y = rows(y, D), a.final_state = state(last, to, D);
                run_on_cuda(a, kImpl, shift);
                if (HasFatalFailure()) return;
                const auto what = [&] {
                  return testing::Message() << "W " << W << " D " << D << " row " << row << " taps " << taps << " from "
                                            << from << " to " << to << " shift " << shift;
                };
                for (int64_t i = 0; i < exact_y.size(); ++i)
                  EXPECT_NEAR(y.get(i / D * row + i % D), exact_y.get(i), 4e-3 * (1 + std::abs(exact_y.get(i))))
                      << what();
                EXPECT_EQ(y.unwritten(), N * T * (row - D)) << what();
                const int64_t inner = to < 2 ? W - 1 : D + to % 2 * 3;  // of the final state's memory
                for (int64_t n = 0; n < N; ++n)
                  for (int64_t d = 0; d < D; ++d)
                    for (int64_t i = 0; i < W - 1; ++i)
                      EXPECT_EQ(last.get((n * (last.size() / N / inner) + (to < 2 ? d : i)) * inner + (to < 2 ? i : d)),
                                exact_last.get((n * D + d) * (W - 1) + i))
                          << what();
                EXPECT_EQ(last.unwritten(), to % 2 * 3 * N * (W - 1)) << what();
              }
}

// NaN or infinity reaches the W outputs of its channel that read it.
TEST_F(ConvPromiseOnCuda, NaNStaysInItsChannelAndWindow) {
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
        run_on_cuda(conv_args(in, out), kImpl);
        run_on_cuda(conv_backward_args(in, gradients), kImpl);
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

// A pool with its slots in another order, with padding and slots that hold NaN; in place, and from one pool to
// another.
TEST_F(ConvPromiseOnCuda, PoolsTouchOnlyTheirSlots) {
  for (const int32_t state_dtype : {KDA_F32, KDA_BF16})
    for (const int first_valid : {0, 1})
      for (const bool in_place : {true, false}) {
        const ConvCase c{.name = "pool", .lengths = {5, 1, 0, 2, 9, 40, 3}, .tail = 2, .state_dtype = state_dtype};
        const ConvInputs in(c);
        const int64_t slot_size = c.D * (c.W - 1), slots = 9;
        const std::vector<double> index = {7, first_valid - 1.0, 1, 3, 12, 5, 8};  // 12: beyond the pool
        Tensor pool(state_dtype, {slots, c.D, c.W - 1}, Layout::kPadded), indices(KDA_I32, {in.N}, index);
        Tensor known(KDA_BOOL, {in.N}, {1, 1, 1, 0, 1, 1, 1});  // slot 3 holds NaN, but starts anew
        for (int64_t n = 0; n < in.N; ++n)
          for (int64_t i = 0; index[n] >= first_valid && index[n] < slots && n != 3 && i < slot_size; ++i)
            pool.set(static_cast<int64_t>(index[n]) * slot_size + i, in.state.get(n * slot_size + i));
        Tensor other(state_dtype, {slots, c.D, c.W - 1}, Layout::kPadded);
        const ConvOutputs out(in), reference(in);
        const auto args = [&](const Tensor& from, const Tensor& to, const Tensor& slots_of, const ConvOutputs& o) {
          kda_conv_args a = conv_args(in, o);
          a.initial_state = from, a.final_state = to, a.state_indices = slots_of, a.has_initial_state = known;
          a.first_valid_slot = first_valid;
          return a;
        };
        Tensor exact = pool.clone(), exact_other = other.clone(), clipped = indices.clone();
        clipped.set(4, -1);
        run(args(exact, in_place ? exact : exact_other, clipped, reference), {.impl = "reference"});
        run_on_cuda(args(pool, in_place ? pool : other, indices, out), kImpl);
        if (HasFatalFailure()) return;
        EXPECT_TRUE(close(reference.y, out.y, state_dtype == KDA_F32 ? 1e-6 : 0.003));
        for (const auto& [got, want] : {std::pair{&pool, &exact}, {&other, &exact_other}}) {
          EXPECT_TRUE(got->margins_intact());
          for (int64_t slot = 0; slot < slots; ++slot)
            EXPECT_EQ(got->bits(0, slot, 1), want->bits(0, slot, 1)) << slot << " " << in_place << " " << first_valid;
        }
      }
}

// The state is written, but none is read.
TEST_F(ConvPromiseOnCuda, FinalStatesAlone) {
  for (const char* name : {"stateless_W4", "no_bias_no_silu"}) {
    const ConvInputs in(find_conv_case(name));
    const Tensor exact(KDA_F64, {in.N + 1, in.c.D, in.c.W - 1}), got(KDA_F32, {in.N + 1, in.c.D, in.c.W - 1});
    Tensor indices(KDA_I32, {in.N});
    for (int64_t n = 0; n < in.N; ++n) indices.set(n, static_cast<double>(in.N - n));
    const ConvOutputs out(in), reference(in, true);
    kda_conv_args a = conv_args(in, reference), b = conv_args(in, out);
    a.final_state = exact, b.final_state = got, a.state_indices = b.state_indices = indices;
    run(a, {.impl = "reference"});
    run_on_cuda(b, kImpl);
    EXPECT_TRUE(close(exact, got, 1e-6)) << name;
    EXPECT_TRUE(close(reference.y, out.y, 1e-6)) << name;
    EXPECT_TRUE(got.bits(0, 0, 1).all('\xff')) << name;
  }
}

// Whatever cu_seqlens holds on the device, nothing outside of the tensors is touched.
TEST_F(ConvPromiseOnCuda, LengthsAreCutToTheTokens) {
  for (const std::vector<double>& cu : std::vector<std::vector<double>>{
           {0, 50, 20, 90}, {-7, 10, 12, 40}, {5, 9, 9, 30}, {90, 91, 92, 93}, {40, 30, 20, 10}}) {
    ConvInputs in({.name = "garbage", .D = 12, .lengths = {10, 10, 10}, .tail = 10});
    for (int64_t i = 0; i < 4; ++i) in.cu_seqlens.set(i, cu[i]);
    const ConvOutputs out(in);
    const ConvGradientOutputs gradients(in);
    run_on_cuda(conv_args(in, out), kImpl);
    run_on_cuda(conv_backward_args(in, gradients), kImpl);
    EXPECT_TRUE(out.y.margins_intact() && out.final_state.margins_intact() && gradients.dx.margins_intact());
    EXPECT_EQ(out.final_state.unwritten(), 0);
  }
}

TEST_F(ConvPromiseOnCuda, NothingToDo) {
  for (const ConvCase& c :
       {ConvCase{.name = "no_tokens", .B = 2, .T = 0}, ConvCase{.name = "no_rows", .B = 0},
        ConvCase{.name = "all_empty", .lengths = {0, 0}, .tail = 3}, ConvCase{.name = "no_sequences", .tail = 5}}) {
    const ConvInputs in(c);
    const ConvOutputs out(in);
    const ConvGradientOutputs gradients(in);
    run_on_cuda(conv_args(in, out), kImpl);
    run_on_cuda(conv_backward_args(in, gradients), kImpl);
    EXPECT_EQ(out.final_state.bits(), in.state.bits()) << c;
    EXPECT_EQ(gradients.d_initial.bits(), in.d_final.bits()) << c;
    for (const Tensor* zero : {&out.y, &gradients.dx, &gradients.dweight, &gradients.dbias})
      for (int64_t i = 0; i < zero->size(); ++i) EXPECT_EQ(zero->get(i), 0) << c;
  }
}

TEST_F(ConvPromiseOnCuda, DeclinesWhatIsTheOracles) {
  const ConvInputs in({.name = "f64", .dtype = KDA_F64});
  const ConvOutputs out(in);
  const ConvGradientOutputs gradients(in);
  kda_conv_args a = conv_args(in, out);
  kda_conv_backward_args b = conv_backward_args(in, gradients);
  a.exec.device = b.exec.device = KDA_CUDA;
  for (const kda_status status : {kda_conv(&a), kda_conv_backward(&b)}) {
    EXPECT_EQ(status, KDA_UNSUPPORTED);
    const std::string error = kda_last_error();
    EXPECT_NE(error.find("float64 runs on `reference` only"), std::string::npos) << error;
  }
}

TEST_F(ConvPromiseOnCuda, TooSmallAWorkspaceIsRefused) {
  const ConvInputs in({.name = "workspace"});
  const ConvGradientOutputs gradients(in);
  expect_workspace_is_checked(conv_backward_args(in, gradients), kImpl);
}

}  // namespace
}  // namespace kda::test
