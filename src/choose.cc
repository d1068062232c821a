// The choice among an operator's implementations, its explanation, and their names. The tables: registry.cc.
#include <cstring>
#include <string_view>
#include <utility>

#include "contract/operators.h"
#include "contract/prefill_f32.h"
#include "contract/stages.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "environment.h"
#include "error.h"
#include "registry.h"

namespace kda {
namespace {

// What validate() makes of an operator's args.
template <class Args>
using ProblemOf = decltype(validate(std::declval<const Args*>()));

}  // namespace

#define KDA_DECLARE(op) \
  template <>           \
  std::span<const Implementation<ProblemOf<kda_##op##_args>>> implementations();
KDA_FOR_EACH_OPERATOR(KDA_DECLARE)
#undef KDA_DECLARE

namespace {

// Calls f for every table, until f returns true.
template <class F>
bool for_each_table(F&& f) {
  bool found = false;
  const auto visit = [&](const char* op, auto table) { found = found || f(op, table); };
#define KDA_VISIT(op) visit(#op, implementations<ProblemOf<kda_##op##_args>>());
  KDA_FOR_EACH_OPERATOR(KDA_VISIT)
#undef KDA_VISIT
  return found;
}

// The implementation of a table that has the name, or nullptr.
template <class P>
const Implementation<P>* find(std::span<const Implementation<P>> table, std::string_view name) {
  for (const auto& impl : table)
    if (name == impl.name) return &impl;
  return nullptr;
}

bool known_anywhere(std::string_view name) {
  return for_each_table([&](const char*, auto table) { return find(table, name) != nullptr; });
}

// Returns the forced implementation, or nullptr. KDA_IMPL may hold several names, separated by commas, since one name
// rarely fits every operator; an operator to which none of them belongs chooses freely. exec.impl is meant for this
// call and must belong to its operator.
template <class P>
const Implementation<P>* forced(const P& problem) {
  cpu::isa_name();  // refuses a wrong KDA_CPU_ISA, whatever is to run
  if (const char* name = problem.args.exec.impl; name && *name) {
    if (const auto* impl = find(implementations<P>(), name)) return impl;
    std::string known;
    for (const auto& impl : implementations<P>()) known += str(known.empty() ? "" : ", ", impl.name);
    invalid("exec.impl: expected one of ", known, ", got ", printable(name));
  }
  const Implementation<P>* found = nullptr;
  for (std::string_view rest = environment().impl; !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
    if (!known_anywhere(name)) invalid("KDA_IMPL: expected names of implementations, got ", printable(name));
    if (!found) found = find(implementations<P>(), name);
  }
  return found;
}

// Returns the first that can and suits, else the first that can, else nullptr.
template <class P>
const Implementation<P>* best(const P& problem) {
  const Implementation<P>* able = nullptr;
  for (const auto& impl : implementations<P>()) {
    if (impl.why_not(problem)) continue;
    if (!impl.unsuited || !impl.unsuited(problem)) return &impl;
    if (!able) able = &impl;
  }
  return able;
}

}  // namespace

template <class P>
const Implementation<P>& choose(const P& problem) {
  if (const auto* impl = forced(problem)) {
    const char* reason = impl->why_not(problem);
    if (reason) throw Error(KDA_UNSUPPORTED, str(impl->name, " was forced but ", reason));
    return *impl;
  }
  if (const auto* impl = best(problem)) return *impl;
  std::string reasons;
  for (const auto& impl : implementations<P>())
    reasons += str(reasons.empty() ? "" : "; ", impl.name, ": ", impl.why_not(problem));
  throw Error(KDA_UNSUPPORTED, str("no implementation takes this call: ", reasons));
}

template <class P>
std::string explain(const P& problem) {
  const auto* force = forced(problem);
  const auto* chosen = force ? force : best(problem);
  std::string text;
  for (const auto& impl : implementations<P>()) {
    const char* reason = impl.why_not(problem);
    const bool runs = !reason && &impl == chosen;
    if (!reason && !runs) reason = force ? "another one is forced" : "supported, but an earlier one was chosen";
    const bool unsuited = !impl.why_not(problem) && !runs && !force && impl.unsuited && impl.unsuited(problem);
    text += str(runs ? "* " : "- ", impl.name, ": ", unsuited ? "can, but " : "",
                unsuited ? impl.unsuited(problem)
                : runs   ? impl.description
                         : reason,
                runs && impl.form ? str("; ", impl.form(problem)) : "", " [", impl.file, "]\n");
  }
  return text;
}

// Without CUDA, rows of CUDA only tell about assumed GPUs.
static bool has_code(std::string_view name) { return cuda::is_built() || !name.starts_with("cuda_"); }

const char* implementation_name(const char* op, int32_t index) {
  const char* name = nullptr;
  if (op && index >= 0)
    for_each_table([&](const char* table_op, auto table) {
      if (std::strcmp(op, table_op)) return false;
      int32_t left = index;
      for (const auto& impl : table)
        if (has_code(impl.name) && left-- == 0) name = impl.name;
      return true;
    });
  return name;
}

#define KDA_INSTANTIATE(op)                                                                             \
  template const Implementation<ProblemOf<kda_##op##_args>>& choose(const ProblemOf<kda_##op##_args>&); \
  template std::string explain(const ProblemOf<kda_##op##_args>&);
KDA_FOR_EACH_OPERATOR(KDA_INSTANTIATE)
#undef KDA_INSTANTIATE

}  // namespace kda
