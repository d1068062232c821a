// The second kernel of cuda_prefill_chunk: a warp takes 16 value columns of a head through all chunks of a sequence,
// with the state in its registers. With images of chunks (chunk_image.h), per chunk of 32 tokens:
//   R = V - kG S    U = T R    O = qG S + Aqk U    S <- Diag(ell) S + kg^T U          T has beta inside
// All of it is transposed: S^T [16][K] is an accumulator. Two neighbouring tiles of an accumulator, rounded to f16
// and packed, are the first operand of the next product. So only images go through shared memory.
//
// Range of f16: each column has a power of two 2^x, and its registers hold V, S, R, U and O times 2^-x. x is a
// multiple of 16. It is chosen anew in each chunk, so that the largest number of the column, of S before the chunk
// and of V in it, is within [2^-9, 2^7). So x seldom changes, and when it does, S is rescaled exactly. Then |R| and
// |U| stay below 2^15 with |k| <= 1.
//
// The warps of a block, 1 to 8, share images: three stages of shared memory, one barrier a chunk.
#pragma once
#include "cuda/call/state_rows.h"
#include "cuda/call/states.h"
#include "cuda/prefill/chunk_image.h"
#include "cuda/ptx/sm80.h"

namespace kda::cuda {

constexpr int kWarpColumns = 16, kMostWarps = 8, kStages = 3;
constexpr int kExponentStep = 16, kMostSteps = 7;
constexpr float kMostFloat = 3.4028235e38f;

// Lane 4 i + j has the warp's columns row_column() and row_column() + 2, which are rows i and i + 8 of S^T. So
// columns 4 j .. 4 j + 3 of a token are in one lane when V is transposed on its way in, and O on its way out.
__device__ inline unsigned row_column() { return threadIdx.x % 32 / 8 * 4 + threadIdx.x / 4 % 2; }

// 2^e.
__device__ inline float power_of_two(int e) { return __int_as_float((127 + e) << 23); }

// ptx::transposed() for pairs of f32: their halves one after the other.
__device__ inline float2 transposed(float x, float y) {
  const unsigned a = __float_as_uint(x), b = __float_as_uint(y);
  const unsigned low = ptx::transposed(__byte_perm(a, b, 0x5410)), high = ptx::transposed(__byte_perm(a, b, 0x7632));
  return {__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632))};
}

// Eight tokens of the warp's columns: in memory, where a lane has four columns of its token, and as tiles of
// accumulators. `aligned`: at multiples of 8 bytes.
__device__ inline uint4 load_values(const char* from, bool f32, bool aligned) {
  uint4 x{};
  if (aligned) {
    const uint2 first = *reinterpret_cast<const uint2*>(from);
    x.x = first.x, x.y = first.y;
    if (f32) {
      const uint2 second = *reinterpret_cast<const uint2*>(from + 8);
      x.z = second.x, x.w = second.y;
    }
  } else if (f32) {
    const auto* all = reinterpret_cast<const unsigned*>(from);
    x = make_uint4(all[0], all[1], all[2], all[3]);
  } else {
    const auto* all = reinterpret_cast<const uint16_t*>(from);
    x.x = all[0] | static_cast<unsigned>(all[1]) << 16, x.y = all[2] | static_cast<unsigned>(all[3]) << 16;
  }
  return x;
}
__device__ inline void take_values(float (&tile)[4], const uint4& raw, int32_t dtype) {
  if (dtype == KDA_F32) {
    const float2 first = transposed(__uint_as_float(raw.x), __uint_as_float(raw.y));
    const float2 second = transposed(__uint_as_float(raw.z), __uint_as_float(raw.w));
    tile[0] = first.x, tile[1] = first.y, tile[2] = second.x, tile[3] = second.y;
    return;
  }
  const unsigned first = ptx::transposed(raw.x), second = ptx::transposed(raw.y);
  if (dtype == KDA_BF16) {
    tile[0] = __uint_as_float(first << 16), tile[1] = __uint_as_float(first & 0xffff0000u);
    tile[2] = __uint_as_float(second << 16), tile[3] = __uint_as_float(second & 0xffff0000u);
  } else {
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(first));
    const float2 y = __half22float2(reinterpret_cast<const __half2&>(second));
    tile[0] = x.x, tile[1] = x.y, tile[2] = y.x, tile[3] = y.y;
  }
}
// `real`: the lane's token exists.
__device__ inline void store_values(char* to, const float (&tile)[4], int32_t dtype, bool real, bool aligned) {
  if (dtype == KDA_F32) {
    const float2 first = transposed(tile[0], tile[1]), second = transposed(tile[2], tile[3]);
    if (!real) return;
    if (aligned) {
      reinterpret_cast<float2*>(to)[0] = first, reinterpret_cast<float2*>(to)[1] = second;
    } else {
      auto* all = reinterpret_cast<float*>(to);
      all[0] = first.x, all[1] = first.y, all[2] = second.x, all[3] = second.y;
    }
    return;
  }
  const auto pack = [&]<class T>() {
    const unsigned first = ptx::pack<T>(tile[0], tile[1]), second = ptx::pack<T>(tile[2], tile[3]);
    return make_uint2(ptx::transposed(first), ptx::transposed(second));
  };
  const uint2 x = dtype == KDA_BF16 ? pack.template operator()<__nv_bfloat16>() : pack.template operator()<__half>();
  if (!real) return;
  if (aligned) {
    *reinterpret_cast<uint2*>(to) = x;
  } else {
    auto* all = reinterpret_cast<uint16_t*>(to);
    all[0] = static_cast<uint16_t>(x.x), all[1] = static_cast<uint16_t>(x.x >> 16);
    all[2] = static_cast<uint16_t>(x.y), all[3] = static_cast<uint16_t>(x.y >> 16);
  }
}

// Where a state's columns are in memory, from the lane's first on.
struct ColumnPlace {
  char* first;
  uint64_t column, channel;  // bytes from one to the next
  int32_t dtype;
  bool wide;  // channels side by side, four an access

  __device__ ColumnPlace(const TypedView& t, bool v_first, bool wide, int64_t row, unsigned hv, unsigned v)
      : column(v_first ? t.stride2 : size_of(t.dtype)),
        channel(v_first ? size_of(t.dtype) : t.stride2),
        dtype(t.dtype),
        wide(wide) {
    first = t.at(static_cast<unsigned>(row), hv, 0) + (v + row_column()) * column + threadIdx.x % 4 * 4 * channel;
  }
};

// Two neighbouring tiles of an accumulator as an operand.
__device__ inline void pack_tiles(unsigned (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = ptx::pack<__half>(first[0], first[1]), a[1] = ptx::pack<__half>(first[2], first[3]);
  a[2] = ptx::pack<__half>(second[0], second[1]), a[3] = ptx::pack<__half>(second[2], second[3]);
}

// to += from A^T, over tokens; A is triangular.
__device__ inline void add_triangle(float (&to)[4][4], const float (&from)[4][4], unsigned A) {
  unsigned first[4], second[4];
  pack_tiles(first, from[0], from[1]), pack_tiles(second, from[2], from[3]);
  uint4 x[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) x[b] = ptx::load_shared4(A + b * 512);
#pragma unroll
  for (int b = 0; b < 4; ++b) ptx::mma<__half>(to[b], first, x[b].x, x[b].y);
#pragma unroll
  for (int b = 2; b < 4; ++b) ptx::mma<__half>(to[b], second, x[b].z, x[b].w);
}

// The same where `from` has numbers that f16 cannot represent: they affect only their own token and those after it.
// (In a product 0 times NaN would reach those before.)
constexpr float kMostValue = 65504;
template <bool kFresh>  // `to` was 0
__device__ void mend(float (&to)[4][4], const float (&from)[4][4], unsigned A) {
  float rest[4][4];
  int first[2] = {kRows, kRows};  // the first such token in the lane's columns
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool fits = fabsf(from[t][e]) <= kMostValue;
      rest[t][e] = fits ? from[t][e] : 0.0f;
      if (!fits) first[e / 2] = min(first[e / 2], t * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2);
      if (kFresh) to[t][e] = 0;
    }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    for (int lane = 1; lane < 4; lane *= 2) first[r] = min(first[r], __shfl_xor_sync(kAll, first[r], lane));
  add_triangle(to, rest, A);
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (t * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2 >= first[e / 2]) to[t][e] = __int_as_float(0x7fc00000);
}

// S^T of a warp: tiles 2 s and 2 s + 1 hold channels 16 s + 4 j and + 1, and + 2 and + 3.
template <int kK>
struct ColumnState {
  static constexpr int kSteps = kK / 16;
  float S[kK / 8][4] = {};
  int x[2] = {};  // of the lane's columns: the registers hold S 2^-x

  template <class T>
  __device__ void load_as(const ColumnPlace& at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const char* from = at.first + r * 2 * at.column + s * 16 * (at.wide ? sizeof(T) : at.channel);
        float four[4];
        if (at.wide) {
          const float4 whole = load_four(reinterpret_cast<const T*>(from));
          four[0] = whole.x, four[1] = whole.y, four[2] = whole.z, four[3] = whole.w;
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) four[e] = static_cast<float>(*reinterpret_cast<const T*>(from + e * at.channel));
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) S[2 * s + e / 2][2 * r + e % 2] = four[e];
      }
  }
  template <class T>
  __device__ void store_as(const ColumnPlace& at) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        char* to = at.first + r * 2 * at.column + s * 16 * (at.wide ? sizeof(T) : at.channel);
        const float back = power_of_two(x[r]);
        const float(&a)[4] = S[2 * s], (&b)[4] = S[2 * s + 1];
        const float four[4] = {a[2 * r] * back, a[2 * r + 1] * back, b[2 * r] * back, b[2 * r + 1] * back};
        if (at.wide) {
          store_four(reinterpret_cast<T*>(to), make_float4(four[0], four[1], four[2], four[3]));
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) *reinterpret_cast<T*>(to + e * at.channel) = static_cast<T>(four[e]);
        }
      }
  }
  __device__ void load(const ColumnPlace& at) {
    if (at.dtype == KDA_F32) load_as<float>(at);
    else load_as<__nv_bfloat16>(at);
  }
  __device__ void store(const ColumnPlace& at) const {
    if (at.dtype == KDA_F32) store_as<float>(at);
    else store_as<__nv_bfloat16>(at);
  }

  // Chooses x for a chunk with these values.
  __device__ void choose_exponents(const float (&V)[4][4]) {
    int change[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float of_S = 0, of_V = 0;
#pragma unroll
      for (int t = 0; t < kK / 8; ++t) of_S = fmaxf(of_S, fmaxf(fabsf(S[t][2 * r]), fabsf(S[t][2 * r + 1])));
#pragma unroll
      for (int t = 0; t < 4; ++t) of_V = fmaxf(of_V, fmaxf(fabsf(V[t][2 * r]), fabsf(V[t][2 * r + 1])));
      if (of_V > kMostFloat) {  // an infinity affects only its own token and those after it
        of_V = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float one = fabsf(V[e / 2][2 * r + e % 2]);
          of_V = one <= kMostFloat ? fmaxf(of_V, one) : of_V;
        }
      }
      int e = max(exponent_of(of_S) + x[r], exponent_of(of_V));
      e = max(e, __shfl_xor_sync(kAll, e, 1)), e = max(e, __shfl_xor_sync(kAll, e, 2));
      // Floored: 2^e is within [2^-9, 2^7) of 2^x.
      const int steps =
          e < kZero / 2 ? 0 : min(max((e + 9 + 1024) / kExponentStep - 1024 / kExponentStep, -kMostSteps), kMostSteps);
      change[r] = steps * kExponentStep - x[r], x[r] += change[r];
    }
    if (!__any_sync(kAll, change[0] | change[1])) return;
    const float half[2] = {power_of_two(-change[0] / 2), power_of_two(-change[1] / 2)};
    multiply(half[0], half[1]), multiply(half[0], half[1]);
  }

  // S <- Diag(ell) S. A number that becomes so small beside the largest of its column that it could be subnormal in
  // memory becomes 0. So a call that goes on from there has the same bits as one that never stopped.
  __device__ void decay(const unsigned ell) {
    const bool small = __any_sync(kAll, x[0] < 0 || x[1] < 0);
    const int e[2] = {min(x[0], 0), min(x[1], 0)};
    if (small) multiply(power_of_two(e[0]), power_of_two(e[1]));
    only_decay(ell);
    if (small) multiply(power_of_two(-e[0]), power_of_two(-e[1]));
  }
  // The same, however small numbers become.
  __device__ void only_decay(const unsigned ell) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float4 four = ptx::load_shared_f32x4(ell + (s * 16 + threadIdx.x % 4 * 4) * 4);
      const float decays[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& one = S[2 * s + e % 4 / 2][e / 4 * 2 + e % 2];
        one = ptx::multiply_flushed(one, decays[e % 4]);
      }
    }
  }

  // Tiles 2 s and 2 s + 1 as an operand.
  __device__ void operand(unsigned (&a)[4], int s) const { pack_tiles(a, S[2 * s], S[2 * s + 1]); }

  // Multiplies the lane's two columns.
  __device__ void multiply(float first, float second) {
#pragma unroll
    for (int t = 0; t < kK / 8; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[t][e] = ptx::multiply_flushed(S[t][e], e < 2 ? first : second);
  }

 private:
  static constexpr int kZero = -1000;
  __device__ static int exponent_of(float x) { return x > 0 ? (__float_as_int(x) >> 23) - 127 : kZero; }
};

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
  bool wide;       // states of the caller have four channels an access
  bool h_v_first;  // h is backward's own: V-first, with four channels an access, whatever the other states are
  bool aligned;    // rows of v, o and v_new lie at multiples of 8 bytes

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
  const auto b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
  const unsigned end = pass.end_of(s);
  if (pass.first && pass.first >= end) return;  // another pass had its last chunk

  const unsigned v = v0 + threadIdx.x / 32 * kWarpColumns;
  const int64_t row = int64_t{pass.first_row(s)};  // of its first image here
  ImageStages<kK, false> in(images + (row * pass.heads + at.hv) * int64_t{In::bytes}, pass.heads * int64_t{In::bytes},
                            end - pass.first, ptx::shared_address(dynamic));
  in.ask(), in.ask();

  ColumnState<kK> state;
  const bool v_first = a.in.state_layout == KDA_STATE_V_FIRST;
  const auto place = [&](const TypedView& t, int64_t row, bool own = false) {
    return ColumnPlace(t, v_first || own, places.wide || own, row, hv, v);
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
      if (row >= 0) state.store(place(to, row, i == kBefore && places.h_v_first));
    }
  };

  const unsigned t = pass.first * kRows;
  const auto scan = [&]<bool kPlain>() {
    const auto rows_of = [&](const View& view, int32_t dtype) {
      return ChunkRows<kPlain>(view, dtype, places.aligned, b, t0 + t, hv, v);
    };
    scan_chunks<kK, kPlain>(state, pass.first, end, in, rows_of(x.v, x.qkv_dtype), rows_of(x.o, x.o_dtype),
                            rows_of(places.v_new, places.v_new.dtype),
                            static_cast<int>(length - t) - static_cast<int>(threadIdx.x % 32 / 4),
                            [&](unsigned c) { keep(c * kRows); });
  };
  if (places.plain(x)) scan.template operator()<true>();
  else scan.template operator()<false>();
  if (end * kRows < length) state.store(between());
  else keep(length);
}

}  // namespace kda::cuda
