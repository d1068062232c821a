// q, k, v, g and o as the copy engine knows them: tiles of 64 channels of a chunk's rows, swizzled like the stages; of o 16.
#pragma once
#include <cuda.h>

#include <iterator>

#include "cuda/sm90/chunk.h"

namespace kda::cuda::sm90 {

struct Tiles {
  enum { kQuery, kKey, kGate, kValue, kOutput };
  CUtensorMap maps[5]{};

  explicit Tiles(const ForwardProblem& p) {
    if (p.B * p.T == 0) return;  // nobody copies anything
    const kda_inputs& in = p.args.in;
    maps[kQuery] = map(in.q), maps[kKey] = map(in.k), maps[kValue] = map(in.v);
    if (in.g.dtype == in.q.dtype) maps[kGate] = map(in.g);
    maps[kOutput] = map(p.args.o, 16, CU_TENSOR_MAP_SWIZZLE_32B);
  }

  // [B, T, heads, 128] of 16-bit numbers.
  static CUtensorMap map(const kda_tensor& t, cuuint32_t columns = 64,
                         CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    const auto size = [&](int i) { return static_cast<cuuint64_t>(t.shape[i]); };
    // A dimension of one has no stride, whatever the tensor says.
    const auto stride = [&](int i) { return t.shape[i] > 1 ? static_cast<cuuint64_t>(t.stride[i]) * 2 : 16; };
    const cuuint64_t sizes[] = {size(3), size(2), size(1), size(0)}, strides[] = {stride(2), stride(1), stride(0)};
    const cuuint32_t tile[] = {columns, 1, kRows, 1}, steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result =
        encode()(&map, t.dtype == KDA_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                 t.data, sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
      throw Error(KDA_CUDA_ERROR, str("CUDA: cuTensorMapEncodeTiled failed (", static_cast<int>(result), ")"));
    return map;
  }

  // Hints: by the block, also before wait_for_stream().
  __device__ void prefetch() const {
    if (threadIdx.x < std::size(maps)) ptx::prefetch_map(maps[threadIdx.x]);
  }

 private:
  // Of the driver, which this library is not linked to.
  static decltype(&cuTensorMapEncodeTiled) encode() {
    static const auto found = [] {
      void* entry = nullptr;
      cudaDriverEntryPointQueryResult result;
      KDA_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result));
      if (!entry) throw Error(KDA_CUDA_ERROR, "CUDA: the driver has no cuTensorMapEncodeTiled");
      return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    return found;
  }
};

}  // namespace kda::cuda::sm90
