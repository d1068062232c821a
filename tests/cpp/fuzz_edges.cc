// Seeded calls of all operators at the edges: numbers at the ends of their range, thread counts that make no sense,
// small stacks, forks, memory that overlaps.
//   fuzz_edges [calls] [seed] [first] [cpu|cuda] [seconds]      a failure prints the arguments that repeat it
//   fuzz_edges [calls] today                                    another seed each day, which is printed
//   KDA_FUZZ_IMPL=cuda_prefill_chunk ...      only calls that this implementation takes, most in tensor cores' sizes
// The results of a call are compared with the float64 oracle, and bit by bit with those of the same call made
// elsewhere. On CUDA all tensors are copied to the device and back.
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "fuzz_gradients.h"
#include "fuzz_places.h"
#ifdef KDA_FUZZ_CUDA
#include "fuzz_cuda.h"
#endif

namespace kda::test {
namespace {

constexpr int64_t kRoom = 16 << 20;  // of the arena: four states of 7 slots, 2 heads, K = V = 256, and the rest
constexpr int64_t kOracleRoom = 64 << 20;
const char* const wanted = std::getenv("KDA_FUZZ_IMPL");  // or nullptr: any implementation
const int64_t most_work = wanted ? 9600000 : 1200000;     // B T HV K V of a call
constexpr uint64_t kMostScratch =
    1 << 28;  // bytes of workspace that no call of this size may need, with any number of threads

Arena reference_arena(kOracleRoom), moved_arena(kOracleRoom), nudged_arena(kOracleRoom);
std::vector<char> scratch;
bool on_cuda = false;

struct Counts {
  int64_t calls = 0, compared = 0, beyond = 0, refused = 0, elsewhere = 0;
} counts;

using Bytes = std::vector<char>;
Bytes arena_bytes() { return {arena.bytes.begin(), arena.bytes.begin() + arena.used}; }
void restore(const Bytes& bytes) { std::memcpy(arena.bytes.data(), bytes.data(), bytes.size()); }

// ---- making calls ----

Sizes edge_sizes(Random& random) {
  Sizes s = random_sizes(random);
  if (s.K == 1) s.l2norm = false;  // of a single number the norm leaves nothing but rounding
  if (!random.chance(wanted ? 0.95 : on_cuda ? 0.7 : 0.1)) return s;
  constexpr int64_t kTokens[] = {1, 8, 31, 64, 65, 130}, kHead[] = {64, 128, 128, 256};
  s.packed = random.chance(0.4), s.B = 1 + (!s.packed && random.chance(0.3)), s.N = s.B, s.cu.clear();
  s.T = kTokens[random.below(std::size(kTokens))], s.H = 1, s.HV = 1 + random.below(2);
  if (wanted && std::strstr(wanted, "segments") && random.chance(0.3)) s.T = 290;  // three of them
  s.K = s.V = kHead[random.below(std::size(kHead))];
  if (random.chance(0.5)) s.dtype = KDA_BF16;
  while (s.B * s.T * s.HV * s.K * s.V > most_work) s.T = s.T / 2, s.B = 1, s.N = 1;
  if (!s.packed) return s;
  s.N = 1 + random.below(4), s.cu = {0};
  for (int64_t n = 0; n < s.N; ++n) s.cu.push_back(s.cu.back() + random.below(s.T - s.cu.back() + 1));
  return s;
}

// Kernels in chunks write o in the dtype of q, and save no scores. Keys have a length of 1 at most, so that states do
// not grow.
void suit_wanted(kda_forward_args& a, const Sizes& s, Random& random) {
  if (!a.in.qk_l2norm) scale_all(a.in.k, 1 / std::sqrt(0.09 * static_cast<double>(s.K)));
  a.o = arena.take(s.dtype, {s.B, s.T, s.HV, s.V}, random);
  if (random.chance(0.9)) a.Aqk = a.Akk = {};
}
template <class Args>
void suit_wanted(Args&, const Sizes&, Random&) {}

// Makes a legal call. Returns false if it found none that the implementation takes that is wanted.
template <class Args>
bool make_legal(Args& a, Random& random) {
  constexpr int kTries = 40;
  for (int i = 0; i < (wanted ? kTries : 1); ++i) {
    a = {}, a.struct_size = sizeof a;
    arena.clear();
    arena.alignment = on_cuda && random.chance(0.8) ? 16 : 1;
    const Sizes s = edge_sizes(random);
    build(a, s, random);
    if (wanted) suit_wanted(a, s, random);
    if (work(a) > most_work) continue;
    a.exec.device = on_cuda ? KDA_CUDA : KDA_CPU, a.exec.num_threads = 1, a.exec.impl = wanted;
    uint64_t bytes = 0;
    if (!wanted || query(a, &bytes) == KDA_OK) return true;
  }
  return false;
}

// Runs forward again, so that the saved states belong to the inputs as they are now.
void save_again(kda_backward_args& a) {
  if (!a.h.ndim) return;
  kda_forward_args f = KDA_FORWARD_ARGS_INIT;
  f.exec.impl = "reference";
  f.in = a.in, f.states.h0 = a.h0, f.h = a.h, f.h_every = a.h_every, f.h_v_first = a.h_v_first;
  Random dense(0);
  f.o = arena.take(KDA_F32, {a.in.v.shape, a.in.v.shape + 4}, dense);
  if (kda_forward(&f) != KDA_OK) fail(std::string("a legal call was refused: ") + kda_last_error());
}
template <class Args>
void save_again(Args&) {}

// Returns a random one of the implementations that take the call; nullptr leaves the choice to the library.
template <class Args>
const char* some_implementation(Args a, Random& random) {
  if (wanted) return wanted;
  std::vector<const char*> takers{nullptr};
  for (int32_t i = 0; const char* name = kda_implementation(op_name<Args>(), i); ++i) {
    if (!std::string(name).starts_with(on_cuda ? "cuda_" : "cpu_")) continue;
    a.exec.impl = name;
    uint64_t bytes = 0;
    const kda_status status = query(a, &bytes);
    if (status == KDA_OK) takers.push_back(name);
    else if (status != KDA_UNSUPPORTED) fail(str("a legal call was refused: ", kda_last_error()));
  }
  return takers[random.below(std::ssize(takers))];
}

// An implementation that alone is tested may decline some strides: then they stay as they were.
template <class Args>
void move_strides_that_are_taken(Args& a, const Random& random) {
  Args moved = a;
  move_strides(moved, random);
  if (wanted) {
    moved.exec.impl = wanted;
    uint64_t bytes = 0;
    if (query(moved, &bytes) == KDA_UNSUPPORTED) return;
  }
  a = moved;
}

// Runs the call with a poisoned workspace of its own.
template <class Args>
kda_status run(Args a) {
  uint64_t bytes = 0;
  if (const kda_status status = query(a, &bytes); status != KDA_OK) return status;
  if (bytes > kMostScratch) fail(str("asks for ", bytes, " bytes of workspace with ", a.exec.num_threads, " threads"));
#ifdef KDA_FUZZ_CUDA
  if (on_cuda) return run_on_cuda(a, arena, bytes);
#endif
  if (scratch.size() < bytes + 256) scratch.resize(bytes + 256);
  std::memset(scratch.data(), 0xff, bytes + 256);
  char* begin = scratch.data() + (256 - reinterpret_cast<uintptr_t>(scratch.data()) % 256);
  a.exec.workspace = bytes ? begin : nullptr, a.exec.workspace_bytes = bytes;
  return call(a);
}

// ---- what is expected ----

template <class Args>
Promise promise(Args& a) {
  // docs/numerics.md: o and states on CUDA, where the operands of tensor cores have 11 bits; on the CPU float32
  // throughout.
  Promise p = on_cuda ? Promise{5e-3, 0x1p10, 0, 0.01} : Promise{1e-4, 16, 0};
  if constexpr (kReadsRounded<Args>)  // a state in 16 bits may be rounded up here and down there
    if (a.states.h0.dtype == KDA_BF16) p.gate = 0.02;
  if constexpr (requires { a.conv; })  // and so may the convolved rows
    if (dtype_size(a.conv.x.dtype) == 2) p.gate = 0.05;
  // The gates of gradients, and of sums that may cancel.
  if constexpr (std::is_same_v<Args, kda_backward_args> || std::is_same_v<Args, kda_segment_map_args>)
    if (on_cuda) p.gate = 0.03;
  // docs/kernels/cuda_stages.md: stages of tensors in bf16 have operands in bf16, of 8 bits.
  if constexpr (std::is_same_v<Args, kda_stage_chunk_intra_args>)
    if (on_cuda && a.k.dtype == KDA_BF16 && a.v.dtype == KDA_BF16) p.noise = 0x1p12;
  // On CUDA decays are factors of operands in f16, where less than 2^-24 is 0.
  p.underflow = (on_cuda ? 0x1p-20 : 1000 * FLT_MIN) * largest_factor(a);
  return p;
}

template <class Args>
void expect_oracle(Args& a, const std::vector<kda_tensor>& expected, const std::vector<kda_tensor>& moved,
                   const Promise& p, Tainted tainted) {
  std::vector<Field> outputs = fields(a);
  std::erase_if(outputs, [](const Field& f) { return !f.output || f.t->ndim == 0; });
  Noise noise = cancelled(a, outputs, expected, nudged_arena);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Field& f = outputs[i];
    const kda_tensor &ref = expected[i], &other = moved[i];
    if (tensor_size(ref) == 0) continue;
    if (ref.dtype <= KDA_F64) {
      expect_near(f, ref, other, head_dim(a, f), p, tainted, noise[f.name]);
      ++counts.compared;
      continue;
    }
    for (int64_t j = 0; j < tensor_size(ref); ++j)
      if (get_integer(ref, j) != get_integer(*f.t, j)) fail(str(f.name, "[", j, "] differs"));
  }
}

template <class Args>
void expect_only_outputs_written(Args& a, Bytes before) {
  for (const Field& f : fields(a))
    for (int64_t j = 0; f.output && j < tensor_size(*f.t); ++j) {
      const char* p = element(*f.t, j);
      std::memcpy(before.data() + (p - arena.bytes.data()), p, dtype_size(f.t->dtype));
    }
  if (before != arena_bytes()) fail("wrote where it may not");
}

// ---- elsewhere ----

// Expects the same bits wherever the call is made, and with any number of threads.
template <class Args>
void expect_same_elsewhere(Args a, const Bytes& before, const Bytes& after, Random& random) {
  constexpr int32_t kThreads[] = {0, 1, 2, 3, 17, 1000, 40000};
  const auto again = [&] {
    restore(before);
    return run(a) == KDA_OK && after == arena_bytes();
  };
  bool same = true;
  std::string where = "again";
  const double place = random.uniform();
  if (on_cuda) same = again();
  else if (place < 0.25) {
    a.exec.num_threads = kThreads[random.below(std::size(kThreads))];
    where = str("with ", a.exec.num_threads, " threads"), same = again();
  } else if (place < 0.5 && has_small_stacks()) {
    where = "in a thread of 64 KiB";
    if (!in_small_stack([&] { same = again(); })) fail("no thread could be started");
  } else if (place < 0.55) {
    a.exec.num_threads = static_cast<int32_t>(random.below(3));
    where = str("in a child with ", a.exec.num_threads, " threads"), same = in_child(again);
  } else {
    return;
  }
  ++counts.elsewhere;
  if (!same) fail("gives other bits " + where);
}

// ---- overlapping memory ----

bool may_be_one(const std::string& a, const std::string& b) {
  const auto both = [&](const char* x, const char* y) { return (a == x && b == y) || (a == y && b == x); };
  return a == b || both("h0", "hT") || both("initial_state", "final_state") || both("h0", "snapshots");
}

// Expects that an output or a workspace that begins where another tensor does is refused, and that nothing is
// written.
template <class Args>
void expect_overlap_refused(Args a, Random& random) {
  std::vector<Field> all = fields(a);
  std::erase_if(all, [](const Field& f) { return tensor_size(*f.t) == 0; });
  if (all.size() < 2) return;
  const Field &f = all[random.below(std::ssize(all))], &other = all[random.below(std::ssize(all))];
  std::string what = str(f.name, " at the place of ", other.name);
  uint64_t bytes = 0;
  if (query(a, &bytes) != KDA_OK) fail(std::string("a legal call was refused: ") + kda_last_error());
  char* place = static_cast<char*>(f.t->data);
  if (bytes && random.chance(0.5)) {
    place += (256 - reinterpret_cast<uintptr_t>(place) % 256) % 256;
    const int64_t at = place - arena.bytes.data();
    const char* last = element(*f.t, tensor_size(*f.t) - 1);
    if (place > last || at + static_cast<int64_t>(bytes) > std::ssize(arena.bytes)) return;
    a.exec.workspace = place, what = str("the workspace over ", f.name);
  } else {
    if (!f.output || may_be_one(f.name, other.name)) return;
    if (std::is_same_v<Args, kda_norm_gate_args> && std::strcmp(other.name, "weight")) return;  // y in place
    if (reinterpret_cast<uintptr_t>(other.t->data) % dtype_size(f.t->dtype)) return;
    f.t->data = other.t->data;
    if (!arena.holds(*f.t)) return;
    if (scratch.size() < bytes + 256) scratch.resize(bytes + 256);
    a.exec.workspace = scratch.data() + (256 - reinterpret_cast<uintptr_t>(scratch.data()) % 256);
  }
  a.exec.workspace_bytes = bytes;
  const Bytes before{arena.bytes};
  if (call(a) != KDA_INVALID_ARGUMENT) fail("takes " + what);
  if (before != arena.bytes) fail("refuses " + what + ", but writes");
  ++counts.refused;
}

// ---- one call ----

template <class Args>
void one_call(Random& random) {
  Args a{};
  if (!make_legal(a, random)) return;
  // Backward's products on tensor cores have f32's range, as docs/kernels/cuda_backward.md tells: factors stay small.
  const bool bounded = on_cuda && std::is_same_v<Args, kda_backward_args>;
  const std::string spoiled = random.chance(0.9) ? spoil_some(a, random, bounded) : "nothing";
  move_strides_that_are_taken(a, random);
  save_again(a);  // what inputs are is known only now: an input turned around is another one
  a.exec.impl = some_implementation(a, random);
  if (std::getenv("FUZZ_PRINT")) print_call(a), print_values(a), std::printf("spoiled: %s\n", spoiled.c_str());
  if (!on_cuda && random.chance(0.15)) return expect_overlap_refused(a, random);

  ++counts.calls;
  const auto expected = oracle(a, reference_arena);
  if (!expected) fail(std::string("the oracle refuses it: ") + kda_last_error());
  const Bytes before = arena_bytes();
  const Promise p = promise(a);
  const Tainted tainted = tainted_by(a);
  const bool is_beyond =
      largest_factor(a) > kMostFactor || has_subnormals_and_infinities(a) || has_queries_beyond_f16(a);
  const kda_status status = run(a);
  if (status == KDA_UNSUPPORTED && !a.exec.impl && on_cuda) return;
  if (status != KDA_OK) fail(str(kda_status_name(status), ": ", kda_last_error()));
  const Bytes after = arena_bytes();
  expect_only_outputs_written(a, before);
  if (is_beyond) {
    ++counts.beyond;
  } else {
    restore(before);  // what is written in place is an input
    const auto moved = oracle(nudged(a, nudged_arena, random), moved_arena);
    restore(after);
    if (!moved) fail(std::string("the oracle refuses it in float64: ") + kda_last_error());
    expect_oracle(a, *expected, *moved, p, tainted);
  }
  expect_same_elsewhere(a, before, after, random);
}

struct Operator {
  void (*run)(Random&);
  const char* name;
};
template <class Args>
constexpr Operator operator_of() {
  return {one_call<Args>, op_name<Args>()};
}
constexpr Operator kOperators[] = {
    operator_of<kda_forward_args>(),
    operator_of<kda_backward_args>(),
    operator_of<kda_decode_args>(),
    operator_of<kda_verify_args>(),
    operator_of<kda_flush_args>(),
    operator_of<kda_flush_verify_args>(),
    operator_of<kda_gate_args>(),
    operator_of<kda_gate_backward_args>(),
    operator_of<kda_segment_map_args>(),
    operator_of<kda_segment_merge_args>(),
    operator_of<kda_stage_cumsum_args>(),
    operator_of<kda_stage_chunk_intra_args>(),
    operator_of<kda_stage_recompute_w_u_args>(),
    operator_of<kda_stage_delta_h_args>(),
    operator_of<kda_stage_fwd_o_args>(),
    operator_of<kda_stage_bwd_local_args>(),
    operator_of<kda_stage_bwd_delta_h_args>(),
    operator_of<kda_stage_bwd_wy_dqkg_args>(),
    operator_of<kda_stage_bwd_intra_args>(),
    operator_of<kda_stage_cumsum_backward_args>(),
    operator_of<kda_prefill_f32_args>(),
    operator_of<kda_conv_args>(),
    operator_of<kda_conv_backward_args>(),
};

constexpr Operator kNorm = operator_of<kda_norm_gate_args>(),
                   kNormBackward = operator_of<kda_norm_gate_backward_args>();

const Operator& operator_with(const char* impl) {
  const auto has = [&](const Operator& op) {
    for (int32_t i = 0; const char* name = kda_implementation(op.name, i); ++i)
      if (!std::strcmp(name, impl)) return true;
    return false;
  };
  for (const Operator& op : kOperators)
    if (has(op)) return op;
  if (has(kNorm)) return kNorm;
  if (!has(kNormBackward)) std::printf("no implementation is called %s\n", impl), std::exit(1);
  return kNormBackward;
}

// Norms make every other call of gates. So the calls of all others keep their numbers, by which pages name them.
const Operator& operator_of_call(int64_t i) {
  constexpr int64_t kCount = std::size(kOperators);
  if (wanted) return operator_with(wanted);
  const Operator& op = kOperators[i % kCount];
  if (i / kCount % 2 == 0) return op;
  return !std::strcmp(op.name, "gate") ? kNorm : !std::strcmp(op.name, "gate_backward") ? kNormBackward : op;
}

bool runs_here(const char* op) {
  for (int32_t i = 0; const char* name = kda_implementation(op, i); ++i)
    if (std::string(name).starts_with(on_cuda ? "cuda_" : "cpu_")) return true;
  return false;
}

// Makes call i and returns whether all holds. FUZZ_ALL=1 goes on after a failure.
bool make_call(int64_t i, int64_t seed) {
  const Operator& op = operator_of_call(i);
  if (!runs_here(op.name)) return true;
  std::snprintf(how_to_repeat, sizeof how_to_repeat, "repeat with: %s%s fuzz_edges 1 %lld %lld %s\n",
                wanted ? "KDA_FUZZ_IMPL=" : "", wanted ? wanted : "", static_cast<long long>(seed),
                static_cast<long long>(i), on_cuda ? "cuda" : "cpu");
  Random random(static_cast<uint64_t>(seed) << 40 ^ static_cast<uint64_t>(i));
  random.bits();
  alarm(kPatience);
  try {
    op.run(random);
  } catch (const Failure& f) {
    std::printf("call %lld, %s: %s\n%s", static_cast<long long>(i), op.name, f.what.c_str(), how_to_repeat);
    return false;
  }
  return true;
}

int main_(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const auto argument = [&](int i, int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  const int64_t calls = argument(1, 5000), first = argument(3, 0), seconds = argument(5, 3600);
  const int64_t seed = argc > 2 ? seed_of(argv[2]) : 1;
  on_cuda = argc > 4 && !std::strcmp(argv[4], "cuda");
#ifndef KDA_FUZZ_CUDA
  if (on_cuda) return std::puts("this build has no CUDA"), 1;
#endif
  arena = Arena(kRoom);
  catch_signals();
  const auto start = std::chrono::steady_clock::now();
  int64_t i = first, failed = 0;
  for (; i < first + calls && std::chrono::steady_clock::now() - start < std::chrono::seconds(seconds); ++i) {
    failed += !make_call(i, seed);
    if (failed && !std::getenv("FUZZ_ALL")) return 1;
  }
  std::printf(
      "%lld calls: %lld made, %lld outputs compared, %lld calls beyond float32, %lld refused, %lld made elsewhere, "
      "%lld failed\n",
      static_cast<long long>(i - first), static_cast<long long>(counts.calls), static_cast<long long>(counts.compared),
      static_cast<long long>(counts.beyond), static_cast<long long>(counts.refused),
      static_cast<long long>(counts.elsewhere), static_cast<long long>(failed));
  // A fuzzer that compares little tests little.
  const bool telling = counts.compared > counts.calls / 2 && counts.elsewhere > counts.calls / 4;
  const bool made = !wanted || counts.calls > (i - first) / 2;
  return failed || !made || (i - first >= 1000 && !telling);
}

}  // namespace
}  // namespace kda::test

int main(int argc, char** argv) { return kda::test::main_(argc, argv); }
