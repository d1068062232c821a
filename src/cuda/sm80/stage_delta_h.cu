// F4: v_new = u - w S, then S <- Diag(ell) S + kg^T v_new, chunk after chunk. Columns of a state are independent: a block has
// kColumns of a value head's, and all chunks of a sequence. A warp has rows 16 w .. (and 128 + 16 w ..) of S in registers,
// in f32; a copy, rounded to E, is in shared memory for the products and for h.
//
// A chunk:
//   1 wait for w, u, kg; ask for the next chunk's, if there is room for two       barrier: all is there, and S
//   2 h from the copy of S; v_new = u - w S in place of u                          barrier: v_new is there, S is read
//   3 v_new to memory; S in registers; its copy                                    barrier: v_new and kg are read
//
// Shared memory at K = 128 in bf16: S 18, w 17, kg 17, u 9 KiB, the last three twice.
#include "cuda/cuda.h"
#include "cuda/sm80/stages.h"
#include "problem_stages.h"

namespace kda::cuda {
namespace stages {
namespace {

// How much of w and kg is in shared memory at a time.
enum Room : int32_t {
  kTwo,   // those of two chunks
  kOne,   // those of a chunk
  kHalf,  // one of the two
};

// Where things are in shared memory, in bytes.
struct Memory {
  Room room;
  int S_stride, u_stride;  // in elements
  int w, kg, u, step;      // the first, and from one chunk's to the next's
  int bytes;

  template <class E>
  static Memory of(Room room, int K, int columns, bool v_first) {
    constexpr int kPad = 16 / sizeof(E);
    Memory m{};
    m.room = room;
    const int padded = (K + 15) / 16 * 16;
    m.S_stride = (v_first ? padded : columns) + kPad, m.u_stride = columns + kPad;
    const int keys = slices(K, slice_of<E>) * kTileBytes, values = kRows * m.u_stride * static_cast<int>(sizeof(E));
    m.w = (v_first ? columns : padded) * m.S_stride * static_cast<int>(sizeof(E));
    m.kg = room == kHalf ? m.w : m.w + keys;
    m.u = m.kg + keys, m.step = m.u + values - m.w;
    m.bytes = m.w + (room == kTwo ? 2 : 1) * m.step;
    return m;
  }
};

template <class E, int kTiles, int kColumns>
__global__ void __launch_bounds__(kThreads, sizeof(E) == 2 ? 2 : 1)
    scan_kernel(const __grid_constant__ ScanCall p, const Blocks blocks, const __grid_constant__ Memory m) {
  extern __shared__ float4 dynamic[];
  unsigned char* const shared = reinterpret_cast<unsigned char*>(dynamic);
  using M = Math<E>;
  constexpr int kSlice = slice_of<E>;
  constexpr int kParts =
      kColumns / 32 + kColumns % 32 / 16;  // 16 x 16 of v_new that a warp has (of 16 columns: four warps)
  wait_for_stream();
  const Place at(blocks);
  if (at.layer) return;  // the grid's last rows
  const Sequence s = p.chunks.sequence(at.n);
  const int64_t hv = at.hv;
  const int K = static_cast<int>(p.dims.K), V = static_cast<int>(p.dims.V);
  const int v0 = static_cast<int>(at.tile) * kColumns, columns = min(V - v0, kColumns);
  ChunkAt chunk{.n = s.n, .b = s.b, .t0 = s.t0, .rows = 0};
  if (!s.live) {
    for (int64_t t = 0; at.tile == 0 && t < s.length; t += kRows) {
      chunk.t0 = s.t0 + t, chunk.rows = static_cast<int>(min(s.length - t, int64_t{kRows}));
      zero_rows(p.v_new, chunk, hv, V);
    }
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x % 32) / 4;
  const auto row_of = [&](int tile) { return (warp + kWarps * tile) * 16; };  // of S

  // f(k, v, number) for all of S that this thread has.
  Sum S[kTiles][kColumns / 16];
  const auto for_each = [&](const auto& f) {
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          f(row_of(tile) + g + i % 4 / 2 * 8, n * 16 + i / 4 * 8 + 2 * t + i % 2, S[tile][n].x[i / 4][i % 4]);
  };
  // What lies beyond K or V is 0.
  const auto put_S = [&] {
    const int limit = (K + 15) / 16 * 16;
    if (p.v_first) {
      E* to = reinterpret_cast<E*>(shared);
      for_each([&](int k, int v, float y) {
        if (k < limit) to[v * m.S_stride + k] = static_cast<E>(y);
      });
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n)
          for_each_pair(S[tile][n], [&](int k, int v, float x, float y) {
            if (row_of(tile) < limit) M::store_two(shared, m.S_stride, row_of(tile) + k, n * 16 + v, x, y);
          });
    }
  };
  const auto state_at = [&](const Rows& x, int64_t row) {
    return p.v_first ? x.at(row, v0, hv) : x.at(row, 0, hv) + v0 * x.size();
  };
  // In f32, as it lies in memory, between registers and where w, kg and u will be or were.
  constexpr int kMost = kTiles * 128, kPad = 4;
  float* const whole = reinterpret_cast<float*>(shared + m.w);
  const auto whole_at = [&](int k, int v) -> float& {
    return whole[p.v_first ? v * (kMost + kPad) + k : k * (kColumns + kPad) + v];
  };
  if (p.h0.data) {
    const char* from = state_at(p.h0, s.n);
    if (p.v_first)
      stage<float, kColumns, kMost>({from, p.h0.token, columns, K, p.h0.dtype, p.h0.wide}, whole, kMost + kPad);
    else stage<float, kMost, kColumns>({from, p.h0.token, K, columns, p.h0.dtype, p.h0.wide}, whole, kColumns + kPad);
    arrived();
    for_each([&](int k, int v, float& y) { y = whole_at(k, v); });
    __syncthreads();  // h0 is read
  }
  put_S();

  // Asks for the parts of a chunk.
  const int count = static_cast<int>((s.length + kRows - 1) / kRows);
  const auto chunk_at = [&](int i) {
    chunk.t0 = s.t0 + int64_t{i} * kRows;
    chunk.rows = static_cast<int>(min(s.length - int64_t{i} * kRows, int64_t{kRows}));
  };
  const auto buffer = [&](int offset, int i) { return shared + offset + (m.room == kTwo && i % 2 ? m.step : 0); };
  const auto ask_keys = [&](const Rows& x, int offset, int i) {
    chunk_at(i);
    for (int c = 0; c < K; c += kSlice)
      stage<E, kRows, kSlice>(tokens_of(x, chunk, hv, c, K), buffer(offset, i) + c / kSlice * kTileBytes, kStride<E>);
  };
  const auto ask = [&](int i) {
#pragma unroll 1
    for (int part = 0; part < (kTiles == 2 && m.room == kHalf ? 1 : 2); ++part)
      ask_keys(part ? p.kg : p.w, part ? m.kg : m.w, i);
    stage<E, kRows, kColumns>(tokens_of(p.u, chunk, hv, v0, V), buffer(m.u, i), m.u_stride);
    ptx::commit_copies();
  };

  const int64_t first_row = p.h.data ? p.chunks.first_row(s.n) : 0;
  const int i0 = warp % 4 * 16, column0 = warp / 4 * kParts * 16;  // of v_new
#pragma unroll 1
  for (int i = 0, asked = 0; i < count; ++i) {
    while (asked < min(i + (m.room == kTwo ? 2 : 1), count)) ask(asked++);
    if (asked == i + 2) ptx::wait_for_copies<1>();
    else ptx::wait_for_copies<0>();
    chunk_at(i);
    float ell[kTiles][2];  // of rows g and g + 8
    const char* G = p.G.at(chunk.b, chunk.t0 + chunk.rows - 1, hv);
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) {
      const int k = row_of(e / 2) + g + e % 2 * 8;
      ell[e / 2][e % 2] = k < K ? *reinterpret_cast<const float*>(G + k * 4) : 0.0f;
    }
    __syncthreads();  // w, u, kg and the copy of S are there
    const int64_t row = first_row + i;
    if (p.h.data && row < p.h_rows) {
      char* to = state_at(p.h, row);
      if (p.v_first) {
#pragma unroll 1
        for (int c = 0; c < K; c += kSlice)
          unstage<E, kColumns, kSlice>(shared + c * sizeof(E), m.S_stride, p.h, columns, K - c,
                                       [&](int l) { return to + l * p.h.token + c * p.h.size(); });
      } else {
        unstage<E, kMost, kColumns>(shared, m.S_stride, p.h, K, columns, [&](int l) { return to + l * p.h.token; });
      }
    }
    Sum wS[kParts];
    const bool has_part = column0 < kColumns;
    const unsigned char* w = buffer(m.w, i);
#pragma unroll 2
    for (int c = 0; c < K && has_part; c += 16) {
      const auto a = M::load_a(w + c / kSlice * kTileBytes, kStride<E>, i0, c % kSlice);
#pragma unroll
      for (int n = 0; n < kParts; ++n)
        M::add(wS[n], a,
               p.v_first ? M::load_b_transposed(shared, m.S_stride, column0 + n * 16, c)
                         : M::load_b(shared, m.S_stride, c, column0 + n * 16));
    }
    unsigned char* v_new = buffer(m.u, i);
#pragma unroll
    for (int n = 0; n < kParts; ++n)
      for_each_pair(wS[n], [&](int r, int c, float x, float y) {
        if (!has_part) return;
        const float2 u = M::load_two(v_new, m.u_stride, i0 + r, column0 + n * 16 + c);
        M::store_two(v_new, m.u_stride, i0 + r, column0 + n * 16 + c, u.x - x, u.y - y);
      });
    __syncthreads();                       // v_new is there, S and w are read
    if (kTiles == 2 && m.room == kHalf) {  // with fewer channels there is room
      ask_keys(p.kg, m.kg, i);
      arrived();
    }
    if (p.v_new.data) {
      char* to = p.v_new.at(chunk.b, chunk.t0, hv) + v0 * p.v_new.size();
      unstage<E, kRows, kColumns>(v_new, m.u_stride, p.v_new, chunk.rows, columns,
                                  [&](int l) { return to + l * p.v_new.token; });
    }
    const unsigned char* kg = buffer(m.kg, i);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (row_of(tile) >= K) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = ptx::exp2(ell[tile][e]);
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            S[tile][n].x[half][2 * e] *= factor, S[tile][n].x[half][2 * e + 1] *= factor;
      }
#pragma unroll 1
      for (int t = 0; t < kRows; t += 16) {
        const auto a =
            M::load_a_transposed(kg + row_of(tile) / kSlice * kTileBytes, kStride<E>, t, row_of(tile) % kSlice);
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) M::add(S[tile][n], a, M::load_b(v_new, m.u_stride, t, n * 16));
      }
    }
    put_S();
    if (m.room != kTwo || i + 2 < count) __syncthreads();  // v_new and kg are read
  }
  if (!p.hT.data) return;
  __syncthreads();  // the last w, kg and v_new are read
  for_each([&](int k, int v, float y) { whole_at(k, v) = y; });
  __syncthreads();  // S is there
  char* to = state_at(p.hT, s.n);
  const auto line = [&](int l) { return to + l * p.hT.token; };
  if (p.v_first) unstage<float, kColumns, kMost>(whole, kMost + kPad, p.hT, columns, K, line);
  else unstage<float, kMost, kColumns>(whole, kColumns + kPad, p.hT, K, columns, line);
}

template <class E, int kTiles, int kColumns>
bool launch_scan(const kda_exec& exec, const ScanCall& c) {  // false: the device has not enough shared memory
  int most = 0;
  KDA_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, exec.device_id));
  for (const Room room : {kTwo, kOne, kHalf}) {
    const Memory m = Memory::of<E>(room, static_cast<int>(c.dims.K), kColumns, c.v_first);
    if (m.bytes > most || (kTiles == 1 && room == kHalf)) continue;
    const int64_t tiles = (c.dims.V + kColumns - 1) / kColumns;
    launch<scan_kernel<E, kTiles, kColumns>>(exec, Blocks::grid(c.dims, tiles, 1), kThreads, m.bytes, c,
                                             Blocks(c.dims, tiles), m);
    return true;
  }
  return false;
}

}  // namespace

void run(const kda_exec& exec, const ScanCall& c, bool exact) {
  const int64_t heads = c.dims.N * c.dims.HV;
  if ((c.dims.N + c.dims.varlen) * c.dims.HV == 0) return;
  const bool large = c.dims.K > 128;
  const bool few = heads * ((c.dims.V + 63) / 64) < multiprocessors(exec.device_id);  // leave every SM something to do
  const bool fits = exact   ? large ? launch_scan<float, 2, 32>(exec, c) || launch_scan<float, 2, 16>(exec, c)
                                    : launch_scan<float, 1, 32>(exec, c)
                      : large ? launch_scan<bf16, 2, 32>(exec, c)
                    : few   ? launch_scan<bf16, 1, 32>(exec, c)
                            : launch_scan<bf16, 1, 64>(exec, c);
  if (!fits) throw Error(KDA_UNSUPPORTED, "the device has not enough shared memory for a block");
}

}  // namespace stages

const char* stage_why_not(const StageProblem<kda_stage_delta_h_args>& p) {
  const int64_t tiles = (p.V + 15) / 16;
  if (const char* reason = stages::stage_why_not(p.args.exec, has_f64(p), tiles * p.HV)) return reason;
  return grid_why_not(p, tiles, 1);
}

void stage(const StageProblem<kda_stage_delta_h_args>& p) {
  const kda_stage_delta_h_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  stages::ScanCall c{.dims = p, .chunks = stages::Chunks(p, p.in.cu_seqlens), .kg = stages::rows_of(a.kg)};
  c.w = stages::rows_of(a.w), c.u = stages::rows_of(a.u), c.G = stages::rows_of(a.G),
  c.v_new = stages::rows_of(a.v_new);
  c.h0 = stages::lines_of_states(a.h0), c.h = stages::lines_of_states(a.h), c.hT = stages::lines_of_states(a.hT);
  c.h_rows = present(a.h) ? a.h.shape[0] : 0, c.v_first = p.in.state_layout == KDA_STATE_V_FIRST;
  run(a.exec, c, stages::is_exact({&a.kg, &a.w, &a.u}));
}

}  // namespace kda::cuda
