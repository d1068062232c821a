// The operands of the stages of the chunked form, in the order of Python's calls.
#pragma once
#include "tables.h"

namespace kda {

struct StageGroup {
  using A = kda_stage;
  static constexpr auto operands = std::array{
      KDA_T(cu_seqlens, "[N+1]", kIndices).maybe(),
      KDA_FLOAT(scale),
      KDA_INT(state_layout).range(KDA_STATE_V_FIRST, KDA_STATE_K_FIRST),
  };
};

template <>
struct Table<kda_stage_cumsum_args> {
  using A = kda_stage_cumsum_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(g, "[B,T,HV,K]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles).out(),
                                                  });
};

template <>
struct Table<kda_stage_chunk_intra_args> {
  using A = kda_stage_chunk_intra_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(q, "[B,T,H,K]", kFloats),
                                                      KDA_T(k, "[B,T,H,K]", kFloats),
                                                      KDA_T(v, "[B,T,HV,V]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(beta, "[B,T,HV]", kFloats).strided(),
                                                      KDA_T(Aqk, "[B,T,HV,C]", kFloats).out(),
                                                      KDA_T(Akk_inv, "[B,T,HV,C]", kFloats).out(),
                                                      KDA_T(w, "[B,T,HV,K]", kFloats).out().maybe(),
                                                      KDA_T(u, "[B,T,HV,V]", kFloats).out().maybe(),
                                                      KDA_T(qG, "[B,T,HV,K]", kFloats).out().maybe(),
                                                      KDA_T(kg, "[B,T,HV,K]", kFloats).out().maybe(),
                                                  });
};

template <>
struct Table<kda_stage_recompute_w_u_args> {
  using A = kda_stage_recompute_w_u_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(q, "[B,T,H,K]", kFloats).maybe(),
                                                      KDA_T(k, "[B,T,H,K]", kFloats),
                                                      KDA_T(v, "[B,T,HV,V]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(beta, "[B,T,HV]", kFloats).strided(),
                                                      KDA_T(Akk_inv, "[B,T,HV,C]", kFloats),
                                                      KDA_T(w, "[B,T,HV,K]", kFloats).out().maybe(),
                                                      KDA_T(u, "[B,T,HV,V]", kFloats).out().maybe(),
                                                      KDA_T(qG, "[B,T,HV,K]", kFloats).out().maybe(),
                                                      KDA_T(kg, "[B,T,HV,K]", kFloats).out().maybe(),
                                                  });
};

template <>
struct Table<kda_stage_delta_h_args> {
  using A = kda_stage_delta_h_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(kg, "[B,T,HV,K]", kFloats),
                                                      KDA_T(w, "[B,T,HV,K]", kFloats),
                                                      KDA_T(u, "[B,T,HV,V]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(h0, "[N,HV,V,K]", kStates).maybe(),
                                                      KDA_T(h, "[NT,HV,V,K]", kStates).out().maybe(),
                                                      KDA_T(v_new, "[B,T,HV,V]", kFloats).out().maybe(),
                                                      KDA_T(hT, "[N,HV,V,K]", kStates).out().maybe().be("h0"),
                                                  });
};

template <>
struct Table<kda_stage_fwd_o_args> {
  using A = kda_stage_fwd_o_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(q, "[B,T,H,K]", kFloats),
                                                      KDA_T(v_new, "[B,T,HV,V]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(Aqk, "[B,T,HV,C]", kFloats),
                                                      KDA_T(h, "[NT,HV,V,K]", kStates),
                                                      KDA_T(o, "[B,T,HV,V]", kFloats).out(),
                                                  });
};

template <>
struct Table<kda_stage_bwd_local_args> {
  using A = kda_stage_bwd_local_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(v_new, "[B,T,HV,V]", kFloats),
                                                      KDA_T(d_o, "[B,T,HV,V]", kFloats),
                                                      KDA_T(Aqk, "[B,T,HV,C]", kFloats),
                                                      KDA_T(dAqk, "[B,T,HV,C]", kSingles).out(),
                                                      KDA_T(dv_local, "[B,T,HV,V]", kFloats).out(),
                                                  });
};

template <>
struct Table<kda_stage_bwd_delta_h_args> {
  using A = kda_stage_bwd_delta_h_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(qG, "[B,T,HV,K]", kFloats),
                                                      KDA_T(kg, "[B,T,HV,K]", kFloats),
                                                      KDA_T(w, "[B,T,HV,K]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(d_o, "[B,T,HV,V]", kFloats),
                                                      KDA_T(dv_local, "[B,T,HV,V]", kFloats),
                                                      KDA_T(dhT, "[N,HV,V,K]", kStates).maybe(),
                                                      KDA_T(dh, "[NT,HV,V,K]", kStates).out(),
                                                      KDA_T(dv_new, "[B,T,HV,V]", kFloats).out(),
                                                      KDA_T(dh0, "[N,HV,V,K]", kStates).out().maybe(),
                                                  });
};

template <>
struct Table<kda_stage_bwd_wy_dqkg_args> {
  using A = kda_stage_bwd_wy_dqkg_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(q, "[B,T,H,K]", kFloats),
                                                      KDA_T(k, "[B,T,H,K]", kFloats),
                                                      KDA_T(v, "[B,T,HV,V]", kFloats),
                                                      KDA_T(v_new, "[B,T,HV,V]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(beta, "[B,T,HV]", kFloats).strided(),
                                                      KDA_T(Akk_inv, "[B,T,HV,C]", kFloats),
                                                      KDA_T(h, "[NT,HV,V,K]", kStates),
                                                      KDA_T(dh, "[NT,HV,V,K]", kStates),
                                                      KDA_T(d_o, "[B,T,HV,V]", kFloats),
                                                      KDA_T(dv_new, "[B,T,HV,V]", kFloats),
                                                      KDA_T(dq, "[B,T,HV,K]", kSingles).out(),
                                                      KDA_T(dk, "[B,T,HV,K]", kSingles).out(),
                                                      KDA_T(dv, "[B,T,HV,V]", kFloats).out(),
                                                      KDA_T(dbeta, "[B,T,HV]", kSingles).out().strided(),
                                                      KDA_T(dG, "[B,T,HV,K]", kSingles).out(),
                                                      KDA_T(dAkk, "[B,T,HV,C]", kSingles).out(),
                                                  });
};

template <>
struct Table<kda_stage_bwd_intra_args> {
  using A = kda_stage_bwd_intra_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(q, "[B,T,H,K]", kFloats),
                                                      KDA_T(k, "[B,T,H,K]", kFloats),
                                                      KDA_T(G, "[B,T,HV,K]", kSingles),
                                                      KDA_T(beta, "[B,T,HV]", kFloats).strided(),
                                                      KDA_T(dAqk, "[B,T,HV,C]", kSingles),
                                                      KDA_T(dAkk, "[B,T,HV,C]", kSingles),
                                                      KDA_T(dq, "[B,T,HV,K]", kSingles).in_out(),
                                                      KDA_T(dk, "[B,T,HV,K]", kSingles).in_out(),
                                                      KDA_T(dbeta, "[B,T,HV]", kSingles).in_out().strided(),
                                                      KDA_T(dG, "[B,T,HV,K]", kSingles).in_out(),
                                                  });
};

template <>
struct Table<kda_stage_cumsum_backward_args> {
  using A = kda_stage_cumsum_backward_args;
  static constexpr auto operands =
      joined(KDA_GROUP(at, StageGroup::operands), std::array{
                                                      KDA_T(g, "[B,T,HV,K]", kFloats).maybe(),
                                                      KDA_T(dG, "[B,T,HV,K]", kSingles),
                                                      KDA_T(dg, "[B,T,HV,K]", kFloats).out(),
                                                  });
};

// Calls zero(tensor) for every output of a stage that has a row a token, to zero the rows that no sequence owns.
template <class Problem, class F>
void for_each_tail(const Problem& p, const F& zero) {
  if (!p.varlen) return;
  for (const Operand& o : operands_of<decltype(p.args)>()) {
    if (!o.output() || !o.has_tokens()) continue;
    if (const kda_tensor& t = tensor_of(&p.args, o); t.ndim > 0) zero(t);
  }
}

}  // namespace kda
