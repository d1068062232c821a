// Speculative decoding (math.md 7) with tensor cores, for sm_80 and newer, K = 64 or 128, V-first.
//
// Bytes: verify reads a state; a flush reads and writes it; both in one pass also read and write it once. Records are
// 1.5 KB a token and head at K = V = 128. Everything else must hide behind that. A block takes 32 to 128 value
// columns of a head and prepares what does not depend on the column (drafts' keys, decays, scores) once, while its
// part of the state comes to shared memory asynchronously. The blocks of an SM are in different phases and keep the
// memory busy for one another.
//
//   kG_t, qG_t   k_t, q_t decayed from the drafts' start through t, products of alpha walking back over the path
//   A[t,i], P[t,i]   k_t, q_t decayed from i through t, times k_i: the same walk stopped at i
//   X = kG S, O = qG S   [T,V]: products of 16 rows (8 drafts' kG, then their qG) with the state: m16n8k8 in tf32
//   u_t = beta_t (v_t - X_t - sum_i A[t,i] u_i)    o_t = O_t + (k_t . q_t) u_t + sum_i P[t,i] u_i
//
// A number is the sum of two in tf32, big + small; three products (small * small is left out) give 21 bits. A bf16
// state is one tf32 number and needs two products. Sums over K are made in four quarters, each with its own
// accumulator, added in one order: the bits of a column are the same whether one warp adds up all its quarters or
// each quarter has a warp. They depend on nothing else.
//
// Recorded tokens are applied first (entries.h): those of the last round also to the state in memory, those that a
// ring holds committed but not applied in registers only. The bits are those of a separate flush before.
//
// Threads: first, a warp has a draft or two; then 16 columns and K or a part of it; in the end a thread has a column.
// On its fast path verify has few enough registers for three blocks of eight warps.
#include "cuda/drafts/mma_draft.h"

namespace kda::cuda {
namespace mma {
namespace {

// Blocks that an SM has registers for.
template <class P>
constexpr int blocks_of_SM(Traits call) {
  return call.fast && !kFlushes<P> ? 3 : call.max_drafts == 8 ? 2 : 1;
}

template <class Call, class P>
__global__ void __launch_bounds__(kThreads, blocks_of_SM<P>(Call::kValue))
    mma_kernel(const __grid_constant__ Blocks blocks, const __grid_constant__ Memory memory,
               const __grid_constant__ Parts<P> call) {
  extern __shared__ float4 dynamic[];
  constexpr Traits kCall = Call::kValue;
  constexpr int kMaxDrafts = kCall.max_drafts, kSlices = kMaxDrafts / 8;
  constexpr int kPerWarp = kMaxDrafts / kWarps;  // drafts of a warp
  const auto& x = fast_copy<kCall.fast, false, kCall.conv>(call);
  // A call on the fast path has the same layout, but the compiler knows most of it.
  const Memory m = kCall.fast ? Memory(kMaxDrafts, memory.columns, x.sizes) : memory;
  using State = Element<kCall>;
  const Tile<State, kMostK> tile(dynamic);
  float* shared = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + tile.bytes(m.columns));
  const int K = kCall.fast ? kMostK : x.K;
  const Tokens& tokens = x.tokens;
  const Place at(blocks);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const unsigned v0 = at.tile * static_cast<unsigned>(m.columns), own_v = v0 + threadIdx.x;
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if (thread >= m.columns) return;
    for (; t < end; ++t) {
      char* to =
          tokens.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv) + own_v * size_of(tokens.o_dtype);
      store_element(to, tokens.o_dtype, 0);
    }
  };

  // ---- addresses and hints, while the kernel before still runs ----

  Draft<kMaxDrafts> drafts[kPerWarp];
  const char* from_v = nullptr;
  unsigned values[kMaxDrafts];       // of the thread's column, if they are not in shared memory
  const bool front = m.front.given;  // q, k and v come from a convolution, which leaves them in shared memory
  int T = 0;
  const auto locate = [&](unsigned b, unsigned t0) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      drafts[i].t = warp + i * kWarps;
      drafts[i].key.locate(tokens, b, t0 + static_cast<unsigned>(drafts[i].t), at.hv, at.h);
    }
    from_v = tokens.v.at(b, t0, at.hv) + own_v * size_of(tokens.qkv_dtype);
    if (kCall.fast && !kCall.conv) {
#pragma unroll
      for (auto& draft : drafts) draft.key.pin_addresses();
      pin(from_v);
    }
  };
  const bool varlen = x.sizes.varlen, there = at.n < blocks.rows;
  const int most = static_cast<int>(x.sizes.T);
  if (!varlen) locate(at.n, 0);
  if (!varlen && there && at.is_among(blocks.hints.blocks)) {
    if (!front) {
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (drafts[i].t < most) drafts[i].key.expect(tokens);
      if (lane == 0 && warp < most) prefetch(from_v + warp * tokens.v.stride1);
    }
    expect_states<P, kThreads>(x, at, blocks.hints, static_cast<unsigned>(m.columns), m.entries.entries, K);
  }
  wait_for_stream();
  if (!there) return;  // the grid's last rows
  const int64_t N = blocks.rows - varlen;
  if (varlen && at.n == N) return zero_outputs(0, end_of_sequences(x.cu_seqlens, N, x.sizes.T), x.sizes.T);

  // ---- requests: indices, drafts, entries and the state, before the first wait ----

  Indices indices = indices_of(x.requests, at.n);
  pin(indices.state), pin(indices.records);
  const Sequence sequence = drafts_of(x, at.n);

  T = static_cast<int>(min(sequence.length, static_cast<int64_t>(m.drafts)));
  if (varlen) locate(0, static_cast<unsigned>(sequence.t0));
  const auto fetch = [&]<bool kNarrow>() {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      // (In blocks that flush, the state had better be requested once the drafts are there, as entries come first.)
      constexpr bool kIf = !kFlushes<P>;
      const bool is_there = drafts[i].t < T;
      if (!kIf && !is_there) continue;
      drafts[i].key.template fetch_gate<kNarrow, kIf>(tokens, is_there);
      if (!front) drafts[i].key.template fetch_keys<kNarrow, kIf>(tokens, is_there);
    }
    if (front) return;
    const char* from = from_v;
#pragma unroll
    for (int t = 0; t < kMaxDrafts; ++t, from += tokens.v.stride1) {
      values[t] = t < T && thread < m.columns ? load_raw<kNarrow>(from, tokens.qkv_dtype) : 0;
      pin(values[t]);
    }
  };
  tokens.narrow ? fetch.template operator()<true>() : fetch.template operator()<false>();

  const Request r = request_of(x.requests, sequence, indices);
  if (!r.s.live) return zero_outputs(r.s.b, r.s.t0, r.s.t0 + r.s.length);
  const auto place_of = [&](const View& t) { return t.at(static_cast<unsigned>(r.s.slot), at.hv, v0); };

  // Entries are requested before the state, which takes longer and is not needed as soon.
  const Before before = before_drafts<P>(x, at, r, v0);
  const int own_channel = thread - (kThreads - kMostK);  // the last threads: the first have drafts
  const bool has_channel = own_channel >= 0 && (kCall.fast || own_channel < K);
  EntryChannel entry_channel;
  int next = before.newest;
  if (has_channel) entry_channel.fetch(before, own_channel, next);
  int entries = 0;
  for (int w = before.newest; w >= 0 && entries < m.entries.entries; w = before.window.before(w), ++entries)
    if (thread < m.columns)
      copy_async(shared + m.entries.u + entries * m.columns + thread,
                 &before.entries.u_at(before.window.entry(w), thread));
  FrontDrafts<kThreads, kCall.fast ? kMostK : 0, kMaxDrafts> convolution(m.front, K);
  if (front) convolution.fetch(x.front, at, r.s, T, v0);

  if constexpr (kCall.fast) tile.template ask<kThreads>(place_of(x.state), x.state.stride2, m.columns, r.s.initial);
  else tile.template ask_any<kThreads>(place_of(x.state), x.state_dtype, x.state.stride2, m.columns, r.s.initial, K);
  let_next_start();
  if (entries && has_channel) prepare_entries(before, entry_channel, next, own_channel, m.entries, shared);

  // ---- activation and the walk back: scores, and keys and queries as the state sees them ----

  if (front) {
    convolution.values(x.front, at, r.s, T, v0, shared);
    __syncthreads();  // q, k and v of all drafts are in shared memory
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts[i].t < T) drafts[i].take(m, shared, K);
  }

  Entries record;
  if (r.slot >= 0) record = Entries(x.records, at, r.slot, v0);
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    if (drafts[i].t >= T) continue;
    drafts[i].activate(tokens, m, shared);
    if (at.tile == 0 && r.slot >= 0)
      drafts[i].record(record, r.verify.entry(r.verify.token(drafts[i].t)), at.h * blocks.group.divisor == at.hv, K);
  }
  __syncthreads();  // keys and decays of all drafts are in shared memory
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (drafts[i].t < T) drafts[i].walk(r.verify, m, shared);
  __syncthreads();  // keys and decays are read
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (drafts[i].t < T) drafts[i].store(m, shared);

  ptx::wait_for_all_copies();
  __syncthreads();  // the state, w, u, kG, qG and scores are in shared memory

  // ---- products X and O: a warp has some columns, and K or a part of it ----

  // Powers of two: groups of columns, parts of K.
  const int log_groups = __ffs(m.columns / kWarpColumns) - 1, parts = kWarps >> log_groups;
  const int part = warp >> log_groups, column0 = (warp - (part << log_groups)) * kWarpColumns;
  const int n = lane / 4, j = lane % 4;  // this lane's place in fragments
  Sums<kSlices> all{};
  const auto multiply = [&]<bool kApply>() {
    const int steps = K / kQuarters / 16;
    const State* columns = tile.lane(column0 + n, j);
    const int twist = tile.twist(n);
    const int row = kSlices == 1 ? min(n, m.drafts - 1) : n;  // rows beyond the drafts are not used
    const float* keys = shared + row * m.keys_stride + 8 * j;
    const float* u = shared + m.entries.u + column0;
    constexpr int kNear = 4;  // entries whose u stay in registers
    float near[kNear][kTiles];
#pragma unroll
    for (int e = 0; kApply && e < kNear; ++e)
#pragma unroll
      for (int i = 0; i < kTiles; ++i) near[e][i] = e < entries ? u[e * m.columns + 8 * i + n] : 0.0f;
    char* to = nullptr;
    if constexpr (kFlushes<P>)
      to = place_of(x.state) + static_cast<uint64_t>(column0 + n) * x.state.stride2 +
           4 * j * bytes_of_state<kCall>(x.state_dtype);
    const int quarters = parts == kQuarters ? 1 : 2;  // quarters of a half that this warp does
    const int halves = parts == 1 ? 2 : 1;
#pragma unroll 1
    for (int i = 0, quarter = part * halves * quarters; i < halves; ++i, quarter += quarters) {
      Sums<kSlices> half{};
#pragma unroll 1
      for (int group = quarter * steps; group < (quarter + quarters) * steps; group += steps) {
        Sums<kSlices> one{};
#pragma unroll
        for (int step = group; step < group + steps; ++step) {
          float4 S[kTiles];  // of this lane: four channels of four columns
#pragma unroll
          for (int i = 0; i < kTiles; ++i) S[i] = load_four(columns + i * 8 * kMostK + (step ^ twist) * 16);
          if constexpr (kApply) {
            const int c = step * 16 + 4 * j;
            const float4 f = load_four(shared + m.entries.f + c);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) S[i] = S[i] * f;
            for (int e = entries - 1; e >= kNear; --e) {
              const float4 w = load_four(shared + m.entries.w + e * kMostK + c);
#pragma unroll
              for (int i = 0; i < kTiles; ++i) S[i] = fma(u[e * m.columns + 8 * i + n], w, S[i]);
            }
#pragma unroll
            for (int e = kNear - 1; e >= 0; --e) {
              if (e >= entries) continue;
              const float4 w = load_four(shared + m.entries.w + e * kMostK + c);
#pragma unroll
              for (int i = 0; i < kTiles; ++i) S[i] = fma(near[e][i], w, S[i]);
            }
            if (kFlushes<P> && before.apply) {
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                S[i] = store_rounded<kCall>(to + static_cast<uint64_t>(8 * i) * x.state.stride2, step * 16,
                                            x.state_dtype, S[i]);
              }
            }
          }

#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice) {
            const int next = slice ? min(8, m.drafts - 1 - n) * m.keys_stride : 0;
            const float4* pairs = reinterpret_cast<const float4*>(keys + next + step * 32);
            const Split low(pairs[0]), high(pairs[1]);  // channels 4 j and 4 j + 1, then the others
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
              const Split state(S[i]);
              const bool small = kApply || !holds_bf16<kCall>(x.state_dtype);  // a bf16 state has no small part
              mma3(one.sum[slice][i], low, state, 0, small), mma3(one.sum[slice][i], high, state, 1, small);
            }
          }
        }
        half += one;
      }
      all += half;
    }
  };
  if (entries) multiply.template operator()<true>();
  else multiply.template operator()<false>();

  // ---- outputs: a thread has a column ----

  __syncthreads();           // kG and qG are read
  float* products = shared;  // [parts][kG of all drafts, then qG][columns]
  const auto product = [&](int part, int row) { return products + (part * 2 * m.drafts + row) * m.columns; };
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int t = slice * 8 + n;
    if (t >= T) continue;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float(&sum)[4] = all.sum[slice][i];
      const int column = column0 + 8 * i + 2 * j;
      *reinterpret_cast<float2*>(product(part, t) + column) = make_float2(sum[0], sum[1]);
      *reinterpret_cast<float2*>(product(part, m.drafts + t) + column) = make_float2(sum[2], sum[3]);
    }
  }
  __syncthreads();  // all parts of X and O are in shared memory
  if (thread >= m.columns) return;
  const auto whole = [&](int row) {
    const auto at = [&](int part) { return product(part, row)[thread]; };
    return parts == 1 ? at(0) : parts == 2 ? at(0) + at(1) : (at(0) + at(1)) + (at(2) + at(3));
  };
  const float* scores = shared + m.scores;
  const float* beta = scores + 2 * m.drafts * m.drafts;
  char* to =
      tokens.o.at(static_cast<unsigned>(r.s.b), static_cast<unsigned>(r.s.t0), at.hv) + own_v * size_of(tokens.o_dtype);
  float u[kMaxDrafts];
#pragma unroll
  for (int t = 0; t < kMaxDrafts; ++t) {
    if (t >= T) break;
    const float *A = scores + t * m.drafts, *P_ = A + m.drafts * m.drafts;
    const unsigned ancestors = __float_as_uint(beta[m.drafts + t]);
    const float v = front ? shared[m.front.v + t * m.columns + thread] : value_of(tokens.qkv_dtype, values[t]);
    float rest = v - whole(t), o = whole(m.drafts + t);
#pragma unroll
    for (int i = 0; i < t; ++i) {
      if (!kCall.fast && !(ancestors >> i & 1)) continue;
      rest = fmaf(-A[i], u[i], rest), o = fmaf(P_[i], u[i], o);
    }
    u[t] = beta[t] * rest;
    store_element(to, tokens.o_dtype, fmaf(P_[t], u[t], o));
    to += tokens.o.stride1;
    if (r.slot >= 0) record.u_at(r.verify.entry(r.verify.token(t)), thread) = u[t];
  }
}

// Shared memory of a block with so many columns.
template <class State>
int bytes_of(const Memory& m) {
  return Tile<State, kMostK>::bytes(m.columns) + m.floats * static_cast<int>(sizeof(float));
}

template <class P>
MmaPlan plan_of(const P& p, const Parts<P>& x) {
  MmaCall call{p.N * p.HV, p.V, room_of(p), fast_path_of(x)};
  // Kernels on rings are those of few drafts; a bf16 state with a convolution has none.
  const bool known = call.fast == FastPath::kPlain || (call.fast == FastPath::kConv && x.state_dtype == KDA_F32);
  if (!known || call.room > 8) call.fast = FastPath::kNone;
  const int device = p.args.exec.device_id, most = shared_memory_of_block(device);
  return mma_plan(call, multiprocessors(device), [&](int64_t columns) {
    const bool general = call.fast == FastPath::kNone, two_bytes = !general && x.state_dtype == KDA_BF16;
    const Memory m(general ? static_cast<int>(call.room) : 8, static_cast<int>(columns), x.sizes);
    return (two_bytes ? bytes_of<__nv_bfloat16>(m) : bytes_of<float>(m)) <= most;
  });
}

template <Traits kCall, class P>
void launch_kernel(const P& p, const Parts<P>& x, const MmaPlan& plan) {
  const int64_t tiles = p.V / plan.columns;
  const Memory m(kCall.fast ? kCall.max_drafts : static_cast<int>(room_of(p)), static_cast<int>(plan.columns), x.sizes);
  constexpr int kHinting = kFlushes<P> ? 1000 : 2;  // blocks of an SM that give hints: all of them for entries
  const Hints hints = hints_of(p, 1, x.state_dtype, tiles, kHinting, plan.hinted, p.args.exec.device_id);
  launch<mma_kernel<TypeOf<kCall>, P>>(p.args.exec, Blocks::grid(p, tiles, 1), kThreads, bytes_of<Element<kCall>>(m),
                                       Blocks(p, tiles, hints), m, x);
}

template <class P>
void launch_mma(const P& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts<P> x(p);
  const MmaPlan plan = plan_of(p, x);
  const bool f32 = x.state_dtype == KDA_F32;
  if (plan.max_drafts == 16) return launch_kernel<general(16)>(p, x, plan);
  if (plan.path == FastPath::kNone) return launch_kernel<general(8)>(p, x, plan);
  if constexpr (!kFlushes<P>)
    if (plan.path == FastPath::kConv) return launch_kernel<Traits{true, KDA_F32, 8, true}>(p, x, plan);
  f32 ? launch_kernel<Traits{true, KDA_F32, 8}>(p, x, plan) : launch_kernel<Traits{true, KDA_BF16, 8}>(p, x, plan);
}

}  // namespace
}  // namespace mma

const char* drafts_mma_why_not(const VerifyProblem& p) { return wide_why_not(p); }
const char* drafts_mma_why_not(const FlushVerifyProblem& p) { return wide_why_not(p); }

std::string drafts_mma_form(const VerifyProblem& p) { return text(mma::plan_of(p, Parts<VerifyProblem>(p))); }
std::string drafts_mma_form(const FlushVerifyProblem& p) { return text(mma::plan_of(p, Parts<FlushVerifyProblem>(p))); }

void drafts_mma(const VerifyProblem& p) { mma::launch_mma(p); }
void drafts_mma(const FlushVerifyProblem& p) {
  roll_convolution(p);
  mma::launch_mma(p);
  store_cursors(p);
}

}  // namespace kda::cuda
