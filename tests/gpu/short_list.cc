// The short list: the tests that compute-sanitizer runs. They are small, since a tool makes a test up to a hundred
// times as long. Together they run every implementation on CUDA.
//
//   KDA_TEST_SHORT_LIST=racecheck test_gpu    what this tool runs; with --gtest_list_tests it is only shown
//   KDA_TEST_SHORT_LIST=dry test_gpu          some of it without a GPU, where calls on it are noted and left out
//
// Both end with the implementations that have run and those that have not. ctest has the dry run. It fails if one has
// not run, or if an entry finds no test, so a test that is renamed does not leave the list unnoticed.
#include "short_list.h"

#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "run_tests.h"

namespace kda::test {
namespace {

struct Some {
  const char* prefix;
  const char* names;  // of tests, perhaps with *
};

constexpr Some kShortList[] = {
    {"All/ForwardOnCuda.*/cuda_prefill_",
     "recurrent_packed* recurrent_gva* recurrent_gates_wild* recurrent_edges_*bound_bf16 chunk_packed* chunk_gva* "
     "chunk_gates_wild* chunk_wild chunk_edges_*bound_bf16"},
    {"All/ForwardChunkOnCuda.IsTheOracle/", "*_33 *_heads *packed *f16* *wild *wild_long *_maps"},
    {"All/ForwardChunkPromise.PoolsAndCheckpoints/", "*_heads"},
    {"All/BackwardOnCuda.IsTheOracle/cuda_",
     "hopper_backward_chunk_bound_33 hopper_backward_chunk_bound_heads hopper_backward_chunk_bound_short_packed "
     "hopper_backward_chunk_K64_V64_bound_33 "
     "backward_chunk_bound_33 backward_chunk_bound_f16 backward_chunk_bound_short_packed backward_recurrent_packed"},
    {"All/BackwardPromiseOnCuda.", "SomeBetasAreZero/*"},
    {"All/TokensOnCuda.*/", "usual* staged_* *"},
    {"All/GarbageOnCuda.", "*"},
    {"All/SnapshotsOnCuda.", "*"},
    {"LargeOnCuda.", "*"},
    {"OnCuda.", "Garbage*"},
    {"All/SegmentMapOnCuda.*/cuda_segment_", "chunk_*edges_*bound_bf16 hopper_*edges_*bound_bf16 recurrent_packed"},
    {"All/SegmentMergeOnCuda.IsTheOracle/", "P3_HV2_K60_V100 P2_HV1_K128_V128"},
    {"All/GateOnCuda.MatchesTheOracle/", "softplus_f16_odd_strided bound_bf16"},
    {"GateOnCudaRuntime.", "KeepsNaN* Empty*"},
    {"All/NormOnCuda.IsTheOracle/", "*"},
    {"NormPromiseOnCuda.", "*"},
    {"All/ConvOnCuda.", "Forward/* Backward/*"},
    {"ConvPromiseOnCuda.", "*"},
    {"ConvFrontOnCuda.", "*"},
    {"All/StagesOnCuda.", "*/packed* */K61_V37 EachIsItsOracle/whole"},
    {"StageDetailsOnCuda.", "*"},
    {"StagesOnBlackwell.", "*"},
    {"WyOnCuda.", "*"},
    {"All/PrefillF32OnCuda.", "*/groups */whole_128_v_first"},
};
constexpr char kTooLong[] = "*long_*:*many*";
// racecheck reports false hazards there. It does not see that a lane's arrival at an mbarrier, behind __syncwarp(),
// tells what its warp has read and stored: docs/kernels/cuda_hopper_prefill_pairs.md, cuda_backward.md. The emulator
// does.
constexpr char kNotRacechecked[] = "*bound_short_bf16_states:*Backward*OnCuda*cuda_hopper_backward_chunk*";

std::vector<std::string> words(const char* text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

bool matches(const std::string& pattern, const std::string& name) { return !fnmatch(pattern.c_str(), name.c_str(), 0); }

// Calls f(pattern) for each entry.
template <class F>
void for_each_pattern(const F& f) {
  for (const Some& some : kShortList)
    for (const std::string& name : words(some.names)) f(some.prefix + name);
}

std::vector<std::string> all_tests() {
  std::vector<std::string> names;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j)
      names.push_back(std::string(suite.name()) + "." + suite.GetTestInfo(j)->name());
  }
  return names;
}

// What a dry run takes: of each entry the first case of each test.
std::string few() {
  const std::vector<std::string> names = all_tests();
  std::string all;
  for_each_pattern([&](const std::string& pattern) {
    std::set<std::string> seen;
    for (const std::string& name : names)
      if (matches(pattern, name) && seen.insert(name.substr(0, name.find('/', name.find('.')))).second)
        all += name + ":";
  });
  return all;
}

std::string filter(const std::string& tool) {
  if (tool == "dry") return few();
  std::string all;
  for_each_pattern([&](const std::string& pattern) { all += pattern + ":"; });
  all.back() = '-';
  return all + kTooLong + (tool == "racecheck" ? std::string(":") + kNotRacechecked : "");
}

// All tests run twice: on a Hopper, then on a Blackwell. A test may end the assumption of a GPU.
class AssumedGpu : public testing::EmptyTestEventListener {
  void OnTestIterationStart(const testing::UnitTest&, int i) override { capability_ = i ? 100 : 90; }
  void OnTestStart(const testing::TestInfo&) override { kda_assume_gpu(capability_, 132); }
  int capability_ = 90;
};

void start_dry_run() {
  dry_run = true;
  GTEST_FLAG_SET(repeat, 2);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());  // without results of the GPU most tests fail
  listeners.Append(new AssumedGpu);
}

// Prints what should have run, and what did. Returns whether that is the same, and each entry has a test.
bool print_what_ran() {
  bool complete = true;
  for (const std::string& op : words(KDA_OPERATORS))
    for (int i = 0; const char* name = kda_implementation(op.c_str(), i); ++i) {
      if (std::string(name).substr(0, 5) != "cuda_") continue;
      const std::string both = op + " " + name;
      std::printf("short list: %s: %s\n", both.c_str(), all_that_ran.contains(both) ? "has run" : "has not run");
      complete = complete && all_that_ran.contains(both);
    }
  const std::vector<std::string> names = all_tests();
  for_each_pattern([&](const std::string& pattern) {
    if (std::any_of(names.begin(), names.end(), [&](const auto& name) { return matches(pattern, name); })) return;
    std::printf("short list: no test is called %s\n", pattern.c_str());
    complete = false;
  });
  return complete;
}

}  // namespace
}  // namespace kda::test

int main(int argc, char** argv) {
  using namespace kda::test;
  testing::InitGoogleTest(&argc, argv);
  const char* const tool = std::getenv("KDA_TEST_SHORT_LIST");
  if (!tool) return run_tests();
  GTEST_FLAG_SET(filter, filter(tool));
  if (tool == std::string("dry")) start_dry_run();
  const int status = dry_run ? RUN_ALL_TESTS() : run_tests();
  const bool complete = print_what_ran();
  return dry_run ? !complete : status;
}
