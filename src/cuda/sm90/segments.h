// A call cut into segments: where their maps are, and the scan over them.
//
// The state behind a segment is M S + b, S the state before it (math.md 6). Columns of the state are independent, so the
// ordinary scan makes both: b is the state from zeros, M the one from the identity where v is 0. The first segment of a
// sequence begins with the initial state: its b is the state behind it, and it needs no M.
#pragma once
#include "cuda/sm90/pair.h"

namespace kda::cuda::sm90 {

// Sequences cut behind `lead` tokens and then every `tokens` tokens, which are not more. Pieces of all sequences are numbered so
// that nobody has to count those of the sequences before: with cu_seqlens, pieces of sequence n from token t0 on have numbers
// from t0 / tokens + n on. Some numbers belong to nobody.
struct Cut {
  unsigned lead, tokens;
  unsigned each;  // pieces of a sequence, without cu_seqlens
  unsigned total;

  Cut(const ForwardProblem& p, unsigned lead, unsigned tokens) : lead(lead), tokens(tokens) {
    each = static_cast<unsigned>(1 + (std::max<int64_t>(p.T - lead, 0) + tokens - 1) / tokens);
    total = static_cast<unsigned>(p.varlen ? p.T / tokens + p.N : p.N * each);
  }
  // The number of the first piece of sequence n.
  __device__ unsigned first(const ForwardProblem& p, unsigned n) const {
    if (!p.varlen) return n * each;
    return static_cast<unsigned>(within(int_at(p.args.in.cu_seqlens, n), 0, p.T)) / tokens + n;
  }
  // The sequence whose pieces number i is among, if anybody's: by a warp.
  __device__ unsigned sequence(const ForwardProblem& p, unsigned i) const {
    if (!p.varlen) return i / each;
    unsigned from = 0;
    for (unsigned count = static_cast<unsigned>(p.N); count > 1;) {  // the last one that begins at i or before
      const unsigned step = (count + 31) / 32, offset = threadIdx.x % 32 * step;
      const bool before = offset < count && first(p, from + offset) <= i;
      const unsigned skipped = (31 - __clz(__ballot_sync(kAll, before) | 1)) * step;
      from += skipped, count = min(step, count - skipped);
    }
    return from;
  }
};

// A piece of a sequence, for one value head.
struct Piece {
  Item item;
  unsigned index;       // of the sequence's pieces
  unsigned first, end;  // tokens first .. end - 1 of the sequence
  unsigned then;        // where the piece behind it ends
  bool exists;

  __device__ Piece(const ForwardProblem& p, const Cut& cut, unsigned number, unsigned hv) : item{0, hv} {
    if (number >= cut.total) {  // the rows behind the last sequence
      item.n = static_cast<unsigned>(p.N), index = first = end = then = 0, exists = true;
      return;
    }
    item.n = cut.sequence(p, number), index = number - cut.first(p, item.n);
    const int64_t length = sequence_at(p, p.args.in, item.n).length, behind = cut.lead + int64_t{index} * cut.tokens;
    const int64_t begin = index ? behind - cut.tokens : 0;
    exists = index == 0 || begin < length;
    first = static_cast<unsigned>(begin), end = static_cast<unsigned>(min(behind, length));
    then = static_cast<unsigned>(min(behind + cut.tokens, length));
  }
};

// ---- in the workspace ----

// M^T lies as the scan multiplies by it: two halves of 64 rows; of a half, leading bf16 and the rest of each number as tiles of
// 128 channels.
constexpr unsigned kMapBytes = kSize * kSize * 4, kRestOfMap = 2 * kHalf;
static_assert(kMapBytes / 2 <= Stage::bytes);

struct Segments {
  Cut cut;
  unsigned maps;  // of a head: of all pieces but the last of each sequence, which those of sequence n come behind n of
  char* M;        // [HV][maps]
  float4* b;      // [HV][maps][16][256 threads of a pair's scan]
  unsigned* flags;  // [HV][pieces]: how many quarters of a map are there; then how many pairs have a number
  static constexpr unsigned kWhole = 4;  // of a map: two blocks, b and M

  static unsigned maps_of(const ForwardProblem& p, const Cut& cut) {
    return static_cast<unsigned>(p.varlen ? p.T / cut.tokens : p.N * (cut.each - 1));
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
  }
  // Piece `number` is one of sequence n. (Garbage in cu_seqlens leads to maps of others, at worst.)
  __device__ uint64_t place(unsigned hv, unsigned n, unsigned number) const {
    return uint64_t{hv} * maps + min(number - n, maps - 1);
  }
  __device__ char* map(unsigned hv, unsigned n, unsigned number) const { return M + place(hv, n, number) * kMapBytes; }
  __device__ unsigned* flag(unsigned hv, unsigned number) const { return flags + uint64_t{hv} * cut.total + number; }
  // By one thread: the pair's number.
  __device__ unsigned number(const ForwardProblem& p) const { return atomicAdd(flags + p.HV * uint64_t{cut.total}, 1); }
  // States lie as the scan's threads have them: the first four elements of a thread, 4 kB to the next four.
  __device__ float4* offset(unsigned hv, unsigned n, unsigned number) const {
    return b + place(hv, n, number) * (kMapBytes / 16) + ptx::rank() * kGroup + threadIdx.x % kGroup;
  }
};

// What a pair works on: found out by a warp, for all, in shared memory.
struct alignas(16) Task {
  unsigned number;  // of the piece
  Piece at;
  Sequence s;
  __device__ Task(const ForwardProblem& p, const Cut& cut, unsigned pair)
      : number(pair / static_cast<unsigned>(p.HV)), at(p, cut, number, pair % static_cast<unsigned>(p.HV)), s{} {
    const kda_inputs& in = p.args.in;
    if (at.item.n == p.N) s.t0 = end_of_sequences(in.cu_seqlens, p.N, p.T), s.length = p.T - s.t0;
    else if (at.exists) s = sequence_at(p, in, p.args.states, at.item.n);
  }
  __device__ void share() const { place() = *this; }
  __device__ static const Sequence& sequence() { return place().s; }
  __device__ static Task here() {
    Task x = place();
    for (unsigned* of_all : {&x.number, &x.at.item.n, &x.at.item.hv, &x.at.index, &x.at.first, &x.at.end, &x.at.then})
      *of_all = uniform(*of_all);
    return x;
  }

 private:
  __device__ static Task& place() { return *reinterpret_cast<Task*>(shared_memory() + Shared::task); }
};
static_assert(sizeof(Task) <= Shared::kTaskBytes);

// ---- the scan of a segment ----

// Where M is made, too, its warps release chunks as well: where not, those of b do so for them.
template <class T, bool kValues = true>
class SegmentScan : public Scan<T, kValues, 2> {
  using Base = Scan<T, kValues, 2>;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_, Base::first_column;
  static constexpr unsigned kReadBarrier = kScannerBarrier + 2;  // of both warpgroups

 public:
  __device__ SegmentScan(const Call& call, const Segments& segments, unsigned memory)
      : Base(call, memory), segments_(segments) {}

  // b of a piece, or M where there are no values.
  __device__ __forceinline__ void map() {
    if (lane_ == 0) ring_.open();
    // No column of M grows, most shrink: in these units they stay large enough for long.
    unit_[0] = unit_[1] = kValues ? 1 : 0x1p-6f;
#pragma unroll
    for (int i = 0; i < 64; ++i)
      S_[i] = !kValues && Base::column(i / 2 % 2) == Base::channel(i / 4) + i % 2 ? 0x1p6f : 0;
    // The last stages stay as they are: maps will come there.
    this->template scan_state<kValues ? kStages : 0>(chunks());
    ptx::sync_ways(kReadBarrier, 2 * kGroup);  // nobody reads those stages any more
    const Task task = Task::here();
    const Item item = task.at.item;
    if constexpr (kValues) store(segments_.offset(item.hv, item.n, task.number));
    else store_map(segments_.map(item.hv, item.n, task.number));
    share(segments_.flag(item.hv, task.number), 1);
    ptx::sync_ways(kReadBarrier, 2 * kGroup);  // M has been copied: maps may come to that stage
  }
  // Outputs: of a sequence's first piece and the one behind it, or of the one behind a piece whose map has been made. (One way for
  // both: instructions that run for the first time are what a short call waits for.)
  __device__ __forceinline__ void outputs() {
    const Task task = Task::here();
    const Piece& at = task.at;
    unsigned chunk = 0, first = 0, end = at.end;
    if (at.index > 0) {
      pass_all(at.item, task.number - at.index, at.index);
      chunk = chunks(), first = end, end = at.then;
    } else {
      if (lane_ == 0) ring_.open(2);
      Base::load(task.s, at.item.hv);
    }
    Base::remember(task.s, at.item.hv);
    for (;;) {
      Base::scan(at.item, first, end, chunk);
      const bool last = end == at.then;
      if (!last) store(segments_.offset(at.item.hv, at.item.n, task.number));
      if (first == 0) share(segments_.flag(at.item.hv, task.number), Segments::kWhole / 2);
      if (last) break;
      first = end, end = at.then;
    }
    finish();
  }

 private:
  __device__ __forceinline__ void finish() {
    const Task task = Task::here();
    if (task.at.then == task.s.length) Base::keep(task.s, task.at.item.hv, task.at.then);
    Base::finish_outputs();
  }
  __device__ unsigned chunks() const { return segments_.cut.tokens / kRows; }  // of a map
  // What the warpgroup has stored.
  __device__ void share(unsigned* flag, unsigned quarters) const {
    ptx::sync_threads(Base::kBarrier, kGroup);  // all of it
    if (threadIdx.x % kGroup == 0) ptx::add_release(flag, quarters);
  }

  // Two numbers as two bf16 each, the leading one and the rest: 16 bits of them together, in the range of f32.
  struct Split {
    unsigned leading, rest;
    __device__ Split(float x, float y) : leading(ptx::pack<__nv_bfloat16>(x, y)) {
      rest = ptx::pack<__nv_bfloat16>(x - __uint_as_float(leading << 16), y - __uint_as_float(leading & 0xffff0000u));
    }
  };

  // By way of a stage, where the last map will come to: of two, the one with a chunk that the other block has prepared. All of
  // that has arrived, as warps have read it, and this block sends nothing from there. (From the other one, its own, the chunk may
  // still be on its way to the other block, whose warps alone know when it is there.) Behind kReadBarrier no warp of b and M reads
  // it any more, and nothing comes before those of b release it.
  __device__ void store_map(char* to) const {
    const unsigned half = ptx::rank() ^ 1;  // chunks() is even, so that it is the rank of who has prepared the chunk
    const unsigned stage = map_stage(0, half);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned row = first_column() % 64 + lane_ / 4 + i % 2 * 8, piece = i / 2;
      const Split x(S_[2 * i] * unit_[i % 2], S_[2 * i + 1] * unit_[i % 2]);
      const unsigned at = stage + piece / 8 * kHalf + row * kRowBytes + ((piece % 8 ^ row % 8) << 4) + lane_ % 4 * 4;
      ptx::store_shared(at, x.leading), ptx::store_shared(at + kRestOfMap, x.rest);
    }
    ptx::fence_shared_for_async();
    ptx::sync_threads(Base::kBarrier, kGroup);  // all of it is there
    if (threadIdx.x % kGroup > 0) return;
    ptx::copy_bulk_to_global(to + ptx::rank() * (kMapBytes / 2), stage, kMapBytes / 2);
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

  // Maps come into the ring's stages, two into each pair of them in turn, the last one to that of the second next chunk.
  __device__ unsigned map_stage(unsigned before_last, unsigned half) const {
    return ring_.stage(chunks() + 2 + before_last % 2 * 2 + half);
  }
  __device__ unsigned map_barrier(unsigned i) const { return ring_.memory + Shared::maps + i % 2 * 8; }
  // The last chunks of the map that are in two of the ring's stages: those of the next two chunks, or of the two behind them.
  __device__ void release_two(unsigned behind) const {
    for (unsigned i = 0; lane_ == 0 && i < 2; ++i) ring_.release(chunks() - kStages + 2 * behind + i);
  }
  // The state behind pieces first .. first + last of an item.
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
      // They are made by pairs with lower numbers, at about the same time, without waiting. The last one is the pair's own: when
      // both blocks have made theirs, both have all chunks, and no copy between them reads the stages to which maps come.
      for (unsigned i = lane_; i <= last; i += 32)
        while (ptx::load_acquire(segments_.flag(item.hv, first + i)) < Segments::kWhole) {
        }
      __syncwarp();  // all are there
      ptx::fence_global_for_async();
      for (unsigned i = 1; lane_ == 0 && i <= min(last, 2u); ++i) fetch(i);
    }
    ptx::sync_threads(kScannerBarrier, kGroup);  // all are there
    unit_[0] = unit_[1] = 1;
    load(segments_.offset(item.hv, item.n, first), S_);
    for (unsigned i = 1; i <= last; ++i) {
      pass(segments_.offset(item.hv, item.n, first + i), i, last);
      ptx::sync_threads(kScannerBarrier, kGroup);  // all have read the map
      if (threadIdx.x == 0 && i + 2 <= last) fetch(i + 2);
      if (i + 1 == last) release_two(0);
    }
    release_two(1);
  }
  // S <- M S + b. Of the product of two sums only that of both rests is left out: 2^-16 of it.
  __device__ void pass(const float4* offset, unsigned i, unsigned last) {
    float b[64];
    load(offset, b);  // comes in the meantime
    unsigned leading[8][4], rest[8][4];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const Split x(S_[2 * j], S_[2 * j + 1]);
      leading[j / 4][j % 4] = x.leading, rest[j / 4][j % 4] = x.rest;
    }
    ptx::wait_barrier(map_barrier(i), (i - 1) / 2 % 2);
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
#pragma unroll
    for (int j = 0; j < 64; ++j) S_[j] += b[j];
  }

  const Segments& segments_;
};

}  // namespace kda::cuda::sm90
