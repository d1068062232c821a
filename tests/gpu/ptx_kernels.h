// Kernels that use the wrappers of src/cuda/ptx, one or two each. All pointers are to the device. No kernel hangs:
// one that waits for an mbarrier gives up after a while, and its results are wrong.
#pragma once
#include "kda/kda.h"

namespace kda::test {

// ---- sm_80 and newer (ptx_sm80.cu) ----

// For n pairs: exp2(x), reciprocal(x), inverse_root(x), least(x, y), multiply_flushed(x, y) in z [5,n]; both numbers
// packed as f16 and as bf16 in packed [2,n].
void compute(int n, const float* x, const float* y, float* z, unsigned* packed);
// Each thread i < 32 has 16 bytes of 0xff, and copies there: with copy16 i bytes for i <= 16, then 16 by default;
// with copy8 0 to 8 bytes, then 8 by default; the last four threads copy nothing.
void copy_asynchronously(const void* from, void* to);
// The registers of 32 lanes, x [3,4,32]: four 8x8 matrices loaded, loaded transposed, loaded and then transposed.
void load_matrices(const void* matrices, unsigned* x);
// d [16,8] += a b^T. f16 and bf16: a and b have 16 columns; f32, taken as tf32: 8.
void multiply_by_warp(int32_t dtype, const void* a, const void* b, float* d);

// ---- Hopper (ptx_sm90.cu) ----

// What a thread sees of an mbarrier for three arrivals: whether the phase of parity 0 has ended, and whether that of
// parity 1 has; plus 2 if a look that does not wait says so, too.
constexpr int kSights = 18;
void watch_barrier(const void* from, char* seen);
// A warp writes 7, and another warp sees it behind a barrier that the two reach on different paths; seen [32].
void meet_by_two_ways(char* seen);
// The same, where the first warp only arrives.
void meet_by_arrival(char* seen);
// Which lanes of two warps are elected, twice; elected [2,2,32].
void elect_twice(char* elected);
// Two halves of 128 threads each vote on x [cases,128]; all [cases,128].
void vote(int cases, const char* x, char* all);
// Copies 16 * count bytes to 2048 bytes of shared memory that were 0xff, and all of these to `seen`; then 16 * count
// bytes of their complement, from byte 16 on, to `to`.
void copy_bulk(unsigned count, const void* from, void* seen, void* to);
// Where a tile of a tensor [B,T,heads,128] begins.
struct Corner {
  unsigned channel, head, token, b;
};
// Loads a tile of 32 tokens x 64 channels; seen: its 4096 bytes as they lie in shared memory.
void load_tile(const kda_tensor& from, const Corner& at, void* seen);
// The other way round.
void store_tile(const kda_tensor& to, const Corner& at, const void* tile);
// Two blocks of a cluster. Each has 6144 bytes of shared memory that were 0xff; the first block has 1024 bytes of
// `from` behind byte 4096. The first block copies these to the other's memory, 1024 bytes further, and a tile to the
// beginning of the other's memory only, and sends a 5. An mbarrier there waits for these bytes, two arrivals of the
// first block and one of the other. seen [2,6144]: both memories. notes [2,5]: a block's rank; the rank that the
// other's memory holds; whether the phase of its own mbarrier has ended, and the same by a look that does not wait;
// and what was sent, or 7.
void copy_between_blocks(const void* from, const kda_tensor& tile, const Corner& at, void* seen, unsigned* notes);
// 16 columns of a head's state in f32 [slots,HV,128,128], from column 16 * first on, and the slot where they go.
struct Columns {
  unsigned first, hv, slot, to;
};
// Two blocks of a cluster. The first block copies these columns to its own shared memory and the next 16 to the
// other's only: four boxes each, seen [2,2048]. Each block stores what it has.
void exchange_states(const kda_tensor& from, const kda_tensor& to, const Columns& at, float* seen);
// Stores the registers of 32 lanes x [4,32] as four 8x8 matrices.
void store_matrices(const unsigned* x, void* matrices);
// For n pairs of pairs: z [2,n] holds larger<T, false>, then larger<T, true>.
void compute_larger(int32_t dtype, int n, const unsigned* x, const unsigned* y, unsigned* z);

// Products by a warpgroup: d [64,N] = or += a b^T.
struct Product {
  unsigned N;
  bool transposed;     // in shared memory, rows of b are channels of the contraction
  unsigned row_bytes;  // in shared memory
  bool shared;         // a is in shared memory as well
  // Channels of the contraction: enough for several instructions and, where rows are of 128 bytes, for two parts of
  // b.
  static constexpr unsigned depth(bool transposed, unsigned row_bytes) {
    return transposed || row_bytes == 64 ? 32 : 128;
  }
  unsigned depth() const { return depth(transposed, row_bytes); }
};
// a: its rows, or, like b, its image in shared memory.
void multiply_by_warpgroup(int32_t dtype, const Product& p, const void* a, const void* b, bool accumulate, float* d);

// Where the Hopper forward has 16-bit elements, in bytes. square [32,32]: those of T and Aqk; own [8,128,2]: the four
// channels of a thread in rows of its warp, as a place within half a tile, and which half.
void find_places(unsigned* square, unsigned* own);

// ---- Blackwell (ptx_sm100.cu) ----

// Four warps store x [128,columns] by columns, and load it by columns to `seen`, in so many columns at a time: 1, 2, ..
// 128. columns: at most 128.
void keep_by_columns(unsigned columns, unsigned at_a_time, const unsigned* x, unsigned* seen);
// The same by fragments; at_a_time: 8, 16, .. 256 columns.
void keep_by_fragments(unsigned columns, unsigned at_a_time, const unsigned* x, unsigned* seen);
// Four warps store x [128,columns] as left operands, and load it by columns; at_a_time: 8, 16, 32, 64 columns.
void keep_by_operands(unsigned columns, unsigned at_a_time, const unsigned* x, unsigned* seen);
// Four warps store x [128,columns] by columns, and load it by fragments of eight columns: the registers of each thread,
// seen [columns / 8,2,4,128].
void mix_shapes(unsigned columns, const unsigned* x, unsigned* seen);

// Copies 128 rows of 32 bytes, in several steps, from their image in shared memory: seen [128,8 * steps].
struct UmmaOperand {
  unsigned leading, stride, bytes;
  uint64_t swizzling;
  unsigned offsets[8];  // of each step
};
void copy_to_tensor(unsigned steps, const UmmaOperand& from, const void* image, unsigned* seen);

// A product of one block, or of two in a cluster: d [M,N] = or += a b^T, in several steps of 32 bytes of K.
struct UmmaCase {
  int32_t dtype;  // of a and b; KDA_F32 is taken as tf32
  unsigned blocks, M, N, steps;
  bool transposed_a, transposed_b, negated_a, negated_b;
  bool in_tensor;       // a is in tensor memory
  unsigned first_lane;  // of d
  UmmaOperand a, b;     // in shared memory; of two blocks, each has half of the rows
};
// a: its image in shared memory or, in_tensor, its rows; b: its image. Of two blocks, one image behind the other.
void multiply_by_blocks(const UmmaCase& p, const void* a, const void* b, bool accumulate, float* d);

}  // namespace kda::test
