// Legal calls at the edges: nothing to do, rows and slots of no sequence, odd strides, offsets beyond 2^31 elements.
#include <sys/mman.h>

#include <cstring>

#include "contract.h"

namespace kda::test {
namespace {

bool all_zero(const Tensor& t) {
  for (int64_t i = 0; i < t.size(); ++i)
    if (t.get(i) != 0) return false;
  return true;
}

// Empty tensors may have no memory at all.
void drop_empty_data(kda_tensor& t) {
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] == 0) t.data = nullptr;
}

template <class Args>
std::vector<std::string> everyone(const char* op, const Args& args) {
  std::vector<std::string> names;
  for (const std::string& impl : cpu_implementations(op))
    if (why_not(args, impl.c_str()).empty()) names.push_back(impl);
  names.push_back("reference");
  return names;
}

// ---- no tokens ----

std::vector<Case> empty_cases() {
  std::vector<Case> all = {{.name = "no_tokens", .B = 2, .T = 0, .HV = 2},
                           {.name = "no_rows", .B = 0, .T = 70, .HV = 2},
                           {.name = "neither", .B = 0, .T = 0},
                           {.name = "no_sequences", .HV = 2, .tail = 5},
                           {.name = "all_empty", .HV = 2, .lengths = {0, 0, 0}},
                           {.name = "all_empty_tail", .HV = 2, .lengths = {0, 0}, .tail = 3}};
  for (Case& c : all) {
    c.K = 20, c.V = 24;
    c.gate_form = KDA_GATE_SOFTPLUS, c.gates = Gates::kRaw, c.A_log = c.dt_bias = true;
  }
  const std::vector<Case> with_states = all;
  for (Case c : with_states) {
    c.name += "_stateless", c.h0 = c.dhT = false;
    c.state_layout = KDA_STATE_K_FIRST;
    all.push_back(c);
  }
  return all;
}

class Empty : public testing::TestWithParam<Case> {};

TEST_P(Empty, Forward) {
  const Inputs in(GetParam());
  for (const bool saved : {false, true})
    for (const std::string& impl : everyone("forward", forward_args(in, ForwardOutputs(in, saved)))) {
      ForwardOutputs out(in, saved);
      kda_forward_args a = forward_args(in, out);
      for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.o, &a.states.h0, &a.states.hT, &a.h})
        drop_empty_data(*t);
      run(a, {.impl = impl.c_str()});
      EXPECT_TRUE(all_zero(out.o)) << impl;  // the tail, if any
      if (in.h0) EXPECT_EQ(out.hT.bits(), in.h0.bits()) << impl;
      else EXPECT_TRUE(all_zero(out.hT)) << impl;
    }
}

TEST_P(Empty, Decode) {
  const Inputs in(GetParam());
  for (const std::string& impl : cpu_implementations("decode")) {
    Tensor o(KDA_F32, {in.B, in.T, in.c.HV, in.c.V});
    const Pool before(in, KDA_F32), pool(in, KDA_F32);
    run(decode_args(in, pool, pool, o), {.impl = impl.c_str()});
    EXPECT_TRUE(all_zero(o)) << impl;
    if (in.h0) EXPECT_EQ(pool.h.bits(), before.h.bits()) << impl;
    else EXPECT_TRUE(all_zero(pool.rows(in))) << impl;
  }
}

TEST_P(Empty, Backward) {
  const Inputs in(GetParam());
  for (const std::string& impl : everyone("backward", backward_args(in, BackwardOutputs(in)))) {
    BackwardOutputs out(in);
    kda_backward_args a = backward_args(in, out);
    for (kda_tensor* t : {&a.in.q, &a.d_o, &a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta, &a.dh0}) drop_empty_data(*t);
    run(a, {.impl = impl.c_str()});
    for (const auto& [name, t] : out.tensors()) {
      const bool carried = std::string(name) == "dh0" && in.dhT;  // the gradient passes through unchanged
      if (carried) EXPECT_EQ(t->bits(), in.dhT.bits()) << impl;
      else EXPECT_TRUE(all_zero(*t)) << name << " by " << impl;  // sums over nothing are 0, not left alone
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Empty, testing::ValuesIn(empty_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(EmptyGate, NoRows) {
  for (const std::string& impl : {std::string("cpu_gate"), std::string("reference")}) {
    const Inputs in({.name = "none",
                     .T = 0,
                     .HV = 2,
                     .gate_form = KDA_GATE_SOFTPLUS,
                     .gates = Gates::kRaw,
                     .A_log = true,
                     .dt_bias = true});
    GateTensors t(in, KDA_F32);
    run(gate_args(in, t), {.impl = impl.c_str()});
    run(gate_backward_args(in, t), {.impl = impl.c_str()});
    EXPECT_TRUE(all_zero(t.dA_log)) << impl;
    EXPECT_TRUE(all_zero(t.d_dt_bias)) << impl;
  }
}

// ---- rows and slots of no sequence ----

TEST(Tail, RowsPastTheLastSequenceAreZero) {
  const Inputs in({.name = "tail",
                   .H = 2,
                   .HV = 4,
                   .K = 20,
                   .V = 40,
                   .lengths = {3, 70},
                   .tail = 67,
                   .dtype = KDA_BF16,
                   .layout = Layout::kPadded});
  for (const std::string& impl : everyone("forward", forward_args(in, ForwardOutputs(in, false)))) {
    const ForwardOutputs out(in, false);
    run(forward_args(in, out), {.impl = impl.c_str()});
    EXPECT_TRUE(out.o.bits(1, 73, 67).all(0)) << impl;
    EXPECT_TRUE(out.o.margins_intact()) << impl;
  }
  for (const std::string& impl : everyone("backward", backward_args(in, BackwardOutputs(in)))) {
    BackwardOutputs out(in);
    run(backward_args(in, out), {.impl = impl.c_str()});
    for (Tensor* t : {&out.dq, &out.dk, &out.dv, &out.dg, &out.dbeta}) {
      EXPECT_TRUE(t->bits(1, 73, 67).all(0)) << impl;
      EXPECT_TRUE(t->margins_intact()) << impl;
    }
  }
}

// Sequences whose index is below first_valid_slot: o is zero, and no slot is read or written, least of all slot 0
// where first_valid_slot is 1.
template <class Args, class F>
void expect_padding(const char* op, F args_of) {
  for (const int32_t first : {0, 1})
    for (const bool in_place : {false, true}) {
      const Inputs in({.name = "padding", .HV = 2, .K = 20, .V = 40, .lengths = {3, 17, 2, 65, 1}});
      Pool h0(in, KDA_F32, 4), hT(in, KDA_F32, 4);
      const std::vector<double> indices =
          first == 0 ? std::vector<double>{-1, 5, -7, -2147483648.0, 2} : std::vector<double>{0, 5, 0, -3, 2};
      for (int n = 0; n < 5; ++n) h0.state_indices.set(n, indices[n]);
      h0.h.fill(0.25);
      const Pool& target = in_place ? h0 : hT;
      const Tensor before = target.h.clone();
      Tensor o(KDA_F32, {in.B, in.T, in.c.HV, in.c.V});
      Args a = args_of(in, h0, target, o);
      a.states.first_valid_slot = first;
      for (const std::string& impl : everyone(op, a)) {
        o.poison();
        run(a, {.impl = impl.c_str()});
        for (const auto& [t0, length] : {std::pair{0, 3}, {20, 2}, {22, 65}})
          EXPECT_TRUE(o.bits(1, t0, length).all(0)) << impl << ", token " << t0;
        EXPECT_EQ(o.unwritten(), 0) << impl;
        for (const int64_t slot : {0, 1, 3, 4, 6, 7, 8})
          EXPECT_EQ(target.h.bits(0, slot, 1), before.bits(0, slot, 1)) << impl << ", slot " << slot;
        for (const int64_t slot : {2, 5}) EXPECT_NE(target.h.bits(0, slot, 1), before.bits(0, slot, 1)) << impl;
      }
    }
}

TEST(Padding, Decode) {
  expect_padding<kda_decode_args>("decode", [](auto&... x) { return decode_args(x...); });
}
TEST(Padding, Forward) {
  expect_padding<kda_forward_args>("forward", [](auto& in, auto& h0, auto& hT, auto& o) {
    const kda_decode_args d = decode_args(in, h0, hT, o);
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = d.in, a.states = d.states, a.o = d.o;
    return a;
  });
}

// ---- strides ----

// One beta, one gate and one query row for all tokens, by stride 0: the same bits as when they are written out.
TEST(Strides, ZeroBroadcasts) {
  Case c{.name = "broadcast", .T = 70, .H = 2, .HV = 2};
  Inputs in(c);
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  for (Tensor* t : {&in.q, &in.g, &in.beta}) {
    const int64_t row = t->size() / in.T;
    for (int64_t i = row; i < t->size(); ++i) t->set(i, t->get(i % row));
  }
  for (const std::string& impl : cpu_implementations("forward")) {
    const ForwardOutputs written(in, false), broadcast(in, false);
    run(forward_args(in, written), {.impl = impl.c_str()});
    a = forward_args(in, broadcast);
    for (kda_tensor* t : {&a.in.q, &a.in.g, &a.in.beta}) t->stride[1] = 0;
    run(a, {.impl = impl.c_str()});
    EXPECT_EQ(broadcast.o.bits(), written.o.bits()) << impl;
    EXPECT_EQ(broadcast.hT.bits(), written.hT.bits()) << impl;
  }
}

// Tokens stored backwards, read through negative strides.
TEST(Strides, NegativeReverses) {
  const Inputs in({.name = "negative", .T = 70, .HV = 2, .layout = Layout::kPadded});
  const auto reverse = [](const Tensor& t, Tensor& memory) {
    memory = t.clone();
    const int64_t T = t.view().shape[1], row = t.size() / T;
    for (int64_t i = 0; i < t.size(); ++i) memory.set(i, t.get((T - 1 - i / row) * row + i % row));
    kda_tensor view = memory;
    view.data = static_cast<float*>(view.data) + (T - 1) * view.stride[1];
    view.stride[1] = -view.stride[1];
    return view;
  };
  for (const std::string& impl : cpu_implementations("forward")) {
    const ForwardOutputs forwards(in, false), backwards(in, false);
    run(forward_args(in, forwards), {.impl = impl.c_str()});
    kda_forward_args a = forward_args(in, backwards);
    Tensor memory[5];
    a.in.q = reverse(in.q, memory[0]), a.in.k = reverse(in.k, memory[1]), a.in.v = reverse(in.v, memory[2]);
    a.in.g = reverse(in.g, memory[3]), a.in.beta = reverse(in.beta, memory[4]);
    run(a, {.impl = impl.c_str()});
    EXPECT_EQ(backwards.o.bits(), forwards.o.bits()) << impl;
  }
}

// The beta logits are often a column of a wider projection: no stride of 1 anywhere.
TEST(Strides, BetaFromAColumn) {
  const Inputs in({.name = "beta_column", .B = 2, .T = 70, .HV = 3});
  for (const std::string& impl : everyone("backward", backward_args(in, BackwardOutputs(in)))) {
    BackwardOutputs dense(in), column(in);
    Tensor wide(KDA_F32, {in.B, in.T, 3, 7}), dwide(KDA_F32, {in.B, in.T, 3, 7});
    for (int64_t i = 0; i < in.beta.size(); ++i) wide.set(i * 7 + 2, in.beta.get(i));
    run(backward_args(in, dense), {.impl = impl.c_str()});
    kda_backward_args a = backward_args(in, column);
    const auto slice = [](const Tensor& t, int64_t at) {
      kda_tensor view = t;
      view.ndim = 3, view.data = static_cast<float*>(view.data) + at;
      return view;
    };
    a.in.beta = slice(wide, 2), a.dbeta = slice(dwide, 5);
    run(a, {.impl = impl.c_str()});
    for (int64_t i = 0; i < in.beta.size(); ++i) ASSERT_EQ(dwide.get(i * 7 + 5), dense.dbeta.get(i)) << impl;
    EXPECT_EQ(dwide.unwritten(), 6 * in.beta.size()) << impl;
    EXPECT_EQ(column.dq.bits(), dense.dq.bits()) << impl;
  }
}

// ---- offsets beyond 2^31 elements ----

// Address space without memory behind it until it is touched.
class Sparse {
 public:
  explicit Sparse(uint64_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  float* data() const { return static_cast<float*>(data_); }

 private:
  uint64_t bytes_;
  void* data_;
};

// Three tokens, each tensor's tokens 2^30 + 3 elements apart: an offset in 32 bits would wrap to another place.
TEST(FarApart, Tokens) {
  const int64_t stride = (int64_t{1} << 30) + 3;
  const Inputs in({.name = "far_tokens", .T = 3, .K = 16, .V = 16});
  const Sparse memory(static_cast<uint64_t>(2 * stride + 4096) * 4);
  ASSERT_TRUE(memory.ok()) << "no 8.6 GB of address space";
  for (const std::string& impl : cpu_implementations("forward")) {
    const ForwardOutputs near(in, false), far(in, false);
    run(forward_args(in, near), {.impl = impl.c_str()});
    kda_forward_args a = forward_args(in, far);
    int64_t column = 0;
    for (const auto& [t, from] :
         {std::pair{&a.in.q, &in.q}, {&a.in.k, &in.k}, {&a.in.v, &in.v}, {&a.in.g, &in.g}, {&a.o, &near.o}}) {
      t->data = memory.data() + column;
      t->stride[1] = stride, t->stride[0] = 3 * stride;
      for (int64_t i = 0; i < from->size(); ++i)
        memory.data()[i / 16 * stride + column + i % 16] = static_cast<float>(from->get(i));
      column += 16;
    }
    const float* o = static_cast<float*>(a.o.data);
    for (int64_t t = 0; t < 3; ++t) std::memset(const_cast<float*>(o) + t * stride, 0xff, 16 * sizeof(float));
    run(a, {.impl = impl.c_str()});
    for (int64_t i = 0; i < near.o.size(); ++i) ASSERT_EQ(o[i / 16 * stride + i % 16], near.o.get(i)) << impl;
    EXPECT_EQ(far.hT.bits(), near.hT.bits()) << impl;
  }
}

// A pool of three slots, 2^30 + 1 elements apart; the last one is used.
TEST(FarApart, Slots) {
  const int64_t stride = (int64_t{1} << 30) + 1;
  const Inputs in({.name = "far_slots", .T = 2, .K = 16, .V = 16});
  const Sparse memory(static_cast<uint64_t>(2 * stride + 4096) * 4);
  ASSERT_TRUE(memory.ok()) << "no 8.6 GB of address space";
  for (const std::string& impl : cpu_implementations("decode")) {
    const Tensor o(KDA_F32, {1, 2, 1, 16}), o_far(KDA_F32, {1, 2, 1, 16}), index(KDA_I32, {1}, {2.0});
    const Pool pool(in, KDA_F32, 2);
    run(decode_args(in, pool, pool, o), {.impl = impl.c_str()});
    kda_decode_args a = decode_args(in, pool, pool, o_far);
    float* slot = memory.data() + 2 * stride;
    for (int64_t i = 0; i < 256; ++i) slot[i] = static_cast<float>(in.h0.get(i));
    a.states.h0.data = memory.data(), a.states.h0.stride[0] = stride;
    a.states.hT = a.states.h0;
    a.states.state_indices = index;
    run(a, {.impl = impl.c_str()});
    EXPECT_EQ(o_far.bits(), o.bits()) << impl;
    const Tensor expected = pool.rows(in);
    for (int64_t i = 0; i < 256; ++i) ASSERT_EQ(slot[i], expected.get(i)) << impl;
  }
}

}  // namespace
}  // namespace kda::test
