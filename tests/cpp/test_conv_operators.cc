// The convolution in front of decode, verify, flush and flush_verify: the bits of kda_conv followed by the operator
// without it, and conv states that hold the last raw rows of the committed text.
#include <cmath>
#include <limits>

#include "conv_calls.h"
#include "speculation_calls.h"

namespace kda::test {
namespace {

constexpr double kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();

// The raw rows of a round, and conv states in slots of another order. Request 1 has none.
struct Front {
  const Drafts& d;
  int64_t D, W;
  Tensor x, weight, bias, state, indices;

  explicit Front(const Drafts& d, int64_t W = 4, uint64_t seed = 0)
      : d(d), D(2 * d.s.c.H * d.s.c.K + d.s.c.HV * d.s.c.V), W(W) {
    const Case& c = d.s.c;
    x = filled(c.dtype, {d.in.B, d.in.T, D}, 0.3, seed + 1);
    weight = filled(c.dtype, {D, W}, 0.5, 2), bias = filled(KDA_F32, {D}, 0.2, 3);
    state = filled(c.dtype, {d.in.N + 2, D, W - 1}, 0.3, 4);
    indices = Tensor(KDA_I32, {d.in.N}, Layout::kPadded);
    for (int64_t n = 0; n < d.in.N; ++n) indices.set(n, n == 1 ? -1 : static_cast<double>((n + 1) % d.in.N + 1));
  }
  Tensor filled(int32_t dtype, const std::vector<int64_t>& shape, double scale, uint64_t seed) const {
    Tensor t(dtype, shape, d.s.c.layout == Layout::kPadded ? Layout::kPadded : Layout::kDense);
    Random random(seed);
    for (int64_t i = 0; i < t.size(); ++i) t.set(i, scale * random.normal());
    return t;
  }
  kda_conv_inputs view(const Tensor& states) const {
    kda_conv_inputs c{};
    c.x = x, c.weight = weight, c.bias = bias, c.state = states, c.indices = indices;
    return c;
  }
  int64_t slot(int64_t n) const { return static_cast<int64_t>(indices.get(n)); }
  int64_t row(int64_t n, int64_t t) const { return (d.in.cu_seqlens ? d.in.begin(n) : n * d.in.T) + t; }

  // The rows of the first `tokens` drafts as flush takes them: [N,T,D].
  Tensor by_request(int64_t tokens) const {
    Tensor rows(x.dtype(), {d.in.N, tokens, D}, Layout::kPadded);
    for (int64_t n = 0; n < d.in.N; ++n)
      for (int64_t t = 0; t < std::min(tokens, d.in.length(n)); ++t)
        for (int64_t i = 0; i < D; ++i) rows.set((n * tokens + t) * D + i, x.get(row(n, t) * D + i));
    return rows;
  }
  // The states after `accepted[n]` drafts: the last W-1 rows of state ++ the path.
  Tensor rolled(const Tensor& from, const std::vector<int64_t>& accepted) const {
    Tensor to = from.clone();
    for (int64_t n = 0; n < d.in.N; ++n) {
      const std::vector<int64_t> path = d.path(n, accepted[n] - 1);
      const int64_t m = static_cast<int64_t>(path.size());
      for (int64_t i = 0; slot(n) >= 0 && i < D; ++i)
        for (int64_t j = 0; j < W - 1; ++j) {
          const int64_t past = j + m;  // row of state ++ path
          to.set((slot(n) * D + i) * (W - 1) + j, past < W - 1 ? from.get((slot(n) * D + i) * (W - 1) + past)
                                                               : x.get(row(n, path[past - W + 1]) * D + i));
        }
    }
    return to;
  }
  // Convolves every draft with kda_conv, as the last token of the chain that leads to it.
  Tensor convolved(const Tensor& states) const {
    Tensor z(x.dtype(), {d.in.B, d.in.T, D});
    z.fill(0);
    for (int64_t n = 0; n < d.in.N; ++n)
      for (int64_t t = 0; t < d.in.length(n); ++t) {
        const std::vector<int64_t> path = d.path(n, t);
        const int64_t m = static_cast<int64_t>(path.size());
        Tensor one(x.dtype(), {1, m, D}), y(x.dtype(), {1, m, D}), start(states.dtype(), {1, D, W - 1});
        start.fill(0);
        for (int64_t i = 0; i < m * D; ++i) one.set(i, x.get(row(n, path[i / D]) * D + i % D));
        for (int64_t i = 0; slot(n) >= 0 && i < start.size(); ++i) start.set(i, states.get(slot(n) * start.size() + i));
        kda_conv_args a = KDA_CONV_ARGS_INIT;
        a.x = one, a.weight = weight, a.bias = bias, a.initial_state = start, a.y = y, a.silu = 1;
        run(a, {.impl = "cpu_conv", .threads = 1});
        for (int64_t i = 0; i < D; ++i) z.set(row(n, t) * D + i, y.get((m - 1) * D + i));
      }
    return z;
  }
  // Points q, k and v into the convolved rows.
  void slice(kda_inputs& in, const Tensor& z) const {
    const Case& c = d.s.c;
    const int64_t T = d.in.T;
    auto* p = static_cast<char*>(z.view().data);
    const int64_t size = c.dtype == KDA_F32 ? 4 : 2;
    in.q = {p, c.dtype, 4, {d.in.B, T, c.H, c.K}, {T * D, D, c.K, 1}};
    in.k = in.q, in.k.data = p + c.H * c.K * size;
    in.v = {p + 2 * c.H * c.K * size, c.dtype, 4, {d.in.B, T, c.HV, c.V}, {T * D, D, c.V, 1}};
  }
  template <class Args>
  Args with_front(Args a, const Tensor& states) const {
    a.conv = view(states), a.in.q = a.in.k = a.in.v = {};
    return a;
  }
  template <class Args>
  Args apart(Args a, const Tensor& z) const {
    slice(a.in, z);
    return a;
  }
};

const char* const kNames[] = {"packed", "packed_tail_i64", "padded_0", "padded_1",   "recordless", "rows",
                              "tree",   "tree_packed",     "gva_2",    "gva_4_bf16", "K60_V100",   "state_K_first",
                              "f16",    "state_bf16",      "softplus", "ring",       "ring_tree",  "ring_packed"};

// Every width where chains and trees are ragged, otherwise the usual one.
std::vector<int64_t> widths(const std::string& name) {
  if (name == "packed" || name == "tree_packed" || name == "ring_packed") return {2, 3, 4};
  return {4};
}

std::vector<int64_t> accepted_of(const Drafts& d, bool needs_records) {
  std::vector<int64_t> m;
  for (int64_t n = 0; n < d.in.N; ++n) m.push_back(d.live(n) && (d.recorded(n) || !needs_records) ? d.accepted(n) : 0);
  return m;
}

TEST(ConvDecode, IsTheConvolutionThenDecode) {
  for (const char* name : kNames)
    for (const int64_t W : widths(name)) {
      SpeculationCase s = find_speculation_case(name);
      s.tree = false;
      Drafts d(s);
      d.accept(0);
      const Front f(d, W);
      const Tensor z = f.convolved(f.state), rolled = f.rolled(f.state, [&] {
        std::vector<int64_t> all;
        for (int64_t n = 0; n < d.in.N; ++n) all.push_back(d.live(n) ? d.in.length(n) : 0);
        return all;
      }());
      kda_decode_args a = KDA_DECODE_ARGS_INIT;
      a.in = d.in.view();
      a.states.state_indices = d.pool.state_indices, a.states.has_initial_state = d.pool.has_initial_state;
      a.states.first_valid_slot = s.first_valid_slot;
      const Tensor expected_h = d.pool.h.clone(), expected_o = d.output();
      a.states.h0 = a.states.hT = expected_h, a.o = expected_o;
      run(f.apart(a, z), {.impl = "cpu_recurrent"});
      for (const int threads : {1, 3}) {
        const Tensor h = d.pool.h.clone(), o = d.output(), state = f.state.clone();
        a.states.h0 = a.states.hT = h, a.o = o;
        run(f.with_front(a, state), {.impl = "cpu_recurrent", .threads = threads});
        EXPECT_EQ(o.bits(), expected_o.bits()) << name;
        EXPECT_EQ(h.bits(), expected_h.bits()) << name;
        EXPECT_EQ(state.bits(), rolled.bits()) << name;
        EXPECT_TRUE(state.margins_intact());
      }
    }
}

// A text in calls of a few tokens gives what it gives in one call.
TEST(ConvDecode, GoesOnWhereItStopped) {
  const Drafts d({.c = {.name = "text", .B = 3, .T = 9, .HV = 2, .K = 16, .V = 12}});
  Front f(d);
  f.indices.set(1, 0);
  const Tensor whole_h = d.pool.h.clone(), whole_o = d.output(), whole_state = f.state.clone();
  const Tensor h = d.pool.h.clone(), o = d.output(), state = f.state.clone();
  const auto decode = [&](const Tensor& pool, const Tensor& states, const Tensor& out, int64_t t0, int64_t t1) {
    kda_decode_args a = KDA_DECODE_ARGS_INIT;
    a.in = d.in.view(), a.states.h0 = a.states.hT = pool, a.states.state_indices = d.pool.state_indices, a.o = out;
    a = f.with_front(a, states);
    for (kda_tensor* t : {&a.in.g, &a.in.beta, &a.conv.x, &a.o})
      t->data = static_cast<float*>(t->data) + t0 * t->stride[1], t->shape[1] = t1 - t0;
    run(a);
  };
  decode(whole_h, whole_state, whole_o, 0, 9);
  for (const auto& [t0, t1] : {std::pair<int64_t, int64_t>{0, 1}, {1, 1}, {1, 3}, {3, 4}, {4, 9}})
    decode(h, state, o, t0, t1);
  EXPECT_EQ(o.bits(), whole_o.bits());
  EXPECT_EQ(h.bits(), whole_h.bits());
  EXPECT_EQ(state.bits(), whole_state.bits());
}

TEST(ConvVerify, IsTheConvolutionThenVerify) {
  for (const char* name : kNames)
    for (const int64_t W : widths(name)) {
      const Drafts d(find_speculation_case(name));
      const Front f(d, W);
      const Tensor z = f.convolved(f.state), o = d.output(), expected_o = d.output(), state = f.state.clone();
      const Records records(d), expected(d);
      run(f.apart(verify_args(d, expected, expected_o), z), {.impl = "cpu_verify"});
      run(f.with_front(verify_args(d, records, o), state), {.impl = "cpu_verify"});
      EXPECT_EQ(o.bits(), expected_o.bits()) << name;
      EXPECT_EQ(records.bits(), expected.bits()) << name;
      EXPECT_EQ(state.bits(), f.state.bits()) << name << ": only the flush rolls it on";
    }
}

kda_flush_args with_rows(kda_flush_args a, const Front& f, const Tensor& x, const Tensor& states) {
  a.conv_x = x, a.conv_state = states, a.conv_indices = f.indices;
  return a;
}

TEST(ConvFlush, RollsByTheAcceptedRows) {
  for (const char* name : kNames)
    for (const int64_t W : widths(name)) {
      Drafts d(find_speculation_case(name));
      const Front f(d, W);
      const Records records(d);
      const Tensor o = d.output(), x = f.by_request(d.longest());
      run(verify_args(d, records, o));
      for (const int64_t shift : {0, 1, 2, 5}) {
        d.accept(shift);
        const Tensor h = d.pool.h.clone(), expected_h = d.pool.h.clone(), state = f.state.clone();
        run(flush_args(d, expected_h, records), {.impl = "cpu_flush"});
        run(with_rows(flush_args(d, h, records), f, x, state), {.impl = "cpu_flush"});
        EXPECT_EQ(h.bits(), expected_h.bits()) << name;
        EXPECT_EQ(state.bits(), f.rolled(f.state, accepted_of(d, true)).bits()) << name << " " << shift;
        EXPECT_TRUE(state.margins_intact());
      }
    }
}

// accept_len is clamped to the rows there are, for the state and for the conv state alike.
TEST(ConvFlush, AcceptsAtMostTheRowsThereAre) {
  for (const char* impl : {"cpu_flush", "reference"})
    for (const char* name : {"drafts_7", "tree", "ring"}) {
      Drafts d(find_speculation_case(name));
      const Front f(d);
      const Records records(d);
      const Tensor o = d.output();
      run(verify_args(d, records, o));
      const auto bits = [&](int64_t rows, double m) {
        d.accept_len.fill(m);
        const Tensor h = d.pool.h.clone(), state = f.state.clone(), x = f.by_request(rows);
        run(with_rows(flush_args(d, h, records), f, x, state), {.impl = impl});
        EXPECT_TRUE(h.margins_intact() && state.margins_intact());
        return Bits{h.bits().bytes + state.bits().bytes};
      };
      for (const int64_t rows : {0, 1, 3})
        for (const double m : {4.0, 1e6, kMost}) EXPECT_EQ(bits(rows, m), bits(rows, static_cast<double>(rows)));
      for (const double m : {-1.0, kLeast}) EXPECT_EQ(bits(3, m), bits(3, 0));
      EXPECT_NE(bits(3, 3), bits(3, 2));
      if (d.s.ring) continue;            // what is left of a slot differs from request to request
      const int64_t room = d.longest();  // of records; more rows than that change nothing
      EXPECT_EQ(bits(room + 2, static_cast<double>(room + 1)), bits(room + 2, static_cast<double>(room)));
    }
}

TEST(ConvFlush, AllLayersAtOnce) {
  constexpr int64_t kLayers = 3;
  const Drafts d({.c = {.name = "layers", .B = 3, .T = 4, .HV = 2, .K = 18, .V = 7}, .tree = true, .padded = {2}});
  const Front f(d);
  const Records shape(d);
  const auto layered = [&](const Tensor& one, uint64_t seed) {
    std::vector<int64_t> dims = one.shape();
    dims.insert(dims.begin(), kLayers);
    Tensor t(KDA_F32, dims, Layout::kPadded);
    Random random(seed);
    for (int64_t i = 0; i < t.size(); ++i) t.set(i, random.uniform());
    return t;
  };
  const Tensor u = layered(shape.u, 1), k = layered(shape.k, 2), alpha = layered(shape.alpha, 3),
               x = layered(f.by_request(4), 4);
  const Tensor h = layered(d.pool.h, 5), one_h = h.clone(), state = layered(f.state, 6), one_state = state.clone();
  kda_flush_args a = with_rows(flush_args(d, h, shape), f, x, state);
  a.records.u = u, a.records.k = k, a.records.alpha = alpha;
  run(a, {.impl = "cpu_flush", .threads = 3});
  a.state = one_h, a.conv_state = one_state;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    kda_flush_args one = a;
    for (kda_tensor* t :
         {&one.state, &one.records.u, &one.records.k, &one.records.alpha, &one.conv_x, &one.conv_state}) {
      t->data = static_cast<float*>(t->data) + layer * t->stride[0];
      --t->ndim;
      std::copy(t->shape + 1, t->shape + 5, t->shape), std::copy(t->stride + 1, t->stride + 5, t->stride);
    }
    run(one, {.impl = "cpu_flush"});
  }
  EXPECT_EQ(h.bits(), one_h.bits());
  EXPECT_EQ(state.bits(), one_state.bits());
  EXPECT_NE(state.bits(0, 0, 1), layered(f.state, 6).bits(0, 0, 1));
}

// A round of both, with the convolution.
struct Both {
  Drafts d;
  const Drafts next;
  const Front last, front;
  Records recorded;
  explicit Both(const SpeculationCase& s, int64_t W = 4)
      : d(s), next(s, 1), last(d, W), front(next, W, 7), recorded(d) {
    const Tensor o = d.output();
    run(verify_args(d, recorded, o));
  }
  Records fresh() const { return d.s.ring ? recorded.clone() : Records(next); }
};

TEST(ConvFlushVerify, IsARollThenTheConvolutionThenFlushVerify) {
  for (const char* name : kNames)
    for (const int64_t W : widths(name)) {
      const SpeculationCase& s = find_speculation_case(name);
      if (s.ring && s.tree) continue;  // entries of a ring are a chain
      Both b(s, W);
      const Tensor last_x = b.last.by_request(b.d.longest());
      for (const int64_t shift : {0, 1, 3}) {
        b.d.accept(shift);
        // Nothing of a request without records is accepted, so its conv state stays, too.
        const Tensor rolled = b.last.rolled(b.last.state, accepted_of(b.d, true)), z = b.front.convolved(rolled);
        const Tensor h = b.d.pool.h.clone(), expected_h = b.d.pool.h.clone(), o = b.d.output(),
                     expected_o = b.d.output(), state = b.last.state.clone();
        const Records records = b.fresh(), expected = b.fresh();
        run(b.front.apart(flush_verify_args(b.d, b.next, expected_h, b.recorded, expected, expected_o), z),
            {.impl = "cpu_flush_verify"});
        kda_flush_verify_args a = b.front.with_front(flush_verify_args(b.d, b.next, h, b.recorded, records, o), state);
        a.last_conv_x = last_x;
        run(a, {.impl = "cpu_flush_verify"});
        EXPECT_EQ(o.bits(), expected_o.bits()) << name << " " << shift;
        EXPECT_EQ(h.bits(), expected_h.bits()) << name << " " << shift;
        EXPECT_EQ(records.bits(), expected.bits()) << name << " " << shift;
        EXPECT_EQ(state.bits(), rolled.bits()) << name << " " << shift;
      }
    }
}

TEST(ConvFlushVerify, TooSmallAWorkspaceLeavesTheConvState) {
  Both b(find_speculation_case("drafts_4"));
  const Tensor state = b.last.state.clone(), last_x = b.last.by_request(4), o = b.d.output();
  const Records records = b.fresh();
  kda_flush_verify_args a =
      b.front.with_front(flush_verify_args(b.d, b.next, b.d.pool.h, b.recorded, records, o), state);
  a.last_conv_x = last_x;
  EXPECT_EQ(call(a), KDA_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(kda_last_error()).starts_with("exec.workspace_bytes: expected at least "));
  EXPECT_EQ(state.bits(), b.last.state.bits());
}

// State, cursors and conv state move by the same number of tokens, whether the rows, the path or the ring end first.
TEST(ConvFlushVerify, AcceptsAtMostTheRowsThereAre) {
  for (const char* impl : {"cpu_flush_verify", "reference"})
    for (const char* name : {"drafts_7", "tree", "ring", "ring_packed"}) {
      Both b(find_speculation_case(name));
      const auto bits = [&](int64_t rows, double m) {
        b.d.accept_len.fill(m);
        const Tensor h = b.d.pool.h.clone(), o = b.d.output(), state = b.last.state.clone(),
                     last_x = b.last.by_request(rows);
        Records records = b.fresh();
        kda_flush_verify_args a = b.front.with_front(flush_verify_args(b.d, b.next, h, b.recorded, records, o), state);
        a.last_conv_x = last_x;
        run(a, {.impl = impl});
        EXPECT_TRUE(h.margins_intact() && state.margins_intact() && o.margins_intact());
        for (const Named& t : records.all()) EXPECT_TRUE(t.tensor->margins_intact()) << t.name;
        return Bits{h.bits().bytes + state.bits().bytes + o.bits().bytes + records.bits().bytes};
      };
      for (const int64_t rows : {0, 1, 3})
        for (const double m : {4.0, 1e6, kMost})
          EXPECT_EQ(bits(rows, m), bits(rows, static_cast<double>(rows))) << impl << " " << name;
      for (const double m : {-1.0, kLeast}) EXPECT_EQ(bits(3, m), bits(3, 0)) << impl << " " << name;
      EXPECT_NE(bits(3, 3), bits(3, 2)) << impl << " " << name;
    }
}

// The oracle has its own loops for taps and rolls.
TEST(ConvOperators, AgreeWithTheOracle) {
  for (const char* name : {"packed", "padded_0", "tree", "tree_packed", "gva_2", "state_K_first", "ring", "softplus"}) {
    Both b(find_speculation_case(name));
    const Tensor last_x = b.last.by_request(b.d.longest());
    b.d.accept(1);
    const auto results = [&](bool reference) {
      const int32_t wide = reference ? KDA_F64 : KDA_F32;
      Tensor h = b.d.pool.h.clone(), o = b.d.output(wide), state = b.last.state.clone();
      Records records = b.fresh();
      kda_flush_verify_args a = b.front.with_front(flush_verify_args(b.d, b.next, h, b.recorded, records, o), state);
      a.last_conv_x = last_x;
      run(a, {.impl = reference ? "reference" : "cpu_flush_verify"});
      Tensor verified = b.d.output(wide);
      const Records again = b.fresh();
      run(b.front.with_front(verify_args(b.next, b.d.pool.h, &again, verified), b.last.state),
          {.impl = reference ? "reference" : "cpu_verify"});
      std::vector<Tensor> all;
      for (Tensor* t : {&h, &o, &state, &verified}) all.push_back(std::move(*t));
      return all;
    };
    const std::vector<Tensor> expected = results(true), got = results(false);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(close(expected[i], got[i], 2e-5)) << name << ", output " << i;
  }
}

// Invalid parents mean what they mean without a convolution: the token before, or the committed text.
TEST(ConvOperators, ParentsAreClamped) {
  const SpeculationCase& s = find_speculation_case("tree");
  const auto bits = [&](bool garbage, bool reference) {
    Both b(s);
    for (Drafts* d : {&b.d, const_cast<Drafts*>(&b.next)})
      for (int64_t i = 0; i < d->parents.size(); ++i) {
        const int64_t t = i % d->parents.shape()[1];
        if (i % 3 == 0) d->parents.set(i, garbage ? kLeast : -1);
        if (i % 3 == 1) d->parents.set(i, static_cast<double>(!garbage ? t - 1 : t % 2 ? int64_t{INT32_MAX} : t));
      }
    b.d.accept(1);
    const Tensor last_x = b.last.by_request(b.d.longest());
    const Tensor h = b.d.pool.h.clone(), flushed = b.d.pool.h.clone(), o = b.d.output(), state = b.last.state.clone(),
                 flushed_state = b.last.state.clone(), verified = b.d.output();
    const Records records = b.fresh();
    kda_flush_verify_args a = b.front.with_front(flush_verify_args(b.d, b.next, h, b.recorded, records, o), state);
    a.last_conv_x = last_x;
    run(a, {.impl = reference ? "reference" : "cpu_flush_verify"});
    run(with_rows(flush_args(b.d, flushed, b.recorded), b.last, last_x, flushed_state),
        {.impl = reference ? "reference" : "cpu_flush"});
    run(b.front.with_front(verify_args(b.next, b.d.pool.h, nullptr, verified), state),
        {.impl = reference ? "reference" : "cpu_verify"});
    EXPECT_EQ(flushed.bits(), h.bits());
    EXPECT_EQ(flushed_state.bits(), state.bits());
    return Bits{h.bits().bytes + o.bits().bytes + state.bits().bytes + verified.bits().bytes};
  };
  for (const bool reference : {false, true}) EXPECT_EQ(bits(true, reference), bits(false, reference));
}

}  // namespace
}  // namespace kda::test
