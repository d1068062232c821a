// Calls of the C ABI on the GPU, with tensors that live on the host.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "contract/dtype.h"
#include "fields.h"
#include "late_inputs.h"
#include "short_list.h"
#include "support.h"

namespace kda::test {

// Bytes from the first element in memory to the last, gaps between rows included.
inline int64_t bytes_of(const kda_tensor& t) {
  int64_t all = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    all += (t.shape[i] - 1) * std::abs(t.stride[i]);
  }
  return (all + 1) * dtype_size(t.dtype);
}
// Where the first element in memory is. With a negative stride, others lie in front of `data`.
inline char* begin_of(const kda_tensor& t) {
  int64_t before = 0;
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] > 1 && t.stride[i] < 0) before += (t.shape[i] - 1) * t.stride[i];
  return static_cast<char*>(t.data) + before * dtype_size(t.dtype);
}

// Memory on the device, poison at first, between canaries. Where KDA_TEST_EXACT_MEMORY is set there are no canaries:
// compute-sanitizer itself finds accesses beyond an allocation.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  // Begins `shift` bytes behind an address that fits any access.
  void allocate(int64_t bytes, int64_t shift = 0) {
    static const bool exact = std::getenv("KDA_TEST_EXACT_MEMORY");
    bytes_ = bytes, before_ = (exact ? 0 : kCanary) + shift, behind_ = exact ? 0 : kCanary;
    ASSERT_EQ(cudaMalloc(&data_, std::max<int64_t>(before_ + bytes_ + behind_, 1)), cudaSuccess);
    ASSERT_EQ(cudaMemset(data_, 0xff, before_ + bytes_ + behind_), cudaSuccess);
  }
  // Copies as many bytes as were asked for, from the host and back.
  void fill(const void* host) { ASSERT_EQ(cudaMemcpy(begin(), host, bytes_, cudaMemcpyHostToDevice), cudaSuccess); }
  void poison() { ASSERT_EQ(cudaMemset(begin(), 0xff, bytes_), cudaSuccess); }
  int64_t bytes() const { return bytes_; }
  void back(void* host) const {
    ASSERT_EQ(cudaMemcpy(host, begin(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    expect_canaries();
  }
  char* begin() const { return static_cast<char*>(data_) + before_; }
  void expect_canaries() const {
    std::string all(before_ + behind_, 0);
    EXPECT_EQ(cudaMemcpy(all.data(), data_, before_, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(all.data() + before_, begin() + bytes_, behind_, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(all.find_first_not_of('\xff'), std::string::npos) << "something beside a tensor was written";
  }

 private:
  static constexpr int64_t kCanary = 4096;
  int64_t bytes_ = 0, before_ = 0, behind_ = 0;
  void* data_ = nullptr;
};

// Makes all tensors poison, and writes what they were by a kernel that lets the next one start before.
inline void write_again(std::map<void*, DeviceMemory>& copies, const std::map<void*, DeviceMemory>& before) {
  ASSERT_LE(copies.size(), size_t{LateWrites::kMost});
  LateWrites writes;
  for (auto& [host, copy] : copies) {
    copy.poison();
    writes.all[writes.count++] = {copy.begin(), before.at(host).begin(), copy.bytes()};
  }
  ASSERT_EQ(write_late(writes), cudaSuccess);
}

// Runs with copies of all tensors on the device, and copies all of them back. They begin `shift` elements behind
// addresses that fit any access. Operators that need a workspace get one that is poison. Where kernels can start early,
// the tensors are written late by a kernel in front of the call: see late_inputs.h.
template <class Args>
void run_on_cuda(Args args, const char* impl, int64_t shift = 0) {
  note_that_ran(op_name<Args>(), impl);
  if (dry_run) return;
  std::map<void*, std::pair<int64_t, int64_t>> sizes;  // by place on the host: views of a place share the copy
  for (const Field& f : given(args)) {
    auto& [bytes, skipped] = sizes[begin_of(*f.t)];
    bytes = std::max(bytes, bytes_of(*f.t)), skipped = shift * dtype_size(f.t->dtype);
  }
  std::map<void*, DeviceMemory> copies, before;
  const auto fill = [&](std::map<void*, DeviceMemory>& all) {
    for (const auto& [host, size] : sizes) {
      ASSERT_NO_FATAL_FAILURE(all[host].allocate(size.first, size.second));
      ASSERT_NO_FATAL_FAILURE(all[host].fill(host));
    }
  };
  ASSERT_NO_FATAL_FAILURE(fill(copies));
  for (const Field& f : given(args))
    if (const auto copy = copies.find(begin_of(*f.t)); copy != copies.end())
      f.t->data = copy->second.begin() + (static_cast<char*>(f.t->data) - begin_of(*f.t));
  args.exec.device = KDA_CUDA, args.exec.impl = impl;
  DeviceMemory workspace;
  ASSERT_EQ(query(args, &args.exec.workspace_bytes), KDA_OK) << kda_last_error();
  if (args.exec.workspace_bytes) {
    ASSERT_NO_FATAL_FAILURE(workspace.allocate(static_cast<int64_t>(args.exec.workspace_bytes)));
    args.exec.workspace = workspace.begin();
  }
  if constexpr (CUDART_VERSION > 0) {  // in the emulator kernels come one after the other
    if (can_write_late()) {
      args.exec.stream = late_stream();
      ASSERT_EQ(call(args), KDA_OK) << kda_last_error();  // loads its kernels, for which the writer would not wait
      ASSERT_NO_FATAL_FAILURE(fill(before));
      if (args.exec.workspace_bytes) workspace.poison();
      ASSERT_NO_FATAL_FAILURE(write_again(copies, before));
    }
  }
  ASSERT_EQ(call(args), KDA_OK) << kda_last_error();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  workspace.expect_canaries();
  for (const auto& [host, copy] : copies) ASSERT_NO_FATAL_FAILURE(copy.back(host));
}

// Returns the call with tensors on the device, at addresses that fit any access: for questions about the call.
// (Tensors on the host fit their element and no more: then the kernels for aligned rows decline.)
template <class Args>
Args on_device(Args args) {
  std::map<void*, void*> places;
  for (const Field& f : given(args)) {
    const uintptr_t next = (uintptr_t{1} << 46) + (places.size() << 32);
    char* const begin =
        static_cast<char*>(places.try_emplace(begin_of(*f.t), reinterpret_cast<void*>(next)).first->second);
    f.t->data = begin + (static_cast<char*>(f.t->data) - begin_of(*f.t));
  }
  args.exec.device = KDA_CUDA;
  return args;
}

// Names of the CUDA implementations of an operator that take the call on the device.
template <class Args>
std::vector<const char*> takers(const char* op, const Args& on_host) {
  std::vector<const char*> all;
  Args args = on_device(on_host);
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

// Expects a refusal without a launch for less memory than the implementation asks for, or none.
template <class Args>
void expect_workspace_is_checked(const Args& on_host, const char* impl) {
  Args args = on_device(on_host);
  uint64_t needed = 0;
  args.exec.impl = impl;
  ASSERT_EQ(query(args, &needed), KDA_OK) << kda_last_error();
  ASSERT_GT(needed, 0u) << "the call needs a workspace";
  for (const uint64_t bytes : {uint64_t{0}, needed - 1}) {
    args.exec.workspace = bytes ? reinterpret_cast<void*>(uintptr_t{1} << 45) : nullptr;
    args.exec.workspace_bytes = bytes;
    EXPECT_EQ(call(args), KDA_INVALID_ARGUMENT);
    EXPECT_EQ(kda_last_error(),
              "exec.workspace_bytes: expected at least " + std::to_string(needed) + ", got " + std::to_string(bytes));
  }
}

// The budgets of drafts and decode.
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
    if (dry_run) return;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no CUDA device";
  }
};

}  // namespace kda::test
