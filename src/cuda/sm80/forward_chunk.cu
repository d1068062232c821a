// Forward by chunks of 32 tokens on tensor cores (math.md 4), for sm_80 and newer: K and V of 64 or 128, any gate.
//
//   prepare   a block a chunk of a head: all that does not depend on the state, as f16 operands in the workspace
//   scan      a warp 16 value columns of a head, the state in registers: five products a chunk
//
// Per token and head at K = V = 128 in bf16: prepare reads 770 bytes and writes 916, the scan reads those and 256 and writes
// 256. The workspace is images of all chunks if they fit kMostWorkspace; if not, the heads take turns, or, where few
// sequences are long, all heads together some chunks at a time, with the states in between in the workspace as well.
#include "cuda/cuda.h"
#include "cuda/launch.h"
#include "cuda/sm80/chunk_prepare.h"
#include "cuda/sm80/chunk_scan.h"

namespace kda::cuda {
namespace {

constexpr int64_t kMostWorkspace = int64_t{1} << 30;
constexpr int64_t kEnough = 32;  // pairs of sequence and head that keep the scan busy: 256 warps of V = 128

// How a call is cut into pairs of launches.
struct Plan {
  int64_t heads, span, rows;  // of a pass: heads, chunks of a sequence, rows of images
  int64_t passes;             // over chunks
  bool packed;
  int64_t image_bytes, state_bytes;

  explicit Plan(const ForwardProblem& p) {
    const int64_t image = p.K == 64 ? Image<64>::bytes : Image<128>::bytes, most = kMostWorkspace / image;
    const int64_t chunks = std::max<int64_t>((p.T + kRows - 1) / kRows, 1);
    heads = p.HV, span = chunks, packed = p.varlen, rows = packed ? p.T / kRows + p.N : p.N * chunks;
    if (rows * heads > most) {
      heads = std::max<int64_t>(most / rows, 1);
      if (heads * p.N < std::min(p.N * p.HV, kEnough)) {
        heads = p.HV, span = std::clamp<int64_t>(most / (p.N * heads), 1, chunks);
        packed = false, rows = p.N * span;
      }
    }
    if (p.T == 0) rows = 0;
    passes = (chunks + span - 1) / span;
    image_bytes = rows * heads * image;
    state_bytes = passes > 1 ? p.N * p.HV * p.V * p.K * 4 : 0;
  }
};

// Whether rows are at multiples of `bytes`.
bool rows_at(int64_t bytes, std::initializer_list<const kda_tensor*> tensors) {
  for (const kda_tensor* t : tensors) {
    if (!present(*t)) continue;
    if (reinterpret_cast<uintptr_t>(t->data) % bytes) return false;
    for (int i = 0; i < 3; ++i)
      if (t->shape[i] > 1 && t->stride[i] * dtype_size(t->dtype) % bytes) return false;
  }
  return true;
}

template <int kK>
void launch_pass(const ForwardProblem& p, const Plan& plan, const Pass& pass) {
  const kda_forward_args& a = p.args;
  const Tokens tokens(p, a.in, a.o);
  char* images = static_cast<char*>(a.exec.workspace);
  if (plan.rows > 0) {
    const PrepareMemory memory(kK, tokens);
    const auto inputs = {&a.in.q, &a.in.k, &a.in.g};
    const int at_once = rows_at(16, inputs) ? 16 : rows_at(8, inputs) ? 8 : 0;
    launch<prepare_kernel<kK>>(a.exec, dim3(static_cast<unsigned>(plan.rows * pass.heads)), kPrepareThreads,
                               memory.bytes, p, tokens, pass, memory, at_once, images);
  }

  // All columns of a head share images where there are heads enough; else warps spread over the GPU.
  int64_t columns = p.V;
  while (columns > kWarpColumns && 2 * p.N * pass.heads * (p.V / columns) <= multiprocessors(a.exec.device_id))
    columns /= 2;
  Dims part = p;
  part.HV = pass.heads, part.H = 1;
  const int64_t tiles = p.V / columns;
  const ScanPlaces places{view_of(a.v_new),
                          TypedView{View{.data = images + plan.image_bytes,
                                         .stride0 = p.HV * p.V * p.K * 4,
                                         .stride1 = static_cast<uint32_t>(p.V * p.K * 4),
                                         .stride2 = static_cast<uint32_t>(p.K * 4)}},
                          wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.checkpoints, &a.h}),
                          rows_at(8, {&a.in.v, &a.o, &a.v_new})};
  launch<scan_kernel<kK>>(a.exec, Blocks::grid(part, tiles, 1), static_cast<int>(columns / kWarpColumns * 32),
                          kStages * Image<kK>::bytes, p, tokens, States(a), places, pass, Blocks(part, tiles),
                          static_cast<const char*>(images));
}

}  // namespace

const char* forward_chunk_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) return "takes K and V of 64 or 128";
  if (present(a.Aqk) || present(a.Akk)) return "has no scores of 64 tokens to save as Aqk or Akk";
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(a.in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT, &a.checkpoints, &a.h, &a.v_new})) return reason;
  const Plan plan(p);
  if (plan.rows * plan.heads > INT32_MAX) return "takes at most 2^31 chunks";
  return grid_why_not(p, p.V / kWarpColumns, 1);
}

const char* forward_chunk_too_rough(const ForwardProblem& p) {
  return p.args.in.q.dtype == KDA_F32 ? "multiplies operands of 16 bits, where q, k and v have 32" : nullptr;
}

uint64_t forward_chunk_workspace(const ForwardProblem& p) {
  const Plan plan(p);
  return static_cast<uint64_t>(plan.image_bytes + plan.state_bytes);
}

void forward_chunk(const ForwardProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Plan plan(p);
  for (int64_t head = 0; head < p.HV; head += plan.heads)
    for (int64_t first = 0; first < plan.passes * plan.span; first += plan.span) {
      const Pass pass(p, head, std::min(plan.heads, p.HV - head), first, plan.span, plan.packed);
      p.K == 64 ? launch_pass<64>(p, plan, pass) : launch_pass<128>(p, plan, pass);
    }
}

}  // namespace kda::cuda
