"""Parameter groups: names for parts of a model's flat parameter vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest


class ParameterGroups(Mapping[str, Tensor]):
    """Masks over a parameter vector by name; `groups["head"]` is a boolean tensor [d].

    Every model has "all", "head" (the last layer) and "body" (the rest). A network also has its parameters
    ("0.weight"), its layers by their names ("0"), and "buffers" (running statistics of batch normalisation).

    Parameters
    ----------
    d
        Length of the parameter vector.
    slices
        The parts of the vector that belong to each group.
    device
        Device of the masks.

    Examples
    --------
    >>> from coterie.models.groups import ParameterGroups
    >>> groups = ParameterGroups(3, {"all": [slice(0, 3)], "head": [slice(2, 3)]})
    >>> groups["head"].tolist()
    [False, False, True]
    """

    def __init__(
        self, d: int, slices: Mapping[str, Sequence[slice]], device: torch.device | str = "cpu"
    ) -> None:
        self.d, self.slices, self.device = d, dict(slices), device

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.slices:
            raise SettingError(f"the model has no parameter group {name!r}.{nearest(name, self.slices)}")
        mask = torch.zeros(self.d, dtype=torch.bool, device=self.device)
        for part in self.slices[name]:
            mask[part] = True
        return mask

    def __iter__(self) -> Iterator[str]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def to(self, device: torch.device | str) -> ParameterGroups:
        """Return the same groups with masks on another device."""
        return ParameterGroups(self.d, self.slices, device)


def of_layers(names: Sequence[str], sizes: Sequence[int], d: int, head: str | None) -> dict[str, list[slice]]:
    """Return groups for parameters with these names and sizes; entries after them are buffers."""
    groups: dict[str, list[slice]] = {"all": [slice(0, d)], "head": [], "body": [], "buffers": []}
    at = 0
    for name, size in zip(names, sizes, strict=True):
        part, layer = slice(at, at + size), name.rpartition(".")[0]
        groups["head" if head is None or layer == head else "body"].append(part)
        prefixes = [name]
        while layer:
            prefixes.append(layer)
            layer = layer.rpartition(".")[0]
        for prefix in prefixes:
            groups.setdefault(prefix, []).append(part)
        at += size
    if at < d:
        groups["buffers"].append(slice(at, d))
    return groups
