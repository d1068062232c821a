/* Prefill a prompt into a slot of a state pool, then decode token by token in place. The outputs and the final state
 * are those of one call over all tokens.
 *
 *   cc examples/prefill_decode.c $(python -m kda config --cflags --libs) -lm && ./a.out
 *
 * This needs the wheel, or PYTHONPATH and KDA_LIBRARY_DIR for a build tree. After `cmake --install`:
 *
 *   cc examples/prefill_decode.c $(pkg-config --cflags --libs kda) -lm && ./a.out
 */
#include "kda/kda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kPrompt = 100, kGenerated = 8, kTokens = kPrompt + kGenerated, H = 2, K = 64, V = 64, kSlots = 4 };

/* All that these calls need of a model's layer, for one request. */
static float q[kTokens * H * K], k[kTokens * H * K], v[kTokens * H * V], gate[kTokens * H * K], beta[kTokens * H];
static float A_log[H], dt_bias[H * K];
static float o_whole[kTokens * H * V], o_steps[kTokens * H * V];
static float state_whole[H * V * K], pool[kSlots * H * V * K];

static void check(kda_status status) {
  if (status == KDA_OK) return;
  fprintf(stderr, "%s: %s\n", kda_status_name(status), kda_last_error());
  exit(1);
}

/* A dense f32 tensor of up to four dimensions; trailing sizes of 0 do not count. */
static kda_tensor f32(float* data, int64_t s0, int64_t s1, int64_t s2, int64_t s3) {
  const int64_t sizes[4] = {s0, s1, s2, s3};
  kda_tensor t = {0};
  t.data = data;
  t.dtype = KDA_F32;
  while (t.ndim < 4 && sizes[t.ndim]) ++t.ndim;
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = sizes[i];
    t.stride[i] = stride;
    stride *= sizes[i];
  }
  return t;
}

/* The inputs of tokens first .. first+count-1. */
static kda_inputs tokens(int first, int count) {
  kda_inputs in = {0};
  in.q = f32(q + first * H * K, 1, count, H, K);
  in.k = f32(k + first * H * K, 1, count, H, K);
  in.v = f32(v + first * H * V, 1, count, H, V);
  in.g = f32(gate + first * H * K, 1, count, H, K);
  in.beta = f32(beta + first * H, 1, count, H, 0);
  in.A_log = f32(A_log, H, 0, 0, 0);
  in.dt_bias = f32(dt_bias, H, K, 0, 0);
  in.gate_form = KDA_GATE_SOFTPLUS; /* raw gate and beta from the projections, q and k not normalised */
  in.beta_form = KDA_BETA_SIGMOID;
  in.qk_l2norm = 1;
  return in;
}

static void forward(kda_forward_args* args) {
  uint64_t bytes;
  check(kda_forward_workspace(args, &bytes));
  args->exec.workspace_bytes = bytes;
  args->exec.workspace = bytes ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
  check(kda_forward(args));
  free(args->exec.workspace);
}

static double random_normal(void) {
  static uint32_t x = 1;
  double sum = 0; /* of twelve uniform numbers */
  for (int i = 0; i < 12; ++i) sum += (double)(x = x * 1664525u + 1013904223u) / 4294967296.0;
  return sum - 6;
}

static void fill(float* x, int n, double scale) {
  for (int i = 0; i < n; ++i) x[i] = (float)(scale * random_normal());
}

/* Relative to the largest value. */
static double largest_difference(const float* x, const float* y, int n) {
  double difference = 0, value = 0;
  for (int i = 0; i < n; ++i) {
    difference = fmax(difference, fabs((double)x[i] - y[i]));
    value = fmax(value, fabs((double)x[i]));
  }
  return difference / value;
}

int main(void) {
  fill(q, kTokens * H * K, 1);
  fill(k, kTokens * H * K, 1);
  fill(v, kTokens * H * V, 1);
  fill(gate, kTokens * H * K, 1);
  fill(beta, kTokens * H, 1);
  fill(dt_bias, H * K, 1);
  for (int h = 0; h < H; ++h) A_log[h] = logf(1 + (float)h);

  /* Everything at once. */
  kda_forward_args whole = KDA_FORWARD_ARGS_INIT;
  whole.in = tokens(0, kTokens);
  whole.states.hT = f32(state_whole, 1, H, V, K);
  whole.o = f32(o_whole, 1, kTokens, H, V);
  forward(&whole);

  /* The prompt, into slot 2. The slot may hold what another request left: a new one starts from zeros. */
  int32_t slot = 2;
  uint8_t has_initial_state = 0;
  kda_states states = {0};
  states.h0 = states.hT = f32(pool, kSlots, H, V, K);
  states.state_indices = (kda_tensor){&slot, KDA_I32, 1, {1}, {1}};
  states.has_initial_state = (kda_tensor){&has_initial_state, KDA_BOOL, 1, {1}, {1}};
  for (int i = 0; i < kSlots * H * V * K; ++i) pool[i] = NAN;

  kda_forward_args prefill = KDA_FORWARD_ARGS_INIT;
  prefill.in = tokens(0, kPrompt);
  prefill.states = states;
  prefill.o = f32(o_steps, 1, kPrompt, H, V);
  forward(&prefill);

  /* Then one token at a time, in place. */
  has_initial_state = 1;
  for (int t = kPrompt; t < kTokens; ++t) {
    kda_decode_args step = KDA_DECODE_ARGS_INIT;
    step.in = tokens(t, 1);
    step.states = states;
    step.o = f32(o_steps + t * H * V, 1, 1, H, V);
    check(kda_decode(&step));
    printf("token %d: o = %8.5f %8.5f .. %8.5f\n", t, o_steps[t * H * V], o_steps[t * H * V + 1],
           o_steps[t * H * V + H * V - 1]);
  }

  const double o = largest_difference(o_whole, o_steps, kTokens * H * V);
  const double state = largest_difference(state_whole, pool + slot * H * V * K, H * V * K);
  printf("kda %s: prefill and decode differ from one call by %.1e in o and %.1e in the state\n", kda_version(), o,
         state);
  return o < 1e-5 && state < 1e-5 ? 0 : 1;
}
