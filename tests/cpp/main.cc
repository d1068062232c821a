// main() of gtest programs that have none of their own.
#include <gtest/gtest.h>

#include "run_tests.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return kda::test::run_tests();
}
