// The schedule of a call's CTA pairs, where lengths of packed sequences have to be added up first.
#include "cuda/engine/declarations.h"
#include "cuda/engine/pair_kernel.h"

namespace kda::cuda {
namespace {

using namespace engine;

__global__ void __launch_bounds__(kMeasuring)
    measure_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Schedule schedule) {
  __shared__ unsigned long long sums[kMeasuring / 32];
  wait_for_stream();
  let_next_start();
  schedule.measure(p, sums);
}

}  // namespace

engine::Schedule engine::schedule_of(const ForwardProblem& p) {
  const kda_exec& exec = p.args.exec;
  Schedule schedule(p, multiprocessors(exec.device_id));
  if (schedule.pairs == 0) return schedule;
  schedule.place(exec.workspace);
  if (schedule.measures()) launch<measure_kernel>(exec, dim3(1), static_cast<int>(kMeasuring), 0, p, schedule);
  else if (schedule.flags) KDA_CUDA(cudaMemsetAsync(schedule.flags, 0, schedule.flag_bytes(), stream_of(exec)));
  return schedule;
}

}  // namespace kda::cuda
