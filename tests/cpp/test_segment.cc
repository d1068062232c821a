// Maps of segments and their composition (math.md 6): against the oracle, against whole sequences, and what is refused.
#include <cmath>
#include <limits>

#include "contract.h"
#include "segment_promises.h"

namespace kda::test {
namespace {

// In f32 everything is computed and kept in f32; see test_numerics.cc.
constexpr double kBudget = 1e-5;

struct Param {
  std::string impl, case_name;
};
std::string name_of(const testing::TestParamInfo<Param>& info) { return info.param.impl + "_" + info.param.case_name; }
void PrintTo(const Param& p, std::ostream* out) { *out << p.impl << " on " << p.case_name; }

std::vector<Param> params() {
  std::vector<Param> all;
  for (const std::string& impl : cpu_implementations("segment_map"))
    for (const Case& c : cases()) all.push_back({impl, c.name});
  return all;
}

class SegmentMap : public testing::TestWithParam<Param> {
 protected:
  SegmentMap() : in(find_case(GetParam().case_name)) {}
  const char* impl() const { return GetParam().impl.c_str(); }
  const Inputs in;
};

TEST_P(SegmentMap, EqualsTheOracle) {
  SegmentOutputs reference(in, true), out(in);
  run(segment_map_args(in, reference), {.impl = "reference"});
  run(segment_map_args(in, out), {.impl = impl()});
  if (HasFatalFailure()) return;
  for (size_t i = 0; i < 3; ++i) {
    const Tensor &got = *out.tensors()[i].tensor, &expected = *reference.tensors()[i].tensor;
    EXPECT_TRUE(close(expected, got, kBudget)) << out.tensors()[i].name;
    EXPECT_EQ(got.unwritten(), 0);
    EXPECT_TRUE(got.margins_intact());
  }
}

// Each of the three alone, or two of them: the same bits.
TEST_P(SegmentMap, AnySubset) {
  SegmentOutputs all(in);
  run(segment_map_args(in, all), {.impl = impl()});
  for (int wanted = 1; wanted < 7; ++wanted) {
    SegmentOutputs some(in);
    const std::vector<Named> got = some.tensors(), expected = all.tensors();
    for (int i = 0; i < 3; ++i)
      if (!(wanted >> i & 1)) *got[i].tensor = Tensor();
    run(segment_map_args(in, some), {.impl = impl()});
    for (int i = 0; i < 3; ++i)
      if (wanted >> i & 1) {
        EXPECT_EQ(got[i].tensor->bits(), expected[i].tensor->bits()) << got[i].name << " " << wanted;
      }
  }
}

// b is the final state from zeros; d is the gradient of the initial state without one of the final state. Both have,
// bit for bit, the values of the chunked forward and backward.
TEST_P(SegmentMap, EqualsForwardAndBackward) {
  SegmentOutputs out(in);
  run(segment_map_args(in, out), {.impl = impl()});
  ForwardOutputs forward(in, false);
  forward.hT = Tensor(KDA_F32, in.state_shape(in.N));
  kda_forward_args f = forward_args(in, forward);
  f.states.h0 = {};
  run(f, {.impl = "cpu_chunk"});
  EXPECT_EQ(out.b.bits(), forward.hT.bits());
  BackwardOutputs backward(in);
  backward.dh0 = Tensor(KDA_F32, in.state_shape(in.N));
  kda_backward_args b = backward_args(in, backward);
  b.dhT = {};
  run(b, {.impl = "cpu_chunk"});
  EXPECT_EQ(out.d.bits(), backward.dh0.bits());
}

INSTANTIATE_TEST_SUITE_P(All, SegmentMap, testing::ValuesIn(params()), name_of);

// ---- composition ----

// One row of tokens is cut into segments, as packed sequences. Their maps, merged, are the map of the whole, and
// carry h0 to hT and dhT to dh0.
void expect_composition(const Case& whole_case, const std::vector<int64_t>& lengths) {
  Case c = whole_case;
  for (const int64_t length : lengths) c.T += length;
  const Inputs whole(c);
  const int64_t P = static_cast<int64_t>(lengths.size()), HV = c.HV;
  SegmentOutputs map(whole);
  run(segment_map_args(whole, map));
  BackwardOutputs backward(whole, true);
  ForwardOutputs forward(whole, false, true);
  run(forward_args(whole, forward), {.impl = "reference"});
  run(backward_args(whole, backward), {.impl = "reference"});

  std::vector<double> cu{0};
  for (const int64_t length : lengths) cu.push_back(cu.back() + static_cast<double>(length));
  const Tensor cu_seqlens(KDA_I32, {P + 1}, cu);
  const auto parts_of = [&](const Tensor& like) {
    std::vector<int64_t> shape = like.shape();
    shape[0] = P;
    return Tensor(KDA_F32, shape);
  };
  const Tensor M = parts_of(map.M), b = parts_of(map.b), d = parts_of(map.d);
  kda_segment_map_args a = segment_map_args(whole, map);
  a.in.cu_seqlens = cu_seqlens, a.M = M, a.b = b, a.d = d;
  run(a);

  const auto merged = [&](const Tensor& parts, const Tensor* h0, bool reverse) {
    std::vector<int64_t> shape = parts.shape();
    shape[0] = P + 1;
    const Tensor states(KDA_F32, shape);
    kda_segment_merge_args m = KDA_SEGMENT_MERGE_ARGS_INIT;
    m.M = M, m.b = parts, m.states = states, m.reverse = reverse, m.state_layout = c.state_layout;
    if (h0) {
      m.h0 = *h0, m.h0.ndim = 3;
      for (int i = 0; i < 3; ++i) m.h0.shape[i] = h0->view().shape[i + 1], m.h0.stride[i] = h0->view().stride[i + 1];
    }
    run(m);
    shape[0] = 1;
    Tensor last(KDA_F32, shape);
    for (int64_t i = 0; i < last.size(); ++i) last.set(i, states.get((reverse ? 0 : P) * last.size() + i));
    return last;
  };
  EXPECT_TRUE(close(map.b, merged(b, nullptr, false), kBudget)) << "b";
  EXPECT_TRUE(close(map.d, merged(d, nullptr, true), kBudget)) << "d";
  EXPECT_TRUE(close(forward.hT, merged(b, &whole.h0, false), kBudget)) << "hT";
  EXPECT_TRUE(close(backward.dh0, merged(d, &whole.dhT, true), kBudget)) << "dh0";

  // M of the whole is the product, last segment first.
  const int64_t K = c.K;
  for (int64_t hv = 0; hv < HV; ++hv) {
    std::vector<double> product(K * K);
    for (int64_t i = 0; i < K; ++i) product[i * K + i] = 1;
    for (int64_t n = 0; n < P; ++n) {
      std::vector<double> next(K * K);
      for (int64_t i = 0; i < K; ++i)
        for (int64_t k = 0; k < K; ++k)
          for (int64_t j = 0; j < K; ++j)
            next[i * K + j] += M.get(((n * HV + hv) * K + i) * K + k) * product[k * K + j];
      product = next;
    }
    Tensor expected(KDA_F64, {K, K}, product), got(KDA_F32, {K, K});
    for (int64_t i = 0; i < K * K; ++i) got.set(i, map.M.get(hv * K * K + i));
    EXPECT_TRUE(close(expected, got, kBudget)) << "M of head " << hv;
  }
}

TEST(Composition, OfSegmentsIsTheWhole) {
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{130}, {64, 64}, {1, 0, 129, 17}, {50, 50, 50, 50}, {0, 0}})
    for (const int32_t layout : {KDA_STATE_V_FIRST, KDA_STATE_K_FIRST}) {
      expect_composition({.name = "compose", .T = 0, .H = 1, .HV = 2, .K = 20, .V = 36, .state_layout = layout},
                         lengths);
      expect_composition({.name = "compose_slow",
                          .T = 0,
                          .K = 32,
                          .V = 16,
                          .state_layout = layout,
                          .gate_form = KDA_GATE_SOFTPLUS,
                          .gates = Gates::kRaw,
                          .A_log = true,
                          .dt_bias = true,
                          .beta_form = KDA_BETA_2SIGMOID,
                          .qk_l2norm = true},
                         lengths);
    }
}

// ---- merge ----

TEST(SegmentMerge, EqualsTheOracle) {
  for (const std::string& impl : cpu_implementations("segment_merge"))
    for (const MergeSizes& s :
         {MergeSizes{0, 1, 4, 4}, {1, 1, 1, 1}, {3, 2, 60, 100}, {5, 3, 17, 200}, {2, 1, 128, 128}})
      expect_merge_is_the_oracle(s, [&](const auto& a, bool) { run(a, {.impl = impl.c_str()}); });
}

TEST(SegmentMerge, ThreadsChangeNoBit) {
  for (const std::string& impl : cpu_implementations("segment_merge"))
    for (const bool reverse : {false, true}) {
      const auto bits = [&](const How& how) {
        const MergeTensors t(4, 2, 40, 200, KDA_STATE_V_FIRST);
        run(segment_merge_args(t, reverse), how);
        return t.states.bits();
      };
      const Bits one = bits({.impl = impl.c_str(), .threads = 1, .workspace_fill = 0});
      for (const int threads : {2, 3, 5, 20, 0}) EXPECT_EQ(bits({.impl = impl.c_str(), .threads = threads}), one);
    }
}

TEST(SegmentMerge, NaNStaysInItsHead) {
  for (const std::string& impl : cpu_implementations("segment_merge"))
    expect_nan_stays_in_its_head_of_a_merge([&](const auto& a) { run(a, {.impl = impl.c_str()}); });
}

// ---- the contract ----

using Map = Legal<kda_segment_map_args>;
using Merge = Legal<kda_segment_merge_args>;

void map_refuses(const std::string& sentence, const std::function<void(Map&)>& break_it) {
  refuses<kda_segment_map_args>(sentence, break_it);
}
void merge_refuses(const std::string& sentence, const std::function<void(Merge&)>& break_it) {
  refuses<kda_segment_merge_args>(sentence, break_it);
}

TEST(SegmentMapRefuses, Arguments) {
  map_refuses("d_o: expected together with d, got d_o alone", [](Map& x) { x.args.d = {}; });
  map_refuses("d_o: expected together with d, got d alone", [](Map& x) { x.args.d_o = {}; });
  map_refuses("d_o: expected shape [1,9,2,3] like v, got [1,8,2,3]", [](Map& x) { x.args.d_o.shape[1] = 8; });
  map_refuses("M: expected shape [3,2,5,5] ([N,HV,K,K]), got [3,2,5,4]", [](Map& x) { x.args.M.shape[3] = 4; });
  map_refuses("b: expected shape [3,2,3,5] ([..,HV,V,K], V-first), got [3,2,5,3]",
              [](Map& x) { std::swap(x.args.b.shape[2], x.args.b.shape[3]); });
  map_refuses("d: expected shape [3,2,5,3] ([..,HV,K,V], K-first), got [3,2,3,5]", [](Map& x) {
    x.args.in.state_layout = KDA_STATE_K_FIRST;
    std::swap(x.args.b.shape[2], x.args.b.shape[3]);
    x.args.b.stride[2] = 3;
  });
  map_refuses("M: expected float32, got bfloat16", [](Map& x) { x.args.M.dtype = KDA_BF16; });
  map_refuses("b: expected float32, got bfloat16", [](Map& x) { x.args.b.dtype = KDA_BF16; });
  map_refuses("q: expected 4 dimensions [B,T,H,K], got 0", [](Map& x) { x.args.in.q = {}; });
  map_refuses("v: expected HV a multiple of H = 3, got 2", [](Map& x) { x.args.in.q.shape[2] = 3; });
  map_refuses("cu_seqlens[3]: expected at most T = 9, got 10", [](Map& x) { x.in.cu_seqlens.set(3, 10); });
  map_refuses("A_log: expected [HV] with the softplus gate, got none", [](Map& x) { x.args.in.A_log = {}; });
  map_refuses("d: expected memory of its own, got memory that overlaps d_o",
              [](Map& x) { x.args.d.data = x.args.d_o.data; });
  map_refuses("b: expected memory of its own, got memory that overlaps d",
              [](Map& x) { x.args.d.data = x.args.b.data; });
}

TEST(SegmentMergeRefuses, Arguments) {
  merge_refuses("M: expected 4 dimensions [P,HV,K,K], got 0", [](Merge& x) { x.args.M = {}; });
  merge_refuses("b: expected 4 dimensions [P,HV,V,K], got 0", [](Merge& x) { x.args.b = {}; });
  merge_refuses("b: expected 4 dimensions [P,HV,K,V], got 3",
                [](Merge& x) { x.args.b.ndim = 3, x.args.state_layout = KDA_STATE_K_FIRST; });
  merge_refuses("states: expected 4 dimensions [4,2,3,5] ([..,HV,V,K], V-first), got 0",
                [](Merge& x) { x.args.states = {}; });
  merge_refuses("states: expected shape [4,2,3,5] ([..,HV,V,K], V-first), got [3,2,3,5]",
                [](Merge& x) { x.args.states.shape[0] = 3; });
  merge_refuses("M: expected HV >= 1, got 0", [](Merge& x) { x.args.M.shape[1] = 0; });
  for (const int64_t size : {0, 257}) {
    merge_refuses("M: expected K in 1..256, got " + std::to_string(size), [&](Merge& x) { x.args.M.shape[2] = size; });
    merge_refuses("b: expected V in 1..256, got " + std::to_string(size), [&](Merge& x) { x.args.b.shape[2] = size; });
  }
  merge_refuses("M: expected shape [3,2,5,5] ([P,HV,K,K]), got [3,2,5,4]", [](Merge& x) { x.args.M.shape[3] = 4; });
  merge_refuses("b: expected shape [2,2,3,5] ([..,HV,V,K], V-first), got [3,2,3,5]",
                [](Merge& x) { x.args.M.shape[0] = 2; });
  merge_refuses("h0: expected 3 dimensions [2,3,5] ([..,HV,V,K], V-first), got 2",
                [](Merge& x) { x.args.h0.ndim = 2; });
  merge_refuses("h0: expected float32 or bfloat16, got float16", [](Merge& x) { x.args.h0.dtype = KDA_F16; });
  merge_refuses("states: expected float32, got bfloat16", [](Merge& x) { x.args.states.dtype = KDA_BF16; });
  for (const int32_t value : {-1, 2}) {
    const std::string got = "expected 0..1, got " + std::to_string(value);
    merge_refuses("state_layout: " + got, [&](Merge& x) { x.args.state_layout = value; });
    merge_refuses("reverse: " + got, [&](Merge& x) { x.args.reverse = value; });
  }
  merge_refuses("states: expected memory of its own, got memory that overlaps b",
                [](Merge& x) { x.args.states.data = x.args.b.data; });
  merge_refuses("states: expected memory of its own, got memory that overlaps h0",
                [](Merge& x) { x.args.states.data = x.args.h0.data; });
}

TEST(Workspace, ReadsNoData) {
  const auto with_fake_pointers = [](auto legal) {
    uint64_t real = 0, fake = 0;
    EXPECT_EQ(query(legal->args, &real), KDA_OK);
    uintptr_t address = uintptr_t{1} << 40;
    for (const Field& f : legal->fields()) f.t->data = reinterpret_cast<void*>(address += 1 << 20);
    EXPECT_EQ(query(legal->args, &fake), KDA_OK) << kda_last_error();
    EXPECT_EQ(fake, real);
  };
  with_fake_pointers(std::make_unique<Map>());
  with_fake_pointers(std::make_unique<Merge>());
}

TEST(Nothing, ToDo) {
  Map none;  // no output wanted
  none.args.M = none.args.b = none.args.d = none.args.d_o = {};
  run(none.args);
  const auto call = [](const auto& a) { run(a); };
  expect_no_tokens_no_change({.name = "empty", .B = 0, .T = 0, .HV = 2, .K = 5, .V = 3}, call);
  expect_no_tokens_no_change({.name = "none", .B = 2, .T = 0, .HV = 2, .K = 5, .V = 3}, call);
  expect_no_tokens_no_change({.name = "zero", .HV = 2, .K = 5, .V = 3, .lengths = {0, 0}, .tail = 3}, call);
}

}  // namespace
}  // namespace kda::test
