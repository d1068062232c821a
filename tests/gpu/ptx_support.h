// Numbers for the tests of src/cuda/ptx, on the host and on the device.
#pragma once
#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "contract/dtype.h"
#include "on_cuda.h"

namespace kda::test {

template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& x) : size_(x.size()) {
    memory_.allocate(static_cast<int64_t>(size_ * sizeof(T))), memory_.fill(x.data());
  }
  OnDevice(size_t size, T x) : OnDevice(std::vector<T>(size, x)) {}
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { cudaDeviceSynchronize(); }  // a kernel may still read it
  operator T*() const { return reinterpret_cast<T*>(memory_.begin()); }
  // The data, once the kernels before are done.
  std::vector<T> back() const {
    std::vector<T> x(size_);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    memory_.back(x.data());
    return x;
  }

 private:
  size_t size_;
  DeviceMemory memory_;
};

template <class T>
void expect_same(const std::vector<T>& expected, const std::vector<T>& got) {
  ASSERT_EQ(expected.size(), got.size());
  const auto at = std::mismatch(expected.begin(), expected.end(), got.begin());
  if (at.first == expected.end()) return;
  ADD_FAILURE() << "number " << at.first - expected.begin() << " is " << +*at.second << ", not " << +*at.first;
}

inline uint16_t bits_of(int32_t dtype, float x) { return dtype == KDA_F16 ? float_to_f16(x) : float_to_bf16(x); }
inline float number_of(int32_t dtype, unsigned bits) {
  const auto x = static_cast<uint16_t>(bits);
  return dtype == KDA_F16 ? f16_to_float(x) : bf16_to_float(x);
}
inline std::vector<uint16_t> bits_of(int32_t dtype, const std::vector<float>& x) {
  std::vector<uint16_t> bits;
  for (const float one : x) bits.push_back(bits_of(dtype, one));
  return bits;
}

// Numbers 1, 2, ... in all their bits.
template <class T>
std::vector<T> counted(size_t size) {
  std::vector<T> x(size);
  std::iota(x.begin(), x.end(), T{1});
  return x;
}
// Numbers from -4 to 3: sums of their products are exact.
inline std::vector<float> whole(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(size);
  for (float& one : x) one = static_cast<float>(random() % 8) - 4;
  return x;
}
// d [rows,N] = c + a b^T
inline std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, std::vector<float> d,
                                  size_t N) {
  const size_t depth = b.size() / N;
  for (size_t i = 0; i < d.size(); ++i)
    for (size_t k = 0; k < depth; ++k) d[i] += a[i / N * depth + k] * b[i % N * depth + k];
  return d;
}

// The registers of lanes that hold four 8x8 matrices.
inline std::vector<unsigned> registers(const std::vector<uint16_t>& x, bool transposed) {
  std::vector<unsigned> all;
  for (unsigned i = 0; i < 4 * 32; ++i) {
    const unsigned row = i % 32 / 4, column = i % 4 * 2, matrix = i / 32 * 64;
    const auto at = [&](unsigned r, unsigned c) { return x[matrix + (transposed ? c * 8 + r : r * 8 + c)]; };
    all.push_back(at(row, column) | unsigned{at(row, column + 1)} << 16);
  }
  return all;
}

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

}  // namespace kda::test
