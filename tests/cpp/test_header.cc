// The public header alone, as C++20 and pedantic; included twice, after nothing.
#include "kda/kda.h"

int main() {
  const kda_forward_args forward = KDA_FORWARD_ARGS_INIT;
  kda_decode_args decode = KDA_DECODE_ARGS_INIT;
  decode.in.q.dtype = KDA_BF16;
  return forward.struct_size == sizeof forward && kda_decode(&decode) == KDA_INVALID_ARGUMENT ? 0 : 1;
}
