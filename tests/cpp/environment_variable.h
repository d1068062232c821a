// An environment variable for a while, as the library sees it.
#pragma once
#include <cstdlib>
#include <string>

#include "kda/kda.h"

namespace kda::test {

// Sets a variable until the end of the scope, and has the library read it.
class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old, had_ = true;
    set(value);
  }
  ~EnvironmentVariable() { set(had_ ? old_.c_str() : nullptr); }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  // nullptr: the variable is not there.
  void set(const char* value) const {
    value ? setenv(name_, value, 1) : unsetenv(name_);
    kda_read_environment();
  }

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

}  // namespace kda::test
