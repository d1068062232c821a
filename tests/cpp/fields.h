// The tensors of every args struct by name, for loops over all of them.
#pragma once
#include <vector>

#include "kda/kda.h"

namespace kda::test {

struct Field {
  const char* name;
  kda_tensor* t;
  bool output = false;
};

inline std::vector<Field> joined(std::vector<Field> a, const std::vector<Field>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline std::vector<Field> fields(kda_inputs& in) {
  return {{"q", &in.q},
          {"k", &in.k},
          {"v", &in.v},
          {"g", &in.g},
          {"beta", &in.beta},
          {"A_log", &in.A_log},
          {"dt_bias", &in.dt_bias},
          {"cu_seqlens", &in.cu_seqlens}};
}

inline std::vector<Field> fields(kda_states& s) {
  return {{"h0", &s.h0},
          {"hT", &s.hT, true},
          {"state_indices", &s.state_indices},
          {"has_initial_state", &s.has_initial_state}};
}

inline std::vector<Field> fields(kda_forward_args& a) {
  return joined(joined(fields(a.in), fields(a.states)), {{"o", &a.o, true},
                                                         {"checkpoints", &a.checkpoints, true},
                                                         {"checkpoint_slots", &a.checkpoint_slots},
                                                         {"h", &a.h, true},
                                                         {"v_new", &a.v_new, true},
                                                         {"Aqk", &a.Aqk, true},
                                                         {"Akk", &a.Akk, true}});
}

inline std::vector<Field> fields(kda_backward_args& a) {
  return joined(fields(a.in), {{"h0", &a.h0},
                               {"d_o", &a.d_o},
                               {"dhT", &a.dhT},
                               {"h", &a.h},
                               {"v_new", &a.v_new},
                               {"Aqk", &a.Aqk},
                               {"Akk", &a.Akk},
                               {"dq", &a.dq, true},
                               {"dk", &a.dk, true},
                               {"dv", &a.dv, true},
                               {"dg", &a.dg, true},
                               {"dbeta", &a.dbeta, true},
                               {"dA_log", &a.dA_log, true},
                               {"d_dt_bias", &a.d_dt_bias, true},
                               {"dh0", &a.dh0, true}});
}

inline std::vector<Field> fields(kda_decode_args& a) {
  return joined(joined(fields(a.in), fields(a.states)), {{"o", &a.o, true}});
}

inline std::vector<Field> fields(kda_segment_map_args& a) {
  return joined(fields(a.in), {{"d_o", &a.d_o}, {"M", &a.M, true}, {"b", &a.b, true}, {"d", &a.d, true}});
}

inline std::vector<Field> fields(kda_segment_merge_args& a) {
  return {{"M", &a.M}, {"b", &a.b}, {"h0", &a.h0}, {"states", &a.states, true}};
}

inline std::vector<Field> fields(kda_gate_args& a) {
  return {{"x", &a.x}, {"A_log", &a.A_log}, {"dt_bias", &a.dt_bias}, {"g", &a.g, true}};
}

inline std::vector<Field> fields(kda_gate_backward_args& a) {
  return {{"x", &a.x},         {"A_log", &a.A_log},         {"dt_bias", &a.dt_bias},          {"dg", &a.dg},
          {"dx", &a.dx, true}, {"dA_log", &a.dA_log, true}, {"d_dt_bias", &a.d_dt_bias, true}};
}

inline std::vector<Field> fields(kda_conv_args& a) {
  return {{"x", &a.x},
          {"weight", &a.weight},
          {"bias", &a.bias},
          {"cu_seqlens", &a.cu_seqlens},
          {"initial_state", &a.initial_state},
          {"final_state", &a.final_state, true},
          {"state_indices", &a.state_indices},
          {"has_initial_state", &a.has_initial_state},
          {"y", &a.y, true}};
}

inline std::vector<Field> fields(kda_conv_backward_args& a) {
  return {{"x", &a.x},
          {"weight", &a.weight},
          {"bias", &a.bias},
          {"cu_seqlens", &a.cu_seqlens},
          {"initial_state", &a.initial_state},
          {"dy", &a.dy},
          {"d_final_state", &a.d_final_state},
          {"dx", &a.dx, true},
          {"dweight", &a.dweight, true},
          {"dbias", &a.dbias, true},
          {"d_initial_state", &a.d_initial_state, true}};
}

}  // namespace kda::test
