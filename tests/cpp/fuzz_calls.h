// Legal random calls in one arena, for fuzz.cc to break.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "contract/dtype.h"
#include "error.h"
#include "fields.h"
#include "fuzz_arena.h"
#include "support.h"

namespace kda::test {

constexpr int64_t kWork = 40000;  // B T HV K V of a call at most: the oracle is slow

struct Sizes {
  int64_t B, T, N, H, HV, K, V;
  bool packed, l2norm;
  std::vector<int64_t> cu;
  int32_t dtype, gate_form;
};

inline int32_t any_float(Random& random) {
  constexpr int32_t kDtypes[] = {KDA_F32, KDA_F32, KDA_BF16, KDA_F16};
  return random.chance(0.02) ? KDA_F64 : kDtypes[random.below(4)];
}
inline int32_t state_dtype(Random& random) { return random.chance(0.3) ? KDA_BF16 : KDA_F32; }

inline Sizes random_sizes(Random& random) {
  Sizes s{};
  constexpr int64_t kTokens[] = {0, 1, 2, 3, 7, 15, 16, 17, 33, 64, 65, 70};
  constexpr int64_t kHead[] = {1, 2, 3, 8, 15, 16, 17, 20};
  do {
    s.packed = random.chance(0.4);
    s.B = s.packed ? 1 : random.below(4);
    s.T = kTokens[random.below(std::size(kTokens))];
    s.H = 1 + random.below(2), s.HV = s.H * (1 + random.below(3));
    s.K = kHead[random.below(std::size(kHead))], s.V = kHead[random.below(std::size(kHead))];
  } while (s.B * s.T * s.HV * s.K * s.V > kWork / 4 || s.B * s.T * s.HV > 100);
  s.N = s.B;
  if (s.packed) {
    s.N = random.below(5);
    s.cu = {0};
    for (int64_t n = 0; n < s.N; ++n) s.cu.push_back(s.cu.back() + random.below(s.T - s.cu.back() + 1));
  }
  s.dtype = any_float(random), s.gate_form = static_cast<int32_t>(random.below(3)), s.l2norm = random.chance(0.5);
  return s;
}

inline kda_tensor filled(int32_t dtype, const std::vector<int64_t>& shape, Random& random, double scale) {
  const kda_tensor t = arena.take(dtype, shape, random);
  for (int64_t i = 0; i < tensor_size(t); ++i) set(t, i, scale * random.uniform(-1, 1));
  return t;
}

inline kda_inputs random_inputs(const Sizes& s, Random& random) {
  kda_inputs in{};
  in.q = filled(s.dtype, {s.B, s.T, s.H, s.K}, random, 1);
  in.k = filled(s.dtype, {s.B, s.T, s.H, s.K}, random, 0.3);  // beta |k|^2 <= 2
  in.v = filled(s.dtype, {s.B, s.T, s.HV, s.V}, random, 1);
  in.g = filled(any_float(random), {s.B, s.T, s.HV, s.K}, random, 1);
  if (s.gate_form == KDA_GATE_LOG)
    for (int64_t i = 0; i < tensor_size(in.g); ++i) set(in.g, i, -std::abs(get(in.g, i)));
  in.beta = filled(any_float(random), {s.B, s.T, s.HV}, random, 1);
  if (s.gate_form == KDA_GATE_SOFTPLUS || (s.gate_form == KDA_GATE_LOWER_BOUND && random.chance(0.5)))
    in.A_log = filled(KDA_F32, {s.HV}, random, 1);
  if (s.gate_form != KDA_GATE_LOG && random.chance(0.5)) in.dt_bias = filled(KDA_F32, {s.HV, s.K}, random, 1);
  if (s.packed) {
    in.cu_seqlens = arena.take(random.chance(0.5) ? KDA_I32 : KDA_I64, {s.N + 1}, random);
    for (int64_t n = 0; n <= s.N; ++n) set(in.cu_seqlens, n, static_cast<double>(s.cu[n]));
  }
  in.gate_form = s.gate_form, in.beta_form = static_cast<int32_t>(random.below(3));
  in.qk_l2norm = s.l2norm, in.state_layout = static_cast<int32_t>(random.below(2));
  in.lower_bound = s.gate_form == KDA_GATE_LOWER_BOUND ? -5 : 0;
  in.scale = random.chance(0.5) ? 0 : static_cast<float>(random.uniform(-2, 2));
  return in;
}

inline std::vector<int64_t> state_shape(const Sizes& s, const kda_inputs& in, int64_t rows) {
  if (in.state_layout == KDA_STATE_V_FIRST) return {rows, s.HV, s.V, s.K};
  return {rows, s.HV, s.K, s.V};
}

template <class Args>
std::vector<int64_t> h_shape(const Sizes& s, const Args& a, int64_t rows) {
  if (a.h_v_first) return {rows, s.HV, s.V, s.K};
  return state_shape(s, a.in, rows);
}

// Slots may be of either width.
inline int32_t index_dtype(Random& random) { return random.chance(0.25) ? KDA_I64 : KDA_I32; }

// Slots to write: in one pool, each sequence's own, or one that no other reads; else any order of them.
inline kda_tensor slots_to_write(const Sizes& s, const kda_tensor& read, const kda_tensor& written, bool indexed,
                                 Random& random) {
  const bool one_pool = read.ndim && read.data == written.data;
  const int64_t rows = written.shape[0];
  kda_tensor out = arena.take(index_dtype(random), {s.N}, random);
  for (int64_t n = 0; n < s.N; ++n) {
    const int64_t own = one_pool && !indexed ? n : rows - 1 - n;
    set(out, n, random.chance(0.2) ? -1.0 : static_cast<double>(own));
  }
  if (one_pool && rows > s.N && s.N > 0) set(out, 0, 0);  // with indices, no sequence has it
  return out;
}

// out: if there may be slots to write.
inline void random_states(const Sizes& s, const kda_inputs& in, kda_states& states, Random& random,
                          kda_tensor* out = nullptr) {
  const bool pool = random.chance(0.5);
  const int64_t rows = pool ? s.N + random.below(4) : s.N;
  const int32_t dtype = state_dtype(random);
  if (random.chance(0.7)) states.h0 = filled(dtype, state_shape(s, in, rows), random, 1);
  const bool needed = pool && !states.h0.ndim;
  if (states.h0.ndim && random.chance(0.3)) states.hT = states.h0;
  else if (needed || random.chance(0.7)) states.hT = arena.take(state_dtype(random), state_shape(s, in, rows), random);
  if (pool) {
    states.first_valid_slot = static_cast<int32_t>(random.below(2));
    states.state_indices = arena.take(index_dtype(random), {s.N}, random);
    for (int64_t n = 0; n < s.N; ++n)
      set(states.state_indices, n, random.chance(0.15) ? -1.0 : static_cast<double>(rows - 1 - n));
  }
  if (states.h0.ndim && random.chance(0.5)) {
    states.has_initial_state = arena.take(KDA_BOOL, {s.N}, random);
    for (int64_t n = 0; n < s.N; ++n) set(states.has_initial_state, n, random.chance(0.5) ? 3 : 0);
  }
  if (out && states.hT.ndim && random.chance(0.4)) *out = slots_to_write(s, states.h0, states.hT, pool, random);
  const bool shared = !states.hT.ndim || (out && out->ndim && states.hT.data != states.h0.data);
  if (pool && shared && s.N > 1 && random.chance(0.5)) set(states.state_indices, 0, static_cast<double>(rows - 2));
}

// Of the first sequences, in slots of their own.
template <class Args>
void random_checkpoints(Args& a, const Sizes& s, const std::vector<int64_t>& shape, int32_t dtype, Random& random) {
  a.checkpoints = arena.take(dtype, shape, random);
  a.checkpoint_slots = arena.take(index_dtype(random), {s.N, 1}, random);
  for (int64_t n = 0; n < s.N; ++n) set(a.checkpoint_slots, n, n < 4 ? static_cast<double>(n) : -1);
  a.checkpoint_every = random.chance(0.5) ? 64 : static_cast<int32_t>(16 * (1 + random.below(5)));
  if (random.chance(0.5)) return;
  a.checkpoint_offset = arena.take(index_dtype(random), {s.N}, random);
  for (int64_t n = 0; n < s.N; ++n) set(a.checkpoint_offset, n, static_cast<double>(random.below(200)));
}

inline int64_t h_rows(const Sizes& s, int64_t every) {
  const auto rows = [&](int64_t length) { return (length + 64 * every - 1) / (64 * every); };
  if (!s.packed) return s.B * rows(s.T);
  int64_t sum = 0;
  for (int64_t n = 0; n < s.N; ++n) sum += rows(s.cu[n + 1] - s.cu[n]);
  return std::max(sum, rows(s.T));
}

inline void build(kda_forward_args& a, const Sizes& s, Random& random) {
  a.in = random_inputs(s, random);
  random_states(s, a.in, a.states, random, &a.out_state_indices);
  a.o = arena.take(any_float(random), {s.B, s.T, s.HV, s.V}, random);
  if (random.chance(0.3)) {
    a.h_every = static_cast<int32_t>(random.below(3));
    a.h_v_first = random.chance(0.3);
    a.h = arena.take(state_dtype(random), h_shape(s, a, h_rows(s, std::max(a.h_every, 1))), random);
  }
  if (random.chance(0.2)) a.v_new = arena.take(KDA_F32, {s.B, s.T, s.HV, s.V}, random);
  if (random.chance(0.2)) a.Aqk = arena.take(KDA_F32, {s.B, s.T, s.HV, 64}, random);
  if (random.chance(0.2)) a.Akk = arena.take(KDA_F32, {s.B, s.T, s.HV, 64}, random);
  if (random.chance(0.3)) random_checkpoints(a, s, state_shape(s, a.in, 4), state_dtype(random), random);
}

// Slots that all differ, or padding.
inline kda_tensor slots_of_all(int64_t N, int64_t slots, Random& random) {
  const kda_tensor t = arena.take(index_dtype(random), {N}, random);
  for (int64_t n = 0; n < N; ++n) set(t, n, random.chance(0.15) ? -1.0 : static_cast<double>(slots - 1 - n));
  return t;
}

// The raw rows of the convolution in place of q, k and v.
inline kda_conv_inputs random_front(const Sizes& s, kda_inputs& in, Random& random) {
  const int64_t D = 2 * s.H * s.K + s.HV * s.V, W = 2 + random.below(3), slots = s.N + random.below(3);
  in.q = in.k = in.v = {};
  kda_conv_inputs c{};
  c.x = filled(s.dtype, {s.B, s.T, D}, random, 1);
  c.weight = filled(any_float(random), {D, W}, random, 0.5);
  if (random.chance(0.5)) c.bias = filled(any_float(random), {D}, random, 0.5);
  c.state = filled(any_float(random), {slots, D, W - 1}, random, 1);
  if (random.chance(0.5)) c.indices = slots_of_all(s.N, slots, random);
  return c;
}

inline void build(kda_decode_args& a, const Sizes& s, Random& random) {
  a.in = random_inputs(s, random);
  random_states(s, a.in, a.states, random, &a.out_state_indices);
  a.o = arena.take(any_float(random), {s.B, s.T, s.HV, s.V}, random);
  if (random.chance(0.4)) a.conv = random_front(s, a.in, random);
  const int64_t S = std::max<int64_t>(1, s.T) + random.below(3);
  if (random.chance(0.6) || s.N * S * s.HV * (s.K + 3) * (s.V + 3) > kArena / 64) return;
  const int64_t slots = s.N * S + random.below(3);
  const bool pool = random.chance(0.6);
  std::vector<int64_t> shape = state_shape(s, a.in, pool ? slots : s.N);
  if (!pool) shape.insert(shape.begin() + 1, S);
  a.snapshots = filled(state_dtype(random), shape, random, 1);
  if (pool) {
    a.snapshot_slots = arena.take(index_dtype(random), {s.N, S}, random);
    for (int64_t i = 0; i < s.N * S; ++i)
      set(a.snapshot_slots, i, random.chance(0.15) ? -1.0 : static_cast<double>(slots - 1 - i));
  }
  if (random.chance(0.5)) return;
  a.accepted = arena.take(index_dtype(random), {s.N}, random);
  for (int64_t n = 0; n < s.N; ++n) set(a.accepted, n, static_cast<double>(random.below(S + 3) - 1));
  a.states = {}, a.out_state_indices = {};
  if (pool) a.states.h0 = a.snapshots;
}

inline void build(kda_backward_args& a, const Sizes& s, Random& random) {
  a.in = random_inputs(s, random);
  if (random.chance(0.5)) a.h0 = filled(state_dtype(random), state_shape(s, a.in, s.N), random, 1);
  a.d_o = filled(any_float(random), {s.B, s.T, s.HV, s.V}, random, 1);
  if (random.chance(0.5)) a.dhT = filled(state_dtype(random), state_shape(s, a.in, s.N), random, 1);
  const auto wanted = [&] { return random.chance(0.8); };
  if (wanted()) a.dq = arena.take(any_float(random), {s.B, s.T, s.H, s.K}, random);
  if (wanted()) a.dk = arena.take(any_float(random), {s.B, s.T, s.H, s.K}, random);
  if (wanted()) a.dv = arena.take(any_float(random), {s.B, s.T, s.HV, s.V}, random);
  if (wanted()) a.dg = arena.take(any_float(random), {s.B, s.T, s.HV, s.K}, random);
  if (wanted()) a.dbeta = arena.take(any_float(random), {s.B, s.T, s.HV}, random);
  if (a.in.A_log.ndim && wanted()) a.dA_log = arena.take(KDA_F32, {s.HV}, random);
  if (a.in.dt_bias.ndim && wanted()) a.d_dt_bias = arena.take(KDA_F32, {s.HV, s.K}, random);
  if (wanted()) a.dh0 = arena.take(state_dtype(random), state_shape(s, a.in, s.N), random);
  if (random.chance(0.3)) {  // states as forward leaves them
    a.h_every = 1 + static_cast<int32_t>(random.below(2));
    a.h_v_first = random.chance(0.3);
    a.h = arena.take(KDA_F32, h_shape(s, a, h_rows(s, a.h_every)), random);
    kda_forward_args f = KDA_FORWARD_ARGS_INIT;
    f.exec.impl = "reference";
    f.in = a.in, f.states.h0 = a.h0, f.h = a.h, f.h_every = a.h_every, f.h_v_first = a.h_v_first;
    f.o = arena.take(KDA_F32, {s.B, s.T, s.HV, s.V}, random);
    if (kda_forward(&f) != KDA_OK) fail(std::string("a legal call was refused: ") + kda_last_error());
  }
}

inline void build(kda_segment_map_args& a, const Sizes& s, Random& random) {
  a.in = random_inputs(s, random);
  if (random.chance(0.7)) a.M = arena.take(KDA_F32, {s.N, s.HV, s.K, s.K}, random);
  if (random.chance(0.7)) a.b = arena.take(KDA_F32, state_shape(s, a.in, s.N), random);
  if (random.chance(0.3)) return;
  a.d = arena.take(KDA_F32, state_shape(s, a.in, s.N), random);
  a.d_o = filled(any_float(random), {s.B, s.T, s.HV, s.V}, random, 1);
}
inline void build(kda_segment_merge_args& a, const Sizes& s, Random& random) {
  kda_inputs layout{};
  a.state_layout = layout.state_layout = static_cast<int32_t>(random.below(2));
  a.reverse = static_cast<int32_t>(random.below(2));
  a.M = filled(KDA_F32, {s.N, s.HV, s.K, s.K}, random, 0.5);
  a.b = filled(KDA_F32, state_shape(s, layout, s.N), random, 1);
  a.states = arena.take(KDA_F32, state_shape(s, layout, s.N + 1), random);
  if (random.chance(0.3)) return;
  const std::vector<int64_t> shape = state_shape(s, layout, 1);
  a.h0 = filled(state_dtype(random), {shape.begin() + 1, shape.end()}, random, 1);
}

template <class Args>
inline void build_gate(Args& a, const Sizes& s, Random& random) {
  a.x = filled(any_float(random), {s.B * s.T, s.HV, s.K}, random, 4);
  a.gate_form = s.gate_form == KDA_GATE_LOG ? KDA_GATE_SOFTPLUS : s.gate_form;
  a.lower_bound = -5;
  if (a.gate_form == KDA_GATE_SOFTPLUS || random.chance(0.5)) a.A_log = filled(KDA_F32, {s.HV}, random, 1);
  if (random.chance(0.5)) a.dt_bias = filled(KDA_F32, {s.HV, s.K}, random, 1);
}
inline void build(kda_gate_args& a, const Sizes& s, Random& random) {
  build_gate(a, s, random);
  a.g = arena.take(any_float(random), {s.B * s.T, s.HV, s.K}, random);
}
inline void build(kda_gate_backward_args& a, const Sizes& s, Random& random) {
  build_gate(a, s, random);
  a.dg = filled(any_float(random), {s.B * s.T, s.HV, s.K}, random, 1);
  a.dx = arena.take(any_float(random), {s.B * s.T, s.HV, s.K}, random);
  if (a.A_log.ndim && random.chance(0.8)) a.dA_log = arena.take(KDA_F32, {s.HV}, random);
  if (a.dt_bias.ndim && random.chance(0.8)) a.d_dt_bias = arena.take(KDA_F32, {s.HV, s.K}, random);
}

template <class Args>
inline void build_norm(Args& a, const Sizes& s, Random& random) {
  constexpr int64_t kRows[] = {1, 2, 3, 8, 15, 16, 64, 72, 128, 130, 257, 300};
  constexpr double kEps[] = {1e-5, 1e-6, 1e-2};
  // Sizes of heads are small elsewhere; here a row may be longer than a piece.
  const bool few = std::max<int64_t>(s.B, 1) * std::max<int64_t>(s.T, 1) * s.HV <= 20;
  const int64_t V = few && random.chance(0.5) ? kRows[random.below(std::size(kRows))] : s.V;
  const std::vector<int64_t> shape{s.B, s.T, s.HV, V};
  a.x = filled(any_float(random), shape, random, 1);
  a.activation = static_cast<int32_t>(random.below(3)), a.eps = kEps[random.below(std::size(kEps))];
  if (a.activation != KDA_NORM_NONE) a.gate = filled(any_float(random), shape, random, 4);
  if (random.chance(0.7)) a.weight = filled(any_float(random), {V}, random, 1);
}
inline void build(kda_norm_gate_args& a, const Sizes& s, Random& random) {
  build_norm(a, s, random);
  a.y = arena.take(any_float(random), {a.x.shape, a.x.shape + 4}, random);
}
inline void build(kda_norm_gate_backward_args& a, const Sizes& s, Random& random) {
  build_norm(a, s, random);
  const std::vector<int64_t> shape{a.x.shape, a.x.shape + 4};
  a.dy = filled(any_float(random), shape, random, 1);
  if (random.chance(0.9)) a.dx = arena.take(any_float(random), shape, random);
  if (a.gate.ndim && random.chance(0.8)) a.dgate = arena.take(any_float(random), shape, random);
  if (a.weight.ndim && random.chance(0.8)) a.dweight = arena.take(KDA_F32, {shape[3]}, random);
}

// ---- stages: every tensor by its name ----

inline kda_tensor stage_tensor(const Field& f, const Sizes& s, const kda_inputs& layout, bool f32_inverse,
                               Random& random) {
  const std::string name = f.name;
  const auto any_of = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* n) { return name == n; });
  };
  const bool single = any_of({"G", "dG", "dq", "dk", "dAqk", "dAkk", "dbeta"}) || (name == "Akk_inv" && f32_inverse);
  const int32_t dtype = single ? KDA_F32 : any_float(random);
  const double scale = name == "G" || name == "k" ? 0.3 : 1;
  if (any_of({"h", "dh"})) return filled(state_dtype(random), state_shape(s, layout, h_rows(s, 1)), random, scale);
  if (any_of({"h0", "hT", "dhT", "dh0"}))
    return filled(state_dtype(random), state_shape(s, layout, s.N), random, scale);
  if (any_of({"q", "k"})) return filled(dtype, {s.B, s.T, s.H, s.K}, random, scale);
  if (any_of({"beta", "dbeta"})) return filled(dtype, {s.B, s.T, s.HV}, random, scale);
  if (any_of({"Aqk", "Akk_inv", "dAqk", "dAkk"})) return filled(dtype, {s.B, s.T, s.HV, 64}, random, scale);
  if (any_of({"v", "u", "v_new", "o", "d_o", "dv_local", "dv_new", "dv"}))
    return filled(dtype, {s.B, s.T, s.HV, s.V}, random, scale);
  const kda_tensor t = filled(dtype, {s.B, s.T, s.HV, s.K}, random, scale);
  for (int64_t i = 0; name == "g" && i < tensor_size(t); ++i) set(t, i, -std::abs(get(t, i)));
  return t;
}

template <class Args>
requires requires(Args a) { a.at.cu_seqlens; }
void build(Args& a, const Sizes& s, Random& random) {
  kda_inputs layout{};
  layout.state_layout = a.at.state_layout = static_cast<int32_t>(random.below(2));
  a.at.scale = static_cast<float>(random.uniform(0.1, 2));
  const bool wants_q = random.chance(0.5);
  for (const Field& f : fields(a)) {
    const std::string name = f.name;
    if (name == "cu_seqlens") {
      if (!s.packed) continue;
      *f.t = arena.take(random.chance(0.5) ? KDA_I32 : KDA_I64, {s.N + 1}, random);
      for (int64_t n = 0; n <= s.N; ++n) set(*f.t, n, static_cast<double>(s.cu[n]));
      continue;
    }
    bool optional = name == "h0" || name == "hT" || name == "dhT" || name == "dh0";
    if constexpr (std::is_same_v<Args, kda_stage_delta_h_args>) optional |= name == "h" || name == "v_new";
    if constexpr (std::is_same_v<Args, kda_stage_cumsum_backward_args>) optional |= name == "g";
    if constexpr (requires { a.Akk_inv, a.qG; }) {
      optional |= name == "w" || name == "u" || name == "kg";
      if (!wants_q && name == "qG") continue;
    }
    if constexpr (std::is_same_v<Args, kda_stage_recompute_w_u_args>)
      if (!wants_q && name == "q") continue;
    if (optional && random.chance(0.3)) continue;
    // In chunk_intra w and u follow from Akk_inv as it is stored, and the oracle's is float64.
    *f.t = stage_tensor(f, s, layout, std::is_same_v<Args, kda_stage_chunk_intra_args>, random);
  }
}

inline void build(kda_prefill_f32_args& a, const Sizes& s, Random& random) {
  a.state_layout = static_cast<int32_t>(random.below(2));
  kda_inputs layout{};
  layout.state_layout = a.state_layout;
  a.chunk = static_cast<int32_t>(random.below(3)) * 32;
  a.scale = random.chance(0.5) ? 0 : static_cast<float>(random.uniform(-2, 2));
  a.q = filled(KDA_F32, {s.B, s.H, s.T, s.K}, random, 1);
  a.k = filled(KDA_F32, {s.B, s.H, s.T, s.K}, random, 0.3);
  a.v = filled(KDA_F32, {s.B, s.HV, s.T, s.V}, random, 1);
  a.g = filled(KDA_F32, {s.B, s.HV, s.T, s.K}, random, 1);
  for (int64_t i = 0; i < tensor_size(a.g); ++i) set(a.g, i, -std::abs(get(a.g, i)));
  a.beta = filled(KDA_F32, {s.B, s.HV, s.T}, random, 1);
  a.o = arena.take(KDA_F32, {s.B, s.HV, s.T, s.V}, random);
  const int64_t C = a.chunk ? a.chunk : 64, chunks = (s.T + C - 1) / C;
  if (random.chance(0.5)) a.h0 = filled(KDA_F32, state_shape(s, layout, s.B), random, 1);
  if (random.chance(0.5)) a.hT = arena.take(KDA_F32, state_shape(s, layout, s.B), random);
  if (random.chance(0.5)) a.w = arena.take(KDA_F32, {s.B, s.HV, chunks, C, s.K}, random);
  if (random.chance(0.5)) a.u = arena.take(KDA_F32, {s.B, s.HV, chunks, C, s.V}, random);
}

template <class Args>
inline int64_t build_conv(Args& a, const Sizes& s, Random& random) {
  const int64_t W = 2 + random.below(3), parts = random.chance(0.6) ? 1 : 2 + random.below(2);
  int64_t D = 0, left = parts;
  for (kda_tensor* x : {&a.x, &a.x1, &a.x2}) {
    if (left-- <= 0) break;
    const int64_t own = 1 + random.below(40 / parts);
    *x = filled(s.dtype, {s.B, s.T, own}, random, 2), D += own;
  }
  a.weight = filled(any_float(random), {D, W}, random, 1);
  if (random.chance(0.5)) a.bias = filled(any_float(random), {D}, random, 1);
  if (s.packed) {
    a.cu_seqlens = arena.take(random.chance(0.5) ? KDA_I32 : KDA_I64, {s.N + 1}, random);
    for (int64_t n = 0; n <= s.N; ++n) set(a.cu_seqlens, n, static_cast<double>(s.cu[n]));
  }
  a.silu = random.chance(0.7);
  return D;
}
inline void build(kda_conv_args& a, const Sizes& s, Random& random) {
  const int64_t D = build_conv(a, s, random), keep = a.weight.shape[1] - 1;
  const bool pool = random.chance(0.5);
  const int64_t rows = pool ? s.N + random.below(4) : s.N;
  if (random.chance(0.7)) a.initial_state = filled(any_float(random), {rows, D, keep}, random, 1);
  if (a.initial_state.ndim && random.chance(0.4)) a.final_state = a.initial_state;
  else if (pool || random.chance(0.7)) a.final_state = arena.take(any_float(random), {rows, D, keep}, random);
  if (pool) {
    a.first_valid_slot = static_cast<int32_t>(random.below(2));
    a.state_indices = arena.take(index_dtype(random), {s.N}, random);
    for (int64_t n = 0; n < s.N; ++n)
      set(a.state_indices, n, random.chance(0.15) ? -1.0 : static_cast<double>(rows - 1 - n));
  }
  if (a.initial_state.ndim && random.chance(0.5)) {
    a.has_initial_state = arena.take(KDA_BOOL, {s.N}, random);
    for (int64_t n = 0; n < s.N; ++n) set(a.has_initial_state, n, random.chance(0.5) ? 3 : 0);
  }
  if (a.final_state.ndim && random.chance(0.4))
    a.out_state_indices = slots_to_write(s, a.initial_state, a.final_state, pool, random);
  if (random.chance(0.3)) random_checkpoints(a, s, {4, D, keep}, any_float(random), random);
  a.y = arena.take(s.dtype, {s.B, s.T, D}, random);
}
inline void build(kda_conv_backward_args& a, const Sizes& s, Random& random) {
  const int64_t D = build_conv(a, s, random), keep = a.weight.shape[1] - 1;
  const auto wanted = [&] { return random.chance(0.8); };
  if (wanted()) a.initial_state = filled(any_float(random), {s.N, D, keep}, random, 1);
  a.dy = filled(s.dtype, {s.B, s.T, D}, random, 1);
  if (wanted()) a.d_final_state = filled(any_float(random), {s.N, D, keep}, random, 1);
  if (wanted()) a.dx = arena.take(s.dtype, {s.B, s.T, D}, random);
  if (wanted()) a.dweight = arena.take(KDA_F32, {D, keep + 1}, random);
  if (a.bias.ndim && wanted()) a.dbias = arena.take(KDA_F32, {D}, random);
  if (wanted()) a.d_initial_state = arena.take(any_float(random), {s.N, D, keep}, random);
}

}  // namespace kda::test
