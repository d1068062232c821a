#include "problem_stages.h"

#include "validate.h"

namespace kda {

// ---- the operands of every stage, as kda.h lists them ----

template <>
std::span<const Operand<kda_stage_cumsum_args>> operands() {
  using A = kda_stage_cumsum_args;
  static constexpr Operand<A> table[] = {
      {"g", &A::g, Kind::kGates, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_chunk_intra_args>> operands() {
  using A = kda_stage_chunk_intra_args;
  static constexpr Operand<A> table[] = {
      {"q", &A::q, Kind::kKeys, kFloats, Role::kIn},
      {"k", &A::k, Kind::kKeys, kFloats, Role::kIn},
      {"v", &A::v, Kind::kValues, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},
      {"beta", &A::beta, Kind::kBetas, kFloats, Role::kIn},
      {"Aqk", &A::Aqk, Kind::kScores, kFloats, Role::kOut},
      {"Akk_inv", &A::Akk_inv, Kind::kScores, kFloats, Role::kOut},
      {"w", &A::w, Kind::kGates, kFloats, Role::kOptionalOut},
      {"u", &A::u, Kind::kValues, kFloats, Role::kOptionalOut},
      {"qG", &A::qG, Kind::kGates, kFloats, Role::kOptionalOut},
      {"kg", &A::kg, Kind::kGates, kFloats, Role::kOptionalOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_recompute_w_u_args>> operands() {
  using A = kda_stage_recompute_w_u_args;
  static constexpr Operand<A> table[] = {
      {"q", &A::q, Kind::kKeys, kFloats, Role::kOptionalIn},
      {"k", &A::k, Kind::kKeys, kFloats, Role::kIn},
      {"v", &A::v, Kind::kValues, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},
      {"beta", &A::beta, Kind::kBetas, kFloats, Role::kIn},
      {"Akk_inv", &A::Akk_inv, Kind::kScores, kFloats, Role::kIn},
      {"w", &A::w, Kind::kGates, kFloats, Role::kOptionalOut},
      {"u", &A::u, Kind::kValues, kFloats, Role::kOptionalOut},
      {"qG", &A::qG, Kind::kGates, kFloats, Role::kOptionalOut},
      {"kg", &A::kg, Kind::kGates, kFloats, Role::kOptionalOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_delta_h_args>> operands() {
  using A = kda_stage_delta_h_args;
  static constexpr Operand<A> table[] = {
      {"kg", &A::kg, Kind::kGates, kFloats, Role::kIn},
      {"w", &A::w, Kind::kGates, kFloats, Role::kIn},
      {"u", &A::u, Kind::kValues, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},
      {"h0", &A::h0, Kind::kStates, kStates, Role::kOptionalIn},
      {"h", &A::h, Kind::kChunkStates, kStates, Role::kOptionalOut},
      {"v_new", &A::v_new, Kind::kValues, kFloats, Role::kOptionalOut},
      {"hT", &A::hT, Kind::kStates, kStates, Role::kOptionalOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_fwd_o_args>> operands() {
  using A = kda_stage_fwd_o_args;
  static constexpr Operand<A> table[] = {
      {"q", &A::q, Kind::kKeys, kFloats, Role::kIn},        {"v_new", &A::v_new, Kind::kValues, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},      {"Aqk", &A::Aqk, Kind::kScores, kFloats, Role::kIn},
      {"h", &A::h, Kind::kChunkStates, kStates, Role::kIn}, {"o", &A::o, Kind::kValues, kFloats, Role::kOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_bwd_local_args>> operands() {
  using A = kda_stage_bwd_local_args;
  static constexpr Operand<A> table[] = {
      {"v_new", &A::v_new, Kind::kValues, kFloats, Role::kIn},
      {"d_o", &A::d_o, Kind::kValues, kFloats, Role::kIn},
      {"Aqk", &A::Aqk, Kind::kScores, kFloats, Role::kIn},
      {"dAqk", &A::dAqk, Kind::kScores, kSingles, Role::kOut},
      {"dv_local", &A::dv_local, Kind::kValues, kFloats, Role::kOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_bwd_delta_h_args>> operands() {
  using A = kda_stage_bwd_delta_h_args;
  static constexpr Operand<A> table[] = {
      {"qG", &A::qG, Kind::kGates, kFloats, Role::kIn},
      {"kg", &A::kg, Kind::kGates, kFloats, Role::kIn},
      {"w", &A::w, Kind::kGates, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},
      {"d_o", &A::d_o, Kind::kValues, kFloats, Role::kIn},
      {"dv_local", &A::dv_local, Kind::kValues, kFloats, Role::kIn},
      {"dhT", &A::dhT, Kind::kStates, kStates, Role::kOptionalIn},
      {"dh", &A::dh, Kind::kChunkStates, kStates, Role::kOut},
      {"dv_new", &A::dv_new, Kind::kValues, kFloats, Role::kOut},
      {"dh0", &A::dh0, Kind::kStates, kStates, Role::kOptionalOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_bwd_wy_dqkg_args>> operands() {
  using A = kda_stage_bwd_wy_dqkg_args;
  static constexpr Operand<A> table[] = {
      {"q", &A::q, Kind::kKeys, kFloats, Role::kIn},
      {"k", &A::k, Kind::kKeys, kFloats, Role::kIn},
      {"v", &A::v, Kind::kValues, kFloats, Role::kIn},
      {"v_new", &A::v_new, Kind::kValues, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},
      {"beta", &A::beta, Kind::kBetas, kFloats, Role::kIn},
      {"Akk_inv", &A::Akk_inv, Kind::kScores, kFloats, Role::kIn},
      {"h", &A::h, Kind::kChunkStates, kStates, Role::kIn},
      {"dh", &A::dh, Kind::kChunkStates, kStates, Role::kIn},
      {"d_o", &A::d_o, Kind::kValues, kFloats, Role::kIn},
      {"dv_new", &A::dv_new, Kind::kValues, kFloats, Role::kIn},
      {"dq", &A::dq, Kind::kGates, kSingles, Role::kOut},
      {"dk", &A::dk, Kind::kGates, kSingles, Role::kOut},
      {"dv", &A::dv, Kind::kValues, kFloats, Role::kOut},
      {"dbeta", &A::dbeta, Kind::kBetas, kSingles, Role::kOut},
      {"dG", &A::dG, Kind::kGates, kSingles, Role::kOut},
      {"dAkk", &A::dAkk, Kind::kScores, kSingles, Role::kOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_bwd_intra_args>> operands() {
  using A = kda_stage_bwd_intra_args;
  static constexpr Operand<A> table[] = {
      {"q", &A::q, Kind::kKeys, kFloats, Role::kIn},
      {"k", &A::k, Kind::kKeys, kFloats, Role::kIn},
      {"G", &A::G, Kind::kGates, kSingles, Role::kIn},
      {"beta", &A::beta, Kind::kBetas, kFloats, Role::kIn},
      {"dAqk", &A::dAqk, Kind::kScores, kSingles, Role::kIn},
      {"dAkk", &A::dAkk, Kind::kScores, kSingles, Role::kIn},
      {"dq", &A::dq, Kind::kGates, kSingles, Role::kInOut},
      {"dk", &A::dk, Kind::kGates, kSingles, Role::kInOut},
      {"dbeta", &A::dbeta, Kind::kBetas, kSingles, Role::kInOut},
      {"dG", &A::dG, Kind::kGates, kSingles, Role::kInOut},
  };
  return table;
}

template <>
std::span<const Operand<kda_stage_cumsum_backward_args>> operands() {
  using A = kda_stage_cumsum_backward_args;
  static constexpr Operand<A> table[] = {
      {"g", &A::g, Kind::kGates, kFloats, Role::kOptionalIn},
      {"dG", &A::dG, Kind::kGates, kSingles, Role::kIn},
      {"dg", &A::dg, Kind::kGates, kFloats, Role::kOut},
  };
  return table;
}

namespace {

constexpr const char* rank_text(Kind kind) {
  switch (kind) {
    case Kind::kKeys: return "4 dimensions [B,T,H,K]";
    case Kind::kGates: return "4 dimensions [B,T,HV,K]";
    case Kind::kValues: return "4 dimensions [B,T,HV,V]";
    case Kind::kScores: return "4 dimensions [B,T,HV,C]";
    case Kind::kBetas: return "3 dimensions [B,T,HV]";
    default: return "4 dimensions [rows,HV,V,K]";
  }
}

// Sizes of the call, each from the first tensor that has it, and the names of those tensors.
struct Sizes {
  const char *tokens = nullptr, *H_from = nullptr, *HV_from = nullptr, *K_from = nullptr, *V_from = nullptr;

  static void take(const char* name, int64_t value, const char*& from, int64_t& size) {
    if (!from) from = name, size = value;
  }
  void read(const char* name, const kda_tensor& t, Kind kind, Dims& d) {
    if (kind == Kind::kStates || kind == Kind::kChunkStates) return;
    if (!tokens) tokens = name, d.B = t.shape[0], d.T = t.shape[1];
    kind == Kind::kKeys ? take(name, t.shape[2], H_from, d.H) : take(name, t.shape[2], HV_from, d.HV);
    if (kind == Kind::kKeys || kind == Kind::kGates) take(name, t.shape[3], K_from, d.K);
    if (kind == Kind::kValues) take(name, t.shape[3], V_from, d.V);
  }
  void check(Dims& d) {
    if (K_from && (d.K < 1 || d.K > kMaxSize)) invalid(K_from, ": expected K in 1..", kMaxSize, ", got ", d.K);
    if (V_from && (d.V < 1 || d.V > kMaxSize)) invalid(V_from, ": expected V in 1..", kMaxSize, ", got ", d.V);
    if (H_from && d.H < 1) invalid(H_from, ": expected H >= 1, got ", d.H);
    if (d.HV < 1) invalid(HV_from, ": expected HV >= 1, got ", d.HV);
    if (H_from && d.HV % d.H) invalid(HV_from, ": expected HV a multiple of H = ", d.H, ", got ", d.HV);
    if (!H_from) d.H = d.HV;
    if (!K_from) d.K = 1;
    if (!V_from) d.V = 1;
  }
};

void check_operand(const char* name, const kda_tensor& t, Kind kind, unsigned dtypes, bool output, const Dims& d,
                   const kda_inputs& in, Tensors& tensors) {
  switch (kind) {
    case Kind::kKeys: return tensors.check(name, t, {d.B, d.T, d.H, d.K}, 4, dtypes, output, " ([B,T,H,K])");
    case Kind::kGates: return tensors.check(name, t, {d.B, d.T, d.HV, d.K}, 4, dtypes, output, " ([B,T,HV,K])");
    case Kind::kValues: return tensors.check(name, t, {d.B, d.T, d.HV, d.V}, 4, dtypes, output, " ([B,T,HV,V])");
    case Kind::kScores: return tensors.check(name, t, {d.B, d.T, d.HV, kChunk}, 4, dtypes, output, " ([B,T,HV,C])");
    case Kind::kBetas: return tensors.check_any_stride(name, t, {d.B, d.T, d.HV}, 3, dtypes, output, " ([B,T,HV])");
    case Kind::kStates: return check_state(name, t, d.N, d, in, tensors, output, dtypes);
    case Kind::kChunkStates: return check_state(name, t, t.shape[0], d, in, tensors, output, dtypes);
  }
}

// How many chunks packed sequences have depends on their lengths: see validate_data.
void check_chunks(const char* name, const kda_tensor& t, int64_t chunks) {
  if (t.shape[0] < chunks) invalid(name, ": expected at least ", chunks, " rows, one a chunk, got ", t.shape[0]);
}

// Checks what the tables do not say.
template <StageArgs Args>
void check_together(const Args&) {}
template <>
void check_together(const kda_stage_recompute_w_u_args& a) {
  if (present(a.qG) && !present(a.q)) invalid("q: expected [B,T,H,K] for qG, got none");
}
template <>
void check_together(const kda_stage_bwd_local_args& a) {
  if (a.at.scale == 0) invalid("scale: expected a number other than 0, since no tensor tells K, got 0");
}

}  // namespace

template <StageArgs Args>
StageProblem<Args> validate(const Args* raw) {
  StageProblem<Args> p{};
  p.args = copy_args(raw, sizeof(Args));
  check_exec(p.args.exec);
  const kda_stage& at = p.args.at;
  p.in.cu_seqlens = at.cu_seqlens, p.in.scale = at.scale, p.in.state_layout = at.state_layout;
  check_absent_is_empty("cu_seqlens", at.cu_seqlens);
  Sizes sizes;
  for (const Operand<Args>& o : operands<Args>()) {
    const kda_tensor& t = p.args.*o.tensor;
    check_absent_is_empty(o.name, t);
    if (o.optional() && !present(t)) continue;
    if (t.ndim != (o.kind == Kind::kBetas ? 3 : 4)) invalid(o.name, ": expected ", rank_text(o.kind), ", got ", t.ndim);
    sizes.read(o.name, t, o.kind, p);
  }
  sizes.check(p);
  Tensors tensors;
  check_packing(at.cu_seqlens, p, tensors);
  check_sizes(sizes.tokens, p);
  check_range("state_layout", at.state_layout, KDA_STATE_V_FIRST, KDA_STATE_K_FIRST);
  if (!std::isfinite(at.scale)) invalid("scale: expected a finite number, got ", at.scale);
  for (const Operand<Args>& o : operands<Args>()) {
    const kda_tensor& t = p.args.*o.tensor;
    if (!present(t)) continue;
    check_operand(o.name, t, o.kind, o.dtypes, o.output(), p, p.in, tensors);
    if (o.kind == Kind::kChunkStates && !p.varlen) check_chunks(o.name, t, p.N * p.max_chunks());
  }
  check_together(p.args);
  check_memory(tensors, p.args.exec, p);
  if (p.in.scale == 0) p.in.scale = 1.0f / std::sqrt(static_cast<float>(p.K));
  return p;
}

template <StageArgs Args>
void validate_data(const StageProblem<Args>& p) {
  check_cu_seqlens(p, p.in);
  if (!p.varlen) return;
  int64_t chunks = 0;
  for (int64_t n = 0; n < p.N; ++n) chunks += h_rows(sequence_at(p, p.in, n).length, 1);
  for (const Operand<Args>& o : operands<Args>())
    if (const kda_tensor& t = p.args.*o.tensor; o.kind == Kind::kChunkStates && present(t))
      check_chunks(o.name, t, chunks);
}

template <StageArgs Args>
bool has_f64(const StageProblem<Args>& p) {
  for (const Operand<Args>& o : operands<Args>())
    if (any_f64({&(p.args.*o.tensor)})) return true;
  return false;
}

#define KDA_INSTANTIATE(stage)                                                                   \
  template StageProblem<kda_stage_##stage##_args> validate(const kda_stage_##stage##_args* raw); \
  template void validate_data(const StageProblem<kda_stage_##stage##_args>& p);                  \
  template bool has_f64(const StageProblem<kda_stage_##stage##_args>& p);
KDA_INSTANTIATE(cumsum)
KDA_INSTANTIATE(chunk_intra)
KDA_INSTANTIATE(recompute_w_u)
KDA_INSTANTIATE(delta_h)
KDA_INSTANTIATE(fwd_o)
KDA_INSTANTIATE(bwd_local)
KDA_INSTANTIATE(bwd_delta_h)
KDA_INSTANTIATE(bwd_wy_dqkg)
KDA_INSTANTIATE(bwd_intra)
KDA_INSTANTIATE(cumsum_backward)
#undef KDA_INSTANTIATE

}  // namespace kda
