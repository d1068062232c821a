// What the kernels of verify, flush and flush_verify have in common.
#pragma once
#include <type_traits>

#include "contract/drafts.h"
#include "cuda/call/launch.h"
#include "cuda/call/state_rows.h"
#include "cuda/call/token.h"
#include "cuda/conv/front.h"
#include "cuda/drafts/declarations.h"

namespace kda::cuda {

KDA_BOTH inline int64_t layers_of(const FlushProblem& p) { return p.layers; }
KDA_BOTH inline int64_t layers_of(const Dims&) { return 1; }
KDA_BOTH inline int32_t layout_of(const FlushProblem& p) { return p.args.state_layout; }
template <class P>
KDA_BOTH int32_t layout_of(const P& p) {
  return p.args.in.state_layout;
}
template <class P>
constexpr bool kVerifies = !std::is_same_v<P, FlushProblem>;
template <class P>
constexpr bool kFlushes = !std::is_same_v<P, VerifyProblem>;

KDA_BOTH inline const kda_tensor& state_of(const FlushProblem& p) { return p.args.state; }
template <class P>
KDA_BOTH const kda_tensor& state_of(const P& p) {
  return p.args.states.h0;
}

constexpr int64_t kMaxEntries = 64;  // that shared memory has room for

// The most entries that a flush may find.
inline int64_t ring_entries(const kda_records& r) { return present(r.ring_count) ? r.u.shape[r.u.ndim - 3] : 0; }
inline int64_t entries_of(const VerifyProblem& p) { return ring_entries(p.args.records); }
inline int64_t entries_of(const FlushProblem& p) {
  return present(p.args.records.ring_count) ? p.R : std::min(p.R, p.T);
}
inline int64_t entries_of(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  if (present(a.records.ring_count)) return ring_entries(a.records);
  const int64_t R = a.last.u.shape[1];
  return present(a.last_parents) ? std::min(R, a.last_parents.shape[1]) : R;
}

struct RecordViews {
  View u, k, alpha;
  explicit RecordViews(const kda_records& r, int lead = 0)
      : u(view_of(r.u, lead)), k(view_of(r.k, lead)), alpha(view_of(r.alpha, lead)) {}
};

// Drafts that shared memory needs room for.
template <class P>
int64_t room_of(const P& p) {
  const int64_t entries = present(p.args.records.u) ? p.args.records.u.shape[1] : kMaxDrafts;
  const int64_t tree = present(p.args.parents) ? p.args.parents.shape[1] : kMaxDrafts;
  return std::min({p.T, kMaxDrafts, entries, tree});
}

// For a call with drafts: T, and what else decides the layout of shared memory.
struct Sizes {
  uint32_t T;
  uint8_t entries;              // to apply, at most
  bool varlen, front, by_four;  // front: q, k and v come from a convolution

  template <class P>
  explicit Sizes(const P& p)
      : T(static_cast<uint32_t>(p.T)),
        entries(static_cast<uint8_t>(std::min<int64_t>(entries_of(p), UINT8_MAX))),
        varlen(p.varlen),
        front(present(p.args.conv.x)),
        by_four(!present(p.args.parents) && four_wide_front(p.args.conv)) {}
};

// What kernels read of a call. What all calls have comes first: a block waits for every 64 bytes of it that it reads.
template <class P>
struct Parts;
template <>
struct Parts<VerifyProblem> {
  Tokens tokens;
  View state;
  RecordViews records;  // of this round
  Sizes sizes;
  VerifyRequests requests;
  Lengths cu_seqlens;
  Front front;
  int32_t K, state_dtype;

  explicit Parts(const VerifyProblem& p)
      : tokens(p, p.args.in, p.args.o),
        state(view_of(p.args.states.h0)),
        records(p.args.records),
        sizes(p),
        requests(requests_of(p)),
        cu_seqlens(lengths_of(p.args.in.cu_seqlens)),
        front{p.H, p.K, p.V, p.args.conv, p.args.parents},
        K(static_cast<int32_t>(p.K)),
        state_dtype(p.args.states.h0.dtype) {}
};
template <>
struct Parts<FlushVerifyProblem> {
  Tokens tokens;
  View state;  // read and written
  RecordViews records, last;
  Sizes sizes;
  FlushVerifyRequests requests;
  Lengths cu_seqlens;
  Front front;
  int32_t K, state_dtype;

  explicit Parts(const FlushVerifyProblem& p)
      : tokens(p, p.args.in, p.args.o),
        state(view_of(p.args.states.h0)),
        records(p.args.records),
        last(present(p.args.records.ring_count) ? p.args.records : p.args.last),
        sizes(p),
        requests(requests_of(p)),
        cu_seqlens(lengths_of(p.args.in.cu_seqlens)),
        front{p.H, p.K, p.V, p.args.conv, p.args.parents},
        K(static_cast<int32_t>(p.K)),
        state_dtype(p.args.states.h0.dtype) {}
};
template <>
struct Parts<FlushProblem> {
  View state;
  RecordViews last;
  struct {
    int64_t state, u, k, alpha;  // bytes from one to the next
  } layer;
  int32_t layers, entries;  // to apply, at most
  FlushRequests requests;
  int32_t K, state_dtype;

  explicit Parts(const FlushProblem& p)
      : state(view_of(p.args.state, lead(p))),
        last(p.args.records, lead(p)),
        layer{step(p.args.state), step(p.args.records.u), step(p.args.records.k), step(p.args.records.alpha)},
        layers(static_cast<int32_t>(p.layers)),
        entries(static_cast<int32_t>(entries_of(p))),
        requests(requests_of(p)),
        K(static_cast<int32_t>(p.K)),
        state_dtype(p.args.state.dtype) {}

 private:
  static int lead(const FlushProblem& p) { return p.args.state.ndim - 4; }
  static int64_t step(const kda_tensor& t) { return t.ndim == 5 ? t.stride[0] * dtype_size(t.dtype) : 0; }
};

// Is the call on the fast path in this form? It has dtypes and forms that Tokens::on_fast_path() names, chains of the
// same number of drafts from stored states, and K = 128. A convolution or rings it has only in their own forms.
template <class P>
bool on_fast_path(const Parts<P>& x, FastPath form) {
  if constexpr (kVerifies<P>) {
    const bool conv = form == FastPath::kConv;
    if (!x.tokens.on_fast_path(conv) || x.sizes.varlen || x.sizes.front != conv) return false;
    if (conv && !on_fast_path(x.front.conv, x.sizes.by_four)) return false;
  }
  return x.K == 128 && are_chains(x.requests, form == FastPath::kRing);
}
// The form of the fast path that a call has, if a kernel knows it.
template <class P>
FastPath fast_path_of(const Parts<P>& x) {
  if (on_fast_path(x, FastPath::kPlain)) return FastPath::kPlain;
  if constexpr (std::is_same_v<P, VerifyProblem>)
    if (on_fast_path(x, FastPath::kConv)) return FastPath::kConv;
  if constexpr (std::is_same_v<P, FlushVerifyProblem>)
    if (on_fast_path(x, FastPath::kRing)) return FastPath::kRing;
  return FastPath::kNone;
}
// What a kernel sees of a call. kFast: a copy in which the compiler knows that the call is on the fast path. Code for
// other calls would lie between the instructions that run, and kernels wait for instructions, too.
template <bool kFast, bool kRing = false, bool kConv = false, class P>
__device__ decltype(auto) fast_copy(const Parts<P>& call) {
  if constexpr (kFast) {
    Parts<P> x = call;
    x.requests = fast_chains(call.requests, kRing);
    if constexpr (kVerifies<P>) {
      x.tokens = call.tokens.fast_copy(128, kConv);
      x.sizes.varlen = false, x.sizes.front = x.sizes.by_four = kConv;
      if constexpr (kConv) x.front.K = 128, x.front.conv = fast_copy(call.front.conv);
      if constexpr (!kFlushes<P>) x.sizes.entries = 0;
    }
    return x;
  } else {
    return (call);
  }
}

// indices_of with loads that stay before other loads and see what the L2 cache has.
template <class Requests>
__device__ Indices peek_indices(const Requests& r, unsigned n) {
  const auto at = [n](const Index& x) { return x.data ? peek(x.data + n * x.stride) : static_cast<int32_t>(n); };
  Indices x{.state = at(r.states.indices)};
  if constexpr (requires { r.records; }) x.records = at(r.records.indices);
  if constexpr (requires { r.last; }) x.last = at(r.last.indices), x.accepted = at(r.accept_len);
  return x;
}

// Where a request's drafts are, if the call has any.
__device__ inline Sequence drafts_of(const Parts<FlushProblem>&, int64_t n) { return {.n = n}; }
template <class P>
__device__ Sequence drafts_of(const Parts<P>& x, int64_t n) {
  return sequence_at(x.sizes.varlen, x.cu_seqlens, x.sizes.T, n);
}

// Where a request's records of one head are: the addresses of entry 0, and the bytes from one entry to the next.
// These are numbers only, as a copy of a tensor, or a reference to one of two, would live in local memory.
struct Entries {
  char *u = nullptr, *k = nullptr, *alpha = nullptr;
  uint32_t u_step = 0, k_step = 0, alpha_step = 0;

  Entries() = default;
  __device__ Entries(const RecordViews& r, const Place& at, int64_t slot, unsigned v0) {
    const auto first = [&](const View& t, unsigned head) { return t.at(static_cast<unsigned>(slot), 0, head); };
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

// What happens to the state before drafts see it: entries from `newest` back are added. `apply`: the state is also
// written. If not, they are the committed entries of a ring.
struct Before {
  Window window;
  Entries entries;
  int newest = -1;
  bool apply = false;
};
__device__ inline Entries last_entries(const Parts<FlushProblem>& x, const Place& at, int64_t slot, unsigned v0) {
  Entries last(x.last, at, slot, v0);
  last.u += at.layer * x.layer.u, last.k += at.layer * x.layer.k, last.alpha += at.layer * x.layer.alpha;
  return last;
}
__device__ inline Entries last_entries(const Parts<FlushVerifyProblem>& x, const Place& at, int64_t slot, unsigned v0) {
  return Entries(x.last, at, slot, v0);
}
template <class P>
__device__ Before before_drafts(const Parts<P>& x, const Place& at, const Request& r, unsigned v0) {
  Before b;
  b.window = r.verify;
  if constexpr (kFlushes<P>) {
    b.apply = r.newest >= 0;
    if (b.apply) b.window = r.flush, b.newest = r.newest, b.entries = last_entries(x, at, r.last_slot, v0);
  }
  if constexpr (kVerifies<P>) {
    if (!b.apply && r.slot >= 0) b.newest = b.window.committed - 1, b.entries = Entries(x.records, at, r.slot, v0);
  }
  return b;
}

// A layer's state.
__device__ inline View state_at(const Parts<FlushProblem>& x, const Place& at) {
  View state = x.state;
  state.data += at.layer * x.layer.state;
  return state;
}
template <class P>
__device__ const View& state_at(const Parts<P>& x, const Place&) {
  return x.state;
}

// Gives hints for a block's columns of a state and for entries to apply, where they are likely to be.
template <class P, int kThreads>
__device__ void expect_states(const Parts<P>& x, const Place& at, const Hints& hints, unsigned columns, int entries,
                              int K) {
  if (at.is_among(hints.states) && threadIdx.x == kThreads - 1) {
    const StateSlots& states = x.requests.states;
    const int slot = likely_slot(states.indices, states.first_valid, states.slots, at.n);
    if (slot >= 0)
      prefetch(state_at(x, at).at(static_cast<unsigned>(slot), at.hv, at.tile * columns),
               columns * static_cast<uint64_t>(x.state.stride2));
  }
  if constexpr (kFlushes<P>) {
    if (threadIdx.x >= entries) return;
    const RecordSlots& records = x.requests.last;
    const int slot = likely_slot(records.indices, 0, records.slots, at.n);
    if (slot < 0) return;
    const Entries last = last_entries(x, at, slot, at.tile * columns);
    const int entry = static_cast<int>(threadIdx.x);
    prefetch(&last.u_at(entry, 0)), prefetch(&last.k_at(entry, 0), K * 4), prefetch(&last.alpha_at(entry, 0), K * 4);
  }
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
