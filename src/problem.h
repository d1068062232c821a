// The contract, once: validate() checks an args struct and returns the problem that implementations work on.
// Whatever reaches an implementation is legal; implementations check nothing again.
#pragma once
#include <algorithm>
#include <cstdint>

#include "dtype.h"
#include "kda/kda.h"

namespace kda {

// What also runs inside CUDA kernels: there is one reading of indices and lengths.
#if defined(__CUDACC__)
#define KDA_BOTH __host__ __device__
#else
#define KDA_BOTH
#endif

constexpr int64_t kChunk = 64;     // C: tokens of a chunk
constexpr int64_t kMaxSize = 256;  // largest K and V
constexpr int64_t kMaxConvWidth = 4;

struct Dims {
  int64_t B, T, N, H, HV, K, V;
  bool varlen;  // cu_seqlens given

  int64_t tokens() const { return B * T; }
  KDA_BOTH int64_t group() const { return HV / H; }  // value heads of one query/key head
  // Chunks of the longest sequence the sizes allow.
  int64_t max_chunks() const { return (T + kChunk - 1) / kChunk; }
};

// Rows of h that a sequence owns.
KDA_BOTH inline int64_t h_rows(int64_t length, int64_t h_every) {
  return (length + kChunk * h_every - 1) / (kChunk * h_every);
}

struct ForwardProblem : Dims {
  kda_forward_args args;
};
struct BackwardProblem : Dims {
  kda_backward_args args;
};
struct DecodeProblem : Dims {
  kda_decode_args args;
};
struct VerifyProblem : Dims {
  kda_verify_args args;
};
struct FlushProblem : Dims {  // T: tokens of parents or conv_x, else R
  int64_t layers, R;
  kda_flush_args args;
};
struct FlushVerifyProblem : Dims {
  kda_flush_verify_args args;
};
struct SegmentMapProblem : Dims {
  kda_segment_map_args args;
};
struct SegmentMergeProblem : Dims {  // N: segments
  kda_segment_merge_args args;       // h0 as [1,HV,..]
};
struct GateProblem {
  kda_gate_args args;
};
struct GateBackwardProblem {
  kda_gate_backward_args args;
};

struct ConvDims {
  int64_t B, T, N, D, W;
};
struct ConvProblem : ConvDims {
  kda_conv_args args;
};
struct ConvBackwardProblem : ConvDims {
  kda_conv_backward_args args;
};

KDA_BOTH inline bool present(const kda_tensor& t) { return t.ndim > 0; }

// Checks everything that shapes, strides, dtypes, options and addresses tell. Throws Error(KDA_INVALID_ARGUMENT).
ForwardProblem validate(const kda_forward_args* args);
BackwardProblem validate(const kda_backward_args* args);
DecodeProblem validate(const kda_decode_args* args);
VerifyProblem validate(const kda_verify_args* args);
FlushProblem validate(const kda_flush_args* args);
FlushVerifyProblem validate(const kda_flush_verify_args* args);
SegmentMapProblem validate(const kda_segment_map_args* args);
SegmentMergeProblem validate(const kda_segment_merge_args* args);
GateProblem validate(const kda_gate_args* args);
GateBackwardProblem validate(const kda_gate_backward_args* args);
ConvProblem validate(const kda_conv_args* args);
ConvBackwardProblem validate(const kda_conv_backward_args* args);

// Checks what only data tells (cu_seqlens, slots), for tensors the host can read: CPU calls, just before they run.
void validate_data(const ForwardProblem& p);
void validate_data(const BackwardProblem& p);
void validate_data(const DecodeProblem& p);
void validate_data(const VerifyProblem& p);
void validate_data(const FlushProblem& p);
void validate_data(const FlushVerifyProblem& p);
void validate_data(const ConvProblem& p);
void validate_data(const ConvBackwardProblem& p);
void validate_data(const SegmentMapProblem& p);
inline void validate_data(const SegmentMergeProblem&) {}
inline void validate_data(const GateProblem&) {}
inline void validate_data(const GateBackwardProblem&) {}

// Element of an integer tensor of rank 1 or 2.
KDA_BOTH inline int64_t int_at(const kda_tensor& t, int64_t i, int64_t j = 0) {
  const int64_t offset = i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0);
  switch (t.dtype) {
    case KDA_I64: return static_cast<const int64_t*>(t.data)[offset];
    case KDA_I32: return static_cast<const int32_t*>(t.data)[offset];
    default: return static_cast<const uint8_t*>(t.data)[offset];
  }
}

// The same where only i32 is legal.
KDA_BOTH inline int32_t index_at(const kda_tensor& t, int64_t i, int64_t j = 0) {
  return static_cast<const int32_t*>(t.data)[i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0)];
}

// By value: std::clamp takes addresses, and kernels would put numbers into local memory.
KDA_BOTH constexpr int64_t within(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

// The slot of sequence n: its index, or n.
KDA_BOTH inline int64_t slot_of(const kda_tensor& indices, int64_t n) {
  return present(indices) ? index_at(indices, n) : n;
}

// One sequence of a call. On the CPU indices and lengths have been checked; on the device a slot beyond the pool is
// padding, and lengths are cut to the tokens there are.
struct Sequence {
  int64_t n, b, t0, length;  // tokens t0 .. t0 + length - 1 of row b
  int64_t slot;              // row of h0 and hT
  bool live;                 // false: padded, o is zeroed and no state touched
  bool initial;              // read h0
};
// Its tokens alone, of one row of T.
KDA_BOTH inline Sequence packed_at(const kda_tensor& cu_seqlens, int64_t T, int64_t n) {
  const int64_t t0 = within(int_at(cu_seqlens, n), 0, T);
  return {n, 0, t0, within(int_at(cu_seqlens, n + 1), t0, T) - t0, n, true, true};
}
KDA_BOTH inline Sequence sequence_at(const Dims& d, const kda_inputs& in, int64_t n) {
  if (!d.varlen) return {n, n, 0, d.T, n, true, true};
  return packed_at(in.cu_seqlens, d.T, n);
}
// Its states, with `slot` from slot_of: what kernels ask for before all else.
KDA_BOTH inline void find_states(Sequence& s, const kda_states& states, int64_t slot) {
  s.slot = slot;
  if (present(states.state_indices)) {
    const int64_t slots = present(states.h0) ? states.h0.shape[0] : states.hT.shape[0];
    s.live = slot >= states.first_valid_slot && (slot < slots || !(present(states.h0) || present(states.hT)));
  }
  s.initial = present(states.h0) && (!present(states.has_initial_state) || int_at(states.has_initial_state, s.n));
}
KDA_BOTH inline Sequence sequence_at(const Dims& d, const kda_inputs& in, const kda_states& states, int64_t n) {
  Sequence s = sequence_at(d, in, n);
  find_states(s, states, slot_of(states.state_indices, n));
  return s;
}

// Decode: where a sequence's states before and after its tokens are.
struct Start {
  kda_tensor states;
  int64_t row;
  bool initial;  // false: zeros
};
struct Snapshots {
  kda_tensor states{};  // absent: none wanted
  const kda_tensor* slots = nullptr;
  int64_t n = 0, first_valid = 0;
  KDA_BOTH int64_t row(int64_t t) const {  // of the state after token t; -1: skipped
    if (!slots) return t;
    if (t >= slots->shape[1]) return -1;
    const int64_t slot = index_at(*slots, n, t);
    return slot >= first_valid ? slot : -1;
  }
};
KDA_BOTH inline void find_states(const DecodeProblem& p, Sequence& s, int64_t slot) {
  const kda_decode_args& a = p.args;
  find_states(s, a.states, slot);
  if (!present(a.states.state_indices) && present(a.snapshot_slots))
    s.live = index_at(a.snapshot_slots, s.n, 0) >= a.states.first_valid_slot;
}
KDA_BOTH inline Sequence sequence_at(const DecodeProblem& p, int64_t n) {
  Sequence s = sequence_at(p, p.args.in, n);
  find_states(p, s, slot_of(p.args.states.state_indices, n));
  return s;
}
// Which rows they are, without the tensor.
KDA_BOTH inline Snapshots snapshot_rows_of(const DecodeProblem& p, int64_t n) {
  Snapshots s;
  s.slots = present(p.args.snapshot_slots) ? &p.args.snapshot_slots : nullptr;
  s.n = n, s.first_valid = p.args.states.first_valid_slot;
  return s;
}
KDA_BOTH inline int64_t start_row(const DecodeProblem& p, const Snapshots& last) {
  const kda_decode_args& a = p.args;
  const int64_t S = present(a.snapshot_slots) ? a.snapshot_slots.shape[1] : a.snapshots.shape[1];
  return last.row(within(index_at(a.accepted, last.n), 1, S) - 1);
}
KDA_BOTH inline Snapshots snapshots_of(const DecodeProblem& p, int64_t n) {
  const kda_decode_args& a = p.args;
  Snapshots s = snapshot_rows_of(p, n);
  s.states = a.snapshots;
  if (s.slots || !present(a.snapshots)) return s;
  s.states.data = static_cast<char*>(s.states.data) + n * s.states.stride[0] * dtype_size(s.states.dtype);
  for (int i = 0; i < 4; ++i) s.states.shape[i] = s.states.shape[i + 1], s.states.stride[i] = s.states.stride[i + 1];
  s.states.ndim = 4;
  return s;
}
KDA_BOTH inline Start start_of(const DecodeProblem& p, const Sequence& s) {
  const kda_decode_args& a = p.args;
  if (!present(a.accepted)) return {a.states.h0, s.slot, s.initial};
  const Snapshots last = snapshots_of(p, s.n);
  const kda_tensor& from = last.slots ? a.states.h0 : last.states;
  const int64_t row = start_row(p, last);
  return {from, row, row >= 0 && row < from.shape[0]};
}

// Points in.q, in.k, in.v into convolved rows [B,T,D] (dense), where the call has conv.x.
void slice_convolved(kda_inputs& in, void* rows);

// Fills rows[n] with the row of h where sequence n begins; returns rows.
const int64_t* first_h_rows(const Dims& d, const kda_inputs& in, int64_t h_every, int64_t* rows);

// Does any tensor of the call hold float64? (Only the reference takes it.)
bool has_f64(const ForwardProblem& p);
bool has_f64(const BackwardProblem& p);
bool has_f64(const DecodeProblem& p);
bool has_f64(const VerifyProblem& p);
bool has_f64(const FlushProblem& p);
bool has_f64(const FlushVerifyProblem& p);
bool has_f64(const SegmentMapProblem& p);
bool has_f64(const SegmentMergeProblem& p);
bool has_f64(const GateProblem& p);
bool has_f64(const GateBackwardProblem& p);
bool has_f64(const ConvProblem& p);
bool has_f64(const ConvBackwardProblem& p);

}  // namespace kda
