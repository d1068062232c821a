// Cases of the output's norm and gate, their tensors, and the args structs that point at them.
#pragma once
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "calls.h"

namespace kda::test {

struct NormCase {
  std::string name;
  int64_t B = 2, T = 5, HV = 3, V = 128;
  int32_t dtype = KDA_F32, gate_dtype = KDA_F32, weight_dtype = KDA_F32, out_dtype = KDA_F32;
  int32_t activation = KDA_NORM_SIGMOID;
  bool weight = true;
  Layout layout = Layout::kDense, gate_layout = Layout::kDense;
  double scale = 1, gate_scale = 2, eps = 1e-5;  // scales: of x and of the gate
};
inline std::ostream& operator<<(std::ostream& out, const NormCase& c) { return out << c.name; }

inline std::vector<NormCase> norm_cases() {
  std::vector<NormCase> all;
  const auto add = [&](const NormCase& c) { all.push_back(c); };
  for (const int64_t V : {1, 2, 7, 8, 15, 16, 17, 64, 72, 128, 255, 256, 257, 264, 300, 512, 1000, 8192})
    add({.name = "V_" + std::to_string(V), .V = V});
  add({.name = "silu", .activation = KDA_NORM_SILU});
  add({.name = "silu_V_300", .V = 300, .activation = KDA_NORM_SILU});
  add({.name = "no_gate", .activation = KDA_NORM_NONE});
  add({.name = "no_gate_no_weight", .V = 64, .activation = KDA_NORM_NONE, .weight = false});
  add({.name = "no_weight", .weight = false});
  add({.name = "no_weight_V_300", .V = 300, .weight = false});
  add({.name = "many_rows", .B = 3, .T = 67, .HV = 2, .V = 64});  // more than a block on the CPU, and on CUDA
  add({.name = "one_row", .B = 1, .T = 1, .HV = 1});
  add({.name = "rows_apart", .layout = Layout::kPadded, .gate_layout = Layout::kPadded});
  add({.name = "rows_apart_V_300", .V = 300, .layout = Layout::kHeadsFirst, .gate_layout = Layout::kPadded});
  add({.name = "heads_first", .T = 9, .layout = Layout::kHeadsFirst});
  add({.name = "gate_heads_first", .T = 9, .V = 64, .gate_layout = Layout::kHeadsFirst});
  add({.name = "bf16",
       .T = 17,
       .dtype = KDA_BF16,
       .gate_dtype = KDA_BF16,
       .weight_dtype = KDA_BF16,
       .out_dtype = KDA_BF16});
  add({.name = "bf16_silu",
       .V = 256,
       .dtype = KDA_BF16,
       .gate_dtype = KDA_BF16,
       .out_dtype = KDA_BF16,
       .activation = KDA_NORM_SILU});
  add({.name = "f16", .V = 64, .dtype = KDA_F16, .gate_dtype = KDA_F16, .weight_dtype = KDA_F16, .out_dtype = KDA_F16});
  add({.name = "f16_V_37", .V = 37, .dtype = KDA_F16, .gate_dtype = KDA_F16, .out_dtype = KDA_F16});
  add({.name = "mixed", .dtype = KDA_BF16, .weight_dtype = KDA_F16});
  add({.name = "mixed_gate", .V = 256, .gate_dtype = KDA_BF16, .out_dtype = KDA_F16});
  add({.name = "mixed_V_300", .V = 300, .dtype = KDA_F16, .gate_dtype = KDA_BF16, .out_dtype = KDA_BF16});
  add({.name = "eps_0", .eps = 0});
  add({.name = "eps_large", .eps = 3});
  add({.name = "huge", .scale = 1e30});               // x^2 is beyond f32
  add({.name = "tiny", .scale = 1e-4});               // eps counts
  add({.name = "minute", .scale = 1e-28, .eps = 0});  // x^2 is below f32
  add({.name = "huge_V_300", .V = 300, .scale = 1e36});
  add({.name = "minute_V_300", .V = 300, .scale = 1e-28, .eps = 0});
  add({.name = "gates_of_0_and_1", .gate_scale = 60});
  add({.name = "silu_steep", .activation = KDA_NORM_SILU, .gate_scale = 60});
  return all;
}
inline const NormCase& find_norm_case(const std::string& name) {
  static const std::vector<NormCase> all = norm_cases();
  for (const NormCase& c : all)
    if (c.name == name) return c;
  throw std::runtime_error("no norm case " + name);
}

struct NormInputs {
  NormCase c;
  Tensor x, gate, weight, dy;

  explicit NormInputs(const NormCase& c, uint64_t seed = 0) : c(c) {
    const std::vector<int64_t> shape{c.B, c.T, c.HV, c.V};
    Random random(std::hash<std::string>{}(c.name) + seed);
    const auto filled = [&](int32_t dtype, const std::vector<int64_t>& sizes, Layout layout, double mean,
                            double scale) {
      Tensor t(dtype, sizes, layout);
      for (int64_t i = 0; i < t.size(); ++i) t.set(i, mean + scale * random.normal());
      return t;
    };
    x = filled(c.dtype, shape, c.layout, 0, c.scale);
    if (c.activation != KDA_NORM_NONE) gate = filled(c.gate_dtype, shape, c.gate_layout, 0, c.gate_scale);
    if (c.weight) weight = filled(c.weight_dtype, {c.V}, Layout::kDense, 1, 0.3);
    dy = filled(c.dtype, shape, c.layout, 0.1, 1);
  }
};

struct NormOutputs {
  Tensor y, dx, dgate, dweight;
  explicit NormOutputs(const NormInputs& in, bool f64 = false) {
    const std::vector<int64_t> shape = in.x.shape();
    const auto dtype = [&](int32_t own) { return f64 ? int32_t{KDA_F64} : own; };
    y = Tensor(dtype(in.c.out_dtype), shape, in.c.layout);
    dx = Tensor(dtype(in.c.out_dtype), shape, in.c.layout);
    if (in.gate) dgate = Tensor(dtype(in.c.gate_dtype), shape, in.c.gate_layout);
    if (in.weight) dweight = Tensor(dtype(KDA_F32), {in.c.V});
  }
  std::vector<Named> tensors() { return {{"y", &y}, {"dx", &dx}, {"dgate", &dgate}, {"dweight", &dweight}}; }
};

inline kda_norm_gate_args norm_gate_args(const NormInputs& in, const NormOutputs& out) {
  kda_norm_gate_args a = KDA_NORM_GATE_ARGS_INIT;
  a.x = in.x, a.gate = in.gate, a.weight = in.weight, a.y = out.y;
  a.eps = in.c.eps, a.activation = in.c.activation;
  return a;
}
inline kda_norm_gate_backward_args norm_gate_backward_args(const NormInputs& in, const NormOutputs& out) {
  kda_norm_gate_backward_args a = KDA_NORM_GATE_BACKWARD_ARGS_INIT;
  a.x = in.x, a.gate = in.gate, a.weight = in.weight, a.dy = in.dy;
  a.dx = out.dx, a.dgate = out.dgate, a.dweight = out.dweight;
  a.eps = in.c.eps, a.activation = in.c.activation;
  return a;
}

// ---- the same on every device: call(args) runs there ----

template <class Call>
void run_norm(const NormInputs& in, const NormOutputs& out, const Call& call) {
  call(norm_gate_args(in, out));
  call(norm_gate_backward_args(in, out));
}

// Rows with one huge number, in registers and not: y and dx of the small ones, element by element.
template <class Call>
void expect_small_beside_huge(const Call& call) {
  for (const float huge : {3e19f, 1e30f, 3e38f})
    for (const int64_t V : {16, 300}) {
      NormCase c{.name = "beside", .B = 1, .T = 1, .HV = 1, .V = V, .activation = KDA_NORM_NONE};
      NormInputs in(c);
      const double rho = std::sqrt(static_cast<double>(V)) / huge;
      for (int64_t i = 0; i < V; ++i)
        in.x.set(i, i % 16 ? 1e-34 / rho : 0), in.weight.set(i, 1e20), in.dy.set(i, 1e-12);
      in.x.set(0, huge), in.dy.set(0, 0);
      const NormOutputs out(in);
      run_norm(in, out, call);
      for (int64_t i = 0; i < V; ++i) {
        if (i % 16 == 0) continue;
        EXPECT_NEAR(out.y.get(i), 1e-14, 1e-18) << "huge " << huge << ", V " << V << ", column " << i;
        EXPECT_NEAR(out.dx.get(i), 1e8 * rho, 1e-4 * 1e8 * rho) << "huge " << huge << ", V " << V << ", column " << i;
      }
    }
}

// A row's bits depend neither on other rows, nor on where any of them lie.
template <class Call>
void expect_rows_alone(const NormCase& c, const Call& call) {
  const NormInputs in(c);
  NormOutputs out(in);
  run_norm(in, out, call);
  for (const int64_t row : {int64_t{0}, int64_t{4}, c.B * c.T * c.HV - 1}) {
    NormCase one = c;
    one.B = one.T = one.HV = 1, one.layout = Layout::kPadded;
    NormInputs alone(one);
    for (int64_t i = 0; i < c.V; ++i) {
      alone.x.set(i, in.x.get(row * c.V + i)), alone.dy.set(i, in.dy.get(row * c.V + i));
      alone.gate.set(i, in.gate.get(row * c.V + i)), alone.weight.set(i, in.weight.get(i));
    }
    NormOutputs got(alone);
    run_norm(alone, got, call);
    for (const auto& [all, single] : {std::pair{&out.y, &got.y}, {&out.dx, &got.dx}, {&out.dgate, &got.dgate}})
      for (int64_t i = 0; i < c.V; ++i) ASSERT_EQ(all->get(row * c.V + i), single->get(i)) << c.name << " " << i;
  }
}

template <class Call>
void expect_norm_in_place(const NormCase& c, const Call& call) {
  NormInputs in(c), again(c);
  NormOutputs out(in);
  call(norm_gate_args(in, out));
  kda_norm_gate_args a = norm_gate_args(in, out);
  a.y = in.x;
  call(a);
  EXPECT_EQ(in.x.bits(), out.y.bits()) << c.name;
  a = norm_gate_args(again, out), a.y = again.gate;
  call(a);
  EXPECT_EQ(again.gate.bits(), out.y.bits()) << c.name;
}

template <class Call>
void expect_no_rows_of_norm(const Call& call) {
  NormCase c = find_norm_case("V_64");
  c.T = 0;
  const NormInputs in(c);
  const NormOutputs out(in);
  run_norm(in, out, call);
  for (int64_t i = 0; i < c.V; ++i) EXPECT_EQ(out.dweight.get(i), 0);  // a sum of nothing
}

// NaN and infinities of x, the gate and dy stay in their rows, 4, 6 and 8.
template <class Call>
void expect_not_finite_stays(const NormCase& c, const Call& call) {
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    NormInputs in(c);
    NormOutputs expected(in), out(in);
    run_norm(in, expected, call);
    in.x.set(4 * c.V + 1, bad), in.gate.set(6 * c.V + 2, bad), in.dy.set(8 * c.V, bad);
    run_norm(in, out, call);
    for (const auto& [before, after] :
         {std::pair{&expected.y, &out.y}, {&expected.dx, &out.dx}, {&expected.dgate, &out.dgate}})
      for (int64_t i = 0; i < before->size(); ++i) {
        const int64_t row = i / c.V;
        if (row == 4 || row == 6 || row == 8) continue;
        ASSERT_EQ(before->get(i), after->get(i)) << c.name << " " << i;
      }
    EXPECT_TRUE(!std::isnan(bad) || std::isnan(out.y.get(4 * c.V)));
  }
}

// Everything is computed in f32; what is kept in 16 bits is rounded once. A row of one number has no gradient but what
// eps leaves of it, the rest of which is rounding.
inline double norm_budget(const NormCase& c, const Named& output) {
  if (c.V == 1 && !std::strcmp(output.name, "dx")) return 1e-2;
  const int32_t dtype = output.tensor->dtype();
  return dtype == KDA_BF16 ? 0.003 : dtype == KDA_F16 ? 4e-4 : 1e-5;
}

}  // namespace kda::test
