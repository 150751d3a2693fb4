"""Show what `coterie theory` computes as tables and plots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from coterie.report.plots import line_plot
from coterie.theory import flix_rates, flix_rounds, flix_steps
from coterie.theory.flix import Mixture
from coterie.theory.ridge_limits import Risk, optimal_lambda

SHOWN = 400  # rounds of a plot, at most


def risk_tables(numbers: Mapping[str, float | None], found: Mapping[str, Risk]) -> list[str | Table]:
    """Return the table of predicted errors, best first, and the best penalty in a sentence.

    Parameters
    ----------
    numbers
        gamma, r2, rho2 and sigma2.
    found
        Predicted risks by method.

    Returns
    -------
    list of str and rich.table.Table
        Parts to print, in this order.

    Examples
    --------
    >>> from coterie.report.theory import risk_tables
    >>> from coterie.theory import risk
    >>> table, text = risk_tables({"gamma": 2.0, "r2": 1.0, "sigma2": 0.25}, {"fedavg": risk.fedavg(r2=1.0)})
    >>> table.row_count
    1
    """
    table = Table(title="Predicted squared error of predictions beyond the noise")
    for name in ("method", "bias", "variance", "error"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, one in sorted(found.items(), key=lambda pair: float(pair[1].risk)):
        table.add_row(name, f"{one.bias:.4f}", f"{one.variance:.4f}", f"{one.risk:.4f}")
    best = optimal_lambda(gamma=numbers["gamma"], r2=numbers["r2"], sigma2=numbers["sigma2"])
    return [
        table,
        f"Penalties and mixtures are the best ones; around the centre that is lambda = {best:.4g}.",
    ]


def risk_plot(
    over: str, grid: Sequence[float], curves: Mapping[str, Any], points: Sequence[float] = ()
) -> Any:
    """Plot predicted errors against the number that varies, with lines where two of them cross.

    Parameters
    ----------
    over
        Name of the number that varies.
    grid
        Its values.
    curves
        Predicted errors by method.
    points
        Where lines are drawn.

    Returns
    -------
    plotly.graph_objects.Figure
    """
    lines = {name: (list(map(float, grid)), _finite(values)) for name, values in curves.items()}
    figure = line_plot(lines, title="Predicted error", x=over, y="squared error beyond the noise", log=True)
    figure.update_traces(mode="lines")
    figure.update_xaxes(type="log")
    for point in points:
        figure.add_vline(x=point, line_dash="dot", annotation_text=f"{point:.3g}")
    return figure


def _finite(values: Any) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


@dataclass(frozen=True)
class SolverRounds:
    """What a solver of FLIX needs: step size, factor per round, rounds, floats up per client and in all of them."""

    solver: str
    step: float
    rate: float
    rounds: int
    floats: float
    certain: bool


def solver_rounds(
    smoothness: float,
    convexity: float,
    alpha: float,
    clients: int,
    features: int,
    kept: int,
    gap: float,
    accuracy: float,
) -> list[SolverRounds]:
    """Return what theory promises for the solvers of FLIX on equally curved clients.

    Parameters
    ----------
    smoothness, convexity
        L and mu of the clients' losses.
    alpha
        Weight of the shared model.
    clients, features
        Number of clients and of parameters.
    kept
        Coordinates that diana (rand-K) and ef21 (top-K) send.
    gap, accuracy
        f~(x) - min f~ at the start and at the end.

    Returns
    -------
    list of SolverRounds

    Examples
    --------
    >>> from coterie.report.theory import solver_rounds
    >>> found = solver_rounds(4.0, 0.1, 0.5, 10, 100, 10, gap=1.0, accuracy=1e-4)
    >>> [(one.solver, one.rounds) for one in found]
    [('dgd', 364), ('diana rand-10', 3302), ('ef21 top-10', 9996), ('scaffnew', 85)]
    """
    each = torch.full((clients,), smoothness, dtype=torch.float64)
    mixture = Mixture.equal(alpha, each, torch.full_like(each, convexity))
    omega, delta = features / kept - 1.0, kept / features
    chance = flix_steps.scaffnew_chance(mixture)
    plans = (
        ("dgd", flix_steps.dgd_step(mixture), flix_rates.dgd_rate(mixture),
         flix_rounds.dgd_rounds(mixture, gap, accuracy), features, True),
        (f"diana rand-{kept}", flix_steps.diana_step(mixture, omega), flix_rates.diana_rate(mixture, omega),
         flix_rounds.diana_rounds(mixture, omega, gap, accuracy), kept, False),
        (f"ef21 top-{kept}", flix_steps.ef21_step(mixture, delta), flix_rates.ef21_rate(mixture, delta),
         flix_rounds.ef21_rounds(mixture, delta, gap, accuracy), 2 * kept, True),
        ("scaffnew", flix_steps.scaffnew_step(mixture), flix_rates.scaffnew_rate(mixture) ** (1 / chance),
         flix_rounds.scaffnew_rounds(mixture, gap, accuracy), features, False),
    )  # fmt: skip
    return [
        SolverRounds(name, step, rate, count, float(sent * count), sure)
        for name, step, rate, count, sent, sure in plans
    ]


def rounds_tables(found: Sequence[SolverRounds], gap: float, accuracy: float) -> list[str | Table]:
    """Return the table of what every solver needs.

    Parameters
    ----------
    found
        What `solver_rounds` returned.
    gap, accuracy
        f~(x) - min f~ at the start and at the end.

    Returns
    -------
    list of str and rich.table.Table
        Parts to print, in this order.
    """
    table = Table(title=f"From a gap of {gap:g} to {accuracy:g}")
    for name in ("solver", "step size", "factor", "rounds", "floats up", "promise"):
        table.add_column(name, justify="left" if name in ("solver", "promise") else "right")
    for one in found:
        promise = "certain" if one.certain else "in the mean"
        table.add_row(
            one.solver, f"{one.step:.4g}", f"{one.rate:.5f}", str(one.rounds), f"{one.floats:,.0f}", promise
        )
    note = "Rounds are what theory needs, often far more than is needed; floats up are those of one client."
    return [table, note]


def rounds_plot(found: Sequence[SolverRounds], gap: float) -> Any:
    """Plot gap times factor^k of every solver.

    Parameters
    ----------
    found
        What `solver_rounds` returned.
    gap
        f~(x) - min f~ at the start.

    Returns
    -------
    plotly.graph_objects.Figure
    """
    longest = max(1, *(one.rounds for one in found))
    places = sorted({round(k * longest / SHOWN) for k in range(SHOWN + 1)})
    curves = {
        one.solver: (
            [k for k in places if k <= one.rounds],
            [gap * one.rate**k for k in places if k <= one.rounds],
        )
        for one in found
    }
    figure = line_plot(curves, title="Speed that theory promises", x="communication round", y="gap", log=True)
    figure.update_traces(mode="lines")
    return figure


def crossover_tables(
    over: str, points: Sequence[float], grid: Sequence[float], curves: Mapping[str, Any], needed: float
) -> list[str | Table]:
    """Return who is better in which range, and how many clients sharing needs.

    Parameters
    ----------
    over
        Name of the number that varies.
    points
        Where the risks are equal.
    grid
        Values of the number.
    curves
        Risks of the two methods on the grid.
    needed
        Clients until ridge around the shared centre beats ridge alone.

    Returns
    -------
    list of str and rich.table.Table
        Parts to print, in this order.
    """
    (first, ours), (second, theirs) = curves.items()
    edges = [float(grid[0]), *points, float(grid[-1])]
    table = Table(title=f"{first} or {second}, by {over}")
    for name in ("from", "to", "smaller error"):
        table.add_column(name, justify="left" if name == "smaller error" else "right")
    for low, high in itertools.pairwise(edges):
        middle = math.sqrt(low * high)
        at = min(range(len(grid)), key=lambda k: abs(math.log(grid[k] / middle)))
        table.add_row(f"{low:.4g}", f"{high:.4g}", first if ours[at] < theirs[at] else second)
    clients = f"{needed:.1f}" if math.isfinite(needed) else "no number of"
    return [table, f"Ridge around a shared centre beats ridge alone from {clients} clients on."]
