// The mathematics of the wide kernels of backward (math.md 5), which wide_chunk.h and hopper_multiplier.h share. They
// compute all gradients of a chunk of 64 tokens except dv and dh0. Their inputs are the state S before
// the chunk, the gradient dS of the state after it, v_new and dv.
//
// A warp owns 16 channels and all 64 tokens, so it makes decays, operands of scores, sums over tokens and the gate's
// gradient without other warps. They have the layout of accumulators [channel][token]: lane 4 c + j has channels c
// and c + 8, and tokens 8 n + 2 j and 8 n + 2 j + 1. G_i is the sum of log2 gates through token i. R_w is that sum
// through the end of the first half (the anchor) of block w, a block being 8 or 16 tokens:
//   u_i = G_i - R_w(i)    q^ = q 2^u    k^ = k 2^u    kc = k 2^-u                             rounded to bf16, once
//   dA = s tril(dO v_new^T)    B = -strict_tril(dv v_new^T)                                   bf16, in shared memory
//   accQ = s 2^R_0 (S dO^T)    accR = -2^R_0 (S dv^T)    accW = 2^(G_last - R_last) (dS v_new^T)
//   for blocks o from the first on, in rows of blocks >= o: * 2^(R_o - R_o-1);  accQ += kc_o dA^T;  accR += kc_o B^T
//   for blocks o from the last on,  in rows of blocks <= o: * 2^(R_o+1 - R_o);  accW += q^_o dA + k^_o B
//   dq = 2^u accQ    dk = 2^u accR + 2^-u accW    dG = q^ accQ + k^ accR - kc accW
//   dg_t = sum over i >= t of dG_i, plus what comes in from behind the chunk: 2^G_last rowsum(S dS) + sum_i kc_i accW_i
// dG is computed from the same rounded operands as accQ, accR and accW. So what cancels in exact sums of dG cancels
// here, too.
//
// Blocks have 16 tokens where no token decays by more than 2^-7.3 (a bounded gate), else 8. A token's decay counts as
// 2^-25 at least, except in 2^G_last: what lies behind such a decay is below the last f32 digit of what lies before
// it. From anchor to anchor the decay may be 2^-200, which f32 cannot represent, although a token behind the first
// anchor and one before the second may be neighbours. So such factors multiply in two parts.
#pragma once
#include "cuda/call/token.h"
#include "cuda/gate/gate.h"
#include "cuda/ptx/sm80.h"

namespace kda::cuda {

// Two bf16 of a register.
__device__ inline float2 two(unsigned x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }

// Numbers that the compiler does not know: 0, and the mask of a register's upper half. The compiler cannot see that
// results computed from them equal earlier ones. So it computes them again, instead of keeping them in registers for
// which there is no room.
struct Unknown {
  float zero = 0;
  unsigned upper = 0xffff0000u;
};

// A warp's part of a chunk. Memory, a class of the kernel, tells where things are in shared memory:
//   own(x, key, pair)    16 channels of tokens 16 pair .. + 15 of q or k: n = 2 pair with channels c and c + 8, then
//                        the next n
//   norms_of(n)          of each of the lane's two tokens: the factors that make q and k as long as 1
//   scores(matrix, row, piece)   where eight neighbouring elements of dA or B are
//   step(w, c)           where step w > 0 of the warp's channel c may be; with kTakesSteps it is not in registers
enum class Key { kQuery, kKey };
enum class Scores { kdA, kB };
template <class Memory, unsigned kBlockTokens>
class WideWarp {
  using bf16 = __nv_bfloat16;

 public:
  static constexpr unsigned kBlock = kBlockTokens;
  // Tiles of 8 tokens in a chunk and in a block; blocks in a chunk.
  static constexpr int kTiles = kChunk / 8, kOf = kBlock / 8, kBlocks = kTiles / kOf;
  static constexpr bool kClamps = kBlock == 8, kStepsInMemory = Memory::kTakesSteps && kBlock == 8;

  float QR[2 * kTiles][4], W[kTiles][4];  // accQ, accR; accW
  float u[kTiles][4], behind[2];

  __device__ float (&Q(int n))[4] { return QR[n]; }
  __device__ float (&R(int n))[4] { return QR[kTiles + n]; }

  // Computes u, the steps between anchors and the whole decay. log2_gate(n, hh) returns the gates of the lane's two
  // tokens.
  template <class Log2Gate>
  __device__ void decay(const Memory& memory, const Log2Gate& log2_gate) {
    const float further[2] = {j() > 0 ? 1.0f : 0.0f, j() > 1 ? 1.0f : 0.0f};
    float before[2] = {};  // from the last anchor on
    whole_[0] = whole_[1] = 0, deep_ = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        float2 g = log2_gate(n, hh);
        if (kClamps) whole_[hh] += g.x + g.y, g = {most(g.x), most(g.y)};
        float P = g.x + g.y;
        P = fmaf(__shfl_up_sync(kAll, P, 1, 4), further[0], P), P = fmaf(__shfl_up_sync(kAll, P, 2, 4), further[1], P);
        const float total = __shfl_sync(kAll, P, 3, 4);
        float anchor = 0;
        if (kOf == 1) anchor = __shfl_sync(kAll, P, 1, 4);
        else if (n % kOf == 0) anchor = total;
        u[n][2 * hh + 1] = P - anchor, u[n][2 * hh] = P - g.y - anchor;
        if (n % kOf == 0) {
          set_step(memory, n / kOf, hh, before[hh] + anchor);
          before[hh] = total - anchor;
        } else {
          before[hh] += total;
        }
      }
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      set_step(memory, kBlocks, hh, before[hh]);
      if (!kClamps) continue;
      whole_[hh] += __shfl_xor_sync(kAll, whole_[hh], 1), whole_[hh] += __shfl_xor_sync(kAll, whole_[hh], 2);
    }
    if (kClamps) deep_ = __any_sync(kAll, deep_);
  }

  // Makes q^, k^ and kc, the left operands of the pairs' products.
  __device__ void make_operands(const Memory& memory) {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      memory.own(q, Key::kQuery, pair), memory.own(k, Key::kKey, pair);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int n = 2 * pair + r / 2, hh = r % 2;
        const float4 norm = memory.norms_of(n);
        const float2 x = two(q[r]), y = two(k[r]);
        const float up[2] = {ptx::exp2(u[n][2 * hh]), ptx::exp2(u[n][2 * hh + 1])};
        const float down[2] = {ptx::exp2(-u[n][2 * hh]), ptx::exp2(-u[n][2 * hh + 1])};
        q_[pair][r] = ptx::pack<bf16>(x.x * norm.x * up[0], x.y * norm.z * up[1]);
        k_[pair][r] = ptx::pack<bf16>(y.x * norm.y * up[0], y.y * norm.w * up[1]);
        kc_[pair][r] = ptx::pack<bf16>(y.x * norm.y * down[0], y.y * norm.w * down[1]);
      }
    }
  }

  // Returns bits that depend on all of q^ and k^.
  __device__ unsigned operand_bits() const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) bits |= q_[i / 4][i % 4] | k_[i / 4][i % 4];
    return bits;
  }

  // Computes what comes into the gates' sums from behind the chunk, from accW before the pairs are added. SdS is
  // rowsum(S dS).
  __device__ void sum_behind(const Memory& memory, const float (&SdS)[2]) {
    float decay[2] = {step(memory, kBlocks, 0), step(memory, kBlocks, 1)};
    behind[0] = behind[1] = 0;
#pragma unroll
    for (int w = kBlocks - 1; w >= 0; --w)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        float sum = 0;
#pragma unroll
        for (int n = w * kOf; n < (w + 1) * kOf; ++n) {
          const float2 k = two(kc_[n / 2][n % 2 * 2 + hh]);
          sum = fmaf(k.x, W[n][2 * hh], fmaf(k.y, W[n][2 * hh + 1], sum));
        }
        const float f = ptx::exp2(decay[hh] / 2);
        behind[hh] = fmaf(sum * f, f, behind[hh]);
        decay[hh] += step(memory, w, hh);
      }
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      behind[hh] += __shfl_xor_sync(kAll, behind[hh], 1), behind[hh] += __shfl_xor_sync(kAll, behind[hh], 2);
      behind[hh] = fmaf(SdS[hh], ptx::exp2(kClamps ? whole_[hh] : decay[hh]), behind[hh]);
    }
  }

  // Adds the products of pairs of tokens of the chunk.
  __device__ void multiply_pairs(const Memory& memory, float scale) {
#pragma unroll
    for (int o = 0; o < kBlocks; ++o) multiply_rows_below(memory, o, scale);
#pragma unroll
    for (int o = kBlocks - 1; o >= 0; --o) multiply_rows_above(memory, o);
  }

  // Replaces accW by dG, accQ by dq and accR by dk. sum(n, of_q, of_k) gets y . dy of the lane's two tokens, over its
  // two channels.
  template <class Sum>
  __device__ void finish(const Unknown& unknown, const Sum& sum) {
    const auto two = [&](unsigned x) {
      return make_float2(__uint_as_float(x << 16), __uint_as_float(x & unknown.upper));
    };
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float of_q[2] = {}, of_k[2] = {};
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const int i = n % 2 * 2 + hh;
        const float2 q = two(q_[n / 2][i]), k = two(k_[n / 2][i]), kc = two(kc_[n / 2][i]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int y = 2 * hh + e;
          const float a = e ? q.y : q.x, b = e ? k.y : k.x, d = e ? kc.y : kc.x;
          const float own = u[n][y] + unknown.zero, up = ptx::exp2(own), down = ptx::exp2(-own);
          const float dG = fmaf(a, Q(n)[y], fmaf(b, R(n)[y], -d * W[n][y]));
          of_q[e] = fmaf(a, Q(n)[y], of_q[e]), of_k[e] = fmaf(b, R(n)[y], fmaf(d, W[n][y], of_k[e]));
          Q(n)[y] *= up, R(n)[y] = fmaf(R(n)[y], up, W[n][y] * down), W[n][y] = dG;
        }
      }
      sum(n, of_q, of_k);
    }
  }

  // Computes the gate's gradient. run(n, hh, dg) gets the gradients of the natural logarithms of the decays of the
  // lane's two tokens.
  template <class Run>
  __device__ void each_gate(const Run& run) {
    const float ahead[2] = {j() < 3 ? 1.0f : 0.0f, j() < 2 ? 1.0f : 0.0f};
    float after[2] = {behind[0], behind[1]};
#pragma unroll
    for (int n = kTiles - 1; n >= 0; --n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const float first = W[n][2 * hh];
        float P = first + W[n][2 * hh + 1];
        P = fmaf(__shfl_down_sync(kAll, P, 1, 4), ahead[0], P), P = fmaf(__shfl_down_sync(kAll, P, 2, 4), ahead[1], P);
        const float2 dg = {P + after[hh], P - first + after[hh]};
        after[hh] += __shfl_sync(kAll, P, 0, 4);
        run(n, hh, dg);
      }
  }

  __device__ static unsigned lane() { return threadIdx.x % 32; }
  __device__ static unsigned c() { return threadIdx.x % 32 / 4; }
  __device__ static unsigned j() { return threadIdx.x % 4; }

 private:
  static constexpr float kLeast = -25;
  static constexpr float kDeep = -126;  // f32 has no normal power of two below

  __device__ static float most(float log2_gate) { return -ptx::least(-log2_gate, -kLeast); }  // a NaN stays
  // The log2 decay from the anchor of block w - 1 to that of block w. Step 0 begins at the chunk's start, the last
  // step ends at the chunk's end.
  __device__ float step(const Memory& memory, int w, int hh) const {
    if constexpr (kStepsInMemory) {
      if (w) return ptx::load_shared_f32(memory.step(w, c() + 8 * hh));
    }
    return step_[w][hh];
  }
  __device__ void set_step(const Memory& memory, int w, int hh, float step) {
    if (kClamps) deep_ |= step < kDeep;
    if constexpr (kStepsInMemory) {
      if (w) return ptx::store_shared_f32(memory.step(w, c() + 8 * hh), step);  // four lanes store the same value
    }
    step_[w][hh] = step;
  }

  // acc *= sign 2^step, tiles first .. last - 1.
  __device__ void decay_tiles(float (*acc)[4], int first, int last, int hh, float step, float sign) {
    const float f = ptx::exp2(kClamps ? fmaxf(step, kDeep) : step) * sign;
#pragma unroll
    for (int n = first; n < last; ++n) acc[n][2 * hh] *= f, acc[n][2 * hh + 1] *= f;
    if (!kClamps || !deep_) return;
    const float rest = ptx::exp2(fminf(step - kDeep, 0.0f));
#pragma unroll
    for (int n = first; n < last; ++n) acc[n][2 * hh] *= rest, acc[n][2 * hh + 1] *= rest;
  }

  // Adds block o of columns, in the rows of blocks >= o: accQ += kc_o dA^T, accR += kc_o B^T.
  __device__ void multiply_rows_below(const Memory& memory, int o, float scale) {
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      const float by = step(memory, o, hh);
      decay_tiles(QR, o * kOf, kTiles, hh, by, o ? 1 : scale);
      decay_tiles(QR + kTiles, o * kOf, kTiles, hh, by, o ? 1 : -1);
    }
    if constexpr (kBlock == 8) {
      const unsigned kc[2] = {kc_[o / 2][o % 2 * 2], kc_[o / 2][o % 2 * 2 + 1]};
#pragma unroll
      for (int r = o; r < kTiles; r += 4) {  // four blocks of 8 x 8
        const unsigned row = 8 * min(r + i8(), kTiles - 1u) + r8();
        unsigned a[4], b[4];
        ptx::load_matrices(a, memory.scores(Scores::kdA, row, o));
        ptx::load_matrices(b, memory.scores(Scores::kB, row, o));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r + i < kTiles) ptx::mma8(Q(r + i), kc, a[i]), ptx::mma8(R(r + i), kc, b[i]);
      }
    } else {
#pragma unroll
      for (int r = o; r < kBlocks; ++r) {
        const unsigned row = 16 * r + i8() / 2 * 8 + r8(), piece = 2 * o + i8() % 2;
        unsigned a[4], b[4];
        ptx::load_matrices(a, memory.scores(Scores::kdA, row, piece));
        ptx::mma<bf16>(Q(2 * r), kc_[o], a[0], a[1]), ptx::mma<bf16>(Q(2 * r + 1), kc_[o], a[2], a[3]);
        ptx::load_matrices(b, memory.scores(Scores::kB, row, piece));
        ptx::mma<bf16>(R(2 * r), kc_[o], b[0], b[1]), ptx::mma<bf16>(R(2 * r + 1), kc_[o], b[2], b[3]);
      }
    }
  }

  // Adds block o of rows, in the columns of blocks <= o: accW += q^_o dA + k^_o B.
  __device__ void multiply_rows_above(const Memory& memory, int o) {
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) decay_tiles(W, 0, (o + 1) * kOf, hh, step(memory, o + 1, hh), 1);
    if constexpr (kBlock == 8) {
      const unsigned q[2] = {q_[o / 2][o % 2 * 2], q_[o / 2][o % 2 * 2 + 1]};
      const unsigned k[2] = {k_[o / 2][o % 2 * 2], k_[o / 2][o % 2 * 2 + 1]};
#pragma unroll
      for (int r = 0; r <= o; r += 4) {
        const unsigned row = 8 * o + r8(), piece = min(r + i8(), static_cast<unsigned>(o));
        unsigned a[4], b[4];
        ptx::load_transposed(a, memory.scores(Scores::kdA, row, piece));
        ptx::load_transposed(b, memory.scores(Scores::kB, row, piece));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r + i <= o) ptx::mma8(W[r + i], q, a[i]), ptx::mma8(W[r + i], k, b[i]);
      }
    } else {
#pragma unroll
      for (int r = 0; r <= o; ++r) {
        const unsigned row = 16 * o + i8() % 2 * 8 + r8(), piece = 2 * r + i8() / 2;
        unsigned a[4], b[4];
        ptx::load_transposed(a, memory.scores(Scores::kdA, row, piece));
        ptx::mma<bf16>(W[2 * r], q_[o], a[0], a[1]), ptx::mma<bf16>(W[2 * r + 1], q_[o], a[2], a[3]);
        ptx::load_transposed(b, memory.scores(Scores::kB, row, piece));
        ptx::mma<bf16>(W[2 * r], k_[o], b[0], b[1]), ptx::mma<bf16>(W[2 * r + 1], k_[o], b[2], b[3]);
      }
    }
  }

  __device__ static unsigned i8() { return threadIdx.x % 32 / 8; }
  __device__ static unsigned r8() { return threadIdx.x % 8; }

  // step_: from anchor to anchor, from the chunk's start and to its end. whole_: the decay of the whole chunk as
  // given, before tokens' decays are limited.
  float step_[kBlocks + 1][2], whole_[2];
  bool deep_;  // a step of any lane is below kDeep
  unsigned q_[kTiles / 2][4], k_[kTiles / 2][4], kc_[kTiles / 2][4];
};

}  // namespace kda::cuda
