"""Programs of attackers, run as processes: a node that answers nonsense, and a server app that asks too much."""

from __future__ import annotations

import itertools
import json
import secrets
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie._core import files
from coterie.deploy import keys, wire
from coterie.deploy.flower import FlowerTransport
from coterie.deploy.flower_node import Link
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller

server = ServerApp()


def raw(note: Any) -> bytes:
    text = note if isinstance(note, bytes) else json.dumps(note).encode()
    return struct.pack("<Q", len(text)) + text


def values(change: Any) -> Any:
    def forge(header: Any, tensors: Any) -> bytes:
        return wire.encode(
            header, {k: change(v) if k.startswith("value.") else v for k, v in tensors.items()}
        )

    return forge


def error(text: str) -> Any:
    return lambda h, t: wire.encode({"nonce": h["nonce"], "error": text, "code": "failed"}, {})


ANSWERS = [
    values(lambda v: torch.full_like(v, torch.nan)),
    values(lambda v: torch.full_like(v, 1e6)),
    values(lambda v: torch.full_like(v, 1e150)),
    values(lambda v: v.int()),
    values(lambda v: torch.zeros(1, 3, 11, dtype=v.dtype)),
    lambda h, t: raw(b"[" * 200_000 + b"]" * 200_000),
    lambda h, t: raw({"version": 1, "header": h, "tensors": [["value.", "float64", [1, 2**62, 0]]]}),
    lambda h, t: raw(
        {"version": 1, "header": h, "tensors": [[f"z{k}", "float64", [0]] for k in range(200_000)]}
    ),
    lambda h, t: raw(b'{"version":1,"header":{"error":"\\ud800"},"tensors":[]}'),
    error("x\x1b[2J\n12:00:00 n0 is left out: forged"),
    lambda h, t: wire.encode(h, t)[:-9],
    lambda h, t: b"",
    lambda h, t: wire.encode({**h, "at": [10**400, 0]}, t),
]


def hostile_node(folder: Path, client: str, address: str) -> None:
    """Answer every call with the next piece of nonsense, and everything else as an honest node would."""
    service = NodeService(folder / "rows.parquet", keys.private_folder(folder / "hostile"), client)
    nonsense = itertools.cycle(ANSWERS)

    def answer(message: bytes) -> bytes:
        honest = service.answer(message)
        header, tensors = wire.decode(honest)
        asked = wire.decode(message)[0]
        if asked.get("kind") == "score":
            return wire.encode(header, {k: torch.full_like(v, 1e9) for k, v in tensors.items()})
        if asked.get("kind") != "call" or asked.get("split"):
            return honest
        return next(nonsense)(header, tensors)

    Link(address, folder / "node.key", folder / "ca.crt", lambda text: print(text, flush=True)).serve(answer)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send the messages of a file to a node and store what came back; what a server that was taken over can do."""
    job = Path(str(context.run_config["jobs"]).splitlines()[0])
    plan = files.read_json(job / "messages.json")
    transport, heard = FlowerTransport(grid), []
    caller = NodeCaller(transport, deadline=60.0)
    for header in plan["messages"]:
        tensors = {"ids": torch.tensor([0])} if header["kind"] in ("statistics", "open") else {}
        if header["kind"] == "call":
            x = torch.zeros(plan["d"], dtype=torch.float64)
            tensors = {"at": torch.tensor([0]), "shared.x": x, "welcome.x": x}
        nonce = header.pop("nonce", secrets.token_hex(8))
        message = wire.encode({**header, "nonce": nonce}, tensors)
        tickets = transport.send({plan["node"]: message}, 60.0)
        content: dict[str, Any] = {}
        while tickets and not content:
            content = transport.fetch(list(tickets.values()), 5.0)
        found = caller.read(next(iter(content.values())), None) if content else None
        if isinstance(found, tuple):
            numbers = {name: value.double().tolist() for name, value in found[1].items()}
            heard.append({"header": found[0], "tensors": numbers})
        else:
            heard.append({"header": {"error": str(found)}, "tensors": {}})
    files.write_text(job / "heard.json", json.dumps(heard))


if __name__ == "__main__":
    hostile_node(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
