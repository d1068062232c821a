// Instructions of some lanes of a warp, as a mask names them: shuffles, votes, sums and __syncwarp().
#include <algorithm>
#include <vector>

#include "run_kernel.h"

namespace kda::test {
namespace {

namespace ptx = cuda::ptx;

constexpr unsigned kLower = 0xffff, kUpper = 0xffff0000;

// Halves of a warp on paths of their own, where each exchanges among its lanes; out [4,32].
__global__ void halves_exchange(unsigned* out) {
  const unsigned lane = threadIdx.x;
  if (lane < 16) {
    out[lane] = __shfl_xor_sync(kLower, lane, 1);
    out[32 + lane] = __ballot_sync(kLower, lane % 2);
    out[64 + lane] = __reduce_add_sync(kLower, lane);
    out[96 + lane] = static_cast<unsigned>(__all_sync(kLower, lane < 16));
  } else {
    out[64 + lane] = __reduce_max_sync(kUpper, lane);
    out[lane] = __shfl_down_sync(kUpper, lane, 3, 16);
    out[96 + lane] = static_cast<unsigned>(__all_sync(kUpper, lane > 16));
    out[32 + lane] = __ballot_sync(kUpper, lane % 2);
  }
}

TEST(EmulatedMasks, HalvesExchange) {
  std::vector<unsigned> out(128);
  EXPECT_EQ(run_often(32, 0, halves_exchange, out.data()), kFine);
  for (unsigned l = 0; l < 32; ++l) {
    const bool lower = l < 16;
    EXPECT_EQ(out[l], lower ? l ^ 1 : l % 16 + 3 < 16 ? l + 3 : l) << l;
    EXPECT_EQ(out[32 + l], lower ? 0xaaaau : 0xaaaa0000u) << l;
    EXPECT_EQ(out[64 + l], lower ? 120u : 31u) << l;
    EXPECT_EQ(out[96 + l], lower ? 1u : 0u) << l;
  }
}

// Eight groups of four lanes, which take turns of their own number.
__global__ void groups_sum(unsigned* out) {
  const unsigned lane = threadIdx.x, group = lane / 4;
  for (unsigned i = 0; i <= group; ++i) out[lane] = __reduce_add_sync(0xfu << 4 * group, lane + i);
}

TEST(EmulatedMasks, GroupsOfTheirOwn) {
  std::vector<unsigned> out(32);
  EXPECT_EQ(run_often(32, 0, groups_sum, out.data()), kFine);
  for (unsigned l = 0; l < 32; ++l) EXPECT_EQ(out[l], 4 * (l / 4 * 4) + 6 + 4 * (l / 4)) << l;
}

// ---- planted ----

enum class Wrong { kNothing, kNotItself, kOthers, kReadsOutside, kStaysAway, kEnds, kOneMaskEach, kAllMeanwhile };
__global__ void exchange_wrongly(Wrong how) {
  const unsigned lane = threadIdx.x;
  const unsigned mask = how == Wrong::kNotItself     ? kUpper
                        : how == Wrong::kOthers      ? kLower | 1u << 16
                        : how == Wrong::kOneMaskEach ? (lane % 2 ? kLower : kLower & ~2u)
                                                     : kLower;
  if (lane >= 16) return how == Wrong::kAllMeanwhile ? __syncwarp() : static_cast<void>(0);
  if (how == Wrong::kEnds && lane == 3) return;
  if (how == Wrong::kStaysAway && lane == 3) return static_cast<void>(__ballot_sync(1u << 3, 1));
  __shfl_sync(mask, lane, how == Wrong::kReadsOutside ? 16 : 0);
}
std::set<std::string> wrongly(Wrong how) { return run_often(32, 0, exchange_wrongly, how); }
testing::AssertionResult says_one_of(const std::set<std::string>& all, std::initializer_list<const char*> what) {
  for (const std::string& one : all)
    if (std::none_of(what.begin(), what.end(), [&](const char* w) { return one.find(w) != std::string::npos; }))
      return testing::AssertionFailure() << "\"" << one << "\"";
  return testing::AssertionSuccess();
}

TEST(EmulatedMasks, WithoutAnError) { EXPECT_EQ(wrongly(Wrong::kNothing), kFine); }
TEST(EmulatedMasks, ALaneDoesNotNameItself) {
  EXPECT_TRUE(says(wrongly(Wrong::kNotItself), "__shfl_sync with a mask that does not name its own lane "));
}
TEST(EmulatedMasks, ALaneIsNamedThatDoesNotArrive) {
  constexpr char kBefore[] = "names lane 3, which has ended", kAfter[] = "ends, while lanes of its warp wait for it";
  EXPECT_TRUE(says_one_of(wrongly(Wrong::kEnds), {kBefore, kAfter}));
  EXPECT_TRUE(says_one_of(wrongly(Wrong::kOthers), {"names lane 16, which has ended", kAfter}));
  EXPECT_TRUE(says_one_of(wrongly(Wrong::kStaysAway),
                          {"a vote of lanes that wait for others, with another mask", "a shuffle", kBefore, kAfter}));
}
TEST(EmulatedMasks, AShuffleReadsALaneThatIsNotNamed) {
  EXPECT_TRUE(says(wrongly(Wrong::kReadsOutside), "a shuffle reads a lane that its mask does not name"));
}
TEST(EmulatedMasks, LanesOfAMeetingGiveOneMask) {
  EXPECT_TRUE(says_one_of(wrongly(Wrong::kOneMaskEach),
                          {"of lanes that wait for others, with another mask", "does not name its own lane 1"}));
  EXPECT_TRUE(says_one_of(wrongly(Wrong::kAllMeanwhile),
                          {"of lanes that wait for others, with another mask", "which has ended", "deadlock"}));
}

// Lanes 0 and 1 pass on what they wrote: a mask orders the lanes that it names, and no others.
__global__ void pass_on_by_mask(unsigned mask) {
  const unsigned lane = threadIdx.x;
  if (lane >= 4) return;
  ptx::store_shared(shared() + lane * 4, lane);
  if (mask >> lane & 1) __syncwarp(mask);
  if (lane < 2) ptx::load_shared(shared() + (lane ^ 1) * 4);
}

TEST(EmulatedMasks, OrderTheLanesTheyName) {
  EXPECT_EQ(run_often(32, 128, pass_on_by_mask, 0xfu), kFine);
  EXPECT_EQ(run_often(32, 128, pass_on_by_mask, 0x3u), kFine);
  EXPECT_TRUE(says_one_of(run_often(32, 128, pass_on_by_mask, 0xcu), {"which thread ", "which nobody wrote"}));
}

}  // namespace
}  // namespace kda::test
