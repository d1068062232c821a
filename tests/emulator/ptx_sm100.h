// What the parts of the emulated tcgen05 share: addresses in tensor memory, and whose it is.
#pragma once
#include "cuda/ptx/sm100.h"
#include "wave.h"

namespace kda::cuda::ptx {

using emulator::kLanes, emulator::TensorMemory, emulator::wave;
using Kind = TensorMemory::Kind;

inline unsigned lane_of(unsigned tmem) { return tmem >> 16; }
inline unsigned column_of(unsigned tmem) { return tmem & 0xffff; }
inline emulator::Block& block_of_rank(unsigned rank) { return wave->block_of(emulator::address_in(0, rank)); }
inline TensorMemory& tensor_of(emulator::Block& block, Where where) {
  if (!block.tensor) emulator::fail("uses tensor memory, of which the block has none", where);
  return *block.tensor;
}
inline TensorMemory& tensor(Where where) { return tensor_of(wave->block(), where); }
// All tcgen05 of a kernel is of one block, or of two.
inline void check_blocks(int blocks, Where where) {
  if (blocks == 2 && wave->cluster() > 2)
    emulator::fail("pairs of blocks are emulated in clusters of two alone", where);
  if (blocks == 2) emulator::rank(where);  // which makes clusters
  int& known = wave->block().tensor_blocks;
  if (known && known != blocks) emulator::fail("mixes tcgen05 of one block and of two", where);
  known = blocks;
}

}  // namespace kda::cuda::ptx
