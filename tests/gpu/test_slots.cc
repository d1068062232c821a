// Slots to read and slots to write, indices of either width, and checkpoints within chunks, on the GPU through the C
// ABI, against the float64 oracle on the CPU.
#include "on_cuda.h"
#include "slot_calls.h"

namespace kda::test {
namespace {

class SlotsOnCuda : public OnCuda, public testing::WithParamInterface<SlotCase> {
 protected:
  SlotsOnCuda() : s(GetParam()), in(s.c) {}
  void expect_same(const Shared& exact, const Shared& got, const char* impl) const {
    const double least = s.c.dtype == KDA_F32 ? 0 : 0.004;
    SCOPED_TRACE(impl);
    expect_close(exact.o, got.o, "o", least);
    expect_close(exact.pool.h, got.pool.h, "pool", least);
    expect_close(exact.checkpoints, got.checkpoints, "checkpoints", least);
  }
  const SlotCase s;
  const Inputs in;
};

TEST_P(SlotsOnCuda, Forward) {
  for (const auto& [every, offset] : kCheckpointForms) {
    const Shared exact(s, in, true), sizes(s, in, false);
    run(slot_forward_args(in, exact, every, offset), {.impl = "reference"});
    for (const char* impl : takers("forward", slot_forward_args(in, sizes, every, offset))) {
      const Shared got(s, in, false);
      run_on_cuda(slot_forward_args(in, got, every, offset), impl);
      if (HasFatalFailure()) return;
      expect_same(exact, got, impl);
    }
  }
}

TEST_P(SlotsOnCuda, Decode) {
  const Shared exact(s, in, true), sizes(s, in, false);
  run(slot_decode_args(in, exact), {.impl = "reference"});
  for (const char* impl : takers("decode", slot_decode_args(in, sizes))) {
    const Shared got(s, in, false);
    run_on_cuda(slot_decode_args(in, got), impl);
    if (HasFatalFailure()) return;
    expect_same(exact, got, impl);
  }
}

// A pool that is only read: nothing but o is written.
TEST_P(SlotsOnCuda, OnlyRead) {
  const auto args = [&](const Shared& x) {
    kda_forward_args a = slot_forward_args(in, x);
    a.states.hT = {}, a.out_state_indices = {};
    return a;
  };
  const Shared exact(s, in, true), sizes(s, in, false);
  run(args(exact), {.impl = "reference"});
  for (const char* impl : takers("forward", args(sizes))) {
    const Shared got(s, in, false);
    const Bits before = got.pool.h.bits();
    run_on_cuda(args(got), impl);
    if (HasFatalFailure()) return;
    EXPECT_EQ(got.pool.h.bits(), before) << impl;
    expect_close(exact.o, got.o, "o", s.c.dtype == KDA_F32 ? 0 : 0.004);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SlotsOnCuda, testing::ValuesIn(slot_cases()),
                         [](const auto& info) { return info.param.c.name; });

}  // namespace
}  // namespace kda::test
