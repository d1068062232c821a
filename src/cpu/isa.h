// Instruction sets. Highway compiles every kernel file once for each of them, and the best one that the machine has
// is chosen at run time.
#pragma once

namespace kda::cpu {

enum class Isa { kBaseline, kSse4, kAvx2, kAvx512 };

// Returns the best instruction set that this machine runs. The environment variable KDA_CPU_ISA (baseline, sse4,
// avx2, avx512) can lower it. Any other name there is refused (KDA_INVALID_ARGUMENT).
Isa isa();

}  // namespace kda::cpu

// Calls the variant of `function` (defined in every target's namespace) for the machine at hand.
// Works only where all targets have been compiled: inside #if HWY_ONCE.
#if defined(__x86_64__)
#define KDA_ISA_CALL(function)                                       \
  (::kda::cpu::isa() == ::kda::cpu::Isa::kAvx512 ? &N_AVX3::function \
   : ::kda::cpu::isa() == ::kda::cpu::Isa::kAvx2 ? &N_AVX2::function \
   : ::kda::cpu::isa() == ::kda::cpu::Isa::kSse4 ? &N_SSE4::function \
                                                 : &HWY_STATIC_DISPATCH(function))
#else
#define KDA_ISA_CALL(function) (&HWY_STATIC_DISPATCH(function))
#endif
