// Chunked forward for Hopper, in CTA pairs. Each CTA has an SM to itself and three warpgroups: the consumer carries
// 64 columns of a state, and two producers prepare chunks.
//
// Chunks of 32 tokens go from producers (producer.h) to the consumers (consumer.h) of both CTAs, through rings of
// stages in shared memory. mbarriers say when a stage is full and when it is empty again. What a pair works on:
// schedule.h and pair.h.
#include "cuda/engine/consumer.h"
#include "cuda/engine/declarations.h"
#include "cuda/engine/dispatch.h"
#include "cuda/engine/pair_kernel.h"

namespace kda::cuda {
namespace {

using namespace engine;

template <class T, class Scores, bool kWideGate, bool kTraining>
__global__ void __cluster_dims__(2) __launch_bounds__(kPairThreads, 1)
    chunk_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                 const __grid_constant__ States states, const __grid_constant__ TypedView v_new,
                 const __grid_constant__ Schedule given, const __grid_constant__ Tiles tiles,
                 const __grid_constant__ StateTiles state_tiles, const __grid_constant__ SavedTiles saved) {
  run_pair<Producer<T, Scores, kWideGate, PairSource<false, kTraining>>, Consumer<T, kTraining>>(
      {p, x, states, v_new, &tiles, &saved, &state_tiles}, given);
}

}  // namespace

const char* hopper_prefill_pairs_why_not(const ForwardProblem& p) {
  if (const char* reason = device_why_not(p.args.exec)) return reason;
  if (const char* reason = hopper_why_not(p.args.exec.device_id)) return reason;
  return pairs_why_not(p);
}

const char* hopper_prefill_too_rough(const ForwardProblem& p) {
  return p.args.in.q.dtype == KDA_F16 ? "makes scores from factors in bf16, where q and k have 11 bits" : nullptr;
}

std::string hopper_prefill_form(const ForwardProblem& p) {
  return anchored(p) ? "scores from one anchor a chunk, which bounded gates allow"
                     : "scores from an anchor every eight tokens, exact for any gate";
}

uint64_t hopper_prefill_pairs_workspace(const ForwardProblem& p) {
  return Schedule(p, multiprocessors(p.args.exec.device_id)).bytes();
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
