"""Kernels of other projects for decode and rounds of speculation on a GPU, called as their own engines call them.

The packages ``fla`` and ``sglang`` (the latter also from ``sgl/`` in the folder of ``--peers``), ``libsglpd.so``, a C
function around SGLang's CUDA kernel, and ``cubin/``, cuLA's kernels compiled ahead of time, come from the module path
and from that folder. What is missing is left out.
"""

from __future__ import annotations

import ctypes
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.measure import Call, in_turn
from bench.peers import file_of_peers
from kda.call.arrays import torch
from kda.cli.problems import Problem

if TYPE_CHECKING:
    from bench.serving_calls import Layers


_SGLANG = "sglang.kernels.ops"


def _import(module: str, function: str) -> Any:
    return getattr(importlib.import_module(module), function)


def _usual(p: Problem) -> None:
    usual = Problem(B=p.B, T=p.T, H=p.H, layers=p.layers)
    if p != usual:
        raise NotImplementedError(f"measured with HV = H, K = V = 128 and {usual.options} only")


def _tokens(layers: Layers) -> dict[str, Any]:
    """Inputs with all requests packed into one row."""
    return {name: x.flatten(1, 2).unsqueeze(1) for name, x in layers.x.items()}


def _fla(layers: Layers) -> Call:
    decode = _import("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd")
    given = layers.shared | {"dt_bias": layers.shared["dt_bias"].flatten(), "ssm_state_indices": layers.slots}
    given["inplace_final_state"] = True
    pools = layers.pools
    return in_turn([
        partial(
            decode, **{name: x[n] for name, x in layers.x.items()}, **given,
            initial_state=pools[n], out=layers.out[n],
        )
        for n in range(layers.count)
    ])  # fmt: skip


def _sglang(layers: Layers, n: int, x: dict[str, Any], offsets: Any, **more: Any) -> Call:
    """A call for layer n of the kernel that decodes, or that verifies drafts and keeps the state after each."""
    return partial(
        _import(f"{_SGLANG}.attention.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"),
        A_log=layers.shared["A_log"],
        dt_bias=layers.shared["dt_bias"].flatten(),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=x["q"][n],
        k=x["k"][n],
        v=x["v"][n],
        a=x["g"][n].flatten(2),
        b=x["beta"][n],
        initial_state_source=layers.pools[n],
        initial_state_indices=layers.slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=offsets,
        is_kda=True,
        **more,
    )


def _offsets(layers: Layers) -> Any:
    p = layers.p
    return torch.arange(0, p.B * p.T + 1, p.T, dtype=torch.int32, device=layers.slots.device)


def _sglang_decode(layers: Layers) -> Call:
    x, offsets = _tokens(layers), _offsets(layers)
    return in_turn([_sglang(layers, n, x, offsets) for n in range(layers.count)])


def _sglang_snapshots(layers: Layers) -> Call:
    """Keeps the state after each draft, then copies the accepted one to the pool, in one launch for all layers."""
    scatter = _import(f"{_SGLANG}.mamba.mamba_state_scatter_triton", "fused_mamba_state_scatter_with_mask")
    p, x, offsets = layers.p, _tokens(layers), _offsets(layers)
    rows = torch.arange(p.B, dtype=torch.int32, device=layers.slots.device)
    kept = layers.pools.new_empty(layers.count, p.B, p.T, *layers.pools.shape[2:])
    verify = [
        _sglang(
            layers, n, x, offsets, disable_state_update=True, intermediate_states_buffer=kept[n],
            intermediate_state_indices=rows, cache_steps=p.T,
        )
        for n in range(layers.count)
    ]  # fmt: skip
    last = layers.accept_len - 1
    commit = partial(scatter, layers.pools, kept, layers.slots, last, rows)
    return in_turn([*verify, commit])


def _packed(layers: Layers) -> Any:
    """q, k and v of a token side by side."""
    return torch.cat([layers.x[name][:, :, 0].flatten(2) for name in "qkv"], -1)


def _sglang_packed(layers: Layers) -> Call:
    decode = _import(f"{_SGLANG}.attention.fla.fused_recurrent", "fused_recurrent_kda_packed_decode")
    mixed, x, shared = _packed(layers), layers.x, layers.shared
    return in_turn([
        partial(
            decode, mixed[n], x["g"][n, :, 0].flatten(1), x["beta"][n, :, 0],
            shared["A_log"], shared["dt_bias"].flatten(), layers.p.K**-0.5, layers.pools[n], layers.out[n],
            layers.slots, use_qk_l2norm_in_kernel=True,
        )
        for n in range(layers.count)
    ])  # fmt: skip


def _pointer(x: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _sglang_packed_cuda(layers: Layers) -> Call:
    """``sgl_packed_decode(pointers.., strides of mixed, a, b, state, B, H, HV, scale, lower bound, is there one, with
    programmatic launch, stream)``."""
    function = ctypes.CDLL(str(file_of_peers("libsglpd.so"))).sgl_packed_decode
    p, mixed, x, shared = layers.p, _packed(layers), layers.x, layers.shared
    bias = shared["dt_bias"]
    strides = [ctypes.c_longlong(s) for s in (mixed.stride(1), p.HV * p.K, p.HV, layers.pools.stride(1))]
    sizes = [p.B, p.H, p.HV, ctypes.c_float(p.K**-0.5), ctypes.c_float(0.0), 0, 1]

    def run() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for n in range(layers.count):
            tensors = (mixed[n], x["g"][n], x["beta"][n], shared["A_log"], bias, layers.out[n], layers.pools[n])
            status = function(*map(_pointer, tensors), _pointer(layers.slots), *strides, *sizes, stream)
            if status:
                raise RuntimeError(f"sgl_packed_decode: CUDA error {status}")

    return run


class _Kernel:
    """One of cuLA's kernels, from ``cubin/NAME.cubin``; ``NAME.json`` has its name and shared memory. All its
    parameters are pointers: sizes and strides are compiled in."""

    _loaded: ClassVar[dict[Path, Any]] = {}

    def __init__(self, name: str) -> None:
        self.driver = driver = importlib.import_module("cuda.bindings.driver")
        path = file_of_peers(f"cubin/{name}.cubin")
        self.about = json.loads(path.with_suffix(".json").read_text())
        if path not in self._loaded:
            module = self._check(driver.cuModuleLoadData(path.read_bytes()))
            self._loaded[path] = self._check(driver.cuModuleGetFunction(module, self.about["name"].encode()))
        self.function = self._loaded[path]

    @staticmethod
    def _check(result: Any) -> Any:
        error, *values = result
        if int(error):
            raise RuntimeError(f"cuLA: {error}")
        return values[0] if values else None

    def __call__(self, grid: tuple[int, int], threads: int, *tensors: Any) -> None:
        if len(tensors) != self.about["nparam"]:
            raise RuntimeError(f"cuLA: expected a kernel of {len(tensors)} parameters, got {self.about['nparam']}")
        stream = self.driver.CUstream(torch.cuda.current_stream().cuda_stream)
        values = [_pointer(x) for x in tensors]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch = self.driver.cuLaunchKernel
        shared = self.about["smem"]
        self._check(launch(self.function, *grid, 1, threads, 1, 1, shared, stream, ctypes.addressof(addresses), 0))


def _cula(layers: Layers, kind: str) -> Call:
    """Verify with records, and its flush in one launch for all layers. Tiles are from its own tables for the H200:
    value columns per block for ``shuffle``, blocks per head for ``tensor_core``."""
    p = layers.p
    heads = p.B * p.HV
    if kind == "shuffle":
        tile = 16 if heads <= 32 else 32 if heads < 256 else 64
        blocks = p.V // tile
    else:
        tile = blocks = next((n for n in (1, 2) if heads * n >= 512), 4)
    verify = _Kernel(f"{kind}_T{p.T}_HV{p.HV}_tv{tile}")
    flush = _Kernel(f"flush_T{p.T}_HV{p.HV}_B{p.B}")  # for pools of 2 B + 1 slots
    records = [layers.pools.new_empty(layers.count, p.B, p.T, p.HV, 128) for _ in range(3)]
    x, shared, pools = layers.x, layers.shared, layers.pools
    # One launch of its flush can address 2^31 elements of the pools.
    part = min(layers.count, (2**31 - 1) // pools[0].numel())

    def run() -> None:
        for n in range(layers.count):
            inputs = (shared["A_log"], x["g"][n], shared["dt_bias"], x["q"][n], x["k"][n], x["v"][n], x["beta"][n])
            out = (layers.out[n], layers.slots, *(r[n] for r in records))
            verify((heads * blocks, 1), 128, pools[n], *inputs, *out)
        for n in range(0, layers.count, part):
            grid = (heads * p.V // 8, min(part, layers.count - n))
            flush(grid, 32, pools[n:], *(r[n:] for r in records), layers.slots, layers.accept_len)

    return run


@dataclass(frozen=True)
class Peer:
    name: str
    one_token: bool  # decode; otherwise a round of speculation
    make: Callable[[Layers], Call]

    def prepare(self, layers: Layers) -> Call:
        _usual(layers.p)
        return self.make(layers)


PEERS = (
    Peer("FLA, in place", True, _fla),
    Peer("SGLang fused_sigmoid", True, _sglang_decode),
    Peer("SGLang packed", True, _sglang_packed),
    Peer("SGLang packed, CUDA", True, _sglang_packed_cuda),
    Peer("SGLang snapshots + scatter", False, _sglang_snapshots),
    Peer("cuLA shuffle + flush", False, partial(_cula, kind="shuffle")),
    Peer("cuLA tensor cores + flush", False, partial(_cula, kind="tensor_core")),
)
