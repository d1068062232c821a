// kda_forward on the GPU through the C ABI, against the float64 oracle on the CPU, and what is promised to the bit.
// Small shapes, every path through the kernels: compute-sanitizer runs them as well.
#include <algorithm>
#include <cmath>
#include <set>

#include "calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

constexpr char kRecurrent[] = "cuda_prefill_recurrent", kChunked[] = "cuda_prefill_chunk";

// Implementations differ in what they take and in how exact they are.
struct On {
  const char* impl;
  Case c;
};
void PrintTo(const On& on, std::ostream* out) { *out << on.impl << ", " << on.c.name; }
bool is_chunked(const char* impl) { return std::string(impl) == kChunked; }

// The cases of the CPU, sizes in between, and calls of so many columns that a thread takes two.
std::vector<Case> recurrent_cases() {
  std::vector<Case> all = cases();
  all.push_back({.name = "K61_V37", .B = 2, .T = 70, .HV = 2, .K = 61, .V = 37, .layout = Layout::kPadded});
  all.push_back({.name = "many", .B = 144, .T = 12, .HV = 2, .K = 72, .V = 66});
  all.push_back({.name = "many_K64", .B = 144, .T = 12, .HV = 2, .K = 64, .V = 64, .state_dtype = KDA_BF16});
  all.push_back({.name = "many_K256", .B = 80, .T = 9, .HV = 2, .K = 256, .V = 40, .dtype = KDA_BF16});
  for (const int64_t K : {9, 90, 200})
    all.push_back({.name = "many_K_first_" + std::to_string(K),
                   .B = 147,
                   .T = 9,
                   .HV = 2,
                   .K = K,
                   .V = 65,
                   .state_layout = KDA_STATE_K_FIRST});
  for (const Case& c : edge_cases()) all.push_back(c);
  return all;
}

// A case of the CPU in sizes of tensor cores.
Case wide(Case c) {
  c.K = c.K <= 64 ? 64 : 128, c.V = c.V <= 64 ? 64 : 128;
  return c;
}
std::vector<Case> chunked_cases() {
  std::vector<Case> all;
  for (const Case& c : cases()) all.push_back(wide(c));
  for (const Case& c : edge_cases()) all.push_back(wide(c));
  for (const int64_t T : {1, 31, 32, 33, 97})
    all.push_back({.name = "bf16_tokens_" + std::to_string(T),
                   .B = 2,
                   .T = T,
                   .H = 2,
                   .HV = 4,
                   .K = 128,
                   .V = 64,
                   .dtype = KDA_BF16,
                   .qk_l2norm = true});
  Case c = wide(find_case("K128_V128"));
  c.name = "floor", c.gate_form = KDA_GATE_LOWER_BOUND, c.gates = Gates::kRaw, c.lower_bound = -5, c.A_log = true;
  all.push_back(c);
  c.name = "wild", c.gate_form = KDA_GATE_LOG, c.gates = Gates::kWild, c.lower_bound = 0, c.A_log = false;
  all.push_back(c);
  // More sequences than a warp looks at together.
  all.push_back({.name = "many_packed", .K = 64, .V = 64, .lengths = std::vector<int64_t>(70, 3), .dtype = KDA_BF16});
  return all;
}
std::vector<On> everywhere() {
  std::vector<On> all;
  for (const Case& c : recurrent_cases()) all.push_back({kRecurrent, c});
  for (const Case& c : chunked_cases()) all.push_back({kChunked, c});
  return all;
}

// The budgets of products of f16 operands (math.md 8 allows 0.005), and those where all keys are the same. Where
// gates have all sizes, most of a state is 0, and the largest error is compared with the mean of what is there.
double least_budget(const char* impl, const Case& c) {
  if (!is_chunked(impl)) return 0;
  if (c.gates == Gates::kEdges || c.keys == Keys::kAnyLength) return 0.003;
  if (c.keys != Keys::kIdentical) return 0.002;
  return c.betas == Betas::kNearTwo ? 0.03 : 0.005;
}

class ForwardOnCuda : public OnCuda, public testing::WithParamInterface<On> {
 protected:
  ForwardOnCuda() : impl(GetParam().impl), c(GetParam().c), in(c) {}
  // Of the same o and hT, in memory of its own.
  Tensor like_v(int32_t dtype) const { return Tensor(dtype, {in.B, in.T, c.HV, c.V}, c.layout); }
  const char* const impl;
  const Case c;
  const Inputs in;
};

// With the states before every `every`-th chunk, and u of every token.
TEST_P(ForwardOnCuda, IsTheOracle) {
  for (const int32_t every : {0, 1, 2}) {
    SCOPED_TRACE(every);
    ForwardOutputs exact(in, false, true), got(in, false);
    if (every) {
      exact.save_states(in, every, true), got.save_states(in, every);
      exact.v_new = like_v(KDA_F64), got.v_new = like_v(KDA_F32);
    }
    run(forward_args(in, exact), {.impl = "reference"});
    run_on_cuda(forward_args(in, got), impl);
    if (HasFatalFailure()) return;
    for (size_t i = 0; i < got.tensors().size(); ++i)
      if (const Tensor& t = *got.tensors()[i].tensor)
        expect_close(*exact.tensors()[i].tensor, t, got.tensors()[i].name, least_budget(impl, c));
  }
}

// Token by token it is as many calls of decode as there are tokens.
TEST_P(ForwardOnCuda, IsDecodeToTheBit) {
  if (is_chunked(impl)) return;
  const ForwardOutputs forward(in, false), tokens(in, false);
  run_on_cuda(forward_args(in, forward), impl);
  kda_decode_args decode = KDA_DECODE_ARGS_INIT;
  decode.in = in.view(), decode.o = tokens.o;
  decode.states.h0 = in.h0, decode.states.hT = tokens.hT;
  run_on_cuda(decode, "cuda_decode");
  EXPECT_EQ(forward.o.bits(), tokens.o.bits());
  EXPECT_EQ(forward.hT.bits(), tokens.hT.bits());
}

// In place on a pool, with some sequences as padding; in memory that fits no wide access, or only the least wide one.
TEST_P(ForwardOnCuda, InPlaceOnAPool) {
  const auto args = [&](const Pool& pool, const Tensor& o) {
    const kda_decode_args decode = decode_args(in, pool, pool, o);
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = decode.in, a.states = decode.states, a.o = o;
    a.states.first_valid_slot = static_cast<int32_t>(pool.slots.back()) + (in.N > 1);  // the last slot is the lowest
    return a;
  };
  const Pool exact(in, KDA_F64);
  const Tensor exact_o = like_v(KDA_F64);
  run(args(exact, exact_o), {.impl = "reference"});
  for (const int64_t shift : {0, 1, 4}) {
    const Pool got(in, c.state_dtype);
    const Tensor o = like_v(c.dtype);
    run_on_cuda(args(got, o), impl, shift);
    if (HasFatalFailure()) return;
    expect_close(exact_o, o, "o", least_budget(impl, c));
    expect_close(exact.h, got.h, "state", least_budget(impl, c));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardOnCuda, testing::ValuesIn(everywhere()),
                         [](const auto& info) { return info.param.impl + ("_" + info.param.c.name); });

// ---- calls that go on where others ended ----

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

class ForwardPromiseOnCuda : public OnCuda, public testing::WithParamInterface<const char*> {
 protected:
  const char* const impl = GetParam();
  bool chunked() const { return is_chunked(impl); }
  Case sized(Case c) const { return chunked() ? wide(c) : c; }
  // Compares within the budget of the implementation.
  void expect_near(const Tensor& expected, const Tensor& got, const char* name) const {
    expect_close(expected, got, name, chunked() ? 0.002 : 0);
  }
};
INSTANTIATE_TEST_SUITE_P(All, ForwardPromiseOnCuda, testing::Values(kRecurrent, kChunked),
                         [](const auto& info) { return std::string(info.param); });

void multiply(Tensor& t, double factor) {
  for (int64_t i = 0; t && i < t.size(); ++i) t.set(i, t.get(i) * factor);
}
// The values of a case, and of its states, of any size.
Inputs scaled(const Case& c, double of_v, double of_h0) {
  Inputs in(c);
  multiply(in.v, of_v), multiply(in.h0, of_h0);
  return in;
}
constexpr std::pair<double, double> kScales[] = {{1, 1}, {1e-6, 1e-6}, {1e6, 1e6}, {1e6, 1}, {1, 1e6}, {1e-6, 1}};

TEST_P(ForwardPromiseOnCuda, ValuesOfAnySize) {
  for (const char* name : {"packed", "gates_slow", "lower_bound", "f16"})
    for (const auto& [of_v, of_h0] : kScales) {
      SCOPED_TRACE(testing::Message() << name << ", v times " << of_v << ", h0 times " << of_h0);
      Case c = sized(find_case(name));
      if (c.dtype == KDA_F16) c.dtype = KDA_BF16;
      const Inputs in = scaled(c, of_v, of_h0);
      const ForwardOutputs exact(in, false, true), got(in, false);
      run(forward_args(in, exact), {.impl = "reference"});
      run_on_cuda(forward_args(in, got), impl);
      // What is left of a large state may lie in a few elements.
      expect_close(exact.o, got.o, "o", chunked() ? 0.005 : 0);
      expect_close(exact.hT, got.hT, "hT", chunked() ? 0.005 : 0);
    }
}

TEST_P(ForwardPromiseOnCuda, SplitsChangeNoBit) {
  for (const char* name : {"tokens_200", "softplus_bias", "state_K_first", "identical_keys_beta_2", "gates_wild"})
    for (const auto& [of_v, of_h0] : kScales) {
      Case c = sized(find_case(name));
      c.B = 1, c.T = 200;
      const Inputs in = scaled(c, of_v, of_h0);
      const auto states = [&] { return Tensor(KDA_F32, in.state_shape(1)); };
      const Tensor whole_o(c.dtype, {1, 200, c.HV, c.V}), whole_h = states();
      run_on_cuda(slice(in, 0, 200, in.h0, whole_h, whole_o), impl);
      for (const int64_t split :
           chunked() ? std::vector<int64_t>{64, 128, 192} : std::vector<int64_t>{1, 17, 64, 199}) {
        const Tensor o(c.dtype, {1, 200, c.HV, c.V}), middle = states(), end = states();
        run_on_cuda(slice(in, 0, split, in.h0, middle, o), impl);
        run_on_cuda(slice(in, split, 200, middle, end, o), impl);
        EXPECT_EQ(o.bits(), whole_o.bits()) << name << " split at " << split;
        EXPECT_EQ(end.bits(), whole_h.bits()) << name << " split at " << split;
      }
    }
}

// A sequence of a packed row alone has the bits it has among others.
TEST_P(ForwardPromiseOnCuda, CompanyChangesNoBit) {
  const Inputs in(sized(find_case("packed")));
  const ForwardOutputs all(in, false);
  run_on_cuda(forward_args(in, all), impl);
  for (int64_t n = 0; n < in.N; ++n) {
    const int64_t begin = in.begin(n), length = in.length(n);
    const Tensor o(in.c.dtype, {1, in.T, in.c.HV, in.c.V}), hT(KDA_F32, in.state_shape(1));
    kda_forward_args a = slice(in, begin, begin + length, {}, hT, o);
    a.in.cu_seqlens = {};
    a.states.h0 = in.h0;
    a.states.h0.data = static_cast<float*>(a.states.h0.data) + n * a.states.h0.stride[0], a.states.h0.shape[0] = 1;
    run_on_cuda(a, impl);
    EXPECT_EQ(o.bits(1, begin, length), all.o.bits(1, begin, length)) << n;
    EXPECT_EQ(hT.bits(), all.hT.bits(0, n, 1)) << n;
  }
}

// The inputs of a token reach no earlier token, not even NaN.
TEST_P(ForwardPromiseOnCuda, NothingReachesThePast) {
  for (const char* victim : {"q", "k", "v", "g", "beta"})
    for (const int64_t t : {0, 1, 4, 15, 17, 31, 32, 45, 63, 64, 69}) {
      Inputs in(sized({.name = "causal", .T = 70, .K = 20, .V = 40, .gate_divisor = t % 2 ? 1.0 : 0.02}));
      const auto o_of = [&] {
        Tensor o(in.c.dtype, {1, in.T, in.c.HV, in.c.V});
        run_on_cuda(slice(in, 0, in.T, in.h0, {}, o), impl);
        return o;
      };
      const Bits clean = o_of().bits(1, 0, t);
      for (const auto& [name, tensor] : in.tensors())
        if (name == std::string(victim))
          for (int64_t i = 0, row = tensor->size() / in.T; i < row; ++i) tensor->set(t * row + i, std::nan(""));
      const Tensor o = o_of();
      EXPECT_EQ(o.bits(1, 0, t), clean) << victim << " at token " << t;
      EXPECT_TRUE(std::isnan(o.get(o.size() * t / in.T))) << victim << " at token " << t << " itself";
    }
}

// ---- states on the way ----

// States saved of sequences that are padding, and u of their tokens, stay as they are.
TEST_P(ForwardPromiseOnCuda, NothingIsSavedOfPadding) {
  const Case c = sized({.name = "saved", .HV = 2, .K = 20, .V = 36, .lengths = {64, 70, 128, 3}, .tail = 5});
  const Inputs in(c);
  const Tensor indices(KDA_I32, {4}, {2, -1, 0, -7}), pool(KDA_F32, in.state_shape(3));
  const auto args = [&](const ForwardOutputs& out) {
    kda_forward_args a = forward_args(in, out);
    a.states = {.hT = pool, .state_indices = indices};
    return a;
  };
  ForwardOutputs exact(in, false, true), got(in, false);
  exact.save_states(in, 1, true), got.save_states(in, 1);
  exact.v_new = Tensor(KDA_F64, {1, in.T, 2, c.V}), got.v_new = Tensor(KDA_F32, {1, in.T, 2, c.V});
  run(args(exact), {.impl = "reference"});
  run_on_cuda(args(got), impl);
  expect_near(exact.o, got.o, "o");
  expect_near(exact.h, got.h, "h");
  expect_near(exact.v_new, got.v_new, "v_new");
}

TEST_P(ForwardPromiseOnCuda, CheckpointsInTheirSlots) {
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    for (const int32_t every : {64, 128}) {
      const Inputs in(sized({.name = "checkpoints",
                             .HV = 2,
                             .K = 20,
                             .V = 36,
                             .lengths = {130, 64, 0, 256, 63},
                             .state_layout = layout}));
      const ForwardOutputs out(in, false), reference(in, false, true);
      // Room for three checkpoints a sequence, so that the fourth of one sequence has none; -1 skips one.
      const Tensor slots(KDA_I32, {5, 3}, {5, -1, 0, 3, 6, 13, 7, 8, 9, 10, 11, 12, 1, 2, 4});
      const std::set<int64_t> written =
          every == 64 ? std::set<int64_t>{5, 3, 10, 11, 12} : std::set<int64_t>{5, 10, 11};
      const Tensor got(every == 64 ? KDA_F32 : KDA_BF16, in.state_shape(15), Layout::kPadded);
      const Tensor expected(KDA_F64, in.state_shape(15));
      kda_forward_args a = forward_args(in, out), r = forward_args(in, reference);
      a.checkpoint_every = r.checkpoint_every = every;
      a.checkpoint_slots = r.checkpoint_slots = slots;
      a.checkpoints = got, r.checkpoints = expected;
      run(r, {.impl = "reference"});
      run_on_cuda(a, impl);
      for (int64_t slot = 0; slot < 15; ++slot)
        EXPECT_NE(got.bits(0, slot, 1).all('\xff'), written.contains(slot)) << "slot " << slot << ", every " << every;
      expect_near(expected, got, "checkpoints");
      // A checkpoint is the final state of a call that ends there.
      if (every == 64) {
        EXPECT_EQ(got.bits(0, 3, 1), out.hT.bits(0, 1, 1));
      }
    }
}

// ---- numbers that are not checked ----

// Offsets that never fall mean the part of them that lies within the row; whatever they are, nothing else is written.
TEST_P(ForwardPromiseOnCuda, AnyLengths) {
  Inputs in(sized(find_case("packed")));
  Random random(5);
  for (int round = 0; round < 12; ++round) {
    SCOPED_TRACE(round);
    std::vector<double> offsets;
    for (int64_t n = 0; n <= in.N; ++n) offsets.push_back(static_cast<double>(random.below(2 * in.T) - in.T / 2));
    const bool fall = round % 3 == 2;
    if (!fall) std::sort(offsets.begin(), offsets.end()), offsets.front() = round % 2 ? 0 : INT32_MIN;
    if (round % 4 == 0) offsets.back() = INT32_MAX;
    const auto set = [&](double least, double most) {
      for (int64_t n = 0; n <= in.N; ++n) in.cu_seqlens.set(n, std::clamp(offsets[n], least, most));
    };
    const ForwardOutputs exact(in, false, true), got(in, false);
    set(INT32_MIN, INT32_MAX);
    run_on_cuda(forward_args(in, got), impl);
    EXPECT_TRUE(got.o.margins_intact() && got.hT.margins_intact());
    if (fall) continue;
    set(0, static_cast<double>(in.T));
    run(forward_args(in, exact), {.impl = "reference"});
    expect_near(exact.o, got.o, "o");
    expect_near(exact.hT, got.hT, "hT");
  }
}

// ---- what it declines ----

std::string refusal(kda_forward_args a, const char* impl) {
  a.exec.device = KDA_CUDA, a.exec.impl = impl;
  uint64_t bytes;
  EXPECT_EQ(query(a, &bytes), KDA_UNSUPPORTED);
  return kda_last_error();
}

TEST_P(ForwardPromiseOnCuda, RefusalsSayWhy) {
  const std::string forced = impl + std::string(" was forced but ");
  const Inputs in(sized({.name = "refused", .T = 70, .HV = 2}));
  const ForwardOutputs out(in, true);
  kda_forward_args a = forward_args(in, out);
  EXPECT_EQ(refusal(a, impl), forced + (chunked() ? "has no scores of 64 tokens to save as Aqk or Akk"
                                                  : "has no chunks to save Aqk or Akk from"));
  a.Aqk = a.Akk = {};
  void* const nowhere = reinterpret_cast<void*>(uintptr_t{1} << 46);  // so that it overlaps no output
  const kda_tensor q = a.in.q;
  for (const int64_t stride : {-q.stride[1], int64_t{1} << 30}) {
    a.in.q.data = nowhere, a.in.q.stride[1] = stride;
    EXPECT_EQ(refusal(a, impl), forced + "takes no strides below 0 or from 4 GiB on, but for the first dimension");
  }
  if (chunked()) {
    const Inputs small({.name = "small", .K = 32, .V = 64});
    const ForwardOutputs of_small(small, false);
    EXPECT_EQ(refusal(forward_args(small, of_small), impl), forced + "takes K and V of 64 or 128");
  }
  a.in.q = q, a.in.g.data = nowhere, a.in.g.dtype = KDA_F64;
  EXPECT_EQ(refusal(a, impl), forced + "float64 runs on `reference` only");
}

}  // namespace
}  // namespace kda::test
