"""Functions of one client mapped over a stack of clients with torch.func.vmap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import vmap

from coterie._core.errors import SettingError


def mapped(function: Callable[..., Any], w: Tensor, *rows: Tensor) -> Tensor:
    """Map a function over the clients; a `w` shared by all of them is not copied."""
    shared = w.stride(0) == 0
    over = (None if shared else 0, *(0 for _ in rows))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            values: Tensor = vmap(function, in_dims=over)(w[0] if shared else w, *rows)
            return values.contiguous()
        except RuntimeError as problem:
            raise SettingError(
                f"The module cannot be mapped over clients: {problem} Use network(..., stacked=False)."
            ) from problem
