// Decode: the token recurrence over a state pool, for sm_80 and newer, any K and V, both layouts.
//
// Bytes: the state is read once and written once a call, 128 KiB a head at K = V = 128 in f32; everything else is about
// 1 KB a token. A block takes some value columns of a head: eight lanes a column, kRows columns a thread, their numbers in
// registers, all loads of them in flight before anything is waited for. Meanwhile the block activates q, k and the gate, a
// thread a channel. With the decay folded into the vectors, one pass gives both products:
//   read = S^T (alpha k)    out = S^T (alpha q)    u = beta (v - read)    o = out + (k . q) u    S <- alpha S + k u^T
// Columns are independent and every sum has one order, whatever kRows: the bits of a request depend on nothing else in the
// call, and T tokens are T calls of one.
//
// Grid: (tile of columns, head, sequence) flattened, and after the last sequence the rows that belong to none.
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128;
template <int kRows>
constexpr int kTile = kThreads / kRowLanes* kRows;  // value columns of a block

template <int kElements>
struct alignas(16) Prepared {
  float alpha[kElements * 8], k[kElements * 8], alpha_k[kElements * 8], alpha_q[kElements * 8];
};

// kPlain: neither snapshots nor a start from one.
template <bool kWide, bool kPlain, int kElements, int kRows>
__global__ void __launch_bounds__(kThreads, kElements* kRows <= 32 ? 5 : 1)
    decode_kernel(const __grid_constant__ DecodeProblem p, unsigned tiles) {
  constexpr int kPerThread = (kElements * 8 + kThreads - 1) / kThreads;
  __shared__ Prepared<kElements> x;
  __shared__ float sums[kThreads / 32][3];
  const kda_decode_args& a = p.args;
  const auto heads = static_cast<unsigned>(p.HV);
  const unsigned tile = blockIdx.x % tiles, hv = blockIdx.x / tiles % heads, n = blockIdx.x / tiles / heads;
  const int v0 = static_cast<int>(tile) * kTile<kRows> + first_row<kRows>();
  const int columns = min(max(static_cast<int>(p.V) - v0, 0), kRows);  // that are there, of the thread's
  const auto store_output = [&](int64_t b, int64_t t, int row, float x) {
    if (row < columns && threadIdx.x % kRowLanes == 0) store_element(a.o, offset(a.o, b, t, hv) + v0 + row, x);
  };
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    for (; t < end; ++t)
      for (int row = 0; row < kRows; ++row) store_output(b, t, row, 0);
  };
  if (n == p.N) return zero_outputs(0, end_of_sequences(p, a.in), p.T);

  // The first token's inputs are asked for before anybody waits for the slot.
  const Sequence all = sequence_at(p, a.in, n);
  BlockKeys<kPerThread, kThreads> keys;
  unsigned values[kRows];
  const auto fetch = [&](int64_t t) {
    keys.fetch(p, a.in, all.b, all.t0 + t, hv);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      values[row] = row < columns ? load_raw(a.in.v, offset(a.in.v, all.b, all.t0 + t, hv) + v0 + row) : 0;
  };
  if (all.length > 0) fetch(0);
  const Sequence s = sequence_at(p, n);
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);

  float S[kRows][kElements] = {};
  const auto load_state = [&](const kda_tensor& t, int64_t slot, bool initial) {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (initial && row < columns) load_row<kWide>(Row(t, a.in.state_layout, slot, hv, v0 + row), p.K, S[row]);
  };
  const auto store_state = [&](const kda_tensor& t, int64_t slot) {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (row < columns) store_row<kWide>(Row(t, a.in.state_layout, slot, hv, v0 + row), p.K, S[row]);
  };
  if constexpr (kPlain) {
    load_state(a.states.h0, s.slot, s.initial);
  } else {
    const Start start = start_of(p, s);
    load_state(start.states, start.row, start.initial);
  }

  for (int64_t t = 0; t < s.length; ++t) {
    if (t) fetch(t);
    keys.activate(p, a.in, sums);  // its barrier: the last token's keys are no longer read, either
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = keys.channel_of(i);
      if (c >= kElements * 8) continue;
      x.alpha[c] = keys.alpha[i], x.k[c] = keys.k[i];
      x.alpha_k[c] = keys.alpha[i] * keys.k[i], x.alpha_q[c] = keys.alpha[i] * keys.q[i];
    }
    __syncthreads();  // this token's keys are in shared memory, and the sums are read
    float u[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float read = sum_over<kRowLanes>(dot(S[row], x.alpha_k)), out = sum_over<kRowLanes>(dot(S[row], x.alpha_q));
      u[row] = keys.beta * (value_of(a.in.v.dtype, values[row]) - read);
      store_output(s.b, s.t0 + t, row, fmaf(keys.qk, u[row], out));
    }
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const float4 alpha = *reinterpret_cast<const float4*>(x.alpha + channel(e));
      const float4 k = *reinterpret_cast<const float4*>(x.k + channel(e));
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        float* four = S[row] + e;
        four[0] = fmaf(u[row], k.x, four[0] * alpha.x), four[1] = fmaf(u[row], k.y, four[1] * alpha.y);
        four[2] = fmaf(u[row], k.z, four[2] * alpha.z), four[3] = fmaf(u[row], k.w, four[3] * alpha.w);
      }
    }
    if constexpr (!kPlain) {
      const Snapshots snapshots = snapshots_of(p, n);
      const int64_t slot = present(snapshots.states) ? snapshots.row(t) : -1;
      if (slot >= 0 && slot < snapshots.states.shape[0]) store_state(snapshots.states, slot);
    }
  }
  if (present(a.states.hT)) store_state(a.states.hT, s.slot);
}

template <bool kWide, int kElements, int kRows>
void launch(const DecodeProblem& p) {
  const auto tiles = static_cast<unsigned>((p.V + kTile<kRows> - 1) / kTile<kRows>);
  const auto blocks = static_cast<unsigned>((p.N + p.varlen) * p.HV * tiles);
  const bool plain = !present(p.args.snapshots) && !present(p.args.accepted);
  const auto kernel =
      plain ? decode_kernel<kWide, true, kElements, kRows> : decode_kernel<kWide, false, kElements, kRows>;
  kernel<<<blocks, kThreads, 0, stream_of(p.args.exec)>>>(p, tiles);
  KDA_CUDA(cudaGetLastError());
}

// Many columns a thread share the reading of keys; few of them spread a small call over all SMs.
template <bool kWide>
void launch(const DecodeProblem& p, bool few) {
  if (p.K <= 64) few ? launch<kWide, 8, 1>(p) : launch<kWide, 8, 4>(p);
  else if (p.K <= 128) few ? launch<kWide, 16, 1>(p) : launch<kWide, 16, 2>(p);
  else few ? launch<kWide, 32, 1>(p) : launch<kWide, 32, 2>(p);
}

}  // namespace

const char* decode_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.conv.x)) return "has no fused convolution";
  return (p.N + 1) * p.HV * ((p.V + 15) / 16) < (int64_t{1} << 31) ? nullptr
                                                                   : "takes at most 2^31 blocks of 16 value columns";
}

void decode(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const kda_decode_args& a = p.args;
  const bool few = p.N * p.HV * p.V < int64_t{128} * multiprocessors(a.exec.device_id);
  if (wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.snapshots})) launch<true>(p, few);
  else launch<false>(p, few);
}

}  // namespace kda::cuda
