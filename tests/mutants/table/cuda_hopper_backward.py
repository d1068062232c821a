"""Backward on Hopper."""

from .mutant import emulated, mutants

CUDA_HOPPER_FORWARD = "src/cuda/engine/hopper_prefill_pairs.cu"
CUDA_HOPPER_PRODUCER = "src/cuda/engine/producer.h"
CUDA_HOPPER_BACKWARD = "src/cuda/backward/hopper_backward_chunk.cu"
CUDA_HOPPER_REVERSE = "src/cuda/engine/reverse.cu"
CUDA_HOPPER_REVERSE_CONSUMER = "src/cuda/engine/reverse_consumer.h"
CUDA_HOPPER_PAIR = "src/cuda/engine/pair.h"
CUDA_HOPPER_UNITS = "src/cuda/engine/column_scale.h"
CUDA_HOPPER_STATES = "src/cuda/engine/state_io.h"
CUDA_BACKWARD_PLAN = "src/cuda/backward/plan.h"
CUDA_BACKWARD_CHUNK = "src/cuda/backward/chunk.cu"
CUDA_HOPPER_MULTIPLIER = "src/cuda/backward/hopper_multiplier.h"
CUDA_HOPPER_HELPERS = "src/cuda/backward/hopper_helpers.h"

CUDA_BACKWARD_HOPPER = emulated(
    *(
        f"BackwardOnCuda.IsTheOracle/cuda_hopper_backward_chunk_{c}"
        for c in ("bound_33", "softplus_17", "bound_short_packed")
    )
)
CUDA_REVERSE_HOPPER = emulated("BackwardOnCuda.IsTheOracle/cuda_hopper_backward_chunk_bound_33")
CUDA_REVERSE_SHARED = emulated("BackwardPromiseOnCuda.SharedHeads/cuda_hopper_backward_chunk")
CUDA_REVERSE_NAN = emulated("BackwardPromiseOnCuda.NaNReachesNoLaterToken/cuda_hopper_backward_chunk")
CUDA_BACKWARD_NARROW = emulated(
    *(
        f"BackwardOnCuda.IsTheOracle/cuda_hopper_backward_chunk_K64_V64_{c}"
        for c in ("bound_33", "softplus_17", "bound_short_packed")
    )
)
CUDA_LAYOUTS = emulated("LayoutsOnCuda.Backward/f32")
CUDA_FORWARD_LAYOUTS = emulated("LayoutsOnCuda.ForwardAndWhatItSaves/bf16")
CUDA_REVERSE_SIZES = emulated("BackwardPromiseOnCuda.ValuesOfAnySize/cuda_hopper_backward_chunk")

UNITS = {
    CUDA_HOPPER_PRODUCER: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_MULTIPLIER: [CUDA_HOPPER_BACKWARD],
    CUDA_HOPPER_HELPERS: [CUDA_HOPPER_BACKWARD],
    CUDA_HOPPER_REVERSE_CONSUMER: [CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_PAIR: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_UNITS: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_HOPPER_STATES: [CUDA_HOPPER_FORWARD, CUDA_HOPPER_REVERSE],
    CUDA_BACKWARD_PLAN: [CUDA_BACKWARD_CHUNK, CUDA_HOPPER_BACKWARD],
}

MUTANTS = [
    *mutants(
        CUDA_BACKWARD_PLAN,
        CUDA_LAYOUTS,
        (
            "backward: h that is made again has the layout of the states",
            "forward.args.h_v_first = 1",
            "forward.args.h_v_first = 0",
        ),
    ),
    *mutants(
        CUDA_HOPPER_BACKWARD,
        CUDA_LAYOUTS,
        (
            "Hopper's backward: another forward makes h of K-first calls again",
            "return !hopper_prefill_pairs_why_not(p);",
            "return p.args.in.state_layout == KDA_STATE_V_FIRST && !hopper_prefill_pairs_why_not(p);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_FORWARD_LAYOUTS,
        (
            "Hopper's forward: h has the layout of the other states",
            "kTraining && kind == kBefore ? h_layout(call_.p.args) : call_.p.args.in.state_layout",
            "call_.p.args.in.state_layout",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MULTIPLIER,
        CUDA_BACKWARD_HOPPER,
        (
            "Hopper's backward: scores are read before all warps have written theirs",
            "      at_.wait(WideAt::scores_full, n_);\n",
            "",
        ),
        (
            "Hopper's backward: a tile is released while products read it",
            "    ptx::wait_for_products<0>();\n    ptx::settle(accumulators<64>",
            "    ptx::settle(accumulators<64>",
        ),
        ("Hopper's backward: norms are read before they are there", "      at_.wait_norms(n_);\n", ""),
    ),
    *mutants(
        CUDA_HOPPER_HELPERS,
        CUDA_BACKWARD_HOPPER,
        (
            "Hopper's backward: tiles come to where others are read",
            "      if (n) at_.wait(WideAt::big_read, n - 1);\n",
            "",
        ),
        (
            "Hopper's backward: dbeta is computed before its diagonal is there",
            "    at_.wait(WideAt::scores_full, n);\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_REVERSE_CONSUMER,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: the update takes dv with its own sign",
            "x.dv[2 * j + 1]) ^ 0x80008000;",
            "x.dv[2 * j + 1]);",
        ),
        (
            "Hopper's reverse scan: one lane releases what others still read",
            "__syncwarp();  // all lanes have read the stage\n        if (lane_ == 0) ring_.release(number, kWarps",
            "if (lane_ == 0) ring_.release(number, kWarps",
        ),
    ),
    *mutants(
        CUDA_HOPPER_REVERSE_CONSUMER,
        CUDA_REVERSE_SHARED,
        (
            "Hopper's reverse scan: outputs are overwritten while TMA reads them",
            "        if (stores()) ptx::wait_for_bulk_reads<0>();\n",
            "",
        ),
    ),
    *mutants(
        CUDA_HOPPER_UNITS,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: dO without the scale",
            "const float scale = inverse(unit_[j % 2]) * call_.x.scale;",
            "const float scale = inverse(unit_[j % 2]);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_UNITS,
        CUDA_REVERSE_NAN,
        (
            "Hopper's reverse scan: the first bad token in place of the last",
            "return kReversed ? max(a, b) : min(a, b);",
            "return min(a, b);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PAIR,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: chunks go forwards",
            "kReversed ? first_ + states - i : first_ + i - states",
            "first_ + i - states",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PAIR,
        CUDA_REVERSE_SHARED,
        (
            "Hopper's reverse scan: spans of shared heads count from the beginning",
            "TokenRange tokens(now_, length_, kReversed ? 0 : begun_, kReversed);",
            "TokenRange tokens(now_, length_, 0, false);",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_BACKWARD_NARROW,
        (
            "Hopper's reverse scan, K = 64: columns of dh lie as with K = 128",
            "return static_cast<unsigned>(call_.p.K) * 2;",
            "return kSize * 2;",
        ),
    ),
    *mutants(
        CUDA_HOPPER_HELPERS,
        CUDA_BACKWARD_NARROW,
        (
            "Hopper's backward, K = 64: dots of warps without channels count",
            "w < call_.warps()",
            "w < kWideWarps",
        ),
        (
            "Hopper's backward, K = 64: rows of gradients are twice as long",
            "if (i % 16 < call_.channels() / 8)",
            "if (true)",
        ),
    ),
    *mutants(
        CUDA_HOPPER_MULTIPLIER,
        CUDA_BACKWARD_NARROW,
        (
            "Hopper's backward, K = 64: B is overwritten while warps with channels read it",
            "      arrive(WideAt::dots_full);\n      at_.wait(WideAt::factors_full, n_);\n",
            "      arrive(WideAt::dots_full);\n",
        ),
        (
            "Hopper's backward, K = 64: parts of dA_log lie as with K = 128",
            "sums[call_.channels() + warp_]",
            "sums[kSize + warp_]",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_REVERSE_HOPPER,
        (
            "Hopper's reverse scan: states are stored in the order of the stage",
            "return kOrder.run * (lane_ % 4)",
            "return 2 * (lane_ % 4)",
        ),
    ),
    *mutants(
        CUDA_HOPPER_STATES,
        CUDA_REVERSE_SIZES,
        (
            "Hopper's reverse scan: states are stored in units",
            "kUnits ? unit_[i] : 1",
            "1",
        ),
    ),
    *mutants(
        CUDA_HOPPER_PRODUCER,
        CUDA_REVERSE_NAN,
        (
            "Hopper's reverse scan: a NaN of k spoils no outputs of its chunk",
            "(Source::kReversed ? Stage::kg : Stage::q)",
            "Stage::q",
        ),
    ),
    *mutants(
        CUDA_HOPPER_REVERSE,
        CUDA_REVERSE_SHARED,
        (
            "Hopper's reverse scan: dv is not converted",
            "  if (plan.own_dv && present(p.args.dv)) convert(p.args.exec, plan.dv, p.args.dv);\n",
            "",
        ),
    ),
]
