"""SGLang's and vLLM's kernels for KDA beside ours, both called through the engine's own interface on the same tensors.

    python -m bench plugs                           # these and others
    python -m bench.plugs_serving --json rows.json    # these alone

An engine that is not installed is looked for in ``--folder``, where tools/fetch_engines.py --kernels leaves its
files.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench import measure
from bench.engine_files import Names, importable
from bench.measure import Call
from bench.tuning import compiled_at_once
from kda.call.arrays import torch
from kda.call.library import library

D = 128  # of a head: K and V
VERSIONS = {"sglang": "0.5.23", "vllm": "0.33.0"}
FOLDER = Path("build/engines")
PHASES = ("prefill", "prefill, states kept", "mixed batch", "decode", "verify + commit")


@dataclass(frozen=True)
class Case:
    phase: str
    lengths: tuple[int, ...]  # tokens of each request
    H: int = 32
    lower_bound: float | None = -5.0
    state_dtype: str = "float32"

    @property
    def name(self) -> str:
        longest, B = max(self.lengths), len(self.lengths)
        tokens = f"B={B}" if self.phase == "decode" else f"B={B} T={longest}"
        forms = ("" if self.lower_bound else " softplus") + ("" if self.state_dtype == "float32" else " bf16 states")
        return f"{self.phase} H={self.H} {tokens}{forms}"


def cases(quick: bool = False) -> list[Case]:
    prompts = [(8192,), (1024,) * 8, (300, 1, 64, 4000, 63, 2048)]
    residuals = [(63,) * 16, (1,) * 64]  # behind a cached prefix
    found = [Case(phase, lengths) for phase in PHASES[:2] for lengths in (*prompts, *residuals[:1])]
    found += [Case("prefill", residuals[1])]
    found += [Case("mixed batch", (2048, *(1,) * 31)), Case("mixed batch", (512, 512, *(1,) * 62))]
    found += [Case("decode", (1,) * B) for B in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    found += [Case("verify + commit", (T,) * B) for T in range(2, 9) for B in (1, 8, 32)]
    found += [Case("prefill", (4096,), lower_bound=None), Case("decode", (1,) * 32, state_dtype="bfloat16")]
    return [c for c in found if max(c.lengths) <= 512 and len(c.lengths) <= 16] if quick else found


class Tensors:
    """What both contenders get. Prompts are packed into one row, and inputs are slices, as the engines pass them."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        random = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            return torch.randn(*shape, generator=random, dtype=torch.float32, device=device).to(dtype)

        self.case, H, self.T, self.B = case, case.H, sum(case.lengths), len(case.lengths)
        self.mixed = normal(self.T, 3 * H * D + 8 * H)[:, : 3 * H * D]  # rows begin at multiples of 16 bytes
        self.q, self.k, self.v = (x.unflatten(-1, (H, D))[None] for x in self.mixed.split(H * D, -1))
        self.g, self.beta = normal(1, self.T, H, D), normal(1, self.T, 2 * H)[:, :, H:]
        self.A_log, self.dt_bias = normal(H, dtype=torch.float32) / 2, normal(H * D, dtype=torch.float32)
        dtype = getattr(torch, case.state_dtype)
        self.slots_of_pool = 2 * self.B + 2
        self.pool = normal(self.slots_of_pool, H, D, D, dtype=dtype)
        order = torch.randperm(self.slots_of_pool - 1, generator=random, dtype=torch.int64, device=device)
        self.slots = order[: self.B].int() + 1
        self.cu = torch.tensor([0, *case.lengths], dtype=torch.int64, device=device).cumsum(0).int()


# ---- engines ----


@dataclass
class Contender:
    """``prepare[phase](tensors)`` is a call. For the time of the adapter, ``alone`` has calls without what the engine
    does besides, or None where a phase has no adapter, and ``parts`` says where the adapter takes our functions from.
    """

    name: str
    prepare: dict[str, Callable[[Tensors], Call]]
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alone: dict[str, Callable[[Tensors], Call] | None] = field(default_factory=dict)

    def adapter(self, phase: str, x: Tensors) -> Call | None:
        """The call of which the host's time in the adapter is measured."""
        prepare = self.alone.get(phase, self.prepare[phase])
        return None if prepare is None else prepare(x)


def sglang_names() -> Names:
    """Stand-ins for what SGLang's kernels import and do not need here."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    platforms = {f"is_{name}": lambda there=name == "cuda": there for name in ("cpu", "cuda", "hip", "npu", "xpu")}
    helpers = {
        "get_device_sm": lambda: 10 * capability[0] + capability[1], "is_gfx95_supported": lambda: False,
        "is_sm90_supported": lambda: capability[0] == 9,
    }  # fmt: skip
    packages: Names = {f"sglang.kernels{more}": {} for more in ("", ".ops", ".ops.mamba", ".ops.memory")}
    release = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    return packages | {
        "sglang.srt.utils": {**platforms, **helpers},
        "sglang.srt.utils.common": {"torch_release": release, **platforms, **helpers},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: capability[0] >= 9, "cache_once": functools.cache},
        # Compiled by nvcc when it is first called, which a machine may lack.
        "sglang.kernels.ops.attention": {"kda_packed_decode": SimpleNamespace(covered=lambda *tensors: False)},
    }


def vllm_names() -> Names:
    triton, language = importlib.import_module("triton"), importlib.import_module("triton.language")
    libdevice = importlib.import_module("triton.language.extra.libdevice")

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: name in ("is_cuda", "is_cuda_alike", "is_arch_support_pdl")

    models = "vllm.models"
    packages: Names = {f"{models}{x}": {} for x in (".kimi_k3", ".kimi_k3.nvidia", ".kimi_k3.nvidia.ops")}
    return packages | {
        "vllm.third_party.flash_linear_attention.ops": {},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": language, "tldevice": libdevice},
        "vllm.utils.math_utils": {
            "cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2, "RCP_LN2": 1.4426950216
        },
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": lambda data, device=None, dtype=None: torch.as_tensor(data, device=device, dtype=dtype)
        },
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
    }  # fmt: skip


@contextmanager
def engine(package: str, folder: Path | None = None) -> Iterator[tuple[Contender, Contender]]:
    """The engine's own kernels and ours behind its interface.

    Raises:
        ImportError: it is neither installed nor in the folder.
    """
    with ExitStack() as stack:
        if importlib.util.find_spec(package) is None:
            files = (folder or FOLDER) / f"{package}-{VERSIONS[package]}-kernels"
            if not (files / "complete").exists():
                raise ImportError(f"no rows of {package}: it is not installed, and there is no {files}/complete")
            names = sglang_names() if package == "sglang" else vllm_names()
            stack.enter_context(importable(package, files, names))
        yield _sglang() if package == "sglang" else _vllm()


def _sglang() -> tuple[Contender, Contender]:
    triton = importlib.import_module("sglang.srt.layers.attention.linear.kernels.kda_triton").TritonKDAKernel
    scatter = importlib.import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
    from kda.plugs.sglang_kernel import kernel_class

    def contender(name: str, kernel: Any) -> Contender:
        def common(x: Tensors) -> dict[str, Any]:
            return {
                "A_log": x.A_log, "dt_bias": x.dt_bias, "ssm_states": x.pool, "cache_indices": x.slots,
                "lower_bound": x.case.lower_bound,
            }  # fmt: skip

        def prefill(x: Tensors, kept: bool = False) -> Call:
            more: dict[str, Any] = {}
            if kept:  # the last boundary of each request, as SGLang's prefix cache does
                last = [(n - 1) // 64 or -1 for n in x.case.lengths]
                chunks = torch.tensor(last, dtype=torch.int32, device=x.pool.device)
                state = torch.empty(x.B, *x.pool.shape[1:], dtype=torch.float32, device=x.pool.device)
                more = {"return_intermediate_states": True, "track_state": state, "track_chunk_idx": chunks}
            lengths = list(x.case.lengths)
            return functools.partial(
                kernel.extend, x.q, x.k, x.v, x.g, x.beta, query_start_loc=x.cu, beta_is_raw=True,
                extend_seq_lens_cpu=lengths, **common(x), **more,
            )  # fmt: skip

        def decode(x: Tensors) -> Call:
            return functools.partial(
                kernel.packed_decode, x.mixed, x.g[0].flatten(1), x.beta[0], scale=D**-0.5, num_v_heads=x.case.H,
                head_v_dim=D, **common(x),
            )  # fmt: skip

        def verify(x: Tensors, commit: bool = True) -> Call:
            T, rows = x.case.lengths[0], torch.arange(x.B, dtype=torch.int32, device=x.pool.device)
            kept = torch.zeros(1, x.B, T, *x.pool.shape[1:], device=x.pool.device, dtype=x.pool.dtype)
            call = functools.partial(
                kernel.target_verify, q=x.q, k=x.k, v=x.v, a=x.g.flatten(2), b=x.beta, query_start_loc=x.cu,
                intermediate_states_buffer=kept[0], intermediate_state_indices=rows, cache_steps=T,
                retrieve_parent_token=None, **common(x),
            )  # fmt: skip
            if not commit:
                return call
            last, function = torch.full_like(rows, T - 1), scatter.fused_mamba_state_scatter_with_mask
            return measure.in_turn([call, functools.partial(function, x.pool[None], kept, x.slots, last, rows)])

        prepare: dict[str, Callable[[Tensors], Call]] = {
            "prefill": prefill, "prefill, states kept": functools.partial(prefill, kept=True), "mixed batch": prefill,
            "decode": decode, "verify + commit": verify,
        }  # fmt: skip
        parts: dict[str, tuple[str, ...]] = {"kda.plugs.sglang_kernel": ("decode", "prefill", "decode_mtp")}
        alone: dict[str, Any] = {"verify + commit": functools.partial(verify, commit=False)}
        return Contender(name, prepare, parts, alone)

    return contender("SGLang", triton()), contender("kda", kernel_class(triton)())


def _vllm() -> tuple[Contender, Contender]:
    module = importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
    from kda import prefill
    from kda.plugs import vllm_functions
    from kda.plugs.declined import or_own

    def common(x: Tensors) -> dict[str, Any]:
        return {
            "raw_g": x.g, "raw_beta": x.beta, "A_log": x.A_log, "lower_bound": x.case.lower_bound,
        }  # fmt: skip

    def copied(x: Tensors) -> Call:
        """As vLLM's layer does: states out of the pool, and back."""

        def run() -> None:
            _, last = module.chunk_kda_with_fused_gate(
                x.q, x.k, x.v, **common(x), g_bias=x.dt_bias, initial_state=x.pool[x.slots], output_final_state=True,
                use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu,
            )  # fmt: skip
            x.pool[x.slots] = last.to(x.pool.dtype)

        return run

    def in_place(x: Tensors) -> Call:
        return functools.partial(
            prefill, x.q, x.k, x.v, x.g, x.beta, x.pool, state_indices=x.slots, cu_seqlens=x.cu, A_log=x.A_log,
            dt_bias=x.dt_bias, lower_bound=x.case.lower_bound, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, first_valid_slot=1,
        )  # fmt: skip

    def contender(name: str, prompts: Any, of: Callable[[str], Any]) -> Contender:
        def decode(x: Tensors) -> Call:
            function = of("fused_recurrent_kda_packed_decode")
            more = {"initial_state": x.pool, "state_indices": x.slots, "dt_bias": x.dt_bias}
            return functools.partial(function, x.mixed, **common(x), **more)

        def verify(x: Tensors) -> Call:
            T = x.case.lengths[0]
            states = x.pool.new_zeros(1 + x.B * T, *x.pool.shape[1:])
            slots = 1 + torch.arange(x.B * T, dtype=torch.int32, device=x.pool.device).view(x.B, T)
            return functools.partial(
                of("fused_recurrent_kda"), x.q, x.k, x.v, **common(x), dt_bias=x.dt_bias, initial_state=states,
                cu_seqlens=x.cu, ssm_state_indices=slots, num_accepted_tokens=torch.full_like(slots[:, 0], T),
            )  # fmt: skip

        prepare = {"prefill": prompts, "mixed batch": prompts, "decode": decode, "verify + commit": verify}
        parts: dict[str, tuple[str, ...]] = {"kda.plugs.vllm_functions": ("decode_mtp",)}
        return Contender(name, prepare, parts, {"prefill": None, "mixed batch": None})  # kda.prefill itself

    ours = contender("kda", in_place, lambda name: or_own("vLLM", vllm_functions.K3[name], getattr(module, name)))
    return contender("vLLM", copied, lambda name: getattr(module, name)), ours


# ---- rows ----


def rows(package: str, found: Sequence[Case], notes: list[str], folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Microseconds of the device and of the host for each contender, and of the host in the adapter alone."""
    with engine(package, folder) as contenders:
        for case in found:
            times: list[float] = []
            for contender in (c for c in contenders if case.phase in c.prepare):
                try:
                    row = {"engine": package, "contender": contender.name, "case": case.name, **asdict(case)}
                    row |= _times(contender, case)
                except Exception as error:
                    note = f"no row of {contender.name} {case.name}: {measure.reason(error)}"
                    measure.note_once(notes, note)
                    continue
                times.append(row["us"])
                if len(times) == 2:
                    row["over_engine"] = times[0] / times[1]
                yield row


def _times(contender: Contender, case: Case) -> dict[str, float]:
    x = Tensors(case)
    call = contender.prepare[case.phase](x)
    found = {"us": _device_microseconds(call), "host_us": measure.host_microseconds(call)}
    if contender.name == "kda" and (adapter := contender.adapter(case.phase, x)):
        found["adapter_us"] = adapter_microseconds(contender, adapter)
    return found


def _device_microseconds(call: Call) -> float:
    with compiled_at_once():
        call()
    try:
        return 1e3 * measure.graph_milliseconds(call, flush=True)
    except RuntimeError:  # the engine's prefill asks the host for lengths
        torch.cuda.synchronize()
        return 1e3 * measure.stream_milliseconds(call, flush=True)


def adapter_microseconds(contender: Contender, call: Call, repeats: int = 100, batch: int = 100) -> float:
    """Host time of a call in which our public functions, and the library behind ``decode_rows``, do nothing. What
    decode_rows does besides is part of it: the output, checks and options."""
    with ExitStack() as stack:
        for module, names in contender.parts.items():
            for name in names:
                function = getattr(importlib.import_module(module), name)
                stack.enter_context(mock.patch(f"{module}.{name}", _idle(function)))
        binding = SimpleNamespace(decode_rows=_idle(library().decode_rows))
        stack.enter_context(mock.patch("kda.plugs.rows.library", lambda: binding))
        return measure.least_microseconds(call, repeats=repeats, batch=batch)


def _idle(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns None at once. It has the parameters of ``function``, since a dict of keywords would take time."""
    parameters = ", ".join(f"{name}=None" for name in inspect.signature(function).parameters)
    return eval(f"lambda {parameters}: None")  # type: ignore[no-any-return]
