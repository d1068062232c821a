// Kernels that use cuda/conv/conv.h the way decode, verify and flush can. All tensors are on the device.
#pragma once
#include "kda/kda.h"

namespace kda::test {

// Computes z [B,T,D], in the dtype of x, each token by its own taps; cu_seqlens and parents may be absent.
void convolve_tokens(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& parents,
                     const kda_tensor& z);
// The same for chains: the window of a sequence moves on, and its state after the last token is stored.
void convolve_and_roll(const kda_conv_inputs& in, const kda_tensor& cu_seqlens, const kda_tensor& z);
// Rolls every state on by the path that ends in token m - 1.
void roll_states(const kda_tensor& x, const kda_tensor& state, const kda_tensor& parents, int64_t m);

}  // namespace kda::test
