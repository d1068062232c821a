// Decode: the token recurrence (recurrence.h) over a state pool, for sm_80 and newer, in two shapes.
//
// Bytes: a call reads the state once and writes it once, 128 KiB a head at K = V = 128 in f32; everything else is
// about 1 KB a token. A block takes some value columns of a head, eight lanes a column. It activates q, k and the
// gate, a thread a channel, while its part of the state is on its way.
//
// `cuda_decode` (any K and V, both layouts, any T): states go straight to registers, kRows columns a thread, with all
// loads in flight before the first wait. This is the shortest way for small calls. A lane of a column has the same
// channels in both layouts, so the bits are the same, too.
//
// `cuda_decode_sweep` (K = 64 or 128, V-first, one token): a block has a whole head, prepares the token once, and
// works on some columns while the next are on their way. It is for large calls, except for the usual one: kernels
// that know the usual call are faster.
//
// Columns are independent, and every sum has one order in both shapes: the bits of a request depend on nothing else
// in the call, and T tokens have the bits of T calls of one.
#include <type_traits>

#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/front.h"
#include "cuda/launch.h"
#include "cuda/sm80/recurrence.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads;
constexpr int kFewThreads = kThreads / 2;  // of a block, in large calls

// What kernels read of a call. What all calls have comes first: a block waits for every 64 bytes of it that it reads.
struct Params {
  Blocks blocks;
  Tokens tokens;
  StateSlots slots;
  TypedView h0, hT;
  int64_t T;
  uint32_t N, V;
  int32_t layout;
  bool varlen;

  Flags has_initial;
  Lengths cu_seqlens;

  // Snapshots by slot, or by row of a sequence (`sequence`: bytes from one sequence to the next).
  TypedView snapshots;
  int64_t sequence;
  IndexRows snapshot_slots;
  Index accepted;
  int64_t S, start_rows, snapshot_rows;  // snapshots of a sequence; how many rows there are to start from, and to write
  Front front;

  Params(const DecodeProblem& p, const Blocks& blocks) : Params(p, p.args, blocks) {}

  __device__ Sequence sequence_at(int64_t n) const { return kda::sequence_at(varlen, cu_seqlens, T, n); }
  __device__ SnapshotRows snapshot_rows_of(int64_t n) const { return {snapshot_slots.row(n), S, slots.first_valid}; }
  // A copy for a usual call, with constants that the compiler then knows.
  __device__ Params known(int32_t K, int32_t state_dtype) const {
    Params x = *this;
    x.tokens = tokens.known(K);
    x.hT.stride0 = h0.stride0, x.hT.stride1 = h0.stride1, x.hT.stride2 = h0.stride2;
    x.h0.dtype = x.hT.dtype = state_dtype;
    x.T = 1, x.N = blocks.rows, x.varlen = false;
    return x;
  }

 private:
  Params(const DecodeProblem& p, const kda_decode_args& a, const Blocks& blocks)
      : blocks(blocks),
        tokens(p, a.in, a.o),
        slots(slots_of(a.states)),
        h0(view_of(a.states.h0)),
        hT(view_of(a.states.hT)),
        T(p.T),
        N(static_cast<uint32_t>(p.N)),
        V(static_cast<uint32_t>(p.V)),
        layout(a.in.state_layout),
        varlen(p.varlen),
        has_initial(strided<const uint8_t>(a.states.has_initial_state)),
        cu_seqlens(lengths_of(a.in.cu_seqlens)),
        snapshots(view_of(a.snapshots, present(a.snapshots) ? a.snapshots.ndim - 4 : 0)),
        sequence(a.snapshots.stride[0] * dtype_size(a.snapshots.dtype)),
        snapshot_slots(index_rows(a.snapshot_slots)),
        accepted(index_of(a.accepted)),
        S(by_slot(a) ? a.snapshot_slots.shape[1] : a.snapshots.shape[1]),
        start_rows(by_slot(a) ? a.states.h0.shape[0] : a.snapshots.shape[1]),
        snapshot_rows(a.snapshots.shape[by_slot(a) ? 0 : 1]),
        front{p.H, p.K, p.V, a.conv, {}} {}
  static bool by_slot(const kda_decode_args& a) { return present(a.snapshot_slots); }
};

bool plain(const DecodeProblem& p) {
  return !present(p.args.snapshots) && !present(p.args.accepted) && !present(p.args.conv.x);
}

// Is the call like nearly all calls of a model? These have one token, the dtypes and forms that Tokens::known knows,
// and states of one dtype that lie alike before and after. Kernels for these calls only have less than half of the
// instructions: code for other calls would lie between those that run, and come through the instruction cache with
// them.
bool usual(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  const TypedView h0 = view_of(a.states.h0), hT = view_of(a.states.hT);
  return plain(p) && !p.varlen && p.T == 1 && (p.K == 64 || p.K == 128) && p.V % 64 == 0 && h0.data && hT.data &&
         h0.dtype == hT.dtype && h0.stride0 == hT.stride0 && h0.stride1 == hT.stride1 && h0.stride2 == hT.stride2 &&
         Tokens(p, a.in, a.o).usual();
}

template <bool kUsual>
__device__ decltype(auto) known(const Params& p, int32_t K, int32_t state_dtype) {
  if constexpr (kUsual) return p.known(K, state_dtype);
  else return (p);
}

// Which calls a kernel takes. kPlain: neither snapshots, nor a start from one, nor a convolution in front. kUsual..:
// usual calls, with states of this dtype.
enum class Calls { kAny, kPlain, kUsualF32, kUsualBf16 };
constexpr bool are_usual(Calls calls) { return calls == Calls::kUsualF32 || calls == Calls::kUsualBf16; }

// How states are read and written: kAny: an element at a time. kRows: V-first, some channels of a column at a time.
// kColumns: K-first, some columns of a channel.
enum class Access { kAny, kRows, kColumns };
template <Access kAccess, int kRows>
using States = std::conditional_t<kAccess == Access::kColumns, Columns<kRows>, Rows<kAccess == Access::kRows>>;

// Blocks of an SM: as many as registers allow without spills.
constexpr int blocks_of(Calls calls, int elements, int rows, int threads) {
  if (threads == kFewThreads) return 20;
  if (are_usual(calls)) return (elements * rows > 32 ? 5 : 8) - (calls == Calls::kUsualBf16 && rows == 4);
  if (elements * rows > 32) return calls == Calls::kPlain && elements == 16 ? 4 : 1;
  if (calls == Calls::kAny) return elements == 32 ? 2 : rows == 2 ? 3 : 4;
  return rows > 1 || elements == 32 ? 4 : 5;
}

template <Access kAccess, Calls kCalls, int kElements, int kRows, int kBlock>
__global__ void __launch_bounds__(kBlock, blocks_of(kCalls, kElements, kRows, kBlock))
    decode_kernel(const __grid_constant__ Params params) {
  constexpr bool kPlain = kCalls != Calls::kAny, kUsual = are_usual(kCalls);
  const auto& p = known<kUsual>(params, kElements * 8, kCalls == Calls::kUsualBf16 ? KDA_BF16 : KDA_F32);
  __builtin_assume(threadIdx.x < kBlock);
  constexpr int kPerThread = (kElements * 8 + kBlock - 1) / kBlock, kColumns = kBlock / kRowLanes * kRows;
  __shared__ Prepared<kElements> prepared;
  __shared__ Products sums[kTokenThreads / 32];
  const Tokens& x = p.tokens;
  const Place at(p.blocks);
  const int v0 = static_cast<int>(at.tile) * kColumns + first_row<kRows>();
  // How many of the thread's columns exist.
  const int columns = kUsual ? kRows : min(max(static_cast<int>(p.V) - v0, 0), kRows);
  const auto store_outputs = [&](unsigned b, unsigned t, const float(&o)[kRows]) {
    char* to = x.o.at(b, t, at.hv) + static_cast<unsigned>(v0) * size_of(x.o_dtype);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (row < columns && threadIdx.x % kRowLanes == 0)
        store_element(to + row * size_of(x.o_dtype), x.o_dtype, o[row]);
  };
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    const float zeros[kRows] = {};
    for (; t < end; ++t) store_outputs(static_cast<unsigned>(b), static_cast<unsigned>(t), zeros);
  };
  // All addresses that need nothing from memory are ready before the wait for the previous kernel, and the loads of
  // the first token's inputs are issued before the wait for the slot.
  TokenKeys<kPerThread, kBlock> keys(static_cast<int>(threadIdx.x));
  const char* from_v;
  const auto locate = [&](unsigned b, unsigned t) {
    keys.locate(x, b, t, at.hv, at.h);
    from_v = x.v.at(b, t, at.hv) + static_cast<unsigned>(v0) * size_of(x.qkv_dtype);
  };
  unsigned values[kRows];
  const auto fetch_as = [&]<bool kNarrow>() {
    keys.template fetch<kNarrow>(x);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      values[row] =
          row < columns ? load_raw<kNarrow>(from_v + row * (kNarrow ? 2 : size_of(x.qkv_dtype)), x.qkv_dtype) : 0;
  };
  const auto fetch = [&] { x.narrow ? fetch_as.template operator()<true>() : fetch_as.template operator()<false>(); };
  const bool front = !kPlain && present(p.front.conv.x);
  const auto convolve = [&](const Sequence& s, int64_t t) {
    const FrontChannels first(p.front, at.h, at.hv);
    const int64_t slot = slot_of(p.front.conv.indices, s.n);
    const auto value = [&](int64_t d) { return front_value(p.front.conv, {}, s, slot, t, d); };
    x.narrow ? keys.template fetch_gate<true>(x) : keys.template fetch_gate<false>(x);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = keys.channel(i);
      keys.take(i, c < x.K ? value(first.q + c) : 0.0f, c < x.K ? value(first.k + c) : 0.0f);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) values[row] = row < columns ? __float_as_uint(value(first.v + v0 + row)) : 0;
  };
  if (!p.varlen && at.n < p.N) {
    locate(at.n, 0);
    if (kPlain && kAccess != Access::kAny && at.is_among(p.blocks.hints.blocks)) {
      // With many small blocks, one block of a head gives the hints for all.
      if (kBlock > kFewThreads || at.tile == 0) {
        keys.expect(x);
        if (threadIdx.x == 0) prefetch(from_v);
      }
      // A block's part of a K-first state is some lines of every channel.
      const bool hint = at.is_among(p.blocks.hints.states) && p.h0.data &&
                        (kAccess == Access::kColumns ? threadIdx.x < kElements * 8 : threadIdx.x == 0);
      const int32_t slot = hint ? likely_slot(p.slots.indices, p.slots.first_valid, p.slots.slots, at.n) : -1;
      if (slot >= 0) {
        const unsigned from = at.tile * kColumns;
        const unsigned all = kUsual ? kColumns : min(p.V - from, static_cast<unsigned>(kColumns));
        const States<kAccess, kRows> states(p.h0, p.layout, static_cast<unsigned>(slot), at.hv, from);
        if constexpr (kAccess == Access::kRows) prefetch(states.first, all * static_cast<uint64_t>(states.row));
        if constexpr (kAccess == Access::kColumns)
          for (unsigned byte = 0; byte < all * size_of(p.h0.dtype); byte += 128)
            prefetch(states.first + threadIdx.x * uint64_t{states.channel_step} + byte);
      }
    }
  }
  const int32_t* index = p.slots.indices.data ? &p.slots.indices[at.n] : nullptr;
  wait_for_stream();
  if (at.n >= p.blocks.rows) return;  // the grid's last rows
  if (p.varlen && at.n == p.N) return zero_outputs(0, end_of_sequences(p.cu_seqlens, p.N, p.T), p.T);
  const int64_t slot = index ? *index : int64_t{at.n};
  Sequence s = p.sequence_at(at.n);
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0);
  if (p.varlen) locate(b, t0);
  if (s.length > 0 && !front) fetch();
  find_states(s, p.slots, p.has_initial, slot);
  if constexpr (!kPlain) find_padding(s, p.slots, p.snapshot_slots.row(at.n));
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);

  float S[kRows][kElements] = {};
  const auto load = [&](const TypedView& from, int64_t row, int64_t offset = 0) {
    States<kAccess, kRows> rows(from, p.layout, static_cast<unsigned>(row), at.hv, static_cast<unsigned>(v0));
    rows.first += offset;
    load_rows(rows, from.dtype, columns, x.K, S);
  };
  const auto store = [&](const TypedView& to, int64_t row, int64_t offset = 0) {
    States<kAccess, kRows> rows(to, p.layout, static_cast<unsigned>(row), at.hv, static_cast<unsigned>(v0));
    rows.first += offset;
    store_rows(rows, to.dtype, columns, x.K, S);
  };
  const bool by_slot = !kPlain && p.snapshot_slots.data;
  const auto sequence = [&] { return by_slot ? 0 : at.n * p.sequence; };
  if (kPlain || !p.accepted.data) {
    if (s.initial) load(p.h0, s.slot);
  } else {
    const int64_t row = p.snapshot_rows_of(at.n).start_row(p.accepted[at.n]);
    const bool there = row >= 0 && row < p.start_rows;
    if (there && by_slot) load(p.h0, row);
    if (there && !by_slot) load(p.snapshots, row, sequence());
  }
  let_next_start();

  for (unsigned t = 0; t < s.length; ++t) {
    if (t) locate(b, t0 + t);
    if (front) convolve(s, t);  // while the state is on its way
    else if (t) fetch();
    // After its barrier, the last token's keys are no longer read, either.
    constexpr int kParts = kBlock == kFewThreads ? 2 : 1;
    static_assert(kParts == 1 || kPerThread == 2);
    keys.template activate<kParts>(x, [&](const Products(&mine)[kParts], bool again) {
      if (again) __syncthreads();  // the sums are read
      return block_sums<kBlock, kParts>(mine, sums);
    });
    prepared.template store<decltype(keys), kPerThread>(keys);
    __syncthreads();  // this token's keys are in shared memory, and the sums are read
    float v[kRows], u[kRows], o[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) v[row] = value_of(x.qkv_dtype, values[row]);
    apply_token(prepared, keys.beta, keys.qk, v, S, u, o);
    store_outputs(b, t0 + t, o);
    if constexpr (!kPlain) {
      const int64_t row = p.snapshots.data ? p.snapshot_rows_of(at.n).row(t) : -1;
      if (row >= 0 && row < p.snapshot_rows) store(p.snapshots, row, sequence());
    }
  }
  if (kUsual || p.hT.data) store(p.hT, s.slot);
}

template <Access kAccess, Calls kCalls, int kElements, int kRows, int kBlock = kTokenThreads>
void launch_direct(const DecodeProblem& p) {
  const int64_t tiles = divide_up(p.V, kBlock / kRowLanes * kRows);
  const int blocks = blocks_of(kCalls, kElements, kRows, kBlock);
  const Hints hints = hints_of(p, 1, p.args.states.h0.dtype, tiles, blocks, {28, 28}, p.args.exec.device_id);
  launch<decode_kernel<kAccess, kCalls, kElements, kRows, kBlock>>(p.args.exec, Blocks::grid(p, tiles, 1), kBlock, 0,
                                                                   Params(p, Blocks(p, tiles, hints)));
}

// With many columns a thread, reads of keys are shared; with few, a small call spreads over all SMs, and threads keep
// an address for every channel. In a K-first state, the columns are also what a thread reads at once. In large usual
// calls a block has 4 KB of an f32 state: memory is fastest when all that is on its way lies close together.
template <Access kAccess, Calls kCalls>
void launch_direct(const DecodeProblem& p) {
  constexpr bool kColumns = kAccess == Access::kColumns;
  constexpr int kFew = kColumns ? 2 : 1, kMany = kColumns ? 4 : 2;
  const int64_t SMs = multiprocessors(p.args.exec.device_id);
  const bool few = p.N * p.HV * divide_up(p.V, kTile<kFew>) <= 5 * SMs;
  const auto sized = [&]<int kElements, int kRows>() {
    if constexpr (kCalls == Calls::kUsualF32 && !kColumns && kElements == 16)
      if (p.N * p.HV * p.V >= 1920 * SMs) return launch_direct<kAccess, kCalls, kElements, 1, kFewThreads>(p);
    few ? launch_direct<kAccess, kCalls, kElements, kFew>(p) : launch_direct<kAccess, kCalls, kElements, kRows>(p);
  };
  if (p.K <= 64) return sized.template operator()<8, 4>();
  if (p.K <= 128) return sized.template operator()<16, kMany>();
  if constexpr (!are_usual(kCalls) && !kColumns) sized.template operator()<32, kAccess == Access::kRows ? 2 : 1>();
}

template <Access kAccess>
void launch_direct(const DecodeProblem& p) {
  if constexpr (kAccess != Access::kAny)
    if (usual(p))
      return p.args.states.h0.dtype == KDA_F32 ? launch_direct<kAccess, Calls::kUsualF32>(p)
                                               : launch_direct<kAccess, Calls::kUsualBf16>(p);
  if (plain(p)) launch_direct<kAccess, Calls::kPlain>(p);
  else if constexpr (kAccess != Access::kColumns) launch_direct<kAccess, Calls::kAny>(p);
}

// ---- one head a block ----

template <class T, int kK>
__global__ void __launch_bounds__(kThreads, 4) sweep_kernel(const __grid_constant__ Params p) {
  __builtin_assume(threadIdx.x < kThreads);
  constexpr int kElements = kK / kRowLanes, kRows = 2, kStep = kTile<kRows>;
  __shared__ Prepared<kElements> prepared;
  __shared__ Products sums[kThreads / 32];
  __shared__ float values[kMaxSize];
  const Tokens& x = p.tokens;
  const Place at(p.blocks);
  const unsigned V = p.V;
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    for (; t < end; ++t) {
      char* to = x.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at.hv);
      for (unsigned v = threadIdx.x; v < V; v += kThreads) store_element(to + v * size_of(x.o_dtype), x.o_dtype, 0);
    }
  };
  TokenKeys<1, kThreads> keys(static_cast<int>(threadIdx.x));
  const char* from_v;
  const auto locate = [&](unsigned b, unsigned t) {
    keys.locate(x, b, t, at.hv, at.h);
    from_v = x.v.at(b, t, at.hv) + threadIdx.x * size_of(x.qkv_dtype);
  };
  unsigned raw[kMaxSize / kThreads];
  const auto fetch_as = [&]<bool kNarrow>() {
    keys.template fetch<kNarrow>(x);
#pragma unroll
    for (unsigned i = 0; i < kMaxSize / kThreads; ++i)
      raw[i] = threadIdx.x + i * kThreads < V
                   ? load_raw<kNarrow>(from_v + i * kThreads * size_of(x.qkv_dtype), x.qkv_dtype)
                   : 0;
  };
  const auto fetch = [&] { x.narrow ? fetch_as.template operator()<true>() : fetch_as.template operator()<false>(); };
  if (!p.varlen) locate(at.n, 0);
  wait_for_stream();
  if (at.n >= p.blocks.rows) return;  // the grid's last rows
  if (p.varlen && at.n == p.N) return zero_outputs(0, end_of_sequences(p.cu_seqlens, p.N, p.T), p.T);
  const int64_t slot = slot_of(p.slots.indices, at.n);
  Sequence s = p.sequence_at(at.n);
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0);
  if (p.varlen) locate(b, t0);
  if (s.length > 0) fetch();
  find_states(s, p.slots, p.has_initial, slot);
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);

  // In bf16, loads to registers alone would keep too little on its way. (In f32 this costs 8 %.)
  if (sizeof(T) == 2 && threadIdx.x == 0 && s.initial) {
    const Rows<true> all(p.h0, static_cast<unsigned>(s.slot), at.hv, 0);
    prefetch(all.first, V * static_cast<uint64_t>(all.row));
  }
  // Each token is a sweep over the state; in most calls there is one.
  const auto state = static_cast<unsigned>(s.slot), row0 = static_cast<unsigned>(first_row<kRows>());
  for (unsigned t = 0; t == 0 || t < s.length; ++t) {
    const bool first = t == 0;
    const Rows<true> from(first ? p.h0 : p.hT, state, at.hv, row0);
    const Rows<true> to(p.hT, state, at.hv, row0);
    float S[2][kRows][kElements];
    const auto load = [&](unsigned v, float(&S)[kRows][kElements]) {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (v < V && (s.initial || !first)) {
          from.template load<T>(static_cast<int>(v) + row, kK, S[row]);
        } else {
#pragma unroll
          for (int e = 0; e < kElements; ++e) S[row][e] = 0;
        }
    };
    load(0, S[0]);
    let_next_start();
    if (!first) locate(b, t0 + t), fetch();
    if (s.length > 0) {
      // After its barrier, the last token is no longer read.
      keys.activate(x, [&](const Products(&mine)[1], bool again) {
        if (again) __syncthreads();  // the sums are read
        return block_sums<kThreads>(mine, sums);
      });
      prepared.template store<decltype(keys), 1>(keys);
#pragma unroll
      for (unsigned i = 0; i < kMaxSize / kThreads; ++i)
        if (threadIdx.x + i * kThreads < V) values[threadIdx.x + i * kThreads] = value_of(x.qkv_dtype, raw[i]);
    }
    __syncthreads();  // the token's keys and values are in shared memory
    char* to_o = x.o.at(b, t0 + t, at.hv) + row0 * size_of(x.o_dtype);
    const auto finish = [&](unsigned v, float(&S)[kRows][kElements]) {
      if (s.length > 0) {
        float mine[kRows], u[kRows], o[kRows];
#pragma unroll
        for (int row = 0; row < kRows; ++row) mine[row] = values[v + row0 + row];
        apply_token(prepared, keys.beta, keys.qk, mine, S, u, o);
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          if (threadIdx.x % kRowLanes == 0) store_element(to_o + (v + row) * size_of(x.o_dtype), x.o_dtype, o[row]);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (p.hT.data) to.template store<T>(static_cast<int>(v) + row, kK, S[row]);
    };
    // The next columns are on their way while these are worked on.
#pragma unroll 1
    for (unsigned v = 0; v < V; v += 2 * kStep) {
      load(v + kStep, S[1]);
      finish(v, S[0]);
      load(v + 2 * kStep, S[0]);
      finish(v + kStep, S[1]);
    }
  }
}

template <class T, int kK>
void launch_sweep(const DecodeProblem& p) {
  launch<sweep_kernel<T, kK>>(p.args.exec, Blocks::grid(p, 1, 1), kThreads, 0, Params(p, Blocks(p, 1)));
}

}  // namespace

const char* decode_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (const char* reason = Tokens::why_not(a.in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT})) return reason;
  if (const char* reason = view_why_not({&a.snapshots}, present(a.snapshot_slots) ? 0 : 1)) return reason;
  return grid_why_not(p, divide_up(p.V, 8), 1);
}

void decode(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const kda_decode_args& a = p.args;
  if (wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.snapshots})) launch_direct<Access::kRows>(p);
  else if (plain(p) && wide_columns(p, a.in.state_layout, {&a.states.h0, &a.states.hT}))
    launch_direct<Access::kColumns>(p);
  else launch_direct<Access::kAny>(p);
  roll_convolution(p);
}

const char* decode_sweep_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  const kda_states& states = a.states;
  if (const char* reason = decode_why_not(p)) return reason;
  if (present(a.snapshots) || present(a.accepted)) return "has no snapshots";
  if (present(a.conv.x)) return "has no convolution in front";
  if ((p.K != 64 && p.K != 128) || p.V % 64 || !wide_rows(p, a.in.state_layout, {&states.h0, &states.hT}))
    return "takes V-first states of K = 64 or 128 and V a multiple of 64";
  if (present(states.h0) && present(states.hT) && states.h0.dtype != states.hT.dtype)
    return "takes states of one dtype";
  // Between tokens the state is in memory.
  if (p.varlen ? !present(states.hT) || states.hT.dtype != KDA_F32 : p.T > 1)
    return "takes one token a sequence (with cu_seqlens: a final state in float32)";
  return nullptr;
}

const char* decode_sweep_unsuited(const DecodeProblem& p) {
  if (p.N * p.HV < 4 * multiprocessors(p.args.exec.device_id)) return "has too few heads for a GPU of this size";
  return usual(p) ? "is slower than the kernels that know the usual call" : nullptr;
}

void decode_sweep(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const kda_states& states = p.args.states;
  const bool bf16 = (present(states.h0) ? states.h0 : states.hT).dtype == KDA_BF16;
  if (p.K == 64) bf16 ? launch_sweep<__nv_bfloat16, 64>(p) : launch_sweep<float, 64>(p);
  else bf16 ? launch_sweep<__nv_bfloat16, 128>(p) : launch_sweep<float, 128>(p);
}

}  // namespace kda::cuda
