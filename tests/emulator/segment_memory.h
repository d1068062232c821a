// Included in front of the merge of segments, whose kernel is in a namespace without a name.
#pragma once
#include "emulator.h"

namespace kda::cuda {
namespace {

KDA_EMULATED_SHARED_MEMORY

}  // namespace
}  // namespace kda::cuda
