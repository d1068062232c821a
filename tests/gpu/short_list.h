// What has run on the GPU in this process: short_list.cc compares it with the short list.
#pragma once
#include <set>
#include <string>

#include "kda/kda.h"

namespace kda::test {

inline std::set<std::string> all_that_ran;  // "forward cuda_prefill_chunk"
inline bool dry_run = false;                // without a GPU: calls on it are noted, and left out

inline void note_that_ran(const char* op, const char* impl) {
  if (impl) all_that_ran.insert(std::string(op) + " " + impl);
}

}  // namespace kda::test
