// The gate and its gradient (math.md 2.1, 5.2), of one element:
//   softplus     g = -a softplus(z)        dx = -a sigmoid(z) dg          dA_log += dg g
//   lower bound  g = lb sigmoid(a z)       dx = a lb s (1 - s) dg         dA_log += dx z         z = x + dt_bias
// All that kernels ask about a gate's form is in this file, but for decode's formula (call/token.h). There are formulas
// for each use: exact ones, some for any A_log, and some in base 2 for kernels whose time they are.
//
// Forms are compared in place. Of a switch, or of a function that compares, ptxas makes other code for some kernels. So
// nothing warns of a form that a comparison forgets; the assertion below stops the compiler instead.
//
// s (1 - s) is computed as e / (1 + e)^2 with e = exp(-|a z|), and dx z as (dx / a) (a z): neither 1 - s nor 0 inf
// loses a gradient that is not 0. A gradient dg of 0 gives gradients of 0, also where g is -inf. Where g is NaN, so are
// its gradients.
//
// Where a factor may leave the range of f32 and the product does not (A_log above 16, or below -64), exponents are
// added before exp, and h = exp(exponent / 2) multiplies twice.
#pragma once
#include "cuda/call/token.h"
#include "cuda/ptx/sm80.h"

namespace kda::cuda {

static_assert(kGateForms == 3, "another form of the gate: what does each comparison in this file make of it?");

// Kernels with gates in base 2 take bounds of this or more.
constexpr float kLeastBound = -5;
// The first f32 below -126 log(2): where the logarithm of a decay is this or less, the decay is 0 in f32, and so is its
// gradient.
constexpr float kGone = -87.336548f;

// Are 16 tokens with this gate sure to decay by 2^-116 at most?
constexpr bool is_well_bounded(GateForm form, float lower_bound) {
  return form == GateForm::kLowerBound && lower_bound >= kLeastBound;
}
// Is the bound, if there is one, kLeastBound or more?
constexpr bool has_usual_bound(GateForm form, float lower_bound) {
  return form != GateForm::kLowerBound || lower_bound >= kLeastBound;
}
// Stands in for a gate's input behind a sequence's end: such tokens do not decay and have no gradient.
__device__ inline float no_decay(GateForm form) { return form == GateForm::kLog ? 0.0f : -INFINITY; }

// ---- the decay of a token, for any A_log: rate = exp(moderate(A_log)) ----

// Of some channels. x has gate_form and lower_bound.
template <class X, int kChannels>
__device__ void log_decays(const X& x, float A_log, float rate, float (&z)[kChannels]) {
  if (x.gate_form == GateForm::kSoftplus) {
#pragma unroll
    for (int e = 0; e < kChannels; ++e) z[e] = -rate * softplus(softplus_input(A_log, z[e]));
  } else if (x.gate_form == GateForm::kLowerBound) {
#pragma unroll
    for (int e = 0; e < kChannels; ++e) z[e] = x.lower_bound * sigmoid(rate * bounded_input(A_log, z[e]));
  }
}

// ---- value and gradient of an element; where g is given, there is nothing to compute ----

struct Gradients {
  float dx, dA_log;
};

// The gate with a = exp(A_log) as a factor.
struct Gate {
  GateForm form;
  float lower_bound, a;
  __device__ float operator()(float z) const {
    return form == GateForm::kSoftplus ? -a * softplus(z) : lower_bound * sigmoid(a * z);
  }
  __device__ Gradients backward(float z, float dg) const {
    if (form == GateForm::kSoftplus) {
      const float g = (*this)(z);
      return {-a * sigmoid(z) * dg, dg == 0 && isinf(g) ? 0 : dg * g};
    }
    const float y = a * z, e = __expf(-fabsf(y)), w = __fdividef(1.0f, 1.0f + e),
                slope = lower_bound * dg * (e * w * w);
    return {a * slope, fminf(fmaxf(y, -kMostInput), kMostInput) * slope};
  }
  static constexpr float kMostInput = 1000;  // exp(-1000) is 0
  __device__ static bool does_for(float A_log) { return A_log >= -64 && A_log <= 16; }
};

// The gate for any A_log.
struct WideGate {
  GateForm form;
  float lower_bound, A_log;
  __device__ float operator()(float z) const {
    if (form != GateForm::kSoftplus) return lower_bound * sigmoid(input(z));
    const bool small = z < kSmall;
    return -multiplied(small ? 1 : softplus(z), 1, small ? A_log + z : A_log);
  }
  __device__ Gradients backward(float z, float dg) const {
    if (const float g = (*this)(z); g != g) return {g, g};
    if (dg == 0) return {0, 0};
    if (form == GateForm::kSoftplus) {
      const bool small = z < kSmall;
      const float exponent = small ? A_log + z : A_log;
      return {-multiplied(small ? 1 : sigmoid(z), dg, exponent), -multiplied(small ? 1 : softplus(z), dg, exponent)};
    }
    const float y = input(z), most = fminf(fabsf(y), Gate::kMostInput), e = expf(-fabsf(y));
    const float slope = lower_bound / ((1 + e) * (1 + e));
    // (Any A_log above 1000 acts as 1000 does.)
    return {multiplied(slope, dg, (A_log > 1000 ? 1000 : A_log) - fabsf(y)), slope * dg * (e * copysignf(most, y))};
  }

 private:
  static constexpr float kSmall = -16;  // below, softplus(z) and sigmoid(z) are exp(z) to 6e-8
  // An exponent of at least `least`, so that only -inf has a power of 0: times infinity, that is NaN.
  __device__ static float bounded(float exponent, float least) {
    return exponent < least && exponent > -INFINITY ? least : exponent;
  }
  // x exp(exponent) dg, in an order in which a product on the way overflows only if the result does.
  __device__ static float multiplied(float x, float dg, float exponent) {
    const float h = expf(bounded(exponent, -174) / 2);
    return h < 1 ? x * h * h * dg : x > 1 ? x * dg * h * h : x * h * dg * h;
  }
  // exp(A_log) z. A_log above 176 counts as 176, where any z but 0 gives more than 1e30.
  __device__ float input(float z) const {
    const float h = expf((A_log > 176 ? 176 : bounded(A_log, -176)) / 2);
    return z * h * h;
  }
};

// The gradient of a head's gate, with g as log_decay() makes it. It is 0 where a token decays to nothing.
template <class X>
__device__ Gradients gradients_of(const X& x, float A_log, float rate, float z, float dg) {
  return Gate::does_for(A_log) ? Gate{x.gate_form, x.lower_bound, rate}.backward(z, dg)
                               : WideGate{x.gate_form, x.lower_bound, A_log}.backward(z, dg);
}

// ---- in base 2 ----

// log2(1 + 2^x) = max(x, 0) + log2(1 + e), e = 2^-|x|. The latter is a polynomial with a relative error of 9.2e-6;
// where it is small, 2.8e-6, because errors of slow decays add up.
__device__ inline float softplus2(float x, float e) {
  float p = -0.035237316f;
  p = fmaf(p, e, 0.14823328f);
  p = fmaf(p, e, -0.30523044f);
  p = fmaf(p, e, 0.47012892f);
  p = fmaf(p, e, -0.7205947f);
  p = fmaf(p, e, 1.4426911f);
  return fmaf(p, e, fmaxf(x, 0.0f));  // fmaxf drops a NaN, e keeps it
}

// The gate of a head, in powers of two, for a known form and an A_log of usual size (Gate::does_for). A bounded
// gate's bound is kLeastBound or more. (A kernel contains this code 64 times, so it must be short: warps wait for
// instructions that do not fit the instruction cache.)
template <GateForm kForm>
class UsualGate {
 public:
  static constexpr bool kGiven = kForm == GateForm::kLog, kBounded = kForm == GateForm::kLowerBound,
                        kOuter = kForm == GateForm::kSoftplus;
  static constexpr unsigned kBlock = kBounded ? 16 : 8;

  __device__ UsualGate(const Tokens& x, float A_log) {
    const float a = expf(A_log);
    factor_ = kBounded ? kLog2e * a : kLog2e;
    height_ = kOuter ? -a : x.lower_bound * kLog2e;
    slope_ = kOuter ? -a : x.lower_bound * a;
  }
  // log2 of the decay.
  __device__ float log2(float z) const {
    const float y = factor_ * z;
    if (kGiven) return y;
    if (kBounded) return height_ * ptx::reciprocal(1 + ptx::exp2(-y));
    return height_ * softplus2(y, ptx::exp2(-fabsf(y)));
  }
  // The gradient of the gate's input from dg, that of the natural logarithm of the decay. It is 0 where a token
  // decays to nothing.
  __device__ Gradients gradient(float z, float dg) const {
    const float y = factor_ * z;
    if (kGiven) return {z <= kGone ? 0 : dg, 0};
    const float e = ptx::exp2(-fabsf(y)), r = ptx::reciprocal(1 + e);
    if (kBounded) {
      const float dx = slope_ * e * (r * r) * dg;
      return {dx, dx * fminf(fmaxf(z, -kMost), kMost)};
    }
    const float g = height_ * softplus2(y, e);
    if (g < kNothing) dg = 0;
    return {slope_ * (y < 0 ? e * r : r) * dg, -ptx::least(-g, kMost) * kLn2 * dg};
  }

 private:
  static constexpr float kNothing = -126, kMost = 0x1p100f;

  float factor_, height_, slope_;
};

// The gate of a head with any A_log and bound. Rare, and slow.
class UnusualGate {
 public:
  static constexpr unsigned kBlock = 8;

  __device__ UnusualGate(const Tokens& x, float A_log) : gate_{x.gate_form, x.lower_bound, A_log} {}
  // The natural logarithm of the decay, and that to base 2.
  __device__ float log(float z) const { return gate_(z); }
  __device__ static float log2_of(float log) { return log * kLog2e; }
  __device__ Gradients gradient(float z, float dg) const { return gate_.backward(z, log2_of(log(z)) < -126 ? 0 : dg); }

 private:
  WideGate gate_;
};

// Whether UsualGate can compute the gates of all value heads of q/k head h. A launch with UnusualGate takes the other
// heads.
__device__ inline bool is_usual(const Tokens& x, unsigned h, unsigned group) {
  if (x.gate_form == GateForm::kLog) return true;
  bool usual = x.gate_form == GateForm::kSoftplus || x.lower_bound >= kLeastBound;
  for (unsigned i = 0; x.A_log && i < group; ++i)
    usual &= Gate::does_for(*reinterpret_cast<const float*>(x.A_log + (h * group + i) * 4));
  return usual;
}

// The gate of a head. A kernel is compiled for bounded gates, whose blocks have 16 tokens, or for all others.
// `unusual`: the launch is for the heads that UsualGate does not take.
template <bool kBounded>
class ChosenGate {
 public:
  static constexpr unsigned kBlock = 8;

  __device__ ChosenGate(const Tokens& x, float A_log, bool unusual) : x_(x), A_log_(A_log), unusual_(unusual) {}
  // Calls act with a gate that the compiler knows, so that the form is looked at once and not in every gate.
  template <class Act>
  __device__ void with(const Act& act) const {
    if (unusual_) act(UnusualGate(x_, A_log_));
    else if (x_.gate_form == GateForm::kLog) act(UsualGate<GateForm::kLog>(x_, A_log_));
    else act(UsualGate<GateForm::kSoftplus>(x_, A_log_));
  }

 private:
  const Tokens& x_;
  const float A_log_;
  const bool unusual_;
};
template <>
class ChosenGate<true> {
  using Known = UsualGate<GateForm::kLowerBound>;

 public:
  static constexpr unsigned kBlock = Known::kBlock;

  __device__ ChosenGate(const Tokens& x, float A_log, bool /*unusual*/) : gate_(x, A_log) {}
  template <class Act>
  __device__ void with(const Act& act) const {
    act(gate_);
  }

 private:
  const Known gate_;
};

// On the host: calls launch.operator()<UsualGate>().
template <class Launch>
void for_usual_gate(GateForm form, const Launch& launch) {
  switch (form) {
    case GateForm::kLog: return launch.template operator()<UsualGate<GateForm::kLog>>();
    case GateForm::kSoftplus: return launch.template operator()<UsualGate<GateForm::kSoftplus>>();
    case GateForm::kLowerBound: return launch.template operator()<UsualGate<GateForm::kLowerBound>>();
  }
}

}  // namespace kda::cuda

// ---- of the chunk scan: four channels a lane, in base 2 ----

namespace kda::cuda::engine {

// What the gates of a head share: bias of the lane's four channels, A_log.
struct HeadGate {
  float bias[4] = {}, log = 0;
  __device__ void load(const Tokens& x, unsigned hv, unsigned lane) {
    if (x.A_log) log = *reinterpret_cast<const float*>(x.A_log + hv * 4);
    if (!x.bias || lane * 4 >= static_cast<unsigned>(x.K)) return;  // others stay 0
#pragma unroll
    for (int e = 0; e < 4; ++e) bias[e] = reinterpret_cast<const float*>(x.bias + hv * x.bias_stride)[lane * 4 + e];
  }
  __device__ float rate() const { return __expf(moderate(log)); }
  // Whether, in any lane, A_log is not moderate, or a product with bias is so large that its rounding would count
  // where it cancels against a product with x. Then input() takes the place of x, and 0 that of bias.
  __device__ bool is_wild(const Tokens& x) const {
    float most = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) most = fmaxf(most, fabsf(bias[e]));
    const float product = most * (x.gate_form == GateForm::kSoftplus ? 1 : rate());
    return __any_sync(kAll, !(is_moderate(log) && product < 700));
  }
  // Returns 2e38 at most, not inf, which rows behind the chunk's last one would multiply by 0.
  __device__ float input(float x, unsigned e, bool softplus) const {
    const float z = x + bias[e];
    return ptx::least(softplus ? softplus_input(log, z) : bounded_input(log, z), 2e38f);
  }
};

// gamma = log2 alpha = bound sigmoid(a (x + bias)) of the lane's channels.
struct BoundedGate {
  const HeadGate& head;
  float bound, rate, shift[4];
  __device__ BoundedGate(const Tokens& x, const HeadGate& head) : head(head), bound(x.lower_bound * kLog2e) {
    rate = -kLog2e * head.rate();
#pragma unroll
    for (int e = 0; e < 4; ++e) shift[e] = head.bias[e] * rate;
  }
  // sigmoid in two steps, so that special functions of two rows can take turns.
  struct Part {
    float x[4];
  };
  template <bool kWild>
  __device__ void begin(const float (&x)[4], Part& y) const {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      y.x[e] = ptx::exp2(kWild ? rate * head.input(x[e], e, false) : fmaf(rate, x[e], shift[e]));
  }
  __device__ void end(const Part& y, float (&x)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = ptx::reciprocal(1 + y.x[e]);
  }
};

constexpr float kMostDecay = 25;  // where decays are limited, to 2^-25 a token

// -log2 alpha of the lane's channels is rate f(x), f: softplus to base 2, sigmoid, or -x.
struct AnyGate {
  const HeadGate& head;
  GateForm form;
  float rate, most, factor, shift[4];
  __device__ AnyGate(const Tokens& x, const HeadGate& head) : head(head), form(x.gate_form) {
    const float a = head.rate();
    const bool softplus = form == GateForm::kSoftplus, given = !softplus && form != GateForm::kLowerBound;
    factor = softplus ? kLog2e : given ? -1 : -kLog2e * a;
    rate = softplus ? a : form == GateForm::kLowerBound ? -x.lower_bound * kLog2e : kLog2e;
    most = kMostDecay * ptx::reciprocal(rate);
#pragma unroll
    for (int e = 0; e < 4; ++e) shift[e] = given ? 0 : head.bias[e] * factor;
  }
  // In two steps, so that special functions of two rows can take turns.
  struct Part {
    float x[4], e[4];
  };
  template <bool kWild>
  __device__ void begin(const float (&x)[4], Part& y) const {
    const bool softplus = form == GateForm::kSoftplus;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      y.x[e] = kWild ? factor * head.input(x[e], e, softplus) : fmaf(factor, x[e], shift[e]);
      y.e[e] = ptx::exp2(softplus ? -fabsf(y.x[e]) : y.x[e]);
    }
  }
  __device__ void end(const Part& y, float (&x)[4]) const {
    if (form == GateForm::kSoftplus) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = softplus2(y.x[e], y.e[e]);
    } else if (form == GateForm::kLowerBound) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = ptx::reciprocal(1 + y.e[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = y.x[e];
    }
  }
};

}  // namespace kda::cuda::engine
