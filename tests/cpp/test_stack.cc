// How much stack a call takes: every operator runs in a thread of 64 KiB (docs/contract.md), whatever its sizes are.
// The stack is painted before the call; what has lost its paint was used.
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "contract.h"
#include "contract/dtype.h"

namespace kda::test {
namespace {

constexpr size_t kSmall = 64 << 10, kPainted = 1 << 20;
constexpr unsigned char kPaint = 0xa5;

struct Job {
  std::function<kda_status()> call;
  kda_status status = KDA_INTERNAL_ERROR;
  std::string error;
};
void* run_job(void* job) {
  auto& j = *static_cast<Job*>(job);
  j.status = j.call();
  if (j.status != KDA_OK) j.error = kda_last_error();
  return nullptr;
}

// The bytes of stack that a thread needs to make the call.
size_t stack_of(const std::function<kda_status()>& call) {
  void* memory = mmap(nullptr, kPainted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto* bytes = static_cast<const unsigned char*>(memory);
  std::memset(memory, kPaint, kPainted);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  EXPECT_EQ(pthread_attr_setstack(&attributes, memory, kPainted), 0);
  Job job{call, KDA_INTERNAL_ERROR, {}};
  pthread_t thread;
  EXPECT_EQ(pthread_create(&thread, &attributes, run_job, &job), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_EQ(job.status, KDA_OK) << job.error;
  const auto* used = std::find_if(bytes, bytes + kPainted, [](unsigned char byte) { return byte != kPaint; });
  const size_t size = bytes + kPainted - used;
  munmap(memory, kPainted);
  return size;
}

// The thread itself, its guard page and libraries' thread-local variables take a part of the 64 KiB.
constexpr size_t kMost = kSmall - (10 << 10);

template <class Args>
void fits(Args args, const std::string& what, const char* impl = nullptr, bool with_workspace = true) {
  args.exec.num_threads = 1, args.exec.impl = impl;
  uint64_t size = 0;
  ASSERT_EQ(query(args, &size), KDA_OK) << kda_last_error();
  const Workspace workspace(size);
  args.exec.workspace = size && with_workspace ? workspace.data() : nullptr;
  args.exec.workspace_bytes = with_workspace ? size : 0;
  ASSERT_EQ(call(args), KDA_OK) << kda_last_error();  // what is set up once
  const Args* given = &args;
  EXPECT_LE(stack_of([given] { return call(given); }), kMost) << op_name<Args>() << ", " << what;
}

Case largest(std::vector<int64_t> lengths, int32_t dtype, int32_t state_layout) {
  Case c = legal_case();
  c.K = c.V = 256, c.lengths = std::move(lengths), c.dtype = c.g_dtype = c.state_dtype = dtype;
  c.state_layout = state_layout, c.qk_l2norm = true, c.beta_form = KDA_BETA_SIGMOID;
  return c;
}

template <class Args>
struct Stack : testing::Test {};
TYPED_TEST_SUITE(Stack, AllArgs, OperatorNames);

TYPED_TEST(Stack, OfAThreadOf64KiB) {
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
    const Legal<TypeParam> x(largest({2, 0, 14}, KDA_F32, layout));
    fits(x.args, layout == KDA_STATE_V_FIRST ? "V-first" : "K-first");
  }
  const Legal<TypeParam> small;
  fits(small.args, "small");
  fits(small.args, "reference", "reference");
}

// Decode has no workspace for few tokens, and needs none for many.
TEST(StackOfDecode, WithoutAWorkspace) {
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    for (const int32_t dtype : {KDA_F32, KDA_BF16})
      for (const int64_t size : {256, 128, 100})
        for (const int64_t tokens : {1, 4, 40}) {
          Case c = largest({tokens, tokens}, dtype, layout);
          c.K = c.V = size;
          const Legal<kda_decode_args> x(c);
          const std::string what = dtype_name(dtype) + (" K = V = " + std::to_string(size)) + ", tokens " +
                                   std::to_string(tokens) + ", layout " + std::to_string(layout);
          fits(x.args, what);
          fits(x.args, what + ", no workspace", nullptr, false);
        }
}

// The forward implementation that is not the default.
TEST(StackOfForward, CpuRecurrent) {
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    for (const int32_t dtype : {KDA_F32, KDA_BF16}) {
      const Inputs in(largest({40, 3}, dtype, layout));
      const ForwardOutputs out(in, false);
      fits(forward_args(in, out), "", "cpu_recurrent");
    }
}

TEST(StackOfConv, WidestTile) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16})
    for (const Layout state : {Layout::kDense, Layout::kHeadsFirst}) {
      const ConvInputs in({.name = "wide", .D = 1100, .lengths = {2, 0, 140}, .dtype = dtype, .state_layout = state});
      const ConvOutputs out(in);
      const ConvGradientOutputs gradients(in);
      fits(conv_args(in, out), "wide");
      fits(conv_backward_args(in, gradients), "wide");
    }
}

// Runs decode in a thread that has no more stack.
TEST(StackOfDecode, InAThreadThatIsSmall) {
  const Legal<kda_decode_args> x(largest({1, 1}, KDA_F32, KDA_STATE_V_FIRST));
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, kSmall), 0);
  const kda_decode_args* given = &x.args;
  Job job{[given] { return call(given); }, KDA_INTERNAL_ERROR, {}};
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, run_job, &job), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_EQ(job.status, KDA_OK) << job.error;
}

}  // namespace
}  // namespace kda::test
