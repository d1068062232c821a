"""Translates keywords of the Python functions into the numbers of kda.h, in one place."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

CHUNK = 64

# Training's forward keeps a state for backward every H_EVERY chunks. At 8 they take 1/8 of the memory of a state per
# chunk, and that many recomputed chunks stay in the cache.
H_EVERY = 8

GATE_LOG, GATE_SOFTPLUS, GATE_LOWER_BOUND = 0, 1, 2
BETA_ACTIVATED, BETA_SIGMOID, BETA_2SIGMOID = 0, 1, 2
STATE_V_FIRST, STATE_K_FIRST = 0, 1


class Options(NamedTuple):
    """The scalars of ``kda_inputs``, in the order in which the binding reads them."""

    gate_form: int
    beta_form: int
    qk_l2norm: bool
    state_layout: int
    lower_bound: float
    scale: float


def gate_form(A_log: Any, lower_bound: float | None) -> int:
    if lower_bound is not None:
        return GATE_LOWER_BOUND
    if A_log is None:
        raise ValueError("A_log: expected a tensor [HV] for the softplus gate (or a lower_bound), got None")
    return GATE_SOFTPLUS


def gate_parameters_ignored(**given: Any) -> None:
    """Warns of gate parameters without ``use_gate_in_kernel``, which FLA ignores silently. Python shows the warning
    once for every line of the caller."""
    names = [name for name, x in given.items() if x is not None]
    if names:
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kda":
            level, frame = level + 1, frame.f_back
        wanted = "expected use_gate_in_kernel=True with it (g is taken as a decay, and this is ignored), got False"
        warnings.warn(f"{names[0]}: {wanted}", UserWarning, stacklevel=level)


def check_flag(name: str, x: Any) -> None:
    """0 and 1 count as flags, too, and so do NumPy's. None, text and other numbers are mistakes."""
    if type(x) is not bool and type(x).__name__ not in ("bool_", "bool") and not (type(x) is int and x in (0, 1)):
        raise ValueError(f"{name}: expected True or False, got {ascii(x) if isinstance(x, str) else x!r:.40}")


ALL_IN_KERNEL = (True, True, True)


def make_options(
    A_log: Any,
    scale: float | None,
    lower_bound: float | None,
    in_kernel: tuple[bool, bool, bool],
    neg_eigval: bool,
    v_first: bool,
) -> tuple[int, int, bool, int, float, float]:
    """The fields of :class:`Options`, checked, as a tuple (which is faster to make). ``in_kernel``: does the kernel
    normalise q and k, compute the gate, and apply the sigmoid to beta?"""
    l2norm, use_gate, beta_sigmoid = in_kernel
    if l2norm is not False and l2norm is not True:  # (type() would take twice as long)
        check_flag("use_qk_l2norm_in_kernel", l2norm)
        l2norm = bool(l2norm)
    if use_gate is not False and use_gate is not True:
        check_flag("use_gate_in_kernel", use_gate)
    if beta_sigmoid is not False and beta_sigmoid is not True:
        check_flag("use_beta_sigmoid_in_kernel", beta_sigmoid)
    if neg_eigval is not False and neg_eigval is not True:
        check_flag("allow_neg_eigval", neg_eigval)
    if v_first is not True and v_first is not False:
        check_flag("state_v_first", v_first)
    if neg_eigval and not beta_sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True with it, got False")
    if scale is None:
        scale = 0.0  # the library's default, K ** -0.5
    elif scale == 0:
        raise ValueError("scale: expected a finite number other than 0, got 0")
    return (
        gate_form(A_log, lower_bound) if use_gate else GATE_LOG,
        (BETA_2SIGMOID if neg_eigval else BETA_SIGMOID) if beta_sigmoid else BETA_ACTIVATED,
        l2norm,
        STATE_V_FIRST if v_first else STATE_K_FIRST,
        lower_bound if use_gate and lower_bound is not None else 0.0,
        scale,
    )
