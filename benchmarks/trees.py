"""Trees against boosted trees on pooled rows: `python -m benchmarks.trees [table|speed]`.

`table` fits every method on five splits of every world (benchmarks/tree_worlds.py) and writes trees.md and trees.json
in benchmarks/results. `speed` times pooled rows with equal bins and leaves, in CPU seconds. LightGBM and XGBoost see
all rows in one place; ours, the mixed model and the linear methods see sums and models of clients only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import coterie
from benchmarks.tree_worlds import BY_NAME, WORLDS, World
from coterie.engine.federation import Federation

RESULTS = Path(__file__).resolve().parent / "results"
TREES, LEAVES, RATE, PATIENCE = 300, 16, 0.1, 20
METHODS = (
    "trees",
    "LightGBM",
    "LightGBM + client",
    "LightGBM per client",
    "mixed model",
    "best linear method",
)
LINEAR = ("local", "fedavg", "fine-tuned", "ditto", "hierarchical")


def measures(task: str, scores: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the loss and the metric of predictions: numbers, or probabilities [rows, classes]."""
    if task == "regression":
        return {"loss": float(np.sqrt(np.mean((scores - y) ** 2)))}
    y = y.astype(int)
    likely = np.clip(scores[np.arange(len(y)), y], 1e-15, 1)
    loss = float(-np.log(likely).mean())
    if task == "multiclass":
        return {"loss": loss, "accuracy": float((scores.argmax(1) == y).mean())}
    order = stats.rankdata(scores[:, 1])
    ones = y.sum()
    auc = (order[y == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(y) - ones))
    return {"loss": loss, "AUC": float(auc)}


def read(world: World, seed: int, model: Any = None) -> Federation:
    return Federation.from_table(
        world.frame(), world.client, world.target, drop=world.drop, task=world.task, seed=seed, model=model
    )


def predicted(run: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the task, predictions and targets of all test rows, in the target's units."""
    fed, rows = run.fed, run.fed.runtime.rows("test")
    parts = []
    for k in range(fed.n):
        x, _ = rows.of(k)
        if len(x):
            parts.append(fed.model.scores(run.personal[k], x))
    scores, task = torch.cat(parts), fed.model.task
    if task == "regression":
        unit = fed.table.preprocessor
        y = rows.y * unit.target_sd + unit.target_mean
        return task, (scores.squeeze(-1) * unit.target_sd + unit.target_mean).numpy(), y.numpy()
    if task == "binary":
        one = torch.sigmoid(scores.squeeze(-1))
        return task, torch.stack([1 - one, one], -1).numpy(), rows.y.numpy()
    return task, torch.softmax(scores, -1).numpy(), rows.y.numpy()


def ours(world: World, seed: int) -> dict[str, float]:
    fed = read(world, seed, coterie.models.trees(TREES, LEAVES))
    run = coterie.fit(
        fed,
        coterie.algorithms.BoostedTrees(leaves=LEAVES, lr=RATE, patience=PATIENCE),
        TREES,
        evaluate_every=0,
    )
    return measures(*predicted(run))


def lightgbm(world: World, seed: int, how: str) -> dict[str, float]:
    """Return LightGBM on the same splits: pooled, with the client as a category, or a model for each client."""
    import lightgbm as lgb

    fed = read(world, seed, coterie.models.trees(1, 2))
    rows = {split: fed.runtime.rows(split) for split in ("train", "validation", "test")}
    owner = {split: np.repeat(np.arange(fed.n), part.size.numpy()) for split, part in rows.items()}
    task, classes = fed.model.task, fed.model.classes
    objective = {"regression": "regression", "binary": "binary", "multiclass": "multiclass"}[task]
    settings = {
        "objective": objective,
        "num_leaves": LEAVES,
        "learning_rate": RATE,
        "min_data_in_leaf": 5,
        "verbose": -1,
        "num_threads": 1,
        "seed": seed,
    }
    if task == "multiclass":
        settings["num_class"] = classes
    unit = fed.table.preprocessor
    kinds = [k for k, count in enumerate(fed.model.levels or ()) if count]

    def fitted(x: dict[str, np.ndarray], y: dict[str, np.ndarray], codes: list[int]) -> np.ndarray:
        data = lgb.Dataset(x["train"], y["train"], categorical_feature=codes)
        stop = [lgb.early_stopping(PATIENCE, verbose=False)] if len(y["validation"]) else []
        held = [lgb.Dataset(x["validation"], y["validation"], reference=data)] if stop else None
        booster = lgb.train(settings, data, TREES if stop else 50, valid_sets=held, callbacks=stop)
        return np.asarray(booster.predict(x["test"]))

    x = {split: part.x.numpy() for split, part in rows.items()}
    y = {split: part.y.numpy() for split, part in rows.items()}
    if how == "client":
        x = {split: np.column_stack([part, owner[split]]) for split, part in x.items()}
        kinds = [*kinds, x["train"].shape[1] - 1]
    if how != "per client":
        found = fitted(x, y, kinds)
    else:
        pooled = (
            y["train"].mean()
            if task != "multiclass"
            else np.bincount(y["train"].astype(int), minlength=classes or 0) / len(y["train"])
        )
        found = np.zeros((len(y["test"]), classes)) if task == "multiclass" else np.zeros(len(y["test"]))
        for k in range(fed.n):
            mine = {split: owner[split] == k for split in rows}
            if not mine["test"].any():
                continue
            own_y = {split: y[split][mine[split]] for split in rows}
            if len(own_y["train"]) < 10 or (task != "regression" and len(np.unique(own_y["train"])) < 2):
                found[mine["test"]] = pooled
                continue
            found[mine["test"]] = fitted({split: x[split][mine[split]] for split in rows}, own_y, kinds)
    if task == "regression":
        return measures(
            task, found * unit.target_sd + unit.target_mean, y["test"] * unit.target_sd + unit.target_mean
        )
    return measures(task, np.stack([1 - found, found], 1) if task == "binary" else found, y["test"])


def linear(world: World, seed: int, names: tuple[str, ...], effects: str) -> dict[str, float]:
    """Return the linear method with the lowest validation loss."""
    fed, best = read(world, seed), (np.inf, None)
    for name in names:
        settings = {"grouping": "one", "effects": effects} if name == "hierarchical" else {}
        if name == "hierarchical" and fed.d > 256:
            settings = {"grouping": "one", "choose": "given", "solver": "gradient"}
        method = coterie.algorithms.make(name, **settings)
        run = coterie.fit(fed, method, 60, evaluate_every=20, select="best", score_test=False)
        loss = run.pooled("validation", "loss")
        if loss < best[0]:
            best = (loss, run)
    assert best[1] is not None
    return measures(*predicted(best[1]))


RUNNERS: dict[str, Callable[[World, int], dict[str, float]]] = {
    "trees": ours,
    "LightGBM": lambda world, seed: lightgbm(world, seed, "pooled"),
    "LightGBM + client": lambda world, seed: lightgbm(world, seed, "client"),
    "LightGBM per client": lambda world, seed: lightgbm(world, seed, "per client"),
    "mixed model": lambda world, seed: linear(world, seed, ("hierarchical",), "intercept"),
    "best linear method": lambda world, seed: linear(world, seed, LINEAR, "auto"),
}


def table(names: list[str], methods: list[str], splits: int, record: Path) -> None:
    """Fit what is not in the record yet, and write the record after each fit."""
    known = json.loads(record.read_text()) if record.exists() else {}
    for name in names:
        for seed in range(splits):
            for method in methods:
                key = f"{name}/{method}/{seed}"
                if key in known:
                    continue
                started = time.process_time()
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        known[key] = RUNNERS[method](BY_NAME[name], seed)
                except coterie.CoterieError as problem:
                    known[key] = {}
                    print(f"{key}: {problem}", file=sys.stderr)
                print(key, known[key], f"{time.process_time() - started:.1f} s", flush=True)
                record.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def interval(values: list[float]) -> str:
    """Return the mean and the half-width of its 95 % interval over splits; one split has no interval."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def markdown(known: dict[str, dict[str, float]]) -> str:
    """Return the table: a line for each world and measure, and the paired difference to LightGBM with the client."""
    lines = [
        "| data | measure | " + " | ".join(METHODS) + " | trees − LightGBM + client |",
        "|---|---|" + "---:|" * (len(METHODS) + 1),
    ]
    for world in WORLDS:
        found: dict[str, dict[int, dict[str, float]]] = {method: {} for method in METHODS}
        for key, value in known.items():
            name, method, seed = key.rsplit("/", 2)
            if name == world.name and value:
                found[method][int(seed)] = value
        measured = list(next(iter(found["trees"].values()), {}))
        for measure in measured:
            title = "RMSE" if measured == ["loss"] else {"loss": "log-loss"}.get(measure, measure)
            cells = [interval([value[measure] for value in found[method].values()]) for method in METHODS]
            both = found["trees"].keys() & found["LightGBM + client"].keys()
            gaps = [found["trees"][k][measure] - found["LightGBM + client"][k][measure] for k in sorted(both)]
            lines.append(f"| {world.name} | {title} | {' | '.join(cells)} | {interval(gaps)} |")
    return "\n".join(lines)


def speed(rows: int, features: int, trees: int, threads: int, device: str = "cpu") -> dict[str, Any]:
    """Time pooled rows with equal bins, leaves and depth; one client holds everything. On a GPU only ours."""
    torch.set_num_threads(threads)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows + rows // 4, features))
    mean = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = (mean - mean.mean()) / mean.std() + 0.1 * draw.normal(size=len(x))
    inside, outside = slice(0, rows), slice(rows, None)

    def timed(function: Callable[[], Callable[[np.ndarray], np.ndarray]]) -> dict[str, float]:
        before, wall = _cpu(), time.perf_counter()
        predict = function()
        seconds, wall = _cpu() - before, time.perf_counter() - wall
        error = float(np.mean((predict(x[outside]) - y[outside]) ** 2))
        return {"cpu_s": seconds, "wall_s": wall, "mse": error}

    def trees_() -> Callable[[np.ndarray], np.ndarray]:
        model = coterie.models.trees(trees, 32)
        fed = Federation.from_arrays([x[inside]], [y[inside]], model, device=device)
        method = coterie.algorithms.BoostedTrees(leaves=32, depth=5, bins=64, lambda_="shared", least=20.0)
        run = coterie.fit(fed, method, trees, evaluate_every=0, score_test=False)
        return lambda rows: run.model("0").cpu()(torch.from_numpy(rows)).numpy()

    if device != "cpu":
        timed(trees_)  # the first one starts the device
        return {f"Coterie, {torch.cuda.get_device_name()}": timed(trees_)}
    import lightgbm as lgb
    import xgboost as xgb

    def lgb_() -> Callable[[np.ndarray], np.ndarray]:
        settings = {"num_leaves": 32, "max_depth": 5, "max_bin": 63, "learning_rate": RATE, "lambda_l2": 1.0}
        settings |= {"min_sum_hessian_in_leaf": 20, "num_threads": threads, "verbose": -1}
        booster = lgb.train(settings, lgb.Dataset(x[inside], y[inside]), trees)
        return lambda rows: np.asarray(booster.predict(rows))

    def xgb_() -> Callable[[np.ndarray], np.ndarray]:
        settings = {"max_depth": 5, "max_bin": 63, "eta": RATE, "lambda": 1.0, "min_child_weight": 20}
        settings |= {"tree_method": "hist", "nthread": threads}
        booster = xgb.train(settings, xgb.QuantileDMatrix(x[inside], y[inside], max_bin=63), trees)
        return lambda rows: booster.predict(xgb.DMatrix(rows))

    return {"Coterie": timed(trees_), "LightGBM": timed(lgb_), "XGBoost": timed(xgb_)}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("table", "speed", "write"), default="table")
    parser.add_argument(
        "--worlds", default=",".join(BY_NAME).replace(", ", "; "), help="names with ';' for ','"
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=50)
    parser.add_argument("--trees", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of ours, for `speed`: cpu or cuda")
    chosen = parser.parse_args()
    record, times = RESULTS / "trees.json", RESULTS / "trees_speed.json"
    if chosen.what == "speed":
        found = speed(chosen.rows, chosen.features, chosen.trees, chosen.threads, chosen.device)
        found = (json.loads(times.read_text()) if times.exists() else {}) | found
        found["size"] = {
            "rows": chosen.rows,
            "features": chosen.features,
            "trees": chosen.trees,
            "threads": chosen.threads,
        }
        times.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))
    if chosen.what == "table":
        names = [name.strip().replace(";", ",") for name in chosen.worlds.split(",")]
        table(names, chosen.methods.split(","), chosen.splits, record)
    text = [HEAD, markdown(json.loads(record.read_text()))] if record.exists() else []
    if times.exists():
        text.append(_times(json.loads(times.read_text())))
    (RESULTS / "trees.md").write_text("\n\n".join(text) + "\n")


def _times(found: dict[str, Any]) -> str:
    size = found.pop("size")
    lines = [
        f"{size['rows']:,} rows × {size['features']} features × {size['trees']} trees of 32 leaves, 64 bins, "
        f"pooled rows, {size['threads']} thread(s). CPU seconds include binning.",
        "",
        "| library | CPU s | wall s | test MSE |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {line['cpu_s']:.1f} | {line['wall_s']:.1f} | {line['mse']:.4f} |"
        for name, line in found.items()
    ]
    return "## Speed\n\n" + "\n".join(lines)


HEAD = f"""# Trees

Made by `python -m benchmarks.trees`. Each number is a mean over splits (60 % training, 20 % validation, 20 % test rows
of each client) with its 95 % interval; the last column is the paired difference over the same splits. LightGBM has all
rows in one place, with {LEAVES} leaves, rate {RATE} and early stopping on validation rows as ours; "+ client" adds the
client as a category.
The mixed model is `hierarchical` with a random intercept over linear effects. "best linear method" is the one with the
lowest validation loss of {", ".join(LINEAR)}. Lower RMSE and log-loss are better, higher accuracy and AUC.
The figures of trees are of bins at exact quantiles, before bins came from counts on grids; `bars.md` has today's."""


if __name__ == "__main__":
    main()
