#include "order.h"

#include <algorithm>
#include <bit>

namespace kda::emulator {

void Order::begin(unsigned warps) {
  warps_ = warps, now_ = 1;
  nothing_ = std::make_shared<Times>(2 * half(), 0);
  known_.assign(size_t{all_warps()} * kLanes, nothing_);
  told_.reset(), before_.reset(), heard_.reset();
  fenced_.assign(known_.size(), nothing_), fences_.assign(known_.size(), {});
}

void Order::forget(unsigned thread) {
  known_[thread] = nothing_, fenced_[thread] = nothing_;
  fences_[thread].clear();
}

void Order::join(Times& to, const Times& from) {
  if (to.empty()) to.assign(from.size(), 0);
  Time* a = to.data();
  const Time* b = from.data();
  for (size_t i = 0, n = from.size(); i < n; ++i) a[i] = std::max(a[i], b[i]);
}

// The times of a thread, to be written to.
Order::Times& Order::own(unsigned thread) {
  Own& known = known_[thread];
  if (known.use_count() > 1) known = std::make_shared<Times>(*known);
  return *known;
}

bool Order::after(unsigned thread, unsigned warp, uint32_t lanes, Time access, bool async) const {
  const bool own = thread / kLanes == warp;
  if (own && !async) lanes &= ~(1u << thread % kLanes);
  return has(*known_[thread], async ? half() : 0, warp, lanes, access);
}
bool Order::has(const Times& all, size_t first, unsigned warp, uint32_t lanes, Time access) const {
  const Time* times = all.data() + first;
  if (!lanes || times[size_t{all_warps()} * kLanes + warp] >= access) return true;
  for (; lanes; lanes &= lanes - 1)
    if (times[warp * kLanes + static_cast<unsigned>(std::countr_zero(lanes))] < access) return false;
  return true;
}

Order::Time Order::fence_of(unsigned thread, Time time) const {
  const auto& all = fences_[thread];
  const auto first = std::lower_bound(all.begin(), all.end(), time);
  return first == all.end() ? 0 : *first;
}
bool Order::after_at_fence(unsigned thread, unsigned warp, uint32_t lanes, Time access) const {
  return has(*fenced_[thread], 0, warp, lanes, access);
}

void Order::meet(std::span<const unsigned> threads) {
  const Own first = known_[threads.front()];
  const auto same = std::count_if(threads.begin(), threads.end(), [&](unsigned t) { return known_[t] == first; });
  Own together = first;
  // The variable `first` holds one more reference, `together` another.
  if (same != static_cast<ptrdiff_t>(threads.size()) || first.use_count() != same + 2) {
    together = std::make_shared<Times>(*first);
    const Times* last = first.get();
    for (const unsigned t : threads)
      if (known_[t].get() != last) last = known_[t].get(), join(*together, *last);
  }
  std::vector<unsigned> lanes(warps_, 0);
  for (const unsigned t : threads) (*together)[t] = now_, ++lanes[t / kLanes];
  for (unsigned w = 0; w < warps_; ++w)
    if (lanes[w] == kLanes) (*together)[size_t{all_warps()} * kLanes + w] = now_;
  ++now_;
  for (const unsigned t : threads) known_[t] = together;
}

void Order::tell(Times& to, unsigned by) {
  if (is_engine(by)) {  // it does what it is told, and learns nothing
    if (to.empty()) to.assign(2 * half(), 0);
  } else {
    join(to, *known_[by]);
  }
  to[by] = now_++;
}

void Order::learn(unsigned thread, const Known& what) {
  if (!what) return;
  Own& known = known_[thread];
  if (known == before_ && what == heard_) {  // as the lanes of a warp do, one after another
    known = told_;
    return;
  }
  before_ = known, heard_ = what;
  told_ = std::make_shared<Times>(*known);
  join(*told_, *what);
  known = told_;
}

void Order::show_async(unsigned thread) {
  Times& times = own(thread);
  for (size_t i = 0; i < half(); ++i) times[half() + i] = std::max(times[half() + i], times[i]);
  times[half() + thread] = now_++;
}

}  // namespace kda::emulator
