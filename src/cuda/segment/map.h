// Maps of segments (math.md 6), made by the kernels of forward and backward. Columns of a state are independent:
//   b   the final state of a forward that begins with zeros
//   M   the final state of a forward of K columns that begins with the identity, with v = 0
//   d   the gradient of the initial state in a backward without one of the final state: its reverse scan, and no more
// Long sequences of few heads are mapped in pieces, whose maps are merged (pieces.h).
// The rows cuda_segment_* of the registry differ in whose forward and backward these are.
#pragma once
#include "cuda/cuda.h"

namespace kda::cuda {

// The kernels of forward and backward that a row has.
struct SegmentKernels {
  const char* (*forward_why_not)(const ForwardProblem& p);
  uint64_t (*forward_workspace)(const ForwardProblem& p);
  void (*forward)(const ForwardProblem& p);
  const char* (*backward_why_not)(const BackwardProblem& p);
  uint64_t (*backward_workspace)(const BackwardProblem& p);
  void (*backward)(const BackwardProblem& p);
  bool writes_outputs;  // they need a place for outputs and dv, which nobody reads; others take a call without

  const char* why_not(const ForwardProblem& p) const { return forward_why_not(p); }
  const char* why_not(const BackwardProblem& p) const { return backward_why_not(p); }
  uint64_t workspace(const ForwardProblem& p) const { return forward_workspace(p); }
  uint64_t workspace(const BackwardProblem& p) const { return backward_workspace(p); }
  void run(const ForwardProblem& p) const { forward(p); }
  void run(const BackwardProblem& p) const { backward(p); }
};

const char* segment_why_not(const SegmentMapProblem& p, const SegmentKernels& kernels);
uint64_t segment_workspace(const SegmentMapProblem& p, const SegmentKernels& kernels);
void run_segment(const SegmentMapProblem& p, const SegmentKernels& kernels);

}  // namespace kda::cuda
