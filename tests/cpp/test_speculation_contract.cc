// What verify, flush and flush_verify refuse beside what every operator does (test_contract.cc), each with a
// sentence.
#include "contract.h"

namespace kda::test {
namespace {

using V = Legal<kda_verify_args>;
using F = Legal<kda_flush_args>;
using FV = Legal<kda_flush_verify_args>;

void verify_refuses(const std::string& sentence, const std::function<void(V&)>& break_it) {
  refuses<kda_verify_args>(sentence, break_it);
}
void flush_refuses(const std::string& sentence, const std::function<void(F&)>& break_it) {
  refuses<kda_flush_args>(sentence, break_it);
}
void both_refuse(const std::string& sentence, const std::function<void(FV&)>& break_it) {
  refuses<kda_flush_verify_args>(sentence, break_it);
}

// flush_verify on a ring, legal: 3 requests of at most 5 drafts, 10 entries.
struct Ring : LegalDrafts {
  Ring() : LegalDrafts(legal_case(), true), args(flush_verify_args(drafts, drafts, h0.h, records, records, o)) {
    args.parents = args.last_parents = {};
  }
  kda_flush_verify_args args;
};
void ring_refuses(const std::string& sentence, const std::function<void(Ring&)>& break_it) {
  Ring r;
  const Workspace workspace = workspace_for(r.args);
  break_it(r);
  const Bits before{r.records.bits().bytes + r.h0.h.bits().bytes + r.o.bits().bytes};
  EXPECT_EQ(call(r.args), KDA_INVALID_ARGUMENT) << "expected refusal: " << sentence;
  EXPECT_EQ(std::string(kda_last_error()).substr(0, sentence.size()), sentence) << kda_last_error();
  EXPECT_EQ(Bits{r.records.bits().bytes + r.h0.h.bits().bytes + r.o.bits().bytes}, before) << sentence;
}

// ---- verify ----

TEST(VerifyRefuses, States) {
  verify_refuses("h0: expected the states to verify from, got none",
                 [](V& x) { x.args.states.h0 = x.args.states.state_indices = x.args.states.has_initial_state = {}; });
  verify_refuses("hT: expected none, verify writes no state, got one",
                 [](V& x) { x.args.states.hT = x.args.states.h0; });
  verify_refuses("state_indices: expected slots below 6, got 6", [](V& x) { x.h0.state_indices.set(1, 6); });
  verify_refuses("state_indices: expected every live slot once, got slot 4 twice",
                 [](V& x) { x.h0.state_indices.set(0, 4), x.h0.state_indices.set(2, 4); });
  verify_refuses("first_valid_slot: expected >= 0, got -1", [](V& x) { x.args.states.first_valid_slot = -1; });
}

TEST(VerifyRefuses, TooManyDrafts) {
  Case c = legal_case();
  c.lengths = {2, 17, 1};
  V packed(c);
  expect_refused(packed, "cu_seqlens: expected at most 16 tokens a request, got 17 for request 1");
  c.lengths.clear(), c.tail = 0, c.T = 17;
  V dense(c);
  expect_refused(dense, "q: expected at most 16 tokens a request, got T = 17");
}

TEST(VerifyRefuses, TooFewEntries) {
  verify_refuses("records.u: expected entries for the 5 tokens of request 2, got 4 a slot", [](V& x) {
    for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[1] = 4;
  });
  for (const int64_t R : {int64_t{0}, (int64_t{1} << 30) + 1}) {
    const std::string shape = "[5," + std::to_string(R) + ",2,3]";
    verify_refuses("records.u: expected 1 to 2^30 entries a slot, got " + shape, [R](V& x) {
      for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[1] = R;
    });
  }
  Case c = legal_case();
  c.lengths.clear(), c.tail = 0, c.B = 2, c.T = 6;
  V x(c);
  for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[1] = 5;
  expect_refused(x, "records.u: expected at least T = 6 entries a slot, got 5");
}

TEST(VerifyRefuses, Records) {
  verify_refuses("records.k: expected together with the others of u, k, alpha, got none",
                 [](V& x) { x.args.records.k = {}; });
  verify_refuses("records.indices: expected records with it, got none",
                 [](V& x) { x.args.records.u = x.args.records.k = x.args.records.alpha = {}; });
  verify_refuses("records.ring_first: expected records with it, got none", [](V& x) {
    x.args.records.u = x.args.records.k = x.args.records.alpha = x.args.records.indices = {};
  });
  verify_refuses("records.ring_count: expected together with ring_first, got ring_first alone",
                 [](V& x) { x.args.records.ring_count = {}; });
  verify_refuses("records.ring_count: expected together with ring_first, got ring_count alone",
                 [](V& x) { x.args.records.ring_first = {}; });
  verify_refuses("records.ring_first: expected shape [5] ([slots]), got [4]",
                 [](V& x) { x.args.records.ring_first.shape[0] = 4; });
  verify_refuses("records.ring_count: expected int32, got int64",
                 [](V& x) { x.args.records.ring_count.dtype = KDA_I64; });
  verify_refuses("records.u: expected 4 dimensions [slots,R,HV,V], got 3", [](V& x) { x.args.records.u.ndim = 3; });
  verify_refuses("records.u: expected shape [5,10,2,3] ([slots,R,HV,V]), got [5,10,1,3]",
                 [](V& x) { x.args.records.u.shape[2] = 1; });
  verify_refuses("records.k: expected shape [5,10,1,5] ([slots,R,H,K]), got [5,9,1,5]",
                 [](V& x) { x.args.records.k.shape[1] = 9; });
  verify_refuses("records.alpha: expected shape [5,10,2,5] ([slots,R,HV,K]), got [4,10,2,5]",
                 [](V& x) { x.args.records.alpha.shape[0] = 4; });
  verify_refuses("records.u: expected float32, got bfloat16", [](V& x) { x.args.records.u.dtype = KDA_BF16; });
  verify_refuses("records.u: expected at least N = 3 slots without indices, got 2", [](V& x) {
    x.args.records.indices = x.args.records.ring_first = x.args.records.ring_count = {};
    for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[0] = 2;
  });
  verify_refuses("records.indices: expected slots below 5, got 5", [](V& x) { x.records.indices.set(0, 5); });
  verify_refuses("records.indices: expected every live slot once, got slot 0 twice",
                 [](V& x) { x.records.indices.set(0, 0), x.records.indices.set(1, 0); });
}

TEST(VerifyRefuses, Parents) {
  verify_refuses("parents: expected shape [N,T] with N = 3 and T at least 0, got [2,5]",
                 [](V& x) { x.args.parents.shape[0] = 2; });
  verify_refuses("parents: expected shape [N,T] with N = 3 and T at least 0, got [3]",
                 [](V& x) { x.args.parents.ndim = 1; });
  verify_refuses("parents: expected int32 or int64, got bool", [](V& x) { x.args.parents.dtype = KDA_BOOL; });
  verify_refuses("parents: expected T at least 5, the tokens of request 2, got 4",
                 [](V& x) { x.args.parents.shape[1] = 4; });
  Case c = legal_case();
  c.lengths.clear(), c.tail = 0, c.B = 2, c.T = 6;
  V x(c);
  x.args.parents.shape[1] = 5;
  expect_refused(x, "parents: expected shape [N,T] with N = 2 and T at least 6, got [2,5]");
}

// ---- flush ----

TEST(FlushRefuses, Sizes) {
  flush_refuses("state: expected 4 dimensions [slots,HV,V,K], or 5 with layers in front, got 3",
                [](F& x) { x.args.state.ndim = 3; });
  flush_refuses("state: expected 4 dimensions [slots,HV,V,K], or 5 with layers in front, got 0",
                [](F& x) { x.args.state = {}; });
  flush_refuses("state: expected HV >= 1 and K and V in 1..256, got [6,2,3,257]",
                [](F& x) { x.args.state.shape[3] = 257; });
  flush_refuses("state: expected HV >= 1 and K and V in 1..256, got [6,2,0,5]",
                [](F& x) { x.args.state.shape[2] = 0; });
  flush_refuses("state: expected HV >= 1 and K and V in 1..256, got [6,0,3,5]",
                [](F& x) { x.args.state.shape[1] = 0; });
  flush_refuses("state: expected float32 or bfloat16, got float16", [](F& x) { x.args.state.dtype = KDA_F16; });
  flush_refuses("state: expected at least N = 3 slots without state_indices, got 2",
                [](F& x) { x.args.state_indices = {}, x.args.state.shape[0] = 2; });
  flush_refuses("state_indices: expected shape [3] ([N]), got [2]", [](F& x) { x.args.state_indices.shape[0] = 2; });
  flush_refuses("state_layout: expected 0..1, got 2", [](F& x) { x.args.state_layout = 2; });
  flush_refuses("first_valid_slot: expected >= 0, got -1", [](F& x) { x.args.first_valid_slot = -1; });
  flush_refuses("accept_len: expected 1 dimension [N], got 0", [](F& x) { x.args.accept_len = {}; });
  flush_refuses("accept_len: expected 1 dimension [N], got 2",
                [](F& x) { x.args.accept_len.ndim = 2, x.args.accept_len.shape[1] = 1; });
  flush_refuses("accept_len: expected int32 or int64, got bool", [](F& x) { x.args.accept_len.dtype = KDA_BOOL; });
  flush_refuses("parents: expected shape [N,T] with N = 3 and T at least 0, got [4,5]",
                [](F& x) { x.args.parents.shape[0] = 4; });
}

TEST(FlushRefuses, Records) {
  flush_refuses("records.k: expected 4 dimensions, got 0",
                [](F& x) { x.args.records.u = x.args.records.k = x.args.records.alpha = {}; });
  flush_refuses("records.k: expected H to divide HV = 2, got 0", [](F& x) { x.args.records.k.shape[2] = 0; });
  flush_refuses("records.k: expected H to divide HV = 2, got 3", [](F& x) { x.args.records.k.shape[2] = 3; });
  flush_refuses("records.u: expected shape [5,10,2,3] ([slots,R,HV,V]), got [5,10,2,4]",
                [](F& x) { x.args.records.u.shape[3] = 4; });
  flush_refuses("records.alpha: expected together with the others of u, k, alpha, got none",
                [](F& x) { x.args.records.alpha = {}; });
  flush_refuses("records.u: expected at least N = 3 slots without indices, got 2", [](F& x) {
    x.args.records.indices = x.args.records.ring_first = x.args.records.ring_count = {};
    for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[0] = 2;
  });
  flush_refuses("records.indices: expected slots below 5, got 7", [](F& x) { x.records.indices.set(2, 7); });
  flush_refuses("records.indices: expected every live slot once, got slot 3 twice",
                [](F& x) { x.records.indices.set(0, 3), x.records.indices.set(1, 3); });
  flush_refuses("state_indices: expected slots below 6, got 9", [](F& x) { x.h0.state_indices.set(2, 9); });
  flush_refuses("state_indices: expected every live slot once, got slot 5 twice",
                [](F& x) { x.h0.state_indices.set(0, 5), x.h0.state_indices.set(1, 5); });
}

TEST(FlushRefuses, Layers) {
  const auto in_layers = [](kda_tensor& t, int64_t layers) {  // all in the same memory, which inputs may share
    std::copy_backward(t.shape, t.shape + 4, t.shape + 5), std::copy_backward(t.stride, t.stride + 4, t.stride + 5);
    t.shape[0] = layers, t.stride[0] = t.stride[1] * t.shape[1], t.ndim = 5;
  };
  flush_refuses("records.k: expected 5 dimensions, got 4", [&](F& x) { in_layers(x.args.state, 1); });
  flush_refuses("records.u: expected 5 dimensions [layers,slots,R,HV,V], got 4",
                [&](F& x) { in_layers(x.args.state, 1), in_layers(x.args.records.k, 1); });
  flush_refuses("records.alpha: expected shape [1,5,10,2,5] ([slots,R,HV,K]), got [2,5,10,2,5]", [&](F& x) {
    for (kda_tensor* t : {&x.args.state, &x.args.records.u, &x.args.records.k}) in_layers(*t, 1);
    in_layers(x.args.records.alpha, 2);
  });
  F x;
  for (kda_tensor* t : {&x.args.state, &x.args.records.u, &x.args.records.k, &x.args.records.alpha}) in_layers(*t, 1);
  x.args.conv_x = x.args.conv_state = x.args.conv_indices = {};
  const Workspace workspace = workspace_for(x.args);
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
  x.args.state.shape[0] = 0;
  for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[0] = 0;
  EXPECT_EQ(call(x.args), KDA_OK) << kda_last_error();
}

// ---- flush_verify ----

TEST(FlushVerifyRefuses, States) {
  both_refuse("hT: expected h0 and hT, the same pool, got one of them", [](FV& x) { x.args.states.hT = {}; });
  both_refuse("hT: expected h0 and hT, the same pool, got one of them", [](FV& x) { x.args.states.h0 = {}; });
  both_refuse("hT: expected the pool h0 itself, got another tensor", [](FV& x) {
    static float elsewhere[4096];
    x.args.states.hT.data = elsewhere;
  });
  both_refuse("hT: expected memory of its own, got memory that overlaps h0 without being the same view",
              [](FV& x) { x.args.states.hT.stride[0] += 30; });
  both_refuse("has_initial_state: expected none, got one",
              [](FV& x) { x.args.states.has_initial_state = x.h0.has_initial_state; });
}

TEST(FlushVerifyRefuses, Arguments) {
  both_refuse("records.u: expected records, got none", [](FV& x) { x.args.records = {}; });
  both_refuse("last.u: expected the records of the last round (or a ring), got none", [](FV& x) { x.args.last = {}; });
  both_refuse("last.k: expected together with the others of u, k, alpha, got none",
              [](FV& x) { x.args.last.k = x.args.last.alpha = {}; });
  both_refuse("last.ring_count: expected together with ring_first, got ring_first alone", [](FV& x) {
    static int32_t cursors[5];
    x.args.last.ring_first = x.args.last.indices;
    x.args.last.ring_first.data = cursors, x.args.last.ring_first.shape[0] = 5, x.args.last.ring_first.stride[0] = 1;
  });
  both_refuse("last.ring_count: expected none: a ring is given as records, got one", [](FV& x) {
    static int32_t cursors[5];
    x.args.last.ring_first = x.args.last.indices;
    x.args.last.ring_first.data = cursors, x.args.last.ring_first.shape[0] = 5, x.args.last.ring_first.stride[0] = 1;
    x.args.last.ring_count = x.args.last.ring_first;
  });
  both_refuse("max_tokens: expected 0 without a ring, got 5", [](FV& x) { x.args.max_tokens = 5; });
  both_refuse("max_tokens: expected 0 without a ring, got -1", [](FV& x) { x.args.max_tokens = -1; });
  both_refuse("args.reserved: expected 0, got 1", [](FV& x) { x.args.reserved = 1; });
  both_refuse("accept_len: expected shape [3] ([N]), got [2]", [](FV& x) { x.args.accept_len.shape[0] = 2; });
  both_refuse("accept_len: expected 1 dimensions [3] ([N]), got 0", [](FV& x) { x.args.accept_len = {}; });
  both_refuse("last_parents: expected shape [N,T] with N = 3 and T at least 0, got [2,5]",
              [](FV& x) { x.args.last_parents.shape[0] = 2; });
  both_refuse("parents: expected T at least 5, the tokens of request 2, got 4",
              [](FV& x) { x.args.parents.shape[1] = 4; });
  both_refuse("records.u: expected entries for the 5 tokens of request 2, got 4 a slot", [](FV& x) {
    for (kda_tensor* t : {&x.args.records.u, &x.args.records.k, &x.args.records.alpha}) t->shape[1] = 4;
  });
  both_refuse("last.indices: expected slots below 5, got 5", [](FV& x) { x.last.indices.set(1, 5); });
  both_refuse("records.indices: expected slots below 5, got 5", [](FV& x) { x.records.indices.set(1, 5); });
  both_refuse("records.u: expected memory of its own, got memory that overlaps last.u",
              [](FV& x) { x.args.records.u = x.args.last.u; });
}

TEST(FlushVerifyRefuses, Rings) {
  ring_refuses("last.u: expected none with a ring, which holds the last round's records, got some", [](Ring& r) {
    static float elsewhere[4096];
    r.args.last = r.args.records, r.args.last.ring_first = r.args.last.ring_count = {};
    for (kda_tensor* t : {&r.args.last.u, &r.args.last.k, &r.args.last.alpha}) t->data = elsewhere;
  });
  ring_refuses("last_parents: expected none with a ring, got some",
               [](Ring& r) { r.args.last_parents = r.drafts.parents; });
  ring_refuses("parents: expected none with a ring: its entries are a chain, got some",
               [](Ring& r) { r.args.parents = r.drafts.parents; });
  ring_refuses("max_tokens: expected the most tokens of any round, with a ring and cu_seqlens, got 0",
               [](Ring& r) { r.args.max_tokens = 0; });
  ring_refuses("records.u: expected a ring of at least 2 x 6 entries, for two rounds, got 10",
               [](Ring& r) { r.args.max_tokens = 6; });
  ring_refuses("cu_seqlens: expected at most max_tokens = 4 tokens a request, got 5 for request 2",
               [](Ring& r) { r.args.max_tokens = 4; });
  ring_refuses("records.ring_first: expected memory of its own, got memory that overlaps records.ring_count",
               [](Ring& r) { r.args.records.ring_first = r.args.records.ring_count; });
  ring_refuses("records.ring_first: expected strides that keep elements apart, got [0] for shape [5]",
               [](Ring& r) { r.args.records.ring_first.stride[0] = 0; });
  Ring r;
  const Workspace workspace = workspace_for(r.args);
  EXPECT_EQ(call(r.args), KDA_OK) << kda_last_error();
}

TEST(FlushVerifyRefuses, RingsOfRows) {
  Drafts d({.c = {.name = "rows", .B = 2, .T = 3, .K = 5, .V = 3}, .R = 6, .ring = true});
  const Records records(d);
  const Tensor o = d.output();
  kda_flush_verify_args a = flush_verify_args(d, d, d.pool.h, records, records, o);
  const Workspace workspace = workspace_for(a);
  a.max_tokens = 2;
  EXPECT_EQ(call(a), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "max_tokens: expected at least T = 3 (or 0), got 2");
  a.max_tokens = 0;  // T
  EXPECT_EQ(call(a), KDA_OK) << kda_last_error();
}

// The size of the workspace depends on shapes alone: no memory is read, but h0 and hT are the same.
TEST(FlushVerifyWorkspace, ReadsNoData) {
  FV x;
  uint64_t real = 0, fake = 0;
  EXPECT_EQ(query(x.args, &real), KDA_OK);
  uintptr_t address = uintptr_t{1} << 40;
  for (const Field& f : x.fields()) f.t->data = reinterpret_cast<void*>(address += 1 << 20);
  x.args.states.hT.data = x.args.states.h0.data;
  EXPECT_EQ(query(x.args, &fake), KDA_OK) << kda_last_error();
  EXPECT_EQ(fake, real);
}

}  // namespace
}  // namespace kda::test
