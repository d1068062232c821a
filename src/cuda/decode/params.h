// What the kernels of decode read of a call, and which calls are on the fast path.
#pragma once
#include "cuda/call/launch.h"
#include "cuda/call/launch_plans.h"
#include "cuda/call/state_rows.h"
#include "cuda/call/token.h"

namespace kda::cuda {

constexpr int kWideK = 128;  // on the fast path

// How states are read and written. kAny: an element at a time. kRows: V-first, four channels of a column at a time.
// kColumns: K-first, some columns of a channel. kGiven: as each call says.
enum class Access { kAny, kRows, kColumns, kGiven };

// What kernels read of a call. What all calls have comes first: a block waits for every 64 bytes of it that it reads.
struct DecodeParams {
  Blocks blocks;
  Tokens tokens;
  StateSlots slots;
  TypedView h0, hT;
  int64_t T;
  uint32_t N, V;
  int32_t layout;
  bool varlen;

  Flags has_initial;
  Lengths cu_seqlens;

  // Snapshots by slot, or by row of a sequence (`sequence`: bytes from one sequence to the next).
  TypedView snapshots;
  int64_t sequence;
  IndexRows snapshot_slots;
  Index accepted;
  int64_t S, start_rows, snapshot_rows;  // snapshots of a sequence; how many rows there are to start from, and to write
  Access access;
  Index out_state_indices;
  int64_t final_rows;  // slots of hT

  explicit DecodeParams(const DecodeProblem& p) : DecodeParams(p, p.args) {}

  __device__ Sequence sequence_at(int64_t n) const { return kda::sequence_at(varlen, cu_seqlens, T, n); }
  __device__ SnapshotRows snapshot_rows_of(int64_t n) const { return {snapshot_slots.row(n), S, slots.first_valid}; }
  // The row of the snapshot that a sequence starts from, or -1.
  __device__ int64_t start_row(int64_t n) const {
    const int64_t row = snapshot_rows_of(n).start_row(accepted[n]);
    return row < start_rows ? row : -1;
  }
  __device__ int64_t first_snapshot(int64_t n) const { return snapshot_slots.data ? 0 : n * sequence; }  // in bytes
  // A copy for a call on a fast path, with constants that the compiler then knows.
  __device__ DecodeParams fast_copy(FastPath path, int32_t state_dtype) const {
    DecodeParams x = *this;
    x.tokens = tokens.fast_copy(kWideK);
    x.h0.dtype = x.hT.dtype = x.snapshots.dtype = state_dtype;
    if (path == FastPath::kSnapshots) return x;
    x.hT.stride0 = h0.stride0, x.hT.stride1 = h0.stride1, x.hT.stride2 = h0.stride2;
    x.T = 1, x.N = blocks.rows, x.varlen = false;
    return x;
  }

 private:
  DecodeParams(const DecodeProblem& p, const kda_decode_args& a)
      : blocks(p, 1),
        tokens(p, a.in, a.o),
        slots(slots_of(a.states)),
        h0(view_of(a.states.h0)),
        hT(view_of(a.states.hT)),
        T(p.T),
        N(static_cast<uint32_t>(p.N)),
        V(static_cast<uint32_t>(p.V)),
        layout(a.in.state_layout),
        varlen(p.varlen),
        has_initial(strided<const uint8_t>(a.states.has_initial_state)),
        cu_seqlens(lengths_of(a.in.cu_seqlens)),
        snapshots(view_of(a.snapshots, present(a.snapshots) ? a.snapshots.ndim - 4 : 0)),
        sequence(a.snapshots.stride[0] * dtype_size(a.snapshots.dtype)),
        snapshot_slots(index_rows(a.snapshot_slots)),
        accepted(index_of(a.accepted)),
        S(by_slot(a) ? a.snapshot_slots.shape[1] : a.snapshots.shape[1]),
        start_rows(by_slot(a) ? a.states.h0.shape[0] : a.snapshots.shape[1]),
        snapshot_rows(a.snapshots.shape[by_slot(a) ? 0 : 1]),
        access(access_of(p)),
        out_state_indices(index_of(a.out_state_indices)),
        final_rows(a.states.hT.shape[0]) {}
  static bool by_slot(const kda_decode_args& a) { return present(a.snapshot_slots); }
  static Access access_of(const DecodeProblem& p) {
    const kda_decode_args& a = p.args;
    const std::initializer_list<const kda_tensor*> states = {&a.states.h0, &a.states.hT, &a.snapshots};
    if (wide_rows(p, a.in.state_layout, states)) return Access::kRows;
    return wide_columns(p, a.in.state_layout, states) ? Access::kColumns : Access::kAny;
  }
};

// The fast path that a call is on. All have the dtypes and forms that Tokens::on_fast_path() names, K = 128, and states
// of one dtype. kPlain takes one token, needs h0 and hT with equal strides, and writes each state back to the slot that
// it was read from. The one with snapshots has any number of tokens. Kernels for these calls have less than half of the
// instructions: code for other calls would lie between those that run, and come through the instruction cache with
// them.
inline FastPath fast_path_of(const DecodeProblem& p, const DecodeParams& x) {
  const TypedView &h0 = x.h0, &hT = x.hT;
  const auto usual = [&](const TypedView& states) { return !states.data || states.dtype == h0.dtype; };
  if (p.K != kWideK || p.V % 64 || !h0.data || !usual(hT) || !x.tokens.on_fast_path()) return FastPath::kNone;
  if (x.snapshots.data) return usual(x.snapshots) && x.access == Access::kRows ? FastPath::kSnapshots : FastPath::kNone;
  const bool alike = hT.data && h0.stride0 == hT.stride0 && h0.stride1 == hT.stride1 && h0.stride2 == hT.stride2;
  const bool wide = x.access == Access::kRows || (x.access == Access::kColumns && h0.dtype == KDA_F32);
  return alike && wide && !x.accepted.data && !x.out_state_indices.data && !p.varlen && p.T == 1 ? FastPath::kPlain
                                                                                                 : FastPath::kNone;
}
// Launches a call on the fast path with snapshots.
void decode_snapshots(const DecodeProblem& p, const DecodeParams& x, const DecodePlan& plan);

}  // namespace kda::cuda
