// The promises of docs/numerics.md for verify, flush and flush_verify, bit for bit.
#include <cmath>

#include "speculation_promises.h"

namespace kda::test {
namespace {

// ---- the same call again ----

TEST_P(SpeculationPromise, RunToRunDeterminism) {
  for (const char* name : {"gva_4_bf16", "softplus", "packed", "K128_V128", "ring", "ring_packed"}) {
    const Rounds r(find_speculation_case(name));
    const Results first = results(r);
    for (int i = 0; i < 3; ++i) expect_same(results(r), first, name);
  }
}

TEST_P(SpeculationPromise, ThreadCountChangesNoBit) {
  for (const char* name : {"gva_2", "softplus", "packed", "K5_V200", "K128_V128", "K256_V256", "K256_V256_K_first",
                           "state_bf16_K_first", "ring", "ring_packed", "tree_16", "padded_0"}) {
    const Rounds r(find_speculation_case(name));
    const Results one = results(r, {.threads = 1});
    for (const int threads : {2, 3, 4, 0}) expect_same(results(r, {.threads = threads}), one, name);
  }
}

TEST_P(SpeculationPromise, WorkspaceSizeChangesNoBit) {
  const Rounds r(find_speculation_case("K256_V256"));
  expect_same(results(r, {.threads = 4, .workspace_for_threads = 1}), results(r, {.threads = 4}), "K256_V256");
}

TEST_P(SpeculationPromise, WorkspaceContentChangesNoBit) {
  for (const SpeculationCase& s : speculation_cases()) {
    if (!fits(s)) continue;
    const Rounds r(s);
    const Results zeros = results(r, {.workspace_fill = 0});
    expect_same(results(r, {.workspace_fill = 0xff}), zeros, s.c.name);  // NaN
    expect_same(results(r, {.workspace_fill = 0x7f}), zeros, s.c.name);  // 3.4e38
  }
}

TEST_P(SpeculationPromise, OutputContentChangesNoBit) {
  for (const char* name : {"drafts_8", "K60_V100", "tree", "gva_2"}) {
    const Rounds r(find_speculation_case(name));
    const Results zeros = results(r, {.output_fill = 0});
    expect_same_requests(results(r, {.output_fill = 0x7f}), zeros, r, name);
    expect_same_requests(results(r, {.output_fill = 0xff}), zeros, r, name);
  }
}

// ---- neighbours ----

// A request among others, at any place, or alone: the same bits.
TEST_P(SpeculationPromise, BatchInvariance) {
  for (const char* name : {"packed", "tree", "ring", "ring_long", "ring_packed", "gva_2", "softplus", "state_bf16",
                           "K60_V100", "K100_V60", "gates_wild", "gates_wild_bf16"}) {
    const SpeculationCase s = find_speculation_case(name);
    const Rounds r(s);
    const Results all = results(r, {.threads = 3});
    for (int64_t n = 0; n < r.d.in.N; ++n) {
      if (!r.d.live(n) || !r.d.recorded(n) || r.d.in.length(n) == 0) continue;
      SpeculationCase alone = s;
      alone.R = r.d.entries(), alone.padded.clear(), alone.recordless.clear();
      const auto drafts = [&](const Drafts& of) {
        Inputs in = row_of(of.in, n);
        alone.c = in.c;
        Drafts one(alone, std::move(in), 0);
        if (one.parents) one.parents = cut(of.parents, 0, n, 1);
        one.accept_len = cut(of.accept_len, 0, n, 1);
        return one;
      };
      Rounds one(drafts(r.before), drafts(r.d));
      const auto copy = [&](Tensor& to, const Tensor& from) {
        if (!from) return;
        const int64_t row = from.size() / from.shape()[0];
        for (int64_t i = 0; i < row; ++i) to.set(one.last.slots[0] * row + i, from.get(r.last.slots[n] * row + i));
      };
      for (size_t i = 0; i < one.last.all().size(); ++i)
        if (std::string(one.last.all()[i].name) != "indices") {
          Records& from = const_cast<Records&>(r.last);
          copy(*one.last.all()[i].tensor, *from.all()[i].tensor);
        }
      const Results got = of(results(one), one, 0), expected = of(all, r, n);
      for (const auto& [part, t] : expected)
        EXPECT_EQ(got.at(part).bits(), t.bits()) << part << " of request " << n << " of " << name;
    }
  }
}

// A draft's output does not depend on later drafts, nor on other branches.
TEST_P(SpeculationPromise, OutputsDependOnTheirPathOnly) {
  if (op == Op::kFlush) GTEST_SKIP() << "has no drafts";
  for (const char* name : {"drafts_8", "tree", "ring"})
    for (const char* victim : {"q", "k", "v", "g", "beta"}) {
      const SpeculationCase& s = find_speculation_case(name);
      for (int64_t t = 0; t < s.c.T; t += 3) {
        Rounds r(s);
        const Results clean = results(r);
        Tensor& x = tensor(r.d.in, victim);
        const int64_t row = x.size() / (r.d.in.B * r.d.in.T);
        for (int64_t i = 0; i < row; ++i) x.set((r.d.in.T + t) * row + i, std::nan(""));  // of request 1
        const Results spoilt = results(r);
        for (int64_t n = 0; n < r.d.in.N; ++n)
          for (int64_t i = 0; i < r.d.in.T; ++i) {
            const std::vector<int64_t> path = r.d.path(n, i);
            const bool reached =
                n == 1 && (std::string(victim) == "q" ? i == t : std::count(path.begin(), path.end(), t));
            const Bits got = cut(spoilt.at("o"), 0, n, 1).bits(1, i, 1),
                       expected = cut(clean.at("o"), 0, n, 1).bits(1, i, 1);
            EXPECT_EQ(got != expected, reached)
                << name << ": " << victim << " of draft " << t << ", output " << n << " " << i;
          }
      }
    }
}

// Fewer drafts in the call: the same bits for those that are there.
TEST_P(SpeculationPromise, OutputsDoNotDependOnTheNumberOfDrafts) {
  if (op == Op::kFlush) GTEST_SKIP() << "has no drafts";
  for (const char* name : {"drafts_16", "K128_V128", "K128_V128_K_first", "K60_V100", "tree_16"}) {
    Rounds r(find_speculation_case(name));
    const Bits all = results(r).at("o").bits(1, 0, 1);
    const int64_t T = r.d.in.T;
    for (int64_t t = 1; t <= T; ++t) {
      const Tensor o(r.d.s.c.dtype, {r.d.in.B, t, r.d.s.c.HV, r.d.s.c.V}), whole = r.d.output(),
                                                                           state = r.state.clone();
      const Records records(r.d);
      const auto shorter = [&](auto a, const Tensor& out) {
        for (kda_tensor* x : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta}) x->shape[1] = t;
        a.o = out;
        return a;
      };
      if (op == Op::kVerify) run(shorter(verify_args(r.d, state, &records, whole), o));
      else run(shorter(flush_verify_args(r.before, r.d, state, r.last, records, whole), o));
      EXPECT_EQ(o.bits(1, 0, 1), all) << name << " with " << t << " drafts";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SpeculationPromise, testing::ValuesIn(promise_ops()), promise_op);

}  // namespace
}  // namespace kda::test
