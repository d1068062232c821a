// Maps of segments (math.md 6), made by the kernels of forward and backward. Columns of a state are independent:
//   b   the final state of a forward that begins with zeros
//   M   the final state of a forward of K columns that begins with the identity, with v = 0
//   d   the gradient of the initial state in a backward without one of the final state: its reverse scan, and no more
// A row may have kernels that make M and b in one pass, and M and d in another one.
// Long sequences are mapped in pieces, whose maps are merged (pieces.h).
// The rows cuda_segment_* of the registry differ in whose forward and backward these are.
#pragma once
#include "cuda/segment/declarations.h"

namespace kda::cuda {

// Both parts of a map in one pass: the problem of b or d, and where M goes.
template <class Problem>
struct Maps {
  const Problem& problem;
  const kda_tensor& M;
};

// The kernels of forward and backward that a row has.
struct SegmentKernels {
  const char* (*forward_why_not)(const ForwardProblem& p);
  uint64_t (*forward_workspace)(const ForwardProblem& p);
  void (*forward)(const ForwardProblem& p);
  const char* (*backward_why_not)(const BackwardProblem& p);
  uint64_t (*backward_workspace)(const BackwardProblem& p);
  void (*backward)(const BackwardProblem& p);
  bool writes_outputs;  // these kernels always write o and dv, so they are given scratch memory for both

  // M and b, the final state of a forward, in one pass; M^T and d, the gradient of the initial state, in another one.
  // nullptr: a pass for each. takes_reverse_maps: whether the pass in reverse takes a call.
  void (*maps)(const ForwardProblem& p, const kda_tensor& M) = nullptr;
  void (*reverse_maps)(const BackwardProblem& p, const kda_tensor& M) = nullptr;
  bool (*takes_reverse_maps)(const BackwardProblem& p) = nullptr;

  const char* why_not(const ForwardProblem& p) const { return forward_why_not(p); }
  const char* why_not(const BackwardProblem& p) const { return backward_why_not(p); }
  uint64_t workspace(const ForwardProblem& p) const { return forward_workspace(p); }
  uint64_t workspace(const BackwardProblem& p) const { return backward_workspace(p); }
  const char* why_not(const Maps<ForwardProblem>& p) const { return forward_why_not(p.problem); }
  const char* why_not(const Maps<BackwardProblem>& p) const { return backward_why_not(p.problem); }
  uint64_t workspace(const Maps<ForwardProblem>&) const { return 0; }
  uint64_t workspace(const Maps<BackwardProblem>& p) const { return backward_workspace(p.problem); }
  void run(const Maps<ForwardProblem>& p) const { maps(p.problem, p.M); }
  void run(const Maps<BackwardProblem>& p) const { reverse_maps(p.problem, p.M); }
  void run(const ForwardProblem& p) const { forward(p); }
  void run(const BackwardProblem& p) const { backward(p); }
};

const char* segment_why_not(const SegmentMapProblem& p, const SegmentKernels& kernels);
uint64_t segment_workspace(const SegmentMapProblem& p, const SegmentKernels& kernels);
void run_segment(const SegmentMapProblem& p, const SegmentKernels& kernels);
std::string segment_form(const SegmentMapProblem& p, const SegmentKernels& kernels);

}  // namespace kda::cuda
