// What the kernels of verify, flush and flush_verify have in common.
#pragma once
#include <type_traits>

#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "speculation.h"

namespace kda::cuda {

constexpr int64_t kMaxRing = 64;  // entries of a ring that shared memory has room for

struct Layer {
  kda_tensor h0, hT;  // hT: absent where the state is only read
  kda_records records, last;
};
__device__ inline Layer layer_of(const VerifyProblem& p, int64_t) { return {p.args.states.h0, {}, p.args.records, {}}; }
__device__ inline Layer layer_of(const FlushVerifyProblem& p, int64_t) {
  const kda_flush_verify_args& a = p.args;
  return {a.states.h0, a.states.hT, a.records, present(a.records.ring_count) ? a.records : a.last};
}
__device__ inline Layer layer_of(const FlushProblem& p, int64_t layer) {
  Layer x{p.args.state, {}, {}, p.args.records};
  if (x.h0.ndim == 5)
    for (kda_tensor* t : {&x.h0, &x.last.u, &x.last.k, &x.last.alpha}) *t = kda::layer_of(*t, layer);
  x.hT = x.h0;
  return x;
}
__host__ __device__ inline int64_t layers_of(const FlushProblem& p) { return p.layers; }
__host__ __device__ inline int64_t layers_of(const Dims&) { return 1; }
__host__ __device__ inline int32_t layout_of(const FlushProblem& p) { return p.args.state_layout; }
template <class P>
__host__ __device__ int32_t layout_of(const P& p) {
  return p.args.in.state_layout;
}
template <class P>
constexpr bool kVerifies = !std::is_same_v<P, FlushProblem>;
template <class P>
constexpr bool kFlushes = !std::is_same_v<P, VerifyProblem>;

__device__ inline float float_at(const kda_tensor& t, int64_t slot, int64_t entry, int64_t head, int64_t i) {
  return static_cast<const float*>(t.data)[offset(t, slot, entry, head) + i];
}

// Entries that drafts find before the first of them.
inline int64_t ring_entries(const kda_records& r) { return present(r.ring_count) ? r.u.shape[r.u.ndim - 3] : 0; }

// Drafts that shared memory must have room for.
template <class P>
int64_t room_for_drafts(const P& p) {
  const int64_t entries = present(p.args.records.u) ? p.args.records.u.shape[1] : kMaxDrafts;
  return std::min({p.T, kMaxDrafts, entries});
}

// Moves a ring's cursors on, once no block reads the old ones.
void store_cursors(const FlushVerifyProblem& p);

}  // namespace kda::cuda
