// Runs verify, flush or flush_verify on a case and returns all that it writes, whole or of one request.
#pragma once
#include "promises.h"
#include "speculation_calls.h"

namespace kda::test {

enum class Op { kVerify, kFlush, kFlushVerify };
inline std::vector<Op> promise_ops() { return {Op::kVerify, Op::kFlush, Op::kFlushVerify}; }
inline std::string promise_op(const testing::TestParamInfo<Op>& info) {
  return info.param == Op::kVerify ? "verify" : info.param == Op::kFlush ? "flush" : "flush_verify";
}

// A round whose drafts are recorded and partly accepted, and the drafts of the next.
struct Rounds {
  Drafts before, d;
  Tensor state;
  Records last;

  explicit Rounds(const SpeculationCase& s) : Rounds(Drafts(s), Drafts(s, 1)) { verify_before(); }
  Rounds(Drafts first, Drafts second)
      : before(std::move(first)), d(std::move(second)), state(d.pool.h.clone()), last(before) {}
  void verify_before() {
    const Tensor o = before.output();
    run(verify_args(before, state, &last, o));
  }
};
// Entries that a flush applies for request n.
inline std::vector<int64_t> entries_of(const Rounds& r, int64_t n) {
  std::vector<int64_t> entries;
  for (int64_t i = 0; i < r.last.count(n); ++i) entries.push_back((r.last.first(n) + i) % r.last.R());
  for (const int64_t t : r.before.path(n, r.before.accepted(n) - 1))
    entries.push_back((r.last.first(n) + r.last.count(n) + t) % r.last.R());
  return entries;
}

class SpeculationPromise : public testing::TestWithParam<Op> {
 protected:
  const Op op = GetParam();
  bool fits(const SpeculationCase& s) const { return op != Op::kFlushVerify || !(s.ring && s.tree); }

  // Everything that is written, whole.
  Results results(const Rounds& r, const Conditions& how = {}) {
    const bool ring = r.d.s.ring, flush = op == Op::kFlush;
    Tensor state = r.state.clone(), o = r.d.output();
    Records records = flush || ring ? r.last.clone() : Records(r.d);
    if (how.output_fill != 0xff) {
      o.fill(how.output_fill);
      for (const Named& t : records.tensors())
        if (!flush && !ring) t.tensor->fill(how.output_fill);
    }
    switch (op) {
      case Op::kVerify: run_under(verify_args(r.d, state, &records, o), "cpu_verify", how); break;
      case Op::kFlush: run_under(flush_args(r.before, state, records), "cpu_flush", how); break;
      case Op::kFlushVerify:
        run_under(flush_verify_args(r.before, r.d, state, r.last, records, o), "cpu_flush_verify", how);
        break;
    }
    Results all;
    EXPECT_TRUE(state.margins_intact());
    all["state"] = std::move(state);
    if (flush) {
      EXPECT_EQ(records.bits(), r.last.bits());
      return all;
    }
    EXPECT_TRUE(o.margins_intact());
    all["o"] = std::move(o);
    for (const auto& [name, t] : records.all()) {
      EXPECT_TRUE(t->margins_intact()) << name;
      if (*t && std::string(name) != "indices") all[name] = std::move(*t);
    }
    return all;
  }

  // What belongs to request n: its outputs, its state, the entries of its drafts and its cursors.
  Results of(const Results& all, const Rounds& r, int64_t n) const {
    Results one;
    const Inputs& in = r.d.in;
    for (const auto& [name, t] : all) {
      if (name == "o") one[name] = in.cu_seqlens ? cut(t, 1, in.begin(n), in.length(n)) : cut(t, 0, n, 1);
      else if (name == "state") one[name] = cut(t, 0, r.d.pool.slots[n], 1);
      else if (r.d.s.ring || r.d.entries() == in.length(n)) one[name] = cut(t, 0, r.last.slots[n], 1);
    }
    return one;
  }
  void expect_same_requests(const Results& got, const Results& expected, const Rounds& r, const std::string& what,
                            int64_t but = -1) {
    for (int64_t n = 0; n < r.d.in.N; ++n)
      if (n != but) expect_same(of(got, r, n), of(expected, r, n), what + ", request " + std::to_string(n));
  }
};

}  // namespace kda::test
