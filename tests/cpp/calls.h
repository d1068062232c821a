// The tensors of a case, and the args structs that point at them.
#pragma once
#include <map>

#include "cases.h"

namespace kda::test {

struct Named {
  const char* name;
  Tensor* tensor;
};

// Each gradient computed alone has the bits that it has among all of them: skipping the others skips nothing it needs.
// compute(outputs) fills what make() returns; the first `others` of its tensors() are no gradients.
template <class Make, class Compute>
void expect_each_alone(const Make& make, const Compute& compute, size_t others = 0) {
  auto all = make();
  compute(all);
  const std::vector<Named> expected = all.tensors();
  for (size_t i = others; i < expected.size(); ++i) {
    if (!*expected[i].tensor) continue;
    auto one = make();
    const std::vector<Named> got = one.tensors();
    for (size_t j = others; j < got.size(); ++j)
      if (j != i) *got[j].tensor = Tensor();
    compute(one);
    EXPECT_EQ(got[i].tensor->bits(), expected[i].tensor->bits()) << expected[i].name;
  }
}

// Everything a case reads, seeded by its name.
struct Inputs {
  Case c;
  int64_t B, T, N;
  Tensor q, k, v, g, beta, A_log, dt_bias, cu_seqlens;
  Tensor h0, d_o, dhT;  // [N,..]

  explicit Inputs(const Case& c, uint64_t seed = 0);
  kda_inputs view() const;
  int64_t begin(int64_t n) const;       // first token of sequence n within its row
  int64_t length(int64_t n) const;      // its number of tokens
  int64_t h_rows(int64_t every) const;  // states before every `every`-th chunk, of all sequences
  std::vector<int64_t> state_shape(int64_t rows) const;
  std::vector<Named> tensors();
  std::map<std::string, Bits> bits();  // of every input, to compare after a call

 private:
  void cancel_bias(Random& random);
};

struct ForwardOutputs {
  Tensor o, hT, h, v_new, Aqk, Akk;
  // Only o and hT, or all; in the dtypes of the case, or as float64 for the oracle.
  ForwardOutputs(const Inputs& in, bool all, bool f64 = false);
  int32_t h_every = 0, h_v_first = 0;
  void save_states(const Inputs& in, int32_t every, bool f64 = false);  // h, by itself
  void save_v_first(const Inputs& in, int32_t dtype);                   // h of every chunk, V-first in any case
  std::vector<Named> tensors();
};

struct BackwardOutputs {
  Tensor dq, dk, dv, dg, dbeta, dA_log, d_dt_bias, dh0;
  BackwardOutputs(const Inputs& in, bool f64 = false);
  std::vector<Named> tensors();
};

// The same states [..,K,V] of V-first ones, and the other way around.
Tensor in_other_layout(const Tensor& states);

kda_forward_args forward_args(const Inputs& in, const ForwardOutputs& out);
// `saved`: what forward kept; without it backward computes it again.
kda_backward_args backward_args(const Inputs& in, const BackwardOutputs& out, const ForwardOutputs* saved = nullptr);

// The pool that decode reads and writes: more slots than sequences, in another order.
struct Pool {
  Tensor h, state_indices, has_initial_state;
  std::vector<int64_t> slots;  // the slot of each sequence
  Pool(const Inputs& in, int32_t dtype, int64_t spare = 3);
  Tensor rows(const Inputs& in) const;  // the states of the sequences, in their order
};
kda_decode_args decode_args(const Inputs& in, const Pool& h0, const Pool& hT, const Tensor& o);

// The maps of the case's sequences, taken as segments; and segments to merge.
struct SegmentOutputs {
  Tensor M, b, d;
  explicit SegmentOutputs(const Inputs& in, bool f64 = false);
  std::vector<Named> tensors();
};
kda_segment_map_args segment_map_args(const Inputs& in, const SegmentOutputs& out);

struct MergeTensors {
  Tensor M, b, h0, states;
  // P segments whose maps do not grow.
  MergeTensors(int64_t P, int64_t HV, int64_t K, int64_t V, int32_t state_layout, Layout layout = Layout::kDense);
  int32_t state_layout;
};
kda_segment_merge_args segment_merge_args(const MergeTensors& t, bool reverse = false);

// The gate operators on the case's g: M = B T.
struct GateTensors {
  Tensor x, A_log, dt_bias, dg, g, dx, dA_log, d_dt_bias;
  GateTensors(const Inputs& in, int32_t out_dtype);
};
kda_gate_args gate_args(const Inputs& in, const GateTensors& t);
kda_gate_backward_args gate_backward_args(const Inputs& in, const GateTensors& t);

}  // namespace kda::test
