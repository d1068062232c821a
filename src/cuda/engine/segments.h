// A call cut into segments: where their maps are, and the consumers that make maps and outputs.
//
// The state behind a segment is M S + b, where S is the state before it (math.md 6). Columns of a state are
// independent, so the ordinary scan makes both terms: b is the state of a scan that starts from zeros, M that of a
// scan that starts from the identity, with v = 0. The two are the segment's map. The first segment of a sequence
// begins with the initial state: its b is the state behind it, and it needs no M.
//
// For the reverse scan all of this is mirrored: dS is the state, and segments follow one another from the end of a
// sequence to its beginning.
#pragma once
#include "cuda/engine/map_consumer.h"
#include "cuda/engine/pair.h"

namespace kda::cuda::engine {

// How sequences are cut: behind `lead` tokens, and then every `tokens` tokens. With cu_seqlens `lead` is not less
// than `tokens`. Segments of all sequences are numbered so that those of the sequences before need not be counted:
// with cu_seqlens, the segments of sequence n, which begins at token t0, have numbers from t0 / tokens + n on. Some
// numbers have no segment.
//
// The reverse scan splits by positions: the distance from the sequence's end, rounded up to 64 tokens, so that splits
// fall on chunk borders. Up to 63 positions of a sequence belong to no token. For these, with cu_seqlens, `lead` is 64
// longer. The same holds where requests may resume within a chunk (openings.h): positions count from where
// that chunk began.
//
// This is all that a pair needs to find its task, and no more: its first chunk waits for each 64 bytes of parameters,
// and for divisions.
struct Cut {
  unsigned lead, tokens;
  unsigned total;  // numbers of segments
  unsigned N, T;
  bool varlen, reversed, opens;  // opens: requests may resume within a chunk
  // HV; value heads of a key head; segments of a sequence, without cu_seqlens; `tokens`.
  Divisor heads, group, each, length;
  Lengths cu_seqlens;
  StateSlots states;
  Flags has_initial;
  Index offset;  // checkpoint_offset

  Cut(const ForwardProblem& p, unsigned lead, unsigned tokens, bool reversed)
      : lead(lead),
        tokens(tokens),
        N(static_cast<unsigned>(p.N)),
        T(static_cast<unsigned>(p.T)),
        varlen(p.varlen),
        reversed(reversed),
        opens(has_openings(p.args)),
        heads(p.HV),
        group(p.group()),
        each(1 + divide_up(std::max<int64_t>(positions(p.T, reversed, opens ? kChunk - 1 : 0) - lead, 0), tokens)),
        length(tokens),
        cu_seqlens(lengths_of(p.args.in.cu_seqlens)),
        states(slots_of(p.args.states)),
        has_initial(strided<const uint8_t>(p.args.states.has_initial_state)),
        offset(index_of(p.args.checkpoint_offset)) {
    total = static_cast<unsigned>(p.varlen ? p.T / tokens + p.N : p.N * each.divisor);
  }
  // begun: so many of the first positions came before the call.
  KDA_BOTH static int64_t positions(int64_t tokens, bool reversed, int64_t begun) {
    return reversed ? (tokens + kChunk - 1) / kChunk * kChunk : tokens + begun;
  }
  // With cu_seqlens: where sequence n begins or, for n = N, the rows behind the last sequence.
  __device__ unsigned start(unsigned n) const { return static_cast<unsigned>(within(int_at(cu_seqlens, n), 0, T)); }
  // The number of the first segment of sequence n.
  __device__ unsigned first(unsigned n) const { return varlen ? length.quotient(start(n)) + n : n * each.divisor; }
  // Finds the sequence that has segment i, if there is one. By a warp.
  __device__ unsigned sequence(unsigned i) const {
    if (!varlen) return each.quotient(i);
    unsigned from = 0;
    for (unsigned count = N; count > 1;) {  // the last sequence whose first number is i or less
      const unsigned step = (count + 31) / 32, offset = threadIdx.x % 32 * step;
      const bool before = offset < count && first(from + offset) <= i;
      const unsigned skipped = (31 - __clz(__ballot_sync(kAll, before) | 1)) * step;
      from += skipped, count = min(step, count - skipped);
    }
    return from;
  }
};

// ---- in the workspace ----

// M^T lies as the consumer multiplies by it, in two halves of 64 rows, with channels in the places of a stage. A half
// has the leading bf16 of all numbers, then the rests, as tiles of 128 channels.
constexpr unsigned kMapBytes = kSize * kSize * 4;
static_assert(kMapBytes / 2 <= Stage::bytes);

// The maps of a call's segments, and flags that say when they are there.
struct Segments {
  Cut cut;
  unsigned maps;  // of a head: the last segment of each sequence has none; see place()
  char* M;        // [HV][maps]
  float4* b;      // [HV][maps][16][256 consumer threads of a pair]
  // [HV][numbers of segments]: how many quarters of a map are there, up to kWhole. Protects the map: consumers add
  // what they have stored, and other pairs wait for kWhole before they read. Then `taken`: how many pairs have a
  // number.
  unsigned* flags;
  unsigned* taken;
  static constexpr unsigned kWhole = 4;  // quarters of a map: b and M of both CTAs

  static unsigned maps_of(const ForwardProblem& p, const Cut& cut) {
    return static_cast<unsigned>(p.varlen ? p.T / cut.tokens : p.N * (cut.each.divisor - 1));
  }
  static uint64_t flag_bytes(const ForwardProblem& p, const Cut& cut) {
    return (p.HV * uint64_t{cut.total} + 1) * sizeof(unsigned);
  }
  static uint64_t bytes(const ForwardProblem& p, const Cut& cut) {
    return p.HV * uint64_t{maps_of(p, cut)} * 2 * kMapBytes + flag_bytes(p, cut);
  }
  Segments(const ForwardProblem& p, const Cut& cut, void* workspace)
      : cut(cut), maps(maps_of(p, cut)), M(static_cast<char*>(workspace)) {
    b = reinterpret_cast<float4*>(M + p.HV * uint64_t{maps} * kMapBytes);
    flags = reinterpret_cast<unsigned*>(M + p.HV * uint64_t{maps} * 2 * kMapBytes);
    taken = flags + p.HV * uint64_t{cut.total};
  }
  // CTA pairs of the call. With cu_seqlens there are some for the rows behind the last sequence.
  unsigned pairs(const ForwardProblem& p) const {
    return static_cast<unsigned>((int64_t{cut.total} + p.varlen) * p.HV);
  }
  // Where the map of segment `number` of sequence n is. Each of the n sequences before has one segment without a map.
  // (Garbage in cu_seqlens leads to other maps, at worst.)
  __device__ uint64_t place(unsigned hv, unsigned n, unsigned number) const {
    return uint64_t{hv} * maps + min(number - n, maps - 1);
  }
  __device__ char* map(unsigned hv, unsigned n, unsigned number) const { return M + place(hv, n, number) * kMapBytes; }
  __device__ unsigned* flag(unsigned hv, unsigned number) const { return flags + uint64_t{hv} * cut.total + number; }
  // Returns the pair's number; one thread of the pair calls it.
  __device__ unsigned number() const { return atomicAdd(taken, 1); }
  // Where this thread's elements of b are: the first four; the next four are 4 kB further.
  __device__ float4* offset(unsigned hv, unsigned n, unsigned number) const {
    return b + place(hv, n, number) * (kMapBytes / 16) + ptx::rank() * kGroup + threadIdx.x % kGroup;
  }
};

// What a CTA pair works on: a segment of a sequence, for one value head. One warp finds it for all threads, in shared
// memory.
struct alignas(16) Task {
  unsigned number, index;     // of the segment: among all, among those of its sequence
  unsigned n, hv, h, b;       // sequence, heads, row
  unsigned t0, length, slot;  // of the sequence. With an opening t0 is where position 0 would be, before the row
  unsigned first, end, then;  // positions first .. end - 1 of the sequence; where the next segment ends
  unsigned span;              // positions of the sequence
  unsigned mapped;            // chunks of the segment's map
  unsigned begun;             // positions of the sequence that came before the call
  // Chunks of the segment's opening, which is scanned by itself, as a call would be; chunks of the sequence that come
  // before the segment's other ones, less those of the opening.
  unsigned opening, skipped;
  // What there is to do. kZeros: outputs of tokens that belong to no state. kBegins: a first segment's outputs, then
  // those of the next one. kMaps: a map, then the next segment's outputs.
  enum Kind : unsigned { kNothing, kZeros, kBegins, kMaps };
  unsigned kind;
  bool initial;

  __device__ Task(const Cut& cut, unsigned pair) : number(cut.heads.quotient(pair)) {
    hv = pair - number * cut.heads.divisor, h = cut.group.quotient(hv);
    if (number >= cut.total) {  // the rows behind the last sequence
      n = cut.N, t0 = cut.start(n), length = span = end = then = cut.T - t0;
      index = b = slot = first = mapped = begun = opening = skipped = 0, kind = kZeros, initial = false;
      return;
    }
    n = cut.sequence(number), index = number - cut.first(n);
    Sequence s = sequence_at(cut.varlen, cut.cu_seqlens, cut.T, n);
    find_states(s, cut.states, cut.has_initial, slot_of(cut.states.indices, n));
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
    slot = static_cast<unsigned>(s.slot), initial = s.initial;
    const int64_t behind = cut.lead + int64_t{index} * cut.tokens, begin = index ? behind - cut.tokens : 0;
    begun = cut.opens && s.live && s.length > 0 ? static_cast<unsigned>(begun_tokens(cut.offset, n)) : 0;
    const int64_t all = Cut::positions(s.length, cut.reversed, begun);
    span = static_cast<unsigned>(all), t0 -= begun, length += begun;
    first = static_cast<unsigned>(begin), end = static_cast<unsigned>(min(behind, all));
    then = static_cast<unsigned>(min(behind + cut.tokens, all));
    mapped = index ? cut.tokens / kRows : 0;
    opening = index == 0 && begun > 0 ? (kChunk - begun + kRows - 1) / kRows : 0;
    skipped = opening > 0 ? kChunk / kRows - opening : first / kRows;
    if (index == 0) kind = s.live ? kBegins : kZeros;
    else if (begin >= all) kind = kNothing;  // a number without a segment
    else kind = !s.live ? kZeros : behind >= all ? kNothing : kMaps;
  }
  __device__ void share() const { shared() = *this; }
  __device__ static Task& shared() { return *reinterpret_cast<Task*>(shared_memory() + Shared::task); }
  __device__ static Task here() {
    Task x = shared();
    for (unsigned* of_all : {&x.number, &x.index, &x.n, &x.hv, &x.length, &x.end, &x.then, &x.span})
      *of_all = uniform(*of_all);
    return x;
  }
  __device__ Item item() const { return {n, hv}; }
  __device__ Sequence sequence() const {
    Sequence s{};
    s.n = n, s.b = b, s.t0 = t0, s.length = length, s.slot = slot, s.live = true, s.initial = initial;
    return s;
  }
};
static_assert(sizeof(Task) <= Shared::kTaskBytes);

// The chunks of one producer of a CTA pair, one in four: those of the pair's segment, then those of the next one.
// What a plan needs follows from the chunk's number and the task. (Reversed maps need q: b has gradients of outputs.)
// kKeeps: states may be kept, as always by the reverse scan.
template <bool kReversed_, bool kKeeps>
class TaskSource {
 public:
  static constexpr bool kMaps = !kReversed_, kBringsStates = false, kReversed = kReversed_,
                        kKeepsU = kKeeps && !kReversed_;
  static constexpr Order kOrder = order_of(kKeeps, kReversed_);
  __device__ explicit TaskSource(unsigned group) : number_(ptx::rank() + 2 * group) {}
  __device__ void next(const Call&, Plan& p) {
    const Task& task = Task::shared();
    if constexpr (kReversed) {
      const unsigned last = (min(task.length, task.span - task.first) - 1) / kRows;
      if (task.length == 0 || number_ > last || (last - number_) * kRows < task.span - task.then) return;
      p.set(task.hv, task.h, task.b, task.t0, task.length, last - number_);
    } else {
      const bool opens = number_ < task.opening;
      const unsigned before = opens ? task.begun : 0;  // positions before those that chunks count from
      const unsigned chunk = number_ + (opens ? 0 : task.skipped);
      const unsigned end = (opens ? min(task.then, unsigned{kChunk}) : task.then) - before;
      if (chunk * kRows >= end) return;
      p.set(task.hv, task.h, task.b, task.t0 + before, end, chunk);
    }
    p.number = number_, p.queries = number_ >= task.mapped;
    number_ += kStages;
  }

 private:
  unsigned number_;  // of the next chunk in the ring
};

// ---- the consumers of a segment ----

// Makes b of a segment and then outputs or, without kValues, M. While M is made, its warps release chunks, too;
// otherwise the warps of b do so for them. Base: the consumer of chunks.
template <class Scan>
class SegmentConsumer : public MapConsumer<Scan> {
  using Base = MapConsumer<Scan>;
  using Base::kValues, Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::first_column, Base::half_of_map;
  static constexpr unsigned kReadBarrier = NamedBarrier::kMapsAreRead;  // of both consumers

 public:
  __device__ SegmentConsumer(const Call& call, const Segments& segments, unsigned memory)
      : Base(call, memory), segments_(segments) {}

  // Makes b of a segment or, without values, M.
  __device__ __forceinline__ void map() {
    // Warps of b do not release the last stages: maps will come there.
    constexpr unsigned kHeld = kValues ? kStages : 0;
    if (Base::template begin<true>()) this->template scan_state<kHeld>(chunks());
    else Base::leave_out(chunks(), kHeld);
    ptx::sync_ways(kReadBarrier, 2 * kGroup);  // all reads of those stages are done
    const Task task = Task::here();
    const Item item = task.item();
    if constexpr (kValues) store(segments_.offset(item.hv, item.n, task.number));
    else store_map(segments_.map(item.hv, item.n, task.number));
    share(segments_.flag(item.hv, task.number), 1);
    ptx::sync_ways(kReadBarrier, 2 * kGroup);  // M has been copied: maps may come to that stage
  }
  // Makes outputs: of a sequence's first segment and the next one, or of the segment behind one whose map has been
  // made. (Both cases run the same code: a short call waits for instructions that run for the first time.)
  __device__ __forceinline__ void outputs() {
    const Task task = Task::here();
    const Item item = task.item();
    unsigned chunk = 0, first = 0, end = task.end;
    unsigned begun = 0;  // of an opening: it counts its tokens from its own first one
    if (task.index > 0) {
      pass_all(item, task.number - task.index, task.index);
      chunk = chunks(), first = end, end = task.then;
    } else {
      if (lane_ == 0) Base::open(2);
      Base::load(task.sequence(), task.hv);
      if (Base::kOpens && task.opening > 0) begun = uniform(task.begun), end = min(end, unsigned{kChunk});
    }
    const auto remember = [&] {
      Sequence s = task.sequence();
      s.t0 += begun, Base::remember(s, task.hv);
    };
    remember();
    for (;;) {
      if constexpr (Base::kReversed) Base::scan(item, task.span - end, min(task.length, task.span - first), chunk);
      else Base::scan(item, first, end - begun, chunk);
      const bool last = end == task.then;
      if (Base::kOpens ? end == task.end : first == 0) {  // the first segment is done; others end further on
        if (!last) store(segments_.offset(task.hv, task.n, task.number));
        share(segments_.flag(task.hv, task.number), Segments::kWhole / 2);
      }
      if (last) break;
      if (Base::kOpens && begun > 0) begun = 0, remember();
      first = end, end = Base::kOpens && end < task.end ? task.end : task.then;
    }
    finish();
  }

 private:
  __device__ __forceinline__ void finish() {
    const Task& task = Task::shared();  // there are no registers for it
    if (task.then == task.span) Base::keep(task.sequence(), task.hv, task.length);
    Base::finish_outputs();
  }
  __device__ unsigned chunks() const { return segments_.cut.tokens / kRows; }  // of a map
  // Tells other pairs that the warpgroup has stored so many quarters of a map.
  __device__ void share(unsigned* flag, unsigned quarters) const {
    ptx::sync_threads(Base::kBarrier, kGroup);  // all of it is stored
    if (threadIdx.x % kGroup == 0) ptx::add_release(flag, quarters);
  }

  // Two numbers, each as two bf16, the leading one and the rest: together 16 bits, in the range of f32.
  struct Split {
    unsigned leading, rest;
    __device__ Split(float x, float y) : leading(ptx::pack<__nv_bfloat16>(x, y)) {
      rest = ptx::pack<__nv_bfloat16>(x - __uint_as_float(leading << 16), y - __uint_as_float(leading & 0xffff0000u));
    }
  };

  // Stores M by way of a stage: of the two to which the last map will come, the one with a chunk that the other CTA
  // has prepared. That chunk has arrived, because warps have read it, and this CTA sends nothing from there. (The
  // other stage has a chunk of this CTA, which may still be on its way to the other CTA; only warps there know when
  // it has arrived.) Behind kReadBarrier all reads of the stage by warps of b and M are done, and nothing comes to it
  // before the warps of b release it.
  __device__ void store_map(char* to) const {
    // The rank of the CTA that has prepared the chunk, because chunks() is even.
    const unsigned half = ptx::rank() ^ 1;
    const unsigned stage = map_stage(0, half);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned row = first_column() % 64 + lane_ / 4 + i % 2 * 8, piece = i / 2;
      const Split x(S_[2 * i] * unit_[i % 2], S_[2 * i + 1] * unit_[i % 2]);
      const unsigned at = stage + piece / 8 * kHalf + row * kRowBytes + ((piece % 8 ^ row % 8) << 4) + lane_ % 4 * 4;
      ptx::store_shared(at, x.leading), ptx::store_shared(at + kRestOfMap, x.rest);
    }
    ptx::fence_shared_for_async();
    ptx::sync_threads(Base::kBarrier, kGroup);  // all of M is in the stage
    if (threadIdx.x % kGroup > 0) return;
    ptx::copy_bulk_to_global(to + half_of_map() * (kMapBytes / 2), stage, kMapBytes / 2);
    ptx::commit_bulk();
    ptx::wait_for_bulk<0>();
  }
  __device__ void store(float4* to) const {
#pragma unroll
    for (int i = 0; i < 16; ++i, to += 2 * kGroup)
      *to = make_float4(S_[4 * i] * unit_[0], S_[4 * i + 1] * unit_[0], S_[4 * i + 2] * unit_[1],
                        S_[4 * i + 3] * unit_[1]);
  }
  __device__ static void load(const float4* from, float (&x)[64]) {
#pragma unroll
    for (int i = 0; i < 16; ++i, from += 2 * kGroup) {
      const float4 four = *from;
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  }

  // Maps come to the ring's stages. Each takes two stages, and two pairs of stages take turns. The last map leaves
  // the stages of the next two chunks free.
  __device__ unsigned map_stage(unsigned before_last, unsigned half) const {
    return ring_.stage(chunks() + 2 + before_last % 2 * 2 + half);
  }
  __device__ unsigned map_barrier(unsigned i) const { return ring_.memory + Shared::maps + i % 2 * 8; }
  // Releases the map's last chunks in two of the ring's stages: in those of the next two chunks (behind = 0), or of
  // the two after them (1).
  __device__ void release_two(unsigned behind) const {
    for (unsigned i = 0; lane_ == 0 && i < 2; ++i) Base::release(chunks() - kStages + 2 * behind + i);
  }
  // Makes the state behind segments first .. first + last of a value head.
  __device__ __forceinline__ void pass_all(const Item& item, unsigned first, unsigned last) {
    const auto fetch = [&](unsigned i) {  // by one thread
      const char* from = segments_.map(item.hv, item.n, first + i);
      ptx::arrive_expecting(map_barrier(i), kMapBytes);
      for (const unsigned half : {0u, 1u})
        ptx::copy_bulk_to_shared(map_stage(last - i, half), from + half * (kMapBytes / 2), kMapBytes / 2,
                                 map_barrier(i));
    };
    if (last == 1) release_two(0);
    if (threadIdx.x < 32) {
      // Pairs with lower numbers make the maps at about the same time, without waiting. The last map is this pair's
      // own: when both CTAs have made theirs, both have all chunks, and no copy between them reads the stages to
      // which maps come.
      for (unsigned i = lane_; i <= last; i += 32)
        while (ptx::load_acquire(segments_.flag(item.hv, first + i)) < Segments::kWhole) {
        }
      __syncwarp();  // all maps are there
      ptx::fence_global_for_async();
      if (ptx::elect())
        for (unsigned i = 1; i <= min(last, 2u); ++i) fetch(i);
    }
    ptx::sync_threads(NamedBarrier::kConsumer, kGroup);  // all maps are there
    unit_[0] = unit_[1] = 1;
    load(segments_.offset(item.hv, item.n, first), S_);
    for (unsigned i = 1; i <= last; ++i) {
      pass(segments_.offset(item.hv, item.n, first + i), i, last);
      ptx::sync_threads(NamedBarrier::kConsumer, kGroup);  // all threads have read the map
      if (threadIdx.x < 32 && i + 2 <= last && ptx::elect()) fetch(i + 2);
      if (i + 1 == last) release_two(0);
    }
    release_two(1);
  }
  // Applies a map: S <- M S + b. M and S are sums of two bf16. From their product only that of both rests is left
  // out, 2^-16 of it.
  __device__ void pass(const float4* offset, unsigned i, unsigned last) {
    float b[64];
    load(offset, b);  // comes while the products run
    unsigned leading[8][4], rest[8][4];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const Split x(S_[2 * j], S_[2 * j + 1]);
      leading[j / 4][j % 4] = x.leading, rest[j / 4][j % 4] = x.rest;
    }
    ptx::wait_barrier(map_barrier(i), (i - 1) / 2 % 2);
    if constexpr (Base::kInTensorMemory) {
      Base::multiply_by_map(leading, rest, {map_stage(last - i, 0), map_stage(last - i, 1)});
    } else {
      ptx::fence_products();
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const uint64_t M = ptx::further(ptx::matrix_at(map_stage(last - i, k / 4), kHalf, 1024, ptx::Swizzle::k128),
                                        k % 4 * 16 * kRowBytes);
        ptx::wgmma<__nv_bfloat16, true>(S_, leading[k], M, k > 0);
        ptx::wgmma<__nv_bfloat16, true>(S_, rest[k], M, true);
        ptx::wgmma<__nv_bfloat16, true>(S_, leading[k], ptx::further(M, kRestOfMap), true);
      }
      ptx::commit_products();
      ptx::wait_for_products<0>();
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) S_[j] += b[j];
  }

  const Segments& segments_;
};

// Defined in hopper_prefill_segments.cu: why a call of CTA pairs is not cut, on any GPU that has them, or nullptr; how
// it is cut; its segments, with flags cleared in the call's stream. reversed: for the reverse scan.
const char* segments_why_not(const ForwardProblem& p);
Cut cut_of(const ForwardProblem& p, bool reversed);
Segments segments_of(const ForwardProblem& p, bool reversed);

}  // namespace kda::cuda::engine
