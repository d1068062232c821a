// How the two kernels of cuda_prefill_chunk are launched: which part of a call at a time. Forward and backward share
// it.
#pragma once
#include "cuda/call/launch.h"
#include "cuda/call/tma.h"
#include "cuda/prefill/chunk_prepare.h"
#include "cuda/prefill/chunk_scan.h"

namespace kda::cuda {

constexpr int64_t kEnough = 32;  // pairs of sequence and head that keep the scan busy: 256 warps of V = 128

// How a call is cut into pairs of launches.
struct Plan {
  int64_t heads, span, rows;  // of a pass: heads, chunks of a sequence, rows of images
  int64_t passes;             // over chunks
  bool packed;
  int64_t image_bytes, state_bytes;

  // most_bytes: of images at a time.
  Plan(const ForwardProblem& p, int64_t most_bytes) {
    const int64_t image = p.K == 64 ? Image<64>::bytes : Image<128>::bytes, most = most_bytes / image;
    const int64_t most_begun = has_openings(p.args) ? kChunk - 1 : 0;
    const int64_t chunks = std::max<int64_t>((p.T + most_begun + kRows - 1) / kRows, 1);
    heads = p.HV, span = chunks, packed = p.varlen;
    rows = packed ? p.T / kRows + p.N * Pass::more_rows(p) : p.N * chunks;
    if (rows * heads > most) {
      heads = std::max<int64_t>(most / rows, 1);
      if (heads * p.N < std::min(p.N * p.HV, kEnough)) {
        // An even number: scans choose units at multiples of 64 tokens and where a pass begins, which must be one of
        // them.
        heads = p.HV, span = std::min<int64_t>(std::max<int64_t>(most / (p.N * heads) / 2 * 2, 2), chunks);
        packed = false, rows = p.N * span;
      }
    }
    if (p.T == 0) rows = 0;
    passes = (chunks + span - 1) / span;
    image_bytes = rows * heads * image;
    state_bytes = passes > 1 ? p.N * p.HV * p.V * p.K * 4 : 0;
  }
};

// Makes the images of a pass, mirrored for backward.
void launch_prepare(const ForwardProblem& p, const Plan& plan, const Pass& pass, const Tokens& tokens, bool mirrored,
                    char* images);

// Value columns of a block of the scan. With enough heads, they are all columns of a head, which share images;
// otherwise warps spread over the GPU.
inline int64_t scan_columns(const ForwardProblem& p, const Pass& pass) {
  int64_t columns = p.V;
  while (columns > kWarpColumns && 2 * p.N * pass.heads * (p.V / columns) <= multiprocessors(p.args.exec.device_id))
    columns /= 2;
  return columns;
}

// Where f32 states are between passes, [N][HV][V][K].
inline TypedView between_passes(const ForwardProblem& p, char* data) {
  return {View{.data = data,
               .stride0 = p.HV * p.V * p.K * 4,
               .stride1 = static_cast<uint32_t>(p.V * p.K * 4),
               .stride2 = static_cast<uint32_t>(p.K * 4)}};
}

// Calls run(pass) for all passes, in order or from the last to the first.
template <class Run>
void each_pass(const ForwardProblem& p, const Plan& plan, bool reversed, const Run& run) {
  for (int64_t head = 0; head < p.HV; head += plan.heads)
    for (int64_t i = 0; i < plan.passes; ++i) {
      const int64_t first = (reversed ? plan.passes - 1 - i : i) * plan.span;
      run(Pass(p, head, std::min(plan.heads, p.HV - head), first, plan.span, plan.packed));
    }
}

// For backward: the bytes that forward needs at `memory` for images and states between passes, and forward itself. o
// may be absent.
uint64_t forward_again_memory(const ForwardProblem& p, int64_t most_bytes);
void forward_again(const ForwardProblem& p, int64_t most_bytes, char* memory);

}  // namespace kda::cuda
