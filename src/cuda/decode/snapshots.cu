// `cuda_decode` with snapshots on its fast path: the tokens of a request one after another, and the state after each
// goes to a slot of its own. Engines verify drafts so.
//
// Bytes: a call reads a state and writes one for each token. What a small call takes is the chain of its tokens. So a
// block activates four tokens at once, with two barriers, and gives hints for the next four. Between them the chain is
// two products and an update of registers, as in decode.cu, whose bits these are.
#include "cuda/decode/params.h"
#include "cuda/decode/recurrence.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads, kElements = kWideK / kRowLanes;
constexpr unsigned kTogether = 4;  // tokens

// Columns of a thread. Two would leave a call of 8 requests and 32 heads more CTAs than run at once (f32, T = 8: 53.8
// us, four: 48.4). With four CTAs an SM, 44 bytes of a thread are spilled.
constexpr int kRows = 4, kBlocksOfSM = 4;
constexpr unsigned kColumns = kTile<kRows>;

struct Shared {
  Prepared<kElements> prepared[kTogether];
  Products sums[kTogether][kThreads / 32];
  float v[kTogether][kColumns], beta[kTogether], qk[kTogether];
};

// The tokens that a block activates together: a thread a channel, and some of their values.
struct Group {
  static constexpr unsigned kValues = kTogether * kColumns / kThreads;
  TokenKeys<1, kThreads> keys[kTogether];
  unsigned values[kValues];

  __device__ void locate(const Tokens& x, const Place& at, unsigned b, unsigned t) {
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) keys[j].locate(x, b, t + j, at.hv, at.h);
  }
  // Gives hints for `count` tokens from t on, or for as many of them as there is room for.
  __device__ void expect(const Tokens& x, const Place& at, unsigned b, unsigned t, unsigned count) {
    locate(x, at, b, t);
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j)
      if (j < count) keys[j].expect(x);
    if (threadIdx.x < kTogether && threadIdx.x < count)
      prefetch(x.v.at(b, t + threadIdx.x, at.hv) + at.tile * kColumns * size_of(x.qkv_dtype));
  }
  // Requests them.
  __device__ void fetch(const Tokens& x, const Place& at, unsigned b, unsigned t, unsigned count) {
    locate(x, at, b, t);
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) {
      keys[j].template fetch_keys<true, true>(x, j < count);
      keys[j].template fetch_gate_input<true, true>(x, j < count);
    }
#pragma unroll
    for (unsigned i = 0; i < kValues; ++i) {
      const unsigned j = (threadIdx.x + i * kThreads) / kColumns, column = threadIdx.x % kColumns;
      const char* from = x.v.at(b, t + j, at.hv) + (at.tile * kColumns + column) * size_of(x.qkv_dtype);
      values[i] = j < count ? load_raw<true>(from, x.qkv_dtype) : 0;
      pin(values[i]);
    }
  }
  // Activates them, when all threads have applied those before. A barrier has to follow.
  __device__ void activate(const Tokens& x, unsigned count, Shared& m) {
    const unsigned thread = threadIdx.x;
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) {
      const Products mine = warp_sums(keys[j].products(x));
      if (thread % 32 == 0) m.sums[j][thread / 32] = mine;
    }
    __syncthreads();  // the sums of all warps are in shared memory, and the tokens before are no longer read
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) {
      if (j >= count) break;
      keys[j].take_parameters(keys[0]);
      Products all{};
#pragma unroll
      for (const Products& s : m.sums[j]) all.qq += s.qq, all.kk += s.kk, all.qk += s.qk;
      keys[j].finish(x, all, [&](float by_q, float by_k) {
        const Products again[1] = {keys[j].shrunk(by_q, by_k)};
        __syncthreads();  // the sums are read
        return block_sums<kThreads>(again, m.sums[j]);
      });
      m.prepared[j].template store<TokenKeys<1, kThreads>, 1>(keys[j]);
      if (thread == 0) m.beta[j] = keys[j].beta, m.qk[j] = keys[j].qk;
    }
#pragma unroll
    for (unsigned i = 0; i < kValues; ++i) (&m.v[0][0])[thread + i * kThreads] = value_of(x.qkv_dtype, values[i]);
  }
};

// Gives hints for the state of a block, if it is where its slot says.
__device__ void expect_state(const DecodeParams& p, const Place& at) {
  const bool hint = threadIdx.x == 0 && at.is_among(p.blocks.hints.states) && p.h0.data && !p.accepted.data;
  const int32_t slot = hint ? likely_slot(p.slots.indices, p.slots.first_valid, p.slots.slots, at.n) : -1;
  if (slot < 0) return;
  const Rows<true> states(p.h0, static_cast<unsigned>(slot), at.hv, at.tile * kColumns);
  prefetch(states.first, kColumns * static_cast<uint64_t>(states.row));
}

template <int32_t kState>
__global__ void __launch_bounds__(kThreads, kBlocksOfSM) snapshots_kernel(const __grid_constant__ DecodeParams params) {
  __shared__ Shared m;
  const DecodeParams p = params.fast_copy(FastPath::kSnapshots, kState);
  const Tokens& x = p.tokens;
  const Place at(p.blocks);
  const unsigned v0 = at.tile * kColumns + static_cast<unsigned>(first_row<kRows>());
  const auto store_outputs = [&](int64_t b, int64_t t, const float(&o)[kRows]) {
    char* to = x.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv) + v0 * size_of(x.o_dtype);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (threadIdx.x % kRowLanes == 0) store_element(to + row * size_of(x.o_dtype), x.o_dtype, o[row]);
  };
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    const float zeros[kRows] = {};
    for (; t < end; ++t) store_outputs(b, t, zeros);
  };
  const auto rows_of_state = [&](const TypedView& states, int64_t row, int64_t offset) {
    Rows<true> rows(states, static_cast<unsigned>(row), at.hv, v0);
    rows.first += offset;
    return rows;
  };

  // ---- hints, while the kernel before still runs; then the slot, the first tokens, the state ----

  Group group;
  if (!p.varlen && at.n < p.N && at.is_among(p.blocks.hints.blocks)) {
    group.expect(x, at, at.n, 0, static_cast<unsigned>(p.T));
    expect_state(p, at);
  }
  wait_for_stream();
  if (at.n >= p.blocks.rows) return;  // the grid's last rows
  if (p.varlen && at.n == p.N) return zero_outputs(0, end_of_sequences(p.cu_seqlens, p.N, p.T), p.T);
  const int64_t slot = p.slots.indices.data ? p.slots.indices[at.n] : int64_t{at.n};
  Sequence s = p.sequence_at(at.n);
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), T = static_cast<unsigned>(s.length);
  group.keys[0].locate(x, b, t0, at.hv, at.h), group.keys[0].fetch_parameters(x, T > 0);
  group.fetch(x, at, b, t0, T);
  find_states(s, p.slots, p.has_initial, slot);
  find_padding(s, p.slots, p.snapshot_slots.row(at.n));
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);
  float S[kRows][kElements] = {};
  const auto load = [&](const Rows<true>& rows) { load_rows(rows, kState, kRows, kWideK, S); };
  const auto store = [&](const Rows<true>& rows) { store_rows(rows, kState, kRows, kWideK, S); };
  if (!p.accepted.data) {
    if (s.initial) load(rows_of_state(p.h0, s.slot, 0));
  } else if (const int64_t row = p.start_row(at.n); row >= 0) {
    load(rows_of_state(p.snapshot_slots.data ? p.h0 : p.snapshots, row, p.first_snapshot(at.n)));
  }
  let_next_start();

  // ---- tokens, four at a time ----

  for (unsigned t = 0; t < T; ++t) {
    const unsigned j = t % kTogether;
    if (j == 0) {
      if (t) group.fetch(x, at, b, t0 + t, T - t);
      if (T - t > kTogether) group.expect(x, at, b, t0 + t + kTogether, T - t - kTogether);
      group.activate(x, T - t, m);
      __syncthreads();  // these tokens are in shared memory
    }
    float v[kRows], u[kRows], o[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) v[row] = m.v[j][first_row<kRows>() + row];
    apply_token(m.prepared[j], m.beta[j], m.qk[j], v, S, u, o);
    store_outputs(s.b, s.t0 + t, o);
    const int64_t row = p.snapshot_rows_of(at.n).row(t);
    if (row >= 0 && row < p.snapshot_rows) store(rows_of_state(p.snapshots, row, p.first_snapshot(at.n)));
  }
  if (!p.hT.data) return;
  const int64_t row = final_row(p.out_state_indices, p.slots.first_valid, p.final_rows, at.n, s.slot);
  if (row >= 0) store(rows_of_state(p.hT, row, 0));
}

template <int32_t kState>
void launch_for(const DecodeProblem& p, DecodeParams x, const DecodePlan& plan) {
  const int64_t tiles = p.V / kColumns;
  x.blocks = Blocks(p, tiles, hints_of(p, 1, kState, tiles, kBlocksOfSM, plan.hinted, p.args.exec.device_id));
  launch<snapshots_kernel<kState>>(p.args.exec, Blocks::grid(p, tiles, 1), kThreads, 0, x);
}

}  // namespace

void decode_snapshots(const DecodeProblem& p, const DecodeParams& x, const DecodePlan& plan) {
  if (p.args.states.h0.dtype == KDA_BF16) launch_for<KDA_BF16>(p, x, plan);
  else launch_for<KDA_F32>(p, x, plan);
}

}  // namespace kda::cuda
