// Gradients of the causal convolution (math.md 7.6), for sm_80 and newer:
//   dy_t <- dz_t silu'(y_t),  dxx_i = sum_j w_j dy_(i-j),  dw_j = sum_t dy_t xx_(t+j),  dbias = sum_t dy_t
//
// Bytes: x and dz are read, dx is written; y is computed again. A warp has 32 kVector channels (conv.cu) of a run of
// tokens, from any number of sequences, with the last three rows of xx and of dy in registers. dxx_i needs dy up to
// i: the dx of a run's last tokens needs dy of the W-1 tokens after the run, which are therefore computed twice.
//
// Sums have three levels without atomics: a warp adds its tokens in order, a block its warps, and a second kernel the
// blocks. Runs depend only on the number of tokens, and so does every bit. A third kernel makes the gradients of
// states that no token follows.
#include "cuda/conv/conv.h"
#include "cuda/conv/declarations.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int64_t kMinRun = 64;     // tokens of a warp: the three after them count twice
constexpr int64_t kMaxRuns = 1024;  // 256 blocks for the second kernel to add
constexpr int kSums = kTaps + 1;    // dw_j, then dbias

// kVector channels of rows from a token on, one row after the other, of a tensor with elements of type T.
template <class T, int kVector>
struct Walk {
  static constexpr int kGroup = 8 / sizeof(T);  // tokens that a thread loads at once
  using Row = Channels<T, kVector>;
  Row* at;
  int64_t step;

  __device__ Walk(const kda_tensor& t, const Sequence& s, int64_t token, int64_t d)
      : at(channels_at<T, kVector>(t, s, token, d)), step(t.stride[1] / kVector) {}
  __device__ Row load() const { return *at; }
  __device__ static float value(const Row& row, int i) { return static_cast<float>(row.x[i]); }
  __device__ void put(const float (&x)[kVector]) const {
    Row row;
#pragma unroll
    for (int i = 0; i < kVector; ++i) row.x[i] = static_cast<T>(x[i]);
    store(at, row);
  }
  __device__ void next() { at += step; }
};
// The same of a tensor of any dtype, an element at a time.
struct AnyElement {};
template <>
struct Walk<AnyElement, 1> {
  static constexpr int kGroup = 4;
  struct Row {
    RawElement raw;
    int32_t dtype = KDA_F32;
  };
  const kda_tensor& t;
  int64_t at;

  __device__ Walk(const kda_tensor& t, const Sequence& s, int64_t token, int64_t d)
      : t(t), at(s.b * t.stride[0] + (s.t0 + token) * t.stride[1] + d) {}
  __device__ Row load() const {
    Row row{.dtype = t.dtype};
    load_raw(t, at, row.raw);
    return row;
  }
  __device__ static float value(const Row& row, int) { return value_of(row.dtype, row.raw); }
  __device__ void put(const float (&x)[1]) const { store_value(t, at, x[0]); }
  __device__ void next() { at += t.stride[1]; }
};

struct Params {
  Conv conv;
  kda_tensor dy, d_final, dx, d_initial;
  kda_tensor dweight, dbias;
  float* sums;  // [blocks][kSums][D], or null
  unsigned tiles, blocks;
  int64_t run;
};

// What a thread knows of its channels. Rows are numbered as if W were 4, so dx of a token always comes three tokens
// later.
template <class T, int kVector>
struct Gradients {
  using Rows = Walk<T, kVector>;
  using Row = typename Rows::Row;
  float w[kTaps][kVector], bias[kVector];
  float xx[kPast][kVector], dy[kPast][kVector];  // the last rows
  float sums[kSums][kVector];
  int first;  // tap
  bool silu;

  __device__ void move_on(const Row& row) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      xx[0][i] = xx[1][i], xx[1][i] = xx[2][i], xx[2][i] = Rows::value(row, i);
    }
  }
  // Makes dxx of the row three before the token's own. After the last token (not `inside`) dz is 0, whatever y would
  // be.
  __device__ void next(const Row& x, const Row& dz, bool inside, bool summed, float (&dxx)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float taps[kTaps] = {w[0][i], w[1][i], w[2][i], w[3][i]};
      const float in[kTaps] = {xx[0][i], xx[1][i], xx[2][i], Rows::value(x, i)};
      float d = Rows::value(dz, i);
      if (silu) {
        const float y = convolve(taps, bias[i], in, first, false), s = sigmoid(y);
        d *= fmaf(y * s, 1.0f - s, s);
      }
      if (!inside) d = 0;
      if (summed) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) sums[j][i] = fmaf(d, in[j], sums[j][i]);
        sums[kTaps][i] += d;
      }
      const float ds[kTaps] = {d, dy[2][i], dy[1][i], dy[0][i]};
      dxx[i] = 0;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) dxx[i] = j >= first ? fmaf(taps[j], ds[j], dxx[i]) : dxx[i];
      dy[0][i] = dy[1][i], dy[1][i] = dy[2][i], dy[2][i] = d;
    }
    move_on(x);
  }
};

// Does tokens a .. b-1 of a sequence. The first token also brings d_initial: rows 0 .. W-2 of dxx.
template <class T, int kVector>
__device__ void backward_tokens(const Params& p, const Sequence& s, int64_t a, int64_t b, int64_t d,
                                Gradients<T, kVector>& g) {
  using Rows = Walk<T, kVector>;
  using Row = typename Rows::Row;
  constexpr int kGroup = Rows::kGroup;
  const Conv& c = p.conv;
  const kda_tensor& in = c.rows_of(d);
  const bool wants_dx = present(p.dx), wants_initial = a == 0 && present(p.d_initial);
  const auto rows = [&](const kda_tensor& t, int64_t token) { return Rows(t, s, token, d); };
#pragma unroll
  for (int j = 0; j < kPast; ++j)
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const bool stored = a < kPast && s.initial && j >= g.first;
      g.xx[j][i] = stored ? value_at(c.state, place_of(c.state, s.n, d + i, j - g.first)) : 0.0f;
      g.dy[j][i] = 0;
    }
  for (int64_t t = max(a - kPast, int64_t{0}); t < a; ++t) g.move_on(rows(in, t).load());
  // Does any row: of the state or of a token; before, inside or after tokens a .. b-1; with d_final added or not.
  // Elements of states are rare enough to be taken one at a time.
  const auto edge = [&](int64_t t) {
    const bool inside = t < s.length;
    float dxx[kVector];
    g.next(inside ? rows(in, t).load() : Row{}, inside ? rows(p.dy, t).load() : Row{}, inside, t < b, dxx);
    if (const int64_t e = t - s.length - g.first; e >= 0 && e < kPast - g.first && present(p.d_final)) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) dxx[i] += value_at(p.d_final, place_of(p.d_final, s.n, d + i, e));
    }
    if (const int64_t e = t - g.first; e >= 0 && t < kPast && wants_initial) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) store_value(p.d_initial, place_of(p.d_initial, s.n, d + i, e), dxx[i]);
    }
    if (wants_dx && t >= a + kPast) rows(p.dx, t - kPast).put(dxx);
  };
  int64_t t = a;
  for (; t < min(b, a + kPast); ++t) edge(t);
  Rows x = rows(in, t), dz = rows(p.dy, t), dx = rows(p.dx, t - kPast);
  for (; t + kGroup <= b; t += kGroup) {
    Row xs[kGroup], dzs[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) xs[i] = x.load(), dzs[i] = dz.load(), x.next(), dz.next();
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float dxx[kVector];
      g.next(xs[i], dzs[i], true, true, dxx);
      if (wants_dx) dx.put(dxx), dx.next();
    }
  }
  for (; t < b; ++t) edge(t);
  if (wants_dx || wants_initial)
    for (; t < b + kPast; ++t) edge(t);
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 3) backward_kernel(const __grid_constant__ Params p) {
  constexpr int kChannels = 32 * kVector;
  __shared__ float sums[kWarps][kSums][kChannels];
  const Conv& c = p.conv;
  const unsigned tile = blockIdx.x % p.tiles, block = blockIdx.x / p.tiles, warp = threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32) * kVector;
  const int64_t d = static_cast<int64_t>(tile) * kChannels + lane;
  const int64_t first = (static_cast<int64_t>(block) * kWarps + warp) * p.run, stop = min(first + p.run, c.tokens());
  wait_for_stream();
  Gradients<T, kVector> g{};
  g.first = kVector == 1 ? kTaps - static_cast<int>(c.width()) : 0, g.silu = c.silu;
  if (d < c.channels() && first < stop) {
    ConvWeights<kVector> weights;
    weights.fetch(c.weight, c.bias, d);
    weights.values(c.weight, c.bias, g.w, g.bias);
    const auto token = static_cast<unsigned>(first);
    const int64_t n = present(c.cu_seqlens) ? c.packed_sequence_of(first) : token / static_cast<unsigned>(c.x.shape[1]);
    for (ConvPieces i(c, first, stop, n); i.next();) backward_tokens(p, i.s, i.a, i.b, d, g);
    if (present(p.dx) && present(c.cu_seqlens)) {
      int64_t end = max(first, c.end());
      for (Walk<T, kVector> dx(p.dx, {}, end, d); end < stop; ++end, dx.next()) dx.put({});
    }
  }
  if (!p.sums) return;
#pragma unroll
  for (int j = 0; j < kSums; ++j)
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[warp][j][lane + i] = g.sums[j][i];
  __syncthreads();  // the sums of all warps are in shared memory
  for (unsigned i = threadIdx.x; i < kSums * kChannels; i += kThreads) {
    const unsigned j = i / kChannels, channel = i % kChannels;
    const int64_t to = static_cast<int64_t>(tile) * kChannels + channel;
    float sum = 0;
    for (int from = 0; from < kWarps; ++from) sum += sums[from][j][channel];
    if (to < c.channels()) p.sums[(static_cast<int64_t>(block) * kSums + j) * c.channels() + to] = sum;
  }
}

// Adds the blocks in order, a channel a thread.
__global__ void sum_kernel(const __grid_constant__ Params p) {
  const int64_t d = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, D = p.conv.channels();
  const int first = kTaps - static_cast<int>(p.conv.width()), j = static_cast<int>(blockIdx.y);
  const kda_tensor& to = j < kTaps ? p.dweight : p.dbias;
  if (d >= D || j < first || !present(to)) return;
  wait_for_stream();
  float sum = 0;
  for (int64_t block = 0; block < p.blocks; ++block) sum += p.sums[(block * kSums + j) * D + d];
  static_cast<float*>(to.data)[d * to.stride[0] + (j < kTaps ? j - first : 0)] = sum;
}

// Passes on the gradient of the state of a sequence without tokens.
__global__ void empty_kernel(const __grid_constant__ Params p) {
  const int64_t n = blockIdx.x, d = blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  wait_for_stream();
  if (d >= p.conv.channels() || p.conv.span(n).length > 0) return;
  for (int64_t e = 0; e < p.d_initial.shape[2]; ++e) {
    const float x = present(p.d_final) ? value_at(p.d_final, place_of(p.d_final, n, d, e)) : 0.0f;
    store_value(p.d_initial, place_of(p.d_initial, n, d, e), x);
  }
}

void launch_tokens(const kda_exec& exec, const Params& p, bool wide) {
  const dim3 blocks(p.blocks * p.tiles);
  if (p.blocks == 0) return;
  if (!wide) return launch<backward_kernel<AnyElement, 1>>(exec, blocks, kThreads, 0, p);
  switch (p.conv.x.dtype) {
    case KDA_F32: return launch<backward_kernel<float, 4>>(exec, blocks, kThreads, 0, p);
    case KDA_BF16: return launch<backward_kernel<__nv_bfloat16, 4>>(exec, blocks, kThreads, 0, p);
    default: return launch<backward_kernel<__half, 4>>(exec, blocks, kThreads, 0, p);
  }
}

int64_t run_of(const ConvDims& d) { return std::max(kMinRun, divide_up(d.B * d.T, kMaxRuns)); }
int64_t blocks_of(const ConvDims& d) { return divide_up(divide_up(d.B * d.T, run_of(d)), kWarps); }

}  // namespace

void conv_backward(const ConvBackwardProblem& p) {
  const kda_conv_backward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  Params q{};
  q.conv = conv_of(p);
  q.dy = a.dy, q.d_final = a.d_final_state, q.dx = a.dx, q.d_initial = a.d_initial_state;
  q.dweight = a.dweight, q.dbias = a.dbias;
  q.sums = present(a.dweight) || present(a.dbias) ? static_cast<float*>(a.exec.workspace) : nullptr;
  q.run = run_of(p), q.blocks = static_cast<unsigned>(blocks_of(p));
  bool wide = four_wide_weights(a.weight, a.bias);
  for (const kda_tensor* t : {&a.x, &a.x1, &a.x2, &a.dy, &a.dx}) wide = wide && (!present(*t) || four_wide_rows(*t));
  q.tiles = static_cast<unsigned>(divide_up(p.D, wide ? 128 : 32));
  launch_tokens(a.exec, q, wide);
  const auto channels = static_cast<unsigned>(divide_up(p.D, 128));
  if (present(a.dweight) || present(a.dbias)) launch<sum_kernel>(a.exec, dim3(channels, kSums), 128, 0, q);
  if (p.N == 0 || !present(a.d_initial_state) || (p.T > 0 && !present(a.cu_seqlens))) return;
  launch<empty_kernel>(a.exec, dim3(static_cast<unsigned>(p.N), channels), 128, 0, q);
}

const char* conv_backward_why_not(const ConvBackwardProblem& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (p.D > int64_t{65535} * 128) return "takes at most 65535 times 128 channels";
  return std::max({p.B * p.T, p.N, blocks_of(p) * divide_up(p.D, 32)}) < int64_t{1} << 31
             ? nullptr
             : "takes at most 2^31 tokens, sequences, or blocks";
}

uint64_t conv_backward_workspace(const ConvBackwardProblem& p) {
  return present(p.args.dweight) || present(p.args.dbias) ? sizeof(float) * blocks_of(p) * kSums * p.D : 0;
}

}  // namespace kda::cuda
