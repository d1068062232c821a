#include "contract/rules.h"

#include <algorithm>
#include <bitset>
#include <cmath>

#include "contract/dtype.h"

namespace kda {

void check_exec(const kda_exec& e) {
  if (e.device < KDA_CPU || e.device > KDA_CUDA) invalid("exec.device: expected 0..1, got ", e.device);
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

template <class In>
void check_gate(const In& in, Tensors& tensors) {
  tensors.check(in.gate_form);
  const GateForm form = form_of(in);
  if (needs_A_log(form) && !present(in.A_log)) invalid("A_log: expected [HV] with the softplus gate, got none");
  if (is_given(form) && present(in.A_log)) invalid("A_log: expected none when g is already the decay, got one");
  if (is_given(form) && present(in.dt_bias)) invalid("dt_bias: expected none when g is already the decay, got one");
  if (is_bounded(form) && !(std::isfinite(in.lower_bound) && in.lower_bound < 0))
    invalid("lower_bound: expected a finite number < 0, got ", in.lower_bound);
  tensors.check(in.A_log, in.dt_bias);
}
template void check_gate(const kda_gate_args&, Tensors&);
template void check_gate(const kda_gate_backward_args&, Tensors&);

void check_scale(float scale) {
  if (!std::isfinite(scale)) invalid("scale: expected a finite number, got ", scale);
}

Dims check_packing(const kda_tensor& cu_seqlens, Tensors& tensors) {
  Dims d{};
  d.varlen = present(cu_seqlens);
  d.B = tensors[Size::B];
  tensors[Size::N] = d.N = d.varlen ? cu_seqlens.shape[0] - 1 : d.B;
  if (d.varlen) {
    if (d.B != 1) invalid("cu_seqlens: expected one row of packed sequences (B = 1), got B = ", d.B);
    if (cu_seqlens.ndim != 1 || cu_seqlens.shape[0] < 1)
      invalid("cu_seqlens: expected shape [N+1], got ", shape_text(cu_seqlens.shape, cu_seqlens.ndim));
    if (d.N > kMaxSequences) invalid("cu_seqlens: expected at most 2^31 - 1 sequences, got ", d.N);
    tensors.check(cu_seqlens);
  }
  d.T = tensors[Size::T], d.H = tensors[Size::H], d.HV = tensors[Size::HV];
  d.K = tensors[Size::K], d.V = tensors[Size::V];
  return d;
}

namespace {

// raw: q, k and v have shapes, but no memory yet.
Dims check_inputs(const kda_inputs& in, Tensors& tensors, bool raw) {
  tensors.check_form(in.q, in.k, in.v, in.g, in.beta, in.A_log, in.dt_bias, in.cu_seqlens);
  tensors.bind(in.q), tensors.bind(in.v);
  tensors.check_heads(true);
  if (!raw) tensors.check(in.q, in.k, in.v);
  tensors.check(in.g, in.beta);
  check_gate(in, tensors);
  const Dims d = check_packing(in.cu_seqlens, tensors);
  check_sizes("q", d);
  tensors.check(in.beta_form, in.state_layout);
  tensors.k_first = in.state_layout == KDA_STATE_K_FIRST;
  check_scale(in.scale);
  return d;
}

}  // namespace

Dims check_inputs(const kda_inputs& in, Tensors& tensors) { return check_inputs(in, tensors, false); }

Dims check_inputs(kda_inputs& in, const kda_conv_inputs& conv, const kda_tensor& o, Tensors& tensors) {
  tensors.check_form(conv.x, conv.weight, conv.bias, conv.state, conv.indices, o, in.g);
  tensors.check_company(conv.weight, conv.bias, conv.state, conv.indices);
  if (!present(conv.x)) return check_inputs(in, tensors, false);
  for (const kda_tensor* t : {&in.q, &in.k, &in.v})
    if (present(*t)) invalid(tensors.name(t), ": expected none with conv.x, which holds it, got one");
  tensors.check_rank(conv.x), tensors.check_rank(in.g), tensors.check_rank(o);
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
  tensors.check(conv.x);
  const int64_t H = rest / (2 * K);
  in.q = in.k = {nullptr, conv.x.dtype, 4, {B, T, H, K}, {T * D, D, K, 1}};
  in.v = {nullptr, conv.x.dtype, 4, {B, T, HV, V}, {T * D, D, V, 1}};
  const Dims d = check_inputs(in, tensors, true);
  if (conv.weight.ndim != 2 || conv.weight.shape[1] < 2 || conv.weight.shape[1] > kMaxConvWidth)
    invalid("conv.weight: expected shape [D,W] with W in 2..", kMaxConvWidth, ", got ",
            shape_text(conv.weight.shape, conv.weight.ndim));
  tensors[Size::D] = D, tensors[Size::W] = conv.weight.shape[1];
  tensors.check(conv.weight, conv.bias, conv.state, conv.indices);
  if (!present(conv.indices) && conv.state.shape[0] < d.N)
    invalid("conv.state: expected at least N = ", d.N, " slots without indices, got ", conv.state.shape[0]);
  return d;
}

void slice_convolved(kda_inputs& in, void* rows) {
  auto* p = static_cast<char*>(rows);
  for (kda_tensor* t : {&in.q, &in.k, &in.v}) {
    t->data = p;
    p += t->shape[2] * t->shape[3] * dtype_size(t->dtype);
  }
}

void check_state_pair(const StatePair& s, Tensors& tensors, bool pool) {
  tensors.check_form(s.read, s.written, s.indices, s.has_initial);
  if (s.out) tensors.check_form(*s.out);
  const bool indexed = present(s.indices), apart = s.out && present(*s.out);
  const char *read = tensors.name(&s.read), *written = tensors.name(&s.written);
  pool |= indexed;
  if (indexed && !present(s.read) && !present(s.written))
    invalid("state_indices: expected a pool ", read, " or ", written, " with it, got neither");
  const int64_t rows = pool ? Tensors::kUnknown : tensors[Size::N];
  tensors[Size::kRead] = rows, tensors[Size::kWritten] = apart ? Tensors::kUnknown : rows;
  if (apart && !tensors.row(&s.read).state) tensors.check_company(*s.out);
  tensors.check(s.read);
  if (apart) tensors.check_company(*s.out);
  tensors.check(s.written);
  if (apart) tensors.check(*s.out);
  else if (pool && present(s.read) && present(s.written) && s.read.shape[0] != s.written.shape[0])
    invalid(written, ": expected as many slots as ", read, ", ", s.read.shape[0], ", got ", s.written.shape[0]);
  tensors.check(s.indices, s.has_initial, s.first_valid);
}

void check_states(const kda_states& s, const kda_tensor* out, Tensors& tensors, bool pool) {
  check_state_pair(states_of(s, out), tensors, pool);
  tensors.check(s.reserved);
}

template <class Args>
void check_checkpoints(const Args& a, Tensors& tensors) {
  const kda_tensor &slots = a.checkpoint_slots, &offset = a.checkpoint_offset;
  const int32_t every = a.checkpoint_every;
  tensors.check_form(slots, offset);
  tensors.check_company(slots);
  if (!present(a.checkpoints)) {
    if (present(offset)) invalid("checkpoint_offset: expected none without checkpoints, got one");
    if (every) invalid("checkpoint_every: expected 0 without checkpoints, got ", every);
    return;
  }
  if (slots.ndim != 2 || slots.shape[0] != tensors[Size::N])
    invalid("checkpoint_slots: expected shape [N,M] with N = ", tensors[Size::N], ", got ",
            shape_text(slots.shape, slots.ndim));
  tensors.check(slots, offset);
  if (every < 1 || every % kCheckpointStep)
    invalid("checkpoint_every: expected a positive multiple of ", kCheckpointStep, ", got ", every);
  tensors.check(a.checkpoints);
}
template void check_checkpoints(const kda_forward_args&, Tensors&);
template void check_checkpoints(const kda_conv_args&, Tensors&);

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

namespace {

// The slot of sequence n, and whether it is live.
int64_t own_slot(const StatePair& s, int64_t n) { return present(s.indices) ? int_at(s.indices, n) : n; }
bool live(const StatePair& s, int64_t n) { return !present(s.indices) || own_slot(s, n) >= s.first_valid; }
bool starts(const StatePair& s, int64_t n) { return !present(s.has_initial) || int_at(s.has_initial, n); }

// Slots to write. `one_pool`: the pool that is written is the one that sequences start from.
void check_written_slots(const StatePair& s, int64_t N, bool one_pool) {
  const int64_t slots = s.written.shape[0];
  const auto reads = [&](int64_t n) { return one_pool && live(s, n) && starts(s, n); };
  const auto written = [&](int64_t n) { return live(s, n) ? int_at(*s.out, n) : -1; };
  check_width("out_state_indices", *s.out);
  for (int64_t n = 0; n < N; ++n)
    if (written(n) >= slots) invalid("out_state_indices: expected slots below ", slots, ", got ", int_at(*s.out, n));
  constexpr int64_t kWindow = int64_t{1} << 17;  // as in check_slots
  std::bitset<kWindow> seen;
  for (int64_t begin = s.first_valid, next; begin < slots; begin = next) {
    seen.reset();
    next = slots;
    for (int64_t n = 0; n < N; ++n) {
      const int64_t slot = written(n) - begin;
      if (slot >= kWindow) next = std::min(next, written(n));
      if (slot < 0 || slot >= kWindow) continue;
      if (seen.test(slot)) invalid("out_state_indices: expected every live slot once, got slot ", written(n), " twice");
      seen.set(slot);
    }
    for (int64_t n = 0; n < N; ++n) {
      const int64_t slot = reads(n) ? own_slot(s, n) - begin : -1;
      if (slot >= 0 && slot < kWindow && seen.test(slot) && written(n) != own_slot(s, n))
        invalid("out_state_indices: expected no slot that another sequence reads, got slot ", own_slot(s, n),
                ", which sequence ", n, " reads");
    }
  }
}

}  // namespace

void check_states_data(const StatePair& s, int64_t N, bool from_read) {
  const bool apart = s.out && present(*s.out);
  if (present(s.indices))
    check_slots("state_indices", s.indices, s.first_valid, present(s.read) ? s.read.shape[0] : s.written.shape[0],
                present(s.written) && !apart);
  if (apart) check_written_slots(s, N, from_read && present(s.read) && s.read.data == s.written.data);
}

template <class Args>
void check_checkpoints_data(const Args& a, const StatePair& s, int64_t N) {
  if (!present(a.checkpoints)) return;
  const kda_tensor &slots = a.checkpoint_slots, &offset = a.checkpoint_offset;
  check_slots("checkpoint_slots", slots, s.first_valid, a.checkpoints.shape[0]);
  check_width("checkpoint_offset", offset);
  for (int64_t n = 0; present(offset) && n < N; ++n)
    if (const int64_t before = int_at(offset, n); before < 0)
      invalid("checkpoint_offset: expected numbers >= 0, got ", before);
  const auto in_pool = [&](const kda_tensor& pool) { return present(pool) && a.checkpoints.data == pool.data; };
  const bool reads_pool = in_pool(s.read), writes_pool = in_pool(s.written);
  if (!reads_pool && !writes_pool) return;
  const auto refuse_used = [&](int64_t slot) {
    for (int64_t n = 0; n < N; ++n) {
      const bool reads = reads_pool && starts(s, n) && own_slot(s, n) == slot;
      const bool writes = writes_pool && (present(*s.out) ? int_at(*s.out, n) : own_slot(s, n)) == slot;
      if (live(s, n) && (reads || writes))
        invalid("checkpoint_slots: expected slots that no sequence reads or writes, got slot ", slot,
                ", which sequence ", n, reads ? " reads" : " writes");
    }
  };
  for (int64_t n = 0; n < N; ++n)
    for (int64_t m = 0; m < slots.shape[1]; ++m)
      if (const int64_t slot = int_at(slots, n, m); slot >= s.first_valid) refuse_used(slot);
}
template void check_checkpoints_data(const kda_forward_args&, const StatePair&, int64_t);
template void check_checkpoints_data(const kda_conv_args&, const StatePair&, int64_t);

void check_conv_data(const kda_conv_inputs& conv, const kda_states& states) {
  if (present(conv.indices)) check_slots("conv.indices", conv.indices, 0, conv.state.shape[0], true, &states);
}

}  // namespace kda
