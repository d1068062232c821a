// The binding's memory from CUDA's driver, with a stand-in for the driver: what is called, in which order, and what an
// error leaves behind.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../../python/kda/_memory.h"

namespace kda::binding {
namespace {

struct Called {
  std::vector<std::string> calls;
  int pushed = 0, retained = 0;
  std::string fails;  // the name of the call that fails
  int status = 1;

  int note(const std::string& name, const std::string& what = "") {
    calls.push_back(what.empty() ? name : name + " " + what);
    return name == fails ? status : 0;
  }
};
Called* called = nullptr;

std::string text(const void* stream) { return std::to_string(reinterpret_cast<uintptr_t>(stream)); }

const Driver kDriver = {
    .get_device = [](int* device, int number) { return *device = number + 10, called->note("get_device"); },
    .retain =
        [](Driver::Context* context, int device) {
          ++called->retained, *context = called;
          return called->note("retain", std::to_string(device));
        },
    .release = [](int) { return --called->retained, called->note("release"); },
    .push = [](Driver::Context) { return called->fails == "push" ? 1 : (++called->pushed, called->note("push")); },
    .pop = [](Driver::Context*) { return --called->pushed, called->note("pop"); },
    .allocate =
        [](Driver::Address* address, size_t bytes, void* stream) {
          *address = 4096;
          called->note("allocate", std::to_string(bytes) + " on " + text(stream));
          return called->fails == "allocate" ? called->status : 0;
        },
    .free = [](Driver::Address address,
               void* stream) { return called->note("free", std::to_string(address) + " on " + text(stream)); },
};

class StreamMemoryTest : public testing::Test {
 protected:
  void SetUp() override { called = &here; }
  Called here;
};

TEST_F(StreamMemoryTest, IsTakenAndGivenBackInTheOrderOfOneStream) {
  void* const stream = reinterpret_cast<void*>(uintptr_t{7});
  {
    const StreamMemory memory(3, stream, 100, kDriver);
    EXPECT_EQ(memory.data(), reinterpret_cast<void*>(uintptr_t{4096}));
    EXPECT_EQ(here.pushed, 0) << "the caller's context is current again";
    EXPECT_EQ(here.retained, 1);
  }
  const std::vector<std::string> expected = {
      "get_device", "retain 13", "push", "allocate 100 on 7", "pop", "push", "free 4096 on 7", "pop", "release"};
  EXPECT_EQ(here.calls, expected);
}

TEST_F(StreamMemoryTest, AFailureSaysWhatItIsAndLeavesNothing) {
  struct Case {
    const char* fails;
    int status;
    bool full;
    const char* text;
  };
  for (const Case& c : {Case{"allocate", 2, true, "could not allocate 100 bytes (CUDA driver error 2)"},
                        {"allocate", 801, false, "could not allocate 100 bytes (CUDA driver error 801)"},
                        {"push", 1, false, "could not allocate 100 bytes (CUDA driver error 1)"},
                        {"get_device", 101, false, "the driver of CUDA has no device 3"}}) {
    here = Called{};
    here.fails = c.fails, here.status = c.status;
    try {
      const StreamMemory memory(3, nullptr, 100, kDriver);
      FAIL() << c.fails << ": no failure";
    } catch (const MemoryFailure& failure) {
      EXPECT_EQ(failure.full, c.full) << c.fails;
      EXPECT_EQ(failure.text, c.text);
    }
    EXPECT_EQ(here.pushed, 0) << c.fails;
    EXPECT_EQ(here.retained, 0) << c.fails;
  }
}

TEST(Driver, WhereThereIsNoneASentenceSaysIt) {
  if (dlopen("libcuda.so.1", RTLD_NOW)) GTEST_SKIP() << "there is a device";
  try {
    Driver::loaded();
    FAIL() << "no failure";
  } catch (const MemoryFailure& failure) {
    EXPECT_FALSE(failure.full);
    EXPECT_EQ(failure.text.find("the driver of CUDA was not found: libcuda.so.1"), 0u) << failure.text;
  }
}

}  // namespace
}  // namespace kda::binding
