#include "global_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace kda::emulator {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

// The sanitizer's own allocator knows each byte.
void* allocate(size_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, 256, bytes) ? nullptr : memory;
}
void release(void* memory) { std::free(memory); }

#else

namespace {

constexpr size_t kPage = 4096, kBeside = size_t{1} << 30;  // addresses before and behind that nobody may use

std::mutex one_at_a_time;
std::map<void*, size_t> allocations;  // bytes of all addresses of each

}  // namespace

void* allocate(size_t bytes) {
  const size_t pages = (bytes + kPage - 1) / kPage * kPage + kPage, all = pages + 2 * kBeside;
  void* addresses = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) return nullptr;
  char* memory = static_cast<char*>(addresses) + kBeside;
  if (mprotect(memory, pages, PROT_READ | PROT_WRITE)) {
    munmap(addresses, all);
    return nullptr;
  }
  const std::lock_guard lock(one_at_a_time);
  allocations.emplace(memory, all);
  return memory;
}

void release(void* memory) {
  const std::lock_guard lock(one_at_a_time);
  const auto found = allocations.find(memory);
  if (found == allocations.end()) return;
  munmap(static_cast<char*>(memory) - kBeside, found->second);
  allocations.erase(found);
}

#endif

}  // namespace kda::emulator
