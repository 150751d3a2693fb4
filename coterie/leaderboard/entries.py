"""Methods and data sets that take part: registered ones, a file with a method, a table; each has a hash."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie._core.errors import DataError, SettingError
from coterie._core.manifest import sha256
from coterie.algorithms import Algorithm, all_algorithms, find
from coterie.data import recipes
from coterie.data.recipes import Recipe, TableRows

PACKAGE = Path(coterie.__file__).parent
PARTITIONS = ("data/partition.py", "data/row_shares.py", "data/feature_shift.py", "data/generate.py")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_.-]*")


@dataclass(frozen=True)
class Method:
    """A method that takes part: the name of a registered one, or one in a file of the user."""

    name: str
    file: str | None = None

    def algorithm(self) -> Algorithm:
        """Return the method at its default settings."""
        return (find(self.name) if self.file is None else from_file(self.file))()

    def code(self) -> str:
        """Return a hash of the source files that the method is written in."""
        return _hashed(_sources(type(self.algorithm())))

    def json(self) -> dict[str, Any]:
        """Return the entry of plan.json."""
        return {"name": self.name, "file": self.file}


def own_method(path: str | Path) -> Method:
    """Return the method that a file of the user defines.

    Parameters
    ----------
    path
        A Python file with one subclass of `Algorithm`. It is run.

    Returns
    -------
    Method

    Raises
    ------
    SettingError
        If the file holds no method, or one whose name is taken.
    """
    file = str(Path(path).resolve())
    cls = from_file(file)
    if cls.name in all_algorithms():
        raise SettingError(
            f"{path}: {cls.name} is the name of a registered method; give yours a name: name = 'my-{cls.name}'"
        )
    if not NAME.fullmatch(cls.name):
        raise SettingError(f"{path}: {cls.name!r} is no name for a method; use letters, digits, - and _")
    return Method(cls.name, file)


def from_file(path: str) -> type[Algorithm]:
    """Run a file and return the method that it defines."""
    place = Path(path)
    if not place.is_file():
        raise SettingError(f"{path}: there is no such file; give a Python file with a subclass of Algorithm")
    module = f"coterie_own_{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, place)
        if spec is None or spec.loader is None:
            raise SettingError(f"{path} is not a Python file")
        made = importlib.util.module_from_spec(spec)
        sys.modules[module] = made
        try:
            spec.loader.exec_module(made)
        except Exception as problem:
            del sys.modules[module]
            raise SettingError(f"{path} cannot be run: {type(problem).__name__}: {problem}") from problem
    found = [
        value
        for _, value in inspect.getmembers(sys.modules[module], inspect.isclass)
        if issubclass(value, Algorithm) and value.__module__ == module
    ]
    if len(found) != 1:
        raise SettingError(
            f"{path} defines {len(found)} subclasses of coterie.Algorithm; a file with one method has one"
        )
    return found[0]


@dataclass(frozen=True)
class DataSet:
    """A data set that takes part: the name of a recipe, or a table of the user."""

    name: str
    table: Mapping[str, Any] | None = None

    def recipe(self) -> Recipe:
        """Return the recipe."""
        if self.table is None:
            return recipes.find(self.name)
        options = dict(self.table)
        path, model = options.pop("path"), options.pop("model")
        rows = TableRows(path, **options)
        client = str(options["client"])
        return Recipe(
            self.name, Path(path).name, lambda seed: rows, "", model, client, "by the client column", "",
            "a table of yours", "yours",
        )  # fmt: skip

    def code(self, folder: str | Path | None) -> str:
        """Return a hash of the recipe, of the partitioners, and of the files it reads."""
        recipe = self.recipe()
        if self.table is not None:
            return _hashed([recipe.model, repr(sorted(self.table.items())), sha256(Path(self.table["path"]))])
        parts = [inspect.getsource(recipe.make), recipe.model, recipe.task]
        parts += [(PACKAGE / file).read_text(encoding="utf-8") for file in PARTITIONS]
        rows = recipe.rows(0) if not recipe.files else None
        if isinstance(rows, TableRows) and isinstance(rows.source, Path):
            parts.append(sha256(rows.source))
        return _hashed([*parts, *(sha256(place) for place in recipe.places(folder))])

    def json(self) -> dict[str, Any]:
        """Return the entry of plan.json."""
        return {"name": self.name, "table": None if self.table is None else dict(self.table)}


def own_table(
    path: str | Path, client: str, target: str, name: str | None = None, model: str = "linear", **options: Any
) -> DataSet:
    """Return a table of the user as a data set.

    Parameters
    ----------
    path
        CSV or Parquet file.
    client, target
        Columns of the table.
    name
        Name on the leaderboard; the file's name if not given.
    model
        What clients train: "linear" or "mlp".
    **options
        `cluster`, `drop` and `task` of `Federation.from_table`.

    Returns
    -------
    DataSet

    Raises
    ------
    DataError
        If there is no such file.
    SettingError
        If the name is taken or is none.
    """
    place = Path(path)
    if not place.is_file():
        raise DataError(f"{path}: there is no such table")
    called = name or re.sub(r"[^A-Za-z0-9+_.-]+", "-", place.name.split(".")[0]).strip("-")
    if called in recipes.all_recipes():
        raise SettingError(f"{called} is the name of a recipe; give the table another: --name my-{called}")
    if not NAME.fullmatch(called):
        raise SettingError(
            f"{called!r} is no name for a data set; give one of letters, digits, - and _: --name"
        )
    return DataSet(
        called, {"path": str(place.resolve()), "client": client, "target": target, "model": model, **options}
    )


def _sources(cls: type[Algorithm]) -> list[str]:
    """Return the text of the files of a class, of its bases, and of the files of methods that these import."""
    found: dict[Path, str] = {}
    waiting = [Path(inspect.getfile(base)) for base in cls.__mro__ if base is not object]
    while waiting:
        place = waiting.pop().resolve()
        if place in found:
            continue
        found[place] = place.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(found[place])):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.startswith("coterie.algorithms."):
                waiting.append(PACKAGE / "algorithms" / f"{module.rpartition('.')[2]}.py")
    return [found[place] for place in sorted(found)]


def _hashed(parts: list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:16]
