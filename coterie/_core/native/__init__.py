"""Inner loops in C, compiled when the package is installed if there is a compiler.

`library` is None where they were not compiled or do not load; torch then computes the same results.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

from coterie._core.native import sources

PLAIN = "COTERIE_PLAIN"  # environment variable: set to compute without C


def _load() -> ctypes.CDLL | None:
    """Load the compiled library, or return None if it is missing, switched off or built for another machine."""
    path = sources.library(Path(__file__).parent)
    if os.environ.get(PLAIN) or not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # built for another machine
        return None


library = _load()


def takes(values: Tensor) -> bool:
    """Return True if the C kernels support values of this dtype and device."""
    return library is not None and values.dtype == torch.float32 and values.device.type == "cpu"
