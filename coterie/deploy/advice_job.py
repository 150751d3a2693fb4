"""Advice across a network: the server's side of `coterie federate advise`, and what a node keeps of it.

The server learns means over clients; with secure sums nothing else arrives. Each client works out its own advice from
what it kept and from what is recommended to all, and its node writes it to `advice.json`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.privacy import Privacy
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.select.advice import Advice
from coterie.select.advise import from_survey, require_protectable
from coterie.select.prospects import Prospects
from coterie.select.survey import calibration_of
from coterie.select.survey_rows import require_head
from coterie.theory import held_out

FILE = "advice.json"


def ask(fed: Federation, secure: bool, privacy: Privacy | None) -> Advice:
    """Return advice for the clients of nodes that opened a survey.

    Parameters
    ----------
    fed
        What `connect` returned.
    secure
        Whether only sums arrive.
    privacy
        What the advice may cost of the privacy of rows.

    Returns
    -------
    Advice
        Its reasons say how it was protected.
    """
    if not isinstance(fed.model, Glm):
        raise SettingError(
            "advice on nodes is for linear models: networks need short training runs as a check"
        )
    if privacy is not None:
        require_protectable(fed)
    fed = fed.fresh()
    fed.enter_round(0, None)
    advice = from_survey(fed, privacy)
    why = list(advice.why)
    if secure:
        why.append(
            "Only sums over clients reached the server, under masks; each node has its clients' own advice."
        )
    return dataclasses.replace(advice, why=why)


def write(folder: Path, runtime: LocalRuntime, names: list[str]) -> None:
    """Write the advice for a node's clients into its folder of the run."""
    kept = {name: runtime.store.read(name, None).double() for name in ("curve", "error", "noise", "distance")}
    told = [float(value) for value in runtime.store.read("told", None)[0]]
    share, sharing, scale, shift, clients, total = told
    rows, columns = runtime.train.size.double(), require_head(runtime.model).columns
    lam = held_out.penalties(scale)
    calibrated = calibration_of(runtime.model, sharing >= 0 and isinstance(runtime.model, Linear))
    own = Prospects.of(lam, kept, rows, columns, round(clients), total, shift, calibrated)
    known: dict[str, Any] = {"sharing": sharing if sharing >= 0 else None, "share": bool(share)}
    advised = own.advised(bool(share), sharing if sharing >= 0 else math.nan)
    files.write_json(folder / FILE, {**known, "clients": advised.json(names)})
