#include "contract/prefill_f32.h"

#include <utility>

#include "contract/rules.h"

namespace kda {
namespace {

// The same memory with tokens before heads.
kda_tensor tokens_first(kda_tensor t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

}  // namespace

PrefillF32Problem validate(const kda_prefill_f32_args* raw) {
  PrefillF32Problem p{};
  p.args = copy_args(raw);
  kda_prefill_f32_args& a = p.args;
  Tensors tensors(a);
  tensors.check_form(a.q, a.k, a.v, a.g, a.beta, a.h0, a.o, a.w, a.u, a.hT);
  tensors.bind(a.q), tensors.bind(a.v);
  tensors.check_heads(true);
  static_cast<Dims&>(p) = check_packing({}, tensors);
  check_sizes("q", p);
  if (a.chunk != 0 && a.chunk != 32 && a.chunk != 64) invalid("chunk: expected 32 or 64, got ", a.chunk);
  if (a.chunk == 0) a.chunk = kChunk;
  tensors.check(a.state_layout);
  check_scale(a.scale);
  tensors.check(a.reserved);
  tensors[Size::kChunks] = divide_up(p.T, a.chunk), tensors[Size::kChunk] = a.chunk;
  tensors.k_first = a.state_layout == KDA_STATE_K_FIRST;
  tensors.check(a.q, a.k, a.v, a.g, a.beta, a.h0, a.o, a.w, a.u, a.hT);
  check_memory(tensors, a.exec, p);

  p.in.q = tokens_first(a.q), p.in.k = tokens_first(a.k), p.in.v = tokens_first(a.v), p.in.g = tokens_first(a.g);
  p.in.beta = tokens_first(a.beta), p.o = tokens_first(a.o), p.in.state_layout = a.state_layout;
  p.in.scale = a.scale != 0 ? a.scale : 1.0f / std::sqrt(static_cast<float>(p.K));
  return p;
}

bool has_f64(const PrefillF32Problem& p) { return any_f64(p.args); }

}  // namespace kda
