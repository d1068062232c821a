// Numbers that live on the device, where they are not checked: lengths, parents, cursors, offsets and indices of any
// value. Each means what docs/contract.md says, and none leads outside a tensor: compute-sanitizer runs these as
// well.
#include <algorithm>
#include <cstring>
#include <limits>

#include "contract/problem.h"
#include "on_cuda.h"
#include "speculation_calls.h"

namespace kda::test {
namespace {

constexpr int kRounds = 4;

void spoil(Tensor& t, Random& random) {
  for (int64_t i = 0; t && i < t.size(); ++i) t.set(i, anything(random));
}
// Moves some of the indices below all slots, or beyond them.
void spoil_indices(Tensor& t, int64_t slots, Random& random) {
  const double nowhere[] = {-1, -7, kLeast, static_cast<double>(slots), slots + 1.0, slots + 1000.0, kMost};
  for (int64_t i = 0; t && i < t.size(); ++i)
    if (random.chance(0.4)) t.set(i, nowhere[random.below(std::size(nowhere))]);
}
// Makes offsets that never fall, of sequences of any length.
void spoil_offsets(Tensor& t, int64_t T, Random& random) {
  std::vector<double> offsets;
  for (int64_t i = 0; i < t.size(); ++i) offsets.push_back(static_cast<double>(random.below(2 * T) - T / 2));
  std::sort(offsets.begin(), offsets.end());
  offsets.front() = random.chance(0.5) ? kLeast : 0;
  for (int64_t i = 0; i < t.size(); ++i) t.set(i, std::max(offsets[i], offsets.front()));
}

// The same call as the host may check it: no index beyond the slots, no offset beyond the tokens.
template <class Args>
Args meant(Args args, std::vector<Tensor>& kept) {
  const std::vector<Field> all = fields(args);
  const auto size = [&](const char* name, int dim) {
    for (const Field& f : all)
      if (!std::strcmp(f.name, name)) return f.t->shape[dim];
    return int64_t{0};
  };
  const auto cleaned = [&](kda_tensor& t, auto&& clean) {
    Tensor copy(t.dtype, {t.shape, t.shape + t.ndim});
    for (int64_t i = 0; i < t.shape[0]; ++i) copy.set(i, static_cast<double>(clean(int_at(t, i))));
    t = kept.emplace_back(std::move(copy));
  };
  for (const Field& f : all) {
    const std::string name = f.name;
    const char* of = name == "records.indices" ? "records.u" : name == "last.indices" ? "last.u" : nullptr;
    if (name == "state_indices") of = size("h0", 0) ? "h0" : "state";
    if (f.t->ndim && of)
      cleaned(*f.t, [slots = size(of, 0)](int64_t i) { return i < slots ? std::max<int64_t>(i, -1) : -1; });
    if (f.t->ndim && name == "cu_seqlens") cleaned(*f.t, [T = size("v", 1)](int64_t i) { return within(i, 0, T); });
  }
  return args;
}

class GarbageOnCuda : public OnCuda, public testing::WithParamInterface<SpeculationCase> {
 protected:
  struct World {
    Drafts d, next;
    Records last, records;
    Tensor indices;  // of states
    World(const SpeculationCase& s, Random& random)
        : d(s), next(s, 1), last(filled(d)), records(s.ring ? last.clone() : Records(next)) {
      for (Tensor* t : {&d.accept_len, &d.parents, &next.parents, &last.ring_first, &last.ring_count})
        spoil(*t, random);
      for (Records* r : {&last, &records}) spoil_indices(r->indices, r->u.shape()[0], random);
      for (Drafts* x : {&d, &next}) spoil_indices(x->pool.state_indices, x->pool.h.shape()[0], random);
      if (d.in.cu_seqlens) spoil_offsets(d.in.cu_seqlens, d.in.T, random), next.in.cu_seqlens = d.in.cu_seqlens.clone();
      if (s.ring) records = last.clone();
    }
  };
  // args(world, pool, records, o): the call, of the oracle's tensors or the kernels' own.
  template <class F>
  void expect_meant(const char* op, uint64_t seed, const F& args) {
    const SpeculationCase& s = GetParam();
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      SCOPED_TRACE(round);
      Random random(seed + round);
      World x(s, random);
      std::vector<Tensor> kept;
      const Tensor exact = x.d.pool.h.clone(), exact_o = x.d.output(KDA_F64);
      Records exact_records = x.records.clone();
      run(meant(args(x, exact, exact_records, exact_o), kept), {.impl = "reference"});
      for (const char* impl : takers(op, args(x, exact, exact_records, x.d.output()))) {
        SCOPED_TRACE(impl);
        const Tensor pool = x.d.pool.h.clone(), o = x.d.output();
        Records records = x.records.clone();
        run_on_cuda(args(x, pool, records, o), impl);
        if (HasFatalFailure()) return;
        const std::string name = impl;
        const bool chunked =
            name == "cuda_prefill_chunk" || name == "cuda_hopper_prefill_pairs" || name == "cuda_blackwell_prefill";
        const double least = chunked ? 0.002 : 0;  // operands of 11 bits
        expect_close(exact_o, o, "o", least);
        expect_close(exact, pool, "state", least);
        expect_close(exact_records, records);
        EXPECT_EQ(records.ring_first.bits(), exact_records.ring_first.bits());
        EXPECT_EQ(records.ring_count.bits(), exact_records.ring_count.bits());
      }
    }
  }
};

TEST_P(GarbageOnCuda, Decode) {
  expect_meant("decode", 100, [](World& x, const Tensor& pool, Records&, const Tensor& o) {
    kda_decode_args a = decode_args(x.d.in, x.d.pool, x.d.pool, o);
    a.states.h0 = a.states.hT = pool;
    return a;
  });
}
TEST_P(GarbageOnCuda, Forward) {
  expect_meant("forward", 500, [](World& x, const Tensor& pool, Records&, const Tensor& o) {
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = x.d.in.view(), a.o = o;
    a.states.h0 = a.states.hT = pool, a.states.state_indices = x.d.pool.state_indices;
    return a;
  });
}
TEST_P(GarbageOnCuda, Verify) {
  expect_meant("verify", 200, [](World& x, const Tensor& pool, Records& records, const Tensor& o) {
    return verify_args(x.d, pool, &records, o);
  });
}
TEST_P(GarbageOnCuda, Flush) {
  expect_meant("flush", 300,
               [](World& x, const Tensor& pool, Records&, const Tensor&) { return flush_args(x.d, pool, x.last); });
}
TEST_P(GarbageOnCuda, FlushVerify) {
  if (GetParam().ring && GetParam().tree) GTEST_SKIP() << "drafts on a ring are a chain";
  expect_meant("flush_verify", 400, [](World& x, const Tensor& pool, Records& records, const Tensor& o) {
    return flush_verify_args(x.d, x.next, pool, x.last, records, o);
  });
}

std::vector<SpeculationCase> garbage_cases() {
  const SpeculationCase some = {.c = {.name = "some", .B = 6, .T = 5, .HV = 2, .K = 17, .V = 5}, .R = 9};
  std::vector<SpeculationCase> all;
  for (const bool staged : {false, true}) {
    const auto add = [&](const char* name, auto&& change) {
      SpeculationCase s = some;
      if (staged) s.c.K = s.c.V = 64;
      change(s);
      s.c.name = (staged ? "staged_" : "") + std::string(name);
      all.push_back(s);
    };
    add("chain", [](SpeculationCase&) {});
    add("tree", [](SpeculationCase& s) { s.tree = true; });
    add("ring", [](SpeculationCase& s) { s.ring = true, s.R = 23; });
    add("ring_tree", [](SpeculationCase& s) { s.ring = s.tree = true, s.R = 23; });
    add("packed", [](SpeculationCase& s) { s.c.lengths = {4, 0, 3, 1, 2}, s.c.tail = 3, s.R = 16; });
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, GarbageOnCuda, testing::ValuesIn(garbage_cases()),
                         [](const auto& info) { return info.param.c.name; });

// ---- lengths that the host would refuse: there are no more records, parents and slots than these ----

TEST_F(OnCuda, GarbageLengthsLeadNowhere) {
  Random random(500);
  for (const int64_t size : {17, 64})
    for (const bool ring : {false, true})
      for (int round = 0; round < kRounds && !HasFailure(); ++round) {
        SCOPED_TRACE(testing::Message() << size << (ring ? " ring " : " tree ") << round);
        const Case c = {.name = "lengths", .HV = 2, .K = size, .V = size, .lengths = {4, 0, 3, 1, 2}, .tail = 90};
        Drafts d({.c = c, .R = ring ? 10 : 4, .ring = ring, .tree = !ring});
        Records last = filled(d);
        for (Tensor* t : {&d.in.cu_seqlens, &d.accept_len, &d.parents, &last.ring_first, &last.ring_count})
          spoil(*t, random);
        for (Tensor* t : {&d.pool.state_indices, &last.indices}) spoil_indices(*t, t->size() + 3, random);
        Records records = last.clone();
        const Tensor o = d.output(), pool = d.pool.h.clone(), shots(KDA_F32, d.in.state_shape(6));
        Tensor slots(KDA_I32, {d.in.N, 4}), accepted(KDA_I32, {d.in.N});
        spoil(slots, random), spoil(accepted, random);
        kda_decode_args kept = decode_args(d.in, d.pool, d.pool, o);
        kept.states.h0 = pool, kept.states.hT = {}, kept.states.has_initial_state = {};
        kept.snapshots = shots, kept.snapshot_slots = slots, kept.accepted = accepted;
        const auto everywhere = [](const char* op, const auto& args) {
          for (const char* impl : takers(op, args)) run_on_cuda(args, impl);
        };
        everywhere("decode", kept);
        const Tensor h(KDA_F32, d.in.state_shape(3)), v_new(KDA_F32, d.output().shape());
        kda_forward_args prompt = KDA_FORWARD_ARGS_INIT;
        prompt.in = kept.in, prompt.states = kept.states, prompt.states.hT = pool, prompt.o = o;
        prompt.h = h, prompt.v_new = v_new, prompt.checkpoint_every = 64;
        prompt.checkpoints = shots, prompt.checkpoint_slots = slots;
        everywhere("forward", prompt);
        EXPECT_TRUE(h.margins_intact() && v_new.margins_intact());
        everywhere("verify", verify_args(d, pool, &last, o));
        everywhere("flush", flush_args(d, pool, last));
        kda_flush_verify_args both = flush_verify_args(d, d, pool, last, records, o);
        both.max_tokens = ring ? 4 : 0;
        everywhere("flush_verify", both);
        EXPECT_TRUE(o.margins_intact() && pool.margins_intact() && shots.margins_intact());
        for (Records* r : {&last, &records})
          for (const Named& t : r->all()) EXPECT_TRUE(t.tensor->margins_intact()) << t.name;
      }
}

// ---- forward in chunks of 16-bit inputs, as Hopper's and Blackwell's kernels take them ----

Case of_chunks(int64_t size) {
  return {.name = "chunks",
          .H = 2,
          .HV = 2,
          .K = size,
          .V = size,
          .lengths = {70, 0, 33, 2},
          .tail = 40,
          .dtype = KDA_BF16,
          .gate_divisor = 10};
}
kda_forward_args prompt_args(const Inputs& in, const Tensor& pool, const Tensor& indices, const Tensor& o) {
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = in.view(), a.states.h0 = a.states.hT = pool, a.states.state_indices = indices, a.o = o;
  return a;
}

TEST_F(OnCuda, GarbageOffsetsOfForward) {
  Random random(800);
  for (const int64_t size : {64, 128})
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      Inputs in(of_chunks(size));
      Pool pool(in, KDA_F32);
      spoil_offsets(in.cu_seqlens, in.T, random), spoil_indices(pool.state_indices, pool.h.shape()[0], random);
      const std::vector<int64_t> shape = {1, in.T, 2, size};
      const Tensor exact = pool.h.clone(), exact_o(KDA_F64, shape), probe(KDA_BF16, shape);
      std::vector<Tensor> kept;
      run(meant(prompt_args(in, exact, pool.state_indices, exact_o), kept), {.impl = "reference"});
      for (const char* impl : takers("forward", prompt_args(in, pool.h, pool.state_indices, probe))) {
        SCOPED_TRACE(testing::Message() << impl << ", " << size << ", " << round);
        const Tensor got = pool.h.clone(), o(KDA_BF16, shape);
        run_on_cuda(prompt_args(in, got, pool.state_indices, o), impl);
        if (HasFatalFailure()) return;
        expect_close(exact_o, o, "o", 0.005);
        expect_close(exact, got, "state", 0.005);
      }
    }
}

// Offsets of any value, checkpoints in any slots: there are no more rows of h, and no more slots, than these.
TEST_F(OnCuda, GarbageLengthsOfForward) {
  Random random(900);
  for (const int64_t size : {64, 128})
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      Inputs in(of_chunks(size));
      Pool pool(in, KDA_F32);
      Tensor slots(KDA_I32, {in.N, 2}), offset(KDA_I32, {in.N});
      const Tensor o(KDA_BF16, {1, in.T, 2, size}), h(KDA_F32, in.state_shape(3)), v_new(KDA_F32, {1, in.T, 2, size}),
          shots(KDA_F32, in.state_shape(4));
      for (Tensor* t : {&in.cu_seqlens, &slots, &offset}) spoil(*t, random);
      spoil_indices(pool.state_indices, pool.h.shape()[0] + 3, random);
      kda_forward_args a = prompt_args(in, pool.h, pool.state_indices, o);
      a.h = h, a.v_new = v_new, a.checkpoints = shots, a.checkpoint_slots = slots, a.checkpoint_every = 64;
      if (round % 2) a.h = a.v_new = {}, a.checkpoint_offset = offset;
      for (const char* impl : takers("forward", a)) {
        SCOPED_TRACE(testing::Message() << impl << ", " << size << ", " << round);
        run_on_cuda(a, impl);
        if (HasFatalFailure()) return;
        for (const Tensor* t : std::initializer_list<const Tensor*>{&o, &pool.h, &h, &v_new, &shots})
          EXPECT_TRUE(t->margins_intact());
      }
    }
}

// ---- training ----

constexpr double kOfTraining = 0.02;  // relative: the tests show which tokens were meant

TEST_F(OnCuda, GarbageOffsetsOfBackward) {
  Random random(600);
  for (const int64_t size : {17, 64})
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      SCOPED_TRACE(testing::Message() << size << " " << round);
      Inputs in({.name = "offsets",
                 .HV = 8,
                 .K = size,
                 .V = size,
                 .lengths = {70, 0, 33, 2},
                 .tail = 40,
                 .dtype = KDA_BF16,
                 .gate_divisor = 10});
      spoil_offsets(in.cu_seqlens, in.T, random);
      BackwardOutputs exact(in, true);
      std::vector<Tensor> kept;
      run(meant(backward_args(in, exact), kept), {.impl = "reference"});
      for (const char* impl : takers("backward", backward_args(in, BackwardOutputs(in)))) {
        SCOPED_TRACE(impl);
        BackwardOutputs got(in);
        run_on_cuda(backward_args(in, got), impl);
        if (HasFatalFailure()) return;
        for (size_t i = 0; i < got.tensors().size(); ++i)
          if (const Tensor& t = *got.tensors()[i].tensor)
            expect_close(*exact.tensors()[i].tensor, t, got.tensors()[i].name, kOfTraining);
      }
    }
}

// Lengths that the host would refuse: there are no more rows of h than these.
TEST_F(OnCuda, GarbageLengthsOfBackward) {
  Random random(700);
  for (const int64_t size : {17, 64})
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      SCOPED_TRACE(testing::Message() << size << " " << round);
      Inputs in(
          {.name = "lengths", .HV = 2, .K = size, .V = size, .lengths = {70, 0, 33, 2}, .tail = 90, .dtype = KDA_BF16});
      ForwardOutputs saved(in, false);
      saved.h = Tensor(KDA_BF16, in.state_shape(in.h_rows(1))), saved.h_every = 1;
      saved.v_new = Tensor(KDA_BF16, {in.B, in.T, in.c.HV, in.c.V});
      for (int64_t i = 0; i < saved.h.size(); ++i) saved.h.set(i, 1);
      for (int64_t i = 0; i < saved.v_new.size(); ++i) saved.v_new.set(i, 1);
      spoil(in.cu_seqlens, random);
      BackwardOutputs got(in);
      for (const char* impl : takers("backward", backward_args(in, got))) run_on_cuda(backward_args(in, got), impl);
      if (size == 64) run_on_cuda(backward_args(in, got, &saved), "cuda_backward_chunk");
      for (const Named& t : got.tensors()) EXPECT_TRUE(t.tensor->margins_intact()) << t.name;
    }
}

// Requests have up to ten tokens by their offsets, but parents, or slots of snapshots, for four: the other tokens are
// left out, and the rows of other requests are not taken for theirs.
TEST_F(OnCuda, GarbageLengthsStayInTheirRow) {
  for (const int64_t size : {17, 64}) {
    Drafts d({.c = {.name = "row", .K = size, .V = size, .lengths = {4, 2, 4}}, .R = 16, .tree = true});
    for (int64_t n = 1; n <= d.in.N; ++n) d.in.cu_seqlens.set(n, 10);
    for (const char* impl : takers("verify", verify_args(d, Records(d), d.output()))) {
      const Tensor o = d.output();
      const Records records(d);
      run_on_cuda(verify_args(d, records, o), impl);
      EXPECT_EQ(o.unwritten(), 6 * size) << impl;
    }
    const Tensor o = d.output(), shots(KDA_F32, d.in.state_shape(8));
    Tensor slots(KDA_I32, {d.in.N, 4});
    for (int64_t i = 0; i < slots.size(); ++i) slots.set(i, i < 4 ? -1 : static_cast<double>(i - 4));
    kda_decode_args a = decode_args(d.in, d.pool, d.pool, o);
    a.snapshots = shots, a.snapshot_slots = slots;
    run_on_cuda(a, "cuda_decode");
    EXPECT_TRUE(shots.untouched());
  }
}

TEST_F(OnCuda, ADeviceThatIsNotThere) {
  const Drafts d(find_speculation_case("drafts_4"));
  const Tensor o = d.output();
  kda_decode_args a = decode_args(d.in, d.pool, d.pool, o);
  a.exec.device = KDA_CUDA, a.exec.device_id = 1000;
  EXPECT_EQ(kda_decode(&a), KDA_UNSUPPORTED);
  EXPECT_NE(std::string(kda_last_error()).find("cuda_decode: found fewer CUDA devices than"), std::string::npos)
      << kda_last_error();
  EXPECT_TRUE(o.untouched());
}

}  // namespace
}  // namespace kda::test
