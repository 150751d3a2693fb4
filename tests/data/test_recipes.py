"""Recipes: the same federation for the same seed, cards that are true, and the shifts they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from coterie._core.errors import DataError, SettingError
from coterie.data import Pool
from coterie.data.feature_shift import coloured, rotated
from coterie.data.recipes import all_recipes, find
from coterie.data.small_images import digits
from coterie.engine.from_recipe import from_recipe
from coterie.engine.resplit import only
from coterie.train.folder import fingerprint

FREE = [name for name, recipe in all_recipes().items() if not recipe.files]
NATURAL = {"heart", "clinics", "diabetes"}  # dealt out by a column, whatever the seed
PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", FREE)
def test_every_recipe_makes_its_federation_again(name):
    recipe, fed = find(name), from_recipe(name, seed=1)
    assert fingerprint(from_recipe(name, seed=1)) == fingerprint(fed)
    assert fingerprint(from_recipe(name, seed=2)) != fingerprint(fed)
    assert fed.model.task == recipe.task
    assert all(fed.has_rows(split) for split in ("train", "validation", "test"))
    assert (fed.rows["train"] >= 5).all()
    same = from_recipe(name, seed=2).sizes
    assert torch.equal(same, fed.sizes) or name not in NATURAL


def test_most_data_sets_need_no_file():
    assert len(FREE) >= 12 and len(FREE) > len(all_recipes()) / 2


def test_the_page_has_every_card():
    cards = re.findall(r"^### `([\w-]+)`\n\n(.*?)(?=\n#|\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert [name for name, _ in cards] == list(all_recipes())
    for name, card in cards:
        recipe = find(name)
        for part in (recipe.task, recipe.heterogeneity, recipe.licence, recipe.source, recipe.why):
            assert part in card, f"{name}: {part}"
        if not recipe.files:
            fed = from_recipe(name)
            assert (
                f"| size | {fed.n} clients, {sum(int(s.sum()) for s in fed.rows.values()):,} rows" in card
            ), name


def test_rotation_turns_pixels_and_changes_nothing_else():
    pool = digits()
    clients = rotated(pool, [1, 1, 1, 1], seed=3)
    seen = {tuple(x.tolist()) for x in pool.x}
    for turns, x in enumerate(clients.xs):
        back = torch.rot90(x.reshape(-1, 8, 8), -turns, (1, 2)).reshape(len(x), 64)
        assert all(tuple(row.tolist()) in seen for row in back)
    assert sum(len(x) for x in clients.xs) == len(pool)
    with pytest.raises(DataError, match="square"):
        rotated(Pool(torch.ones(4, 5), torch.zeros(4)), [1, 1])
    with pytest.raises(SettingError, match="quarter"):
        rotated(pool, [1] * 5)


def test_colour_is_a_property_of_the_cluster():
    clients = coloured(digits(), [2, 2, 2], seed=0)
    for x, cluster in zip(clients.xs, clients.clusters.tolist(), strict=True):
        channels = x.reshape(len(x), 3, 64)
        others = [k for k in range(3) if k != cluster]
        assert (channels[:, others] == 0).all() and (channels[:, cluster].sum(1) > 0).all()


def test_errors_name_the_remedy(tmp_path):
    with pytest.raises(SettingError, match="digits-rotated"):
        find("digits-rotate")
    with pytest.raises(DataError, match="--files FOLDER"):
        from_recipe("femnist")
    with pytest.raises(DataError, match=r"a6a\.bz2.*does not exist"):
        from_recipe("adult", folder=tmp_path)


def test_only_keeps_rows_clusters_and_truth():
    fed = from_recipe("clusters")
    part = only(fed, torch.tensor([25, 3]))
    assert part.names == [fed.names[25], fed.names[3]]
    assert fed.clusters[[25, 3]].tolist() == [2, 0] and part.clusters.tolist() == [1, 0]
    assert torch.equal(part.truth, fed.truth[[25, 3]])
    for split in fed.rows:
        whole, mine = fed.runtime.rows(split), part.runtime.rows(split)
        first = whole.x[whole.start[25] : whole.start[25] + whole.size[25]]
        assert torch.equal(mine.x[: len(first)], first)
