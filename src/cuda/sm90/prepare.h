// The preparation: a warpgroup turns raw tokens into the operands of the scan (Stage), every second chunk of a block.
//
// Warp w has rows 8 w .. 8 w + 7 of a chunk and a lane four neighbouring channels, so that decays along the rows are
// sums in registers. Raw q, k and g are fetched a chunk earlier, onto the bench, where a lane overwrites what it alone
// reads (or other lanes of its warp, before): g with decays, all of them with operands of scores. v goes to the stage.
//   norms, gates, decays of the warp's rows      barrier: decays of all rows are known, and the stage is empty
//   kG, qG, kg into it, score operands                      barrier: operands are there
//   scores; Aqk into the stage, Akk on the bench            barrier: Akk is there, and the rest of the bench is free
//   the next chunk is fetched; one warp inverts I + Akk     the stage is full
#pragma once
#include "cuda/sm90/invert.h"
#include "cuda/sm90/scores.h"
#include "cuda/sm90/tiles.h"

namespace kda::cuda::sm90 {

// A chunk to prepare: planned by one thread for all, a chunk ahead, in shared memory.
struct alignas(16) Plan {
  unsigned hv, h, b, token;  // value and query/key head; tokens token .. token + rows - 1 of row b
  unsigned rows, fine;       // the latter: up to the first that has a NaN
  unsigned number;           // of the chunk in the ring; kNone: there are no more
  bool begins;               // its head is not that of the preparer's chunk before
  bool queries;              // q is wanted, too
  bool state;                // instead of a chunk the state of head hv in row b of h0 comes to the stage; kNone: zeros
  static constexpr unsigned kNone = ~0u;

  __device__ bool any() const { return number != kNone; }
  __device__ bool is_chunk() const { return any() && !state; }
  // Chunk `chunk` of a sequence of `length` tokens from t0 on.
  __device__ void set(unsigned head, unsigned key_head, unsigned row, unsigned t0, unsigned length, unsigned chunk) {
    hv = head, h = key_head, b = row;
    token = t0 + chunk * kRows, rows = fine = min(length - chunk * kRows, kRows);
  }
  __device__ static unsigned key_head(const ForwardProblem& p, unsigned hv) {
    return hv / (static_cast<unsigned>(p.HV) / static_cast<unsigned>(p.H));
  }
};

// kWideGate: g is f32, else it has the type of q, k and v. Source: next(call, plan), by one thread, tells the
// preparer's next chunk: it prepares one of four. kMaps: some chunks are for maps of segments, for which q is not read.
template <class T, class Scores, bool kWideGate, class Source>
class Preparation {
 public:
  static constexpr unsigned kRawTensors = kWideGate ? 2 : 3;  // which the copy engine brings
  static constexpr bool kSkipsQueries = Source::kMaps && Scores::kSkipsQueries;
  static constexpr bool kBringsStates = Source::kBringsStates;

  __device__ Preparation(const Call& call, unsigned memory, unsigned group)
      : call_(call), memory_(memory), at_(bench(memory, group), group) {}

  // By one thread, before fence_barriers().
  __device__ static void start(unsigned memory) {
    for (unsigned i = 0; i < kPreparers; ++i) ptx::init_barrier(bench(memory, i) + Bench::raw, 1);
  }
  __device__ void plan(const Source& source) {
    if (threadIdx.x % kGroup > 0) return;
    plans().source = source, plans().head = Plan::kNone;
    make_plan(plan(0));
  }
  __device__ void run() {
    at_.sync();  // the first chunk is known
    Plan now = known_plan(0);
    for (bool fetched = false; now.any(); ++at_.turn) {
      const bool state = kBringsStates && now.state;
      if (!fetched && !state) fetch(now, at_.turn);
      // Planning takes a while: it is for a warp that has not just inverted.
      if (chore(at_.turn) == kPlanChore && at_.lane == 0) make_plan(plan(at_.turn + 1));
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
  static_assert(sizeof(Plans) <= BenchLayout::kPlanBytes);

  __device__ static unsigned bench(unsigned memory, unsigned group) {
    return memory + Shared::benches + group * Bench::bytes;
  }
  __device__ Ring ring() const { return {memory_}; }
  __device__ Plans& plans() const {
    return *reinterpret_cast<Plans*>(shared_memory() + bench(0, at_.group) + Bench::plans);
  }
  __device__ Plan& plan(unsigned turn) const { return plans().turns[turn % 2]; }
  // One that has been made, in registers: each load takes a while.
  __device__ Plan known_plan(unsigned turn) const {
    static_assert(sizeof(Plan) == 2 * sizeof(uint4));
    const unsigned from = at_.address + Bench::plans + offsetof(Plans, turns) + turn % 2 * sizeof(Plan);
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

  // Which of the chores around a chunk is the warp's. (That with none before the scores is still inverting the chunk
  // before.)
  __device__ unsigned chore(unsigned turn) const { return at_.chore(turn); }
  static constexpr unsigned kInvertChore = 0, kShareChore = 1, kBetaChore = 2, kPlanChore = 2;
  static constexpr unsigned kFetchChore = 0;  // around the chunk before, that warp's was kShareChore

  // Raw q, k and g of a chunk to the bench, and beta. Rows behind the chunk's come along. The copy engine does one
  // thing behind another, and copies to the other block take it long: so the warp that will ask for those asks for all
  // raw rows before.
  __device__ void fetch(const Plan& plan, unsigned turn) {
    const Tokens& x = call_.x;
    if (plan.begins) gate_.load(x, plan.hv, at_.lane);
    if (kWideGate) fetch_wide_gate(plan);
    if (chore(turn) == kBetaChore) {
      beta_ = 0;
      if (at_.lane < plan.rows)
        beta_ = load_raw<false>(x.beta.at(plan.b, plan.token + at_.lane, plan.hv), x.beta_dtype);
    }
    if (chore(turn) != kFetchChore) return;
    const unsigned hv = uniform(plan.hv), h = uniform(plan.h), token = uniform(plan.token), b = uniform(plan.b),
                   barrier = at_.address + Bench::raw;
    const bool queries = !kSkipsQueries || plan.queries;
    if (!ptx::elect()) return;
    ptx::arrive_expecting(barrier, (kRawTensors - !queries) * 2 * kTileBytes);
    const auto ask = [&](unsigned tensor, unsigned head, unsigned to) {
      for (const unsigned half : {0u, 1u})
        ptx::copy_tile(at_.address + to + half * kHalf, call_.tiles->maps[tensor], 64 * half, head, token, b, barrier);
    };
    if (queries) ask(Tiles::kQuery, h, Stage::q);
    ask(Tiles::kKey, h, Stage::k);
    if (!kWideGate) ask(Tiles::kGate, hv, Bench::columns);
  }
  // An f32 gate, to where decays will be: by the lanes that read it.
  __device__ void fetch_wide_gate(const Plan& p) const {
    const View& g = call_.x.g;
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned row = 8 * at_.warp + i, bytes = row < p.fine ? 8 : 0, to = at_.address + at_.own(i);
      const char* from = g.at(p.b, p.token + row, p.hv) + at_.lane * 16;
      ptx::copy8(to + Bench::columns, from, bytes), ptx::copy8(to + Bench::wide, from + 8, bytes);
    }
    ptx::commit_copies();
  }
  // No rows of the chunk from this one on: of the lane's.
  __device__ void clear(unsigned rows) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      if (8 * at_.warp + i < rows) continue;
      for (const unsigned tile : {Stage::q, Stage::k, Bench::columns, Bench::wide})
        ptx::store_shared2(at_.address + tile + at_.own(i), make_uint2(0, 0));
    }
  }
  // v to the stages of both blocks, which are full when it is there, and the rest of what the other's waits for;
  // and that, piece by piece. By a warp's first lane.
  __device__ void fetch_values(unsigned hv, unsigned first, unsigned row, unsigned number, unsigned stage) const {
    const unsigned full = ring().full(number), v = stage + Stage::v, rank = ptx::rank(), other = rank ^ 1;
    const unsigned head = uniform(hv), token = uniform(first), b = uniform(row);
    const CUtensorMap& map = call_.tiles->maps[Tiles::kValue];
    if (!ptx::elect()) return;
    ptx::arrive_expecting(full, kTileBytes);
    ptx::copy_tile(v, map, 64 * rank, head, token, b, full);
    ptx::arrive_expecting_at(ptx::address_in(full, other), Stage::end + kTileBytes);
    ptx::copy_tile_to(1 << other, v, map, 64 * other, head, token, b, full);
  }
  __device__ void share(unsigned number, unsigned stage, unsigned first, unsigned end) const {
    const unsigned from = stage + first, other = ptx::rank() ^ 1;
    if (!ptx::elect()) return;
    ptx::copy_bulk_between(ptx::address_in(from, other), from, end - first,
                           ptx::address_in(ring().full(number), other));
  }

  // Instead of a chunk, a first state to the stages of both blocks, half of the columns to each: by one warp.
  __device__ void bring_state(Plan& next) {
    const Plan& now = plan(at_.turn);
    const unsigned hv = uniform(now.hv), row = uniform(now.b), number = uniform(now.number);
    const bool mine = chore(at_.turn) == kShareChore;
    if (mine) ring().wait_empty(number);
    // Both scans have read what the stages had before. (Until then nobody goes on: to who waits for the next phase of
    // an mbarrier, the one before this one looks the same.) And the next plan is there; this one may be overwritten.
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
                     eights = i / StateTiles::kBoxes * 2;  // of columns; a block has eight of them
      ptx::copy_box(to, map, channel, eights + 8 * rank, 0, hv, row, full);
      ptx::copy_box_to(1 << other, to, map, channel, eights + 8 * other, 0, hv, row, full);
    }
  }

  // [q; k] q^T and [q; k] k^T of the warp's eight rows: their diagonals are q.q, q.k and k.k.
  struct Norms {
    float by_q[4] = {}, by_k[4] = {};
  };
  // Gates and norms of the warp's rows; products for the latter fill the time that special functions take.
  template <bool kWild>
  __device__ __forceinline__ void gates(Scores& scores, Norms& norms, unsigned rows) const {
    const typename Scores::Gate gate(call_.x, gate_);
    const unsigned r = at_.lane % 8, from = at_.address + (at_.lane / 8 % 2 ? Stage::k : Stage::q) +
                                            (8 * at_.warp + r) * kRowBytes + ((at_.lane / 16 ^ r) << 4);
    float x[4];
    typename Scores::Gate::Part part;
    const auto load = [&](unsigned own) {
      if constexpr (kWideGate) at_.load_wide(own, x);
      else four_of<T>(ptx::load_shared2(at_.address + Bench::columns + own), x);
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

  // A chunk that was fetched. Returns whether the next one is; if not, this one is to be fetched again, with fewer
  // rows. now: the chunk's plan. (Where its tokens are is looked up once more for v: until then registers have no room
  // for that.) next: becomes the plan of what comes behind it.
  __device__ bool prepare(const Plan& now, Plan& next) {
    at_.lane = ptx::thread() % 32;  // addresses are computed again in each chunk: there is no room for them in between
    const unsigned turn = at_.turn;
    const unsigned rows = uniform(now.fine), number = uniform(now.number), stage = ring().stage(number);
    ptx::wait_barrier(at_.address + Bench::raw, phase_++ % 2);
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
    if (chore(turn) == kShareChore) ring().wait_empty(number);
    // The barrier also says that totals and factors of all rows are there, and that the stage may be written to.
    if (!at_.sync_all(scores.is_fine() && bad == kRows)) {
      const unsigned first = first_bad(share_factors_again(rows, queries));
      if (first < rows) return forget_rows(first);
    }
    if (queries) scores.template tiles<T>();
    else if constexpr (kSkipsQueries) scores.template tiles<T, false>();
    if (now.fine < now.rows) spoil(now, stage);
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there
    scores.run();
    ptx::fence_shared_for_async();
    const Plan place = known_plan(turn);  // may be overwritten then
    at_.sync();                           // Akk is there; nobody reads tiles any more
    // While one warp inverts, for which the next chunk will wait, the others have time.
    next = known_plan(turn + 1);
    const unsigned mine = chore(turn);
    if (mine == kInvertChore) {
      invert(at_, stage);
      ptx::fence_shared_for_async();
      __syncwarp();  // T is there
      share(number, stage, Stage::T, Stage::Aqk);
    }
    ptx::arrive(ring().full(number));
    if (kBringsStates ? next.is_chunk() : next.any()) fetch(next, turn + 1);
    if (mine == kShareChore) {
      fetch_values(place.hv, place.token, place.b, number, stage);
      share(number, stage, 0, Stage::T), share(number, stage, Stage::Aqk, Stage::end);
    }
    return true;
  }

  // ---- NaN: the tokens before it are as if there were none ----

  // The first row of all warps that has one, among those that gates or `bad` of a lane know of.
  __device__ unsigned first_bad(unsigned bad) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      float G[4];
      at_.load_wide(at_.own(i), G);
      const float sum = (G[0] + G[1]) + (G[2] + G[3]);
      if (sum != sum) bad = min(bad, 8 * at_.warp + i);
    }
    bad = __reduce_min_sync(kAll, bad);
    if (at_.lane == 0) ptx::store_shared(at_.address + Bench::bad + at_.warp * 4, bad);
    at_.sync();  // those of all warps are there
    const uint4 of_warps = ptx::load_shared4(at_.address + Bench::bad);
    return min(min(of_warps.x, of_warps.y), min(of_warps.z, of_warps.w));
  }
  // No rows of the chunk from the first bad one on.
  __device__ bool forget_rows(unsigned rows) const {
    ptx::fence_shared_for_async();  // raw rows will overwrite what is on the bench
    at_.sync();                     // all know which rows are bad
    if (threadIdx.x % kGroup == 0) plan(at_.turn).fine = rows;
    at_.sync();  // all will clear them
    return false;
  }
  // Their outputs, and the state behind them.
  __device__ void spoil(const Plan& now, unsigned stage) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i)
      if (8 * at_.warp + i >= now.fine && 8 * at_.warp + i < now.rows)
        ptx::store_shared2(stage + at_.own(i) + Stage::q, make_uint2(~0u, ~0u));
    const float nan = __int_as_float(0x7fffffff);
    if (at_.stores_ell()) ptx::store_shared_f32x4(stage + Stage::ell + at_.lane * 16, make_float4(nan, nan, nan, nan));
  }

  // Norms of the warp's rows, and beta of all, by one warp. Returns a row the lane has seen a NaN in, or kRows. Without
  // kShrinks a row whose squares are beyond f32 counts as one.
  template <bool kShrinks>
  __device__ unsigned share_factors(const Norms& norms, unsigned rows, bool queries) const {
    const Tokens& x = call_.x;
    unsigned bad = kRows;
    if (chore(at_.turn) == kBetaChore) {
      const float beta = activated_beta(x.beta_form, value_of(x.beta_dtype, beta_));
      at_.store_factor(Bench::kBeta, at_.lane, at_.lane < rows ? beta : 0);
      if (at_.lane < rows && beta != beta) bad = at_.lane;
    }
    // Row i's elements are in one of four lanes.
    const unsigned i = at_.lane / 4, row = 8 * at_.warp + i;
    const auto of_row = [&](float even, float odd) { return i % 2 ? odd : even; };
    Products all{queries ? of_row(norms.by_q[0], norms.by_q[1]) : 0, of_row(norms.by_k[2], norms.by_k[3]),
                 of_row(norms.by_k[0], norms.by_k[1])};
    float q = 1, k = 1, by_q = 1, by_k = 1;  // the latter: of shrunk rows
    if (x.qk_l2norm) {
      if (kShrinks) shrink(all, by_q, by_k, queries);
      q = ptx::inverse_root(all.qq + (by_q < 1 ? 0 : 1e-6f)), k = ptx::inverse_root(all.kk + (by_k < 1 ? 0 : 1e-6f));
    }
    if (at_.lane % 4 != i / 2) return bad;
    at_.store_norms(row, q * by_q, k * by_k);
    if (Scores::kTakesDiagonal) at_.store_factor(Bench::kDiagonal, row, q * k * all.qk);
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
  // Products of the warp's huge rows, after they are shrunk.
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
  Bench at_;
  unsigned phase_ = 0;  // how often raw rows have come
  unsigned beta_;       // of row at_.lane, raw: of one warp
  HeadGate gate_;
};

}  // namespace kda::cuda::sm90
