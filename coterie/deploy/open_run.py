"""One run on one node: its clients in memory, their saved states, and the models that they deploy."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import coterie
from coterie._core import files, systems
from coterie._core.errors import CoterieError
from coterie.deploy import advice_job, disclosure, messages, own_choice, wire
from coterie.deploy.client_state import CallId, ClientStateFiles
from coterie.deploy.consent import AGAIN, Refusal
from coterie.deploy.node_data import Message
from coterie.deploy.node_model import make_model
from coterie.deploy.node_privacy import NodePrivacy
from coterie.deploy.relay import RelayKeys
from coterie.deploy.replica import Replica
from coterie.deploy.secure_sums import NodeSums
from coterie.engine.resplit import joined
from coterie.models.causal_lm import CausalLM
from coterie.select.survey import Survey
from coterie.train.run import REFIT

if TYPE_CHECKING:
    from coterie.deploy.node_service import NodeService


class Forgotten(CoterieError):
    """The state that a message starts from is not on this node."""


SETUP = "setup.safetensors"


class OpenRun:
    """One run on one node: runtime, algorithm, saved states and deployed models."""

    def __init__(self, service: NodeService, folder: Path) -> None:
        self.folder = folder
        tensors, settings = files.read_tensors(folder / SETUP)
        setup = settings["setup"]
        self.settings = settings
        self.algorithm = service.make_algorithm(setup["algorithm"]["name"], **setup["algorithm"]["settings"])
        opened = service.data.open(settings, tensors, make_model(setup, service.policy))
        self.names, self.runtime, self.notes = opened.names, opened.runtime, opened.notes
        self.refit = str(setup.get("refit", "none"))
        if self.refit != "none":
            rows = joined(self.runtime.splits, REFIT[self.refit], service.policy.min_rows_per_statistic)
            self.runtime = self.runtime.with_rows(rows, self.runtime.clusters)
        self.guard, self.log = service.guard, service.log
        self.state_files = ClientStateFiles(folder / "states")
        self.current: CallId | None = None  # the state that is in memory
        self.privacy = NodePrivacy.of(folder, setup, self.runtime, self.algorithm)
        masks = service.masks_of(str(settings["run"]))
        self.sums = NodeSums.of(self.runtime, self.algorithm, setup, masks, self.privacy)
        self.relayed, self.identity = bool(setup.get("relay")), service.identity
        self.replica: Replica | None = None  # the server's side, in a relayed run

    def call(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Run a phase from the state that the server names; new state is on disk before the answer leaves."""
        if self.relayed:
            return self._relayed_scores(header, tensors)
        reveals = self.guard.require_phase(self.algorithm, str(header["phase"]), bool(header["split"]))
        self._go_to(_stamp(header["since"]))
        before = self.runtime.store.writes
        stamp: CallId | None = self.current
        self.current = (-1, -1)  # in between, should the phase fail
        with nullcontext() if self.privacy is None else self.privacy.paying(header, tensors):
            reply, values = messages.run(self.runtime, self.algorithm, header, tensors)
        if self.sums is not None:
            reply, values = self.sums.hold(header, tensors, (reply, values))
        if self.runtime.store.writes > before:
            stamp = (int(header["round"]), int(header["call"]))
            kept = self.runtime.snapshot()
            if header.get("floor"):
                self.state_files.prune(_stamp(header["floor"]) or stamp)
            self._require_room(kept)
            self.state_files.save(stamp, kept)
        self.current = stamp
        if reveals == "nothing" and values.keys() - {"good"}:
            raise Refusal(f"{self.algorithm.name}'s {header['phase']} says it sends nothing, but does")
        if header["split"]:
            values = self._enough(values, str(header["split"]), tensors.get("at"))
        return {**reply, "at": stamp}, values

    def sum(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Take part in a sum of what the last call returned."""
        if self.sums is None:
            raise wire.WireError("message rejected: this run has no sums")
        return self.sums.answer(header)

    def relay(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Take part in the exchange of a relayed run: keys, then messages from node to node."""
        if not self.relayed:
            raise wire.WireError("message rejected: this run is not relayed")
        if header["kind"] == "relay_keys":
            if self.replica is not None:
                self.replica.give_up()
            keys = RelayKeys(str(self.settings["run"]), str(header["node"]), self.identity)
            self.replica = Replica(self.algorithm, self.runtime, self.state_files, keys)
            return {"keys": keys.public()}, {}
        replica = self._replica()
        if header["kind"] == "relay_join":
            replica.join(header["roster"], header["about"])
            return {}, {}
        return replica.relay(header, tensors)

    def _replica(self) -> Replica:
        if self.replica is None:
            raise Forgotten("this node has no keys of the other nodes")
        return self.replica

    def _relayed_scores(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Score the deployed models of a relayed run, which is all that its server may ask for."""
        self.guard.require_phase(self.algorithm, str(header["phase"]), bool(header["split"]))
        if header["phase"] != "deploy":
            raise Refusal("in a relayed run answers go to other nodes only; the server may ask for scores")
        replica = self._replica()
        replica.go_to((int(header["round"]), 0))
        sums = replica.deployed(str(header["split"]), messages.named_metrics(self.runtime, header))
        values = {f"value.{name}": value[tensors["at"]] for name, value in sums.items()}
        found = self._enough(values, str(header["split"]), tensors["at"])
        return {"encoded": {}, "at": header["since"]}, found

    def deploy(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Store the models of these clients under the round they belong to."""
        t = int(header["round"])
        if self.relayed:
            replica = self._replica()
            replica.go_to((t, 0))
            found = replica.deployed()[""][tensors["at"]]
        else:
            self._go_to(_stamp(header["since"]))
            asked = {**header, "phase": "deploy", "lasting": False, "split": "", "compress": ""}
            found = messages.run(self.runtime, self.algorithm, asked, tensors)[1]["value."]
        models = self.models(t)
        models[tensors["at"]] = found
        self._require_room({"personal": models})
        files.write_tensors(self._path(t), {"personal": models})
        return {}, {}

    def score(self, header: dict[str, Any]) -> Message:
        """Return the sums of the named metrics for the stored models on one split; NaN for a client without a model."""
        metrics = messages.named_metrics(self.runtime, header)
        models = self.models(int(header["round"]))
        missing = torch.isnan(models).any(-1, keepdim=True)
        scores = self.runtime.score(models.nan_to_num(), header["split"], metrics)
        sums = {
            f"value.{name}": value if name == "rows" else torch.where(missing, torch.nan, value)
            for name, value in scores.items()
        }
        return {}, self._enough(sums, header["split"], None)

    def finish(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Write this node's models where `coterie predict` finds them; remove states and other models."""
        if isinstance(self.algorithm, Survey):
            return self._advise()
        home = self.folder.with_name(self.folder.name.removesuffix(AGAIN))
        t, target = int(header["round"]), home / "run"
        if not self._path(t).exists() and target.exists():
            return self._told(self._stored_own(target)), {}
        trained_on = ["train"] if self.refit == "none" else list(REFIT[self.refit])
        personal, keeps = self._chosen(self.models(t), t, target)
        own = [k for k in range(len(personal)) if not bool(personal[k].isnan().any())]
        models = {"personal": personal[own], "common": tensors.get("common", personal[own].mean(0))}
        files.write_tensors(target / "models" / "models.safetensors", models)
        files.write_json(
            target / "models" / "model.json",
            {
                "algorithm": self.algorithm.name,
                "trained_on": trained_on,
                "sha256": files.sha256(target / "models" / "models.safetensors"),
                "clients": [self.names[k] for k in own],
                "trained_alone": [self.names[k] for k in keeps],
                "model": self.settings["setup"]["model"],
                **self.notes,
            },
        )
        if isinstance(self.runtime.model, CausalLM):
            places = systems.file_names([self.names[k] for k in own])
            for place, adapters in zip(places, personal[own], strict=True):
                self.runtime.model.save_adapter(adapters, target / "adapters" / place)
        config = {
            "coterie": coterie.__version__,
            "algorithm": {"name": self.algorithm.name, **self.algorithm.settings()},
            "plan": {"federated": True},
            "federation": {"run": self.settings["run"], "seed": self.settings["seed"]},
        }
        files.seal(target, "config.toml", files.as_toml(config))
        self.state_files.clear()
        if self.privacy is not None:
            self.privacy.finish()
        for old in (self.folder / "models").glob("*.safetensors"):
            systems.discard(old)
        return self._told([self.names[k] for k in keeps]), {}

    def _advise(self) -> Message:
        """Write the advice for this node's clients, which stays here."""
        if self.current is not None:
            advice_job.write(self.folder, self.runtime, self.names)
            self.log(f"advice for this node's clients: {self.folder / advice_job.FILE}")
        if self.privacy is not None:
            self.privacy.finish()
        return {}, {}

    def _chosen(self, models: Tensor, t: int, target: Path) -> tuple[Tensor, list[int]]:
        """Return the models to be deployed and the clients that keep what they trained alone.

        After refitting these are the same clients, because validation rows have trained by then.
        """
        if not self.guard.policy.guard or not own_choice.can_choose(self.runtime, self.algorithm):
            return models, []
        if self.refit == "none":
            alone = own_choice.trained_alone(self.runtime, self.algorithm, t)
            keeps = own_choice.preferring_own(self.runtime, models, alone)
        else:
            before = set(self._stored_own(target))
            keeps = [k for k, name in enumerate(self.names) if name in before]
            alone = own_choice.trained_alone(self.runtime, self.algorithm, t) if keeps else models
        if keeps:
            names = ", ".join(self.names[k] for k in keeps)
            self.log(f"{names}: validation rows speak against the models of this run; trained alone instead")
        return own_choice.replaced(models, alone, keeps), keeps

    def _stored_own(self, target: Path) -> list[str]:
        path = target / "models" / "model.json"
        return list(files.read_json(path).get("trained_alone", [])) if path.exists() else []

    def _told(self, keeps: list[str]) -> dict[str, Any]:
        """Return what a server learns of the choice: nothing in a run that keeps rows private."""
        return {} if self.privacy is not None else {"trained_alone": keeps}

    def _require_room(self, tensors: dict[str, Tensor]) -> None:
        """Refuse to store more of a run than the policy allows: a server could fill the disk otherwise."""
        most, stored = self.guard.policy.megabytes, 0
        for path in self.folder.rglob("*.safetensors"):
            with suppress(FileNotFoundError):
                stored += path.stat().st_size
        if stored + sum(value.nbytes for value in tensors.values()) > most * 1_000_000:
            raise Refusal(
                f"policy: a run may store at most {most} MB on this node's disk ([limits] megabytes)"
            )

    def _enough(self, values: dict[str, Tensor], split: str, at: Tensor | None) -> dict[str, Tensor]:
        rows = self.runtime.splits[split].size
        return disclosure.scores(self.guard.policy, values, rows if at is None else rows[at])

    def _go_to(self, stamp: CallId | None) -> None:
        if stamp == self.current:
            return
        tensors = {} if stamp is None else self.state_files.load(stamp)
        if tensors is None:
            raise Forgotten(f"no saved state of round {stamp and stamp[0]} on this node")
        self.runtime.restore(tensors)
        self.current = stamp

    def _path(self, t: int) -> Path:
        return self.folder / "models" / f"round-{t:09d}.safetensors"

    def models(self, t: int) -> Tensor:
        """Return the models stored under round t, [k, d]; NaN for a client that has none."""
        path = self._path(t)
        if path.exists():
            return files.read_tensors(path)[0]["personal"]
        shape = (len(self.runtime.ids), self.runtime.model.d)
        return torch.full(shape, torch.nan, dtype=self.runtime.dtype)


def _stamp(stored: Any) -> CallId | None:
    return None if stored is None else (int(stored[0]), int(stored[1]))
