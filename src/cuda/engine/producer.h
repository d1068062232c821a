// The producer: a warpgroup that turns raw tokens into the operands of the consumer (Stage). Each of the two
// producers of a CTA prepares every second one of the CTA's chunks.
//
// Warp w has rows 8 w .. 8 w + 7 of a chunk, and a lane has four neighbouring channels, so decays along the rows are
// sums in registers. Raw q, k and g are fetched a chunk ahead, into scratch memory. There a lane overwrites what it
// alone reads, or what other lanes of its warp have read before: g with decays, all three with operands of scores. v
// goes to the stage.
//   norms, gates, decays of the warp's rows                  barrier: decays of all rows are known, the stage is empty
//   kG, qG and kg to the stage, score operands to scratch    barrier: operands are there
//   scores: Aqk to the stage, Akk to scratch                 barrier: Akk is there, the rest of the scratch is free
//   one warp inverts I + Akk; the next chunk is fetched      mbarrier: the stage is full
#pragma once
#include "cuda/engine/inverse.h"
#include "cuda/engine/operands.h"
#include "cuda/engine/tiles.h"

namespace kda::cuda::engine {

// A chunk to prepare. One thread plans it for all, a chunk ahead, in shared memory.
struct alignas(16) Plan {
  unsigned hv, h, b, token;  // value and query/key head; tokens token .. token + rows - 1 of row b
  unsigned rows, fine;       // all; those before the first with a NaN
  unsigned number;           // of the chunk in the ring; kNone: there are no more
  bool begins;               // its head is not that of this producer's last chunk
  bool queries;              // q is wanted, too
  bool state;                // in place of a chunk, the state of head hv in row b of h0 comes; b is kNone: zeros
  static constexpr unsigned kNone = ~0u;

  __device__ bool any() const { return number != kNone; }
  __device__ bool is_chunk() const { return any() && !state; }
  // Describes chunk `chunk` of a sequence of `length` tokens from t0 on.
  __device__ void set(unsigned head, unsigned key_head, unsigned row, unsigned t0, unsigned length, unsigned chunk) {
    hv = head, h = key_head, b = row;
    token = t0 + chunk * kRows, rows = fine = min(length - chunk * kRows, kRows);
  }
  __device__ static unsigned key_head(const ForwardProblem& p, unsigned hv) {
    return hv / (static_cast<unsigned>(p.HV) / static_cast<unsigned>(p.H));
  }
};

// Prepares chunks, one of four in the ring. kWideGate: g is f32, otherwise it has the type of q, k and v. Source: its
// next(call, plan), which one thread calls, plans the producer's next chunk. Source::kMaps: some chunks are for maps
// of segments, for which q is not read. Source::kReversed: they are for the reverse scan.
// Source::kOrder: of channels in a stage. Source::kKeepsU: U may leave from there.
template <class T, class Scores, bool kWideGate, class Source>
class Producer {
 public:
  using Chunks = Source;
  static constexpr unsigned kRawTensors = kWideGate ? 2 : 3;  // which TMA brings
  static constexpr bool kSkipsQueries = Source::kMaps && Scores::kSkipsQueries;
  static constexpr bool kBringsStates = Source::kBringsStates;

  __device__ Producer(const Call& call, unsigned memory, unsigned group)
      : call_(call), memory_(memory), at_(scratch(memory, group), group) {}

  // Initialises the mbarriers of raw rows, by one thread, before fence_barriers().
  __device__ static void start(unsigned memory) {
    for (unsigned i = 0; i < kProducers; ++i) ptx::init_barrier(scratch(memory, i) + Scratch::raw, 1);
  }
  // Plans the first chunk.
  __device__ void plan(const Source& source) {
    if (threadIdx.x % kGroup > 0) return;
    plans().source = source, plans().head = Plan::kNone;
    make_plan(plan(0));
  }
  __device__ void run() {
    at_.sync();  // the first plan is there
    Plan now = known_plan(0);
    for (bool fetched = false; now.any(); ++at_.turn) {
      const bool state = kBringsStates && now.state;
      if (!fetched && !state) fetch(now, at_.turn);
      // Planning takes a while, so it is left to a warp that has not just inverted.
      if (role(at_.turn) == WarpRole::kPlan && at_.lane == 0) make_plan(plan(at_.turn + 1));
      Plan next;
      if (state) bring_state(next);
      else
        while (!prepare(now, next)) now = known_plan(at_.turn), fetch(now, at_.turn);
      now = next, fetched = !state;
    }
  }

 private:
  struct Plans {
    Source source;
    unsigned head;  // of the last plan
    Plan turns[2];
  };
  static_assert(sizeof(Plans) <= ScratchLayout::kPlanBytes);

  __device__ static unsigned scratch(unsigned memory, unsigned group) {
    return memory + Shared::scratch + group * Scratch::bytes;
  }
  __device__ Ring ring() const { return {memory_}; }
  __device__ Plans& plans() const {
    return *reinterpret_cast<Plans*>(shared_memory() + scratch(0, at_.group) + Scratch::plans);
  }
  __device__ Plan& plan(unsigned turn) const { return plans().turns[turn % 2]; }
  // Returns a plan that has been made, in registers, because each load takes a while.
  __device__ Plan known_plan(unsigned turn) const {
    static_assert(sizeof(Plan) == 2 * sizeof(uint4));
    const unsigned from = at_.address + Scratch::plans + offsetof(Plans, turns) + turn % 2 * sizeof(Plan);
    const uint4 halves[2] = {ptx::load_shared4(from), ptx::load_shared4(from + sizeof(uint4))};
    return reinterpret_cast<const Plan&>(halves);
  }
  __device__ void make_plan(Plan& p) {
    p.number = Plan::kNone;
    plans().source.next(call_, p);
    if (kBringsStates && p.state) return;
    p.begins = p.hv != plans().head, plans().head = p.hv;
  }

  // ---- chunks ----

  __device__ WarpRole role(unsigned turn) const { return at_.role(turn); }

  // Fetches raw q, k and g of a chunk to scratch memory, and beta to registers. Rows behind the chunk's come along.
  // TMA does one request after another, and copies to the other CTA take long. So the warp that will ask for those
  // asks for all raw rows first.
  __device__ void fetch(const Plan& plan, unsigned turn) {
    const Tokens& x = call_.x;
    if (plan.begins) gate_.load(x, plan.hv, at_.lane);
    if (kWideGate) fetch_wide_gate(plan);
    if (role(turn) == WarpRole::kPlan) {
      beta_ = 0;
      if (at_.lane < plan.rows)
        beta_ = load_raw<false>(x.beta.at(plan.b, plan.token + at_.lane, plan.hv), x.beta_dtype);
    }
    if (role(turn) != WarpRole::kInvert) return;  // in the chunk before, its role was kCopy
    const unsigned hv = uniform(plan.hv), h = uniform(plan.h), token = uniform(plan.token), b = uniform(plan.b),
                   barrier = at_.address + Scratch::raw;
    const bool queries = !kSkipsQueries || plan.queries;
    if (!ptx::elect()) return;
    ptx::arrive_expecting(barrier, (kRawTensors - !queries) * 2 * kTileBytes);
    const auto ask = [&](unsigned tensor, unsigned head, unsigned to) {
      for (const unsigned half : {0u, 1u})
        ptx::copy_tile(at_.address + to + half * kHalf, call_.tiles->maps[tensor], 64 * half, head, token, b, barrier);
    };
    if (queries) ask(Tiles::kQuery, h, Stage::q);
    ask(Tiles::kKey, h, Stage::k);
    if (!kWideGate) ask(Tiles::kGate, hv, Scratch::columns);
  }
  // Fetches an f32 gate to where decays will be. Each lane fetches what it will read.
  __device__ void fetch_wide_gate(const Plan& p) const {
    const View& g = call_.x.g;
    const unsigned rows = at_.lane * 4 < static_cast<unsigned>(call_.x.K) ? p.fine : 0;  // others become zeros
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned row = 8 * at_.warp + i, bytes = row < rows ? 8 : 0, to = at_.address + at_.own(i);
      const char* from = g.at(p.b, p.token + row, p.hv) + at_.lane * 16;
      ptx::copy8(to + Scratch::columns, from, bytes), ptx::copy8(to + Scratch::wide, from + 8, bytes);
    }
    ptx::commit_copies();
  }
  // Clears the lane's part of the chunk from row `rows` on.
  __device__ void clear(unsigned rows) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      if (8 * at_.warp + i < rows) continue;
      for (const unsigned tile : {Stage::q, Stage::k, Scratch::columns, Scratch::wide})
        ptx::store_shared2(at_.address + tile + at_.own(i), make_uint2(0, 0));
    }
  }
  // Asks for v in the stages of both CTAs, by one lane of a warp. `full` of the other CTA then also expects the
  // operands, which share() sends.
  __device__ void fetch_values(unsigned hv, unsigned first, unsigned row, unsigned number, unsigned stage) const {
    const unsigned full = ring().full(number), v = stage + Stage::v, rank = ptx::rank(), other = rank ^ 1;
    const unsigned head = uniform(hv), token = uniform(first), b = uniform(row);
    const CUtensorMap& map = call_.tiles->maps[Tiles::kValue];
    if (Source::kKeepsU && call_.saved->used) ring().wait_values_empty(number);
    if (!ptx::elect()) return;
    ptx::arrive_expecting(full, kTileBytes);
    ptx::copy_tile(v, map, 64 * rank, head, token, b, full);
    ptx::arrive_expecting_at(ptx::address_in(full, other), Stage::end + kTileBytes);
    ptx::copy_tile_to(1 << other, v, map, 64 * other, head, token, b, full);
  }
  // Sends bytes first .. end - 1 of a stage to the same stage of the other CTA, by one lane of a warp.
  __device__ void share(unsigned number, unsigned stage, unsigned first, unsigned end) const {
    const unsigned from = stage + first, other = ptx::rank() ^ 1;
    if (!ptx::elect()) return;
    ptx::copy_bulk_between(ptx::address_in(from, other), from, end - first,
                           ptx::address_in(ring().full(number), other));
  }

  // Brings, in place of a chunk, a first state to the stages of both CTAs, half of the columns to each. By one warp.
  __device__ void bring_state(Plan& next) {
    const Plan& now = plan(at_.turn);
    const unsigned hv = uniform(now.hv), row = uniform(now.b), number = uniform(now.number);
    const bool mine = role(at_.turn) == WarpRole::kCopy;
    if (mine) ring().wait_empty(number);
    // Both consumers have read what the stages had before, the next plan is there, and this one may be overwritten.
    // All threads wait here: waiting for an mbarrier checks only the parity of its phase, so a thread that is two
    // phases ahead would pass too early.
    at_.sync();
    next = known_plan(at_.turn + 1);
    if (!mine || !ptx::elect()) return;
    const unsigned full = ring().full(number), stage = ring().stage(number), rank = ptx::rank(), other = rank ^ 1;
    const CUtensorMap& map = call_.state_tiles->h0;
    ptx::arrive(full, kGroup);
    ptx::arrive_expecting(full, StateTiles::kBytes);
    ptx::arrive_expecting_at(ptx::address_in(full, other), StateTiles::kBytes);
#pragma unroll 1
    for (unsigned i = 0; i < StateTiles::kBytes / StateTiles::kBoxBytes; ++i) {
      const unsigned to = stage + i * StateTiles::kBoxBytes, channel = i % StateTiles::kBoxes * StateTiles::kChannels,
                     eights = i / StateTiles::kBoxes * 2;  // of columns; a CTA has eight of them
      ptx::copy_box(to, map, channel, eights + 8 * rank, 0, hv, row, full);
      ptx::copy_box_to(1 << other, to, map, channel, eights + 8 * other, 0, hv, row, full);
    }
  }

  // [q; k] q^T and [q; k] k^T of the warp's eight rows: their diagonals are q.q, q.k and k.k.
  struct Norms {
    float by_q[4] = {}, by_k[4] = {};
  };
  // Makes gates and norms of the warp's rows. The products for norms fill the time that special functions take.
  template <bool kWild>
  __device__ __forceinline__ void gates(Scores& scores, Norms& norms, unsigned rows) const {
    const typename Scores::Gate gate(call_.x, gate_);
    const unsigned r = at_.lane % 8, from = at_.address + (at_.lane / 8 % 2 ? Stage::k : Stage::q) +
                                            (8 * at_.warp + r) * kRowBytes + ((at_.lane / 16 ^ r) << 4);
    float x[4];
    typename Scores::Gate::Part part;
    const auto load = [&](unsigned own) {
      if constexpr (kWideGate) at_.load_wide(own, x);
      else four_of<T>(ptx::load_shared2(at_.address + Scratch::columns + own), x);
    };
    load(at_.own(0)), gate.template begin<kWild>(x, part), load(at_.own(1));
    for_rows(at_, [&](unsigned i, unsigned own, unsigned, unsigned after) {
      unsigned a[4];  // 16 channels
      ptx::load_matrices(a, (from ^ i % 4 << 5) + i / 4 * kHalf);
      float y[4];
      gate.end(part, y);
      gate.template begin<kWild>(x, part);  // of the next row
      load(after);
      ptx::mma<T>(norms.by_q, a, a[0], a[2]);
      ptx::mma<T>(norms.by_k, a, a[1], a[3]);
      scores.decay(gate, y, 8 * at_.warp + i < rows, own);
    });
  }

  // Prepares a chunk that has been fetched, and fetches the next one. Returns false if this one must be fetched again
  // instead, with fewer rows. now: the chunk's plan. (For v its coordinates are loaded once more: until then there
  // are no registers for them.) next: becomes the plan of what comes behind the chunk.
  __device__ bool prepare(const Plan& now, Plan& next) {
    at_.lane = ptx::thread() % 32;  // addresses are computed again in each chunk: there are no registers to keep them
    const unsigned turn = at_.turn;
    const unsigned rows = uniform(now.fine), number = uniform(now.number), stage = ring().stage(number);
    ptx::wait_barrier(at_.address + Scratch::raw, phase_++ % 2);
    if (kWideGate) ptx::wait_for_copies<0>();
    if (rows < kRows) clear(rows);
    __syncwarp();  // norms read rows that other lanes have cleared
    const bool queries = !kSkipsQueries || now.queries;
    Scores scores(at_, stage);
    Norms norms;
    if (gate_.is_wild(call_.x)) [[unlikely]]
      gates<true>(scores, norms, rows);
    else gates<false>(scores, norms, rows);
    const unsigned bad = share_factors<false>(norms, rows, queries);
    scores.share_totals();
    if (role(turn) == WarpRole::kCopy) ring().wait_empty(number);
    // The barrier also says that totals and factors of all rows are there, and that the stage may be written to.
    if (!at_.sync_all(scores.is_fine() && bad == kRows)) {
      const unsigned first = first_bad(share_factors_again(rows, queries));
      if (first < rows) return forget_rows(first);
    }
    if (queries) scores.template tiles<T, Source::kOrder>();
    else if constexpr (kSkipsQueries) scores.template tiles<T, Source::kOrder, false>();
    if (now.fine < now.rows) spoil(now, stage);
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there
    scores.run();
    ptx::fence_shared_for_async();
    const Plan place = known_plan(turn);  // behind the barrier it may be overwritten
    at_.sync();                           // Akk is there; all reads of tiles are done
    // The others have time while one warp inverts. The next chunk will wait for that warp.
    next = known_plan(turn + 1);
    const WarpRole mine = role(turn);
    if (mine == WarpRole::kInvert) {
      invert(at_, stage);
      ptx::fence_shared_for_async();
      __syncwarp();  // T is there
      share(number, stage, Stage::T, Stage::Aqk);
    }
    ptx::arrive(ring().full(number));
    if (kBringsStates ? next.is_chunk() : next.any()) fetch(next, turn + 1);
    if (mine == WarpRole::kCopy) {
      fetch_values(place.hv, place.token, place.b, number, stage);
      share(number, stage, 0, Stage::T), share(number, stage, Stage::Aqk, Stage::end);
    }
    return true;
  }

  // ---- NaN: the tokens before it keep their values ----

  // Returns the first row of all warps that has a NaN, according to gates or to `bad` of any lane.
  __device__ unsigned first_bad(unsigned bad) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      float G[4];
      at_.load_wide(at_.own(i), G);
      const float sum = (G[0] + G[1]) + (G[2] + G[3]);
      if (sum != sum) bad = min(bad, 8 * at_.warp + i);
    }
    bad = __reduce_min_sync(kAll, bad);
    if (at_.lane == 0) ptx::store_shared(at_.address + Scratch::bad + at_.warp * 4, bad);
    at_.sync();  // the rows of all warps are there
    const uint4 of_warps = ptx::load_shared4(at_.address + Scratch::bad);
    return min(min(of_warps.x, of_warps.y), min(of_warps.z, of_warps.w));
  }
  // Takes the rows from the first bad one on out of the chunk's plan.
  __device__ bool forget_rows(unsigned rows) const {
    ptx::fence_shared_for_async();  // raw rows will overwrite what is in scratch memory
    at_.sync();                     // all threads know which rows are bad
    if (threadIdx.x % kGroup == 0) plan(at_.turn).fine = rows;
    at_.sync();  // the plan is changed: all threads will clear those rows
    return false;
  }
  // Makes the outputs of those rows and the state behind them NaN; reversed, all outputs of the chunk and the state
  // before it.
  __device__ void spoil(const Plan& now, unsigned stage) const {
    __syncwarp();  // the warp's rows are there, and ell
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i)
      if (Source::kReversed || (8 * at_.warp + i >= now.fine && 8 * at_.warp + i < now.rows))
        ptx::store_shared2(stage + at_.own(i) + (Source::kReversed ? Stage::kg : Stage::q), make_uint2(~0u, ~0u));
    const float nan = __int_as_float(0x7fffffff);
    if (at_.stores_ell()) ptx::store_shared_f32x4(stage + Stage::ell + at_.lane * 16, make_float4(nan, nan, nan, nan));
  }

  // Stores norms of the warp's rows for all warps; one warp stores beta of all rows. Returns a row in which the lane
  // has seen a NaN, or kRows. Without kShrinks, a row whose squares overflow f32 counts as one with a NaN.
  template <bool kShrinks>
  __device__ unsigned share_factors(const Norms& norms, unsigned rows, bool queries) const {
    const Tokens& x = call_.x;
    unsigned bad = kRows;
    if (role(at_.turn) == WarpRole::kPlan) {
      const float beta = activated_beta(x.beta_form, value_of(x.beta_dtype, beta_));
      at_.store_factor(Scratch::kBeta, at_.lane, at_.lane < rows ? beta : 0);
      if (at_.lane < rows && beta != beta) bad = at_.lane;
    }
    // Of the four lanes with row i of the products, one has its diagonal element.
    const unsigned i = at_.lane / 4, row = 8 * at_.warp + i;
    const auto of_row = [&](float even, float odd) { return i % 2 ? odd : even; };
    Products all{queries ? of_row(norms.by_q[0], norms.by_q[1]) : 0, of_row(norms.by_k[2], norms.by_k[3]),
                 of_row(norms.by_k[0], norms.by_k[1])};
    float q = 1, k = 1, by_q = 1, by_k = 1;  // by_q, by_k: factors of shrunk rows
    if (x.qk_l2norm) {
      if (kShrinks) shrink(all, by_q, by_k, queries);
      q = ptx::inverse_root(all.qq + (by_q < 1 ? 0 : 1e-6f)), k = ptx::inverse_root(all.kk + (by_k < 1 ? 0 : 1e-6f));
    }
    if (at_.lane % 4 != i / 2) return bad;
    at_.store_norms(row, q * by_q, k * by_k);
    if (Scores::kTakesDiagonal) at_.store_factor(Scratch::kDiagonal, row, q * k * all.qk);
    const float sum = all.qq + all.kk;
    return sum - sum != 0 ? min(bad, row) : bad;
  }
  // Only for a chunk that has a huge row or a NaN: makes the norms once more, as they are no longer in registers, and
  // shrinks huge rows. Asking for huge rows before the barrier instead made a call 4.8 % slower, this way 2.5 % (H200).
  __device__ unsigned share_factors_again(unsigned rows, bool queries) const {
    Norms norms;
    const unsigned r = at_.lane % 8, from = at_.address + (at_.lane / 8 % 2 ? Stage::k : Stage::q) +
                                            (8 * at_.warp + r) * kRowBytes + ((at_.lane / 16 ^ r) << 4);
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      unsigned a[4];
      ptx::load_matrices(a, (from ^ i % 4 << 5) + i / 4 * kHalf);
      ptx::mma<T>(norms.by_q, a, a[0], a[2]);
      ptx::mma<T>(norms.by_k, a, a[1], a[3]);
    }
    return share_factors<true>(norms, rows, queries);
  }
  // Makes the products of the warp's huge rows again, after they are shrunk.
  __device__ void shrink(Products& all, float& by_q, float& by_k, bool queries) const {
    by_q = is_huge(all.qq) ? kShrink : 1, by_k = is_huge(all.kk) ? kShrink : 1;
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned owner = 4 * i + i / 2, own = at_.address + at_.own(i);
      const float q_by = __shfl_sync(kAll, by_q, owner), k_by = __shfl_sync(kAll, by_k, owner);
      if (q_by == 1 && k_by == 1) continue;
      float q[4] = {}, k[4];
      if (queries) four_of<T>(ptx::load_shared2(own + Stage::q), q);
      four_of<T>(ptx::load_shared2(own + Stage::k), k);
      Products mine{};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        q[e] *= q_by, k[e] *= k_by;
        mine.qq = fmaf(q[e], q[e], mine.qq), mine.kk = fmaf(k[e], k[e], mine.kk), mine.qk = fmaf(q[e], k[e], mine.qk);
      }
      mine = warp_sums(mine);
      if (at_.lane == owner) all = mine;
    }
  }

  const Call& call_;
  const unsigned memory_;
  Scratch at_;
  unsigned phase_ = 0;  // how often raw rows have come
  unsigned beta_;       // of row at_.lane, raw: in the warp that plans
  HeadGate gate_;
};

}  // namespace kda::cuda::engine
