"""Write the cards of docs/datasets.md: `python docs/datasets.py [FOLDER OF DATA FILES]`."""

from __future__ import annotations

import sys
from pathlib import Path

from coterie.data.recipes import Recipe, all_recipes
from coterie.engine.from_recipe import from_recipe

PAGE = Path(__file__).with_suffix(".md")
MARK = "## The cards\n"


def card(recipe: Recipe, folder: str | None) -> str:
    """Return the section of a data set."""
    fed = from_recipe(recipe, 0, folder)
    rows = sum(int(size.sum()) for size in fed.rows.values())
    few, many = (f"{int(value):,}" for value in (fed.sizes.min(), fed.sizes.max()))
    files = ", ".join(f"`{file}`" for file in recipe.files) or "none"
    lines = [
        f"### `{recipe.name}`",
        "",
        f"{recipe.title}.",
        "",
        "| | |",
        "|---|---|",
        f"| a client | {recipe.client} |",
        f"| size | {fed.n} clients, {rows:,} rows; {few} to {many} training rows each |",
        f"| task | {recipe.task}; {recipe.model} model, {fed.model.d:,} parameters |",
        f"| how clients differ | {recipe.heterogeneity}. {recipe.why} |",
        f"| source | {recipe.source} |",
        f"| licence | {recipe.licence} |",
        f"| files | {files} |",
        "",
    ]
    return "\n".join(lines)


def main(folder: str | None) -> None:
    """Replace the cards on the page."""
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    cards = [card(recipe, folder) for recipe in all_recipes().values()]
    PAGE.write_text(head + MARK + "\n" + "\n".join(cards), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
