"""Networks of a user's own as a reference to the function that makes them: another process imports it by itself."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from coterie._core.errors import SettingError
from coterie.models.base import Model
from coterie.models.network import Network

SETTINGS = (
    "criterion",
    "l2",
    "stacked",
    "features",
    "outputs",
    "kind",
    "tokens",
    "precision",
    "compiled",
    "buffers",
)


def reference(model: Model) -> dict[str, Any] | None:
    """Return where the function is that makes a network, and the network's settings; None if that cannot be said.

    The function has a name in a module, and the loss is one that has a name. No code is in the result.

    Examples
    --------
    >>> import coterie
    >>> reference(coterie.models.network(lambda: None)) is None
    True
    """
    if (
        type(model) is not Network
        or not isinstance(model.criterion, str)
        or isinstance(model.source, nn.Module)
    ):
        return None
    module, name = (
        getattr(model.source, "__module__", None),
        getattr(model.source, "__qualname__", "<locals>"),
    )
    if module not in sys.modules or "<" in name:
        return None
    file = getattr(sys.modules[module], "__file__", None)
    if module == "__main__" and file is None:
        return None
    settings = {setting: getattr(model, setting) for setting in SETTINGS}
    settings["features"] = None if model.features is None else list(model.features)
    return {
        "module": module,
        "file": None if file is None else str(Path(file).resolve()),
        "name": name,
        **settings,
    }


def from_reference(found: dict[str, Any]) -> Network:
    """Return the network that `reference` refers to, made by this process's own copy of the code.

    Raises
    ------
    SettingError
        If the code is not here.
    """
    settings = dict(found)
    module, file, name = (settings.pop(part) for part in ("module", "file", "name"))
    try:
        source: Any = functools.reduce(getattr, name.split("."), _loaded(module, file))
    except (ImportError, AttributeError, OSError) as problem:
        raise SettingError(f"the network {module}:{name} cannot be imported here: {problem}") from problem
    features = settings.pop("features")
    known = {field.name for field in fields(Network)} & set(SETTINGS)
    chosen = {setting: value for setting, value in settings.items() if setting in known}
    shape = None if features is None else tuple(features)
    return replace(Network(source=source), **chosen, features=shape)


@functools.cache
def _loaded(module: str, file: str | None) -> ModuleType:
    """Import a module by its name, or from its file if it is a program or has no name here."""
    if module != "__main__" and importlib.util.find_spec(module.partition(".")[0]) is not None:
        try:
            return importlib.import_module(module)
        except ImportError:
            if file is None:
                raise
    if file is None:
        raise ImportError(f"no module {module!r}")
    spec = importlib.util.spec_from_file_location(f"_own_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
