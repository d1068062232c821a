// The body of kernels of CTA pairs. Each CTA has an SM to itself and three warpgroups: the consumer carries 64 columns
// of a state, and two producers prepare chunks.
#pragma once
#include "cuda/engine/pair.h"

namespace kda::cuda::engine {

// Registers of a thread, in place of the 168 with which each of three warpgroups starts.
constexpr int kConsumerRegisters = 216, kProducerRegisters = 144;
static_assert(kConsumerRegisters + kProducers * kProducerRegisters <= 3 * 168);
constexpr unsigned kPairThreads = (1 + kProducers) * kGroup;

// Makes the schedule of a call, in its workspace and stream. (Defined in schedule.cu.)
Schedule schedule_of(const ForwardProblem& p);

// Warpgroup: the producer, with a PairSource; Scan: the consumer of a work item's chunks. `given`: the call's schedule.
// Tensors: what the CTA holds while it runs, made behind the wait for the stream from the address of shared memory.
template <class Warpgroup, class Scan, class Tensors = NoTensors>
__device__ __forceinline__ void run_pair(const Call& call, const Schedule& given) {
  const unsigned memory = ptx::shared_address(shared_memory());
  const Ring ring{memory};
  const unsigned planned = memory + Shared::planned;
  // Three warps do what comes first: mbarriers, hints, the pair's number.
  if (threadIdx.x == 0) {
    ring.start(8);
    Warpgroup::start(memory);
    ptx::init_barrier(planned, 1);
    expect_pair(memory);
    ptx::fence_barriers();
  }
  call.tiles->prefetch(threadIdx.x - 32), call.state_tiles->prefetch(threadIdx.x - 32);
  wait_for_stream();
  [[maybe_unused]] const Tensors tensors(memory);
  meet(memory, [&] { return given.number(); });
  const unsigned pair = known_pair(memory);
  const Schedule schedule = given.known(call.p);
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows that it is uniform
  if (group == 0) {
    ptx::take_registers<kConsumerRegisters>();
    ptx::wait_barrier(planned, 0);  // the first work items are planned
    PairConsumer<Scan>(call, memory, schedule, pair).run();
  } else {
    ptx::give_registers<kProducerRegisters>();
    Warpgroup producer(call, memory, group - 1);
    producer.plan({HeadScheduler(call.p, schedule, pair), group - 1});
    if (threadIdx.x == kGroup) ptx::arrive(planned);
    producer.run();
  }
  ptx::sync_cluster();  // no CTA ends while the other one copies to it, or arrives at its mbarriers
}

}  // namespace kda::cuda::engine
