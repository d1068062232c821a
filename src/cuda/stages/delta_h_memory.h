// Where things are in the shared memory of delta_h.cu, and how they get there.
#pragma once
#include "cuda/stages/tiles.h"

namespace kda::cuda::stages {

// How much of w and kg is in shared memory at a time.
enum Room : int32_t {
  kTwo,   // those of two chunks
  kOne,   // those of a chunk
  kHalf,  // one of the two
};

// In f32 the copy of S has lines of V whatever the layout of states.
template <class E>
constexpr bool by_lines = sizeof(E) == 4;
// Up to K = 128, without outputs, the copy of S and v_new are split before they are read, and 16 warps share the
// work: each warp of a pair has half of the channels of w S and half of the columns of the state. (A block alone on
// an SM waits for each of its own instructions.)
template <class E, int kTiles>
constexpr bool splits = by_lines<E>&& kTiles == 1;
template <class E, int kTiles>
constexpr int block_of = splits<E, kTiles> ? 2 * kThreads : kThreads;

// With outputs: the number of warps that share the rows of a state. Of 32 columns a warp has 16. Of 16 columns it
// has all, and half of the warps make w S, half qG S.
constexpr int row_warps(int columns) { return columns == 32 ? kWarps / 2 : kWarps; }
constexpr int kPlaces = 5;  // for tiles w, qG, kg

// Where things are in shared memory: strides in elements, as kStride and kStrideAcross are, the rest in bytes.
struct Memory {
  Room room;
  int S_stride, w_stride, kg_stride, u_stride;
  // Split: how far behind a number of S its rest is; where the rests of v_new begin, and where sums do.
  int S_rest, v_rest, parts;
  int w, kg, u, step;  // the first, and from one chunk's to the next's; with outputs from one place to the next
  int Aqk, u_step;     // with outputs
  int bytes;

  template <class E, int kTiles>
  static constexpr Memory of(Room room, int K, int columns, bool v_first) {
    constexpr int kBytes = sizeof(E);
    Memory m{};
    m.room = room;
    const int padded = (K + 15) / 16 * 16, whole = slices(K, slice_of<E>) * slice_of<E>;
    const bool lines = v_first || by_lines<E>;
    m.w_stride = whole + 16 / kBytes, m.kg_stride = whole + 8, m.u_stride = columns + 8;
    m.S_stride = by_lines<E> ? m.w_stride : (lines ? padded : columns) + 8;
    const int S = (lines ? columns : padded) * m.S_stride * kBytes, values = kRows * m.u_stride * kBytes;
    const int w = kRows * m.w_stride * kBytes, kg = kRows * m.kg_stride * kBytes;
    m.S_rest = S, m.v_rest = 2 * S, m.parts = m.v_rest + values;
    m.w = splits<E, kTiles> ? m.parts + kRows * columns * kBytes : S;
    m.kg = room == kHalf ? m.w : m.w + w;
    m.u = room == kHalf ? m.w + (w > kg ? w : kg) : m.kg + kg;
    m.step = m.u + values - m.w;
    m.bytes = m.w + (room == kTwo ? 2 : 1) * m.step;
    return m;
  }
  static constexpr Memory with_outputs(int K, int columns) {
    Memory m{};
    m.S_stride = K + 4, m.u_stride = columns + 8;
    m.u_step = kRows * m.u_stride * 4, m.step = kRows * K * 4;
    m.Aqk = columns * m.S_stride * 4, m.u = m.Aqk + kRows * kRows * 4, m.w = m.u + 2 * m.u_step;
    m.bytes = m.w + kPlaces * m.step;
    return m;
  }
};

// Rows of kColumns numbers in f32 on their way to shared memory, a few lines at a time; twist(line): where pieces of a
// line are.
template <int kColumns>
struct Pieces {
  static constexpr int kAcross = kColumns / 4, kLines = kThreads / kAcross, kCount = kRows / kLines;
  const char* from;
  int64_t step;
  unsigned to, to_step;

  template <class F>
  __device__ Pieces(const Rows& x, const ChunkAt& at, int64_t h, int c0, unsigned char* tile, int stride,
                    const F& twist) {
    static_assert(kLines % 8 == 0, "a thread's lines have one twist");
    const int line = static_cast<int>(threadIdx.x) / kAcross, piece = static_cast<int>(threadIdx.x) % kAcross;
    from = x.at(at.b, at.t0 + line, h) + c0 * 4 + piece * 16, step = kLines * x.token;
    to = ptx::shared_address(tile + line * stride * 4 + (piece ^ twist(line)) * 16), to_step = kLines * stride * 4;
  }
  __device__ void ask(int i) const { ptx::copy16(to + i * to_step, from + i * step); }
};
template <int kColumns>
__device__ void ask_all(const Pieces<kColumns>& pieces) {
#pragma unroll
  for (int i = 0; i < pieces.kCount; ++i) pieces.ask(i);
}
// Step `step` of `steps`, which together start all copies of two or three; the first and the rest are a group each.
template <int kFirst, int... kRest>
__device__ void ask_some(int step, int steps, const Pieces<kFirst>& first, const Pieces<kRest>&... rest) {
  constexpr int kAll = Pieces<kFirst>::kCount + (Pieces<kRest>::kCount + ...);
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    if (i * steps / kAll != step) continue;
    int left = i;
    const auto ask = [&](const auto& pieces) {
      if (left >= 0 && left < pieces.kCount) pieces.ask(left);
      left -= pieces.kCount;
    };
    ask(first), (ask(rest), ...);
    if (i == first.kCount - 1 || i == kAll - 1) ptx::commit_copies();
  }
}

}  // namespace kda::cuda::stages
