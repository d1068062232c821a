// The one error type of the library; thrown inside, turned into a status and a sentence at the C boundary (api.cc).
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "kda/kda.h"

namespace kda {

struct Error : std::runtime_error {
  Error(kda_status status, const std::string& what) : std::runtime_error(what), status(status) {}
  kda_status status;
};

template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

template <class... Args>
[[noreturn]] void invalid(const Args&... args) {
  throw Error(KDA_INVALID_ARGUMENT, str(args...));
}

}  // namespace kda
