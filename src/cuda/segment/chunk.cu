// Maps of segments by chunks on tensor cores, for sm_80 and newer: K and V of 64 or 128, any gate.
#include "cuda/backward/declarations.h"
#include "cuda/prefill/declarations.h"
#include "cuda/segment/map.h"

namespace kda::cuda {
namespace {

constexpr SegmentKernels kKernels{.forward_why_not = prefill_chunk_why_not,
                                  .forward_workspace = prefill_chunk_workspace,
                                  .forward = prefill_chunk,
                                  .backward_why_not = backward_chunk_why_not,
                                  .backward_workspace = backward_chunk_workspace,
                                  .backward = backward_chunk,
                                  .writes_outputs = false};

}  // namespace

const char* segment_chunk_why_not(const SegmentMapProblem& p) { return segment_why_not(p, kKernels); }
uint64_t segment_chunk_workspace(const SegmentMapProblem& p) { return segment_workspace(p, kKernels); }
void segment_chunk(const SegmentMapProblem& p) { run_segment(p, kKernels); }
std::string segment_chunk_form(const SegmentMapProblem& p) { return segment_form(p, kKernels); }

const char* segment_chunk_too_rough(const SegmentMapProblem& p) {
  return p.args.in.q.dtype == KDA_F32 ? "multiplies operands of 16 bits, where q, k and v have 32" : nullptr;
}

}  // namespace kda::cuda
