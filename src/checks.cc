#include "checks.h"

#include "dtype.h"

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

void Tensors::check(const char* name, const kda_tensor& t, const Shape& shape, int ndim, unsigned dtypes, bool output,
                    const char* like) {
  if (t.ndim != ndim)
    invalid(name, ": expected ", ndim, " dimensions ", shape_text(shape.data(), ndim), like, ", got ", t.ndim);
  if (!std::equal(t.shape, t.shape + ndim, shape.begin()))
    invalid(name, ": expected shape ", shape_text(shape.data(), ndim), like, ", got ", shape_text(t.shape, ndim));
  check_storage(name, t, dtypes, output);
}

void Tensors::check_any_stride(const char* name, const kda_tensor& t, const Shape& shape, int ndim, unsigned dtypes,
                               bool output, const char* like) {
  any_stride_ = true;
  check(name, t, shape, ndim, dtypes, output, like);
  any_stride_ = false;
}

void Tensors::check_storage(const char* name, const kda_tensor& t, unsigned dtypes, bool output) {
  if (t.dtype < KDA_F32 || t.dtype > KDA_BOOL || !(dtypes & bit(t.dtype)))
    invalid(name, ": expected ", dtypes_text(dtypes), ", got ", dtype_name(t.dtype));
  const Extent e = extent(name, t);
  if (e.lo == e.hi) return;  // no elements: nothing is read or written
  if (!t.data) invalid(name, ": expected memory, got NULL");
  if (reinterpret_cast<uintptr_t>(t.data) % dtype_size(t.dtype))
    invalid(name, ": expected data aligned to ", dtype_size(t.dtype), " bytes, got address ", t.data);
  if (t.shape[t.ndim - 1] > 1 && t.stride[t.ndim - 1] != 1 && !any_stride_)
    invalid(name, ": expected a dense last dimension (stride 1), got stride ", t.stride[t.ndim - 1]);
  if (output && writes_overlap_themselves(t))
    invalid(name, ": expected strides that keep elements apart, got ", shape_text(t.stride, t.ndim), " for shape ",
            shape_text(t.shape, t.ndim));
  seen_[count_++] = {name, &t, e, output};
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
    invalid("exec.workspace: expected memory of its own, got memory that overlaps ", s.name);
  }
}

bool Tensors::write() const {
  return std::any_of(seen_.begin(), seen_.begin() + count_, [](const Seen& s) { return s.output; });
}

void Tensors::check_aliasing(const kda_exec& exec, bool y_in_place) const {
  check_workspace(exec);
  for (int i = 0; i < count_; ++i) {
    if (!seen_[i].output) continue;
    for (int j = 0; j < count_; ++j) {
      if (i == j || (seen_[j].output && j < i)) continue;
      const kda_tensor &a = *seen_[i].tensor, &b = *seen_[j].tensor;
      if (seen_[i].extent.hi <= seen_[j].extent.lo || seen_[j].extent.hi <= seen_[i].extent.lo) continue;
      const auto pair = [&](const char* out, const char* in) {
        return !std::strcmp(seen_[i].name, out) && !std::strcmp(seen_[j].name, in);
      };
      const bool in_place = pair("hT", "h0") || pair("snapshots", "h0") || pair("final_state", "initial_state") ||
                            pair("checkpoints", "h0") || pair("checkpoints", "initial_state") ||
                            pair("hT", "checkpoints") || pair("final_state", "checkpoints") ||
                            (y_in_place && (pair("y", "x") || pair("y", "gate")));
      if ((in_place && same_view(a, b)) || !may_overlap(a, seen_[i].extent, b, seen_[j].extent)) continue;
      invalid(seen_[i].name, ": expected memory of its own, got memory that overlaps ", seen_[j].name,
              in_place ? " without being the same view" : "");
    }
  }
}

void check_absent_is_empty(const char* name, const kda_tensor& t) {
  if (t.ndim == 0 && t.data) invalid(name, ": expected ndim >= 1 with data, got ndim 0");
  if (t.ndim < 0 || t.ndim > KDA_MAX_NDIM)
    invalid(name, ": expected at most ", KDA_MAX_NDIM, " dimensions, got ", t.ndim);
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] < 0) invalid(name, ": expected sizes >= 0, got ", shape_text(t.shape, t.ndim));
}

void check_range(const char* name, int32_t value, int32_t first, int32_t last) {
  if (value < first || value > last) invalid(name, ": expected ", first, "..", last, ", got ", value);
}

}  // namespace kda
