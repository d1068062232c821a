// Decode: the token recurrence over a state pool, for sm_80 and newer, any K and V, both layouts.
//
// Bytes: the state is read once and written once a call, 128 KiB a head at K = V = 128 in f32; everything else is about
// 1 KB a token. A block takes some value columns of a head: eight lanes a column, kRows columns a thread, their numbers in
// registers, all loads of them in flight before anything is waited for. Meanwhile a warp a token activates q, k and the gate
// for the block. With the decay folded into the vectors, one pass gives both products:
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
constexpr int kGroup = kThreads / 32;  // tokens prepared at once
template <int kRows>
constexpr int kTile = kThreads / kRowLanes* kRows;  // value columns of a block

template <int kElements>
struct alignas(16) Prepared {
  float alpha[kElements * 8], k[kElements * 8], alpha_k[kElements * 8], alpha_q[kElements * 8];
  float beta, qk;
};

template <bool kWide, int kElements, int kRows>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeProblem p, unsigned tiles) {
  constexpr int kPerLane = kElements / 4;  // of a token's channels in a warp
  __shared__ Prepared<kElements> tokens[kGroup];
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

  // Asked for before anybody waits for the slot.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Sequence all = sequence_at(p, a.in, n);
  TokenKeys<kPerLane> keys;
  const auto fetch = [&](int64_t first) {
    if (first + warp < all.length) keys.fetch(p, a.in, all.b, all.t0 + first + warp, hv);
  };
  fetch(0);
  const Sequence s = sequence_at(p, n);
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);

  const Start start = start_of(p, s);
  float S[kRows][kElements] = {};
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (start.initial && row < columns)
      load_row<kWide>(Row(start.states, a.in.state_layout, start.row, hv, v0 + row), p.K, S[row]);

  const Snapshots snapshots = snapshots_of(p, n);
  for (int64_t first = 0; first < s.length; first += kGroup) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kGroup), s.length - first));
    if (first) {
      fetch(first);
      __syncthreads();  // the last group's keys are no longer read
    }
    if (warp < count) {
      keys.activate(p, a.in);
      Prepared<kElements>& to = tokens[warp];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int c = lane + 32 * i;
        to.alpha[c] = keys.alpha[i], to.k[c] = keys.k[i];
        to.alpha_k[c] = keys.alpha[i] * keys.k[i], to.alpha_q[c] = keys.alpha[i] * keys.q[i];
      }
      if (lane == 0) to.beta = keys.beta, to.qk = keys.qk;
    }
    unsigned values[kRows];
    const auto fetch_values = [&](int i) {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        values[row] = row < columns ? load_raw(a.in.v, offset(a.in.v, s.b, s.t0 + first + i, hv) + v0 + row) : 0;
    };
    fetch_values(0);
    __syncthreads();  // this group's keys are in shared memory
    for (int i = 0; i < count; ++i) {
      const Prepared<kElements>& x = tokens[i];
      float u[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float read = sum_over<kRowLanes>(dot(S[row], x.alpha_k)),
                    out = sum_over<kRowLanes>(dot(S[row], x.alpha_q));
        u[row] = x.beta * (value_of(a.in.v.dtype, values[row]) - read);
        store_output(s.b, s.t0 + first + i, row, fmaf(x.qk, u[row], out));
      }
      if (i + 1 < count) fetch_values(i + 1);
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
      if (!present(snapshots.states)) continue;
      const int64_t slot = snapshots.row(first + i);
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (slot >= 0 && slot < snapshots.states.shape[0] && row < columns)
          store_row<kWide>(Row(snapshots.states, a.in.state_layout, slot, hv, v0 + row), p.K, S[row]);
    }
  }
  if (!present(a.states.hT)) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (row < columns) store_row<kWide>(Row(a.states.hT, a.in.state_layout, s.slot, hv, v0 + row), p.K, S[row]);
}

template <bool kWide, int kElements, int kRows>
void launch(const DecodeProblem& p) {
  const auto tiles = static_cast<unsigned>((p.V + kTile<kRows> - 1) / kTile<kRows>);
  const auto blocks = static_cast<unsigned>((p.N + p.varlen) * p.HV * tiles);
  decode_kernel<kWide, kElements, kRows><<<blocks, kThreads, 0, stream_of(p.args.exec)>>>(p, tiles);
  KDA_CUDA(cudaGetLastError());
}

// Many columns a thread share the reading of keys; few of them spread a small call over all SMs.
template <bool kWide>
void launch(const DecodeProblem& p, bool few) {
  if (p.K <= 64) few ? launch<kWide, 8, 1>(p) : launch<kWide, 8, 4>(p);
  else if (p.K <= 128) few ? launch<kWide, 16, 1>(p) : launch<kWide, 16, 4>(p);
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
