// Speculation is plain decode: every output of verify is that of decode after the tokens before it, and a flush
// leaves the state of decode; the oracle to the last bits of float64, the CPU kernels to f32. Also what is equal to
// the bit: all layers in one flush and one layer after the other, flush_verify and a flush followed by a verify.
#include "speculation_truth.h"

namespace kda::test {
namespace {

class SpeculationIs : public testing::TestWithParam<Backend> {
 protected:
  const Backend b = GetParam();
  void verify(const Drafts& d, const Tensor& pool, const Records& records, const Tensor& o) {
    run(verify_args(d, pool, &records, o), {.impl = b.verify});
  }
  void flush(const Drafts& d, const Tensor& pool, const Records& records) {
    run(flush_args(d, pool, records), {.impl = b.flush});
  }
  // Expects that every draft gives what the end of the chain that leads to it gives, and so does the state flushed up
  // to it.
  void expect_chains(Drafts& d) {
    const Records records(d, b.dtype);
    const Tensor o = d.output(b.dtype);
    verify(d, d.pool.h, records, o);
    for (int64_t t = 0; t < d.longest(); ++t) {
      const Tensor state = d.pool.h.clone();
      d.accept_len.fill(static_cast<double>(t + 1));
      flush(d, state, records);
      for (int64_t n = 0; n < d.in.N; ++n) {
        Truth truth(d.in, d.pool.h, d.pool.slots[n]);
        const std::vector<double> all = truth.decode(d.in, n, d.path(n, t));
        const int64_t row = d.in.c.HV * d.in.c.V;
        ASSERT_TRUE(near({all.end() - row, all.end()}, output_of(o, d.in, n, t), b.budget)) << n << " " << t;
        ASSERT_TRUE(near(truth.state.values(), slot_values(state, d.pool.slots[n]), b.budget)) << n << " " << t;
      }
    }
  }
};

TEST_P(SpeculationIs, DecodeForEveryNumberOfDraftsAndOfAcceptedOnes) {
  for (int64_t T = 1; T <= 16; ++T)
    for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
      Drafts d({.c = in_dtype(
                    {.name = "every", .B = 2, .T = T, .H = 1, .HV = 2, .K = 17, .V = 5, .state_layout = layout}, b)});
      expect_chains(d);
      const Tensor state = d.pool.h.clone();
      d.accept_len.fill(0);
      flush(d, state, Records(d, b.dtype));  // of records that hold NaN
      EXPECT_EQ(state.bits(), d.pool.h.bits()) << "no token accepted";
    }
}

TEST_P(SpeculationIs, DecodeAlongEveryBranchOfATree) {
  for (uint64_t seed = 0; seed < 20; ++seed)
    for (const Gates gates : {Gates::kLogSigmoid, Gates::kWild}) {
      const int64_t T = 1 + static_cast<int64_t>(seed * 7 % 16);
      Drafts d(
          {.c = in_dtype({.name = "trees", .B = 3, .T = T, .HV = 2, .K = 17, .V = 5, .gates = gates}, b), .tree = true},
          seed);
      expect_chains(d);
    }
}

// A slot keeps committed entries; drafts are written after them, and some of the drafts are given up. The end of the
// slot is passed again and again. The host moves the cursors; a flush folds what is committed when the slot is nearly
// full.
TEST_P(SpeculationIs, DecodeOnARing) {
  Random random(5);
  for (const int64_t R : {4, 5, 7, 16, 33})
    for (const bool tree : {false, true}) {
      const SpeculationCase s{
          .c = in_dtype({.name = "ring", .B = 2, .T = 4, .HV = 2, .K = 17, .V = 5}, b), .R = R, .tree = tree};
      Drafts start(s);
      Records ring(start, b.dtype);
      ring.ring_first = Tensor(KDA_I32, {ring.u.shape()[0]}), ring.ring_count = Tensor(KDA_I32, {ring.u.shape()[0]});
      ring.ring_first.fill(static_cast<double>(R - 1)), ring.ring_count.fill(0);
      const Tensor state = start.pool.h.clone(), o = start.output(b.dtype);
      std::vector<Truth> truth;
      for (int64_t n = 0; n < 2; ++n) truth.emplace_back(start.in, state, start.pool.slots[n]);
      for (int64_t round = 0; round < 40; ++round) {
        Drafts d(s, round);
        verify(d, state, ring, o);
        const Bits fresh = state.bits();
        const bool fold = random.chance(0.2);  // together with drafts that were just accepted
        for (int64_t n = 0; n < 2; ++n) {
          for (int64_t t = 0; t < 4; ++t) {
            const std::vector<double> all = truth[n].clone().decode(d.in, n, d.path(n, t));
            ASSERT_TRUE(near({all.end() - 10, all.end()}, output_of(o, d.in, n, t), b.budget)) << R << " " << round;
          }
          d.accept_len.set(n, static_cast<double>(random.below(5)));
          if (tree && !fold) d.accept_len.set(n, d.accepted(n) && d.parent(n, 0) < 0 ? 1 : 0);  // a chain by chance
          truth[n].decode(d.in, n, d.path(n, d.accepted(n) - 1));
        }
        for (int64_t n = 0; n < 2; ++n) {
          const int64_t m = d.accepted(n), count = ring.count(n) + m;
          const bool full = count > R - 4, now = fold || full;
          Drafts only(s);  // this request alone
          only.parents = d.parents.clone();
          for (int64_t i = 0; i < 2; ++i) only.pool.state_indices.set(i, i == n ? start.pool.slots[n] : -1.0);
          only.accept_len.fill(fold ? static_cast<double>(m) : 0);
          if (!fold) ring.ring_count.set(ring.slots[n], static_cast<double>(count));
          if (now) flush(only, state, ring);
          ring.ring_first.set(ring.slots[n], static_cast<double>(now ? (ring.first(n) + count) % R : ring.first(n)));
          if (now) ring.ring_count.set(ring.slots[n], 0);
          if (now) {
            ASSERT_TRUE(near(truth[n].state.values(), slot_values(state, start.pool.slots[n]), b.budget)) << round;
          }
        }
        if (R == 33 && !fold && round == 0) {
          EXPECT_EQ(state.bits(), fresh) << "nothing is folded before it must be";
        }
      }
    }
}

// ---- to the bit ----

TEST_P(SpeculationIs, TheSameForAllLayersAtOnce) {
  constexpr int64_t kLayers = 69;
  for (const int32_t state_dtype : {b.state_dtype, static_cast<int32_t>(KDA_BF16)}) {
    const SpeculationCase s{.c = in_dtype({.name = "layers", .B = 3, .T = 4, .HV = 2, .K = 18, .V = 7}, b),
                            .R = 5,
                            .tree = true,
                            .padded = {2}};
    const Drafts d(s);
    const Records shape(d, b.dtype);
    const auto layered = [&](const Tensor& one, int32_t dtype) {
      std::vector<int64_t> dims = one.shape();
      dims.insert(dims.begin(), kLayers);
      return Tensor(dtype, dims, Layout::kPadded);
    };
    Tensor at_once = layered(d.pool.h, state_dtype), u = layered(shape.u, b.dtype), k = layered(shape.k, b.dtype),
           alpha = layered(shape.alpha, b.dtype);
    Random random(3);
    for (Tensor* t : {&at_once, &u, &k, &alpha})
      for (int64_t i = 0; i < t->size(); ++i) t->set(i, random.uniform());
    const Tensor one_by_one = at_once.clone();
    kda_flush_args a = flush_args(d, at_once, shape);
    a.records.u = u, a.records.k = k, a.records.alpha = alpha;
    run(a, {.impl = b.flush});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const auto slice = [&](const Tensor& all) {
        kda_tensor t = all;
        const int64_t size = t.dtype == KDA_F64 ? 8 : t.dtype == KDA_F32 ? 4 : 2;
        t.data = static_cast<char*>(t.data) + layer * t.stride[0] * size;
        std::copy(t.shape + 1, t.shape + 5, t.shape), std::copy(t.stride + 1, t.stride + 5, t.stride);
        t.ndim = 4;
        return t;
      };
      kda_flush_args one = a;
      one.state = slice(one_by_one);
      one.records.u = slice(u), one.records.k = slice(k), one.records.alpha = slice(alpha);
      run(one, {.impl = b.flush});
    }
    EXPECT_EQ(at_once.bits(), one_by_one.bits());
    EXPECT_TRUE(at_once.margins_intact());
    EXPECT_NE(at_once.bits(0, 0, 1), at_once.bits(0, 68, 1));
  }
}

TEST_P(SpeculationIs, FlushThenVerifyInOneCall) {
  for (const char* name : {"packed", "padded_0", "padded_1", "tree", "tree_packed", "K60_V100", "K100_V60", "K128_V128",
                           "K128_V128_K_first", "gva_4_bf16", "softplus", "state_bf16", "state_K_first", "drafts_1"}) {
    const SpeculationCase s = find_speculation_case(name);
    Drafts d(s);
    const Drafts next(s, 1);
    for (const int64_t shift : {0, 1, 3}) {
      d.accept(shift);
      const Records last(d), apart(next), together(next);
      const Tensor o = d.output(), apart_o = d.output(), together_o = d.output();
      verify(d, d.pool.h, last, o);
      const Tensor apart_state = d.pool.h.clone(), together_state = d.pool.h.clone();
      flush(d, apart_state, last);
      verify(next, apart_state, apart, apart_o);
      run(flush_verify_args(d, next, together_state, last, together, together_o), {.impl = b.flush_verify});
      EXPECT_EQ(together_o.bits(), apart_o.bits()) << name;
      EXPECT_EQ(together_state.bits(), apart_state.bits()) << name;
      EXPECT_EQ(together.bits(), apart.bits()) << name;
    }
  }
}

// On a ring: cursors moved by hand, and a flush where one is due.
TEST_P(SpeculationIs, FlushThenVerifyOnARingInOneCall) {
  for (const char* name : {"ring", "ring_tight", "ring_long", "ring_packed", "gva_8", "gates_wild_bf16", "lower_bound",
                           "state_bf16_K_first"}) {
    const SpeculationCase s = find_speculation_case(name);
    Drafts d(s);
    const Drafts next(s, 1);
    for (const int64_t shift : {0, 1, 3}) {
      d.accept(shift);
      Records apart(d);
      const Tensor o = d.output(), apart_o = d.output(), together_o = d.output();
      verify(d, d.pool.h, apart, o);
      const Records together = apart.clone();
      const Tensor apart_state = d.pool.h.clone(), together_state = d.pool.h.clone();
      Drafts due(s);  // only those whose ring is full
      due.accept_len = d.accept_len.clone();
      for (int64_t n = 0; n < d.in.N; ++n)
        if (!d.live(n) || !d.recorded(n) || apart.count(n) + d.accepted(n) <= d.entries() - 2 * d.longest())
          due.pool.state_indices.set(n, -1);
      flush(due, apart_state, apart);
      for (int64_t n = 0; n < d.in.N; ++n) {
        if (!d.live(n) || !d.recorded(n)) continue;
        const int64_t slot = apart.slots[n], count = apart.count(n) + d.accepted(n);
        const bool folded = due.pool.state_indices.get(n) >= 0;
        apart.ring_first.set(slot, static_cast<double>((apart.first(n) + folded * count) % d.entries()));
        apart.ring_count.set(slot, folded ? 0 : static_cast<double>(count));
      }
      verify(next, apart_state, apart, apart_o);
      run(flush_verify_args(d, next, together_state, together, together, together_o), {.impl = b.flush_verify});
      EXPECT_EQ(together_o.bits(), apart_o.bits()) << name;
      EXPECT_EQ(together_state.bits(), apart_state.bits()) << name;
      EXPECT_EQ(together.bits(), apart.bits()) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SpeculationIs, testing::ValuesIn(backends()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kda::test
