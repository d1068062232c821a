// The helper warps of the wide kernel: one copies, two compute norms an item ahead, one adds up what the norms'
// gradients need.
#pragma once
#include "cuda/backward/hopper_memory.h"

namespace kda::cuda::engine {

// A block's share of all items, in order: chunks of one head, then of the next. A whole warp uses it.
class WideItems {
 public:
  __device__ WideItems(const WideCall& call) : call_(call), group_(static_cast<unsigned>(call.p.HV) / call.rows.heads) {
    const unsigned all = call.rows.rows * call.rows.heads, share = all / gridDim.x, more = all % gridDim.x;
    const unsigned first = blockIdx.x * share + min(blockIdx.x, more);
    left_ = share + (blockIdx.x < more);
    h_ = first / call.rows.rows, row_ = first - h_ * call.rows.rows;
  }
  // Returns the next item, without rows if there is none.
  __device__ WideItem next() {
    while (left_) {
      if (i_ == 0) at_ = wide_chunk_at(call_.p, call_.rows, row_, h_row_);
      if (i_ == 0 && (!at_.rows || !is_usual(call_.x, h_, group_))) {
        if (!at_.rows) clear_sums();
        advance();
        continue;
      }
      const WideItem item{at_.b, at_.t0, at_.rows, h_ * group_ + i_, h_, h_row_, row_, i_ == 0, i_ + 1 == group_};
      if (++i_ == group_) i_ = 0, advance();
      return item;
    }
    return {};
  }

 private:
  __device__ void advance() {
    --left_;
    if (++row_ == call_.rows.rows) row_ = 0, ++h_;
  }
  __device__ void clear_sums() const {
    if (!call_.places.sums) return;
    const unsigned each = call_.sums();
    float* sums = call_.places.sums + (uint64_t{row_} * static_cast<unsigned>(call_.p.HV) + h_ * group_) * each;
    for (unsigned i = threadIdx.x % 32; i < group_ * each; i += 32) sums[i] = 0;
  }

  const WideCall& call_;
  const unsigned group_;
  unsigned left_, h_, row_, i_ = 0, h_row_ = 0;
  ChunkPlace at_{};
};

// Copies all tiles in, and dq, dk and dg out. q, k and g come an item ahead, the others as soon as those of the item
// before have been read.
class WideProducer {
 public:
  __device__ WideProducer(const WideCall& call, WidePlace at) : call_(call), at_(at), items_(call) {}

  // Looks for an item while multipliers work at the one before. As registers are few, an item's description stays in
  // shared memory until its gradients are stored.
  __device__ void run() {
    unsigned n = 0;
    for (;; ++n) {
      const WideItem item = items_.next();
      if (n > 1) store(n - 2);
      publish(n, item);
      if (!item.rows) break;
      if (n) at_.wait(WideAt::big_read, n - 1);
      ask_big(item);
    }
    if (n) store(n - 1);
    if (ptx::elect()) ptx::wait_for_bulk<0>();
  }

 private:
  // Describes the n-th item and starts the copies of its q, k and g. All reads of item n - 2 in the same place are
  // done.
  __device__ void publish(unsigned n, const WideItem& item) const {
    if (!ptx::elect()) return;
    const unsigned to = at_.item(n), bar = at_.raw_full(n), raw = at_.raw(n);
    ptx::store_shared(to, item.b), ptx::store_shared(to + 4, item.t0), ptx::store_shared(to + 8, item.rows);
    ptx::store_shared(to + 12, item.hv), ptx::store_shared(to + 16, item.h), ptx::store_shared(to + 20, item.h_row);
    ptx::store_shared(to + 24, item.row), ptx::store_shared(to + 28, item.first), ptx::store_shared(to + 32, item.last);
    if (!item.rows) return ptx::arrive(bar);
    const bool both = call_.both_halves();
    ptx::arrive_expecting(bar, call_.maps.raw_bytes);
    ask_tile(raw + offsetof(WideShared::Raw, q), kWideHalf, call_.maps.q, item, item.h, bar, both);
    ask_tile(raw + offsetof(WideShared::Raw, k), kWideHalf, call_.maps.k, item, item.h, bar, both);
    ask_tile(raw + offsetof(WideShared::Raw, g), kWideHalf, call_.maps.g, item, item.hv, bar, both);
  }
  // The first products need no states, which come last. Where V is 64, zeros come in place of the other columns.
  __device__ void ask_big(const WideItem& item) const {
    if (!ptx::elect()) return;
    const unsigned bar = at_.base + WideAt::values_full, states = at_.base + WideAt::states_full;
    ptx::arrive_expecting(bar, kValuesBytes), ptx::arrive_expecting(states, call_.maps.states_bytes);
    ask_tile(at_.base + WideAt::d_o_dv, 2 * kWideHalf, call_.maps.d_o, item, item.hv, bar);
    ask_tile(at_.base + WideAt::v_new, kWideHalf, call_.maps.v_new, item, item.hv, bar);
    ask_tile(at_.base + WideAt::d_o_dv + kWideHalf, 2 * kWideHalf, call_.maps.dv, item, item.hv, bar);
    for (unsigned half = 0; half < 2; ++half) {
      if (half && !call_.both_halves()) break;
      ptx::copy_tile(at_.base + WideAt::S + half * kStateHalf, call_.maps.h, 64 * half, 0, item.hv, item.h_row, states);
      ptx::copy_tile(at_.base + WideAt::dS + half * kStateHalf, call_.maps.dh, 64 * half, 0, item.hv, item.h_row,
                     states);
    }
  }
  __device__ static void ask_tile(unsigned to, unsigned half, const CUtensorMap& map, const WideItem& item,
                                  unsigned head, unsigned barrier, bool both = true) {
    for (unsigned i = 0; i < 2; ++i)
      if (i == 0 || both) ptx::copy_tile(to + i * half, map, 64 * i, head, item.t0, item.b, barrier);
  }

  // Stores dg and, behind the last value head of a q/k head, dq and dk: only then are they complete. Behind a packed
  // sequence's last tokens there may be tokens of another one, so short chunks are stored row by row.
  __device__ void store(unsigned n) const {
    at_.wait(WideAt::staged, n);
    const WidePlaces& to = call_.places;
    const unsigned rows = at_.field(n, WideItemAt::rows), h = at_.field(n, WideItemAt::h),
                   hv = at_.field(n, WideItemAt::hv);
    const bool keys = at_.field(n, WideItemAt::last);
    if (rows == kChunk || !call_.p.varlen) {
      if (ptx::elect()) {
        if (keys && to.dq.data) store_tile(call_.maps.dq, n, h, at_.raw(n) + offsetof(WideShared::Raw, q));
        if (keys && to.dk.data) store_tile(call_.maps.dk, n, h, at_.raw(n) + offsetof(WideShared::Raw, k));
        if (to.dg.data) store_tile(call_.maps.dg, n, hv, at_.raw(n) + offsetof(WideShared::Raw, g));
        ptx::commit_bulk();
        ptx::wait_for_bulk_reads<0>();
      }
    } else {
      if (keys && to.dq.data) store_rows(to.dq, n, rows, h, at_.raw(n) + offsetof(WideShared::Raw, q));
      if (keys && to.dk.data) store_rows(to.dk, n, rows, h, at_.raw(n) + offsetof(WideShared::Raw, k));
      if (to.dg.data) store_rows(to.dg, n, rows, hv, at_.raw(n) + offsetof(WideShared::Raw, g));
      ptx::fence_shared_for_async();  // copies will overwrite what has been read
    }
    __syncwarp();  // all lanes have read
  }
  __device__ void store_tile(const CUtensorMap& map, unsigned n, unsigned head, unsigned from) const {
    const unsigned t0 = at_.field(n, WideItemAt::t0), b = at_.field(n, WideItemAt::b);
    for (unsigned i = 0; i < 2; ++i)
      if (i == 0 || call_.both_halves()) ptx::store_tile(map, 64 * i, head, t0, b, from + i * kWideHalf);
  }
  __device__ void store_rows(const View& to, unsigned n, unsigned rows, unsigned head, unsigned from) const {
    const unsigned t0 = at_.field(n, WideItemAt::t0), b = at_.field(n, WideItemAt::b);
#pragma unroll 1
    for (unsigned i = threadIdx.x % 32; i < rows * 16; i += 32)
      if (i % 16 < call_.channels() / 8)
        *reinterpret_cast<uint4*>(to.at(b, t0 + i / 16, head) + i % 16 * 16) =
            ptx::load_shared4(from + swizzled(i / 16, i % 16, kWideHalf));
  }

  const WideCall& call_;
  const WidePlace at_;
  WideItems items_;
};

// Computes the norms of q and k of 32 tokens, an item ahead, and clears their rows behind a chunk's end.
class WideNorms {
 public:
  __device__ WideNorms(const WideCall& call, WidePlace at, unsigned half)
      : call_(call), at_(at), first_(half * 32), lane_(threadIdx.x % 32) {}

  __device__ void run() const {
    for (unsigned n = 0;; ++n) {
      at_.wait_raw(n);
      const unsigned rows = at_.field(n, WideItemAt::rows);
      if (!rows) return;
      if (rows < first_ + 32) clear(at_.raw(n), max(rows, first_));
#pragma unroll 1
      for (unsigned row = first_ + lane_ % 8; row < first_ + 32; row += 8) write_norms(n, row);
      __syncwarp();  // norms of all rows are there
      if (lane_ == 0) ptx::arrive(at_.norms_full(n));
    }
  }

 private:
  // Clears this warp's rows from `from` on.
  __device__ void clear(unsigned raw, unsigned from) const {
    const unsigned none = __float_as_uint(no_decay(call_.x.gate_form)) >> 16, g = none | none << 16;
#pragma unroll 1
    for (unsigned i = from * 16 + lane_; i < (first_ + 32) * 16; i += 32) {
      const unsigned at = raw + swizzled(i / 16, i % 16, kWideHalf);
      ptx::store_shared4(at + offsetof(WideShared::Raw, q), make_uint4(0, 0, 0, 0));
      ptx::store_shared4(at + offsetof(WideShared::Raw, k), make_uint4(0, 0, 0, 0));
      ptx::store_shared4(at + offsetof(WideShared::Raw, g), make_uint4(g, g, g, g));
    }
    __syncwarp();  // they are cleared
  }
  // Four lanes a token, 32 channels each; K = 64 leaves nothing to two of them.
  __device__ void write_norms(unsigned n, unsigned row) const {
    float2 factor{1, 1};
    if (call_.x.qk_l2norm) {
      float2 squares = sums<false>(at_.raw(n), row, 1, 1);
      const bool huge_q = is_huge(squares.x), huge_k = is_huge(squares.y);
      const float by_q = huge_q ? kShrink : 1.0f, by_k = huge_k ? kShrink : 1.0f;
      if (__any_sync(kAll, huge_q || huge_k)) squares = sums<true>(at_.raw(n), row, by_q, by_k);
      factor = {inverse_norm(squares.x, huge_q) * by_q, inverse_norm(squares.y, huge_k) * by_k};
    }
    if (lane_ < 8) ptx::store_shared_f32x2(at_.norms(n) + row * 8, factor);
  }
  template <bool kShrinks>
  __device__ float2 sums(unsigned raw, unsigned row, float by_q, float by_k) const {
    float2 sum{0, 0};
#pragma unroll 1
    for (unsigned p = 0; p < 4; ++p) {
      if (lane_ / 8 * 32 >= call_.channels()) break;
      const unsigned from = raw + swizzled(row, lane_ / 8 * 4 + p, kWideHalf);
      const uint4 q = ptx::load_shared4(from + offsetof(WideShared::Raw, q)),
                  k = ptx::load_shared4(from + offsetof(WideShared::Raw, k));
      add<kShrinks>(sum.x, q, by_q), add<kShrinks>(sum.y, k, by_k);
    }
    sum.x += __shfl_xor_sync(kAll, sum.x, 8), sum.y += __shfl_xor_sync(kAll, sum.y, 8);
    sum.x += __shfl_xor_sync(kAll, sum.x, 16), sum.y += __shfl_xor_sync(kAll, sum.y, 16);
    return sum;
  }
  template <bool kShrinks>
  __device__ static void add(float& sum, const uint4& x, float by) {
    const unsigned all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (const unsigned one : all) {
      float2 z = two(one);
      if (kShrinks) z.x *= by, z.y *= by;
      sum = fmaf(z.x, z.x, fmaf(z.y, z.y, sum));
    }
  }

  const WideCall& call_;
  const WidePlace at_;
  const unsigned first_, lane_;
};

// With y = r x, dx = r (dy - y (y . dy)). Computes r and -r (y . dy) of each token, with y . dy over all channels and
// the value heads of a q/k head. A lane has two tokens. Before that it computes dbeta, while multipliers make operands.
class WideFactors {
 public:
  __device__ WideFactors(const WideCall& call, WidePlace at) : call_(call), at_(at) {}

  __device__ void run() const {
    const unsigned lane = threadIdx.x % 32;
    float4 sum{};
    for (unsigned n = 0;; ++n) {
      at_.wait_raw(n);
      if (!at_.field(n, WideItemAt::rows)) return;
      if (at_.field(n, WideItemAt::first)) sum = {};
      if (call_.places.dbeta.data) write_dbeta(n);
      at_.wait(WideAt::dots_full, n);
#pragma unroll 1
      for (unsigned w = 0; w < call_.warps(); ++w) {
        const float4 x = ptx::load_shared_f32x4(at_.dots(w, lane));
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      const float4 r = ptx::load_shared_f32x4(at_.norms(n) + lane * 16);
      const unsigned to = at_.base + WideAt::factors + lane * 32;
      const float on = call_.x.qk_l2norm ? -1.0f : 0.0f;
      ptx::store_shared_f32x4(to, {r.x, on * r.x * sum.x, r.y, on * r.y * sum.y});
      ptx::store_shared_f32x4(to + 16, {r.z, on * r.z * sum.z, r.w, on * r.w * sum.w});
      __syncwarp();  // all tokens' are there
      if (lane == 0) ptx::arrive(at_.base + WideAt::factors_full);
    }
  }

 private:
  // Writes dbeta from the diagonal of dv v_new^T.
  __device__ void write_dbeta(unsigned n) const {
    const Tokens& x = call_.x;
    const TypedView& to = call_.places.dbeta;
    const auto at = [&](const View& t, unsigned row) {
      return t.at(at_.field(n, WideItemAt::b), at_.field(n, WideItemAt::t0) + row, at_.field(n, WideItemAt::hv));
    };
    at_.wait(WideAt::scores_full, n);
#pragma unroll 1
    for (unsigned row = threadIdx.x % 32; row < at_.field(n, WideItemAt::rows); row += 32) {
      const float z = value_of(x.beta_dtype, load_raw<false>(at(x.beta, row), x.beta_dtype));
      const float beta = activated_beta(x.beta_form, z);
      const float dot = ptx::load_shared_f32(at_.base + WideAt::diagonal + row * 4);
      store_element(at(to, row), to.dtype, dot / beta / beta * beta_slope(x.beta_form, z));
    }
  }

  const WideCall& call_;
  const WidePlace at_;
};

}  // namespace kda::cuda::engine
