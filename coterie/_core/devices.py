"""Where to compute: a torch device that exists here."""

from __future__ import annotations

import torch

from coterie._core.errors import SettingError


def find_device(device: torch.device | str | None) -> torch.device:
    """Return a device by name.

    Parameters
    ----------
    device
        A device of torch or its name; None means the CPU, "auto" the GPU if there is one.

    Returns
    -------
    torch.device
        The device.

    Raises
    ------
    SettingError
        There is no such device here.

    Examples
    --------
    >>> find_device(None)
    device(type='cpu')
    """
    if device is None:
        return torch.device("cpu")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise SettingError(f"device {device!r} is unknown: give 'cpu', 'cuda', 'cuda:1' or 'auto'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU"
        raise SettingError(
            f"device {str(device)!r}: {why}. Use 'cpu', or 'auto' for a GPU where there is one."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise SettingError(f"device {str(device)!r}: there are only {torch.cuda.device_count()} GPUs here")
    return found
