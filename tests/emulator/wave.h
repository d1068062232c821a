// A grid that runs: one block after another, or, for a kernel with clusters, whose blocks may wait for each other, as
// many at a time as the GPU has SMs.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator.h"
#include "fiber.h"
#include "order.h"
#include "plain_memory.h"
#include "shared_memory.h"
#include "tensor_memory.h"

namespace kda::emulator {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
  unsigned below(size_t n) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return static_cast<unsigned>((state_ >> 32) * n >> 32);
  }
  template <class T>
  void shuffle(std::vector<T>& x) {
    for (size_t i = x.size(); i > 1; --i) std::swap(x[i - 1], x[below(i)]);
  }

 private:
  uint64_t state_;
};

// Bytes of shared memory that a copy or a product reads.
struct Range {
  unsigned from, bytes;
  Where where;
};
// A cp.async that has not been waited for.
struct Copy {
  unsigned to, size;
  unsigned char bytes[16];
};
// A load from tensor memory that has not been waited for: where its registers are, and what they will be.
struct TensorLoad {
  void* to;
  std::vector<uint32_t> bits;
  Where where;
};
// Groups of operations on their way, the last group not committed.
template <class T>
struct Groups {
  std::deque<std::vector<T>> all{1};
  void add(const T& x) { all.back().push_back(x); }
  void commit() { all.emplace_back(); }
  // Ends all groups but the last `but` that are committed.
  template <class End>
  void wait(unsigned but, const End& end) {
    for (; all.size() > but + 1; all.pop_front())
      for (const T& x : all.front()) end(x);
  }
};

struct Fiber {
  Context context;
  uint3 index;
  bool ended = false;
  const char* waits = nullptr;     // for what,
  unsigned number = 0;             // which of them, if they have numbers,
  Where where{};                   // and there
  unsigned clusters = 0;           // how often it has met its cluster
  const unsigned* flag = nullptr;  // looked at last, and what it said
  unsigned seen = 0;
  Groups<Copy> copies;
  Groups<Range> bulk;
  unsigned core = 0;            // its lane of the tensor cores, once it has one
  bool waits_in_front = false;  // was launched early, and has not waited for the kernel in front
  std::vector<TensorLoad> tensor_loads;
};

// Threads that meet at an instruction, which is known by what it computes.
struct Meeting {
  unsigned arrived = 0, mask = kAllOfWarp;
  void (*compute)(void* const*) = nullptr;
  std::vector<void*> operands;
};
struct Warp {
  unsigned ready = 0;             // lanes that can go on
  unsigned rotation = 0;          // lane that goes first
  unsigned elected = 0;           // lane that elect.sync picks
  Meeting meeting;                // of all lanes
  std::deque<Meeting> of_some{};  // of the lanes of a mask each
  Groups<Range> products;
  std::vector<unsigned> tensor_loads, tensor_stores;  // that have not been waited for
};
struct Barrier {
  unsigned count = 0, arrived = 0;  // count 0: all threads
  bool all = true;
  bool result = true;  // of the last time
  std::vector<unsigned> waiting;
  Order::Times told;  // by threads that only arrive
  Order::Known known;
};
// Warps of two blocks that allocate or free tensor memory together: what the first of them asked for.
struct Pair {
  const char* what = nullptr;  // nullptr: none waits
  unsigned place = 0, columns = 0, rank = 0;
  unsigned at = 0;  // what both have got
  std::vector<unsigned> waiting;
};
struct Mbarrier {
  unsigned count, pending;
  int64_t bytes = 0;
  unsigned phase = 0;
  Order::Times told;
  Order::Known known;  // of phases that are over
  std::vector<unsigned> waiting;
  unsigned by;  // the thread that made it, and when
  Order::Time made;
  bool fenced = false;       // so that any arrival of that thread at the cluster's barrier tells of it;
  unsigned known_since = 0;  // once it has: from so many meetings of the cluster on
  unsigned engine;           // its lane of the copy engine
};

struct Block {
  uint3 index;
  unsigned running;  // threads
  SharedMemory memory;
  std::map<unsigned, Barrier> barriers;
  std::map<unsigned, Mbarrier> mbarriers;
  std::unique_ptr<TensorMemory> tensor;  // once it has allocated some
  std::vector<unsigned> allocating;      // threads that wait for columns
  int tensor_blocks = 0;                 // how many blocks act together in its tcgen05; 0: not known yet
  unsigned number = 0;                   // in the launch
  bool has_acquired = false;             // what a flag told
  PlainMemory variables;                 // __shared__ variables of a fixed size
};

class Wave {
 public:
  // Blocks begin in this order. cluster: how many of them make one cluster.
  Wave(const Launch& launch, unsigned cluster, std::vector<uint3> blocks, const std::function<void()>& thread,
       Random& random, Stacks& stacks);
  ~Wave();
  Wave(const Wave&) = delete;
  // Runs the grid. Returns what went wrong, or "".
  std::string run();

  [[noreturn]] void fail(const std::string& what, Where where);
  // The same from where nothing may be thrown: the text is that of a Failure.
  [[noreturn]] void end_launch(const std::string& failure);
  // Meets threads of the block at a barrier; without `waits` only arrives there.
  bool meet(unsigned barrier, unsigned count, bool waits, bool x, Where where);
  // Meets lanes of the warp, or the four warps of a warpgroup.
  void together(const char* what, void* operands, void (*compute)(void* const*), Where where, unsigned mask);
  void together_in_group(const char* what, void* operands, void (*compute)(void* const*), Where where);
  void arrive_at_cluster(bool relaxed);
  void wait_for_cluster(Where where);
  // Waits until wake(list).
  void wait(std::vector<unsigned>& list, const char* what, unsigned number, Where where);
  void wake(std::vector<unsigned>& list);
  // For a thread that polls what has not changed: waits until another thread tells something, or no thread can go on.
  void spin(Where where) { wait(spinning_, "a flag", 0, where); }
  // Lets another thread of any warp go on, if one can.
  void give_way();
  void wake_spinning() { wake(spinning_); }
  // Orders the accesses of lanes of the warp; the last of them calls this.
  void order_lanes(unsigned mask);

  Order& order() { return order_; }
  unsigned next_engine() { return engines_++ % kLanes; }
  unsigned next_core() { return order_.tensor_cores() + cores_++ % kLanes; }
  unsigned draw(unsigned n) { return random_.below(n); }
  std::map<const unsigned*, Order::Known>& flags() { return flags_; }  // in global memory: what they tell
  Fiber& fiber() { return fibers_[current_]; }
  Warp& warp() { return warps_[current_ / kLanes]; }
  Warp& warp(unsigned i) { return warps_[i]; }
  unsigned thread() const { return current_; }  // among all of the wave
  unsigned elected() const { return warps_[current_ / kLanes].elected; }
  unsigned thread_of_block() const { return current_ % padded_; }
  unsigned rank() const { return own() % cluster_; }
  unsigned cluster() const { return cluster_; }
  Block& block() { return *blocks_[own()]; }
  PlainMemory& global() { return global_; }
  bool is_stack(const void* at) const { return stacks_.holds(at); }
  unsigned threads_of_block() const { return padded_; }
  // Is this thread one of that block, which has not ended?
  bool runs(unsigned thread, unsigned block) const { return blocks_[thread / padded_]->number == block; }
  bool is_told_clusters() const { return is_told_clusters_; }
  Pair& pair() { return pairs_[first_of_cluster()]; }
  // Ends the launch, which a grid of clusters can run from the beginning if this was its first block.
  [[noreturn]] void ask_for_clusters(Where where);
  bool needs_clusters() const { return needs_clusters_; }
  // The block of the cluster whose memory has that address.
  Block& block_of(unsigned address);

 private:
  unsigned own() const { return current_ / padded_; }
  unsigned first_of_cluster() const { return own() / cluster_ * cluster_; }
  unsigned lanes_of(unsigned warp) const;
  void begin_block(unsigned slot);
  bool begin_blocks();
  bool is_over(unsigned first_slot) const;
  void set_ready(unsigned thread) { warps_[thread / kLanes].ready |= 1u << thread % kLanes; }
  void stop() { warps_[current_ / kLanes].ready &= ~(1u << current_ % kLanes); }
  void stop_at(const char* what, unsigned number, Where where);  // until the thread is ready again
  Meeting& meeting_of(const char* what, unsigned mask, Where where);
  // Adds a thread; returns true for the last of `size`, which has then computed.
  bool has_met(Meeting& m, const char* what, void* operands, void (*compute)(void* const*), unsigned size, Where where);
  void release(Barrier& b, unsigned number);
  void go_on(bool ends = false);
  bool pick();
  void become(unsigned thread);
  [[noreturn]] void leave();
  void check_nobody_waits();
  [[noreturn]] void end_thread();
  static void entry();
  std::string place() const;
  std::string who_waits() const;
  std::string who_waits(unsigned block) const;

  const std::function<void()>& thread_;
  Random& random_;
  Stacks& stacks_;
  const dim3 size_;
  const size_t shared_bytes_;
  // Threads of a block; the same with whole warps; blocks of a cluster; blocks at a time.
  const unsigned threads_, padded_, cluster_, slots_;
  Order order_;
  const std::vector<uint3> order_of_blocks_;
  unsigned next_ = 0;                           // block
  std::vector<std::unique_ptr<Block>> blocks_;  // by slot
  Context host_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::map<unsigned, Meeting> groups_;            // of four warps
  std::map<unsigned, Barrier> cluster_barriers_;  // by the cluster's first block
  std::map<unsigned, Pair> pairs_;                // the same
  std::map<const unsigned*, Order::Known> flags_;
  PlainMemory global_{order_, "global memory"};
  const bool is_told_clusters_, early_;
  std::vector<unsigned> spinning_;
  bool needs_clusters_ = false;
  bool looked_ = false;  // they have polled again since the last wake()
  unsigned engines_ = 0, cores_ = 0;
  unsigned current_ = 0, active_ = 0;  // thread; block that has the variables
  std::string failure_;
};

// The wave that runs.
extern Wave* wave;

// The copy engine or a tensor core arrives at an mbarrier, and tells of nothing but what it has done.
void arrive_for(unsigned engine, unsigned barrier, Where where);

// What a thread throws to end the launch.
struct Failure {
  std::string what;
};

}  // namespace kda::emulator
