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
// works on some columns while the next are on their way. It is for large calls, except on the fast path, whose kernels
// are faster.
//
// Columns are independent, and every sum has one order in both shapes: the bits of a request depend on nothing else
// in the call, and T tokens have the bits of T calls of one.
#include <type_traits>

#include "cuda/call/launch.h"
#include "cuda/call/state_rows.h"
#include "cuda/call/token.h"
#include "cuda/conv/front.h"
#include "cuda/cuda.h"
#include "cuda/decode/recurrence.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads;
constexpr int kFewThreads = kThreads / 2;  // of a block, in large calls
constexpr int kWideK = 128;                // on the fast path

// How states are read and written. kAny: an element at a time. kRows: V-first, four channels of a column at a time.
// kColumns: K-first, some columns of a channel. kGiven: as each call says.
enum class Access { kAny, kRows, kColumns, kGiven };

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
  Access access;

  explicit Params(const DecodeProblem& p) : Params(p, p.args) {}

  __device__ Sequence sequence_at(int64_t n) const { return kda::sequence_at(varlen, cu_seqlens, T, n); }
  __device__ SnapshotRows snapshot_rows_of(int64_t n) const { return {snapshot_slots.row(n), S, slots.first_valid}; }
  // A copy for a call on the fast path, with constants that the compiler then knows.
  __device__ Params fast_copy(int32_t state_dtype) const {
    Params x = *this;
    x.tokens = tokens.fast_copy(kWideK);
    x.hT.stride0 = h0.stride0, x.hT.stride1 = h0.stride1, x.hT.stride2 = h0.stride2;
    x.h0.dtype = x.hT.dtype = state_dtype;
    x.T = 1, x.N = blocks.rows, x.varlen = false;
    return x;
  }

 private:
  Params(const DecodeProblem& p, const kda_decode_args& a)
      : blocks(p, 1),
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
        front{p.H, p.K, p.V, a.conv, {}},
        access(access_of(p)) {}
  static bool by_slot(const kda_decode_args& a) { return present(a.snapshot_slots); }
  static Access access_of(const DecodeProblem& p) {
    const kda_decode_args& a = p.args;
    const std::initializer_list<const kda_tensor*> states = {&a.states.h0, &a.states.hT, &a.snapshots};
    if (wide_rows(p, a.in.state_layout, states)) return Access::kRows;
    return wide_columns(p, a.in.state_layout, states) ? Access::kColumns : Access::kAny;
  }
};

// Is the call on the fast path? It has one token, the dtypes and forms that Tokens::on_fast_path() names, K = 128 and
// states of one dtype that lie alike before and after. Kernels for these calls have less than half of the
// instructions: code for other calls would lie between those that run, and come through the instruction cache with
// them.
bool on_fast_path(const DecodeProblem& p, const Params& x) {
  const TypedView &h0 = x.h0, &hT = x.hT;
  return !x.snapshots.data && !x.accepted.data && !present(p.args.conv.x) && !p.varlen && p.T == 1 && p.K == kWideK &&
         p.V % 64 == 0 && h0.data && hT.data && h0.dtype == hT.dtype && h0.stride0 == hT.stride0 &&
         h0.stride1 == hT.stride1 && h0.stride2 == hT.stride2 && x.tokens.on_fast_path() &&
         (x.access == Access::kRows || (x.access == Access::kColumns && h0.dtype == KDA_F32));
}

// What a kernel is compiled for. On the fast path (`fast`), calls are on_fast_path(), with states of dtype `state`.
// elements: the channels of a thread in a column, of which K may leave some unused. rows: the columns of a thread.
struct Traits {
  bool fast;
  Access access;
  int32_t state;
  int elements, rows, threads = kTokenThreads;

  constexpr int columns() const { return threads / kRowLanes * rows; }  // of a block
};
constexpr Traits fast(Access access, int32_t state, int rows, int threads = kTokenThreads) {
  return {true, access, state, kWideK / kRowLanes, rows, threads};
}
constexpr Traits general(int elements, int rows) { return {false, Access::kGiven, -1, elements, rows}; }
// The same as a type. nvcc repeats a kernel's template arguments in code for the host, where it has no name for the
// type of a value.
template <bool kFast, Access kAccess, int32_t kState, int kElements, int kRows, int kBlock>
struct TraitsType {
  static constexpr Traits kValue{kFast, kAccess, kState, kElements, kRows, kBlock};
};
template <Traits kCall>
using TypeOf = TraitsType<kCall.fast, kCall.access, kCall.state, kCall.elements, kCall.rows, kCall.threads>;

template <Traits kCall>
__device__ decltype(auto) fast_copy(const Params& p) {
  if constexpr (kCall.fast) return p.fast_copy(kCall.state);
  else return (p);
}

// Calls act() with kCall.rows columns of a state from v on, as they are accessed.
template <Traits kCall, class Act>
__device__ void with_columns(const Params& p, const TypedView& state, unsigned slot, unsigned hv, unsigned v,
                             const Act& act) {
  const auto with = [&]<class Columns>() {
    Columns columns(state, p.layout, slot, hv, v);
    act(columns);
  };
  constexpr bool kGiven = kCall.access == Access::kGiven;
  const Access access = kGiven ? p.access : kCall.access;
  if (access == Access::kRows) with.template operator()<Rows<true>>();
  else if (access == Access::kColumns) with.template operator()<Columns<kCall.rows>>();
  else with.template operator()<Rows<false>>();
}

// Blocks of an SM: as many as registers allow without spills.
constexpr int blocks_of_SM(Traits call) {
  if (call.threads == kFewThreads) return 20;
  if (call.fast) return (call.elements * call.rows > 32 ? 5 : 8) - (call.state == KDA_BF16 && call.rows == 4);
  return call.elements == 32 ? 2 : 3;
}

// Gives hints for a block's columns of a state.
template <Traits kCall>
__device__ void expect_columns(const Params& p, const Place& at) {
  constexpr bool kKFirst = kCall.access == Access::kColumns;
  // A block's part of a K-first state is some lines of every channel.
  const bool known = kCall.fast || p.access == Access::kRows;
  const bool hint = known && at.is_among(p.blocks.hints.states) && p.h0.data &&
                    (kKFirst ? threadIdx.x < kCall.elements * 8 : threadIdx.x == 0);
  const int32_t slot = hint ? likely_slot(p.slots.indices, p.slots.first_valid, p.slots.slots, at.n) : -1;
  if (slot < 0) return;
  const unsigned from = at.tile * kCall.columns();
  const unsigned all = kCall.fast ? kCall.columns() : min(p.V - from, static_cast<unsigned>(kCall.columns()));
  if constexpr (kKFirst) {
    const Columns<kCall.rows> states(p.h0, p.layout, static_cast<unsigned>(slot), at.hv, from);
    for (unsigned byte = 0; byte < all * size_of(p.h0.dtype); byte += 128)
      prefetch(states.first + threadIdx.x * uint64_t{states.channel_step} + byte);
  } else {
    const Rows<true> states(p.h0, p.layout, static_cast<unsigned>(slot), at.hv, from);
    prefetch(states.first, all * static_cast<uint64_t>(states.row));
  }
}

template <class Call>
__global__ void __launch_bounds__(Call::kValue.threads, blocks_of_SM(Call::kValue))
    decode_kernel(const __grid_constant__ Params params) {
  constexpr Traits kCall = Call::kValue;
  constexpr int kElements = kCall.elements, kRows = kCall.rows, kBlock = kCall.threads, kColumns = kCall.columns();
  const auto& p = fast_copy<kCall>(params);
  __builtin_assume(threadIdx.x < kBlock);
  constexpr int kPerThread = (kElements * 8 + kBlock - 1) / kBlock;
  __shared__ Prepared<kElements> prepared;
  __shared__ Products sums[kTokenThreads / 32];
  const Tokens& x = p.tokens;
  const Place at(p.blocks);
  const int v0 = static_cast<int>(at.tile) * kColumns + first_row<kRows>();
  // How many of the thread's columns exist.
  const int columns = kCall.fast ? kRows : min(max(static_cast<int>(p.V) - v0, 0), kRows);
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

  // ---- addresses and hints, while the kernel before still runs ----

  // The loads of the first token's inputs are issued before the wait for the slot.
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
  const bool front = !kCall.fast && present(p.front.conv.x);
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
    if ((kCall.fast || !front) && at.is_among(p.blocks.hints.blocks)) {
      // With many small blocks, one block of a head gives the hints for all.
      if (kBlock > kFewThreads || at.tile == 0) {
        keys.expect(x);
        if (threadIdx.x == 0) prefetch(from_v);
      }
      expect_columns<kCall>(p, at);
    }
  }

  // ---- requests: the slot, the first token, the state ----

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
  if constexpr (!kCall.fast) find_padding(s, p.slots, p.snapshot_slots.row(at.n));
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);

  float S[kRows][kElements] = {};
  const auto load = [&](const TypedView& from, int64_t row, int64_t offset) {
    const auto at_v = static_cast<unsigned>(v0);
    with_columns<kCall>(p, from, static_cast<unsigned>(row), at.hv, at_v, [&](auto& rows) {
      rows.first += offset;
      load_rows(rows, from.dtype, columns, x.K, S);
    });
  };
  const auto store = [&](const TypedView& to, int64_t row, int64_t offset) {
    const auto at_v = static_cast<unsigned>(v0);
    with_columns<kCall>(p, to, static_cast<unsigned>(row), at.hv, at_v, [&](auto& rows) {
      rows.first += offset;
      store_rows(rows, to.dtype, columns, x.K, S);
    });
  };
  const auto sequence = [&] { return p.snapshot_slots.data ? 0 : at.n * p.sequence; };  // bytes to its snapshots
  if (kCall.fast || !p.accepted.data) {
    if (s.initial) load(p.h0, s.slot, 0);
  } else {
    const int64_t row = p.snapshot_rows_of(at.n).start_row(p.accepted[at.n]);
    const bool by_slot = p.snapshot_slots.data;
    if (row >= 0 && row < p.start_rows) load(by_slot ? p.h0 : p.snapshots, row, sequence());
  }
  let_next_start();

  // ---- tokens, one after another ----

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
    if constexpr (!kCall.fast) {
      const int64_t row = p.snapshots.data ? p.snapshot_rows_of(at.n).row(t) : -1;
      if (row >= 0 && row < p.snapshot_rows) store(p.snapshots, row, sequence());
    }
  }
  if (kCall.fast || p.hT.data) store(p.hT, s.slot, 0);
}

DecodePlan plan_of(const DecodeProblem& p, const Params& x) {
  const bool fast = on_fast_path(p, x);
  const DecodeCall call{p.N * p.HV,
                        p.K,
                        p.V,
                        fast ? FastPath::kPlain : FastPath::kNone,
                        p.args.states.h0.dtype == KDA_BF16,
                        p.args.in.state_layout == KDA_STATE_K_FIRST};
  return decode_plan(call, multiprocessors(p.args.exec.device_id));
}

template <Traits kCall>
void launch_kernel(const DecodeProblem& p, Params x, const DecodePlan& plan) {
  const int64_t tiles = divide_up(p.V, kCall.columns());
  const Hints hints =
      hints_of(p, 1, p.args.states.h0.dtype, tiles, blocks_of_SM(kCall), plan.hinted, p.args.exec.device_id);
  x.blocks = Blocks(p, tiles, hints);
  launch<decode_kernel<TypeOf<kCall>>>(p.args.exec, Blocks::grid(p, tiles, 1), kCall.threads, 0, x);
}

void launch_direct(const DecodeProblem& p, const Params& x, const DecodePlan& plan) {
  if (plan.path == FastPath::kNone)
    return p.K > 128 ? launch_kernel<general(32, 1)>(p, x, plan) : launch_kernel<general(16, 2)>(p, x, plan);
  const bool many = plan.rows > 1;
  if (p.args.in.state_layout == KDA_STATE_K_FIRST)
    plan.rows == 4 ? launch_kernel<fast(Access::kColumns, KDA_F32, 4)>(p, x, plan)
                   : launch_kernel<fast(Access::kColumns, KDA_F32, 2)>(p, x, plan);
  else if (p.args.states.h0.dtype == KDA_BF16)
    many ? launch_kernel<fast(Access::kRows, KDA_BF16, 2)>(p, x, plan)
         : launch_kernel<fast(Access::kRows, KDA_BF16, 1)>(p, x, plan);
  else if (plan.warps == 2) launch_kernel<fast(Access::kRows, KDA_F32, 1, kFewThreads)>(p, x, plan);
  else
    many ? launch_kernel<fast(Access::kRows, KDA_F32, 2)>(p, x, plan)
         : launch_kernel<fast(Access::kRows, KDA_F32, 1)>(p, x, plan);
}

// ---- one head a block ----

template <class T>
__global__ void __launch_bounds__(kThreads, 4) sweep_kernel(const __grid_constant__ Params p) {
  __builtin_assume(threadIdx.x < kThreads);
  constexpr int kElements = kWideK / kRowLanes, kRows = 2, kStep = kTile<kRows>;
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

  // ---- requests: the token, before the slot is known ----

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

  // ---- the sweep: columns in registers, while the next are on their way ----

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
          from.template load<T>(static_cast<int>(v) + row, x.K, S[row]);
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
        if (p.hT.data) to.template store<T>(static_cast<int>(v) + row, x.K, S[row]);
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

template <class T>
void launch_sweep(const DecodeProblem& p) {
  launch<sweep_kernel<T>>(p.args.exec, Blocks::grid(p, 1, 1), kThreads, 0, Params(p));
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
std::string decode_form(const DecodeProblem& p) { return text(plan_of(p, Params(p))); }

void decode(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Params x(p);
  launch_direct(p, x, plan_of(p, x));
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
  return on_fast_path(p, Params(p)) ? "is slower than the fast path" : nullptr;
}

void decode_sweep(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const kda_states& states = p.args.states;
  const bool bf16 = (present(states.h0) ? states.h0 : states.hT).dtype == KDA_BF16;
  bf16 ? launch_sweep<__nv_bfloat16>(p) : launch_sweep<float>(p);
}

}  // namespace kda::cuda
