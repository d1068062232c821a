// The multipliers of the wide kernel: each warp has 16 channels and all 64 tokens of an item (wide.h).
//
// Products with states, and dA and B, are wgmma of a warpgroup (64 channels; one warpgroup makes dA, the other B).
// Those with states run while gates and operands are made. Products of pairs are mma.sync, whose left operands are
// the warp's own registers. The loop has no barrier of the block, only mbarriers, and a named barrier where a chunk
// is short. Where K is 64, the warps of the second warpgroup have no channels: they make B and no more.
#pragma once
#include "cuda/backward/hopper_memory.h"

namespace kda::cuda::engine {

// Tells where a warp finds the data that wide.h needs.
struct WideView {
  static constexpr bool kTakesSteps = true;
  unsigned base, raw, norms;
  __device__ static unsigned warp() { return threadIdx.x / 32; }
  // 16 channels of 16 tokens of a tile, or of 16 columns of a state.
  __device__ static unsigned own_place(unsigned row, unsigned half) {
    const unsigned lane = threadIdx.x % 32;
    return swizzled(row + lane / 16 * 8 + lane % 8, 2 * warp() + lane / 8 % 2, half);
  }
  __device__ void own(unsigned (&x)[4], Key key, int pair) const {
    const unsigned tile = raw + (key == Key::kQuery ? offsetof(WideShared::Raw, q) : offsetof(WideShared::Raw, k));
    ptx::load_transposed(x, tile + own_place(16 * pair, kWideHalf));
  }
  __device__ unsigned own_gates(int pair) const {
    return raw + static_cast<unsigned>(offsetof(WideShared::Raw, g)) + own_place(16 * pair, kWideHalf);
  }
  __device__ float4 norms_of(int n) const { return ptx::load_shared_f32x4(norms + (8 * n + threadIdx.x % 4 * 2) * 8); }
  // Steps are kept where the warp's dots will be.
  __device__ unsigned step(unsigned w, unsigned c) const {
    return WidePlace{base}.dots(warp(), (w - 1) * 4 + c / 4) + c % 4 * 4;
  }
  __device__ unsigned scores(Scores matrix, unsigned row, unsigned piece) const {
    return base + (matrix == Scores::kdA ? WideAt::dA : WideAt::B) + swizzled(row, piece, 0);
  }
};

template <class Gate>
class WideMultiplier {
  using Warp = WideWarp<WideView, Gate::kBlock>;
  using bf16 = __nv_bfloat16;
  static constexpr int kTiles = Warp::kTiles;

 public:
  __device__ WideMultiplier(const WideCall& call, WidePlace at)
      : call_(call), at_(at), warp_(__shfl_sync(kAll, threadIdx.x / 32, 0)), gate_(call.x, 0) {}

  __device__ void run() {
    if (warp_ >= call_.warps()) return make_scores_only();
    for (n_ = 0; take_item(); ++n_) {
      const WideView view{at_.base, at_.raw(n_), at_.norms(n_)};
      take_head();
      multiply();
      write_scores(lane());
      at_.wait_norms(n_);
      make_operands(view);
      finish_products(view);
      at_.wait(WideAt::scores_full, n_);
      own_.multiply_pairs(view, call_.x.scale);
      finish();
      if (call_.places.gate) write_gates(view);
      add_heads();
      write_keys(view);
    }
  }

 private:
  __device__ static unsigned lane() { return threadIdx.x % 32; }
  __device__ static unsigned c() { return Warp::c(); }
  __device__ static unsigned j() { return Warp::j(); }
  __device__ unsigned group() const { return warp_ / 4; }  // 0 makes dA, 1 makes B
  __device__ unsigned field(size_t offset) const { return at_.field(n_, static_cast<unsigned>(offset)); }
  __device__ void arrive(unsigned barrier) const {
    __syncwarp();  // all lanes are here
    if (lane() == 0) ptx::arrive(at_.base + barrier);
  }

  // Waits for the n-th item. Returns false if there are no more.
  __device__ bool take_item() {
    at_.wait_raw(n_);
    rows_ = field(offsetof(WideItem, rows));
    return rows_ > 0;
  }
  // All of a warp that K = 64 leaves without channels: its part of B, and what others wait for. When the factors are
  // there, all scores have been read, which those of the next item will overwrite.
  __device__ void make_scores_only() {
    for (n_ = 0; take_item(); ++n_) {
      start_scores();
      ptx::wait_for_products<0>();
      ptx::settle(scores_);
      arrive(WideAt::big_read);
      write_scores(opaque(lane()));
      arrive(WideAt::dots_full);
      at_.wait(WideAt::factors_full, n_);
      arrive(WideAt::staged);
    }
  }

  // Takes the gate of the item's value head.
  __device__ void take_head() {
    const Tokens& x = call_.x;
    const unsigned hv = field(offsetof(WideItem, hv));
    if (hv == head_) return;
    head_ = hv;
    gate_ = Gate(x, x.A_log ? *reinterpret_cast<const float*>(x.A_log + hv * 4) : 0.0f);
    if (lane() < 16) {
      const unsigned own = 16 * warp_ + lane();
      const float bias = x.bias ? *reinterpret_cast<const float*>(x.bias + hv * x.bias_stride + own * 4) : 0.0f;
      ptx::store_shared_f32(at_.base + WideAt::bias + own * 4, bias);
    }
    __syncwarp();  // biases are there
  }

  __device__ uint64_t matrix(unsigned member) const {
    return ptx::matrix_at(at_.base + member, 0, 1024, ptx::Swizzle::k128);
  }
  // Starts dA or B.
  __device__ __forceinline__ void start_scores() {
    at_.wait(WideAt::values_full, n_);
    if (rows_ < kChunk) clear_tail();
    const uint64_t both = matrix(WideAt::d_o_dv), v_new = matrix(WideAt::v_new);
    const uint64_t left = ptx::further(both, group() ? kWideHalf : 0);
    ptx::fence_products();
#pragma unroll
    for (unsigned k = 0; k < 8; ++k)
      ptx::wgmma_shared<false>(scores_, ptx::further(left, k / 4 * 2 * kWideHalf + k % 4 * 32),
                               ptx::further(v_new, k / 4 * kWideHalf + k % 4 * 32), k > 0);
    ptx::commit_products();
  }
  // Computes dA or B, then starts the products with states. rowsum(S dS) is computed meanwhile.
  __device__ void multiply() {
    start_scores();
    const uint64_t both = matrix(WideAt::d_o_dv), v_new = matrix(WideAt::v_new);
    at_.wait(WideAt::states_full, n_);
    multiply_diagonal();
    ptx::wait_for_products<0>();
    ptx::settle(scores_);
    const uint64_t S =
        ptx::matrix_at(at_.base + WideAt::S + group() * kStateHalf, kStateHalf, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (unsigned k = 0; k < 8; ++k)
      ptx::wgmma_shared<true>(accumulators<64>(own_.QR), ptx::further(S, k * 2048),
                              ptx::further(both, k / 4 * 2 * kWideHalf + k % 4 * 32), k > 0);
#pragma unroll
    for (unsigned k = 0; k < 8; ++k)
      ptx::wgmma_shared<true>(accumulators<32>(own_.W), ptx::further(S, WideAt::dS - WideAt::S + k * 2048),
                              ptx::further(v_new, k / 4 * kWideHalf + k % 4 * 32), k > 0);
    ptx::commit_products();
  }
  template <int kCount, int kRows>
  __device__ static float (&accumulators(float (&x)[kRows][4]))[kCount] {
    static_assert(kCount == 4 * kRows);
    return reinterpret_cast<float(&)[kCount]>(x);
  }
  __device__ void finish_products(const WideView& view) {
    ptx::wait_for_products<0>();
    ptx::settle(accumulators<64>(own_.QR)), ptx::settle(accumulators<32>(own_.W));
    arrive(WideAt::big_read);
    const float SdS[2] = {ptx::load_shared_f32(at_.state_dots(warp_, c())),
                          ptx::load_shared_f32(at_.state_dots(warp_, c() + 8))};
    own_.sum_behind(view, SdS);
    __syncwarp();  // all lanes have read
    // Until the gate's gradient there are no registers for these sums. They take the place of rowsum(S dS).
    for (unsigned hh = 0; hh < 2; ++hh) ptx::store_shared_f32(at_.state_dots(warp_, c() + 8 * hh), own_.behind[hh]);
  }

  // Clears the rows behind the chunk's end: they came with data of other tokens.
  __device__ void clear_tail() const {
#pragma unroll 1
    for (unsigned i = rows_ * 16 + threadIdx.x; i < kChunk * 16; i += 32 * kWideWarps) {
      const unsigned row = i / 16, piece = i % 16,
                     pairs = at_.base + WideAt::d_o_dv + swizzled(row, piece, 2 * kWideHalf);
      ptx::store_shared4(pairs, make_uint4(0, 0, 0, 0));
      ptx::store_shared4(pairs + kWideHalf, make_uint4(0, 0, 0, 0));
      ptx::store_shared4(at_.base + WideAt::v_new + swizzled(row, piece, kWideHalf), make_uint4(0, 0, 0, 0));
    }
    ptx::fence_shared_for_async();                        // products read them
    ptx::sync_ways(kMultiplierBarrier, 32 * kWideWarps);  // all are cleared; warps without channels call it elsewhere
  }

  __device__ void multiply_diagonal() const {
    const unsigned S = at_.base + WideAt::S + WideView::own_place(0, kStateHalf);
    float d[4][4] = {};
#pragma unroll
    for (unsigned k = 0; k < 8; ++k) {
      unsigned x[4], z[4];
      ptx::load_transposed(x, S + k * 2048), ptx::load_transposed(z, S + k * 2048 + (WideAt::dS - WideAt::S));
      ptx::mma<bf16>(d[k % 2 * 2], x, z[0], z[2]), ptx::mma<bf16>(d[k % 2 * 2 + 1], x, z[1], z[3]);
    }
    if (c() / 2 != j()) return;
    ptx::store_shared_f32(at_.state_dots(warp_, c()), c() % 2 ? d[0][1] + d[2][1] : d[0][0] + d[2][0]);
    ptx::store_shared_f32(at_.state_dots(warp_, c() + 8), c() % 2 ? d[1][3] + d[3][3] : d[1][2] + d[3][2]);
  }

  // Each warp writes 16 rows of dA or B. Nothing reads scores right of the diagonal's blocks.
  __device__ void write_scores(unsigned lane) {
    const unsigned w4 = warp_ % 4, c = lane / 4, j = lane % 4;
    const float scale = group() ? -1.0f : call_.x.scale;
#pragma unroll
    for (unsigned w = 0; w < 4; ++w)
      if (w == w4) {
        if (group() && c / 2 == j) keep_diagonal(scores_ + 8 * w);
#pragma unroll
        for (unsigned x = 0; x < 2; ++x)
#pragma unroll
          for (unsigned e = 0; e < 4; ++e)
            if (8 * x + 2 * j + e % 2 + group() > 8 * (e / 2) + c) scores_[8 * w + 4 * x + e] = 0;
      }
    const unsigned i8 = lane / 8, row = 16 * w4 + i8 % 2 * 8 + lane % 8;
    const unsigned to = at_.base + (group() ? WideAt::B : WideAt::dA) + row * kRowBytes;
#pragma unroll
    for (unsigned o = 0; o < 4; ++o)
      if (o <= w4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = ptx::pack<bf16>(scores_[8 * o + 2 * i] * scale, scores_[8 * o + 2 * i + 1] * scale);
        ptx::store_matrices(to + ((2 * o + i8 / 2 ^ row % 8) << 4), x);
      }
    arrive(WideAt::scores_full);
  }
  // Leaves the diagonal of dv v_new^T for dbeta. d has two tiles, in which the lane has one element each of rows c and
  // c + 8.
  __device__ void keep_diagonal(const float* d) const {
    const unsigned to = at_.base + WideAt::diagonal + (16 * (warp_ % 4) + c()) * 4;
    ptx::store_shared_f32(to, c() % 2 ? d[1] : d[0]), ptx::store_shared_f32(to + 32, c() % 2 ? d[7] : d[6]);
  }

  // Its address is computed again: there is no register to keep it.
  __device__ float bias(int hh) const {
    return ptx::load_shared_f32(at_.base + WideAt::bias + (16 * warp_ + opaque(lane()) / 4 + 8 * hh) * 4);
  }
  __device__ void make_operands(const WideView& view) {
    unsigned raw[kTiles / 2][4];
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) ptx::load_transposed(raw[pair], view.own_gates(pair));
    const float biases[2] = {bias(0), bias(1)};
    own_.decay(view, [&](int n, int hh) {
      const float2 z = two(raw[n / 2][n % 2 * 2 + hh]);
      return make_float2(gate_.log2(z.x + biases[hh]), gate_.log2(z.y + biases[hh]));
    });
    own_.make_operands(view);
    // Makes the compiler round the operands here, not where they are needed: until then they take twice as many
    // registers.
    if (own_.operand_bits() == 0x12345678) ptx::store_shared(at_.base + WideAt::unused, 0);
  }

  // Adds y . dy over the eight lanes of a token. Then a lane has that of q or k, of the first or the second token.
  __device__ void finish() {
    const unsigned dots = at_.dots(warp_, j()) + 4 * (c() % 4);
    __syncwarp();  // all lanes have read their steps, whose places dots take
    own_.finish(call_.places.unknown, [&](int n, const float(&of_q)[2], const float(&of_k)[2]) {
      float sums[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        sums[e] = (c() % 2 ? of_k[e] : of_q[e]) + __shfl_xor_sync(kAll, c() % 2 ? of_q[e] : of_k[e], 4);
      const bool second = c() / 2 % 2;
      float sum = (second ? sums[1] : sums[0]) + __shfl_xor_sync(kAll, second ? sums[0] : sums[1], 8);
      sum += __shfl_xor_sync(kAll, sum, 16);
      ptx::store_shared_f32((n % 2 ? dots ^ 64 : dots) + 512 * n, sum);  // by two lanes: a branch would split the code
    });
    arrive(WideAt::dots_full);
  }

  // Writes the gate's gradient in place of its input, and adds up its sums.
  __device__ void write_gates(const WideView& view) {
    float of_bias[2] = {}, of_A = 0;
    const float biases[2] = {bias(0), bias(1)};
    unsigned raw[kTiles / 2][4], out[4];
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) ptx::load_transposed(raw[pair], view.own_gates(pair));
    for (unsigned hh = 0; hh < 2; ++hh) own_.behind[hh] = ptx::load_shared_f32(at_.state_dots(warp_, c() + 8 * hh));
    own_.each_gate([&](int n, int hh, float2 dg) {
      const float2 z = two(raw[n / 2][n % 2 * 2 + hh]);
      const Gradients first = gate_.gradient(z.x + biases[hh], dg.x), second = gate_.gradient(z.y + biases[hh], dg.y);
      of_A += first.dA_log + second.dA_log, of_bias[hh] += first.dx + second.dx;
      out[n % 2 * 2 + hh] = ptx::pack<bf16>(first.dx, second.dx);
      if (n % 2 == 0 && hh == 1) ptx::store_transposed(view.own_gates(n / 2), out);
    });
    if (!call_.places.sums) return;
    const uint64_t item = uint64_t{field(offsetof(WideItem, row))} * static_cast<unsigned>(call_.p.HV) + head_;
    float* sums = call_.places.sums + item * call_.sums();
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      of_bias[hh] += __shfl_xor_sync(kAll, of_bias[hh], 1), of_bias[hh] += __shfl_xor_sync(kAll, of_bias[hh], 2);
      if (j() == 0) sums[16 * warp_ + c() + 8 * hh] = of_bias[hh];
    }
    of_A = sum_over<32>(of_A);
    if (lane() == 0) sums[call_.channels() + warp_] = of_A;
  }

  // Adds dq and dk of several value heads: first + second + ..
  __device__ void add_heads() {
    const bool first = field(offsetof(WideItem, first)), last = field(offsetof(WideItem, last));
    if (first && last) return;
    float4* scratch = reinterpret_cast<float4*>(call_.places.scratch) +
                      blockIdx.x * uint64_t{2 * kTiles * 32 * kWideWarps} + threadIdx.x;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      float4& kept = scratch[n * 32 * kWideWarps];
      float(&x)[4] = own_.QR[n];
      if (!first) x[0] += kept.x, x[1] += kept.y, x[2] += kept.z, x[3] += kept.w;
      if (!last) kept = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // Takes dq and dk through the norm and writes them in place of q and k.
  __device__ void write_keys(const WideView& view) {
    at_.wait(WideAt::factors_full, n_);
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned q[4], k[4];
      view.own(q, Key::kQuery, pair), view.own(k, Key::kKey, pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * pair + half;
        const unsigned from = at_.base + WideAt::factors + (8 * n + 2 * j()) * 16;
        const float4 f[2] = {ptx::load_shared_f32x4(from), ptx::load_shared_f32x4(from + 16)};
#pragma unroll
        for (int hh = 0; hh < 2; ++hh) {
          const int r = 2 * half + hh;
          const float2 x = two(q[r]), y = two(k[r]);
          const float(&Q)[4] = own_.Q(n), (&R)[4] = own_.R(n);
          q[r] = ptx::pack<bf16>(fmaf(x.x, f[0].y, Q[2 * hh]) * f[0].x, fmaf(x.y, f[1].y, Q[2 * hh + 1]) * f[1].x);
          k[r] = ptx::pack<bf16>(fmaf(y.x, f[0].w, R[2 * hh]) * f[0].z, fmaf(y.y, f[1].w, R[2 * hh + 1]) * f[1].z);
        }
      }
      ptx::store_transposed(
          view.raw + static_cast<unsigned>(offsetof(WideShared::Raw, q)) + WideView::own_place(16 * pair, kWideHalf),
          q);
      ptx::store_transposed(
          view.raw + static_cast<unsigned>(offsetof(WideShared::Raw, k)) + WideView::own_place(16 * pair, kWideHalf),
          k);
    }
    ptx::fence_shared_for_async();  // copies read them
    arrive(WideAt::staged);
  }

  const WideCall& call_;
  const WidePlace at_;
  const unsigned warp_;  // known to be the same in all lanes
  Gate gate_;
  Warp own_;
  float scores_[32];
  unsigned n_ = 0, rows_ = 0, head_ = ~0u;
};

}  // namespace kda::cuda::engine
