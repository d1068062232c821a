// The list of operators. The entry points of the library, the binding's functions and Python's names follow from it.
#pragma once

#define KDA_FOR_EACH_OPERATOR(F) \
  F(forward)                     \
  F(backward)                    \
  F(decode)                      \
  F(verify)                      \
  F(flush)                       \
  F(flush_verify)                \
  F(segment_map)                 \
  F(segment_merge)               \
  F(gate)                        \
  F(gate_backward)               \
  F(norm_gate)                   \
  F(norm_gate_backward)          \
  F(conv)                        \
  F(conv_backward)               \
  F(prefill_f32)                 \
  KDA_FOR_EACH_STAGE(F, stage_)

// F(prefix##stage) of every stage of the chunked form.
#define KDA_FOR_EACH_STAGE(F, prefix) \
  F(prefix##cumsum)                   \
  F(prefix##chunk_intra)              \
  F(prefix##recompute_w_u)            \
  F(prefix##delta_h)                  \
  F(prefix##fwd_o)                    \
  F(prefix##bwd_local)                \
  F(prefix##bwd_delta_h)              \
  F(prefix##bwd_wy_dqkg)              \
  F(prefix##bwd_intra)                \
  F(prefix##cumsum_backward)
