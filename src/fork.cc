#include "fork.h"

#include <pthread.h>

#include <atomic>

namespace kda {
namespace {

std::atomic<bool> in_child{false};

// Registration fails only without memory. Forks then go unnoticed.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { in_child.store(true, std::memory_order_relaxed); });

}  // namespace

bool forked() { return in_child.load(std::memory_order_relaxed); }

}  // namespace kda
