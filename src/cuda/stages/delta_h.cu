// F4, v_new = u - w S and S <- Diag(ell) S + kg^T v_new, chunk after chunk: what it takes, and how its kernel
// (delta_h_kernel.h) is launched.
#include "contract/stages.h"
#include "cuda/stages/declarations.h"
#include "cuda/stages/delta_h_kernel.h"

namespace kda::cuda {
namespace stages {
namespace {

template <class E, int kTiles, int kColumns>
bool launch_scan(const kda_exec& exec, const ScanCall& c) {  // false: the device has not enough shared memory
  const int most = shared_memory_of_block(exec.device_id);
  const int64_t tiles = (c.dims.V + kColumns - 1) / kColumns;
  for (const Room room : {kTwo, kOne, kHalf}) {
    const Memory m = Memory::of<E, kTiles>(room, static_cast<int>(c.dims.K), kColumns, c.v_first);
    if (m.bytes > most) continue;
    const auto start = [&]<int kSize>() {
      launch<scan_kernel<E, kTiles, kColumns, kSize, false>>(exec, Blocks::grid(c.dims, tiles, 1), block_of<E, kTiles>,
                                                             m.bytes, c, Blocks(c.dims, tiles), m);
    };
    if constexpr (sizeof(E) == 4 && kTiles == 1) {
      const bool known = room == kTwo && c.chunks.whole() && are_known<E>({&c.kg, &c.w, &c.u, &c.v_new, &c.h});
      if (known && size_if_known(c.dims.K, c.dims.V) == 128) return start.template operator()<128>(), true;
    }
    return start.template operator()<0>(), true;
  }
  return false;
}

template <int kSize, int kColumns>
void launch_with_outputs(const kda_exec& exec, const ScanCall& c) {
  constexpr int kTiles = kSize / 16 / row_warps(kColumns);
  constexpr Memory m = Memory::with_outputs(kSize, kColumns);
  const int64_t tiles = kSize / kColumns;
  launch<scan_kernel<float, kTiles, kColumns, kSize, true>>(exec, Blocks::grid(c.dims, tiles, 1), kThreads, m.bytes, c,
                                                            Blocks(c.dims, tiles), m);
}

}  // namespace

bool makes_outputs(const kda_exec& exec, const Dims& d) {
  const int size = size_if_known(d.K, d.V);
  if (!size || d.varlen || d.T % kChunk) return false;
  return Memory::with_outputs(size, 32).bytes <= shared_memory_of_block(exec.device_id);
}

void run_with_outputs(const kda_exec& exec, const ScanCall& c) {
  const int64_t blocks = c.dims.N * c.dims.HV * c.dims.V / 32;
  if (blocks == 0) return;
  if (c.dims.K == 64) launch_with_outputs<64, 32>(exec, c);
  else if (2 * blocks <= multiprocessors(exec.device_id)) launch_with_outputs<128, 16>(exec, c);  // SMs would be idle
  else launch_with_outputs<128, 32>(exec, c);
}

void run(const kda_exec& exec, const ScanCall& c, bool exact) {
  const int64_t heads = c.dims.N * c.dims.HV;
  if ((c.dims.N + c.dims.varlen) * c.dims.HV == 0) return;
  const bool large = c.dims.K > 128;
  const bool few = heads * ((c.dims.V + 63) / 64) < multiprocessors(exec.device_id);  // leave every SM something to do
  bool fits;
  if (exact) fits = large ? launch_scan<float, 2, 16>(exec, c) : launch_scan<float, 1, 32>(exec, c);
  else if (large) fits = launch_scan<bf16, 2, 32>(exec, c);
  else fits = few ? launch_scan<bf16, 1, 32>(exec, c) : launch_scan<bf16, 1, 64>(exec, c);
  if (!fits) throw Error(KDA_UNSUPPORTED, "the device has not enough shared memory for a block");
}

}  // namespace stages

const char* stage_why_not(const StageProblem<kda_stage_delta_h_args>& p) {
  const int64_t tiles = (p.V + 15) / 16;
  if (const char* reason = stages::stage_why_not(p.args.exec, has_f64(p), tiles * p.HV)) return reason;
  return grid_why_not(p, tiles, 1);
}

void stage(const StageProblem<kda_stage_delta_h_args>& p) {
  const kda_stage_delta_h_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  stages::ScanCall c{.dims = p, .chunks = stages::Chunks(p, p.in.cu_seqlens), .kg = stages::rows_of(a.kg)};
  c.w = stages::rows_of(a.w), c.u = stages::rows_of(a.u), c.G = stages::rows_of(a.G),
  c.v_new = stages::rows_of(a.v_new);
  c.h0 = stages::lines_of_states(a.h0), c.h = stages::lines_of_states(a.h), c.hT = stages::lines_of_states(a.hT);
  c.h_rows = present(a.h) ? a.h.shape[0] : 0, c.v_first = p.in.state_layout == KDA_STATE_V_FIRST;
  run(a.exec, c, stages::is_exact({&a.kg, &a.w, &a.u}));
}

}  // namespace kda::cuda
