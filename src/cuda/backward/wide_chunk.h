// A chunk in the wide kernel of backward for sm_80 and newer: its steps, in the order in which wide_kernel.h calls
// them.
#pragma once
#include "cuda/backward/wide.h"
#include "cuda/backward/wide_call.h"
#include "cuda/backward/wide_memory.h"

namespace kda::cuda {

// Slow gates are computed in a loop, from and to local memory: unrolled, they would be more than half of a kernel.
template <class Gate>
constexpr bool kUnrolled = !std::is_same_v<Gate, UnusualGate>;

// A chunk of a q/k head, as a thread sees it.
template <int kK, bool kBounded>
class WideChunk {
  using M = WideMemory<kK>;
  using Warp = WideWarp<M, ChosenGate<kBounded>::kBlock>;
  using bf16 = __nv_bfloat16;
  static constexpr int kTiles = Warp::kTiles;

 public:
  __device__ WideChunk(const Tokens& x, const WidePlaces& places, unsigned shared, const ChunkPlace& at, unsigned h,
                       int V)
      : x_(x), places_(places), m_{shared}, at_(at), h_(h), V_(V), warp_(__shfl_sync(kAll, threadIdx.x / 32, 0)) {}

  // Starts the copies of q and k.
  __device__ void ask_keys() {
    constexpr int kEights = kK / 8;
#pragma unroll 2
    for (unsigned i = threadIdx.x; i < 2 * kChunk * kEights; i += M::kThreads) {
      const bool of_k = i >= kChunk * kEights;
      const unsigned row = i / kEights % kChunk, c = i % kEights * 8;
      ask_row(m_.shared + (of_k ? M::k : M::q) + row * M::kTokenStride + c * 2, of_k ? x_.k : x_.q, row, h_, c);
    }
  }

  // Loads the gates' inputs in f32, by the whole block. They are in shared memory when it returns.
  __device__ void stage_gates(unsigned hv) const {
    const unsigned size = size_of(x_.g_dtype), pieces = kK * size / 16;  // of a row, 16 bytes each
    // Inputs of 16 bits first go to the second half of their row.
    const unsigned to = m_.shared + M::staged + (size == 2 ? kK * 2 : 0);
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < at_.rows * pieces; i += M::kThreads) {
      const unsigned row = i / pieces, piece = i % pieces;
      const char* from = x_.g.at(at_.b, at_.t0 + row, hv) + piece * 16;
      if (places_.g_wide) {
        ptx::copy16(to + row * M::kStagedStride + piece * 16, from);
        continue;
      }
      for (unsigned e = 0; e < 16; e += size) {
        const unsigned at = to + row * M::kStagedStride + piece * 16 + e;
        if (size == 2) ptx::store_shared16(at, static_cast<uint16_t>(load_raw<true>(from + e, x_.g_dtype)));
        else ptx::store_shared(at, load_raw<false>(from + e, KDA_F32));
      }
    }
    ptx::commit_copies();
    ptx::wait_for_copies<0>();
    __syncthreads();  // they are there, as given
#pragma unroll 1
    for (unsigned row = warp_; row < kChunk; row += M::kWarps) {
      const unsigned own = m_.shared + M::staged + row * M::kStagedStride;
      float4 x[kK / 128 + 1];
      if (row < at_.rows && size == 4) continue;
      for (unsigned i = lane(), n = 0; i < kK / 4; i += 32, ++n) {
        if (row >= at_.rows) {
          const float none = no_decay(x_.gate_form);
          x[n] = {none, none, none, none};
          continue;
        }
        const uint2 raw = ptx::load_shared2(own + kK * 2 + i * 8);
        x[n] = {value_of(x_.g_dtype, raw.x & 0xffff), value_of(x_.g_dtype, raw.x >> 16),
                value_of(x_.g_dtype, raw.y & 0xffff), value_of(x_.g_dtype, raw.y >> 16)};
      }
      __syncwarp();  // all of the row is in registers
      for (unsigned i = lane(), n = 0; i < kK / 4; i += 32, ++n) ptx::store_shared_f32x4(own + i * 16, x[n]);
    }
    __syncthreads();  // they are there, in f32
  }

  // Starts the copies of columns 16 piece .. 16 piece + 15 of the tensors of value head hv, and of its states in row
  // h_row.
  __device__ void ask_piece(int piece, unsigned hv, unsigned h_row) {
    if (piece * kPiece < V_) {
      const unsigned to = m_.shared + M::pieces + piece % kPieces * M::piece_bytes;
      ask_tokens(to + M::d_o, places_.d_o, piece, hv), ask_tokens(to + M::v_new, places_.v_new, piece, hv);
      ask_tokens(to + M::dv, places_.dv, piece, hv);
      ask_state(to + M::S, places_.h, piece, hv, h_row), ask_state(to + M::dS, places_.dh, piece, hv, h_row);
    }
    ptx::commit_copies();
  }

  // Computes the factors that make q and k as long as 1; a warp takes every kWarps-th row. Rows behind the chunk's
  // end are zeros, and so are all their operands.
  __device__ void normalise() const {
#pragma unroll 1
    for (unsigned row = warp_; row < kChunk; row += M::kWarps) {
      float qq = 0, kk = 0;
      const auto sums = [&](float by_q, float by_k) {
        qq = kk = 0;
#pragma unroll
        for (unsigned c = lane() * 2; c < kK; c += 64) {
          const float2 q = two(ptx::load_shared(m_.shared + M::q + row * M::kTokenStride + c * 2));
          const float2 k = two(ptx::load_shared(m_.shared + M::k + row * M::kTokenStride + c * 2));
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
      if (lane() == 0) ptx::store_shared_f32x2(m_.shared + M::norms + row * 8, factor);
    }
  }

  // Loads beta of the chunk's tokens, and its slope.
  __device__ void take_beta(unsigned hv) const {
    for (unsigned row = threadIdx.x; row < kChunk; row += M::kThreads) {
      float2 two{1, 0};
      if (row < at_.rows) {
        const float z = value_of(x_.beta_dtype, load_raw<false>(x_.beta.at(at_.b, at_.t0 + row, hv), x_.beta_dtype));
        two = {activated_beta(x_.beta_form, z), beta_slope(x_.beta_form, z)};
      }
      ptx::store_shared_f32x2(m_.shared + M::beta + row * 8, two);
    }
  }

  // Computes products with states, dA and B, one piece of columns after another.
  __device__ void multiply_states(unsigned hv, unsigned h_row) {
    clear();
    for (int piece = 0; piece < kPieces - 1; ++piece) ask_piece(piece, hv, h_row);
#pragma unroll 1
    for (int piece = 0; piece * kPiece < V_; ++piece) {
      ptx::wait_for_copies<kPieces - 2>();
      __syncthreads();  // the piece is in shared memory, and all reads of the one before are done
      ask_piece(piece + kPieces - 1, hv, h_row);
      add_piece(m_.shared + M::pieces + piece % kPieces * M::piece_bytes);
    }
    ptx::wait_for_copies<0>();
    __syncthreads();  // all reads of pieces are done: dA and B take their place
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
      const unsigned to = m_.scores(of_B ? Scores::kB : Scores::kdA, 16 * r + c(), 0) + 4 * j();
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

  // Computes u and the steps from the staged gates.
  __device__ void decay(const ChosenGate<kBounded>& head, const float (&bias)[2]) {
    head.with([&]<class Gate>(const Gate& gate) {
      if constexpr (kUnrolled<Gate>) {
        own_.decay(m_, [&](int n, int hh) {
          const float2 z = staged(n, hh);
          return make_float2(gate.log2(z.x + bias[hh]), gate.log2(z.y + bias[hh]));
        });
      } else {
        float2 logs[kTiles][2];
#pragma unroll 1
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int hh = 0; hh < 2; ++hh) {
            const float2 z = staged(n, hh);
            logs[n][hh] = {is_real(n, 0) ? gate.log(z.x + bias[hh]) : 0, is_real(n, 1) ? gate.log(z.y + bias[hh]) : 0};
          }
        own_.decay(
            m_, [&](int n, int hh) { return make_float2(gate.log2_of(logs[n][hh].x), gate.log2_of(logs[n][hh].y)); });
      }
    });
  }

  // Computes dq, dk and dG of the value head, from dA and B in shared memory.
  __device__ void multiply_pairs() {
    own_.make_operands(m_);
    float SdS[2];
#pragma unroll
    for (int hh = 0; hh < 2; ++hh)
      SdS[hh] = __shfl_sync(kAll, c() % 2 ? diagonal_[hh][2 * hh + 1] : diagonal_[hh][2 * hh], 4 * c() + c() / 2);
    own_.sum_behind(m_, SdS);
    own_.multiply_pairs(m_, x_.scale);
    own_.finish(places_.unknown, [](int, const float(&)[2], const float(&)[2]) {});
  }

  // Computes the gate's gradient and its sums from the staged inputs of the gates.
  __device__ void write_gates(const ChosenGate<kBounded>& head, const float (&bias)[2], unsigned hv, float* sums) {
    float of_bias[2] = {}, of_A = 0;
    head.with([&]<class Gate>(const Gate& gate) {
      const auto gradient = [&](int n, int e, float z, float dg) {
        if (!kUnrolled<Gate> && !is_real(n, e)) return Gradients{0, 0};
        return gate.gradient(z, dg);
      };
      const auto add = [&](int n, int hh, float2 dg) {
        const float2 z = staged(n, hh);
        const Gradients first = gradient(n, 0, z.x + bias[hh], dg.x), second = gradient(n, 1, z.y + bias[hh], dg.y);
        of_A += first.dA_log + second.dA_log, of_bias[hh] += first.dx + second.dx;
        stage(n, hh, first.dx, second.dx);
      };
      if constexpr (kUnrolled<Gate>) {
        own_.each_gate(add);
      } else {
        float2 all[kTiles][2];
        own_.each_gate([&](int n, int hh, float2 dg) { all[n][hh] = dg; });
#pragma unroll 1
        for (int n = kTiles - 1; n >= 0; --n)
#pragma unroll
          for (int hh = 0; hh < 2; ++hh) add(n, hh, all[n][hh]);
      }
    });
    if (places_.dg.data) write_staged(places_.dg, hv);
    if (!sums) return;
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      of_bias[hh] += __shfl_xor_sync(kAll, of_bias[hh], 1), of_bias[hh] += __shfl_xor_sync(kAll, of_bias[hh], 2);
      if (j() == 0) sums[channel(hh)] = of_bias[hh];
    }
    of_A = sum_over<32>(of_A);
    if (lane() == 0) sums[kK + warp_] = of_A;
  }

  // Adds dq and dk of several value heads: first + second + ..
  __device__ void add_heads(float4* scratch, bool first, bool last) {
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      float4& kept = scratch[n * M::kThreads];
      float(&x)[4] = own_.QR[n];
      if (!first) x[0] += kept.x, x[1] += kept.y, x[2] += kept.z, x[3] += kept.w;
      if (!last) kept = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // Takes dq and dk through the norm, and writes them: with y = r x, dx = r (dy - y (y . dy)).
  __device__ void write_keys() {
    if (x_.qk_l2norm) sum_dots(), apply_norms();
    write_accumulators(places_.dq, 0), write_accumulators(places_.dk, kTiles);
  }

  __device__ unsigned channel(int hh) const { return 16 * warp_ + c() + 8 * hh; }

 private:
  static constexpr int kJobs = 8 / M::kWarps;  // block rows of dA and B that a warp makes

  __device__ static unsigned lane() { return Warp::lane(); }
  __device__ static unsigned c() { return Warp::c(); }
  __device__ static unsigned j() { return Warp::j(); }
  __device__ static unsigned i8() { return threadIdx.x % 32 / 8; }
  __device__ static unsigned r8() { return threadIdx.x % 8; }
  // Whether a job makes B, and which 16 rows it makes. The block rows are of different lengths: this order gives all
  // schedulers the same work.
  __device__ bool is_B(int job) const { return kJobs == 2 ? job : warp_ / 4; }
  __device__ unsigned block_row(int job) const { return is_B(job) ? warp_ % 4 : 3 - warp_ % 4; }

  // Starts the copy of eight elements of a token from c on; behind the chunk's end, zeros.
  __device__ void ask_row(unsigned to, const View& t, unsigned row, unsigned head, unsigned c) const {
    const bool real = row < at_.rows;
    ptx::copy16(to, t.at(at_.b, at_.t0 + (real ? row : 0), head) + c * 2, real ? 16 : 0);
  }
  __device__ void ask_tokens(unsigned to, const View& t, int piece, unsigned hv) const {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < 2 * kChunk; i += M::kThreads)
      ask_row(to + i / 2 * M::kPieceStride + i % 2 * 16, t, i / 2, hv, piece * kPiece + i % 2 * 8);
  }
  __device__ void ask_state(unsigned to, const View& t, int piece, unsigned hv, unsigned row) const {
    constexpr int kEights = kK / 8;
    const char* from = t.at(row, hv, piece * kPiece);  // a value column after another
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < kPiece * kEights; i += M::kThreads)
      ptx::copy16(to + i / kEights * M::kTokenStride + i % kEights * 16,
                  from + i / kEights * static_cast<uint64_t>(t.stride2) + i % kEights * 16);
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) own_.QR[n][e] = own_.W[n / 2][e] = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) diagonal_[0][e] = diagonal_[1][e] = 0;
#pragma unroll
    for (int job = 0; job < kJobs; ++job)
#pragma unroll
      for (int i = 0; i < 32; ++i) scores_[job][i / 8][i / 4 % 2][i % 4] = 0;
  }

  // Adds 16 columns of values: one step of every product.
  __device__ void add_piece(unsigned piece) {
    // Left operand: 16 channels of a state, by its columns; right ones: 16 tokens, by columns.
    const unsigned state = piece + M::S + (i8() / 2 * 8 + r8()) * M::kTokenStride + (2 * warp_ + i8() % 2) * 16;
    const unsigned tokens = piece + (i8() / 2 * 8 + r8()) * M::kPieceStride + i8() % 2 * 16;
    unsigned S[4], dS[4];
    ptx::load_transposed(S, state), ptx::load_transposed(dS, state + (M::dS - M::S));
    ptx::mma<bf16>(diagonal_[0], S, dS[0], dS[2]), ptx::mma<bf16>(diagonal_[1], S, dS[1], dS[3]);
    const auto multiply = [&](float(*acc)[4], const unsigned(&left)[4], unsigned right) {
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        unsigned y[4];
        ptx::load_matrices(y, right + o * 16 * M::kPieceStride);
        ptx::mma<bf16>(acc[2 * o], left, y[0], y[1]), ptx::mma<bf16>(acc[2 * o + 1], left, y[2], y[3]);
      }
    };
    multiply(own_.QR, S, tokens + M::d_o), multiply(own_.QR + kTiles, S, tokens + M::dv);
    multiply(own_.W, dS, tokens + M::v_new);
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

  // Writes dbeta from the diagonal of a diagonal block of dv v_new^T.
  __device__ void write_dbeta(const float (&d)[2][4], unsigned first, unsigned hv) const {
    if (!places_.dbeta.data) return;
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      const unsigned row = first + 8 * hh + c();
      if (row >= at_.rows) continue;
      const float2 beta = ptx::load_shared_f32x2(m_.shared + M::beta + row * 8);
      const float dot = c() % 2 ? d[hh][2 * hh + 1] : d[hh][2 * hh];
      store_element(places_.dbeta.at(at_.b, at_.t0 + row, hv), places_.dbeta.dtype, dot / beta.x / beta.x * beta.y);
    }
  }

  // Whether a token of the lane is one of the sequence. no_decay() suffices for usual gates; of a rate of 0 or infinity
  // it may be NaN.
  __device__ bool is_real(int n, int e) const { return 8 * n + 2 * j() + e < at_.rows; }

  // The address of the staged number of the lane's channel c + 8 hh and token 8 n + 2 j + e.
  __device__ unsigned staged_at(int n, int hh, int e) const {
    return m_.shared + M::staged + (2 * j() + 8 * n + e) * M::kStagedStride + (16 * warp_ + c() + 8 * hh) * 4;
  }
  __device__ float2 staged(int n, int hh) const {
    return {ptx::load_shared_f32(staged_at(n, hh, 0)), ptx::load_shared_f32(staged_at(n, hh, 1))};
  }
  __device__ void stage(int n, int hh, float first, float second) const {
    ptx::store_shared_f32(staged_at(n, hh, 0), first), ptx::store_shared_f32(staged_at(n, hh, 1), second);
  }
  // Writes what all warps have staged to a tensor of tokens.
  __device__ void write_staged(const TypedView& t, unsigned head) const {
    __syncthreads();  // all warps have staged their channels
    const unsigned size = size_of(t.dtype);
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < at_.rows * (kK / 4); i += M::kThreads) {
      const unsigned row = i / (kK / 4), four = i % (kK / 4);
      const float4 x = ptx::load_shared_f32x4(m_.shared + M::staged + row * M::kStagedStride + four * 16);
      write_four(t.at(at_.b, at_.t0 + row, head) + four * 4 * size, t.dtype, x, places_.fours);
    }
  }
  // Writes dq or dk: the tiles from `first` on. No thread reads staged numbers when it is called or when it returns.
  __device__ void write_accumulators(const TypedView& t, int first) {
    if (!t.data) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) stage(n, hh, own_.QR[first + n][2 * hh], own_.QR[first + n][2 * hh + 1]);
    write_staged(t, h_);
    __syncthreads();  // all reads of what is staged are done
  }

  // Computes y . dy of each token, of q and of k, over all channels.
  __device__ void sum_dots() {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      m_.own(q, Key::kQuery, pair), m_.own(k, Key::kKey, pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * pair + half;
        const float4 norm = m_.norms_of(n);
        float sums[4] = {};  // of q and k of the first token, of the second
#pragma unroll
        for (int hh = 0; hh < 2; ++hh) {
          const float2 x = two(q[2 * half + hh]), y = two(k[2 * half + hh]);
          const float(&Q)[4] = own_.Q(n), (&R)[4] = own_.R(n);
          sums[0] = fmaf(x.x * norm.x, Q[2 * hh], sums[0]), sums[1] = fmaf(y.x * norm.y, R[2 * hh], sums[1]);
          sums[2] = fmaf(x.y * norm.z, Q[2 * hh + 1], sums[2]), sums[3] = fmaf(y.y * norm.w, R[2 * hh + 1], sums[3]);
        }
        // Add over the lanes of a token. Then each lane has one of the four sums.
        const bool second = c() % 2, of_k = c() / 2 % 2;
        const float a = (second ? sums[2] : sums[0]) + __shfl_xor_sync(kAll, second ? sums[0] : sums[2], 4);
        const float b = (second ? sums[3] : sums[1]) + __shfl_xor_sync(kAll, second ? sums[1] : sums[3], 4);
        float sum = (of_k ? b : a) + __shfl_xor_sync(kAll, of_k ? a : b, 8);
        sum += __shfl_xor_sync(kAll, sum, 16);
        if (c() < 4)
          ptx::store_shared_f32(m_.shared + M::dots + (warp_ * kChunk + 8 * n + 2 * j() + second) * 8 + of_k * 4, sum);
      }
    }
    __syncthreads();  // sums of all warps are there
    for (unsigned i = threadIdx.x; i < 2 * kChunk; i += M::kThreads) {
      float dot = 0;
#pragma unroll
      for (int w = 0; w < M::kWarps; ++w) dot += ptx::load_shared_f32(m_.shared + M::dots + w * kChunk * 8 + i * 4);
      ptx::store_shared_f32(m_.shared + M::factors + i * 4, dot);
    }
    __syncthreads();  // the sums over all channels are there
  }
  __device__ void apply_norms() {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      m_.own(q, Key::kQuery, pair), m_.own(k, Key::kKey, pair);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int n = 2 * pair + r / 2, hh = r % 2;
        const float4 norm = m_.norms_of(n),
                     dot = ptx::load_shared_f32x4(m_.shared + M::factors + (8 * n + 2 * j()) * 8);
        const float2 x = two(q[r]), y = two(k[r]);
        float(&Q)[4] = own_.Q(n), (&R)[4] = own_.R(n);
        Q[2 * hh] = norm.x * fmaf(-x.x * norm.x, dot.x, Q[2 * hh]);
        Q[2 * hh + 1] = norm.z * fmaf(-x.y * norm.z, dot.z, Q[2 * hh + 1]);
        R[2 * hh] = norm.y * fmaf(-y.x * norm.y, dot.y, R[2 * hh]);
        R[2 * hh + 1] = norm.w * fmaf(-y.y * norm.w, dot.w, R[2 * hh + 1]);
      }
    }
  }

  const Tokens& x_;
  const WidePlaces& places_;
  const M m_;
  const ChunkPlace at_;
  const unsigned h_;
  const int V_;
  const unsigned warp_;  // known to be the same in all lanes
  Warp own_;
  float diagonal_[2][4], scores_[kJobs][4][2][4];
};

}  // namespace kda::cuda
