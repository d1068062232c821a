// What Hopper adds: mbarriers, the copy engine, memory of products, blocks of a cluster.
//
// The copy engine brings at once what it is asked for. It does so as a thread of its own, and other threads learn of
// its writes from the mbarrier alone: this finds an access without a wait. What the engine takes away, and what
// products read, counts as being read until the wait.
#include <cstring>
#include <memory>

#include "cuda_runtime.h"
#include "error.h"
#include "plain_memory.h"
#include "wave.h"

namespace kda::emulator {
namespace {

Mbarrier& mbarrier_at(unsigned barrier, Where where) {
  auto& all = wave->block_of(barrier).mbarriers;
  const auto found = all.find(barrier & kOffset);
  if (found == all.end()) fail(str("there is no mbarrier at ", barrier & kOffset), where);
  return found->second;
}
// The mbarrier, whose init must have happened before.
Mbarrier& known_mbarrier_at(unsigned barrier, Where where) {
  Mbarrier& b = mbarrier_at(barrier, where);
  if (b.known_since && wave->fiber().clusters >= b.known_since) return b;
  if (!wave->order().after(wave->thread(), b.by / kLanes, 1u << b.by % kLanes, b.made))
    fail(str("uses the mbarrier at ", barrier & kOffset, ", whose init is not ordered before"), where);
  return b;
}

void end_phase_if_complete(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.count, ++b.phase;
  b.known = std::make_shared<const Order::Times>(b.told);
  wave->wake(b.waiting);
}

void end_read(const Range& r, bool by_warp) {
  wave->block_of(r.from).memory.end_async_read(r.from, r.bytes, wave->thread(), by_warp, r.where);
}

}  // namespace

void init_mbarrier(unsigned barrier, unsigned arrivals, Where where) {
  const uint64_t none = 0;
  store(barrier, &none, sizeof none, where);
  Order& order = wave->order();
  wave->block_of(barrier).mbarriers[barrier & kOffset] = {.count = arrivals,
                                                          .pending = arrivals,
                                                          .told = {},
                                                          .known = {},
                                                          .waiting = {},
                                                          .by = wave->thread(),
                                                          .made = order.now(),
                                                          .engine = order.engine() + wave->next_engine()};
}

void fence_mbarriers() {
  for (auto& [at, m] : wave->block().mbarriers) m.fenced |= m.by == wave->thread();
}

void arrive(unsigned barrier, unsigned times, unsigned bytes, Where where) {
  Mbarrier& b = known_mbarrier_at(barrier, where);
  if (times > b.pending)
    fail(str("arrives ", times, " times at the mbarrier at ", barrier & kOffset, ", which waits for ", b.pending),
         where);
  b.bytes += bytes, b.pending -= times;
  wave->order().tell(b.told, wave->thread());
  end_phase_if_complete(b);
}

void arrive_for(unsigned engine, unsigned barrier, Where where) {
  Mbarrier& b = known_mbarrier_at(barrier, where);
  if (!b.pending) fail(str("arrives at the mbarrier at ", barrier & kOffset, ", which waits for no more"), where);
  --b.pending;
  wave->order().tell(b.told, engine);
  end_phase_if_complete(b);
}

bool is_phase_over(unsigned barrier, unsigned parity, Where where) {
  Mbarrier& b = known_mbarrier_at(barrier, where);
  if (b.phase % 2 == parity) return false;
  wave->order().learn(wave->thread(), b.known);
  return true;
}
void wait_for_phase(unsigned barrier, unsigned parity, Where where) {
  while (!is_phase_over(barrier, parity, where)) {
    Mbarrier& b = mbarrier_at(barrier, where);
    const unsigned phase = b.phase;
    wave->wait(b.waiting, "the mbarrier at", barrier & kOffset, where);
    if (b.phase - phase > 1)
      fail(str("the mbarrier at ", barrier & kOffset, " is two phases ahead of a thread that waits for it"), where);
  }
}

bool let_others_go_on() {
  wave->give_way();
  return false;
}

// ---- copies of the engine ----

void bring(unsigned to, const void* from, unsigned bytes, unsigned barrier, Where where) {
  SharedMemory& memory = wave->block_of(to).memory;
  char* at = memory.at(to, bytes, where);
  memory.write_async(to, bytes, wave->thread(), mbarrier_at(barrier, where).engine, where);
  access_global(from, bytes, PlainMemory::Kind::kRead, where);
  std::memcpy(at, from, bytes);
}
void count_bytes(unsigned barrier, unsigned bytes, Where where) {
  Mbarrier& b = mbarrier_at(barrier, where);
  b.bytes -= bytes;
  wave->order().tell(b.told, b.engine);
  end_phase_if_complete(b);
}
void look_async(void* to, unsigned from, unsigned bytes, unsigned barrier, Where where) {
  SharedMemory& memory = wave->block_of(from).memory;
  std::memcpy(to, memory.at(from, bytes, where), bytes);
  memory.begin_async_read(from, bytes, wave->thread(), false, where);
  memory.end_async_read(from, bytes, mbarrier_at(barrier, where).engine, false, where);
}

void take_away(void* to, unsigned from, unsigned bytes, Where where) {
  SharedMemory& memory = wave->block_of(from).memory;
  const char* at = memory.at(from, bytes, where);
  memory.begin_async_read(from, bytes, wave->thread(), true, where);
  if (to) access_global(to, bytes, PlainMemory::Kind::kWrite, where), std::memcpy(to, at, bytes);
  wave->fiber().bulk.add({from, bytes, where});
}
void commit_bulk() { wave->fiber().bulk.commit(); }
void wait_for_bulk(unsigned groups) {
  wave->fiber().bulk.wait(groups, [](const Range& r) { end_read(r, false); });
}

// ---- products ----

void read_for_product(void* to, unsigned from, unsigned bytes, Where where) {
  SharedMemory& memory = wave->block().memory;
  std::memcpy(to, memory.at(from, bytes, where), bytes);
  const unsigned first = wave->thread() / kLanes / 4 * 4;
  for (unsigned w = first; w < first + 4; ++w) {
    memory.begin_async_read(from, bytes, w * kLanes, false, where);
    wave->warp(w).products.add({from, bytes, where});
  }
}
void commit_products(Where where) {
  char none = 0;
  together(
      "wgmma.commit_group", none, [](void* const*) { wave->warp().products.commit(); }, where);
}
void wait_for_products(unsigned groups, Where where) {
  const auto wait = [](void* const* all) {
    wave->warp().products.wait(of<unsigned>(all, 0), [](const Range& r) { end_read(r, true); });
  };
  together("wgmma.wait_group", groups, wait, where);
}

void fence_for_async() { wave->order().show_async(wave->thread()); }

// ---- blocks ----

unsigned rank(Where where) {
  if (wave->cluster() == 1 && !wave->is_told_clusters()) wave->ask_for_clusters(where);
  return wave->rank();
}
unsigned rank_bits() { return wave->rank() << kRankShift; }
unsigned address_in(unsigned address, unsigned rank) { return (address & kOffset) | rank << kRankShift; }
void arrive_at_cluster(bool relaxed, Where) { wave->arrive_at_cluster(relaxed); }
void wait_for_cluster(Where where) { wave->wait_for_cluster(where); }

unsigned look_at(const unsigned* flag, Where where) {
  expect_waited("reads a flag", where);
  Fiber& own = wave->fiber();
  if (own.flag == flag && own.seen == *flag) wave->spin(where);
  own.flag = flag, own.seen = *flag;
  access_global(flag, sizeof *flag, PlainMemory::Kind::kAtomic, where);
  if (const auto told = wave->flags().find(flag); told != wave->flags().end())
    wave->order().learn(wave->thread(), told->second), wave->block().has_acquired = true;
  return own.seen;
}
unsigned add_atomically(unsigned* to, unsigned x, Where where) {
  expect_waited("adds to global memory", where);
  access_global(to, sizeof *to, PlainMemory::Kind::kAtomic, where);
  const unsigned before = *to;
  *to += x;
  return before;
}
void change(unsigned* flag, unsigned x, Where where) {
  expect_waited("changes a flag", where);
  access_global(flag, sizeof *flag, PlainMemory::Kind::kAtomic, where);
  *flag = x;
  Order::Known& known = wave->flags()[flag];
  Order::Times told = known ? *known : Order::Times{};
  wave->order().tell(told, wave->thread());
  known = std::make_shared<const Order::Times>(std::move(told));
  wave->wake_spinning();
}

}  // namespace kda::emulator
