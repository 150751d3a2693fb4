"""Models that the owner of a machine installed, by name: another machine names one and its settings, never code.

A model is installed by an entry point of a package in the group "coterie.models", by a Python file with a dict
`MODELS` from names to functions, or, for a language model with adapters, by its folder of weights. Such a function
takes settings by name and returns an nn.Module or a model of `coterie.models`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie._core.errors import SettingError, nearest
from coterie.models.base import Model
from coterie.models.causal_lm import CausalLM, causal_lm
from coterie.models.network import Network, network
from coterie.models.table_models import TABLE_MODELS
from coterie.models.zoo import BUILDERS, FACTORIES, Zoo

Factory = Callable[..., nn.Module | Model]
GROUP = "coterie.models"
TABLE = "MODELS"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
GLMS = ("linear", "logistic", "softmax", "poisson", "tweedie", "negative_binomial", "ordinal")
OTHERS = ("causal_lm", "with_neighbours", "assorted", "cox", "ensemble", "custom")
RESERVED = {*GLMS, *FACTORIES, *TABLE_MODELS, *OTHERS}
SHAPES = ("features", "outputs", "kind", "tokens", "classes", "length")  # what `fit_to` finds out
LANGUAGE = ("lora_rank", "lora_alpha", "target", "micro_batch", "clip")  # settings of a folder's model

_from_files: dict[str, Factory] = {}


def install(path: str | Path) -> list[str]:
    r"""Make models of this machine known to this process.

    Parameters
    ----------
    path
        A Python file with a dict `MODELS`, which is run, or the folder of a language model, which is known by the
        folder's name.

    Returns
    -------
    list of str
        The names of the models.

    Raises
    ------
    SettingError
        The file or folder holds no models, or a name is malformed or taken.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "nets.py")
    ...     _ = file.write_text("from torch import nn\nMODELS = {'two-doctest': lambda: nn.Linear(3, 2)}\n")
    ...     install(file)
    ['two-doctest']
    >>> make_installed("two-doctest").d
    8
    """
    path = Path(path)
    if path.is_dir():
        found: dict[str, Factory] = {path.resolve().name: functools.partial(_language_model, path.resolve())}
    elif path.suffix == ".py" and path.is_file():
        found = _table(path.resolve())
    else:
        raise SettingError(
            f"{path}: name a Python file with a dict {TABLE}, or the folder of a language model"
        )
    for name, factory in found.items():
        require_name(name, str(path))
        if not callable(factory):
            raise SettingError(
                f"{path}: {TABLE}[{name!r}] is no function that returns an nn.Module or a model"
            )
    _from_files.update(found)
    return list(found)


def require_name(name: object, where: str) -> None:
    """Raise `SettingError` unless this can be the name of an installed model."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SettingError(f"{where}: {name!r} is no name of a model: use a-z, 0-9, - and _, a letter first")
    if name in RESERVED:
        raise SettingError(f"{where}: {name!r} is the name of a built-in model; choose another")


def installed() -> list[str]:
    """Return the names of all models that are installed here."""
    return sorted({*_from_files, *(point.name for point in entry_points(group=GROUP))} - RESERVED)


def make_installed(name: str, **settings: Any) -> Model:
    """Return an installed model.

    Parameters
    ----------
    name
        Its name.
    **settings
        Arguments of the function that makes it.

    Returns
    -------
    Model
        The model, not fitted to shapes yet.

    Raises
    ------
    SettingError
        No model of this name is installed, or it does not take these settings.
    """
    made = _made(name, settings)
    if isinstance(made, nn.Module):
        again: Callable[..., Any] = functools.partial(_factory(name), **settings)
        made = network(again)
    if type(made) is not Network:
        return made
    mine = {part.name: getattr(made, part.name) for part in fields(Network)}
    return InstalledNetwork(**mine, name=name, settings=settings)


def restore(name: str, settings: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None) -> Model:
    """Return the installed model that `describe_installed` described."""
    return _with_shapes(make_installed(name, **(settings or {})), shapes or {})


def describe_installed(name: str, settings: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the description of an installed model with the shapes that it was fitted to."""
    known = {part.name for part in fields(model)}
    shapes = {shape: getattr(model, shape) for shape in SHAPES if shape in known}
    plain = {shape: list(value) if isinstance(value, tuple) else value for shape, value in shapes.items()}
    return {"model": name, "settings": settings, "shapes": plain}


@dataclass(frozen=True, eq=False)
class InstalledNetwork(Network):
    """Network that has a description, because it was installed under a name."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        return describe_installed(self.name, self.settings, self)


def size_without_building(description: dict[str, Any]) -> int | None:
    """Return how many parameters a described network would have, without the memory for them.

    None for models whose size the sender of a description does not choose: linear ones, those that an owner installed
    and that got no settings, and language models, where the rank of the adapters decides.
    """
    name = str(description.get("model"))
    if name in FACTORIES:
        shapes: dict[str, Any] = {part: description.get(part) for part in ("features", "outputs")}
        drop = ("model", "task", *shapes)
        settings = {part: value for part, value in description.items() if part not in drop}
        make: Factory = FACTORIES[name]
    else:
        settings, shapes = description.get("settings") or {}, description.get("shapes") or {}
        if not settings:
            return None
        make = _factory(name)
    try:
        with torch.device("meta"):
            made = make(
                **{part: tuple(one) if isinstance(one, list) else one for part, one in settings.items()}
            )
            if isinstance(made, Zoo) and shapes.get("features") and shapes.get("outputs"):
                made = BUILDERS[made.name](tuple(shapes["features"]), shapes["outputs"], **made.settings)
            elif isinstance(made, Network) and made.source is not None:
                made = made.source if isinstance(made.source, nn.Module) else made.source()
            if not isinstance(made, nn.Module):
                return None
            return sum(parameter.numel() for parameter in made.parameters())
    except SettingError:
        raise
    except Exception as problem:  # of the owner's own code
        raise SettingError(
            f"the size of {name!r} with these settings cannot be found out without making it ({problem})"
        ) from problem


def _with_shapes(model: Model, shapes: dict[str, Any]) -> Model:
    known = {part.name for part in fields(model)}
    unknown = [shape for shape in shapes if shape not in SHAPES or shape not in known]
    if unknown:
        raise SettingError(f"the description of a model has an entry {unknown[0]!r} that it does not take")
    plain = {shape: tuple(value) if isinstance(value, list) else value for shape, value in shapes.items()}
    return replace(model, **plain)


def _factory(name: str) -> Factory:
    if name in _from_files:
        return _from_files[name]
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points or name in RESERVED:
        raise SettingError(
            f"no model {name!r} is installed here.{nearest(name, installed())} Install it: --models FILE.py, or a "
            f"package with an entry point in the group {GROUP!r}"
        )
    loaded: Factory = points[0].load()
    return loaded


def _made(name: str, settings: dict[str, Any]) -> nn.Module | Model:
    factory = _factory(name)
    try:
        with torch.random.fork_rng(devices=[]):
            made = factory(**settings)
    except TypeError as problem:
        raise SettingError(f"the model {name!r} does not take these settings: {problem}") from problem
    if not isinstance(made, nn.Module | Model):
        raise SettingError(f"the model {name!r} is {type(made).__name__}; its function returns an nn.Module")
    return made


def _table(file: Path) -> dict[str, Factory]:
    """Run a Python file of this machine's owner and return its table of models."""
    spec = importlib.util.spec_from_file_location(f"_models_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise SettingError(f"{file} cannot be run: {type(problem).__name__}: {problem}") from problem
    found = getattr(module, TABLE, None)
    if not isinstance(found, dict) or not found:
        raise SettingError(f"{file} has no dict {TABLE} from names to functions that return an nn.Module")
    return found


def _language_model(folder: Path, **settings: Any) -> CausalLM:
    unknown = [setting for setting in settings if setting not in LANGUAGE]
    if unknown:
        raise SettingError(f"a language model has no setting {unknown[0]!r}.{nearest(unknown[0], LANGUAGE)}")
    return causal_lm(folder, **settings)
