// Implementations of the registry whose kernels the emulator does not run yet. They decline every call. One that the
// emulator learns to run moves from this list to that of CMakeLists.txt; README.md says what each of them needs for
// that.
#include "cuda/cuda.h"
#include "error.h"

namespace kda::cuda {
namespace {

constexpr char kReason[] = "is not emulated";

[[noreturn]] void never() { throw Error(KDA_INTERNAL_ERROR, "a kernel that is not emulated was chosen"); }

}  // namespace

#define KDA_DECLINES(function, Problem) \
  const char* function(const Problem&) { return kReason; }
#define KDA_NEVER(function, Problem) \
  void function(const Problem&) { never(); }
#define KDA_NO_WORKSPACE(function, Problem) \
  uint64_t function(const Problem&) { never(); }

KDA_DECLINES(gate_why_not, GateProblem)
KDA_DECLINES(gate_why_not, GateBackwardProblem)
KDA_NEVER(gate, GateProblem)
KDA_NEVER(gate_backward, GateBackwardProblem)
KDA_NO_WORKSPACE(gate_backward_workspace, GateBackwardProblem)

KDA_DECLINES(conv_backward_why_not, ConvBackwardProblem)
KDA_NEVER(conv_backward, ConvBackwardProblem)
KDA_NO_WORKSPACE(conv_backward_workspace, ConvBackwardProblem)

KDA_DECLINES(stage_why_not, StageProblem<kda_stage_chunk_intra_args>)
KDA_DECLINES(stage_why_not, StageProblem<kda_stage_recompute_w_u_args>)
KDA_NEVER(stage, StageProblem<kda_stage_chunk_intra_args>)
KDA_NEVER(stage, StageProblem<kda_stage_recompute_w_u_args>)

KDA_DECLINES(stages_prefill_f32_why_not, PrefillF32Problem)
KDA_NEVER(stages_prefill_f32, PrefillF32Problem)
KDA_NO_WORKSPACE(stages_prefill_f32_workspace, PrefillF32Problem)

}  // namespace kda::cuda
