// Chunked forward for Hopper, in CTA pairs. Each CTA has an SM to itself and three warpgroups: the consumer carries
// 64 columns of a state, and two producers prepare chunks.
//
// Chunks of 32 tokens go from producers (producer.h) to the consumers (consumer.h) of both CTAs, through rings of
// stages in shared memory. mbarriers say when a stage is full and when it is empty again. What a pair works on:
// schedule.h and pair.h.
#include "cuda/cuda.h"
#include "cuda/hopper_prefill/consumer.h"
#include "cuda/hopper_prefill/dispatch.h"
#include "cuda/hopper_prefill/pair_kernel.h"

namespace kda::cuda {
namespace {

using namespace sm90;

__global__ void __launch_bounds__(kMeasuring)
    measure_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Schedule schedule) {
  wait_for_stream();
  let_next_start();
  schedule.measure(p);
}

template <class T, class Scores, bool kWideGate, bool kTraining>
__global__ void __cluster_dims__(2) __launch_bounds__(kPairThreads, 1)
    chunk_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                 const __grid_constant__ States states, const __grid_constant__ TypedView v_new,
                 const __grid_constant__ Schedule given, const __grid_constant__ Tiles tiles,
                 const __grid_constant__ StateTiles state_tiles, const __grid_constant__ SavedTiles saved) {
  run_pair<Producer<T, Scores, kWideGate, PairSource<false, kTraining>>, Consumer<T, kTraining>>(
      {p, x, states, v_new, &tiles, &saved, &state_tiles}, given);
}

// Do rows fit accesses of 16 bytes?
bool aligned(const kda_tensor& t) {
  bool fits = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) fits = fits && t.stride[i] * dtype_size(t.dtype) % 16 == 0;
  return fits;
}

}  // namespace

const char* hopper_prefill_pairs_why_not(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const kda_inputs& in = a.in;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (const char* reason = hopper_why_not(a.exec.device_id)) return reason;
  if ((p.K != kSizeHalf && p.K != kSize) || (p.V != kSizeHalf && p.V != kSize)) return "takes K and V of 64 or 128";
  if (in.q.dtype == KDA_F32 || in.q.dtype == KDA_F64) return "takes bf16 and f16 for q, k and v";
  if (a.o.dtype != in.q.dtype) return "writes o in the dtype of q";
  if (in.g.dtype != in.q.dtype && in.g.dtype != KDA_F32) return "takes g in f32 or the dtype of q";
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (present(a.Aqk) || present(a.Akk)) return "saves no Aqk and Akk";
  for (const kda_tensor* t : {&in.q, &in.k, &in.v, &in.g, &a.o})
    if (!aligned(*t)) return "needs rows at multiples of 16 bytes";
  if (checkpoints_within_chunks(a)) return "keeps checkpoints between chunks of 64 tokens, without an offset";
  if (p.T > INT32_MAX) return "takes at most 2^31 - 1 tokens a row";
  if (const char* reason = Tokens::why_not(in, a.o)) return reason;
  if (const char* reason = view_why_not({&a.states.h0, &a.states.hT, &a.checkpoints, &a.h, &a.v_new})) return reason;
  if ((p.B * p.T / kChunk + p.N + 1) * p.HV > INT32_MAX / 2) return "takes at most 2^30 spans of 64 tokens and a head";
  return nullptr;
}

std::string hopper_prefill_form(const ForwardProblem& p) {
  return anchored(p) ? "scores from one anchor a chunk, which bounded gates allow"
                     : "scores from an anchor every eight tokens, exact for any gate";
}

uint64_t hopper_prefill_pairs_workspace(const ForwardProblem& p) {
  return Schedule(p, multiprocessors(p.args.exec.device_id)).bytes();
}

sm90::Schedule sm90::schedule_of(const ForwardProblem& p) {
  const kda_exec& exec = p.args.exec;
  Schedule schedule(p, multiprocessors(exec.device_id));
  if (schedule.pairs == 0) return schedule;
  schedule.place(exec.workspace);
  if (schedule.measures()) launch<measure_kernel>(exec, dim3(1), static_cast<int>(kMeasuring), 0, p, schedule);
  else if (schedule.flags) KDA_CUDA(cudaMemsetAsync(schedule.flags, 0, schedule.flag_bytes(), stream_of(exec)));
  return schedule;
}

void hopper_prefill_pairs(const ForwardProblem& p) {
  const kda_forward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  const Schedule schedule = schedule_of(p);
  if (schedule.pairs == 0) return;
  with_preparation(p, [&]<class T, class Scores, bool kWideGate, bool kTraining>() {
    launch<chunk_kernel<T, Scores, kWideGate, kTraining>>(
        a.exec, dim3(2 * schedule.pairs), static_cast<int>(kPairThreads), static_cast<int>(Shared::bytes), p,
        Tokens(p, a.in, a.o), States(a), view_of(a.v_new), schedule, Tiles(p), StateTiles(p), SavedTiles(a.v_new));
  });
}

}  // namespace kda::cuda
