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
// Threads: a warp has 16 columns and K or a part of it.
#include "cuda/sm80/layer.h"
#include "cuda/tile.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWarpColumns = 16, kQuarters = 4;

// Where things are in shared memory, in floats behind the tile of the state.
struct Memory {
  int drafts, columns, entries, keys_stride, keys, scores, w, u, floats;

  // entries: to flush.
  __host__ __device__ Memory(int K, int drafts, int columns, int entries)
      : drafts(drafts), columns(columns), entries(entries), keys_stride(K + 16) {
    const int products = kWarps * kWarpColumns * 2 * drafts;
    keys = 0;                                                                          // k, alpha; kG, qG; products
    scores = keys + (2 * drafts * keys_stride > products ? 2 * drafts * keys_stride : products);
    w = scores + 2 * drafts * drafts + 2 * drafts;                                     // A, P; beta, masks
    w = (w + 3) / 4 * 4;
    u = w + (entries ? (entries + 1) * K : 0);                                         // w, f
    floats = u + entries * columns;
  }
};

__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = big + small, big exact in tf32.
__device__ inline void split(float x, unsigned& big, unsigned& small) {
  big = __float_as_uint(x) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(big));
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

// Adds kG S and qG S of 16 channels and eight columns: eight drafts' kG in rows 0 to 7, their qG in 8 to 15. Channels are
// given to the two steps as they lie in float4: four neighbours a lane.
struct Operand {
  unsigned big[2][4], small[2][4];
  __device__ Operand(float4 kG, float4 qG) {
    split(kG.x, big[0][0], small[0][0]), split(qG.x, big[0][1], small[0][1]);
    split(kG.y, big[0][2], small[0][2]), split(qG.y, big[0][3], small[0][3]);
    split(kG.z, big[1][0], small[1][0]), split(qG.z, big[1][1], small[1][1]);
    split(kG.w, big[1][2], small[1][2]), split(qG.w, big[1][3], small[1][3]);
  }
};
__device__ inline void add_products(float (&to)[4], const Operand& keys, float4 S, bool small_too) {
  unsigned big[4], small[4];
  split(S.x, big[0], small[0]), split(S.y, big[1], small[1]), split(S.z, big[2], small[2]), split(S.w, big[3], small[3]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (small_too) mma(to, keys.big[i], small[2 * i], small[2 * i + 1]);
    mma(to, keys.small[i], big[2 * i], big[2 * i + 1]);
    mma(to, keys.big[i], big[2 * i], big[2 * i + 1]);
  }
}

// Accumulators of all slices of eight drafts and of 16 columns.
template <int kSlices>
struct Sums {
  float sum[kSlices][2][4];
  __device__ Sums& operator+=(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kSlices * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] += other.sum[i / 8][i / 4 % 2][i % 4];
    return *this;
  }
};

// Where a request's records of a head and a tile are: of entry 0, and elements from one entry to the next. Numbers alone:
// a copy of a tensor, or a reference to one of two, would live in local memory.
struct Entries {
  float *u = nullptr, *k = nullptr, *alpha = nullptr;
  int64_t u_step = 0, k_step = 0, alpha_step = 0;
};
// lead: dimensions before the slots, 1 if there are layers.
__device__ inline Entries entries_at(const kda_records& r, int lead, const Place& at, int64_t slot, int64_t v0) {
  const auto first = [&](const kda_tensor& t, int64_t head) {
    return static_cast<float*>(t.data) + (lead ? at.layer * t.stride[0] : 0) + slot * t.stride[lead] +
           head * t.stride[lead + 2];
  };
  return {first(r.u, at.hv) + v0,    first(r.k, at.h),        first(r.alpha, at.hv),
          r.u.stride[lead + 1],      r.k.stride[lead + 1],    r.alpha.stride[lead + 1]};
}

// A tile of a state.
struct Columns {
  char* data;
  int64_t step;  // elements from one column to the next
};
__device__ inline Columns columns_at(const kda_tensor& t, int lead, const Place& at, int64_t slot, int64_t v0) {
  const int64_t first = (lead ? at.layer * t.stride[0] : 0) + slot * t.stride[lead] + at.hv * t.stride[lead + 1] +
                        v0 * t.stride[lead + 2];
  return {static_cast<char*>(t.data) + first * dtype_size(t.dtype), t.stride[lead + 2]};
}

// What a call reads and writes. lead_of: dimensions before the slots.
__device__ inline const kda_tensor& state_of(const FlushProblem& p) { return p.args.state; }
__device__ inline const kda_tensor& state_of(const VerifyProblem& p) { return p.args.states.h0; }
__device__ inline const kda_tensor& state_of(const FlushVerifyProblem& p) { return p.args.states.h0; }
__device__ inline const kda_tensor& new_state_of(const FlushProblem& p) { return p.args.state; }
__device__ inline const kda_tensor& new_state_of(const FlushVerifyProblem& p) { return p.args.states.hT; }
__device__ inline const kda_records& last_of(const FlushProblem& p) { return p.args.records; }
__device__ inline const kda_records& last_of(const FlushVerifyProblem& p) {
  return present(p.args.records.ring_count) ? p.args.records : p.args.last;
}
__device__ inline int lead_of(const FlushProblem& p) { return p.args.state.ndim - 4; }
__device__ inline int lead_of(const Dims&) { return 0; }

// w_i of all entries from the newest back, and f behind them: the last kK threads, a channel each.
template <int kK>
__device__ void prepare_flush(const Entries& from, const Window& window, int64_t newest, float* w_of) {
  constexpr int kAtOnce = 4;
  const int c = static_cast<int>(threadIdx.x) - (kThreads - kK);
  if (c < 0) return;
  double product = 1;
  float* to = w_of + c;
  for (int64_t w = newest; w >= 0;) {
    float key[kAtOnce], alpha[kAtOnce];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      key[i] = 0, alpha[i] = 1;
      if (w < 0) continue;
      const int64_t entry = window.entry(w);
      key[i] = from.k[entry * from.k_step + c], alpha[i] = from.alpha[entry * from.alpha_step + c];
      ++count, w = window.before(w);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= count) break;
      *to = key[i] * static_cast<float>(product), to += kK;
      product *= alpha[i];
    }
  }
  *to = static_cast<float>(product);
}

// S <- f S + sum_i w_i u_i of four channels and of two columns, eight apart.
__device__ inline void apply_entries(const float* w_of, int stride_w, const float* u_of, int stride_u, int entries,
                                     float4 (&S)[2]) {
  float4 sum[2] = {};
  for (int i = 0; i < entries; ++i, w_of += stride_w, u_of += stride_u) {
    const float4 w = *reinterpret_cast<const float4*>(w_of);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float u = u_of[8 * half];
      float4& to = sum[half];
      to.x = fmaf(u, w.x, to.x), to.y = fmaf(u, w.y, to.y), to.z = fmaf(u, w.z, to.z), to.w = fmaf(u, w.w, to.w);
    }
  }
  const float4 f = *reinterpret_cast<const float4*>(w_of);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float4 &to = S[half], &add = sum[half];
    to.x = fmaf(to.x, f.x, add.x), to.y = fmaf(to.y, f.y, add.y);
    to.z = fmaf(to.z, f.z, add.z), to.w = fmaf(to.w, f.w, add.w);
  }
}

// One draft, in registers of a warp: activated, then walked back to the start.
template <int kPerLane, int kMaxDrafts>
struct Draft {
  TokenKeys<kPerLane, 32> key{static_cast<int>(threadIdx.x % 32)};
  int t;

  // Leaves k and alpha in shared memory.
  template <class P>
  __device__ void activate(const P& p, const Memory& m, float* shared) {
    key.activate(p, p.args.in, warp_sums);
    float *k = shared + m.keys + t * m.keys_stride, *alpha = k + m.drafts * m.keys_stride;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) k[key.channel(i)] = key.k[i], alpha[key.channel(i)] = key.alpha[i];
  }
  __device__ void record(const Entries& to, int64_t entry, bool k_too) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      to.alpha[entry * to.alpha_step + key.channel(i)] = key.alpha[i];
      if (k_too) to.k[entry * to.k_step + key.channel(i)] = key.k[i];
    }
  }

  // k and q become kG and qG; writes the draft's row of scores.
  __device__ void walk(const Window& window, const Memory& m, float* shared) {
    const float *k = shared + m.keys, *alpha = k + m.drafts * m.keys_stride;
    float* scores = shared + m.scores;
    const int lane = static_cast<int>(threadIdx.x % 32);
    constexpr int kCount = 2 * kMaxDrafts;                 // A of step 0, 1, .. then P; the last P is k . q itself
    const int mine = lane * kCount / 32 % kMaxDrafts;      // step of this lane's sum
    float sums[kCount] = {};
    int ancestor = 0, i = t;
    unsigned mask = 0;
#pragma unroll
    for (int step = 0; step < kMaxDrafts; ++step) {
      if (i < 0) continue;
      i = static_cast<int>(window.parent(i));
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) key.k[j] *= key.alpha[j], key.q[j] *= key.alpha[j];
      if (i < 0) continue;
      mask |= 1u << i;
      if (step == mine) ancestor = i;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int c = i * m.keys_stride + key.channel(j);
        sums[step] = fmaf(key.k[j], k[c], sums[step]);
        sums[kMaxDrafts + step] = fmaf(key.q[j], k[c], sums[kMaxDrafts + step]);
        key.alpha[j] = alpha[c];
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
    float *kG = shared + m.keys + t * m.keys_stride, *qG = kG + m.drafts * m.keys_stride;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) kG[key.channel(i)] = key.k[i], qG[key.channel(i)] = key.q[i];
  }
};

template <class State, int kK, int kMaxDrafts, class P>
__global__ void __launch_bounds__(kThreads, kMaxDrafts == 8 ? 3 : 2)
    mma_kernel(const __grid_constant__ P p, const Blocks blocks, const Memory m) {
  extern __shared__ float4 dynamic[];
  const Tile<State, kK> tile(dynamic);
  float* shared = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + Tile<State, kK>::bytes(m.columns));
  constexpr int kPerLane = kK / 32, kSlices = kMaxDrafts / 8;
  constexpr int kPerWarp = kMaxDrafts / kWarps;  // drafts of a warp
  const Place at(blocks);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t v0 = static_cast<int64_t>(at.tile) * m.columns;
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if constexpr (kVerifies<P>)
      for (; t < end; ++t)
        if (thread < m.columns) store_element(p.args.o, offset(p.args.o, b, t, at.hv) + v0 + thread, 0);
  };
  // All addresses that need nothing from memory are ready before the wait for the kernel before, and drafts are asked for
  // before the wait for the slot.
  [[maybe_unused]] Draft<kPerLane, kMaxDrafts> drafts[kPerWarp];
  [[maybe_unused]] const char* from_v = nullptr;
  [[maybe_unused]] unsigned values[kMaxDrafts];
  [[maybe_unused]] int T = 0;
  [[maybe_unused]] const auto locate = [&](const kda_inputs& in, int64_t b, int64_t t0) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      drafts[i].t = warp + i * kWarps;
      drafts[i].key.locate(in, b, t0 + drafts[i].t, at.hv, at.h);
    }
    from_v = address_of(in.v, offset(in.v, b, t0, at.hv) + v0 + thread);
  };
  if constexpr (kVerifies<P>) {
    if (!p.varlen) locate(p.args.in, at.n, 0);
  }
  wait_for_stream();
  if (at.layer >= layers_of(p)) return;  // the grid's last rows
  if constexpr (kVerifies<P>) {
    if (at.n == p.N) return zero_outputs(0, end_of_sequences(p, p.args.in), p.T);
  }
  const Indices indices = indices_of(p, at.n);
  const Sequence tokens = tokens_of(p, at.n);
  if constexpr (kVerifies<P>) {
    T = static_cast<int>(min(tokens.length, static_cast<int64_t>(m.drafts)));
    if (p.varlen) locate(p.args.in, 0, tokens.t0);
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts[i].t < T) drafts[i].key.fetch(p, p.args.in);
    const int64_t step = p.args.in.v.stride[1] << (p.args.in.v.dtype == KDA_F32 ? 2 : 1);
#pragma unroll
    for (int t = 0; t < kMaxDrafts; ++t)
      values[t] = t < T && thread < m.columns ? load_raw(from_v + t * step, p.args.in.v.dtype) : 0;
  }
  const Request r = request_of(p, tokens, indices);
  if (!r.s.live) return zero_outputs(r.s.b, r.s.t0, r.s.t0 + r.s.length);
  const int lead = lead_of(p);
  const Columns from = columns_at(state_of(p), lead, at, r.s.slot, v0);
  tile.template ask<kThreads>(reinterpret_cast<const State*>(from.data), from.step, m.columns, r.s.initial);

  // What the committed entries of a ring would do to the state verify sees, whether or not it is written.
  const bool apply = kFlushes<P> && r.newest >= 0;
  Window window = r.verify;
  if (apply) window = r.flush;
  [[maybe_unused]] Entries mine{};
  Entries applied{};
  if constexpr (kVerifies<P>) {
    if (r.slot >= 0) applied = mine = entries_at(p.args.records, 0, at, r.slot, v0);
  }
  if constexpr (kFlushes<P>) {
    if (apply) applied = entries_at(last_of(p), lead, at, r.last_slot, v0);
  }
  const int64_t newest = apply ? r.newest : r.slot >= 0 ? window.committed - 1 : -1;
  int entries = 0;
  for (int64_t w = newest; w >= 0 && entries < m.entries; w = window.before(w), ++entries)
    if (thread < m.columns)
      copy_async(shared + m.u + entries * m.columns + thread, applied.u + window.entry(w) * applied.u_step + thread);
  if (entries) prepare_flush<kK>(applied, window, newest, shared + m.w);
  if constexpr (kVerifies<P>) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      if (drafts[i].t >= T) continue;
      drafts[i].activate(p, m, shared);
      if (at.tile == 0 && r.slot >= 0)
        drafts[i].record(mine, r.verify.entry(r.verify.token(drafts[i].t)), at.h * blocks.group.divisor == at.hv);
    }
    __syncthreads();  // keys and decays of all drafts are in shared memory
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts[i].t < T) drafts[i].walk(r.verify, m, shared);
    __syncthreads();  // and are read
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts[i].t < T) drafts[i].store(m, shared);
  }
  tile.wait();
  __syncthreads();  // the state, w, u, kG, qG and scores are in shared memory

  const int groups = m.columns / kWarpColumns, parts = kWarps / groups;
  const int column0 = warp % groups * kWarpColumns, part = warp / groups;
  const int n = lane / 4, j = lane % 4;  // of fragments
  [[maybe_unused]] Columns to{};
  if constexpr (kFlushes<P>) to = columns_at(new_state_of(p), lead, at, r.s.slot, v0);
  [[maybe_unused]] Sums<kSlices> all{}, two{};
#pragma unroll 1
  for (int quarter = part * kQuarters / parts; quarter < (part + 1) * kQuarters / parts; ++quarter) {
    [[maybe_unused]] Sums<kSlices> one{};
#pragma unroll 1
    for (int c = quarter * (kK / kQuarters) + 4 * j; c < (quarter + 1) * (kK / kQuarters); c += 16) {
      // Of this lane: four channels of two columns.
      float4 S[2] = {tile.four(column0 + n, c), tile.four(column0 + 8 + n, c)};
      if (entries) {
        apply_entries(shared + m.w + c, kK, shared + m.u + column0 + n, m.columns, entries, S);
        if constexpr (kFlushes<P>) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (!apply) break;
            const int64_t place = (column0 + 8 * half + n) * to.step + c;
            if constexpr (sizeof(State) == 2) S[half] = rounded(S[half]);
            store_four(reinterpret_cast<State*>(to.data) + place, S[half]);
          }
        }
      }
      if constexpr (kVerifies<P>) {
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          const int row = min(slice * 8 + n, m.drafts - 1);
          const float* kG = shared + m.keys + row * m.keys_stride + c;
          const Operand keys(*reinterpret_cast<const float4*>(kG),
                             *reinterpret_cast<const float4*>(kG + m.drafts * m.keys_stride));
#pragma unroll
          for (int half = 0; half < 2; ++half) add_products(one.sum[slice][half], keys, S[half], sizeof(State) == 4 || entries);
        }
      }
    }
    if constexpr (kVerifies<P>) {
      if (quarter % 2 && parts < kQuarters) two += one;
      else two = one;
      if (quarter == 1 && parts == 1) all = two;
    }
  }
  if constexpr (kVerifies<P>) {
    if (parts == 1) two = (all += two);
    __syncthreads();  // kG and qG are read
    float* products = shared + m.keys;  // [parts][kG of all drafts, then qG][columns]
    const auto product = [&](int part, int row) { return products + (part * 2 * m.drafts + row) * m.columns; };
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int t = slice * 8 + n;
      if (t >= T) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&sum)[4] = two.sum[slice][half];
        const int column = column0 + 8 * half + 2 * j;
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
    const int64_t at_o = offset(p.args.o, r.s.b, r.s.t0, at.hv) + v0 + thread;
    float u[kMaxDrafts];
#pragma unroll
    for (int t = 0; t < kMaxDrafts; ++t) {
      if (t >= T) break;
      const float *A = scores + t * m.drafts, *P_ = A + m.drafts * m.drafts;
      const unsigned ancestors = __float_as_uint(beta[m.drafts + t]);
      float rest = value_of(p.args.in.v.dtype, values[t]) - whole(t), o = whole(m.drafts + t);
#pragma unroll
      for (int i = 0; i < t; ++i) {
        if (!(ancestors >> i & 1)) continue;
        rest = fmaf(-A[i], u[i], rest), o = fmaf(P_[i], u[i], o);
      }
      u[t] = beta[t] * rest;
      store_element(p.args.o, at_o + t * p.args.o.stride[1], fmaf(P_[t], u[t], o));
      if (r.slot < 0) continue;
      mine.u[r.verify.entry(r.verify.token(t)) * mine.u_step + thread] = u[t];
    }
  }
}

template <class State, int kK, int kMaxDrafts, class P>
void launch_sized(const P& p, int64_t drafts, int64_t entries) {
  const int64_t heads = layers_of(p) * p.N * p.HV, enough = 2 * multiprocessors(p.args.exec.device_id);
  int64_t columns = p.V % 128 ? 64 : 128;
  while (columns > 32 && heads * (p.V / columns) < enough) columns /= 2;
  const int64_t tiles = p.V / columns;
  const Memory m(kK, static_cast<int>(drafts), static_cast<int>(columns), static_cast<int>(entries));
  const int bytes = Tile<State, kK>::bytes(m.columns) + m.floats * static_cast<int>(sizeof(float));
  launch<mma_kernel<State, kK, kMaxDrafts, P>>(p.args.exec, Blocks::grid(p, tiles, layers_of(p)), kThreads, bytes, p,
                                               Blocks(p, tiles), m);
}

template <class P>
void launch_mma(const P& p, bool bf16, int64_t drafts, int64_t entries) {
  if ((p.N + p.varlen) * p.HV * layers_of(p) == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const auto sized = [&]<class State, int kK>() {
    if constexpr (kVerifies<P>) {
      if (drafts > 8) return launch_sized<State, kK, 16>(p, drafts, entries);
    }
    launch_sized<State, kK, 8>(p, drafts, entries);
  };
  if (p.K == 64) bf16 ? sized.template operator()<__nv_bfloat16, 64>() : sized.template operator()<float, 64>();
  else bf16 ? sized.template operator()<__nv_bfloat16, 128>() : sized.template operator()<float, 128>();
}

// Most entries that a flush may find.
int64_t entries_of(const VerifyProblem& p) { return ring_entries(p.args.records); }
int64_t entries_of(const FlushProblem& p) { return present(p.args.records.ring_count) ? p.R : std::min(p.R, p.T); }
int64_t entries_of(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  if (present(a.records.ring_count)) return ring_entries(a.records);
  const int64_t R = a.last.u.shape[1];
  return present(a.last_parents) ? std::min(R, a.last_parents.shape[1]) : R;
}

template <class P>
const char* why_not(const P& p, const kda_tensor& state, const kda_tensor& conv_x) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(conv_x)) return "has no fused convolution";
  if (entries_of(p) > kMaxRing) return "takes at most 64 recorded entries a request";
  if (const char* reason = tile_why_not(p, layout_of(p), {&state}, 64)) return reason;
  return grid_why_not(p, p.V / 32, layers_of(p));
}

}  // namespace

const char* speculation_mma_why_not(const VerifyProblem& p) { return why_not(p, p.args.states.h0, p.args.conv.x); }
const char* speculation_mma_why_not(const FlushVerifyProblem& p) {
  return why_not(p, p.args.states.h0, p.args.conv.x);
}
const char* flush_staged_why_not(const FlushProblem& p) { return why_not(p, p.args.state, p.args.conv_x); }

void verify_mma(const VerifyProblem& p) {
  launch_mma(p, p.args.states.h0.dtype == KDA_BF16, room_for_drafts(p), entries_of(p));
}
void flush_staged(const FlushProblem& p) { launch_mma(p, p.args.state.dtype == KDA_BF16, 0, entries_of(p)); }
void flush_verify_mma(const FlushVerifyProblem& p) {
  launch_mma(p, p.args.states.h0.dtype == KDA_BF16, room_for_drafts(p), entries_of(p));
  store_cursors(p);
}

}  // namespace kda::cuda
