// Python binding: translates DLPack tensors and scalars into the args structs of kda.h. It checks only what the
// structs cannot express (devices, unknown dtypes, numbers out of range); the library checks the contract.
//
// Every operator has three functions, kda_<op>, kda_<op>_workspace, kda_<op>_explain, with the same positional
// arguments, listed by the read() overloads below and passed in that order by _lib.py. An absent tensor or name is
// None.
#include <kda/kda.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace {

namespace ffi = tvm::ffi;

void check(kda_status status) {
  if (status == KDA_OK) return;
  const char* kind = status == KDA_INVALID_ARGUMENT ? "ValueError"
                     : status == KDA_UNSUPPORTED    ? "NotImplementedError"
                     : status == KDA_OUT_OF_MEMORY  ? "MemoryError"
                                                    : "RuntimeError";
  throw ffi::Error(kind, kda_last_error(), "");
}

std::atomic<uint32_t> all_flags = 0;       // of every call of this process
thread_local bool gpu_is_assumed = false;  // in explain and workspace of this thread: see kda_assume_gpu

[[noreturn]] void value_error(const std::string& text) { throw ffi::Error("ValueError", text, ""); }

int32_t to_dtype(const char* name, DLDataType t) {
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

std::string device_name(DLDevice d) {
  return (d.device_type == kDLCPU    ? "cpu"
          : d.device_type == kDLCUDA ? "cuda:" + std::to_string(d.device_id)
                                     : "DLPack device type " + std::to_string(d.device_type));
}

// Names the type of an argument that is not what its name wants, in Python's words.
std::string what(ffi::AnyView arg) {
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
const char* name_of(const char* argument, const ffi::String& text) {
  if (text.size() != std::strlen(text.c_str()))
    value_error(std::string(argument) + ": expected a name, got one with a character 0 behind '" + text.c_str() + "'");
  return text.c_str();
}

// Reads positional arguments in order. The first tensor decides the device.
class Reader {
 public:
  Reader(const TVMFFIAny* args, int32_t count) : args_(reinterpret_cast<const ffi::AnyView*>(args)), count_(count) {}

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
  bool flag(const char* name) { return scalar<bool>(name, "True or False"); }
  // Refuses numbers that float32 rounds to infinity, or to 0, which stands for the default in kda.h.
  float number(const char* name) { return static_cast<float>(wide_number(name)); }
  // The same, not rounded to f32.
  double wide_number(const char* name) {
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
  void exec(kda_exec& e) {
    const ffi::AnyView impl = next();
    if (impl.type_index() != ffi::TypeIndex::kTVMFFINone) {
      const auto text = impl.try_cast<ffi::String>();
      if (!text) value_error("impl: expected a name, got " + what(impl));
      impl_ = name_of("impl", *text);
      e.impl = impl_.c_str();
    }
    e.num_threads = integer("num_threads");
    e.flags = all_flags.load(std::memory_order_relaxed);
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

// What follows all other arguments of some operators, and only where it is wanted.
template <class Args>
void read_more(Reader&, Args&) {}

void read(Reader& r, kda_inputs& in) {
  r.tensor("q", in.q), r.tensor("k", in.k), r.tensor("v", in.v), r.tensor("g", in.g), r.tensor("beta", in.beta);
  r.tensor("A_log", in.A_log), r.tensor("dt_bias", in.dt_bias), r.tensor("cu_seqlens", in.cu_seqlens);
  in.gate_form = r.integer("gate_form");
  in.beta_form = r.integer("beta_form");
  in.qk_l2norm = r.flag("use_qk_l2norm_in_kernel");
  in.state_layout = r.integer("state_layout");
  in.lower_bound = r.number("lower_bound");
  in.scale = r.number("scale");
}

void read(Reader& r, kda_states& s) {
  r.tensor("h0", s.h0), r.tensor("hT", s.hT, &s.h0), r.tensor("state_indices", s.state_indices),
      r.tensor("has_initial_state", s.has_initial_state);
  s.first_valid_slot = r.integer("first_valid_slot");
}

void read(Reader& r, kda_forward_args& a) {
  read(r, a.in), read(r, a.states);
  r.tensor("o", a.o), r.tensor("checkpoints", a.checkpoints), r.tensor("checkpoint_slots", a.checkpoint_slots);
  r.tensor("h", a.h), r.tensor("v_new", a.v_new), r.tensor("Aqk", a.Aqk), r.tensor("Akk", a.Akk);
  a.checkpoint_every = r.integer("checkpoint_every");
  a.h_every = r.integer("h_every");
}
void read(Reader& r, kda_norm_inputs& n) {
  r.tensor("norm.gate", n.gate), r.tensor("norm.weight", n.weight);
  n.eps = r.wide_number("norm.eps");
  n.activation = r.integer("norm.activation");
  n.apply = r.flag("norm.apply");
}

void read_more(Reader& r, kda_forward_args& a) {
  r.tensor("out_state_indices", a.out_state_indices), r.tensor("checkpoint_offset", a.checkpoint_offset);
  if (r.more()) read(r, a.norm);
}

void read(Reader& r, kda_backward_args& a) {
  read(r, a.in);
  r.tensor("h0", a.h0), r.tensor("d_o", a.d_o), r.tensor("dhT", a.dhT);
  r.tensor("h", a.h), r.tensor("v_new", a.v_new), r.tensor("Aqk", a.Aqk), r.tensor("Akk", a.Akk);
  r.tensor("dq", a.dq), r.tensor("dk", a.dk), r.tensor("dv", a.dv), r.tensor("dg", a.dg), r.tensor("dbeta", a.dbeta);
  r.tensor("dA_log", a.dA_log), r.tensor("d_dt_bias", a.d_dt_bias), r.tensor("dh0", a.dh0);
  a.h_every = r.integer("h_every");
}

void read(Reader& r, kda_decode_args& a) {
  read(r, a.in), read(r, a.states);
  r.tensor("o", a.o);
}

void read(Reader& r, kda_conv_inputs& c) {
  r.tensor("conv.x", c.x), r.tensor("conv.weight", c.weight), r.tensor("conv.bias", c.bias);
  r.tensor("conv.state", c.state), r.tensor("conv.indices", c.indices);
}

// Plain decode steps stay short.
void read_more(Reader& r, kda_decode_args& a) {
  r.tensor("out_state_indices", a.out_state_indices);
  if (!r.more()) return;
  read(r, a.conv);
  r.tensor("snapshots", a.snapshots), r.tensor("snapshot_slots", a.snapshot_slots), r.tensor("accepted", a.accepted);
  if (r.more()) read(r, a.norm);
}

void read(Reader& r, const char* const (&names)[6], kda_records& x) {
  kda_tensor* const tensors[] = {&x.u, &x.k, &x.alpha, &x.indices, &x.ring_first, &x.ring_count};
  for (int i = 0; i < 6; ++i) r.tensor(names[i], *tensors[i]);
}
constexpr const char* kRecords[] = {"records.u",       "records.k",          "records.alpha",
                                    "records.indices", "records.ring_first", "records.ring_count"};
constexpr const char* kLast[] = {"last.u",       "last.k",          "last.alpha",
                                 "last.indices", "last.ring_first", "last.ring_count"};

void read(Reader& r, kda_verify_args& a) {
  read(r, a.in), read(r, a.states), read(r, a.conv);
  r.tensor("o", a.o);
  read(r, kRecords, a.records);
  r.tensor("parents", a.parents);
}
void read_more(Reader& r, kda_verify_args& a) { read(r, a.norm); }

void read(Reader& r, kda_flush_args& a) {
  r.tensor("state", a.state), r.tensor("state_indices", a.state_indices);
  read(r, kRecords, a.records);
  r.tensor("accept_len", a.accept_len), r.tensor("parents", a.parents);
  r.tensor("conv_x", a.conv_x), r.tensor("conv_state", a.conv_state), r.tensor("conv_indices", a.conv_indices);
  a.state_layout = r.integer("state_layout");
  a.first_valid_slot = r.integer("first_valid_slot");
}

void read(Reader& r, kda_flush_verify_args& a) {
  read(r, a.in), read(r, a.states), read(r, a.conv);
  r.tensor("o", a.o);
  read(r, kLast, a.last);
  r.tensor("accept_len", a.accept_len), r.tensor("last_parents", a.last_parents);
  r.tensor("last_conv_x", a.last_conv_x);
  read(r, kRecords, a.records);
  r.tensor("parents", a.parents);
  a.max_tokens = r.integer("max_tokens");
}
void read_more(Reader& r, kda_flush_verify_args& a) { read(r, a.norm); }

void read(Reader& r, kda_segment_map_args& a) {
  read(r, a.in);
  r.tensor("d_o", a.d_o), r.tensor("M", a.M), r.tensor("b", a.b), r.tensor("d", a.d);
}

void read(Reader& r, kda_segment_merge_args& a) {
  r.tensor("M", a.M), r.tensor("b", a.b), r.tensor("h0", a.h0), r.tensor("states", a.states);
  a.state_layout = r.integer("state_layout");
  a.reverse = r.flag("reverse");
}

void read(Reader& r, kda_gate_args& a) {
  r.tensor("x", a.x), r.tensor("A_log", a.A_log), r.tensor("dt_bias", a.dt_bias), r.tensor("g", a.g);
  a.gate_form = r.integer("gate_form");
  a.lower_bound = r.number("lower_bound");
}

void read(Reader& r, kda_gate_backward_args& a) {
  r.tensor("x", a.x), r.tensor("A_log", a.A_log), r.tensor("dt_bias", a.dt_bias), r.tensor("dg", a.dg);
  r.tensor("dx", a.dx), r.tensor("dA_log", a.dA_log), r.tensor("d_dt_bias", a.d_dt_bias);
  a.gate_form = r.integer("gate_form");
  a.lower_bound = r.number("lower_bound");
}

void read(Reader& r, kda_norm_gate_args& a) {
  r.tensor("x", a.x), r.tensor("gate", a.gate), r.tensor("weight", a.weight), r.tensor("y", a.y);
  a.eps = r.wide_number("eps");
  a.activation = r.integer("activation");
}

void read(Reader& r, kda_norm_gate_backward_args& a) {
  r.tensor("x", a.x), r.tensor("gate", a.gate), r.tensor("weight", a.weight), r.tensor("dy", a.dy);
  r.tensor("dx", a.dx), r.tensor("dgate", a.dgate), r.tensor("dweight", a.dweight);
  a.eps = r.wide_number("eps");
  a.activation = r.integer("activation");
}

void read(Reader& r, kda_conv_args& a) {
  r.tensor("x", a.x), r.tensor("weight", a.weight), r.tensor("bias", a.bias), r.tensor("cu_seqlens", a.cu_seqlens);
  r.tensor("initial_state", a.initial_state), r.tensor("final_state", a.final_state);
  r.tensor("state_indices", a.state_indices), r.tensor("has_initial_state", a.has_initial_state), r.tensor("y", a.y);
  a.silu = r.flag("silu");
  a.first_valid_slot = r.integer("first_valid_slot");
}
void read_more(Reader& r, kda_conv_args& a) {
  r.tensor("out_state_indices", a.out_state_indices);
  r.tensor("checkpoints", a.checkpoints), r.tensor("checkpoint_slots", a.checkpoint_slots);
  r.tensor("checkpoint_offset", a.checkpoint_offset);
  a.checkpoint_every = r.integer("checkpoint_every");
}

void read(Reader& r, kda_conv_backward_args& a) {
  r.tensor("x", a.x), r.tensor("weight", a.weight), r.tensor("bias", a.bias), r.tensor("cu_seqlens", a.cu_seqlens);
  r.tensor("initial_state", a.initial_state), r.tensor("dy", a.dy), r.tensor("d_final_state", a.d_final_state);
  r.tensor("dx", a.dx), r.tensor("dweight", a.dweight), r.tensor("dbias", a.dbias);
  r.tensor("d_initial_state", a.d_initial_state);
  a.silu = r.flag("silu");
}

void read(Reader& r, kda_stage& s) {
  r.tensor("cu_seqlens", s.cu_seqlens);
  s.scale = r.number("scale");
  s.state_layout = r.integer("state_layout");
}

void read(Reader& r, kda_stage_cumsum_args& a) {
  read(r, a.at);
  r.tensor("g", a.g), r.tensor("G", a.G);
}

void read(Reader& r, kda_stage_chunk_intra_args& a) {
  read(r, a.at);
  r.tensor("q", a.q), r.tensor("k", a.k), r.tensor("v", a.v), r.tensor("G", a.G), r.tensor("beta", a.beta),
      r.tensor("Aqk", a.Aqk), r.tensor("Akk_inv", a.Akk_inv), r.tensor("w", a.w), r.tensor("u", a.u),
      r.tensor("qG", a.qG), r.tensor("kg", a.kg);
}

void read(Reader& r, kda_stage_recompute_w_u_args& a) {
  read(r, a.at);
  r.tensor("q", a.q), r.tensor("k", a.k), r.tensor("v", a.v), r.tensor("G", a.G), r.tensor("beta", a.beta),
      r.tensor("Akk_inv", a.Akk_inv), r.tensor("w", a.w), r.tensor("u", a.u), r.tensor("qG", a.qG),
      r.tensor("kg", a.kg);
}

void read(Reader& r, kda_stage_delta_h_args& a) {
  read(r, a.at);
  r.tensor("kg", a.kg), r.tensor("w", a.w), r.tensor("u", a.u), r.tensor("G", a.G), r.tensor("h0", a.h0),
      r.tensor("h", a.h), r.tensor("v_new", a.v_new), r.tensor("hT", a.hT);
}

void read(Reader& r, kda_stage_fwd_o_args& a) {
  read(r, a.at);
  r.tensor("q", a.q), r.tensor("v_new", a.v_new), r.tensor("G", a.G), r.tensor("Aqk", a.Aqk), r.tensor("h", a.h),
      r.tensor("o", a.o);
}

void read(Reader& r, kda_stage_bwd_local_args& a) {
  read(r, a.at);
  r.tensor("v_new", a.v_new), r.tensor("d_o", a.d_o), r.tensor("Aqk", a.Aqk), r.tensor("dAqk", a.dAqk),
      r.tensor("dv_local", a.dv_local);
}

void read(Reader& r, kda_stage_bwd_delta_h_args& a) {
  read(r, a.at);
  r.tensor("qG", a.qG), r.tensor("kg", a.kg), r.tensor("w", a.w), r.tensor("G", a.G), r.tensor("d_o", a.d_o),
      r.tensor("dv_local", a.dv_local), r.tensor("dhT", a.dhT), r.tensor("dh", a.dh), r.tensor("dv_new", a.dv_new),
      r.tensor("dh0", a.dh0);
}

void read(Reader& r, kda_stage_bwd_wy_dqkg_args& a) {
  read(r, a.at);
  r.tensor("q", a.q), r.tensor("k", a.k), r.tensor("v", a.v), r.tensor("v_new", a.v_new), r.tensor("G", a.G),
      r.tensor("beta", a.beta), r.tensor("Akk_inv", a.Akk_inv), r.tensor("h", a.h), r.tensor("dh", a.dh),
      r.tensor("d_o", a.d_o), r.tensor("dv_new", a.dv_new), r.tensor("dq", a.dq), r.tensor("dk", a.dk),
      r.tensor("dv", a.dv), r.tensor("dbeta", a.dbeta), r.tensor("dG", a.dG), r.tensor("dAkk", a.dAkk);
}

void read(Reader& r, kda_stage_bwd_intra_args& a) {
  read(r, a.at);
  r.tensor("q", a.q), r.tensor("k", a.k), r.tensor("G", a.G), r.tensor("beta", a.beta), r.tensor("dAqk", a.dAqk),
      r.tensor("dAkk", a.dAkk), r.tensor("dq", a.dq), r.tensor("dk", a.dk), r.tensor("dbeta", a.dbeta),
      r.tensor("dG", a.dG);
}

void read(Reader& r, kda_stage_cumsum_backward_args& a) {
  read(r, a.at);
  r.tensor("g", a.g), r.tensor("dG", a.dG), r.tensor("dg", a.dg);
}

void read(Reader& r, kda_prefill_f32_args& a) {
  r.tensor("q", a.q), r.tensor("k", a.k), r.tensor("v", a.v), r.tensor("g", a.g), r.tensor("beta", a.beta);
  r.tensor("h0", a.h0), r.tensor("o", a.o), r.tensor("w", a.w), r.tensor("u", a.u), r.tensor("hT", a.hT);
  a.chunk = r.integer("chunk");
  a.state_layout = r.integer("state_layout");
  a.scale = r.number("scale");
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

  Call(const TVMFFIAny* packed, int32_t count) : reader(packed, count) {
    read(reader, args);
    reader.exec(args.exec);
    if (reader.more()) read_more(reader, args);
    reader.end();
  }

  // explain and workspace answer for the assumed GPU; the tensors are on the CPU and are never read.
  void assume() {
    if (gpu_is_assumed) args.exec.device = KDA_CUDA;
  }

  // Scratch for one call: from the framework's allocator on a GPU (it knows the stream), malloc on the CPU.
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
    } else {
      device = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::Shape({static_cast<int64_t>(bytes)}),
                                         DLDataType{kDLUInt, 8, 1}, reader.device());
      args.exec.workspace = device.data_ptr();
    }
    args.exec.workspace_bytes = bytes;
  }
};

}  // namespace

#define KDA_EXPORT(name) \
  TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result)

#define KDA_BIND(op)                                                       \
  KDA_EXPORT(kda_##op) {                                                   \
    TVM_FFI_SAFE_CALL_BEGIN();                                             \
    (void)result;                                                          \
    Call<kda_##op##_args> call(args, count);                               \
    if (!call.reader.has_workspace()) call.allocate(kda_##op##_workspace); \
    check(kda_##op(&call.args));                                           \
    TVM_FFI_SAFE_CALL_END();                                               \
  }                                                                        \
  KDA_EXPORT(kda_##op##_workspace) {                                       \
    TVM_FFI_SAFE_CALL_BEGIN();                                             \
    Call<kda_##op##_args> call(args, count);                               \
    call.assume();                                                         \
    uint64_t bytes = 0;                                                    \
    check(kda_##op##_workspace(&call.args, &bytes));                       \
    *reinterpret_cast<ffi::Any*>(result) = static_cast<int64_t>(bytes);    \
    TVM_FFI_SAFE_CALL_END();                                               \
  }                                                                        \
  KDA_EXPORT(kda_##op##_explain) {                                         \
    TVM_FFI_SAFE_CALL_BEGIN();                                             \
    Call<kda_##op##_args> call(args, count);                               \
    call.assume();                                                         \
    const char* text = "";                                                 \
    check(kda_##op##_explain(&call.args, &text));                          \
    *reinterpret_cast<ffi::Any*>(result) = ffi::String(text);              \
    TVM_FFI_SAFE_CALL_END();                                               \
  }

extern "C" {
KDA_BIND(forward)
KDA_BIND(backward)
KDA_BIND(decode)
KDA_BIND(verify)
KDA_BIND(flush)
KDA_BIND(flush_verify)
KDA_BIND(segment_map)
KDA_BIND(segment_merge)
KDA_BIND(gate)
KDA_BIND(gate_backward)
KDA_BIND(norm_gate)
KDA_BIND(norm_gate_backward)
KDA_BIND(conv)
KDA_BIND(conv_backward)
KDA_BIND(stage_cumsum)
KDA_BIND(stage_chunk_intra)
KDA_BIND(stage_recompute_w_u)
KDA_BIND(stage_delta_h)
KDA_BIND(stage_fwd_o)
KDA_BIND(stage_bwd_local)
KDA_BIND(stage_bwd_delta_h)
KDA_BIND(stage_bwd_wy_dqkg)
KDA_BIND(stage_bwd_intra)
KDA_BIND(stage_cumsum_backward)
KDA_BIND(prefill_f32)
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_info, []() {
  const char* text = kda_info();
  if (!text) value_error(kda_last_error());
  return ffi::String(text);
})
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_implementation, [](ffi::String op, int64_t index) {
  const char* name = kda_implementation(name_of("op", op), static_cast<int32_t>(index));
  return ffi::String(name ? name : "");
})
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_current_name, [](ffi::String op, ffi::String name) {
  const char* current = kda_current_name(name_of("op", op), name_of("name", name));
  return ffi::String(current ? current : "");
})
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_assume_gpu, [](int64_t capability, int64_t multiprocessors) {
  check(kda_assume_gpu(static_cast<int32_t>(capability), static_cast<int32_t>(multiprocessors)));
  gpu_is_assumed = capability != 0;
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_use_batch_invariant,
                              [](bool enabled) { return all_flags.exchange(enabled ? KDA_BATCH_INVARIANT : 0) != 0; })
