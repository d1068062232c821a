// Rolls on the state of the convolution in front of drafts by the accepted ones. A thread has a channel of a request
// (and layer).
#include "contract/drafts.h"
#include "cuda/call/launch.h"
#include "cuda/conv/front.h"
#include "cuda/drafts/declarations.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128;

// The call that the state rolls on by.
struct Call {
  enum { kDecode, kFlush, kFlushVerify } kind;
  union {
    DecodeProblem decode;
    FlushProblem flush;
    FlushVerifyProblem flush_verify;
  };
  explicit Call(const DecodeProblem& p) : kind(kDecode), decode(p) {}
  explicit Call(const FlushProblem& p) : kind(kFlush), flush(p) {}
  explicit Call(const FlushVerifyProblem& p) : kind(kFlushVerify), flush_verify(p) {}

  __device__ Sequence roll(int64_t n) const {
    return kind == kDecode ? roll_of(decode, n) : kind == kFlush ? roll_of(flush, n) : roll_of(flush_verify, n);
  }
};
struct Rolled {
  kda_tensor x, state, parents;
  bool layered;  // x and state have a leading dimension
  unsigned layers;
};

__global__ void roll_kernel(const __grid_constant__ Rolled r, const unsigned N, const LayeredBlocks blocks,
                            const __grid_constant__ Call call) {
  let_next_start();
  wait_for_stream();
  const Place at(blocks);
  if (at.layer >= r.layers) return;  // the grid's last rows
  const kda_tensor x = r.layered ? layer_of(r.x, at.layer) : r.x;
  const kda_tensor state = r.layered ? layer_of(r.state, at.layer) : r.state;
  const int64_t d = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x, keep = state.shape[2];
  if (at.n >= N || d >= x.shape[2]) return;
  const Sequence s = call.roll(at.n);
  if (s.length <= 0 || s.slot < 0 || s.slot >= state.shape[0]) return;
  ConvTaps taps;
  taps.fetch(x, state, rows_until(r.parents, keep, at.n, s.length - 1 + keep, keep), s, s.slot, d);
  float xx[kTaps];
  taps.values(x, state, xx);
  store_state<1>(state, s.slot, d, {{xx[1]}, {xx[2]}, {xx[3]}});
}

template <class P>
void roll(const P& p, const Rolled& r) {
  if (!present(r.x) || !present(r.state) || p.N * r.layers == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const int64_t D = r.x.shape[r.x.ndim - 1];
  dim3 grid = Blocks::grid(p, 1, r.layers);
  grid.x = static_cast<unsigned>((D + kThreads - 1) / kThreads);
  launch<roll_kernel>(p.args.exec, grid, kThreads, 0, r, static_cast<unsigned>(p.N), LayeredBlocks(p, 1), Call(p));
}

}  // namespace

void roll_convolution(const FlushProblem& p) {
  roll(p, {p.args.conv_x, p.args.conv_state, p.args.parents, p.args.conv_x.ndim == 4, static_cast<unsigned>(p.layers)});
}
void roll_convolution(const FlushVerifyProblem& p) {
  roll(p, {p.args.last_conv_x, p.args.conv.state, p.args.last_parents, false, 1});
}

}  // namespace kda::cuda
