"""A server that was taken over names models: it gets no code run, no file read, no memory, no model but the owner's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from coterie import models
from coterie._core.errors import SettingError
from coterie.deploy import wire
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import ROLES, Policy
from coterie.models import description, installed
from coterie.models.signature import signature
from coterie.models.table_models import TABLE_MODELS
from tests.deploy.test_images_and_texts import CLASSES, pictures

MADE: list[dict[str, object]] = []  # settings with which the owner's function was called


def own(width: int = 4, weights: str = "", slope: float = 0.0) -> nn.Module:
    MADE.append({"width": width, "weights": weights})
    inner = nn.LeakyReLU(slope) if slope else nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), inner, nn.Linear(width, 3))


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(installed, "_from_files", {"own": own, "hidden": own})
    MADE.clear()


def fitted(**settings):
    model = installed.make_installed("own", **settings)
    return model.fit_to(torch.zeros(3, 1, 8, 8), torch.arange(3))


class Server:
    """Sends what it likes to a node with images and the strict policy, which allows "own"."""

    def __init__(self, folder, **more):
        policy = Policy.for_images((1, 8, 8), min_rows=2, **more).allowing((), ["own"])
        policy.write(folder / "policy.toml")
        self.node = NodeService(pictures((20,)), folder, policy=Policy.read(folder / "policy.toml"))
        self.count = itertools.count()

    def ask(self, kind, tensors=None, **header):
        message = {
            "kind": kind,
            "nonce": f"n{next(self.count)}",
            "run": "a" * 8,
            "roles": ROLES["images"].to_json(),
        }
        return wire.decode(self.node.answer(wire.encode({**message, **header}, tensors or {})))[0]

    def open(self, model, classes=CLASSES, **setup):
        about = {"algorithm": {"name": "fedavg", "settings": {}}, "model": model, "classes": classes, **setup}
        header = {"seed": 0, "split": [0.6, 0.2, 0.2], "clients": ["client 0"], "setup": about}
        return self.ask("open", {"ids": torch.tensor([0])}, **header)


def test_the_owners_model_is_opened(tmp_path):
    model = fitted(width=6)
    assert "error" not in Server(tmp_path).open(model.describe(), signature=signature(model))


@pytest.mark.parametrize(
    "name", ["hidden", "../nets", "/etc/passwd", "os", "tests.deploy:own", "OWN", "own ", "", None, ["own"]]
)
def test_only_models_that_the_policy_names_are_made(tmp_path, name):
    told = Server(tmp_path).open({**fitted().describe(), "model": name})
    MADE.clear()
    assert "models are" in told["error"] and not MADE


def test_a_model_that_is_allowed_and_not_installed_is_refused_in_words(tmp_path, monkeypatch):
    server = Server(tmp_path)
    described = fitted().describe()
    monkeypatch.setattr(installed, "_from_files", {})
    assert "no model own is installed at this node" in server.open(described)["error"]


@pytest.mark.parametrize(
    "settings",
    [{"weights": "../../secret"}, {"weights": ["/etc/passwd"]}, {"width": {"a": 1}}, {"width": [1] * 65}],
)
def test_settings_are_numbers_and_no_paths(tmp_path, settings):
    server, described = Server(tmp_path), fitted().describe()
    MADE.clear()
    assert "policy" in server.open({**described, "settings": settings})["error"]
    assert not MADE  # the owner's function did not see them


def test_a_text_that_the_owner_lists_is_a_setting(tmp_path):
    model = fitted(weights="large")
    server = Server(tmp_path, settings={"weights": ["small", "large"]})
    assert "error" not in server.open(model.describe())
    assert "weights" in server.open({**model.describe(), "settings": {"weights": "huge"}})["error"]


def test_giant_models_take_no_memory(tmp_path):
    """Built on a device without memory first: a terabyte would end this process."""
    server = Server(tmp_path, largest_model=100_000, largest_count=10**12)
    for model in (
        {**fitted().describe(), "settings": {"width": 10**9}},
        {**models.mlp((10**6, 10**6)).describe(), "features": [1, 8, 8], "outputs": 3, "task": "multiclass"},
        {
            **models.cnn((10**5,), hidden=10**6).describe(),
            "features": [1, 8, 8],
            "outputs": 3,
            "task": "multiclass",
        },
    ):
        assert "at most 100000 parameters" in server.open(model)["error"]


def test_a_model_of_the_same_name_that_differs_is_refused_in_words(tmp_path):
    server, model = Server(tmp_path), fitted(width=6)
    mine = signature(model)
    for told, words in (
        ({**mine, "parameters": [["1.weight", [6, 64]], ["x", [6]]]}, "a parameter 1.bias"),
        ({**mine, "parameters": mine["parameters"][:2]}, "it has 4 parameters, not 2"),
        (signature(fitted(width=7)), "has shape [6, 64], not [7, 64]"),
        ({**mine, "frozen": "ab"}, "its frozen weights are others"),
        (signature(fitted(width=6, slope=0.5)), "it computes another loss"),
    ):
        answer = server.open(model.describe(), signature=told)["error"].replace("'", "")
        assert "is not the servers" in answer and words in answer


def test_shapes_and_classes_are_the_nodes_own(tmp_path):
    server, model = Server(tmp_path), fitted()
    shapes = model.describe()["shapes"]
    assert (
        "of another shape"
        in server.open({**model.describe(), "shapes": {**shapes, "features": [1, 4, 16]}})["error"]
    )
    assert "is not among those of the run" in server.open(model.describe(), classes=["cat", "cow"])["error"]
    assert "different classes" in server.open(model.describe(), classes=["cat", "cat", "cow", "dog"])["error"]
    assert "3 outputs for 4" in server.open(model.describe(), classes=[*CLASSES, "elk"])["error"]
    assert "error" in server.open({**model.describe(), "shapes": {"source": "x"}})


def test_images_tell_no_pixel(tmp_path):
    server = Server(tmp_path)
    told = server.ask("hello", data="images")["told"]
    assert told == {"clients": ["client 0"], "rows": [20], "shape": [1, 8, 8], "classes": CLASSES}
    assert "not table" in server.ask("hello")["error"]
    spec = {"kind": "statistics", "spec": {}, "split": [0.6, 0.2, 0.2], "seed": 0}
    assert "no statistics of images" in server.ask(**spec)["error"]


def test_a_model_inside_another_is_judged_too(tmp_path):
    server = Server(tmp_path, models=("with_neighbours", "assorted", "softmax"))
    language = {"model": "causal_lm", "path_or_name": "/etc"}
    for model in (
        {"model": "with_neighbours", "base": language, "rows": 5},
        {"model": "assorted", "bases": [language]},
    ):
        assert "models are" in server.open(model)["error"]


def test_built_in_names_cannot_be_taken(tmp_path):
    kinds = {"linear", "causal_lm", "mlp", "cnn", *TABLE_MODELS, description.CUSTOM}
    assert kinds <= installed.RESERVED
    file = tmp_path / "nets.py"
    for name in ("linear", "cnn", "../x", "Big"):
        file.write_text(f"MODELS = {{{name!r}: print}}")
        with pytest.raises(SettingError, match="name of a"):
            installed.install(file)
    file.write_text("x = 1")
    with pytest.raises(SettingError, match="has no dict MODELS"):
        installed.install(file)
    with pytest.raises(SettingError, match="Python file"):
        installed.install(tmp_path / "none.txt")
