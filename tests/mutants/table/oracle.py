"""The float64 oracle."""

from .mutant import CASES, mutants

REFERENCE = "src/reference/math.h"
REFERENCE_FORWARD = "src/reference/forward.cc"
REFERENCE_BACKWARD = "src/reference/backward.cc"
REFERENCE_NORM = "src/reference/norm_gate.cc"
REFERENCE_CONV = "src/reference/conv.cc"
REFERENCE_SEGMENT = "src/reference/segment.cc"
REFERENCE_DRAFTS = "src/reference/speculation.cc"

RANGE = ("test_range", "Gates.*:Range.*")
ORACLE = ("test_oracle", "*")
CONVOLUTION = ("test_conv", "*")
NORM = ("test_norm", "*")
NORM_BEHIND = ("test_norm_behind", "*")
SPECULATION_ORACLE = ("test_speculation_oracle", "*Decode*/reference")
SEGMENT_MAPS = ("test_segment", ":".join(f"All/SegmentMap.EqualsTheOracle/*_{c}" for c in CASES))

UNITS = {
    REFERENCE: [REFERENCE_FORWARD, REFERENCE_BACKWARD],
}

MUTANTS = [
    *mutants(
        REFERENCE_FORWARD,
        ("test_numerics", "All/ForwardSaved.StatesInAnotherLayout/*_packed"),
        ("oracle: h has the layout of the other states", "h_layout(a), first_h", "layout, first_h"),
    ),
    *mutants(
        REFERENCE_SEGMENT,
        SEGMENT_MAPS,
        ("oracle: d without beta", "k[i] * x.beta[t] * du[j]", "k[i] * du[j]"),
        ("oracle: map of the zero state", "unit[i * p.K + i] = 1;", "unit[i * p.K + i] = 0;"),
    ),
    *mutants(
        REFERENCE,
        RANGE,
        ("oracle: squares that overflow", "return sum < INFINITY ? ", "return true ? "),
    ),
    *mutants(
        REFERENCE_NORM,
        NORM_BEHIND,
        ("oracle: gates of a norm reach padding", "p.keep_zeros && row.zeros && std::isnan(y)", "false"),
    ),
    *mutants(
        REFERENCE_NORM,
        NORM,
        ("oracle: norm with eps that knows no unit", "eps / unit / unit", "eps"),
        (
            "oracle: norm's slope of silu without z",
            "sigmoid(z) + z * sigmoid_slope(z)",
            "sigmoid(z) + sigmoid_slope(z)",
        ),
    ),
    *mutants(
        REFERENCE_CONV,
        CONVOLUTION,
        (
            "oracle: taps reversed",
            "y += get(weight, c, j) * xx[t + j];",
            "y += get(weight, c, j) * xx[t + weight.shape[1] - 1 - j];",
        ),
        ("oracle: x1 begins with channels of x", "    c -= x->shape[2];\n", ""),
        ("oracle: silu slope without x", "slope = y * sigmoid_slope(y)", "slope = sigmoid_slope(y)"),
    ),
    *mutants(
        REFERENCE,
        ORACLE,
        ("oracle: no decay", "S[i * V + j] *= std::exp(gt[i]);", "S[i * V + j] *= 1;"),
        (
            "oracle: output before the correction",
            "S[i * V + j] += kt[i] * correction, sum += S[i * V + j] * qt[i];",
            "sum += S[i * V + j] * qt[i], S[i * V + j] += kt[i] * correction;",
        ),
    ),
    *mutants(
        REFERENCE_FORWARD,
        ORACLE,
        (
            "oracle: one gate step off in the scores",
            "for (int64_t t = j + 1; t <= i; ++t) decay",
            "for (int64_t t = j; t <= i; ++t) decay",
        ),
    ),
    *mutants(
        REFERENCE_BACKWARD,
        ORACLE,
        (
            "oracle: dg from the gradient before the read",
            "dg[t * K + i] += dSt * St[i * V + j];",
            "dg[t * K + i] += dS[i * V + j] * St[i * V + j];",
        ),
        ("oracle: l2norm backward dropped", "r[t] * (dy[t * K + i] - y[t * K + i] * dot)", "r[t] * dy[t * K + i]"),
    ),
    *mutants(
        REFERENCE_DRAFTS,
        SPECULATION_ORACLE,
        ("oracle: drafts from the state before", "after[t] = parent < 0 ? S : after[parent];", "after[t] = S;"),
    ),
]
