// Reads the positional arguments of the binding's functions into args structs. It checks only what the structs cannot
// express: devices, unknown dtypes, numbers out of range.
#pragma once
#include <kda/kda.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/string.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "contract/tables.h"

namespace kda::binding {

namespace ffi = tvm::ffi;

[[noreturn]] inline void value_error(const std::string& text) { throw ffi::Error("ValueError", text, ""); }

inline int32_t to_dtype(const char* name, DLDataType t) {
  if (t.lanes == 1) {
    if (t.code == kDLFloat && t.bits == 32) return KDA_F32;
    if (t.code == kDLBfloat && t.bits == 16) return KDA_BF16;
    if (t.code == kDLFloat && t.bits == 16) return KDA_F16;
    if (t.code == kDLFloat && t.bits == 64) return KDA_F64;
    if (t.code == kDLInt && t.bits == 32) return KDA_I32;
    if (t.code == kDLInt && t.bits == 64) return KDA_I64;
    if (t.code == kDLBool && t.bits == 8) return KDA_BOOL;
  }
  value_error(std::string(name) + ": expected a floating point, int32, int64 or bool tensor, got DLPack dtype code " +
              std::to_string(t.code) + " with " + std::to_string(t.bits) + " bits");
}

inline std::string device_name(DLDevice d) {
  return (d.device_type == kDLCPU    ? "cpu"
          : d.device_type == kDLCUDA ? "cuda:" + std::to_string(d.device_id)
                                     : "DLPack device type " + std::to_string(d.device_type));
}

// Names the type of an argument that is not what its name wants, in Python's words.
inline std::string what(ffi::AnyView arg) {
  if (const auto text = arg.try_cast<ffi::String>()) return std::string("'").append(*text).append("'");
  const std::string key = arg.GetTypeKey();
  for (const auto& [ours, theirs] : {std::pair{"ffi.BigInt", "an integer beyond 64 bits"},
                                     {"ffi.Array", "a list"},
                                     {"ffi.Map", "a dict"},
                                     {"ffi.Function", "a function"},
                                     {"ffi.OpaquePyObject", "another object"}})
    if (key == ours) return theirs;
  return key;
}

// Refuses a name with a 0 inside, where a C string would end.
inline const char* name_of(const char* argument, const ffi::String& text) {
  if (text.size() != std::strlen(text.c_str()))
    value_error(std::string(argument) + ": expected a name, got one with a character 0 behind '" + text.c_str() + "'");
  return text.c_str();
}

// Reads positional arguments in order. The first tensor decides the device.
class Reader {
 public:
  Reader(const TVMFFIAny* args, int32_t count) : args_(reinterpret_cast<const ffi::AnyView*>(args)), count_(count) {}

  void operand(void* args, const Operand& o) {
    char* const at = static_cast<char*>(args) + o.offset;
    switch (o.type) {
      case Type::kTensor:
        return tensor(o.name, tensor_of(args, o), o.may_be_at == kNowhere ? nullptr : &tensor_of(args, o.may_be_at));
      case Type::kInt: *reinterpret_cast<int32_t*>(at) = integer(o.name); return;
      case Type::kFlag: *reinterpret_cast<int32_t*>(at) = flag(o.name); return;
      case Type::kFloat: *reinterpret_cast<float*>(at) = static_cast<float>(number(o.name)); return;
      case Type::kDouble: *reinterpret_cast<double*>(at) = number(o.name); return;
      case Type::kReserved: return;
    }
  }

  // True stands for the same view as `twin`: cheaper than translating it twice.
  void tensor(const char* name, kda_tensor& out, const kda_tensor* twin = nullptr) {
    const ffi::AnyView arg = next();
    if (arg.type_index() == ffi::TypeIndex::kTVMFFINone) return;
    if (twin && arg.type_index() == ffi::TypeIndex::kTVMFFIBool) {
      if (arg.cast<bool>()) out = *twin;
      return;
    }
    const auto view = arg.try_cast<ffi::TensorView>();
    if (!view) value_error(std::string(name) + ": expected a tensor, got " + what(arg));
    check_device(name, (*view).device());
    out.dtype = to_dtype(name, (*view).dtype());
    out.ndim = (*view).ndim();
    if (out.ndim > KDA_MAX_NDIM || out.ndim < 1)
      value_error(std::string(name) + ": expected 1 to " + std::to_string(KDA_MAX_NDIM) + " dimensions, got " +
                  std::to_string(out.ndim));
    const auto shape = (*view).shape();
    const auto strides = (*view).strides();
    bool empty = false;
    for (int i = 0; i < out.ndim; ++i) out.shape[i] = shape[i], out.stride[i] = strides[i], empty |= shape[i] == 0;
    out.data = empty ? nullptr : static_cast<char*>((*view).data_ptr()) + (*view).byte_offset();
  }
  int32_t integer(const char* name) {
    if (used_ < count_ && args_[used_].type_index() == ffi::TypeIndex::kTVMFFIBool)
      value_error(std::string(name) + ": expected an integer, got " + (args_[used_].cast<bool>() ? "True" : "False"));
    const auto value = scalar<int64_t>(name, "an integer");
    if (value != static_cast<int32_t>(value))
      value_error(std::string(name) + ": expected an integer of 32 bits, got " + std::to_string(value));
    return static_cast<int32_t>(value);
  }
  int64_t size(const char* name) {
    const int32_t value = integer(name);
    if (value < 0) value_error(std::string(name) + ": expected a size, got " + std::to_string(value));
    return value;
  }
  bool flag(const char* name) { return scalar<bool>(name, "True or False"); }
  // Refuses numbers that float32 rounds to infinity, or to 0, which stands for the default in kda.h.
  double number(const char* name) {
    const auto value = scalar<double>(name, "a number");
    const bool too_large = std::isfinite(value) && std::abs(value) > std::numeric_limits<float>::max();
    if (too_large || (value != 0 && static_cast<float>(value) == 0)) {
      char text[32];  // printf would write a comma in some locales
      const auto end = std::to_chars(text, text + sizeof(text), value, std::chars_format::general, 6);
      value_error(std::string(name) + ": expected a number in the range of float32, got " + std::string(text, end.ptr));
    }
    return value;
  }

  // These come last: implementation name, threads, workspace (None: allocated here for the call).
  void exec(kda_exec& e, uint32_t flags) {
    const ffi::AnyView impl = next();
    if (impl.type_index() != ffi::TypeIndex::kTVMFFINone) {
      const auto text = impl.try_cast<ffi::String>();
      if (!text) value_error("impl: expected a name, got " + what(impl));
      impl_ = name_of("impl", *text);
      e.impl = impl_.c_str();
    }
    e.num_threads = integer("num_threads");
    e.flags = flags;
    if (const ffi::AnyView memory = next(); memory.type_index() != ffi::TypeIndex::kTVMFFINone) {
      const auto view = memory.try_cast<ffi::TensorView>();
      if (!view) value_error(std::string("workspace: expected a tensor, got ") + what(memory));
      if ((*view).ndim() != 1 || !(*view).IsContiguous()) value_error("workspace: expected one dense dimension");
      check_device("workspace", (*view).device());
      const DLDataType dtype = (*view).dtype();  // any dtype: only the bytes count
      e.workspace_bytes = static_cast<uint64_t>((*view).shape()[0]) * dtype.bits * dtype.lanes / 8;
      e.workspace = e.workspace_bytes ? static_cast<char*>((*view).data_ptr()) + (*view).byte_offset() : nullptr;
      has_workspace_ = true;
    }
    if (device_.device_type == kDLCUDA) {
      e.device = KDA_CUDA;
      e.device_id = device_.device_id;
      e.stream = TVMFFIEnvGetStream(kDLCUDA, device_.device_id);
    } else if (device_.device_type != kDLCPU) {
      value_error("expected tensors on cpu or cuda, got " + device_name(device_));
    }
  }
  bool more() const { return used_ < count_; }
  void end() const {
    if (used_ != count_)
      value_error("internal: expected " + std::to_string(used_) + " arguments, got " + std::to_string(count_));
  }
  bool has_workspace() const { return has_workspace_; }
  DLDevice device() const { return device_; }

 private:
  void check_device(const char* name, DLDevice device) {
    if (!has_device_) device_ = device, has_device_ = true;
    if (device.device_type != device_.device_type || device.device_id != device_.device_id)
      value_error(std::string(name) + ": expected device " + device_name(device_) + " like the first tensor, got " +
                  device_name(device));
  }
  template <class T>
  T scalar(const char* name, const char* expected) {
    const ffi::AnyView arg = next();
    const auto value = arg.try_cast<T>();
    if (!value) value_error(std::string(name) + ": expected " + expected + ", got " + what(arg));
    return *value;
  }
  ffi::AnyView next() {
    if (used_ == count_) value_error("internal: expected more than " + std::to_string(count_) + " arguments");
    return args_[used_++];
  }
  const ffi::AnyView* args_;
  int32_t count_, used_ = 0;
  DLDevice device_{kDLCPU, 0};
  bool has_device_ = false, has_workspace_ = false;
  std::string impl_;
};

}  // namespace kda::binding
