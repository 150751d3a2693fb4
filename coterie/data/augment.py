"""Augmentations: random changes of training rows, computed on the device that holds them from hashed draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import DataError, SettingError


@dataclass(frozen=True)
class CropFlip:
    """Shift images by up to `pad` pixels each way, mirroring the border, and flip half of them.

    These are the usual crops of an image padded by reflection (He et al., 2016, for CIFAR). Pass an object as
    `augment=` to `Federation.from_clients`.

    Parameters
    ----------
    pad
        Largest shift in pixels.
    flip
        Whether to flip half of the images from left to right.

    Examples
    --------
    >>> import torch
    >>> from coterie._core import randomness
    >>> from coterie.data.augment import CropFlip
    >>> image = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> CropFlip(pad=1)(image, randomness.key(0, torch.arange(1))).shape
    torch.Size([1, 1, 2, 2])
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0 or int(self.pad) != self.pad:
            raise SettingError(f"pad={self.pad}; give a whole number of pixels, 0 or more")

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Change images x [..., channels, height, width] by draws from one key per image."""
        if x.dim() < keys.dim() + 2 or min(x.shape[-2:]) <= self.pad:
            raise DataError(
                f"rows of shape {tuple(x.shape[keys.dim() :])} cannot be cropped by {self.pad} pixels; "
                "crops are for images [channels, height, width]"
            )
        draws = randomness.slots(keys, 3)
        shift = randomness.integers(draws[..., :2], 2 * self.pad + 1) - self.pad
        rows = _reflected(x.shape[-2], shift[..., 0])
        columns = _reflected(x.shape[-1], shift[..., 1])
        if self.flip:
            turned = (randomness.integers(draws[..., 2], 2) == 1).unsqueeze(-1)
            columns = torch.where(turned, columns.flip(-1), columns)
        lead = (..., *([None] * (x.dim() - keys.dim() - 2)))
        x = x.gather(-2, rows[(*lead, slice(None), None)].expand_as(x))
        return x.gather(-1, columns[(*lead, None, slice(None))].expand_as(x))


def _reflected(length: int, shift: Tensor) -> Tensor:
    """Return positions 0..length-1 moved by `shift`, reflected where they cross an edge."""
    place = (torch.arange(length, device=shift.device) + shift.unsqueeze(-1)).abs()
    return torch.where(place >= length, 2 * (length - 1) - place, place)
