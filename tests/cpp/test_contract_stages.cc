// What the stages and kda_prefill_f32 must be given, beside what test_contract.cc asks of every operator.
#include <cmath>
#include <limits>
#include <set>

#include "contract.h"

namespace kda::test {
namespace {

using Cumsum = kda_stage_cumsum_args;
using Intra = kda_stage_chunk_intra_args;
using Recompute = kda_stage_recompute_w_u_args;
using Scan = kda_stage_delta_h_args;
using Output = kda_stage_fwd_o_args;
using Local = kda_stage_bwd_local_args;
using ReverseScan = kda_stage_bwd_delta_h_args;
using Wide = kda_stage_bwd_wy_dqkg_args;
using Pairs = kda_stage_bwd_intra_args;
using CumsumBackward = kda_stage_cumsum_backward_args;

template <class Args>
struct EveryStage : testing::Test {};
using AllStages =
    testing::Types<Cumsum, Intra, Recompute, Scan, Output, Local, ReverseScan, Wide, Pairs, CumsumBackward>;
TYPED_TEST_SUITE(EveryStage, AllStages, OperatorNames);

TYPED_TEST(EveryStage, Options) {
  for (const int32_t layout : {-1, 2})
    refuses<TypeParam>("state_layout: expected 0..1, got " + std::to_string(layout),
                       [&](auto& x) { x.args.at.state_layout = layout; });
  for (const float scale : {std::numeric_limits<float>::infinity(), std::nanf("")})
    refuses<TypeParam>("scale: expected a finite number, got ", [&](auto& x) { x.args.at.scale = scale; });
}

TYPED_TEST(EveryStage, CuSeqlens) {
  const auto cu = [](auto& x) -> Tensor& { return x.t.all.at("cu_seqlens"); };
  refuses<TypeParam>("cu_seqlens: expected shape [N+1], got [0]", [](auto& x) { x.args.at.cu_seqlens.shape[0] = 0; });
  refuses<TypeParam>("cu_seqlens: expected int32 or int64, got float32",
                     [](auto& x) { x.args.at.cu_seqlens.dtype = KDA_F32; });
  refuses<TypeParam>("cu_seqlens[0]: expected 0, got 1", [&](auto& x) { cu(x).set(0, 1); });
  refuses<TypeParam>("cu_seqlens[2]: expected at least 2 (never decreasing), got 1", [&](auto& x) { cu(x).set(2, 1); });
  refuses<TypeParam>("cu_seqlens[3]: expected at most T = 9, got 10", [&](auto& x) { cu(x).set(3, 10); });
}

// Every tensor that is not optional.
TYPED_TEST(EveryStage, Absent) {
  const std::set<std::string> optional = {"cu_seqlens", "h0", "hT", "dhT", "dh0"};
  const std::set<std::string> of_op[] = {{"w", "u", "qG", "kg"}, {"h", "v_new"}, {"g"}};
  const std::string op = op_name<TypeParam>();
  const std::set<std::string>& here = op == "stage_chunk_intra" || op == "stage_recompute_w_u" ? of_op[0]
                                      : op == "stage_delta_h"                                  ? of_op[1]
                                      : op == "stage_cumsum_backward"                          ? of_op[2]
                                                                                               : optional;
  const size_t count = Legal<TypeParam>().fields().size();
  for (size_t i = 0; i < count; ++i) {
    const std::string name = Legal<TypeParam>().fields()[i].name;
    const bool needed_for_qG = op == "stage_recompute_w_u" && name == "q";
    if (optional.contains(name) || here.contains(name) || needed_for_qG) continue;
    const std::string rank = name == "beta" || name == "dbeta" ? "3" : "4";
    refuses<TypeParam>(name + ": expected " + rank + " dimensions [", [&](auto& x) { *x.fields()[i].t = {}; });
  }
}

TEST(StageRefuses, HeadSizes) {
  for (const int64_t size : {0, 257}) {
    const std::string got = std::to_string(size);
    refuses<Intra>("q: expected K in 1..256, got " + got, [&](auto& x) { x.args.q.shape[3] = size; });
    refuses<Intra>("v: expected V in 1..256, got " + got, [&](auto& x) { x.args.v.shape[3] = size; });
    refuses<Cumsum>("g: expected K in 1..256, got " + got, [&](auto& x) { x.args.g.shape[3] = size; });
    refuses<Scan>("kg: expected K in 1..256, got " + got, [&](auto& x) { x.args.kg.shape[3] = size; });
    refuses<Local>("v_new: expected V in 1..256, got " + got, [&](auto& x) { x.args.v_new.shape[3] = size; });
  }
  refuses<Cumsum>("g: expected HV >= 1, got 0", [](auto& x) { x.args.g.shape[2] = 0; });
  refuses<Intra>("q: expected H >= 1, got 0", [](auto& x) { x.args.q.shape[2] = 0; });
  refuses<Intra>("v: expected HV a multiple of H = 3, got 2", [](auto& x) { x.args.q.shape[2] = 3; });
  refuses<Pairs>("G: expected HV a multiple of H = 3, got 2", [](auto& x) { x.args.q.shape[2] = 3; });
  refuses<Intra>("Aqk: expected shape [1,9,2,64] ([B,T,HV,C]), got [1,9,2,32]",
                 [](auto& x) { x.args.Aqk.shape[3] = 32; });
}

TEST(StageRefuses, Dtypes) {
  refuses<Intra>("G: expected float32, got bfloat16", [](auto& x) { x.args.G.dtype = KDA_BF16; });
  refuses<Cumsum>("G: expected float32, got float16", [](auto& x) { x.args.G.dtype = KDA_F16; });
  refuses<Scan>("h: expected float32 or bfloat16, got float16", [](auto& x) { x.args.h.dtype = KDA_F16; });
  refuses<Local>("dAqk: expected float32, got bfloat16", [](auto& x) { x.args.dAqk.dtype = KDA_BF16; });
  refuses<Pairs>("dq: expected float32, got bfloat16", [](auto& x) { x.args.dq.dtype = KDA_BF16; });
  refuses<Wide>("dbeta: expected float32, got float16", [](auto& x) { x.args.dbeta.dtype = KDA_F16; });
}

TEST(StageRefuses, RowsOfChunkStates) {
  const auto packed = [](auto& x) { x.args.at.cu_seqlens = {}; };
  refuses<Scan>("h: expected at least 2 rows, one a chunk, got 1", [](auto& x) { x.args.h.shape[0] = 1; });
  refuses<Output>("h: expected at least 2 rows, one a chunk, got 0", [](auto& x) { x.args.h.shape[0] = 0; });
  refuses<ReverseScan>("dh: expected at least 2 rows, one a chunk, got 1", [](auto& x) { x.args.dh.shape[0] = 1; });
  refuses<Wide>("dh: expected at least 2 rows, one a chunk, got 1", [](auto& x) { x.args.dh.shape[0] = 1; });
  refuses<Output>("h: expected at least 1 rows, one a chunk, got 0", [&](auto& x) {
    packed(x);
    x.args.h.shape[0] = 0;
  });
}

TEST(StageRefuses, Together) {
  refuses<Recompute>("q: expected [B,T,H,K] for qG, got none", [](auto& x) { x.args.q = {}; });
  refuses<Local>("scale: expected a number other than 0, since no tensor tells K, got 0",
                 [](auto& x) { x.args.at.scale = 0; });
}

TEST(StageRefuses, OverlappingMemory) {
  const auto overlap = [](const std::string& out, const std::string& in) {
    return out + ": expected memory of its own, got memory that overlaps " + in;
  };
  refuses<Cumsum>(overlap("G", "g"), [](auto& x) { x.args.G.data = x.args.g.data; });
  refuses<Intra>(overlap("w", "kg"), [](auto& x) { x.args.w.data = x.args.kg.data; });
  refuses<Scan>(overlap("v_new", "u"), [](auto& x) { x.args.v_new.data = x.args.u.data; });
  refuses<Output>(overlap("o", "v_new"), [](auto& x) { x.args.o.data = x.args.v_new.data; });
  refuses<ReverseScan>(overlap("dv_new", "dv_local"), [](auto& x) { x.args.dv_new.data = x.args.dv_local.data; });
  refuses<ReverseScan>(overlap("dh0", "dhT"), [](auto& x) { x.args.dh0 = x.args.dhT; });
  refuses<Pairs>(overlap("dq", "dk"), [](auto& x) { x.args.dk.data = x.args.dq.data; });
  refuses<CumsumBackward>(overlap("dg", "dG"), [](auto& x) { x.args.dg.data = x.args.dG.data; });
}

// ---- kda_prefill_f32 ----

using P = Legal<kda_prefill_f32_args>;
void prefill_refuses(const std::string& sentence, const std::function<void(P&)>& break_it) {
  refuses<kda_prefill_f32_args>(sentence, break_it);
}

TEST(PrefillF32Refuses, Options) {
  for (const int32_t chunk : {-1, 16, 63, 128})
    prefill_refuses("chunk: expected 32 or 64, got " + std::to_string(chunk), [&](P& x) { x.args.chunk = chunk; });
  for (const int32_t layout : {-1, 2})
    prefill_refuses("state_layout: expected 0..1, got " + std::to_string(layout),
                    [&](P& x) { x.args.state_layout = layout; });
  prefill_refuses("scale: expected a finite number, got inf",
                  [](P& x) { x.args.scale = std::numeric_limits<float>::infinity(); });
  prefill_refuses("args.reserved: expected 0, got 1", [](P& x) { x.args.reserved = 1; });
}

TEST(PrefillF32Refuses, Tensors) {
  prefill_refuses("q: expected 4 dimensions [B,H,T,K], got 0", [](P& x) { x.args.q = {}; });
  prefill_refuses("v: expected 4 dimensions [B,HV,T,V], got 3", [](P& x) { x.args.v.ndim = 3; });
  prefill_refuses("o: expected 4 dimensions [1,2,9,3] like v, got 0", [](P& x) { x.args.o = {}; });
  prefill_refuses("k: expected float32, got bfloat16", [](P& x) { x.args.k.dtype = KDA_BF16; });
  prefill_refuses("h0: expected float32, got bfloat16", [](P& x) { x.args.h0.dtype = KDA_BF16; });
  for (const int64_t size : {0, 257}) {
    const std::string got = std::to_string(size);
    prefill_refuses("q: expected K in 1..256, got " + got, [&](P& x) { x.args.q.shape[3] = size; });
    prefill_refuses("v: expected V in 1..256, got " + got, [&](P& x) { x.args.v.shape[3] = size; });
  }
  prefill_refuses("q: expected H >= 1, got 0", [](P& x) { x.args.q.shape[1] = 0; });
  prefill_refuses("v: expected HV a multiple of H = 3, got 2", [](P& x) { x.args.q.shape[1] = 3; });
  prefill_refuses("g: expected shape [1,2,9,5] ([B,HV,T,K] of q and v), got [1,1,9,5]",
                  [](P& x) { x.args.g.shape[1] = 1; });
  // Buffers of 64 rows where the chunk has 32.
  prefill_refuses("w: expected shape [1,2,1,32,5] ([B,HV,ceil(T/chunk),chunk,K]), got [1,2,1,64,5]",
                  [](P& x) { x.args.chunk = 32; });
  prefill_refuses("u: expected shape [1,2,1,64,3] ([B,HV,ceil(T/chunk),chunk,V]), got [1,2,2,64,3]",
                  [](P& x) { x.args.u.shape[2] = 2; });
}

TEST(PrefillF32Refuses, OverlappingMemory) {
  prefill_refuses("o: expected memory of its own, got memory that overlaps v",
                  [](P& x) { x.args.o.data = x.args.v.data; });
  prefill_refuses("w: expected memory of its own, got memory that overlaps u",
                  [](P& x) { x.args.u.data = x.args.w.data; });
  P x;
  const Workspace workspace = workspace_for(x.args);
  x.args.hT = x.args.h0;
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();  // in place
}

}  // namespace
}  // namespace kda::test
