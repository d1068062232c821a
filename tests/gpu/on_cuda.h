// Calls of the C ABI on the GPU, with tensors that live on the host.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <type_traits>
#include <vector>

#include "dtype.h"
#include "fields.h"
#include "support.h"

namespace kda::test {

inline std::vector<Field> tensors(kda_decode_args& a) { return joined(fields(a), snapshot_fields(a)); }
inline std::vector<Field> tensors(kda_flush_verify_args& a) { return joined(fields(a), ring_fields(a)); }
template <class Args>
std::vector<Field> tensors(Args& a) {
  return fields(a);
}

// From the first element to the last, gaps between rows included.
inline int64_t bytes_of(const kda_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.stride[i];
  }
  return (last + 1) * dtype_size(t.dtype);
}

struct DeviceMemory {
  int64_t bytes = 0, shift = 0;
  void* data = nullptr;
  char* begin() const { return static_cast<char*>(data) + shift; }
  ~DeviceMemory() { cudaFree(data); }
};

// Runs with copies of all tensors on the device, and copies all of them back. They begin `shift` elements behind addresses
// that fit any access. Operators that need a workspace get one that is poison.
template <class Args>
void run_on_cuda(Args args, const char* impl, int64_t shift = 0) {
  std::map<void*, DeviceMemory> copies;  // by their place on the host: views of the same place stay so
  for (const Field& f : tensors(args))
    if (f.t->ndim) {
      DeviceMemory& copy = copies[f.t->data];
      copy.bytes = std::max(copy.bytes, bytes_of(*f.t)), copy.shift = shift * dtype_size(f.t->dtype);
    }
  for (auto& [host, copy] : copies) {
    ASSERT_EQ(cudaMalloc(&copy.data, std::max<int64_t>(copy.shift + copy.bytes, 1)), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(copy.begin(), host, copy.bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  for (const Field& f : tensors(args))
    if (const auto copy = copies.find(f.t->data); copy != copies.end()) f.t->data = copy->second.begin();
  args.exec.device = KDA_CUDA, args.exec.impl = impl;
  DeviceMemory workspace;
  ASSERT_EQ(query(args, &args.exec.workspace_bytes), KDA_OK) << kda_last_error();
  if (args.exec.workspace_bytes) {
    ASSERT_EQ(cudaMalloc(&workspace.data, args.exec.workspace_bytes), cudaSuccess);
    ASSERT_EQ(cudaMemset(workspace.data, 0xff, args.exec.workspace_bytes), cudaSuccess);
    args.exec.workspace = workspace.data;
  }
  ASSERT_EQ(call(args), KDA_OK) << kda_last_error();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (const auto& [host, copy] : copies)
    ASSERT_EQ(cudaMemcpy(host, copy.begin(), copy.bytes, cudaMemcpyDeviceToHost), cudaSuccess);
}

// Names of the CUDA implementations of an operator that take the call.
template <class Args>
std::vector<const char*> takers(const char* op, Args args) {
  std::vector<const char*> all;
  args.exec.device = KDA_CUDA;
  for (int i = 0; const char* name = kda_implementation(op, i); ++i) {
    if (std::string(name).substr(0, 5) != "cuda_") continue;
    args.exec.impl = name;
    uint64_t workspace;
    const int32_t status = query(args, &workspace);
    if (status == KDA_OK) all.push_back(name);
    else EXPECT_EQ(status, KDA_UNSUPPORTED) << kda_last_error();
  }
  EXPECT_FALSE(all.empty());
  return all;
}

// What drafts and decode are held to.
inline double budget(int32_t dtype) { return dtype == KDA_F32 ? 1e-5 : 0.003; }
inline void expect_close(const Tensor& expected, const Tensor& got, const char* name, double least = 0) {
  EXPECT_TRUE(close(expected, got, std::max(least, budget(got.dtype())))) << name;
  EXPECT_EQ(got.unwritten(), expected.unwritten()) << name;
  EXPECT_TRUE(got.margins_intact()) << name;
}
template <class Records>
void expect_close(Records& expected, Records& got, double least = 0) {
  for (size_t i = 0; i < 3; ++i)
    expect_close(*expected.tensors()[i].tensor, *got.tensors()[i].tensor, got.tensors()[i].name, least);
}

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no CUDA device";
  }
};

}  // namespace kda::test
