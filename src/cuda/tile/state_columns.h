// Asynchronous copies to shared memory, and value columns of a state that come that way.
#pragma once
#include "cuda/call/state_rows.h"

namespace kda::cuda {

__device__ inline void copy_async(float* shared, const float* from) { ptx::copy4(ptx::shared_address(shared), from); }

// Rows of kK channels, one value column each. Groups of 16 channels are swizzled with their neighbours so that both
// ways of reading are free of bank conflicts: a row with eight lanes, and 16 channels of eight rows with four lanes
// each.
template <class T, int kK>
class Tile {
 public:
  static constexpr int kChunk = 16 / sizeof(T), kChunks = kK / kChunk;  // channels of a chunk, chunks of a row

  __device__ explicit Tile(void* shared) : data_(static_cast<T*>(shared)) {}
  __host__ __device__ static constexpr int bytes(int rows) { return rows * kK * static_cast<int>(sizeof(T)); }

  // Starts copies of rows that are `step` bytes apart. All kThreads threads do it together, for a multiple of 16
  // rows. Without `real`, the rows become zeros.
  template <int kThreads>
  __device__ void ask(const char* from, uint32_t step, int rows, bool real) const {
    constexpr int kRowsAtOnce = kThreads / kChunks;
    static_assert(kRowsAtOnce % 4 == 0, "a thread's rows have one twist");
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    unsigned to = ptx::shared_address(data_ + at(row, chunk * kChunk));
    const char* source = real ? from + row * static_cast<uint64_t>(step) + chunk * 16 : from;
    const uint64_t next = real ? kRowsAtOnce * static_cast<uint64_t>(step) : 0;
#pragma unroll 4
    for (int i = 0; i < rows / kRowsAtOnce; ++i) {
      ptx::copy16(to, source, real ? 16 : 0);
      to += kRowsAtOnce * kK * static_cast<int>(sizeof(T)), source += next;
    }
  }
  // The same for rows of K channels, f32 or bf16, in a tile of floats. Rows in bf16 come through registers, a few at a
  // time.
  template <int kThreads>
  __device__ void ask_any(const char* from, int32_t dtype, uint32_t step, int rows, bool real, int K) const {
    const int c = static_cast<int>(threadIdx.x) % kChunks * kChunk;
    if (c >= K) return;
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.x) / kChunks; row < rows; row += kThreads / kChunks) {
      const char* source = real ? from + row * static_cast<uint64_t>(step) : from;
      T* to = data_ + at(row, c);
      if (real && dtype == KDA_BF16) store_four(to, load_four(reinterpret_cast<const __nv_bfloat16*>(source) + c));
      else ptx::copy16(ptx::shared_address(to), real ? source + c * sizeof(T) : source, real ? 16 : 0);
    }
  }
  // For walking along rows whose numbers differ by multiples of four: channels 16 i + 4 j .. + 3 of row + 4 m are at
  // lane(row, j) + 4 m kK + 16 (i ^ twist(row)).
  __device__ const T* lane(int row, int j) const { return data_ + row * kK + 4 * j; }
  __device__ static int twist(int row) { return sizeof(T) == 4 ? row & 1 : row & 3; }

 private:
  __device__ static int at(int row, int channel) {
    return row * kK + ((channel / 16) ^ twist(row)) * 16 + channel % 16;
  }
  T* data_;
};

// Why states cannot come through shared memory, or nullptr.
inline const char* tile_why_not(const Dims& d, int32_t layout, std::initializer_list<const kda_tensor*> states,
                                int64_t columns) {
  if (layout != KDA_STATE_V_FIRST) return "takes V-first states only";
  if ((d.K != 64 && d.K != 128) || d.V % columns) return "takes K = 64 or 128 and multiples of 64 for V";
  for (const kda_tensor* t : states)
    if (present(*t) && !rows_aligned(*t, 16 / dtype_size(t->dtype)))
      return "needs rows of states at multiples of 16 bytes";
  return nullptr;
}

}  // namespace kda::cuda
