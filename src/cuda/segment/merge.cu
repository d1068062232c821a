// Merge of segments (math.md 6), for sm_80 and newer: S <- M S + b, segment after segment, or S <- M^T S + d from the
// last to the first. Columns of a state are independent: a block has some columns of a head, and all segments. Pieces
// of a sequence (pieces.h) are merged in the same way: then S begins with the first one, and the last state is stored.
//
//   S      in shared memory, as sums of two tf32, transposed. Every warp reads all of it.
//   M      a warp has every eighth 16 of its rows, of which it reads each number once: from global memory to registers,
//          128 columns ahead, also across segments, because M depends on no state.
//   sums   products of 22 bits (products.h), whose larger parts and rests are added up apart; b comes last. Where
//          tensor cores add they cut off, always towards zero, which 64 maps in a row would show. So they add 16
//          channels of larger parts at most, and these sums are added in f32, rounded.
//
// A lane has four neighbouring columns of M at once. So S lies in such an order that these are the lane's channels of
// a product: place_of().
#include "cuda/call/state_rows.h"
#include "cuda/segment/declarations.h"
#include "cuda/segment/pieces.h"
#include "cuda/stages/products.h"

namespace kda::cuda {
namespace {

using Math = stages::Math<float>;
using stages::kWarps, stages::Sum;

constexpr int kThreads = stages::kThreads, kAhead = 8;  // 16 columns each, on their way
constexpr int kSlice = 16 * kAhead;

struct MergeCall {
  TypedView M, b, start, states;
  Pieces pieces;  // of sequences, whose last state alone is stored
  int32_t P, K, V;
  bool of_pieces, reverse, v_first;
  bool transposed;        // M
  bool wide;              // four columns of M an access
  Divisor blocks, heads;  // blocks of a head, heads of a sequence

  MergeCall(const Dims& d, const Pieces& pieces, const kda_tensor& maps, bool reverse, bool transposed, int32_t layout,
            int64_t blocks)
      : M(view_of(maps)),
        pieces(pieces),
        P(static_cast<int32_t>(d.N)),
        K(static_cast<int32_t>(d.K)),
        V(static_cast<int32_t>(d.V)),
        of_pieces(false),
        reverse(reverse),
        v_first(layout == KDA_STATE_V_FIRST),
        transposed(transposed),
        wide(!transposed && d.K % 4 == 0 && rows_aligned(maps, 4)),
        blocks(blocks),
        heads(d.HV) {}
};

// S^T: [column][channel], split into two tiles.
template <int kTiles, int kColumns>
struct MergeMemory {
  static constexpr int kStride = kTiles * kSlice + 4, kApart = kColumns * kStride * 4, kBytes = 2 * kApart;
};

// What a thread does. kTiles: 16 rows of M that a warp has at most.
template <int kTiles, int kColumns>
class Merge {
  using Memory = MergeMemory<kTiles, kColumns>;
  static constexpr int kParts = kColumns / 16;

 public:
  __device__ Merge(const MergeCall& call, unsigned n, unsigned hv, int v0, void* shared)
      : call_(call), n_(n), hv_(hv), v0_(v0), shared_(shared) {
    count_ = static_cast<int>(call.of_pieces ? call.pieces.count(n) : call.P);
    first_ = static_cast<int>(call.of_pieces ? call.pieces.first(n) : 0);
  }

  __device__ void run() {
    const bool of_pieces = call_.of_pieces;
    Sum S[kTiles][kParts];
    load(call_.start, of_pieces ? number(0) : 0, S);
    leave(of_pieces ? n_ : call_.reverse ? call_.P : 0, !of_pieces || count_ == 1, S);
    const int first = of_pieces;  // the first piece is where S begins
    if (first < count_) fetch_first(first);
    for (int i = first; i < count_; ++i) {
      Sum b[kTiles][kParts];
      load_offset(number(i), b);
      __syncthreads();  // S is there
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        if (row_of(tile) < call_.K) multiply(i, tile, b[tile], S[tile]);
      __syncthreads();  // all reads of S are done
      leave(of_pieces ? n_ : number(i) + !call_.reverse, !of_pieces || i + 1 == count_, S);
    }
  }

 private:
  // Segment i in the order of the merge.
  __device__ int number(int i) const { return first_ + (call_.reverse ? count_ - 1 - i : i); }
  __device__ static int row_of(int tile) { return (static_cast<int>(threadIdx.x) / 32 + kWarps * tile) * 16; }
  __device__ static int group() { return static_cast<int>(threadIdx.x % 32) / 4; }
  __device__ static int own() { return static_cast<int>(threadIdx.x % 4); }
  // Where a channel of S lies in its row: of each 16, the lane's four are 4 apart.
  __device__ static int place_of(int k) { return k / 16 * 16 + k % 4 * 4 + k % 16 / 4; }

  // Calls f(number, channel, column) for the lane's eight numbers of 16 x 16.
  template <class F>
  __device__ static void each(int tile, int part, const F& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) f(i, row_of(tile) + group() + i % 4 / 2 * 8, part * 16 + i / 4 * 8 + 2 * own() + i % 2);
  }
  __device__ char* at(const TypedView& t, int n, int k, int v) const {
    const unsigned row = call_.v_first ? v0_ + v : k, element = call_.v_first ? k : v0_ + v;
    return t.at(static_cast<unsigned>(n), hv_, row) + element * size_of(t.dtype);
  }
  __device__ bool is_there(int k, int v) const { return k < call_.K && v0_ + v < call_.V; }

  // Loads what the thread has of a state; zeros where it has none.
  __device__ void load(const TypedView& t, int n, Sum (&to)[kTiles][kParts]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        each(tile, part, [&](int i, int k, int v) {
          const bool loads = t.data && is_there(k, v);
          to[tile][part].x[i / 4][i % 4] = loads ? value_of(t.dtype, load_raw<false>(at(t, n, k, v), t.dtype)) : 0;
        });
  }
  // The same of b, which is f32. Nothing looks at it until the products are there, so nothing waits for it.
  __device__ void load_offset(int n, Sum (&to)[kTiles][kParts]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        each(tile, part, [&](int i, int k, int v) {
          to[tile][part].x[i / 4][i % 4] =
              call_.b.data && is_there(k, v) ? *reinterpret_cast<const float*>(at(call_.b, n, k, v)) : 0;
        });
  }
  // Leaves S for the next product and, if it `stores`, in memory.
  __device__ void leave(int n, bool stores, const Sum (&S)[kTiles][kParts]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        each(tile, part, [&](int i, int k, int v) {
          if (row_of(tile) >= call_.K) return;
          const float x = is_there(k, v) ? S[tile][part].x[i / 4][i % 4] : 0;
          if (stores && is_there(k, v)) *reinterpret_cast<float*>(at(call_.states, n, k, v)) = x;
          Math::store_split(shared_, Memory::kApart, Memory::kStride, v, place_of(k), x);
        });
  }

  // Requests the lane's four numbers of rows g and g + 8 of a tile, in columns c .. of M or, transposed, of M^T.
  __device__ void fetch(int n, int tile, int column, float4 (&to)[2]) const {
    const int c = column + 4 * own();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(tile) + group() + 8 * half;
      float x[4] = {};
      if (call_.wide) {
        to[half] = {};
        if (r < call_.K && c < call_.K) to[half] = load_four(reinterpret_cast<const float*>(call_.M.at(n, hv_, r)) + c);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = call_.transposed ? c + j : r, element = call_.transposed ? r : c + j;
        if (row < call_.K && element < call_.K) x[j] = reinterpret_cast<const float*>(call_.M.at(n, hv_, row))[element];
      }
      to[half] = {x[0], x[1], x[2], x[3]};
    }
  }
  __device__ void fetch_first(int i) {
    if (row_of(0) >= call_.K) return;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) fetch(number(i), 0, 16 * j, ahead_[j]);
  }
  // Requests what comes kAhead products later.
  __device__ void fetch_next(int i, int tile, int slice, int j) {
    if (++slice == kTiles) slice = 0, ++tile;
    if (tile == kTiles || row_of(tile) >= call_.K) tile = 0, ++i;
    if (i < count_) fetch(number(i), tile, slice * kSlice + 16 * j, ahead_[j]);
  }

  // The rows of a tile: S = M S + b.
  __device__ void multiply(int i, int tile, const Sum (&b)[kParts], Sum (&S)[kParts]) {
    Sum sums[kParts], rests[kParts];
#pragma unroll
    for (int slice = 0; slice < kTiles; ++slice)
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int column = slice * kSlice + 16 * j;
        const Math::A a = Math::split_a(ahead_[j][0], ahead_[j][1]);
        fetch_next(i, tile, slice, j);
        if (column >= call_.K) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          Sum step;
          Math::add(step, rests[part], a,
                    Math::load_b_transposed_split(shared_, Memory::kApart, Memory::kStride, part * 16, column));
          sums[part] = stages::sum_of(sums[part], step);
        }
      }
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      S[part] = stages::sum_of(stages::sum_of(sums[part], rests[part]), b[part]);
  }

  const MergeCall& call_;
  const unsigned n_, hv_;
  const int v0_;
  void* const shared_;
  int first_, count_;  // segments of the merge
  float4 ahead_[kAhead][2] = {};
};

template <int kTiles, int kColumns>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeCall call) {
  extern __shared__ float4 dynamic[];
  const unsigned item = call.blocks.quotient(blockIdx.x), block = blockIdx.x - item * call.blocks.divisor;
  const unsigned n = call.heads.quotient(item), hv = item - n * call.heads.divisor;
  wait_for_stream();
  Merge<kTiles, kColumns>(call, n, hv, static_cast<int>(block) * kColumns, dynamic).run();
}

// Calls run.operator()<kTiles, kColumns>(blocks of a head). Blocks of 16 columns spread over more SMs, blocks of 32
// read M half as often. No bit tells which it was.
template <class Run>
void with_blocks(const kda_exec& exec, int64_t heads, int64_t K, int64_t V, const Run& run) {
  const int64_t narrow = divide_up(V, 16);
  if (K > kSlice) run.template operator()<2, 16>(narrow);
  else if (heads * narrow <= multiprocessors(exec.device_id)) run.template operator()<1, 16>(narrow);
  else run.template operator()<1, 32>(divide_up(V, 32));
}

template <int kTiles, int kColumns>
void launch_merge(const kda_exec& exec, int64_t blocks, const MergeCall& call) {
  launch<merge_kernel<kTiles, kColumns>>(exec, dim3(static_cast<unsigned>(blocks)), kThreads,
                                         MergeMemory<kTiles, kColumns>::kBytes, call);
}

}  // namespace

void merge_pieces(const SegmentMapProblem& p, const Pieces& pieces, const Fold& fold) {
  Dims d = p;
  if (!present(fold.b)) d.V = d.K;
  const int64_t sequences = d.varlen ? d.N : 1;
  with_blocks(p.args.exec, sequences * d.HV, d.K, d.V, [&]<int kTiles, int kColumns>(int64_t blocks) {
    MergeCall call(d, pieces, fold.M, fold.reverse, fold.transposed, fold.state_layout, blocks);
    call.b = view_of(fold.b), call.start = view_of(present(fold.b) ? fold.b : fold.M), call.states = view_of(fold.to);
    call.of_pieces = true;
    launch_merge<kTiles, kColumns>(p.args.exec, sequences * d.HV * blocks, call);
  });
}

const char* segment_merge_why_not(const SegmentMergeProblem& p) {
  const kda_segment_merge_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (const char* reason = view_why_not({&a.M, &a.b, &a.h0, &a.states})) return reason;
  return p.HV * divide_up(p.V, 16) <= INT32_MAX ? nullptr : "takes at most 2^31 blocks";
}

void segment_merge(const SegmentMergeProblem& p) {
  const kda_segment_merge_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  with_blocks(a.exec, p.HV, p.K, p.V, [&]<int kTiles, int kColumns>(int64_t blocks) {
    MergeCall call(p, Pieces(p, {}), a.M, a.reverse != 0, a.reverse != 0, a.state_layout, blocks);
    call.b = view_of(a.b), call.start = view_of(a.h0), call.states = view_of(a.states);
    launch_merge<kTiles, kColumns>(a.exec, p.HV * blocks, call);
  });
}

}  // namespace kda::cuda
