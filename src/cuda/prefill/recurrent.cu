// Forward token by token with the state in registers (recurrence.h), for sm_80 and newer: any K and V, both layouts,
// any gate. It is as exact as decode, and has the same bits. It keeps no chunk scores, and every token waits for the
// one before.
//
// A block takes 16 or 32 value columns of a head and all tokens of a sequence, kGroup at a time; a thread has a
// channel of each token:
//   1 q.q, k.k and q.k of the group, over the block                                                  barrier: sums
//   2 its keys, decays and values, activated, to shared memory; loads of the next group start        barrier: group
//   3 token by token, without a barrier: a column of the state is in eight lanes of a warp
// Between groups, at multiples of 64 tokens, at checkpoints and at the end, the state is stored where it is wanted. So
// a group ends there, with fewer tokens if need be.
//
// Shared memory at K = 128: 17 KiB, nearly all of it keys and decays.
#include "cuda/call/state_rows.h"
#include "cuda/call/states.h"
#include "cuda/call/token.h"
#include "cuda/decode/recurrence.h"
#include "cuda/prefill/declarations.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads, kWarps = kThreads / 32;
constexpr int kGroup = 8;
static_assert(kChunk % kGroup == 0, "states are kept between groups");

template <int kElements, int kRows>
struct Smem {
  Prepared<kElements> keys[kGroup];
  float v[kGroup][kTile<kRows>], beta[kGroup], qk[kGroup];
  float sums[kGroup][3][kWarps];  // q.q, k.k, q.k
  Products again[kWarps];         // of one token with huge rows
};

// What a block works on: tokens t0 .. t0 + length - 1 of row b, and value columns from v0 on.
struct Part {
  unsigned b, t0, length, v0, V;
  Place at;
};

// A group of tokens between global and shared memory, in registers.
template <int kElements, int kRows>
class Group {
  static constexpr int kPerThread = (kElements * 8 + kThreads - 1) / kThreads, kColumns = kTile<kRows>;
  static constexpr int kValues = kGroup * kColumns / kThreads;  // of a thread

 public:
  // Starts the loads of tokens from t on.
  __device__ void fetch(const Tokens& x, const Part& part, unsigned t) {
    x.narrow ? fetch_as<true>(x, part, t) : fetch_as<false>(x, part, t);
  }
  // Loads, once, what all tokens share.
  __device__ void fetch_parameters(const Tokens& x) {
    keys_[0].fetch_parameters(x);
#pragma unroll
    for (int j = 1; j < kGroup; ++j) keys_[j].take_parameters(keys_[0]);
  }

  // Sums have the order of block_sums().
  __device__ void share_sums(const Tokens& x, Smem<kElements, kRows>& shared) {
    float mine[3][kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const Products one = keys_[j].products(x);
      mine[0][j] = one.qq, mine[1][j] = one.kk, mine[2][j] = one.qk;
    }
    constexpr int kLanes = 32 / kGroup;  // of a sum
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float sum = spread_sums<kGroup>(mine[i]);
      if (lane % kLanes == 0) shared.sums[lane / kLanes][i][warp] = sum;
    }
  }
  __device__ void share(const Tokens& x, Smem<kElements, kRows>& shared) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const auto& sums = shared.sums[j];
      Products all{};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all.qq += sums[0][w], all.kk += sums[1][w], all.qk += sums[2][w];
      keys_[j].finish(x, all, [&](float by_q, float by_k) {
        __syncthreads();  // the sums of the token before are read
        return block_sums<kThreads>({keys_[j].shrunk(by_q, by_k)}, shared.again);
      });
      shared.keys[j].template store<TokenKeys<kPerThread, kThreads>, kPerThread>(keys_[j]);
      if (threadIdx.x == 0) shared.beta[j] = keys_[j].beta, shared.qk[j] = keys_[j].qk;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const unsigned index = threadIdx.x + i * kThreads;
      shared.v[index / kColumns][index % kColumns] = value_of(x.qkv_dtype, values_[i]);
    }
  }

 private:
  template <bool kNarrow>
  __device__ void fetch_as(const Tokens& x, const Part& part, unsigned t) {
    // Behind the last token the last one is loaded again, and not used.
    const auto token = [&](unsigned j) { return part.t0 + min(t + j, part.length - 1); };
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      keys_[j].locate(x, part.b, token(j), part.at.hv, part.at.h);
      keys_[j].template fetch_keys<kNarrow>(x), keys_[j].template fetch_gate_input<kNarrow>(x);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const unsigned index = threadIdx.x + i * kThreads, v = part.v0 + index % kColumns;
      const char* from = x.v.at(part.b, token(index / kColumns), part.at.hv) + v * size_of(x.qkv_dtype);
      values_[i] = v < part.V ? load_raw<kNarrow>(from, x.qkv_dtype) : 0;
    }
  }

  TokenKeys<kPerThread, kThreads> keys_[kGroup];
  unsigned values_[kValues];
};

// Blocks of an SM, as many as registers allow without spills.
constexpr int blocks_of(int elements) { return elements > 16 ? 2 : 3; }

template <int kElements, int kRows>
__global__ void __launch_bounds__(kThreads, blocks_of(kElements))
    forward_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                   const __grid_constant__ States states, const __grid_constant__ TypedView v_new, const Blocks blocks,
                   const bool wide) {
  __shared__ Smem<kElements, kRows> shared;
  constexpr unsigned kColumns = kTile<kRows>;
  const kda_forward_args& a = p.args;
  const Place at(blocks);
  const auto V = static_cast<unsigned>(p.V), v0 = at.tile * kColumns;
  const unsigned own = v0 + first_row<kRows>(), columns = own < V ? min(V - own, kRows) : 0;  // of the thread
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if (!x.o.data) return;
    const unsigned v = v0 + threadIdx.x % kColumns;
    for (t += threadIdx.x / kColumns; t < end && v < V; t += kThreads / kColumns)
      store_element(x.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv) + v * size_of(x.o_dtype),
                    x.o_dtype, 0);
  };
  wait_for_stream();
  if (at.n >= blocks.rows) return;  // the grid's last rows
  if (at.n == p.N) return zero_outputs(0, end_of_sequences(a.in.cu_seqlens, p.N, p.T), p.T);
  const Sequence s = sequence_at(p, a.in, a.states, at.n);
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);
  const Part part{static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0), static_cast<unsigned>(s.length), v0, V, at};

  float S[kRows][kElements] = {};
  const auto rows_of = [&](const TypedView& t, int32_t layout, int64_t row) {
    return AnyRows(t, layout, static_cast<unsigned>(row), at.hv, own, wide);
  };
  if (s.initial) load_rows(rows_of(states.h0, a.in.state_layout, s.slot), states.h0.dtype, columns, x.K, S);
  const unsigned first_h = states.kept[kBefore].data ? first_h_row(p, at.n) : 0;
  const auto keep = [&](unsigned t) {
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
      const TypedView& to = states.kept[i];
      if (!to.data) continue;
      const int64_t row = i == kCheckpoint ? checkpoint_row(a, s.n, t) : row_of(static_cast<Kept>(i), p, s, t, first_h);
      const int32_t layout = i == kBefore ? h_layout(a) : a.in.state_layout;
      if (row >= 0) store_rows(rows_of(to, layout, row), to.dtype, columns, x.K, S);
    }
  };
  const auto store = [&](const View& y, int32_t dtype, unsigned t, const float(&from)[kRows]) {
    char* to = y.at(part.b, part.t0 + t, at.hv) + own * size_of(dtype);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (row < columns && threadIdx.x % kRowLanes == 0) store_element(to + row * size_of(dtype), dtype, from[row]);
  };

  // Where the group that begins with token t ends: at the latest where a state may be kept.
  unsigned kept = part.length;  // the next checkpoint, or the end
  const auto find_checkpoint = [&](unsigned t) {
    if (!states.kept[kCheckpoint].data) return;
    const int64_t next = checkpoint_places(a.checkpoint_offset, a.checkpoint_every, s.n).next(t);
    kept = static_cast<unsigned>(within(next, 0, part.length));
  };
  const auto end_of = [&](unsigned t) {
    return min(min(t + kGroup, (t / unsigned{kChunk} + 1) * unsigned{kChunk}), kept);
  };
  find_checkpoint(0);

  Group<kElements, kRows> group;
  if (part.length) group.fetch(x, part, 0), group.fetch_parameters(x);
  for (unsigned t = 0, end;; t = end) {
    if (t % kChunk == 0 || t == kept) keep(t), find_checkpoint(t);
    if (t == part.length) break;
    end = end_of(t);
    group.share_sums(x, shared);
    __syncthreads();  // the sums of all warps are there, and the last group is no longer read
    group.share(x, shared);
    if (end < part.length) group.fetch(x, part, end);
    __syncthreads();  // the group is there, and the sums are no longer read
    const unsigned tokens = end - t;
#pragma unroll 1
    for (unsigned j = 0; j < tokens; ++j) {
      float v[kRows], u[kRows], o[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) v[row] = shared.v[j][first_row<kRows>() + row];
      apply_token(shared.keys[j], shared.beta[j], shared.qk[j], v, S, u, o);
      if (x.o.data) store(x.o, x.o_dtype, t + j, o);
      if (v_new.data) store(v_new, v_new.dtype, t + j, u);
    }
  }
}

template <int kElements, int kRows>
void launch_forward(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const int64_t tiles = (p.V + kTile<kRows> - 1) / kTile<kRows>;
  const bool wide = wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.checkpoints, &a.h});
  launch<forward_kernel<kElements, kRows>>(a.exec, Blocks::grid(p, tiles, 1), kThreads, 0, p, Tokens(p, a.in, a.o),
                                           States(a), view_of(a.v_new), Blocks(p, tiles), wide);
}

}  // namespace

const char* prefill_recurrent_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.Aqk) || present(a.Akk)) return "has no chunks to save Aqk or Akk from";
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(a.in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT, &a.checkpoints, &a.h, &a.v_new})) return reason;
  return grid_why_not(p, (p.V + 15) / 16, 1);
}

void prefill_recurrent(const ForwardProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  // With two columns a thread reads keys once for both; one column spreads a small call over all SMs, and is all that
  // more than 128 channels leave registers for.
  const bool few = p.N * p.HV * ((p.V + 15) / 16) <= 2 * multiprocessors(p.args.exec.device_id);
  if (p.K > 128) launch_forward<32, 1>(p);
  else few ? launch_forward<16, 1>(p) : launch_forward<16, 2>(p);
}

}  // namespace kda::cuda
