// Tools of the contract: they check the tensors and integers of a call by the table of its operator, and the memory
// that tensors share. Errors are sentences.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>

#include "contract/problem.h"
#include "contract/tables.h"
#include "error.h"

namespace kda {

using Shape = std::array<int64_t, KDA_MAX_NDIM>;

std::string shape_text(const int64_t* shape, int ndim);

// Byte range [lo, hi) that a tensor can touch.
struct Extent {
  uintptr_t lo, hi;
};

// The tensors of one call. Checks them one by one and remembers them, so that outputs can be compared with everything
// else at the end. A size is known once a tensor has bound it, or validate() has set it; until then each tensor has its
// own. Functions that take tensors or integers take members of args.
class Tensors {
 public:
  template <class Args>
  explicit Tensors(const Args& args)
      : args_(reinterpret_cast<const char*>(&args)), rows_(operands_of<Args>().data()), row_at_(kRowAt<Args>.data()) {
    sizes_.fill(kUnknown);
    sizes_[static_cast<int>(Size::C)] = kChunk;
  }

  static constexpr int64_t kUnknown = -1;
  int64_t& operator[](Size size) { return sizes_[static_cast<int>(size)]; }
  const Operand& row(const void* member) const {
    return rows_[row_at_[(static_cast<const char*>(member) - args_) / sizeof(int32_t)]];
  }
  const char* name(const void* member) const { return row(member).name; }
  // Says where the shape of an operand comes from.
  std::string like(const Operand& o) const;

  // Checks what must hold even for an absent tensor: rank and sizes are in range, and there is no data without a rank.
  template <class... T>
  void check_form(const T&... tensors) const {
    (check_form(row(&tensors).name, tensors), ...);
  }
  // Checks that an operand comes with those that the table says. Part of check().
  template <class... T>
  void check_company(const T&... tensors) const {
    (check_company(row(&tensors), tensors), ...);
  }
  // Checks the number of dimensions. States have so many `rows`.
  void check_rank(const kda_tensor& t, const char* rows = "slots") const;
  // The same, and binds sizes that no tensor has told before.
  void bind(const kda_tensor& t, const char* rows = "slots");
  // Checks sizes from bind(). With `grouped`, HV is said to be a multiple of H, whatever is wrong with it.
  void check_heads(bool grouped) const;
  // The name of the tensor that bound a size.
  const char* from(Size size) const { return from_[static_cast<int>(size)]; }
  // Checks all that the table says of each: of an integer its range, of a tensor everything. One that may be absent is
  // not checked if it is.
  template <class... T>
  void check(const T&... operands) {
    (check_one(operands, row(&operands)), ...);
  }
  // The form of all, then all.
  template <class... T>
  void check_all(const T&... tensors) {
    check_form(tensors...), check(tensors...);
  }
  void check_present(const kda_tensor& t) { check_tensor(t, row(&t)); }

  // Checks that no output shares memory with any other tensor, and no tensor with the workspace. Where the table says
  // so, an output may be the very same view as another one.
  void check_aliasing(const kda_exec& exec) const;
  // Does any output have an element?
  bool write() const;

  bool k_first = false;       // states are [.., K, V]
  bool in_parts = false;      // x has x1 beside it
  int64_t layers = kUnknown;  // of a call with a dimension of layers in front

 private:
  static void check_form(const char* name, const kda_tensor& t);
  void check_company(const Operand& o, const kda_tensor& t) const;
  void check_one(const kda_tensor& t, const Operand& o) {
    check_company(o, t);
    if (present(t) || !o.optional) check_tensor(t, o);
  }
  void check_one(int32_t value, const Operand& o) const;
  void check_tensor(const kda_tensor& t, const Operand& o) {
    if (!o.checked_apart && !fits(t, o)) refuse_shape(t, o);
    check_storage(t, o);
  }
  bool fits(const kda_tensor& t, const Operand& o) const;
  [[noreturn]] void refuse_shape(const kda_tensor& t, const Operand& o) const;
  void check_storage(const kda_tensor& t, const Operand& o);
  void check_workspace(const kda_exec& exec) const;
  const kda_tensor& at(uint16_t offset) const { return *reinterpret_cast<const kda_tensor*>(args_ + offset); }
  unsigned dtypes(const Operand& o) const;
  bool leads(const Operand& o) const { return o.layered && layers != kUnknown; }
  int64_t size(const Operand& o, int i) const { return sizes_[static_cast<int>(o.shape[i].size)]; }
  std::string shape_of(const Operand& o, const char* rows) const;

  struct Seen {
    const Operand* row;
    const kda_tensor* tensor;
    Extent extent;
  };
  const char* const args_;
  const Operand* const rows_;
  const uint8_t* const row_at_;
  std::array<int64_t, kSizes + 1> sizes_;
  std::array<const char*, kSizes + 1> from_{};
  std::array<Seen, 40> seen_;  // kda_flush_verify has the most, 31 with a convolution
  int count_ = 0;
};

void check_exec(const kda_exec& e);

// Accepts structs of older and newer headers: a shorter one is completed with zeros (defaults), a longer one must hold
// zeros where this library knows no fields. Checks exec, too.
template <class Args>
Args copy_args(const Args* args, uint64_t smallest = sizeof(Args)) {
  if (!args) invalid("args: expected a pointer, got NULL");
  uint64_t size;
  std::memcpy(&size, args, sizeof size);
  if (size < smallest || size > 65536)
    invalid("args.struct_size: expected ", sizeof(Args), " (sizeof the args struct), got ", size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(args);
  for (uint64_t i = sizeof(Args); i < size; ++i)
    if (bytes[i])
      invalid("args.struct_size: expected ", sizeof(Args), ", got ", size, " with fields set that this library (",
              kda_version(), ") does not know");
  Args copy{};
  std::memcpy(static_cast<void*>(&copy), args, std::min<uint64_t>(size, sizeof(Args)));
  check_exec(copy.exec);
  return copy;
}

}  // namespace kda
