// Blocks without work of their own prepare chunks for others: the images of stages go through global memory, where the L2
// cache holds them.
//
// An owner, a block with items, has a board. Its preparers take its chunks one after another, and claim each; a helper
// claims chunks a few ahead of the owner's scan. Whoever claims a chunk first prepares it, so that an owner never waits but
// for a chunk that a running block has claimed, and the bits are the same whoever it was.
//   helper   the scout (a scanning warp) claims a chunk  ->  a preparer prepares it in a stage of its own block
//            ->  the courier (a scanning thread) stores the stage as an image, then says so on the owner's board
//   owner    a preparer that meets a helper's chunk waits for its image and has it copied into the chunk's stage
// Boards are zeroed before the launch, and so nothing of an earlier launch is left, however that ended.
#pragma once
#include "cuda/sm90/chunk.h"

namespace kda::cuda::sm90 {

constexpr unsigned kWindow = 16;  // chunks of an owner that have room for an image
constexpr unsigned kLead = 9;     // helpers leave the next ones to the owner, whose preparers are at them
constexpr unsigned kShares = 16;  // see Help::may_help()

// Chunks are numbered over all items of the owner.
struct Board {
  unsigned long long
      place;          // what is worked on: (item + 1) << 32 | number of its first chunk; 0: not begun, ~0: closed
  unsigned consumed;  // chunks that the scan has done with
  unsigned reserved;
  unsigned claims[kWindow];  // of chunk n at n % kWindow: 2 n + 2 when its owner has claimed it, 2 n + 3: a helper
  unsigned done[kWindow];    // n + 1: the image of chunk n is there
  unsigned padding[12];
};
static_assert(sizeof(Board) == 192);
constexpr unsigned long long kClosed = ~0ull;

constexpr unsigned kImageBytes = Stage::end;  // what the scan reads of a stage

struct Help {
  Board* boards = nullptr;  // [owners]
  char* images = nullptr;   // [owners][kWindow][kImageBytes]; nullptr: nobody prepares chunks for others
  unsigned owners = 0;
  unsigned share = 0;  // of kShares chunks, how many may be a helper's

  __device__ explicit operator bool() const { return images; }
  // Chunks for helpers are spread evenly. Were all for them, they would claim as far ahead as they may, and then be late.
  __device__ bool may_help(unsigned n) const { return (n + 1) * share / kShares != n * share / kShares; }
  __device__ bool owns() const { return ptx::block() < owners; }
  __device__ Board& own() const { return boards[ptx::block()]; }
  __device__ char* image(unsigned owner, unsigned n) const {
    return images + (static_cast<uint64_t>(owner) * kWindow + n % kWindow) * kImageBytes;
  }
};

// ---- owners ----

// Claims chunk n of the block. Its result says, once it is there, whether a helper was first.
__device__ inline unsigned claim(const Help& help, unsigned n) {
  return help.owns() && help.may_help(n) ? atomicMax(&help.own().claims[n % kWindow], 2 * n + 2) : 0;
}
__device__ inline bool is_helped(unsigned n, unsigned claimed) { return claimed == 2 * n + 3; }

// Has the image of chunk n copied into its stage: by one thread, for all that the stage waits for.
__device__ inline void load_image(const Help& help, const Ring& ring, unsigned n) {
  ring.wait_empty(n);
  while (ptx::load_acquire(&help.own().done[n % kWindow]) != n + 1) {
  }
  ptx::fence_global_for_async();
  ptx::arrive_expecting(ring.full(n), kImageBytes);
  ptx::copy_bulk_to_shared(ring.stage(n), help.image(blockIdx.x, n), kImageBytes, ring.full(n));
  ptx::arrive(ring.full(n), kGroup - 1);
}

// ---- helpers ----

// A chunk that a helper has claimed.
struct Task {
  unsigned owner;  // kNone: there are no more
  unsigned n;      // its number there
  unsigned item, chunk;
  static constexpr unsigned kNone = ~0u;
};

// By a warp. Of the owners that need help, those with most left to do come first.
class Scout {
 public:
  __device__ Scout(const ForwardProblem& p, const Help& help) : p_(p), help_(help), turn_(blockIdx.x) {}

  // Claims up to `most` chunks: returns the lanes that have one, in `task`. None: there will be no more. Waits while owners
  // work, but none has a chunk to give away.
  __device__ unsigned find(unsigned most, Task& task) {
    for (unsigned idle = 0; idle < kPatience; ++turn_) {
      // Lanes look at every 32nd owner each, and closer at one of those that work.
      bool waits = false;  // for an owner that has not begun
      unsigned long long place = 0;
      for (unsigned o = threadIdx.x % 32, i = turn_; o < help_.owners; o += 32, ++i) {
        const unsigned long long at = ptx::load_relaxed(&help_.boards[o].place);
        waits = waits || !at;
        if (at && at != kClosed && (!place || i % 4 == 0)) place = at, task.owner = o;
      }
      unsigned claimed = 0, rank = place ? look(place, task, claimed) : 0;
      bool chosen = false;
      for (unsigned i = 0; i < most; ++i) {
        const unsigned best = __reduce_max_sync(kAll, rank);
        if (!best) break;
        const unsigned winner = __ffs(__ballot_sync(kAll, rank == best)) - 1;
        if (threadIdx.x % 32 == winner) chosen = true, rank = 0;
      }
      const bool success =
          chosen && atomicCAS(&help_.boards[task.owner].claims[task.n % kWindow], claimed, 2 * task.n + 3) == claimed;
      if (const unsigned lanes = __ballot_sync(kAll, success)) return lanes;
      if (!__any_sync(kAll, place != 0)) {
        if (!__any_sync(kAll, waits)) break;
        ++idle;  // an owner may not be resident before this block ends
      }
    }
    return 0;
  }

 private:
  static constexpr unsigned kPatience = 64;  // rounds of a microsecond, about

  // The first free chunk of an owner: returns more the more chunks its item has left, 0 if none is free.
  __device__ unsigned look(unsigned long long place, Task& task, unsigned& claimed) const {
    const Board& board = help_.boards[task.owner];
    const unsigned consumed = ptx::load_relaxed(&board.consumed), base = static_cast<unsigned>(place);
    task.item = static_cast<unsigned>(place >> 32) - 1;
    unsigned claims[kWindow];  // all asked for before the first is looked at
#pragma unroll
    for (unsigned i = 0; i < kWindow; ++i) claims[i] = *static_cast<const volatile unsigned*>(board.claims + i);
    const Item item(p_, task.item);
    const auto length = static_cast<unsigned>(sequence_at(p_, p_.args.in, item.n).length);
    const unsigned end = base + (length + kRows - 1) / kRows;
    unsigned free = end;
#pragma unroll
    for (unsigned i = 0; i < kWindow; ++i) {
      const unsigned n =
          consumed + (i + kWindow - consumed % kWindow) % kWindow;  // the slot's chunk of the window from `consumed` on
      if (n >= max(base, consumed + kLead) && n < free && claims[i] < 2 * n + 2 && help_.may_help(n))
        free = n, claimed = claims[i];
    }
    task.n = free, task.chunk = free - base;
    // Those that are as far as each other in turns, or all scouts would be after one chunk.
    if (free < end) return (end - consumed) / 16 * 32 + 32 + (threadIdx.x + turn_) % 32;
    return 0;
  }

  const ForwardProblem& p_;
  const Help& help_;
  unsigned turn_;
};

// What helpers hand on within a block, in shared memory: task q is in tasks[q % kQueue] and is chunk total + q of the
// block's ring, where total is the number of the block's own chunks.
struct Queue {
  Task tasks[kQueue];
  unsigned taken;   // of the block's own chunks, by its preparers
  unsigned helped;  // tasks, likewise

  __device__ static Queue& here() { return *reinterpret_cast<Queue*>(shared_memory() + Shared::queue); }
  // mbarriers of the task's slot: it is there; it is done.
  __device__ static unsigned found(unsigned memory, unsigned q) { return memory + Shared::tasks + q % kQueue * 8; }
  __device__ static unsigned freed(unsigned memory, unsigned q) { return found(memory, q) + kQueue * 8; }
  __device__ static unsigned parity(unsigned q) { return q / kQueue % 2; }
  // May task q be handed on?
  __device__ static bool is_free(unsigned memory, unsigned q) {
    return q < kQueue || ptx::has_phase_ended(freed(memory, q), parity(q - kQueue));
  }
  // By one thread, when it may.
  __device__ static void hand_on(unsigned memory, unsigned q, const Task& task) {
    here().tasks[q % kQueue] = task;
    ptx::arrive(found(memory, q));
  }
  // There are no more from task q on, and so nobody frees a slot: by a warp.
  __device__ static void end(unsigned memory, unsigned q) {
    static_assert(kQueue >= kPlans);
    for (const unsigned last = q + kPlans; q < last; ++q) {
      while (!is_free(memory, q)) {
      }
      if (threadIdx.x % 32 == 0) hand_on(memory, q, {Task::kNone});
    }
  }
  static constexpr unsigned kPlans = 2 * kPreparers;  // of preparers, which all look for a task
};
static_assert(sizeof(Queue) <= kQueueBytes);
__device__ inline void start_queue(unsigned memory) {
  for (unsigned i = 0; i < kQueue; ++i)
    ptx::init_barrier(Queue::found(memory, i), 1), ptx::init_barrier(Queue::freed(memory, i), 1);
  Queue::here().taken = Queue::here().helped = 0;
}

// By a warp of a scanning warpgroup that has no items left.
__device__ inline void scout(const ForwardProblem& p, const Help& help, const Ring& ring) {
  Scout scout(p, help);
  unsigned q = 0;
  for (;;) {
    while (!Queue::is_free(ring.memory, q)) {
    }
    Task task;
    unsigned most = 1;  // several at once, since looking takes as long as preparing one
    while (most < 4 && __all_sync(kAll, Queue::is_free(ring.memory, q + most))) ++most;
    const unsigned lanes = scout.find(most, task), lane = threadIdx.x % 32;
    if (!lanes) break;
    if (lanes >> lane & 1) Queue::hand_on(ring.memory, q + __popc(lanes & ((1u << lane) - 1)), task);
    q += __popc(lanes);
  }
  Queue::end(ring.memory, q);
}

// By a thread of the other one. store(task, stage): returns when the stage may be overwritten.
template <class Store>
__device__ void courier(const Ring& ring, unsigned total, const Store& store) {
  for (unsigned q = 0;; ++q) {
    ptx::wait_barrier(Queue::found(ring.memory, q), Queue::parity(q));
    const Task task = Queue::here().tasks[q % kQueue];
    if (task.owner == Task::kNone) return;
    ring.wait_full(total + q);
    store(task, ring.stage(total + q));
    ptx::arrive(ring.empty(total + q), kScanners * 4);
    ptx::arrive(Queue::freed(ring.memory, q));
  }
}

__device__ inline void store_image(const Help& help, const Task& task, unsigned stage) {
  ptx::copy_bulk_to_global(help.image(task.owner, task.n), stage, kImageBytes);
  ptx::commit_bulk();
  ptx::wait_for_bulk<0>();
  ptx::fence_global_for_async();
  ptx::store_release(&help.boards[task.owner].done[task.n % kWindow], task.n + 1);
}

}  // namespace kda::cuda::sm90
