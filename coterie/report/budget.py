"""Show the plan of `coterie plan` for a communication budget as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.report.plots import line_plot

if TYPE_CHECKING:
    from coterie.select.plan import BudgetPlan


def plan_tables(plan: BudgetPlan, l2: float | None = None) -> list[str | Table]:
    """Return the table of what every alpha costs, the choice in one sentence, and the command that runs it.

    Parameters
    ----------
    plan
        What `coterie.select.plan.plan` returned.
    l2
        Ridge penalty of the model, repeated in the command.

    Returns
    -------
    list of str and rich.table.Table
        Parts to print, in this order.
    """
    table = Table(title=f"Cost of each alpha to come within {plan.target:g} of the best mixture's loss")
    for name in ("alpha", "certificate", "bound", "rounds", "MB"):
        table.add_column(name, justify="right")
    for one in plan.options:
        rounds = "no rate" if one.rounds is None else str(one.rounds)
        size = "" if one.megabytes is None else f"{one.megabytes:.4f}"
        style = "bold" if one.alpha == plan.alpha else None
        table.add_row(
            f"{one.alpha:.2f}", f"{one.certificate:.3g}", f"{one.bound:.3g}", rounds, size, style=style
        )
    closed = "" if plan.closed_form_alpha is None else f" (closed form: {plan.closed_form_alpha:.3f})"
    choice = (
        f"Theory allows alpha = {plan.alpha:g}{closed}: {plan.rounds} rounds, {plan.megabytes:.4f} MB up and down "
        f"together. After the first round the loss is at most {plan.certificate:.3g} above its minimum "
        "(the certificate; the column beside it is the bound from constants alone)."
    )
    if plan.alpha == 0.0:
        local = (
            "Theory allows alpha = 0 only: within this budget no mixture is sure to come that close to its best. "
            "Each client trains alone, and nothing is sent."
        )
        return [table, local]
    how = " ".join(
        f"--set {name}={getattr(plan.algorithm, name)}"
        for name in ("alpha", "solver", "compressor", "start_at", "lr")
    )
    return [
        table,
        choice,
        f"To run it: coterie fit ... {'' if l2 is None else f'--l2 {l2:g} '}--algorithm flix "
        f"--rounds {plan.rounds} --refit none {how}",
    ]


def plan_plot(plan: BudgetPlan, bound: Sequence[float], measured: Sequence[float]) -> Any:
    """Plot the theoretical bound and the measured gap of the plan's solver, round by round.

    Parameters
    ----------
    plan
        What `coterie.select.plan.plan` returned.
    bound, measured
        What `coterie.select.plan.measure` returned. For diana the bound holds in expectation.

    Returns
    -------
    plotly.graph_objects.Figure
    """
    rounds, method = list(range(1, len(bound) + 1)), plan.algorithm
    promise = "bound" if method.solver == "dgd" else "bound on the mean"
    curves = {promise: (rounds, list(bound)), "measured": (rounds, list(measured))}
    how = method.solver if method.compressor == "identity" else f"{method.solver} with {method.compressor}"
    title = f"FLIX, alpha = {plan.alpha:g}, {how}: loss above the best mixture"
    return line_plot(curves, title=title, x="communication round", y="gap", log=True)
