// A call cut into segments: where images of chunks and maps of segments are, and the scan over them.
//
// The state behind a segment is M S + b, S the state before it (math.md 6). Columns of the state are independent, so the
// ordinary scan makes both: b is the state from zeros, M the one from the identity where v is 0. The first segment of a
// sequence begins with the initial state: its b is the state behind it, and it needs no M.
#pragma once
#include "cuda/sm90/prepare.h"
#include "cuda/sm90/scan.h"

namespace kda::cuda::sm90 {

// Sequences cut every `tokens` tokens. Pieces of all sequences are numbered so that nobody has to count those of the
// sequences before: with cu_seqlens, pieces of the one from token t0 on have numbers from t0 / tokens on, and one more for
// each sequence before it if their last pieces count. Some numbers belong to nobody.
struct Cut {
  unsigned tokens;
  unsigned each;   // pieces of a sequence, without cu_seqlens
  bool with_last;  // pieces that end a sequence count: every sequence has at least one
  unsigned total;

  Cut(const ForwardProblem& p, unsigned tokens, bool with_last) : tokens(tokens), with_last(with_last) {
    const int64_t pieces = std::max<int64_t>((p.T + tokens - 1) / tokens, 1);
    each = static_cast<unsigned>(with_last ? pieces : pieces - 1);
    total = static_cast<unsigned>(p.varlen ? p.T / tokens + (with_last ? p.N : 0) : p.N * each);
  }
  // The number of the first piece of sequence n.
  __device__ unsigned first(const ForwardProblem& p, unsigned n) const {
    if (!p.varlen) return n * each;
    return static_cast<unsigned>(within(int_at(p.args.in.cu_seqlens, n), 0, p.T)) / tokens + (with_last ? n : 0);
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
  bool exists;

  __device__ Piece(const ForwardProblem& p, const Cut& cut, unsigned number, unsigned hv) : item{0, hv} {
    if (number >= cut.total) {  // the rows behind the last sequence
      item.n = static_cast<unsigned>(p.N), index = first = end = 0, exists = true;
      return;
    }
    item.n = cut.sequence(p, number), index = number - cut.first(p, item.n);
    const int64_t length = sequence_at(p, p.args.in, item.n).length, begin = static_cast<int64_t>(index) * cut.tokens;
    exists = cut.with_last ? index == 0 || begin < length : begin + cut.tokens < length;
    first = static_cast<unsigned>(begin), end = static_cast<unsigned>(min(begin + cut.tokens, length));
  }
};

// ---- in the workspace ----

// An image has the scan's operands of a chunk, without v, as they lie in a stage.
constexpr unsigned kImageBytes = Stage::end;
// f(first, end) for what outputs need of it, or maps.
template <bool kMaps, class F>
__device__ void for_parts(const F& f) {
  if constexpr (kMaps) {
    f(Stage::k, Stage::k + kTileBytes), f(Stage::k + kHalf, Stage::k + kHalf + kTileBytes);
    f(Stage::kg, Stage::Aqk), f(Stage::kg + kHalf, Stage::end);
  } else {
    f(0, kImageBytes);
  }
}

// M^T lies as the scan multiplies by it: two halves of 64 rows, each as large as a stage may be; of a half, leading bf16
// and the rest of each number as tiles of 128 channels.
constexpr unsigned kMapBytes = kSize * kSize * 4, kRestOfMap = 2 * kHalf;
static_assert(kMapBytes / 2 <= Shared::kStageBytes<kSize>);

struct Segments {
  Cut chunks, all, mapped;  // images; segments; segments but the last of each sequence
  char *images, *M;         // [HV][chunks], [HV][mapped]
  float4* b;                // [HV][mapped][16][256 threads of the scan]

  static uint64_t bytes(const ForwardProblem& p, unsigned tokens) {
    return p.HV *
           (uint64_t{Cut(p, kRows, true).total} * kImageBytes + uint64_t{Cut(p, tokens, false).total} * 2 * kMapBytes);
  }
  Segments(const ForwardProblem& p, unsigned tokens, void* workspace)
      : chunks(p, kRows, true), all(p, tokens, true), mapped(p, tokens, false), images(static_cast<char*>(workspace)) {
    M = images + p.HV * uint64_t{chunks.total} * kImageBytes;
    b = reinterpret_cast<float4*>(M + p.HV * uint64_t{mapped.total} * kMapBytes);
  }
  __device__ char* image(unsigned hv, unsigned chunk) const {
    return images + (static_cast<uint64_t>(hv) * chunks.total + chunk) * kImageBytes;
  }
  __device__ char* map(unsigned hv, unsigned segment) const {
    return M + (static_cast<uint64_t>(hv) * mapped.total + segment) * kMapBytes;
  }
  // States lie as the scan's threads have them: the first four elements of a thread, 4 kB to the next four.
  __device__ float4* offset(unsigned hv, unsigned segment) const {
    return b + (static_cast<uint64_t>(hv) * mapped.total + segment) * (kMapBytes / 16) + threadIdx.x;
  }
  // The initial state, in the place of the first M: where it comes from, the last segment may have stored the final one.
  __device__ float4* start(unsigned hv, unsigned segment) const {
    return reinterpret_cast<float4*>(map(hv, segment)) + threadIdx.x;
  }
};

// ---- chunks to prepare, handed on within a block ----

// Images of one value head of a sequence.
struct Task {
  Item item;
  unsigned chunk, image;  // of the sequence; of the head
  bool exists;            // else there are no more
};

// In shared memory: task i is in tasks[i % kTasks], and is chunk i of the block's ring.
struct Queue {
  static constexpr unsigned kTasks = 10;  // three for each preparer, and one
  Task tasks[kTasks];
  unsigned long long found[kTasks], freed[kTasks];  // mbarriers: it is there; it is done

  __device__ static Queue& here() { return *reinterpret_cast<Queue*>(shared_memory() + Shared::tasks); }
  __device__ static void start() {
    for (unsigned i = 0; i < kTasks; ++i)
      ptx::init_barrier(barrier(here().found, i), 1), ptx::init_barrier(barrier(here().freed, i), 1);
  }
  // By one thread each, in order.
  __device__ static void hand_on(unsigned i, const Task& task) {
    if (i >= kTasks) ptx::wait_barrier(barrier(here().freed, i), parity(i - kTasks));
    here().tasks[i % kTasks] = task;
    ptx::arrive(barrier(here().found, i));
  }
  __device__ static Task take(unsigned i) {
    ptx::wait_barrier(barrier(here().found, i), parity(i));
    return here().tasks[i % kTasks];
  }
  __device__ static void free(unsigned i) { ptx::arrive(barrier(here().freed, i)); }

 private:
  __device__ static unsigned barrier(const unsigned long long* barriers, unsigned i) {
    return ptx::shared_address(barriers + i % kTasks);
  }
  __device__ static unsigned parity(unsigned i) { return i / kTasks % 2; }
};
static_assert(Shared::tasks + sizeof(Queue) <= Shared::stages);

// Every third one, for a preparer.
class TaskSource {
 public:
  static constexpr unsigned kColumns = 0;
  static constexpr unsigned kPreparers = 3;
  static constexpr int kStep = -static_cast<int>(kPreparers);
  __device__ explicit TaskSource(unsigned group) : number_(group) {}
  __device__ void next(const Call& call, Plan& p) {
    const Task task = Queue::take(number_);
    if (!task.exists) return;
    const Sequence s = sequence_at(call.p, call.p.args.in, task.item.n);
    p.set(task.item.hv, Plan::key_head(call.p, task.item.hv), static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0),
          static_cast<unsigned>(s.length), task.chunk);
    p.number = number_;
    number_ += kPreparers;
  }

 private:
  unsigned number_;
};

// ---- the scan's operands, by one warp ----

constexpr unsigned kFullArrivals = 32 + 1;  // of a stage: of all lanes, and of the one that promises bytes

class Producer {
 public:
  __device__ Producer(const Call& call, const Segments& segments, const Ring<kSize>& ring)
      : call_(call), segments_(segments), ring_(ring) {}

  // Maps first .. end - 1 of a head, each in two stages.
  __device__ void maps(unsigned hv, unsigned first, unsigned end) {
    for (unsigned i = 2 * first; i < 2 * end; ++i, ++number_) {
      ring_.wait_empty(number_);
      if (lane() == 0) {
        ptx::arrive_expecting(ring_.full(number_), kMapBytes / 2);
        ptx::copy_bulk_to_shared(ring_.stage(number_), segments_.map(hv, i / 2) + i % 2 * (kMapBytes / 2),
                                 kMapBytes / 2, ring_.full(number_));
      }
      ptx::arrive(ring_.full(number_));
    }
  }
  // Chunks of a segment; values: v as well.
  template <bool kMaps>
  __device__ void chunks(const Piece& at, bool values) {
    const Sequence s = sequence_at(call_.p, call_.p.args.in, at.item.n);
    const char* image = segments_.image(at.item.hv, segments_.chunks.first(call_.p, at.item.n) + at.first / kRows);
    for (unsigned t = at.first; t < at.end; t += kRows, image += kImageBytes, ++number_) {
      ring_.wait_empty(number_);
      if (lane() == 0) {
        unsigned bytes = 0;
        for_parts<kMaps>([&](unsigned first, unsigned end) { bytes += end - first; });
        ptx::arrive_expecting(ring_.full(number_), bytes);
        for_parts<kMaps>([&](unsigned first, unsigned end) {
          ptx::copy_bulk_to_shared(ring_.stage(number_) + first, image + first, end - first, ring_.full(number_));
        });
      }
      if (values) fetch_values(s, t, min(at.end - t, kRows), at.item.hv);
      ptx::arrive_after_copies(ring_.full(number_));
    }
  }

 private:
  __device__ static unsigned lane() { return threadIdx.x % 32; }
  // `rows` of v; zeros behind the last.
  __device__ void fetch_values(const Sequence& s, unsigned t, unsigned rows, unsigned hv) const {
    const unsigned row = lane() / 16, piece = lane() % 16;
    const View& v = call_.x.v;
    const char* from = v.at(static_cast<unsigned>(s.b), static_cast<unsigned>(s.t0) + t + row, hv) + piece * 16;
    const unsigned to = ring_.stage(number_) + Stage::v + piece / 8 * kTileBytes + row * kRowBytes;
#pragma unroll
    for (unsigned i = 0; i < kRows / 2; ++i, from += 2 * static_cast<uint64_t>(v.stride1))
      ptx::copy16(to + i * 2 * kRowBytes + ((piece % 8 ^ (row + 2 * i) % 8) << 4), from, row + 2 * i < rows ? 16 : 0);
  }

  const Call& call_;
  const Segments& segments_;
  const Ring<kSize> ring_;
  unsigned number_ = 0;
};

// ---- the scan of a segment ----

template <class T>
class SegmentScan : public Scan<T, kSize> {
  using Base = Scan<T, kSize>;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_, Base::first_column;

 public:
  __device__ SegmentScan(const Call& call, const Segments& segments, unsigned memory)
      : Base(call, memory), segments_(segments) {}

  // M of a segment, or b: number `to`.
  __device__ void map(const Piece& at, Sequence s, bool linear, unsigned to) {
    if (at.index > 0 || linear) s.initial = false;  // zeros
    Base::load(s, at.item.hv);
    if (at.index == 0) store(segments_.start(at.item.hv, to));
    if (linear) {
      // No column grows, most shrink: in these units they stay large enough for long.
      unit_[0] = unit_[1] = 0x1p-6f;
#pragma unroll
      for (int i = 0; i < 64; ++i) S_[i] = Base::column(i / 2 % 2) == Base::channel(i / 4) + i % 2 ? 0x1p6f : 0;
    }
    unsigned number = 0;
    this->template scan<false>(at.item, at.first, at.end, number);
#pragma unroll
    for (int i = 0; i < 64; ++i) S_[i] *= unit_[i / 2 % 2];
    if (linear) store_map(segments_.map(at.item.hv, to));
    else store(segments_.offset(at.item.hv, to));
  }

  // Outputs and states. first_map: number of the sequence's first.
  __device__ void run(const Piece& at, const Sequence& s, unsigned first_map) {
    unsigned number = 0;
    unit_[0] = unit_[1] = 1;
    Base::remember(s, at.item.hv);
    const bool last = at.end == s.length;
    if (at.index == 0) {
      if (last) Base::load(s, at.item.hv);
      else load(segments_.start(at.item.hv, first_map), S_);
    } else {
      load(segments_.offset(at.item.hv, first_map), S_);
      for (unsigned i = 1; i < at.index; ++i) pass(at.item.hv, first_map + i, number);
    }
    this->template scan<true>(at.item, at.first, at.end, number);
    // (The sequence is looked up again: registers are scarce in between.)
    if (last) Base::keep(sequence_at(call_.p, call_.p.args.in, call_.p.args.states, at.item.n), at.item.hv, at.end);
    Base::finish_outputs();
  }

 private:
  // Two numbers as two bf16 each, the leading one and the rest: 16 bits of them together, in the range of f32.
  struct Split {
    unsigned leading, rest;
    __device__ Split(float x, float y) : leading(ptx::pack<__nv_bfloat16>(x, y)) {
      rest = ptx::pack<__nv_bfloat16>(x - __uint_as_float(leading << 16), y - __uint_as_float(leading & 0xffff0000u));
    }
  };

  __device__ void store_map(char* to) const {
    to += first_column() / 64 * (kMapBytes / 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned row = first_column() % 64 + lane_ / 4 + i % 2 * 8, piece = i / 2;
      const Split x(S_[2 * i], S_[2 * i + 1]);
      char* at = to + piece / 8 * kHalf + row * kRowBytes + ((piece % 8 ^ row % 8) << 4) + lane_ % 4 * 4;
      *reinterpret_cast<unsigned*>(at) = x.leading, *reinterpret_cast<unsigned*>(at + kRestOfMap) = x.rest;
    }
  }
  __device__ void store(float4* to) const {
#pragma unroll
    for (int i = 0; i < 16; ++i, to += 2 * kGroup)
      *to = make_float4(S_[4 * i], S_[4 * i + 1], S_[4 * i + 2], S_[4 * i + 3]);
  }
  __device__ static void load(const float4* from, float (&x)[64]) {
#pragma unroll
    for (int i = 0; i < 16; ++i, from += 2 * kGroup) {
      const float4 four = *from;
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  }
  // S <- M S + b. Of the product of two sums only that of both rests is left out: 2^-16 of it.
  __device__ void pass(unsigned hv, unsigned segment, unsigned& number) {
    unsigned leading[8][4], rest[8][4];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const Split x(S_[2 * i], S_[2 * i + 1]);
      leading[i / 4][i % 4] = x.leading, rest[i / 4][i % 4] = x.rest;
    }
    // b comes while the products run.
    float b[64], product[64];
    load(segments_.offset(hv, segment), b);
    ring_.wait_full(number), ring_.wait_full(number + 1);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint64_t M = ptx::further(ptx::matrix_at(ring_.stage(number + k / 4), kHalf, 1024, ptx::Swizzle::k128),
                                      k % 4 * 16 * kRowBytes);
      ptx::wgmma<__nv_bfloat16, true>(product, leading[k], M, k > 0);
      ptx::wgmma<__nv_bfloat16, true>(product, rest[k], M, true);
      ptx::wgmma<__nv_bfloat16, true>(product, leading[k], ptx::further(M, kRestOfMap), true);
    }
    ptx::commit_products();
    ptx::wait_for_products<0>();
    if (lane_ == 0) ptx::arrive(ring_.empty(number)), ptx::arrive(ring_.empty(number + 1));
#pragma unroll
    for (int i = 0; i < 64; ++i) S_[i] = product[i] + b[i];
    number += 2;
  }

  const Segments& segments_;
};

}  // namespace kda::cuda::sm90
