// The preparation: a warpgroup turns raw tokens into the operands of the scan (Stage), every second chunk of a block.
//
// Warp w has rows 8 w .. 8 w + 7 of a chunk and a lane four neighbouring channels, so that decays along the rows are
// products in registers. What a lane needs of q, k and g it fetched itself, into the stage, a chunk earlier.
//   norms, gates, decays of the warp's rows                                         barrier: decays of all rows are known
//   kG, qG, kg into the stage, score operands on the bench                          barrier: operands are there
//   the next chunk is fetched; scores; Aqk into the stage, Akk on the bench         barrier: Akk is there
//   one warp inverts I + Akk                                                        the stage is full
#pragma once
#include "cuda/sm90/help.h"
#include "cuda/sm90/scores.h"

namespace kda::cuda::sm90 {

// What a preparer does next, in shared memory: one thread plans for all.
struct Plan {
  unsigned item, hv, h;       // the value head of a sequence, and its query/key head
  unsigned b, t0, length;     // where that sequence's tokens are; none of padding
  unsigned chunk;             // of the sequence
  unsigned number;            // of the chunk, over all of the block; kNone: there are no more
  unsigned total;             // then: how many there were
  unsigned images[2], count;  // helpers' chunks on the way there
  unsigned task;              // of a helper: the one that is next
  bool helps, open;           // behind the block's own chunks; what is next is not known yet
  static constexpr unsigned kNone = ~0u;

  __device__ bool any() const { return number != kNone; }
  __device__ unsigned rows() const { return min(length - chunk * kRows, kRows); }
  __device__ unsigned token() const { return t0 + chunk * kRows; }

  __device__ void start(const Call& call) {
    item = blockIdx.x, number = chunk = 0, helps = false;
    enter(call);
  }
  // On to another chunk of the block.
  __device__ void move_to(const Call& call, unsigned n) {
    if (!any()) return;
    chunk += n - number, number = n;
    while (any() && chunk * kRows >= length) {
      chunk -= (length + kRows - 1) / kRows, item += gridDim.x;
      enter(call);
    }
  }
  // To a chunk of any item.
  __device__ void jump_to(const Call& call, const Task& task, unsigned n) {
    item = task.item, number = n;
    find(call.p, Item(call.p, item));
    chunk = task.chunk;
  }

 private:
  __device__ void enter(const Call& call) {
    const Item here(call.p, item);
    const unsigned first = number - chunk;
    if (here.exists(call.p)) find(call.p, here);
    else total = first, number = kNone;
    if (!call.help.owns() || (any() && length == 0)) return;
    atomicMax(&call.help.own().place, any() ? static_cast<unsigned long long>(item + 1) << 32 | first : kClosed);
  }
  __device__ void find(const ForwardProblem& p, const Item& here) {
    length = 0, hv = here.hv, h = hv / static_cast<unsigned>(p.group());
    if (here.is_tail(p)) return;
    const Sequence s = sequence_at(p, p.args.in, p.args.states, here.n);
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0);
    if (s.live) length = static_cast<unsigned>(s.length);
  }
};
static_assert(sizeof(Plan) <= 64, "as Shared has room for");

// kWideGate: g is f32, else it has the type of q, k and v.
template <class T, class Scores, bool kWideGate>
class Preparation {
 public:
  __device__ Preparation(const Call& call, unsigned memory, unsigned group) : call_(call), at_{memory, group} {}

  // The block's own chunks, then those of others.
  __device__ void run() {
    if (leader()) {
      plan().start(call_);
      const unsigned n = take();
      decide(n, claim(call_.help, n));
    }
    unsigned head = ~0u;
    for (bool fetched = false;; fetched = prepare()) {
      if (!fetched) at_.sync();  // all know that it is not
      if (leader() && (!fetched || plan().count)) settle();
      if (!fetched) {
        at_.sync();  // what is next is known
        if (!plan().any()) return;
        fetch();
        if (kWideGate) fetch_wide_gate();
      }
      if (plan().hv != head) {
        head = plan().hv;
        at_.sync();  // nobody reads the gate of the head before
        at_.store_gate(call_.x, head);
        at_.sync();  // the gate is there
      }
    }
  }

 private:
  __device__ Ring ring() const { return {at_.memory}; }
  __device__ Plan& plan() const { return *reinterpret_cast<Plan*>(shared_memory() + Shared::plan + at_.group * 64); }
  __device__ static bool leader() { return threadIdx.x % kGroup == 0; }

  // ---- what to do next: by the leader ----

  __device__ static unsigned take() { return atomicAdd(&Queue::here().taken, 1); }
  __device__ static unsigned take_task() { return atomicAdd(&Queue::here().helped, 1); }

  // Chunk n, if it is the block's, else one after it; the first two that helpers have claimed are kept for later.
  __device__ void decide(unsigned n, unsigned claimed) {
    Plan& p = plan();
    for (p.count = 0;; n = take(), claimed = claim(call_.help, n)) {
      p.move_to(call_, n);
      if (!p.any()) return help();
      p.open = is_helped(n, claimed);
      if (!p.open) return;
      p.images[p.count++] = n;
      if (p.count == 2) return;
    }
  }
  // Behind the last chunk: a helper from here on.
  __device__ void help() {
    Plan& p = plan();
    p.helps = p.open = static_cast<bool>(call_.help);
    if (p.helps) p.task = take_task();
  }
  // Task p.task, if the scout has found it.
  __device__ void decide_task() {
    Plan& p = plan();
    p.count = 0;
    p.open = !ptx::has_phase_ended(Queue::barrier(at_.memory, p.task), Queue::parity(p.task));
    if (p.open) return;
    const Task task = Queue::here().tasks[p.task % kStages];
    if (task.owner == Task::kNone) p.number = Plan::kNone;
    else p.jump_to(call_, task, p.total + p.task);
  }
  // Until the next chunk is known. (All before it have been prepared, or this would wait for its own warpgroup.)
  __device__ void settle() {
    Plan& p = plan();
    for (unsigned i = 0; i < p.count; ++i) load_image(call_.help, ring(), p.images[i]);
    while (p.open) {
      if (p.helps) {
        decide_task();
        continue;
      }
      const unsigned n = take(), claimed = claim(call_.help, n);
      p.move_to(call_, n);
      if (!p.any()) help();
      else if (p.open = is_helped(n, claimed); p.open) load_image(call_.help, ring(), n);
    }
  }

  // ---- chunks ----

  // Raw rows of the next chunk into its stage, once that is empty; zeros behind the last.
  __device__ void fetch() {
    const Tokens& x = call_.x;
    const unsigned number = plan().number, first = plan().token() + 8 * at_.warp, rows = plan().rows();
    const unsigned stage = ring().stage(number);
    ring().wait_empty(number);
    const auto all = [&](const View& view, unsigned head, unsigned to) {
      const char* from = view.at(plan().b, first, head) + at_.lane * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        ptx::copy8(stage + to + at_.place(i), from + i * static_cast<uint64_t>(view.stride1),
                   8 * at_.warp + i < rows ? 8 : 0);
    };
    all(x.q, plan().h, Stage::q), all(x.k, plan().h, Stage::k), all(x.v, plan().hv, Stage::v);
    if (!kWideGate) all(x.g, plan().hv, Stage::kg);
    ptx::commit_copies();
    beta_ = 0;
    if (at_.warp == 0 && at_.lane < rows)
      beta_ = load_raw<false>(x.beta.at(plan().b, first + at_.lane, plan().hv), x.beta.dtype);
  }
  // An f32 gate has no room in the stage: it comes to the bench once its scores are done.
  __device__ unsigned wide_gate(int i) const { return at_.rows() + (8 * at_.warp + i) * kSize * 4 + at_.lane * 16; }
  __device__ void fetch_wide_gate() {
    const View& g = call_.x.g;
    const char* from = g.at(plan().b, plan().token() + 8 * at_.warp, plan().hv) + at_.lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::copy16(wide_gate(i), from + i * static_cast<uint64_t>(g.stride1), 8 * at_.warp + i < plan().rows() ? 16 : 0);
    ptx::commit_copies();
  }

  // The chunk that was fetched. Returns whether the next one is known, and has been fetched.
  __device__ bool prepare() {
    at_.forget();
    const unsigned number = plan().number, rows = plan().rows(), stage = ring().stage(number);
    at_.factors = stage + Stage::factors;
    unsigned n = 0, claimed = 0;  // what the leader takes next: on its way while gates are computed
    if (leader() && !plan().helps) {
      n = take();
      claimed = claim(call_.help, n);
    }
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
    if (leader()) {
      if (plan().helps) plan().task = take_task(), decide_task();
      else decide(n, claimed);
    }
    scores.template tiles<T>();
    ptx::fence_shared_for_async();
    at_.sync();  // tiles are there, and what is next
    at_.forget();
    // A stage that this chunk has to leave first cannot be waited for here.
    const bool known = !plan().open && plan().any() && plan().number < number + kStages;
    if (known) fetch();
    scores.run();
    if (kWideGate && known) {
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
    return known;
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
    const unsigned r = at_.lane % 8,
                   from = stage + (at_.lane / 8 % 2 ? Stage::k : Stage::q) + (8 * at_.warp + r) * kRowBytes;
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
    if (Scores::kTakesDiagonal)
      at_.store_factor(Bench::kDiagonal, 8 * at_.warp + row, q * k * (row % 2 ? by_k[1] : by_k[0]));
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
