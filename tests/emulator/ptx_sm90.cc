// What instructions of Hopper do (src/cuda_host/include/cuda/ptx/sm90.h).
#include "cuda/ptx/sm90.h"

#include <cstring>
#include <vector>

#include "cuda_runtime.h"
#include "error.h"
#include "f16_values.h"

namespace kda::cuda::engine {

alignas(1024) thread_local unsigned char memory[emulator::kMostShared];

}  // namespace kda::cuda::engine

namespace {

const kda::emulator::SharedVariable shared_variable([] { return reinterpret_cast<char*>(kda::cuda::engine::memory); });

}  // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!kda::emulator::thread_has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  *map = {.data = data,
          .rank = rank,
          .element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4u : 2u,
          .swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B,
          .box = {1, 1, 1, 1, 1},
          .sizes = {1, 1, 1, 1, 1},
          .strides = {}};
  bool fits = reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * map->element % 16 == 0;
  for (unsigned i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i], map->box[i] = box[i];
    fits = fits && sizes[i] > 0 && sizes[i] <= uint64_t{1} << 32 && box[i] > 0 && box[i] <= 256;
    if (i + 1 == rank) break;
    map->strides[i] = strides[i];
    fits = fits && strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
  }
  if (map->swizzled) fits = fits && box[0] * map->element <= 128;
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace kda::cuda::ptx {
namespace {

// 16-byte pieces of rows, as the hardware swizzles them: by an address's bits from 7 on.
unsigned swizzled(unsigned address, unsigned bytes_of_row) {
  return address ^ (address >> 7 & (bytes_of_row / 16 - 1)) << 4;
}

// Calls run(address, memory) for the 16-byte pieces of a box; memory is nullptr outside of the tensor.
template <class Run>
void each_piece(unsigned shared, const CUtensorMap& map, const Corner& corner, Where where, const Run& run) {
  if (shared % 128) emulator::fail("a box at no multiple of 128", where);
  emulator::expect_waited("copies", where);
  const unsigned row_bytes = map.box[0] * map.element;
  unsigned row = 0;
  for (unsigned u = 0; u < map.box[4]; ++u)
    for (unsigned w = 0; w < map.box[3]; ++w)
      for (unsigned z = 0; z < map.box[2]; ++z)
        for (unsigned y = 0; y < map.box[1]; ++y, ++row) {
          const unsigned at[5] = {0, y, z, w, u};
          bool inside = true;
          uint64_t offset = 0;
          for (unsigned i = 1; i < map.rank; ++i) {
            const unsigned x = corner.at[i] + at[i];
            inside = inside && x < map.sizes[i];
            offset += x * map.strides[i - 1];
          }
          for (unsigned byte = 0; byte < row_bytes; byte += 16) {
            const unsigned x = corner.at[0] + byte / map.element, plain = shared + row * row_bytes + byte;
            const bool there = inside && x < map.sizes[0];
            run(map.swizzled ? swizzled(plain, row_bytes) : plain,
                there ? static_cast<char*>(map.data) + offset + uint64_t{x} * map.element : nullptr);
          }
        }
}
unsigned bytes_of(const CUtensorMap& map) {
  unsigned bytes = map.element;
  for (const unsigned x : map.box) bytes *= x;
  return bytes;
}

constexpr uint4 kZeros{};

}  // namespace

bool elect(Where where) {
  char none = 0;
  emulator::together(
      "elect.sync", none, [](void* const*) {}, where);
  return emulator::own_lane() == emulator::elected_lane();
}

// ---- copies ----

void copy_bulk_to_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier, Where where) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a bulk copy of no multiple of 16", where);
  emulator::expect_waited("copies", where);
  for (unsigned i = 0; i < bytes; i += 16)
    emulator::bring(to + i, static_cast<const char*>(from) + i, 16, barrier, where);
  emulator::count_bytes(barrier, bytes, where);
}
void copy_bulk_to_global(void* to, unsigned from, unsigned bytes, Where where) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("a bulk copy of no multiple of 16", where);
  emulator::expect_waited("copies", where);
  for (unsigned i = 0; i < bytes; i += 16) emulator::take_away(static_cast<char*>(to) + i, from + i, 16, where);
}
void copy_bulk_between(unsigned to, unsigned from, unsigned bytes, unsigned barrier, Where where) {
  for (unsigned i = 0; i < bytes; i += 16) {
    uint4 x;
    emulator::look_async(&x, from + i, 16, barrier, where);
    emulator::bring(to + i, &x, 16, barrier, where);
  }
  emulator::count_bytes(barrier, bytes, where);
}

void load_box(unsigned to, const CUtensorMap& map, const Corner& corner, unsigned barrier, Where where) {
  each_piece(to, map, corner, where, [&](unsigned at, const char* from) {
    emulator::bring(at, from ? from : reinterpret_cast<const char*>(&kZeros), 16, barrier, where);
  });
  emulator::count_bytes(barrier, bytes_of(map), where);
}
void load_box_to(unsigned ranks, unsigned to, const CUtensorMap& map, const Corner& corner, unsigned barrier,
                 Where where) {
  for (unsigned i = 0; i < 16; ++i)
    if (ranks >> i & 1) load_box(address_in(to, i), map, corner, address_in(barrier, i), where);
}
void store_box(const CUtensorMap& map, const Corner& corner, unsigned from, Where where) {
  each_piece(from, map, corner, where, [&](unsigned at, char* to) { emulator::take_away(to, at, 16, where); });
}

// ---- matrices ----

namespace {

// The registers become rows, and every lane stores the row that it names.
template <bool kTransposed>
void store_rows(unsigned to, const unsigned (&x)[4], Where where) {
  struct Rows {
    unsigned given[4];
    uint16_t row[8];
  } own{.given = {x[0], x[1], x[2], x[3]}, .row = {}};
  const auto exchange = [](void* const* all) {
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned c = 0; c < 8; ++c) {
        const unsigned row = kTransposed ? c : l % 8, column = kTransposed ? l % 8 : c;
        const unsigned pair = emulator::of<Rows>(all, row * 4 + column / 2).given[l / 8];
        emulator::of<Rows>(all, l).row[c] = static_cast<uint16_t>(pair >> column % 2 * 16);
      }
  };
  emulator::together(kTransposed ? "stmatrix.trans" : "stmatrix", own, exchange, where);
  emulator::store(to, own.row, sizeof own.row, where);
}

}  // namespace

void store_matrices(unsigned to, const unsigned (&x)[4], Where where) { store_rows<false>(to, x, where); }
void store_transposed(unsigned to, const unsigned (&x)[4], Where where) { store_rows<true>(to, x, where); }

// ---- products of a warpgroup ----

namespace {

constexpr unsigned kDepth = 16;

float number(unsigned bits, bool f16) { return f16 ? emulator::f16_values()[bits] : __uint_as_float(bits << 16); }

// x [rows, 16] of a matrix in shared memory. Rows, or columns if it is transposed, are of 128 or 64 bytes.
void read_matrix(float* x, unsigned rows, uint64_t matrix, bool transposed, bool f16, Where where) {
  const auto start = static_cast<unsigned>(matrix & 0x3fff) << 4,
             leading = static_cast<unsigned>(matrix >> 16 & 0x3fff) << 4,
             stride = static_cast<unsigned>(matrix >> 32 & 0x3fff) << 4;
  const auto swizzle = static_cast<Swizzle>(matrix >> 62);
  if (swizzle != Swizzle::k128 && swizzle != Swizzle::k64) emulator::fail("a swizzle that is not emulated", where);
  const unsigned row_bytes = swizzle == Swizzle::k128 ? 128 : 64;
  if (start % (8 * row_bytes) >= 128) emulator::fail("a matrix that begins within eight rows", where);
  if (stride % (8 * row_bytes)) emulator::fail(str("eight rows that are ", stride, " bytes apart"), where);
  const unsigned own = emulator::rank_bits();
  const auto read = [&](unsigned at, unsigned row, unsigned k, unsigned next_row, unsigned next_k) {
    uint16_t piece[8];
    emulator::read_for_product(piece, own | swizzled(at, row_bytes), sizeof piece, where);
    for (unsigned i = 0; i < 8; ++i) x[(row + i * next_row) * kDepth + k + i * next_k] = number(piece[i], f16);
  };
  const auto line = [&](unsigned i) { return i / 8 * stride + i % 8 * row_bytes; };
  if (transposed) {
    for (unsigned k = 0; k < kDepth; ++k)
      for (unsigned row = 0; row < rows; row += 8)
        read(start + line(k) + row * 2 / row_bytes * leading + row * 2 % row_bytes, row, k, 1, 0);
  } else {
    for (unsigned row = 0; row < rows; ++row)
      for (unsigned k = 0; k < kDepth; k += 8) read(start + line(row) + k * 2, row, k, 0, 1);
  }
}

void multiply_all(void* const* all) {
  const auto& first = emulator::of<WarpgroupProduct>(all, 0);
  static std::vector<float> a(64 * kDepth), b(128 * kDepth);
  if (first.a) {
    for (unsigned t = 0; t < 128; ++t)
      for (unsigned r = 0; r < 4; ++r)
        for (unsigned e = 0; e < 2; ++e)
          a[(t / 32 * 16 + t % 32 / 4 + r % 2 * 8) * kDepth + t % 4 * 2 + e + r / 2 * 8] =
              number(emulator::of<WarpgroupProduct>(all, t).a[r] >> 16 * e & 0xffff, first.f16);
  } else {
    read_matrix(a.data(), 64, first.shared_a, first.transposed_a, first.f16, first.where);
  }
  read_matrix(b.data(), first.columns, first.b, first.transposed_b, first.f16, first.where);
  for (unsigned t = 0; t < 128; ++t) {
    const auto& own = emulator::of<WarpgroupProduct>(all, t);
    for (unsigned i = 0; i < first.columns / 2; ++i) {
      const float* x = &a[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * kDepth];
      const float* y = &b[(i / 4 * 8 + t % 4 * 2 + i % 2) * kDepth];
      double sum = 0;
      for (unsigned k = 0; k < kDepth; ++k) sum += double{x[k]} * y[k];
      own.d[i] = static_cast<float>((own.accumulate ? own.d[i] : 0.0) + sum);
    }
  }
}

}  // namespace

void multiply(WarpgroupProduct& product) {
  emulator::together_in_group("wgmma", &product, multiply_all, product.where);
}

}  // namespace kda::cuda::ptx
