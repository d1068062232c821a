// The one error type of the library; thrown inside, turned into a status and a sentence at the C boundary (api.cc).
#pragma once
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kda/kda.h"

namespace kda {

struct Error : std::runtime_error {
  Error(kda_status status, const std::string& what) : std::runtime_error(what), status(status) {}
  kda_status status;
};

// Sentences are the same in every locale: the global locale might group digits.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << args);
  return out.str();
}

template <class... Args>
[[noreturn]] void invalid(const Args&... args) {
  throw Error(KDA_INVALID_ARGUMENT, str(args...));
}

// Makes text from outside (a name, an environment variable) fit for a sentence: one line of printable ASCII, other
// bytes as \xNN.
std::string printable(std::string_view text);

}  // namespace kda
