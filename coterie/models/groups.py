"""Parameter groups: names for parts of a model's flat parameter vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest


class ParameterGroups(Mapping[str, Tensor]):
    """Masks over a parameter vector by name; `groups["head"]` is a boolean tensor [d].

    Every model has "all", "head" (the last layer) and "body" (the rest). A network also has its parameters
    ("0.weight"), its layers by their names ("0"), "norm" (layers of normalisation) and "buffers" (running statistics of
    batch normalisation). A model with low-rank adapters also has "lora_A", "lora_B" and "rank 0", "rank 1", ...

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

    def __contains__(self, name: object) -> bool:
        return name in self.slices

    def __iter__(self) -> Iterator[str]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def to(self, device: torch.device | str) -> ParameterGroups:
        """Return the same groups with masks on another device."""
        return ParameterGroups(self.d, self.slices, device)


class Part:
    """Some entries of a parameter vector: `of(x)` takes them out, `into(x, values)` puts others in their place.

    Parameters
    ----------
    mask
        Which entries, boolean [d].

    Examples
    --------
    >>> import torch
    >>> from coterie.models.groups import Part
    >>> ends = Part(torch.tensor([True, False, True]))
    >>> ends.of(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0]
    >>> ends.into(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7.0, 8.0])).tolist()
    [7.0, 2.0, 8.0]
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask, self.index = mask, mask.nonzero().squeeze(-1)
        self.size = len(self.index)
        first = int(self.index[0]) if self.size else 0
        whole = self.size == 0 or int(self.index[-1]) - first + 1 == self.size
        self._span = slice(first, first + self.size) if whole else None
        self._columns = None if whole else _columns(mask)

    def of(self, x: Tensor) -> Tensor:
        """Return these entries of x [..., d], [..., size]."""
        if self.size == len(self.mask):
            return x
        if self._columns is not None:
            rows, columns = self._columns
            found: Tensor = x.unflatten(-1, (rows, -1))[..., columns].flatten(-2)
            return found
        return x[..., self.index] if self._span is None else x[..., self._span]

    def into(self, x: Tensor, values: Tensor) -> Tensor:
        """Return a copy of x, [d] or [..., d], with `values` [..., size] in these entries."""
        if self.size == len(self.mask):
            return values
        if (
            values.dim() == 2
            and len(values) > 1
            and values.stride(0) == 0
            and x.stride(0) * (x.dim() - 1) == 0
        ):
            return self.into(x if x.dim() == 1 else x[0], values[0]).expand(
                len(values), -1
            )  # the same for all
        filled = x.expand(*values.shape[:-1], -1).clone()
        if self._columns is not None:
            rows, columns = self._columns
            filled.unflatten(-1, (rows, -1))[..., columns] = values.unflatten(-1, (rows, -1))
        else:
            filled[..., self.index if self._span is None else self._span] = values
        return filled


def _columns(mask: Tensor) -> tuple[int, slice] | None:
    """Return how many rows a table has of which a mask [d] has the same span of columns in each, and that span."""
    edges = (mask[1:] != mask[:-1]).nonzero().squeeze(-1) + 1
    starts, stops = edges[mask[edges]].tolist(), edges[~mask[edges]].tolist()
    rows = max(len(starts) + bool(mask[0]), len(stops) + bool(mask[-1]))
    if rows < 2 or len(mask) % rows:
        return None
    table = mask.view(rows, -1)
    if not bool((table == table[0]).all()):
        return None
    found = table[0].nonzero().squeeze(-1)
    whole = int(found[-1]) - int(found[0]) + 1 == len(found)
    return (rows, slice(int(found[0]), int(found[-1]) + 1)) if whole else None


def of_layers(
    names: Sequence[str], sizes: Sequence[int], d: int, head: str | None, norms: Sequence[str] = ()
) -> dict[str, list[slice]]:
    """Return groups for parameters with these names and sizes; entries after them are buffers."""
    groups: dict[str, list[slice]] = {"all": [slice(0, d)], "head": [], "body": [], "norm": [], "buffers": []}
    at = 0
    for name, size in zip(names, sizes, strict=True):
        part, layer = slice(at, at + size), name.rpartition(".")[0]
        groups["head" if head is None or layer == head else "body"].append(part)
        if layer in norms:
            groups["norm"].append(part)
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


def of_adapters(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, list[slice]]:
    """Return groups for low-rank adapters: "lora_A" [rank, in], "lora_B" [out, rank], and "rank k" of both.

    Empty for a model without parameters that are called so.
    """
    groups: dict[str, list[slice]] = {}
    at = 0
    for name, shape in zip(names, shapes, strict=True):
        size, steps = torch.Size(shape).numel(), name.split(".")
        if "lora_A" in steps:
            groups.setdefault("lora_A", []).append(slice(at, at + size))
            for k in range(shape[0]):
                groups.setdefault(f"rank {k}", []).append(slice(at + k * shape[1], at + (k + 1) * shape[1]))
        elif "lora_B" in steps:
            groups.setdefault("lora_B", []).append(slice(at, at + size))
            for k in range(shape[1]):
                groups.setdefault(f"rank {k}", []).append(slice(at + k, at + size, shape[1]))
        at += size
    return groups
