// Adds recorded tokens to a state: S <- f S, then S <- S + w_i u_i, oldest first. w_i is k_i decayed from i to the
// end, and f the decay of all (products in f64). The bits are the same in every kernel that does it.
#pragma once
#include "cuda/drafts/parts.h"
#include "cuda/tile/state_columns.h"

namespace kda::cuda {

// Where f, w and u are in shared memory, in floats.
struct EntryMemory {
  int columns, entries, w_stride;
  int f, w, alpha, u, end;

  // From `start` on, with room for at most `entries` entries of `columns` value columns. alphas: also for their
  // decays.
  __host__ __device__ EntryMemory(int K, int columns, int entries, int start, bool alphas = false)
      : columns(columns), entries(entries), w_stride(K) {
    f = (start + 3) / 4 * 4;                        // [K]
    w = f + K;                                      // [entries][K]
    alpha = w + entries * w_stride;                 // the same
    u = alpha + (alphas ? entries * w_stride : 0);  // [entries][columns]
    end = entries ? u + entries * columns : f;
  }
};

// The next entries from w back, in a thread's channel.
struct EntryChannel {
  static constexpr int kAtOnce = 4;
  float key[kAtOnce], alpha[kAtOnce];
  int count = 0;

  // Issues their loads.
  __device__ void fetch(const Before& b, int c, int& w) {
    count = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      key[i] = 0, alpha[i] = 1;
      if (w < 0) continue;
      const int entry = b.window.entry(w);
      key[i] = b.entries.k_at(entry, c), alpha[i] = b.entries.alpha_at(entry, c);
      ++count, w = b.window.before(w);
    }
  }
};

// Computes w_i of all entries from the newest back, and f, with one thread for each channel c. Its first entries are
// in x; those from w back are still to be loaded.
__device__ inline void prepare_entries(const Before& b, EntryChannel& x, int w, int c, const EntryMemory& m,
                                       float* shared) {
  double product = 1;
  float* to = shared + m.w + c;
  for (;;) {
#pragma unroll
    for (int i = 0; i < x.kAtOnce; ++i, to += m.w_stride) {
      if (i < x.count) *to = x.key[i] * static_cast<float>(product);
      product *= x.alpha[i];
    }
    if (w < 0) break;
    x.fetch(b, c, w);
  }
  shared[m.f + c] = static_cast<float>(product);
}

__device__ inline float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ inline float4 fma(float a, float4 b, float4 c) {
  return {fmaf(a, b.x, c.x), fmaf(a, b.y, c.y), fmaf(a, b.z, c.z), fmaf(a, b.w, c.w)};
}

// Why the kernels for wide states do not take the call, or nullptr.
template <class P>
const char* wide_why_not(const P& p) {
  if (const char* reason = parts_why_not(p)) return reason;
  if (entries_of(p) > kMaxEntries) return "takes at most 64 recorded entries a request";
  if (const char* reason = tile_why_not(p, layout_of(p), {&state_of(p)}, 64)) return reason;
  return grid_why_not(p, p.V / 32, layers_of(p));
}

}  // namespace kda::cuda
