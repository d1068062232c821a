// CTA pairs that work on whole value heads: the chunks of their producers, and their consumer.
//
// The two CTAs of a cluster work on one value head at a time. Each CTA scans 64 of its columns and prepares every
// second chunk for both: a copy of a chunk's operands goes from its shared memory to that of the other CTA. What a
// pair works on: schedule.h.
//
// Where TMA may bring states (StateTiles), one comes to a stage of its own in front of a head's chunks. There the
// consumer exchanges it for the final state of the head before, which leaves from there.
#pragma once
#include "cuda/engine/producer.h"
#include "cuda/engine/schedule.h"

namespace kda::cuda::engine {

// The chunks of one producer of a CTA pair: one in four. The first producer also plans the consumer's work items. A
// state may come to a stage in front of those of a work item's chunks. kReversed_: chunks come from the last to the
// first, and a work item's spans count from the head's end.
// kKeeps: states may be kept, as always by the reverse scan.
template <bool kReversed_, bool kKeeps>
class PairSource {
 public:
  static constexpr bool kMaps = false, kBringsStates = true, kReversed = kReversed_, kKeepsU = kKeeps && !kReversed_;
  static constexpr Order kOrder = order_of(kKeeps, kReversed_);
  __device__ PairSource(const HeadScheduler& scheduler, unsigned group)
      : scheduler_(scheduler), number_(ptx::rank() + 2 * group), plans_work_(group == 0) {}

  __device__ void next(const Call& call, Plan& p) {
    if (ended_) return;
    const unsigned states = call.state_tiles->used;  // stages in front of a work item: 0 or 1
    while (number_ >= begin_ + count_) {
      begin_ += count_, count_ = 0;
      if (!opened_ && !scheduler_.next(call.p, now_)) {
        ended_ = true;
        if (plans_work_) PlannedItem::at(works_).exists = false, PlannedItem::at(works_).initial = others_;
        return;
      }
      if (n_ != now_.item.n) enter(call.p, now_.item.n);
      TokenRange tokens(now_, length_, kReversed ? 0 : begun_, kReversed);
      // Padding and empty sequences are left to PairConsumer::finish(), which goes through all work items again.
      if (!live_ || tokens.end <= tokens.first) {
        others_ = true;
        continue;
      }
      const bool goes_on = opened_;
      const unsigned opening = kReversed ? 0 : take_part(tokens);
      count_ = states + (tokens.end - tokens.first + kRows - 1) / kRows, hv_ = now_.item.hv;
      first_ = kReversed ? (tokens.end - 1) / kRows : tokens.first / kRows;
      first_token_ = t0_ + opening, end_ = tokens.end;
      h_ = Plan::key_head(call.p, hv_), loads_ = initial_ && !now_.takes;
      if (plans_work_) plan_work(call, tokens, goes_on);
    }
    const unsigned i = number_ - begin_;
    p.state = i < states;
    if (p.state) p.hv = hv_, p.b = loads_ ? slot_ : Plan::kNone;
    else p.set(hv_, h_, b_, first_token_, end_, kReversed ? first_ + states - i : first_ + i - states);
    p.number = number_;
    number_ += kStages;
  }

 private:
  __device__ void enter(const ForwardProblem& p, unsigned n) {
    const Sequence s = sequence_at(p, p.args.in, p.args.states, n);
    n_ = n, b_ = static_cast<unsigned>(s.b), t0_ = static_cast<unsigned>(s.t0);
    length_ = static_cast<unsigned>(s.length), slot_ = static_cast<unsigned>(s.slot);
    live_ = s.live, initial_ = s.initial;
    if (!kReversed) begun_ = scheduler_.begun(n);
  }
  // Takes the opening of a sequence (openings.h), or what is behind it, out of a work item's tokens. Returns how many
  // tokens of the sequence come before; those of the part count from there.
  __device__ unsigned take_part(TokenRange& tokens) {
    const unsigned opening = begun_ ? unsigned{kChunk} - begun_ : 0;
    const bool opens = tokens.first < opening && !opened_;
    opened_ = opens && tokens.end > opening;
    if (opened_) tokens.end = opening;
    if (opens) return 0;
    tokens.first = max(tokens.first, opening) - opening, tokens.end -= opening;
    return opening;
  }
  // goes_on: an opening came before.
  __device__ void plan_work(const Call& call, const TokenRange& tokens, bool goes_on) {
    const auto from = goes_on ? PlannedItem::kItem : now_.takes ? PlannedItem::kPair : PlannedItem::kCall;
    const auto to = opened_ ? PlannedItem::kItem : now_.gives ? PlannedItem::kPair : PlannedItem::kCall;
    PlannedItem::at(works_++) = {n_, hv_, b_, first_token_, tokens.first, tokens.end, slot_, true, initial_, from, to};
    const TypedView& h0 = call.states.h0;
    const auto K = static_cast<unsigned>(call.p.K), V = static_cast<unsigned>(call.p.V);
    if (!initial_ || from != PlannedItem::kCall || h0.stride2 != K * size_of(h0.dtype)) return;
    const unsigned bytes = V / 2 * h0.stride2;  // each CTA asks for a half
    prefetch(h0.at(slot_, hv_, 0) + ptx::rank() * bytes, bytes);
  }

  HeadScheduler scheduler_;
  unsigned number_, begin_ = 0, count_ = 0;    // of the next stage; of the work item's first; the work item's stages
  unsigned first_, hv_, h_, works_ = 0;        // the work item's chunk that comes first, heads; work items so far
  unsigned first_token_, end_;                 // from which tokens of the part count; behind the last of them
  unsigned n_ = ~0u, b_, t0_, length_, slot_;  // the sequence
  unsigned begun_;                             // how many tokens of its first span came before the call
  WorkItem now_;
  bool opened_ = false;  // of the work item, an opening is planned, and not what is behind it
  bool live_, initial_, loads_, plans_work_, others_ = false, ended_ = false;
};

// The consumer of a CTA pair: goes through the pair's work items, and passes states on between them. Base: the consumer
// of a work item's chunks.
template <class Base>
class PairConsumer : public Base {
  using Base::S_, Base::unit_, Base::lane_, Base::call_, Base::ring_, Base::warp_;

 public:
  __device__ PairConsumer(const Call& call, unsigned memory, const Schedule& schedule, unsigned pair)
      : Base(call, memory), schedule_(schedule), pair_(pair) {}

  // To be called when the first work items are planned (Shared::planned).
  __device__ __forceinline__ void run() {
    unsigned number = 0, i = 0;  // of the stage, of the work item
    if (lane_ == 0) Base::open();
    if (!Base::has_columns()) return leave_out();
    const bool by_stages = call_.state_tiles->used;
    float first[64];  // state of a work item: comes while that of the one before is stored
    const auto come = [&](unsigned i) {
      const PlannedItem& work = PlannedItem::at(i);
      Sequence s = work.sequence();
      s.initial = s.initial && work.exists && work.from == PlannedItem::kCall;
      if (by_stages && work.exists) exchange(number++, i, first);
      else if (work.exists && work.from == PlannedItem::kItem) Base::unload(first);
      else Base::fetch(s, work.hv, first);
    };
    for (come(0); PlannedItem::at(i).exists; ++i) {
      lane_ = opaque(lane_);
      const PlannedItem& work = PlannedItem::at(i);
      if (work.from == PlannedItem::kPair) take();
      else Base::load(first);
      Base::remember(work.sequence(), work.hv);
      Base::scan({work.n, work.hv}, work.first, work.end, number, [&] {
        if (by_stages) finish_exchange(number - 1);
      });
      come(i + 1);
      if (work.to == PlannedItem::kPair) give();
      else if (work.to == PlannedItem::kItem) continue;
      else if (!by_stages || !PlannedItem::at(i + 1).exists) Base::keep(work.sequence(), work.hv, work.end);
    }
    Base::finish_outputs();
    finish(PlannedItem::at(i).initial);
  }

 private:
  // Releases the stages of all work items, in the CTA that V = 64 leaves without columns.
  __device__ void leave_out() const {
    for (unsigned i = 0, number = 0; PlannedItem::at(i).exists; ++i) {
      const PlannedItem& work = PlannedItem::at(i);
      const unsigned end = number + call_.state_tiles->used + (work.end - work.first + kRows - 1) / kRows;
      for (; number < end; ++number) {
        ring_.wait_full(number);
        __syncwarp();  // all lanes know that it is full
        if (lane_ == 0) Base::release(number);
      }
    }
  }
  // Does what has no chunks: padding, empty sequences, and rows behind the last sequence.
  __device__ void finish(bool others) {
    const ForwardProblem& p = call_.p;
    HeadScheduler scheduler(p, schedule_, pair_);
    for (WorkItem now; others && scheduler.next(p, now);) {
      const Sequence s = sequence_at(p, p.args.in, p.args.states, now.item.n);
      if (!s.live) {
        const TokenRange tokens(now, static_cast<unsigned>(s.length), scheduler.begun(now.item.n), false);
        Base::zero_outputs(now.item, s, tokens.first, tokens.end);
      } else if (s.length == 0) Base::load(s, now.item.hv), Base::keep(s, now.item.hv, 0);
    }
    if (!p.varlen) return;
    const int64_t end = end_of_sequences(p.args.in.cu_seqlens, p.N, p.T);
    for (unsigned hv = pair_; hv < p.HV; hv += schedule_.pairs) Base::zero_outputs({0, hv}, Sequence{}, end, p.T);
  }
  // Loads the state of work item i, which has come to a stage. The state of the work item before takes its place and
  // leaves from there, if its head ends there. A thread has the same elements of both, so it waits for no other
  // thread.
  __device__ void exchange(unsigned number, unsigned i, float (&first)[64]) const {
    const bool stores = call_.state_tiles->stores && i > 0 && PlannedItem::at(i - 1).to == PlannedItem::kCall;
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
    ptx::fence_shared_for_async();  // TMA reads what is stored, and will overwrite it
    __syncwarp();                   // all lanes have read theirs, and stored
    if (!stores || !ptx::elect()) return;
    const PlannedItem& before = PlannedItem::at(i - 1);
    const unsigned hv = before.hv, slot = before.slot;
#pragma unroll
    for (unsigned box = 0; box < StateTiles::kBoxes; ++box)
      ptx::store_box(call_.state_tiles->hT, box * StateTiles::kChannels, 2 * warp_, 0, hv, slot,
                     warps + box * StateTiles::kBoxBytes);
    ptx::commit_bulk();
  }
  // Releases the stage of exchange(), which is empty when TMA has read the state that leaves. It is called some time
  // later, so that no thread waits for that.
  __device__ void finish_exchange(unsigned number) const {
    ptx::wait_for_bulk_reads<0>();
    __syncwarp();  // the lane that stored, whichever was elected, has waited
    if (lane_ == 0) ring_.release(number);
  }
  // Hands the state on to the next pair.
  __device__ void give() const {
    float4* to = schedule_.state(pair_);
#pragma unroll
    for (int i = 0; i < 16; ++i, to += kGroup)
      *to = make_float4(S_[4 * i] * unit_[0], S_[4 * i + 1] * unit_[0], S_[4 * i + 2] * unit_[1],
                        S_[4 * i + 3] * unit_[1]);
    ptx::sync_threads(NamedBarrier::kConsumer, kGroup);  // all of it has been stored
    if (threadIdx.x == 0) ptx::store_release(schedule_.flag(pair_), 1);
  }
  // Takes the state from the pair before, when it is there.
  __device__ void take() {
    while (!ptx::load_acquire(schedule_.flag(pair_ - 1))) {
    }
    const float4* from = schedule_.state(pair_ - 1);
#pragma unroll
    for (int i = 0; i < 16; ++i, from += kGroup) {
      const float4 four = *from;
      S_[4 * i] = four.x, S_[4 * i + 1] = four.y, S_[4 * i + 2] = four.z, S_[4 * i + 3] = four.w;
    }
    unit_[0] = unit_[1] = 1;
  }

  const Schedule& schedule_;
  const unsigned pair_;
};

}  // namespace kda::cuda::engine
