#include "support.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>

#include "contract/dtype.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address), static_cast<void>(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address), static_cast<void>(size))
#endif

namespace kda::test {
namespace {

constexpr int64_t kMargin = 256;  // bytes on either side; a vector is 64
constexpr char kPoison = '\xff';

bool all_poison(const std::string& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) { return c == kPoison; });
}

}  // namespace

// ---- Tensor ----

void PrintTo(const Bits& bits, std::ostream* out) {
  *out << bits.bytes.size() << " bytes, hash " << std::hex << std::hash<std::string>()(bits.bytes);
}

bool Memory::guarded() {
  static const bool on = std::getenv("KDA_TEST_GUARD");
  return on;
}

Memory::Memory(int64_t size) : size_(size) {
  if (guarded()) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    page_bytes_ = (size + page - 1) / page * page + page;
    void* pages = mmap(nullptr, page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    pages_ = static_cast<char*>(pages);
    begin_ = pages_ + page_bytes_ - page - size;
    if (mprotect(begin_ + size, page, PROT_NONE)) throw std::bad_alloc();
  } else {
    begin_ = new char[size];
  }
  std::memset(begin_, 0xff, size);
}

Memory::~Memory() {
  ASAN_UNPOISON_MEMORY_REGION(begin_, size_);
  if (pages_) munmap(pages_, page_bytes_);
  else delete[] begin_;
}
void Memory::close(const char* begin, const char* end) { ASAN_POISON_MEMORY_REGION(begin, end - begin); }
std::string Memory::open() {
  ASAN_UNPOISON_MEMORY_REGION(begin_, size_);
  return {begin_, end()};
}

Tensor::Tensor(int32_t dtype, std::vector<int64_t> shape, Layout layout) {
  view_.dtype = dtype;
  view_.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape);
  // Dimensions from the innermost of the storage outwards.
  std::vector<int> order(shape.size());
  std::iota(order.rbegin(), order.rend(), 0);
  if (layout == Layout::kHeadsFirst && order.size() >= 3) std::swap(order[order.size() - 3], order[order.size() - 2]);
  int64_t stride = 1, elements = 1;
  for (const int dim : order) {
    // An odd gap keeps rows off every alignment but their element's.
    if (layout == Layout::kPadded && dim + 1 < view_.ndim) stride += dim + 2 == view_.ndim ? 5 : 3;
    view_.stride[dim] = stride;
    elements *= shape[dim];
    stride *= std::max<int64_t>(1, shape[dim]);
  }
  int64_t last = 0;
  for (size_t i = 0; i < shape.size(); ++i) last += (shape[i] - 1) * view_.stride[i];
  place(elements ? (last + 1) * dtype_size(dtype) : 0);
}

Tensor::Tensor(int32_t dtype, std::vector<int64_t> shape, const std::vector<double>& values, Layout layout)
    : Tensor(dtype, std::move(shape), layout) {
  for (int64_t i = 0; i < size(); ++i) set(i, values.at(i));
}

void Tensor::place(int64_t data_bytes) {
  memory_ = std::make_unique<Memory>(64 + 2 * kMargin + data_bytes);
  char *begin = memory_->begin(), *end = memory_->end();
  // One element past 64-byte alignment.
  char* data = begin + (64 - reinterpret_cast<uintptr_t>(begin) % 64) + kMargin + dtype_size(view_.dtype);
  if (Memory::guarded()) data = end - data_bytes;
  view_.data = data;
  memory_->close(begin, data);
  memory_->close(data + data_bytes, end);
}

Tensor Tensor::clone() const {
  Tensor copy;
  if (!*this) return copy;
  copy.view_ = view_;
  const int64_t margins = 64 + 2 * kMargin;
  copy.place(memory_->end() - memory_->begin() - margins);
  for (int64_t i = 0; i < size(); ++i) std::memcpy(copy.element(i), element(i), dtype_size(view_.dtype));
  return copy;
}

int64_t Tensor::size() const {
  if (!*this) return 0;
  return std::accumulate(view_.shape, view_.shape + view_.ndim, int64_t{1}, std::multiplies<>());
}

char* Tensor::element(int64_t i) const {
  int64_t offset = 0;
  for (int dim = view_.ndim - 1; dim >= 0; --dim) {
    offset += i % view_.shape[dim] * view_.stride[dim];
    i /= view_.shape[dim];
  }
  return static_cast<char*>(view_.data) + offset * dtype_size(view_.dtype);
}

double Tensor::get(int64_t i) const {
  const void* p = element(i);
  switch (view_.dtype) {
    case KDA_F64: return *static_cast<const double*>(p);
    case KDA_F32: return *static_cast<const float*>(p);
    case KDA_BF16: return bf16_to_float(*static_cast<const uint16_t*>(p));
    case KDA_F16: return f16_to_float(*static_cast<const uint16_t*>(p));
    case KDA_I32: return *static_cast<const int32_t*>(p);
    case KDA_I64: return static_cast<double>(*static_cast<const int64_t*>(p));
    default: return *static_cast<const uint8_t*>(p);
  }
}

void Tensor::set(int64_t i, double x) {
  void* p = element(i);
  switch (view_.dtype) {
    case KDA_F64: *static_cast<double*>(p) = x; break;
    case KDA_F32: *static_cast<float*>(p) = static_cast<float>(x); break;
    case KDA_BF16: *static_cast<uint16_t*>(p) = float_to_bf16(static_cast<float>(x)); break;
    case KDA_F16: *static_cast<uint16_t*>(p) = float_to_f16(static_cast<float>(x)); break;
    case KDA_I32: *static_cast<int32_t*>(p) = static_cast<int32_t>(x); break;
    case KDA_I64: *static_cast<int64_t*>(p) = static_cast<int64_t>(x); break;
    default: *static_cast<uint8_t*>(p) = static_cast<uint8_t>(x); break;
  }
}

void Tensor::set_bits(int64_t i, const void* bits) { std::memcpy(element(i), bits, dtype_size(view_.dtype)); }

std::vector<double> Tensor::values() const {
  std::vector<double> all(size());
  for (int64_t i = 0; i < size(); ++i) all[i] = get(i);
  return all;
}

Bits Tensor::bits() const { return *this ? bits(0, 0, view_.shape[0]) : Bits{}; }

Bits Tensor::bits(int64_t dim, int64_t first, int64_t n) const {
  std::string all;
  int64_t inner = 1;
  for (int i = static_cast<int>(dim) + 1; i < view_.ndim; ++i) inner *= view_.shape[i];
  for (int64_t i = 0; i < size(); ++i) {
    const int64_t index = i / inner % view_.shape[dim];
    if (index >= first && index < first + n) all.append(element(i), dtype_size(view_.dtype));
  }
  return {all};
}

void Tensor::fill(double x) {
  for (int64_t i = 0; i < size(); ++i) set(i, x);
}

void Tensor::poison() {
  const std::string ones(8, kPoison);
  for (int64_t i = 0; i < size(); ++i) set_bits(i, ones.data());
}

int64_t Tensor::unwritten() const {
  const std::string ones(8, kPoison);
  int64_t count = 0;
  for (int64_t i = 0; i < size(); ++i) count += !std::memcmp(element(i), ones.data(), dtype_size(view_.dtype));
  return count;
}

bool Tensor::margins_intact() const {
  if (!*this) return true;
  std::string bytes = memory_->open();
  for (int64_t i = 0; i < size(); ++i)
    std::memset(bytes.data() + (element(i) - memory_->begin()), kPoison, dtype_size(view_.dtype));
  return all_poison(bytes);
}

bool Tensor::untouched() const { return unwritten() == size() && margins_intact(); }

// ---- Random ----

uint64_t Random::bits() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * M_PI * uniform());
}

// ---- calls ----

Workspace::Workspace(uint64_t bytes, unsigned char fill)
    : memory_(std::make_unique<Memory>(bytes + 2 * kMargin + 512)), bytes_(bytes) {
  char *begin = memory_->begin(), *end = memory_->end();
  data_ = begin + kMargin;
  data_ += 256 - reinterpret_cast<uintptr_t>(data_) % 256;
  if (reinterpret_cast<uintptr_t>(data_) % 512 == 0) data_ += 256;
  std::memset(data_, fill, bytes);
  memory_->close(begin, data_);
  memory_->close(data_ + bytes, end);
}

bool Workspace::margins_intact() const {
  const std::string all = memory_->open();
  const size_t before = data_ - memory_->begin();
  return all_poison(all.substr(0, before)) && all_poison(all.substr(before + bytes_));
}

std::string chosen(const std::string& explanation) {
  const size_t at = explanation.rfind("* ", 0) == 0 ? 0 : explanation.find("\n* ");
  if (at == std::string::npos) return "";
  const size_t begin = explanation.find("* ", at) + 2;
  return explanation.substr(begin, explanation.find(':', begin) - begin);
}

std::vector<std::string> cpu_implementations(const char* op) {
  std::vector<std::string> names;
  for (int32_t i = 0; const char* name = kda_implementation(op, i); ++i)
    if (std::string(name).starts_with("cpu_")) names.push_back(name);
  return names;
}

// ---- errors ----

Error compare(const std::vector<double>& ref, const std::vector<double>& x, double rounding) {
  Error e{0, 0, 0, 0, ref.size() == x.size()};
  double sum = 0, sum_ref = 0;
  for (size_t i = 0; i < ref.size() && e.finite_alike; ++i) {
    if (!std::isfinite(ref[i]) || !std::isfinite(x[i])) {
      e.finite_alike = ref[i] == x[i] || (std::isnan(ref[i]) && std::isnan(x[i]));
      e.worst = static_cast<int64_t>(i);
      continue;
    }
    const double difference = std::abs(ref[i] - x[i]);
    if (const double beyond = difference - rounding * std::abs(ref[i]); beyond > e.max)
      e.max = beyond, e.worst = static_cast<int64_t>(i);
    sum += difference * difference;
    sum_ref += ref[i] * ref[i];
  }
  const double n = std::max<double>(1, static_cast<double>(ref.size()));
  e.rms_ref = std::sqrt(sum_ref / n);
  e.relative_rmse = std::sqrt(sum / n) / (e.rms_ref + 1e-8);
  return e;
}

double unit_roundoff(int32_t dtype) {
  return dtype == KDA_BF16 ? 0x1p-8 : dtype == KDA_F16 ? 0x1p-11 : dtype == KDA_F32 ? 0x1p-24 : 0x1p-53;
}

testing::AssertionResult close(const Tensor& ref, const Tensor& x, double threshold) {
  const std::vector<double> expected = ref.values(), got = x.values();
  if (ref.shape() != x.shape()) return testing::AssertionFailure() << "shapes differ";
  const Error e = compare(expected, got, unit_roundoff(x.dtype()));
  if (e.finite_alike && e.relative_rmse <= threshold && e.max <= 8 * threshold * (e.rms_ref + 1e-8))
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << "relative RMSE " << e.relative_rmse << ", budget " << threshold
                                     << "; largest difference " << e.max << ", budget " << 8 * threshold * e.rms_ref
                                     << "; at element " << e.worst << " expected " << expected[e.worst] << ", got "
                                     << got[e.worst] << (e.finite_alike ? "" : " (NaN or infinity on one side only)");
}

}  // namespace kda::test
