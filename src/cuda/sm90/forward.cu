// Chunked forward for Hopper: one block of four warpgroups per SM, two that prepare chunks and two that carry the state.
//
// Chunks of 32 tokens go from the preparation (prepare.h) to the scan (scan.h) through a ring of stages in shared memory:
// mbarriers say when a stage is full and when it is empty again. A block works on one value head of one sequence at a time.
#include "cuda/cuda.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/help.h"
#include "cuda/sm90/scan.h"

namespace kda::cuda {
namespace {

using namespace sm90;

constexpr int kScanRegisters = 160;  // with fewer the compiler waits after every product of the scan

template <class T, class Scores, bool kWideGate>
__global__ void __launch_bounds__(kThreads, 1)
    chunk_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                 const __grid_constant__ States states, const __grid_constant__ View v_new,
                 const __grid_constant__ Help help, const __grid_constant__ Tiles tiles) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Call call{p, x, states, v_new, help, &tiles};
  using Preparation = Preparation<T, Scores, kWideGate>;
  const Ring ring{memory};
  if (threadIdx.x == 0) {
    start_ring(ring, kGroup);
    Preparation::start(memory);
    start_queue(memory);
    ptx::fence_barriers();
  }
  __syncthreads();  // barriers are there
  wait_for_stream();
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows it is one
  if (group < kScanners) {
    ptx::take_registers<kScanRegisters>();
    Scan<T> scan(call, memory);
    const unsigned total = scan.run();
    scan.finish_outputs();
    if (!help) return;
    if (threadIdx.x == 0)
      courier(ring, total, [&](const Task& task, unsigned stage) { store_image(help, task, stage); });
    if (threadIdx.x / 32 == kGroup / 32) scout(p, help, ring);
  } else {
    ptx::give_registers<256 - kScanRegisters>();
    Preparation(call, memory, group - kScanners).run();
  }
}

// Do rows fit accesses of 16 bytes?
bool aligned(const kda_tensor& t) {
  bool fits = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) fits = fits && t.stride[i] * dtype_size(t.dtype) % 16 == 0;
  return fits;
}

int64_t items_of(const ForwardProblem& p) { return (p.N + p.varlen) * p.HV; }

// Blocks that have items, where others can help them: not if there are many items for each anyway, or few chunks.
int64_t owners_with_help(const ForwardProblem& p) {
  const int64_t blocks = multiprocessors(p.args.exec.device_id);
  if (p.T < 8 * static_cast<int64_t>(kRows) || items_of(p) >= 4 * blocks) return 0;
  return std::min(items_of(p), blocks);
}

// Of kShares chunks, those for helpers: as many as there are blocks for it. Where all blocks have items, some get done first.
unsigned share_of(int64_t owners, int64_t blocks) {
  return static_cast<unsigned>(owners < blocks ? kShares * (blocks - owners) / blocks : kShares / 2);
}

}  // namespace

const char* forward_chunk_sm90_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const kda_inputs& in = a.in;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (!is_hopper(a.exec.device_id)) return "needs compute capability 9.0 (Hopper)";
  if (p.K != kSize || p.V != kSize) return "takes K = V = 128";
  if (in.q.dtype == KDA_F32 || in.q.dtype == KDA_F64) return "takes bf16 and f16 for q, k and v";
  if (a.o.dtype != in.q.dtype) return "writes o in the dtype of q";
  if (in.g.dtype != in.q.dtype && in.g.dtype != KDA_F32) return "takes g in f32 or the dtype of q";
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.Aqk) || present(a.Akk)) return "saves no Aqk and Akk";
  for (const kda_tensor* t : {&in.q, &in.k, &in.v, &in.g, &a.o})
    if (!aligned(*t)) return "needs rows at multiples of 16 bytes";
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT, &a.checkpoints, &a.h, &a.v_new})) return reason;
  return grid_why_not(p, 1, 1);
}

const char* forward_sm90_form(const ForwardProblem& p) {
  return anchored(p) ? "scores from one anchor a chunk, which bounded gates allow"
                     : "scores from an anchor every eight tokens, exact for any gate";
}

uint64_t forward_chunk_sm90_workspace(const ForwardProblem& p) {
  return owners_with_help(p) * (sizeof(Board) + kWindow * kImageBytes);
}

void forward_chunk_sm90(const ForwardProblem& p) {
  if (items_of(p) == 0) return;
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const int64_t blocks = multiprocessors(a.exec.device_id);
  Help help;
  if (const int64_t owners = owners_with_help(p)) {
    auto* workspace = static_cast<char*>(a.exec.workspace);
    help = {reinterpret_cast<Board*>(workspace + owners * kWindow * kImageBytes), workspace,
            static_cast<unsigned>(owners), share_of(owners, blocks)};
    KDA_CUDA(cudaMemsetAsync(help.boards, 0, owners * sizeof(Board), stream_of(a.exec)));
  }
  const dim3 grid(static_cast<unsigned>(help.boards ? blocks : std::min(items_of(p), blocks)));
  with_preparation(p, [&]<class T, class Scores, bool kWideGate>() {
    launch<chunk_kernel<T, Scores, kWideGate>>(a.exec, grid, kThreads, Shared::bytes, p, Tokens(p, a.in, a.o),
                                               States(a), view_of(a.v_new), help, Tiles(p));
  });
}

}  // namespace kda::cuda
