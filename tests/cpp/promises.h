// Runs any operator on a case and gives back every output's bits, whole or of one sequence or head.
#pragma once
#include <cstring>
#include <map>

#include "calls.h"
#include "stage_calls.h"

namespace kda::test {

struct Variant {
  std::string op, impl;
};
inline void PrintTo(const Variant& v, std::ostream* out) { *out << v.impl << " " << v.op; }
inline std::string promise_name(const testing::TestParamInfo<Variant>& info) {
  return info.param.op + "_" + info.param.impl;
}

// Every operator but the gates (which have no sequences), with all outputs that it can give. "forward" saves
// everything where the implementation can; "backward" recomputes; "backward_states" is given the state before every
// other chunk, "backward_saved" all that forward can save.
inline std::vector<Variant> promise_params() {
  std::vector<Variant> all;
  for (const std::string& impl : cpu_implementations("forward")) all.push_back({"forward", impl});
  for (const std::string& impl : cpu_implementations("backward")) {
    all.push_back({"backward", impl});
    all.push_back({"backward_states", impl});
    all.push_back({"backward_saved", impl});
  }
  for (const std::string& impl : cpu_implementations("decode")) all.push_back({"decode", impl});
  for (const std::string& impl : cpu_implementations("segment_map")) all.push_back({"segment_map", impl});
  all.push_back({"backward_stages", "cpu_chunk"});  // all of them, forward and backward
  return all;
}
inline std::vector<Variant> stateful_params() {
  std::vector<Variant> all = promise_params();
  std::erase_if(all, [](const Variant& v) { return v.op != "forward" && v.op != "decode"; });
  return all;
}

// Name of the output, and the tensor.
using Results = std::map<std::string, Tensor>;
inline bool operator==(const Results& a, const Results& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, t] : a)
    if (!b.contains(name) || t.bits() != b.at(name).bits()) return false;
  return true;
}
inline bool operator!=(const Results& a, const Results& b) { return !(a == b); }

inline void expect_same(const Results& got, const Results& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, t] : expected) EXPECT_EQ(got.at(name).bits(), t.bits()) << name << " of " << what;
}

struct Conditions {
  int threads = 0;
  int workspace_for_threads = 0;  // 0: as many as run
  unsigned char workspace_fill = 0xff, output_fill = 0xff;
  uint32_t flags = 0;
};

template <class Args>
void run_under(Args args, const char* impl, const Conditions& how) {
  args.exec.impl = impl;
  args.exec.flags = how.flags;
  args.exec.num_threads = how.workspace_for_threads ? how.workspace_for_threads : how.threads;
  uint64_t bytes = 0;
  ASSERT_EQ(query(args, &bytes), KDA_OK) << kda_last_error();
  const Workspace workspace(bytes, how.workspace_fill);
  args.exec.workspace = bytes ? workspace.data() : nullptr;
  args.exec.workspace_bytes = bytes;
  args.exec.num_threads = how.threads;
  ASSERT_EQ(call(args), KDA_OK) << kda_last_error();
  EXPECT_TRUE(workspace.margins_intact());
}

class PromiseBase : public testing::TestWithParam<Variant> {
 protected:
  static void keep(Results& all, const char* name, Tensor& t) {
    if (!t) return;
    EXPECT_TRUE(t.margins_intact()) << name;
    all[name] = std::move(t);
  }
  static void prepare(Tensor& t, const Conditions& how) {
    if (how.output_fill != 0xff && t) t.fill(how.output_fill);
  }

  Results results(const Inputs& in, const Conditions& how) {
    const char* impl = GetParam().impl.c_str();
    Results all;
    if (GetParam().op == "decode") {
      Tensor o(in.c.dtype, {in.B, in.T, in.c.HV, in.c.V}), hT(in.c.state_dtype, in.state_shape(in.N), in.c.layout);
      prepare(o, how), prepare(hT, how);
      kda_decode_args a = KDA_DECODE_ARGS_INIT;
      a.in = in.view(), a.states.h0 = in.h0, a.states.hT = hT, a.o = o;
      run_under(a, impl, how);
      keep(all, "o", o), keep(all, "hT", hT);
    } else if (GetParam().op == "segment_map") {
      SegmentOutputs out(in);
      for (const auto& [name, t] : out.tensors()) prepare(*t, how);
      run_under(segment_map_args(in, out), impl, how);
      for (const auto& [name, t] : out.tensors()) keep(all, name, *t);
    } else if (GetParam().op == "backward_stages") {
      StageTensors t(in, KDA_F32, KDA_F32);
      for (auto& [name, tensor] : t.all)
        if (!t.is_input(name)) prepare(tensor, how);
      const auto step = [&](const auto& args) { run_under(args, impl, how); };
      for_each_forward_stage(t, step);
      for_each_backward_stage(t, step);
      for (auto& [name, tensor] : t.all)  // (their dq and dk have value heads)
        if (!t.is_input(name)) keep(all, (name == "dq" || name == "dk" ? name + "_hv" : name).c_str(), tensor);
    } else if (GetParam().op == "forward") {
      const bool saves = why_not(forward_args(in, ForwardOutputs(in, true)), impl).empty();
      ForwardOutputs out(in, saves);
      for (const auto& [name, t] : out.tensors()) prepare(*t, how);
      run_under(forward_args(in, out), impl, how);
      for (const auto& [name, t] : out.tensors()) keep(all, name, *t);
    } else {
      const bool from_states = GetParam().op == "backward_states", from_saved = GetParam().op == "backward_saved";
      ForwardOutputs saved(in, from_saved);
      if (from_states) saved.save_states(in, 2);
      if (from_states || from_saved) run(forward_args(in, saved));
      BackwardOutputs out(in);
      for (const auto& [name, t] : out.tensors()) prepare(*t, how);
      run_under(backward_args(in, out, from_states || from_saved ? &saved : nullptr), impl, how);
      for (const auto& [name, t] : out.tensors()) keep(all, name, *t);
    }
    return all;
  }
};
class Promise : public PromiseBase {
 protected:
  // Whether this operator reads the input.
  static bool reads(const std::string& input) {
    const std::string& op = GetParam().op;
    if (op == "segment_map") return input != "h0" && input != "dhT";
    return op.starts_with("backward") || input[0] != 'd';
  }
};

// Runs forward or decode with chosen states.
class StatefulPromise : public PromiseBase {
 protected:
  void run_states(const kda_inputs& view, const kda_states& states, const kda_tensor& o) {
    const char* impl = GetParam().impl.c_str();
    if (GetParam().op == "decode") {
      kda_decode_args a = KDA_DECODE_ARGS_INIT;
      a.in = view, a.states = states, a.o = o;
      run(a, {.impl = impl});
    } else {
      kda_forward_args a = KDA_FORWARD_ARGS_INIT;
      a.in = view, a.states = states, a.o = o;
      run(a, {.impl = impl});
    }
  }
  Tensor run_o(const Inputs& in) {
    Tensor o(in.c.dtype, {in.B, in.T, in.c.HV, in.c.V});
    kda_states states{};
    states.h0 = in.h0;
    run_states(in.view(), states, o);
    return o;
  }
  // Runs tokens t0 .. t1-1 of the only row, from h0 to hT.
  void run_slice(const Inputs& in, int64_t t0, int64_t t1, const Tensor& h0, const Tensor& hT, const Tensor& o) {
    const auto slice = [&](kda_tensor t) {
      t.data = static_cast<char*>(t.data) + t0 * t.stride[1] * (t.dtype == KDA_F32 ? 4 : 2);
      t.shape[1] = t1 - t0;
      return t;
    };
    kda_inputs view = in.view();
    for (kda_tensor* t : {&view.q, &view.k, &view.v, &view.g, &view.beta}) *t = slice(*t);
    kda_states states{};
    states.h0 = h0, states.hT = hT;
    run_states(view, states, slice(o));
  }
  Tensor run_pool(const Inputs& in, const Pool& h0, const Pool& hT) {
    Tensor o(in.c.dtype, {in.B, in.T, in.c.HV, in.c.V});
    const kda_decode_args a = decode_args(in, h0, hT, o);
    run_states(a.in, a.states, o);
    return o;
  }
  Tensor run_pool(const Inputs& in, const Pool& pool) { return run_pool(in, pool, pool); }
};

// ---- parts of inputs and results ----

// Indices first .. first+n-1 of one dimension, dense.
inline Tensor cut(const Tensor& t, int dim, int64_t first, int64_t n) {
  if (!t) return {};
  std::vector<int64_t> shape = t.shape();
  shape[dim] = n;
  Tensor out(t.dtype(), shape);
  const Bits bits = t.bits(dim, first, n);
  const size_t size = out.size() ? bits.bytes.size() / out.size() : 0;
  for (int64_t i = 0; i < out.size(); ++i) out.set_bits(i, bits.bytes.data() + i * size);
  return out;
}

// Sequence n alone: a batch of one without cu_seqlens.
inline Inputs row_of(const Inputs& in, int64_t n) {
  Case c = in.c;
  c.B = 1, c.T = in.length(n), c.lengths.clear(), c.tail = 0, c.layout = Layout::kDense;
  Inputs one(c);
  const auto rows = [&](const Tensor& t) {
    return in.cu_seqlens ? cut(t, 1, in.begin(n), in.length(n)) : cut(t, 0, n, 1);
  };
  one.q = rows(in.q), one.k = rows(in.k), one.v = rows(in.v), one.g = rows(in.g), one.beta = rows(in.beta);
  one.d_o = rows(in.d_o), one.h0 = cut(in.h0, 0, n, 1), one.dhT = cut(in.dhT, 0, n, 1);
  one.A_log = in.A_log.clone(), one.dt_bias = in.dt_bias.clone();
  return one;
}

inline bool is_state(const std::string& name) {
  return name == "hT" || name == "dh0" || name == "M" || name == "b" || name == "d";
}

// The results that belong to sequence n. Sums over all tokens belong to none.
inline Results part(const Results& all, const Inputs& in, int64_t n) {
  Results one;
  int64_t first_chunk = 0;
  for (int64_t m = 0; m < n; ++m) first_chunk += (in.length(m) + 63) / 64;
  for (const auto& [name, t] : all) {
    if (name == "dA_log" || name == "d_dt_bias") continue;
    if (is_state(name)) one[name] = cut(t, 0, n, 1);
    else if (name == "h" || name == "dh") one[name] = cut(t, 0, first_chunk, (in.length(n) + 63) / 64);
    else if (in.cu_seqlens) one[name] = cut(t, 1, in.begin(n), in.length(n));
    else one[name] = cut(t, 0, n, 1);
  }
  return one;
}

// The results that belong to value head hv alone: dq and dk are sums over the value heads of a query/key head.
inline Results head(const Results& all, const Inputs& in, int64_t hv) {
  Results one;
  for (const auto& [name, t] : all) {
    const int64_t h = hv / (in.c.HV / in.c.H);
    const bool per_qk_head = name == "dq" || name == "dk";
    if (per_qk_head && h != 0) continue;  // query/key head 1 has the spoilt value head
    one[name] = cut(t, is_state(name) || name == "h" || name == "dh" ? 1 : 2, per_qk_head ? h : hv, 1);
  }
  return one;
}

inline Tensor& tensor(Inputs& in, const std::string& name) {
  for (const auto& [n, t] : in.tensors())
    if (name == n) return *t;
  ADD_FAILURE() << name;
  return in.q;
}

// Sets one element of `name` of packed sequence n to x.
inline void spoil(Inputs& in, const std::string& name, int64_t n, double x) {
  Tensor& t = tensor(in, name);
  const bool state = name == "h0" || name == "dhT";
  const int64_t row = t.size() / (state ? in.N : in.T);
  t.set((state ? n : in.begin(n)) * row + row / 2, x);
}
// Sets one element of value head hv in the middle of the row to x.
inline void spoil_head(Inputs& in, const std::string& name, int64_t hv, double x) {
  Tensor& t = tensor(in, name);
  const int64_t row = t.size() / (name == "h0" ? 1 : in.T), size = row / in.c.HV;
  t.set((name == "h0" ? 0 : in.T / 2) * row + hv * size + size / 2, x);
}

}  // namespace kda::test
