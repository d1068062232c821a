// What every operator refuses: structs of another size, tensors that are absent, of the wrong rank, size, dtype, stride
// or alignment, memory that overlaps, wrong options of exec. One loop over the tensors of each args struct.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "contract.h"
#include "contract/dtype.h"

namespace kda::test {
namespace {

template <class Args>
struct Contract : testing::Test {};
template <class Args>
constexpr bool kIsConv = std::is_same_v<Args, kda_conv_args> || std::is_same_v<Args, kda_conv_backward_args>;
TYPED_TEST_SUITE(Contract, AllArgs, OperatorNames);

// Without this, a refusal below could have another reason than the one it tests.
TYPED_TEST(Contract, LegalCallRuns) {
  Legal<TypeParam> x;
  const Workspace workspace = workspace_for(x.args);
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
  for (const Tensor* t : x.outputs()) EXPECT_TRUE(t->margins_intact());
}

// ---- the struct ----

TYPED_TEST(Contract, NullArgs) {
  EXPECT_EQ(call(static_cast<const TypeParam*>(nullptr)), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "args: expected a pointer, got NULL");
}

TYPED_TEST(Contract, NullResults) {
  Legal<TypeParam> x;
  EXPECT_EQ(query(x.args, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "bytes: expected a pointer, got NULL");
  EXPECT_EQ(explain(x.args, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "text: expected a pointer, got NULL");
}

// The size that the first header gave to the struct.
template <class Args>
constexpr uint64_t first_size() {
  if constexpr (requires(Args a) { a.out_state_indices; }) return offsetof(Args, out_state_indices);
  else if constexpr (requires(Args a) { a.norm; }) return offsetof(Args, norm);
  else if constexpr (requires(Args a) { a.x1; }) return offsetof(Args, x1);
  else return sizeof(Args);
}

TYPED_TEST(Contract, StructSize) {
  const std::string expected = "args.struct_size: expected " + std::to_string(sizeof(TypeParam));
  const uint64_t first = first_size<TypeParam>();
  for (const uint64_t size : {uint64_t{0}, uint64_t{8}, first - 8, uint64_t{1} << 20, UINT64_MAX})
    refuses<TypeParam>(expected + " (sizeof the args struct), got " + std::to_string(size),
                       [&](auto& x) { x.args.struct_size = size; });
}

// A caller compiled against the first header: what follows its struct in memory is not read.
TYPED_TEST(Contract, SmallerStruct) {
  Legal<TypeParam> x;
  const Workspace workspace = workspace_for(x.args);
  const uint64_t first = first_size<TypeParam>();
  x.args.struct_size = first;
  std::memset(reinterpret_cast<char*>(&x.args) + first, 0x7f, sizeof x.args - first);
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
}

// A caller compiled against a later header, with more fields at the end: zero is the default this library knows.
TYPED_TEST(Contract, LargerStruct) {
  struct Later {
    TypeParam args;
    uint64_t more[4];
  };
  Legal<TypeParam> x;
  const Workspace workspace = workspace_for(x.args);
  Later later{x.args, {}};
  std::vector<Bits> before;
  for (const Tensor* t : x.outputs()) before.push_back(t->bits());
  later.args.struct_size = sizeof later;
  later.more[3] = 1;
  EXPECT_EQ(call(later.args), KDA_INVALID_ARGUMENT);
  const std::string error = kda_last_error();
  EXPECT_EQ(error.rfind("args.struct_size: expected " + std::to_string(sizeof(TypeParam)) + ", got " +
                            std::to_string(sizeof later) + " with fields set that this library",
                        0),
            0u)
      << error;
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(x.outputs()[i]->bits(), before[i]);
  later.more[3] = 0;
  EXPECT_EQ(call(later.args), KDA_OK) << kda_last_error();
  EXPECT_NE(x.outputs().front()->bits(), before.front());
}

// ---- exec ----

TYPED_TEST(Contract, Exec) {
  refuses<TypeParam>("exec.device: expected 0..1, got -1", [](auto& x) { x.args.exec.device = -1; });
  refuses<TypeParam>("exec.device: expected 0..1, got 2", [](auto& x) { x.args.exec.device = 2; });
  refuses<TypeParam>("exec.device_id: expected 0 on the CPU, got 1", [](auto& x) { x.args.exec.device_id = 1; });
  refuses<TypeParam>("exec.device_id: expected >= 0, got -1",
                     [](auto& x) { x.args.exec.device = KDA_CUDA, x.args.exec.device_id = -1; });
  refuses<TypeParam>("exec.num_threads: expected >= 0, got -1", [](auto& x) { x.args.exec.num_threads = -1; });
  refuses<TypeParam>("exec.flags: expected 0 or KDA_BATCH_INVARIANT, got 2", [](auto& x) { x.args.exec.flags = 2; });
  refuses<TypeParam>("exec.workspace: expected 4096 bytes, got NULL",
                     [](auto& x) { x.args.exec.workspace = nullptr, x.args.exec.workspace_bytes = 4096; });
  refuses<TypeParam>("exec.workspace: expected an address aligned to 256, got 0x", [](auto& x) {
    static char memory[1024];
    x.args.exec.workspace = memory + (256 - reinterpret_cast<uintptr_t>(memory) % 256) + 64;
    x.args.exec.workspace_bytes = 512;
  });
  refuses<TypeParam>("exec.impl: expected one of ", [](auto& x) { x.args.exec.impl = "fastest"; });
  Legal<TypeParam> x;
  x.args.exec.impl = "fastest";
  EXPECT_NE(call(x.args), KDA_OK);
  EXPECT_NE(std::string(kda_last_error()).find(", got fastest"), std::string::npos) << kda_last_error();
}

TYPED_TEST(Contract, WorkspaceTooSmall) {
  Legal<TypeParam> x;
  const Workspace workspace = workspace_for(x.args);
  if (x.args.exec.workspace_bytes == 0) GTEST_SKIP() << "needs no workspace";
  x.args.exec.num_threads = 1;
  uint64_t least = 0;
  ASSERT_EQ(query(x.args, &least), KDA_OK);
  const std::string sentence = "exec.workspace_bytes: expected at least " + std::to_string(least) + " (";
  x.args.exec.workspace_bytes = least - 1;
  expect_refused(x, sentence);
  EXPECT_NE(std::string(kda_last_error()).find(", got " + std::to_string(least - 1)), std::string::npos);
  x.args.exec.workspace = nullptr, x.args.exec.workspace_bytes = 0;
  expect_refused(x, sentence);
  x.args.exec.workspace = workspace.data(), x.args.exec.workspace_bytes = least;
  x.args.exec.num_threads = 4;  // one thread's share is enough, however many were asked for
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
}

// Memory for one tensor, far from all others. (Nothing is read before the call is refused.)
struct Apart {
  static constexpr size_t kBytes = 1 << 16;
  Apart() : data(static_cast<char*>(std::aligned_alloc(256, kBytes))) { std::memset(data, 0, kBytes); }
  ~Apart() { std::free(data); }
  Apart(const Apart&) = delete;
  char* data;
};

// A workspace that meets a tensor anywhere is refused, in any operator, on either device.
TYPED_TEST(Contract, WorkspaceOverATensor) {
  const Apart memory;
  const size_t count = Legal<TypeParam>().fields().size();
  for (size_t i = 0; i < count; ++i)
    for (const int32_t device : {KDA_CPU, KDA_CUDA}) {
      Legal<TypeParam> x;
      const Workspace workspace = workspace_for(x.args);
      const Field f = x.fields()[i];
      const bool pool = std::is_same_v<TypeParam, kda_flush_verify_args> && !std::strcmp(f.name, "hT");
      if (!f.t->data || pool) continue;  // (the pool is h0 itself: one cannot move without the other)
      if (std::is_same_v<TypeParam, kda_flush_verify_args> && !std::strcmp(f.name, "h0"))
        for (const Field& other : x.fields())
          if (!std::strcmp(other.name, "hT")) other.t->data = memory.data + 4096;
      f.t->data = memory.data + 4096;
      x.args.exec.device = device;
      const std::string sentence =
          std::string("exec.workspace: expected memory of its own, got memory that overlaps ") + f.name;
      for (const size_t offset : {0, 4096 - 256, 4096}) {  // up to its first byte, or from it
        x.args.exec.workspace = memory.data + offset;
        x.args.exec.workspace_bytes = 4096 - offset + 1;
        expect_refused(x, sentence);
      }
      x.args.exec.workspace_bytes = 0;  // no workspace at all
      EXPECT_EQ(std::string(call(x.args) == KDA_OK ? "" : kda_last_error()).find("got memory that overlaps"),
                std::string::npos);
    }
}

// Without CUDA in the build, without a driver or without a device, each implementation says what is missing.
TYPED_TEST(Contract, CudaDeviceThatIsNotThere) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);  // in case there is one
  const bool built = std::string(kda_info()).find("\ncuda: not built") == std::string::npos;
  refuses<TypeParam>(
      "no implementation takes this call: ", [](auto& x) { x.args.exec.device = KDA_CUDA; }, KDA_UNSUPPORTED);
  const std::string error = kda_last_error();
  std::istringstream rows(explanation(Legal<TypeParam>().args));
  int on_cuda = 0;
  for (std::string row; std::getline(rows, row);) {
    const std::string name = row.substr(2, row.find(':') - 2);
    const auto says = [&](const char* reason) { return error.find(name + reason) != std::string::npos; };
    const bool cuda = name.starts_with("cuda_");
    on_cuda += cuda;
    EXPECT_TRUE(!cuda    ? says(": runs on the CPU only")
                : !built ? says(": needs a library that was built with CUDA")
                         : says(": found no CUDA driver") || says(": found a CUDA driver, but no device"))
        << error;
  }
  EXPECT_GE(on_cuda, 1);
}

TYPED_TEST(Contract, ForcedButCannot) {
  const std::string first = cpu_implementations(OperatorNames::GetName<TypeParam>(0).c_str()).front();
  refuses<TypeParam>(
      first + " was forced but float64 runs on `reference` only",
      [&](auto& x) {
        static double memory[4096];  // stands in for a small tensor
        for (const char* name : {"A_log", "h0", "state", "G", "dAqk", "dG", "bias", "gate"})
          for (const Field& f : x.fields())
            if (!std::strcmp(f.name, name)) {
              f.t->dtype = KDA_F64, f.t->data = memory;
              x.args.exec.impl = first.c_str();
              return;
            }
        x.args.exec.impl = first.c_str();
      },
      KDA_UNSUPPORTED);
}

// ---- every tensor ----

// Breaks each tensor of the legal call with `break_it` and expects a refusal that names it.
template <class Args>
void for_each_tensor(const std::function<std::string(const Field&)>& break_it) {
  const size_t count = Legal<Args>().fields().size();
  for (size_t i = 0; i < count; ++i) {
    Legal<Args> x;
    const Workspace workspace = workspace_for(x.args);
    const Field field = x.fields()[i];
    ASSERT_GT(field.t->ndim, 0) << field.name << " is missing from the legal call";
    const std::string sentence = break_it(field);
    if (!sentence.empty()) expect_refused(x, sentence);
  }
}
// So that these tests break all tensors, but for those of other ways to call an operator. Their tests are elsewhere.
TYPED_TEST(Contract, LegalCallHasTheTensors) {
  static const std::set<std::string> others = {
      "out_state_indices", "checkpoint_offset", "snapshots", "snapshot_slots", "accepted", "x1", "x2", "last_conv_x"};
  static const std::map<std::string, std::set<std::string>> of_op = {
      {"verify", {"hT"}},
      {"flush_verify",
       {"has_initial_state", "records.ring_first", "records.ring_count", "last.ring_first", "last.ring_count"}},
      {"conv", {"checkpoints", "checkpoint_slots"}}};
  const auto here = of_op.find(op_name<TypeParam>());
  Legal<TypeParam> x;
  for (const Field& f : fields(x.args)) {
    const std::string name = f.name;
    const bool other = others.contains(name) || name.starts_with("conv.") || name.starts_with("norm.");
    EXPECT_TRUE(f.t->ndim || other || (here != of_op.end() && here->second.contains(name))) << name;
  }
}

std::string starts(const Field& f, const std::string& rest) { return std::string(f.name) + ": " + rest; }

TYPED_TEST(Contract, RankOutOfRange) {
  for_each_tensor<TypeParam>([](const Field& f) {
    f.t->ndim = 6;
    return starts(f, "expected at most 5 dimensions, got 6");
  });
  for_each_tensor<TypeParam>([](const Field& f) {
    f.t->ndim = -1;
    return starts(f, "expected at most 5 dimensions, got -1");
  });
  for_each_tensor<TypeParam>([](const Field& f) {
    f.t->ndim = 0;  // but data is set
    return starts(f, "expected ndim >= 1 with data, got ndim 0");
  });
}

TYPED_TEST(Contract, WrongRank) {
  for_each_tensor<TypeParam>([](const Field& f) -> std::string {
    if (!std::strcmp(f.name, "state")) return "";  // of all layers, with one dimension more
    if (f.t->ndim == KDA_MAX_NDIM) --f.t->ndim;
    else f.t->stride[f.t->ndim] = 1, f.t->shape[f.t->ndim] = 1, ++f.t->ndim;
    return starts(f, "expected ");
  });
}

TYPED_TEST(Contract, NegativeSize) {
  for_each_tensor<TypeParam>([](const Field& f) {
    f.t->shape[0] = -1;
    return starts(f, "expected sizes >= 0, got [-1");
  });
}

// Tensors that lead have sizes of their own; every other one has to agree.
TYPED_TEST(Contract, WrongSize) {
  int tested = 0;
  for (int dim = 0; dim < 4; ++dim)
    for_each_tensor<TypeParam>([&](const Field& f) -> std::string {
      // (A flush has as many requests as accept_len, and state_indices comes before it.)
      const bool leads = std::is_same_v<TypeParam, kda_flush_args> && !std::strcmp(f.name, "accept_len");
      if (dim >= f.t->ndim || (f.free >> dim & 1) || leads) return "";
      ++f.t->shape[dim], ++tested;
      return starts(f, "expected ");
    });
  EXPECT_GE(tested, 2);
}

TYPED_TEST(Contract, WrongDtype) {
  for (const int32_t dtype : {0, static_cast<int>(KDA_I64), 8, -1, 1 << 20})
    for_each_tensor<TypeParam>([&](const Field& f) -> std::string {
      if (dtype == KDA_I64 && !std::strcmp(f.name, "cu_seqlens")) return "";
      const bool was_f32 = f.t->dtype == KDA_F32;
      f.t->dtype = dtype;
      const std::string got = dtype == KDA_I64 ? "int64" : "an unknown dtype";
      return was_f32 ? starts(f, "expected float32") : starts(f, "expected ");
    });
  for_each_tensor<TypeParam>([&](const Field& f) -> std::string {
    if (f.t->dtype == KDA_F32) return "";
    const std::string expected = dtype_name(f.t->dtype);
    f.t->dtype = KDA_F32;
    return starts(f, "expected " + expected);
  });
}

TYPED_TEST(Contract, NullData) {
  for_each_tensor<TypeParam>([](const Field& f) {
    f.t->data = nullptr;
    return starts(f, "expected memory, got NULL");
  });
}

TYPED_TEST(Contract, Misaligned) {
  for_each_tensor<TypeParam>([](const Field& f) -> std::string {
    const int64_t size = dtype_size(f.t->dtype);
    if (size == 1) return "";
    f.t->data = static_cast<char*>(f.t->data) + size / 2;
    return starts(f, "expected data aligned to " + std::to_string(size) + " bytes, got address 0x");
  });
}

TYPED_TEST(Contract, LastDimensionNotDense) {
  const std::set<std::string> free = {"beta",          "dbeta",           "state_indices",      "has_initial_state",
                                      "accept_len",    "records.indices", "records.ring_first", "records.ring_count",
                                      "last.indices",  "initial_state",   "final_state",        "d_initial_state",
                                      "d_final_state", "conv_state",      "conv_indices"};
  for_each_tensor<TypeParam>([&](const Field& f) -> std::string {
    if (free.contains(f.name) || f.t->shape[f.t->ndim - 1] <= 1) return "";
    f.t->stride[f.t->ndim - 1] = 0;
    return starts(f, "expected a dense last dimension (stride 1), got stride 0");
  });
}

TYPED_TEST(Contract, OutputsThatOverlapThemselves) {
  int tested = 0;
  for_each_tensor<TypeParam>([&](const Field& f) -> std::string {
    int dim = 0;
    while (dim < f.t->ndim - 1 && f.t->shape[dim] <= 1) ++dim;
    if (!f.output || dim >= f.t->ndim - 1) return "";
    f.t->stride[dim] = 0;
    ++tested;
    return starts(f, "expected strides that keep elements apart, got [");
  });
  EXPECT_GE(tested, 1);
}

// ---- memory that overlaps ----

template <class Args>
kda_tensor& field(Legal<Args>& x, const std::string& name) {
  for (const Field& f : x.fields())
    if (f.name == name) return *f.t;
  ADD_FAILURE() << name;
  return *x.fields().front().t;
}

// A workspace may lie between the slots of a pool.
TEST(Aliasing, WorkspaceBetweenSlots) {
  Legal<kda_decode_args> x;
  const int64_t slots = x.args.states.hT.shape[0], pitch = 8192;
  char* memory = static_cast<char*>(std::aligned_alloc(256, slots * pitch));
  std::memset(memory, 0, slots * pitch);
  x.args.states.hT.data = memory, x.args.states.hT.stride[0] = pitch / sizeof(float);
  x.args.exec.workspace = memory + 4096, x.args.exec.workspace_bytes = 4096;
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
  x.args.exec.workspace_bytes = 4097;
  EXPECT_EQ(call(x.args), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "exec.workspace: expected memory of its own, got memory that overlaps hT");
  std::free(memory);
}

// Moves the output `a` and `b`, which has another shape or starts elsewhere, to one place, and expects a refusal.
// Nothing else is there: where `b` was, another tensor may be behind it that a larger `a` would overlap as well.
template <class Args>
void refuses_overlap(const std::string& a, const std::string& b, const std::string& first, const std::string& second) {
  refuses<Args>(first + ": expected memory of its own, got memory that overlaps " + second, [&](auto& x) {
    alignas(64) static char place[1 << 20];
    field(x, a).data = field(x, b).data = place;
  });
}

TEST(Aliasing, OutputOverAnythingElse) {
  refuses_overlap<kda_forward_args>("o", "v", "o", "v");
  refuses_overlap<kda_forward_args>("o", "g", "o", "g");
  refuses_overlap<kda_forward_args>("o", "h0", "o", "h0");
  refuses_overlap<kda_forward_args>("v_new", "o", "o", "v_new");
  refuses_overlap<kda_forward_args>("Akk", "Aqk", "Aqk", "Akk");
  refuses_overlap<kda_forward_args>("hT", "o", "hT", "o");
  refuses_overlap<kda_forward_args>("checkpoints", "h0", "checkpoints", "h0");
  refuses_overlap<kda_decode_args>("o", "q", "o", "q");
  refuses_overlap<kda_backward_args>("dq", "q", "dq", "q");
  refuses_overlap<kda_backward_args>("dk", "dq", "dq", "dk");
  refuses_overlap<kda_backward_args>("dv", "d_o", "dv", "d_o");
  refuses_overlap<kda_backward_args>("dh0", "h0", "dh0", "h0");
  refuses_overlap<kda_backward_args>("dh0", "dhT", "dh0", "dhT");
  refuses_overlap<kda_verify_args>("o", "h0", "o", "h0");
  refuses_overlap<kda_verify_args>("records.u", "v", "records.u", "v");
  refuses_overlap<kda_flush_args>("state", "records.u", "state", "records.u");
  refuses_overlap<kda_flush_args>("state", "accept_len", "state", "accept_len");
  refuses_overlap<kda_flush_verify_args>("records.u", "last.u", "records.u", "last.u");
  refuses_overlap<kda_flush_verify_args>("o", "last_parents", "o", "last_parents");
  refuses_overlap<kda_gate_args>("g", "x", "g", "x");
  refuses_overlap<kda_norm_gate_args>("y", "weight", "y", "weight");
  refuses_overlap<kda_norm_gate_backward_args>("dx", "x", "dx", "x");
  refuses_overlap<kda_norm_gate_backward_args>("dx", "dy", "dx", "dy");
  refuses_overlap<kda_norm_gate_backward_args>("dgate", "gate", "dgate", "gate");
  refuses_overlap<kda_norm_gate_backward_args>("dweight", "weight", "dweight", "weight");
  refuses_overlap<kda_conv_args>("y", "x", "y", "x");
  refuses_overlap<kda_conv_args>("final_state", "x", "final_state", "x");
  refuses_overlap<kda_conv_backward_args>("dx", "dy", "dx", "dy");
  refuses_overlap<kda_conv_backward_args>("dweight", "weight", "dweight", "weight");
  refuses_overlap<kda_conv_backward_args>("d_initial_state", "d_final_state", "d_initial_state", "d_final_state");
  refuses_overlap<kda_gate_backward_args>("dx", "dg", "dx", "dg");
  refuses_overlap<kda_gate_backward_args>("dx", "x", "dx", "x");
  refuses_overlap<kda_gate_backward_args>("d_dt_bias", "dt_bias", "d_dt_bias", "dt_bias");
}

TEST(Aliasing, LastByteCounts) {
  refuses<kda_forward_args>("o: expected memory of its own, got memory that overlaps v", [](auto& x) {
    kda_tensor &o = x.args.o, &v = x.args.in.v;
    o.data = static_cast<char*>(v.data) + (x.in.v.size() - 1) * sizeof(float);
  });
}

TEST(Aliasing, StatesInPlaceOnlyAsTheSameView) {
  for (const bool same : {true, false}) {
    Legal<kda_decode_args> x;
    x.args.states.hT = x.args.states.h0;
    if (same) {
      EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
    } else {  // one slot further: sequence n would overwrite what sequence n + 1 reads
      kda_tensor& hT = x.args.states.hT;
      hT.data = static_cast<float*>(hT.data) + hT.stride[0];
      expect_refused(x, "hT: expected memory of its own, got memory that overlaps h0 without being the same view");
    }
  }
}

// q, k, v, beta and outputs cut from the rows of wide buffers, as a fused projection leaves them: no element is shared.
TEST(Aliasing, InterleavedSlicesAreApart) {
  const int64_t T = 20, K = 8, V = 6, H = 2;
  const Inputs in({.name = "fused", .T = T, .H = H, .HV = H, .K = K, .V = V});
  const int64_t width = H * (2 * K + 2 * V);
  Tensor fused(KDA_F32, {1, T, width});
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = in.view();
  a.states.h0 = in.h0;
  int64_t column = 0;
  const auto slice = [&](kda_tensor& t, const Tensor& from, int64_t size) {
    t = from;
    t.data = static_cast<float*>(fused.view().data) + column;
    t.stride[0] = T * width, t.stride[1] = width, t.stride[2] = size;
    for (int64_t i = 0; i < from.size(); ++i) fused.set(i / (H * size) * width + column + i % (H * size), from.get(i));
    column += H * size;
  };
  ForwardOutputs separate(in, false), out(in, false);
  slice(a.in.q, in.q, K);
  slice(a.in.k, in.k, K);
  slice(a.in.v, in.v, V);
  slice(a.o, separate.o, V);  // the output lies between the inputs' rows, too
  a.states.hT = out.hT;
  run(a);
  run(forward_args(in, separate));
  EXPECT_EQ(out.hT.bits(), separate.hT.bits());
  std::string o;
  for (int64_t t = 0; t < T; ++t) o += fused.bits().bytes.substr((t * width + width - H * V) * 4, H * V * 4);
  EXPECT_EQ(Bits{o}, separate.o.bits());

  a.o.data = static_cast<float*>(a.o.data) - 1;  // one column to the left: the last element of v
  EXPECT_EQ(call(a), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(kda_last_error()).rfind("o: expected memory of its own, got memory that overlaps v", 0), 0u);
}

// ---- errors themselves ----

TEST(LastError, IsPerThreadAndStays) {
  EXPECT_EQ(kda_forward(nullptr), KDA_INVALID_ARGUMENT);
  std::string other;
  std::thread([&] { other = kda_last_error(); }).join();
  EXPECT_EQ(other, "");
  Legal<kda_decode_args> x;
  EXPECT_EQ(call(x.args), KDA_OK);
  EXPECT_STREQ(kda_last_error(), "args: expected a pointer, got NULL") << "a success does not clear it";
}

}  // namespace
}  // namespace kda::test
