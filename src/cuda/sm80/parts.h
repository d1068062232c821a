// What the kernels of verify, flush and flush_verify have in common.
#pragma once
#include <type_traits>

#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "speculation.h"

namespace kda::cuda {

inline int64_t layers_of(const FlushProblem& p) { return p.layers; }
inline int64_t layers_of(const Dims&) { return 1; }
inline int32_t layout_of(const FlushProblem& p) { return p.args.state_layout; }
template <class P>
int32_t layout_of(const P& p) {
  return p.args.in.state_layout;
}
template <class P>
constexpr bool kVerifies = !std::is_same_v<P, FlushProblem>;
template <class P>
constexpr bool kFlushes = !std::is_same_v<P, VerifyProblem>;

struct RecordViews {
  View u, k, alpha;
  explicit RecordViews(const kda_records& r, int lead = 0)
      : u(view_of(r.u, lead)), k(view_of(r.k, lead)), alpha(view_of(r.alpha, lead)) {}
};

// What a call moves, layer for layer.
struct Parts {
  View h0, hT;                // hT: absent where the state is only read
  RecordViews records, last;  // of this round and of the last one
  Slots slots, last_slots;    // of states, and of the entries to apply
  Tokens tokens;
  int32_t layout, layers;
  int room;  // drafts that shared memory has room for

  explicit Parts(const VerifyProblem& p) : Parts(p, p.args.states, p.args.records, p.args.records) {}
  explicit Parts(const FlushProblem& p)
      : Parts(p,
              {.h0 = p.args.state,
               .hT = p.args.state,
               .state_indices = p.args.state_indices,
               .first_valid_slot = p.args.first_valid_slot},
              p.args.records, p.args.records, p.args.state.ndim - 4) {}
  explicit Parts(const FlushVerifyProblem& p)
      : Parts(p, p.args.states, p.args.records, present(p.args.records.ring_count) ? p.args.records : p.args.last) {}

 private:
  static Tokens tokens_of(const FlushProblem& p) { return Tokens(p, {}, {}); }
  template <class P>
  static Tokens tokens_of(const P& p) {
    return Tokens(p, p.args.in, p.args.o);
  }
  template <class P>
  Parts(const P& p, const kda_states& states, const kda_records& records, const kda_records& last, int lead = 0)
      : h0(view_of(states.h0, lead)),
        hT(kFlushes<P> ? view_of(states.hT, lead) : View{}),
        records(records, lead),
        last(last, lead),
        slots(states.state_indices, states.first_valid_slot, states.h0.shape[lead]),
        last_slots(last.indices, 0, present(last.u) ? last.u.shape[lead] : 0),
        tokens(tokens_of(p)),
        layout(layout_of(p)),
        layers(static_cast<int32_t>(layers_of(p))) {
    const int64_t entries = present(records.u) ? records.u.shape[1 + lead] : kMaxDrafts;
    const int64_t tree = present(p.args.parents) ? p.args.parents.shape[1] : kMaxDrafts;
    room = kVerifies<P> ? static_cast<int>(std::min({p.T, kMaxDrafts, entries, tree})) : 0;
  }
};

// Where a request's records of one head are: of entry 0, and bytes from one entry to the next. Numbers alone: a copy of a
// tensor, or a reference to one of two, would live in local memory.
struct Entries {
  char *u = nullptr, *k = nullptr, *alpha = nullptr;
  uint32_t u_step = 0, k_step = 0, alpha_step = 0;

  Entries() = default;
  __device__ Entries(const RecordViews& r, const Place& at, int64_t slot, unsigned v0) {
    const auto first = [&](const View& t, unsigned head) {
      return t.at(static_cast<unsigned>(slot), 0, head) + at.layer * t.layer;
    };
    u = first(r.u, at.hv) + v0 * 4, k = first(r.k, at.h), alpha = first(r.alpha, at.hv);
    u_step = r.u.stride1, k_step = r.k.stride1, alpha_step = r.alpha.stride1;
  }
  __device__ static float& element(char* first, uint32_t step, int entry, int i) {
    return reinterpret_cast<float*>(first + static_cast<unsigned>(entry) * static_cast<uint64_t>(step))[i];
  }
  __device__ float& u_at(int entry, int i) const { return element(u, u_step, entry, i); }
  __device__ float& k_at(int entry, int c) const { return element(k, k_step, entry, c); }
  __device__ float& alpha_at(int entry, int c) const { return element(alpha, alpha_step, entry, c); }
};

// What is to be done to the state before drafts see it: entries from `newest` back. `apply`: and written. If not, they are
// the committed entries of a ring.
struct Before {
  Window window;
  Entries entries;
  int newest = -1;
  bool apply = false;
};
template <class P>
__device__ Before before_drafts(const Parts& x, const Place& at, const Request& r, unsigned v0) {
  Before b;
  b.apply = kFlushes<P> && r.newest >= 0;
  b.window = r.verify;
  if (b.apply) {
    b.window = r.flush, b.newest = r.newest, b.entries = Entries(x.last, at, r.last_slot, v0);
  } else if (r.slot >= 0) {
    b.newest = b.window.committed - 1, b.entries = Entries(x.records, at, r.slot, v0);
  }
  return b;
}

// Hints where a block's columns of a state, and entries to apply, are likely to be.
template <class P, int kThreads>
__device__ void expect_states(const Parts& x, const Place& at, unsigned columns, int entries, int K) {
  const int state = threadIdx.x == kThreads - 1 && x.h0.data ? x.slots.peek(at.n) : -1;
  if (state >= 0)
    prefetch(x.h0.at(static_cast<unsigned>(state), at.hv, at.tile * columns) + at.layer * x.h0.layer,
             columns * static_cast<uint64_t>(x.h0.stride2));
  if (kFlushes<P> && threadIdx.x < entries) {
    const int slot = x.last_slots.peek(at.n);
    if (slot < 0) return;
    const Entries last(x.last, at, slot, at.tile * columns);
    const int entry = static_cast<int>(threadIdx.x);
    prefetch(&last.u_at(entry, 0)), prefetch(&last.k_at(entry, 0), K * 4), prefetch(&last.alpha_at(entry, 0), K * 4);
  }
}

inline const kda_tensor& state_of(const FlushProblem& p) { return p.args.state; }
template <class P>
const kda_tensor& state_of(const P& p) {
  return p.args.states.h0;
}

// Why no kernel takes the call, or nullptr.
template <class P>
const char* parts_why_not(const P& p) {
  const auto& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  const int lead = std::max(state_of(p).ndim - 4, 0);
  if (const char* reason = view_why_not({&state_of(p), &a.records.u, &a.records.k, &a.records.alpha}, lead))
    return reason;
  if constexpr (kFlushes<P> && kVerifies<P>)
    if (const char* reason = view_why_not({&a.last.u, &a.last.k, &a.last.alpha})) return reason;
  if constexpr (kVerifies<P>) return Tokens::why_not(a.in, a.o);
  return nullptr;
}

// Moves a ring's cursors on, once no block reads the old ones.
void store_cursors(const FlushVerifyProblem& p);

}  // namespace kda::cuda
