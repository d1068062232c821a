// The wide kernel of backward: all gradients of a chunk of 64 tokens but dv and dh0, from the state S before it, the gradient
// dS of the state after it, v_new and dv. Chunks do not depend on each other.
//
// A warp owns 16 channels and all 64 tokens, so that decays, operands of scores, sums over tokens and the gate's gradient are
// its own, in the layout of accumulators [channel][token]: lane 4 c + j has channels c and c + 8, tokens 8 n + 2 j and + 1.
// With G_i the sum of log2 gates through token i and R_w of block w of 8 tokens that through its fourth (the anchor):
//   u_i = G_i - R_w(i)    q^ = q 2^u    k^ = k 2^u    kc = k 2^-u                             rounded to bf16, once
//   dA = s tril(dO v_new^T)    B = -strict_tril(dv v_new^T)                                   bf16, in shared memory
//   accQ = s 2^R_0 (S dO^T)    accR = -2^R_0 (S dv^T)    accW = 2^(G_last - R_7) (dS v_new^T)
//   for blocks o from the first on, in rows of blocks >= o: * 2^(R_o - R_o-1);  accQ += kc_o dA^T;  accR += kc_o B^T
//   for blocks o from the last on,  in rows of blocks <= o: * 2^(R_o+1 - R_o);  accW += q^_o dA + k^_o B
//   dq = 2^u accQ    dk = 2^u accR + 2^-u accW    dG = q^ accQ + k^ accR - kc accW
//   dg_t = sum over i >= t of dG_i, and what comes in from behind the chunk: 2^G_last rowsum(S dS) + sum_i kc_i accW_i
//   dbeta_i = (dv_i . v_new_i) / beta_i^2                  (where beta is about 0: backward_beta.h)
// Factors between anchors are at most 1, and multiply as two halves: 2^-200 is none in f32, while a token before the one
// anchor and one behind the other may be neighbours. A token decays by 2^-25 at most but in 2^G_last: what lies behind such a decay is
// below f32's last digit of what lies before it. dG is made of the rounded operands that also made accQ, accR and accW: so
// what cancels in its sums cancels there, too.
//
// The value heads of a q/k head follow one another in a block: their dq and dk are added in that order.
#pragma once
#include "cuda/forward.h"
#include "cuda/ptx/sm80.h"
#include "cuda/sm80/backward_sums.h"
#include "cuda/sm80/chunk_prepare.h"
#include "cuda/sm80/chunk_scan.h"

namespace kda::cuda {

constexpr int kPiece = 16, kPieces = 3;  // value columns of a piece; pieces in shared memory at a time

// Where everything comes from and goes to. Views without data are absent.
struct WidePlaces {
  TypedView d_o, v_new, dv, h, dh;  // h, dh: [rows][HV][V][K]
  TypedView dq, dk, dg, dbeta;
  // Whether rows are of bf16 and at multiples of 16 bytes. (dh always is.)
  bool qk_wide, d_o_wide, v_new_wide, dv_wide, h_wide;
  bool pairs;      // rows of dq, dk, dg at multiples of two elements
  bool gate;       // dg, dA_log or d_dt_bias is wanted
  float* sums;     // [chunk][HV][K + kK / 16] of d_dt_bias, then dA_log of each warp
  float* scratch;  // [block][2][64 / 2][threads][..] dq and dk of earlier value heads
};

// Which chunk a row is: `rows_of` rows of every sequence, or packed T / 64 + N.
struct WideRows {
  unsigned rows, heads;  // heads of q and k
  unsigned h_rows = 0;   // of h and dh
  Divisor by_heads, by_chunks;
  WideRows(const Dims& d)
      : rows(static_cast<unsigned>(d.varlen ? d.T / kChunk + d.N : d.N * d.max_chunks())),
        heads(static_cast<unsigned>(d.H)),
        by_heads(d.H),
        by_chunks(std::max<int64_t>(d.max_chunks(), 1)) {}
};

template <int kK>
struct WideMemory {
  static constexpr int kWarps = kK / 16, kThreads = kWarps * 32;
  static constexpr int kTokenStride = kK * 2 + 16;      // of q and k; eight rows are free of bank conflicts
  static constexpr int kPieceStride = kPiece * 2 + 16;  // of pieces of d_o, v_new, dv
  static constexpr int kScoreStride = kChunk * 2 + 16;  // of dA and B
  static constexpr int q = 0, k = q + kChunk * kTokenStride, pieces = k + kChunk * kTokenStride;
  // In a piece.
  static constexpr int d_o = 0, v_new = d_o + kChunk * kPieceStride, dv = v_new + kChunk * kPieceStride,
                       S = dv + kChunk * kPieceStride, dS = S + kPiece * kTokenStride,
                       piece_bytes = dS + kPiece * kTokenStride;
  // In their place when the last one was read.
  static constexpr int dA = pieces, B = dA + kChunk * kScoreStride, dots = B + kChunk * kScoreStride,
                       steps = dots + kWarps * kChunk * 8;  // f32 [warp][block, and one more][16 channels]
  static_assert(steps + kWarps * (kChunk / 8 + 1) * 64 <= pieces + kPieces * piece_bytes);
  static constexpr int norms = pieces + kPieces * piece_bytes;  // f32 [64][2]: factors that make q and k as long as 1
  static constexpr int factors = norms + kChunk * 8;            // f32 [64][2]: y . dy of q, of k
  static constexpr int beta = factors + kChunk * 8;             // f32 [64][2]: beta, and its slope
  static constexpr int bytes = beta + kChunk * 8;
};

// Eight elements as bf16: by a copy that nobody waits for, or at once.
__device__ inline void ask_eight(unsigned to, const char* from, const char* safe, int32_t dtype, bool wide, bool real) {
  if (wide) {
    ptx::copy16(to, real ? from : safe, real ? 16 : 0);
    return;
  }
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = real ? value_of(dtype, load_raw<false>(from + i * size_of(dtype), dtype)) : 0.0f;
  uint4 packed;
  packed.x = ptx::pack<__nv_bfloat16>(x[0], x[1]), packed.y = ptx::pack<__nv_bfloat16>(x[2], x[3]);
  packed.z = ptx::pack<__nv_bfloat16>(x[4], x[5]), packed.w = ptx::pack<__nv_bfloat16>(x[6], x[7]);
  ptx::store_shared4(to, packed);
}

// Two bf16 of a register.
__device__ inline float2 two(unsigned x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }

// A chunk of a q/k head, as a thread sees it.
template <int kK>
class WideChunk {
  using M = WideMemory<kK>;
  using bf16 = __nv_bfloat16;
  static constexpr int kTiles = kChunk / 8;  // blocks of eight tokens

 public:
  __device__ WideChunk(const Tokens& x, const WidePlaces& places, unsigned shared, const ChunkPlace& at, unsigned h,
                       int V)
      : x_(x), places_(places), shared_(shared), at_(at), h_(h), V_(V), warp_(__shfl_sync(kAll, threadIdx.x / 32, 0)) {}

  // Asks for q and k.
  __device__ void ask_keys() {
    constexpr int kEights = kK / 8;
    for (unsigned i = threadIdx.x; i < 2 * kChunk * kEights; i += M::kThreads) {
      const bool of_k = i >= kChunk * kEights;
      const unsigned row = i / kEights % kChunk, c = i % kEights * 8;
      const View& t = of_k ? x_.k : x_.q;
      const unsigned own = c * size_of(x_.qkv_dtype);
      ask_eight(shared_ + (of_k ? M::k : M::q) + row * M::kTokenStride + c * 2, t.at(at_.b, at_.t0 + row, h_) + own,
                t.at(at_.b, at_.t0, h_), x_.qkv_dtype, places_.qk_wide, row < at_.rows);
    }
  }

  // And for columns 16 piece .. + 15 of what value head hv has; states of row h_row.
  __device__ void ask_piece(int piece, unsigned hv, unsigned h_row) {
    if (piece * kPiece < V_) {
      const unsigned to = shared_ + M::pieces + piece % kPieces * M::piece_bytes;
      ask_tokens(to + M::d_o, places_.d_o, places_.d_o_wide, piece, hv);
      ask_tokens(to + M::v_new, places_.v_new, places_.v_new_wide, piece, hv);
      ask_tokens(to + M::dv, places_.dv, places_.dv_wide, piece, hv);
      ask_state(to + M::S, places_.h, places_.h_wide, piece, hv, h_row);
      ask_state(to + M::dS, places_.dh, true, piece, hv, h_row);
    }
    ptx::commit_copies();
  }

  // Lengths of q and k; a warp takes every eighth row. Rows behind the chunk's end have zeros, and so do all their operands.
  __device__ void normalise() const {
    for (unsigned row = warp_; row < kChunk; row += M::kWarps) {
      float qq = 0, kk = 0;
      const auto sums = [&](float by_q, float by_k) {
        qq = kk = 0;
#pragma unroll
        for (unsigned c = lane() * 2; c < kK; c += 64) {
          const float2 q = two(ptx::load_shared(shared_ + M::q + row * M::kTokenStride + c * 2));
          const float2 k = two(ptx::load_shared(shared_ + M::k + row * M::kTokenStride + c * 2));
          const float a = q.x * by_q, b = q.y * by_q, d = k.x * by_k, e = k.y * by_k;
          qq = fmaf(a, a, fmaf(b, b, qq)), kk = fmaf(d, d, fmaf(e, e, kk));
        }
        qq = sum_over<32>(qq), kk = sum_over<32>(kk);
      };
      float2 factor{1, 1};
      if (x_.qk_l2norm) {
        sums(1, 1);
        const bool huge_q = is_huge(qq), huge_k = is_huge(kk);
        const float by_q = huge_q ? kShrink : 1.0f, by_k = huge_k ? kShrink : 1.0f;
        if (huge_q || huge_k) sums(by_q, by_k);
        factor = {inverse_norm(qq, huge_q) * by_q, inverse_norm(kk, huge_k) * by_k};
      }
      if (lane() == 0) ptx::store_shared_f32x2(shared_ + M::norms + row * 8, factor);
    }
  }

  // beta of the chunk's tokens.
  __device__ void take_beta(unsigned hv) const {
    for (unsigned row = threadIdx.x; row < kChunk; row += M::kThreads) {
      float2 two{1, 0};
      if (row < at_.rows) {
        const float z = value_of(x_.beta_dtype, load_raw<false>(x_.beta.at(at_.b, at_.t0 + row, hv), x_.beta_dtype));
        two = {activated_beta(x_.beta_form, z), beta_slope(x_.beta_form, z)};
      }
      ptx::store_shared_f32x2(shared_ + M::beta + row * 8, two);
    }
  }

  // Products with states, dA and B, a piece of columns after another.
  __device__ void multiply_states(unsigned hv, unsigned h_row) {
    clear();
#pragma unroll 1
    for (int piece = 0; piece * kPiece < V_; ++piece) {
      ptx::wait_for_copies<kPieces - 2>();
      __syncthreads();  // the piece is in shared memory, and nobody reads the one before
      ask_piece(piece + kPieces - 1, hv, h_row);
      add_piece(shared_ + M::pieces + piece % kPieces * M::piece_bytes);
    }
    ptx::wait_for_copies<0>();
    __syncthreads();  // nobody reads a piece any more: dA and B take their place
  }

  __device__ void write_scores(unsigned hv) {
#pragma unroll
    for (int job = 0; job < kJobs; ++job) {
      const bool of_B = is_B(job);
      const unsigned r = block_row(job);
      float(&d)[4][2][4] = scores_[job];
      if (of_B && c() / 2 == j()) write_dbeta(d[0], 16 * r, hv);
        // The diagonal block is a triangle.
#pragma unroll
      for (int x = 0; x < 2; ++x)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * x + 2 * j() + e % 2 + of_B > 8 * (e / 2) + c()) d[0][x][e] = 0;
      const float scale = of_B ? -1.0f : x_.scale;
      const unsigned to = shared_ + (of_B ? M::B : M::dA) + (16 * r + c()) * M::kScoreStride + 4 * j();
#pragma unroll
      for (unsigned o = 0; o < 4; ++o)
        if (o <= r)
#pragma unroll
          for (int x = 0; x < 2; ++x)
#pragma unroll
            for (int hh = 0; hh < 2; ++hh)
              ptx::store_shared(to + hh * 8 * M::kScoreStride + (2 * (r - o) + x) * 16,
                                ptx::pack<bf16>(d[o][x][2 * hh] * scale, d[o][x][2 * hh + 1] * scale));
    }
  }

  // u, steps between anchors and the whole decay, from the gates of value head hv.
  template <class Gates>
  __device__ void decay(const Gates& log2_gate, unsigned hv) {
    const char* from = first_gate(hv);
    const float behind[2] = {j() > 0 ? 1.0f : 0.0f, j() > 1 ? 1.0f : 0.0f};
    float before[2] = {}, whole[2] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        float g[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float given = is_real(n, e) ? log2_gate(gate_input(from, n, hh, e), hh) : 0.0f;
          whole[hh] += given, g[e] = given < kLeast ? kLeast : given;  // a NaN stays
        }
        float P = g[0] + g[1];
        P = fmaf(__shfl_up_sync(kAll, P, 1, 4), behind[0], P), P = fmaf(__shfl_up_sync(kAll, P, 2, 4), behind[1], P);
        const float total = __shfl_sync(kAll, P, 3, 4), anchor = __shfl_sync(kAll, P, 1, 4);
        u_[n][2 * hh + 1] = P - anchor, u_[n][2 * hh] = P - g[1] - anchor;
        set_step(n, hh, before[hh] + anchor), before[hh] = total - anchor;
      }
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      set_step(kTiles, hh, before[hh]);
      whole[hh] += __shfl_xor_sync(kAll, whole[hh], 1), whole[hh] += __shfl_xor_sync(kAll, whole[hh], 2);
      ell_[hh] = ptx::exp2(whole[hh]);
    }
  }

  // q^, k^, kc: left operands of the pairs' products.
  __device__ void make_operands() {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      own_keys(q, M::q, pair), own_keys(k, M::k, pair);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int n = 2 * pair + r / 2, hh = r % 2;
        const float4 norm = norms_of(n);
        const float2 x = two(q[r]), y = two(k[r]);
        const float up[2] = {ptx::exp2(u_[n][2 * hh]), ptx::exp2(u_[n][2 * hh + 1])};
        const float down[2] = {ptx::exp2(-u_[n][2 * hh]), ptx::exp2(-u_[n][2 * hh + 1])};
        q_[n][hh] = ptx::pack<bf16>(x.x * norm.x * up[0], x.y * norm.z * up[1]);
        k_[n][hh] = ptx::pack<bf16>(y.x * norm.y * up[0], y.y * norm.w * up[1]);
        kc_[n][hh] = ptx::pack<bf16>(y.x * norm.y * down[0], y.y * norm.w * down[1]);
      }
    }
  }

  // What comes into the gates' sums from behind the chunk, from accW before the pairs.
  __device__ void sum_behind() {
    float decay[2] = {step(kTiles, 0), step(kTiles, 1)};
    behind_[0] = behind_[1] = 0;
#pragma unroll
    for (int n = kTiles - 1; n >= 0; --n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const float2 k = two(kc_[n][hh]);
        const float sum = fmaf(k.x, W_[n][2 * hh], k.y * W_[n][2 * hh + 1]);
        const float f = ptx::exp2(decay[hh] / 2);
        behind_[hh] = fmaf(sum * f, f, behind_[hh]);
        decay[hh] += step(n, hh);
      }
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      behind_[hh] += __shfl_xor_sync(kAll, behind_[hh], 1), behind_[hh] += __shfl_xor_sync(kAll, behind_[hh], 2);
      const float SdS =
          __shfl_sync(kAll, c() % 2 ? diagonal_[hh][2 * hh + 1] : diagonal_[hh][2 * hh], 4 * c() + c() / 2);
      behind_[hh] = fmaf(SdS, ell_[hh], behind_[hh]);
    }
  }

  // Pairs of tokens of the chunk.
  __device__ void multiply_pairs() {
#pragma unroll
    for (int o = 0; o < kTiles; ++o) {
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const float f = ptx::exp2(step(o, hh) / 2), of_Q = o ? f : f * x_.scale, of_R = o ? f : -f;
#pragma unroll
        for (int n = o; n < kTiles; ++n)
#pragma unroll
          for (int e = 2 * hh; e < 2 * hh + 2; ++e) Q_[n][e] = Q_[n][e] * f * of_Q, R_[n][e] = R_[n][e] * f * of_R;
      }
#pragma unroll
      for (int r = o; r < kTiles; r += 4) {  // four blocks of 8 x 8
        const unsigned from = (8 * min(r + i8(), 7u) + r8()) * M::kScoreStride + o * 16;
        unsigned a[4], b[4];
        ptx::load_matrices(a, shared_ + M::dA + from), ptx::load_matrices(b, shared_ + M::B + from);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r + i < kTiles) ptx::mma8(Q_[r + i], kc_[o], a[i]), ptx::mma8(R_[r + i], kc_[o], b[i]);
      }
    }
#pragma unroll
    for (int o = kTiles - 1; o >= 0; --o) {
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const float f = ptx::exp2(step(o + 1, hh) / 2);
#pragma unroll
        for (int n = 0; n <= o; ++n)
#pragma unroll
          for (int e = 2 * hh; e < 2 * hh + 2; ++e) W_[n][e] = W_[n][e] * f * f;
      }
#pragma unroll
      for (int r = 0; r <= o; r += 4) {
        const unsigned from = (8 * o + r8()) * M::kScoreStride + min(r + i8(), static_cast<unsigned>(o)) * 16;
        unsigned a[4], b[4];
        ptx::load_transposed(a, shared_ + M::dA + from), ptx::load_transposed(b, shared_ + M::B + from);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r + i <= o) ptx::mma8(W_[r + i], q_[o], a[i]), ptx::mma8(W_[r + i], k_[o], b[i]);
      }
    }
  }

  // dG takes the place of W, dq and dk those of Q and R.
  __device__ void finish_products() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const float2 q = two(q_[n][hh]), k = two(k_[n][hh]), kc = two(kc_[n][hh]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &Q = Q_[n][2 * hh + e], &R = R_[n][2 * hh + e], &W = W_[n][2 * hh + e];
          pin(u_[n][2 * hh + e]);  // 2^u is computed again: 64 registers less than to keep it
          const float up = ptx::exp2(u_[n][2 * hh + e]), down = ptx::exp2(-u_[n][2 * hh + e]);
          const float dG = fmaf(e ? q.y : q.x, Q, fmaf(e ? k.y : k.x, R, -(e ? kc.y : kc.x) * W));
          Q *= up, R = fmaf(R, up, W * down), W = dG;
        }
      }
  }

  // The gate's gradient and its sums. gradient(z, dg, hh): of the gate's input.
  template <class Gradient>
  __device__ void write_gates(const Gradient& gradient, unsigned hv, float* sums) {
    const char* from = first_gate(hv);
    const float ahead[2] = {j() < 3 ? 1.0f : 0.0f, j() < 2 ? 1.0f : 0.0f};
    float after[2] = {behind_[0], behind_[1]}, of_bias[2] = {}, of_A = 0;
#pragma unroll
    for (int n = kTiles - 1; n >= 0; --n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        const float d[2] = {W_[n][2 * hh], W_[n][2 * hh + 1]};
        float P = d[0] + d[1];
        P = fmaf(__shfl_down_sync(kAll, P, 1, 4), ahead[0], P), P = fmaf(__shfl_down_sync(kAll, P, 2, 4), ahead[1], P);
        const float dg[2] = {P + after[hh], P - d[0] + after[hh]};
        after[hh] += __shfl_sync(kAll, P, 0, 4);
        float dx[2] = {};
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (is_real(n, e)) {
            const Gradients of = gradient(gate_input(from, n, hh, e), dg[e], hh);
            dx[e] = of.dx, of_A += of.dA_log, of_bias[hh] += of.dx;
          }
        if (places_.dg.data) store_tile(places_.dg, hv, n, hh, dx[0], dx[1]);
      }
    if (!sums) return;
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      of_bias[hh] += __shfl_xor_sync(kAll, of_bias[hh], 1), of_bias[hh] += __shfl_xor_sync(kAll, of_bias[hh], 2);
      if (j() == 0) sums[channel(hh)] = of_bias[hh];
    }
    of_A = sum_over<32>(of_A);
    if (lane() == 0) sums[kK + warp_] = of_A;
  }

  // dq and dk of several value heads: first + second + ..
  __device__ void add_heads(float4* scratch, bool first, bool last) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float4 &q = scratch[n * M::kThreads], &k = scratch[(kTiles + n) * M::kThreads];
      if (!first) add(Q_[n], q), add(R_[n], k);
      if (!last)
        q = make_float4(Q_[n][0], Q_[n][1], Q_[n][2], Q_[n][3]),
        k = make_float4(R_[n][0], R_[n][1], R_[n][2], R_[n][3]);
    }
  }

  // Through the norm: with y = r x, dx = r (dy - y (y . dy)).
  __device__ void write_keys() {
    if (x_.qk_l2norm) sum_dots();
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      own_keys(q, M::q, pair), own_keys(k, M::k, pair);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int n = 2 * pair + r / 2, hh = r % 2;
        float dq[2] = {Q_[n][2 * hh], Q_[n][2 * hh + 1]}, dk[2] = {R_[n][2 * hh], R_[n][2 * hh + 1]};
        if (x_.qk_l2norm) {
          const float4 norm = norms_of(n), dot = ptx::load_shared_f32x4(shared_ + M::factors + (8 * n + 2 * j()) * 8);
          const float2 x = two(q[r]), y = two(k[r]);
          dq[0] = norm.x * fmaf(-x.x * norm.x, dot.x, dq[0]), dq[1] = norm.z * fmaf(-x.y * norm.z, dot.z, dq[1]);
          dk[0] = norm.y * fmaf(-y.x * norm.y, dot.y, dk[0]), dk[1] = norm.w * fmaf(-y.y * norm.w, dot.w, dk[1]);
        }
        if (places_.dq.data) store_tile(places_.dq, h_, n, hh, dq[0], dq[1]);
        if (places_.dk.data) store_tile(places_.dk, h_, n, hh, dk[0], dk[1]);
      }
    }
  }

  __device__ unsigned channel(int hh) const { return 16 * warp_ + c() + 8 * hh; }

 private:
  static constexpr int kJobs = 8 / M::kWarps;  // block rows of dA and B that a warp makes
  static constexpr float kLeast = -25;

  __device__ static unsigned lane() { return threadIdx.x % 32; }
  __device__ static unsigned c() { return threadIdx.x % 32 / 4; }
  __device__ static unsigned j() { return threadIdx.x % 4; }
  __device__ static unsigned i8() { return threadIdx.x % 32 / 8; }
  __device__ static unsigned r8() { return threadIdx.x % 8; }
  __device__ bool is_real(int n, int e) const { return 8 * n + 2 * j() + e < at_.rows; }
  // Whether job makes B, and which 16 rows of it: the rows of a warp's scheduler add up to as many for each.
  __device__ bool is_B(int job) const { return kJobs == 2 ? job : warp_ / 4; }
  __device__ unsigned block_row(int job) const { return is_B(job) ? warp_ % 4 : 3 - warp_ % 4; }

  __device__ void ask_tokens(unsigned to, const TypedView& t, bool wide, int piece, unsigned hv) const {
    for (unsigned i = threadIdx.x; i < 2 * kChunk; i += M::kThreads) {
      const unsigned row = i / 2, v = piece * kPiece + i % 2 * 8;
      ask_eight(to + row * M::kPieceStride + i % 2 * 16, t.at(at_.b, at_.t0 + row, hv) + v * size_of(t.dtype),
                t.at(at_.b, at_.t0, hv), t.dtype, wide, row < at_.rows);
    }
  }
  __device__ void ask_state(unsigned to, const TypedView& t, bool wide, int piece, unsigned hv, unsigned row) const {
    constexpr int kEights = kK / 8;
    const char* from = t.at(row, hv, piece * kPiece);  // a value column after another
    for (unsigned i = threadIdx.x; i < kPiece * kEights; i += M::kThreads)
      ask_eight(to + i / kEights * M::kTokenStride + i % kEights * 16,
                from + i / kEights * static_cast<uint64_t>(t.stride2) + i % kEights * 8 * size_of(t.dtype), from,
                t.dtype, wide, true);
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) Q_[n][e] = R_[n][e] = W_[n][e] = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) diagonal_[0][e] = diagonal_[1][e] = 0;
#pragma unroll
    for (int job = 0; job < kJobs; ++job)
#pragma unroll
      for (int i = 0; i < 32; ++i) scores_[job][i / 8][i / 4 % 2][i % 4] = 0;
  }

  // 16 columns of values: one step of every product.
  __device__ void add_piece(unsigned piece) {
    // Left operand: 16 channels of a state, by its columns; right ones: 16 tokens, by columns.
    const unsigned state = piece + M::S + (i8() / 2 * 8 + r8()) * M::kTokenStride + (2 * warp_ + i8() % 2) * 16;
    const unsigned tokens = piece + (i8() / 2 * 8 + r8()) * M::kPieceStride + i8() % 2 * 16;
    unsigned S[4], dS[4];
    ptx::load_transposed(S, state), ptx::load_transposed(dS, state + (M::dS - M::S));
    ptx::mma<bf16>(diagonal_[0], S, dS[0], dS[2]), ptx::mma<bf16>(diagonal_[1], S, dS[1], dS[3]);
    const auto multiply = [&](float(&acc)[kTiles][4], const unsigned(&left)[4], unsigned right) {
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        unsigned y[4];
        ptx::load_matrices(y, right + o * 16 * M::kPieceStride);
        ptx::mma<bf16>(acc[2 * o], left, y[0], y[1]), ptx::mma<bf16>(acc[2 * o + 1], left, y[2], y[3]);
      }
    };
    multiply(Q_, S, tokens + M::d_o), multiply(R_, S, tokens + M::dv), multiply(W_, dS, tokens + M::v_new);
    // Block rows of dA and B, from the diagonal to the left.
#pragma unroll
    for (int job = 0; job < kJobs; ++job) {
      const unsigned r = block_row(job), tile = is_B(job) ? M::dv : M::d_o;
      unsigned left[4];
      ptx::load_matrices(left, piece + tile + (16 * r + i8() % 2 * 8 + r8()) * M::kPieceStride + i8() / 2 * 16);
#pragma unroll
      for (unsigned o = 0; o < 4; ++o)
        if (o <= r) {
          unsigned y[4];
          ptx::load_matrices(y, tokens + M::v_new + (r - o) * 16 * M::kPieceStride);
          ptx::mma<bf16>(scores_[job][o][0], left, y[0], y[1]), ptx::mma<bf16>(scores_[job][o][1], left, y[2], y[3]);
        }
    }
  }

  // From the diagonal of the diagonal block of dv v_new^T.
  __device__ void write_dbeta(const float (&d)[2][4], unsigned first, unsigned hv) const {
    if (!places_.dbeta.data) return;
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      const unsigned row = first + 8 * hh + c();
      if (row >= at_.rows) continue;
      const float2 beta = ptx::load_shared_f32x2(shared_ + M::beta + row * 8);
      const float dot = c() % 2 ? d[hh][2 * hh + 1] : d[hh][2 * hh];
      store_element(places_.dbeta.at(at_.b, at_.t0 + row, hv), places_.dbeta.dtype, dot / beta.x / beta.x * beta.y);
    }
  }

  // The lane's first gate; the addresses of all 32 are not to be kept for the second time.
  __device__ const char* first_gate(unsigned hv) const {
    const char* from = x_.g.at(at_.b, at_.t0 + 2 * j(), hv) + channel(0) * size_of(x_.g_dtype);
    pin(from);
    return from;
  }
  __device__ float gate_input(const char* first, int n, int hh, int e) const {
    const char* from = first + (8 * n + e) * static_cast<uint64_t>(x_.g.stride1) + hh * 8 * size_of(x_.g_dtype);
    return value_of(x_.g_dtype, load_raw<false>(from, x_.g_dtype));
  }
  // 16 channels of tokens 16 pair .. + 15 of a tile: of n = 2 pair and channels c, c + 8, then of the next n.
  __device__ void own_keys(unsigned (&x)[4], unsigned tile, int pair) const {
    ptx::load_transposed(
        x, shared_ + tile + (16 * pair + i8() / 2 * 8 + r8()) * M::kTokenStride + (2 * warp_ + i8() % 2) * 16);
  }
  // Of the lane's two tokens: of q, of k, of q, of k.
  __device__ float4 norms_of(int n) const { return ptx::load_shared_f32x4(shared_ + M::norms + (8 * n + 2 * j()) * 8); }

  // 8 channels of 8 tokens, of which the lane has channel c of tokens 2 j and 2 j + 1, to a tensor of tokens.
  __device__ void store_tile(const TypedView& t, unsigned head, int n, int hh, float first, float second) const {
    const unsigned row = 8 * n + c(), first_channel = 16 * warp_ + 8 * hh + 2 * j();
    unsigned packed = 0;
    float2 pair{};
    if (t.dtype == KDA_F32) pair = transposed(first, second);
    else
      packed = ptx::transposed(t.dtype == KDA_BF16 ? ptx::pack<bf16>(first, second) : ptx::pack<__half>(first, second));
    if (row >= at_.rows) return;
    char* to = t.at(at_.b, at_.t0 + row, head) + first_channel * size_of(t.dtype);
    if (places_.pairs) {
      if (t.dtype == KDA_F32) *reinterpret_cast<float2*>(to) = pair;
      else *reinterpret_cast<unsigned*>(to) = packed;
    } else if (t.dtype == KDA_F32) {
      reinterpret_cast<float*>(to)[0] = pair.x, reinterpret_cast<float*>(to)[1] = pair.y;
    } else {
      reinterpret_cast<uint16_t*>(to)[0] = static_cast<uint16_t>(packed);
      reinterpret_cast<uint16_t*>(to)[1] = static_cast<uint16_t>(packed >> 16);
    }
  }

  // From the anchor of the block before to that of block n: of the chunk's start, to the chunk's end.
  __device__ unsigned step_at(int n, int hh) const {
    return shared_ + M::steps + ((warp_ * (kTiles + 1) + n) * 16 + c() + 8 * hh) * 4;
  }
  __device__ void set_step(int n, int hh, float step) const {
    if (j() == 0) ptx::store_shared_f32(step_at(n, hh), step);
  }
  __device__ float step(int n, int hh) const { return ptx::load_shared_f32(step_at(n, hh)); }

  __device__ static void add(float (&x)[4], const float4& y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; }

  // y . dy of each token, of q and of k, over all channels.
  __device__ void sum_dots() const {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      own_keys(q, M::q, pair), own_keys(k, M::k, pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * pair + half;
        const float4 norm = norms_of(n);
        float sums[4] = {};  // of q and k of the first token, of the second
#pragma unroll
        for (int hh = 0; hh < 2; ++hh) {
          const float2 x = two(q[2 * half + hh]), y = two(k[2 * half + hh]);
          sums[0] = fmaf(x.x * norm.x, Q_[n][2 * hh], sums[0]), sums[1] = fmaf(y.x * norm.y, R_[n][2 * hh], sums[1]);
          sums[2] = fmaf(x.y * norm.z, Q_[n][2 * hh + 1], sums[2]);
          sums[3] = fmaf(y.y * norm.w, R_[n][2 * hh + 1], sums[3]);
        }
        // Over the lanes of a token: each has one of the four then.
        const bool second = c() % 2, of_k = c() / 2 % 2;
        const float a = (second ? sums[2] : sums[0]) + __shfl_xor_sync(kAll, second ? sums[0] : sums[2], 4);
        const float b = (second ? sums[3] : sums[1]) + __shfl_xor_sync(kAll, second ? sums[1] : sums[3], 4);
        float sum = (of_k ? b : a) + __shfl_xor_sync(kAll, of_k ? a : b, 8);
        sum += __shfl_xor_sync(kAll, sum, 16);
        if (c() < 4)
          ptx::store_shared_f32(shared_ + M::dots + (warp_ * kChunk + 8 * n + 2 * j() + second) * 8 + of_k * 4, sum);
      }
    }
    __syncthreads();  // sums of all warps are there
    for (unsigned i = threadIdx.x; i < 2 * kChunk; i += M::kThreads) {
      float dot = 0;
#pragma unroll
      for (int w = 0; w < M::kWarps; ++w) dot += ptx::load_shared_f32(shared_ + M::dots + w * kChunk * 8 + i * 4);
      ptx::store_shared_f32(shared_ + M::factors + i * 4, dot);
    }
    __syncthreads();  // and those of all channels
  }

  const Tokens& x_;
  const WidePlaces& places_;
  const unsigned shared_;
  const ChunkPlace at_;
  const unsigned h_;
  const int V_;
  const unsigned warp_;  // known to be the same in all lanes
  float Q_[kTiles][4], R_[kTiles][4], W_[kTiles][4], diagonal_[2][4], scores_[kJobs][4][2][4];
  float u_[kTiles][4], ell_[2], behind_[2];
  unsigned q_[kTiles][2], k_[kTiles][2], kc_[kTiles][2];
};

// The chunk of a row: every sequence has max_chunks() rows, or packed those from t0 / 64 + n on.
__device__ inline ChunkPlace wide_chunk_at(const ForwardProblem& p, const WideRows& rows, unsigned row,
                                           unsigned& h_row) {
  const auto first_row = [&](const Sequence& s) {
    return static_cast<unsigned>(s.t0) / kChunk + static_cast<unsigned>(s.n);
  };
  const unsigned n = p.varlen ? packed_sequence(p, row, first_row) : rows.by_chunks.quotient(row);
  const Sequence s = sequence_at(p, p.args.in, n);
  const unsigned first = p.varlen ? first_row(s) : n * rows.by_chunks.divisor;
  const unsigned chunk = row - first, t = chunk * kChunk, length = static_cast<unsigned>(s.length);
  if (row < first || t >= length) return {};
  h_row = min(first_h_row(p, n) + chunk, rows.h_rows - 1);  // garbage in cu_seqlens leads nowhere
  return {static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0) + t, min(length - t, unsigned{kChunk})};
}

template <int kK>
__global__ void __launch_bounds__(WideMemory<kK>::kThreads, 1)
    wide_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                const __grid_constant__ WidePlaces places, const __grid_constant__ WideRows rows) {
  extern __shared__ float4 dynamic[];
  using M = WideMemory<kK>;
  wait_for_stream();
  const auto group = static_cast<unsigned>(p.group());
  const auto HV = static_cast<unsigned>(p.HV);
  for (unsigned item = blockIdx.x; item < rows.rows * rows.heads; item += gridDim.x) {
    const unsigned row = rows.by_heads.quotient(item), h = item - row * rows.heads;
    unsigned h_row = 0;
    const ChunkPlace at = wide_chunk_at(p, rows, row, h_row);
    if (!at.rows) {
      for (unsigned i = threadIdx.x; places.sums && i < group * (kK + M::kWarps); i += M::kThreads)
        places.sums[(row * uint64_t{HV} + h * group) * (kK + M::kWarps) + i] = 0;
      continue;
    }
    WideChunk<kK> chunk(x, places, ptx::shared_address(dynamic), at, h, static_cast<int>(p.V));
    __syncthreads();  // nobody reads the item before
    chunk.ask_keys();
    for (unsigned i = 0; i < group; ++i) {
      const unsigned hv = h * group + i;
      if (i) __syncthreads();  // nobody reads dA and B of the head before
      for (int piece = 0; piece < kPieces - 1; ++piece) chunk.ask_piece(piece, hv, h_row);
      chunk.take_beta(hv);
      chunk.multiply_states(hv, h_row);
      if (i == 0) chunk.normalise();
      chunk.write_scores(hv);
      const HeadGate gate(x, hv, chunk.channel(0), chunk.channel(1));
      chunk.decay([&](float z, int hh) { return gate.log2(z, hh); }, hv);
      __syncthreads();  // dA, B, steps and norms are there
      chunk.make_operands();
      chunk.sum_behind();
      chunk.multiply_pairs();
      chunk.finish_products();
      if (places.gate)
        chunk.write_gates([&](float z, float dg, int hh) { return gate.gradient(z, dg, hh); }, hv,
                          places.sums ? places.sums + (row * uint64_t{HV} + hv) * (kK + M::kWarps) : nullptr);
      if (group > 1)
        chunk.add_heads(reinterpret_cast<float4*>(places.scratch) +
                            blockIdx.x * uint64_t{2 * kChunk / 8 * M::kThreads} + threadIdx.x,
                        i == 0, i + 1 == group);
    }
    if (places.dq.data || places.dk.data) chunk.write_keys();
  }
}

}  // namespace kda::cuda
