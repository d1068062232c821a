// The output's norm and gate, forward and backward, for sm_80 and newer. The formulas are in norm.h.
//
// Bytes: forward reads x and gate and writes y, backward reads x, gate and dy and writes dx and dgate; the weight stays
// in registers or in L1. All kernels are bound by memory.
//
// Lanes: where V is 8 times a power of two, at most 256, and every row is wide (rows.h), a lane has eight numbers of a
// row in registers, and a warp 32 / (V / 8) rows side by side. Forward has kUnroll of these groups in flight, and goes
// over all rows with as many blocks as run at once; few rows have a warp each, on as many SMs as there are.
// Chunks: a warp has one row of any size and place, lane l the chunks l, l + 32, .. of eight numbers. It reads the row
// twice, in backward three times; all but the first time from L1 or L2.
// A row's sums have the same order in both, so its bits do not depend on which of them it gets.
//
// dw has two levels without atomics. A block of backward has a run of rows, whose length is a function of their number
// alone, and writes its sum to the workspace; sum_kernel adds the blocks in order.
#include <string>

#include "cuda/norm/declarations.h"
#include "cuda/norm/norm.h"
#include "cuda/norm/rows.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;  // of a block, at most
constexpr int kBlocksOfSM = 8;                     // that run at once
template <bool kBf16>
constexpr int kUnroll = kBf16 ? 2 : 1;  // f32 has as many bytes in flight
constexpr int64_t kMinRun = 32;         // rows of a block of backward: enough to pay for its share of dw
constexpr int64_t kMaxRuns = 2048;      // what sum_kernel adds
constexpr int kSumWarps = 32;           // each adds a part of the runs

struct Params {
  RowNumbers numbers;
  Rows x, gate, weight;
  Rows y;                 // forward
  Rows dy, dx, dgate;     // backward
  float* sums = nullptr;  // [runs][V], or null
  unsigned V, lanes;      // lanes: of a row
  float inverse_size, eps;
  int32_t activation;
  bool keep_zeros = false;  // forward
  unsigned run, runs;

  template <class Args>
  explicit Params(const Args& a)
      : numbers(a.x),
        x(rows_of(a.x)),
        gate(rows_of(a.gate)),
        weight(rows_of(a.weight)),
        V(static_cast<unsigned>(a.x.shape[3])),
        lanes(V / kChunkSize),
        inverse_size(1.0f / static_cast<float>(V)),
        eps(static_cast<float>(a.eps)),
        activation(a.activation) {
    run = static_cast<unsigned>(std::max(kMinRun, divide_up(numbers.count, kMaxRuns)));
    runs = static_cast<unsigned>(divide_up(numbers.count, run));
  }
};

// The sum over the lanes of a row, which are 1 << n neighbours. Other lanes of the warp add nothing.
struct SumOverRow {
  unsigned lanes;
  __device__ float operator()(float x) const {
#pragma unroll
    for (unsigned i = 16; i > 0; i /= 2) {
      const float other = __shfl_xor_sync(kAll, x, i);
      x += i < lanes ? other : 0.0f;
    }
    return x;
  }
};

__device__ void weights_of(const Params& p, unsigned column, float (&w)[kChunkSize]) {
  if (p.weight.data) return load_some(p.weight, p.weight.data, column, p.V, w);
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) w[i] = 1;
}

// Before wait_for_stream(): brings the weight to the L2 cache.
__device__ void hint_weight(const Params& p) {
  const unsigned size = p.weight.dtype == KDA_F32 ? 4 : 2, at = threadIdx.x * 128;
  if (p.weight.data && blockIdx.x == 0 && at < p.V * size) prefetch(p.weight.data + at);
}

// x <- y of a row's chunk.
__device__ void gate_chunk(const Params& p, const RowNorm& norm, const float (&w)[kChunkSize],
                           const float (&z)[kChunkSize], float (&x)[kChunkSize]) {
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) x[i] = x[i] * norm.factor * w[i];
  if (p.activation == KDA_NORM_NONE) return;
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) x[i] *= gate_of(p.activation, z[i]);
}

// Where rows of zeros stay zeros: NaN of a chunk's gate, or of eps = 0, becomes 0.
__device__ void keep_zeros(const float (&x)[kChunkSize], float (&y)[kChunkSize]) {
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) y[i] = x[i] == 0 && y[i] != y[i] ? 0.0f : y[i];
}

// kBf16: x, gate and y are.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads, kBlocksOfSM) lanes_kernel(const __grid_constant__ Params p) {
  const unsigned lane = threadIdx.x % 32, column = lane % p.lanes * kChunkSize, together = 32 / p.lanes;
  const unsigned warps = blockDim.x / 32, step = gridDim.x * warps * together, rows = p.numbers.count;
  const SumOverRow sum{p.lanes};
  hint_weight(p);
  wait_for_stream();
  float w[kChunkSize];
  weights_of(p, column, w);
  for (unsigned first = (blockIdx.x * warps + threadIdx.x / 32) * together; first < rows;
       first += kUnroll<kBf16> * step) {
    RawChunk raw_x[kUnroll<kBf16>], raw_z[kUnroll<kBf16>];
    RowPlace places[kUnroll<kBf16>];
#pragma unroll
    for (int j = 0; j < kUnroll<kBf16>; ++j) {
      const unsigned row = first + j * step + lane / p.lanes;
      places[j] = p.numbers.place(row);
      if (row >= rows) continue;
      raw_x[j] = load_chunk<kBf16>(row_at(p.x, places[j]), p.x.dtype, column);
      if (p.gate.data) raw_z[j] = load_chunk<kBf16>(row_at(p.gate, places[j]), p.gate.dtype, column);
    }
    if (first + kUnroll<kBf16> * step >= rows) let_next_start();
#pragma unroll
    for (int j = 0; j < kUnroll<kBf16>; ++j) {
      if (first + j * step >= rows) break;
      float x[kChunkSize], z[kChunkSize];
      values_of<kBf16>(p.x.dtype, raw_x[j], x);
      values_of<kBf16>(p.gate.dtype, raw_z[j], z);
      const RowNorm norm = norm_row(x, sum(squares_of(x)), p.inverse_size, p.eps, sum);
      gate_chunk(p, norm, w, z, x);
      if (p.keep_zeros && norm.zeros) {
        values_of<kBf16>(p.x.dtype, raw_x[j], z);
        keep_zeros(z, x);
      }
      if (first + j * step + lane / p.lanes < rows) store_chunk<kBf16>(row_at(p.y, places[j]), p.y.dtype, column, x);
    }
  }
}

// ---- rows of any size and place ----

// Calls f(column) for the chunks of a row that a lane has.
template <class F>
__device__ void for_chunks(const Params& p, const F& f) {
  for (unsigned column = threadIdx.x % 32 * kChunkSize; column < p.V; column += 32 * kChunkSize) f(column);
}

__device__ RowNorm norm_of_row(const Params& p, const char* row) {
  const auto squares = [&](float scale) {
    float sum = 0;
    for_chunks(p, [&](unsigned column) {
      float x[kChunkSize];
      load_some(p.x, row, column, p.V, x);
#pragma unroll
      for (int i = 0; i < kChunkSize; ++i) {
        const float scaled = x[i] * scale;
        sum = fmaf(scaled, scaled, sum);
      }
    });
    return sum_over<32>(sum);
  };
  return row_norm(squares(1), p.inverse_size, p.eps, squares);
}

__global__ void __launch_bounds__(kThreads, kBlocksOfSM) chunks_kernel(const __grid_constant__ Params p) {
  hint_weight(p);
  wait_for_stream();
  const unsigned warps = blockDim.x / 32, step = gridDim.x * warps, rows = p.numbers.count;
  for (unsigned row = blockIdx.x * warps + threadIdx.x / 32; row < rows; row += step) {
    const RowPlace place = p.numbers.place(row);
    const char *x_row = row_at(p.x, place), *gate_row = row_at(p.gate, place);
    char* y_row = row_at(p.y, place);
    const RowNorm norm = norm_of_row(p, x_row);
    for_chunks(p, [&](unsigned column) {
      float x[kChunkSize], z[kChunkSize] = {}, w[kChunkSize];
      load_some(p.x, x_row, column, p.V, x);
      if (p.gate.data) load_some(p.gate, gate_row, column, p.V, z);
      weights_of(p, column, w);
#pragma unroll
      for (int i = 0; i < kChunkSize; ++i) x[i] *= norm.scale;
      gate_chunk(p, norm, w, z, x);
      if (p.keep_zeros && norm.zeros) {
        load_some(p.x, x_row, column, p.V, z);
        keep_zeros(z, x);
      }
      store_some(p.y, y_row, column, p.V, x);
    });
  }
  let_next_start();
}

// ---- backward ----

// From x scaled, z and dy of a chunk: n (in place of x), dn (in place of dy), dz (in place of z) and the share of dw.
// Returns `sum` with dn n added.
__device__ float backward_chunk(const Params& p, const RowNorm& norm, const float (&w)[kChunkSize],
                                float (&x)[kChunkSize], float (&z)[kChunkSize], float (&dy)[kChunkSize],
                                float (&dw)[kChunkSize], float sum) {
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) {
    const float n = x[i] * norm.factor;
    const GateValue gate = p.activation == KDA_NORM_NONE ? GateValue{1, 0} : gate_and_slope(p.activation, z[i]);
    z[i] = dy[i] * (n * w[i]) * gate.slope;
    dw[i] = dy[i] * n * gate.value;
    dy[i] *= w[i] * gate.value;
    x[i] = n;
    sum = fmaf(dy[i], n, sum);
  }
  return sum;
}
// dx of a chunk, in place of dn.
__device__ void dx_of_chunk(const RowNorm& norm, float mean, const float (&n)[kChunkSize], float (&dn)[kChunkSize]) {
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i) dn[i] = fmaf(-n[i], mean, dn[i]) * norm.factor * norm.scale;
}

// Adds the sums of dw that a block's lanes have, and writes them to the workspace. sums: shared memory.
using WarpSums = float[kWarps][32 * kChunkSize];
__device__ void write_sums(const Params& p, unsigned column, float (&dw)[kChunkSize], WarpSums& sums) {
#pragma unroll
  for (int i = 0; i < kChunkSize; ++i)
#pragma unroll
    for (unsigned other = 16; other > 0; other /= 2) {  // the warp's rows side by side
      const float more = __shfl_xor_sync(kAll, dw[i], other);
      dw[i] += other >= p.lanes ? more : 0.0f;
    }
  if (threadIdx.x % 32 < p.lanes)
#pragma unroll
    for (int i = 0; i < kChunkSize; ++i) sums[threadIdx.x / 32][column + i] = dw[i];
  __syncthreads();  // the sums of all warps are in shared memory
  for (unsigned i = threadIdx.x; i < p.V; i += kThreads) {
    float sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][i];
    p.sums[static_cast<uint64_t>(blockIdx.x) * p.V + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 6) lanes_backward_kernel(const __grid_constant__ Params p) {
  __shared__ WarpSums sums;
  const unsigned lane = threadIdx.x % 32, column = lane % p.lanes * kChunkSize, together = 32 / p.lanes;
  const unsigned begin = blockIdx.x * p.run, end = min(begin + p.run, p.numbers.count);
  const SumOverRow sum{p.lanes};
  hint_weight(p);
  wait_for_stream();
  float w[kChunkSize], dw[kChunkSize] = {};
  weights_of(p, column, w);
  for (unsigned first = begin + threadIdx.x / 32 * together; first < end; first += kWarps * together) {
    const unsigned row = first + lane / p.lanes;
    const RowPlace place = p.numbers.place(row);
    RawChunk raw_x, raw_z, raw_dy;
    if (row < end) {
      raw_x = load_chunk<false>(row_at(p.x, place), p.x.dtype, column);
      if (p.gate.data) raw_z = load_chunk<false>(row_at(p.gate, place), p.gate.dtype, column);
      raw_dy = load_chunk<false>(row_at(p.dy, place), p.dy.dtype, column);
    }
    float x[kChunkSize], z[kChunkSize], dy[kChunkSize], more[kChunkSize];
    values_of<false>(p.x.dtype, raw_x, x);
    values_of<false>(p.gate.dtype, raw_z, z);
    values_of<false>(p.dy.dtype, raw_dy, dy);
    const RowNorm norm = norm_row(x, sum(squares_of(x)), p.inverse_size, p.eps, sum);
    const float mean = sum(backward_chunk(p, norm, w, x, z, dy, more, 0)) * p.inverse_size;
    if (row >= end) continue;
#pragma unroll
    for (int i = 0; i < kChunkSize; ++i) dw[i] += more[i];
    if (p.dgate.data) store_chunk<false>(row_at(p.dgate, place), p.dgate.dtype, column, z);
    if (!p.dx.data) continue;
    dx_of_chunk(norm, mean, x, dy);
    store_chunk<false>(row_at(p.dx, place), p.dx.dtype, column, dy);
  }
  let_next_start();
  if (p.sums) write_sums(p, column, dw, sums);
}

// One warp a block. A lane adds to the sums of its own columns in the workspace.
__global__ void __launch_bounds__(32) chunks_backward_kernel(const __grid_constant__ Params p) {
  const unsigned begin = blockIdx.x * p.run, end = min(begin + p.run, p.numbers.count);
  float* sums = p.sums + static_cast<uint64_t>(blockIdx.x) * p.V;
  hint_weight(p);
  wait_for_stream();
  for (unsigned row = begin; row < end; ++row) {
    const RowPlace place = p.numbers.place(row);
    const char *x_row = row_at(p.x, place), *gate_row = row_at(p.gate, place), *dy_row = row_at(p.dy, place);
    const RowNorm norm = norm_of_row(p, x_row);
    float x[kChunkSize], z[kChunkSize] = {}, dy[kChunkSize], w[kChunkSize], dw[kChunkSize], dot = 0;
    const auto chunk = [&](unsigned column) {
      load_some(p.x, x_row, column, p.V, x);
      if (p.gate.data) load_some(p.gate, gate_row, column, p.V, z);
      load_some(p.dy, dy_row, column, p.V, dy);
      weights_of(p, column, w);
#pragma unroll
      for (int i = 0; i < kChunkSize; ++i) x[i] *= norm.scale;
      dot = backward_chunk(p, norm, w, x, z, dy, dw, dot);
    };
    for_chunks(p, [&](unsigned column) {
      chunk(column);
      if (p.dgate.data) store_some(p.dgate, row_at(p.dgate, place), column, p.V, z);
#pragma unroll
      for (unsigned i = 0; i < kChunkSize; ++i)
        if (p.sums && column + i < p.V) sums[column + i] = row == begin ? dw[i] : sums[column + i] + dw[i];
    });
    const float mean = sum_over<32>(dot) * p.inverse_size;
    if (!p.dx.data) continue;
    for_chunks(p, [&](unsigned column) {
      chunk(column);
      dx_of_chunk(norm, mean, x, dy);
      store_some(p.dx, row_at(p.dx, place), column, p.V, dy);
    });
  }
  let_next_start();
}

// Adds the runs: a warp a part of them, for 32 columns, and then the warps in order.
__global__ void __launch_bounds__(32 * kSumWarps)
    sum_kernel(const float* sums, unsigned runs, unsigned V, float* dweight) {
  __shared__ float parts[kSumWarps][32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  const unsigned part = (runs + kSumWarps - 1) / kSumWarps, end = min((warp + 1) * part, runs);
  wait_for_stream();
  float sum = 0;
#pragma unroll 8
  for (unsigned i = warp * part; i < end; ++i)
    if (column < V) sum += sums[static_cast<uint64_t>(i) * V + column];
  parts[warp][lane] = sum;
  __syncthreads();  // the sums of all warps are in shared memory
  let_next_start();
  if (warp > 0 || column >= V) return;
  for (int i = 1; i < kSumWarps; ++i) sum += parts[i][lane];
  dweight[column] = sum;
}

// ---- the call ----

// Do lanes have whole rows in registers?
bool by_lanes(const Params& p, std::initializer_list<const Rows*> rows) {
  if (p.V % kChunkSize || p.V > 32 * kChunkSize || (p.lanes & (p.lanes - 1))) return false;
  for (const Rows* r : rows)
    if (r->data && !r->wide) return false;
  return true;
}
bool is_bf16(const Rows& rows) { return !rows.data || rows.dtype == KDA_BF16; }

// Rows for forward, and for backward. Absent tensors are as good as any.
Params params_of(const NormGateProblem& problem) {
  Params p(problem.args);
  p.y = rows_of(problem.args.y), p.keep_zeros = problem.keep_zeros;
  return p;
}
Params params_of(const NormGateBackwardProblem& problem) {
  const kda_norm_gate_backward_args& a = problem.args;
  Params p(a);
  p.dy = rows_of(a.dy), p.dx = rows_of(a.dx), p.dgate = rows_of(a.dgate);
  p.sums = present(a.dweight) ? static_cast<float*>(a.exec.workspace) : nullptr;
  return p;
}
bool by_lanes(const Params& p) { return by_lanes(p, {&p.x, &p.gate, &p.y, &p.dy, &p.dx, &p.dgate}); }

template <class P>
const char* why_not(const P& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  return p.rows < int64_t{1} << 31 ? nullptr : "takes at most 2^31 rows";
}
template <class P>
std::string form(const P& problem) {
  return by_lanes(params_of(problem)) ? "rows in registers" : "rows of any size and place, read again";
}

// A warp a group of rows, over as many SMs as there are; blocks of several warps once these are all busy.
struct Spread {
  dim3 grid;
  int threads;
  Spread(int64_t groups, int device_id) {
    const int64_t SMs = multiprocessors(device_id), warps = std::clamp<int64_t>(groups / SMs, 1, kWarps);
    grid = dim3(static_cast<unsigned>(std::min(divide_up(groups, warps), SMs * kBlocksOfSM)));
    threads = static_cast<int>(32 * warps);
  }
};

}  // namespace

const char* norm_gate_why_not(const NormGateProblem& p) { return why_not(p); }
const char* norm_gate_why_not(const NormGateBackwardProblem& p) { return why_not(p); }
std::string norm_gate_form(const NormGateProblem& p) { return form(p); }
std::string norm_gate_form(const NormGateBackwardProblem& p) { return form(p); }

void norm_gate(const NormGateProblem& problem) {
  const kda_exec& exec = problem.args.exec;
  const Params p = params_of(problem);
  const DeviceGuard device(exec.device_id);
  const bool lanes = by_lanes(p);
  const Spread shape(divide_up(problem.rows, lanes ? 32 / p.lanes : 1), exec.device_id);
  if (!lanes) launch<chunks_kernel>(exec, shape.grid, shape.threads, 0, p);
  else if (is_bf16(p.x) && is_bf16(p.gate) && is_bf16(p.y))
    launch<lanes_kernel<true>>(exec, shape.grid, shape.threads, 0, p);
  else launch<lanes_kernel<false>>(exec, shape.grid, shape.threads, 0, p);
}

uint64_t norm_gate_backward_workspace(const NormGateBackwardProblem& problem) {
  return present(problem.args.dweight) ? sizeof(float) * Params(problem.args).runs * problem.V : 0;
}

void norm_gate_backward(const NormGateBackwardProblem& problem) {
  const kda_norm_gate_backward_args& a = problem.args;
  const Params p = params_of(problem);
  const DeviceGuard device(a.exec.device_id);
  if (p.runs > 0 && by_lanes(p)) launch<lanes_backward_kernel>(a.exec, dim3(p.runs), kThreads, 0, p);
  else if (p.runs > 0) launch<chunks_backward_kernel>(a.exec, dim3(p.runs), 32, 0, p);
  if (!present(a.dweight)) return;
  launch<sum_kernel>(a.exec, dim3(static_cast<unsigned>(divide_up(p.V, 32))), 32 * kSumWarps, 0,
                     static_cast<const float*>(p.sums), p.runs, p.V, static_cast<float*>(a.dweight.data));
}

}  // namespace kda::cuda
