// Tools of the contract: they check single tensors and the memory that tensors share. Errors are sentences.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "error.h"
#include "kda/kda.h"

namespace kda {

constexpr unsigned bit(int dtype) { return 1u << dtype; }
constexpr unsigned kFloats = bit(KDA_F32) | bit(KDA_BF16) | bit(KDA_F16) | bit(KDA_F64);
constexpr unsigned kStates = bit(KDA_F32) | bit(KDA_BF16) | bit(KDA_F64);
constexpr unsigned kSingles = bit(KDA_F32) | bit(KDA_F64);
constexpr unsigned kIndices = bit(KDA_I32) | bit(KDA_I64);

using Shape = std::array<int64_t, KDA_MAX_NDIM>;

std::string shape_text(const int64_t* shape, int ndim);

// Byte range [lo, hi) that a tensor can touch.
struct Extent {
  uintptr_t lo, hi;
};

// Checks tensors one by one and remembers them, so that outputs can be compared with everything else at the end.
class Tensors {
 public:
  // `like` says where the expected shape comes from, for the message.
  void check(const char* name, const kda_tensor& t, const Shape& shape, int ndim, unsigned dtypes, bool output,
             const char* like = "");
  // The same for tensors whose last dimension need not be dense.
  void check_any_stride(const char* name, const kda_tensor& t, const Shape& shape, int ndim, unsigned dtypes,
                        bool output, const char* like = "");
  // Checks everything but the shape.
  void check_storage(const char* name, const kda_tensor& t, unsigned dtypes, bool output);
  // Checks that no output shares memory with any other tensor, and no tensor with the workspace. Exceptions, as the
  // very same view: hT or snapshots may be h0, final_state may be initial_state, and checkpoints any of these. With
  // y_in_place, y may be x or gate.
  void check_aliasing(const kda_exec& exec, bool y_in_place = false) const;
  // Does any output have an element?
  bool write() const;

 private:
  void check_workspace(const kda_exec& exec) const;
  struct Seen {
    const char* name;
    const kda_tensor* tensor;
    Extent extent;
    bool output;
  };
  std::array<Seen, 40> seen_;  // kda_flush_verify has the most, 31 with a convolution
  int count_ = 0;
  bool any_stride_ = false;
};

// Checks what must hold even for an absent tensor: rank and sizes are in range, and there is no data without a rank.
void check_absent_is_empty(const char* name, const kda_tensor& t);

void check_range(const char* name, int32_t value, int32_t first, int32_t last);

// Accepts structs of older and newer headers: a shorter one is completed with zeros (defaults), a longer one must hold
// zeros where this library knows no fields.
template <class Args>
Args copy_args(const Args* args, uint64_t smallest) {
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
  return copy;
}

}  // namespace kda
