// Calls of kda_prefill_f32, and what holds of them on every device: call(args) runs there.
#pragma once
#include <cstring>

#include "calls.h"

namespace kda::test {

// The cases with rows of equal length and activated inputs, in f32.
inline std::vector<Case> plain_f32_cases() {
  std::vector<Case> all;
  for (Case c : cases()) {
    const bool plain = c.gate_form == KDA_GATE_LOG && c.beta_form == KDA_BETA_ACTIVATED && !c.qk_l2norm;
    if (!plain || !c.lengths.empty() || c.tail) continue;
    c.dtype = c.g_dtype = c.beta_dtype = c.state_dtype = KDA_F32;
    all.push_back(c);
  }
  return all;
}

inline kda_tensor heads_first(kda_tensor t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

struct PrefillF32Outputs {
  Tensor o, hT, w, u;
  PrefillF32Outputs(const Inputs& in, int64_t chunk, int32_t dtype, Layout layout = Layout::kPadded)
      : o(dtype, {in.B, in.c.HV, in.T, in.c.V}, layout),
        hT(dtype, in.state_shape(in.B), in.c.layout),
        w(dtype, {in.B, in.c.HV, (in.T + chunk - 1) / chunk, chunk, in.c.K}, layout),
        u(dtype, {in.B, in.c.HV, (in.T + chunk - 1) / chunk, chunk, in.c.V}, layout) {}
  std::vector<std::pair<const char*, Tensor*>> all() { return {{"o", &o}, {"hT", &hT}, {"w", &w}, {"u", &u}}; }
};

inline kda_prefill_f32_args prefill_f32_args(const Inputs& in, const PrefillF32Outputs& out, int32_t chunk) {
  kda_prefill_f32_args a = KDA_PREFILL_F32_ARGS_INIT;
  a.q = heads_first(in.q), a.k = heads_first(in.k), a.v = heads_first(in.v), a.g = heads_first(in.g);
  a.beta = heads_first(in.beta), a.h0 = in.h0;
  a.o = out.o, a.hT = out.hT, a.w = out.w, a.u = out.u;
  a.chunk = chunk, a.scale = in.c.scale, a.state_layout = in.c.state_layout;
  return a;
}

// Each output alone has the bits that it has among `all`.
template <class Call>
void expect_wanted_or_not_changes_no_bit(const Inputs& in, int32_t chunk, PrefillF32Outputs& all, const Call& call) {
  for (const char* wanted : {"hT", "w", "u", ""}) {
    PrefillF32Outputs one(in, chunk, KDA_F32);
    kda_prefill_f32_args a = prefill_f32_args(in, one, chunk);
    if (std::strcmp(wanted, "hT")) a.hT = {};
    if (std::strcmp(wanted, "w")) a.w = {};
    if (std::strcmp(wanted, "u")) a.u = {};
    call(a);
    EXPECT_EQ(one.o.bits(), all.o.bits()) << wanted;
    for (size_t i = 1; i < 4; ++i)
      if (const auto [name, t] = one.all()[i]; !std::strcmp(name, wanted))
        EXPECT_EQ(t->bits(), all.all()[i].second->bits()) << name;
      else EXPECT_TRUE(t->untouched()) << name;
  }
}

// The first 64 tokens, then the others in place from the state that these left: the bits of `whole`.
template <class Call>
void expect_to_continue_in_place(const Inputs& in, int32_t chunk, const PrefillF32Outputs& whole, const Call& call) {
  const PrefillF32Outputs parts(in, chunk, KDA_F32);
  const Tensor state = in.h0.clone();
  for (const auto& [t0, t1] : {std::pair<int64_t, int64_t>{0, 64}, {64, in.T}}) {
    kda_prefill_f32_args a = prefill_f32_args(in, parts, chunk);
    for (kda_tensor* t : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.o})
      t->data = static_cast<float*>(t->data) + t0 * t->stride[2], t->shape[2] = t1 - t0;
    for (kda_tensor* t : {&a.w, &a.u})
      t->data = static_cast<float*>(t->data) + t0 / chunk * t->stride[2], t->shape[2] = (t1 - t0 + chunk - 1) / chunk;
    a.h0 = a.hT = state;
    call(a);
  }
  EXPECT_EQ(parts.o.bits(), whole.o.bits());
  EXPECT_EQ(parts.w.bits(), whole.w.bits());
  EXPECT_EQ(parts.u.bits(), whole.u.bits());
  EXPECT_EQ(state.bits(), whole.hT.bits());
}

}  // namespace kda::test
