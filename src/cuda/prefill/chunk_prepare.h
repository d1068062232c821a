// The first kernel of cuda_prefill_chunk: a block makes the image of one chunk of one value head (chunk_image.h).
//
// Warp w has the block of tokens 8 w .. 8 w + 7. Its lane 4 i + j has token i and channels 4 j .. 4 j + 3 of every
// 16. This is the layout of operands, so rows of q, then rows of k, times columns of k, go from registers to scores.
// P_i is the sum of log2 gates from the block's first token through i, and Pt that of all its tokens:
//   a_i = 2^P_i    s_j = 2^(Pt - P_j)    b(u,w) = 2^(Pt of blocks u .. w-1)
//   qG = q a b(0,w)    kG = k a b(0,w)    kg = k s b(w+1,4)    ell = b(0,4)
//   scores of block w with an earlier block c:  (q a b(c+1,w)) . (k s)
//   scores inside a block: rows and columns are in the two halves of 8, of each 4, of each 2. They have the decays from
//   the border b, the last token of the first half: 2^(P_i - P_b) and 2^(P_b - P_j). And q_i . k_i itself
// All factors are at most 1. So scores are exact for any gate, in f16, and no token affects the scores of those
// before it.
//
// Then T = (I + Akk)^-1 diag(beta) in f32, by forward substitution, in one warp with a column for each lane.
#pragma once
#include "cuda/gate/gate.h"
#include "cuda/prefill/chunk_image.h"
#include "cuda/ptx/sm80.h"

namespace kda::cuda {

constexpr int kPrepareThreads = 128, kBlockRows = 8;
constexpr float kLeastStep = -160;  // of a log2 gate: the decay is 0 in f32

// Where things are in shared memory, in bytes. Rows are so far apart that eight of them are free of bank conflicts.
struct PrepareMemory {
  static constexpr int kAStride = (kRows + 4) * 4;
  static constexpr int kFactors = 11;  // b(0,w) of all w; b(w+1,4) of all w; b(1,2), b(2,3), b(1,3)
  int q, k, g;                         // raw rows; then q a, k a and k s, f16, where their own elements were
  int q_stride, g_stride;
  int A;                  // f32 [column][row]; before: Pt of the blocks [4][K]
  int factors;            // f16 [kFactors][K]
  int bias, beta, bytes;  // f32 [K], [32]

  PrepareMemory(int K, const Tokens& x)
      : q(0),
        k(q + kRows * stride(K, x.qkv_dtype)),
        g(k + kRows * stride(K, x.qkv_dtype)),
        q_stride(stride(K, x.qkv_dtype)),
        g_stride(stride(K, x.g_dtype)),
        A(g + kRows * g_stride),
        factors(A + kRows * kAStride),
        bias(factors + kFactors * K * 2),
        beta(bias + K * 4),
        bytes(beta + kRows * 4) {}

 private:
  static int stride(int K, int32_t dtype) { return static_cast<int>(size_of(dtype)) * (K + 16); }
};

// Tokens t0 .. t0 + rows - 1 of row b; without rows there is no chunk.
struct ChunkPlace {
  unsigned b, t0, rows;
};

// Returns the last sequence whose first_row is at most `row`. A warp tries 32 at a time.
template <class FirstRow>
__device__ unsigned packed_sequence(const ForwardProblem& p, unsigned row, const FirstRow& first_row) {
  const unsigned lane = threadIdx.x % 32;
  unsigned first = 0, end = static_cast<unsigned>(p.N);
  while (end - first > 1) {
    const unsigned step = (end - first + 31) / 32, n = first + lane * step;
    const bool before = n < end && first_row(packed_at(p.args.in.cu_seqlens, p.T, n)) <= row;
    const unsigned last = 31 - __clz(static_cast<int>(__ballot_sync(kAll, before) | 1));
    first += last * step, end = min(end, first + step);
  }
  return first;
}

__device__ inline ChunkPlace chunk_at(const ForwardProblem& p, const Pass& pass, unsigned row) {
  const unsigned n = pass.packed ? packed_sequence(p, row, [&](const Sequence& s) { return pass.first_row(s); })
                                 : pass.by_span.quotient(row);
  const Sequence s = sequence_at(p, p.args.in, p.args.states, n);
  const Cuts cuts = pass.cuts_of(s);
  const unsigned first = pass.first_row(s), c = pass.first + row - first;
  if (!s.live || row < first || c < cuts.first() || c >= pass.end_of(cuts)) return {};
  const unsigned token = cuts.token(c);
  return {static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0) + token,
          min(cuts.behind(c) - token, unsigned{kRows})};
}

// Starts the copies of a chunk's rows, with zeros behind them. A thread copies kBytes at a time, always the same
// piece of some rows. kBytes 0 is for rows that lie anywhere: elements are copied one by one, and are there at once.
template <int kK, int kBytes>
__device__ void ask_rows(const View& t, int32_t dtype, const ChunkPlace& at, unsigned head, unsigned to,
                         unsigned stride) {
  if constexpr (kBytes == 0) {
    for (unsigned i = threadIdx.x; i < kRows * kK; i += kPrepareThreads) {
      const unsigned row = i / kK, c = i % kK * size_of(dtype);
      const unsigned raw = row < at.rows ? load_raw<false>(t.at(at.b, at.t0 + row, head) + c, dtype) : 0;
      if (dtype == KDA_F32) ptx::store_shared(to + row * stride + c, raw);
      else ptx::store_shared16(to + row * stride + c, static_cast<unsigned short>(raw));
    }
    return;
  }
  constexpr int kPiece = kBytes ? kBytes : 1;
  const unsigned shift = dtype == KDA_F32, pieces = kK * 2 / kPiece << shift, step = kPrepareThreads / pieces;
  const unsigned piece = threadIdx.x % pieces * kPiece;
  unsigned row = threadIdx.x / pieces;
  const char* from = t.at(at.b, at.t0, head) + piece;
  const char* source = from + row * static_cast<uint64_t>(t.stride1);
  const uint64_t next = step * static_cast<uint64_t>(t.stride1);
  to += row * stride + piece;
#pragma unroll 4
  for (; row < kRows; row += step, source += next, to += step * stride) {
    const bool real = row < at.rows;
    if constexpr (kBytes == 16) ptx::copy16(to, real ? source : from, real ? 16 : 0);
    else if constexpr (kBytes == 8) ptx::copy8(to, real ? source : from, real ? 8 : 0);
  }
}

// Loads four neighbours from shared memory.
__device__ inline void load_four(float (&x)[4], unsigned from, int32_t dtype) {
  if (dtype == KDA_F32) {
    const float4 four = ptx::load_shared_f32x4(from);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    return;
  }
  const uint2 raw = ptx::load_shared2(from);
  if (dtype == KDA_BF16) {
    x[0] = __uint_as_float(raw.x << 16), x[1] = __uint_as_float(raw.x & 0xffff0000u);
    x[2] = __uint_as_float(raw.y << 16), x[3] = __uint_as_float(raw.y & 0xffff0000u);
  } else {
    const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
    const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
}
template <class T>
__device__ uint2 packed(const float (&x)[4], const float (&f)[4]) {
  return {ptx::pack<T>(x[0] * f[0], x[1] * f[1]), ptx::pack<T>(x[2] * f[2], x[3] * f[3])};
}
// Four products of f16.
__device__ inline uint2 scaled(uint2 x, uint2 f) {
  const auto two = [](const unsigned& a, const unsigned& b) {
    const __half2 product = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const unsigned&>(product);
  };
  return {two(x.x, f.x), two(x.y, f.y)};
}

// One chunk, as a thread sees it.
template <int kK>
class Preparation {
  static constexpr int kSteps = kK / 16;
  using Out = Image<kK>;

 public:
  __device__ Preparation(const Tokens& x, const PrepareMemory& m, unsigned shared, const ChunkPlace& at, unsigned hv)
      : x_(x), m_(m), shared_(shared), at_(at), hv_(hv), w_(__shfl_sync(kAll, threadIdx.x / 32, 0)) {
    const unsigned own = row() * static_cast<unsigned>(m.q_stride) + j() * 4 * size_of(x.qkv_dtype);
    q_ = shared + m.q + own, k_ = shared + m.k + own;
    g_ = shared + m.g + i() * m.g_stride + j() * 4 * size_of(x.g_dtype);
    q_step_ = 16 * size_of(x.qkv_dtype), g_step_ = 16 * size_of(x.g_dtype);
  }

  // Starts the copies of all inputs.
  template <int kBytes>
  __device__ void ask(unsigned h) {
    ask_rows<kK, kBytes>(x_.q, x_.qkv_dtype, at_, h, shared_ + m_.q, m_.q_stride);
    ask_rows<kK, kBytes>(x_.k, x_.qkv_dtype, at_, h, shared_ + m_.k, m_.q_stride);
    ask_rows<kK, kBytes>(x_.g, x_.g_dtype, at_, hv_, shared_ + m_.g, m_.g_stride);
    ptx::commit_copies();
    for (unsigned c = threadIdx.x; c < kK; c += kPrepareThreads) {
      const float bias = x_.bias ? *reinterpret_cast<const float*>(x_.bias + hv_ * x_.bias_stride + c * 4) : 0.0f;
      ptx::store_shared_f32(shared_ + m_.bias + c * 4, bias);
    }
    A_log_ = x_.A_log ? *reinterpret_cast<const float*>(x_.A_log + hv_ * 4) : 0.0f;
    rate_ = expf(moderate(A_log_));
    beta_ = 0;
    if (is_real()) {
      const unsigned raw = load_raw<false>(x_.beta.at(at_.b, at_.t0 + row(), hv_), x_.beta_dtype);
      beta_ = activated_beta(x_.beta_form, value_of(x_.beta_dtype, raw));
    }
    if (j() == 0) ptx::store_shared_f32(shared_ + m_.beta + row() * 4, beta_);
  }

  // Computes the lengths of q and k, their factors, and what is left of the scale.
  __device__ void normalise(char* image) {
    Products all = products([](float(&)[4], float(&)[4]) {});
    float scale = x_.scale;
    if (x_.qk_l2norm) {
      const bool huge_q = is_huge(all.qq), huge_k = is_huge(all.kk);
      const float by_q = huge_q ? kShrink : 1.0f, by_k = huge_k ? kShrink : 1.0f;
      if (__any_sync(kAll, huge_q || huge_k)) [[unlikely]]
        all = products([&](float(&q)[4], float(&k)[4]) {
#pragma unroll
          for (int e = 0; e < 4; ++e) q[e] *= by_q, k[e] *= by_k;
        });
      q_factor_ = inverse_norm(all.qq, huge_q), k_factor_ = inverse_norm(all.kk, huge_k);
      qk_ = all.qk * q_factor_ * k_factor_;
      q_factor_ *= by_q, k_factor_ *= by_k;
    } else {  // a power of two
      const bool huge = is_huge(all.qq);
      const float by_q = huge ? kShrink : 1.0f;
      if (__any_sync(kAll, huge)) [[unlikely]]
        all = products([&](float(&q)[4], float(&)[4]) {
#pragma unroll
          for (int e = 0; e < 4; ++e) q[e] *= by_q;
        });
      const int own = all.qq > 0 ? min(max(((__float_as_int(all.qq) >> 23) - 127) >> 1, -60), 60) : 0;
      const int e = huge ? min(own + 70, 120) : own;  // 70: of kShrink
      q_factor_ = __int_as_float((127 - e) << 23), k_factor_ = 1, scale *= __int_as_float((127 + e) << 23);
      qk_ = all.qk * (huge ? q_factor_ / kShrink : q_factor_);
    }
    if (j() == 0) reinterpret_cast<float*>(image + Out::scale)[row()] = scale;
  }

  // Computes the decays of the warp's own block, its scores, and what other blocks need of it.
  __device__ void decay() {
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      float q[4], k[4], P[4], gamma[4];
      log2_gates(gamma, s);
      load_four(q, q_ + s * q_step_, x_.qkv_dtype), load_four(k, k_ + s * q_step_, x_.qkv_dtype);
#pragma unroll
      for (int e = 0; e < 4; ++e) q[e] *= q_factor_, k[e] *= k_factor_, P[e] = gamma[e];
      sum_up(P);
      score_block(q, k, P, gamma);
      float a[4], rest[4], total[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[e] = __shfl_sync(kAll, P[e], 28 + j());
        a[e] = ptx::exp2(P[e]), rest[e] = ptx::exp2(total[e] - P[e]);
      }
      ptx::store_shared2(q_ + s * q_step_, packed<__half>(q, a));
      ptx::store_shared2(k_ + s * q_step_, packed<__half>(k, a));
      ptx::store_shared2(g_ + w() * g_block() + s * g_step_, packed<__half>(k, rest));
      if (i() == 0)
        ptx::store_shared_f32x4(shared_ + m_.A + (w() * kK + s * 16 + j() * 4) * 4,
                                make_float4(total[0], total[1], total[2], total[3]));
    }
  }

  // Computes the factors between blocks: a thread has a channel.
  __device__ void multiply_out(char* image) const {
    const unsigned c = threadIdx.x;
    if (c >= kK) return;
    float Pt[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) Pt[b] = ptx::load_shared_f32(shared_ + m_.A + (b * kK + c) * 4);
    const float Pt01 = Pt[0] + Pt[1], Pt23 = Pt[2] + Pt[3];
    const float exponents[PrepareMemory::kFactors] = {0,     Pt[0], Pt01,  Pt01 + Pt[2], Pt[1] + Pt23, Pt23,
                                                      Pt[3], 0,     Pt[1], Pt[2],        Pt[1] + Pt[2]};
#pragma unroll
    for (int f = 0; f < PrepareMemory::kFactors; ++f)
      ptx::store_shared16(shared_ + m_.factors + (f * kK + c) * 2,
                          __half_as_ushort(__float2half_rn(ptx::exp2(exponents[f]))));
    reinterpret_cast<float*>(image + Out::ell)[c] = ptx::exp2(Pt01 + Pt23);
  }

  // Writes the operands, and computes scores with earlier blocks.
  __device__ void write_operands(char* image, bool mirrored) {
    uint4* to = reinterpret_cast<uint4*>(image) + w() * (kSteps / 2) * 32 + lane();
#pragma unroll 1
    for (int pair = 0; pair < kSteps / 2; ++pair, to += 32) {
      unsigned kG[4], qG[4], kg[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int s = 2 * pair + half;
        const uint2 qa = ptx::load_shared2(q_ + s * q_step_), ka = ptx::load_shared2(k_ + s * q_step_);
        const uint2 ks = ptx::load_shared2(g_ + w() * g_block() + s * g_step_);
        const uint2 before = factor(w(), s), after = factor(4 + w(), s);
        const uint2 x = scaled(ka, {before.x ^ 0x80008000u, before.y ^ 0x80008000u});
        const uint2 y = scaled(qa, before), z = scaled(ks, after);
        kG[2 * half] = x.x, kG[2 * half + 1] = x.y;
        qG[2 * half] = y.x, qG[2 * half + 1] = y.y;
        kg[2 * half] = z.x, kg[2 * half + 1] = z.y;
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          if (c >= w()) continue;
          uint2 rows_q = qa, rows_k = ka;
          if (c + 1 < w()) {
            const uint2 between = factor(w() == 2 ? 8 : c == 1 ? 9 : 10, s);
            rows_q = scaled(qa, between), rows_k = scaled(ka, between);
          }
          const uint2 columns = ptx::load_shared2(g_ + c * g_block() + s * g_step_);
          const unsigned rows[4] = {rows_q.x, rows_k.x, rows_q.y, rows_k.y};
          ptx::mma<__half>(scores_[c], rows, columns.x, columns.y);
        }
      }
      if (mirrored) turn(kG), turn(qG);
      else turn(kg);
      store(to + Out::kG / 16, kG), store(to + Out::qG / 16, qG), store(to + Out::kg / 16, kg);
    }
  }

  // Lane 4 i + j has columns 2 j and 2 j + 1 of each block, in row i of q, then of k.
  __device__ void write_scores(char* image, bool mirrored) const {
    unsigned Aqk[4] = {};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c > w()) continue;
      float A[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) A[e] = c < w() ? scores_[c < 3 ? c : 0][e] : own_score(e);
      Aqk[c] = ptx::pack<__half>(A[0], A[1]);
      const unsigned to = shared_ + m_.A + (c * kBlockRows + 2 * j()) * m_.kAStride + row() * 4;
      ptx::store_shared_f32(to, beta_ * A[2]), ptx::store_shared_f32(to + m_.kAStride, beta_ * A[3]);
    }
    if (mirrored) {
      turn(Aqk);
#pragma unroll
      for (int c = 0; c < 4; ++c) reinterpret_cast<unsigned*>(image + Out::Aqk)[(c * 32 + lane()) * 4 + w()] = Aqk[c];
    } else {
      store(reinterpret_cast<uint4*>(image + Out::Aqk) + w() * 32 + lane(), Aqk);
    }
  }

  // Computes T in one warp: column `lane`, row by row. X_i = e_i - sum_(j<i) A_ij X_j, where each X_j is subtracted
  // from all rows below.
  __device__ void invert(char* image, bool mirrored) const {
    float X[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) X[r] = r == static_cast<int>(lane()) ? 1.0f : 0.0f;
    const unsigned A = shared_ + m_.A;
#pragma unroll
    for (int c = 0; c < kRows - 1; ++c)
#pragma unroll
      for (int r = (c + 1) / 4 * 4; r < kRows; r += 4) {
        const float4 four = ptx::load_shared_f32x4(A + c * m_.kAStride + r * 4);
        const float a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (r + e > c) X[r + e] = fmaf(-a[e], X[c], X[r + e]);
      }
    // Bring T into the order of operands, where the rows of q were.
    const float beta = ptx::load_shared_f32(shared_ + m_.beta + lane() * 4);
    const unsigned staged = shared_ + m_.q, own = lane() / 8 * 4 + lane() % 8 / 2 * 16 + lane() % 2 * 2;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      ptx::store_shared16(staged + r / 8 * 512 + r % 8 * 64 + own,
                          __half_as_ushort(__float2half_rn(r < static_cast<int>(lane()) ? 0.0f : X[r] * beta)));
    __syncwarp();      // all columns are staged
    unsigned T[4][4];  // blocks of rows, of columns
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint4 row = ptx::load_shared4(staged + b * 512 + lane() * 16);
      T[b][0] = row.x, T[b][1] = row.y, T[b][2] = row.z, T[b][3] = row.w;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      unsigned x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = mirrored ? T[c][b] : T[b][c];
      if (mirrored) turn(x);
      store(reinterpret_cast<uint4*>(image + Out::T) + b * 32 + lane(), x);
    }
  }

 private:
  __device__ unsigned w() const { return w_; }  // known to be the same in all lanes
  __device__ static unsigned lane() { return threadIdx.x % 32; }
  __device__ static unsigned i() { return threadIdx.x % 32 / 4; }
  __device__ static unsigned j() { return threadIdx.x % 4; }
  __device__ static unsigned row() { return threadIdx.x / 4; }
  __device__ bool is_real() const { return row() < at_.rows; }
  // Bytes from one block to the next.
  __device__ unsigned g_block() const { return kBlockRows * m_.g_stride; }
  __device__ uint2 factor(unsigned f, int s) const {
    return ptx::load_shared2(shared_ + m_.factors + (f * kK + s * 16 + j() * 4) * 2);
  }
  // Transposes four 8x8 matrices of the warp.
  __device__ static void turn(unsigned (&x)[4]) {
#pragma unroll
    for (unsigned& matrix : x) matrix = ptx::transposed(matrix);
  }
  __device__ static void store(uint4* to, const unsigned (&x)[4]) { *to = make_uint4(x[0], x[1], x[2], x[3]); }

  // Products of the own row, after change(q, k) of four channels each.
  template <class Change>
  __device__ Products products(const Change& change) const {
    Products mine{};
#pragma unroll 2
    for (int s = 0; s < kSteps; ++s) {
      float q[4], k[4];
      load_four(q, q_ + s * q_step_, x_.qkv_dtype), load_four(k, k_ + s * q_step_, x_.qkv_dtype);
      change(q, k);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        mine.qq = fmaf(q[e], q[e], mine.qq), mine.kk = fmaf(k[e], k[e], mine.kk), mine.qk = fmaf(q[e], k[e], mine.qk);
    }
    return {sum_over<4>(mine.qq), sum_over<4>(mine.kk), sum_over<4>(mine.qk)};
  }
  __device__ void log2_gates(float (&gamma)[4], int s) const {
    float g[4];
    load_four(g, g_ + w() * g_block() + s * g_step_, x_.g_dtype);
    const float4 bias = ptx::load_shared_f32x4(shared_ + m_.bias + (s * 16 + j() * 4) * 4);
    g[0] += bias.x, g[1] += bias.y, g[2] += bias.z, g[3] += bias.w;
    log_decays(x_, A_log_, rate_, g);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float step = g[e] * kLog2e;
      gamma[e] = !is_real() ? 0.0f : step < kLeastStep ? kLeastStep : step;  // a NaN stays
    }
  }
  // Adds up over the tokens of a block, from the first on.
  __device__ static void sum_up(float (&x)[4]) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float before = __shfl_up_sync(kAll, x[e], step);
        if (lane() >= static_cast<unsigned>(step)) x[e] += before;
      }
  }
  // The element of the own block that an accumulator has at e.
  __device__ float own_score(int e) const {
    const unsigned column = 2 * j() + e % 2, apart = i() ^ column;
    if (column > i()) return 0;
    if (apart == 0) return e < 2 ? qk_ : 0;
    return apart >= 4 ? block_[0][e] : apart >= 2 ? block_[1][e] : block_[2][e];
  }
  // Products of the own block with the factors of each level. Rows and columns of a level are different tokens, so
  // one tile serves as both. write_scores() leaves out the elements that have no use.
  __device__ void score_block(const float (&q)[4], const float (&k)[4], const float (&P)[4], const float (&gamma)[4]) {
    float f[3][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float of_8 = P[e] - __shfl_sync(kAll, P[e], 12 + j());
      const float of_4 = P[e] - __shfl_sync(kAll, P[e], (lane() & 16) + 4 + j());
      f[0][e] = ptx::exp2(i() & 4 ? of_8 : -of_8);
      f[1][e] = ptx::exp2(i() & 2 ? of_4 : -of_4);
      f[2][e] = i() & 1 ? ptx::exp2(gamma[e]) : 1.0f;
    }
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const uint2 rows_q = packed<__half>(q, f[level]), rows_k = packed<__half>(k, f[level]);
      const unsigned rows[4] = {rows_q.x, rows_k.x, rows_q.y, rows_k.y};
      ptx::mma<__half>(block_[level], rows, rows_k.x, rows_k.y);
    }
  }

  const Tokens& x_;
  const PrepareMemory& m_;
  const unsigned shared_;
  const ChunkPlace at_;
  const unsigned hv_, w_;
  unsigned q_, k_, g_;        // own elements; g_ of block 0
  unsigned q_step_, g_step_;  // bytes from 16 channels to the next
  float A_log_, rate_, beta_, q_factor_, k_factor_, qk_;
  float block_[3][4] = {}, scores_[3][4] = {};  // of each level; with each block
};

// mirrored: for the reverse scan of backward.
template <int kK>
__global__ void __launch_bounds__(kPrepareThreads, 6)
    prepare_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                   const __grid_constant__ Pass pass, const __grid_constant__ PrepareMemory m, const int bytes_at_once,
                   const bool mirrored, char* images) {
  extern __shared__ float4 dynamic[];
  wait_for_stream();
  const unsigned row = pass.by_heads.quotient(blockIdx.x), hv = pass.first_head + blockIdx.x - row * pass.heads;
  const ChunkPlace at = chunk_at(p, pass, row);
  if (!at.rows) return;
  char* image = images + blockIdx.x * static_cast<uint64_t>(Image<kK>::bytes);

  Preparation<kK> chunk(x, m, ptx::shared_address(dynamic), at, hv);
  const unsigned h = pass.by_group.quotient(hv);
  if (bytes_at_once == 16) chunk.template ask<16>(h);
  else if (bytes_at_once == 8) chunk.template ask<8>(h);
  else chunk.template ask<0>(h);
  ptx::wait_for_copies<0>();
  __syncthreads();  // rows, bias and beta are in shared memory
  chunk.normalise(image);
  chunk.decay();
  __syncthreads();  // decayed rows and the blocks' totals are there
  chunk.multiply_out(image);
  __syncthreads();  // factors are there, and totals are no longer read
  chunk.write_operands(image, mirrored);
  chunk.write_scores(image, mirrored);
  __syncthreads();  // A is there, and the rows are no longer read
  if (threadIdx.x < 32) chunk.invert(image, mirrored);
}

}  // namespace kda::cuda
