// What kernels with a state in registers are compiled for, and the records that they apply to it. With K = 64 or 128
// the registers and shared memory have room for 128 channels; from K on they hold zeros.
#pragma once
#include "cuda/call/launch_plans.h"
#include "cuda/drafts/entries.h"

namespace kda::cuda::recurrent {

constexpr int kMostK = 128;
constexpr int kElements = kMostK / kRowLanes;  // channels of a thread in a column
constexpr int kPerLane = kMostK / 32;          // channels of a lane in a draft

constexpr int32_t kAnyState = -1;  // in place of a dtype: the kernel looks at each call's

// What a kernel is compiled for. On the fast path (`fast`) its calls are on_fast_path(), with K = 128 and states of
// dtype `state`. max_drafts: the drafts of a request that there is room for. ring, conv: the calls have rings, or a
// convolution in front. A general kernel takes any call with so many drafts.
struct Traits {
  bool fast;
  int32_t state;
  int max_drafts;
  bool ring = false, conv = false;
};
constexpr Traits general(int max_drafts) { return {false, kAnyState, max_drafts}; }

// Both as types. nvcc repeats a kernel's template arguments in code for the host, where it has no name for the type of
// a value.
template <bool kFast, int32_t kState, int kMaxDrafts, bool kRing, bool kConv>
struct TraitsType {
  static constexpr Traits kValue{kFast, kState, kMaxDrafts, kRing, kConv};
};
template <Traits kCall>
using TypeOf = TraitsType<kCall.fast, kCall.state, kCall.max_drafts, kCall.ring, kCall.conv>;
template <int kWarps, int kRows, int kSteps, bool kCrowded>
struct ShapeType {
  static constexpr Shape kValue{kWarps, kRows, kSteps, kCrowded};
};
template <Shape kShape>
using ShapeTypeOf = ShapeType<kShape.warps, kShape.rows, kShape.steps, kShape.crowded>;

constexpr int kRegisters = 128;  // of a thread
constexpr int blocks_of_SM(Shape shape) { return 65536 / kRegisters / shape.threads(); }

// On the fast path, a thread's columns lie so far apart that consecutive loads of a warp take neighbouring columns.
// (General kernels have no registers for that, and with eight drafts it costs more than it saves.)
constexpr int step_of(Traits call, Shape shape) { return call.fast && shape.warps == 4 ? 32 / kRowLanes : 1; }
template <int kRows, int kStep>
__device__ int first_row_of() {
  if constexpr (kStep == 1) return first_row<kRows>();
  else return static_cast<int>(threadIdx.x / 32 * kStep * kRows + threadIdx.x % 32 / kRowLanes);
}

// ---- a thread's columns of a state, as many as they are wide ----

template <int32_t kState, class Do>
__device__ void with_state(int32_t dtype, const Do& act) {
  if ((kState == kAnyState ? dtype : kState) == KDA_F32) act.template operator()<float>();
  else act.template operator()<__nv_bfloat16>();
}
template <int32_t kState, int kStep, int kRows>
__device__ void load_state(const Rows<true>& from, int32_t dtype, int K, float (&S)[kRows][kElements]) {
  with_state<kState>(dtype, [&]<class State>() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) from.template load<State>(row * kStep, K, S[row]);
  });
}
// Stores S, which becomes what memory then holds.
template <int32_t kState, int kStep, int kRows>
__device__ void store_state(const Rows<true>& to, int32_t dtype, int K, float (&S)[kRows][kElements]) {
  with_state<kState>(dtype, [&]<class State>() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (float& s : S[row]) s = static_cast<float>(static_cast<State>(s));
      to.template store<State>(row * kStep, K, S[row]);
    }
  });
}

// ---- entries to apply, before a block's drafts ----

struct BlockEntries {
  int count = 0;

  // Starts the copies of all entries: u, and k (in place of w) and alpha of a thread's channel. They go to shared
  // memory so that the state, which takes the registers, can be requested at once.
  template <Traits kCall, Shape kShape>
  __device__ void request(const Before& before, const EntryMemory& m, float* shared, int K) {
    constexpr int kColumns = kShape.columns();
    const int column = static_cast<int>(threadIdx.x), c = own_channel<kShape>();
    for (int w = before.newest; w >= 0 && count < m.entries; w = before.window.before(w), ++count) {
      const int entry = before.window.entry(w);
      if (column < kColumns) copy_async(shared + m.u + count * kColumns + column, &before.entries.u_at(entry, column));
      if (c < 0) continue;
      if (!kCall.fast && c >= K) {
        shared[m.w + count * kMostK + c] = shared[m.alpha + count * kMostK + c] = 0;
        continue;
      }
      copy_async(shared + m.w + count * kMostK + c, &before.entries.k_at(entry, c));
      copy_async(shared + m.alpha + count * kMostK + c, &before.entries.alpha_at(entry, c));
    }
  }
  // Makes w and f of the entries to apply; the others stay as they came. A barrier after this makes all of it visible
  // to all threads.
  template <Traits kCall, Shape kShape>
  __device__ void prepare(const Before& before, const EntryMemory& m, float* shared) const {
    if (!count) return;
    ptx::wait_for_all_copies();
    const int c = own_channel<kShape>();
    if (!before.apply || c < 0) return;
    double product = 1;
    for (int i = 0; i < count; ++i) {
      shared[m.w + i * kMostK + c] *= static_cast<float>(product);
      product *= shared[m.alpha + i * kMostK + c];
    }
    shared[m.f + c] = static_cast<float>(product);
  }

 private:
  template <Shape kShape>
  __device__ static int own_channel() {
    constexpr int kFirst = kShape.threads() - kMostK;  // the last threads: in large blocks the first have more to do
    return static_cast<int>(threadIdx.x) - kFirst;
  }
};

template <int kStep, int kColumns, int kRows>
__device__ void apply_entries(const float* shared, const EntryMemory& m, int count, int column,
                              float (&S)[kRows][kElements]) {
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
    const float4 f = load_four(shared + m.f + channel(e));
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      S[row][e] *= f.x, S[row][e + 1] *= f.y, S[row][e + 2] *= f.z, S[row][e + 3] *= f.w;
  }
  for (int i = count - 1; i >= 0; --i) {
    const float *w = shared + m.w + i * kMostK, *u = shared + m.u + i * kColumns + column;
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const float4 four = load_four(w + channel(e));
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float x = u[row * kStep];
        S[row][e] = fmaf(x, four.x, S[row][e]), S[row][e + 1] = fmaf(x, four.y, S[row][e + 1]);
        S[row][e + 2] = fmaf(x, four.z, S[row][e + 2]), S[row][e + 3] = fmaf(x, four.w, S[row][e + 3]);
      }
    }
  }
}

}  // namespace kda::cuda::recurrent
