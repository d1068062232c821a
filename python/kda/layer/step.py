"""Decode steps of the layer: convolution, recurrence and norm in one call, and a step of one token with little else.

On a GPU most of a step of one token is the host's work. So :func:`quick_step` keeps what is the same in every step:
the layer its weights, as views of the parameters, and the cache the memory between the products. Before each step it
looks whether the layer is still the same (:class:`Snapshot`). Its numbers are those of the general way, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..arguments import norm_form
from ..call.eager import grad_enabled, mark_step
from ..call.inputs import single
from ..call.library import library
from ..call.options import ALL_IN_KERNEL, make_options
from ..call.streams import Users
from ..call.tracing import backward_number, compiling, modes, raw_stream, recording, transforms_active
from ..fused import fused_decode
from .bypass import are_plain_maps, calls_differ, may_bypass
from .cache import KDACache
from .parts import Modules, conv_parameters, convolutions, convolve_as_one, heads_of
from .products import filled_up, whole_of
from .recompute import check_first_run


def is_one_call(modules: Modules, cache: KDACache, conv_size: int) -> bool:
    """Can convolution, recurrence and norm be one call?"""
    return (
        not torch.is_grad_enabled()
        and cache.conv is not None
        and conv_size > 1
        and may_bypass("norm", modules["o_norm"])
        and convolve_as_one(modules)
    )


def one_call(
    modules: Modules, mesh: Any, projected: tuple[Any, ...], cache: KDACache, cu: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Returns the outputs after the norm, ``[B, T, HV, V]``, of the rows, g, beta and gate."""
    rows, g, beta, gate = projected
    options.pop("use_gate_in_kernel")
    weight, bias = conv_parameters(modules, mesh)
    check_first_run("state", cache.made_in)
    norm = modules["o_norm"]
    options |= {"gate": gate, "norm_weight": norm.weight, "eps": norm.eps, "activation": norm.activation}
    o: Tensor = fused_decode(rows, weight, bias, cache.conv, g, beta, state=cache.state, cu_seqlens=cu, **options)
    return o


def may_be_quick(x: Tensor, cache: Any) -> bool:
    """May a step be quick, if its layer can? Not if torch does more than eager numbers, or if a tensor is unusual."""
    if compiling() or grad_enabled() or modes() or type(x) is not Tensor or type(cache) is not KDACache:
        return False
    if transforms_active() or recording() or backward_number() != -1 or calls_differ():
        return False
    # A graph would use the cache's memory for longer than the cache holds it.
    return not (torch.is_autocast_enabled(x.device.type) or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def quick_step(weights: StepWeights, x: Tensor, cache: KDACache) -> Tensor | None:
    """The output of a layer for one token of each sequence, ``[B, 1, hidden_size]``; None if the general way has to
    run."""
    memory = cache.step_memory
    if memory is None or not memory.fits(weights, x, cache):
        memory = cache.step_memory = _memory_of(weights, x, cache)
        if memory is None:
            return None
    if (users := memory.users) is not None and raw_stream(x.device.index) not in users.told:
        users.tell(memory.o, memory.buffers)
    return _step(weights, memory, x)


def _step(weights: StepWeights, memory: StepMemory, x: Tensor) -> Tensor | None:
    torch.mm(x.reshape(-1, x.shape[2]), weights.joint, out=memory.product)
    for (weight, bias), (first, second) in zip(weights.seconds, memory.seconds, strict=True):
        if bias is None:
            torch.mm(first, weight, out=second)
        else:
            torch.addmm(bias, first, weight, out=second)
    A_log, dt_bias, state, conv_state = weights.A_log, weights.dt_bias, memory.state, memory.conv_state
    if weights.narrow_gate:  # converted in every step, because nothing tells that the numbers have changed
        A_log, dt_bias = single(A_log), single(dt_bias)
    try:
        library().decode(
            None,
            None,
            None,
            memory.g,
            memory.beta,
            A_log,
            dt_bias,
            options=weights.options,
            h0=state,
            hT=True,
            o=memory.o,
            conv=(memory.rows, weights.conv_weight, weights.conv_bias, conv_state, None),
            norm=(memory.gate, *weights.norm),
        )
    except (ValueError, NotImplementedError):  # refused, so nothing was written: the general way says what is wrong
        return None
    mark_step(state, conv_state)
    return F.linear(memory.flat, *weights.o_proj)


class Settings(NamedTuple):
    """What a layer computes beside its parameters."""

    lower_bound: float | None
    allow_neg_eigval: bool
    eps: float  # of its norm
    activation: str
    fuse_projections: bool


class StepShapes(NamedTuple):
    """What the memory between the products depends on, apart from the number of sequences."""

    columns: tuple[int, ...]  # of the joint product: q, k and v; decay; gate; beta; what fills it up
    seconds: tuple[int, ...]  # of the second halves of decay and gate, 0 without one
    heads: tuple[int, int, int]  # HV, K and V
    dtype: torch.dtype
    device: torch.device


class StepWeights:
    """The weights of a layer as its steps take them. They are views of the parameters, so they show new numbers."""

    def __init__(
        self,
        module: nn.Module,
        maps: list[Any],
        seconds: list[Any],
        whole: Tensor,
        heads: tuple[int, int, int],
        settings: Settings,
    ) -> None:
        """``maps``: those of the joint product, and ``whole``, their weights. ``seconds``: the second halves of decay
        and gate, or None. ``heads``: HV, K and V."""
        modules: dict[str, Any] = module._modules
        own: dict[str, Any] = module._parameters
        self.snapshot, self.settings = Snapshot(module), settings
        self.joint, self.seconds = whole.t(), [(m.weight.detach().t(), m.bias) for m in seconds if m is not None]
        self.conv_weight, self.conv_bias = conv_parameters(modules, None)
        self.norm = modules["o_norm"].weight.detach(), settings.eps, norm_form(settings.activation), True
        self.o_proj = modules["o_proj"].weight, modules["o_proj"].bias
        self.A_log, self.dt_bias = own["A_log"].detach(), own["dt_bias"].detach().view(heads[:2])
        self.narrow_gate = any(p.dtype.itemsize < 4 for p in (self.A_log, self.dt_bias))
        bound, neg_eigval = settings.lower_bound, settings.allow_neg_eigval
        self.options = make_options(self.A_log, None, bound, ALL_IN_KERNEL, neg_eigval, v_first=True)
        rows = [m.weight.shape[0] for m in maps]
        columns = (sum(rows[:3]), *rows[3:])
        filling = filled_up(sum(columns)) - sum(columns)
        ends = tuple(0 if m is None else m.weight.shape[0] for m in seconds)
        self.shapes = StepShapes((*columns, filling), ends, heads, whole.dtype, whole.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files of a layer have None in its place: views of other weights are no use to them."""
        return type(None), ()


def weights_of(
    module: nn.Module, maps: list[Any], x: Tensor, heads: tuple[int, int, int], settings: Settings
) -> StepWeights | None:
    """For a layer whose norm is its own. ``maps``: those of its joint product. None if another part has to be called
    itself, or if weights are distributed, lie apart, or need another dtype."""
    modules: dict[str, Any] = module._modules
    if len(maps) < 6 or not convolve_as_one(modules):
        return None
    halves = modules["f_proj"], modules["g_proj"]
    seconds = [m._modules["1"] if type(m) is nn.Sequential else None for m in halves]
    linear = [*maps, modules["o_proj"], *(m for m in seconds if m is not None)]
    whole = whole_of([m.weight for m in maps]) if are_plain_maps(*linear, bias=True) else None
    if whole is None:
        return None
    convs = convolutions(modules)
    biases = [c.bias for c in convs if c.bias is not None]
    if whole_of([c.weight for c in convs]) is None or (biases and whole_of(biases) is None):
        return None
    parameters = list(module.parameters())
    if not are_plain(parameters, x.device) or not all(p.is_contiguous() for p in parameters):
        return None
    same_dtype = {p.dtype for m in linear for p in m.parameters()} == {x.dtype}
    return StepWeights(module, maps, seconds, whole, heads, settings) if same_dtype else None


_ADDRESS, _CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous


def are_plain(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Does the memory of all tensors, on this device, hold their numbers as they read?"""
    return all(
        type(x) in (nn.Parameter, Tensor) and x.layout is torch.strided and x.device == device and not x.is_neg()
        for x in tensors
    )


class Snapshot:
    """What views of a layer's parameters depend on: which modules it has, and where their parameters lie.

    The numbers in that memory may change, since views show the new ones. What replaces a module or a parameter, gives
    one other memory, or hooks a module in the layer is noticed by :meth:`holds`.
    """

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.modules())
        self.children = layer.__dict__, dict(layer._modules)
        self.parts = [(m, type(m), m.__dict__, dict(m._modules)) for m in modules[1:]]
        self.places = [(m.__dict__, name, p) for m in modules for name, p in m._parameters.items()]
        self.tensors = [p for _, _, p in self.places if p is not None]
        self.addresses, self.sizes = list(map(_ADDRESS, self.tensors)), [p.nbytes for p in self.tensors]

    def holds(self, layer: nn.Module) -> bool:
        """Every decode step asks this, so it reads what nn.Module keeps: attributes of modules take ten times as long,
        and calls for each module as long as the rest. It looks at the same things as :func:`may_bypass`, but for
        hooks of backward, which there is none of."""
        kept, children = self.children
        if kept is not layer.__dict__ or kept["_modules"] != children:  # torch copies it for replicas of a layer
            return False
        for module, kind, kept, children in self.parts:
            if type(module) is not kind or kept["_modules"] != children or "forward" in kept:
                return False
            if kept["_forward_hooks"] or kept["_forward_pre_hooks"] or kept.get("_compiled_call_impl") is not None:
                return False
        try:
            for kept, name, parameter in self.places:
                if kept["_parameters"][name] is not parameter:
                    return False
        except KeyError:
            return False
        tensors = self.tensors
        return (
            list(map(_ADDRESS, tensors)) == self.addresses
            and [p.nbytes for p in tensors] == self.sizes
            and all(map(_CONTIGUOUS, tensors))
        )


class StepMemory:
    """The memory between the products of a step. It belongs to a cache, because the steps of one cache come one after
    another, on whatever streams and threads the layer runs. Nobody else knows of it, so it notes these streams itself.
    """

    def __init__(self, shapes: StepShapes, x: Tensor, cache: KDACache) -> None:
        B, (HV, K, V) = x.shape[0], shapes.heads

        def empty(*shape: int) -> Tensor:
            return torch.empty(B, *shape, dtype=shapes.dtype, device=shapes.device)

        y = empty(1, sum(shapes.columns))
        self.shapes, self.tokens = shapes, x.shape
        self.state, self.conv_state = cache.state, cache.conv
        self.product = y.squeeze(1)[:, : sum(shapes.columns[:-1])]
        self.rows, *firsts, self.beta, _ = y.split_with_sizes(shapes.columns, -1)
        ends = [empty(1, n) if n else None for n in shapes.seconds]
        self.seconds = [(a.flatten(0, 1), b.flatten(0, 1)) for a, b in zip(firsts, ends, strict=True) if b is not None]
        g, gate = (a if b is None else b for a, b in zip(firsts, ends, strict=True))
        self.g, self.gate = heads_of(g, K), heads_of(gate, V)
        self.o = empty(1, HV, V)
        self.flat = self.o.flatten(2)
        self.buffers = [y, *(b for b in ends if b is not None), self.o]  # all that was allocated here
        self.users = Users() if x.is_cuda else None

    def fits(self, weights: StepWeights, x: Tensor, cache: KDACache) -> bool:
        shapes = weights.shapes
        return (
            cache.state is self.state
            and cache.conv is self.conv_state
            and x.shape == self.tokens
            and x.dtype is shapes.dtype
            and x.device == shapes.device
            and self.shapes == shapes
        )


def _memory_of(weights: StepWeights, x: Tensor, cache: KDACache) -> StepMemory | None:
    """None if x is not like the weights, or the cache not as this layer makes it."""
    shapes = weights.shapes
    if x.dtype is not shapes.dtype or cache.conv is None or cache.state.shape[:1] != x.shape[:1]:
        return None
    if not are_plain([x, cache.conv, cache.state], shapes.device):
        return None
    with torch.inference_mode(mode=False):  # so that steps in and out of it can use the same memory
        return StepMemory(shapes, x, cache)
