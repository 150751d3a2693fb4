"""Coterie on Flower: what its SuperLink runs, what its SuperNodes run, and how a run is started.

The app bundle names `coterie.runtime.flower:server` and `...:client` and holds nothing else; no code travels.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flwr.superlink.grid.http_grid as http_grid
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.errors import RunError
from coterie.runtime import keys
from coterie.runtime.flower_link import OPERATOR_HEADER, leave_with_parent
from coterie.runtime.flower_node import BYTES, KIND, PARCEL, content, pulled, reply_to
from coterie.runtime.post import Undelivered

client = ClientApp()
server = ServerApp()

APP = """\
[project]
name = "coterie-federation"
version = "1.0.0"
description = "Configuration only: the code is the installed coterie package."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie.runtime.flower:server"
clientapp = "coterie.runtime.flower:client"

[tool.flwr.app.config]
jobs = ""
"""


@client.query()
def query(message: Message, context: Context) -> Message:
    """One message in a process of its own, as Flower's SuperNode runs it; `coterie federate node` does not."""
    from coterie.runs.site import Site

    config = context.node_config
    who = str(config["client"]) if config.get("client") else None
    site = Site(str(config["data"]), Path(str(config["state"])), who)
    return reply_to(message, site.answer(content(message)))


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The jobs that the run's configuration names, one after the other."""
    from coterie.runs.federate_job import work

    leave_with_parent()
    for job in str(context.run_config["jobs"]).splitlines():
        work(Path(job), FlowerCarrier(grid))


class FlowerCarrier:
    """Letters as Flower messages. Nodes are known by the names their keys were registered under."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._ids: dict[str, int] = {}
        self._asked = 0.0
        self._to: dict[str, int] = {}

    def send(self, letters: Mapping[str, bytes], lasts: float) -> dict[str, str]:
        """Post to the nodes that are signed in; letters to others are not taken."""
        ids = self._signed_in(letters.keys())
        names = [name for name in letters if name in ids]
        parcels = [
            Message(
                RecordDict({PARCEL: ConfigRecord({BYTES: letters[name]})}),
                dst_node_id=ids[name],
                message_type=KIND,
                ttl=max(lasts, 1.0) + 5.0,
            )
            for name in names
        ]
        tickets = {}
        for name, ticket in zip(names, self.grid.push_messages(parcels) if parcels else [], strict=True):
            if ticket:
                tickets[name], self._to[ticket] = ticket, ids[name]
        return tickets

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
        found: dict[str, bytes | Undelivered] = {}
        end = time.monotonic() + wait
        # The grid has no limit of its own for an answer whose parts do not come.
        http_grid.pull_objects = lambda **parts: pulled(**parts, wait=end - time.monotonic())
        for message in self.grid.pull_messages(list(tickets)):
            ticket = message.metadata.reply_to_message_id
            asked = self._to.pop(ticket, None)
            if message.has_error():
                found[ticket] = Undelivered(f"{message.error.reason} (Flower's error {message.error.code})")
            elif message.metadata.src_node_id != asked:
                found[ticket] = Undelivered("the answer came from another node")
            else:
                found[ticket] = content(message)
        return found

    def _signed_in(self, wanted: Collection[str]) -> dict[str, int]:
        """Node numbers by name, looked up again when somebody is missing."""
        if time.monotonic() - self._asked > 10.0 or any(name not in self._ids for name in wanted):
            self._ids = {node.name: node.node_id for node in self.grid.get_nodes()}
            self._asked = time.monotonic()
        return self._ids


class Operator:
    """The operator's way to the SuperLink: registering keys, starting and following runs."""

    def __init__(self, address: str, token: str, authority: Path | None) -> None:
        self.address, self.token, self.authority = address, token, authority

    def register(self, public_keys: Mapping[str, Path]) -> None:
        """Let these nodes in; keys that are registered already stay as they are."""
        import httpx
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest

        with self._control() as control:
            known = {node.public_key for node in control.ListNodes(ListNodesRequest()).nodes_info}
            for name, path in public_keys.items():
                key = keys.public_bytes(path)
                if key not in known:
                    try:
                        control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                    except httpx.HTTPStatusError as problem:
                        if "already in use" not in problem.response.text:  # somebody else was quicker
                            raise

    def start(self, app: Path, jobs: list[Path]) -> int:
        """Start a run of these jobs; its number."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        with warnings.catch_warnings():  # Flower uses a pattern of pathspec that is on its way out
            warnings.simplefilter("ignore", DeprecationWarning)
            bundle = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        config = user_config_to_proto({"jobs": "\n".join(str(job) for job in jobs)})
        with self._control() as control:
            response = control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config))
        if not response.HasField("run_id"):
            raise RunError("the SuperLink did not start the run")
        return int(response.run_id)

    def stop(self, number: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        with self._control() as control:
            control.StopRun(StopRunRequest(run_id=number))

    @contextmanager
    def _control(self) -> Iterator[Any]:
        import httpx
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        control = ControlHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.authority is None,
            root_certificates=None if self.authority is None else self.authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), _Token(self.token)],
        )
        try:
            yield control
        except httpx.HTTPStatusError as problem:
            text = " ".join(problem.response.text.split())[:300]
            raise RunError(f"the SuperLink at {self.address} refuses: {text}") from None
        except httpx.HTTPError as problem:
            raise RunError(
                f"the SuperLink at {self.address} cannot be reached ({problem}). Start it: coterie federate server DIR"
            ) from None
        finally:
            control.close()


class _Token:
    """Puts the operator's token onto every request."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(self, context: Any, call_next: Any) -> Any:
        from flwr.supercore.interceptors.http.utils import add_headers

        add_headers(context.request, {OPERATOR_HEADER: self.token})
        return call_next(context)
