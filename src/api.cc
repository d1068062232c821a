// The C boundary: validate, choose, run; errors become a status and a sentence. No mathematics here.
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "contract/indices.h"
#include "contract/operators.h"
#include "contract/prefill_f32.h"
#include "contract/problem.h"
#include "contract/stages.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "environment.h"
#include "error.h"
#include "registry.h"

namespace kda {
namespace {

constexpr const char* kOracle = "reference";

thread_local std::string last_error;
thread_local std::string last_explanation;
thread_local std::string last_info;

kda_status fail(kda_status status, const char* what) noexcept {
  try {
    last_error = what;
  } catch (...) {  // out of memory: keep the status
    last_error.clear();
  }
  return status;
}

template <class F>
kda_status guard(F&& f) noexcept {
  try {
    f();
    return KDA_OK;
  } catch (const Error& e) {
    return fail(e.status, e.what());
  } catch (const std::bad_alloc&) {
    return fail(KDA_OUT_OF_MEMORY, "memory: expected enough for this call, got none");
  } catch (const std::exception& e) {
    return fail(KDA_INTERNAL_ERROR, e.what());
  } catch (...) {
    return fail(KDA_INTERNAL_ERROR, "an unknown exception");
  }
}

void refuse_assumed_gpu() {
  if (cuda::gpu_is_assumed()) invalid("exec.device: expected no call on CUDA while kda_assume_gpu() is in force");
}

// For calls on CUDA. CPU implementations make do with less than they ask for, and report themselves what is too
// little.
void check_workspace(const kda_exec& exec, uint64_t needed) {
  if (exec.workspace_bytes < needed)
    invalid("exec.workspace_bytes: expected at least ", needed, ", got ", exec.workspace_bytes);
}

template <class P>
std::string sizes_text(const P& p) {
  if constexpr (requires { p.HV; })
    return str("B = ", p.B, ", T = ", p.T, ", N = ", p.N, ", H = ", p.H, ", HV = ", p.HV, ", K = ", p.K, ", V = ", p.V);
  else if constexpr (requires { p.D; })
    return str("B = ", p.B, ", T = ", p.T, ", N = ", p.N, ", D = ", p.D, ", W = ", p.W);
  else if constexpr (requires { p.rows; }) return str("rows = ", p.rows, ", V = ", p.V);
  else return str("M = ", p.args.x.shape[0], ", HV = ", p.args.x.shape[1], ", K = ", p.args.x.shape[2]);
}

// Only the reference allocates. Sizes may be so large that containers themselves refuse them.
template <class P>
void run_in_memory(const Implementation<P>& impl, const P& problem, const char* op) {
  const auto refuse = [&] {
    throw Error(KDA_OUT_OF_MEMORY, str("memory: expected enough for ", op, " by ", impl.name, " with ",
                                       sizes_text(problem), ", got none"));
  };
  try {
    impl.run(problem);
  } catch (const std::bad_alloc&) {
    refuse();
  } catch (const std::length_error&) {
    refuse();
  }
}

// The norm and gate behind an operator, if its calls can have one. Others keep no room for it on the stack.
template <class P>
struct NormBehind {
  NormBehind(const P&, const char*) {}
  void run(const char*) const {}
};
template <class P>
requires requires(const P& p) { p.args.norm; }
struct NormBehind<P> {
  // Oracle follows oracle; else the norm is free to choose.
  NormBehind(const P& p, const char* impl_before) {
    if (!p.args.norm.apply) return;
    problem = norm_behind(p.args.exec, p.args.o, p.args.norm);
    problem.args.exec.impl = std::string_view(impl_before) == kOracle ? kOracle : nullptr;
    if (!problem.idle) impl = &choose(problem);
  }
  void run(const char* op) const {
    if (impl) run_in_memory(*impl, problem, op);
  }

  NormGateProblem problem;
  const Implementation<NormGateProblem>* impl = nullptr;  // none: nothing follows
};

template <class Args>
kda_status run(const Args* args, const char* op) noexcept {
  return guard([&] {
    auto problem = validate(args);
    const auto& impl = choose(problem);
    const NormBehind norm(problem, impl.name);
    if (problem.args.exec.device == KDA_CPU) validate_data(problem);
    else refuse_assumed_gpu();
    if (problem.idle) return;
    narrow_indices(problem.args);
    if (problem.args.exec.device == KDA_CUDA) check_workspace(problem.args.exec, impl.workspace(problem));
    run_in_memory(impl, problem, op);
    norm.run(op);
  });
}

template <class Args>
kda_status workspace(const Args* args, uint64_t* bytes) noexcept {
  return guard([&] {
    if (!bytes) invalid("bytes: expected a pointer, got NULL");
    const auto problem = validate(args);
    const auto& impl = choose(problem);
    *bytes = problem.idle ? 0 : impl.workspace(problem);
  });
}

template <class Args>
kda_status explain_call(const Args* args, const char** text) noexcept {
  return guard([&] {
    if (!text) invalid("text: expected a pointer, got NULL");
    last_explanation = explain(validate(args));
    *text = last_explanation.c_str();
  });
}

std::string info_text() {
  return str("version: ", kda_version(), "\ncpu: ", cpu::isa_name(), " (built for ", cpu::isa_names(),
             ")\ncuda: ", cuda::info(), "\n");
}

}  // namespace
}  // namespace kda

extern "C" {

#define KDA_DEFINE_OPERATOR(op)                                                           \
  kda_status kda_##op(const kda_##op##_args* args) { return kda::run(args, "kda_" #op); } \
  kda_status kda_##op##_workspace(const kda_##op##_args* args, uint64_t* bytes) {         \
    return kda::workspace(args, bytes);                                                   \
  }                                                                                       \
  kda_status kda_##op##_explain(const kda_##op##_args* args, const char** text) {         \
    return kda::explain_call(args, text);                                                 \
  }
KDA_FOR_EACH_OPERATOR(KDA_DEFINE_OPERATOR)
#undef KDA_DEFINE_OPERATOR

kda_status kda_assume_gpu(int32_t capability, int32_t multiprocessors) {
  return kda::guard([&] { kda::cuda::assume_gpu(capability, multiprocessors); });
}

const char* kda_implementation(const char* op, int32_t index) { return kda::implementation_name(op, index); }

kda_status kda_read_environment(void) { return kda::guard(kda::read_environment); }

const char* kda_last_error(void) { return kda::last_error.c_str(); }

const char* kda_status_name(kda_status status) {
  switch (status) {
    case KDA_OK: return "KDA_OK";
    case KDA_INVALID_ARGUMENT: return "KDA_INVALID_ARGUMENT";
    case KDA_UNSUPPORTED: return "KDA_UNSUPPORTED";
    case KDA_CUDA_ERROR: return "KDA_CUDA_ERROR";
    case KDA_INTERNAL_ERROR: return "KDA_INTERNAL_ERROR";
    case KDA_OUT_OF_MEMORY: return "KDA_OUT_OF_MEMORY";
  }
  return "an unknown kda_status";
}

#define KDA_TEXT_(x) #x
#define KDA_TEXT(x) KDA_TEXT_(x)
const char* kda_version(void) {
  return KDA_TEXT(KDA_VERSION_MAJOR) "." KDA_TEXT(KDA_VERSION_MINOR) "." KDA_TEXT(KDA_VERSION_PATCH);
}

// (There is one text per thread. With one per process, a fork while it is made would leave no thread to finish it.)
const char* kda_info(void) {
  const kda_status status = kda::guard([] { kda::last_info = kda::info_text(); });
  return status == KDA_OK ? kda::last_info.c_str() : nullptr;
}

}  // extern "C"
