"""The kernels as registered torch operators, for torch.compile (``fullgraph=True``), export and vmap-free tracing.

Eager calls go straight to the binding: the dispatcher costs several times what the binding does. Operators that write
raise the versions of what they write. Operators without gradients refuse inputs that require them, also when they are
traced. Operators of the namespace ``kda``:

* ``forward(...) -> (o, hT, h, v_new, Aqk, Akk)``, functional, with autograd; what is not wanted comes back empty.
* ``backward(...) -> gradients``, functional.
* ``prefill(..., state!, out!, checkpoints!) -> ()`` and ``decode(..., state!, out!) -> ()``, in place.
* ``segment_map(...) -> (M, b, d)`` and ``segment_merge(...) -> states``, functional; what is not wanted is empty.
* ``conv(...) -> (y, final_state)`` with autograd, ``conv_backward(...) -> gradients``, and in place
  ``conv_update(..., state!, out!) -> ()``.
* ``old_state(state) -> copy``, refused where backward runs it again.
* ``norm_gate(...) -> y`` with autograd, and others of its kind: ``compiled_norm``.
* ``gate(...) -> g`` with autograd, ``gate_backward(...) -> (dx, dA_log, d_dt_bias)``.

Importing this module registers them and those of ``compiled_norm``, ``compiled_projections`` and ``compiled_stages``.
``_torch_ops`` imports it at the first look-up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _recompute, autograd, segment
from ._lib import library
from ._options import Options
from ._tracking import LostGradients, mark_written
from .ops import _WITH_GRADIENTS

Tensor = torch.Tensor

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
_OPTIONS = "int gate_form, int beta_form, bool qk_l2norm, int state_layout, float lower_bound, float scale"
_RUN = "str? impl, int num_threads"

_library = torch.library.Library("kda", "DEF")


def _define(name: str, signature: str, run: Any, fake: Any, instead: str | None = None) -> None:
    """``instead`` names the function that has gradients if this one has none."""
    define_in(_library, name, signature, run, fake, instead)


def define_in(there: Any, name: str, signature: str, run: Any, fake: Any, instead: str | None) -> None:
    there.define(f"{name}{signature}", tags=torch.Tag.pt2_compliant_tag)
    operator = getattr(getattr(torch.ops, there.ns), name).default
    for device in ("CPU", "CUDA"):
        there.impl(name, _marking(operator, run), device)
    torch.library.register_fake(f"{there.ns}::{name}", _of_one_kind(operator, fake), lib=there)
    if instead is not None:
        there.impl(name, _refusing(operator, instead), "Autograd", with_keyset=True)


def _of_one_kind(operator: Any, fake: Any) -> Any:
    """Returns ``fake``, unless some tensors are meta and some are not: torch would treat all as meta and compute
    nothing."""
    names = [a.name for a in operator._schema.arguments]

    @functools.wraps(fake)
    def check_and_fake(*values: Any, **options: Any) -> Any:
        tensors = {n: x for n, x in (*zip(names, values, strict=False), *options.items()) if isinstance(x, Tensor)}
        on_meta = [n for n, x in tensors.items() if x.is_meta]
        if on_meta and len(on_meta) < len(tensors):
            other = next(x.device for x in tensors.values() if not x.is_meta)
            raise ValueError(f"{on_meta[0]}: expected device {other} like the other tensors, got meta")
        return fake(*values, **options)

    return check_and_fake


def _marking(operator: Any, run: Any) -> Any:
    """``run``, after which everything that the schema marks as written has a higher version. torch does this only for
    its own operators."""
    arguments = operator._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    if not any(written):
        return run
    names = [a.name for a, w in zip(arguments, written, strict=True) if w and a.kwarg_only]

    def run_and_mark(*values: Any, **options: Any) -> Any:
        result = run(*values, **options)
        mark_written(*(x for x, w in zip(values, written, strict=False) if w), *(options.get(n) for n in names))
        return result

    return run_and_mark


def _refusing(operator: Any, instead: str) -> Any:
    """Leaves autograd out, but refuses inputs that would lose their gradients. Runs in traces as well."""
    names = [a.name for a in operator._schema.arguments]

    def refuse_or_run(keys: Any, *values: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            for name, x in (*zip(names, values, strict=False), *options.items()):
                if isinstance(x, Tensor) and x.requires_grad:
                    raise ValueError(f"{name}: {LostGradients(instead)}")
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *values, **options)

    return refuse_or_run


# ---- forward and backward ----


def _forward_run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, gate_form: int, beta_form: int, qk_l2norm: bool, state_layout: int,
    lower_bound: float, scale: float, final_state: bool, h_every: int, recurrent: bool, impl: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = Options(gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    o, hT, saved = autograd.run_forward(
        q, k, v, g, beta, A_log, dt_bias, h0, cu, options, final_state, h_every, recurrent, impl
    )
    empty = [v.new_empty(0, dtype=torch.float32) for _ in range(5)]
    return (o, empty[0] if hT is None else hT, *saved, *empty[1 + len(saved) :])


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, gate_form: int, beta_form: int, qk_l2norm: bool, state_layout: int,
    lower_bound: float, scale: float, final_state: bool, h_every: int, recurrent: bool, impl: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = Options(gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    none = ((0,), torch.float32)
    kinds = [
        (autograd.state_shape(v, q.shape[3], cu, options), autograd.wide_dtype(q)) if final_state else none,
        *(() if recurrent else autograd.saved_kinds(v, q.shape[3], cu, options, h_every)),
    ]
    kinds += [none] * (5 - len(kinds))
    return (v.new_empty(v.shape), *(v.new_empty(shape, dtype=dtype) for shape, dtype in kinds))


_define(
    "forward",
    f"({_INPUTS}, Tensor? h0, Tensor? cu_seqlens, {_OPTIONS}, bool final_state, int h_every, bool recurrent,"
    " str? impl)"
    " -> (Tensor o, Tensor hT, Tensor h, Tensor v_new, Tensor Aqk, Tensor Akk)",
    _forward_run,
    _forward_fake,
)


def _backward_run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, gate_form: int, beta_form: int, qk_l2norm: bool, state_layout: int,
    lower_bound: float, scale: float, h: Tensor | None, v_new: Tensor | None, Aqk: Tensor | None, Akk: Tensor | None,
    h_every: int, d_o: Tensor, dhT: Tensor | None, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    options = Options(gate_form, beta_form, qk_l2norm, state_layout, lower_bound, scale)
    saved = [x for x in (h, v_new, Aqk, Akk) if x is not None]
    inputs = (q, k, v, g, beta, A_log, dt_bias, h0)
    grads = autograd.run_backward(*inputs, cu, options, saved, h_every, d_o, dhT, tuple(wanted))
    return tuple(q.new_empty(0) if x is None else x for x in grads)


def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, gate_form: int, beta_form: int, qk_l2norm: bool, state_layout: int,
    lower_bound: float, scale: float, h: Tensor | None, v_new: Tensor | None, Aqk: Tensor | None, Akk: Tensor | None,
    h_every: int, d_o: Tensor, dhT: Tensor | None, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, h0)
    return tuple(
        x.new_empty(x.shape) if w and x is not None else q.new_empty(0) for x, w in zip(inputs, wanted, strict=True)
    )


_define(
    "backward",
    f"({_INPUTS}, Tensor? h0, Tensor? cu_seqlens, {_OPTIONS}, Tensor? h, Tensor? v_new, Tensor? Aqk, Tensor? Akk,"
    " int h_every, Tensor d_o, Tensor? dhT, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_run,
    _backward_fake,
)


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, cu = inputs[:9]
    ctx.options = inputs[9:15]
    ctx.final_state, h_every, recurrent = inputs[15:18]
    ctx.h_every = 0 if recurrent else h_every
    saved = len(autograd.saved_kinds(inputs[2], inputs[0].shape[3], cu, Options(*ctx.options), ctx.h_every))
    ctx.save_for_backward(*tensors, cu, *output[2 : 2 + saved])
    ctx.wanted = [x is not None and x.requires_grad for x in tensors]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _forward_backward(ctx: Any, d_o: Tensor | None, dhT: Tensor | None, *_: Any) -> tuple[Any, ...]:
    kept = ctx.saved_tensors  # read once: activation checkpointing recomputes them
    tensors, saved = kept[:9], kept[9:]
    if d_o is None:
        d_o = torch.zeros_like(tensors[2])
    if not ctx.final_state:
        dhT = None
    grads = torch.ops.kda.backward(*tensors, *ctx.options, *autograd.four(saved), ctx.h_every, d_o, dhT, ctx.wanted)
    return (*(x if w else None for x, w in zip(grads, ctx.wanted, strict=True)), *(None,) * 11)


torch.library.register_autograd("kda::backward", autograd.refuse_second_derivatives, lib=_library)
torch.library.register_autograd("kda::forward", _forward_backward, setup_context=_forward_setup, lib=_library)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, options: Options, final_state: bool, h_every: int, recurrent: bool,
    impl: str | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What ``KDAFunction.apply`` does in eager mode."""
    o, hT, *_ = torch.ops.kda.forward(
        q, k, v, g, beta, A_log, dt_bias, h0, cu, *options, final_state, h_every, recurrent, impl
    )
    return o, hT if final_state else None


# ---- caches of the layer ----


def _old_state_run(state: Tensor) -> Tensor:
    return _recompute.old_state(state, -1)


_define("old_state", "(Tensor state) -> Tensor", _old_state_run, torch.clone)


# ---- serving ----

_STATES = "Tensor(a!)? state, Tensor? state_indices, Tensor? has_initial_state, int first_valid_slot, Tensor(b!) out"
_WRITTEN = "Tensor? out_state_indices, bool update_state"  # the slots to write; is anything written?


_NORM = "Tensor? norm_gate=None, Tensor? norm_weight=None, float norm_eps=0.0, int norm_activation=0, bool norm=False"


def _split(a: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The first ``count`` arguments, and those of the norm behind them if there is one. torch leaves out arguments
    at the end that have their defaults."""
    return a[:count], a[count:] if len(a) == count + 5 else ()


def _prefill_run(*a: Any) -> None:
    a, behind = _split(a, 27)
    *call, written, update, offset = a
    (*inputs, state, indices, initial, first, out, checkpoints, slots, every, impl, threads) = call
    library().forward(
        *inputs, state, state if update else None, indices, initial, first, out, checkpoints, slots, None, None, None,
        None, every, 0, impl, threads, None, written, offset, *behind,
    )  # fmt: skip


def _decode_run(*a: Any) -> None:
    a, behind = _split(a, 23)
    (*inputs, state, indices, initial, first, out, impl, threads, written, update) = a
    more = (written, *(None,) * 8, *behind) if behind else (written,)
    library().decode(
        *inputs, state, state if update else None, indices, initial, first, out, impl, threads, None, *more
    )


def _nothing(*_: Any) -> None:
    pass


_define(
    "prefill",
    f"({_INPUTS}, Tensor? cu_seqlens, {_OPTIONS}, {_STATES}, Tensor(c!)? checkpoints, Tensor? checkpoint_slots,"
    f" int checkpoint_every, {_RUN}, {_WRITTEN}, Tensor? checkpoint_offset, {_NORM}) -> ()",
    _prefill_run,
    _nothing,
    _WITH_GRADIENTS,
)
_define(
    "decode",
    f"({_INPUTS}, Tensor? cu_seqlens, {_OPTIONS}, {_STATES}, {_RUN}, {_WRITTEN}, {_NORM}) -> ()",
    _decode_run,
    _nothing,
    _WITH_GRADIENTS,
)


def prefill(call: tuple[Any, ...], *rest: Any) -> None:
    torch.ops.kda.prefill(*call, *rest)


def decode(call: tuple[Any, ...], *rest: Any) -> None:
    torch.ops.kda.decode(*call, *rest)


# ---- speculative decoding ----

_ROWS = _INPUTS.replace("Tensor q, Tensor k, Tensor v", "Tensor? q, Tensor? k, Tensor? v") + ", Tensor? cu_seqlens"


def _conv(state: str) -> str:
    return f"Tensor? conv_x, Tensor? conv_weight, Tensor? conv_bias, {state}, Tensor? conv_indices"


def _records(name: str, *alias: str) -> str:
    u, k, alpha, first, count = alias or ("Tensor?",) * 5
    return (
        f"{u} {name}_u, {k} {name}_k, {alpha} {name}_alpha, Tensor? {name}_indices, {first} {name}_first,"
        f" {count} {name}_count"
    )


def _decode_mtp_run(*a: Any) -> None:
    a, behind = _split(a, 30)
    (*inputs, state, indices, initial, first, out, impl, threads) = a[:-9]
    *more, update = a[-9:]
    library().decode(
        *inputs, state, state if update else None, indices, initial, first, out, impl, threads, None, None, *more,
        *behind,
    )  # fmt: skip


def _verify_run(*a: Any) -> None:
    a, behind = _split(a, 33)
    library().verify(*a[:15], None, *a[15:], None, *behind)


def _flush_run(*a: Any) -> None:
    library().flush(*a, None)


def _flush_verify_run(*a: Any) -> None:
    a, behind = _split(a, 42)
    library().flush_verify(*a[:15], a[14], a[15], None, *a[16:], None, *behind)


_define(
    "decode_mtp",
    f"({_ROWS}, {_OPTIONS}, {_STATES}, {_RUN}, {_conv('Tensor(c!)? conv_state')}, Tensor(d!)? snapshots,"
    f" Tensor? snapshot_slots, Tensor? accepted, bool update_state, {_NORM}) -> ()",
    _decode_mtp_run,
    _nothing,
    _WITH_GRADIENTS,
)
_define(
    "verify",
    f"({_ROWS}, {_OPTIONS}, Tensor state, Tensor? state_indices, Tensor? has_initial_state, int first_valid_slot,"
    f" {_conv('Tensor? conv_state')}, Tensor(a!) out,"
    f" {_records('records', 'Tensor(b!)?', 'Tensor(c!)?', 'Tensor(d!)?', 'Tensor?', 'Tensor?')}, Tensor? parents,"
    f" {_RUN}, {_NORM}) -> ()",
    _verify_run,
    _nothing,
    _WITH_GRADIENTS,
)
_define(
    "flush",
    f"(Tensor(a!) state, Tensor? state_indices, {_records('records')}, Tensor accept_len, Tensor? parents,"
    " Tensor? conv_x, Tensor(b!)? conv_state, Tensor? conv_indices, int state_layout, int first_valid_slot,"
    f" {_RUN}) -> ()",
    _flush_run,
    _nothing,
    _WITH_GRADIENTS,
)
_define(
    "flush_verify",
    f"({_ROWS}, {_OPTIONS}, Tensor(a!) state, Tensor? state_indices, int first_valid_slot,"
    f" {_conv('Tensor(b!)? conv_state')}, Tensor(c!) out, {_records('last')}, Tensor accept_len, Tensor? last_parents,"
    f" Tensor? last_conv_x, {_records('records', *(f'Tensor({c}!)?' for c in 'defgh'))}, Tensor? parents,"
    f" int max_tokens, {_RUN}, {_NORM}) -> ()",
    _flush_verify_run,
    _nothing,
    _WITH_GRADIENTS,
)


def run_in_place(name: str, *arguments: Any) -> None:
    getattr(torch.ops.kda, name)(*arguments)


# ---- segments ----


def _segment_map_run(*a: Any) -> tuple[Tensor, ...]:
    (*call, d_o, want_M, want_b, impl, threads) = a
    maps = segment.run_segment_map(tuple(call), d_o, want_M, want_b, impl, threads)
    return tuple(call[0].new_empty(0, dtype=torch.float32) if x is None else x for x in maps)


def _segment_map_fake(*a: Any) -> tuple[Tensor, ...]:
    (*call, d_o, want_M, want_b, _, _) = a
    q, v, cu, state_layout = call[0], call[2], call[7], call[11]
    M, state = segment.map_shapes(q, v, cu, state_layout == 0)
    wanted = ((M, want_M), (state, want_b), (state, d_o is not None))
    wide = getattr(torch, segment.wide(q))
    return tuple(q.new_empty(s, dtype=wide) if w else q.new_empty(0, dtype=torch.float32) for s, w in wanted)


_define(
    "segment_map",
    f"({_INPUTS}, Tensor? cu_seqlens, {_OPTIONS}, Tensor? d_o, bool want_M, bool want_b, {_RUN})"
    " -> (Tensor M, Tensor b, Tensor d)",
    _segment_map_run,
    _segment_map_fake,
    segment._WITH_GRADIENTS,
)


def _segment_merge_fake(M: Tensor, b: Tensor, h0: Tensor | None, *_: Any) -> Tensor:
    return b.new_empty((b.shape[0] + 1, *b.shape[1:]), dtype=getattr(torch, segment.wide(b)))


_define(
    "segment_merge",
    f"(Tensor M, Tensor b, Tensor? h0, bool reverse, bool v_first, {_RUN}) -> Tensor",
    segment.run_segment_merge,
    _segment_merge_fake,
    segment._WITH_GRADIENTS,
)


def segment_map(call: tuple[Any, ...], *rest: Any) -> tuple[Tensor, ...]:
    return torch.ops.kda.segment_map(*call, *rest)


def segment_merge(*a: Any) -> Tensor:
    return torch.ops.kda.segment_merge(*a)


# ---- the gate ----


def _gate_run(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, form: int, lower_bound: float, dtype: torch.dtype,
    impl: str | None,
) -> Tensor:  # fmt: skip
    g = torch.empty(x.shape, dtype=dtype, device=x.device)
    library().gate(x, A_log, dt_bias, g, form, lower_bound, impl, 0, None)
    return g


def _gate_fake(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, form: int, lower_bound: float, dtype: torch.dtype,
    impl: str | None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape, dtype=dtype)


_define(
    "gate",
    "(Tensor x, Tensor? A_log, Tensor? dt_bias, int form, float lower_bound, ScalarType dtype, str? impl) -> Tensor",
    _gate_run,
    _gate_fake,
)


def _gate_backward_run(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, form: int, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dA, d_bias = autograd.run_gate_backward(x, A_log, dt_bias, dg, form, lower_bound)
    return dx, x.new_empty(0) if dA is None else dA, x.new_empty(0) if d_bias is None else d_bias


def _gate_backward_fake(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, form: int, lower_bound: float
) -> tuple[Tensor, ...]:
    empty = x.new_empty(0)
    return (
        x.new_empty(x.shape),
        empty if A_log is None else A_log.new_empty(A_log.shape),
        x.new_empty(0) if dt_bias is None else dt_bias.new_empty(dt_bias.shape),
    )


_define(
    "gate_backward",
    "(Tensor x, Tensor? A_log, Tensor? dt_bias, Tensor dg, int form, float lower_bound) -> (Tensor, Tensor, Tensor)",
    _gate_backward_run,
    _gate_backward_fake,
)


def _gate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.form, ctx.lower_bound = inputs[3:5]


def _gate_autograd(ctx: Any, dg: Tensor) -> tuple[Any, ...]:
    x, A_log, dt_bias = ctx.saved_tensors
    dx, dA, d_bias = torch.ops.kda.gate_backward(x, A_log, dt_bias, dg, ctx.form, ctx.lower_bound)
    return dx, None if A_log is None else dA, None if dt_bias is None else d_bias, None, None, None, None


torch.library.register_autograd("kda::gate_backward", autograd.refuse_second_derivatives, lib=_library)
torch.library.register_autograd("kda::gate", _gate_autograd, setup_context=_gate_setup, lib=_library)


def gate(x: Tensor, *rest: Any) -> Tensor:
    return torch.ops.kda.gate(x, *rest)


# ---- the convolution ----

_CONV = "Tensor x, Tensor weight, Tensor? bias"


def _conv_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool,
    final_state: bool, impl: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, last = autograd.run_conv(x, weight, bias, state, cu, silu, final_state, impl)
    return y, x.new_empty(0) if last is None else last


def _conv_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool,
    final_state: bool, impl: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, dtype = x.new_empty(x.shape), x.dtype if state is None or not final_state else state.dtype
    return y, x.new_empty(autograd.conv_state_shape(x, weight, cu) if final_state else (0,), dtype=dtype)


_define(
    "conv",
    f"({_CONV}, Tensor? initial_state, Tensor? cu_seqlens, bool silu, bool final_state, str? impl)"
    " -> (Tensor y, Tensor final_state)",
    _conv_run,
    _conv_fake,
)


def _conv_backward_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool, dy: Tensor,
    d_last: Tensor | None, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = autograd.run_conv_backward(x, weight, bias, state, cu, silu, dy, d_last, wanted)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


def _conv_backward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, silu: bool, dy: Tensor,
    d_last: Tensor | None, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = (x, weight, bias, state)
    return tuple(
        t.new_empty(t.shape) if w and t is not None else x.new_empty(0) for t, w in zip(inputs, wanted, strict=True)
    )


_define(
    "conv_backward",
    f"({_CONV}, Tensor? initial_state, Tensor? cu_seqlens, bool silu, Tensor dy, Tensor? d_final_state, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _conv_backward_run,
    _conv_backward_fake,
)


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.silu, ctx.final_state = inputs[5:7]
    ctx.wanted = [x is not None and x.requires_grad for x in inputs[:4]]
    if not ctx.final_state:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _conv_autograd(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    grads = torch.ops.kda.conv_backward(x, *rest, ctx.silu, dy, d_last if ctx.final_state else None, ctx.wanted)
    return (*(g if w else None for g, w in zip(grads, ctx.wanted, strict=True)), None, None, None, None)


torch.library.register_autograd("kda::conv_backward", autograd.refuse_second_derivatives, lib=_library)
torch.library.register_autograd("kda::conv", _conv_autograd, setup_context=_conv_setup, lib=_library)


def conv(x: Tensor, weight: Tensor, bias: Any, state: Any, cu: Any, silu: bool, final_state: bool, impl: Any) -> Any:
    y, last = torch.ops.kda.conv(x, weight, bias, state, cu, silu, final_state, impl)
    return y, last if final_state else None


def _conv_update_run(*a: Any) -> None:
    *call, written, update, checkpoints, slots, offset, every = a
    (*inputs, state, indices, has_state, first, out, silu, impl, threads) = call
    library().conv(
        *inputs, state, state if update else None, indices, has_state, out, silu, first, impl, threads, None, written,
        checkpoints, slots, offset, every,
    )  # fmt: skip


_define(
    "conv_update",
    f"({_CONV}, Tensor? cu_seqlens, Tensor(a!) state, Tensor? state_indices, Tensor? has_initial_state,"
    f" int first_valid_slot, Tensor(b!) out, bool silu, {_RUN}, {_WRITTEN}, Tensor(c!)? checkpoints,"
    " Tensor? checkpoint_slots, Tensor? checkpoint_offset, int checkpoint_every) -> ()",
    _conv_update_run,
    _nothing,
    "kda.causal_conv1d",
)

# Importing one part imports all: torch.ops.kda asks for this module only.
from . import compiled_norm, compiled_projections, compiled_stages  # noqa: E402, F401
