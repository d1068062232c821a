// A flush alone: S <- f S + sum_i w_i u_i, with the state in registers, for sm_80 and newer, K = 64 or 128, V-first.
// All layers of a model may be in one launch.
#include "cuda/drafts/recurrent_entries.h"

namespace kda::cuda::recurrent {

template <class Call, class BlockShape>
__global__ void __launch_bounds__(BlockShape::kValue.threads(), blocks_of_SM(BlockShape::kValue))
    flush_kernel(const __grid_constant__ LayeredBlocks blocks, const __grid_constant__ Parts<FlushProblem> call) {
  extern __shared__ float4 dynamic[];
  constexpr Traits kCall = Call::kValue;
  constexpr Shape kShape = BlockShape::kValue;
  float* shared = reinterpret_cast<float*>(dynamic);
  const auto& x = fast_copy<kCall.fast>(call);
  constexpr int kColumns = kShape.columns(), kStep = step_of(kCall, kShape);
  const int K = kCall.fast ? kMostK : x.K;
  const EntryMemory m(kMostK, kColumns, x.entries, 0, true);
  const Place at(blocks);
  const auto layers = static_cast<unsigned>(x.layers);
  const unsigned v0 = at.tile * kColumns;
  if (at.layer < layers && at.is_among(blocks.hints.blocks))
    expect_states<FlushProblem, kShape.threads()>(x, at, blocks.hints, kColumns, m.entries, K);
  wait_for_stream();
  if (at.layer >= layers) return;  // the grid's last rows
  const Request r = request_of(x.requests, drafts_of(x, at.n), indices_of(x.requests, at.n));
  if (!r.s.live) return;
  const Before before = before_drafts<FlushProblem>(x, at, r, v0);
  BlockEntries entries;
  entries.request<kCall, kShape>(before, m, shared, K);
  const int row0 = first_row_of<kShape.rows, kStep>();
  const Rows<true> state(state_at(x, at), static_cast<unsigned>(r.s.slot), at.hv, v0 + static_cast<unsigned>(row0));
  float S[kShape.rows][kElements];
  load_state<kCall.state, kStep>(state, x.state_dtype, K, S);
  let_next_start();
  entries.prepare<kCall, kShape>(before, m, shared);
  __syncthreads();  // w, f and u are in shared memory
  apply_entries<kStep, kColumns>(shared, m, entries.count, row0, S);
  store_state<kCall.state, kStep>(state, x.state_dtype, K, S);
}

namespace {

template <Traits kCall, Shape kShape>
void launch_shape(const FlushProblem& p, const Parts<FlushProblem>& x, const DraftPlan& plan) {
  const int64_t tiles = p.V / kShape.columns();
  const Hints hints =
      hints_of(p, layers_of(p), x.state_dtype, tiles, blocks_of_SM(kShape), plan.hinted, p.args.exec.device_id);
  const int bytes = EntryMemory(kMostK, kShape.columns(), x.entries, 0, true).end * static_cast<int>(sizeof(float));
  cuda::launch<flush_kernel<TypeOf<kCall>, ShapeTypeOf<kShape>>>(
      p.args.exec, Blocks::grid(p, tiles, p.layers), kShape.threads(), bytes, LayeredBlocks(p, tiles, hints), x);
}
template <int32_t kState>
void launch_fast(const FlushProblem& p, const Parts<FlushProblem>& x, const DraftPlan& plan) {
  constexpr Traits kCall{true, kState, 0};
  if (plan.shape.rows == 4) launch_shape<kCall, Shape{4, 4}>(p, x, plan);
  else launch_shape<kCall, Shape{4, 2}>(p, x, plan);
}

void launch(const FlushProblem& p, const Parts<FlushProblem>& x, const DraftPlan& plan) {
  if (plan.path == FastPath::kNone) launch_shape<general(0), kGeneralFlush>(p, x, plan);
  else if (x.state_dtype == KDA_F32) launch_fast<KDA_F32>(p, x, plan);
  else launch_fast<KDA_BF16>(p, x, plan);
}

DraftPlan plan_of(const FlushProblem& p, const Parts<FlushProblem>& x) {
  const DraftCall call{p.layers * p.N * p.HV * p.V, p.V, 0, true, fast_path_of(x)};
  return draft_plan(call, multiprocessors(p.args.exec.device_id));
}

}  // namespace
}  // namespace kda::cuda::recurrent

namespace kda::cuda {

const char* drafts_flush_registers_why_not(const FlushProblem& p) { return wide_why_not(p); }

std::string drafts_flush_registers_form(const FlushProblem& p) {
  return text(recurrent::plan_of(p, Parts<FlushProblem>(p)));
}

void drafts_flush_registers(const FlushProblem& p) {
  if (p.layers * p.N * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts<FlushProblem> x(p);
  recurrent::launch(p, x, recurrent::plan_of(p, x));
  roll_convolution(p);
}

}  // namespace kda::cuda
