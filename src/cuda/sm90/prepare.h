// The preparation: a warpgroup turns raw tokens into the operands of the scan (Stage), every second chunk of a block.
//
// Warp w has rows 8 w .. 8 w + 7 of a chunk and a lane four neighbouring channels, so that decays along the rows are
// sums in registers. Raw q, k and g are fetched a chunk earlier, onto the bench, where a lane overwrites what it alone
// reads (or other lanes of its warp, before); v goes to the stage. Decays wait in the stage, each where its lane will store.
//   the stage is empty; norms, gates, decays of the warp's rows       barrier: decays of all rows are known
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
struct alignas(16) Plan {
  unsigned hv, h, b, token;   // value and query/key head; tokens token .. token + rows - 1 of row b
  unsigned rows, fine;        // the latter: up to the first that has a NaN
  unsigned number;            // of the chunk, over all of the block; kNone: there are no more
  unsigned images[2], count;  // chunks before it whose images come from helpers
  unsigned task;              // of a helper
  bool begins;                // its head is not that of the preparer's chunk before
  bool open;                  // it is not known yet which chunk it is
  static constexpr unsigned kNone = ~0u;

  __device__ bool any() const { return number != kNone; }
};

// Where a preparer is on its way through the block's items.
struct alignas(16) Walk {
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
static_assert(sizeof(Plans) <= BenchLayout::kPlanBytes);

// kWideGate: g is f32, else it has the type of q, k and v.
template <class T, class Scores, bool kWideGate>
class Preparation {
 public:
  static constexpr unsigned kRawTensors = kWideGate ? 2 : 3;  // which the copy engine brings

  __device__ Preparation(const Call& call, unsigned memory, unsigned group)
      : call_(call), memory_(memory), at_(memory, group) {}

  // By one thread, before fence_barriers().
  __device__ static void start(unsigned memory) {
    for (unsigned i = 0; i < kPreparers; ++i) ptx::init_barrier(Bench::at(memory, i) + Bench::raw, kRawTensors);
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
    at_.sync();  // the first chunk is known
    bool fetched = false;
    for (at_.turn = 0;; ++at_.turn) {
      const Plan& now = plan(at_.turn);
      if (!fetched) {
        if (!now.any()) return;
        fetch(now, at_.turn);
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
      if (!fetched) at_.sync();  // all know that it is not
      // Planning takes a while: it is for a warp that does not invert.
      if (chore(at_.turn) == kPlanChore && at_.lane == 0) settle(plan(at_.turn + 1)), decide(plan(at_.turn));
      if (!fetched) at_.sync();  // what is next is known
    }
  }

 private:
  __device__ Ring ring() const { return {memory_}; }
  __device__ Plans& plans() const {
    return *reinterpret_cast<Plans*>(shared_memory() + Shared::benches + at_.group * Bench::bytes + Bench::plans);
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
    p.open = !ptx::has_phase_ended(Queue::found(memory_, p.task), Queue::parity(p.task));
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

  // Which of the chores around a chunk is the warp's. (That with none before the scores is still inverting the chunk before.)
  __device__ unsigned chore(unsigned turn) const { return (at_.warp - turn) % 4; }
  static constexpr unsigned kBetaChore = 2, kValueChore = 0, kInvertChore = 0, kPlanChore = 2;

  // Raw q, k and g of a chunk to the bench; a tensor a warp, and beta. Rows behind the chunk's come along.
  __device__ void fetch(const Plan& plan, unsigned turn) {
    const Tokens& x = call_.x;
    const unsigned tensor = chore(turn);
    if (tensor == kBetaChore) {
      beta_ = 0;
      if (at_.lane < plan.rows)
        beta_ = load_raw<false>(x.beta.at(plan.b, plan.token + at_.lane, plan.hv), x.beta_dtype);
    }
    if (tensor >= kRawTensors || at_.lane > 0) return;
    ptx::arrive_expecting(at_.address + Bench::raw, 2 * kTileBytes);
    copy_tiles(call_.tiles->maps[tensor], plan, tensor == Tiles::kGate ? plan.hv : plan.h,
               at_.address + (tensor == Tiles::kGate    ? Bench::columns
                              : tensor == Tiles::kQuery ? Stage::q
                                                        : Stage::k),
               at_.address + Bench::raw);
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
      if (chore(at_.turn) != kValueChore || at_.lane > 0) return;
      ptx::expect_bytes(ring().full(plan.number), 2 * kTileBytes);
      copy_tiles(call_.tiles->maps[Tiles::kValue], plan, plan.hv, stage + Stage::v, ring().full(plan.number));
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
      for (const unsigned tile : {at_.address + Stage::q, at_.address + Stage::k, at_.address + Bench::columns})
        ptx::store_shared2(tile + at_.own(i), make_uint2(0, 0));
    }
  }
  // An f32 gate has no room on the bench.
  __device__ void fetch_wide_gate(const Plan& p, unsigned stage) const {
    const View& g = call_.x.g;
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned row = 8 * at_.warp + i, bytes = row < p.fine ? 8 : 0;
      const char* from = g.at(p.b, p.token + row, p.hv) + at_.lane * 16;
      ptx::copy8(stage + at_.own(i) + Stage::k, from, bytes);
      ptx::copy8(stage + at_.own(i) + Stage::q, from + 8, bytes);
    }
    ptx::commit_copies();
  }

  // [q; k] q^T and [q; k] k^T of the warp's eight rows: their diagonals are q.q, q.k and k.k.
  struct Norms {
    float by_q[4] = {}, by_k[4] = {};
  };
  // Gates and norms of the warp's rows; products for the latter fill the time that special functions take.
  template <bool kFull>
  __device__ __forceinline__ void gates(Scores& scores, Norms& norms, unsigned stage, unsigned rows) const {
    const typename Scores::Gate gate(call_.x, at_);
    const unsigned r = at_.lane % 8, from = at_.address + (at_.lane / 8 % 2 ? Stage::k : Stage::q) +
                                            (8 * at_.warp + r) * kRowBytes + ((at_.lane / 16 ^ r) << 4);
    float x[4];
    typename Scores::Gate::Part part;
    const auto load = [&](unsigned own) {
      if constexpr (kWideGate) Bench::load_wide(stage + own, x);
      else four_of<T>(ptx::load_shared2(at_.address + Bench::columns + own), x);
    };
    load(at_.own(0)), gate.begin(x, part), load(at_.own(1));
    for_rows(at_, [&](unsigned i, unsigned own, unsigned, unsigned after) {
      unsigned a[4];  // 16 channels
      ptx::load_matrices(a, (from ^ i % 4 << 5) + i / 4 * kHalf);
      float y[4];
      gate.end(part, y);
      gate.begin(x, part);  // of the next row
      load(after);
      ptx::mma<T>(norms.by_q, a, a[0], a[2]);
      ptx::mma<T>(norms.by_k, a, a[1], a[3]);
      scores.decay(gate, y, kFull || 8 * at_.warp + i < rows, own);
    });
  }

  // A chunk that was fetched.
  enum Done { kDone, kNextFetched, kAgain };  // the latter: with fewer rows, before anything of it was stored
  __device__ Done prepare() {
    at_.lane = ptx::thread() % 32;  // addresses are computed again in each chunk: there is no room for them in between
    const unsigned turn = at_.turn;
    const Plan& now = plan(turn);
    const unsigned rows = uniform(now.fine), number = uniform(now.number), stage = ring().stage(number);
    if (kWideGate) ring().wait_empty(number), fetch_wide_gate(now, stage);
    ptx::wait_barrier(at_.address + Bench::raw, turn % 2);
    if (rows < kRows) clear(rows);
    if (kWideGate) ptx::wait_for_copies<0>();
    __syncwarp();                               // norms read rows that other lanes have cleared
    if (!kWideGate) ring().wait_empty(number);  // from here on it is written to
    Scores scores(at_, stage);
    Norms norms;
    if (rows == kRows) gates<true>(scores, norms, stage, rows);
    else gates<false>(scores, norms, stage, rows);
    const unsigned bad = share_factors(norms, rows);
    scores.share_totals();
    // The barrier also says that totals and factors of all rows are there.
    if (!at_.sync_all(scores.is_fine() && bad == kRows)) {
      const unsigned first = first_bad(stage, bad);
      if (first < rows) return forget_rows(first);
    }
    fetch_values(now, stage);
    scores.template tiles<T>();
    if (now.fine < now.rows) spoil(now, stage);
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there
    const Plan& next = plan(turn + 1);
    const bool fetches = !next.open && next.any();
    scores.run();
    at_.sync();  // Akk is there; nobody reads tiles any more, nor asks whether the next chunk is known
    if (fetches) fetch(next, turn + 1);
    if (chore(turn) == kInvertChore) invert(at_, stage);
    ptx::wait_for_copies<0>();  // v of this chunk, if they are not all of its rows
    ptx::fence_shared_for_async();
    ptx::arrive(ring().full(number));
    return fetches ? kNextFetched : kDone;
  }

  // ---- NaN: the tokens before it are as if there were none ----

  // The first row of all warps that has one, among those that gates or `bad` of a lane know of.
  __device__ unsigned first_bad(unsigned stage, unsigned bad) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i) {
      float G[4];
      Bench::load_wide(stage + at_.own(i), G);
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
  __device__ Done forget_rows(unsigned rows) const {
    at_.sync();  // all know which rows are bad
    if (threadIdx.x % kGroup == 0) plan(at_.turn).fine = rows;
    at_.sync();  // all will clear them
    return kAgain;
  }
  // Their outputs, and the state behind them.
  __device__ void spoil(const Plan& now, unsigned stage) const {
#pragma unroll 1
    for (unsigned i = 0; i < 8; ++i)
      if (8 * at_.warp + i >= now.fine && 8 * at_.warp + i < now.rows)
        ptx::store_shared2(stage + at_.own(i) + Stage::q, make_uint2(~0u, ~0u));
    const float nan = __int_as_float(0x7fffffff);
    if (at_.warp == 0) ptx::store_shared_f32x4(stage + Stage::ell + at_.lane * 16, make_float4(nan, nan, nan, nan));
  }

  // Norms of the warp's rows, and beta of all, by one warp. Returns a row the lane has seen a NaN in, or kRows.
  __device__ unsigned share_factors(const Norms& norms, unsigned rows) const {
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
    const float qq = of_row(norms.by_q[0], norms.by_q[1]), kk = of_row(norms.by_k[2], norms.by_k[3]);
    const float q = x.qk_l2norm ? ptx::inverse_root(qq + 1e-6f) : 1,
                k = x.qk_l2norm ? ptx::inverse_root(kk + 1e-6f) : 1;
    if (at_.lane % 4 != i / 2) return bad;
    at_.store_norms(row, q, k);
    if (Scores::kTakesDiagonal) at_.store_factor(Bench::kDiagonal, row, q * k * of_row(norms.by_k[0], norms.by_k[1]));
    const float sum = qq + kk;
    return sum - sum != 0 ? min(bad, row) : bad;
  }

  const Call& call_;
  const unsigned memory_;
  Bench at_;
  unsigned beta_;  // of row at_.lane, raw: of one warp
};

}  // namespace kda::cuda::sm90
