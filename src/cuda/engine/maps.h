// The body of kernels that make maps of sequences, M and b, in one pass and without outputs.
//
// A CTA pair (pair.h) has a sequence of a value head. One warpgroup of consumers makes b, the other M, as they do for a
// segment (segments.h). Then both leave for global memory: no other pair reads them.
//
// For the reverse scan all of this is mirrored: dS is the state, the map is M^T and d, and M^T takes the place of M.
#pragma once
#include "cuda/engine/segments_kernel.h"

namespace kda::cuda::engine {

// What a CTA pair works on: a sequence, for one value head. One thread finds it for all, in shared memory.
struct alignas(16) MapTask {
  unsigned n, hv, h, b;  // sequence, heads, row
  unsigned t0, length;   // of the sequence
  unsigned chunks;

  __device__ MapTask(const ForwardProblem& p, unsigned pair) : n(pair / static_cast<unsigned>(p.HV)) {
    hv = pair - n * static_cast<unsigned>(p.HV), h = Plan::key_head(p, hv);
    const Sequence s = sequence_at(p, p.args.in, n);
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
    chunks = (length + kRows - 1) / kRows;
  }
  __device__ void share() const { shared() = *this; }
  __device__ static MapTask& shared() { return *reinterpret_cast<MapTask*>(shared_memory() + Shared::task); }
};
static_assert(sizeof(MapTask) <= Shared::kTaskBytes);

// The chunks of one producer of a CTA pair, one in four. (Reversed maps need q: d has gradients of outputs.)
template <bool kReversed_>
class MapSource {
 public:
  static constexpr bool kMaps = !kReversed_, kBringsStates = false, kReversed = kReversed_, kKeepsU = false;
  static constexpr Order kOrder = order_of(false, kReversed_);
  __device__ explicit MapSource(unsigned group) : number_(ptx::rank() + 2 * group) {}
  __device__ void next(const Call&, Plan& p) {
    const MapTask& task = MapTask::shared();
    if (number_ >= task.chunks) return;
    p.set(task.hv, task.h, task.b, task.t0, task.length, kReversed ? task.chunks - 1 - number_ : number_);
    p.number = number_, p.queries = kReversed;
    number_ += kStages;
  }

 private:
  unsigned number_;  // of the next chunk in the ring
};

// Makes b of a sequence or, without kValues, M.
template <class Scan>
class SequenceMapConsumer : public MapConsumer<Scan> {
  using Base = MapConsumer<Scan>;
  using Base::kValues, Base::S_, Base::unit_, Base::ring_, Base::call_, Base::kReversed;

 public:
  using Base::Base;
  // M: [N,HV,K,K] f32, absent if it is not wanted. b goes where the call's final states go.
  __device__ __forceinline__ void run(const TypedView& M) {
    const MapTask& task = MapTask::shared();  // looked up again and again: there are no registers for it
    const bool wanted = kValues ? call_.states.kept[kFinal].data != nullptr : M.data != nullptr;
    if (!Base::template begin<false>() || !wanted) return Base::leave_out(task.chunks, 0);
    // Whole chunks, then a partial one; reversed, the partial one comes first. Its other rows are of another sequence.
    unsigned number = 0;
#pragma unroll 1
    for (unsigned part = 0; part < 2; ++part) {
      const unsigned chunks = uniform(task.chunks), rows = uniform(task.length), whole = rows / kRows;
      const unsigned end = part > 0 ? chunks : kReversed ? chunks - whole : whole;
      if (number == end) continue;
      if (kValues && (part > 0) != kReversed) {
        ring_.wait_full(number);
        Base::clear_values(ring_.stage(number), rows % kRows);
      }
      this->template scan_state<0>(end, number, kReversed ? chunks % 2 : 0);
      number = end;
    }
    if constexpr (kValues) Base::store_state(call_.states.kept[kFinal], call_.p.args.in.state_layout, task.n, task.hv);
    else store_map(M.at(task.n, task.hv, 0), M.stride2);
  }

 private:
  // Stores the warpgroup's columns of M: its rows are channels of the state behind the sequence. (Reversed: of dS in
  // front of it.)
  __device__ void store_map(char* to, uint64_t row_bytes) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (!Base::has_channels(i / 4)) continue;
      const unsigned column = Base::column(i / 2 % 2) + Base::columns_before(), row = Base::channel(i / 4) + i % 2;
      reinterpret_cast<float*>(to + row * row_bytes)[column] = S_[i] * unit_[i / 2 % 2];
    }
  }
};

// Warpgroup: the producer, with a MapSource; Scan: the consumer that makes b; MapScan: the one that makes M.
template <class Warpgroup, class Scan, class MapScan>
__device__ __forceinline__ void run_maps(const Call& call, const TypedView& M) {
  const unsigned memory = ptx::shared_address(shared_memory());
  if (threadIdx.x == 0) {
    Ring{memory}.start(16);
    Warpgroup::start(memory);
    ptx::fence_barriers();
  }
  call.tiles->prefetch(threadIdx.x - 32);
  wait_for_stream();
  if (threadIdx.x == 0) MapTask(call.p, blockIdx.x / 2).share();
  ptx::sync_cluster();  // the task is there, and the mbarriers of both CTAs
  const unsigned group = __shfl_sync(kAll, threadIdx.x / kGroup, 0);  // so that the compiler knows that it is uniform
  if (group == 0) {
    ptx::take_registers<kMapRegisters>();
    SequenceMapConsumer<Scan>(call, memory).run(M);
  } else if (group == 1) {
    ptx::take_registers<kMapRegisters>();
    SequenceMapConsumer<MapScan>(call, memory).run(M);
  } else {
    ptx::give_registers<kSegmentProducerRegisters>();
    Warpgroup producer(call, memory, group - 2);
    producer.plan(typename Warpgroup::Chunks(group - 2));
    producer.run();
  }
  ptx::sync_cluster();  // no CTA ends while the other one copies to it, or arrives at its mbarriers
}

}  // namespace kda::cuda::engine
