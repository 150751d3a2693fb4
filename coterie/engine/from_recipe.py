"""Make a federation of a named data set."""

from __future__ import annotations

from pathlib import Path

from coterie.data.recipes import Recipe, TableRows, find
from coterie.engine.federation import Federation
from coterie.engine.from_table import SPLIT
from coterie.models.table_models import table_model


def from_recipe(recipe: str | Recipe, seed: int = 0, folder: str | Path | None = None) -> Federation:
    """Return the federation of a recipe: its clients, its model, and rows split into train, validation and test.

    Parameters
    ----------
    recipe
        Name of a recipe (`coterie data recipes` lists them), or a recipe of your own.
    seed
        Seed of the partition, of the split and of every later draw.
    folder
        Folder of data files, for recipes that need some.

    Returns
    -------
    Federation
        The same for the same seed.

    Raises
    ------
    DataError
        If the recipe needs a file that is not there.

    Examples
    --------
    >>> from coterie.engine.from_recipe import from_recipe
    >>> fed = from_recipe("digits-permuted", seed=1)
    >>> fed.n, fed.model.task, len(fed.cluster_names)
    (20, 'multiclass', 4)
    """
    chosen = find(recipe) if isinstance(recipe, str) else recipe
    rows = chosen.rows(seed, folder)
    if isinstance(rows, TableRows):
        return Federation.from_table(
            rows.source, rows.client, rows.target, model=chosen.model, seed=seed, **rows.options()
        )
    model = table_model(chosen.model, chosen.task)
    return Federation.from_clients(rows, model, split=SPLIT, seed=seed)
