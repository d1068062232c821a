/* One token for each of three requests on the CPU, and the same call on the GPU: only the memory and two fields differ.
 *
 *   cc examples/decode_gpu.c $(python -m kda config --cflags --libs) \
 *     -I$CUDA/include -L$CUDA/lib64 -Wl,-rpath,$CUDA/lib64 -lcudart -lm && ./a.out
 *
 * or after `cmake --install`:
 *
 *   cc examples/decode_gpu.c $(pkg-config --cflags --libs kda) \
 *     -I$CUDA/include -L$CUDA/lib64 -Wl,-rpath,$CUDA/lib64 -lcudart -lm && ./a.out
 */
#include "kda/kda.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 3, H = 2, K = 64, V = 64, kSlots = 5 };

/* All that a call reads and writes, so that one copy moves it. */
typedef struct {
  float q[N * H * K], k[N * H * K], v[N * H * V], gate[N * H * K], beta[N * H], A_log[H], dt_bias[H * K];
  float o[N * H * V], pool[kSlots * H * V * K];
  int32_t slots[N];
} Step;
static Step on_cpu, from_gpu;

static void check(kda_status status) {
  if (status == KDA_OK) return;
  fprintf(stderr, "%s: %s\n", kda_status_name(status), kda_last_error());
  exit(1);
}
static void check_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(status));
  exit(1);
}

/* A dense tensor of up to four dimensions; trailing sizes of 0 do not count. */
static kda_tensor tensor(void* data, int32_t dtype, int64_t s0, int64_t s1, int64_t s2, int64_t s3) {
  kda_tensor t = {data, dtype, 0, {s0, s1, s2, s3}, {0}};
  while (t.ndim < 4 && t.shape[t.ndim]) ++t.ndim;
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

/* `s` may be an address on the device: this function only computes addresses from it. */
static void decode(Step* s, int32_t device) {
  kda_decode_args args = KDA_DECODE_ARGS_INIT;
  args.in.q = tensor(s->q, KDA_F32, N, 1, H, K);
  args.in.k = tensor(s->k, KDA_F32, N, 1, H, K);
  args.in.v = tensor(s->v, KDA_F32, N, 1, H, V);
  args.in.g = tensor(s->gate, KDA_F32, N, 1, H, K);
  args.in.beta = tensor(s->beta, KDA_F32, N, 1, H, 0);
  args.in.A_log = tensor(s->A_log, KDA_F32, H, 0, 0, 0);
  args.in.dt_bias = tensor(s->dt_bias, KDA_F32, H, K, 0, 0);
  args.in.gate_form = KDA_GATE_SOFTPLUS;
  args.in.beta_form = KDA_BETA_SIGMOID;
  args.in.qk_l2norm = 1;
  args.states.h0 = args.states.hT = tensor(s->pool, KDA_F32, kSlots, H, V, K);
  args.states.state_indices = tensor(s->slots, KDA_I32, N, 0, 0, 0);
  args.o = tensor(s->o, KDA_F32, N, 1, H, V);
  args.exec.device = device;
  args.exec.stream = NULL; /* CUDA's default stream; the call is asynchronous */
  check(kda_decode(&args));
}

static void fill(float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) x[i] = (float)rand() / (float)RAND_MAX * 2 - 1;
}

/* Relative to the largest value. */
static double largest_difference(const float* x, const float* y, size_t n) {
  double difference = 0, value = 0;
  for (size_t i = 0; i < n; ++i) {
    difference = fmax(difference, fabs((double)x[i] - y[i]));
    value = fmax(value, fabs((double)x[i]));
  }
  return difference / value;
}

int main(void) {
  fill((float*)&on_cpu, offsetof(Step, slots) / sizeof(float));
  on_cpu.slots[0] = 4, on_cpu.slots[1] = 0, on_cpu.slots[2] = 3;

  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("there is no GPU\n");
    return 0;
  }
  Step* on_gpu;
  check_cuda(cudaMalloc((void**)&on_gpu, sizeof(Step)));
  check_cuda(cudaMemcpy(on_gpu, &on_cpu, sizeof(Step), cudaMemcpyHostToDevice));
  decode(on_gpu, KDA_CUDA);
  decode(&on_cpu, KDA_CPU);
  check_cuda(cudaMemcpy(&from_gpu, on_gpu, sizeof(Step), cudaMemcpyDeviceToHost)); /* waits for the call */
  check_cuda(cudaFree(on_gpu));

  const double o = largest_difference(on_cpu.o, from_gpu.o, N * H * V);
  const double pool = largest_difference(on_cpu.pool, from_gpu.pool, kSlots * H * V * K);
  printf("kda %s: the GPU differs from the CPU by %.1e in o and %.1e in the states\n", kda_version(), o, pool);
  return o < 1e-5 && pool < 1e-5 ? 0 : 1;
}
