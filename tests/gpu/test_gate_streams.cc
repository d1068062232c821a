// kda_gate on streams and in graphs.
#include "gate_twin.h"

namespace kda::test {
namespace {

TEST(GateOnCudaRuntime, RunsOnTheStreamItIsGiven) {
  std::mt19937 random(1);
  Twin x(KDA_F32, {100000, 4, 128}), A(KDA_F32, {4}), g1(KDA_F32, {100000, 4, 128}), g2(KDA_F32, {100000, 4, 128});
  x.fill(random, 0, 1), A.fill(random, 0, 1);
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams) CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  kda_gate_args one = simple_call(x, A, g1), two = simple_call(x, A, g2);
  one.exec.stream = streams[0], two.exec.stream = streams[1];
  ASSERT_EQ(kda_gate(&one), KDA_OK) << kda_last_error();
  ASSERT_EQ(kda_gate(&two), KDA_OK) << kda_last_error();
  for (cudaStream_t& s : streams) CUDA_OK(cudaStreamSynchronize(s));
  g1.download(), g2.download();
  EXPECT_TRUE(g1.data == g2.data);
  for (cudaStream_t& s : streams) CUDA_OK(cudaStreamDestroy(s));
}

TEST(GateOnCudaRuntime, IsCapturedIntoAGraphAndReplaysWithNewData) {
  std::mt19937 random(2);
  Twin x(KDA_F32, {64, 2, 128}), A(KDA_F32, {2}), g(KDA_F32, {64, 2, 128}), expected(KDA_F32, {64, 2, 128});
  x.fill(random, 0, 1), A.fill(random, 0, 1);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CUDA_OK(cudaStreamCreate(&stream));
  kda_gate_args args = simple_call(x, A, g);
  args.exec.stream = stream;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_EQ(kda_gate(&args), KDA_OK) << kda_last_error();
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (int round = 0; round < 100; ++round) {
    x.fill(random, 0, 1);
    CUDA_OK(cudaGraphLaunch(replay, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    g.download();
    kda_gate_args eager = simple_call(x, A, expected);
    ASSERT_EQ(kda_gate(&eager), KDA_OK);
    CUDA_OK(cudaDeviceSynchronize());
    expected.download();
    ASSERT_TRUE(g.data == expected.data) << "round " << round;
  }
  CUDA_OK(cudaGraphExecDestroy(replay));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace kda::test
