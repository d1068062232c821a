// Whole calls whose gates are at corners of float32 (gate_edges.h), on every device. A value head has a pair of A_log
// and x of its own, one token, and a beta of 0: what is left of an initial state of ones is the decay.
#pragma once
#include <cmath>
#include <string>

#include "calls.h"
#include "gate_edges.h"

namespace kda::test {

class CornerCalls {
 public:
  CornerCalls(int32_t form, int64_t size, int32_t dtype) : elements_(of_calls()), in_(the_case(form, size, dtype)) {
    const int64_t K = in_.c.K;
    for (int64_t hv = 0; hv < in_.c.HV; ++hv) {
      in_.A_log.set(hv, elements_[hv].A_log);
      for (int64_t i = hv * K; i < (hv + 1) * K; ++i) in_.g.set(i, elements_[hv].x);
    }
    in_.beta.fill(0), in_.h0.fill(1), in_.dhT.fill(1), in_.d_o.fill(0);
  }

  // on_each(args, check) makes the call with one implementation after the other, and then calls check().
  template <class OnEach>
  void forward(const OnEach& on_each) const {
    const ForwardOutputs out(in_, false);
    on_each(forward_args(in_, out), [&] { expect_decays(out.hT); });
  }
  template <class OnEach>
  void decode(const OnEach& on_each) const {
    const Pool before(in_, KDA_F32), after(in_, KDA_F32);
    const Tensor o(in_.c.dtype, {1, 1, in_.c.HV, in_.c.V});
    on_each(decode_args(in_, before, after, o), [&] { expect_decays(after.rows(in_)); });
  }
  template <class OnEach>
  void segment_map(const OnEach& on_each) const {
    SegmentOutputs out(in_);
    out.b = Tensor(), out.d = Tensor();
    const int64_t size = in_.c.K * in_.c.K;
    on_each(segment_map_args(in_, out), [&] {
      for (int64_t hv = 0; hv < in_.c.HV; ++hv) expect_decay(hv, out.M.get(hv * size));
    });
  }
  // The gradient of the decay's logarithm is V decays.
  template <class OnEach>
  void backward(const OnEach& on_each) const {
    const BackwardOutputs out(in_);
    on_each(backward_args(in_, out), [&] {
      for (int64_t hv = 0; hv < in_.c.HV; ++hv) {
        GateElement e = elements_[hv];
        const double decay = std::exp(static_cast<double>(values(e).g));
        e.dg = static_cast<float>(static_cast<double>(in_.c.V) * decay);
        expect_near(hv, out.dg.get(hv * in_.c.K), static_cast<double>(values(e).dx));
      }
    });
  }

 private:
  static std::vector<GateElement> of_calls() {
    std::vector<GateElement> all;
    for (const GateElement& e : gate_corners())
      if (e.bias == 0 && e.dg == 0 && (e.x == 0 || std::isinf(e.x))) all.push_back(e);
    return all;
  }
  GateElement::Values values(const GateElement& e) const { return e.values(in_.c.gate_form, in_.c.lower_bound); }
  Case the_case(int32_t form, int64_t size, int32_t dtype) const {
    const auto heads = static_cast<int64_t>(elements_.size());
    Case c{.name = "corners", .T = 1, .H = heads, .HV = heads, .K = size, .V = size, .dtype = dtype};
    c.gate_form = form, c.gates = Gates::kRaw, c.A_log = true, c.lower_bound = form == KDA_GATE_LOWER_BOUND ? -5 : 0;
    c.qk_l2norm = true;
    return c;
  }
  void expect_decays(const Tensor& states) const {
    const int64_t size = in_.c.K * in_.c.V;
    for (int64_t hv = 0; hv < in_.c.HV; ++hv) expect_decay(hv, states.get(hv * size));
  }
  void expect_decay(int64_t hv, double got) const {
    expect_near(hv, got, std::exp(static_cast<double>(values(elements_[hv]).g)));
  }
  void expect_near(int64_t hv, double got, double want) const {
    const bool right = std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= 0.01 * std::abs(want) + 1e-30;
    EXPECT_TRUE(right || got == want) << "A_log " << elements_[hv].A_log << ", x " << elements_[hv].x << ": expected "
                                      << want << ", got " << got;
  }

  const std::vector<GateElement> elements_;
  Inputs in_;
};

}  // namespace kda::test
