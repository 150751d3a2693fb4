"""Random changes of training rows, made on the device where the rows lie, from the hash alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import DataError, SettingError
from coterie.federation import randomness


@dataclass(frozen=True)
class CropFlip:
    """Images shifted by up to `pad` pixels each way, the border mirrored, and half of them flipped.

    The usual crops of a picture padded by reflection (He et al., 2016, for CIFAR).
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0 or int(self.pad) != self.pad:
            raise SettingError(f"pad={self.pad}; give a whole number of pixels, 0 or more")

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [..., channels, height, width] with one key per image."""
        if x.dim() < keys.dim() + 2 or min(x.shape[-2:]) <= self.pad:
            raise DataError(
                f"rows of shape {tuple(x.shape[keys.dim() :])} cannot be cropped by {self.pad} pixels; "
                "crops are for images [channels, height, width]"
            )
        draws = randomness.slots(keys, 3)
        shift = randomness.integers(draws[..., :2], 2 * self.pad + 1) - self.pad
        rows = _mirrored(x.shape[-2], shift[..., 0])
        columns = _mirrored(x.shape[-1], shift[..., 1])
        if self.flip:
            turned = (randomness.integers(draws[..., 2], 2) == 1).unsqueeze(-1)
            columns = torch.where(turned, columns.flip(-1), columns)
        lead = (..., *([None] * (x.dim() - keys.dim() - 2)))
        x = x.gather(-2, rows[(*lead, slice(None), None)].expand_as(x))
        return x.gather(-1, columns[(*lead, None, slice(None))].expand_as(x))


def _mirrored(length: int, shift: Tensor) -> Tensor:
    """Positions 0..length-1 moved by `shift`; those beyond an edge come back from it."""
    place = (torch.arange(length, device=shift.device) + shift.unsqueeze(-1)).abs()
    return torch.where(place >= length, 2 * (length - 1) - place, place)
