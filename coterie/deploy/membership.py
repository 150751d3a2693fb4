"""Who belongs to a federation: requests made at nodes, certificates signed by the operator, revocation and renewal."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.deploy import audit, keys
from coterie.deploy.audit import AuditLog

CONFIG = "federation.toml"
NODE_CONFIG = "node.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def require_name(name: str, what: str = "--node") -> None:
    """Raise `SettingError` unless a name can be that of a node, a folder and a certificate."""
    if not NAME.fullmatch(name):
        raise SettingError(f"{what} {name!r}: use letters, digits, - and _ only")


def join(folder: Path, name: str, renew: bool = False) -> Path:
    """Make a key and a request for a certificate in a node's own folder; return the request, which is no secret.

    Parameters
    ----------
    folder
        The node's folder.
    name
        Name of the node.
    renew
        Make another request with the key that is there.
    """
    require_name(name, "the name")
    if renew:
        return keys.make_request(folder, name, new=False)
    if (folder / "node.key").exists():
        raise SettingError(
            f"{folder} has a key already. Renew its certificate with --renew, or choose another folder."
        )
    return keys.make_request(folder, name)


def sign(federation: Path, request: Path, clients: Sequence[str] = (), renew: bool = False) -> Path:
    """Sign a node's request and admit the node; return the folder to send back, in which nothing is secret.

    Parameters
    ----------
    federation
        The federation folder, with `ca/`.
    request
        What `join` made.
    clients
        Clients that the node is expected to have.
    renew
        Replace the certificate of a node that is admitted already.
    """
    name, key = keys.read_request(request)
    require_name(name, f"{request}: the name")
    config = files.read_toml(federation / CONFIG)
    known = name in config["nodes"]
    if known and not renew:
        raise SettingError(f"{federation} has a node {name!r} already; --renew gives it another certificate")
    if renew and not known:
        raise SettingError(f"{federation} has no node {name!r} to renew")
    for other in sorted((federation / "nodes").glob("*/node.pub")):
        if other.parent.name != name and keys.same_key(other, key):
            raise SettingError(
                f"{request}: the node {other.parent.name!r} has this key; every node makes its own"
            )
    if name in config.get("revoked", {}) and keys.same_key(federation / "nodes" / name / "node.pub", key):
        raise SettingError(f"{request}: this key was revoked on {config['revoked'][name]}; make a new one")
    place = federation / "nodes" / name
    keys.certify(federation / "ca", key, name, place)
    (place / "ca.crt").write_bytes((federation / "server" / "ca.crt").read_bytes())
    address = f"{config['server']['host']}:{config['server']['port']}"
    files.write_toml(place / NODE_CONFIG, {"name": name, "server": address})
    config["nodes"][name] = list(clients) or config["nodes"].get(name) or [name]
    config["revoked"] = {other: day for other, day in config.get("revoked", {}).items() if other != name}
    files.write_toml(federation / CONFIG, config)
    log(
        federation,
        what="renewed" if renew else "signed",
        node=name,
        sha256=keys.fingerprint(place / keys.CERTIFICATE),
    )
    return place


def revoke(federation: Path, name: str) -> None:
    """Shut a node out from now on; a running server notices at its next request."""
    config = files.read_toml(federation / CONFIG)
    if name not in config["nodes"]:
        raise SettingError(f"{federation} has no node {name!r}. Known: {', '.join(config['nodes'])}.")
    del config["nodes"][name]
    config["revoked"] = {**config.get("revoked", {}), name: time.strftime("%Y-%m-%d")}
    files.write_toml(federation / CONFIG, config)
    log(federation, what="revoked", node=name)


def log(federation: Path, **entry: Any) -> None:
    """Write to the server's audit log."""
    keys.private_folder(federation / "server")
    AuditLog(federation / "server" / audit.FILE).write(**entry)


class Roster:
    """The nodes that may enter, read again whenever federation.toml changes.

    Parameters
    ----------
    federation
        The federation folder.
    """

    def __init__(self, federation: Path) -> None:
        self.federation = federation
        self._read_at = -1
        self._admitted: dict[bytes, str | None] = {}

    def __call__(self) -> Mapping[bytes, str | None]:
        """Return the public keys of nodes as PEM, each with the SHA-256 of its certificate, None if it has none."""
        changed = (self.federation / CONFIG).stat().st_mtime_ns
        if changed != self._read_at:
            admitted: dict[bytes, str | None] = {}
            for name in files.read_toml(self.federation / CONFIG)["nodes"]:
                place = self.federation / "nodes" / name
                certificate = place / keys.CERTIFICATE
                admitted[keys.public_bytes(place / "node.pub")] = (
                    keys.fingerprint(certificate) if certificate.exists() else None
                )
            self._admitted, self._read_at = admitted, changed
        return self._admitted


def expiring(federation: Path) -> list[str]:
    """Return warnings about certificates that expire soon."""
    remedy = "Renew it: coterie federate join FOLDER --renew at the node, coterie federate sign --renew here"
    places = [
        federation / "nodes" / name / keys.CERTIFICATE
        for name in files.read_toml(federation / CONFIG)["nodes"]
    ]
    found = [keys.expiry_warning(place, remedy) for place in places if place.exists()]
    server = "Renew it: coterie federate renew-server DIR"
    found += [keys.expiry_warning(federation / "server" / "server.crt", server)]
    return [warning for warning in found if warning]


def renew_server(federation: Path) -> None:
    """Give the server a new key and certificate for the same host names."""
    hosts = keys.hosts_of(federation / "server" / "server.crt")
    for name in ("server.key", "server.crt"):
        (federation / "server" / name).unlink(missing_ok=True)
    keys.make_server_certificate(federation / "ca", federation / "server", hosts)
    log(federation, what="renewed", node="server")
