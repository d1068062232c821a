// What a gtest program returns. Its own main() may call this; tests/cpp/main.cc is that of the others.
#pragma once

namespace kda::test {

// Runs the tests behind InitGoogleTest(), and returns 0 if all is well. Beside a failure, that is not so if the filter
// matches no test, if all tests were skipped, or if one was skipped without a reason: gtest calls these a success.
int run_tests();

}  // namespace kda::test
