// F5: o = scale q E S + Aqk v_new. A block has a chunk of a value head and a slice of its columns; a warp has 16 rows
// and half of the columns. All copies start at once; other blocks of the SM compute meanwhile.
//
// Shared memory in bf16: q E 17, S 34, Aqk 17, v_new 17 KiB: two blocks an SM.
#include "contract/stages.h"
#include "cuda/stages/declarations.h"
#include "cuda/stages/products.h"
#include "cuda/stages/stages.h"
#include "cuda/stages/tiles.h"

namespace kda::cuda {
namespace stages {
namespace {

template <class E>
struct Smem {
  union {
    alignas(16) unsigned char q[kTileBytes<E>];  // q E
    unsigned char o[kTileBytes<E>];              // then
  };
  alignas(16) E S[slice_of<E> * kStrideAcross<E>];  // lines of K or of V, as they are stored
  alignas(16) unsigned char A[kTileBytes<E>];
  alignas(16) unsigned char v[kTileBytesAcross<E>];
};

// Computes q E of slice s: rows of a warp, channels of a lane.
template <class E>
__device__ void put_q(const OutputCall& p, const ChunkAt& at, int hv, int s, unsigned char* tile) {
  constexpr int kGroup = kRows / kWarps;
  const int warp = static_cast<int>(threadIdx.x) / 32, c = static_cast<int>(threadIdx.x % 32) * kPerLane<E>;
  const int channel = s * slice_of<E> + c, i0 = warp * kGroup;
  const char* from_q = p.q.at(at.b, at.t0 + i0, hv / p.group);
  const char* from_G = p.G.at(at.b, at.t0 + i0, hv);
  uint2 q[kGroup];
  float G[kGroup][kPerLane<E>];
#pragma unroll
  for (int r = 0; r < kGroup; ++r) {
    const int n = i0 + r < at.rows ? p.K : 0;
    q[r] = load_packed<E>(p.q, from_q, channel, n);
    load_values(p.G, from_G, channel, n, G[r]);
    from_q += p.q.token, from_G += p.G.token;
  }
#pragma unroll
  for (int r = 0; r < kGroup; ++r) {
    float x[kPerLane<E>];
    unpack<E>(q[r], x);
#pragma unroll
    for (int j = 0; j < kPerLane<E>; ++j) x[j] *= ptx::exp2(G[r][j]);
    *reinterpret_cast<uint2*>(tile + ((i0 + r) * kStride<E> + c) * static_cast<int>(sizeof(E))) = packed<E>(x);
  }
}

template <class E, int kSize>
__device__ auto known(const OutputCall& call) -> std::conditional_t<kSize != 0, OutputCall, const OutputCall&> {
  if constexpr (kSize != 0) {
    OutputCall p = call;
    p.K = p.V = kSize, p.chunks.varlen = false;
    set_known<E>(p.q, p.v_new, p.G, p.Aqk, p.o, p.h);
    return p;
  } else {
    return call;
  }
}

template <class E, int kSize>
__global__ void __launch_bounds__(kThreads, kSize ? 3 : 2) output_kernel(const __grid_constant__ OutputCall call) {
  const auto& p = known<E, kSize>(call);
  extern __shared__ float4 dynamic[];
  auto& shared = *reinterpret_cast<Smem<E>*>(dynamic);
  using M = Math<E>;
  constexpr int kSlice = slice_of<E>, kPairs = kSlice / 32;  // 16 columns each, of a warp
  wait_for_stream();
  const auto tiles = static_cast<unsigned>(slices(p.V, kSlice)), HV = static_cast<unsigned>(p.HV);
  const int v0 = static_cast<int>(blockIdx.x % tiles) * kSlice;
  const auto hv = static_cast<int>(blockIdx.x / tiles % HV);
  ChunkAt at;
  if (!p.chunks.find(blockIdx.x / tiles / HV, at)) return;
  if constexpr (kSize != 0) at.rows = kRows;
  if (!at.owned) return v0 ? void() : zero_rows(p.o, at, hv, p.V);
  const int64_t row = p.chunks.first_row(at.n) + at.index;
  if (row >= p.h_rows) return;  // cu_seqlens are not checked

  stage<E, kRows, kRows>(tokens_of(p.Aqk, at, hv, 0, kRows), shared.A, kStride<E>);
  stage<E, kRows, kSlice>(tokens_of(p.v_new, at, hv, v0, p.V), shared.v, kStrideAcross<E>);
  const int warp = static_cast<int>(threadIdx.x) / 32, i0 = warp % 4 * 16, column0 = warp / 4 * kPairs * 16;
  const int S_stride = p.v_first ? kStride<E> : kStrideAcross<E>;
  Sum sums[kPairs];
#pragma unroll 1
  for (int c0 = 0; c0 < p.K; c0 += kSlice) {
    if (c0) __syncthreads();  // the slice before is read
    // Lines of V and channels from c0 on, or lines c0 .. of K and columns.
    const int line0 = p.v_first ? v0 : c0, element0 = p.v_first ? c0 : v0;
    stage<E, kSlice, kSlice>({p.h.at(row, line0, hv) + element0 * p.h.size(), p.h.token,
                              (p.v_first ? p.V : p.K) - line0, (p.v_first ? p.K : p.V) - element0, p.h.dtype, p.h.wide},
                             shared.S, S_stride);
    put_q<E>(p, anew(at), hv, c0 / kSlice, shared.q);
    arrived();
    const int channels = min(p.K - c0, kSlice);
    const auto multiply = [&]<bool kVFirst>() {
      constexpr int kAhead = kSize ? 1 : 2;  // with three blocks an SM, the others run
#pragma unroll kAhead
      for (int c = 0; c < channels; c += 16) {
        const auto a = M::load_a(shared.q, kStride<E>, i0, c);
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
          if constexpr (kVFirst) M::add(sums[n], a, M::load_b_transposed(shared.S, S_stride, column0 + n * 16, c));
          else M::add(sums[n], a, M::load_b(shared.S, S_stride, c, column0 + n * 16));
      }
    };
    if (p.v_first) multiply.template operator()<true>();
    else multiply.template operator()<false>();
  }
#pragma unroll
  for (int n = 0; n < kPairs; ++n) sums[n].scale(p.scale);
#pragma unroll 1
  for (int j0 = 0; j0 <= i0; j0 += 16) {
    auto a = M::load_a(shared.A, kStride<E>, i0, j0);
    if (j0 == i0) M::keep_lower(a);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) M::add(sums[n], a, M::load_b(shared.v, kStrideAcross<E>, j0, column0 + n * 16));
  }
  __syncthreads();  // q E is read
#pragma unroll
  for (int n = 0; n < kPairs; ++n)
    for_each_pair(sums[n], [&](int i, int j, float x, float y) {
      M::store_two(shared.o, kStride<E>, i0 + i, column0 + n * 16 + j, x, y);
    });
  __syncthreads();  // o is there
  const ChunkAt here = anew(at);
  char* to = p.o.at(here.b, here.t0, hv) + v0 * p.o.size();
  unstage<E, kRows, kSlice>(shared.o, kStride<E>, p.o, at.rows, p.V - v0, [&](int i) { return to + i * p.o.token; });
}

}  // namespace

void run(const kda_exec& exec, const OutputCall& c, bool exact) {
  const int64_t tiles = slices(c.V, exact ? slice_of<float> : slice_of<bf16>);
  const dim3 grid(static_cast<unsigned>(c.chunks.count * c.HV * tiles));
  if (grid.x == 0) return;
  const bool known = exact && c.chunks.whole() && are_known<float>({&c.q, &c.v_new, &c.G, &c.Aqk, &c.o, &c.h});
  const auto start = [&]<class E, int kSize>() {
    launch<output_kernel<E, kSize>>(exec, grid, kThreads, sizeof(Smem<E>), c);
  };
  if (known && size_if_known(c.K, c.V) == 128) start.template operator()<float, 128>();
  else if (exact) start.template operator()<float, 0>();
  else start.template operator()<bf16, 0>();
}

}  // namespace stages

const char* stage_why_not(const StageProblem<kda_stage_fwd_o_args>& p) {
  const int64_t tiles = stages::slices(static_cast<int>(p.V), stages::slice_of<float>);
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::Chunks(p, p.in.cu_seqlens).count * p.HV * tiles);
}

void stage(const StageProblem<kda_stage_fwd_o_args>& p) {
  const kda_stage_fwd_o_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  stages::OutputCall c{.chunks = stages::Chunks(p, p.in.cu_seqlens), .q = stages::rows_of(a.q)};
  c.v_new = stages::rows_of(a.v_new), c.G = stages::rows_of(a.G), c.Aqk = stages::rows_of(a.Aqk);
  c.o = stages::rows_of(a.o), c.h = stages::lines_of_states(a.h), c.h_rows = a.h.shape[0];
  c.HV = static_cast<int32_t>(p.HV), c.group = static_cast<int32_t>(p.group());
  c.K = static_cast<int32_t>(p.K), c.V = static_cast<int32_t>(p.V);
  c.scale = p.in.scale, c.v_first = p.in.state_layout == KDA_STATE_V_FIRST;
  run(a.exec, c, stages::is_exact({&a.q, &a.v_new, &a.Aqk, &a.h, &a.o}));
}

}  // namespace kda::cuda
