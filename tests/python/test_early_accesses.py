"""Does the walk through a kernel's machine code (tools/early_accesses.py) find what comes in front of the wait?"""

import pytest

from early_accesses import IN_ORDER, Kernel, faults_of, kernels_of

WAIT, EXIT = "ACQBULK", "EXIT"
LOAD = "LDG.E R2, desc[UR4][R2.64]"
PEEK = "LDG.E.STRONG.GPU R2, desc[UR4][R2.64]"


def text_of(lines: list[str], name: str = "_Z4some") -> list[str]:
    """As cuobjdump prints it: each instruction has 16 bytes, in two lines."""
    text = ["arch = sm_90\n", f"\t\tFunction : {name}\n", '\t.headerflags\t@"EF_CUDA_SM90"\n']
    for i, line in enumerate(lines):
        text += [
            f"        /*{16 * i:04x}*/       {line} ;      /* 0x00000a00ff017b82 */\n",
            " /* 0x000e240000000800 */\n",
        ]
    return text


def faults(*lines: str, name: str = "_Z4some") -> list[str]:
    (kernel,) = kernels_of(text_of(list(lines), name))
    return faults_of(kernel)


@pytest.mark.parametrize(
    "lines",
    [
        ("S2R R0, SR_TID.X", WAIT, LOAD, EXIT),
        ("@P0 EXIT", "LDC R1, c[0x0][0x28]", WAIT, LOAD, EXIT),
        ("@P0 BRA 0x30", WAIT, "BRA 0x40", WAIT, LOAD, EXIT),  # each way has a wait of its own
        ("BRA 0x20", LOAD, WAIT, "BRA 0x10"),  # stands in front, and comes behind
        ("CCTL.E.PF2 [R2]", "UBLKPF.L2 [UR4], UR6", "UTMAPF.L2.3D [UR8], [UR4]", "LDS R0, [R1]", WAIT, EXIT),  # hints
        ("BSSY B0, 0x40", "@P0 BRA 0x30", WAIT, "BSYNC B0", WAIT, LOAD, EXIT),
        (WAIT, "BRX R8 -0x440", LOAD, EXIT),
    ],
)
def test_kernels_that_wait(lines: tuple[str, ...]) -> None:
    assert faults(*lines) == []


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ((LOAD, WAIT, EXIT), LOAD),
        (("@!P1 STG.E desc[UR4][R2.64], R5", WAIT, EXIT), "STG.E desc[UR4][R2.64], R5"),
        (("@P0 BRA 0x30", WAIT, EXIT, LOAD, "BRA 0x10"), LOAD),  # stands behind, and comes in front
        (("@P0 BRA 0x20", WAIT, LOAD, EXIT), LOAD),  # the branch leaves out the wait
        (("BRA P0, 0x20", WAIT, LOAD, EXIT), LOAD),
        (("@P0 ACQBULK", LOAD, EXIT), LOAD),
        (("BSSY B0, 0x40", "@P0 BRA 0x30", WAIT, "BSYNC B0", LOAD, EXIT), LOAD),
        (("CALL.REL.NOINC 0x30", WAIT, EXIT, LOAD, "RET.REL.NODEC R2 0x0"), LOAD),
        (("UBLKCP.S.G [UR4], [UR6], UR8", WAIT, EXIT), "UBLKCP.S.G [UR4], [UR6], UR8"),
        (("UTMALDG.4D [UR8], [UR4]", WAIT, EXIT), "UTMALDG.4D [UR8], [UR4]"),
        (("UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR5", WAIT, EXIT), "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR5"),
        (("BRX R8 -0x440", WAIT, EXIT), "BRX R8 -0x440"),
        ((PEEK, WAIT, EXIT), PEEK),
    ],
)
def test_accesses_in_front_of_the_wait(lines: tuple[str, ...], fault: str) -> None:
    assert faults(*lines) == [f"{fault} in front of the wait"]


def test_some_kernels_peek() -> None:
    name = "_ZN3kda4cuda12_GLOBAL__N_113decode_kernelEv"
    assert faults(PEEK, WAIT, EXIT, name=name) == []
    assert faults(LOAD, WAIT, EXIT, name=name) == [f"{LOAD} in front of the wait"]


def test_kernels_without_a_wait() -> None:
    assert faults("S2R R0, SR_TID.X", EXIT) == ["no wait"]
    assert faults(LOAD, EXIT)[-1] == "no wait"


def test_several_kernels() -> None:
    text = text_of([WAIT, EXIT], "_Z3one") + text_of([LOAD, EXIT], "_Z3two")
    kernels = list(kernels_of(text))
    assert [(k.architecture, k.name, len(k.lines)) for k in kernels] == [("sm_90", "_Z3one", 2), ("sm_90", "_Z3two", 2)]
    assert isinstance(kernels[0], Kernel)
    assert list(kernels_of([])) == []


def test_kernels_launched_in_order() -> None:
    """Those of gate/gate.cu alone; norm/gate.cu has a sum_kernel, too."""
    inside = "_ZN3kda4cuda45_GLOBAL__N__5fa27cfd_7_gate_cu_39d38b6a"
    assert IN_ORDER.search(f"{inside}10sum_kernelENS1_6ParamsEl")
    assert not IN_ORDER.search(f"{inside}10sum_kernelEPKfjjPf")
    assert not IN_ORDER.search(f"{inside}12lanes_kernelILb1EEEvNS1_6ParamsE")
