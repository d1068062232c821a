// The contract of kda_forward in chunks on the GPU, for every implementation that takes the sizes of tensor cores: what
// tests/cpp has for the CPU in test_edges, test_promises and test_contract_ops. Numbers are in test_forward_chunk.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

// K = V = 128 or 64.
class ForwardContract : public OnCuda, public testing::WithParamInterface<int64_t> {
 protected:
  static Case sized(Case c) {
    c.K = c.V = GetParam(), c.dtype = KDA_BF16;
    return c;
  }
  static std::vector<std::string> impls(const kda_forward_args& args) {
    std::vector<std::string> all;
    for (const char* name : takers("forward", args))
      if (std::string(name) != "cuda_prefill_recurrent") all.emplace_back(name);
    return all;
  }
  static kda_forward_args args_of(const Inputs& in, const Tensor& h0, const Tensor& hT, const Tensor& o) {
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = in.view(), a.states.h0 = h0, a.states.hT = hT, a.o = o;
    return a;
  }
  static kda_forward_args args_of(const Inputs& in, const Pool& from, const Pool& to, const Tensor& o) {
    const kda_decode_args decode = decode_args(in, from, to, o);
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = decode.in, a.states = decode.states, a.o = o;
    return a;
  }
  static Tensor output(const Inputs& in) { return Tensor(in.c.dtype, {in.B, in.T, in.c.HV, in.c.V}); }
  static Tensor output_of(const Inputs& in, const std::string& impl) {
    const Tensor o = output(in), hT(KDA_F32, in.state_shape(in.N));
    run_on_cuda(args_of(in, in.h0, hT, o), impl.c_str());
    return o.clone();
  }
  static Tensor& input(Inputs& in, const std::string& name) {
    for (const auto& [n, t] : in.tensors())
      if (name == n) return *t;
    ADD_FAILURE() << name;
    return in.q;
  }
  static Case packed() { return sized({.name = "packed", .HV = 2, .lengths = {65, 3, 40}}); }
};

// ---- nothing to do, and rows and slots of no sequence ----

TEST_P(ForwardContract, WithoutTokensStatesStay) {
  const Inputs in(sized({.name = "empty", .HV = 2, .lengths = {0, 0, 0}, .tail = 35}));
  const ForwardOutputs out(in, false);
  for (const std::string& impl : impls(forward_args(in, out))) {
    SCOPED_TRACE(impl);
    const ForwardOutputs got(in, false);
    run_on_cuda(forward_args(in, got), impl.c_str());
    EXPECT_TRUE(got.o.bits().all(0)) << "tokens of no sequence";
    EXPECT_EQ(got.hT.bits(), in.h0.bits());
  }
}

TEST_P(ForwardContract, SlotsBelowTheFirstValidOneArePadding) {
  const Inputs in(sized({.name = "padding", .HV = 2, .lengths = {3, 17, 2, 65, 1}}));
  for (const int32_t first : {0, 1})
    for (const bool in_place : {false, true}) {
      Pool h0(in, KDA_F32, 4);
      const std::vector<double> indices =
          first == 0 ? std::vector<double>{-1, 5, -7, -2147483648.0, 2} : std::vector<double>{0, 5, 0, -3, 2};
      for (int n = 0; n < 5; ++n) h0.state_indices.set(n, indices[n]);
      h0.h.fill(0.25);
      const Tensor before = h0.h.clone();
      kda_forward_args question = args_of(in, h0, h0, output(in));
      for (const std::string& impl : impls(question)) {
        SCOPED_TRACE(impl);
        Pool from(in, KDA_F32, 4), to(in, KDA_F32, 4);
        from.state_indices = h0.state_indices.clone(), from.h = before.clone(), to.h = before.clone();
        const Pool& target = in_place ? from : to;
        const Tensor o = output(in);
        kda_forward_args a = args_of(in, from, target, o);
        a.states.first_valid_slot = first;
        run_on_cuda(a, impl.c_str());
        for (const auto& [t0, length] : {std::pair{0, 3}, {20, 2}, {22, 65}})
          EXPECT_TRUE(o.bits(1, t0, length).all(0)) << "token " << t0;
        EXPECT_EQ(o.unwritten(), 0);
        for (const int64_t slot : {0, 1, 3, 4, 6, 7, 8})
          EXPECT_EQ(target.h.bits(0, slot, 1), before.bits(0, slot, 1)) << "slot " << slot;
        for (const int64_t slot : {2, 5}) EXPECT_NE(target.h.bits(0, slot, 1), before.bits(0, slot, 1)) << slot;
      }
    }
}

// Slots of a pool: one that another request left NaN in, where has_initial_state is 0, and ones that nobody uses.
TEST_P(ForwardContract, OldStatesDoNotMatter) {
  const Inputs in(packed());
  const int64_t slot = in.c.HV * in.c.K * in.c.V;
  Pool question(in, KDA_F32);
  for (const std::string& impl : impls(args_of(in, question, question, output(in)))) {
    SCOPED_TRACE(impl);
    Pool clean(in, KDA_F32), dirty(in, KDA_F32);
    for (int64_t i = 0; i < slot; ++i) {
      clean.h.set(clean.slots[1] * slot + i, 0);
      dirty.h.set(dirty.slots[1] * slot + i, i % 2 ? std::nan("") : HUGE_VAL);
    }
    for (int64_t i = 0; i < 3 * slot; ++i) clean.h.set(i, 0);  // spare slots are poison, or not
    const Bits spare = dirty.h.bits(0, 0, 3);
    clean.has_initial_state.set(1, 0), dirty.has_initial_state.set(1, 0);
    const Tensor a = output(in), b = output(in);
    run_on_cuda(args_of(in, clean, clean, a), impl.c_str());
    run_on_cuda(args_of(in, dirty, dirty, b), impl.c_str());
    EXPECT_EQ(a.bits(), b.bits());
    EXPECT_EQ(dirty.rows(in).bits(), clean.rows(in).bits());
    EXPECT_EQ(dirty.h.bits(0, 0, 3), spare);
    EXPECT_TRUE(clean.h.bits(0, 0, 3).all(0));
  }
}

TEST_P(ForwardContract, InPlaceEqualsOutOfPlace) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
    Case c = packed();
    c.state_dtype = dtype, c.state_layout = dtype == KDA_F32 ? KDA_STATE_K_FIRST : KDA_STATE_V_FIRST;
    const Inputs in(c);
    Pool question(in, dtype);
    for (const std::string& impl : impls(args_of(in, question, question, output(in)))) {
      SCOPED_TRACE(impl);
      Pool h0(in, dtype), hT(in, dtype), both(in, dtype);
      hT.h.poison();
      const Bits before = h0.h.bits();
      const Tensor apart = output(in), in_place = output(in);
      run_on_cuda(args_of(in, h0, hT, apart), impl.c_str());
      run_on_cuda(args_of(in, both, both, in_place), impl.c_str());
      EXPECT_EQ(in_place.bits(), apart.bits());
      EXPECT_EQ(both.rows(in).bits(), hT.rows(in).bits());
      EXPECT_EQ(h0.h.bits(), before);
    }
  }
}

// ---- inputs that mean the same ----

TEST_P(ForwardContract, NoInitialStateIsZeros) {
  Inputs in(sized({.name = "zeros", .T = 67, .HV = 2}));
  for (const std::string& impl : impls(args_of(in, in.h0, {}, output(in)))) {
    SCOPED_TRACE(impl);
    Inputs zeros(in.c), none(in.c);
    zeros.h0.fill(0), none.h0 = Tensor();
    const Bits of_zeros = output_of(zeros, impl).bits();
    EXPECT_EQ(output_of(none, impl).bits(), of_zeros);
    EXPECT_NE(output_of(in, impl).bits(), of_zeros);
  }
}

TEST_P(ForwardContract, SharedHeadsEqualRepeatedHeads) {
  Case c = sized({.name = "shared", .B = 2, .T = 67, .H = 2, .HV = 4, .qk_l2norm = true});
  const Inputs shared(c);
  c.H = 4;
  Inputs repeated(c);
  for (const auto& [to, from] : {std::pair{&repeated.q, &shared.q}, {&repeated.k, &shared.k}})
    for (int64_t i = 0; i < to->size(); ++i) {
      const int64_t token = i / (4 * c.K), head = i / c.K % 4;
      to->set(i, from->get((token * 2 + head / 2) * c.K + i % c.K));
    }
  repeated.v = shared.v.clone(), repeated.g = shared.g.clone(), repeated.beta = shared.beta.clone();
  repeated.h0 = shared.h0.clone();
  for (const std::string& impl : impls(args_of(shared, shared.h0, {}, output(shared))))
    EXPECT_EQ(output_of(repeated, impl).bits(), output_of(shared, impl).bits()) << impl;
}

// One query row, gate and beta for all tokens, by stride 0.
TEST_P(ForwardContract, StridesOfZeroBroadcast) {
  Inputs in(sized({.name = "broadcast", .T = 70, .H = 2, .HV = 2}));
  for (Tensor* t : {&in.q, &in.g, &in.beta}) {
    const int64_t row = t->size() / in.T;
    for (int64_t i = row; i < t->size(); ++i) t->set(i, t->get(i % row));
  }
  for (const std::string& impl : impls(args_of(in, in.h0, {}, output(in)))) {
    const Tensor o = output(in), hT(KDA_F32, in.state_shape(in.N));
    kda_forward_args a = args_of(in, in.h0, hT, o);
    for (kda_tensor* t : {&a.in.q, &a.in.g, &a.in.beta}) t->stride[1] = 0;
    run_on_cuda(a, impl.c_str());
    EXPECT_EQ(o.bits(), output_of(in, impl).bits()) << impl;
  }
}

// ---- numbers that are not finite ----

// Everything that the call can give: a number in one sequence or head changes nothing in another.
TEST_P(ForwardContract, NaNReachesNoOtherSequence) {
  const Inputs clean(packed());
  for (const std::string& impl : impls(args_of(clean, clean.h0, {}, output(clean)))) {
    const Tensor expected = output_of(clean, impl);
    for (const double bad : {std::nan(""), HUGE_VAL})
      for (const char* victim : {"q", "k", "v", "g", "beta", "h0"}) {
        SCOPED_TRACE(testing::Message() << impl << ", " << bad << " in " << victim);
        Inputs in(packed());
        Tensor& t = input(in, victim);
        const int64_t row = t.size() / (victim == std::string("h0") ? in.N : in.T);
        t.set((victim == std::string("h0") ? 1 : in.begin(1)) * row + row / 2, victim == std::string("g") ? -bad : bad);
        const Tensor got = output_of(in, impl);
        for (const int64_t n : {0, 2})
          EXPECT_EQ(got.bits(1, in.begin(n), in.length(n)), expected.bits(1, in.begin(n), in.length(n))) << n;
        EXPECT_NE(got.bits(1, in.begin(1), 3), expected.bits(1, in.begin(1), 3)) << "where it is";
      }
  }
}
TEST_P(ForwardContract, NaNReachesNoOtherHead) {
  const Case c = sized({.name = "nan_head", .T = 70, .H = 2, .HV = 4});
  const Inputs clean(c);
  for (const std::string& impl : impls(args_of(clean, clean.h0, {}, output(clean)))) {
    const Tensor expected = output_of(clean, impl);
    for (const char* victim : {"v", "g", "beta", "h0"}) {
      SCOPED_TRACE(impl + " " + victim);
      Inputs in(c);
      Tensor& t = input(in, victim);
      const bool state = victim == std::string("h0");
      const int64_t row = t.size() / (state ? 1 : in.T), head = row / c.HV;
      t.set((state ? 0 : 33) * row + 3 * head + head / 2, std::nan(""));  // head 3 has the queries of head 2
      const Tensor got = output_of(in, impl);
      for (const int64_t hv : {0, 1, 2}) EXPECT_EQ(got.bits(2, hv, 1), expected.bits(2, hv, 1)) << hv;
      EXPECT_NE(got.bits(2, 3, 1), expected.bits(2, 3, 1));
    }
  }
}

// U is NaN, too, from the token on whose inputs are not finite. (Hopper's kernels give 0 there: numerics.md.)
TEST_P(ForwardContract, CorrectionsAreNaNFromThereOn) {
  const Case c = sized({.name = "corrections", .T = 170});  // more chunks than the ring has stages
  const Inputs clean(c);
  const auto corrections = [&](const Inputs& in, int32_t dtype, const std::string& impl) {
    ForwardOutputs out(in, false);
    out.v_new = Tensor(dtype, {1, in.T, 1, c.V});
    run_on_cuda(forward_args(in, out), impl.c_str());
    return out.v_new.clone();
  };
  for (const std::string& impl : impls(args_of(clean, clean.h0, {}, output(clean)))) {
    if (impl.find("hopper") != std::string::npos) continue;
    for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
      const Tensor expected = corrections(clean, dtype, impl);
      for (const char* victim : {"k", "v", "beta"})
        for (const int64_t t : {0, 45, 169}) {
          if (dtype == KDA_BF16 && victim != std::string("beta")) continue;
          SCOPED_TRACE(testing::Message() << impl << ", " << victim << " of token " << t << " " << dtype);
          Inputs in(c);
          Tensor& x = input(in, victim);
          const int64_t row = x.size() / in.T, column = victim == std::string("v") ? 5 : 0;
          x.set(t * row + column, std::nan(""));
          const Tensor got = corrections(in, dtype, impl);
          const auto wrong = [&](int64_t from, int64_t end, bool nan) {
            int64_t count = 0;
            for (int64_t i = from; i < end; ++i) {
              const double a = got.get(i * c.V + column), b = expected.get(i * c.V + column);
              count += nan ? !std::isnan(a) : !(std::abs(a - b) <= 0.02 * std::max(1.0, std::abs(b)));
            }
            return count;
          };
          EXPECT_EQ(wrong(0, t, false), 0) << "before";
          EXPECT_EQ(wrong(t, in.T, true), 0);
        }
    }
  }
}

// ---- what kernels of pairs decline: each says why ----

TEST_P(ForwardContract, RefusalsSayWhy) {
  const Case c = sized({.name = "refused", .T = 70, .HV = 2});
  const Inputs in(c);
  const ForwardOutputs out(in, true);
  ForwardOutputs plain(in, false);
  const std::vector<std::string> all = impls(forward_args(in, plain));
  const auto pairs = std::find_if(all.begin(), all.end(), [](const std::string& name) {
    return name == "cuda_blackwell_prefill" || name == "cuda_hopper_prefill_pairs";
  });
  if (pairs == all.end()) GTEST_SKIP() << "the device has no kernel of pairs";
  const auto refused = [&](const char* why, auto&& change, const Inputs& inputs, const ForwardOutputs& outputs) {
    kda_forward_args a = on_device(forward_args(inputs, outputs));
    change(a);
    a.exec.impl = pairs->c_str();
    uint64_t bytes;
    EXPECT_EQ(query(a, &bytes), KDA_UNSUPPORTED) << why;
    EXPECT_EQ(std::string(kda_last_error()), *pairs + " was forced but " + why);
  };
  refused(
      "saves no Aqk and Akk", [](kda_forward_args&) {}, in, out);
  refused(
      "takes bf16 and f16 for q, k and v",
      [](kda_forward_args& a) {
        for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v}) t->dtype = KDA_F32;
      },
      in, plain);
  refused(
      "writes o in the dtype of q", [](kda_forward_args& a) { a.o.dtype = KDA_F32; }, in, plain);
  refused(
      "takes g in f32 or the dtype of q", [](kda_forward_args& a) { a.in.g.dtype = KDA_F16; }, in, plain);
  refused(
      "needs rows at multiples of 16 bytes",
      [](kda_forward_args& a) { a.in.k.data = static_cast<char*>(a.in.k.data) + 2; }, in, plain);
  Case small = c;
  small.K = 32;
  const Inputs of_32(small);
  refused(
      "takes K and V of 64 or 128", [](kda_forward_args&) {}, of_32, ForwardOutputs(of_32, false));
}

INSTANTIATE_TEST_SUITE_P(All, ForwardContract, testing::Values(128, 64),
                         [](const auto& info) { return "K" + std::to_string(info.param); });

}  // namespace
}  // namespace kda::test
