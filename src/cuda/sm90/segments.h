// A call cut into segments: where their maps are, and the scan over them.
//
// The state behind a segment is M S + b, S the state before it (math.md 6). Columns of the state are independent, so the
// ordinary scan makes both: b is the state from zeros, M the one from the identity where v is 0. The first segment of a
// sequence begins with the initial state: its b is the state behind it, and it needs no M.
#pragma once
#include "cuda/sm90/pair.h"

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

// M^T lies as the scan multiplies by it: two halves of 64 rows; of a half, leading bf16 and the rest of each number as tiles of
// 128 channels.
constexpr unsigned kMapBytes = kSize * kSize * 4, kRestOfMap = 2 * kHalf;
static_assert(kMapBytes / 2 <= Stage::bytes);

struct Segments {
  Cut all, mapped;  // segments; segments but the last of each sequence
  char* M;          // [HV][mapped]
  float4* b;        // [HV][mapped][16][256 threads of a pair's scan]

  static uint64_t bytes(const ForwardProblem& p, unsigned tokens) {
    return p.HV * uint64_t{Cut(p, tokens, false).total} * 2 * kMapBytes;
  }
  Segments(const ForwardProblem& p, unsigned tokens, void* workspace)
      : all(p, tokens, true), mapped(p, tokens, false), M(static_cast<char*>(workspace)) {
    b = reinterpret_cast<float4*>(M + p.HV * uint64_t{mapped.total} * kMapBytes);
  }
  __device__ char* map(unsigned hv, unsigned segment) const {
    return M + (static_cast<uint64_t>(hv) * mapped.total + segment) * kMapBytes;
  }
  // States lie as the scan's threads have them: the first four elements of a thread, 4 kB to the next four.
  __device__ float4* offset(unsigned hv, unsigned segment) const {
    return b + (static_cast<uint64_t>(hv) * mapped.total + segment) * (kMapBytes / 16) + ptx::rank() * kGroup +
           threadIdx.x % kGroup;
  }
};

// ---- the scan of a segment ----

template <class T, bool kValues = true>
class SegmentScan : public Scan<T, kValues> {
  using Base = Scan<T, kValues>;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_, Base::first_column;

 public:
  __device__ SegmentScan(const Call& call, const Segments& segments, unsigned memory)
      : Base(call, memory), segments_(segments) {}

  // The first segment of a sequence: outputs, and the state behind it.
  __device__ void begin(const Piece& at, const Sequence& s, unsigned number) {
    open();
    Base::load(s, at.item.hv);
    Base::remember(s, at.item.hv);
    scan(at);
    unscale();
    store(segments_.offset(at.item.hv, number));
    Base::finish_outputs();
  }
  // b of segment `number`, or M where there are no values.
  __device__ void map(const Piece& at, unsigned number) {
    open();
    // No column of M grows, most shrink: in these units they stay large enough for long.
    unit_[0] = unit_[1] = kValues ? 1 : 0x1p-6f;
#pragma unroll
    for (int i = 0; i < 64; ++i)
      S_[i] = !kValues && Base::column(i / 2 % 2) == Base::channel(i / 4) + i % 2 ? 0x1p6f : 0;
    Base::scan_state((at.end - at.first) / kRows);
    unscale();
    if constexpr (kValues) store(segments_.offset(at.item.hv, number));
    else store_map(segments_.map(at.item.hv, number));
  }
  // Any other segment: outputs, and the last one's states. first: number of the sequence's first.
  __device__ void run(const Piece& at, const Sequence& s, unsigned first) {
    if (at.index == 0) {
      Base::load(s, at.item.hv);
    } else {
      const auto fetch = [&](unsigned i) { fetch_map(segments_.map(at.item.hv, first + i), i); };
      if (threadIdx.x == 0) fetch_first(fetch, at.index);
      unit_[0] = unit_[1] = 1;
      load(segments_.offset(at.item.hv, first), S_);
      for (unsigned i = 1; i < at.index; ++i) {
        pass(segments_.offset(at.item.hv, first + i), i);
        ptx::sync_threads(kScannerBarrier, kGroup);  // all have read the map
        if (threadIdx.x == 0 && i + 2 < at.index) fetch(i + 2);
      }
    }
    open();
    Base::remember(s, at.item.hv);
    scan(at);
    // (The sequence is looked up again: registers are scarce in between.)
    const Sequence again = sequence_at(call_.p, call_.p.args.in, call_.p.args.states, at.item.n);
    if (at.end == again.length) Base::keep(again, at.item.hv, at.end);
    Base::finish_outputs();
  }

 private:
  // From here on the ring is filled.
  __device__ void open() const {
    if (lane_ == 0) ring_.open();
  }
  __device__ __forceinline__ void scan(const Piece& at) {
    unsigned number = 0;
    Base::scan(at.item, at.first, at.end, number);
  }
  __device__ void unscale() {
#pragma unroll
    for (int i = 0; i < 64; ++i) S_[i] *= unit_[i / 2 % 2];
  }

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

  // Maps come into the ring's stages before it is opened, two at a time: map i into stages 2 (i % 2) and the next.
  __device__ unsigned map_stage(unsigned i, unsigned half) const { return ring_.stage(i % 2 * 2 + half); }
  __device__ unsigned map_barrier(unsigned i) const { return ring_.memory + Shared::maps + i % 2 * 8; }
  __device__ void fetch_map(const char* from, unsigned i) const {  // by one thread
    ptx::arrive_expecting(map_barrier(i), kMapBytes);
    for (const unsigned half : {0u, 1u})
      ptx::copy_bulk_to_shared(map_stage(i, half), from + half * (kMapBytes / 2), kMapBytes / 2, map_barrier(i));
  }
  template <class Fetch>
  __device__ void fetch_first(const Fetch& fetch, unsigned end) const {
    ptx::fence_global_for_async();  // they were stored by threads
    for (unsigned i = 1; i < min(end, 3u); ++i) fetch(i);
  }
  // S <- M S + b. Of the product of two sums only that of both rests is left out: 2^-16 of it.
  __device__ void pass(const float4* offset, unsigned i) {
    unsigned leading[8][4], rest[8][4];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const Split x(S_[2 * j], S_[2 * j + 1]);
      leading[j / 4][j % 4] = x.leading, rest[j / 4][j % 4] = x.rest;
    }
    load(offset, S_);
    ptx::wait_barrier(map_barrier(i), (i - 1) / 2 % 2);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint64_t M =
          ptx::further(ptx::matrix_at(map_stage(i, k / 4), kHalf, 1024, ptx::Swizzle::k128), k % 4 * 16 * kRowBytes);
      ptx::wgmma<__nv_bfloat16, true>(S_, leading[k], M, true);
      ptx::wgmma<__nv_bfloat16, true>(S_, rest[k], M, true);
      ptx::wgmma<__nv_bfloat16, true>(S_, leading[k], ptx::further(M, kRestOfMap), true);
    }
    ptx::commit_products();
    ptx::wait_for_products<0>();
  }

  const Segments& segments_;
};

}  // namespace kda::cuda::sm90
