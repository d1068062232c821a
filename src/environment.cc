#include "environment.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string_view>

namespace kda {
namespace {

// One that has been read. Those before stay, since a call may still look at them.
struct Known {
  Environment environment;
  std::unique_ptr<const Known> before;
};
std::atomic<const Known*> newest{nullptr};

std::string text_of(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

}  // namespace

// Two threads that both come first find the same. No static local: a process that is forked while it is being set
// would wait for its guard forever.
void read_environment() {
  auto* known = new Known{{.impl = text_of("KDA_IMPL"),
                           .cpu_isa = text_of("KDA_CPU_ISA"),
                           .blackwell = text_of("KDA_BLACKWELL") == "1",
                           .force_ptx = text_of("CUDA_FORCE_PTX_JIT") == "1"},
                          nullptr};
  known->before.reset(newest.exchange(known, std::memory_order_acq_rel));
}

const Environment& environment() {
  if (!newest.load(std::memory_order_acquire)) read_environment();
  return newest.load(std::memory_order_acquire)->environment;
}

}  // namespace kda
