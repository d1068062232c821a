// What the environment asks for. It is read once: getenv() in every call would race with a thread that sets a variable.
#pragma once
#include <string>

namespace kda {

struct Environment {
  std::string impl;        // KDA_IMPL: names of implementations to force, separated by commas
  std::string cpu_isa;     // KDA_CPU_ISA: the instruction set of CPU kernels
  bool blackwell = false;  // KDA_BLACKWELL=1: kernels that have only been emulated are preferred
  bool force_ptx = false;  // CUDA_FORCE_PTX_JIT=1: CUDA runs nothing but what it makes from PTX
};

// As the first call of the process found it, or the last read_environment().
const Environment& environment();
void read_environment();

}  // namespace kda
