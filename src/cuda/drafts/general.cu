// Speculative decoding (math.md 7) for sm_80 and newer, any K and V, both layouts: verify, flush, and both in one pass.
//
// Bytes: verify reads a state; a flush reads and writes it; both in one pass also read and write it once. Records are
// 1.5 KB a token and head at K = V = 128. A block takes 32 value columns of a head, eight lanes a column and two
// columns a thread, all in registers. What does not depend on the column (drafts' keys, decays and scores) is
// computed by every block for itself, while its part of the state is on its way.
//
// Decays between two tokens are ordered products of alpha in [0, 1], as on the CPU (cpu/speculation-inl.h has the
// formulas), and those that a flush applies are multiplied in f64. Every sum has one order: the bits of a request
// depend on nothing else in the call, and flush_verify has those of flush, then verify. Verify applies committed
// entries of a ring, which the state does not have yet, in registers only.
#include "cuda/conv/front.h"
#include "cuda/drafts/parts.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 2;                             // value columns of a thread
constexpr int kTile = kThreads / kRowLanes * kRows;  // of a block
constexpr int kEntries = 4;                          // entries flushed at once

// Shared memory, kK = channels rounded up. The flush and the verify have a part each, used in turn.
template <int kK>
struct alignas(16) FlushMemory {
  float w[kEntries][kK], f[kK];
};
// Dynamic shared memory.
struct VerifyMemory {
  float *k, *alpha, *kG, *qG;  // [drafts][kK]
  float *A, *P;                // [drafts][drafts] in the order of the walk back
  float *u, *v;                // [drafts][tile]
  float *beta, *qk;            // [drafts]

  __host__ __device__ static int64_t floats(int64_t kK, int64_t drafts, int64_t tile) {
    return 4 * drafts * kK + 2 * drafts * drafts + 2 * drafts * tile + 2 * drafts;
  }
  __device__ VerifyMemory(float* at, int64_t kK, int64_t drafts, int64_t tile) {
    for (float** p : {&k, &alpha, &kG, &qG}) *p = at, at += drafts * kK;
    for (float** p : {&A, &P}) *p = at, at += drafts * drafts;
    for (float** p : {&u, &v}) *p = at, at += drafts * tile;
    beta = at, qk = at + drafts;
  }
};

// S <- Diag(f) S + sum_i w_i u_i, walking back from the newest entry: w_i = k_i f_i with f the product of all younger
// alpha.
template <int kElements>
__device__ void flush_columns(FlushMemory<kElements * 8>& memory, const Before& b, int K, int columns,
                              float (&S)[kRows][kElements]) {
  constexpr int kK = kElements * 8, kOwn = (kK + kThreads - 1) / kThreads;
  double product[kOwn];
  float sum[kRows][kElements] = {};
#pragma unroll
  for (int j = 0; j < kOwn; ++j) product[j] = 1;
  for (int w = b.newest; w >= 0;) {
    int entry[kEntries];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      entry[i] = w < 0 ? 0 : b.window.entry(w);
      if (w >= 0) ++count, w = b.window.before(w);
    }
    float key[kEntries][kOwn], alpha[kEntries][kOwn], u[kEntries][kRows];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        u[i][row] = row < columns && i < count ? b.entries.u_at(entry[i], row) : 0.0f;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int c = threadIdx.x + j * kThreads;
        const bool real = c < K && i < count;
        key[i][j] = real ? b.entries.k_at(entry[i], c) : 0.0f;
        alpha[i][j] = real ? b.entries.alpha_at(entry[i], c) : 1.0f;
      }
    }
    __syncthreads();  // the last entries are no longer read
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int c = threadIdx.x + j * kThreads;
        if (c < kK) memory.w[i][c] = key[i][j] * static_cast<float>(product[j]);
        product[j] *= alpha[i][j];
      }
    __syncthreads();  // w of these entries is in shared memory
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const float4 w4 = *reinterpret_cast<const float4*>(memory.w[i] + channel(e));
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          float* four = sum[row] + e;
          four[0] = fmaf(u[i][row], w4.x, four[0]), four[1] = fmaf(u[i][row], w4.y, four[1]);
          four[2] = fmaf(u[i][row], w4.z, four[2]), four[3] = fmaf(u[i][row], w4.w, four[3]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kOwn; ++j)
    if (const int c = threadIdx.x + j * kThreads; c < kK) memory.f[c] = static_cast<float>(product[j]);
  __syncthreads();  // f is in shared memory
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
    const float4 f = *reinterpret_cast<const float4*>(memory.f + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float* four = S[row] + e;
      const float* add = sum[row] + e;
      four[0] = fmaf(four[0], f.x, add[0]), four[1] = fmaf(four[1], f.y, add[1]);
      four[2] = fmaf(four[2], f.z, add[2]), four[3] = fmaf(four[3], f.w, add[3]);
    }
  }
}

// What the convolution in front leaves for a draft.
template <class P>
__device__ float draft_value(const P& p, const Request& r, int t, int64_t d) {
  return front_value(p.args.conv, p.args.parents, r.s, slot_of(p.args.conv.indices, r.s.n), t, d);
}

// Computes the drafts' keys, decays, scores and decayed operands.
template <int kElements, class P>
__device__ void prepare(const P& p, const Tokens& x, const Request& r, const Place& at, int drafts,
                        const Entries& record, bool recorded, bool record_k, const VerifyMemory& m, int room) {
  constexpr int kK = kElements * 8, kPerLane = kElements / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int t = warp; t < drafts; t += kThreads / 32) {
    TokenKeys<kPerLane, 32> key(lane);
    key.locate(x, static_cast<unsigned>(r.s.b), static_cast<unsigned>(r.s.t0 + t), at.hv, at.h);
    key.template fetch_gate<false>(x);
    if (present(p.args.conv.x)) {
      const FrontChannels first(p, at.h, at.hv);
      float *q = m.qG + t * kK, *k = m.k + t * kK;  // these rows hold q and k for a moment
#pragma unroll 1
      for (int c = lane; c < x.K; c += 32) {
        q[c] = draft_value(p, r, t, first.q + c);
        k[c] = draft_value(p, r, t, first.k + c);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {  // a lane reads what it wrote
        const int c = key.channel(i);
        key.take(i, c < x.K ? q[c] : 0.0f, c < x.K ? k[c] : 0.0f);
      }
    } else {
      key.template fetch_keys<false>(x);
    }
    key.activate(x, OverWarp());
    const int entry = recorded ? r.verify.entry(r.verify.token(t)) : 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = key.channel(i);
      m.k[t * kK + c] = key.k[i], m.alpha[t * kK + c] = key.alpha[i], m.qG[t * kK + c] = key.q[i];
      if (!recorded || c >= x.K) continue;
      record.alpha_at(entry, c) = key.alpha[i];
      if (record_k) record.k_at(entry, c) = key.k[i];
    }
    if (lane == 0) m.beta[t] = key.beta, m.qk[t] = key.qk;
  }
  __syncthreads();  // keys and decays of all drafts are in shared memory
  for (int t = warp; t < drafts; t += kThreads / 32) {
    float kG[kPerLane], qG[kPerLane], alpha[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = t * kK + lane + 32 * i;
      kG[i] = m.k[c], qG[i] = m.qG[c], alpha[i] = m.alpha[c];
    }
    float *A = m.A + t * room, *P_ = m.P + t * room;
    for (int w = t;;) {
      w = r.verify.parent(w);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) kG[i] *= alpha[i], qG[i] *= alpha[i];
      if (w < 0) break;
      float a = 0, o = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int c = w * kK + lane + 32 * i;
        alpha[i] = m.alpha[c];
        a = fmaf(kG[i], m.k[c], a), o = fmaf(qG[i], m.k[c], o);
      }
      a = sum_over<32>(a), o = sum_over<32>(o);
      if (lane == 0) *A = a, *P_ = o;
      ++A, ++P_;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = t * kK + lane + 32 * i;
      m.kG[c] = kG[i], m.qG[c] = qG[i];
    }
  }
  __syncthreads();  // scores and decayed operands are in shared memory
}

template <class P, int kElements>
__global__ void __launch_bounds__(kThreads, 2)
    speculation_kernel(const __grid_constant__ P p, const __grid_constant__ Parts<P> x, const LayeredBlocks blocks,
                       const int room, const bool wide) {
  __shared__ FlushMemory<kElements * 8> memory;
  wait_for_stream();
  extern __shared__ float4 dynamic[];
  constexpr int kK = kElements * 8;
  const Place at(blocks);
  if (at.layer >= layers_of(p)) return;  // the grid's last rows
  const int K = static_cast<int>(p.K);
  const int v0 = static_cast<int>(at.tile) * kTile + first_row<kRows>();
  const int columns = min(max(static_cast<int>(p.V) - v0, 0), kRows);  // how many of the thread's columns exist
  const bool leads = threadIdx.x % kRowLanes == 0;
  const auto store_output = [&](int64_t b, int64_t t, int row, float o) {
    if (!leads || row >= columns) return;
    if constexpr (kVerifies<P>) {
      char* to = x.tokens.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv);
      store_element(to + static_cast<unsigned>(v0 + row) * size_of(x.tokens.o_dtype), x.tokens.o_dtype, o);
    }
  };
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if constexpr (kVerifies<P>)
      for (; t < end; ++t)
        for (int row = 0; row < kRows; ++row) store_output(b, t, row, 0);
  };
  if constexpr (kVerifies<P>) {
    if (at.n == p.N) return zero_outputs(0, end_of_sequences(p.args.in.cu_seqlens, p.N, p.T), p.T);
  }
  const Request r = request_of(x.requests, drafts_of(x, at.n), indices_of(x.requests, at.n));
  if (!r.s.live) return zero_outputs(r.s.b, r.s.t0, r.s.t0 + r.s.length);
  const TypedView state{state_at(x, at), state_of(p).dtype};
  const AnyRows rows(state, layout_of(p), static_cast<unsigned>(r.s.slot), at.hv, static_cast<unsigned>(v0), wide);

  // ---- the state, with entries ----

  float S[kRows][kElements] = {};
  if (r.s.initial) load_rows(rows, state.dtype, columns, K, S);
  const Before before = before_drafts<P>(x, at, r, static_cast<unsigned>(v0));
  if (before.newest >= 0) {
    flush_columns(memory, before, K, columns, S);
    if (before.apply) {
      store_rows(rows, state.dtype, columns, K, S);
      if (state.dtype == KDA_BF16) {
#pragma unroll
        for (int i = 0; i < kRows * kElements; ++i)
          S[i / kElements][i % kElements] = __bfloat162float(__float2bfloat16_rn(S[i / kElements][i % kElements]));
      }
    }
  }
  if constexpr (kVerifies<P>) {
    const Tokens& tokens = x.tokens;
    const int drafts = static_cast<int>(min(r.s.length, static_cast<int64_t>(room)));
    if (drafts == 0) return;

    // ---- drafts: keys, decays and scores, then u and o one after another ----

    const VerifyMemory m(reinterpret_cast<float*>(dynamic), kK, room, kTile);
    for (int i = threadIdx.x; i < drafts * kTile; i += kThreads) {
      const unsigned t = static_cast<unsigned>(r.s.t0 + i / kTile), v = at.tile * kTile + i % kTile;
      const char* from = tokens.v.at(static_cast<unsigned>(r.s.b), t, at.hv) + v * size_of(tokens.qkv_dtype);
      if (present(p.args.conv.x))
        m.v[i] = v < p.V ? draft_value(p, r, i / kTile, FrontChannels(p, at.h, at.hv).v + v) : 0.0f;
      else m.v[i] = value_of(tokens.qkv_dtype, v < p.V ? load_raw<false>(from, tokens.qkv_dtype) : 0);
    }
    Entries record;
    if (r.slot >= 0) record = Entries(x.records, at, r.slot, static_cast<unsigned>(v0));
    prepare<kElements>(p, tokens, r, at, drafts, record, at.tile == 0 && r.slot >= 0,
                       at.h * blocks.group.divisor == at.hv, m, room);
    for (int t = 0; t < drafts; ++t) {
      const int own = t * kTile + first_row<kRows>();
      float u[kRows], out[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        u[row] = m.v[own + row] - sum_over<kRowLanes>(dot(S[row], m.kG + t * kK));
        out[row] = sum_over<kRowLanes>(dot(S[row], m.qG + t * kK));
      }
      int w = t;
      for (int i = 0; (w = r.verify.parent(w)) >= 0; ++i) {
        const float A = m.A[t * room + i], P_ = m.P[t * room + i];
        const float* before = m.u + w * kTile + first_row<kRows>();
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          u[row] = fmaf(-A, before[row], u[row]), out[row] = fmaf(P_, before[row], out[row]);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        u[row] *= m.beta[t];
        if (leads) m.u[own + row] = u[row];
        store_output(r.s.b, r.s.t0 + t, row, fmaf(m.qk[t], u[row], out[row]));
        if (leads && row < columns && r.slot >= 0) record.u_at(r.verify.entry(r.verify.token(t)), row) = u[row];
      }
      __syncwarp();  // the row's other lanes read u for the next tokens
    }
  }
}

// Stores a ring's cursors once no block reads the old ones: in a launch of its own. The values that they follow from
// do not come from the kernel before, which belongs to the same call and waited for them: only the stores have to
// wait for that kernel's end.
__global__ void cursor_kernel(const unsigned N, const __grid_constant__ Sizes sizes,
                              const __grid_constant__ FlushVerifyRequests requests,
                              const __grid_constant__ Lengths cu_seqlens) {
  let_next_start();
  if (sizes.varlen) wait_for_stream();  // lengths are read as in all kernels
  const unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= N) return;
  const Indices indices = peek_indices(requests, n);
  int32_t first = 0, count = 0;
  if (const int64_t slot = record_slot(requests.last, indices.last); slot >= 0)
    first = peek(&requests.cursors.first[slot]), count = peek(&requests.cursors.count[slot]);
  FlushVerifyRequests known = requests;
  known.cursors = {{&first, 0}, {&count, 0}};
  const Request r = request_of(known, sequence_at(sizes.varlen, cu_seqlens, sizes.T, n), indices);
  wait_for_stream();
  if (r.s.live) store_cursors(requests.records, requests.cursors, r.slot, r.verify);
}

template <int kElements, class P>
void launch_sized(const P& p) {
  const int64_t tiles = (p.V + kTile - 1) / kTile;
  int room = 0;
  if constexpr (kVerifies<P>) room = static_cast<int>(room_of(p));
  const int64_t floats = kVerifies<P> ? VerifyMemory::floats(kElements * 8, room, kTile) : 0;
  launch<speculation_kernel<P, kElements>>(p.args.exec, Blocks::grid(p, tiles, layers_of(p)), kThreads,
                                           static_cast<int>(floats * sizeof(float)), p, Parts<P>(p),
                                           LayeredBlocks(p, tiles), room, wide_rows(p, layout_of(p), {&state_of(p)}));
}

template <class P>
void launch_all(const P& p) {
  if ((p.N + p.varlen) * p.HV * layers_of(p) == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  p.K <= 128 ? launch_sized<16>(p) : launch_sized<32>(p);
}

template <class P>
const char* why_not(const P& p) {
  if (const char* reason = parts_why_not(p)) return reason;
  return grid_why_not(p, (p.V + 15) / 16, layers_of(p));
}

}  // namespace

void store_cursors(const FlushVerifyProblem& p) {
  if (!present(p.args.records.ring_count) || p.N == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  constexpr unsigned kWidth = 128;
  launch<cursor_kernel>(p.args.exec, dim3(static_cast<unsigned>((p.N + kWidth - 1) / kWidth)), kWidth, 0,
                        static_cast<unsigned>(p.N), Sizes(p), requests_of(p), lengths_of(p.args.in.cu_seqlens));
}

const char* drafts_general_why_not(const VerifyProblem& p) { return why_not(p); }
const char* drafts_general_why_not(const FlushProblem& p) { return why_not(p); }
const char* drafts_general_why_not(const FlushVerifyProblem& p) { return why_not(p); }

void drafts_general(const VerifyProblem& p) { launch_all(p); }
void drafts_general(const FlushProblem& p) {
  launch_all(p);
  roll_convolution(p);
}
void drafts_general(const FlushVerifyProblem& p) {
  roll_convolution(p);
  launch_all(p);
  store_cursors(p);
}

}  // namespace kda::cuda
