// In place of src/cpu/isa.h where kernels are compiled for one instruction set only, HWY_COMPILE_ONLY_STATIC: by the
// mutants and for sanitizers.
#pragma once

namespace kda::cpu {
enum class Isa { kBaseline, kSse4, kAvx2, kAvx512 };
Isa isa();
}  // namespace kda::cpu

#define KDA_ISA_CALL(function) (&HWY_STATIC_DISPATCH(function))
