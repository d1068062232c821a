// Calls in chunks on the GPU: K and V of 128 or 64, as tensor cores take them, with every gate.
#pragma once
#include <algorithm>
#include <sstream>

#include "cases.h"

namespace kda::test {

inline Case wide(Case c) {
  c.K = c.V = 128;
  return c;
}

// Some of these cases with K, V or both of 64, behind which kernels for 128 have zeros.
inline std::vector<Case> narrow_cases(const std::vector<Case>& all) {
  std::vector<Case> narrow;
  const auto add = [&](const char* prefix, int64_t K, int64_t V, const char* names) {
    std::istringstream words(names);
    for (std::string name; words >> name;) {
      const auto found = std::find_if(all.begin(), all.end(), [&](const Case& c) { return c.name == name; });
      if (found == all.end()) ADD_FAILURE() << "no case is called " << name;
      else narrow.push_back(*found), narrow.back().name = prefix + name, narrow.back().K = K, narrow.back().V = V;
    }
  };
  add("K64_V64_", 64, 64,
      "bound_1 bound_33 bound_65 softplus_7 softplus_17 softplus_64 bound_heads softplus_heads bound_packed "
      "softplus_packed bound_f16 softplus_f16 bound_wide_gate deep_bound log wild some_zero no_h0 edges_softplus "
      "edges_softplus_bf16 edges_bound_bf16 edges_keys_bf16 bound_short bound_short_k_first bound_short_bf16_states "
      "bound_short_no_h0 softplus_short bound_short_packed bound_maps bound_long softplus_long bound_long_packed "
      "softplus_long_packed bound_long_f16 log_slow_long log_none_long wild_long");
  constexpr char kSome[] =
      "bound_packed softplus_heads bound_wide_gate bound_short bound_short_k_first softplus_long log_none_long";
  add("K64_V128_", 64, 128, kSome), add("K128_V64_", 128, 64, kSome);
  return narrow;
}

inline std::vector<Case> chunk_cases() {
  std::vector<Case> all;
  const auto add = [&](Case c) {
    if (c.dtype == KDA_F32) c.dtype = KDA_BF16;
    all.push_back(wide(c));
  };
  const auto raw = [](Case c) {  // as Kimi's layers call: all activations inside
    c.gate_form = KDA_GATE_LOWER_BOUND, c.lower_bound = -5, c.gates = Gates::kRaw, c.A_log = c.dt_bias = true;
    c.beta_form = KDA_BETA_SIGMOID, c.qk_l2norm = true, c.g_dtype = c.beta_dtype = KDA_BF16;
    return c;
  };
  const auto softplus = [&](Case c) {
    c = raw(c), c.gate_form = KDA_GATE_SOFTPLUS, c.lower_bound = 0;
    return c;
  };
  for (const int64_t T : {1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100})
    add(raw({.name = "bound_" + std::to_string(T), .T = T})),
        add(softplus({.name = "softplus_" + std::to_string(T), .T = T}));
  add(raw({.name = "bound_heads", .B = 2, .T = 140, .H = 2, .HV = 4, .layout = Layout::kHeadsFirst}));
  add(softplus({.name = "softplus_heads", .B = 2, .T = 140, .H = 2, .HV = 4, .layout = Layout::kHeadsFirst}));
  add(raw({.name = "bound_packed", .HV = 2, .lengths = {1, 64, 0, 33, 130}, .tail = 9}));
  add(softplus({.name = "softplus_packed", .HV = 2, .lengths = {70, 0, 0, 2, 97}, .tail = 40, .cu_dtype = KDA_I64}));
  add(raw({.name = "bound_f16", .T = 70, .dtype = KDA_F16, .state_dtype = KDA_BF16}));
  all.back().g_dtype = KDA_F16;
  add(softplus({.name = "softplus_f16", .T = 70, .dtype = KDA_F16, .state_layout = KDA_STATE_K_FIRST}));
  all.back().g_dtype = KDA_F16;
  add({.name = "floor", .T = 96, .gate_form = KDA_GATE_LOWER_BOUND, .gates = Gates::kFloor, .lower_bound = -5});
  add({.name = "bound_wide_gate",
       .T = 130,
       .HV = 2,
       .gate_form = KDA_GATE_LOWER_BOUND,
       .gates = Gates::kRaw,
       .lower_bound = -3});
  add({.name = "deep_bound", .T = 96, .gate_form = KDA_GATE_LOWER_BOUND, .gates = Gates::kRaw, .lower_bound = -40});
  add({.name = "log", .T = 130, .HV = 2, .gates = Gates::kLogSigmoid});
  add({.name = "log_slow", .T = 130, .gates = Gates::kHalfZero, .gate_divisor = 10});
  add({.name = "log_none", .T = 100, .gates = Gates::kZero});
  add({.name = "wild", .T = 130, .gates = Gates::kWild});
  add({.name = "positive", .T = 130, .keys = Keys::kPositive});
  add({.name = "some_zero", .T = 70, .keys = Keys::kSomeZero});
  add({.name = "beta_zero", .T = 70, .betas = Betas::kZero});
  add({.name = "no_h0", .T = 70, .scale = 0.5f, .h0 = false});
  for (const Case& c : edge_cases()) add(c);
  // Enough heads for a pair of blocks to have several.
  const std::vector<int64_t> any = {1, 63, 64, 65, 0, 200, 33, 96, 5, 128, 31, 2};
  add(raw({.name = "bound_short", .H = 2, .HV = 16, .lengths = any, .tail = 7}));
  add(softplus({.name = "softplus_short", .H = 16, .HV = 16, .lengths = std::vector<int64_t>(12, 20)}));
  add(raw({.name = "bound_short_k_first", .HV = 16, .lengths = any, .state_layout = KDA_STATE_K_FIRST}));
  add(raw({.name = "bound_short_bf16_states", .HV = 16, .lengths = any, .state_dtype = KDA_BF16}));
  add(raw({.name = "bound_short_no_h0", .HV = 16, .lengths = any, .h0 = false}));
  add(raw({.name = "bound_short_packed", .H = 2, .HV = 4, .lengths = {70, 1, 20}, .tail = 2}));
  // Long enough for several segments.
  add(raw({.name = "bound_maps", .T = 300}));
  add(raw({.name = "bound_long", .T = 700, .HV = 2}));
  add(softplus({.name = "softplus_long", .B = 2, .T = 333, .HV = 2, .h0 = false}));
  add(raw({.name = "bound_long_packed", .lengths = {450, 0, 3, 330, 64, 65, 0}, .tail = 70}));
  add(softplus({.name = "softplus_long_packed", .lengths = {5, 640}, .tail = 1, .state_layout = KDA_STATE_K_FIRST}));
  add({.name = "log_slow_long", .T = 700, .gates = Gates::kHalfZero, .gate_divisor = 10});
  add({.name = "log_none_long", .T = 300, .gates = Gates::kZero});
  add({.name = "wild_long", .T = 300, .gates = Gates::kWild});
  add(raw({.name = "bound_long_f16", .T = 300, .dtype = KDA_F16, .state_dtype = KDA_BF16}));
  all.back().g_dtype = KDA_F16;
  for (const Case& c : narrow_cases(all)) all.push_back(c);
  return all;
}

}  // namespace kda::test
