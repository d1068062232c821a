// The functions of src/cuda/ptx/sm100.h on the emulated GPU: the same names and signatures. Descriptors are made by the
// same code on both, and read by umma.cc. tests/gpu/test_ptx_sm100.cc holds both to the same arithmetic.
#pragma once
#include "cuda/ptx/descriptors_sm100.h"
#include "cuda/ptx/sm90.h"

namespace kda::cuda::ptx {

// ---- tensor memory ----

void allocate_columns(unsigned to, unsigned columns, int blocks, Where where);
void free_columns(unsigned tmem, unsigned columns, int blocks, Where where);
void relinquish_columns(int blocks, Where where);

template <int kBlocks = 1>
void tmem_alloc(unsigned to, unsigned columns, Where where = Where::current()) {
  allocate_columns(to, columns, kBlocks, where);
}
template <int kBlocks = 1>
void tmem_dealloc(unsigned tmem, unsigned columns, Where where = Where::current()) {
  free_columns(tmem, columns, kBlocks, where);
}
template <int kBlocks = 1>
void tmem_relinquish(Where where = Where::current()) {
  relinquish_columns(kBlocks, where);
}
constexpr unsigned tmem_at(unsigned tmem, unsigned lane, unsigned column) { return tmem + (lane << 16) + column; }

// ---- between tensor memory and registers ----

enum class Cells { kLanes, kFragments, kOperands };  // 32x32b, 16x256b, 16x128b
void load_columns(void* x, unsigned count, unsigned from, Cells cells, Where where);
void store_columns(unsigned to, const void* x, unsigned count, Cells cells, Where where);

template <class T, int kCount>
void load_tmem(T (&x)[kCount], unsigned from, Where where = Where::current()) {
  static_assert(sizeof(T) == 4 && kCount <= 128 && (kCount & (kCount - 1)) == 0);
  load_columns(x, kCount, from, Cells::kLanes, where);
}
template <class T, int kCount>
void store_tmem(unsigned to, const T (&x)[kCount], Where where = Where::current()) {
  static_assert(sizeof(T) == 4 && kCount <= 128 && (kCount & (kCount - 1)) == 0);
  store_columns(to, x, kCount, Cells::kLanes, where);
}
template <class T, int kCount>
void load_tmem_fragments(T (&x)[kCount], unsigned from, Where where = Where::current()) {
  static_assert(sizeof(T) == 4 && kCount >= 4 && kCount <= 128 && (kCount & (kCount - 1)) == 0);
  load_columns(x, kCount, from, Cells::kFragments, where);
}
template <class T, int kCount>
void store_tmem_fragments(unsigned to, const T (&x)[kCount], Where where = Where::current()) {
  static_assert(sizeof(T) == 4 && kCount >= 4 && kCount <= 128 && (kCount & (kCount - 1)) == 0);
  store_columns(to, x, kCount, Cells::kFragments, where);
}
template <int kCount>
void store_tmem_operands(unsigned to, const unsigned (&x)[kCount], Where where = Where::current()) {
  static_assert(kCount >= 4 && kCount <= 32 && (kCount & (kCount - 1)) == 0);
  store_columns(to, x, kCount, Cells::kOperands, where);
}
void wait_for_tmem_loads(Where where = Where::current());
void wait_for_tmem_stores(Where where = Where::current());
void fence_tmem_before_sync();
void fence_tmem_after_sync();

// ---- products ----

struct Umma {
  unsigned d;
  uint64_t a;  // or an address in tensor memory
  uint64_t b;
  unsigned shape;
  bool accumulate, a_in_tensor, tf32;
  int blocks;
  Where where;
};
void multiply(const Umma& product);
void copy_rows(unsigned tmem, uint64_t from, int blocks, Where where);
void commit(unsigned barrier, int blocks, Where where);
void commit_to(unsigned ranks, unsigned barrier, int blocks, Where where);

template <int kBlocks = 1>
void umma_f16(unsigned d, uint64_t a, uint64_t b, unsigned shape, bool accumulate, Where where = Where::current()) {
  multiply({d, a, b, shape, accumulate, false, false, kBlocks, where});
}
template <int kBlocks = 1>
void umma_f16_tmem(unsigned d, unsigned a, uint64_t b, unsigned shape, bool accumulate,
                   Where where = Where::current()) {
  multiply({d, a, b, shape, accumulate, true, false, kBlocks, where});
}
template <int kBlocks = 1>
void umma_tf32(unsigned d, uint64_t a, uint64_t b, unsigned shape, bool accumulate, Where where = Where::current()) {
  multiply({d, a, b, shape, accumulate, false, true, kBlocks, where});
}
template <int kBlocks = 1>
void umma_tf32_tmem(unsigned d, unsigned a, uint64_t b, unsigned shape, bool accumulate,
                    Where where = Where::current()) {
  multiply({d, a, b, shape, accumulate, true, true, kBlocks, where});
}
template <int kBlocks = 1>
void copy_to_tmem(unsigned tmem, uint64_t from, Where where = Where::current()) {
  copy_rows(tmem, from, kBlocks, where);
}
template <int kBlocks = 1>
void commit_umma(unsigned barrier, Where where = Where::current()) {
  commit(barrier, kBlocks, where);
}
template <int kBlocks = 1>
void commit_umma_to(unsigned ranks, unsigned barrier, Where where = Where::current()) {
  commit_to(ranks, barrier, kBlocks, where);
}

}  // namespace kda::cuda::ptx
