// What each CTA pair works on: all value heads lie on a line, and pairs have equal shares of it.
//
// The line is divided into spans of 64 tokens. (A request that resumes within a chunk has fewer in its first span, its
// opening: openings.h.) The value heads of the first sequence come one behind the other, then those of the next. In
// front of each head's spans is a place for its states, which take about as long to load and store as a span takes. CTA
// pairs have equal shares of the line, so some heads are in two shares. The pair with such a head's beginning does that
// part first and leaves the state in global memory. The next pair does the rest last, from that state.
//
// A pair waits only for a pair with a lower number, and running pairs draw their numbers in order, so not all pairs
// need to be resident. Heads are split between spans, which changes no bit.
#pragma once
#include "cuda/engine/pipeline.h"

namespace kda::cuda::engine {

constexpr unsigned kMeasuring = 1024;  // threads of measure()

// Where sequences lie on the line, and how it is shared.
struct Schedule {
  // CTA pairs; places of a pair's share. With cu_seqlens or openings `share` and `first` are known on the device alone.
  unsigned pairs = 0, share = 0;
  unsigned* first = nullptr;  // [N + 1]: places of one head before each sequence; then those of the longest one
  float4* states = nullptr;   // [pairs][2][16][128]: states that pairs hand on; nullptr: no head is split
  unsigned* flags = nullptr;  // [pairs][2]: the state of a pair's CTA is there; then how many pairs have a number
  Index offset;               // checkpoint_offset
  static constexpr uint64_t kStateBytes = kSize * kSize * 4;
  static constexpr unsigned kLeast = 4;   // places that make it worth while to split heads
  static constexpr unsigned kStates = 1;  // places before a head's spans

  // For a GPU on which `blocks` CTAs run at once.
  Schedule(const ForwardProblem& p, int64_t blocks) {
    const int64_t most = std::max<int64_t>(blocks / 2, 1), each = places(p.T), items = p.N * p.HV;
    const bool opens = has_openings(p.args);
    measures_ = p.varlen || opens;
    const int64_t upper = measures_ ? p.HV * (p.B * p.T / kChunk + p.N * (1 + opens + kStates)) : items * each;
    if (opens) offset = index_of(p.args.checkpoint_offset);
    if (measures_) {
      pairs = static_cast<unsigned>(std::min(most, std::max<int64_t>(upper, p.B * p.T * p.HV > 0)));
      splits_ = divide_up(upper, most) >= kLeast;
    } else {
      const int64_t whole = divide_up(items, most) * each, even = std::max(divide_up(upper, most), each);
      splits_ = whole - even >= kLeast;
      share = static_cast<unsigned>(splits_ ? even : whole);
      pairs = static_cast<unsigned>(divide_up(upper, std::max(share, 1u)));
    }
    N_ = static_cast<unsigned>(p.N);
  }
  KDA_BOTH static unsigned places(int64_t tokens, int64_t begun = 0) {
    return kStates + (tokens > 0 ? static_cast<unsigned>((tokens + begun + kChunk - 1) / kChunk) : 1);
  }
  uint64_t bytes() const { return splits_ * pairs * kStateBytes + counters() * sizeof(unsigned); }
  void place(void* workspace) {
    auto* counter = reinterpret_cast<unsigned*>(static_cast<char*>(workspace) + splits_ * pairs * kStateBytes);
    if (splits_) states = static_cast<float4*>(workspace), flags = counter, counter += 2 * pairs + 1;
    if (measures_) first = counter;
  }
  uint64_t flag_bytes() const { return splits_ * (2 * pairs + 1) * sizeof(unsigned); }
  bool measures() const { return measures_; }

  // Clears the flags and gives sequences their places, by one CTA of kMeasuring threads. sums: shared memory.
  __device__ void measure(const ForwardProblem& p, unsigned long long (&sums)[kMeasuring / 32]) const {
    for (unsigned i = threadIdx.x; flags && i < 2 * pairs + 1; i += kMeasuring) flags[i] = 0;
    // Lengths may be garbage and add up to anything.
    const unsigned long long most = INT32_MAX / static_cast<unsigned>(p.HV);
    unsigned long long before = 0;
    unsigned longest = 0;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned n0 = 0; n0 < N_; n0 += kMeasuring) {
      const unsigned n = n0 + threadIdx.x;
      const unsigned mine = n < N_ ? places(sequence_at(p, p.args.in, n).length, begun_tokens(offset, n)) : 0;
      longest = max(longest, mine);
      unsigned long long sum = mine;
      for (unsigned i = 1; i < 32; i *= 2) {
        const unsigned long long other = __shfl_up_sync(kAll, sum, i);
        if (lane >= i) sum += other;
      }
      if (lane == 31) sums[warp] = sum;
      __syncthreads();  // sums of warps are there
      for (unsigned w = 0; w < warp; ++w) sum += sums[w];
      if (n < N_) first[n] = static_cast<unsigned>(min(before + sum - mine, most));
      for (const unsigned long long x : sums) before += x;
      __syncthreads();  // all reads of the sums are done
    }
    longest = __reduce_max_sync(kAll, longest);
    if (lane == 0) sums[warp] = longest;
    __syncthreads();  // the longest ones of all warps are there
    for (const unsigned long long x : sums) longest = max(longest, static_cast<unsigned>(x));
    if (threadIdx.x == 0) first[N_] = static_cast<unsigned>(min(before, most)), first[N_ + 1] = longest;
  }

  // Returns the schedule with what measure() has found, on the device. Without flags no head is split.
  __device__ Schedule known(const ForwardProblem& p) const {
    Schedule x = *this;
    if (!measures_) return x;
    const unsigned even = (first[N_] * static_cast<unsigned>(p.HV) + pairs - 1) / pairs;
    x.share = max(even, first[N_ + 1]);
    if (even < kLeast) x.share = even, x.splits_ = false;
    return x;
  }
  __device__ bool splits() const { return splits_; }

  // Returns the CTA pair's number; one thread of the pair calls it.
  __device__ unsigned number() const { return flags ? atomicAdd(flags + 2 * pairs, 1) : blockIdx.x / 2; }
  // Where this thread's elements of the state are that a pair hands on: the first four; the next four are 2 kB
  // further.
  __device__ float4* state(unsigned pair) const {
    return states + (pair * 2 + ptx::rank()) * (kStateBytes / 32) + threadIdx.x;
  }
  // Protects that state: the CTA that hands it on sets the flag when it is stored, the next pair's CTA waits for it.
  __device__ unsigned* flag(unsigned pair) const { return flags + pair * 2 + ptx::rank(); }

 private:
  unsigned N_;
  bool splits_, measures_;
  uint64_t counters() const { return splits_ * (2 * pairs + 1) + measures_ * (uint64_t{N_} + 2); }
};

// Where a value head of a sequence lies on the line: places first .. end - 1.
struct HeadPlace {
  Item item;
  unsigned first, end;
  __device__ unsigned spans_before(unsigned x) const {  // of the head, before place x
    return max(x, first + Schedule::kStates) - first - Schedule::kStates;
  }
};

// Finds value heads on the line.
class HeadLine {
 public:
  __device__ HeadLine(const ForwardProblem& p, const unsigned* first)
      : first_(first), HV_(static_cast<unsigned>(p.HV)), N_(static_cast<unsigned>(p.N)) {
    if (N_ > 0) enter(p, 0);
  }

  // Finds the head at place x. Returns false behind the last one.
  __device__ bool find(const ForwardProblem& p, unsigned x, HeadPlace& spot) {
    if (N_ == 0) return false;
    if (x < begin_ || x - begin_ >= HV_ * each_) {
      if (!first_) {
        const unsigned n = x / (HV_ * each_);
        if (n >= N_) return false;
        enter(p, n);
      } else {
        if (x >= HV_ * first_[N_]) return false;
        unsigned n = 0;
        if (n_ + 1 < N_ && HV_ * first_[n_ + 1] <= x && x < HV_ * first_[n_ + 2]) n = n_ + 1;
        else
          for (unsigned count = N_; count > 1;) {  // the last sequence that begins at x or before
            const unsigned half = count / 2;
            if (HV_ * first_[n + half] <= x) n += half, count -= half;
            else count = half;
          }
        enter(p, n);
      }
    }
    const unsigned hv = (x - begin_) / each_;
    spot = {{n_, hv}, begin_ + hv * each_, begin_ + (hv + 1) * each_};
    return true;
  }

 private:
  __device__ void enter(const ForwardProblem& p, unsigned n) {
    n_ = n, each_ = first_ ? first_[n + 1] - first_[n] : Schedule::places(p.T);
    begin_ = HV_ * (first_ ? first_[n] : n * each_);
  }
  const unsigned* first_;
  unsigned HV_, N_;
  unsigned n_, begin_, each_;  // a sequence, the place of its first head, the places of a head
};

// What a CTA pair does next: spans first .. end - 1 of a value head.
struct WorkItem {
  Item item;
  unsigned first, end;
  bool takes, gives;  // takes the state from the pair before; gives it to the next
};

// The tokens first .. end - 1 of a work item, in a sequence of `length` tokens. reversed: its spans count from the end.
// begun: so many tokens of the first span came before the call.
struct TokenRange {
  unsigned first, end;
  __device__ TokenRange(const WorkItem& work, unsigned length, unsigned begun, bool reversed) {
    const unsigned spans = (length + unsigned{kChunk} - 1) / unsigned{kChunk};
    const unsigned before = reversed ? spans - min(spans, work.end) : work.first;
    const unsigned behind = reversed ? spans - min(spans, work.first) : work.end;
    first = max(before * unsigned{kChunk}, begun) - begun;
    end = min(length, max(behind * unsigned{kChunk}, begun) - begun);
  }
};

// The work items of a CTA pair, in the order in which it does them: first the head that begins in its share and ends
// behind it, then whole heads, last the head that begins before its share.
class HeadScheduler {
 public:
  __device__ HeadScheduler(const ForwardProblem& p, const Schedule& schedule, unsigned pair)
      : line_(p, schedule.first),
        offset_(schedule.offset),
        first_(pair * schedule.share),
        end_(first_ + schedule.share),
        splits_(schedule.splits()) {
    HeadPlace here;
    at_ = line_.find(p, first_, here) && here.first < first_ ? here.end : first_;
    if (!splits_) step_ = kWhole;
  }

  __device__ bool next(const ForwardProblem& p, WorkItem& x) {
    HeadPlace here;
    if (step_ == kLast) {  // the head that only begins in the share
      step_ = kWhole;
      if (line_.find(p, end_, here) && here.first >= first_ && here.spans_before(end_) > 0) {
        x = {here.item, 0, here.spans_before(end_), false, true};
        return true;
      }
    }
    if (step_ == kWhole) {
      if (at_ < end_ && line_.find(p, at_, here) && (!splits_ || here.end <= end_)) {
        at_ = here.end;
        x = {here.item, 0, here.spans_before(here.end), false, false};
        return true;
      }
      step_ = splits_ ? kFirst : kDone;
    }
    if (step_ == kFirst) {  // the head in which the share begins
      step_ = kDone;
      if (line_.find(p, first_, here) && here.first < first_) {
        const unsigned before = here.spans_before(first_);
        x = {here.item, before, here.spans_before(min(here.end, end_)), before > 0, here.end > end_};
        return true;
      }
    }
    return false;
  }

  // How many tokens of the first span of sequence n came before the call.
  __device__ unsigned begun(unsigned n) const { return static_cast<unsigned>(begun_tokens(offset_, n)); }

 private:
  HeadLine line_;
  Index offset_;
  unsigned first_, end_, at_;
  enum : unsigned char { kLast, kWhole, kFirst, kDone } step_ = kLast;
  bool splits_;
};

// A work item as the consumer needs it: planned by producer 0, in shared memory. When a chunk is full, the work items
// of that chunk and of the next four chunks are planned, and at most the next eleven. The one before may be read,
// too, so room for 16 is enough.
//
// An opening is an item of its own, and so are the tokens behind it: as two calls would be, so that they have the same
// bits. Each counts its tokens from its own beginning.
struct alignas(16) PlannedItem {
  unsigned n, hv, b, t0, first, end;  // tokens first .. end - 1 from token t0 of row b on
  unsigned slot;
  // The item behind the last one does not exist; its `initial` says whether there were work items without chunks.
  bool exists, initial;
  // Where the state comes from, and where it goes: memory of the call, another pair, the next item of this one.
  enum Place : unsigned char { kCall, kPair, kItem } from, to;
  static constexpr unsigned kCount = 16;

  __device__ static PlannedItem& at(unsigned i) {
    return reinterpret_cast<PlannedItem*>(shared_memory() + Shared::scratch + ScratchLayout::end)[i % kCount];
  }
  __device__ Sequence sequence() const {
    Sequence s{};
    s.n = n, s.b = b, s.t0 = t0, s.length = end, s.slot = slot, s.live = true, s.initial = initial;
    return s;
  }
};
static_assert(ScratchLayout::end + PlannedItem::kCount * sizeof(PlannedItem) <= ScratchLayout::bytes);

}  // namespace kda::cuda::engine
