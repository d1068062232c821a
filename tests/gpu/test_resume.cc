// Prefills with checkpoints that go on with requests at any offset, in chunks: against the float64 oracle, and what is
// promised to the bit (docs/numerics.md). kda_forward ends their chunks where those of the request would.
#include <cstring>

#include "calls.h"
#include "chunk_cases.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

constexpr double kGate = 0.005;  // of o and states (math.md 8)

std::vector<const char*> chunked(const kda_forward_args& args) {
  std::vector<const char*> all = takers("forward", args);
  std::erase_if(all, [](const char* name) { return std::strcmp(name, "cuda_prefill_recurrent") == 0; });
  EXPECT_FALSE(all.empty());
  return all;
}

// As Kimi's layers call, with any number of heads.
Case resumed(Case c) {
  c.gate_form = KDA_GATE_LOWER_BOUND, c.lower_bound = -5, c.gates = Gates::kRaw, c.A_log = c.dt_bias = true;
  c.beta_form = KDA_BETA_SIGMOID, c.qk_l2norm = true, c.dtype = c.g_dtype = c.beta_dtype = KDA_BF16;
  return c;
}

// What a call with checkpoints works on: states in place in a pool, M checkpoints of a sequence at most.
struct Resumption {
  Pool pool;
  Tensor o, checkpoints, slots, offset;
  int32_t every;

  Resumption(const Inputs& in, int32_t every, const std::vector<double>& before, int32_t kept, bool exact = false)
      : pool(in, exact ? KDA_F64 : in.c.state_dtype),
        o(exact ? KDA_F64 : in.c.dtype, {in.B, in.T, in.c.HV, in.c.V}),
        checkpoints(exact ? KDA_F64 : kept, in.state_shape(in.N * kMost)),
        slots(every % 128 ? KDA_I32 : KDA_I64, {in.N, kMost}),
        offset(every % 128 ? KDA_I64 : KDA_I32, {in.N}),
        every(every) {
    for (int64_t n = 0; n < in.N; ++n) {
      offset.set(n, before[n % before.size()]);
      for (int64_t m = 0; m < kMost; ++m) {  // in another order; some are left out
        const int64_t i = n * kMost + m;
        slots.set(i, (n + m) % 5 == 4 ? -1 : static_cast<double>(in.N * kMost - 1 - i));
      }
    }
  }
  kda_forward_args args(const Inputs& in) const {
    const kda_decode_args decode = decode_args(in, pool, pool, o);
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = decode.in, a.states = decode.states, a.o = o;
    a.checkpoints = checkpoints, a.checkpoint_slots = slots, a.checkpoint_every = every, a.checkpoint_offset = offset;
    return a;
  }
  static constexpr int64_t kMost = 3;
};

struct ResumedCase {
  Case c;
  std::vector<int32_t> every;  // each in a round of its own, with other offsets
};
void PrintTo(const ResumedCase& r, std::ostream* out) { *out << r.c.name; }

class ResumeOnCuda : public OnCuda, public testing::WithParamInterface<ResumedCase> {
 protected:
  static constexpr double kOffsets[] = {1, 37, 63, 64, 100};
};

// Every offset meets every length: sequences that end within their first chunk, at its end, behind it, and empty ones.
TEST_P(ResumeOnCuda, IsTheOracle) {
  const Inputs in(GetParam().c);
  size_t round = 0;
  for (const int32_t every : GetParam().every) {
    SCOPED_TRACE(testing::Message() << "round " << round << ", every " << every);
    std::vector<double> before;
    for (int64_t n = 0; n < in.N; ++n) before.push_back(kOffsets[(n + round) % 5] + static_cast<double>(64 * (n % 3)));
    const int32_t kept = round++ % 2 ? KDA_BF16 : KDA_F32;
    const Resumption exact(in, every, before, kept, true), sizes(in, every, before, kept);
    run(exact.args(in), {.impl = "reference"});
    for (const char* impl : chunked(sizes.args(in))) {
      SCOPED_TRACE(impl);
      const Resumption got(in, every, before, kept);
      run_on_cuda(got.args(in), impl);
      if (HasFatalFailure()) return;
      expect_close(exact.o, got.o, "o", kGate);
      expect_close(exact.pool.h, got.pool.h, "pool", kGate);
      expect_close(exact.checkpoints, got.checkpoints, "checkpoints", kGate);
    }
  }
}

std::vector<ResumedCase> resumed_cases() {
  std::vector<ResumedCase> all;
  const std::vector<int64_t> lengths = {130, 27, 70, 0, 200, 1, 64, 63};
  const std::vector<int32_t> each = {64, 128, 192, 64, 128};
  all.push_back({wide(resumed({.name = "packed", .lengths = lengths, .tail = 3})), each});
  Case small = resumed({.name = "K64_V64_packed", .K = 64, .V = 64, .lengths = lengths});
  small.state_dtype = KDA_BF16, small.state_layout = KDA_STATE_K_FIRST;
  all.push_back({small, each});
  Case narrow = resumed({.name = "K128_V64_packed", .K = 128, .V = 64, .lengths = lengths});
  narrow.gate_form = KDA_GATE_SOFTPLUS, narrow.lower_bound = 0, narrow.cu_dtype = KDA_I64;
  all.push_back({narrow, {64, 192}});
  // Several segments.
  all.push_back({wide(resumed({.name = "rows", .B = 2, .T = 300})), {64, 128}});
  all.push_back({wide(resumed({.name = "long_packed", .lengths = {450, 3, 130}, .tail = 5})), {64}});
  // Heads that pairs share.
  all.push_back({wide(resumed({.name = "shared", .HV = 3, .lengths = {130, 40, 100}})), {64}});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, ResumeOnCuda, testing::ValuesIn(resumed_cases()),
                         [](const auto& info) { return info.param.c.name; });

// ---- promises ----

// Tokens t0 .. t1 - 1 of the only row, from one f32 state to another.
kda_forward_args part(const Inputs& in, int64_t t0, int64_t t1, const Tensor& h0, const Tensor& hT, const Tensor& o) {
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = in.view(), a.states.h0 = h0, a.states.hT = hT, a.o = o;
  for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.o})
    t->data = static_cast<char*>(t->data) + t0 * t->stride[1] * dtype_size(t->dtype), t->shape[1] = t1 - t0;
  return a;
}

// A call that resumes is two calls: the tokens up to a multiple of 64 of the request, and those behind it. So are its
// checkpoints. Numbers are large and small, so that columns have other units behind the first chunk.
TEST_F(OnCuda, ResumedCallsAreTwoCalls) {
  constexpr int64_t kTokens = 150;
  for (const double size : {1.0, 1e6})
    for (const int64_t before : {100, 4}) {
      Inputs in(wide(resumed({.name = "two", .T = kTokens})));
      for (int64_t i = 0; i < in.v.size(); ++i) in.v.set(i, in.v.get(i) * (i < in.v.size() / 4 ? 1 : size));
      const int64_t opening = 64 - before % 64;
      const Tensor slots(KDA_I32, {1, 4}, {2, 0, 1, 3}), offset(KDA_I32, {1}, {static_cast<double>(before)});
      const auto tensors = [&] { return Tensor(KDA_F32, in.state_shape(4)); };
      const auto state = [&] { return Tensor(KDA_F32, in.state_shape(1)); };
      const auto keep = [&](kda_forward_args a, const Tensor& kept) {
        a.checkpoints = kept, a.checkpoint_slots = slots, a.checkpoint_every = 64, a.checkpoint_offset = offset;
        a.exec.flags = KDA_BATCH_INVARIANT;
        return a;
      };
      const Tensor o(KDA_BF16, {1, kTokens, 1, 128}), hT = state(), kept = tensors();
      for (const char* impl : chunked(keep(part(in, 0, kTokens, in.h0, hT, o), kept))) {
        SCOPED_TRACE(testing::Message() << impl << ", offset " << before << ", times " << size);
        run_on_cuda(keep(part(in, 0, kTokens, in.h0, hT, o), kept), impl);
        const Tensor parts(KDA_BF16, {1, kTokens, 1, 128}), middle = state(), end = state();
        run_on_cuda(part(in, 0, opening, in.h0, middle, parts), impl);
        run_on_cuda(part(in, opening, kTokens, middle, end, parts), impl);
        EXPECT_EQ(o.bits(), parts.bits());
        EXPECT_EQ(hT.bits(), end.bits());
        EXPECT_EQ(kept.bits(0, 2, 1), middle.bits());
        const Tensor next = state();
        run_on_cuda(part(in, opening, opening + 64, middle, next, parts), impl);
        EXPECT_EQ(kept.bits(0, 0, 1), next.bits());
      }
    }
}

// A sequence has the bits of a call of its own, whatever the offsets of others are.
TEST_F(OnCuda, OffsetsOfOthersChangeNoBit) {
  const Inputs in(wide(resumed({.name = "others", .HV = 2, .lengths = {130, 20, 100, 64}, .tail = 2})));
  const std::vector<double> before = {37, 100, 64, 1};
  const auto invariant = [](kda_forward_args a) {
    a.exec.flags = KDA_BATCH_INVARIANT;
    return a;
  };
  const Resumption sizes(in, 64, before, KDA_F32);
  for (const char* impl : chunked(invariant(sizes.args(in)))) {
    SCOPED_TRACE(impl);
    const Resumption all(in, 64, before, KDA_F32), otherwise(in, 64, {37, 5, 63, 130}, KDA_F32);
    run_on_cuda(all.args(in), impl);
    run_on_cuda(otherwise.args(in), impl);
    const int64_t length = in.length(0);
    EXPECT_EQ(all.o.bits(1, 0, length), otherwise.o.bits(1, 0, length));
    EXPECT_EQ(all.pool.h.bits(0, all.pool.slots[0], 1), otherwise.pool.h.bits(0, all.pool.slots[0], 1));
    EXPECT_EQ(all.checkpoints.bits(0, 3 * in.N - 3, 3), otherwise.checkpoints.bits(0, 3 * in.N - 3, 3));
  }
}

// Offsets that are multiples of 64, or none, are the same call.
TEST_F(OnCuda, OffsetsAtChunksChangeNoBit) {
  const Inputs in(wide(resumed({.name = "at_chunks", .lengths = {70, 64, 130}})));
  const Resumption sizes(in, 64, {0}, KDA_F32);
  for (const char* impl : chunked(sizes.args(in))) {
    SCOPED_TRACE(impl);
    const Resumption some(in, 64, {64, 640, 0}, KDA_F32), none(in, 64, {0}, KDA_F32);
    kda_forward_args a = none.args(in);
    a.checkpoint_offset = {};
    run_on_cuda(some.args(in), impl);
    run_on_cuda(a, impl);
    EXPECT_EQ(some.o.bits(), none.o.bits());
    EXPECT_EQ(some.pool.h.bits(), none.pool.h.bits());
    EXPECT_EQ(some.checkpoints.bits(), none.checkpoints.bits());
  }
}

// ---- what runs ----

// Calls that resume run on the kernels in chunks that others run on.
TEST_F(OnCuda, ResumedCallsRunInChunks) {
  const auto chosen_for = [](const Inputs& in, int32_t every, uint32_t flags, bool resumes, const Tensor& h = {}) {
    const Resumption x(in, every, {100}, KDA_F32);
    kda_forward_args args = x.args(in);
    if (!resumes) args.checkpoint_offset = {};
    args.h = h;
    args = on_device(args);
    args.exec.flags = flags;
    const char* text = "";
    EXPECT_EQ(explain(args, &text), KDA_OK) << kda_last_error();
    return chosen(text);
  };
  const char* const recurrent = "cuda_prefill_recurrent";
  const Inputs few(wide(resumed({.name = "few", .T = 4096, .H = 2, .HV = 2})));
  const Inputs packed(wide(resumed({.name = "packed", .H = 2, .HV = 2, .lengths = {100, 70}})));
  const Inputs half(wide({.name = "half", .T = 200, .dtype = KDA_F16, .g_dtype = KDA_F16}));
  for (const Inputs* in : {&few, &packed, &half})
    for (const int32_t every : {64, 1024})
      for (const uint32_t flags : {0u, uint32_t{KDA_BATCH_INVARIANT}}) {
        SCOPED_TRACE(testing::Message() << in->c.name << ", every " << every << ", flags " << flags);
        const std::string plain = chosen_for(*in, every, flags, false);
        EXPECT_EQ(chosen_for(*in, every, flags, true), plain);
        EXPECT_NE(plain, recurrent);
      }
  // What is wanted within chunks: a checkpoint, and rows of h.
  EXPECT_EQ(chosen_for(packed, 48, 0, true), recurrent);
  EXPECT_EQ(chosen_for(packed, 64, 0, true, Tensor(KDA_F32, packed.state_shape(packed.h_rows(1)))), recurrent);
}

}  // namespace
}  // namespace kda::test
