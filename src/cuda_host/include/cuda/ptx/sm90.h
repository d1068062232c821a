// The functions of src/cuda/ptx/sm90.h on the emulated GPU: the same names and signatures. tests/gpu/test_ptx_sm90.cc
// holds both to the same arithmetic.
#pragma once
#include <cuda.h>

#include "cuda/ptx/sm80.h"

namespace kda::cuda::ptx {

// ---- mbarriers ----

inline void init_barrier(unsigned barrier, unsigned arrivals, Where where = Where::current()) {
  emulator::init_mbarrier(barrier, arrivals, where);
}
inline void fence_barriers() { emulator::fence_mbarriers(); }
inline void arrive(unsigned barrier, unsigned times = 1, Where where = Where::current()) {
  emulator::arrive(barrier, times, 0, where);
}
inline void arrive_expecting(unsigned barrier, unsigned bytes, Where where = Where::current()) {
  emulator::arrive(barrier, 1, bytes, where);
}
inline bool is_phase_over(unsigned barrier, unsigned parity, Where where = Where::current()) {
  return emulator::is_phase_over(barrier, parity, where);
}
// A thread that polls waits here.
inline void wait_barrier(unsigned barrier, unsigned parity, Where where = Where::current()) {
  emulator::wait_for_phase(barrier, parity, where);
}
inline bool has_phase_ended(unsigned barrier, unsigned parity, Where where = Where::current()) {
  return emulator::is_phase_over(barrier, parity, where) || emulator::let_others_go_on();
}

// ---- blocks of a cluster ----

inline unsigned rank(Where where = Where::current()) { return emulator::rank(where); }
inline unsigned address_in(unsigned address, unsigned rank) { return emulator::address_in(address, rank); }
inline void arrive_at_cluster(Where where = Where::current()) { emulator::arrive_at_cluster(true, where); }
inline void wait_for_cluster(Where where = Where::current()) { emulator::wait_for_cluster(where); }
inline void sync_cluster(Where where = Where::current()) {
  emulator::arrive_at_cluster(false, where), emulator::wait_for_cluster(where);
}
inline void arrive_at(unsigned barrier, unsigned times = 1, Where where = Where::current()) {
  emulator::arrive(barrier, times, 0, where);
}
inline void arrive_expecting_at(unsigned barrier, unsigned bytes, Where where = Where::current()) {
  emulator::arrive(barrier, 1, bytes, where);
}
inline unsigned load_shared_at(unsigned from, Where where = Where::current()) { return load_shared(from, where); }
inline void send(unsigned to, unsigned x, unsigned barrier, Where where = Where::current()) {
  emulator::bring(to, &x, sizeof x, barrier, where), emulator::count_bytes(barrier, sizeof x, where);
}

// ---- named barriers ----

inline void sync_threads(unsigned barrier, unsigned threads, Where where = Where::current()) {
  emulator::meet(barrier, threads, where);
}
inline void sync_ways(unsigned barrier, unsigned threads, Where where = Where::current()) {
  emulator::meet(barrier, threads, where);
}
inline void arrive_threads(unsigned barrier, unsigned threads, Where where = Where::current()) {
  emulator::arrive_at_meeting(barrier, threads, where);
}
inline bool all_threads(unsigned barrier, unsigned threads, bool x, Where where = Where::current()) {
  return emulator::meet(barrier, threads, where, x);
}

// ---- bulk copies ----

bool elect(Where where = Where::current());

void copy_bulk_to_shared(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                         Where where = Where::current());
void copy_bulk_to_global(void* to, unsigned from, unsigned bytes, Where where = Where::current());
void copy_bulk_between(unsigned to, unsigned from, unsigned bytes, unsigned barrier, Where where = Where::current());

// The corner of a tile, in as many dimensions as the map has.
struct Corner {
  unsigned at[5];
};
void load_box(unsigned to, const CUtensorMap& map, const Corner& corner, unsigned barrier, Where where);
void load_box_to(unsigned ranks, unsigned to, const CUtensorMap& map, const Corner& corner, unsigned barrier,
                 Where where);
void store_box(const CUtensorMap& map, const Corner& corner, unsigned from, Where where);

inline void prefetch_map(const CUtensorMap&) {}
inline void copy_tile(unsigned to, const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w,
                      unsigned barrier, Where where = Where::current()) {
  load_box(to, map, {{x, y, z, w, 0}}, barrier, where);
}
inline void copy_tile_to(unsigned ranks, unsigned to, const CUtensorMap& map, unsigned x, unsigned y, unsigned z,
                         unsigned w, unsigned barrier, Where where = Where::current()) {
  load_box_to(ranks, to, map, {{x, y, z, w, 0}}, barrier, where);
}
inline void store_tile(const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w, unsigned from,
                       Where where = Where::current()) {
  store_box(map, {{x, y, z, w, 0}}, from, where);
}
inline void copy_box(unsigned to, const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w, unsigned u,
                     unsigned barrier, Where where = Where::current()) {
  load_box(to, map, {{x, y, z, w, u}}, barrier, where);
}
inline void copy_box_to(unsigned ranks, unsigned to, const CUtensorMap& map, unsigned x, unsigned y, unsigned z,
                        unsigned w, unsigned u, unsigned barrier, Where where = Where::current()) {
  load_box_to(ranks, to, map, {{x, y, z, w, u}}, barrier, where);
}
inline void store_box(const CUtensorMap& map, unsigned x, unsigned y, unsigned z, unsigned w, unsigned u, unsigned from,
                      Where where = Where::current()) {
  store_box(map, {{x, y, z, w, u}}, from, where);
}
inline void commit_bulk() { emulator::commit_bulk(); }
// Writes are done at once.
template <int kGroups>
void wait_for_bulk() {
  emulator::wait_for_bulk(kGroups);
}
template <int kGroups>
void wait_for_bulk_reads() {
  emulator::wait_for_bulk(kGroups);
}

inline void fence_shared_for_async() { emulator::fence_for_async(); }
inline void fence_global_for_async() {}

// ---- flags in global memory ----

inline void store_release(unsigned* to, unsigned x) { emulator::change(to, x); }
inline void add_release(unsigned* to, unsigned x) { emulator::change(to, *to + x); }
inline unsigned load_acquire(const unsigned* from, Where where = Where::current()) {
  return emulator::look_at(from, where);
}

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

// ---- matrices and numbers ----

void store_matrices(unsigned to, const unsigned (&x)[4], Where where = Where::current());
void store_transposed(unsigned to, const unsigned (&x)[4], Where where = Where::current());

// For both halves of the registers: the larger magnitude, with the sign of their product.
template <class T, bool kNaN>
unsigned larger(unsigned x, unsigned y) {
  const auto of_half = [](unsigned a, unsigned b) -> unsigned {
    constexpr unsigned kInfinity = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
    const unsigned sign = (a ^ b) & 0x8000, most = a & 0x7fff, other = b & 0x7fff;
    const bool first = most > kInfinity, second = other > kInfinity;  // NaN
    if ((first && second) || (kNaN && (first || second))) return 0x7fff;
    return sign | (first ? other : second ? most : max(most, other));
  };
  return of_half(x & 0xffff, y & 0xffff) | of_half(x >> 16, y >> 16) << 16;
}

// ---- wgmma ----

inline void fence_products() {}
inline void commit_products(Where where = Where::current()) { emulator::commit_products(where); }
template <int kGroups>
void wait_for_products(Where where = Where::current()) {
  emulator::wait_for_products(kGroups, where);
}
enum class Swizzle : uint64_t { k128 = 1, k64 = 2 };
inline uint64_t matrix_at(unsigned address, unsigned leading, unsigned stride, Swizzle swizzle) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
inline uint64_t further(uint64_t matrix, unsigned bytes) {
  return (matrix & ~uint64_t{0xffffffff}) | (static_cast<unsigned>(matrix) + (bytes >> 4));
}

// d [64, columns] += or = a b, a [64, 16] of registers or shared memory.
struct WarpgroupProduct {
  float* d;
  unsigned columns;
  const unsigned* a;  // or nullptr: then it is at shared_a
  uint64_t shared_a, b;
  bool accumulate, f16, transposed_a, transposed_b;
  Where where;
};
void multiply(WarpgroupProduct& product);

template <class T, bool kTransposed, int kCount>
void wgmma(float (&d)[kCount], const unsigned (&a)[4], uint64_t b, bool accumulate, Where where = Where::current()) {
  WarpgroupProduct product{d, 2 * kCount, a, 0, b, accumulate, std::is_same_v<T, __half>, false, kTransposed, where};
  multiply(product);
}
template <class T, bool kTransposed = false>
void wgmma_shared(float (&d)[16], uint64_t a, uint64_t b, bool accumulate, Where where = Where::current()) {
  WarpgroupProduct product{d, 32, nullptr, a, b, accumulate, std::is_same_v<T, __half>, false, kTransposed, where};
  multiply(product);
}
template <bool kTransposed, int kCount>
void wgmma_shared(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate, Where where = Where::current()) {
  static_assert(kCount == 32 || kCount == 64);
  WarpgroupProduct product{d, 2 * kCount, nullptr, a, b, accumulate, false, kTransposed, false, where};
  multiply(product);
}
template <int kCount>
void settle(float (&)[kCount]) {}
inline void arrive_in_registers(float&, float&) {}

}  // namespace kda::cuda::ptx
