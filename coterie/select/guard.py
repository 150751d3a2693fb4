"""The guard of `compare` and `auto`: clients against whom rows held out speak keep the model that they trained alone.

Who they are is decided on rows that are not test rows. Test rows then tell what the guard saved and what it cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.column_types import some
from coterie.models.description import description
from coterie.models.metrics import Metric, find, main_metric
from coterie.select.held_out import HeldOutRows
from coterie.select.verdict import Verdict, row_metric
from coterie.theory.verdicts import guarded
from coterie.train.own_models import keep_own
from coterie.train.run import Run


def harmed(verdict: Verdict) -> list[int]:
    """Return the clients for whom training alone is better with a probability of at least 0.8."""
    return [int(k) for k in guarded(verdict.judged).nonzero()[0]]


def can_guard(run: Run, alone: Run) -> bool:
    """Return True if clients of the run could deploy their models of the other one: same kind, rows at hand."""
    return (
        run.algorithm.name != alone.algorithm.name
        and run.personal.shape == alone.personal.shape
        and description(run.fed.model) == description(alone.fed.model)
        and run.fed.runtime.capabilities.rows_visible
        and run.fed.model.task != "language"
    )


def let_keep_own(run: Run, alone: Run, pairs: Sequence[tuple[Run, Run]], metric: Metric) -> None:
    """Let clients keep the model that they trained alone where the validation rows of these pairs of runs say so.

    Parameters
    ----------
    run, alone
        What clients would deploy, which is changed, and the run in which they trained alone.
    pairs
        Runs of the same two methods whose validation rows decide, on one split or on several.
    metric
        Metric that is reported.
    """
    clients = harmed(held_out_verdict(pairs, row_metric(metric, run.fed.model.task))) if pairs else []
    if clients:
        keep_own(run, alone, clients)


def guarded_cost(run: Run, alone: Run, judge: Metric, reported: Metric) -> float | None:
    """Return the mean validation cost over clients with the guard, without flattering it.

    Half of each client's validation rows decides whether it keeps its own model, and the other half scores what it
    then deploys, in turn. None for metrics that are no means over rows.
    """
    if not judge.is_mean:
        return None
    decide, client = (
        row_metric(reported, run.fed.model.task),
        torch.repeat_interleave(run.fed.rows["validation"]),
    )
    mine, own = (
        HeldOutRows(client.cpu(), {metric.name: _validation(one, metric) for metric in (decide, judge)})
        for one in (run, alone)
    )
    return with_guard(mine, own, judge, decide, run).cost(judge, judge, run.fed.n)


def with_guard(mine: HeldOutRows, own: HeldOutRows, judge: Metric, decide: Metric, run: Run) -> HeldOutRows:
    """Return the judge's values of what clients deploy if the other half of their rows says who keeps its own model."""
    client = mine.client.numpy()
    order = np.argsort(client, kind="stable")
    counts = np.bincount(client, minlength=run.fed.n)
    half = np.empty(len(client), dtype=int)
    half[order] = (np.arange(len(client)) - (counts.cumsum() - counts)[client[order]]) % 2
    deployed = mine.values[judge.name].clone()
    first, second = (one.values[decide.name].numpy() for one in (mine, own))
    for part in (0, 1):
        rows = half != part
        if not rows.any():
            continue
        verdict = Verdict.of_rows(
            first[rows], second[rows], client[rows], run.fed.names, decide, task=run.fed.model.task
        )
        kept = torch.from_numpy(np.isin(client, harmed(verdict)) & (half == part))
        deployed[kept] = own.values[judge.name][kept]
    return HeldOutRows(mine.client, {judge.name: deployed})


def held_out_verdict(pairs: Sequence[tuple[Run, Run]], metric: Metric) -> Verdict:
    """Return the verdict on runs against those that trained alone, on the validation rows of one or several splits."""
    values = [[_validation(run, metric) for run in pair] for pair in pairs]
    first, second = (torch.cat([pair[k] for pair in values]).numpy() for k in (0, 1))
    clients = [torch.repeat_interleave(run.fed.rows["validation"].cpu()) for run, _ in pairs]
    fed = pairs[0][0].fed
    return Verdict.of_rows(
        first,
        second,
        torch.cat(clients).numpy(),
        fed.names,
        metric,
        held_out="validation rows",
        task=fed.model.task,
    )


def _validation(run: Run, metric: Metric) -> Tensor:
    """Return the value of every validation row by the models that the run would deploy without a guard."""
    models = run.personal if run.own is None else run.own.without(run.personal)
    return run.fed.row_values(models.to(run.fed.device), "validation", [metric])[metric.name].cpu()


@dataclass(frozen=True)
class GuardEffect:
    """What a guard did to a method over one or several splits, by test rows.

    Attributes
    ----------
    method
        Name of the method.
    names
        Clients that kept their own model in some split.
    kept
        How many did in a split, on average.
    clients
        Number of clients.
    verdict
        Own models against those of the method, on the test rows of these clients; None if nobody kept its own, or
        no test row is known.
    """

    method: str
    names: list[str]
    kept: float
    clients: int
    verdict: Verdict | None

    @classmethod
    def of(
        cls, method: str, runs: Iterable[Run], metric: Metric, rows: Sequence[Tensor] | None = None
    ) -> GuardEffect:
        """Judge the guard of a method; `rows` tell test rows of several splits apart."""
        runs = list(runs)
        fed = runs[0].fed
        own, instead, client, row = [], [], [], []
        for k, run in enumerate(runs):
            if run.own is None or metric.name not in run.own.test_rows:
                continue
            whose = torch.repeat_interleave(run.fed.rows["test"].cpu())
            at = torch.isin(whose, torch.tensor(run.own.clients))
            own.append(run.test_rows[metric.name][at].numpy())
            instead.append(run.own.test_rows[metric.name][at].numpy())
            client.append(whose[at].numpy())
            row.append(np.flatnonzero(at) if rows is None else rows[k].cpu()[at].numpy())
        kept = [[] if run.own is None else run.own.clients for run in runs]
        names = [fed.names[k] for k in sorted({k for clients in kept for k in clients})]
        verdict = None
        if sum(map(len, client)):
            first, second, who, which = (np.concatenate(parts) for parts in (own, instead, client, row))
            verdict = Verdict.of_rows(first, second, who, fed.names, metric, which, task=fed.model.task)
        return cls(method, names, sum(map(len, kept)) / len(runs), fed.n, verdict)

    @property
    def saved(self) -> int:
        """Number of clients that are better off with their own model, by their test rows."""
        return 0 if self.verdict is None else self.verdict.improved

    @property
    def cost(self) -> int:
        """Number of clients that would have been better off without the guard, by their test rows."""
        return 0 if self.verdict is None else self.verdict.harmed

    def json(self) -> dict[str, Any]:
        """Return the numbers and the sentence as JSON values."""
        gain = None if self.verdict is None else self.verdict.by_rows
        return {
            "clients": self.names,
            "kept": self.kept,
            "saved": self.saved,
            "cost": self.cost,
            "gain": None if gain is None else gain.value,
            "gain_low": None if gain is None else gain.low,
            "gain_high": None if gain is None else gain.high,
            "text": self.sentence(),
        }

    def sentence(self) -> str:
        """Say who keeps a model of its own, and what that saved and cost."""
        if not self.names:
            return f"The guard lets all {self.clients:,} clients deploy {self.method}."
        text = kept_sentence(self.names, self.clients, self.method, self.kept)
        if self.verdict is None:
            return text
        rows = int(self.verdict.judged.evidence.rows.sum())
        return (
            f"{text} On their {rows:,} test row{'' if rows == 1 else 's'} the {self.verdict.title} "
            f"{self.verdict.change(self.verdict.by_rows)} through that; {self.saved:,} of them "
            f"{'is' if self.saved == 1 else 'are'} better off for it, and {self.cost:,} would be with {self.method}."
        )


def tell_effect(run: Run) -> None:
    """Judge the guard of a run by its test rows, for its folder and the report."""
    if run.own is not None:
        metric = row_metric(find(run.metric or main_metric(run.fed.model.task).name), run.fed.model.task)
        run.own.effect = GuardEffect.of(run.algorithm.name, [run], metric).json()


def kept_sentence(names: Sequence[str], clients: int, method: str, kept: float | None = None) -> str:
    """Say who keeps a model of its own; `kept` is their number in a split on average."""
    count = float(len(names)) if kept is None else kept
    few = f"{count:.0f}" if count == round(count) else f"{count:.1f}"
    verb, they = ("keeps", "it") if few == "1" else ("keep", "they")
    return (
        f"{few} of {clients:,} clients ({some(names)}) {verb} the model that {they} trained alone, because rows "
        f"held out speak against {method} for {'it' if few == '1' else 'them'}."
    )
