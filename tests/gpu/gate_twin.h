// Operands of the gate's tests: tensors on the host, each with a twin on the device.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <kda/kda.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "contract/dtype.h"
#include "on_cuda.h"
#include "short_list.h"

namespace kda::test {

#define CUDA_OK(call) ASSERT_EQ(dry_run ? cudaSuccess : (call), cudaSuccess) << #call

inline int64_t bytes_of(int32_t dtype, int64_t count) { return dtype_size(dtype) * count; }

inline double element(const std::vector<char>& data, int32_t dtype, int64_t i) {
  switch (dtype) {
    case KDA_F64: return reinterpret_cast<const double*>(data.data())[i];
    case KDA_F32: return reinterpret_cast<const float*>(data.data())[i];
    case KDA_BF16: return bf16_to_float(reinterpret_cast<const uint16_t*>(data.data())[i]);
    default: return f16_to_float(reinterpret_cast<const uint16_t*>(data.data())[i]);
  }
}

inline void set_element(std::vector<char>& data, int32_t dtype, int64_t i, float x) {
  switch (dtype) {
    case KDA_F32: reinterpret_cast<float*>(data.data())[i] = x; break;
    case KDA_BF16: reinterpret_cast<uint16_t*>(data.data())[i] = float_to_bf16(x); break;
    default: reinterpret_cast<uint16_t*>(data.data())[i] = float_to_f16(x); break;
  }
}

// A tensor on the host and its twin on the device, rows of heads `pad` elements longer than K; canaries in the padding.
struct Twin {
  kda_tensor host{}, device{};
  std::vector<char> data;
  std::vector<char> before;

  Twin(int32_t dtype, std::vector<int64_t> shape, int64_t pad = 0) : dtype_(dtype) {
    host.dtype = dtype;
    host.ndim = static_cast<int32_t>(shape.size());
    int64_t count = 1;
    for (int i = host.ndim - 1; i >= 0; --i) {
      host.shape[i] = shape[i];
      host.stride[i] = count;
      count *= shape[i] + (i == host.ndim - 1 ? pad : 0);
    }
    data.assign(bytes_of(dtype, count), static_cast<char>(0xA5));
    host.data = data.data();
    device = host;
    if (!dry_run) memory_.allocate(static_cast<int64_t>(data.size())), device.data = memory_.begin();
    upload();
  }

  void fill(std::mt19937& random, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    for_each([&](int64_t at) { set_element(data, dtype_, at, normal(random)); });
    upload();
  }
  void upload() {
    before = data;
    if (!dry_run) memory_.fill(data.data());
  }
  void download() {
    if (!dry_run) memory_.back(data.data());
  }

  template <class F>
  void for_each(const F& f) const {
    const int64_t rows = host.ndim == 3 ? host.shape[0] : 1, heads = host.ndim >= 2 ? host.shape[host.ndim - 2] : 1;
    const int64_t K = host.shape[host.ndim - 1];
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t k = 0; k < K; ++k)
          f((host.ndim == 3 ? m * host.stride[0] : 0) + (host.ndim >= 2 ? h * host.stride[host.ndim - 2] : 0) + k);
  }

  // Relative RMSE against a contiguous float64 tensor of the same shape.
  double error(const Twin& reference) const {
    double difference = 0, norm = 0;
    int64_t i = 0, count = 0;
    for_each([&](int64_t at) {
      const double expected = element(reference.data, KDA_F64, i++), got = element(data, dtype_, at);
      difference += (expected - got) * (expected - got), norm += expected * expected, ++count;
    });
    return std::sqrt(difference / count) / (std::sqrt(norm / count) + 1e-8);
  }
  // Whether nothing but the elements changed: padding still holds what was there.
  bool padding_intact() const {
    std::vector<char> restored = data;
    const int64_t size = dtype_size(dtype_);
    for_each([&](int64_t at) { std::memcpy(&restored[at * size], &before[at * size], size); });
    return restored == before;
  }

 private:
  int32_t dtype_;
  DeviceMemory memory_;
};

inline kda_gate_args simple_call(const Twin& x, const Twin& A, const Twin& g) {
  kda_gate_args args = KDA_GATE_ARGS_INIT;
  args.exec.device = KDA_CUDA;
  args.gate_form = KDA_GATE_SOFTPLUS;
  args.x = x.device, args.A_log = A.device, args.g = g.device;
  return args;
}

// Runs on the GPU.
inline kda_status on_gpu(const kda_gate_args& a) {
  note_that_ran("gate", "cuda_gate");
  return dry_run ? KDA_OK : kda_gate(&a);
}
inline kda_status on_gpu(const kda_gate_backward_args& a) {
  note_that_ran("gate_backward", "cuda_gate");
  return dry_run ? KDA_OK : kda_gate_backward(&a);
}

}  // namespace kda::test
