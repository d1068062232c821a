/* The public header alone, as C11 and pedantic: a program that only asks for the version. */
#include "kda/kda.h"

#include <string.h>

int main(void) {
  kda_forward_args forward = KDA_FORWARD_ARGS_INIT;
  kda_backward_args backward = KDA_BACKWARD_ARGS_INIT;
  kda_decode_args decode = KDA_DECODE_ARGS_INIT;
  kda_gate_args gate = KDA_GATE_ARGS_INIT;
  kda_norm_gate_args norm = KDA_NORM_GATE_ARGS_INIT;
  kda_norm_gate_backward_args norm_backward = KDA_NORM_GATE_BACKWARD_ARGS_INIT;
  kda_gate_backward_args gate_backward = KDA_GATE_BACKWARD_ARGS_INIT;
  _Static_assert(KDA_VERSION_MAJOR >= 0 && KDA_MAX_NDIM == 5, "macros are integers");
  if (forward.struct_size != sizeof forward || backward.struct_size != sizeof backward) return 1;
  if (decode.struct_size != sizeof decode || gate.struct_size != sizeof gate) return 2;
  if (gate_backward.struct_size != sizeof gate_backward || gate_backward.dx.data) return 3;
  if (norm.struct_size != sizeof norm || norm_backward.struct_size != sizeof norm_backward) return 3;
  if (strcmp(kda_status_name(KDA_OK), "KDA_OK") != 0) return 4;
  return kda_forward(NULL) == KDA_INVALID_ARGUMENT ? 0 : 5;
}
