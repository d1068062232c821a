// The preparation: a warpgroup turns raw tokens into the operands of the scan (Stage), every second chunk of a block.
//
// Warp w has rows 8 w .. 8 w + 7 of a chunk and a lane four neighbouring channels, so that decays along the rows are
// products in registers. What a lane needs of q, k and g it fetched itself, into the stage, a chunk earlier.
//   norms, gates, decays of the warp's rows                                         barrier: decays of all rows are known
//   kG, qG, kg into the stage, score operands on the bench                          barrier: operands are there
//   the next chunk is fetched; scores; Aqk into the stage, Akk on the bench         barrier: Akk is there
//   one warp inverts I + Akk                                                        the stage is full
#pragma once
#include "cuda/sm90/chunk.h"
#include "cuda/sm90/scores.h"

namespace kda::cuda::sm90 {

// A chunk on its way: which one, and what the contract says of its item.
struct Cursor {
  Item item;
  unsigned number;           // of the chunk, over all chunks of the block
  unsigned b, t0, length;    // of the item's sequence
  unsigned chunk, chunks;    // of the sequence
  bool any;                  // false: behind the last chunk

  __device__ Cursor(const ForwardProblem& p, unsigned number)
      : item(p, blockIdx.x), number(number), chunk(number), chunks(0), any(true) {
    enter(p), settle(p);
  }
  __device__ void advance(const ForwardProblem& p) {
    number += kPreparers, chunk += kPreparers;
    settle(p);
  }
  __device__ unsigned rows() const { return min(length - chunk * kRows, kRows); }

 private:
  __device__ void enter(const ForwardProblem& p) {
    any = item.exists(p), chunks = 0;
    if (!any || item.is_tail(p)) return;
    const Sequence s = sequence_at(p, p.args.in, p.args.states, item.n);
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
    if (s.live) chunks = (length + kRows - 1) / kRows;
  }
  __device__ void settle(const ForwardProblem& p) {
    while (any && chunk >= chunks) {
      chunk -= chunks;
      item = Item(p, item.number + gridDim.x);
      enter(p);
    }
  }
};

// kWideGate: g is f32, else it has the type of q, k and v.
template <class T, class Scores, bool kWideGate>
class Preparation {
 public:
  __device__ Preparation(const Call& call, unsigned memory, unsigned group)
      : call_(call), ring_{memory}, at_(memory, group), lane_(threadIdx.x % 32), warp_(at_.warp), group_(group) {}

  __device__ void run() {
    const ForwardProblem& p = call_.p;
    Cursor now(p, group_);
    if (!now.any) return;
    ring_.wait_empty(now.number);
    fetch(now);
    if (kWideGate) fetch_wide_gate(now);
    unsigned head = ~0u;
    for (;;) {
      if (now.item.hv != head) head = now.item.hv, gate_.enter(call_.x, head, lane_);
      Cursor next = now;
      next.advance(p);
      prepare(now, next);
      if (!next.any) return;
      now = next;
    }
  }

 private:
  // Raw rows of a chunk into its stage, zeros behind the last. The stage is empty.
  __device__ void fetch(const Cursor& c) {
    const Tokens& x = call_.x;
    const unsigned stage = ring_.stage(c.number), first = c.t0 + c.chunk * kRows + 8 * warp_, rows = c.rows();
    const unsigned h = c.item.hv / static_cast<unsigned>(call_.p.group());
    const auto all = [&](const View& view, unsigned head, unsigned to) {
      const char* from = view.at(c.b, first, head) + lane_ * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        ptx::copy8(stage + to + at_.lane(i), from + i * static_cast<uint64_t>(view.stride1),
                   8 * warp_ + i < rows ? 8 : 0);
    };
    all(x.q, h, Stage::q), all(x.k, h, Stage::k), all(x.v, c.item.hv, Stage::v);
    if (!kWideGate) all(x.g, c.item.hv, Stage::kg);
    beta_ = 0;
    if (warp_ == 0 && lane_ < rows) {
      const char* beta = x.beta.at(c.b, c.t0 + c.chunk * kRows + lane_, c.item.hv);
      beta_ = load_raw<false>(beta, x.beta.dtype);
    }
  }
  // An f32 gate has no room in the stage: it comes to the bench once its scores are done.
  __device__ unsigned wide_gate(int i) const { return at_.rows + (8 * warp_ + i) * kSize * 4 + lane_ * 16; }
  __device__ void fetch_wide_gate(const Cursor& c) {
    const View& g = call_.x.g;
    const char* from = g.at(c.b, c.t0 + c.chunk * kRows + 8 * warp_, c.item.hv) + lane_ * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::copy16(wide_gate(i), from + i * static_cast<uint64_t>(g.stride1), 8 * warp_ + i < c.rows() ? 16 : 0);
  }

  __device__ void prepare(const Cursor& now, const Cursor& next) {
    const unsigned stage = ring_.stage(now.number), rows = now.rows();
    at_.factors = stage + Stage::factors;
    ptx::wait_for_copies<0>();
    __syncwarp();  // the rows are there: norms read what other lanes fetched
    share_factors(stage, rows);
    Scores scores(at_, stage);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[4];
      if constexpr (kWideGate) {
        const float4 four = ptx::load_shared_f32x4(wide_gate(i));
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      } else {
        four_of<T>(ptx::load_shared2(stage + Stage::kg + at_.lane(i)), x);
      }
      scores.decay(i, gate_, x, 8 * warp_ + i < rows);
    }
    scores.share_totals();
    at_.sync();  // totals and factors of all rows are there; nobody reads what was on the bench
    scores.template tiles<T>();
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there
    if (next.any) {
      ring_.wait_empty(next.number);
      fetch(next);
    }
    scores.run();
    if (kWideGate && next.any) {
      at_.sync();  // nobody reads tiles any more
      fetch_wide_gate(next);
    }
    if (warp_ == now.number / kPreparers % 4) {
      at_.sync_as_solver();  // Akk is there
      invert(stage);
    } else {
      at_.arrive_for_solver();
    }
    ptx::fence_shared_for_async();
    ptx::arrive(ring_.full(now.number));
  }

  // Norms of the warp's rows, and beta (of all, by warp 0).
  __device__ void share_factors(unsigned stage, unsigned rows) {
    const Tokens& x = call_.x;
    if (warp_ == 0) {
      const float beta = activated_beta(x.beta_form, value_of(x.beta.dtype, beta_));
      at_.store_factor(Bench::kBeta, lane_, lane_ < rows ? beta : 0);
    }
    // [q; k] q^T and [q; k] k^T of the warp's eight rows: their diagonals are q.q, q.k and k.k.
    float by_q[4] = {}, by_k[4] = {};
    const unsigned r = lane_ % 8, from = stage + (lane_ / 8 % 2 ? Stage::k : Stage::q) + (8 * warp_ + r) * kRowBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      unsigned a[4];
      ptx::load_matrices(a, from + j / 4 * kHalf + ((j % 4 * 2 + lane_ / 16 ^ r) << 4));
      ptx::mma<T>(by_q, a, a[0], a[2]);
      ptx::mma<T>(by_k, a, a[1], a[3]);
    }
    const unsigned row = lane_ / 4;  // whose elements are in one of its four lanes
    if (lane_ % 4 != row / 2) return;
    float q = x.scale, k = 1;
    if (x.qk_l2norm) {
      q *= ptx::inverse_root((row % 2 ? by_q[1] : by_q[0]) + 1e-6f);
      k *= ptx::inverse_root((row % 2 ? by_k[3] : by_k[2]) + 1e-6f);
    }
    at_.store_factor(Bench::kQuery, 8 * warp_ + row, q);
    at_.store_factor(Bench::kKey, 8 * warp_ + row, k);
    if (Scores::kTakesDiagonal) at_.store_factor(Bench::kDiagonal, 8 * warp_ + row, q * k * (row % 2 ? by_k[1] : by_k[0]));
  }

  // T diag(beta) with T = (I + Akk)^-1, by forward substitution in f32: T = I - T Akk, a lane its row, columns from the
  // right; a column is done when all to its right have been subtracted. What Akk has on and above its diagonal is not read.
  __device__ void invert(unsigned stage) const {
    float row[kRows];
#pragma unroll
    for (unsigned c = 0; c < kRows; ++c) row[c] = c == lane_ ? 1.0f : 0.0f;
#pragma unroll
    for (unsigned j = kRows - 1; j > 0; --j)
#pragma unroll
      for (unsigned c = 0; c < j; c += 4) {
        const float4 four = ptx::load_shared_f32x4(at_.A + (j * kStrideA + c) * 4);
        row[c] = fmaf(-row[j], four.x, row[c]);
        if (c + 1 < j) row[c + 1] = fmaf(-row[j], four.y, row[c + 1]);
        if (c + 2 < j) row[c + 2] = fmaf(-row[j], four.z, row[c + 2]);
        if (c + 3 < j) row[c + 3] = fmaf(-row[j], four.w, row[c + 3]);
      }
#pragma unroll
    for (unsigned c = 0; c < kRows; c += 8) {
      const float4 a = at_.four_factors(Bench::kBeta, c), b = at_.four_factors(Bench::kBeta, c + 4);
      ptx::store_shared4(stage + Stage::T + at_.square(lane_, c),
                         make_uint4(ptx::pack<__half>(row[c] * a.x, row[c + 1] * a.y),
                                    ptx::pack<__half>(row[c + 2] * a.z, row[c + 3] * a.w),
                                    ptx::pack<__half>(row[c + 4] * b.x, row[c + 5] * b.y),
                                    ptx::pack<__half>(row[c + 6] * b.z, row[c + 7] * b.w)));
    }
  }

  const Call& call_;
  const Ring ring_;
  Bench at_;
  const unsigned lane_, warp_, group_;
  typename Scores::Gate gate_;
  unsigned beta_;  // of row lane_, raw: of warp 0
};

}  // namespace kda::cuda::sm90
