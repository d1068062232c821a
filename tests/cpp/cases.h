// The named cases that every test of numbers and of promises draws from: sizes, data, gates, dtypes, layouts.
#pragma once
#include <string>
#include <vector>

#include "kda/kda.h"
#include "support.h"

namespace kda::test {

// What g holds (math.md 8). With KDA_GATE_LOG it is the decay itself, otherwise a raw input.
enum class Gates {
  kLogSigmoid,  // logsigmoid(randn) / gate_divisor
  kHalfZero,    // the same, half of it 0
  kRaw,         // randn, for the gate forms with an activation
  kFloor,       // `lower_bound` everywhere: the worst exponents of a bounded gate
  kWild,        // 0, -1e-4, -0.1, -5, -100, -3000 and -inf side by side
  kZero,        // no decay
  kEdges,       // raw inputs of any size, A_log and dt_bias as well: rates beyond f32, inputs that cancel the bias
};

enum class Keys {
  kNormal,     // randn
  kPositive,   // uniform in (0, 1): scores all of one sign
  kIdentical,  // one key for all tokens: powers of the chunk's triangle do not shrink
  kSomeZero,   // every third row of q and k is 0
  kAnyLength,  // rows of q and k from 1e-21 to 3e37, to be normalised
};

enum class Betas { kRandom, kZero, kNearOne, kNearTwo };  // kRandom: randn, through a sigmoid unless beta_form does it

struct Case {
  std::string name;
  int64_t B = 1, T = 64, H = 1, HV = 1, K = 32, V = 32;
  std::vector<int64_t> lengths =
      {};  // packed sequences in one row, then `tail` tokens of no sequence; both absent: B rows of T
  int64_t tail = 0;
  int32_t cu_dtype = KDA_I32;

  int32_t dtype = KDA_F32;  // q, k, v, d_o and all outputs that follow them
  int32_t g_dtype = KDA_F32, beta_dtype = KDA_F32, state_dtype = KDA_F32;
  Layout layout = Layout::kDense;
  int32_t state_layout = KDA_STATE_V_FIRST;

  int32_t gate_form = KDA_GATE_LOG;
  Gates gates = Gates::kLogSigmoid;
  double gate_divisor = 1;
  float lower_bound = 0;
  bool A_log = false, dt_bias = false;
  Keys keys = Keys::kNormal;
  Betas betas = Betas::kRandom;
  int32_t beta_form = KDA_BETA_ACTIVATED;
  bool qk_l2norm = false;  // if not, the keys of the data already have length 1
  float scale = 0;
  bool h0 = true, dhT = true;
};

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

inline std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const Case& c) { all.push_back(c); };

  // Lengths around the blocks of 16 and the chunk of 64, one row and packed.
  for (const int64_t T : {1, 2, 15, 16, 17, 63, 64, 65})
    add({.name = "tokens_" + std::to_string(T), .T = T, .H = 1, .HV = 2, .K = 24, .V = 20});
  add({.name = "tokens_200", .T = 200, .K = 64, .V = 64, .layout = Layout::kPadded});
  add({.name = "packed", .H = 2, .HV = 2, .K = 16, .V = 24, .lengths = {1, 64, 0, 2, 15, 65, 16, 17, 63}});
  add({.name = "packed_tail_i64",
       .K = 16,
       .V = 16,
       .lengths = {0, 70, 0, 0, 129, 1, 0},
       .tail = 9,
       .cu_dtype = KDA_I64,
       .dtype = KDA_BF16,
       .layout = Layout::kPadded});
  add({.name = "batch_3", .B = 3, .T = 70, .H = 2, .HV = 2, .layout = Layout::kHeadsFirst});

  // Head sizes: odd, tiny, the production size, the largest.
  add({.name = "K60_V100", .T = 80, .K = 60, .V = 100});
  add({.name = "K100_V60", .T = 80, .K = 100, .V = 60, .state_layout = KDA_STATE_K_FIRST});
  add({.name = "K1_V1", .T = 70, .K = 1, .V = 1});
  add({.name = "K5_V200", .T = 66, .K = 5, .V = 200});
  add({.name = "K128_V128",
       .T = 100,
       .K = 128,
       .V = 128,
       .dtype = KDA_BF16,
       .g_dtype = KDA_BF16,
       .beta_dtype = KDA_BF16,
       .qk_l2norm = true});
  add({.name = "K256_V256", .T = 66, .K = 256, .V = 256});

  // Value heads that share a query/key head.
  add({.name = "gva_2", .B = 2, .T = 40, .H = 2, .HV = 4, .qk_l2norm = true});
  add({.name = "gva_4_bf16",
       .T = 70,
       .H = 1,
       .HV = 4,
       .dtype = KDA_BF16,
       .layout = Layout::kPadded,
       .qk_l2norm = true});
  add({.name = "gva_8", .H = 1, .HV = 8, .K = 16, .V = 16, .lengths = {30, 40}});

  // Decays.
  add({.name = "gates_slow", .T = 130, .gate_divisor = 10});
  add({.name = "gates_fast", .T = 130, .gate_divisor = 0.1});
  add({.name = "gates_half_zero", .T = 130, .gates = Gates::kHalfZero});
  add({.name = "gates_zero", .T = 130, .gates = Gates::kZero});
  add({.name = "gates_floor", .T = 130, .gates = Gates::kFloor, .lower_bound = -5});
  add({.name = "gates_wild", .T = 130, .gates = Gates::kWild});
  add({.name = "gates_wild_bf16", .T = 130, .dtype = KDA_BF16, .g_dtype = KDA_BF16, .gates = Gates::kWild});
  add({.name = "softplus", .T = 100, .HV = 2, .gate_form = KDA_GATE_SOFTPLUS, .gates = Gates::kRaw, .A_log = true});
  add({.name = "softplus_bias",
       .T = 100,
       .HV = 2,
       .layout = Layout::kPadded,
       .gate_form = KDA_GATE_SOFTPLUS,
       .gates = Gates::kRaw,
       .A_log = true,
       .dt_bias = true,
       .qk_l2norm = true});
  add({.name = "softplus_bf16",
       .T = 100,
       .HV = 2,
       .dtype = KDA_BF16,
       .g_dtype = KDA_BF16,
       .beta_dtype = KDA_BF16,
       .gate_form = KDA_GATE_SOFTPLUS,
       .gates = Gates::kRaw,
       .A_log = true,
       .dt_bias = true,
       .beta_form = KDA_BETA_SIGMOID,
       .qk_l2norm = true});
  add({.name = "lower_bound",
       .T = 100,
       .HV = 2,
       .gate_form = KDA_GATE_LOWER_BOUND,
       .gates = Gates::kRaw,
       .lower_bound = -5,
       .A_log = true,
       .dt_bias = true});
  add({.name = "lower_bound_no_A_log",
       .T = 100,
       .gate_form = KDA_GATE_LOWER_BOUND,
       .gates = Gates::kRaw,
       .lower_bound = -1.5,
       .beta_form = KDA_BETA_2SIGMOID});
  add({.name = "lower_bound_bias_only",
       .B = 2,
       .T = 40,
       .gate_form = KDA_GATE_LOWER_BOUND,
       .gates = Gates::kRaw,
       .lower_bound = -5,
       .dt_bias = true});

  // beta, keys, scale.
  add({.name = "beta_zero", .T = 70, .betas = Betas::kZero});
  add({.name = "beta_sigmoid", .T = 70, .beta_form = KDA_BETA_SIGMOID});
  add({.name = "beta_2sigmoid", .T = 70, .beta_form = KDA_BETA_2SIGMOID, .qk_l2norm = true});
  add({.name = "positive", .T = 70, .keys = Keys::kPositive, .qk_l2norm = true});
  add({.name = "zero_rows", .T = 70, .keys = Keys::kSomeZero, .qk_l2norm = true});
  // Here an inverse of the chunk's triangle by a Neumann series would blow up (math.md 8 iv).
  add({.name = "identical_keys_beta_1",
       .T = 256,
       .gates = Gates::kZero,
       .keys = Keys::kIdentical,
       .betas = Betas::kNearOne});
  add({.name = "identical_keys_beta_2",
       .T = 256,
       .gates = Gates::kZero,
       .keys = Keys::kIdentical,
       .betas = Betas::kNearTwo});
  add({.name = "scale", .T = 40, .layout = Layout::kHeadsFirst, .scale = 0.7f});
  add({.name = "scale_negative", .T = 40, .qk_l2norm = true, .scale = -3});

  // Dtypes and states.
  add({.name = "f16",
       .T = 70,
       .HV = 2,
       .dtype = KDA_F16,
       .g_dtype = KDA_F16,
       .beta_dtype = KDA_F16,
       .qk_l2norm = true});
  add({.name = "mixed",
       .T = 70,
       .dtype = KDA_F16,
       .g_dtype = KDA_BF16,
       .beta_dtype = KDA_F32,
       .layout = Layout::kHeadsFirst});
  add({.name = "state_bf16", .B = 2, .T = 70, .HV = 2, .dtype = KDA_BF16, .state_dtype = KDA_BF16});
  add({.name = "state_K_first",
       .B = 2,
       .T = 70,
       .HV = 2,
       .V = 40,
       .layout = Layout::kPadded,
       .state_layout = KDA_STATE_K_FIRST});
  add({.name = "state_none", .B = 2, .T = 70, .HV = 2, .h0 = false, .dhT = false});
  return all;
}

// Values from all of f32's range, where they are multiplied or squared before anything bounds them. Apart from the
// cases above, because gradients of some are infinite.
inline std::vector<Case> edge_cases() {
  const auto gates = [](const char* name, int32_t form, float lower_bound, int32_t dtype) {
    Case c{
        .name = name, .T = 70, .H = 2, .HV = 16, .K = 64, .V = 64, .dtype = dtype, .g_dtype = dtype, .qk_l2norm = true};
    c.gate_form = form, c.lower_bound = lower_bound, c.gates = Gates::kEdges, c.A_log = c.dt_bias = true;
    if (dtype == KDA_BF16) c.beta_dtype = dtype, c.beta_form = KDA_BETA_SIGMOID;
    return c;
  };
  const auto keys = [](const char* name, int32_t dtype) {
    Case c{.name = name, .T = 70, .H = 2, .HV = 4, .K = 64, .V = 64, .dtype = dtype};
    c.keys = Keys::kAnyLength, c.qk_l2norm = true;
    return c;
  };
  return {gates("edges_softplus", KDA_GATE_SOFTPLUS, 0, KDA_F32),
          gates("edges_softplus_bf16", KDA_GATE_SOFTPLUS, 0, KDA_BF16),
          gates("edges_bound", KDA_GATE_LOWER_BOUND, -5, KDA_F32),
          gates("edges_bound_bf16", KDA_GATE_LOWER_BOUND, -5, KDA_BF16),
          gates("edges_deep_bound_bf16", KDA_GATE_LOWER_BOUND, -40, KDA_BF16),
          keys("edges_keys", KDA_F32),
          keys("edges_keys_bf16", KDA_BF16)};
}

inline const Case& find_case(const std::string& name) {
  static const std::vector<Case> all = cases();
  for (const Case& c : all)
    if (c.name == name) return c;
  ADD_FAILURE() << "no case is called " << name;
  return all.front();
}

}  // namespace kda::test
