// Where a call may run: in a thread with a small stack, in a forked child. A call that crashes or hangs says how to
// repeat it.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>

#if defined(__has_feature)
#define KDA_HAS_FEATURE(x) __has_feature(x)
#else
#define KDA_HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || KDA_HAS_FEATURE(address_sanitizer) || \
    KDA_HAS_FEATURE(thread_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define KDA_FUZZ_SANITIZED 1
#endif

namespace kda::test {

constexpr unsigned kPatience = 60, kPatienceWithChild = 10;  // seconds for a call

// Written when the process ends in the middle of a call.
inline char how_to_repeat[256];

inline void say_how_to_repeat() {
  [[maybe_unused]] const ssize_t n = write(STDOUT_FILENO, how_to_repeat, std::strlen(how_to_repeat));
}

// Gives signals a stack of their own in this thread. Two threads may have one at a time.
inline void own_signal_stack(int which) {
#ifdef KDA_FUZZ_SANITIZED
  static_cast<void>(which);
#else
  static char memory[2][16384];
  const stack_t stack{memory[which], 0, sizeof memory[which]};
  sigaltstack(&stack, nullptr);
#endif
}

inline void catch_signals() {
  own_signal_stack(0);
#ifdef KDA_FUZZ_SANITIZED
  __sanitizer_set_death_callback(say_how_to_repeat);
  const int caught[] = {SIGALRM};
#else
  const int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};
#endif
  struct sigaction action {};
  action.sa_flags = SA_ONSTACK;
  action.sa_handler = [](int signal) {
    const char* what = signal == SIGALRM ? "hangs\n" : "crashed\n";
    [[maybe_unused]] const ssize_t n = write(STDOUT_FILENO, what, std::strlen(what));
    say_how_to_repeat();
    _exit(1);
  };
  for (const int signal : caught) sigaction(signal, &action, nullptr);
}

// Whether threads may have small stacks. Sanitizers' frames are larger, and so is what they keep for a thread.
inline bool has_small_stacks() {
#ifdef KDA_FUZZ_SANITIZED
  return false;
#else
  return true;
#endif
}

inline bool in_small_stack(const std::function<void()>& f) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 65536);
  pthread_t thread;
  const auto run = [](void* f) -> void* {
    own_signal_stack(1);
    (*static_cast<const std::function<void()>*>(f))();
    return nullptr;
  };
  const bool started = !pthread_create(&thread, &attributes, run, const_cast<std::function<void()>*>(&f));
  pthread_attr_destroy(&attributes);
  return started && !pthread_join(thread, nullptr);
}

// Whether f returns true in a child, in time.
inline bool in_child(const std::function<bool()>& f) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kPatienceWithChild);
    _exit(f() ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace kda::test
