"""Passes arrays to the binding that it cannot take as they are: those of libraries other than torch and NumPy, and
NumPy arrays that are read-only or of a dtype that NumPy does not export. A call that fails on one is repeated with
views of such arrays, so calls with torch tensors and ordinary NumPy arrays pay nothing. Nothing is copied.

Functions of steps catch the error themselves and pass their ``locals()``: :func:`in_sentences` around
:func:`kda.decode` would add 0.65 us to 5.8 (one token, H = 1, K = V = 16, one core of a Xeon).

DLPack could not express read-only memory before version 1.0, and the binding does not ask for a newer version. So an
array that its owner never lets anyone write is refused here where a call would write it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Set
from typing import Any, TypeVar, cast

import numpy

from .arrays import View, device_of, is_read_only, is_torch, share_numpy, share_other, torch, without_views
from .dispatch import needs_dispatch, through_operators
from .errors import Takes, refusal
from .shards import has_shards, on_shards
from .streams import calls_on_their_stream, device_among, handle_for, on_stream

F = TypeVar("F", bound=Callable[..., Any])


def in_sentences(function: F, takes: Takes | None = None) -> F:
    """Makes the errors of a function name its arguments; for functions where microseconds do not matter."""
    signature = inspect.signature(function)
    has_stream = "stream" in signature.parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_stream and kwargs.get("stream") is not None:
            stream = kwargs.pop("stream")
            return on_stream(call, stream, dict(signature.bind(*args, **kwargs).arguments))
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if torch is not None and torch.compiler.is_compiling():
                raise
            try:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError:
                raise error from None
            return retry(call, error, arguments, takes)

    return cast(F, call)


def in_sentences_of(leader: str | None = None, **names: str) -> Callable[[F], F]:
    """:func:`in_sentences` for functions whose signature annotates all arrays as ``Any``. ``leader`` and ``names``
    are those of :class:`Takes`."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        kinds: dict[str, set[str]] = {}
        for name, parameter in parameters.items():
            kinds.setdefault(parameter.annotation.split(" ")[0], set()).add(name)
        arrays = kinds.get("Any", set())
        required = {name for name in arrays if parameters[name].default is inspect.Parameter.empty}
        flags, numbers = kinds.get("bool", set()), kinds.get("float", set()) | kinds.get("int", set())
        return in_sentences(function, Takes(arrays, required, flags, numbers, names, leader))

    return decorate


_RECORDS = {"records.u", "records.k", "records.alpha"}
_WRITTEN: dict[str, set[str]] = {  # by function: the arguments that it writes
    "prefill": {"state", "checkpoints", "out", "workspace"},
    "decode": {"state", "out"},
    "fused_decode": {"state", "conv_state", "out"},
    "decode_mtp": {"state", "conv.state", "snapshots", "out"},
    "verify_kvbuffer": {"out", *_RECORDS},
    "flush_kvbuffer": {"state", "conv_state"},
    "flush_verify_kvbuffer": {"state", "conv.state", "out", *_RECORDS, "records.ring_first", "records.ring_count"},
    "causal_conv1d_update": {"state", "out", "checkpoints"},
    "norm_gate": {"out"},
    "prefill_f32": {"w", "u", "o", "final_state"},
    "bwd_intra": {"dq", "dk", "dbeta", "dG"},
}


def retry(function: Callable[..., Any], error: Exception, arguments: dict[str, Any], takes: Takes | None = None) -> Any:
    """Runs ``function`` again if views of some arguments are all that it needs, and returns the result. Otherwise
    raises what :func:`refusal` makes of the error. ``arguments`` are its ``locals()`` when it failed with ``error``."""
    try:
        given = _given(function, arguments)
        if other := _other_way(given):
            return other(function, given)
        written = _WRITTEN.get(function.__name__, set())
        if arguments.get("update_state") is False:
            written = written - {"state"}
        if views := with_views(error, given, written):
            return without_views(_with_stream(function, views))
        raise refusal(error, arguments, takes) from None
    finally:
        del error, arguments  # an exception's frame keeps its variables, so they must not hold the exception


def _with_stream(function: Callable[..., Any], views: dict[str, Any]) -> Any:
    if (index := device_among(views.values())) is None:
        return function(**views)
    with calls_on_their_stream(index):
        return function(**views)


def with_operators(function: Callable[..., Any], error: Exception, arguments: dict[str, Any]) -> Any:
    """:func:`retry` for a function that accepts only torch tensors, which need no views."""
    try:
        given = _given(function, arguments)
        if other := _other_way(given):
            return other(function, given)
        raise refusal(error, arguments) from None
    finally:
        del error, arguments


def _given(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ``function`` was called with, from its ``locals()``."""
    arguments.pop("error", None)
    parameters = inspect.signature(function).parameters
    given = {name: x for name, x in arguments.items() if name in parameters}
    return given | given.pop("kwargs", {})


def _other_way(given: dict[str, Any]) -> Callable[..., Any] | None:
    """How to make a call with tensors whose memory is elsewhere or nowhere; None if there are none."""
    if has_shards(given):
        return on_shards
    return through_operators if needs_dispatch(given) else None


def with_views(error: Exception, arguments: dict[str, Any], written: Set[str] = frozenset()) -> dict[str, Any] | None:
    """The arguments, with views where they are needed. None if no view is needed, or if the library has read all
    arrays."""
    if hasattr(error, "__tvm_ffi_error__"):
        return None
    views = {name: _view(name, x, written) for name, x in arguments.items()}
    return views if any(views[name] is not x for name, x in arguments.items()) else None


def _view(name: str, x: Any, written: Set[str]) -> Any:
    if hasattr(x, "_fields"):  # Conv and Records
        fields = [_view(f"{name}.{field}", y, written) for field, y in zip(x._fields, x, strict=True)]
        return x if all(a is b for a, b in zip(fields, x, strict=True)) else type(x)(*fields)
    if x is None or isinstance(x, View) or is_torch(x) or not hasattr(x, "__dlpack__"):
        return x
    if isinstance(x, numpy.ndarray):
        if type(x) is numpy.ndarray and x.flags.writeable and x.dtype.name != "bfloat16":
            return x
        share = share_numpy
    else:
        share = share_other
        if (index := device_of(x)) is not None:
            share = functools.partial(share_other, stream=handle_for(index))
    try:
        view, read_only = View(x, share), name in written and is_read_only(x)
    except Exception:  # refusal says what is wrong with it
        return x
    if read_only:
        raise ValueError(f"{name}: expected an array that may be written, got a read-only {type(x).__name__}")
    return view
