// kda_prefill_f32 as stages in f32 (3 x tf32): first the scores and everything else that needs no state, then the
// scan, then the outputs. o and hT do not depend on the size of chunks, so the stages work on chunks of 64; w and u
// of chunks of 32 take another launch of the first kernel. No decay is ever divided by another: exponents are sums of
// steps.
//
// With K = V of 64 or 128 and whole chunks, the scan makes the outputs as well, with the same bits. The workspace
// holds what the kernels pass on: kg, w, u, Aqk by token, and then, in this case, qG and the last G of each chunk;
// otherwise G, v_new and S before each chunk. Buffers of the caller serve as w and u, if they can.
#include "contract/prefill_f32.h"
#include "cuda/call/workspace.h"
#include "cuda/stages/declarations.h"
#include "cuda/stages/stages.h"

namespace kda::cuda {
namespace {

using stages::Rows;

// Rows [B,T,HV,n] of f32, one after the other in the workspace.
class Memory {
 public:
  explicit Memory(void* begin) : begin_(static_cast<char*>(begin)) {}
  Rows rows(int64_t batches, int64_t tokens, int64_t heads, int64_t n) {
    Rows x{.data = begin_ + bytes_};
    x.head = n * 4, x.token = heads * x.head, x.batch = tokens * x.token;
    x.wide = n % 4 == 0;
    bytes_ += align_up(static_cast<uint64_t>(batches * x.batch));
    return x;
  }
  // States [rows,HV,lines,n].
  Rows states(int64_t rows, int64_t heads, int64_t lines, int64_t n) {
    Rows x = this->rows(rows, lines, heads, n);
    x.token = n * 4, x.head = lines * x.token;
    return x;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  char* begin_;
  uint64_t bytes_ = 0;
};

struct Workspace {
  Rows kg, w, u, Aqk;
  Rows qG, ends;     // if the scan makes outputs
  Rows G, v_new, h;  // if not
  uint64_t bytes;

  Workspace(const PrefillF32Problem& p, bool with_outputs, void* begin) {
    Memory memory(begin);
    const auto rows = [&](int64_t n) { return memory.rows(p.B, p.T, p.HV, n); };
    kg = rows(p.K), w = rows(p.K), u = rows(p.V), Aqk = rows(kChunk);
    if (with_outputs) {
      qG = rows(p.K), ends = memory.rows(p.B, p.max_chunks(), p.HV, p.K);
    } else {
      const bool v_first = p.args.state_layout == KDA_STATE_V_FIRST;
      G = rows(p.K), v_new = rows(p.V);
      h = memory.states(p.B * p.max_chunks(), p.HV, v_first ? p.V : p.K, v_first ? p.K : p.V);
    }
    bytes = memory.bytes();
  }
};

}  // namespace

const char* stages_prefill_f32_why_not(const PrefillF32Problem& p) {
  const int64_t tiles = stages::slices(static_cast<int>(p.V), stages::slice_of<float>);
  const int64_t blocks = stages::Chunks(p, {}).count * p.HV * tiles;
  if (const char* reason = stages::stage_why_not(p.args.exec, has_f64(p), blocks)) return reason;
  return grid_why_not(p, (p.V + 15) / 16, 1);
}

uint64_t stages_prefill_f32_workspace(const PrefillF32Problem& p) {
  return Workspace(p, stages::makes_outputs(p.args.exec, p), nullptr).bytes;
}

void stages_prefill_f32(const PrefillF32Problem& p) {
  const kda_prefill_f32_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const bool with_outputs = stages::makes_outputs(a.exec, p);
  const Workspace between(p, with_outputs, a.exec.workspace);
  const stages::Chunks chunks(p, {});
  const auto HV = static_cast<int32_t>(p.HV), group = static_cast<int32_t>(p.group());
  const auto K = static_cast<int32_t>(p.K), V = static_cast<int32_t>(p.V);
  const bool v_first = a.state_layout == KDA_STATE_V_FIRST;
  // Elements from one chunk of w or u to the next: anything if there is only one.
  const auto skip_of = [&](const kda_tensor& t) { return t.shape[2] > 1 ? t.stride[2] : a.chunk * t.stride[3]; };
  const auto by_token = [&](const kda_tensor& t) {  // chunks of 64, one after the other
    return present(t) && a.chunk == kChunk && skip_of(t) == kChunk * t.stride[3];
  };
  bool shared = by_token(a.w) && by_token(a.u);

  stages::IntraCall intra{.chunks = chunks, .q = stages::rows_of(p.in.q), .k = stages::rows_of(p.in.k)};
  intra.v = stages::rows_of(p.in.v), intra.beta = stages::rows_of(p.in.beta), intra.G = stages::rows_of(p.in.g);
  intra.HV = HV, intra.group = group, intra.K = K, intra.V = V;
  intra.chunk = stages::kRows, intra.scale = p.in.scale, intra.steps = intra.solve = true;
  stages::IntraCall buffers = intra;
  buffers.w = stages::rows_of(a.w, 0, 3, 1), buffers.u = stages::rows_of(a.u, 0, 3, 1);  // [B,HV,chunks,chunk,n]
  buffers.chunk = a.chunk;
  if (present(a.w)) buffers.w_skip = skip_of(a.w) * 4;
  if (present(a.u)) buffers.u_skip = skip_of(a.u) * 4;
  if (with_outputs) shared = shared && buffers.w.wide && buffers.u.wide;
  if (shared) intra = buffers;
  else intra.w = between.w, intra.u = between.u;
  intra.Aqk = between.Aqk, intra.kg = between.kg;
  intra.sums = between.G, intra.qG = between.qG, intra.ends = between.ends;
  run(a.exec, intra, true);
  if (!shared && (present(a.w) || present(a.u))) run(a.exec, buffers, true);

  stages::ScanCall scan{.dims = p, .chunks = chunks, .kg = between.kg, .w = intra.w, .u = intra.u};
  scan.h0 = stages::lines_of_states(a.h0), scan.hT = stages::lines_of_states(a.hT), scan.v_first = v_first;
  if (with_outputs) {
    scan.qG = between.qG, scan.ends = between.ends, scan.Aqk = between.Aqk, scan.o = stages::rows_of(p.o);
    scan.scale = p.in.scale;
    return run_with_outputs(a.exec, scan);
  }
  scan.G = between.G, scan.v_new = between.v_new, scan.h = between.h, scan.h_rows = p.B * p.max_chunks();
  run(a.exec, scan, true);

  stages::OutputCall output{.chunks = chunks, .q = stages::rows_of(p.in.q), .v_new = between.v_new, .G = between.G};
  output.Aqk = between.Aqk, output.o = stages::rows_of(p.o), output.h = between.h, output.h_rows = scan.h_rows;
  output.HV = HV, output.group = group, output.K = K, output.V = V;
  output.scale = p.in.scale, output.v_first = v_first;
  run(a.exec, output, true);
}

}  // namespace kda::cuda
