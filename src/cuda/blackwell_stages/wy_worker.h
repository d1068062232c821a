// The workers of stage B3 on Blackwell (wy_memory.h): what goes into products that does not come by TMA, and what is
// made of products.
#pragma once
#include "cuda/blackwell_stages/wy_memory.h"

namespace kda::cuda::sm100 {

// A worker: a channel, which is also a column of V, and half of a chunk's tokens. The lanes of a warp have 32
// neighbours, and warp w of a group has lanes 32 w and on of tensor memory.
class WyWorker {
 public:
  __device__ WyWorker(const WyCall& call, unsigned base, unsigned tensors)
      : c_(call),
        base_(base),
        tensors_(tensors),
        group_(__shfl_sync(kAll, threadIdx.x / kGroup, 0)),
        warp_(__shfl_sync(kAll, threadIdx.x / 32 % kWyWarps, 0)),
        lane_(threadIdx.x % 32) {}

  __device__ void work(const WyItem& item) {
    load_beta(item);
    if (c_.J.dtype == KDA_F32) store_inverse<float>(item);
    else store_inverse<bf16>(item);
    solve(item);
    wait(WyAt::all_made, item);
    write_scores(item);
    write_channels(item);
  }

  // Zeros for tokens of no sequence.
  __device__ void zero(const WyItem& item) const {
    const auto clear = [&](const Rows& x, unsigned n) {
      for (unsigned i = threadIdx.x; i < item.rows() * n; i += kWyWorkers)
        store_element(item.row_of(x, i / n) + static_cast<int>(i % n) * x.size(), x.dtype, 0);
    };
    clear(c_.dq, c_.K), clear(c_.dk, c_.K), clear(c_.dG, c_.K);
    clear(c_.dv, c_.V), clear(c_.dAkk, kChunk), clear(c_.dbeta, 1);
  }

 private:
  __device__ unsigned channel() const { return 32 * warp_ + lane_; }
  __device__ unsigned token(unsigned t) const { return kWyTokens * group_ + t; }
  // Tensor memory: the warp's lanes, from a column on.
  __device__ unsigned own(unsigned column) const { return ptx::tmem_at(tensors_, 32 * warp_, column); }

  // For what products have made.
  __device__ void wait(unsigned barrier, const WyItem& item) const {
    wait_phase(base_ + barrier, item.n);
    ptx::fence_tmem_after_sync();
  }
  // Arrives for the warp: it has read, and what it has stored is there, also for products.
  __device__ void arrive(unsigned barrier) const {
    ptx::fence_shared_for_async(), ptx::fence_tmem_before_sync();
    __syncwarp();
    if (lane_ == 0) ptx::arrive(base_ + barrier);
  }

  // Lane t has beta of token t.
  __device__ void load_beta(const WyItem& item) {
    const unsigned i = token(lane_);
    beta_ = i < item.rows() ? stages::load_element(item.row_of(c_.beta, i), c_.beta.dtype) : 0;
  }
  __device__ float beta(unsigned t) const { return __shfl_sync(kAll, beta_, static_cast<int>(t)); }

  // J, as an operand of products: rounded to bf16, and what that left. With one number, equal keys would lose all
  // digits. What is above the diagonal is not read.
  template <class T>
  __device__ void store_inverse(const WyItem& item) const {
    const unsigned first = threadIdx.x / 32, j = 2 * lane_;
    const char* from = item.row_of(c_.J, first) + j * sizeof(T);
#pragma unroll
    for (unsigned r = 0; r < kChunk / 8; ++r, from += 8 * c_.J.token) {
      const unsigned i = 8 * r + first;
      const T* const x = reinterpret_cast<const T*>(from);
      const float two[2] = {i < item.rows() && j <= i ? static_cast<float>(x[0]) : 0,
                            i < item.rows() && j < i ? static_cast<float>(x[1]) : 0};
      const unsigned both = ptx::pack<bf16>(two[0], two[1]);
      const unsigned to = base_ + WyAt::x + swizzled(i, lane_ / 4, 0) + lane_ % 4 * 4;
      ptx::store_shared(to, both);
      ptx::store_shared(to + kWideHalf, ptx::pack<bf16>(two[0] - __uint_as_float(both << 16),
                                                        two[1] - __uint_as_float(both & 0xffff0000u)));
    }
    if (item.rows() < kChunk) clear_tail(item);
    arrive(WyAt::inverse_there);
  }
  // Clears rows of dv_new behind the chunk's end: they came with data of other tokens, and 0 times NaN is NaN.
  __device__ void clear_tail(const WyItem& item) const {
    wait_phase(base_ + WyAt::right_side_full, item.n);
    for (unsigned i = item.rows() * 16 + threadIdx.x; i < kChunk * 16; i += kWyWorkers)
      ptx::store_shared4(base_ + WyAt::dv_new + swizzled(i / 16, i % 16, kWideHalf), make_uint4(0, 0, 0, 0));
  }

  // dv = beta x; x takes the place of J.
  __device__ void solve(const WyItem& item) const {
    float x[kWyTokens];
    wait(WyAt::x_made, item);
    ptx::load_tmem(x, own(WyTensors::x + token(0)));
    ptx::wait_for_tmem_loads();
    ptx::sync_threads(kWyBarrier, kWyWorkers);  // J is written: a commit does not tell that
#pragma unroll
    for (unsigned p = 0; p < kWyTokens / 8; ++p) {
      unsigned packed[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) packed[i] = ptx::pack<bf16>(x[8 * p + 2 * i], x[8 * p + 2 * i + 1]);
      ptx::store_shared4(base_ + WyAt::x + swizzled(channel(), token(8 * p) / 8, 0),
                         make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
    arrive(WyAt::x_there);
    if (c_.dv.dtype == KDA_F32) write_values<float>(item, x);
    else write_values<bf16>(item, x);
  }
  template <class T>
  __device__ void write_values(const WyItem& item, const float (&x)[kWyTokens]) const {
    const unsigned rows = channel() < c_.V ? item.rows() : 0;
    char* to = item.row_of(c_.dv, token(0)) + channel() * sizeof(T);
#pragma unroll
    for (unsigned t = 0; t < kWyTokens; ++t, to += c_.dv.token) {
      const float dv = beta(t) * x[t];
      if (token(t) < rows) *reinterpret_cast<T*>(to) = static_cast<T>(dv);
    }
  }

  // dAkk = -strict(x v_new^T): each group has half of its columns. x . v, the diagonal of x v^T, by the first group.
  // With 64 rows, a warp has 16 of them: lane 4 g + t has rows g and g + 8, columns 8 n + 2 t and one more.
  __device__ void write_scores(const WyItem& item) const {
    float dA[kWyTokens / 2], dots[8];
    ptx::load_tmem_fragments(dA, own(WyTensors::scores + token(0)));
    ptx::load_tmem_fragments(dots, own(WyTensors::of_values + 16 * warp_));
    ptx::wait_for_tmem_loads();
    const unsigned g = lane_ / 4, t = lane_ % 4, odd = g % 2;
#pragma unroll
    for (unsigned r = 0; r < 2; ++r) {
      const unsigned i = 16 * warp_ + g + 8 * r;
      if (group_ == 0 && t == g / 2)
        ptx::store_shared_f32(base_ + WyAt::sums_dots + i * 4, odd ? dots[6 * r + 1] : dots[6 * r]);
      if (i >= item.rows()) continue;
      char* const to = item.row_of(c_.dAkk, i);
#pragma unroll
      for (unsigned n = 0; n < kWyTokens / 8; ++n) {
        const unsigned j = token(8 * n + 2 * t);
        *reinterpret_cast<float2*>(to + j * 4) =
            make_float2(j < i ? -dA[4 * n + 2 * r] : 0, j + 1 < i ? -dA[4 * n + 2 * r + 1] : 0);
      }
    }
  }

  // The worker's channel of a token, in tiles of keys and of gates.
  __device__ float key(unsigned tile, unsigned i) const {
    const unsigned c = channel();
    return __uint_as_float(ptx::load_shared16(base_ + tile + swizzled(i, c / 8, kWideHalf) + c % 8 * 2) << 16);
  }
  __device__ float gate(unsigned i) const {
    return ptx::load_shared_f32(base_ + WyAt::G + warp_ * kWideHalf + swizzled(i, lane_ / 4, 0) + lane_ % 4 * 4);
  }

  // A worker's channel, from token to token.
  struct Channel {
    char *dq, *dk, *dG;        // the token's, in memory
    unsigned rows;             // tokens that are stored: none, if the channel is none
    float last;                // G of the chunk's last row
    float written = 0;         // k (v_new dS^T) F
    float kept = 0;            // dG of the last row, to which sums will be added
    float of_beta[kWyTokens];  // kG . y: the channel's part of each token
  };
  // dq, dk and dG, and dbeta.
  __device__ void write_channels(const WyItem& item) const {
    wait_phase(base_ + WyAt::rows_full, item.n);
    const auto first = [&](const Rows& to) { return item.row_of(to, token(0)) + channel() * sizeof(float); };
    Channel x{.dq = first(c_.dq), .dk = first(c_.dk), .dG = first(c_.dG)};
    x.rows = channel() < c_.K ? item.rows() : 0, x.last = gate(item.rows() - 1);
#pragma unroll
    for (unsigned t0 = 0; t0 < kWyTokens; t0 += 8) {
      float y[8], of_q[8], of_k[8];
      ptx::load_tmem(y, own(WyTensors::y + token(t0)));
      ptx::load_tmem(of_q, own(WyTensors::of_q + token(t0)));
      ptx::load_tmem(of_k, own(WyTensors::of_k + token(t0)));
      ptx::wait_for_tmem_loads();
#pragma unroll
      for (unsigned e = 0; e < 8; ++e) finish(t0 + e, y[e], of_q[e], of_k[e], x);
    }
    arrive(WyAt::rows_read);
    add_up(item, x);
  }
  // The worker's element of a token.
  __device__ void finish(unsigned t, float y, float of_q, float of_k, Channel& x) const {
    const unsigned i = token(t);
    const float q = key(WyAt::q, i), k = key(WyAt::k, i), G = gate(i), E = ptx::exp2(G), F = ptx::exp2(x.last - G);
    const float kG = k * E, read = beta(t) * y, dq = of_q * (c_.scale * E), dk = of_k * F, written = k * dk;
    const float dG = fmaf(q, dq, -fmaf(kG, read, written));
    x.of_beta[t] = kG * y;
    x.written += i < x.rows ? written : 0;
    x.kept = i + 1 == x.rows ? dG : x.kept;
    const auto store = [](char*& to, float value, int64_t token, bool real) {
      if (real) *reinterpret_cast<float*>(to) = value;
      to += token;
    };
    store(x.dq, dq, c_.dq.token, i < x.rows), store(x.dk, fmaf(-E, read, dk), c_.dk.token, i < x.rows);
    store(x.dG, dG, c_.dG.token, i + 1 < x.rows);
  }

  // Sums 32 numbers over the lanes: lane l gets that of x[l].
  __device__ float sum_over_lanes(float (&x)[32]) const {
#pragma unroll
    for (unsigned n = 16; n > 0; n /= 2) {
      const bool upper = lane_ & n;
#pragma unroll
      for (unsigned i = 0; i < n; ++i)
        x[i] = (upper ? x[i + n] : x[i]) + __shfl_xor_sync(kAll, upper ? x[i] : x[i + n], static_cast<int>(n));
    }
    return x[0];
  }
  // Stores dbeta and the last row of dG, with the sums over all channels and all tokens.
  __device__ void add_up(const WyItem& item, Channel& x) const {
    const unsigned of_beta = base_ + WyAt::sums_of_beta, written = base_ + WyAt::sums_written;
    ptx::store_shared_f32(of_beta + (warp_ * kChunk + token(lane_)) * 4, sum_over_lanes(x.of_beta));
    ptx::store_shared_f32(written + (group_ * kSize + channel()) * 4, x.written);
    ptx::sync_threads(kWyBarrier, kWyWorkers);  // sums of all are there
    if (threadIdx.x < item.rows()) {
      float sum = ptx::load_shared_f32(base_ + WyAt::sums_dots + threadIdx.x * 4);
      for (unsigned w = 0; w < kWyWarps; ++w) sum -= ptx::load_shared_f32(of_beta + (w * kChunk + threadIdx.x) * 4);
      *reinterpret_cast<float*>(item.row_of(c_.dbeta, threadIdx.x)) = sum;
    }
    const unsigned last = item.rows() - 1;
    if (group_ != last / kWyTokens) return;
    float dG = fmaf(ptx::exp2(x.last), state_dot(), x.kept);
    for (unsigned i = 0; i < kWyGroups; ++i) dG += ptx::load_shared_f32(written + (i * kSize + channel()) * 4);
    if (channel() < c_.K) reinterpret_cast<float*>(item.row_of(c_.dG, last))[channel()] = dG;
  }
  // rowsum(S dS) of the worker's channel, from the diagonal of S dS^T.
  __device__ float state_dot() const {
    float all[32], dot = 0;
    ptx::load_tmem(all, own(WyTensors::of_states + 32 * warp_));
    ptx::wait_for_tmem_loads();
#pragma unroll
    for (unsigned i = 0; i < 32; ++i) dot = lane_ == i ? all[i] : dot;
    return dot;
  }

  const WyCall& c_;
  const unsigned base_, tensors_, group_, warp_, lane_;
  float beta_ = 0;
};

}  // namespace kda::cuda::sm100
