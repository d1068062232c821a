"""Read-only memory: accepted as an input, refused where a call writes. And arrays of other libraries.

The expected values are from the recurrence in float64, in NumPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kda
from kda import stages

N, H, D = 2, 2, 16
INPUTS = ("q", "k", "v", "g", "beta")


def inputs(T: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((N, T, H, D)).astype(np.float32) for name in "qkvg"}
    return x | {"g": -np.abs(x["g"]), "beta": rng.random((N, T, H)).astype(np.float32)}


def recurrence(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """Returns (o, state after), states V-first."""
    q, k, v, g, beta, S = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, beta, state))
    o = np.zeros_like(v)
    for t in range(q.shape[1]):
        S = S * np.exp(g[:, t])[:, :, None, :]
        u = beta[:, t][..., None] * (v[:, t] - np.einsum("nhvk,nhk->nhv", S, k[:, t]))
        S = S + u[..., None] * k[:, t][:, :, None, :]
        o[:, t] = np.einsum("nhvk,nhk->nhv", S, q[:, t]) * D**-0.5
    return o, S


def frozen(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


def zeros() -> Any:
    return np.zeros((N, H, D, D), np.float32)


class Exporter:
    """An array of another library, with the DLPack version that it supports."""

    def __init__(self, x: Any) -> None:
        self.x, self.shape, self.dtype = x, x.shape, str(x.dtype)

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        return self.x.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class OldExporter(Exporter):
    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.x.__dlpack__()


def memory_map(x: Any, folder: Path) -> Any:
    x.tofile(folder / "x")
    return np.memmap(folder / "x", x.dtype, "r", shape=x.shape)


KINDS: dict[str, Any] = {
    "flag": lambda x, folder: frozen(x),
    "bytes": lambda x, folder: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "memory map": memory_map,
    "exporter": lambda x, folder: Exporter(frozen(x)),
    "writeable exporter": lambda x, folder: Exporter(x.copy()),
    "exporter of DLPack 0.x": lambda x, folder: OldExporter(x.copy()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INPUTS)
def test_an_input(kind: str, name: str, tmp_path: Path) -> None:
    x = inputs()
    want, _ = recurrence(**x, state=zeros())
    x[name] = KINDS[kind](x[name], tmp_path)
    for o in (
        kda.decode(**x, state=zeros()),
        kda.prefill(**x, state=zeros()),
        kda.fused_recurrent_kda(*x.values())[0],
        kda.verify_kvbuffer(**x, state=frozen(zeros())),
        kda.decode_mtp(**x, state=frozen(zeros()), update_state=False),
    ):
        assert type(o) is np.ndarray
        np.testing.assert_allclose(o, want, atol=2e-6)
    assert kda.workspace_size(**x) > 0
    for op in ("forward", "decode", "verify"):
        assert "* " in kda.explain(**x, state=zeros(), op=op)


def test_all_inputs_at_once_and_their_slices() -> None:
    """broadcast_to gives strides of 0, and a slice of a frozen buffer has rows of the buffer."""
    wide = frozen(np.random.default_rng(1).standard_normal((N, 3, H, 3 * D)).astype(np.float32))
    q, k, v = (wide[..., i * D : (i + 1) * D] for i in range(3))
    g = np.broadcast_to(np.float32(-0.5), (N, 3, H, D))[..., :]
    beta = np.broadcast_to(np.float32(0.5), (N, 3, H))
    pool = zeros()[[0, 1, 1]]
    slots = frozen(np.array([2, 0], np.int32))
    o = kda.decode(q, k, v, np.ascontiguousarray(g), beta, pool, state_indices=slots)
    want, after = recurrence(q, k, v, g, beta, zeros())
    np.testing.assert_allclose(o, want, atol=2e-6)
    np.testing.assert_allclose(pool[[2, 0]], after, atol=2e-6)


def test_parameters_of_the_gate() -> None:
    x = inputs()
    A_log, dt_bias = frozen(np.zeros((1, 1, H), np.float32)), frozen(np.ones(H * D, np.float32))
    g = kda.fused_kda_gate(frozen(x["g"]), A_log, dt_bias)
    want = -np.log1p(np.exp(x["g"].astype(np.float64) + 1))
    np.testing.assert_allclose(g, want, rtol=1e-5)
    o = kda.decode(**x, state=zeros(), A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True)
    np.testing.assert_allclose(o, recurrence(**{**x, "g": want}, state=zeros())[0], atol=2e-6)


def test_torch_beside_a_frozen_array() -> None:
    x = {name: torch.from_numpy(y) for name, y in inputs().items()}
    want, _ = recurrence(**inputs(), state=zeros())
    pool = torch.zeros(3, H, D, D)
    o = kda.decode(**x, state=pool, state_indices=frozen(np.array([2, 0], np.int32)))
    assert isinstance(o, torch.Tensor)
    np.testing.assert_allclose(o, want, atol=2e-6)


READ_ONLY: dict[str, Any] = {"array": frozen, "exporter": lambda x: Exporter(frozen(x))}


@pytest.mark.parametrize("of", READ_ONLY)
@pytest.mark.parametrize("name", ["state", "out", "checkpoints", "workspace"])
def test_an_output(of: str, name: str) -> None:
    x = inputs(64)
    written = {"state": zeros(), "out": np.zeros((N, 64, H, D), np.float32), "checkpoints": zeros()}
    written["workspace"] = np.zeros(1 << 20, np.uint8)
    locked = frozen(written[name])
    written[name] = READ_ONLY[of](written[name]) if of == "exporter" else locked
    with pytest.raises(ValueError, match=rf"^{name}: expected an array that may be written, got a read-only"):
        kda.prefill(**x, **written, checkpoint_slots=np.array([[0], [1]], np.int32))
    assert not locked.any()
    if name in ("state", "out"):
        with pytest.raises(ValueError, match=rf"^{name}: expected an array that may be written"):
            kda.decode(**x, state=written["state"], out=written["out"])


@pytest.mark.parametrize("of", READ_ONLY)
def test_outputs_of_speculation(of: str) -> None:
    x, lock = inputs(), READ_ONLY[of]
    records = kda.Records(
        *(np.zeros((N, 3, H, D), np.float32) for _ in range(3)), None, *(np.zeros(N, np.int32) for _ in range(2))
    )
    plain = kda.Records(*records[:3])
    lengths = frozen(np.ones(N, np.int32))

    def refused(name: str, function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=rf"^{name}: expected an array that may be written, got a read-only"):
            function(*args, **kwargs)

    for field in ("u", "k", "alpha"):
        locked = plain._replace(**{field: lock(getattr(plain, field))})
        refused(rf"records\.{field}", kda.verify_kvbuffer, **x, state=zeros(), records=locked)
        kda.flush_kvbuffer(zeros(), locked, lengths)  # reads them
    refused("state", kda.flush_kvbuffer, lock(zeros()), plain, lengths)
    conv = kda.Conv(np.ones((N, 1, 3 * H * D), np.float32), np.ones((3 * H * D, 4), np.float32), None, None)
    rolled = np.zeros((N, 3 * H * D, 3), np.float32)
    one = {"q": None, "k": None, "v": None, "g": x["g"][:, :1], "beta": x["beta"][:, :1], "state": zeros()}
    refused(r"conv\.state", kda.decode_mtp, **one, conv=conv._replace(state=lock(rolled)))
    kda.verify_kvbuffer(**one, conv=conv._replace(state=lock(rolled)))  # reads it
    refused("snapshots", kda.decode_mtp, **x, state=zeros(), snapshots=lock(np.zeros((N, 3, H, D, D), np.float32)))
    ring = kda.Records(*(np.zeros((N, 6, H, D), np.float32) for _ in range(3)), None, *records[4:])
    for field in ("ring_first", "ring_count"):
        locked = ring._replace(**{field: lock(getattr(ring, field))})
        kda.verify_kvbuffer(**x, state=zeros(), records=locked)  # reads them
        refused(rf"records\.{field}", kda.flush_verify_kvbuffer, **x, state=zeros(), records=locked, accept_len=lengths)


@pytest.mark.parametrize("of", READ_ONLY)
def test_outputs_of_other_functions(of: str) -> None:
    lock = READ_ONLY[of]

    def refused(name: str, function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=rf"^{name}: expected an array that may be written, got a read-only"):
            function(*args, **kwargs)

    x, weight = np.ones((1, 2, 4), np.float32), frozen(np.ones((4, 3), np.float32))
    state = np.zeros((1, 4, 2), np.float32)
    refused("state", kda.causal_conv1d_update, x, lock(state), weight)
    refused("out", kda.causal_conv1d_update, x, state, weight, out=lock(x))
    y, last = kda.causal_conv1d(lock(x), weight, initial_state=lock(state), output_final_state=True, activation=None)
    assert y[0, :, 0].tolist() == [1, 2] and last[0, 0].tolist() == [1, 1]

    heads = np.ones((1, 1, 3, D), np.float32) / 4
    call, beta = (heads, heads, heads, 0 * heads), np.ones((1, 1, 3), np.float32)
    refused("o", kda.prefill_f32, *call, beta, o=lock(heads))
    refused("final_state", kda.prefill_f32, *call, beta, final_state=lock(np.zeros((1, 1, D, D), np.float32)))

    M, b = np.full((2, 1, 1, 1), 0.5, np.float32), np.ones((2, 1, 1, 1), np.float32)
    assert kda.segment_merge(lock(M), lock(b)).ravel().tolist() == [0.0, 1.0, 1.5]
    rows = np.ones((1, 3, 1, D), np.float32)
    assert stages.cumsum_backward(lock(rows))[0, :, 0, 0].tolist() == [3, 2, 1]
    scores, d_beta = np.zeros((1, 3, 1, 64), np.float32), np.zeros((1, 3, 1), np.float32)
    outputs = {"dq": rows.copy(), "dk": rows.copy(), "dbeta": d_beta, "dG": rows.copy()}
    for name in outputs:
        given = outputs | {name: lock(outputs[name])}
        refused(name, stages.bwd_intra, rows, rows, -rows, np.ones_like(d_beta), scores, scores, **given)


def test_bfloat16_of_ml_dtypes() -> None:
    """A NumPy dtype that NumPy does not export."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = {name: y if name == "beta" else y.astype(bfloat16) for name, y in inputs().items()}
    want, after = recurrence(**x, state=zeros())
    pool = zeros().astype(bfloat16)
    o = kda.decode(**x, state=pool)
    assert type(o) is np.ndarray and o.dtype == bfloat16
    np.testing.assert_allclose(o.astype(np.float64), want, atol=2e-2)
    np.testing.assert_allclose(pool.astype(np.float64), after, atol=2e-2)
    out = np.zeros_like(x["v"])
    assert kda.prefill(**x, state=zeros(), out=out) is out
    np.testing.assert_allclose(out.astype(np.float64), want, atol=2e-2)
    assert kda.fused_kda_gate(inputs()["g"], lower_bound=-4.0, output_dtype=bfloat16).dtype == bfloat16
    with pytest.raises(ValueError, match=r"^k: expected an array that DLPack can share, got ndarray: DLPack only"):
        kda.decode(**{**x, "k": x["k"].astype(pytest.importorskip("ml_dtypes").float8_e5m2)}, state=zeros())


def test_arrays_of_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = {name: jnp.asarray(y) for name, y in inputs().items()}
    want, after = recurrence(**x, state=zeros())
    state = zeros()
    o = kda.decode(**x, state=state)
    assert type(o) is np.ndarray
    np.testing.assert_allclose(o, want, atol=2e-6)
    np.testing.assert_allclose(state, after, atol=2e-6)
    narrow = {name: y if name == "beta" else y.astype(jnp.bfloat16) for name, y in x.items()}
    want, _ = recurrence(**narrow, state=zeros())
    o = kda.prefill(**narrow, state=zeros())
    assert o.dtype == jnp.bfloat16
    np.testing.assert_allclose(o.astype(np.float64), want, atol=2e-2)
    immutable = jnp.zeros((N, H, D, D))
    for function in (kda.decode, kda.prefill):
        with pytest.raises(ValueError, match=r"^state: expected an array that may be written, got a read-only"):
            function(**x, state=immutable)
    assert not np.asarray(immutable).any()


def test_what_is_no_array_is_named() -> None:
    x = inputs()
    for name, wrong in (("k", [1.0]), ("v", "v"), ("beta", 3)):
        with pytest.raises(ValueError, match=rf"^{name}: expected an array, got"):
            kda.prefill(**{**x, name: wrong})
