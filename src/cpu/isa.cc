#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <string_view>

#include "cpu/cpu.h"
#include "environment.h"
#include "error.h"

namespace kda::cpu {
namespace {

constexpr const char* kNames[] = {"baseline", "sse4", "avx2", "avx512"};

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return Isa::kAvx2;
  if (__builtin_cpu_supports("sse4.2")) return Isa::kSse4;
#endif
  return Isa::kBaseline;
}

Isa choose() {
  const Isa best = detect();
  const std::string& wanted = environment().cpu_isa;
  if (wanted.empty()) return best;
  for (int i = 0; i < 4; ++i)
    if (wanted == kNames[i]) return std::min(best, static_cast<Isa>(i));
  invalid("KDA_CPU_ISA: expected one of avx512, avx2, sse4, baseline, got ", printable(wanted));
}

constexpr int kUnknown = -1;

}  // namespace

// Not a static local: a process that is forked while it is being set would wait for its guard forever. Two threads
// that both come first find the same value.
Isa isa() {
  static std::atomic<int> chosen{kUnknown};
  int known = chosen.load(std::memory_order_relaxed);
  if (known == kUnknown) chosen.store(known = static_cast<int>(choose()), std::memory_order_relaxed);
  return static_cast<Isa>(known);
}

const char* isa_name() { return kNames[static_cast<int>(isa())]; }

const char* isa_names() {
#if defined(__x86_64__)
  return "avx512, avx2, sse4, baseline";
#else
  return "baseline";
#endif
}

}  // namespace kda::cpu
