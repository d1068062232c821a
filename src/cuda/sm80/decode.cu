// Decode: the token recurrence over a state pool, for sm_80 and newer, in two shapes.
//
// Bytes: the state is read once and written once a call, 128 KiB a head at K = V = 128 in f32; everything else is about
// 1 KB a token. A block takes some value columns of a head, eight lanes a column, and activates q, k and the gate, a thread
// a channel, while its part of the state is on its way. With the decay folded into the vectors, one pass gives both
// products:
//   read = S^T (alpha k)    out = S^T (alpha q)    u = beta (v - read)    o = out + (k . q) u    S <- alpha S + k u^T
//
// `cuda_decode` (any K and V, both layouts, any T): states go straight to registers, kRows columns a thread, all loads in
// flight before anything is waited for. The shortest way for small calls.
// `cuda_decode_staged` (K = 64 or 128, V-first, no snapshots): states come through shared memory, asynchronously. Blocks need few
// registers and hold 32 KiB in flight each, as many as fit an SM: what it takes to keep the memory busy in large calls.
//
// Columns are independent and every sum has one order in both: the bits of a request depend on nothing else in the call,
// and T tokens are T calls of one.
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128;
template <int kRows>
constexpr int kTile = kThreads / kRowLanes* kRows;  // value columns of a block

template <int kElements>
struct alignas(16) Prepared {
  float alpha[kElements * 8], k[kElements * 8], alpha_k[kElements * 8], alpha_q[kElements * 8];

  template <class Keys, int kPerThread>
  __device__ void store(const Keys& keys) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = keys.channel(i);
      if (c >= kElements * 8) continue;
      alpha[c] = keys.alpha[i], k[c] = keys.k[i];
      alpha_k[c] = keys.alpha[i] * keys.k[i], alpha_q[c] = keys.alpha[i] * keys.q[i];
    }
  }
};

// One token in kRows columns of a thread: returns o, in all lanes of a column.
template <int kElements, int kRows>
__device__ void apply_token(const Prepared<kElements>& x, float beta, float qk, const float (&v)[kRows],
                            float (&S)[kRows][kElements], float (&o)[kRows]) {
  float u[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float read = sum_over<kRowLanes>(dot(S[row], x.alpha_k)), out = sum_over<kRowLanes>(dot(S[row], x.alpha_q));
    u[row] = beta * (v[row] - read);
    o[row] = fmaf(qk, u[row], out);
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
}

// kPlain: neither snapshots nor a start from one.
template <bool kWide, bool kPlain, int kElements, int kRows>
__global__ void __launch_bounds__(kThreads, kElements* kRows > 32 ? 1 : kRows == 4 || kElements == 32 ? 4 : 5)
    decode_kernel(const __grid_constant__ DecodeProblem p, const Blocks blocks) {
  constexpr int kPerThread = (kElements * 8 + kThreads - 1) / kThreads;
  __shared__ Prepared<kElements> x;
  __shared__ Products sums[kThreads / 32];
  const kda_decode_args& a = p.args;
  const Place at(blocks);
  const unsigned hv = at.hv, n = at.n;
  const int v0 = static_cast<int>(at.tile) * kTile<kRows> + first_row<kRows>();
  const int columns = min(max(static_cast<int>(p.V) - v0, 0), kRows);  // that are there, of the thread's
  const auto store_output = [&](int64_t b, int64_t t, int row, float x) {
    if (row < columns && threadIdx.x % kRowLanes == 0) store_element(a.o, offset(a.o, b, t, hv) + v0 + row, x);
  };
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    for (; t < end; ++t)
      for (int row = 0; row < kRows; ++row) store_output(b, t, row, 0);
  };
  // All addresses that need nothing from memory are ready before the wait for the kernel before, and the first token's
  // inputs are asked for before the wait for the slot.
  TokenKeys<kPerThread, kThreads> keys(static_cast<int>(threadIdx.x));
  const char* from_v;
  const auto locate = [&](int64_t b, int64_t t) {
    keys.locate(a.in, b, t, hv, at.h);
    from_v = address_of(a.in.v, offset(a.in.v, b, t, hv) + v0);
  };
  unsigned values[kRows];
  const auto fetch = [&] {
    keys.fetch(p, a.in);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      values[row] = row < columns ? load_raw(from_v + row * (a.in.v.dtype == KDA_F32 ? 4 : 2), a.in.v.dtype) : 0;
  };
  if (!p.varlen) locate(n, 0);
  wait_for_stream();
  if (at.layer) return;  // the grid's last rows
  if (n == p.N) return zero_outputs(0, end_of_sequences(p, a.in), p.T);
  const int64_t slot = slot_of(a.states.state_indices, n);
  Sequence s = sequence_at(p, a.in, n);
  if (p.varlen) locate(0, s.t0);
  if (s.length > 0) fetch();
  find_states(p, s, slot);
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
    if (t) locate(s.b, s.t0 + t), fetch();
    // Its barrier: the last token's keys are no longer read, either.
    keys.activate(p, a.in, [&](const Products& mine) { return block_sums<kThreads>(mine, sums); });
    x.template store<decltype(keys), kPerThread>(keys);
    __syncthreads();  // this token's keys are in shared memory, and the sums are read
    float v[kRows], o[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) v[row] = value_of(a.in.v.dtype, values[row]);
    apply_token(x, keys.beta, keys.qk, v, S, o);
#pragma unroll
    for (int row = 0; row < kRows; ++row) store_output(s.b, s.t0 + t, row, o[row]);
    if constexpr (!kPlain) {
      const Snapshots snapshots = snapshots_of(p, n);
      const int64_t slot = present(snapshots.states) ? snapshots.row(t) : -1;
      if (slot >= 0 && slot < snapshots.states.shape[0]) store_state(snapshots.states, slot);
    }
  }
  if (present(a.states.hT)) store_state(a.states.hT, s.slot);
}

template <bool kWide, int kElements, int kRows>
void launch_direct(const DecodeProblem& p) {
  const int64_t tiles = (p.V + kTile<kRows> - 1) / kTile<kRows>;
  const dim3 grid = Blocks::grid(p, tiles, 1);
  const Blocks blocks(p, tiles);
  if (!present(p.args.snapshots) && !present(p.args.accepted))
    launch<decode_kernel<kWide, true, kElements, kRows>>(p.args.exec, grid, kThreads, 0, p, blocks);
  else launch<decode_kernel<kWide, false, kElements, kRows>>(p.args.exec, grid, kThreads, 0, p, blocks);
}

// Many columns a thread share the reading of keys; few of them spread a small call over all SMs.
template <bool kWide>
void launch_direct(const DecodeProblem& p, bool few) {
  if (p.K <= 64) few ? launch_direct<kWide, 8, 1>(p) : launch_direct<kWide, 8, 4>(p);
  else if (p.K <= 128) few ? launch_direct<kWide, 16, 1>(p) : launch_direct<kWide, 16, 2>(p);
  else few ? launch_direct<kWide, 32, 1>(p) : launch_direct<kWide, 32, 2>(p);
}

// ---- through shared memory ----

constexpr int kColumns = 64;  // of a block

template <class T, int kK>
__global__ void __launch_bounds__(kThreads, 4)
    staged_kernel(const __grid_constant__ DecodeProblem p, const Blocks blocks) {
  constexpr int kElements = kK / kRowLanes, kRows = 2, kPass = kTile<kRows>;
  extern __shared__ float4 dynamic[];
  const Tile<T, kK> tile(dynamic);
  __shared__ Prepared<kElements> x;
  __shared__ Products sums[kThreads / 32];
  __shared__ float v[kColumns];
  const kda_decode_args& a = p.args;
  const Place at(blocks);
  const unsigned hv = at.hv, n = at.n;
  const int64_t v0 = static_cast<int64_t>(at.tile) * kColumns;
  const auto output = [&](int64_t b, int64_t t) { return offset(a.o, b, t, hv) + v0; };
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    for (; t < end; ++t)
      if (threadIdx.x < kColumns) store_element(a.o, output(b, t) + threadIdx.x, 0);
  };
  TokenKeys<1, kThreads> keys(static_cast<int>(threadIdx.x));
  const char* from_v;
  const auto locate = [&](int64_t b, int64_t t) {
    keys.locate(a.in, b, t, hv, at.h);
    from_v = address_of(a.in.v, offset(a.in.v, b, t, hv) + v0 + threadIdx.x);
  };
  unsigned value = 0;
  const auto fetch = [&] {
    keys.fetch(p, a.in);
    if (threadIdx.x < kColumns) value = load_raw(from_v, a.in.v.dtype);
  };
  if (!p.varlen) locate(n, 0);
  wait_for_stream();
  if (at.layer) return;  // the grid's last rows
  if (n == p.N) return zero_outputs(0, end_of_sequences(p, a.in), p.T);
  const int64_t slot = slot_of(a.states.state_indices, n);
  Sequence s = sequence_at(p, a.in, n);
  if (p.varlen) locate(0, s.t0);
  if (s.length > 0) fetch();
  find_states(p, s, slot);
  if (!s.live) return zero_outputs(s.b, s.t0, s.t0 + s.length);
  const auto first = [&](const kda_tensor& t) {
    return s.slot * t.stride[0] + hv * t.stride[1] + v0 * t.stride[2];
  };
  const kda_tensor& h0 = a.states.h0;
  const T* from = s.initial ? static_cast<const T*>(h0.data) + first(h0) : nullptr;
  tile.template ask<kThreads>(from, h0.stride[2], kColumns, s.initial);
  for (int64_t t = 0;; ++t) {
    if (t) {
      __syncthreads();  // the last token is no longer read
      locate(s.b, s.t0 + t), fetch();
    }
    if (s.length > 0) {
      keys.activate(p, a.in, [&](const Products& mine) { return block_sums<kThreads>(mine, sums); });
      x.template store<decltype(keys), 1>(keys);
      if (threadIdx.x < kColumns) v[threadIdx.x] = value_of(a.in.v.dtype, value);
    }
    tile.wait();
    __syncthreads();  // the token's keys, its values and the state are in shared memory
    const bool last = t + 1 >= s.length;
#pragma unroll 1
    for (int pass = 0; pass < kColumns; pass += kPass) {
      const int row0 = pass + first_row<kRows>();
      float S[kRows][kElements], mine[kRows], o[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        mine[row] = v[row0 + row];
#pragma unroll
        for (int e = 0; e < kElements; e += 4) {
          const float4 four = tile.four(row0 + row, channel(e));
          S[row][e] = four.x, S[row][e + 1] = four.y, S[row][e + 2] = four.z, S[row][e + 3] = four.w;
        }
      }
      if (s.length > 0) apply_token(x, keys.beta, keys.qk, mine, S, o);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int r = row0 + row;
        if (s.length > 0 && threadIdx.x % kRowLanes == 0) store_element(a.o, output(s.b, s.t0 + t) + r, o[row]);
        if (last && present(a.states.hT))
          store_row<true>(Row(a.states.hT, KDA_STATE_V_FIRST, s.slot, hv, v0 + r), kK, S[row]);
        if (last) continue;
#pragma unroll
        for (int e = 0; e < kElements; e += 4)  // this thread's alone
          tile.set(r, channel(e), make_float4(S[row][e], S[row][e + 1], S[row][e + 2], S[row][e + 3]));
      }
    }
    if (last) break;
  }
}

template <class T, int kK>
void launch_staged(const DecodeProblem& p) {
  const int64_t tiles = p.V / kColumns;
  launch<staged_kernel<T, kK>>(p.args.exec, Blocks::grid(p, tiles, 1), kThreads, Tile<T, kK>::bytes(kColumns), p,
                               Blocks(p, tiles));
}

}  // namespace

const char* decode_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.conv.x)) return "has no fused convolution";
  return grid_why_not(p, (p.V + 15) / 16, 1);
}

void decode(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const kda_decode_args& a = p.args;
  const bool few = p.N * p.HV * p.V < int64_t{128} * multiprocessors(a.exec.device_id);
  if (wide_rows(p, a.in.state_layout, {&a.states.h0, &a.states.hT, &a.snapshots})) launch_direct<true>(p, few);
  else launch_direct<false>(p, few);
}

const char* decode_staged_why_not(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  if (const char* reason = decode_why_not(p)) return reason;
  if (present(a.snapshots) || present(a.accepted)) return "has no snapshots";
  return tile_why_not(p, a.in.state_layout, {&a.states.h0, &a.states.hT}, kColumns);
}

const char* decode_staged_too_small(const DecodeProblem& p) {
  return p.N * p.HV * p.V < int64_t{256} * multiprocessors(p.args.exec.device_id)
             ? "has too few states for a GPU of this size"
             : nullptr;
}

void decode_staged(const DecodeProblem& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const bool bf16 = p.args.states.h0.dtype == KDA_BF16;
  if (p.K == 64) bf16 ? launch_staged<__nv_bfloat16, 64>(p) : launch_staged<float, 64>(p);
  else bf16 ? launch_staged<__nv_bfloat16, 128>(p) : launch_staged<float, 128>(p);
}

}  // namespace kda::cuda
