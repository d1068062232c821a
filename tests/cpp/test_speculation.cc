// kda_verify, kda_flush and kda_flush_verify on every case against the float64 oracle, within the budgets of math.md 8.
// One case: test_speculation --gtest_filter='*gates_wild'. Another instruction set: KDA_CPU_ISA=avx2 test_speculation.
#include "speculation_calls.h"

namespace kda::test {
namespace {

// In f32 everything is computed and kept in f32; what is stored in 16 bits is rounded once.
double budget(int32_t dtype) { return dtype == KDA_F32 ? 1e-5 : 0.003; }

class Speculation : public testing::TestWithParam<SpeculationCase> {
 protected:
  Speculation() : s(GetParam()), d(s) {}

  static void expect_close(const Tensor& expected, const Tensor& got, const char* name, double least = 0) {
    EXPECT_TRUE(close(expected, got, std::max(least, budget(got.dtype())))) << name;
    EXPECT_EQ(got.unwritten(), expected.unwritten()) << name;
    EXPECT_TRUE(got.margins_intact()) << name;
  }
  static void expect_close(Records& expected, Records& got, double least = 0) {
    for (size_t i = 0; i < 3; ++i)
      expect_close(*expected.tensors()[i].tensor, *got.tensors()[i].tensor, got.tensors()[i].name, least);
  }
  // Unused slots, and slots of requests that apply nothing, keep every bit.
  void expect_kept(const Pool& before, const Pool& after, const std::vector<bool>& written) {
    for (int64_t slot = 0; slot < before.h.shape()[0]; ++slot) {
      const auto owner = std::find(before.slots.begin(), before.slots.end(), slot) - before.slots.begin();
      if (owner < d.in.N && written[owner]) continue;
      EXPECT_EQ(after.h.bits(0, slot, 1), before.h.bits(0, slot, 1)) << "slot " << slot;
    }
  }
  Pool start(int32_t dtype) const {
    Pool pool(d.in, dtype);
    if (!s.c.h0) pool.h.fill(0);  // flush has no has_initial_state
    return pool;
  }

  const SpeculationCase s;
  Drafts d;
};

TEST_P(Speculation, Verify) {
  Records exact(d, KDA_F64), got(d);
  const Tensor exact_o = d.output(KDA_F64), o = d.output();
  const Bits state = d.pool.h.bits();
  run(verify_args(d, exact, exact_o), {.impl = "reference"});
  run(verify_args(d, got, o), {.impl = "cpu_verify"});
  if (HasFatalFailure()) return;
  expect_close(exact_o, o, "o");
  EXPECT_EQ(o.unwritten(), 0);
  expect_close(exact, got);
  EXPECT_EQ(d.pool.h.bits(), state);
}

// Without records the outputs are the same, to the bit.
TEST_P(Speculation, VerifyWithoutRecords) {
  if (s.ring) GTEST_SKIP() << "its outputs need them";
  const Records records(d);
  const Tensor with = d.output(), without = d.output();
  run(verify_args(d, records, with), {.impl = "cpu_verify"});
  run(verify_args(d, d.pool.h, nullptr, without), {.impl = "cpu_verify"});
  EXPECT_EQ(without.bits(), with.bits());
}

TEST_P(Speculation, Flush) {
  const Records records(d);
  const Tensor o = d.output();
  run(verify_args(d, records, o), {.impl = "cpu_verify"});
  for (const int64_t shift : {0, 1, 2, 5}) {
    d.accept(shift);
    const Pool before = start(s.c.state_dtype), got = start(s.c.state_dtype), exact = start(KDA_F64);
    const Bits recorded = records.bits();
    run(flush_args(d, exact.h, records), {.impl = "reference"});
    run(flush_args(d, got.h, records), {.impl = "cpu_flush"});
    if (HasFatalFailure()) return;
    expect_close(exact.rows(d.in), got.rows(d.in), "state");
    EXPECT_TRUE(got.h.margins_intact());
    EXPECT_EQ(records.bits(), recorded);
    std::vector<bool> written;
    for (int64_t n = 0; n < d.in.N; ++n)
      written.push_back(d.live(n) && d.recorded(n) && d.accepted(n) + records.count(n));
    expect_kept(before, got, written);
  }
}

// The records of one round, then the drafts of the next.
TEST_P(Speculation, FlushVerify) {
  if (s.ring && s.tree) GTEST_SKIP() << "entries of a ring are a chain";
  const Drafts next(s, 1);
  for (const int64_t shift : {0, 1, 2, 5}) {
    d.accept(shift);
    const Pool before = start(s.c.state_dtype), got = start(s.c.state_dtype), exact = start(s.c.state_dtype);
    Records last(d);
    const Tensor o = d.output(), exact_o = d.output(KDA_F64);
    run(verify_args(d, before.h, &last, o), {.impl = "cpu_verify"});
    Records records = s.ring ? last.clone() : Records(next), exact_records = s.ring ? last.clone() : Records(next);
    run(flush_verify_args(d, next, exact.h, last, exact_records, exact_o), {.impl = "reference"});
    run(flush_verify_args(d, next, got.h, last, records, o), {.impl = "cpu_flush_verify"});
    if (HasFatalFailure()) return;
    expect_close(exact.rows(d.in), got.rows(d.in), "state");
    // A state kept in 16 bits may be rounded up here and down there before the drafts read it.
    expect_close(exact_o, o, "o", budget(s.c.state_dtype));
    expect_close(exact_records, records, budget(s.c.state_dtype));
    EXPECT_EQ(records.ring_first.bits(), exact_records.ring_first.bits());
    EXPECT_EQ(records.ring_count.bits(), exact_records.ring_count.bits());
    std::vector<bool> written;
    for (int64_t n = 0; n < d.in.N; ++n) {
      const int64_t entries = last.count(n) + d.accepted(n);
      const bool full = entries > d.entries() - 2 * d.longest();
      written.push_back(d.live(n) && d.recorded(n) && entries && (!s.ring || full));
      if (s.ring && d.live(n) && d.recorded(n)) {
        EXPECT_EQ(records.count(n), full ? 0 : entries) << "request " << n;
        EXPECT_EQ(records.first(n), full ? (last.first(n) + entries) % d.entries() : last.first(n)) << "request " << n;
      } else {
        EXPECT_EQ(records.count(n), last.count(n)) << "request " << n;
      }
    }
    expect_kept(before, got, written);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Speculation, testing::ValuesIn(speculation_cases()),
                         [](const auto& info) { return info.param.c.name; });

}  // namespace
}  // namespace kda::test
