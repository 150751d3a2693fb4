"""Check the advice by short training runs, scored on validation rows, where theory is an approximation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine.federation import Federation
from coterie.models.heads import head_of
from coterie.select.advice import (
    EXPLANATIONS,
    FEWEST_CLIENTS,
    METHODS,
    SHARED,
    Advice,
    algorithm,
    conclude,
)
from coterie.select.prospects import ClientAdvice
from coterie.select.survey import Survey
from coterie.train.fit import fit

CERTAIN = 2.0  # standard errors by which one method must beat another


def validation_losses(fed: Federation, candidates: dict[str, float | None], rounds: int) -> dict[str, Tensor]:
    """Return the validation loss of every client [n] after a short run of each method; `fed`'s ledger counts them."""
    losses = {}
    for method, lam in candidates.items():
        run = fit(fed, algorithm(method, lam, fed), rounds, evaluate_every=0, select="last", score_test=False)
        losses[method] = run.score("validation", "loss").cpu()
        _add_traffic(fed, run.fed)
    return losses


def _add_traffic(fed: Federation, other: Federation) -> None:
    """Add what `other` sent, without evaluation, to `fed`'s ledger."""
    for entry, counts in other.ledger.entries.items():
        if entry.kind != "evaluate":
            fed.ledger.add(entry, (counts[0], counts[1], counts[2]), (counts[3], counts[4], counts[5]))


def checked(fed: Federation, advice: Advice, rounds: int) -> Advice:
    """Check advice from a linearised model by a probe, which overrules it if another method is clearly better."""
    candidates: dict[str, float | None] = {
        "ridge-local": _typical(advice.lam_alone),
        "fedavg": None,
        "rtfa": _typical(advice.lam_shared),
    }
    if advice.method in ("ridge-local", "rtfa"):
        candidates[advice.method] = advice.lam
    losses = validation_losses(fed, candidates, rounds)
    best = min(losses, key=lambda name: float(losses[name].nanmean()))
    gap, error = _paired(losses[advice.method if advice.method in losses else "fedavg"], losses[best])
    shown = ", ".join(f"{name} {float(value.nanmean()):.4g}" for name, value in losses.items())
    why = [*advice.why, f"A probe of {rounds} rounds has the validation losses {shown}."]
    changes: dict[str, Any] = {"why": why, **_traffic(fed)}
    if best == advice.method:
        rivals = [name for name in losses if (name in SHARED) != (best in SHARED)]
        confirmed = fed.n >= FEWEST_CLIENTS and all(_clearly(losses[name], losses[best]) for name in rivals)
        return dataclasses.replace(advice, sure=advice.sure or confirmed, **changes)
    if gap > CERTAIN * error:
        why.append(
            f"In the probe {best} beats {advice.method} by more than two standard errors between clients, "
            "so it is recommended for all clients."
        )
        changes["change"] = [
            f"The probe used {int(fed.rows['validation'].sum())} validation rows of {fed.n} clients; more of "
            "them, or a longer probe (--probe), could still change the advice."
        ]
        lams = torch.full((fed.n,), candidates[best] or math.nan)
        changes["sharing"] = math.nan  # the survey's, which the probe contradicts
        changes["own"] = dataclasses.replace(advice.clients, methods=[best] * fed.n, lams=lams)
        return dataclasses.replace(advice, method=best, lam=candidates[best], **changes)
    why.append(f"The probe favours {best}, but within its uncertainty.")
    relative = gap / max(float(losses[best].nanmean()), 1e-300)
    return dataclasses.replace(advice, sure=advice.sure and relative < 0.02, **changes)


def from_last_layer(fed: Federation, rounds: int) -> Advice:
    """Advise on a network: survey its last layer on the features of a briefly trained shared model, then probe.

    A network whose last layer is not `nn.Linear` is judged by the probe alone.
    """
    if not rounds or not fed.has_rows("validation"):
        raise SettingError(
            "advice on a network needs a probe on validation rows: give a split with some, and probe rounds"
        )
    if head_of(fed.model) is None:
        return from_probe_alone(fed, rounds)
    short = fit(fed, algorithm("fedavg", None, fed), rounds, evaluate_every=0, score_test=False)
    _add_traffic(fed, short.fed)
    return checked(fed, conclude(fed, Survey().carry_out(fed, short.state.x)), rounds)


def from_probe_alone(fed: Federation, rounds: int) -> Advice:
    """Advise by validation losses only: local training, the shared model, and fine-tuning with and without penalty."""
    candidates: dict[str, float | None] = {"local": None, "fedavg": None, "ftfa": None, "rtfa": 0.1}
    losses = validation_losses(fed, candidates, rounds)
    best = min(losses, key=lambda name: float(losses[name].nanmean()))
    rivals = [name for name in losses if name != best]
    sure = all(_clearly(losses[name], losses[best]) for name in rivals)
    mean = {name: float(losses[name].nanmean()) if name in losses else math.nan for name in METHODS}
    unknown = torch.full((fed.n,), math.nan)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in mean.items() if name in losses)
    unsure = [name for name in rivals if not _clearly(losses[name], losses[best])]
    why = [
        f"A probe of {rounds} rounds has the validation losses {shown}; {best} ({EXPLANATIONS[best]}) is lowest."
    ]
    if unsure:
        why.append(
            f"Not clearly better than {', '.join(unsure)}: less than two standard errors between clients."
        )
    risks = {name: losses.get(name, unknown) for name in METHODS}
    picks = torch.stack([losses[name].nan_to_num(math.inf) for name in losses]).argmin(0)
    own = ClientAdvice(
        methods=[list(losses)[int(k)] for k in picks],
        lams=torch.tensor([0.1 if list(losses)[int(k)] == "rtfa" else math.nan for k in picks]),
        risks=risks,
        intervals={name: torch.stack([value, value], 1) for name, value in risks.items()},
        probabilities=unknown,
        lam_alone=unknown,
        lam_shared=unknown,
        sigma2=unknown,
        r2=unknown,
        rho2=unknown,
        gamma=fed.d / fed.sizes.squeeze(-1).cpu(),
    )
    return Advice(
        method=best,
        lam=candidates[best],
        sure=sure,
        why=why,
        change=["A longer probe, or more validation rows, would reduce the uncertainty."],
        names=list(fed.names),
        own=own,
        risk=mean,
        **_traffic(fed),
    )


def _traffic(fed: Federation) -> dict[str, Any]:
    """Return the numbers sent per client so far."""
    return {
        "floats_up": fed.ledger.total("floats_up") / fed.n,
        "floats_down": fed.ledger.total("floats_down") / fed.n,
    }


def _typical(lam: Tensor) -> float:
    """Return the median of the finite positive penalties, or 1 if there is none."""
    known = lam[torch.isfinite(lam) & (lam > 0)]
    return float(known.median()) if len(known) else 1.0


def _paired(worse: Tensor, better: Tensor) -> tuple[float, float]:
    """Return the mean difference over clients and its standard error."""
    gap = (worse - better)[~(worse - better).isnan()]
    error = float(gap.std() / math.sqrt(len(gap))) if len(gap) > 1 else math.inf
    return float(gap.mean()), error


def _clearly(worse: Tensor, better: Tensor) -> bool:
    """Return True if the second is better by more than `CERTAIN` standard errors."""
    gap, error = _paired(worse, better)
    return gap > CERTAIN * error
