// Functions of one Blackwell instruction (sm_100a) each: tensor memory and products (tcgen05). What they share with
// Hopper, mbarriers, copies and elect(), is in sm90.h.
//
// Tensor memory has 128 lanes x 512 columns of 32 bits. Its addresses: a lane in the upper 16 bits, a column in the
// lower. Facts are from the PTX ISA 9.1, sections 9.7.16.1 to 9.7.16.12.
//
// kBlocks = 2: the two blocks of a cluster act together (cta_group::2). All tcgen05 of a kernel have the same kBlocks.
#pragma once
#include "cuda/ptx/descriptors_sm100.h"
#include "cuda/ptx/sm90.h"

namespace kda::cuda::ptx {

// ---- tensor memory: allocated by a whole warp, which waits until there are so many columns ----

// Writes the address of `columns` columns, 32, 64, .. 512, to shared memory. A block never asks for more than the last
// time. (kBlocks = 2: one warp of each block, with the same operands.)
template <int kBlocks = 1>
__device__ void tmem_alloc(unsigned to, unsigned columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns),
               "n"(kBlocks)
               : "memory");
}
// All that was allocated must be freed before the block ends.
template <int kBlocks = 1>
__device__ void tmem_dealloc(unsigned tmem, unsigned columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(columns), "n"(kBlocks)
               : "memory");
}
// The block will not allocate again; others on its SM may.
template <int kBlocks = 1>
__device__ void tmem_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kBlocks) : "memory");
}
__host__ __device__ constexpr unsigned tmem_at(unsigned tmem, unsigned lane, unsigned column) {
  return tmem + (lane << 16) + column;
}

// ---- between tensor memory and registers, by a whole warp: warp w reaches lanes 32 (w % 4) to 32 (w % 4) + 31 ----

#define KDA_NAMES_1 "%0"
#define KDA_NAMES_2 KDA_NAMES_1 ", %1"
#define KDA_NAMES_4 KDA_NAMES_2 ", %2, %3"
#define KDA_NAMES_8 KDA_NAMES_4 ", %4, %5, %6, %7"
#define KDA_NAMES_16 KDA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KDA_NAMES_32 \
  KDA_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KDA_NAMES_64                                                                 \
  KDA_NAMES_32                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KDA_NAMES_128                                                                            \
  KDA_NAMES_64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KDA_1(c, x, i) c((x)[i])
#define KDA_2(c, x, i) KDA_1(c, x, i), KDA_1(c, x, i + 1)
#define KDA_4(c, x, i) KDA_2(c, x, i), KDA_2(c, x, i + 2)
#define KDA_8(c, x, i) KDA_4(c, x, i), KDA_4(c, x, i + 4)
#define KDA_16(c, x, i) KDA_8(c, x, i), KDA_8(c, x, i + 8)
#define KDA_32(c, x, i) KDA_16(c, x, i), KDA_16(c, x, i + 16)
#define KDA_64(c, x, i) KDA_32(c, x, i), KDA_32(c, x, i + 32)
#define KDA_128(c, x, i) KDA_64(c, x, i), KDA_64(c, x, i + 64)
// `n` registers are `times` repetitions of the shape.
#define KDA_LOAD(shape, n, times, letter)                                                          \
  asm volatile("tcgen05.ld.sync.aligned." shape ".x" #times ".b32 {" KDA_NAMES_##n "}, [%" #n "];" \
               : KDA_##n("=" letter, x, 0)                                                         \
               : "r"(from)                                                                         \
               : "memory")
#define KDA_STORE(shape, n, times, letter)                                                    \
  asm volatile("tcgen05.st.sync.aligned." shape ".x" #times ".b32 [%" #n "], {" KDA_NAMES_##n \
               "};" ::KDA_##n(letter, x, 0),                                                  \
               "r"(to)                                                                        \
               : "memory")
// As many columns as there are registers: 1, 2, .. 128.
#define KDA_BY_COLUMNS(move, letter)                               \
  if constexpr (kCount == 1) move("32x32b", 1, 1, letter);         \
  else if constexpr (kCount == 2) move("32x32b", 2, 2, letter);    \
  else if constexpr (kCount == 4) move("32x32b", 4, 4, letter);    \
  else if constexpr (kCount == 8) move("32x32b", 8, 8, letter);    \
  else if constexpr (kCount == 16) move("32x32b", 16, 16, letter); \
  else if constexpr (kCount == 32) move("32x32b", 32, 32, letter); \
  else if constexpr (kCount == 64) move("32x32b", 64, 64, letter); \
  else {                                                           \
    static_assert(kCount == 128);                                  \
    move("32x32b", 128, 128, letter);                              \
  }
// Eight columns for each four registers: 4, 8, .. 128.
#define KDA_BY_FRAGMENTS(move, letter)                              \
  if constexpr (kCount == 4) move("16x256b", 4, 1, letter);         \
  else if constexpr (kCount == 8) move("16x256b", 8, 2, letter);    \
  else if constexpr (kCount == 16) move("16x256b", 16, 4, letter);  \
  else if constexpr (kCount == 32) move("16x256b", 32, 8, letter);  \
  else if constexpr (kCount == 64) move("16x256b", 64, 16, letter); \
  else {                                                            \
    static_assert(kCount == 128);                                   \
    move("16x256b", 128, 32, letter);                               \
  }

// Eight columns for each four registers: 4, 8, 16, 32.
#define KDA_BY_OPERANDS(move, letter)                              \
  if constexpr (kCount == 4) move("16x128b", 4, 2, letter);        \
  else if constexpr (kCount == 8) move("16x128b", 8, 4, letter);   \
  else if constexpr (kCount == 16) move("16x128b", 16, 8, letter); \
  else {                                                           \
    static_assert(kCount == 32);                                   \
    move("16x128b", 32, 16, letter);                               \
  }

// Lane l of the warp has lane l of its 32 lanes: columns from `tmem` on, one for each register. (32x32b.x1 .. x128)
template <class T, int kCount>
__device__ void load_tmem(T (&x)[kCount], unsigned from) {
  if constexpr (std::is_same_v<T, float>) {
    KDA_BY_COLUMNS(KDA_LOAD, "f")
  } else {
    KDA_BY_COLUMNS(KDA_LOAD, "r")
  }
}
template <class T, int kCount>
__device__ void store_tmem(unsigned to, const T (&x)[kCount]) {
  if constexpr (std::is_same_v<T, float>) {
    KDA_BY_COLUMNS(KDA_STORE, "f")
  } else {
    KDA_BY_COLUMNS(KDA_STORE, "r")
  }
}
// 16 lanes, the lower or the upper half of the warp's, as fragments of mma: lane 4 i + j of the warp has lanes i and
// i + 8 of them. x[4 n], x[4 n + 1] are columns 8 n + 2 j and 8 n + 2 j + 1 of the first, x[4 n + 2], x[4 n + 3] of the
// second. (16x256b.x1 .. x32)
template <class T, int kCount>
__device__ void load_tmem_fragments(T (&x)[kCount], unsigned from) {
  if constexpr (std::is_same_v<T, float>) {
    KDA_BY_FRAGMENTS(KDA_LOAD, "f")
  } else {
    KDA_BY_FRAGMENTS(KDA_LOAD, "r")
  }
}
template <class T, int kCount>
__device__ void store_tmem_fragments(unsigned to, const T (&x)[kCount]) {
  if constexpr (std::is_same_v<T, float>) {
    KDA_BY_FRAGMENTS(KDA_STORE, "f")
  } else {
    KDA_BY_FRAGMENTS(KDA_STORE, "r")
  }
}
// The same for left operands of mma in 16 bits, 16 numbers of the contraction for each four registers, which become
// left operands in tensor memory: x[4 n] is column 8 n + j of the first lane, x[4 n + 1] that of the second, and
// x[4 n + 2], x[4 n + 3] are columns 8 n + 4 + j. (16x128b.x2 .. x16)
template <int kCount>
__device__ void store_tmem_operands(unsigned to, const unsigned (&x)[kCount]) {
  KDA_BY_OPERANDS(KDA_STORE, "r")
}

#undef KDA_NAMES_1
#undef KDA_NAMES_2
#undef KDA_NAMES_4
#undef KDA_NAMES_8
#undef KDA_NAMES_16
#undef KDA_NAMES_32
#undef KDA_NAMES_64
#undef KDA_NAMES_128
#undef KDA_1
#undef KDA_2
#undef KDA_4
#undef KDA_8
#undef KDA_16
#undef KDA_32
#undef KDA_64
#undef KDA_128
#undef KDA_LOAD
#undef KDA_STORE
#undef KDA_BY_COLUMNS
#undef KDA_BY_FRAGMENTS
#undef KDA_BY_OPERANDS

// Loads have read, stores have written: by the calling warp, which calls it together.
__device__ inline void wait_for_tmem_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ inline void wait_for_tmem_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
// Loads, stores and products of a thread, in front of a barrier that shows them to others, and behind the barrier at
// which others learn of them. A commit needs no fence in front of it.
__device__ inline void fence_tmem_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ inline void fence_tmem_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// ---- products: one thread begins D [M, N] += or = A B^T, and goes on ----
//
// `shape` is umma_of(); a and b are operand_at(). Without accumulate D is overwritten. By one block, element (m, n) of
// D is at column n; at lane m if M = 128, at lane m / 16 * 32 + m % 16 if M = 64. With M = 64, D may begin at lane 0
// or 16. (kBlocks = 2: the first block has the upper half of D, the second the lower. Each brings half of the rows of
// A and of B. M = 256: at lane m % 128, column n. M = 128: at lane m % 64, and columns n >= N / 2 at lane m % 64 + 64,
// column n - N / 2.)
//
// A in tensor memory: its rows are at the lanes of D's, its 16-bit elements two in a column, the lower k in the lower
// half. (kBlocks = 2, M = 128: twice, at both lanes.)
//
// Products follow each other in order if they have the same D, shape and kind. Else the later one needs a commit, a
// wait and fence_tmem_after_sync() if it reads or overwrites what the earlier one wrote or read.

#define KDA_UMMA(kind, at, letter)                                                   \
  asm volatile(                                                                      \
      "{.reg .pred p; setp.ne.b32 p, %4, 0;\n"                                       \
      "tcgen05.mma.cta_group::%5.kind::" kind " [%0], " at ", %2, %3, p;}" ::"r"(d), \
      letter(a), "l"(b), "r"(shape), "r"(unsigned{accumulate}), "n"(kBlocks)         \
      : "memory")
template <int kBlocks = 1>
__device__ void umma_f16(unsigned d, uint64_t a, uint64_t b, unsigned shape, bool accumulate) {
  KDA_UMMA("f16", "%1", "l");
}
template <int kBlocks = 1>
__device__ void umma_f16_tmem(unsigned d, unsigned a, uint64_t b, unsigned shape, bool accumulate) {
  KDA_UMMA("f16", "[%1]", "r");
}
template <int kBlocks = 1>
__device__ void umma_tf32(unsigned d, uint64_t a, uint64_t b, unsigned shape, bool accumulate) {
  KDA_UMMA("tf32", "%1", "l");
}
template <int kBlocks = 1>
__device__ void umma_tf32_tmem(unsigned d, unsigned a, uint64_t b, unsigned shape, bool accumulate) {
  KDA_UMMA("tf32", "[%1]", "r");
}
#undef KDA_UMMA
// One thread begins to copy 128 rows of 32 bytes to 128 lanes of eight columns. `from` is a K-major operand_at(). What
// is said of a product's operands and of commits holds for copies, too. Later products of the thread come after them.
// (kBlocks = 2: in both blocks, from the same place of each block's shared memory.)
template <int kBlocks = 1>
__device__ void copy_to_tmem(unsigned tmem, uint64_t from) {
  asm volatile("tcgen05.cp.cta_group::%2.128x256b [%0], %1;" ::"r"(tmem), "l"(from), "n"(kBlocks) : "memory");
}
// Arrives once at the mbarrier when all products and copies that this thread has begun are done.
template <int kBlocks = 1>
__device__ void commit_umma(unsigned barrier) {
  asm volatile("tcgen05.commit.cta_group::%1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier),
               "n"(kBlocks)
               : "memory");
}
// The same at the mbarriers of several blocks of the cluster, one for each bit of `ranks`.
template <int kBlocks = 1>
__device__ void commit_umma_to(unsigned ranks, unsigned barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::%2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
          barrier),
      "h"(static_cast<unsigned short>(ranks)), "n"(kBlocks)
      : "memory");
}

}  // namespace kda::cuda::ptx
