#include "contract/stages.h"

#include "contract/operators.h"
#include "contract/rules.h"
#include "contract/tables_stages.h"

namespace kda {
namespace {

// h and dh: states of every chunk. How many chunks packed sequences have depends on their lengths: see validate_data.
bool of_chunks(const Operand& o) { return o.state && o.shape[0].size == Size::kAny; }
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
  p.args = copy_args(raw);
  const kda_stage& at = p.args.at;
  p.in.cu_seqlens = at.cu_seqlens, p.in.scale = at.scale, p.in.state_layout = at.state_layout;
  Tensors tensors(p.args);
  tensors.check_form(at.cu_seqlens);
  constexpr std::span operands = operands_of<Args>().subspan(StageGroup::operands.size());
  for (const Operand& o : operands) {
    const kda_tensor& t = tensor_of(&p.args, o);
    tensors.check_form(t);
    if (present(t) || !o.optional) tensors.bind(t, "rows");
  }
  tensors.check_heads(false);
  static_cast<Dims&>(p) = check_packing(at.cu_seqlens, tensors);
  if (!tensors.from(Size::H)) p.H = p.HV;
  if (!tensors.from(Size::K)) p.K = 1;
  if (!tensors.from(Size::V)) p.V = 1;
  check_sizes(tensors.from(Size::B), p);
  tensors.check(at.state_layout);
  tensors.k_first = at.state_layout == KDA_STATE_K_FIRST;
  check_scale(at.scale);
  for (const Operand& o : operands) {
    const kda_tensor& t = tensor_of(&p.args, o);
    tensors.check(t);
    if (of_chunks(o) && present(t) && !p.varlen) check_chunks(o.name, t, p.N * p.max_chunks());
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
  for (const Operand& o : operands_of<Args>())
    if (of_chunks(o) && present(tensor_of(&p.args, o))) check_chunks(o.name, tensor_of(&p.args, o), chunks);
}

template <StageArgs Args>
bool has_f64(const StageProblem<Args>& p) {
  return any_f64(p.args);
}

#define KDA_INSTANTIATE(stage)                                                       \
  template StageProblem<kda_##stage##_args> validate(const kda_##stage##_args* raw); \
  template void validate_data(const StageProblem<kda_##stage##_args>& p);            \
  template bool has_f64(const StageProblem<kda_##stage##_args>& p);
KDA_FOR_EACH_STAGE(KDA_INSTANTIATE, stage_)

}  // namespace kda
