// Happens-before: a vector clock for each thread. Each thread knows, for each other thread, up to which time the
// other's accesses come before its own. It learns this where both meet (barriers, __syncwarp()) or from an mbarrier at
// which the other has arrived. Shuffles and products tell nothing, as the PTX manual has it.
//
// Time advances when a thread tells others something. Accesses in between happen at the same time.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kda::emulator {

constexpr unsigned kLanes = 32;

class Order {
 public:
  using Time = uint32_t;
  // [a time for each thread, then for each warp: a lower bound of its threads'][the same for what the async proxy sees]
  using Times = std::vector<Time>;
  using Known = std::shared_ptr<const Times>;  // or nullptr

  // Begins with so many warps. Two more are the copy engine, whose lanes copy for mbarriers of their own, and the
  // tensor cores, whose lanes multiply for threads of their own.
  void begin(unsigned warps);
  unsigned engine() const { return warps_ * kLanes; }
  unsigned tensor_cores() const { return engine() + kLanes; }
  bool is_engine(unsigned thread) const { return thread >= engine(); }
  // Another thread begins in the place of this one.
  void forget(unsigned thread);
  Time now() const { return now_; }

  // Whether an access by some lanes of a warp happened before what `thread` does now; async: and whether the async
  // proxy sees it.
  bool after(unsigned thread, unsigned warp, uint32_t lanes, Time access, bool async = false) const;

  // Each of these threads learns what any of them knows or has done.
  void meet(std::span<const unsigned> threads);
  // Adds what `by` knows and has done to `to`.
  void tell(Times& to, unsigned by);
  void learn(unsigned thread, const Known& what);
  // From now on the async proxy sees what the thread knows or has done (fence.proxy.async).
  void show_async(unsigned thread);

  // ---- of tensor memory ----

  // The time, and later times from now on.
  Time tick() { return now_++; }
  // tcgen05.fence before_thread_sync and after_thread_sync.
  void fence_before(unsigned thread) { fences_[thread].push_back(now_++); }
  void fence_after(unsigned thread) { fenced_[thread] = known_[thread]; }
  // When `thread` has fenced what it did until then for the first time, or 0: not yet.
  Time fence_of(unsigned thread, Time time) const;
  // after(), at the last fence_after() of `thread`.
  bool after_at_fence(unsigned thread, unsigned warp, uint32_t lanes, Time access) const;

 private:
  using Own = std::shared_ptr<Times>;
  Times& own(unsigned thread);
  unsigned all_warps() const { return warps_ + 2; }
  size_t half() const { return size_t{all_warps()} * (kLanes + 1); }
  bool has(const Times& times, size_t first, unsigned warp, uint32_t lanes, Time access) const;
  static void join(Times& to, const Times& from);

  unsigned warps_ = 0;
  Time now_ = 1;
  Own nothing_;
  std::vector<Own> known_;  // of each thread; shared while it is the same
  Own told_;                // the last result of learn(), of `before_` and `heard_`
  Own before_;
  Known heard_;
  std::vector<Known> fenced_;              // what each thread knew at its last fence_after()
  std::vector<std::vector<Time>> fences_;  // fence_before() of each thread
};

}  // namespace kda::emulator
