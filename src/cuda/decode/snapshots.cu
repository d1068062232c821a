// `cuda_decode` with snapshots on its fast path: the tokens of a request one after another, and the state after each
// goes to a slot of its own. Engines verify drafts so.
//
// Bytes: a call reads a state and writes one for each token. What a small call takes is the chain of its tokens. So
// half of a CTA's warps activate the next four tokens, one each, while the others apply the last four: two products, an
// update of registers and the stores of a state for each, as in decode.cu, whose bits these are. For many states in
// bf16 too few warps would apply tokens. There all warps do both, one after the other.
#include "cuda/decode/params.h"
#include "cuda/decode/recurrence.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads, kElements = kWideK / kRowLanes;
constexpr unsigned kTogether = kThreads / 32;  // tokens, each activated by a warp
template <bool kApart>
constexpr int kBlocksOfSM = kApart ? 2 : 4;

// Four tokens, as the warps that apply them read them.
template <unsigned kColumns>
struct Tokens4 {
  Prepared<kElements> prepared[kTogether];
  float v[kTogether][kColumns], beta[kTogether], qk[kTogether];
  int64_t rows[kTogether];  // where the states after them go, or -1
};

// A warp's token of the four, and its values.
template <unsigned kColumns>
struct Activation {
  static constexpr int kChannels = kWideK / 32, kValues = kColumns / 32;
  const unsigned number = threadIdx.x / 32 % kTogether, lane = threadIdx.x % 32;
  TokenKeys<kChannels, 32> keys;
  const char* from_v;
  unsigned values[kValues];

  __device__ void locate(const Tokens& x, const Place& at, unsigned b, unsigned t) {
    keys.locate(x, b, t + number, at.hv, at.h);
    from_v = x.v.at(b, t + number, at.hv) + at.tile * kColumns * size_of(x.qkv_dtype);
  }
  // Gives hints for it.
  __device__ void expect(const Tokens& x) const {
    keys.expect(x);
    if (lane == 0) prefetch(from_v);
  }
  // Requests it, if it is there.
  __device__ void fetch(const Tokens& x, bool there) {
    keys.template fetch_keys<true, true>(x, there), keys.template fetch_gate_input<true, true>(x, there);
#pragma unroll
    for (unsigned i = 0; i < kValues; ++i) {
      values[i] = there ? load_raw<true>(from_v + (lane + 32 * i) * size_of(x.qkv_dtype), x.qkv_dtype) : 0;
      pin(values[i]);
    }
  }
  // Activates it. No thread may read this place of `to` any more.
  __device__ void activate(const Tokens& x, Tokens4<kColumns>& to) {
    keys.template activate<kChannels>(x, [](const Products(&mine)[kChannels], bool /*again*/) {
      Products all{};  // with the bits of block_sums(), of which each warp has 32 channels
#pragma unroll
      for (const Products& part : mine) {
        const Products sums = warp_sums(part);
        all.qq += sums.qq, all.kk += sums.kk, all.qk += sums.qk;
      }
      return all;
    });
    to.prepared[number].template store<TokenKeys<kChannels, 32>, kChannels>(keys);
    if (lane == 0) to.beta[number] = keys.beta, to.qk[number] = keys.qk;
#pragma unroll
    for (unsigned i = 0; i < kValues; ++i) to.v[number][lane + 32 * i] = value_of(x.qkv_dtype, values[i]);
  }
};

// A block of the kernel: `kRows` columns of a thread.
template <int kRows, int32_t kState>
struct Block {
  static constexpr unsigned kColumns = kTile<kRows>;
  const DecodeParams& p;
  const Place& at;
  const unsigned v0 = at.tile * kColumns + static_cast<unsigned>(first_row<kRows>());

  // Gives hints for the state of a block, if it is where its slot says.
  __device__ void expect_state() const {
    const bool hint = threadIdx.x == 0 && at.is_among(p.blocks.hints.states) && p.h0.data && !p.accepted.data;
    const int32_t slot = hint ? likely_slot(p.slots.indices, p.slots.first_valid, p.slots.slots, at.n) : -1;
    if (slot < 0) return;
    const Rows<true> states(p.h0, static_cast<unsigned>(slot), at.hv, at.tile * kColumns);
    prefetch(states.first, kColumns * static_cast<uint64_t>(states.row));
  }
  __device__ void store_outputs(int64_t b, int64_t t, const float (&o)[kRows]) const {
    const Tokens& x = p.tokens;
    char* to = x.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv) + v0 * size_of(x.o_dtype);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (threadIdx.x % kRowLanes == 0) store_element(to + row * size_of(x.o_dtype), x.o_dtype, o[row]);
  }
  __device__ void zero_outputs(int64_t b, int64_t t, int64_t end) const {
    const float zeros[kRows] = {};
    for (; t < end && threadIdx.x < kThreads; ++t) store_outputs(b, t, zeros);
  }
  __device__ Rows<true> rows_of_state(const TypedView& states, int64_t row, int64_t offset) const {
    Rows<true> rows(states, static_cast<unsigned>(row), at.hv, v0);
    rows.first += offset;
    return rows;
  }
  __device__ void load(const Sequence& s, float (&S)[kRows][kElements]) const {
    if (!p.accepted.data) {
      if (s.initial) load_rows(rows_of_state(p.h0, s.slot, 0), kState, kRows, kWideK, S);
    } else if (const int64_t row = p.start_row(at.n); row >= 0) {
      const TypedView& states = p.snapshot_slots.data ? p.h0 : p.snapshots;
      load_rows(rows_of_state(states, row, p.first_snapshot(at.n)), kState, kRows, kWideK, S);
    }
  }

  // Activates this warp's token of the four from t on, if it is there, and requests that of the next four.
  __device__ void activate(Activation<kColumns>& own, const Sequence& s, unsigned t, Tokens4<kColumns>& to) const {
    const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), T = static_cast<unsigned>(s.length);
    if (t + own.number < T) {
      own.activate(p.tokens, to);
      const int64_t row = p.snapshot_rows_of(at.n).row(t + own.number);
      if (own.lane == 0) to.rows[own.number] = row < p.snapshot_rows ? row : -1;
    }
    own.locate(p.tokens, at, b, t0 + t + kTogether);
    own.fetch(p.tokens, t + kTogether + own.number < T);
  }
  // Applies token t.
  __device__ void apply(const Sequence& s, unsigned t, const Tokens4<kColumns>& x, float (&S)[kRows][kElements]) const {
    const unsigned j = t % kTogether;
    float v[kRows], u[kRows], o[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) v[row] = x.v[j][first_row<kRows>() + row];
    apply_token(x.prepared[j], x.beta[j], x.qk[j], v, S, u, o);
    store_outputs(s.b, s.t0 + t, o);
    if (const int64_t row = x.rows[j]; row >= 0)
      store_rows(rows_of_state(p.snapshots, row, p.first_snapshot(at.n)), kState, kRows, kWideK, S);
  }
  // All tokens of a sequence.
  __device__ void run(bool activates, bool applies, Activation<kColumns>& own, const Sequence& s,
                      Tokens4<kColumns> (&tokens)[2]) const {
    float S[kRows][kElements] = {};
    if (applies) load(s, S);
    let_next_start();
    const auto T = static_cast<unsigned>(s.length);
    for (unsigned t = 0; t < T; ++t) {
      Tokens4<kColumns>& four = tokens[t / kTogether % 2];
      if (t % kTogether == 0) {
        if (activates) activate(own, s, t, four);
        __syncthreads();  // these tokens are in shared memory, and those before are applied
      }
      if (applies) apply(s, t, four, S);
    }
    if (!applies || !p.hT.data) return;
    const int64_t row = final_row(p.out_state_indices, p.slots.first_valid, p.final_rows, at.n, s.slot);
    if (row >= 0) store_rows(rows_of_state(p.hT, row, 0), kState, kRows, kWideK, S);
  }
};

template <int kRows, int32_t kState, bool kApart>
__global__ void __launch_bounds__(kThreads*(1 + kApart), kBlocksOfSM<kApart>)
    snapshots_kernel(const __grid_constant__ DecodeParams params) {
  constexpr unsigned kColumns = kTile<kRows>;
  __shared__ Tokens4<kColumns> tokens[2];
  const DecodeParams p = params.fast_copy(FastPath::kSnapshots, kState);
  const Place at(p.blocks);
  const Block<kRows, kState> block{p, at};
  const bool activates = !kApart || threadIdx.x >= kThreads, applies = threadIdx.x < kThreads;

  // ---- hints, while the kernel before still runs; then the slot, the first tokens ----

  Activation<kColumns> own;
  if (!p.varlen && at.n < p.N && at.is_among(p.blocks.hints.blocks)) {
    if (activates && own.number < p.T) own.locate(p.tokens, at, at.n, 0), own.expect(p.tokens);
    if (applies) block.expect_state();
  }
  wait_for_stream();
  if (at.n >= p.blocks.rows) return;  // the grid's last rows
  if (p.varlen && at.n == p.N) return block.zero_outputs(0, end_of_sequences(p.cu_seqlens, p.N, p.T), p.T);
  const int64_t slot = p.slots.indices.data ? p.slots.indices[at.n] : int64_t{at.n};
  Sequence s = p.sequence_at(at.n);
  if (activates) {
    const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), T = static_cast<unsigned>(s.length);
    own.locate(p.tokens, at, b, t0);
    own.keys.fetch_parameters(p.tokens, own.number < T), own.fetch(p.tokens, own.number < T);
  }
  find_states(s, p.slots, p.has_initial, slot);
  find_padding(s, p.slots, p.snapshot_slots.row(at.n));
  if (!s.live) return block.zero_outputs(s.b, s.t0, s.t0 + s.length);
  block.run(activates, applies, own, s, tokens);
}

template <int kRows, int32_t kState, bool kApart = true>
void launch_for(const DecodeProblem& p, DecodeParams x, const DecodePlan& plan) {
  const int64_t tiles = p.V / kTile<kRows>;
  x.blocks = Blocks(p, tiles, hints_of(p, 1, kState, tiles, kBlocksOfSM<kApart>, plan.hinted, p.args.exec.device_id));
  launch<snapshots_kernel<kRows, kState, kApart>>(p.args.exec, Blocks::grid(p, tiles, 1), kThreads * (1 + kApart), 0,
                                                  x);
}

}  // namespace

void decode_snapshots(const DecodeProblem& p, const DecodeParams& x, const DecodePlan& plan) {
  const bool bf16 = p.args.states.h0.dtype == KDA_BF16;
  if (plan.rows == 2) bf16 ? launch_for<2, KDA_BF16>(p, x, plan) : launch_for<2, KDA_F32>(p, x, plan);
  else if (!plan.apart) launch_for<4, KDA_BF16, false>(p, x, plan);
  else bf16 ? launch_for<4, KDA_BF16>(p, x, plan) : launch_for<4, KDA_F32>(p, x, plan);
}

}  // namespace kda::cuda
