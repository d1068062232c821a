// Maps of segments by the kernels of Hopper: maps of sequences, and the backward's scan.
#include "cuda/backward/declarations.h"
#include "cuda/engine/declarations.h"
#include "cuda/segment/map.h"

namespace kda::cuda {
namespace {

constexpr SegmentKernels kKernels{.forward_why_not = hopper_prefill_pairs_why_not,
                                  .forward_workspace = hopper_prefill_pairs_workspace,
                                  .forward = hopper_prefill_pairs,
                                  .backward_why_not = hopper_backward_chunk_why_not,
                                  .backward_workspace = hopper_backward_chunk_workspace,
                                  .backward = hopper_backward_chunk,
                                  .writes_outputs = true,
                                  .maps = hopper_prefill_maps,
                                  .reverse_maps = hopper_backward_maps,
                                  .takes_reverse_maps = hopper_backward_takes_maps};

}  // namespace

const char* segment_hopper_why_not(const SegmentMapProblem& p) { return segment_why_not(p, kKernels); }
uint64_t segment_hopper_workspace(const SegmentMapProblem& p) { return segment_workspace(p, kKernels); }
void segment_hopper(const SegmentMapProblem& p) { run_segment(p, kKernels); }
std::string segment_hopper_form(const SegmentMapProblem& p) { return segment_form(p, kKernels); }

}  // namespace kda::cuda
