// Speculative decoding (math.md 7) with tensor cores, for sm_80 and newer, K = 64 or 128, V-first.
//
// Bytes: verify reads a state, a flush reads and writes it, both in one pass the same once; records are 1.5 KB a token
// and head at K = V = 128. All else must hide behind that: a block takes 32 to 128 value columns of a head and prepares what
// does not depend on the column (drafts' keys, decays, scores) once, while its part of the state comes to shared memory
// asynchronously; blocks of an SM are in different phases and keep the memory busy for one another.
//
//   kG_t, qG_t   k_t, q_t decayed from the drafts' start through t, products of alpha walking back over the path
//   A[t,i], P[t,i]   k_t, q_t decayed from i through t, times k_i: the same walk stopped at i
//   X = kG S, O = qG S   [T,V]: products of 16 rows (8 drafts' kG, then their qG) with the state: m16n8k8 in tf32
//   u_t = beta_t (v_t - X_t - sum_i A[t,i] u_i)    o_t = O_t + (k_t . q_t) u_t + sum_i P[t,i] u_i
//
// A number is the sum of two in tf32, big + small; three products (small * small is left out) give 21 bits. A bf16 state is
// one tf32 and needs two. Sums over K go in four quarters, each an accumulator of its own, added in one order: the bits
// of a column are the same whether one warp adds up all quarters of it or each has a warp. They depend on nothing else.
//
// A flush is elementwise, S <- f S + sum_i w_i u_i with w_i = k_i decayed from i to the end (products in f64). What
// a ring holds committed but not applied, verify applies in registers only: the bits are those of a flush before it.
//
// Threads: a warp has some drafts; then 16 or 32 columns and K or a part of it; in the end a thread has a column. Four warps
// a block need the fewest instructions, eight the least time.
#include "cuda/sm80/parts.h"
#include "cuda/tile.h"

namespace kda::cuda {
namespace {

constexpr int kMaxColumns = 128;  // of a block
constexpr int kQuarters = 4;
constexpr int64_t kMaxEntries = 64;  // that shared memory has room for

// Where things are in shared memory, in floats behind the tile of the state. Strides keep fragments free of bank conflicts.
struct Memory {
  int drafts, columns, entries;
  int keys_stride, w_stride;
  int scores, w, f, u, floats;

  // entries: to apply at most.
  Memory(int K, int drafts, int columns, int entries)
      : drafts(drafts), columns(columns), entries(entries), keys_stride(2 * K + 4), w_stride(2 * K + 8) {
    const int products = kMaxColumns * 2 * drafts;      // of all parts of K
    scores = std::max(drafts * keys_stride, products);  // before: [drafts][K] pairs k, alpha; then kG, qG; then X and O
    w = (scores + 2 * drafts * drafts + 2 * drafts + 3) / 4 * 4;  // before: A, P; beta, ancestors
    f = w + (entries + 1) / 2 * w_stride;                         // before: [entries / 2][K] pairs of w
    u = f + (entries ? K : 0);
    floats = u + entries * columns;
  }
};

__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four numbers as operands: x itself, of which tensor cores take the upper 19 bits, and the rest.
struct Split {
  unsigned big[4], small[4];
  Split() = default;
  __device__ explicit Split(float4 x) {
    const float all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      big[i] = __float_as_uint(all[i]);
      small[i] = __float_as_uint(all[i] - __uint_as_float(big[i] & 0xffffe000u));
    }
  }
};

// c += a b, where lanes hold b of two steps' rows (i = 0: the first). Without small_b all of b is big.
__device__ inline void mma3(float (&c)[4], const Split& a, const Split& b, int i, bool small_b) {
  if (small_b) mma(c, a.big, b.small[2 * i], b.small[2 * i + 1]);
  mma(c, a.small, b.big[2 * i], b.big[2 * i + 1]);
  mma(c, a.big, b.big[2 * i], b.big[2 * i + 1]);
}

// Sums of kCount numbers over a warp, the one of number lane * kCount / 32 in each lane: each exchange halves the numbers.
template <int kCount, int kStep = 16>
__device__ float sums_over_warp(const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    return sum_over<2 * kStep>(x[0]);
  } else {
    const bool upper = threadIdx.x & kStep;
    float half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float keep = upper ? x[i + kCount / 2] : x[i], give = upper ? x[i] : x[i + kCount / 2];
      half[i] = keep + __shfl_xor_sync(kAll, give, kStep);
    }
    return sums_over_warp<kCount / 2, kStep / 2>(half);
  }
}

// Accumulators of all slices of eight drafts and of a warp's columns, eight a tile.
template <int kSlices, int kTiles>
struct Sums {
  float sum[kSlices][kTiles][4];
  __device__ Sums& operator+=(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kSlices * kTiles * 4; ++i)
      sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] += other.sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4];
    return *this;
  }
};

// The next entries from w back, of a thread's channel.
struct EntryChannel {
  static constexpr int kAtOnce = 4;
  float key[kAtOnce], alpha[kAtOnce];
  int count = 0;

  // Asks for them.
  __device__ void fetch(const Before& b, int c, int& w) {
    count = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      key[i] = 0, alpha[i] = 1;
      if (w < 0) continue;
      const int entry = b.window.entry(w);
      key[i] = b.entries.k_at(entry, c), alpha[i] = b.entries.alpha_at(entry, c);
      ++count, w = b.window.before(w);
    }
  }
};

// w_i of all entries from the newest back, and f: a thread a channel c, whose first entries are there and from w on are
// not.
__device__ inline void prepare_entries(const Before& b, EntryChannel& x, int w, int c, const Memory& m, float* shared) {
  double product = 1;
  float* to = shared + m.w + 2 * c;
  for (;;) {
#pragma unroll
    for (int i = 0; i < x.kAtOnce; ++i) {  // a pair's second number is 0 without an entry
      if (i < (x.count + 1) / 2 * 2) to[i / 2 * m.w_stride + i % 2] = x.key[i] * static_cast<float>(product);
      product *= x.alpha[i];
    }
    if (w < 0) break;
    to += x.kAtOnce / 2 * m.w_stride;
    x.fetch(b, c, w);
  }
  shared[m.f + c] = static_cast<float>(product);
}

// u of eight entries and 16 columns: rows are columns n and n + 8, steps are entries 2 j, then 2 j + 1. Zeros without an
// entry.
__device__ inline Split fragment_of_u(const float* u, const Memory& m, int entry, int entries, int n) {
  const auto at = [&](int e, int column) { return e < entries ? u[e * m.columns + column] : 0.0f; };
  return Split(make_float4(at(entry, n), at(entry, n + 8), at(entry + 1, n), at(entry + 1, n + 8)));
}

// S <- f S + sum_i w_i u_i of a lane's 16 channels and kTiles columns: the sum on tensor cores, 16 channels as two times
// eight; what accumulates from flush to flush, S, is rounded to nearest as tensor cores do not.
template <int kTiles>
__device__ void apply_entries(const float* shared, const Memory& m, const float* u, int entries,
                              const Split (&first)[kTiles / 2], int group, int n, int j, float4 (&S)[kTiles]) {
  float even[kTiles / 2][4] = {}, odd[kTiles / 2][4] = {};  // channels
  for (int entry = 2 * j; entry - 2 * j < entries; entry += 8) {
    float4 pairs{};
    if (entry < entries)
      pairs = *reinterpret_cast<const float4*>(shared + m.w + entry / 2 * m.w_stride + 2 * (16 * group + 2 * n));
    const Split w(pairs);
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      const Split a = entry < 8 ? first[i] : fragment_of_u(u, m, entry, entries, 16 * i + n);
      mma3(even[i], a, w, 0, true), mma3(odd[i], a, w, 1, true);
    }
  }
  const float4 f = *reinterpret_cast<const float4*>(shared + m.f + 16 * group + 4 * j);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float *x = even[tile / 2] + tile % 2 * 2, *y = odd[tile / 2] + tile % 2 * 2;
    float4& to = S[tile];
    to = make_float4(fmaf(to.x, f.x, x[0]), fmaf(to.y, f.y, y[0]), fmaf(to.z, f.z, x[1]), fmaf(to.w, f.w, y[1]));
  }
}

// One draft, in registers of a warp: activated, then walked back to the start.
template <int kPerLane, int kMaxDrafts>
struct Draft {
  TokenKeys<kPerLane, 32> key{static_cast<int>(threadIdx.x % 32)};
  int t;

  __device__ float2* pair(const Memory& m, float* shared, int draft, int i) const {
    return reinterpret_cast<float2*>(shared + draft * m.keys_stride) + key.channel(i);
  }

  // Leaves k and alpha in shared memory.
  __device__ void activate(const Tokens& x, const Memory& m, float* shared) {
    key.activate(x, warp_sums);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) *pair(m, shared, t, i) = make_float2(key.k[i], key.alpha[i]);
  }
  __device__ void record(const Entries& to, int entry, bool k_too) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      to.alpha_at(entry, key.channel(i)) = key.alpha[i];
      if (k_too) to.k_at(entry, key.channel(i)) = key.k[i];
    }
  }

  // k and q become kG and qG; writes the draft's row of scores.
  __device__ void walk(const Window& window, const Memory& m, float* shared) {
    float* scores = shared + m.scores;
    const int lane = static_cast<int>(threadIdx.x % 32);
    constexpr int kCount = 2 * kMaxDrafts;             // A of step 0, 1, .. then P; the last P is k . q itself
    const int mine = lane * kCount / 32 % kMaxDrafts;  // step of this lane's sum
    float sums[kCount] = {};
    int ancestor = 0, i = t;
    unsigned mask = 0;
#pragma unroll
    for (int step = 0; step < kMaxDrafts; ++step) {
      if (i < 0) continue;
      i = window.parent(i);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) key.k[j] *= key.alpha[j], key.q[j] *= key.alpha[j];
      if (i < 0) continue;
      mask |= 1u << i;
      if (step == mine) ancestor = i;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float2 k_alpha = *pair(m, shared, i, j);
        sums[step] = fmaf(key.k[j], k_alpha.x, sums[step]);
        sums[kMaxDrafts + step] = fmaf(key.q[j], k_alpha.x, sums[kMaxDrafts + step]);
        key.alpha[j] = k_alpha.y;
      }
    }
    const float sum = sums_over_warp(sums);
    float* row = scores + (lane * kCount / 32 >= kMaxDrafts ? m.drafts * m.drafts : 0) + t * m.drafts;
    if (mine < __popc(mask)) row[ancestor] = sum;
    if (lane == 0) {
      scores[m.drafts * m.drafts + t * m.drafts + t] = key.qk;
      float* rest = scores + 2 * m.drafts * m.drafts;
      rest[t] = key.beta, rest[m.drafts + t] = __uint_as_float(mask);
    }
  }

  __device__ void store(const Memory& m, float* shared) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) *pair(m, shared, t, i) = make_float2(key.k[i], key.q[i]);
  }
};

template <class State, int kK, int kMaxDrafts, int kWarps, class P>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 4       ? 3
                                               : kMaxDrafts == 8 ? 2
                                                                 : 1)
    mma_kernel(const __grid_constant__ P p, const __grid_constant__ Parts x, const Blocks blocks, const Memory m) {
  extern __shared__ float4 dynamic[];
  const Tile<State, kK> tile(dynamic);
  float* shared = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + Tile<State, kK>::bytes(m.columns));
  constexpr int kThreads = kWarps * 32, kWarpColumns = kMaxColumns / kWarps, kTiles = kWarpColumns / 8;
  constexpr int kPerLane = kK / 32, kSlices = kMaxDrafts / 8;
  constexpr int kPerWarp = kMaxDrafts / kWarps;  // drafts of a warp
  const Tokens& tokens = x.tokens;
  const Place at(blocks);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const unsigned v0 = at.tile * static_cast<unsigned>(m.columns), own_v = v0 + threadIdx.x;
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if (thread >= m.columns) return;
    for (; kVerifies<P> && t < end; ++t) {
      char* to = tokens.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv) + own_v * tokens.o.size();
      store_element(to, tokens.o.dtype, 0);
    }
  };
  // All addresses that need nothing from memory are ready before the wait for the kernel before, and drafts are asked for
  // before the wait for the slot.
  [[maybe_unused]] Draft<kPerLane, kMaxDrafts> drafts[kPerWarp];
  [[maybe_unused]] const char* from_v = nullptr;
  [[maybe_unused]] unsigned values[kMaxDrafts];  // of the thread's column
  [[maybe_unused]] int T = 0;
  [[maybe_unused]] const auto locate = [&](unsigned b, unsigned t0) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      drafts[i].t = warp + i * kWarps;
      drafts[i].key.locate(tokens, b, t0 + static_cast<unsigned>(drafts[i].t), at.hv, at.h);
    }
    from_v = tokens.v.at(b, t0, at.hv) + own_v * tokens.v.size();
  };
  if constexpr (kVerifies<P>) {
    if (!p.varlen) locate(at.n, 0);
  }
  wait_for_stream();
  if (at.layer >= x.layers) return;  // the grid's last rows
  if constexpr (kVerifies<P>) {
    if (at.n == p.N) return zero_outputs(0, end_of_sequences(p, p.args.in), p.T);
  }
  const Indices indices = indices_of(p, at.n);
  const Sequence sequence = tokens_of(p, at.n);
  if constexpr (kVerifies<P>) {
    T = static_cast<int>(min(sequence.length, static_cast<int64_t>(m.drafts)));
    if (p.varlen) locate(0, static_cast<unsigned>(sequence.t0));
    const auto fetch = [&]<bool kNarrow>() {
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (drafts[i].t < T) drafts[i].key.template fetch<kNarrow>(tokens);
      const char* from = from_v;
#pragma unroll
      for (int t = 0; t < kMaxDrafts; ++t, from += tokens.v.stride1)
        values[t] = t < T && thread < m.columns ? load_raw<kNarrow>(from, tokens.v.dtype) : 0;
    };
    tokens.narrow ? fetch.template operator()<true>() : fetch.template operator()<false>();
  }
  const Request r = request_of(p, sequence, indices);
  if (!r.s.live) return zero_outputs(r.s.b, r.s.t0, r.s.t0 + r.s.length);
  const auto place_of = [&](const View& t) {
    return t.at(static_cast<unsigned>(r.s.slot), at.hv, v0) + at.layer * t.layer;
  };

  // Entries are asked for before the state, which takes longer and is not needed as soon.
  const Before before = before_drafts<P>(x, at, r, v0);
  const int own_channel = thread - (kThreads - kK);  // the last threads: the first have drafts
  EntryChannel entry_channel;
  int next = before.newest;
  if (own_channel >= 0) entry_channel.fetch(before, own_channel, next);
  int entries = 0;
  for (int w = before.newest; w >= 0 && entries < m.entries; w = before.window.before(w), ++entries)
    if (thread < m.columns)
      copy_async(shared + m.u + entries * m.columns + thread, &before.entries.u_at(before.window.entry(w), thread));
  tile.template ask<kThreads>(place_of(x.h0), x.h0.stride2, m.columns, r.s.initial);
  if (entries && own_channel >= 0) prepare_entries(before, entry_channel, next, own_channel, m, shared);
  [[maybe_unused]] Entries record;
  if constexpr (kVerifies<P>) {
    if (r.slot >= 0) record = Entries(x.records, at, r.slot, v0);
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      if (drafts[i].t >= T) continue;
      drafts[i].activate(tokens, m, shared);
      if (at.tile == 0 && r.slot >= 0)
        drafts[i].record(record, r.verify.entry(r.verify.token(drafts[i].t)), at.h * blocks.group.divisor == at.hv);
    }
    __syncthreads();  // keys and decays of all drafts are in shared memory
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts[i].t < T) drafts[i].walk(r.verify, m, shared);
    __syncthreads();  // keys and decays are read
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts[i].t < T) drafts[i].store(m, shared);
  }
  tile.wait();
  __syncthreads();  // the state, w, u, kG, qG and scores are in shared memory

  const int groups = m.columns / kWarpColumns, parts = kWarps / groups;
  const int column0 = warp % groups * kWarpColumns, part = warp / groups;
  const int n = lane / 4, j = lane % 4;  // of fragments
  [[maybe_unused]] Sums<kSlices, kTiles> all{};
  const auto multiply = [&]<bool kApply>() {
    constexpr int kSteps = kK / kQuarters / 16;
    const State* columns = tile.lane(column0 + n, j);
    const int twist = tile.twist(n);
    const int row = kSlices == 1 ? min(n, m.drafts - 1) : n;  // rows beyond the drafts are nobody's
    [[maybe_unused]] const float* keys = shared + row * m.keys_stride + 8 * j;
    [[maybe_unused]] const float* u = shared + m.u + column0;
    [[maybe_unused]] Split first[kTiles / 2];
#pragma unroll
    for (int i = 0; kApply && i < kTiles / 2; ++i) first[i] = fragment_of_u(u, m, 2 * j, entries, 16 * i + n);
    [[maybe_unused]] char* to = nullptr;
    if constexpr (kFlushes<P>)
      to = place_of(x.hT) + static_cast<uint64_t>(column0 + n) * x.hT.stride2 + 4 * j * sizeof(State);
    const int quarters = parts == kQuarters ? 1 : 2;  // of a half, here
#pragma unroll 1
    for (int quarter = part * kQuarters / parts; quarter < (part + 1) * kQuarters / parts; quarter += quarters) {
      [[maybe_unused]] Sums<kSlices, kTiles> half{};
#pragma unroll 1
      for (int group = quarter * kSteps; group < (quarter + quarters) * kSteps; group += kSteps) {
        [[maybe_unused]] Sums<kSlices, kTiles> one{};
#pragma unroll
        for (int step = group; step < group + kSteps; ++step) {
          float4 S[kTiles];  // of this lane: four channels of four columns
#pragma unroll
          for (int i = 0; i < kTiles; ++i) S[i] = load_four(columns + i * 8 * kK + (step ^ twist) * 16);
          if constexpr (kApply) {
            apply_entries(shared, m, u, entries, first, step, n, j, S);
            if (kFlushes<P> && before.apply) {
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                if constexpr (sizeof(State) == 2) S[i] = rounded(S[i]);
                store_four(reinterpret_cast<State*>(to + static_cast<uint64_t>(8 * i) * x.hT.stride2) + step * 16,
                           S[i]);
              }
            }
          }
          if constexpr (kVerifies<P>) {
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
              const int next = slice ? min(8, m.drafts - 1 - n) * m.keys_stride : 0;
              const float4* pairs = reinterpret_cast<const float4*>(keys + next + step * 32);
              const Split low(pairs[0]), high(pairs[1]);  // channels 4 j and 4 j + 1, then the others
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                const Split state(S[i]);
                constexpr bool kSmall = sizeof(State) == 4 || kApply;  // a bf16 state is big
                mma3(one.sum[slice][i], low, state, 0, kSmall), mma3(one.sum[slice][i], high, state, 1, kSmall);
              }
            }
          }
        }
        if constexpr (kVerifies<P>) half += one;
      }
      if constexpr (kVerifies<P>) all += half;
    }
  };
  if (!kVerifies<P> || entries) multiply.template operator()<true>();
  else multiply.template operator()<false>();
  if constexpr (kVerifies<P>) {
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
        tokens.o.at(static_cast<unsigned>(r.s.b), static_cast<unsigned>(r.s.t0), at.hv) + own_v * tokens.o.size();
    float u[kMaxDrafts];
#pragma unroll
    for (int t = 0; t < kMaxDrafts; ++t) {
      if (t >= T) break;
      const float *A = scores + t * m.drafts, *P_ = A + m.drafts * m.drafts;
      const unsigned ancestors = __float_as_uint(beta[m.drafts + t]);
      float rest = value_of(tokens.v.dtype, values[t]) - whole(t), o = whole(m.drafts + t);
#pragma unroll
      for (int i = 0; i < t; ++i) {
        if (!(ancestors >> i & 1)) continue;
        rest = fmaf(-A[i], u[i], rest), o = fmaf(P_[i], u[i], o);
      }
      u[t] = beta[t] * rest;
      store_element(to, tokens.o.dtype, fmaf(P_[t], u[t], o));
      to += tokens.o.stride1;
      if (r.slot >= 0) record.u_at(r.verify.entry(r.verify.token(t)), thread) = u[t];
    }
  }
}

template <class State, int kK, int kMaxDrafts, int kWarps, class P>
void launch_sized(const P& p, const Parts& x, int64_t entries) {
  const int64_t heads = x.layers * p.N * p.HV, enough = 2 * multiprocessors(p.args.exec.device_id);
  int64_t columns = p.V % kMaxColumns ? 64 : kMaxColumns;
  while (columns > 32 && heads * (p.V / columns) < enough) columns /= 2;
  const int64_t tiles = p.V / columns;
  const Memory m(kK, x.room, static_cast<int>(columns), static_cast<int>(entries));
  const int bytes = Tile<State, kK>::bytes(m.columns) + m.floats * static_cast<int>(sizeof(float));
  launch<mma_kernel<State, kK, kMaxDrafts, kWarps, P>>(p.args.exec, Blocks::grid(p, tiles, x.layers), kWarps * 32,
                                                       bytes, p, x, Blocks(p, tiles), m);
}

// Most entries that a flush may find.
int64_t ring_entries(const kda_records& r) { return present(r.ring_count) ? r.u.shape[r.u.ndim - 3] : 0; }
int64_t entries_of(const VerifyProblem& p) { return ring_entries(p.args.records); }
int64_t entries_of(const FlushProblem& p) { return present(p.args.records.ring_count) ? p.R : std::min(p.R, p.T); }
int64_t entries_of(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  if (present(a.records.ring_count)) return ring_entries(a.records);
  const int64_t R = a.last.u.shape[1];
  return present(a.last_parents) ? std::min(R, a.last_parents.shape[1]) : R;
}

template <class P>
void launch_mma(const P& p, const kda_tensor& state) {
  if ((p.N + p.varlen) * p.HV * layers_of(p) == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts x(p);
  const int64_t entries = entries_of(p);
  const auto sized = [&]<class State, int kK>() {
    if constexpr (kVerifies<P>) {
      if (x.room > 8) return launch_sized<State, kK, 16, 8>(p, x, entries);
      // Many blocks of four warps, unless there are too few of them: not enough heads, or shared memory.
      const int64_t SMs = multiprocessors(p.args.exec.device_id), heads = p.N * p.HV;
      const bool many = kFlushes<P> ? heads >= 4 * SMs && x.room <= 4 : heads >= 2 * SMs || x.room <= 4;
      if constexpr (kK == 128) {
        if (many) return launch_sized<State, kK, 8, 4>(p, x, entries);
      }
    }
    launch_sized<State, kK, 8, 8>(p, x, entries);
  };
  const bool bf16 = state.dtype == KDA_BF16;
  if (p.K == 64) bf16 ? sized.template operator()<__nv_bfloat16, 64>() : sized.template operator()<float, 64>();
  else bf16 ? sized.template operator()<__nv_bfloat16, 128>() : sized.template operator()<float, 128>();
}

template <class P>
const char* why_not(const P& p, const kda_tensor& conv_x, const kda_tensor& state,
                    std::initializer_list<const kda_records*> records) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(conv_x)) return "has no fused convolution";
  if (entries_of(p) > kMaxEntries) return "takes at most 64 recorded entries a request";
  if (const char* reason = tile_why_not(p, layout_of(p), {&state}, 64)) return reason;
  if (const char* reason = parts_why_not(p, records, state)) return reason;
  return grid_why_not(p, p.V / 32, layers_of(p));
}

}  // namespace

const char* speculation_mma_why_not(const VerifyProblem& p) {
  return why_not(p, p.args.conv.x, p.args.states.h0, {&p.args.records});
}
const char* flush_staged_why_not(const FlushProblem& p) {
  return why_not(p, p.args.conv_x, p.args.state, {&p.args.records});
}
const char* speculation_mma_why_not(const FlushVerifyProblem& p) {
  return why_not(p, p.args.conv.x, p.args.states.h0, {&p.args.records, &p.args.last});
}

void verify_mma(const VerifyProblem& p) { launch_mma(p, p.args.states.h0); }
void flush_staged(const FlushProblem& p) { launch_mma(p, p.args.state); }
void flush_verify_mma(const FlushVerifyProblem& p) {
  launch_mma(p, p.args.states.h0);
  store_cursors(p);
}

}  // namespace kda::cuda
