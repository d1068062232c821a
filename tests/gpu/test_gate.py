"""kda_gate with CUDA tensors through torch: autograd, torch.compile, and calls without a kernel."""

from __future__ import annotations

import pytest

import kda

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(2, 100, 4, 128), (4,), (4 * 128,)]
    x = [torch.randn(s, generator=generator, device="cuda") for s in shapes]
    return [x[0].to(dtype).requires_grad_(), x[1].requires_grad_(), x[2].requires_grad_()]


def rel_rmse(reference: torch.Tensor, x: torch.Tensor) -> float:
    difference = (reference.double().cpu() - x.double().cpu()).pow(2).mean().sqrt()
    return float(difference / (reference.double().cpu().pow(2).mean().sqrt() + 1e-8))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_cpu_with_gradients(lower_bound: float | None, dtype: torch.dtype) -> None:
    on_gpu = inputs(dtype)
    on_cpu = [t.detach().cpu().requires_grad_() for t in on_gpu]
    y, expected = (kda.fused_kda_gate(*t, lower_bound=lower_bound) for t in (on_gpu, on_cpu))
    assert rel_rmse(expected, y) < 1e-5
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    y.backward(gradient.cuda())
    expected.backward(gradient)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert rel_rmse(a.grad, b.grad) < (1e-4 if dtype == torch.float32 else 3e-3)


def test_compiles() -> None:
    x, A_log, dt_bias = inputs()
    compiled = torch.compile(kda.fused_kda_gate, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, A_log, dt_bias), kda.fused_kda_gate(x, A_log, dt_bias))


def test_operators_without_a_kernel_say_so() -> None:
    x = torch.randn(1, 8, 1, 16, dtype=torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match=r"cuda_segment_recurrent: float64 .*; cpu_segment: runs on the CPU"):
        kda.segment_map(x, x, x, -x.abs(), torch.ones(1, 8, 1, dtype=torch.float64, device="cuda"))


def test_info_names_the_device() -> None:
    assert torch.cuda.get_device_name(0) in kda.info()["cuda"]
