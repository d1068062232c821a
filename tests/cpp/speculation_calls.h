// Cases of speculative decoding, their tensors, and the args structs that point at them.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "calls.h"

namespace kda::test {

struct SpeculationCase {
  Case c;               // T or lengths: the drafts of each request
  int64_t R = 0;        // entries of a slot; 0: as many as there are drafts
  bool indices = true;  // records.indices; if not, row n belongs to request n
  bool ring = false;    // committed entries before the drafts, somewhere around the slot's end
  bool tree = false;
  std::vector<int64_t> padded = {};      // requests without a state
  std::vector<int64_t> recordless = {};  // requests without records
  int32_t first_valid_slot = 0;
};
inline void PrintTo(const SpeculationCase& s, std::ostream* out) { *out << s.c.name; }

inline std::vector<SpeculationCase> speculation_cases() {
  std::vector<SpeculationCase> all;
  const auto add = [&](const SpeculationCase& s) { all.push_back(s); };

  for (const int64_t T : {1, 2, 3, 4, 5, 7, 8, 15, 16})
    add({.c = {.name = "drafts_" + std::to_string(T), .B = 2, .T = T, .HV = 2, .K = 24, .V = 20}});
  add({.c = {.name = "packed", .H = 2, .HV = 2, .K = 16, .V = 24, .lengths = {1, 4, 0, 16, 2, 7}}, .R = 17});
  add({.c = {.name = "packed_tail_i64",
             .K = 32,
             .V = 16,
             .lengths = {0, 5, 0, 3, 0},
             .tail = 9,
             .cu_dtype = KDA_I64,
             .dtype = KDA_BF16,
             .layout = Layout::kPadded},
       .padded = {3},
       .recordless = {1}});
  add({.c = {.name = "rows", .B = 3, .T = 5, .HV = 2}, .R = 9, .indices = false});

  // Padding.
  add({.c = {.name = "padded_0", .B = 5, .T = 4, .HV = 2}, .padded = {0, 3}, .recordless = {1, 3}});
  add({.c = {.name = "padded_1", .B = 5, .T = 4, .HV = 2}, .padded = {1, 4}, .first_valid_slot = 1});
  add({.c = {.name = "padded_all", .B = 2, .T = 4}, .padded = {0, 1}});
  add({.c = {.name = "recordless", .B = 3, .T = 4, .HV = 2}, .recordless = {0, 1, 2}});

  // Trees and rings.
  add({.c = {.name = "tree", .B = 3, .T = 8, .HV = 2}, .tree = true});
  add({.c = {.name = "tree_16", .B = 3, .T = 16, .K = 64, .V = 64}, .R = 19, .tree = true});
  add({.c = {.name = "tree_packed", .HV = 2, .lengths = {8, 1, 0, 13}}, .tree = true});
  add({.c = {.name = "ring", .B = 4, .T = 4, .HV = 2}, .R = 11, .ring = true});
  add({.c = {.name = "ring_tree", .B = 4, .T = 6}, .R = 20, .ring = true, .tree = true});
  add({.c = {.name = "ring_tight", .B = 4, .T = 8}, .R = 16, .ring = true});
  add({.c = {.name = "ring_long", .B = 3, .T = 5, .K = 64, .V = 64}, .R = 60, .ring = true, .padded = {1}});
  add({.c = {.name = "ring_packed",
             .HV = 2,
             .K = 48,
             .V = 80,
             .lengths = {4, 0, 1, 3},
             .state_layout = KDA_STATE_K_FIRST},
       .R = 9,
       .ring = true,
       .recordless = {3}});

  // Head sizes: odd, tiny, the production size, the largest.
  add({.c = {.name = "K60_V100", .B = 2, .T = 5, .K = 60, .V = 100}});
  add({.c = {.name = "K100_V60", .B = 2, .T = 5, .K = 100, .V = 60, .state_layout = KDA_STATE_K_FIRST}});
  add({.c = {.name = "K1_V1", .B = 2, .T = 6, .K = 1, .V = 1}});
  add({.c = {.name = "K5_V200", .B = 2, .T = 6, .K = 5, .V = 200}});
  add({.c = {.name = "K16_V16", .B = 2, .T = 6, .K = 16, .V = 16}});
  add({.c = {.name = "K128_V128",
             .B = 2,
             .T = 8,
             .K = 128,
             .V = 128,
             .dtype = KDA_BF16,
             .g_dtype = KDA_BF16,
             .beta_dtype = KDA_BF16,
             .qk_l2norm = true}});
  add({.c = {.name = "K128_V128_K_first",
             .B = 2,
             .T = 8,
             .K = 128,
             .V = 128,
             .state_layout = KDA_STATE_K_FIRST,
             .qk_l2norm = true}});
  add({.c = {.name = "K256_V256", .T = 16, .K = 256, .V = 256}});
  add({.c = {.name = "K256_V256_K_first", .T = 16, .K = 256, .V = 256, .state_layout = KDA_STATE_K_FIRST}});

  // Value heads that share a query/key head.
  add({.c = {.name = "gva_2", .B = 2, .T = 4, .H = 2, .HV = 4, .qk_l2norm = true}});
  add({.c = {.name = "gva_4_bf16",
             .B = 2,
             .T = 6,
             .H = 1,
             .HV = 4,
             .dtype = KDA_BF16,
             .layout = Layout::kPadded,
             .qk_l2norm = true},
       .tree = true});
  add({.c = {.name = "gva_8", .H = 1, .HV = 8, .K = 16, .V = 16, .lengths = {3, 4}}, .R = 8, .ring = true});

  // Decays.
  add({.c = {.name = "gates_slow", .B = 2, .T = 16, .gate_divisor = 10}});
  add({.c = {.name = "gates_fast", .B = 2, .T = 16, .gate_divisor = 0.1}});
  add({.c = {.name = "gates_zero", .B = 2, .T = 16, .gates = Gates::kZero}});
  add({.c = {.name = "gates_floor", .B = 2, .T = 16, .gates = Gates::kFloor, .lower_bound = -5}});
  add({.c = {.name = "gates_wild", .B = 4, .T = 16, .gates = Gates::kWild}, .tree = true});
  add({.c = {.name = "gates_wild_bf16", .B = 4, .T = 8, .dtype = KDA_BF16, .g_dtype = KDA_BF16, .gates = Gates::kWild},
       .R = 20,
       .ring = true});
  const Case softplus{.name = "softplus",
                      .B = 2,
                      .T = 8,
                      .HV = 2,
                      .layout = Layout::kPadded,
                      .gate_form = KDA_GATE_SOFTPLUS,
                      .gates = Gates::kRaw,
                      .A_log = true,
                      .dt_bias = true,
                      .beta_form = KDA_BETA_SIGMOID,
                      .qk_l2norm = true};
  add({.c = softplus});
  Case lower_bound = softplus;
  lower_bound.name = "lower_bound", lower_bound.gate_form = KDA_GATE_LOWER_BOUND, lower_bound.lower_bound = -5;
  lower_bound.beta_form = KDA_BETA_2SIGMOID, lower_bound.state_layout = KDA_STATE_K_FIRST;
  add({.c = lower_bound, .R = 16, .ring = true});
  lower_bound.name = "lower_bound_no_A_log", lower_bound.A_log = lower_bound.dt_bias = false;
  add({.c = lower_bound, .tree = true});

  // beta, keys, scale, dtypes, states.
  add({.c = {.name = "beta_zero", .B = 2, .T = 6, .betas = Betas::kZero}});
  add({.c = {.name = "identical_keys",
             .B = 2,
             .T = 16,
             .gates = Gates::kZero,
             .keys = Keys::kIdentical,
             .betas = Betas::kNearTwo}});
  add({.c = {.name = "zero_rows", .B = 2, .T = 6, .keys = Keys::kSomeZero, .qk_l2norm = true}});
  add({.c = {.name = "scale", .B = 2, .T = 6, .layout = Layout::kHeadsFirst, .qk_l2norm = true, .scale = -3}});
  add({.c = {.name = "f16",
             .B = 2,
             .T = 6,
             .HV = 2,
             .dtype = KDA_F16,
             .g_dtype = KDA_F16,
             .beta_dtype = KDA_F16,
             .qk_l2norm = true}});
  // What decode and drafts have a fast path for.
  Case usual{.name = "usual_packed",
             .H = 1,
             .HV = 2,
             .K = 128,
             .V = 128,
             .lengths = {3, 1, 5},
             .dtype = KDA_BF16,
             .g_dtype = KDA_BF16,
             .beta_dtype = KDA_BF16,
             .gate_form = KDA_GATE_SOFTPLUS,
             .gates = Gates::kRaw,
             .A_log = true,
             .dt_bias = true,
             .beta_form = KDA_BETA_SIGMOID,
             .qk_l2norm = true};
  add({.c = usual});
  usual.name = "usual_states_bf16", usual.lengths = {}, usual.B = 3, usual.T = 4, usual.state_dtype = KDA_BF16;
  add({.c = usual});
  add({.c = {.name = "mixed", .B = 2, .T = 6, .dtype = KDA_F16, .g_dtype = KDA_BF16, .layout = Layout::kHeadsFirst}});
  add({.c = {.name = "state_bf16", .B = 2, .T = 6, .HV = 2, .dtype = KDA_BF16, .state_dtype = KDA_BF16}});
  add({.c = {.name = "state_bf16_K_first",
             .B = 2,
             .T = 6,
             .HV = 2,
             .V = 80,
             .state_dtype = KDA_BF16,
             .layout = Layout::kPadded,
             .state_layout = KDA_STATE_K_FIRST},
       .R = 14,
       .ring = true});
  add({.c = {.name = "state_none", .B = 2, .T = 6, .HV = 2, .h0 = false}});
  add({.c = {.name = "state_K_first",
             .B = 2,
             .T = 6,
             .HV = 2,
             .V = 40,
             .layout = Layout::kPadded,
             .state_layout = KDA_STATE_K_FIRST}});
  return all;
}

inline const SpeculationCase& find_speculation_case(const std::string& name) {
  static const std::vector<SpeculationCase> all = speculation_cases();
  for (const SpeculationCase& s : all)
    if (s.c.name == name) return s;
  ADD_FAILURE() << "no case is called " << name;
  return all.front();
}

// Drafts of a round, the pool they start from, and what the host tells about them.
struct Drafts {
  SpeculationCase s;
  Inputs in;
  Pool pool;
  Tensor parents;     // [N,T], absent for chains
  Tensor accept_len;  // [N]: as many drafts as there are, then fewer, then none, ..

  explicit Drafts(const SpeculationCase& s, uint64_t seed = 0) : Drafts(s, Inputs(s.c, seed), seed) {}
  Drafts(const SpeculationCase& s, Inputs inputs, uint64_t seed)
      : s(s), in(std::move(inputs)), pool(in, s.c.state_dtype), accept_len(KDA_I32, {in.N}, Layout::kPadded) {
    Random random(seed + 17);
    for (const int64_t n : s.padded) pool.state_indices.set(n, s.first_valid_slot ? 0 : -1 - n);
    accept(1);
    if (!s.tree) return;
    parents = Tensor(KDA_I32, {in.N, longest()}, Layout::kPadded);
    for (int64_t n = 0; n < in.N; ++n)
      for (int64_t t = 0; t < longest(); ++t)
        parents.set(n * longest() + t, static_cast<double>(random.below(t + 1) - 1));
  }
  int64_t longest() const {
    int64_t most = in.cu_seqlens ? 0 : in.T;
    for (int64_t n = 0; n < in.N; ++n) most = std::max(most, in.length(n));
    return most;
  }
  int64_t entries() const { return s.R ? s.R : std::max<int64_t>(1, longest()); }
  // Request n accepts all its drafts but (n + shift) % (drafts + 1).
  void accept(int64_t shift) {
    for (int64_t n = 0; n < in.N; ++n)
      accept_len.set(n, static_cast<double>(in.length(n) - (n + shift) % (in.length(n) + 1)));
  }
  int64_t accepted(int64_t n) const { return static_cast<int64_t>(accept_len.get(n)); }
  bool live(int64_t n) const { return std::find(s.padded.begin(), s.padded.end(), n) == s.padded.end(); }
  bool recorded(int64_t n) const {
    return std::find(s.recordless.begin(), s.recordless.end(), n) == s.recordless.end();
  }
  int64_t parent(int64_t n, int64_t t) const {
    return parents ? static_cast<int64_t>(parents.get(n * parents.shape()[1] + t)) : t - 1;
  }
  // Draft t of request n and the drafts before it, the first one first.
  std::vector<int64_t> path(int64_t n, int64_t t) const {
    std::vector<int64_t> tokens;
    for (; t >= 0; t = parent(n, t)) tokens.insert(tokens.begin(), t);
    return tokens;
  }
  Tensor output(int32_t dtype) const { return Tensor(dtype, {in.B, in.T, s.c.HV, s.c.V}, s.c.layout); }
  Tensor output() const { return output(s.c.dtype); }
};

// Records in slots of another order, two slots more than requests. Only what a ring has committed is recorded so far
// (room for two rounds is left), and it is the same in every dtype.
struct Records {
  Tensor u, k, alpha, indices, ring_first, ring_count;
  std::vector<int64_t> slots;  // of each request

  explicit Records(const Drafts& d, int32_t dtype = KDA_F32) {
    const Case& c = d.s.c;
    const int64_t N = d.in.N, spare = d.s.indices ? 2 : 0, R = d.entries();
    u = Tensor(dtype, {N + spare, R, c.HV, c.V}, c.layout);
    k = Tensor(dtype, {N + spare, R, c.H, c.K}, c.layout);
    alpha = Tensor(dtype, {N + spare, R, c.HV, c.K}, c.layout);
    for (int64_t n = 0; n < N; ++n) slots.push_back(d.s.indices ? (n + 1) % N + 1 : n);
    if (d.s.indices) indices = Tensor(KDA_I32, {N}, Layout::kPadded);
    for (int64_t n = 0; d.s.indices && n < N; ++n)
      indices.set(n, d.recorded(n) ? static_cast<double>(slots[n]) : -1 - n);
    if (!d.s.ring) return;
    ring_first = Tensor(KDA_I32, {N + spare}), ring_count = Tensor(KDA_I32, {N + spare});
    Random random(R);
    for (int64_t slot = 0; slot < N + spare; ++slot) {
      const int64_t first = random.below(R), count = random.below(R - 2 * d.longest() + 1);
      ring_first.set(slot, static_cast<double>(first)), ring_count.set(slot, static_cast<double>(count));
      for (int64_t i = 0; i < count; ++i) fill(slot, (first + i) % R, random);
    }
  }
  int64_t R() const { return u.shape()[1]; }
  int64_t first(int64_t n) const { return ring_first ? static_cast<int64_t>(ring_first.get(slots[n])) : 0; }
  int64_t count(int64_t n) const { return ring_count ? static_cast<int64_t>(ring_count.get(slots[n])) : 0; }
  // Plausible numbers, the same in f32 and f64: a correction, a key of length 1, a decay.
  void fill(int64_t slot, int64_t entry, Random& random) {
    const auto row = [&](Tensor& t) { return t.size() / (t.shape()[0] * R()); };
    const int64_t at = slot * R() + entry;
    const double unit = 1 / std::sqrt(static_cast<double>(k.shape()[3]));
    for (int64_t i = 0; i < row(u); ++i) u.set(at * row(u) + i, static_cast<float>(random.uniform(-1, 1)));
    for (int64_t i = 0; i < row(k); ++i) k.set(at * row(k) + i, static_cast<float>(random.chance(0.5) ? unit : -unit));
    for (int64_t i = 0; i < row(alpha); ++i) alpha.set(at * row(alpha) + i, static_cast<float>(random.uniform(0.3, 1)));
  }
  Records clone() const {
    Records r;
    r.u = u.clone(), r.k = k.clone(), r.alpha = alpha.clone(), r.indices = indices.clone();
    r.ring_first = ring_first.clone(), r.ring_count = ring_count.clone(), r.slots = slots;
    return r;
  }
  kda_records view() const {
    kda_records r{};
    r.u = u, r.k = k, r.alpha = alpha, r.indices = indices, r.ring_first = ring_first, r.ring_count = ring_count;
    return r;
  }
  std::vector<Named> tensors() { return {{"u", &u}, {"k", &k}, {"alpha", &alpha}}; }
  std::vector<Named> all() {
    return {{"u", &u},
            {"k", &k},
            {"alpha", &alpha},
            {"indices", &indices},
            {"ring_first", &ring_first},
            {"ring_count", &ring_count}};
  }
  Bits bits() const {
    std::string all;
    for (const Tensor* t : {&u, &k, &alpha, &ring_first, &ring_count}) all += t->bits().bytes;
    return {all};
  }

 private:
  Records() = default;
};

inline kda_verify_args verify_args(const Drafts& d, const Tensor& pool, const Records* records, const Tensor& o) {
  kda_verify_args a = KDA_VERIFY_ARGS_INIT;
  a.in = d.in.view();
  a.states.h0 = pool, a.states.state_indices = d.pool.state_indices;
  a.states.has_initial_state = d.pool.has_initial_state;
  a.states.first_valid_slot = d.s.first_valid_slot;
  a.o = o, a.parents = d.parents;
  if (records) a.records = records->view();
  return a;
}
inline kda_verify_args verify_args(const Drafts& d, const Records& records, const Tensor& o) {
  return verify_args(d, d.pool.h, &records, o);
}

inline kda_flush_args flush_args(const Drafts& d, const Tensor& pool, const Records& records) {
  kda_flush_args a = KDA_FLUSH_ARGS_INIT;
  a.state = pool, a.state_indices = d.pool.state_indices;
  a.records = records.view();
  a.accept_len = d.accept_len, a.parents = d.parents;
  a.state_layout = d.s.c.state_layout, a.first_valid_slot = d.s.first_valid_slot;
  return a;
}

// `last`: the records of the round before, whose drafts were `before`; not read with a ring.
inline kda_flush_verify_args flush_verify_args(const Drafts& before, const Drafts& d, const Tensor& pool,
                                               const Records& last, const Records& records, const Tensor& o) {
  kda_flush_verify_args a = KDA_FLUSH_VERIFY_ARGS_INIT;
  a.in = d.in.view();
  a.states.h0 = a.states.hT = pool;
  a.states.state_indices = d.pool.state_indices, a.states.first_valid_slot = d.s.first_valid_slot;
  a.o = o, a.accept_len = before.accept_len, a.records = records.view();
  if (d.s.ring) {
    a.max_tokens = static_cast<int32_t>(d.longest());
  } else {
    a.last = last.view(), a.last_parents = before.parents, a.parents = d.parents;
  }
  return a;
}

// ---- numbers that are not checked ----

constexpr double kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();

inline double anything(Random& random) {
  constexpr double kValues[] = {0, 1, 2, 3, -1, -2, 4, 5, 8, 9, 22, 23, 24, 1000, -1000, kLeast, kMost};
  return random.chance(0.5) ? kValues[random.below(std::size(kValues))]
                            : static_cast<double>(static_cast<int32_t>(random.bits()));
}

// Every entry holds plausible numbers.
inline Records filled(const Drafts& d) {
  Records r(d);
  Random random(9);
  for (int64_t slot = 0; slot < r.u.shape()[0]; ++slot)
    for (int64_t e = 0; e < r.R(); ++e) r.fill(slot, e, random);
  return r;
}

}  // namespace kda::test
