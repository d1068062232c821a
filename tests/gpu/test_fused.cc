// What a call does besides its operator: the convolution in front of kda_decode, and the norm and gate behind it, and
// behind kda_verify, kda_flush_verify and kda_forward. All have the bits of the operators apart. Small shapes, for
// compute-sanitizer and the emulator.
#include <cmath>

#include "on_cuda.h"
#include "speculation_calls.h"

namespace kda::test {
namespace {

struct FusedCase {
  Case c;
  int64_t W = 4;
  int32_t conv_dtype = KDA_BF16;                         // of weights and states
  bool bias = true, snapshots = false, by_rows = false;  // by_rows: conv states lie as [slots,W-1,D]
  std::vector<double> indices = {};                      // of conv states; as those of the states if there are none
};
void PrintTo(const FusedCase& s, std::ostream* out) { *out << s.c.name; }

std::vector<FusedCase> fused_cases() {
  std::vector<FusedCase> all;
  const auto usual = [](const char* name, int64_t B, int64_t T, int64_t K, int64_t V) {
    Case c{.name = name, .B = B, .T = T, .H = 2, .HV = 4, .K = K, .V = V, .dtype = KDA_BF16, .g_dtype = KDA_BF16};
    c.beta_dtype = KDA_BF16, c.beta_form = KDA_BETA_SIGMOID, c.qk_l2norm = true;
    c.gate_form = KDA_GATE_SOFTPLUS, c.gates = Gates::kRaw, c.A_log = c.dt_bias = true;
    return c;
  };
  const auto add = [&](FusedCase s) { all.push_back(std::move(s)); };
  add({.c = usual("usual", 5, 1, 128, 128)});
  add({.c = usual("usual_by_rows", 5, 1, 128, 64), .bias = false, .by_rows = true});
  add({.c = usual("usual_64", 5, 1, 64, 64)});
  add({.c = usual("many", 40, 1, 64, 64)});
  add({.c = usual("tokens_3", 3, 3, 128, 128)});
  add({.c = usual("tokens_6", 2, 6, 40, 24), .snapshots = true});
  FusedCase s{.c = usual("states_bf16", 5, 1, 128, 128)};
  s.c.state_dtype = KDA_BF16;
  add(s);
  s = {.c = usual("K_first", 5, 1, 128, 128)};
  s.c.state_layout = KDA_STATE_K_FIRST;
  add(s);
  s = {.c = usual("bounded", 5, 2, 64, 128)};
  s.c.gate_form = KDA_GATE_LOWER_BOUND, s.c.lower_bound = -5;
  add(s);
  s = {.c = usual("f32_W3", 4, 2, 61, 37), .W = 3, .conv_dtype = KDA_F32};
  s.c.dtype = s.c.g_dtype = s.c.beta_dtype = KDA_F32;
  add(s);
  s = {.c = usual("f16_W2", 4, 1, 60, 100), .W = 2, .conv_dtype = KDA_F16};
  s.c.dtype = KDA_F16;
  add(s);
  s = {.c = usual("mixed_conv", 4, 1, 128, 128), .conv_dtype = KDA_F32};
  add(s);
  s = {.c = usual("packed", 1, 1, 128, 64)};
  s.c.lengths = {1, 4, 0, 2, 9}, s.c.tail = 3;
  add(s);
  s = {.c = usual("packed_shared", 1, 1, 40, 24)};  // a slot of requests that leave it alone, and of one that does not
  s.c.lengths = {2, 0, 3, 1}, s.indices = {4, 4, 6, 4};
  add(s);
  s = {.c = usual("no_slots", 5, 2, 128, 128), .indices = {-1, 2, 8, 1000, -2147483648.0}};  // of slots 0 to 7
  add(s);
  return all;
}

class FusedOnCuda : public OnCuda, public testing::WithParamInterface<FusedCase> {
 protected:
  FusedOnCuda() : s(GetParam()), in(s.c), D(2 * s.c.H * s.c.K + s.c.HV * s.c.V) {
    x = filled(s.c.dtype, {in.B, in.T, D}, 1), weight = filled(s.conv_dtype, {D, s.W}, 0.5);
    if (s.bias) bias = filled(s.conv_dtype, {D}, 0.5);
    const int64_t slots = std::max<int64_t>(in.N + 3, 7);
    state = s.by_rows ? filled(s.conv_dtype, {slots, s.W - 1, D}, 1) : filled(s.conv_dtype, {slots, D, s.W - 1}, 1);
    gate = filled(s.c.g_dtype, {in.B, in.T, s.c.HV, s.c.V}, 2), norm_weight = filled(KDA_BF16, {s.c.V}, 1);
    indices = Tensor(KDA_I32, {in.N});
    const Pool pool(in, s.c.state_dtype);
    for (int64_t n = 0; n < in.N; ++n) indices.set(n, s.indices.empty() ? pool.state_indices.get(n) : s.indices[n]);
  }
  Tensor filled(int32_t dtype, const std::vector<int64_t>& shape, double scale) {
    Tensor t(dtype, shape);
    for (int64_t i = 0; i < t.size(); ++i) t.set(i, scale * random.normal());
    return t;
  }
  kda_tensor state_view(const Tensor& t) const {
    kda_tensor view = t;
    if (s.by_rows) std::swap(view.shape[1], view.shape[2]), std::swap(view.stride[1], view.stride[2]);
    return view;
  }
  bool live(int64_t n) const { return n != padded; }

  // What a call leaves.
  struct Result {
    Pool pool;
    Tensor o, state, snapshots;
    Result(const FusedOnCuda& t)
        : pool(t.in, t.s.c.state_dtype), o(t.s.c.dtype, {t.in.B, t.in.T, t.s.c.HV, t.s.c.V}), state(t.state.clone()) {
      if (t.padded >= 0) pool.state_indices.set(t.padded, -1);
      if (!t.s.snapshots) return;
      std::vector<int64_t> shape = t.in.state_shape(t.in.N);
      shape.insert(shape.begin() + 1, t.in.T);
      snapshots = Tensor(t.s.c.state_dtype, shape);
    }
  };
  kda_decode_args decode(const Result& r) const {
    kda_decode_args a = decode_args(in, r.pool, r.pool, r.o);
    a.states.state_indices = r.pool.state_indices;
    a.snapshots = r.snapshots;
    return a;
  }
  kda_decode_args fused(const Result& r) const {
    kda_decode_args a = decode(r);
    a.in.q = a.in.k = a.in.v = {};
    a.conv = {x, weight, bias, state_view(r.state), indices};
    return a;
  }
  // The convolution by kda_conv, from rows of states: a request without a slot starts from zeros.
  void convolve(Result& r, const Tensor& y) {
    const int64_t keep = s.W - 1, row = D * keep;
    Tensor rows(s.conv_dtype, {in.N, D, keep});
    const auto at = [&](int64_t slot, int64_t i) {
      return s.by_rows ? (slot * keep + i % keep) * D + i / keep : slot * row + i;
    };
    const auto slot_of = [&](int64_t n) {
      const double slot = indices.get(n);
      return slot >= 0 && slot < static_cast<double>(state.shape()[0]) ? static_cast<int64_t>(slot) : -1;
    };
    for (int64_t n = 0; n < in.N; ++n)
      for (int64_t i = 0; i < row; ++i) rows.set(n * row + i, slot_of(n) < 0 ? 0 : state.get(at(slot_of(n), i)));
    kda_conv_args a = KDA_CONV_ARGS_INIT;
    a.x = x, a.weight = weight, a.bias = bias, a.y = y, a.initial_state = a.final_state = rows, a.silu = 1;
    a.cu_seqlens = in.cu_seqlens;
    const Tensor exact = rows.clone(), exact_y(KDA_F64, {in.B, in.T, D});
    run_on_cuda(a, "cuda_conv");
    a.initial_state = a.final_state = exact, a.y = exact_y;
    run(a, {.impl = "reference"});
    EXPECT_EQ(rows.bits(), exact.bits()) << "states only move";
    expect_close(exact_y, y, "rows");
    for (int64_t n = 0; n < in.N; ++n)
      for (int64_t i = 0; slot_of(n) >= 0 && live(n) && in.length(n) > 0 && i < row; ++i)
        r.state.set(at(slot_of(n), i), rows.get(n * row + i));
  }
  kda_norm_gate_args norm(const Result& r, int32_t activation, double eps) const {
    kda_norm_gate_args a = KDA_NORM_GATE_ARGS_INIT;
    a.x = a.y = r.o, a.weight = norm_weight, a.eps = eps, a.activation = activation;
    if (activation != KDA_NORM_NONE) a.gate = gate;
    return a;
  }

  const FusedCase s;
  const Inputs in;
  const int64_t D;
  int64_t padded = -1;
  Random random{7};
  Tensor x, weight, bias, state, gate, norm_weight, indices;
};

void expect_same(const auto& got, const auto& expected) {
  EXPECT_EQ(got.o.bits(), expected.o.bits());
  EXPECT_EQ(got.pool.h.bits(), expected.pool.h.bits());
  EXPECT_EQ(got.state.bits(), expected.state.bits());
  if (expected.snapshots) {
    EXPECT_EQ(got.snapshots.bits(), expected.snapshots.bits());
  }
}

TEST_P(FusedOnCuda, HasTheBitsOfItsParts) {
  for (const int64_t n : {int64_t{-1}, in.N - 1}) {
    padded = n;
    if (padded < 0 && s.c.name == "packed_shared") continue;  // the last request has the slot of the first
    Result apart(*this);
    const Tensor y(s.c.dtype, {in.B, in.T, D});
    convolve(apart, y);
    if (HasFatalFailure()) return;
    kda_decode_args a = decode(apart);
    char* rows = static_cast<char*>(y.view().data);
    for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v}) {
      t->data = rows, t->stride[3] = 1, t->stride[2] = t->shape[3], t->stride[1] = D, t->stride[0] = in.T * D;
      rows += t->shape[2] * t->shape[3] * dtype_size(s.c.dtype);
    }
    run_on_cuda(a, "cuda_decode");
    for (const char* impl : takers("decode", fused(Result(*this)))) {
      SCOPED_TRACE(impl);
      const Result got(*this);
      run_on_cuda(fused(got), impl);
      if (HasFatalFailure()) return;
      expect_same(got, apart);
    }
    for (const int32_t activation : {KDA_NORM_NONE, KDA_NORM_SIGMOID, KDA_NORM_SILU}) {
      const Result got(*this);
      kda_decode_args b = fused(got);
      const kda_norm_gate_args norm_args = norm(apart, activation, 1e-5);
      b.norm = {norm_args.gate, norm_weight, 1e-5, activation, 1};
      run_on_cuda(b, nullptr);
      const std::vector<double> before = apart.o.values();
      run_on_cuda(norm_args, "cuda_norm_gate");
      if (HasFatalFailure()) return;
      expect_same(got, apart);
      for (int64_t i = 0; i < apart.o.size(); ++i) apart.o.set(i, before[i]);
    }
  }
}

// Rows of padding and behind the sequences are zeros, whatever their gates are.
TEST_P(FusedOnCuda, PaddingStaysZero) {
  padded = 0;
  for (const double eps : {1e-5, 0.0}) {
    const Result got(*this);
    for (int64_t i = 0; i < gate.size(); ++i) gate.set(i, std::nan(""));
    kda_decode_args a = fused(got);
    a.norm = {gate, norm_weight, eps, KDA_NORM_SIGMOID, 1};
    run_on_cuda(a, nullptr);
    if (HasFatalFailure()) return;
    const int64_t row = s.c.HV * s.c.V;
    for (int64_t t = 0; t < in.B * in.T; ++t) {
      const bool zero = s.c.lengths.empty() ? t / in.T == 0 : t >= in.T - s.c.tail || t < in.length(0);
      for (int64_t i = 0; zero && i < row; ++i) EXPECT_EQ(got.o.get(t * row + i), 0) << t << " " << i;
    }
    for (int64_t i = 0; i < got.o.size() && eps > 0; ++i)
      if (std::isnan(got.o.get(i))) return;  // NaN reaches what is no padding
    if (in.N > 1) ADD_FAILURE() << "no gate was read";
  }
}

// Without state_indices all requests advance, but for those that skip their first snapshot.
TEST_P(FusedOnCuda, SkippedSnapshotsArePadding) {
  if (in.cu_seqlens) GTEST_SKIP() << "packed requests keep no snapshots";
  for (const bool skips : {false, true}) {
    padded = skips ? 0 : -1;
    Result apart(*this);
    const Result got(*this);
    convolve(apart, Tensor(s.c.dtype, {in.B, in.T, D}));
    const Tensor snapshots(s.c.state_dtype, in.state_shape(in.N * in.T));
    Tensor slots(KDA_I32, {in.N, in.T});
    for (int64_t i = 0; i < slots.size(); ++i) slots.set(i, static_cast<double>(i < in.T && skips ? -1 : i));
    kda_decode_args a = fused(got);
    a.states.state_indices = {}, a.states.h0.shape[0] = a.states.hT.shape[0] = in.N;
    if (skips) a.snapshots = snapshots, a.snapshot_slots = slots;
    run_on_cuda(a, nullptr);
    if (HasFatalFailure()) return;
    EXPECT_EQ(got.state.bits(), apart.state.bits()) << skips;
  }
}

INSTANTIATE_TEST_SUITE_P(All, FusedOnCuda, testing::ValuesIn(fused_cases()),
                         [](const auto& info) { return info.param.c.name; });

using NormBehindOnCuda = OnCuda;

// Runs with a norm, and without one and then kda_norm_gate. make() makes the call, with the same numbers every time.
template <class Make>
void expect_norm_behind(const char* op, const Make& make) {
  auto probe = make();
  for (const char* impl : takers(op, probe.args)) {
    SCOPED_TRACE(impl);
    auto apart = make(), fused = make();
    const kda_tensor& o = fused.args.o;
    Tensor gate(KDA_BF16, {o.shape, o.shape + 4}), weight(KDA_F32, {o.shape[3]});
    Random random(3);
    for (int64_t i = 0; i < gate.size(); ++i) gate.set(i, random.normal());
    for (int64_t i = 0; i < weight.size(); ++i) weight.set(i, random.normal());
    fused.args.norm = {gate, weight, 1e-6, KDA_NORM_SILU, 1};
    run_on_cuda(fused.args, impl);
    run_on_cuda(apart.args, impl);
    kda_norm_gate_args n = KDA_NORM_GATE_ARGS_INIT;
    n.x = n.y = apart.args.o, n.gate = gate, n.weight = weight, n.eps = 1e-6, n.activation = KDA_NORM_SILU;
    run_on_cuda(n, "cuda_norm_gate");
    if (testing::Test::HasFatalFailure()) return;
    EXPECT_EQ(fused.o.bits(), apart.o.bits());
    EXPECT_EQ(fused.o.unwritten(), 0);
  }
}

TEST_F(NormBehindOnCuda, Forward) {
  Case c = find_case("packed");
  for (const auto& [K, V, dtype] : {std::tuple{int64_t{16}, int64_t{24}, KDA_F32}, {128, 128, KDA_BF16}}) {
    c.K = K, c.V = V, c.dtype = dtype;
    c.lengths = {1, 40, 0, 70}, c.tail = 2, c.qk_l2norm = true;
    struct Call {
      Inputs in;
      Tensor o;
      kda_forward_args args = KDA_FORWARD_ARGS_INIT;
      explicit Call(const Case& c) : in(c), o(c.dtype, {in.B, in.T, c.HV, c.V}) { args.in = in.view(), args.o = o; }
    };
    expect_norm_behind("forward", [&] { return Call(c); });
  }
}

TEST_F(NormBehindOnCuda, Verify) {
  for (const char* name : {"packed", "padded_1", "tree"}) {
    struct Call {
      Drafts d;
      Records records;
      Tensor o;
      kda_verify_args args;
      explicit Call(const SpeculationCase& s) : d(s), records(d), o(d.output()), args(verify_args(d, records, o)) {}
    };
    expect_norm_behind("verify", [&] { return Call(find_speculation_case(name)); });
  }
}

TEST_F(NormBehindOnCuda, FlushVerify) {
  for (const char* name : {"drafts_4", "ring"}) {
    struct Call {
      Drafts d;
      Records last, records;
      Tensor o;
      kda_flush_verify_args args;
      explicit Call(const SpeculationCase& s)
          : d(s),
            last(d),
            records(d),
            o(d.output()),
            args(flush_verify_args(d, d, d.pool.h, last, s.ring ? last : records, o)) {
        last.u.fill(0.5), last.k.fill(0.5), last.alpha.fill(0.5);
      }
    };
    expect_norm_behind("flush_verify", [&] { return Call(find_speculation_case(name)); });
  }
}

}  // namespace
}  // namespace kda::test
