// What fuzz.cc and fuzz_edges.cc ask of the oracle, and what they print of a call.
#pragma once
#include <cstdio>
#include <optional>

#include "fuzz_speculation.h"

namespace kda::test {

// Prints a failing call when it is repeated: FUZZ_PRINT=1 fuzz 1 SEED CALL.
template <class Args>
void print_call(Args& a) {
  std::printf("exec: device %d, workspace %p, %llu bytes, impl %s, %d threads, flags %u\n", a.exec.device,
              a.exec.workspace, static_cast<unsigned long long>(a.exec.workspace_bytes),
              a.exec.impl ? a.exec.impl : "-", a.exec.num_threads, a.exec.flags);
  for (const Field& f : fields(a)) {
    if (f.t->ndim == 0 && !f.t->data) continue;
    std::printf("%s: %s at %ld, shape and strides", f.name, dtype_name(f.t->dtype),
                static_cast<long>(static_cast<char*>(f.t->data) - arena.bytes.data()));
    for (int i = 0; i < std::min(f.t->ndim, KDA_MAX_NDIM); ++i)
      std::printf(" %ld:%ld", static_cast<long>(f.t->shape[i]), static_cast<long>(f.t->stride[i]));
    const bool integer = f.t->dtype >= KDA_I32 && f.t->data && arena.holds(*f.t);
    for (int64_t i = 0; integer && i < tensor_size(*f.t); ++i)
      std::printf("%s%.0f", i ? " " : ", values ", get_integer(*f.t, i));
    std::printf("\n");
  }
  if constexpr (requires { a.in; })
    std::printf("forms: gate %d, beta %d, l2norm %d, layout %d, lower_bound %g, scale %g\n", a.in.gate_form,
                a.in.beta_form, a.in.qk_l2norm, a.in.state_layout, a.in.lower_bound, a.in.scale);
}

template <class Args>
int64_t work(const Args& a) {
  if constexpr (requires { a.in; }) {
    const kda_tensor &q = a.in.q, &v = a.in.v;
    if constexpr (requires { a.conv; })
      if (a.conv.x.ndim && a.in.g.ndim == 4 && a.o.ndim == 4)
        return std::abs(tensor_size(a.in.g) * std::max<int64_t>(1, a.o.shape[3]));
    if (q.ndim != 4 || v.ndim != 4) return 0;
    return std::abs(q.shape[0] * q.shape[1] * v.shape[2] * q.shape[3] * v.shape[3]);
  } else if constexpr (
      requires { a.at; } || requires { a.chunk; }) {
    int64_t largest = 0;
    Args copy = a;
    for (const Field& f : fields(copy)) largest = std::max(largest, std::abs(tensor_size(*f.t)));
    return largest;
  } else if constexpr (requires { a.state; }) {
    return std::abs(tensor_size(a.state));
  } else if constexpr (requires { a.states; }) {
    return a.b.ndim == 4 ? std::abs(tensor_size(a.b)) * std::abs(a.M.shape[2]) : 0;
  } else {
    return std::abs(tensor_size(a.x));
  }
}

// Whether verify reads a state that the same call has rounded. Then the oracle has to round, too.
template <class Args>
constexpr bool kReadsRounded = requires(Args a) {
  a.last;
};

// Makes the same call with the oracle, with float64 outputs in an arena of their own.
template <class Args>
std::optional<std::vector<kda_tensor>> oracle(Args a, Arena& into) {
  Random dense(0);
  into.clear();
  // Of a shorter struct, whose caller knows fewer fields, the rest is zero.
  const uint64_t given = std::min<uint64_t>(a.struct_size, sizeof a);
  std::memset(reinterpret_cast<char*>(&a) + given, 0, sizeof a - given);
  std::vector<kda_tensor> outputs;
  const void* in_place = nullptr;
  if constexpr (kReadsRounded<Args>) in_place = a.states.hT.data;
  for (const Field& f : fields(a)) {
    if (!f.output || f.t->ndim <= 0 || f.t->ndim > KDA_MAX_NDIM) continue;
    for (int i = 0; i < f.t->ndim; ++i)
      if (f.t->shape[i] < 0) return {};
    if (tensor_size(*f.t) * 8 > std::ssize(into.bytes) / 8) return {};
    const kda_tensor original = *f.t;
    const bool rounded = !std::strcmp(f.name, "hT") || !std::strcmp(f.name, "conv.state");
    const bool integer = original.dtype > KDA_F64, state = kReadsRounded<Args> && rounded;
    const bool kept = (integer || state) && dtype_size(original.dtype);
    *f.t = into.take(kept ? original.dtype : KDA_F64, {original.shape, original.shape + original.ndim}, dense);
    const bool readable = original.dtype >= KDA_F32 && original.dtype <= KDA_BOOL && original.data &&
                          reinterpret_cast<uintptr_t>(original.data) % dtype_size(original.dtype) == 0;
    for (int64_t i = 0; readable && i < tensor_size(original); ++i)  // what is not written keeps what it holds
      set(*f.t, i, integer ? get_integer(original, i) : get(original, i));
    outputs.push_back(*f.t);
  }
  if constexpr (kReadsRounded<Args>)
    if (a.states.h0.data == in_place) a.states.h0 = a.states.hT;
  a.struct_size = sizeof a;
  a.exec = {};
  a.exec.impl = "reference";
  if (call(a) != KDA_OK) return {};
  return outputs;
}

}  // namespace kda::test
