"""The measures behind `coterie reproduce cobo/...`, at a size of seconds."""

import dataclasses

import pytest
import torch

from coterie._core.errors import DataError, SettingError
from coterie.data.small_images import small_idx
from coterie.experiments import cobo_quadratic
from coterie.experiments.cobo_silo import weights
from coterie.experiments.jobs import load
from coterie.experiments.reproduce import reproduce
from coterie.experiments.spec import shared_data


def shortened(name, key, **changes):
    experiment = load(f"cobo/{name}", quick=True)
    return dataclasses.replace(experiment, plans=(dataclasses.replace(experiment.plan(key), **changes),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("all", {}),
        ("mixed", {}),
        ("simplex", {}),
        ("consensus-1", {}),
        ("theorem", {"tries": 1}),
        ("errors", {}),
    ],
)
def test_quadratic_measures_every_row(key, changes):
    experiment = shortened("quadratic", key, rounds=8, **changes)
    measure = getattr(cobo_quadratic, experiment.plans[0].measure.partition(":")[2])
    found = measure(experiment, 0)
    assert {row.metric for row in experiment.rows if row.run == key} <= set(found)


def test_weights_are_measured_and_drawn():
    experiment = shortened("sampling", "weights-all", rounds=4)
    found = weights(experiment, 10)
    assert found["pair gradients"] == 7.0 and 0 <= found["recovery"] <= 1
    assert found["plots"]["weights"]["rounds"] == [0, 1, 2, 3, 4]
    assert found["curve"]["values"][-1] == found["recovery"]


@pytest.mark.slow
def test_a_reproduction_has_the_page_with_the_weights(tmp_path):
    text = load("cobo/sampling", quick=True).path.read_text().replace("rounds = 60", "rounds = 2")
    runs, rows = text.split("[[runs]]"), text.split("[[rows]]")
    one = next(run for run in runs if 'key = "weights-constant"' in run).split("[[rows]]")[0]
    row = next(row for row in rows if 'run = "weights-constant"' in row).split("[[claims]]")[0]
    head = runs[0]
    (tmp_path / "small.toml").write_text(
        f"{head}[[runs]]{one}[[rows]]{row}\n[quick]\nseeds = [10]\nrounds = 2\n"
    )
    reproduce(str(tmp_path / "small.toml"), quick=True, out=tmp_path / "out", jobs=1)
    assert "slider" in (tmp_path / "out" / "plots" / "weights-constant-10-weights.html").read_text()


def archive(name):
    try:
        return shared_data(f"fashion_mnist/t10k-{name}-ubyte.gz")
    except DataError as missing:
        pytest.skip(str(missing))


def test_small_images_are_means_of_cells():
    images, labels = archive("images-idx3"), archive("labels-idx1")
    small, coarse = small_idx(images, labels, 4), small_idx(images, labels, 1)
    assert small.x.shape == (10_000, 16) and 0 <= float(small.x.min()) and float(small.x.max()) <= 1
    torch.testing.assert_close(small.x.mean(1, keepdim=True), coarse.x)
    with pytest.raises(SettingError, match="28 x 28"):
        small_idx(images, labels, 29)


@pytest.mark.slow
def test_cobo_on_digits_is_within_two_points_of_the_oracle(tmp_path):
    """One seed of the experiment; all five are in its table."""
    from coterie import fit
    from coterie.algorithms import make
    from coterie.experiments.jobs import federation

    experiment = load("cobo/digits")
    accuracy = {}
    for key in ("oracle", "cobo", "local"):
        plan = experiment.plan(key)
        settings = {**plan.settings, **{name: values[-1] for name, values in plan.grid.items()}}
        run = fit(
            federation(experiment, plan, 10), make(plan.algorithm, **settings), plan.rounds, select="best"
        )
        accuracy[key] = float(run.score("test", "accuracy").mean())
    assert accuracy["cobo"] > accuracy["oracle"] - 0.03 and accuracy["cobo"] > accuracy["local"] + 0.02
