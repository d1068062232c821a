// Maps of segments token by token in f32, for sm_80 and newer: any K and V, any gate.
#include "cuda/backward/declarations.h"
#include "cuda/prefill/declarations.h"
#include "cuda/segment/map.h"

namespace kda::cuda {
namespace {

constexpr SegmentKernels kKernels{.forward_why_not = prefill_recurrent_why_not,
                                  .forward_workspace = [](const ForwardProblem&) -> uint64_t { return 0; },
                                  .forward = prefill_recurrent,
                                  .backward_why_not = backward_recurrent_why_not,
                                  .backward_workspace = backward_recurrent_workspace,
                                  .backward = backward_recurrent,
                                  .writes_outputs = false};

}  // namespace

const char* segment_recurrent_why_not(const SegmentMapProblem& p) { return segment_why_not(p, kKernels); }
uint64_t segment_recurrent_workspace(const SegmentMapProblem& p) { return segment_workspace(p, kKernels); }
void segment_recurrent(const SegmentMapProblem& p) { run_segment(p, kKernels); }
std::string segment_recurrent_form(const SegmentMapProblem& p) { return segment_form(p, kKernels); }

}  // namespace kda::cuda
