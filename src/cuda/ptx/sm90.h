// Functions of one Hopper instruction (sm_90a) each: mbarriers, bulk copies, products of a warpgroup. Numbers that
// stand for shared memory are addresses in its window (shared_address).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/sm80.h"

namespace kda::cuda::ptx {

// ---- mbarriers: 8 bytes of shared memory that count arrivals and bytes ----
//
// Phases alternate in parity, the first is 0.

__device__ inline void init_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to copies, before the block's first __syncthreads().
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive(unsigned barrier, unsigned times = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
// Arrives, and promises bytes that copies will bring.
__device__ inline void arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Has the phase ended? is_phase_over() answers at once, has_phase_ended() after having waited for a while.
#define KDA_PHASE(look)                        \
  unsigned done;                               \
  asm volatile(                                \
      "{.reg .pred p;\n"                       \
      "mbarrier." look                         \
      ".parity.shared::cta.b64 p, [%1], %2;\n" \
      "selp.u32 %0, 1, 0, p;}"                 \
      : "=r"(done)                             \
      : "r"(barrier), "r"(parity)              \
      : "memory");                             \
  return done
__device__ inline bool is_phase_over(unsigned barrier, unsigned parity) { KDA_PHASE("test_wait"); }
__device__ inline bool has_phase_ended(unsigned barrier, unsigned parity) { KDA_PHASE("try_wait"); }
#undef KDA_PHASE
__device__ inline void wait_barrier(unsigned barrier, unsigned parity) {
  while (!has_phase_ended(barrier, parity)) {
  }
}

// ---- blocks of a cluster ----

__device__ inline unsigned rank() {
  unsigned x;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}
// The address in block `rank` of the shared memory that is at `address` in this block.
__device__ inline unsigned address_in(unsigned address, unsigned rank) {
  unsigned x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
  return x;
}
// Synchronises all threads of all blocks of the cluster.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two steps. Afterwards only barriers of fence_barriers() are known: this does not wait for memory.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// arrive() and arrive_expecting() at a barrier whose address comes from address_in(). (They order what this block has
// read and stored in its own shared memory; with the scope of the cluster they would wait for all memory.)
__device__ inline void arrive_at(unsigned barrier, unsigned times = 1) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
__device__ inline void arrive_expecting_at(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline unsigned load_shared_at(unsigned from) {
  unsigned x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
// Sends a number to another block's shared memory, with 4 of the bytes that the barrier there expects. Both addresses
// come from address_in().
__device__ inline void send(unsigned to, unsigned x, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(x),
               "r"(barrier)
               : "memory");
}

// ---- named barriers of some warps of a block: 1..15 ----

__device__ inline void sync_threads(unsigned barrier, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same for warps that reach the barrier on different paths through the program.
__device__ inline void sync_ways(unsigned barrier, unsigned threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Arrives without waiting; others wait in sync_threads().
__device__ inline void arrive_threads(unsigned barrier, unsigned threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Synchronises as sync_ways() does. Was `x` true in all of the threads?
__device__ inline bool all_threads(unsigned barrier, unsigned threads, bool x) {
  unsigned all;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0;\n"
      "barrier.red.and.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(all)
      : "r"(unsigned{x}), "r"(barrier), "r"(threads)
      : "memory");
  return all;
}

// ---- bulk copies of neighbouring bytes, multiples of 16, by one thread ----

// Picks one lane of a warp, always the same one; all lanes call it. If the lane were picked by its number, there
// would be a loop around each copy, as the compiler knows no other way to have one lane alone.
__device__ inline bool elect() {
  unsigned x;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(x));
  return x;
}

__device__ inline void copy_bulk_to_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Copies a tile of a tensor of four dimensions. `map` says where the tensor is and how large its tiles are, and is a
// parameter of the kernel. What is outside of the tensor becomes zero.
__device__ inline void copy_tile(unsigned to, const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w,
                                 unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
// A hint: `map` will be used.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies to the same place of shared memory in several blocks of the cluster, one for each bit of `ranks`.
__device__ inline void copy_tile_to(unsigned ranks, unsigned to, const CUtensorMap& map, unsigned x, unsigned y,
                                    unsigned z, unsigned w, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
      : "memory");
}
// Copies from shared memory to the tensor; what would be outside of it is left out.
__device__ inline void store_tile(const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w,
                                  unsigned from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z), "r"(w), "r"(from)
               : "memory");
}
// The same for tensors of five dimensions.
__device__ inline void copy_box(unsigned to, const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w,
                                unsigned u, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "r"(barrier)
      : "memory");
}
__device__ inline void copy_box_to(unsigned ranks, unsigned to, const CUtensorMap& map, unsigned x, unsigned y,
                                   unsigned z, unsigned w, unsigned u, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
      : "memory");
}
__device__ inline void store_box(const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w, unsigned u,
                                 unsigned from) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "r"(from)
      : "memory");
}
__device__ inline void copy_bulk_to_global(void* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
// Copies from this block's shared memory to another block's, where `to` and `barrier` are (address_in).
__device__ inline void copy_bulk_between(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kGroups groups of this thread are written; _reads: until their sources may be
// overwritten.
template <int kGroups>
__device__ void wait_for_bulk() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}
template <int kGroups>
__device__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// ---- fences between stores of threads and reads by copies and matrix units (the "async proxy"), and back ----

__device__ inline void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_global_for_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- flags in global memory, between blocks ----

__device__ inline void store_release(unsigned* to, unsigned x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ inline void add_release(unsigned* to, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ inline unsigned load_acquire(const unsigned* from) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// ---- registers of a warpgroup, a multiple of 8 ----

template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores registers as four 8x8 matrices, transposed; addresses as for load_matrices().
__device__ inline void store_transposed(unsigned to, const unsigned (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// The larger magnitudes of two pairs of numbers, with any sign. kNaN: the result is NaN if one of them is, otherwise
// only if both are.
template <class T, bool kNaN>
__device__ unsigned larger(unsigned x, unsigned y) {
  unsigned z;
#define KDA_MAX(type) asm("max" type " %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y))
  if constexpr (std::is_same_v<T, __half> && kNaN) KDA_MAX(".NaN.xorsign.abs.f16x2");
  else if constexpr (std::is_same_v<T, __half>) KDA_MAX(".xorsign.abs.f16x2");
  else if constexpr (kNaN) KDA_MAX(".NaN.xorsign.abs.bf16x2");
  else KDA_MAX(".xorsign.abs.bf16x2");
#undef KDA_MAX
  return z;
}

// ---- wgmma: d (64 x N) += or = a (64 x 16) b (16 x N), in f32, by the four warps of a warpgroup together ----
//
// Lane 4 i + j of warp w has rows 16 w + i and 16 w + i + 8 of d, columns 8 n + 2 j and 8 n + 2 j + 1. The first row
// is in d[4 n], d[4 n + 1], the second in d[4 n + 2], d[4 n + 3]. Two neighbouring n, rounded and packed in pairs,
// are the fragment of an a.

// Orders this warpgroup's writes to accumulators and shared memory before the products that use them.
__device__ inline void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kGroups>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// How 16-byte pieces of rows of 128 or 64 bytes are swizzled: bits 4.. of an address ^ bits 7..
enum class Swizzle : uint64_t { k128 = 1, k64 = 2 };
// A matrix in shared memory. stride: the bytes from eight rows to the next eight. leading: if the rows are channels
// of the contraction (kTransposed), the bytes from as many columns as a row holds to the next ones. (In clusters, the
// upper bits of an address say whose memory it is.)
__device__ inline uint64_t matrix_at(unsigned address, unsigned leading, unsigned stride, Swizzle swizzle) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
// The same matrix, `bytes` further on.
__device__ inline uint64_t further(uint64_t matrix, unsigned bytes) {
  return (matrix & ~uint64_t{0xffffffff}) | (static_cast<unsigned>(matrix) + (bytes >> 4));
}

// a in registers, N = 32. Without accumulate d is overwritten.
template <class T, bool kTransposed>
__device__ void wgmma(float (&d)[16], const unsigned (&a)[4], uint64_t b, bool accumulate) {
#define KDA_WGMMA(type)                                                                                               \
  asm volatile(                                                                                                       \
      "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"                                                                       \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, " \
      "%22;}"                                                                                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),   \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposed)))
  if constexpr (std::is_same_v<T, __half>) KDA_WGMMA("f16");
  else KDA_WGMMA("bf16");
#undef KDA_WGMMA
}
// a in registers, N = 64. Without accumulate d is overwritten.
template <class T, bool kTransposed>
__device__ void wgmma(float (&d)[32], const unsigned (&a)[4], uint64_t b, bool accumulate) {
#define KDA_WGMMA(type)                                                                                             \
  asm volatile(                                                                                                     \
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
      "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),      \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),     \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposed)))
  if constexpr (std::is_same_v<T, __half>) KDA_WGMMA("f16");
  else KDA_WGMMA("bf16");
#undef KDA_WGMMA
}
// a in registers, N = 128. Without accumulate d is overwritten.
template <class T, bool kTransposed>
__device__ void wgmma(float (&d)[64], const unsigned (&a)[4], uint64_t b, bool accumulate) {
#define KDA_WGMMA(type)                                                                                                \
  asm volatile(                                                                                                        \
      "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"                                                                        \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "    \
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
      "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, "    \
      "%66, %67}, %68, p, 1, 1, %70;}"                                                                                 \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposed)))
  if constexpr (std::is_same_v<T, __half>) KDA_WGMMA("f16");
  else KDA_WGMMA("bf16");
#undef KDA_WGMMA
}
// a in shared memory, not transposed, N = 32.
template <class T, bool kTransposed = false>
__device__ void wgmma_shared(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
#define KDA_WGMMA(type)                                                                                             \
  asm volatile(                                                                                                     \
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, %19;}"        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                    \
      : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposed)))
  if constexpr (std::is_same_v<T, __half>) KDA_WGMMA("f16");
  else KDA_WGMMA("bf16");
#undef KDA_WGMMA
}

// The same in bf16, N = 64 and 128. kTransposed: the rows of a are channels of the contraction.
template <bool kTransposed>
__device__ void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
      "%23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposed)));
}
template <bool kTransposed>
__device__ void wgmma_shared(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, "
      "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, "
      "1, %67, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposed)));
}
// x is an accumulator whose products are done. No use of it moves before this point.
template <int kCount>
__device__ void settle(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
// x and y are there before anything that follows.
__device__ inline void arrive_in_registers(float& x, float& y) { asm volatile("" : "+f"(x), "+f"(y)); }

// Stores registers as four 8x8 matrices, in the order in which load_matrices() loads them.
__device__ inline void store_matrices(unsigned to, const unsigned (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace kda::cuda::ptx
