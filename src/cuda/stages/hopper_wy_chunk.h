// A cluster's chunk of stage B3 on Hopper (wy_dqkg.cu).
//
// The stage moves 336 KB a chunk of a value head and multiplies little, so the kernel is made for memory. A cluster of
// two CTAs has a chunk of a value head, and each CTA half of its channels. All that a CTA reads in bulk comes at once,
// by TMA, and takes 112 KB. So two CTAs share an SM: while one waits for its tiles, the other one multiplies and
// stores.
//
// The two warpgroups of a CTA divide columns: those of V where x = J^T dv_new is made (by both CTAs), then the CTA's
// channels. Rows are tokens: lane 4 g + t of warp w has rows 16 w + g and 8 more, and columns 8 n + 2 t and one more.
#pragma once
#include "cuda/backward/hopper_memory.h"
#include "cuda/stages/chunks.h"
#include "cuda/stages/tiles.h"

namespace kda::cuda::engine {

using stages::bf16;
using stages::ChunkAt;
using stages::Chunks;
using stages::Rows;

constexpr unsigned kWyThreads = 2 * kGroup;
constexpr unsigned kWyChannels = 64;       // channels of a CTA
constexpr unsigned kWyGroupChannels = 32;  // channels of a warpgroup

// Tiles are swizzled (Swizzle::k128).
struct WyGates {  // 32 channels of 64 tokens in f32, for each warpgroup
  unsigned char halves[2][kChunk][kRowBytes];
};
struct WyState {  // V-first: a row of 64 channels for each column. K-first: two halves of 64 columns, a row a channel
  unsigned char bytes[kSize][kRowBytes];
};
struct alignas(1024) WyShared {
  WideTile x;  // dv_new, then x
  WideTile d_o, v_new;
  WyState S, dS;
  WideHalf q, k;
  WyGates G;              // at last, what warps add to the last row of dG, and to dbeta
  float of_beta[kChunk];  // the second CTA's part of dbeta, in the first one
  // mbarriers. full: all tiles are there; the thread that asks for them arrives, all threads wait. sent: of_beta is
  // there; the second CTA sends its bytes, the first warpgroup of the first CTA waits.
  uint64_t full, sent;
};
static_assert(2 * (sizeof(WyShared) + 1024) <= 228 * 1024, "two CTAs share an SM");
struct WyAt {
  static constexpr unsigned full = offsetof(WyShared, full), sent = offsetof(WyShared, sent);
  static constexpr unsigned S = offsetof(WyShared, S), dS = offsetof(WyShared, dS), q = offsetof(WyShared, q);
  static constexpr unsigned k = offsetof(WyShared, k), G = offsetof(WyShared, G), x = offsetof(WyShared, x);
  static constexpr unsigned v_new = offsetof(WyShared, v_new), d_o = offsetof(WyShared, d_o);
  static constexpr unsigned of_beta = offsetof(WyShared, of_beta);
};
constexpr unsigned kWyBytes = offsetof(WyShared, of_beta);

// Named barriers of a warpgroup; the second one has the next number.
constexpr unsigned kWyGroup = 1;

struct WyMaps {
  CUtensorMap q, k, G, d_o, v_new, dv_new, h, dh;
};
struct WyCall {
  Chunks chunks;
  Rows q, k, v, G, beta, J, dq, dk, dv, dG, dAkk, dbeta;
  int64_t h_rows;
  unsigned HV, group;
  float scale;
  bool v_first;
};

// What a thread does with its CTA's part of a chunk.
template <bool kVFirst>
class WyChunk {
 public:
  __device__ WyChunk(const WyCall& call, const WyMaps& maps, const ChunkAt& at, unsigned hv, unsigned rank)
      : c_(call),
        maps_(maps),
        at_(at),
        hv_(hv),
        base_(ptx::shared_address(shared_memory())),
        rank_(rank),
        group_(__shfl_sync(kAll, threadIdx.x / kGroup, 0)),
        warp_(__shfl_sync(kAll, threadIdx.x / 32 % 4, 0)),
        lane_(threadIdx.x % 32) {}

  // Starts all copies. By the first warp.
  __device__ void fetch(int64_t state) const {
    if (!ptx::elect()) return;
    const unsigned full = base_ + WyAt::full, sent = base_ + WyAt::sent;
    ptx::init_barrier(full, 1), ptx::init_barrier(sent, 1);
    ptx::fence_barriers();
    ptx::arrive_expecting(full, kWyBytes), ptx::arrive_expecting(sent, sizeof(WyShared::of_beta));
    const unsigned h = hv_ / c_.group, own = kWyChannels * rank_;
    fetch_state(WyAt::S, maps_.h, state), fetch_state(WyAt::dS, maps_.dh, state);
    fetch_tile(WyAt::q, maps_.q, own, h), fetch_tile(WyAt::k, maps_.k, own, h);
    for (unsigned i = 0; i < 2; ++i) fetch_tile(WyAt::G + i * kWideHalf, maps_.G, own + kWyGroupChannels * i, hv_);
  }

  // Each CTA asks for half of the tiles that both need. Both CTAs' mbarriers are there.
  __device__ void fetch_shared() const {
    if (!ptx::elect()) return;
    share_tile(WyAt::x, maps_.dv_new), share_tile(WyAt::v_new, maps_.v_new), share_tile(WyAt::d_o, maps_.d_o);
  }
  __device__ void share_tile(unsigned to, const CUtensorMap& map) const {
    ptx::copy_tile_to(3, base_ + to + rank_ * kWideHalf, map, 64 * rank_, hv_, static_cast<unsigned>(at_.t0),
                      static_cast<unsigned>(at_.b), base_ + WyAt::full);
  }

  __device__ void run() {
    float x[32], of_beta[2];
    load_betas();
    solve(x, of_beta);
    share(x);
    float y[16], dq[16], dk[16];
    start_products(y, dq, dk);
    if (group_ == rank_) write_scores();
    write_channels(y, dq, dk, of_beta);
    write_dbeta(of_beta);
  }

 private:
  __device__ unsigned g() const { return lane_ / 4; }
  __device__ unsigned t() const { return lane_ % 4; }
  __device__ int row(int r) const { return static_cast<int>(16 * warp_ + g() + 8 * r); }
  __device__ bool is_real(int r) const { return row(r) < at_.rows; }
  // The thread's row r of a tensor, or a row that exists.
  __device__ char* row_of(const Rows& x, int r) const { return x.at(at_.b, at_.t0 + min(row(r), at_.rows - 1), hv_); }
  // The first of the thread's channels.
  __device__ unsigned channel() const { return kWyChannels * rank_ + kWyGroupChannels * group_ + 2 * t(); }
  __device__ void sync_group() const { ptx::sync_threads(kWyGroup + group_, kGroup); }
  __device__ uint64_t matrix(unsigned at) const { return ptx::matrix_at(base_ + at, 0, 1024, ptx::Swizzle::k128); }
  // Where columns 16 s .. of a tile of tokens begin.
  __device__ static unsigned step(unsigned s) { return s / 4 * kWideHalf + s % 4 * 32; }

  __device__ void fetch_tile(unsigned to, const CUtensorMap& map, unsigned first, unsigned head) const {
    ptx::copy_tile(base_ + to, map, first, head, static_cast<unsigned>(at_.t0), static_cast<unsigned>(at_.b),
                   base_ + WyAt::full);
  }
  __device__ void fetch_state(unsigned to, const CUtensorMap& map, int64_t state) const {
    const unsigned full = base_ + WyAt::full, row = static_cast<unsigned>(state), own = kWyChannels * rank_;
    if constexpr (kVFirst) ptx::copy_tile(base_ + to, map, own, 0, hv_, row, full);
    else
      for (unsigned i = 0; i < 2; ++i) ptx::copy_tile(base_ + to + i * kWideHalf, map, 64 * i, own, hv_, row, full);
  }
  __device__ void load_betas() {
#pragma unroll
    for (int r = 0; r < 2; ++r) beta_[r] = stages::load_element(row_of(c_.beta, r), c_.beta.dtype);
  }

  // Loads J^T as left operands, each as a sum of two bf16: with one, equal keys would lose all digits. What is above
  // J's diagonal is not read.
  __device__ void load_inverse(unsigned (&high)[4][4], unsigned (&low)[4][4]) const {
    const bool wide = c_.J.dtype == KDA_F32;
#pragma unroll
    for (unsigned s = 0; s < 4; ++s)
#pragma unroll
      for (unsigned p = 0; p < 4; ++p) {
        const int j = row(static_cast<int>(p % 2));
        float two[2];
#pragma unroll
        for (unsigned e = 0; e < 2; ++e) {
          const int i = static_cast<int>(16 * s + p / 2 * 8 + 2 * t() + e);
          const char* from = c_.J.at(at_.b, at_.t0 + i, hv_) + j * (wide ? 4 : 2);
          const bool real = i >= j && i < at_.rows;
          two[e] = !real  ? 0
                   : wide ? *reinterpret_cast<const float*>(from)
                          : __bfloat162float(*reinterpret_cast<const bf16*>(from));
        }
        const unsigned both = ptx::pack<bf16>(two[0], two[1]);
        high[s][p] = both;
        low[s][p] = ptx::pack<bf16>(two[0] - __uint_as_float(both << 16), two[1] - __uint_as_float(both & 0xffff0000u));
      }
  }
  // x = J^T dv_new in the warpgroup's half of the columns; dv = beta x and x.v in the CTA's half of them.
  __device__ void solve(float (&x)[32], float (&of_beta)[2]) const {
    unsigned high[4][4], low[4][4], v[2][4];
    load_inverse(high, low);
    load_values(v);
    ptx::wait_barrier(base_ + WyAt::full, 0);
    if (at_.rows < static_cast<int>(kChunk)) clear_tail();
    const uint64_t dv_new = matrix(WyAt::x + group_ * kWideHalf);
    ptx::fence_products();
#pragma unroll
    for (unsigned s = 0; s < 4; ++s) ptx::wgmma<bf16, true>(x, low[s], ptx::further(dv_new, s * 2048), s > 0);
#pragma unroll
    for (unsigned s = 0; s < 4; ++s) ptx::wgmma<bf16, true>(x, high[s], ptx::further(dv_new, s * 2048), true);
    ptx::commit_products();
    ptx::wait_for_products<0>();
    ptx::settle(x);
    write_values(x, v, of_beta);
  }
  // The first of the thread's columns of v that its CTA stores.
  __device__ unsigned column() const { return 64 * group_ + 32 * rank_ + 2 * t(); }
  __device__ void load_values(unsigned (&v)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (unsigned n = 0; n < 4; ++n)
        v[r][n] = *reinterpret_cast<const unsigned*>(row_of(c_.v, r) + (column() + 8 * n) * 2);
  }
  // Clears rows of dv_new behind the chunk's end: they came with data of other tokens, and 0 times NaN is NaN.
  __device__ void clear_tail() const {
    for (unsigned i = static_cast<unsigned>(at_.rows) * 16 + threadIdx.x; i < kChunk * 16; i += kWyThreads)
      ptx::store_shared4(base_ + WyAt::x + swizzled(i / 16, i % 16, kWideHalf), make_uint4(0, 0, 0, 0));
    ptx::fence_shared_for_async();  // products read them
    __syncthreads();                // all are cleared
  }
  __device__ static float2 two_of(unsigned x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }
  __device__ void write_values(const float (&x)[32], const unsigned (&v)[2][4], float (&of_beta)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      char* const dv = row_of(c_.dv, r);
      of_beta[r] = 0;
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) {
        const unsigned i = 4 * n + 2 * r, c = column() + 8 * n;
        const float2 two = two_of(v[r][n]), own{rank_ ? x[16 + i] : x[i], rank_ ? x[17 + i] : x[i + 1]};
        of_beta[r] = fmaf(own.x, two.x, fmaf(own.y, two.y, of_beta[r]));
        if (!is_real(r)) continue;
        if (c_.dv.dtype == KDA_F32)
          *reinterpret_cast<float2*>(dv + c * 4) = make_float2(beta_[r] * own.x, beta_[r] * own.y);
        else *reinterpret_cast<unsigned*>(dv + c * 2) = ptx::pack<bf16>(beta_[r] * own.x, beta_[r] * own.y);
      }
    }
  }
  // Puts x in the place of dv_new, in bf16, for both warpgroups.
  __device__ void share(const float (&x)[32]) const {
    sync_group();  // products of all warps have read dv_new
#pragma unroll
    for (unsigned n = 0; n < 8; n += 2) {
      unsigned packed[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) packed[i] = ptx::pack<bf16>(x[4 * n + 2 * i], x[4 * n + 2 * i + 1]);
      const unsigned own = 16 * warp_ + lane_ / 8 % 2 * 8 + lane_ % 8;
      ptx::store_matrices(base_ + WyAt::x + swizzled(own, 8 * group_ + n + lane_ / 16, kWideHalf), packed);
    }
    ptx::fence_shared_for_async();  // products read it
    __syncthreads();                // all of x is there
  }

  // y = x S^T, d_o S^T and v_new dS^T in the warpgroup's channels.
  __device__ void start_products(float (&y)[16], float (&dq)[16], float (&dk)[16]) const {
    const uint64_t S = matrix(WyAt::S + group_ * (kVFirst ? 64 : 32 * kRowBytes)), x = matrix(WyAt::x);
    ptx::fence_products();
    const auto multiply = [&](float(&d)[16], unsigned left, unsigned right) {
#pragma unroll
      for (unsigned s = 0; s < 8; ++s)
        ptx::wgmma_shared<bf16, kVFirst>(d, ptx::further(x, left + step(s)),
                                         ptx::further(S, right + (kVFirst ? s * 2048 : step(s))), s > 0);
    };
    multiply(y, 0, 0);
    multiply(dq, WyAt::d_o - WyAt::x, 0);
    multiply(dk, WyAt::v_new - WyAt::x, WyAt::dS - WyAt::S);
    ptx::commit_products();
  }
  // dAkk = -strict(x v_new^T): each CTA has half of the columns, which one of its warpgroups makes.
  __device__ void write_scores() const {
    float dA[16];
    const uint64_t x = matrix(WyAt::x), v_new = matrix(WyAt::v_new + rank_ * 32 * kRowBytes);
    ptx::fence_products();
#pragma unroll
    for (unsigned s = 0; s < 8; ++s)
      ptx::wgmma_shared<bf16>(dA, ptx::further(x, step(s)), ptx::further(v_new, step(s)), s > 0);
    ptx::commit_products();
    ptx::wait_for_products<0>();
    ptx::settle(dA);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      char* const to = row_of(c_.dAkk, r);
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) {
        const int j = static_cast<int>(32 * rank_ + 8 * n + 2 * t());
        const float2 two{j < row(r) ? -dA[4 * n + 2 * r] : 0, j + 1 < row(r) ? -dA[4 * n + 2 * r + 1] : 0};
        if (is_real(r)) *reinterpret_cast<float2*>(to + j * 4) = two;
      }
    }
  }

  // rowsum(S dS) of eight channels of the warp, those of columns 2 t and 2 t + 1.
  __device__ float2 state_dots() const {
    const unsigned first = kWyGroupChannels * group_ + 8 * warp_, i8 = lane_ / 8, r8 = lane_ % 8;
    float d[2][4] = {};
#pragma unroll
    for (unsigned v = 0; v < 128; v += 32) {  // a matrix for each eight of v
      unsigned x[4], z[4];
      const unsigned from =
          base_ + WyAt::S + (kVFirst ? swizzled(v + lane_, first / 8, 0) : swizzled(first + r8, v / 8 + i8, kWideHalf));
      if constexpr (kVFirst) ptx::load_transposed(x, from), ptx::load_transposed(z, from + (WyAt::dS - WyAt::S));
      else ptx::load_matrices(x, from), ptx::load_matrices(z, from + (WyAt::dS - WyAt::S));
      ptx::mma<bf16>(d[0], {x[0], 0, x[1], 0}, z[0], z[1]);
      ptx::mma<bf16>(d[1], {x[2], 0, x[3], 0}, z[2], z[3]);
    }
    // Element (c, c) of the product is in lane 4 c + c / 2.
    return make_float2(__shfl_sync(kAll, d[0][0] + d[1][0], 9 * t()),
                       __shfl_sync(kAll, d[0][1] + d[1][1], 9 * t() + 4));
  }
  // The thread's two channels of tile n, in a row of a tile of keys or of gates.
  __device__ float2 load_keys(unsigned tile, unsigned row, unsigned n) const {
    return two_of(ptx::load_shared(base_ + tile + swizzled(row, 4 * group_ + n, 0) + 4 * t()));
  }
  __device__ float2 load_gates(unsigned row, unsigned n) const {
    return ptx::load_shared_f32x2(base_ + WyAt::G + group_ * kWideHalf + swizzled(row, 2 * n + t() / 2, 0) +
                                  8 * (t() % 2));
  }

  // dq, dk and dG of the thread's channels, and its part of kG.y.
  __device__ void write_channels(float (&y)[16], float (&dq)[16], float (&dk)[16], float (&of_beta)[2]) const {
    const float2 SdS = state_dots();
    float2 last[4], written[4];  // G of the last row; sums over rows of k (v_new dS^T) F
    // The warp has rowsum(S dS) of columns 8 warp_ and on. The sum over the eight lanes of a column takes it once.
#pragma unroll
    for (unsigned n = 0; n < 4; ++n) {
      const bool adds = n == warp_ && g() == 0;
      last[n] = load_gates(static_cast<unsigned>(at_.rows - 1), n);
      written[n].x = ptx::exp2(last[n].x) * (adds ? SdS.x : 0);
      written[n].y = ptx::exp2(last[n].y) * (adds ? SdS.y : 0);
    }
    ptx::wait_for_products<0>();
    ptx::settle(y), ptx::settle(dq), ptx::settle(dk);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) {
        const unsigned i = 4 * n + 2 * r, own = static_cast<unsigned>(row(r));
        const float2 q = load_keys(WyAt::q, own, n), k = load_keys(WyAt::k, own, n), G = load_gates(own, n);
        const float first = finish(q.x, k.x, G.x, last[n].x, r, y[i], dq[i], dk[i], of_beta[r]);
        const float second = finish(q.y, k.y, G.y, last[n].y, r, y[i + 1], dq[i + 1], dk[i + 1], of_beta[r]);
        if (is_real(r)) written[n].x += first, written[n].y += second;
      }
    store(dq, dk, y);
    add_behind(written, y);
  }
  // Turns products into an element of dq and dk and, in place of y, of dG. Returns k (v_new dS^T) F.
  __device__ float finish(float q, float k, float G, float last, int r, float& y, float& dq, float& dk,
                          float& of_beta) const {
    const float E = ptx::exp2(G), F = ptx::exp2(last - G), kG = k * E, read = beta_[r] * y;
    dq *= c_.scale * E, dk *= F;
    const float written = k * dk;
    dk = fmaf(-E, read, dk);
    of_beta = fmaf(-kG, y, of_beta);
    y = fmaf(q, dq, -fmaf(kG, read, written));
    return written;
  }
  // Stores dq, dk and dG, but for the last row of dG.
  __device__ void store(const float (&dq)[16], const float (&dk)[16], const float (&dG)[16]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!is_real(r)) continue;
      const auto store_row = [&](const Rows& x, const float(&values)[16]) {
        char* const to = row_of(x, r) + channel() * 4;
#pragma unroll
        for (unsigned n = 0; n < 4; ++n)
          *reinterpret_cast<float2*>(to + 32 * n) = make_float2(values[4 * n + 2 * r], values[4 * n + 2 * r + 1]);
      };
      store_row(c_.dq, dq), store_row(c_.dk, dk);
      if (row(r) < at_.rows - 1) store_row(c_.dG, dG);
    }
  }
  // Stores the last row of dG, with the sums over the rows of all warps.
  __device__ void add_behind(float2 (&sums)[4], const float (&dG)[16]) const {
#pragma unroll
    for (unsigned n = 0; n < 4; ++n)
#pragma unroll
      for (unsigned lanes = 4; lanes < 32; lanes *= 2)
        sums[n].x += __shfl_xor_sync(kAll, sums[n].x, lanes), sums[n].y += __shfl_xor_sync(kAll, sums[n].y, lanes);
    const unsigned at = scratch() + 2 * t() * 4;
    sync_group();  // gates have been read
    if (g() == 0)
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) ptx::store_shared_f32x2(at + (warp_ * kWyGroupChannels + 8 * n) * 4, sums[n]);
    sync_group();  // sums of all warps are there
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row(r) != at_.rows - 1) continue;
      char* const to = row_of(c_.dG, r) + channel() * 4;
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) {
        float2 all = make_float2(dG[4 * n + 2 * r], dG[4 * n + 2 * r + 1]);
        for (unsigned w = 0; w < 4; ++w) {
          const float2 more = ptx::load_shared_f32x2(at + (w * kWyGroupChannels + 8 * n) * 4);
          all.x += more.x, all.y += more.y;
        }
        *reinterpret_cast<float2*>(to + 32 * n) = all;
      }
    }
  }
  // Memory of the warpgroup, when it has read its gates.
  __device__ unsigned scratch() const { return base_ + WyAt::G + group_ * kWideHalf; }

  // dbeta = x.v - kG.y: the parts of both warpgroups of the second CTA, then of both of the first one.
  __device__ void write_dbeta(float (&of_beta)[2]) const {
    const unsigned own = static_cast<unsigned>(row(0)) * 4, other = base_ + WyAt::G + kWideHalf + 1024 + own;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      of_beta[r] += __shfl_xor_sync(kAll, of_beta[r], 1), of_beta[r] += __shfl_xor_sync(kAll, of_beta[r], 2);
      if (group_ == 1 && t() == 0) ptx::store_shared_f32(other + 32 * r, of_beta[r]);
    }
    __syncthreads();  // the parts of the second warpgroup are there
    if (group_ == 1) return;
    const unsigned buffer = base_ + WyAt::of_beta, sent = base_ + WyAt::sent;
    if (rank_ == 0) ptx::wait_barrier(sent, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = of_beta[r] + ptx::load_shared_f32(other + 32 * r);
      if (t() > 0) continue;
      if (rank_ == 1)
        ptx::send(ptx::address_in(buffer + own + 32 * r, 0), __float_as_uint(sum), ptx::address_in(sent, 0));
      else if (is_real(r))
        *reinterpret_cast<float*>(row_of(c_.dbeta, r)) = sum + ptx::load_shared_f32(buffer + own + 32 * r);
    }
  }

  const WyCall& c_;
  const WyMaps& maps_;
  const ChunkAt& at_;
  const unsigned hv_, base_, rank_, group_, warp_, lane_;
  float beta_[2];
};

}  // namespace kda::cuda::engine
