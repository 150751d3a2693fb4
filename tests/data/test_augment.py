from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from coterie import models
from coterie._core import randomness
from coterie._core.errors import DataError, SettingError
from coterie.data.augment import CropFlip
from coterie.engine.federation import Federation
from coterie.train.fit import fit


def keys(*shape: int) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return randomness.slots(randomness.key(7, "test"), count).view(shape)


def test_every_image_is_a_crop_of_its_padded_self_or_the_mirror_of_one() -> None:
    x = torch.randn(40, 3, 9, 8)
    seen = set()
    for image, changed in zip(x, CropFlip(2)(x, keys(40)), strict=True):
        padded = functional.pad(image, (2, 2, 2, 2), mode="reflect")
        matches = [
            (down, across, flipped)
            for down in range(5)
            for across in range(5)
            for flipped in (False, True)
            if torch.equal(
                changed.flip(-1) if flipped else changed, padded[:, down : down + 9, across : across + 8]
            )
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) > 25 and len({place[2] for place in seen}) == 2


def test_crops_depend_on_the_key_alone() -> None:
    x = torch.randn(2, 5, 1, 8, 8)
    together = CropFlip()(x, keys(2, 5))
    assert torch.equal(together[1, 3:4], CropFlip()(x[1, 3:4], keys(2, 5)[1, 3:4]))


def test_without_flips_and_shifts_nothing_changes() -> None:
    x = torch.randn(6, 1, 8, 8)
    assert torch.equal(CropFlip(0, flip=False)(x, keys(6)), x)


def test_rows_that_are_no_images_are_refused() -> None:
    with pytest.raises(DataError, match="crops are for images"):
        CropFlip()(torch.randn(6, 5), keys(6))
    with pytest.raises(SettingError, match="pad=-1"):
        CropFlip(-1)


def test_training_sees_changed_rows_and_scoring_does_not() -> None:
    torch.manual_seed(0)
    xs, ys = [torch.randn(30, 1, 8, 8) for _ in range(3)], [torch.arange(30) % 3 for _ in range(3)]
    options = {"model": models.mlp(hidden=(4,), stacked=True), "split": (0.8, 0.2, 0.0)}
    plain, changed = (Federation.from_arrays(xs, ys, augment=a, **options) for a in (None, CropFlip(1)))
    from coterie.algorithms import make

    runs = [fit(fed, make("local", batch=4, steps=1), rounds=2) for fed in (plain, changed, changed)]
    assert not torch.equal(runs[0].personal, runs[1].personal)
    assert torch.equal(runs[1].personal, runs[2].personal)
    first = [run.history.curve("validation", "loss")[1][0] for run in runs]
    assert first[0] == first[1]
