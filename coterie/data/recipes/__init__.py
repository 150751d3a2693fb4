"""Named data sets for comparisons: where rows come from, how clients share them, and why clients differ.

`coterie data recipes` lists them; `coterie.engine.from_recipe.from_recipe` makes a federation of one. A file of this
folder holds the recipes of one kind and is listed in `_HOMES`.
"""

from __future__ import annotations

from coterie._core.errors import SettingError, nearest
from coterie.data.recipes import generated, images, tables, texts
from coterie.data.recipes.recipe import Recipe, TableRows

__all__ = ["Recipe", "TableRows", "all_recipes", "find"]

_HOMES = (tables, images, generated, texts)


def all_recipes() -> dict[str, Recipe]:
    """Return all recipes by name.

    Returns
    -------
    dict of str to Recipe
        In the order of the documentation: tables, images, generated rows, texts.

    Examples
    --------
    >>> from coterie.data.recipes import all_recipes
    >>> list(all_recipes())[:2]
    ['heart', 'clinics']
    """
    return {recipe.name: recipe for home in _HOMES for recipe in home.RECIPES}


def find(name: str) -> Recipe:
    """Return a recipe.

    Parameters
    ----------
    name
        Its name, one of `all_recipes()`.

    Returns
    -------
    Recipe

    Raises
    ------
    SettingError
        If there is no such recipe; the message suggests the nearest name.

    Examples
    --------
    >>> from coterie.data.recipes import find
    >>> find("digits-rotated").heterogeneity
    'feature shift (rotation)'
    """
    known = all_recipes()
    if name not in known:
        raise SettingError(f"no data set {name!r}; `coterie data recipes` lists them.{nearest(name, known)}")
    return known[name]
