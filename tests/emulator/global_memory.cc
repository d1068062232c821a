#include "global_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace kda::emulator {

#if defined(__SANITIZE_ADDRESS__)

// The sanitizer's allocator knows each byte.
void* allocate(size_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, 256, bytes) ? nullptr : memory;
}
bool release(void* memory) {
  std::free(memory);
  return true;
}

#else

namespace {

constexpr size_t kPage = 4096, kMost = size_t{1} << 40;
constexpr size_t kBeside = size_t{1} << 30;  // addresses before and behind that nobody may use

std::mutex one_at_a_time;
std::map<void*, size_t> allocations;  // bytes of all addresses of each

// An access to addresses that nobody may use ends the program. This says so as gtest says what failed: whoever reads
// the output can tell it from a program that was killed for another reason.
void report_access(int, siginfo_t* info, void*) {
  const char* const at = static_cast<const char*>(info->si_addr);
  for (const auto& [memory, all] : allocations) {
    const char* const begin = static_cast<const char*>(memory);
    const auto size = static_cast<std::ptrdiff_t>(all - 2 * kBeside), place = at - begin;
    if (place < -static_cast<std::ptrdiff_t>(kBeside) || place >= size + static_cast<std::ptrdiff_t>(kBeside)) continue;
    char text[160];
    const int length =
        std::snprintf(text, sizeof text, "\nglobal memory: Failure\naccess at byte %td of %td\n", place, size);
    if (write(STDOUT_FILENO, text, static_cast<size_t>(length))) _exit(1);
  }
  signal(SIGSEGV, SIG_DFL);  // not ours: the access is repeated, and ends the program
}

void watch_accesses() {
  alignas(16) static char stack[64 << 10];  // a fiber's own may be what overflows
  const stack_t other{.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof stack};
  sigaltstack(&other, nullptr);
  struct sigaction action {};
  action.sa_sigaction = report_access;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace

void* allocate(size_t bytes) {
  if (bytes > kMost) return nullptr;
  const size_t pages = std::max((bytes + kPage - 1) / kPage, size_t{1}) * kPage, all = pages + 2 * kBeside;
  void* addresses = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) return nullptr;
  char* memory = static_cast<char*>(addresses) + kBeside;
  if (mprotect(memory, pages, PROT_READ | PROT_WRITE)) {
    munmap(addresses, all);
    return nullptr;
  }
  const std::lock_guard lock(one_at_a_time);
  if (allocations.empty()) watch_accesses();
  allocations.emplace(memory, all);
  return memory;
}

bool release(void* memory) {
  if (!memory) return true;
  const std::lock_guard lock(one_at_a_time);
  const auto found = allocations.find(memory);
  if (found == allocations.end()) return false;
  munmap(static_cast<char*>(memory) - kBeside, found->second);
  allocations.erase(found);
  return true;
}

#endif

}  // namespace kda::emulator
