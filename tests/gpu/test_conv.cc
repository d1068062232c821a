// kda_conv and kda_conv_backward on the GPU through the C ABI, against the float64 oracle on the CPU, and what is
// promised to the bit. Small shapes, every path through the kernels: compute-sanitizer runs them as well.
#include <cmath>
#include <limits>

#include "conv_calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

const char* impl_of(const kda_conv_args&) { return "cuda_conv"; }
const char* impl_of(const kda_conv_backward_args&) { return "cuda_conv_backward"; }

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
  // Parts that fit accesses of four, or not; one token of 16 bits, which has a kernel of its own; long ones.
  for (const int64_t first : {64, 62, 63})
    for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
      const std::string name = std::to_string(first) + "_" + std::to_string(dtype);
      const ConvCase wide{.name = "parts_wide_" + name,
                          .D = 640,
                          .lengths = {70, 3, 0, 1, 65},
                          .tail = 9,
                          .dtype = dtype,
                          .weight_dtype = dtype,
                          .state_dtype = dtype,
                          .parts = {first, 576 - first, 64}};
      ConvCase token = wide, two = wide, odd = wide;
      token.name = "parts_token_" + name, token.lengths.clear(), token.tail = 0, token.B = 3, token.T = 1;
      two.name = "parts_two_" + name, two.parts = {first, 640 - first};
      odd.name = "parts_odd_" + name, odd.parts = {64, 514 - first, 62 + first};
      all.insert(all.end(), {wide, token, two, odd});
    }
  all.push_back({.name = "many_rows", .B = 300, .T = 5, .D = 12});
  all.push_back({.name = "padded_channels", .B = 2, .T = 40, .D = 12, .layout = Layout::kPadded});
  for (const int64_t D : {3, 4})
    all.push_back({.name = "long_" + std::to_string(D), .T = 300000, .D = D, .dtype = KDA_BF16});
  return all;
}

const auto on_gpu = [](const auto& a) { run_on_cuda(a, impl_of(a)); };

class ConvOnCuda : public OnCuda, public testing::WithParamInterface<ConvCase> {
 protected:
  ConvOnCuda() : c(GetParam()), in(c) {}
  const ConvCase c;
  const ConvInputs in;
};

TEST_P(ConvOnCuda, Forward) {
  ConvOutputs reference(in, true), out(in);
  run(conv_args(in, reference), {.impl = "reference"});
  run_on_cuda(conv_args(in, out), "cuda_conv");
  if (HasFatalFailure()) return;
  expect_conv_close(c, reference.tensors(), out.tensors());
}

// The final state is exact in the dtype of x.
TEST_P(ConvOnCuda, FinalState) {
  if (c.dtype != c.state_dtype) GTEST_SKIP() << "the state is rounded";
  ConvOutputs exact(in), out(in);
  run(conv_args(in, exact), {.impl = "reference"});
  run_on_cuda(conv_args(in, out), "cuda_conv");
  EXPECT_EQ(out.final_state.bits(), exact.final_state.bits());
}

TEST_P(ConvOnCuda, Backward) {
  ConvGradientOutputs reference(in, true), out(in), again(in);
  run(conv_backward_args(in, reference), {.impl = "reference"});
  run_on_cuda(conv_backward_args(in, out), "cuda_conv_backward");
  run_on_cuda(conv_backward_args(in, again), "cuda_conv_backward");
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
                    [&](const auto& out) { run_on_cuda(conv_backward_args(in, out), "cuda_conv_backward"); });
}

INSTANTIATE_TEST_SUITE_P(All, ConvOnCuda, testing::ValuesIn(cuda_cases()),
                         [](const auto& info) { return info.param.name; });

// ---- promises ----

using ConvPromiseOnCuda = OnCuda;

TEST_F(ConvPromiseOnCuda, NeighboursDoNotMatter) {
  for (const char* name : {"packed_W2", "packed_W3", "packed_W4", "blocks_start_inside", "mixed"})
    expect_neighbours_do_not_matter(find_conv_case(name), on_gpu);
}

// Whichever kind of block handles a token.
TEST_F(ConvPromiseOnCuda, SplitAnywhere) {
  expect_splits_do_not_matter(132, {0, 1, 2, 3, 4, 5, 11, 64, 137, 138, 139, 140}, on_gpu);
}

// One channel a thread, or four: the same bits.
TEST_F(ConvPromiseOnCuda, WidthOfAccessesDoesNotMatter) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16, KDA_F16}) {
    const ConvInputs in({.name = "wide", .B = 2, .T = 50, .D = 132, .dtype = dtype, .state_dtype = dtype});
    const ConvOutputs wide(in);
    run_on_cuda(conv_args(in, wide), "cuda_conv");
    ConvCase c = in.c;
    c.D = 131;
    ConvInputs narrow(c);
    const auto copy = [&](Tensor& to, const Tensor& from, int64_t inner) {  // [.., D, inner] without the last channel
      for (int64_t i = 0; i < to.size(); ++i) to.set(i, from.get(i / (131 * inner) * 132 * inner + i % (131 * inner)));
    };
    copy(narrow.x, in.x, 1), copy(narrow.weight, in.weight, c.W), copy(narrow.bias, in.bias, 1);
    copy(narrow.state, in.state, c.W - 1);
    const ConvOutputs got(narrow);
    run_on_cuda(conv_args(narrow, got), "cuda_conv");
    EXPECT_EQ(got.y.bits(), wide.y.bits(2, 0, 131)) << dtype;
    EXPECT_EQ(got.final_state.bits(), wide.final_state.bits(1, 0, 131)) << dtype;
  }
}

// x in parts: the bits of one x.
TEST_F(ConvPromiseOnCuda, PartsDoNotMatter) {
  for (const ConvCase& c : cuda_cases()) {
    if (c.parts.empty()) continue;
    ConvCase of_one = c;
    of_one.parts.clear();
    const ConvInputs in(c), whole(of_one);
    const ConvOutputs got(in), want(whole);
    const ConvGradientOutputs gradients(in), want_gradients(whole);
    run_on_cuda(conv_args(in, got), "cuda_conv"), run_on_cuda(conv_args(whole, want), "cuda_conv");
    run_on_cuda(conv_backward_args(in, gradients), "cuda_conv_backward"),
        run_on_cuda(conv_backward_args(whole, want_gradients), "cuda_conv_backward");
    EXPECT_EQ(got.y.bits(), want.y.bits()) << c;
    EXPECT_EQ(got.final_state.bits(), want.final_state.bits()) << c;
    EXPECT_EQ(gradients.dx.bits(), want_gradients.dx.bits()) << c;
    EXPECT_EQ(gradients.dweight.bits(), want_gradients.dweight.bits()) << c;
    EXPECT_EQ(gradients.dbias.bits(), want_gradients.dbias.bits()) << c;
    EXPECT_EQ(gradients.d_initial.bits(), want_gradients.d_initial.bits()) << c;
  }
}

// One part whose rows do not fit accesses of four, beside two that do.
TEST_F(ConvPromiseOnCuda, PartsOfAnyStrides) {
  for (const int64_t T : {1, 20})
    for (const int odd : {0, 1, 2}) {
      const ConvInputs in({.name = "strides",
                           .B = 2,
                           .T = T,
                           .D = 48,
                           .dtype = KDA_BF16,
                           .weight_dtype = KDA_BF16,
                           .state_dtype = KDA_BF16,
                           .parts = {16, 16, 16}});
      Tensor rows(KDA_BF16, {2, T, 17});
      for (int64_t i = 0; i < 2 * T * 16; ++i) rows.set(i / 16 * 17 + i % 16, in.parts[odd].get(i));
      const auto made = [&](bool in_parts) {
        const ConvOutputs out(in);
        const ConvGradientOutputs gradients(in);
        kda_conv_args a = conv_args(in, out);
        kda_conv_backward_args b = conv_backward_args(in, gradients);
        for (kda_tensor* x : {odd == 0 ? &a.x : odd == 1 ? &a.x1 : &a.x2, odd == 0 ? &b.x : odd == 1 ? &b.x1 : &b.x2})
          *x = rows, x->shape[2] = 16;
        if (!in_parts) a.x = b.x = in.x, a.x1 = a.x2 = b.x1 = b.x2 = {};
        run_on_cuda(a, impl_of(a)), run_on_cuda(b, impl_of(b));
        return std::vector{out.y.bits(), out.final_state.bits(), gradients.dx.bits(), gradients.dweight.bits()};
      };
      EXPECT_EQ(made(true), made(false)) << T << " " << odd;
    }
}

// A pool of states in both layouts, with padding, one token or more a sequence, and checkpoints.
TEST_F(ConvPromiseOnCuda, PartsWithPoolsAndCheckpoints) {
  for (const int64_t T : {1, 33})
    for (const Layout layout : {Layout::kDense, Layout::kHeadsFirst})
      for (const int64_t first : {8, 6}) {
        const ConvInputs in({.name = "pool",
                             .B = 3,
                             .T = T,
                             .D = 40,
                             .dtype = KDA_BF16,
                             .weight_dtype = KDA_BF16,
                             .parts = {first, 20, 20 - first}});
        const Tensor slots(KDA_I32, {3}, {4, -1, 2}), kept(KDA_I32, {3, 2}, {1, 3, -1, -1, 2, 0});
        const auto made = [&](bool in_parts, const char* impl) {
          const ConvOutputs out(in);
          Tensor pool(KDA_BF16, {5, 40, 3}, layout), checkpoints(KDA_BF16, {4, 40, 3});
          Random random(3);
          for (int64_t i = 0; i < pool.size(); ++i) pool.set(i, random.normal());
          kda_conv_args a = conv_args(in, out);
          if (!in_parts) a.x = in.x, a.x1 = a.x2 = {};
          a.initial_state = a.final_state = pool, a.state_indices = slots;
          a.checkpoints = checkpoints, a.checkpoint_slots = kept, a.checkpoint_every = 16;
          if (impl) run(a, {.impl = impl});
          else run_on_cuda(a, impl_of(a));
          return std::vector{pool.bits(), checkpoints.bits(), out.y.bits()};
        };
        const auto got = made(true, nullptr), whole = made(false, nullptr), exact = made(true, "reference");
        EXPECT_EQ(got, whole) << T << " " << first;
        EXPECT_EQ(got[0], exact[0]) << T << " " << first;
        EXPECT_EQ(got[1], exact[1]) << T << " " << first;
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
                run_on_cuda(a, impl_of(a), shift);
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

TEST_F(ConvPromiseOnCuda, NaNStaysInItsChannelAndWindow) { expect_bad_numbers_stay_in_their_window(on_gpu); }

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
        run_on_cuda(args(pool, in_place ? pool : other, indices, out), "cuda_conv");
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
    run_on_cuda(b, impl_of(b));
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
    run_on_cuda(conv_args(in, out), "cuda_conv");
    run_on_cuda(conv_backward_args(in, gradients), "cuda_conv_backward");
    EXPECT_TRUE(out.y.margins_intact() && out.final_state.margins_intact() && gradients.dx.margins_intact());
    EXPECT_EQ(out.final_state.unwritten(), 0);
  }
}

TEST_F(ConvPromiseOnCuda, NothingToDo) { expect_nothing_to_do(on_gpu); }

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
  expect_workspace_is_checked(conv_backward_args(in, gradients), "cuda_conv_backward");
}

}  // namespace
}  // namespace kda::test
