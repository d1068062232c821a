// What every test needs: tensors that notice stray reads and writes, random data, calls of the C ABI, error measures.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "contract/operators.h"
#include "kda/kda.h"

namespace kda::test {

// Where the elements of a tensor lie. Everything else in its memory is poison.
enum class Layout {
  kDense,
  kPadded,      // rows further apart than they are long: a slice of a wider buffer
  kHeadsFirst,  // [B,T,H,K] stored as [B,H,T,K]
};

// Bytes to compare; a failure prints their number, not them.
struct Bits {
  std::string bytes;
  bool operator==(const Bits&) const = default;
  bool all(char c) const { return bytes.find_first_not_of(c) == std::string::npos; }
};
void PrintTo(const Bits& bits, std::ostream* out);

// Bytes that start as 0xff. Parts of them may be closed to access under ASan; they are open again when freed. Where
// KDA_TEST_GUARD is set, the page behind the last byte may not be touched, which all instruction sets notice.
class Memory {
 public:
  static bool guarded();
  explicit Memory(int64_t size);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* begin() const { return begin_; }
  char* end() const { return begin_ + size_; }
  void close(const char* begin, const char* end);
  std::string open();  // a copy of all bytes

 private:
  int64_t size_;
  char* begin_;
  char* pages_ = nullptr;  // of guarded memory, and their bytes with the page that is closed
  int64_t page_bytes_ = 0;
};

// A tensor and its memory. All bytes start as 0xff, which is NaN in every float dtype and -1 in the integers: elements
// that a call leaves alone, gaps between rows, and margins around the data (which ASan guards as well). The data is
// aligned to its element and no more. Guarded memory ends with it.
class Tensor {
 public:
  Tensor() = default;  // absent
  Tensor(int32_t dtype, std::vector<int64_t> shape, Layout layout = Layout::kDense);
  Tensor(int32_t dtype, std::vector<int64_t> shape, const std::vector<double>& values, Layout layout = Layout::kDense);
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
  Tensor clone() const;  // same layout, same bytes

  const kda_tensor& view() const { return view_; }
  operator const kda_tensor&() const { return view_; }
  explicit operator bool() const { return view_.ndim > 0; }
  std::vector<int64_t> shape() const { return {view_.shape, view_.shape + view_.ndim}; }
  int32_t dtype() const { return view_.dtype; }

  // Elements in row-major order of their indices, whatever the strides.
  int64_t size() const;
  double get(int64_t i) const;
  void set(int64_t i, double x);
  void set_bits(int64_t i, const void* element);
  std::vector<double> values() const;
  Bits bits() const;                                       // the elements' bytes
  Bits bits(int64_t dim, int64_t first, int64_t n) const;  // of indices first .. first+n-1 of one dimension

  void fill(double x);
  void poison();                // every byte 0xff again
  bool untouched() const;       // every byte still 0xff
  bool margins_intact() const;  // every byte outside the elements still 0xff
  int64_t unwritten() const;    // how many elements are still 0xff

 private:
  char* element(int64_t i) const;
  void place(int64_t data_bytes);

  kda_tensor view_{};
  std::unique_ptr<Memory> memory_;
};

// Deterministic everywhere (the standard distributions are not).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double uniform();  // [0, 1)
  double uniform(double lo, double hi) { return lo + (hi - lo) * uniform(); }
  double normal();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return uniform() < p; }

 private:
  uint64_t state_;
};

// ---- calls ----

#define KDA_TEST_OPERATOR(op)                                                                                     \
  inline kda_status call(const kda_##op##_args* a) { return kda_##op(a); }                                        \
  inline kda_status query(const kda_##op##_args& a, uint64_t* bytes) { return kda_##op##_workspace(&a, bytes); }  \
  inline kda_status explain(const kda_##op##_args& a, const char** text) { return kda_##op##_explain(&a, text); } \
  constexpr const char* name_of(const kda_##op##_args*) { return #op; }
KDA_FOR_EACH_OPERATOR(KDA_TEST_OPERATOR)
#undef KDA_TEST_OPERATOR

// The operator's name, as kda_implementation knows it.
template <class Args>
constexpr const char* op_name() {
  return name_of(static_cast<const Args*>(nullptr));
}
template <class Args>
kda_status call(const Args& a) {
  return call(&a);
}

// Workspace of the size asked for, aligned to 256 and no more, every byte `fill`, with guarded margins.
class Workspace {
 public:
  explicit Workspace(uint64_t bytes, unsigned char fill = 0xff);
  Workspace(Workspace&&) = default;
  void* data() const { return data_; }
  bool margins_intact() const;

 private:
  std::unique_ptr<Memory> memory_;
  char* data_;
  uint64_t bytes_;
};

// How to run a call. The implementation that runs is checked with kda_*_explain.
struct How {
  const char* impl = nullptr;
  int32_t threads = 0;
  unsigned char workspace_fill = 0xff;
};

// The text of kda_*_explain.
template <class Args>
std::string explanation(const Args& args) {
  const char* text = "";
  EXPECT_EQ(explain(args, &text), KDA_OK) << kda_last_error();
  return text;
}
// The name after "* " in the text of kda_*_explain: the implementation that would run.
std::string chosen(const std::string& explanation);

// Runs with a workspace of its own. Fails the test if the call does, if another implementation than the forced one
// would run, or if the workspace's margins were written.
template <class Args>
void run(Args args, const How& how = {}) {
  args.exec.impl = how.impl;
  args.exec.num_threads = how.threads;
  const char* text = "";
  ASSERT_EQ(explain(args, &text), KDA_OK) << kda_last_error();
  if (how.impl) {
    ASSERT_EQ(chosen(text), how.impl) << text;
  }
  uint64_t bytes = 0;
  ASSERT_EQ(query(args, &bytes), KDA_OK) << kda_last_error();
  const Workspace workspace(bytes, how.workspace_fill);
  args.exec.workspace = bytes ? workspace.data() : nullptr;
  args.exec.workspace_bytes = bytes;
  ASSERT_EQ(call(args), KDA_OK) << kda_last_error();
  ASSERT_TRUE(workspace.margins_intact());
}

// Why `impl` declines this call, or "" if it takes it.
template <class Args>
std::string why_not(Args args, const char* impl) {
  const char* text = "";
  args.exec.impl = nullptr;
  if (explain(args, &text) != KDA_OK) return kda_last_error();
  const std::string line = std::string("- ") + impl + ": ", all = text;
  const size_t at = all.find(line);
  if (at == std::string::npos) return "";
  const std::string rest = all.substr(at + line.size(), all.find('\n', at) - at - line.size());
  const std::string reason = rest.substr(0, rest.rfind(" ["));  // behind it comes the file
  return reason.starts_with("can, ") ? "" : reason;
}

// The CPU implementations of an operator that are not the oracle.
std::vector<std::string> cpu_implementations(const char* op);

// ---- errors ----

struct Error {
  double relative_rmse;  // RMS(ref - x) / (RMS(ref) + 1e-8)
  double max;            // largest difference beyond the rounding of that element
  double rms_ref;        // RMS(ref)
  int64_t worst;         // where
  bool finite_alike;     // NaN and infinities of x exactly where ref has them
};
// `rounding`: relative rounding of one element that the largest difference does not count, see unit_roundoff.
Error compare(const std::vector<double>& ref, const std::vector<double>& x, double rounding = 0);

double unit_roundoff(int32_t dtype);  // half a unit in the last place, relative

// math.md 8: relative RMSE within the threshold, no element off by more than 8 times that (beside the rounding of its
// own store), NaN nowhere.
testing::AssertionResult close(const Tensor& ref, const Tensor& x, double threshold);

}  // namespace kda::test
