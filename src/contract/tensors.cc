#include "contract/tensors.h"

#include "contract/dtype.h"

namespace kda {

std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += str(i ? "," : "", shape[i]);
  return text + "]";
}

namespace {

// Names float64, which only `reference` takes, only where nothing else is allowed.
std::string dtypes_text(unsigned allowed) {
  std::string text;
  if (allowed != bit(KDA_F64)) allowed &= ~bit(KDA_F64);
  for (int d = KDA_F32; d <= KDA_BOOL; ++d)
    if (allowed & bit(d)) text += str(text.empty() ? "" : " or ", dtype_name(d));
  return text;
}

Extent extent(const char* name, const kda_tensor& t) {
  const int64_t size = dtype_size(t.dtype);
  __int128 lo = 0, hi = size;
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] == 0) return {0, 0};
  // (Counted in bytes, a single product could pass 2^127.)
  constexpr __int128 kLimit = __int128{1} << 61;
  bool within = true;
  for (int i = 0; within && i < t.ndim; ++i) {
    const __int128 reach = static_cast<__int128>(t.shape[i] - 1) * t.stride[i];
    within = reach <= kLimit && reach >= -kLimit;
    if (within) (reach < 0 ? lo : hi) += reach * size;
  }
  if (!within || hi > kLimit || lo < -kLimit)
    invalid(name, ": expected an extent below 2^61 bytes, got shape ", shape_text(t.shape, t.ndim), " with strides ",
            shape_text(t.stride, t.ndim));
  const auto base = reinterpret_cast<uintptr_t>(t.data);
  return {base + static_cast<uintptr_t>(lo), base + static_cast<uintptr_t>(hi)};
}

// Returns the bytes that one period of a tensor spans, if it repeats with this pitch (bytes) without running into
// itself; else -1.
int64_t span_within(const kda_tensor& t, int64_t pitch) {
  const int64_t size = dtype_size(t.dtype);
  int64_t span = size;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] <= 1) continue;  // its stride may be any number
    const int64_t stride = std::abs(t.stride[i]) * size;
    if (stride >= pitch && stride % pitch == 0) continue;
    span += (t.shape[i] - 1) * stride;
  }
  return span <= pitch ? span : -1;
}

// May a and b, whose ranges overlap, share memory? Exact for interleaved slices of one buffer (q, k, v cut from a
// fused projection: the same row pitch, different columns); otherwise errs towards yes.
bool may_overlap(const kda_tensor& a, const Extent& ea, const kda_tensor& b, const Extent& eb) {
  for (int i = 0; i < a.ndim; ++i) {
    if (a.shape[i] <= 1 || a.stride[i] == 0) continue;
    const int64_t pitch = std::abs(a.stride[i]) * dtype_size(a.dtype);
    const int64_t span_a = span_within(a, pitch), span_b = span_within(b, pitch);
    if (span_a < 0 || span_b < 0) continue;
    const int64_t delta = static_cast<int64_t>(eb.lo - ea.lo) % pitch;
    const int64_t offset = delta < 0 ? delta + pitch : delta;
    if (offset >= span_a && offset + span_b <= pitch) return false;
  }
  return true;
}

bool writes_overlap_themselves(const kda_tensor& t) {
  // From the smallest stride up, each dimension must step over all that the smaller ones span.
  int64_t span = 1;
  for (unsigned done = 0;;) {
    int next = -1;
    for (int i = 0; i < t.ndim; ++i)
      if (t.shape[i] > 1 && !(done & bit(i)) && (next < 0 || std::abs(t.stride[i]) < std::abs(t.stride[next])))
        next = i;
    if (next < 0) return false;
    if (std::abs(t.stride[next]) < span) return true;
    span += (t.shape[next] - 1) * std::abs(t.stride[next]);
    done |= bit(next);
  }
}

bool same_view(const kda_tensor& a, const kda_tensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape) &&
         std::equal(a.stride, a.stride + a.ndim, b.stride);
}

}  // namespace

// The shape in letters, for sentences. A pool has any number of rows.
std::string Tensors::shape_of(const Operand& o, const char* rows) const {
  const std::string text = o.shape_text;
  const Size first = o.shape[0].size;
  const bool any = size(o, 0) == kUnknown && (o.state || first == Size::kRead || first == Size::kWritten);
  return any ? std::string("[") + rows + text.substr(text.find(',')) : text;
}

// Where a shape comes from.
std::string Tensors::like(const Operand& o) const {
  if (o.state) return k_first ? " ([..,HV,K,V], K-first)" : " ([..,HV,V,K], V-first)";
  if (o.like) return in_parts && o.like_parts ? o.like_parts : o.like;
  return " (" + shape_of(o, "slots") + ")";
}

unsigned Tensors::dtypes(const Operand& o) const {
  if (o.typed_at == kNowhere) return o.dtypes;
  const unsigned same = bit(at(o.typed_at).dtype);
  return !o.or_f64 ? same : same == bit(KDA_F64) ? kFloats : same | bit(KDA_F64);
}

void Tensors::check_form(const char* name, const kda_tensor& t) {
  if (t.ndim == 0 && t.data) invalid(name, ": expected ndim >= 1 with data, got ndim 0");
  if (t.ndim < 0 || t.ndim > KDA_MAX_NDIM)
    invalid(name, ": expected at most ", KDA_MAX_NDIM, " dimensions, got ", t.ndim);
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] < 0) invalid(name, ": expected sizes >= 0, got ", shape_text(t.shape, t.ndim));
}

void Tensors::check_company(const Operand& o, const kda_tensor& t) const {
  if (o.needs_at != kNowhere && present(t) && !present(at(o.needs_at)))
    invalid(o.name, ": expected ", o.needs, " with it, got none");
  if (o.with_at != kNowhere && present(t) != present(at(o.with_at)))
    invalid(o.name, ": expected together with ", o.with, ", got ", present(t) ? o.name : o.with, " alone");
}

void Tensors::check_rank(const kda_tensor& t, const char* rows) const {
  const Operand& o = row(&t);
  const int ndim = o.ndim + leads(o);
  if (t.ndim != ndim)
    invalid(o.name, ": expected ", ndim, ndim == 1 ? " dimension " : " dimensions ", leads(o) ? "[layers," : "[",
            shape_of(o, rows).substr(1), ", got ", t.ndim);
}

void Tensors::bind(const kda_tensor& t, const char* rows) {
  check_rank(t, rows);
  const Operand& o = row(&t);
  if (o.state) return;
  for (int i = 0; i < o.ndim; ++i)
    if (const int size = static_cast<int>(o.shape[i].size); sizes_[size] == kUnknown && o.shape[i].size != Size::kAny)
      sizes_[size] = t.shape[i], from_[size] = o.name;
}

void Tensors::check_heads(bool grouped) const {
  const auto size = [&](Size s) { return sizes_[static_cast<int>(s)]; };
  for (const Size s : {Size::K, Size::V})
    if (from(s) && (size(s) < 1 || size(s) > kMaxSize))
      invalid(from(s), ": expected ", s == Size::K ? "K" : "V", " in 1..", kMaxSize, ", got ", size(s));
  const int64_t H = size(Size::H), HV = size(Size::HV);
  if (from(Size::H) && H < 1) invalid(from(Size::H), ": expected H >= 1, got ", H);
  if (HV < 1 && !grouped) invalid(from(Size::HV), ": expected HV >= 1, got ", HV);
  if (from(Size::H) && (HV < 1 || HV % H)) invalid(from(Size::HV), ": expected HV a multiple of H = ", H, ", got ", HV);
}

void Tensors::check_one(int32_t value, const Operand& o) const {
  if (value >= o.least && value <= o.most) return;
  if (o.least == o.most) invalid(o.name, ": expected ", o.least, ", got ", value);
  if (o.most == INT32_MAX) invalid(o.name, ": expected >= ", o.least, ", got ", value);
  invalid(o.name, ": expected ", o.least, "..", o.most, ", got ", value);
}

bool Tensors::fits(const kda_tensor& t, const Operand& o) const {
  const int lead = leads(o), swapped = o.state && k_first ? o.ndim - 2 : o.ndim;  // from there on: V and K
  bool same = t.ndim == o.ndim + lead && (!lead || t.shape[0] == layers);
  for (int i = 0; same && i < o.ndim; ++i) {
    const int64_t bound = size(o, i);
    const int at = i < swapped ? i : 2 * o.ndim - 3 - i;
    same = bound == kUnknown || t.shape[lead + at] == bound + o.shape[i].plus;
  }
  return same;
}

void Tensors::refuse_shape(const kda_tensor& t, const Operand& o) const {
  const int lead = leads(o), ndim = o.ndim + lead;
  Shape shape{layers};
  bool known = true;
  for (int i = 0; i < o.ndim; ++i) {
    known &= size(o, i) != kUnknown;
    shape[lead + i] = size(o, i) != kUnknown ? size(o, i) + o.shape[i].plus : t.ndim == ndim ? t.shape[lead + i] : 0;
  }
  if (o.state && k_first) std::swap(shape[ndim - 1], shape[ndim - 2]);
  if (t.ndim != ndim && !known && !o.like) check_rank(t);
  if (t.ndim != ndim)
    invalid(o.name, ": expected ", ndim, " dimensions ", shape_text(shape.data(), ndim), like(o), ", got ", t.ndim);
  invalid(o.name, ": expected shape ", shape_text(shape.data(), ndim), like(o), ", got ", shape_text(t.shape, ndim));
}

void Tensors::check_storage(const kda_tensor& t, const Operand& o) {
  if (t.dtype < KDA_F32 || t.dtype > KDA_BOOL || !(dtypes(o) & bit(t.dtype)))
    invalid(o.name, ": expected ", dtypes_text(dtypes(o)), ", got ", dtype_name(t.dtype));
  const Extent e = extent(o.name, t);
  if (e.lo == e.hi) return;  // no elements: nothing is read or written
  if (!t.data) invalid(o.name, ": expected memory, got NULL");
  if (reinterpret_cast<uintptr_t>(t.data) % dtype_size(t.dtype))
    invalid(o.name, ": expected data aligned to ", dtype_size(t.dtype), " bytes, got address ", t.data);
  if (t.shape[t.ndim - 1] > 1 && t.stride[t.ndim - 1] != 1 && !o.any_strides)
    invalid(o.name, ": expected a dense last dimension (stride 1), got stride ", t.stride[t.ndim - 1]);
  if (o.output() && writes_overlap_themselves(t))
    invalid(o.name, ": expected strides that keep elements apart, got ", shape_text(t.stride, t.ndim), " for shape ",
            shape_text(t.shape, t.ndim));
  seen_[count_++] = {&o, &t, e};
}

// Kernels write anywhere in the workspace, however little of it they need.
void Tensors::check_workspace(const kda_exec& exec) const {
  if (exec.workspace_bytes == 0) return;
  constexpr uint64_t kLimit = uint64_t{1} << 62;
  const auto base = reinterpret_cast<uintptr_t>(exec.workspace);
  if (exec.workspace_bytes > kLimit || base > UINTPTR_MAX - exec.workspace_bytes)
    invalid("exec.workspace_bytes: expected at most 2^62 from its address on, got ", exec.workspace_bytes);
  const Extent extent{base, base + exec.workspace_bytes};
  const auto bytes = static_cast<int64_t>(exec.workspace_bytes);
  const kda_tensor memory{exec.workspace, KDA_BOOL, 1, {bytes}, {1}};
  for (int i = 0; i < count_; ++i) {
    const Seen& s = seen_[i];
    if (extent.hi <= s.extent.lo || s.extent.hi <= extent.lo || !may_overlap(*s.tensor, s.extent, memory, extent))
      continue;
    invalid("exec.workspace: expected memory of its own, got memory that overlaps ", s.row->name);
  }
}

bool Tensors::write() const {
  return std::any_of(seen_.begin(), seen_.begin() + count_, [](const Seen& s) { return s.row->output(); });
}

void Tensors::check_aliasing(const kda_exec& exec) const {
  check_workspace(exec);
  const auto may_be = [](const Operand& out, const Operand& other) {
    return out.may_be_at == other.offset || out.or_be_at == other.offset;
  };
  for (int i = 0; i < count_; ++i) {
    const Seen& out = seen_[i];
    if (!out.row->output()) continue;
    for (int j = 0; j < count_; ++j) {
      const Seen& other = seen_[j];
      if (i == j || (other.row->output() && j < i)) continue;
      if (out.extent.hi <= other.extent.lo || other.extent.hi <= out.extent.lo) continue;
      const bool in_place = may_be(*out.row, *other.row) || may_be(*other.row, *out.row);
      const kda_tensor &a = *out.tensor, &b = *other.tensor;
      if ((in_place && same_view(a, b)) || !may_overlap(a, out.extent, b, other.extent)) continue;
      invalid(out.row->name, ": expected memory of its own, got memory that overlaps ", other.row->name,
              in_place ? " without being the same view" : "");
    }
  }
}

}  // namespace kda
