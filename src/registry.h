// The named implementations of every operator, in order of preference (registry.cc), and the choice among them
// (choose.cc).
#pragma once
#include <span>
#include <string>

#include "contract/problem.h"

namespace kda {

template <class P>
struct Implementation {
  const char* name;
  const char* file;  // where it begins, from the root of the source tree
  const char* description;
  const char* (*why_not)(const P&);  // a reason to decline a legal problem, or nullptr
  uint64_t (*workspace)(const P&);   // bytes
  void (*run)(const P&);
  const char* (*unsuited)(const P&) = nullptr;  // why another one that can is better, or nullptr
  std::string (*form)(const P&) = nullptr;      // how it would run the call, if it has several ways
};

template <class P>
std::span<const Implementation<P>> implementations();

// Returns the forced implementation (exec.impl, else KDA_IMPL if it names one of this operator). If none is forced,
// returns the first that does not decline, preferably one that suits. Throws KDA_UNSUPPORTED with every reason, or
// KDA_INVALID_ARGUMENT for an unknown name.
template <class P>
const Implementation<P>& choose(const P& problem);

template <class P>
std::string explain(const P& problem);

// For listing, without a problem, those that this library has code for; nullptr past the end or for an unknown
// operator.
const char* implementation_name(const char* op, int32_t index);

}  // namespace kda
