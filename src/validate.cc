#include "validate.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <span>

#include "dtype.h"

namespace kda {

void check_exec(const kda_exec& e) {
  check_range("exec.device", e.device, KDA_CPU, KDA_CUDA);
  if (e.device == KDA_CPU && e.device_id != 0) invalid("exec.device_id: expected 0 on the CPU, got ", e.device_id);
  if (e.device_id < 0) invalid("exec.device_id: expected >= 0, got ", e.device_id);
  if (e.num_threads < 0) invalid("exec.num_threads: expected >= 0, got ", e.num_threads);
  if (e.flags & ~KDA_BATCH_INVARIANT) invalid("exec.flags: expected 0 or KDA_BATCH_INVARIANT, got ", e.flags);
  if (!e.workspace && e.workspace_bytes) invalid("exec.workspace: expected ", e.workspace_bytes, " bytes, got NULL");
  if (reinterpret_cast<uintptr_t>(e.workspace) % 256)
    invalid("exec.workspace: expected an address aligned to 256, got ", e.workspace);
}

void check_sizes(const char* name, const Dims& d, int64_t layers) {
  if (!product_within(kMaxPairs, {d.B, d.T, d.HV}) || !product_within(kMaxPairs, {layers, d.N, d.HV}))
    invalid(name, ": expected B T HV and N HV of at most 2^40, got B = ", d.B, ", T = ", d.T, ", N = ", d.N,
            ", HV = ", d.HV, layers > 1 ? str(" in ", layers, " layers") : "");
}

namespace {

// Checks memory and the number of tasks, of which each sequence has `heads`. Returns true if nothing is written.
bool finish(const Tensors& tensors, const kda_exec& exec, int64_t layers, int64_t N, int64_t heads) {
  tensors.check_aliasing(exec);
  if (!tensors.write()) return true;
  if (!product_within(kMaxTasks, {layers, N, heads}))
    invalid("sizes: expected at most 2^32 sequences times heads, got ", layers * N, " times ", heads);
  return false;
}

}  // namespace

void check_memory(const Tensors& tensors, const kda_exec& exec, Dims& d, int64_t layers) {
  d.idle = finish(tensors, exec, layers, d.N, d.HV);
}
void check_memory(const Tensors& tensors, const kda_exec& exec, ConvDims& d) {
  d.idle = finish(tensors, exec, 1, d.N, divide_up(d.D, 256));
}

void check_gate(int32_t form, float lower_bound, bool has_A_log, bool has_dt_bias, int32_t first_form) {
  check_range("gate_form", form, first_form, KDA_GATE_LOWER_BOUND);
  if (form == KDA_GATE_SOFTPLUS && !has_A_log) invalid("A_log: expected [HV] with the softplus gate, got none");
  if (form == KDA_GATE_LOG && has_A_log) invalid("A_log: expected none when g is already the decay, got one");
  if (form == KDA_GATE_LOG && has_dt_bias) invalid("dt_bias: expected none when g is already the decay, got one");
  if (form == KDA_GATE_LOWER_BOUND && !(std::isfinite(lower_bound) && lower_bound < 0))
    invalid("lower_bound: expected a finite number < 0, got ", lower_bound);
}

void check_packing(const kda_tensor& cu_seqlens, Dims& d, Tensors& tensors) {
  d.varlen = present(cu_seqlens);
  d.N = d.varlen ? cu_seqlens.shape[0] - 1 : d.B;
  if (!d.varlen) return;
  if (d.B != 1) invalid("cu_seqlens: expected one row of packed sequences (B = 1), got B = ", d.B);
  if (cu_seqlens.ndim != 1 || cu_seqlens.shape[0] < 1)
    invalid("cu_seqlens: expected shape [N+1], got ", shape_text(cu_seqlens.shape, cu_seqlens.ndim));
  if (d.N > kMaxSequences) invalid("cu_seqlens: expected at most 2^31 - 1 sequences, got ", d.N);
  tensors.check_storage("cu_seqlens", cu_seqlens, kIndices, false);
}

namespace {

// raw: q, k and v have shapes, but no memory yet.
Dims check_inputs(const kda_inputs& in, Tensors& tensors, bool raw) {
  const std::pair<const char*, const kda_tensor*> all[] = {{"q", &in.q},
                                                           {"k", &in.k},
                                                           {"v", &in.v},
                                                           {"g", &in.g},
                                                           {"beta", &in.beta},
                                                           {"A_log", &in.A_log},
                                                           {"dt_bias", &in.dt_bias},
                                                           {"cu_seqlens", &in.cu_seqlens}};
  for (const auto& [name, t] : all) check_absent_is_empty(name, *t);
  if (in.q.ndim != 4) invalid("q: expected 4 dimensions [B,T,H,K], got ", in.q.ndim);
  if (in.v.ndim != 4) invalid("v: expected 4 dimensions [B,T,HV,V], got ", in.v.ndim);
  Dims d{};
  d.B = in.q.shape[0], d.T = in.q.shape[1], d.H = in.q.shape[2], d.K = in.q.shape[3];
  d.HV = in.v.shape[2], d.V = in.v.shape[3];
  if (d.K < 1 || d.K > kMaxSize) invalid("q: expected K in 1..", kMaxSize, ", got ", d.K);
  if (d.V < 1 || d.V > kMaxSize) invalid("v: expected V in 1..", kMaxSize, ", got ", d.V);
  if (d.H < 1) invalid("q: expected H >= 1, got ", d.H);
  if (d.HV < 1 || d.HV % d.H) invalid("v: expected HV a multiple of H = ", d.H, ", got ", d.HV);

  if (!raw) {
    tensors.check("q", in.q, {d.B, d.T, d.H, d.K}, 4, kFloats, false);
    tensors.check("k", in.k, {d.B, d.T, d.H, d.K}, 4, bit(in.q.dtype), false, " like q");
    tensors.check("v", in.v, {d.B, d.T, d.HV, d.V}, 4, bit(in.q.dtype), false, " ([B,T] like q)");
  }
  tensors.check("g", in.g, {d.B, d.T, d.HV, d.K}, 4, kFloats, false, " ([B,T,HV,K] of q and v)");
  tensors.check_any_stride("beta", in.beta, {d.B, d.T, d.HV}, 3, kFloats, false, " ([B,T,HV] of q and v)");
  check_gate(in.gate_form, in.lower_bound, present(in.A_log), present(in.dt_bias), KDA_GATE_LOG);
  if (present(in.A_log)) tensors.check("A_log", in.A_log, {d.HV}, 1, kSingles, false, " ([HV] of v)");
  if (present(in.dt_bias))
    tensors.check("dt_bias", in.dt_bias, {d.HV, d.K}, 2, kSingles, false, " ([HV,K] of q and v)");
  check_packing(in.cu_seqlens, d, tensors);
  check_sizes("q", d);
  check_range("beta_form", in.beta_form, KDA_BETA_ACTIVATED, KDA_BETA_2SIGMOID);
  check_range("state_layout", in.state_layout, KDA_STATE_V_FIRST, KDA_STATE_K_FIRST);
  if (!std::isfinite(in.scale)) invalid("scale: expected a finite number, got ", in.scale);
  return d;
}

}  // namespace

Dims check_inputs(const kda_inputs& in, Tensors& tensors) { return check_inputs(in, tensors, false); }

Dims check_inputs(kda_inputs& in, const kda_conv_inputs& conv, const kda_tensor& o, bool state_out, Tensors& tensors) {
  const std::pair<const char*, const kda_tensor*> all[] = {{"conv.x", &conv.x},
                                                           {"conv.weight", &conv.weight},
                                                           {"conv.bias", &conv.bias},
                                                           {"conv.state", &conv.state},
                                                           {"conv.indices", &conv.indices},
                                                           {"o", &o},
                                                           {"g", &in.g}};
  for (const auto& [name, t] : all) check_absent_is_empty(name, *t);
  if (!present(conv.x)) {
    for (const auto& [name, t] : std::span(all, 5))
      if (present(*t)) invalid(name, ": expected conv.x with it, got none");
    return check_inputs(in, tensors, false);
  }
  for (const auto& [name, t] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}})
    if (present(*t)) invalid(name, ": expected none with conv.x, which holds it, got one");
  if (conv.x.ndim != 3) invalid("conv.x: expected 3 dimensions [B,T,D], got ", conv.x.ndim);
  if (in.g.ndim != 4) invalid("g: expected 4 dimensions [B,T,HV,K], got ", in.g.ndim);
  if (o.ndim != 4) invalid("o: expected 4 dimensions [B,T,HV,V], got ", o.ndim);
  const int64_t B = conv.x.shape[0], T = conv.x.shape[1], D = conv.x.shape[2];
  const int64_t HV = in.g.shape[2], K = in.g.shape[3], V = o.shape[3], most = kMaxChannels;
  if (K < 1 || K > kMaxSize) invalid("g: expected K in 1..", kMaxSize, ", got ", K);
  if (V < 1 || V > kMaxSize) invalid("o: expected V in 1..", kMaxSize, ", got ", V);
  if (HV < 1) invalid("g: expected HV >= 1, got ", HV);
  if (!product_within(most, {B, T, D}) || HV > kMaxPairs)
    invalid("conv.x: expected B T D of at most 2^48, got shape ", shape_text(conv.x.shape, 3), " and HV = ", HV);
  const int64_t rest = D - HV * V;
  if (rest < 2 * K || rest % (2 * K))
    invalid("conv.x: expected D = 2 H K + HV V channels with K = ", K, " and HV V = ", HV * V, ", got ", D);
  tensors.check_storage("conv.x", conv.x, kFloats, false);
  const int64_t H = rest / (2 * K);
  in.q = in.k = {nullptr, conv.x.dtype, 4, {B, T, H, K}, {T * D, D, K, 1}};
  in.v = {nullptr, conv.x.dtype, 4, {B, T, HV, V}, {T * D, D, V, 1}};
  const Dims d = check_inputs(in, tensors, true);
  if (conv.weight.ndim != 2 || conv.weight.shape[1] < 2 || conv.weight.shape[1] > kMaxConvWidth)
    invalid("conv.weight: expected shape [D,W] with W in 2..", kMaxConvWidth, ", got ",
            shape_text(conv.weight.shape, conv.weight.ndim));
  const int64_t W = conv.weight.shape[1];
  tensors.check("conv.weight", conv.weight, {D, W}, 2, kFloats, false, " ([D,W])");
  if (present(conv.bias)) tensors.check("conv.bias", conv.bias, {D}, 1, kFloats, false, " ([D])");
  if (conv.state.ndim != 3) invalid("conv.state: expected 3 dimensions [slots,D,W-1], got ", conv.state.ndim);
  const int64_t slots = conv.state.shape[0];
  tensors.check_any_stride("conv.state", conv.state, {slots, D, W - 1}, 3, kFloats, state_out, " ([slots,D,W-1])");
  if (present(conv.indices))
    tensors.check_any_stride("conv.indices", conv.indices, {d.N}, 1, kIndices, false, " ([N])");
  else if (slots < d.N) invalid("conv.state: expected at least N = ", d.N, " slots without indices, got ", slots);
  return d;
}

void slice_convolved(kda_inputs& in, void* rows) {
  auto* p = static_cast<char*>(rows);
  for (kda_tensor* t : {&in.q, &in.k, &in.v}) {
    t->data = p;
    p += t->shape[2] * t->shape[3] * dtype_size(t->dtype);
  }
}

void check_state(const char* name, const kda_tensor& t, int64_t rows, const Dims& d, const kda_inputs& in,
                 Tensors& tensors, bool output, unsigned dtypes) {
  const bool v_first = in.state_layout == KDA_STATE_V_FIRST;
  tensors.check(name, t, {rows, d.HV, v_first ? d.V : d.K, v_first ? d.K : d.V}, 4, dtypes, output,
                v_first ? " ([..,HV,V,K], V-first)" : " ([..,HV,K,V], K-first)");
}

int64_t rows_of(const char* name, const kda_tensor& t) {
  check_absent_is_empty(name, t);
  if (t.ndim != 4) invalid(name, ": expected 4 dimensions [slots,HV,V,K], got ", t.ndim);
  return t.shape[0];
}

void check_states(const kda_states& s, const Dims& d, const kda_inputs& in, Tensors& tensors) {
  check_states(s, {}, d, in, tensors);
}

void check_states(const kda_states& s, const kda_tensor& out_state_indices, const Dims& d, const kda_inputs& in,
                  Tensors& tensors, bool pool) {
  for (const auto& [name, t] : {std::pair{"h0", &s.h0},
                                {"hT", &s.hT},
                                {"state_indices", &s.state_indices},
                                {"has_initial_state", &s.has_initial_state},
                                {"out_state_indices", &out_state_indices}})
    check_absent_is_empty(name, *t);
  const bool indexed = present(s.state_indices), apart = present(out_state_indices);
  pool |= indexed;
  if (indexed && !present(s.h0) && !present(s.hT))
    invalid("state_indices: expected a pool h0 or hT with it, got neither");
  if (present(s.h0)) check_state("h0", s.h0, pool ? rows_of("h0", s.h0) : d.N, d, in, tensors, false);
  if (apart && !present(s.hT)) invalid("out_state_indices: expected a pool hT with it, got none");
  if (present(s.hT)) check_state("hT", s.hT, pool || apart ? rows_of("hT", s.hT) : d.N, d, in, tensors, true);
  if (apart) tensors.check_any_stride("out_state_indices", out_state_indices, {d.N}, 1, kIndices, false, " ([N])");
  else if (pool && present(s.h0) && present(s.hT) && s.h0.shape[0] != s.hT.shape[0])
    invalid("hT: expected as many slots as h0, ", s.h0.shape[0], ", got ", s.hT.shape[0]);
  if (indexed) tensors.check_any_stride("state_indices", s.state_indices, {d.N}, 1, kIndices, false, " ([N])");
  if (present(s.has_initial_state)) {
    if (!present(s.h0)) invalid("has_initial_state: expected h0 with it, got none");
    tensors.check_any_stride("has_initial_state", s.has_initial_state, {d.N}, 1, bit(KDA_BOOL), false, " ([N])");
  }
  if (s.first_valid_slot < 0) invalid("first_valid_slot: expected >= 0, got ", s.first_valid_slot);
  if (s.reserved) invalid("states.reserved: expected 0, got ", s.reserved);
}

void check_checkpoints(const kda_tensor& checkpoints, const kda_tensor& slots, const kda_tensor& offset, int32_t every,
                       int64_t N, Tensors& tensors) {
  for (const auto& [name, t] : {std::pair{"checkpoint_slots", &slots}, {"checkpoint_offset", &offset}})
    check_absent_is_empty(name, *t);
  if (present(checkpoints) != present(slots))
    invalid("checkpoint_slots: expected together with checkpoints, got ",
            present(checkpoints) ? "checkpoints" : "checkpoint_slots", " alone");
  if (!present(checkpoints)) {
    if (present(offset)) invalid("checkpoint_offset: expected none without checkpoints, got one");
    if (every) invalid("checkpoint_every: expected 0 without checkpoints, got ", every);
    return;
  }
  if (slots.ndim != 2 || slots.shape[0] != N)
    invalid("checkpoint_slots: expected shape [N,M] with N = ", N, ", got ", shape_text(slots.shape, slots.ndim));
  tensors.check_storage("checkpoint_slots", slots, kIndices, false);
  if (present(offset)) tensors.check_any_stride("checkpoint_offset", offset, {N}, 1, kIndices, false, " ([N])");
  if (every < 1 || every % kCheckpointStep)
    invalid("checkpoint_every: expected a positive multiple of ", kCheckpointStep, ", got ", every);
}

bool any_f64(std::initializer_list<const kda_tensor*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const kda_tensor* t) { return present(*t) && t->dtype == KDA_F64; });
}
bool any_f64(const kda_inputs& in) {
  return any_f64({&in.q, &in.v, &in.g, &in.beta, &in.A_log, &in.dt_bias});
}  // k is like q
bool any_f64(const kda_conv_inputs& conv) { return any_f64({&conv.x, &conv.weight, &conv.bias, &conv.state}); }
bool any_f64(const kda_norm_inputs& norm) { return any_f64({&norm.gate, &norm.weight}); }

void check_cu_seqlens(const kda_tensor& cu_seqlens, int64_t T) {
  if (!present(cu_seqlens)) return;
  const int64_t N = cu_seqlens.shape[0] - 1;
  if (const int64_t first = int_at(cu_seqlens, 0)) invalid("cu_seqlens[0]: expected 0, got ", first);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t begin = int_at(cu_seqlens, n), end = int_at(cu_seqlens, n + 1);
    if (end < begin) invalid("cu_seqlens[", n + 1, "]: expected at least ", begin, " (never decreasing), got ", end);
  }
  if (const int64_t last = int_at(cu_seqlens, N); last > T)
    invalid("cu_seqlens[", N, "]: expected at most T = ", T, ", got ", last);
}
void check_cu_seqlens(const Dims& d, const kda_inputs& in) { check_cu_seqlens(in.cu_seqlens, d.T); }

void check_width(const char* name, const kda_tensor& indices) {
  if (!present(indices) || indices.dtype != KDA_I64) return;
  const int64_t columns = indices.ndim > 1 ? indices.shape[1] : 1;
  for (int64_t i = 0; i < indices.shape[0]; ++i)
    for (int64_t j = 0; j < columns; ++j)
      if (const int64_t x = int_at(indices, i, j); x != static_cast<int32_t>(x))
        invalid(name, ": expected integers of 32 bits, got ", x);
}

void check_slots(const char* name, const kda_tensor& indices, int64_t first_valid, int64_t slots, bool once,
                 const kda_states* requests) {
  check_width(name, indices);
  // With a stride of 0 all rows are the same: two of them show all that any number would.
  const int64_t rows = std::min<int64_t>(indices.shape[0], indices.stride[0] ? INT64_MAX : 2);
  const int64_t columns = indices.ndim > 1 ? indices.shape[1] : 1, count = rows * columns;
  auto at = [&](int64_t i) { return int_at(indices, i / columns, i % columns); };
  auto repeated = [&](int64_t slot) { invalid(name, ": expected every live slot once, got slot ", slot, " twice"); };
  for (int64_t i = 0; i < count; ++i)
    if (at(i) >= slots) invalid(name, ": expected slots below ", slots, ", got ", at(i));
  if (!once) return;
  const auto live = [&](int64_t i) {
    if (!requests || !present(requests->state_indices)) return true;
    return int_at(requests->state_indices, i / columns) >= requests->first_valid_slot;
  };
  if (count <= 32) {  // the usual decode step
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < i; ++j)
        if (at(i) == at(j) && at(i) >= first_valid && live(i) && live(j)) repeated(at(i));
    return;
  }
  // One bit per slot, for a window of slots at a time: no allocation, whatever the size of the pool. The next window
  // begins with the smallest slot in use beyond this one, so that none is empty.
  constexpr int64_t kWindow = int64_t{1} << 17;
  std::bitset<kWindow> seen;
  for (int64_t begin = first_valid, next; begin < slots; begin = next) {
    seen.reset();
    next = slots;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = at(i) - begin;
      if (slot < 0 || !live(i)) continue;
      if (slot >= kWindow) {
        next = std::min(next, at(i));
        continue;
      }
      if (seen.test(slot)) repeated(at(i));
      seen.set(slot);
    }
  }
}

void check_written_slots(const SlotPairs& p) {
  const auto read = [&](int64_t n) { return present(p.read) ? int_at(p.read, n) : n; };
  const auto live = [&](int64_t n) { return !present(p.read) || read(n) >= p.first_valid; };
  const auto reads = [&](int64_t n) {
    return p.one_pool && live(n) && (!present(p.has_initial) || int_at(p.has_initial, n));
  };
  const auto written = [&](int64_t n) { return live(n) ? int_at(p.written, n) : -1; };
  check_width("out_state_indices", p.written);
  for (int64_t n = 0; n < p.N; ++n)
    if (written(n) >= p.slots)
      invalid("out_state_indices: expected slots below ", p.slots, ", got ", int_at(p.written, n));
  constexpr int64_t kWindow = int64_t{1} << 17;  // as in check_slots
  std::bitset<kWindow> seen;
  for (int64_t begin = p.first_valid, next; begin < p.slots; begin = next) {
    seen.reset();
    next = p.slots;
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t slot = written(n) - begin;
      if (slot >= kWindow) next = std::min(next, written(n));
      if (slot < 0 || slot >= kWindow) continue;
      if (seen.test(slot)) invalid("out_state_indices: expected every live slot once, got slot ", written(n), " twice");
      seen.set(slot);
    }
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t slot = reads(n) ? read(n) - begin : -1;
      if (slot >= 0 && slot < kWindow && seen.test(slot) && written(n) != read(n))
        invalid("out_state_indices: expected no slot that another sequence reads, got slot ", read(n),
                ", which sequence ", n, " reads");
    }
  }
}

void check_checkpoints_data(const kda_tensor& checkpoints, const kda_tensor& slots, const kda_tensor& offset,
                            const SlotPairs& p, bool reads_pool, bool writes_pool) {
  if (!present(checkpoints)) return;
  check_slots("checkpoint_slots", slots, p.first_valid, checkpoints.shape[0]);
  check_width("checkpoint_offset", offset);
  for (int64_t n = 0; present(offset) && n < p.N; ++n)
    if (const int64_t before = int_at(offset, n); before < 0)
      invalid("checkpoint_offset: expected numbers >= 0, got ", before);
  if (!reads_pool && !writes_pool) return;
  const auto own = [&](int64_t n) { return present(p.read) ? int_at(p.read, n) : n; };
  const auto refuse_used = [&](int64_t slot) {
    for (int64_t n = 0; n < p.N; ++n) {
      const bool live = !present(p.read) || own(n) >= p.first_valid;
      const bool reads = reads_pool && (!present(p.has_initial) || int_at(p.has_initial, n)) && own(n) == slot;
      const bool writes = writes_pool && (present(p.written) ? int_at(p.written, n) : own(n)) == slot;
      if (live && (reads || writes))
        invalid("checkpoint_slots: expected slots that no sequence reads or writes, got slot ", slot,
                ", which sequence ", n, reads ? " reads" : " writes");
    }
  };
  for (int64_t n = 0; n < p.N; ++n)
    for (int64_t m = 0; m < slots.shape[1]; ++m)
      if (const int64_t slot = int_at(slots, n, m); slot >= p.first_valid) refuse_used(slot);
}

void check_states_data(const Dims& d, const kda_inputs& in, const kda_states& s) {
  check_cu_seqlens(d, in);
  if (present(s.state_indices))
    check_slots("state_indices", s.state_indices, s.first_valid_slot, present(s.h0) ? s.h0.shape[0] : s.hT.shape[0]);
}

void check_states_data(const Dims& d, const kda_inputs& in, const kda_states& s, const kda_tensor& out_state_indices,
                       bool from_h0) {
  const bool apart = present(out_state_indices);
  check_cu_seqlens(d, in);
  if (present(s.state_indices))
    check_slots("state_indices", s.state_indices, s.first_valid_slot, present(s.h0) ? s.h0.shape[0] : s.hT.shape[0],
                present(s.hT) && !apart);
  if (apart)
    check_written_slots({s.state_indices, out_state_indices, s.has_initial_state, d.N, s.first_valid_slot,
                         s.hT.shape[0], from_h0 && present(s.h0) && s.h0.data == s.hT.data});
}

void check_conv_data(const kda_conv_inputs& conv, const kda_states& states) {
  if (present(conv.indices)) check_slots("conv.indices", conv.indices, 0, conv.state.shape[0], true, &states);
}

}  // namespace kda
