// Seeded fuzzing of the C ABI: mostly legal calls of all operators, most of them broken in one to three places.
//   fuzz [calls] [seed] [first]      a failure prints the arguments that repeat it: fuzz 1 SEED CALL
// All tensors lie in one arena, and no call is made whose tensors reach outside it (such a call is undefined by
// contract). Whatever the library answers, all memory that it must not write is compared byte by byte; a call that
// succeeds is compared with the oracle.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "fuzz_oracle.h"

namespace kda::test {
namespace {

Arena reference_arena(2 * kArena);  // the oracle's outputs, float64
std::vector<char> before;           // the arena as the call found it
alignas(256) char workspace[kWorkspace];

// ---- breaking them ----

template <class T, size_t N>
T one_of(const T (&values)[N], Random& random) {
  return values[random.below(N)];
}

// Returns false if the data no longer means what it was filled with: then results are not compared.
bool break_tensor(const Field& f, const std::vector<Field>& all, Random& random) {
  constexpr int64_t kShapes[] = {-1, 0, 1, 2, 3, 5, 16, 64, 65, 257};
  constexpr int64_t kStrides[] = {-64, -1, 0, 1, 2, 3, 16, 60, 300};
  constexpr int64_t kInts[] = {-2147483648, -1, 0, 1, 2, 7, 64, 2147483647};
  kda_tensor& t = *f.t;
  const int dim = t.ndim > 0 ? static_cast<int>(random.below(std::min(t.ndim, KDA_MAX_NDIM))) : 0;
  switch (random.below(11)) {
    case 0: t.data = nullptr; return true;
    case 1: t.dtype = static_cast<int32_t>(random.below(10)) - 1; return false;
    case 2: t.ndim = static_cast<int32_t>(random.below(8)) - 1; return true;
    case 3: t.shape[dim] = one_of(kShapes, random); return false;
    case 4: t.stride[dim] = one_of(kStrides, random); return false;
    case 5:
      if (t.data) t.data = static_cast<char*>(t.data) + random.below(9) - 4;
      return false;
    case 6: t = {}; return true;
    case 7: t = *all[random.below(static_cast<int64_t>(all.size()))].t; return false;
    case 8: std::swap(t.shape[dim], t.shape[0]), std::swap(t.stride[dim], t.stride[0]); return false;
    case 9: t.data = all[random.below(static_cast<int64_t>(all.size()))].t->data; return false;
    default: break;
  }
  // Changes a value: any value in an integer tensor; in a float tensor, to one that is not a number.
  if (tensor_size(t) == 0 || !t.data || !arena.holds(t) || !dtype_size(t.dtype)) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % dtype_size(t.dtype)) return true;
  const int64_t i = random.below(tensor_size(t));
  const bool integer = t.dtype == KDA_I32 || t.dtype == KDA_I64;
  set(t, i, integer ? static_cast<double>(one_of(kInts, random)) : std::numeric_limits<double>::infinity());
  return integer;
}

void break_exec(kda_exec& e, Random& random) {
  static const char* const kNames[] = {
      "reference", "cpu_chunk", "cpu_recurrent", "cpu_segment",   "cpu_verify", "cpu_flush_verify",
      "cpu_flush", "cpu_gate",  "cpu_conv",      "cpu_norm_gate", "",           "nobody",
      "cpu_"};
  switch (random.below(7)) {
    case 0: e.device = static_cast<int32_t>(random.below(4)) - 1; break;
    case 1: e.device_id = static_cast<int32_t>(random.below(3)) - 1; break;
    case 2: e.workspace = random.chance(0.5) ? nullptr : workspace + 256 + random.below(3) * 64; break;
    case 3: e.workspace_bytes = random.chance(0.5) ? 0 : static_cast<uint64_t>(random.below(kWorkspace / 2)); break;
    case 4: e.num_threads = static_cast<int32_t>(random.below(6)) - 1; break;
    case 5: e.flags = static_cast<uint32_t>(random.below(4)); break;
    default: e.impl = one_of(kNames, random); break;
  }
}

void break_options(kda_inputs& in, Random& random) {
  constexpr float kFloats[] = {0, 1, -1, -5, std::numeric_limits<float>::infinity(), 1e-30f};
  int32_t* const forms[] = {&in.gate_form, &in.beta_form, &in.qk_l2norm, &in.state_layout};
  if (random.chance(0.3)) (random.chance(0.5) ? in.lower_bound : in.scale) = one_of(kFloats, random);
  else *forms[random.below(4)] = static_cast<int32_t>(random.below(5)) - 1;
}
void break_options(kda_states& s, Random& random) {
  (random.chance(0.7) ? s.first_valid_slot : s.reserved) = static_cast<int32_t>(random.below(4)) - 1;
}
template <class Args>
void break_norm(Args& a, Random& random) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kEps[] = {0, 1e-5, 3, -1, -0.0, 1e39, kInf, -kInf, std::numeric_limits<double>::quiet_NaN()};
  if (random.chance(0.5)) a.eps = one_of(kEps, random);
  else if constexpr (requires { a.apply; })
    (random.chance(0.7) ? a.activation : a.apply) = static_cast<int32_t>(random.below(5)) - 1;
  else (random.chance(0.7) ? a.activation : a.reserved) = static_cast<int32_t>(random.below(5)) - 1;
}
template <class Args>
void break_options(Args& a, Random& random) {
  if constexpr (requires { a.in; }) return break_options(a.in, random);
  else if constexpr (requires { a.activation; }) break_norm(a, random);
  else a.gate_form = static_cast<int32_t>(random.below(5)) - 1;
}
void break_options(kda_conv_args& a, Random& random) {
  (random.chance(0.5) ? a.first_valid_slot : a.silu) = static_cast<int32_t>(random.below(4)) - 1;
}
void break_options(kda_conv_backward_args& a, Random& random) {
  (random.chance(0.5) ? a.reserved : a.silu) = static_cast<int32_t>(random.below(4)) - 1;
}
void break_options(kda_backward_args& a, Random& random) {
  if (random.chance(0.3)) a.h_every = static_cast<int32_t>(random.below(4)) - 1;
  else if (random.chance(0.2)) a.h_v_first = !a.h_v_first;
  else break_options(a.in, random);
}
void break_options(kda_verify_args& a, Random& random) {
  random.chance(0.3) ? break_options(a.states, random) : break_options(a.in, random);
}
void break_options(kda_flush_verify_args& a, Random& random) {
  if (random.chance(0.3)) (random.chance(0.7) ? a.max_tokens : a.reserved) = static_cast<int32_t>(random.below(18)) - 1;
  else random.chance(0.3) ? break_options(a.states, random) : break_options(a.in, random);
}
void break_options(kda_segment_merge_args& a, Random& random) {
  (random.chance(0.5) ? a.state_layout : a.reverse) = static_cast<int32_t>(random.below(5)) - 1;
}
template <class Args>
requires requires(Args a) { a.at.cu_seqlens; }
void break_options(Args& a, Random& random) {
  if (random.chance(0.5)) a.at.state_layout = static_cast<int32_t>(random.below(5)) - 1;
  else a.at.scale = random.chance(0.5) ? 0 : std::numeric_limits<float>::infinity();
}
void break_options(kda_prefill_f32_args& a, Random& random) {
  int32_t* const options[] = {&a.chunk, &a.state_layout, &a.reserved};
  *options[random.below(3)] = random.chance(0.3) ? 32 : static_cast<int32_t>(random.below(4)) - 1;
}
void break_options(kda_forward_args& a, Random& random) {
  constexpr int32_t kEvery[] = {-64, 0, 1, 64, 100, 128};
  if (random.chance(0.2)) a.checkpoint_every = one_of(kEvery, random);
  else if (random.chance(0.1)) a.h_every = static_cast<int32_t>(random.below(4)) - 1;
  else if (random.chance(0.1)) a.h_v_first = !a.h_v_first;
  else if (random.chance(0.3)) break_options(a.states, random);
  else break_options(a.in, random);
}

// ---- one call ----

struct Counts {
  int64_t ok = 0, invalid = 0, unsupported = 0, skipped = 0, compared = 0;
} counts;

void compare_with_oracle(const Field& f, const kda_tensor& expected, double least) {
  for (int64_t i = 0; expected.dtype > KDA_F64 && i < tensor_size(expected); ++i)
    if (get_integer(expected, i) != get_integer(*f.t, i)) fail(str(f.name, "[", i, "] differs"));
  if (expected.dtype > KDA_F64) return;
  std::vector<double> ref(tensor_size(expected)), x(ref.size());
  for (size_t i = 0; i < ref.size(); ++i) {
    ref[i] = get(expected, static_cast<int64_t>(i)), x[i] = get(*f.t, static_cast<int64_t>(i));
    if (!std::isfinite(ref[i]) && !std::isnan(ref[i])) return;
    if (std::isnan(ref[i]) != std::isnan(x[i])) fail(str(f.name, "[", i, "]: expected ", ref[i], ", got ", x[i]));
  }
  const test::Error e = compare(ref, x);
  const double budget = std::max(least, f.t->dtype == KDA_F32 || f.t->dtype == KDA_F64 ? 1e-3 : 0.02);
  if (e.relative_rmse > budget && e.max > 1e-4)
    fail(str(f.name, " is off by ", e.relative_rmse, ", at most ", e.max, " at element ", e.worst));
  ++counts.compared;
}

template <class Args>
void break_any_options(Args& a, Random& random) {
  if constexpr (requires { a.norm; })
    if (random.chance(0.2)) return break_norm(a.norm, random);
  break_options(a, random);
}

template <class Args>
void one_call(Random& random) {
  // Room for future headers: what follows args in memory is zero, or not.
  static std::vector<uint64_t> room(65536 / 8 + 8);
  std::memset(room.data(), 0, sizeof(Args) + 256);
  Args& a = *reinterpret_cast<Args*>(room.data());
  a.struct_size = sizeof(Args);
  arena.clear();
  build(a, random_sizes(random), random);
  if constexpr (requires { a.norm; })
    if (random.chance(0.3)) a.norm = random_norm(a.o, random);
  a.exec.num_threads = random.chance(0.97) ? 1 : 2;
  uint64_t bytes = 0;
  if (query(a, &bytes) != KDA_OK) fail(std::string("a legal call was refused: ") + kda_last_error());
  if (bytes > kWorkspace) fail("asks for " + std::to_string(bytes) + " bytes of workspace");
  a.exec.workspace = workspace, a.exec.workspace_bytes = bytes;

  const bool legal = random.chance(0.25);
  bool comparable = true;
  // Saved states belong to the call that saved them. The oracle does not read them, so it would not notice others.
  if constexpr (requires {
                  a.d_o;
                  a.h;
                })
    comparable = legal || a.h.ndim == 0;
  for (int64_t n = legal ? 0 : 1 + random.below(3); n > 0; --n) {
    const std::vector<Field> all = fields(a);
    if (random.chance(0.6)) comparable &= break_tensor(all[random.below(all.size())], all, random);
    else if (random.chance(0.5)) break_exec(a.exec, random);
    else if (random.chance(0.8)) break_any_options(a, random);
    else {
      constexpr uint64_t kSizes[] = {0, 8, sizeof(Args) - 8, sizeof(Args) + 8, sizeof(Args) + 64, 65536, 65537, ~0ull};
      a.struct_size = one_of(kSizes, random);
      if (random.chance(0.5)) room[sizeof(Args) / 8 + random.below(8)] = 1;
    }
  }
  for (const Field& f : fields(a))
    if (!arena.holds(*f.t)) return void(++counts.skipped);
  if (work(a) > kWork) return void(++counts.skipped);

  if (std::getenv("FUZZ_PRINT")) print_call(a);
  const auto expected = comparable ? oracle(a, reference_arena) : std::nullopt;
  const std::vector<Field> all = fields(a);
  before.assign(arena.bytes.begin(), arena.bytes.begin() + arena.used);
  const Args passed = a;
  const char* text = nullptr;
  const kda_status explained = explain(a, &text);
  const kda_status status = call(a);
  if (std::memcmp(&passed, &a, sizeof a)) fail("the args struct was written");
  if (legal && status != KDA_OK) fail(std::string("a legal call was refused: ") + kda_last_error());
  if (status == KDA_OK) {
    ++counts.ok;
    if (explained != KDA_OK || !text || !*text) fail("runs but is not explained");
    if (!expected && comparable) fail("the oracle refuses it");
    size_t i = 0;
    double rounding = 0;  // a state in 16 bits may be rounded up here and down there
    if constexpr (kReadsRounded<Args>) rounding = a.states.h0.dtype == KDA_BF16 ? 0.02 : 0;
    if constexpr (requires { a.conv; })  // and so may the convolved rows
      if (dtype_size(a.conv.x.dtype) == 2) rounding = 0.05;
    for (const Field& f : all) {
      if (!f.output || f.t->ndim == 0) continue;
      if (expected) compare_with_oracle(f, (*expected)[i], rounding);
      ++i;
      for (int64_t j = 0; j < tensor_size(*f.t); ++j) {  // what the call may write
        char* p = element(*f.t, j);
        std::memcpy(before.data() + (p - arena.bytes.data()), p, dtype_size(f.t->dtype));
      }
    }
  } else {
    (status == KDA_UNSUPPORTED ? counts.unsupported : counts.invalid) += 1;
    if (status != KDA_INVALID_ARGUMENT && status != KDA_UNSUPPORTED)
      fail(std::string(kda_status_name(status)) + ": " + kda_last_error());
    if (!*kda_last_error()) fail("refused without a sentence");
  }
  if (std::memcmp(before.data(), arena.bytes.data(), before.size())) {
    int64_t at = 0;
    while (before[at] == arena.bytes[at]) ++at;
    std::string where = "between tensors";
    for (const Field& f : all)
      if (f.t->ndim > 0 && arena.bytes.data() + at >= static_cast<char*>(f.t->data))
        where = std::string("after ") + f.name;
    fail("wrote where it may not, " + where + "; status " + kda_status_name(status));
  }
}

constexpr void (*kOperators[])(Random&) = {
    one_call<kda_forward_args>,
    one_call<kda_backward_args>,
    one_call<kda_decode_args>,
    one_call<kda_verify_args>,
    one_call<kda_flush_args>,
    one_call<kda_flush_verify_args>,
    one_call<kda_gate_args>,
    one_call<kda_segment_map_args>,
    one_call<kda_segment_merge_args>,
    one_call<kda_gate_backward_args>,
    one_call<kda_stage_cumsum_args>,
    one_call<kda_stage_chunk_intra_args>,
    one_call<kda_stage_recompute_w_u_args>,
    one_call<kda_stage_delta_h_args>,
    one_call<kda_stage_fwd_o_args>,
    one_call<kda_stage_bwd_local_args>,
    one_call<kda_stage_bwd_delta_h_args>,
    one_call<kda_stage_bwd_wy_dqkg_args>,
    one_call<kda_stage_bwd_intra_args>,
    one_call<kda_stage_cumsum_backward_args>,
    one_call<kda_prefill_f32_args>,
    one_call<kda_conv_args>,
    one_call<kda_conv_backward_args>,
    one_call<kda_norm_gate_args>,
    one_call<kda_norm_gate_backward_args>,
};

int main_(int argc, char** argv) {
  const int64_t calls = argc > 1 ? std::atoll(argv[1]) : 100000, seed = argc > 2 ? seed_of(argv[2]) : 1;
  const int64_t first = argc > 3 ? std::atoll(argv[3]) : 0;
  std::memset(workspace, 0xff, sizeof workspace);
  for (int64_t i = first; i < first + calls; ++i) {
    Random random(static_cast<uint64_t>(seed) << 40 ^ static_cast<uint64_t>(i));
    random.bits();
    try {
      kOperators[i % std::size(kOperators)](random);
    } catch (const Failure& f) {
      std::printf("call %lld: %s\nrepeat with: fuzz 1 %lld %lld\n", static_cast<long long>(i), f.what.c_str(),
                  static_cast<long long>(seed), static_cast<long long>(i));
      return 1;
    }
  }
  std::printf("%lld calls: %lld ok, %lld invalid, %lld unsupported, %lld not made; %lld outputs compared\n",
              static_cast<long long>(calls), static_cast<long long>(counts.ok), static_cast<long long>(counts.invalid),
              static_cast<long long>(counts.unsupported), static_cast<long long>(counts.skipped),
              static_cast<long long>(counts.compared));
  // A fuzzer whose calls all end the same way tests nothing.
  const bool varied = counts.ok > calls / 5 && counts.invalid > calls / 5 && counts.compared > calls / 4;
  return calls < 1000 || varied ? 0 : 1;
}

}  // namespace
}  // namespace kda::test

int main(int argc, char** argv) { return kda::test::main_(argc, argv); }
