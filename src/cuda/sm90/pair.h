// Pairs of blocks: a cluster of two works on one value head at a time. Each block scans 64 of its columns and prepares
// every second chunk, for both: the other's copy of a chunk's operands goes from shared memory to shared memory.
//
// All work lies on a line, in spans of 64 tokens: the value heads of the first sequence, one behind the other, then
// those of the next; before the spans of each there is a place for its states, which take about as long as a span to
// load and store. Pairs have equal shares of the line, and so some heads are in two of them. Of such a head the pair
// that has its beginning does that first; the next one does the rest last, from the state that the other left. Nobody
// waits but for a pair with a lower number, and numbers are given to running pairs, so that all need not be resident.
// Splits are between spans, and change no bit.
//
// Where the copy engine may bring states (StateTiles), one comes to a stage of its own in front of a head's chunks.
// There the scan exchanges it for the final state of the head before, which leaves from there.
#pragma once
#include "cuda/sm90/prepare.h"
#include "cuda/sm90/scan.h"

namespace kda::cuda::sm90 {

constexpr unsigned kMeasuring = 1024;  // threads of measure()

// Where sequences are on the line, and who has what of it.
struct Shares {
  unsigned pairs = 0, share = 0;  // places of a pair: known on the device alone with cu_seqlens, as are
  unsigned* first = nullptr;      // [N + 1]: places of one head before each sequence; then the longest one's
  float4* states = nullptr;       // [pairs][2][16][128] that are handed on; nullptr: no head is split
  unsigned* flags = nullptr;      // [pairs][2]: the state is there; then how many pairs have a number
  static constexpr uint64_t kStateBytes = kSize * kSize * 4;
  static constexpr unsigned kLeast = 4;   // places for which it is worth while to split heads
  static constexpr unsigned kStates = 1;  // place before a head's spans

  Shares(const ForwardProblem& p, int64_t blocks) {
    const int64_t most = std::max<int64_t>(blocks / 2, 1), each = places(p.T), items = p.N * p.HV;
    const int64_t upper = p.varlen ? p.HV * (p.T / kChunk + p.N * (1 + kStates)) : items * each;
    if (p.varlen) {
      pairs = static_cast<unsigned>(std::min(most, std::max<int64_t>(upper, p.T * p.HV > 0)));
      splits_ = divide_up(upper, most) >= kLeast, measures_ = true;
    } else {
      const int64_t whole = divide_up(items, most) * each, even = std::max(divide_up(upper, most), each);
      splits_ = whole - even >= kLeast;
      share = static_cast<unsigned>(splits_ ? even : whole);
      pairs = static_cast<unsigned>(divide_up(upper, std::max(share, 1u)));
    }
    N_ = static_cast<unsigned>(p.N);
  }
  KDA_BOTH static unsigned places(int64_t tokens) {
    return kStates + (tokens > 0 ? static_cast<unsigned>((tokens + kChunk - 1) / kChunk) : 1);
  }
  uint64_t bytes() const { return splits_ * pairs * kStateBytes + counters() * sizeof(unsigned); }
  void place(void* workspace) {
    auto* counter = reinterpret_cast<unsigned*>(static_cast<char*>(workspace) + splits_ * pairs * kStateBytes);
    if (splits_) states = static_cast<float4*>(workspace), flags = counter, counter += 2 * pairs + 1;
    if (measures_) first = counter;
  }
  uint64_t flag_bytes() const { return splits_ * (2 * pairs + 1) * sizeof(unsigned); }
  bool measures() const { return measures_; }

  // By one block of kMeasuring threads: flags are cleared, and sequences get their places.
  __device__ void measure(const ForwardProblem& p) const {
    __shared__ unsigned long long sums[kMeasuring / 32];
    for (unsigned i = threadIdx.x; flags && i < 2 * pairs + 1; i += kMeasuring) flags[i] = 0;
    // Lengths may be garbage, and then add up to anything.
    const unsigned long long most = INT32_MAX / static_cast<unsigned>(p.HV);
    unsigned long long before = 0;
    unsigned longest = 0;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned n0 = 0; n0 < N_; n0 += kMeasuring) {
      const unsigned n = n0 + threadIdx.x, mine = n < N_ ? places(sequence_at(p, p.args.in, n).length) : 0;
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
      __syncthreads();  // nobody reads them any more
    }
    longest = __reduce_max_sync(kAll, longest);
    if (lane == 0) sums[warp] = longest;
    __syncthreads();  // those of all warps are there
    for (const unsigned long long x : sums) longest = max(longest, static_cast<unsigned>(x));
    if (threadIdx.x == 0) first[N_] = static_cast<unsigned>(min(before, most)), first[N_ + 1] = longest;
  }

  // With that, on the device. Without flags no head is split.
  __device__ Shares known(const ForwardProblem& p) const {
    Shares x = *this;
    if (!measures_) return x;
    const unsigned even = (first[N_] * static_cast<unsigned>(p.HV) + pairs - 1) / pairs;
    x.share = max(even, first[N_ + 1]);
    if (even < kLeast) x.share = even, x.splits_ = false;
    return x;
  }
  __device__ bool splits() const { return splits_; }

  // By one thread: the pair's number.
  __device__ unsigned number() const { return flags ? atomicAdd(flags + 2 * pairs, 1) : blockIdx.x / 2; }
  // The thread's elements of the state that a pair hands on: the first four, 2 kB to the next.
  __device__ float4* state(unsigned pair) const {
    return states + (pair * 2 + ptx::rank()) * (kStateBytes / 32) + threadIdx.x;
  }
  __device__ unsigned* flag(unsigned pair) const { return flags + pair * 2 + ptx::rank(); }

 private:
  unsigned N_;
  bool splits_, measures_ = false;
  uint64_t counters() const { return splits_ * (2 * pairs + 1) + measures_ * (uint64_t{N_} + 2); }
};

// Where a value head of a sequence is on the line.
struct Spot {
  Item item;
  unsigned first, end;
  __device__ unsigned spans_before(unsigned x) const {  // a place
    return max(x, first + Shares::kStates) - first - Shares::kStates;
  }
};

class Line {
 public:
  __device__ Line(const ForwardProblem& p, const unsigned* first)
      : first_(first), HV_(static_cast<unsigned>(p.HV)), N_(static_cast<unsigned>(p.N)) {
    if (N_ > 0) enter(p, 0);
  }

  // The item at x; false: there are none.
  __device__ bool find(const ForwardProblem& p, unsigned x, Spot& spot) {
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
          for (unsigned count = N_; count > 1;) {  // the last one that begins at x or before
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
    n_ = n, each_ = first_ ? first_[n + 1] - first_[n] : Shares::places(p.T);
    begin_ = HV_ * (first_ ? first_[n] : n * each_);
  }
  const unsigned* first_;
  unsigned HV_, N_;
  unsigned n_, begin_, each_;  // a sequence, where its first head begins, a head's places
};

// Spans first .. end - 1 of an item.
struct Stretch {
  Item item;
  unsigned first, end;
  bool takes, gives;  // from the pair before; to the next
};

// A pair's share, in the order in which it is done.
class Stretches {
 public:
  __device__ Stretches(const ForwardProblem& p, const Shares& shares, unsigned pair)
      : line_(p, shares.first), first_(pair * shares.share), end_(first_ + shares.share), splits_(shares.splits()) {
    Spot here;
    at_ = line_.find(p, first_, here) && here.first < first_ ? here.end : first_;
    if (!splits_) step_ = kWhole;
  }

  __device__ bool next(const ForwardProblem& p, Stretch& x) {
    Spot here;
    if (step_ == kLast) {  // the item that only begins in it
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
    if (step_ == kFirst) {  // the one that it begins in
      step_ = kDone;
      if (line_.find(p, first_, here) && here.first < first_) {
        const unsigned before = here.spans_before(first_);
        x = {here.item, before, here.spans_before(min(here.end, end_)), before > 0, here.end > end_};
        return true;
      }
    }
    return false;
  }

 private:
  Line line_;
  unsigned first_, end_, at_;
  enum : unsigned char { kLast, kWhole, kFirst, kDone } step_ = kLast;
  bool splits_;
};

// A stretch as the scan needs it: planned by a preparer, in shared memory. When a chunk is full, the stretches of that
// and of the next four chunks are there, and at most the next eleven; that before may be asked for, too: room for 16 is
// enough.
struct alignas(16) Work {
  unsigned n, hv, b, t0, first, end;  // tokens first .. end - 1 of the sequence
  unsigned slot;
  bool exists, initial, takes, gives;
  static constexpr unsigned kCount = 16;  // `initial` of what does not exist: there was something without chunks

  __device__ static Work& at(unsigned i) {
    return reinterpret_cast<Work*>(shared_memory() + Shared::benches + BenchLayout::end)[i % kCount];
  }
  __device__ Sequence sequence() const {
    Sequence s{};
    s.n = n, s.b = b, s.t0 = t0, s.length = end, s.slot = slot, s.live = true, s.initial = initial;
    return s;
  }
};
static_assert(BenchLayout::end + Work::kCount * sizeof(Work) <= BenchLayout::bytes);

// The chunks of one preparer of a pair: of four, one. The first preparer also plans for the scan, and states may come
// to stages in front of those of a stretch's chunks.
class PairSource {
 public:
  static constexpr bool kMaps = false, kBringsStates = true;
  __device__ PairSource(const Stretches& stretches, unsigned group)
      : stretches_(stretches), number_(ptx::rank() + 2 * group), plans_work_(group == 0) {}

  __device__ void next(const Call& call, Plan& p) {
    if (ended_) return;
    const unsigned states = call.state_tiles->used;  // of a stretch: 0 or 1
    while (number_ >= begin_ + count_) {
      begin_ += count_, count_ = 0;
      Stretch now;
      const bool exists = stretches_.next(call.p, now);
      if (!exists) {
        ended_ = true;
        if (plans_work_) Work::at(works_).exists = false, Work::at(works_).initial = others_;
        return;
      }
      if (n_ != now.item.n) enter(call.p, now.item.n);
      const unsigned first = now.first * unsigned{kChunk}, end = min(length_, now.end * unsigned{kChunk});
      // Padding, and what is empty, is left to the scan's second way through: see PairScan.
      if (!live_ || end <= first) {
        others_ = true;
        continue;
      }
      count_ = states + (end - first + kRows - 1) / kRows, first_ = now.first * (kChunk / kRows), hv_ = now.item.hv;
      h_ = Plan::key_head(call.p, hv_), loads_ = initial_ && !now.takes;
      if (plans_work_) plan_work(call, now, first, end);
    }
    const unsigned i = number_ - begin_;
    p.state = i < states;
    if (p.state) p.hv = hv_, p.b = loads_ ? slot_ : Plan::kNone;
    else p.set(hv_, h_, b_, t0_, length_, first_ + i - states);
    p.number = number_;
    number_ += kStages;
  }

 private:
  __device__ void enter(const ForwardProblem& p, unsigned n) {
    const Sequence s = sequence_at(p, p.args.in, p.args.states, n);
    n_ = n, b_ = static_cast<unsigned>(s.b), t0_ = static_cast<unsigned>(s.t0);
    length_ = static_cast<unsigned>(s.length), slot_ = static_cast<unsigned>(s.slot);
    live_ = s.live, initial_ = s.initial;
  }
  __device__ void plan_work(const Call& call, const Stretch& now, unsigned first, unsigned end) {
    Work::at(works_++) = {n_, hv_, b_, t0_, first, end, slot_, true, initial_, now.takes, now.gives};
    const TypedView& h0 = call.states.h0;
    if (!initial_ || now.takes || h0.stride2 != kSize * size_of(h0.dtype)) return;
    const unsigned bytes = kSize / 2 * h0.stride2;  // each block asks for a half
    prefetch(h0.at(slot_, hv_, 0) + ptx::rank() * bytes, bytes);
  }

  Stretches stretches_;
  unsigned number_, begin_ = 0, count_ = 0;    // of the next stage; of the stretch's first; the stretch's stages
  unsigned first_, hv_, h_, works_ = 0;        // the stretch's first chunk, head; stretches so far
  unsigned n_ = ~0u, b_, t0_, length_, slot_;  // the sequence
  bool live_, initial_, loads_, plans_work_, others_ = false, ended_ = false;
};

template <class T, bool kTraining>
class PairScan : public Scan<T, kTraining> {
  using Base = Scan<T, kTraining>;
  using Base::S_, Base::unit_, Base::lane_, Base::call_, Base::ring_, Base::warp_;

 public:
  __device__ PairScan(const Call& call, unsigned memory, const Shares& shares, unsigned pair)
      : Base(call, memory), shares_(shares), pair_(pair) {}

  // When the first stretches have been planned.
  __device__ __forceinline__ void run() {
    unsigned number = 0, i = 0;  // of the stage, of the stretch
    if (lane_ == 0) ring_.open();
    const bool by_stages = call_.state_tiles->used;
    float first[64];  // state of a stretch: comes while that of the one before is stored
    const auto come = [&](unsigned i) {
      const Work& work = Work::at(i);
      Sequence s = work.sequence();
      s.initial = s.initial && work.exists && !work.takes;
      if (by_stages && work.exists) exchange(number++, i, first);
      else Base::fetch(s, work.hv, first);
    };
    for (come(0); Work::at(i).exists; ++i) {
      lane_ = opaque(lane_);
      const Work& work = Work::at(i);
      if (work.takes) take();
      else Base::load(first);
      Base::remember(work.sequence(), work.hv);
      Base::scan({work.n, work.hv}, work.first, work.end, number, [&] {
        if (by_stages) finish_exchange(number - 1);
      });
      come(i + 1);
      if (work.gives) give();
      else if (!by_stages || !Work::at(i + 1).exists) Base::keep(work.sequence(), work.hv, work.end);
    }
    Base::finish_outputs();
    finish(Work::at(i).initial);
  }

 private:
  // What has no chunks: padding, empty sequences, and rows behind the last sequence.
  __device__ void finish(bool others) {
    const ForwardProblem& p = call_.p;
    Stretches stretches(p, shares_, pair_);
    for (Stretch now; others && stretches.next(p, now);) {
      const Sequence s = sequence_at(p, p.args.in, p.args.states, now.item.n);
      const int64_t first = now.first * kChunk, end = min(s.length, now.end * kChunk);
      if (!s.live) Base::zero_outputs(now.item, s, first, end);
      else if (s.length == 0) Base::load(s, now.item.hv), Base::keep(s, now.item.hv, 0);
    }
    if (!p.varlen) return;
    const int64_t end = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T);
    for (unsigned hv = pair_; hv < p.HV; hv += shares_.pairs) Base::zero_outputs({0, hv}, Sequence{}, end, p.T);
  }
  // The state of stretch i has come to a stage. That of the one before takes its place, if its head ends there, and
  // leaves: a thread has the same elements of both, so that it waits for no other.
  __device__ void exchange(unsigned number, unsigned i, float (&first)[64]) const {
    const bool stores = call_.state_tiles->stores && i > 0 && !Work::at(i - 1).gives;
    const unsigned warps = ring_.stage(number) + warp_ % Base::kWarps * StateTiles::kWarpBytes;
    const unsigned mine = warps + StateTiles::place(lane_ / 4, lane_ % 4 * 2);
    ring_.wait_full(number);
#pragma unroll
    for (unsigned x = 0; x < 32; ++x) {
      const float2 two = ptx::load_shared_f32x2(StateTiles::further(mine, x / 2, x % 2));
      first[2 * x] = two.x, first[2 * x + 1] = two.y;
    }
#pragma unroll
    for (unsigned x = 0; stores && x < 32; ++x)
      ptx::store_shared_f32x2(StateTiles::further(mine, x / 2, x % 2),
                              make_float2(S_[2 * x] * unit_[x % 2], S_[2 * x + 1] * unit_[x % 2]));
    ptx::fence_shared_for_async();  // the copy engine reads what is stored, and will overwrite it
    __syncwarp();                   // all lanes have read theirs, and stored
    if (!stores || !ptx::elect()) return;
    const Work& before = Work::at(i - 1);
    const unsigned hv = before.hv, slot = before.slot;
#pragma unroll
    for (unsigned box = 0; box < StateTiles::kBoxes; ++box)
      ptx::store_box(call_.state_tiles->hT, box * StateTiles::kChannels, 2 * warp_, 0, hv, slot,
                     warps + box * StateTiles::kBoxBytes);
    ptx::commit_bulk();
  }
  // The stage is empty when the copy engine has read what leaves: some time later, so that nobody waits for that.
  __device__ void finish_exchange(unsigned number) const {
    ptx::wait_for_bulk_reads<0>();
    if (lane_ == 0) ring_.release(number);
  }
  // The state, to the next pair, from the one before.
  __device__ void give() const {
    float4* to = shares_.state(pair_);
#pragma unroll
    for (int i = 0; i < 16; ++i, to += kGroup)
      *to = make_float4(S_[4 * i] * unit_[0], S_[4 * i + 1] * unit_[0], S_[4 * i + 2] * unit_[1],
                        S_[4 * i + 3] * unit_[1]);
    ptx::sync_threads(kScannerBarrier, kGroup);  // all of it has been stored
    if (threadIdx.x == 0) ptx::store_release(shares_.flag(pair_), 1);
  }
  __device__ void take() {
    while (!ptx::load_acquire(shares_.flag(pair_ - 1))) {
    }
    const float4* from = shares_.state(pair_ - 1);
#pragma unroll
    for (int i = 0; i < 16; ++i, from += kGroup) {
      const float4 four = *from;
      S_[4 * i] = four.x, S_[4 * i + 1] = four.y, S_[4 * i + 2] = four.z, S_[4 * i + 3] = four.w;
    }
    unit_[0] = unit_[1] = 1;
  }

  const Shares& shares_;
  const unsigned pair_;
};

}  // namespace kda::cuda::sm90
