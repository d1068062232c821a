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
// Records to apply come first (entries.h). Entries that a ring holds committed, but that are not written to the state
// yet, act as drafts before the first one: the walk goes on over them.
//
// Sums over K have one order, whatever the size of a block is: bits depend neither on anything else in the call nor
// on what a kernel knows of it (`Call`).
#include "cuda/front.h"
#include "cuda/sm80/entries.h"
#include "cuda/tile.h"

namespace kda::cuda {
namespace {

constexpr int kFewWarps = 4, kManyWarps = 8;  // of a block: each draft has one

// What a kernel knows of its call. kAny: nothing. kUsual: that it is_usual(). kOneDraft: that it is usual with one
// draft, and none to walk over. kLarge: that it is usual and is_large(). kRing and kOneOnRing: that it is usual, or
// usual with one draft, except for rings. kFront: that it is usual, except for a convolution in front.
enum class Call { kAny, kUsual, kOneDraft, kLarge, kRing, kOneOnRing, kFront };
constexpr bool on_ring(Call call) { return call == Call::kRing || call == Call::kOneOnRing; }
template <Call kCall, int kWarps>
constexpr int kMost = kCall == Call::kOneDraft || kCall == Call::kOneOnRing ? 1 : kWarps;  // drafts
template <int kWarps, int kRows>
constexpr int kTile = kWarps * 32 / kRowLanes* kRows;  // value columns in registers
constexpr int kRegisters = 128;                        // of a thread
template <int kWarps>
constexpr int kBlocks = 65536 / kRegisters / (kWarps * 32);  // of an SM

// Where the call is known, a thread's columns lie so far apart that consecutive loads of a warp take neighbouring
// columns. (Kernels for any call have no registers for that, and with eight drafts it costs more than it saves.)
template <bool kUsual, int kWarps>
constexpr int kStepOf = (kUsual && kWarps == kFewWarps) ? 32 / kRowLanes : 1;
template <int kRows, int kStep>
__device__ int first_row_of() {
  if constexpr (kStep == 1) return first_row<kRows>();
  else return static_cast<int>(threadIdx.x / 32 * kStep * kRows + threadIdx.x % 32 / kRowLanes);
}

// A draft in shared memory: what later ones need to walk over it, then what the state is multiplied with.
template <int kK>
struct alignas(16) PreparedDraft {
  float alpha[kK], k[kK], kG[kK], qG[kK];
};
constexpr int kVectors = 4;  // of kK floats, in PreparedDraft

// Where things are in shared memory, in floats.
struct Memory {
  int drafts, before;  // there is room for so many drafts, and so many tokens before one of them that are not applied
  int v, factors, scores;
  FrontMemory front;
  EntryMemory entries;  // those that are not applied have k in place of w
  int end;

  // ring: entries may stay committed.
  __host__ __device__ Memory(int K, int columns, int drafts, const Sizes& sizes, bool ring)
      : drafts(drafts),
        before(drafts + (ring ? sizes.entries : 0)),
        v(drafts * kVectors * K),       // in front: [drafts] PreparedDraft, or q and k as the convolution leaves them
        factors(v + drafts * columns),  // in front: [drafts][columns] of v
        scores(factors + 2 * drafts),   // in front: beta, k . q
        front{sizes.front, sizes.by_four, 0, kVectors * K, v, columns},
        entries(K, columns, sizes.entries, scores + 2 * drafts * before, true),  // in front: -A, P, [drafts][before]
        end(entries.end) {}

  // The score of draft t with the token `steps` before it, 1 the nearest; which: 0 -A, 1 P.
  __device__ int score(int which, int t, int steps) const { return scores + (which * drafts + t) * before + steps - 1; }
};

// The layout for a kernel's call. A usual call has room for all drafts it may have, so nearly all offsets are
// constants.
template <Call kCall, int kWarps, class P>
__host__ __device__ Memory memory_of(const Parts<P>& x, int K, int columns) {
  const int drafts = kCall == Call::kAny ? static_cast<int>(x.sizes.T) : kMost<kCall, kWarps>;
  return Memory(K, columns, drafts, x.sizes, x.requests.records.ring);
}

// Products of a draft with kRows columns of a thread: first kG with each column, then qG, spread over the eight
// lanes.
template <int kK, int kRows>
__device__ float products(const PreparedDraft<kK>& x, const float (&S)[kRows][kK / kRowLanes]) {
  float even[2 * kRows] = {}, odd[2 * kRows] = {};  // two chains each
#pragma unroll
  for (int e = 0; e < kK / kRowLanes; e += 4) {
    const float4 k = load_four(x.kG + channel(e)), q = load_four(x.qG + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float* four = S[row] + e;
      even[row] = fmaf(four[0], k.x, even[row]), odd[row] = fmaf(four[1], k.y, odd[row]);
      even[row] = fmaf(four[2], k.z, even[row]), odd[row] = fmaf(four[3], k.w, odd[row]);
      float &a = even[kRows + row], &b = odd[kRows + row];
      a = fmaf(four[0], q.x, a), b = fmaf(four[1], q.y, b);
      a = fmaf(four[2], q.z, a), b = fmaf(four[3], q.w, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) even[i] += odd[i];
  return spread_sums<2 * kRows, kRowLanes / 2>(even);
}

// ---- entries to apply, before a block's drafts ----

template <int kThreads, int kK, int kColumns>
struct BlockEntries {
  const Before& before;
  int count = 0;

  // Starts the copies of all entries: u, and k (in place of w) and alpha of a thread's channel. They go to shared
  // memory so that the state, which takes the registers, can be requested at once.
  __device__ BlockEntries(const Before& before, const EntryMemory& m, float* shared) : before(before) {
    const int column = static_cast<int>(threadIdx.x), c = own_channel();
    for (int w = before.newest; w >= 0 && count < m.entries; w = before.window.before(w), ++count) {
      const int entry = before.window.entry(w);
      if (column < kColumns) copy_async(shared + m.u + count * kColumns + column, &before.entries.u_at(entry, column));
      if (c < 0) continue;
      copy_async(shared + m.w + count * kK + c, &before.entries.k_at(entry, c));
      copy_async(shared + m.alpha + count * kK + c, &before.entries.alpha_at(entry, c));
    }
  }
  // Makes w and f of the entries to apply; the others stay as they came. A barrier after this makes all of it visible
  // to all threads.
  __device__ void prepare(const EntryMemory& m, float* shared) {
    if (!count) return;
    wait_for_copies();
    const int c = own_channel();
    if (!before.apply || c < 0) return;
    double product = 1;
    for (int i = 0; i < count; ++i) {
      shared[m.w + i * kK + c] *= static_cast<float>(product);
      product *= shared[m.alpha + i * kK + c];
    }
    shared[m.f + c] = static_cast<float>(product);
  }

 private:
  __device__ static int own_channel() { return static_cast<int>(threadIdx.x) - (kThreads - kK); }
};

template <int kK, int kStep, int kColumns, int kRows>
__device__ void apply_entries(const float* shared, const EntryMemory& m, int count, int column,
                              float (&S)[kRows][kK / kRowLanes]) {
#pragma unroll
  for (int e = 0; e < kK / kRowLanes; e += 4) {
    const float4 f = load_four(shared + m.f + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      S[row][e] *= f.x, S[row][e + 1] *= f.y, S[row][e + 2] *= f.z, S[row][e + 3] *= f.w;
  }
  for (int i = count - 1; i >= 0; --i) {
    const float *w = shared + m.w + i * kK, *u = shared + m.u + i * kColumns + column;
#pragma unroll
    for (int e = 0; e < kK / kRowLanes; e += 4) {
      const float4 four = load_four(w + channel(e));
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float x = u[row * kStep];
        S[row][e] = fmaf(x, four.x, S[row][e]), S[row][e + 1] = fmaf(x, four.y, S[row][e + 1]);
        S[row][e + 2] = fmaf(x, four.z, S[row][e + 2]), S[row][e + 3] = fmaf(x, four.w, S[row][e + 3]);
      }
    }
  }
}

// A thread's columns of a state, as many as they are wide.
template <class State, int kK, int kStep, int kRows>
__device__ void load_state(const Rows<true>& from, float (&S)[kRows][kK / kRowLanes]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) from.template load<State>(row * kStep, kK, S[row]);
}
// Stores S, which becomes what memory then holds.
template <class State, int kK, int kStep, int kRows>
__device__ void store_state(const Rows<true>& to, float (&S)[kRows][kK / kRowLanes]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (float& s : S[row]) s = static_cast<float>(static_cast<State>(s));
    to.template store<State>(row * kStep, kK, S[row]);
  }
}

template <class State, int kK, int kRows, bool kUsual>
__global__ void __launch_bounds__(kFewWarps * 32, kBlocks<kFewWarps>)
    flush_kernel(const __grid_constant__ LayeredBlocks blocks, const __grid_constant__ Parts<FlushProblem> call) {
  extern __shared__ float4 dynamic[];
  float* shared = reinterpret_cast<float*>(dynamic);
  const auto& x = seen<kUsual>(call, kK);
  constexpr int kThreads = kFewWarps * 32, kColumns = kTile<kFewWarps, kRows>, kStep = kStepOf<kUsual, kFewWarps>;
  const EntryMemory m(kK, kColumns, x.entries, 0, true);
  const Place at(blocks);
  const auto layers = static_cast<unsigned>(x.layers);
  const unsigned v0 = at.tile * kColumns;
  if (at.layer < layers && at.is_among(blocks.hints.blocks))
    expect_states<FlushProblem, kThreads>(x, at, blocks.hints, kColumns, m.entries, kK);
  wait_for_stream();
  if (at.layer >= layers) return;  // the grid's last rows
  const Request r = request_of(x.requests, drafts_of(x, at.n), indices_of(x.requests, at.n));
  if (!r.s.live) return;
  const Before before = before_drafts<FlushProblem>(x, at, r, v0);
  BlockEntries<kThreads, kK, kColumns> entries(before, m, shared);
  const int row0 = first_row_of<kRows, kStep>();
  const Rows<true> state(state_at(x, at), static_cast<unsigned>(r.s.slot), at.hv, v0 + static_cast<unsigned>(row0));
  float S[kRows][kK / kRowLanes];
  load_state<State, kK, kStep>(state, S);
  let_next_start();
  entries.prepare(m, shared);
  __syncthreads();  // w, f and u are in shared memory
  apply_entries<kK, kStep, kColumns>(shared, m, entries.count, row0, S);
  store_state<State, kK, kStep>(state, S);
}

// ---- drafts ----

// A draft on its way back to the start, in a warp with kPerLane channels a lane.
template <int kPerLane, int kAtOnce>
struct Walk {
  float k[kPerLane], q[kPerLane];  // decayed from the next token of the walk through the draft
  const Memory& m;
  float* shared;
  int t, steps = 0;

  // Walks over `count` tokens, at most kAtOnce: the first one has these k and alpha, and the others are `next` floats
  // apart.
  __device__ void over(int count, const float* from_k, const float* from_alpha, int next) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float sums[2 * kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const float k_i = from_k[i * next + lane + 32 * e], alpha_i = from_alpha[i * next + lane + 32 * e];
        sums[i] = fmaf(k[e], k_i, sums[i]), sums[kAtOnce + i] = fmaf(q[e], k_i, sums[kAtOnce + i]);
        k[e] *= alpha_i, q[e] *= alpha_i;
      }
    }
    const float sum = spread_sums(sums);
    constexpr int kLanes = 32 / (2 * kAtOnce);  // of a sum
    const int number = lane / kLanes, i = number % kAtOnce, which = number / kAtOnce;
    if (lane % kLanes == 0 && i < count) shared[m.score(which, t, steps + i + 1)] = which ? sum : -sum;
    steps += count;
  }
};

// When a block waits for its entries: before it requests the state, after that, or when the drafts are activated.
// Which is best was measured: an early request of the state is better for one block, but it then overtakes the
// entries of other blocks.
enum class Wait { kBeforeState, kBehindState, kBehindDrafts };
template <int kRows, int kSteps, Call kCall>
constexpr Wait kWait = kRows == 4 && (on_ring(kCall) || kCall == Call::kLarge) ? Wait::kBeforeState
                       : kSteps == 2                                           ? Wait::kBehindState
                                                                               : Wait::kBehindDrafts;

template <class State, int kK, int kWarps, int kRows, int kSteps, Call kCall, class P>
__global__ void __launch_bounds__(kWarps * 32, kBlocks<kWarps>)
    recurrent_kernel(const __grid_constant__ Blocks blocks, const __grid_constant__ Parts<P> call) {
  extern __shared__ float4 dynamic[];
  float* shared = reinterpret_cast<float*>(dynamic);
  constexpr int kThreads = kWarps * 32, kColumns = kTile<kWarps, kRows> * kSteps;
  constexpr int kPerLane = kK / 32, kDrafts = kMost<kCall, kWarps>;
  constexpr int kValues = (kDrafts * kColumns + kThreads - 1) / kThreads;  // of a thread
  constexpr bool kUsual = kCall != Call::kAny, kMayCommit = !kUsual || on_ring(kCall);
  constexpr int kStep = kStepOf<kUsual, kWarps>;
  constexpr Wait kEntries = kWait<kRows, kSteps, kCall>;
  const auto& x = seen<kUsual, on_ring(kCall), kCall == Call::kFront>(call, kK);
  const Tokens& tokens = x.tokens;
  const Memory m = memory_of<kCall, kWarps>(x, kK, kColumns);
  const bool front = m.front.given;  // q, k and v come from a convolution
  const Place at(blocks);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row0 = first_row_of<kRows, kStep>();
  const unsigned v0 = at.tile * kColumns;
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
  constexpr bool kNoBranch = kUsual && kFlushes<P> && kSteps == 2;
  draft.locate(tokens, at.n, static_cast<unsigned>(kNoBranch ? min(t, T - 1) : t), at.hv, at.h);
  // A thread's values belong to column thread % kColumns and to some of the drafts.
  constexpr int kAtOnce = kThreads / kColumns;
  const char* from_v = tokens.v.at(at.n, static_cast<unsigned>(thread / kColumns), at.hv) +
                       (v0 + threadIdx.x % kColumns) * size_of(tokens.qkv_dtype);
  if (at.n < blocks.rows && at.is_among(blocks.hints.blocks)) {
    if (!front && t < T) draft.expect(tokens);
    expect_states<P, kThreads>(x, at, blocks.hints, kColumns, m.entries.entries, kK);
  }
  wait_for_stream();
  if (at.n >= blocks.rows) return;  // the grid's last rows
  // (In blocks of two steps, the compiler would load indices last.)
  Indices indices = kFlushes<P> && kSteps == 2 ? peek_indices(x.requests, at.n) : indices_of(x.requests, at.n);
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

  // Everything is requested before the first wait: entries first, the state last, as it takes longest.
  const Before before = before_drafts<P>(x, at, r, v0);
  BlockEntries<kThreads, kK, kColumns> entries(before, m.entries, shared);
  // The state comes to the L2 cache while the block waits for entries. (In smaller calls this costs up to 6 %.)
  if (kCall == Call::kLarge && thread == kThreads - 1)
    prefetch(x.state.at(static_cast<unsigned>(r.s.slot), at.hv, v0), kColumns * uint64_t{x.state.stride2});
  if (front) {  // before the state takes the registers
    FrontDrafts<kThreads, kK, kWarps> convolution(m.front);
    convolution.fetch(x.front, at, r.s, T, v0);
    convolution.values(x.front, at, r.s, T, v0, shared);
  }
  if constexpr (kEntries == Wait::kBeforeState) entries.prepare(m.entries, shared);
  float S[kRows][kK / kRowLanes] = {};
  Rows<true> from(x.state, static_cast<unsigned>(r.s.slot), at.hv, v0 + static_cast<unsigned>(row0));
  if (r.s.initial) load_state<State, kK, kStep>(from, S);
  // In calls of this size blocks of the next kernel would run beside these, and delay their entries.
  constexpr bool kLate = kFlushes<P> && kRows == 4 && kEntries == Wait::kBehindDrafts;
  if (!kLate) let_next_start();
  if constexpr (kEntries == Wait::kBehindState) entries.prepare(m.entries, shared);

  auto* prepared = reinterpret_cast<PreparedDraft<kK>*>(shared);
  if (front) {
    __syncthreads();  // q, k and v of all drafts are in shared memory
#pragma unroll
    for (int e = 0; t < T && e < kPerLane; ++e) {
      const float* row = shared + t * kVectors * kK + draft.channel(e);
      draft.take(e, row[0], row[kK]);
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
  if constexpr (kEntries == Wait::kBehindDrafts) entries.prepare(m.entries, shared);
  if (kLate) let_next_start();
  if constexpr (kDrafts > 1 || kMayCommit)
    __syncthreads();  // keys and decays of drafts and entries are in shared memory
  const int committed = !kMayCommit || before.apply ? 0 : entries.count;
  if (t < T) {
    Walk<kPerLane, kWarps> walk{.m = m, .shared = shared, .t = t};
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) walk.k[e] = draft.alpha[e] * draft.k[e], walk.q[e] = draft.alpha[e] * draft.q[e];
    if (kDrafts > 1 && t) walk.over(t, prepared[t - 1].k, prepared[t - 1].alpha, -kVectors * kK);
    for (int i = 0; i < committed; i += kWarps)
      walk.over(min(committed - i, kWarps), shared + m.entries.w + i * kK, shared + m.entries.alpha + i * kK, kK);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e)
      prepared[t].kG[draft.channel(e)] = walk.k[e], prepared[t].qG[draft.channel(e)] = walk.q[e];
  }
  __syncthreads();  // drafts, scores, values, w and u are in shared memory

  // The first four of the eight lanes that share kRows columns have u, the others o.
  constexpr int kLanes = kRowLanes / (2 * kRows);  // of each number
  const int own = lane % kRowLanes;
  const bool first = own % kLanes == 0, has_u = own < 4;
  int column = row0 + own % 4 / kLanes * kStep;
#pragma unroll 1
  for (int step = 0;;) {
    if constexpr (kFlushes<P>) {
      if (before.apply) {
        apply_entries<kK, kStep, kColumns>(shared, m.entries, entries.count, step * kTile<kWarps, kRows> + row0, S);
        store_state<State, kK, kStep>(from, S);  // where it came from
      }
    }
    // All products are made first: each together with what follows it would need more registers than there are.
    float sum[kDrafts], u[kDrafts];
#pragma unroll
    for (int t = 0; t < kDrafts; ++t) {
      if (t >= T) break;
      const float product = products<kK, kRows>(prepared[t], S);
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
    if (++step == kSteps) break;
    column += kTile<kWarps, kRows>;
    from.first += kTile<kWarps, kRows> * static_cast<uint64_t>(from.row);
    if (r.s.initial) load_state<State, kK, kStep>(from, S);
    else
#pragma unroll
      for (auto& row : S)
#pragma unroll
        for (float& s : row) s = 0;
  }
}

template <class P>
int64_t columns_of(const P& p) {
  return layers_of(p) * p.N * p.HV * p.V;
}
// Is the call so large that blocks which flush had better be small?
template <class P>
bool is_large(const P& p) {
  if constexpr (!kVerifies<P> || !kFlushes<P>) return false;
  else return !present(p.args.records.ring_count) && columns_of(p) >= 1600 * multiprocessors(p.args.exec.device_id);
}

// Chooses the columns of a block, as many as leave no SM idle, and calls launch<State, kK, kWarps, kRows, kSteps>().
template <class P, class Launch>
void by_size(const P& p, const Launch& launch) {
  const int64_t columns = columns_of(p), SMs = multiprocessors(p.args.exec.device_id);
  const bool few = columns < 96 * SMs, many = p.V % 128 == 0 && columns >= 480 * SMs;
  const auto sized = [&]<class State, int kK>() {
    if constexpr (kVerifies<P> && kFlushes<P>)
      if (p.T > kFewWarps) {  // so that all blocks run at once, if they can
        if (columns <= 64 * SMs) return launch.template operator()<State, kK, kManyWarps, 1, 1>();
        if (columns <= 128 * SMs || p.V % 128) return launch.template operator()<State, kK, kManyWarps, 2, 1>();
        return launch.template operator()<State, kK, kManyWarps, 4, 1>();
      }
    // Drafts are prepared once for both steps. (A flush alone had better be short.)
    if constexpr (kVerifies<P>)
      if (many && !is_large(p)) return launch.template operator()<State, kK, kFewWarps, 4, 2>();
    if (few) return launch.template operator()<State, kK, kFewWarps, 2, 1>();
    launch.template operator()<State, kK, kFewWarps, 4, 1>();
  };
  const bool bf16 = state_of(p).dtype == KDA_BF16;
  if (p.K == 64) bf16 ? sized.template operator()<__nv_bfloat16, 64>() : sized.template operator()<float, 64>();
  else bf16 ? sized.template operator()<__nv_bfloat16, 128>() : sized.template operator()<float, 128>();
}

template <class P>
void launch_recurrent(const P& p) {
  if (p.N * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts<P> x(p);
  const bool usual = is_usual(x), ring = is_usual(x, true), front = is_usual(x, false, true);
  by_size(p, [&]<class State, int kK, int kWarps, int kRows, int kSteps>() {
    constexpr int kColumns = kTile<kWarps, kRows> * kSteps;
    const int64_t tiles = p.V / kColumns;
    // Blocks of two steps that flush are better off without hints for more states beside their own loads.
    constexpr HintedStates kHinted{64, kFlushes<P> && kSteps == 2 ? 0 : 32};
    const Hints hints = hints_of(p, 1, state_of(p).dtype, tiles, kBlocks<kWarps>, kHinted, p.args.exec.device_id);
    const auto with = [&]<Call kCall>() {
      // With eight drafts, four columns a thread have registers only where the call is known.
      constexpr int kHalf = kCall == Call::kAny && kWarps == kManyWarps && kRows == 4 ? 2 : 1;
      const int bytes = memory_of<kCall, kWarps>(x, kK, kColumns).end * static_cast<int>(sizeof(float));
      launch<recurrent_kernel<State, kK, kWarps, kRows / kHalf, kSteps * kHalf, kCall, P>>(
          p.args.exec, Blocks::grid(p, tiles, 1), kWarps * 32, bytes, Blocks(p, tiles, hints), x);
    };
    if constexpr (kWarps == kFewWarps) {
      constexpr Call one = kFlushes<P> ? Call::kOneOnRing : Call::kOneDraft;
      if (p.T == 1 && (kFlushes<P> ? ring : usual)) return with.template operator()<one>();
      if constexpr (kFlushes<P> && kRows == 4 && kSteps == 1)
        if (usual && is_large(p)) return with.template operator()<Call::kLarge>();
      if (usual) return with.template operator()<Call::kUsual>();
      if constexpr (!kFlushes<P>)
        if (front) return with.template operator()<Call::kFront>();
    }
    if constexpr (kFlushes<P>)
      if (ring) return with.template operator()<Call::kRing>();
    with.template operator()<Call::kAny>();
  });
}

template <class P>
const char* why_not(const P& p) {
  if (const char* reason = wide_why_not(p)) return reason;
  if (p.varlen || present(p.args.parents)) return "takes chains of the same number of drafts";
  // With more drafts tensor cores are faster, except for entries that a ring holds committed.
  const bool ring = kFlushes<P> && present(p.args.records.ring_count);
  if (p.T > (ring ? kManyWarps : kFewWarps)) return ring ? "takes at most 8 drafts" : "takes at most 4 drafts";
  if (present(p.args.records.u) && p.args.records.u.shape[1] < p.T) return "needs records for all drafts";
  const Memory most(static_cast<int>(p.K), p.V % 128 ? 64 : 128, p.T > kFewWarps ? kManyWarps : kFewWarps, Sizes(p),
                    present(p.args.records.ring_count));
  if (most.end * static_cast<int>(sizeof(float)) > shared_memory_of_block(p.args.exec.device_id))
    return "needs more shared memory than a block of this GPU may have";
  return nullptr;
}

}  // namespace

const char* speculation_recurrent_why_not(const VerifyProblem& p) { return why_not(p); }
const char* speculation_recurrent_why_not(const FlushVerifyProblem& p) { return why_not(p); }

void verify_recurrent(const VerifyProblem& p) { launch_recurrent(p); }
const char* flush_registers_why_not(const FlushProblem& p) { return wide_why_not(p); }

void flush_registers(const FlushProblem& p) {
  if (p.layers * p.N * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts<FlushProblem> x(p);
  const bool usual = is_usual(x);
  by_size(p, [&]<class State, int kK, int kWarps, int kRows, int kSteps>() {
    constexpr int kColumns = kTile<kWarps, kRows>;
    const int64_t tiles = p.V / kColumns;
    const Hints hints =
        hints_of(p, layers_of(p), state_of(p).dtype, tiles, kBlocks<kFewWarps>, {64, 0}, p.args.exec.device_id);
    const int bytes = EntryMemory(kK, kColumns, x.entries, 0, true).end * static_cast<int>(sizeof(float));
    const auto with = [&]<bool kUsual>() {
      launch<flush_kernel<State, kK, kRows, kUsual>>(p.args.exec, Blocks::grid(p, tiles, p.layers), kWarps * 32, bytes,
                                                     LayeredBlocks(p, tiles, hints), x);
    };
    usual ? with.template operator()<true>() : with.template operator()<false>();
  });
  roll_convolution(p);
}
void flush_verify_recurrent(const FlushVerifyProblem& p) {
  roll_convolution(p);
  launch_recurrent(p);
  store_cursors(p);
}

}  // namespace kda::cuda
