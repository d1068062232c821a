// Tensor maps for TMA. q, k, v, g, o and U are copied as tiles of 64 channels of a chunk's rows, swizzled like the
// stages; states as boxes of 32 channels of 16 columns.
#pragma once
#include <cuda.h>

#include <iterator>

#include "cuda/call/tma.h"
#include "cuda/engine/pipeline.h"

namespace kda::cuda::engine {

// Finds cuTensorMapEncodeTiled in the driver, to which this library is not linked.
inline decltype(&cuTensorMapEncodeTiled) map_encoder() {
  static const auto found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    KDA_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result));
    if (!entry) throw Error(KDA_CUDA_ERROR, "CUDA: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return found;
}
template <unsigned kRank>
struct MapShape {
  cuuint64_t sizes[kRank], strides[kRank - 1];  // innermost first; strides in bytes
  cuuint32_t box[kRank];
};
template <unsigned kRank>
CUtensorMap make_map(CUtensorMapDataType type, void* data, const MapShape<kRank>& shape, CUtensorMapSwizzle swizzle) {
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const auto encode = [&] {
    return map_encoder()(&map, type, kRank, data, shape.sizes, shape.strides, shape.box, kSteps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // the thread has done nothing with CUDA yet
    int device = 0;
    KDA_CUDA(cudaGetDevice(&device));
    KDA_CUDA(cudaSetDevice(device));  // binds its context to the thread
    result = encode();
  }
  if (result != CUDA_SUCCESS)
    throw Error(KDA_CUDA_ERROR, str("CUDA: cuTensorMapEncodeTiled failed (", static_cast<int>(result), ")"));
  return map;
}
// A stride in bytes. A dimension of size one has none, whatever the tensor says.
inline cuuint64_t map_stride(const kda_tensor& t, int i) {
  return t.shape[i] > 1 ? static_cast<cuuint64_t>(t.stride[i]) * dtype_size(t.dtype) : 16;
}

// The tensor maps of a call's tokens.
struct Tiles {
  enum { kQuery, kKey, kGate, kValue, kOutput };
  CUtensorMap maps[5]{};

  explicit Tiles(const ForwardProblem& p) {
    if (p.B * p.T == 0) return;  // nothing will be copied
    const kda_inputs& in = p.args.in;
    maps[kQuery] = map(in.q), maps[kKey] = map(in.k), maps[kValue] = map(in.v);
    if (in.g.dtype == in.q.dtype) maps[kGate] = map(in.g);
    maps[kOutput] = map(p.args.o);
  }

  // [B, T, heads, 64 or 128] of 16-bit numbers.
  static CUtensorMap map(const kda_tensor& t) {
    const auto size = [&](int i) { return static_cast<cuuint64_t>(t.shape[i]); };
    return make_map<4>(t.dtype == KDA_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, t.data,
                       {.sizes = {size(3), size(2), size(1), size(0)},
                        .strides = {map_stride(t, 2), map_stride(t, 1), map_stride(t, 0)},
                        .box = {kRowBytes / 2, 1, kRows, 1}},
                       CU_TENSOR_MAP_SWIZZLE_128B);
  }

  // Hints that map i, if there is one, will be used; thread i calls it. It may come before wait_for_stream().
  __device__ void prefetch(unsigned i) const {
    if (i < std::size(maps)) ptx::prefetch_map(maps[i]);
  }
};

// The tensor map of U, which leaves as outputs do, from the place of v in a stage. Where it is not used, threads store
// U element by element.
struct SavedTiles {
  CUtensorMap U{};
  bool used = false;

  SavedTiles() = default;
  explicit SavedTiles(const kda_tensor& v_new) : used(fits(v_new)) {
    if (used) U = Tiles::map(v_new);
  }

  // Is it bf16, with rows at multiples of 16 bytes?
  static bool fits(const kda_tensor& t) { return present(t) && t.dtype == KDA_BF16 && has_elements(t) && takes_tma(t); }
};

// The tensor maps of first and final states, where those of a call are f32 and V-first, with rows at multiples of 16
// bytes. They come to a stage of the ring and leave from it. The 16 columns of a consumer warp are four boxes of 32
// channels, one behind the other. A box's rows are columns 0, 8, 1, 9, ..: a warp accesses every second row at a
// time, so that with the swizzle no two of its lanes use the same bank.
struct StateTiles {
  static constexpr unsigned kColumns = 16, kChannels = kRowBytes / 4, kBoxes = kSize / kChannels;
  static constexpr unsigned kBoxBytes = kColumns * kRowBytes, kWarpBytes = kBoxes * kBoxBytes, kBytes = 4 * kWarpBytes;
  static_assert(kBytes == kSize / 2 * kSize * 4 && kBytes <= Stage::bytes);
  CUtensorMap h0{}, hT{};  // without h0, zeros are read from outside of hT
  bool used = false, stores = false;

  StateTiles() = default;
  explicit StateTiles(const ForwardProblem& p) {
    const kda_forward_args& a = p.args;
    const kda_tensor &from = a.states.h0, &to = a.states.hT;
    if (!(present(from) || present(to)) || !fits(p, from) || !fits(p, to)) return;
    if (present(a.checkpoints) || present(a.h)) return;  // states within a head are rare, and stored by threads
    if (present(a.v_new)) return;                        // kernels that keep states have another order of channels
    if (present(a.out_state_indices)) return;            // a state leaves for the slot that it came from
    used = true, stores = present(to);
    h0 = map(present(from) ? from : to);
    if (stores) hT = map(to);
  }

  // Where an element of a warp's 16 columns is, in bytes. further(): where the element is that lies 8 i columns and 8
  // j channels behind one of the first ones.
  KDA_BOTH static constexpr unsigned place(unsigned column, unsigned channel) {
    const unsigned row = column % 8 * 2 + column / 8;
    return channel / kChannels * kBoxBytes + row * kRowBytes + ((channel % kChannels / 4 ^ row % 8) << 4) +
           channel % 4 * 4;
  }
  KDA_BOTH static constexpr unsigned further(unsigned first, unsigned j, unsigned i) {
    return (first ^ j % 4 << 5 ^ i * (kRowBytes | 16)) + j / 4 * kBoxBytes;
  }

  // Hints, like those of Tiles.
  __device__ void prefetch(unsigned i) const {
    if (used && i < 2) ptx::prefetch_map(i && stores ? hT : h0);
  }

  static bool fits(const ForwardProblem& p, const kda_tensor& t) {
    if (!present(t)) return true;
    return t.dtype == KDA_F32 && p.args.in.state_layout == KDA_STATE_V_FIRST && t.stride[2] >= p.K &&
           t.shape[0] <= INT32_MAX && has_elements(t) && takes_tma(t);
  }
  // [slots, HV, V, K]
  static CUtensorMap map(const kda_tensor& t) {
    const auto size = [&](int i) { return static_cast<cuuint64_t>(t.shape[i]); };
    const cuuint64_t column = map_stride(t, 2);
    return make_map<5>(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, t.data,
                       {.sizes = {size(3), size(2) / 8, 8, size(1), size(0)},
                        .strides = {8 * column, column, map_stride(t, 1), map_stride(t, 0)},
                        .box = {kChannels, kColumns / 8, 8, 1, 1}},
                       CU_TENSOR_MAP_SWIZZLE_128B);
  }
};
// Checks the places of a warp's accumulators, eight bytes a lane: is further() right, and do those of 16 lanes, which
// are accessed at once, lie in all banks?
constexpr bool are_state_places_right() {
  for (unsigned j = 0; j < 16; ++j)
    for (unsigned i = 0; i < 2; ++i)
      for (unsigned first = 0; first < 32; first += 16) {
        unsigned banks = 0;  // pairs of banks
        for (unsigned lane = first; lane < first + 16; ++lane) {
          const unsigned at = StateTiles::further(StateTiles::place(lane / 4, lane % 4 * 2), j, i);
          if (at != StateTiles::place(lane / 4 + 8 * i, 8 * j + lane % 4 * 2)) return false;
          banks |= 1u << at / 8 % 16;
        }
        if (banks != 0xffff) return false;
      }
  return true;
}
static_assert(are_state_places_right());

}  // namespace kda::cuda::engine
