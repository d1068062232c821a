// The tensors of every args struct by name, for loops over all of them.
#pragma once
#include <vector>

#include "kda/kda.h"

namespace kda::test {

struct Field {
  const char* name;
  kda_tensor* t;
  bool output = false;
  unsigned free = 0;  // a bit for each dimension whose size follows from no other tensor
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

// The tensors of a convolution in front of an operator that rolls the conv state on, or only reads it. They take the
// place of q, k and v.
inline std::vector<Field> conv_fields(kda_conv_inputs& c, bool rolls) {
  return {{"conv.x", &c.x},
          {"conv.weight", &c.weight},
          {"conv.bias", &c.bias},
          {"conv.state", &c.state, rolls},
          {"conv.indices", &c.indices}};
}

// The tensors of a norm behind an operator.
inline std::vector<Field> norm_fields(kda_norm_inputs& n) {
  return {{"norm.gate", &n.gate}, {"norm.weight", &n.weight}};
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
inline std::vector<Field> snapshot_fields(kda_decode_args& a) {
  return {{"snapshots", &a.snapshots, true}, {"snapshot_slots", &a.snapshot_slots}, {"accepted", &a.accepted}};
}

inline std::vector<Field> fields(kda_segment_map_args& a) {
  return joined(fields(a.in), {{"d_o", &a.d_o}, {"M", &a.M, true}, {"b", &a.b, true}, {"d", &a.d, true}});
}

inline std::vector<Field> fields(kda_segment_merge_args& a) {
  return {{"M", &a.M}, {"b", &a.b}, {"h0", &a.h0}, {"states", &a.states, true}};
}

inline std::vector<Field> fields(kda_verify_args& a) {
  return joined(fields(a.in), {{"h0", &a.states.h0},
                               {"state_indices", &a.states.state_indices},
                               {"has_initial_state", &a.states.has_initial_state},
                               {"o", &a.o, true},
                               {"records.u", &a.records.u, true, 3},
                               {"records.k", &a.records.k, true},
                               {"records.alpha", &a.records.alpha, true},
                               {"records.indices", &a.records.indices},
                               {"records.ring_first", &a.records.ring_first},
                               {"records.ring_count", &a.records.ring_count},
                               {"parents", &a.parents, false, 2}});
}

inline std::vector<Field> fields(kda_flush_args& a) {
  return {{"state", &a.state, true, 15},
          {"state_indices", &a.state_indices},
          {"records.u", &a.records.u, false, 3},
          {"records.k", &a.records.k, false, 4},
          {"records.alpha", &a.records.alpha},
          {"records.indices", &a.records.indices},
          {"records.ring_first", &a.records.ring_first},
          {"records.ring_count", &a.records.ring_count},
          {"accept_len", &a.accept_len, false, 1},
          {"parents", &a.parents, false, 2},
          {"conv_x", &a.conv_x, false, 6},
          {"conv_state", &a.conv_state, true, 5},
          {"conv_indices", &a.conv_indices}};
}

inline std::vector<Field> fields(kda_flush_verify_args& a) {
  return joined(fields(a.in), {{"h0", &a.states.h0},
                               {"hT", &a.states.hT, true},
                               {"state_indices", &a.states.state_indices},
                               {"o", &a.o, true},
                               {"accept_len", &a.accept_len},
                               {"records.u", &a.records.u, true, 3},
                               {"records.k", &a.records.k, true},
                               {"records.alpha", &a.records.alpha, true},
                               {"records.indices", &a.records.indices},
                               {"last.u", &a.last.u, false, 3},
                               {"last.k", &a.last.k},
                               {"last.alpha", &a.last.alpha},
                               {"last.indices", &a.last.indices},
                               {"last_parents", &a.last_parents, false, 2},
                               {"parents", &a.parents, false, 2}});
}

// The tensors of a call on a ring: no records of the last round, no trees.
inline std::vector<Field> ring_fields(kda_flush_verify_args& a) {
  return joined(fields(a.in), {{"h0", &a.states.h0},
                               {"hT", &a.states.hT, true},
                               {"state_indices", &a.states.state_indices},
                               {"o", &a.o, true},
                               {"accept_len", &a.accept_len},
                               {"records.u", &a.records.u, true, 3},
                               {"records.k", &a.records.k, true},
                               {"records.alpha", &a.records.alpha, true},
                               {"records.indices", &a.records.indices},
                               {"records.ring_first", &a.records.ring_first, true},
                               {"records.ring_count", &a.records.ring_count, true}});
}

inline std::vector<Field> fields(kda_gate_args& a) {
  return {{"x", &a.x}, {"A_log", &a.A_log}, {"dt_bias", &a.dt_bias}, {"g", &a.g, true}};
}

inline std::vector<Field> fields(kda_gate_backward_args& a) {
  return {{"x", &a.x},         {"A_log", &a.A_log},         {"dt_bias", &a.dt_bias},          {"dg", &a.dg},
          {"dx", &a.dx, true}, {"dA_log", &a.dA_log, true}, {"d_dt_bias", &a.d_dt_bias, true}};
}

inline std::vector<Field> fields(kda_norm_gate_args& a) {
  return {{"x", &a.x}, {"gate", &a.gate}, {"weight", &a.weight}, {"y", &a.y, true}};
}

inline std::vector<Field> fields(kda_norm_gate_backward_args& a) {
  return {{"x", &a.x},         {"gate", &a.gate},         {"weight", &a.weight},        {"dy", &a.dy},
          {"dx", &a.dx, true}, {"dgate", &a.dgate, true}, {"dweight", &a.dweight, true}};
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

inline std::vector<Field> fields(kda_stage_cumsum_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens}, {"g", &a.g}, {"G", &a.G, true}};
}
inline std::vector<Field> fields(kda_stage_chunk_intra_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"q", &a.q},
          {"k", &a.k},
          {"v", &a.v},
          {"G", &a.G},
          {"beta", &a.beta},
          {"Aqk", &a.Aqk, true},
          {"Akk_inv", &a.Akk_inv, true},
          {"w", &a.w, true},
          {"u", &a.u, true},
          {"qG", &a.qG, true},
          {"kg", &a.kg, true}};
}
inline std::vector<Field> fields(kda_stage_recompute_w_u_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"q", &a.q},
          {"k", &a.k},
          {"v", &a.v},
          {"G", &a.G},
          {"beta", &a.beta},
          {"Akk_inv", &a.Akk_inv},
          {"w", &a.w, true},
          {"u", &a.u, true},
          {"qG", &a.qG, true},
          {"kg", &a.kg, true}};
}
inline std::vector<Field> fields(kda_stage_delta_h_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"kg", &a.kg},
          {"w", &a.w},
          {"u", &a.u},
          {"G", &a.G},
          {"h0", &a.h0},
          {"h", &a.h, true},
          {"v_new", &a.v_new, true},
          {"hT", &a.hT, true}};
}
inline std::vector<Field> fields(kda_stage_fwd_o_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"q", &a.q},
          {"v_new", &a.v_new},
          {"G", &a.G},
          {"Aqk", &a.Aqk},
          {"h", &a.h},
          {"o", &a.o, true}};
}
inline std::vector<Field> fields(kda_stage_bwd_local_args& a) {
  return {
      {"cu_seqlens", &a.at.cu_seqlens}, {"v_new", &a.v_new}, {"d_o", &a.d_o}, {"Aqk", &a.Aqk}, {"dAqk", &a.dAqk, true},
      {"dv_local", &a.dv_local, true}};
}
inline std::vector<Field> fields(kda_stage_bwd_delta_h_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"qG", &a.qG},
          {"kg", &a.kg},
          {"w", &a.w},
          {"G", &a.G},
          {"d_o", &a.d_o},
          {"dv_local", &a.dv_local},
          {"dhT", &a.dhT},
          {"dh", &a.dh, true},
          {"dv_new", &a.dv_new, true},
          {"dh0", &a.dh0, true}};
}
inline std::vector<Field> fields(kda_stage_bwd_wy_dqkg_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"q", &a.q},
          {"k", &a.k},
          {"v", &a.v},
          {"v_new", &a.v_new},
          {"G", &a.G},
          {"beta", &a.beta},
          {"Akk_inv", &a.Akk_inv},
          {"h", &a.h},
          {"dh", &a.dh},
          {"d_o", &a.d_o},
          {"dv_new", &a.dv_new},
          {"dq", &a.dq, true},
          {"dk", &a.dk, true},
          {"dv", &a.dv, true},
          {"dbeta", &a.dbeta, true},
          {"dG", &a.dG, true},
          {"dAkk", &a.dAkk, true}};
}
inline std::vector<Field> fields(kda_stage_bwd_intra_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens},
          {"q", &a.q},
          {"k", &a.k},
          {"G", &a.G},
          {"beta", &a.beta},
          {"dAqk", &a.dAqk},
          {"dAkk", &a.dAkk},
          {"dq", &a.dq, true},
          {"dk", &a.dk, true},
          {"dbeta", &a.dbeta, true},
          {"dG", &a.dG, true}};
}
inline std::vector<Field> fields(kda_stage_cumsum_backward_args& a) {
  return {{"cu_seqlens", &a.at.cu_seqlens}, {"g", &a.g}, {"dG", &a.dG}, {"dg", &a.dg, true}};
}
inline std::vector<Field> fields(kda_prefill_f32_args& a) {
  return {{"q", &a.q},   {"k", &a.k},       {"v", &a.v},       {"g", &a.g},       {"beta", &a.beta},
          {"h0", &a.h0}, {"o", &a.o, true}, {"w", &a.w, true}, {"u", &a.u, true}, {"hT", &a.hT, true}};
}

// Tensors that calls have only where slots to write are not those to read, or where requests leave checkpoints.
inline std::vector<Field> serving_fields(kda_forward_args& a) {
  return {{"out_state_indices", &a.out_state_indices}, {"checkpoint_offset", &a.checkpoint_offset}};
}
inline std::vector<Field> serving_fields(kda_decode_args& a) { return {{"out_state_indices", &a.out_state_indices}}; }
inline std::vector<Field> serving_fields(kda_conv_args& a) {
  return {{"out_state_indices", &a.out_state_indices},
          {"checkpoints", &a.checkpoints, true},
          {"checkpoint_slots", &a.checkpoint_slots},
          {"checkpoint_offset", &a.checkpoint_offset}};
}

}  // namespace kda::test
