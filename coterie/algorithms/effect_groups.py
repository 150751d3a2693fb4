"""Which coefficients of a hierarchical model differ between clients, and which of them share a variance."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.mixed_likelihood import best_effects
from coterie.theory.variance_components import Components, Sums, pattern

MOST_RECORDED = 4  # variances of clients up to which each is recorded by name
MOST_VARIANCES = 16  # parameters up to which each may have a variance of its own unless asked otherwise


class Choices(Protocol):
    """Settings of the method that decide."""

    @property
    def effects(self) -> str:
        """How variances are shared, or "auto"."""

    @property
    def slopes(self) -> str:
        """Features whose coefficients differ too."""

    def choice(self, fed: Federation) -> str:
        """Return how variances are chosen."""


def effect_groups(method: Choices, fed: Federation, sums: Sums, near: Components | None = None) -> Tensor:
    """Return which variance each coefficient has, [d]; effects = "auto" takes those with the smallest AIC.

    The searches for it start near variances of the round before.
    """
    marks = {
        name: fed.model.groups[name].cpu() for name in fed.model.groups if name in ("intercept", "extras")
    }
    extras = marks.get("extras", torch.zeros(fed.d, dtype=torch.bool))
    intercept = marks["intercept"] if "intercept" in marks and bool(marks["intercept"].any()) else None

    def made(effects: str) -> Tensor:
        found = pattern(effects, fed.d, intercept)
        found[extras] = -1
        numbered: Tensor = found.unique(return_inverse=True)[1]
        return numbered - int(bool((found < 0).any()))

    choice = method.choice(fed)
    if method.slopes:
        found = made("intercept")
        for number, at in enumerate(named_columns(method.slopes, fed), int(found.max()) + 1):
            found[at] = number
        return found.to(fed.device)
    if method.effects != "auto" or choice not in ("ml", "reml"):
        return made("same" if method.effects == "auto" else method.effects).to(fed.device)
    names = ["intercept", "split"] if intercept is not None and fed.d > 1 else []
    names = [*names, "same", *(["each"] if fed.d <= MOST_VARIANCES else [])]
    noise = None if fed.model.has_statistics else 1.0
    choices = {name: made(name).to(fed.device) for name in names}
    return choices[best_effects(sums, choices, noise=noise, restricted=choice == "reml", near=near)]


def named_columns(slopes: str, fed: Federation) -> list[int]:
    """Return the coefficients that `slopes` names, by their features' names or numbers."""
    names = [] if fed.table is None else list(fed.table.preprocessor.feature_names)
    found = []
    for name in (part.strip() for part in slopes.split(",")):
        if name in names:
            found.append(names.index(name))
        elif name.isdigit() and int(name) < fed.d:
            found.append(int(name))
        else:
            raise SettingError(f"hierarchical: slopes = {name!r} is no feature.{nearest(name, names)}")
    return found


def called(fed: Federation, places: list[int]) -> str:
    """Return a name for coefficients that share a variance: intercept, the feature of a single one, or slopes."""
    marks = fed.model.groups
    if "intercept" in marks and bool(marks["intercept"].cpu()[places].all()):
        return "intercept"
    names = [] if fed.table is None else fed.table.preprocessor.feature_names
    return "slopes" if len(places) > 1 else names[places[0]] if places[0] < len(names) else f"x{places[0]}"


def standard_deviations(fed: Federation, s: State) -> dict[str, Tensor]:
    """Return standard deviations by name: of the noise of least squares, of clients, of clusters.

    In units of the target; none where there are several noises, or clusters have variances of their own.
    """
    groups, closed = s.groups.cpu(), fed.model.has_statistics
    scale = fed.table.target_scale if fed.table is not None and closed else 1.0
    found = {"sd noise": torch.tensor(scale * s.noise**0.5)} if closed and "noises" not in s else {}
    within = s.within.double().cpu()
    within = within if within.dim() == 2 else within.diagonal(dim1=-2, dim2=-1)
    count = int(groups.max()) + 1
    if count > MOST_RECORDED or not bool((within == within[:1]).all()):
        return found
    each = [(groups == k).nonzero().squeeze(-1).tolist() for k in range(count)]
    levels = {"clients": within[0]}
    if len(s.centres) > 1 and "membership" not in s:  # a mixture's centres have no variance
        levels["clusters"] = s.between.double().cpu()
    for level, variances in levels.items():
        for places in each:
            if bool((variances[places] == variances[places[0]]).all()):
                name = level if count == 1 else f"{level}: {called(fed, places)}"
                found[f"sd {name}"] = scale * variances[places[0]].sqrt()
    return found
