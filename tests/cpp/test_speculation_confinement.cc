// What verify, flush and flush_verify keep apart: NaN stays in its request and head; what no request owns does not
// matter; and what must not be written is not written, shown in memory that would fault.
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "fields.h"
#include "speculation_promises.h"

namespace kda::test {
namespace {

// ---- NaN and infinity stay where they are ----

TEST_P(SpeculationPromise, NaNInOneRequestReachesNoOther) {
  for (const char* name : {"ring", "tree", "state_K_first", "gva_2"})
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), 1e38})
      for (const char* victim : {"q", "k", "v", "g", "beta", "state", "u", "record_k", "alpha"}) {
        SpeculationCase s = find_speculation_case(name);
        Rounds r(s);
        r.before.accept_len.fill(1);
        const Results clean = results(r);
        const std::string what = victim;
        const bool recorded = what == "u" || what == "record_k" || what == "alpha";
        if (what == "state") {
          const int64_t slot = r.state.size() / r.state.shape()[0];
          r.state.set(r.d.pool.slots[1] * slot + slot / 2, bad);
        } else if (recorded) {
          Tensor& t = what == "u" ? r.last.u : what == "alpha" ? r.last.alpha : r.last.k;
          const int64_t row = t.size() / (t.shape()[0] * r.last.R());
          t.set((r.last.slots[1] * r.last.R() + entries_of(r, 1).front()) * row + row / 2, bad);
        } else {
          Tensor& t = tensor(r.d.in, what);
          const int64_t row = t.size() / r.d.in.N;
          t.set(row + row / 2, bad);
        }
        const Results spoilt = results(r);
        const bool read = recorded ? op != Op::kVerify || s.ring : op != Op::kFlush || what == "state";
        const bool folds = op != Op::kFlushVerify || !s.ring;  // otherwise nothing is folded: the ring has room
        if (!recorded || !s.ring || (folds && r.last.count(1))) {
          EXPECT_EQ(of(spoilt, r, 1) != of(clean, r, 1), read || what == "state") << name << " " << victim;
        }
        expect_same_requests(spoilt, clean, r, std::string(name) + " " + victim, 1);
      }
}

TEST_P(SpeculationPromise, NaNInOneHeadReachesNoOther) {
  for (const char* name : {"gva_2", "gva_4_bf16"})
    for (const char* victim : {"v", "g", "beta", "state", "u", "alpha"}) {
      Rounds r(find_speculation_case(name));
      r.before.accept_len.fill(1);
      const Results clean = results(r);
      const std::string what = victim;
      Tensor& t = what == "state"   ? r.state
                  : what == "u"     ? r.last.u
                  : what == "alpha" ? r.last.alpha
                                    : tensor(r.d.in, what);
      const int64_t HV = r.d.s.c.HV, dim = what == "state" ? 1 : 2;
      int64_t inner = 1;
      for (int i = static_cast<int>(dim) + 1; i < t.view().ndim; ++i) inner *= t.shape()[i];
      for (int64_t i = 0; i < t.size(); ++i)
        if (i / inner % HV == HV - 1) t.set(i, std::nan(""));  // shares its query/key head with others
      const Results spoilt = results(r);
      for (int64_t hv = 0; hv < HV; ++hv)
        for (const auto& [part, out] : clean) {
          if (part == "k" || out.view().ndim < 4) continue;  // shared by all heads
          const int heads = part == "state" ? 1 : 2;
          if (hv + 1 == HV) continue;
          EXPECT_EQ(spoilt.at(part).bits(heads, hv, 1), out.bits(heads, hv, 1)) << name << " " << victim;
        }
      EXPECT_EQ(spoilt.at("state").bits(1, HV - 1, 1) != clean.at("state").bits(1, HV - 1, 1),
                what == "state" || (op != Op::kVerify && (what == "u" || what == "alpha")))
          << name << " " << victim;
    }
}

// What no request owns may hold anything: other slots of states and records, entries given up or never written.
TEST_P(SpeculationPromise, UnusedSlotsAndEntriesDoNotMatter) {
  for (const char* name : {"packed", "tree", "ring", "ring_long", "padded_0", "padded_1", "state_K_first", "gva_8"}) {
    const Rounds r(find_speculation_case(name)), zeros(find_speculation_case(name)),
        poisoned(find_speculation_case(name));
    const auto fill = [&](const Rounds& to, double x) {
      std::vector<bool> owned(to.state.shape()[0]), used(to.last.u.shape()[0] * to.last.R());
      for (int64_t n = 0; n < r.d.in.N; ++n) {
        if (!r.d.live(n)) continue;
        owned[r.d.pool.slots[n]] = true;
        for (const int64_t e : entries_of(r, n)) used[r.last.slots[n] * r.last.R() + e] = r.d.recorded(n);
      }
      const auto fill_unused = [&](Tensor& t, const std::vector<bool>& kept) {
        const int64_t row = t.size() / static_cast<int64_t>(kept.size());
        for (int64_t i = 0; i < t.size(); ++i)
          if (!kept[i / row]) t.set(i, x);
      };
      Rounds& out = const_cast<Rounds&>(to);
      fill_unused(out.state, owned);
      for (const Named& t : out.last.tensors()) fill_unused(*t.tensor, used);
    };
    fill(zeros, 0), fill(poisoned, std::nan(""));
    const Results a = results(zeros), b = results(poisoned);
    for (int64_t n = 0; n < r.d.in.N; ++n) {
      if (!r.d.live(n)) continue;
      Results x = of(a, r, n), y = of(b, r, n);
      for (const char* part : {"u", "k", "alpha"})  // rings still hold the entries given up
        if (r.d.s.ring) x.erase(part), y.erase(part);
      expect_same(y, x, name);
    }
    for (int64_t slot = 0; slot < r.state.shape()[0]; ++slot)  // and stay as they are
      if (std::find(r.d.pool.slots.begin(), r.d.pool.slots.end(), slot) == r.d.pool.slots.end()) {
        EXPECT_EQ(b.at("state").bits(0, slot, 1), poisoned.state.bits(0, slot, 1)) << name;
      }
  }
}

// ---- what is not written ----

// Copies of tensors in memory that faults when written.
class ReadOnly {
 public:
  ~ReadOnly() {
    for (const auto& [p, size] : pages_) munmap(p, size);
  }
  void move(kda_tensor& t) {
    size_t size = t.dtype == KDA_F32 || t.dtype == KDA_I32 ? 4 : t.dtype == KDA_BOOL ? 1 : t.dtype == KDA_I64 ? 8 : 2;
    const size_t element = size;
    for (int i = 0; i < t.ndim; ++i) {
      if (t.shape[i] == 0) return;
      size += (t.shape[i] - 1) * t.stride[i] * element;
    }
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    pages_.emplace_back(p, size);
    // Copies elements one by one: what lies between them is not the tensor's.
    int64_t count = 1;
    for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
    for (int64_t i = 0; i < count; ++i) {
      int64_t offset = 0, rest = i;
      for (int dim = t.ndim - 1; dim >= 0; --dim) offset += rest % t.shape[dim] * t.stride[dim], rest /= t.shape[dim];
      std::memcpy(static_cast<char*>(p) + offset * element, static_cast<char*>(t.data) + offset * element, element);
    }
    t.data = p;
    ASSERT_EQ(mprotect(p, size, PROT_READ), 0);
  }

 private:
  std::vector<std::pair<void*, size_t>> pages_;
};

TEST_P(SpeculationPromise, InputsAreNeverWritten) {
  for (const char* name :
       {"packed_tail_i64", "softplus", "ring", "ring_packed", "tree", "state_bf16", "state_K_first"}) {
    const Rounds r(find_speculation_case(name));
    const Tensor state = r.state.clone(), o = r.d.output();
    Records records = r.d.s.ring ? r.last.clone() : Records(r.d);
    ReadOnly memory;
    const auto freeze = [&](auto& a, const std::vector<Field>& all) {
      for (const Field& f : all)
        if (f.t->ndim && !f.output && std::string(f.name) != "h0") memory.move(*f.t);
      if (op == Op::kVerify) memory.move(*all[8].t);  // the states
      run(a);
    };
    if (op == Op::kVerify) {
      kda_verify_args a = verify_args(r.d, state, &records, o);
      ASSERT_STREQ(fields(a)[8].name, "h0");
      freeze(a, fields(a));
    } else if (op == Op::kFlush) {
      kda_flush_args a = flush_args(r.before, state, r.last);
      freeze(a, fields(a));
    } else {
      kda_flush_verify_args a = flush_verify_args(r.before, r.d, state, r.last, records, o);
      freeze(a, fields(a));
    }
  }
}

// With nothing accepted, with padding or without records the state is not written, not even with its own value.
TEST_P(SpeculationPromise, NothingToApplyWritesNoState) {
  for (const char* name : {"packed", "state_bf16", "state_K_first", "state_bf16_K_first", "K128_V128", "K60_V100",
                           "padded_0", "padded_1", "padded_all", "recordless", "ring"}) {
    SpeculationCase s = find_speculation_case(name);
    const bool some = s.padded.empty() && s.recordless.empty();  // if not, requests that could are padded
    if (!some) {
      s.padded.clear();
      for (int64_t n = 0; n < s.c.B; ++n)
        if (std::find(s.recordless.begin(), s.recordless.end(), n) == s.recordless.end()) s.padded.push_back(n);
    }
    Rounds r(s);
    if (some) r.before.accept_len.fill(0);
    if (s.ring && op == Op::kFlush) r.last.ring_count.fill(0);
    const Tensor o = r.d.output();
    Records records = s.ring ? r.last.clone() : Records(r.d);
    ReadOnly memory;
    kda_tensor state = r.state;
    memory.move(state);
    if (op == Op::kVerify) {
      kda_verify_args a = verify_args(r.d, r.state, &records, o);
      a.states.h0 = state;
      run(a);
    } else if (op == Op::kFlush) {
      kda_flush_args a = flush_args(r.before, r.state, r.last);
      a.state = state;
      run(a);
    } else {
      kda_flush_verify_args a = flush_verify_args(r.before, r.d, r.state, r.last, records, o);
      a.states.h0 = a.states.hT = state;
      run(a);
    }
  }
}

// Padded requests and those without records leave every byte of records and cursors alone; padded outputs are zeros.
TEST_P(SpeculationPromise, PaddingTouchesNothing) {
  if (op == Op::kFlush) GTEST_SKIP() << "writes states only";
  for (const char* name : {"padded_0", "padded_1", "padded_all", "recordless", "ring_packed", "ring_long"}) {
    const Rounds r(find_speculation_case(name));
    const Records before = r.d.s.ring ? r.last.clone() : Records(r.d);
    const Results after = results(r);
    for (int64_t n = 0; n < r.d.in.N; ++n) {
      const Results one = of(after, r, n);
      if (!r.d.live(n)) {
        EXPECT_TRUE(one.at("o").bits().all(0)) << name << " " << n;
      }
      if (r.d.live(n) && r.d.recorded(n)) continue;
      EXPECT_EQ(after.at("u").bits(0, r.last.slots[n], 1), before.u.bits(0, r.last.slots[n], 1)) << name << " " << n;
      EXPECT_EQ(after.at("k").bits(0, r.last.slots[n], 1), before.k.bits(0, r.last.slots[n], 1)) << name << " " << n;
      EXPECT_EQ(after.at("alpha").bits(0, r.last.slots[n], 1), before.alpha.bits(0, r.last.slots[n], 1))
          << name << " " << n;
      if (!r.d.s.ring) continue;
      EXPECT_EQ(after.at("ring_first").bits(0, r.last.slots[n], 1), before.ring_first.bits(0, r.last.slots[n], 1));
      EXPECT_EQ(after.at("ring_count").bits(0, r.last.slots[n], 1), before.ring_count.bits(0, r.last.slots[n], 1));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SpeculationPromise, testing::ValuesIn(promise_ops()), promise_op);

}  // namespace
}  // namespace kda::test
