// Chains of few drafts (math.md 7) from a state in registers, for sm_80 and newer, K = 64 or 128, V-first. This is
// the shortest way from the state to the outputs, with the fewest instructions for up to four drafts, or on a ring
// for up to eight.
//
// A block takes 32 to 128 value columns of a head. Each of its four or eight warps activates a draft while the first
// columns of the state are on their way to registers, eight lanes a column. It then walks back from its draft over
// the drafts before:
//   kG_t, qG_t   k_t, q_t decayed from the drafts' start through t
//   A[t,i], P[t,i]   k_t, q_t decayed from i through t, times k_i
// Then each draft takes two products with the state, and what a column of them needs fits one lane:
//   u_t = beta_t (v_t - S^T kG_t - sum_i A[t,i] u_i)    o_t = S^T qG_t + sum_i P[t,i] u_i + (k_t . q_t) u_t
// Records to apply come first (recurrent_entries.h). Entries that a ring holds committed, but that are not written to
// the state yet, act as drafts before the first one: the walk goes on over them.
//
// Sums over K have one order, whatever the shape of a block is: bits depend neither on anything else in the call nor
// on what a kernel is compiled for. Channels from K on are zeros, which changes no sum.
#pragma once
#include "cuda/drafts/recurrent_draft.h"

namespace kda::cuda::recurrent {

// When a block waits for its entries: before it requests the state, after that, or when the drafts are activated.
// Which is best was measured: an early request of the state is better for one block, but it then overtakes the
// entries of other blocks.
enum class Wait { kBeforeState, kBehindState, kBehindDrafts };
constexpr Wait wait_of(Traits call, Shape shape) {
  if (shape.rows == 4 && (call.ring || shape.crowded)) return Wait::kBeforeState;
  return shape.steps == 2 ? Wait::kBehindState : Wait::kBehindDrafts;
}

template <class Call, class BlockShape, class P>
__global__ void __launch_bounds__(BlockShape::kValue.threads(), blocks_of_SM(BlockShape::kValue))
    recurrent_kernel(const __grid_constant__ Blocks blocks, const __grid_constant__ Parts<P> call) {
  extern __shared__ float4 dynamic[];
  constexpr Traits kCall = Call::kValue;
  constexpr Shape kShape = BlockShape::kValue;
  float* shared = reinterpret_cast<float*>(dynamic);
  constexpr int kThreads = kShape.threads(), kColumns = kShape.columns(), kRows = kShape.rows;
  constexpr int kDrafts = kCall.max_drafts, kStep = step_of(kCall, kShape);
  constexpr int kValues = (kDrafts * kColumns + kThreads - 1) / kThreads;  // of a thread
  constexpr bool kMayCommit = !kCall.fast || kCall.ring;
  constexpr Wait kEntries = wait_of(kCall, kShape);
  const auto& x = fast_copy<kCall.fast, kCall.ring, kCall.conv>(call);
  const Tokens& tokens = x.tokens;
  const int K = kCall.fast ? kMostK : x.K;
  const Memory m = memory_of(kCall, kShape, x);
  const bool front = m.front.given;  // q, k and v come from a convolution
  const Place at(blocks);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row0 = first_row_of<kRows, kStep>();
  const unsigned v0 = at.tile * kColumns;

  // ---- addresses and hints, while the kernel before still runs ----

  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if (thread >= kColumns) return;
    for (; t < end; ++t) {
      char* to = tokens.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv);
      store_element(to + (v0 + threadIdx.x) * size_of(tokens.o_dtype), tokens.o_dtype, 0);
    }
  };
  const int T = kDrafts == 1 ? 1 : static_cast<int>(x.sizes.T), t = warp;  // this warp's draft
  TokenKeys<kPerLane, 32> draft(lane);
  // Warps without a draft load the last one, too: see TokenKeys::fetch_keys. (In other kernels the request of the
  // state had better wait for the drafts: a state that is requested sooner overtakes the drafts of other blocks,
  // which takes 1.03 to 1.16 of the time.)
  constexpr bool kNoBranch = kCall.fast && kFlushes<P> && kShape.steps == 2;
  draft.locate(tokens, at.n, static_cast<unsigned>(kNoBranch ? min(t, T - 1) : t), at.hv, at.h);
  // A thread's values belong to column thread % kColumns and to some of the drafts.
  constexpr int kAtOnce = kThreads / kColumns;
  const char* from_v = tokens.v.at(at.n, static_cast<unsigned>(thread / kColumns), at.hv) +
                       (v0 + threadIdx.x % kColumns) * size_of(tokens.qkv_dtype);
  if (at.n < blocks.rows && at.is_among(blocks.hints.blocks)) {
    if (!front && t < T) draft.expect(tokens);
    expect_states<P, kThreads>(x, at, blocks.hints, kColumns, m.entries.entries, K);
  }
  wait_for_stream();
  if (at.n >= blocks.rows) return;  // the grid's last rows

  // ---- requests: indices, drafts, entries and the state, before the first wait ----

  // (In blocks of two steps, the compiler would load indices last.)
  Indices indices = kFlushes<P> && kShape.steps == 2 ? peek_indices(x.requests, at.n) : indices_of(x.requests, at.n);
  pin(indices.state), pin(indices.records);
  if (kFlushes<P>) pin(indices.last), pin(indices.accepted);
  unsigned values[kValues];
  const auto fetch = [&]<bool kNarrow>() {
    if (kNoBranch || t < T) draft.template fetch_gate<kNarrow>(tokens);
    if ((kNoBranch || t < T) && !front) draft.template fetch_keys<kNarrow>(tokens);
    const char* from = from_v;
#pragma unroll
    for (int i = 0; i < kValues; ++i, from += kAtOnce * static_cast<uint64_t>(tokens.v.stride1)) {
      values[i] = !front && thread / kColumns + i * kAtOnce < T ? load_raw<kNarrow>(from, tokens.qkv_dtype) : 0;
      pin(values[i]);
    }
  };
  tokens.narrow ? fetch.template operator()<true>() : fetch.template operator()<false>();
  const Request r = request_of(x.requests, {.n = at.n, .b = at.n, .length = T, .live = true}, indices);
  if (!r.s.live) return zero_outputs(at.n, 0, T);

  // Entries come first and the state last, as it takes longest.
  const Before before = before_drafts<P>(x, at, r, v0);
  BlockEntries entries;
  entries.request<kCall, kShape>(before, m.entries, shared, K);
  // The state comes to the L2 cache while the block waits for entries. (In smaller calls this costs up to 6 %.)
  if (kShape.crowded && thread == kThreads - 1)
    prefetch(x.state.at(static_cast<unsigned>(r.s.slot), at.hv, v0), kColumns * uint64_t{x.state.stride2});
  if (front) {  // before the state takes the registers
    FrontDrafts<kThreads, kCall.fast ? kMostK : 0, kShape.warps> convolution(m.front, K);
    convolution.fetch(x.front, at, r.s, T, v0);
    convolution.values(x.front, at, r.s, T, v0, shared);
  }
  if constexpr (kEntries == Wait::kBeforeState) entries.prepare<kCall, kShape>(before, m.entries, shared);
  float S[kRows][kElements] = {};
  Rows<true> from(x.state, static_cast<unsigned>(r.s.slot), at.hv, v0 + static_cast<unsigned>(row0));
  if (r.s.initial) load_state<kCall.state, kStep>(from, x.state_dtype, K, S);
  // In calls of this size blocks of the next kernel would run beside these, and delay their entries.
  constexpr bool kLate = kFlushes<P> && kRows == 4 && kEntries == Wait::kBehindDrafts;
  if (!kLate) let_next_start();
  if constexpr (kEntries == Wait::kBehindState) entries.prepare<kCall, kShape>(before, m.entries, shared);

  // ---- activation: keys, decays and values of all drafts go to shared memory, and to records ----

  auto* prepared = reinterpret_cast<PreparedDraft*>(shared);
  if (front) {
    __syncthreads();  // q, k and v of all drafts are in shared memory
#pragma unroll
    for (int e = 0; t < T && e < kPerLane; ++e) {
      const float* row = shared + t * kVectors * kMostK + draft.channel(e);
      const bool real = kCall.fast || draft.channel(e) < K;
      draft.take(e, real ? row[0] : 0.0f, real ? row[K] : 0.0f);
    }
    __syncwarp();  // a draft's q and k are read: what is prepared will lie there
  }
  if (t < T) {
    draft.activate(tokens, OverWarp());
    const Entries record(x.records, at, r.slot, v0);
    const int entry = r.slot >= 0 && at.tile == 0 ? r.verify.entry(r.verify.token(t)) : -1;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const int c = draft.channel(e);
      if (kDrafts > 1) prepared[t].alpha[c] = draft.alpha[e], prepared[t].k[c] = draft.k[e];
      if (!kCall.fast && c >= K) continue;
      if (entry >= 0) record.alpha_at(entry, c) = draft.alpha[e];
      if (entry >= 0 && at.h * blocks.group.divisor == at.hv) record.k_at(entry, c) = draft.k[e];
    }
    if (lane == 0) shared[m.factors + t] = draft.beta, shared[m.factors + m.drafts + t] = draft.qk;
  }
  if (!front) {
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (thread / kColumns + i * kAtOnce < T)
        shared[m.v + i * kThreads + thread] = value_of(tokens.qkv_dtype, values[i]);
  }
  if constexpr (kEntries == Wait::kBehindDrafts) entries.prepare<kCall, kShape>(before, m.entries, shared);
  if (kLate) let_next_start();
  if constexpr (kDrafts > 1 || kMayCommit)
    __syncthreads();  // keys and decays of drafts and entries are in shared memory

  // ---- the walk back: scores, and keys and queries as the state sees them ----

  const int committed = !kMayCommit || before.apply ? 0 : entries.count;
  if (t < T) {
    Walk<kShape.warps> walk{.m = m, .shared = shared, .t = t};
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) walk.k[e] = draft.alpha[e] * draft.k[e], walk.q[e] = draft.alpha[e] * draft.q[e];
    if (kDrafts > 1 && t) walk.over(t, prepared[t - 1].k, prepared[t - 1].alpha, -kVectors * kMostK);
    for (int i = 0; i < committed; i += kShape.warps)
      walk.over(min(committed - i, kShape.warps), shared + m.entries.w + i * kMostK,
                shared + m.entries.alpha + i * kMostK, kMostK);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e)
      prepared[t].kG[draft.channel(e)] = walk.k[e], prepared[t].qG[draft.channel(e)] = walk.q[e];
  }
  __syncthreads();  // drafts, scores, values, w and u are in shared memory

  // ---- columns: apply entries, multiply, finish u and o ----

  // The first four of the eight lanes that share kRows columns have u, the others o.
  constexpr int kLanes = kRowLanes / (2 * kRows);  // of each number
  const int own = lane % kRowLanes;
  const bool first = own % kLanes == 0, has_u = own < 4;
  int column = row0 + own % 4 / kLanes * kStep;
#pragma unroll 1
  for (int step = 0;;) {
    if constexpr (kFlushes<P>) {
      if (before.apply) {
        apply_entries<kStep, kColumns>(shared, m.entries, entries.count, step * kShape.tile() + row0, S);
        store_state<kCall.state, kStep>(from, x.state_dtype, K, S);  // where it came from
      }
    }
    // All products are made first: each together with what follows it would need more registers than there are.
    float sum[kDrafts], u[kDrafts];
#pragma unroll
    for (int t = 0; t < kDrafts; ++t) {
      if (t >= T) break;
      const float product = products(prepared[t], S);
      sum[t] = has_u ? shared[m.v + t * kColumns + column] - product : product;
    }
#pragma unroll 1
    for (int e = 0; e < committed; ++e) {
      const float u_e = shared[m.entries.u + e * kColumns + column];
#pragma unroll
      for (int t = 0; t < kDrafts; ++t)
        if (t < T) sum[t] = fmaf(shared[m.score(!has_u, t, t + e + 1)], u_e, sum[t]);
    }
    char* to_o = tokens.o.at(at.n, 0, at.hv) + (v0 + static_cast<unsigned>(column)) * size_of(tokens.o_dtype);
    char* to_u = r.slot >= 0 ? reinterpret_cast<char*>(&Entries(x.records, at, r.slot, v0).u_at(0, column)) : nullptr;
#pragma unroll
    for (int t = 0; t < kDrafts; ++t) {
      if (t >= T) break;
#pragma unroll
      for (int i = 0; i < t; ++i) sum[t] = fmaf(shared[m.score(!has_u, t, t - i)], u[i], sum[t]);
      const float own_u = shared[m.factors + t] * sum[t], other_u = __shfl_up_sync(kAll, own_u, 4, kRowLanes);
      u[t] = has_u ? own_u : other_u;
      if (!has_u && first) store_element(to_o, tokens.o_dtype, fmaf(shared[m.factors + m.drafts + t], u[t], sum[t]));
      to_o += tokens.o.stride1;
      if (has_u && first && to_u)
        *reinterpret_cast<float*>(to_u + static_cast<unsigned>(r.verify.entry(r.verify.token(t))) *
                                             static_cast<uint64_t>(x.records.u.stride1)) = own_u;
    }
    if (++step == kShape.steps) break;
    column += kShape.tile();
    from.first += kShape.tile() * static_cast<uint64_t>(from.row);
    if (r.s.initial) load_state<kCall.state, kStep>(from, x.state_dtype, K, S);
    else
#pragma unroll
      for (auto& row : S)
#pragma unroll
        for (float& s : row) s = 0;
  }
}

template <Traits kCall, Shape kShape, class P>
void launch_shape(const P& p, const Parts<P>& x, const DraftPlan& plan) {
  const int64_t tiles = p.V / kShape.columns();
  const Hints hints =
      hints_of(p, 1, state_of(p).dtype, tiles, blocks_of_SM(kShape), plan.hinted, p.args.exec.device_id);
  const int bytes = memory_of(kCall, kShape, x).end * static_cast<int>(sizeof(float));
  cuda::launch<recurrent_kernel<TypeOf<kCall>, ShapeTypeOf<kShape>, P>>(
      p.args.exec, Blocks::grid(p, tiles, 1), kShape.threads(), bytes, Blocks(p, tiles, hints), x);
}

// On the fast path, with up to four drafts.
template <Traits kCall, class P>
void launch_up_to_four(const P& p, const Parts<P>& x, const DraftPlan& plan) {
  if (plan.shape.steps == 2) launch_shape<kCall, Shape{4, 4, 2}>(p, x, plan);
  else if (plan.shape.rows == 4) launch_shape<kCall, Shape{4, 4}>(p, x, plan);
  else launch_shape<kCall, Shape{4, 2}>(p, x, plan);
}

// Calls of each form, each with their kernels in a file of their own. (The ring's take up to eight drafts, with an f32
// state, and up to four with a bf16 state.)
void launch(const VerifyProblem& p, const Parts<VerifyProblem>& x, const DraftPlan& plan);
void launch(const FlushVerifyProblem& p, const Parts<FlushVerifyProblem>& x, const DraftPlan& plan);
void launch_on_ring(const FlushVerifyProblem& p, const Parts<FlushVerifyProblem>& x, const DraftPlan& plan);

}  // namespace kda::cuda::recurrent
