// The contract, once: validate() checks an args struct and returns the problem that implementations work on.
// Whatever reaches an implementation is legal; implementations check nothing again.
#pragma once
#include <algorithm>
#include <cstdint>

#include "contract/dtype.h"
#include "kda/kda.h"

namespace kda {

// Marks functions that CUDA kernels call, too, so that host and device read indices and lengths in the same way.
#if defined(__CUDACC__)
#define KDA_BOTH __host__ __device__
#else
#define KDA_BOTH
#endif

constexpr int64_t kChunk = 64;           // C: tokens of a chunk
constexpr int64_t kCheckpointStep = 16;  // checkpoints are a multiple of it apart
constexpr int64_t kMaxSize = 256;        // largest K and V
constexpr int64_t kMaxConvWidth = 4;
constexpr int64_t kMaxNormSize = 8192;  // largest V of kda_norm_gate

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Dims {
  int64_t B, T, N, H, HV, K, V;
  bool varlen;  // cu_seqlens given
  bool idle;    // no output has an element: there is nothing to do

  int64_t tokens() const { return B * T; }
  KDA_BOTH int64_t group() const { return HV / H; }  // value heads of one query/key head
  // Chunks of the longest sequence the sizes allow.
  int64_t max_chunks() const { return divide_up(T, kChunk); }
};

// Rows of h that a sequence owns.
KDA_BOTH inline int64_t h_rows(int64_t length, int64_t h_every) {
  return (length + kChunk * h_every - 1) / (kChunk * h_every);
}

// The layout of h, of a forward's or a backward's arguments.
template <class Args>
KDA_BOTH inline int32_t h_layout(const Args& a) {
  return a.h_v_first ? KDA_STATE_V_FIRST : a.in.state_layout;
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
  bool idle;
};
struct GateBackwardProblem {
  kda_gate_backward_args args;
  bool idle;
};

struct NormDims {
  int64_t rows, V;  // rows: B T HV
  bool idle;
};
struct NormGateProblem : NormDims {
  kda_norm_gate_args args;
  bool keep_zeros = false;  // rows of zeros stay zeros: NaN in them becomes 0
};
struct NormGateBackwardProblem : NormDims {
  kda_norm_gate_backward_args args;
};

struct ConvDims {
  int64_t B, T, N, D, W;
  bool idle;
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
NormGateProblem validate(const kda_norm_gate_args* args);
NormGateBackwardProblem validate(const kda_norm_gate_backward_args* args);
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
inline void validate_data(const NormGateProblem&) {}
inline void validate_data(const NormGateBackwardProblem&) {}

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

// An integer tensor without its sizes. A kernel waits for every 64 bytes of its parameters that it reads, and a
// kda_tensor has 100. So kernels are given these instead, and read nothing of tensors that the call does not have.
template <class T>
struct Strided {
  T* data = nullptr;   // nullptr: absent
  int64_t stride = 0;  // in elements
  KDA_BOTH T& operator[](int64_t i) const { return data[i * stride]; }
};
using Index = Strided<const int32_t>;
template <class T>
KDA_BOTH Strided<T> strided(const kda_tensor& t) {
  return {static_cast<T*>(t.data), t.stride[0]};
}
KDA_BOTH inline Index index_of(const kda_tensor& t) { return strided<const int32_t>(t); }

struct IndexRows {  // rank 2
  const int32_t* data = nullptr;
  int64_t step = 0, stride = 0, columns = 0;
  KDA_BOTH Index row(int64_t n) const { return {data ? data + n * step : nullptr, stride}; }
};
KDA_BOTH inline IndexRows index_rows(const kda_tensor& t) {
  return {static_cast<const int32_t*>(t.data), t.stride[0], t.stride[1], t.shape[1]};
}

struct Lengths {  // cu_seqlens
  const void* data = nullptr;
  int64_t stride = 0;
  int32_t dtype = KDA_I32;
};
KDA_BOTH inline Lengths lengths_of(const kda_tensor& t) { return {t.data, t.stride[0], t.dtype}; }
KDA_BOTH inline int64_t int_at(const Lengths& t, int64_t i) {
  return t.dtype == KDA_I64 ? static_cast<const int64_t*>(t.data)[i * t.stride]
                            : static_cast<const int32_t*>(t.data)[i * t.stride];
}

// Takes numbers by value: std::clamp takes their addresses, for which kernels would put them into local memory.
KDA_BOTH constexpr int64_t within(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

// The slot of sequence n: its index, or n.
KDA_BOTH inline int64_t slot_of(const Index& indices, int64_t n) { return indices.data ? indices[n] : n; }
KDA_BOTH inline int64_t slot_of(const kda_tensor& indices, int64_t n) { return slot_of(index_of(indices), n); }

// One sequence of a call. On the CPU indices and lengths have been checked; on the device a slot beyond the pool is
// padding, and lengths are cut to the tokens there are.
struct Sequence {
  int64_t n, b, t0, length;  // tokens t0 .. t0 + length - 1 of row b
  int64_t slot;              // row of h0 and hT
  bool live;                 // false: padded, o is zeroed and no state touched
  bool initial;              // read h0
};
// Finds only the tokens of sequence n, in one row of T tokens. `Lengths` is the struct Lengths or a tensor.
template <class Lengths>
KDA_BOTH Sequence packed_at(const Lengths& cu_seqlens, int64_t T, int64_t n) {
  const int64_t t0 = within(int_at(cu_seqlens, n), 0, T);
  return {n, 0, t0, within(int_at(cu_seqlens, n + 1), t0, T) - t0, n, true, true};
}
template <class Lengths>
KDA_BOTH Sequence sequence_at(bool varlen, const Lengths& cu_seqlens, int64_t T, int64_t n) {
  if (!varlen) return {n, n, 0, T, n, true, true};
  return packed_at(cu_seqlens, T, n);
}
KDA_BOTH inline Sequence sequence_at(const Dims& d, const kda_inputs& in, int64_t n) {
  return sequence_at(d.varlen, in.cu_seqlens, d.T, n);
}

// Says where the states of sequences are, and whether sequences start from them.
enum class Initial : int32_t { kZeros, kStates, kSome };  // kSome: as has_initial_state says
struct StateSlots {
  Index indices;
  uint32_t slots = UINT32_MAX;  // of the pool; without a pool any slot will do
  int32_t first_valid = 0;
  Initial initial = Initial::kZeros;
};
KDA_BOTH inline uint32_t count_slots(int64_t slots) {
  return slots < UINT32_MAX ? static_cast<uint32_t>(slots) : UINT32_MAX;
}
KDA_BOTH inline StateSlots slots_of(const kda_states& s) {
  const int64_t pool = present(s.h0) ? s.h0.shape[0] : present(s.hT) ? s.hT.shape[0] : INT64_MAX;
  const Initial initial = !present(s.h0)                 ? Initial::kZeros
                          : present(s.has_initial_state) ? Initial::kSome
                                                         : Initial::kStates;
  return {index_of(s.state_indices), count_slots(pool), s.first_valid_slot, initial};
}
using Flags = Strided<const uint8_t>;
// `slot` comes from slot_of. Kernels load it before everything else.
KDA_BOTH inline void find_states(Sequence& s, const StateSlots& states, const Flags& has_initial, int64_t slot) {
  s.slot = slot;
  if (states.indices.data) s.live = slot >= states.first_valid && slot < int64_t{states.slots};
  s.initial = states.initial == Initial::kSome ? has_initial[s.n] != 0 : states.initial == Initial::kStates;
}
KDA_BOTH inline void find_states(Sequence& s, const kda_states& states, int64_t slot) {
  find_states(s, slots_of(states), strided<const uint8_t>(states.has_initial_state), slot);
}
KDA_BOTH inline Sequence sequence_at(const Dims& d, const kda_inputs& in, const kda_states& states, int64_t n) {
  Sequence s = sequence_at(d, in, n);
  find_states(s, states, slot_of(states.state_indices, n));
  return s;
}

// Row of hT for the state after the tokens of a live sequence; -1: it is not stored. `slot` is where the sequence's
// state came from, `rows` are those of hT.
KDA_BOTH inline int64_t final_row(const Index& out_state_indices, int64_t first_valid, int64_t rows, int64_t n,
                                  int64_t slot) {
  if (!out_state_indices.data) return slot;
  const int64_t out = out_state_indices[n];
  return out >= first_valid && out < rows ? out : -1;
}
KDA_BOTH inline int64_t final_row(const kda_tensor& out_state_indices, const kda_states& states, const Sequence& s) {
  return final_row(index_of(out_state_indices), states.first_valid_slot, states.hT.shape[0], s.n, s.slot);
}

// Where the checkpoints of a sequence are, in tokens of the call.
struct CheckpointPlaces {
  int64_t every, before;                      // before: tokens since the last multiple of `every`, when the call begins
  KDA_BOTH int64_t number(int64_t t) const {  // of the checkpoint after t tokens, from 0 on; -1: there is none
    return (t + before) % every == 0 ? (t + before) / every - 1 : -1;
  }
  KDA_BOTH int64_t place(int64_t number) const { return (number + 1) * every - before; }
  KDA_BOTH int64_t next(int64_t t) const { return place((t + before) / every); }  // the first behind t
};
KDA_BOTH inline CheckpointPlaces checkpoint_places(const kda_tensor& offset, int64_t every, int64_t n) {
  return {every, present(offset) ? within(index_at(offset, n), 0, INT32_MAX) % every : 0};
}
// Row of `checkpoints` where checkpoint `number` of sequence n goes; -1: nowhere.
KDA_BOTH inline int64_t checkpoint_row(const kda_tensor& slots, int64_t first_valid, int64_t rows, int64_t n,
                                       int64_t number) {
  if (number < 0 || number >= slots.shape[1]) return -1;
  const int64_t slot = index_at(slots, n, number);
  return slot >= first_valid && slot < rows ? slot : -1;
}
// The same for the state after t tokens.
KDA_BOTH inline int64_t checkpoint_row(const kda_forward_args& a, int64_t n, int64_t t) {
  const CheckpointPlaces places = checkpoint_places(a.checkpoint_offset, a.checkpoint_every, n);
  return checkpoint_row(a.checkpoint_slots, a.states.first_valid_slot, a.checkpoints.shape[0], n, places.number(t));
}

// Decode: where the states before and after a sequence's tokens are.
struct Start {
  kda_tensor states;
  int64_t row;
  bool initial;  // false: zeros
};
struct SnapshotRows {
  Index slots;        // absent: rows [n][t]
  int64_t count = 0;  // S
  int64_t first_valid = 0;
  KDA_BOTH int64_t row(int64_t t) const {  // of the state after token t; -1: skipped
    if (!slots.data) return t;
    if (t >= count) return -1;
    const int64_t slot = slots[t];
    return slot >= first_valid ? slot : -1;
  }
  // The row of the state to start from, for the value that `accepted` holds.
  KDA_BOTH int64_t start_row(int64_t accepted) const { return row(within(accepted, 1, count) - 1); }
};
struct Snapshots : SnapshotRows {
  kda_tensor states{};  // absent: none wanted
};
// Without state_indices a skipped first slot marks padding, too.
KDA_BOTH inline void find_padding(Sequence& s, const StateSlots& states, const Index& snapshot_slots) {
  if (!states.indices.data && snapshot_slots.data) s.live = snapshot_slots[0] >= states.first_valid;
}
KDA_BOTH inline Sequence sequence_at(const DecodeProblem& p, int64_t n) {
  const kda_decode_args& a = p.args;
  Sequence s = sequence_at(p, a.in, a.states, n);
  find_padding(s, slots_of(a.states), index_rows(a.snapshot_slots).row(n));
  return s;
}
inline Snapshots snapshots_of(const DecodeProblem& p, int64_t n) {
  const kda_decode_args& a = p.args;
  const bool slots = present(a.snapshot_slots);
  Snapshots s{{index_rows(a.snapshot_slots).row(n), slots ? a.snapshot_slots.shape[1] : a.snapshots.shape[1],
               a.states.first_valid_slot},
              a.snapshots};
  if (slots || !present(a.snapshots)) return s;
  s.states.data = static_cast<char*>(s.states.data) + n * s.states.stride[0] * dtype_size(s.states.dtype);
  for (int i = 0; i < 4; ++i) s.states.shape[i] = s.states.shape[i + 1], s.states.stride[i] = s.states.stride[i + 1];
  s.states.ndim = 4;
  return s;
}
inline Start start_of(const DecodeProblem& p, const Sequence& s) {
  const kda_decode_args& a = p.args;
  if (!present(a.accepted)) return {a.states.h0, s.slot, s.initial};
  const Snapshots last = snapshots_of(p, s.n);
  const kda_tensor& from = last.slots.data ? a.states.h0 : last.states;
  const int64_t row = last.start_row(index_at(a.accepted, s.n));
  return {from, row, row >= 0 && row < from.shape[0]};
}

// The norm and gate that follow an operator in the same call, in place on its output.
NormGateProblem norm_behind(const kda_exec& exec, const kda_tensor& o, const kda_norm_inputs& norm);

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
bool has_f64(const NormGateProblem& p);
bool has_f64(const NormGateBackwardProblem& p);
bool has_f64(const ConvProblem& p);
bool has_f64(const ConvBackwardProblem& p);

}  // namespace kda
