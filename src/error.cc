#include "error.h"

namespace kda {

std::string printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= ' ' && byte <= '~') out += c;
    else out += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
  }
  return out;
}

}  // namespace kda
