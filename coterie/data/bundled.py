"""Tables that come with the package; `coterie/data/bundled/README.md` says where they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie._core.errors import DataError, nearest

_FOLDER = Path(__file__).with_suffix("")


def names() -> list[str]:
    """Return the names of the bundled tables.

    Returns
    -------
    list of str
        Names that `path`, the command line and `Federation.from_table` accept.

    Examples
    --------
    >>> from coterie.data import bundled
    >>> "heart_disease" in bundled.names()
    True
    """
    return sorted(file.stem for file in _FOLDER.glob("*.csv"))


def path(name: str) -> Path:
    """Return the path of a bundled table.

    Parameters
    ----------
    name
        One of `names()`.

    Returns
    -------
    Path
        A CSV file inside the installed package.

    Raises
    ------
    DataError
        If there is no such table.

    Examples
    --------
    >>> from coterie.data import bundled
    >>> bundled.path("heart_disease").name
    'heart_disease.csv'
    """
    if name not in names():
        raise DataError(f"No bundled table is called {name!r}.{nearest(name, names())}")
    return _FOLDER / f"{name}.csv"


def resolve(source: Any) -> Any:
    """Return the path of a bundled table for its name; return anything else, and names of existing files, unchanged."""
    return (
        path(source)
        if isinstance(source, str) and source in names() and not Path(source).exists()
        else source
    )


def recorded(source: str | Path) -> str:
    """Return how a run records its table: the name of a bundled table, or the absolute path of any other."""
    place = Path(source).resolve()
    return place.stem if place.parent == _FOLDER.resolve() else str(place)
