// Included in front of each unit of the stages: their kernels are in a namespace without a name.
#pragma once
#include "emulator.h"

namespace kda::cuda::stages {
namespace {

KDA_EMULATED_SHARED_MEMORY

}  // namespace
}  // namespace kda::cuda::stages
