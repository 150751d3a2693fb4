"""The parts of Flower that it does not promise to keep, each named here once.

Flower's public interface (`flwr.app`, `flwr.clientapp`, `flwr.serverapp`) has apps and messages. A node that stays in
memory, and a server that lets in nodes with certificates only, need more. `tests/deploy/test_flower_parts.py` says on
the day when one of these moves; `make e2e FLWR=1.42.0` runs a federation on another version.
"""

from __future__ import annotations

import importlib
from typing import Any

WHERE = {
    "flwr.app.message": ("remove_content_from_message",),
    "flwr.cli.build": ("build_fab_from_disk",),
    "flwr.common.constant": ("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE",),
    "flwr.common.serde": ("fab_to_proto", "message_from_proto", "message_to_proto", "user_config_to_proto"),
    "flwr.proto.control_pb2": (
        "ListNodesRequest",
        "RegisterNodeRequest",
        "StartRunRequest",
        "StopRunRequest",
        "UnregisterNodeRequest",
    ),
    "flwr.proto.fleet_pb2": (
        "ActivateNodeRequest",
        "DeactivateNodeRequest",
        "PullMessagesRequest",
        "PushMessagesRequest",
    ),
    "flwr.proto.heartbeat_pb2": ("SendNodeHeartbeatRequest",),
    "flwr.proto.node_pb2": ("Node",),
    "flwr.proto.runtime_pb2": ("PullAppMessagesRequest",),
    "flwr.supercore.control": ("ControlHttpClient",),
    "flwr.supercore.fab": ("Fab",),
    "flwr.supercore.inflatable.inflatable_object": (
        "get_all_nested_objects",
        "get_object_tree",
        "iterate_object_tree",
        "no_object_id_recompute",
    ),
    "flwr.supercore.inflatable.inflatable_protobuf_utils": (
        "make_confirm_message_received_fn_protobuf",
        "make_pull_object_fn_protobuf",
        "make_push_object_fn_protobuf",
    ),
    "flwr.supercore.inflatable.inflatable_utils": (
        "ObjectPullError",
        "ObjectPushError",
        "inflate_object_from_contents",
        "pull_objects",
    ),
    "flwr.supercore.interceptors": ("RuntimeVersionHttpInterceptor",),
    "flwr.supercore.interceptors.http.utils": ("add_headers",),
    "flwr.supercore.primitives.asymmetric": ("public_key_to_bytes",),
    "flwr.superlink.main": ("create_app",),
    "flwr.supernode.fleet_http_client": ("FleetHttpClient",),
    "flwr.supernode.node_auth_http_interceptor": ("NodeAuthHttpInterceptor",),
}
MODULES = {  # modules of which a name is replaced, and the names that we use of them
    "superlink": (
        "flwr.superlink.cli.flower_superlink",
        ("get_popen_detach_kwargs", "_parse_superlink_lifespan_config", "SuperLinkLifespan"),
    ),
}
CHUNKS = {"FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(16 << 20)}  # bytes of an array that travel together
PARTS = {name: module for module, names in WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a private part of Flower; raise `ImportError` if this version does not have it."""
    if name in MODULES:
        return importlib.import_module(MODULES[name][0])
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(PARTS[name]), name, None)
    if found is None:
        raise ImportError(f"{PARTS[name]} has no {name}")
    return found


def http_of(client: Any) -> Any:
    """Return the `httpx.Client` of a client of Flower's."""
    return client._client


def runtime_of(grid: Any) -> tuple[Any, Any]:
    """Return a grid's client of the Runtime API, and for whom it asks."""
    return grid._runtime_client, grid.node


def missing_parts() -> list[str]:
    """Return what the installed version of Flower does not have, as `module.name`."""
    gone = []
    for module, names in [*WHERE.items(), *MODULES.values()]:
        try:
            found = importlib.import_module(module)
        except ImportError:
            gone.append(module)
            continue
        gone += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return gone
