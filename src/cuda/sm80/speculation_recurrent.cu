// Chains of few drafts (math.md 7), one after another from a state in registers, for sm_80 and newer, K = 64 or 128,
// V-first. The shortest way from the state to the outputs, and the fewest instructions for up to about four drafts.
//
// A block takes 32 to 128 value columns of a head. Its warps activate a draft each while the first of the state are on
// their way to registers, eight lanes a column. Then each draft, in registers:
//   read = S^T (alpha k)    out = S^T (alpha q)    u = beta (v - read)    o = out + (k . q) u    S <- alpha S + k u^T
// and no barrier is needed any more. The last draft needs no new S. Records to apply come first, as in a flush: entries.h.
//
// Sums over K have one order whatever the size of a block is: bits depend on nothing else in the call.
#include "cuda/front.h"
#include "cuda/sm80/entries.h"
#include "cuda/tile.h"

namespace kda::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kMaxDrafts = kWarps;  // each has a warp
template <int kRows>
constexpr int kTile = kThreads / kRowLanes* kRows;  // value columns in registers

// What a draft needs, in shared memory.
template <int kK>
struct alignas(16) Prepared {
  float alpha[kK], k[kK], alpha_k[kK], alpha_q[kK];
};
constexpr int kVectors = 4;  // of kK floats, in Prepared

// Where things are in shared memory, in floats.
struct Memory {
  int drafts;
  int v, factors;
  FrontMemory front;
  EntryMemory entries;

  // entries: to apply at most.
  Memory(int K, int drafts, int columns, int entries, const kda_conv_inputs& conv)
      : drafts(drafts),
        v(drafts * kVectors * K),       // before: [drafts] Prepared, or q and k as the convolution leaves them
        factors(v + drafts * columns),  // before: [drafts][columns] of v
        front(conv, false, 0, kVectors * K, v, columns),
        entries(K, columns, entries, factors + 2 * drafts) {}  // before: beta, k . q
};

// One draft in kRows columns of a thread: read of each column, then out of each, spread over the eight lanes.
template <int kK, int kRows>
__device__ float products(const Prepared<kK>& x, const float (&S)[kRows][kK / kRowLanes]) {
  float even[2 * kRows] = {}, odd[2 * kRows] = {};  // two chains each
#pragma unroll
  for (int e = 0; e < kK / kRowLanes; e += 4) {
    const float4 k = load_four(x.alpha_k + channel(e)), q = load_four(x.alpha_q + channel(e));
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
template <int kK, int kRows>
__device__ void update(const Prepared<kK>& x, const float (&u)[kRows], float (&S)[kRows][kK / kRowLanes]) {
#pragma unroll
  for (int e = 0; e < kK / kRowLanes; e += 4) {
    const float4 alpha = load_four(x.alpha + channel(e)), k = load_four(x.k + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float* four = S[row] + e;
      four[0] = fmaf(u[row], k.x, four[0] * alpha.x), four[1] = fmaf(u[row], k.y, four[1] * alpha.y);
      four[2] = fmaf(u[row], k.z, four[2] * alpha.z), four[3] = fmaf(u[row], k.w, four[3] * alpha.w);
    }
  }
}

// ---- entries to apply, in front of a block's drafts ----

template <int kK, int kColumns>
struct BlockEntries {
  const Before& before;
  EntryChannel channel;
  int next, count = 0;

  // Asks for the first of them, and for u of all.
  __device__ BlockEntries(const Before& before, const EntryMemory& m, float* shared)
      : before(before), next(before.newest) {
    if (own_channel() >= 0) channel.fetch(before, own_channel(), next);
    const int column = static_cast<int>(threadIdx.x);
    for (int w = before.newest; w >= 0 && count < m.entries; w = before.window.before(w), ++count)
      if (column < kColumns)
        copy_async(shared + m.u + count * kColumns + column, &before.entries.u_at(before.window.entry(w), column));
  }
  // A barrier behind this makes w, f and u visible to all.
  __device__ void prepare(const EntryMemory& m, float* shared) {
    if (!count) return;
    if (!count) return;
    if (own_channel() >= 0) prepare_entries(before, channel, next, own_channel(), m, shared);
    wait_for_copies();
  }

 private:
  __device__ static int own_channel() { return static_cast<int>(threadIdx.x) - (kThreads - kK); }
};

template <int kK, int kColumns, int kRows>
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
        S[row][e] = fmaf(u[row], four.x, S[row][e]), S[row][e + 1] = fmaf(u[row], four.y, S[row][e + 1]);
        S[row][e + 2] = fmaf(u[row], four.z, S[row][e + 2]), S[row][e + 3] = fmaf(u[row], four.w, S[row][e + 3]);
      }
    }
  }
}

// A thread's columns of a state, as many as they are wide.
template <class State, int kK, int kRows>
__device__ void load_state(const Rows<true>& from, float (&S)[kRows][kK / kRowLanes]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) from.template load<State>(row, kK, S[row]);
}
// S becomes what lies in memory then.
template <class State, int kK, int kRows>
__device__ void store_state(const Rows<true>& to, float (&S)[kRows][kK / kRowLanes]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (float& s : S[row]) s = static_cast<float>(static_cast<State>(s));
    to.template store<State>(row, kK, S[row]);
  }
}

template <class State, int kK, int kRows>
__global__ void __launch_bounds__(kThreads, 4)
    flush_kernel(const __grid_constant__ FlushProblem p, const __grid_constant__ Parts x, const Blocks blocks,
                 const EntryMemory m) {
  extern __shared__ float4 dynamic[];
  float* shared = reinterpret_cast<float*>(dynamic);
  constexpr int kColumns = kTile<kRows>;
  const Place at(blocks);
  const auto layers = static_cast<unsigned>(x.layers);
  const unsigned v0 = at.tile * kColumns;
  if (at.layer < layers && at.in_first_wave(blocks))
    expect_states<FlushProblem, kThreads>(x, at, kColumns, m.entries, kK);
  wait_for_stream();
  if (at.layer >= layers) return;  // the grid's last rows
  const Indices indices = indices_of(p, at.n);
  const Request r = request_of(p, tokens_of(p, at.n), indices);
  if (!r.s.live) return;
  const Before before = before_drafts<FlushProblem>(x, at, r, v0);
  BlockEntries<kK, kColumns> entries(before, m, shared);
  const int row0 = first_row<kRows>();
  const Rows<true> state(x.h0, KDA_STATE_V_FIRST, static_cast<unsigned>(r.s.slot), at.hv,
                         v0 + static_cast<unsigned>(row0), at.layer);
  float S[kRows][kK / kRowLanes];
  load_state<State, kK>(state, S);
  let_next_start();
  entries.prepare(m, shared);
  __syncthreads();  // w, f and u are in shared memory
  apply_entries<kK, kColumns>(shared, m, entries.count, row0, S);
  store_state<State, kK>(state, S);
}

// ---- drafts ----

template <class State, int kK, int kRows, int kSteps, class P>
__global__ void __launch_bounds__(kThreads, 4)
    recurrent_kernel(const __grid_constant__ P p, const __grid_constant__ Parts x, const Blocks blocks,
                     const Memory m) {
  extern __shared__ float4 dynamic[];
  float* shared = reinterpret_cast<float*>(dynamic);
  constexpr int kColumns = kTile<kRows> * kSteps;
  constexpr int kPerLane = kK / 32;
  constexpr int kValues = kMaxDrafts * kColumns / kThreads;  // of a thread
  const Tokens& tokens = x.tokens;
  const Place at(blocks);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row0 = first_row<kRows>();
  const unsigned v0 = at.tile * kColumns;
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if (thread >= kColumns) return;
    for (; t < end; ++t) {
      char* to =
          tokens.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv) + (v0 + threadIdx.x) * tokens.o.size();
      store_element(to, tokens.o.dtype, 0);
    }
  };
  const int T = static_cast<int>(p.T), t = warp;  // this warp's draft
  TokenKeys<kPerLane, 32> draft(lane);
  draft.locate(tokens, at.n, static_cast<unsigned>(t), at.hv, at.h);
  // A thread's values: of column thread % kColumns, and some drafts.
  constexpr int kAtOnce = kThreads / kColumns;
  const char* from_v = tokens.v.at(at.n, static_cast<unsigned>(thread / kColumns), at.hv) +
                       (v0 + threadIdx.x % kColumns) * tokens.v.size();
  if (at.n < p.N && at.in_first_wave(blocks)) {
    if (!m.front.given && t < T) draft.expect(tokens);
    expect_states<P, kThreads>(x, at, kColumns, m.entries.entries, kK);
  }
  wait_for_stream();
  if (at.layer || at.n >= p.N) return;  // the grid's last rows
  const Indices indices = indices_of(p, at.n);
  unsigned values[kValues];
  const auto fetch = [&]<bool kNarrow>() {
    if (t < T) draft.template fetch_gate<kNarrow>(tokens);
    if (t < T && !m.front.given) draft.template fetch_keys<kNarrow>(tokens);
    const char* from = from_v;
#pragma unroll
    for (int i = 0; i < kValues; ++i, from += kAtOnce * static_cast<uint64_t>(tokens.v.stride1))
      values[i] = !m.front.given && thread / kColumns + i * kAtOnce < T ? load_raw<kNarrow>(from, tokens.v.dtype) : 0;
  };
  tokens.narrow ? fetch.template operator()<true>() : fetch.template operator()<false>();
  const Request r = request_of(p, tokens_of(p, at.n), indices);
  if (!r.s.live) return zero_outputs(at.n, 0, T);
  const auto rows_of = [&](const View& t) {
    return Rows<true>(t, KDA_STATE_V_FIRST, static_cast<unsigned>(r.s.slot), at.hv, v0 + static_cast<unsigned>(row0));
  };

  // Everything is asked for before anything is waited for: entries first, the state last, which takes longest.
  const Before before = before_drafts<P>(x, at, r, v0);
  BlockEntries<kK, kColumns> entries(before, m.entries, shared);
  if (m.front.given) {  // before the state takes the registers
    FrontDrafts<kThreads, kK, kMaxDrafts> convolution(m.front);
    convolution.fetch(p, at, r.s, T, v0);
    convolution.values(p, at, r.s, T, v0, shared);
  }
  // Four columns a thread leave no registers for what is on its way; two do, and few blocks had better not wait twice.
  if constexpr (kRows == 4) entries.prepare(m.entries, shared);
  float S[kRows][kK / kRowLanes] = {};
  Rows<true> from = rows_of(x.h0);
  if (r.s.initial) load_state<State, kK>(from, S);
  let_next_start();

  if constexpr (kRows != 4) entries.prepare(m.entries, shared);
  auto* prepared = reinterpret_cast<Prepared<kK>*>(shared);
  if (m.front.given) {
    __syncthreads();  // q, k and v of all drafts are in shared memory
#pragma unroll
    for (int e = 0; t < T && e < kPerLane; ++e) {
      const float* row = shared + t * kVectors * kK + draft.channel(e);
      draft.take(e, row[0], row[kK]);
    }
    __syncwarp();  // a draft's q and k are read: what is prepared will lie there
  }
  Entries record;
  if (r.slot >= 0) record = Entries(x.records, at, r.slot, v0);
  if (t < T) {
    draft.activate(tokens, warp_sums);
    const int entry = r.slot >= 0 && at.tile == 0 ? r.verify.entry(r.verify.token(t)) : -1;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const int c = draft.channel(e);
      const float alpha = draft.alpha[e], k = draft.k[e];
      prepared[t].alpha[c] = alpha, prepared[t].k[c] = k;
      prepared[t].alpha_k[c] = alpha * k, prepared[t].alpha_q[c] = alpha * draft.q[e];
      if (entry >= 0) record.alpha_at(entry, c) = alpha;
      if (entry >= 0 && at.h * blocks.group.divisor == at.hv) record.k_at(entry, c) = k;
    }
    if (lane == 0) shared[m.factors + t] = draft.beta, shared[m.factors + m.drafts + t] = draft.qk;
  }
  if (!m.front.given) {
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (thread / kColumns + i * kAtOnce < T)
        shared[m.v + i * kThreads + thread] = value_of(tokens.v.dtype, values[i]);
  }
  __syncthreads();  // drafts, values, w and u are in shared memory

  // Of the eight lanes of kRows columns the first four have u, the others o.
  constexpr int kLanes = kRowLanes / (2 * kRows);  // of each number
  const int own = lane % kRowLanes;
  const bool first = own % kLanes == 0;
  int column = row0 + own % 4 / kLanes;
#pragma unroll 1
  for (int step = 0;;) {
    if (entries.count) {
      apply_entries<kK, kColumns>(shared, m.entries, entries.count, step * kTile<kRows> + row0, S);
      if constexpr (kFlushes<P>) {
        Rows<true> to = rows_of(x.hT);
        to.first += step * kTile<kRows> * static_cast<uint64_t>(to.row);
        if (before.apply) store_state<State, kK>(to, S);
      }
    }
    char* to_o = tokens.o.at(at.n, 0, at.hv) + (v0 + static_cast<unsigned>(column)) * tokens.o.size();
    char* to_u = r.slot >= 0 ? reinterpret_cast<char*>(&record.u_at(0, column)) : nullptr;
#pragma unroll 1
    for (int t = 0; t < T; ++t, to_o += tokens.o.stride1) {
      const float sum = products<kK, kRows>(prepared[t], S);
      const float own_u = shared[m.factors + t] * (shared[m.v + t * kColumns + column] - sum);
      const float u_of_o = __shfl_up_sync(kAll, own_u, 4, kRowLanes);
      if (own >= 4 && first) store_element(to_o, tokens.o.dtype, fmaf(shared[m.factors + m.drafts + t], u_of_o, sum));
      if (own < 4 && first && to_u)
        *reinterpret_cast<float*>(to_u + static_cast<unsigned>(r.verify.entry(r.verify.token(t))) *
                                             static_cast<uint64_t>(record.u_step)) = own_u;
      if (t + 1 == T) break;
      float u[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) u[row] = __shfl_sync(kAll, own_u, row * kLanes, kRowLanes);
      update<kK, kRows>(prepared[t], u, S);
    }
    if (++step == kSteps) break;
    column += kTile<kRows>;
    from.first += kTile<kRows> * static_cast<uint64_t>(from.row);
    if (r.s.initial) load_state<State, kK>(from, S);
    else
#pragma unroll
      for (auto& row : S)
#pragma unroll
        for (float& s : row) s = 0;
  }
}

// Columns of a block: as many as leave no SM idle. launch<State, kK, kRows, kSteps>()
template <class P, class Launch>
void by_size(const P& p, const Launch& launch) {
  const int64_t columns = layers_of(p) * p.N * p.HV * p.V, SMs = multiprocessors(p.args.exec.device_id);
  const bool few = columns < 96 * SMs, many = p.V % 128 == 0 && columns >= 512 * SMs;
  const auto sized = [&]<class State, int kK>() {
    if (few) return launch.template operator()<State, kK, 2, 1>();
    if constexpr (kVerifies<P>)  // which prepares drafts once for both steps; a flush had better be short
      if (many) return launch.template operator()<State, kK, 4, 2>();
    launch.template operator()<State, kK, 4, 1>();
  };
  const bool bf16 = state_of(p).dtype == KDA_BF16;
  if (p.K == 64) bf16 ? sized.template operator()<__nv_bfloat16, 64>() : sized.template operator()<float, 64>();
  else bf16 ? sized.template operator()<__nv_bfloat16, 128>() : sized.template operator()<float, 128>();
}

template <class P>
void launch_recurrent(const P& p) {
  if (p.N * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts x(p);
  const auto at_once = static_cast<unsigned>(4 * multiprocessors(p.args.exec.device_id));
  by_size(p, [&]<class State, int kK, int kRows, int kSteps>() {
    constexpr int kColumns = kTile<kRows> * kSteps;
    const int64_t tiles = p.V / kColumns;
    const Memory m(kK, static_cast<int>(p.T), kColumns, static_cast<int>(entries_of(p)), p.args.conv);
    launch<recurrent_kernel<State, kK, kRows, kSteps, P>>(p.args.exec, Blocks::grid(p, tiles, 1), kThreads,
                                                          m.entries.end * static_cast<int>(sizeof(float)), p, x,
                                                          Blocks(p, tiles, at_once), m);
  });
}

template <class P>
const char* why_not(const P& p) {
  if (const char* reason = wide_why_not(p)) return reason;  // a missing device among them
  if (p.varlen || present(p.args.parents)) return "takes chains of the same number of drafts";
  if (p.T > kMaxDrafts) return "takes at most 4 drafts";
  if (present(p.args.records.u) && p.args.records.u.shape[1] < p.T) return "needs records for all drafts";
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
  const Parts x(p);
  const auto at_once = static_cast<unsigned>(4 * multiprocessors(p.args.exec.device_id));
  by_size(p, [&]<class State, int kK, int kRows, int kSteps>() {
    constexpr int kColumns = kTile<kRows>;
    const int64_t tiles = p.V / kColumns;
    const EntryMemory m(kK, kColumns, static_cast<int>(entries_of(p)), 0);
    launch<flush_kernel<State, kK, kRows>>(p.args.exec, Blocks::grid(p, tiles, p.layers), kThreads,
                                           m.end * static_cast<int>(sizeof(float)), p, x, Blocks(p, tiles, at_once), m);
  });
  roll_convolution(p);
}
void flush_verify_recurrent(const FlushVerifyProblem& p) {
  roll_convolution(p);
  launch_recurrent(p);
  store_cursors(p);
}

}  // namespace kda::cuda
