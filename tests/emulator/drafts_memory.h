// Included in front of each unit of drafts: some of their kernels are in a namespace without a name.
#pragma once
#include "emulator.h"

namespace kda::cuda {
namespace {

KDA_EMULATED_SHARED_MEMORY

}  // namespace

namespace mma {
namespace {

KDA_EMULATED_SHARED_MEMORY

}  // namespace
}  // namespace mma
}  // namespace kda::cuda
