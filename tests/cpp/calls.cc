#include "calls.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kda::test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

uint64_t seed_of(const std::string& name, uint64_t seed) {
  for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return seed;
}

void fill_normal(Tensor& t, Random& random) {
  for (int64_t i = 0; i < t.size(); ++i) t.set(i, random.normal());
}

// Rows of q or k; of length 1 unless they are normalised later.
void fill_rows(Tensor& t, const Case& c, bool unit, Random& random) {
  std::vector<double> row(c.K), same(c.K);
  for (double& x : same) x = random.normal();
  for (int64_t r = 0; r < t.size() / c.K; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < c.K; ++i) {
      row[i] = c.keys == Keys::kPositive ? random.uniform() : random.normal();
      if (c.keys == Keys::kIdentical && unit) row[i] = same[i];
      sum += row[i] * row[i];
    }
    const bool zero = c.keys == Keys::kSomeZero && r % 3 == 1;
    constexpr double kLengths[] = {1, 3e37, 1, 1e20, 1e-3, 1e19, 1e-21};
    const double length = c.keys == Keys::kAnyLength ? kLengths[random.below(std::size(kLengths))] : 1;
    for (int64_t i = 0; i < c.K; ++i)
      t.set(r * c.K + i, zero ? 0 : unit && !c.qk_l2norm ? row[i] / std::sqrt(sum) : length * row[i]);
  }
}

double gate_value(const Case& c, Random& random) {
  const double decay = -std::log1p(std::exp(-random.normal())) / c.gate_divisor;
  switch (c.gates) {
    case Gates::kLogSigmoid: return decay;
    case Gates::kHalfZero: return random.chance(0.5) ? 0 : decay;
    case Gates::kRaw: return random.normal();
    case Gates::kFloor: return c.lower_bound;
    case Gates::kZero: return 0;
    case Gates::kEdges: {
      constexpr double kSizes[] = {0, 0, 1e-45, 1e-38, 1e-20, 0.01, 1, 5, 20, 64, 80, 90, 100, 200, 1e4, 1e30, 3e38};
      return (random.chance(0.5) ? 1 : -1) * kSizes[random.below(std::size(kSizes))];
    }
    case Gates::kWild: break;
  }
  constexpr double kWild[] = {0, 0, 0, -1e-4, -0.1, -0.1, -5, -100, -3000, -std::numeric_limits<double>::infinity()};
  return kWild[random.below(std::size(kWild))];
}

double beta_value(const Case& c, Random& random) {
  const double x = random.normal();
  switch (c.betas) {
    case Betas::kRandom: return c.beta_form == KDA_BETA_ACTIVATED ? sigmoid(x) : x;
    case Betas::kZero: return 0;
    case Betas::kNearOne: return 0.97;
    case Betas::kNearTwo: return 1.94;
  }
  return x;
}

}  // namespace

Inputs::Inputs(const Case& c, uint64_t seed) : c(c), B(c.B), T(c.T), N(c.B) {
  if (!c.lengths.empty() || c.tail) {
    B = 1, N = static_cast<int64_t>(c.lengths.size());
    T = std::accumulate(c.lengths.begin(), c.lengths.end(), int64_t{0}) + c.tail;
    cu_seqlens = Tensor(c.cu_dtype, {N + 1});
    cu_seqlens.set(0, 0);
    for (int64_t n = 0; n < N; ++n) cu_seqlens.set(n + 1, cu_seqlens.get(n) + static_cast<double>(c.lengths[n]));
  }
  q = Tensor(c.dtype, {B, T, c.H, c.K}, c.layout);
  k = Tensor(c.dtype, {B, T, c.H, c.K}, c.layout);
  v = Tensor(c.dtype, {B, T, c.HV, c.V}, c.layout);
  g = Tensor(c.g_dtype, {B, T, c.HV, c.K}, c.layout);
  beta = Tensor(c.beta_dtype, {B, T, c.HV}, c.layout);
  d_o = Tensor(c.dtype, {B, T, c.HV, c.V}, c.layout);

  Random random(seed_of(c.name, seed));
  fill_rows(q, c, false, random);
  fill_rows(k, c, true, random);
  fill_normal(v, random);
  fill_normal(d_o, random);
  for (int64_t i = 0; i < g.size(); ++i) g.set(i, gate_value(c, random));
  for (int64_t i = 0; i < beta.size(); ++i) beta.set(i, beta_value(c, random));
  const int32_t single = c.dtype == KDA_F64 ? KDA_F64 : KDA_F32;
  if (c.A_log) {
    A_log = Tensor(single, {c.HV});
    constexpr double kEdges[] = {0, 100, 88.8, 64.5, 3, 177, -64.5, 1000, -95, 16.5, 80, 140, 40, -300, 1e30, -10};
    for (int64_t i = 0; i < c.HV; ++i)
      A_log.set(i, c.gates == Gates::kEdges ? kEdges[i % std::ssize(kEdges)] : std::log(random.uniform(1, 16)));
  }
  if (c.dt_bias) {
    dt_bias = Tensor(single, {c.HV, c.K}, c.layout);
    fill_normal(dt_bias, random);
    if (c.gates == Gates::kEdges) cancel_bias(random);
  }
  if (c.h0) fill_normal(h0 = Tensor(c.state_dtype, state_shape(N), c.layout), random);
  if (c.dhT) fill_normal(dhT = Tensor(c.state_dtype, state_shape(N), c.layout), random);
}

// Gives half of the channels a bias, and half of their inputs the value that cancels it.
void Inputs::cancel_bias(Random& random) {
  constexpr double kSizes[] = {3, -96, 0x1p40, -0x1p100};
  for (int64_t i = 0; i < dt_bias.size(); ++i)
    dt_bias.set(i, random.chance(0.5) ? kSizes[random.below(std::size(kSizes))] : 0);
  for (int64_t i = 0; i < g.size(); ++i)
    if (const double bias = dt_bias.get(i % dt_bias.size()); bias != 0 && random.chance(0.5)) g.set(i, -bias);
}

kda_inputs Inputs::view() const {
  kda_inputs in{};
  in.q = q, in.k = k, in.v = v, in.g = g, in.beta = beta;
  in.A_log = A_log, in.dt_bias = dt_bias, in.cu_seqlens = cu_seqlens;
  in.gate_form = c.gate_form;
  in.beta_form = c.beta_form;
  in.qk_l2norm = c.qk_l2norm;
  in.state_layout = c.state_layout;
  in.lower_bound = c.gate_form == KDA_GATE_LOWER_BOUND ? c.lower_bound : 0;
  in.scale = c.scale;
  return in;
}

int64_t Inputs::begin(int64_t n) const { return cu_seqlens ? static_cast<int64_t>(cu_seqlens.get(n)) : 0; }
int64_t Inputs::length(int64_t n) const { return cu_seqlens ? c.lengths[n] : T; }
int64_t Inputs::h_rows(int64_t every) const {
  int64_t sum = 0;
  for (int64_t n = 0; n < N; ++n) sum += (length(n) + 64 * every - 1) / (64 * every);
  return sum;
}
std::vector<int64_t> Inputs::state_shape(int64_t rows) const {
  if (c.state_layout == KDA_STATE_V_FIRST) return {rows, c.HV, c.V, c.K};
  return {rows, c.HV, c.K, c.V};
}

std::vector<Named> Inputs::tensors() {
  return {{"q", &q},
          {"k", &k},
          {"v", &v},
          {"g", &g},
          {"beta", &beta},
          {"A_log", &A_log},
          {"dt_bias", &dt_bias},
          {"cu_seqlens", &cu_seqlens},
          {"h0", &h0},
          {"d_o", &d_o},
          {"dhT", &dhT}};
}

std::map<std::string, Bits> Inputs::bits() {
  std::map<std::string, Bits> all;
  for (const auto& [name, t] : tensors()) all[name] = t->bits();
  return all;
}

ForwardOutputs::ForwardOutputs(const Inputs& in, bool all, bool f64) {
  const Case& c = in.c;
  const auto dtype = [&](int32_t usual) { return f64 ? KDA_F64 : usual; };
  o = Tensor(dtype(c.dtype), {in.B, in.T, c.HV, c.V}, c.layout);
  hT = Tensor(dtype(c.state_dtype), in.state_shape(in.N), c.layout);
  if (!all) return;
  h = Tensor(dtype(KDA_F32), in.state_shape(in.h_rows(1)), c.layout);
  v_new = Tensor(dtype(KDA_F32), {in.B, in.T, c.HV, c.V}, c.layout);
  Aqk = Tensor(dtype(KDA_F32), {in.B, in.T, c.HV, 64}, c.layout);
  Akk = Tensor(dtype(KDA_F32), {in.B, in.T, c.HV, 64}, c.layout);
}

void ForwardOutputs::save_states(const Inputs& in, int32_t every, bool f64) {
  h = Tensor(f64 ? KDA_F64 : KDA_F32, in.state_shape(in.h_rows(every)), in.c.layout);
  h_every = every;
}

void ForwardOutputs::save_v_first(const Inputs& in, int32_t dtype) {
  h = Tensor(dtype, {in.h_rows(1), in.c.HV, in.c.V, in.c.K}, in.c.layout);
  h_every = h_v_first = 1;
}

Tensor in_other_layout(const Tensor& states) {
  std::vector<int64_t> shape = states.shape();
  const int64_t rows = shape[2], columns = shape[3];
  std::swap(shape[2], shape[3]);
  Tensor other(states.dtype(), shape);
  for (int64_t i = 0; i < states.size(); ++i) {
    const int64_t head = i / (rows * columns), row = i / columns % rows, column = i % columns;
    other.set((head * columns + column) * rows + row, states.get(i));
  }
  return other;
}

std::vector<Named> ForwardOutputs::tensors() {
  return {{"o", &o}, {"hT", &hT}, {"h", &h}, {"v_new", &v_new}, {"Aqk", &Aqk}, {"Akk", &Akk}};
}

BackwardOutputs::BackwardOutputs(const Inputs& in, bool f64) {
  const Case& c = in.c;
  const auto dtype = [&](int32_t usual) { return f64 ? KDA_F64 : usual; };
  dq = Tensor(dtype(c.dtype), {in.B, in.T, c.H, c.K}, c.layout);
  dk = Tensor(dtype(c.dtype), {in.B, in.T, c.H, c.K}, c.layout);
  dv = Tensor(dtype(c.dtype), {in.B, in.T, c.HV, c.V}, c.layout);
  dg = Tensor(dtype(c.g_dtype), {in.B, in.T, c.HV, c.K}, c.layout);
  dbeta = Tensor(dtype(c.beta_dtype), {in.B, in.T, c.HV}, c.layout);
  if (c.A_log) dA_log = Tensor(dtype(KDA_F32), {c.HV});
  if (c.dt_bias) d_dt_bias = Tensor(dtype(KDA_F32), {c.HV, c.K}, c.layout);
  dh0 = Tensor(dtype(c.state_dtype), in.state_shape(in.N), c.layout);
}

std::vector<Named> BackwardOutputs::tensors() {
  return {{"dq", &dq},
          {"dk", &dk},
          {"dv", &dv},
          {"dg", &dg},
          {"dbeta", &dbeta},
          {"dA_log", &dA_log},
          {"d_dt_bias", &d_dt_bias},
          {"dh0", &dh0}};
}

kda_forward_args forward_args(const Inputs& in, const ForwardOutputs& out) {
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = in.view();
  a.states.h0 = in.h0, a.states.hT = out.hT;
  a.h_every = out.h_every, a.h_v_first = out.h_v_first;
  a.o = out.o, a.h = out.h, a.v_new = out.v_new, a.Aqk = out.Aqk, a.Akk = out.Akk;
  return a;
}

kda_backward_args backward_args(const Inputs& in, const BackwardOutputs& out, const ForwardOutputs* saved) {
  kda_backward_args a = KDA_BACKWARD_ARGS_INIT;
  a.in = in.view();
  a.h0 = in.h0, a.d_o = in.d_o, a.dhT = in.dhT;
  if (saved) {
    a.h = saved->h, a.v_new = saved->v_new, a.Aqk = saved->Aqk, a.Akk = saved->Akk;
    a.h_every = saved->h_every, a.h_v_first = saved->h_v_first;
  }
  a.dq = out.dq, a.dk = out.dk, a.dv = out.dv, a.dg = out.dg, a.dbeta = out.dbeta;
  a.dA_log = out.dA_log, a.d_dt_bias = out.d_dt_bias, a.dh0 = out.dh0;
  return a;
}

Pool::Pool(const Inputs& in, int32_t dtype, int64_t spare)
    : h(dtype, in.state_shape(in.N + spare), in.c.layout),
      state_indices(KDA_I32, {in.N}),
      has_initial_state(KDA_BOOL, {in.N}) {
  const int64_t row = in.h0 ? in.h0.size() / std::max<int64_t>(1, in.N) : 0;
  for (int64_t n = 0; n < in.N; ++n) {
    slots.push_back(in.N + spare - 1 - n);  // backwards, so that hardly any slot is its sequence
    state_indices.set(n, static_cast<double>(slots[n]));
    has_initial_state.set(n, in.c.h0);
    for (int64_t i = 0; i < row; ++i) h.set(slots[n] * row + i, in.h0.get(n * row + i));
  }
}

Tensor Pool::rows(const Inputs& in) const {
  Tensor states(h.dtype(), in.state_shape(in.N));
  const int64_t row = states.size() / std::max<int64_t>(1, in.N);
  for (int64_t i = 0; i < states.size(); ++i) states.set(i, h.get(slots[i / row] * row + i % row));
  return states;
}

kda_decode_args decode_args(const Inputs& in, const Pool& h0, const Pool& hT, const Tensor& o) {
  kda_decode_args a = KDA_DECODE_ARGS_INIT;
  a.in = in.view();
  a.states.h0 = h0.h, a.states.hT = hT.h;
  a.states.state_indices = h0.state_indices;
  a.states.has_initial_state = h0.has_initial_state;
  a.o = o;
  return a;
}

SegmentOutputs::SegmentOutputs(const Inputs& in, bool f64) {
  const Case& c = in.c;
  const int32_t dtype = f64 ? KDA_F64 : KDA_F32;
  M = Tensor(dtype, {in.N, c.HV, c.K, c.K}, c.layout);
  b = Tensor(dtype, in.state_shape(in.N), c.layout);
  d = Tensor(dtype, in.state_shape(in.N), c.layout);
}

std::vector<Named> SegmentOutputs::tensors() { return {{"M", &M}, {"b", &b}, {"d", &d}}; }

kda_segment_map_args segment_map_args(const Inputs& in, const SegmentOutputs& out) {
  kda_segment_map_args a = KDA_SEGMENT_MAP_ARGS_INIT;
  a.in = in.view();
  a.M = out.M, a.b = out.b, a.d = out.d;
  if (out.d) a.d_o = in.d_o;
  return a;
}

MergeTensors::MergeTensors(int64_t P, int64_t HV, int64_t K, int64_t V, int32_t state_layout, Layout layout)
    : state_layout(state_layout) {
  const int64_t rows = state_layout == KDA_STATE_V_FIRST ? V : K, columns = rows == V ? K : V;
  Random random(static_cast<uint64_t>(P * 1000 + HV * 100 + K + V));
  M = Tensor(KDA_F32, {P, HV, K, K}, layout);
  b = Tensor(KDA_F32, {P, HV, rows, columns}, layout);
  h0 = Tensor(KDA_F32, {HV, rows, columns}, layout);
  states = Tensor(KDA_F32, {P + 1, HV, rows, columns}, layout);
  for (Tensor* t : {&b, &h0}) fill_normal(*t, random);
  for (int64_t i = 0; i < M.size(); ++i) M.set(i, random.normal() / std::sqrt(static_cast<double>(K)));
}

kda_segment_merge_args segment_merge_args(const MergeTensors& t, bool reverse) {
  kda_segment_merge_args a = KDA_SEGMENT_MERGE_ARGS_INIT;
  a.M = t.M, a.b = t.b, a.h0 = t.h0, a.states = t.states;
  a.state_layout = t.state_layout, a.reverse = reverse;
  return a;
}

GateTensors::GateTensors(const Inputs& in, int32_t out_dtype) {
  const Case& c = in.c;
  const std::vector<int64_t> shape{in.B * in.T, c.HV, c.K};
  x = Tensor(c.g_dtype, shape, in.g.values(), c.layout);
  A_log = in.A_log.clone();
  dt_bias = in.dt_bias.clone();
  dg = Tensor(c.g_dtype, shape, c.layout);
  Random random(shape[0]);
  fill_normal(dg, random);
  g = Tensor(out_dtype, shape, c.layout);
  dx = Tensor(out_dtype, shape, c.layout);
  const int32_t sums = out_dtype == KDA_F64 ? KDA_F64 : KDA_F32;
  if (A_log) dA_log = Tensor(sums, {c.HV});
  if (dt_bias) d_dt_bias = Tensor(sums, {c.HV, c.K}, c.layout);
}

kda_gate_args gate_args(const Inputs& in, const GateTensors& t) {
  kda_gate_args a = KDA_GATE_ARGS_INIT;
  a.x = t.x, a.A_log = t.A_log, a.dt_bias = t.dt_bias, a.g = t.g;
  a.gate_form = in.c.gate_form;
  a.lower_bound = in.c.lower_bound;
  return a;
}

kda_gate_backward_args gate_backward_args(const Inputs& in, const GateTensors& t) {
  kda_gate_backward_args a = KDA_GATE_BACKWARD_ARGS_INIT;
  a.x = t.x, a.A_log = t.A_log, a.dt_bias = t.dt_bias, a.dg = t.dg;
  a.dx = t.dx, a.dA_log = t.dA_log, a.d_dt_bias = t.d_dt_bias;
  a.gate_form = in.c.gate_form;
  a.lower_bound = in.c.lower_bound;
  return a;
}

}  // namespace kda::test
