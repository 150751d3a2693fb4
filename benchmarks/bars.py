"""`auto` against what a practitioner takes instead: `python -m benchmarks.bars [--splits 2] [--worlds NAMES]`.

Fits `auto`, trees, pooled linear regression and the same with an indicator of each client on splits of every world
(benchmarks/tree_worlds.py), and puts them beside the other methods of benchmarks/trees.py on the same splits. Writes
bars.md and bars.json in benchmarks/results; what is in the record is not fitted again, except with `--stale` the
figures of `auto` before its code changed. The record is written after each fit, so a long study can be cut anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge

import coterie
from benchmarks.tree_worlds import BY_NAME, WORLDS, World
from benchmarks.trees import RESULTS, TREES, interval, measures, ours, predicted, read

ROUNDS, PENALTY = 100, 1e-3  # of auto; on each weight of linear models, as ours
HERE = ("auto", "trees", "pooled linear", "client dummies")
SINGLE = ("trees", "mixed model", "best linear method")  # ours, of which the best in hindsight is shown
POOLED = ("pooled linear", "client dummies", "LightGBM", "LightGBM + client", "LightGBM per client")
COLUMNS = ("auto", "best single method", *POOLED[:2], "mixed model", *POOLED[2:])
CODE, MARK = "ridge", "*"  # name of today's `auto`; what marks figures of an earlier one
Known = dict[str, dict[str, float]]
Codes = dict[str, str]  # which `auto` a figure is of


def auto(world: World, seed: int) -> dict[str, float]:
    return measures(*predicted(coterie.choose(read(world, seed), ROUNDS).run))


def linear(world: World, seed: int, dummies: bool) -> dict[str, float]:
    """Return a linear model with ridge penalty on the pooled training rows, as ours encode them."""
    fed = read(world, seed)
    rows = {split: fed.runtime.rows(split) for split in ("train", "test")}
    x = {split: part.x.numpy() for split, part in rows.items()}
    if dummies:
        owner = {split: np.repeat(np.eye(fed.n), part.size.numpy(), axis=0) for split, part in rows.items()}
        x = {split: np.column_stack([x[split], owner[split]]) for split in x}
    y, task, count = rows["train"].y.numpy(), fed.model.task, len(x["train"])
    if task == "regression":
        unit = fed.table.preprocessor
        found = Ridge(alpha=PENALTY * count).fit(x["train"], y).predict(x["test"])
        units = [value * unit.target_sd + unit.target_mean for value in (found, rows["test"].y.numpy())]
        return measures(task, *units)
    model = LogisticRegression(C=1 / (PENALTY * count), max_iter=1000).fit(x["train"], y)
    scores = np.zeros((len(x["test"]), getattr(fed.model, "classes", None) or 2))
    scores[:, model.classes_.astype(int)] = model.predict_proba(x["test"])
    return measures(task, scores, rows["test"].y.numpy())


RUNNERS = {
    "auto": auto,
    "trees": ours,
    "pooled linear": lambda world, seed: linear(world, seed, False),
    "client dummies": lambda world, seed: linear(world, seed, True),
}


def read_record(path: Path) -> tuple[Known, Codes]:
    """Return the figures of a record, and of which `auto` they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return known, known.pop("code", {})


def write_record(path: Path, known: Known, codes: Codes) -> None:
    path.write_text(json.dumps({**known, "code": codes}, indent=1, sort_keys=True) + "\n")


def fit(worlds: list[str], splits: int, methods: list[str], record: Path, stale: bool) -> None:
    """Fit what is not in the record yet, split after split, and write the record after each fit."""
    known, codes = read_record(record)
    for seed in range(splits):
        for name in worlds:
            for method in methods:
                key, started = f"{name}/{method}/{seed}", time.process_time()
                old = stale and method == "auto" and codes.get(key) != CODE
                if key in known and not old:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    known[key] = RUNNERS[method](BY_NAME[name], seed)
                print(key, known[key], f"{time.process_time() - started:.1f} s", flush=True)
                if method == "auto":
                    codes[key] = CODE
                write_record(record, known, codes)


def markdown(known: Known, codes: Codes) -> str:
    """Return a line for each world and measure: means over the splits that `auto` was fitted on."""
    lines = [
        "| data | measure | splits | " + " | ".join(COLUMNS) + " | auto − best pooled |",
        "|---|---|---:|" + "---:|" * (len(COLUMNS) + 1),
    ]
    for world in WORLDS:
        seeds = sorted(int(key.rsplit("/", 1)[1]) for key in known if key.startswith(f"{world.name}/auto/"))
        for measure in known[f"{world.name}/auto/{seeds[0]}"] if seeds else ():
            sign = -1 if measure in ("AUC", "accuracy") else 1

            def values(
                method: str, world: World = world, measure: str = measure, seeds: list[int] = seeds
            ) -> list[float]:
                found = [known.get(f"{world.name}/{method}/{seed}", {}).get(measure) for seed in seeds]
                return [value for value in found if value is not None]

            def best(methods: tuple[str, ...], sign: int = sign, count: int = len(seeds)) -> str:
                complete = [method for method in methods if len(values(method)) == count]
                return min(complete, key=lambda method: sign * statistics.mean(values(method)))

            shown = {"best single method": best(SINGLE)}
            cells = [interval(values(shown.get(column, column))) for column in COLUMNS]
            cells[1] = f"{cells[1]} ({shown['best single method']})"
            cells[0] += "" if all(codes.get(f"{world.name}/auto/{seed}") == CODE for seed in seeds) else MARK
            rival = values(best((*POOLED, "mixed model")))
            gap = interval([a - b for a, b in zip(values("auto"), rival, strict=True)])
            title = {"loss": "RMSE" if len(known[f"{world.name}/auto/{seeds[0]}"]) == 1 else "log-loss"}
            lines.append(
                f"| {world.name} | {title.get(measure, measure)} | {len(seeds)} | {' | '.join(cells)} | {gap} |"
            )
    return "\n".join(lines)


BEFORE = f"""
Figures with {MARK} are of `auto` before hierarchical models raced with stronger ridge penalties, some also before
networks did; `python -m benchmarks.bars --splits 5 --stale` fits what is missing.
"""
HEAD = f"""# `auto` against what a practitioner takes instead

Made by `python -m benchmarks.bars`, with methods of `python -m benchmarks.trees` on the same splits (60 % training,
20 % validation, 20 % test rows of each client, seeds 0, 1, ...). Means over splits, over all test rows, with 95 %
intervals where there are several splits. One split says little: differences between splits are larger than most
between methods (`trees.md` has five). Pooled methods have all rows in one place; `auto`, the single methods and the
mixed model (`hierarchical` with random intercepts) do not. "best single method" is the best in hindsight of
{", ".join(SINGLE)}. `auto` has {ROUNDS} rounds of three trees, the other trees up to {TREES}. The last
column is the paired difference to the best of the pooled methods and the mixed model in hindsight. Lower RMSE and
log-loss are better, higher accuracy and AUC.
{BEFORE}"""
WHY = """
Where `auto` is behind the best pooled method on the splits shown:

- donations: pooled regression, the mixed model and LightGBM have log-losses from 0.672 to 0.677, and intervals of 0.06
  or more: a difference of 0.001, or of 0.004 in AUC, is noise.
- heart disease: 0.003 of 0.344 with an interval of 0.07.
- InstEval: behind LightGBM with the client, and behind our own trees of 16 leaves whose splits do not tell clients
  apart. Such trees race with 8 leaves only.

On activity one split says little: of four splits `auto` has a lower log-loss than LightGBM with the client on three,
and a higher accuracy on two.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default=";".join(BY_NAME), help="names with ';' between them")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--methods", default=",".join(HERE))
    parser.add_argument("--again", default="", help="methods whose figures are forgotten first")
    parser.add_argument(
        "--stale", action="store_true", help="fit auto again where figures are of an earlier one"
    )
    chosen = parser.parse_args()
    record, again = RESULTS / "bars.json", chosen.again.split(",")
    known, codes = read_record(record)
    write_record(
        record, {key: value for key, value in known.items() if key.split("/")[1] not in again}, codes
    )
    fit(chosen.worlds.split(";"), chosen.splits, chosen.methods.split(","), record, chosen.stale)
    known, codes = read_record(record)
    known = json.loads((RESULTS / "trees.json").read_text()) | known
    (RESULTS / "bars.md").write_text(f"{HEAD}\n\n{markdown(known, codes)}\n{WHY}")


if __name__ == "__main__":
    main()
