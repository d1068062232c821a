// Descriptors of Blackwell's products (tcgen05.mma): which operand lies where in shared memory, and what is
// multiplied. Plain arithmetic, the same for the emulated GPU.
//
// Facts are from the PTX ISA 9.1, sections 9.7.16.3 (strides, canonical layouts), 9.7.16.4.1 (shared memory
// descriptor), 9.7.16.4.2 (instruction descriptor) and 9.7.16.10 (valid combinations), compared with CUTLASS 4,
// cute/arch/mma_sm100_desc.hpp.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kda::cuda::ptx {

// An operand is A [M, K] or B [N, K]; K is the contraction. A product takes 32 bytes of K: 16 elements, 8 of tf32.
//
// K-major: the elements of a row along K are neighbours. Rows of R = 128, 64 or 32 bytes (k128, k64, k32) lie one
// behind the other, and each eight rows begin `stride` bytes behind the eight before them. `leading` is unused. The
// next 32 bytes of K are further(operand, 32), until the row of R bytes ends; what follows has an operand of its own.
// kNone: eight rows of 16 bytes lie one behind the other. `stride` bytes lead to the next eight rows, `leading` bytes
// to the next 16 bytes of K.
//
// Transposed (MN-major): elements along M or N are neighbours. Lines of R bytes, one for each k, lie one behind the
// other. Each eight lines begin `stride` bytes behind the eight before them, and `leading` bytes lead to the next R
// bytes along M or N. The next 16 k of k128 with stride 1024 are further(operand, 2048). kNone: R is 16, `leading`
// leads to the next eight k and `stride` to the next 16 bytes along M or N. tf32 takes no other than k128By32: R is
// 128, four lines make a pattern, and `stride` leads to the next four.
//
// 16-byte pieces of a row are swizzled as copies do it: bits 4.. of an address ^ its bits from 7 on, three of them in
// k128, two in k64, one in k32. k128By32 exchanges pieces of 32 bytes: bits 5 and 6 ^ bits 7 and 8. A pattern begins
// at a multiple of 8 R bytes (k128By32: 512).
enum class Swizzling : uint64_t { kNone = 0, k128By32 = 1, k128 = 2, k64 = 4, k32 = 6 };

__host__ __device__ constexpr uint64_t operand_at(unsigned address, unsigned leading, unsigned stride,
                                                  Swizzling swizzling) {
  constexpr uint64_t kVersion = 1;  // of Blackwell
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | kVersion << 46 | static_cast<uint64_t>(swizzling) << 61;
}

// D [M, N] += or = A B^T, in f32. transposed: the operand is MN-major. negated: its sign is changed.
// By one block: M = 64, N a multiple of 8, or M = 128, N a multiple of 16. By two: M = 128 or 256, N a multiple of 16.
// N <= 256.
struct UmmaShape {
  unsigned M, N;
  bool transposed_a = false, transposed_b = false, negated_a = false, negated_b = false;
};
// T: __half, __nv_bfloat16, or float, which is taken as tf32.
template <class T>
__host__ __device__ constexpr unsigned umma_of(const UmmaShape& s) {
  constexpr unsigned kF32 = 1, kElement = std::is_same_v<T, __half> ? 0 : std::is_same_v<T, float> ? 2 : 1;
  return kF32 << 4 | kElement << 7 | kElement << 10 | static_cast<unsigned>(s.negated_a) << 13 |
         static_cast<unsigned>(s.negated_b) << 14 | static_cast<unsigned>(s.transposed_a) << 15 |
         static_cast<unsigned>(s.transposed_b) << 16 | s.N / 8 << 17 | s.M / 16 << 24;
}

}  // namespace kda::cuda::ptx
