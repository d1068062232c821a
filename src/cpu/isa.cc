#include "cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cpu/cpu.h"

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
  const char* wanted = std::getenv("KDA_CPU_ISA");
  for (int i = 0; wanted && i < 4; ++i)
    if (std::string_view(wanted) == kNames[i]) return std::min(best, static_cast<Isa>(i));
  return best;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
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
