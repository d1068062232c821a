/* kda: Kimi Delta Attention (KDA) on CPUs and NVIDIA GPUs. The C ABI.
 *
 * Per sequence and value head, for every token t, with a state S in R^{K x V} and alpha_t = exp(g_t):
 *
 *     S  <- Diag(alpha_t) S                 decay
 *     u   = beta_t (v_t - S^T k_t)          correction
 *     S  <- S + k_t u^T
 *     o_t = scale * S^T q_t                 reads the updated state
 *
 * Sizes, everywhere in this header:
 *   B rows of T tokens     N sequences (N = B, or cu_seqlens cuts one row, B = 1, into N)
 *   H query/key heads      HV value heads, HV % H == 0; value head j uses query/key head j / (HV / H)
 *   K key size, V value size, 1..256        C = 64 tokens, the chunk
 *
 * Each operator takes one args struct. Zero the struct (KDA_..._ARGS_INIT does it and fills in struct_size), then set
 * what is needed; an absent tensor has data == NULL and ndim == 0. Everything is checked before anything is written.
 * Calls are reentrant, allocate nothing, and on CUDA are asynchronous on exec.stream.
 */
#ifndef KDA_KDA_H_
#define KDA_KDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KDA_VERSION_MAJOR 0
#define KDA_VERSION_MINOR 1
#define KDA_VERSION_PATCH 0

#if defined(_WIN32)
#define KDA_API __declspec(dllexport)
#else
#define KDA_API __attribute__((visibility("default")))
#endif

typedef enum kda_status {
  KDA_OK = 0,
  KDA_INVALID_ARGUMENT = 1, /* the call breaks the contract; kda_last_error() names the argument, expected, got */
  KDA_UNSUPPORTED = 2,      /* a legal call that no implementation (or not the forced one) takes; lists each reason */
  KDA_CUDA_ERROR = 3,       /* the CUDA runtime failed; the sentence holds its error */
  KDA_INTERNAL_ERROR = 4,   /* a bug in this library */
  KDA_OUT_OF_MEMORY = 5     /* `reference`, which allocates, found no memory; outputs may be written in part */
} kda_status;

typedef enum kda_dtype {
  KDA_F32 = 1,
  KDA_BF16 = 2,
  KDA_F16 = 3,
  KDA_F64 = 4, /* only the implementation `reference` reads or writes it */
  KDA_I32 = 5,
  KDA_I64 = 6,
  KDA_BOOL = 7 /* one byte, 0 or not */
} kda_dtype;

typedef enum kda_device { KDA_CPU = 0, KDA_CUDA = 1 } kda_device;

/* A view of memory that the caller owns. Strides are in elements. The last dimension is dense (stride 1), the other
 * strides of inputs are free. Data is aligned to the size of its elements. Outputs may not overlap anything, except
 * where a struct says so. */
#define KDA_MAX_NDIM 5
typedef struct kda_tensor {
  void* data;
  int32_t dtype; /* kda_dtype */
  int32_t ndim;
  int64_t shape[KDA_MAX_NDIM];
  int64_t stride[KDA_MAX_NDIM];
} kda_tensor;

#define KDA_BATCH_INVARIANT 1u /* a sequence's bits depend on nothing else in the call. CPU: always, at no cost */

/* Where and how to run. */
typedef struct kda_exec {
  int32_t device;           /* kda_device: where every tensor of the call lives */
  int32_t device_id;        /* CUDA ordinal; 0 on the CPU */
  void* stream;             /* CUDA: cudaStream_t, NULL = legacy default stream. CPU: NULL */
  void* workspace;          /* kda_<op>_workspace() bytes, aligned to 256; NULL if that is 0. Overlaps no tensor. Two
                             * calls in flight may not share one; those of one CUDA stream follow each other */
  uint64_t workspace_bytes; /* CUDA: all of them. CPU: at least one thread's share; if not all, fewer threads run */
  const char* impl;         /* implementation to force; NULL: environment variable KDA_IMPL, else the first that can */
  int32_t num_threads;      /* most CPU threads; 0 = as many as OpenMP would use. Never changes a bit of the result */
  uint32_t flags;           /* KDA_BATCH_INVARIANT */
} kda_exec;

typedef enum kda_gate_form {
  /* The gates are right for any A_log, even where exp(A_log) exceeds float32. At g + dt_bias = 0 a bounded gate is
   * lower_bound / 2. */
  KDA_GATE_LOG = 0,        /* g is the natural-log decay itself, <= 0, -inf allowed */
  KDA_GATE_SOFTPLUS = 1,   /* g <- -exp(A_log) * softplus(g + dt_bias) */
  KDA_GATE_LOWER_BOUND = 2 /* g <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); without A_log, exp(A_log) = 1 */
} kda_gate_form;

typedef enum kda_beta_form {
  KDA_BETA_ACTIVATED = 0, /* beta as given */
  KDA_BETA_SIGMOID = 1,   /* beta <- sigmoid(beta) */
  KDA_BETA_2SIGMOID = 2   /* beta <- 2 sigmoid(beta) */
} kda_beta_form;

typedef enum kda_state_layout {
  KDA_STATE_V_FIRST = 0, /* [.., V, K], K dense: what serving engines store */
  KDA_STATE_K_FIRST = 1  /* [.., K, V], V dense */
} kda_state_layout;

/* The inputs that forward, backward and decode share. */
typedef struct kda_inputs {
  kda_tensor q, k;       /* [B,T,H,K]   bf16, f16 or f32; q, k, v of one dtype */
  kda_tensor v;          /* [B,T,HV,V] */
  kda_tensor g;          /* [B,T,HV,K]  bf16, f16 or f32: gate, see gate_form */
  kda_tensor beta;       /* [B,T,HV]    bf16, f16 or f32, see beta_form; any strides */
  kda_tensor A_log;      /* [HV]        f32, or absent; needed with SOFTPLUS, allowed with LOWER_BOUND */
  kda_tensor dt_bias;    /* [HV,K]      f32, or absent; only with SOFTPLUS and LOWER_BOUND */
  kda_tensor cu_seqlens; /* [N+1]       i32 or i64, or absent: sequence n is tokens cu[n] .. cu[n+1]-1 of the one row.
                            cu[0] = 0, never decreasing, cu[N] <= T; rows of o and of gradients from cu[N] on are
                            zeroed */
  int32_t gate_form;     /* kda_gate_form */
  int32_t beta_form;     /* kda_beta_form */
  int32_t qk_l2norm;     /* not 0: q and k are divided by sqrt(sum of squares + 1e-6) first */
  int32_t state_layout;  /* kda_state_layout of every state tensor of the call */
  float lower_bound;     /* LOWER_BOUND only: finite, < 0 */
  float scale;           /* 0 = K^-0.5 */
} kda_inputs;

/* Where the states of forward and decode come from and go to. Without state_indices, h0 and hT are [N,HV,V,K] (or
 * [N,HV,K,V], see state_layout), both optional: without h0 sequences start from zeros, without hT no final state is
 * written. With state_indices they are pools [slots,HV,V,K] of any slot stride: sequence n reads slot state_indices[n]
 * of h0 and writes that slot of hT. h0 and hT may be the same tensor (in place).
 *
 * state_indices[n] < first_valid_slot marks a padded sequence: its rows of o are zeroed, no state is touched. Two live
 * sequences may share a slot only where it is not written: without hT, or with out_state_indices. has_initial_state[n]
 * == 0 starts sequence n from zeros, whatever its slot holds. On the CPU the values are checked; on CUDA they live on
 * the device: an index >= slots is treated as padding.
 *
 * Slots to read and slots to write: out_state_indices of kda_forward, kda_decode and kda_conv. With it, hT is a pool
 * of any number of slots. Sequence n reads slot state_indices[n] of h0 (without state_indices: row n), and writes slot
 * out_state_indices[n] of hT, which may be the slot that it reads. out_state_indices[n] < first_valid_slot writes
 * nothing. What is padding, state_indices alone says. A slot may not be written by two live sequences, nor by one
 * while another reads it: there is no order among sequences. The CPU refuses both; on CUDA the state is then
 * undefined, and an index >= slots of hT writes nothing.
 *
 * Indices may be i32 or i64, whatever an operator takes them for: slots, accepted tokens, parents. i64 values fit in
 * 32 bits. The CPU refuses others; on CUDA the lower half of a value counts, so that kernels read 4 bytes of each. */
typedef struct kda_states {
  kda_tensor h0;                /* [N,HV,V,K] in, optional: f32 or bf16; accumulation is always f32 */
  kda_tensor hT;                /* [N,HV,V,K] out, optional: f32 or bf16 */
  kda_tensor state_indices;     /* [N] i32 or i64, optional */
  kda_tensor has_initial_state; /* [N] bool, optional; needs h0 */
  int32_t first_valid_slot;     /* 0: negative indices are padding. 1: slot 0 is, too */
  int32_t reserved;             /* 0 */
} kda_states;

/* The norm and gate of the output, in the same call. With `apply`, o has the bits that kda_norm_gate, with x = y = o,
 * makes of the operator's o, which is rounded to its dtype first. A row of zeros, as padding has, stays zeros (or -0):
 * whatever its gate is, and with eps = 0, too. Behind `reference` it is `reference`, else the first implementation of
 * kda_norm_gate that can. */
typedef struct kda_norm_inputs {
  kda_tensor gate;    /* [B,T,HV,V] bf16, f16 or f32; absent with KDA_NORM_NONE; no output may overlap it */
  kda_tensor weight;  /* [V]        bf16, f16 or f32, optional */
  double eps;         /* 0..FLT_MAX */
  int32_t activation; /* kda_norm_activation, see kda_norm_gate */
  int32_t apply;      /* 0: no norm, and no gate and weight here */
} kda_norm_inputs;

/* ---- kda_forward: prefill, and the forward pass of training -------------------------------------------------------
 * Checkpoints. After m * checkpoint_every tokens of sequence n (m = 1, 2, ..; only completed ones) its state is copied
 * to slot checkpoint_slots[n][m-1] of `checkpoints`; a slot < first_valid_slot is skipped, and so is m > M. A request
 * that goes on has had tokens before: with checkpoint_offset its checkpoints are where offset + t is a multiple of
 * checkpoint_every, the first after t = checkpoint_every - offset % checkpoint_every tokens of the call. Chunks then
 * end where offset + t is a multiple of C. `checkpoints` may be the pool of h0 or hT itself. Then no sequence may read
 * or write the slot of a checkpoint, which the CPU checks. On CUDA only `cuda_prefill_recurrent` keeps checkpoints that
 * are 16 m tokens apart and not C m, or with an offset beside h or v_new.
 *
 * Outputs that backward takes, or that are useful by themselves: h holds the state before every h_every-th chunk (0,
 * h_every, 2 h_every, ..), v_new the corrections u_t, Aqk and Akk the scores of the chunks (row t holds the C columns
 * of its chunk; elements that the formulas leave out are 0):
 *     Aqk[i,j] = scale  * sum_d q_id k_jd exp(g_j+1 + .. + g_i)_d    j <= i
 *     Akk[i,j] = beta_i * sum_d k_id k_jd exp(g_j+1 + .. + g_i)_d    j <  i
 * Each sequence is cut into chunks from its own start. Sequence n owns ceil(len_n / (C h_every)) rows of h, after
 * those of the sequences before it. h needs room for all of them: N * ceil(T / (C h_every)) rows without cu_seqlens,
 * at most T / (C h_every) + N rows with it. Rows of these four tensors that belong to no token, or to a padded
 * sequence, are not written. With h_v_first, h is V-first, whatever the layout of the other states is. */
typedef struct kda_forward_args {
  uint64_t struct_size; /* sizeof(kda_forward_args) */
  kda_exec exec;
  kda_inputs in;
  kda_states states;
  kda_tensor o;                 /* [B,T,HV,V]  out: bf16, f16 or f32 */
  kda_tensor checkpoints;       /* [slots,HV,V,K] out, optional: f32 or bf16 */
  kda_tensor checkpoint_slots;  /* [N,M] i32 or i64, with checkpoints */
  kda_tensor h;                 /* [NT,HV,V,K] (or K-first, see h_v_first) out, optional: f32 or bf16 */
  kda_tensor v_new;             /* [B,T,HV,V]  out, optional: f32 or bf16 */
  kda_tensor Aqk, Akk;          /* [B,T,HV,C]  out, optional: f32 */
  int32_t checkpoint_every;     /* tokens, a multiple of 16 */
  int32_t h_every;              /* chunks from one row of h to the next; 0 = 1 */
  kda_tensor out_state_indices; /* [N] i32 or i64, optional, with hT: see kda_states */
  kda_tensor checkpoint_offset; /* [N] i32 or i64, optional: tokens of the request before the call, >= 0 */
  kda_norm_inputs norm;         /* optional */
  int32_t h_v_first;            /* not 0: h is V-first, also where state_layout is K-first */
  int32_t reserved;             /* 0 */
} kda_forward_args;

/* ---- kda_backward: gradients of everything --------------------------------------------------------------------------
 * `in` and h0 are as given to kda_forward (no pools). Every gradient is optional and overwritten, never accumulated
 * into. Sums over tokens and heads are formed in f32 in a fixed order. Give it one of these sets of what kda_forward
 * can save:
 *   h alone, of any h_every: h_every chunks at a time are computed again, and the workspace does not grow with T;
 *   h (h_every = 1), v_new, Aqk, Akk: nothing is computed again on the CPU;
 *   h (h_every = 1), V-first (see h_v_first), and v_new: nothing is computed again on CUDA, which uses no other saved
 *     tensor;
 *   nothing: whole sequences are computed again, and the workspace holds every chunk of the longest. */
typedef struct kda_backward_args {
  uint64_t struct_size; /* sizeof(kda_backward_args) */
  kda_exec exec;
  kda_inputs in;
  kda_tensor h0;                 /* [N,HV,V,K] in, optional */
  kda_tensor d_o;                /* [B,T,HV,V] in: bf16, f16 or f32 */
  kda_tensor dhT;                /* [N,HV,V,K] in, optional: f32 or bf16 */
  kda_tensor h, v_new, Aqk, Akk; /* as kda_forward wrote them, in, optional */
  kda_tensor dq, dk;             /* [B,T,H,K]  out, optional */
  kda_tensor dv;                 /* [B,T,HV,V] out, optional */
  kda_tensor dg;                 /* [B,T,HV,K] out, optional: of the gate input (GATE_LOG: of the natural-log decay) */
  kda_tensor dbeta;              /* [B,T,HV]   out, optional: of the beta input */
  kda_tensor dA_log;             /* [HV]       out, optional, with A_log: f32 */
  kda_tensor d_dt_bias;          /* [HV,K]     out, optional, with dt_bias: f32 */
  kda_tensor dh0;                /* [N,HV,V,K] out, optional: f32 or bf16; allowed without h0 */
  int32_t h_every;               /* as given to kda_forward; 0 = 1 */
  int32_t h_v_first;             /* as given to kda_forward */
} kda_backward_args;

/* ---- the causal convolution in front -------------------------------------------------------------------------------
 * y_t = bias + sum_j weight[:,j] x_(t-W+1+j), in f32, then z_t = y_t sigmoid(y_t) rounded to the dtype of x. Decode
 * and verify take the raw packed rows instead of q, k, v (in.q, in.k, in.v are absent): D = 2 H K + HV V channels, q
 * heads first, then k, then v. HV and K are those of g, V is that of o, and H follows from D. The bits are those of
 * kda_conv followed by the operator without it. */
typedef struct kda_conv_inputs {
  kda_tensor x;       /* [B,T,D]       raw, bf16, f16 or f32, the dtype of q; absent: no convolution */
  kda_tensor weight;  /* [D,W]         with x: W = 2..4; bf16, f16 or f32; weight[:,W-1] belongs to the current token */
  kda_tensor bias;    /* [D]           with x, optional */
  kda_tensor state;   /* [slots,D,W-1] with x, in and out: the last raw rows, oldest first; any float, any strides */
  kda_tensor indices; /* [N] i32 or i64  with x, optional: slots of sequences (else row n); < 0 or >= slots: no state */
} kda_conv_inputs;

/* kda_conv: whole prompts, with SiLU or without. xx = state ++ x are the inputs of a sequence; the final state is the
 * last W-1 rows of xx. weight, bias and states may each be bf16, f16 or f32. Slots are as in kda_states.
 *
 * x may be in up to three tensors, such as the projections q, k and v: with x1, and x2, channels come after those of x
 * and D is the sum of theirs. They have B, T and the dtype of x, and strides of their own. All other tensors have all
 * D channels. The bits are those of a call with one x. */
typedef struct kda_conv_args {
  uint64_t struct_size; /* sizeof(kda_conv_args) */
  kda_exec exec;
  kda_tensor x;                 /* [B,T,D]: bf16, f16 or f32 */
  kda_tensor weight;            /* [D,W], W = 2..4 */
  kda_tensor bias;              /* [D], optional */
  kda_tensor cu_seqlens;        /* [N+1] i32 or i64, optional: as in kda_inputs */
  kda_tensor initial_state;     /* [N,D,W-1], or [slots,D,W-1] with state_indices, any strides; optional, else zeros */
  kda_tensor final_state;       /* [N,D,W-1] out, optional: like initial_state, and may be the same tensor */
  kda_tensor state_indices;     /* [N] i32 or i64, optional; < first_valid_slot: padding, y is zeroed */
  kda_tensor has_initial_state; /* [N] bool, optional; needs initial_state */
  kda_tensor y;                 /* [B,T,D] out, in the dtype of x */
  int32_t silu;                 /* not 0: y <- y sigmoid(y) */
  int32_t first_valid_slot;
  kda_tensor out_state_indices; /* [N] i32 or i64, optional, with final_state: see kda_states */
  kda_tensor checkpoints;       /* [slots,D,W-1] out, optional: any float, any strides; as in kda_forward */
  kda_tensor checkpoint_slots;  /* [N,M] i32 or i64, with checkpoints */
  kda_tensor checkpoint_offset; /* [N] i32 or i64, optional */
  int32_t checkpoint_every;     /* tokens, a multiple of 16 */
  int32_t reserved;             /* 0 */
  kda_tensor x1, x2;            /* [B,T,D1], [B,T,D2], optional: the channels after those of x; x2 needs x1 */
} kda_conv_args;

typedef struct kda_conv_backward_args {
  uint64_t struct_size; /* sizeof(kda_conv_backward_args) */
  kda_exec exec;
  kda_tensor x, weight, bias, cu_seqlens; /* as given to kda_conv */
  kda_tensor initial_state;               /* [N,D,W-1] (no pool), optional */
  kda_tensor dy;                          /* [B,T,D] in, in the dtype of x */
  kda_tensor d_final_state;               /* [N,D,W-1] in, optional */
  kda_tensor dx;                          /* [B,T,D]   out, optional, in the dtype of x */
  kda_tensor dweight;                     /* [D,W]     out, optional: f32 */
  kda_tensor dbias;                       /* [D]       out, optional, with bias: f32 */
  kda_tensor d_initial_state;             /* [N,D,W-1] out, optional */
  int32_t silu;
  int32_t reserved;  /* 0 */
  kda_tensor x1, x2; /* as given to kda_conv; dx has the gradients of all D channels */
} kda_conv_backward_args;

/* ---- kda_decode: the token recurrence over a state pool -------------------------------------------------------------
 * Tuned for 1..16 tokens a sequence, correct for any number. Where the states after the tokens go:
 *   hT, which may be h0 (in place), gets the last one;
 *   snapshots gets the one after token t of sequence n in slot snapshot_slots[n][t] (< first_valid_slot: skipped), or
 *   without snapshot_slots in row [n][t]. The last snapshot has the bits of hT;
 *   without hT and snapshots the pool stays as it is.
 * With accepted, sequence n starts from snapshot accepted[n] - 1 of an earlier call (accepted[n] is clamped to 1..S):
 * from slot snapshot_slots[n][accepted[n]-1] of h0 (skipped: from zeros), or without snapshot_slots from row
 * [n][accepted[n]-1] of snapshots. Without state_indices a skipped snapshot_slots[n][0] marks padding. On the CPU
 * decode without conv needs no workspace. With up to 4 tokens a sequence, on V-first or f32 states, it is as fast
 * without one and asks for none. With conv, the workspace holds the convolved rows. */
typedef struct kda_decode_args {
  uint64_t struct_size; /* sizeof(kda_decode_args) */
  kda_exec exec;
  kda_inputs in;
  kda_states states;
  kda_tensor o;                 /* [B,T,HV,V] out: bf16, f16 or f32 */
  kda_conv_inputs conv;         /* optional; the tokens of the call advance its state */
  kda_tensor snapshots;         /* [N,S,HV,V,K] or [slots,HV,V,K] with snapshot_slots; out, optional; may be h0 */
  kda_tensor snapshot_slots;    /* [N,S] i32 or i64, optional: S >= tokens of a sequence */
  kda_tensor accepted;          /* [N] i32 or i64, optional */
  kda_tensor out_state_indices; /* [N] i32 or i64, optional, with hT: see kda_states */
  kda_norm_inputs norm;         /* optional */
} kda_decode_args;

/* ---- speculative decoding: kda_verify, kda_flush, kda_flush_verify --------------------------------------------------
 * Verify computes the outputs of draft tokens from a state that it does not change. Per token it records what a later
 * flush needs to apply the accepted ones: 1.5 KB a head instead of the 64 KB of a state (K = V = 128). Records live in
 * slots of R entries. Without a ring, entry t belongs to token t of the request. With ring_first and ring_count a slot
 * is a ring: it holds ring_count[slot] committed entries from ring_first[slot] on, which are not yet applied to the
 * state, and the new tokens after them, all positions modulo R. Live requests must have different indices of states,
 * of conv states and of records. On the CPU these are checked; on CUDA an index >= slots is treated as padding. A
 * request with a negative index of records has none: verify records nothing, flush applies nothing and leaves its conv
 * state alone. */
typedef struct kda_records {
  kda_tensor u;       /* [slots,R,HV,V] f32: corrections; absent: no records */
  kda_tensor k;       /* [slots,R,H,K]  f32, with u: keys, normalised */
  kda_tensor alpha;   /* [slots,R,HV,K] f32, with u: decays exp(g) of the single tokens */
  kda_tensor indices; /* [N] i32 or i64: the slot of each request, optional (else row n) */
  kda_tensor ring_first,
      ring_count; /* [slots] i32, optional, both or none: clamped to the slot; only flush_verify writes them */
} kda_records;

/* Drafts are a chain, or with `parents` a tree: parents[n][t] < t is the token before t, negative for a child of the
 * committed text; on the device a value >= t is treated as t - 1. */
typedef struct kda_verify_args {
  uint64_t struct_size; /* sizeof(kda_verify_args) */
  kda_exec exec;
  kda_inputs in;        /* at most 16 tokens a request; cu_seqlens for requests of different lengths */
  kda_states states;    /* h0 is read; no hT */
  kda_conv_inputs conv; /* optional; its state is read here, and advanced by the flush */
  kda_tensor o;         /* [B,T,HV,V] out */
  kda_records records;  /* out, optional (needed with a ring): at least as many entries as tokens */
  kda_tensor parents;   /* [N,T] i32 or i64, optional */
  kda_norm_inputs norm; /* optional */
} kda_verify_args;

/* S <- Diag(decay of all) S + sum_i (k_i decayed to the end) u_i^T over the committed entries of the ring and the
 * first accept_len[n] tokens after them (with parents: the path that ends in token accept_len[n] - 1). accept_len is
 * clamped to 0..R less the committed entries, and to the tokens of parents and of conv_x, if given. If there is
 * nothing to apply, nothing is written. A call flushes one layer, or all layers of a model: then state, records and
 * conv tensors have a leading dimension of layers, and all layers share indices and lengths. */
typedef struct kda_flush_args {
  uint64_t struct_size; /* sizeof(kda_flush_args) */
  kda_exec exec;
  kda_tensor state;         /* [slots,HV,V,K] or [layers,slots,HV,V,K], f32 or bf16, in and out */
  kda_tensor state_indices; /* [N] i32 or i64, optional (else row n); < first_valid_slot or >= slots: no effect */
  kda_records records;      /* in: [slots,R,..] or [layers,slots,R,..] */
  kda_tensor accept_len;    /* [N] i32 or i64 */
  kda_tensor parents;       /* [N,T] i32 or i64, optional: as given to verify */
  kda_tensor conv_x;        /* [N,T,D] or [layers,N,T,D], optional: raw rows of the tokens, which advance conv_state */
  kda_tensor conv_state;    /* [slots,D,W-1] or [layers,slots,D,W-1], with conv_x, in and out */
  kda_tensor conv_indices;  /* [N] i32 or i64, optional, with conv_x */
  int32_t state_layout;
  int32_t first_valid_slot;
} kda_flush_args;

/* A flush of the last round and a verify of the next in one pass: the state is read once and written once. With a ring
 * it is written only when the ring runs full. Accepted tokens become committed entries (the cursors are written). Once
 * there is no room left for two rounds, the committed entries are applied and the ring starts again. accept_len is
 * clamped as in flush, to the tokens of last_parents and of last_conv_x; with a ring also to leave room for the new
 * drafts. */
typedef struct kda_flush_verify_args {
  uint64_t struct_size; /* sizeof(kda_flush_verify_args) */
  kda_exec exec;
  kda_inputs in;           /* the new drafts */
  kda_states states;       /* h0 and hT: the same pool */
  kda_conv_inputs conv;    /* optional; the accepted rows of last_conv_x advance its state first */
  kda_tensor o;            /* [B,T,HV,V] out */
  kda_records last;        /* in: those of the last round; absent with a ring */
  kda_tensor accept_len;   /* [N] i32 or i64: of the last round */
  kda_tensor last_parents; /* [N,T'] i32 or i64, optional */
  kda_tensor last_conv_x;  /* [N,T',D] with conv.x */
  kda_records records;     /* out: those of this round, in memory of its own; with a ring in and out */
  kda_tensor parents;      /* [N,T] i32 or i64, optional */
  int32_t max_tokens;      /* with a ring: the most tokens of any round on it; 0 (not with cu_seqlens): T */
  int32_t reserved;        /* 0 */
  kda_norm_inputs norm;    /* optional */
} kda_flush_verify_args;

/* ---- segment maps ---------------------------------------------------------------------------------------------------
 * The state after a sequence is an affine function of the state before it: S_out = M S_in + b. The gradient of the
 * state before it is an affine function of the gradient of the state after it: dS_in = M^T dS_out + d. Maps serve long
 * sequences that are cut into parts, and context parallelism. An empty sequence has M = I and b = d = 0. M and b do
 * not depend on q, and d not on v, but all inputs are given. */
typedef struct kda_segment_map_args {
  uint64_t struct_size; /* sizeof(kda_segment_map_args) */
  kda_exec exec;
  kda_inputs in;
  kda_tensor d_o; /* [B,T,HV,V] in, with d: bf16, f16 or f32 */
  kda_tensor M;   /* [N,HV,K,K] f32 out, optional: rows are channels of S_out */
  kda_tensor b;   /* [N,HV,V,K] (or K-first) f32 out, optional */
  kda_tensor d;   /* [N,HV,V,K] (or K-first) f32 out, optional */
} kda_segment_map_args;

/* Forward: states[0] = h0 (or 0), states[p+1] = M[p] states[p] + b[p]. Reverse: states[P] = h0 (or 0), states[p] =
 * M[p]^T states[p+1] + b[p]. */
typedef struct kda_segment_merge_args {
  uint64_t struct_size; /* sizeof(kda_segment_merge_args) */
  kda_exec exec;
  kda_tensor M;      /* [P,HV,K,K] f32 */
  kda_tensor b;      /* [P,HV,V,K] (or K-first) f32 */
  kda_tensor h0;     /* [HV,V,K] (or K-first) f32 or bf16, optional */
  kda_tensor states; /* [P+1,HV,V,K] (or K-first) f32 out */
  int32_t state_layout;
  int32_t reverse;
} kda_segment_merge_args;

/* ---- stages ---------------------------------------------------------------------------------------------------------
 * The chunked form cut where the classic training kernels are cut: for kernel work, for tests, and for libraries that
 * swap single stages. A name means the same tensor in every stage. Whole forward and backward:
 *
 *   cumsum, chunk_intra, delta_h, fwd_o
 *   cumsum, recompute_w_u, delta_h (unless forward's are kept), bwd_local, bwd_delta_h, bwd_wy_dqkg, bwd_intra,
 *   cumsum_backward
 *
 * The caller does the rest. Before the stages it normalises q and k and activates g (kda_gate) and beta. At the end it
 * sums dq and dk over the value heads of a query/key head and puts them through the backward of the norm, dg and dbeta
 * through the backward of their activations.
 *
 * For a chunk of L <= C tokens with rows i and j, S the state before it, dS the gradient of the state after it:
 *   G_i = sum_(j<=i) max(g_j log2(e), -160)    log2 of the decay from the chunk's start through token i
 *   E_i = 2^G_i    F_i = 2^(G_(L-1) - G_i)    ell = 2^G_(L-1)    R_ij = 2^(G_i - G_j), j <= i    kG = k E
 *   Akk[i,j] = beta_i sum_d k_id k_jd R_ijd, j < i
 * 2^-160 is 0 in f32: a gate of -inf is a decay of 0, and G stays finite. A G of your own must be finite and may not
 * rise. Only differences of G within one chunk are exponentiated, never -G, so no factor exceeds 1.
 *
 * Matrices of a chunk are [B,T,HV,C]: the row of a token holds the C columns of its chunk. Above the diagonal, and in
 * Akk and dAkk also on it, they are written as 0 and never read. States of chunks, h and dh, are [NT,HV,V,K] (or
 * K-first), like h of kda_forward with h_every = 1. The rows of tokens from cu_seqlens[N] on are zeroed in every
 * output. */
typedef struct kda_stage {
  kda_tensor cu_seqlens; /* [N+1] i32 or i64, or absent, as in kda_inputs */
  float scale;           /* 0 = K^-0.5; ignored where no formula has it */
  int32_t state_layout;  /* kda_state_layout of every state tensor of the call */
} kda_stage;

/* F1: G from the natural-log decay. */
typedef struct kda_stage_cumsum_args {
  uint64_t struct_size; /* sizeof(kda_stage_cumsum_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor g; /* [B,T,HV,K] in: bf16, f16 or f32; <= 0, -inf allowed */
  kda_tensor G; /* [B,T,HV,K] out: f32 */
} kda_stage_cumsum_args;

/* F2, F3: the scores, the inverse, and what follows from it without a state. */
typedef struct kda_stage_chunk_intra_args {
  uint64_t struct_size; /* sizeof(kda_stage_chunk_intra_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor q, k;    /* [B,T,H,K]  in: bf16, f16 or f32, like every tensor of a stage whose dtype is not given */
  kda_tensor v;       /* [B,T,HV,V] in */
  kda_tensor G;       /* [B,T,HV,K] in: f32 */
  kda_tensor beta;    /* [B,T,HV]   in; any strides */
  kda_tensor Aqk;     /* [B,T,HV,C] out: scale sum_d q_id k_jd R_ijd, j <= i */
  kda_tensor Akk_inv; /* [B,T,HV,C] out: (I + Akk)^-1, the T of the formulas below */
  kda_tensor w, u;    /* [B,T,HV,K], [B,T,HV,V] out, optional: T beta kG, T beta v, from T as it was stored */
  kda_tensor qG, kg;  /* [B,T,HV,K] out, optional: q E, k F */
} kda_stage_chunk_intra_args;

/* F3: the optional outputs of chunk_intra again, from Akk_inv, with the same bits. */
typedef struct kda_stage_recompute_w_u_args {
  uint64_t struct_size; /* sizeof(kda_stage_recompute_w_u_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor q, k;    /* [B,T,H,K]  in; q is optional without qG */
  kda_tensor v;       /* [B,T,HV,V] in */
  kda_tensor G;       /* [B,T,HV,K] in: f32 */
  kda_tensor beta;    /* [B,T,HV]   in; any strides */
  kda_tensor Akk_inv; /* [B,T,HV,C] in */
  kda_tensor w, u;    /* [B,T,HV,K], [B,T,HV,V] out, optional */
  kda_tensor qG, kg;  /* [B,T,HV,K] out, optional */
} kda_stage_recompute_w_u_args;

/* F4: v_new = u - w S, then S <- Diag(ell) S + kg^T v_new, chunk after chunk. */
typedef struct kda_stage_delta_h_args {
  uint64_t struct_size; /* sizeof(kda_stage_delta_h_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor kg, w; /* [B,T,HV,K] in */
  kda_tensor u;     /* [B,T,HV,V] in */
  kda_tensor G;     /* [B,T,HV,K] in: f32 */
  kda_tensor h0;    /* [N,HV,V,K] in, optional: f32 or bf16 */
  kda_tensor h;     /* [NT,HV,V,K] out, optional: S before every chunk; f32 or bf16 */
  kda_tensor v_new; /* [B,T,HV,V] out, optional */
  kda_tensor hT;    /* [N,HV,V,K] out, optional: f32 or bf16; may be h0 */
} kda_stage_delta_h_args;

/* F5: o = scale q E S + Aqk v_new. */
typedef struct kda_stage_fwd_o_args {
  uint64_t struct_size; /* sizeof(kda_stage_fwd_o_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor q;     /* [B,T,H,K]   in */
  kda_tensor v_new; /* [B,T,HV,V]  in */
  kda_tensor G;     /* [B,T,HV,K]  in: f32 */
  kda_tensor Aqk;   /* [B,T,HV,C]  in */
  kda_tensor h;     /* [NT,HV,V,K] in: f32 or bf16 */
  kda_tensor o;     /* [B,T,HV,V]  out */
} kda_stage_fwd_o_args;

/* B1: dAqk = scale tril(d_o v_new^T), dv_local = Aqk^T d_o. No tensor here has K, so scale may not be 0. */
typedef struct kda_stage_bwd_local_args {
  uint64_t struct_size; /* sizeof(kda_stage_bwd_local_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor v_new, d_o; /* [B,T,HV,V] in */
  kda_tensor Aqk;        /* [B,T,HV,C] in */
  kda_tensor dAqk;       /* [B,T,HV,C] out: f32 */
  kda_tensor dv_local;   /* [B,T,HV,V] out */
} kda_stage_bwd_local_args;

/* B2: dv_new = dv_local + kg dS, then dS <- Diag(ell) dS + scale qG^T d_o - w^T dv_new, last chunk first. */
typedef struct kda_stage_bwd_delta_h_args {
  uint64_t struct_size; /* sizeof(kda_stage_bwd_delta_h_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor qG, kg, w;     /* [B,T,HV,K]  in */
  kda_tensor G;             /* [B,T,HV,K]  in: f32 */
  kda_tensor d_o, dv_local; /* [B,T,HV,V]  in */
  kda_tensor dhT;           /* [N,HV,V,K]  in, optional: f32 or bf16 */
  kda_tensor dh;            /* [NT,HV,V,K] out: dS of every chunk; f32 or bf16 */
  kda_tensor dv_new;        /* [B,T,HV,V]  out */
  kda_tensor dh0;           /* [N,HV,V,K]  out, optional: f32 or bf16 */
} kda_stage_bwd_delta_h_args;

/* B3: x = T^T dv_new, y = x S^T;
 *   dq = scale (d_o S^T) E    dk = (v_new dS^T) F - beta y E    dv = beta x    dbeta = x.v - kG.y
 *   dAkk = -strict_tril(x v_new^T)
 *   dG = q dq - k (v_new dS^T) F - beta kG y
 *   dG_(L-1) += ell (S.dS) + the sum over rows of k (v_new dS^T) F
 * where . sums over channels (over V in S.dS). */
typedef struct kda_stage_bwd_wy_dqkg_args {
  uint64_t struct_size; /* sizeof(kda_stage_bwd_wy_dqkg_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor q, k;        /* [B,T,H,K]   in */
  kda_tensor v, v_new;    /* [B,T,HV,V]  in */
  kda_tensor G;           /* [B,T,HV,K]  in: f32 */
  kda_tensor beta;        /* [B,T,HV]    in; any strides */
  kda_tensor Akk_inv;     /* [B,T,HV,C]  in */
  kda_tensor h, dh;       /* [NT,HV,V,K] in: f32 or bf16 */
  kda_tensor d_o, dv_new; /* [B,T,HV,V]  in */
  kda_tensor dq, dk;      /* [B,T,HV,K]  out: f32 */
  kda_tensor dv;          /* [B,T,HV,V]  out */
  kda_tensor dbeta;       /* [B,T,HV]    out: f32; any strides */
  kda_tensor dG;          /* [B,T,HV,K]  out: f32 */
  kda_tensor dAkk;        /* [B,T,HV,C]  out: f32; gradient of Akk without its beta */
} kda_stage_bwd_wy_dqkg_args;

/* B4: adds what pairs of tokens contribute to dq, dk, dG, dbeta:
 *   p_i = sum_(j<=i) dAqk_ij k_j R_ij    r_i = sum_(j<i) dAkk_ij k_j R_ij
 *   c_j = sum_(i>=j) dAqk_ij q_i R_ij + sum_(i>j) dAkk_ij beta_i k_i R_ij
 *   dq += p    dk += beta r + c    dbeta += k.r    dG += q p + k (beta r - c) */
typedef struct kda_stage_bwd_intra_args {
  uint64_t struct_size; /* sizeof(kda_stage_bwd_intra_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor q, k;       /* [B,T,H,K]  in */
  kda_tensor G;          /* [B,T,HV,K] in: f32 */
  kda_tensor beta;       /* [B,T,HV]   in; any strides */
  kda_tensor dAqk, dAkk; /* [B,T,HV,C] in: f32 */
  kda_tensor dq, dk;     /* [B,T,HV,K] in and out: f32 */
  kda_tensor dbeta;      /* [B,T,HV]   in and out: f32; any strides */
  kda_tensor dG;         /* [B,T,HV,K] in and out: f32 */
} kda_stage_bwd_intra_args;

/* B5: dg_t = sum of dG from t to the end of its chunk; 0 where the decay of g is 0 in f32, if g is given. */
typedef struct kda_stage_cumsum_backward_args {
  uint64_t struct_size; /* sizeof(kda_stage_cumsum_backward_args) */
  kda_exec exec;
  kda_stage at;
  kda_tensor g;  /* [B,T,HV,K] in, optional: as given to cumsum */
  kda_tensor dG; /* [B,T,HV,K] in: f32 */
  kda_tensor dg; /* [B,T,HV,K] out */
} kda_stage_cumsum_backward_args;

/* ---- kda_prefill_f32: whole prompts in f32, heads before tokens -----------------------------------------------------
 * The (w, u) form of kda_forward on activated inputs, with w and u themselves as outputs. For each chunk of `chunk`
 * tokens:
 *   w = (I + Akk)^-1 beta k E    u = (I + Akk)^-1 beta v    v_new = u - w S
 * o and hT are those of kda_forward, for either size of chunk. K and V may be anything in 1..256; (K, V, chunk) of
 * (64,64,32), (64,64,64), (128,128,32) and (128,128,64) fill tiles of tensor cores. T need not be a multiple of the
 * chunk. */
typedef struct kda_prefill_f32_args {
  uint64_t struct_size; /* sizeof(kda_prefill_f32_args) */
  kda_exec exec;
  kda_tensor q, k; /* [B,H,T,K]   in; every tensor is f32 */
  kda_tensor v;    /* [B,HV,T,V]  in */
  kda_tensor g;    /* [B,HV,T,K]  in: natural-log decay, <= 0, -inf allowed */
  kda_tensor beta; /* [B,HV,T]    in, activated; any strides */
  kda_tensor h0;   /* [B,HV,V,K]  in, optional (or K-first) */
  kda_tensor o;    /* [B,HV,T,V]  out */
  kda_tensor w;    /* [B,HV,ceil(T/chunk),chunk,K] out, optional; rows after the last token are zeroed */
  kda_tensor u;    /* [B,HV,ceil(T/chunk),chunk,V] out, optional; the same */
  kda_tensor hT;   /* [B,HV,V,K]  out, optional; may be h0 */
  int32_t chunk;   /* 32 or 64; 0 = 64 */
  int32_t state_layout;
  float scale;      /* 0 = K^-0.5 */
  int32_t reserved; /* 0 */
} kda_prefill_f32_args;

/* ---- kda_gate: the gate activation alone ----------------------------------------------------------------------------
 * g = -exp(A_log) softplus(x + dt_bias)   or   lower_bound sigmoid(exp(A_log) (x + dt_bias)) */
typedef struct kda_gate_args {
  uint64_t struct_size; /* sizeof(kda_gate_args) */
  kda_exec exec;
  kda_tensor x;       /* [M,HV,K] bf16, f16 or f32 */
  kda_tensor A_log;   /* [HV]     f32; needed with SOFTPLUS */
  kda_tensor dt_bias; /* [HV,K]   f32, optional */
  kda_tensor g;       /* [M,HV,K] out: bf16, f16 or f32 */
  int32_t gate_form;  /* SOFTPLUS or LOWER_BOUND */
  float lower_bound;
} kda_gate_args;

typedef struct kda_gate_backward_args {
  uint64_t struct_size; /* sizeof(kda_gate_backward_args) */
  kda_exec exec;
  kda_tensor x;         /* as given to kda_gate */
  kda_tensor A_log;     /* as given to kda_gate */
  kda_tensor dt_bias;   /* as given to kda_gate */
  kda_tensor dg;        /* [M,HV,K] in: gradient of g */
  kda_tensor dx;        /* [M,HV,K] out */
  kda_tensor dA_log;    /* [HV]     out, optional, with A_log: f32 */
  kda_tensor d_dt_bias; /* [HV,K]   out, optional, with dt_bias: f32 */
  int32_t gate_form;
  float lower_bound;
} kda_gate_backward_args;

/* ---- kda_norm_gate: the output's norm and gate ----------------------------------------------------------------------
 * y = x / sqrt(mean of x^2 over V + eps) * weight * act(gate), in f32, rounded once. A row is V numbers with one (b, t,
 * hv), and V is 1..8192 here. Each tensor has a dtype and row strides of its own, so that `gate` may be a slice of a
 * packed projection. Without weight, ones take its place. y may be x or gate, as the very same view. Rows are right
 * for any numbers of f32, also where x^2 overflows or underflows. A row of zeros with eps = 0 is NaN. */
typedef enum kda_norm_activation {
  KDA_NORM_NONE = 0,    /* no gate, and only then: y = x / sqrt(..) * weight */
  KDA_NORM_SIGMOID = 1, /* act(z) = sigmoid(z) */
  KDA_NORM_SILU = 2     /* act(z) = z sigmoid(z), also called swish */
} kda_norm_activation;

typedef struct kda_norm_gate_args {
  uint64_t struct_size; /* sizeof(kda_norm_gate_args) */
  kda_exec exec;
  kda_tensor x;       /* [B,T,HV,V] bf16, f16 or f32 */
  kda_tensor gate;    /* [B,T,HV,V] bf16, f16 or f32; absent with NONE */
  kda_tensor weight;  /* [V]        bf16, f16 or f32, optional */
  kda_tensor y;       /* [B,T,HV,V] out: bf16, f16 or f32; may be x or gate */
  double eps;         /* 0..FLT_MAX; a double for the oracle, f32 elsewhere */
  int32_t activation; /* kda_norm_activation */
  int32_t reserved;   /* 0 */
} kda_norm_gate_args;

/* Gradients of x, gate and weight, each optional. Nothing is saved by kda_norm_gate. dweight is summed over rows in f32
 * in an order that follows from the shape and from how rows are aligned, never from the number of threads or SMs. */
typedef struct kda_norm_gate_backward_args {
  uint64_t struct_size; /* sizeof(kda_norm_gate_backward_args) */
  kda_exec exec;
  kda_tensor x;       /* as given to kda_norm_gate */
  kda_tensor gate;    /* as given to kda_norm_gate */
  kda_tensor weight;  /* as given to kda_norm_gate */
  kda_tensor dy;      /* [B,T,HV,V] in: bf16, f16 or f32 */
  kda_tensor dx;      /* [B,T,HV,V] out, optional: bf16, f16 or f32 */
  kda_tensor dgate;   /* [B,T,HV,V] out, optional, with gate: bf16, f16 or f32 */
  kda_tensor dweight; /* [V]        out, optional, with weight: f32 */
  double eps;
  int32_t activation;
  int32_t reserved; /* 0 */
} kda_norm_gate_backward_args;

/* Initialisers: everything is zero but struct_size. They give no warning about fields that are left out. */
#ifdef __cplusplus
extern "C++" {
template <class Args>
constexpr Args kda_args_init() {
  Args args{};
  args.struct_size = sizeof(Args);
  return args;
}
}
#define KDA_ARGS_INIT(Args) kda_args_init<Args>()
#else
#define KDA_ARGS_INIT(Args) \
  { .struct_size = sizeof(Args) }
#endif
#define KDA_FORWARD_ARGS_INIT KDA_ARGS_INIT(kda_forward_args)
#define KDA_BACKWARD_ARGS_INIT KDA_ARGS_INIT(kda_backward_args)
#define KDA_DECODE_ARGS_INIT KDA_ARGS_INIT(kda_decode_args)
#define KDA_VERIFY_ARGS_INIT KDA_ARGS_INIT(kda_verify_args)
#define KDA_FLUSH_ARGS_INIT KDA_ARGS_INIT(kda_flush_args)
#define KDA_FLUSH_VERIFY_ARGS_INIT KDA_ARGS_INIT(kda_flush_verify_args)
#define KDA_SEGMENT_MAP_ARGS_INIT KDA_ARGS_INIT(kda_segment_map_args)
#define KDA_SEGMENT_MERGE_ARGS_INIT KDA_ARGS_INIT(kda_segment_merge_args)
#define KDA_GATE_ARGS_INIT KDA_ARGS_INIT(kda_gate_args)
#define KDA_GATE_BACKWARD_ARGS_INIT KDA_ARGS_INIT(kda_gate_backward_args)
#define KDA_NORM_GATE_ARGS_INIT KDA_ARGS_INIT(kda_norm_gate_args)
#define KDA_NORM_GATE_BACKWARD_ARGS_INIT KDA_ARGS_INIT(kda_norm_gate_backward_args)
#define KDA_CONV_ARGS_INIT KDA_ARGS_INIT(kda_conv_args)
#define KDA_CONV_BACKWARD_ARGS_INIT KDA_ARGS_INIT(kda_conv_backward_args)
#define KDA_STAGE_CUMSUM_ARGS_INIT KDA_ARGS_INIT(kda_stage_cumsum_args)
#define KDA_STAGE_CHUNK_INTRA_ARGS_INIT KDA_ARGS_INIT(kda_stage_chunk_intra_args)
#define KDA_STAGE_RECOMPUTE_W_U_ARGS_INIT KDA_ARGS_INIT(kda_stage_recompute_w_u_args)
#define KDA_STAGE_DELTA_H_ARGS_INIT KDA_ARGS_INIT(kda_stage_delta_h_args)
#define KDA_STAGE_FWD_O_ARGS_INIT KDA_ARGS_INIT(kda_stage_fwd_o_args)
#define KDA_STAGE_BWD_LOCAL_ARGS_INIT KDA_ARGS_INIT(kda_stage_bwd_local_args)
#define KDA_STAGE_BWD_DELTA_H_ARGS_INIT KDA_ARGS_INIT(kda_stage_bwd_delta_h_args)
#define KDA_STAGE_BWD_WY_DQKG_ARGS_INIT KDA_ARGS_INIT(kda_stage_bwd_wy_dqkg_args)
#define KDA_STAGE_BWD_INTRA_ARGS_INIT KDA_ARGS_INIT(kda_stage_bwd_intra_args)
#define KDA_STAGE_CUMSUM_BACKWARD_ARGS_INIT KDA_ARGS_INIT(kda_stage_cumsum_backward_args)
#define KDA_PREFILL_F32_ARGS_INIT KDA_ARGS_INIT(kda_prefill_f32_args)

/* Run. The status says what went wrong; kda_last_error() says it in a sentence. On an error nothing was
 * written, except that KDA_OUT_OF_MEMORY and KDA_CUDA_ERROR may leave outputs written in part. */
KDA_API kda_status kda_forward(const kda_forward_args* args);
KDA_API kda_status kda_backward(const kda_backward_args* args);
KDA_API kda_status kda_decode(const kda_decode_args* args);
KDA_API kda_status kda_verify(const kda_verify_args* args);
KDA_API kda_status kda_flush(const kda_flush_args* args);
KDA_API kda_status kda_flush_verify(const kda_flush_verify_args* args);
KDA_API kda_status kda_segment_map(const kda_segment_map_args* args);
KDA_API kda_status kda_segment_merge(const kda_segment_merge_args* args);
KDA_API kda_status kda_gate(const kda_gate_args* args);
KDA_API kda_status kda_gate_backward(const kda_gate_backward_args* args);
KDA_API kda_status kda_norm_gate(const kda_norm_gate_args* args);
KDA_API kda_status kda_norm_gate_backward(const kda_norm_gate_backward_args* args);
KDA_API kda_status kda_conv(const kda_conv_args* args);
KDA_API kda_status kda_conv_backward(const kda_conv_backward_args* args);
KDA_API kda_status kda_stage_cumsum(const kda_stage_cumsum_args* args);
KDA_API kda_status kda_stage_chunk_intra(const kda_stage_chunk_intra_args* args);
KDA_API kda_status kda_stage_recompute_w_u(const kda_stage_recompute_w_u_args* args);
KDA_API kda_status kda_stage_delta_h(const kda_stage_delta_h_args* args);
KDA_API kda_status kda_stage_fwd_o(const kda_stage_fwd_o_args* args);
KDA_API kda_status kda_stage_bwd_local(const kda_stage_bwd_local_args* args);
KDA_API kda_status kda_stage_bwd_delta_h(const kda_stage_bwd_delta_h_args* args);
KDA_API kda_status kda_stage_bwd_wy_dqkg(const kda_stage_bwd_wy_dqkg_args* args);
KDA_API kda_status kda_stage_bwd_intra(const kda_stage_bwd_intra_args* args);
KDA_API kda_status kda_stage_cumsum_backward(const kda_stage_cumsum_backward_args* args);
KDA_API kda_status kda_prefill_f32(const kda_prefill_f32_args* args);

/* The bytes of workspace that the call needs: a function of shapes, strides, dtypes, options, num_threads and device
 * only. No tensor data is read, so any non-NULL pointers will do. */
KDA_API kda_status kda_forward_workspace(const kda_forward_args* args, uint64_t* bytes);
KDA_API kda_status kda_backward_workspace(const kda_backward_args* args, uint64_t* bytes);
KDA_API kda_status kda_decode_workspace(const kda_decode_args* args, uint64_t* bytes);
KDA_API kda_status kda_verify_workspace(const kda_verify_args* args, uint64_t* bytes);
KDA_API kda_status kda_flush_workspace(const kda_flush_args* args, uint64_t* bytes);
KDA_API kda_status kda_flush_verify_workspace(const kda_flush_verify_args* args, uint64_t* bytes);
KDA_API kda_status kda_segment_map_workspace(const kda_segment_map_args* args, uint64_t* bytes);
KDA_API kda_status kda_segment_merge_workspace(const kda_segment_merge_args* args, uint64_t* bytes);
KDA_API kda_status kda_gate_workspace(const kda_gate_args* args, uint64_t* bytes);
KDA_API kda_status kda_gate_backward_workspace(const kda_gate_backward_args* args, uint64_t* bytes);
KDA_API kda_status kda_norm_gate_workspace(const kda_norm_gate_args* args, uint64_t* bytes);
KDA_API kda_status kda_norm_gate_backward_workspace(const kda_norm_gate_backward_args* args, uint64_t* bytes);
KDA_API kda_status kda_conv_workspace(const kda_conv_args* args, uint64_t* bytes);
KDA_API kda_status kda_conv_backward_workspace(const kda_conv_backward_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_cumsum_workspace(const kda_stage_cumsum_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_chunk_intra_workspace(const kda_stage_chunk_intra_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_recompute_w_u_workspace(const kda_stage_recompute_w_u_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_delta_h_workspace(const kda_stage_delta_h_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_fwd_o_workspace(const kda_stage_fwd_o_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_bwd_local_workspace(const kda_stage_bwd_local_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_bwd_delta_h_workspace(const kda_stage_bwd_delta_h_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_bwd_wy_dqkg_workspace(const kda_stage_bwd_wy_dqkg_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_bwd_intra_workspace(const kda_stage_bwd_intra_args* args, uint64_t* bytes);
KDA_API kda_status kda_stage_cumsum_backward_workspace(const kda_stage_cumsum_backward_args* args, uint64_t* bytes);
KDA_API kda_status kda_prefill_f32_workspace(const kda_prefill_f32_args* args, uint64_t* bytes);

/* One line per implementation: "* name: description [file]" for the one that would run, "- name: why not [file]" for
 * another, or "- name: supported, but an earlier one was chosen [file]". file: where its code begins, in the source
 * tree. The text is valid until the next explain on this thread. */
KDA_API kda_status kda_forward_explain(const kda_forward_args* args, const char** text);
KDA_API kda_status kda_backward_explain(const kda_backward_args* args, const char** text);
KDA_API kda_status kda_decode_explain(const kda_decode_args* args, const char** text);
KDA_API kda_status kda_verify_explain(const kda_verify_args* args, const char** text);
KDA_API kda_status kda_flush_explain(const kda_flush_args* args, const char** text);
KDA_API kda_status kda_flush_verify_explain(const kda_flush_verify_args* args, const char** text);
KDA_API kda_status kda_segment_map_explain(const kda_segment_map_args* args, const char** text);
KDA_API kda_status kda_segment_merge_explain(const kda_segment_merge_args* args, const char** text);
KDA_API kda_status kda_gate_explain(const kda_gate_args* args, const char** text);
KDA_API kda_status kda_gate_backward_explain(const kda_gate_backward_args* args, const char** text);
KDA_API kda_status kda_norm_gate_explain(const kda_norm_gate_args* args, const char** text);
KDA_API kda_status kda_norm_gate_backward_explain(const kda_norm_gate_backward_args* args, const char** text);
KDA_API kda_status kda_conv_explain(const kda_conv_args* args, const char** text);
KDA_API kda_status kda_conv_backward_explain(const kda_conv_backward_args* args, const char** text);
KDA_API kda_status kda_stage_cumsum_explain(const kda_stage_cumsum_args* args, const char** text);
KDA_API kda_status kda_stage_chunk_intra_explain(const kda_stage_chunk_intra_args* args, const char** text);
KDA_API kda_status kda_stage_recompute_w_u_explain(const kda_stage_recompute_w_u_args* args, const char** text);
KDA_API kda_status kda_stage_delta_h_explain(const kda_stage_delta_h_args* args, const char** text);
KDA_API kda_status kda_stage_fwd_o_explain(const kda_stage_fwd_o_args* args, const char** text);
KDA_API kda_status kda_stage_bwd_local_explain(const kda_stage_bwd_local_args* args, const char** text);
KDA_API kda_status kda_stage_bwd_delta_h_explain(const kda_stage_bwd_delta_h_args* args, const char** text);
KDA_API kda_status kda_stage_bwd_wy_dqkg_explain(const kda_stage_bwd_wy_dqkg_args* args, const char** text);
KDA_API kda_status kda_stage_bwd_intra_explain(const kda_stage_bwd_intra_args* args, const char** text);
KDA_API kda_status kda_stage_cumsum_backward_explain(const kda_stage_cumsum_backward_args* args, const char** text);
KDA_API kda_status kda_prefill_f32_explain(const kda_prefill_f32_args* args, const char** text);

/* Makes kda_..._explain and kda_..._workspace on this thread describe an assumed GPU instead of the machine's, which
 * need not have one. The library need not have been built with CUDA for it. The assumed GPU has the given compute
 * capability, 10 * major + minor (80, 86, 89, 90, 100, 103 or 120), and number of SMs. Meanwhile calls that would run
 * on CUDA are refused. capability = 0 ends it. */
KDA_API kda_status kda_assume_gpu(int32_t capability, int32_t multiprocessors);

/* The index-th implementation, in order of preference, of an operator ("forward", "verify", .., the name of the
 * function without kda_): its name, or NULL past the end (or for an unknown operator). A library that was built without
 * CUDA leaves out those on CUDA, of which explain tells. */
KDA_API const char* kda_implementation(const char* op, int32_t index);

/* Reads the environment again: KDA_IMPL, KDA_CPU_ISA, KDA_BLACKWELL and CUDA_FORCE_PTX_JIT. Otherwise the library reads
 * it once, when a call first needs it. No other thread may set a variable meanwhile. The instruction set stays as it is
 * once a CPU kernel has run. KDA_OUT_OF_MEMORY: there is no memory for a copy. */
KDA_API kda_status kda_read_environment(void);

KDA_API const char* kda_last_error(void);               /* the last failure on this thread; "" if none yet */
KDA_API const char* kda_status_name(kda_status status); /* "KDA_OK", ... */
KDA_API const char* kda_version(void);                  /* "0.1.0" */
/* Lines "key: value": version, CPU instruction set, CUDA. Valid until the next call on this thread. NULL if the
 * environment variable KDA_CPU_ISA names no instruction set; kda_last_error() then says so. */
KDA_API const char* kda_info(void);

#ifdef __cplusplus
}
#endif
#endif /* KDA_KDA_H_ */
