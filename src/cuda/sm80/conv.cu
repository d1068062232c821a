// The causal convolution (math.md 7.6), for sm_80 and newer:
//   y_t = bias + sum_j w_j xx_(t+j),  j = 0 .. W-1,  then y_t sigmoid(y_t)        xx = state ++ x
//
// Bytes: x is read and y written; a state, 2 (W-1) elements a channel and sequence, counts where sequences are short.
// Channels are neighbours in memory and in a warp. The grid has blocks of two kinds:
//
//   heads   128 channels of one sequence, a channel a thread: its first W-1 tokens, which are those that read the state, and
//           its final state. One thread reads and writes a channel of a slot, so states roll in place without a second
//           launch or a barrier. Calls of one token (decode) have nothing else: all loads of a thread are in flight
//           together, the state's behind its index.
//   bodies  4 warps with the weights of their channels in shared memory, `run` tokens a warp, of however many sequences: all
//           other tokens, a sliding window in registers, and the rows that belong to nobody. A thread has 4 channels,
//           where D, strides and addresses allow it, and kGroup tokens in flight.
//
// Every y comes from convolve(), and no sum is cut: bits depend on neither kind, nor on `run`.
#include "cuda/conv.h"
#include "cuda/cuda.h"
#include "cuda/runtime.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kGroup = 8;      // tokens a thread asks for at once
constexpr int kMaxGroups = 8;  // of a warp's run: 3 of 64 rows are read twice
constexpr int kFullSm = 32;    // warps of bodies that an SM should have before they get longer runs

struct Params {
  Conv conv;
  kda_tensor final_state;
  unsigned heads, head_tiles;  // blocks; tiles of kThreads channels
  unsigned tiles;              // of 32 kVector channels
  unsigned run;                // tokens of a warp
};

// kVector channels of a row, in one access.
template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Channels {
  T x[kVector];
};

__device__ void head(const Params& p, unsigned block) {
  const Conv& c = p.conv;
  const int64_t n = block / p.head_tiles, d = static_cast<int64_t>(block % p.head_tiles) * kThreads + threadIdx.x;
  if (d >= c.channels()) return;
  const int64_t keep = c.width() - 1;
  const bool rolls = present(p.final_state);

  // Everything but the state is asked for before anybody waits for the slot.
  const Sequence span = c.span(n);
  const int tokens = static_cast<int>(min(span.length, keep));
  ConvWeights weights;
  ConvRows rows[kTaps];  // of the tokens, and last those of the final state
  ConvTaps taps[kTaps];
  weights.fetch(c.weight, c.bias, d);
  const auto fetch = [&](int i, int64_t row, int64_t count) {
    rows[i] = rows_until(c.parents, keep, n, row, count);
    taps[i].fetch(c.x, rows[i], span, d);
  };
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t)
    if (t < tokens) fetch(t, t + keep, keep + 1);
  if (rolls) fetch(kTaps - 1, span.length - 1 + keep, keep);

  const Sequence s = c.sequence(n);
  if (!s.live) {
    for (int t = 0; t < tokens; ++t) store_element(c.y, offset(c.y, s.b, s.t0 + t, d), 0);
    return;
  }
#pragma unroll
  for (int i = 0; i < kTaps; ++i)
    if (s.initial && (i < kTaps - 1 ? i < tokens : rolls)) taps[i].fetch_state(c.state, rows[i], s.slot, d);
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t)
    if (t < tokens) store_element(c.y, offset(c.y, s.b, s.t0 + t, d), convolved(c, weights, taps[t], c.silu));
  if (rolls) roll(c.x, c.state, taps[kTaps - 1], p.final_state, s.slot, d);
}

// Tokens a .. b-1 of a sequence, a >= W-1: none of their taps is in the state. The last group may have fewer than
// kGroup of them: its last row is loaded in the place of the others.
template <bool kSilu, class T, int kVector>
__device__ void convolve_tokens(const Conv& c, const Sequence& s, int64_t a, int64_t b, int64_t d,
                                const float (&w)[kTaps][kVector], const float (&bias)[kVector]) {
  using Row = Channels<T, kVector>;
  const int64_t x_step = c.x.stride[1], y_step = c.y.stride[1];
  const T* from = static_cast<const T*>(c.x.data) + offset(c.x, s.b, s.t0 + a, d);
  T* to = static_cast<T*>(c.y.data) + offset(c.y, s.b, s.t0 + a, d);
  float xx[kTaps - 1 + kGroup][kVector];
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    const int age = kTaps - 1 - j;
    const Row row = age < c.width() ? *reinterpret_cast<const Row*>(from - age * x_step) : Row{};
#pragma unroll
    for (int i = 0; i < kVector; ++i) xx[j][i] = static_cast<float>(row.x[i]);
  }
  const auto group = [&](auto whole, int count) {
    Row rows[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      rows[g] = *reinterpret_cast<const Row*>(from);
      if (whole || g + 1 < count) from += x_step;
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      Row y;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        xx[kTaps - 1 + g][i] = static_cast<float>(rows[g].x[i]);
        const float taps[kTaps] = {xx[g][i], xx[g + 1][i], xx[g + 2][i], xx[g + 3][i]};
        const float weights[kTaps] = {w[0][i], w[1][i], w[2][i], w[3][i]};
        y.x[i] = static_cast<T>(convolve(weights, bias[i], taps, kSilu));
      }
      if (whole || g < count) *reinterpret_cast<Row*>(to) = y;
      to += y_step;
    }
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j)
#pragma unroll
      for (int i = 0; i < kVector; ++i) xx[j][i] = xx[kGroup + j][i];
  };
  int left = static_cast<int>(b - a);
  for (; left >= kGroup; left -= kGroup) group(std::true_type(), kGroup);
  if (left > 0) group(std::false_type(), left);
}

template <class T, int kVector>
__device__ void zero_tokens(const kda_tensor& y, const Sequence& s, int64_t a, int64_t b, int64_t d) {
  T* to = static_cast<T*>(y.data) + offset(y, s.b, s.t0, d);
  for (; a < b; ++a) *reinterpret_cast<Channels<T, kVector>*>(to + a * y.stride[1]) = {};
}

template <class T, int kVector>
__device__ void body(const Params& p, unsigned block) {
  constexpr int kChannels = 32 * kVector;
  __shared__ float weights[kTaps + 1][kChannels];  // the last row is the bias
  const Conv& c = p.conv;
  const int64_t d0 = static_cast<int64_t>(block % p.tiles) * kChannels;
  if (threadIdx.x < kChannels && d0 + threadIdx.x < c.channels()) {
    ConvWeights mine;
    mine.fetch(c.weight, c.bias, d0 + threadIdx.x);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) weights[j][threadIdx.x] = value_of(c.weight.dtype, mine.raw[j]);
    weights[kTaps][threadIdx.x] = value_of(c.bias.dtype, mine.raw_bias);
  }
  __syncthreads();  // the weights are in shared memory
  const int first_channel = static_cast<int>(threadIdx.x % 32) * kVector;
  const int64_t d = d0 + first_channel;
  if (d >= c.channels()) return;
  float w[kTaps][kVector], bias[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) w[j][i] = weights[j][first_channel + i];
    bias[i] = weights[kTaps][first_channel + i];
  }

  const unsigned first = (block / p.tiles * kWarps + threadIdx.x / 32) * p.run;
  const int64_t stop = min(static_cast<int64_t>(first) + p.run, c.tokens());
  if (first >= stop) return;
  const int64_t n = present(c.cu_seqlens) ? c.packed_sequence_of(first) : first / static_cast<unsigned>(c.x.shape[1]);
  for (ConvPieces i(c, first, stop, n); i.next();) {
    const int64_t a = max(i.a, c.width() - 1);  // those before are the heads'
    if (a >= i.b) continue;
    if (i.s.live && c.silu) convolve_tokens<true, T>(c, i.s, a, i.b, d, w, bias);
    else if (i.s.live) convolve_tokens<false, T>(c, i.s, a, i.b, d, w, bias);
    else zero_tokens<T, kVector>(c.y, i.s, a, i.b, d);
  }
  if (present(c.cu_seqlens)) zero_tokens<T, kVector>(c.y, {}, max(static_cast<int64_t>(first), c.end()), stop, d);
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 5) conv_kernel(const __grid_constant__ Params p) {
  if (blockIdx.x < p.heads) head(p, blockIdx.x);
  else body<T, kVector>(p, blockIdx.x - p.heads);
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that 4-wide accesses may touch.
bool four_wide(const kda_tensor& t) {
  return t.shape[2] % 4 == 0 && t.stride[0] % 4 == 0 && t.stride[1] % 4 == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % (4 * dtype_size(t.dtype)) == 0;
}

template <class T>
void launch(const ConvProblem& p) {
  Params q{conv_of(p), p.args.final_state, 0, 0, 0, 0};
  const bool wide = four_wide(q.conv.x) && four_wide(q.conv.y);
  q.head_tiles = static_cast<unsigned>(divide_up(p.D, kThreads));
  q.heads = static_cast<unsigned>(p.N) * q.head_tiles;
  q.tiles = static_cast<unsigned>(divide_up(p.D, wide ? 128 : 32));
  // Without cu_seqlens the heads may have been all there is to do.
  const int64_t tokens = present(q.conv.cu_seqlens) || p.T >= p.W ? p.B * p.T : 0;
  const int64_t full = int64_t{kFullSm} * multiprocessors(p.args.exec.device_id);
  q.run = kGroup * static_cast<unsigned>(std::clamp<int64_t>(tokens * q.tiles / (full * kGroup), 1, kMaxGroups));
  const unsigned blocks = q.heads + static_cast<unsigned>(divide_up(divide_up(tokens, q.run), kWarps)) * q.tiles;
  if (blocks == 0) return;
  const auto kernel = wide ? conv_kernel<T, 4> : conv_kernel<T, 1>;
  kernel<<<blocks, kThreads, 0, stream_of(p.args.exec)>>>(q);
  KDA_CUDA(cudaGetLastError());
}

}  // namespace

const char* conv_why_not(const ConvProblem& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  const int64_t heads = p.N * divide_up(p.D, kThreads);
  const int64_t bodies = (divide_up(p.B * p.T, kGroup * kWarps) + 1) * divide_up(p.D, 32);
  if (p.B * p.T >= int64_t{1} << 31) return "takes at most 2^31 tokens";
  return heads + bodies < (int64_t{1} << 31) ? nullptr : "takes at most 2^31 blocks of 32 tokens and 32 channels";
}

void conv(const ConvProblem& p) {
  const DeviceGuard device(p.args.exec.device_id);
  switch (p.args.x.dtype) {
    case KDA_F32: return launch<float>(p);
    case KDA_BF16: return launch<__nv_bfloat16>(p);
    default: return launch<__half>(p);
  }
}

}  // namespace kda::cuda
