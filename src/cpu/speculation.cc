// The operators of speculative decoding on the CPU: verify, flush, and both. How a head is computed:
// speculation-inl.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/speculation.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/speculation-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

uint64_t speculation_scratch_bytes(const SpeculationSizes& sizes) {
  uint64_t bytes;
  SpeculationScratch(Arena(), sizes, &bytes);
  return bytes;
}

// Runs value columns v0 .. v0+V-1 of one head of one request.
void speculation_task(const SpeculationCall& c, const Request& r, int64_t hv, int64_t v0, int64_t V,
                      const SpeculationSizes& sizes, char* memory) {
  const SpeculationScratch scratch(Arena(memory), sizes, nullptr);
  SpeculationTask task{c, r, hv, v0, scratch};
  task.prefetch_first(v0);
  if (r.newest >= 0) task.prepare_flush();
  if (c.in) task.prepare_verify();
  const int64_t rows = c.h0.dtype == KDA_F32 ? kStripRows : kConvertedRows;
  const int64_t strip = c.layout == KDA_STATE_V_FIRST ? rows : kStripColumns;
  for (int64_t v = v0; v < v0 + V; v += strip) task.run_strip(v, std::min(strip, v0 + V - v));
  if (c.in && r.slot >= 0 && v0 == 0) task.record_keys();
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "contract/conv.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

int64_t entries_of(const kda_tensor& u) { return present(u) ? u.shape[u.ndim - 3] : 0; }

SpeculationSizes sizes_of(const VerifyProblem& p) {
  return {p.K, p.V, present(p.args.records.ring_count) ? entries_of(p.args.records.u) : 0, std::min(p.T, kMaxDrafts)};
}
SpeculationSizes sizes_of(const FlushProblem& p) { return {p.K, p.V, p.R, 0}; }
SpeculationSizes sizes_of(const FlushVerifyProblem& p) {
  return {p.K, p.V, entries_of(present(p.args.records.ring_count) ? p.args.records.u : p.args.last.u),
          std::min(p.T, kMaxDrafts)};
}

uint64_t convolved_bytes(const FlushProblem&) { return 0; }
template <class P>
uint64_t convolved_bytes(const P& p) {
  return present(p.args.conv.x) ? conv_front_bytes(p.args.conv) : 0;
}

// Shared: the convolved rows.
template <class P>
Workspace plan(const P& p) {
  return {convolved_bytes(p), KDA_ISA_CALL(speculation_scratch_bytes)(sizes_of(p))};
}

// Returns the inputs, with q, k and v convolved first where the call has raw rows.
template <class P>
kda_inputs convolved(const P& p) {
  kda_inputs in = p.args.in;
  if (!present(p.args.conv.x)) return in;
  plan(p).threads(p.args.exec, 1);  // refuses a workspace that is too small
  const kda_tensor z = conv_front_output(p.args.conv, p.args.exec.workspace);
  conv_front(p.args.conv, in.cu_seqlens, p.args.parents, z, p.args.exec);
  slice_convolved(in, z.data);
  return in;
}

void zero_head(const kda_tensor& o, int64_t b, int64_t t0, int64_t count, int64_t hv) {
  for (int64_t t = t0; t < t0 + count; ++t)
    std::memset(
        static_cast<char*>(o.data) + (b * o.stride[0] + t * o.stride[1] + hv * o.stride[2]) * dtype_size(o.dtype), 0,
        o.shape[3] * dtype_size(o.dtype));
}

int64_t layers_of(const FlushProblem& p) { return p.layers; }
template <class P>
int64_t layers_of(const P&) {
  return 1;
}

// The work in units of 100,000 multiply-adds. A team of threads costs about one unit, a few microseconds.
template <class P>
int64_t tasks_of(const P& p) {
  return layers_of(p) * p.N * p.HV * p.K * p.V * (2 * sizes_of(p).drafts + 2) / 100000 + 1;
}

// Runs request_of(n) for every request, head and layer.
template <class P, class CallOf, class RequestOf>
void run(const P& p, const kda_exec& exec, const CallOf& call_of, const RequestOf& request_of) {
  const SpeculationSizes sizes = sizes_of(p);
  const Workspace workspace = plan(p);
  const int64_t heads = layers_of(p) * p.N * p.HV;
  const int threads = workspace.threads(exec, tasks_of(p));
  const int64_t parts = std::clamp<int64_t>(threads / std::max<int64_t>(1, heads), 1, (p.V + 63) / 64);
  const int64_t part = (p.V / parts + 63) / 64 * 64, tiles = (p.V + part - 1) / part;
  const auto task_fn = KDA_ISA_CALL(speculation_task);
  const auto one = [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * part, hv = task / tiles % p.HV, n = task / tiles / p.HV % p.N;
    const SpeculationCall call = call_of(task / tiles / p.HV / p.N);
    const Request r = request_of(n);
    if (r.s.live) task_fn(call, r, hv, v0, std::min(part, p.V - v0), sizes, workspace.of_thread(exec, thread));
    else if (call.o && v0 == 0) zero_head(*call.o, r.s.b, r.s.t0, r.s.length, hv);
  };
  parallel_for(heads * tiles, threads, one, short_run(heads * tiles, threads));
}

template <class P>
void zero_rest(const P& p) {
  if (!p.varlen) return;
  const int64_t end = int_at(p.args.in.cu_seqlens, p.N);
  for (int64_t hv = 0; hv < p.HV; ++hv) zero_head(p.args.o, 0, end, p.T - end, hv);
}

}  // namespace

uint64_t verify_workspace(const VerifyProblem& p) { return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p))); }
uint64_t flush_workspace(const FlushProblem& p) { return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p))); }
uint64_t flush_verify_workspace(const FlushVerifyProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p)));
}

void verify(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  const kda_inputs in = convolved(p);
  const SpeculationCall call{p, in.state_layout, a.states.h0, {}, &in, &a.o, a.records, {}};
  run(
      p, a.exec, [&](int64_t) { return call; }, [&](int64_t n) { return request_of(p, n); });
  zero_rest(p);
}

void flush(const FlushProblem& p) {
  const kda_flush_args& a = p.args;
  const bool layered = a.state.ndim == 5;
  run(
      p, a.exec,
      [&](int64_t layer) {
        SpeculationCall call{p, a.state_layout, a.state, {}, nullptr, nullptr, {}, a.records};
        if (layered)
          for (kda_tensor* t : {&call.h0, &call.last.u, &call.last.k, &call.last.alpha}) *t = layer_of(*t, layer);
        call.hT = call.h0;
        return call;
      },
      [&](int64_t n) { return request_of(p, n); });
  for (int64_t i = 0; present(a.conv_x) && i < p.layers * p.N; ++i) {
    const int64_t layer = i / p.N, n = i % p.N;
    const Sequence s = roll_of(p, n);
    conv_roll(layered ? layer_of(a.conv_state, layer) : a.conv_state, s.slot,
              layered ? layer_of(a.conv_x, layer) : a.conv_x, a.parents, n, s.b, s.t0, s.length);
  }
}

void flush_verify(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  const bool ring = present(a.records.ring_count);
  plan(p).threads(a.exec, 1);  // refuses a workspace that is too small, before conv.state is written
  for (int64_t n = 0; present(a.last_conv_x) && n < p.N; ++n) {
    const Sequence s = roll_of(p, n);
    conv_roll(a.conv.state, s.slot, a.last_conv_x, a.last_parents, n, s.b, s.t0, s.length);
  }
  const kda_inputs in = convolved(p);
  const SpeculationCall call{p,         in.state_layout,          a.states.h0, a.states.hT, &in, &a.o,
                             a.records, ring ? a.records : a.last};
  run(
      p, a.exec, [&](int64_t) { return call; }, [&](int64_t n) { return request_of(p, n); });
  for (int64_t n = 0; ring && n < p.N; ++n) {  // after all heads have read them
    const Sequence s = sequence_at(p, a.in, a.states, n);
    if (s.live) store_cursors(a.records, slot_of(a.records.indices, n), commit_of(p, n, s.length).next);
  }
  zero_rest(p);
}

}  // namespace kda::cpu
#endif
