// kda_decode, kda_verify, kda_flush and kda_flush_verify on the GPU through the C ABI, against the float64 oracle on
// the CPU. Small shapes, every path through the kernels: compute-sanitizer runs them as well.
#include "on_cuda.h"
#include "speculation_calls.h"

namespace kda::test {
namespace {

// ---- numbers ----

std::vector<SpeculationCase> cuda_cases() {
  std::vector<SpeculationCase> all;
  for (const char* name :
       {"drafts_16",       "K128_V128", "K100_V60", "K5_V200",    "K256_V256",  "gva_4_bf16",         "packed",
        "packed_tail_i64", "padded_0",  "padded_1", "tree",       "ring",       "ring_packed",        "ring_long",
        "lower_bound",     "softplus",  "mixed",    "gates_wild", "state_bf16", "state_bf16_K_first", "state_none"})
    all.push_back(find_speculation_case(name));
  all.push_back({.c = {.name = "K61_V37", .B = 2, .T = 3, .HV = 2, .K = 61, .V = 37, .layout = Layout::kPadded}});
  // So many columns that a thread takes several of them.
  all.push_back({.c = {.name = "many", .B = 144, .T = 2, .HV = 2, .K = 72, .V = 66}});
  all.push_back(
      {.c = {.name = "many_K_first", .B = 147, .T = 2, .HV = 2, .K = 9, .V = 65, .state_layout = KDA_STATE_K_FIRST},
       .padded = {3}});
  // Calls that have kernels of their own: decode, one draft, few, more, also on rings.
  const auto usual = [&](const char* name, int64_t T, int64_t K, int64_t V, int32_t state, int32_t layout) {
    SpeculationCase s = find_speculation_case("softplus");
    s.c.name = name, s.c.B = 5, s.c.T = T, s.c.HV = 4, s.c.K = K, s.c.V = V, s.padded = {3};
    s.c.dtype = s.c.g_dtype = s.c.beta_dtype = KDA_BF16, s.c.state_dtype = state, s.c.state_layout = layout;
    s.c.layout = Layout::kDense;
    all.push_back(s);
  };
  usual("usual", 1, 128, 128, KDA_F32, KDA_STATE_V_FIRST);
  usual("usual_K_first", 1, 128, 128, KDA_F32, KDA_STATE_K_FIRST);
  usual("usual_bf16", 1, 64, 128, KDA_BF16, KDA_STATE_V_FIRST);
  usual("usual_bf16_K_first", 1, 128, 64, KDA_BF16, KDA_STATE_K_FIRST);
  usual("usual_64", 1, 64, 64, KDA_F32, KDA_STATE_V_FIRST);
  usual("usual_64_K_first", 1, 64, 64, KDA_F32, KDA_STATE_K_FIRST);
  usual("usual_3", 3, 128, 128, KDA_F32, KDA_STATE_V_FIRST), usual("usual_4", 4, 64, 64, KDA_BF16, KDA_STATE_V_FIRST);
  usual("usual_6", 6, 128, 128, KDA_F32, KDA_STATE_V_FIRST), usual("usual_8", 8, 64, 128, KDA_BF16, KDA_STATE_V_FIRST);
  usual("usual_16", 16, 128, 64, KDA_F32, KDA_STATE_V_FIRST);
  for (const int64_t T : {1, 3, 6}) {
    usual(("usual_ring_" + std::to_string(T)).c_str(), T, 128, 128, T == 3 ? KDA_BF16 : KDA_F32, KDA_STATE_V_FIRST);
    all.back().ring = true, all.back().R = 3 * T + 2;
  }
  // So large that blocks have all columns of a head, and threads several.
  for (const int64_t T : {1, 4, 8}) {
    usual(("usual_large_" + std::to_string(T)).c_str(), T, 128, 128, KDA_F32, KDA_STATE_V_FIRST);
    all.back().c.B = 128;
  }
  // 68 heads fill 132 SMs, and 268 are more than run at once.
  for (const auto& [name, state, B] :
       {std::tuple{"usual_full_bf16", KDA_BF16, 17}, {"usual_full_f32", KDA_F32, 17}, {"usual_many", KDA_BF16, 67}}) {
    usual(name, 6, 128, 128, state, KDA_STATE_V_FIRST);
    all.back().c.B = B, all.back().padded = {};
  }
  usual("usual_ring_large", 6, 128, 128, KDA_F32, KDA_STATE_V_FIRST);
  all.back().c.B = 128, all.back().ring = true, all.back().R = 20;
  // Calls whose data comes through shared memory and goes to tensor cores.
  const auto staged = [&](const char* name, const char* like, int64_t K, int64_t V, int32_t state = KDA_F32) {
    SpeculationCase s = find_speculation_case(like);
    s.c.name = name, s.c.K = K, s.c.V = V, s.c.state_layout = KDA_STATE_V_FIRST, s.c.state_dtype = state;
    all.push_back(s);
  };
  staged("staged_16", "drafts_16", 64, 128), staged("staged_15", "drafts_15", 128, 64);
  staged("staged_1", "drafts_1", 128, 128), staged("staged_1_bf16", "drafts_1", 64, 64, KDA_BF16);
  staged("staged_4_bf16", "gva_4_bf16", 128, 128, KDA_BF16), staged("staged_packed", "packed_tail_i64", 128, 64);
  staged("staged_padded", "padded_1", 64, 64), staged("staged_tree", "tree_16", 128, 128);
  staged("staged_tree_8", "tree", 128, 192), staged("staged_ring", "ring", 128, 128);
  staged("staged_ring_bf16", "ring_packed", 64, 64, KDA_BF16), staged("staged_ring_long", "ring_long", 128, 128);
  staged("staged_lower_bound", "lower_bound", 64, 192), staged("staged_softplus", "softplus", 128, 128);
  staged("staged_wild", "gates_wild", 128, 128), staged("staged_keys", "identical_keys", 64, 64);
  staged("staged_none", "state_none", 128, 64), staged("staged_mixed", "mixed", 64, 128);
  for (Case c : edge_cases()) {
    c.T = 3;
    all.push_back({.c = c});
    c.name += "_128", c.K = c.V = 128;
    all.push_back({.c = c});
    c.name += "_one", c.T = 1;
    all.push_back({.c = c});
  }
  all.push_back({.c = {.name = "staged_many", .B = 150, .T = 3, .HV = 2, .K = 128, .V = 128}, .padded = {3}});
  return all;
}
// One of cuda_cases(), or of those that the CPU has, too.
SpeculationCase find(const std::string& name) {
  for (const SpeculationCase& s : cuda_cases())
    if (s.c.name == name) return s;
  return find_speculation_case(name);
}

class TokensOnCuda : public OnCuda, public testing::WithParamInterface<SpeculationCase> {
 protected:
  TokensOnCuda() : s(GetParam()), d(s) {}
  Pool start(int32_t dtype) const {
    Pool pool(d.in, dtype);
    if (!s.c.h0) pool.h.fill(0);  // flush has no has_initial_state
    return pool;
  }
  const SpeculationCase s;
  Drafts d;
};

TEST_P(TokensOnCuda, Decode) {
  const Pool exact(d.in, KDA_F64);
  const Tensor exact_o = d.output(KDA_F64);
  const auto args = [&](const Pool& pool, const Tensor& o) {
    kda_decode_args a = decode_args(d.in, pool, pool, o);
    a.states.state_indices = d.pool.state_indices, a.states.first_valid_slot = s.first_valid_slot;
    return a;
  };
  run(args(exact, exact_o), {.impl = "reference"});
  std::vector<Bits> bits;
  for (const char* impl : takers("decode", args(d.pool, d.output()))) {
    SCOPED_TRACE(impl);
    const Pool got(d.in, s.c.state_dtype);
    const Tensor o = d.output();
    run_on_cuda(args(got, o), impl);
    if (HasFatalFailure()) return;
    expect_close(exact_o, o, "o");
    expect_close(exact.h, got.h, "state");
    // The same bits by every implementation: the size of a call decides which one runs, and must not change a bit.
    bits.push_back(got.h.bits());
    EXPECT_EQ(bits.back(), bits.front());

    // From one pool to another.
    const Pool from(d.in, s.c.state_dtype), to(d.in, s.c.state_dtype);
    kda_decode_args moving = args(to, o);
    moving.states.h0 = from.h;
    run_on_cuda(moving, impl);
    if (HasFatalFailure()) return;
    EXPECT_EQ(to.h.bits(), bits.front());
    EXPECT_EQ(from.h.bits(), Pool(d.in, s.c.state_dtype).h.bits());
  }
}

TEST_P(TokensOnCuda, Verify) {
  // A call with flags is no usual one, even if all flags are true.
  if (s.c.h0) d.pool.has_initial_state = Tensor();
  Records exact(d, KDA_F64);
  const Tensor exact_o = d.output(KDA_F64);
  const Bits state = d.pool.h.bits();
  run(verify_args(d, exact, exact_o), {.impl = "reference"});
  for (const char* impl : takers("verify", verify_args(d, Records(d), d.output()))) {
    SCOPED_TRACE(impl);
    Records got(d);
    const Tensor o = d.output();
    run_on_cuda(verify_args(d, got, o), impl);
    if (HasFatalFailure()) return;
    expect_close(exact_o, o, "o");
    expect_close(exact, got);
    EXPECT_EQ(d.pool.h.bits(), state);
  }
}

TEST_P(TokensOnCuda, Flush) {
  const Records records(d);
  const Tensor o = d.output();
  run(verify_args(d, records, o), {.impl = "reference"});
  for (const int64_t shift : {0, 1}) {
    d.accept(shift);
    const Pool exact = start(KDA_F64);
    const Bits recorded = records.bits();
    run(flush_args(d, exact.h, records), {.impl = "reference"});
    for (const char* impl : takers("flush", flush_args(d, start(s.c.state_dtype).h, records))) {
      SCOPED_TRACE(impl);
      const Pool got = start(s.c.state_dtype);
      run_on_cuda(flush_args(d, got.h, records), impl);
      if (HasFatalFailure()) return;
      expect_close(exact.h, got.h, "state");
      EXPECT_EQ(records.bits(), recorded);
    }
  }
}

// The records of one round, then the drafts of the next.
TEST_P(TokensOnCuda, FlushVerify) {
  const Drafts next(s, 1);
  for (const int64_t shift : {0, 1}) {
    d.accept(shift);
    const Pool before = start(s.c.state_dtype), exact = start(s.c.state_dtype);
    const Records last(d);
    const Tensor exact_o = d.output(KDA_F64);
    run(verify_args(d, before.h, &last, d.output()), {.impl = "reference"});
    const auto fresh = [&] { return s.ring ? last.clone() : Records(next); };
    Records exact_records = fresh();
    run(flush_verify_args(d, next, exact.h, last, exact_records, exact_o), {.impl = "reference"});
    for (const char* impl :
         takers("flush_verify", flush_verify_args(d, next, before.h, last, exact_records, d.output()))) {
      SCOPED_TRACE(impl);
      const Pool got = start(s.c.state_dtype);
      Records records = fresh();
      const Tensor o = d.output();
      run_on_cuda(flush_verify_args(d, next, got.h, last, records, o), impl);
      if (HasFatalFailure()) return;
      expect_close(exact.h, got.h, "state");
      // A state kept in 16 bits may be rounded up here and down there before the drafts read it.
      expect_close(exact_o, o, "o", budget(s.c.state_dtype));
      expect_close(exact_records, records, budget(s.c.state_dtype));
      EXPECT_EQ(records.ring_first.bits(), exact_records.ring_first.bits());
      EXPECT_EQ(records.ring_count.bits(), exact_records.ring_count.bits());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TokensOnCuda, testing::ValuesIn(cuda_cases()),
                         [](const auto& info) { return info.param.c.name; });

// Without these kernels the tests above would compare general kernels with the oracle twice, and others not at all.
TEST_F(OnCuda, AlignedStatesHaveKernelsOfTheirOwn) {
  for (const SpeculationCase& s : cuda_cases()) {
    if (s.c.name != "staged_1" && s.c.name != "staged_1_bf16") continue;
    SCOPED_TRACE(s.c.name);
    const Drafts d(s);
    const Records last(d), records(d);
    const auto has = [](const std::vector<const char*>& all, const std::string& name) {
      return std::find(all.begin(), all.end(), name) != all.end();
    };
    const Tensor o = d.output();
    EXPECT_TRUE(has(takers("decode", decode_args(d.in, d.pool, d.pool, o)), "cuda_decode_sweep"));
    EXPECT_TRUE(has(takers("flush", flush_args(d, d.pool.h, records)), "cuda_drafts_flush_registers"));
    const auto verify = takers("verify", verify_args(d, records, o));
    EXPECT_TRUE(has(verify, "cuda_drafts_recurrent") && has(verify, "cuda_drafts_mma"));
    const auto both = takers("flush_verify", flush_verify_args(d, d, d.pool.h, last, records, o));
    EXPECT_TRUE(has(both, "cuda_drafts_recurrent") && has(both, "cuda_drafts_mma"));
  }
}

// Large usual calls have other blocks, in kernels of their own. Here all of many requests have the tokens of the
// first one, and all but one are padding.
class LargeOnCuda : public OnCuda {
 protected:
  static constexpr int64_t kMany = 1200, kLive = 1111;
  static Drafts first_alone(const SpeculationCase& s, uint64_t seed = 0) {
    Drafts d(s, seed);
    for (int64_t n = 1; n < d.in.N; ++n) d.pool.state_indices.set(n, -1);
    return d;
  }
  static Tensor indices(double live, double others = -1) {
    Tensor all(KDA_I32, {kMany});
    for (int64_t n = 0; n < kMany; ++n) all.set(n, n == kLive ? live : others);
    return all;
  }
  static void repeat(kda_inputs& in) {
    for (kda_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta}) t->shape[0] = kMany, t->stride[0] = 0;
  }
  static Tensor outputs(const Drafts& d) { return Tensor(d.s.c.dtype, {kMany, d.in.T, d.s.c.HV, d.s.c.V}); }
  static void expect_alone(const Tensor& few, const Tensor& many) {
    const int64_t row = many.size() / kMany;
    for (int64_t i = 0; i < many.size(); ++i) ASSERT_EQ(many.get(i), i / row == kLive ? few.get(i % row) : 0) << i;
  }
};

TEST_F(LargeOnCuda, DecodeHasTheBitsOfSmallCalls) {
  const Drafts d = first_alone(find("usual"));
  const Tensor slots = indices(d.pool.state_indices.get(0));
  const Pool few(d.in, KDA_F32), many(d.in, KDA_F32);
  const Tensor few_o = d.output(), many_o = outputs(d);
  kda_decode_args small = decode_args(d.in, few, few, few_o), large = decode_args(d.in, many, many, many_o);
  small.states.state_indices = d.pool.state_indices, large.states.state_indices = slots;
  small.states.has_initial_state = large.states.has_initial_state = {};
  repeat(large.in);
  run_on_cuda(small, "cuda_decode"), run_on_cuda(large, "cuda_decode");
  if (HasFatalFailure()) return;
  EXPECT_EQ(many.h.bits(), few.h.bits());
  EXPECT_NE(many.h.bits(), d.pool.h.bits());
  expect_alone(few_o, many_o);
}

TEST_F(LargeOnCuda, FlushVerifyHasTheBitsOfSmallCalls) {
  for (const char* name : {"usual", "usual_64", "usual_3", "usual_4"}) {
    SCOPED_TRACE(name);
    const SpeculationCase s = find(name);
    Drafts d = first_alone(s);
    const Drafts next = first_alone(s, 1);
    d.accept_len.set(0, 1);
    const Records last(d), few_records(next), many_records(next);
    run(verify_args(d, d.pool.h, &last, d.output()), {.impl = "reference"});
    const Tensor slots = indices(next.pool.state_indices.get(0)), entries = indices(static_cast<double>(last.slots[0])),
                 accepted = indices(1, s.c.T);
    const Pool few(d.in, s.c.state_dtype), many(d.in, s.c.state_dtype);
    const Tensor few_o = next.output(), many_o = outputs(next);
    kda_flush_verify_args small = flush_verify_args(d, next, few.h, last, few_records, few_o),
                          large = flush_verify_args(d, next, many.h, last, many_records, many_o);
    large.states.state_indices = slots, large.accept_len = accepted;
    large.records.indices = large.last.indices = entries;
    repeat(large.in);
    run_on_cuda(small, "cuda_drafts_recurrent"), run_on_cuda(large, "cuda_drafts_recurrent");
    if (HasFatalFailure()) return;
    EXPECT_EQ(many.h.bits(), few.h.bits());
    EXPECT_NE(many.h.bits(), d.pool.h.bits());
    EXPECT_EQ(many_records.bits(), few_records.bits());
    expect_alone(few_o, many_o);
  }
}

// Two rounds: all states of the first are kept, the second starts from those of what was accepted.
class SnapshotsOnCuda : public OnCuda, public testing::WithParamInterface<std::tuple<const char*, bool>> {};

TEST_P(SnapshotsOnCuda, AcceptedOnesAreWhereTheNextRoundStarts) {
  const auto [name, pool] = GetParam();
  const SpeculationCase s = find(name);
  const Drafts first(s), second(s, 1);
  const int64_t N = first.in.N, S = first.longest() + 1;
  std::vector<int64_t> shape = first.in.state_shape(pool ? N * S + 2 : N);
  if (!pool) shape.insert(shape.begin() + 1, S);
  // Slots that are skipped are below 0; on the GPU those behind the pool are, too.
  Tensor slots, beyond;
  if (pool) slots = Tensor(KDA_I32, {N, S}, Layout::kPadded), beyond = Tensor(KDA_I32, {N, S}, Layout::kPadded);
  for (int64_t i = 0; pool && i < N * S; ++i) {
    const auto slot = static_cast<double>(N * S + 1 - i), behind = static_cast<double>(shape[0]);
    const bool skipped = (i + i / S) % 5 == 3;
    slots.set(i, skipped ? -1 : slot);
    // Only a first slot below 0 is padding.
    beyond.set(i, !skipped ? slot : i % S && i % 2 ? behind : -1);
  }
  Tensor accepted(KDA_I32, {N});
  for (int64_t n = 0; n < N; ++n) accepted.set(n, static_cast<double>(first.in.length(n) - n % 3));

  const auto round = [&](const Drafts& d, const Tensor& shots, const Tensor& o, const Tensor& to) {
    kda_decode_args a = KDA_DECODE_ARGS_INIT;
    a.in = d.in.view(), a.o = o;
    a.snapshots = shots, a.snapshot_slots = to;
    if (&d == &second) {
      a.accepted = accepted;
      if (pool) a.states.h0 = shots;
    } else {
      a.states.h0 = d.pool.h, a.states.state_indices = d.pool.state_indices;
      a.states.has_initial_state = d.pool.has_initial_state, a.states.first_valid_slot = s.first_valid_slot;
    }
    return a;
  };
  Tensor exact(KDA_F64, shape);
  const Tensor got(s.c.state_dtype, shape, s.c.layout);
  for (const Drafts* d : {&first, &second}) {
    const Tensor exact_o = d->output(KDA_F64), o = d->output();
    kda_decode_args oracle = round(*d, exact, exact_o, slots), args = round(*d, got, o, beyond);
    run(oracle, {.impl = "reference"});
    run_on_cuda(args, "cuda_decode");
    if (HasFatalFailure()) return;
    expect_close(exact_o, o, "o", budget(s.c.state_dtype));
    expect_close(exact, got, "snapshots");
    if (d == &first && !pool) {  // keeping states changes no bit
      const Pool end(d->in, s.c.state_dtype);
      const Tensor alone = d->output();
      args.snapshots = {}, args.o = alone, args.states.hT = end.h;
      run_on_cuda(args, "cuda_decode");
      EXPECT_EQ(o.bits(), alone.bits());
    }
    // The oracle's next round starts from the states that the kernel left, so their rounding counts once.
    const std::vector<double> rounded = got.values();
    for (size_t i = 0; i < rounded.size(); ++i)
      if (std::isfinite(rounded[i])) exact.set(static_cast<int64_t>(i), rounded[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SnapshotsOnCuda,
                         testing::Combine(testing::Values("drafts_5", "K128_V128", "gva_2", "state_K_first",
                                                          "state_bf16", "usual_packed", "usual_states_bf16",
                                                          "usual_full_bf16", "usual_full_f32", "usual_many"),
                                          testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + (std::get<1>(info.param) ? "_slots" : "_rows");
                         });

}  // namespace
}  // namespace kda::test
