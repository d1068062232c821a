// Decode: the token recurrence over a state pool, for sm_80 and newer, any K and V, both layouts.
//
// Bytes: the state is read once and written once a call, 128 KiB a head at K = V = 128 in f32; everything else is about
// 1 KB a token. A block takes 32 value columns of a head: a quad of lanes a column, its K numbers in registers, all loads
// of them in flight before anything is waited for. Meanwhile a warp a token activates q, k and the gate for the block. With
// the decay folded into the vectors, one pass gives both products:
//   read = S^T (alpha k)    out = S^T (alpha q)    u = beta (v - read)    o = out + (k . q) u    S <- alpha S + k u^T
// Columns are independent and every sum has one order: the bits of a request depend on nothing else in the call, and T
// tokens are T calls of one.
//
// Grid: (tile of columns, head, sequence) flattened, and after the last sequence the rows that belong to none.
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128, kRows = kThreads / 4;  // value columns of a block
constexpr int kGroup = kThreads / 32;                // tokens prepared at once

template <int kElements>
struct alignas(16) Prepared {
  float alpha[kElements * 4], k[kElements * 4], alpha_k[kElements * 4], alpha_q[kElements * 4];
  float beta, qk;
};

template <bool kWide, int kElements>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeProblem p, int tiles) {
  __shared__ Prepared<kElements> tokens[kGroup];
  const kda_decode_args& a = p.args;
  const int64_t n = blockIdx.x / (tiles * p.HV), hv = blockIdx.x / tiles % p.HV;
  const int64_t v = static_cast<int64_t>(blockIdx.x % tiles) * kRows + threadIdx.x / 4;
  const bool column = v < p.V, writes = column && threadIdx.x % 4 == 0;
  const auto store_output = [&](int64_t b, int64_t t, float x) {
    if (writes) store_element(a.o, offset(a.o, b, t, hv) + v, x);
  };
  if (n == p.N) {
    for (int64_t t = end_of_sequences(p, a.in); t < p.T; ++t) store_output(0, t, 0);
    return;
  }
  // Asked for before anybody waits for the slot.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Sequence tokens_of = sequence_at(p, a.in, n);
  TokenKeys<kElements / 8> keys;
  unsigned values[kGroup];
  const auto fetch = [&](int64_t first) {
    if (first + warp < tokens_of.length) keys.fetch(p, a.in, tokens_of.b, tokens_of.t0 + first + warp, hv);
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      values[i] = column && first + i < tokens_of.length
                      ? load_raw(a.in.v, offset(a.in.v, tokens_of.b, tokens_of.t0 + first + i, hv) + v)
                      : 0;
  };
  fetch(0);
  const Sequence s = sequence_at(p, n);
  if (!s.live) {
    for (int64_t t = 0; t < s.length; ++t) store_output(s.b, s.t0 + t, 0);
    return;
  }

  const Start start = start_of(p, s);
  float S[kElements] = {};
  if (start.initial && column) load_row<kWide>(Row(start.states, a.in.state_layout, start.row, hv, v), p.K, S);

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
      for (int i = 0; i < kElements / 8; ++i) {
        const int c = lane + 32 * i;
        to.alpha[c] = keys.alpha[i], to.k[c] = keys.k[i];
        to.alpha_k[c] = keys.alpha[i] * keys.k[i], to.alpha_q[c] = keys.alpha[i] * keys.q[i];
      }
      if (lane == 0) to.beta = keys.beta, to.qk = keys.qk;
    }
    __syncthreads();  // this group's keys are in shared memory
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= count) break;
      const Prepared<kElements>& x = tokens[i];
      float read = 0, out = 0;
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const float4 ak = *reinterpret_cast<const float4*>(x.alpha_k + channel<kElements>(e));
        const float4 aq = *reinterpret_cast<const float4*>(x.alpha_q + channel<kElements>(e));
        read = fmaf(S[e], ak.x, read), read = fmaf(S[e + 1], ak.y, read);
        read = fmaf(S[e + 2], ak.z, read), read = fmaf(S[e + 3], ak.w, read);
        out = fmaf(S[e], aq.x, out), out = fmaf(S[e + 1], aq.y, out);
        out = fmaf(S[e + 2], aq.z, out), out = fmaf(S[e + 3], aq.w, out);
      }
      const float u = x.beta * (value_of(a.in.v.dtype, values[i]) - sum_over<4>(read));
      store_output(s.b, s.t0 + first + i, fmaf(x.qk, u, sum_over<4>(out)));
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const float4 alpha = *reinterpret_cast<const float4*>(x.alpha + channel<kElements>(e));
        const float4 k = *reinterpret_cast<const float4*>(x.k + channel<kElements>(e));
        S[e] = fmaf(u, k.x, S[e] * alpha.x), S[e + 1] = fmaf(u, k.y, S[e + 1] * alpha.y);
        S[e + 2] = fmaf(u, k.z, S[e + 2] * alpha.z), S[e + 3] = fmaf(u, k.w, S[e + 3] * alpha.w);
      }
      if (!present(snapshots.states) || !column) continue;
      if (const int64_t row = snapshots.row(first + i); row >= 0 && row < snapshots.states.shape[0])
        store_row<kWide>(Row(snapshots.states, a.in.state_layout, row, hv, v), p.K, S);
    }
  }
  if (present(a.states.hT) && column) store_row<kWide>(Row(a.states.hT, a.in.state_layout, s.slot, hv, v), p.K, S);
}

template <bool kWide>
void launch(const DecodeProblem& p) {
  const int tiles = static_cast<int>((p.V + kRows - 1) / kRows);
  const auto blocks = static_cast<unsigned>((p.N + p.varlen) * p.HV * tiles);
  const cudaStream_t stream = stream_of(p.args.exec);
  if (p.K <= 64) decode_kernel<kWide, 16><<<blocks, kThreads, 0, stream>>>(p, tiles);
  else if (p.K <= 128) decode_kernel<kWide, 32><<<blocks, kThreads, 0, stream>>>(p, tiles);
  else decode_kernel<kWide, 64><<<blocks, kThreads, 0, stream>>>(p, tiles);
  KDA_CUDA(cudaGetLastError());
}

}  // namespace

const char* decode_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.conv.x)) return "has no fused convolution";
  const int64_t tiles = (p.V + kRows - 1) / kRows;
  return (p.N + 1) * p.HV * tiles < (int64_t{1} << 31) ? nullptr : "takes at most 2^31 blocks of 32 value columns";
}

void decode(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const kda_decode_args& a = p.args;
  if (wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.snapshots})) launch<true>(p);
  else launch<false>(p);
}

}  // namespace kda::cuda
