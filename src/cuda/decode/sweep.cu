// `cuda_decode_sweep` (K = 64 or 128, V-first, one token), for sm_80 and newer: a block has a whole head, prepares the
// token once, and works on some columns while the next are on their way. It is for large calls, except on the fast
// path, whose kernels (decode.cu) are faster. Columns are independent, and every sum has the order that it has there.
#include "cuda/decode/declarations.h"
#include "cuda/decode/front.h"
#include "cuda/decode/params.h"
#include "cuda/decode/recurrence.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = kTokenThreads;

template <class T>
__global__ void __launch_bounds__(kThreads, 4) sweep_kernel(const __grid_constant__ DecodeParams p) {
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
  launch<sweep_kernel<T>>(p.args.exec, Blocks::grid(p, 1, 1), kThreads, 0, DecodeParams(p));
}

}  // namespace

const char* decode_sweep_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  const kda_states& states = a.states;
  if (const char* reason = decode_why_not(p)) return reason;
  if (present(a.snapshots) || present(a.accepted)) return "has no snapshots";
  if (present(a.out_state_indices)) return "writes the slot that it reads";
  if ((p.K != 64 && p.K != 128) || p.V % 64 || !wide_rows(p, a.in.state_layout, {&states.h0, &states.hT}))
    return "takes V-first states of K = 64 or 128 and V a multiple of 64";
  if (present(states.h0) && present(states.hT) && states.h0.dtype != states.hT.dtype)
    return "takes states of one dtype";
  // Between tokens the state is in memory.
  if (p.varlen ? !present(states.hT) || states.hT.dtype != KDA_F32 : p.T > 1)
    return "takes one token a sequence (with cu_seqlens: a final state in float32)";
  return nullptr;
}

const char* decode_sweep_unsuited(const DecodeProblem& given) {
  if (given.N * given.HV < 4 * multiprocessors(given.args.exec.device_id))
    return "has too few heads for a GPU of this size";
  const FastPath path = behind_front(given, [](const DecodeProblem& p) { return fast_path_of(p, DecodeParams(p)); });
  return path != FastPath::kNone ? "is slower than the fast path" : nullptr;
}

void decode_sweep(const DecodeProblem& given) {
  if ((given.N + given.varlen) * given.HV == 0) return;
  const DeviceGuard device(given.args.exec.device_id);
  launch_front(given);
  const kda_states& states = given.args.states;
  const bool bf16 = (present(states.h0) ? states.h0 : states.hT).dtype == KDA_BF16;
  behind_front(given, [&](const DecodeProblem& p) { bf16 ? launch_sweep<__nv_bfloat16>(p) : launch_sweep<float>(p); });
}

}  // namespace kda::cuda
