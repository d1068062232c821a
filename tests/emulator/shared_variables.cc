#include "shared_memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace kda::cuda {

KDA_EMULATED_SHARED_MEMORY

namespace recurrent {

KDA_EMULATED_SHARED_MEMORY

}  // namespace recurrent
namespace stages {

KDA_EMULATED_SHARED_MEMORY

}  // namespace stages
}  // namespace kda::cuda

namespace kda::emulator {
namespace {

std::vector<char* (*)()>& all() {
  static std::vector<char* (*)()> variables;
  return variables;
}

}  // namespace

SharedVariable::SharedVariable(char* (*of_thread)()) { all().push_back(of_thread); }

const std::vector<char* (*)()>& shared_variables() { return all(); }

void close_shared_variables_behind([[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  for (const auto& variable : all()) {
    __asan_unpoison_memory_region(variable(), kMostShared);
    __asan_poison_memory_region(variable() + bytes, kMostShared - bytes);
  }
#endif
}

}  // namespace kda::emulator
