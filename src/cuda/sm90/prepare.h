// The preparation: a warpgroup turns raw tokens into the operands of the scan (Stage), every second chunk of a block.
//
// Warp w has rows 8 w .. 8 w + 7 of a chunk and a lane four neighbouring channels, so that decays along the rows are
// products in registers. Raw q, k and g are fetched a chunk earlier, onto the bench, where a lane overwrites what it alone
// reads (or other lanes of its warp, before); v goes to the stage.
//   norms, gates, decays of the warp's rows; the stage is empty       barrier: decays of all rows are known
//   kG, qG, kg into the stage, score operands on the bench            barrier: operands are there
//   scores; Aqk into the stage, Akk on the bench                      barrier: Akk is there, and the bench is free
//   the next chunk is fetched; one warp inverts I + Akk               the stage is full
#pragma once
#include "cuda/sm90/help.h"
#include "cuda/sm90/invert.h"
#include "cuda/sm90/scores.h"
#include "cuda/sm90/tiles.h"

namespace kda::cuda::sm90 {

// A chunk to prepare: planned by one thread for all, two chunks ahead, in shared memory.
struct Plan {
  unsigned hv, h, b, token, rows;  // value and query/key head; tokens token .. token + rows - 1 of row b
  unsigned fine;                   // rows up to the first that has a NaN
  unsigned number;                 // of the chunk, over all of the block; kNone: there are no more
  unsigned images[2], count;       // chunks before it whose images come from helpers
  unsigned task;                   // of a helper
  bool begins;                     // its head is not that of the preparer's chunk before
  bool open;                       // it is not known yet which chunk it is
  static constexpr unsigned kNone = ~0u;

  __device__ bool any() const { return number != kNone; }
};

// Where a preparer is on its way through the block's items.
struct Walk {
  unsigned item, hv, h;    // the value head of a sequence, and its query/key head
  unsigned b, t0, length;  // where that sequence's tokens are; none of padding
  unsigned chunk, number;  // of the sequence; over all of the block
  unsigned total;          // chunks of the block, once they are known
  unsigned head;           // of the last plan
  bool ended;

  __device__ void start(const Call& call) {
    item = call.first, number = chunk = 0, head = Plan::kNone, ended = false;
    enter(call);
  }
  // On to another chunk of the block.
  __device__ void move_to(const Call& call, unsigned n) {
    if (ended) return;
    chunk += n - number, number = n;
    while (!ended && chunk * kRows >= length) {
      chunk -= (length + kRows - 1) / kRows, item += gridDim.x;
      enter(call);
    }
  }
  // To a chunk of any item.
  __device__ void jump_to(const Call& call, const Task& task, unsigned n) {
    find(call.p, Item(call.p, task.item));
    chunk = task.chunk, number = n;
  }
  __device__ void mark(Plan& p) {
    p.begins = hv != head, head = hv;
    p.hv = hv, p.h = h, p.b = b, p.token = t0 + chunk * kRows, p.rows = p.fine = min(length - chunk * kRows, kRows);
    p.number = number;
  }

 private:
  __device__ void enter(const Call& call) {
    const Item here(call.p, item);
    const unsigned first = number - chunk;
    ended = !here.exists(call.p);
    if (ended) total = first;
    else find(call.p, here);
    if (!call.help.owns() || (!ended && length == 0)) return;
    atomicMax(&call.help.own().place, ended ? kClosed : static_cast<unsigned long long>(item + 1) << 32 | first);
  }
  __device__ void find(const ForwardProblem& p, const Item& here) {
    length = 0, hv = here.hv, h = hv / static_cast<unsigned>(p.group());
    if (here.is_tail(p)) return;
    const Sequence s = sequence_at(p, p.args.in, p.args.states, here.n);
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0);
    if (s.live) length = static_cast<unsigned>(s.length);
  }
};

struct Plans {
  Walk walk;
  Plan turns[2];
};
static_assert(sizeof(Plans) <= Shared::kPlanBytes);

// kWideGate: g is f32, else it has the type of q, k and v.
template <class T, class Scores, bool kWideGate>
class Preparation {
 public:
  static constexpr unsigned kRawTensors = kWideGate ? 2 : 3;  // which the copy engine brings

  __device__ Preparation(const Call& call, unsigned memory, unsigned group) : call_(call), at_{memory, group} {}

  // By one thread, before fence_barriers().
  __device__ static void start(unsigned memory) {
    for (unsigned i = 0; i < kPreparers; ++i) ptx::init_barrier(memory + Shared::raw + i * 8, kRawTensors);
  }
  // The block's own chunks, then those of others.
  __device__ void run() {
    if (threadIdx.x % kGroup == 0) {
      Walk walk;
      walk.start(call_);
      plans().walk = walk;
      decide(plan(0)), settle(plan(0));
      decide(plan(1));
    }
    at_.set_turn(0);
    at_.sync();  // the first chunk is known
    bool fetched = false;
    for (;; at_.set_turn(at_.turn() + 1)) {
      const Plan& now = plan(at_.turn());
      if (!fetched) {
        if (!now.any()) return;
        fetch(now);
      }
      if (now.begins) {
        at_.sync();  // nobody reads the gate of the head before
        at_.store_gate(call_.x, now.hv);
        at_.sync();  // the gate is there
      }
      Done done;
      do done = prepare();
      while (done == kAgain);
      fetched = done == kNextFetched;
      // Planning takes a while: it is for a warp that does not invert.
      if (!fetched) at_.sync();  // all know that it is not
      const unsigned turn = at_.turn();
      if (at_.warp == (turn + 2) % 4 && at_.lane == 0) {
        settle(plan(turn + 1));
        decide(plan(turn));
      }
      if (!fetched) at_.sync();  // what is next is known
    }
  }

 private:
  __device__ Ring ring() const { return {at_.memory}; }
  __device__ Plans& plans() const {
    return *reinterpret_cast<Plans*>(shared_memory() + Shared::plans + at_.group * Shared::kPlanBytes);
  }
  __device__ Plan& plan(unsigned turn) const { return plans().turns[turn % 2]; }

  // ---- planning: by one thread ----

  // The block's next chunk that no helper has claimed. The first two that one has are kept for later.
  __device__ void decide(Plan& p) {
    Walk walk = plans().walk;  // in registers
    p.count = 0;
    while (take(walk, p) && (p.images[p.count++] = p.number, p.count < 2)) {
    }
    plans().walk = walk;
  }
  // Takes a chunk: returns whether a helper has it, so that p is still open.
  __device__ bool take(Walk& walk, Plan& p) {
    p.open = false;
    if (!walk.ended) {
      const unsigned n = atomicAdd(&Queue::here().taken, 1), claimed = claim(call_.help, n);
      walk.move_to(call_, n);
      p.number = n;
      if (!walk.ended) {
        p.open = is_helped(n, claimed);
        if (!p.open) walk.mark(p);
        return p.open;
      }
    }
    p.number = Plan::kNone;
    if (!call_.help) return false;
    p.task = atomicAdd(&Queue::here().helped, 1);
    look_for_task(walk, p);
    return false;
  }
  // A helper's task, if the scout has found it.
  __device__ void look_for_task(Walk& walk, Plan& p) {
    p.open = !ptx::has_phase_ended(Queue::found(at_.memory, p.task), Queue::parity(p.task));
    if (p.open) return;
    const Task task = Queue::here().tasks[p.task % kQueue];
    if (task.owner == Task::kNone) return;
    walk.jump_to(call_, task, walk.total + p.task);
    walk.mark(p);
  }
  // Until it is known which chunk it is. (All before it have been prepared, or this would wait for its own warpgroup.)
  __device__ void settle(Plan& p) {
    for (unsigned i = 0; i < p.count; ++i) load_image(call_.help, ring(), p.images[i]);
    if (!p.open) return;
    Walk walk = plans().walk;
    while (p.open) {
      if (walk.ended) look_for_task(walk, p);
      else if (take(walk, p)) load_image(call_.help, ring(), p.number);
    }
    plans().walk = walk;
  }

  // ---- chunks ----

  // Raw q, k and g of a chunk to the bench; a tensor a warp, and beta. Rows behind the chunk's come along.
  __device__ void fetch(const Plan& plan) {
    const Tokens& x = call_.x;
    if (at_.warp == 3) {
      beta_ = 0;
      if (at_.lane < plan.rows)
        beta_ = load_raw<false>(x.beta.at(plan.b, plan.token + at_.lane, plan.hv), x.beta_dtype);
    } else if (at_.warp < kRawTensors && at_.lane == 0) {
      const Tiles& tiles = *call_.tiles;
      const unsigned to = at_.warp == 2 ? at_.columns() : at_.rows() + (at_.warp == 1 ? Stage::k : Stage::q);
      ptx::arrive_expecting(at_.raw(), 2 * kTileBytes);
      copy_tiles(at_.warp == 2   ? tiles.g
                 : at_.warp == 1 ? tiles.k
                                 : tiles.q,
                 plan, at_.warp == 2 ? plan.hv : plan.h, to, at_.raw());
    }
  }
  __device__ static void copy_tiles(const CUtensorMap& map, const Plan& plan, unsigned head, unsigned to,
                                    unsigned barrier) {
    ptx::copy_tile(to, map, 0, head, plan.token, plan.b, barrier);
    ptx::copy_tile(to + kHalf, map, 64, head, plan.token, plan.b, barrier);
  }
  // v to the stage, which is full when it is there.
  __device__ void fetch_values(const Plan& plan, unsigned stage) const {
    const View& v = call_.x.v;
    if (!v.data) return;
    if (plan.fine == kRows) {
      if (at_.warp != 3 || at_.lane > 0) return;
      ptx::expect_bytes(ring().full(plan.number), 2 * kTileBytes);
      copy_tiles(call_.tiles->v, plan, plan.hv, stage + Stage::v, ring().full(plan.number));
      return;
    }
    // With zeros behind the chunk's rows: the scan reads all.
    const unsigned row = at_.lane / 16, piece = at_.lane % 16, first = 8 * at_.warp + row;
    const unsigned to = stage + Stage::v + piece / 8 * kHalf + first * kRowBytes + ((piece % 8 ^ row) << 4);
#pragma unroll 1
    for (unsigned i = 0; i < 4; ++i)
      ptx::copy16((to ^ i << 5) + i * 2 * kRowBytes, v.at(plan.b, plan.token + first + 2 * i, plan.hv) + piece * 16,
                  first + 2 * i < plan.fine ? 16 : 0);
    ptx::commit_copies();
  }
  // No rows of the chunk from this one on: of the lane's.
  __device__ void clear(unsigned rows) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      if (8 * at_.warp + i < rows) continue;
      for (const unsigned tile : {at_.rows() + Stage::q, at_.rows() + Stage::k, at_.columns()})
        ptx::store_shared2(at_.own(tile)[i], make_uint2(0, 0));
    }
  }
  // An f32 gate has no room on the bench. It lies in the stage, where operands will be once it has been read.
  __device__ unsigned wide_gate(unsigned stage, unsigned i) const {
    return stage + (8 * at_.warp + i) * kSize * 4 + at_.lane * 16;
  }
  __device__ void fetch_wide_gate(const Plan& p, unsigned stage) const {
    const View& g = call_.x.g;
    const char* from = g.at(p.b, p.token + 8 * at_.warp, p.hv) + at_.lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::copy16(wide_gate(stage, i), from + i * static_cast<uint64_t>(g.stride1), 8 * at_.warp + i < p.fine ? 16 : 0);
    ptx::commit_copies();
  }

  // A chunk that was fetched.
  enum Done { kDone, kNextFetched, kAgain };  // the latter: with fewer rows, before anything of it was stored
  __device__ Done prepare() {
    at_.forget();
    const unsigned turn = at_.turn();
    const Plan& now = plan(turn);
    const unsigned rows = now.fine, stage = ring().stage(now.number);
    at_.factors = at_.factors_of(turn);
    at_.set_number(now.number);
    if (kWideGate) ring().wait_empty(now.number), fetch_wide_gate(now, stage);
    ptx::wait_barrier(at_.raw(), turn % 2);
    if (rows < kRows) clear(rows);
    if (kWideGate) ptx::wait_for_copies<0>();
    __syncwarp();  // norms read rows that other lanes have cleared
    unsigned bad = share_factors(rows);
    at_.forget();
    Scores scores(at_, stage);
    const typename Scores::Gate gate(call_.x, at_);
    Bench::Own own = at_.own(at_.columns());
#pragma unroll 1
    for (unsigned first = 0; first < 8; first += 4, own = own.further()) {
      scores.four();
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        float x[4];
        if constexpr (kWideGate) load_four(wide_gate(stage, first + i), x);
        else four_of<T>(ptx::load_shared2(own[i]), x);
        scores.decay(i, gate, x, 8 * at_.warp + first + i < rows);
      }
    }
    at_.forget();
    ring().wait_empty(at_.number());  // from here on it is written to
    scores.share_totals();
    if (!__all_sync(kAll, scores.is_fine(7) && bad == kRows)) bad = first_bad(scores, bad);
    if (at_.lane == 0) ptx::store_shared(at_.bad() + at_.warp * 4, bad);
    at_.sync();  // totals and factors of all rows are there
    const uint4 of_warps = ptx::load_shared4(at_.bad());
    const unsigned first_bad = min(min(of_warps.x, of_warps.y), min(of_warps.z, of_warps.w));
    if (first_bad < rows) return forget_rows(first_bad);
    fetch_values(now, stage);
    scores.template tiles<T>();
    if (now.fine < now.rows) spoil();
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there
    return finish(scores);
  }
  // The rest of it. (What was known before is asked for again: there were no registers to keep it.)
  __device__ Done finish(Scores& scores) {
    at_.forget();
    const unsigned turn = at_.turn(), number = at_.number(), stage = ring().stage(number);
    at_.factors = at_.factors_of(turn);
    const Plan& next = plan(turn + 1);
    const bool fetches = !next.open && next.any();
    scores.run(stage);
    at_.sync();  // Akk is there; nobody reads tiles any more, nor asks whether the next chunk is known
    if (fetches) fetch(next);
    if (at_.warp == turn % 4) {
      at_.forget();
      invert(at_, stage);
    }
    ptx::wait_for_copies<0>();  // v of this chunk, if they are not all of its rows
    ptx::fence_shared_for_async();
    ptx::arrive(ring().full(number));
    return fetches ? kNextFetched : kDone;
  }

  // ---- NaN: the tokens before it are as if there were none ----

  // The warp's first row that has one, among those that gates or `bad` of a lane know of.
  __device__ unsigned first_bad(const Scores& scores, unsigned bad) const {
#pragma unroll
    for (int i = 7; i >= 0; --i)
      if (!scores.is_fine(i)) bad = min(bad, 8 * at_.warp + i);
    return __reduce_min_sync(kAll, bad);
  }
  // No rows of the chunk from the first bad one on.
  __device__ Done forget_rows(unsigned rows) const {
    at_.sync();  // all know which rows are bad
    if (threadIdx.x % kGroup == 0) plan(at_.turn()).fine = rows;
    at_.sync();  // all will clear them
    return kAgain;
  }
  // Their outputs, and the state behind them.
  __device__ void spoil() const {
    const unsigned turn = at_.turn();
    const unsigned stage = ring().stage(plan(turn).number);
    for (int i = 0; i < 8; ++i)
      if (8 * at_.warp + i >= plan(turn).fine && 8 * at_.warp + i < plan(turn).rows)
        ptx::store_shared2(at_.own(stage)[i] + Stage::q, make_uint2(~0u, ~0u));
    const float nan = __int_as_float(0x7fffffff);
    if (at_.warp == 0) ptx::store_shared_f32x4(stage + Stage::ell + at_.lane * 16, make_float4(nan, nan, nan, nan));
  }

  // Norms of the warp's rows, and beta (of all, by warp 3). Returns a row the lane has seen a NaN in, or kRows.
  __device__ unsigned share_factors(unsigned rows) {
    const Tokens& x = call_.x;
    unsigned bad = kRows;
    if (at_.warp == 3) {
      const float beta = activated_beta(x.beta_form, value_of(x.beta_dtype, beta_));
      at_.store_factor(Bench::kBeta, at_.lane, at_.lane < rows ? beta : 0);
      if (at_.lane < rows && beta != beta) bad = at_.lane;
    }
    // [q; k] q^T and [q; k] k^T of the warp's eight rows: their diagonals are q.q, q.k and k.k.
    float by_q[2][4] = {}, by_k[2][4] = {};  // of even and odd steps: shorter chains
    const unsigned r = at_.lane % 8,
                   from = at_.rows() + (at_.lane / 8 % 2 ? Stage::k : Stage::q) + (8 * at_.warp + r) * kRowBytes;
#pragma unroll 1
    for (unsigned half = 0; half < 2 * kHalf; half += kHalf)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        unsigned a[4];
        ptx::load_matrices(a, from + half + ((j * 2 + at_.lane / 16 ^ r) << 4));
        ptx::mma<T>(by_q[j % 2], a, a[0], a[2]);
        ptx::mma<T>(by_k[j % 2], a, a[1], a[3]);
      }
#pragma unroll
    for (int e = 0; e < 4; ++e) by_q[0][e] += by_q[1][e], by_k[0][e] += by_k[1][e];
    const unsigned i = at_.lane / 4, row = 8 * at_.warp + i;  // whose elements are in one of its four lanes
    if (at_.lane % 4 != i / 2) return bad;
    float q = 1, k = 1;
    const float qq = i % 2 ? by_q[0][1] : by_q[0][0], kk = i % 2 ? by_k[0][3] : by_k[0][2], sum = qq + kk;
    if (x.qk_l2norm) q *= ptx::inverse_root(qq + 1e-6f), k *= ptx::inverse_root(kk + 1e-6f);
    at_.store_factor(Bench::kQuery, row, q);
    at_.store_factor(Bench::kKey, row, k);
    if (Scores::kTakesDiagonal) at_.store_factor(Bench::kDiagonal, row, q * k * (i % 2 ? by_k[0][1] : by_k[0][0]));
    return sum - sum != 0 ? min(bad, row) : bad;
  }

  const Call& call_;
  Bench at_;
  unsigned beta_;  // of row at_.lane, raw: of warp 3
};

}  // namespace kda::cuda::sm90
