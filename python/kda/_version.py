"""Reads the version from where it is written: ``kda.h``, which is in this folder in the wheel, and beside ``python``
in the source tree."""

from __future__ import annotations

import os

_HERE = os.path.dirname(os.path.abspath(__file__))


def include_directory() -> str:
    """The folder for ``#include <kda/kda.h>``."""
    places = [os.path.join(_HERE, "include"), os.path.join(os.path.dirname(os.path.dirname(_HERE)), "include")]
    for place in places:
        if os.path.isfile(os.path.join(place, "kda", "kda.h")):
            return place
    raise ImportError(f"kda: kda/kda.h was found neither in {places[0]} nor in {places[1]}; install the wheel again")


def _read() -> str:
    with open(os.path.join(include_directory(), "kda", "kda.h"), encoding="utf-8") as header:
        return ".".join(line.split()[2] for line in header if line.startswith("#define KDA_VERSION_"))


__version__ = _read()
