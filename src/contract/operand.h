// An operand of an operator as plain data: where it is in the args struct, its shape, its dtypes, who may be absent,
// and what may be the same memory. Tables of operands are in tables.h. They need kda.h alone.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "dtypes.h"
#include "kda/kda.h"

namespace kda {

// The sizes of a call, by the names that shapes in the tables have for them. Any other name is a size that only its
// tensor has.
enum class Size : uint8_t {
  B,
  T,
  N,
  H,
  HV,
  K,
  V,
  C,
  D,
  W,
  M,
  P,
  kChunks,
  kChunk,
  kRead,
  kWritten,  // rows of the states that are read, that are written: N, or slots of a pool
  kSlots,
  kR,
  kLastSlots,
  kLastR,  // of records, of those of the last round
  kAny
};
constexpr int kSizes = static_cast<int>(Size::kAny);

// A dimension of a shape: a size plus a number (N+1, W-1).
struct Dimension {
  Size size = Size::kAny;
  int8_t plus = 0;
};

constexpr Dimension parse_dimension(std::string_view text) {
  constexpr std::string_view names[] = {"B",    "T", "N", "H", "HV", "K", "V", "C", "D", "W", "M", "P", "ceil(T/chunk)",
                                        "chunk"};
  Dimension d;
  if (text.size() > 2 && (text[text.size() - 2] == '+' || text[text.size() - 2] == '-')) {
    d.plus = static_cast<int8_t>((text[text.size() - 2] == '+' ? 1 : -1) * (text.back() - '0'));
    text.remove_suffix(2);
  }
  for (size_t i = 0; i < std::size(names); ++i)
    if (text == names[i]) return {static_cast<Size>(i), d.plus};
  return {};
}

enum class Type : uint8_t { kTensor, kInt, kFlag, kFloat, kDouble, kReserved };
enum class Role : uint8_t { kIn, kOut, kInOut };

constexpr uint16_t kNowhere = UINT16_MAX;

struct Operand {
  uint16_t offset = 0;  // in the args struct
  Type type = Type::kTensor;
  Role role = Role::kIn;
  uint8_t dtypes = 0;
  bool optional = false;
  bool any_strides = false;    // else the last dimension is dense
  bool state = false;          // [.., V, K], or [.., K, V] in the other layout
  bool layered = false;        // may have a dimension of layers in front
  bool checked_apart = false;  // its shape is checked by hand: it depends on more than sizes
  bool or_f64 = false;         // float64 whatever the dtype of `typed`, for the oracle
  bool trailing = false;       // Python's calls may leave it off at the end

  int8_t ndim = 0;
  std::array<Dimension, KDA_MAX_NDIM> shape{};
  // Other operands, named below. Tables fill in where they are.
  uint16_t needs_at = kNowhere, with_at = kNowhere, typed_at = kNowhere, may_be_at = kNowhere, or_be_at = kNowhere;
  int32_t least = INT32_MIN, most = INT32_MAX;  // of an integer

  const char* name = nullptr;        // in sentences, and Python's
  const char* group = "";            // the struct within args that has it, if any
  const char* member = nullptr;      // in that struct
  const char* shape_text = "";       // "[B,T,H,K]"
  const char* like = nullptr;        // where the shape comes from, in sentences; nullptr: " ([B,T,H,K])"
  const char* like_parts = nullptr;  // the same where x is in parts
  const char *needs = nullptr, *with = nullptr, *typed = nullptr, *may_be = nullptr, *or_be = nullptr;

  constexpr bool tensor() const { return type == Type::kTensor; }
  constexpr bool output() const { return role != Role::kIn; }
  constexpr bool has_tokens() const { return ndim > 2 && shape[0].size == Size::B; }

  // ---- for the tables ----
  template <class M>
  constexpr Operand set(M Operand::*field, std::type_identity_t<M> value) const {
    Operand o = *this;
    o.*field = value;
    return o;
  }
  constexpr Operand maybe() const { return set(&Operand::optional, true); }
  constexpr Operand out() const { return set(&Operand::role, Role::kOut); }
  constexpr Operand in_out() const { return set(&Operand::role, Role::kInOut); }
  constexpr Operand strided() const { return set(&Operand::any_strides, true); }
  constexpr Operand layers() const { return set(&Operand::layered, true); }
  constexpr Operand apart() const { return set(&Operand::checked_apart, true); }
  constexpr Operand called(const char* text) const { return set(&Operand::name, text); }
  constexpr Operand from(const char* text, const char* parts = nullptr) const {
    return set(&Operand::like, text).set(&Operand::like_parts, parts);
  }
  // Present only with that one. Without maybe(): exactly with that one.
  constexpr Operand need(const char* other) const { return set(&Operand::needs, other); }
  constexpr Operand together(const char* other) const { return set(&Operand::with, other).maybe(); }  // both or none
  constexpr Operand like_dtype(const char* other) const { return set(&Operand::typed, other); }
  constexpr Operand like_dtype_or_f64(const char* other) const { return like_dtype(other).set(&Operand::or_f64, true); }
  // The very same view as one of these, or memory of its own.
  constexpr Operand be(const char* other, const char* second = nullptr) const {
    return set(&Operand::may_be, other).set(&Operand::or_be, second);
  }
  constexpr Operand range(int32_t first, int32_t last) const {
    return set(&Operand::least, first).set(&Operand::most, last);
  }
  // Dimension i is a size of its own, or the given one, whatever its name.
  constexpr Operand size(int i, Size given = Size::kAny) const {
    Operand o = *this;
    o.shape[i] = {given, 0};
    return o;
  }
};

constexpr Operand tensor_at(const char* name, size_t offset, const char* shape, unsigned dtypes) {
  Operand o;
  o.name = o.member = name, o.offset = static_cast<uint16_t>(offset), o.dtypes = static_cast<uint8_t>(dtypes);
  o.shape_text = shape;
  std::string_view text(shape);
  text.remove_prefix(1), text.remove_suffix(1);
  for (;;) {
    const size_t comma = text.find(',');
    o.shape[o.ndim++] = parse_dimension(text.substr(0, comma));
    if (comma == text.npos) break;
    text.remove_prefix(comma + 1);
  }
  o.state = std::string_view(shape).ends_with("HV,V,K]");
  return o;
}
constexpr Operand scalar_at(const char* name, size_t offset, Type type) {
  Operand o;
  o.name = o.member = name, o.offset = static_cast<uint16_t>(offset), o.type = type;
  if (type == Type::kReserved) o.least = o.most = 0;
  return o;
}

// ---- joining tables ----

template <size_t N>
using Operands = std::array<Operand, N>;

// The operands of a struct within args, at `offset`.
template <size_t N>
constexpr Operands<N> group_at(const char* name, size_t offset, Operands<N> group) {
  for (Operand& o : group) o.group = name, o.offset = static_cast<uint16_t>(o.offset + offset);
  return group;
}

// From here on operands may be left off at the end of Python's calls.
template <size_t N>
constexpr Operands<N> trailing(Operands<N> group) {
  for (Operand& o : group) o.trailing = true;
  return group;
}

// Joins groups, and finds the operands that others name.
template <size_t... N>
constexpr auto joined(const Operands<N>&... groups) {
  Operands<(N + ...)> all{};
  size_t next = 0;
  (
      [&] {
        for (const Operand& o : groups) all[next++] = o;
      }(),
      ...);
  const auto find = [&](const char* name) {
    if (!name) return kNowhere;
    std::string_view text(name);  // "a pool hT" is hT
    if (const size_t space = text.rfind(' '); space != text.npos) text.remove_prefix(space + 1);
    for (const Operand& o : all)
      if (o.name == text) return o.offset;
    throw "a table names an operand that it does not have";  // does not compile
  };
  for (Operand& o : all) {
    o.needs_at = find(o.needs), o.with_at = find(o.with), o.typed_at = find(o.typed);
    o.may_be_at = find(o.may_be), o.or_be_at = find(o.or_be);
  }
  return all;
}

}  // namespace kda
