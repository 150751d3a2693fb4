"""Tables of a hierarchical run: effects of clients, variances, and tests whether clients and clusters differ."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from coterie._core.errors import SettingError
from coterie.algorithms import effect_uncertainty
from coterie.algorithms.crossed_cells import layout
from coterie.algorithms.crossed_uncertainty import crossed_posterior
from coterie.algorithms.hierarchical import Hierarchical
from coterie.engine.federation import Federation
from coterie.engine.resplit import merged
from coterie.models.extended_glm import ExtendedGlm

if TYPE_CHECKING:
    import polars

    from coterie.train.run import Run


def client_table(run: Run, level: float = 0.9) -> polars.DataFrame:
    """Return every client's coefficients with intervals and shrinkage.

    Parameters
    ----------
    run
        A run of `hierarchical`.
    level
        Coverage of the intervals.

    Returns
    -------
    polars.DataFrame
        Columns client, coefficient, estimate, lower, upper, centre, shrinkage, and weight where tails are heavy. With
        several grouping columns, effects of levels follow as rows of the client "(all)". Numbers are in units of the
        target, for features that a table standardised; log odds or log counts for classes and counts.
    """
    import polars
    from scipy.stats import norm

    if "client_groups" in run.state:
        return _crossed_table(run, level)
    method, fed = trained_clients(run)
    ids, found = effect_uncertainty.posterior(method, fed, run.state)
    reach, d = float(norm.ppf(0.5 + level / 2)), run.fed.d
    centre = run.state.centres.double()[method.clusters(fed)[ids]]
    columns: dict[str, Any] = {
        "client": [run.fed.names[int(k)] for k in ids for _ in range(d)],
        "coefficient": coefficient_names(run) * len(ids),
        "estimate": found.estimate.flatten().tolist(),
        "lower": (found.estimate - reach * found.error).flatten().tolist(),
        "upper": (found.estimate + reach * found.error).flatten().tolist(),
        "centre": centre.flatten().tolist(),
        "shrinkage": found.shrinkage.flatten().tolist(),
    }
    if "trust" in run.state:
        columns["weight"] = run.state.trust[ids].repeat_interleave(d).tolist()
    return _in_target_units(run, polars.DataFrame(columns))


def _crossed_table(run: Run, level: float) -> polars.DataFrame:
    """Return `client_table` with several grouping columns."""
    import polars
    from scipy.stats import norm

    method, fed = trained_clients(run)
    at = layout(fed)
    assert at is not None
    ids, found = crossed_posterior(method, fed, run.state)
    names, reach = coefficient_names(run), float(norm.ppf(0.5 + level / 2))
    fixed, grouped = at.fixed.tolist(), at.grouped.tolist()
    clients = [run.fed.names[int(k)] for k in ids for _ in fixed] + ["(all)"] * len(grouped)
    estimate = torch.cat([found.clients.flatten(), found.levels])
    error = torch.cat([found.client_errors().flatten(), found.level_errors()])
    common = run.state.x.double().cpu()[at.fixed].repeat(len(ids))
    columns = {
        "client": clients,
        "coefficient": [names[k] for k in fixed] * len(ids) + [names[k] for k in grouped],
        "estimate": estimate.tolist(),
        "lower": (estimate - reach * error).tolist(),
        "upper": (estimate + reach * error).tolist(),
        "centre": [*common.tolist(), *[0.0] * len(grouped)],
        "shrinkage": [*found.shrinkage().flatten().tolist(), *[None] * len(grouped)],
    }
    return _in_target_units(run, polars.DataFrame(columns))


def _target_units(run: Run) -> tuple[float, float]:
    """Return the mean and scale by which a table standardised the target; 0 and 1 where it did not."""
    table = run.fed.table
    if table is None or not run.fed.model.has_statistics:
        return 0.0, 1.0
    return table.preprocessor.target_mean, table.preprocessor.target_sd


def _in_target_units(run: Run, table: polars.DataFrame) -> polars.DataFrame:
    """Return a table of coefficients in units of the target; intercepts have the target's mean."""
    import polars

    mean, scale = _target_units(run)
    shift = polars.when(polars.col("coefficient") == "(intercept)").then(mean).otherwise(0.0)
    return table.with_columns(
        polars.col(name) * scale + shift for name in ("estimate", "lower", "upper", "centre")
    )


def variance_table(run: Run, level: float = 0.9) -> polars.DataFrame:
    """Return the variances with intervals.

    Parameters
    ----------
    run
        A run of `hierarchical`.
    level
        Coverage of the intervals.

    Returns
    -------
    polars.DataFrame
        Columns variance, estimate, lower, upper, and coefficients: which of them have this variance. In squared units
        of the target, for features that a table standardised; of log odds or log counts for classes and counts.
    """
    import polars

    found, scale = (
        effect_uncertainty.variances(*trained_clients(run), run.state, level),
        _target_units(run)[1],
    )
    rows: list[dict[str, Any]] = []
    for name, ends in found.items():
        unit = 1.0 if "correlation" in name else scale**2
        numbers = zip(("estimate", "lower", "upper"), (unit * end for end in ends), strict=True)
        rows.append({"variance": name, **dict(numbers), "coefficients": ", ".join(_concerned(run, name))})
    return polars.DataFrame(rows)


def _concerned(run: Run, variance: str) -> list[str]:
    """Return the coefficients that a variance or correlation between clients or clusters is of."""
    names = coefficient_names(run)
    if "client_groups" in run.state:
        at = layout(run.fed)
        assert at is not None and isinstance(run.algorithm, Hierarchical)
        groups = run.state.client_groups.tolist()
        wanted = [run.algorithm.variance_names(run.fed, run.state).index(variance) - 1]
        names = [names[k] for k in at.fixed.tolist()]
    else:
        groups = run.state.groups.tolist()
        wanted = [int(number) for number in re.findall(r"\d+", variance.split(": ")[-1])]
    if variance.startswith("noise"):
        return []
    if getattr(run.algorithm, "covariance", "") == "full" and not re.fullmatch(r"cluster \d+", variance):
        varying = [name for name, group in zip(names, groups, strict=True) if group >= 0]
        return [varying[k] for k in wanted]
    return [name for name, group in zip(names, groups, strict=True) if group in wanted]


def difference_tests(run: Run) -> dict[str, float]:
    """Return p-values of likelihood-ratio tests: "clients differ", "clusters differ"."""
    return effect_uncertainty.tests(*trained_clients(run), run.state)


def coefficient_names(run: Run) -> list[str]:
    """Return the names of the model's coefficients: features, (intercept), and numbers where there are no names."""
    fed, model = run.fed, run.fed.model
    columns = getattr(model, "columns", fed.d)
    named = [f"x{k}" for k in range(columns)]
    if fed.table is not None:
        named = list(fed.table.preprocessor.feature_names)
        basis = getattr(model, "basis", None)
        named = (named if basis is None else basis.names(named))[:columns]
    if getattr(model, "intercept", False):
        named = [*named[: columns - 1], "(intercept)"]
    if isinstance(model, ExtendedGlm):
        return [*named, *model.extra_names]
    outputs = fed.d // columns
    return [f"class {k}: {name}" for k in range(outputs) for name in named] if outputs > 1 else named


def trained_clients(run: Run) -> tuple[Hierarchical, Federation]:
    """Return the method of a hierarchical run and its clients, with the rows that trained them and with their models.

    Raises
    ------
    SettingError
        If the method is another one.
    """
    if not isinstance(run.algorithm, Hierarchical):
        raise SettingError(
            f"{run.algorithm.name} has no variances; train hierarchical to see effects and intervals"
        )
    fed = run.fed if run.refit == "none" else merged(run.fed, run.trained_on)
    if not fed.all_begun(run.algorithm):  # a run that was loaded or refitted
        fed.runtime.keep("model", run.personal)
        fed.restore_begun(torch.ones(fed.n, dtype=torch.bool))
        fed.enter_round(max(1, run.rounds), run.state)
    return run.algorithm, fed
