"""Models that left: predictions from the file alone equal those of Coterie."""

from __future__ import annotations

import csv
import getpass
import json
import math
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars
import pytest
import torch
from safetensors import safe_open

import coterie
from coterie._core.errors import RunError, SettingError
from coterie.train.export import SUFFIXES, export
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable

KINDS = ("binary", "multiclass", "regression")
NEW = {
    "site": ["south"] * 5,
    "region": ["warm", "warm", "cold", None, "unseen"],
    "age": [41.5, None, 77.0, 50.0, 1e4],
    "colour": ["red", "green", None, "blue", "violet"],
    "score": [0.25, -1.5, 3.0, 0.0, 2.5],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, write_table: WriteTable) -> dict[str, Path]:
    """A run for each kind of target, with the usual model and with a network."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for kind in KINDS:
        table = write_table(folder / f"{kind}.csv", kind)
        for name, model in (
            ("linear", None),
            ("network", coterie.models.mlp(hidden=(5,), activation="tanh")),
        ):
            fed = coterie.Federation.from_table(table, "site", "y", model=model)
            found[f"{kind} {name}"] = folder / f"{kind}-{name}"
            coterie.fit(fed, "ditto", rounds=5, out=found[f"{kind} {name}"])
    return found


def expected(run: Path) -> tuple[np.ndarray, list[Any]]:
    """Numbers (probabilities or values) and answers for the new rows."""
    frame = Predictor.load(run)(polars.DataFrame(NEW))
    likely = [name for name in frame.columns if name.startswith("probability_")]
    values = frame.select(likely).to_numpy() if likely else frame["prediction"].to_numpy()
    return values, frame["prediction"].to_list()


def numbers(name: str) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in NEW[name]], dtype=np.float64)


def texts(name: str) -> list[str]:
    return ["" if value is None else str(value) for value in NEW[name]]


@pytest.mark.quick("binary-linear")
@pytest.mark.parametrize("model", ["linear", "network"])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(runs: dict[str, Path], kind: str, model: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    run = runs[f"{kind} {model}"]
    path = export(run, "south", "onnx", tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {}
    for entry in session.get_inputs():
        column = (
            numbers(entry.name)
            if entry.type == "tensor(double)"
            else np.array(texts(entry.name), dtype=object)
        )
        feed[entry.name] = column.reshape(-1, 1)
    assert set(feed) == {"region", "age", "colour", "score"}
    found = dict(zip([out.name for out in session.get_outputs()], session.run(None, feed), strict=True))
    values, answers = expected(run)
    if kind == "regression":
        np.testing.assert_allclose(found["prediction"], values, rtol=1e-6)
    else:
        np.testing.assert_allclose(found["probabilities"], values, atol=1e-6)
        assert found["prediction"].tolist() == answers
    note = json.loads(session.get_modelmeta().custom_metadata_map["coterie"])
    assert note["client"] == "south" and note["numbers"] == ["age", "score"]


@pytest.mark.parametrize("model", ["linear", "network"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchscript(runs: dict[str, Path], kind: str, model: str, tmp_path: Path) -> None:
    run = runs[f"{kind} {model}"]
    path = export(run, "south", "torchscript", tmp_path / "model.pt")
    extra = {"coterie.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path), _extra_files=extra)
    note = json.loads(extra["coterie.json"])
    found = module(
        {name: torch.from_numpy(numbers(name)) for name in note["numbers"]},
        {name: texts(name) for name in note["texts"]},
    )
    np.testing.assert_allclose(
        found.numpy(), expected(run)[0], rtol=1e-6, atol=1e-6 if kind != "regression" else 0
    )


def everything_in(path: Path) -> bytes:
    """Return the bytes of a file, and of what is packed in it."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as packed:
        return path.read_bytes() + b"".join(packed.read(name) for name in packed.namelist())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear", "network", "trees"])
@pytest.mark.parametrize("to", SUFFIXES)
def test_no_format_tells_where_it_was_made(
    runs: dict[str, Path], model: str, to: str, tmp_path: Path, write_table: WriteTable
) -> None:
    """torch notes the file and line that made each node, in TorchScript and in ONNX."""
    run = tmp_path / "run" if model == "trees" else runs[f"binary {model}"]
    if (model, to) in {("network", "csv"), ("trees", "csv"), ("linear", "lightgbm"), ("network", "lightgbm")}:
        pytest.skip("the model has no such form")
    if to == "onnx":
        pytest.importorskip("onnx", reason="onnx is not installed")
    if model == "trees":
        table = write_table(tmp_path / "table.csv", "binary")
        fed = coterie.Federation.from_table(table, "site", "y", model=coterie.models.trees(2, 2))
        coterie.fit(fed, "trees", rounds=2, out=run)
    found = everything_in(export(run, "south", to, tmp_path / "model")).lower()
    package = Path(coterie.__file__).parent
    places = [package, package.parent, Path(torch.__file__).parent, Path.home(), Path.cwd(), run, tmp_path]
    traces = [str(place) for place in places if len(place.parts) > 1]
    traces += [".py:", "site-packages", *([user] if len(user := getpass.getuser()) > 3 else [])]
    assert not [trace for trace in traces if trace.lower().encode() in found]


def test_records_of_torchscript_lie_as_torch_lays_them(runs: dict[str, Path], tmp_path: Path) -> None:
    """Tensors begin at multiples of 64 bytes, so that they can be mapped instead of read."""
    path = export(runs["binary network"], "south", "torchscript", tmp_path / "model.pt")
    with zipfile.ZipFile(path) as packed:
        assert packed.testzip() is None
        assert {name.partition("/")[0] for name in packed.namelist()} == {"model"}
        for record in packed.infolist():
            with packed.open(record) as stream:
                stream.read(1)
            start = record.header_offset + 30 + len(record.filename) + len(record.extra)
            assert start % 64 == 0


@pytest.mark.parametrize("kept", [["age", "score"], ["colour"]], ids=["numbers only", "texts only"])
def test_torchscript_of_one_kind_of_column(kept: list[str], tmp_path: Path, write_table: WriteTable) -> None:
    table = polars.read_csv(write_table(tmp_path / "table.csv", "binary")).select("site", *kept, "y")
    coterie.fit(coterie.Federation.from_table(table, "site", "y"), "ditto", rounds=2, out=tmp_path / "run")
    path = export(tmp_path / "run", "south", "torchscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path))
    given = {name: torch.from_numpy(numbers(name)) for name in kept if name != "colour"}
    found = module(given, {name: texts(name) for name in kept if name == "colour"})
    np.testing.assert_allclose(found.numpy(), expected(tmp_path / "run")[0], atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_csv_by_hand(runs: dict[str, Path], kind: str, tmp_path: Path) -> None:
    run = runs[f"{kind} linear"]
    path = export(run, "south", "csv", tmp_path / "model.csv")
    with open(path, newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    outputs = list(dict.fromkeys(line["output"] for line in lines))
    listed: dict[str, set[str]] = {}
    for line in lines:
        listed.setdefault(line["column"], set()).update([line["level"]] if line["kind"] == "level" else [])
    assert listed["region"] == {"cold"}  # "warm" is at one client only, and no exported model names it
    scores = np.zeros((5, len(outputs)))
    for line in lines:
        k, weight = outputs.index(line["output"]), float(line["coefficient"])
        for row in range(5):
            value = NEW[line["column"]][row] if line["column"] else None
            scores[row, k] += (
                weight
                * {
                    "intercept": lambda: 1.0,
                    "number": lambda v=value, one=line: float(one["if_missing"]) if v is None else v,
                    "missing": lambda v=value: float(v is None),
                    "level": lambda v=value, one=line: float(v == one["level"]),
                    "other": lambda v=value, one=line: float(
                        v is not None and v not in listed[one["column"]]
                    ),
                }[line["kind"]]()
            )
    link = lines[0]["link"]
    values, _ = expected(run)
    if link == "identity":
        np.testing.assert_allclose(scores[:, 0], values, rtol=1e-6)
    elif link == "logistic":
        np.testing.assert_allclose(1 / (1 + np.exp(-scores[:, 0])), values[:, 1], atol=1e-6)
    else:
        share = np.exp(scores - scores.max(1, keepdims=True))
        np.testing.assert_allclose(share / share.sum(1, keepdims=True), values, atol=1e-6)
    assert {"age", "age_missing", "colour=red", "score"} <= {line["feature"] for line in lines}


@pytest.mark.parametrize("kind", ["binary", "regression"])
def test_safetensors_by_hand(runs: dict[str, Path], kind: str, tmp_path: Path) -> None:
    run = runs[f"{kind} linear"]
    path = export(run, "south", "safetensors", tmp_path / "model.safetensors")
    with safe_open(path, framework="np") as stream:
        note = json.loads(stream.metadata()["note"])
        weight, bias = stream.get_tensor("linear.weight"), stream.get_tensor("linear.bias")
        mean, sd = stream.get_tensor("preprocess.mean"), stream.get_tensor("preprocess.sd")
        units = stream.get_tensor("target.mean_sd") if kind == "regression" else None
    columns = [scale["name"] for scale in json.loads(note["preprocessor"])["scales"]]
    features = np.zeros((5, len(note["features"])))
    for k, name in enumerate(note["features"]):
        if name in columns:
            at = columns.index(name)
            features[:, k] = np.nan_to_num((numbers(name) - mean[at]) / sd[at])
        elif name.endswith("_missing"):
            values = NEW[name.removesuffix("_missing")]
            features[:, k] = [value is None for value in values]
        else:
            column, _, level = name.partition("=")
            if level == "other":
                there = {
                    other.partition("=")[2] for other in note["features"] if other.startswith(f"{column}=")
                }
                features[:, k] = [value is not None and value not in there for value in NEW[column]]
                continue
            features[:, k] = [value == level for value in NEW[column]]
    score = features @ weight[0] + bias[0]
    if units is not None:
        np.testing.assert_allclose(score * units[1] + units[0], expected(run)[0], rtol=1e-6)
    else:
        np.testing.assert_allclose(1 / (1 + np.exp(-score)), expected(run)[0][:, 1], atol=1e-6)


def test_a_run_from_arrays_takes_features(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(20, 3, generator=draw) for _ in range(2)]
    fed = coterie.Federation.from_arrays(xs, [x[:, 0] + 1 for x in xs], coterie.models.linear(intercept=True))
    run = coterie.fit(fed, "local", rounds=5, out=tmp_path / "run")
    path = export(tmp_path / "run", "1", "onnx")
    assert path == tmp_path / "run" / "exports" / "1.onnx"
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": xs[1].numpy()})
    np.testing.assert_allclose(found, run.model("1")(xs[1]).detach().numpy(), atol=1e-6)


def test_a_column_called_prediction_is_only_an_input(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    table = {
        "c": ["a", "b"] * 20,
        "prediction": [float(k % 7) for k in range(40)],
        "classes": ["u", "v"] * 20,
    }
    table["y"] = [2.5 * value + (k % 3) for k, value in enumerate(table["prediction"])]
    coterie.fit(coterie.Federation.from_table(table, "c", "y"), "local", rounds=1, out=tmp_path / "run")
    assert export(tmp_path / "run", None, "onnx").exists()


def test_the_command_and_what_it_refuses(runs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    run = runs["regression linear"]
    done = command("export", run, "--client", "south", "--to", "csv", "--out", tmp_path / "south.csv")
    assert done.code == 0 and (tmp_path / "south.csv").exists()
    done = command("export", run, "--client", "soth", "--to", "csv")
    assert done.code == 2 and "Did you mean 'south'?" in done.err
    done = command("export", run, "--client", "south", "--to", "onxx")
    assert done.code == 2 and "Did you mean 'onnx'?" in done.err
    with pytest.raises(SettingError, match="only linear"):
        export(runs["binary network"], "south", "csv")


def test_a_module_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    table = {
        "c": ["a", "b"] * 20,
        "x": [float(k % 7) for k in range(40)],
        "y": [float(k % 5) + 0.5 for k in range(40)],
    }
    model = coterie.models.network(lambda: torch.nn.Linear(1, 1))
    fed = coterie.Federation.from_table(table, "c", "y", model=model)
    run = coterie.fit(fed, "local", rounds=1, out=tmp_path / "run")
    with pytest.raises(RunError, match="from Python"):
        export(tmp_path / "run", "a", "torchscript")
    path = export(tmp_path / "run", "a", "safetensors", model=model)
    with safe_open(path, framework="pt") as stream:
        weight = stream.get_tensor("network.weight")
    trained = run.model("a").state_dict()["network.weight"]
    assert math.isclose(float(weight), float(trained), rel_tol=1e-12)
