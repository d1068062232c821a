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

// The next chunk of a preparer, in shared memory: one thread moves it on for all.
struct Cursor {
  unsigned item, hv, h;    // the value head of a sequence it belongs to, and its query/key head
  unsigned b, t0, length;  // where that sequence's tokens are; none of padding
  unsigned chunk;          // of the sequence
  unsigned number;         // over all chunks of the block; kNone behind the last
  static constexpr unsigned kNone = ~0u;

  __device__ bool any() const { return number != kNone; }
  __device__ unsigned rows() const { return min(length - chunk * kRows, kRows); }
  __device__ unsigned token() const { return t0 + chunk * kRows; }

  __device__ void start(const ForwardProblem& p, unsigned first) {
    item = blockIdx.x, number = chunk = first;
    enter(p), settle(p);
  }
  __device__ void advance(const ForwardProblem& p) {
    number += kPreparers, chunk += kPreparers;
    settle(p);
  }

 private:
  __device__ void enter(const ForwardProblem& p) {
    const Item here(p, item);
    length = 0, hv = here.hv, h = hv / static_cast<unsigned>(p.group());
    if (!here.exists(p)) number = kNone;
    if (!any() || here.is_tail(p)) return;
    const Sequence s = sequence_at(p, p.args.in, p.args.states, here.n);
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0);
    if (s.live) length = static_cast<unsigned>(s.length);
  }
  __device__ void settle(const ForwardProblem& p) {
    while (any() && chunk * kRows >= length) {
      chunk -= (length + kRows - 1) / kRows, item += gridDim.x;
      enter(p);
    }
  }
};
static_assert(sizeof(Cursor) == 32, "as Shared has room for");

// kWideGate: g is f32, else it has the type of q, k and v.
template <class T, class Scores, bool kWideGate>
class Preparation {
 public:
  __device__ Preparation(const Call& call, unsigned memory, unsigned group) : call_(call), at_{memory, group} {}

  __device__ void run() {
    const bool leader = threadIdx.x % kGroup == 0;
    if (leader) next().start(call_.p, at_.group);
    at_.sync();  // the first chunk is known
    if (!next().any()) return;
    fetch();
    if (kWideGate) fetch_wide_gate();
    unsigned head = ~0u;
    do {
      if (next().hv != head) {
        head = next().hv;
        at_.sync();  // nobody reads the gate of the head before
        at_.store_gate(call_.x, head);
        at_.sync();  // the gate is there
      }
      prepare(next().number, next().rows(), leader);
    } while (next().any());
  }

 private:
  __device__ Ring ring() const { return {at_.memory}; }
  __device__ Cursor& next() const { return reinterpret_cast<Cursor*>(shared_memory() + Shared::next)[at_.group]; }

  // Raw rows of the next chunk into its stage, once that is empty; zeros behind the last.
  __device__ void fetch() {
    const Tokens& x = call_.x;
    const unsigned number = next().number, first = next().token() + 8 * at_.warp, rows = next().rows();
    const unsigned stage = ring().stage(number);
    ring().wait_empty(number);
    const auto all = [&](const View& view, unsigned head, unsigned to) {
      const char* from = view.at(next().b, first, head) + at_.lane * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        ptx::copy8(stage + to + at_.place(i), from + i * static_cast<uint64_t>(view.stride1),
                   8 * at_.warp + i < rows ? 8 : 0);
    };
    all(x.q, next().h, Stage::q), all(x.k, next().h, Stage::k), all(x.v, next().hv, Stage::v);
    if (!kWideGate) all(x.g, next().hv, Stage::kg);
    ptx::commit_copies();
    beta_ = 0;
    if (at_.warp == 0 && at_.lane < rows) beta_ = load_raw<false>(x.beta.at(next().b, first + at_.lane, next().hv), x.beta.dtype);
  }
  // An f32 gate has no room in the stage: it comes to the bench once its scores are done.
  __device__ unsigned wide_gate(int i) const { return at_.rows() + (8 * at_.warp + i) * kSize * 4 + at_.lane * 16; }
  __device__ void fetch_wide_gate() {
    const View& g = call_.x.g;
    const char* from = g.at(next().b, next().token() + 8 * at_.warp, next().hv) + at_.lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::copy16(wide_gate(i), from + i * static_cast<uint64_t>(g.stride1), 8 * at_.warp + i < next().rows() ? 16 : 0);
    ptx::commit_copies();
  }

  // A chunk that was fetched; then the next one is.
  __device__ void prepare(unsigned number, unsigned rows, bool leader) {
    at_.forget();
    const unsigned stage = ring().stage(number);
    at_.factors = stage + Stage::factors;
    ptx::wait_for_copies<0>();
    __syncwarp();  // the rows are there: norms read what other lanes fetched
    share_factors(stage, rows);
    at_.forget();
    Scores scores(at_, stage);
    const typename Scores::Gate gate(call_.x, at_);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[4];
      if constexpr (kWideGate) {
        const float4 four = ptx::load_shared_f32x4(wide_gate(i));
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      } else {
        four_of<T>(ptx::load_shared2(stage + Stage::kg + at_.place(i)), x);
      }
      scores.decay(i, gate, x, 8 * at_.warp + i < rows);
    }
    at_.forget();
    scores.share_totals();
    at_.sync();  // totals and factors of all rows are there; nobody reads the chunk before, or that this one was next
    if (leader) next().advance(call_.p);
    scores.template tiles<T>();
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there, and what is next
    at_.forget();
    if (next().any()) fetch();
    scores.run();
    if (kWideGate && next().any()) {
      at_.sync();  // nobody reads tiles any more
      fetch_wide_gate();
    }
    if (at_.warp == number / kPreparers % 4) {
      at_.sync_as_solver();  // Akk is there
      invert(stage);
    } else {
      at_.arrive_for_solver();
    }
    ptx::fence_shared_for_async();
    ptx::arrive(ring().full(number));
  }

  // Norms of the warp's rows, and beta (of all, by warp 0).
  __device__ void share_factors(unsigned stage, unsigned rows) {
    const Tokens& x = call_.x;
    if (at_.warp == 0) {
      const float beta = activated_beta(x.beta_form, value_of(x.beta.dtype, beta_));
      at_.store_factor(Bench::kBeta, at_.lane, at_.lane < rows ? beta : 0);
    }
    // [q; k] q^T and [q; k] k^T of the warp's eight rows: their diagonals are q.q, q.k and k.k.
    float by_q[4] = {}, by_k[4] = {};
    const unsigned r = at_.lane % 8, from = stage + (at_.lane / 8 % 2 ? Stage::k : Stage::q) + (8 * at_.warp + r) * kRowBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      unsigned a[4];
      ptx::load_matrices(a, from + j / 4 * kHalf + ((j % 4 * 2 + at_.lane / 16 ^ r) << 4));
      ptx::mma<T>(by_q, a, a[0], a[2]);
      ptx::mma<T>(by_k, a, a[1], a[3]);
    }
    const unsigned row = at_.lane / 4;  // whose elements are in one of its four lanes
    if (at_.lane % 4 != row / 2) return;
    float q = x.scale, k = 1;
    if (x.qk_l2norm) {
      q *= ptx::inverse_root((row % 2 ? by_q[1] : by_q[0]) + 1e-6f);
      k *= ptx::inverse_root((row % 2 ? by_k[3] : by_k[2]) + 1e-6f);
    }
    at_.store_factor(Bench::kQuery, 8 * at_.warp + row, q);
    at_.store_factor(Bench::kKey, 8 * at_.warp + row, k);
    if (Scores::kTakesDiagonal) at_.store_factor(Bench::kDiagonal, 8 * at_.warp + row, q * k * (row % 2 ? by_k[1] : by_k[0]));
  }

  // T diag(beta) with T = (I + Akk)^-1, by forward substitution in f32: T = I - T Akk, a lane its row, columns from the
  // right; a column is done when all to its right have been subtracted. What Akk has on and above its diagonal is not read.
  __device__ void invert(unsigned stage) {
    at_.forget();
    float row[kRows];
#pragma unroll
    for (unsigned c = 0; c < kRows; ++c) row[c] = c == at_.lane ? 1.0f : 0.0f;
#pragma unroll
    for (unsigned j = kRows - 1; j > 0; --j)
#pragma unroll
      for (unsigned c = 0; c < j; c += 4) {
        const float4 four = ptx::load_shared_f32x4(at_.A() + (j * kStrideA + c) * 4);
        row[c] = fmaf(-row[j], four.x, row[c]);
        if (c + 1 < j) row[c + 1] = fmaf(-row[j], four.y, row[c + 1]);
        if (c + 2 < j) row[c + 2] = fmaf(-row[j], four.z, row[c + 2]);
        if (c + 3 < j) row[c + 3] = fmaf(-row[j], four.w, row[c + 3]);
      }
#pragma unroll
    for (unsigned c = 0; c < kRows; c += 8) {
      const float4 a = at_.four_factors(Bench::kBeta, c), b = at_.four_factors(Bench::kBeta, c + 4);
      ptx::store_shared4(stage + Stage::T + at_.square(at_.lane, c),
                         make_uint4(ptx::pack<__half>(row[c] * a.x, row[c + 1] * a.y),
                                    ptx::pack<__half>(row[c + 2] * a.z, row[c + 3] * a.w),
                                    ptx::pack<__half>(row[c + 4] * b.x, row[c + 5] * b.y),
                                    ptx::pack<__half>(row[c + 6] * b.z, row[c + 7] * b.w)));
    }
  }

  const Call& call_;
  Bench at_;
  unsigned beta_;  // of row at_.lane, raw: of warp 0
};

}  // namespace kda::cuda::sm90
