// The second kernel of cuda_prefill_chunk: a warp takes 16 value columns of a head through all chunks of a sequence,
// with the state in its registers. With images of chunks (chunk_image.h), per chunk of 32 tokens:
//   R = V - kG S    U = T R    O = qG S + Aqk U    S <- Diag(ell) S + kg^T U          T has beta inside
// All of it is transposed: S^T [16][K] is an accumulator. Two neighbouring tiles of an accumulator, rounded to f16
// and packed, are the first operand of the next product. So only images go through shared memory.
//
// Each column has a power of two as its unit (chunk_columns.h).
//
// The warps of a block, 1 to 8, share images: three stages of shared memory, one barrier a chunk.
#pragma once
#include "cuda/call/states.h"
#include "cuda/prefill/chunk_columns.h"

namespace kda::cuda {

constexpr int kMostWarps = 8, kStages = 3;

// Starts the copy of an image, by all kWarps warps together: all addresses are a register and a constant.
template <int kK, int kWarps>
__device__ void ask_image_of(unsigned to, const char* from) {
  constexpr int kAtOnce = kWarps * 512, kRounds = Image<kK>::bytes / kAtOnce;
  to += threadIdx.x * 16, from += threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) ptx::copy16(to + i * kAtOnce, from + i * kAtOnce);
  if (threadIdx.x * 16 < Image<kK>::bytes % kAtOnce) ptx::copy16(to + kRounds * kAtOnce, from + kRounds * kAtOnce);
}
template <int kK>
__device__ void ask_image(unsigned to, const char* from) {
  switch (blockDim.x / 32) {
    case 1: ask_image_of<kK, 1>(to, from); break;
    case 2: ask_image_of<kK, 2>(to, from); break;
    case 4: ask_image_of<kK, 4>(to, from); break;
    default: ask_image_of<kK, kMostWarps>(to, from);
  }
}

// S += the product of the rows of `operand` with those of the first 16 tokens, and with those of the others.
template <int kK>
__device__ void add_rows(ColumnState<kK>& state, const unsigned (&first)[4], const unsigned (&second)[4],
                         unsigned operand) {
  constexpr int kPairs = kK / 32;
#pragma unroll
  for (int four = 0; four < kPairs; ++four) {
    uint4 k[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) k[b] = ptx::load_shared4(operand + (b * kPairs + four) * 512);
    float(*S)[4] = state.S + 4 * four;
    ptx::mma<__half>(S[0], first, k[0].x, k[1].x), ptx::mma<__half>(S[1], first, k[0].y, k[1].y);
    ptx::mma<__half>(S[2], first, k[0].z, k[1].z), ptx::mma<__half>(S[3], first, k[0].w, k[1].w);
    ptx::mma<__half>(S[0], second, k[2].x, k[3].x), ptx::mma<__half>(S[1], second, k[2].y, k[3].y);
    ptx::mma<__half>(S[2], second, k[2].z, k[3].z), ptx::mma<__half>(S[3], second, k[2].w, k[3].w);
  }
}

// Applies one chunk. `R` holds V at first, then R. U and O are left, O without `scale`.
template <int kK>
__device__ void apply_chunk(ColumnState<kK>& state, unsigned image, float (&R)[4][4], float (&U)[4][4],
                            float (&O)[4][4]) {
  using In = Image<kK>;
  constexpr int kPairs = kK / 32;
  const unsigned own = image + threadIdx.x % 32 * 16;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    unsigned first[4], second[4];
    state.operand(first, 2 * pair), state.operand(second, 2 * pair + 1);
    uint4 k[4], q[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      k[b] = ptx::load_shared4(own + In::kG + (b * kPairs + pair) * 512);
      q[b] = ptx::load_shared4(own + In::qG + (b * kPairs + pair) * 512);
    }
#pragma unroll
    for (int b = 0; b < 4; ++b)
      ptx::mma<__half>(R[b], first, k[b].x, k[b].y), ptx::mma<__half>(O[b], first, q[b].x, q[b].y);
#pragma unroll
    for (int b = 0; b < 4; ++b)
      ptx::mma<__half>(R[b], second, k[b].z, k[b].w), ptx::mma<__half>(O[b], second, q[b].z, q[b].w);
  }
  add_triangle(U, R, own + In::T);
  bool finite = true;
#pragma unroll
  for (int e = 0; e < 16; ++e) finite &= fabsf(U[e / 4][e % 4]) <= kMostValue;
  const bool all_finite = __all_sync(kAll, finite);
  if (!all_finite) mend<true>(U, R, own + In::T), mend<false>(O, U, own + In::Aqk);
  unsigned first[4], second[4];  // tokens 0 .. 15, and the others
  pack_tiles(first, U[0], U[1]), pack_tiles(second, U[2], U[3]);
  state.decay(image + In::ell);
  add_rows<kK>(state, first, second, own + In::kg);
  if (all_finite) add_triangle(O, U, own + In::Aqk);
}

// Images of a sequence's chunks, one after another, in stages of shared memory. step: bytes from a chunk's image to
// that of the chunk behind it. kReversed: the first image is the last chunk's.
template <int kK, bool kReversed>
class ImageStages {
 public:
  __device__ ImageStages(const char* first, int64_t step, unsigned count, unsigned shared)
      : next_(first), step_(step), left_(count), shared_(shared), to_(shared), at_(shared) {}

  __device__ void ask() {
    if (left_ > 0) --left_, ask_image<kK>(to_, next_), next_ += kReversed ? -step_ : step_, to_ = after(to_);
    ptx::commit_copies();
  }
  // Waits for the next image, and starts the copy of the one behind that which is under way.
  __device__ unsigned take() {
    ptx::wait_for_copies<1>();
    __syncthreads();  // the image is in shared memory, and all reads of the one before are done
    ask();
    const unsigned image = at_;
    at_ = after(at_);
    return image;
  }

 private:
  static constexpr unsigned kBytes = Image<kK>::bytes;
  __device__ unsigned after(unsigned stage) const {
    return stage == shared_ + (kStages - 1) * kBytes ? shared_ : stage + kBytes;
  }

  const char* next_;
  int64_t step_;
  unsigned left_, shared_, to_, at_;
};

// The lane's four columns of a tensor of values, in a chunk's tokens token, token + 8, .. kPlain: in bf16, with rows at
// multiples of 8 bytes.
template <bool kPlain>
struct ChunkRows {
  char* first;  // nullptr: absent
  uint32_t stride;
  int32_t dtype;
  bool aligned;

  __device__ ChunkRows(const View& view, int32_t dtype_, bool aligned_, unsigned b, unsigned t, unsigned hv, unsigned v)
      : stride(view.stride1), dtype(kPlain ? KDA_BF16 : dtype_), aligned(kPlain || aligned_) {
    first = view.data ? view.at(b, t + threadIdx.x % 32 / 4, hv) + (v + threadIdx.x % 4 * 4) * size_of(dtype) : nullptr;
  }
  __device__ char* row(int t) const { return first + uint64_t{stride} * (t * 8u); }
  __device__ void go_on() { first += uint64_t{stride} * unsigned{kRows}; }
  __device__ void go_back() { first -= uint64_t{stride} * unsigned{kRows}; }
  // `left`: tokens from the lane's first on.
  __device__ void load(uint4 (&raw)[4], int left) const {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      raw[t] = {};
      if (t * 8 < left) raw[t] = load_values(row(t), dtype == KDA_F32, aligned);
    }
  }
  __device__ void store(const float (&tiles)[4][4], int left) const {
#pragma unroll
    for (int t = 0; t < 4; ++t) store_values(row(t), tiles[t], dtype, t * 8 < left, aligned);
  }
};

// Where states are between passes, [N][HV][V][K] in f32, and what else a launch is told.
struct ScanPlaces {
  TypedView v_new, between;
  bool wide, h_wide;  // states, and those in h, have four channels an access
  bool aligned;       // rows of v, o and v_new lie at multiples of 8 bytes

  // Whether all of them are in bf16.
  __device__ bool plain(const Tokens& x) const {
    return aligned && x.qkv_dtype == KDA_BF16 && (!x.o.data || x.o_dtype == KDA_BF16) &&
           (!v_new.data || v_new.dtype == KDA_BF16);
  }
};

// Takes a state through chunks first .. end - 1 of a sequence. left: tokens from the lane's first on. keep(c) stores
// the state before chunk c where it is wanted.
template <int kK, bool kPlain, class Keep>
__device__ void scan_chunks(ColumnState<kK>& state, unsigned first, unsigned end, ImageStages<kK, false>& images,
                            ChunkRows<kPlain> v, ChunkRows<kPlain> o, ChunkRows<kPlain> v_new, int left,
                            const Keep& keep) {
  const unsigned lane = threadIdx.x % 32;
  uint4 raw[4];
  v.load(raw, left);
#pragma unroll 1
  for (unsigned c = first; c < end; ++c, left -= kRows) {
    if (c % 2 == 0) keep(c);
    float R[4][4], U[4][4] = {}, O[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) take_values(R[t], raw[t], v.dtype);
    v.go_on(), v.load(raw, left - kRows);
    state.choose_exponents(R);
    const float down[2] = {power_of_two(-state.x[0]), power_of_two(-state.x[1])};
    const float up[2] = {power_of_two(state.x[0]), power_of_two(state.x[1])};
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) R[t][e] *= down[e / 2];

    const unsigned image = images.take();
    apply_chunk(state, image, R, U, O);

#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float2 scale = ptx::load_shared_f32x2(image + Image<kK>::scale + (t * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) O[t][e] *= (e % 2 ? scale.y : scale.x) * up[e / 2], U[t][e] *= up[e / 2];
    }
    if (o.first) o.store(O, left), o.go_on();
    if (v_new.first) v_new.store(U, left), v_new.go_on();
  }
}

template <int kK>
__global__ void __launch_bounds__(kMostWarps * 32)
    scan_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                const __grid_constant__ States states, const __grid_constant__ ScanPlaces places,
                const __grid_constant__ Pass pass, const Blocks blocks, const char* images) {
  extern __shared__ float4 dynamic[];
  using In = Image<kK>;
  const kda_forward_args& a = p.args;
  const Place at(blocks);
  const unsigned hv = pass.first_head + at.hv, columns = blockDim.x / 32 * kWarpColumns, v0 = at.tile * columns;
  const auto zero_outputs = [&](int64_t b, int64_t t, int64_t end) {
    if (!x.o.data) return;
    const unsigned v = v0 + threadIdx.x % columns;
    for (t += threadIdx.x / columns; t < end; t += 2)  // two threads for each column
      store_element(x.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), hv) + v * size_of(x.o_dtype), x.o_dtype,
                    0);
  };
  wait_for_stream();
  if (at.n >= blocks.rows) return;  // the grid's last rows
  if (at.n == p.N) {
    if (pass.first == 0) zero_outputs(0, end_of_sequences(a.in.cu_seqlens, p.N, p.T), p.T);
    return;
  }
  const Sequence s = sequence_at(p, a.in, a.states, at.n);
  if (!s.live) {
    if (pass.first == 0) zero_outputs(s.b, s.t0, s.t0 + s.length);
    return;
  }
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0);
  const Cuts cuts = pass.cuts_of(s);
  const unsigned first = max(pass.first, cuts.first()), end = pass.end_of(cuts);
  if (pass.first && pass.first >= end) return;  // another pass had its last chunk

  const unsigned v = v0 + threadIdx.x / 32 * kWarpColumns;
  const int64_t row = int64_t{pass.first_row(s)} + first - pass.first;  // of its first image here
  ImageStages<kK, false> in(images + (row * pass.heads + at.hv) * int64_t{In::bytes}, pass.heads * int64_t{In::bytes},
                            end - first, ptx::shared_address(dynamic));
  in.ask(), in.ask();

  ColumnState<kK> state;
  const bool v_first = a.in.state_layout == KDA_STATE_V_FIRST, h_v_first = h_layout(a) == KDA_STATE_V_FIRST;
  const auto place = [&](const TypedView& t, int64_t row, bool of_h = false) {
    return ColumnPlace(t, of_h ? h_v_first : v_first, of_h ? places.h_wide : places.wide, row, hv, v);
  };
  const auto between = [&] { return ColumnPlace(places.between, true, true, s.n, hv, v); };
  if (pass.first) state.load(between());
  else if (s.initial) state.load(place(states.h0, s.slot));
  const unsigned first_h = states.kept[kBefore].data ? first_h_row(p, at.n) : 0;
  const auto keep = [&](unsigned t) {
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
      const TypedView& to = states.kept[i];
      const int64_t row = to.data ? row_of(static_cast<Kept>(i), p, s, t, first_h) : -1;
      if (row >= 0) state.store(place(to, row, i == kBefore));
    }
  };

  // An opening is scanned by itself.
  const auto scan = [&]<bool kPlain>() {
#pragma unroll 1
    for (unsigned c = first, stop; c < end; c = stop) {
      stop = cuts.in_opening(c) ? min(end, Cuts::kBoth) : end;
      const unsigned t = cuts.token(c);
      const auto rows_of = [&](const View& view, int32_t dtype) {
        return ChunkRows<kPlain>(view, dtype, places.aligned, b, t0 + t, hv, v);
      };
      scan_chunks<kK, kPlain>(state, c, stop, in, rows_of(x.v, x.qkv_dtype), rows_of(x.o, x.o_dtype),
                              rows_of(places.v_new, places.v_new.dtype),
                              static_cast<int>(cuts.behind(c) - t) - static_cast<int>(threadIdx.x % 32 / 4),
                              [&, before = c * kRows - t](unsigned i) { keep(i * kRows - before); });
    }
  };
  if (places.plain(x)) scan.template operator()<true>();
  else scan.template operator()<false>();
  if (end < cuts.end) state.store(between());
  else keep(cuts.length);
}

}  // namespace kda::cuda
