"""Tables of a hierarchical run: effects of clients, variances, and tests whether clients and clusters differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coterie._core.errors import SettingError
from coterie.algorithms import effect_uncertainty
from coterie.algorithms.hierarchical import Hierarchical

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
        Columns client, coefficient, estimate, lower, upper, centre, shrinkage, and weight where tails are heavy.
    """
    import polars
    from scipy.stats import norm

    method = _method(run)
    ids, found = effect_uncertainty.posterior(method, run.fed, run.state)
    reach, d = float(norm.ppf(0.5 + level / 2)), run.fed.d
    centre = run.state.centres.double()[method.clusters(run.fed)[ids]]
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
    return polars.DataFrame(columns)


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
        Columns variance, estimate, lower, upper.
    """
    import polars

    found = effect_uncertainty.variances(_method(run), run.fed, run.state, level)
    rows = [{"variance": name, "estimate": v[0], "lower": v[1], "upper": v[2]} for name, v in found.items()]
    return polars.DataFrame(rows)


def difference_tests(run: Run) -> dict[str, float]:
    """Return p-values of likelihood-ratio tests: "clients differ", "clusters differ"."""
    return effect_uncertainty.tests(_method(run), run.fed, run.state)


def coefficient_names(run: Run) -> list[str]:
    """Return the names of the model's coefficients: features, (intercept), and numbers where there are no names."""
    fed, model = run.fed, run.fed.model
    columns = getattr(model, "columns", fed.d)
    named = [f"x{k}" for k in range(columns)]
    if fed.table is not None:
        named = list(fed.table.preprocessor.feature_names)[:columns]
    if getattr(model, "intercept", False):
        named = [*named[: columns - 1], "(intercept)"]
    outputs = fed.d // columns if fed.d % columns == 0 else 1
    if outputs > 1:
        return [f"class {k}: {name}" for k in range(outputs) for name in named]
    return [*named, *(f"extra {k}" for k in range(fed.d - len(named)))]


def _method(run: Run) -> Hierarchical:
    if not isinstance(run.algorithm, Hierarchical):
        raise SettingError(
            f"{run.algorithm.name} has no variances; train hierarchical to see effects and intervals"
        )
    return run.algorithm
