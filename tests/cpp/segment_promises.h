// Maps of segments and their merge: the same on every device. call(args) runs there.
#pragma once
#include <cmath>

#include "calls.h"

namespace kda::test {

// Without tokens nothing happens to a state: M is the identity.
template <class Call>
void expect_no_tokens_no_change(const Case& c, const Call& call) {
  const Inputs in(c);
  const SegmentOutputs out(in);
  call(segment_map_args(in, out));
  const int64_t K = c.K;
  for (int64_t i = 0; i < out.M.size(); ++i) ASSERT_EQ(out.M.get(i), i % (K * K) % (K + 1) == 0);
  EXPECT_TRUE(out.b.bits().all(0));
  EXPECT_TRUE(out.d.bits().all(0));
}

struct MergeSizes {
  int64_t P, HV, K, V;
};
// call(args, padded): `padded` tensors have gaps between rows.
template <class Call>
void expect_merge_is_the_oracle(const MergeSizes& s, const Call& call) {
  for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST})
    for (const Layout storage : {Layout::kDense, Layout::kPadded})
      for (const bool reverse : {false, true})
        for (const int32_t h0_dtype : {0, 0 + KDA_F32, 0 + KDA_BF16}) {
          const MergeTensors t(s.P, s.HV, s.K, s.V, layout, storage);
          const Tensor expected(KDA_F64, t.states.shape());
          Tensor h0;
          kda_segment_merge_args a = segment_merge_args(t, reverse);
          if (h0_dtype) h0 = Tensor(h0_dtype, t.h0.shape(), t.h0.values());
          a.h0 = h0;
          kda_segment_merge_args r = a;
          r.states = expected;
          run(r, {.impl = "reference"});
          call(a, storage == Layout::kPadded);
          if (testing::Test::HasFatalFailure()) return;
          EXPECT_TRUE(close(expected, t.states, 1e-6))
              << s.P << " segments, K " << s.K << ", layout " << layout << ", reverse " << reverse;
          EXPECT_EQ(t.states.unwritten(), 0);
          EXPECT_TRUE(t.states.margins_intact());
        }
}

// NaN in one head's map stays there.
template <class Call>
void expect_nan_stays_in_its_head_of_a_merge(const Call& call) {
  const MergeTensors clean(3, 3, 8, 24, KDA_STATE_V_FIRST), spoilt(3, 3, 8, 24, KDA_STATE_V_FIRST);
  call(segment_merge_args(clean));
  Tensor M = spoilt.M.clone();
  M.set((1 * 3 + 1) * 64 + 5, std::nan(""));  // second segment, second head
  kda_segment_merge_args a = segment_merge_args(spoilt);
  a.M = M;
  call(a);
  for (const int64_t hv : {0, 2}) EXPECT_EQ(spoilt.states.bits(1, hv, 1), clean.states.bits(1, hv, 1));
  EXPECT_EQ(spoilt.states.bits(0, 0, 2), clean.states.bits(0, 0, 2)) << "segments before it";
  EXPECT_NE(spoilt.states.bits(), clean.states.bits());
}

}  // namespace kda::test
