"""Default `hierarchical` against the mixed model of statsmodels on pooled rows, on real tables in five splits each.

    python -m benchmarks.pooled_mixed [--tables exam math star insteval donations] [--splits 5]

Both see the same training rows (60 %), encoded alike, and are scored on the same test rows (20 %): root mean squared
error over all rows, in units of the target. The pooled model is MixedLM with a random intercept of the client, by REML.
The tables are read from ../shared/data. Needs the extra `stats`.
Splits that results/pooled_mixed.json has are kept.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import torch

import coterie
from coterie import Federation, models
from coterie.algorithms import make
from coterie.data import tables
from coterie.experiments.mixed_model import independent_columns
from coterie.experiments.spec import shared_data

HOME = Path(__file__).resolve().parent / "results"
SPLIT = (0.6, 0.2, 0.2)
Source = tuple[
    pl.DataFrame, str, str, str | None
]  # rows, columns of client and target, and of known clusters


def _read(name: str) -> pl.DataFrame:
    return tables.read(shared_data(f"hierarchical/{name}.csv")).drop("rownames")


def exam() -> Source:
    """Examination scores of 4,059 pupils in 65 schools, by gender mix of the school."""
    return (
        _read("Exam").select("school", "normexam", "schgend", "standLRT", "sex", "vr"),
        "school",
        "normexam",
        "schgend",
    )


def math() -> Source:
    """Mathematics of 7,185 pupils in 160 schools of two sectors."""
    schools = _read("MathAchSchool").select("School", "Sector")
    return _read("MathAchieve").drop("MEANSES").join(schools, on="School"), "School", "MathAch", "Sector"


def star() -> Source:
    """Reading scores of pupils in 80 schools of four types, by grade and class size."""
    frame = _read("star").select("sch", "read", "schtype", "gr", "cltype", "ses", "sx", "eth").drop_nulls()
    return frame, "sch", "read", "schtype"


def insteval() -> Source:
    """Ratings of 1,128 lecturers in 14 departments, by service, age of the student and of the lecture."""
    return _read("InstEval").drop("s"), "d", "y", "dept"


def donations() -> Source:
    """Amounts of 4,843 donors in 54 demographic clusters, by what and when they gave before."""
    frame = tables.read(shared_data("donations/pva97nk.csv"))
    kept = [name for name in frame.columns if name.startswith(("Gift", "Prom"))]
    given = pl.col("TARGET_D").cast(pl.Float64, strict=False)
    frame = frame.with_columns(given).drop_nulls("TARGET_D")
    return frame.select("DemCluster", "TARGET_D", *kept), "DemCluster", "TARGET_D", None


TABLES = {"exam": exam, "math": math, "star": star, "insteval": insteval, "donations": donations}


def compare(name: str, seed: int) -> dict[str, float]:
    """Return the test error of both on one split."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    frame, client, target, cluster = TABLES[name]()
    model = models.linear(intercept=True, reduction="sum")
    fed = Federation.from_table(
        frame, client, target, cluster=cluster, model=model, split=SPLIT, seed=seed, task="regression"
    )
    method = make("hierarchical", grouping="one" if cluster is None else "known")
    run = coterie.fit(fed, method, rounds=1, evaluate_every=0)
    rows = {split: fed.runtime.rows(split) for split in ("train", "test")}
    owner = {split: torch.repeat_interleave(torch.arange(fed.n), rows[split].size) for split in rows}
    train, kept = rows["train"], independent_columns(rows["train"].x.double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = MixedLM(train.y.numpy(), train.x.double()[:, kept].numpy(), owner["train"].numpy()).fit()
    pooled = torch.zeros(fed.n, fed.d, dtype=torch.float64)
    pooled[:, kept] = torch.tensor(np.asarray(fitted.fe_params))
    if (
        float(np.asarray(fitted.cov_re)[0, 0]) > 1e-12
    ):  # at zero MixedLM refuses to tell that all effects are zero
        pooled[:, -1] += torch.tensor([float(np.asarray(fitted.random_effects[k])[0]) for k in range(fed.n)])
    test = rows["test"]

    def error(weights: torch.Tensor) -> float:
        left = (test.x.double() * weights.double()[owner["test"]]).sum(-1) - test.y.double()
        return float(left.square().mean().sqrt() * fed.table.target_scale)

    return {"hierarchical": error(run.personal), "pooled": error(pooled)}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return means over splits, and the mean difference with its standard error."""
    lines = [
        "| table | splits | hierarchical | pooled mixed model | difference | standard error | equal or better |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, runs in found.items():
        ours, pooled = (np.array([one[key] for one in runs]) for key in ("hierarchical", "pooled"))
        apart, error = (ours - pooled).mean(), (ours - pooled).std(ddof=1) / len(runs) ** 0.5
        ok = "yes" if apart <= 2 * error else "no"
        lines.append(
            f"| {name} | {len(runs)} | {ours.mean():.4f} | {pooled.mean():.4f} | {apart:+.4f} | {error:.4f} | {ok} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--splits", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = HOME / "pooled_mixed.json"
    found: dict[str, list[dict[str, float]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in given.tables:
        for seed in range(len(found.get(name, ())), given.splits):
            found.setdefault(name, []).append(compare(name, seed))
            print(name, seed, found[name][-1], flush=True)
            kept.write_text(json.dumps(found, indent=1) + "\n")
    (HOME / "pooled_mixed.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
