"""Tables that come with the package; `coterie/data/bundled/README.md` says where they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.errors import DataError, nearest

_FOLDER = Path(__file__).with_suffix("")


def names() -> list[str]:
    """Names of the bundled tables."""
    return sorted(file.stem for file in _FOLDER.glob("*.csv"))


def path(name: str) -> Path:
    """Where a bundled table lies, for `tables.read`."""
    if name not in names():
        raise DataError(f"No bundled table is called {name!r}.{nearest(name, names())}")
    return _FOLDER / f"{name}.csv"


def resolve(source: Any) -> Any:
    """The path of a bundled table given by name; anything else as it is."""
    return (
        path(source)
        if isinstance(source, str) and source in names() and not Path(source).exists()
        else source
    )


def recorded(source: str | Path) -> str:
    """How a run remembers where its table is: by name if it is bundled, else by its absolute path."""
    place = Path(source).resolve()
    return place.stem if place.parent == _FOLDER.resolve() else str(place)
