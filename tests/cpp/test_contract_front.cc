// What decode, verify, flush and flush_verify refuse in a convolution in front of them, and decode in snapshots.
#include "contract.h"

namespace kda::test {
namespace {

// The legal call with raw rows instead of q, k and v: D = 2 x 5 + 2 x 3 channels, W = 3.
template <class Args>
struct Raw : Legal<Args> {
  Tensor x, weight, bias, state, indices, last_x;
  Raw()
      : x(KDA_F32, {1, this->in.T, 16}),
        weight(KDA_F32, {16, 3}),
        bias(KDA_F32, {16}),
        state(KDA_F32, {this->in.N + 1, 16, 2}),
        indices(KDA_I32, {this->in.N}, {2, 0, 3}),
        last_x(KDA_F32, {this->in.N, 4, 16}) {
    for (Tensor* t : {&x, &weight, &bias, &state, &last_x}) t->fill(0.25);
    Args& a = this->args;
    a.in.q = a.in.k = a.in.v = {};
    a.conv.x = x, a.conv.weight = weight, a.conv.bias = bias, a.conv.state = state, a.conv.indices = indices;
    if constexpr (requires { a.last_conv_x; }) a.last_conv_x = last_x;
  }
};

template <class Args>
void raw_refuses(const std::string& sentence, const std::function<void(Raw<Args>&)>& break_it,
                 kda_status status = KDA_INVALID_ARGUMENT) {
  Raw<Args> x;
  const Workspace workspace = workspace_for(x.args);
  break_it(x);
  const Bits state = x.state.bits();
  expect_refused<Args>(x, sentence, status);
  EXPECT_EQ(x.state.bits(), state) << sentence;
}

template <class BreakIt>
void all_refuse(const std::string& sentence, BreakIt break_it, kda_status status = KDA_INVALID_ARGUMENT) {
  raw_refuses<kda_decode_args>(
      sentence, [&](auto& x) { break_it(x.args, x); }, status);
  raw_refuses<kda_verify_args>(
      sentence, [&](auto& x) { break_it(x.args, x); }, status);
  raw_refuses<kda_flush_verify_args>(
      sentence, [&](auto& x) { break_it(x.args, x); }, status);
}

template <class Args>
void runs() {
  Raw<Args> x;
  const Workspace workspace = workspace_for(x.args);
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
}

TEST(ConvInFront, LegalCallRuns) {
  runs<kda_decode_args>();
  runs<kda_verify_args>();
  runs<kda_flush_verify_args>();
}

TEST(ConvInFront, AllOrNothing) {
  all_refuse("conv.weight: expected conv.x with it, got none", [](auto& a, auto&) { a.conv.x = {}; });
  all_refuse("conv.state: expected conv.x with it, got none",
             [](auto& a, auto&) { a.conv.x = a.conv.weight = a.conv.bias = {}; });
  all_refuse("conv.indices: expected conv.x with it, got none",
             [](auto& a, auto&) { a.conv.x = a.conv.weight = a.conv.bias = a.conv.state = {}; });
  all_refuse("q: expected none with conv.x, which holds it, got one", [](auto& a, auto& x) { a.in.q = x.in.q; });
  all_refuse("v: expected none with conv.x, which holds it, got one", [](auto& a, auto& x) { a.in.v = x.in.v; });
}

TEST(ConvInFront, Sizes) {
  all_refuse("conv.x: expected 3 dimensions [B,T,D], got 2", [](auto& a, auto&) { a.conv.x.ndim = 2; });
  all_refuse("conv.x: expected D = 2 H K + HV V channels with K = 5 and HV V = 6, got 17",
             [](auto& a, auto&) { a.conv.x.shape[2] = 17; });
  all_refuse("conv.x: expected D = 2 H K + HV V channels with K = 5 and HV V = 6, got 6",
             [](auto& a, auto&) { a.conv.x.shape[2] = 6; });
  all_refuse("g: expected 4 dimensions [B,T,HV,K], got 0", [](auto& a, auto&) { a.in.g = {}; });
  all_refuse("o: expected 4 dimensions [B,T,HV,V], got 0", [](auto& a, auto&) { a.o = {}; });
  for (const int64_t W : {1, 5})
    all_refuse("conv.weight: expected shape [D,W] with W in 2..4, got [16," + std::to_string(W) + "]",
               [&](auto& a, auto&) { a.conv.weight.shape[1] = W; });
  all_refuse("conv.weight: expected shape [16,3] ([D,W]), got [15,3]",
             [](auto& a, auto&) { a.conv.weight.shape[0] = 15; });
  all_refuse("conv.bias: expected shape [16] ([D]), got [15]", [](auto& a, auto&) { a.conv.bias.shape[0] = 15; });
  all_refuse("conv.state: expected 3 dimensions [slots,D,W-1], got 0", [](auto& a, auto&) { a.conv.state = {}; });
  all_refuse("conv.state: expected shape [4,16,2] ([slots,D,W-1]), got [4,16,1]",
             [](auto& a, auto&) { a.conv.state.shape[2] = 1; });
  all_refuse("conv.state: expected at least N = 3 slots without indices, got 2", [](auto& a, auto&) {
    a.conv.indices = {};
    a.conv.state.shape[0] = 2;
  });
  all_refuse("conv.indices: expected shape [3] ([N]), got [4]", [](auto& a, auto&) { a.conv.indices.shape[0] = 4; });
}

TEST(ConvInFront, Dtypes) {
  all_refuse("conv.x: expected float32", [](auto& a, auto&) { a.conv.x.dtype = KDA_I32; });
  all_refuse("conv.weight: expected float32", [](auto& a, auto&) { a.conv.weight.dtype = KDA_BOOL; });
  all_refuse("conv.state: expected float32", [](auto& a, auto&) { a.conv.state.dtype = KDA_I64; });
  all_refuse("conv.indices: expected int32 or int64, got bool",
             [](auto& a, auto&) { a.conv.indices.dtype = KDA_BOOL; });
  raw_refuses<kda_flush_verify_args>("last_conv_x: expected float32, got bfloat16",
                                     [](auto& x) { x.args.last_conv_x.dtype = KDA_BF16; });
}

// Float64 anywhere is for the oracle alone: the kernels would read it as something else.
TEST(ConvInFront, Float64IsForTheReference) {
  static double memory[512];
  for (kda_tensor kda_conv_inputs::*t : {&kda_conv_inputs::weight, &kda_conv_inputs::bias, &kda_conv_inputs::state}) {
    const auto forced = [&](auto& a, const char* impl) {
      (a.conv.*t).dtype = KDA_F64, (a.conv.*t).data = memory, a.exec.impl = impl;
    };
    const auto why = [](const std::string& impl) { return impl + " was forced but float64 runs on `reference` only"; };
    raw_refuses<kda_decode_args>(
        why("cpu_recurrent"), [&](auto& x) { forced(x.args, "cpu_recurrent"); }, KDA_UNSUPPORTED);
    raw_refuses<kda_verify_args>(
        why("cpu_verify"), [&](auto& x) { forced(x.args, "cpu_verify"); }, KDA_UNSUPPORTED);
    raw_refuses<kda_flush_verify_args>(
        why("cpu_flush_verify"), [&](auto& x) { forced(x.args, "cpu_flush_verify"); }, KDA_UNSUPPORTED);
  }
  for (kda_tensor kda_flush_args::*t : {&kda_flush_args::conv_x, &kda_flush_args::conv_state})
    refuses<kda_flush_args>(
        "cpu_flush was forced but float64 runs on `reference` only",
        [&](auto& x) { (x.args.*t).dtype = KDA_F64, (x.args.*t).data = memory, x.args.exec.impl = "cpu_flush"; },
        KDA_UNSUPPORTED);
}

TEST(ConvInFront, Slots) {
  all_refuse("conv.indices: expected slots below 4, got 4", [](auto&, auto& x) { x.indices.set(1, 4); });
  all_refuse("conv.indices: expected every live slot once, got slot 3 twice",
             [](auto&, auto& x) { x.indices.set(0, 3); });
}

// Requests that are padding leave their slots alone, and may share them.
TEST(ConvInFront, PaddingSharesSlots) {
  for (const char* impl : {"cpu_recurrent", "reference"}) {
    Raw<kda_decode_args> x;
    x.x.fill(0.5);
    x.indices.set(0, 3);  // that of the last request
    x.h0.state_indices.set(0, -1);
    run(x.args, {.impl = impl});
    for (int64_t i = 0; i < x.state.size(); ++i) EXPECT_EQ(x.state.get(i), i / 32 == 3 ? 0.5 : 0.25) << impl << i;
  }
}

TEST(ConvInFront, Memory) {
  raw_refuses<kda_decode_args>("conv.state: expected memory of its own, got memory that overlaps conv.x",
                               [](auto& x) { x.args.conv.state.data = x.args.conv.x.data; });
  raw_refuses<kda_flush_verify_args>("conv.state: expected memory of its own, got memory that overlaps last_conv_x",
                                     [](auto& x) { x.args.conv.state.data = x.args.last_conv_x.data; });
  raw_refuses<kda_verify_args>("o: expected memory of its own, got memory that overlaps conv.x",
                               [](auto& x) { x.args.o.data = x.args.conv.x.data; });
}

TEST(ConvInFront, RowsOfTheLastRound) {
  raw_refuses<kda_flush_verify_args>("last_conv_x: expected together with conv.x, got conv.x alone",
                                     [](auto& x) { x.args.last_conv_x = {}; });
  refuses<kda_flush_verify_args>("last_conv_x: expected together with conv.x, got last_conv_x alone", [](auto& x) {
    static const Tensor rows(KDA_F32, {3, 4, 16});
    x.args.last_conv_x = rows;
  });
  raw_refuses<kda_flush_verify_args>("last_conv_x: expected shape [3,4,16] ([N,T,D], D like conv.x), got [3,4,15]",
                                     [](auto& x) { x.args.last_conv_x.shape[2] = 15; });
  raw_refuses<kda_flush_verify_args>("last_conv_x: expected shape [3,4,16] ([N,T,D], D like conv.x), got [2,4,16]",
                                     [](auto& x) { x.args.last_conv_x.shape[0] = 2; });
}

TEST(ConvInFront, FlushRefuses) {
  const auto flush_refuses = [](const std::string& sentence, const std::function<void(Legal<kda_flush_args>&)>& f) {
    refuses<kda_flush_args>(sentence, f);
  };
  flush_refuses("conv_state: expected together with conv_x, got conv_x alone", [](auto& x) { x.args.conv_state = {}; });
  flush_refuses("conv_state: expected together with conv_x, got conv_state alone", [](auto& x) { x.args.conv_x = {}; });
  flush_refuses("conv_indices: expected conv_x with it, got none",
                [](auto& x) { x.args.conv_x = x.args.conv_state = {}; });
  flush_refuses("conv_x: expected 3 dimensions, got 2", [](auto& x) { x.args.conv_x.ndim = 2; });
  flush_refuses("conv_state: expected 3 dimensions, got 4", [](auto& x) { x.args.conv_state.ndim = 4; });
  flush_refuses("conv_x: expected shape [3,5,7] ([N,T,D]), got [2,5,7]", [](auto& x) { x.args.conv_x.shape[0] = 2; });
  flush_refuses("conv_state: expected shape [5,6,3] ([slots,D,W-1], D like conv_x), got [5,7,3]",
                [](auto& x) { x.args.conv_x.shape[2] = 6; });
  flush_refuses("conv_state: expected W-1 in 1..3, got 0", [](auto& x) { x.args.conv_state.shape[2] = 0; });
  flush_refuses("conv_state: expected at least N = 3 slots without conv_indices, got 2",
                [](auto& x) { x.args.conv_indices = {}, x.args.conv_state.shape[0] = 2; });
  flush_refuses("conv_indices: expected slots below 5, got 5", [](auto& x) { x.conv_indices.set(0, 5); });
  flush_refuses("conv_indices: expected every live slot once, got slot 2 twice",
                [](auto& x) { x.conv_indices.set(0, 2), x.conv_indices.set(1, 2); });
}

// ---- snapshots ----

struct Shots : Legal<kda_decode_args> {
  Tensor pool, slots, rows, accepted;
  Shots()
      : pool(KDA_F32, {15, 2, 3, 5}),
        slots(KDA_I32, {3, 5}),
        rows(KDA_F32, {3, 5, 2, 3, 5}),
        accepted(KDA_I32, {3}, {1, 2, 5}) {
    for (int64_t i = 0; i < 15; ++i) slots.set(i, static_cast<double>(14 - i));
    args.states.has_initial_state = {};
    args.snapshots = pool, args.snapshot_slots = slots;
  }
  void start_from_them() {
    pool.fill(0.5);
    args.states = {}, args.states.h0 = pool, args.accepted = accepted;
  }
  void in_rows() { args.snapshots = rows, args.snapshot_slots = {}; }
};

void shots_refuse(const std::string& sentence, const std::function<void(Shots&)>& break_it) {
  Shots x;
  break_it(x);
  const Bits pool = x.pool.bits(), rows = x.rows.bits();
  expect_refused<kda_decode_args>(x, sentence);
  EXPECT_EQ(x.pool.bits(), pool) << sentence;
  EXPECT_EQ(x.rows.bits(), rows) << sentence;
}

TEST(SnapshotsContract, LegalCallsRun) {
  for (const bool start : {false, true}) {
    Shots x, rows;
    rows.in_rows(), rows.rows.fill(0.5);
    if (start) x.start_from_them(), rows.args.states = {}, rows.args.accepted = rows.accepted;
    EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
    EXPECT_EQ(call(rows.args), KDA_OK) << kda_last_error();
    EXPECT_TRUE(x.pool.margins_intact() && rows.rows.margins_intact());
  }
}

TEST(SnapshotsContract, Refuses) {
  shots_refuse("snapshot_slots: expected snapshots or accepted with it, got neither",
               [](Shots& x) { x.args.snapshots = {}; });
  shots_refuse("snapshot_slots: expected shape [N,S] with N = 3 and S at least 1, got [2,5]",
               [](Shots& x) { x.args.snapshot_slots.shape[0] = 2; });
  shots_refuse("snapshot_slots: expected shape [N,S] with N = 3 and S at least 1, got [3,0]",
               [](Shots& x) { x.args.snapshot_slots.shape[1] = 0; });
  shots_refuse("snapshot_slots: expected S at least 5, the tokens of sequence 2, got 4",
               [](Shots& x) { x.args.snapshot_slots.shape[1] = 4; });
  shots_refuse("snapshot_slots: expected slots below 15, got 15", [](Shots& x) { x.slots.set(3, 15); });
  shots_refuse("snapshot_slots: expected every live slot once, got slot 4 twice",
               [](Shots& x) { x.slots.set(3, 4), x.slots.set(14, 4); });
  shots_refuse("snapshots: expected shape [N,S,HV,V,K] with S at least 1 without snapshot_slots, got [15,2,3,5]",
               [](Shots& x) { x.args.snapshot_slots = {}; });
  shots_refuse("snapshots: expected S at least 5, the tokens of sequence 2, got 4",
               [](Shots& x) { x.in_rows(), x.args.snapshots.shape[1] = 4; });
  shots_refuse("snapshots: expected shape [3,5,2,3,5] ([N,S,HV,V,K] in the layout of the states), got [3,5,2,5,3]",
               [](Shots& x) { x.in_rows(), std::swap(x.args.snapshots.shape[3], x.args.snapshots.shape[4]); });
  shots_refuse("snapshots: expected float32 or bfloat16, got float16",
               [](Shots& x) { x.args.snapshots.dtype = KDA_F16; });
  shots_refuse("hT: expected memory of its own, got memory that overlaps snapshots",
               [](Shots& x) { x.args.states.hT.data = x.args.snapshots.data; });
  shots_refuse("accepted: expected snapshots or snapshot_slots with it, got neither",
               [](Shots& x) { x.args.accepted = x.accepted, x.args.snapshots = x.args.snapshot_slots = {}; });
  shots_refuse("accepted: expected the pool h0 with snapshot_slots, got none",
               [](Shots& x) { x.start_from_them(), x.args.states.h0 = {}; });
  shots_refuse("has_initial_state: expected none with accepted, got one", [](Shots& x) {
    x.args.states.has_initial_state = x.h0.has_initial_state, x.args.accepted = x.accepted;
  });
  shots_refuse("accepted: expected shape [3] ([N]), got [2]",
               [](Shots& x) { x.start_from_them(), x.args.accepted.shape[0] = 2; });
  shots_refuse("accepted: expected int32 or int64, got bool",
               [](Shots& x) { x.start_from_them(), x.args.accepted.dtype = KDA_BOOL; });
}

}  // namespace
}  // namespace kda::test
