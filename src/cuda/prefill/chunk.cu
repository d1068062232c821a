// Forward by chunks of 32 tokens on tensor cores (math.md 4), for sm_80 and newer: K and V of 64 or 128, any gate.
//
//   prepare   a block for each chunk of a head: all that does not depend on the state, as f16 operands in the workspace
//   scan      a warp for 16 value columns of a head, with the state in registers: five products a chunk
//
// Per token and head at K = V = 128 in bf16, prepare reads 770 bytes and writes 916. The scan reads those and 256
// more, and writes 256. The workspace is images of all chunks if they fit kMostWorkspace. If not, the heads take
// turns, or, where few sequences are long, all heads together take some chunks at a time. Then the states in between
// are in the workspace as well.
#include "cuda/call/state_rows.h"
#include "cuda/prefill/chunk_launch.h"
#include "cuda/prefill/declarations.h"

namespace kda::cuda {
namespace {

constexpr int64_t kMostWorkspace = int64_t{1} << 30;

template <int kK>
void launch_prepare_of(const ForwardProblem& p, const Plan& plan, const Pass& pass, const Tokens& tokens, bool mirrored,
                       char* images) {
  const PrepareMemory memory(kK, tokens);
  const auto inputs = {&p.args.in.q, &p.args.in.k, &p.args.in.g};
  const int at_once = rows_at(16, inputs) ? 16 : rows_at(8, inputs) ? 8 : 0;
  launch<prepare_kernel<kK>>(p.args.exec, dim3(static_cast<unsigned>(plan.rows * pass.heads)), kPrepareThreads,
                             memory.bytes, p, tokens, pass, memory, at_once, mirrored, images);
}

template <int kK>
void launch_pass(const ForwardProblem& p, const Plan& plan, const Pass& pass, char* images) {
  const kda_forward_args& a = p.args;
  const Tokens tokens(p, a.in, a.o);
  launch_prepare(p, plan, pass, tokens, false, images);

  const int64_t columns = scan_columns(p, pass), tiles = p.V / columns;
  Dims part = p;
  part.HV = pass.heads, part.H = 1;
  const ScanPlaces places{view_of(a.v_new), between_passes(p, images + plan.image_bytes),
                          wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.checkpoints}),
                          wide_rows(p, h_layout(a), {&a.h}), rows_at(8, {&a.in.v, &a.o, &a.v_new})};
  launch<scan_kernel<kK>>(a.exec, Blocks::grid(part, tiles, 1), static_cast<int>(columns / kWarpColumns * 32),
                          kStages * Image<kK>::bytes, p, tokens, States(a), places, pass, Blocks(part, tiles),
                          static_cast<const char*>(images));
}

void run(const ForwardProblem& p, const Plan& plan, char* images) {
  each_pass(p, plan, false, [&](const Pass& pass) {
    p.K == 64 ? launch_pass<64>(p, plan, pass, images) : launch_pass<128>(p, plan, pass, images);
  });
}

}  // namespace

void launch_prepare(const ForwardProblem& p, const Plan& plan, const Pass& pass, const Tokens& tokens, bool mirrored,
                    char* images) {
  if (plan.rows == 0) return;
  if (p.K == 64) launch_prepare_of<64>(p, plan, pass, tokens, mirrored, images);
  else launch_prepare_of<128>(p, plan, pass, tokens, mirrored, images);
}

const char* prefill_chunk_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) return "takes K and V of 64 or 128";
  if (present(a.Aqk) || present(a.Akk)) return "has no scores of 64 tokens to save as Aqk or Akk";
  if (const char* reason = checkpoints_why_not(a)) return reason;
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(a.in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT, &a.checkpoints, &a.h, &a.v_new})) return reason;
  const Plan plan(p, kMostWorkspace);
  if (plan.rows * plan.heads > INT32_MAX) return "takes at most 2^31 chunks";
  return grid_why_not(p, p.V / kWarpColumns, 1);
}

const char* prefill_chunk_too_rough(const ForwardProblem& p) {
  return p.args.in.q.dtype == KDA_F32 ? "multiplies operands of 16 bits, where q, k and v have 32" : nullptr;
}

uint64_t prefill_chunk_workspace(const ForwardProblem& p) {
  const Plan plan(p, kMostWorkspace);
  return static_cast<uint64_t>(plan.image_bytes + plan.state_bytes);
}

void prefill_chunk(const ForwardProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Plan plan(p, kMostWorkspace);
  run(p, plan, static_cast<char*>(p.args.exec.workspace));
}

uint64_t forward_again_memory(const ForwardProblem& p, int64_t most_bytes) {
  const Plan plan(p, most_bytes);
  return static_cast<uint64_t>(plan.image_bytes + plan.state_bytes);
}

void forward_again(const ForwardProblem& p, int64_t most_bytes, char* memory) { run(p, Plan(p, most_bytes), memory); }

}  // namespace kda::cuda
