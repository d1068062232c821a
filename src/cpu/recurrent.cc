// Token recurrence on the CPU (math.md 3): decode over a state pool, and forward for any length. It is bound by
// memory: the state is read once and written once per call (per 16 tokens). Everything else is small and stays in L1.
//
// Per token, with the decay folded into the vectors, so that one pass over the old state gives both products:
//   read = S^T (alpha k)    out = S^T (alpha q)    u = beta (v - read)    o = out + (k . q) u    (q carries scale)
//   S <- Diag(alpha) S + k u^T
// V-first: S is rows of K numbers, one per value column. K-first: strips of four vectors of columns.
// Value columns are independent, so neither grouping nor threads change a bit.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/recurrent.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/simd-inl.h"
// clang-format on

#include "cpu/arena.h"

#ifndef KDA_CPU_RECURRENT_TYPES
#define KDA_CPU_RECURRENT_TYPES
namespace kda::cpu {
constexpr int64_t kSteps = 16;  // tokens taken in one pass over the state, at most
constexpr int64_t kStrip = 32;  // V-first: rows of a state that pass through L1 together, at most
// Without memory from the workspace, tasks make do with the stack of a thread that has 64 KiB of it: they take fewer
// tokens and narrower strips. No bit depends on that, and steps of decode are short enough to lose nothing.
constexpr int64_t kSmallTokens = 2304, kSmallStrip = 4096;                     // floats
constexpr int64_t kSmallScratch = (kSmallTokens + kSmallStrip) * 4 + 5 * 512;  // bytes, with all other buffers
constexpr int64_t kFewTokens = 4;  // tokens of a request: this many just fit at K = 128, V-first

// What forward and decode have in common here.
struct Recurrence {
  const Dims& d;
  const kda_inputs& in;
  const kda_states& states;
  const kda_tensor& o;
  const kda_tensor* h = nullptr;     // forward's states before every h_tokens-th token, if wanted
  int64_t h_tokens = 0;              // a multiple of kSteps
  const int64_t* first_h = nullptr;  // [N] row of h where each sequence begins
  const DecodeProblem* decode = nullptr;
  const kda_tensor* out_state_indices = nullptr;
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

constexpr int64_t kPrefetchRows = 16;                       // how far ahead: 8 KiB at K = 128
HWY_INLINE int64_t strip_columns() { return 4 * lanes(); }  // K-first, at most
constexpr int64_t kRows = 8;                                // K-first: rows that pass through registers together

// How much of a head a task works on at a time.
struct Portions {
  int64_t steps;    // tokens
  int64_t columns;  // value columns: rows of a V-first state, columns of a K-first one
  bool whole;       // K-first: all columns, of a state that is worked on in place

  Portions(const Recurrence& r, int64_t V, bool in_place, bool small) : steps(kSteps), columns(kStrip), whole(false) {
    const int64_t K = padded(r.d.K);
    if (r.in.state_layout == KDA_STATE_K_FIRST) {
      columns = strip_columns();
      whole = in_place && V % columns == 0;
    }
    while (small && !whole && columns > lanes() && columns * K > kSmallStrip) columns /= 2;
    if (whole) columns = V;
    while (small && steps > 1 && steps * (4 * K + 2 * padded(columns)) > kSmallTokens) steps /= 2;
  }
};

// Activated inputs of some tokens of one head, and a strip of its state.
struct Tokens {
  Matrix k, alpha, alpha_k, alpha_q;     // [steps][K]
  Matrix v, o;                           // [steps][columns]  of the value columns at hand; K-first: v, then u
  float *beta = nullptr, *kq = nullptr;  // [steps]
  float* bias = nullptr;                 // [K]
  float* strip = nullptr;                // [columns][K] or [K][columns]

  Tokens(Arena arena, int64_t K, const Portions& x, uint64_t* bytes = nullptr) {
    const int64_t Kp = padded(K), Vp = padded(x.columns);
    float *keys = arena.floats(x.steps * 4 * Kp), *values = arena.floats(x.steps * 2 * Vp);
    float* rest = arena.floats(2 * kSteps + Kp);
    strip = x.whole ? nullptr : arena.floats(Vp * Kp);
    if (bytes) *bytes = arena.bytes();
    if (!keys) return;  // only measured
    k = {keys, 4 * Kp}, alpha = k.from(0, Kp), alpha_k = k.from(0, 2 * Kp), alpha_q = k.from(0, 3 * Kp);
    v = {values, 2 * Vp}, o = v.from(0, Vp);
    beta = rest, kq = rest + kSteps, bias = rest + 2 * kSteps;
  }
};

// One head of one sequence.
struct RecurrentTask {
  const Recurrence& r;
  const Sequence& s;
  int64_t hv;
  Gate gate;
  const Tokens x;
  const Portions& portions;
  Start start;
  Snapshots snapshots;
  const kda_tensor& hT;  // absent where the last state is not stored
  int64_t last;          // row of hT

  void load_keys(int64_t t, int64_t n) {
    const int64_t h = hv / r.d.group(), K = r.d.K, Kp = padded(K);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = s.t0 + t + i;
      float *q = x.alpha_q.row(i), *k = x.k.row(i), *alpha = x.alpha.row(i);
      load_row(r.in.q.dtype, at(r.in.q, s.b, token, h), K, q);
      load_row(r.in.k.dtype, at(r.in.k, s.b, token, h), K, k);
      load_row(r.in.g.dtype, at(r.in.g, s.b, token, hv), K, alpha);
      normalise_row(q, K, r.in.qk_l2norm, r.in.scale);
      normalise_row(k, K, r.in.qk_l2norm, 1);
      decay_row(gate, alpha, K);
      x.kq[i] = dot(k, q, Kp);
      for (int64_t d = 0; d < Kp; d += lanes()) {
        store(hn::Mul(load(alpha + d), load(k + d)), x.alpha_k.row(i) + d);
        store(hn::Mul(load(alpha + d), load(q + d)), q + d);
      }
      x.beta[i] = activate_beta(r.in.beta_form, load_scalar(r.in.beta.dtype, at(r.in.beta, s.b, token, hv)));
    }
  }

  void load_values(int64_t t, int64_t n, int64_t v0, int64_t V) {
    for (int64_t i = 0; i < n; ++i)
      load_row(r.in.v.dtype, at(r.in.v, s.b, s.t0 + t + i, hv) + v0 * dtype_size(r.in.v.dtype), V, x.v.row(i));
  }

  void store_outputs(int64_t t, int64_t n, int64_t v0, int64_t V) {
    for (int64_t i = 0; i < n; ++i)
      store_row(r.o.dtype, x.o.row(i), V, at(r.o, s.b, s.t0 + t + i, hv) + v0 * dtype_size(r.o.dtype));
  }

  // Prefetches a row of the state. A row past the end of a head's state is its neighbour's.
  HWY_INLINE void prefetch(const float* row) const {
    for (int64_t d = 0; d < r.d.K; d += 16) __builtin_prefetch(row + d);
  }

  // Takes a row of a V-first state through tokens first .. first+n-1. `from` and `to` may be the same memory. Without
  // `write` the last state is not written. Rows are taken one at a time: the machine overlaps rows by itself, and
  // memory sees one plain stream (four rows in step ran at half the speed).
  HWY_INLINE void advance_row(const Tokens& x, const float* from, float* to, int64_t first, int64_t n, int64_t column,
                              bool write) {
    const int64_t Kp = padded(r.d.K);
    for (int64_t i = first; i < first + n; ++i) {
      const float *k = x.k.row(i), *alpha = x.alpha.row(i), *alpha_k = x.alpha_k.row(i), *alpha_q = x.alpha_q.row(i);
      Vec read = hn::Zero(kF32), out = hn::Zero(kF32);
      for (int64_t d = 0; d < Kp; d += lanes()) {
        const Vec S = load(from + d);
        read = hn::MulAdd(S, load(alpha_k + d), read);
        out = hn::MulAdd(S, load(alpha_q + d), out);
      }
      const float u = x.beta[i] * (x.v.row(i)[column] - sum_lanes(read));
      x.o.row(i)[column] = sum_lanes(out) + x.kq[i] * u;
      if (i + 1 == first + n && !write) return;
      for (int64_t d = 0; d < Kp; d += lanes()) {
        const Vec S = hn::Mul(load(from + d), load(alpha + d));
        store(hn::MulAdd(splat(u), load(k + d), S), to + d);
      }
      from = to;
    }
  }

  // Takes V columns, whole groups of kVectors vectors, of a K-first state through tokens first .. first+n-1. A few
  // rows at a time are taken over all columns, so that memory sees one plain stream (going down four vectors of
  // columns took a quarter longer).
  template <int kVectors>
  HWY_INLINE void advance_columns(const Tokens& x, const float* from, int64_t from_pitch, float* to, int64_t to_pitch,
                                  int64_t first, int64_t n, int64_t V, bool write) {
    const int64_t N = lanes(), K = r.d.K;
    for (int64_t i = first; i < first + n; ++i) {
      float *u = x.v.row(i), *o = x.o.row(i);
      const float *keys = x.k.row(i), *alphas = x.alpha.row(i), *alpha_ks = x.alpha_k.row(i),
                  *alpha_qs = x.alpha_q.row(i);
      zero(o, V);
      for (int64_t k0 = 0; k0 < K; k0 += kRows) {
        const int64_t k1 = std::min(K, k0 + kRows);
        if (i == 0)
          for (int64_t k = k0; k < k1; ++k) prefetch(from + (k + kPrefetchRows) * from_pitch);
        for (int64_t d = 0; d < V; d += kVectors * N) {
          Vec read[kVectors], out[kVectors];
          for (int j = 0; j < kVectors; ++j) read[j] = load(u + d + j * N), out[j] = load(o + d + j * N);
          for (int64_t k = k0; k < k1; ++k) {
            const Vec alpha_k = splat(alpha_ks[k]), alpha_q = splat(alpha_qs[k]);
            for (int j = 0; j < kVectors; ++j) {
              const Vec S = load(from + k * from_pitch + d + j * N);
              read[j] = hn::NegMulAdd(S, alpha_k, read[j]);
              out[j] = hn::MulAdd(S, alpha_q, out[j]);
            }
          }
          for (int j = 0; j < kVectors; ++j) store(read[j], u + d + j * N), store(out[j], o + d + j * N);
        }
      }
      for (int64_t d = 0; d < V; d += N) {
        const Vec ud = hn::Mul(load(u + d), splat(x.beta[i]));
        store(ud, u + d), store(hn::MulAdd(ud, splat(x.kq[i]), load(o + d)), o + d);
      }
      if (i + 1 == first + n && !write) return;
      for (int64_t k = 0; k < K; ++k) {
        const Vec alpha = splat(alphas[k]), key = splat(keys[k]);
        for (int64_t d = 0; d < V; d += N) {
          const Vec S = hn::Mul(load(from + k * from_pitch + d), alpha);
          store(hn::MulAdd(load(u + d), key, S), to + k * to_pitch + d);
        }
      }
      from = to, from_pitch = to_pitch;
    }
  }

  void advance_columns(const Tokens& x, const float* from, int64_t from_pitch, float* to, int64_t to_pitch,
                       int64_t first, int64_t n, int64_t V, bool write) {
    if (V % (4 * lanes()) == 0) advance_columns<4>(x, from, from_pitch, to, to_pitch, first, n, V, write);
    else if (V % (2 * lanes()) == 0) advance_columns<2>(x, from, from_pitch, to, to_pitch, first, n, V, write);
    else advance_columns<1>(x, from, from_pitch, to, to_pitch, first, n, V, write);
  }

  // Runs all tokens over value columns v0 .. v0+V-1, at most one strip. x.strip holds the strip where the state
  // cannot be worked on in place: its dtype is not f32, its rows are not whole vectors, or there is none at all.
  void run_strip(int64_t v0, int64_t V) {
    // A copy, which no store can change: otherwise its pointers would be read again for every row of the state.
    const Tokens tokens = x;
    float* const scratch = tokens.strip;
    const bool v_first = r.in.state_layout == KDA_STATE_V_FIRST;
    const int64_t K = r.d.K, width = v_first ? padded(K) : portions.columns;
    const int64_t rows = v_first ? V : K, columns = v_first ? K : V;
    const kda_tensor& h0 = start.states;
    const bool whole = columns == width;
    const bool read_in_place = start.initial && h0.dtype == KDA_F32 && whole;
    const bool write_in_place = present(hT) && hT.dtype == KDA_F32 && whole;

    const float* from = scratch;
    float* to = scratch;
    int64_t from_pitch = width, to_pitch = width;
    if (read_in_place) {
      from = reinterpret_cast<const float*>(address(h0, start.row, v0, 0));
      from_pitch = h0.stride[2];
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        zero(scratch + i * width, width);
        if (start.initial) load_row(h0.dtype, address(h0, start.row, v0, i), columns, scratch + i * width);
      }
    }
    if (write_in_place) {
      to = reinterpret_cast<float*>(address(hT, last, v0, 0));
      to_pitch = hT.stride[2];
    }

    const bool one_block = s.length <= portions.steps;  // then the keys are loaded already
    const bool snaps = present(snapshots.states);
    for (int64_t t = 0; t < s.length; t += portions.steps) {
      const int64_t n = std::min(portions.steps, s.length - t);
      const bool write = present(hT) || snaps || t + n < s.length;
      if (r.h && t % r.h_tokens == 0)
        for (int64_t i = 0; i < rows; ++i)
          store_row(r.h->dtype, from + i * from_pitch, columns, address(*r.h, r.first_h[s.n] + t / r.h_tokens, v0, i));
      if (!one_block) load_keys(t, n);
      load_values(t, n, v0, V);
      const int64_t steps = snaps ? 1 : n;  // one token at a time where each state is kept
      for (int64_t j = 0; j < n; j += steps) {
        if (v_first) {
          for (int64_t i = 0; i < rows; ++i) {
            if (t == 0 && j == 0 && read_in_place) prefetch(from + (i + kPrefetchRows) * from_pitch);
            advance_row(tokens, from + i * from_pitch, to + i * to_pitch, j, steps, i, write);
          }
        } else {
          advance_columns(tokens, from, from_pitch, to, to_pitch, j, steps, width, write);
        }
        from = to, from_pitch = to_pitch;
        if (const int64_t row = snaps ? snapshots.row(t + j) : -1; row >= 0)
          for (int64_t i = 0; i < rows; ++i)
            store_row(snapshots.states.dtype, to + i * to_pitch, columns, address(snapshots.states, row, v0, i));
      }
      store_outputs(t, n, v0, V);
    }
    // There is nothing to do where the last write went to its place. A sequence without tokens passes its state
    // through.
    if (present(hT) && (!write_in_place || s.length == 0) && from != to_of(v0))
      for (int64_t i = 0; i < rows; ++i) store_row(hT.dtype, from + i * from_pitch, columns, address(hT, last, v0, i));
  }

  // The address of row i of the head's state in slot `slot`, in the part that belongs to columns from v0 on.
  char* address(const kda_tensor& t, int64_t slot, int64_t v0, int64_t i) const {
    if (r.in.state_layout == KDA_STATE_V_FIRST) return at(t, slot, hv, v0 + i);
    return at(t, slot, hv, i) + v0 * dtype_size(t.dtype);
  }
  const float* to_of(int64_t v0) const { return reinterpret_cast<const float*>(address(hT, last, v0, 0)); }
};

uint64_t recurrent_scratch_bytes(const Recurrence& r) {
  uint64_t bytes;
  Portions most(r, r.d.V, false, false);
  most.columns = std::max(most.columns, padded(r.d.V));  // where K-first states are worked on as a whole
  Tokens(Arena(), r.d.K, most, &bytes);
  return bytes;
}

// Runs value columns v0 .. v0+V-1 of one head of one sequence over all its tokens.
void run_task(const Recurrence& r, const Sequence& s, int64_t hv, int64_t v0, int64_t V, bool small, char* memory) {
  const Start start = r.decode ? start_of(*r.decode, s) : Start{r.states.h0, s.slot, s.initial};
  const int64_t last = present(r.states.hT) ? final_row(*r.out_state_indices, r.states, s) : -1;
  const kda_tensor hT = last >= 0 ? r.states.hT : kda_tensor{};
  // Whether states whose rows are whole vectors are read and written in place.
  const bool in_place = start.initial && start.states.dtype == KDA_F32 && present(hT) && hT.dtype == KDA_F32;
  const Portions portions(r, V, in_place, small);
  const Tokens x(Arena(memory), r.d.K, portions);
  const Gate gate = head_gate(form_of(r.in), r.in.lower_bound, r.in.A_log, r.in.dt_bias, hv, r.d.K, x.bias);
  const Snapshots snapshots = r.decode ? snapshots_of(*r.decode, s.n) : Snapshots{};
  RecurrentTask task{r, s, hv, gate, x, portions, start, snapshots, hT, last};
  if (s.length <= portions.steps) task.load_keys(0, s.length);
  for (int64_t v = v0; v < v0 + V; v += portions.columns) task.run_strip(v, std::min(portions.columns, v0 + V - v));
}

HWY_NOINLINE void run_task_on_stack(const Recurrence& r, const Sequence& s, int64_t hv, int64_t v0, int64_t V) {
  alignas(64) char memory[kSmallScratch];
  run_task(r, s, hv, v0, V, true, memory);
}

// `memory` has recurrent_scratch_bytes(), or is nullptr.
void recurrent_task(const Recurrence& r, const Sequence& s, int64_t hv, int64_t v0, int64_t V, char* memory) {
  memory ? run_task(r, s, hv, v0, V, false, memory) : run_task_on_stack(r, s, hv, v0, V);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "contract/conv.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

void zero_head(const kda_tensor& o, int64_t b, int64_t t0, int64_t count, int64_t hv) {
  const int64_t size = dtype_size(o.dtype);
  for (int64_t i = t0; i < t0 + count; ++i)
    std::memset(static_cast<char*>(o.data) + (b * o.stride[0] + i * o.stride[1] + hv * o.stride[2]) * size, 0,
                o.shape[3] * size);
}

// The work in units of 100,000 multiply-adds. A team of threads costs about one unit, a few microseconds.
int64_t tasks_of(const Dims& d) { return d.tokens() * d.HV * d.K * d.V * 4 / 100000 + 1; }

// Each thread has a share of the workspace, or makes do with its stack if there is none.
void run(const Recurrence& r, const kda_exec& exec, const Workspace& workspace) {
  const Dims& d = r.d;
  const bool shares = workspace.per_thread && exec.workspace_bytes >= workspace.bytes(1);
  const int threads = shares ? workspace.threads(exec, tasks_of(d)) : wanted_threads(exec, tasks_of(d));
  // With fewer heads than threads V is cut into parts. Each part loads the keys again, so none is narrower than 64
  // columns (a K-first strip).
  const int64_t heads = std::max<int64_t>(1, d.N * d.HV);
  const int64_t parts = std::clamp<int64_t>(threads / heads, 1, (d.V + 63) / 64);
  const int64_t part = (d.V / parts + 63) / 64 * 64, tiles = (d.V + part - 1) / part;
  const auto task_fn = KDA_ISA_CALL(recurrent_task);
  const int64_t tasks = d.N * d.HV * tiles;
  const auto one = [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * part, hv = task / tiles % d.HV, n = task / tiles / d.HV;
    const Sequence s = r.decode ? sequence_at(*r.decode, n) : sequence_at(d, r.in, r.states, n);
    char* memory = shares ? workspace.of_thread(exec, thread) : nullptr;
    if (s.live) task_fn(r, s, hv, v0, std::min(part, d.V - v0), memory);
    else if (v0 == 0) zero_head(r.o, s.b, s.t0, s.length, hv);
  };
  parallel_for(tasks, threads, one, short_run(tasks, threads));
  if (d.varlen) {
    const int64_t end = int_at(r.in.cu_seqlens, d.N);
    for (int64_t hv = 0; hv < d.HV; ++hv) zero_head(r.o, 0, end, d.T - end, hv);
  }
}

Recurrence recurrence_of(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  return {.d = p, .in = a.in, .states = a.states, .o = a.o, .decode = &p, .out_state_indices = &a.out_state_indices};
}
Recurrence recurrence_of(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  return {.d = p, .in = a.in, .states = a.states, .o = a.o, .out_state_indices = &a.out_state_indices};
}

// Shared: the convolved rows. Calls with only a few tokens of each request need no memory per thread.
Workspace plan(const DecodeProblem& p) {
  const kda_states& s = p.args.states;
  const bool in_place = present(s.hT) && s.hT.dtype == KDA_F32 && s.h0.dtype == KDA_F32;
  // (K-first states that pass through scratch run at half the speed in narrow strips.)
  const bool few = p.tokens() <= kFewTokens * p.N && (in_place || p.args.in.state_layout == KDA_STATE_V_FIRST);
  return {present(p.args.conv.x) ? conv_front_bytes(p.args.conv) : 0,
          few ? 0 : KDA_ISA_CALL(recurrent_scratch_bytes)(recurrence_of(p))};
}
// Shared: where each sequence's rows of h begin.
Workspace plan(const ForwardProblem& p) {
  return {present(p.args.h) ? p.N * sizeof(int64_t) : 0, KDA_ISA_CALL(recurrent_scratch_bytes)(recurrence_of(p))};
}

}  // namespace

uint64_t decode_workspace(const DecodeProblem& p) { return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p))); }

void decode(const DecodeProblem& p) {
  const kda_conv_inputs& conv = p.args.conv;
  const Workspace workspace = plan(p);
  kda_inputs in = p.args.in;
  if (present(conv.x)) {
    if (p.args.exec.workspace_bytes < workspace.shared)
      invalid("exec.workspace_bytes: expected at least ", workspace.shared, ", got ", p.args.exec.workspace_bytes);
    const kda_tensor z = conv_front_output(conv, p.args.exec.workspace);
    conv_front(conv, p.args.in.cu_seqlens, {}, z, p.args.exec);
    slice_convolved(in, z.data);
  }
  const Recurrence r{.d = p,
                     .in = in,
                     .states = p.args.states,
                     .o = p.args.o,
                     .decode = &p,
                     .out_state_indices = &p.args.out_state_indices};
  run(r, p.args.exec, workspace);
  for (int64_t n = 0; present(conv.x) && n < p.N; ++n) {
    const Sequence s = roll_of(p, n);
    conv_roll(conv.state, s.slot, conv.x, {}, n, s.b, s.t0, s.length);
  }
}

const char* recurrent_forward_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  if (a.exec.device != KDA_CPU) return "runs on the CPU only";
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.checkpoints)) return "keeps no checkpoints";
  if (present(a.v_new) || present(a.Aqk) || present(a.Akk)) return "has no chunks to save v_new, Aqk or Akk from";
  if (present(a.h) && h_layout(a) != a.in.state_layout) return "saves h in the layout of the other states alone";
  return nullptr;
}

uint64_t recurrent_forward_workspace(const ForwardProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p)));
}

void recurrent_forward(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const Workspace workspace = plan(p);
  workspace.threads(a.exec, 1);  // refuses a workspace that is too small
  Recurrence r = recurrence_of(p);
  if (present(a.h)) {
    r.h = &a.h, r.h_tokens = kChunk * a.h_every;
    r.first_h = first_h_rows(p, a.in, a.h_every, static_cast<int64_t*>(a.exec.workspace));
  }
  run(r, a.exec, workspace);
}

}  // namespace kda::cpu
#endif
