// Sets of dtypes, a bit each.
#pragma once
#include "kda/kda.h"

namespace kda {

constexpr unsigned bit(int dtype) { return 1u << dtype; }
constexpr unsigned kFloats = bit(KDA_F32) | bit(KDA_BF16) | bit(KDA_F16) | bit(KDA_F64);
constexpr unsigned kStates = bit(KDA_F32) | bit(KDA_BF16) | bit(KDA_F64);
constexpr unsigned kSingles = bit(KDA_F32) | bit(KDA_F64);
constexpr unsigned kIndices = bit(KDA_I32) | bit(KDA_I64);

}  // namespace kda
