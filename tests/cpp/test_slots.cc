// Slots to read and slots to write, indices of either width, and checkpoints anywhere, against the float64 oracle.
#include <gtest/gtest.h>

#include "slot_calls.h"

namespace kda::test {
namespace {

class Slots : public testing::TestWithParam<SlotCase> {
 protected:
  Slots() : s(GetParam()), in(s.c) {}
  void expect_same(const Shared& exact, const Shared& got) const {
    const double gate = s.c.dtype == KDA_F32 ? 1e-5 : 0.005, state_gate = s.c.state_dtype == KDA_F32 ? 1e-5 : 0.005;
    EXPECT_TRUE(close(exact.o, got.o, gate));
    EXPECT_TRUE(close(exact.pool.h, got.pool.h, state_gate));
    EXPECT_TRUE(close(exact.checkpoints, got.checkpoints, 1e-5));
    for (const auto& [expected, x] :
         {std::pair{&exact.o, &got.o}, {&exact.pool.h, &got.pool.h}, {&exact.checkpoints, &got.checkpoints}})
      EXPECT_EQ(x->unwritten(), expected->unwritten());
  }
  const SlotCase s;
  const Inputs in;
};

TEST_P(Slots, Forward) {
  for (const auto& [every, offset] : kCheckpointForms) {
    const Shared exact(s, in, true);
    run(slot_forward_args(in, exact, every, offset), {.impl = "reference"});
    for (const std::string& impl : cpu_implementations("forward")) {
      if (every && impl == "cpu_recurrent") continue;
      for (const int threads : {1, 3}) {
        SCOPED_TRACE(impl + ", checkpoints every " + std::to_string(every));
        const Shared got(s, in, false);
        run(slot_forward_args(in, got, every, offset), {.impl = impl.c_str(), .threads = threads});
        expect_same(exact, got);
      }
    }
  }
}

TEST_P(Slots, Decode) {
  const Shared exact(s, in, true);
  run(slot_decode_args(in, exact), {.impl = "reference"});
  for (const std::string& impl : cpu_implementations("decode")) {
    const Shared got(s, in, false);
    run(slot_decode_args(in, got), {.impl = impl.c_str()});
    expect_same(exact, got);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Slots, testing::ValuesIn(slot_cases()),
                         [](const auto& info) { return info.param.c.name; });

}  // namespace
}  // namespace kda::test
