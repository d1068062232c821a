#include "wave.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include "cuda_runtime.h"
#include "error.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace kda::emulator {

Wave* wave = nullptr;

namespace {

unsigned slots(unsigned cluster, size_t blocks) {
  if (cluster == 1) return 1;
  const unsigned most = std::max<unsigned>(static_cast<unsigned>(gpu().multiprocessors) / cluster, 1) * cluster;
  return static_cast<unsigned>(std::min<size_t>(most, blocks));
}

}  // namespace

Wave::Wave(const Launch& launch, unsigned cluster, std::vector<uint3> blocks, const std::function<void()>& thread,
           Random& random, Stacks& stacks)
    : thread_(thread),
      random_(random),
      stacks_(stacks),
      size_(launch.block),
      shared_bytes_(launch.shared_bytes),
      threads_(size_.x * size_.y * size_.z),
      padded_((threads_ + kLanes - 1) / kLanes * kLanes),
      cluster_(cluster),
      slots_(slots(cluster, blocks.size())),
      order_of_blocks_(std::move(blocks)),
      blocks_(slots_),
      fibers_(size_t{slots_} * padded_),
      warps_(fibers_.size() / kLanes),
      is_told_clusters_(launch.cluster != 0),
      early_(launch.early) {
  order_.begin(slots_ * padded_ / kLanes);
  stacks_.prepare(size_t{slots_} * threads_);
  close_shared_variables_behind(shared_bytes_);
  wave = this;
}
Wave::~Wave() { wave = nullptr; }

// Begins the next block of the grid, where one has ended.
void Wave::begin_block(unsigned slot) {
  blocks_[slot].reset(new Block{.index = order_of_blocks_[next_++],
                                .running = threads_,
                                .memory = SharedMemory(order_, slot * padded_, shared_bytes_),
                                .barriers = {},
                                .mbarriers = {},
                                .tensor = nullptr,
                                .allocating = {},
                                .tensor_blocks = 0,
                                .number = next_ - 1,
                                .variables = {order_, "a __shared__ variable"}});
  for (unsigned t = 0; t < padded_; ++t) {
    Fiber& f = fibers_[slot * padded_ + t] = {};
    f.ended = t >= threads_;
    if (f.ended) continue;
    f.context = stacks_.begin(slot * threads_ + t, entry);
    f.waits_in_front = early_;
    f.index = {t % size_.x, t / size_.x % size_.y, t / size_.x / size_.y};
    order_.forget(slot * padded_ + t);
  }
  for (unsigned w = slot * padded_ / kLanes; w < (slot + 1) * padded_ / kLanes; ++w) {
    warps_[w] = {};
    warps_[w].ready = lanes_of(w), warps_[w].rotation = random_.below(kLanes);
    warps_[w].elected = random_.below(kLanes);
  }
  if (slot == active_) blocks_[slot]->memory.begin_variables();
}

bool Wave::is_over(unsigned first_slot) const {
  for (unsigned i = first_slot; i < first_slot + cluster_; ++i)
    if (blocks_[i] && blocks_[i]->running) return false;
  return true;
}

// Begins clusters that are left, where there is room. Returns false if there are none.
bool Wave::begin_blocks() {
  bool any = false;
  for (unsigned slot = 0; slot + cluster_ <= slots_ && next_ + cluster_ <= order_of_blocks_.size(); slot += cluster_) {
    if (!is_over(slot)) continue;
    for (unsigned i = 0; i < cluster_; ++i) begin_block(slot + i);
    cluster_barriers_.erase(slot), pairs_.erase(slot);
    any = true;
  }
  return any;
}

std::string Wave::run() {
  host_ = thread_context();
  while (failure_.empty() && begin_blocks()) {
    current_ = random_.below(warps_.size()) * kLanes;
    if (pick()) switch_fiber(host_, fibers_[current_].context);
  }
  return std::exchange(failure_, {});
}

void Wave::entry() {
  fiber_has_begun();
  try {
    wave->thread_();
    if (wave->fiber().bulk.all.size() > 1) wave->fail("ends before its bulk copies are waited for", {});
    wave->check_nobody_waits();
    if (const Block& own = wave->block(); own.running == 1 && own.tensor && !own.tensor->is_empty())
      wave->fail("is the last of its block to end, and has not freed all tensor memory", {});
  } catch (const Failure& failure) {
    wave->end_launch(failure.what);
  }
  wave->end_thread();
}
void Wave::end_launch(const std::string& failure) {
  failure_ = failure;
  leave();
}

// Goes back to the host. All fibers stay where they are.
void Wave::leave() {
  switch_fiber(fiber().context, host_, true);
  std::abort();
}

void Wave::fail(const std::string& what, Where where) {
  const uint3 t = fiber().index;
  const std::string number = size_.y * size_.z > 1 ? str(t.x, ",", t.y, ",", t.z) : str(t.x);
#if defined(__SANITIZE_ADDRESS__)
  // Nobody frees it: end_launch() never returns to the handler. And a destructor of the kernel may wait for threads
  // that have failed, too, so that some are not even caught.
  const __lsan::ScopedDisabler is_no_leak;
#endif
  throw Failure{str(place(), ", thread ", number, ", ", text_of(where), ": ", what)};
}

void Wave::ask_for_clusters(Where where) {
  needs_clusters_ = next_ == 1;
  fail("asks for its rank in a cluster", where);
}

std::string Wave::place() const {
  const uint3 b = blocks_[own()]->index;
  return str("block ", b.x, ",", b.y, ",", b.z);
}

unsigned Wave::lanes_of(unsigned warp) const {
  const unsigned n = std::min(threads_ - warp * kLanes % padded_, kLanes);
  return n == kLanes ? ~0u : (1u << n) - 1;
}

Block& Wave::block_of(unsigned address) {
  const unsigned rank = address >> kRankShift & 0x7f;
  if (rank >= cluster_ && !(address >> 31)) fail(str("an address of block ", rank, " of a cluster of ", cluster_), {});
  return *blocks_[first_of_cluster() + (address >> 31 ? this->rank() : rank % cluster_)];
}

// ---- which thread runs ----

// Chooses the next thread: a lane of the running warp while one of them is ready, then of a warp of the block, then
// of any. Returns false if there is none. (Another block is expensive: it brings its shared memory.)
bool Wave::pick() {
  const auto count = static_cast<unsigned>(warps_.size()), of_block = padded_ / kLanes;
  unsigned w = current_ / kLanes;
  if (!warps_[w].ready || random_.below(16) == 0) {
    const unsigned first = own() * of_block;
    const auto find = [&](unsigned from, unsigned n) {
      const unsigned start = random_.below(n);
      for (unsigned i = 0; i < n; ++i)
        if (w = from + (start + i) % n; warps_[w].ready) return true;
      return false;
    };
    const bool elsewhere = count > of_block && random_.below(64) == 0;
    if (!(!elsewhere && find(first, of_block)) && !find(0, count)) return false;
  }
  const Warp& warp = warps_[w];
  const int turn = static_cast<int>(warp.rotation);
  const unsigned lane = static_cast<unsigned>(std::countr_zero(std::rotr(warp.ready, turn)) + turn) % kLanes;
  become(w * kLanes + lane);
  return true;
}

void Wave::become(unsigned thread) {
  current_ = thread;
  threadIdx = fibers_[thread].index, blockIdx = blocks_[own()]->index;
  if (own() == active_) return;
  blocks_[active_]->memory.leave_variables();
  blocks_[active_ = own()]->memory.take_variables();
}

// Switches to another thread, where the running fiber cannot go on for now, or has ended.
void Wave::go_on(bool ends) {
  Context& from = fiber().context;
  bool found = pick();
  if (!found && !spinning_.empty() && !looked_) wake(spinning_), looked_ = true, found = pick();
  if (found) {
    if (Context& next = fiber().context; &next != &from) switch_fiber(from, next, ends);
    return;
  }
  const bool all = std::all_of(blocks_.begin(), blocks_.end(), [](const auto& b) { return b->running == 0; });
  if (!all) failure_ = str(place(), ": deadlock: ", who_waits());
  leave();
}

void Wave::wait(std::vector<unsigned>& list, const char* what, unsigned number, Where where) {
  list.push_back(current_);
  stop_at(what, number, where);
}
void Wave::stop_at(const char* what, unsigned number, Where where) {
  Fiber& own = fiber();
  own.waits = what, own.number = number, own.where = where;
  stop();
  go_on();
  own.waits = nullptr;
}
void Wave::wake(std::vector<unsigned>& list) {
  for (const unsigned t : std::exchange(list, {})) set_ready(t);
  looked_ = false;
}

void Wave::give_way() {
  const unsigned own = current_, first = random_.below(fibers_.size());
  for (unsigned i = 0; i < fibers_.size(); ++i) {
    const auto next = static_cast<unsigned>((first + i) % fibers_.size());
    if (!(warps_[next / kLanes].ready >> next % kLanes & 1) || next == own) continue;
    become(next);
    return switch_fiber(fibers_[own].context, fibers_[next].context);
  }
}

// Has a lane named the running one, which is about to end? (If all lanes are named there is a deadlock, which tells
// where each of them is.)
void Wave::check_nobody_waits() {
  const auto misses = [&](const Meeting& m) { return m.arrived && m.mask >> current_ % kLanes & 1; };
  const std::deque<Meeting>& all = warps_[current_ / kLanes].of_some;
  if (std::any_of(all.begin(), all.end(), misses)) fail("ends, while lanes of its warp wait for it by a mask", {});
}
void Wave::end_thread() {
  fiber().ended = true;
  stop();
  Block& own = block();
  --own.running;
  for (auto& [number, b] : own.barriers)  // the barrier of all threads waits for one less
    if (!b.count && own.running && b.arrived == own.running) release(b, number);
  if (is_over(first_of_cluster()) && next_ < order_of_blocks_.size()) leave();
  go_on(true);
  std::abort();
}

std::string Wave::who_waits() const {
  if (blocks_.size() == 1) return who_waits(0);
  std::string all;
  for (unsigned i = 0; i < blocks_.size(); ++i)
    all += str(i ? "; block " : "block ", blocks_[i]->index.x, ": ", who_waits(i));
  return all;
}
std::string Wave::who_waits(unsigned block) const {
  const Fiber* fibers = &fibers_[block * padded_];
  std::string all;
  for (unsigned first = 0, t = 1; t <= threads_; ++t) {
    const Fiber &a = fibers[first], &b = fibers[std::min(t, threads_ - 1)];
    if (t < threads_ && a.ended == b.ended && a.waits == b.waits && a.number == b.number &&
        a.where.line() == b.where.line())
      continue;
    const std::string what = a.waits ? str(a.waits, a.number ? str(" ", a.number) : "") : "";
    all += str(all.empty() ? "" : ", ", "threads ", first, " to ", t - 1, " ",
               a.ended ? "have ended" : str("wait at ", what, " in ", text_of(a.where)));
    first = t;
  }
  return all;
}

// ---- meetings ----

void Wave::release(Barrier& b, unsigned number) {
  std::map<unsigned, unsigned> lanes;
  for (const unsigned t : b.waiting) lanes[t / kLanes] |= 1u << t % kLanes;
  for (const auto& [w, here] : lanes) {
    unsigned alive = 0;
    for (unsigned l = 0; l < kLanes; ++l) alive |= unsigned{!fibers_[w * kLanes + l].ended} << l;
    if (here != alive)
      fail(str("some lanes only of warp ", w - own() * padded_ / kLanes, " meet at barrier ", number), fiber().where);
  }
  if (!b.waiting.empty()) order_.meet(b.waiting);
  if (!b.told.empty()) {
    const auto known = std::make_shared<const Order::Times>(std::exchange(b.told, {}));
    for (const unsigned t : b.waiting) order_.learn(t, known);
  }
  b.result = std::exchange(b.all, true);
  wake(b.waiting), b.count = b.arrived = 0;
}

bool Wave::meet(unsigned barrier, unsigned count, bool waits, bool x, Where where) {
  if (barrier >= 16) fail(str("there is no barrier ", barrier), where);
  if (count % kLanes || count > threads_) fail(str("a barrier of ", count, " threads of ", threads_), where);
  Barrier& b = block().barriers[barrier];
  if (b.arrived && b.count != count)
    fail(str("threads meet at barrier ", barrier, " in different numbers: ", b.count, " and ", count), where);
  b.count = count, ++b.arrived, b.all &= x;
  fiber().where = where;
  const bool last = b.arrived == (count ? count : block().running);
  if (!waits) order_.tell(b.told, current_);
  else if (last) b.waiting.push_back(current_);
  if (last) release(b, barrier);
  else if (waits) wait(b.waiting, "barrier", barrier, where);
  return b.result;
}

void Wave::arrive_at_cluster(bool relaxed) {
  const unsigned first = first_of_cluster();
  Barrier& b = cluster_barriers_[first];
  if (!relaxed) order_.tell(b.told, current_);
  for (auto& [at, m] : block().mbarriers)
    if (m.by == current_ && m.fenced && !m.known_since) m.known_since = b.count + 1;
  unsigned running = 0;
  for (unsigned i = 0; i < cluster_; ++i) running += blocks_[first + i]->running;
  if (++b.arrived != running) return;
  b.arrived = 0, ++b.count, b.known = std::make_shared<const Order::Times>(std::exchange(b.told, {}));
  wake(b.waiting);
}
void Wave::wait_for_cluster(Where where) {
  Barrier& b = cluster_barriers_[first_of_cluster()];
  while (fiber().clusters == b.count) wait(b.waiting, "the cluster's barrier", 0, where);
  ++fiber().clusters;
  order_.learn(current_, b.known);
}

// The meeting of these lanes. Each of them must give the same mask.
Meeting& Wave::meeting_of(const char* what, unsigned mask, Where where) {
  Warp& warp = warps_[current_ / kLanes];
  const unsigned lane = current_ % kLanes, first = current_ / kLanes * kLanes;
  if (mask == kAllOfWarp && warp.of_some.empty()) return warp.meeting;
  if (!(mask >> lane & 1)) fail(str(what, " with a mask that does not name its own lane ", lane), where);
  for (unsigned l = 0; l < kLanes; ++l)
    if (mask >> l & 1 && fibers_[first + l].ended) fail(str(what, " names lane ", l, ", which has ended"), where);
  Meeting* found = nullptr;
  const auto look = [&](Meeting& m) {
    if (!m.arrived || !(m.mask & mask)) return;
    if (m.mask != mask) fail(str(what, " of lanes that wait for others, with another mask"), where);
    found = &m;
  };
  look(warp.meeting);
  for (Meeting& m : warp.of_some) look(m);
  if (found) return *found;
  if (mask == kAllOfWarp) return warp.meeting;
  warp.of_some.push_back({.arrived = 0, .mask = mask, .operands = {}});
  return warp.of_some.back();
}
bool Wave::has_met(Meeting& m, const char* what, void* operands, void (*compute)(void* const*), unsigned size,
                   Where where) {
  if (m.arrived && m.compute != compute) fail(str("other lanes of the warp are not at ", what), where);
  if (!m.arrived) m.operands.assign(size, nullptr);
  m.compute = compute, m.operands[current_ % size] = operands;
  const unsigned count = size == kLanes ? static_cast<unsigned>(std::popcount(m.mask)) : size;
  if (++m.arrived < count) return false;
  compute(m.operands.data());
  m.arrived = 0;
  return true;
}

void Wave::together(const char* what, void* operands, void (*compute)(void* const*), Where where, unsigned mask) {
  Meeting& m = meeting_of(what, mask, where);
  if (!has_met(m, what, operands, compute, kLanes, where)) return stop_at(what, 0, where);
  Warp& warp = warps_[current_ / kLanes];
  warp.ready |= mask;
  std::erase_if(warp.of_some, [](const Meeting& other) { return !other.arrived; });
}
void Wave::together_in_group(const char* what, void* operands, void (*compute)(void* const*), Where where) {
  constexpr unsigned kSize = 4 * kLanes;
  const unsigned which = current_ / kSize;
  if (!has_met(groups_[which], what, operands, compute, kSize, where)) return stop_at(what, 0, where);
  for (unsigned w = which * 4; w < which * 4 + 4; ++w) warps_[w].ready = kAllOfWarp;
}

void Wave::order_lanes(unsigned mask) {
  unsigned lanes[kLanes], count = 0;
  for (unsigned l = 0; l < kLanes; ++l)
    if (mask >> l & 1) lanes[count++] = current_ / kLanes * kLanes + l;
  order_.meet({lanes, count});
}

}  // namespace kda::emulator
