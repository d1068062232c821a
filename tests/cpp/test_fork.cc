// A process that has used the library forks, and its child uses it, too: with the same bits, and without waiting for
// threads that only the parent has.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "contract.h"

namespace kda::test {
namespace {

constexpr unsigned kSeconds = 60;  // a child that hangs is ended by its alarm

// The bits of forward and backward, with a head long enough for all threads, and of a decode step.
std::string bits(const Inputs& in, int threads) {
  std::string all;
  ForwardOutputs out(in, true);
  BackwardOutputs gradients(in);
  run(forward_args(in, out), {.impl = "cpu_chunk", .threads = threads});
  run(backward_args(in, gradients, &out), {.threads = threads});
  for (const auto& [name, t] : out.tensors()) all += t->bits().bytes;
  for (const auto& [name, t] : gradients.tensors()) all += t->bits().bytes;
  Legal<kda_decode_args> decode(find_case("gva_2"));
  run(decode.args, {.threads = threads});
  return all + decode.o.bits().bytes + decode.hT.bits().bytes;
}

Inputs inputs() { return Inputs({.name = "long", .T = 700, .H = 1, .HV = 2, .K = 32, .V = 64}); }

// Whether a child finds `expected` with 1, 2 and more threads; `generations`: how deep children fork again.
bool child_agrees(const Inputs& in, const std::string& expected, int generations = 1) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSeconds);
    bool right = true;
    for (const int threads : {0, 1, 2, 5}) right = right && bits(in, threads) == expected;
    right = right && !testing::Test::HasFailure();
    if (generations > 1) right = right && child_agrees(in, expected, generations - 1);
    _exit(right ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Fork, ChildrenOfAUserRun) {
  const Inputs in = inputs();
  const std::string expected = bits(in, 2);
  EXPECT_TRUE(child_agrees(in, expected));
  EXPECT_EQ(bits(in, 2), expected) << "the parent goes on";
  EXPECT_TRUE(child_agrees(in, expected, 3));
}

// Forks at any moment of another thread's call.
TEST(Fork, WhileAnotherThreadIsInACall) {
  const Inputs in = inputs();
  const std::string expected = bits(in, 2);
  std::atomic<bool> done{false}, wrong{false};
  std::thread other([&] {
    while (!done) wrong = wrong || bits(in, 2) != expected;
  });
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(child_agrees(in, expected)) << i;
  done = true;
  other.join();
  EXPECT_FALSE(wrong);
}

}  // namespace
}  // namespace kda::test
