// The tables of implementations, an operator after the other. How one is chosen: choose.cc.
#include "registry.h"

#include "contract/prefill_f32.h"
#include "contract/stages.h"
#include "cpu/cpu.h"
#include "cpu/stages.h"
#include "cuda/backward/declarations.h"
#include "cuda/blackwell_stages/declarations.h"
#include "cuda/conv/declarations.h"
#include "cuda/cuda.h"
#include "cuda/decode/declarations.h"
#include "cuda/drafts/declarations.h"
#include "cuda/engine/declarations.h"
#include "cuda/gate/declarations.h"
#include "cuda/norm/declarations.h"
#include "cuda/prefill/declarations.h"
#include "cuda/segment/declarations.h"
#include "cuda/stages/declarations.h"
#include "reference/reference.h"
#include "reference/stages.h"

namespace kda {
namespace {

template <class P>
const char* on_cpu(const P& p) {
  return p.args.exec.device == KDA_CPU ? nullptr : "runs on the CPU only";
}

template <class P>
uint64_t no_workspace(const P&) {
  return 0;
}

// The CPU kernels compute in f32; only the reference reads and writes f64.
template <class P>
const char* cpu_without_f64(const P& p) {
  if (const char* reason = on_cpu(p)) return reason;
  return has_f64(p) ? "float64 runs on `reference` only" : nullptr;
}

template <class P>
const char* unless_blackwell_is_asked_for(const P&) {
  return cuda::blackwell_unsuited();
}
// For kernels with Hopper's scores.
template <auto kUnsuited>
const char* unsuited_or_rough(const ForwardProblem& p) {
  if (const char* reason = kUnsuited(p)) return reason;
  return cuda::hopper_prefill_too_rough(p);
}

}  // namespace

template <>
std::span<const Implementation<ForwardProblem>> implementations() {
  static constexpr Implementation<ForwardProblem> table[] = {
      {"cuda_blackwell_prefill_segments", "src/cuda/engine/blackwell_prefill_segments.cu",
       "segments of few long sequences at once, joined by their maps, for Blackwell; emulated, never run on a GPU",
       cuda::blackwell_prefill_segments_why_not, cuda::blackwell_prefill_segments_workspace,
       cuda::blackwell_prefill_segments, unsuited_or_rough<cuda::blackwell_prefill_segments_unsuited>},
      {"cuda_blackwell_prefill", "src/cuda/engine/blackwell_prefill.cu",
       "chunks of 32 tokens by pairs of blocks, for Blackwell; emulated, never run on a GPU",
       cuda::blackwell_prefill_why_not, cuda::blackwell_prefill_workspace, cuda::blackwell_prefill,
       unsuited_or_rough<unless_blackwell_is_asked_for<ForwardProblem>>},
      {"cuda_hopper_prefill_segments", "src/cuda/engine/hopper_prefill_segments.cu",
       "segments of few long sequences at once, joined by their maps, for Hopper",
       cuda::hopper_prefill_segments_why_not, cuda::hopper_prefill_segments_workspace, cuda::hopper_prefill_segments,
       unsuited_or_rough<cuda::hopper_prefill_segments_unsuited>, cuda::hopper_prefill_form},
      {"cuda_hopper_prefill_pairs", "src/cuda/engine/hopper_prefill_pairs.cu",
       "chunks of 32 tokens, prepared and scanned by pairs of blocks, for Hopper", cuda::hopper_prefill_pairs_why_not,
       cuda::hopper_prefill_pairs_workspace, cuda::hopper_prefill_pairs, cuda::hopper_prefill_too_rough,
       cuda::hopper_prefill_form},
      {"cuda_prefill_chunk", "src/cuda/prefill/chunk.cu", "chunks of 32 tokens on tensor cores, for sm_80 and newer",
       cuda::prefill_chunk_why_not, cuda::prefill_chunk_workspace, cuda::prefill_chunk, cuda::prefill_chunk_too_rough},
      {"cuda_prefill_recurrent", "src/cuda/prefill/recurrent.cu",
       "token by token with the state in registers, for sm_80 and newer", cuda::prefill_recurrent_why_not, no_workspace,
       cuda::prefill_recurrent},
      {"cpu_chunk", "src/cpu/chunk_forward.cc", "chunks of 64 tokens as matrix products, SIMD and threads",
       cpu::chunk_forward_why_not, cpu::chunk_forward_workspace, cpu::chunk_forward},
      {"cpu_recurrent", "src/cpu/recurrent.cc", "token by token, SIMD and threads", cpu::recurrent_forward_why_not,
       cpu::recurrent_forward_workspace, cpu::recurrent_forward},
      {"reference", "src/reference/forward.cc", "float64 token recurrence, the specification; allocates", on_cpu,
       no_workspace, reference::forward},
  };
  return table;
}

template <>
std::span<const Implementation<BackwardProblem>> implementations() {
  static constexpr Implementation<BackwardProblem> table[] = {
      {"cuda_hopper_backward_chunk", "src/cuda/backward/hopper_backward_chunk.cu",
       "the scan of cuda_backward_chunk, and the rest by wgmma from tiles of the copy engine, for Hopper",
       cuda::hopper_backward_chunk_why_not, cuda::hopper_backward_chunk_workspace, cuda::hopper_backward_chunk,
       cuda::backward_chunk_too_rough},
      {"cuda_backward_chunk", "src/cuda/backward/chunk.cu",
       "chunks on tensor cores: forward again, a reverse scan, the rest in parallel, for sm_80 and newer",
       cuda::backward_chunk_why_not, cuda::backward_chunk_workspace, cuda::backward_chunk,
       cuda::backward_chunk_too_rough},
      {"cuda_backward_recurrent", "src/cuda/backward/recurrent.cu",
       "token by token in f32, any size, slow, for sm_80 and newer", cuda::backward_recurrent_why_not,
       cuda::backward_recurrent_workspace, cuda::backward_recurrent},
      {"cpu_chunk", "src/cpu/chunk_backward.cc", "chunks of 64 tokens as matrix products, SIMD and threads",
       cpu_without_f64, cpu::chunk_backward_workspace, cpu::chunk_backward},
      {"reference", "src/reference/backward.cc", "float64 reverse mode of the token recurrence; allocates", on_cpu,
       no_workspace, reference::backward},
  };
  return table;
}

template <>
std::span<const Implementation<DecodeProblem>> implementations() {
  static constexpr Implementation<DecodeProblem> table[] = {
      {"cuda_decode_sweep", "src/cuda/decode/sweep.cu",
       "one token, a head a block, the next columns on their way, for sm_80 and newer", cuda::decode_sweep_why_not,
       cuda::decode_workspace, cuda::decode_sweep, cuda::decode_sweep_unsuited},
      {"cuda_decode", "src/cuda/decode/decode.cu", "token by token with the state in registers, for sm_80 and newer",
       cuda::decode_why_not, cuda::decode_workspace, cuda::decode, nullptr, cuda::decode_form},
      {"cpu_recurrent", "src/cpu/recurrent.cc", "token by token, one pass over the state, SIMD and threads",
       cpu_without_f64, cpu::decode_workspace, cpu::decode},
      {"reference", "src/reference/forward.cc", "float64 token recurrence, the specification; allocates", on_cpu,
       no_workspace, reference::decode},
  };
  return table;
}

template <>
std::span<const Implementation<VerifyProblem>> implementations() {
  static constexpr Implementation<VerifyProblem> table[] = {
      {"cuda_drafts_recurrent", "src/cuda/drafts/recurrent.cu",
       "chains of few drafts, one after another from a state in registers, for sm_80 and newer",
       cuda::drafts_recurrent_why_not, no_workspace, cuda::drafts_recurrent, nullptr, cuda::drafts_recurrent_form},
      {"cuda_drafts_mma", "src/cuda/drafts/mma.cu",
       "drafts as matrix products on tensor cores (3 x tf32), for sm_80 and newer", cuda::drafts_mma_why_not,
       no_workspace, cuda::drafts_mma, nullptr, cuda::drafts_mma_form},
      {"cuda_drafts_general", "src/cuda/drafts/general.cu", "drafts from a state in registers, for sm_80 and newer",
       cuda::drafts_general_why_not, no_workspace, cuda::drafts_general},
      {"cpu_verify", "src/cpu/speculation.cc", "drafts from a frozen state, one pass over it, SIMD and threads",
       cpu_without_f64, cpu::verify_workspace, cpu::verify},
      {"reference", "src/reference/speculation.cc", "float64, token recurrence on copies of the state; allocates",
       on_cpu, no_workspace, reference::verify},
  };
  return table;
}

template <>
std::span<const Implementation<FlushProblem>> implementations() {
  static constexpr Implementation<FlushProblem> table[] = {
      {"cuda_drafts_flush_registers", "src/cuda/drafts/flush_registers.cu",
       "rank-m update of wide states in registers, for sm_80 and newer", cuda::drafts_flush_registers_why_not,
       no_workspace, cuda::drafts_flush_registers, nullptr, cuda::drafts_flush_registers_form},
      {"cuda_drafts_general", "src/cuda/drafts/general.cu",
       "rank-m update in one pass over the state, for sm_80 and newer", cuda::drafts_general_why_not, no_workspace,
       cuda::drafts_general},
      {"cpu_flush", "src/cpu/speculation.cc", "rank-m update in one pass over the state, SIMD and threads",
       cpu_without_f64, cpu::flush_workspace, cpu::flush},
      {"reference", "src/reference/speculation.cc", "float64, recorded tokens applied one by one; allocates", on_cpu,
       no_workspace, reference::flush},
  };
  return table;
}

template <>
std::span<const Implementation<FlushVerifyProblem>> implementations() {
  static constexpr Implementation<FlushVerifyProblem> table[] = {
      {"cuda_drafts_recurrent", "src/cuda/drafts/recurrent.cu",
       "flush, then chains of few drafts one after another, for sm_80 and newer", cuda::drafts_recurrent_why_not,
       no_workspace, cuda::drafts_recurrent, nullptr, cuda::drafts_recurrent_form},
      {"cuda_drafts_mma", "src/cuda/drafts/mma.cu",
       "flush, then drafts on tensor cores (3 x tf32), one pass, for sm_80 and newer", cuda::drafts_mma_why_not,
       no_workspace, cuda::drafts_mma, nullptr, cuda::drafts_mma_form},
      {"cuda_drafts_general", "src/cuda/drafts/general.cu",
       "flush and verify in one pass over the state, for sm_80 and newer", cuda::drafts_general_why_not, no_workspace,
       cuda::drafts_general},
      {"cpu_flush_verify", "src/cpu/speculation.cc", "flush and verify in one pass over the state, SIMD and threads",
       cpu_without_f64, cpu::flush_verify_workspace, cpu::flush_verify},
      {"reference", "src/reference/speculation.cc", "float64, flush, then verify; allocates", on_cpu, no_workspace,
       reference::flush_verify},
  };
  return table;
}

template <>
std::span<const Implementation<SegmentMapProblem>> implementations() {
  static constexpr Implementation<SegmentMapProblem> table[] = {
      {"cuda_segment_hopper", "src/cuda/segment/hopper.cu",
       "final states of Hopper's forward from the identity and from zeros, and its reverse scan",
       cuda::segment_hopper_why_not, cuda::segment_hopper_workspace, cuda::segment_hopper,
       cuda::segment_chunk_too_rough, cuda::segment_hopper_form},
      {"cuda_segment_chunk", "src/cuda/segment/chunk.cu",
       "final states of the forward by chunks, and its reverse scan, on tensor cores, for sm_80 and newer",
       cuda::segment_chunk_why_not, cuda::segment_chunk_workspace, cuda::segment_chunk, cuda::segment_chunk_too_rough,
       cuda::segment_chunk_form},
      {"cuda_segment_recurrent", "src/cuda/segment/recurrent.cu",
       "final states token by token, and the reverse, in f32, any size, for sm_80 and newer",
       cuda::segment_recurrent_why_not, cuda::segment_recurrent_workspace, cuda::segment_recurrent, nullptr,
       cuda::segment_recurrent_form},
      {"cpu_segment", "src/cpu/segment.cc", "chunks of 64 tokens as matrix products, SIMD and threads", cpu_without_f64,
       cpu::segment_map_workspace, cpu::segment_map},
      {"reference", "src/reference/segment.cc", "float64 token recurrence, the specification; allocates", on_cpu,
       no_workspace, reference::segment_map},
  };
  return table;
}

template <>
std::span<const Implementation<SegmentMergeProblem>> implementations() {
  static constexpr Implementation<SegmentMergeProblem> table[] = {
      {"cuda_segment_merge", "src/cuda/segment/merge.cu",
       "columns of a head a block, products on tensor cores (3 x tf32), for sm_80 and newer",
       cuda::segment_merge_why_not, no_workspace, cuda::segment_merge},
      {"cpu_segment", "src/cpu/segment.cc", "matrix products, SIMD and threads", cpu_without_f64,
       cpu::segment_merge_workspace, cpu::segment_merge},
      {"reference", "src/reference/segment.cc", "float64, the specification; allocates", on_cpu, no_workspace,
       reference::segment_merge},
  };
  return table;
}

template <>
std::span<const Implementation<GateProblem>> implementations() {
  static constexpr Implementation<GateProblem> table[] = {
      {"cuda_gate", "src/cuda/gate/gate.cu", "elementwise kernel for sm_80 and newer", cuda::gate_why_not, no_workspace,
       cuda::gate},
      {"cpu_gate", "src/cpu/gate.cc", "SIMD and threads", cpu_without_f64, no_workspace, cpu::gate},
      {"reference", "src/reference/forward.cc", "float64, the specification", on_cpu, no_workspace, reference::gate},
  };
  return table;
}

template <>
std::span<const Implementation<GateBackwardProblem>> implementations() {
  static constexpr Implementation<GateBackwardProblem> table[] = {
      {"cuda_gate", "src/cuda/gate/gate.cu", "elementwise kernel and a two-level reduction, for sm_80 and newer",
       cuda::gate_why_not, cuda::gate_backward_workspace, cuda::gate_backward},
      {"cpu_gate", "src/cpu/gate.cc", "SIMD and threads", cpu_without_f64, cpu::gate_backward_workspace,
       cpu::gate_backward},
      {"reference", "src/reference/backward.cc", "float64, the specification; allocates", on_cpu, no_workspace,
       reference::gate_backward},
  };
  return table;
}

template <>
std::span<const Implementation<NormGateProblem>> implementations() {
  static constexpr Implementation<NormGateProblem> table[] = {
      {"cuda_norm_gate", "src/cuda/norm/gate.cu", "rows over lanes of a warp, for sm_80 and newer",
       cuda::norm_gate_why_not, no_workspace, cuda::norm_gate, nullptr, cuda::norm_gate_form},
      {"cpu_norm_gate", "src/cpu/norm_gate.cc", "SIMD and threads", cpu_without_f64, no_workspace, cpu::norm_gate},
      {"reference", "src/reference/norm_gate.cc", "float64, the specification", on_cpu, no_workspace,
       reference::norm_gate},
  };
  return table;
}

template <>
std::span<const Implementation<NormGateBackwardProblem>> implementations() {
  static constexpr Implementation<NormGateBackwardProblem> table[] = {
      {"cuda_norm_gate", "src/cuda/norm/gate.cu",
       "rows over lanes of a warp and a two-level reduction, for sm_80 and newer", cuda::norm_gate_why_not,
       cuda::norm_gate_backward_workspace, cuda::norm_gate_backward, nullptr, cuda::norm_gate_form},
      {"cpu_norm_gate", "src/cpu/norm_gate.cc", "SIMD and threads", cpu_without_f64, cpu::norm_gate_backward_workspace,
       cpu::norm_gate_backward},
      {"reference", "src/reference/norm_gate.cc", "float64, the specification; allocates", on_cpu, no_workspace,
       reference::norm_gate_backward},
  };
  return table;
}

template <>
std::span<const Implementation<ConvProblem>> implementations() {
  static constexpr Implementation<ConvProblem> table[] = {
      {"cuda_conv", "src/cuda/conv/conv.cu",
       "channels over threads, a sequence's first tokens beside its state, for sm_80 and newer", cuda::conv_why_not,
       no_workspace, cuda::conv},
      {"cpu_conv", "src/cpu/conv.cc", "channels as vectors, SIMD and threads", cpu_without_f64, no_workspace,
       cpu::conv},
      {"reference", "src/reference/conv.cc", "float64, the specification; allocates", on_cpu, no_workspace,
       reference::conv},
  };
  return table;
}

template <>
std::span<const Implementation<ConvBackwardProblem>> implementations() {
  static constexpr Implementation<ConvBackwardProblem> table[] = {
      {"cuda_conv_backward", "src/cuda/conv/backward.cu",
       "channels over threads and a three-level reduction, for sm_80 and newer", cuda::conv_backward_why_not,
       cuda::conv_backward_workspace, cuda::conv_backward},
      {"cpu_conv", "src/cpu/conv_backward.cc", "channels as vectors, SIMD and threads", cpu_without_f64,
       cpu::conv_backward_workspace, cpu::conv_backward},
      {"reference", "src/reference/conv.cc", "float64, the specification; allocates", on_cpu, no_workspace,
       reference::conv_backward},
  };
  return table;
}

namespace {

// A stage's row on CUDA, and the files of this row and of the CPU's.
struct StageRows {
  const char *cuda, *cuda_file, *cpu_file;
};

template <StageArgs Args, const StageRows& kRows>
constexpr Implementation<StageProblem<Args>> kStageOnCuda{
    kRows.cuda,
    kRows.cuda_file,
    "a chunk and head a block (the scan: a sequence, head and tile of V), for sm_80 and newer",
    cuda::stage_why_not,
    no_workspace,
    cuda::stage};
template <StageArgs Args, const StageRows& kRows>
constexpr Implementation<StageProblem<Args>> kStageOnCpu{
    "cpu_chunk",
    kRows.cpu_file,
    "a chunk and head a task (scans: a sequence, head and tile of V), SIMD and threads",
    cpu_without_f64,
    cpu::stage_workspace,
    cpu::stage};
template <StageArgs Args>
constexpr Implementation<StageProblem<Args>> kStageOracle{
    "reference",  "src/reference/stages.cc", "float64, chunk by chunk as the formulas read; allocates", on_cpu,
    no_workspace, reference::stage};

// first: rows in front of those of all stages.
template <StageArgs Args, const StageRows& kRows, const Implementation<StageProblem<Args>>&... kFirst>
std::span<const Implementation<StageProblem<Args>>> stage_table() {
  static constexpr Implementation<StageProblem<Args>> table[] = {kFirst..., kStageOnCuda<Args, kRows>,
                                                                 kStageOnCpu<Args, kRows>, kStageOracle<Args>};
  return table;
}

constexpr Implementation<StageProblem<kda_stage_bwd_wy_dqkg_args>> kWyOnHopper{
    "cuda_hopper_stages_wy_dqkg",
    "src/cuda/stages/hopper_stages_wy_dqkg.cu",
    "a chunk and head a pair of CTAs, TMA and wgmma, bf16 and K = V = 128, for Hopper",
    cuda::hopper_stages_wy_dqkg_why_not,
    no_workspace,
    cuda::hopper_stages_wy_dqkg};
constexpr Implementation<StageProblem<kda_stage_delta_h_args>> kDeltaHOnBlackwell{
    "cuda_blackwell_stages_delta_h",
    "src/cuda/blackwell_stages/delta_h.cu",
    "a sequence, head and 64 columns of V a block, TMA and tcgen05, bf16, for Blackwell; emulated, never run on a GPU",
    cuda::blackwell_stages_delta_h_why_not,
    no_workspace,
    cuda::blackwell_stages_delta_h,
    unless_blackwell_is_asked_for};
constexpr Implementation<StageProblem<kda_stage_bwd_delta_h_args>> kBwdDeltaHOnBlackwell{
    "cuda_blackwell_stages_bwd_delta_h",
    "src/cuda/blackwell_stages/bwd_delta_h.cu",
    "a sequence, head and 64 columns of V a block, TMA and tcgen05, bf16, for Blackwell; emulated, never run on a GPU",
    cuda::blackwell_stages_bwd_delta_h_why_not,
    no_workspace,
    cuda::blackwell_stages_bwd_delta_h,
    unless_blackwell_is_asked_for};
constexpr Implementation<StageProblem<kda_stage_fwd_o_args>> kFwdOOnBlackwell{
    "cuda_blackwell_stages_fwd_o",
    "src/cuda/blackwell_stages/fwd_o.cu",
    "a chunk and head a block, TMA and tcgen05, bf16, for Blackwell; emulated, never run on a GPU",
    cuda::blackwell_stages_fwd_o_why_not,
    no_workspace,
    cuda::blackwell_stages_fwd_o,
    unless_blackwell_is_asked_for};
constexpr Implementation<StageProblem<kda_stage_bwd_wy_dqkg_args>> kWyOnBlackwell{
    "cuda_blackwell_stages_wy_dqkg",
    "src/cuda/blackwell_stages/wy_dqkg.cu",
    "warps that copy, multiply and finish chunks of heads, bf16, for Blackwell; emulated, never run on a GPU",
    cuda::blackwell_stages_wy_dqkg_why_not,
    no_workspace,
    cuda::blackwell_stages_wy_dqkg,
    unless_blackwell_is_asked_for};

}  // namespace

// The names of its files: src/cuda/stages/<on_cuda>.cu, src/cpu/stages_<on_cpu>.cc.
// What follows them: rows in front.
#define KDA_STAGE(stage, on_cuda, on_cpu, ...)                                                           \
  static constexpr StageRows rows_of_##stage{"cuda_stages_" #on_cuda, "src/cuda/stages/" #on_cuda ".cu", \
                                             "src/cpu/stages_" #on_cpu ".cc"};                           \
  template <>                                                                                            \
  std::span<const Implementation<StageProblem<kda_stage_##stage##_args>>> implementations() {            \
    return stage_table<kda_stage_##stage##_args, rows_of_##stage __VA_OPT__(, ) __VA_ARGS__>();          \
  }
KDA_STAGE(cumsum, cumsum, forward)
KDA_STAGE(chunk_intra, chunk_intra, forward)
KDA_STAGE(recompute_w_u, chunk_intra, forward)
KDA_STAGE(delta_h, delta_h, forward, kDeltaHOnBlackwell)
KDA_STAGE(fwd_o, fwd_o, forward, kFwdOOnBlackwell)
KDA_STAGE(bwd_local, backward, backward)
KDA_STAGE(bwd_delta_h, backward, backward, kBwdDeltaHOnBlackwell)
KDA_STAGE(bwd_wy_dqkg, backward, backward, kWyOnBlackwell, kWyOnHopper)
KDA_STAGE(bwd_intra, backward, backward)
KDA_STAGE(cumsum_backward, backward, backward)
#undef KDA_STAGE

template <>
std::span<const Implementation<PrefillF32Problem>> implementations() {
  static constexpr Implementation<PrefillF32Problem> table[] = {
      {"cuda_stages_prefill_f32", "src/cuda/stages/prefill_f32.cu",
       "stages of chunks of 64 tokens on tensor cores (3 x tf32), for sm_80 and newer",
       cuda::stages_prefill_f32_why_not, cuda::stages_prefill_f32_workspace, cuda::stages_prefill_f32},
      {"cpu_chunk", "src/cpu/prefill_f32.cc", "chunks of 32 or 64 tokens as matrix products, SIMD and threads",
       cpu_without_f64, cpu::prefill_f32_workspace, cpu::prefill_f32},
      {"reference", "src/reference/prefill_f32.cc", "float64 token recurrence, the specification; allocates", on_cpu,
       no_workspace, reference::prefill_f32},
  };
  return table;
}

}  // namespace kda
