// All of float32's range on the GPU: gates by themselves, element by element, and norms of rows of any length. Whole
// calls with both are cases of test_forward, test_forward_chunk and test_decode.
#include <cmath>
#include <limits>

#include "gate_corner_calls.h"
#include "on_cuda.h"

namespace kda::test {
namespace {

class RangeOnCuda : public OnCuda {
 protected:
  template <class Call>
  static void for_each_form(const Call& call) {
    call(KDA_GATE_SOFTPLUS, 0.0f);
    for (const float bound : {-5.0f, -0.01f}) call(KDA_GATE_LOWER_BOUND, bound);
  }
};

// K: four channels an access, and one.
TEST_F(RangeOnCuda, GatesAreExactForAnyParameters) {
  for (const int64_t K : {3, 4})
    for_each_form([&](int32_t form, float bound) {
      SCOPED_TRACE(form == KDA_GATE_SOFTPLUS ? "softplus" : "bound");
      const GateEdges edges(gate_elements(), K, KDA_F32);
      ASSERT_NO_FATAL_FAILURE(run_on_cuda(edges.forward(form, bound), "cuda_gate"));
      edges.expect_forward(form, bound);
    });
}

TEST_F(RangeOnCuda, GatesAreSoBackward) {
  for (const int64_t K : {3, 4})
    for_each_form([&](int32_t form, float bound) {
      SCOPED_TRACE(form == KDA_GATE_SOFTPLUS ? "softplus" : "bound");
      const GateEdges edges(gate_elements(), K, KDA_F32);
      ASSERT_NO_FATAL_FAILURE(run_on_cuda(edges.backward(form, bound), "cuda_gate"));
      edges.expect_backward(form, bound);
    });
}

// Factors of 0, infinity and NaN (docs/numerics.md, Corners).
TEST_F(RangeOnCuda, GatesAtCorners) {
  for_each_form([&](int32_t form, float bound) {
    SCOPED_TRACE(form == KDA_GATE_SOFTPLUS ? "softplus" : "bound");
    const GateEdges edges(gate_corners(), 4, KDA_F32);
    ASSERT_NO_FATAL_FAILURE(run_on_cuda(edges.forward(form, bound), "cuda_gate"));
    ASSERT_NO_FATAL_FAILURE(run_on_cuda(edges.backward(form, bound), "cuda_gate"));
    edges.expect_forward(form, bound), edges.expect_backward(form, bound);
  });
}

// The same rule in kernels that activate gates inside, at the sizes of tensor cores.
TEST_F(RangeOnCuda, GatesOfWholeCallsAtCorners) {
  for (const int32_t form : {KDA_GATE_SOFTPLUS, KDA_GATE_LOWER_BOUND}) {
    const CornerCalls calls(form, 64, KDA_BF16);
    const auto on_each = [&](const char* op) {
      return [=](const auto& args, const auto& check) {
        for (const char* impl : takers(op, args)) {
          SCOPED_TRACE(std::string(impl) + (form == KDA_GATE_SOFTPLUS ? " softplus" : " bound"));
          ASSERT_NO_FATAL_FAILURE(run_on_cuda(args, impl));
          check();
        }
      };
    };
    calls.forward(on_each("forward")), calls.decode(on_each("decode"));
    calls.segment_map(on_each("segment_map")), calls.backward(on_each("backward"));
  }
}

// One token without a state: o = scale (q.k / |q| |k|) beta v.
TEST_F(RangeOnCuda, NormsOfRowsOfAnyLength) {
  for (const int32_t dtype : {KDA_F32, KDA_BF16})
    for (const double size : {1e-30, 1e-10, 1e-6, 1e-3, 1.0, 1e10, 1e18, 1e19, 5e19, 1e25, 1e30, 1e37, 3e38}) {
      Case c{.name = "norm", .T = 1, .K = 128, .V = 128, .dtype = dtype, .qk_l2norm = true, .scale = 1};
      c.h0 = c.dhT = false;
      Inputs in(c);
      double qq = 1e-6, kk = 1e-6, qk = 0;
      for (int64_t i = 0; i < c.K; ++i) {
        in.q.set(i, size * (1 + 0.01 * static_cast<double>(i % 7))), in.k.set(i, size * (i % 3 ? 1 : -0.3));
        const double q = in.q.get(i), k = in.k.get(i);
        qq += q * q, kk += k * k, qk += q * k;
      }
      const double cosine = qk / std::sqrt(qq) / std::sqrt(kk), beta = in.beta.get(0);
      const ForwardOutputs out(in, false);
      for (const char* impl : takers("forward", forward_args(in, out))) {
        SCOPED_TRACE(std::string(impl) + " " + std::to_string(size));
        ASSERT_NO_FATAL_FAILURE(run_on_cuda(forward_args(in, out), impl));
        // Chunks take factors in f16, where only numbers below 1e-7 are 0.
        const double part = std::string(impl) == "cuda_prefill_recurrent" && dtype == KDA_F32 ? 1e-5 : 0.01;
        for (int64_t j = 0; j < c.V; ++j) {
          const double expected = cosine * beta * in.v.get(j);
          EXPECT_NEAR(out.o.get(j), expected, part * std::abs(expected) + (part < 0.01 ? 1e-36 : 1e-6)) << j;
        }
      }
    }
}

// Keys and queries that bf16 would round to infinity, in a backward on tensor cores.
TEST_F(RangeOnCuda, RowsUpToTheEndOfF32) {
  constexpr float kMost = std::numeric_limits<float>::max();
  Case c{.name = "ends", .T = 40, .K = 64, .V = 64, .qk_l2norm = true};
  Inputs in(c);
  for (int64_t t = 0; t + 3 < c.T; t += 7) in.k.set(t * c.K + t, kMost), in.q.set((t + 3) * c.K + t, -kMost);
  BackwardOutputs exact(in, true), got(in);
  run(backward_args(in, exact), {.impl = "reference"});
  for (const char* impl : takers("backward", backward_args(in, got))) {
    ASSERT_NO_FATAL_FAILURE(run_on_cuda(backward_args(in, got), impl));
    for (size_t i = 0; i < got.tensors().size(); ++i) {
      const auto [name, t] = got.tensors()[i];
      if (!*t) continue;
      const Error e = compare(exact.tensors()[i].tensor->values(), t->values());
      EXPECT_TRUE(e.finite_alike && e.relative_rmse < 0.02) << impl << " " << name << ": " << e.relative_rmse;
    }
  }
}

}  // namespace
}  // namespace kda::test
