"""The layer from hidden_states to the outputs before their norm, as one function of autograd.

It keeps hidden_states, the product with the joint weights (:mod:`kda.layer.products`) and what the kernels keep. The
convolution, the second half of a low-rank decay and the views of all parts are computed again in backward, which costs
a few percent of its time. Every gradient is written to its place in one matrix, so none is copied there. Per token and
in bytes of 16 bits, with N the columns of the joint weights: ``2 hidden + 2 N``, where separate functions keep
``2 hidden + 2 N + 2 D + 2 HV K``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functions
from ..call.derivatives import apply, autocast_state, first_derivatives, refuse_forward_mode
from ..call.inputs import TrainingCall
from ..call.options import Options
from ..call.tracing import compiling
from .bypass import are_plain_maps
from .parts import Modules, as_one, convolutions, convolve_as_one
from .products import copies
from .projections import Linear, joint_gradients, joint_product


class Shape(NamedTuple):
    """Sizes and options of a call."""

    batch: tuple[int, int]  # B, T
    heads: tuple[int, int, int, int]  # H, HV, K, V
    options: Options
    h_every: int


class Parameters(NamedTuple):
    """What the function takes beside hidden_states. Absent ones are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    g: Tensor
    b: Tensor
    f_second: Tensor | None
    g_second: Tensor | None
    g_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    q_conv: Tensor  # [D, 1, W], and so on
    k_conv: Tensor
    v_conv: Tensor
    q_bias: Tensor | None  # [D]: those of the convolutions
    k_bias: Tensor | None
    v_bias: Tensor | None

    def convolution(self) -> tuple[Tensor, Tensor | None]:
        """The weights ``[D, W]`` and the biases ``[D]`` of all three, outside of autograd."""
        weights, biases = self.convolutions()
        return as_one(weights).squeeze(1), as_one(biases) if biases else None

    def convolutions(self) -> tuple[list[Tensor], list[Tensor]]:
        biases = self.q_bias, self.k_bias, self.v_bias
        return [self.q_conv, self.k_conv, self.v_conv], [b for b in biases if b is not None]


_WEIGHTS, _BIASES = Parameters._fields[-6:-3], Parameters._fields[-3:]  # of the convolutions


class _Parts:
    """The parts of the joint product ``[M, N]`` or of its gradient, as views."""

    def __init__(self, shape: Shape, y: Tensor, rows: Sequence[int]) -> None:
        self.shape, self.all = shape, y
        channels = sum(rows[:3])
        raw, self.f, self.g, beta = y[:, : sum(rows)].split([channels, *rows[3:]], 1)
        self.raw = raw.unflatten(0, shape.batch)
        self.beta = beta.unflatten(0, shape.batch)

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of ``[B, T, D]``."""
        H, HV, K, V = self.shape.heads
        q, k, v = convolved.split([H * K, H * K, HV * V], 2)
        return q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V))


def _decay(shape: Shape, f: Tensor, second: Tensor | None) -> Tensor:
    g = f if second is None else torch.mm(f, second.t())
    return g.unflatten(1, shape.heads[1:3]).unflatten(0, shape.batch)


def _convolved_and_decay(shape: Shape, cu: Tensor | None, p: Parameters, parts: _Parts) -> tuple[Tensor, Tensor]:
    """What backward computes again: q, k and v, ``[B, T, D]``, and the decay's input, ``[B, T, HV, K]``."""
    convolved = functions.seen_conv(parts.raw, *p.convolution(), None, cu, silu=True)
    return convolved, _decay(shape, parts.f, p.f_second)


def _call(
    shape: Shape, cu: Tensor | None, p: Parameters, heads: Sequence[Tensor], g: Tensor, beta: Tensor
) -> TrainingCall:
    q, k, v = heads
    return TrainingCall(
        q=q, k=k, v=v, g=g, beta=beta, A_log=p.A_log, dt_bias=p.dt_bias, h0=None, cu=cu, options=shape.options
    )


def _product_into(place: Tensor, a: Tensor, b: Tensor) -> None:
    if compiling():  # by compiled autograd: graphs have no products with strides in their outputs
        place.copy_(torch.mm(a, b))
    else:
        torch.mm(a, b, out=place)


class LayerFunction(torch.autograd.Function):
    """``(o, gate)``, ``[B, T, HV, V]`` and ``[M, HV * V]``, of x ``[M, hidden]``."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, shape: Shape, cu: Tensor | None, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        p = Parameters(*parameters)  # type: ignore[arg-type]
        y = joint_product(x, p[:6])
        parts = _Parts(shape, y, [w.shape[0] for w in p[:6]])
        convolved, g = _convolved_and_decay(shape, cu, p, parts)
        call = _call(shape, cu, p, parts.heads(convolved), g, parts.beta)
        o, _, saved = functions.seen_forward(call, final_state=False, h_every=shape.h_every)
        gate = parts.g if p.g_second is None else F.linear(parts.g, p.g_second, p.g_bias)
        ctx.shape, ctx.count, ctx.autocast = shape, len(saved), autocast_state()
        ctx.save_for_backward(cu, x, y, *p, *saved)
        ctx.set_materialize_grads(False)
        return o, gate

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, kept: Any, d_o: Tensor | None, d_gate: Tensor | None) -> tuple[Any, ...]:
        shape, (cu, x, y, *rest) = ctx.shape, kept
        p, saved = Parameters._make(rest[: len(rest) - ctx.count]), rest[len(rest) - ctx.count :]
        wanted = dict(zip(Parameters._fields, ctx.needs_input_grad[3:], strict=True))
        rows = [w.shape[0] for w in p[:6]]
        parts, d = _Parts(shape, y, rows), _Parts(shape, torch.empty_like(y), rows)
        second: dict[str, Tensor | None] = {}
        if d_gate is None:
            d.g.zero_()
        elif p.g_second is None:
            d.g.copy_(d_gate)
        else:
            _product_into(d.g, d_gate, p.g_second)
            second["g_second"] = torch.mm(d_gate.t(), parts.g) if wanted["g_second"] else None
            second["g_bias"] = d_gate.sum(0) if wanted["g_bias"] else None
        if d_o is None:
            HV, V = shape.heads[1], shape.heads[3]
            d_o = x.new_zeros(*shape.batch, HV, V)
        recurrence = _recurrence(shape, cu, p, parts, d, saved, d_o, wanted)
        dx, dweights = joint_gradients(x, p[:6], d.all, ctx.needs_input_grad[2:9])
        return None, None, dx, *dweights, *(({**second, **recurrence}).get(name) for name in Parameters._fields[6:])


def _recurrence(
    shape: Shape,
    cu: Tensor | None,
    p: Parameters,
    parts: _Parts,
    d: _Parts,
    saved: Sequence[Tensor],
    d_o: Tensor,
    wanted: dict[str, bool],
) -> dict[str, Tensor | None]:
    """Writes the gradients of the rows, the decay and beta to ``d``; returns those of parameters by name."""
    convolved, g = _convolved_and_decay(shape, cu, p, parts)
    d_convolved = torch.empty_like(convolved)
    dg = torch.empty_like(g) if p.f_second is not None else _decay(shape, d.f, None)
    grads = functions.seen_backward(
        _call(shape, cu, p, parts.heads(convolved), g, parts.beta),
        saved,
        shape.h_every,
        d_o,
        None,
        (*(True,) * 5, wanted["A_log"], wanted["dt_bias"], False),
        into=(*d.heads(d_convolved), dg, d.beta),
    )
    found = {"A_log": grads[5], "dt_bias": grads[6]}
    if p.f_second is not None:
        rows = dg.flatten(2).flatten(0, 1)
        _product_into(d.f, rows, p.f_second)
        found["f_second"] = torch.mm(rows.t(), parts.f) if wanted["f_second"] else None
    _, dw, db, _ = functions.seen_conv_backward(
        parts.raw,
        *p.convolution(),
        None,
        cu,
        silu=True,
        dy=d_convolved,
        d_last=None,
        wanted=(False, any(wanted[n] for n in _WEIGHTS), any(wanted[n] for n in _BIASES), False),
        into=d.raw,
    )
    sizes = [w.shape[0] for w in p.convolutions()[0]]
    if dw is not None:
        found |= zip(_WEIGHTS, copies(dw.unsqueeze(1), sizes), strict=True)
    if db is not None:
        found |= zip(_BIASES, copies(db, sizes), strict=True)
    return found


def weights_of(modules: Modules, maps: list[Any]) -> dict[str, Any] | None:
    """The :class:`Parameters` of a layer, but for those of its decay. ``maps``: those of its joint product. None where
    the parts have to run one by one: if one was replaced or hooked, or if there is no convolution, or a gate of full
    rank with a bias."""
    if len(maps) != 6 or not convolve_as_one(modules):
        return None
    convs = convolutions(modules)
    second: list[Any] = [m[1] if isinstance(m, nn.Sequential) else None for m in (modules["f_proj"], modules["g_proj"])]
    if (
        any(type(p) not in (nn.Parameter, type(None)) for c in convs for p in c._parameters.values())
        or not are_plain_maps(*(m for m in second if m is not None), bias=True)
        or (second[0] is not None and second[0].bias is not None)
    ):
        return None
    found: dict[str, Any] = {name: m.weight for name, m in zip("qkvfgb", maps, strict=True)}
    found |= {f"{name}_second": None if m is None else m.weight for name, m in zip("fg", second, strict=True)}
    found["g_bias"] = None if second[1] is None else second[1].bias
    for name, c in zip("qkv", convs, strict=True):
        found |= {f"{name}_conv": c.weight, f"{name}_bias": c.bias}
    return found


def train(
    p: Parameters, x: Tensor, cu: Tensor | None, heads: tuple[int, int, int, int], form: Options, keep_all: bool
) -> tuple[Tensor, Tensor] | None:
    """``(o, gate)``, ``[B, T, HV, V]`` each, of x ``[B, T, hidden]``; None if nothing needs gradients. ``heads``: H,
    HV, K and V. ``keep_all``: backward recomputes nothing of the recurrence."""
    h_every = functions.chunks_between_states((x, *p), keep_all)
    if not h_every:
        return None
    shape = Shape((x.shape[0], x.shape[1]), heads, form, h_every)
    o, gate = apply(LayerFunction, shape, cu, x.reshape(-1, x.shape[2]), *p)
    return o, gate.view(o.shape)


def project(m: Any, o: Tensor) -> Tensor:
    """The output projection ``m`` behind :func:`train`. Its backward, too, does not depend on autocast around it."""
    projected: Tensor = apply(Linear, o, m.weight, m.bias) if are_plain_maps(m, bias=True) else m(o)
    return projected
