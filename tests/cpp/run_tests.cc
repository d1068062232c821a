#include "run_tests.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace kda::test {
namespace {

class SkipsHaveReasons : public testing::EmptyTestEventListener {
 public:
  bool violated = false;

 private:
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.skipped() || *result.message()) return;
    std::fprintf(stderr, "%s:%d: a test is skipped, and no reason is given\n", result.file_name(),
                 result.line_number());
    violated = true;
  }
};

}  // namespace

int run_tests() {
  testing::UnitTest& all = *testing::UnitTest::GetInstance();
  auto* const skips = new SkipsHaveReasons;  // gtest deletes it
  all.listeners().Append(skips);
  const int status = RUN_ALL_TESTS();
  if (GTEST_FLAG_GET(list_tests)) return status;
  const bool none = all.test_to_run_count() == 0;
  const bool all_skipped = !none && all.skipped_test_count() == all.test_to_run_count();
  if (none) std::fprintf(stderr, "no test matches the filter: %s\n", GTEST_FLAG_GET(filter).c_str());
  if (all_skipped) std::fprintf(stderr, "all %d tests were skipped\n", all.skipped_test_count());
  return status || none || all_skipped || skips->violated;
}

}  // namespace kda::test
