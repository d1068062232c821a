// Legal random calls of speculative decoding, for fuzz.cc to break. Numbers that live on the device are garbage now
// and then, which is legal.
#pragma once
#include "fuzz_calls.h"

namespace kda::test {

inline Sizes draft_sizes(Sizes s, Random& random) {
  while (s.T > 16) s = random_sizes(random);
  return s;
}

inline kda_tensor integers(const std::vector<int64_t>& shape, int64_t first, int64_t last, Random& random) {
  constexpr int64_t kGarbage[] = {-2147483648, -7, 1000, 2147483647};
  const kda_tensor t = arena.take(KDA_I32, shape, random);
  for (int64_t i = 0; i < tensor_size(t); ++i) {
    const int64_t x = random.chance(0.05) ? kGarbage[random.below(4)] : first + random.below(last - first + 1);
    set(t, i, static_cast<double>(x));
  }
  return t;
}

inline kda_records random_records(const Sizes& s, int64_t R, bool ring, int64_t layers, Random& random) {
  kda_records r{};
  const bool indices = random.chance(0.6);
  const int64_t slots = s.N + random.below(2);
  const auto take = [&](int64_t heads, int64_t size) {
    std::vector<int64_t> shape{slots, R, heads, size};
    if (layers >= 0) shape.insert(shape.begin(), layers);
    return filled(KDA_F32, shape, random, 0.5);
  };
  r.u = take(s.HV, s.V), r.k = take(s.H, s.K), r.alpha = take(s.HV, s.K);
  for (int64_t i = 0; i < tensor_size(r.alpha); ++i) set(r.alpha, i, std::abs(get(r.alpha, i)));
  if (indices) r.indices = slots_of_all(s.N, slots, random);
  if (ring) r.ring_first = integers({slots}, 0, R - 1, random), r.ring_count = integers({slots}, 0, R, random);
  return r;
}

inline kda_tensor random_parents(const Sizes& s, int64_t T, Random& random) {
  return random.chance(0.4) ? integers({s.N, T + random.below(3)}, -1, 15, random) : kda_tensor{};
}

// The pool of a call that needs one.
inline void random_pool(const Sizes& s, const kda_inputs& in, kda_states& states, Random& random) {
  const bool pool = random.chance(0.6);
  const int64_t rows = s.N + (pool ? random.below(3) : 0);
  states.h0 = filled(state_dtype(random), state_shape(s, in, rows), random, 1);
  if (!pool) return;
  states.first_valid_slot = static_cast<int32_t>(random.below(2));
  states.state_indices = slots_of_all(s.N, rows, random);
}

inline void build(kda_verify_args& a, const Sizes& any, Random& random) {
  const Sizes s = draft_sizes(any, random);
  a.in = random_inputs(s, random);
  random_pool(s, a.in, a.states, random);
  if (random.chance(0.3)) {
    a.states.has_initial_state = arena.take(KDA_BOOL, {s.N}, random);
    for (int64_t n = 0; n < s.N; ++n) set(a.states.has_initial_state, n, random.chance(0.5) ? 3 : 0);
  }
  a.o = arena.take(any_float(random), {s.B, s.T, s.HV, s.V}, random);
  if (random.chance(0.8))
    a.records = random_records(s, std::max<int64_t>(1, s.T) + random.below(6), random.chance(0.5), -1, random);
  a.parents = random_parents(s, s.T, random);
  if (random.chance(0.4)) a.conv = random_front(s, a.in, random);
}

inline void build(kda_flush_args& a, const Sizes& any, Random& random) {
  const Sizes s = draft_sizes(any, random);
  const int64_t layers = random.chance(0.3) ? random.below(3) : -1, slots = s.N + random.below(2);
  kda_inputs layout{};
  a.state_layout = layout.state_layout = static_cast<int32_t>(random.below(2));
  std::vector<int64_t> shape = state_shape(s, layout, slots);
  if (layers >= 0) shape.insert(shape.begin(), layers);
  a.state = filled(state_dtype(random), shape, random, 1);
  if (random.chance(0.6)) a.state_indices = slots_of_all(s.N, slots, random);
  a.first_valid_slot = static_cast<int32_t>(random.below(2));
  const int64_t R = 1 + random.below(12);
  a.records = random_records(s, R, random.chance(0.4), layers, random);
  a.accept_len = integers({s.N}, 0, R, random);
  a.parents = random_parents(s, random.below(R + 2), random);
  if (random.chance(0.5)) return;
  const int64_t D = 1 + random.below(40), conv_slots = s.N + random.below(2);
  const auto take = [&](std::vector<int64_t> sizes) {
    if (layers >= 0) sizes.insert(sizes.begin(), layers);
    return filled(any_float(random), sizes, random, 1);
  };
  a.conv_x = take({s.N, random.below(R + 3), D}), a.conv_state = take({conv_slots, D, 1 + random.below(3)});
  if (random.chance(0.5)) a.conv_indices = slots_of_all(s.N, conv_slots, random);
}

inline void build(kda_flush_verify_args& a, const Sizes& any, Random& random) {
  const Sizes s = draft_sizes(any, random);
  a.in = random_inputs(s, random);
  random_pool(s, a.in, a.states, random);
  a.states.hT = a.states.h0;
  a.o = arena.take(any_float(random), {s.B, s.T, s.HV, s.V}, random);
  a.accept_len = integers({s.N}, 0, 16, random);
  if (random.chance(0.4)) {
    a.conv = random_front(s, a.in, random);
    a.last_conv_x = filled(s.dtype, {s.N, random.below(8), a.conv.x.shape[2]}, random, 1);
  }
  const int64_t most = std::max<int64_t>(1, s.T);
  if (random.chance(0.5)) {
    if (s.packed || random.chance(0.3)) a.max_tokens = static_cast<int32_t>(most);
    a.records = random_records(s, 2 * most + random.below(6), true, -1, random);
    return;
  }
  a.records = random_records(s, most + random.below(3), false, -1, random);
  a.last = random_records(s, 1 + random.below(10), false, -1, random);
  a.last_parents = random_parents(s, random.below(8), random);
  a.parents = random_parents(s, s.T, random);
}

// A norm behind the call, with an eps at which what rounding leaves of a small output stays small.
inline kda_norm_inputs random_norm(const kda_tensor& o, Random& random) {
  kda_norm_inputs n{};
  n.apply = 1, n.activation = static_cast<int32_t>(random.below(3)), n.eps = 1;
  if (n.activation != KDA_NORM_NONE) n.gate = filled(any_float(random), {o.shape, o.shape + 4}, random, 4);
  if (random.chance(0.7)) n.weight = filled(any_float(random), {o.shape[3]}, random, 1);
  return n;
}

inline void break_options(kda_flush_args& a, Random& random) {
  (random.chance(0.5) ? a.state_layout : a.first_valid_slot) = static_cast<int32_t>(random.below(4)) - 1;
}

}  // namespace kda::test
