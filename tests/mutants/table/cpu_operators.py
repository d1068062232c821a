"""The other operators on the CPU: norm, convolution, segments, stages, prefill_f32."""

from .mutant import CASES, mutants

RECURRENT = "src/cpu/recurrent.cc"
SEGMENT = "src/cpu/segment.cc"
STAGES_INL = "src/cpu/stages-inl.h"
STAGES_FORWARD = "src/cpu/stages_forward.cc"
STAGES_BACKWARD = "src/cpu/stages_backward.cc"
PREFILL_F32 = "src/cpu/prefill_f32.cc"
DRAFT_KERNELS = "src/cpu/speculation.cc"
NORM_CPU = "src/cpu/norm_gate.cc"
API = "src/api.cc"
CONV = "src/cpu/conv.cc"
CONV_BACKWARD = "src/cpu/conv_backward.cc"
CONV_INL = "src/cpu/conv-inl.h"
CONV_TILES = "src/cpu/conv_tiles.h"
CONV_ROWS = "src/contract/conv.h"

CONVOLUTION = ("test_conv", "*")
NORM = ("test_norm", "*")
NORM_BEHIND = ("test_norm_behind", "*")
STAGES = (
    "test_stages",
    ":".join(f"All/Stages.*/{c}" for c in ("packed", "gva_2", "state_K_first")) + ":StageDetails.*",
)
PREFILL_TESTS = ("AgainstTheOracle", "WantedOrNotChangesNoBit")  # the bits of forward are those of its instruction set
PREFILL_CASES = ("prefill_gva", "prefill_tokens_33", "state_K_first", "K5_V200")
PREFILL = ("test_prefill_f32", ":".join(f"All/PrefillF32.{t}/{c}" for t in PREFILL_TESTS for c in PREFILL_CASES))
CONV_OPERATORS = ("test_conv_operators", "*")
SEGMENT_MAPS = ("test_segment", ":".join(f"All/SegmentMap.EqualsTheOracle/*_{c}" for c in CASES))
SEGMENT_MERGE = ("test_segment", "SegmentMerge.*")

UNITS = {
    STAGES_INL: [STAGES_FORWARD, STAGES_BACKWARD],
    CONV_ROWS: [CONV, CONV_BACKWARD, RECURRENT, DRAFT_KERNELS],
    CONV_INL: [CONV, CONV_BACKWARD],
    CONV_TILES: [CONV, CONV_BACKWARD],
}

MUTANTS = [
    *mutants(
        SEGMENT,
        SEGMENT_MAPS,
        ("segment: map of the zero state", "S.row(k)[first_column_of_M(p) + k] = 1;", "S.row(k)[k] = 0;"),
        (
            "segment: columns of M keep what memory held",
            "else zero(c.v.row(row) + padded(c.V), padded(columns()) - padded(c.V));",
            "else continue;",
        ),
    ),
    *mutants(
        SEGMENT,
        SEGMENT_MERGE,
        (
            "merge: reverse without transposing",
            "a.reverse ? Scalars{M, 1, row} : Scalars{M, row, 1}",
            "Scalars{M, row, 1}",
        ),
        ("merge: segments out of order", "a.reverse ? p.N - 1 - i : i, row", "i, row"),
        (
            "merge: one tile for all",
            "at(a.M, n, hv));\n    load_state(s.tile, a.b, layout, n, hv, v0, s.next)",
            "at(a.M, n, hv));\n    load_state(s.tile, a.b, layout, n, hv, 0, s.next)",
        ),
    ),
    *mutants(
        NORM_CPU,
        NORM,
        ("norm: dx without the mean", "hn::NegMulAdd(load(g.n + i), mean, load(g.dn + i))", "load(g.dn + i)"),
        (
            "norm: small numbers beside large ones are lost",
            "{grows ? scale : kHalfShrink, grows ? factor : factor * kHalfShrink, zeros}",
            "{scale, factor, zeros}",
        ),
        ("norm: sums begin with old workspace", "  if (sums) zero(sums, padded(p.V));\n", ""),
    ),
    *mutants(
        NORM_CPU,
        NORM_BEHIND,
        ("norm: gates reach padding", "if (p.keep_zeros && norm.zeros) keep_zeros", "if (false) keep_zeros"),
    ),
    *mutants(
        API,
        NORM_BEHIND,
        (
            "norm behind: not the oracle behind the oracle",
            "== kOracle ? kOracle : nullptr",
            "== kOracle ? nullptr : nullptr",
        ),
    ),
    *mutants(
        CONV,
        CONVOLUTION,
        (
            "conv: block starts from the state",
            "load_past(c, s, a + W - 2, c0, n, past);",
            "load_past(c, s, W - 2, c0, n, past);",
        ),
        ("conv: padded sequences keep what y held", "else zero_tokens(c.y, i.s, i.a, i.b, c0, n);", ""),
        ("conv: final state one token short", "s.length + p.W - 2, a.final_state", "s.length + p.W - 3, a.final_state"),
    ),
    *mutants(
        CONV_BACKWARD,
        CONVOLUTION,
        (
            "conv: backward takes all rows from x",
            "const kda_tensor& rows = c.rows_of(c0);",
            "const kda_tensor& rows = c.x;",
        ),
        ("conv: no silu in backward", "if (with_silu) d[W - 1 + g] =", "if (false) d[W - 1 + g] ="),
        (
            "conv: tokens after the block left out of dx",
            "for (; t < b + W - 1; ++t) edge(t);",
            "for (; t < b; ++t) edge(t);",
        ),
        ("conv: tokens after the block summed, too", "t < b ? sums : nullptr", "sums"),
        (
            "conv: state of an empty sequence zeroed",
            "if (present(g.d_final)) load_entry(g.d_final, n, c0, channels, i, row);",
            "",
        ),
    ),
    *mutants(
        CONV_INL,
        CONVOLUTION,
        ("conv: the past is that of x", "const kda_tensor& x = c.rows_of(c0);", "const kda_tensor& x = c.x;"),
    ),
    *mutants(
        CONV_TILES,
        CONVOLUTION,
        ("conv: tiles begin with x", "tile = {first + i * kConvTile,", "tile = {i * kConvTile,"),
    ),
    *mutants(
        STAGES_FORWARD,
        STAGES,
        ("stage: steps of G not clamped", "hn::IfThenElse(hn::Lt(step, splat(-160)), splat(-160), step)", "step"),
        ("stage: w and u from an inverse that was not rounded", "load_scores(a.Akk_inv, where, s.T);  //", "//"),
        ("stage: forgotten beta in u", "scale_row(c.v.row(i), c.beta[i], c.V, c.v.row(i));", ""),
    ),
    *mutants(
        STAGES_BACKWARD,
        STAGES,
        (
            "stage: reverse scan from the front",
            "for (int64_t i = scan.chunks() - 1; i >= 0; --i) {",
            "for (int64_t i = 0; i < scan.chunks(); ++i) {",
        ),
        ("stage: gradient through a decay of 0", "hn::IfThenZeroElse(gone, sum)", "sum"),
    ),
    *mutants(
        STAGES_INL,
        STAGES,
        (
            "stage: diagonal of dAkk stays",
            "const int64_t first = i + !strict;",
            "const int64_t first = i + 1;",
        ),
    ),
    *mutants(
        PREFILL_F32,
        PREFILL,
        (
            "prefill: rows behind the last token keep what they held",
            "else std::memset(row, 0, columns * sizeof(float));",
            "",
        ),
        (
            "prefill: columns of u from the first tile",
            "chunk_buffer(a.u, b, hv), n, a.chunk, v0);",
            "chunk_buffer(a.u, b, hv), n, a.chunk, 0);",
        ),
    ),
    *mutants(
        CONV_ROWS,
        CONVOLUTION,
        (
            "conv: state read with has_initial_state = 0",
            "s.slot < stored && (!has_state.data || has_state[s.n]);",
            "s.slot < stored;",
        ),
        ("conv: x1 has a channel of x2", "d < x1_end ? x1 : x2", "d <= x1_end ? x1 : x2"),
        ("conv: a piece begins with its sequence", "std::max(token, begin)", "begin"),
    ),
    *mutants(
        CONV_ROWS,
        CONV_OPERATORS,
        (
            "conv: taps of a root from the token before",
            "(parent < 0 ? -1 : parent) + keep;",
            "(parent < 0 ? t - 1 : parent) + keep;",
        ),
        ("conv: parents that are none", "parent >= t ? row - 1 :", "parent > t ? row - 1 :"),
        ("conv: decode rolls padding", "if (!s.live) s.length = 0;", ""),
        ("conv: flush rolls padding", "r.s.live ? r.newest + 1 -", "true ? r.newest + 1 -"),
        ("conv: flush_verify rolls padding", "s.live ? commit_of(p,", "true ? commit_of(p,"),
    ),
]
