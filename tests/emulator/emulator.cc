#include "emulator.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "error.h"
#include "fiber.h"
#include "shared_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace kda::emulator {
namespace {

constexpr unsigned kLanes = 32;
constexpr char kBarrier[] = "barrier ";

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

// An asynchronous copy that nobody has waited for.
struct Copy {
  unsigned to, size;
  unsigned char bytes[16];
};

struct Fiber {
  Context context;
  uint3 index;
  bool ended = false;
  const char* waits = nullptr;  // for what, and where
  unsigned barrier = 0;
  Where where{};
  std::deque<std::vector<Copy>> groups;  // of copies, the last one not committed
};

// Lanes that meet. An instruction is what it computes.
struct Meeting {
  unsigned arrived = 0;  // a bit a lane
  void (*compute)(void* const*) = nullptr;
  void* operands[kLanes];
};
struct Warp {
  unsigned ready = 0;     // lanes that can go on
  unsigned rotation = 0;  // lane that goes first
  Meeting meeting;
};
struct Barrier {
  unsigned count = 0;  // 0: all
  std::vector<unsigned> waiting;
};

// A block that runs.
class Block {
 public:
  Block(const Launch& launch, const std::function<void()>& thread, Random& random)
      : thread_(thread), random_(random), size_(launch.block), threads_(size_.x * size_.y * size_.z) {
    memory_.begin_launch(threads_, launch.shared_bytes);
  }
  std::string run(uint3 index);

  [[noreturn]] void fail(const std::string& what, Where where);
  void meet(unsigned barrier, unsigned count, Where where);
  void together(const char* what, void* operands, void (*compute)(void* const*), Where where);
  void sync_warp(Where where);
  SharedMemory& memory() { return memory_; }
  Fiber& fiber() { return fibers_[current_]; }
  unsigned thread() const { return current_; }
  [[noreturn]] void end_thread();
  static void entry();

 private:
  unsigned lanes_of(unsigned warp) const {
    const unsigned n = std::min(threads_ - warp * kLanes, kLanes);
    return n == kLanes ? ~0u : (1u << n) - 1;
  }
  void wait(const char* what, Where where);
  void release(Barrier& b, unsigned number);
  void go_on(bool ends = false);
  bool pick();
  [[noreturn]] void leave();
  static std::string place();
  std::string who_waits() const;

  const std::function<void()>& thread_;
  Random& random_;
  const dim3 size_;
  const unsigned threads_;
  SharedMemory memory_;
  Stacks stacks_;
  Context host_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::map<unsigned, Barrier> barriers_;
  unsigned current_ = 0, running_ = 0;
  std::string failure_;
};

Block* block = nullptr;

std::string Block::run(uint3 index) {
  blockIdx = index;
  memory_.begin_block();
  stacks_.prepare(threads_);
  fibers_.assign(threads_, {}), warps_.assign((threads_ + kLanes - 1) / kLanes, {}), barriers_.clear();
  for (unsigned t = 0; t < threads_; ++t) {
    fibers_[t].context = stacks_.begin(t, entry);
    fibers_[t].index = {t % size_.x, t / size_.x % size_.y, t / size_.x / size_.y};
    fibers_[t].groups.resize(1);
  }
  for (unsigned w = 0; w < warps_.size(); ++w)
    warps_[w].ready = lanes_of(w), warps_[w].rotation = random_.below(kLanes);
  running_ = threads_, current_ = random_.below(threads_);
  host_ = thread_context();
  if (pick()) switch_fiber(host_, fibers_[current_].context);
  return std::exchange(failure_, {});
}

// What a thread throws to end the launch.
struct Failure {
  std::string what;
};

void Block::entry() {
  fiber_has_begun();
  try {
    block->thread_();
  } catch (const Failure& failure) {
    block->failure_ = failure.what;
    block->leave();
  }
  block->end_thread();
}

// Back to the host. All fibers stay where they are.
void Block::leave() {
  switch_fiber(fiber().context, host_, true);
  std::abort();
}

void Block::fail(const std::string& what, Where where) {
  const uint3 t = fiber().index;
  const std::string number = size_.y * size_.z > 1 ? str(t.x, ",", t.y, ",", t.z) : str(t.x);
  throw Failure{str(place(), ", thread ", number, ", ", text_of(where), ": ", what)};
}

std::string Block::place() { return str("block ", blockIdx.x, ",", blockIdx.y, ",", blockIdx.z); }

// Chooses who goes on: a lane of the running warp while there are some, or of any warp. false: nobody can.
bool Block::pick() {
  const auto count = static_cast<unsigned>(warps_.size());
  unsigned w = current_ / kLanes;
  if (!warps_[w].ready || random_.below(16) == 0) {
    w = random_.below(count);
    for (unsigned tried = 0; !warps_[w].ready; w = (w + 1) % count)
      if (++tried > count) return false;
  }
  const Warp& warp = warps_[w];
  const int turn = static_cast<int>(warp.rotation);
  const unsigned lane = static_cast<unsigned>(std::countr_zero(std::rotr(warp.ready, turn)) + turn) % kLanes;
  current_ = w * kLanes + lane;
  threadIdx = fibers_[current_].index;
  return true;
}

// The running fiber cannot go on for now, or has ended.
void Block::go_on(bool ends) {
  Context& own = fiber().context;
  if (pick()) {
    if (Context& next = fiber().context; &next != &own) switch_fiber(own, next, ends);
    return;
  }
  if (running_) failure_ = str(place(), ": deadlock: ", who_waits());
  leave();
}

void Block::wait(const char* what, Where where) {
  Fiber& own = fiber();
  own.waits = what, own.where = where;
  warps_[current_ / kLanes].ready &= ~(1u << current_ % kLanes);
  go_on();
  own.waits = nullptr;
}

void Block::end_thread() {
  fiber().ended = true, --running_;
  warps_[current_ / kLanes].ready &= ~(1u << current_ % kLanes);
  for (auto& [number, b] : barriers_)  // that of all threads waits for one less
    if (!b.count && running_ && b.waiting.size() == running_) release(b, number);
  go_on(true);
  std::abort();
}

std::string Block::who_waits() const {
  std::string all;
  for (unsigned first = 0, t = 1; t <= threads_; ++t) {
    const Fiber &a = fibers_[first], &b = fibers_[std::min(t, threads_ - 1)];
    if (t < threads_ && a.ended == b.ended && a.waits == b.waits && a.barrier == b.barrier &&
        a.where.line() == b.where.line())
      continue;
    const std::string what = a.waits == kBarrier ? str(kBarrier, a.barrier) : a.waits ? a.waits : "";
    all += str(all.empty() ? "" : ", ", "threads ", first, " to ", t - 1, " ",
               a.ended ? "have ended" : str("wait at ", what, " in ", text_of(a.where)));
    first = t;
  }
  return all;
}

void Block::release(Barrier& b, unsigned number) {
  std::vector<unsigned> warps;
  for (const unsigned t : b.waiting) warps.push_back(t / kLanes);
  std::sort(warps.begin(), warps.end());
  warps.erase(std::unique(warps.begin(), warps.end()), warps.end());
  for (const unsigned w : warps) {
    unsigned here = 0, alive = 0;
    for (const unsigned t : b.waiting) here |= t / kLanes == w ? 1u << t % kLanes : 0;
    for (unsigned l = 0; l < kLanes; ++l)
      if (lanes_of(w) >> l & 1 && !fibers_[w * kLanes + l].ended) alive |= 1u << l;
    if (here != alive) fail(str("some lanes only of warp ", w, " meet at barrier ", number), fiber().where);
  }
  memory_.sync_warps(warps);
  for (const unsigned t : b.waiting) warps_[t / kLanes].ready |= 1u << t % kLanes;
  b.waiting.clear(), b.count = 0;
}

void Block::meet(unsigned barrier, unsigned count, Where where) {
  if (barrier >= 16) fail(str("there is no barrier ", barrier), where);
  if (count % kLanes || count > threads_) fail(str("a barrier of ", count, " threads of ", threads_), where);
  Barrier& b = barriers_[barrier];
  if (!b.waiting.empty() && b.count != count)
    fail(str("threads meet at barrier ", barrier, " in different numbers: ", b.count, " and ", count), where);
  b.count = count, b.waiting.push_back(current_);
  fiber().barrier = barrier, fiber().where = where;
  if (b.waiting.size() < (count ? count : running_)) return wait(kBarrier, where);
  release(b, barrier);
}

void Block::together(const char* what, void* operands, void (*compute)(void* const*), Where where) {
  Warp& warp = warps_[current_ / kLanes];
  Meeting& m = warp.meeting;
  const unsigned lane = current_ % kLanes;
  if (m.arrived && m.compute != compute) fail(str("other lanes of the warp are not at ", what), where);
  m.compute = compute, m.operands[lane] = operands, m.arrived |= 1u << lane;
  if (m.arrived != ~0u) return wait(what, where);
  compute(m.operands);
  warp.ready |= ~0u, m.arrived = 0;
}

void Block::sync_warp(Where where) {
  char none = 0;
  const auto tick = [](void* const*) { block->memory_.sync_warp(block->current_ / kLanes); };
  together("__syncwarp()", &none, tick, where);
}

uint64_t setting(const char* name, uint64_t usual) {
  const char* given = std::getenv(name);
  return given ? std::strtoull(given, nullptr, 10) : usual;
}
uint64_t& seed() {
  static uint64_t own = setting("KDA_EMULATOR_SEED", 1);
  return own;
}

}  // namespace

const Gpu& gpu() {
  static const Gpu own{.multiprocessors = static_cast<int>(setting("KDA_EMULATOR_SMS", 4))};
  return own;
}

void set_seed(uint64_t x) { seed() = x; }

std::string run(const Launch& launch, const std::function<void()>& thread) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  Random random(seed());
  Block running(launch, thread, random);
  blockDim = launch.block, gridDim = launch.grid;
  std::vector<uint64_t> order(uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  std::iota(order.begin(), order.end(), 0);
  random.shuffle(order);
  std::string failure;
  block = &running;
  for (size_t i = 0; i < order.size() && failure.empty(); ++i) {
    const uint64_t row = order[i] / launch.grid.x;
    failure = running.run({static_cast<unsigned>(order[i] % launch.grid.x), static_cast<unsigned>(row % launch.grid.y),
                           static_cast<unsigned>(row / launch.grid.y)});
  }
  block = nullptr;
  return failure;
}

void fail(const std::string& what, Where where) { block->fail(what, where); }
void meet(unsigned barrier, unsigned count, Where where) { block->meet(barrier, count, where); }
void together(const char* what, void* operands, void (*compute)(void* const*), Where where) {
  block->together(what, operands, compute, where);
}
void sync_warp(Where where) { block->sync_warp(where); }

unsigned own_lane() { return block->thread() % kLanes; }
void check_mask(unsigned mask, Where where) {
  if (mask != ~0u) fail("masks of some lanes are not emulated", where);
}

unsigned shared_address(const void* pointer) { return block->memory().address_of(pointer); }

void load(void* to, unsigned from, unsigned bytes, Where where, bool by_warp) {
  const char* at = block->memory().at(from, bytes, where);
  block->memory().read(from, bytes, block->thread(), by_warp, where);
  std::memcpy(to, at, bytes);
}
void store(unsigned to, const void* from, unsigned bytes, Where where) {
  char* at = block->memory().at(to, bytes, where);
  block->memory().write(to, bytes, block->thread(), where);
  std::memcpy(at, from, bytes);
}

void copy(unsigned to, const void* from, unsigned size, unsigned bytes, Where where) {
  if (bytes > size) fail(str("a copy of ", bytes, " bytes to ", size), where);
  if (bytes && reinterpret_cast<uintptr_t>(from) % size) fail(str("a copy from no multiple of ", size), where);
  block->memory().expect(to, size, block->thread(), where);
  Copy c{.to = to, .size = size, .bytes = {}};
  std::memcpy(c.bytes, from, bytes);
  block->fiber().groups.back().push_back(c);
}
void commit_copies() { block->fiber().groups.emplace_back(); }
// Copies come now and no sooner: whoever looks before sees poison, and fails.
void wait_for_copies(unsigned groups) {
  auto& all = block->fiber().groups;
  for (; all.size() > groups + 1; all.pop_front())
    for (const Copy& c : all.front()) {
      std::memcpy(block->memory().at(c.to, c.size, {}), c.bytes, c.size);
      block->memory().receive(c.to, c.size, block->thread());
    }
}

}  // namespace kda::emulator

void __syncwarp(unsigned mask, kda::emulator::Where where) {
  kda::emulator::check_mask(mask, where);
  kda::emulator::sync_warp(where);
}

unsigned __ballot_sync(unsigned mask, int predicate, kda::emulator::Where where) {
  using kda::emulator::of;
  struct Own {
    bool yes;
    unsigned all;
  } own{predicate != 0, 0};
  kda::emulator::check_mask(mask, where);
  const auto count = [](void* const* all) {
    unsigned votes = 0;
    for (unsigned l = 0; l < 32; ++l) votes |= unsigned{of<Own>(all, l).yes} << l;
    for (unsigned l = 0; l < 32; ++l) of<Own>(all, l).all = votes;
  };
  kda::emulator::together("a vote", own, count, where);
  return own.all;
}

unsigned __reduce_add_sync(unsigned mask, unsigned x, kda::emulator::Where where) {
  using kda::emulator::of;
  struct Own {
    unsigned given, sum;
  } own{x, 0};
  kda::emulator::check_mask(mask, where);
  const auto add = [](void* const* all) {
    unsigned sum = 0;
    for (unsigned l = 0; l < 32; ++l) sum += of<Own>(all, l).given;
    for (unsigned l = 0; l < 32; ++l) of<Own>(all, l).sum = sum;
  };
  kda::emulator::together("__reduce_add_sync", own, add, where);
  return own.sum;
}
