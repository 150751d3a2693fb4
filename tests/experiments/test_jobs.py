"""What a job of an experiment takes from [data] and [[runs]] beyond the usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie._core.errors import SettingError
from coterie.data.augment import CropFlip
from coterie.experiments import jobs
from coterie.experiments.jobs import load

IMAGES = """
title = "Digits as pictures"
seeds = [0]

[data]
split = [0.7, 0.1, 0.2]
dtype = "float32"
device = "auto"

[data.read]
name = "digits"

[data.partition]
name = "permuted_labels"
cluster_sizes = [2, 2]

[model]
name = "mlp"
hidden = [4]
stacked = true

[[runs]]
key = "cobo"
algorithm = "cobo"
settings = { batch = 8, lr = 0.1 }
rounds = 6
keep = true

[[rows]]
label = "some"
run = "cobo"
metric = "accuracy"
at_least = 0.0
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "images.toml"
    path.write_text(IMAGES)
    return path


@pytest.mark.slow
def test_a_kept_run_that_was_killed_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load(str(path))
    plan, folder = experiment.plan("cobo"), path.parent / "out"
    jobs.run_job(experiment, plan, 0, path.parent / "whole")
    whole = jobs.finished(experiment, (plan, 0), path.parent / "whole")

    class Killed(BaseException):
        pass

    real = jobs.fit

    def killed(*given, **options):
        def watch(t: int, rounds: int) -> None:
            if t == 4:
                raise Killed

        return real(*given, **options, checkpoint_every=3, watch=watch)

    monkeypatch.setattr(jobs, "fit", killed)
    with pytest.raises(Killed):
        jobs.run_job(experiment, plan, 0, folder)
    monkeypatch.setattr(jobs, "fit", lambda *given, **options: pytest.fail("began anew"))
    jobs.run_job(experiment, plan, 0, folder)
    again = jobs.finished(experiment, (plan, 0), folder)
    assert again is not None and whole is not None
    assert again["metrics"] == whole["metrics"] and again["curve"] == whole["curve"]


def test_tuned_runs_are_not_kept(path: Path) -> None:
    path.write_text(path.read_text().replace("keep = true", "keep = true\ngrid = { lr = [0.1, 0.2] }"))
    with pytest.raises(SettingError, match="keep = true is for runs at fixed settings"):
        load(str(path))


def test_augment_and_device(path: Path) -> None:
    with_crops = IMAGES.replace(
        "[model]", '[data.augment]\nname = "crop-flip"\npad = 1\nflip = false\n\n[model]'
    )
    path.write_text(with_crops)
    experiment = load(str(path))
    fed = jobs.federation(experiment, experiment.plan("cobo"), 0)
    assert fed.runtime.train.augment == CropFlip(1, flip=False)
    assert fed.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    path.write_text(with_crops.replace("crop-flip", "crop-flop"))
    with pytest.raises(SettingError, match=r"no augment with name = 'crop-flop'\. Did you mean 'crop-flip'"):
        load(str(path))
    path.write_text(with_crops.replace("flip = false", "flap = false"))
    with pytest.raises(SettingError, match="augment 'crop-flip'"):
        load(str(path))


def test_rows_of_clients_are_pooled_for_a_partition_and_pools_need_one(path: Path) -> None:
    path.write_text(
        IMAGES.replace('[data.partition]\nname = "permuted_labels"\ncluster_sizes = [2, 2]\n', "")
    )
    experiment = load(str(path))
    with pytest.raises(SettingError, match="these rows have no clients"):
        jobs.federation(experiment, experiment.plan("cobo"), 0)
