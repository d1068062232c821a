// How decode and drafts are launched: the plan on either side of each threshold, for a GPU of 132 SMs.
#include <gtest/gtest.h>

#include "cuda/call/launch_plans.h"

namespace kda::cuda {
namespace {

constexpr int64_t kSMs = 132;

DecodePlan decode(int64_t heads, bool bf16 = false, bool k_first = false, FastPath fast = FastPath::kPlain) {
  return decode_plan({heads, 128, 128, fast, bf16, k_first}, kSMs);
}
TEST(DecodePlan, ColumnsGrowWithTheCall) {
  EXPECT_EQ(decode(82).columns(), 16);  // 656 blocks, five an SM
  EXPECT_EQ(decode(83).columns(), 32);
  EXPECT_EQ(decode(1979).columns(), 32);
  EXPECT_EQ(decode(1980).columns(), 8);
  EXPECT_EQ(decode(1980).warps, 2);
}
TEST(DecodePlan, Bf16StatesStayInLargeBlocks) {
  EXPECT_EQ(decode(82, true).columns(), 16);
  EXPECT_EQ(decode(100000, true).columns(), 32);
}
TEST(DecodePlan, KFirstColumnsAreReadTogether) {
  EXPECT_EQ(decode(165, false, true).rows, 2);
  EXPECT_EQ(decode(166, false, true).rows, 4);
  EXPECT_EQ(decode(100000, false, true).columns(), 64);
}
TEST(DecodePlan, GeneralKernelsHaveOneSize) {
  for (const int64_t heads : {1, 100, 100000}) EXPECT_EQ(decode(heads, false, false, FastPath::kNone).columns(), 32);
  EXPECT_EQ(decode_plan({8, 256, 128, FastPath::kNone, false, false}, kSMs).columns(), 16);
}
TEST(DecodePlan, SnapshotsOfFewRequestsAreSpreadOverAllSMs) {
  EXPECT_EQ(decode(66, false, false, FastPath::kSnapshots).columns(), 32);  // 264 blocks, two an SM
  EXPECT_EQ(decode(67, false, false, FastPath::kSnapshots).columns(), 64);
}
TEST(DecodePlan, AllWarpsActivateManySnapshotsInBf16) {
  const auto apart = [](int64_t heads, bool bf16) { return decode(heads, bf16, false, FastPath::kSnapshots).apart; };
  EXPECT_TRUE(apart(264, true));  // 528 blocks, four an SM
  EXPECT_FALSE(apart(265, true));
  EXPECT_TRUE(apart(100000, false));
}

struct Size {
  int columns, warps;
  bool crowded = false;
  bool operator==(const Size&) const = default;
};
Size size_of(const DraftPlan& p) { return {p.shape.columns(), p.shape.warps, p.shape.crowded}; }
// V = 128; `heads` value heads of all requests.
DraftPlan drafts(int64_t heads, int64_t T, bool flushes, FastPath fast = FastPath::kPlain, int64_t V = 128) {
  return draft_plan({heads * V, V, T, flushes, fast}, kSMs);
}
TEST(DraftPlan, Verify) {
  EXPECT_EQ(size_of(drafts(98, 4, false)), (Size{32, 4}));
  EXPECT_EQ(size_of(drafts(99, 4, false)), (Size{64, 4}));
  EXPECT_EQ(size_of(drafts(494, 4, false)), (Size{64, 4}));
  EXPECT_EQ(size_of(drafts(495, 4, false)), (Size{128, 4}));
  EXPECT_EQ(size_of(drafts(100000, 4, false)), (Size{128, 4}));
  EXPECT_EQ(size_of(drafts(100000, 4, false, FastPath::kConv)), (Size{128, 4}));
  EXPECT_EQ(size_of(drafts(100000, 4, false, FastPath::kPlain, 64)), (Size{64, 4}));
}
TEST(DraftPlan, FlushVerifyIsCrowdedInLargeCalls) {
  EXPECT_EQ(size_of(drafts(1649, 4, true)), (Size{128, 4}));
  EXPECT_EQ(size_of(drafts(1650, 4, true)), (Size{64, 4, true}));
  EXPECT_EQ(size_of(drafts(100000, 4, true, FastPath::kRing)), (Size{128, 4}));
}
TEST(DraftPlan, MoreDraftsOnARing) {
  EXPECT_EQ(size_of(drafts(66, 8, true, FastPath::kRing)), (Size{32, 8}));
  EXPECT_EQ(size_of(drafts(67, 8, true, FastPath::kRing)), (Size{64, 8}));
  EXPECT_EQ(size_of(drafts(132, 8, true, FastPath::kRing)), (Size{64, 8}));
  EXPECT_EQ(size_of(drafts(133, 8, true, FastPath::kRing)), (Size{128, 8}));
  EXPECT_EQ(size_of(drafts(100000, 8, true, FastPath::kRing, 64)), (Size{64, 8}));
}
TEST(DraftPlan, AFlushAloneIsShort) {
  EXPECT_EQ(size_of(drafts(98, 0, true)), (Size{32, 4}));
  EXPECT_EQ(size_of(drafts(100000, 0, true)), (Size{64, 4}));
}
TEST(DraftPlan, HintsForStates) {
  EXPECT_EQ(drafts(99, 4, true).hinted.some, 32);
  EXPECT_EQ(drafts(495, 4, true).hinted.some, 0);
  EXPECT_EQ(drafts(495, 4, false).hinted.some, 32);
  EXPECT_EQ(drafts(495, 0, true).hinted.some, 0);
}
// A warp has a draft, and a block's columns divide every V that these kernels take.
TEST(DraftPlan, EveryShapeFits) {
  for (const FastPath fast : {FastPath::kNone, FastPath::kPlain, FastPath::kConv, FastPath::kRing})
    for (const bool flushes : {false, true})
      for (const int64_t V : {64, 128, 192})
        for (int64_t heads = 1; heads < 100000; heads *= 3)
          for (int64_t T = flushes ? 0 : 1; T <= (fast == FastPath::kRing ? 8 : 4); ++T) {
            const DraftPlan p = drafts(heads, T, flushes, fast, V);
            EXPECT_GE(p.shape.warps, T);
            EXPECT_EQ(V % p.shape.columns(), 0);
          }
}

TEST(MmaPlan, ColumnsAreHalvedForFewHeads) {
  const auto columns = [](int64_t heads, int64_t V = 128) {
    return mma_plan({heads, V, 6, FastPath::kPlain}, kSMs, [](int64_t) { return true; }).columns;
  };
  EXPECT_EQ(columns(49), 32);
  EXPECT_EQ(columns(98), 32);
  EXPECT_EQ(columns(99), 64);
  EXPECT_EQ(columns(197), 64);
  EXPECT_EQ(columns(198), 128);
  EXPECT_EQ(columns(100000, 64), 64);
}
TEST(MmaPlan, ColumnsFitSharedMemory) {
  const auto columns = [](int64_t most) {
    return mma_plan({1000, 128, 6, FastPath::kPlain}, kSMs, [&](int64_t n) { return n <= most; }).columns;
  };
  EXPECT_EQ(columns(128), 128);
  EXPECT_EQ(columns(127), 64);
  EXPECT_EQ(columns(1), 32);
}
TEST(MmaPlan, HintsWhereNotAllBlocksRunAtOnce) {
  const auto hinted = [](int64_t heads) {
    return mma_plan({heads, 128, 6, FastPath::kPlain}, kSMs, [](int64_t) { return true; }).hinted.some;
  };
  EXPECT_EQ(hinted(396), 0);
  EXPECT_EQ(hinted(397), 64);
}

TEST(LaunchPlans, AreSentences) {
  EXPECT_EQ(text(decode(1980)),
            "fast path, blocks of 8 columns and 2 warps, hints for 28 KiB of states an SM (28 if that is all)");
  EXPECT_EQ(text(drafts(1, 8, true, FastPath::kRing)),
            "fast path on a ring, blocks of 32 columns and 8 warps, hints for 32 KiB of states an SM (64 if that is "
            "all)");
  EXPECT_EQ(text(mma_plan({1, 128, 12, FastPath::kNone}, kSMs, [](int64_t) { return true; })),
            "general kernel, blocks of 32 columns and 8 warps, hints for 0 KiB of states an SM (64 if that is all), "
            "room for 16 drafts");
}

}  // namespace
}  // namespace kda::cuda
