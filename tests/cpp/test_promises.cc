// The promises of docs/numerics.md, one test each, bit for bit, for every implementation and operator.
#include <cmath>
#include <limits>

#include "promises.h"

namespace kda::test {
namespace {

// ---- the same call again ----

TEST_P(Promise, RunToRunDeterminism) {
  for (const char* name : {"gva_4_bf16", "softplus_bias", "packed", "K128_V128"}) {
    const Inputs in(find_case(name));
    const Results first = results(in, {});
    // Two inputs alternate, so that nothing left over from the call before can matter.
    const Inputs other(find_case(name), 1);
    for (int i = 0; i < 3; ++i) {
      EXPECT_NE(results(other, {}), first);
      expect_same(results(in, {}), first, name);
    }
  }
}

TEST_P(Promise, ThreadCountChangesNoBit) {
  for (const char* name : {"gva_2", "softplus_bias", "packed", "K5_V200", "K128_V128", "state_K_first"}) {
    const Inputs in(find_case(name));
    const Results one = results(in, {.threads = 1});
    for (const int threads : {2, 3, 4, 0}) expect_same(results(in, {.threads = threads}), one, name);
  }
}

// Several runs, because on a busy machine the threads of a team may run one after the other. AddressSanitizer gets
// fewer: the memory that threads use is the same each time, and these runs are half of this program's time there.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kTeams[] = {2, 10};
#else
constexpr int kTeams[] = {2, 3, 10, 2, 10};
#endif

// All threads work together on a head that would take one thread too long: alone, and beside shorter heads.
TEST_P(Promise, LongHeadsChangeNoBit) {
  for (const auto& lengths : {std::vector<int64_t>{1290}, {3, 1290, 64, 0, 700}, {700, 0, 2000, 650, 1}}) {
    const Inputs in({.name = "long", .HV = lengths.size() == 1 ? 1 : 2, .K = 20, .V = 100, .lengths = lengths});
    const Results one = results(in, {.threads = 1});
    for (const int threads : kTeams) expect_same(results(in, {.threads = threads}), one, "long");
  }
}

// With less workspace than asked for, fewer threads run; with one thread's share, one.
TEST_P(Promise, WorkspaceSizeChangesNoBit) {
  const Inputs in(find_case("packed"));
  expect_same(results(in, {.threads = 4, .workspace_for_threads = 1}), results(in, {.threads = 4}), "packed");
}

TEST_P(Promise, WorkspaceContentChangesNoBit) {
  for (const char* name : {"packed_tail_i64", "softplus_bias", "K5_V200", "gva_4_bf16", "K60_V100"}) {
    const Inputs in(find_case(name));
    const Results zeros = results(in, {.workspace_fill = 0});
    expect_same(results(in, {.workspace_fill = 0xff}), zeros, name);  // NaN
    expect_same(results(in, {.workspace_fill = 0x7f}), zeros, name);  // 3.4e38
  }
}

TEST_P(Promise, OutputContentChangesNoBit) {
  for (const char* name : {"softplus_bias", "packed_tail_i64"}) {
    const Inputs in(find_case(name));
    Results zeros = results(in, {.output_fill = 0}), ones = results(in, {.output_fill = 0xff});
    if (!in.c.lengths.empty())  // saved tensors have rows of no token, which stay as they were
      for (const char* saved : {"v_new", "Aqk", "Akk"}) zeros.erase(saved), ones.erase(saved);
    expect_same(zeros, ones, name);
  }
}

TEST_P(Promise, InputsStayAsTheyAre) {
  for (const char* name : {"packed_tail_i64", "softplus_bias", "gva_4_bf16", "state_K_first"}) {
    Inputs in(find_case(name));
    const auto before = in.bits();
    results(in, {});
    for (const auto& [tensor, t] : in.tensors()) {
      EXPECT_EQ(t->bits(), before.at(tensor)) << tensor;
      EXPECT_TRUE(t->margins_intact()) << tensor;
    }
  }
}

// ---- neighbours ----

// Sequence n of a batch, packed with others, or alone: the same bits.
TEST_P(Promise, BatchInvariance) {
  for (const bool l2norm : {false, true}) {
    const Inputs batch({.name = "batch", .B = 5, .T = 67, .H = 2, .HV = 4, .K = 20, .V = 40, .qk_l2norm = l2norm});
    const Results all = results(batch, {.threads = 3});
    for (int64_t n = 0; n < batch.B; ++n) expect_same(results(row_of(batch, n), {}), part(all, batch, n), "alone");
  }
}

TEST_P(Promise, PackingInvariance) {
  const Inputs packed(
      {.name = "packing", .H = 1, .HV = 2, .K = 20, .V = 40, .lengths = {1, 64, 17, 0, 65, 130, 15}, .tail = 3});
  const Results all = results(packed, {.threads = 3});
  for (int64_t n = 0; n < packed.N; ++n) expect_same(results(row_of(packed, n), {}), part(all, packed, n), "alone");
}

TEST_P(Promise, BatchInvariantFlagIsFreeOnTheCpu) {
  const Inputs in(find_case("packed"));
  expect_same(results(in, {.flags = KDA_BATCH_INVARIANT}), results(in, {}), "packed");
}

// Tokens after a sequence's end do not change its outputs.
TEST_P(Promise, PaddingInvariance) {
  const Case c{.name = "padding", .HV = 2, .K = 20, .V = 40, .lengths = {70, 33}, .tail = 60};
  const Inputs padded(c);
  const Results with = results(padded, {});
  for (int64_t n = 0; n < padded.N; ++n) expect_same(results(row_of(padded, n), {}), part(with, padded, n), "cut");
}

// ---- NaN and infinity stay where they are ----

TEST_P(Promise, NaNInOneSequenceReachesNoOther) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), 1e38})
    for (const char* victim : {"q", "k", "v", "g", "beta", "h0", "d_o", "dhT"}) {
      Inputs in({.name = "nan", .HV = 2, .K = 20, .V = 40, .lengths = {65, 3, 70}});
      const Results clean = results(in, {});
      spoil(in, victim, 1, bad);
      const Results spoilt = results(in, {});
      EXPECT_EQ(part(spoilt, in, 1) != part(clean, in, 1), reads(victim)) << victim;  // it had an effect where it was
      for (const int64_t n : {0, 2}) expect_same(part(spoilt, in, n), part(clean, in, n), victim);
    }
}

TEST_P(Promise, NaNInOneHeadReachesNoOther) {
  for (const char* victim : {"v", "g", "beta", "h0", "d_o"}) {
    Inputs in({.name = "nan_head", .T = 70, .H = 2, .HV = 4, .K = 20, .V = 40});
    const Results clean = results(in, {});
    spoil_head(in, victim, 3, std::nan(""));  // value head 3 shares query/key head 1 with value head 2
    const Results spoilt = results(in, {});
    EXPECT_EQ(head(spoilt, in, 3) != head(clean, in, 3), reads(victim)) << victim;
    for (const int64_t hv : {0, 1, 2}) expect_same(head(spoilt, in, hv), head(clean, in, hv), victim);
  }
}

// The gate operators give the same bits when repeated, on any number of threads, with any workspace.
TEST(GatePromise, SameBits) {
  for (const std::string& impl : cpu_implementations("gate_backward"))
    for (const int32_t form : {KDA_GATE_SOFTPLUS, KDA_GATE_LOWER_BOUND}) {
      const Inputs in({.name = "gate",
                       .B = 2,
                       .T = 333,
                       .HV = 3,
                       .K = 70,
                       .gate_form = form,
                       .gates = Gates::kRaw,
                       .lower_bound = -5,
                       .A_log = true,
                       .dt_bias = true});
      const auto bits = [&](const Conditions& how) {
        GateTensors t(in, KDA_F32);
        run_under(gate_args(in, t), impl.c_str(), how);
        run_under(gate_backward_args(in, t), impl.c_str(), how);
        return Bits{t.g.bits().bytes + t.dx.bits().bytes + t.dA_log.bits().bytes + t.d_dt_bias.bits().bytes};
      };
      const Bits one = bits({.threads = 1, .workspace_fill = 0});
      for (const int threads : {1, 2, 3, 4, 0}) EXPECT_EQ(bits({.threads = threads}), one) << impl << " " << threads;
    }
}

INSTANTIATE_TEST_SUITE_P(All, Promise, testing::ValuesIn(promise_params()), promise_name);

// ---- forward and decode alone ----

// The inputs of a token reach no earlier token: outputs before it keep their bits.
TEST_P(StatefulPromise, Causality) {
  for (const int64_t t : {1, 15, 16, 33, 63, 64, 100, 129})
    for (const char* victim : {"q", "k", "v", "g", "beta"}) {
      Inputs in({.name = "causal", .T = 130, .K = 20, .V = 40});
      const Bits clean = run_o(in).bits(1, 0, t);
      for (const auto& [name, tensor] : in.tensors())
        if (!std::strcmp(name, victim)) {
          const int64_t row = tensor->size() / in.T;
          for (int64_t i = 0; i < row; ++i) tensor->set(t * row + i, std::nan(""));
        }
      const Tensor o = run_o(in);
      EXPECT_EQ(o.bits(1, 0, t), clean) << victim << " at token " << t;
      EXPECT_TRUE(std::isnan(o.get(o.size() * t / in.T))) << victim << " at token " << t << " itself";
    }
}

// One call equals two calls split at a multiple of 64 with the f32 state carried between (recurrent: anywhere).
TEST_P(StatefulPromise, ChunkSplitInvariance) {
  for (const char* name : {"tokens_200", "softplus_bias", "state_K_first", "identical_keys_beta_2", "gates_wild"}) {
    Case c = find_case(name);
    c.B = 1, c.T = 200;
    const Inputs in(c);
    const Tensor whole_o(c.dtype, {1, 200, c.HV, c.V}), whole_h(KDA_F32, in.state_shape(1));
    run_slice(in, 0, 200, in.h0, whole_h, whole_o);
    const bool anywhere = GetParam().impl == "cpu_recurrent";
    for (const int64_t split : anywhere ? std::vector<int64_t>{1, 17, 64, 150} : std::vector<int64_t>{64, 128, 192}) {
      const Tensor o(c.dtype, {1, 200, c.HV, c.V}), middle(KDA_F32, in.state_shape(1)), end(KDA_F32, in.state_shape(1));
      run_slice(in, 0, split, in.h0, middle, o);
      run_slice(in, split, 200, middle, end, o);
      EXPECT_EQ(o.bits(), whole_o.bits()) << name << " split at " << split;
      EXPECT_EQ(end.bits(), whole_h.bits()) << name << " split at " << split;
    }
  }
}

// A slot that another request left NaN in: has_initial_state = 0 starts from zeros, not from 0 * NaN.
TEST_P(StatefulPromise, RecycledSlotIsIgnored) {
  const Inputs in({.name = "recycled", .HV = 2, .K = 20, .V = 40, .lengths = {65, 3, 70}});
  Pool clean(in, KDA_F32), dirty(in, KDA_F32);
  const int64_t slot = in.c.HV * in.c.K * in.c.V;
  for (int64_t i = 0; i < slot; ++i) {
    clean.h.set(clean.slots[1] * slot + i, 0);
    dirty.h.set(dirty.slots[1] * slot + i, i % 2 ? std::nan("") : std::numeric_limits<double>::infinity());
  }
  clean.has_initial_state.set(1, 0), dirty.has_initial_state.set(1, 0);
  const Tensor o_clean = run_pool(in, clean), o_dirty = run_pool(in, dirty);
  EXPECT_EQ(o_dirty.bits(), o_clean.bits());
  EXPECT_EQ(dirty.rows(in).bits(), clean.rows(in).bits());
}

// Unused slots are neither read nor written, whatever they hold.
TEST_P(StatefulPromise, UnusedSlotsDoNotMatter) {
  const Inputs in({.name = "unused", .HV = 2, .K = 20, .V = 40, .lengths = {65, 3, 70}});
  Pool poisoned(in, KDA_F32), zeros(in, KDA_F32);
  const int64_t slot = in.c.HV * in.c.K * in.c.V;
  for (int64_t i = 0; i < 3 * slot; ++i) zeros.h.set(i, 0);
  const Bits unused = poisoned.h.bits(0, 0, 3);
  const Tensor a = run_pool(in, poisoned), b = run_pool(in, zeros);
  EXPECT_EQ(a.bits(), b.bits());
  EXPECT_EQ(poisoned.rows(in).bits(), zeros.rows(in).bits());
  EXPECT_EQ(poisoned.h.bits(0, 0, 3), unused);
  EXPECT_TRUE(zeros.h.bits(0, 0, 3).all(0));
}

// NaN in the state of one slot stays in the sequence that uses it.
TEST_P(StatefulPromise, NaNInOneSlotReachesNoOther) {
  const Inputs in({.name = "nan_slot", .HV = 2, .K = 20, .V = 40, .lengths = {65, 3, 70}});
  Pool clean(in, KDA_F32), spoilt(in, KDA_F32);
  const int64_t slot = in.c.HV * in.c.K * in.c.V;
  for (int64_t i = 0; i < slot; ++i) spoilt.h.set(spoilt.slots[1] * slot + i, std::nan(""));
  const Tensor a = run_pool(in, clean), b = run_pool(in, spoilt);
  for (const auto& [t0, n] : {std::pair{0, 65}, {68, 70}}) EXPECT_EQ(b.bits(1, t0, n), a.bits(1, t0, n));
  for (const int64_t n : {0, 2}) EXPECT_EQ(spoilt.rows(in).bits(0, n, 1), clean.rows(in).bits(0, n, 1));
  EXPECT_TRUE(std::isnan(b.get(65 * 2 * 40)));
}

// Value heads that share a query/key head equal as many heads with copies of it.
TEST_P(StatefulPromise, SharedHeadsEqualRepeatedHeads) {
  Case c{.name = "shared", .B = 2, .T = 67, .H = 2, .HV = 6, .K = 20, .V = 40, .qk_l2norm = true};
  const Inputs shared(c);
  c.H = 6;
  Inputs repeated(c);
  for (const auto& [to, from] : {std::pair{&repeated.q, &shared.q}, {&repeated.k, &shared.k}})
    for (int64_t i = 0; i < to->size(); ++i) {
      const int64_t token = i / (6 * c.K), head = i / c.K % 6;
      to->set(i, from->get((token * 2 + head / 3) * c.K + i % c.K));
    }
  repeated.v = shared.v.clone(), repeated.g = shared.g.clone(), repeated.beta = shared.beta.clone();
  repeated.h0 = shared.h0.clone();
  EXPECT_EQ(run_o(repeated).bits(), run_o(shared).bits());
}

// No h0 is the same as an h0 of zeros, even after a call that had another one.
TEST_P(StatefulPromise, NoInitialStateIsZeros) {
  Inputs in({.name = "zeros", .T = 67, .HV = 2, .K = 20, .V = 40});
  const Bits other = run_o(in).bits();
  in.h0.fill(0);
  const Bits zeros = run_o(in).bits();
  in.h0 = Tensor();
  EXPECT_EQ(run_o(in).bits(), zeros);
  EXPECT_NE(other, zeros);
}

// A long head that all threads work on, in place and with checkpoints on the way.
TEST(LongHeads, InPlaceWithCheckpoints) {
  for (const std::string& impl : cpu_implementations("forward")) {
    const auto bits = [&](int threads) {
      const Inputs in({.name = "long", .T = 1290, .K = 20, .V = 100, .dtype = KDA_BF16});
      const Tensor o(KDA_BF16, {1, in.T, 1, 100}), state = in.h0.clone();
      const Tensor slots(KDA_I32, {1, 4}, {2, -1, 0, 1}), checkpoints(KDA_F32, in.state_shape(3));
      kda_forward_args a = KDA_FORWARD_ARGS_INIT;
      a.in = in.view(), a.o = o;
      a.states.h0 = a.states.hT = state;
      if (impl == "cpu_chunk") a.checkpoints = checkpoints, a.checkpoint_slots = slots, a.checkpoint_every = 320;
      run(a, {.impl = impl.c_str(), .threads = threads});
      return Bits{o.bits().bytes + state.bits().bytes + checkpoints.bits().bytes};
    };
    const Bits one = bits(1);
    for (const int threads : {2, 3, 5}) EXPECT_EQ(bits(threads), one) << impl;
  }
}

// A call whose checkpoint_offset is no multiple of 64 is two calls: the tokens up to a multiple of 64 of the request,
// and those behind it. On one thread and on several, which share the long head.
TEST(ChunkSplits, ResumedCallsAreTwoCalls) {
  const Inputs in({.name = "resumed", .T = 1000, .K = 20, .V = 100, .dtype = KDA_BF16});
  const auto part = [&](int64_t t0, int64_t t1, const Tensor& h0, const Tensor& hT, const Tensor& o) {
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = in.view(), a.states.h0 = h0, a.states.hT = hT, a.o = o;
    for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.o})
      t->data = static_cast<char*>(t->data) + t0 * t->stride[1] * (t->dtype == KDA_F32 ? 4 : 2), t->shape[1] = t1 - t0;
    return a;
  };
  const auto state = [&] { return Tensor(KDA_F32, in.state_shape(1)); };
  for (const int64_t before : {1, 37, 64, 100, 127}) {
    const int64_t opening = (64 - before % 64) % 64;
    const int64_t first = 128 - before % 128;  // checkpoint, in tokens of the call
    const Tensor expected(KDA_BF16, {1, in.T, 1, 100}), middle = opening ? state() : in.h0.clone(), end = state();
    const Tensor at_first = state();
    if (opening) run(part(0, opening, in.h0, middle, expected), {.impl = "cpu_chunk"});
    if (first > opening) run(part(opening, first, middle, at_first, expected), {.impl = "cpu_chunk"});
    run(part(opening, in.T, middle, end, expected), {.impl = "cpu_chunk"});
    const Tensor slots(KDA_I32, {1, 3}, {2, 0, 1}), offset(KDA_I64, {1}, {static_cast<double>(before)});
    for (const int threads : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << "offset " << before << ", threads " << threads);
      const Tensor o(KDA_BF16, {1, in.T, 1, 100}), hT = state(), kept(KDA_F32, in.state_shape(3));
      kda_forward_args a = part(0, in.T, in.h0, hT, o);
      a.checkpoints = kept, a.checkpoint_slots = slots, a.checkpoint_every = 128, a.checkpoint_offset = offset;
      run(a, {.impl = "cpu_chunk", .threads = threads});
      EXPECT_EQ(o.bits(), expected.bits());
      EXPECT_EQ(hT.bits(), end.bits());
      EXPECT_EQ(kept.bits(0, 2, 1), (first > opening ? at_first : middle).bits());
    }
  }
}

// In place or into another pool: the same bits.
TEST_P(StatefulPromise, InPlaceEqualsOutOfPlace) {
  for (const char* name : {"packed", "state_K_first", "state_bf16"}) {
    const Inputs in(find_case(name));
    Pool h0(in, in.c.state_dtype), hT(in, in.c.state_dtype), both(in, in.c.state_dtype);
    hT.h.poison();
    const Bits before = h0.h.bits();
    const Tensor apart = run_pool(in, h0, hT), in_place = run_pool(in, both);
    EXPECT_EQ(in_place.bits(), apart.bits()) << name;
    EXPECT_EQ(both.rows(in).bits(), hT.rows(in).bits()) << name;
    EXPECT_EQ(h0.h.bits(), before) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, StatefulPromise, testing::ValuesIn(stateful_params()), promise_name);

}  // namespace
}  // namespace kda::test
