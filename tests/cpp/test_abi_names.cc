// Numbers and names of the ABI: of enums, versions, errors, implementations.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "contract/operators.h"
#include "kda/kda.h"

namespace {

TEST(Abi, Enums) {
  EXPECT_EQ(KDA_OK, 0);
  EXPECT_EQ(KDA_INVALID_ARGUMENT, 1);
  EXPECT_EQ(KDA_UNSUPPORTED, 2);
  EXPECT_EQ(KDA_CUDA_ERROR, 3);
  EXPECT_EQ(KDA_INTERNAL_ERROR, 4);
  EXPECT_EQ(KDA_OUT_OF_MEMORY, 5);
  EXPECT_EQ(KDA_MAX_NDIM, 5);
  EXPECT_EQ(KDA_F32, 1);
  EXPECT_EQ(KDA_BF16, 2);
  EXPECT_EQ(KDA_F16, 3);
  EXPECT_EQ(KDA_F64, 4);
  EXPECT_EQ(KDA_I32, 5);
  EXPECT_EQ(KDA_I64, 6);
  EXPECT_EQ(KDA_BOOL, 7);
  EXPECT_EQ(KDA_CPU, 0);
  EXPECT_EQ(KDA_CUDA, 1);
  EXPECT_EQ(KDA_GATE_LOG, 0);
  EXPECT_EQ(KDA_GATE_SOFTPLUS, 1);
  EXPECT_EQ(KDA_GATE_LOWER_BOUND, 2);
  EXPECT_EQ(KDA_BETA_ACTIVATED, 0);
  EXPECT_EQ(KDA_BETA_SIGMOID, 1);
  EXPECT_EQ(KDA_BETA_2SIGMOID, 2);
  EXPECT_EQ(KDA_NORM_NONE, 0);
  EXPECT_EQ(KDA_NORM_SIGMOID, 1);
  EXPECT_EQ(KDA_NORM_SILU, 2);
  EXPECT_EQ(KDA_STATE_V_FIRST, 0);
  EXPECT_EQ(KDA_STATE_K_FIRST, 1);
  EXPECT_EQ(KDA_BATCH_INVARIANT, 1u);
}

TEST(Abi, Version) {
  EXPECT_STREQ(kda_version(), "0.1.0");
  EXPECT_EQ(std::to_string(KDA_VERSION_MAJOR) + "." + std::to_string(KDA_VERSION_MINOR) + "." +
                std::to_string(KDA_VERSION_PATCH),
            kda_version());
  const std::string info = kda_info();
  EXPECT_EQ(info.rfind("version: 0.1.0\n", 0), 0u) << info;
  EXPECT_NE(info.find("\ncpu: "), std::string::npos) << info;
  EXPECT_NE(info.find("\ncuda: "), std::string::npos) << info;
}

TEST(Abi, StatusNames) {
  EXPECT_STREQ(kda_status_name(KDA_OK), "KDA_OK");
  EXPECT_STREQ(kda_status_name(KDA_INVALID_ARGUMENT), "KDA_INVALID_ARGUMENT");
  EXPECT_STREQ(kda_status_name(KDA_UNSUPPORTED), "KDA_UNSUPPORTED");
  EXPECT_STREQ(kda_status_name(KDA_CUDA_ERROR), "KDA_CUDA_ERROR");
  EXPECT_STREQ(kda_status_name(KDA_INTERNAL_ERROR), "KDA_INTERNAL_ERROR");
  EXPECT_STREQ(kda_status_name(KDA_OUT_OF_MEMORY), "KDA_OUT_OF_MEMORY");
  EXPECT_STREQ(kda_status_name(static_cast<kda_status>(99)), "an unknown kda_status");
}

// For every operator: the oracle is last, no name is repeated, and nothing follows the end.
TEST(Abi, ImplementationNames) {
#define KDA_NAME(op) #op,
  for (const char* op : {KDA_FOR_EACH_OPERATOR(KDA_NAME)}) {
#undef KDA_NAME
    std::set<std::string> names;
    std::string last;
    int32_t count = 0;
    for (; const char* name = kda_implementation(op, count); ++count) names.insert(last = name);
    EXPECT_GE(count, 2) << op;
    EXPECT_EQ(names.size(), static_cast<size_t>(count)) << op;
    EXPECT_EQ(last, "reference") << op;
    EXPECT_EQ(kda_implementation(op, count), nullptr);
    EXPECT_EQ(kda_implementation(op, -1), nullptr);
  }
  EXPECT_EQ(kda_implementation("forwards", 0), nullptr);
  EXPECT_EQ(kda_implementation(nullptr, 0), nullptr);
}

}  // namespace
