"""What a recipe is: a data card, and a function from a seed to rows with owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core.errors import DataError
from coterie.data.clients import Clients

if TYPE_CHECKING:
    import polars


Seeded = Callable[[int], Clients]


@dataclass(frozen=True)
class TableRows:
    """A table and the roles of its columns; `Federation.from_table` encodes it."""

    source: Any
    client: str
    target: str
    cluster: str | None = None
    drop: Sequence[str] = ()
    task: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of `Federation.from_table` beside source, client and target."""
        return {"cluster": self.cluster, "drop": list(self.drop), "task": self.task}


@dataclass(frozen=True)
class Recipe:
    """A data set with a card.

    Attributes
    ----------
    name, title
        Name on the command line, and a line for readers.
    make
        Function of a seed and the files in `files`, in their order, that returns `Clients` or `TableRows`.
    task
        "binary", "multiclass" or "regression".
    model
        What clients train: "linear" (a GLM) or "mlp".
    client
        What a client is.
    heterogeneity
        How clients differ, in the field's words.
    why
        Why they differ, and what a method has to do about it.
    source, licence
        Where the rows come from, and who may use them how.
    files
        Paths below the folder of data files that the user names; none for rows that come with the package.

    Examples
    --------
    >>> from coterie.data.recipes import find
    >>> recipe = find("digits-pathological")
    >>> len(recipe.rows(seed=0)), recipe.files
    (20, ())
    """

    name: str
    title: str
    make: Callable[..., Clients | TableRows]
    task: str
    model: str
    client: str
    heterogeneity: str
    why: str
    source: str
    licence: str
    files: tuple[str, ...] = ()

    def rows(self, seed: int, folder: str | Path | None = None) -> Clients | TableRows:
        """Return the rows of every client.

        Parameters
        ----------
        seed
            Seed of the partition; natural partitions do not depend on it.
        folder
            Folder of data files, for recipes that need some.

        Returns
        -------
        Clients or TableRows
        """
        return self.make(seed, *self.places(folder))

    def places(self, folder: str | Path | None) -> list[Path]:
        """Return the paths of the recipe's files; raise `DataError` if one is not there."""
        if self.files and folder is None:
            raise DataError(
                f"{self.name} needs {', '.join(self.files)}: name the folder that holds it, --files FOLDER"
            )
        places = [Path(folder or ".") / file for file in self.files]
        for place in places:
            if not place.exists():
                raise DataError(
                    f"{self.name} needs {place}, which does not exist; put the file there ({self.source}), "
                    "or leave the data set out"
                )
        return places

    def available(self, folder: str | Path | None) -> bool:
        """Return True if the recipe needs no file, or all of its files are in the folder."""
        return not self.files or (folder is not None and all((Path(folder) / f).exists() for f in self.files))


def as_table(clients: Clients, columns: Sequence[str], task: str) -> TableRows:
    """Return dealt-out rows as a table, so that its columns are scaled by their training rows.

    Parameters
    ----------
    clients
        Rows of numbers, [rows, columns].
    columns
        Names of the columns.
    task
        Kind of target.

    Returns
    -------
    TableRows
        With the columns `client` and `target`.
    """
    import polars

    def part(k: int) -> polars.DataFrame:
        values = {name: clients.xs[k][:, j].numpy() for j, name in enumerate(columns)}
        rows = {"client": [clients.names[k]] * len(clients.xs[k]), **values, "target": clients.ys[k].numpy()}
        return polars.DataFrame(rows)

    frame = polars.concat([part(k) for k in range(len(clients))])
    return TableRows(frame, "client", "target", task="regression" if task == "regression" else None)
