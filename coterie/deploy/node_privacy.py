"""Differential privacy at a node: its own secret noise, its own budget, and a record of what it has paid for.

A node does not rely on the server. It computes its noise from epsilon, delta and the number of rounds it was opened
with, and refuses what goes beyond them. An answer that is asked for again, as after an interruption of the server, is
the same to the last bit and is paid once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core import files
from coterie.algorithms import Algorithm
from coterie.deploy.consent import Refusal
from coterie.deploy.keys import write_private
from coterie.deploy.secure_statistics import rest
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.noise import Noise, fingerprint
from coterie.engine.privacy import NoiseScale, Privacy, private_sum
from coterie.engine.sums import HeldByClients, SumRequest
from coterie.train.private import KEY, forget_secret, new_secret, row_privacy

SPENT = "privacy.json"


class NodePrivacy:
    """Noise and budget of the clients of one node in one run.

    Parameters
    ----------
    folder
        Where the node keeps the run.
    settings
        What the run may cost, from the server's message and within the node's policy.
    clients
        Number of clients in the federation.
    runtime, algorithm
        The node's clients and what they run.
    """

    def __init__(
        self, folder: Path, settings: Privacy, clients: int, runtime: LocalRuntime, algorithm: Algorithm
    ) -> None:
        self.folder, self.settings, self.clients, self.runtime = folder, settings, clients, runtime
        if not (folder / KEY).exists():
            write_private(folder / KEY, new_secret())
        self.noise = Noise((folder / KEY).read_bytes())
        stored = files.read_json(folder / SPENT) if (folder / SPENT).exists() else {}
        self._paid: set[str] = set(stored.get("paid", []))
        if settings.unit == "row":
            fed = _alone(runtime)
            self.rows = row_privacy(fed, runtime, algorithm, settings, self.noise)
            self.rows.used = torch.tensor(stored.get("used", [0] * len(runtime.ids)), dtype=torch.long)
            runtime.private = self.rows

    @classmethod
    def of(
        cls, folder: Path, setup: dict[str, Any], runtime: LocalRuntime, algorithm: Algorithm
    ) -> NodePrivacy | None:
        """Return what the settings of a run ask for, or None."""
        if "privacy" not in setup:
            return None
        given = dict(setup["privacy"])
        clients = int(given.pop("clients"))
        return cls(folder, rest(Privacy(**given), folder), clients, runtime, algorithm)

    @contextmanager
    def paying(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[None]:
        """Run a call inside the block; record what its rows have paid, unless the same call was paid before."""
        if self.settings.unit != "row":
            yield
            return
        told = [
            header.get(name) for name in ("phase", "round", "call", "numbers", "welcome_numbers", "split")
        ]
        names = sorted(tensors)
        name = fingerprint("call", *told, names, *(tensors[one] for one in names))
        self.rows.counts = name not in self._paid
        try:
            yield
        finally:
            if self.rows.counts:
                self._paid.add(name)
                self._save()
            self.rows.counts = True

    def total(self, place: HeldByClients, request: SumRequest, among: int) -> Tensor:
        """Return the noisy sum of this node's clients, with its part of the noise."""
        call = place.call
        name = fingerprint("sum", call.phase, call.round, call.call, request.name, request.clip)
        if name not in self._paid and len(self._paid) >= self.settings.rounds:
            raise Refusal(f"this node has answered the {self.settings.rounds} noisy sums that were planned")
        self._paid.add(name)
        self._save()
        scale = NoiseScale.of(self.settings, self.clients)
        return private_sum(place, request, scale, self.noise, among)

    def finish(self) -> None:
        """Delete the key of the noise: the run is over."""
        forget_secret(self.folder)

    def _save(self) -> None:
        stored: dict[str, Any] = {"settings": self.settings.to_json(), "paid": sorted(self._paid)}
        if self.settings.unit == "row":
            stored["used"] = self.rows.used.tolist()
        files.write_json(self.folder / SPENT, stored)


def _alone(runtime: LocalRuntime) -> Federation:
    """Return a federation of this node's clients only, to count gradients."""
    rows = {name: split.size for name, split in runtime.splits.items()}
    return Federation(
        runtime,
        model=runtime.model,
        names=[str(k) for k in runtime.ids.tolist()],
        rows=rows,
        clusters=runtime.clusters,
        seed=runtime.seed,
        dtype=runtime.dtype,
    )
