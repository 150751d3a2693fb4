"""Set up differential privacy for a run, keep its secret until the run is over, and say what was spent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core import extras, systems
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.noise import Noise
from coterie.engine.privacy import ClientPrivacy, Privacy
from coterie.engine.row_privacy import Counting, RowPrivacy, planned_steps

IN_PLAN = ("epsilon", "delta", "unit", "clip")
KEY = "noise.key"  # deleted when the run is complete: without it nobody can take the noise off again


def set_up(fed: Federation, algorithm: Algorithm, plan: Mapping[str, Any], secret: bytes) -> None:
    """Give a federation the noise that the plan of a run asks for; nothing if it asks for none.

    Parameters
    ----------
    fed
        The federation, before its first round.
    algorithm
        What is run.
    plan
        The plan of the run.
    secret
        Key of the noise.
    """
    promise = from_plan(plan)
    if promise is None:
        return
    fed.promised = promise
    epsilon, delta = paid(fed)
    if epsilon >= promise.epsilon or delta >= promise.delta:
        raise SettingError(
            f"the statistics of the table have cost epsilon {epsilon:g}, and nothing is left of {promise.epsilon:g}"
        )
    if promise.unit == "row" and fed.model.whole_clients:
        raise SettingError(
            "in survival data a row is in the losses of all rows at risk with it, so that rows cannot be protected one "
            "by one; protect clients: --unit client"
        )
    settings = replace(promise, epsilon=promise.epsilon - epsilon, delta=promise.delta - delta)
    if settings.unit == "client":
        fed.privacy, fed.noise = ClientPrivacy(settings, fed.n), Noise(secret)
        return
    if fed.runtime.capabilities.models_stay:
        return  # nodes have their own noise, and refuse what goes beyond the promise
    if not isinstance(fed.runtime, LocalRuntime):
        raise SettingError("differential privacy of rows needs the clients in this process, or on nodes")
    fed.runtime.private = row_privacy(fed, fed.runtime, algorithm, settings, Noise(secret))


def paid(fed: Federation) -> tuple[float, float]:
    """Return the epsilon and delta that the statistics of the table have cost."""
    spent = () if fed.table is None else fed.table.options.get("paid", ())
    return (float(spent[0]), float(spent[1])) if spent else (0.0, 0.0)


def row_privacy(
    fed: Federation, runtime: LocalRuntime, algorithm: Algorithm, settings: Privacy, noise: Noise
) -> RowPrivacy:
    """Return the noise for the rows of a runtime, enough for all gradients that the method will take.

    How many that is shows a trial of two rounds in which all noisy gradients are zero, so that no row is read for
    what would leave.
    """
    trial = fed.fresh(dropout=0.0)
    counting = Counting(trial.n)
    assert isinstance(trial.runtime, LocalRuntime)
    trial.runtime.private = counting
    trial.enter_round(0, None)
    state = algorithm.start(trial)
    first, most = counting.most, 0
    for t in (1, 2):
        before = counting.most
        trial.enter_round(t, state)
        state = algorithm.round(trial, state, t)
        most = max(most, counting.most - before)
    steps = planned_steps(most, settings.rounds, first)
    return RowPrivacy(settings, runtime.train, runtime.ids, algorithm.batch, steps, noise)


def state(fed: Federation) -> dict[str, Any] | None:
    """Return what a checkpoint needs to hold, or None."""
    accountant = _accountant(fed)
    return None if accountant is None else accountant.state()


def restore(fed: Federation, stored: Mapping[str, Any] | None) -> None:
    """Go on from what a checkpoint held."""
    accountant = _accountant(fed)
    if accountant is not None and stored is not None:
        accountant.restore(stored)


def spent(fed: Federation) -> Tensor | None:
    """Return epsilon of every client so far, [n]; of rows on nodes what these may spend. None without privacy."""
    accountant = _accountant(fed)
    if accountant is not None:
        return accountant.spent() + paid(fed)[0]
    return None if fed.promised is None else torch.full((fed.n,), fed.promised.epsilon)


def new_secret() -> bytes:
    """Return a new key."""
    return secrets.token_bytes(32)


def keep_secret(folder: Path, secret: bytes) -> None:
    """Write a key for a resume into the run folder, readable by its owner only."""
    descriptor = systems.open_private(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(secret)


def read_secret(folder: Path, finished: bool) -> bytes:
    """Return the key of an interrupted run; a new one for a run that is complete and needs no more noise."""
    path = folder / KEY
    if path.exists():
        return path.read_bytes()
    if finished:
        return new_secret()
    raise RunError(f"{path} is missing, so the noise of this run cannot be continued. Train again.")


def forget_secret(folder: Path) -> None:
    """Delete the key."""
    (folder / KEY).unlink(missing_ok=True)


def report(fed: Federation) -> dict[str, Any] | None:
    """Return what `privacy.json` in a run folder holds: the settings and epsilon by client."""
    settings, costs = fed.promised, spent(fed)
    if settings is None or costs is None:
        return None
    by_client = {name: round(float(cost), 6) for name, cost in zip(fed.names, costs, strict=True)}
    return {**settings.to_json(), "spent": by_client}


def explain(fed: Federation) -> str | None:
    """Return one sentence on the privacy that was spent."""
    settings, costs = fed.promised, spent(fed)
    if settings is None or costs is None or not len(costs):
        return None
    who = "client with all its rows" if settings.unit == "client" else "row"
    low, high = float(costs.min()), float(costs.max())
    cost = f"{high:.3g}" if high - low < 0.005 else f"{low:.3g} to {high:.3g}, by client"
    covered = (
        "for training rows" if fed.table is None or paid(fed)[0] else "for training rows, less the encoding"
    )
    return (
        f"Privacy of every {who}: epsilon {cost} (at most {settings.epsilon:g}) with delta {settings.delta:g}, "
        f"{covered}. Scores of validation and test rows are exact."
    )


def _accountant(fed: Federation) -> ClientPrivacy | RowPrivacy | None:
    if fed.privacy is not None:
        return fed.privacy
    return fed.runtime.private if isinstance(fed.runtime, LocalRuntime) else None


def as_plan(privacy: Privacy | None) -> dict[str, Any]:
    """Return what the plan of a run says of privacy; nothing where there is none."""
    if privacy is None:
        return {}
    extras.require("privacy", "differential privacy")  # before anything is written
    return {name: getattr(privacy, name) for name in IN_PLAN}


def from_plan(plan: Mapping[str, Any]) -> Privacy | None:
    """Return what a run may cost by its plan, or None."""
    if "epsilon" not in plan:
        return None
    return Privacy(**{name: plan[name] for name in IN_PLAN}, rounds=int(plan["rounds"]))
