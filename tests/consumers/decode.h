/* One token of one head with state 0: o = scale beta (q.k) v, here 0.5 * 0.5 * 1 * v, and a call that is refused. All
 * consumers do this, in C and in C++. */
#include <kda/kda.h>

#include <stdio.h>
#include <string.h>

enum { kSize = 4 };

static kda_tensor row(float* data, int32_t ndim) {
  kda_tensor t = {data, KDA_F32, ndim, {1, 1, 1, kSize}, {kSize, kSize, kSize, 1}};
  if (ndim == 3) t.stride[0] = t.stride[1] = t.stride[2] = 1;
  return t;
}

static int decode(void) {
  float q[kSize] = {1, 0, 0, 0}, v[kSize] = {1, 2, 3, 4}, g[kSize] = {0, 0, 0, 0}, beta = 0.5f, o[kSize] = {0, 0, 0, 0};
  kda_decode_args args = KDA_DECODE_ARGS_INIT;
  args.in.q = args.in.k = row(q, 4);
  args.in.v = row(v, 4);
  args.in.g = row(g, 4);
  args.in.beta = row(&beta, 3);
  args.o = row(o, 4);
  if (kda_decode(&args) != KDA_OK) {
    fprintf(stderr, "%s\n", kda_last_error());
    return 1;
  }
  for (int i = 0; i < kSize; ++i) {
    if (o[i] != 0.25f * v[i]) {
      fprintf(stderr, "o[%d]: expected %g, got %g\n", i, 0.25 * v[i], o[i]);
      return 1;
    }
  }
  args.in.q.shape[3] = 3;
  if (kda_decode(&args) != KDA_INVALID_ARGUMENT || strstr(kda_last_error(), "k: ") == NULL) {
    fprintf(stderr, "expected a refusal of k, got: %s\n", kda_last_error());
    return 1;
  }
  printf("kda %s\n", kda_version());
  return 0;
}
