// What a call must not do to its process: allocate, change the floating-point mode, or get in the way of another
// call.
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "contract.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {
std::atomic<int64_t> allocations{0};
}

// Every `new` of this process, the library's included, comes through here. (If this were inlined, g++ would warn that
// free() does not belong to new.)
[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  if (void* p = std::malloc(size ? size : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace kda::test {
namespace {

// Counts the `new`s during one call on one thread, after a first call for what is set up once.
template <class Args>
int64_t allocations_of(const Args& args) {
  EXPECT_EQ(call(args), KDA_OK) << kda_last_error();
  const int64_t before = allocations;
  const kda_status status = call(args);
  const int64_t during = allocations - before;
  EXPECT_EQ(status, KDA_OK);
  return during;
}

template <class Args>
void expect_no_allocation(const Case& c = legal_case()) {
  Legal<Args> x(c);
  x.args.exec.num_threads = 1;
  const Workspace workspace = workspace_for(x.args);
  EXPECT_EQ(allocations_of(x.args), 0);
}

TEST(Calls, TheCounterCounts) {
  const int64_t before = allocations;
  const std::unique_ptr<int> one(new int(1));
  EXPECT_EQ(allocations - before, 1);
  Legal<kda_decode_args> x;
  x.args.exec.impl = "reference";  // allocates, and says so
  EXPECT_GT(allocations_of(x.args), 0);
}

TEST(Calls, AllocateNothing) {
  expect_no_allocation<kda_forward_args>();
  expect_no_allocation<kda_backward_args>();
  expect_no_allocation<kda_decode_args>();
  expect_no_allocation<kda_segment_map_args>();
  expect_no_allocation<kda_segment_merge_args>();
  expect_no_allocation<kda_verify_args>();
  expect_no_allocation<kda_flush_args>();
  expect_no_allocation<kda_flush_verify_args>();
  expect_no_allocation<kda_gate_args>();
  expect_no_allocation<kda_gate_backward_args>();
  expect_no_allocation<kda_stage_cumsum_args>();
  expect_no_allocation<kda_stage_chunk_intra_args>();
  expect_no_allocation<kda_stage_recompute_w_u_args>();
  expect_no_allocation<kda_stage_delta_h_args>();
  expect_no_allocation<kda_stage_fwd_o_args>();
  expect_no_allocation<kda_stage_bwd_local_args>();
  expect_no_allocation<kda_stage_bwd_delta_h_args>();
  expect_no_allocation<kda_stage_bwd_wy_dqkg_args>();
  expect_no_allocation<kda_stage_bwd_intra_args>();
  expect_no_allocation<kda_stage_cumsum_backward_args>();
  expect_no_allocation<kda_prefill_f32_args>();
  expect_no_allocation<kda_norm_gate_args>();
  expect_no_allocation<kda_norm_gate_backward_args>();
  expect_no_allocation<kda_conv_args>();
  expect_no_allocation<kda_conv_backward_args>();
}

TEST(Calls, AllocateNothingForManySequences) {
  Case c = legal_case();
  c.lengths.assign(100, 1);
  expect_no_allocation<kda_decode_args>(c);
  expect_no_allocation<kda_verify_args>(c);
  expect_no_allocation<kda_flush_args>(c);
  expect_no_allocation<kda_flush_verify_args>(c);
  expect_no_allocation<kda_forward_args>(c);
  expect_no_allocation<kda_segment_map_args>(c);
  expect_no_allocation<kda_stage_chunk_intra_args>(c);
  expect_no_allocation<kda_stage_delta_h_args>(c);
}

#if defined(__SSE__)
// Kernels flush subnormals; the caller's mode, whatever it was, is back afterwards.
TEST(Calls, RestoreTheFloatingPointMode) {
  const unsigned usual = _mm_getcsr();
  for (const unsigned mode : {usual & ~0x3fu, (usual & ~0x3fu) | 0x8040u, (usual & ~0x3fu) ^ 0x2000u})
    for (const int threads : {1, 2}) {
      const auto expect_kept = [&](auto legal) {
        legal->args.exec.num_threads = threads;
        const Workspace workspace = workspace_for(legal->args);
        _mm_setcsr(mode);
        const kda_status status = call(legal->args);
        const unsigned after = _mm_getcsr();
        _mm_setcsr(usual);
        EXPECT_EQ(status, KDA_OK) << kda_last_error();
        EXPECT_EQ(after & ~0x3fu, mode & ~0x3fu);  // apart from the sticky flags
      };
      expect_kept(std::make_unique<Legal<kda_forward_args>>());
      expect_kept(std::make_unique<Legal<kda_backward_args>>());
      expect_kept(std::make_unique<Legal<kda_decode_args>>());
      expect_kept(std::make_unique<Legal<kda_segment_map_args>>());
      expect_kept(std::make_unique<Legal<kda_segment_merge_args>>());
      expect_kept(std::make_unique<Legal<kda_verify_args>>());
      expect_kept(std::make_unique<Legal<kda_flush_args>>());
      expect_kept(std::make_unique<Legal<kda_flush_verify_args>>());
      expect_kept(std::make_unique<Legal<kda_gate_args>>());
      expect_kept(std::make_unique<Legal<kda_gate_backward_args>>());
      expect_kept(std::make_unique<Legal<kda_stage_chunk_intra_args>>());
      expect_kept(std::make_unique<Legal<kda_stage_delta_h_args>>());
      expect_kept(std::make_unique<Legal<kda_stage_bwd_wy_dqkg_args>>());
      expect_kept(std::make_unique<Legal<kda_prefill_f32_args>>());
      expect_kept(std::make_unique<Legal<kda_norm_gate_args>>());
      expect_kept(std::make_unique<Legal<kda_norm_gate_backward_args>>());
      expect_kept(std::make_unique<Legal<kda_conv_args>>());
      expect_kept(std::make_unique<Legal<kda_conv_backward_args>>());
    }
}
#endif

// Also where a head is long enough for all threads.
TEST(Calls, PrintNothing) {
  const Inputs in({.name = "long", .T = 700, .K = 16, .V = 64});
  ForwardOutputs out(in, true);
  BackwardOutputs gradients(in);
  testing::internal::CaptureStdout(), testing::internal::CaptureStderr();
  run(forward_args(in, out), {.impl = "cpu_chunk", .threads = 2});
  run(backward_args(in, gradients, &out), {.impl = "cpu_chunk", .threads = 2});
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// Several host threads at once, each with its own workspace and outputs, on inputs of their own.
TEST(Calls, AreReentrant) {
  constexpr int kThreads = 4, kRounds = 20;
  std::vector<std::unique_ptr<Inputs>> inputs;
  std::vector<Bits> expected;
  const auto bits_of = [](const Inputs& in) {
    ForwardOutputs out(in, true);
    BackwardOutputs gradients(in);
    run(forward_args(in, out), {.threads = 2});
    run(backward_args(in, gradients, &out), {.threads = 2});
    Bits all;
    for (const auto& [name, t] : out.tensors()) all.bytes += t->bits().bytes;
    for (const auto& [name, t] : gradients.tensors()) all.bytes += t->bits().bytes;
    return all;
  };
  for (int i = 0; i < kThreads; ++i) {
    inputs.push_back(std::make_unique<Inputs>(find_case("gva_2"), i));
    expected.push_back(bits_of(*inputs[i]));
  }
  EXPECT_NE(expected[0], expected[1]);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) wrong += bits_of(*inputs[i]) != expected[i];
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace kda::test
