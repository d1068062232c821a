// Python binding: translates DLPack tensors and scalars into the args structs of kda.h. The library checks the
// contract.
//
// Every operator has three functions, kda_<op>, kda_<op>_workspace, kda_<op>_explain, with the same positional
// arguments: the operands in the order of its table (src/contract/tables.h), impl, num_threads and workspace, then the
// trailing operands, of which any number may be left off at the end. An absent tensor or name is None.
//
// kda_decode_rows takes N and T, then the arguments of kda_decode with the tokens of all requests in rows: see _rows.h.
#include "_memory.h"
#include "_reader.h"
#include "_rows.h"

#include <tvm/ffi/function.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "contract/operators.h"
#include "contract/tables_stages.h"

namespace kda::binding {
namespace {

void check(kda_status status) {
  if (status == KDA_OK) return;
  const char* kind = status == KDA_INVALID_ARGUMENT ? "ValueError"
                     : status == KDA_UNSUPPORTED    ? "NotImplementedError"
                     : status == KDA_OUT_OF_MEMORY  ? "MemoryError"
                                                    : "RuntimeError";
  throw ffi::Error(kind, kda_last_error(), "");
}

std::atomic<uint32_t> all_flags = 0;       // of every call of this process
thread_local int own_invariance = -1;      // 0 or 1: batch invariance of this thread's calls, whatever all_flags says
thread_local bool gpu_is_assumed = false;  // in explain and workspace of this thread: see kda_assume_gpu

uint32_t flags_of_call() {
  if (own_invariance < 0) return all_flags.load(std::memory_order_relaxed);
  return own_invariance ? KDA_BATCH_INVARIANT : 0;
}

// At most four tokens a request, and states that are updated where they are or stored V-first. Must be safe for
// invalid calls, too.
bool decodes_few(const kda_inputs& in, const kda_states& s) {
  const int64_t T = in.q.shape[1];
  if (in.state_layout != KDA_STATE_V_FIRST && (s.h0.dtype != KDA_F32 || s.hT.dtype != KDA_F32)) return false;
  return T <= 4 || (in.cu_seqlens.ndim == 1 && T / 4 < in.cu_seqlens.shape[0] - 1);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

template <class Args>
struct Call {
  Reader reader;
  Args args = kda_args_init<Args>();
  std::unique_ptr<void, Free> host;
  ffi::Tensor device;
  std::optional<StreamMemory> memory;

  Call(const TVMFFIAny* packed, int32_t count) : reader(packed, count) {
    constexpr const auto& operands = Table<Args>::operands;
    constexpr size_t first_trailing =
        std::find_if(operands.begin(), operands.end(), [](const Operand& o) { return o.trailing; }) - operands.begin();
    for (size_t i = 0; i < first_trailing; ++i) reader.operand(&args, operands[i]);
    reader.exec(args.exec, flags_of_call());
    for (size_t i = first_trailing; i < operands.size() && reader.more(); ++i) reader.operand(&args, operands[i]);
    reader.end();
  }

  void run(kda_status (*function)(const Args*), kda_status (*workspace)(const Args*, uint64_t*)) {
    if (!reader.has_workspace()) allocate(workspace);
    check(function(&args));
  }

  // explain and workspace answer for the assumed GPU; the tensors are on the CPU and are never read.
  void assume() {
    if (gpu_is_assumed) args.exec.device = KDA_CUDA;
  }

  // Scratch for one call: malloc on the CPU. On a GPU the allocator of the arguments' framework, for its current
  // stream, on which the call runs. Where no argument has one, as with arrays of other libraries, the driver's.
  void allocate(kda_status (*workspace)(const Args*, uint64_t*)) {
    // Decode of few tokens needs no workspace on the CPU (kda.h). Asking would validate the call twice, which takes a
    // twentieth of a small step.
    if constexpr (std::is_same_v<Args, kda_decode_args>)
      if (reader.device().device_type == kDLCPU && args.conv.x.ndim == 0 && decodes_few(args.in, args.states)) return;
    uint64_t bytes = 0;
    check(workspace(&args, &bytes));
    if (!bytes) return;
    if (reader.device().device_type == kDLCPU) {
      host.reset(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
      if (!host)
        throw ffi::Error("MemoryError", "workspace: could not allocate " + std::to_string(bytes) + " bytes", "");
      args.exec.workspace = host.get();
    } else if (!TVMFFIEnvGetDLPackManagedTensorAllocator()) {
      try {
        memory.emplace(reader.device().device_id, args.exec.stream, bytes);
      } catch (const MemoryFailure& failure) {
        throw ffi::Error(failure.full ? "MemoryError" : "RuntimeError", "workspace: " + failure.text, "");
      }
      args.exec.workspace = memory->data();
    } else {
      device = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::Shape({static_cast<int64_t>(bytes)}),
                                         DLDataType{kDLUInt, 8, 1}, reader.device());
      args.exec.workspace = device.data_ptr();
    }
    args.exec.workspace_bytes = bytes;
  }
};

}  // namespace
}  // namespace kda::binding

#define KDA_EXPORT(name) \
  TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result)

#define KDA_BIND(op)                                                         \
  KDA_EXPORT(kda_##op) {                                                     \
    TVM_FFI_SAFE_CALL_BEGIN();                                               \
    (void)result;                                                            \
    kda::binding::Call<kda_##op##_args> call(args, count);                   \
    call.run(kda_##op, kda_##op##_workspace);                                \
    TVM_FFI_SAFE_CALL_END();                                                 \
  }                                                                          \
  KDA_EXPORT(kda_##op##_workspace) {                                         \
    TVM_FFI_SAFE_CALL_BEGIN();                                               \
    kda::binding::Call<kda_##op##_args> call(args, count);                   \
    call.assume();                                                           \
    uint64_t bytes = 0;                                                      \
    kda::binding::check(kda_##op##_workspace(&call.args, &bytes));           \
    *reinterpret_cast<tvm::ffi::Any*>(result) = static_cast<int64_t>(bytes); \
    TVM_FFI_SAFE_CALL_END();                                                 \
  }                                                                          \
  KDA_EXPORT(kda_##op##_explain) {                                           \
    TVM_FFI_SAFE_CALL_BEGIN();                                               \
    kda::binding::Call<kda_##op##_args> call(args, count);                   \
    call.assume();                                                           \
    const char* text = "";                                                   \
    kda::binding::check(kda_##op##_explain(&call.args, &text));              \
    *reinterpret_cast<tvm::ffi::Any*>(result) = tvm::ffi::String(text);      \
    TVM_FFI_SAFE_CALL_END();                                                 \
  }

extern "C" {
KDA_FOR_EACH_OPERATOR(KDA_BIND)
KDA_EXPORT(kda_decode_rows) {
  TVM_FFI_SAFE_CALL_BEGIN();
  (void)result;
  kda::binding::Reader sizes(args, count);
  const int64_t N = sizes.size("N"), T = sizes.size("T");
  kda::binding::Call<kda_decode_args> call(args + 2, count - 2);
  kda::binding::take_rows(call.args, N, T);
  call.run(kda_decode, kda_decode_workspace);
  TVM_FFI_SAFE_CALL_END();
}
}

namespace kda::binding {
namespace {

// One line an operand, its columns separated by tabs: see Operand in call/run.py.
std::string text_of(std::span<const Operand> operands) {
  static constexpr const char* types[] = {"tensor", "int", "bool", "float", "float"};
  static constexpr const char* roles[] = {"in", "out", "inout"};
  static constexpr const char* dtypes[] = {"float32", "bfloat16", "float16", "float64", "int32", "int64", "bool"};
  std::string text;
  for (const Operand& o : operands) {
    if (o.type == Type::kReserved) continue;
    std::string member = o.group, all;
    member += *o.group ? "." : "";
    for (int i = 0; i < 7; ++i)
      if (o.dtypes & bit(KDA_F32 + i)) all += (all.empty() ? "" : " ") + std::string(dtypes[i]);
    for (const std::string& column :
         {std::string(o.name), member + o.member, std::string(types[static_cast<int>(o.type)]),
          std::string(roles[static_cast<int>(o.role)]),
          std::string(o.with       ? "together"
                      : o.optional ? "optional"
                      : o.needs    ? "needed"
                                   : ""),
          std::string(o.trailing ? "trailing" : ""), all, std::string(o.shape_text),
          std::string(o.needs  ? o.needs
                      : o.with ? o.with
                               : ""),
          std::string(o.may_be ? o.may_be : "") + (o.or_be ? std::string(" ") + o.or_be : "")})
      text += column + '\t';
    text.back() = '\n';
  }
  return text;
}

std::string operands_text(const std::string& op) {
#define KDA_TEXT(name) \
  if (op == #name) return text_of(operands_of<kda_##name##_args>());
  KDA_FOR_EACH_OPERATOR(KDA_TEXT)
#undef KDA_TEXT
  value_error("op: expected an operator, got '" + op + "'");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_info, []() {
  const char* text = kda_info();
  if (!text) value_error(kda_last_error());
  return ffi::String(text);
})
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_implementation, [](ffi::String op, int64_t index) {
  const char* name = kda_implementation(name_of("op", op), static_cast<int32_t>(index));
  return ffi::String(name ? name : "");
})
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_assume_gpu, [](int64_t capability, int64_t multiprocessors) {
  check(kda_assume_gpu(static_cast<int32_t>(capability), static_cast<int32_t>(multiprocessors)));
  gpu_is_assumed = capability != 0;
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_read_environment, []() { check(kda_read_environment()); })
// For all threads, but for this one alone where it has its own.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_use_batch_invariant, [](bool enabled) {
  if (own_invariance >= 0) return std::exchange(own_invariance, enabled ? 1 : 0) != 0;
  return all_flags.exchange(enabled ? KDA_BATCH_INVARIANT : 0) != 0;
})
// own_invariance, and what it was.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_batch_invariant_here, [](int64_t own) {
  return static_cast<int64_t>(std::exchange(own_invariance, static_cast<int>(own)));
})
#define KDA_NAME(op) #op " "
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_operators, []() { return ffi::String(KDA_FOR_EACH_OPERATOR(KDA_NAME)); })
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_operands, [](ffi::String op) { return ffi::String(operands_text(op)); })

}  // namespace kda::binding
