"""The substitutions, by family: the file they change and the tests that must notice."""

from . import (
    cpu_core,
    cpu_drafts,
    cpu_operators,
    cuda_blackwell_forward,
    cuda_blackwell_stages,
    cuda_blackwell_wy,
    cuda_chunk,
    cuda_hopper_backward,
    cuda_hopper_forward,
    cuda_stages,
    cuda_tokens,
    oracle,
)
from .mutant import EMULATOR, ENDS, Mutant

__all__ = ["EMULATOR", "ENDS", "MUTANTS", "UNITS", "Mutant"]

FAMILIES = (
    cpu_core,
    cpu_operators,
    cpu_drafts,
    oracle,
    cuda_chunk,
    cuda_hopper_forward,
    cuda_hopper_backward,
    cuda_blackwell_forward,
    cuda_blackwell_stages,
    cuda_blackwell_wy,
    cuda_tokens,
    cuda_stages,
)
MUTANTS: list[Mutant] = [m for family in FAMILIES for m in family.MUTANTS]
# A header's mutant is compiled into the units that its tests run.
UNITS: dict[str, list[str]] = {header: units for family in FAMILIES for header, units in family.UNITS.items()}
