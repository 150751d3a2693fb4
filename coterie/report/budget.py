"""Plans for a communication budget as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.report.plots import line_plot

if TYPE_CHECKING:
    from coterie.runs.plan import Plan


def plan_tables(plan: Plan, l2: float | None = None) -> list[str | Table]:
    """The choice in words, and the trade-off: what each alpha costs; `l2` is that of the model."""
    table = Table(title=f"What each alpha needs to come within {plan.target:g} of the best mixture")
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
    words = (
        f"Theory allows alpha = {plan.alpha:g}{closed}: {plan.rounds} rounds, {plan.megabytes:.4f} MB in both "
        f"directions together. After the first round the loss is at most {plan.certificate:.3g} from its best "
        "(certificate; the bound from constants alone is beside it)."
    )
    if plan.alpha == 0.0:
        alone = (
            "Theory allows alpha = 0 only: within this budget no mixture is certain to come that near its best. "
            "Each client trains alone, and nothing is sent."
        )
        return [table, alone]
    how = " ".join(
        f"--set {name}={getattr(plan.algorithm, name)}"
        for name in ("alpha", "solver", "compressor", "start_at", "lr")
    )
    return [
        table,
        words,
        f"The same as a run: coterie fit ... {'' if l2 is None else f'--l2 {l2:g} '}--algorithm flix "
        f"--rounds {plan.rounds} {how}",
    ]


def plan_plot(plan: Plan, bound: Sequence[float], measured: Sequence[float]) -> Any:
    """Theory's bound (for diana on the mean) and the measured gap of the plan's solver, round by round."""
    rounds, method = list(range(1, len(bound) + 1)), plan.algorithm
    promise = "bound" if method.solver == "dgd" else "bound on the mean"
    curves = {promise: (rounds, list(bound)), "measured": (rounds, list(measured))}
    how = method.solver if method.compressor == "identity" else f"{method.solver} with {method.compressor}"
    title = f"FLIX, alpha = {plan.alpha:g}, {how}: loss above the best mixture"
    return line_plot(curves, title=title, x="communication round", y="gap", log=True)
