// The contract, once: validate() checks an args struct and returns the problem that implementations work on.
// Whatever reaches an implementation is legal; implementations check nothing again.
#pragma once
#include <cstdint>

#include "kda/kda.h"

namespace kda {

constexpr int64_t kChunk = 64;     // C: tokens of a chunk
constexpr int64_t kMaxSize = 256;  // largest K and V
constexpr int64_t kMaxConvWidth = 4;

struct Dims {
  int64_t B, T, N, H, HV, K, V;
  bool varlen;  // cu_seqlens given

  int64_t tokens() const { return B * T; }
  int64_t group() const { return HV / H; }  // value heads of one query/key head
  // Chunks of the longest sequence the sizes allow.
  int64_t max_chunks() const { return (T + kChunk - 1) / kChunk; }
};

// Rows of h that a sequence owns.
inline int64_t h_rows(int64_t length, int64_t h_every) { return (length + kChunk * h_every - 1) / (kChunk * h_every); }

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

inline bool present(const kda_tensor& t) { return t.ndim > 0; }

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

int64_t int_at(const kda_tensor& t, int64_t i, int64_t j = 0);  // element of an integer tensor of rank 1 or 2

// The slot of sequence n: its index, or n.
inline int64_t slot_of(const kda_tensor& indices, int64_t n) { return present(indices) ? int_at(indices, n) : n; }

// One sequence of a CPU call, after validation.
struct Sequence {
  int64_t n, b, t0, length;  // tokens t0 .. t0 + length - 1 of row b
  int64_t slot;              // row of h0 and hT
  bool live;                 // false: padded, o is zeroed and no state touched
  bool initial;              // read h0
};
Sequence sequence_at(const Dims& d, const kda_inputs& in, int64_t n);
Sequence sequence_at(const Dims& d, const kda_inputs& in, const kda_states& states, int64_t n);

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
  int64_t row(int64_t t) const {  // of the state after token t; -1: skipped
    if (!slots) return t;
    const int64_t slot = int_at(*slots, n, t);
    return slot >= first_valid ? slot : -1;
  }
};
Sequence sequence_at(const DecodeProblem& p, int64_t n);
Start start_of(const DecodeProblem& p, const Sequence& s);
Snapshots snapshots_of(const DecodeProblem& p, int64_t n);

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
