// F2 and F3: the scores of a chunk, the inverse of its triangle, and what follows from both without a state. A block
// has a chunk of a value head.
//
// Scores, for any gate (math.md 4.4 c). On level h = 1, 2, 4, .. 32 the rows of the second half of every 2 h meet the
// columns of its first half. Between them lies the first row of the second half, the anchor a:
//   2^(G_i - G_j) = 2^(G_i - G_a) 2^(G_a - G_j)
// So every row of q and k is scaled once a level by a factor in [0, 1], in f32, and the products are those of
// matrices. The exponents are sums of steps G_t - G_(t-1) of one sign, so nothing cancels. In f32, products of
// matrices are expensive. There each pair of the eight neighbouring rows that a warp has in registers is computed by
// itself, in place of the levels below 8.
//
//   levels    a warp scales its eight rows                             barrier: tiles q, k
//             a block of 16 x 16 scores and one of q, k: its products  barrier: tiles are read
//   inverse   T of 16 x 16 blocks by forward substitution, one column a lane; then twice T21 = -T22 (A21 T11), in f32
//   outputs   qG and kg; kG to a tile; w = (T beta) kG, u = (T beta) v with T as it is stored, exact to 16 bits
//
// Shared memory: four tiles and the steps' sums, 77 KiB; two blocks an SM.
#include "contract/stages.h"
#include "cuda/stages/chunk_intra_inverse.h"
#include "cuda/stages/chunk_intra_scores.h"
#include "cuda/stages/declarations.h"

namespace kda::cuda {
namespace stages {
namespace {

// ---- w and u ----

// Stores T beta x, for a tile x, to slice s of y, whose chunks are `skip` bytes apart unless it is 0. A warp has two
// rows of 16 x 16 blocks, the first or second and the last or last but one: five blocks of T either way. Results in
// 16 bits go through a tile.
template <class E>
__device__ void multiply(const IntraCall& p, const unsigned char* x, const Rows& y, int64_t skip, const ChunkAt& chunk,
                         int hv, int s, int n, Smem<E>& shared) {
  using M = Math<E>;
  constexpr bool kDirect = sizeof(E) == 4;
  constexpr int kPairs = slice_of<E> / 64;  // 16 columns each
  const ChunkAt at = anew(chunk);
  const bool padded = kDirect && skip;  // of prefill_f32
  const int c0 = s * slice_of<E>, lines = padded ? (at.rows + p.chunk - 1) / p.chunk * p.chunk : at.rows;
  char* to = y.data + at.b * y.batch + hv * y.head + c0 * y.size();
  to += padded ? at.t0 / p.chunk * skip : at.t0 * y.token;
  const int64_t gap = padded ? skip - p.chunk * y.token : 0;  // between two chunks of 32
  const auto line_at = [&](int i) { return to + i * y.token + (i < p.chunk ? 0 : gap); };

  const int warp = static_cast<int>(threadIdx.x) / 32, column0 = warp / 2 * kPairs * 16;
#pragma unroll 1
  for (int last = 1; last >= 0; --last) {
    const int row = last ? 3 - warp % 2 : warp % 2;
    typename M::Accurate sums[kPairs];
#pragma unroll 1
    for (int m = p.chunk == kRows ? 0 : row / 2 * 2; m <= row; ++m) {
      const auto a = M::load_exact(shared.T, kScoreStride, row * 16, m * 16);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) M::add(sums[i], a, M::load_b(x, kStrideAcross<E>, m * 16, column0 + i * 16));
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
      for_each_pair(sums[pair].sum(), [&](int i, int j, float x, float z) {
        i += row * 16, j += column0 + pair * 16;
        if constexpr (!kDirect) M::store_two(shared.out, kStrideAcross<E>, i, j, x, z);
        else if (i < lines) store_pair(y, line_at(i), j, n - c0, x, z);
      });
  }
  if constexpr (!kDirect) {
    __syncthreads();  // `out` is there
    unstage<E, kRows, slice_of<E>>(shared.out, kStrideAcross<E>, y, lines, n - c0, line_at);
  }
}

// The K = V of a kernel made for prefill_f32's whole chunks, or for the stage in bf16; 0 for anything else.
template <class E>
int known_size(const IntraCall& p) {
  constexpr bool kF32 = sizeof(E) == 4;
  const bool usual =
      p.solve && p.chunk == kRows && p.steps == kF32 && p.G.wide && p.G.dtype == KDA_F32 &&
      (!kF32 || (p.chunks.whole() && !p.T.data && p.beta.dtype == KDA_F32 && are_known<E>({&p.sums, &p.Aqk})));
  return usual && are_known<E>({&p.q, &p.k, &p.v, &p.w, &p.u, &p.qG, &p.kg}) ? size_if_known(p.K, p.V) : 0;
}
template <class E, int kSize>
__device__ auto known(const IntraCall& call) -> std::conditional_t<kSize != 0, IntraCall, const IntraCall&> {
  if constexpr (kSize != 0) {
    IntraCall p = call;
    p.K = p.V = kSize, p.chunk = kRows, p.solve = true;
    set_known<E>(p.q, p.k, p.v, p.w, p.u, p.qG, p.kg), set_known<float>(p.G);
    if constexpr (sizeof(E) == 4) {
      p.steps = true, p.chunks.varlen = false, p.T = {};
      set_known<float>(p.beta, p.sums, p.Aqk);
    } else {
      p.steps = false, p.w_skip = p.u_skip = 0;
    }
    return p;
  } else {
    return call;
  }
}

template <class E, int kSize>
__global__ void __launch_bounds__(kThreads, 2) intra_kernel(const __grid_constant__ IntraCall call) {
  const auto& p = known<E, kSize>(call);
  extern __shared__ float4 dynamic[];
  auto& shared = *reinterpret_cast<Smem<E>*>(dynamic);
  wait_for_stream();
  const auto hv = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.HV));
  ChunkAt at;
  if (!p.chunks.find(blockIdx.x / static_cast<unsigned>(p.HV), at)) return;
  if constexpr (sizeof(E) == 4 && kSize != 0) at.rows = kRows;
  if (!at.owned) {
    if (p.solve) zero_rows(p.Aqk, at, hv, kRows), zero_rows(p.T, at, hv, kRows);
    zero_rows(p.w, at, hv, p.K), zero_rows(p.u, at, hv, p.V);
    return zero_rows(p.qG, at, hv, p.K), zero_rows(p.kg, at, hv, p.K);
  }
  if (threadIdx.x < kRows) {
    const int i = static_cast<int>(threadIdx.x);
    shared.beta[i] = i < at.rows ? load_element(p.beta.at(at.b, at.t0 + i, hv), p.beta.dtype) : 0.0f;
  }
  const int count = slices(p.K, slice_of<E>);
  Group<E> group;
  load_slice(p, at, hv, p.solve ? 0 : count - 1, true, group, shared);
  if (p.solve) {
    put_scores(p, at, hv, group, shared);
    invert(shared.Akk, shared.T, p.chunk);
    store_matrix(p.Aqk, at, hv, shared.Aqk), store_matrix(p.T, at, hv, shared.T);
    __syncthreads();  // both are read
    if (p.T.data) {
      round_matrix(p.T.dtype, shared.T);
      __syncthreads();  // T is what is stored
    }
  } else {
    load_matrix(p.T, at, hv, shared.T);
    __syncthreads();  // T is there
  }
  multiply_by_beta(shared.T, shared.beta);

  // Slices of v go to where q was. In f32 every other one goes to `out`, which has no other use there.
  constexpr int kTiles = sizeof(E) == 4 ? 2 : 1;
  const int count_v = p.u.data ? slices(p.V, slice_of<E>) : 0;
  const auto v_tile = [&](int s) { return s % kTiles == kTiles - 1 ? shared.v : shared.out; };
  const auto ask_v = [&](int s) {
    if (s < count_v)
      stage<E, kRows, slice_of<E>>(tokens_of(p.v, at, hv, s * slice_of<E>, p.V), v_tile(s), kStrideAcross<E>);
    ptx::commit_copies();
  };
  if (kTiles == 2) ask_v(0);
  __syncthreads();  // T beta is there; without solving, q and the sums of steps
#pragma unroll 1
  for (int s = count - 1;;) {  // from the slice that is there already
    group.put_decayed(p, at, hv, s, shared);
    if constexpr (sizeof(E) == 4)
      if (p.sums.data) group.store_sums(p, at, hv, s, shared);
    __syncthreads();  // kG is there, q is read
    if (s == 0) ask_v(kTiles - 1);
    if (p.w.data) multiply(p, shared.kG, p.w, p.w_skip, at, hv, s, p.K, shared);
    if (s-- == 0) break;
    __syncthreads();  // kG and the sums of steps are read
    load_slice(p, at, hv, s, p.qG.data != nullptr, group, shared);
    __syncthreads();  // q and the sums of steps are there
  }
#pragma unroll 1
  for (int s = 0; s < count_v; ++s) {
    if (s >= kTiles) {
      __syncthreads();  // that tile is read
      ask_v(s);
    }
    if (s == 0 || s >= kTiles) arrived();
    multiply(p, v_tile(s), p.u, p.u_skip, at, hv, s, p.V, shared);
  }
}

}  // namespace

void run(const kda_exec& exec, const IntraCall& c, bool exact) {
  const dim3 grid(static_cast<unsigned>(c.chunks.count * c.HV));
  if (grid.x == 0) return;
  const auto start = [&]<class E, int kSize>() {
    launch<intra_kernel<E, kSize>>(exec, grid, kThreads, sizeof(Smem<E>), c);
  };
  const int known = exact ? known_size<float>(c) : known_size<bf16>(c);
  if (exact && known == 64) start.template operator()<float, 64>();
  else if (exact) known ? start.template operator()<float, 128>() : start.template operator()<float, 0>();
  else known == 128 ? start.template operator()<bf16, 128>() : start.template operator()<bf16, 0>();
}

namespace {

template <class P>
IntraCall call_of(const P& p, const kda_tensor& T) {
  const auto& a = p.args;
  IntraCall c{.chunks = Chunks(p, p.in.cu_seqlens), .q = rows_of(a.q), .k = rows_of(a.k), .v = rows_of(a.v)};
  c.beta = rows_of(a.beta), c.G = rows_of(a.G), c.T = rows_of(T);
  c.w = rows_of(a.w), c.u = rows_of(a.u), c.qG = rows_of(a.qG), c.kg = rows_of(a.kg);
  c.HV = static_cast<int32_t>(p.HV), c.group = static_cast<int32_t>(p.group());
  c.K = static_cast<int32_t>(p.K), c.V = static_cast<int32_t>(p.V);
  c.chunk = kRows, c.scale = p.in.scale;
  return c;
}

}  // namespace
}  // namespace stages

template <StageArgs Args>
const char* intra_why_not(const StageProblem<Args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::Chunks(p, p.in.cu_seqlens).count * p.HV);
}
const char* stage_why_not(const StageProblem<kda_stage_chunk_intra_args>& p) { return intra_why_not(p); }
const char* stage_why_not(const StageProblem<kda_stage_recompute_w_u_args>& p) { return intra_why_not(p); }

void stage(const StageProblem<kda_stage_chunk_intra_args>& p) {
  const kda_stage_chunk_intra_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  stages::IntraCall c = stages::call_of(p, a.Akk_inv);
  c.Aqk = stages::rows_of(a.Aqk), c.solve = true;
  run(a.exec, c, stages::is_exact({&a.k, &a.v}));
}

void stage(const StageProblem<kda_stage_recompute_w_u_args>& p) {
  const kda_stage_recompute_w_u_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  run(a.exec, stages::call_of(p, a.Akk_inv), stages::is_exact({&a.k, &a.v}));
}

}  // namespace kda::cuda
