// The tensors of all stages for a case, and the whole forward and backward made of the stages.
#pragma once
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>

#include "calls.h"
#include "fields.h"

namespace kda::test {

// A name means one and the same tensor in every stage. `stored`: the dtype of what the classic split keeps in 16
// bits; `wide`: of everything else, f32 or f64.
struct StageTensors {
  const Inputs& in;
  int32_t stored, wide;
  std::map<std::string, Tensor> all;

  StageTensors(const Inputs& in, int32_t stored, int32_t wide) : StageTensors(in, stored, wide, stored) {}
  // `inverse`: the dtype of Akk_inv.
  StageTensors(const Inputs& in, int32_t stored, int32_t wide, int32_t inverse) : in(in), stored(stored), wide(wide) {
    const Case& c = in.c;
    const std::vector<int64_t> gates{in.B, in.T, c.HV, c.K}, values{in.B, in.T, c.HV, c.V}, A{in.B, in.T, c.HV, 64};
    if (in.cu_seqlens) all["cu_seqlens"] = in.cu_seqlens.clone();
    activate();
    all["v"] = in.v.clone(), all["d_o"] = in.d_o.clone();
    if (in.h0) all["h0"] = in.h0.clone();
    if (in.dhT) all["dhT"] = in.dhT.clone();
    const auto add = [&](std::initializer_list<const char*> names, int32_t dtype, const std::vector<int64_t>& shape) {
      for (const char* name : names) all[name] = Tensor(dtype, shape, c.layout);
    };
    add({"w", "qG", "kg"}, stored, gates);
    add({"u", "v_new", "dv_local", "dv_new"}, stored, values);
    add({"Aqk"}, stored, A);
    add({"Akk_inv"}, inverse, A);
    add({"G", "dq", "dk", "dG", "dg"}, wide, gates);
    add({"o", "dv"}, wide, values);
    add({"dAqk", "dAkk"}, wide, A);
    add({"dbeta"}, wide, {in.B, in.T, c.HV});
    add({"h", "dh"}, stored == KDA_F16 ? KDA_F32 : stored, in.state_shape(in.h_rows(1)));
    add({"hT", "dh0"}, wide, in.state_shape(in.N));
  }

  const Tensor& operator[](const std::string& name) const { return all.at(name); }
  float scale() const { return in.c.scale != 0 ? in.c.scale : 1 / std::sqrt(static_cast<float>(in.c.K)); }

  static bool is_input(const std::string& name) {
    for (const char* input : {"cu_seqlens", "q", "k", "v", "g", "beta", "d_o", "h0", "dhT"})
      if (name == input) return true;
    return false;
  }
  // bwd_intra adds to these.
  static bool both_ways(const std::string& name) {
    return name == "dq" || name == "dk" || name == "dG" || name == "dbeta";
  }

  template <class Args>
  Args args() const {
    Args a{};
    a.struct_size = sizeof a;
    for (const Field& f : fields(a))
      if (all.contains(f.name)) *f.t = all.at(f.name);
    a.at.scale = scale();
    a.at.state_layout = in.c.state_layout;
    return a;
  }

  // 1 / sqrt(sum of squares + eps) of a row of q or k, or 1.
  double norm(const Tensor& x, int64_t row) const {
    double sum = 0;
    for (int64_t i = 0; i < in.c.K; ++i) sum += x.get(row * in.c.K + i) * x.get(row * in.c.K + i);
    return in.c.qk_l2norm ? 1 / std::sqrt(sum + 1e-6) : 1;
  }

 private:
  // Normalises q and k and activates g and beta, as the stages want them.
  void activate() {
    const Case& c = in.c;
    for (const auto& [name, x] : {std::pair{"q", &in.q}, {"k", &in.k}}) {
      all[name] = Tensor(c.qk_l2norm ? wide : c.dtype, {in.B, in.T, c.H, c.K}, c.layout);
      for (int64_t i = 0; i < x->size(); ++i) all[name].set(i, x->get(i) * norm(*x, i / c.K));
    }
    GateTensors gate(in, KDA_F64);
    if (c.gate_form != KDA_GATE_LOG) run(gate_args(in, gate), {.impl = "reference"});
    all["g"] = Tensor(wide, {in.B, in.T, c.HV, c.K}, c.layout);
    for (int64_t i = 0; i < in.g.size(); ++i)
      all["g"].set(i, c.gate_form == KDA_GATE_LOG ? in.g.get(i) : gate.g.get(i));
    all["beta"] = Tensor(wide, {in.B, in.T, c.HV}, c.layout);
    for (int64_t i = 0; i < in.beta.size(); ++i) {
      const double b = in.beta.get(i), factor = c.beta_form == KDA_BETA_2SIGMOID ? 2 : 1;
      all["beta"].set(i, c.beta_form == KDA_BETA_ACTIVATED ? b : factor / (1 + std::exp(-b)));
    }
  }
};

// Calls fn(args) for the stages of the forward, and (below) of the backward after it, in order.
template <class F>
void for_each_forward_stage(const StageTensors& t, const F& fn) {
  fn(t.args<kda_stage_cumsum_args>());
  fn(t.args<kda_stage_chunk_intra_args>());
  fn(t.args<kda_stage_delta_h_args>());
  fn(t.args<kda_stage_fwd_o_args>());
}
template <class F>
void for_each_backward_stage(const StageTensors& t, const F& fn) {
  fn(t.args<kda_stage_recompute_w_u_args>());
  fn(t.args<kda_stage_bwd_local_args>());
  fn(t.args<kda_stage_bwd_delta_h_args>());
  fn(t.args<kda_stage_bwd_wy_dqkg_args>());
  fn(t.args<kda_stage_bwd_intra_args>());
  fn(t.args<kda_stage_cumsum_backward_args>());
}

// What the caller does at the end, in float64: sums value heads and goes back through the norm and the activations of
// beta and the gate.
inline BackwardOutputs finished(const StageTensors& t) {
  const Inputs& in = t.in;
  const Case& c = in.c;
  BackwardOutputs out(in, true);
  const int64_t G = c.HV / c.H, K = c.K;
  const auto store_qk = [&](const char* name, const Tensor& raw, const Tensor& y, Tensor& to) {
    for (int64_t row = 0; row < in.B * in.T * c.H; ++row) {
      const double r = t.norm(raw, row);
      std::vector<double> dy(K);
      double dot = 0;
      for (int64_t i = 0; i < K; ++i) {
        for (int64_t g = 0; g < G; ++g) dy[i] += t[name].get((row * G + g) * K + i);
        dot += dy[i] * y.get(row * K + i);
      }
      for (int64_t i = 0; i < K; ++i) to.set(row * K + i, c.qk_l2norm ? r * (dy[i] - y.get(row * K + i) * dot) : dy[i]);
    }
  };
  store_qk("dq", in.q, t["q"], out.dq);
  store_qk("dk", in.k, t["k"], out.dk);
  for (int64_t i = 0; i < out.dv.size(); ++i) out.dv.set(i, t["dv"].get(i));
  for (int64_t i = 0; i < out.dh0.size(); ++i) out.dh0.set(i, t["dh0"].get(i));
  for (int64_t i = 0; i < out.dbeta.size(); ++i) {
    const double factor = c.beta_form == KDA_BETA_2SIGMOID ? 2 : 1, s = t["beta"].get(i) / factor;
    out.dbeta.set(i, t["dbeta"].get(i) * (c.beta_form == KDA_BETA_ACTIVATED ? 1 : factor * s * (1 - s)));
  }
  GateTensors gate(in, KDA_F64);
  if (c.gate_form == KDA_GATE_LOG) {
    for (int64_t i = 0; i < out.dg.size(); ++i) out.dg.set(i, t["dg"].get(i));
  } else {
    kda_gate_backward_args a = gate_backward_args(in, gate);
    const Tensor dg(t.wide, {in.B * in.T, c.HV, K}, t["dg"].values());
    a.dg = dg;
    run(a, {.impl = "reference"});
    for (int64_t i = 0; i < out.dg.size(); ++i) out.dg.set(i, gate.dx.get(i));
    out.dA_log = std::move(gate.dA_log), out.d_dt_bias = std::move(gate.d_dt_bias);
  }
  return out;
}

// ---- the same on every device: call(args) runs there ----

// After the stages of forward on t: recompute_w_u gives the bits that chunk_intra gave, with or without q; what is
// optional changes no bit. `few` holds the same inputs.
template <class Call>
void expect_fewer_outputs_change_no_bit(const StageTensors& t, const StageTensors& few, const Call& call) {
  std::map<std::string, Bits> first;
  for (const auto& [name, x] : t.all) first[name] = x.bits();
  kda_stage_recompute_w_u_args a = t.args<kda_stage_recompute_w_u_args>();
  call(a);
  for (const auto& [name, x] : t.all) EXPECT_EQ(x.bits(), first[name]) << name;
  a.q = a.qG = {};
  call(a);
  for (const auto& [name, x] : t.all) EXPECT_EQ(x.bits(), first[name]) << name << " without q";

  call(few.args<kda_stage_cumsum_args>());
  kda_stage_chunk_intra_args intra = few.args<kda_stage_chunk_intra_args>();
  intra.w = intra.u = intra.qG = intra.kg = {};
  call(intra);
  for (const char* name : {"Aqk", "Akk_inv"}) EXPECT_EQ(few[name].bits(), first[name]) << name;
  call(few.args<kda_stage_recompute_w_u_args>());
  kda_stage_delta_h_args scan = few.args<kda_stage_delta_h_args>();
  scan.h = scan.hT = {};
  call(scan);
  EXPECT_EQ(few["v_new"].bits(), first["v_new"]);
  scan = few.args<kda_stage_delta_h_args>();
  scan.v_new = {};
  call(scan);
  for (const char* name : {"h", "hT"}) EXPECT_EQ(few[name].bits(), first[name]) << name;
}

template <class Call>
void expect_the_state_in_place(const StageTensors& t, const Call& call) {
  kda_stage_delta_h_args scan = t.args<kda_stage_delta_h_args>();
  scan.hT = scan.h0;
  call(scan);
  EXPECT_EQ(t["h0"].bits(), t["hT"].bits());
}

// A gate of -inf is a decay of 0, and the G it leaves is finite and exact: -160 a step.
template <class Call>
void expect_minus_infinity_is_clamped(const Call& call) {
  const Inputs in({.name = "clamped", .T = 3, .K = 2, .V = 2});
  StageTensors t(in, KDA_F32, KDA_F32);
  const double inf = std::numeric_limits<double>::infinity();
  const double g[] = {-inf, 0, -1, -3000, 0, -inf}, G[] = {-160, 0, -160 - 1 / std::log(2.0), -160, 0, -320};
  for (int i = 0; i < 6; ++i) t.all["g"].set(i, g[i]);
  call(t.args<kda_stage_cumsum_args>());
  EXPECT_EQ(t["G"].get(0), G[0]);
  EXPECT_NEAR(t["G"].get(2), G[2], 1e-4);
  EXPECT_EQ(t["G"].get(1), 0);
  EXPECT_EQ(t["G"].get(3), -160);
  EXPECT_EQ(t["G"].get(5), -320);
  for (int i = 0; i < 6; ++i) t.all["dG"].set(i, i + 1.0);
  call(t.args<kda_stage_cumsum_backward_args>());
  const double dg[] = {0, 12, 8, 0, 5, 0};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(t["dg"].get(i), dg[i]) << i;
  t.all["g"].set(4, std::nan(""));
  call(t.args<kda_stage_cumsum_args>());
  EXPECT_TRUE(std::isnan(t["G"].get(4)));
}

}  // namespace kda::test
