// What the stages of the backward share: products of tiles of 64 x 64, rows of tokens and states, and a call.
#pragma once
#include "cuda/stages/tiles.h"

namespace kda::cuda::stages {

constexpr int kTile = 64, kDepth = 16, kLine = kTile + 4;  // a line of an operand in shared memory, in floats

struct Operands {
  float a[kDepth][kLine], b[kDepth][kLine];  // [k][row], [k][column]
};

// A thread's rows 4 y .. and columns 4 x .. of a tile.
struct Place {
  int y = static_cast<int>(threadIdx.x) / 16 * 4, x = static_cast<int>(threadIdx.x) % 16 * 4;
};
using Part = float[4][4];

// sum += a b, of 64 x depth by depth x 64: a(row, k) and b(k, column) read from anywhere, and give 0 beyond the data.
template <class A, class B>
__device__ void multiply(Operands& m, Part& sum, int depth, const A& a, const B& b) {
  const Place at;
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
    __syncthreads();  // the operands before are read
    for (int i = static_cast<int>(threadIdx.x); i < kDepth * kTile; i += kThreads) {
      const int k = i % kDepth, row = i / kDepth, column = i % kTile, line = i / kTile;
      m.a[k][row] = k0 + k < depth ? a(row, k0 + k) : 0.0f;
      m.b[line][column] = k0 + line < depth ? b(k0 + line, column) : 0.0f;
    }
    __syncthreads();  // the operands are there
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const float4 x = *reinterpret_cast<const float4*>(&m.a[k][at.y]),
                   y = *reinterpret_cast<const float4*>(&m.b[k][at.x]);
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(xs[i], ys[j], sum[i][j]);
    }
  }
}

// Rows of a chunk, with zeros behind its tokens and the tensor's n channels.
struct TokenRows {
  const Rows& x;
  ChunkAt at;
  int head, n;

  __device__ float operator()(int i, int c) const {
    if (i >= at.rows || c >= n) return 0;
    return load_element(x.at(at.b, at.t0 + i, head) + c * x.size(), x.dtype);
  }
  __device__ void store(int i, int c, float value) const {
    if (x.data && i < at.rows && c < n) store_element(x.at(at.b, at.t0 + i, head) + c * x.size(), x.dtype, value);
  }
};
// States of a row, channel k of column v.
struct StateRows {
  const Rows& x;
  int64_t row;
  int head, K, V;
  bool v_first;

  __device__ char* place(int k, int v) const {
    return v_first ? x.at(row, v, head) + k * x.size() : x.at(row, k, head) + v * x.size();
  }
  __device__ float operator()(int k, int v) const {
    return x.data && k < K && v < V ? load_element(place(k, v), x.dtype) : 0.0f;
  }
  __device__ void store(int k, int v, float value) const {
    if (x.data && k < K && v < V) store_element(place(k, v), x.dtype, value);
  }
};

struct BackwardCall {
  Chunks chunks;
  Rows q, k, v, G, beta, d_o, v_new, qG, kg, w, Aqk, Akk_inv, dAqk, dAkk, dv_local, dv_new, dv, dq, dk, dG, dg, g,
      dbeta;
  Rows h, dh, dhT, dh0;
  int64_t h_rows;
  int HV, group, K, V;
  float scale;
  bool v_first;

  __device__ TokenRows keys(const Rows& x, const ChunkAt& at, int hv) const { return {x, at, hv / group, K}; }
  __device__ TokenRows gates(const Rows& x, const ChunkAt& at, int hv) const { return {x, at, hv, K}; }
  __device__ TokenRows values(const Rows& x, const ChunkAt& at, int hv) const { return {x, at, hv, V}; }
  __device__ TokenRows scores(const Rows& x, const ChunkAt& at, int hv) const { return {x, at, hv, kRows}; }
  __device__ TokenRows column(const Rows& x, const ChunkAt& at, int hv) const { return {x, at, hv, 1}; }
  __device__ StateRows state(const Rows& x, int64_t row, int hv) const { return {x, row, hv, K, V, v_first}; }
};

// Finds the chunk and head of a block; tokens of no sequence get zeros in `outputs`.
struct Output {
  const Rows* x;
  int n;
};
template <int kCount>
__device__ bool find(const BackwardCall& p, const Output (&outputs)[kCount], ChunkAt& at, int& hv) {
  hv = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.HV));
  if (!p.chunks.find(blockIdx.x / static_cast<unsigned>(p.HV), at)) return false;
  if (!at.owned)
    for (const Output& out : outputs) zero_rows(*out.x, at, hv, out.n);
  return at.owned;
}

}  // namespace kda::cuda::stages
