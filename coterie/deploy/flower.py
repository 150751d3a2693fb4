"""Coterie on Flower: the apps of SuperLink and SuperNode, the transport between them, and how runs are started.

The app bundle names `coterie.deploy.flower:server` and `...:client` and contains nothing else; no code travels.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie._core.errors import RunError
from coterie._core.printable import printable
from coterie.deploy import audit, keys, wire
from coterie.deploy import flower_private as private
from coterie.deploy.audit import AuditLog
from coterie.deploy.flower_link import leave_with_parent
from coterie.deploy.flower_node import KIND, content, let_go, received, records, reply_to
from coterie.deploy.gate import OPERATOR_HEADER
from coterie.deploy.job import work
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.deploy.transport import Undelivered
from coterie.models.installed import install

BATCH, TRIES = 20, 5  # messages that are posted together, and how often if that fails
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
serverapp = "coterie.deploy.flower:server"
clientapp = "coterie.deploy.flower:client"

[tool.flwr.app.config]
jobs = ""
"""


@client.query()
def query(message: Message, context: Context) -> Message:
    """Answer one message in its own process, as Flower's SuperNode runs it; `coterie federate node` does not."""
    config = context.node_config
    who = str(config["client"]) if config.get("client") else None
    state = Path(str(config["state"]))
    for path in str(config.get("models") or "").split(os.pathsep):
        if path:
            install(path)
    policy, log = Policy.read(Path(str(config["policy"]))), AuditLog(state / audit.FILE)
    service = NodeService(str(config["data"]), state, who, policy=policy, audit=log)
    reply: Message = reply_to(message, service.answer(content(message)))
    return reply


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the jobs that the run's configuration names, one after the other."""
    leave_with_parent()
    for job in str(context.run_config["jobs"]).splitlines():
        work(Path(job), FlowerTransport(grid))


class FlowerTransport:
    """Carry messages over Flower. A node is known by the name under which its key was registered."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._ids: dict[str, int] = {}
        self._asked = 0.0
        self._to: dict[str, int] = {}

    def send(self, envelopes: Mapping[str, wire.Content], lasts: float) -> dict[str, str]:
        """Post a message to each node that is connected, and return a ticket for each of them."""
        ids = self._signed_in(envelopes.keys())
        names = [name for name in envelopes if name in ids]
        arrays: dict[int, Any] = {}
        encoded = [
            Message(
                records(envelopes[name], arrays),
                dst_node_id=ids[name],
                message_type=KIND,
                ttl=max(lasts, 1.0) + 5.0,
            )
            for name in names
        ]
        tickets = {}
        for k in range(0, len(names), BATCH):
            some = self._posted(encoded[k : k + BATCH])
            for name, ticket in zip(names[k : k + BATCH], some, strict=True):
                if ticket:
                    tickets[name], self._to[ticket] = ticket, ids[name]
        return tickets

    def _posted(self, messages: list[Message]) -> list[str]:
        """Post messages and return their tickets, empty for those that could not be posted.

        Flower repeats a request that a busy SuperLink was slow to answer, and refuses a part that it has.
        Posting the same messages again sends what is missing.
        """
        for _ in range(TRIES):
            with suppress(private.ObjectPushError):
                return list(self.grid.push_messages(messages))
        return [""] * len(messages)

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, wire.Content | Undelivered]:
        """Return the answers that have arrived, waiting at most `wait` seconds for parts on their way."""
        found: dict[str, wire.Content | Undelivered] = {}
        end = time.monotonic() + wait
        client, node = private.runtime_of(self.grid)
        response = client.PullMessages(private.PullAppMessagesRequest(message_ids=list(tickets)))
        for announced, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            # What counts is what the SuperLink says of an answer; a node writes the answer itself.
            message = private.message_from_proto(announced)
            about = message.metadata
            ticket = about.reply_to_message_id
            asked = self._to.pop(ticket, None)
            try:
                if message.has_error():
                    let_go(client, node, about)
                    found[ticket] = Undelivered(f"{message.error.reason} (Flower error {message.error.code})")
                elif about.src_node_id != asked:
                    let_go(client, node, about)
                    found[ticket] = Undelivered("the reply came from another node")
                else:
                    found[ticket] = content(received(client, node, about, tree, end - time.monotonic()))
            except private.ObjectPullError as problem:
                found[ticket] = Undelivered(str(problem))
        return found

    def _signed_in(self, wanted: Collection[str]) -> dict[str, int]:
        """Node numbers by name, looked up again when somebody is missing."""
        if time.monotonic() - self._asked > 10.0 or any(name not in self._ids for name in wanted):
            self._ids = {node.name: node.node_id for node in self.grid.get_nodes()}
            self._asked = time.monotonic()
        return self._ids


class Operator:
    """The operator's connection to the SuperLink.

    Parameters
    ----------
    address
        host:port of the SuperLink.
    token
        The operator's token.
    authority
        Certificate of the authority; None connects without TLS.
    """

    def __init__(self, address: str, token: str, authority: Path | None) -> None:
        self.address, self.token, self.authority = address, token, authority

    def register(self, public_keys: Mapping[str, Path]) -> None:
        """Register the public keys of nodes, and remove keys that are no longer among them."""
        import httpx

        with self._control() as control:
            known = {
                node.public_key: node for node in control.ListNodes(private.ListNodesRequest()).nodes_info
            }
            wanted = {keys.public_bytes(path): name for name, path in public_keys.items()}
            for key in known.keys() - wanted.keys():
                control.UnregisterNode(private.UnregisterNodeRequest(node_id=known[key].node_id))
            for key, name in wanted.items():
                if key not in known:
                    try:
                        control.RegisterNode(private.RegisterNodeRequest(public_key=key, name=name))
                    except httpx.HTTPStatusError as problem:
                        if "already in use" not in problem.response.text:  # somebody else was quicker
                            raise

    def start(self, app: Path, jobs: list[Path]) -> int:
        """Start a run of these jobs and return its number."""
        with warnings.catch_warnings():  # Flower uses a pattern of pathspec that is on its way out
            warnings.simplefilter("ignore", DeprecationWarning)
            bundle = private.build_fab_from_disk(app)
        fab = private.Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        config = private.user_config_to_proto({"jobs": "\n".join(str(job) for job in jobs)})
        with self._control() as control:
            response = control.StartRun(
                private.StartRunRequest(fab=private.fab_to_proto(fab), override_config=config)
            )
        if not response.HasField("run_id"):
            raise RunError("the SuperLink did not start the run")
        return int(response.run_id)

    def nodes(self) -> dict[str, str]:
        """Return the state of every registered node by name, such as "online"."""
        with self._control() as control:
            return {
                node.name: str(node.status)
                for node in control.ListNodes(private.ListNodesRequest()).nodes_info
            }

    def stop(self, number: int) -> None:
        """Stop a run."""
        with self._control() as control:
            control.StopRun(private.StopRunRequest(run_id=number))

    @contextmanager
    def _control(self) -> Iterator[Any]:
        import httpx

        control = private.ControlHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.authority is None,
            root_certificates=None if self.authority is None else self.authority.read_bytes(),
            interceptors=[
                private.RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                _Token(self.token),
            ],
        )
        try:
            yield control
        except httpx.HTTPStatusError as problem:
            text = printable(" ".join(problem.response.text.split()))
            raise RunError(f"the SuperLink at {self.address} rejected the request: {text}") from None
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

        private.add_headers(context.request, {OPERATOR_HEADER: self.token})
        return call_next(context)
