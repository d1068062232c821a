// Numbers that live on the device and are not checked there: accept lengths, parents, ring cursors, negative indices.
// Each value means what kda.h says, and none reaches memory out of range (this runs under AddressSanitizer, too).
#include <cmath>
#include <limits>

#include "speculation_calls.h"

namespace kda::test {
namespace {

// Implementations that belong together: the kernels and the oracle have to pass the same tests.
struct Who {
  const char *name, *verify, *flush, *flush_verify;
};
void PrintTo(const Who& w, std::ostream* out) { *out << w.name; }

class SpeculationGarbage : public testing::TestWithParam<Who> {
 protected:
  const Who w = GetParam();
  // The bits of all that the three operators write for these numbers.
  Bits all_bits(const Drafts& d, const Drafts& next, const Records& recorded) {
    const Tensor o = d.output(), flushed = d.pool.h.clone(), both = d.pool.h.clone(), both_o = d.output();
    Records verified = recorded.clone(), records = d.s.ring ? recorded.clone() : Records(next);
    run(verify_args(d, verified, o), {.impl = w.verify});
    run(flush_args(d, flushed, recorded), {.impl = w.flush});
    std::string bits = o.bits().bytes + verified.bits().bytes + flushed.bits().bytes;
    EXPECT_TRUE(o.margins_intact() && flushed.margins_intact());
    for (const Named& t : verified.all()) EXPECT_TRUE(t.tensor->margins_intact()) << t.name;
    if (!(d.s.ring && d.s.tree)) {
      run(flush_verify_args(d, next, both, recorded, records, both_o), {.impl = w.flush_verify});
      bits += both.bits().bytes + both_o.bits().bytes + records.bits().bytes;
      EXPECT_TRUE(both.margins_intact() && both_o.margins_intact());
      for (const Named& t : records.all()) EXPECT_TRUE(t.tensor->margins_intact()) << t.name;
      for (int64_t n = 0; d.s.ring && n < d.in.N; ++n) {
        EXPECT_TRUE(records.first(n) >= 0 && records.first(n) < records.R()) << records.first(n);
        EXPECT_TRUE(records.count(n) >= 0 && records.count(n) <= records.R() - d.longest()) << records.count(n);
      }
    }
    return {bits};
  }
  struct World {
    Drafts d, next;
    Records records;
    explicit World(const SpeculationCase& s) : d(s), next(s, 1), records(filled(d)) {}
  };
  Bits bits_of(const World& x) { return all_bits(x.d, x.next, x.records); }
};

SpeculationCase chain(bool ring, bool tree) {
  return {
      .c = {.name = "chain", .B = 2, .T = 5, .HV = 2, .K = 17, .V = 5}, .R = ring ? 23 : 9, .ring = ring, .tree = tree};
}

TEST_P(SpeculationGarbage, AcceptLengthsAreClamped) {
  for (const bool tree : {false, true}) {
    World x(chain(false, tree));
    const auto with = [&](double m) {
      x.d.accept_len.fill(m);
      return bits_of(x);
    };
    const Bits none = with(0), most = with(tree ? 5 : 9);  // as many as the tree, or the slot, has
    for (const double m : {-1.0, -7.0, kLeast}) EXPECT_EQ(with(m), none) << m;
    for (const double m : {10.0, 1e6, kMost}) EXPECT_EQ(with(m), most) << m;
    EXPECT_NE(none, most);
  }
}

TEST_P(SpeculationGarbage, AcceptLengthsOnARingAreClampedToWhatIsLeft) {
  World x(chain(true, false));
  x.records.ring_count.fill(7);
  const auto with = [&](double m) {
    x.d.accept_len.fill(m);
    return bits_of(x);
  };
  const Bits none = with(0), most = with(23 - 7);  // flush_verify also keeps room for its own drafts
  for (const double m : {-1.0, kLeast}) EXPECT_EQ(with(m), none) << m;
  for (const double m : {17.0, 1e6, kMost}) EXPECT_EQ(with(m), most) << m;
}

TEST_P(SpeculationGarbage, ParentsAreClamped) {
  World x(chain(false, true));
  x.d.accept_len.fill(5);
  const auto with = [&](double first, double third) {
    for (int64_t n = 0; n < 2; ++n)
      for (const auto& [t, parent] : {std::pair{0, first}, {1, 0.0}, {2, 0.0}, {3, third}, {4, 3.0}})
        x.d.parents.set(n * 5 + t, parent), x.next.parents.set(n * 5 + t, parent);
    return bits_of(x);
  };
  const Bits before = with(-1, 2), root = with(-1, -1);
  EXPECT_NE(before, root);
  for (const double p : {3.0, 4.0, 5.0, 1e6, kMost}) EXPECT_EQ(with(-1, p), before) << p;  // the token before
  for (const double p : {-2.0, -100.0, kLeast}) EXPECT_EQ(with(-1, p), root) << p;
  for (const double p : {0.0, 1.0, kMost, -9.0, kLeast}) EXPECT_EQ(with(p, 2), before) << p;
}

TEST_P(SpeculationGarbage, CursorsAreWrapped) {
  for (const bool tree : {false, true}) {
    World x(chain(true, tree));
    x.records.ring_count.fill(6);
    const auto outputs = [&](double first, double count) {
      x.records.ring_first.fill(first), x.records.ring_count.fill(count);
      const Tensor o = x.d.output(), state = x.d.pool.h.clone();
      const Records records = x.records.clone();
      run(verify_args(x.d, records, o), {.impl = w.verify});
      run(flush_args(x.d, state, x.records), {.impl = w.flush});
      bits_of(x);  // also in range
      return Bits{o.bits().bytes + state.bits().bytes};
    };
    EXPECT_EQ(outputs(23, 6), outputs(0, 6));
    EXPECT_EQ(outputs(-1, 6), outputs(22, 6));
    EXPECT_EQ(outputs(kMost, 6), outputs(static_cast<int32_t>(kMost) % 23, 6));
    EXPECT_EQ(outputs(kLeast, 6), outputs(((-2147483648LL) % 23 + 23) % 23, 6));
    EXPECT_NE(outputs(3, 6), outputs(4, 6));
    EXPECT_EQ(outputs(3, -1), outputs(3, 0));
    EXPECT_EQ(outputs(3, kLeast), outputs(3, 0));
  }
}

TEST_P(SpeculationGarbage, CommittedEntriesLeaveRoomForTheDrafts) {
  World x(chain(true, false));
  const auto with = [&](double count) {
    x.records.ring_count.fill(count);
    const Records records = x.records.clone();
    const Tensor o = x.d.output();
    run(verify_args(x.d, records, o), {.impl = w.verify});
    bits_of(x);
    return o.bits();
  };
  const Bits most = with(23 - 5);
  for (const double count : {19.0, 23.0, 24.0, 1e6, kMost}) EXPECT_EQ(with(count), most) << count;
  EXPECT_NE(with(17), most);
}

TEST_P(SpeculationGarbage, NegativeIndicesArePadding) {
  for (const bool ring : {false, true}) {
    World x(chain(ring, false));
    const auto with = [&](double slot, double record) {
      x.d.pool.state_indices.set(1, slot), x.next.pool.state_indices.set(1, slot);
      x.records.indices.set(0, record);
      const Tensor o = x.d.output(), state = x.d.pool.h.clone();
      Records records = x.records.clone();
      run(verify_args(x.d, records, o), {.impl = w.verify});
      run(flush_args(x.d, state, x.records), {.impl = w.flush});
      bits_of(x);
      return Bits{o.bits().bytes + state.bits().bytes + records.bits().bytes};
    };
    const Bits padded = with(-1, -1);
    for (const double i : {-2.0, kLeast}) EXPECT_EQ(with(i, i), padded) << i;
  }
}

TEST_P(SpeculationGarbage, AnythingAtAll) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    World x(chain(round % 2, round % 3 == 0));
    for (Tensor* t : {&x.d.accept_len, &x.d.parents, &x.next.parents, &x.records.ring_first, &x.records.ring_count})
      for (int64_t i = 0; i < t->size(); ++i) t->set(i, anything(random));
    const Bits first = bits_of(x);
    EXPECT_EQ(bits_of(x), first) << round;
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SpeculationGarbage,
                         testing::Values(Who{"reference", "reference", "reference", "reference"},
                                         Who{"cpu", "cpu_verify", "cpu_flush", "cpu_flush_verify"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kda::test
