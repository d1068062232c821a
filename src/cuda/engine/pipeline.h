// How the warpgroups of a CTA pair work together: the ring of stages between them, and the pair's number.
#pragma once
#include "cuda/call/token.h"
#include "cuda/engine/shared_memory.h"

namespace kda::cuda::engine {

// What a call works on: parameters of its kernel.
struct Tiles;
struct SavedTiles;
struct StateTiles;
struct Call {
  const ForwardProblem& p;
  const Tokens& x;
  const States& states;
  const TypedView& v_new;
  const Tiles* tiles;
  const SavedTiles* saved;
  const StateTiles* state_tiles = nullptr;  // for first and final states of heads
};

// The ring of stages. Chunks are counted over all that a CTA pair scans, and with them the states that TMA brings in
// front of a head's chunks. Each CTA scans 64 columns of all chunks and prepares every second chunk, for both: see
// pair.h. SharedMemory describes its mbarriers.
struct Ring {
  unsigned memory;  // address of shared memory
  __device__ unsigned stage(unsigned chunk) const { return memory + Shared::stages + chunk % kStages * Stage::bytes; }
  __device__ unsigned full(unsigned chunk) const { return memory + Shared::full + chunk % kStages * 8; }
  // Only that of the CTA that prepares the chunk is used.
  __device__ unsigned empty(unsigned chunk) const { return memory + Shared::empty + chunk % kStages * 8; }
  __device__ unsigned values_empty(unsigned chunk) const { return memory + Shared::values_empty + chunk % kStages * 8; }
  __device__ void wait_full(unsigned chunk) const { ptx::wait_barrier(full(chunk), chunk / kStages % 2); }
  __device__ bool is_full(unsigned chunk) const { return ptx::is_phase_over(full(chunk), chunk / kStages % 2); }
  // Waits until all consumers have read what the stage had before.
  __device__ void wait_empty(unsigned chunk) const { ptx::wait_barrier(empty(chunk), chunk / kStages % 2); }
  // The same of U in the place of v.
  __device__ void wait_values_empty(unsigned chunk) const {
    ptx::wait_barrier(values_empty(chunk), chunk / kStages % 2);
  }
  // Says that a consumer warp has read a chunk. One thread of the warp calls it, and arrives for `warps` warps.
  // release_values() says that U has left. open() does so for all stages, before the first chunks; keeps: by a warp
  // that also calls release_values().
  __device__ void release(unsigned chunk, unsigned warps = 1) const {
    ptx::arrive_at(ptx::address_in(empty(chunk), chunk % 2), warps);
  }
  __device__ void release_values(unsigned chunk) const {
    ptx::arrive_at(ptx::address_in(values_empty(chunk), chunk % 2));
  }
  __device__ void open(unsigned warps, bool keeps) const {
    for (unsigned i = 0; i < kStages; ++i) {
      release(i, warps);
      if (keeps) release_values(i);
    }
  }
  // Initialises the mbarriers, by one thread, before fence_barriers(). readers: consumer warps of both CTAs. For a
  // chunk of this CTA kGroup threads fill the stage and one asks for v; for one of the other CTA only the latter
  // arrives.
  __device__ void start(unsigned readers) const {
    for (unsigned i = 0; i < kStages; ++i) {
      ptx::init_barrier(full(i), 1 + (i % 2 == ptx::rank() ? kGroup : 0));
      ptx::init_barrier(empty(i), readers), ptx::init_barrier(values_empty(i), 2);
    }
  }
};

// Gives a CTA pair its number; all threads of both CTAs call it. One of them calls number() while the CTAs wait for
// each other, and sends the result to both: see known_pair(). Afterwards the mbarriers of both CTAs are initialised.
template <class Number>
__device__ void meet(unsigned memory, const Number& number) {
  const unsigned pair = memory + Shared::pair, known = memory + Shared::known;
  const bool tells = threadIdx.x == 64 && ptx::rank() == 0;
  unsigned x = 0;
  ptx::arrive_at_cluster();
  if (tells) x = number();
  ptx::wait_for_cluster();
  if (!tells) return;
  for (const unsigned i : {0u, 1u}) ptx::send(ptx::address_in(pair, i), x, ptx::address_in(known, i));
}
// Prepares for the pair's number, by one thread, before fence_barriers().
__device__ inline void expect_pair(unsigned memory) {
  ptx::init_barrier(memory + Shared::known, 1);
  ptx::arrive_expecting(memory + Shared::known, sizeof(unsigned));
}
// Waits for the pair's number, by whole warps.
__device__ inline unsigned known_pair(unsigned memory) {
  ptx::wait_barrier(memory + Shared::known, 0);
  return uniform(ptx::load_shared(memory + Shared::pair));
}

// In the place of tensor memory, which Hopper does not have.
struct NoTensors {
  __device__ explicit NoTensors(unsigned) {}
};

// A value head of a sequence.
struct Item {
  unsigned n, hv;
};

}  // namespace kda::cuda::engine
