// Adding an operator takes five places: new_operator.h has the first three, this file the fourth. The sources of the
// entry points and of the choice are compiled again with a list of operators that has one name more.
#include <cmath>

#include "contract/rules.h"
#include "fields.h"
#include "registry.h"
#include "support.h"

namespace kda {

// ---- 3. validate(): what relates operands ----

NewProblem validate(const kda_new_args* raw) {
  NewProblem p{};
  kda_new_args& a = p.args = copy_args(raw);
  Tensors tensors(a);
  tensors.check_form(a.x, a.bias, a.y);
  tensors.bind(a.x);
  tensors.check_heads(false);
  check_scale(a.scale);
  tensors.check(a.x, a.bias, a.y, a.reserved);
  tensors.check_aliasing(a.exec);
  p.rows = a.x.shape[0] * a.x.shape[1] * a.x.shape[2], p.V = a.x.shape[3], p.idle = !tensors.write();
  return p;
}

// ---- 4. its kernels, and their table in registry.cc ----

namespace {

const char* why_not(const NewProblem& p) {
  if (p.args.exec.device != KDA_CPU) return "runs on the CPU only";
  return any_f64(p.args) || p.args.x.dtype != KDA_F32 ? "takes float32 only" : nullptr;
}
uint64_t workspace(const NewProblem&) { return 0; }
void run(const NewProblem& p) {
  const auto at = [&](const kda_tensor& t, int64_t row, int64_t v) -> float& {
    const int64_t heads = t.shape[2], tokens = t.shape[1], hv = row % heads, bt = row / heads;
    const int64_t offset = bt / tokens * t.stride[0] + bt % tokens * t.stride[1] + hv * t.stride[2] + v;
    return static_cast<float*>(t.data)[offset];
  };
  const float* bias = static_cast<const float*>(p.args.bias.data);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t v = 0; v < p.V; ++v) at(p.args.y, row, v) = p.args.scale * at(p.args.x, row, v) + (bias ? bias[v] : 0);
}

}  // namespace

template <>
std::span<const Implementation<NewProblem>> implementations() {
  static constexpr Implementation<NewProblem> table[] = {
      {"cpu_new", "tests/cpp/test_new_operator.cc", "one loop", why_not, workspace, run}};
  return table;
}

namespace test {
namespace {

struct Call {
  Tensor x{KDA_F32, {2, 3, 1, 4}, Layout::kPadded}, bias{KDA_F32, {4}, {1, 2, 3, 4}}, y{KDA_F32, {2, 3, 1, 4}};
  kda_new_args args{};
  Call() {
    for (int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<double>(i));
    args.struct_size = sizeof args;
    args.x = x, args.bias = bias, args.y = y, args.scale = 2;
  }
};

void expect_refused(const kda_new_args& args, const std::string& sentence) {
  EXPECT_EQ(kda_new(&args), KDA_INVALID_ARGUMENT) << sentence;
  EXPECT_EQ(kda_last_error(), sentence);
}

TEST(NewOperator, Runs) {
  Call c;
  uint64_t bytes = 1;
  const char* text = nullptr;
  ASSERT_EQ(kda_new_workspace(&c.args, &bytes), KDA_OK) << kda_last_error();
  EXPECT_EQ(bytes, 0u);
  ASSERT_EQ(kda_new_explain(&c.args, &text), KDA_OK) << kda_last_error();
  EXPECT_STREQ(text, "* cpu_new: one loop [tests/cpp/test_new_operator.cc]\n");
  EXPECT_STREQ(kda_implementation("new", 0), "cpu_new");
  ASSERT_EQ(kda_new(&c.args), KDA_OK) << kda_last_error();
  for (int64_t i = 0; i < c.y.size(); ++i) EXPECT_EQ(c.y.get(i), static_cast<double>(2 * i + 1 + i % 4));
  c.args.y = c.args.x;  // in place
  ASSERT_EQ(kda_new(&c.args), KDA_OK) << kda_last_error();
  EXPECT_EQ(c.x.get(5), c.y.get(5));
}

TEST(NewOperator, RefusesByItsTable) {
  using Break = void (*)(kda_new_args&);
  const std::pair<const char*, Break> all[] = {
      {"x: expected 4 dimensions [B,T,HV,V], got 0", [](auto& a) { a.x = {}; }},
      {"x: expected V in 1..256, got 0", [](auto& a) { a.x.shape[3] = 0; }},
      {"x: expected float32 or bfloat16 or float16, got int32", [](auto& a) { a.x.dtype = KDA_I32; }},
      {"x: expected memory, got NULL", [](auto& a) { a.x.data = nullptr; }},
      {"bias: expected shape [4] ([V] of x), got [3]", [](auto& a) { a.bias.shape[0] = 3; }},
      {"bias: expected sizes >= 0, got [-1]", [](auto& a) { a.bias.shape[0] = -1; }},
      {"y: expected float32, got bfloat16", [](auto& a) { a.y.dtype = KDA_BF16; }},
      {"y: expected a dense last dimension (stride 1), got stride 2", [](auto& a) { a.y.stride[3] = 2; }},
      {"y: expected strides that keep elements apart, got [0,4,4,1] for shape [2,3,1,4]",
       [](auto& a) { a.y.stride[0] = 0; }},
      {"y: expected memory of its own, got memory that overlaps bias", [](auto& a) { a.y.data = a.bias.data; }},
      {"y: expected memory of its own, got memory that overlaps x without being the same view",
       [](auto& a) { a.y.data = static_cast<float*>(a.x.data) + 1; }},
      {"scale: expected a finite number, got inf", [](auto& a) { a.scale = INFINITY; }},
      {"args.reserved: expected 0, got 1", [](auto& a) { a.reserved = 1; }},
      {"exec.device: expected 0..1, got 2", [](auto& a) { a.exec.device = 2; }},
  };
  for (const auto& [sentence, break_it] : all) {
    Call c;
    break_it(c.args);
    expect_refused(c.args, sentence);
  }
  Call c;
  c.args.exec.impl = "cpu_gate";
  expect_refused(c.args, "exec.impl: expected one of cpu_new, got cpu_gate");
}

// A tensor of float64 goes to no implementation that does not take it.
TEST(NewOperator, Float64) {
  Call c;
  c.args.bias.dtype = KDA_F64;
  alignas(8) static double memory[4];
  c.args.bias.data = memory;
  EXPECT_EQ(kda_new(&c.args), KDA_UNSUPPORTED);
  EXPECT_STREQ(kda_last_error(), "no implementation takes this call: cpu_new: takes float32 only");
}

// Tests find its tensors, too.
TEST(NewOperator, Fields) {
  Call c;
  const std::vector<Field> all = fields(c.args);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_STREQ(all[2].name, "y");
  EXPECT_EQ(all[2].t, &c.args.y);
  EXPECT_TRUE(all[2].output && !all[0].output);
  EXPECT_EQ(all[0].free, 15u);  // x leads
  EXPECT_EQ(all[1].free, 0u);
}

// The operators that the library has are there, too.
TEST(NewOperator, Others) {
  EXPECT_EQ(cpu_implementations("gate").front(), "cpu_gate");
  EXPECT_EQ(kda_implementation("old", 0), nullptr);
}

}  // namespace
}  // namespace test
}  // namespace kda
