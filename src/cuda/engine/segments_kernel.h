// The body of kernels that cut sequences into segments.
//
// A CTA pair (pair.h) has a segment of a value head. It makes the segment's map, [b | M]. When the maps of all
// segments before are there, too, the pair has the state in front of the next segment, and makes the outputs of that.
// The pair with the first segment needs no map and begins with outputs. The pair with the last one has nothing to do.
//
// A pair waits only for pairs with lower numbers, and running pairs draw their numbers in order, so not all pairs
// need to be resident. Lengths of packed sequences are known on the device alone: grids have room for any, and pairs
// that find no work end.
#pragma once
#include "cuda/engine/segments.h"

namespace kda::cuda::engine {

constexpr unsigned kSegmentThreads = (2 + kProducers) * kGroup;
// Registers of a thread, which starts with 128: in the consumers that make b and M, and in producers. When M has been
// made: in the consumer that makes outputs, and in the one that has made M.
constexpr int kMapRegisters = 144, kSegmentProducerRegisters = 256 - kMapRegisters;
constexpr int kOutputRegisters = 216, kIdleRegisters = 40;
static_assert(kOutputRegisters + kIdleRegisters <= 256);

// Warpgroup: the producer, with a TaskSource. Scan: the consumer that makes b and outputs; MapScan: the one that makes
// M. Tensors: as in run_pair().
template <class Warpgroup, class Scan, class MapScan, class Tensors = NoTensors>
__device__ __forceinline__ void run_segments(const Call& call, const Segments& segments) {
  const unsigned memory = ptx::shared_address(shared_memory());
  // Three warps do what comes first: mbarriers, hints, the pair's number.
  if (threadIdx.x == 0) {
    Ring{memory}.start(16);
    Warpgroup::start(memory);
    for (const unsigned i : {0u, 1u}) ptx::init_barrier(memory + Shared::maps + i * 8, 1);
    expect_pair(memory);
    ptx::fence_barriers();
  }
  call.tiles->prefetch(threadIdx.x - 32);
  wait_for_stream();
  [[maybe_unused]] const Tensors tensors(memory);
  meet(memory, [&] { return segments.number(); });
  if (threadIdx.x < 32) {
    const Task task(segments.cut, known_pair(memory));
    if (threadIdx.x == 0) task.share();
  }
  __syncthreads();  // the task is there
  const unsigned kind = uniform(Task::shared().kind);
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows that it is uniform
  const bool maps = kind == Task::kMaps;
  if (kind < Task::kBegins) {
    const Task& task = Task::shared();
    // (The map counts as ready, so that garbage in cu_seqlens lets no pair wait forever.)
    if (threadIdx.x == 0 && ptx::rank() == 0 && task.number < segments.cut.total)
      ptx::add_release(segments.flag(task.hv, task.number), Segments::kWhole);
    if (kind == Task::kZeros && group == 0)
      SegmentConsumer<Scan>(call, segments, memory).zero_outputs(task.item(), task.sequence(), task.first, task.end);
  } else if (group == 0) {
    if (maps) {
      ptx::take_registers<kMapRegisters>();
      SegmentConsumer<Scan>(call, segments, memory).map();
    }
    ptx::take_registers<kOutputRegisters>();  // where maps are made, the warps of M give theirs back
    SegmentConsumer<Scan>(call, segments, memory).outputs();
  } else if (group == 1) {
    if (maps) {
      ptx::take_registers<kMapRegisters>();
      SegmentConsumer<MapScan>(call, segments, memory).map();
    }
    ptx::give_registers<kIdleRegisters>();
  } else {
    ptx::give_registers<kSegmentProducerRegisters>();
    Warpgroup producer(call, memory, group - 2);
    producer.plan(typename Warpgroup::Chunks(group - 2));
    producer.run();
  }
  ptx::sync_cluster();  // no CTA ends while the other one copies to it, or arrives at its mbarriers
}

}  // namespace kda::cuda::engine
