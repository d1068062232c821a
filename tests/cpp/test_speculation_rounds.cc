// A serving engine in small: requests arrive with a prompt (kda_forward, from the longest prefix that an earlier prompt
// left as a checkpoint), draft, have some of their drafts accepted, leave, and come back to life from a state set
// aside, in slots that others left full of numbers. Thousands of random rounds, in each of the ways to speculate, on q,
// k and v or on the raw rows of a convolution; every output is that of plain decode in float64.
#include <cmath>
#include <optional>

#include "speculation_truth.h"

namespace kda::test {
namespace {

constexpr int64_t kRows = 4, kSlots = 6, kMostTokens = 5, kRounds = 1500;
constexpr int64_t kPast = 3;  // raw rows that a convolution looks back
constexpr int64_t kPrompts = 3, kPromptTokens = 200, kPrefixes = kPromptTokens / 64;  // states kept of a prompt

enum class Way { kVerifyThenFlush, kFlushVerify, kRing };

// Records of all slots, which any call may use.
struct Buffers {
  Tensor u, k, alpha;
  Buffers(const Case& c, int32_t dtype, int64_t R)
      : u(dtype, {kSlots, R, c.HV, c.V}), k(dtype, {kSlots, R, c.H, c.K}), alpha(dtype, {kSlots, R, c.HV, c.K}) {}
};

class Engine {
 public:
  Engine(const Backend& b, Way way, uint64_t seed, int64_t R, int32_t layout, bool conv)
      : b_(b),
        way_(way),
        conv_(conv),
        random_(seed),
        R_(R),
        c_(in_dtype({.name = "engine", .H = 1, .HV = 2, .K = 9, .V = 6, .tail = 1, .state_layout = layout}, b)),
        pool_(b.state_dtype, Inputs(c_).state_shape(kSlots)),
        prefixes_(b.state_dtype, Inputs(c_).state_shape(kPrompts * kPrefixes)),
        kept_(kPrompts * kPrefixes),
        last_(c_, b.dtype, R),
        next_(c_, b.dtype, R),
        first_(KDA_I32, {kSlots}),
        count_(KDA_I32, {kSlots}),
        D_(2 * c_.H * c_.K + c_.HV * c_.V),
        weight_(b.dtype, {D_, kPast + 1}),
        bias_(b.dtype, {D_}),
        past_(b.dtype, {kSlots, D_, kPast}),
        last_x_(b.dtype, {kRows, kMostTokens, D_}) {
    for (Tensor* t : {&weight_, &bias_})
      for (int64_t i = 0; i < t->size(); ++i) t->set(i, 0.5 * random_.normal());
    for (Tensor* t : {&first_, &count_}) t->fill(1000000);  // cursors of no request: any number
    for (int64_t i = 0; i < kRows; ++i) requests_.emplace_back();
    for (int64_t i = 0; i < kPrompts; ++i) {
      Case c = c_;
      c.name = "prompt " + std::to_string(i), c.T = kPromptTokens, c.tail = 0;
      prompts_.emplace_back(c);
      truths_.emplace_back();
    }
  }

  void round() {
    arrive_and_leave();
    Case c = c_;
    c.name = std::to_string(random_.bits());  // the seed of the data
    for (int64_t i = 0; i < kRows; ++i) c.lengths.push_back(random_.below(kMostTokens + 1));
    Inputs in(c);
    Tensor x(b_.dtype, {1, in.T, D_}), rows(b_.dtype, {kRows, kMostTokens, D_});
    for (int64_t i = 0; i < x.size(); ++i) x.set(i, 0.3 * random_.normal());
    const Tensor o(b_.dtype, {1, in.T, c.HV, c.V}), slots(KDA_I32, {kRows}), accept(KDA_I32, {kRows});
    for (int64_t i = 0; i < kRows; ++i) {
      const std::optional<Request>& r = requests_[i];
      const_cast<Tensor&>(slots).set(i, r ? static_cast<double>(r->slot) : -1);
      const_cast<Tensor&>(accept).set(i, r ? static_cast<double>(r->accepted) : 77);
      const int64_t first = in.begin(i) * D_;
      for (int64_t j = 0; j < in.length(i) * D_; ++j) rows.set(i * kMostTokens * D_ + j, x.get(first + j));
      if (conv_ && r) convolve(r->text(), x, in, i);
    }
    speculate(in, x, o, slots, accept);
    for (int64_t i = 0; i < kRows; ++i) {
      if (!requests_[i]) continue;
      Request& r = *requests_[i];
      r.commit();  // of the round before: now they are part of the text
      const std::vector<double> all = r.truth.clone().decode(in, i, upto(in.length(i)));
      const int64_t row = c.HV * c.V;
      for (int64_t t = 0; t < in.length(i); ++t, ++outputs) {
        const auto expected = all.begin() + t * row;
        ASSERT_TRUE(near({expected, expected + row}, output_of(o, in, i, t), b_.budget)) << i << " " << t;
      }
      r.inputs = std::make_unique<Inputs>(along(in, i, upto(in.length(i))));
      r.rows = part(x, in.begin(i) * D_, in.length(i) * D_);
      r.accepted = random_.chance(0.3) ? in.length(i) : random_.below(in.length(i) + 1);
      ++r.rounds;
    }
    if (way_ == Way::kVerifyThenFlush) {  // before anything else happens
      for (int64_t i = 0; i < kRows; ++i)
        const_cast<Tensor&>(accept).set(i, requests_[i] ? static_cast<double>(requests_[i]->accepted) : 77);
      flush(slots, accept, next_, rows);
      for (std::optional<Request>& r : requests_)
        if (r) r->commit(), expect_state(*r);
    }
    std::swap(last_, next_);
    last_x_ = std::move(rows);
  }
  int64_t outputs = 0, checkpoints = 0, prefixes = 0;

 private:
  struct Request {
    int64_t slot;
    Truth truth;  // after all tokens accepted before the last round
    std::unique_ptr<Inputs> inputs;
    std::vector<double> past;    // [kPast,D]: the raw rows before the last round's
    std::vector<double> rows{};  // of the last round
    int64_t accepted = 0, rounds = 0;
    // The last raw rows of the text, with what was accepted.
    std::vector<double> text() const {
      std::vector<double> all = past;
      const int64_t D = std::ssize(past) / kPast;
      all.insert(all.end(), rows.begin(), rows.begin() + accepted * D);
      return {all.end() - kPast * D, all.end()};
    }
    void commit() {
      past = text();
      truth.decode(*inputs, 0, upto(std::exchange(accepted, 0)));
    }
  };
  struct Checkpoint {
    Tensor state;
    std::vector<double> past;
    Truth truth;
  };
  static std::vector<int64_t> upto(int64_t n) {
    std::vector<int64_t> tokens(n);
    for (int64_t t = 0; t < n; ++t) tokens[t] = t;
    return tokens;
  }

  kda_records records(const Buffers& buffers, const Tensor& slots) const {
    kda_records r{};
    r.u = buffers.u, r.k = buffers.k, r.alpha = buffers.alpha, r.indices = slots;
    if (way_ == Way::kRing) r.ring_first = first_, r.ring_count = count_;
    return r;
  }
  // q, k and v of request n from raw rows: z = y sigmoid(y), y_t = bias + sum_j weight_j xx_(t+j), xx = past ++ x.
  void convolve(std::vector<double> xx, const Tensor& x, Inputs& in, int64_t n) const {
    const std::vector<double> rows = part(x, in.begin(n) * D_, in.length(n) * D_);
    xx.insert(xx.end(), rows.begin(), rows.end());
    for (int64_t t = 0; t < in.length(n); ++t)
      for (int64_t d = 0; d < D_; ++d) {
        double y = bias_.get(d);
        for (int64_t j = 0; j <= kPast; ++j) y += weight_.get(d * (kPast + 1) + j) * xx[(t + j) * D_ + d];
        const int64_t qk = c_.H * c_.K, at = d < 2 * qk ? d % qk : d - 2 * qk, token = in.begin(n) + t;
        Tensor& to = d < qk ? in.q : d < 2 * qk ? in.k : in.v;
        to.set(token * (d < 2 * qk ? qk : c_.HV * c_.V) + at, y / (1 + std::exp(-y)));
      }
  }
  template <class Args>
  void in_front(Args& a, const Tensor& x, const Tensor& slots) const {
    if (!conv_) return;
    a.in.q = a.in.k = a.in.v = {};
    a.conv.x = x, a.conv.weight = weight_, a.conv.bias = bias_, a.conv.state = past_, a.conv.indices = slots;
  }
  void speculate(const Inputs& in, const Tensor& x, const Tensor& o, const Tensor& slots, const Tensor& accept) {
    if (way_ == Way::kVerifyThenFlush) {
      kda_verify_args a = KDA_VERIFY_ARGS_INIT;
      a.in = in.view(), a.states.h0 = pool_, a.states.state_indices = slots;
      a.o = o, a.records = records(next_, slots);
      in_front(a, x, slots);
      return run(a, {.impl = b_.verify, .threads = 1});
    }
    kda_flush_verify_args a = KDA_FLUSH_VERIFY_ARGS_INIT;
    a.in = in.view(), a.states.h0 = a.states.hT = pool_, a.states.state_indices = slots;
    a.o = o, a.accept_len = accept;
    if (way_ == Way::kRing) a.records = records(last_, slots), a.max_tokens = kMostTokens, std::swap(last_, next_);
    else a.last = records(last_, slots), a.records = records(next_, slots);
    in_front(a, x, slots);
    if (conv_) a.last_conv_x = last_x_;
    run(a, {.impl = b_.flush_verify, .threads = 1});
  }
  void flush(const Tensor& slots, const Tensor& accept, const Buffers& buffers, const Tensor& rows) {
    kda_flush_args a = KDA_FLUSH_ARGS_INIT;
    a.state = pool_, a.state_indices = slots, a.state_layout = c_.state_layout;
    a.records = records(buffers, slots), a.accept_len = accept;
    if (conv_) a.conv_x = rows, a.conv_state = past_, a.conv_indices = slots;
    run(a, {.impl = b_.flush, .threads = 1});
  }
  void expect_state(const Request& r) {
    ASSERT_TRUE(near(r.truth.state.values(), slot_values(pool_, r.slot), b_.budget)) << r.slot;
    for (int64_t i = 0; conv_ && i < D_ * kPast; ++i)
      ASSERT_EQ(past_.get(r.slot * D_ * kPast + i), r.past[i % kPast * D_ + i / kPast]) << i;
  }
  void set_past(int64_t slot, const std::vector<double>& past) {
    for (int64_t i = 0; i < D_ * kPast; ++i) past_.set(slot * D_ * kPast + i, past[i % kPast * D_ + i / kPast]);
  }

  // Moves a request's text so far into its state, so that only its slot has to be kept.
  void settle(Request& r) {
    const Tensor slot(KDA_I32, {1}, {static_cast<double>(r.slot)}), m(KDA_I32, {1}, {static_cast<double>(r.accepted)});
    Tensor rows(b_.dtype, {1, kMostTokens, D_});
    for (int64_t i = 0; i < std::ssize(r.rows); ++i) rows.set(i, r.rows[i]);
    flush(slot, m, last_, rows);
    r.commit();
    if (way_ == Way::kRing) count_.set(r.slot, 0);
    expect_state(r);
  }
  void arrive_and_leave() {
    for (std::optional<Request>& r : requests_) {
      if (r && r->rounds && random_.chance(0.1)) {
        settle(*r);
        Tensor state(pool_.dtype(), {1, pool_.size() / kSlots}, slot_values(pool_, r->slot));
        checkpoint_ = std::make_unique<Checkpoint>(Checkpoint{std::move(state), r->past, r->truth.clone()});
      }
      if (r && random_.chance(0.15)) r.reset();  // its slot, its records and its cursors stay as they are
      if (r || !random_.chance(0.4)) continue;
      int64_t slot = random_.below(kSlots);
      while (std::any_of(requests_.begin(), requests_.end(), [&](const auto& x) { return x && x->slot == slot; }))
        slot = random_.below(kSlots);
      first_.set(slot, static_cast<double>(random_.below(R_))), count_.set(slot, 0);  // an empty ring begins anywhere
      if (random_.chance(0.4)) {
        r = prefill(slot);
        continue;
      }
      const bool restore = checkpoint_ && random_.chance(0.5);
      checkpoints += restore;
      Inputs none(c_);
      const std::vector<double> nothing(kPast * D_);
      r = Request{slot, restore ? checkpoint_->truth.clone() : Truth(none), std::make_unique<Inputs>(std::move(none)),
                  restore ? checkpoint_->past : nothing};
      set_past(slot, r->past);
      const int64_t size = pool_.size() / kSlots;
      for (int64_t i = 0; i < size; ++i) pool_.set(slot * size + i, restore ? checkpoint_->state.get(i) : 0);
    }
  }

  // Begins a request with the first tokens of a prompt. Whole chunks of them may be known already.
  Request prefill(int64_t slot) {
    const int64_t prompt = random_.below(kPrompts), length = 1 + random_.below(kPromptTokens);
    const Inputs& text = prompts_[prompt];
    const auto prefix = [&](int64_t chunks) { return prompt * kPrefixes + chunks - 1; };
    if (random_.chance(0.1)) kept_[prefix(1 + random_.below(kPrefixes))] = false;  // as if the memory was needed
    int64_t known = std::min(length, kPrefixes * 64) / 64;
    while (known > 0 && !kept_[prefix(known)]) --known;
    prefixes += known > 0;
    const int64_t size = pool_.size() / kSlots;
    for (int64_t i = 0; known && i < size; ++i) pool_.set(slot * size + i, prefixes_.get(prefix(known) * size + i));

    std::vector<int64_t> rest;
    for (int64_t t = known * 64; t < length; ++t) rest.push_back(t);
    const Inputs in = along(text, 0, rest);
    const Tensor o(b_.dtype, {1, in.T, c_.HV, c_.V}), slots(KDA_I32, {1}, {static_cast<double>(slot)}),
        has_state(KDA_BOOL, {1}, {static_cast<double>(known > 0)});
    Tensor checkpoints(KDA_I32, {1, kPrefixes});
    for (int64_t m = 0; m < kPrefixes; ++m) {
      const int64_t chunks = known + m + 1;
      const bool wanted = chunks * 64 <= length && !kept_[prefix(chunks)];
      checkpoints.set(m, wanted ? static_cast<double>(prefix(chunks)) : -1);
      if (wanted) kept_[prefix(chunks)] = true;
    }
    kda_forward_args a = KDA_FORWARD_ARGS_INIT;
    a.in = in.view(), a.o = o;
    a.states.h0 = a.states.hT = pool_, a.states.state_indices = slots, a.states.has_initial_state = has_state;
    a.checkpoints = prefixes_, a.checkpoint_slots = checkpoints, a.checkpoint_every = 64;
    run(a, {.impl = b_.forward, .threads = 1});

    if (truths_[prompt].empty()) truths_[prompt] = Truth(text).decode(text, 0, upto(kPromptTokens));
    Request r{slot, Truth(text), std::make_unique<Inputs>(c_), std::vector<double>(kPast * D_)};
    set_past(slot, r.past);
    r.truth.decode(text, 0, upto(length));
    const int64_t row = c_.HV * c_.V;
    const auto begin = truths_[prompt].begin() + known * 64 * row;
    EXPECT_TRUE(near({begin, begin + in.T * row}, o.values(), b_.budget)) << "prompt of " << length << ", " << known;
    EXPECT_TRUE(near(r.truth.state.values(), slot_values(pool_, slot), b_.budget)) << length << ", " << known;
    return r;
  }

  const Backend b_;
  const Way way_;
  const bool conv_;
  Random random_;
  const int64_t R_;
  Case c_;
  Tensor pool_, prefixes_;
  std::vector<bool> kept_;
  std::vector<Inputs> prompts_;
  std::vector<std::vector<double>> truths_;  // outputs of whole prompts
  Buffers last_, next_;
  Tensor first_, count_;
  const int64_t D_;
  Tensor weight_, bias_, past_, last_x_;
  std::vector<std::optional<Request>> requests_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

class SpeculationRounds : public testing::TestWithParam<Backend> {
 protected:
  void serve(Way way, int64_t R, int32_t layout = KDA_STATE_V_FIRST, bool conv = false) {
    Engine engine(GetParam(), way, R + static_cast<int64_t>(way), R, layout, conv);
    for (int64_t round = 0; round < kRounds && !HasFailure(); ++round) {
      SCOPED_TRACE(round);
      engine.round();
    }
    EXPECT_GT(engine.outputs, 10 * kRounds / 2);  // requests were there, and drafted
    EXPECT_GT(engine.checkpoints, kRounds / 100);
    EXPECT_GT(engine.prefixes, kRounds / 100);
  }
};

TEST_P(SpeculationRounds, VerifyThenFlush) { serve(Way::kVerifyThenFlush, kMostTokens); }
TEST_P(SpeculationRounds, FlushVerify) { serve(Way::kFlushVerify, kMostTokens + 1); }
TEST_P(SpeculationRounds, RingForTwoRounds) { serve(Way::kRing, 2 * kMostTokens); }
TEST_P(SpeculationRounds, RingForSeveralRounds) { serve(Way::kRing, 23); }
TEST_P(SpeculationRounds, ConvVerifyThenFlush) { serve(Way::kVerifyThenFlush, kMostTokens, KDA_STATE_K_FIRST, true); }
TEST_P(SpeculationRounds, ConvFlushVerify) { serve(Way::kFlushVerify, kMostTokens, KDA_STATE_V_FIRST, true); }
TEST_P(SpeculationRounds, ConvRing) { serve(Way::kRing, 17, KDA_STATE_V_FIRST, true); }
TEST_P(SpeculationRounds, LongRing) { serve(Way::kRing, 64, KDA_STATE_K_FIRST); }

INSTANTIATE_TEST_SUITE_P(All, SpeculationRounds, testing::ValuesIn(backends()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kda::test
