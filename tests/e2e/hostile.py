"""Programs of attackers, run as processes: a node that answers nonsense, and a server app that asks too much."""

from __future__ import annotations

import json
import secrets
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs as a program
from tests.deploy.lies import ATTACKS

server = ServerApp()


def too_large(answer: bytes) -> bytes:
    """An answer of 80 megabytes; the server takes 64."""
    header, _ = wire.decode(answer)
    return wire.encode(header, {"value.": torch.zeros(1, 10 << 20, dtype=torch.float64)})


LIES = {**{name: (kind, change) for name, (kind, change) in ATTACKS.items()}, "80 MB": ("call", too_large)}


def hostile_node(folder: Path, client: str, address: str) -> None:
    """Tell the lies that lies.json names for a run, one after the other, and else answer as an honest node would."""
    plan: dict[str, list[str]] = files.read_json(folder / "lies.json")
    service = NodeService(folder / "rows.parquet", keys.private_folder(folder / "hostile"), client)

    def answer(message: bytes) -> bytes:
        honest, asked = service.answer(message), wire.decode(message)[0]
        left = plan.get(str(asked.get("run")), [])
        idle = asked.get("kind") == "call" and (asked.get("split") or asked.get("phase") == "begin")
        if not left or LIES[left[0]][0] != asked.get("kind") or idle or "error" in wire.decode(honest)[0]:
            return honest  # scores are lied about when they are asked for at the end, and `begin` sends nothing up
        name = left.pop(0) if asked["kind"] == "call" else left[0]
        print(f"lie: {name}", flush=True)
        return LIES[name][1](honest)

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
