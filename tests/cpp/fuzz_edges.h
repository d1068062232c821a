// Numbers at the ends of their range for the calls of fuzz_calls.h, and how near float32 has to come to float64 there.
#pragma once
#include <bit>
#include <cfloat>
#include <limits>

#include "fuzz_oracle.h"

namespace kda::test {

// What the numbers of a tensor do to a result. In `kLinear` and `kRecurrent` tensors they are factors, and the
// factors of a recurrence make it grow. Results of gates and normalised rows are bounded, so float32 promises them
// for any value.
enum class Role { kNone, kRawGate, kLogGate, kNormalised, kLinear, kRecurrent };

// Whether the call may run on Hopper's or Blackwell's forward in chunks, where queries are operands in f16: they are
// promised up to 1. From a query that is not finite on, a head may be NaN, and in all of its chunk for an infinite
// beta.
template <class Args>
bool has_queries_in_f16(const Args& a) {
  if (!std::is_same_v<Args, kda_forward_args> || a.exec.device != KDA_CUDA) return false;
  const std::string impl = a.exec.impl ? a.exec.impl : "hopper";
  return impl.find("hopper") != std::string::npos || impl.find("blackwell") != std::string::npos;
}

template <class Args>
Role role(const Args& a, const Field& f) {
  const std::string name = f.name;
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* n) { return name == n; });
  };
  bool rolled = is({"state", "conv_state", "conv.state"});  // in and out
  if constexpr (std::is_same_v<Args, kda_stage_bwd_intra_args>) rolled |= f.output;
  if (f.t->ndim == 0 || f.t->dtype > KDA_F64 || (f.output && !rolled)) return Role::kNone;
  if (name == "G") return Role::kNone;  // sums that never rise within a chunk: no others mean anything
  if (is({"A_log", "dt_bias"})) return Role::kRawGate;
  if constexpr (requires { a.A_log; })
    if (name == "x") return Role::kRawGate;
  if constexpr (requires { a.activation; }) {
    if (name == "x") return Role::kNormalised;
    if (name == "gate" && a.activation == KDA_NORM_SIGMOID) return Role::kRawGate;
  }
  if constexpr (requires { a.in; }) {
    if (name == "g") return a.in.gate_form == KDA_GATE_LOG ? Role::kLogGate : Role::kRawGate;
    if (name == "beta" && a.in.beta_form != KDA_BETA_ACTIVATED) return Role::kRawGate;
    if (is({"q", "k"}) && a.in.qk_l2norm) return Role::kNormalised;
    if ((name.starts_with("conv.") || name == "last_conv_x") && !a.in.qk_l2norm) return Role::kRecurrent;  // as keys
  }
  if constexpr (requires { a.chunk; })
    if (name == "g") return Role::kLogGate;
  if constexpr (requires { a.at.cu_seqlens; })
    if (name == "g") return Role::kLogGate;
  if (name == "q" && has_queries_in_f16(a)) return Role::kRecurrent;  // which no factor makes larger
  if (is({"k", "beta", "w", "kg", "M", "Akk_inv", "records.alpha", "last.alpha"})) return Role::kRecurrent;
  return Role::kLinear;
}

inline double largest(const kda_tensor& t) {
  double most = 0;
  for (int64_t i = 0; i < tensor_size(t); ++i)
    if (const double x = std::abs(get(t, i)); std::isfinite(x)) most = std::max(most, x);
  return most;
}

// ---- strides ----

// Gives dimensions of size one strides that mean nothing.
inline void move_single(kda_tensor& t, Random& random) {
  constexpr int64_t kAny[] = {0, 1, -7, int64_t{1} << 41};
  for (int i = 0; i + 1 < t.ndim; ++i)
    if (t.shape[i] == 1 && random.chance(0.3)) t.stride[i] = kAny[random.below(std::ssize(kAny))];
}
// Turns the first dimension around, or has an input's elements stand for many.
inline void move_strides(kda_tensor& t, bool output, Random& random) {
  move_single(t, random);
  if (t.ndim < 3) return;
  if (t.shape[0] > 1 && random.chance(0.15)) {
    t.data = static_cast<char*>(t.data) + (t.shape[0] - 1) * t.stride[0] * dtype_size(t.dtype);
    t.stride[0] = -t.stride[0];
  } else if (const int64_t dim = random.below(t.ndim - 1); !output && t.shape[dim] > 1 && random.chance(0.1)) {
    t.stride[dim] = 0;
  }
}
// The strides of a call's tensors, but for those that share their memory. It draws nothing from `random`, so that calls
// keep all else.
template <class Args>
void move_strides(Args& a, const Random& random) {
  Random own(Random(random).bits() ^ 0x517de5);
  const std::vector<Field> all = fields(a);
  for (const Field& f : all) {
    const auto shares = [&](const Field& other) { return other.t != f.t && other.t->data == f.t->data; };
    if (!tensor_size(*f.t) || std::any_of(all.begin(), all.end(), shares)) continue;
    move_strides(*f.t, f.output || !std::strcmp(f.name, "h"), own);  // save_again() writes h
  }
}

// ---- spoiling ----

constexpr float kMostOfTwo = FLT_MAX / 2;  // a gate adds two of them in float32

inline double any_float32(Random& random) {
  const float x = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
  return std::isnan(x) ? 0 : std::isinf(x) ? x : std::clamp(x, -kMostOfTwo, kMostOfTwo);
}

inline void scale_all(const kda_tensor& t, double factor) {
  for (int64_t i = 0; i < tensor_size(t); ++i) set(t, i, factor * get(t, i));
}
template <size_t N>
void set_some(const kda_tensor& t, const double (&values)[N], Random& random) {
  for (int64_t n = 1 + random.below(3); n > 0; --n)
    set(t, random.below(tensor_size(t)), values[random.below(static_cast<int64_t>(N))]);
}

// Powers of ten; float16 holds fewer.
inline double factor(const kda_tensor& t, int64_t most, Random& random) {
  constexpr int64_t kPowers[] = {-40, -30, -20, -10, -4, 4, 10, 20, 30, 38};
  int64_t power = 0;
  do power = kPowers[random.below(std::size(kPowers))];
  while (power > most || (t.dtype == KDA_F16 && std::abs(power) > 4));
  return std::pow(10.0, static_cast<double>(power));
}

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

inline void spoil_gate(const kda_tensor& t, bool log, Random& random) {
  constexpr double kEdges[] = {0,    -0.0, 1e-40, -1e-40, 17,    -17,   20,         -20,         88.7, -88.7, 104,
                               -104, 1e10, -1e10, 1e30,   -1e30, 65504, kMostOfTwo, -kMostOfTwo, kInf, -kInf, kNan};
  const int64_t way = random.below(4);
  if (way == 0) scale_all(t, factor(t, 38, random));
  else if (way == 1) set_some(t, kEdges, random);
  for (int64_t i = 0; way >= 2 && i < tensor_size(t); ++i)
    set(t, i, way == 2 ? any_float32(random) : random.uniform(-110, 110));
  for (int64_t i = 0; log && i < tensor_size(t); ++i) set(t, i, -std::abs(get(t, i)));
}

inline void spoil(const kda_tensor& t, Role role, Random& random) {
  constexpr double kFactors[] = {0, -0.0, 1e-40, -1e-30, 1e-20, 1e20, -1e30, kInf, -kInf, kNan};
  constexpr double kOfRows[] = {0, 1e-40, 1e-30, 65504, 1e19, -1e20, 1e30, FLT_MAX, -FLT_MAX, kInf, kNan};
  constexpr double kSmall[] = {0, -0.0, 1e-40, -1e-30, 1e-10, 1, kInf, kNan};
  if (tensor_size(t) == 0) return;
  if (role == Role::kRawGate || role == Role::kLogGate) return spoil_gate(t, role == Role::kLogGate, random);
  if (random.chance(0.7))
    return scale_all(t, factor(t, role == Role::kNormalised ? 38 : role == Role::kLinear ? 30 : -4, random));
  if (role == Role::kNormalised) set_some(t, kOfRows, random);
  else if (role == Role::kLinear) set_some(t, kFactors, random);
  else set_some(t, kSmall, random);
}

// Spoils up to three of a call's tensors and returns their names. `bounded`: only those that no factor grows with.
template <class Args>
std::string spoil_some(Args& a, Random& random, bool bounded) {
  std::vector<std::pair<Field, Role>> all;
  for (const Field& f : fields(a)) {
    const Role r = role(a, f);
    if (r == Role::kNone || (bounded && (r == Role::kLinear || r == Role::kRecurrent))) continue;
    all.emplace_back(f, r);
  }
  std::string names;
  for (int64_t n = 1 + random.below(3); n > 0 && !all.empty(); --n) {
    const auto& [f, r] = all[random.below(std::ssize(all))];
    spoil(*f.t, r, random);
    names += std::string(names.empty() ? "" : ", ") + f.name;
  }
  return names;
}

// Prints the first numbers of each tensor, when a failing call is repeated.
template <class Args>
void print_values(Args& a) {
  for (const Field& f : fields(a)) {
    if (f.t->ndim == 0 || f.t->dtype > KDA_F64) continue;
    std::printf("%s:", f.name);
    for (int64_t i = 0; i < std::min<int64_t>(16, tensor_size(*f.t)); ++i) std::printf(" %.4g", get(*f.t, i));
    int64_t strange = 0;
    for (int64_t i = 0; i < tensor_size(*f.t); ++i) strange += !std::isfinite(get(*f.t, i));
    std::printf("; up to %.4g, %ld not finite\n", largest(*f.t), static_cast<long>(strange));
  }
}

// ---- what float32 promises ----

// A bound on every number on the way to a result, and on the factors of what underflows there.
template <class Args>
double largest_factor(Args& a) {
  double product = 1;
  for (const Field& f : fields(a))
    if (const Role r = role(a, f); r == Role::kLinear || r == Role::kRecurrent) product *= std::max(1.0, largest(*f.t));
  return product;
}
constexpr double kMostFactor =
    1e31;  // beyond it float32 may overflow where float64 does not: such results are not compared

// A subnormal may count as 0, which turns an infinity into NaN, or into nothing.
template <class Args>
bool has_subnormals_and_infinities(Args& a) {
  bool subnormal = false, infinite = false;
  for (const Field& f : fields(a))
    for (int64_t i = 0; role(a, f) != Role::kNone && i < tensor_size(*f.t); ++i) {
      const double x = std::abs(get(*f.t, i));
      subnormal |= x > 0 && x < FLT_MIN, infinite |= std::isinf(x);
    }
  return subnormal && infinite;
}

// Maps on Hopper take queries in f16 as forward does, but are given any here. Larger ones are not compared.
template <class Args>
bool has_queries_beyond_f16(const Args& a) {
  if constexpr (std::is_same_v<Args, kda_segment_map_args>) {
    const bool on_hopper = !a.exec.impl || std::strstr(a.exec.impl, "hopper");
    return a.exec.device == KDA_CUDA && on_hopper && !a.in.qk_l2norm && largest(a.in.q) > 1e3;
  }
  return false;
}

// How far off a result may be: by `gate` times its size; or by `noise` times its change when all inputs change by
// kNudge of their size (then it is a small difference); or by what underflowed. The rounding of its own store is
// added to all of these.
// A single element may be off by 8 times that and, if it is much larger than others, by `own` times its own size.
struct Promise {
  double gate, noise, underflow, own = 0;
};
constexpr double kNudge = 0x1p-20;

// Returns the call with float64 inputs, each off by kNudge at most. A gate's sum x + dt_bias may cancel, but is exact
// to its last bit.
template <class Args>
Args nudged(Args a, Arena& into, Random& random) {
  into.clear();
  Random dense(0);
  for (const Field& f : fields(a)) {
    if (f.output || f.t->ndim == 0 || f.t->dtype > KDA_F64) continue;
    if (kReadsRounded<Args> && !std::strcmp(f.name, "h0")) continue;
    const std::string name = f.name;
    const double size = role(a, f) == Role::kRawGate && name != "A_log" && name != "beta" ? 0 : kNudge;
    const kda_tensor given = *f.t;
    *f.t = into.take(KDA_F64, {given.shape, given.shape + given.ndim}, dense);
    for (int64_t i = 0; i < tensor_size(given); ++i) set(*f.t, i, get(given, i) * (1 + size * random.uniform(-1, 1)));
  }
  return a;
}

// ---- comparing ----

// Heads, or channels of a convolution, share nothing: each is compared by itself.
template <class Args>
int head_dim(const Args& a, const Field& f) {
  const std::string name = f.name;
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* n) { return name == n; });
  };
  if (is({"A_log", "dt_bias", "dA_log", "d_dt_bias", "weight", "bias", "dweight", "dbias"})) return 0;
  if constexpr (requires { a.chunk; }) return 1;
  if constexpr (requires { a.activation; }) return 2;
  if constexpr (requires { a.weight; }) return is({"x", "x1", "x2", "y", "dy", "dx"}) ? 2 : 1;
  if (is({"beta", "dbeta"})) return 2;
  if (is({"conv.state", "conv_state"})) return f.t->ndim - 2;
  if (is({"hT", "h", "dh", "dh0", "h0", "dhT", "M", "b", "d", "states", "checkpoints", "snapshots", "state"}))
    return f.t->ndim - 3;
  return f.t->ndim - 2;
}

inline double largest_of(int32_t dtype) { return dtype == KDA_F16 ? 65504 : dtype == KDA_F64 ? DBL_MAX : FLT_MAX; }
inline double least_of(int32_t dtype) { return dtype == KDA_F16 ? 0x1p-25 : 0; }

struct Sums {
  double n = 0, ref2 = 0, error2 = 0, nudge2 = 0, noise2 = 0, worst = 0;
  int64_t at = 0;
};

// Adds element i, which `noise` may take beyond the dtype, and returns false if only one of the two numbers is
// finite. A number beyond the dtype counts as infinite; where float64 is not finite, any number that is not finite is
// right.
inline bool add(Sums& sums, int64_t i, double ref, double x, double nudge, double noise, const Promise& p,
                int32_t dtype) {
  const double most = largest_of(dtype), off = std::max(0.01, 8 * p.gate), below = 8 * p.underflow;
  if (!std::isfinite(ref)) return !std::isfinite(x);
  if (std::abs(ref) > most * (1 + off) + below) return !std::isfinite(x);
  if (!std::isfinite(x))
    return std::abs(ref) + 8 * noise + below > most * (1 - off) &&
           (noise > 0 || std::abs(ref) < below || x == std::copysign(kInf, ref));
  const double store = unit_roundoff(dtype) * std::abs(ref) + least_of(dtype);
  const double error = std::max(0.0, std::abs(ref - x) - store);
  sums.n += 1, sums.ref2 += ref * ref, sums.error2 += error * error, sums.nudge2 += nudge * nudge,
      sums.noise2 += noise * noise;
  if (const double rest = error - p.own * std::abs(ref); rest > sums.worst) sums.worst = rest, sums.at = i;
  return true;
}

inline int64_t inner_size(const kda_tensor& t, int dim) {
  int64_t inner = 1;
  for (int d = t.ndim - 1; d > dim; --d) inner *= t.shape[d];
  return inner;
}

// The rows and value heads of a call that hold a number which is not finite.
struct Tainted {
  int64_t rows = 0, heads = 0;
  std::vector<bool> any;

  // Visits the rows and value heads that a row and head of a tensor stand for. The tensor may have fewer heads than
  // the call has value heads, or other rows (packed states; sums over all).
  template <class F>
  void each(int64_t row, int64_t row_count, int64_t head, int64_t head_count, const F& f) {
    const int64_t group = heads / head_count, first = row_count == rows ? row : 0;
    for (int64_t r = first; r < (row_count == rows ? row + 1 : rows); ++r)
      for (int64_t j = head * group; j < (head + 1) * group; ++j) f(any[r * heads + j]);
  }
  void mark(int64_t row, int64_t row_count, int64_t head, int64_t head_count) {
    each(row, row_count, head, head_count, [](auto&& x) { x = true; });
  }
  bool holds(int64_t row, int64_t row_count, int64_t head, int64_t head_count) {
    bool found = false;
    if (!any.empty()) each(row, row_count, head, head_count, [&](auto&& x) { found |= x; });
    return found;
  }
};

// Where an element lies among rows and heads.
struct Place {
  int64_t rows, heads, row, head;
};
inline Place place_of(const kda_tensor& t, int dim, int64_t i) {
  const int64_t rows = dim > 0 ? t.shape[0] : 1;
  int64_t of_row = 1, inner = 1;
  for (int d = t.ndim - 1; d >= (dim > 0 ? 1 : 0); --d) of_row *= t.shape[d], inner *= d > dim ? t.shape[d] : 1;
  return {rows, t.shape[dim], i / of_row, i / inner % t.shape[dim]};
}

// The same for a tensor of a call. x, x1 and x2 of a convolution have some of its channels each.
template <class Args>
Place place_of(const Args& a, const Field& f, int64_t i) {
  Place p = place_of(*f.t, head_dim(a, f), i);
  if constexpr (requires { a.x1; })
    if (*f.name == 'x') {
      p.heads = a.weight.shape[0];
      if (f.t != &a.x) p.head += a.x.shape[2];
      if (f.t == &a.x2) p.head += a.x1.shape[2];
    }
  return p;
}

// Stages and gradients promise nothing within a row and head that holds such a number. prefill_f32 is made of stages
// on CUDA: there such a number also reaches the earlier tokens of its chunk. For the gate's gradient this holds for
// dg alone (infinity times a slope of 0 is 0 or NaN), because the slopes at an infinite input are known. For forward in
// chunks on Hopper and Blackwell it holds for queries.
template <class Args>
Tainted tainted_by(Args& a) {
  Tainted found;
  if constexpr (std::is_same_v<Args, kda_forward_args>) {
    if (!has_queries_in_f16(a)) return found;
    found.rows = a.in.v.shape[0], found.heads = a.in.v.shape[2], found.any.resize(found.rows * found.heads);
    for (const kda_tensor* t : {&a.in.q, &a.in.beta})
      for (int64_t i = 0; i < tensor_size(*t); ++i) {
        const Place p = place_of(*t, 2, i);
        if (std::isinf(get(*t, i)) || (t == &a.in.q && std::isnan(get(*t, i))))
          found.mark(0, 0, p.head, p.heads);  // of all sequences
      }
  }
  constexpr bool kOfStagesOnCuda = std::is_same_v<Args, kda_prefill_f32_args>,
                 kOfGate = std::is_same_v<Args, kda_gate_backward_args>;
  if constexpr (
      kOfStagesOnCuda || kOfGate || requires { a.at; } || requires { a.d_o; } || requires { a.dweight; }) {
    if (kOfStagesOnCuda && a.exec.device != KDA_CUDA) return found;
    for (const Field& f : fields(a)) {
      if (f.t->ndim < 2 || tensor_size(*f.t) == 0) continue;
      const Place p = place_of(a, f, 0);
      found.heads = std::max(found.heads, p.heads);
      const auto is = [&](const char* name) { return !std::strcmp(f.name, name); };
      if (is("v") || is("G") || is("dy") || (kOfGate && is("dg"))) found.rows = p.rows;
    }
    found.rows = std::max<int64_t>(found.rows, 1), found.any.resize(found.rows * found.heads);
    for (const Field& f : fields(a))
      for (int64_t i = 0; f.t->dtype <= KDA_F64 && f.t->ndim && i < tensor_size(*f.t); ++i)
        if (!std::isfinite(get(*f.t, i)) && (!f.output || role(a, f) != Role::kNone) &&
            (!kOfGate || !std::strcmp(f.name, "dg"))) {
          const Place p = place_of(a, f, i);
          found.mark(p.row, p.rows, p.head, p.heads);
        }
  }
  return found;
}

// `more`: by how much else each element may be off; or empty.
inline void expect_near(const Field& f, const kda_tensor& expected, const kda_tensor& moved, int dim, const Promise& p,
                        Tainted& tainted, const std::vector<double>& more) {
  const int64_t size = tensor_size(*f.t);
  std::vector<Sums> all(f.t->shape[dim] * (dim > 0 ? f.t->shape[0] : 1));
  for (int64_t i = 0; i < size; ++i) {
    const Place at = place_of(*f.t, dim, i);
    if (tainted.holds(at.row, at.rows, at.head, at.heads)) continue;
    const double ref = get(expected, i), x = get(*f.t, i), change = std::abs(get(moved, i) - ref);
    Sums& sums = all[at.row * at.heads + at.head];
    const double noise = more.empty() ? 0 : more[i];
    if (!add(sums, i, ref, x, std::isfinite(change) ? change : 0, noise, p, f.t->dtype))
      fail(str(f.name, "[", i, "]: expected ", ref, ", got ", x));
  }
  for (const Sums& s : all) {  // M, a product of maps that shrink, is 1 at most, and so are its factors
    if (s.n == 0) continue;
    const double ref = std::sqrt(s.ref2 / s.n), error = std::sqrt(s.error2 / s.n), noise = std::sqrt(s.nudge2 / s.n);
    const double budget = p.gate * ref + p.noise * noise + std::sqrt(s.noise2 / s.n) + p.underflow +
                          (std::strcmp(f.name, "M") ? 0 : kNudge);
    if (!(error <= budget && s.worst <= 8 * budget))
      fail(str(f.name, " is off by ", error, " of ", ref, ", budget ", budget, " (", p.noise * noise,
               " for small differences); worst at ", s.at, ": expected ", get(expected, s.at), ", got ",
               get(*f.t, s.at)));
  }
}

}  // namespace kda::test
