// The scan of a block of delta_h and bwd_delta_h on Blackwell: 64 value columns of a head's state, chunk after chunk.
//
//   delta_h, first chunk first      v_new = u - w S              S <- Diag(ell) S + kg^T v_new
//   bwd_delta_h, last chunk first   dv_new = dv_local + kg dS    dS <- Diag(ell) dS + scale qG^T d_o - w^T dv_new
//
// The code has the names of delta_h. The state waits in registers while a chunk begins. A copy, rounded to bf16, lies
// in shared memory as h has it, is an operand, and leaves for h. The state itself decays and goes to tensor memory,
// where the last products add to it. If it is V-first, a row of it is a column of V, otherwise a channel.
//
//   1 wait for the chunk's tiles; ell; the copy of S; scale d_o        barrier: operands are there
//   2 tcgen05.mma: w S; TMA: S to h, the next chunk's tiles; meanwhile S decays and goes to tensor memory
//   3 v_new = u - w S in place of u                                    barrier: v_new and S are there
//   4 tcgen05.mma: S += kg^T v_new; meanwhile v_new to memory
//   5 S to registers
#pragma once
#include "cuda/blackwell_stages/tiles.h"
#include "cuda/call/launch.h"
#include "cuda/stages/boxes.h"

namespace kda::cuda::sm100 {

constexpr unsigned kScanColumns = 64;  // of V, of a block

// Tiles are swizzled (tiles.h).
struct alignas(1024) ForwardStage {  // a chunk's
  WideTile left, right;              // w, kg
  WideHalf u;                        // then v_new
  float G[2 * 64];                   // the last row
};
struct alignas(1024) ReverseStage {
  WideTile left, right, qG;  // kg, w, qG
  WideHalf u, d_o;           // dv_local, then dv_new; d_o, then scale d_o
  float G[2 * 64];
};
template <bool kReversed>
struct alignas(1024) ScanShared {
  using Stage = std::conditional_t<kReversed, ReverseStage, ForwardStage>;
  Stage stages[2];
  WideTile S;  // the copy. V-first: a line for each column. K-first: a line for each channel
  float ell[2 * 64];
  // mbarriers. full: a stage is there; the thread that asks for it arrives, all threads wait. done: products are done.
  uint64_t full[2], done;
  unsigned tensors;  // the address of tensor memory
};
static_assert(2 * (sizeof(ScanShared<false>) + 1024) <= 228 * 1024, "two blocks share an SM");
static_assert(sizeof(ScanShared<true>) <= 227 * 1024, "what a block may have");
#define KDA_SCAN(member) static_cast<unsigned>(offsetof(Shared, member))
#define KDA_SCAN_STAGE(member) static_cast<unsigned>(offsetof(Stage, member))

// Columns of tensor memory.
struct ScanTensors {
  static constexpr unsigned state = 0;             // S, f32: K or 64 columns
  static constexpr unsigned predictions = 2 * 64;  // w S, f32: 64 columns
  static constexpr unsigned columns = 256;         // that are allocated: two blocks share an SM
};

// Names are those of delta_h; backward left is kg, right w, u dv_local, and h dh.
struct ScanMaps {
  CUtensorMap left{}, right{}, u{}, h{}, qG{}, d_o{};
};
struct ScanCall {
  Chunks chunks;
  Rows G, v_new, first, last;  // first, last: h0 and hT; backward dhT and dh0
  int64_t h_rows;              // 0: h is not wanted
  unsigned V;
  float scale;
};

// What a thread does. kParts: K is 64 of them.
template <bool kVFirst, unsigned kParts, bool kReversed>
class Scan {
  using Shared = ScanShared<kReversed>;
  using Stage = typename Shared::Stage;

 public:
  __device__ Scan(const ScanCall& call, const ScanMaps& maps, const Sequence& s, unsigned hv, unsigned tile)
      : c_(call),
        maps_(maps),
        s_(s),
        hv_(hv),
        v0_(tile * kScanColumns),
        count_(static_cast<unsigned>((s.length + kChunk - 1) / kChunk)),
        base_(ptx::shared_address(shared_memory())),
        warp_(threadIdx.x / 32),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4) {}

  __device__ void run() {
    take_state();
    const int64_t first = c_.h_rows > 0 ? c_.chunks.first_row(s_.n) : 0;
    if (threadIdx.x == 0)
      ptx::init_barrier(base_ + KDA_SCAN(full[0]), 1), ptx::init_barrier(base_ + KDA_SCAN(full[1]), 1);
    Tensors tensors(base_ + KDA_SCAN(tensors), base_ + KDA_SCAN(done), ScanTensors::columns);
    if (Tensors::is_issuer() && count_ > 0) fetch(0);
    for (unsigned i = 0; i < count_; ++i) {
      ptx::wait_barrier(base_ + KDA_SCAN(full[0]) + i % 2 * 8, i / 2 % 2);
      prepare(i);
      Tensors::before_sync();
      __syncthreads();  // S and ell are there, and tails are cleared; the stage before is read
      Tensors::after_sync();
      if (Tensors::is_issuer()) {
        start_predictions(tensors, i), send_state(first + index(i));
        if (i + 1 < count_) fetch(i + 1);
      }
      decay(tensors);
      tensors.wait();
      correct(tensors, i);
      if (Tensors::is_issuer()) ptx::wait_for_bulk_reads<0>();
      Tensors::before_sync();
      __syncthreads();  // v_new is there, and S in tensor memory; the copy of S has left for h
      Tensors::after_sync();
      if (Tensors::is_issuer()) start_update(tensors, i);
      if (c_.v_new.data) store_values(i);
      tensors.wait();
      load_state(tensors);
    }
    keep_state();
  }

 private:
  static constexpr unsigned K = kParts * kPartSize;

  __device__ unsigned stage(unsigned i) const { return base_ + KDA_SCAN(stages) + i % 2 * sizeof(Stage); }
  // The i-th chunk of the scan: its number in the sequence, first token, and rows.
  __device__ unsigned index(unsigned i) const { return kReversed ? count_ - 1 - i : i; }
  __device__ int64_t token(unsigned i) const { return s_.t0 + int64_t{index(i)} * kChunk; }
  __device__ unsigned rows(unsigned i) const {
    return static_cast<unsigned>(min(s_.length - int64_t{index(i)} * kChunk, int64_t{kChunk}));
  }

  // ---- the state in registers: part p, fragment n of eight columns ----

  // Calls f(line, element, x, y) for all pairs of neighbours of a line, as they lie in memory.
  template <class F>
  __device__ void for_each_pair(const F& f) {
#pragma unroll
    for (unsigned p = 0; p < kParts; ++p)
#pragma unroll
      for (unsigned n = 0; n < 8; ++n)
#pragma unroll
        for (unsigned r = 0; r < 2; ++r)
          f(line(p) + g_ + 8 * r, (kVFirst ? p * kPartSize : 0) + 8 * n + 2 * t_, S_[p][4 * n + 2 * r],
            S_[p][4 * n + 2 * r + 1]);
  }
  // The first of the warp's 16 lines in part p. V-first: columns of the block. K-first: channels.
  __device__ unsigned line(unsigned p) const { return kVFirst ? 16 * warp_ : 16 * (kParts * warp_ + p); }
  __device__ unsigned in_tensors(const Tensors& tensors, unsigned p) const {
    return kVFirst ? tensors.own(ScanTensors::state + p * kPartSize) : tensors.own(ScanTensors::state, p);
  }
  // Where line l of the block is in the sequence's state.
  __device__ char* line_of(const Rows& x, unsigned l) const { return x.at(s_.n, kVFirst ? v0_ + l : l, hv_); }
  // The block's first element of a line, and behind its last.
  __device__ unsigned first() const { return kVFirst ? 0 : v0_; }
  __device__ int limit() const { return static_cast<int>(kVFirst ? K : v0_ + kScanColumns); }

  __device__ void take_state() {
    for_each_pair([&](unsigned l, unsigned e, float& x, float& y) {
      float two[2] = {0, 0};
      if (c_.first.data)
        stages::load_values(c_.first, line_of(c_.first, l), static_cast<int>(first() + e), limit(), two);
      x = two[0], y = two[1];
    });
  }
  __device__ void keep_state() {
    if (!c_.last.data) return;
    for_each_pair([&](unsigned l, unsigned e, float x, float y) {
      stages::store_pair(c_.last, line_of(c_.last, l), static_cast<int>(first() + e), limit(), x, y);
    });
  }
  __device__ void load_state(const Tensors& tensors) {
#pragma unroll
    for (unsigned p = 0; p < kParts; ++p) ptx::load_tmem_fragments(S_[p], in_tensors(tensors, p));
    ptx::wait_for_tmem_loads();
  }
  __device__ void decay(const Tensors& tensors) {
    const unsigned ell = base_ + KDA_SCAN(ell);
    for_each_pair([&](unsigned l, unsigned e, float& x, float& y) {
      const float2 factor = kVFirst ? ptx::load_shared_f32x2(ell + 4 * e)
                                    : float2{ptx::load_shared_f32(ell + 4 * l), ptx::load_shared_f32(ell + 4 * l)};
      x *= factor.x, y *= factor.y;
    });
#pragma unroll
    for (unsigned p = 0; p < kParts; ++p) ptx::store_tmem_fragments(in_tensors(tensors, p), S_[p]);
  }

  // ---- a chunk ----

  // Starts the copies of a chunk. By the first warp, as all that begins something.
  __device__ void fetch(unsigned i) const {
    if (!ptx::elect()) return;
    const unsigned full = base_ + KDA_SCAN(full[0]) + i % 2 * 8, to = stage(i), last = rows(i) - 1;
    constexpr unsigned kKeys = kReversed ? 3 : 2, kValues = kReversed ? 2 : 1;
    ptx::arrive_expecting(full, (kKeys * kParts + kValues) * kWideHalf + K * sizeof(float));
    const auto copy = [&](unsigned at, const CUtensorMap& map, unsigned column) {
      ptx::copy_tile(to + at, map, column, hv_, static_cast<unsigned>(token(i)), static_cast<unsigned>(s_.b), full);
    };
    const auto copy_keys = [&](unsigned at, const CUtensorMap& map) {
      for (unsigned p = 0; p < kParts; ++p) copy(at + p * kWideHalf, map, p * kPartSize);
    };
    copy_keys(KDA_SCAN_STAGE(left), maps_.left), copy(KDA_SCAN_STAGE(u), maps_.u, v0_);
    copy_keys(KDA_SCAN_STAGE(right), maps_.right);
    if constexpr (kReversed) copy_keys(KDA_SCAN_STAGE(qG), maps_.qG), copy(KDA_SCAN_STAGE(d_o), maps_.d_o, v0_);
    ptx::copy_bulk_to_shared(to + KDA_SCAN_STAGE(G), c_.G.at(s_.b, token(i) + last, hv_), K * sizeof(float), full);
  }
  // The copy of S, ell, scale d_o, and zeros behind the chunk's end.
  __device__ void prepare(unsigned i) {
#pragma unroll
    for (unsigned p = 0; p < kParts; ++p) put_rows(base_ + KDA_SCAN(S) + (kVFirst ? p * kWideHalf : 0), line(p), S_[p]);
    if (threadIdx.x < K)
      ptx::store_shared_f32(base_ + KDA_SCAN(ell) + 4 * threadIdx.x,
                            ptx::exp2(ptx::load_shared_f32(stage(i) + KDA_SCAN_STAGE(G) + 4 * threadIdx.x)));
    if (rows(i) < kChunk) clear_tail(stage(i) + KDA_SCAN_STAGE(right), rows(i), K);
    if constexpr (kReversed) {
      scale_outputs(stage(i) + KDA_SCAN_STAGE(d_o), rows(i));
      if (rows(i) < kChunk) clear_tail(stage(i) + KDA_SCAN_STAGE(qG), rows(i), K);
    }
    ptx::fence_shared_for_async();  // products and the copy to h read what was written
  }
  // d_o becomes scale d_o, and 0 behind the chunk's end.
  __device__ void scale_outputs(unsigned tile, unsigned rows) const {
    const auto scaled = [&](unsigned two) {
      return ptx::pack<bf16>(c_.scale * __uint_as_float(two << 16), c_.scale * __uint_as_float(two & 0xffff0000u));
    };
    for (unsigned i = threadIdx.x; i < kChunk * kScanColumns / 8; i += kGroup) {
      const unsigned row = i % kChunk, at = tile + swizzled(row, i / kChunk, 0);
      const uint4 x = ptx::load_shared4(at);
      ptx::store_shared4(at, row < rows ? make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w)) : uint4{});
    }
  }
  // Begins w S.
  __device__ void start_predictions(const Tensors& tensors, unsigned i) const {
    if (!ptx::elect()) return;
    const unsigned S = base_ + KDA_SCAN(S);
    tensors.multiply(ScanTensors::predictions, Operand::of_rows(stage(i) + KDA_SCAN_STAGE(left), kWideHalf),
                     kVFirst ? Operand::of_rows(S, kWideHalf) : Operand::of_lines(S, 0), kChunk, kScanColumns,
                     K / kStepSize, false);
    tensors.commit();
  }
  // Starts the copy of S to a row of h.
  __device__ void send_state(int64_t row) const {
    if (row >= c_.h_rows || !ptx::elect()) return;  // cu_seqlens are not checked
    for (unsigned p = 0; p < (kVFirst ? kParts : 1); ++p)
      ptx::store_tile(maps_.h, kVFirst ? p * kPartSize : v0_, kVFirst ? v0_ : 0, hv_, static_cast<unsigned>(row),
                      base_ + KDA_SCAN(S) + p * kWideHalf);
    ptx::commit_bulk();
  }
  // v_new = u - w S, in place of u, and 0 behind the chunk's end.
  __device__ void correct(const Tensors& tensors, unsigned i) const {
    constexpr float kSign = kReversed ? 1 : -1;
    float wS[32];
    ptx::load_tmem_fragments(wS, tensors.own(ScanTensors::predictions)), ptx::wait_for_tmem_loads();
#pragma unroll
    for (unsigned r = 0; r < 2; ++r) {
      const unsigned row = 16 * warp_ + g_ + 8 * r;
#pragma unroll
      for (unsigned n = 0; n < 8; ++n) {
        const unsigned at = stage(i) + KDA_SCAN_STAGE(u) + swizzled(row, n, 0) + 4 * t_, u = ptx::load_shared(at);
        const float x = __uint_as_float(u << 16) + kSign * wS[4 * n + 2 * r],
                    y = __uint_as_float(u & 0xffff0000u) + kSign * wS[4 * n + 2 * r + 1];
        ptx::store_shared(at, row < rows(i) ? ptx::pack<bf16>(x, y) : 0);
      }
    }
    ptx::fence_shared_for_async();  // products read it
  }
  // Begins S += kg^T v_new; backward dS += qG^T (scale d_o) and dS -= w^T dv_new.
  __device__ void start_update(const Tensors& tensors, unsigned i) const {
    if (!ptx::elect()) return;
    const auto add = [&](unsigned keys, unsigned values, bool negated) {
      const Operand k = Operand::of_lines(stage(i) + keys, kWideHalf), v = Operand::of_lines(stage(i) + values, 0);
      tensors.multiply(ScanTensors::state, kVFirst ? v : k, kVFirst ? k : v, kVFirst ? kScanColumns : K,
                       kVFirst ? K : kScanColumns, kChunk / kStepSize, true, negated);
    };
    if constexpr (kReversed) add(KDA_SCAN_STAGE(qG), KDA_SCAN_STAGE(d_o), false);
    add(KDA_SCAN_STAGE(right), KDA_SCAN_STAGE(u), kReversed);
    tensors.commit();
  }
  __device__ void store_values(unsigned i) const {
    char* const to = c_.v_new.at(s_.b, token(i), hv_) + v0_ * sizeof(bf16);
    store_rows(stage(i) + KDA_SCAN_STAGE(u), to, c_.v_new.token, rows(i), kScanColumns);
  }

  const ScanCall& c_;
  const ScanMaps& maps_;
  const Sequence& s_;
  const unsigned hv_, v0_, count_, base_, warp_, g_, t_;
  float S_[kParts][32];
};

template <bool kVFirst, unsigned kParts, bool kReversed>
__global__ void __launch_bounds__(kGroup, kReversed ? 1 : 2)
    scan_kernel(const __grid_constant__ ScanCall call, const __grid_constant__ ScanMaps maps,
                const __grid_constant__ Blocks blocks) {
  wait_for_stream();
  const Place at(blocks);
  if (at.n >= blocks.rows) return;  // the grid's last rows
  const Sequence s = call.chunks.sequence(at.n);
  if (s.live) return Scan<kVFirst, kParts, kReversed>(call, maps, s, at.hv, at.tile).run();
  if (at.tile > 0) return;
  ChunkAt chunk{.n = s.n, .b = s.b};  // tokens of no sequence
  for (int64_t t = 0; t < s.length; t += kChunk) {
    chunk.t0 = s.t0 + t, chunk.rows = static_cast<int>(min(s.length - t, int64_t{kChunk}));
    stages::zero_rows(call.v_new, chunk, at.hv, static_cast<int>(call.V));
  }
}

// ---- a call, on the host ----

// The map of states of chunks: the box is what a block has of a line's 64 numbers.
template <class Problem>
CUtensorMap scan_states(const Problem& p, const kda_tensor& h) {
  const int64_t lines = p.in.state_layout == KDA_STATE_V_FIRST ? kScanColumns : p.K;
  return stages::boxes_of_states(h, lines);
}

template <bool kReversed, class Problem>
void start_scan(const Problem& p, const ScanCall& c, const ScanMaps& maps) {
  const kda_exec& exec = p.args.exec;
  const int64_t tiles = p.V / kScanColumns;
  const auto start = [&]<bool kVFirst, unsigned kParts>() {
    launch<scan_kernel<kVFirst, kParts, kReversed>>(exec, Blocks::grid(p, tiles, 1), kGroup,
                                                    sizeof(ScanShared<kReversed>), c, maps, Blocks(p, tiles));
  };
  const bool both = p.K > kPartSize;
  if (p.in.state_layout == KDA_STATE_V_FIRST)
    both ? start.template operator()<true, 2>() : start.template operator()<true, 1>();
  else both ? start.template operator()<false, 2>() : start.template operator()<false, 1>();
}

}  // namespace kda::cuda::sm100
