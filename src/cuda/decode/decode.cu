// `cuda_decode`: the token recurrence (recurrence.h) over a state pool, for sm_80 and newer: any K and V, both layouts,
// any number of tokens. Large calls off the fast path are faster in sweep.cu.
//
// Bytes: a call reads the state once and writes it once, 128 KiB a head at K = V = 128 in f32; everything else is
// about 1 KB a token. A block takes some value columns of a head, eight lanes a column. It activates q, k and the
// gate, a thread a channel, while its part of the state is on its way.
//
// States go straight to registers, kRows columns a thread, with all loads in flight before the first wait. This is the
// shortest way for small calls. A lane of a column has the same channels in both layouts, so the bits are the same.
//
// Columns are independent, and every sum has one order, in sweep.cu as well: the bits of a request depend on nothing
// else in the call, and T tokens have the bits of T calls of one.
//
// A convolution in front is a launch of its own: front.h. Calls on the fast path that keep snapshots have a kernel of
// their own: snapshots.cu.
#include <type_traits>

#include "cuda/decode/declarations.h"
#include "cuda/decode/front.h"
#include "cuda/decode/params.h"
#include "cuda/decode/recurrence.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads;
constexpr int kFewThreads = kThreads / 2;  // of a block, in large calls

// What a kernel is compiled for. On the plain fast path (`fast`, see fast_path_of()), states have dtype `state`.
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
__device__ decltype(auto) fast_copy(const DecodeParams& p) {
  if constexpr (kCall.fast) return p.fast_copy(FastPath::kPlain, kCall.state);
  else return (p);
}

// Calls act() with kCall.rows columns of a state from v on, as they are accessed.
template <Traits kCall, class Act>
__device__ void with_columns(const DecodeParams& p, const TypedView& state, unsigned slot, unsigned hv, unsigned v,
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
__device__ void expect_columns(const DecodeParams& p, const Place& at) {
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
    decode_kernel(const __grid_constant__ DecodeParams params) {
  constexpr Traits kCall = Call::kValue;
  constexpr int kElements = kCall.elements, kRows = kCall.rows, kBlock = kCall.threads, kColumns = kCall.columns();
  const auto& p = fast_copy<kCall>(params);
  __builtin_assume(threadIdx.x < kBlock);
  constexpr int kPerThread = (kElements * 8 + kBlock - 1) / kBlock, kParts = kBlock == kFewThreads ? 2 : 1;
  static_assert(kParts == 1 || kPerThread == 2);
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
  if (!p.varlen && at.n < p.N) {
    locate(at.n, 0);
    if (at.is_among(p.blocks.hints.blocks)) {
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
  if (s.length > 0) fetch();
  find_states(s, p.slots, p.has_initial, slot);
  if constexpr (!kCall.fast) find_padding(s, p.slots, p.snapshot_slots.row(at.n));
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);

  float S[kRows][kElements] = {};
  const auto with_rows = [&](const TypedView& states, int64_t row, int64_t offset, const auto& act) {
    with_columns<kCall>(p, states, static_cast<unsigned>(row), at.hv, static_cast<unsigned>(v0),
                        [&](auto& rows) { rows.first += offset, act(rows); });
  };
  const auto load = [&](const TypedView& from, int64_t row, int64_t offset) {
    with_rows(from, row, offset, [&](auto& rows) { load_rows(rows, from.dtype, columns, x.K, S); });
  };
  const auto store = [&](const TypedView& to, int64_t row, int64_t offset) {
    with_rows(to, row, offset, [&](auto& rows) { store_rows(rows, to.dtype, columns, x.K, S); });
  };
  if (kCall.fast || !p.accepted.data) {
    if (s.initial) load(p.h0, s.slot, 0);
  } else if (const int64_t row = p.start_row(at.n); row >= 0) {
    load(p.snapshot_slots.data ? p.h0 : p.snapshots, row, p.first_snapshot(at.n));
  }
  let_next_start();

  // ---- tokens, one after another ----

  for (unsigned t = 0; t < s.length; ++t) {
    // After its barrier, the last token's keys are no longer read, either.
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
      if (row >= 0 && row < p.snapshot_rows) store(p.snapshots, row, p.first_snapshot(at.n));
    }
    if (t + 1 < s.length) locate(b, t0 + t + 1), fetch();
  }
  if constexpr (kCall.fast) {
    store(p.hT, s.slot, 0);
  } else if (p.hT.data) {
    const int64_t row = final_row(p.out_state_indices, p.slots.first_valid, p.final_rows, at.n, s.slot);
    if (row >= 0) store(p.hT, row, 0);
  }
}

DecodePlan plan_of(const DecodeProblem& p, const DecodeParams& x) {
  const DecodeCall call{p.N * p.HV,
                        p.K,
                        p.V,
                        fast_path_of(p, x),
                        p.args.states.h0.dtype == KDA_BF16,
                        p.args.in.state_layout == KDA_STATE_K_FIRST};
  return decode_plan(call, multiprocessors(p.args.exec.device_id));
}

template <Traits kCall>
void launch_kernel(const DecodeProblem& p, DecodeParams x, const DecodePlan& plan) {
  const int64_t tiles = divide_up(p.V, kCall.columns());
  const Hints hints =
      hints_of(p, 1, p.args.states.h0.dtype, tiles, blocks_of_SM(kCall), plan.hinted, p.args.exec.device_id);
  x.blocks = Blocks(p, tiles, hints);
  launch<decode_kernel<TypeOf<kCall>>>(p.args.exec, Blocks::grid(p, tiles, 1), kCall.threads, 0, x);
}

void launch_direct(const DecodeProblem& p, const DecodeParams& x, const DecodePlan& plan) {
  if (plan.path == FastPath::kNone)
    return p.K > 128 ? launch_kernel<general(32, 1)>(p, x, plan) : launch_kernel<general(16, 2)>(p, x, plan);
  if (plan.path == FastPath::kSnapshots) return decode_snapshots(p, x, plan);
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

}  // namespace

const char* decode_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (const char* reason = front_why_not(p)) return reason;
  if (const char* reason = Tokens::why_not(a.in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT})) return reason;
  if (const char* reason = view_why_not({&a.snapshots}, present(a.snapshot_slots) ? 0 : 1)) return reason;
  return grid_why_not(p, divide_up(p.V, 8), 1);
}
std::string decode_form(const DecodeProblem& given) {
  return behind_front(given, [](const DecodeProblem& p) { return text(plan_of(p, DecodeParams(p))); });
}
uint64_t decode_workspace(const DecodeProblem& p) { return front_bytes(p); }

void decode(const DecodeProblem& given) {
  if ((given.N + given.varlen) * given.HV == 0) return;
  const DeviceGuard device(given.args.exec.device_id);
  launch_front(given);
  behind_front(given, [](const DecodeProblem& p) {
    const DecodeParams x(p);
    launch_direct(p, x, plan_of(p, x));
  });
}

}  // namespace kda::cuda
