// kda_decode with snapshots: the state after each token has the bits of a call that ends there; and calls that start
// from a snapshot of an earlier call.
#include <limits>

#include "speculation_calls.h"

namespace kda::test {
namespace {

// Snapshots in the slots of a pool, in another order, or in rows [N,S].
struct Shots {
  bool pool;
  int64_t S;
  Tensor h, slots;

  Shots(const Drafts& d, bool pool, int32_t dtype, int64_t spare = 1) : pool(pool), S(d.longest() + spare) {
    const int64_t N = d.in.N;
    std::vector<int64_t> shape = d.in.state_shape(pool ? N * S + 2 : N);
    if (!pool) shape.insert(shape.begin() + 1, S);
    h = Tensor(dtype, shape, Layout::kPadded);
    if (!pool) return;
    slots = Tensor(KDA_I32, {N, S}, Layout::kPadded);
    for (int64_t i = 0; i < N * S; ++i) slots.set(i, static_cast<double>(N * S + 1 - i));
  }
  int64_t row(int64_t n, int64_t t) const { return pool ? static_cast<int64_t>(slots.get(n * S + t)) : n * S + t; }
  int64_t rows() const { return pool ? h.shape()[0] : h.shape()[0] * S; }
  // State `row`, as bytes of its elements.
  Bits bits(int64_t row) const {
    const std::string all = h.bits().bytes;
    return {all.substr(row * (all.size() / rows()), all.size() / rows())};
  }
  void put(int64_t row, const Tensor& from, int64_t slot) {
    const int64_t size = h.size() / rows();
    for (int64_t i = 0; i < size; ++i) h.set(row * size + i, from.get(slot * size + i));
  }
};

kda_decode_args decode_args(const Drafts& d, const Tensor& o, const Shots& shots) {
  kda_decode_args a = KDA_DECODE_ARGS_INIT;
  a.in = d.in.view(), a.o = o;
  a.snapshots = shots.h, a.snapshot_slots = shots.slots;
  return a;
}
void from_pool(kda_decode_args& a, const Drafts& d, const Tensor& h) {
  a.states.h0 = h, a.states.state_indices = d.pool.state_indices;
  a.states.first_valid_slot = d.s.first_valid_slot, a.states.has_initial_state = d.pool.has_initial_state;
}

// The states after the first t tokens of every sequence.
Tensor states_after(const Drafts& d, int64_t t, int32_t dtype, const char* impl) {
  Tensor hT(dtype, d.pool.h.shape());
  const Tensor o = d.output();
  kda_decode_args a = KDA_DECODE_ARGS_INIT;
  a.in = d.in.view(), a.o = o;
  for (kda_tensor* x : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.o}) x->shape[1] = t;
  from_pool(a, d, d.pool.h), a.states.hT = hT;
  run(a, {.impl = impl});
  return hT;
}

Bits slot_bits(const Tensor& pool, int64_t slot) { return pool.bits(0, slot, 1); }

TEST(Snapshots, AreTheStatesAfterEveryToken) {
  for (const char* impl : {"cpu_recurrent", "reference"})
    for (const char* name : {"drafts_5", "padded_1", "gva_2", "K60_V100", "state_K_first", "state_bf16", "state_none"})
      for (const bool pool : {false, true})
        for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
          const Drafts d(find_speculation_case(name));
          const Shots shots(d, pool, dtype);
          const Tensor o = d.output(), plain_o = d.output(), hT(dtype, d.pool.h.shape());
          const Bits before = d.pool.h.bits();
          kda_decode_args a = decode_args(d, o, shots);
          from_pool(a, d, d.pool.h);
          run(a, {.impl = impl});
          EXPECT_EQ(d.pool.h.bits(), before) << "without hT the pool stays as it is";
          a.states.hT = hT, a.o = plain_o;
          run(a, {.impl = impl, .threads = 3});
          EXPECT_EQ(plain_o.bits(), o.bits());
          for (int64_t t = 0; t < d.in.T; ++t) {
            const Tensor after = states_after(d, t + 1, dtype, impl);
            for (int64_t n = 0; n < d.in.N; ++n) {
              const Bits got = shots.bits(shots.row(n, t));
              EXPECT_TRUE(d.live(n) ? got == slot_bits(after, d.pool.slots[n]) : got.all('\xff')) << name << " " << t;
            }
          }
          for (int64_t n = 0; n < d.in.N; ++n) {
            EXPECT_TRUE(shots.bits(shots.row(n, d.in.T)).all('\xff')) << "no token, no snapshot";
            EXPECT_TRUE(!d.live(n) || slot_bits(hT, d.pool.slots[n]) == shots.bits(shots.row(n, d.in.T - 1))) << name;
          }
          EXPECT_TRUE(shots.h.margins_intact());
        }
}

TEST(Snapshots, OfPackedSequences) {
  for (const bool pool : {false, true}) {
    const Drafts d(find_speculation_case("packed"));
    const Shots shots(d, pool, KDA_F32);
    const Tensor o = d.output(), hT(KDA_F32, d.pool.h.shape());
    kda_decode_args a = decode_args(d, o, shots);
    from_pool(a, d, d.pool.h), a.states.hT = hT;
    run(a);
    for (int64_t n = 0; n < d.in.N; ++n) {
      const int64_t length = d.in.length(n);
      EXPECT_TRUE(!length || shots.bits(shots.row(n, length - 1)) == slot_bits(hT, d.pool.slots[n])) << n;
      for (int64_t t = 0; t < shots.S; ++t)
        EXPECT_EQ(shots.bits(shots.row(n, t)).all('\xff'), t >= length) << n << " " << t;
    }
  }
}

TEST(Snapshots, SlotsBelowTheFirstValidOneAreSkipped) {
  const Drafts d(find_speculation_case("drafts_5"));
  const Shots all(d, true, KDA_F32);
  Shots some(d, true, KDA_F32);
  for (const auto& [at, slot] : {std::pair<int, double>{1, -1}, {3, std::numeric_limits<int32_t>::min()}, {8, 0}})
    some.slots.set(at, slot);
  const Tensor o = d.output(), other_o = d.output();
  for (const Shots* shots : {&all, static_cast<const Shots*>(&some)}) {
    kda_decode_args a = decode_args(d, shots == &all ? o : other_o, *shots);
    from_pool(a, d, d.pool.h);
    a.states.first_valid_slot = shots == &all ? 0 : 1;
    run(a);
  }
  EXPECT_EQ(other_o.bits(), o.bits());
  for (int64_t i = 0; i < 2 * all.S; ++i) {
    if (i % all.S == 5) continue;
    const int64_t row = static_cast<int64_t>(all.slots.get(i));
    const bool skipped = i == 1 || i == 3 || i == 8;
    EXPECT_TRUE(skipped ? some.bits(row).all('\xff') : some.bits(row) == all.bits(row)) << i;
  }
  EXPECT_TRUE(some.h.margins_intact());
}

// Round after round starts from the snapshot of what was accepted: the result is plain decode of the accepted tokens,
// bit for bit.
TEST(Snapshots, ARoundStartsFromWhatWasAccepted) {
  for (const char* impl : {"cpu_recurrent", "reference"})
    for (const bool pool : {false, true})
      for (const char* name : {"drafts_4", "gva_2", "state_K_first"}) {
        const SpeculationCase& s = find_speculation_case(name);
        const Drafts first(s);
        Shots shots(first, pool, KDA_F32, 0);
        Tensor text = first.pool.h.clone(), accepted(KDA_I32, {first.in.N}, Layout::kPadded);
        shots.h.fill(0);
        accepted.fill(1);
        for (int64_t n = 0; n < first.in.N; ++n) shots.put(shots.row(n, 0), text, first.pool.slots[n]);
        Random random(7);
        for (int round = 0; round < 12; ++round) {
          const Drafts d(s, round);
          const Tensor o = d.output(), expected = d.output();
          kda_decode_args a = decode_args(d, o, shots);
          a.accepted = accepted;
          if (pool) a.states.h0 = shots.h;
          run(a, {.impl = impl, .threads = 1 + round % 3});
          kda_decode_args b = KDA_DECODE_ARGS_INIT;
          b.in = d.in.view(), b.o = expected;
          b.states.h0 = text, b.states.state_indices = d.pool.state_indices;
          run(b, {.impl = impl});
          ASSERT_EQ(o.bits(), expected.bits()) << name << " " << round;
          for (int64_t n = 0; n < d.in.N; ++n) {
            const int64_t m = 1 + random.below(d.in.T);
            // A number outside 1..S is clamped to it.
            const double far = m == 1 ? -2147483648.0 : m == shots.S ? 2147483647.0 : static_cast<double>(m);
            accepted.set(n, random.chance(0.5) ? far : static_cast<double>(m));
            const int64_t size = text.size() / text.shape()[0];
            for (int64_t i = 0; i < size; ++i)
              text.set(d.pool.slots[n] * size + i, shots.h.get(shots.row(n, m - 1) * size + i));
          }
        }
      }
}

// Without state_indices the first slot tells what is padding; a start from a skipped slot is a start from zeros.
TEST(Snapshots, SkippedSlotsAsPaddingAndAsStart) {
  for (const char* impl : {"cpu_recurrent", "reference"}) {
    const Drafts d(find_speculation_case("drafts_4"));
    Shots shots(d, true, KDA_F32, 0);
    shots.h.fill(0.5);
    shots.slots.set(0, -1), shots.slots.set(shots.S + 2, -5);  // request 0 is padding, request 1 starts from nothing
    const Tensor o = d.output(), from_zeros = d.output(), accepted(KDA_I32, {2}, {2, 3});
    const std::vector<Bits> before{shots.bits(shots.row(0, 1)), shots.bits(shots.row(0, 3))};
    kda_decode_args a = decode_args(d, o, shots);
    a.states.h0 = shots.h, a.accepted = accepted;
    run(a, {.impl = impl});
    EXPECT_EQ(shots.bits(shots.row(0, 1)), before[0]);
    EXPECT_EQ(shots.bits(shots.row(0, 3)), before[1]);
    for (int64_t i = 0; i < o.size() / 2; ++i) ASSERT_EQ(o.get(i), 0) << i;
    kda_decode_args b = KDA_DECODE_ARGS_INIT;
    b.in = d.in.view(), b.o = from_zeros;
    run(b, {.impl = impl});
    EXPECT_EQ(o.bits(0, 1, 1), from_zeros.bits(0, 1, 1));
  }
}

TEST(Snapshots, AcceptedWithoutNewSnapshots) {  // one more call that starts from their pool and writes hT
  const Drafts d(find_speculation_case("drafts_4"));
  const Shots shots(d, true, KDA_F32, 0);
  const Tensor o = d.output(), from(KDA_I32, {2}, {3, 1}), again = d.output(), expected = d.output();
  kda_decode_args a = decode_args(d, o, shots);
  from_pool(a, d, d.pool.h);
  run(a);
  const Bits kept = shots.h.bits();
  a.states = {}, a.states.h0 = shots.h, a.snapshots = {}, a.accepted = from, a.o = again;
  run(a);
  EXPECT_EQ(shots.h.bits(), kept);
  const Tensor slots(KDA_I32, {2}, {static_cast<double>(shots.row(0, 2)), static_cast<double>(shots.row(1, 0))});
  a.snapshot_slots = a.accepted = {}, a.states.state_indices = slots, a.o = expected;
  run(a);
  EXPECT_EQ(again.bits(), expected.bits());
}

}  // namespace
}  // namespace kda::test
