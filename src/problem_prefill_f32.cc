#include "problem_prefill_f32.h"

#include <utility>

#include "validate.h"

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
  p.args = copy_args(raw, sizeof(kda_prefill_f32_args));
  kda_prefill_f32_args& a = p.args;
  check_exec(a.exec);
  for (const auto& [name, t] : {std::pair{"q", &a.q},
                                {"k", &a.k},
                                {"v", &a.v},
                                {"g", &a.g},
                                {"beta", &a.beta},
                                {"h0", &a.h0},
                                {"o", &a.o},
                                {"w", &a.w},
                                {"u", &a.u},
                                {"hT", &a.hT}})
    check_absent_is_empty(name, *t);
  if (a.q.ndim != 4) invalid("q: expected 4 dimensions [B,H,T,K], got ", a.q.ndim);
  if (a.v.ndim != 4) invalid("v: expected 4 dimensions [B,HV,T,V], got ", a.v.ndim);
  p.B = p.N = a.q.shape[0], p.H = a.q.shape[1], p.T = a.q.shape[2], p.K = a.q.shape[3];
  p.HV = a.v.shape[1], p.V = a.v.shape[3];
  if (p.K < 1 || p.K > kMaxSize) invalid("q: expected K in 1..", kMaxSize, ", got ", p.K);
  if (p.V < 1 || p.V > kMaxSize) invalid("v: expected V in 1..", kMaxSize, ", got ", p.V);
  if (p.H < 1) invalid("q: expected H >= 1, got ", p.H);
  if (p.HV < 1 || p.HV % p.H) invalid("v: expected HV a multiple of H = ", p.H, ", got ", p.HV);
  check_sizes("q", p);
  if (a.chunk != 0 && a.chunk != 32 && a.chunk != 64) invalid("chunk: expected 32 or 64, got ", a.chunk);
  if (a.chunk == 0) a.chunk = kChunk;
  check_range("state_layout", a.state_layout, KDA_STATE_V_FIRST, KDA_STATE_K_FIRST);
  if (!std::isfinite(a.scale)) invalid("scale: expected a finite number, got ", a.scale);
  if (a.reserved) invalid("args.reserved: expected 0, got ", a.reserved);

  const int64_t chunks = (p.T + a.chunk - 1) / a.chunk;
  Tensors tensors;
  tensors.check("q", a.q, {p.B, p.H, p.T, p.K}, 4, kSingles, false);
  tensors.check("k", a.k, {p.B, p.H, p.T, p.K}, 4, kSingles, false, " like q");
  tensors.check("v", a.v, {p.B, p.HV, p.T, p.V}, 4, kSingles, false, " ([B,T] like q)");
  tensors.check("g", a.g, {p.B, p.HV, p.T, p.K}, 4, kSingles, false, " ([B,HV,T,K] of q and v)");
  tensors.check_any_stride("beta", a.beta, {p.B, p.HV, p.T}, 3, kSingles, false, " ([B,HV,T] of q and v)");
  p.in.state_layout = a.state_layout;
  if (present(a.h0)) check_state("h0", a.h0, p.B, p, p.in, tensors, false, kSingles);
  tensors.check("o", a.o, {p.B, p.HV, p.T, p.V}, 4, kSingles, true, " like v");
  const auto check_buffer = [&](const char* name, const kda_tensor& t, int64_t size, const char* like) {
    if (present(t)) tensors.check(name, t, {p.B, p.HV, chunks, a.chunk, size}, 5, kSingles, true, like);
  };
  check_buffer("w", a.w, p.K, " ([B,HV,ceil(T/chunk),chunk,K])");
  check_buffer("u", a.u, p.V, " ([B,HV,ceil(T/chunk),chunk,V])");
  if (present(a.hT)) check_state("hT", a.hT, p.B, p, p.in, tensors, true, kSingles);
  check_memory(tensors, a.exec, p);

  p.in.q = tokens_first(a.q), p.in.k = tokens_first(a.k), p.in.v = tokens_first(a.v), p.in.g = tokens_first(a.g);
  p.in.beta = tokens_first(a.beta), p.o = tokens_first(a.o);
  p.in.scale = a.scale != 0 ? a.scale : 1.0f / std::sqrt(static_cast<float>(p.K));
  return p;
}

bool has_f64(const PrefillF32Problem& p) {
  const kda_prefill_f32_args& a = p.args;
  return any_f64({&a.q, &a.k, &a.v, &a.g, &a.beta, &a.h0, &a.o, &a.w, &a.u, &a.hT});
}

}  // namespace kda
