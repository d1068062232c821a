#include "global_memory.h"

#include <sys/mman.h>

#include <algorithm>
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
