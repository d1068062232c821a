// What instructions of Blackwell do (src/cuda_host/include/cuda/ptx/sm100.h): products, copies to tensor memory,
// commits. Descriptors are read by the tables of the PTX ISA 9.1, sections 9.7.16.4.1 and 9.7.16.4.2. What they may say
// and is not used here is refused.
#include <cstring>
#include <vector>

#include "cuda_runtime.h"
#include "error.h"
#include "f16_values.h"
#include "ptx_sm100.h"

namespace kda::cuda::ptx {

// ---- descriptors ----

namespace {

unsigned bits(uint64_t x, unsigned first, unsigned count) {
  return static_cast<unsigned>(x >> first & ((uint64_t{1} << count) - 1));
}

// What an instruction descriptor says.
struct Shape {
  unsigned M, N, K;
  bool f16, tf32, transposed_a, transposed_b;
  float sign;  // of the product
  bool pair;   // of two blocks, each of which has half of the rows of A and of B
  unsigned blocks() const { return pair ? 2 : 1; }
  // A is in tensor memory twice, once for each half of the columns of D.
  bool twice() const { return pair && M == 128; }
};
Shape read_shape(const Umma& u) {
  const auto refuse = [&](const std::string& what) { emulator::fail("a product's shape: " + what, u.where); };
  const unsigned x = u.shape, a = bits(x, 7, 3), b = bits(x, 10, 3);
  if (bits(x, 0, 4) || bits(x, 6, 1) || bits(x, 23, 1) || bits(x, 29, 3)) refuse("bits that have to be 0");
  if (bits(x, 4, 2) != 1) refuse("D is not f32");
  if (a != b || (u.tf32 ? a != 2 : a > 1)) refuse(str("elements ", a, " and ", b, " do not fit the instruction"));
  const Shape s{.M = bits(x, 24, 5) * 16,
                .N = bits(x, 17, 6) * 8,
                .K = u.tf32 ? 8u : 16u,
                .f16 = !u.tf32 && a == 0,
                .tf32 = u.tf32,
                .transposed_a = bits(x, 15, 1) != 0,
                .transposed_b = bits(x, 16, 1) != 0,
                .sign = bits(x, 13, 1) != bits(x, 14, 1) ? -1.0f : 1.0f,
                .pair = u.blocks == 2};
  if (s.M != 64 * s.blocks() && s.M != 128 * s.blocks()) refuse(str("M = ", s.M, " by blocks: ", s.blocks()));
  const unsigned step = s.pair && u.a_in_tensor ? 32 : s.M == 64 ? 8 : 16;
  if (s.N == 0 || s.N > 256 || s.N % step) refuse(str("N = ", s.N, " with M = ", s.M));
  if (u.a_in_tensor && s.transposed_a) refuse("A is transposed in tensor memory");
  return s;
}

// What a descriptor of an operand says.
struct Operand {
  unsigned start, leading, stride;
  unsigned row;      // bytes of a swizzled row
  unsigned pattern;  // bytes after which the swizzle is the same again
  bool by32;
  // Of 16 bytes of a row of a K-major operand.
  unsigned offset_of_row(unsigned i, unsigned piece) const {
    return i / 8 * stride + i % 8 * row + piece * (row == 16 ? leading : 16);
  }
  unsigned place(unsigned at) const {
    if (by32) return at ^ (at >> 7 & 3) << 5;
    return at ^ (at >> 7 & (row / 16 - 1)) << 4;
  }
};
Operand read_operand(uint64_t x, bool transposed, bool tf32, Where where) {
  const auto refuse = [&](const std::string& what) { emulator::fail("an operand's descriptor: " + what, where); };
  Operand o{.start = bits(x, 0, 14) * 16,
            .leading = bits(x, 16, 14) * 16,
            .stride = bits(x, 32, 14) * 16,
            .row = 16,
            .pattern = 128,
            .by32 = false};
  if (bits(x, 46, 3) != 1) refuse("bits 46 to 48 are not those of Blackwell");
  if (bits(x, 14, 2) || bits(x, 30, 2) || bits(x, 49, 12)) refuse("bits that have to be 0");
  switch (static_cast<Swizzling>(bits(x, 61, 3))) {
    case Swizzling::kNone: break;
    case Swizzling::k32: o.row = 32, o.pattern = 256; break;
    case Swizzling::k64: o.row = 64, o.pattern = 512; break;
    case Swizzling::k128: o.row = 128, o.pattern = 1024; break;
    case Swizzling::k128By32: o.row = 128, o.pattern = 512, o.by32 = true; break;
    default: refuse(str("there is no swizzle ", bits(x, 61, 3)));
  }
  if (o.by32 != (transposed && tf32))
    refuse("swizzled by 32 bytes is what transposed tf32 has to be, and nothing else");
  if (o.row == 16) return o;
  if (o.stride % o.pattern) refuse(str("its stride of ", o.stride, " is no multiple of ", o.pattern));
  const unsigned into = o.start % o.pattern;  // where in the pattern it begins
  if (transposed) {
    if (into) refuse(str("transposed, it begins at no multiple of ", o.pattern));
    if (o.leading % o.pattern) refuse(str("its leading offset of ", o.leading, " is no multiple of ", o.pattern));
  } else if (into + 32 > o.row) {
    refuse(str("it does not begin in the first row of a pattern with 32 bytes of it left"));
  }
  return o;
}

// ---- operands ----

float number(unsigned x, const Shape& s) {
  if (s.tf32) return __uint_as_float(x & ~0x1fffu);
  return s.f16 ? emulator::f16_values()[x] : __uint_as_float(x << 16);
}

// Sixteen neighbouring bytes, which a product reads.
void read_piece(void* to, unsigned at, unsigned core, Where where) {
  emulator::SharedMemory& memory = wave->block_of(at).memory;
  std::memcpy(to, memory.at(at, 16, where), 16);
  memory.begin_async_read(at, 16, wave->thread(), false, where);
  memory.end_async_read(at, 16, core, false, where);
}

// x [rows, K] of an operand in the shared memory of a block.
void read_shared(float* x, unsigned rows, uint64_t descriptor, bool transposed, const Shape& s, unsigned block,
                 unsigned core, Where where) {
  const Operand o = read_operand(descriptor, transposed, s.tf32, where);
  const unsigned own = emulator::address_in(0, block), size = s.tf32 ? 4 : 2, count = 16 / size;
  const auto read = [&](unsigned at, unsigned row, unsigned k, unsigned next_row, unsigned next_k) {
    unsigned char piece[16];
    read_piece(piece, own | o.place(o.start + at), core, where);
    for (unsigned i = 0; i < count; ++i) {
      unsigned element = 0;
      std::memcpy(&element, piece + i * size, size);
      x[(row + i * next_row) * s.K + k + i * next_k] = number(element, s);
    }
  };
  if (transposed) {
    const unsigned lines = o.by32 ? 4 : 8, next_lines = o.row == 16 ? o.leading : o.stride,
                   next = o.row == 16 ? o.stride : o.leading;
    for (unsigned k = 0; k < s.K; ++k)
      for (unsigned row = 0; row < rows; row += count)
        read(k / lines * next_lines + k % lines * o.row + row * size / o.row * next + row * size % o.row, row, k, 1, 0);
  } else {
    for (unsigned row = 0; row < rows; ++row)
      for (unsigned k = 0; k < s.K; k += count) read(o.offset_of_row(row, k / count), row, k, 0, 1);
  }
}

// Where an element of D is, counted from the address of D.
struct Place {
  unsigned block, lane, column;
};
Place place_of(const Shape& s, unsigned m, unsigned n) {
  if (!s.pair) return {0, s.M == 64 ? m / 16 * 32 + m % 16 : m, n};
  if (!s.twice()) return {m / 128, m % 128, n};
  return {m / 64, m % 64 + n / (s.N / 2) * 64, n % (s.N / 2)};
}

// x [rows, K] of a block's rows of A in tensor memory. half: of the columns of D.
void read_tensor(float* x, const Umma& u, const Shape& s, unsigned half, TensorMemory& from, unsigned product) {
  const auto at = static_cast<unsigned>(u.a);
  if (lane_of(at) != lane_of(u.d)) emulator::fail("A and D of a product are at different lanes", u.where);
  constexpr unsigned kColumns = 8;
  from.check_columns(column_of(at), kColumns, u.where);
  for (unsigned row = 0; row < s.M / s.blocks(); ++row)
    for (unsigned c = 0; c < kColumns; ++c) {
      const unsigned lane = lane_of(at) + place_of(s, row, half * (s.N / 2)).lane;
      const uint32_t cell = from.read(product, lane, column_of(at) + c);
      if (s.tf32) x[row * s.K + c] = number(cell, s);
      else x[row * s.K + 2 * c] = number(cell & 0xffff, s), x[row * s.K + 2 * c + 1] = number(cell >> 16, s);
    }
}

unsigned own_core() {
  unsigned& core = wave->fiber().core;
  if (!core) core = wave->next_core();
  return core;
}

// ---- products ----

// A product that has begun: the part of a block, and the operands.
struct Part {
  TensorMemory* to;
  unsigned product;
};
struct Operands {
  std::vector<float> a[2], b;  // a: for each half of the columns of D, if they differ
};

Part begin_part(const Umma& u, const Shape& s, unsigned block) {
  emulator::Block& of = block_of_rank(block);
  if (!of.running) emulator::fail("begins a product with a block that has ended", u.where);
  TensorMemory& to = tensor_of(of, u.where);
  if (lane_of(u.d) && !(s.M == 64 && lane_of(u.d) == 16))
    emulator::fail(str("D of a product begins at lane ", lane_of(u.d)), u.where);
  to.check_columns(column_of(u.d), s.twice() ? s.N / 2 : s.N, u.where);
  return {&to, to.begin({.kind = Kind::kProduct,
                         .by = wave->thread(),
                         .core = own_core(),
                         .d = u.d,
                         .shape = s.M << 16 | s.N,
                         .tf32 = s.tf32,
                         .pair = s.pair,
                         .where = u.where,
                         .time = wave->order().now()})};
}

void read_operands(Operands& x, const Umma& u, const Shape& s, const Part& part, unsigned i, unsigned block) {
  const unsigned rows = s.M / s.blocks(), columns = s.N / s.blocks();
  for (unsigned half = 0; half < (s.twice() ? 2 : 1); ++half) {
    x.a[half].resize(s.M * s.K);
    float* a = x.a[half].data() + i * rows * s.K;
    if (u.a_in_tensor) read_tensor(a, u, s, half, *part.to, part.product);
    else read_shared(a, rows, u.a, s.transposed_a, s, block, own_core(), u.where);
  }
  x.b.resize(s.N * s.K);
  read_shared(x.b.data() + i * columns * s.K, columns, u.b, s.transposed_b, s, block, own_core(), u.where);
}

}  // namespace

void multiply(const Umma& u) {
  check_blocks(u.blocks, u.where);
  const Shape s = read_shape(u);
  Part parts[2] = {};
  Operands x;
  for (unsigned i = 0; i < s.blocks(); ++i) {
    const unsigned block = s.pair ? i : wave->rank();
    parts[i] = begin_part(u, s, block);
    read_operands(x, u, s, parts[i], i, block);
  }
  for (unsigned m = 0; m < s.M; ++m)
    for (unsigned n = 0; n < s.N; ++n) {
      const Place at = place_of(s, m, n);
      const unsigned lane = lane_of(u.d) + at.lane, column = column_of(u.d) + at.column;
      const float* a = &x.a[s.twice() && n >= s.N / 2][m * s.K];
      TensorMemory& to = *parts[at.block].to;
      double sum = 0;
      for (unsigned k = 0; k < s.K; ++k) sum += double{a[k]} * x.b[n * s.K + k];
      sum = s.sign * sum + (u.accumulate ? __uint_as_float(to.value(lane, column)) : 0.0);
      to.write(parts[at.block].product, lane, column, __float_as_uint(static_cast<float>(sum)), u.accumulate);
    }
}

void copy_rows(unsigned tmem, uint64_t from, int blocks, Where where) {
  check_blocks(blocks, where);
  const Operand o = read_operand(from, false, false, where);
  if (lane_of(tmem)) emulator::fail(str("copies 128 rows to lane ", lane_of(tmem)), where);
  constexpr unsigned kPieces = 2, kColumns = 4;  // of each
  for (unsigned i = 0; i < static_cast<unsigned>(blocks); ++i) {
    const unsigned block = blocks == 2 ? i : wave->rank();
    TensorMemory& to = tensor_of(block_of_rank(block), where);
    to.check_columns(column_of(tmem), kPieces * kColumns, where);
    const unsigned copy = to.begin({.kind = Kind::kCopy,
                                    .by = wave->thread(),
                                    .core = own_core(),
                                    .pair = blocks == 2,
                                    .where = where,
                                    .time = wave->order().now()});
    for (unsigned row = 0; row < emulator::kTensorLanes; ++row)
      for (unsigned piece = 0; piece < kPieces; ++piece) {
        uint32_t x[kColumns];
        read_piece(x, emulator::address_in(0, block) | o.place(o.start + o.offset_of_row(row, piece)), own_core(),
                   where);
        for (unsigned c = 0; c < kColumns; ++c) to.write(copy, row, column_of(tmem) + piece * kColumns + c, x[c]);
      }
  }
}

void commit(unsigned barrier, int blocks, Where where) {
  check_blocks(blocks, where);
  emulator::arrive_for(own_core(), barrier, where);
}
void commit_to(unsigned ranks, unsigned barrier, int blocks, Where where) {
  for (unsigned i = 0; i < 16; ++i)
    if (ranks >> i & 1) commit(address_in(barrier, i), blocks, where);
}

}  // namespace kda::cuda::ptx
