"""Inner loops in C for the processor, built when the package is installed where there is a compiler.

`library` is None without them; everything that they compute is then computed with torch.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

from coterie.native import sources

PLAIN = "COTERIE_PLAIN"  # environment variable: set to compute without C


def _load() -> ctypes.CDLL | None:
    path = sources.library(Path(__file__).parent)
    if os.environ.get(PLAIN) or not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # built for another machine
        return None


library = _load()


def takes(values: Tensor) -> bool:
    """Whether what such values are for is computed in C."""
    return library is not None and values.dtype == torch.float32 and values.device.type == "cpu"
